"""The public verbs: each checks its arguments, then calls the layers below.

A checkpoint is a value: saving is a function from a pytree to bytes, restoring one
from bytes and a skeleton to a pytree.
"""

# jax's own annotations are partial
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false
# pyright: reportUnknownLambdaType=false, reportPrivateImportUsage=false

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import jax

from ajaxckpt._collecting import collect_state, refuse_nothing, refuse_traced
from ajaxckpt._decisions import Patterns
from ajaxckpt._errors import (
    error_context,
)
from ajaxckpt._metadata import Metadata
from ajaxckpt._migrations import Migrations, as_registries, record_versions
from ajaxckpt._paths import resolve_path
from ajaxckpt._patterns import parse_patterns
from ajaxckpt._plain import plain_config, plain_metrics, plain_step
from ajaxckpt._plan import RestorePlan, make_plan
from ajaxckpt._progress import show_progress
from ajaxckpt._provenance import gather_provenance
from ajaxckpt._reader import Checkpoint
from ajaxckpt._writer import (
    CheckpointRecord,
    digest_data,
    state_bytes,
    write_checkpoint,
)

State = TypeVar("State")
Registries = Migrations | Iterable[Migrations] | None


def save_checkpoint(
    state: Any,
    path: str | os.PathLike[str],
    *,
    step: Any = None,
    metrics: Mapping[str, Any] | None = None,
    config: Any = None,
    migrations: Registries = None,
    exclude: Patterns = (),
    progress: bool = False,
) -> CheckpointRecord:
    """Save a state to one file, atomically and durably.

    At every instant the path holds the old whole file or the new whole file, and
    when the call returns the new one survives a power cut. A failed save leaves the
    old file and nothing else. The extra memory is a constant.

    Args:
        state: any pytree; see the README for the kinds of leaves.
        path: the file; relative paths and ``~`` are resolved now, parents created.
        step: the training step: an int, or an integer array of equal values.
        metrics: name to a single number; NaN and None are allowed.
        config: a mapping or dataclass of JSON-like values, numpy and jax scalars.
        migrations: the registry of the state's layout, or several: their newest
            versions are recorded.
        exclude: patterns of leaves to leave out; a restore then names them in
            ``keep``.
        progress: whether to show a bar, on a terminal and for much data; it takes
            the package rich.

    Returns:
        What was written: path, ids, digest, bytes.

    Raises:
        UnsupportedLeafError: a leaf cannot be saved; nothing was written.
        InvalidArgumentError: another argument is wrong; nothing was written.
        NotACheckpointError: something else is at the path; it was left alone.
        OSError: the operating system refused; the old file is still there.

    Example:
        >>> save_checkpoint({"w": jnp.ones(3), "step": 7}, path, step=7).leaves
        2
    """
    target = resolve_path(path)
    with error_context(target, "cannot save"), jax.transfer_guard("allow"):
        metadata = describe_save(step, metrics, config, migrations, exclude)
        data = collect_state(state, metadata.excluded)
        refuse_nothing(data, metadata.excluded, target)
        label = f"saving {os.path.basename(target)}"
        with show_progress(label, state_bytes(data), wanted=progress) as told:
            return write_checkpoint(target, data, metadata, told)


def describe_save(
    step: Any,
    metrics: Mapping[str, Any] | None,
    config: Any,
    migrations: Registries,
    exclude: Patterns,
) -> Metadata:
    """Check what a save is to say of itself, and add what it says of its own.

    Raises:
        InvalidArgumentError: an argument is wrong.
    """
    return Metadata(
        checkpoint_id=uuid.uuid4().hex,
        step=plain_step(step),
        metrics=plain_metrics(metrics),
        config=plain_config(config),
        excluded=parse_patterns(exclude, "exclude"),
        layouts=record_versions(as_registries(migrations)),
        provenance=gather_provenance(),
    )


def state_digest(state: Any) -> str:
    """Return a digest that equal states share, whatever file or time they are from.

    Equal means: same leaf names, kinds, dtypes, shapes, weak types and bits. Where
    the leaves lie (numpy or jax, which device) and functions do not enter.

    Returns:
        32 hex digits; the command ``ajaxckpt digest FILE`` gives the same.

    Raises:
        UnsupportedLeafError: a leaf has no data or is of no kind that can be saved.

    Example:
        >>> state_digest({"step": 7}) == state_digest({"step": 7})
        True
    """
    with error_context(None, "cannot digest"), jax.transfer_guard("allow"):
        return digest_data(collect_state(state, ()))


