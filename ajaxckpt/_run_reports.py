"""What ``ls``, ``watch`` and ``prune`` say, as text and as data for JSON.

Knows what was found of a run, not where it comes from; prints nothing.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ajaxckpt._errors import CheckpointError
from ajaxckpt._listing import RunEntry, describe_problem, read_name
from ajaxckpt._tables import (
    escape,
    shorten,
    show_bytes,
    show_count,
    text_width,
)

WHOLE = "whole"
UNREAD = "header only"
_GAP = "  "
_LONGEST_NUMBER = 12
_LEAST_ROOM = 20  # for metrics and reasons, however narrow the terminal
_UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One checkpoint of a run.

    Attributes:
        entry: what its header says.
        status: whole, header only, or what is wrong with it.
        error: why it is not whole; None where nothing is known against it.
        newest: whether it is the newest of its run that is not known to be bad.
        best: whether it is the best of those by the metric asked for.
    """

    entry: RunEntry
    status: str
    error: CheckpointError | OSError | None = None
    newest: bool = False
    best: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """What was found in a run's directory.

    Attributes:
        path: the directory, as it was asked for.
        run_ids: the runs in it.
        rows: the checkpoints, by run and step.
        writers: who writes a run at the moment, by the run's id.
        abandoned: how many files a rollback set aside.
        metric: the metric that is shown first; empty if none was asked for.
    """

    path: str
    run_ids: Sequence[str]
    rows: Sequence[Row]
    writers: Mapping[str, str]
    abandoned: int
    metric: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruning:
    """What was removed of a run, or would be, and why the rest stays.

    Attributes:
        path: the directory, as it was asked for.
        run_id: the run; None where the directory holds none.
        dry_run: whether nothing was removed.
        removed: what went, or would go, oldest first.
        kept: what stays, by step, each with the reasons.
        other_runs: the runs that share the directory.
        notes: what is to be known besides.
    """

    path: str
    run_id: str | None
    dry_run: bool
    removed: Sequence[RunEntry]
    kept: Sequence[tuple[RunEntry, Sequence[str]]]
    other_runs: Sequence[str]
    notes: Sequence[str]


# ---------------------------------------------------------------------- ls, watch


def listing_lines(listing: Listing, now: float, width: int) -> Iterator[str]:
    """Yield what ``ls`` prints.

    Args:
        listing: what was found.
        now: the time, in seconds since the epoch.
        width: of the terminal, in cells.
    """
    if listing.rows:
        cells = [_cells(row, listing, now) for row in listing.rows]
        items = [_show_metrics(row.entry, listing.metric) for row in listing.rows]
        yield from _lay_out(_HEADS, cells, "metrics", items, width)
    yield _summary(listing)
    for run_id, owner in listing.writers.items():
        what = f"run {escape(run_id)}: " if len(listing.run_ids) > 1 else ""
        yield f"{what}being written by {escape(shorten(owner, 200))}"
    if listing.abandoned:
        files = show_count(listing.abandoned, "abandoned file")
        yield f"{files}, set aside by a rollback"


_HEADS = (
    *(("run", "<"), ("step", ">"), ("state", "<"), ("size", ">")),
    *(("age", ">"), ("flags", "<"), ("file", "<")),
)


def _cells(row: Row, listing: Listing, now: float) -> tuple[str, ...]:
    entry = row.entry
    flags = (("newest", row.newest), ("best", row.best), ("pinned", entry.pinned))
    return (
        escape(entry.run_id or "-") if len(listing.run_ids) > 1 else "",
        _show_step(entry),
        row.status,
        show_bytes(entry.nbytes),
        show_age(now - entry.time),
        " ".join(word for word, holds in flags if holds),
        "" if entry.is_named else _show_name(entry),
    )


def _summary(listing: Listing) -> str:
    if not listing.rows:
        return f"no checkpoint in {escape(listing.path)}"
    counts = Counter(row.status for row in listing.rows).items()
    states = ", ".join(f"{count:,} {status}" for status, count in counts)
    size = show_bytes(sum(row.entry.nbytes for row in listing.rows))
    return f"{show_count(len(listing.rows), 'checkpoint')}: {states}; {size}"


def _step_of(entry: RunEntry) -> int | None:
    """Return the step; None of a broken file whose name does not tell it."""
    known = not entry.problem or read_name(os.path.basename(entry.path))
    return entry.step if known else None


def _show_step(entry: RunEntry) -> str:
    step = _step_of(entry)
    return "?" if step is None else str(step)


def _show_name(entry: RunEntry) -> str:
    return shorten(escape(os.path.basename(entry.path)))


def show_age(seconds: float) -> str:
    """Spell an age in the largest unit that fits.

    Example:
        >>> show_age(59.9), show_age(7200), show_age(-3600)
        ('59 s', '2 h', 'future')
    """
    if seconds < -60:  # more than clocks differ
        return "future"
    whole = max(0, int(seconds))
    size, unit = next((u for u in _UNITS if whole >= u[0]), _UNITS[-1])
    return f"{whole // size:,} {unit}"


def _show_metrics(entry: RunEntry, first: str) -> list[tuple[str, str]]:
    names = sorted(entry.metrics, key=lambda name: name != first)
    return [(escape(name), _show_number(entry.metrics[name])) for name in names]


def _show_number(value: float | None) -> str:
    """Spell a metric in a dozen characters; JSON has it whole."""
    text = json.dumps(value)
    if len(text) <= _LONGEST_NUMBER:
        return text
    return f"{value:.6g}" if isinstance(value, float) else shorten(text, 15)


