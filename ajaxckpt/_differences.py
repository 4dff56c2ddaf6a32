"""Plain data then and now: how keys and values are spelled, and what differs.

Pure: knows plain data and the words that stand for values; knows no checkpoints.
"""

from __future__ import annotations

import enum
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, cast

from ajaxckpt._grammar import clip, quote
from ajaxckpt._names import format_key
from ajaxckpt._plain import Json

_SHOWN = 60
_LEAD = 20
_WORDS: Mapping[str, bool | None] = {"True": True, "False": False, "None": None}
# texts that stand for something else where a value is shown
_RESERVED = ("", "absent", "none", "nan", "inf", "-inf")


class Absent(enum.Enum):
    """The type of ``ABSENT``, which stands for a key that one side has not."""

    ABSENT = "absent"

    def __repr__(self) -> str:
        """Show it as one word."""
        return self.value


ABSENT: Literal[Absent.ABSENT] = Absent.ABSENT

Value = Json | Literal[Absent.ABSENT]
Path = tuple[str | int, ...]


def spell_path(path: Iterable[str | int]) -> str:
    """Join keys to a dotted key as an override can be written."""
    return ".".join(
        quote(key)
        if isinstance(key, str) and (key.startswith(("+", "~")) or "=" in key)
        else format_key(key)
        for key in path
    )


def parse_value(text: str) -> Any:
    """Read a value as JSON, a Python word, or else text.

    Raises:
        ValueError, RecursionError: JSON that means nothing that can be saved.
    """
    if text in _WORDS:
        return _WORDS[text]
    try:
        return json.loads(
            text, parse_float=_parse_float, object_pairs_hook=_parse_mapping
        )
    except json.JSONDecodeError:
        return text


def _parse_float(text: str) -> float:
    if math.isinf(number := float(text)):
        raise ValueError(f"{clip(text)} is beyond all floats")
    return number


def _parse_mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        raise ValueError("a key stands twice in the mapping")
    return mapping


def _show(value: Value) -> str:
    """Show a value; a text without quotes where it can be mistaken for nothing else."""
    if value is ABSENT or value is None:
        return "absent" if value is ABSENT else "none"
    if not isinstance(value, str):
        return repr(value)
    plain = value.isprintable() and value.strip() == value and value not in _RESERVED
    # what begins like a list or a quoted text is quoted, even where it is no JSON
    plain = plain and value[0] not in "[{\"'" and _is_text(value)
    return value if plain else quote(value)


def _is_text(value: str) -> bool:
    try:
        return parse_value(value) == value
    except ValueError:
        return False


def _cut(text: str, start: int = 0) -> str:
    end = start + _SHOWN
    return ("…" if start else "") + text[start:end] + ("…" if text[end:] else "")


def show_plain(value: Value) -> str:
    """Show the beginning of a value in a message."""
    return _cut(_show(value))


def describe_difference(key: str, then: Value, now: Value) -> str:
    """Say in one line what a key was and is."""
    old, new = _show(then), _show(now)
    pairs = enumerate(zip(old, new, strict=False))
    same = next((i for i, (a, b) in pairs if a != b), min(len(old), len(new)))
    # of long values that begin alike, show the part where they differ
    long = max(len(old), len(new)) > _SHOWN and same > _SHOWN - _LEAD
    start = same - _LEAD if long else 0
    return f"{key}: {_cut(old, start)} then, {_cut(new, start)} now"


def diff_plain(
    old: Value, new: Value, path: Path = ()
) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Yield what differs: entry by entry, and item by item in lists of trees."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in dict.fromkeys((*old, *new)):
            pair = old.get(key, ABSENT), new.get(key, ABSENT)
            yield from diff_plain(*pair, (*path, key))
    elif _are_trees(old, new):
        both = zip(cast("list[Json]", old), cast("list[Json]", new), strict=True)
        for i, (item, other) in enumerate(both):
            yield from diff_plain(item, other, (*path, i))
    elif old is ABSENT or new is ABSENT or _dump(old) != _dump(new):
        yield spell_path(path), (old, new)


def _are_trees(old: Value, new: Value) -> bool:
    """Tell whether both are lists of one length that hold lists or mappings."""
    if not (isinstance(old, list) and isinstance(new, list) and len(old) == len(new)):
        return False
    return any(isinstance(item, dict | list) for item in (*old, *new))


def _dump(value: Json) -> str:
    # told apart as text: 1, 1.0 and true are equal, NaN is not equal to itself
    return json.dumps(value, sort_keys=True)
