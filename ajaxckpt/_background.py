"""Jobs in one thread, in their order, each of them finished before the process ends.

Knows threads and errors; knows nothing of states or files.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Protocol, TypeVar

T = TypeVar("T")
_log = logging.getLogger("ajaxckpt")

# what a network file system, a quota or a full disk may take back
_TRANSIENT = frozenset(
    getattr(errno, name)
    for name in (
        *("EIO", "EAGAIN", "EBUSY", "EINTR", "ESTALE", "ETIMEDOUT", "ENOSPC"),
        *("EDQUOT", "ENETDOWN", "ENETUNREACH", "ECONNRESET", "EHOSTDOWN"),
    )
    if hasattr(errno, name)
)
_FIRST_WAIT = 0.5


class Clock(Protocol):
    """What tells the time; the module ``time`` does."""

    def monotonic(self) -> float:
        """Return seconds that never go back."""
        ...

    def sleep(self, seconds: float, /) -> None:
        """Wait."""
        ...


class Worker:
    """Runs jobs in their order in one thread, which ends when none is left.

    The thread is none of the daemons: the interpreter waits for it, so that what was
    accepted is finished at a normal exit, at an unhandled exception and at
    ``sys.exit``.
    """

    def __init__(self) -> None:
        """Start no thread yet."""
        self.forget()
        _workers.add(self)

    def forget(self) -> None:
        """Have no job and no thread, as in a forked child: the parent does them."""
        self._changed = threading.Condition()
        self._jobs: deque[Callable[[], object]] = deque()
        self._unfinished = 0
        self._thread: threading.Thread | None = None

    @property
    def unfinished(self) -> int:
        """How many jobs were accepted and are not finished."""
        return self._unfinished

    def submit(self, job: Callable[[], object]) -> None:
        """Accept a job; it must deal with its own errors."""
        with self._changed:
            self._jobs.append(job)
            self._unfinished += 1
        self._start()

    def _start(self) -> None:
        """See to it that a thread does what is to be done."""
        thread = self._thread
        if thread is not None and thread.is_alive():
            return
        # at the interpreter's end, a thread would not be waited for, or not start
        if not threading.main_thread().is_alive():
            self._run()
            return
        with self._changed:
            # one that was never started: the call was interrupted
            if self._thread is not None and self._thread.ident is None:
                self._thread = None
            if self._thread is not None or not self._jobs:
                return
            # else it takes after the thread that submits, and JAX's callbacks are
            # called in daemons
            thread = threading.Thread(
                target=self._run, name="ajaxckpt-save", daemon=False
            )
            self._thread = thread
            try:
                thread.start()
            except RuntimeError:
                self._thread = None
        if thread.ident is None:
            self._run()

    def wait(self, most: int = 0, timeout: float | None = None) -> bool:
        """Wait until at most so many jobs are unfinished.

        Returns:
            False if the time ran out before.
        """
        self._start()
        with self._changed:
            return self._changed.wait_for(lambda: self._unfinished <= most, timeout)

    def close(self) -> None:
        """Wait until all jobs are finished and the thread is gone."""
        self.wait()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._jobs:
                    self._thread = None
                    return
                job = self._jobs.popleft()
            try:
                job()
            except Exception:  # a job deals with its own; never let one end the thread
                _log.exception("a job failed")
            finally:
                del job
                with self._changed:
                    self._unfinished -= 1
                    self._changed.notify_all()


def _forget_in_child() -> None:
    for worker in list(_workers):
        worker.forget()


_workers: weakref.WeakSet[Worker] = weakref.WeakSet()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)


def is_transient(error: BaseException) -> bool:
    """Tell whether trying again may help.

    Example:
        >>> from ajaxckpt._background import is_transient
        >>> is_transient(OSError(5, "EIO")), is_transient(PermissionError(13, "no"))
        (True, False)
    """
    return isinstance(error, OSError) and error.errno in _TRANSIENT


def try_again(
    act: Callable[[], T],
    retries: int,
    told: Callable[[int, Exception], None],
    clock: Clock = time,
) -> T:
    """Act, and act again after a transient error, waiting twice as long each time.

    Args:
        act: what to do; it leaves nothing behind where it fails.
        retries: how often to try again at most.
        told: called with the number of the retry and the error before each.
        clock: what to wait by.

    Raises:
        OSError: the last error, or the first that is not transient.
    """
    for retry in range(1, retries + 1):
        try:
            return act()
        except OSError as error:
            if not is_transient(error):
                raise
            told(retry, error)
            clock.sleep(_FIRST_WAIT * 2 ** (retry - 1))
    return act()
