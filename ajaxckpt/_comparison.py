"""How two checkpoints differ: in layout, in values, in what they say of themselves.

Knows open checkpoints; holds a few pieces of two leaves in memory, never a whole
large one; prints nothing. Leaves are the same where ``state_digest`` sees them so:
bit for bit, wherever an array lived.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from ajaxckpt._layout import ARRAY_KINDS, TEXT_KINDS, LeafSpec
from ajaxckpt._payload import Array
from ajaxckpt._reader import Checkpoint
from ajaxckpt._tables import shorten, show_value


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueDifference:
    """How the values of one leaf differ; ``a`` and ``b`` are where they first do.

    Attributes:
        name: the leaf's name.
        spec: the leaf's spec, the same in both.
        elements: how many elements it has; for typed keys, how many keys.
        differing: how many of them differ in any bit.
        largest: the largest absolute difference; None where there is no number.
        nans: how many of those that differ have NaN for a difference.
        index: the place of the first that differs.
        a: what the first checkpoint holds there, shortened.
        b: what the second one does.
    """

    name: str
    spec: LeafSpec
    elements: int
    differing: int
    largest: int | float | None
    nans: int
    index: tuple[int, ...]
    a: str
    b: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """How two checkpoints differ.

    Attributes:
        leaves: how many leaf names were compared.
        only_a: leaves that only the first has.
        only_b: leaves that only the second has.
        changed: leaves whose spec differs, with both specs.
        unequal: leaves of the same spec whose values differ.
        notes: what else differs (step, config …), with both texts; a text is None
            where there is nothing.
    """

    leaves: int
    only_a: Mapping[str, LeafSpec]
    only_b: Mapping[str, LeafSpec]
    changed: Mapping[str, tuple[LeafSpec, LeafSpec]]
    unequal: Mapping[str, LeafSpec]
    notes: Mapping[str, tuple[str | None, str | None]]

    @property
    def layout_findings(self) -> int:
        """How many leaves only one has, or both have with different specs."""
        return len(self.only_a) + len(self.only_b) + len(self.changed)


def compare_checkpoints(a: Checkpoint, b: Checkpoint, names: list[str]) -> Comparison:
    """Compare the headers of two checkpoints: all but where values differ."""
    left, right = a.layout, b.layout
    common = {n: (left[n], right[n]) for n in names if n in left and n in right}
    changed = {n: pair for n, pair in common.items() if not _same_spec(*pair)}
    return Comparison(
        leaves=len(names),
        only_a={name: left[name] for name in names if name not in right},
        only_b={name: right[name] for name in names if name not in left},
        changed=changed,
        unequal={
            name: spec
            for name, (spec, _) in common.items()
            if name not in changed and a.leaf_digest(name) != b.leaf_digest(name)
        },
        notes=_compare_facts(_flatten_facts(a), _flatten_facts(b)),
    )


def _same_spec(a: LeafSpec, b: LeafSpec) -> bool:
    same_kind = a.kind == b.kind or {a.kind, b.kind} <= ARRAY_KINDS
    return same_kind and _facts(a) == _facts(b)


def _facts(spec: LeafSpec) -> tuple[object, ...]:
    key = (spec.key_impl, spec.key_words)
    return (spec.dtype, spec.shape, spec.weak_type, *key)


def _flatten_facts(checkpoint: Checkpoint) -> dict[str, str]:
    facts = {
        "step": checkpoint.step,
        "config": checkpoint.config,
        "left out": checkpoint.excluded or None,
        "layouts": checkpoint.layouts,
    }
    return {key: show_value(value) for key, value in _flatten(facts, "")}


_LONGEST_FACT = 120  # every entry repeats the keys above it


def _flatten(facts: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in facts.items():
        if isinstance(value, dict) and value:
            below = cast("dict[str, Any]", value)
            yield from _flatten(below, f"{shorten(prefix + key, _LONGEST_FACT)}.")
        elif value is not None:
            yield shorten(prefix + key, _LONGEST_FACT), value


def _compare_facts(
    a: Mapping[str, str], b: Mapping[str, str]
) -> dict[str, tuple[str | None, str | None]]:
    pairs = {key: (a.get(key), b.get(key)) for key in {**a, **b}}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def compare_values(
    a: Checkpoint, b: Checkpoint, name: str, spec: LeafSpec
) -> ValueDifference:
    """Find how the values of a leaf differ that has the same spec in both.

    Raises:
        DamagedCheckpointError: a leaf's bytes are not those written.
    """
    if not spec.payload_dtype or spec.kind in TEXT_KINDS:
        return _compare_scalars(name, spec, a[name], b[name])
    found = list(_iter_differences(a.iter_pieces(name), b.iter_pieces(name), spec))
    largest = [piece.largest for piece in found if piece.largest is not None]
    first = found[0]
    return ValueDifference(
        name=name,
        spec=spec,
        elements=math.prod(spec.shape),
        differing=sum(piece.differing for piece in found),
        largest=max(largest, default=None),
        nans=sum(piece.nans for piece in found),
        index=tuple(map(int, np.unravel_index(first.position, spec.shape))),
        a=first.a,
        b=first.b,
    )


def _compare_scalars(
    name: str, spec: LeafSpec, a: object, b: object
) -> ValueDifference:
    return ValueDifference(
        name=name,
        spec=spec,
        elements=1,
        differing=1,
        largest=None,
        nans=0,
        index=(),
        a=show_value(a),
        b=show_value(b),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """How one piece of a leaf differs; ``position`` counts the leaf's elements."""

    differing: int
    largest: int | float | None
    nans: int
    position: int
    a: str
    b: str


def _iter_differences(
    left: Iterator[Array], right: Iterator[Array], spec: LeafSpec
) -> Iterator[_Piece]:
    words, position = spec.key_words or 1, 0
    for a, b in zip(left, right, strict=True):
        rows_a, rows_b = a.reshape(-1, words), b.reshape(-1, words)
        places = np.flatnonzero((_bits(rows_a) != _bits(rows_b)).any(axis=1))
        if places.size:
            at = int(places[0])
            distance = _measure(rows_a[places], rows_b[places], spec)
            defined = distance[distance == distance]
            yield _Piece(
                differing=places.size,
                largest=defined.max().item() if defined.size else None,
                nans=distance.size - defined.size,
                position=position + at,
                a=_show_row(rows_a[at]),
                b=_show_row(rows_b[at]),
            )
        position += len(rows_a)


def _bits(rows: Array) -> Array:
    """View elements as unsigned integers, for which NaN equals itself."""
    size = min(rows.dtype.itemsize, 8)
    return rows.view(np.dtype(f"u{size}"))


def _measure(a: Array, b: Array, spec: LeafSpec) -> Array:
    """Return the absolute differences of elements; none where they are no numbers."""
    if spec.kind == "key" or spec.dtype == "bool":
        return np.empty(0)
    if spec.dtype.startswith(("int", "uint")):
        wide = np.dtype(np.int64 if spec.dtype.startswith("int") else np.uint64)
        low, high = np.sort((a.astype(wide), b.astype(wide)), axis=0).view(np.uint64)
        return high - low  # modulo 2**64, in which every difference fits
    wide = np.dtype(np.complex128 if spec.dtype.startswith("complex") else np.float64)
    with np.errstate(all="ignore"):
        return np.abs(a.astype(wide) - b.astype(wide))


def _show_row(row: Array) -> str:
    """Spell one element, or the words of one typed key."""
    words = list(map(str, row))
    return words[0] if len(words) == 1 else f"[{', '.join(words)}]"
