"""Files of every format version load for ever; the expected contents are by hand."""

from __future__ import annotations

import json
import math
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import make_goldens
import ml_dtypes
import numpy as np
import pytest
import xxhash

from ajaxckpt import (
    CheckpointError,
    DamagedCheckpointError,
    InvalidArgumentError,
    LayoutMismatchError,
    NewerFormatError,
    NotACheckpointError,
    checkpoint_exists,
    open_checkpoint,
    restore_into,
    state_digest,
    verify_checkpoint,
)

GOLDENS = Path(__file__).parent / "goldens" / "v1"

# leaf name: (spec, payload bytes in hex), or (spec, header value, Python value).
# The floats are 1, -2, 0.5, encoded from sign, exponent and mantissa by hand.
Row = tuple[Any, ...]
DTYPES: dict[str, Row] = {
    "jax.bfloat16": ("bfloat16[3]", "803f 00c0 003f"),
    "jax.bool": ("bool[3]", "01 00 01"),
    "jax.complex64": ("complex64[1]", "0000803f 000000c0"),
    "jax.float16": ("float16[3]", "003c 00c0 0038"),
    "jax.float32": ("float32[3]", "0000803f 000000c0 0000003f"),
    "jax.float4_e2m1fn": ("float4_e2m1fn[3]", "02 0c 01"),
    "jax.float8_e3m4": ("float8_e3m4[3]", "30 c0 20"),
    "jax.float8_e4m3": ("float8_e4m3[3]", "38 c0 30"),
    "jax.float8_e4m3b11fnuz": ("float8_e4m3b11fnuz[3]", "58 e0 50"),
    "jax.float8_e4m3fn": ("float8_e4m3fn[3]", "38 c0 30"),
    "jax.float8_e4m3fnuz": ("float8_e4m3fnuz[3]", "40 c8 38"),
    "jax.float8_e5m2": ("float8_e5m2[3]", "3c c0 38"),
    "jax.float8_e5m2fnuz": ("float8_e5m2fnuz[3]", "40 c4 3c"),
    # no sign and no mantissa: 1, 2, 0.5
    "jax.float8_e8m0fnu": ("float8_e8m0fnu[3]", "7f 80 7e"),
    # 0, -1
    # 1, -2, 0
    "jax.int16": ("int16[3]", "0100 feff 0000"),
    "jax.int2": ("int2[3]", "01 02 00"),
    "jax.int32": ("int32[3]", "01000000 feffffff 00000000"),
    "jax.int4": ("int4[3]", "01 0e 00"),
    "jax.int8": ("int8[3]", "01 fe 00"),
    # 1, 2, 3
    "jax.uint16": ("uint16[3]", "0100 0200 0300"),
    "jax.uint2": ("uint2[3]", "01 02 03"),
    "jax.uint32": ("uint32[3]", "01000000 02000000 03000000"),
    "jax.uint4": ("uint4[3]", "01 02 03"),
    "jax.uint8": ("uint8[3]", "01 02 03"),
    "numpy.big_endian": ("numpy int16[2]", "0100 feff"),
    "numpy.complex128": (
        "numpy complex128[2,1]",
        "000000000000f03f 00000000000000c0 0000000000000000 000000000000e03f",
    ),
    "numpy.float64": (
        "numpy float64[3]",
        "000000000000f03f 00000000000000c0 000000000000e03f",
    ),
    "numpy.float6_e2m3fn": ("numpy float6_e2m3fn[3]", "08 30 04"),
    "numpy.float6_e3m2fn": ("numpy float6_e3m2fn[3]", "0c 30 08"),
    "numpy.int64": (
        "numpy int64[3]",
        "0100000000000000 feffffffffffffff 0000000000000040",
    ),
    "numpy.uint64": (
        "numpy uint64[3]",
        "0100000000000000 0200000000000000 ffffffffffffffff",
    ),
}
_WORDS = [f"{word:02x}000000" for word in range(8)]
_SIX = " ".join(_WORDS[:6])
KINDS: dict[str, Row] = {
    "keys.raw": ("uint32[2]", " ".join(_WORDS[:2])),
    "keys.rbg": ("key<rbg>[]", " ".join(_WORDS[:4])),
    "keys.threefry": ("key<threefry2x32>[]", " ".join(_WORDS[:2])),
    "keys.threefry_batch": ("key<threefry2x32>[2,2]", " ".join(_WORDS)),
    "keys.unsafe_rbg": ("key<unsafe_rbg>[1,2]", " ".join(_WORDS)),
    'names.""': ("int8[]", "04"),
    'names."0"': ("int8[]", "03"),
    'names."__metadata__"': ("int8[]", "07"),
    'names."a.b"': ("int8[]", "02"),
    'names."blank here"': ("int8[]", "09"),
    "names.flags.<bool:True>": ("int8[]", "0e"),
    "names.list.0": ("int8[]", "0a"),
    "names.list.1.0": ("int8[]", "0b"),
    "names.list.1.1.x": ("int8[]", "0c"),
    "names.mlp/~/linear_0": ("int8[]", "01"),
    "names.negative.-3": ("int8[]", "0f"),
    'names."new\\u000aline"': ("int8[]", "06"),
    'names."quo\\"te\\\\"': ("int8[]", "05"),
    "names.typed.<tuple:1,a>": ("int8[]", "0d"),
    "names.\u00e9\u2713": ("int8[]", "08"),
    "numpy.array": ("numpy int32[2,3]", _SIX),
    "numpy.fortran": ("numpy int32[2,3]", _SIX),
    "numpy.scalar": ("numpy float32 scalar", "0000c03f"),
    "numpy.zero_d": ("numpy int64[]", "0700000000000000"),
    "python.bytes": ("Python bytes", "00 ff"),
    "python.color": ("enum member", "GREEN", "GREEN"),
    "python.complex": (
        "Python complex",
        "3ff80000000000008000000000000000",
        complex(1.5, -0.0),
    ),
    "python.false": ("Python bool", False, False),
    "python.float": ("Python float", "3fb999999999999a", 0.1),
    "python.function": ("function", "math.sqrt", "math.sqrt"),
    "python.infinity": ("Python float", "7ff0000000000000", math.inf),
    "python.large": ("Python int", "0x1" + "0" * 24 + "1", 2**100 + 1),
    "python.minus_zero": ("Python float", "8000000000000000", -0.0),
    "python.no_text": ("Python str", ""),
    "python.small": ("Python int", "-0x1f", -31),
    # h, e acute, a face of four bytes, a lone surrogate of three
    "python.text": ("Python str", "68 c3a9 f09f9880 eda080"),
    "python.true": ("Python bool", True, True),
    "python.zero": ("Python int", "0x0", 0),
    "sizes.deep": ("int8[1,1,1,2,1]", "00 00"),
    "sizes.empty": ("float32[0,4]", ""),
    "sizes.empty_text": ("int8[3,0]", ""),
    # a NaN with a payload, a signalling NaN, -0.0
    "sizes.nan_bits": ("float32[3]", "0100c07f 020080ff 00000080"),
    "sizes.zero_d": ("float32[]", "00002040"),
    "weak.float": ("~float32[]", "0000003f"),
    "weak.int": ("~int32[]", "03000000"),
    "weak.vector": ("~float32[2]", "00000040 00000040"),
}
RUN: dict[str, Row] = {
    "actor.kernel": (
        "float32[2,3]",
        "00000000 0000803f 00000040 00004040 00008040 0000a040",
    ),
    "step": ("int32[]", "90010000"),
}
NEWEST: dict[str, Row] = {
    "bcomplex32": ("numpy bcomplex32[1]", "803f00c0"),
    "complex32": ("numpy complex32[1]", "003c00c0"),
    "int1": ("numpy int1[2]", "00 01"),
    "uint1": ("numpy uint1[2]", "00 01"),
}
LONE: dict[str, Row] = {"": ("int16[3]", "0000 0100 0200")}
WHOLE: dict[str, dict[str, Row]] = {
    "dtypes": DTYPES,
    "kinds": KINDS,
    "run": RUN,
    "lone-leaf": LONE,
    "no-leaves": {},
}
STATES = {
    "dtypes": make_goldens.dtypes_state,
    "kinds": make_goldens.kinds_state,
    "run": lambda: {k: v for k, v in make_goldens.run_state().items() if k != "replay"},
    "lone-leaf": lambda: jnp.zeros(3, jnp.int16),
    "no-leaves": dict,
}
_SPEC = re.compile(
    r"(?P<weak>~?)(?P<numpy>numpy )?(?:key<(?P<impl>\w+)>|(?P<dtype>\w+?))"
    r"(?:\[(?P<shape>[\d,]*)\]| scalar)"
)


