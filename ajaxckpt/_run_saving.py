"""One accepted save after the other: written, read back, then the old ones let go.

Knows snapshots, the files of a run and a worker; knows no pytrees and no signals.
Nothing is removed before the new file is durable and was read back whole.
"""

from __future__ import annotations

import logging
import os
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ajaxckpt._background import Clock, Worker, try_again
from ajaxckpt._directories import set_aside
from ajaxckpt._errors import (
    BackgroundSaveError,
    CheckpointError,
    DamagedCheckpointError,
    NotACheckpointError,
)
from ajaxckpt._listing import describe_problem
from ajaxckpt._metadata import Metadata
from ajaxckpt._progress import show_progress
from ajaxckpt._reader import Checkpoint
from ajaxckpt._retention import KeepPolicy
from ajaxckpt._run_files import RunFiles
from ajaxckpt._snapshot import Snapshot
from ajaxckpt._writer import state_bytes, write_checkpoint

_ASIDE = ".aside"
_log = logging.getLogger("ajaxckpt")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What became of a step that was reported.

    Attributes:
        step: the step.
        saved: whether a save of it was accepted.
        reasons: why it was due, one per policy; empty if it was not.
        path: the file it goes to; empty where nothing is saved.
        waited_seconds: how long the call waited for an earlier save: more than zero
            where saves come faster than the disk takes them.
        snapshot_seconds: how long copying the state took.
        snapshot_bytes: how many bytes were copied.
    """

    step: int
    saved: bool
    reasons: tuple[str, ...] = ()
    path: str = ""
    waited_seconds: float = 0.0
    snapshot_seconds: float = 0.0
    snapshot_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A save that was accepted.

    Attributes:
        path: where to.
        snapshot: what.
        metadata: what the file says of itself.
        displaces: whether what lies there is to be set aside, not replaced.
    """

    path: str
    snapshot: Snapshot
    metadata: Metadata
    displaces: bool = False


class RunSaver:
    """Carries out the saves of one run, in their order.

    Attributes:
        worker: where they are carried out, unless it is in the foreground.
        failures: every save that failed for good, oldest first.
        notes: what else went wrong without a loss: retries, files not removed.
        last_id: the id of the checkpoint that the next one continues.
        last_failed: the step of the last save, if that failed.
    """

    def __init__(
        self,
        files: RunFiles,
        keep: Sequence[KeepPolicy] | None,
        *,
        background: bool,
        retries: int,
        raises: bool,
        before: Callable[[], None],
        progress: bool = False,
        clock: Clock = time,
    ) -> None:
        """Carry out nothing yet.

        Args:
            files: the run's files.
            keep: its retention policies; None to keep everything.
            background: whether saves are carried out by the worker.
            retries: how often to try again after a transient error.
            raises: whether a failure is raised at the next call.
            before: called before each file is written.
            progress: whether to show a bar while one is written.
            clock: what to wait by between retries.
        """
        self.worker = Worker()
        self.failures: list[BackgroundSaveError] = []
        self.notes: list[str] = []
        self._files, self._keep = files, keep
        self._background, self._retries, self._raises = background, retries, raises
        self._before, self._progress, self._clock = before, progress, clock
        self._untold: list[BackgroundSaveError] = []
        self.last_id: str | None = None
        self.last_failed: int | None = None

    def accept(self, order: Order) -> bool:
        """Save, now or in the background.

        Returns:
            False if it was to be done now, and failed, and failures are not raised.

        Raises:
            CheckpointError, OSError: the save failed, and was to be done now.
        """
        if self._background:
            self.worker.submit(partial(self._carry_out, order))
            return True
        error = self._carry_out(order)
        if error is not None and self._raises:
            self._untold.clear()
            raise error
        return error is None

    def raise_failure(self) -> None:
        """Raise the first failure that was not told yet, the others as its notes.

        Raises:
            BackgroundSaveError: names the step; its cause is what went wrong.
        """
        untold: list[BackgroundSaveError] = []
        while self._untold:
            untold.append(self._untold.pop(0))
        for other in untold[1:]:
            untold[0].add_note(other.problem)
        if untold:
            raise untold[0]

    def _carry_out(self, order: Order) -> Exception | None:
        try:
            self._save(order)
        except Exception as error:
            self._fail(order.metadata.step, error)
            return error
        finally:
            order.snapshot.release()
        self._let_go(order)
        return None

    def _save(self, order: Order) -> None:
        def tell(retry: int, error: Exception) -> None:
            step, problem = order.metadata.step, describe_problem(error)
            self.note(f"step {step}: try {retry} failed, trying again: {problem}")

        def write() -> None:
            self._before()
            self._clear_place(order)
            self._write(order)
            self._read_back(order)

        try_again(write, self._retries, tell, self._clock)
        self.last_id, self.last_failed = order.metadata.checkpoint_id, None

    def _clear_place(self, order: Order) -> None:
        """Set aside what lies in the way and is no damaged file of this step.

        What cannot be read may be whole; what an earlier try wrote is written over.
        """
        if not os.path.lexists(order.path):
            return
        try:
            with Checkpoint(order.path) as there:
                own = there.checkpoint_id == order.metadata.checkpoint_id
                is_strange = order.displaces and not own
        except DamagedCheckpointError:
            is_strange = order.displaces
        except (CheckpointError, PermissionError):
            is_strange = True
        if is_strange:
            self._set_aside(order)

    def _write(self, order: Order) -> None:
        try:
            self._write_over(order)
        except NotACheckpointError:  # damaged where it says that it is ours
            self._set_aside(order)
            self._write_over(order)

    def _read_back(self, order: Order) -> None:
        try:
            self._files.read_back(order.path)
        except DamagedCheckpointError as error:
            raise DamagedCheckpointError(
                f"what was written does not read back: {describe_problem(error)}",
                path=order.path,
                hint="check the disk; the earlier checkpoints were kept",
            ) from error

    def _set_aside(self, order: Order) -> None:
        aside = set_aside(order.path, _ASIDE)
        self.note(f"step {order.metadata.step}: {order.path} became {aside}")

    def _write_over(self, order: Order) -> None:
        data = order.snapshot.data
        label = f"saving {os.path.basename(order.path)}"
        with show_progress(label, state_bytes(data), wanted=self._progress) as told:
            metadata = replace(order.metadata, parent_id=self.last_id)
            write_checkpoint(order.path, data, metadata, told)

    def _let_go(self, order: Order) -> None:
        """Apply the retention; a file that cannot be removed costs no training."""
        try:
            gone = self._files.choose_removals(self._keep)
            self._files.remove([e for e in gone if e.path != order.path])
        except Exception as error:
            self.note(f"old checkpoints stay: {describe_problem(error)}")

    def _fail(self, step: int | None, error: Exception) -> None:
        failure = BackgroundSaveError(
            f"step {step} was not saved: {describe_problem(error)}",
            path=self._files.directory,
            hint="mend the cause; the run goes on, and its next save may succeed",
        )
        failure.step = self.last_failed = step
        failure.__cause__ = error
        traceback.clear_frames(error.__traceback__)  # they hold the snapshot
        self.failures.append(failure)
        if self._raises:
            self._untold.append(failure)
        _log.error("%s", failure)

    def note(self, text: str) -> None:
        """Keep and log what went wrong without an error."""
        self.notes.append(text)
        _log.warning("%s: %s", self._files.directory, text)
