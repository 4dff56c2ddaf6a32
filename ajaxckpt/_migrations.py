"""The registry of migrations: how files of older layouts become today's.

A value, passed to save and restore; nothing is global. Pure: knows layouts, names and
rules; reads nothing, and knows nothing of pytrees or files.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

from ajaxckpt._entries import (
    Condition,
    Entry,
    has_expired,
    parse_release,
    parse_until,
    show_until,
)
from ajaxckpt._errors import InvalidArgumentError, MigrationError
from ajaxckpt._grammar import type_name
from ajaxckpt._rules import Rules


class Migrations:
    """A named registry of the changes that a state's layout went through.

    Two kinds of entry. *Numbered steps* lead from the layout version recorded in the
    file (0 where the registry is not recorded) to the newest; every verb of a step
    must find something. *Structural rules* apply, after the steps, where the saved
    layout shows the old shape: where their condition holds, or, without one, where
    their first verb finds something.

    Attributes:
        name: the name under which a save records the version.
        release: the release of the code that the registry belongs to, for ``until``.

    Example:
        >>> migrations = Migrations("agent")
        >>> migrations.step(1, "a trunk").move("params.Dense_0", "params.trunk")
        <Rules agent step 1 "a trunk": 1 verb>
        >>> print(migrations)
        agent: layout version 1
          1  a trunk
               move params.Dense_0 to params.trunk
    """

    def __init__(self, name: str, *, release: str | None = None) -> None:
        """Begin an empty registry.

        Args:
            name: its name, the same for ever: files record it.
            release: the code's release, such as ``0.4.0``; ``until`` may name one.

        Raises:
            MigrationError: no name, or a release that is not made of numbers.
        """
        if type(name) is not str or not name or not name.isprintable():  # pyright: ignore[reportUnnecessaryComparison]
            problem = f"Migrations({name!r}): expected a name"
            raise MigrationError(problem, act="cannot register", hint='such as "sac"')
        self.name = name
        self.release = release
        self._release = None if release is None else parse_release(release)
        self._steps: list[Entry] = []
        self._rules: list[Entry] = []

    def __repr__(self) -> str:
        """Show the name and how much there is."""
        counts = f"version {self.version}, {len(self._rules)} rules"
        return f"<Migrations {self.name}: {counts}>"

    def __str__(self) -> str:
        """Render the changelog of the layout: newest step first, then the rules."""
        lines = [f"{self.name}: layout version {self.version}"]
        for entry in (*reversed(self._steps), *self._rules):
            mark = str(entry.number) if entry.number else "-"
            lines.append(f"  {mark:<2} {entry.reason}{self._ending(entry)}")
            lines += [f"       {verb.text}" for verb in entry.verbs]
        return "\n".join(lines)

    @property
    def version(self) -> int:
        """The newest layout version: the number of the last step, 0 without."""
        return len(self._steps)

    @property
    def entries(self) -> Sequence[Entry]:
        """The steps in order, then the rules in order."""
        return (*self._steps, *self._rules)

    def step(self, number: int, reason: str, *, until: Any = None) -> Rules:
        """Register the next numbered step: what led to this layout version.

        Args:
            number: the version it leads to: 1, then 2, and so on.
            reason: why the layout changed; the changelog and errors show it.
            until: the date or release from which on it is refused.

        Raises:
            MigrationError: the number leaves a gap or is taken; no reason.
        """
        expected = self.version + 1
        if type(number) is not int or number != expected:  # pyright: ignore[reportUnnecessaryComparison]
            taken = type(number) is int and 0 < number < expected  # pyright: ignore[reportUnnecessaryComparison]
            why = "is registered already" if taken else "leaves a gap"
            problem = f"{self.name}: step {number!r} {why}"
            hint = f"the next step is {expected}"
            raise MigrationError(problem, act="cannot register", hint=hint)
        entry = self._entry(number, reason, None, until)
        self._steps.append(entry)
        return Rules(entry)

    def rule(
        self, reason: str, *, when: Condition | None = None, until: Any = None
    ) -> Rules:
        """Register a structural rule: it applies where the old shape shows.

        Args:
            reason: why the layout changed; the changelog and errors show it.
            when: looks at a ``View`` (file and skeleton layout, config, step); where
                it holds, every verb must find something.
            until: the date or release from which on it is refused.

        Raises:
            MigrationError: no reason, or one that is registered.
        """
        if when is not None and not callable(when):
            problem = f"{self.name}: when={when!r} cannot be called"
            raise MigrationError(problem, act="cannot register")
        entry = self._entry(0, reason, when, until)
        self._rules.append(entry)
        return Rules(entry)

    def _entry(
        self, number: int, reason: str, when: Condition | None, until: Any
    ) -> Entry:
        if type(reason) is not str or not reason.strip():  # pyright: ignore[reportUnnecessaryComparison]
            problem = f"{self.name}: expected a reason, found {reason!r}"
            raise MigrationError(problem, act="cannot register", hint="say why")
        if any(entry.reason == reason for entry in self.entries):
            problem = f"{self.name}: the reason {reason!r} is registered already"
            raise MigrationError(
                problem, act="cannot register", hint="say what differs"
            )
        ends = parse_until(until)
        if isinstance(ends, tuple) and self._release is None:
            problem = f"{self.name}: until={until!r} needs the release of the code"
            hint = f'pass Migrations("{self.name}", release=your_package.__version__)'
            raise MigrationError(problem, act="cannot register", hint=hint)
        kind = f"step {number}" if number else "rule"
        title = f'{self.name} {kind} "{reason}"'
        return Entry(title=title, number=number, reason=reason, when=when, until=ends)

    def _ending(self, entry: Entry) -> str:
        if entry.until is None:
            return ""
        verb = "ended" if self.has_expired(entry) else "until"
        return f" ({verb} {show_until(entry.until)})"

    def has_expired(self, entry: Entry) -> bool:
        """Tell whether an entry has ended: from its date, or its release, on."""
        return has_expired(entry, self._release)


def as_registries(migrations: object) -> tuple[Migrations, ...]:
    """Return the registries of an argument: none, one, or several.

    Raises:
        InvalidArgumentError: something else, or two of one name.
    """
    if migrations is None:
        return ()
    if isinstance(migrations, Migrations):
        return (migrations,)
    several = isinstance(migrations, Iterable) and not isinstance(migrations, str)
    given = cast("Any", migrations)
    items: tuple[object, ...] = tuple(given) if several else (given,)
    registries = tuple(item for item in items if isinstance(item, Migrations))
    if len(registries) != len(items):
        wrong = next(item for item in items if not isinstance(item, Migrations))
        problem = f"migrations: expected registries, found {type_name(wrong)}"
        raise InvalidArgumentError(problem, hint='pass a Migrations("name") or several')
    names = [registry.name for registry in registries]
    if len(set(names)) < len(names):
        problem = f"migrations: two registries have one name: {', '.join(names)}"
        raise InvalidArgumentError(problem, hint="give each its own name")
    return registries


def record_versions(registries: Sequence[Migrations]) -> dict[str, int]:
    """Return what a save records: the newest version per registry."""
    return {registry.name: registry.version for registry in registries}
