"""Pytrees to named leaves and back.

Knows jax; knows nothing of bytes or files. A tree is flattened once, worked on as
a flat list, and unflattened once with the skeleton's own treedef: nodes are never
probed and classes never rebuilt.
"""

# jax's own annotations are partial
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false
# pyright: reportUnknownLambdaType=false, reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
from jax.tree_util import (
    DictKey,
    FlattenedIndexKey,
    GetAttrKey,
    SequenceKey,
    tree_flatten_with_path,
)

from ajaxckpt._errors import UnsupportedLeafError
from ajaxckpt._names import UnnameableKeyError, format_key, join_segments


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatState:
    """A flattened pytree.

    Attributes:
        leaves: leaf name to leaf, in the tree's order.
        treedef: puts the leaves together again.
    """

    leaves: Mapping[str, Any]
    treedef: Any


def name_entry(entry: Any) -> str:
    """Name one key-path entry."""
    if isinstance(entry, DictKey | FlattenedIndexKey):
        return format_key(cast("object", entry.key))
    if isinstance(entry, SequenceKey):
        return format_key(entry.idx)
    if isinstance(entry, GetAttrKey):
        return format_key(entry.name)
    return format_key(str(entry))


def _name_path(path: Sequence[Any]) -> str:
    segments: list[str] = []
    for entry in path:
        try:
            segments.append(name_entry(entry))
        except UnnameableKeyError as error:
            parent = join_segments(segments)
            raise UnsupportedLeafError(
                f"a key below {parent or 'the root'} has no name: {error}",
                hint="use str or int keys there",
            ) from error
    return join_segments(segments)


def _flatten(tree: Any) -> tuple[list[tuple[Any, Any]], Any]:
    try:
        return tree_flatten_with_path(tree)
    except (TypeError, ValueError) as error:
        raise UnsupportedLeafError(
            f"JAX cannot flatten it: {str(error).splitlines()[0]}",
            hint="make jax.tree.flatten accept it; dict keys must be comparable",
        ) from error


def flatten_state(tree: Any) -> FlatState:
    """Flatten a pytree into named leaves.

    Raises:
        UnsupportedLeafError: JAX cannot flatten it, a key has no name, or two
            leaves have the same one.
    """
    pairs, treedef = _flatten(tree)
    leaves: dict[str, Any] = {}
    paths: dict[str, Any] = {}
    for path, leaf in pairs:
        name = _name_path(path)
        if name in leaves:
            both = (jax.tree_util.keystr(paths[name]), jax.tree_util.keystr(path))
            raise UnsupportedLeafError(
                f"two leaves have the name {name or repr('')}",
                details=both,
                hint="give the children of that node different keys",
            )
        leaves[name], paths[name] = leaf, path
    return FlatState(leaves=leaves, treedef=treedef)


def unflatten_state(flat: FlatState, leaves: Mapping[str, Any]) -> Any:
    """Put leaves into the place of those of the same name."""
    return jax.tree_util.tree_unflatten(
        flat.treedef, [leaves[name] for name in flat.leaves]
    )
