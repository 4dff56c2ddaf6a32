"""One live writer per run: who holds a run, and how it is taken over from the dead.

Knows lock files; knows nothing of checkpoints. The kernel gives a lock back when its
process is gone, however it went.
"""

from __future__ import annotations

import datetime
import os
import re
import socket

from ajaxckpt._directories import (
    LockHeldError,
    close_descriptor,
    hold_lock,
    sign_lock,
)
from ajaxckpt._errors import RunLockedError
from ajaxckpt._listing import list_directory
from ajaxckpt._run_files import RunFiles

_BEGUN = re.compile(r"^run ([A-Za-z0-9_-]{1,64})$", re.MULTILINE)
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
        self._held: dict[str, int] = {}

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
        list_directory(self._files.directory)  # a file there is refused by name
        try:
            return () if self._take() else (UNLOCKED,)
        except BaseException:
            self.release()
            raise

    def _take(self) -> bool:
        """Take the locks; return whether the file system knows any."""
        owner, known = describe_process(), True
        if self._given_id is not None:
            self._files.adopt()
        else:
            # first: two processes that begin in an empty directory are one run's.
            # The id is kept there too: a kill before the first save is no new run
            fd, known, before = self._hold(None)
            begun = _BEGUN.search(before)
            run_id = self._files.adopt(begun[1] if begun else None)
            sign_lock(fd, f"{owner}\nrun {run_id}\n")
        fd, also, _ = self._hold(self._files.run_id)
        sign_lock(fd, f"{owner}\n")
        return known and also

    def check(self) -> None:
        """Make sure that the run is still where it was when it was opened.

        Raises:
            RunLockedError: its directory was moved, removed or replaced, or another
                process took a lock whose file was removed.
        """
        for name, fd in self._held.items():
            try:
                now, held = os.stat(name), os.fstat(fd)
                if (now.st_dev, now.st_ino) == (held.st_dev, held.st_ino):
                    continue
            except FileNotFoundError:
                pass
            raise RunLockedError(
                "the run is not where it was opened: its directory or its lock was "
                "moved, removed or replaced",
                path=name,
                hint="put it back, or open the run again where it is now",
            )

    def release(self) -> None:
        """Give it back; a forked child gives back its share of the parent's."""
        while self._held:
            close_descriptor(self._held.popitem()[1])

    def _hold(self, run_id: str | None) -> tuple[int, bool, str]:
        path = lock_path(self._files.directory, run_id)
        try:
            found = hold_lock(path)
        except LockHeldError as error:
            raise RunLockedError(
                f"the run is being written by {error}",
                hint="wait for it, stop it, or open another run with run_id=",
            ) from None
        self._held[path] = found[0]
        return found