def trouble_lines(
    troubles: Sequence[tuple[str, str, CheckpointError | OSError]],
) -> Iterator[str]:
    """Yield a line for each path that something is wrong with."""
    for path, status, error in troubles:
        name = escape(os.path.basename(path.rstrip("/")) or path)
        yield f"{name}: {status}: {escape(describe_problem(error))}"


def trouble_documents(
    troubles: Sequence[tuple[str, str, CheckpointError | OSError]],
) -> list[dict[str, str]]:
    """Return the same as data for JSON."""
    return [
        {"path": path, "status": status, "message": _message(path, error)}
        for path, status, error in troubles
    ]


def _message(path: str, error: CheckpointError | OSError) -> str:
    if isinstance(error, CheckpointError):
        return str(error)
    return f"{path}: {error.strerror or error}"


def listing_document(listing: Listing) -> dict[str, Any]:
    """Return the same as data for JSON."""
    writers = listing.writers.items()
    return {
        "path": listing.path,
        "run_ids": list(listing.run_ids),
        "writers": [{"run_id": run, "owner": owner} for run, owner in writers],
        "abandoned": listing.abandoned,
        "checkpoints": [
            {
                **_entry_document(row.entry),
                "run_id": row.entry.run_id,
                "checkpoint_id": row.entry.checkpoint_id or None,
                "time": row.entry.time,
                "status": row.status,
                "newest": row.newest,
                "best": row.best,
                "pinned": row.entry.pinned,
                "metrics": dict(row.entry.metrics),
            }
            for row in listing.rows
        ],
    }


def _entry_document(entry: RunEntry) -> dict[str, Any]:
    return {"path": entry.path, "step": _step_of(entry), "bytes": entry.nbytes}


# -------------------------------------------------------------------------- prune


def pruning_lines(pruning: Pruning, width: int) -> Iterator[str]:
    """Yield what ``prune`` prints."""
    gone = "would go" if pruning.dry_run else "removed"
    rows = [(gone, entry, ()) for entry in pruning.removed]
    rows += [("stays", entry, reasons) for entry, reasons in pruning.kept]
    rows.sort(key=lambda row: row[1].step)
    heads = (("", "<"), ("step", ">"), ("size", ">"), ("file", "<"))
    cells = [
        (word, _show_step(entry), show_bytes(entry.nbytes), _show_name(entry))
        for word, entry, _ in rows
    ]
    reasons = [[(escape(reason), "") for reason in row[2]] for row in rows]
    if rows:
        yield from _lay_out(heads, cells, "why", reasons, width)
    size = show_bytes(sum(entry.nbytes for entry in pruning.removed))
    count = show_count(len(pruning.removed), "checkpoint")
    yield f"{count} {gone}, {size}; {len(pruning.kept):,} stay"
    if pruning.other_runs:
        runs = ", ".join(map(escape, pruning.other_runs[:10]))
        rest = len(pruning.other_runs) - 10
        more = f" and {rest:,} more" if rest > 0 else ""
        yield f"not this run's, and left alone: {runs}{more}"
    yield from pruning.notes


def pruning_document(pruning: Pruning) -> dict[str, Any]:
    """Return the same as data for JSON."""
    return {
        "path": pruning.path,
        "run_id": pruning.run_id,
        "dry_run": pruning.dry_run,
        "removed": [_entry_document(entry) for entry in pruning.removed],
        "kept": [
            {**_entry_document(entry), "reasons": list(reasons)}
            for entry, reasons in pruning.kept
        ],
        "other_runs": list(pruning.other_runs),
        "notes": list(pruning.notes),
    }


# --------------------------------------------------------------------- the columns


def _lay_out(
    heads: Sequence[tuple[str, str]],
    rows: Sequence[Sequence[str]],
    last: str,
    items: Sequence[Sequence[tuple[str, str]]],
    width: int,
) -> Iterator[str]:
    """Align rows, leave out empty columns, and fit a list into what room is left.

    Args:
        heads: of each column the heading, and < or > for its side.
        rows: the cells.
        last: the heading of the lists.
        items: one list per row, each item a name that may be cut, and a value.
        width: of the terminal, in cells.
    """
    used = [i for i in range(len(heads)) if any(row[i] for row in rows)]
    table = [[heads[i][0] for i in used], *([row[i] for i in used] for row in rows)]
    sides = [heads[i][1] for i in used]
    sizes = [max(map(text_width, column)) for column in zip(*table, strict=True)]
    room = max(width - sum(size + len(_GAP) for size in sizes), _LEAST_ROOM)
    shown = any(items)
    tails = [last if shown else "", *(_fit(row, room) for row in items)]
    for cells, tail in zip(table, tails, strict=True):
        padded = map(_pad, cells, sizes, sides)
        yield _GAP.join((*padded, tail)).rstrip()


def _pad(cell: str, size: int, side: str) -> str:
    blanks = " " * (size - text_width(cell))
    return blanks + cell if side == ">" else cell + blanks


def _fit(items: Sequence[tuple[str, str]], room: int) -> str:
    """Spell as many items as there is room for, at least one, and count the rest."""
    text = ""
    for index, (name, value) in enumerate(items):
        rest = len(items) - index - 1
        more = f", {rest:,} more" if rest else ""
        whole = f"{text}, " if text else ""
        whole += f"{name} {value}".rstrip()
        if text_width(whole) + len(more) <= room:
            text = whole
        elif text:
            return f"{text}, {rest + 1:,} more"
        else:
            left = max(room - len(more) - len(value) - 1, 8)
            text = f"{_cut(name, left)} {value}".rstrip()
    return text


def _cut(text: str, cells: int) -> str:
    per_char = max(1, -(-text_width(text) // max(len(text), 1)))
    return shorten(text, cells // per_char)
