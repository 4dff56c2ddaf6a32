"""Some rows of every leaf of a file: a checkpoint of many seeds, seen as one of few.

Knows a file's leaves and their axes; knows nothing of jax or pytrees. A leaf's digest
covers the whole leaf, so that checking it means reading all of it: each leaf then
streams past in pieces, of which the chosen rows alone are kept. Unchecked, only the
rows' bytes are read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import index as as_index
from types import MappingProxyType
from typing import Any, cast

import numpy as np

from ajaxckpt._dtypes import STORED_DTYPES
from ajaxckpt._errors import InvalidArgumentError, error_context
from ajaxckpt._layout import Layout, is_array, shown_name, storage_dtype
from ajaxckpt._leaf_file import LeafFile
from ajaxckpt._patterns import select_names
from ajaxckpt._payload import CHUNK_BYTES, Array, Part, as_bytes, iter_boxes
from ajaxckpt._reader import Checkpoint

Axes = int | Mapping[str, int | None]
# shorter runs of bytes are not worth a call each: the leaf is read in one go
_SHORTEST_RUN = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """What of a leaf is taken.

    Attributes:
        axis: the seeds axis, counted from the front.
        rows: the indices along it.
        keep_axis: whether the axis stays; without it there is one row.
    """

    axis: int
    rows: tuple[int, ...]
    keep_axis: bool

    def shape_of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of what is taken."""
        kept = (len(self.rows),) if self.keep_axis else ()
        return (*shape[: self.axis], *kept, *shape[self.axis + 1 :])

    def parts_of(self, part: Part) -> Iterator[Part]:
        """Cut a part of what is taken into parts of the whole leaf: views of it."""
        before, after = part.index[: self.axis], part.index[self.axis :]
        if not self.keep_axis:
            index = (*before, slice(self.rows[0], self.rows[0] + 1), *after)
            yield Part(index=index, data=np.expand_dims(part.data, self.axis))
            return
        for place, row in enumerate(self.rows[after[0]]):
            index = (*before, slice(row, row + 1), *after[1:])
            within = (*(slice(None),) * self.axis, slice(place, place + 1))
            yield Part(index=index, data=part.data[within])


def choose_axes(layout: Layout, axis: Axes) -> dict[str, int]:
    """Return the seeds axis of each leaf that has one, counted from the front.

    Args:
        layout: the leaves.
        axis: the axis of every array; or patterns to axes, the later ones winning:
            None where a leaf is shared by the seeds, and 0 where no pattern selects.

    Raises:
        InvalidArgumentError: a leaf has no such axis, or a pattern selects nothing.
    """
    chosen: dict[str, int | None] = dict.fromkeys(layout, 0)
    if isinstance(axis, Mapping):
        for text, number in axis.items():
            found = select_names((text,), list(layout), argument="axis")
            chosen.update(dict.fromkeys(found, number))
    else:
        chosen = dict.fromkeys(layout, axis)
    axes: dict[str, int] = {}
    for name, number in chosen.items():
        spec = layout[name]
        if number is None or not is_array(spec):
            continue
        rank = len(spec.shape)
        if not hasattr(number, "__index__"):
            raise InvalidArgumentError(
                f"axis: expected a whole number, or patterns to them, found {number!r}"
            )
        if not -rank <= number < rank:
            raise InvalidArgumentError(
                f"{shown_name(name)}: {spec} has no axis {number}",
                hint=f"say which leaves all seeds share: axis={{{name!r}: None}}",
            )
        axes[name] = number % rank
    return axes


def count_seeds(layout: Layout, axes: Mapping[str, int]) -> int:
    """Return how many seeds a state holds.

    Raises:
        InvalidArgumentError: the axes are not all of one size.
    """
    sizes: dict[int, str] = {}
    for name, axis in axes.items():
        sizes.setdefault(layout[name].shape[axis], name)
    if len(sizes) == 1:
        return next(iter(sizes))
    if not sizes:
        problem, details = "no leaf has a seeds axis", ()
    else:
        problem = "the seeds axes are not of one size"
        details = tuple(
            f"{shown_name(name)}: {layout[name]}, axis {axes[name]} is {size}"
            for size, name in sizes.items()
        )
    hint = "say where the axis is, and None for what the seeds share: axis={…}"
    raise InvalidArgumentError(problem, details=details, hint=hint)


def find_seed(seed: object, count: int) -> int:
    """Return the index of a seed, counted from the front.

    Raises:
        InvalidArgumentError: it is no index, or there is no such seed.
    """
    try:
        number = as_index(cast("Any", None if isinstance(seed, bool) else seed))
    except TypeError:
        problem = f"expected the index of a seed, found {seed!r}"
        raise InvalidArgumentError(problem, hint="pass 0, or another index") from None
    if not -count <= number < count:
        problem = f"no seed {number}: there are {count} seeds"
        raise InvalidArgumentError(problem, hint=f"pass 0 … {count - 1}")
    return number % count


