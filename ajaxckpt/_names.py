r"""Leaf names and patterns: one spelling per key path, and how to select leaves.

Knows the grammar of names and nothing of jax, files or bytes. A name is the
segments of a key path joined by dots, and every segment has exactly one spelling::

    int       0, -1, 42           integer keys and sequence indices
    bare      Dense_0             a str that can be mistaken for nothing else
    quoted    "a.b", "0", ""      any other str; \" and \\, hidden characters \uXXXX
    typed     <none> <bool:True> <float:1.0> <complex:0.0,1.0> <bytes:00ff>
              <enum:RED> <tuple:1,a> <frozenset:1,a>

So two different paths never share a name, and a name that is spelled otherwise was
not written by this module. Positions in messages count characters from 0.
"""

from __future__ import annotations

import re
from bisect import bisect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from enum import Enum
from typing import Any, cast

from ajaxckpt._errors import InvalidArgumentError

# Far above what anyone nests in a key, far below the recursion limit.
_MAX_NESTING = 32
# Longer names are nobody's everyday names: not suggested (comparing them takes
# quadratic time) and split without the short cut.
_EVERYDAY_LENGTH = 400
# Compiling a pattern of stars takes milliseconds per hundred characters.
_MAX_PATTERN_LENGTH = 10_000
_NEIGHBOURS = 100
_SHOWN_LENGTH = 80
_SHOWN_NAMES = 10

# A fixed list rather than str.isprintable, which changes with Python's Unicode tables.
_HIDDEN = (
    r"\x00-\x1f\x7f-\xa0\u200b-\u200f\u2028-\u202f\u2060-\u206f"
    r"\ud800-\udfff\ufeff\ufff9-\ufffb"
)
_CHAR = rf'[^."\\*?\[\]{{}}<>, {_HIDDEN}]'
_BARE = rf"(?!-?[0-9]++(?!{_CHAR}))(?!__metadata__(?!{_CHAR})){_CHAR}++"
_INT = rf"(?:0|-?[1-9][0-9]*+)(?!{_CHAR})"
_FLOAT = r"[-+.0-9a-z]{1,32}"

_BARE_TEXT = re.compile(_BARE)
_UNQUOTED = re.compile(rf"{_INT}|{_BARE}")
_PLAIN_NAME = re.compile(rf"(?:{_INT}|{_BARE})(?:\.(?:{_INT}|{_BARE}))*")
_UNQUOTED_RUN = re.compile(rf"{_CHAR}*")
_STARRED_RUN = re.compile(rf"(?:\*|{_CHAR})*")
_ESCAPED = re.compile(rf'["\\{_HIDDEN}]')
_QUOTED_PART = re.compile(
    rf'[^"\\{_HIDDEN}]++|\\["\\]|\\u(?:00[01][0-9a-f]|007f|00[89][0-9a-f]|00a0'
    r"|200[b-f]|202[89a-f]|206[0-9a-f]|d[89a-f][0-9a-f]{2}|feff|fff[9ab])"
)
_SCALAR = re.compile(
    rf"<(?:none|bool:(?:True|False)|bytes:([0-9a-f]*+)"
    rf"|float:({_FLOAT})|complex:({_FLOAT}),({_FLOAT}))>"
)
_COMPOSITE = re.compile(r"<(enum|tuple|frozenset):")

# These read names that are known to be canonical: there, a ">" that ends a typed
# segment is the only one before a dot, so no count of brackets is needed. The atomic
# groups keep matching linear in the length of the name.
_QUOTED_TEXT = r'"[^"\\]*(?:\\.[^"\\]*)*"'
_ANY_SEGMENT = rf'(?>[^."<]++|{_QUOTED_TEXT}|<(?:[^">]++|{_QUOTED_TEXT}|>(?!\.|\Z))*>)'
_SEGMENT = re.compile(_ANY_SEGMENT)
_START = r"(?:\A|\.)"
_END = r"(?=\.|\Z)"


class UnnameableKeyError(TypeError):
    """A key has no spelling in the grammar of leaf names."""


