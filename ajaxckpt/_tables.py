"""Text for terminals: harmless characters, aligned columns, sizes for people.

Knows strings and numbers; knows nothing of checkpoints, and prints nothing.
"""

from __future__ import annotations

import re
import textwrap
import unicodedata
from collections.abc import Iterator, Sequence

LABEL_WIDTH = 12
_NARROWEST = 60  # below this, columns leave no room for names
_UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_LONGEST_DECIMAL_BITS = 256
_HIDDEN = re.compile(r"[^ -~]")


def escape(text: str) -> str:
    r"""Spell what a terminal would act on or not show as \n, \x1b, \u202e.

    Example:
        >>> escape("a\x1b[2J\n") == r"a\x1b[2J\n"
        True
    """
    return text if text.isprintable() else _HIDDEN.sub(_escape_hidden, text)


def _escape_hidden(match: re.Match[str]) -> str:
    char = match[0]
    return char if char.isprintable() else char.encode("unicode_escape").decode()


def shorten(text: str, limit: int = 60) -> str:
    """Cut the middle out of a long text.

    Example:
        >>> shorten("0123456789", 7)
        '01...89'
    """
    side = (limit - 3) // 2
    return text if len(text) <= limit else f"{text[:side]}...{text[-side:]}"


def show_value(value: object) -> str:
    """Spell a Python scalar in one short line; a long int in hexadecimal.

    Example:
        >>> show_value(400), show_value("a"), show_value(1 << 20000)[:6]
        ('400', "'a'", '0x1000')
    """
    # Python refuses to spell ints of thousands of digits in decimal
    if isinstance(value, int) and value.bit_length() > _LONGEST_DECIMAL_BITS:
        return shorten(hex(value))
    return escape(shorten(repr(value)))


def show_count(count: int, noun: str) -> str:
    """Spell a count with its noun, such as 1 leaf, 1,200 leaves."""
    plural = "leaves" if noun == "leaf" else f"{noun}s"
    return f"{count:,} {noun if count == 1 else plural}"


def show_bytes(count: int) -> str:
    """Spell a size in the unit that fits.

    Example:
        >>> show_bytes(768), show_bytes(1234567)
        ('768 B', '1.2 MiB')
    """
    if count < 1024:
        return f"{count} B"
    size, unit = count / 1024, 0
    while round(size, 1) >= 1024 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.1f} {_UNITS[unit]}"


def show_share(part: int, whole: int) -> str:
    """Spell a part in percent of the whole.

    Example:
        >>> show_share(1, 8), show_share(0, 0)
        ('12.5%', '-')
    """
    return f"{100 * part / whole:.1f}%" if whole else "-"


def text_width(text: str) -> int:
    """Return how many cells of a terminal the text takes."""
    return len(text) if text.isascii() else sum(map(_char_width, text))


def _char_width(char: str) -> int:
    if unicodedata.combining(char):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


def wrap_entry(label: str, text: str, width: int) -> list[str]:
    """Lay out a labelled text, its further lines below its first."""
    return textwrap.wrap(
        text,
        width=max(width, _NARROWEST),
        initial_indent=label.ljust(LABEL_WIDTH),
        subsequent_indent=" " * LABEL_WIDTH,
        break_on_hyphens=False,
    )


def align_rows(rows: Sequence[Sequence[str]], width: int) -> Iterator[str]:
    """Lay out rows: the first two columns to the left, the others to the right.

    A first column that would push the others over the width stands on a line of
    its own, whole: names are there to be copied.
    """
    columns = list(zip(*rows, strict=True))
    sizes = [max(map(text_width, column), default=0) for column in columns]
    room = max(width, _NARROWEST) - sum(size + 2 for size in sizes[1:])
    sizes[0] = min(sizes[0], max(room, LABEL_WIDTH))
    for row in rows:
        cells = list(row)
        if text_width(cells[0]) > sizes[0]:
            yield cells[0].rstrip()
            cells[0] = ""
        yield _align_row(cells, sizes)


def _align_row(cells: Sequence[str], sizes: Sequence[int]) -> str:
    padding = [
        " " * (size - text_width(cell)) for cell, size in zip(cells, sizes, strict=True)
    ]
    left = [cell + blanks for cell, blanks in zip(cells[:2], padding[:2], strict=True)]
    right = [blanks + cell for cell, blanks in zip(cells[2:], padding[2:], strict=True)]
    return "  ".join((*left, *right)).rstrip()
