"""A state as it is now, in memory of its own, while training goes on.

Knows leaf data on the host; knows nothing of pytrees, files or threads. Neither a
donation nor a write into a numpy leaf can change a snapshot: what others could write
is copied, into buffers that are used again once the snapshot is written.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from ajaxckpt._payload import Array, LeafData, Part, aligned_empty, offset_of
from ajaxckpt._writer import Source, StateData

_Key = tuple[tuple[int, ...], np.dtype[Any], int]


class Arena:
    """Buffers to copy leaves into; those given back are used again.

    Fresh memory costs more than the copy: the kernel clears every page of it first.
    """

    def __init__(self) -> None:
        """Hold no buffer yet."""
        self._lock = threading.Lock()
        self._free: dict[_Key, list[Array]] = defaultdict(list)

    def copy(self, array: Array) -> Array:
        """Return a contiguous copy, in a buffer of this arena."""
        key = _key_of(array)
        with self._lock:
            free = self._free[key]
            buffer = free.pop() if free else None
        if buffer is None:
            buffer = aligned_empty(*key)
        np.copyto(buffer, array, casting="no")
        return buffer

    def take_back(self, buffers: list[Array]) -> None:
        """Use buffers again: nobody reads them any more."""
        with self._lock:
            for buffer in buffers:
                self._free[_key_of(buffer)].append(buffer)

    def clear(self) -> None:
        """Give the memory back."""
        with self._lock:
            self._free.clear()


def _key_of(array: Array) -> _Key:
    """Return what a buffer must share with an array.

    The offset, too: between memory that is aligned differently a large copy was
    measured to take three times as long.
    """
    return array.shape, array.dtype, offset_of(array)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A state that nothing can change any more.

    Attributes:
        data: the state, ready to be written.
        nbytes: bytes that were copied.
    """

    data: StateData
    nbytes: int
    _arena: Arena
    _buffers: list[Array]
    _sources: dict[str, Source]

    def release(self) -> None:
        """Give the buffers back; there is nothing in the snapshot after this."""
        self._arena.take_back(self._buffers)
        self._buffers.clear()
        self._sources.clear()

    def discard(self) -> None:
        """Give the memory back, that of the buffers too."""
        self.release()
        self._arena.clear()


def take_snapshot(data: StateData, arena: Arena) -> Snapshot:
    """Copy what others could still change, leaf by leaf."""
    buffers: list[Array] = []
    try:
        sources: dict[str, Source] = {
            name: partial(_same, _freeze(source(), arena, buffers))
            for name, source in data.sources.items()
        }
    except BaseException:
        arena.take_back(buffers)
        raise
    arena.clear()  # what this state did not need, the next one will not
    return Snapshot(
        data=replace(data, sources=sources),
        nbytes=sum(buffer.nbytes for buffer in buffers),
        _arena=arena,
        _buffers=buffers,
        _sources=sources,
    )


def _same(value: Any) -> Any:
    return value


def _freeze(
    leaf: LeafData | bytes, arena: Arena, buffers: list[Array]
) -> LeafData | bytes:
    if isinstance(leaf, bytes) or leaf.frozen:
        return leaf
    parts: list[Part] = []
    for part in leaf.parts:
        copy = arena.copy(part.data)
        buffers.append(copy)
        parts.append(Part(index=part.index, data=copy))
    return replace(leaf, parts=parts, frozen=True)
