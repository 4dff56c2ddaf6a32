"""What a skeleton promises of its leaves, and where its values differ from the file's.

Knows jax's leaves; reads no payload.
"""

# jax's own annotations are partial
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np

from ajaxckpt._decisions import Patterns, file_name
from ajaxckpt._drafts import Draft
from ajaxckpt._errors import CheckpointError, UnsupportedLeafError
from ajaxckpt._layout import Layout, LeafSpec
from ajaxckpt._leaves import describe_leaf, find_unsavable, leaf_data, scalar_value
from ajaxckpt._names import split_name
from ajaxckpt._patterns import select_names
from ajaxckpt._reader import Checkpoint
from ajaxckpt._tree import FlatState
from ajaxckpt._writer import digest_leaf

_HYPERPARAMETERS = "hyperparams"


def describe_skeleton(flat: FlatState, keep: Patterns) -> Layout:
    """Describe a skeleton's leaves; what is kept may be of any kind."""
    kept = select_names(keep, list(flat.leaves), argument="keep")
    refuse_abstract(flat, kept, "keep= of")
    return {
        name: LeafSpec(kind="function") if name in kept else describe_leaf(name, leaf)
        for name, leaf in flat.leaves.items()
    }


def spec_of(name: str, leaf: Any) -> LeafSpec | None:
    """Describe a leaf of any kind, None where no checkpoint could hold it."""
    try:
        return describe_leaf(name, leaf)
    except CheckpointError:
        return None


def refuse_abstract(flat: FlatState, names: Iterable[str], what: str) -> None:
    """Refuse to take from a skeleton what only its description is there of.

    Raises:
        UnsupportedLeafError: names the leaf.
    """
    for name in names:
        if isinstance(flat.leaves.get(name), jax.ShapeDtypeStruct):
            hint = "build the skeleton with a zero-step call instead of jax.eval_shape"
            raise UnsupportedLeafError(f"{name}: {what} an abstract leaf", hint=hint)


def note_hyperparameters(
    checkpoint: Checkpoint, draft: Draft, flat: FlatState, subtree: str
) -> Iterator[str]:
    """Yield the hyperparameters whose stored value is not the skeleton's.

    They are what lies below a node named ``hyperparams``, as optax has them. Values
    are compared by their digests: nothing is read.
    """
    for name, leaf in flat.leaves.items():
        if not _is_setting(name, leaf):
            continue
        found = draft.leaves.get(file_name(subtree, name))
        if found is None or found.form != "stored":
            continue
        spec = checkpoint.layout[found.stored]
        if _facts(name, leaf) not in (
            None,
            (spec.dtype, checkpoint.leaf_digest(found.stored)),
        ):
            yield (
                f"{name}: the file's value is not the skeleton's {_show(leaf)}; the "
                f"file's is restored unless keep={name!r}"
            )


def _is_setting(name: str, leaf: Any) -> bool:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return False
    return _HYPERPARAMETERS in name and _HYPERPARAMETERS in split_name(name)


def _facts(name: str, leaf: Any) -> tuple[str, str] | None:
    """Return a leaf's dtype and digest, or value, as a checkpoint has them."""
    try:
        spec = describe_leaf(name, leaf)
        if find_unsavable([(name, leaf)]) is not None or spec.kind == "function":
            return None
        if not spec.payload_dtype:
            return spec.dtype, str(scalar_value(name, leaf, spec))
        return spec.dtype, digest_leaf(lambda: leaf_data(name, leaf, spec))
    except CheckpointError:
        return None


def _show(leaf: Any) -> str:
    if isinstance(leaf, jax.Array | np.ndarray | np.generic) and leaf.ndim == 0:
        return str(np.asarray(leaf))
    return repr(leaf)[:40] if not hasattr(leaf, "shape") else "own"
