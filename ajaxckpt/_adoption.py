"""Room in a skeleton for leaves that it lacks: the file's, which a rule adopts.

Knows jax's pytrees; knows nothing of files. Nodes are never probed: one level is
flattened at a time, and only the ancestors of what is adopted are built anew.
"""

# jax's own annotations are partial
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, cast

import jax
import numpy as np

from ajaxckpt._errors import MigrationError, UnsupportedLeafError
from ajaxckpt._layout import ARRAY_KINDS, LeafSpec, storage_dtype
from ajaxckpt._names import join_names, split_name
from ajaxckpt._tree import flatten_state, name_entry

_INT = re.compile("-?[0-9]+")
Nested = dict[str, Any]
_EMPTY = {
    "bool": False,
    "int": 0,
    "float": 0.0,
    "complex": 0j,
    "str": "",
    "bytes": b"",
}


def extend_skeleton(skeleton: Any, adopted: Mapping[str, LeafSpec]) -> Any:
    """Return a skeleton with places for more leaves.

    Args:
        skeleton: any pytree; it is not changed.
        adopted: name to spec of the leaves it lacks. Each comes under a dict node
            that is there, or in place of a None.

    Raises:
        MigrationError: there is no such place for a leaf.
    """
    wanted: Nested = {}
    for name, spec in adopted.items():
        if not name:
            raise _no_place('""', "the skeleton itself")
        *parents, last = split_name(name)
        node = wanted
        for segment in parents:
            node = node.setdefault(segment, {})
        node[last] = _placeholder(name, spec)
    extended = _extend(skeleton, wanted, "")
    try:
        placed = flatten_state(extended).leaves
    except UnsupportedLeafError as error:
        raise _no_place(", ".join(adopted), f"a node that {error.problem}") from error
    for name in adopted:
        if name not in placed:
            raise _no_place(name, "a node that does not keep it")
    return extended


def _placeholder(name: str, spec: LeafSpec) -> Any:
    """Return a leaf without data that describes as the spec does."""
    if spec.kind == "key":
        key = jax.eval_shape(lambda: jax.random.key(0, impl=spec.key_impl))
        return jax.ShapeDtypeStruct(spec.shape, key.dtype)
    if spec.kind in ARRAY_KINDS:
        dtype = storage_dtype(name, spec)
        if spec.kind == "jax":
            return jax.ShapeDtypeStruct(spec.shape, dtype, weak_type=spec.weak_type)
        if spec.kind == "numpy scalar":
            return dtype.type()
        return np.broadcast_to(np.zeros((), dtype), spec.shape)
    if spec.kind in _EMPTY:
        return _EMPTY[spec.kind]
    problem = f"{name}: {spec} cannot be adopted: its code is the skeleton's"
    raise MigrationError(problem, hint="add it to the skeleton, or drop it")


def _no_place(name: str, found: str) -> MigrationError:
    return MigrationError(
        f"{name}: cannot be adopted: there stands {found}",
        hint="give the skeleton the field as None, or a dict to hold it",
    )


def _first_leaf(wanted: Any, prefix: str) -> str:
    while isinstance(wanted, dict):
        segment, wanted = next(iter(cast("Nested", wanted).items()))
        prefix = join_names(prefix, segment)
    return prefix


def _extend(node: Any, wanted: Any, name: str) -> Any:
    """Return a node with places for what is wanted below it."""
    if node is None:
        return _build(wanted, name)
    pairs, treedef = jax.tree_util.tree_flatten_with_path(
        node, is_leaf=lambda item: item is not node
    )
    is_leaf = treedef == jax.tree_util.tree_structure(0)
    if is_leaf or not isinstance(wanted, dict):
        raise _no_place(_first_leaf(wanted, name), f"a {type(node).__qualname__}")
    fresh = dict(cast("Nested", wanted))
    children: list[Any] = []
    for path, child in pairs:
        segment = name_entry(path[0])
        below = fresh.pop(segment, None)
        inner = join_names(name, segment)
        children.append(child if below is None else _extend(child, below, inner))
    rebuilt = jax.tree_util.tree_unflatten(treedef, children)
    return _insert(rebuilt, fresh, name) if fresh else rebuilt


def _insert(node: Any, fresh: Nested, name: str) -> Any:
    """Return a dict node with more keys."""
    if not isinstance(node, Mapping):
        place = _first_leaf(fresh, name)
        raise _no_place(place, f"a {type(node).__qualname__} without this field")
    items = {
        _key(segment, join_names(name, segment)): _build(
            below, join_names(name, segment)
        )
        for segment, below in fresh.items()
    }
    if isinstance(node, defaultdict):
        return defaultdict(node.default_factory, {**node, **items})
    try:
        return cast("Any", type(node))({**node, **items})
    except Exception as error:
        what = f"a {type(node).__qualname__} that no dict makes"
        raise _no_place(_first_leaf(fresh, name), what) from error


def _build(wanted: Any, name: str) -> Any:
    """Return nested dicts for what is wanted in place of nothing."""
    if not isinstance(wanted, dict):
        return wanted
    return {
        _key(segment, join_names(name, segment)): _build(
            below, join_names(name, segment)
        )
        for segment, below in cast("Nested", wanted).items()
    }


def _key(segment: str, name: str) -> str | int:
    """Return the dict key that a segment spells."""
    if segment[0] == "<":
        raise _no_place(name, "a key that is neither text nor a whole number")
    if segment[0] == '"':
        return _unquote(segment)
    return int(segment) if _INT.fullmatch(segment) else segment


def _unquote(segment: str) -> str:
    text, place = "", 1
    while place < len(segment) - 1:
        if segment[place] != "\\":
            text, place = text + segment[place], place + 1
        elif segment[place + 1] == "u":
            code = segment[place + 2 : place + 6]
            text, place = text + chr(int(code, 16)), place + 6
        else:
            text, place = text + segment[place + 1], place + 2
    return text