class _SpellingError(ValueError):
    """A text departs from the grammar at a position."""

    def __init__(self, text: str, position: int, problem: str) -> None:
        shown = _show(text, position)
        super().__init__(f"{shown} is not a leaf name: position {position}: {problem}")
        self.position = position
        self.problem = problem


def format_key(key: object) -> str:
    """Spell one key, attribute name or index as a segment of a name.

    A subclass that equals its built-in value is spelled as that value: a StrEnum as
    its text, an IntEnum as its number, a NamedTuple as a tuple.

    Raises:
        UnnameableKeyError: the key's type, depth or size has no spelling.

    Example:
        >>> format_key("Dense_0"), format_key(0), format_key("0")
        ('Dense_0', '0', '"0"')
    """
    return _format(key, _MAX_NESTING)


def _format(key: object, depth: int) -> str:
    for kind, spell in _FORMATS:
        if isinstance(key, kind):
            return spell(key, depth)
    plain = _as_python(key)
    if plain is not key:
        return _format(plain, depth)
    raise UnnameableKeyError(f"keys of type {_type_name(key)} cannot be named")


def _as_python(key: object) -> object:
    """Turn numpy's integers and bools into Python's; its other scalars stay."""
    # Only rare keys come here, so that most users of this module load no numpy.
    import numpy as np

    if isinstance(key, np.bool_):
        return bool(cast("Any", key))
    # numpy derives its time differences from its integers.
    if isinstance(key, np.integer) and not isinstance(key, np.timedelta64):
        return int(cast("Any", key))
    return key


def _type_name(value: object) -> str:
    kind = type(value)
    prefix = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return prefix + kind.__qualname__


def _format_str(text: str) -> str:
    # A subclass may render itself as anything; its stored text is the key.
    text = str.__str__(text)
    return text if _BARE_TEXT.fullmatch(text) else _quote(text)


def _quote(text: str) -> str:
    return f'"{_ESCAPED.sub(_escape, text)}"'


def _escape(match: re.Match[str]) -> str:
    char = match[0]
    return f"\\{char}" if char in '"\\' else f"\\u{ord(char):04x}"


def _format_int(number: int) -> str:
    try:
        return int.__repr__(number)
    except ValueError:
        bits = int.bit_length(number)
        raise UnnameableKeyError(f"an int of {bits} bits is too long to name") from None


def _format_enum(member: Enum) -> str:
    # Flags that combine no member have none, whatever the stubs say.
    name = cast("str | None", member.name)
    if name is None:
        raise UnnameableKeyError(f"a {_type_name(member)} without a name")
    return f"<enum:{_format_str(name)}>"


def _format_members(members: Iterable[object], depth: int) -> list[str]:
    if not depth:
        raise UnnameableKeyError(f"a key nested deeper than {_MAX_NESTING} levels")
    return [_format(member, depth - 1) for member in members]


def _format_tuple(key: tuple[object, ...], depth: int) -> str:
    return f"<tuple:{','.join(_format_members(key, depth))}>"


def _format_frozenset(key: frozenset[object], depth: int) -> str:
    return f"<frozenset:{','.join(sorted(_format_members(key, depth)))}>"


def _format_complex(key: complex) -> str:
    real, imag = float.__repr__(key.real), float.__repr__(key.imag)
    return f"<complex:{real},{imag}>"


# In this order: bool is an int, StrEnum is a str, IntEnum is an int.
_FORMATS: tuple[tuple[type, Callable[[Any, int], str]], ...] = (
    (str, lambda key, _: _format_str(key)),
    (bool, lambda key, _: f"<bool:{key}>"),
    (int, lambda key, _: _format_int(key)),
    (Enum, lambda key, _: _format_enum(key)),
    (type(None), lambda key, _: "<none>"),
    (float, lambda key, _: f"<float:{float.__repr__(key)}>"),
    (complex, lambda key, _: _format_complex(key)),
    (bytes, lambda key, _: f"<bytes:{bytes.hex(key)}>"),
    (tuple, _format_tuple),
    (frozenset, _format_frozenset),
)


