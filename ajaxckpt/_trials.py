"""One run of a user's agent, part by part: where it ends, what it logged, its compiles.

Knows jax and the user's functions; compares nothing.
"""

# jax's own annotations are partial
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import numpy as np

from ajaxckpt._advances import is_pair, read_answer, read_rows, row_step
from ajaxckpt._checkpoint import restore_into, save_checkpoint
from ajaxckpt._decisions import Patterns
from ajaxckpt._equivalence import Held, capture_state
from ajaxckpt._errors import InvalidArgumentError
from ajaxckpt._migrations import Migrations
from ajaxckpt._tree import flatten_state

_BACKEND_COMPILE = "/jax/core/compile/backend_compile_duration"


class CompileCounter:
    """Counts what XLA compiles in this process, by the events JAX itself reports."""

    def __init__(self) -> None:
        """Listen from now on: older versions of JAX cannot take a listener back."""
        self.compiles = 0
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **facts: Any) -> None:
        del duration_secs, facts
        self.compiles += event == _BACKEND_COMPILE


@cache
def compile_counter() -> CompileCounter:
    """Return the one counter of this process."""
    return CompileCounter()


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What the user gave: how a state is built, advanced, saved and restored."""

    make_skeleton: Callable[[], Any]
    advance: Callable[[Any, int], Any]
    step: Callable[[Any], Any] | None
    logs: Callable[[], Any] | None
    save: Callable[[Any, str], object]
    restore: Callable[[Any, str], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a state is saved and restored where the user gave no functions for it."""

    exclude: Patterns = ()
    keep: Patterns = ()
    ignore: Patterns = ()
    resize: Patterns = ()
    migrations: tuple[Migrations, ...] | None = None

    def save(self, state: Any, path: str) -> None:
        """Save as ``save_checkpoint`` does."""
        save_checkpoint(state, path, exclude=self.exclude, migrations=self.migrations)

    def restore(self, skeleton: Any, path: str) -> Any:
        """Restore as ``restore_into`` does."""
        return restore_into(
            skeleton,
            path,
            keep=self.keep,
            ignore=self.ignore,
            resize=self.resize,
            migrations=self.migrations,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One call of advance: what it was asked for, and what it came to.

    Attributes:
        asked: the steps it was asked for.
        steps: how far it went.
        compiles: the programs it compiled.
        rows: what it logged.
    """

    asked: int
    steps: int
    compiles: int
    rows: Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Where a run ended, and how it got there."""

    end: Mapping[str, Held]
    parts: tuple[Part, ...]

    @property
    def steps(self) -> int:
        """How far the run went."""
        return sum(part.steps for part in self.parts)

    @property
    def logs(self) -> dict[str, Held]:
        """What the run logged."""
        return record_rows([row for part in self.parts for row in part.rows])


HandOver = Callable[[Any, int], Any]


def run_trial(
    trial: Trial,
    state: Any,
    targets: Sequence[int],
    hand_over: HandOver | None = None,
    *,
    done: int = 0,
    label: str,
) -> Outcome:
    """Advance a state to the last target, in parts that end at or after each target.

    Args:
        trial: the user's functions.
        state: where to begin; it may be donated.
        targets: how far each part is to get, counted from the start of the run. A
            target that an earlier part has passed takes no call.
        hand_over: gets the state between two parts and the number of the cut, and
            returns the state to go on from.
        done: how far the run is already.
        label: what the run is, for notes on errors.
    """
    pair = is_pair(state)
    parts: list[Part] = []
    for target in targets:
        if target <= done:
            continue
        if parts and hand_over is not None:
            state = hand_over(state, len(parts) - 1)
        with noting(f"raised in the run {label}, {done} steps in"):
            state, part = call_once(trial, state, target - done, pair)
        done += part.steps
        parts.append(part)
    return Outcome(end=capture_state(state), parts=tuple(parts))


def call_once(
    trial: Trial, state: Any, n: int, state_is_pair: bool
) -> tuple[Any, Part]:
    """Call advance once.

    Returns:
        The state, computed and not merely dispatched, and what the call came to.
    """
    before = _read_step(trial, state)
    if trial.logs is not None:
        trial.logs()  # what others have logged before
    counter = compile_counter()
    compiled = counter.compiles
    answer = read_answer(trial.advance(state, n), state_is_pair=state_is_pair)
    leaves = jax.tree.leaves(answer.state)
    jax.block_until_ready([leaf for leaf in leaves if isinstance(leaf, jax.Array)])
    compiles = counter.compiles - compiled
    steps = answer.steps
    if steps is None:
        steps = n if before is None else (_read_step(trial, answer.state) or 0) - before
    if int(steps) < 1:
        raise InvalidArgumentError(
            f"advance(state, {n}) went {steps} steps",
            hint="let it go at least one, and check what step= reads",
        )
    rows = read_rows(answer.logs)
    if trial.logs is not None:
        rows += read_rows(trial.logs())
    part = Part(asked=n, steps=int(steps), compiles=compiles, rows=rows)
    return answer.state, part


def _read_step(trial: Trial, state: Any) -> int | None:
    """Return how far a state is, by the user's word; seeds must agree."""
    if trial.step is None:
        return None
    values = np.unique(np.asarray(trial.step(state)))
    if values.size != 1:
        found = ", ".join(map(str, values.tolist()[:3]))
        raise InvalidArgumentError(f"step= reads several steps in one state: {found}")
    return int(values[0])


def record_rows(rows: Sequence[Mapping[str, Any]]) -> dict[str, Held]:
    """Record what was logged as leaves named by step, or by row where none is said."""
    steps = [row_step(row) for row in rows]
    named = None not in steps
    found: dict[str, Held] = {}
    seen: dict[Any, int] = {}
    for number, row in enumerate(rows):
        place = steps[number] if named else number
        again = seen[place] = seen.get(place, -1) + 1
        prefix = f"logs.{place}" + (f".again{again}" if again else "")
        for name, held in capture_state(dict(row)).items():
            found[f"{prefix}.{name}"] = held
    return found


@contextmanager
def noting(note: str) -> Generator[None]:
    """Add to an error of the user's code in which run it arose."""
    try:
        yield
    except Exception as error:
        error.add_note(f"ajaxckpt.testing: {note}")
        raise


def describe_places(state: Any) -> dict[str, str]:
    """Return where each jax array lies, and whether it is bound to lie there."""
    return {
        name: f"{leaf.sharding}, {'committed' if leaf.committed else 'uncommitted'}"
        for name, leaf in flatten_state(state).leaves.items()
        if isinstance(leaf, jax.Array)
    }
