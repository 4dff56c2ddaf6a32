"""One open file: its header, and its leaves' bytes, every one of them checked.

Joins ``_parsing``, ``_payload`` and ``_paths``; knows nothing of jax or pytrees.
"""

from __future__ import annotations

import math
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import xxhash

from ajaxckpt._dtypes import STORED_DTYPES
from ajaxckpt._errors import (
    CheckpointError,
    DamagedCheckpointError,
    InvalidArgumentError,
    NotACheckpointError,
    error_context,
)
from ajaxckpt._format import Tensor
from ajaxckpt._layout import TEXT_KINDS, shown_name, storage_dtype
from ajaxckpt._names import relative_name
from ajaxckpt._parsing import (
    HEAD_BYTES,
    begins_like_ours,
    looks_like_ours,
    parse_header,
    read_length,
)
from ajaxckpt._paths import Buffer, open_file, read_into
from ajaxckpt._patterns import near_names
from ajaxckpt._payload import (
    CHUNK_BYTES,
    Array,
    Index,
    Part,
    aligned_empty,
    as_bytes,
    holds_elements,
    iter_boxes,
    scatter_box,
)
from ajaxckpt._scalars import decode_scalar, decode_text

DAMAGED_HINT = (
    "restore another checkpoint, or copy this one again from where it is whole"
)


def _read_head(fd: int, size: int, nbytes: int) -> bytes:
    head = bytearray(min(size, nbytes))
    done = read_into(fd, [head], 0)
    return bytes(head[:done])


def _check_is_ours(head: bytes, size: int) -> None:
    """Tell a damaged checkpoint from a file that never was one."""
    if looks_like_ours(head):
        return
    if size == 0:
        raise DamagedCheckpointError("the file is empty")
    if begins_like_ours(head):
        problem = f"truncated: {size} bytes, less than any checkpoint has"
        raise DamagedCheckpointError(problem)
    if not any(head[:8]):
        raise DamagedCheckpointError("begins with zeros: an unfinished write")
    raise NotACheckpointError(
        "ajaxckpt did not write this file",
        hint="pass the path of a file written by save_checkpoint",
    )


def _ignore(nbytes: int) -> None:
    del nbytes