def golden(name: str) -> Path:
    return GOLDENS / f"{name}.safetensors"


def facts_of(row: Row) -> tuple[str, str, list[int], bool, str]:
    """Return kind, dtype, shape, weak type and implementation from a spec's text."""
    spec: str = row[0]
    if match := _SPEC.fullmatch(spec):
        shape = [int(axis) for axis in (match["shape"] or "").split(",") if axis]
        if match["impl"]:
            return "key", "uint32", shape, False, match["impl"]
        return "array", match["dtype"], shape, bool(match["weak"]), ""
    kind = spec.removeprefix("Python ").removesuffix(" member")
    return kind, "", [], False, ""


def digest_by_hand(table: dict[str, Row]) -> str:
    """Compute the digest of a state from the words of FORMAT.md."""
    hasher = xxhash.xxh3_128()
    for name in sorted(table):
        kind, dtype, shape, weak, impl = facts_of(table[name])
        if kind == "function":
            continue
        content = table[name][1]
        if len(table[name]) == 2:
            content = xxhash.xxh3_128_hexdigest(bytes.fromhex(content))
        line = json.dumps(
            [name, kind, dtype, shape, weak, impl, content], separators=(",", ":")
        )
        hasher.update(line.encode("ascii") + b"\n")
    return hasher.hexdigest()