def plan_restore(
    skeleton: Any,
    path: str | os.PathLike[str] | Checkpoint,
    *,
    subtree: str = "",
    keep: Patterns = (),
    ignore: Patterns = (),
    resize: Patterns = (),
    migrations: Registries = None,
    config: Any = None,
) -> RestorePlan:
    """Decide what restoring would do, leaf by leaf, reading only the header.

    The arguments are those of ``restore_into``, which is this plan, applied.

    Returns:
        The plan: ``.load``, ``.keep``, ``.ignore``, ``.resize``, ``.mismatches`` as
        data, as are ``.migrate``, ``.adopt``, ``.drop``, ``.notes`` and
        ``.suggestions``; it prints as a table; ``.apply()`` gives the state.

    Raises:
        CheckpointNotFoundError: nothing is at the path.
        NotACheckpointError, DamagedCheckpointError, NewerFormatError: what is there
            cannot be read.
        UnsupportedLeafError: a leaf of the skeleton is of no kind that can be filled.
        MigrationError: a migration cannot be applied to this file.
        InvalidArgumentError: a pattern is wrong or selects nothing.

    Example:
        >>> plan_restore({"w": jnp.zeros(4), "step": 0}, path).mismatches[0].problem
        'shape'
    """
    resolved = path.path if isinstance(path, Checkpoint) else resolve_path(path)
    with error_context(resolved, "cannot restore"), jax.transfer_guard("allow"):
        registries = as_registries(migrations)
        refuse_traced("the state is restored")
        exceptions: dict[str, Patterns] = {
            "keep": parse_patterns(keep, "keep"),
            "ignore": ignore,
            "resize": resize,
        }
        checkpoint = path if isinstance(path, Checkpoint) else Checkpoint(resolved)
        now = plain_config(config)
        return make_plan(checkpoint, skeleton, subtree, exceptions, registries, now)


def restore_into(
    skeleton: State,
    path: str | os.PathLike[str] | Checkpoint,
    *,
    subtree: str = "",
    keep: Patterns = (),
    ignore: Patterns = (),
    resize: Patterns = (),
    migrations: Registries = None,
    config: Any = None,
    progress: bool = False,
) -> State:
    """Restore a file into the place of a skeleton's leaves: all, or an error.

    Values are the file's, bit for bit; code (update rules, static fields, classes)
    and placement (host or device, sharding, committed or not) are the skeleton's.
    The continued run is the run that never stopped: the next jitted step compiles
    nothing that it would not have compiled without the checkpoint.

    Args:
        skeleton: what a zero-step train call builds, or its ``jax.eval_shape``.
        path: the file, or an open checkpoint: several restores from that one see the
            same file, even if it is replaced meanwhile.
        subtree: restore from below this leaf name; only its bytes are read. Names
            in the other arguments and in errors are then relative to it.
        keep: patterns over the skeleton's names: leaves to take from the skeleton.
        ignore: patterns over the file's names: leaves to leave unread.
        resize: patterns over the skeleton's names: leaves that may take the file's
            shape, such as a replay that outgrew its skeleton.
        migrations: the registry that leads from the file's layout to today's, or
            several, applied one after the other; patterns there are over the names
            of the whole state.
        config: the config of now, to be compared with the file's in the plan.
        progress: whether to show a bar, as ``save_checkpoint`` does.

    Returns:
        A new pytree; the skeleton is not changed.

    Raises:
        LayoutMismatchError: file and skeleton differ; lists every leaf that does.
        CheckpointNotFoundError: nothing is at the path.
        NotACheckpointError: ajaxckpt did not write what is there.
        DamagedCheckpointError: bytes that are needed are not those written.
        NewerFormatError: a newer release wrote the file.
        UnsupportedLeafError: a leaf of the skeleton is of no kind that can be filled.
        MigrationError: a migration cannot be applied to this file.
        InvalidArgumentError: a pattern is wrong or selects nothing.

    Example:
        >>> restore_into({"w": jnp.zeros(3), "step": 0}, path)["step"]
        7
    """
    plan = plan_restore(
        skeleton,
        path,
        subtree=subtree,
        keep=keep,
        ignore=ignore,
        resize=resize,
        migrations=migrations,
        config=config,
    )
    with error_context(plan.path, "cannot restore"):
        return plan.apply(progress=progress)
