"""What saving and restoring cost in memory, and which bytes they touch."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ajaxckpt import (
    _files,
    _paths,
    checkpoint_exists,
    open_checkpoint,
    plan_restore,
    restore_into,
    save_checkpoint,
    verify_checkpoint,
)

MIB = 1 << 20
GIB = 1 << 30
ALLOWANCE = 64 * MIB
SCRIPT = Path(__file__).with_name("_memory_process.py")

linux = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(),
    reason="the peak of a process's memory is read from Linux's /proc",
)


def _measure(directory: Path, nbytes: int) -> dict[str, dict[str, int]]:
    root = os.path.dirname(os.path.dirname(_files.__file__))
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(directory), str(nbytes)],
        check=True,
        capture_output=True,
        text=True,
        timeout=580,
        env={**os.environ, "PYTHONPATH": root},  # the package that is tested here
    )
    return json.loads(done.stdout)


@linux
@pytest.mark.parametrize(
    "nbytes",
    [
        pytest.param(96 * MIB, id="96 MiB"),
        pytest.param(GIB, id="1 GiB", marks=pytest.mark.slow),
    ],
)
def test_memory_beside_the_state_is_a_constant(nbytes: int, tmp_path: Path) -> None:
    results = _measure(tmp_path, nbytes)
    assert len(results) >= 12
    # every state is far larger than the allowance, so one copy of it would show
    assert {name for name, r in results.items() if r["state"] < nbytes * 0.99} == set()
    saving = {name: r["saving"] for name, r in results.items()}
    beside = {name: r["restoring"] - r["state"] for name, r in results.items()}
    assert {name: n for name, n in saving.items() if n > ALLOWANCE} == {}
    assert {name: n for name, n in beside.items() if n > ALLOWANCE} == {}


class _CountingOs:
    """The operating system as ``_files`` sees it, with a count of all it moves.

    With ``sparse`` it seeks over zeros instead of writing them.
    """

    def __init__(self, *, sparse: bool = False) -> None:
        self.sparse = sparse
        self.reads: list[tuple[int, int]] = []
        self.writes: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def preadv(self, fd: int, views: Any, offset: int) -> int:
        done = os.preadv(fd, views, offset)
        self.reads.append((offset, done))
        return done

    def read(self, fd: int, size: int) -> bytes:
        raise AssertionError("bytes are read through preadv alone")

    def writev(self, fd: int, views: Any) -> int:
        total = sum(len(view) for view in views)
        if self.sparse and not any(np.frombuffer(view, bool).any() for view in views):
            os.lseek(fd, total, os.SEEK_CUR)
            done = total
        else:
            done = os.writev(fd, views)
        self.writes.append(done)
        return done

    @property
    def bytes_read(self) -> int:
        return sum(done for _, done in self.reads)


@contextmanager
def _counted(
    monkeypatch: pytest.MonkeyPatch, *, sparse: bool = False
) -> Generator[_CountingOs]:
    counting = _CountingOs(sparse=sparse)
    with monkeypatch.context() as patch:
        patch.setattr(_files, "os", counting)
        patch.setattr(_paths, "os", counting)
        yield counting


def _header_bytes(path: Path) -> int:
    with path.open("rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")


@pytest.fixture(scope="module")
def big_file(tmp_path_factory: pytest.TempPathFactory) -> Generator[Path]:
    """A checkpoint of 1 GiB, nearly all of it a hole on the disk."""
    path = tmp_path_factory.mktemp("big") / "a.safetensors"
    state = {
        "actor": {"w": np.arange(3000, dtype=np.float32), "b": np.ones(7, np.int8)},
        "critic": {"w": np.arange(500, dtype=np.float32), "n": 3},
        "replay": np.zeros(GIB // 8),
        "step": np.int8(5),
    }
    with pytest.MonkeyPatch.context() as patch, _counted(patch, sparse=True):
        save_checkpoint(state, path)
    assert path.stat().st_size > GIB
    yield path
    path.unlink()


def test_planning_and_inspecting_read_the_header_alone(
    big_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    header = _header_bytes(big_file)
    skeleton = {"w": np.zeros(3000, np.float32), "b": np.zeros(7, np.int8)}
    for look in (
        lambda: plan_restore(skeleton, big_file, subtree="actor"),
        lambda: open_checkpoint(big_file).close(),
        lambda: checkpoint_exists(big_file),
    ):
        with _counted(monkeypatch) as counting:
            look()
        # the first bytes once more, to learn the header's length
        assert header <= counting.bytes_read <= header + 4096
        assert max(offset + done for offset, done in counting.reads) <= header


@pytest.mark.parametrize("kind", ["numpy", "jax", "sharded"])
def test_a_subtree_restore_reads_only_its_bytes(
    kind: str, big_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    header = _header_bytes(big_file)
    skeleton: Any = {"w": np.zeros(3000, np.float32), "b": np.zeros(7, np.int8)}
    if kind != "numpy":
        skeleton = jax.device_put(skeleton)
    if kind == "sharded":
        mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
        shards = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
        skeleton["w"] = jax.device_put(skeleton["w"], shards)
    with _counted(monkeypatch) as counting:
        restored = restore_into(skeleton, big_file, subtree="actor")
    assert np.array_equal(restored["w"], np.arange(3000, dtype=np.float32))
    wanted = 3000 * 4 + 7
    assert header + wanted <= counting.bytes_read <= header + wanted + 4096


def test_one_leaf_and_ignored_leaves_cost_only_what_is_wanted(
    big_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    header = _header_bytes(big_file)
    with _counted(monkeypatch) as counting, open_checkpoint(big_file) as file:
        assert file["critic.w"][-1] == 499
        assert (file["critic.n"], file["step"]) == (3, 5)
    assert counting.bytes_read <= header + 500 * 4 + 1 + 4096
    skeleton = {"critic": {"w": np.zeros(500, np.float32), "n": 0}}
    with _counted(monkeypatch) as counting:
        restored = restore_into(skeleton, big_file, ignore=["actor", "replay", "step"])
    assert restored["critic"]["n"] == 3
    assert counting.bytes_read <= header + 500 * 4 + 4096


def test_a_save_writes_every_byte_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"w": jnp.ones((600, 1000)), "b": np.ones(3 * MIB, np.int8), "n": 3}
    path = tmp_path / "a.safetensors"
    with _counted(monkeypatch) as counting:
        record = save_checkpoint(state, path)
    assert sum(counting.writes) == record.nbytes == path.stat().st_size
    with _counted(monkeypatch) as counting:
        restore_into(state, path)
    assert record.nbytes <= counting.bytes_read <= record.nbytes + 4096


def _pattern(nbytes: int) -> np.ndarray:
    """Mark the ends and every place near a power of two; the rest is zeros."""
    leaf = np.zeros(nbytes, np.uint8)
    for power in range(20, 33):
        for place in range((1 << power) - 3, (1 << power) + 4):
            if 0 <= place < nbytes:
                leaf[place] = (place * 31 + power) % 251 + 1
    leaf[:3], leaf[-3:] = (9, 8, 7), (1, 2, 3)
    return leaf


def _assert_equal_in_pieces(left: np.ndarray, right: np.ndarray) -> None:
    assert left.shape == right.shape
    for start in range(0, left.size, 64 * MIB):
        piece = slice(start, start + 64 * MIB)
        assert np.array_equal(left[piece], right[piece]), f"from byte {start}"


@pytest.mark.slow
@pytest.mark.parametrize("nbytes", [2**31, 2**32 + 5], ids=["2^31", "4 GiB + 5"])
def test_leaves_beyond_32_bits_are_exact(
    nbytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.safetensors"
    leaf = _pattern(nbytes)
    state = {"leaf": leaf, "after": np.arange(5, dtype=np.uint8)}
    try:
        with _counted(monkeypatch) as counting:
            save_checkpoint(state, path)
            assert verify_checkpoint(path).nbytes == path.stat().st_size
            skeleton = {"leaf": np.zeros(nbytes, np.uint8), "after": state["after"]}
            restored = restore_into(skeleton, path)
            _assert_equal_in_pieces(restored["leaf"], leaf)
            assert restored["after"].tolist() == [0, 1, 2, 3, 4]
            del restored, skeleton
            gc.collect()
            abstract = {
                "leaf": jax.ShapeDtypeStruct(
                    (nbytes,),
                    np.uint8,
                    sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0]),
                ),
                "after": state["after"],
            }
            on_device = restore_into(abstract, path)
            assert isinstance(on_device["leaf"], jax.Array)
            _assert_equal_in_pieces(np.asarray(on_device["leaf"]), leaf)
    finally:
        path.unlink(missing_ok=True)
    assert sum(counting.writes) > nbytes
    assert max(counting.writes) <= GIB
    assert max(done for _, done in counting.reads) <= GIB


def test_no_call_moves_more_than_a_gibibyte_whatever_it_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the largest pieces that reach the operating system, of a leaf of 48 MiB
    state = {"w": jnp.ones((12, MIB)), "n": np.ones(5 * MIB, np.int8)}
    with _counted(monkeypatch) as counting:
        save_checkpoint(state, tmp_path / "a.safetensors")
        restore_into(state, tmp_path / "a.safetensors")
    assert max(counting.writes) <= 16 * MIB
    assert max(done for _, done in counting.reads) <= 16 * MIB


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@linux
@pytest.mark.parametrize(
    ("times", "nbytes"),
    [
        pytest.param(40, 2 * MIB, id="40 of 2 MiB"),
        pytest.param(200, 100_000_000, id="200 of 100 MB", marks=pytest.mark.slow),
    ],
)
def test_many_saves_leave_nothing_behind(
    times: int, nbytes: int, tmp_path: Path
) -> None:
    path = tmp_path / "a.safetensors"
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    shards = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    state = {
        "jax": jnp.ones(nbytes // 12),
        "numpy": np.ones(nbytes // 12, np.float32),
        "sharded": jax.device_put(np.ones((8, nbytes // 96), np.float32), shards),
        "key": jax.random.key(0),
        "n": jnp.asarray(3),
    }
    for _ in range(3):
        save_checkpoint(state, path)
    gc.collect()
    arrays, open_files = len(jax.live_arrays()), len(os.listdir("/proc/self/fd"))
    resident = _resident()
    for _ in range(times):
        save_checkpoint(state, path)
    gc.collect()
    assert len(jax.live_arrays()) == arrays
    assert len(os.listdir("/proc/self/fd")) == open_files
    assert _resident() - resident <= 8 * MIB
    assert os.listdir(tmp_path) == ["a.safetensors"]
