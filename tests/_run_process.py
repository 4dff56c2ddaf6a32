"""Real processes that train in a ``Run``, for the tests to signal.

Run as a script it is a nursery: it imports jax once, starts no backend and no thread,
and forks a fresh process for every scene it is given. A process plays its scene and
ends as any script does, through the interpreter's own exit. A test steers it by
``Nursery`` and ``Process``.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import faulthandler
import gc
import json
import linecache
import multiprocessing
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

import ajaxckpt
from ajaxckpt import KeepLast, Run, RunLockedError, SaveEvery

SECONDS = 30  # no wait is longer
_SIZE = 16


def weights_at(step: int) -> np.ndarray:
    """Return the weights after a step: exact in float32, whatever adds them up."""
    return np.arange(_SIZE, dtype=np.float32) + step * (step + 1) // 2


# ------------------------------------------------------------------- in the process


def say(*words: Any) -> None:
    os.write(1, f"{json.dumps(words)}\n".encode())


def await_go() -> None:
    assert os.read(0, 1) == b"g"


def _is_told(seconds: float = 0.0) -> bool:
    return bool(select.select([0], [], [], seconds)[0])


def start_state(kind: str) -> dict[str, Any]:
    if kind == "numpy":
        return {"w": weights_at(0), "step": 0}
    if kind == "large":
        replay = np.zeros(70 << 20, np.uint8)
        return {"w": weights_at(0), "step": 0, "replay": replay}
    import jax.numpy as jnp

    return {"w": jnp.asarray(weights_at(0)), "step": jnp.int32(0)}


def make_advance(kind: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return the step; numpy's is in place, ``donated`` takes its argument's memory."""
    if kind in ("numpy", "large"):

        def add(state: dict[str, Any]) -> dict[str, Any]:
            state["step"] += 1
            state["w"] += state["step"]
            return state

        return add
    import jax

    def advance(state: dict[str, Any]) -> dict[str, Any]:
        step = state["step"] + 1
        return {"w": state["w"] + step.astype("float32"), "step": step}

    donate = (0,) if kind == "donated" else ()
    return jax.jit(advance, donate_argnums=donate)


def make_computation() -> Callable[[Any, int], Any]:
    """Return a jitted identity that takes long: some 20 microseconds a round."""
    import jax
    import jax.numpy as jnp

    @jax.jit
    def compute(weights: Any, rounds: Any) -> Any:
        matrix = jnp.eye(64)

        def body(carry: tuple[Any, Any]) -> tuple[Any, Any]:
            return carry[0] + 1, carry[1] @ matrix

        wide = jnp.pad(weights, (0, 64 - _SIZE))
        carry = jax.lax.while_loop(lambda c: c[0] < rounds, body, (0, wide))
        return carry[1][:_SIZE]

    jax.block_until_ready(compute(weights_at(0), 1))
    say("in", "jitted")
    return compute


