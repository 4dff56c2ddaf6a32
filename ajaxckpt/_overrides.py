"""Overrides of a saved config: how they are written, and the entries they name.

Pure: knows plain data and the spelling of overrides; decides nothing of what a value
may become.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, cast

from ajaxckpt._differences import (
    ABSENT,
    Path,
    Value,
    parse_value,
    show_plain,
    spell_path,
)
from ajaxckpt._errors import InvalidArgumentError
from ajaxckpt._grammar import clip, quote, type_name
from ajaxckpt._patterns import near_names
from ajaxckpt._plain import Json, plain_json, read_json

ACT = "cannot resume"
_FORM = "write key=value, +key=value to add a key, ~key to remove one"
_FEW = 8
_SEGMENT = r'"(?:[^"\\]|\\.)*+"|[^".=][^.=]*+'
_ITEM = re.compile(
    rf"((?>~|\+{{0,2}}))((?:{_SEGMENT})(?:\.(?:{_SEGMENT}))*+)(=.*)?", re.DOTALL
)
_SEGMENTS = re.compile(_SEGMENT)
_INDEX = re.compile(r"0|[1-9][0-9]{0,8}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Segment:
    text: str
    quoted: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Override:
    """One override, read: how to show it, its sign, its dotted key and its value.

    The value of a removal, whose sign is ``~``, is ``ABSENT``.
    """

    shown: str
    sign: str
    segments: Sequence[_Segment]
    value: Value


def refuse(why: str, hint: str) -> NoReturn:
    """Refuse a config or an override."""
    raise InvalidArgumentError(why, act=ACT, hint=hint)


def read_plain(value: object, argument: str) -> Json:
    """Return JSON-like data as plain data of our own."""
    try:
        return read_json(plain_json(value, argument))
    except InvalidArgumentError as error:
        error.act = ACT
        raise


def list_overrides(overrides: object) -> Iterator[tuple[str, str, object]]:
    """Yield of each override how to show it, its text up to the value, its value."""
    if isinstance(overrides, Mapping):
        for key, value in cast("Mapping[object, object]", overrides).items():
            if not isinstance(key, str):
                refuse(f"overrides: the key {key!r} is no str", "spell keys as text")
            given = "" if key.startswith("~") else f"={show_plain(cast('Any', value))}"
            yield _shown(key + given), key, value
        return
    if isinstance(overrides, str):
        overrides = [overrides]
    if isinstance(overrides, bytes) or not isinstance(overrides, Iterable):
        why = f"overrides: a {type_name(overrides)} holds no overrides"
        refuse(why, 'pass a list such as ["lr=1e-3"], or a mapping')
    for item in cast("Iterable[object]", overrides):
        if not isinstance(item, str):
            refuse(f"overrides: {item!r:.60} is no str", _FORM)
        yield _shown(item), item, ABSENT


def _shown(text: str) -> str:
    return clip(text if text and text.isprintable() else quote(text))


def read_override(shown: str, text: str, given: object) -> Override:
    """Read one override; ``given`` is a mapping's value, ``ABSENT`` of a text."""
    match = _ITEM.fullmatch(text)
    if match is None:
        refuse(f"{shown}: no override", _FORM)
    sign, key, right = cast("tuple[str, str, str | None]", match.groups())
    segments = _read_segments(shown, key)
    if sign == "~":
        if right is not None or not (given is ABSENT or given is None):
            refuse(f"{shown}: a removal takes no value", f"write ~{clip(key)}")
        value = ABSENT
    elif (right is None) is (given is ABSENT):
        refuse(f"{shown}: no override", _FORM)
    else:
        value = read_plain(given if right is None else _parse(shown, right[1:]), shown)
    return Override(shown=shown, sign=sign, segments=segments, value=value)


def _read_segments(shown: str, key: str) -> list[_Segment]:
    segments: list[_Segment] = []
    for text in cast("list[str]", _SEGMENTS.findall(key)):
        quoted = text.startswith('"')
        try:
            spelled = str(json.loads(text, strict=False)) if quoted else text
        except ValueError:
            hint = "escape in quotes as JSON does"
            refuse(f"{shown}: {clip(text)} is no quoted key", hint)
        segments.append(_Segment(text=spelled, quoted=quoted))
    return segments


