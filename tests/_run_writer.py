"""Runs that die: states that tell their step, and processes that write one.

Run as a script it is a nursery like ``_writer_process``: it imports what its jobs
need once, jax without any of its threads or no jax at all, then forks for every job.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from _fake_os import Call, FakeOs, install
from _writer_process import Nursery, _Writer, writer_environment

import ajaxckpt
from ajaxckpt import KeepLast, RunLockedError
from ajaxckpt._dtypes import STORED_DTYPES
from ajaxckpt._layout import LeafSpec
from ajaxckpt._metadata import Metadata
from ajaxckpt._payload import whole_leaf
from ajaxckpt._provenance import gather_provenance
from ajaxckpt._run_files import RunFiles
from ajaxckpt._run_saving import Order, RunSaver
from ajaxckpt._snapshot import Arena, take_snapshot
from ajaxckpt._writer import StateData

if TYPE_CHECKING:  # the name alone would import jax
    from ajaxckpt import Run

CHANGES = {
    *("fchmod", "fsync", "ftruncate", "mkdir", "rename", "replace", "unlink"),
    *("write", "writev"),
}


def make_state(step: int, branch: str = "") -> dict[str, Any]:
    """Return a state of which every byte follows from the step and the branch."""
    draw = hashlib.shake_256(f"{step} {branch}".encode()).digest
    return {
        "count": step,
        "params": {"w": np.frombuffer(draw(1200), "<i4").reshape(30, 10)},
        "replay": np.frombuffer(draw(5000), "u1"),
    }


def check_state(state: Any, step: int | None, branch: str = "") -> None:
    """Check that a state is that of a step, bit for bit."""
    expected = make_state(step or 0, branch)
    assert state["count"] == expected["count"]
    assert state["params"]["w"].tobytes() == expected["params"]["w"].tobytes()
    assert state["replay"].tobytes() == expected["replay"].tobytes()


def metrics_of(step: int) -> dict[str, float]:
    """Return metrics of which step 2 has the best."""
    return {"r": -float(abs(step - 2))}


class StillClock:
    """A clock that waits for nothing."""

    def monotonic(self) -> float:
        """Return the real time."""
        return time.monotonic()

    def sleep(self, seconds: float, /) -> None:
        """Return at once."""


def open_run(directory: Path, **options: Any) -> Run:
    """Return a run that takes no signals and waits for nothing."""
    return ajaxckpt.Run(directory, **{"signals": (), "clock": StillClock(), **options})


def go_on(run: Run, steps: Sequence[int], branch: str = "") -> None:
    """Restore or begin, then report the steps that are still to be done."""
    start = run.restore_or_init(make_state(0))
    for step in steps:
        if start.step is None or step > start.step:
            run.step(make_state(step, branch), step=step, metrics=metrics_of(step))
            run.wait()


def save_steps(directory: Path, *steps: int, **options: Any) -> None:
    """Save steps in a run of its own, to the end."""
    with open_run(directory, background=False, **options) as run:
        go_on(run, steps)


def list_files(directory: Path) -> set[str]:
    """Return the names in a directory, lock files aside."""
    return {name for name in os.listdir(directory) if not name.endswith(".lock")}


def read_tree(directory: Path) -> dict[str, object]:
    """Return what lies in a directory, byte for byte; lock files aside."""
    found: dict[str, object] = {}
    for name in list_files(directory):
        path = directory / name
        is_file = path.is_file() and not path.is_symlink()
        status = path.lstat()
        facts = (status.st_ino, status.st_mode, status.st_mtime_ns)
        found[name] = (facts, path.read_bytes() if is_file else None)
    return found


class _RunWriter(_Writer):
    """What a forked child does with a run; its words are lines on a pipe."""

    def save_bare(self, job: dict[str, Any]) -> None:
        """Save steps without jax; die by SIGKILL before a call of the file layer."""
        fake = install(pytest.MonkeyPatch(), FakeOs())

        def before(number: int, call: Call, args: tuple[Any, ...]) -> None:
            if number == job["die_at"]:
                self._say([call.name, call.file])
                os.kill(os.getpid(), signal.SIGKILL)

        fake.before = before
        save_bare(Path(job["directory"]), job["steps"], background=job["background"])
        self._say([[call.name, call.file] for call in fake.calls])

    def train(self, job: dict[str, Any]) -> None:
        """Save step after step, each told once it is durable, until killed."""
        with open_run(Path(job["directory"]), keep=KeepLast(2)) as run:
            start = run.restore_or_init(make_state(0))
            for step in range((start.step or 0) + 1, job["stop"]):
                run.step(make_state(step), step=step)
                if step % 3 == 0:
                    run.wait()
                    self._say(step)

    def hold_run(self, job: dict[str, Any]) -> None:
        """Open a run, say so, and keep it open until told; fork first if asked."""
        options = {"run_id": job.get("run_id")}
        try:
            with open_run(Path(job["directory"]), **options) as run:
                run.restore_or_init(make_state(0))
                orphan = os.fork() if job.get("forks") else 0
                if job.get("forks") and not orphan:
                    self._live_on(run)
                self._say(["open", orphan])
                self._await_go()
                if "step" in job:
                    run.step(make_state(job["step"]), step=job["step"])
            self._say("closed")
        except RunLockedError as error:
            self._say(["locked", str(error)])

    def _live_on(self, run: Run) -> None:
        """Outlive the parent with its run in hand, and try to write it."""
        try:
            run.step(make_state(1), step=1)
        except ValueError as error:
            self._say(["orphan", str(error)])
        os.close(self._out)  # who listens waits for the parent's end alone
        time.sleep(60)
        os._exit(0)

    def resume(self, job: dict[str, Any]) -> None:
        """Say from where a run goes on, and what it passes over."""
        with open_run(Path(job["directory"])) as run:
            found = run.restore_or_init(make_state(0))
            check_state(found.state, found.step)
            skipped = [[Path(s.path).name, s.reason] for s in found.skipped]
            self._say([found.step, skipped])
            for step in job.get("then", ()):
                run.step(make_state(step), step=step)

    def resume_or_say(self, job: dict[str, Any]) -> None:
        """Say how a run that cannot be opened or restored is refused."""
        try:
            self.resume(job)
        except Exception as error:
            self._say([type(error).__name__, str(error)])


def _tiny_state(number: int) -> StateData:
    array = np.full(4096, number, "u1")
    leaf = whole_leaf(array, STORED_DTYPES["uint8"], frozen=True)
    layout = {
        "count": LeafSpec(kind="int"),
        "w": LeafSpec(kind="jax", dtype="uint8", shape=array.shape),
    }
    return StateData(
        layout=layout, values={"count": hex(number)}, sources={"w": lambda: leaf}
    )


def save_bare(directory: Path, steps: Sequence[int], *, background: bool) -> None:
    """Save numbered states as a run does, without jax; keep the last one."""
    files, keep = RunFiles(str(directory), "w"), (KeepLast(1),)
    saver = RunSaver(
        files,
        keep,
        background=background,
        retries=0,
        raises=True,
        before=lambda: None,
        clock=StillClock(),
    )
    arena = Arena()
    for step in steps:
        metadata = Metadata(checkpoint_id=f"{step:032x}", step=step, run_id="w")
        snapshot = take_snapshot(_tiny_state(step), arena)
        path = files.path_of(step)
        saver.accept(Order(path=path, snapshot=snapshot, metadata=metadata))
        saver.worker.wait()
    saver.worker.close()
    saver.raise_failure()


def _raise_child(server: socket.socket, job: dict[str, Any], fds: list[int]) -> int:
    child = os.fork()
    if child:
        return child
    try:
        server.close()
        _RunWriter(*fds).run(job)
    finally:
        os._exit(0)


def _serve(server: socket.socket) -> None:
    warnings.simplefilter("ignore")  # jax warns of forks; none of its threads runs
    gather_provenance()  # asks git: once for all children
    threads = len(os.listdir("/proc/self/task")) if os.path.isdir("/proc") else 1
    server.sendall(json.dumps(["jax" in sys.modules, threads]).encode())
    while (request := socket.recv_fds(server, 4096, 2))[0]:
        job, fds = json.loads(request[0]), request[1]
        if job["do"] == "reap":
            answer = os.waitpid(job["pid"], 0)[1]
        else:
            answer = _raise_child(server, job, fds)
        for fd in fds:
            os.close(fd)
        server.sendall(json.dumps(answer).encode())


class RunNursery(Nursery):
    """A process that forks writers of runs, with jax or without."""

    def __init__(self, imports: str) -> None:
        """Start the process and wait until its imports are done."""
        self._socket, theirs = socket.socketpair()
        command = [sys.executable, __file__, str(theirs.fileno()), imports]
        environment = {**writer_environment(), "JAX_PLATFORMS": "cpu"}
        environment.pop("XLA_FLAGS", None)
        self._process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], env=environment
        )
        theirs.close()
        has_jax, threads = json.loads(self._socket.recv(4096))
        assert threads == 1, "what is forked must have one thread"
        assert has_jax == (imports == "jax")


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for no disk: the order of the calls is what is tested."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.fixture(scope="module")
def run_nursery() -> Iterator[RunNursery]:
    """Share a nursery of whole runs among the tests of a module."""
    nursery = RunNursery("jax")
    yield nursery
    nursery.close()


@pytest.fixture(scope="module")
def bare_nursery() -> Iterator[RunNursery]:
    """Share a nursery without jax, whose forks are ten times faster."""
    nursery = RunNursery("numpy")
    yield nursery
    nursery.close()


if __name__ == "__main__":
    if sys.argv[2] == "jax":
        assert ajaxckpt.Run
    _serve(socket.socket(fileno=int(sys.argv[1])))
