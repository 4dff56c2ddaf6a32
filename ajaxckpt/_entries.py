"""One entry of a registry as data: a numbered step or a structural rule.

Knows when it applies and when it ends; acts on nothing.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ajaxckpt._errors import MigrationError
from ajaxckpt._scopes import Scope, View
from ajaxckpt._templates import Source

Condition = Callable[[View], Any]
_RELEASE = re.compile(r"[0-9]+(\.[0-9]+)*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Verb:
    """One change, on every scope of its rule.

    Attributes:
        text: how the changelog shows it.
        scopes: the nodes it acts under, by pattern; the root where empty.
        act: does it on one scope and tells whether it found something.
        guard: whether it only ever refuses.
        asks_skeleton: whether what it finds depends on the skeleton.
        sources: the patterns of the file's leaves that it looks for.
    """

    text: str
    scopes: tuple[Source, ...]
    act: Callable[[Scope], bool]
    guard: bool = False
    asks_skeleton: bool = False
    sources: tuple[str, ...] = ()


@dataclass(slots=True, kw_only=True)
class Entry:
    """A numbered step or a structural rule.

    Attributes:
        title: how messages call it.
        number: the layout version it leads to; 0 for a structural rule.
        reason: why, in the user's words.
        when: the condition of a structural rule, if any.
        until: when it ends: a date or a release; None if it does not.
        verbs: its verbs in the order they were written.
    """

    title: str
    number: int
    reason: str
    when: Condition | None
    until: datetime.date | tuple[int, ...] | None
    verbs: list[Verb] = field(default_factory=list[Verb])


def parse_until(until: object) -> datetime.date | tuple[int, ...] | None:
    """Read when a rule ends: a date, or a release such as ``0.5``.

    Raises:
        MigrationError: neither.
    """
    if until is None:
        return None
    if isinstance(until, datetime.date):
        return datetime.date(until.year, until.month, until.day)
    text = str(until) if isinstance(until, str) else ""
    if _RELEASE.fullmatch(text):
        return parse_release(text)
    try:
        return datetime.date.fromisoformat(text)
    except ValueError:
        problem = f"until={until!r} is neither a date nor a release"
        hint = 'write until="2027-01-31", or until="0.5" with Migrations(release=…)'
        raise MigrationError(problem, act="cannot register", hint=hint) from None


def parse_release(text: object) -> tuple[int, ...]:
    """Read a release made of numbers, such as ``0.4.1``.

    Raises:
        MigrationError: it is none.
    """
    if not isinstance(text, str) or not _RELEASE.fullmatch(text):
        problem = f"release={text!r} is not made of numbers and dots"
        raise MigrationError(problem, act="cannot register", hint='such as "0.4.1"')
    numbers = [int(part) for part in text.split(".")]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def show_until(until: datetime.date | tuple[int, ...]) -> str:
    """Spell a date or a release."""
    if isinstance(until, tuple):
        return "release " + ".".join(map(str, until))
    return until.isoformat()


def has_expired(entry: Entry, release: tuple[int, ...] | None) -> bool:
    """Tell whether an entry has ended: from its date, or its release, on."""
    if isinstance(entry.until, tuple):
        return release is not None and release >= entry.until
    today = datetime.datetime.now(datetime.UTC).date()
    return entry.until is not None and today >= entry.until