class Stuck:
    """A C call that signals do not end, and no handler runs in."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None)
        self._mutex = ctypes.create_string_buffer(128)
        self._libc.pthread_mutex_lock(self._mutex)

    def wait(self) -> None:
        """Wait in the C library until the test says go."""
        threading.Thread(target=self._release, daemon=True).start()
        self._libc.pthread_mutex_lock(self._mutex)

    def _release(self) -> None:
        await_go()
        self._libc.pthread_mutex_unlock(self._mutex)


def write_while_copied(weights: Any) -> None:
    """Write into an array at the moment another thread copies it."""
    real, copying, written = np.copyto, threading.Event(), threading.Event()

    def copy(*args: Any, **kwargs: Any) -> None:
        copying.set()
        written.wait(SECONDS)
        real(*args, **kwargs)

    np.copyto = copy
    while not copying.wait(0.01) and not _is_told():
        pass
    weights += 100
    written.set()
    await_go()
    weights -= 100


def evaluate(how: str) -> None:
    """Do what takes long and looks at nothing, until the test says go."""
    if how == "in C":
        Stuck().wait()
    elif how == "in Python":
        while not _is_told():
            time.sleep(0.01)
        await_go()
    elif how == "in print":
        pipe = os.pipe()
        sys.stdout = os.fdopen(pipe[1], "w")
        while True:
            print("x" * 60000)
    else:
        raise AssertionError(how)


calls: Counter[str] = Counter()


def wait_in(name: str, *, nth: int = 1, ending: str = "") -> None:
    """Stop in the nth call of an ``os`` function, until the test says go."""
    real = getattr(os, name)

    def stop(*args: Any, **kwargs: Any) -> Any:
        if str(args[0]).endswith(ending):
            calls[name] += 1
            if calls[name] == nth:
                say("in", name)
                await_go()
        return real(*args, **kwargs)

    setattr(os, name, stop)


def open_run(directory: str, **options: Any) -> Run:
    """Open a run whose policies are given as plain numbers."""
    for name in {"save", "hold"} & set(options):
        options[name] = SaveEvery(steps=options[name])
    if "keep" in options:
        options["keep"] = KeepLast(options["keep"])
    return Run(directory, **options)


def train(
    directory: str,
    *,
    last: int,
    kind: str = "jax",
    at: int = 0,
    act: str = "",
    call: dict[str, Any] | None = None,
    polls: bool = True,
    seconds: float = 0.0,
    **options: Any,
) -> None:
    """Train to a step; at one of them do something long."""
    with open_run(directory, **options) as run:
        restored = run.restore_or_init(start_state(kind))
        state, step = restored.state, restored.step or 0
        advance = make_advance(kind)
        while step < last and not (polls and run.stop_requested):
            time.sleep(seconds)
            if step == at and act == "jitted":
                compute, end = make_computation(), time.monotonic() + 1.0
                while time.monotonic() < end:
                    state["w"] = compute(state["w"], 10_000).block_until_ready()
            elif step == at and act == "pending":
                state["w"] = make_computation()(state["w"], 50_000_000)
            elif step == at and act == "writing":
                say("in", act)
                write_while_copied(state["w"])
            elif step == at and act:
                if kind == "donated":
                    held = advance(state)
                if kind == "numpy":
                    state["w"] += 100  # half-way through a step
                say("in", act)
                evaluate(act)
                if kind == "numpy":
                    state["w"] -= 100
                if kind == "donated":
                    state, step = held, step + 1
                    say("step", step, run.step(state, step=step).saved)
                    continue
            if step == at and call:
                wait_in(**call)
            if "hold" in options:
                run.wait()  # nothing is held while a save is being written
            state, step = advance(state), step + 1
            say("step", step, run.step(state, step=step).saved)
            if act == "pending" and step == at + 1:
                evaluate("in C")
    say("left", run.stop_signal)


def restore(directory: str, call: dict[str, Any], **options: Any) -> None:
    """Stop while the state is being restored."""
    with open_run(directory, **options) as run:
        skeleton = start_state("jax")
        wait_in(**call)
        restored = run.restore_or_init(skeleton)
        say("restored", restored.step, run.stop_requested)
    say("left", run.stop_signal)


def leave(directory: str, how: str, kind: str = "jax", **options: Any) -> None:
    """Report three steps of which the last is not due, begin a fourth, and leave."""
    state, advance = start_state(kind), make_advance(kind)
    with open_run(directory, save=2, **options) as run:
        for step in range(1, 4):
            state = advance(state)
            run.step(state, step=step)
        if how == "exception, half-way":
            state["w"] = state["w"] + 4  # jax: a new array in the same dict
            raise ValueError("stop here")
        if how == "exception, half-way in place":
            state["w"] += 4
            raise ValueError("stop here")
        if how == "exception":
            raise ValueError("stop here")
        if how == "sys.exit":
            sys.exit(3)
    say("left")


def leave_by_chained_exit(directory: str) -> None:
    """Be stopped by a handler of the user's that ends the process, half-way."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(4))
    state, advance = start_state("numpy"), make_advance("numpy")
    with open_run(directory, save=2) as run:
        for step in range(1, 4):
            state = advance(state)
            run.step(state, step=step)
        state["w"] += 4
        signal.raise_signal(signal.SIGTERM)