def _parse(shown: str, text: str) -> object:
    try:
        return parse_value(text)
    except (ValueError, RecursionError) as error:
        hint = "mend the JSON, or put the whole value in double quotes to make it text"
        refuse(f"{shown}: {str(error).partition(';')[0]:.80}", hint)


def locate(config: dict[str, Json], override: Override) -> tuple[Path, Json]:
    """Return the path that an override names, and the saved value there."""
    node: Json = config
    path: Path = ()
    adds = override.sign == "+"
    for at, segment in enumerate(override.segments):
        rest = [item.text for item in override.segments[at:]]
        _check_parent(override, path, node, last=len(rest) == 1)
        key = _find_key(node, segment)
        if key is None and adds and len(rest) == 1:
            return (*path, segment.text), None
        if key is None:
            refuse_unknown(config, override, path, rest)
        node, path = cast("Any", node)[key], (*path, key)
    if adds:
        why = f"{override.shown}: {spell_path(path)} is there already"
        refuse(why, "leave out the + to override it")
    return path, node


def _check_parent(override: Override, path: Path, node: Json, *, last: bool) -> None:
    name = spell_path(path)
    if not isinstance(node, dict | list):
        why = f"{override.shown}: {name} was {show_plain(node)}, which has no keys"
        refuse(why, f"override {name} itself")
    if last and override.sign in ("+", "~") and isinstance(node, list):
        why = f"{override.shown}: {name} is a list"
        refuse(why, f"override the list as a whole: {name}=[…]")


def _find_key(node: Json, segment: _Segment) -> str | int | None:
    """Return the key or index of a node that a segment names, if it has it."""
    if isinstance(node, dict):
        return segment.text if segment.text in node else None
    if isinstance(node, list) and not segment.quoted:
        if _INDEX.fullmatch(segment.text) and int(segment.text) < len(node):
            return int(segment.text)
    return None


def refuse_unknown(
    config: dict[str, Json], override: Override, path: Path, rest: Sequence[str]
) -> NoReturn:
    """Refuse a key that the config has not below a path, with the nearest it has."""
    parent = look_up(config, path)
    if isinstance(parent, list):
        size = f"{spell_path(path)} is a list of {len(cast('list[Json]', parent))}"
        hint = "count its items from 0, or override the list as a whole"
        refuse(f"{override.shown}: no such item: {size}", hint)
    missing = clip(spell_path((*path, rest[0])))
    hints = list(_name_keys(config, spell_path((*path, *rest)), path, parent))
    if override.sign != "~":
        hints.append(f"write +{missing}={'{…}' if rest[1:] else '…'} to add it")
    hint = ", or ".join(hints) or "leave it out: there are no keys there"
    refuse(f"{override.shown}: the config has no {missing}", hint)


def _name_keys(
    config: dict[str, Json], asked: str, path: Path, parent: dict[str, Json]
) -> Iterator[str]:
    """Say which keys may be meant: those spelled alike, else those that are there."""
    if near := near_names(asked, [spell_path(leaf) for leaf in _list_leaves(config)]):
        yield f"use {' or '.join(map(clip, near))}"
    elif parent:
        there = ", ".join(clip(spell_path((*path, key))) for key in list(parent)[:_FEW])
        more = f" and {len(parent) - _FEW} more" if len(parent) > _FEW else ""
        yield f"the keys there are {there}{more}"


def look_up(config: dict[str, Json], path: Path) -> Any:
    """Return the value at a path."""
    node: Any = config
    for key in path:
        node = node[key]
    return node


def _list_leaves(node: Json, path: Path = ()) -> Iterator[Path]:
    if not (isinstance(node, dict | list) and node):
        yield path
        return
    items = node.items() if isinstance(node, dict) else enumerate(node)
    for key, item in items:
        yield from _list_leaves(item, (*path, key))
