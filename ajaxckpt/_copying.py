"""An upgraded copy: a checkpoint written anew in today's layout, leaf by leaf.

Joins drafts, open files and ``_writer``; needs jax for a skeleton alone.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ajaxckpt._drafts import Draft, DraftLeaf, evaluate_leaf
from ajaxckpt._dtypes import STORED_DTYPES
from ajaxckpt._errors import (
    InvalidArgumentError,
    LayoutMismatchError,
    MigrationError,
    error_context,
)
from ajaxckpt._layout import NUMBER_KINDS, TEXT_KINDS, Layout, LeafSpec, shown_name
from ajaxckpt._metadata import EXPORT
from ajaxckpt._migrating import migrate_layout
from ajaxckpt._migrations import Migrations, as_registries, record_versions
from ajaxckpt._opening import verify_checkpoint
from ajaxckpt._paths import is_missing, resolve_path
from ajaxckpt._payload import LeafData, whole_leaf
from ajaxckpt._provenance import gather_provenance
from ajaxckpt._reader import Checkpoint
from ajaxckpt._scalars import Value, encode_scalar, encode_text
from ajaxckpt._writer import CheckpointRecord, StateData, write_checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class _Skeleton:
    layout: Layout
    leaves: Mapping[str, Any]


def migrate_checkpoint(
    path: str | os.PathLike[str],
    new_path: str | os.PathLike[str],
    migrations: Migrations | Iterable[Migrations],
    *,
    skeleton: Any = None,
) -> CheckpointRecord:
    """Write an upgraded copy of a checkpoint; the old file is not touched.

    The copy has the old one's step, metrics and config, names it as its parent, and
    records the registries' versions. It is read back and verified before the call
    returns. One leaf at a time is held in memory.

    Args:
        path: the old file.
        new_path: the copy; nothing may be there.
        migrations: the registry, or several, applied one after the other.
        skeleton: what rules ask for dtypes, shapes and values; where it is given,
            the copy fits it or nothing is written.

    Returns:
        What was written: path, ids, digest, bytes.

    Raises:
        MigrationError: a rule cannot be applied, or needs a skeleton.
        LayoutMismatchError: the copy would not fit the skeleton.
        InvalidArgumentError: something is at the new path already, or the old file
            is an export.
        CheckpointNotFoundError, NotACheckpointError, DamagedCheckpointError,
            NewerFormatError: the old file cannot be read.

    Example:
        >>> migrations = Migrations("agent")
        >>> rules = migrations.step(1, "weights by name").move("w", "kernel")
        >>> new = migrate_checkpoint(path, str(path) + ".new", migrations)
        >>> list(open_checkpoint(new.path))
        ['step', 'kernel']
    """
    old, new = resolve_path(path), resolve_path(new_path)
    with error_context(old, "cannot migrate"):
        registries = as_registries(migrations)
        if not registries:
            raise InvalidArgumentError("no migrations", hint="pass a registry")
        if not is_missing(new):
            hint = "choose a path where nothing is"
            raise InvalidArgumentError(f"{new} is there already", hint=hint)
        with Checkpoint(old) as checkpoint:
            _refuse_export(checkpoint)
            if skeleton is not None:
                _check_fit(checkpoint, skeleton, registries)
            record = _write_copy(checkpoint, new, registries, _flatten(skeleton))
    verify_checkpoint(new)
    return record


def _refuse_export(checkpoint: Checkpoint) -> None:
    """Keep what cannot be resumed from becoming a checkpoint."""
    if (sort := checkpoint.provenance.get(EXPORT)) is None:
        return
    raise InvalidArgumentError(
        f"the file is an exported {sort}, no checkpoint",
        hint="migrate the checkpoint and export again, or pass migrations= to "
        "restore_into",
    )


def _flatten(skeleton: Any) -> _Skeleton | None:
    if skeleton is None:
        return None
    from ajaxckpt._skeletons import describe_skeleton
    from ajaxckpt._tree import flatten_state

    flat = flatten_state(skeleton)
    return _Skeleton(layout=describe_skeleton(flat, ()), leaves=flat.leaves)


def _check_fit(
    checkpoint: Checkpoint, skeleton: Any, registries: tuple[Migrations, ...]
) -> None:
    from ajaxckpt._checkpoint import plan_restore

    plan = plan_restore(skeleton, checkpoint, migrations=registries)
    if plan.mismatches:
        raise LayoutMismatchError(
            f"the copy would not fit the skeleton in {len(plan.mismatches)} leaves",
            details=[str(item) for item in plan.mismatches],
            mismatches=plan.mismatches,
            hint="add the missing rules; ajaxckpt plan shows what they might be",
        )


def _write_copy(
    checkpoint: Checkpoint,
    new: str,
    registries: tuple[Migrations, ...],
    skeleton: _Skeleton | None,
) -> CheckpointRecord:
    layout = None if skeleton is None else skeleton.layout
    draft = migrate_layout(checkpoint, layout, "", registries)
    facts = checkpoint.file.header.metadata
    metadata = replace(
        facts,
        checkpoint_id=uuid.uuid4().hex,
        parent_id=checkpoint.checkpoint_id,
        layouts={**facts.layouts, **record_versions(registries)},
        provenance=gather_provenance(),
    )
    return write_checkpoint(new, _collect(checkpoint, draft, skeleton), metadata)


def _collect(
    checkpoint: Checkpoint, draft: Draft, skeleton: _Skeleton | None
) -> StateData:
    layout: dict[str, LeafSpec] = {}
    values: dict[str, Value] = {}
    sources: dict[str, Any] = {}
    for name, draft_leaf in draft.leaves.items():
        leaf, spec = _settle(checkpoint, name, draft_leaf, skeleton)
        layout[name] = spec
        read = partial(evaluate_leaf, leaf, name, spec, checkpoint.read)
        if spec.payload_dtype:
            sources[name] = partial(_source, read, spec)
        else:
            values[name] = encode_scalar(spec.kind, read())
    return StateData(layout=layout, values=values, sources=sources)


def _settle(
    checkpoint: Checkpoint, name: str, leaf: DraftLeaf, skeleton: _Skeleton | None
) -> tuple[DraftLeaf, LeafSpec]:
    """Return a leaf that needs no skeleton any more, and its true spec."""
    if leaf.spec is not None and leaf.form == "stored":
        return leaf, leaf.spec
    expected = leaf.spec or (skeleton and skeleton.layout.get(name)) or None
    if leaf.form == "skeleton":
        if skeleton is None or expected is None:
            problem = f"{leaf.rule}: {shown_name(name)}: its value is the skeleton's"
            hint = "pass skeleton= (--skeleton)"
            raise MigrationError(f"{problem} to say", hint=hint)
        value = _host_value(name, skeleton.leaves[name], expected)
        return replace(leaf, form="constant", value=value), expected
    if expected is None:
        problem = f"{leaf.rule}: {shown_name(name)}: its dtype and shape are the"
        hint = "pass skeleton= (--skeleton)"
        raise MigrationError(f"{problem} skeleton's to say", hint=hint)
    if expected.kind in TEXT_KINDS:
        value = evaluate_leaf(leaf, name, expected, checkpoint.read)
        expected = replace(expected, length=len(encode_text(value)))
    return leaf, expected


def _host_value(name: str, leaf: Any, spec: LeafSpec) -> Any:
    """Return a skeleton leaf's value as a file would give it."""
    from ajaxckpt._leaves import leaf_data, scalar_value
    from ajaxckpt._payload import iter_payload

    if not spec.payload_dtype:
        value = scalar_value(name, leaf, spec)
        return leaf if spec.kind in NUMBER_KINDS else value
    data = leaf_data(name, leaf, spec)
    if isinstance(data, bytes):
        return leaf
    raw = b"".join(bytes(piece) for piece in iter_payload(data))
    import numpy as np

    array = np.frombuffer(raw, data.row.dtype)
    return array.reshape(spec.payload_shape)


def _source(read: Any, spec: LeafSpec) -> LeafData | bytes:
    value = read()
    if spec.kind in TEXT_KINDS:
        return encode_text(value)
    return whole_leaf(value, STORED_DTYPES[spec.payload_dtype], frozen=True)
