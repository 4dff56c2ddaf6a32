"""Write the golden files: ``python tests/make_goldens.py``.

One folder per format version. A golden is never changed: it is what a user's old
file looks like, and it loads for ever. So this writes what is missing and refuses
the rest; ``--replace`` is for a format version that no release has written yet.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import math
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from ajaxckpt._collecting import collect_state
from ajaxckpt._metadata import Metadata
from ajaxckpt._writer import write_checkpoint

FOLDER = Path(__file__).parent / "goldens" / "v1"

FLOATS = (
    *("float16", "bfloat16", "float32"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e4m3b11fnuz", "float8_e4m3"),
    *("float8_e3m4", "float8_e5m2", "float8_e5m2fnuz", "float4_e2m1fn"),
)
INTS = ("int8", "int16", "int32", "int4", "int2")
UINTS = ("uint8", "uint16", "uint32", "uint4", "uint2")
# no release of jax builds these everywhere, or only with the x64 flag
HOST_FLOATS = ("float64", "float6_e2m3fn", "float6_e3m2fn")


class Color(enum.Enum):
    RED = 1
    GREEN = 2


def _host(values: Any, dtype: str) -> np.ndarray[Any, Any]:
    return np.asarray(values, getattr(ml_dtypes, dtype, None) or np.dtype(dtype))


def dtypes_state() -> dict[str, Any]:
    """Return a leaf of every dtype."""
    return {
        "jax": {
            **{name: jax.device_put(_host([1, -2, 0.5], name)) for name in FLOATS},
            **{name: jax.device_put(_host([1, -2, 0], name)) for name in INTS},
            **{name: jax.device_put(_host([1, 2, 3], name)) for name in UINTS},
            "float8_e8m0fnu": jax.device_put(_host([1, 2, 0.5], "float8_e8m0fnu")),
            "bool": jnp.asarray([True, False, True]),
            "complex64": jnp.asarray([1 - 2j], jnp.complex64),
        },
        "numpy": {
            **{name: _host([1, -2, 0.5], name) for name in HOST_FLOATS},
            "int64": np.asarray([1, -2, 2**62], np.int64),
            "uint64": np.asarray([1, 2, 2**64 - 1], np.uint64),
            "complex128": np.asarray([[1 - 2j], [0.5j]]),
            "big_endian": np.asarray([1, -2], ">i2"),
        },
    }


def newest_dtypes_state() -> dict[str, Any]:
    """Return a leaf of every dtype that only a newer ml_dtypes has."""
    return {
        "bcomplex32": _host([1 - 2j], "bcomplex32"),
        "complex32": _host([1 - 2j], "complex32"),
        "int1": _host([0, -1], "int1"),
        "uint1": _host([0, 1], "uint1"),
    }


def kinds_state() -> dict[str, Any]:
    """Return a leaf of every kind, of every size, under every sort of name."""
    words = np.arange(8, dtype=np.uint32)
    wrap = jax.random.wrap_key_data
    nan = np.asarray([0x7FC00001, 0xFF800002, 0x80000000], np.uint32)
    return {
        "keys": {
            "threefry": wrap(words[:2], impl="threefry2x32"),
            "threefry_batch": wrap(words.reshape(2, 2, 2), impl="threefry2x32"),
            "rbg": wrap(words[:4], impl="rbg"),
            "unsafe_rbg": wrap(words.reshape(1, 2, 4), impl="unsafe_rbg"),
            "raw": jnp.asarray(words[:2]),
        },
        "python": {
            "true": True,
            "false": False,
            "zero": 0,
            "small": -31,
            "large": 2**100 + 1,
            "float": 0.1,
            "minus_zero": -0.0,
            "infinity": math.inf,
            "complex": complex(1.5, -0.0),
            "text": "h\u00e9\U0001f600\ud800",
            "no_text": "",
            "bytes": b"\x00\xff",
            "color": Color.GREEN,
            "function": math.sqrt,
        },
        "weak": {
            "int": jnp.asarray(3),
            "float": jnp.asarray(0.5),
            "vector": jnp.full((2,), 2.0),
        },
        "numpy": {
            "array": np.arange(6, dtype=np.int32).reshape(2, 3),
            "fortran": np.asfortranarray(np.arange(6, dtype=np.int32).reshape(2, 3)),
            "scalar": np.float32(1.5),
            "zero_d": np.asarray(7, np.int64),
        },
        "sizes": {
            "zero_d": jnp.float32(2.5),
            "empty": jnp.zeros((0, 4), jnp.float32),
            "empty_text": jnp.zeros((3, 0), jnp.int8),
            "deep": jnp.zeros((1, 1, 1, 2, 1), jnp.int8),
            "nan_bits": jnp.asarray(nan.view(np.float32)),
        },
        "names": {
            "mlp/~/linear_0": jnp.int8(1),
            "a.b": jnp.int8(2),
            "0": jnp.int8(3),
            "": jnp.int8(4),
            'quo"te\\': jnp.int8(5),
            "new\nline": jnp.int8(6),
            "__metadata__": jnp.int8(7),
            "\u00e9\u2713": jnp.int8(8),
            "blank here": jnp.int8(9),
            "list": [jnp.int8(10), (jnp.int8(11), {"x": jnp.int8(12)})],
            "typed": {(1, "a"): jnp.int8(13)},
            "flags": {True: jnp.int8(14)},
            "negative": {-3: jnp.int8(15)},
        },
    }


def run_state() -> dict[str, Any]:
    """Return a small agent, part of which is left out."""
    return {
        "actor": {"kernel": jnp.arange(6, dtype=jnp.float32).reshape(2, 3)},
        "replay": {"observations": jnp.zeros((4, 2))},
        "step": jnp.int32(400),
    }


PLAIN = Metadata(checkpoint_id="00000000000000000000000000000001")
RUN = Metadata(
    checkpoint_id="00000000000000000000000000000002",
    run_id="run-7",
    parent_id="00000000000000000000000000000001",
    step=400,
    metrics={
        "return": -123.25,
        "episodes": 10,
        "loss": {"__float__": "nan"},  # type: ignore[dict-item]
        "unknown": None,
    },
    config={
        "layers": [64, 64],
        "activation": "tanh",
        "learning_rate": 3e-4,
        "nested": {"on": True, "none": None, "limit": {"__float__": "inf"}},
        "text": "\u00e9\U0001f600",
        "large": 2**70,
    },
    excluded=("replay",),
    layouts={"agent": 3},
    provenance={
        "time": "2026-01-02T03:04:05+00:00",
        "python": "3.11.0",
        "ajaxckpt": "0.1.0",
        "git_commit": "0123456789abcdef0123456789abcdef01234567",
        "git_dirty": False,
    },
)


def encode_state(state: Any, metadata: Metadata) -> bytes:
    """Return the file of a state, without what differs from save to save."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder).resolve() / "golden.safetensors")
        write_checkpoint(path, collect_state(state, metadata.excluded), metadata)
        return Path(path).read_bytes()


