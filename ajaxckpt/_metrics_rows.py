"""The rows of a metrics record, as text: the columns, and which rows to keep.

Pure: knows lines, cells and the steps they belong to; knows no files.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from ajaxckpt._errors import InvalidArgumentError
from ajaxckpt._plain import plain_metrics, read_json

KEY_COLUMNS = ("run_id", "step")
MAX_NAME = 1_000  # csv readers give up on fields of more than 131,072 characters
_STEP = re.compile(r"0|[1-9][0-9]{0,18}")
_INTEGER = re.compile(r"-?[0-9]+")

Value = None | bool | int | float


@dataclass(frozen=True, slots=True)
class Row:
    """One line: a step of a run, and its values in the order of the columns."""

    run_id: str
    step: int
    values: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Record:
    """A file's metrics and its lines; None for a line that is no whole row."""

    names: tuple[str, ...]
    rows: tuple[Row | None, ...]


def _encode_value(value: Value) -> str:
    return "" if value is None else repr(value)


def _decode_value(cell: str) -> Value:
    """Return what a cell says.

    Raises:
        ValueError: it says no number.
    """
    if cell == "":
        return None
    if cell in ("True", "False"):
        return cell == "True"
    return int(cell) if _INTEGER.fullmatch(cell) else float(cell)


def _encode_cells(cells: Sequence[str]) -> bytes:
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow(cells)
    return line.getvalue().encode()


def _decode_cells(line: bytes) -> list[str]:
    """Return the cells of a line, none for one that is not CSV."""
    try:
        return [c for row in csv.reader([line.decode()], strict=True) for c in row]
    except (UnicodeDecodeError, csv.Error):
        return []


def encode_row(row: Row, width: int) -> bytes:
    """Return the line of a row, blank in the columns that it has no values for."""
    blanks = [""] * (width - len(row.values))
    cells = [row.run_id, str(row.step), *map(_encode_value, row.values), *blanks]
    return _encode_cells(cells)


def _decode_row(line: bytes, width: int) -> Row | None:
    cells = _decode_cells(line)
    if len(cells) != len(KEY_COLUMNS) + width or not _STEP.fullmatch(cells[1]):
        return None
    try:
        return Row(cells[0], int(cells[1]), tuple(map(_decode_value, cells[2:])))
    except ValueError:
        return None


def encode_record(names: Sequence[str], rows: Sequence[Row]) -> bytes:
    """Return the bytes of a whole record."""
    head = _encode_cells([*KEY_COLUMNS, *names])
    return head + b"".join(encode_row(row, len(names)) for row in rows)


def decode_record(data: bytes) -> Record:
    """Parse a record; of a torn last line, only what stands before it.

    Raises:
        InvalidArgumentError: the first line is not that of a record.
    """
    # what follows the last newline is torn even where it reads well: 0.1 of 0.125
    lines = data.split(b"\n")[:-1]
    if not data:
        return Record((), ())
    head = _decode_cells(lines[0]) if lines else []
    names = tuple(head[len(KEY_COLUMNS) :])
    if tuple(head[: len(KEY_COLUMNS)]) != KEY_COLUMNS or len(set(head)) != len(head):
        hint = "give another path, or move the file away"
        problem = "no metrics record: its first line is not run_id,step and metrics"
        raise InvalidArgumentError(problem, hint=hint)
    return Record(names, tuple(_decode_row(line, len(names)) for line in lines[1:]))


def choose_rows(record: Record, last_step: int) -> list[Row]:
    """Return the rows up to a step, without the tail that a kill may have torn.

    Raises:
        InvalidArgumentError: a row worth keeping follows a line that is no row.
    """
    chosen: list[Row] = []
    bad_line = 0
    for line, row in enumerate(record.rows, start=2):
        if row is None:
            bad_line = bad_line or line
        elif row.step <= last_step:
            if bad_line:
                hint = f"mend or delete line {bad_line}, or move the file away"
                problem = f"line {bad_line} is no row of this record, but others follow"
                raise InvalidArgumentError(problem, hint=hint)
            chosen.append(row)
    return chosen


def check_owner(record: Record, run_id: str) -> None:
    """Refuse the record of another run.

    Raises:
        InvalidArgumentError: a row is not of the run.
    """
    for row in record.rows:
        if row is not None and row.run_id != run_id:
            problem = f"its rows are of the run {row.run_id!r}, not of {run_id!r}"
            hint = "give each run a record of its own, or move the file away"
            raise InvalidArgumentError(problem, hint=hint)


def check_text(text: object, what: str) -> None:
    """Refuse what would not be one cell in one line of UTF-8.

    Raises:
        InvalidArgumentError: empty, too long, hidden characters, or no str at all.
    """
    if isinstance(text, str) and text.isprintable() and 0 < len(text) <= MAX_NAME:
        return
    problem = f"{what} {text!r:.80} cannot stand in a line of a CSV"
    hint = f"use 1 to {MAX_NAME:,} visible characters"
    raise InvalidArgumentError(problem, hint=hint)


def check_names(names: Sequence[str]) -> None:
    """Refuse names that no column of metrics can have.

    Raises:
        InvalidArgumentError: no text for a cell, or the name of a key column.
    """
    for name in names:
        check_text(name, "the metric")
        if name in KEY_COLUMNS:
            problem = f"the metric {name!r} has the name of a column of its own"
            raise InvalidArgumentError(problem, hint="give the metric another name")


def plain_values(metrics: Mapping[str, object]) -> dict[str, Value]:
    """Return metrics as Python's numbers.

    Raises:
        InvalidArgumentError: a value is not a single number.
    """
    plain = plain_metrics(metrics)
    return {name: cast("Value", read_json(value)) for name, value in plain.items()}
