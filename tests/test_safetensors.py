"""The safetensors package opens every file: names, dtypes, shapes and bytes."""

from __future__ import annotations

import enum
import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.flax
import safetensors.numpy

from ajaxckpt import open_checkpoint, save_checkpoint

# dtype: the tag that safetensors readers see
TAGS = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "complex128": "U8",
    "float8_e4m3": "U8",
    "float8_e3m4": "U8",
    "float8_e4m3b11fnuz": "U8",
    "int1": "U8",
    "uint1": "U8",
    "int2": "U8",
    "uint2": "U8",
    "int4": "U8",
    "uint4": "U8",
    "float4_e2m1fn": "U8",
    "float6_e2m3fn": "U8",
    "float6_e3m2fn": "U8",
}
BITS = {"int1": 1, "uint1": 1, "int2": 2, "uint2": 2, "int4": 4, "uint4": 4}
BITS |= {"float4_e2m1fn": 4, "float6_e2m3fn": 6, "float6_e3m2fn": 6}
# dtypes that numpy has of its own, and so the package's numpy front end
NUMPY = [name for name, tag in TAGS.items() if not tag.startswith("F8_")]
# what a jax of any release puts on a device without the x64 flag
JAX = [n for n in TAGS if "64" not in n and "128" not in n and "float6" not in n]
JAX = [name for name in JAX if name not in ("uint1", "int1")] + ["complex64"]


class Color(enum.Enum):
    RED = 1


