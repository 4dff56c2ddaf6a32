"""Saves in the background: what they hold, how they fail, that none is lost."""

from __future__ import annotations

import errno
import gc
import logging
import os
import subprocess
import sys
import textwrap
import threading
import tracemalloc
from collections.abc import Callable, Generator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from identical import array_bytes, assert_same_bits
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ajaxckpt import (
    BackgroundSave,
    BackgroundSaveError,
    DamagedCheckpointError,
    KeepLast,
    Run,
    SaveAt,
    SaveEvery,
    UnsupportedLeafError,
    _files,
    open_checkpoint,
    restore_into,
    save_in_background,
    verify_checkpoint,
)
from ajaxckpt._payload import aligned_empty
from ajaxckpt._run_files import RunFiles

pytestmark = pytest.mark.timeout(120)
PATIENCE = 60


class Disk:
    """The operating system as ``_files`` sees it.

    Attributes:
        begin: called in the thread that saves, before a byte is written.
        before: called with the name of each operation that may fail.
        published: the names of the files that were published, in order.
    """

    def __init__(self) -> None:
        self.begin: Callable[[], object] = lambda: None
        self.before: Callable[[str], object] = lambda name: None
        self.published: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def open(self, path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_EXCL:
            self.begin()
            self.before("open")
        return os.open(path, flags, mode)

    def writev(self, fd: int, views: Any) -> int:
        self.before("writev")
        return os.writev(fd, views)

    def fsync(self, fd: int) -> None:
        self.before("fsync")  # what the disk does is not what is tested here

    def replace(self, source: str, target: str) -> None:
        self.before("replace")
        os.replace(source, target)
        self.published.append(os.path.basename(target))


class Clock:
    """A clock that only sleep moves."""

    def __init__(self) -> None:
        self.now = 0.0
        self.sleeps: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now += seconds


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    stand_in = Disk()
    monkeypatch.setattr(_files, "os", stand_in)
    return stand_in


@pytest.fixture
def gate(disk: Disk) -> Generator[threading.Event]:
    """Let no save begin before the gate is set."""
    opened = threading.Event()

    def begin() -> None:
        assert opened.wait(PATIENCE)

    disk.begin = begin
    yield opened
    opened.set()


def _fault(number: int) -> OSError:
    return OSError(number, os.strerror(number))


def _always(operation: str, number: int) -> Callable[[str], None]:
    def before(name: str) -> None:
        if name == operation:
            raise _fault(number)

    return before


def _nothing(name: str) -> None:
    del name


def _files_in(directory: Path) -> list[str]:
    names = sorted(os.listdir(directory)) if directory.exists() else []
    return [name for name in names if not name.endswith(".lock")]


# --------------------------------------------- a point in time, whatever comes after


def _numbers(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Return elements that differ from their neighbours, and from what spoils them."""
    return (np.arange(np.prod(shape)).reshape(shape) % 7).astype(dtype)


def _spoil_numpy(array: np.ndarray) -> None:
    """Change every element in place."""
    if array.dtype == bool:
        np.logical_not(array, out=array)
    else:
        array += np.ones((), array.dtype)


@cache
def _donates_what_was_seen(dtype: Any) -> bool:
    """Tell whether jax takes a donation of what numpy looked at once.

    Not for bfloat16 and narrower floats since 0.11: it copies, and says nothing.
    """
    array = jax.block_until_ready(jnp.ones(999, dtype))
    np.asarray(array)
    jax.block_until_ready(jax.jit(lambda x: x + x, donate_argnums=0)(array))
    return array.is_deleted()


def _spoil_jax(array: jax.Array) -> None:
    """Donate, so that the memory is written again."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        change: Any = lambda x: jax.random.wrap_key_data(jax.random.key_data(x) + 1)  # noqa: E731
    elif array.dtype == bool:
        change = jnp.logical_not
    else:
        change = lambda x: x + jnp.ones((), x.dtype)  # noqa: E731
    jax.block_until_ready(jax.jit(change, donate_argnums=0)(array))
    assert array.is_deleted() or not _donates_what_was_seen(array.dtype)


def _numpy(make: Callable[[], np.ndarray]) -> Callable[[], Any]:
    def build() -> tuple[Any, Callable[[], None]]:
        array = make()
        return array, lambda: _spoil_numpy(array)

    return build


def _jax(make: Callable[[], jax.Array]) -> Callable[[], Any]:
    def build() -> tuple[Any, Callable[[], None]]:
        array = jax.block_until_ready(make())
        return array, lambda: _spoil_jax(array)

    return build


def _sharded(spec: P, dtype: Any = np.float32) -> jax.Array:
    auto = jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(auto, auto))
    return jax.device_put(_numbers((512, 64), dtype), NamedSharding(mesh, spec))


def _aliased() -> tuple[Any, Callable[[], None]]:
    """A jax array over memory that numpy can write."""
    memory = aligned_empty((1000, 100), np.dtype(np.float32))
    memory[...] = _numbers(memory.shape, np.float32)
    array = jax.device_put(memory)
    assert array.unsafe_buffer_pointer() == memory.ctypes.data
    return array, lambda: _spoil_numpy(memory)


def _aliased_shards() -> tuple[Any, Callable[[], None]]:
    memory = [aligned_empty((64, 32), np.dtype(np.float32)) for _ in jax.devices()]
    for number, part in enumerate(memory):
        part[...] = _numbers(part.shape, np.float32) + number
    singles = [jax.device_put(m, d) for m, d in zip(memory, jax.devices(), strict=True)]
    assert singles[3].unsafe_buffer_pointer() == memory[3].ctypes.data
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    array = jax.make_array_from_single_device_arrays(
        (512, 32), NamedSharding(mesh, P("x")), singles
    )

    def spoil() -> None:
        for part in memory:
            _spoil_numpy(part)

    return array, spoil


LEAVES: dict[str, Callable[[], tuple[Any, Callable[[], None]]]] = {
    "numpy of 50 MB": _numpy(lambda: _numbers((6_250_000,), np.float64)),
    "numpy strided": _numpy(lambda: _numbers((900, 800), np.float64)[::2, ::3]),
    "numpy transposed": _numpy(lambda: _numbers((900, 700), np.float32).T),
    "numpy reversed": _numpy(lambda: _numbers((300_000,), np.int32)[::-1]),
    "numpy big-endian": _numpy(lambda: _numbers((300, 1000), ">f8")),
    "numpy bool": _numpy(lambda: _numbers((500_000,), np.int8) > 3),
    "numpy bool strided": _numpy(lambda: (_numbers((900, 900), np.int8) > 3)[:, ::2]),
    "numpy bfloat16": _numpy(lambda: _numbers((1000, 300), ml_dtypes.bfloat16)),
    "numpy int4": _numpy(lambda: _numbers((1000, 300), ml_dtypes.int4)),
    "numpy without axes": _numpy(lambda: np.full((), 5.0)),
    "jax": _jax(lambda: jnp.asarray(_numbers((1000, 1000), np.float32))),
    "jax weak": _jax(lambda: jnp.full((1000, 100), 2.0)),
    "jax bool": _jax(lambda: jnp.asarray(_numbers((1000, 100), np.int8) > 3)),
    "jax bfloat16": _jax(lambda: jnp.asarray(_numbers((999, 101), jnp.bfloat16))),
    "jax int4": _jax(lambda: jnp.asarray(_numbers((999, 101), jnp.int4))),
    "jax key": _jax(lambda: jax.random.key(3)),
    "jax keys": _jax(lambda: jax.random.split(jax.random.key(3), (30, 70))),
    "jax sharded by rows": _jax(lambda: _sharded(P("x", None))),
    "jax sharded by both": _jax(lambda: _sharded(P("x", "y"))),
    "jax sharded int4": _jax(lambda: _sharded(P(None, ("x", "y")), jnp.int4)),
    "jax replicated": _jax(lambda: _sharded(P())),
    "jax over numpy memory": _aliased,
    "jax shards over numpy memory": _aliased_shards,
}


def _bits(leaf: Any) -> tuple[Any, ...]:
    """Return what a leaf is, and its bits, in memory of their own."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    whole = leaf
    if isinstance(leaf, jax.Array) and len(leaf.sharding.device_set) > 1:
        whole = np.empty(leaf.shape, leaf.dtype)  # a whole one would stay cached
        for shard in leaf.addressable_shards:
            whole[shard.index] = np.asarray(shard.data)
    return str(leaf.dtype.name), leaf.shape, array_bytes(whole)


def _save_in_run(state: Any, path: Path) -> tuple[str, Callable[[], object]]:
    run = Run(path, on_exit=False)
    run.__enter__()
    report = run.step(state, step=1)
    assert report.saved

    return report.path, lambda: run.__exit__(None, None, None)


def _save_freely(state: Any, path: Path) -> tuple[str, Callable[[], object]]:
    save = save_in_background(state, path / "a.safetensors", step=1)
    assert not save.done
    return save.path, save.result


WAYS = {"run": _save_in_run, "free": _save_freely}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("leaf", LEAVES)
def test_file_holds_the_values_of_the_call_not_of_the_write(
    leaf: str, way: str, tmp_path: Path, gate: threading.Event
) -> None:
    value, spoil = LEAVES[leaf]()
    old = _bits(LEAVES[leaf]()[0])
    path, finish = WAYS[way]({"leaf": value, "n": 3}, tmp_path)
    spoil()
    assert not os.path.exists(path)  # nothing was written before it was spoiled
    gate.set()
    finish()
    fresh, _ = LEAVES[leaf]()
    restored = restore_into({"leaf": fresh, "n": 0}, path)
    assert _bits(restored["leaf"]) == old
    if "numpy" in leaf:
        assert _bits(value) != old  # it was spoiled indeed


@pytest.mark.parametrize("way", WAYS)
def test_donation_right_after_the_call_is_in_place(
    way: str, tmp_path: Path, gate: threading.Event
) -> None:
    # a view that the snapshot kept would make jax copy, silently
    state = {"w": jnp.asarray(_numbers((2000, 1000), np.float32))}
    pointer = state["w"].unsafe_buffer_pointer()
    _, finish = WAYS[way](state, tmp_path)
    after = jax.jit(lambda s: {"w": s["w"] * 2}, donate_argnums=0)(state)
    assert state["w"].is_deleted()
    assert after["w"].unsafe_buffer_pointer() == pointer
    gate.set()
    finish()


@pytest.mark.parametrize("way", WAYS)
def test_containers_changed_after_the_call_are_saved_as_they_were(
    way: str, tmp_path: Path, gate: threading.Event
) -> None:
    state = {"log": [1, 2], "name": "a", "nested": {"w": np.ones(3)}}
    path, finish = WAYS[way](state, tmp_path)
    state["log"].append(3)
    state["name"] = "b"
    state["nested"]["w"] = np.zeros(3)
    gate.set()
    finish()
    skeleton = {"log": [0, 0], "name": "", "nested": {"w": np.zeros(3)}}
    restored = restore_into(skeleton, path)
    expected = {"log": [1, 2], "name": "a", "nested": {"w": np.ones(3)}}
    assert_same_bits(restored, expected)


def test_metrics_and_config_changed_after_the_call_are_saved_as_they_were(
    tmp_path: Path, gate: threading.Event
) -> None:
    metrics, config = {"return": 1.0}, {"lr": [0.5]}
    with Run(tmp_path, config=config) as run:
        path = run.step({"w": 1}, step=1, metrics=metrics).path
        metrics["return"] = 2.0
        config["lr"].append(9.0)
        gate.set()
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.metrics == {"return": 1.0}
        assert checkpoint.config == {"lr": [0.5]}


def _mixture(number: int) -> dict[str, Any]:
    """Return a state of many dtypes in one shape, every leaf full of the number."""
    x = np.full((64, 33), number)
    dtypes = (np.float32, ">f4", np.int32, np.float64, np.int64, np.float16)
    wide = {f"host {dtype}": x.astype(dtype) for dtype in dtypes}
    narrow = ("bfloat16", "int4", "uint4", "int8", "float8_e4m3fn", "float8_e5m2")
    for name in narrow:
        dtype = jnp.dtype(name)
        wide[f"host {name}"] = x.astype(dtype) / np.asarray(8).astype(dtype)
        if not name.endswith("int4"):
            wide[f"jax {name}"] = jnp.asarray(x.astype(dtype))
    # eight bits each, and of no two of them is every value in the other
    wide["host float8_e4m3fn"] = (1 + x / 8).astype(ml_dtypes.float8_e4m3fn)
    wide["host float8_e5m2"] = (2.0**-15 * x).astype(ml_dtypes.float8_e5m2)
    wide["host int4"] = (x - 8).astype(ml_dtypes.int4)
    wide["host uint4"] = (x + 7).astype(ml_dtypes.uint4)
    wide["host bool"] = x % 2 == 1
    wide["jax"] = jnp.asarray(x, jnp.float32)
    wide["key"] = jax.random.key(number)
    wide["sharded"] = _sharded(P("x", "y")) + number
    return wide


def test_memory_used_again_never_mixes_steps_or_dtypes(tmp_path: Path) -> None:
    with Run(tmp_path) as run:
        for step in range(1, 8):
            assert run.step(_mixture(step), step=step).saved
    for step in range(1, 8):
        restored = run.restore(_mixture(0), step=step).state
        wrong = {
            name
            for name, leaf in _mixture(step).items()
            if _bits(restored[name]) != _bits(leaf)
        }
        assert (step, wrong) == (step, set())


def test_a_loop_that_donates_and_writes_in_place_saves_every_step_as_it_was(
    tmp_path: Path,
) -> None:
    train = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
    agent = {"w": jnp.zeros((300, 400)), "b": _sharded(P("x")) * 0}
    replay = {"obs": np.zeros((200, 500)), "strided": np.zeros((400, 50))[::2]}
    with Run(tmp_path) as run:
        for step in range(1, 13):
            agent = train(agent)
            replay["obs"] += 1
            replay["strided"] += 1
            run.step({"agent": agent, "replay": replay}, step=step)
    for step in range(1, 13):
        state = run.restore({"agent": agent, "replay": replay}, step=step).state
        for leaf in jax.tree.leaves(state):
            assert np.unique(np.asarray(leaf)).tolist() == [step]


def test_the_snapshot_that_is_held_survives_a_donation_too(tmp_path: Path) -> None:
    state = {"w": jnp.full((1000,), 1.0), "host": np.full(1000, 1.0)}
    error = RuntimeError("the train step failed")
    run = Run(tmp_path, save=SaveAt(99), hold=SaveEvery(steps=1))
    with pytest.raises(RuntimeError) as caught, run:
        assert not run.step(state, step=1).saved
        jax.block_until_ready(jax.jit(lambda x: x + 1, donate_argnums=0)(state["w"]))
        state["host"] += 1
        raise error
    assert caught.value is error
    assert [entry.step for entry in run.list()] == [1]
    restored = run.restore({"w": jnp.zeros(1000), "host": np.zeros(1000)}).state
    assert np.unique(restored["w"]).tolist() == [1.0]
    assert np.unique(restored["host"]).tolist() == [1.0]


def _donated() -> jax.Array:
    array = jnp.ones(3)
    jax.block_until_ready(jax.jit(lambda x: x + 1, donate_argnums=0)(array))
    return array


def test_a_donated_state_is_refused_at_once_and_nothing_is_written(
    tmp_path: Path,
) -> None:
    with Run(tmp_path, on_exit=False) as run:
        for act in (run.step, run.save):
            with pytest.raises(UnsupportedLeafError, match="donated or deleted"):
                act({"a": np.ones(3), "w": _donated()}, step=1)
        assert run.failures == ()
        run.wait()
    assert _files_in(tmp_path) == []


def test_a_donated_state_is_refused_by_the_free_function_too(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedLeafError, match="donated or deleted"):
        save_in_background({"w": _donated()}, tmp_path / "a.safetensors")
    assert _files_in(tmp_path) == []
    path = tmp_path / "a.safetensors"
    assert save_in_background({"w": 1}, path).result().leaves == 1


def test_a_step_of_a_donated_state_can_be_reported_again(tmp_path: Path) -> None:
    with Run(tmp_path) as run:
        with pytest.raises(UnsupportedLeafError):
            run.step({"w": _donated()}, step=1)
        assert run.step({"w": jnp.ones(3)}, step=1).saved
    assert [entry.step for entry in run.list()] == [1]


# --------------------------------------------------------------------- failures

FAULTS = [
    pytest.param("open", errno.ENOSPC, id="no room for the temp"),
    pytest.param("writev", errno.ENOSPC, id="full while writing"),
    pytest.param("fsync", errno.EIO, id="not durable"),
    pytest.param("replace", errno.EIO, id="not published"),
]


def _next_step(run: Run) -> None:
    run.step({"w": 3}, step=3)


def _next_save(run: Run) -> None:
    run.save({"w": 3}, step=3)


NEXT: dict[str, Callable[[Run], None]] = {
    "step": _next_step,
    "save": _next_save,
    "wait": Run.wait,
    "exit": lambda run: run.__exit__(None, None, None),
}


@pytest.mark.parametrize(("operation", "number"), FAULTS)
@pytest.mark.parametrize("act", NEXT)
def test_a_failed_save_surfaces_at_the_next_call(
    act: str, operation: str, number: int, tmp_path: Path, disk: Disk
) -> None:
    run = Run(tmp_path, clock=Clock())
    with suppress(BackgroundSaveError), run:
        run.step({"w": 1}, step=1)
        run.wait()
        first = Path(run.path(1)).read_bytes()
        disk.before = _always(operation, number)
        assert run.step({"w": 2}, step=2).saved  # accepted
        run._saver.worker.wait()
        with pytest.raises(BackgroundSaveError, match="step 2 was not saved") as caught:
            NEXT[act](run)
        assert caught.value.step == 2
        assert isinstance(caught.value.__cause__, OSError)
        assert caught.value.__cause__.errno == number
        assert str(tmp_path) in str(caught.value)
        assert os.strerror(number) in str(caught.value)
        assert caught.value in run.failures
        assert {failure.step for failure in run.failures} == {2}
        assert [entry.step for entry in run.list()] == [1]
        assert Path(run.path(1)).read_bytes() == first
        assert _files_in(tmp_path) == ["step-1.safetensors"]


@pytest.mark.parametrize(("operation", "number"), FAULTS)
def test_a_later_save_works_once_the_cause_is_gone(
    operation: str, number: int, tmp_path: Path, disk: Disk
) -> None:
    with Run(tmp_path, clock=Clock(), keep=KeepLast(2)) as run:
        run.step({"w": 1}, step=1)
        run.wait()
        disk.before = _always(operation, number)
        run.step({"w": 2}, step=2)
        with pytest.raises(BackgroundSaveError):
            run.wait()
        run.wait()  # told once
        disk.before = _nothing
        assert run.step({"w": 3}, step=3).saved
        run.wait()
    assert [entry.step for entry in run.list()] == [1, 3]
    assert run.restore({"w": 0}).state == {"w": 3}


def test_the_step_that_failed_can_be_saved_again(tmp_path: Path, disk: Disk) -> None:
    with Run(tmp_path, clock=Clock()) as run:
        disk.before = _always("writev", errno.ENOSPC)
        run.step({"w": 2}, step=2)
        with pytest.raises(BackgroundSaveError):
            run.wait()
        disk.before = _nothing
        assert run.save({"w": 2}, step=2).saved
    assert [entry.step for entry in run.list()] == [2]


def test_the_save_after_a_failed_one_descends_from_a_file_that_exists(
    tmp_path: Path, disk: Disk
) -> None:
    with Run(tmp_path, clock=Clock(), on_error="warn") as run:
        run.step({"w": 1}, step=1)
        run.wait()
        disk.before = _always("writev", errno.ENOSPC)
        run.step({"w": 2}, step=2)
        run.wait()
        disk.before = _nothing
        run.step({"w": 3}, step=3)
    first, third = run.list()
    with open_checkpoint(third.path) as checkpoint:
        assert checkpoint.parent_id == first.checkpoint_id


def test_warnings_keep_training_and_failures_stay_on_record(
    tmp_path: Path, disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR, logger="ajaxckpt")
    with Run(tmp_path, clock=Clock(), on_error="warn") as run:
        disk.before = _always("fsync", errno.EIO)
        for step in (1, 2):
            assert run.step({"w": step}, step=step).saved
            run.wait()
        disk.before = _nothing
        run.step({"w": 3}, step=3)
    assert [failure.step for failure in run.failures] == [1, 2]
    assert {getattr(f.__cause__, "errno", 0) for f in run.failures} == {errno.EIO}
    assert [entry.step for entry in run.list()] == [3]
    logged = [record.getMessage() for record in caplog.records]
    assert [f"step {step} was not saved" in logged[step - 1] for step in (1, 2)] == [
        True,
        True,
    ]


def test_two_failures_before_the_next_call_both_surface(
    tmp_path: Path, disk: Disk, gate: threading.Event
) -> None:
    disk.before = _always("writev", errno.ENOSPC)
    told = ""
    with Run(tmp_path, clock=Clock(), on_exit=False) as run:
        run.step({"w": 1}, step=1)
        run.step({"w": 2}, step=2)
        gate.set()
        run._saver.worker.wait()
        for _ in range(3):
            try:
                run.wait()
            except BackgroundSaveError as error:
                told += "\n".join([str(error), *getattr(error, "__notes__", ())])
    assert "step 1 was not saved" in told
    assert "step 2 was not saved" in told


def _failing_times(
    count: int, number: int, operation: str = "writev"
) -> Callable[[str], None]:
    left = [count]

    def before(name: str) -> None:
        if name == operation and left[0]:
            left[0] -= 1
            raise _fault(number)

    return before


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.ESTALE])
def test_an_error_that_passes_costs_two_tries_and_is_noted(
    number: int, tmp_path: Path, disk: Disk
) -> None:
    clock = Clock()
    disk.before = _failing_times(2, number)
    with Run(tmp_path, clock=clock, retries=2) as run:
        run.step({"w": 1}, step=1)
        run.wait()
        assert run.failures == ()
    assert [entry.step for entry in run.list()] == [1]
    assert verify_checkpoint(run.path(1)).leaves == 1
    assert len(run.notes) == 2
    assert all("step 1" in n and os.strerror(number) in n for n in run.notes)
    assert "Exception:" not in "".join(run.notes)
    assert len(clock.sleeps) == 2
    assert clock.sleeps[1] == 2 * clock.sleeps[0] > 0


def test_tries_are_bounded(tmp_path: Path, disk: Disk) -> None:
    clock = Clock()
    disk.before = _failing_times(3, errno.EIO)
    with Run(tmp_path, clock=clock, retries=2) as run:
        run.step({"w": 1}, step=1)
        with pytest.raises(BackgroundSaveError):
            run.wait()
    assert len(clock.sleeps) == 2


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EROFS])
def test_a_refusal_is_not_tried_again(number: int, tmp_path: Path, disk: Disk) -> None:
    clock = Clock()
    disk.before = _failing_times(1, number)
    with Run(tmp_path, clock=clock, retries=2) as run:
        run.step({"w": 1}, step=1)
        with pytest.raises(BackgroundSaveError) as caught:
            run.wait()
        assert getattr(caught.value.__cause__, "errno", 0) == number
    assert clock.sleeps == []
    assert run.notes == ()


def test_saves_keep_their_order_while_one_is_tried_again(
    tmp_path: Path, disk: Disk, gate: threading.Event
) -> None:
    disk.before = _failing_times(2, errno.EIO, "replace")
    with Run(tmp_path, clock=Clock()) as run:
        run.step({"w": 1}, step=1)
        run.step({"w": 2}, step=2)  # accepted while the first is not written
        gate.set()
        run.step({"w": 3}, step=3)
    assert disk.published == [f"step-{step}.safetensors" for step in (1, 2, 3)]


def test_a_file_that_does_not_read_back_fails_and_removes_nothing(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = disk.replace

    def corrupt(source: str, target: str) -> None:
        real(source, target)
        with open(target, "r+b") as file:
            file.seek(-1, os.SEEK_END)
            last = file.read(1)[0]
            file.seek(-1, os.SEEK_END)
            file.write(bytes([last ^ 1]))

    with Run(tmp_path, clock=Clock(), keep=KeepLast(1)) as run:
        run.step({"w": np.ones(100)}, step=1)
        run.wait()
        first = Path(run.path(1)).read_bytes()
        with monkeypatch.context() as patch:
            patch.setattr(disk, "replace", corrupt)
            run.step({"w": np.ones(100) * 2}, step=2)
            with pytest.raises(BackgroundSaveError, match="step 2") as caught:
                run.wait()
        assert isinstance(caught.value.__cause__, DamagedCheckpointError)
        assert "does not read back" in str(caught.value)
        assert Path(run.path(1)).read_bytes() == first
        found = run.newest()
        assert found is not None and found.step == 1
        run.step({"w": np.ones(100) * 3}, step=3)
        run.wait()
        assert not os.path.exists(tmp_path / "step-1.safetensors")
    assert run.restore({"w": np.zeros(100)}).step == 3


def test_a_failure_at_exit_does_not_hide_the_error_that_is_raised(
    tmp_path: Path, disk: Disk
) -> None:
    error = ValueError("training diverged")
    with pytest.raises(ValueError, match="diverged") as caught:
        with Run(tmp_path, clock=Clock()) as run:
            disk.before = _always("writev", errno.ENOSPC)
            run.step({"w": 1}, step=1)
            raise error
    assert caught.value is error
    (note,) = caught.value.__notes__
    assert "step 1 was not saved" in note
    assert os.strerror(errno.ENOSPC) in note


def test_the_save_at_exit_fails_loudly(tmp_path: Path, disk: Disk) -> None:
    with pytest.raises(BackgroundSaveError, match="step 4 was not saved"):
        with Run(tmp_path, clock=Clock(), save=SaveAt(99)) as run:
            run.step({"w": 1}, step=4)
            disk.before = _always("writev", errno.ENOSPC)
    with Run(tmp_path):  # the lock was given back all the same
        pass


def test_an_error_in_the_retention_does_not_end_the_saving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> None:
        raise MemoryError("no memory to choose what goes")

    run = Run(tmp_path, keep=KeepLast(1))
    run.__enter__()
    with monkeypatch.context() as patch:
        patch.setattr(RunFiles, "choose_removals", refuse)
        run.step({"w": 1}, step=1)
        assert run._saver.worker.wait(0, PATIENCE)
    assert run.step({"w": 2}, step=2).saved
    assert run._saver.worker.wait(0, PATIENCE)  # a dead thread would never finish it
    run.__exit__(None, None, None)
    assert [entry.step for entry in run.list()] == [2]
    assert "no memory to choose what goes" in "".join(run.notes)


def test_in_the_foreground_a_failure_is_raised_by_the_call_itself(
    tmp_path: Path, disk: Disk
) -> None:
    with Run(tmp_path, clock=Clock(), background=False) as run:
        disk.before = _always("writev", errno.ENOSPC)
        with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
            run.step({"w": 1}, step=1)
        run.wait()  # told already
        disk.before = _nothing
        assert run.step({"w": 2}, step=2).saved
        assert [entry.step for entry in run.list()] == [2]


# ------------------------------------------------------------ without a run


def test_a_free_save_tells_what_it_wrote(tmp_path: Path, gate: threading.Event) -> None:
    path = tmp_path / "a.safetensors"
    save = save_in_background(
        {"w": np.ones(3), "n": 1},
        path,
        step=7,
        metrics={"return": 1.5},
        config={"a": 1},
    )
    assert (save.done, save.step, save.path) == (False, 7, str(path))
    with pytest.raises(TimeoutError, match="not saved after"):
        save.result(timeout=0)
    gate.set()
    record = save.result()
    assert save.done
    assert (record.path, record.step, record.leaves) == (str(path), 7, 2)
    assert record.nbytes == path.stat().st_size
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.digest == record.digest
        assert (checkpoint.metrics, checkpoint.config) == ({"return": 1.5}, {"a": 1})


def test_free_saves_of_one_path_keep_their_order(
    tmp_path: Path, disk: Disk, gate: threading.Event
) -> None:
    path = tmp_path / "a.safetensors"
    save_in_background({"w": 1}, path)
    save_in_background({"w": 2}, path)
    gate.set()
    save_in_background({"w": 3}, path).result()
    assert len(disk.published) == 3
    assert restore_into({"w": 0}, path) == {"w": 3}


def test_a_failed_free_save_leaves_the_old_file_and_raises_in_result(
    tmp_path: Path, disk: Disk
) -> None:
    path = tmp_path / "a.safetensors"
    save_in_background({"w": 1}, path).result()
    old = path.read_bytes()
    disk.before = _always("writev", errno.ENOSPC)
    save = save_in_background({"w": 2}, path, step=2)
    for _ in range(2):
        with pytest.raises(BackgroundSaveError, match="step 2 was not saved") as caught:
            save.result()
        assert caught.value.step == 2
        assert getattr(caught.value.__cause__, "errno", 0) == errno.ENOSPC
    assert save.done
    assert path.read_bytes() == old
    assert os.listdir(tmp_path) == ["a.safetensors"]
    disk.before = _nothing
    save_in_background({"w": 3}, path).result()  # it was told: no second time
    assert restore_into({"w": 0}, path) == {"w": 3}


def test_a_failed_free_save_that_nobody_asked_about_raises_at_the_next_call(
    tmp_path: Path, disk: Disk
) -> None:
    disk.before = _always("fsync", errno.EIO)
    path = tmp_path / "a.safetensors"
    save = save_in_background({"w": 1}, path, step=1)
    assert save._finished.wait(PATIENCE)
    with pytest.raises(BackgroundSaveError, match="step 1 was not saved") as caught:
        save_in_background({"w": 2}, tmp_path / "b.safetensors", step=2)
    assert getattr(caught.value.__cause__, "errno", 0) == errno.EIO
    assert os.listdir(tmp_path) == []
    disk.before = _nothing
    save_in_background({"w": 2}, tmp_path / "b.safetensors", step=2).result()


def test_a_failed_free_save_keeps_no_copy_of_the_state(
    tmp_path: Path, disk: Disk
) -> None:
    disk.before = _always("writev", errno.ENOSPC)
    tracemalloc.start()
    try:
        saves: list[BackgroundSave] = []
        for step in range(5):
            state = {"w": np.ones(500_000)}
            saves.append(save_in_background(state, tmp_path / "a", step=step))
            with pytest.raises(BackgroundSaveError):
                saves[-1].result()
        del state
        gc.collect()
        assert len(saves) == 5
        assert tracemalloc.get_traced_memory()[0] < 2_000_000  # one is 4,000,000
    finally:
        tracemalloc.stop()


# ----------------------------------------------------- ends of a process

_PRELUDE = """
import errno, os, sys, threading, time
from pathlib import Path
import numpy as np
from ajaxckpt import Run, SaveAt, _files, save_in_background

here = Path(sys.argv[1])

class Slow:
    def __getattr__(self, name):
        return getattr(os, name)
    def open(self, path, flags, mode=0o777):
        if flags & os.O_EXCL:
            # not finished when the main thread is
            time.sleep(0.1 if "with" in path else 0.7)
        return os.open(path, flags, mode)
    def writev(self, fd, views):
        if (here / "full").exists():
            raise OSError(errno.ENOSPC, "No space left on device")
        return os.writev(fd, views)

_files.os = Slow()

def state(number):
    return {"w": np.full(300_000, number)}
"""
_SAVES = """
left = Run(here / "left", signals=())
left.__enter__()
with Run(here / "with", save=SaveAt(1), signals=()) as run:
    for step in (1, 2):
        run.step(state(step), step=step)
    for step in (1, 2):
        left.step(state(step), step=step)
    for step in (1, 2):
        save_in_background(state(step), here / f"free-{step}.safetensors", step=step)
"""
_ENDS = {"normally": "", "by an exception": "    raise KeyError('oops')\n"}
_ENDS["by sys.exit"] = "    sys.exit(5)\n"
_CODES = {"normally": 0, "by an exception": 1, "by sys.exit": 5}


def _run_script(body: str, directory: Path) -> subprocess.CompletedProcess[str]:
    root = os.path.dirname(os.path.dirname(_files.__file__))
    return subprocess.run(
        [sys.executable, "-c", _PRELUDE + textwrap.dedent(body), str(directory)],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "PYTHONPATH": root},  # the package that is tested here
    )


def _number_in(path: Path) -> int:
    (number,) = np.unique(restore_into({"w": np.zeros(300_000, int)}, path)["w"])
    return int(number)


@pytest.mark.parametrize("end", _ENDS)
def test_every_accepted_save_is_finished_when_the_process_ends(
    end: str, tmp_path: Path
) -> None:
    done = _run_script(_SAVES + _ENDS[end], tmp_path)
    assert done.returncode == _CODES[end], done.stderr
    for step in (1, 2):
        assert _number_in(tmp_path / f"left/step-{step}.safetensors") == step
    for step in (1, 2):
        assert _number_in(tmp_path / f"free-{step}.safetensors") == step
    # the array is as it was when the step was reported: the save at exit is exact
    names = [f"step-{step}.safetensors" for step in (1, 2)]
    assert _files_in(tmp_path / "with") == names
    assert [_number_in(tmp_path / "with" / name) for name in names] == [1, 2]
    assert not list(tmp_path.rglob("*.tmp"))


def test_saves_from_a_daemon_thread_are_finished(tmp_path: Path) -> None:
    """A thread takes after the one that starts it, and JAX's callbacks run in one."""
    script = """
    def saves():
        save_in_background(state(3), here / "free.safetensors")
        run.step(state(4), step=4)

    run = Run(here / "run", signals=())
    run.__enter__()
    thread = threading.Thread(target=saves, daemon=True)
    thread.start()
    thread.join()
    """
    done = _run_script(script, tmp_path)
    assert done.returncode == 0, done.stderr
    assert _number_in(tmp_path / "free.safetensors") == 3
    assert _number_in(tmp_path / "run/step-4.safetensors") == 4


def test_saves_submitted_while_the_process_ends_are_finished(tmp_path: Path) -> None:
    script = """
    import atexit

    def late():
        for step in (1, 2):
            save_in_background(state(step), here / f"late-{step}.safetensors")
        run.step(state(1), step=1)

    run = Run(here / "run", signals=())
    run.__enter__()
    atexit.register(late)
    raise KeyError("oops")
    """
    done = _run_script(script, tmp_path)
    assert "oops" in done.stderr
    for step in (1, 2):
        assert _number_in(tmp_path / f"late-{step}.safetensors") == step
    assert _number_in(tmp_path / "run/step-1.safetensors") == 1
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_failure_that_nobody_asked_about_is_told_at_exit(tmp_path: Path) -> None:
    (tmp_path / "full").touch()
    script = 'save_in_background(state(1), here / "a.safetensors", step=6)'
    done = _run_script(script, tmp_path)
    assert "step 6 was not saved: [Errno 28] No space left on device" in done.stderr
    assert str(tmp_path / "a.safetensors") in done.stderr
    assert os.listdir(tmp_path) == ["full"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system forks no processes")
def test_a_forked_child_does_not_wait_for_its_parents_saves(tmp_path: Path) -> None:
    script = """
    import warnings

    warnings.simplefilter("ignore")  # against forks in a process of many threads
    first = save_in_background(state(1), here / "parent.safetensors")
    pid = os.fork()
    if not pid:
        code = 9
        try:
            save_in_background(state(2), here / "child.safetensors").result(20)
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    first.result()
    """
    done = _run_script(script, tmp_path)
    assert done.returncode == 0, done.stderr
    assert _number_in(tmp_path / "parent.safetensors") == 1
    assert _number_in(tmp_path / "child.safetensors") == 2
