"""What a checkpoint says of itself beside the leaves: step, metrics, config, ids.

Turns what users pass into plain JSON values, once, at the border. Knows no leaves,
bytes or files.
"""

from __future__ import annotations

import dataclasses
import json
import math
import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from ajaxckpt._errors import InvalidArgumentError
from ajaxckpt._patterns import parse_pattern

MAX_DEPTH = 64
MAX_INT_BITS = 2048  # below the shortest digit limit that Python can be set to
MAX_STEP = 2**63 - 1
_ID = re.compile("[!-~]{1,64}")
_OTHER_IDS = ("run_id", "parent_id")
# JSON has no words for these floats; an object of this one key stands for them
_FLOAT_TAG = "__float__"

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]


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


def _refuse(argument: str, place: str, why: str, hint: str) -> InvalidArgumentError:
    where = f"{argument}{place}"
    return InvalidArgumentError(f"{where}: {why}", act="cannot save", hint=hint)


def _read_array(value: object, argument: str, place: str) -> np.ndarray[Any, Any]:
    """Bring an array to the host; keys, donated arrays and tracers have no values."""
    try:
        return np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        hint = "pass plain numbers, read before the array was donated"
        raise _refuse(argument, place, reason, hint) from error


def _scalar(value: object, argument: str, place: str) -> object:
    """Turn a numpy or jax scalar into Python's; leave all else as it is."""
    if not hasattr(value, "dtype") or getattr(value, "shape", None) != ():
        return value
    array = _read_array(value, argument, place)
    if array.dtype.kind in "biu":
        return array.item()
    try:
        return float(array) if array.dtype.kind != "c" else value
    except (TypeError, ValueError):
        return value


def _plain_number(value: int | float, argument: str, place: str) -> Json:
    if isinstance(value, float):
        finite = math.isfinite(value)
        return float(value) if finite else {_FLOAT_TAG: str(float(value))}
    if value.bit_length() > MAX_INT_BITS:
        why = f"an int of {value.bit_length()} bits, more than {MAX_INT_BITS}"
        raise _refuse(argument, place, why, "pass it as a str")
    return int(value)


def _plain_mapping(
    value: Mapping[object, object], argument: str, place: str, depth: int
) -> Json:
    if set(value) == {_FLOAT_TAG}:
        why = f"a mapping of the one key {_FLOAT_TAG!r} is reserved"
        raise _refuse(argument, place, why, "rename the key")
    plain: dict[str, Json] = {}
    for key, item in value.items():
        if not isinstance(key, str):
            why = f"the key {key!r} is a {type(key).__name__}, not a str"
            raise _refuse(argument, place, why, "turn the keys into strings")
        plain[str(key)] = plain_json(item, argument, f"{place}.{key}", depth + 1)
    return plain


def plain_json(value: object, argument: str, place: str = "", depth: int = 0) -> Json:
    """Return JSON-like data as plain Python: dict, list, str, numbers, None.

    Takes mappings, dataclasses, lists, tuples, numpy and jax scalars.

    Raises:
        InvalidArgumentError: something in it is not JSON-like; names the place.
    """
    if depth > MAX_DEPTH:
        why = f"nested deeper than {MAX_DEPTH} levels"
        raise _refuse(argument, place[:60], why, "pass a flatter value")
    value = _scalar(value, argument, place)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, int | float):
        return _plain_number(value, argument, place)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        value = {item.name: getattr(value, item.name) for item in fields}
    if isinstance(value, Mapping):
        items = cast("Mapping[object, object]", value)
        return _plain_mapping(items, argument, place, depth)
    if isinstance(value, list | tuple):
        sequence = cast("list[object]", value)
        return [
            plain_json(item, argument, f"{place}[{i}]", depth + 1)
            for i, item in enumerate(sequence)
        ]
    name = type(value).__name__
    hint = "pass numbers, strings, lists and mappings, such as value.tolist()"
    raise _refuse(argument, place, f"a {name} is not JSON-like data", hint)


def read_json(value: Json) -> Json:
    """Return what ``plain_json`` was given, from what the file holds."""
    if isinstance(value, list):
        return [read_json(item) for item in value]
    if isinstance(value, dict):
        if set(value) == {_FLOAT_TAG}:
            return float(str(value[_FLOAT_TAG]))
        return {key: read_json(item) for key, item in value.items()}
    return value


