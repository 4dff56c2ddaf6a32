"""The config of a resumed run: the saved one with explicit overrides, and what differs.

Pure: knows what an override may change and the types it must keep; writes nothing and
knows no jax.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ajaxckpt._differences import (
    ABSENT,
    Path,
    Value,
    describe_difference,
    diff_plain,
    show_plain,
    spell_path,
)
from ajaxckpt._errors import InvalidArgumentError
from ajaxckpt._grammar import type_name
from ajaxckpt._overrides import (
    ACT,
    Override,
    list_overrides,
    locate,
    look_up,
    read_override,
    read_plain,
    refuse,
    refuse_unknown,
)
from ajaxckpt._plain import Json
from ajaxckpt._reader import Checkpoint

# above it, floats skip integers: the digits given might not be the ones meant
_EXACT = 2**53
# how messages call the types of plain data, and how each is written
_KINDS: Mapping[type, tuple[str, str]] = {
    bool: ("bool", "write true or false"),
    int: ("int", "write an integer"),
    float: ("float", "write a number such as 3e-4, or Infinity, -Infinity or NaN"),
    str: (
        "str",
        """write the text in double quotes that the shell leaves: 'key="8"'""",
    ),
    list: ("list", "write a JSON list such as [0, 1]"),
    dict: ("mapping", "override its entries by their dotted keys"),
}

Differences = dict[str, tuple[Any, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Change:
    """One entry to set, add or (``ABSENT``) remove; and the override it is of."""

    shown: str
    path: Path
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
    for shown, text, given in list_overrides(overrides):
        try:
            changes += _list_changes(before, read_override(shown, text, given))
        except InvalidArgumentError as error:
            problems.append(error)
    if problems := problems or list(_find_overlaps(changes)):
        raise _join(problems)
    config = copy.deepcopy(before)
    for change in changes:
        _apply(config, change)
    checked = read_plain(config, "config")  # may be nested too deep by now
    return config, dict(diff_plain(before, checked))


def describe_differences(differences: Mapping[str, tuple[Any, Any]]) -> list[str]:
    """Say in one line each what differs between the saved config and the one of now.

    Args:
        differences: what ``resume_config`` returned.

    Example:
        >>> _, differences = resume_config({"lr": 3e-4}, ["lr=1e-3", "+note=warm"])
        >>> describe_differences(differences)
        ['lr: 0.0003 then, 0.001 now', 'note: absent then, warm now']
    """
    return [describe_difference(key, *pair) for key, pair in differences.items()]


def _join(problems: Sequence[InvalidArgumentError]) -> InvalidArgumentError:
    if len(problems) == 1:
        return problems[0]
    lines = [f"{error.problem} ({error.hint})" for error in problems]
    text = f"{len(problems)} overrides are refused"
    hint = "mend each as its line says; nothing was changed"
    return InvalidArgumentError(text, act=ACT, details=lines, hint=hint)


def _read_saved(saved: object) -> dict[str, Json]:
    config = saved.config if isinstance(saved, Checkpoint) else saved
    if config is None:
        hint = "save with config=…, or pass the config of then, such as {}"
        refuse("no config was saved", hint)
    plain = read_plain(config, "config")
    if not isinstance(plain, dict):
        why = f"config: a {type_name(saved)} is neither a mapping nor a dataclass"
        refuse(why, "pass a dict, a dataclass instance or an open checkpoint")
    return plain


def _list_changes(config: dict[str, Json], override: Override) -> list[_Change]:
    """Return the changes that an override asks for."""
    path, old = locate(config, override)
    if override.sign or override.value is ABSENT:
        return [_Change(shown=override.shown, path=path, value=override.value)]
    return list(_set(config, override, path, old, override.value))


def _set(
    config: dict[str, Json], override: Override, path: Path, old: Json, new: Json
) -> Iterator[_Change]:
    """Yield what an override changes: of a mapping, the entries it names."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        value = _follow(override.shown, path, old, new)
        yield _Change(shown=override.shown, path=path, value=value)
        return
    if old and not new:
        hint = f"remove entries one by one: ~{spell_path((*path, next(iter(old))))}"
        refuse(f"{override.shown}: an empty mapping overrides no entry", hint)
    for key, item in new.items():
        if key not in old:
            refuse_unknown(config, override, path, (key,))
        yield from _set(config, override, (*path, key), old[key], item)


def _follow(shown: str, path: Path, old: Json, new: Json) -> Json:
    """Return a value as the type of the saved one."""
    if old is None or new is None:
        return new
    if isinstance(old, list) and isinstance(new, list):
        return _follow_items(shown, path, old, new)
    if type(old) is type(new):
        return new
    if type(old) is int and type(new) is float and new.is_integer():
        return _as_int(shown, new)
    if type(old) is float and type(new) is int:
        return _as_float(shown, new)
    (kind, form), (other, _) = _KINDS[type(old)], _KINDS[type(new)]
    was = f"{spell_path(path)} was {show_plain(old)} ({kind})"
    hint = f"{form}, or put ++ before the key to change the type"
    refuse(f"{shown}: {was}, this is of type {other}", hint)


def _as_int(shown: str, value: float) -> int:
    if abs(value) > _EXACT:
        refuse(f"{shown}: a float so large is not exact", "write all its digits")
    return int(value)


def _as_float(shown: str, value: int) -> float:
    try:
        return float(value)
    except OverflowError:
        hint = "write a smaller number, or Infinity"
        refuse(f"{shown}: an int beyond all floats", hint)


def _follow_items(
    shown: str, path: Path, old: list[Json], new: list[Json]
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
        _follow(shown, (*path, i), item, value)
        for (i, item), value in zip(saved, new, strict=True)
    ]


def _find_overlaps(changes: Sequence[_Change]) -> Iterator[InvalidArgumentError]:
    """Yield overrides of the same key, or of a key and of one in it."""
    firsts: dict[Path, _Change] = {}
    for change in changes:
        firsts.setdefault(change.path, change)
    for change in changes:
        ends = range(1, len(change.path) + 1)
        for first in filter(None, (firsts.get(change.path[:end]) for end in ends)):
            if first is not change:
                both = f"{first.shown} and {change.shown} are both about"
                why, hint = f"{both} {spell_path(change.path)}", "give each key once"
                yield InvalidArgumentError(why, act=ACT, hint=hint)


def _apply(config: dict[str, Json], change: _Change) -> None:
    *above, last = change.path
    parent = look_up(config, tuple(above))
    if change.value is ABSENT:
        del parent[last]
    else:
        parent[last] = change.value
