"""Where a Python scalar becomes text in the header, bit for bit, and comes back.

Knows Python's scalar types; knows nothing of trees, headers or files. Text and
bytes leaves become payload here too.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Value = bool | str


@dataclass(frozen=True, slots=True)
class _Codec:
    encode: Callable[[Any], Value]
    decode: Callable[[Any], Any]


def _decode_int(text: str) -> int:
    return int(text, 16)


def _encode_float(value: float) -> str:
    return struct.pack(">d", value).hex()


def _decode_float(text: str) -> float:
    return struct.unpack(">d", bytes.fromhex(text))[0]


def _encode_complex(value: complex) -> str:
    return struct.pack(">dd", value.real, value.imag).hex()


def _decode_complex(text: str) -> complex:
    return complex(*struct.unpack(">dd", bytes.fromhex(text)))


# hexadecimal throughout: str() of a long int raises, and floats must keep NaN bits
_CODECS = {
    "bool": _Codec(bool, bool),
    "int": _Codec(hex, _decode_int),
    "float": _Codec(_encode_float, _decode_float),
    "complex": _Codec(_encode_complex, _decode_complex),
    "enum": _Codec(str, str),
    "function": _Codec(str, str),
}


def encode_scalar(kind: str, value: object) -> Value:
    """Return the header's text for a Python scalar, an enum or function name."""
    return _CODECS[kind].encode(value)


def decode_scalar(kind: str, text: Value) -> Any:
    """Return the Python scalar that the header's text stands for."""
    return _CODECS[kind].decode(text)


def check_scalar(kind: str, text: object) -> Value:
    """Return the text if ``encode_scalar`` could have written it.

    Raises:
        ValueError, TypeError, KeyError: it could not.
    """
    codec = _CODECS[kind]
    try:
        again = codec.encode(codec.decode(text))
    except struct.error as error:
        raise ValueError(f"{kind} value") from error
    if type(text) is not type(again) or text != again:
        raise ValueError(f"{kind} value")
    return again


def encode_text(value: str | bytes) -> bytes:
    """Return the payload of a str or bytes leaf; lone surrogates are kept."""
    if isinstance(value, bytes):
        return value
    return value.encode("utf-8", "surrogatepass")


def decode_text(kind: str, data: bytes) -> str | bytes:
    """Return the str or bytes leaf of a payload."""
    return data if kind == "bytes" else data.decode("utf-8", "surrogatepass")