def plain_config(config: object) -> Mapping[str, Json] | None:
    """Return a config as plain data, or None for none.

    Raises:
        InvalidArgumentError: it is neither a mapping nor a dataclass, or holds
            what is not JSON-like.
    """
    if config is None:
        return None
    plain = plain_json(config, "config")
    if not isinstance(plain, dict):
        name = type(config).__name__
        why = f"a {name} is neither a mapping nor a dataclass"
        raise _refuse("config", "", why, "pass a dict or a dataclass instance")
    return plain


def plain_metrics(metrics: object) -> Mapping[str, Any]:
    """Return metrics as a flat mapping from name to number or None.

    Raises:
        InvalidArgumentError: a value is not a single number.
    """
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        name = type(metrics).__name__
        why = f"a {name} is not a mapping"
        raise _refuse("metrics", "", why, 'pass metrics={"return": 1.0}')
    for key, item in cast("Mapping[object, object]", metrics).items():
        number = _scalar(item, "metrics", f".{key}")
        if not (number is None or isinstance(number, int | float)):
            why = f"a {type(item).__name__} is not a single number"
            hint = "pass one number per name, such as float(value.mean())"
            raise _refuse("metrics", f".{key}", why, hint)
    return cast("dict[str, Any]", plain_json(cast("object", metrics), "metrics"))


def plain_step(step: object) -> int | None:
    """Return the step as an int.

    Args:
        step: an int, an integer scalar, or an integer array of equal values (a
            step counter with a seeds axis).

    Raises:
        InvalidArgumentError: not an integer, negative, or unequal values.
    """
    if step is None:
        return None
    hint = "pass step=<int>, or an integer array of equal values"
    if hasattr(step, "dtype"):
        values = _read_array(step, "step", "")
        if values.dtype.kind not in "iu" or values.size == 0:
            why = f"{values.dtype}{list(values.shape)} holds no integer"
            raise _refuse("step", "", why, hint)
        if (low := int(values.min())) != (high := int(values.max())):
            why = f"the values differ: between {low} and {high}"
            raise _refuse("step", "", why, hint)
        step = low
    if isinstance(step, bool) or not hasattr(step, "__index__"):
        raise _refuse("step", "", f"{step!r} is not an integer", hint)
    number = operator.index(cast("Any", step))
    if not 0 <= number <= MAX_STEP:
        raise _refuse("step", "", f"{number} is not within 0 … 2**63 - 1", hint)
    return number


def _is_readable(value: Json, depth: int = 0) -> bool:
    """Tell whether ``read_json`` will take data that came from a file."""
    if depth > MAX_DEPTH:
        return False
    if isinstance(value, list):
        return all(_is_readable(item, depth + 1) for item in value)
    if not isinstance(value, dict):
        return True
    if set(value) == {_FLOAT_TAG}:
        return value[_FLOAT_TAG] in ("nan", "inf", "-inf")
    return all(_is_readable(item, depth + 1) for item in value.values())


def _is_id(value: object) -> bool:
    return type(value) is str and _ID.fullmatch(value) is not None


def _are_versions(layouts: Mapping[str, object]) -> bool:
    return all(type(item) is int and item >= 0 for item in layouts.values())


def _is_provenance(facts: Mapping[str, object]) -> bool:
    return all(item is None or type(item) in (str, bool) for item in facts.values())


def _are_metrics(metrics: dict[str, Json]) -> bool:
    numbers = (read_json(item) for item in metrics.values())
    return set(metrics) != {_FLOAT_TAG} and all(
        item is None or type(item) in (bool, int, float) for item in numbers
    )


def _is_config(config: Json) -> bool:
    if config is None:
        return True
    named = type(config) is dict and set(config) != {_FLOAT_TAG}
    return named and _is_readable(config)


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
        and all(map(_is_readable, objects))
        and _are_metrics(facts["metrics"])
        and _is_config(config)
        and _are_versions(facts["layouts"])
        and _is_provenance(facts["provenance"])
        and type(excluded) is list
    )
    if not sound:
        raise ValueError("metadata")
    for pattern in excluded:
        parse_pattern(pattern)
    return Metadata(**cast("Any", {**facts, "excluded": tuple(excluded)}))
