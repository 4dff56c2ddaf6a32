"""Migrated leaves by name, read from the file's leaves when they are asked for.

The source of a restore that migrates: a leaf at a time, so that no more than one is
held beside what it fills. Knows drafts and open files; knows nothing of jax.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ajaxckpt._drafts import DraftLeaf, evaluate_leaf
from ajaxckpt._errors import error_context
from ajaxckpt._layout import Layout, storage_dtype
from ajaxckpt._leaf_file import LeafFile
from ajaxckpt._payload import CHUNK_BYTES, Array, Part, as_bytes, iter_boxes


class DerivedLeaves:
    """The leaves of a draft as a source to restore from.

    Stored leaves go the file's own way, whatever their name; computed ones are
    made whole, one at a time.
    """

    def __init__(
        self, file: LeafFile, leaves: Mapping[str, DraftLeaf], layout: Layout
    ) -> None:
        """Join an open file, the draft's leaves by name, and their specs."""
        self._file = file
        self._leaves = leaves
        self._layout = layout

    def fill(self, buffers: Mapping[str, Array]) -> None:
        """Read leaves into flat uint8 buffers of their size."""
        waiting = dict(buffers)
        while waiting:  # a stored leaf that several have comes in several rounds
            stored: dict[str, str] = {}
            for name in waiting:
                if self._leaves[name].form == "stored":
                    stored.setdefault(self._leaves[name].stored, name)
            if not stored:
                break
            self._file.fill({s: waiting[name] for s, name in stored.items()})
            for name in stored.values():
                del waiting[name]
        for name, buffer in waiting.items():
            np.copyto(buffer, as_bytes(self._array(name)))

    def fill_parts(self, name: str, parts: Sequence[Part]) -> None:
        """Read one leaf into parts that cover it."""
        leaf = self._leaves[name]
        if leaf.form == "stored":
            self._file.fill_parts(leaf.stored, parts)
            return
        array = self._array(name)
        for part in parts:
            np.copyto(part.data, array[part.index])

    def iter_pieces(self, name: str) -> Iterator[Array]:
        """Yield one leaf's elements in C order."""
        leaf = self._leaves[name]
        if leaf.form == "stored":
            yield from self._file.iter_pieces(leaf.stored)
            return
        flat = self._array(name).reshape(-1)
        for (window,) in iter_boxes(flat.shape, flat.dtype.itemsize, CHUNK_BYTES):
            yield flat[window]

    def read(self, names: Sequence[str]) -> dict[str, Any]:
        """Read leaves as host values."""
        leaves = {name: self._leaves[name] for name in names}
        stored = {n: leaf.stored for n, leaf in leaves.items() if leaf.form == "stored"}
        values = self._file.read(list(dict.fromkeys(stored.values())))
        taken: set[str] = set()
        found: dict[str, Any] = {}
        for name, source in stored.items():  # no two may share memory
            again = source in taken
            value = self._file.read([source])[source] if again else values[source]
            taken.add(source)
            found[name] = value
        return {n: found[n] if n in found else self._value(n) for n in names}

    def _value(self, name: str) -> Any:
        with error_context(self._file.path, "cannot migrate"):
            leaf, spec = self._leaves[name], self._layout[name]
            return evaluate_leaf(leaf, name, spec, self._file.read)

    def _array(self, name: str) -> Array:
        """Compute a leaf: contiguous, of its stored dtype."""
        spec = self._layout[name]
        array = np.asarray(self._value(name), dtype=storage_dtype(name, spec))
        return np.ascontiguousarray(array).reshape(spec.payload_shape)
