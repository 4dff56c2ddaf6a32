"""From a reported step to an accepted save: is it due, is it allowed, what is saved.

Knows states and policies; knows no signals, and nothing of how a file is written.
"""

# jax's own annotations are partial
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import jax
import numpy as np
import xxhash

from ajaxckpt._background import Clock
from ajaxckpt._collecting import collect_state
from ajaxckpt._errors import (
    InvalidArgumentError,
    StepExistsError,
    UnsupportedLeafError,
)
from ajaxckpt._listing import RunEntry
from ajaxckpt._measuring import (
    Best,
    Measured,
    better_of,
    find_best,
    given_metrics,
    measure,
    refuse_function,
)
from ajaxckpt._metadata import Metadata
from ajaxckpt._plain import plain_metrics, plain_step, read_json
from ajaxckpt._preflight import check_space, count_kept
from ajaxckpt._provenance import gather_provenance
from ajaxckpt._reader import Checkpoint
from ajaxckpt._retention import Candidate, KeepPolicy, Metrics
from ajaxckpt._run_files import RunFiles
from ajaxckpt._run_saving import Order, RunSaver, StepReport
from ajaxckpt._schedule import Moment, SaveEvery, SavePolicy, find_reasons
from ajaxckpt._snapshot import Arena, Snapshot, take_snapshot
from ajaxckpt._writer import StateData, digest_data, state_bytes

