"""What a checkpoint says of itself beside the leaves: step, metrics, config, ids.

Knows the metadata's shape in the file; knows no leaves, bytes or files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from ajaxckpt._patterns import split_pattern
from ajaxckpt._plain import FLOAT_TAG, MAX_STEP, Json, is_readable, read_json

MAX_EXCLUDED = 10_000  # characters of all patterns together
# in the provenance of a file that holds what acting needs, and is never resumed:
# which sort it is; below it, such as ``export.parameters``, what else it says
EXPORT = "export"
_ID = re.compile("[!-~]{1,64}")
_OTHER_IDS = ("run_id", "parent_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class Metadata:
    """The facts a checkpoint carries beside its leaves.

    Attributes:
        checkpoint_id: 32 hex digits, new for every save.
        run_id: the run this checkpoint belongs to, if any.
        parent_id: the checkpoint this one continues, if known.
        step: the training step, if given.
        metrics: what was measured at that step.
        config: what the user recorded of the agent.
        excluded: the patterns of leaves left out on purpose.
        layouts: the layout version per migrations registry.
        provenance: time, versions, and the user's git commit.
    """

    checkpoint_id: str
    run_id: str | None = None
    parent_id: str | None = None
    step: int | None = None
    metrics: Mapping[str, float | int | None] = field(default_factory=dict[str, Any])
    config: Mapping[str, Json] | None = None
    excluded: tuple[str, ...] = ()
    layouts: Mapping[str, int] = field(default_factory=dict[str, int])
    provenance: Mapping[str, str | bool | None] = field(default_factory=dict[str, Any])


def dump_json(value: object) -> str:
    """Write JSON the one way the format knows: ASCII, no blanks."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def _is_id(value: object) -> bool:
    return type(value) is str and _ID.fullmatch(value) is not None


def _are_versions(layouts: Mapping[str, object]) -> bool:
    return all(type(item) is int and item >= 0 for item in layouts.values())


def _is_provenance(facts: Mapping[str, object]) -> bool:
    return all(item is None or type(item) in (str, bool) for item in facts.values())


def _are_metrics(metrics: dict[str, Json]) -> bool:
    numbers = (read_json(item) for item in metrics.values())
    return set(metrics) != {FLOAT_TAG} and all(
        item is None or type(item) in (bool, int, float) for item in numbers
    )


def _is_config(config: Json) -> bool:
    if config is None:
        return True
    named = type(config) is dict and set(config) != {FLOAT_TAG}
    return named and is_readable(config)


def find_unreadable(metadata: Metadata) -> str:
    """Return why ``read_metadata`` would not give this back; empty if it would.

    Asked before a byte is written: no save may return with a file that no reader
    takes.
    """
    if (length := sum(map(len, metadata.excluded))) > MAX_EXCLUDED:
        return f"exclude= has {length} characters, the limit is {MAX_EXCLUDED}"
    facts = {key: getattr(metadata, key) for key in metadata.__dataclass_fields__}
    text = dump_json(facts)
    try:
        again = json.loads(text)
        read_metadata(again)
    except (
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        RecursionError,
    ) as error:
        return f"the metadata would not be read back: {error}"
    return "" if dump_json(again) == text else "the metadata would come back changed"


def read_metadata(facts: Mapping[str, Any]) -> Metadata:
    """Return the metadata that a header holds, after checking each type.

    Raises:
        ValueError, TypeError, LookupError, AttributeError: not what a save writes.
    """
    config = cast("dict[str, Json] | None", facts["config"])
    excluded = cast("list[str]", facts["excluded"])
    objects = cast(
        "tuple[Json, ...]",
        (facts["metrics"], facts["layouts"], facts["provenance"]),
    )
    step = facts["step"]
    sound = (
        _is_id(facts["checkpoint_id"])
        and all(facts[key] is None or _is_id(facts[key]) for key in _OTHER_IDS)
        and (step is None or (type(step) is int and 0 <= step <= MAX_STEP))
        and all(type(item) is dict for item in objects)
        and all(map(is_readable, objects))
        and _are_metrics(facts["metrics"])
        and _is_config(config)
        and _are_versions(facts["layouts"])
        and _is_provenance(facts["provenance"])
        and type(excluded) is list
    )
    if not sound:
        raise ValueError("metadata")
    if sum(map(len, excluded)) > MAX_EXCLUDED:
        raise ValueError("excluded")
    for pattern in excluded:
        split_pattern(pattern)
    return Metadata(**cast("Any", {**facts, "excluded": tuple(excluded)}))
