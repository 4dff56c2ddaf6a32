"""Three runs of one agent: whole, split in memory, split through a checkpoint.

Knows which of them must be the same, and whose fault it is if they are not; runs
through ``_trials`` and compares through ``_equivalence``.
"""

# jax's own annotations are partial
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ajaxckpt._advances import plan_cuts
from ajaxckpt._equivalence import (
    Held,
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
from ajaxckpt._errors import (
    InvalidArgumentError,
    LayoutMismatchError,
    UnsupportedLeafError,
)
from ajaxckpt._fresh_process import Errand, locate_function, read_end, run_errand
from ajaxckpt._layout import shown_name
from ajaxckpt._patterns import parse_patterns, select_names
from ajaxckpt._roles import find_role
from ajaxckpt._tree import flatten_state, unflatten_state
from ajaxckpt._trials import (
    Options,
    Outcome,
    Static,
    Trial,
    build_skeleton,
    describe_places,
    describe_static,
    noting,
    record_rows,
    run_trial,
)

_CHANCE = "the agent is not deterministic"
_SPLITTING = "splitting changes it"
_CHECKPOINT = "the checkpoint changes it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What is compared, and how strictly.

    Attributes:
        trial: the user's functions.
        options: how states are saved and restored by default.
        total: how far the whole run goes.
        split: where the other runs are cut.
        tolerance: between the whole run and the split one, by pattern.
        compare_whole: whether there is a whole run.
        compare_compiles: whether compiles after the restore count.
        fresh_process: whether there is a run in fresh processes too.
        directory: where the checkpoints go.
        functions: the user's functions by argument, for fresh processes.
    """

    trial: Trial
    options: Options
    total: int
    split: Any
    tolerance: Mapping[str, Any] | None
    compare_whole: bool
    compare_compiles: bool
    fresh_process: bool
    directory: str
    functions: Mapping[str, Any]


def check_equivalence(comparison: Comparison) -> None:
    """Run all runs and compare them; see ``testing.assert_resume_equivalent``."""
    total, functions = comparison.total, dict[str, tuple[str, str]]()
    places = plan_cuts(total, comparison.split)
    if comparison.fresh_process:
        functions = {a: locate_function(f, a) for a, f in comparison.functions.items()}
    whole = _run_whole_twice(comparison) if comparison.compare_whole else None
    for number, cuts in enumerate(places):
        folder = os.path.join(comparison.directory, f"split-{number}")
        pair = _Pair(comparison=comparison, cuts=cuts, folder=folder)
        memory = pair.run_in_memory()
        if whole is not None:
            pair.compare_with_whole(whole, memory)
        pair.run_through_checkpoint(memory)
        if comparison.fresh_process:
            pair.run_in_fresh_processes(memory, functions)


# ----------------------------------------------------------------- whole runs


def _run_whole_twice(comparison: Comparison) -> Outcome:
    trial, starts, outcomes = comparison.trial, list[Record](), list[Outcome]()
    for _ in range(2):
        # built when its run begins, since building may reset what runs then change
        start, record = build_skeleton(trial)
        starts.append(record)
        refuse_other_starts(starts[0], record)
        label = f"whole, one call of {comparison.total} steps"
        outcomes.append(run_trial(trial, start, [comparison.total], label=label))
    first, second = outcomes
    refuse_chance(first, second, f"two equal calls of {comparison.total} steps")
    return first


def refuse_other_starts(first: Record, second: Record) -> None:
    """Refuse a make_skeleton that builds another state when it is called again."""
    if found := diff_records(first, second):
        counted = count_leaves(found, len(first))
        raise StateDifferenceError(
            f"{_CHANCE}: {counted} between two calls of make_skeleton",
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
            f"{_CHANCE}: {counted} between {runs}",
            differences=found,
            meaning=_explain_chance(found, first.end),
            hint="carry every key and counter in the state; on a GPU also set "
            "XLA_FLAGS=--xla_gpu_deterministic_ops=true",
        )
    steps = [[part.steps for part in run.parts] for run in (first, second)]
    if steps[0] != steps[1]:
        raise StateDifferenceError(
            f"{_CHANCE}: {runs} go {_sum(steps[0])} and {_sum(steps[1])} steps",
            meaning="how far a call goes depends on something outside the state",
            hint="carry every key and counter in the state",
        )
    if found := diff_records(first.logs, second.logs):
        problem = f"{_CHANCE}: {runs} log otherwise"
        raise _logs_error(problem, first.logs, second.logs, found, "chance")


def _sum(steps: Sequence[int]) -> str:
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


def _differ_from_whole(
    comparison: Comparison, whole: Outcome, memory: Outcome
) -> StateDifferenceError | None:
    """Return what splitting in memory changes, None if nothing."""
    calls = _sum([part.asked for part in memory.parts])
    runs = f"one call of {comparison.total} steps and calls of {calls}"
    if whole.steps != memory.steps:
        return StateDifferenceError(
            f"{_SPLITTING}: {runs} go {whole.steps} and {memory.steps} steps",
            meaning="each call rounds up to whole rollouts, or begins with one",
            hint="choose total and split so that both go equally far, or let "
            "advance(state, n) take off what each call runs beyond n",
        )
    names = [*whole.end, *whole.logs]
    near = resolve_tolerance(comparison.tolerance, names)
    if found := diff_records(whole.end, memory.end, tolerance=near):
        counted = count_leaves(found, len(whole.end))
        return StateDifferenceError(
            f"{_SPLITTING}: {counted} between {runs}, no checkpoint involved",
            differences=found,
            meaning=_explain_splitting(found),
            hint=_mend_splitting(found),
        )
    if found := diff_records(whole.logs, memory.logs, tolerance=near):
        problem = f"{_SPLITTING}: the logs differ between {runs}, with the same end"
        return _logs_error(problem, whole.logs, memory.logs, found, "splitting")
    return None


def _explain_splitting(found: Sequence[LeafDifference]) -> str:
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


def _mend_splitting(found: Sequence[LeafDifference]) -> str:
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


# ------------------------------------------------------------------ split runs


@dataclass(slots=True, kw_only=True)
class _Pair:
    """One way to cut the run: in memory, and the same cuts through checkpoints."""

    comparison: Comparison
    cuts: tuple[int, ...]
    folder: str
    _start: Record = field(default_factory=dict[str, Held])
    _start_static: Mapping[str, Static] = field(default_factory=dict[str, Static])
    _handed: list[dict[str, Held]] = field(default_factory=list[dict[str, Held]])
    _statics: list[dict[str, Static]] = field(default_factory=list[dict[str, Static]])
    _places: list[dict[str, str]] = field(default_factory=list[dict[str, str]])

    @property
    def _trial(self) -> Trial:
        return self.comparison.trial

    @property
    def _targets(self) -> tuple[int, ...]:
        return (*self.cuts, self.comparison.total)

    @property
    def _label(self) -> str:
        return f"cut at {', '.join(map(str, self.cuts))} of {self.comparison.total}"

    def _file(self, cut: int, kind: str = "") -> str:
        return os.path.join(self.folder, f"cut-{cut}{kind}.safetensors")

    def run_in_memory(self) -> Outcome:
        """Run the parts, the state handed over; keep what was handed over."""

        def hand_over(state: Any, cut: int) -> Any:
            self._handed.append(capture_state(state))
            self._statics.append(describe_static(state))
            self._places.append(describe_places(state))
            if cut == 0:
                self._save(state, self._file(0))
            return state

        start, self._start = build_skeleton(self._trial)
        self._start_static = describe_static(start)
        label = f"{self._label}, in memory"
        memory = run_trial(self._trial, start, self._targets, hand_over, label=label)
        if len(memory.parts) < 2:
            raise InvalidArgumentError(
                f"split={self.cuts}: the first call went {memory.steps} steps, as far "
                f"as total={self.comparison.total}",
                hint="choose a larger total",
            )
        return memory

    def _run_again(self, *, saving: bool) -> Outcome:
        """Run in memory once more, and save at the first cut or do not."""

        def hand_over(state: Any, cut: int) -> Any:
            if saving and cut == 0:
                self._save(state, self._file(0, "-again"))
            return state

        start, record = build_skeleton(self._trial)
        refuse_other_starts(self._start, record)
        label = f"{self._label}, in memory, again"
        return run_trial(self._trial, start, self._targets, hand_over, label=label)

    def _refuse_chance(self, memory: Outcome) -> None:
        """Refuse an agent that would not do the same in memory again."""
        again = self._run_again(saving=True)
        refuse_chance(memory, again, f"two equal runs {self._label}, in memory")

    def compare_with_whole(self, whole: Outcome, memory: Outcome) -> None:
        """Compare the run in memory with the one that was not cut."""
        error = _differ_from_whole(self.comparison, whole, memory)
        if error is None:
            return
        again = self._run_again(saving=False)
        if _differ_from_whole(self.comparison, whole, again) is None:
            found = diff_records(memory.end, again.end)
            raise StateDifferenceError(
                f"{_CHECKPOINT}: a run that saves goes on as another than one that "
                "does not",
                differences=found,
                meaning="save= changes what the agent reads beside its state: a host "
                "generator, a global",
                hint="let save= write a file, and do nothing else",
            )
        refuse_chance(memory, again, f"two equal runs {self._label}, in memory")
        raise error

    def _save(self, state: Any, path: str) -> None:
        before, static = capture_state(state), describe_static(state)
        os.makedirs(self.folder, exist_ok=True)  # save= may be the user's own
        with noting("raised while saving"):
            self._trial.save(state, path)
        refuse_changed_by_saving(before, static, state)

    def _restore(self, cut: int) -> Any:
        skeleton, fresh = build_skeleton(self._trial)
        state = restore_new(self._trial, skeleton, self._file(cut))
        self._compare_restored(capture_state(state), fresh, cut)
        refuse_lost_static(
            self._start_static,
            self._statics[cut],
            describe_static(state),
            skip=self._left_out(list(self._statics[cut])),
            place=f"{self.cuts[cut]} of {self.comparison.total}",
        )
        return state

    def _left_out(self, names: Sequence[str]) -> set[str]:
        found: set[str] = set()
        for argument in ("exclude", "keep", "ignore"):
            given = getattr(self.comparison.options, argument)
            for pattern in parse_patterns(given, argument):
                found |= _select(pattern, names)
        return found

    def _compare_restored(self, restored: Record, fresh: Record, cut: int) -> None:
        saved = self._handed[cut]
        skip = self._left_out(list(saved))
        found = diff_records(saved, restored, skip=skip, any_place=True)
        if not found:
            return
        counted = count_leaves(found, len(saved))
        raise StateDifferenceError(
            f"{_CHECKPOINT}: {counted} between what was saved at {self.cuts[cut]} of "
            f"{self.comparison.total} and what was restored",
            differences=found,
            meaning=_explain_lost(found, restored, fresh),
            hint="save the whole state, and restore all of it into the skeleton",
        )

    def run_through_checkpoint(self, memory: Outcome) -> None:
        """Run the parts after the first from the file, and compare."""
        places: list[dict[str, str]] = []

        def hand_over(state: Any, cut: int) -> Any:
            self._compare_reached(memory, capture_state(state), cut + 1)
            self._save(state, self._file(cut + 1))
            restored = self._restore(cut + 1)
            places.append(describe_places(restored))
            return restored

        state = self._restore(0)
        places.append(describe_places(state))
        outcome = run_trial(
            self._trial,
            state,
            self._targets,
            hand_over,
            done=memory.parts[0].steps,
            label=f"{self._label}, through a checkpoint",
        )
        del state
        steps = [part.steps for part in outcome.parts]
        logs = [record_rows(part.rows) for part in outcome.parts]
        self._compare_end(memory, outcome.end, logs, "", steps)
        if self.comparison.compare_compiles:
            self._compare_compiles(outcome, places)

    def _compare_reached(self, memory: Outcome, reached: Record, cut: int) -> None:
        """Compare the restored run with the one in memory before it is cut again.

        What is saved there is otherwise not what the restore after it is held to.
        """
        if cut >= len(self._handed):
            self._refuse_chance(memory)
            raise _steps_error("more calls", f"{len(self._handed)}")
        if found := diff_records(self._handed[cut], reached):
            place = f"{self.cuts[cut]} steps into the run {self._label}"
            self._refuse_chance(memory)
            raise self._end_error(found, place, "")

    def _compare_end(
        self,
        memory: Outcome,
        end: Record,
        logs: Sequence[Record],
        where: str,
        steps: Sequence[int] | None = None,
    ) -> None:
        if found := diff_records(memory.end, end, any_place=bool(where)):
            self._refuse_chance(memory)
            raise self._end_error(found, f"the end of the run {self._label}", where)
        expected_steps = [part.steps for part in memory.parts[1:]]
        if steps is not None and steps != expected_steps:
            self._refuse_chance(memory)
            raise _steps_error(f"{_sum(steps)} steps", _sum(expected_steps))
        for part, rows in zip(memory.parts[1:], logs, strict=True):
            expected = record_rows(part.rows)
            if found := diff_records(expected, rows):
                self._refuse_chance(memory)
                problem = f"{_CHECKPOINT}{where}: the logs after the restore are others"
                raise _logs_error(problem, expected, rows, found, "checkpoint")

    def _end_error(
        self, found: Sequence[LeafDifference], place: str, where: str
    ) -> StateDifferenceError:
        counted = count_leaves(found, len(self._handed[0]))
        return StateDifferenceError(
            f"{_CHECKPOINT}{where}: {counted} at {place}",
            differences=found,
            meaning=self._explain_end(found, where),
            hint="carry in the state what the next call reads",
        )

    def _explain_end(self, found: Sequence[LeafDifference], where: str) -> str:
        skipped = sorted(self._left_out(list(self._handed[0])))
        if skipped:
            shown = ", ".join(skipped[:3])
            more = f" and {len(skipped) - 3} more" if len(skipped) > 3 else ""
            name = skipped[0]
            role = find_role(name, self._handed[0][name].spec)
            return (
                f"left out on purpose (exclude=, keep=, ignore=): {shown}{more}; "
                f"{shown_name(name)} is {role.name}: {role.lost}"
            )
        name, spec = telling_leaf(found)
        before = "" if where else "every leaf was restored as it was saved, so "
        return (
            f"{before}something outside the state takes part: a global, a host "
            "generator, a closure, a static field of the skeleton; "
            f"{shown_name(name)} is {find_role(name, spec).name}"
        )

    def _compare_compiles(
        self, outcome: Outcome, places: Sequence[Mapping[str, str]]
    ) -> None:
        compiled = [part.compiles for part in outcome.parts]
        if not any(compiled):
            return
        again = run_trial(
            self._trial,
            self._trial.make_skeleton(),
            self._targets,
            self._hand_to_new_code,
            label=f"{self._label}, in memory, again",
        )
        expected = [part.compiles for part in again.parts[1:]]
        if all(a <= b for a, b in zip(compiled, expected, strict=False)):
            return
        moved = [
            f"{name}: handed over on {then[name]}, restored on {now[name]}"
            for then, now in zip(self._places, places, strict=False)
            for name in then.keys() & now.keys()
            if then[name] != now[name]
        ]
        raise StateDifferenceError(
            f"{_CHECKPOINT}: programs that advance compiled after the restore: "
            f"{sum(compiled)}, with the state handed over in memory: {sum(expected)}",
            details=sorted(set(moved)),
            meaning="leaves were restored to another place, or committed to one, than "
            "the train call leaves them in",
            hint="build the skeleton in the same places as the train call",
        )

    def _hand_to_new_code(self, state: Any, cut: int) -> Any:
        """Hand a state over as a restore does: into a newly built skeleton's code.

        A skeleton built anew may bring functions of its own, for which a jitted call
        compiles whatever the leaves are.
        """
        del cut
        skeleton, flat = (
            flatten_state(self._trial.make_skeleton()),
            flatten_state(state),
        )
        if skeleton.leaves.keys() != flat.leaves.keys():
            return state
        return unflatten_state(skeleton, flat.leaves)

    def run_in_fresh_processes(
        self, memory: Outcome, functions: Mapping[str, tuple[str, str]]
    ) -> None:
        """Run each part after the first in a process of its own, and compare."""
        options = self.comparison.options
        plain = {
            name: parse_patterns(getattr(options, name), name)
            for name in ("exclude", "keep", "ignore", "resize")
        }
        logs: list[Record] = []
        end: Mapping[str, Held] = {}
        source = self._file(0)
        for cut, part in enumerate(memory.parts[1:]):
            last = cut == len(memory.parts) - 2
            errand = Errand(
                source=source,
                asked=part.asked,
                end=self._file(cut, "-end"),
                logs=self._file(cut, "-logs"),
                handed="" if last else self._file(cut + 1, "-fresh"),
            )
            run_errand(errand, functions, plain)
            end, rows = read_end(errand)
            logs.append(rows)
            source = errand.handed
        self._compare_end(memory, end, logs, " in a fresh process")


def refuse_changed_by_saving(
    before: Record, static: Mapping[str, Static], state: Any
) -> None:
    """Refuse a save= that does not leave a state as it was.

    Args:
        before: the state as it was.
        static: what of it was no leaf.
        state: the state, saved since.
    """
    problem = f"{_CHECKPOINT}: save= changed the state it was given"
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


def restore_new(trial: Trial, skeleton: Any, path: str) -> Any:
    """Restore into a newly built skeleton.

    Raises:
        StateDifferenceError: what was saved does not fit.
    """
    try:
        with noting("raised while restoring into a newly built skeleton"):
            return trial.restore(skeleton, path)
    except LayoutMismatchError as error:
        raise StateDifferenceError(
            f"{_CHECKPOINT}: it does not restore into a new skeleton: {error.problem}",
            details=error.details,
            meaning="the first steps build or grow what make_skeleton leaves out: a "
            "leaf that is None there, a buffer that grows",
            hint=f"build it in make_skeleton; or {error.hint}"
            if error.hint
            else "build it in make_skeleton; or say resize= for a buffer that grows",
        ) from error


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
            f"{_CHECKPOINT}: static data moved on the way to {place}, and is the new "
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
        f"{shown_name(name)}: expected {_clip(a.shown)}, found {_clip(b.shown)}"
        for name, (a, b) in pairs.items()
        if a != b
    ]


def _clip(text: str) -> str:
    return text if len(text) <= 60 else text[:59] + "…"


def _steps_error(found: str, expected: str) -> StateDifferenceError:
    return StateDifferenceError(
        f"{_CHECKPOINT}: after the restore it takes {found}, with the state handed "
        f"over in memory {expected}",
        meaning="how far a call goes depends on something outside the state",
        hint="carry in the state what the next call reads",
    )


def _select(pattern: str, names: Sequence[str]) -> set[str]:
    try:
        return select_names(pattern, names, argument="pattern")
    except InvalidArgumentError:  # of the file's names, or the skeleton's alone
        return set()


def _explain_lost(
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


# ------------------------------------------------------------------------ logs


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


def _logs_error(
    problem: str,
    expected: Record,
    found: Record,
    differences: list[LeafDifference],
    cause: str,
) -> StateDifferenceError:
    rows = [_row_names(record) for record in (expected, found)]
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


def _row_names(record: Record) -> list[str]:
    return list(dict.fromkeys(name.split(".")[1] for name in record))
