"""What ``verify`` and ``diff`` say, as text and as data for JSON.

Knows reports and comparisons, not where they come from; prints nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ajaxckpt._comparison import Comparison, ValueDifference
from ajaxckpt._layout import LeafSpec, shown_name
from ajaxckpt._opening import VerifyReport
from ajaxckpt._reader import Checkpoint
from ajaxckpt._tables import LABEL_WIDTH, escape, show_bytes, show_count


def verify_line(path: str, status: str, report: VerifyReport | None) -> str:
    """Return the one line ``verify`` prints for a file."""
    columns = ""
    if report is not None:
        size = f"{show_bytes(report.nbytes):>10} {report.nbytes:>15,} bytes"
        columns = f"{report.leaves:>7,} leaves {size}"
    return f"{status:<16} {columns:<46}  {escape(path)}"


def verify_document(
    path: str, status: str, report: VerifyReport | None
) -> dict[str, Any]:
    """Return the same as data for JSON."""
    return {
        "path": path,
        "status": status,
        "leaves": None if report is None else report.leaves,
        "bytes": None if report is None else report.nbytes,
        "digest": None if report is None else report.digest,
    }


def diff_lines(
    sides: Sequence[tuple[str, Checkpoint]],
    comparison: Comparison,
    values: Sequence[ValueDifference] | None,
) -> Iterator[str]:
    """Yield what ``diff`` prints.

    Args:
        sides: A and B, each the path as given and the checkpoint.
        comparison: how the headers differ.
        values: how the values differ; None if that was not asked for.
    """
    for letter, (path, checkpoint) in zip("AB", sides, strict=True):
        yield _entry(letter, f"{path}  {checkpoint.digest}")
    for name, spec in comparison.only_a.items():
        yield _entry("only in A", f"{shown_name(name)}: {spec}")
    for name, spec in comparison.only_b.items():
        yield _entry("only in B", f"{shown_name(name)}: {spec}")
    for name, (a, b) in comparison.changed.items():
        yield _entry("changed", f"{shown_name(name)}: {_pair(str(a), str(b))}")
    for item in values or ():
        yield _entry("value", f"{shown_name(item.name)}: {_show_difference(item)}")
    for fact, (a, b) in comparison.notes.items():
        yield _entry("note", f"{fact}: {_pair(a, b)}")
    yield _conclusion(comparison, values)


def _entry(label: str, text: str) -> str:
    return f"{label:<{LABEL_WIDTH}}{escape(text)}"


def _pair(a: str | None, b: str | None) -> str:
    return f"{a or 'nothing'} in A, {b or 'nothing'} in B"


def _show_difference(item: ValueDifference) -> str:
    if item.elements == 1:
        return _pair(item.a, item.b)
    noun = "key" if item.spec.kind == "key" else "element"
    text = f"{item.differing:,} of {show_count(item.elements, noun)} differ"
    if item.largest is not None:
        text += f" by at most {item.largest}"
    if item.nans:
        text += f", {item.nans:,} by NaN"
    place = ",".join(map(str, item.index))
    return f"{text}; first at [{place}]: {_pair(item.a, item.b)}"


def _conclusion(
    comparison: Comparison, values: Sequence[ValueDifference] | None
) -> str:
    findings = comparison.layout_findings + len(values or ())
    leaves = show_count(comparison.leaves, "leaf")
    if findings:
        return f"different: {findings:,} of {leaves}"
    if comparison.unequal:
        unequal = f"{len(comparison.unequal):,} differ in value, see --values"
        return f"same layout: {leaves}, of which {unequal}"
    return f"equal: {leaves}, layout and values, by the digests in the files"


def diff_document(
    sides: Sequence[tuple[str, Checkpoint]],
    comparison: Comparison,
    values: Sequence[ValueDifference] | None,
) -> dict[str, Any]:
    """Return the same as data for JSON."""
    return {
        **{
            letter: _side(path, checkpoint)
            for letter, (path, checkpoint) in zip("ab", sides, strict=True)
        },
        "equal": not (comparison.layout_findings or values),
        "values_compared": values is not None,
        "leaves": comparison.leaves,
        "only_a": _leaves(comparison.only_a),
        "only_b": _leaves(comparison.only_b),
        "changed": [
            {"name": name, "a": str(a), "b": str(b)}
            for name, (a, b) in comparison.changed.items()
        ],
        "unequal": list(comparison.unequal),
        "values": [_difference(item) for item in values or ()],
        "notes": [
            {"fact": fact, "a": a, "b": b} for fact, (a, b) in comparison.notes.items()
        ],
    }


def _side(path: str, checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "path": path,
        "checkpoint_id": checkpoint.checkpoint_id,
        "step": checkpoint.step,
        "digest": checkpoint.digest,
    }


def _leaves(layout: Mapping[str, LeafSpec]) -> list[dict[str, str]]:
    return [{"name": name, "spec": str(spec)} for name, spec in layout.items()]


def _difference(item: ValueDifference) -> dict[str, Any]:
    return {
        "name": item.name,
        "spec": str(item.spec),
        "elements": item.elements,
        "differing": item.differing,
        "largest": item.largest,
        "nans": item.nans,
        "index": list(item.index),
        "a": item.a,
        "b": item.b,
    }
