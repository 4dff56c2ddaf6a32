"""Header bytes to what they say, every byte of them checked.

Reading is parse, re-encode, compare: whatever the parser lets pass, a header that
is not byte for byte what ``_format`` would write is damaged. Knows bytes; knows
nothing of jax, arrays or paths.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import xxhash

from ajaxckpt._dtypes import STORED_DTYPES, TAG_DTYPES
from ajaxckpt._errors import DamagedCheckpointError, NewerFormatError
from ajaxckpt._format import (
    ALIGNMENT,
    DIGEST_DIGITS,
    FORMAT_VERSION,
    LENGTH_BYTES,
    MAX_HEADER_BYTES,
    META_KEY,
    META_KEYS,
    NO_DIGEST,
    OPENING,
    PREFIX,
    Header,
    arrange_tensors,
    assemble_header,
    digest_span,
    find_broken_limit,
)
from ajaxckpt._layout import (
    ARRAY_KINDS,
    MAX_AXES,
    TEXT_KINDS,
    LeafSpec,
    is_key_type,
)
from ajaxckpt._metadata import read_metadata
from ajaxckpt._names import is_canonical
from ajaxckpt._scalars import Value, check_scalar

HEAD_BYTES = 128  # enough to tell whether a file is ours

_MARK = b"ajaxckpt"
_HEX_RUN = re.compile(r"[0-9a-f]*")
_ENTRY = re.compile(
    r':\{"dtype":"([A-Z0-9_]{2,16})",'
    r'"shape":\[((?:[0-9]{1,19}(?:,[0-9]{1,19}){0,64})?)\],'
    r'"data_offsets":\[[0-9]{1,19},[0-9]{1,19}\]\}'
)
_MAX_ARRAY_BYTES = 2**63 - 1


def looks_like_ours(head: bytes) -> bool:
    """Tell from a file's first bytes whether it is a checkpoint, damaged or not.

    The mark stands there more than once: no single damage hides it.
    """
    return _MARK in head[LENGTH_BYTES:HEAD_BYTES]


def begins_like_ours(head: bytes) -> bool:
    """Tell whether a file too short for the mark is the beginning of one of ours."""
    return OPENING.startswith(head[LENGTH_BYTES:])


def read_length(head: bytes, file_size: int) -> int:
    """Return how many bytes stand before the payload.

    Args:
        head: the file's first bytes.
        file_size: bytes of the whole file.

    Raises:
        DamagedCheckpointError: the length field cannot be right.
    """
    if len(head) < LENGTH_BYTES:
        raise DamagedCheckpointError(f"truncated: the file has {file_size} bytes")
    total = LENGTH_BYTES + int.from_bytes(head[:LENGTH_BYTES], "little")
    problem = ""
    if total > MAX_HEADER_BYTES:
        problem = f"the limit is {MAX_HEADER_BYTES}"
    elif total % ALIGNMENT or total == 0:
        problem = f"headers are multiples of {ALIGNMENT}"
    elif total > file_size:
        problem = f"the file has {file_size} bytes (truncated?)"
    if problem:
        raise DamagedCheckpointError(
            f"the length field (bytes 0-7) gives a header of {total} bytes: {problem}"
        )
    return total


def parse_header(raw: bytes, file_size: int) -> Header:
    """Check a header and return what it says.

    Args:
        raw: the file's bytes before the payload, length field included.
        file_size: bytes of the whole file.

    Raises:
        DamagedCheckpointError: not byte for byte what ajaxckpt writes.
        NewerFormatError: sound, but of a newer format version.
    """
    match = PREFIX.match(raw, LENGTH_BYTES)
    if match is None:
        raise DamagedCheckpointError("the header's first bytes are not as written")
    _check_digest(raw, match)
    if (version := int(match[1])) > FORMAT_VERSION:
        raise NewerFormatError(
            f"format version {version}, this release reads up to {FORMAT_VERSION}",
            hint="pip install --upgrade ajaxckpt",
        )
    try:
        header = _read_header(raw, match.end())
    except _NOT_AS_WRITTEN as error:
        raise DamagedCheckpointError(
            "the header is not as ajaxckpt writes it"
        ) from error
    expected = len(raw) + header.payload_bytes
    if expected != file_size:
        what = "truncated" if file_size < expected else "bytes appended"
        raise DamagedCheckpointError(
            f"{what}: the file has {file_size} bytes, its header says {expected}"
        )
    return header


# all that a hostile header can make the parser below raise
_NOT_AS_WRITTEN = (ValueError, TypeError, LookupError, AttributeError, RecursionError)


def _check_digest(raw: bytes, match: re.Match[bytes]) -> None:
    begin, end = match.span(2)
    hasher = xxhash.xxh3_128(raw[:begin])
    hasher.update(NO_DIGEST.encode())
    hasher.update(memoryview(raw)[end:])
    if hasher.hexdigest().encode() != match[2]:
        raise DamagedCheckpointError(
            f"the header (bytes 0-{len(raw) - 1}) does not match its digest"
        )


def _read_header(raw: bytes, start: int) -> Header:
    """Parse a header whose digest is right, then compare it with our own."""
    text = raw.decode("latin-1")  # the length field; the comparison demands ASCII
    run = _HEX_RUN.match(text, start)
    if run is None or not text.startswith(META_KEY, run.end()):
        raise ValueError("leaf digests")
    meta, position = json.JSONDecoder().raw_decode(text, run.end() + len(META_KEY))
    entries = list(_read_entries(text, position + 1))
    del text  # memory is bounded by FORMAT.md
    facts = _read_facts(meta, len(raw))
    layout, values = _read_leaves(facts.pop("leaves"), entries)
    digests = run[0]
    if len(digests) != DIGEST_DIGITS * len(entries):
        raise ValueError("leaf digests")
    tensors = [
        replace(tensor, digest=digests[DIGEST_DIGITS * i : DIGEST_DIGITS * (i + 1)])
        for i, tensor in enumerate(arrange_tensors(layout))
    ]
    metadata = read_metadata(facts)
    _check_as_written(raw, assemble_header(layout, values, metadata, tensors)[0])
    return Header(
        layout=layout,
        values=values,
        tensors={tensor.name: tensor for tensor in tensors},
        metadata=metadata,
        nbytes=len(raw),
    )


def _read_facts(meta: object, nbytes: int) -> dict[str, Any]:
    if type(meta) is not str or not meta.isascii():
        raise ValueError("metadata")
    if problem := find_broken_limit(nbytes, meta):
        raise DamagedCheckpointError(problem)
    facts = json.loads(meta)
    if tuple(facts) != META_KEYS:
        raise ValueError("metadata keys")
    return facts


def _check_as_written(raw: bytes, ours: bytes) -> None:
    """Compare byte for byte, but for the header's own digest."""
    begin, end = digest_span(ours)
    if ours[:begin] != raw[:begin] or ours[end:] != raw[end:]:
        raise ValueError("not canonical")


