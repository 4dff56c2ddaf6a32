"""Any byte that is not the one written: the one error, naming the part it is in."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from ajaxckpt import (
    CheckpointError,
    CheckpointNotFoundError,
    DamagedCheckpointError,
    NotACheckpointError,
    checkpoint_exists,
    open_checkpoint,
    restore_into,
    save_checkpoint,
    verify_checkpoint,
)

MEND = (
    "To mend: restore another checkpoint, or copy this one again from where it is whole"
)
READERS = (open_checkpoint, checkpoint_exists, verify_checkpoint)


@dataclass(frozen=True, slots=True)
class Sample:
    """A file, and what its own header says about its bytes."""

    path: Path
    data: bytes
    start: int
    spans: dict[str, tuple[int, int]]

    def leaf_at(self, position: int) -> str:
        """Name the leaf whose payload holds a byte of the file."""
        (name,) = (n for n, (a, b) in self.spans.items() if a <= position < b)
        return name

    def describe(self, name: str) -> str:
        begin, end = self.spans[name]
        return f"{name}: bytes {begin}-{end - 1} are not those written"


def inspect_file(path: Path) -> Sample:
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    del header["__metadata__"]
    spans = {
        name: (start + row["data_offsets"][0], start + row["data_offsets"][1])
        for name, row in header.items()
    }
    return Sample(path, data, start, spans)


def small_state() -> dict[str, Any]:
    return {
        "actor": {
            "kernel": jnp.arange(12, dtype=jnp.float32).reshape(3, 4),
            "bias": jnp.arange(4, dtype=jnp.bfloat16),
        },
        "opt": (jnp.arange(6, dtype=jnp.float16), jnp.asarray(3)),
        "key": jax.random.key(7),
        "replay": {"data": np.arange(8, dtype=np.int64), "full": np.bool_(True)},
        "wave": np.asarray([1 + 2j], np.complex128),
        "none": jnp.zeros((0, 3)),
        "name": "pendulum",
        "rate": 3e-4,
        "on": True,
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    path = tmp_path_factory.mktemp("damage") / "whole.safetensors"
    save_checkpoint(small_state(), path, step=3, config={"lr": 3e-4})
    return inspect_file(path)


@pytest.fixture
def small(whole: Sample, tmp_path: Path) -> Sample:
    """Return a file of a few KiB that a test may damage."""
    path = tmp_path / "small.safetensors"
    shutil.copyfile(whole.path, path)
    return inspect_file(path)


@contextmanager
def flipped(sample: Sample, position: int, bit: int) -> Iterator[None]:
    """Flip one bit of the file, and back."""
    fd = os.open(sample.path, os.O_RDWR)
    try:
        os.pwrite(fd, bytes((sample.data[position] ^ 1 << bit,)), position)
        yield
        os.pwrite(fd, sample.data[position : position + 1], position)
    finally:
        os.close(fd)


def refusal(call: Any, *args: Any, **kwargs: Any) -> CheckpointError:
    """Return the error of a call, of the class for damage and in the one shape."""
    with pytest.raises(CheckpointError) as caught:
        call(*args, **kwargs)
    error = caught.value
    assert type(error) is DamagedCheckpointError, error
    lines = str(error).splitlines()
    assert lines[0] == f"{error.path}: {error.act}: {error.problem}"
    assert lines[1:-1] == [f"  {line}" for line in error.details]
    assert lines[-1] == MEND
    return error


def names_the_header(error: CheckpointError, position: int) -> bool:
    """Tell whether an error is about the length field or header, as its byte is."""
    if position < 8 and error.problem.startswith("the length field (bytes 0-7) gives"):
        return not error.details
    words = ("the header (bytes 0-", "the header's first bytes are not as written")
    return error.problem.startswith(words) and not error.details


def names_only(error: CheckpointError, sample: Sample, name: str) -> bool:
    """Tell whether an error is about this leaf's payload and no other part."""
    return error.details == (sample.describe(name),)