class LeafFile:
    """An open checkpoint file, from which leaves are read by name.

    Attributes:
        path: the file, absolute.
        header: all that its header says.
        nbytes: bytes of the whole file.
        told: called with every number of payload bytes that was read.
    """

    told: Callable[[int], None] = staticmethod(_ignore)

    def __init__(self, path: str) -> None:
        """Open a file and check its header."""
        self.path = path
        self._fd, self.nbytes = open_file(path)
        self._close = weakref.finalize(self, os.close, self._fd)
        try:
            head = _read_head(self._fd, self.nbytes, HEAD_BYTES)
            _check_is_ours(head, self.nbytes)
            length = read_length(head, self.nbytes)
            raw = _read_head(self._fd, self.nbytes, length)
            self.header = parse_header(raw, self.nbytes)
        except BaseException as error:
            self._close()
            if isinstance(error, CheckpointError):
                error.path = path
            if isinstance(error, DamagedCheckpointError):
                error.hint = error.hint or DAMAGED_HINT
            raise

    def close(self) -> None:
        """Close the file; the header stays readable."""
        self._close()

    def read(self, names: Sequence[str]) -> dict[str, Any]:
        """Read several leaves, as host values, in as few calls as places allow.

        Raises:
            DamagedCheckpointError: a leaf's bytes are not those written.
            KeyError: the file has no such leaf.
        """
        for name in names:
            if name not in self.header.layout:
                raise KeyError(f"{self.path}: {self._explain_absence(name)}")
        arrays = {n: self._allocate(n) for n in names if n in self.header.tensors}
        self.fill({name: as_bytes(array) for name, array in arrays.items()})
        with error_context(self.path, "cannot read"):
            return {name: self._host_value(name, arrays.get(name)) for name in names}

    def fill(self, buffers: Mapping[str, Array]) -> None:
        """Read leaves into flat uint8 buffers of their size, and check them."""
        header = self.header
        with error_context(self.path, "cannot read"):
            for group in _group_tensors([header.tensors[name] for name in buffers]):
                self._fill_group(group, buffers)

    def fill_parts(self, name: str, parts: Sequence[Part]) -> None:
        """Read one leaf into parts that cover it, such as the shards of an array."""
        boxes = list(self._iter_boxes(name))
        with error_context(self.path, "cannot read"):
            for raw, box in zip(self._stream_boxes(name, boxes), boxes, strict=True):
                scatter_box(parts, box, raw)

    def iter_pieces(self, name: str) -> Iterator[Array]:
        """Yield a leaf's elements in C order as flat arrays of at most a chunk.

        Each array is overwritten by the next; the digest is checked after the last.
        A typed key's words are never cut apart.

        Raises:
            DamagedCheckpointError: the leaf's bytes are not those written.
        """
        with error_context(self.path, "cannot read"):
            dtype = storage_dtype(name, self.header.layout[name])
            for raw in self._stream_boxes(name, self._iter_boxes(name)):
                yield raw.view(dtype)

    def find_damage(self) -> list[str]:
        """Read every payload byte and name the leaves that are damaged."""
        damaged: list[str] = []
        for tensor in self.header.tensors.values():
            sizes = _chunk_sizes(tensor.end - tensor.begin)
            try:
                deque(self._stream(tensor, sizes), maxlen=0)
                if self.header.layout[tensor.name].kind == "str":
                    self.read([tensor.name])
            except DamagedCheckpointError as error:
                damaged += error.details or (error.problem,)
        return damaged

    def _host_value(self, name: str, array: Array | None) -> Any:
        kind = self.header.layout[name].kind
        if array is None:
            return decode_scalar(kind, self.header.values[name])
        if kind not in TEXT_KINDS:
            return array
        try:
            return decode_text(kind, array.tobytes())
        except UnicodeDecodeError as error:
            raise self._damaged(self.header.tensors[name]) from error

    def _explain_absence(self, name: object) -> str:
        if not isinstance(name, str):
            return f"leaf names are strings, found {name!r}"
        below = [leaf for leaf in self.header.layout if relative_name(leaf, name)]
        if below:
            return f"{name} is no leaf; below it are {', '.join(below[:3])}"
        near = ", ".join(near_names(name, self.header.layout)) or "none"
        return f"no leaf {name!r}; near names: {near}"

    def _iter_boxes(self, name: str) -> Iterator[Index]:
        spec = self.header.layout[name]
        itemsize = STORED_DTYPES[spec.payload_dtype].itemsize
        return iter_boxes(spec.payload_shape, itemsize)

    def _stream_boxes(self, name: str, boxes: Iterable[Index]) -> Iterator[Array]:
        itemsize = STORED_DTYPES[self.header.layout[name].payload_dtype].itemsize
        sizes = (
            math.prod(axis.stop - axis.start for axis in box) * itemsize
            for box in boxes
        )
        return self._stream(self.header.tensors[name], sizes)

    def _stream(self, tensor: Tensor, sizes: Iterable[int]) -> Iterator[Array]:
        """Yield a leaf's payload in pieces; check it once the last is through."""
        hasher, position = xxhash.xxh3_128(), tensor.begin
        staging = np.empty(CHUNK_BYTES, np.uint8)
        for size in sizes:
            raw = staging[:size]
            self._read_exactly([raw], position, tensor.name)
            hasher.update(raw.data)
            self._check_elements(tensor, raw)
            yield raw
            position += size
        self._check(tensor, hasher.hexdigest())

    def _allocate(self, name: str) -> Array:
        spec = self.header.layout[name]
        with error_context(self.path, "cannot read"):
            return aligned_empty(spec.payload_shape, storage_dtype(name, spec))

    def _read_exactly(self, buffers: Sequence[Buffer], begin: int, name: str) -> None:
        if not self._close.alive:
            raise InvalidArgumentError(
                "the checkpoint is closed",
                path=self.path,
                hint="open it again, and read before leaving the with block",
            )
        expected = sum(len(buffer) for buffer in buffers)
        start = self.header.nbytes + begin
        if (done := read_into(self._fd, buffers, start)) != expected:
            problem = f"{name}: the file ends after {done} of {expected} bytes"
            raise DamagedCheckpointError(problem, hint=DAMAGED_HINT)
        self.told(done)

    def _fill_group(self, group: list[Tensor], buffers: Mapping[str, Array]) -> None:
        if len(group) > 1:
            flat = [buffers[tensor.name] for tensor in group]
            self._read_exactly(flat, group[0].begin, group[0].name)
            for tensor, buffer in zip(group, flat, strict=True):
                self._check(tensor, xxhash.xxh3_128_hexdigest(buffer.data))
                self._check_elements(tensor, buffer)
            return
        tensor, hasher, start = group[0], xxhash.xxh3_128(), 0
        buffer = buffers[tensor.name]
        # hashed piece by piece, while the bytes are still in the processor's cache
        for size in _chunk_sizes(buffer.size):
            piece = buffer[start : start + size]
            self._read_exactly([piece], tensor.begin + start, tensor.name)
            hasher.update(piece.data)
            self._check_elements(tensor, piece)
            start += size
        self._check(tensor, hasher.hexdigest())

    def _describe_damage(self, tensor: Tensor) -> str:
        first = self.header.nbytes + tensor.begin
        last = self.header.nbytes + tensor.end - 1
        return f"{shown_name(tensor.name)}: bytes {first}-{last} are not those written"

    def _damaged(self, tensor: Tensor) -> DamagedCheckpointError:
        return DamagedCheckpointError(
            "the payload of a leaf is damaged",
            details=(self._describe_damage(tensor),),
            hint=DAMAGED_HINT,
        )

    def _check(self, tensor: Tensor, digest: str) -> None:
        if digest != tensor.digest:
            raise self._damaged(tensor)

    def _check_elements(self, tensor: Tensor, raw: Array) -> None:
        """Refuse what a right digest may hide: bytes that are no such elements."""
        spec = self.header.layout[tensor.name]
        if not holds_elements(raw, STORED_DTYPES[spec.payload_dtype]):
            raise self._damaged(tensor)


def _chunk_sizes(nbytes: int) -> Iterator[int]:
    for start in range(0, nbytes, CHUNK_BYTES):
        yield min(CHUNK_BYTES, nbytes - start)


def _group_tensors(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """Group leaves that lie side by side in the file, up to a chunk together."""
    group: list[Tensor] = []
    for tensor in sorted(tensors, key=lambda item: (item.begin, item.end)):
        adjoins = group and group[-1].end == tensor.begin
        if group and (not adjoins or tensor.end - group[0].begin > CHUNK_BYTES):
            yield group
            group = []
        group.append(tensor)
    if group:
        yield group
