"""Which leaves a comparison of runs would notice: each reset in turn, on purpose.

Knows jax and runs through ``_trials``. A comparison that notices nothing proves
nothing; this says where.
"""

# jax's own annotations are partial
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportPrivateImportUsage=false

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ajaxckpt._advances import plan_cuts
from ajaxckpt._equivalence import (
    Held,
    LeafDifference,
    Record,
    StateDifferenceError,
    capture_state,
    diff_records,
)
from ajaxckpt._errors import InvalidArgumentError
from ajaxckpt._layout import shown_name
from ajaxckpt._patterns import select_names
from ajaxckpt._resume_runs import restore_new
from ajaxckpt._resume_verdicts import (
    refuse_chance,
    refuse_lost_static,
    refuse_other_starts,
)
from ajaxckpt._roles import find_role
from ajaxckpt._tree import FlatState, flatten_state, unflatten_state
from ajaxckpt._trials import (
    Outcome,
    Static,
    Trial,
    build_skeleton,
    describe_static,
    record_rows,
    run_trial,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity:
    """What became of every leaf, or group of leaves, that was reset at the split.

    Attributes:
        noticed: what the comparison noticed, and the first leaf or row that was
            another at the end; or the error that ``advance`` raised.
        unnoticed: what was reset and made no difference: it is not read before it is
            written, so it need not be saved; or the run is too short to tell.
        unchanged: what is still as in the skeleton at the split, so that a reset
            changes nothing; a later split may tell.
        details: a line per entry of ``unnoticed`` and ``unchanged``.
    """

    noticed: Mapping[str, str]
    unnoticed: tuple[str, ...]
    unchanged: tuple[str, ...]
    details: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Render the counts, and what is not noticed."""
        total = len(self.noticed) + len(self.unnoticed) + len(self.unchanged)
        head = f"{len(self.noticed)} of {total} resets are noticed"
        return "\n  ".join([head, *self.details])


def find_sensitivity(
    trial: Trial,
    total: int,
    split: int,
    groups: Mapping[str, Any] | None,
    directory: str,
) -> Sensitivity:
    """Reset leaves in turn; see ``testing.find_insensitive_leaves``."""
    ((cut, *more),) = plan_cuts(total, [split])
    if more:
        raise InvalidArgumentError(f"split={split!r}: expected one place")
    probe = _Probe(trial, total, cut, directory)
    probe.refuse_blindness()
    chosen = _choose_groups(groups, list(probe.middle))
    noticed: dict[str, str] = {}
    unnoticed: list[str] = []
    unchanged: list[str] = []
    for label, names in chosen.items():
        if not probe.changed(names):
            unchanged.append(label)
        elif seen := probe.reset(names):
            noticed[label] = seen
        else:
            unnoticed.append(label)
    lines = [f"unnoticed: {probe.describe(x, chosen[x])}" for x in unnoticed]
    lines += [f"unchanged: {probe.describe(x, chosen[x])}" for x in unchanged]
    return Sensitivity(
        noticed=noticed,
        unnoticed=tuple(unnoticed),
        unchanged=tuple(unchanged),
        details=tuple(lines),
    )


def _choose_groups(
    groups: Mapping[str, Any] | None, names: Sequence[str]
) -> dict[str, list[str]]:
    if groups is None:
        return {name: [name] for name in names}
    chosen: dict[str, list[str]] = {}
    for label, patterns in groups.items():
        selected = select_names(patterns, names, argument=f"groups[{label!r}]")
        chosen[label] = [name for name in names if name in selected]
    return chosen


class _Probe:
    """A run that was split once, and can be gone on with as often as one likes."""

    def __init__(self, trial: Trial, total: int, cut: int, directory: str) -> None:
        self._trial, self._targets = trial, (cut, total)
        self._done = 0
        # functions and places of every state to come; its leaves are never donated
        self._skeleton, self._start = build_skeleton(trial)
        self.middle: dict[str, Held] = {}
        self._files = [
            os.path.join(directory, f"{name}.safetensors")
            for name in ("start", "middle")
        ]
        os.makedirs(directory, exist_ok=True)  # save= may be the user's own
        trial.save(self._skeleton, self._files[0])
        self._start_static: dict[str, Static] = {}
        self._middle_static: dict[str, Static] = {}
        self._memory = outcome = self._run_in_memory()
        if len(outcome.parts) < 2:
            problem = f"split={cut}: the first call went as far as total={total}"
            raise InvalidArgumentError(problem, hint="choose a larger total")
        self._done = outcome.parts[0].steps
        self._end = outcome.end
        self._rows = record_rows(outcome.parts[1].rows)

    def _run_in_memory(self) -> Outcome:
        begin, record = build_skeleton(self._trial)
        refuse_other_starts(self._start, record)
        self._start_static = describe_static(begin)
        return run_trial(
            self._trial, begin, self._targets, self._hand_over, label="in memory"
        )

    def _hand_over(self, state: Any, cut: int) -> Any:
        del cut
        self.middle = capture_state(state)
        self._middle_static = describe_static(state)
        self._trial.save(state, self._files[1])
        return state

    def refuse_blindness(self) -> None:
        """Refuse a run that ends otherwise with nothing reset: it would show nothing.

        Raises:
            StateDifferenceError: says whose fault that is.
        """
        restored = self._restore(1)
        refuse_lost_static(
            self._start_static,
            self._middle_static,
            describe_static(unflatten_state(restored, restored.leaves)),
            place=f"{self._targets[0]} of {self._targets[1]}",
        )
        found = self._compare(self._go_on(restored, restored.leaves, "nothing"))
        if not found:
            return
        refuse_chance(self._memory, self._run_in_memory(), "two equal runs in memory")
        raise StateDifferenceError(
            "the checkpoint changes it: nothing was reset, and the end is another",
            differences=found,
            meaning="every leaf was restored as it was saved, so something outside "
            "the state takes part: a global, a host generator, a closure",
            hint="mend what assert_resume_equivalent finds first",
        )

    def _restore(self, file: int) -> FlatState:
        skeleton, path = self._skeleton, self._files[file]
        return flatten_state(restore_new(self._trial, skeleton, path))

    def _go_on(
        self, middle: FlatState, leaves: Mapping[str, Any], label: str
    ) -> Outcome:
        return run_trial(
            self._trial,
            unflatten_state(middle, leaves),
            self._targets,
            done=self._done,
            label=f"with {label} reset",
        )

    def _compare(self, outcome: Outcome) -> list[LeafDifference]:
        found = diff_records(self._end, outcome.end)
        return found + diff_records(self._rows, record_rows(outcome.parts[0].rows))

    def changed(self, names: Sequence[str]) -> bool:
        """Tell whether any of the leaves is by now another than in the skeleton."""
        return any(
            _bits(self._start, name) != _bits(self.middle, name) for name in names
        )

    def reset(self, names: Sequence[str]) -> str:
        """Go on with some leaves as in the skeleton.

        Returns:
            What was another at the end, empty if nothing was.
        """
        start, middle = self._restore(0), self._restore(1)
        leaves = dict(middle.leaves)
        for name in names:
            if name in start.leaves:
                leaves[name] = _as_trained(start.leaves[name], leaves[name])
        try:
            label = ", ".join(map(shown_name, names[:3]))
            found = self._compare(self._go_on(middle, leaves, label))
        except Exception as error:
            return f"{type(error).__name__}: {error}".splitlines()[0]
        own = [item for item in found if item.name in names]
        return (own or found)[0].name if found else ""

    def describe(self, label: str, names: Sequence[str]) -> str:
        """Name an entry and what its first leaf usually is."""
        name = names[0]
        role = find_role(name, self.middle[name].spec).name
        return f"{shown_name(label)} ({role})"


def _bits(record: Record, name: str) -> object:
    """Return a leaf's value to compare, whatever holds it: Python, numpy or jax."""
    held = record.get(name)
    if held is None or held.spec.kind == "function":
        return None
    if held.spec.kind in ("bool", "int", "float", "complex"):
        return np.asarray(held.value).astype(np.complex128).tobytes()
    if not isinstance(held.value, np.ndarray):
        return held.value
    if held.spec.kind != "key" and not held.spec.shape:
        return held.value.astype(np.complex128).tobytes()
    return (held.spec.shape, held.value.tobytes())


def _as_trained(start: Any, trained: Any) -> Any:
    """Give a leaf of the skeleton the trained one's dtype, weak type and place.

    So that a reset changes a value and nothing else, and costs no compile.
    """
    if not isinstance(trained, jax.Array) or np.shape(start) != trained.shape:
        return start
    if jax.dtypes.issubdtype(trained.dtype, jax.dtypes.prng_key):
        return start
    if isinstance(start, jax.Array) and start.aval == trained.aval:
        return start
    set_all: Callable[[Any], jax.Array] = trained.at[...].set
    return set_all(jnp.asarray(start).astype(trained.dtype))
