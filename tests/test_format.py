"""Where every byte of a file stands: the header's rules, checked from outside."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import xxhash

from ajaxckpt import (
    CheckpointError,
    InvalidArgumentError,
    NotACheckpointError,
    checkpoint_exists,
    open_checkpoint,
    save_checkpoint,
    verify_checkpoint,
)
from ajaxckpt._files import Sink, write_atomically
from ajaxckpt._format import is_ours
from ajaxckpt._layout import LeafSpec
from ajaxckpt._metadata import Metadata
from ajaxckpt._writer import StateData, write_checkpoint

MIB = 1 << 20
TAG_BYTES = {
    **{"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1},
    **{"U16": 2, "I16": 2, "F16": 2, "BF16": 2, "U32": 4, "I32": 4, "F32": 4},
    **{"U64": 8, "I64": 8, "F64": 8, "C64": 8, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1},
}


def mixed_state() -> dict[str, Any]:
    """Return leaves whose item sizes are in no order."""
    return {
        "a": np.arange(3, dtype=np.int8),
        "b": np.arange(5, dtype=np.float64),
        "c": np.asarray([True]),
        "d": np.arange(3, dtype=np.float16),
        "e": np.asarray([1j, 2], np.complex128),
        "f": np.arange(7, dtype=np.float32),
        "g": "text",
        "h": np.asarray([1, 2], ml_dtypes.int4),
        "i": np.zeros((0, 9), np.float64),
        "j": np.asarray([1j], np.complex64),
        "k": np.arange(1, dtype=np.uint16),
        "l": 3,
    }


def take_apart(data: bytes) -> tuple[dict[str, str], list[tuple[str, Any]], bytes]:
    """Return the safetensors metadata, the entries in order, and the payload."""
    size = int.from_bytes(data[:8], "little")
    pairs = json.loads(data[8 : 8 + size], object_pairs_hook=list)
    (name, metadata), *entries = pairs
    assert name == "__metadata__"
    return dict(metadata), [(n, dict(row)) for n, row in entries], data[8 + size :]


@pytest.fixture
def mixed(tmp_path: Path) -> bytes:
    path = tmp_path / "mixed.safetensors"
    save_checkpoint(mixed_state(), path, step=1, config={"text": "\u00e9"})
    return path.read_bytes()


# --- where things stand --------------------------------------------------------


@pytest.mark.parametrize("extra", range(0, 70, 3))
def test_the_payload_starts_at_a_multiple_of_64(tmp_path: Path, extra: int) -> None:
    path = tmp_path / "file.safetensors"
    save_checkpoint({"w": np.zeros(3)}, path, config={"x": "x" * extra})
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    assert (8 + size) % 64 == 0
    assert len(data) == 8 + size + 24
    header = data[8 : 8 + size]
    text = header.rstrip(b" ")
    assert len(header) - len(text) < 64
    assert text.endswith(b"}") and text.isascii()
    assert b" " not in text.split(b'"provenance')[0]


def test_tensors_follow_each_other_larger_items_first(mixed: bytes) -> None:
    _, entries, payload = take_apart(mixed)
    # complex128 is sixteen bytes of U8; zero-size tensors have an item size too
    sizes = [16 if name == "e" else TAG_BYTES[row["dtype"]] for name, row in entries]
    assert sizes == sorted(sizes, reverse=True)
    assert [name for name, _ in entries] == list("ebijfdkacgh")
    position = 0
    for (name, row), size in zip(entries, sizes, strict=True):
        begin, end = row["data_offsets"]
        count = int(np.prod(row["shape"], dtype=int)) // (16 if name == "e" else 1)
        assert begin == position, name
        assert end - begin == count * size, name
        assert begin % size == 0, name
        position = end
    assert position == len(payload)


def test_the_payload_is_the_elements_little_endian_in_c_order(tmp_path: Path) -> None:
    state = {
        "big": np.asarray([[1, 2], [3, 4]], ">i4"),
        "fortran": np.asfortranarray(np.asarray([[1, 2], [3, 4]], np.uint16)),
        "strided": np.arange(10, dtype=np.float64)[::-3],
        "text": "\u00e9",
        "z": np.asarray([1 - 2j], ">c16"),
    }
    path = tmp_path / "file.safetensors"
    save_checkpoint(state, path)
    _, entries, payload = take_apart(path.read_bytes())
    expected = {
        "z": struct.pack("<2d", 1, -2),
        "strided": struct.pack("<4d", 9, 6, 3, 0),
        "big": struct.pack("<4i", 1, 2, 3, 4),
        "fortran": struct.pack("<4H", 1, 2, 3, 4),
        "text": b"\xc3\xa9",
    }
    assert [name for name, _ in entries] == list(expected)
    assert payload == b"".join(expected.values())


@pytest.mark.parametrize(
    ("dtype", "raw", "stored"),
    [
        ("int4", b"\xff\x1f\x07", b"\x0f\x0f\x07"),
        ("uint2", b"\xff\x04\x03", b"\x03\x00\x03"),
        ("float6_e2m3fn", b"\xff\x40\x3f", b"\x3f\x00\x3f"),
        ("bool", b"\xff\x02\x00", b"\x01\x01\x00"),
    ],
)
def test_bits_that_mean_nothing_are_written_as_zeros(
    tmp_path: Path, dtype: str, raw: bytes, stored: bytes
) -> None:
    """Equal arrays give equal bytes, whatever memory they lay in."""
    scalar = getattr(ml_dtypes, dtype, None) or np.dtype(dtype)
    state = {"w": np.frombuffer(raw, np.uint8).view(scalar)}
    save_checkpoint(state, tmp_path / "file.safetensors")
    assert take_apart((tmp_path / "file.safetensors").read_bytes())[2] == stored
    assert verify_checkpoint(tmp_path / "file.safetensors").leaves == 1


def write(tmp_path: Path, state: StateData, metadata: Metadata) -> bytes:
    path = tmp_path / "by-hand.safetensors"
    write_checkpoint(str(path), state, metadata)
    return path.read_bytes()


def test_a_tiny_file_byte_for_byte(tmp_path: Path) -> None:
    """Written out here in full, so that no change of spelling goes unseen."""
    state = StateData(
        layout={
            "n": LeafSpec(kind="int"),
            "q": LeafSpec(kind="numpy", dtype="int4", shape=(3,)),
            "w": LeafSpec(kind="jax", dtype="float32", shape=(1, 2)),
            "s": LeafSpec(kind="jax", dtype="int32", weak_type=True),
            "k": LeafSpec(
                kind="key", dtype="uint32", key_impl="threefry2x32", key_words=2
            ),
            "t": LeafSpec(kind="str", length=2),
        },
        values={"n": "-0x1f"},
        sources={
            "q": lambda: b"\x0f\x00\x07",
            "w": lambda: struct.pack("<2f", 1.0, -2.0),
            "s": lambda: struct.pack("<i", -5),
            "k": lambda: struct.pack("<2I", 7, 2**32 - 1),
            "t": lambda: b"hi",
        },
    )
    metadata = Metadata(
        checkpoint_id="c" * 32,
        step=7,
        metrics={"return": -0.5},
        config={"\u00e9": [1, None]},
        excluded=("replay.**",),
    )
    payloads = [
        b"\x00\x00\x80\x3f\x00\x00\x00\xc0",
        b"\xfb\xff\xff\xff",
        b"\x07\x00\x00\x00\xff\xff\xff\xff",
        b"\x0f\x00\x07",
        b"hi",
    ]
    meta = (
        r"{\"leaves\":[{\"name\":\"n\",\"kind\":\"int\",\"value\":\"-0x1f\"},"
        r"{\"tensor\":3,\"kind\":\"numpy\",\"dtype\":\"int4\"},0,"
        r"{\"tensor\":1,\"weak_type\":true},"
        r"{\"tensor\":2,\"kind\":\"key\",\"impl\":\"threefry2x32\"},"
        r"{\"tensor\":4,\"kind\":\"str\"}],"
        r"\"checkpoint_id\":\"cccccccccccccccccccccccccccccccc\","
        r"\"run_id\":null,\"parent_id\":null,\"step\":7,"
        r"\"metrics\":{\"return\":-0.5},\"config\":{\"\\u00e9\":[1,null]},"
        r"\"excluded\":[\"replay.**\"],\"layouts\":{},\"provenance\":{}}"
    )
    digests = "".join(map(xxhash.xxh3_128_hexdigest, payloads))
    text = (
        '{"__metadata__":{"ajaxckpt":"1","ajaxckpt.digest":"' + "0" * 32 + '",'
        '"ajaxckpt.leaves":"' + digests + '","ajaxckpt.meta":"' + meta + '"},'
        '"w":{"dtype":"F32","shape":[1,2],"data_offsets":[0,8]},'
        '"s":{"dtype":"I32","shape":[],"data_offsets":[8,12]},'
        '"k":{"dtype":"U32","shape":[2],"data_offsets":[12,20]},'
        '"q":{"dtype":"U8","shape":[3],"data_offsets":[20,23]},'
        '"t":{"dtype":"U8","shape":[2],"data_offsets":[23,25]}}'
    )
    length = -(-(8 + len(text)) // 64) * 64 - 8
    header = struct.pack("<Q", length) + text.ljust(length).encode("ascii")
    own = xxhash.xxh3_128_hexdigest(header).encode()
    expected = header.replace(b"0" * 32, own, 1) + b"".join(payloads)
    assert write(tmp_path, state, metadata) == expected


# --- digests -------------------------------------------------------------------


def test_the_digests_are_those_of_the_bytes(mixed: bytes) -> None:
    metadata, entries, payload = take_apart(mixed)
    assert list(metadata) == [
        "ajaxckpt",
        "ajaxckpt.digest",
        "ajaxckpt.leaves",
        "ajaxckpt.meta",
    ]
    leaves = metadata["ajaxckpt.leaves"]
    assert len(leaves) == 32 * len(entries)
    for i, (name, row) in enumerate(entries):
        begin, end = row["data_offsets"]
        found = xxhash.xxh3_128_hexdigest(payload[begin:end])
        assert leaves[32 * i : 32 * i + 32] == found, name
    own = metadata["ajaxckpt.digest"].encode()
    header = mixed[: len(mixed) - len(payload)]
    assert header.count(own) == 1
    assert xxhash.xxh3_128_hexdigest(header.replace(own, b"0" * 32)).encode() == own


def test_nothing_but_ids_and_time_differs_between_two_saves(tmp_path: Path) -> None:
    first, second = tmp_path / "1.safetensors", tmp_path / "2.safetensors"
    for path in (first, second):
        save_checkpoint(mixed_state(), path, step=3)
    with open_checkpoint(first) as a, open_checkpoint(second) as b:
        assert a.digest == b.digest
        assert list(a.layout.items()) == list(b.layout.items())
        assert a.checkpoint_id != b.checkpoint_id
    assert take_apart(first.read_bytes())[1:] == take_apart(second.read_bytes())[1:]


# --- limits --------------------------------------------------------------------


def refusal(folder: Path, state: Mapping[str, Any], config: Any = None) -> str:
    """Return why a save is refused; nothing may have been written."""
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(InvalidArgumentError) as caught:
        save_checkpoint(state, folder / "file.safetensors", config=config)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert str(caught.value).splitlines()[-1].startswith("To mend: ")
    return caught.value.problem


def test_a_header_over_the_limit_is_refused_before_anything_is_written(
    tmp_path: Path,
) -> None:
    state = {"w": np.zeros(3)}
    problem = refusal(tmp_path, state, {"text": "x" * 33 * MIB})
    assert problem.startswith("the header has 346")
    assert problem.endswith("bytes, the limit is 33554432")
    save_checkpoint(state, tmp_path / "file.safetensors", config={"text": "x"})
    refusal(tmp_path, state, {"text": "\x00" * 5 * MIB})
    assert verify_checkpoint(tmp_path / "file.safetensors").leaves == 1


@pytest.mark.parametrize(
    ("config", "what"),
    [
        ({"lists": [[]] * 200_000}, "[ and {"),
        ({"objects": [{}] * 200_000}, "[ and {"),
        ({"numbers": [1] * 400_000}, ", and :"),
        ({f"{i:x}": 0 for i in range(200_000)}, ", and :"),
    ],
    ids=["lists", "objects", "numbers", "keys"],
)
def test_a_config_of_too_many_parts_is_refused_before_anything_is_written(
    tmp_path: Path, config: dict[str, Any], what: str
) -> None:
    """A parser needs far more memory for such a text than for the text itself."""
    problem = refusal(tmp_path, {"w": np.zeros(3)}, config)
    assert problem.startswith("the metadata holds ")
    assert f" {what}, the limit is " in problem


def test_a_large_config_within_the_limits_comes_back(tmp_path: Path) -> None:
    config = {"sizes": list(range(20_000)), "text": "x" * MIB}
    save_checkpoint({"w": np.zeros(3)}, tmp_path / "file.safetensors", config=config)
    with open_checkpoint(tmp_path / "file.safetensors") as checkpoint:
        assert checkpoint.config == config


@pytest.mark.parametrize("dtype", ["uint8", "complex128", "int4"])
def test_arrays_of_64_axes_come_back(tmp_path: Path, dtype: str) -> None:
    scalar = getattr(ml_dtypes, dtype, None) or np.dtype(dtype)
    state = {"w": np.ones((1,) * 64, scalar)}
    save_checkpoint(state, tmp_path / "file.safetensors")
    with open_checkpoint(tmp_path / "file.safetensors") as checkpoint:
        assert checkpoint["w"].shape == (1,) * 64
        assert checkpoint["w"].tobytes() == state["w"].tobytes()


def test_ten_thousand_leaves_come_back_in_order(tmp_path: Path) -> None:
    state = {f"leaf{i:05d}": np.asarray([i], np.int32) for i in range(10_000)}
    save_checkpoint(state, tmp_path / "file.safetensors")
    with open_checkpoint(tmp_path / "file.safetensors") as checkpoint:
        assert list(checkpoint) == list(state)
        assert checkpoint["leaf07777"].tolist() == [7777]
    assert verify_checkpoint(tmp_path / "file.safetensors").leaves == 10_000


# --- while it is written -------------------------------------------------------


def one_leaf(source: Any) -> StateData:
    layout = {"w": LeafSpec(kind="jax", dtype="uint8", shape=(3 * MIB,))}
    return StateData(layout=layout, values={}, sources={"w": source})


def test_an_unfinished_file_begins_with_zeros_and_is_no_checkpoint(
    tmp_path: Path,
) -> None:
    """Length and header go out last, once the payload has."""
    path = str(tmp_path / "file.safetensors")
    metadata = Metadata(checkpoint_id="0" * 32)
    seen: list[bytes] = []

    def look_at_the_temp() -> bytes:
        (temp,) = tmp_path.glob(".ajaxckpt-*.tmp")
        seen.append(temp.read_bytes())
        return b"x" * (3 * MIB)

    state = StateData(
        layout={
            "a": LeafSpec(kind="jax", dtype="uint8", shape=(3 * MIB,)),
            "b": LeafSpec(kind="jax", dtype="uint8", shape=(3 * MIB,)),
        },
        values={},
        sources={"a": look_at_the_temp, "b": look_at_the_temp},
    )
    write_checkpoint(path, state, metadata)
    empty, halfway = seen
    assert empty == b""
    whole = Path(path).read_bytes()
    start = 8 + int.from_bytes(whole[:8], "little")
    assert halfway == bytes(start) + b"x" * (3 * MIB)
    copy = tmp_path / "copy.safetensors"
    copy.write_bytes(halfway)
    with pytest.raises(CheckpointError, match="begins with zeros: an unfinished write"):
        checkpoint_exists(copy)
    assert verify_checkpoint(path).leaves == 2


def test_a_source_that_fails_midway_leaves_the_old_file_and_no_temp(
    tmp_path: Path,
) -> None:
    path = tmp_path / "file.safetensors"
    save_checkpoint({"w": np.arange(3)}, path)
    before = path.read_bytes()

    def fail() -> bytes:
        raise RuntimeError("the device is gone")

    with pytest.raises(RuntimeError, match="the device is gone"):
        write_checkpoint(str(path), one_leaf(fail), Metadata(checkpoint_id="0" * 32))
    assert os.listdir(tmp_path) == [path.name]
    assert path.read_bytes() == before


def test_what_a_killed_writer_leaves_never_reads_as_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the process died before it could remove its temp."""

    def write(sink: Sink) -> None:
        sink.skip(512)
        sink.write(b"payload" * 1000)
        sink.flush()
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "unlink", lambda path: None)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(str(tmp_path / "file.safetensors"), write, is_ours)
    (temp,) = tmp_path.iterdir()
    assert temp.read_bytes()[:512] == bytes(512)
    with pytest.raises(CheckpointError, match="begins with zeros: an unfinished write"):
        open_checkpoint(temp)


def test_a_note_that_mentions_ajaxckpt_is_never_replaced(tmp_path: Path) -> None:
    path = tmp_path / "note.txt"
    path.write_text('12345678{"ajaxckpt": "a note about ajaxckpt"}' * 9)
    before = path.read_bytes()
    with pytest.raises(NotACheckpointError, match="that ajaxckpt did not write"):
        save_checkpoint({"w": np.zeros(3)}, path)
    assert path.read_bytes() == before