def same_number(a: Any, b: Any) -> bool:
    """Tell whether two Python values are equal to the sign of a zero."""
    return type(a) is type(b) and repr(a) == repr(b)


@pytest.mark.parametrize("name", WHOLE)
def test_a_golden_opens_and_every_leaf_is_as_written(name: str) -> None:
    table = WHOLE[name]
    with open_checkpoint(golden(name)) as checkpoint:
        assert list(checkpoint) == list(table)
        for leaf, row in table.items():
            found = checkpoint[leaf]
            assert str(checkpoint.layout[leaf]) == row[0]
            if len(row) == 3:
                assert same_number(found, row[2]), leaf
                continue
            payload = bytes.fromhex(row[1])
            if row[0] == "Python str":
                assert found.encode("utf-8", "surrogatepass") == payload
            elif row[0] == "Python bytes":
                assert found == payload
            else:
                kind, dtype, shape, _, _ = facts_of(row)
                assert found.dtype.name == dtype
                assert found.tobytes() == payload, leaf
                words = len(payload) // 4 // math.prod(shape) if kind == "key" else 0
                assert found.shape == (*shape, *([words] if words else []))
        assert checkpoint.digest == digest_by_hand(table)


def test_a_golden_of_newer_dtypes_opens_and_names_what_is_not_here() -> None:
    path = golden("newest-dtypes")
    assert verify_checkpoint(path).digest == digest_by_hand(NEWEST)
    with open_checkpoint(path) as checkpoint:
        for leaf, row in NEWEST.items():
            assert str(checkpoint.layout[leaf]) == row[0]
            if hasattr(ml_dtypes, leaf):
                assert checkpoint[leaf].tobytes() == bytes.fromhex(row[1])
                continue
            with pytest.raises(InvalidArgumentError, match=f"has no dtype {leaf}"):
                checkpoint[leaf]


@pytest.mark.parametrize("name", WHOLE)
def test_a_golden_is_whole(name: str) -> None:
    assert checkpoint_exists(golden(name))
    report = verify_checkpoint(golden(name))
    assert report.leaves == len(WHOLE[name])
    assert report.nbytes == golden(name).stat().st_size
    assert report.digest == digest_by_hand(WHOLE[name])