def _changed(data: bytes, position: int, bits: int) -> bytes:
    return data[:position] + bytes((data[position] ^ bits,)) + data[position + 1 :]


def _foreign() -> bytes:
    header = b'{"w":{"dtype":"F32","shape":[32],"data_offsets":[0,128]}}'.ljust(120)
    return len(header).to_bytes(8, "little") + header + bytes(128)


def _newer(data: bytes) -> bytes:
    """Return the file as a later format version would begin it."""
    from fuzz_headers import seal

    start = 8 + int.from_bytes(data[:8], "little")
    later = data[:start].replace(b'"ajaxckpt":"1"', b'"ajaxckpt":"2"')
    return seal(later) + data[start:]


def make_goldens() -> Mapping[str, bytes]:
    """Return the bytes of every golden of this format version by file name."""
    run = encode_state(run_state(), RUN)
    start = 8 + int.from_bytes(run[:8], "little")
    files = {
        "dtypes": encode_state(dtypes_state(), PLAIN),
        "kinds": encode_state(kinds_state(), PLAIN),
        "run": run,
        "lone-leaf": encode_state(jnp.arange(3, dtype=jnp.int16), PLAIN),
        "no-leaves": encode_state({}, dataclasses.replace(PLAIN, step=0)),
        "damaged-length": _changed(run, 3, 1),
        "damaged-first-bytes": _changed(run, 12, 1),
        "damaged-header": _changed(run, start - 70, 1),
        "damaged-payload": _changed(run, start + 9, 16),
        "truncated-header": run[: start - 1],
        "truncated-payload": run[:-1],
        "appended": run + b"\n",
        "unfinished": bytes(start) + run[start:],
        "empty": b"",
        "newer-format": _newer(run),
        "not-a-checkpoint": _foreign(),
    }
    if hasattr(ml_dtypes, "complex32"):
        files["newest-dtypes"] = encode_state(newest_dtypes_state(), PLAIN)
    return {f"{name}.safetensors": data for name, data in files.items()}


def write_goldens(
    folder: Path, *, replace: bool = False
) -> tuple[list[str], list[str]]:
    """Write the goldens that are missing.

    Returns:
        The names written, and the names left alone although their bytes differ.
    """
    written: list[str] = []
    differ: list[str] = []
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in make_goldens().items():
        path = folder / name
        if path.exists() and path.read_bytes() == data:
            continue
        if path.exists() and not replace:
            differ.append(name)
            continue
        path.write_bytes(data)
        written.append(name)
    return written, differ


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--replace", action="store_true", help="before a release only")
    options = parser.parse_args()
    written, differ = write_goldens(options.folder, replace=options.replace)
    print(f"wrote {len(written)} files", *written, sep="\n  ")
    if differ:
        print("left alone, though today's bytes differ:", *differ, sep="\n  ")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
