"""The digest of a state: equal for equal states, whatever file holds them.

Knows layouts and the digests of payloads; knows nothing of trees or files. Order of
leaves, placement (jax or numpy), names of functions, step, metrics and config do
not enter; FORMAT.md freezes the rest.
"""

from __future__ import annotations

from collections.abc import Mapping

import xxhash

from ajaxckpt._layout import ARRAY_KINDS, Layout
from ajaxckpt._metadata import dump_json
from ajaxckpt._scalars import Value


def digest_state(
    layout: Layout, values: Mapping[str, Value], digests: Mapping[str, str]
) -> str:
    """Return the digest of a state from its layout, values and leaf digests.

    Returns:
        32 hex digits.
    """
    hasher = xxhash.xxh3_128()
    for name in sorted(layout):
        spec = layout[name]
        if spec.kind == "function":
            continue
        facts = (
            name,
            "array" if spec.kind in ARRAY_KINDS else spec.kind,
            spec.dtype,
            spec.shape,
            spec.weak_type,
            spec.key_impl,
            digests[name] if name in digests else values[name],
        )
        hasher.update(dump_json(facts).encode() + b"\n")
    return hasher.hexdigest()
