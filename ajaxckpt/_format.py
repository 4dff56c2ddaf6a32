"""The file's header: leaf specs and metadata to bytes.

A checkpoint is a valid safetensors file; FORMAT.md beside this module specifies
it, and ``_parsing`` reads it. Knows bytes; knows nothing of jax, arrays or paths.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from ajaxckpt._dtypes import STORED_DTYPES, has_tag
from ajaxckpt._layout import TEXT_KINDS, LeafSpec
from ajaxckpt._metadata import Metadata, dump_json
from ajaxckpt._scalars import Value

FORMAT_VERSION = 1
MAX_HEADER_BYTES = 32 << 20  # the length field included
ALIGNMENT = 64
DIGEST_DIGITS = 32
LENGTH_BYTES = 8
OPENING = b'{"__metadata__":{"ajaxckpt":"'
PREFIX = re.compile(
    re.escape(OPENING)
    + rb'([1-9][0-9]{0,8})","ajaxckpt\.digest":"([0-9a-f]{32})",'
    + rb'"ajaxckpt\.leaves":"'
)
META_KEY = '","ajaxckpt.meta":'
NO_DIGEST = "0" * DIGEST_DIGITS
# what the metadata may hold, so that parsing it takes bounded memory: so many
# characters of a kind, and one more for so many bytes of header
_FREE_CHARACTERS = 1 << 16
_STRUCTURE = (("[{", 64), (",:", 8))
META_KEYS = (
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
    digest: str = NO_DIGEST


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
    facts = {key: getattr(metadata, key) for key in META_KEYS[1:]}
    return dump_json({"leaves": leaves, **facts})


def assemble_header(
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
        f'{OPENING.decode()}{FORMAT_VERSION}","ajaxckpt.digest":"{NO_DIGEST}",'
        f'"ajaxckpt.leaves":"{"".join(tensor.digest for tensor in tensors)}{META_KEY}'
        f"{json.dumps(meta)}}}{entries}}}"
    )
    used = LENGTH_BYTES + len(text)
    blanks = -used % ALIGNMENT
    length = (len(text) + blanks).to_bytes(LENGTH_BYTES, "little")
    return b"".join((length, text.encode("ascii"), b" " * blanks)), meta


def digest_span(raw: bytes | bytearray) -> tuple[int, int]:
    """Return where the header's own digest stands."""
    match = PREFIX.match(raw, LENGTH_BYTES)
    if match is None:
        raise AssertionError("a header of ours begins with the fixed prefix")
    return match.span(2)


def find_broken_limit(nbytes: int, meta: str) -> str:
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
    draft, meta = assemble_header(layout, values, metadata, tensors)
    return bytearray(draft), find_broken_limit(len(draft), meta)


def seal_header(draft: bytearray, digests: Sequence[str]) -> bytes:
    """Write the leaf digests into a draft, and the header's own over it."""
    begin, end = digest_span(draft)
    start = end + len(b'","ajaxckpt.leaves":"')
    joined = "".join(digests).encode()
    draft[start : start + len(joined)] = joined
    draft[begin:end] = digest_bytes(draft).encode()
    return bytes(draft)


def is_ours(head: bytes) -> bool:
    """Tell from a file's first bytes whether ajaxckpt wrote it, beyond doubt.

    Asked before a file is replaced: a note that mentions ajaxckpt is not ours.
    """
    return head.startswith(OPENING, LENGTH_BYTES)
