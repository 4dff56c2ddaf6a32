"""Real processes that save, for the tests to kill, limit and trace.

Run as a script it is a nursery: it imports what a save needs (no jax) once, then
forks a fresh writer for every job it is given. A test steers it by ``Nursery``.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ajaxckpt
from ajaxckpt import open_checkpoint
from ajaxckpt._dtypes import STORED_DTYPES
from ajaxckpt._layout import LeafSpec
from ajaxckpt._metadata import Metadata
from ajaxckpt._payload import LeafData, whole_leaf
from ajaxckpt._writer import StateData, write_checkpoint

BIG = 3 << 20
_SMALL = {f"opt_state.{i}.mu": ("float32", (16,)) for i in range(24)}
_SMALL |= {f"rng.{i}": ("uint8", (7,)) for i in range(8)}


def shapes(big: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return dtype and shape by leaf name: ``big`` bytes lie in one leaf."""
    return {**_SMALL, "replay": ("float32", (big // 4,)), "scale": ("float64", ())}


def numbered_state(
    number: int, *, big: int = BIG, before_replay: Callable[[], None] = lambda: None
) -> StateData:
    """Return a state whose every element says the same number, below 250."""

    def source(dtype: str, shape: tuple[int, ...], name: str) -> Callable[[], LeafData]:
        def fetch() -> LeafData:
            if name == "replay":
                before_replay()
            array = np.full(shape, number, dtype)
            return whole_leaf(array, STORED_DTYPES[dtype], frozen=True)

        return fetch

    layout = {
        name: LeafSpec(kind="jax", dtype=dtype, shape=shape)
        for name, (dtype, shape) in shapes(big).items()
    }
    layout["count"] = LeafSpec(kind="int")
    return StateData(
        layout=layout,
        values={"count": hex(number)},
        sources={
            name: source(dtype, shape, name)
            for name, (dtype, shape) in shapes(big).items()
        },
    )


def save_number(path: str, number: int, **options: Any) -> None:
    """Save the state that says a number."""
    metadata = Metadata(checkpoint_id=f"{number:032x}", step=number)
    write_checkpoint(path, numbered_state(number, **options), metadata)


def read_number(path: str) -> int:
    """Read every byte of a file and return the one number that all of it says."""
    with open_checkpoint(path) as checkpoint:
        leaves = checkpoint.read(list(checkpoint))
        numbers = {int(checkpoint.step), int(leaves["count"])}
        for value in leaves.values():
            numbers |= {int(np.min(value)), int(np.max(value))}
    assert len(numbers) == 1, f"a mixture of {sorted(numbers)}"
    return numbers.pop()


def _drop_privilege() -> None:
    """Make file modes bind this process even if it is root's."""

    class Header(ctypes.Structure):
        _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))

    class Sets(ctypes.Structure):
        _fields_ = tuple((name, ctypes.c_uint32) for name in ("e", "p", "i"))

    libc, header, sets = ctypes.CDLL(None), Header(0x20080522, 0), (Sets * 2)()
    assert libc.capget(ctypes.byref(header), sets) == 0
    for each in sets:
        each.e = 0
    assert libc.capset(ctypes.byref(header), sets) == 0


class _Writer:
    """What a forked child does: one job, then it is gone."""

    def __init__(self, go: int, out: int) -> None:
        self._go, self._out = go, out

    def _say(self, word: object) -> None:
        os.write(self._out, f"{json.dumps(word)}\n".encode())

    def _await_go(self) -> None:
        select.select([self._go], [], [])
        os.read(self._go, 1)

    def run(self, job: dict[str, Any]) -> None:
        if job.get("bound_by_modes"):
            _drop_privilege()
        if "file_bytes" in job:
            limit = (job["file_bytes"], job["file_bytes"])
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        try:
            getattr(self, job["do"])(job)
        except Exception as error:
            name = type(error).__name__
            self._say({"error": name, "errno": getattr(error, "errno", None)})

    def save(self, job: dict[str, Any]) -> None:
        self._say("ready")
        self._await_go()
        # getppid marks the save's beginning and end in a trace; no save calls it
        os.getppid()
        try:
            save_number(job["path"], job["number"])
        finally:
            os.getppid()
        self._say("saved")

    def hold(self, job: dict[str, Any]) -> None:
        def stop_here() -> None:
            self._say("holding")
            self._await_go()

        save_number(job["path"], job["number"], before_replay=stop_here)
        self._say("saved")

    def loop(self, job: dict[str, Any]) -> None:
        for number in range(job["first"], job["stop"]):
            save_number(job["path"], number, big=job["big"])
            self._say(number)

    def read(self, job: dict[str, Any]) -> None:
        self._say(read_number(job["path"]))

    def read_until_told(self, job: dict[str, Any]) -> None:
        count = 0
        while not select.select([self._go], [], [], 0)[0]:
            read_number(job["path"])
            count += 1
        self._say(count)


def _allow_tracing() -> None:
    """Let strace attach where otherwise only a parent may (PR_SET_PTRACER)."""
    ctypes.CDLL(None).prctl(0x59616D61, ctypes.c_ulong(-1), 0, 0, 0)


def _raise_child(server: socket.socket, job: dict[str, Any], fds: list[int]) -> int:
    child = os.fork()
    if child:
        return child
    try:
        server.close()
        _allow_tracing()
        _Writer(*fds).run(job)
    finally:
        os._exit(0)


def _serve(server: socket.socket) -> None:
    """Fork a writer per job, tell its process id; tell how one ended, if asked."""
    loaded = sorted({"jax", "jaxlib", "flax", "optax"} & set(sys.modules))
    server.sendall(json.dumps(loaded).encode())
    while (request := socket.recv_fds(server, 4096, 2))[0]:
        job, fds = json.loads(request[0]), request[1]
        if job["do"] == "reap":
            answer = os.waitpid(job["pid"], 0)[1]
        else:
            answer = _raise_child(server, job, fds)
        for fd in fds:
            os.close(fd)
        server.sendall(json.dumps(answer).encode())


class Child:
    """A writer at work in its own process."""

    def __init__(self, nursery: Nursery, job: dict[str, Any]) -> None:
        """Start it; it is gone when ``end`` returns."""
        self._nursery = nursery
        go, self._go = os.pipe()
        out, told = os.pipe()
        self._out = os.fdopen(out, "r")
        self.pid = nursery.ask(job, [go, told])
        os.close(go)
        os.close(told)

    def hear(self) -> Any:
        """Return the next thing it says; None when it is gone."""
        line = self._out.readline()
        return json.loads(line) if line else None

    def go(self) -> None:
        """Let it go on from where it waits."""
        os.write(self._go, b"g")

    def kill(self) -> None:
        """Kill it as a scheduler does that has lost its patience."""
        os.kill(self.pid, signal.SIGKILL)

    def end(self) -> tuple[list[Any], int]:
        """Return what else it says, and the signal that killed it, 0 for none."""
        words = [json.loads(line) for line in self._out if line.endswith("\n")]
        self._out.close()
        os.close(self._go)
        status = self._nursery.ask({"do": "reap", "pid": self.pid})
        assert status in (0, signal.SIGKILL), status
        return words, status


def writer_environment() -> dict[str, str]:
    """Return the environment of a writer: this package, and no chance in it."""
    return {
        **os.environ,
        "PYTHONPATH": str(Path(ajaxckpt.__file__).parents[1]),
        # one thread, one hash seed: every fork does the same calls
        "PYTHONHASHSEED": "0",
        "OPENBLAS_NUM_THREADS": "1",
    }


class Nursery:
    """A process that forks writers: milliseconds each, where a start takes a second."""

    def __init__(self) -> None:
        """Start the process and wait until its imports are done."""
        self._socket, theirs = socket.socketpair()
        command = [sys.executable, __file__, str(theirs.fileno())]
        self._process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], env=writer_environment()
        )
        theirs.close()
        self.loaded = json.loads(self._socket.recv(4096))

    def ask(self, job: dict[str, Any], fds: list[int] = []) -> int:  # noqa: B006
        """Hand it a job and return its answer."""
        socket.send_fds(self._socket, [json.dumps(job).encode()], fds)
        return json.loads(self._socket.recv(4096))

    def start(self, do: str, **job: Any) -> Child:
        """Fork a writer for one job."""
        return Child(self, {"do": do, **job})

    def close(self) -> None:
        """End the process."""
        self._socket.close()
        assert self._process.wait(60) == 0


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    """Share one nursery among the tests of a module."""
    nursery = Nursery()
    assert nursery.loaded == [], "a writer must not need jax"
    yield nursery
    nursery.close()


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