def test_every_bit_flip_is_found_and_the_damaged_part_named(small: Sample) -> None:
    sound = verify_checkpoint(small.path)
    named: set[str] = set()
    for position, bit in itertools.product(range(len(small.data)), range(8)):
        with flipped(small, position, bit):
            error = refusal(verify_checkpoint, small.path)
        if position < small.start:
            assert names_the_header(error, position), (position, bit, str(error))
            continue
        name = small.leaf_at(position)
        assert names_only(error, small, name), (position, bit, str(error))
        assert error.problem == f"1 of {sound.leaves} leaves is damaged"
        named.add(name)
    assert named == {n for n, (begin, end) in small.spans.items() if begin < end}
    assert verify_checkpoint(small.path) == sound


def test_every_truncation_is_found_and_says_how_many_bytes_are_left(
    small: Sample,
) -> None:
    size = len(small.data)
    for left in reversed(range(size)):
        os.truncate(small.path, left)
        problem = refusal(verify_checkpoint, small.path).problem
        if left == 0:
            assert problem == "the file is empty"
        elif left >= small.start:
            says = f"the file has {left} bytes, its header says {size}"
            assert problem == f"truncated: {says}"
        else:
            assert "truncated" in problem and f"{left} bytes" in problem, problem


def check_resized(small: Sample, data: bytes) -> None:
    """Check the error for a file whose bytes are no longer where they were."""
    # in place: a truncating write is a flush to disk each time
    with small.path.open("r+b", buffering=0) as file:
        file.truncate(len(data))
        file.write(data)
    error = refusal(verify_checkpoint, small.path)
    if data[: small.start] != small.data[: small.start]:
        changed = next(
            i
            for i, pair in enumerate(zip(data, small.data, strict=False))
            if pair[0] != pair[1]
        )
        # a shifted length field gives another header, most often an impossible one
        assert names_the_header(error, changed), str(error)
        return
    sizes = f"the file has {len(data)} bytes, its header says {len(small.data)}"
    what = "truncated" if len(data) < len(small.data) else "bytes appended"
    assert error.problem == f"{what}: {sizes}"


def test_every_inserted_byte_is_found(small: Sample) -> None:
    data = small.data
    for position in range(len(data) + 1):
        neighbour = data[position - 1 : position] or data[:1]
        for byte in {b"\0", b"\xff", neighbour}:
            check_resized(small, data[:position] + byte + data[position:])


def test_every_deleted_byte_is_found(small: Sample) -> None:
    for position in range(len(small.data)):
        check_resized(small, small.data[:position] + small.data[position + 1 :])


def test_appended_bytes_are_found_whatever_they_are(small: Sample) -> None:
    payload = small.data[small.start :]
    tails = [bytes((value,)) for value in range(256)]
    tails += [bytes(64), b" " * 4096, b"\n\n", payload, small.data]
    for tail in tails:
        check_resized(small, small.data + tail)


def test_swapped_leaf_payloads_are_found(small: Sample) -> None:
    """Equal sizes and sound digests elsewhere do not make bytes right."""
    (a, b), (c, d) = small.spans["replay.data"], small.spans["actor.kernel"]
    size = min(b - a, d - c)
    data = bytearray(small.data)
    data[a : a + size], data[c : c + size] = data[c : c + size], data[a : a + size]
    small.path.write_bytes(data)
    error = refusal(verify_checkpoint, small.path)
    assert error.problem == "2 of 12 leaves are damaged"
    both = [small.describe("replay.data"), small.describe("actor.kernel")]
    assert sorted(error.details) == sorted(both)


def leaf_bits(tree: Any) -> list[Any]:
    """Return the leaves with arrays as their bytes."""
    leaves = []
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array) and jnp.issubdtype(
            leaf.dtype, jax.dtypes.prng_key
        ):
            leaf = jax.random.key_data(leaf)
        is_array = isinstance(leaf, jax.Array | np.ndarray | np.generic)
        leaves.append(np.asarray(leaf).tobytes() if is_array else leaf)
    return leaves


