"""Whose fault it is that two runs differ, what that usually means, how to mend it.

Knows records of states and logs; runs nothing.
"""

# jax's own annotations are partial
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ajaxckpt._equivalence import (
    LeafDifference,
    Record,
    StateDifferenceError,
    capture_state,
    count_leaves,
    diff_records,
    explain_states,
    resolve_tolerance,
    telling_leaf,
)
from ajaxckpt._errors import InvalidArgumentError, UnsupportedLeafError
from ajaxckpt._grammar import clip
from ajaxckpt._layout import shown_name
from ajaxckpt._patterns import select_names
from ajaxckpt._roles import find_role
from ajaxckpt._trials import (
    Outcome,
    Static,
    describe_static,
)

CHANCE = "the agent is not deterministic"
SPLITTING = "splitting changes it"
CHECKPOINT = "the checkpoint changes it"


def refuse_other_starts(first: Record, second: Record) -> None:
    """Refuse a make_skeleton that builds another state when it is called again."""
    if found := diff_records(first, second):
        counted = count_leaves(found, len(first))
        raise StateDifferenceError(
            f"{CHANCE}: {counted} between two calls of make_skeleton",
            differences=found,
            meaning="it draws on something from outside: a seed from the clock, "
            "np.random, a global that counts calls, an array that a run wrote into",
            hint="build the skeleton from fixed seeds alone, every array anew",
        )


def refuse_chance(first: Outcome, second: Outcome, runs: str) -> None:
    """Refuse an agent of which two equal runs differ.

    Args:
        first: what one run came to.
        second: what the other came to.
        runs: what they are, for the message.
    """
    if found := diff_records(first.end, second.end):
        counted = count_leaves(found, len(first.end))
        raise StateDifferenceError(
            f"{CHANCE}: {counted} between {runs}",
            differences=found,
            meaning=_explain_chance(found, first.end),
            hint="carry every key and counter in the state; on a GPU also set "
            "XLA_FLAGS=--xla_gpu_deterministic_ops=true",
        )
    steps = [[part.steps for part in run.parts] for run in (first, second)]
    if steps[0] != steps[1]:
        raise StateDifferenceError(
            f"{CHANCE}: {runs} go {' and '.join(map(sum_steps, steps))} steps",
            meaning="how far a call goes depends on something outside the state",
            hint="carry every key and counter in the state",
        )
    if found := diff_records(first.logs, second.logs):
        problem = f"{CHANCE}: {runs} log otherwise"
        raise logs_error(problem, first.logs, second.logs, found, "chance")


def sum_steps(steps: Sequence[int]) -> str:
    """Write what several calls add up to: ``3 + 4``."""
    return " + ".join(map(str, steps))


def _explain_chance(found: Sequence[LeafDifference], end: Record) -> str:
    name, spec = telling_leaf(found)
    meaning = (
        "randomness, time or a counter from outside the state takes part (np.random, "
        f"a global, a cache); {shown_name(name)} is {find_role(name, spec).name}"
    )
    roles = {find_role(leaf, held.spec).name for leaf, held in end.items()}
    if "a PRNG key" not in roles:
        meaning += "; no leaf of the state is a PRNG key"
    return meaning


def differ_from_whole(
    total: int,
    tolerance: Mapping[str, Any] | None,
    whole: Outcome,
    memory: Outcome,
) -> StateDifferenceError | None:
    """Return what splitting in memory changes, None if nothing."""
    calls = sum_steps([part.asked for part in memory.parts])
    runs = f"one call of {total} steps and calls of {calls}"
    if whole.steps != memory.steps:
        return StateDifferenceError(
            f"{SPLITTING}: {runs} go {whole.steps} and {memory.steps} steps",
            meaning="each call rounds up to whole rollouts, or begins with one",
            hint="choose total and split so that both go equally far, or let "
            "advance(state, n) take off what each call runs beyond n",
        )
    names = [*whole.end, *whole.logs]
    near = resolve_tolerance(tolerance, names)
    if found := diff_records(whole.end, memory.end, tolerance=near):
        counted = count_leaves(found, len(whole.end))
        return StateDifferenceError(
            f"{SPLITTING}: {counted} between {runs}, no checkpoint involved",
            differences=found,
            meaning=explain_splitting(found),
            hint=mend_splitting(found),
        )
    if found := diff_records(whole.logs, memory.logs, tolerance=near):
        problem = f"{SPLITTING}: the logs differ between {runs}, with the same end"
        return logs_error(problem, whole.logs, memory.logs, found, "splitting")
    return None


def explain_splitting(found: Sequence[LeafDifference]) -> str:
    """Say what it usually means that calls differ from one call in these leaves."""
    if all(item.is_rounding for item in found):
        return (
            "the calls are two programs that round differently; all that counts "
            "(keys, counters, cursors) is the same"
        )
    if any(item.problem != "value" for item in found):
        return explain_states(found)
    name, spec = telling_leaf(found)
    role = find_role(name, spec)
    what = f"{shown_name(name)} is {role.name}"
    if role.is_downstream and all(item.relative is not None for item in found):
        return (
            "a schedule that runs over the steps of the call, not over the horizon, or "
            "something that each call sets up again: no key and no counter differs, "
            f"and {what}"
        )
    return f"{what}: {role.split}"


def mend_splitting(found: Sequence[LeafDifference]) -> str:
    """Say what to do where calls differ from one call in these leaves."""
    if not all(item.is_rounding for item in found):
        return (
            "carry it in the state; let schedules read a count of the state and run "
            "over total_timesteps"
        )
    worst = max(item.relative or 0.0 for item in found)
    return (
        "make the number of steps an operand of one compiled program; or say what "
        f'you accept: tolerance={{"**": {2 * worst:.0e}}}'
    )


