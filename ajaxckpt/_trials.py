"""One run of a user's agent, part by part: where it ends, what it logged, its compiles.

Knows jax and the user's functions, and what of a state is no leaf; compares nothing.
"""

# jax's own annotations are partial
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

from __future__ import annotations

import enum
from collections.abc import Callable, Generator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from typing import Any, cast

import jax
import numpy as np
from jax.tree_util import GetAttrKey, tree_flatten_with_path

from ajaxckpt._advances import is_pair, read_answer, read_rows, row_step
from ajaxckpt._checkpoint import restore_into, save_checkpoint
from ajaxckpt._decisions import Patterns
from ajaxckpt._equivalence import Held, capture_state
from ajaxckpt._errors import InvalidArgumentError, UnsupportedLeafError
from ajaxckpt._migrations import Migrations
from ajaxckpt._names import join_names
from ajaxckpt._tree import flatten_state, name_entry

_BACKEND_COMPILE = "/jax/core/compile/backend_compile_duration"
_DEEPEST = 20  # static data that holds itself


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


def build_skeleton(trial: Trial) -> tuple[Any, dict[str, Held]]:
    """Build a skeleton and record it.

    Raises:
        InvalidArgumentError: an array of it was donated by an earlier run.
    """
    skeleton = trial.make_skeleton()
    try:
        return skeleton, capture_state(skeleton)
    except UnsupportedLeafError as error:
        arrays = [x for x in jax.tree.leaves(skeleton) if isinstance(x, jax.Array)]
        if not any(array.is_deleted() for array in arrays):
            raise
        raise InvalidArgumentError(
            f"make_skeleton hands out what an earlier run was given: {error.problem}",
            hint="build every array anew in make_skeleton, none beside it",
        ) from error


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


# ---------------------------------------------------------------- static data


@dataclass(frozen=True, slots=True, kw_only=True)
class Static:
    """A value in a state's structure, by which a restore takes the skeleton's.

    Attributes:
        value: what is compared: plain data; functions and classes by their names.
        shown: the value as text.
    """

    value: object
    shown: str = field(compare=False)


def describe_static(state: Any) -> dict[str, Static]:
    """Return what a state holds in its nodes and not in leaves, and its functions.

    Code that is built anew is the same code: functions are their names, and objects
    without an equality of their own are their types.
    """
    found: dict[str, Static] = {}
    _add_static(state, "", found)
    return found


def _add_static(node: Any, name: str, found: dict[str, Static]) -> None:
    children, treedef = tree_flatten_with_path(node, is_leaf=lambda x: x is not node)
    data = treedef.node_data()
    if data is None:  # a leaf
        if callable(node):
            found[name] = _as_static(node)
        return
    keys = [path[0] for path, _ in children]
    if is_dataclass(node) and all(isinstance(key, GetAttrKey) for key in keys):
        below = {key.name for key in keys if isinstance(key, GetAttrKey)}
        for item in fields(node):
            if item.name not in below and hasattr(node, item.name):
                value = getattr(node, item.name)
                found[join_names(name, item.name)] = _as_static(value)
    elif not isinstance(node, Mapping | list | tuple):  # keys are in the names
        values = data[1] if isinstance(data[1], tuple) else (data[1],)
        for number, value in enumerate(cast("tuple[Any, ...]", values)):
            found[f"{name}<static {number}>"] = _as_static(value)
    for key, (_, child) in zip(keys, children, strict=True):
        _add_static(child, join_names(name, name_entry(key)), found)


def _as_static(value: Any) -> Static:
    try:
        shown = repr(value)
    except Exception:  # of a class of the user's
        shown = type(value).__name__
    return Static(value=_freeze(value), shown=shown)


@dataclass(frozen=True, slots=True)
class _Opaque:
    """An object that can be compared and not looked into."""

    value: Any

    def __eq__(self, other: object) -> bool:
        try:
            return bool(self.value == cast("_Opaque", other).value)
        except Exception:  # its own: no answer is no difference
            return True

    def __hash__(self) -> int:
        return 0


def _freeze(value: Any, depth: int = 0) -> object:
    """Copy plain data so that a later write changes nothing, and -0.0 and NaN count."""
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, enum.Enum):
        return (name, value.name)
    if value is None or isinstance(value, int | str | bytes):
        return (name, value)
    if isinstance(value, float | complex):
        return (name, repr(value))
    if isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
        return (name, str(value.dtype), value.shape, value.tobytes())
    if depth == _DEEPEST:
        return name
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value).items()
        pairs = ((_freeze(k, depth + 1), _freeze(v, depth + 1)) for k, v in items)
        return (name, frozenset(pairs))
    if isinstance(value, list | tuple):
        entries = cast("Sequence[Any]", value)
        return (name, tuple(_freeze(entry, depth + 1) for entry in entries))
    if isinstance(value, Set):
        members = cast("Set[Any]", value)
        return (name, frozenset(_freeze(member, depth + 1) for member in members))
    if is_dataclass(value) and not isinstance(value, type):
        parts = [getattr(value, f.name, None) for f in fields(value) if f.compare]
        return (name, tuple(_freeze(part, depth + 1) for part in parts))
    if (called := getattr(value, "__qualname__", None)) is not None:
        return (getattr(value, "__module__", ""), called)  # a function or a class
    return name if type(value).__eq__ is object.__eq__ else (name, _Opaque(value))
