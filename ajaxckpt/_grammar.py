"""The grammar of leaf names, character by character: what the spelling rules say.

Knows text alone. ``_names`` spells keys by it, ``_patterns`` reads patterns by it.
Positions in messages count characters from 0.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

# Far above what anyone nests in a key, far below the recursion limit.
MAX_NESTING = 32
# Longer names are nobody's everyday names: not suggested (comparing them takes
# quadratic time) and split without the short cut.
EVERYDAY_LENGTH = 400
_SHOWN_LENGTH = 80

# A fixed list rather than str.isprintable, which changes with Python's Unicode tables.
_HIDDEN = (
    r"\x00-\x1f\x7f-\xa0\u200b-\u200f\u2028-\u202f\u2060-\u206f"
    r"\ud800-\udfff\ufeff\ufff9-\ufffb"
)
CHAR = rf'[^."\\*?\[\]{{}}<>, {_HIDDEN}]'
_BARE = rf"(?!-?[0-9]++(?!{CHAR}))(?!__metadata__(?!{CHAR})){CHAR}++"
_INT = rf"(?:0|-?[1-9][0-9]*+)(?!{CHAR})"
_FLOAT = r"[-+.0-9a-z]{1,32}"

BARE_TEXT = re.compile(_BARE)
_UNQUOTED = re.compile(rf"{_INT}|{_BARE}")
PLAIN_NAME = re.compile(rf"(?:{_INT}|{_BARE})(?:\.(?:{_INT}|{_BARE}))*")
_UNQUOTED_RUN = re.compile(rf"{CHAR}*")
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
ANY_SEGMENT = rf'(?>[^."<]++|{_QUOTED_TEXT}|<(?:[^">]++|{_QUOTED_TEXT}|>(?!\.|\Z))*>)'
SEGMENT = re.compile(ANY_SEGMENT)


class SpellingError(ValueError):
    """A text departs from the grammar at a position."""

    def __init__(self, text: str, position: int, problem: str) -> None:
        shown = show(text, position)
        super().__init__(f"{shown} is not a leaf name: position {position}: {problem}")
        self.position = position
        self.problem = problem


def type_name(value: object) -> str:
    """Return how messages call a value's type."""
    kind = type(value)
    prefix = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return prefix + kind.__qualname__


def quote(text: str) -> str:
    """Spell any text as a quoted segment."""
    return f'"{_ESCAPED.sub(_escape, text)}"'


def _escape(match: re.Match[str]) -> str:
    char = match[0]
    return f"\\{char}" if char in '"\\' else f"\\u{ord(char):04x}"


def _show_char(char: str) -> str:
    if char == " ":
        return "a blank"
    return f"U+{ord(char):04X}" if re.match(f"[{_HIDDEN}]", char) else f"'{char}'"


def show(text: str, position: int = 0) -> str:
    """Quote the text around the position for a message."""
    start = max(0, position - _SHOWN_LENGTH // 2)
    shown = text if len(text) <= _SHOWN_LENGTH else text[start : start + _SHOWN_LENGTH]
    return quote(shown) + ("" if shown == text else f" ({len(text)} characters)")


def clip(text: str) -> str:
    """Shorten a text for a message."""
    return text if len(text) <= _SHOWN_LENGTH else f"{text[:_SHOWN_LENGTH]}…"


def scan(text: str, scan_one: Callable[[str, int], int]) -> Iterator[str]:
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


def scan_segment(text: str, start: int, depth: int = MAX_NESTING) -> int:
    """Return where the segment that starts here ends, checking every character."""
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
        word = clip(text[start:end])
        raise SpellingError(text, start, f"{word} stands only in quotes")
    raise _unexpected(text, start, end)


def _unexpected(text: str, start: int, at: int) -> SpellingError:
    """Say what is wrong with the character at ``at`` of the segment at ``start``."""
    if at == start and text[at : at + 1] in ("", "."):
        return SpellingError(text, at, "a segment is empty")
    if text[start] in '"<':
        return SpellingError(text, at, "expected a dot or the end")
    return SpellingError(text, at, f"{_show_char(text[at])} stands only in quotes")


def _scan_quoted(text: str, start: int) -> int:
    at = start + 1
    while match := _QUOTED_PART.match(text, at):
        at = match.end()
    if at == len(text):
        raise SpellingError(text, start, "the quote is not closed")
    if text[at] == "\\":
        raise SpellingError(text, at, "not an escape of this grammar")
    if text[at] != '"':
        raise SpellingError(text, at, f"{_show_char(text[at])} is not escaped")
    if BARE_TEXT.fullmatch(text, start + 1, at):
        raise SpellingError(text, start, "the quotes are not needed")
    return at + 1


def _scan_typed(text: str, start: int, depth: int) -> int:
    if scalar := _SCALAR.match(text, start):
        if not all(map(_is_canonical_float, scalar.groups()[1:])):
            raise SpellingError(text, start, "not the repr of a float")
        if len(scalar[1] or "") % 2:
            raise SpellingError(text, start, "an odd number of hex digits")
        return scalar.end()
    head = _COMPOSITE.match(text, start)
    if head is None:
        raise SpellingError(text, start, "not a typed segment of this grammar")
    end = _scan_content(text, head.end(), head[1], depth)
    if not text.startswith(">", end):
        raise SpellingError(text, end, 'expected ">"')
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
    return _scan_unquoted(text, at, BARE_TEXT)


def _scan_members(text: str, at: int, depth: int, *, ordered: bool) -> int:
    if not depth:
        raise SpellingError(text, at, f"nested deeper than {MAX_NESTING} levels")
    if text.startswith(">", at):
        return at
    last = ""
    while True:
        end = scan_segment(text, at, depth - 1)
        member = text[at:end]
        if ordered and member < last:
            raise SpellingError(text, at, "the members are not sorted")
        if not text.startswith(",", end):
            return end
        last, at = member, end + 1
