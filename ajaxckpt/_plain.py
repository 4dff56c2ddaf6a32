"""What users pass as step, metrics and config, as plain JSON values: checked once.

Knows JSON, numpy scalars and whatever looks like them; knows no leaves or files.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import operator
import os
import re
from collections.abc import Mapping
from typing import Any, cast

import numpy as np

from ajaxckpt._dtypes import stored_dtype
from ajaxckpt._errors import InvalidArgumentError

MAX_DEPTH = 64
MAX_INT_BITS = 2048  # below the shortest digit limit that Python can be set to
MAX_STEP = 2**63 - 1
_INTEGER = re.compile(r"u?int[0-9]+")
# JSON has no words for these floats; an object of this one key stands for them
FLOAT_TAG = "__float__"

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]


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
    if (row := stored_dtype(array.dtype)) is None or "complex" in row.name:
        return value
    return int(array) if _INTEGER.match(row.name) else _python_float(array)


def _python_float(array: np.ndarray[Any, Any]) -> bool | float:
    return bool(array) if array.dtype.kind == "b" else float(array)


def plain_text(value: str) -> str | None:
    """Return a str as the header can hold it, None if JSON would change it.

    JSON joins a pair of surrogates to the one character they stand for.
    """
    text = str.__str__(value)
    return text if text.isascii() or json.loads(json.dumps(text)) == text else None


def _plain_str(value: str, argument: str, place: str) -> str:
    if (text := plain_text(value)) is None:
        hint = "join them: text.encode('utf-16', 'surrogatepass').decode('utf-16')"
        raise _refuse(argument, place, "a str that holds a surrogate pair", hint)
    return text


def _plain_number(value: int | float, argument: str, place: str) -> Json:
    if isinstance(value, float):
        finite = math.isfinite(value)
        return float(value) if finite else {FLOAT_TAG: str(float(value))}
    if value.bit_length() > MAX_INT_BITS:
        why = f"an int of {value.bit_length()} bits, more than {MAX_INT_BITS}"
        raise _refuse(argument, place, why, "pass it as a str")
    return int(value)


def _plain_mapping(
    value: Mapping[object, object], argument: str, place: str, depth: int
) -> Json:
    if set(value) == {FLOAT_TAG}:
        why = f"a mapping of the one key {FLOAT_TAG!r} is reserved"
        raise _refuse(argument, place, why, "rename the key")
    plain: dict[str, Json] = {}
    for key, item in value.items():
        if not isinstance(key, str):
            why = f"the key {key!r} is a {type(key).__name__}, not a str"
            raise _refuse(argument, place, why, "turn the keys into strings")
        text = _plain_str(key, argument, place)
        plain[text] = plain_json(item, argument, f"{place}.{text}", depth + 1)
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
        return _plain_str(value, argument, place)
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
    raise _refuse(argument, place, f"a {name} is not JSON-like data", _way_out(value))


def _way_out(value: object) -> str:
    if hasattr(value, "tolist"):
        return "pass value.tolist()"
    if callable(value) or isinstance(value, enum.Enum | os.PathLike):
        return "pass its name, as a str"
    if hasattr(value, "__dict__"):
        return "pass vars(value), or a dataclass"
    return "pass numbers, strings, lists and mappings"


def read_json(value: Json) -> Json:
    """Return what ``plain_json`` was given, from what the file holds."""
    if isinstance(value, list):
        return [read_json(item) for item in value]
    if isinstance(value, dict):
        if set(value) == {FLOAT_TAG}:
            return float(str(value[FLOAT_TAG]))
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


def is_readable(value: Json, depth: int = 0) -> bool:
    """Tell whether ``read_json`` will take data that came from a file."""
    if depth > MAX_DEPTH:
        return False
    if isinstance(value, list):
        return all(is_readable(item, depth + 1) for item in value)
    if isinstance(value, int):
        return value.bit_length() <= MAX_INT_BITS
    if not isinstance(value, dict):
        return True
    if set(value) == {FLOAT_TAG}:
        return value[FLOAT_TAG] in ("nan", "inf", "-inf")
    return all(is_readable(item, depth + 1) for item in value.values())
