"""The config of a resumed run: the saved one with explicit overrides, and what differs.

Pure: knows plain data and the spelling of overrides; writes nothing and knows no jax.
"""

from __future__ import annotations

import copy
import enum
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, cast

from ajaxckpt._errors import InvalidArgumentError
from ajaxckpt._grammar import clip, quote, type_name
from ajaxckpt._names import format_key
from ajaxckpt._patterns import near_names
from ajaxckpt._plain import Json, plain_json, read_json
from ajaxckpt._reader import Checkpoint

_ACT = "cannot resume"
_FORM = "write key=value, +key=value to add a key, ~key to remove one"
# above it, floats skip integers: the digits given might not be the ones meant
_EXACT = 2**53
_SHOWN = 60
_LEAD = 20
_FEW = 8
_SEGMENT = r'"(?:[^"\\]|\\.)*+"|[^".=][^.=]*+'
_ITEM = re.compile(
    rf"((?>~|\+{{0,2}}))((?:{_SEGMENT})(?:\.(?:{_SEGMENT}))*+)(=.*)?", re.DOTALL
)
_SEGMENTS = re.compile(_SEGMENT)
_INDEX = re.compile(r"0|[1-9][0-9]{0,8}")
_WORDS: Mapping[str, bool | None] = {"True": True, "False": False, "None": None}
_NAMED: Mapping[type, str] = {
    **{type(None): "null", bool: "bool", int: "int", float: "float", str: "str"},
    **{list: "list", dict: "mapping"},
}


class Absent(enum.Enum):
    """The type of ``ABSENT``, which stands for a key that one side has not."""

    ABSENT = "absent"

    def __repr__(self) -> str:
        """Show it as one word."""
        return self.value


ABSENT: Literal[Absent.ABSENT] = Absent.ABSENT