def make_array(name: str, shape: tuple[int, ...] = (2, 3)) -> np.ndarray[Any, Any]:
    """Return every kind of value a dtype has: both signs, zero, fractions."""
    dtype = np.dtype(getattr(ml_dtypes, name, None) or name)
    values = np.resize(np.asarray([0.0, 1.0, -2.0, 0.5, 3.0, -1.0]), shape)
    if name == "float8_e8m0fnu":
        values = np.exp2(values)
    if name.startswith(("int", "uint", "bool")):
        bits = BITS.get(name, dtype.itemsize * 8)
        low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        low, high = (low, high) if name.startswith("int") else (0, 2**bits - 1)
        if name == "bool":
            low, high = 0, 1
        numbers = np.resize(np.asarray([low, high, 0, high // 2], object), shape)
        # through int64 where that is wide enough: ml_dtypes takes no objects
        return (numbers if bits == 64 else numbers.astype(np.int64)).astype(dtype)
    if name.startswith("complex"):
        return (values + 1j * values[::-1]).astype(dtype)
    return values.astype(dtype)


def stored_bytes(array: np.ndarray[Any, Any]) -> bytes:
    """Return what should stand in the file, as numpy and ml_dtypes encode it."""
    raw = np.frombuffer(array.tobytes(), np.uint8)
    bits = BITS.get(array.dtype.name, 8)
    return (raw & ((1 << bits) - 1)).tobytes()


def read_raw(path: Path) -> dict[str, dict[str, Any]]:
    """Read a file as any language's reader would."""
    return dict(safetensors.deserialize(path.read_bytes()))


def save(tmp_path: Path, state: Any, **options: Any) -> Path:
    path = tmp_path / "state.safetensors"
    save_checkpoint(state, path, **options)
    return path


@pytest.mark.parametrize("library", ["numpy", "jax"])
def test_every_dtype_reads_with_its_name_tag_shape_and_bytes(
    tmp_path: Path, library: str
) -> None:
    names = list(TAGS) if library == "numpy" else JAX
    arrays = {name: make_array(name) for name in names}
    state: dict[str, Any] = dict(arrays)
    if library == "jax":
        state = {name: jax.device_put(array) for name, array in arrays.items()}
    found = read_raw(save(tmp_path, state))
    assert sorted(found) == sorted(names)
    for name, array in arrays.items():
        trailing = [16] if name == "complex128" else []
        assert found[name]["dtype"] == TAGS[name], name
        assert list(found[name]["shape"]) == [2, 3, *trailing], name
        assert bytes(found[name]["data"]) == stored_bytes(array), name


def test_the_numpy_front_end_reads_the_values(tmp_path: Path) -> None:
    arrays = {name: make_array(name) for name in NUMPY}
    path = save(tmp_path, arrays)
    loaded = safetensors.numpy.load_file(path)
    assert sorted(loaded) == sorted(arrays)
    for name, array in arrays.items():
        found = loaded[name]
        if TAGS[name] == "U8" and name != "uint8":
            assert found.dtype == np.uint8
            assert found.tobytes() == stored_bytes(array), name
            if name == "complex128":
                np.testing.assert_array_equal(found.view("<c16")[..., 0], array)
            continue
        assert found.dtype == array.dtype, name
        np.testing.assert_array_equal(found, array)
    with safetensors.safe_open(path, "numpy") as file:
        assert sorted(file.keys()) == sorted(arrays)
        np.testing.assert_array_equal(file.get_tensor("float32"), arrays["float32"])
        np.testing.assert_array_equal(
            file.get_slice("int32")[1:, :2], arrays["int32"][1:, :2]
        )


def test_the_flax_front_end_reads_an_agent(tmp_path: Path) -> None:
    state = {
        "actor": {"kernel": jnp.arange(6, dtype=jnp.float32).reshape(2, 3)},
        "opt": (jnp.asarray([1, 2], jnp.bfloat16), jnp.int32(4)),
    }
    loaded = safetensors.flax.load_file(save(tmp_path, state))
    assert loaded["actor.kernel"].dtype == jnp.float32
    np.testing.assert_array_equal(loaded["actor.kernel"], state["actor"]["kernel"])
    assert loaded["opt.0"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(loaded["opt.0"], state["opt"][0])
    assert int(loaded["opt.1"]) == 4


def test_every_kind_of_leaf_reads_as_its_bytes_or_stands_in_the_metadata(
    tmp_path: Path,
) -> None:
    words = np.arange(8, dtype=np.uint32)
    state = {
        "threefry": jax.random.wrap_key_data(words[:2], impl="threefry2x32"),
        "rbg": jax.random.wrap_key_data(words.reshape(2, 4), impl="rbg"),
        "unsafe": jax.random.wrap_key_data(words[4:], impl="unsafe_rbg"),
        "raw": jnp.asarray(words[:2]),
        "weak": jnp.asarray(2),
        "array": np.arange(3),
        "scalar": np.float16(0.5),
        "empty": jnp.zeros((0, 3)),
        "text": "h\u00e9\ud800",
        "no text": "",
        "bytes": b"\x00\xff",
        "true": True,
        "int": -(10**40),
        "float": math.nan,
        "complex": 1 - 2j,
        "color": Color.RED,
        "function": jnp.tanh,
    }
    path = save(tmp_path, state)
    expected = {
        "threefry": ("U32", [2], words[:2].tobytes()),
        "rbg": ("U32", [2, 4], words.tobytes()),
        "unsafe": ("U32", [4], words[4:].tobytes()),
        "raw": ("U32", [2], words[:2].tobytes()),
        "weak": ("I32", [], b"\x02\0\0\0"),
        "array": ("I64", [3], np.arange(3, dtype="<i8").tobytes()),
        "scalar": ("F16", [], b"\x00\x38"),
        "empty": ("F32", [0, 3], b""),
        "text": ("U8", [6], b"h\xc3\xa9\xed\xa0\x80"),
        '"no text"': ("U8", [0], b""),
        "bytes": ("U8", [2], b"\x00\xff"),
    }
    found = {
        name: (row["dtype"], list(row["shape"]), bytes(row["data"]))
        for name, row in read_raw(path).items()
    }
    assert found == expected
    with safetensors.safe_open(path, "numpy") as file:
        leaves = json.loads(file.metadata()["ajaxckpt.meta"])["leaves"]
    named = {
        leaf["name"] for leaf in leaves if isinstance(leaf, dict) and "name" in leaf
    }
    assert named == {"true", "int", "float", "complex", "color", "function"}


EXOTIC = [
    "plain",
    "a.b",
    "a b",
    '"',
    "\\",
    'quote"and\\slash',
    "",
    "0",
    "-1",
    "\0",
    "line\nbreak\ttab",
    "\u00e9\u4e2d\u6587",
    "\U0001f600",
    "\ud800",
    "\u202e\ufeff",
    "__metadata__",
    "a*[?]{1}<x>,y",
    "mlp/~/linear_0",
    "../../etc/passwd",
    "x" * 5_000,
]


def test_exotic_names_read_as_the_layout_has_them(tmp_path: Path) -> None:
    state = {key: np.int32(i) for i, key in enumerate(EXOTIC)}
    path = save(tmp_path, {"deep": {1: state}})
    found = read_raw(path)
    with open_checkpoint(path) as checkpoint:
        assert sorted(found) == sorted(checkpoint)
        assert len(found) == len(EXOTIC)
        for name, row in found.items():
            assert bytes(row["data"]) == checkpoint[name].tobytes()
    # 0 … n - 1, each once: no name hides another
    numbers = sorted(int.from_bytes(row["data"], "little") for row in found.values())
    assert numbers == list(range(len(EXOTIC)))
    assert found["deep.1.plain"]["data"] == b"\0\0\0\0"
    assert found['deep.1."a.b"']["data"] == b"\x01\0\0\0"
    assert found['deep.1."\\ud800"']["data"] == b"\x0d\0\0\0"
    loaded = safetensors.numpy.load_file(path)
    assert int(loaded['deep.1."__metadata__"']) == 15


def test_a_state_that_is_one_leaf_reads_under_the_empty_name(tmp_path: Path) -> None:
    found = read_raw(save(tmp_path, jnp.arange(3, dtype=jnp.int8)))
    assert list(found) == [""]
    assert bytes(found[""]["data"]) == b"\x00\x01\x02"


def test_a_state_without_arrays_reads_as_no_tensors(tmp_path: Path) -> None:
    assert read_raw(save(tmp_path, {})) == {}
    assert read_raw(save(tmp_path, {"n": 3, "none": None})) == {}


def test_the_metadata_can_be_read_without_ajaxckpt(tmp_path: Path) -> None:
    config = {"lr": 3e-4, "name": "h\u00e9\U0001f600", "sizes": [64, 64]}
    path = save(
        tmp_path,
        {"w": np.zeros(2), "buffer": np.zeros(9)},
        step=np.asarray([5, 5]),
        metrics={"return": np.float32(-0.5)},
        config=config,
        exclude="buffer",
    )
    with safetensors.safe_open(path, "numpy") as file:
        assert list(file.keys()) == ["w"]
        metadata = file.metadata()
    assert metadata["ajaxckpt"] == "1"
    facts = json.loads(metadata["ajaxckpt.meta"])
    assert facts["step"] == 5
    assert facts["metrics"] == {"return": -0.5}
    assert facts["config"] == config
    assert facts["excluded"] == ["buffer"]
    assert facts["provenance"]["numpy"] == np.__version__
    assert facts["provenance"]["jax"] == jax.__version__


def test_a_large_state_of_mixed_dtypes_reads_whole(tmp_path: Path) -> None:
    """Tensors of several chunks, their item sizes in no order."""
    rng = np.random.default_rng(3)
    state = {
        f"x{i}": rng.integers(0, 256, size, np.uint8).view(dtype)
        for i, (size, dtype) in enumerate(
            [(3_000_000, "u1"), (2_400_000, "<f8"), (8, "<i2"), (1_200_004, "<f4")]
        )
    }
    found = read_raw(save(tmp_path, state))
    for name, array in state.items():
        assert bytes(found[name]["data"]) == array.tobytes()