# what is digested at every step: some ten milliseconds, or a share of the step
_FREE_BYTES, _BYTES_PER_SECOND, _SHARE = 64 << 20, 4 << 30, 0.02
_NO_LEAVES = "the state has no leaves: nothing would be saved"
_RETURNED = "check what the step returned, and what exclude= selects"
_AHEAD = "go on from run.restore_or_init, or go back on purpose with run.rollback(step)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Policies:
    """When a run saves and what it keeps.

    Attributes:
        save: when.
        keep: what; None for everything.
        hold: when a snapshot is taken for the grace time though no save is due.
        tail: whether the step reported last is remembered, to be saved at the end.
        exclude: the patterns of leaves to leave out.
        preflight: whether the first save asks first whether the disk has room.
    """

    save: tuple[SavePolicy, ...]
    keep: tuple[KeepPolicy, ...] | None
    hold: SaveEvery | None
    tail: bool
    exclude: tuple[str, ...]
    preflight: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """The step reported last: its leaves, not the containers they were passed in.

    A dict or list may be filled with the next step's leaves by now.
    """

    leaves: Sequence[Any]
    treedef: Any
    step: int
    metrics: Measured
    fingerprint: str | None

    def copy_state(self) -> tuple[Any, bool]:
        """Return the state in numpy arrays of its own, and whether it is as it was.

        The copy is compared, not what it was made of: a loop may go on writing.
        """
        leaves = [
            np.array(leaf) if isinstance(leaf, np.ndarray) else leaf
            for leaf in (self.leaves if self.fingerprint is not None else ())
        ]
        if self.fingerprint is None or self.fingerprint != take_fingerprint(leaves):
            return None, False
        return jax.tree_util.tree_unflatten(self.treedef, leaves), True

    @property
    def is_computed(self) -> bool:
        """Whether no leaf is still being computed."""
        arrays: list[Any] = [x for x in self.leaves if isinstance(x, jax.Array)]
        return all(array.is_deleted() or array.is_ready() for array in arrays)


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A snapshot that no save was due for, kept in case the loop is cut short."""

    snapshot: Snapshot
    metadata: Metadata


class RunSteps:
    """The steps of one run, from where it starts; one thread at a time is inside."""

    def __init__(
        self,
        files: RunFiles,
        saver: RunSaver,
        policies: Policies,
        facts: Metadata,
        clock: Clock = time,
    ) -> None:
        """Know of no step yet.

        Args:
            files: the run's files.
            saver: what carries out its saves.
            policies: when to save and what to keep.
            facts: what every file of the run says of itself.
            clock: what to tell the time by.
        """
        self._files, self._saver = files, saver
        self._policies, self._facts, self._clock = policies, facts, clock
        self._lock = threading.RLock()
        self._arena = Arena()
        self._last_step, self._last_seconds = 0, clock.monotonic()
        self._held_step, self._held_seconds = 0, self._last_seconds
        self._last_reported = 0
        self._newest: int | None = None
        self._best: Best | None = None
        self._is_placed = self._is_closed = False
        self._refusal = ""
        self._seen_seconds = self._last_seconds
        self._seen: Seen | None = None
        self._held: Held | None = None

    def start_from(self, step: int | None, checkpoint_id: str | None) -> None:
        """Go on after a checkpoint, or from the beginning."""
        with self._lock:
            self._is_placed, self._refusal = True, ""
            self._newest, self._saver.last_id = step, checkpoint_id
            self._saver.last_failed = self._best = self._seen = None
            self._last_step = self._held_step = step or 0
            self._last_reported = 0
            self._last_seconds = self._held_seconds = self._clock.monotonic()
            self._drop_held()

    def refuse(self, why: str) -> None:
        """Accept no save until something was restored."""
        with self._lock:
            self._refusal = why

    def close(self) -> None:
        """Give the memory back; nothing is saved after this."""
        with self._lock:
            self._is_closed, self._seen = True, None
            self._drop_held()
            self._arena.clear()

    def take(self, state: Any, step: Any, metrics: Measured, stop: str) -> StepReport:
        """Save a step if that is due.

        Args:
            state: the state after the step.
            step: its number.
            metrics: what was measured, or a function that measures.
            stop: why the run is to stop; empty if it is not.
        """
        with self._lock:
            number = self._see(state, step, metrics)
            reasons = self._find_reasons(number, metrics)
            if stop:
                reasons = (*reasons, stop)
            if number == self._newest:  # is it the same state, or did no step move?
                reasons = (*reasons, "reported again")
            if reasons:
                return self._save(state, number, metrics, reasons)
            self._hold_if_due(state, number, metrics)
            return StepReport(step=number, saved=False)

    def save(
        self, state: Any, step: Any, metrics: Measured, reasons: tuple[str, ...]
    ) -> StepReport:
        """Save a step now.

        Raises:
            StepExistsError: the run has another state of that step, or later ones.
            InvalidArgumentError: an argument is wrong.
            UnsupportedLeafError: a leaf cannot be saved.
            NoSpaceError: the disk has no room for what is to be kept.
        """
        with self._lock:
            number = self._see(state, step, metrics)
            return self._save(state, number, metrics, reasons)

    def save_tail(self, *, certain: bool) -> None:
        """Save the step reported last, if it is not saved and its state is there.

        What lies in numpy arrays may be of a later step by now: then it is not.

        Args:
            certain: whether the loop ended by itself; else nothing is waited for or
                measured.
        """
        with self._lock:
            seen = self._seen
            if self._is_closed or seen is None or self._is_saved(seen.step):
                return
            if not certain and not seen.is_computed and self._held is not None:
                self._save_held()
                return
            state, is_as_it_was = seen.copy_state()
            if is_as_it_was:
                self._save_seen(seen, state, certain)
            else:
                self._save_held()
                self._note_lost(seen.step, "numpy arrays of it may be of a later step")

    def _save_seen(self, seen: Seen, state: Any, certain: bool) -> None:
        """Save a state first; that it cannot be measured costs the metrics alone."""
        failure: Exception | None = None
        metrics: Metrics = {}
        try:
            policies = self._naming_policies()
            known = given_metrics(seen.metrics)
            metrics = measure(seen.metrics, policies) if certain else known
        except Exception as error:
            failure = error
        try:
            data = self._collect(state)
            self._accept(data, self._describe(seen.step, metrics), ("exit",))
        except UnsupportedLeafError:
            self._save_held()
            self._note_lost(seen.step, "it was donated since")
        if failure is not None:
            raise failure

    def _note_lost(self, step: int, why: str) -> None:
        if not self._is_saved(step):
            self._saver.note(f"step {step}, reported last, was not saved: {why}")

    def _save_held(self) -> None:
        """Save the snapshot that is held, if it is newer than the last save."""
        held, self._held = self._held, None
        if held is None:
            return
        if held.metadata.step is None or self._is_saved(held.metadata.step):
            held.snapshot.release()
            return
        there = self._files.find(held.metadata.step)
        self._order(held.snapshot, held.metadata, there)

    def _see(self, state: Any, step: Any, metrics: Measured) -> int:
        """Remember a step, after checking its number, its place and its metrics."""
        number = self._read_step(step)
        self._check_place(number)
        if not callable(metrics):
            measure(metrics, self._naming_policies())
        leaves, treedef = jax.tree_util.tree_flatten(state)
        if not leaves:
            raise InvalidArgumentError(_NO_LEAVES, hint=_RETURNED)
        self._last_reported = number
        if self._policies.tail:
            self._seen = Seen(
                leaves=leaves,
                treedef=treedef,
                step=number,
                metrics=metrics,
                fingerprint=self._take_fingerprint(leaves),
            )
        return number

    def _take_fingerprint(self, leaves: Sequence[Any]) -> str | None:
        """Digest what can be written in place, unless that would hold training up."""
        now = self._clock.monotonic()
        since, self._seen_seconds = now - self._seen_seconds, now
        nbytes = sum(leaf.nbytes for leaf in leaves if isinstance(leaf, np.ndarray))
        affordable = max(_FREE_BYTES, _BYTES_PER_SECOND * _SHARE * since)
        return take_fingerprint(leaves) if nbytes <= affordable else None

    def _save(
        self, state: Any, step: int, metrics: Measured, reasons: tuple[str, ...]
    ) -> StepReport:
        measured = measure(metrics, self._naming_policies())
        data = self._collect(state)
        self._check_space(data)
        return self._accept(data, self._describe(step, measured), reasons)

    def _naming_policies(self) -> tuple[object, ...]:
        return (*self._policies.save, *(self._policies.keep or ()))

    def _collect(self, state: Any) -> StateData:
        with jax.transfer_guard("allow"):
            data = collect_state(state, self._policies.exclude)
        if not data.layout:
            raise InvalidArgumentError(_NO_LEAVES, hint=_RETURNED)
        return data

    def _copy(self, data: StateData) -> Snapshot:
        with jax.transfer_guard("allow"):
            return take_snapshot(data, self._arena)

    def _is_saved(self, step: int) -> bool:
        saved = self._newest is not None and step <= self._newest
        return saved and self._saver.last_failed != step

    def _read_step(self, step: Any) -> int:
        number = plain_step(step)
        if number is None:
            problem = "step: expected the number of the step, found None"
            raise InvalidArgumentError(problem, hint="pass step=state.step")
        if number < self._last_reported:
            problem = f"step {number} was reported after step {self._last_reported}"
            raise InvalidArgumentError(problem, hint="report steps in their order")
        return number

    def _check_place(self, step: int) -> None:
        """Keep a run that was not restored from growing beside its own past."""
        if self._refusal:
            raise StepExistsError(
                f"nothing was restored, and the run has a past: {self._refusal}",
                path=self._files.directory,
                hint="restore it, or begin in another directory",
            )
        if not self._is_placed:
            newest = self._files.newest()
            self._newest = newest.step if newest else None
            self._saver.last_id = newest.checkpoint_id if newest else None
            self._last_step = self._newest or 0
            self._is_placed = True
        if self._newest is not None and step < self._newest:
            raise StepExistsError(
                f"step {step} lies before step {self._newest}, the run's newest",
                path=self._files.directory,
                hint=_AHEAD,
            )

    def _find_reasons(self, step: int, metrics: Measured) -> tuple[str, ...]:
        refuse_function(metrics, self._policies.save)
        if self._saver.last_failed is not None:
            self._best = None
            return (f"the save of step {self._saver.last_failed} failed",)
        if self._best is None:
            whole = (e.candidate for e in self._files.entries() if not e.problem)
            self._best = find_best(self._policies.save, whole)
        moment = Moment(
            step=step,
            seconds=self._clock.monotonic(),
            last_step=self._last_step,
            last_seconds=self._last_seconds,
            metrics=given_metrics(metrics),
            best=self._best,
        )
        return find_reasons(self._policies.save, moment)

    def _describe(self, step: int, metrics: Metrics) -> Metadata:
        return replace(
            self._facts,
            checkpoint_id=uuid.uuid4().hex,
            step=step,
            metrics=plain_metrics(metrics),
            provenance=gather_provenance(),
        )

    def _check_space(self, data: StateData) -> None:
        if not self._policies.preflight:
            return
        entries = self._files.entries()
        check_space(
            self._files.directory,
            state_bytes(data),
            count_kept(self._policies.keep),
            sum(entry.nbytes for entry in entries),
        )
        self._policies = replace(self._policies, preflight=False)

    def _accept(
        self, data: StateData, metadata: Metadata, reasons: tuple[str, ...]
    ) -> StepReport:
        """Copy a state, once memory has room for it, and hand it on."""
        step = metadata.step or 0
        start = self._clock.monotonic()
        beside = 0 if self._held is not None or step == self._newest else 1
        self._saver.worker.wait(beside)
        waited = self._clock.monotonic()
        snapshot = self._copy(data)
        taken = self._clock.monotonic()
        nbytes = snapshot.nbytes
        try:
            existing = self._find_place(step)
            is_there = self._is_there(existing, snapshot, metadata)
        except BaseException:
            snapshot.release()
            raise
        self._drop_held()
        if is_there:
            snapshot.release()
        saved = not is_there and self._order(snapshot, metadata, existing)
        path = existing.path if is_there and existing else ""
        return StepReport(
            step=step,
            saved=saved,
            reasons=reasons,
            path=self._files.path_for(step, existing) if saved else path,
            waited_seconds=waited - start,
            snapshot_seconds=taken - waited,
            snapshot_bytes=nbytes,
        )

    def _find_place(self, step: int) -> RunEntry | None:
        """Return what the run has of a step.

        Raises:
            StepExistsError: it has later steps, which somebody put there meanwhile.
        """
        for entry in self._files.entries():
            if entry.step > step and not self._files.verdict(entry):
                raise StepExistsError(
                    f"step {step} lies before step {entry.step}, which is there now",
                    path=entry.path,
                    hint="move that file away, or " + _AHEAD,
                )
        return self._files.find(step)

    def _is_there(
        self, existing: RunEntry | None, snapshot: Snapshot, metadata: Metadata
    ) -> bool:
        """Tell whether a step is saved already, with the same content.

        Raises:
            StepExistsError: with another content.
        """
        if existing is None or self._files.verdict(existing):
            return False
        digest = digest_data(snapshot.data)
        with Checkpoint(existing.path) as checkpoint:
            if checkpoint.digest != digest:
                raise StepExistsError(
                    f"step {metadata.step} is saved already, with another content",
                    path=existing.path,
                    hint=_AHEAD,
                )
        new = dict(metadata.metrics)
        return not new or new == dict(plain_metrics(existing.metrics))

    def _order(
        self, snapshot: Snapshot, metadata: Metadata, there: RunEntry | None
    ) -> bool:
        """Hand a save on; return whether it was accepted, or done."""
        step = metadata.step or 0
        path = self._files.path_for(step, there)
        strange = there is None or there.path != path or os.path.islink(path)
        before = self._newest, self._last_step, self._last_seconds
        self._newest = self._last_step = step
        self._last_seconds = self._clock.monotonic()
        if self._best is not None:
            metrics = cast("dict[str, Any]", read_json(dict(metadata.metrics)))
            this = Candidate(step=step, metrics=metrics)
            new = find_best(self._policies.save, [this])
            self._best = better_of(self._best, new)
        try:
            return self._saver.accept(
                Order(
                    path=path, snapshot=snapshot, metadata=metadata, displaces=strange
                )
            )
        except BaseException:  # it failed, or was interrupted: it is not saved
            self._newest, self._last_step, self._last_seconds = before
            raise

    def _hold_if_due(self, state: Any, step: int, metrics: Measured) -> None:
        """Take a snapshot for the grace time, where memory has room for one."""
        moment = Moment(
            step=step,
            seconds=self._clock.monotonic(),
            last_step=max(self._held_step, self._last_step),
            last_seconds=max(self._held_seconds, self._last_seconds),
        )
        due = self._policies.hold and self._policies.hold.find_reason(moment)
        if not due or self._saver.worker.unfinished:
            return
        metadata = self._describe(step, given_metrics(metrics))
        snapshot = self._copy(self._collect(state))
        self._drop_held()
        self._held = Held(snapshot=snapshot, metadata=metadata)
        self._held_step, self._held_seconds = step, moment.seconds

    def _drop_held(self) -> None:
        if self._held is not None:
            self._held.snapshot.release()
            self._held = None


def take_fingerprint(leaves: Sequence[Any]) -> str:
    """Return a digest of what can be written in place: the numpy arrays."""
    arrays = [leaf for leaf in leaves if isinstance(leaf, np.ndarray)]
    hasher = xxhash.xxh3_128()
    for array in arrays:
        if array.dtype != object:
            hasher.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return hasher.hexdigest()
