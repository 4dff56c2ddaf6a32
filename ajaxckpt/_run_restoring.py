"""The newest state of a run that can be restored, and what was passed over.

Knows the files of a run and how one is restored; knows no threads or signals.
"""

# jax's own annotations are partial
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from ajaxckpt._checkpoint import plan_restore
from ajaxckpt._errors import (
    CheckpointNotFoundError,
    DamagedCheckpointError,
    NotACheckpointError,
    UnsupportedLeafError,
)
from ajaxckpt._listing import RunEntry
from ajaxckpt._migrations import Migrations
from ajaxckpt._reader import Checkpoint
from ajaxckpt._run_files import TRIES, RunFiles
from ajaxckpt._tree import flatten_state

_COUNTERS = ("step", "steps", "timestep", "global_step", "env_steps", "total_steps")


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """A checkpoint that was passed over.

    Attributes:
        path: the file.
        step: its step.
        reason: why it could not be restored.
    """

    path: str
    step: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """A state to go on from, and where it came from.

    Attributes:
        state: the state.
        restored: whether it came from a file; False for a fresh start.
        step: the file's step; None for a fresh start.
        path: the file; empty for a fresh start.
        checkpoint_id: the id of the save; empty for a fresh start.
        metrics: what was measured at that step.
        skipped: the newer checkpoints that could not be restored, newest first.
        notes: what is worth knowing and changed no value: versions, commit and
            config then and now, counters that disagree with the step, what it means
            that leaves were kept as the skeleton's.
    """

    state: Any
    restored: bool
    step: int | None = None
    path: str = ""
    checkpoint_id: str = ""
    metrics: Mapping[str, float | int | None]
    skipped: tuple[Skipped, ...] = ()
    notes: tuple[str, ...] = ()


