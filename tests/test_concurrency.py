"""Many writers and readers of one path, and one writer that saves for long."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _fake_os import Call, FakeOs, install
from _writer_process import (
    Nursery,
    numbered_state,
    nursery,
    read_number,
    save_number,
    shapes,
)

from ajaxckpt import (
    checkpoint_exists,
    open_checkpoint,
    plan_restore,
    restore_into,
    save_checkpoint,
    state_digest,
    verify_checkpoint,
)
from ajaxckpt._files import Sink
from ajaxckpt._metadata import Metadata
from ajaxckpt._payload import aligned_empty
from ajaxckpt._writer import write_checkpoint

BIG = 1 << 18

__all__ = ["nursery"]


def jax_state(number: int, *, big: int = BIG) -> dict[str, Any]:
    """Return as a pytree what ``numbered_state`` describes."""
    state: dict[str, Any] = {"opt_state": {}, "rng": {}, "count": number}
    for name, (dtype, shape) in shapes(big).items():
        head, *rest = name.split(".")
        if dtype == "float64":
            leaf: Any = np.full(shape, number, dtype)
        else:
            leaf = jnp.full(shape, number, dtype)
        if not rest:
            state[head] = leaf
        elif len(rest) == 1:
            state[head][int(rest[0])] = leaf
        else:
            state[head][int(rest[0])] = {rest[1]: leaf}
    return state


def number_of(state: Any) -> int:
    """Return the one number that every element of a pytree says."""
    numbers = {int(x) for leaf in jax.tree.leaves(state) for x in np.unique(leaf)}
    assert len(numbers) == 1, f"a mixture of {sorted(numbers)}"
    return numbers.pop()


def test_the_two_makers_of_a_numbered_state_agree(tmp_path: Path) -> None:
    save_checkpoint(jax_state(5), tmp_path / "jax", step=5)
    save_number(str(tmp_path / "plain"), 5, big=BIG)
    with (
        open_checkpoint(tmp_path / "jax") as first,
        open_checkpoint(tmp_path / "plain") as second,
    ):
        assert set(first) == set(second)
        assert first.digest == second.digest == state_digest(jax_state(5))
    assert read_number(str(tmp_path / "jax")) == 5


def repeat(stop: threading.Event, action: Callable[[], object]) -> int:
    """Repeat an action until told to stop; return how often it was done."""
    count = 0
    while not stop.is_set() or count == 0:
        action()
        count += 1
    return count


def test_twenty_threads_and_four_processes_save_while_others_restore(
    nursery: Nursery, tmp_path: Path
) -> None:
    path = tmp_path / "state.safetensors"
    skeleton = jax_state(0)
    save_checkpoint(jax_state(1), path, step=1)
    stop = threading.Event()
    allowed: set[int] = {1}
    seen: set[int] = set()

    def save_some(thread: int) -> int:
        for turn in range(3):
            number = 2 + thread * 3 + turn
            save_checkpoint(jax_state(number), path, step=number)
        return 3

    def restore() -> None:
        seen.add(number_of(restore_into(skeleton, path)))

    def read() -> None:
        seen.add(read_number(str(path)))
        assert checkpoint_exists(path)
        assert verify_checkpoint(path).leaves == len(jax.tree.leaves(skeleton))

    readers = [nursery.start("read_until_told", path=str(path)) for _ in range(2)]
    writers = []
    for first in (100, 120, 140, 160):
        job = {"path": str(path), "first": first, "stop": first + 15, "big": BIG}
        writers.append(nursery.start("loop", **job))
        allowed |= set(range(first, first + 15))
    allowed |= set(range(2, 62))
    with ThreadPoolExecutor(24) as pool:
        restoring = [pool.submit(repeat, stop, restore) for _ in range(2)]
        reading = [pool.submit(repeat, stop, read) for _ in range(2)]
        saving = [pool.submit(save_some, thread) for thread in range(20)]
        try:
            assert sum(future.result() for future in saving) == 60
            for writer, first in zip(writers, (100, 120, 140, 160), strict=True):
                assert writer.end() == (list(range(first, first + 15)), 0)
        finally:
            stop.set()
        assert all(future.result() for future in (*restoring, *reading))
    for reader in readers:
        reader.go()
        words, fate = reader.end()
        assert fate == 0 and len(words) == 1 and words[0] > 0, words
    assert seen <= allowed and len(seen) > 2
    assert read_number(str(path)) in allowed
    assert os.listdir(tmp_path) == [path.name]


def test_a_save_and_a_read_may_fall_between_any_two_calls_of_another_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "state.safetensors"
    fake = install(monkeypatch, FakeOs())
    save_number(str(path), 1, big=BIG)
    fake.calls.clear()
    save_number(str(path), 2, big=BIG)
    names = list(fake.names)
    renamed = names.index("replace")
    for k in range(len(names)):
        save_number(str(path), 1, big=BIG)
        fake.calls.clear()

        def intrude(number: int, call: Call, args: tuple[Any, ...], k: int = k) -> None:
            if number == k:
                fake.before = lambda *_: None
                assert read_number(str(path)) == (1 if k <= renamed else 2)
                save_number(str(path), 3, big=BIG)
                assert read_number(str(path)) == 3

        fake.before = intrude
        save_number(str(path), 2, big=BIG)
        assert len(fake.calls) > 2 * len(names) - 2
        assert read_number(str(path)) == (2 if k <= renamed else 3), names[k]
        assert os.listdir(tmp_path) == [path.name], names[k]


def test_writers_of_different_paths_in_one_directory_leave_each_other_alone(
    tmp_path: Path,
) -> None:
    def save_some(thread: int) -> None:
        for _ in range(5):
            save_number(str(tmp_path / f"{thread}.safetensors"), thread, big=4096)

    with ThreadPoolExecutor(12) as pool:
        list(pool.map(save_some, range(12)))
    assert sorted(os.listdir(tmp_path)) == sorted(
        f"{thread}.safetensors" for thread in range(12)
    )
    for thread in range(12):
        assert read_number(str(tmp_path / f"{thread}.safetensors")) == thread


def test_threads_may_make_the_same_missing_directories(tmp_path: Path) -> None:
    for attempt in range(5):
        parent, barrier = tmp_path / str(attempt) / "a" / "b", threading.Barrier(8)

        def save(
            thread: int, parent: Path = parent, barrier: threading.Barrier = barrier
        ) -> None:
            barrier.wait()
            save_number(str(parent / str(thread)), thread, big=64)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(save, range(8)))
        assert len(os.listdir(parent)) == 8


def test_an_open_checkpoint_and_a_plan_keep_the_state_they_were_made_of(
    tmp_path: Path,
) -> None:
    path = tmp_path / "state.safetensors"
    save_checkpoint(jax_state(1), path)
    plan = plan_restore(jax_state(0), path)
    with open_checkpoint(path) as checkpoint:
        save_checkpoint(jax_state(2), path)
        assert set(np.unique(checkpoint["replay"])) == {1}
    assert number_of(plan.apply()) == 1
    assert number_of(restore_into(jax_state(0), path)) == 2


def test_threads_read_one_open_checkpoint_side_by_side(tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    state = {f"w{i}": np.full(5000 + i, i, np.float32) for i in range(40)}
    save_checkpoint(state, path)

    with open_checkpoint(path) as checkpoint, ThreadPoolExecutor(8) as pool:

        def read(name: str) -> bool:
            return np.array_equal(checkpoint[name], state[name])

        assert all(pool.map(read, list(state) * 5))


def test_a_numpy_leaf_that_another_thread_writes_is_saved_with_a_true_digest(
    tmp_path: Path,
) -> None:
    path, stop = tmp_path / "state.safetensors", threading.Event()
    shared = np.zeros(1 << 20, np.float32)

    def scribble() -> None:
        shared[:] += 1

    with ThreadPoolExecutor(1) as pool:
        scribbling = pool.submit(repeat, stop, scribble)
        try:
            for _ in range(20):
                save_checkpoint({"shared": shared}, path)
                verify_checkpoint(path)
        finally:
            stop.set()
        assert scribbling.result() > 20


def test_a_jax_leaf_that_shares_numpys_memory_is_saved_with_a_true_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "state.safetensors"
    memory = aligned_empty((3 << 20,), np.dtype(np.uint8))
    memory[:] = 1
    shared = jax.device_put(memory)
    assert shared.unsafe_buffer_pointer() == memory.ctypes.data, "no copy on CPU"
    flush = Sink.flush

    def write_then_flush(sink: Sink) -> None:
        memory[:] += 1  # between the hash of a chunk and its write
        flush(sink)

    monkeypatch.setattr(Sink, "flush", write_then_flush)
    save_checkpoint({"w": shared}, path)
    assert verify_checkpoint(path).leaves == 1


def test_a_writer_in_the_middle_of_its_save_blocks_no_other(tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    at_replay, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        at_replay.set()
        assert go_on.wait(60)

    state = numbered_state(1, big=BIG, before_replay=wait)
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(
            write_checkpoint, str(path), state, Metadata(checkpoint_id="1" * 32, step=1)
        )
        try:
            assert at_replay.wait(60)
            save_number(str(path), 2, big=BIG)
            assert read_number(str(path)) == 2
        finally:
            go_on.set()
        slow.result()
    assert read_number(str(path)) == 1
    assert os.listdir(tmp_path) == [path.name]


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(
    not Path("/proc/self/statm").exists(), reason="this system does not tell its memory"
)
def test_many_saves_leave_memory_arrays_and_descriptors_as_they_were(
    tmp_path: Path,
) -> None:
    saves, size = 40, 5_000_000 // 8  # test_memory saves 200 times 100 MB
    path = tmp_path / "state.safetensors"

    @jax.jit
    def train(state: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return {name: leaf + 1 for name, leaf in state.items()}

    state = {"w": jnp.zeros((size,)), "buffer": jnp.zeros((2, size // 2), jnp.int32)}
    state["step"] = jnp.int32(0)

    def facts() -> tuple[int, int, int]:
        gc.collect()
        return (
            len(jax.live_arrays()),
            len(os.listdir("/proc/self/fd")),
            threading.active_count(),
        )

    for _ in range(5):
        state = train(state)
        save_checkpoint(state, path, step=state["step"])
    before, resident = facts(), resident_bytes()
    # the collector off: nothing may need it to be freed
    gc.disable()
    try:
        for _ in range(saves):
            state = train(state)
            save_checkpoint(state, path, step=state["step"])
            assert len(jax.live_arrays()) == before[0]
        grown = resident_bytes() - resident
    finally:
        gc.enable()
    assert facts() == before
    # one state more would be the smallest leak; many saves make it many
    assert grown < 32_000_000, f"{grown} bytes more"
    assert int(restore_into(state, path)["step"]) == saves + 5