Value = Json | Literal[Absent.ABSENT]
Differences = dict[str, tuple[Any, Any]]
_Path = tuple[str | int, ...]
# texts that stand for something else where a value is shown
_RESERVED = ("", "absent", "none", "nan", "inf", "-inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Change:
    """One entry to set, add or (``ABSENT``) remove; and the override it is of."""

    override: str
    path: _Path
    value: Value


def resume_config(
    saved: object, overrides: str | Iterable[str] | Mapping[str, object] = ()
) -> tuple[dict[str, Any], Differences]:
    """Return the saved config with overrides, and what differs from the saved one.

    An override ``key=value`` sets a key that is there, ``++key=value`` replaces its
    value by one of any type, ``+key=value`` adds a key, ``~key`` removes one. Dots
    lead into mappings, numbers into lists (``layers.0.width=64``); a key that holds a
    dot or an equals sign, or begins with a sign, stands in double quotes. All are
    about the saved config: their order does not matter.

    A value is read as JSON, or ``True``, ``False``, ``None``, else it is text; in a
    mapping of overrides it is taken as it is. It must be of the saved value's type:
    an integer may stand for a float, an integral float (``1e6``) for an int, and
    null for anything. A mapping overrides the entries it names and leaves the
    others; a list replaces the list.

    Args:
        saved: the config: a mapping or dataclass, what ``run.config`` returns, or an
            open checkpoint that was saved with one.
        overrides: texts such as a command line's, or a mapping from key to value.

    Returns:
        The config as plain data of its own, and a mapping from dotted key to the pair
        (saved, now) in the config's order; the side that lacks a key shows ``ABSENT``.

    Raises:
        InvalidArgumentError: there is no config, or an override is malformed, names
            an unknown key, or is of another type; names each one that is refused.

    Example:
        >>> saved = {"lr": 3e-4, "env": "Pendulum-v1"}
        >>> resume_config(saved, ["lr=1e-3"])
        ({'lr': 0.001, 'env': 'Pendulum-v1'}, {'lr': (0.0003, 0.001)})
    """
    before = _read_saved(saved)
    changes: list[_Change] = []
    problems: list[InvalidArgumentError] = []
    for override, key, value in _list_overrides(overrides):
        try:
            changes += _read_override(before, override, key, value)
        except InvalidArgumentError as error:
            problems.append(error)
    if problems := problems or list(_find_overlaps(changes)):
        raise _join(problems)
    config = copy.deepcopy(before)
    for change in changes:
        _apply(config, change)
    checked = _read_plain(config, "config")  # may be nested too deep by now
    return config, dict(_compare(before, checked, ()))


def describe_differences(differences: Mapping[str, tuple[Any, Any]]) -> list[str]:
    """Say in one line each what differs between the saved config and the one of now.

    Args:
        differences: what ``resume_config`` returned.

    Example:
        >>> _, differences = resume_config({"lr": 3e-4}, ["lr=1e-3", "+note=warm"])
        >>> describe_differences(differences)
        ['lr: 0.0003 then, 0.001 now', 'note: absent then, warm now']
    """
    return [_describe(key, *pair) for key, pair in differences.items()]


def _describe(key: str, then: Any, now: Any) -> str:
    old, new = _show(then), _show(now)
    pairs = enumerate(zip(old, new, strict=False))
    same = next((i for i, (a, b) in pairs if a != b), min(len(old), len(new)))
    # of long values that begin alike, show the part where they differ
    long = max(len(old), len(new)) > _SHOWN and same > _SHOWN - _LEAD
    start = same - _LEAD if long else 0
    return f"{key}: {_cut(old, start)} then, {_cut(new, start)} now"


def _cut(text: str, start: int = 0) -> str:
    end = start + _SHOWN
    return ("…" if start else "") + text[start:end] + ("…" if text[end:] else "")


def _show(value: Any) -> str:
    """Show a value; a text without quotes where it can be mistaken for nothing else."""
    if value is ABSENT or value is None:
        return "absent" if value is ABSENT else "none"
    if not isinstance(value, str):
        return repr(value)
    plain = value.isprintable() and value.strip() == value and value not in _RESERVED
    return (
        value if plain and value[0] not in "[{\"'" and _is_text(value) else quote(value)
    )


def _is_text(value: str) -> bool:
    try:
        return _parse_value(value) == value
    except ValueError:
        return False


def _refuse(why: str, hint: str) -> NoReturn:
    raise InvalidArgumentError(why, act=_ACT, hint=hint)


def _join(problems: Sequence[InvalidArgumentError]) -> InvalidArgumentError:
    if len(problems) == 1:
        return problems[0]
    lines = [f"{error.problem} ({error.hint})" for error in problems]
    text = f"{len(problems)} overrides are refused"
    hint = "mend each as its line says; nothing was changed"
    return InvalidArgumentError(text, act=_ACT, details=lines, hint=hint)


def _read_plain(value: object, argument: str) -> Json:
    """Return JSON-like data as plain data of our own."""
    try:
        return read_json(plain_json(value, argument))
    except InvalidArgumentError as error:
        error.act = _ACT
        raise


def _read_saved(saved: object) -> dict[str, Json]:
    config = saved.config if isinstance(saved, Checkpoint) else saved
    if config is None:
        hint = "save with config=…, or pass the config of then, such as {}"
        _refuse("no config was saved", hint)
    plain = _read_plain(config, "config")
    if not isinstance(plain, dict):
        why = f"config: a {type_name(saved)} is neither a mapping nor a dataclass"
        _refuse(why, "pass a dict, a dataclass instance or an open checkpoint")
    return plain


def _list_overrides(overrides: object) -> Iterator[tuple[str, str, object]]:
    """Yield of each override how to show it, its text up to the value, its value."""
    if isinstance(overrides, Mapping):
        for key, value in cast("Mapping[object, object]", overrides).items():
            if not isinstance(key, str):
                _refuse(f"overrides: the key {key!r} is no str", "spell keys as text")
            shown = f"{key}" if key.startswith("~") else f"{key}={_cut(_show(value))}"
            yield _shown(shown), key, value
        return
    if isinstance(overrides, str):
        overrides = [overrides]
    if isinstance(overrides, bytes) or not isinstance(overrides, Iterable):
        why = f"overrides: a {type_name(overrides)} holds no overrides"
        _refuse(why, 'pass a list such as ["lr=1e-3"], or a mapping')
    for item in cast("Iterable[object]", overrides):
        if not isinstance(item, str):
            _refuse(f"overrides: {item!r:.60} is no str", _FORM)
        yield _shown(item), item, ABSENT


def _shown(text: str) -> str:
    return clip(text if text and text.isprintable() else quote(text))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Segment:
    text: str
    quoted: bool


def _read_override(
    config: dict[str, Json], override: str, text: str, given: object
) -> list[_Change]:
    """Return the changes one override asks for; ``given`` is a mapping's value."""
    match = _ITEM.fullmatch(text)
    if match is None:
        _refuse(f"{override}: no override", _FORM)
    sign, key, right = cast("tuple[str, str, str | None]", match.groups())
    segments = _read_segments(override, key)
    if sign == "~":
        if right is not None or not (given is ABSENT or given is None):
            _refuse(f"{override}: a removal takes no value", f"write ~{clip(key)}")
        path, _ = _locate(config, override, sign, segments)
        return [_Change(override=override, path=path, value=ABSENT)]
    if (right is None) is (given is ABSENT):
        _refuse(f"{override}: no override", _FORM)
    value = _read_value(override, given, right)
    path, old = _locate(config, override, sign, segments)
    if sign:
        return [_Change(override=override, path=path, value=value)]
    return list(_set(config, override, path, old, value))


def _read_segments(override: str, key: str) -> list[_Segment]:
    segments: list[_Segment] = []
    for text in _SEGMENTS.findall(key):
        quoted = text.startswith('"')
        try:
            spelled = str(json.loads(text, strict=False)) if quoted else str(text)
        except ValueError:
            hint = "escape in quotes as JSON does"
            _refuse(f"{override}: {clip(text)} is no quoted key", hint)
        segments.append(_Segment(text=spelled, quoted=quoted))
    return segments


def _read_value(override: str, given: object, right: str | None) -> Json:
    """Return the value of an override: a mapping's as it is, or that of a text."""
    if right is None:
        return _read_plain(given, override)
    try:
        value = _parse_value(right[1:])
    except (ValueError, RecursionError) as error:
        hint = "mend the JSON, or put the whole value in double quotes to make it text"
        _refuse(f"{override}: {str(error).partition(';')[0]:.80}", hint)
    return _read_plain(value, override)


def _parse_value(text: str) -> Any:
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


def _spell(path: Iterable[str | int]) -> str:
    """Join keys to a dotted key as an override can be written."""
    return ".".join(
        quote(key)
        if isinstance(key, str) and (key.startswith(("+", "~")) or "=" in key)
        else format_key(key)
        for key in path
    )


def _find_key(node: Json, segment: _Segment) -> str | int | None:
    """Return the key or index of a node that a segment names, if it has it."""
    if isinstance(node, dict):
        return segment.text if segment.text in node else None
    if isinstance(node, list) and not segment.quoted:
        if _INDEX.fullmatch(segment.text) and int(segment.text) < len(node):
            return int(segment.text)
    return None


def _locate(
    config: dict[str, Json], override: str, sign: str, segments: Sequence[_Segment]
) -> tuple[_Path, Json]:
    """Return the path that an override names, and the saved value there."""
    node: Json = config
    path: _Path = ()
    for at, segment in enumerate(segments):
        name, last = _spell(path), at == len(segments) - 1
        if not isinstance(node, dict | list):
            why = f"{override}: {name} was {_cut(_show(node))}, which has no keys"
            _refuse(why, f"override {name} itself")
        if last and sign in ("+", "~") and isinstance(node, list):
            why = f"{override}: {name} is a list"
            _refuse(why, f"override the list as a whole: {name}=[…]")
        key = _find_key(node, segment)
        if key is None:
            if last and sign == "+":
                return (*path, segment.text), None
            rest = [item.text for item in segments[at + 1 :]]
            _refuse_unknown(config, override, path, (segment.text, *rest), sign)
        node, path = cast("Any", node)[key], (*path, key)
    if sign == "+":
        why = f"{override}: {_spell(path)} is there already"
        _refuse(why, "leave out the + to override it")
    return path, node


def _refuse_unknown(
    config: dict[str, Json],
    override: str,
    path: _Path,
    rest: Sequence[str],
    sign: str = "",
) -> NoReturn:
    """Refuse a key that the config has not, with the nearest ones it has."""
    asked = _spell((*path, *rest))
    parent = cast("dict[str, Json] | list[Json]", _get(config, path))
    if isinstance(parent, list):
        size = f"{_spell(path)} is a list of {len(parent)}"
        hint = "count its items from 0, or override the list as a whole"
        _refuse(f"{override}: no such item: {size}", hint)
    hints: list[str] = []
    if near := near_names(asked, [_spell(leaf) for leaf in _list_leaves(config, ())]):
        hints.append(f"use {' or '.join(map(clip, near))}")
    elif parent:
        there = ", ".join(clip(_spell((*path, key))) for key in list(parent)[:_FEW])
        more = f" and {len(parent) - _FEW} more" if len(parent) > _FEW else ""
        hints.append(f"the keys there are {there}{more}")
    if sign != "~":
        value = "{…}" if rest[1:] else "…"
        hints.append(f"write +{clip(_spell((*path, rest[0])))}={value} to add it")
    hint = ", or ".join(hints) or "leave it out: there are no keys there"
    _refuse(f"{override}: the config has no {clip(_spell((*path, rest[0])))}", hint)


def _get(config: dict[str, Json], path: _Path) -> Any:
    node: Any = config
    for key in path:
        node = node[key]
    return node


def _list_leaves(node: Json, path: _Path) -> Iterator[_Path]:
    if not (isinstance(node, dict | list) and node):
        yield path
        return
    items = node.items() if isinstance(node, dict) else enumerate(node)
    for key, item in items:
        yield from _list_leaves(item, (*path, key))


def _set(
    config: dict[str, Json], override: str, path: _Path, old: Json, new: Json
) -> Iterator[_Change]:
    """Yield what an override changes: of a mapping, the entries it names."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        value = _follow(override, path, old, new)
        yield _Change(override=override, path=path, value=value)
        return
    if old and not new:
        why = f"{override}: an empty mapping overrides no entry"
        _refuse(why, f"remove entries one by one: ~{_spell((*path, next(iter(old))))}")
    for key, item in new.items():
        if key not in old:
            _refuse_unknown(config, override, path, (key,))
        yield from _set(config, override, (*path, key), old[key], item)


def _follow(override: str, path: _Path, old: Json, new: Json) -> Json:
    """Return a value as the type of the saved one."""
    if old is None or new is None:
        return new
    if isinstance(old, list) and isinstance(new, list):
        return _follow_items(override, path, old, new)
    if type(old) is type(new):
        return new
    if type(old) is int and type(new) is float and new.is_integer():
        if abs(new) <= _EXACT:
            return int(new)
        _refuse(f"{override}: a float so large is not exact", "write all its digits")
    if type(old) is float and type(new) is int:
        try:
            return float(new)
        except OverflowError:
            why = f"{override}: an int beyond all floats"
            _refuse(why, "write a smaller number, or Infinity")
    name, kind = _spell(path), _NAMED[type(old)]
    why = f"{name} was {_cut(_show(old))} ({kind}), this is of type {_NAMED[type(new)]}"
    hint = f"{_HINTS[kind]}, or put ++ before the key to change the type"
    _refuse(f"{override}: {why}", hint)


_HINTS = {
    "bool": "write true or false",
    "int": "write an integer",
    "float": "write a number such as 3e-4, or Infinity, -Infinity or NaN",
    "str": """write the text in double quotes that the shell leaves: 'key="8"'""",
    "list": "write a JSON list such as [0, 1]",
    "mapping": "override its entries by their dotted keys",
}


def _follow_items(
    override: str, path: _Path, old: list[Json], new: list[Json]
) -> list[Json]:
    """Return a list whose items have the types of the saved ones.

    A list of another length follows the first item, if all were of its type.
    """
    if len(old) == len(new):
        saved = list(enumerate(old))
    elif len({type(item) for item in old}) == 1:
        saved = [(0, old[0])] * len(new)
    else:
        return new
    return [
        _follow(override, (*path, i), item, value)
        for (i, item), value in zip(saved, new, strict=True)
    ]


def _find_overlaps(changes: Sequence[_Change]) -> Iterator[InvalidArgumentError]:
    """Yield overrides of the same key, or of a key and of one in it."""
    seen: dict[_Path, _Change] = {}
    clashes: list[tuple[_Change, _Change]] = []
    for change in changes:
        if change.path in seen:
            clashes.append((seen[change.path], change))
        seen.setdefault(change.path, change)
    for change in changes:
        above = (seen.get(change.path[:end]) for end in range(1, len(change.path)))
        clashes += [(other, change) for other in above if other is not None]
    for first, second in clashes:
        why = f"{first.override} and {second.override} are both about "
        hint = "give each key once"
        yield InvalidArgumentError(why + _spell(second.path), act=_ACT, hint=hint)


def _apply(config: dict[str, Json], change: _Change) -> None:
    *above, last = change.path
    parent = _get(config, tuple(above))
    if change.value is ABSENT:
        del parent[last]
    else:
        parent[last] = change.value


def _compare(
    old: Value, new: Value, path: _Path
) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Yield what differs: entry by entry, and item by item in lists of trees."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in dict.fromkeys((*old, *new)):
            pair = old.get(key, ABSENT), new.get(key, ABSENT)
            yield from _compare(*pair, (*path, key))
    elif _are_trees(old, new):
        both = zip(cast("list[Json]", old), cast("list[Json]", new), strict=True)
        for i, (item, other) in enumerate(both):
            yield from _compare(item, other, (*path, i))
    elif old is ABSENT or new is ABSENT or _dump(old) != _dump(new):
        yield _spell(path), (old, new)


def _are_trees(old: Value, new: Value) -> bool:
    """Tell whether both are lists of one length that hold lists or mappings."""
    if not (isinstance(old, list) and isinstance(new, list) and len(old) == len(new)):
        return False
    return any(isinstance(item, dict | list) for item in (*old, *new))


def _dump(value: Json) -> str:
    # told apart as text: 1, 1.0 and true are equal, NaN is not equal to itself
    return json.dumps(value, sort_keys=True)
