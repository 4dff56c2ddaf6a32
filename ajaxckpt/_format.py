"""The file's header: leaf specs and metadata to bytes, and back, checked.

A checkpoint is a valid safetensors file; FORMAT.md beside this module specifies
it. Knows bytes; knows nothing of jax, numpy arrays or paths.

Reading is parse, re-encode, compare: whatever the parser lets pass, a header that
is not byte for byte what this module would write is damaged.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import xxhash

from ajaxckpt._dtypes import STORED_DTYPES, TAG_DTYPES, has_tag
from ajaxckpt._errors import DamagedCheckpointError, NewerFormatError
from ajaxckpt._layout import ARRAY_KINDS, MAX_AXES, TEXT_KINDS, LeafSpec
from ajaxckpt._metadata import Metadata, dump_json, read_metadata
from ajaxckpt._names import is_canonical
from ajaxckpt._scalars import Value, check_scalar

FORMAT_VERSION = 1
MAX_HEADER_BYTES = 32 << 20  # the length field included
ALIGNMENT = 64
DIGEST_DIGITS = 32
LENGTH_BYTES = 8
HEAD_BYTES = 128  # enough to tell whether a file is ours

_MARK = b"ajaxckpt"
_OPENING = b'{"__metadata__":{"ajaxckpt":"'
_PREFIX = re.compile(
    re.escape(_OPENING)
    + rb'([1-9][0-9]{0,8})","ajaxckpt\.digest":"([0-9a-f]{32})",'
    + rb'"ajaxckpt\.leaves":"'
)
_HEX_RUN = re.compile(r"[0-9a-f]*")
_META_KEY = '","ajaxckpt.meta":'
_ENTRY = re.compile(
    r':\{"dtype":"([A-Z0-9_]{2,16})",'
    r'"shape":\[((?:[0-9]{1,19}(?:,[0-9]{1,19}){0,64})?)\],'
    r'"data_offsets":\[[0-9]{1,19},[0-9]{1,19}\]\}'
)
_MAX_ARRAY_BYTES = 2**63 - 1
_NO_DIGEST = "0" * DIGEST_DIGITS
# what the metadata may hold, so that parsing it takes bounded memory: so many
# characters of a kind, and one more for so many bytes of header
_FREE_CHARACTERS = 1 << 16
_STRUCTURE = (("[{", 64), (",:", 8))
_META_KEYS = (
    "leaves",
    "checkpoint_id",
    "run_id",
    "parent_id",
    "step",
    "metrics",
    "config",
    "excluded",
    "layouts",
    "provenance",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """Where one leaf's payload lies: bytes ``begin`` to ``end`` of the payload."""

    name: str
    begin: int
    end: int
    digest: str = _NO_DIGEST


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """All that a header says.

    Attributes:
        layout: leaf name to leaf spec, in the state's order.
        values: what the leaves without payload hold, as text or bool.
        tensors: leaf name to place and digest, in payload order.
        metadata: step, metrics, config, ids and provenance.
        nbytes: bytes before the payload.
    """

    layout: Mapping[str, LeafSpec]
    values: Mapping[str, Value]
    tensors: Mapping[str, Tensor]
    metadata: Metadata
    nbytes: int

    @property
    def payload_bytes(self) -> int:
        """The bytes of the payload."""
        return max((tensor.end for tensor in self.tensors.values()), default=0)


def digest_bytes(data: Any) -> str:
    """Return the digest of a piece of payload, 32 hex digits."""
    return xxhash.xxh3_128_hexdigest(data)


def _itemsize(spec: LeafSpec) -> int:
    return STORED_DTYPES[spec.payload_dtype].itemsize


