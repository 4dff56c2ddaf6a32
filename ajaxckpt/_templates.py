"""Captures: what the stars of a pattern stood for, filled into another name.

Knows the grammar of names and patterns; knows nothing of what the leaves are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ajaxckpt._errors import MigrationError
from ajaxckpt._grammar import SEGMENT, show
from ajaxckpt._names import is_canonical, join_names
from ajaxckpt._patterns import split_pattern, translate

_HOLE = re.compile(r"\{([0-9]+|index)\}")
INDEX = "index"


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """Where a pattern met a name.

    Attributes:
        node: the leaf or node that the pattern spells.
        captures: what each star stood for.
        rest: the part of the name below the node.
    """

    node: str
    captures: tuple[str, ...]
    rest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A pattern whose stars are captured, made by ``parse_source``.

    Attributes:
        text: the pattern as it was written.
        stars: how many stars it has.
    """

    text: str
    stars: int
    _regex: re.Pattern[str] = field(repr=False)

    def match(self, name: str) -> Match | None:
        """Return where the pattern meets a (canonical) name; leftmost, shortest."""
        found = self._regex.match(name)
        if found is None:
            return None
        captures = tuple((text or "").lstrip(".") for text in found.groups())
        rest = name[found.end() :].removeprefix(".")
        return Match(node=found[0], captures=captures, rest=rest)

    def find(self, names: Iterable[str]) -> dict[str, Match]:
        """Return the names that the pattern selects, with where it met them."""
        found = ((name, self.match(name)) for name in names)
        return {name: match for name, match in found if match is not None}


def parse_source(text: object, argument: str = "pattern") -> Source:
    """Read a pattern for its captures.

    Raises:
        InvalidArgumentError: a segment is neither a star nor spelled as in a name.
    """
    segments = split_pattern(text, argument)
    regex = re.compile(translate(segments, capture=True))
    return Source(text=str(text), stars=regex.groups, _regex=regex)


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """A name with holes ``{1}``, ``{2}`` for captures, made by ``parse_template``."""

    text: str
    segments: tuple[str, ...]

    def fill(
        self, captures: Sequence[str], rest: str = "", index: int | None = None
    ) -> str:
        """Return the name for these captures, with the rest below it.

        Raises:
            MigrationError: the filled text is no leaf name.
        """
        values = {str(place): text for place, text in enumerate(captures, 1)}
        if index is not None:
            values[INDEX] = str(index)
        filled = (_fill_segment(item, values) for item in self.segments)
        return join_names(*filled, rest)

    @property
    def holes(self) -> set[str]:
        """The captures it asks for: ``1``, ``2``, … or ``index``."""
        return {hole for item in self.segments for hole in _holes(item)}


def _holes(segment: str) -> list[str]:
    return [] if segment[0] in '"<' else _HOLE.findall(segment)


def _fill_segment(segment: str, values: dict[str, str]) -> str:
    holes = _holes(segment)
    if not holes:
        return segment
    if segment == "{" + holes[0] + "}":  # as it was spelled, several segments or none
        return values[holes[0]]
    filled = _HOLE.sub(lambda hole: values[hole[1]], segment)
    if not is_canonical(filled) or len(SEGMENT.findall(filled)) != 1:
        raise MigrationError(
            f"{show(segment)} becomes {show(filled)}, which is no name"
        )
    return filled


def parse_template(text: object, *, stars: int, argument: str = "target") -> Template:
    """Read a name with holes.

    Args:
        text: the name, such as ``{1}.trunk.Dense_0``.
        stars: how many captures there are to fill in.
        argument: what the caller's user knows it as, for messages.

    Raises:
        MigrationError: it is not spelled as a name, or asks for more captures.
    """
    if not isinstance(text, str):
        raise MigrationError(f"{argument}: expected a str, found {text!r}")
    segments = tuple(SEGMENT.findall(text))
    joined = ".".join(segments) == text
    for segment in segments:
        plain = segment if segment[0] in '"<' else _HOLE.sub("x", segment)
        if not joined or not is_canonical(plain):
            hint = "write names and holes such as {1} between dots"
            raise MigrationError(f"{argument}={show(text)} is no leaf name", hint=hint)
    template = Template(text=text, segments=segments)
    for hole in sorted(template.holes - {INDEX}):
        if not 1 <= int(hole) <= stars:
            problem = f"{argument}={show(text)} asks for {{{hole}}} of {stars} stars"
            raise MigrationError(problem, hint="one {n} for the n-th star")
    return template