def fail_at_exit(directory: str, how: str) -> None:
    """Leave while the disk is full."""
    real = os.fsync

    def fail(fd: int) -> None:
        raise OSError(errno.EDQUOT, "no quota")

    with open_run(directory, save=2, retries=0) as run:
        state = run.restore_or_init(start_state("jax")).state
        advance = make_advance("jax")
        for step in range(1, 4):
            if step == 3:
                run.wait()
                os.fsync = fail
            state = advance(state)
            run.step(state, step=step)
        if how == "exception":
            raise ValueError("the first error")
        if how == "sys.exit":
            sys.exit(3)
    os.fsync = real


def save_and_leave(directory: str, how: str) -> None:
    """Save in the background without a run, and end while it is written."""
    real = os.fsync

    def slow(fd: int) -> None:
        time.sleep(0.1)
        if how == "failure":
            raise OSError(errno.EDQUOT, "no quota")
        real(fd)

    os.fsync = slow
    state, advance = start_state("numpy"), make_advance("numpy")
    for step in range(1, 4):
        state = advance(state)
        path = f"{directory}/step-{step}.safetensors"
        ajaxckpt.save_in_background(state, path, step=step)
        if how == "failure":
            break
    if how == "exception":
        raise ValueError("stop here")
    if how == "sys.exit":
        sys.exit(3)


def train_in_thread(directory: str) -> None:
    """Open a run off the main thread: it warns, and works without signals."""
    import warnings

    found: list[Any] = []
    before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)}

    def work() -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with open_run(directory, save=1000) as run:
                state = run.restore_or_init(start_state("jax")).state
                advance = make_advance("jax")
                say("in", "thread")
                await_go()
                for step in range(1, 4):
                    state = advance(state)
                    run.step(state, step=step)
                found.append(run.stop_requested)
        here = [w for w in caught if w.category is RuntimeWarning]
        found.extend([w.filename, str(w.message)] for w in here)

    thread = threading.Thread(target=work)
    taken: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: taken.append(number))
    thread.start()
    thread.join(SECONDS)
    assert not thread.is_alive()
    assert signal.getsignal(signal.SIGINT) is before[signal.SIGINT]
    say("found", found, taken)


def fork(directory: str, what: str, way: str = "os.fork") -> None:
    """Fork in the body of a run while a save is written; go on in the parent."""
    parent = os.getpid()
    try:
        _fork_in_run(directory, what, way)
    except BaseException as error:
        if os.getpid() == parent:
            raise
        # jax's own threads are gone in a child, and its exit waits for them
        os._exit(9 if isinstance(error, SystemExit) else 1)


def _fork_in_run(directory: str, what: str, way: str) -> None:
    with open_run(directory, save=2) as run:
        state, advance = start_state("numpy"), make_advance("numpy")
        for step in range(1, 4):
            if step == 2:
                wait_in("fsync")
            state = advance(state)
            run.step(state, step=step)
        _expect(lambda: calls["fsync"] == 1)  # the save is being written
        if way == "os.fork":
            child = os.fork()
            if not child:
                _play_child(run, state, what)
        else:
            context = multiprocessing.get_context("fork")
            process = context.Process(target=_play_child, args=(run, state, what))
            process.start()
            child = process.pid or 0
        say("child", child)
        code = _reap(child) if way == "os.fork" else _join(process)
        assert not run.stop_requested and run.stop_signal == ""
        with contextlib.suppress(RunLockedError), Run(directory):
            raise AssertionError("the child took the parent's lock away")
        state = advance(state)
        run.step(state, step=4)
        say("ended", code)
    say("left", run.stop_signal)