def blank(leaf: Any) -> Any:
    """Return a leaf of the same kind and another value."""
    if isinstance(leaf, jax.Array):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            words = jnp.full_like(jax.random.key_data(leaf), 77)
            return jax.random.wrap_key_data(words, impl=jax.random.key_impl(leaf))
        return jax.device_put(np.zeros(leaf.shape, leaf.dtype))
    if isinstance(leaf, np.ndarray):
        return np.zeros_like(leaf)
    if isinstance(leaf, np.generic):
        return type(leaf)(0)
    others = {bool: not leaf, int: 99, float: 99.0, complex: 99j, str: "x", bytes: b"x"}
    if type(leaf) is make_goldens.Color:
        return make_goldens.Color.RED
    return others.get(type(leaf), leaf)


@pytest.mark.parametrize("name", WHOLE)
def test_a_golden_restores_into_a_skeleton(name: str) -> None:
    table = WHOLE[name]
    skeleton = jax.tree.map(blank, STATES[name]())
    assert not table or state_digest(skeleton) != digest_by_hand(table)
    state = restore_into(skeleton, golden(name))
    assert jax.tree.structure(state) == jax.tree.structure(skeleton)
    # the digest holds names, dtypes, shapes, weak types and bits
    assert state_digest(state) == digest_by_hand(table)
    for found, like in zip(
        jax.tree.leaves(state), jax.tree.leaves(skeleton), strict=True
    ):
        assert type(found) is type(like)


def test_the_metadata_of_a_golden_is_as_written() -> None:
    with open_checkpoint(golden("run")) as checkpoint:
        assert checkpoint.checkpoint_id == "0" * 31 + "2"
        assert (checkpoint.run_id, checkpoint.parent_id) == ("run-7", "0" * 31 + "1")
        assert checkpoint.step == 400
        metrics = checkpoint.metrics
        assert math.isnan(metrics.pop("loss") or 0.0)
        assert list(metrics.items()) == [
            ("return", -123.25),
            ("episodes", 10),
            ("unknown", None),
        ]
        assert checkpoint.config == {
            "layers": [64, 64],
            "activation": "tanh",
            "learning_rate": 0.0003,
            "nested": {"on": True, "none": None, "limit": math.inf},
            "text": "\u00e9\U0001f600",
            "large": 1180591620717411303424,
        }
        assert checkpoint.excluded == ("replay",)
        assert checkpoint.layouts == {"agent": 3}
        assert checkpoint.provenance == {
            "time": "2026-01-02T03:04:05+00:00",
            "python": "3.11.0",
            "ajaxckpt": "0.1.0",
            "git_commit": "0123456789abcdef0123456789abcdef01234567",
            "git_dirty": False,
        }
    with open_checkpoint(golden("kinds")) as checkpoint:
        assert checkpoint.checkpoint_id == "0" * 31 + "1"
        assert checkpoint.step is checkpoint.config is checkpoint.run_id is None
        assert (checkpoint.metrics, checkpoint.excluded) == ({}, ())
    with open_checkpoint(golden("no-leaves")) as checkpoint:
        assert checkpoint.step == 0


def test_what_a_golden_left_out_is_taken_from_the_skeleton() -> None:
    skeleton = jax.tree.map(blank, make_goldens.run_state())
    with pytest.raises(LayoutMismatchError, match="left out on purpose"):
        restore_into(skeleton, golden("run"))
    state = restore_into(skeleton, golden("run"), keep="replay")
    np.testing.assert_array_equal(state["actor"]["kernel"], [[0, 1, 2], [3, 4, 5]])
    np.testing.assert_array_equal(state["replay"]["observations"], np.zeros((4, 2)))
    assert int(state["step"]) == 400


# --- damaged on purpose --------------------------------------------------------

