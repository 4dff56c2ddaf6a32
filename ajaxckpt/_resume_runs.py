"""Three runs of one agent: whole, split in memory, split through a checkpoint.

Knows which of them must be the same, and whose fault it is if they are not; runs
through ``_trials`` and compares through ``_equivalence``.
"""

# jax's own annotations are partial
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
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
    telling_leaf,
)
from ajaxckpt._errors import (
    InvalidArgumentError,
    LayoutMismatchError,
)
from ajaxckpt._fresh_process import Errand, locate_function, read_end, run_errand
from ajaxckpt._layout import shown_name
from ajaxckpt._patterns import parse_patterns
from ajaxckpt._resume_verdicts import (
    CHECKPOINT,
    differ_from_whole,
    explain_lost,
    logs_error,
    refuse_chance,
    refuse_changed_by_saving,
    refuse_lost_static,
    refuse_other_starts,
    select_leaves,
    steps_error,
    sum_steps,
)
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
        asked = self.comparison.total, self.comparison.tolerance
        error = differ_from_whole(*asked, whole, memory)
        if error is None:
            return
        again = self._run_again(saving=False)
        if differ_from_whole(*asked, whole, again) is None:
            found = diff_records(memory.end, again.end)
            raise StateDifferenceError(
                f"{CHECKPOINT}: a run that saves goes on as another than one that "
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
                found |= select_leaves(pattern, names)
        return found

    def _compare_restored(self, restored: Record, fresh: Record, cut: int) -> None:
        saved = self._handed[cut]
        skip = self._left_out(list(saved))
        found = diff_records(saved, restored, skip=skip, any_place=True)
        if not found:
            return
        counted = count_leaves(found, len(saved))
        raise StateDifferenceError(
            f"{CHECKPOINT}: {counted} between what was saved at {self.cuts[cut]} of "
            f"{self.comparison.total} and what was restored",
            differences=found,
            meaning=explain_lost(found, restored, fresh),
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
            raise steps_error("more calls", f"{len(self._handed)}")
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
            raise steps_error(f"{sum_steps(steps)} steps", sum_steps(expected_steps))
        for part, rows in zip(memory.parts[1:], logs, strict=True):
            expected = record_rows(part.rows)
            if found := diff_records(expected, rows):
                self._refuse_chance(memory)
                problem = f"{CHECKPOINT}{where}: the logs after the restore are others"
                raise logs_error(problem, expected, rows, found, "checkpoint")

    def _end_error(
        self, found: Sequence[LeafDifference], place: str, where: str
    ) -> StateDifferenceError:
        counted = count_leaves(found, len(self._handed[0]))
        return StateDifferenceError(
            f"{CHECKPOINT}{where}: {counted} at {place}",
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
            f"{CHECKPOINT}: programs that advance compiled after the restore: "
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
            f"{CHECKPOINT}: it does not restore into a new skeleton: {error.problem}",
            details=error.details,
            meaning="the first steps build or grow what make_skeleton leaves out: a "
            "leaf that is None there, a buffer that grows",
            hint=f"build it in make_skeleton; or {error.hint}"
            if error.hint
            else "build it in make_skeleton; or say resize= for a buffer that grows",
        ) from error