def _reap(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _join(process: Any) -> int:
    process.join(SECONDS)
    return process.exitcode


def _play_child(run: Run, state: Any, what: str) -> None:
    if what == "is signalled":
        say("in", "child")
        time.sleep(SECONDS)
        os._exit(8)
    if what == "leaves by an exception":
        raise ValueError("the child's own error")
    if what == "leaves by exit":
        sys.exit(9)
    if what == "steps":
        try:
            run.step(state, step=4)
        except ajaxckpt.InvalidArgumentError as error:
            os._exit(7 if "forked" in str(error) else 8)
    if what == "waits":
        with contextlib.suppress(ajaxckpt.CheckpointError):
            run.wait()
        with contextlib.suppress(ajaxckpt.CheckpointError):
            run.prune(dry_run=True)
        os._exit(7)
    if what == "saves a file of its own":
        path = f"{run.directory}/child/step-1.safetensors"
        ajaxckpt.save_in_background(state, path, step=3).result(SECONDS)
        os._exit(7)


# ------------------------------------------- handlers: each scene is its own process


def _take(number: int) -> None:
    os.kill(os.getpid(), number)


def _expect(ready: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not ready():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)


def chain_handlers(directory: str) -> None:
    """A handler that was there is called too, and is back afterwards."""
    taken: list[int] = []

    def mine(number: int, frame: FrameType | None) -> None:
        taken.append(number)

    signal.signal(signal.SIGTERM, mine)
    with Run(directory) as run:
        assert signal.getsignal(signal.SIGTERM) is not mine
        _take(signal.SIGTERM)
        assert run.stop_requested and run.stop_signal == "SIGTERM"
        assert taken == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) is mine
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    _take(signal.SIGTERM)
    assert taken == [signal.SIGTERM] * 2


def restore_after_error(directory: str) -> None:
    """Handlers and wakeup descriptor are back after an error in the body too."""
    with contextlib.suppress(ValueError), Run(directory):
        raise ValueError("the body failed")
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.set_wakeup_fd(-1) == -1


def respect_ignored(directory: str) -> None:
    """What the process ignores does not stop the run."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with Run(directory) as run:
        _take(signal.SIGTERM)
        time.sleep(0.05)
        assert not run.stop_requested
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
        _take(signal.SIGUSR1)
        assert run.stop_signal == "SIGUSR1"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN


def leave_later_handler(directory: str) -> None:
    """A handler that came after the run's is its owner's to remove."""
    taken: list[int] = []

    def later(number: int, frame: FrameType | None) -> None:
        taken.append(number)

    with Run(directory) as run:
        signal.signal(signal.SIGTERM, later)
        _take(signal.SIGTERM)
        assert taken == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) is later
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert not run.stop_signal or run.stop_signal == "SIGTERM"


def chain_from_later(directory: str) -> None:
    """A later handler that passes on to the run's still ends the process after it."""
    with Run(directory):
        inner = signal.getsignal(signal.SIGTERM)
        assert callable(inner)
        signal.signal(signal.SIGTERM, lambda number, frame: inner(number, frame))
    say("closed")
    _take(signal.SIGTERM)
    time.sleep(0.5)
    say("survived")


def keep_wakeup(directory: str) -> None:
    """Who had a wakeup descriptor gets every byte, and has it back."""
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    signal.set_wakeup_fd(theirs.fileno())
    taken: list[int] = []
    signal.signal(signal.SIGUSR2, lambda number, frame: taken.append(number))
    ours.settimeout(SECONDS)
    with Run(directory) as run:
        _take(signal.SIGTERM)
        assert ours.recv(1) == bytes([signal.SIGTERM])
        _take(signal.SIGUSR2)  # not the run's, but theirs
        assert ours.recv(1) == bytes([signal.SIGUSR2])
        assert run.stop_signal == "SIGTERM" and taken == [signal.SIGUSR2]
    _take(signal.SIGUSR2)
    assert ours.recv(1) == bytes([signal.SIGUSR2])
    assert signal.set_wakeup_fd(-1) == theirs.fileno()


def keep_wakeup_until_the_end(directory: str) -> None:
    """A byte that comes while the run is left is forwarded too."""
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    signal.set_wakeup_fd(theirs.fileno())
    signal.signal(signal.SIGUSR2, lambda number, frame: None)
    ours.settimeout(5)
    for turn in range(30):
        with Run(f"{directory}/{turn}"):
            _take(signal.SIGUSR2)
        assert ours.recv(1) == bytes([signal.SIGUSR2]), turn