SIZE = golden("run").stat().st_size
START = 8 + int.from_bytes(golden("run").read_bytes()[:8], "little")
AGAIN = "restore another checkpoint, or copy this one again from where it is whole"
LENGTH = "the length field (bytes 0-7) gives a header of"
REFUSED: dict[str, tuple[type[CheckpointError], str, str]] = {
    "damaged-length": (
        DamagedCheckpointError,
        f"{LENGTH} {START + 2**24} bytes: the file has {SIZE} bytes (truncated?)",
        AGAIN,
    ),
    "damaged-first-bytes": (
        DamagedCheckpointError,
        "the header's first bytes are not as written",
        AGAIN,
    ),
    "damaged-header": (
        DamagedCheckpointError,
        f"the header (bytes 0-{START - 1}) does not match its digest",
        AGAIN,
    ),
    "truncated-header": (
        DamagedCheckpointError,
        f"{LENGTH} {START} bytes: the file has {START - 1} bytes (truncated?)",
        AGAIN,
    ),
    "truncated-payload": (
        DamagedCheckpointError,
        f"truncated: the file has {SIZE - 1} bytes, its header says {SIZE}",
        AGAIN,
    ),
    "appended": (
        DamagedCheckpointError,
        f"bytes appended: the file has {SIZE + 1} bytes, its header says {SIZE}",
        AGAIN,
    ),
    "unfinished": (
        DamagedCheckpointError,
        "begins with zeros: an unfinished write",
        AGAIN,
    ),
    "empty": (DamagedCheckpointError, "the file is empty", AGAIN),
    "newer-format": (
        NewerFormatError,
        "format version 2, this release reads up to 1",
        "pip install --upgrade ajaxckpt",
    ),
    "not-a-checkpoint": (
        NotACheckpointError,
        "ajaxckpt did not write this file",
        "pass the path of a file written by save_checkpoint",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_damaged_golden_raises_its_error(name: str) -> None:
    kind, problem, hint = REFUSED[name]
    path = golden(name)
    acts = {
        open_checkpoint: "cannot open",
        checkpoint_exists: "cannot tell whether a checkpoint exists",
        verify_checkpoint: "cannot verify",
    }
    for call, act in acts.items():
        with pytest.raises(CheckpointError) as caught:
            call(path)
        assert type(caught.value) is kind
        assert str(caught.value) == f"{path}: {act}: {problem}\nTo mend: {hint}"
    with pytest.raises(kind, match=re.escape(problem)):
        restore_into(make_goldens.run_state(), path)


def test_a_golden_with_a_damaged_payload_names_the_leaf() -> None:
    path = golden("damaged-payload")
    line = f"  actor.kernel: bytes {START}-{START + 23} are not those written"
    assert checkpoint_exists(path)
    with open_checkpoint(path) as checkpoint:
        assert checkpoint["step"] == 400
        with pytest.raises(DamagedCheckpointError) as caught:
            checkpoint["actor.kernel"]
    problem = "cannot read: the payload of a leaf is damaged"
    assert str(caught.value) == f"{path}: {problem}\n{line}\nTo mend: {AGAIN}"
    with pytest.raises(DamagedCheckpointError) as caught:
        verify_checkpoint(path)
    problem = "is not whole: 1 of 2 leaves is damaged"
    assert str(caught.value) == f"{path}: {problem}\n{line}\nTo mend: {AGAIN}"


# --- the generator -------------------------------------------------------------


def test_every_golden_is_tested_and_none_is_lost() -> None:
    names = {*WHOLE, *REFUSED, "damaged-payload", "newest-dtypes"}
    assert {path.name for path in GOLDENS.iterdir()} == {
        f"{name}.safetensors" for name in names
    }
    assert sum(path.stat().st_size for path in GOLDENS.iterdir()) < 200 << 10


def test_today_writes_the_goldens_byte_for_byte() -> None:
    """A format that changed without a new number would show here."""
    for name, data in make_goldens.make_goldens().items():
        assert (GOLDENS / name).read_bytes() == data, name


def test_the_generator_changes_no_golden_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "v1"
    shutil.copytree(GOLDENS, folder)
    (folder / "run.safetensors").write_bytes(b"an older one")
    (folder / "kinds.safetensors").unlink()
    monkeypatch.setattr(sys, "argv", ["make_goldens.py", "--folder", str(folder)])
    assert make_goldens.main() == 1
    assert (folder / "run.safetensors").read_bytes() == b"an older one"
    assert (folder / "kinds.safetensors").read_bytes() == golden("kinds").read_bytes()
    assert capsys.readouterr().out == (
        "wrote 1 files\n  kinds.safetensors\n"
        "left alone, though today's bytes differ:\n  run.safetensors\n"
    )


def test_goldens_hold_no_trace_of_the_machine_that_wrote_them() -> None:
    for path in GOLDENS.iterdir():
        data = path.read_bytes()
        for trace in (
            b"/home",
            b"/root",
            b"/tmp",
            bytes(Path.cwd()),
            b"\\\\Users",
            b"http",
        ):
            assert trace not in data, path.name