def arrange_tensors(layout: Mapping[str, LeafSpec]) -> list[Tensor]:
    """Place the payloads: larger items first, so that all lie aligned."""
    stored = [(name, spec) for name, spec in layout.items() if spec.payload_dtype]
    stored.sort(key=lambda pair: -_itemsize(pair[1]))
    ends = itertools.accumulate(spec.nbytes for _, spec in stored)
    return [
        Tensor(name=name, begin=end - spec.nbytes, end=end)
        for (name, spec), end in zip(stored, ends, strict=True)
    ]


def _encode_entry(tensor: Tensor, spec: LeafSpec) -> str:
    row = STORED_DTYPES[spec.payload_dtype]
    shape = ",".join(map(str, (*spec.payload_shape, *row.trailing)))
    return (
        f'{json.dumps(tensor.name)}:{{"dtype":"{row.tag}","shape":[{shape}],'
        f'"data_offsets":[{tensor.begin},{tensor.end}]}}'
    )


def _encode_leaf(
    name: str, spec: LeafSpec, values: Mapping[str, Value], positions: dict[str, int]
) -> int | dict[str, Any]:
    """Say of a leaf what its tensor entry does not: nothing, if it can."""
    if not spec.payload_dtype:
        return {"name": name, "kind": spec.kind, "value": values[name]}
    item: dict[str, Any] = {"tensor": positions[name]}
    if spec.kind != "jax":
        item["kind"] = spec.kind
    if spec.kind not in TEXT_KINDS and not has_tag(STORED_DTYPES[spec.dtype]):
        item["dtype"] = spec.dtype
    if spec.weak_type:
        item["weak_type"] = True
    if spec.kind == "key":
        item["impl"] = spec.key_impl
    return item if len(item) > 1 else positions[name]


def _encode_metadata(leaves: list[Any], metadata: Metadata) -> str:
    facts = {key: getattr(metadata, key) for key in _META_KEYS[1:]}
    return dump_json({"leaves": leaves, **facts})


def _assemble(
    layout: Mapping[str, LeafSpec],
    values: Mapping[str, Value],
    metadata: Metadata,
    tensors: Sequence[Tensor],
) -> tuple[bytes, str]:
    """Encode the whole header with its own digest as zeros; return M beside it."""
    positions = {tensor.name: i for i, tensor in enumerate(tensors)}
    leaves = [
        _encode_leaf(name, spec, values, positions) for name, spec in layout.items()
    ]
    meta = _encode_metadata(leaves, metadata)
    entries = "".join(
        "," + _encode_entry(tensor, layout[tensor.name]) for tensor in tensors
    )
    text = (
        f'{_OPENING.decode()}{FORMAT_VERSION}","ajaxckpt.digest":"{_NO_DIGEST}",'
        f'"ajaxckpt.leaves":"{"".join(tensor.digest for tensor in tensors)}{_META_KEY}'
        f"{json.dumps(meta)}}}{entries}}}"
    )
    used = LENGTH_BYTES + len(text)
    blanks = -used % ALIGNMENT
    length = (len(text) + blanks).to_bytes(LENGTH_BYTES, "little")
    return b"".join((length, text.encode("ascii"), b" " * blanks)), meta


def _digest_span(raw: bytes | bytearray) -> tuple[int, int]:
    """Return where the header's own digest stands."""
    match = _PREFIX.match(raw, LENGTH_BYTES)
    if match is None:
        raise AssertionError("a header of ours begins with the fixed prefix")
    return match.span(2)


def _check_limits(nbytes: int, meta: str) -> str:
    """Return which limit of FORMAT.md a header breaks, empty if none."""
    if nbytes > MAX_HEADER_BYTES:
        return f"the header has {nbytes} bytes, the limit is {MAX_HEADER_BYTES}"
    for characters, share in _STRUCTURE:
        found = sum(map(meta.count, characters))
        allowed = _FREE_CHARACTERS + nbytes // share
        if found > allowed:
            kinds = " and ".join(characters)
            return f"the metadata holds {found} {kinds}, the limit is {allowed}"
    return ""