def run_in_asyncio(directory: str) -> None:
    """A run opened inside an event loop leaves the loop its signals."""
    seen: list[str] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR2, seen.append, "own")
        loop.add_signal_handler(signal.SIGTERM, seen.append, "shared")
        with Run(directory) as run:
            _take(signal.SIGUSR2)
            _take(signal.SIGTERM)
            async with asyncio.timeout(SECONDS):
                while len(seen) < 2:
                    await asyncio.sleep(0.005)
            assert run.stop_signal == "SIGTERM"
        _take(signal.SIGTERM)
        async with asyncio.timeout(SECONDS):
            while len(seen) < 3:
                await asyncio.sleep(0.005)

    asyncio.run(main())
    assert sorted(seen) == ["own", "shared", "shared"]


def asyncio_in_run(directory: str) -> None:
    """An event loop in the body comes and goes; the watch still sees what follows."""
    seen: list[str] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR2, seen.append, "own")
        _take(signal.SIGUSR2)
        async with asyncio.timeout(SECONDS):
            while not seen:
                await asyncio.sleep(0.005)

    state = {"w": weights_at(1), "step": 1}
    with open_run(directory, save=1000, hold=1, grace=0.2) as run:
        run.step(state, step=1)
        asyncio.run(main())
        _take(signal.SIGTERM)
        _expect(lambda: os.path.exists(run.path(1)))  # and nothing came round
        assert run.stop_signal == "SIGTERM"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def nest(directory: str) -> None:
    """One signal stops both of two runs; what was there before is back."""
    with Run(f"{directory}/outer") as outer:
        with Run(f"{directory}/inner") as inner:
            _take(signal.SIGTERM)
            assert inner.stop_requested and outer.stop_requested
        assert outer.stop_requested
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.set_wakeup_fd(-1) == -1


def nest_and_interrupt(directory: str) -> None:
    """The second signal interrupts the inner of two runs, once."""
    with Run(f"{directory}/outer") as outer:
        try:
            with Run(f"{directory}/inner"):
                _take(signal.SIGTERM)
                _take(signal.SIGTERM)
                time.sleep(SECONDS)
            raise AssertionError("nothing interrupted")
        except KeyboardInterrupt:
            say("interrupted")
        assert outer.stop_requested
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def close_outer_first(directory: str) -> None:
    """Two runs closed in the order they were opened leave no handler behind."""
    first, second = Run(f"{directory}/first"), Run(f"{directory}/second")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    _take(signal.SIGUSR1)
    assert second.stop_signal == "SIGUSR1" and not first.stop_requested
    second.__exit__(None, None, None)
    say("closed")
    _take(signal.SIGTERM)
    time.sleep(0.5)
    say("survived")


def open_again(directory: str) -> None:
    """A run that is opened again listens as the first time."""
    state = {"w": weights_at(1), "step": 1}
    run = open_run(directory, save=1000, hold=1, grace=0.2)
    with run:
        _take(signal.SIGTERM)
        assert run.stop_requested
    with run:
        assert not run.stop_requested and run.stop_signal == ""
        run.step(state, step=1)
        _take(signal.SIGUSR1)
        _expect(lambda: os.path.exists(run.path(1)))
        assert run.stop_signal == "SIGUSR1"


def fail_to_open(directory: str) -> None:
    """A run that cannot listen to a signal leaves nothing behind."""
    threads = threading.active_count()
    for wrong in (signal.SIGKILL, 4000, "SIGTERM"):
        with contextlib.suppress(OSError, ValueError, TypeError):
            with Run(directory, signals=(signal.SIGTERM, wrong)):  # type: ignore
                raise AssertionError("opened")
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, wrong
        assert signal.set_wakeup_fd(-1) == -1, wrong
    _expect(lambda: threading.active_count() == threads)