class SeedFile(LeafFile):
    """An open file whose leaves are their chosen rows.

    Attributes:
        rows: leaf name to what is taken; other leaves are taken whole.
        layout: the specs of what is taken.
    """

    rows: Mapping[str, Rows] = MappingProxyType({})
    layout: Layout = MappingProxyType({})
    _is_checked = True

    def choose(self, rows: Mapping[str, Rows], *, checked: bool) -> None:
        """Take these rows, and check the digests or not."""
        self.rows, self._is_checked = rows, checked
        layout = dict(self.header.layout)
        for name, taken in rows.items():
            spec = layout[name]
            layout[name] = replace(spec, shape=taken.shape_of(spec.shape))
        self.layout = MappingProxyType(layout)

    def read(self, names: Sequence[str]) -> dict[str, Any]:
        """Read several leaves, their chosen rows alone, as host values."""
        whole = [name for name in names if name not in self.rows]
        values = super().read(whole)
        for name in names:
            if name in self.rows:
                spec = self.layout[name]
                values[name] = np.empty(spec.payload_shape, storage_dtype(name, spec))
                self._fill_rows(name, values[name])
        return {name: values[name] for name in names}

    def fill(self, buffers: Mapping[str, Array]) -> None:
        """Read leaves into flat uint8 buffers of what is taken of them."""
        super().fill({n: b for n, b in buffers.items() if n not in self.rows})
        for name, buffer in buffers.items():
            if name in self.rows:
                spec = self.layout[name]
                data = buffer.view(storage_dtype(name, spec))
                self._fill_rows(name, data.reshape(spec.payload_shape))

    def fill_parts(self, name: str, parts: Sequence[Part]) -> None:
        """Read what is taken of one leaf into parts that cover it."""
        if (rows := self.rows.get(name)) is None:
            super().fill_parts(name, parts)
            return
        wanted = [piece for part in parts for piece in rows.parts_of(part)]
        if self._is_checked or not self._fill_runs(name, rows, wanted):
            super().fill_parts(name, wanted)

    def iter_pieces(self, name: str) -> Iterator[Array]:
        """Yield the elements of what is taken of a leaf, in pieces."""
        if name not in self.rows:
            yield from super().iter_pieces(name)
            return
        spec = self.layout[name]
        shape, itemsize = spec.payload_shape, STORED_DTYPES[spec.dtype].itemsize
        data = self.read([name])[name]
        for box in iter_boxes(shape, itemsize):
            yield np.ascontiguousarray(data[box]).reshape(-1)

    def _fill_rows(self, name: str, data: Array) -> None:
        index = tuple(slice(0, size) for size in data.shape)
        self.fill_parts(name, [Part(index=index, data=data)])

    def _fill_runs(self, name: str, rows: Rows, wanted: Sequence[Part]) -> bool:
        """Read the bytes of whole rows and no others; tell whether that pays."""
        spec = self.header.layout[name]
        shape = spec.payload_shape
        outer, inner = shape[: rows.axis], shape[rows.axis + 1 :]
        run = math.prod(inner) * STORED_DTYPES[spec.payload_dtype].itemsize
        if run < _SHORTEST_RUN or 0 in shape or not _cover(wanted, rows.axis, shape):
            return False
        tensor = self.header.tensors[name]
        with error_context(self.path, "cannot read"):
            for part in wanted:
                row = part.index[rows.axis].start
                for count in range(math.prod(outer)):
                    head = np.unravel_index(count, outer) if outer else ()
                    target = as_bytes(part.data[(*head, 0)])
                    begin = tensor.begin + (count * shape[rows.axis] + row) * run
                    for start in range(0, run, CHUNK_BYTES):
                        piece = target[start : start + CHUNK_BYTES]
                        self._read_exactly([piece], begin + start, name)
                        self._check_elements(tensor, piece)
        return True


def _cover(parts: Sequence[Part], axis: int, shape: tuple[int, ...]) -> bool:
    """Tell whether parts hold whole rows, each of them in one piece of memory."""
    wholes = [slice(0, size) for size in shape]
    return all(
        (*part.index[:axis], *part.index[axis + 1 :])
        == (*wholes[:axis], *wholes[axis + 1 :])
        and part.data[(0,) * (axis + 1)].flags.c_contiguous
        for part in parts
    )


class SeedCheckpoint(Checkpoint):
    """A checkpoint of many seeds, seen as one of the chosen seeds."""

    def __init__(self, path: str) -> None:
        """Open a file and check its header; it is all seeds until some are chosen."""
        self.file = self._seeds = SeedFile(path)
        self._header = self.file.header
        self.path, self.nbytes = path, self.file.nbytes
        self.choose({}, checked=True)

    def choose(self, rows: Mapping[str, Rows], *, checked: bool) -> None:
        """See these rows of the leaves, and check their digests or not."""
        self._seeds.choose(rows, checked=checked)

    @property
    def rows(self) -> Mapping[str, Rows]:
        """What is taken of the leaves that have an axis of seeds."""
        return self._seeds.rows

    @property
    def layout(self) -> Layout:
        """The specs of what is taken."""
        return self._seeds.layout
