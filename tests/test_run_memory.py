"""What many saves in the background leave behind, and how much they hold meanwhile."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ajaxckpt import (
    KeepLast,
    Run,
    _background_saves,
    _files,
    _run_steps,
    save_in_background,
)
from ajaxckpt._background import Worker
from ajaxckpt._snapshot import Snapshot

pytestmark = pytest.mark.timeout(300)
MB = 1_000_000
PATIENCE = 60
PROC = Path("/proc/self/clear_refs")


class _Disk:
    """The operating system as ``_files`` sees it; it does not wait for the platter.

    Attributes:
        begin: called in the thread that saves, before a byte is written.
    """

    def __init__(self) -> None:
        self.begin: Callable[[], object] = lambda: None

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def open(self, path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_EXCL:
            self.begin()
        return os.open(path, flags, mode)

    def fsync(self, fd: int) -> None:
        pass


# --------------------------------------------------------- in a process of its own


def _resident(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"{field} is not in /proc/self/status")


def _small_state() -> dict[str, Any]:
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    sharded = jax.device_put(np.ones(64, np.float32), NamedSharding(mesh, P("x")))
    return {
        "w": jnp.ones((30, 40)),
        "half": jnp.ones(17, jnp.bfloat16),
        "key": jax.random.key(0),
        "sharded": sharded,
        "replay": np.ones((20, 10))[::2],
        "n": 0,
    }


def _large_state() -> dict[str, Any]:
    return {"w": jnp.ones(10 * MB // 4), "replay": np.ones(10 * MB // 8), "n": 0}


@contextmanager
def _saving(
    directory: Path, way: str
) -> Generator[tuple[Callable[[Any, int], None], Callable[[], None]]]:
    """Give what saves a step, and what waits for all saves.

    Saves go to one file, or to a run that keeps two.
    """
    if way == "free":

        def save(state: Any, step: int) -> None:
            save_in_background(state, directory / "a.safetensors", step=step)

        yield save, _background_saves._worker.close
        _background_saves._worker.close()
        return
    with Run(directory, keep=KeepLast(2), signals=()) as run:

        def report(state: Any, step: int) -> None:
            assert run.step(state, step=step).saved

        yield report, run._saver.worker.close


def _count() -> dict[str, int]:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return {
        "traced": tracemalloc.get_traced_memory()[0],
        "threads": threading.active_count(),
        "arrays": len(jax.live_arrays()),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "snapshots": sum(isinstance(o, Snapshot) for o in gc.get_objects()),
        "resident": _resident("VmRSS"),
    }


def _measure(directory: Path, way: str, size: str, saves: int) -> dict[str, Any]:
    """Save so often; tell what was in use after some saves, and what is after all."""
    _files.os = _Disk()
    build = _small_state if size == "small" else _large_state
    train = jax.jit(lambda w: w + 1, donate_argnums=0)
    with _saving(directory / "warm", way) as (save, _):
        # what is imported and compiled once is no leak
        save(_small_state() | {"w": train(build()["w"])}, 1)
    outside = _count()
    state = jax.block_until_ready(build())
    with _saving(directory / "measured", way) as (save, wait):
        for step in range(1, saves + 1):
            state["w"] = train(state["w"])
            state["replay"] += 1
            state["n"] = step
            save(state, step)
            if step == saves // 5:
                wait()
                before = _count()
                PROC.write_text("5")  # the peak starts from here
        wait()
        peak = _resident("VmHWM")
        after = _count()
    assert float(state["w"].ravel()[0]) == saves + 1
    del state
    moments = {"outside": outside, "before": before, "after": after, "left": _count()}
    return moments | {"peak": peak}


linux = pytest.mark.skipif(
    not PROC.exists(), reason="the memory of a process is read from Linux's /proc"
)


@linux
@pytest.mark.parametrize(
    ("way", "size", "saves"),
    [
        ("run", "small", 120),
        pytest.param("run", "small", 500, marks=pytest.mark.slow),
        pytest.param("free", "small", 500, marks=pytest.mark.slow),
        pytest.param("run", "large", 40, marks=pytest.mark.slow),
        pytest.param("free", "large", 40, marks=pytest.mark.slow),
    ],
)
def test_many_saves_leave_nothing_and_memory_stays_flat(
    way: str, size: str, saves: int, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, __file__, str(tmp_path), way, size, str(saves)],
        capture_output=True,
        text=True,
        timeout=280,
        # the package that is tested here
        env={**os.environ, "PYTHONPATH": str(Path(_files.__file__).parents[1])},
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    outside, before, after, left = (
        result[moment] for moment in ("outside", "before", "after", "left")
    )
    for what in ("threads", "arrays", "descriptors", "snapshots"):
        assert (what, after[what]) == (what, before[what])
        assert (what, left[what]) == (what, outside[what])
    if size == "small":
        # a few hundred bytes for each save would show
        assert after["traced"] - before["traced"] < 20_000 + 60 * saves
        assert left["traced"] - outside["traced"] < 300_000
        assert after["resident"] - before["resident"] < 8 * MB
    else:  # a snapshot is 20 MB
        assert after["traced"] - before["traced"] < 22 * MB
        assert left["traced"] - outside["traced"] < MB
        # the state, two snapshots, and what one file takes on its way
        assert result["peak"] - outside["resident"] < 3 * 20 * MB + 30 * MB


# ------------------------------------------------------------------ back-pressure


class _Clock:
    """A clock that only the disk moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class _SlowDisk(_Disk):
    """A disk that begins a save only once the loop waits for it: ten seconds each.

    Attributes:
        clock: what the ten seconds pass on.
        hurries: set where it is to wait for nobody any more.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.clock = _Clock()
        self.hurries = False
        self._waited_for = threading.Semaphore(0)
        self.begin = self._begin
        wait = Worker.wait

        def waiting(
            worker: Worker, most: int = 0, timeout: float | None = None
        ) -> bool:
            if worker.unfinished > most:
                self._waited_for.release()
            return wait(worker, most, timeout)

        patch.setattr(Worker, "wait", waiting)
        patch.setattr(_files, "os", self)

    def _begin(self) -> None:
        if not self.hurries:
            assert self._waited_for.acquire(timeout=PATIENCE)
        self.clock.now += 10

    def hurry(self) -> None:
        self.hurries = True
        self._waited_for.release()


def _living_snapshots() -> int:
    return sum(isinstance(thing, Snapshot) for thing in gc.get_objects())


def _watch(patch: pytest.MonkeyPatch, module: Any) -> list[int]:
    """Count the snapshots that live whenever another one is being taken."""
    gc.collect()
    earlier, counts = _living_snapshots(), list[int]()
    take = module.take_snapshot

    def counting(*args: Any) -> Snapshot:
        counts.append(_living_snapshots() - earlier)
        return take(*args)

    patch.setattr(module, "take_snapshot", counting)
    return counts


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Generator[_SlowDisk]:
    disk = _SlowDisk(monkeypatch)
    yield disk
    disk.hurry()


@pytest.fixture
def traced() -> Generator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.mark.usefixtures("traced")
def test_one_snapshot_at_most_waits_beside_the_one_being_taken(
    tmp_path: Path, slow: _SlowDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = _watch(monkeypatch, _run_steps)
    state = {"w": np.ones(20 * MB // 8)}
    outside = tracemalloc.get_traced_memory()[0]
    tracemalloc.reset_peak()
    with Run(tmp_path, keep=KeepLast(1), clock=slow.clock, signals=()) as run:
        reports = [run.step(state, step=step) for step in range(1, 7)]
        peak = tracemalloc.get_traced_memory()[1] - outside
        slow.hurry()
    assert [report.saved for report in reports] == [True] * 6
    # the first two are copied at once; each later one waits for one save
    assert [report.waited_seconds for report in reports] == [0, 0, 10, 10, 10, 10]
    assert {report.snapshot_bytes for report in reports} == {20 * MB}
    assert counts == [0, 1, 1, 1, 1, 1]
    assert 2 * 20 * MB < peak < 2 * 20 * MB + 15 * MB  # a third were 20 more
    gc.collect()
    assert tracemalloc.get_traced_memory()[0] - outside < MB


@pytest.mark.usefixtures("traced")
def test_free_saves_wait_for_the_disk_as_well(
    tmp_path: Path, slow: _SlowDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = _watch(monkeypatch, _background_saves)
    state = {"w": np.ones(20 * MB // 8)}
    outside = tracemalloc.get_traced_memory()[0]
    tracemalloc.reset_peak()
    path = tmp_path / "a.safetensors"
    saves = [save_in_background(state, path, step=step) for step in range(1, 7)]
    peak = tracemalloc.get_traced_memory()[1] - outside
    slow.hurry()
    assert [save.result().step for save in saves] == [1, 2, 3, 4, 5, 6]
    assert slow.clock.now == 60
    assert counts == [0, 1, 1, 1, 1, 1]
    assert 2 * 20 * MB < peak < 2 * 20 * MB + 15 * MB  # a third were 20 more
    _background_saves._worker.close()
    gc.collect()
    # also while the caller keeps what the calls returned
    assert len(saves) == 6
    assert tracemalloc.get_traced_memory()[0] - outside < MB


@pytest.mark.usefixtures("traced")
def test_leaves_that_grow_leave_no_memory_of_their_old_shapes(tmp_path: Path) -> None:
    jax.block_until_ready(jnp.ones(100_000))  # jax imports much when it first computes
    outside = tracemalloc.get_traced_memory()[0]
    with Run(tmp_path, keep=KeepLast(1), signals=()) as run:
        for step in range(1, 31):
            state = {"returns": np.ones(100_000 + step), "w": jnp.ones(100_000)}
            run.step(state, step=step)
        run.wait()
        gc.collect()
        held = tracemalloc.get_traced_memory()[0] - outside
        # some states and snapshots of 0.8 MB on the host; of thirty it were 24
        assert held < 7 * MB
    del state
    gc.collect()
    assert tracemalloc.get_traced_memory()[0] - outside < MB


@pytest.mark.usefixtures("traced")
def test_saves_that_fail_hold_no_more_than_those_that_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = _Disk()
    monkeypatch.setattr(_files, "os", disk)

    def refuse() -> None:
        raise PermissionError(13, "Permission denied")

    disk.begin = refuse
    outside = tracemalloc.get_traced_memory()[0]
    with Run(tmp_path, on_error="warn", signals=()) as run:
        for step in range(1, 31):
            run.step({"w": np.ones(MB // 8)}, step=step)
        run.wait()
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] - outside < 4 * MB
    gc.collect()
    # they are kept, but nothing of what they failed to save
    assert {failure.step for failure in run.failures} == set(range(1, 31))
    assert tracemalloc.get_traced_memory()[0] - outside < MB


if __name__ == "__main__":
    tracemalloc.start()
    print(json.dumps(_measure(Path(sys.argv[1]), *sys.argv[2:4], int(sys.argv[4]))))