def choose_signals(directory: str) -> None:
    """Only the signals asked for are taken, those without a name included."""
    with Run(f"{directory}/none", signals=()):
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    unnamed = signal.SIGRTMIN + 1
    with Run(f"{directory}/one", signals=(unnamed,)) as run:
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        _take(unnamed)
        assert run.stop_requested and str(int(unnamed)) in run.stop_signal
    assert signal.getsignal(unnamed) is signal.SIG_DFL


# ----------------------------------------------- a signal at every line of the package


class _LineTrace:
    """Calls ``act`` before the nth line that the main thread runs in the package."""

    def __init__(self, nth: int, act: Callable[[], None]) -> None:
        self.count, self._nth, self._act = 0, nth, act
        self._roots = (str(Path(ajaxckpt.__file__).parent), threading.__file__)
        self.place = ""

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(self._roots):
            return None
        if os.path.basename(frame.f_code.co_filename) == "_signals.py":
            return None
        if frame.f_code.co_name in ("__exit__", "leave"):
            return None  # who is interrupted on the way in has not left the block
        if event == "line":
            # no handler runs between a lock and its with block, but a tracer would
            line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
            self.count += not line.lstrip().startswith("with ")
            is_open = signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
            if self.count == self._nth and is_open and not self.place:
                name = os.path.basename(frame.f_code.co_filename)
                self.place = f"{name}:{frame.f_lineno}"
                self._act()
        return self


def sweep(directory: str, times: int, background: bool, first: int, by: int) -> None:
    """Signal a run before one line after the other of two steps and of leaving it."""
    nth, last = first, 3
    while True:
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        place = f"{directory}/{nth}"

        def act() -> None:
            for _ in range(times):
                _take(signal.SIGTERM)

        trace = _LineTrace(nth, act)
        reported = 0
        try:
            with open_run(place, background=background, keep=1) as run:
                for step in range(1, last + 1):
                    reported = step
                    if step == 2:
                        sys.settrace(trace)
                    run.step({"w": weights_at(step), "step": step}, step=step)
            interrupted = False
        except KeyboardInterrupt:
            interrupted = True
        finally:
            sys.settrace(None)
        fired = bool(trace.place)
        say("swept", nth, trace.place, reported, interrupted)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, trace.place
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        with Run(place) as again:
            newest = again.newest()
            assert newest is not None, trace.place
            found = again.restore({"w": weights_at(0), "step": 0}).state
        assert found["step"] == newest.step, trace.place
        assert np.array_equal(found["w"], weights_at(newest.step)), trace.place
        if times == 1:
            assert not interrupted, trace.place
            assert newest.step == reported == last, trace.place
            assert [e.step for e in again.list()] == [last], trace.place
        assert newest.step >= reported - 1, trace.place
        if not fired:
            break
        nth += by
    faulthandler.cancel_dump_traceback_later()
    say("done", nth)


# -------------------------------------------------------------------- in the nursery


def _play(job: dict[str, Any], fds: list[int]) -> None:
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)
    globals()[job.pop("scene")](**job)