class Restorer:
    """Restores the checkpoints of one run with the run's migrations and config."""

    def __init__(
        self,
        files: RunFiles,
        registries: tuple[Migrations, ...],
        config: Mapping[str, Any] | None,
        *,
        progress: bool = False,
    ) -> None:
        """Restore nothing yet."""
        self._progress = progress
        self._files = files
        self._always: dict[str, Any] = {
            "migrations": registries or None,
            "config": config,
        }
        self._pieces: set[str] = set()

    def restore_or_init(self, start: Any, **options: Any) -> Restored:
        """Restore the newest checkpoint that is whole, or begin.

        Raises:
            DamagedCheckpointError: there are some, and none is whole.
            NewerFormatError: a newer release wrote one that comes first.
            LayoutMismatchError: the first whole one does not fit the skeleton.
            UnsupportedLeafError: there is none, and the start is abstract.
        """
        skeleton = start() if is_function(start) else start
        found = self._restore_first(self._newest_first, skeleton, options)
        if found is not None:
            return found
        _refuse_abstract_start(skeleton, self._files.directory)
        return Restored(state=skeleton, restored=False, metrics={})

    def _newest_first(self) -> Sequence[RunEntry]:
        return self._files.entries()[::-1]

    def restore(
        self,
        find: Callable[[], Sequence[RunEntry]] | None,
        skeleton: Any,
        **options: Any,
    ) -> Restored:
        """Restore the first of some checkpoints that is whole.

        Args:
            find: says which, the newest first by default; asked again where a live
                writer has removed one meanwhile.
            skeleton: as ``restore_into`` takes it, or a function that builds it.
            options: those of ``restore_into``.

        Raises:
            CheckpointNotFoundError: there are none.
            DamagedCheckpointError: none is whole.
            LayoutMismatchError: the first whole one does not fit the skeleton.
        """
        skeleton = skeleton() if is_function(skeleton) else skeleton
        found = self._restore_first(find or self._newest_first, skeleton, options)
        if found is None:
            raise CheckpointNotFoundError(
                "the run has no such checkpoint",
                path=self._files.directory,
                hint="check the directory, or begin with run.restore_or_init",
            )
        return self._note_mixture(found) if options.get("subtree") else found

    def restore_step(self, step: int, skeleton: Any, **options: Any) -> Restored:
        """Restore one step, that or none.

        Raises:
            CheckpointNotFoundError: the run has none of that step.
            DamagedCheckpointError: it is damaged.
            LayoutMismatchError: it does not fit the skeleton.
        """
        skeleton = skeleton() if is_function(skeleton) else skeleton
        entry = self._files.require(step)
        self._files.refuse_newer(entry)
        found = self._restore(entry, skeleton, [], options)
        return self._note_mixture(found) if options.get("subtree") else found

    def _restore_first(
        self,
        find: Callable[[], Sequence[RunEntry]],
        skeleton: Any,
        options: Mapping[str, Any],
    ) -> Restored | None:
        """Restore the first that is whole; None where there are none at all."""
        skipped: list[tuple[RunEntry, str]] = []
        for _ in range(TRIES):
            skipped, is_gone = [], False
            for entry in find():
                self._files.refuse_newer(entry)
                try:
                    if not entry.problem:
                        return self._restore(entry, skeleton, skipped, options)
                    problem = entry.problem
                except CheckpointNotFoundError:
                    is_gone, problem = True, "it was removed meanwhile"
                except (DamagedCheckpointError, NotACheckpointError, OSError) as error:
                    problem = self._files.condemn(entry, error)
                skipped.append((entry, problem))
            if not is_gone:
                break
        if skipped:
            raise self._files.none_loads(skipped)
        return None

    def _restore(
        self,
        entry: RunEntry,
        skeleton: Any,
        skipped: Sequence[tuple[RunEntry, str]],
        options: Mapping[str, Any],
    ) -> Restored:
        with Checkpoint(entry.path) as checkpoint:
            plan = plan_restore(skeleton, checkpoint, **options, **self._always)
            state = plan.apply(progress=self._progress)
            whole = not options.get("subtree")
            return Restored(
                state=state,
                restored=True,
                step=entry.step,
                path=entry.path,
                checkpoint_id=checkpoint.checkpoint_id,
                metrics=checkpoint.metrics,
                skipped=tuple(
                    Skipped(path=other.path, step=other.step, reason=reason)
                    for other, reason in skipped
                ),
                notes=(
                    *(f"skipped {os.path.basename(e.path)}: {y}" for e, y in skipped),
                    *(_compare_counters(entry, state) if whole else ()),
                    *plan.notes,
                ),
            )

    def _note_mixture(self, found: Restored) -> Restored:
        """Say so where pieces of one agent come from two moments."""
        self._pieces.add(found.checkpoint_id)
        if len(self._pieces) == 1:
            return found
        note = (
            f"pieces were restored from {len(self._pieces)} checkpoints of this run: "
            "counters and buffers of different moments do not agree"
        )
        warnings.warn(note, RuntimeWarning, stacklevel=4)
        return replace(found, notes=(*found.notes, note))


def _compare_counters(entry: RunEntry, state: Any) -> Iterator[str]:
    """Yield the counters at the state's root that are not the checkpoint's step."""
    children, _ = jax.tree_util.tree_flatten_with_path(state)
    for path, leaf in children:
        name = (
            str(getattr(path[0], "name", getattr(path[0], "key", ""))) if path else ""
        )
        dtype = np.int64 if type(leaf) is int else getattr(leaf, "dtype", None)
        if len(path) != 1 or name not in _COUNTERS or dtype is None:
            continue
        if not jax.numpy.issubdtype(dtype, np.integer):
            continue
        values = np.unique(np.asarray(leaf))
        if values.tolist() != [entry.step]:
            found = ", ".join(map(str, values.tolist()[:3]))
            yield f"the checkpoint says step {entry.step}, the state's {name} {found}"


def is_function(start: Any) -> bool:
    """Tell whether something is called for the state, and is not the state itself.

    Some states are callable: an equinox module is, and its leaves are others.
    """
    return callable(start) and jax.tree_util.all_leaves([start])


def _refuse_abstract_start(state: Any, directory: str) -> None:
    """Refuse to begin a run with what only describes a state.

    Raises:
        UnsupportedLeafError: names the leaf.
    """
    for name, leaf in flatten_state(state).leaves.items():
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise UnsupportedLeafError(
                f"{name}: an abstract leaf cannot start a run; nothing is saved yet",
                path=directory,
                hint="pass the function that builds the state, or the state itself",
            )
