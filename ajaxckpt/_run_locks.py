"""One live writer per run: who holds a run, and how it is taken over from the dead.

Knows lock files; knows nothing of checkpoints. The kernel gives a lock back when its
process is gone, however it went.
"""

from __future__ import annotations

import datetime
import os
import socket

from ajaxckpt._directories import LockHeldError, close_descriptor, hold_lock
from ajaxckpt._errors import RunLockedError
from ajaxckpt._listing import list_directory
from ajaxckpt._run_files import RunFiles

UNLOCKED = (
    "this file system knows no locks: nothing keeps another process from writing the "
    "same run"
)


def lock_path(directory: str, run_id: str | None) -> str:
    """Return the lock file of a run; of whichever run a directory holds, for None."""
    name = ".ajaxckpt-run.lock" if run_id is None else f".ajaxckpt-run-{run_id}.lock"
    return os.path.join(directory, name)


def describe_process() -> str:
    """Return who this process is, for others that want the same run."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return f"process {os.getpid()} on {socket.gethostname()} since {now}"


class RunLock:
    """The right to write one run, held by one process at a time."""

    def __init__(self, files: RunFiles, given_id: str | None) -> None:
        """Hold nothing yet."""
        self._files, self._given_id = files, given_id
        self._held: list[int] = []

    @property
    def is_held(self) -> bool:
        """Whether this process has it."""
        return bool(self._held)

    def take(self) -> tuple[str, ...]:
        """Take it, and settle which run it is for.

        Returns:
            What is to be noted: that the file system knows no locks.

        Raises:
            RunLockedError: another live process has it.
            InvalidArgumentError: several runs share the directory; say which.
        """
        try:
            list_directory(self._files.directory)  # a file there is refused by name
            # first: two processes that begin in an empty directory are one run's
            known = self._given_id is not None or self._hold(None)
            known = self._hold(self._files.adopt()) and known
        except BaseException:
            self.release()
            raise
        return () if known else (UNLOCKED,)

    def release(self) -> None:
        """Give it back; a forked child gives back its share of the parent's."""
        while self._held:
            close_descriptor(self._held.pop())

    def _hold(self, run_id: str | None) -> bool:
        path = lock_path(self._files.directory, run_id)
        try:
            fd, known = hold_lock(path, describe_process())
        except LockHeldError as error:
            raise RunLockedError(
                f"the run is being written by {error}",
                hint="wait for it, stop it, or open another run with run_id=",
            ) from None
        self._held.append(fd)
        return known
