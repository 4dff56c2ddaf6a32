"""The verbs that change what leaves are: their axes, their dtype, how many they are.

Each knows the new spec from the old one, so that a plan needs no data. Axes count
within the leaf's shape; the words of a typed key are no axis.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import index as as_index
from typing import Any

import numpy as np

from ajaxckpt._drafts import (
    DraftLeaf,
    InexactError,
    convert_values,
    equal_values,
    is_array,
)
from ajaxckpt._dtypes import STORED_DTYPES
from ajaxckpt._layout import LeafSpec, shown_name
from ajaxckpt._scopes import Scope
from ajaxckpt._templates import Match, Source, Template

# numpy's own annotations leave shapes and lambdas unknown
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

Array = np.ndarray[Any, np.dtype[Any]]
Change = Callable[[Scope, str, DraftLeaf], DraftLeaf]


def _derive(
    scope: Scope,
    parts: Sequence[DraftLeaf],
    shape: tuple[int, ...] | None,
    function: Callable[..., Any],
) -> DraftLeaf:
    """Return a leaf of the first part's kind and another shape."""
    first = parts[0].spec
    spec = None if first is None or shape is None else replace(first, shape=shape)
    if spec is not None and spec.kind == "numpy scalar":
        spec = replace(spec, kind="numpy")
    return DraftLeaf(
        spec=spec,
        form="computed",
        parts=tuple(parts),
        function=function,
        rule=scope.rule,
    )


def _shape(scope: Scope, name: str, leaf: DraftLeaf) -> tuple[int, ...] | None:
    """Return a leaf's shape, None where only the skeleton knows it."""
    if not is_array(leaf.spec):
        raise scope.error(f"{_shown(scope, name)}: {leaf.spec} has no axes")
    return None if leaf.spec is None else leaf.spec.shape


def _known_shape(scope: Scope, name: str, leaf: DraftLeaf) -> tuple[int, ...]:
    """Return a leaf's shape, which decides how many leaves become of it."""
    shape = _shape(scope, name, leaf)
    if shape is None:
        problem = f"{_shown(scope, name)}: its shape is not known yet"
        raise scope.error(problem, "cut it before it is computed, not after")
    return shape


def _shown(scope: Scope, name: str) -> str:
    return shown_name(scope.full(name))


def _axis(scope: Scope, name: str, axis: int, rank: int | None) -> int:
    """Return an axis counted from the front."""
    if rank is None:
        return axis
    if not -rank <= axis < rank:
        problem = f"{_shown(scope, name)}: no axis {axis} of {rank}"
        raise scope.error(problem, "name an axis that the leaf has")
    return axis % rank


def _words(leaf: DraftLeaf) -> tuple[int, ...]:
    return (leaf.spec.key_words,) if leaf.spec and leaf.spec.kind == "key" else ()


def reshape(shape: Sequence[int]) -> Change:
    """Return the change to another shape of as many elements; -1 is computed."""
    wanted = tuple(as_index(size) for size in shape)

    def change(scope: Scope, name: str, leaf: DraftLeaf) -> DraftLeaf:
        old = _shape(scope, name, leaf)
        new = wanted if old is None else _solve(scope, name, old, wanted)
        full = (*new, *_words(leaf))
        return _derive(scope, [leaf], new, lambda array: np.reshape(array, full))

    return change