@pytest.mark.parametrize(
    "name",
    [
        "actor.kernel",
        "actor.bias",
        "opt.0",
        "opt.1",
        "key",
        "replay.data",
        "replay.full",
        "wave",
        "name",
    ],
)
def test_a_damaged_leaf_stops_what_needs_it_and_nothing_else(
    small: Sample, name: str
) -> None:
    skeleton = small_state()
    before = leaf_bits(skeleton)
    with flipped(small, small.spans[name][0], 0):
        error = refusal(restore_into, skeleton, small.path)
        assert error.problem == "the payload of a leaf is damaged"
        assert names_only(error, small, name), str(error)
        assert checkpoint_exists(small.path)
        with open_checkpoint(small.path) as checkpoint:
            assert names_only(refusal(checkpoint.read, [name]), small, name)
            assert names_only(refusal(dict, checkpoint), small, name)
            others = [other for other in checkpoint if other != name]
            assert list(checkpoint.read(others)) == others
        for top, part in skeleton.items():
            if name.split(".")[0] == top:
                error = refusal(restore_into, part, small.path, subtree=top)
                assert names_only(error, small, name), str(error)
            else:
                found = restore_into(part, small.path, subtree=top)
                assert leaf_bits(found) == leaf_bits(part)
        kept = restore_into(skeleton, small.path, keep=name, ignore=name)
        assert leaf_bits(kept) == before
    assert leaf_bits(skeleton) == before
    assert leaf_bits(restore_into(skeleton, small.path)) == before


def test_a_damaged_sharded_leaf_is_not_restored(tmp_path: Path) -> None:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    state = {
        "x": jax.device_put(np.arange(64, dtype=np.float32), sharding),
        "y": jnp.zeros(3),
    }
    save_checkpoint(state, tmp_path / "sharded.safetensors")
    sample = inspect_file(tmp_path / "sharded.safetensors")
    with flipped(sample, sample.spans["x"][0] + 200, 5):
        assert names_only(refusal(restore_into, state, sample.path), sample, "x")
    assert leaf_bits(restore_into(state, sample.path)) == leaf_bits(state)


@pytest.mark.parametrize("position", [0, 3, 8, 20, 45, 60, 130, -1])
def test_a_damaged_header_stops_every_way_to_read(small: Sample, position: int) -> None:
    """A damaged file taken for none would start every resume loop again."""
    position = position if position >= 0 else small.start - 1
    with flipped(small, position, 6):
        for read in READERS:
            assert names_the_header(refusal(read, small.path), position)
        error = refusal(restore_into, small_state(), small.path)
        assert names_the_header(error, position)


def test_damage_of_an_open_file_is_found_when_its_bytes_are_read(
    small: Sample,
) -> None:
    with open_checkpoint(small.path) as checkpoint:
        with flipped(small, small.spans["replay.data"][0], 3):
            error = refusal(checkpoint.read, ["replay.data"])
            assert names_only(error, small, "replay.data")
        os.truncate(small.path, small.start)
        error = refusal(checkpoint.read, ["replay.data"])
        assert "replay.data" in str(error)


# --- a large file --------------------------------------------------------------


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    """Return a file of 50 MB in 50 leaves."""
    rng = np.random.default_rng(5)
    dtypes = itertools.cycle((np.float32, np.int64, np.uint8, np.float16, np.complex64))
    state = {
        f"leaf{i}": np.frombuffer(rng.bytes(1_000_000), np.uint8).view(next(dtypes))
        for i in range(50)
    }
    path = tmp_path_factory.mktemp("large") / "large.safetensors"
    save_checkpoint(state, path)
    return inspect_file(path)


def test_random_flips_of_a_large_file_are_found(
    large: Sample, request: pytest.FixtureRequest
) -> None:
    verify_all = bool(request.config.getoption("--slow"))
    assert len(large.data) > 50_000_000
    rng = random.Random(50)
    positions = [rng.randrange(len(large.data)) for _ in range(2_000)]
    positions += [rng.randrange(large.start) for _ in range(100)]
    for i, position in enumerate(positions):
        with flipped(large, position, rng.randrange(8)):
            if position < large.start:
                error = refusal(verify_checkpoint, large.path)
                assert names_the_header(error, position), (position, str(error))
                continue
            name = large.leaf_at(position)
            with open_checkpoint(large.path) as checkpoint:
                assert names_only(refusal(checkpoint.read, [name]), large, name)
            if verify_all or i % 50 == 0:
                error = refusal(verify_checkpoint, large.path)
                assert names_only(error, large, name), str(error)
    assert verify_checkpoint(large.path).nbytes == len(large.data)


