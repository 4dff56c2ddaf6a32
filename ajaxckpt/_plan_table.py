"""A restore plan as a table for people and as data for programs.

Knows what a plan says; decides nothing, and prints nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ajaxckpt._grammar import SEGMENT
from ajaxckpt._layout import LeafSpec, Mismatch, shown_name
from ajaxckpt._tables import align_rows, escape, show_bytes, show_count

if TYPE_CHECKING:
    from ajaxckpt._migrating import Origin

_WIDTH = 200
_ROWS = 30
_HEADINGS = ("leaf", "action", "expected", "found")
_ACTIONS = ("load", "migrate", "keep", "ignore", "resize", "adopt", "drop")
_PASTE = (
    "from ajaxckpt import Migrations, restore_into",
    "",
    'migrations = Migrations("my-agent")',
    'step = migrations.step(1, "say why")',
)
_USE = "state = restore_into(skeleton, path, migrations=migrations)"


class Plan(Protocol):
    """The part of a restore plan that a table shows."""

    @property
    def path(self) -> str: ...
    @property
    def subtree(self) -> str: ...
    @property
    def step(self) -> int | None: ...
    @property
    def checkpoint_id(self) -> str: ...
    @property
    def names(self) -> tuple[str, ...]: ...
    @property
    def load(self) -> tuple[str, ...]: ...
    @property
    def migrate(self) -> Mapping[str, Origin]: ...
    @property
    def keep(self) -> tuple[str, ...]: ...
    @property
    def ignore(self) -> tuple[str, ...]: ...
    @property
    def resize(self) -> tuple[str, ...]: ...
    @property
    def adopt(self) -> tuple[str, ...]: ...
    @property
    def drop(self) -> Mapping[str, str]: ...
    @property
    def mismatches(self) -> tuple[Mismatch, ...]: ...
    @property
    def notes(self) -> tuple[str, ...]: ...
    @property
    def suggestions(self) -> tuple[str, ...]: ...
    def specs(self, name: str) -> tuple[LeafSpec | None, LeafSpec | None]: ...


def plan_lines(plan: Plan, *, all_rows: bool = False) -> list[str]:
    """Render a plan: its outcome, what becomes of the leaves, notes, the way out.

    Args:
        plan: the plan.
        all_rows: whether every leaf has a row; else plain loads are summed up by
            their first segment, and each action shows thirty rows.
    """
    rows = [_HEADINGS, *_rows(plan, all_rows)]
    table = [line for line in align_rows(_trim(rows), _WIDTH) if line]
    lines = [*_head(plan), "", *table]
    if plan.notes:
        notes = plan.notes[: None if all_rows else _ROWS]
        lines += ["", *(f"note  {escape(note)}" for note in notes)]
        if len(notes) < len(plan.notes):
            lines.append(f"and {len(plan.notes) - len(notes):,} more notes")
    return lines + _remedy(plan.suggestions)


def _head(plan: Plan) -> Iterator[str]:
    where = f" below {plan.subtree}" if plan.subtree else ""
    yield f"{escape(plan.path)}{escape(where)}: {_outcome(plan)}"
    step = "no step" if plan.step is None else f"step {plan.step}"
    yield f"checkpoint {escape(plan.checkpoint_id)}, {step}"
    counts = ", ".join(f"{action} {len(getattr(plan, action))}" for action in _ACTIONS)
    yield f"{counts}; {show_bytes(_bytes_read(plan))} to read"


def _outcome(plan: Plan) -> str:
    if not plan.mismatches:
        return "restores"
    total = len({*plan.names, *(item.name for item in plan.mismatches)})
    verb = "does" if len(plan.mismatches) == 1 else "do"
    return f"does not restore: {len(plan.mismatches)} of {total} leaves {verb} not fit"


def _bytes_read(plan: Plan) -> int:
    specs = (plan.specs(name)[1] for name in (*plan.load, *plan.migrate))
    return sum(spec.nbytes for spec in specs if spec is not None)


def _rows(plan: Plan, all_rows: bool) -> Iterator[tuple[str, str, str, str]]:
    for item in plan.mismatches[: None if all_rows else _ROWS]:
        yield (
            escape(shown_name(item.name)),
            "MISMATCH",
            _spec(item.expected),
            _spec(item.found) + (f" ({escape(item.note)})" if item.note else ""),
        )
    yield from _more(len(plan.mismatches), "mismatch", all_rows)
    resized = set(plan.resize)
    if all_rows:
        yield from (
            _row(plan, name, "load") for name in plan.load if name not in resized
        )
    else:
        yield from _sum_loads(plan, resized)
    groups: tuple[tuple[str, Sequence[str]], ...] = (
        ("resize", [name for name in plan.resize if name not in plan.migrate]),
        ("migrate", list(plan.migrate)),
        ("keep", plan.keep),
        ("ignore", plan.ignore),
        ("drop", list(plan.drop)),
    )
    for action, names in groups:
        for name in names[: None if all_rows else _ROWS]:
            yield _row(plan, name, action)
        yield from _more(len(names), action, all_rows)


def _more(
    count: int, action: str, all_rows: bool
) -> Iterator[tuple[str, str, str, str]]:
    if count > _ROWS and not all_rows:
        yield f"and {count - _ROWS:,} more", action, "", ""


def _sum_loads(plan: Plan, resized: set[str]) -> Iterator[tuple[str, str, str, str]]:
    leaves: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for name in plan.load:
        if name not in resized:
            first = SEGMENT.match(name)
            top = first[0] if first else ""
            leaves[top] += 1
            spec = plan.specs(name)[1]
            sizes[top] += 0 if spec is None else spec.nbytes
    for top, count in list(leaves.items())[:_ROWS]:
        what = f"{show_count(count, 'leaf')}, {show_bytes(sizes[top])}"
        yield escape(shown_name(top)), "load", what, ""
    yield from _more(len(leaves), "load", False)


def _row(plan: Plan, name: str, action: str) -> tuple[str, str, str, str]:
    expected, found = plan.specs(name)
    if action == "keep":
        return escape(shown_name(name)), action, "the skeleton's", ""
    if action == "ignore":
        return escape(shown_name(name)), action, "", _spec(found)
    if action == "drop":
        return escape(shown_name(name)), action, "", escape(f"by {plan.drop[name]}")
    detail = _spec(found)
    if action == "migrate":
        origin = plan.migrate[name]
        verb = "adopted" if name in plan.adopt else "from"
        sources = ", ".join(origin.sources[:2]) or "no leaf"
        more = f" and {len(origin.sources) - 2} more" if len(origin.sources) > 2 else ""
        detail = escape(f"{verb} {sources}{more}, by {origin.rule}")
    return escape(shown_name(name)), action, _spec(expected), detail


def _spec(spec: LeafSpec | None) -> str:
    return "nothing" if spec is None else str(spec)


def _trim(rows: Sequence[tuple[str, str, str, str]]) -> list[tuple[str, ...]]:
    """Join the last two columns, aligned to the left, behind the first two."""
    width = max(len(row[2]) for row in rows) if rows else 0
    return [(a, f"{b:<8}  {c:<{width}}  {d}".rstrip()) for a, b, c, d in rows]


def _remedy(suggestions: Sequence[str]) -> list[str]:
    if not suggestions:
        return []
    moves = any(".move(" in line for line in suggestions)
    what = "looks like a move; " if moves else ""
    code = (*_PASTE, *suggestions, _USE)
    pasted = (f"    {line}".rstrip() for line in code)
    return ["", f"{what}a migration that may mend it:", "", *pasted]


def plan_document(plan: Plan) -> dict[str, Any]:
    """Return a plan as plain data: all of its leaves."""
    return {
        "path": plan.path,
        "subtree": plan.subtree,
        "checkpoint_id": plan.checkpoint_id,
        "step": plan.step,
        "restores": not plan.mismatches,
        "load": list(plan.load),
        "migrate": [
            {"name": name, "sources": list(origin.sources), "rule": origin.rule}
            for name, origin in plan.migrate.items()
        ],
        "keep": list(plan.keep),
        "ignore": list(plan.ignore),
        "resize": list(plan.resize),
        "adopt": list(plan.adopt),
        "drop": [{"name": name, "rule": rule} for name, rule in plan.drop.items()],
        "mismatches": [
            {
                "name": item.name,
                "problem": item.problem,
                "expected": None if item.expected is None else str(item.expected),
                "found": None if item.found is None else str(item.found),
                "note": item.note,
            }
            for item in plan.mismatches
        ],
        "notes": list(plan.notes),
        "suggestions": list(plan.suggestions),
    }