def join_segments(segments: Iterable[str]) -> str:
    """Join spelled segments to a name; no segments give the name of a lone leaf, "".

    Example:
        >>> join_segments(["actor", "0", '"a.b"'])
        'actor.0."a.b"'
    """
    return ".".join(segments)


def split_name(name: str) -> tuple[str, ...]:
    """Split a name into its spelled segments, checking every character.

    Raises:
        ValueError: the text is not the one spelling of any key path.

    Example:
        >>> split_name('actor.0."a.b"')
        ('actor', '0', '"a.b"')
    """
    # One regex is several times faster, but its memory grows with the name.
    if len(name) <= _EVERYDAY_LENGTH and _PLAIN_NAME.fullmatch(name):
        return tuple(name.split("."))
    return tuple(_scan(name, _scan_segment))


def is_canonical(name: str) -> bool:
    """Tell whether the text is the one spelling of some key path.

    Example:
        >>> is_canonical("layers.0"), is_canonical("layers.00")
        (True, False)
    """
    try:
        split_name(name)
    except ValueError:
        return False
    return True


def _scan(text: str, scan_one: Callable[[str, int], int]) -> Iterator[str]:
    """Yield the segments of the text; ``scan_one`` finds where one ends."""
    start = 0
    while text:
        end = scan_one(text, start)
        if end < len(text) and text[end] != ".":
            raise _unexpected(text, start, end)
        yield text[start:end]
        if end == len(text):
            return
        start = end + 1


def _scan_segment(text: str, start: int, depth: int = _MAX_NESTING) -> int:
    first = text[start : start + 1]
    if first == '"':
        return _scan_quoted(text, start)
    if first == "<":
        return _scan_typed(text, start, depth)
    return _scan_unquoted(text, start, _UNQUOTED)


def _scan_unquoted(text: str, start: int, allowed: re.Pattern[str]) -> int:
    if match := allowed.match(text, start):
        return match.end()
    run = _UNQUOTED_RUN.match(text, start)
    end = run.end() if run else start
    if end > start:
        word = _clip(text[start:end])
        raise _SpellingError(text, start, f"{word} stands only in quotes")
    raise _unexpected(text, start, end)


def _unexpected(text: str, start: int, at: int) -> _SpellingError:
    """Say what is wrong with the character at ``at`` of the segment at ``start``."""
    if at == start and text[at : at + 1] in ("", "."):
        return _SpellingError(text, at, "a segment is empty")
    if text[start] in '"<':
        return _SpellingError(text, at, "expected a dot or the end")
    return _SpellingError(text, at, f"{_show_char(text[at])} stands only in quotes")


def _scan_quoted(text: str, start: int) -> int:
    at = start + 1
    while match := _QUOTED_PART.match(text, at):
        at = match.end()
    if at == len(text):
        raise _SpellingError(text, start, "the quote is not closed")
    if text[at] == "\\":
        raise _SpellingError(text, at, "not an escape of this grammar")
    if text[at] != '"':
        raise _SpellingError(text, at, f"{_show_char(text[at])} is not escaped")
    if _BARE_TEXT.fullmatch(text, start + 1, at):
        raise _SpellingError(text, start, "the quotes are not needed")
    return at + 1


def _scan_typed(text: str, start: int, depth: int) -> int:
    if scalar := _SCALAR.match(text, start):
        if not all(map(_is_canonical_float, scalar.groups()[1:])):
            raise _SpellingError(text, start, "not the repr of a float")
        if len(scalar[1] or "") % 2:
            raise _SpellingError(text, start, "an odd number of hex digits")
        return scalar.end()
    head = _COMPOSITE.match(text, start)
    if head is None:
        raise _SpellingError(text, start, "not a typed segment of this grammar")
    end = _scan_content(text, head.end(), head[1], depth)
    if not text.startswith(">", end):
        raise _SpellingError(text, end, 'expected ">"')
    return end + 1


