"""From opening a run to leaving it: lock, signals, the last save, and who may write.

Joins the lock, the watch, the steps and the saver of one run; knows no policies and
no restoring.
"""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ajaxckpt._errors import InvalidArgumentError
from ajaxckpt._metrics_log import LogHook
from ajaxckpt._run_locks import RunLock
from ajaxckpt._run_saving import RunSaver
from ajaxckpt._run_steps import RunSteps
from ajaxckpt._signals import StopWatch, exit_code_of, leave_now

_open_sessions: weakref.WeakSet[RunSession] = weakref.WeakSet()


class RunSession:
    """A run while it is open, and how it ends, in whatever way it does.

    Attributes:
        steps: the steps of this opening.
        saver: what carries out the saves.
        watch: what listens for signals.
        logs: the records to be resumed and closed with the run.
    """

    def __init__(
        self,
        *,
        lock: RunLock,
        saver: RunSaver,
        logs: Sequence[LogHook],
        make_steps: Callable[[], RunSteps],
        signals: Sequence[int],
        grace: float,
        on_exit: bool,
        exit_code: int | None,
    ) -> None:
        """Open nothing yet.

        Raises:
            InvalidArgumentError: one of the signals cannot be handled.
        """
        self.saver, self.logs = saver, tuple(logs)
        self.watch = StopWatch(signals, grace, self._save_late, self._leave_stuck)
        self.steps = make_steps()
        self._lock, self._make_steps = lock, make_steps
        self._grace, self._on_exit, self._exit_code = grace, on_exit, exit_code
        self._process = 0

    def open(self, name: str) -> None:
        """Take the lock and listen for signals.

        Raises:
            RunLockedError: another live process has the run.
            InvalidArgumentError: it is open, or several runs share the directory.
        """
        if self._lock.is_held:
            raise InvalidArgumentError("the run is open already", hint="open it once")
        self.saver.notes += self._lock.take()
        try:
            self._process = os.getpid()
            self.steps = self._make_steps()
            if not self.watch.start():
                text = f"{name} is opened off the main thread: signals do not stop it"
                warnings.warn(text, RuntimeWarning, stacklevel=3)
        except BaseException:
            self.watch.close()
            self._lock.release()
            raise
        _open_sessions.add(self)

    def leave(self, error: BaseException | None) -> None:
        """Save what is not saved, finish what was accepted, give back the rest.

        Raises:
            BackgroundSaveError: a save that was accepted failed.
            SystemExit: the run was asked to stop and has an exit code.
        """
        if os.getpid() != self._process:
            return
        try:
            self._leave(error)
        except KeyboardInterrupt:  # of a second signal, maybe before all was closed
            self._close()
            if self._exit_code is None:
                raise
            raise SystemExit(self._exit_code) from None

    def _leave(self, error: BaseException | None) -> None:
        try:
            self.watch.come_round(always=True)
            self._finish(error)
        finally:
            self._close()
        ends = error is None or isinstance(error, KeyboardInterrupt)
        if self.watch.requested and self._exit_code is not None and ends:
            raise SystemExit(self._exit_code)

    def _finish(self, error: BaseException | None) -> None:
        """Save the tail and wait; a failure never hides the error that is raised."""
        # an earlier handler may exit in the middle of an update
        asked = isinstance(error, SystemExit) and not self.watch.requested
        certain = error is None or asked
        try:
            if self._on_exit or self.watch.requested:
                self.steps.save_tail(certain=certain)
            self.saver.worker.close()
            self.saver.raise_failure()
        except Exception as failure:
            self.saver.worker.close()
            if error is None:
                raise
            error.add_note(f"while the run was left: {failure}")

    def _close(self) -> None:
        _open_sessions.discard(self)
        with contextlib.ExitStack() as stack:  # all of them, whichever fails
            stack.callback(self._release_lock)
            for log in self.logs:
                stack.callback(log.close)
            stack.callback(self.steps.close)
            stack.callback(self.watch.close)

    def _release_lock(self) -> None:
        """Give the lock back, after the last save where one is still written."""
        if self.saver.worker.unfinished:
            self.saver.worker.submit(self._lock.release)
        else:
            self._lock.release()

    def forget(self) -> None:
        """Leave the run to the parent: a forked child writes nothing."""
        self._lock.release()
        self.watch.forget_in_child()

    def require_open(self) -> None:
        """Refuse to write a run that this process has not opened.

        Raises:
            InvalidArgumentError: it has not.
        """
        if self._lock.is_held and os.getpid() == self._process:
            return
        problem, hint = "the run is not open", "write `with Run(…) as run:`"
        if self._process not in (0, os.getpid()):
            problem = "a forked child does not write its parent's run"
            hint = "report steps from the process that opened the run"
        raise InvalidArgumentError(problem, hint=hint)

    @property
    def stop_reason(self) -> str:
        """What asked the run to stop; empty if nothing did."""
        if not self.watch.requested:
            return ""
        return self.watch.signal_name or "stop requested"

    def settle(self) -> None:
        """Let what this process accepted be on the disk before the disk is asked."""
        self.saver.worker.wait()

    def prepare_save(self) -> None:
        """Make sure of the lock, and rows of the logs as durable as the file to come.

        Raises:
            RunLockedError: the run is not where it was opened.
        """
        self._lock.check()
        for log in self.logs:
            log.sync()

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Add what was measured at a step to every record."""
        for log in self.logs:
            log.append(step, metrics)

    def resume_logs(self, run_id: str, step: int | None) -> None:
        """Cut every record back to a step."""
        for log in self.logs:
            log.resume(run_id, step)

    def _save_late(self) -> None:
        """Save without the loop, which did not come round in time."""
        self._save_what_is_left()
        if self._exit_code is not None and not self.watch.came_round:
            leave_now(self._exit_code)

    def _save_what_is_left(self) -> None:
        try:
            self.steps.save_tail(certain=False)
            self.saver.worker.wait()
        except Exception as error:
            self.saver.notes.append(f"the last state was not saved: {error}")

    def _leave_stuck(self, number: int) -> None:
        """End a process whose main thread takes no second signal."""
        saving = threading.Thread(target=self._save_what_is_left, daemon=True)
        saving.start()
        saving.join(self._grace)
        code = exit_code_of(number) if self._exit_code is None else self._exit_code
        leave_now(code)


def _forget_in_child() -> None:
    for session in list(_open_sessions):
        session.forget()
    _open_sessions.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)
