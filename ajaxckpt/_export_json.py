"""The JSON beside an export: what the file says of itself, for people and tools.

Nothing here is needed to load an export. Knows paths and headers.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from typing import Any, cast

from ajaxckpt._errors import NotACheckpointError
from ajaxckpt._layout import LeafSpec
from ajaxckpt._metadata import Metadata
from ajaxckpt._paths import is_missing, open_file, read_into
from ajaxckpt._plain import MAX_INT_BITS, Json
from ajaxckpt._scalars import Value, decode_scalar
from ajaxckpt._writer import StateData

_CHUNK = 1 << 20
_SORTS = ("policy", "function")


def json_path(path: str) -> str:
    """Return where the JSON of an export lies.

    Example:
        >>> from ajaxckpt._export_json import json_path
        >>> json_path("/a/policy.safetensors"), json_path("/a/policy")
        ('/a/policy.json', '/a/policy.json')
    """
    return path.removesuffix(".safetensors") + ".json"


def check_beside(target: str) -> None:
    """Refuse to replace what is not the JSON of this export.

    Raises:
        NotACheckpointError: something else is there.
    """
    beside = json_path(target)
    if is_missing(beside):
        return
    if not (text := b"".join(_iter_file(beside))):
        return
    said = _parse(text)
    problem = ""
    if said.get("ajaxckpt") not in _SORTS:
        problem = "a file is there that ajaxckpt did not write"
    elif (other := str(said.get("file"))) != os.path.basename(target):
        if os.path.exists(os.path.join(os.path.dirname(target), other)):
            problem = f"it is the JSON of {other}"
    if problem:
        hint = "export to another path, or remove the file yourself"
        raise NotACheckpointError(problem, path=beside, hint=hint)


def _parse(text: bytes) -> dict[str, Any]:
    try:
        said = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return cast("dict[str, Any]", said) if isinstance(said, dict) else {}


def _iter_file(path: str) -> Iterator[bytes]:
    fd, size = open_file(path)
    try:
        for start in range(0, size, _CHUNK):
            piece = bytearray(min(_CHUNK, size - start))
            yield bytes(piece[: read_into(fd, [piece], start)])
    finally:
        os.close(fd)


def hash_file(path: str) -> str:
    """Return the sha256 of a whole file."""
    hasher = hashlib.sha256()
    for piece in _iter_file(path):
        hasher.update(piece)
    return hasher.hexdigest()


def render_json(
    head: Mapping[str, Json],
    data: StateData,
    metadata: Metadata,
    provenance: Mapping[str, Json],
) -> bytes:
    """Return the text of the JSON: its head, then leaves, config and provenance."""
    content = {
        **head,
        "leaves": {
            name: _describe(spec, data.values.get(name))
            for name, spec in data.layout.items()
        },
        "config": metadata.config,
        "provenance": provenance,
        "parent_id": metadata.parent_id,
        "run_id": metadata.run_id,
    }
    return (json.dumps(content, indent=1, allow_nan=False) + "\n").encode()


def _describe(spec: LeafSpec, value: Value | None) -> dict[str, Json]:
    described: dict[str, Json] = {"kind": spec.kind}
    if spec.dtype:
        described |= {"dtype": spec.dtype, "shape": list(spec.shape)}
    if spec.weak_type:
        described["weak_type"] = True
    if spec.key_impl:
        described["key_impl"] = spec.key_impl
    if value is not None:
        described["value"] = _readable(spec, value)
    return described


def _readable(spec: LeafSpec, value: Value) -> Json:
    """Return a Python number as JSON where JSON can hold it, else as the file does."""
    number = decode_scalar(spec.kind, value)
    if isinstance(number, float) and math.isfinite(number):
        return number
    if isinstance(number, int) and number.bit_length() <= MAX_INT_BITS:
        return number
    return value
