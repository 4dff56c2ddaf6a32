"""Where a dtype becomes bytes: the table of dtypes a checkpoint can hold.

Knows numpy and ml_dtypes; knows nothing of leaves, headers or files. The names
are numpy's and JAX's own. Payload bytes are always little-endian; a dtype that
safetensors has no word for is stored as U8 under its true name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredDtype:
    """How one dtype lies in the payload.

    Attributes:
        name: the dtype's own name, such as ``bfloat16``.
        tag: the safetensors dtype of the tensor entry.
        itemsize: bytes per element in the payload.
        trailing: axes the tensor entry appends to the leaf's shape.
        bits: significant bits where an element fills less than its byte, else 0.
        dtype: the numpy dtype, little-endian, or None where this ml_dtypes has
            none.
    """

    name: str
    tag: str
    itemsize: int
    trailing: tuple[int, ...] = ()
    bits: int = 0
    dtype: np.dtype[Any] | None


# name: (safetensors tag, bytes per element)
_TAGGED = {
    "bool": ("BOOL", 1),
    "uint8": ("U8", 1),
    "int8": ("I8", 1),
    "uint16": ("U16", 2),
    "int16": ("I16", 2),
    "uint32": ("U32", 4),
    "int32": ("I32", 4),
    "uint64": ("U64", 8),
    "int64": ("I64", 8),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "float32": ("F32", 4),
    "float64": ("F64", 8),
    "complex64": ("C64", 8),
    "float8_e5m2": ("F8_E5M2", 1),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e8m0fnu": ("F8_E8M0", 1),
    "float8_e4m3fnuz": ("F8_E4M3FNUZ", 1),
    "float8_e5m2fnuz": ("F8_E5M2FNUZ", 1),
}
# safetensors has no word for these; one byte each
_UNTAGGED = ("float8_e4m3", "float8_e3m4", "float8_e4m3b11fnuz")
# nor for these, of several bytes: one more axis of bytes
_BYTES_OF_EACH = {"complex128": 16, "complex32": 4, "bcomplex32": 4}
# less than a byte each: stored one to a byte, the bits above them zero
_SUB_BYTE = {
    "int1": 1,
    "uint1": 1,
    "int2": 2,
    "uint2": 2,
    "int4": 4,
    "uint4": 4,
    "float4_e2m1fn": 4,
    "float6_e2m3fn": 6,
    "float6_e3m2fn": 6,
}


def _find_dtype(name: str) -> np.dtype[Any] | None:
    """Return the little-endian numpy dtype of a name, None where it has none."""
    scalar = getattr(ml_dtypes, name, None)
    if scalar is not None:
        return np.dtype(scalar)
    try:
        return np.dtype(name).newbyteorder("<")
    except TypeError:
        return None


def _build_table() -> dict[str, StoredDtype]:
    rows = [
        StoredDtype(name=name, tag=tag, itemsize=size, dtype=_find_dtype(name))
        for name, (tag, size) in _TAGGED.items()
    ]
    rows += [
        StoredDtype(name=name, tag="U8", itemsize=1, dtype=_find_dtype(name))
        for name in _UNTAGGED
    ]
    rows += [
        StoredDtype(name=name, tag="U8", itemsize=1, bits=bits, dtype=_find_dtype(name))
        for name, bits in _SUB_BYTE.items()
    ]
    rows += [
        StoredDtype(
            name=name,
            tag="U8",
            itemsize=size,
            trailing=(size,),
            dtype=_find_dtype(name),
        )
        for name, size in _BYTES_OF_EACH.items()
    ]
    return {row.name: row for row in rows}


STORED_DTYPES = _build_table()
TAG_DTYPES = {row.tag: row.name for row in STORED_DTYPES.values() if row.tag != "U8"}
TAG_DTYPES["U8"] = "uint8"


def stored_dtype(dtype: np.dtype[Any]) -> StoredDtype | None:
    """Return how a numpy dtype is stored, or None if it cannot be.

    Byte order does not matter: values are stored little-endian. A longdouble, an
    object, a string, a datetime or a structured dtype has no row.
    """
    row = STORED_DTYPES.get(dtype.name)
    if row is None or row.dtype != dtype.newbyteorder("<"):
        return None
    return row


def has_tag(row: StoredDtype) -> bool:
    """Tell whether the safetensors tag alone says which dtype it is."""
    return TAG_DTYPES.get(row.tag) == row.name