def test_every_damaged_leaf_is_counted_and_ten_are_named(large: Sample) -> None:
    hit = list(large.spans)[::2]
    fd = os.open(large.path, os.O_RDWR)
    for name in hit:
        position = large.spans[name][1] - 1
        os.pwrite(fd, bytes((large.data[position] ^ 128,)), position)
    try:
        error = refusal_with_more(large, len(hit))
    finally:
        os.pwrite(fd, large.data[large.start :], large.start)
        os.close(fd)
    assert error.problem == "25 of 50 leaves are damaged"
    assert error.details == tuple(map(large.describe, hit))


def refusal_with_more(sample: Sample, count: int) -> CheckpointError:
    with pytest.raises(DamagedCheckpointError) as caught:
        verify_checkpoint(sample.path)
    lines = str(caught.value).splitlines()
    assert len(lines) == 13
    assert lines[-2:] == [f"  and {count - 10} more", MEND]
    return caught.value


# --- what is no checkpoint at all ----------------------------------------------

NOT_OURS = (
    "ajaxckpt did not write this file\n"
    "To mend: pass the path of a file written by save_checkpoint"
)
UNFINISHED = f"begins with zeros: an unfinished write\n{MEND}"


def write_pickle(path: Path) -> None:
    path.write_bytes(pickle.dumps({"w": list(range(300))}))


def write_npz(path: Path) -> None:
    with path.open("wb") as file:
        np.savez(file, w=np.arange(100))


FOREIGN = {
    "text": (lambda path: path.write_text("notes on the run\n" * 20), NOT_OURS),
    "short text": (lambda path: path.write_text("a" * 100), NOT_OURS),
    "json": (lambda path: path.write_text('{"w": [1, 2]}' + " " * 40), NOT_OURS),
    "pickle": (write_pickle, NOT_OURS),
    "npz": (write_npz, NOT_OURS),
    "foreign safetensors": (
        lambda path: safetensors.numpy.save_file({"w": np.arange(99)}, path),
        NOT_OURS,
    ),
    "random bytes": (
        lambda p: p.write_bytes(random.Random(1).randbytes(999)),
        NOT_OURS,
    ),
    "empty": (lambda path: path.touch(), f"the file is empty\n{MEND}"),
    "zeros": (lambda path: path.write_bytes(bytes(5000)), UNFINISHED),
    "directory": (
        lambda path: path.mkdir(),
        "is a directory\nTo mend: pass the path of a file, or read a run's directory "
        "with ajaxckpt.Run(directory)",
    ),
    "fifo": (os.mkfifo, "is a FIFO\nTo mend: pass the path of a file"),
    "device": (
        lambda path: path.symlink_to("/dev/null"),
        "is a device\nTo mend: pass the path of a file",
    ),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_what_is_no_checkpoint_is_told_apart(tmp_path: Path, kind: str) -> None:
    write, message = FOREIGN[kind]
    path = tmp_path / "thing"
    write(path)
    damaged = message.endswith(MEND)
    expected = DamagedCheckpointError if damaged else NotACheckpointError
    acts = ("cannot open", "cannot tell whether a checkpoint exists", "cannot verify")
    for read, act in zip(READERS, acts, strict=True):
        with pytest.raises(CheckpointError) as caught:
            read(path)
        assert type(caught.value) is expected
        assert str(caught.value) == f"{path}: {act}: {message}"
    with pytest.raises(expected) as caught:
        restore_into({"w": jnp.zeros(3)}, path)
    assert message in str(caught.value)


def test_a_path_where_nothing_is_says_so(tmp_path: Path) -> None:
    path = tmp_path / "sub" / "none.safetensors"
    assert checkpoint_exists(path) is False
    for read, act in ((open_checkpoint, "open"), (verify_checkpoint, "verify")):
        with pytest.raises(CheckpointNotFoundError) as caught:
            read(path)
        assert str(caught.value) == (
            f"{path}: cannot {act}: no such file; the nearest directory that exists is "
            f"{tmp_path}\nTo mend: check the path, or ask checkpoint_exists(path) first"
        )