def _solve(
    scope: Scope, name: str, old: tuple[int, ...], new: tuple[int, ...]
) -> tuple[int, ...]:
    size, known = math.prod(old), math.prod(n for n in new if n != -1)
    if new.count(-1) == 1 and known:
        new = tuple(size // known if n == -1 else n for n in new)
    if any(n < 0 for n in new) or math.prod(new) != size:
        problem = f"{_shown(scope, name)}: {list(old)} cannot become {list(new)}"
        raise scope.error(problem, "name a shape of as many elements")
    return new


def squeeze(axis: int) -> Change:
    """Return the change that takes an axis of size 1 away."""

    def change(scope: Scope, name: str, leaf: DraftLeaf) -> DraftLeaf:
        shape = _shape(scope, name, leaf)
        if shape is None:
            return _derive(scope, [leaf], None, lambda x: np.squeeze(x, axis))
        at = _axis(scope, name, axis, len(shape))
        if shape[at] != 1:
            problem = f"{_shown(scope, name)}: axis {axis} of {list(shape)} is not 1"
            raise scope.error(problem, "use .take(…) to choose one of several")
        new = (*shape[:at], *shape[at + 1 :])
        return _derive(scope, [leaf], new, lambda x: np.squeeze(x, at))

    return change


def expand(size: int, axis: int) -> Change:
    """Return the change that adds an axis along which the leaf repeats."""

    def change(scope: Scope, name: str, leaf: DraftLeaf) -> DraftLeaf:
        shape = _shape(scope, name, leaf)
        at = _axis(scope, name, axis, None if shape is None else len(shape) + 1)
        new = None if shape is None else (*shape[:at], size, *shape[at:])
        return _derive(
            scope, [leaf], new, lambda x: np.repeat(np.expand_dims(x, at), size, at)
        )

    return change


def take(index: int, axis: int) -> Change:
    """Return the change that takes one index along an axis."""

    def change(scope: Scope, name: str, leaf: DraftLeaf) -> DraftLeaf:
        shape = _shape(scope, name, leaf)
        at = _axis(scope, name, axis, None if shape is None else len(shape))
        if shape is not None and not -shape[at] <= index < shape[at]:
            problem = f"{_shown(scope, name)}: no index {index} on axis {axis} of"
            raise scope.error(f"{problem} {list(shape)}", "name an index it has")
        new = None if shape is None else (*shape[:at], *shape[at + 1 :])
        return _derive(scope, [leaf], new, lambda x: np.take(x, index, at))

    return change


def cast(dtype: str, exact: bool) -> Change:
    """Return the change of dtype; every value must be exact in it unless told."""
    to = np.dtype(STORED_DTYPES[dtype].dtype)

    def convert(array: Array) -> Array:
        given = np.asarray(array)
        new = convert_values(given, to)
        back = convert_values(new, given.dtype)
        if exact and not equal_values(back, given):
            bad = given[~((back == given) | (given != given))].reshape(-1)
            shown = f"such as {bad[0]}" if bad.size else "NaN"
            raise InexactError(
                f"values, {shown}, are not exact in {dtype}; exact=False rounds"
            )
        return new

    def change(scope: Scope, name: str, leaf: DraftLeaf) -> DraftLeaf:
        if leaf.spec is not None and (_words(leaf) or not is_array(leaf.spec)):
            raise scope.error(
                f"{_shown(scope, name)}: {leaf.spec} has no dtype to cast"
            )
        shape = None if leaf.spec is None else leaf.spec.shape
        new = _derive(scope, [leaf], shape, convert)
        spec = new.spec and replace(new.spec, dtype=dtype, weak_type=False)
        return replace(new, spec=spec)

    return change


def split_leaves(
    scope: Scope,
    source: Source,
    targets: Sequence[Template],
    axis: int,
    sizes: Sequence[int] | None,
) -> bool:
    """Cut leaves along an axis into several."""
    found = source.find(scope.names())
    cut: dict[str, DraftLeaf] = {}
    for name, match in found.items():
        leaf = scope.get(name)
        shape = _known_shape(scope, name, leaf)
        at = _axis(scope, name, axis, len(shape))
        start = 0
        lengths = sizes or [shape[at] // len(targets)] * len(targets)
        if sum(lengths) != shape[at] or len(lengths) != len(targets):
            problem = f"{_shown(scope, name)}: axis {axis} of {list(shape)} is not"
            raise scope.error(f"{problem} {list(lengths)} together", "pass sizes=")
        for target, length in zip(targets, lengths, strict=True):
            new = (*shape[:at], length, *shape[at + 1 :])
            window = (*(slice(None),) * at, slice(start, start + length))
            part = _derive(scope, [leaf], new, lambda x, w=window: x[w])
            _put(scope, cut, scope.fill(target, match), part)
            start += length
    scope.replace(found, cut)
    return bool(found)


def _put(scope: Scope, new: dict[str, DraftLeaf], name: str, leaf: DraftLeaf) -> None:
    if name in new:
        hint = "give each its own target"
        raise scope.error(f"two sources for {_shown(scope, name)}", hint)
    new[name] = leaf


def concatenate_leaves(
    scope: Scope,
    source: Source,
    others: Sequence[Template],
    target: Template,
    axis: int,
) -> bool:
    """Join leaves along an axis that they all have."""
    found = source.find(scope.names())
    used: dict[str, None] = {}
    joined: dict[str, DraftLeaf] = {}
    for name, match in found.items():
        names = [name, *(scope.fill(o, match) for o in others)]
        leaves = [scope.get(item) for item in names]
        shapes = [_shape(scope, n, x) for n, x in zip(names, leaves, strict=True)]
        new = None
        at = axis
        known = [shape for shape in shapes if shape is not None]
        if len(known) == len(shapes):
            at = _axis(scope, name, axis, len(known[0]))
            length = sum(s[at] for s in known if len(s) == len(known[0]))
            new = (*known[0][:at], length, *known[0][at + 1 :])
            _check_alike(scope, names, leaves, at)
        used.update(dict.fromkeys(names))
        leaf = _derive(scope, leaves, new, lambda *x, a=at: np.concatenate(x, a))
        _put(scope, joined, scope.fill(target, match), leaf)
    scope.replace(used, joined)
    return bool(found)


def _check_alike(
    scope: Scope, names: Sequence[str], leaves: Sequence[DraftLeaf], but: int | None
) -> None:
    """Refuse to join leaves that differ in more than the length of one axis."""

    def alike(spec: LeafSpec | None) -> LeafSpec | None:
        if spec is None or but is None:
            return spec
        axes = tuple(n for place, n in enumerate(spec.shape) if place != but)
        return replace(spec, shape=axes)

    first, *rest = [alike(leaf.spec) for leaf in leaves]
    for name, leaf, spec in zip(names[1:], leaves[1:], rest, strict=True):
        if spec != first:
            both = f"{_shown(scope, names[0])} is {leaves[0].spec}"
            raise scope.error(f"{both}, {_shown(scope, name)} is {leaf.spec}")


def _order(match: Match) -> list[tuple[int, int, str]]:
    """Sort captures as numbers where they are, so that 9 comes before 10."""
    return [
        (0, int(text), "") if text.isdecimal() else (1, 0, text)
        for text in match.captures
    ]


def stack_leaves(scope: Scope, source: Source, target: Template, axis: int) -> bool:
    """Stack leaves that have the same target, in the order of their captures."""
    found = source.find(scope.names())
    groups: dict[str, list[str]] = defaultdict(list)
    for name, match in sorted(found.items(), key=lambda item: _order(item[1])):
        groups[scope.fill(target, match)].append(name)
    stacked: dict[str, DraftLeaf] = {}
    for new, names in groups.items():
        leaves = [scope.get(name) for name in names]
        _check_alike(scope, names, leaves, None)
        shape = _shape(scope, names[0], leaves[0])
        at = _axis(scope, new, axis, None if shape is None else len(shape) + 1)
        full = None if shape is None else (*shape[:at], len(names), *shape[at:])
        stacked[new] = _derive(scope, leaves, full, lambda *x, a=at: np.stack(x, a))
    scope.replace(found, stacked)
    return bool(found)


def unstack_leaves(scope: Scope, source: Source, target: Template, axis: int) -> bool:
    """Take leaves apart along an axis: one leaf per index."""
    found = source.find(scope.names())
    apart: dict[str, DraftLeaf] = {}
    for name, match in found.items():
        leaf = scope.get(name)
        shape = _known_shape(scope, name, leaf)
        at = _axis(scope, name, axis, len(shape))
        for place in range(shape[at]):
            new = scope.fill(target, match, place)
            _put(scope, apart, new, take(place, at)(scope, name, leaf))
    scope.replace(found, apart)
    return bool(found)