def _is_canonical_float(text: str | None) -> bool:
    try:
        return text is None or repr(float(text)) == text
    except ValueError:
        return False


def _scan_content(text: str, at: int, kind: str, depth: int) -> int:
    if kind != "enum":
        return _scan_members(text, at, depth, ordered=kind == "frozenset")
    if text.startswith('"', at):
        return _scan_quoted(text, at)
    return _scan_unquoted(text, at, _BARE_TEXT)


def _scan_members(text: str, at: int, depth: int, *, ordered: bool) -> int:
    if not depth:
        raise _SpellingError(text, at, f"nested deeper than {_MAX_NESTING} levels")
    if text.startswith(">", at):
        return at
    last = ""
    while True:
        end = _scan_segment(text, at, depth - 1)
        member = text[at:end]
        if ordered and member < last:
            raise _SpellingError(text, at, "the members are not sorted")
        if not text.startswith(",", end):
            return end
        last, at = member, end + 1


def _show_char(char: str) -> str:
    if char == " ":
        return "a blank"
    return f"U+{ord(char):04X}" if re.match(f"[{_HIDDEN}]", char) else f"'{char}'"


def _show(text: str, position: int = 0) -> str:
    """Quote the text around the position for a message."""
    start = max(0, position - _SHOWN_LENGTH // 2)
    shown = text if len(text) <= _SHOWN_LENGTH else text[start : start + _SHOWN_LENGTH]
    return _quote(shown) + ("" if shown == text else f" ({len(text)} characters)")


def _clip(text: str) -> str:
    return text if len(text) <= _SHOWN_LENGTH else f"{text[:_SHOWN_LENGTH]}…"


def relative_name(name: str, prefix: str) -> str | None:
    """Return the name as seen from the prefix, or None where it is not below it.

    Both must be canonical: then a prefix before a dot is a whole ancestor.

    Example:
        >>> relative_name("a.b.c", "a"), relative_name("ab", "a")
        ('b.c', None)
    """
    if not prefix:
        return name
    if not name.startswith(prefix):
        return None
    if len(name) == len(prefix):
        return ""
    return name[len(prefix) + 1 :] if name[len(prefix)] == "." else None


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


def parse_pattern(text: str) -> Pattern:
    """Read a pattern: a name in which stars stand for what may vary.

    ``**`` stands for any number of segments, none too; ``*`` for one segment; ``*``
    within a segment for any run of characters of an unquoted one.

    Raises:
        InvalidArgumentError: a segment is neither a star nor spelled as in a name.

    Example:
        >>> parse_pattern("**.Dense_*.kernel").matches("actor.params.Dense_0.kernel")
        True
    """
    return _parse(text, "pattern")


def _parse(text: object, label: str) -> Pattern:
    if not isinstance(text, str):
        found = _type_name(text)
        raise InvalidArgumentError(f"{label}: expected a str pattern, found {found}")
    if len(text) > _MAX_PATTERN_LENGTH:
        limit = f"longer than {_MAX_PATTERN_LENGTH} characters"
        raise InvalidArgumentError(f"{label}={_show(text)} is {limit}")
    segments: list[str] = []
    try:
        segments.extend(_scan(text, _scan_pattern_segment))
    except _SpellingError as error:
        problem = f"{label}={_show(text, error.position)} is not a pattern"
        place = f"position {error.position}: {error.problem}"
        start = sum(len(segment) + 1 for segment in segments)
        hint = _suggest_spelling(text, start)
        raise InvalidArgumentError(f"{problem}: {place}", hint=hint) from None
    return Pattern(text=text, _regex=re.compile(_translate(segments)))


def _scan_pattern_segment(text: str, start: int) -> int:
    run = _STARRED_RUN.match(text, start)
    if run is None or "*" not in run[0]:
        return _scan_segment(text, start)
    if "**" in run[0] and run[0] != "**":
        problem = '"**" stands alone between dots; within a segment write "*"'
        raise _SpellingError(text, start + run[0].index("**"), problem)
    return run.end()


def _suggest_spelling(text: str, start: int) -> str:
    if text[start : start + 1] in ('"', "<"):
        return "copy the segment as the leaf's name spells it"
    segment = text[start:].partition(".")[0]
    if "**" in segment:
        return f"write {_clip(re.sub(r'[*]+', '*', segment))}"
    return f"quote the segment: {_clip(_quote(segment))}"


def _translate(segments: Iterable[str]) -> str:
    """Compile to one regex whose match at the start of a name is a selection.

    After ``**`` the first place where the next block fits is as good as any, since
    whatever follows the last block is selected too. So no block is tried again once
    it fits, and no pattern makes matching slower than length times blocks.
    """
    blocks: list[list[str]] = [[]]
    for segment in segments:
        if segment == "**":
            blocks.append([])
        else:
            blocks[-1].append(f"{_START}{_translate_segment(segment)}{_END}")
    first, *others = map("".join, blocks)
    skip = f"(?:{_START}{_ANY_SEGMENT})*?"
    return first + "".join(f"(?>{skip}{block})" for block in others)


def _translate_segment(segment: str) -> str:
    if segment == "*":
        return _ANY_SEGMENT
    if segment[0] in '"<' or "*" not in segment:
        return re.escape(segment)
    first, *middle, last = map(re.escape, segment.split("*"))
    runs = "".join(f"(?>{_CHAR}*?{part})" for part in middle)
    return f"{first}{runs}{_CHAR}*{last}"


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
    for text in _as_patterns(patterns, argument):
        pattern = _parse(text, argument)
        found = [name for name in names if pattern.matches(name)]
        if not found:
            problem = f"{argument}={_show(pattern.text)} selects no leaf"
            hint = _suggest_names(pattern.text, names)
            raise InvalidArgumentError(problem, hint=hint)
        selected.update(found)
    return selected


def _as_patterns(patterns: object, argument: str) -> Iterable[object]:
    if isinstance(patterns, str):
        return [patterns]
    if isinstance(patterns, Iterable):
        return cast("Iterable[object]", patterns)
    found = _type_name(patterns)
    raise InvalidArgumentError(f"{argument}: expected patterns, found {found}")


def _suggest_names(text: str, names: Sequence[str]) -> str:
    if near := near_names(text, names):
        return f"use {' or '.join(near)}"
    tops = top_level(names, limit=len(names))
    if not tops:
        return 'the state is one leaf, named ""' if names else "there are no leaves"
    shown = ", ".join(map(_clip, tops[:_SHOWN_NAMES]))
    more = f" and {len(tops) - _SHOWN_NAMES} more" if len(tops) > _SHOWN_NAMES else ""
    return f"the names begin with {shown}{more}"


def near_names(text: str, names: Iterable[str], limit: int = 3) -> list[str]:
    """Return the names, or ancestors of names, that look most like the text.

    Only the neighbours of the text among names of about its depth, sorted from the
    front and from the back, are compared: a slip leaves one of the two ends intact.
    """
    groups = _ancestors_by_depth(names)
    depth = len(_SEGMENT.findall(text))
    pool: set[str] = set()
    for group in (groups.get(depth + step, set[str]()) for step in (-1, 0, 1)):
        pool.update(_neighbours(text, sorted(group)))
        backwards = sorted(name[::-1] for name in group)
        pool.update(name[::-1] for name in _neighbours(text[::-1], backwards))
    return get_close_matches(text, pool, limit)


def _ancestors_by_depth(names: Iterable[str]) -> dict[int, set[str]]:
    """Group the names and all their ancestors by their number of segments."""
    groups: dict[int, set[str]] = {}
    for name in names:
        if len(name) > _EVERYDAY_LENGTH:
            continue
        ends = [match.end() for match in _SEGMENT.finditer(name)]
        for depth in range(len(ends), 0, -1):
            group = groups.setdefault(depth, set())
            ancestor = name[: ends[depth - 1]]
            if ancestor in group:
                break
            group.add(ancestor)
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
        if match := _SEGMENT.match(name):
            found[match[0]] = None
    return list(found)
