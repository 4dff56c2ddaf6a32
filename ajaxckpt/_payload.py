"""Where array elements become payload bytes, and come back, in bounded pieces.

Knows numpy arrays and dtypes; knows nothing of jax, headers or files. A leaf may
lie in several parts (the shards of a jax array). Its payload is its elements in C
order, cut into boxes: index ranges whose elements follow each other in the file.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ajaxckpt._dtypes import StoredDtype

CHUNK_BYTES = 1 << 20
_ALIGNMENT = 64

Array = np.ndarray[Any, np.dtype[Any]]
Index = tuple[slice, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One rectangle of a leaf: where it lies in the whole, and its elements."""

    index: Index
    data: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafData:
    """The elements of one leaf on the host.

    Attributes:
        row: how the elements are stored.
        shape: the shape of the whole.
        parts: rectangles that cover the whole without overlap.
        frozen: whether nobody can write to the parts while they are read.
    """

    row: StoredDtype
    shape: tuple[int, ...]
    parts: Sequence[Part]
    frozen: bool


def whole_leaf(array: Array, row: StoredDtype, *, frozen: bool) -> LeafData:
    """Wrap an array that lies in one piece."""
    index = tuple(slice(0, size) for size in array.shape)
    parts = (Part(index=index, data=array),)
    return LeafData(row=row, shape=array.shape, parts=parts, frozen=frozen)


def iter_boxes(
    shape: tuple[int, ...], itemsize: int, limit: int = CHUNK_BYTES
) -> Iterator[Index]:
    """Cut an array into boxes of at most ``limit`` bytes, in C order."""
    if math.prod(shape) == 0:
        return
    inner, axis = itemsize, len(shape)
    while axis and inner * shape[axis - 1] <= limit:
        axis -= 1
        inner *= shape[axis]
    whole = tuple(slice(0, size) for size in shape[axis:])
    if axis == 0:
        yield whole
        return
    rows, length = max(1, limit // inner), shape[axis - 1]
    outer = shape[: axis - 1]
    for count in range(math.prod(outer)):
        place = np.unravel_index(count, outer) if outer else ()
        head = tuple(slice(int(i), int(i) + 1) for i in place)
        for start in range(0, length, rows):
            yield (*head, slice(start, min(start + rows, length)), *whole)


def as_bytes(array: Array) -> Array:
    """View a contiguous array as its bytes, a flat uint8 array."""
    return array.reshape(-1).view(np.uint8)


def _intersect(box: Index, part: Index) -> tuple[Index, Index] | None:
    """Return where two rectangles meet: within the box, and within the part."""
    in_box: list[slice] = []
    in_part: list[slice] = []
    for b, p in zip(box, part, strict=True):
        start, stop = max(b.start, p.start), min(b.stop, p.stop)
        if start >= stop:
            return None
        in_box.append(slice(start - b.start, stop - b.start))
        in_part.append(slice(start - p.start, stop - p.start))
    return tuple(in_box), tuple(in_part)


def _gather_box(leaf: LeafData, box: Index) -> Array:
    """Copy one box out of the parts, little-endian and contiguous."""
    staged = np.empty([s.stop - s.start for s in box], dtype=leaf.row.dtype)
    for part in leaf.parts:
        if (meet := _intersect(box, part.index)) is not None:
            staged[meet[0]] = part.data[meet[1]]
    raw = as_bytes(staged)
    if leaf.row.name == "bool":  # numpy lets a view put any byte there
        np.minimum(raw, 1, out=raw)
    elif leaf.row.bits:
        raw &= (1 << leaf.row.bits) - 1
    return raw


def holds_elements(raw: Array, row: StoredDtype) -> bool:
    """Tell whether payload bytes are elements of the dtype, as this module writes."""
    bits = 1 if row.name == "bool" else row.bits
    return not bits or raw.size == 0 or int(raw.max()) < 1 << bits


def _lies_as_stored(leaf: LeafData) -> bool:
    """Tell whether the leaf's own memory is its payload, and stays so."""
    masked = leaf.row.bits or leaf.row.name == "bool"
    if not leaf.frozen or len(leaf.parts) != 1 or masked:
        return False
    data = leaf.parts[0].data
    return data.flags.c_contiguous and data.dtype == leaf.row.dtype


def iter_payload(leaf: LeafData) -> Iterator[Array]:
    """Yield a leaf's payload as flat uint8 arrays of at most CHUNK_BYTES.

    A leaf that another thread may write is copied chunk by chunk, so that what is
    hashed is what is written. Nothing larger than a chunk is ever copied.
    """
    if _lies_as_stored(leaf):
        raw = as_bytes(leaf.parts[0].data)
        for start in range(0, raw.size, CHUNK_BYTES):
            yield raw[start : start + CHUNK_BYTES]
        return
    for box in iter_boxes(leaf.shape, leaf.row.itemsize):
        yield _gather_box(leaf, box)


def scatter_box(parts: Sequence[Part], box: Index, raw: Array) -> None:
    """Write one box of payload bytes into every part it touches."""
    shape = [s.stop - s.start for s in box]
    for part in parts:
        if (meet := _intersect(box, part.index)) is not None:
            staged = raw.view(part.data.dtype).reshape(shape)
            part.data[meet[1]] = staged[meet[0]]


def offset_of(array: Array) -> int:
    """Return how far behind a 64-byte boundary an array starts."""
    return array.__array_interface__["data"][0] % _ALIGNMENT


def aligned_empty(
    shape: tuple[int, ...], dtype: np.dtype[Any], offset: int = 0
) -> Array:
    """Allocate an array that starts on a 64-byte boundary, or so far behind one.

    JAX takes a buffer on the boundary over without a copy on CPU; ``np.empty`` alone
    starts on 16 bytes, and JAX copies.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    raw = np.empty(nbytes + _ALIGNMENT, dtype=np.uint8)
    start = (offset - raw.__array_interface__["data"][0]) % _ALIGNMENT
    return raw[start : start + nbytes].view(dtype).reshape(shape)
