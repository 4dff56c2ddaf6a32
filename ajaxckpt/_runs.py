"""A training run that survives: what to save when, what to keep, how to stop.

A thin shell over the files of a run, its saves, its steps and its watch for signals;
all that is true of a run is read from its committed files.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self, cast

from ajaxckpt._background import Clock
from ajaxckpt._collecting import collect_state
from ajaxckpt._decisions import Patterns
from ajaxckpt._errors import (
    BackgroundSaveError,
    CheckpointNotFoundError,
    InvalidArgumentError,
    LayoutMismatchError,
    MigrationError,
    error_context,
)
from ajaxckpt._listing import RunEntry, check_run_id
from ajaxckpt._measuring import Measured
from ajaxckpt._metadata import Metadata
from ajaxckpt._metrics_log import LogHook
from ajaxckpt._migrations import Migrations, as_registries, record_versions
from ajaxckpt._paths import resolve_path
from ajaxckpt._patterns import parse_patterns
from ajaxckpt._plain import plain_config, plain_metrics, plain_step, read_json
from ajaxckpt._preflight import PreflightReport, check_space, count_kept, measure_save
from ajaxckpt._reader import Checkpoint
from ajaxckpt._retention import (
    KeepBest,
    KeepPolicy,
    Mode,
    check_count,
    check_metric,
    check_seconds,
    rank_best,
)
from ajaxckpt._run_files import TRIES, RunFiles
from ajaxckpt._run_locks import RunLock
from ajaxckpt._run_restoring import Restored, Restorer
from ajaxckpt._run_saving import RunSaver, StepReport
from ajaxckpt._run_sessions import RunSession
from ajaxckpt._run_steps import Policies, RunSteps
from ajaxckpt._schedule import (
    SaveEvery,
    SavePolicy,
    metrics_needed,
    refuse_other,
)
from ajaxckpt._writer import state_bytes

_SIGNALS = tuple(
    int(getattr(signal, name))
    for name in ("SIGTERM", "SIGINT", "SIGUSR1")
    if hasattr(signal, name)
)
_GRACE_SECONDS = 20.0
_MAX_EXIT_CODE = 255


class Run:
    """A directory of checkpoints by step, and one live writer of them.

    Reading needs nothing but the object: ``newest``, ``best``, ``list``, ``path``,
    ``restore``, ``restore_best``, ``config``. What writes needs the run to be open,
    as a context manager; then no other process can open the run of the same id, and
    signals ask it to stop. Leaving the ``with`` block saves the step reported last,
    finishes every save that was accepted, and gives signals and lock back.

    Example:
        >>> with Run("runs/a", save=SaveEvery(steps=20), keep=KeepLast(2)) as run:
        ...     state = run.restore_or_init({"w": jnp.zeros(3), "step": 0}).state
        ...     while state["step"] < 50 and not run.stop_requested:
        ...         state = {"w": state["w"] + 1, "step": state["step"] + 1}
        ...         report = run.step(state, step=state["step"])
        >>> [entry.step for entry in run.list()]
        [40, 50]
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        run_id: str | None = None,
        save: SavePolicy | Sequence[SavePolicy] = SaveEvery(steps=1),  # noqa: B008
        keep: KeepPolicy | Sequence[KeepPolicy] | None = None,
        config: Any = None,
        migrations: Migrations | Iterable[Migrations] | None = None,
        exclude: Patterns = (),
        logs: LogHook | Sequence[LogHook] = (),
        background: bool = True,
        on_exit: bool = True,
        on_error: str = "raise",
        retries: int = 2,
        preflight: bool = True,
        signals: int | Sequence[int] = _SIGNALS,
        grace: float = _GRACE_SECONDS,
        hold: SaveEvery | None = None,
        exit_code: int | None = None,
        progress: bool = False,
        clock: Clock = time,
    ) -> None:
        """Check the arguments; look at nothing and take no lock yet.

        Args:
            directory: the run's directory; made when the run is opened.
            run_id: which of several runs in the directory; by default the one that
                is there, or a new one.
            save: when ``step`` saves: SaveEvery, SaveAt, SaveOnImprovement.
            keep: what is kept of the run's checkpoints: KeepLast, KeepBest,
                KeepEvery, KeepPerPeriod; their union is. By default everything is.
            config: what to record of the agent, as ``save_checkpoint`` takes it.
            migrations: the registry of the state's layout, or several: recorded at
                saves, applied at restores.
            exclude: patterns of leaves to leave out of the files.
            logs: records of metrics to be resumed with the run, such as MetricsLog.
            background: whether ``step`` returns once the state is copied, and one
                thread writes it.
            on_exit: whether leaving saves the step reported last.
            on_error: ``raise`` to raise a failed save at the next call and at exit,
                ``warn`` to log it and keep it in ``failures``.
            retries: how often to try again after an error that may pass.
            preflight: whether the first save asks first whether the disk has room.
            signals: what asks the run to stop; () for none.
            grace: seconds the loop has to come round after a signal, before the last
                state that can be had is saved without it.
            hold: when ``step`` copies the state for that case though no save is due.
            exit_code: raised as SystemExit after a stop, and used where the loop did
                not come round; for schedulers that start a job again by its code.
            progress: whether to show a bar for saves and restores of much data, on a
                terminal; it takes the package rich.
            clock: what to tell the time and wait by.

        Raises:
            InvalidArgumentError: an argument is wrong.
        """
        signals = one_or_several(signals)
        path = os.fspath(directory)
        path = path.decode() if isinstance(path, bytes) else path
        self.directory = resolve_path(path.rstrip("/") or path)
        with error_context(self.directory, "cannot open the run"):
            self._policies = Policies(
                save=refuse_other(save, SavePolicy, "save"),
                keep=None if keep is None else check_keep(keep),
                hold=hold,
                tail=on_exit or bool(signals),
                exclude=parse_patterns(exclude, "exclude"),
                preflight=preflight,
            )
            self._registries = as_registries(migrations)
            self._config = plain_config(config)
            check_count(retries, "Run retries", 0)
            check_seconds(grace, "Run grace")
            if exit_code is not None:
                check_count(exit_code, "Run exit_code", 0)
            if exit_code is not None and exit_code > _MAX_EXIT_CODE:
                problem = f"exit_code: {exit_code} is above {_MAX_EXIT_CODE}"
                raise InvalidArgumentError(problem, hint="pass a code such as 75")
            if on_error not in ("raise", "warn"):
                problem = f"on_error: expected 'raise' or 'warn', found {on_error!r}"
                raise InvalidArgumentError(problem, hint="pass one of the two")
            self._files = RunFiles(self.directory, check_run_id(run_id))
        self._clock = clock
        self._saver = RunSaver(
            self._files,
            self._policies.keep,
            background=background,
            retries=retries,
            raises=on_error == "raise",
            before=lambda: self._session.prepare_save(),
            progress=progress,
            clock=clock,
        )
        now = cast("Any", self._config and read_json(dict(self._config)))
        self._restorer = Restorer(self._files, self._registries, now, progress=progress)
        with error_context(self.directory, "cannot open the run"):
            self._session = RunSession(
                lock=RunLock(self._files, run_id),
                saver=self._saver,
                logs=one_or_several(logs),
                make_steps=self._make_steps,
                signals=signals,
                grace=grace,
                on_exit=on_exit,
                exit_code=exit_code,
            )

    def __repr__(self) -> str:
        """Show directory and id."""
        return f"<Run {self.directory} run_id={self._files.run_id}>"

    # ------------------------------------------------------------ open and close

    def __enter__(self) -> Self:
        """Take the lock and listen for signals.

        Raises:
            RunLockedError: another live process has the run.
            InvalidArgumentError: several runs share the directory; say which.
        """
        with error_context(self.directory, "cannot open the run"):
            self._session.open(repr(self))
        return self

    def __exit__(
        self, kind: object, error: BaseException | None, trace: object
    ) -> None:
        """Save what is not saved, finish what was accepted, give back the rest.

        Raises:
            BackgroundSaveError: a save that was accepted failed.
            SystemExit: the run was asked to stop and has an exit code.
        """
        self._session.leave(error)

    def _make_steps(self) -> RunSteps:
        facts = Metadata(
            checkpoint_id="-",
            run_id=self._files.run_id,
            config=self._config,
            excluded=self._policies.exclude,
            layouts=record_versions(self._registries),
        )
        return RunSteps(self._files, self._saver, self._policies, facts, self._clock)

    def _require_open(self) -> None:
        with error_context(self.directory, ""):
            self._session.require_open()

    # ----------------------------------------------------------------- stopping

    @property
    def stop_requested(self) -> bool:
        """Whether a signal or ``request_stop`` asked the run to stop."""
        self._session.watch.come_round()
        return self._session.watch.requested

    @property
    def stop_signal(self) -> str:
        """The name of the signal that asked, such as SIGTERM; empty if none did."""
        return self._session.watch.signal_name

    def request_stop(self) -> None:
        """Ask the run to stop, as a signal does."""
        self._session.watch.request()

    # ------------------------------------------------------------------- saving

    def step(self, state: Any, *, step: Any, metrics: Measured = None) -> StepReport:
        """Report a step; save it if that is due or the run is to stop.

        With ``background`` the call returns once the state is copied: neither a
        donation nor a write into its numpy leaves changes what is saved.

        Args:
            state: the state after the step.
            step: its number: an int, or an integer array of equal values.
            metrics: what was measured at the step, or a function that measures,
                called only if a save is due.

        Returns:
            Whether a save was accepted, why, where to, and how long it took.

        Raises:
            BackgroundSaveError: an earlier save failed.
            StepExistsError: the run has another state of that step, or later ones.
            DamagedCheckpointError: the run has checkpoints, and none is whole.
            UnsupportedLeafError: a leaf cannot be saved.
            InvalidArgumentError: an argument is wrong.
            NoSpaceError: the disk has no room for what is to be kept.
        """
        self._require_open()
        self._session.watch.come_round()
        self._saver.raise_failure()
        with error_context(self.directory, "cannot save"):
            report = self._session.steps.take(
                state, step, metrics, self._session.stop_reason
            )
        self._session.watch.come_round()
        return report

    def save(self, state: Any, *, step: Any, metrics: Measured = None) -> StepReport:
        """Save a step now, whatever the policies say; the rest is as in ``step``."""
        self._require_open()
        self._saver.raise_failure()
        with error_context(self.directory, "cannot save"):
            return self._session.steps.save(state, step, metrics, ("asked for",))

    def wait(self) -> None:
        """Wait until every save that was accepted is finished.

        Raises:
            BackgroundSaveError: one of them failed.
        """
        self._require_open()
        self._saver.worker.wait()
        self._saver.raise_failure()

    @property
    def failures(self) -> tuple[BackgroundSaveError, ...]:
        """The saves that failed, oldest first; each names its step and cause."""
        return tuple(self._saver.failures)

    @property
    def notes(self) -> tuple[str, ...]:
        """What went wrong without a loss: retries, files that were not removed."""
        return tuple(self._saver.notes)

    def log(self, step: Any, metrics: Mapping[str, Any]) -> None:
        """Add what was measured at a step to every record in ``logs``.

        Raises:
            InvalidArgumentError: a value is not a single number; nothing was added.
        """
        self._require_open()
        with error_context(self.directory, "cannot log"):
            if (number := plain_step(step)) is None:
                problem = "step: expected the number of the step, found None"
                raise InvalidArgumentError(problem, hint="pass step=state.step")
            values = cast("dict[str, Any]", read_json(dict(plain_metrics(metrics))))
        self._session.log(number, values)

    def preflight(self, state: Any) -> PreflightReport:
        """Ask whether the disk has room for the run, and how long a save will take.

        Writes a small probe and removes it.

        Raises:
            NoSpaceError: it has not; says how many bytes are needed and available.
            OSError: nothing can be written there.
            UnsupportedLeafError: a leaf cannot be saved.
        """
        with error_context(self.directory, "cannot save"):
            nbytes = state_bytes(collect_state(state, self._policies.exclude))
            present = sum(entry.nbytes for entry in self._files.entries())
            kept = count_kept(self._policies.keep)
            report = check_space(self.directory, nbytes, kept, present)
            seconds = measure_save(self.directory, nbytes, self._clock)
            return replace(report, seconds=seconds)

    # ---------------------------------------------------------------- restoring

    def restore_or_init(
        self,
        start: Any,
        *,
        keep: Patterns = (),
        ignore: Patterns = (),
        resize: Patterns = (),
    ) -> Restored:
        """Go on from the newest checkpoint that is whole, or begin.

        Args:
            start: the fresh state, which is the skeleton too, or a function without
                arguments that builds it.
            keep: patterns of leaves to take from the skeleton.
            ignore: patterns of the file's leaves to leave unread.
            resize: patterns of leaves that may take the file's shape.

        Returns:
            The state, whether it was restored, from which step, and which newer
            checkpoints were passed over and why.

        Raises:
            DamagedCheckpointError: there are checkpoints and none is whole; nothing
                is removed or overwritten.
            NewerFormatError: a newer release wrote the newest.
            LayoutMismatchError: the newest does not fit the skeleton.
        """
        self._require_open()
        self._session.settle()
        with error_context(self.directory, "cannot restore"):
            try:
                found = self._restorer.restore_or_init(
                    start, keep=keep, ignore=ignore, resize=resize
                )
            except (LayoutMismatchError, MigrationError) as error:
                self._session.steps.refuse(error.problem)
                raise
            self._session.resume_logs(self.run_id or "", found.step)
            self._session.steps.start_from(found.step, found.checkpoint_id or None)
        return found

    def restore(
        self,
        skeleton: Any,
        *,
        step: int | None = None,
        subtree: str = "",
        keep: Patterns = (),
        ignore: Patterns = (),
        resize: Patterns = (),
    ) -> Restored:
        """Restore a step, or the newest checkpoint that is whole.

        Args:
            skeleton: as ``restore_into`` takes it, or a function that builds it.
            step: that step and no other; by default the newest that is whole.
            subtree: restore from below this leaf name.
            keep: patterns of leaves to take from the skeleton.
            ignore: patterns of the file's leaves to leave unread.
            resize: patterns of leaves that may take the file's shape.

        Raises:
            CheckpointNotFoundError: there is none.
            DamagedCheckpointError: it is damaged, or all are.
            LayoutMismatchError: it does not fit the skeleton.
        """
        self._session.settle()
        with error_context(self.directory, "cannot restore"):
            options: dict[str, Any] = {
                "subtree": subtree,
                "keep": keep,
                "ignore": ignore,
                "resize": resize,
            }
            if step is None:
                return self._restorer.restore(None, skeleton, **options)
            return self._restorer.restore_step(step, skeleton, **options)

    def restore_best(
        self,
        skeleton: Any,
        *,
        metric: str | None = None,
        mode: Mode | None = None,
        keep: Patterns = (),
        ignore: Patterns = (),
        resize: Patterns = (),
    ) -> Restored:
        """Restore the best checkpoint that is whole; see ``best`` and ``restore``."""
        self._session.settle()
        with error_context(self.directory, "cannot restore"):
            return self._restorer.restore(
                lambda: self._rank(metric, mode),
                skeleton,
                keep=keep,
                ignore=ignore,
                resize=resize,
            )

    # ------------------------------------------------------- what is in the run

    @property
    def run_id(self) -> str | None:
        """The run's id; None while the directory holds no run and it is not open."""
        return self._files.run_id or self._files.find_run()

    @property
    def config(self) -> dict[str, Any] | None:
        """The config in the newest checkpoint, as plain data; else the one passed."""
        for _ in range(TRIES):
            sound = [entry for entry in self._files.entries() if not entry.problem]
            with contextlib.suppress(CheckpointNotFoundError):  # removed meanwhile
                if sound:
                    with Checkpoint(sound[-1].path) as checkpoint:
                        return checkpoint.config
                break
        return None if self._config is None else dict(self._config)

    def newest(self) -> RunEntry | None:
        """Return the newest checkpoint that is whole; None where there is none.

        Raises:
            DamagedCheckpointError: there are some, and none is whole.
        """
        self._session.settle()
        with error_context(self.directory, "cannot find the newest"):
            return self._files.newest()

    def best(
        self, metric: str | None = None, mode: Mode | None = None
    ) -> RunEntry | None:
        """Return the best checkpoint that is whole; of equals, the newer one.

        Args:
            metric: the metric; by default that of the run's KeepBest.
            mode: ``max`` or ``min``; likewise.

        Returns:
            None where no checkpoint has a finite value of the metric.
        """
        self._session.settle()
        with error_context(self.directory, "cannot find the best"):
            return self._files.first_whole(lambda: self._rank(metric, mode))[0]

    def _rank(self, metric: str | None, mode: Mode | None) -> list[RunEntry]:
        kept = (p for p in self._policies.keep or () if isinstance(p, KeepBest))
        policy = next(kept, None)
        if metric is None and policy is not None:
            metric, mode = policy.metric, mode or policy.mode
        check_metric(metric, mode, "best")
        entries = {e.step: e for e in self._files.entries() if not e.problem}
        candidates = [entry.candidate for entry in entries.values()]
        ranked = rank_best(candidates, metric or "", mode or "max")
        return [entries[candidate.step] for candidate in ranked]

    def list(self) -> tuple[RunEntry, ...]:
        """Return the run's checkpoints by step, the damaged ones included."""
        self._session.settle()
        with error_context(self.directory, "cannot list the run"):
            return tuple(self._files.entries())

    def path(self, step: int) -> str:
        """Return where the checkpoint of a step is, or would be saved."""
        with error_context(self.directory, "cannot name a step"):
            return self._files.path_of(step)

    def pin(self, step: int) -> None:
        """Keep a checkpoint whatever the policies say."""
        self._session.settle()
        with error_context(self.directory, "cannot pin"):
            self._files.pin(step)

    def unpin(self, step: int) -> None:
        """Leave a pinned checkpoint to the policies again."""
        self._session.settle()
        with error_context(self.directory, "cannot unpin"):
            self._files.unpin(step)

    def prune(
        self,
        keep: KeepPolicy | Sequence[KeepPolicy] | None = None,
        *,
        dry_run: bool = False,
    ) -> tuple[str, ...]:
        """Remove what the policies let go; never the newest that is whole.

        Args:
            keep: the policies; by default the run's.
            dry_run: only say what would be removed; the run need not be open.

        Returns:
            The paths of what is, or would be, removed, oldest first.
        """
        if not dry_run:
            self._require_open()
        with error_context(self.directory, "cannot prune"):
            self._session.settle()
            chosen = self._policies.keep
            if keep is not None:
                chosen = check_keep(keep)
                self._refuse_unknown_metrics(chosen)
            gone = self._files.choose_removals(chosen)
            if not dry_run:
                self._files.remove(gone)
            return tuple(entry.path for entry in gone)

    def _refuse_unknown_metrics(self, policies: tuple[KeepPolicy, ...]) -> None:
        """Keep a misspelled metric from deciding what goes."""
        known = {name for entry in self._files.entries() for name in entry.metrics}
        for name in metrics_needed(policies):
            if name not in known:
                raise InvalidArgumentError(
                    f"no checkpoint of the run has the metric {name!r}",
                    hint=f"choose one of {', '.join(sorted(known)) or 'none'}",
                )

    def rollback(self, step: int) -> tuple[str, ...]:
        """Go back to a step on purpose: later checkpoints become ``*.abandoned``.

        Afterwards ``restore_or_init`` goes on from that step, also after a kill.

        Returns:
            The new paths of what was set aside, the newest first.

        Raises:
            CheckpointNotFoundError: the run has no checkpoint of that step.
            DamagedCheckpointError: it is damaged.
        """
        self._require_open()
        with error_context(self.directory, "cannot roll back"):
            self._session.settle()
            aside = self._files.abandon_after(step)
            entry = self._files.require(step)
            self._session.resume_logs(self.run_id or "", entry.step)
            self._session.steps.start_from(entry.step, entry.checkpoint_id)
            return aside


def check_keep(keep: object) -> tuple[KeepPolicy, ...]:
    """Return retention policies as a tuple.

    Raises:
        InvalidArgumentError: something else is among them, or there are none.
    """
    policies = refuse_other(keep, KeepPolicy, "keep")
    if not policies:
        problem = "keep: an empty list would keep nothing but the newest"
        hint = "pass None to keep everything, or KeepLast(1)"
        raise InvalidArgumentError(problem, hint=hint)
    return policies


def one_or_several(value: Any) -> tuple[Any, ...]:
    """Return an argument as a tuple; one alone stands for itself."""
    return tuple(cast("Any", value)) if isinstance(value, list | tuple) else (value,)