_Entry = tuple[str, str, tuple[int, ...]]


def _read_entries(text: str, position: int) -> Iterator[_Entry]:
    decoder = json.JSONDecoder()
    while text.startswith(',"', position):
        name, position = decoder.raw_decode(text, position + 1)
        match = _ENTRY.match(text, position)
        if match is None:
            raise ValueError("tensor entry")
        shape = tuple(map(int, match[2].split(","))) if match[2] else ()
        yield name, match[1], shape
        position = match.end()


def _read_leaves(
    items: list[Any], entries: list[_Entry]
) -> tuple[dict[str, LeafSpec], dict[str, Value]]:
    layout: dict[str, LeafSpec] = {}
    values: dict[str, Value] = {}
    for item in items:
        facts = cast("dict[str, Any]", item if type(item) is dict else {"tensor": item})
        if "tensor" in facts:
            position = cast("int", facts["tensor"])
            name, spec = _read_tensor_leaf(facts, entries[position])
        else:
            name, spec = facts["name"], LeafSpec(kind=facts["kind"])
            values[name] = check_scalar(facts["kind"], facts["value"])
        if name in layout or not is_canonical(name):
            raise ValueError("leaf name")
        layout[name] = spec
    return layout, values


def _read_tensor_leaf(facts: dict[str, Any], entry: _Entry) -> tuple[str, LeafSpec]:
    name, tag, shape = entry
    if not is_canonical(name):
        raise ValueError("leaf name")
    kind = facts.get("kind", "jax")
    if kind in TEXT_KINDS:
        return name, LeafSpec(kind=kind, length=shape[0])
    dtype = facts.get("dtype", TAG_DTYPES.get(tag, tag))
    if dtype not in STORED_DTYPES:
        raise DamagedCheckpointError(
            f"{name[:80]}: the dtype {str(dtype)[:32]!r} is unknown to this release",
            hint="pip install --upgrade ajaxckpt",
        )
    words = shape[-1] if kind == "key" else 0
    trailing = len(STORED_DTYPES[dtype].trailing) + (kind == "key")
    spec = LeafSpec(
        kind=kind,
        dtype=dtype,
        shape=shape[: len(shape) - trailing],
        weak_type=facts.get("weak_type", False),
        key_impl=facts.get("impl", ""),
        key_words=words,
    )
    _check_spec(spec)
    return name, spec


def _check_spec(spec: LeafSpec) -> None:
    """Refuse what no state can hold, however well its header is spelled."""
    is_key = spec.kind == "key"
    if is_key and not is_key_type(spec.key_impl, spec.key_words):
        raise ValueError("key")
    if is_key and spec.dtype != "uint32":
        raise ValueError("key dtype")
    if not is_key and spec.kind not in ARRAY_KINDS:
        raise ValueError("kind")
    if type(spec.key_impl) is not str or type(spec.weak_type) is not bool:
        raise TypeError("leaf facts")
    if spec.weak_type and spec.kind != "jax":
        raise ValueError("weak type")
    if spec.kind == "numpy scalar" and spec.shape:
        raise ValueError("scalar")
    if len(spec.payload_shape) > MAX_AXES:
        raise ValueError("axes")
    # zeros aside: numpy refuses to build what would not fit an address space
    count = math.prod(axis or 1 for axis in spec.payload_shape)
    size = count * STORED_DTYPES[spec.dtype].itemsize
    if size > _MAX_ARRAY_BYTES:
        raise ValueError("shape")
