"""An exported policy once it is loaded: its leaves put together again.

Knows files and names; loads jax only for a skeleton.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ajaxckpt._errors import DamagedCheckpointError, InvalidArgumentError
from ajaxckpt._metadata import EXPORT
from ajaxckpt._names import relative_name, split_name
from ajaxckpt._reader import Checkpoint

_INT = re.compile("-?[0-9]+")  # as names spell them: of other digits is a text


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """An exported policy, loaded.

    Attributes:
        path: the file, absolute.
        parameters: the parameters: in the skeleton that was passed, else nested
            dicts of numpy arrays.
        normaliser: the normaliser, likewise; None where it was left out.
        leaves: every leaf of the file by its name in the state, as host values.
        step: the training step, if known.
        config: the config it was trained with, if known.
        digest: the digest of the exported leaves.
        provenance: when, from what and with which versions it was exported.
    """

    path: str
    parameters: Any
    normaliser: Any
    leaves: Mapping[str, Any] = field(repr=False)
    step: int | None
    config: dict[str, Any] | None
    digest: str
    provenance: Mapping[str, str | bool | None]


def read_policy(file: Checkpoint, parameters: Any, normaliser: Any) -> Policy:
    """Read all of an open export, into skeletons where there are some.

    Raises:
        InvalidArgumentError: a skeleton for a normaliser that the file lacks.
        LayoutMismatchError: file and skeleton differ.
        DamagedCheckpointError: bytes are not those written.
    """
    said = file.provenance
    node, other = said.get(f"{EXPORT}.parameters"), said.get(f"{EXPORT}.normaliser")
    if other is None and normaliser is not None:
        hint = "pass normaliser= to export_policy, and export again"
        problem = "the policy was exported without a normaliser"
        raise InvalidArgumentError(problem, hint=hint)
    leaves = file.read(list(file))
    statistics = None
    if other is not None:
        statistics = _build(file, str(other), normaliser, leaves)
    return Policy(
        path=file.path,
        parameters=_build(file, str(node), parameters, leaves),
        normaliser=statistics,
        leaves=leaves,
        step=file.step,
        config=file.config,
        digest=file.digest,
        provenance=said,
    )


def _build(
    file: Checkpoint, node: str, skeleton: Any, leaves: Mapping[str, Any]
) -> Any:
    """Put the leaves of a node into a skeleton, or into nested dicts."""
    if skeleton is not None:
        from ajaxckpt._checkpoint import restore_into

        return restore_into(skeleton, file, subtree=node)
    if not any(relative_name(name, node) is not None for name in leaves):
        problem = f"no leaf lies below {node}, which the file says it holds"
        raise DamagedCheckpointError(problem)
    tree: dict[Any, Any] = {}
    for name in leaves:
        rest = relative_name(name, node)
        if rest is None or file.layout[name].kind == "function":
            continue
        if rest == "":
            return leaves[name]
        *parents, last = map(_read_segment, split_name(rest))
        place = tree
        for segment in parents:
            place = place.setdefault(segment, {})
        place[last] = leaves[name]
    return tree


def _read_segment(segment: str) -> int | str:
    """Return a key from its spelling in a name; unusual keys stay spelled."""
    if segment.startswith('"'):
        return str(json.loads(segment))
    return int(segment) if _INT.fullmatch(segment) else segment