def draft_header(
    layout: Mapping[str, LeafSpec],
    values: Mapping[str, Value],
    metadata: Metadata,
    tensors: Sequence[Tensor],
) -> tuple[bytearray, str]:
    """Encode a header whose digests are still zeros; its length is final.

    Returns:
        The bytes from the file's start to the payload, and which limit they
        break (empty if none).
    """
    draft, meta = _assemble(layout, values, metadata, tensors)
    return bytearray(draft), _check_limits(len(draft), meta)


def seal_header(draft: bytearray, digests: Sequence[str]) -> bytes:
    """Write the leaf digests into a draft, and the header's own over it."""
    begin, end = _digest_span(draft)
    start = end + len(b'","ajaxckpt.leaves":"')
    joined = "".join(digests).encode()
    draft[start : start + len(joined)] = joined
    draft[begin:end] = digest_bytes(draft).encode()
    return bytes(draft)


def looks_like_ours(head: bytes) -> bool:
    """Tell from a file's first bytes whether it is a checkpoint, damaged or not.

    The mark stands there more than once: no single damage hides it.
    """
    return _MARK in head[LENGTH_BYTES:HEAD_BYTES]


def begins_like_ours(head: bytes) -> bool:
    """Tell whether a file too short for the mark is the beginning of one of ours."""
    return _OPENING.startswith(head[LENGTH_BYTES:])


def is_ours(head: bytes) -> bool:
    """Tell from a file's first bytes whether ajaxckpt wrote it, beyond doubt.

    Asked before a file is replaced: a note that mentions ajaxckpt is not ours.
    """
    return head.startswith(_OPENING, LENGTH_BYTES)


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
    match = _PREFIX.match(raw, LENGTH_BYTES)
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
    hasher.update(_NO_DIGEST.encode())
    hasher.update(memoryview(raw)[end:])
    if hasher.hexdigest().encode() != match[2]:
        raise DamagedCheckpointError(
            f"the header (bytes 0-{len(raw) - 1}) does not match its digest"
        )


def _read_header(raw: bytes, start: int) -> Header:
    """Parse a header whose digest is right, then compare it with our own."""
    text = raw.decode("latin-1")  # the length field; the comparison demands ASCII
    run = _HEX_RUN.match(text, start)
    if run is None or not text.startswith(_META_KEY, run.end()):
        raise ValueError("leaf digests")
    meta, position = json.JSONDecoder().raw_decode(text, run.end() + len(_META_KEY))
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
    _check_as_written(raw, _assemble(layout, values, metadata, tensors)[0])
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
    if problem := _check_limits(nbytes, meta):
        raise DamagedCheckpointError(problem)
    facts = json.loads(meta)
    if tuple(facts) != _META_KEYS:
        raise ValueError("metadata keys")
    return facts


def _check_as_written(raw: bytes, ours: bytes) -> None:
    """Compare byte for byte, but for the header's own digest."""
    begin, end = _digest_span(ours)
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
    kind = facts.get("kind", "jax")
    if kind in TEXT_KINDS:
        return name, LeafSpec(kind=kind, length=shape[0])
    dtype = facts.get("dtype", TAG_DTYPES.get(tag, tag))
    if dtype not in STORED_DTYPES:
        raise DamagedCheckpointError(
            f"{name}: the dtype {str(dtype)[:32]!r} is unknown to this release",
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
    _check_spec(spec, shape)
    return name, spec


def _check_spec(spec: LeafSpec, shape: tuple[int, ...]) -> None:
    """Refuse what no state can hold, however well its header is spelled."""
    is_key = spec.kind == "key"
    if is_key and (spec.dtype != "uint32" or not spec.key_words or not spec.key_impl):
        raise ValueError("key")
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
    size = math.prod(axis or 1 for axis in shape) * STORED_DTYPES[spec.dtype].itemsize
    if size > _MAX_ARRAY_BYTES:
        raise ValueError("shape")
