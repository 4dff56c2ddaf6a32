"""A request to stop: signals set it, the loop looks at it, and a watch sees to it.

Knows signals and threads; knows nothing of checkpoints. A handler sets a flag and
returns: nothing is saved inside of one. The watch sees a signal at once, even while
the main thread is inside a long computation and runs no handler.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from ajaxckpt._errors import InvalidArgumentError

_CLOSE = 0  # no signal has this number
_STUCK_SECONDS = 1.0  # a main thread that runs no handler for so long is busy


class StopWatch:
    """Listens for signals between ``start`` and ``close``.

    Attributes:
        requested: whether the run was asked to stop.
        signal_name: the first signal that did, such as ``SIGTERM``; empty if none.
    """

    def __init__(
        self,
        signals: Sequence[int],
        grace: float,
        on_grace: Callable[[], None],
        on_stuck: Callable[[int], None],
    ) -> None:
        """Listen for nothing yet.

        Args:
            signals: the signals that ask the run to stop.
            grace: seconds the loop has to come round after the first of them.
            on_grace: called from a thread of its own once they are over.
            on_stuck: called likewise, with the signal, after a second one that the
                main thread does not take.

        Raises:
            InvalidArgumentError: no signal, or one that nobody can handle.
        """
        self._signals = tuple(map(_check_signal, signals))
        self._grace = grace
        self._on_grace, self._on_stuck = on_grace, on_stuck
        self._earlier: dict[int, Any] = {}
        self._pair: tuple[socket.socket, socket.socket] | None = None
        self._outer_fd = -1
        self._threads: list[threading.Thread] = []
        self._reset()

    def _reset(self) -> None:
        self.requested, self.signal_name = False, ""
        self._handled = self._arrived = 0
        self._open = False
        self._once = threading.Lock()
        self._is_counting_down = False
        self._came_round = threading.Event()
        self._closed = threading.Event()

    @property
    def came_round(self) -> bool:
        """Whether the loop has seen, or will see, the request by itself."""
        return self._came_round.is_set()

    def start(self) -> bool:
        """Install the handlers.

        Returns:
            False off the main thread, where no handler can be installed.
        """
        self._reset()
        self._earlier = {}
        if threading.current_thread() is not threading.main_thread():
            return not self._signals
        self._open = True
        self._start_watch()
        for number in self._signals:
            earlier = signal.getsignal(number)
            if earlier is not signal.SIG_IGN:  # as for a job of nohup, or of `&`
                self._earlier[number] = earlier
                signal.signal(number, self._handle)
        return True

    def close(self) -> None:
        """Put the earlier handlers back and end the threads."""
        self._restore_handlers()
        self._came_round.set()
        self._closed.set()
        if self._pair is not None:
            _give_back_wakeup_fd(self._outer_fd, self._pair[1].fileno())
            with contextlib.suppress(OSError):
                self._pair[1].send(bytes([_CLOSE]))
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        self._threads = []
        self._close_pair()

    def request(self) -> None:
        """Ask the run to stop, as a signal does."""
        self.requested = True

    def come_round(self, *, always: bool = False) -> None:
        """Say that the loop is there again: it will see the request itself."""
        if self.requested or always:
            self._came_round.set()

    def forget_in_child(self) -> None:
        """Leave signals to the parent: a forked child is not the run."""
        self._restore_handlers()
        if self._pair is not None:
            _give_back_wakeup_fd(self._outer_fd, self._pair[1].fileno())
        self._threads = []
        self._close_pair()

    def _restore_handlers(self) -> None:
        """Put back what was there; a handler installed later is its owner's."""
        self._open = False
        for number in self._earlier:
            earlier = self._find_earlier(number)
            if signal.getsignal(number) == self._handle and earlier is not None:
                with contextlib.suppress(ValueError):  # not the main thread
                    signal.signal(number, earlier)

    def _handle(self, number: int, frame: Any) -> None:
        if self._open:
            self._handled += 1
            self._ask(number)
        self._pass_on(number, frame)
        if self._open and max(self._handled, self._arrived) > 1:
            raise KeyboardInterrupt(f"a second signal, {name_signal(number)}")

    def _find_earlier(self, number: int) -> Any:
        """Return the handler that was there before, past watches closed since."""
        earlier = self._earlier.get(number, signal.SIG_DFL)
        watch = getattr(earlier, "__self__", None)
        while isinstance(watch, StopWatch) and not watch._open:
            earlier = watch._earlier.get(number, signal.SIG_DFL)
            watch = getattr(earlier, "__self__", None)
        return earlier

    def _pass_on(self, number: int, frame: Any) -> None:
        """Call the earlier handler; closed, do what it would do without this one."""
        earlier = self._find_earlier(number)
        if callable(earlier):
            if not (self._open and earlier is signal.default_int_handler):
                earlier(number, frame)
        elif not self._open and earlier == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    def _ask(self, number: int) -> None:
        """Set the request; from the first one on, the grace time runs."""
        self.signal_name = self.signal_name or name_signal(number)
        self.requested = True
        with self._once:
            first, self._is_counting_down = not self._is_counting_down, True
        if first:
            self._spawn(self._await_loop, "ajaxckpt-grace")

    def _spawn(self, act: Callable[..., None], name: str, *args: int) -> None:
        thread = threading.Thread(target=act, name=name, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _start_watch(self) -> None:
        self._pair = socket.socketpair()
        self._pair[1].setblocking(False)
        self._outer_fd = signal.set_wakeup_fd(
            self._pair[1].fileno(), warn_on_full_buffer=False
        )
        self._spawn(self._watch, "ajaxckpt-signals")

    def _close_pair(self) -> None:
        if self._pair is not None:
            for end in self._pair:
                end.close()
            self._pair = None

    def _watch(self) -> None:
        """Read what the C-level handler writes: the number of each signal."""
        assert self._pair is not None
        inbox = self._pair[0]
        while received := inbox.recv(64):
            for number in received:
                if number == _CLOSE:
                    return
                self._forward(number)
                if number in self._earlier and self._open:
                    self._arrive(number)

    def _forward(self, number: int) -> None:
        if self._outer_fd != -1:
            with contextlib.suppress(OSError):
                os.write(self._outer_fd, bytes([number]))

    def _arrive(self, number: int) -> None:
        self._arrived += 1
        self._ask(number)
        if self._arrived == 2:
            self._spawn(self._await_second, "ajaxckpt-second", number)

    def _await_loop(self) -> None:
        if not self._came_round.wait(self._grace):
            self._on_grace()

    def _await_second(self, number: int) -> None:
        """Interrupt a main thread that took two signals for one, or takes none."""
        if self._closed.wait(_STUCK_SECONDS) or self._handled > 1:
            return
        if self._handled == 1:
            signal.pthread_kill(threading.main_thread().ident or 0, number)
            if self._closed.wait(_STUCK_SECONDS) or self._handled > 1:
                return
        self._on_stuck(number)


def _check_signal(number: int) -> int:
    uncaught = {getattr(signal, name, 0) for name in ("SIGKILL", "SIGSTOP")}
    if type(number) is bool or number not in signal.valid_signals() - uncaught:
        problem = f"signals: {number!r} is no signal that can be handled"
        raise InvalidArgumentError(problem, hint="pass such as signal.SIGTERM")
    return int(number)


def _give_back_wakeup_fd(fd: int, expected: int) -> None:
    """Put an earlier wakeup descriptor back, unless somebody came after us."""
    with contextlib.suppress(OSError, ValueError):  # closed, or not the main thread
        current = signal.set_wakeup_fd(-1)
        wanted = fd if current in (expected, -1) else current
        signal.set_wakeup_fd(wanted, warn_on_full_buffer=False)


def name_signal(number: int) -> str:
    """Return a signal's name.

    Example:
        >>> from ajaxckpt._signals import name_signal
        >>> name_signal(15)
        'SIGTERM'
    """
    try:
        return signal.Signals(number).name
    except ValueError:  # one of the unnamed real-time signals
        return f"signal {number}"


def exit_code_of(number: int) -> int:
    """Return the exit code that shells give a process that a signal ended."""
    return 128 + number


def leave_now(code: int) -> None:
    """End the process at once, without its main thread's consent."""
    # a thread of its own: the main thread may be stuck inside of a print
    flush = threading.Thread(target=_flush, daemon=True)
    flush.start()
    flush.join(_STUCK_SECONDS)
    os._exit(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