def _serve(server: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Fork a process per scene; return the scene in the process that is to play it."""
    server.sendall(json.dumps(threading.active_count()).encode())
    while (request := socket.recv_fds(server, 4096, 3))[0]:
        job, fds = json.loads(request[0]), request[1]
        if "reap" in job:
            pid, status = os.waitpid(job["reap"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        else:
            answer = os.fork()
            if not answer:
                server.close()
                return job, fds
        for fd in fds:
            os.close(fd)
        server.sendall(json.dumps(answer).encode())
    return None


# ----------------------------------------------------------------------- in the test


class Process:
    """A process that plays a scene."""

    def __init__(self, nursery: Nursery, scene: str, directory: Path, **job: Any):
        """Start it; it is gone when ``end`` returns."""
        directory.mkdir(parents=True, exist_ok=True)
        self._nursery, self._errors = nursery, directory.parent / f"{scene}.stderr"
        self.steps: dict[int, bool] = {}
        theirs, self._go = os.pipe()
        self._out, told = os.pipe()
        self._rest = b""
        with open(self._errors, "wb") as errors:
            self.pid = nursery.ask(
                {"scene": scene, "directory": str(directory), **job},
                [theirs, told, errors.fileno()],
            )
        os.close(theirs)
        os.close(told)

    @property
    def stderr(self) -> str:
        """What it wrote to its standard error."""
        return self._errors.read_text(errors="replace")

    def _read_line(self) -> bytes:
        end = time.monotonic() + SECONDS
        while b"\n" not in self._rest:
            wait = max(0.0, end - time.monotonic())
            if not select.select([self._out], [], [], wait)[0]:
                os.kill(self.pid, signal.SIGABRT)
                raise AssertionError(f"it hangs:\n{self.stderr}")
            if not (data := os.read(self._out, 65536)):
                return b""
            self._rest += data
        line, self._rest = self._rest.split(b"\n", 1)
        return line

    def hear(self) -> list[Any] | None:
        """Return the next thing it says that is no step; None when it is gone."""
        while line := self._read_line():
            words = json.loads(line)
            if words[0] != "step":
                return words
            self.steps[words[1]] = words[2]
        return None

    def hear_step(self, step: int) -> None:
        """Wait until it has reported a step."""
        while step not in self.steps:
            words = json.loads(self._read_line())
            assert words[0] == "step", words
            self.steps[words[1]] = words[2]

    def send(self, number: int) -> None:
        """Signal it."""
        os.kill(self.pid, number)

    def go(self) -> None:
        """Let it go on from where it waits."""
        os.write(self._go, b"g")

    def is_alive(self) -> bool:
        """Tell whether it has not ended."""
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2]
        except FileNotFoundError:
            return False
        return state.split()[0] != "Z"

    def end(self) -> tuple[list[Any], int]:
        """Return what else it says, and its exit code, negative for a signal."""
        words = []
        while (word := self.hear()) is not None:
            words.append(word)
        end = time.monotonic() + SECONDS
        while (code := self._nursery.ask({"reap": self.pid})) is None:
            if time.monotonic() > end:
                os.kill(self.pid, signal.SIGKILL)
                raise AssertionError(f"it does not end:\n{self.stderr}")
            time.sleep(0.01)
        os.close(self._out)
        os.close(self._go)
        return words, code


class Nursery:
    """A process that forks others: a fraction of a second each, where jax takes two."""

    def __init__(self) -> None:
        """Start the process and wait until its imports are done."""
        self._alive: set[int] = set()
        self._socket, theirs = socket.socketpair()
        environment = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "",
            "PYTHONPATH": str(Path(ajaxckpt.__file__).parents[1]),
            "PYTHONFAULTHANDLER": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=environment,
            start_new_session=True,
        )
        theirs.close()
        assert json.loads(self._socket.recv(4096)) == 1, "forked with threads"

    def ask(self, job: dict[str, Any], fds: list[int] = []) -> Any:  # noqa: B006
        """Hand it a job and return its answer."""
        socket.send_fds(self._socket, [json.dumps(job).encode()], fds)
        answer = json.loads(self._socket.recv(4096))
        if "reap" not in job:
            self._alive.add(answer)
        elif answer is not None:
            self._alive.discard(job["reap"])
        return answer

    def start(self, scene: str, directory: Path, **job: Any) -> Process:
        """Start a process that plays a scene."""
        return Process(self, scene, directory, **job)

    def close(self) -> None:
        """End the process, and what a failed test left."""
        for pid in self._alive:
            os.kill(pid, signal.SIGKILL)
        self._socket.close()
        assert self._process.wait(SECONDS) == 0


def shared_nursery() -> Iterator[Nursery]:
    """Yield a nursery and end it."""
    nursery = Nursery()
    yield nursery
    nursery.close()


if __name__ == "__main__":
    import jax  # noqa: F401

    gc.freeze()  # else every process walks all of jax's objects when it ends
    if (task := _serve(socket.socket(fileno=int(sys.argv[1])))) is not None:
        _play(*task)