def refuse_changed_by_saving(
    before: Record, static: Mapping[str, Static], state: Any
) -> None:
    """Refuse a save= that does not leave a state as it was.

    Args:
        before: the state as it was.
        static: what of it was no leaf.
        state: the state, saved since.
    """
    problem = f"{CHECKPOINT}: save= changed the state it was given"
    hint = "let save= leave the state as it is; copy what it has to change"
    try:
        found = diff_records(before, capture_state(state))
    except UnsupportedLeafError as error:
        raise StateDifferenceError(
            problem, details=[error.problem], hint=hint
        ) from error
    details = _list_static(static, describe_static(state))
    if found or details:
        raise StateDifferenceError(
            problem,
            differences=found,
            details=details,
            meaning="it pops, casts or clears what is not to be saved, and the run "
            "goes on without it",
            hint=hint,
        )


def refuse_lost_static(
    start: Mapping[str, Static],
    saved: Mapping[str, Static],
    restored: Mapping[str, Static],
    *,
    skip: Iterable[str] = (),
    place: str,
) -> None:
    """Refuse static data that moves in a run, and is in no checkpoint.

    What is another in the skeleton of a run from its first step on is code, built
    anew, or no fault of the checkpoint.

    Args:
        start: what the run began with.
        saved: what was saved.
        restored: what was restored.
        skip: names to pass over.
        place: where it was saved, for the message.
    """
    passed = set(skip)
    moved = {
        name
        for name in {**start, **saved}
        if start.get(name) != saved.get(name) and name not in passed
    }
    details = _list_static(
        {name: value for name, value in saved.items() if name in moved},
        {name: value for name, value in restored.items() if name in moved},
    )
    if details:
        raise StateDifferenceError(
            f"{CHECKPOINT}: static data moved on the way to {place}, and is the new "
            "skeleton's after the restore",
            details=details,
            meaning="a field that is no leaf (flax's pytree_node=False, equinox's "
            "static=True), or a function, changes as the run goes on; a checkpoint "
            "holds leaves alone",
            hint="make it a leaf; or let restore= set it from one",
        )


def _list_static(
    expected: Mapping[str, Static], found: Mapping[str, Static]
) -> list[str]:
    nothing = Static(value=None, shown="nothing")
    pairs = {
        name: (expected.get(name, nothing), found.get(name, nothing))
        for name in {**expected, **found}
    }
    return [
        f"{shown_name(name)}: expected {clip(a.shown)}, found {clip(b.shown)}"
        for name, (a, b) in pairs.items()
        if a != b
    ]


def steps_error(found: str, expected: str) -> StateDifferenceError:
    """Make the error of a run that goes another way than it does in memory."""
    return StateDifferenceError(
        f"{CHECKPOINT}: after the restore it takes {found}, with the state handed "
        f"over in memory {expected}",
        meaning="how far a call goes depends on something outside the state",
        hint="carry in the state what the next call reads",
    )


def select_leaves(pattern: str, names: Sequence[str]) -> set[str]:
    """Return the names that a pattern selects, none where it selects nothing."""
    try:
        return select_names(pattern, names, argument="pattern")
    except InvalidArgumentError:  # of the file's names, or the skeleton's alone
        return set()


def explain_lost(
    found: Sequence[LeafDifference], restored: Record, fresh: Record
) -> str:
    """Say what came back wrong: the skeleton's own leaves were not restored at all."""
    untouched = {item.name for item in found if item.name in fresh}
    untouched -= {item.name for item in diff_records(restored, fresh)}
    lost = [item for item in found if item.name in untouched] or found
    name, spec = telling_leaf(lost)
    if name not in untouched and name in restored:
        return explain_states(found)
    role = find_role(name, spec)
    return (
        f"{shown_name(name)} is {role.name}, and it was not saved or not restored: "
        f"{role.lost}"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _LogsCause:
    """What it usually means that logs differ: in their values, or in their rows."""

    values: str
    rows: str
    hint: str


_LOGS_CAUSES = {
    "chance": _LogsCause(
        values="a time, or something else from outside the state, is logged",
        rows="when to log is told by a time, or by something else outside the state",
        hint="log what the state tells, and times elsewhere",
    ),
    "splitting": _LogsCause(
        values="a value is taken over the call (a mean, a key of the call), not the "
        "step",
        rows="logs or evaluations keep to a cadence of the call, not of the step: off "
        "by one at the cut, or a first or last row that every call logs",
        hint="let the step in the state say when to log, and what",
    ),
    "checkpoint": _LogsCause(
        values="a value is taken from outside the state (a running mean or a best "
        "that the logger keeps), which a restart begins anew",
        rows="when to log is told from outside the state (a logger's own counter), "
        "which a restart begins anew",
        hint="carry in the state what is logged and when; the state itself is right",
    ),
}


def logs_error(
    problem: str,
    expected: Record,
    found: Record,
    differences: list[LeafDifference],
    cause: str,
) -> StateDifferenceError:
    """Make the error of logs that differ; the cause is whose fault it is."""
    rows = [row_names(record) for record in (expected, found)]
    details: list[str] = []
    meaning = _LOGS_CAUSES[cause].values
    if rows[0] != rows[1]:
        a, b = (", ".join(names) or "none" for names in rows)
        details = [f"rows expected at {a}", f"rows found at {b}"]
        meaning = _LOGS_CAUSES[cause].rows
    return StateDifferenceError(
        problem,
        details=details,
        differences=differences,
        meaning=meaning,
        hint=_LOGS_CAUSES[cause].hint,
    )


def row_names(record: Record) -> list[str]:
    """Return the rows of a record of logs."""
    return list(dict.fromkeys(name.split(".")[1] for name in record))
