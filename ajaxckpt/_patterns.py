"""Patterns: how leaves are selected by name, and what to suggest when none is.

Knows the grammar of names; knows nothing of what the leaves are.
"""

from __future__ import annotations

import re
from bisect import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import cast

from ajaxckpt._errors import InvalidArgumentError
from ajaxckpt._grammar import (
    ANY_SEGMENT,
    CHAR,
    EVERYDAY_LENGTH,
    SEGMENT,
    SpellingError,
    clip,
    quote,
    scan,
    scan_segment,
    show,
    type_name,
)
from ajaxckpt._names import is_canonical

# Compiling a pattern of stars takes milliseconds per hundred characters.
_MAX_PATTERN_LENGTH = 1_000
_NEIGHBOURS = 100
_SHOWN_NAMES = 10
_STARRED_RUN = re.compile(rf"(?:\*|{CHAR})*")
_START = r"(?:\A|\.)"
_END = r"(?=\.|\Z)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """A selection of leaves by name, made by ``parse_pattern``.

    Attributes:
        text: the pattern as it was written.
    """

    text: str
    _regex: re.Pattern[str] = field(repr=False)

    def matches(self, name: str) -> bool:
        """Tell whether the pattern selects the leaf of this (canonical) name.

        It selects the leaf that it spells and every leaf below it.
        """
        return self._regex.match(name) is not None


def parse_pattern(text: object, argument: str = "pattern") -> Pattern:
    """Read a pattern: a name in which stars stand for what may vary.

    ``**`` stands for any number of segments, none too; ``*`` for one segment; ``*``
    within a segment for any run of characters of an unquoted one.

    Raises:
        InvalidArgumentError: a segment is neither a star nor spelled as in a name.

    Example:
        >>> parse_pattern("**.Dense_*.kernel").matches("actor.params.Dense_0.kernel")
        True
    """
    segments = split_pattern(text, argument)
    return Pattern(text=str(text), _regex=re.compile(translate(segments)))


def split_pattern(text: object, argument: str = "pattern") -> list[str]:
    """Check a pattern's spelling without the cost of compiling it.

    Raises:
        InvalidArgumentError: a segment is neither a star nor spelled as in a name.
    """
    if not isinstance(text, str):
        found = type_name(text)
        raise InvalidArgumentError(f"{argument}: expected a str pattern, found {found}")
    if len(text) > _MAX_PATTERN_LENGTH:
        limit = f"longer than {_MAX_PATTERN_LENGTH} characters"
        raise InvalidArgumentError(f"{argument}={show(text)} is {limit}")
    segments: list[str] = []
    try:
        segments.extend(scan(text, _scan_pattern_segment))
    except SpellingError as error:
        problem = f"{argument}={show(text, error.position)} is not a pattern"
        place = f"position {error.position}: {error.problem}"
        start = sum(len(segment) + 1 for segment in segments)
        hint = _suggest_spelling(text, start)
        raise InvalidArgumentError(f"{problem}: {place}", hint=hint) from None
    return segments


def _scan_pattern_segment(text: str, start: int) -> int:
    run = _STARRED_RUN.match(text, start)
    if run is None or "*" not in run[0]:
        return scan_segment(text, start)
    if "**" in run[0] and run[0] != "**":
        problem = '"**" stands alone between dots; within a segment write "*"'
        raise SpellingError(text, start + run[0].index("**"), problem)
    return run.end()


def _suggest_spelling(text: str, start: int) -> str:
    if text[start : start + 1] in ('"', "<"):
        return "copy the segment as the leaf's name spells it"
    if (plain := _spell_path(text)) is not None:
        return f"write {clip(plain)}"
    segment = text[start:].partition(".")[0]
    if "**" in segment:
        return f"write {clip(re.sub(r'[*]+', '*', segment))}"
    return f"quote the segment: {clip(quote(segment))}"


def _spell_path(text: str) -> str | None:
    """Return the name meant by a key path such as ['a'][0].b, or by stray dots."""
    dotted = re.sub(r"\[(['\"]?)([^]'\"]*)\1\]", r".\2", text)
    name = re.sub(r"\.{2,}", ".", dotted).strip(".")
    changed = name and name != text
    return name if changed and is_canonical(name) else None


def translate(segments: Iterable[str], *, capture: bool = False) -> str:
    """Compile to one regex whose match at the start of a name is a selection.

    After ``**`` the first place where the next block fits is as good as any, since
    whatever follows the last block is selected too. So no block is tried again once
    it fits, and no pattern makes matching slower than length times blocks.

    Args:
        segments: the pattern's, as ``split_pattern`` gives them.
        capture: whether each star becomes a group.
    """
    group = "(" if capture else "(?:"
    blocks: list[list[str]] = [[]]
    for segment in segments:
        if segment == "**":
            blocks.append([])
        else:
            translated = _translate_segment(segment, group)
            blocks[-1].append(f"{_START}{translated}{_END}")
    first, *others = map("".join, blocks)
    skip = f"{group}(?:{_START}{ANY_SEGMENT})*?)"
    return first + "".join(f"(?>{skip}{block})" for block in others)


def _translate_segment(segment: str, group: str) -> str:
    if segment == "*":
        return f"{group}{ANY_SEGMENT})"
    if segment[0] in '"<' or "*" not in segment:
        return re.escape(segment)
    first, *middle, last = map(re.escape, segment.split("*"))
    runs = "".join(f"(?>{group}{CHAR}*?){part})" for part in middle)
    return f"{first}{runs}{group}{CHAR}*){last}"


def select_names(
    patterns: Iterable[str] | str, names: Sequence[str], *, argument: str
) -> set[str]:
    """Return the names that any of the patterns selects; a lone str is one pattern.

    Args:
        patterns: the patterns, or one pattern.
        names: the canonical names of all leaves.
        argument: what the caller's user knows the patterns as, for messages.

    Raises:
        InvalidArgumentError: a pattern cannot be read or selects nothing.

    Example:
        >>> sorted(select_names("a", ["a.x", "a.y", "b"], argument="keep"))
        ['a.x', 'a.y']
    """
    selected: set[str] = set()
    for text in as_patterns(patterns, argument):
        pattern = parse_pattern(text, argument)
        found = [name for name in names if pattern.matches(name)]
        if not found:
            problem = f"{argument}={show(pattern.text)} selects no leaf"
            hint = _suggest_names(pattern.text, names)
            raise InvalidArgumentError(problem, hint=hint)
        selected.update(found)
    return selected


def as_patterns(patterns: object, argument: str) -> Iterable[object]:
    """Return the patterns of an argument, of which a lone str is one.

    Raises:
        InvalidArgumentError: neither a str nor an iterable.
    """
    if isinstance(patterns, str):
        return [patterns]
    if isinstance(patterns, Iterable) and not isinstance(patterns, bytes):
        return cast("Iterable[object]", patterns)
    found = type_name(patterns)
    raise InvalidArgumentError(f"{argument}: expected patterns, found {found}")


def _suggest_names(text: str, names: Sequence[str]) -> str:
    if near := near_names(text, names):
        return f"use {' or '.join(near)}"
    tops = top_level(names, limit=len(names))
    if not tops:
        return 'the state is one leaf, named ""' if names else "there are no leaves"
    shown = ", ".join(map(clip, tops[:_SHOWN_NAMES]))
    more = f" and {len(tops) - _SHOWN_NAMES} more" if len(tops) > _SHOWN_NAMES else ""
    return f"the names begin with {shown}{more}"


def near_names(text: str, names: Iterable[str], limit: int = 3) -> list[str]:
    """Return the names, or ancestors of names, that look most like the text.

    Only the neighbours of the text among names of about its depth, sorted from the
    front and from the back, are compared: a slip leaves one of the two ends intact.
    """
    depth = len(SEGMENT.findall(text))
    pool: set[str] = set()
    for group in _ancestors_by_depth(names, (depth - 1, depth, depth + 1)).values():
        pool.update(_neighbours(text, sorted(group)))
        backwards = sorted(name[::-1] for name in group)
        pool.update(name[::-1] for name in _neighbours(text[::-1], backwards))
    return get_close_matches(text, pool, limit)


def _ancestors_by_depth(
    names: Iterable[str], depths: Sequence[int]
) -> dict[int, set[str]]:
    """Return the names and ancestors of names that have so many segments."""
    groups: dict[int, set[str]] = {depth: set() for depth in depths}
    for name in names:
        if len(name) > EVERYDAY_LENGTH:
            continue
        ends = [match.end() for match in SEGMENT.finditer(name)]
        for depth, group in groups.items():
            if 0 < depth <= len(ends):
                group.add(name[: ends[depth - 1]])
    return groups


def _neighbours(text: str, ordered: Sequence[str]) -> Sequence[str]:
    place = bisect(ordered, text)
    return ordered[max(0, place - _NEIGHBOURS) : place + _NEIGHBOURS]


def top_level(names: Iterable[str], limit: int = 10) -> list[str]:
    """Return the first segments of the names, in order of appearance.

    Example:
        >>> top_level(["actor.w", "actor.b", "step"])
        ['actor', 'step']
    """
    found: dict[str, None] = {}
    for name in names:
        if len(found) >= limit:
            break
        if match := SEGMENT.match(name):
            found[match[0]] = None
    return list(found)


def parse_patterns(
    patterns: str | Iterable[str], argument: str = ""
) -> tuple[str, ...]:
    """Return an argument's patterns in their one spelling.

    Raises:
        InvalidArgumentError: a pattern is wrong.
    """
    texts = as_patterns(patterns, argument)
    return tuple(parse_pattern(text, argument).text for text in texts)
