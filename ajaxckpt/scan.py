"""Saving where training is one jitted scan: in chunks, or from inside of it.

``scan_in_chunks`` runs a scan piece by piece with a save between: nothing is traced
that was not, any state and any sharding will do. ``make_saver`` makes a function to be
called inside ``jit``, ``scan``, ``fori_loop``, ``while_loop`` and ``vmap``.
"""

# jax's own annotations are partial
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false
# pyright: reportUnknownLambdaType=false

from __future__ import annotations

import logging
import os
import traceback
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from operator import index as as_index
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

import jax
import numpy as np

from ajaxckpt._background import Worker
from ajaxckpt._checkpoint import Registries, describe_save
from ajaxckpt._collecting import collect_state, refuse_nothing
from ajaxckpt._decisions import Patterns
from ajaxckpt._errors import (
    BackgroundSaveError,
    InvalidArgumentError,
    error_context,
)
from ajaxckpt._paths import resolve_path
from ajaxckpt._provenance import gather_provenance
from ajaxckpt._scan_programs import (
    ScanPrograms,
    join_rows,
    refuse_traced_scan,
    slice_rows,
)
from ajaxckpt._snapshot import Arena, Snapshot, take_snapshot
from ajaxckpt._traced_saves import (
    TracedState,
    as_due,
    as_steps,
    copy_arrays,
    describe_traced,
    hand_over,
    is_inside_trace,
    number_of,
    read_due,
    read_steps,
    refuse_parts,
)
from ajaxckpt._writer import StateData, write_checkpoint

if TYPE_CHECKING:
    from ajaxckpt._runs import Run

__all__ = ["Saver", "Scanned", "make_saver", "scan_in_chunks"]

_KEPT_FAILURES = 10
_log = logging.getLogger("ajaxckpt")


# ------------------------------------------------------------------ scan in chunks


class Scanned(NamedTuple):
    """What ``scan_in_chunks`` returns.

    Attributes:
        carry: the carry after the last step: as ``lax.scan`` returns it, or, where
            the run was asked to stop, as the next step takes it.
        ys: what the steps from ``start`` on returned, stacked as ``lax.scan`` does.
        step: how many steps are done; less than ``length`` where the run was asked
            to stop.
    """

    carry: Any
    ys: Any
    step: int


def scan_in_chunks(
    body: Callable[[Any, Any], tuple[Any, Any]],
    carry: Any,
    length: int,
    *,
    chunk: int,
    xs: Any = None,
    start: int = 0,
    save: Callable[[Any, int], object] | None = None,
    run: Run | None = None,
    donate: bool = False,
) -> Scanned:
    """Run a jitted ``lax.scan`` in chunks, with a save after each.

    The result is that of ``jax.jit(lambda c: lax.scan(body, c, xs, length))``, bit
    for bit in chunks of two steps and more, also after going on from a carry that was
    saved. XLA dissolves a loop of one step, the last chunk's too, and may then round
    otherwise in the last place. All chunks of ``chunk`` steps are one compiled
    program, a shorter last one is a second; a further call compiles anew. Under
    ``jax.disable_jit`` nothing is compiled, as in a scan.

    A scan sees its carry in the same types at every step, and returns it in those
    that the body returns: where it takes a number strong-typed and returns it
    weak-typed, another scan of that rounds otherwise. ``save`` and ``run`` are given
    what the next step sees: go on from that.

    Args:
        body: as ``lax.scan`` takes it.
        carry: the state to begin with: a new one, or the restored one of step
            ``start``.
        length: the steps of the whole scan, those before ``start`` included.
        chunk: the steps from one save to the next.
        xs: what ``lax.scan`` would scan over, of the whole scan: arrays of ``length``
            rows, those before ``start`` included.
        start: how many steps the carry has behind it.
        save: called after each chunk with the carry, as the next step takes it, and
            the steps that are done.
        run: an open Run: each chunk is reported to it, with the steps that are done
            (``save`` takes the place of that, if given), and it ends the scan early
            when it is asked to stop.
        donate: whether the carry's memory is used again, chunk by chunk; the carry
            passed in is gone then, and ``save`` may not keep the one it gets.

    Returns:
        Carry, ys and the number of steps done.

    Raises:
        InvalidArgumentError: a number is wrong, or ``xs`` is of another length.
        UnsupportedLeafError: called inside a traced function, or with its values.

    Example:
        >>> body = lambda total, _: (total + 1.0, total)
        >>> seen = []
        >>> done = scan_in_chunks(
        ...     body, jnp.zeros(()), 5, chunk=2, save=lambda carry, n: seen.append(n)
        ... )
        >>> float(done.carry), done.ys.tolist(), seen
        (5.0, [0.0, 1.0, 2.0, 3.0, 4.0], [2, 4, 5])
    """
    with error_context(None, "cannot scan"):
        refuse_traced_scan(is_inside_trace(carry, xs))
        length, chunk, start = _check_numbers(length, chunk, start)
        _check_xs(xs, length)
    programs = ScanPrograms(body, carry, donate)
    pieces: list[Any] = []
    step = start
    while step < length and not (run is not None and pieces and run.stop_requested):
        size = min(chunk, length - step)
        carry, ys = programs.call(size, carry, slice_rows(xs, step, size))
        pieces.append(ys)
        step += size
        if save is not None:
            save(programs.as_seen(carry), step)
        elif run is not None:
            run.step(programs.as_seen(carry), step=step)
    if not pieces:
        carry, ys = programs.call(0, carry, slice_rows(xs, start, 0))
        pieces.append(ys)
    elif step < length:
        carry = programs.as_seen(carry)
    return Scanned(carry=carry, ys=join_rows(pieces), step=step)


def _check_numbers(length: int, chunk: int, start: int) -> tuple[int, int, int]:
    length, chunk, start = as_index(length), as_index(chunk), as_index(start)
    if chunk < 1:
        problem, hint = f"chunk: expected at least 1 step, found {chunk}", "pass more"
        raise InvalidArgumentError(problem, hint=hint)
    if not 0 <= start <= length:
        problem = f"start: expected 0 … {length}, found {start}"
        hint = "length counts the steps of the whole scan, those before start included"
        raise InvalidArgumentError(problem, hint=hint)
    return length, chunk, start


def _check_xs(xs: Any, length: int) -> None:
    """Refuse what ``lax.scan`` would: a slice beyond the end gives other rows."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(xs)[0]:
        if (shape := np.shape(leaf))[:1] != (length,):
            name = f"xs{jax.tree_util.keystr(path)}"
            raise InvalidArgumentError(
                f"{name}: expected an array of {length} rows, found {list(shape)}",
                hint="pass the xs of the whole scan, those before start included",
            )


# -------------------------------------------------------------- saving from inside


class _Target(Protocol):
    """Where a saver's states go."""

    path: str
    exclude: tuple[str, ...]

    def make_room(self) -> None: ...

    def take(self, data: StateData, step: int) -> None: ...

    def wait(self) -> None: ...


class _RunTarget:
    """A run: its policies decide what is saved, its worker writes it."""

    def __init__(self, run: Run, keep: Callable[[BackgroundSaveError], None]) -> None:
        self.path, self._run, self._keep = run.directory, run, keep
        self.exclude: tuple[str, ...] = ()  # the run excludes

    def make_room(self) -> None:
        """Leave the waiting to the run."""

    def take(self, data: StateData, step: int) -> None:
        try:
            self._run.step(data, step=step)
        except BackgroundSaveError as earlier:  # of another step, told only now
            self._keep(earlier)
            self._run.step(data, step=step)

    def wait(self) -> None:
        self._run.wait()


class _FileTarget:
    """One file, written by a thread of its own."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        config: Any,
        migrations: Registries,
        exclude: Patterns,
        fail: Callable[[int, Exception], None],
    ) -> None:
        self.path = resolve_path(path)
        with error_context(self.path, "cannot save"):
            self._facts = describe_save(None, None, config, migrations, exclude)
        self.exclude = self._facts.excluded
        self._worker, self._fail = Worker(), fail

    def make_room(self) -> None:
        """Wait while one state is being written and another waits for it."""
        self._worker.wait(1)

    def take(self, data: StateData, step: int) -> None:
        refuse_nothing(data, self.exclude, self.path)
        snapshot = take_snapshot(data, Arena())
        self._worker.submit(lambda: self._write(snapshot, step))

    def _write(self, snapshot: Snapshot, step: int) -> None:
        facts = replace(
            self._facts,
            checkpoint_id=uuid.uuid4().hex,
            step=step,
            provenance=gather_provenance(),
        )
        try:
            with error_context(self.path, "cannot save"):
                write_checkpoint(self.path, snapshot.data, facts)
        except Exception as error:
            self._fail(step, error)
        finally:
            snapshot.discard()

    def wait(self) -> None:
        self._worker.close()


class Saver:
    """A function to call inside ``jit``, and what became of its saves outside.

    Made by ``make_saver``. Inside: ``save(state, step, due)``. Outside: ``wait()``, or
    the end of a ``with`` block, waits for what was saved and raises what failed.

    Attributes:
        failures: the first saves that failed, oldest first.
        failed: how many failed.
    """

    def __init__(
        self,
        target: Run | str | os.PathLike[str],
        config: Any,
        migrations: Registries,
        exclude: Patterns,
    ) -> None:
        """Check the arguments; see ``make_saver``."""
        self.failures: list[BackgroundSaveError] = []
        self.failed = 0
        self._untold: list[BackgroundSaveError] = []
        self._target: _Target
        if isinstance(target, str | os.PathLike):
            self._target = _FileTarget(target, config, migrations, exclude, self._fail)
            return
        if not hasattr(target, "restore_or_init"):
            problem = f"expected a Run or a path, found {type(target).__name__}"
            hint = "pass Run(directory), or the path of a file"
            raise InvalidArgumentError(problem, hint=hint)
        if config is not None or migrations is not None or exclude:
            problem = "config, migrations and exclude are the run's"
            raise InvalidArgumentError(problem, hint="pass them to Run(…)")
        self._target = _RunTarget(target, self._keep)

    def __repr__(self) -> str:
        """Show where it saves to."""
        return f"<Saver {self._target.path}>"

    def __call__(self, state: Any, step: Any, due: Any = True) -> None:
        """Save a state if it is due; inside a traced function or outside.

        Args:
            state: the state; under ``vmap``, of one seed.
            step: its number: an integer, the same for all seeds.
            due: a bool, the same for all seeds; only where it holds is anything
                brought to the host. A value, not a reason for ``lax.cond``.

        Raises:
            UnsupportedLeafError: a leaf cannot be saved; or the call stands inside
                ``shard_map`` or ``pmap``.
            InvalidArgumentError: step or due is of the wrong type, or step is negative
                or too large.
            BackgroundSaveError: an earlier save failed.
        """
        self._raise_failure()
        with error_context(self._target.path, "cannot save"):
            refuse_parts()
            if not is_inside_trace(state, step, due):
                self._save_now(state, step, due)
                return
            traced = describe_traced(state)
            receive = partial(self._receive, traced)
            arrays = list(traced.arrays.values())
            hand_over(receive, as_due(due), as_steps(step), arrays)

    def _save_now(self, state: Any, step: Any, due: Any) -> None:
        """Save a state of values, as a call outside of any trace is."""
        if not np.any(as_due(due)):
            return
        read_due(due)
        number = number_of(step)
        data = collect_state(state, self._target.exclude)
        self._target.make_room()
        self._target.take(data, number)

    def _receive(
        self, traced: TracedState, due: Any, step: Any, arrays: Sequence[Any]
    ) -> None:
        """Take what a program handed over; no error may reach the program.

        JAX would end the program with a JaxRuntimeError, and its state would be lost.
        """
        number = -1
        try:
            number = int(np.asarray(step).max())
            read_due(due)
            number = read_steps(step)
            self._target.make_room()
            data = copy_arrays(traced, arrays)
            self._target.take(collect_state(data, self._target.exclude), number)
        except Exception as error:
            self._fail(number, error)

    def _fail(self, step: int, error: Exception) -> None:
        failure = BackgroundSaveError(
            f"step {step} was not saved: {error}",
            path=self._target.path,
            hint="mend the cause; the program went on without the save",
        )
        failure.step = step
        failure.__cause__ = error
        traceback.clear_frames(error.__traceback__)  # they hold the state
        _log.error("%s", failure)
        self._keep(failure)

    def _keep(self, failure: BackgroundSaveError) -> None:
        """Keep a failure until somebody outside can be told."""
        self.failed += 1
        if len(self.failures) < _KEPT_FAILURES:
            self.failures.append(failure)
        if len(self._untold) < _KEPT_FAILURES:
            self._untold.append(failure)

    def _raise_failure(self) -> None:
        untold, self._untold = self._untold, []
        for other in untold[1:]:
            untold[0].add_note(other.problem)
        if untold:
            raise untold[0]

    def wait(self) -> None:
        """Wait for the programs that save, and until what they saved is written.

        Raises:
            BackgroundSaveError: a save failed; the others are its notes.
        """
        jax.effects_barrier()
        self._target.wait()
        self._raise_failure()

    def __enter__(self) -> Self:
        """Return the saver."""
        return self

    def __exit__(
        self, kind: object, error: BaseException | None, trace: object
    ) -> None:
        """Wait, and raise what failed; it never hides the error that is raised."""
        try:
            self.wait()
        except Exception as failure:
            if error is None:
                raise
            error.add_note(f"while the saver was left: {failure}")


def make_saver(
    target: Run | str | os.PathLike[str],
    *,
    config: Any = None,
    migrations: Registries = None,
    exclude: Patterns = (),
) -> Saver:
    """Make a function that saves from inside ``jit``, ``scan`` and ``vmap``.

    The file is the one that a save of the same state outside would have written: names,
    weak types and key implementations are those of the trace, numbers and numpy leaves
    are arrays as in what a jitted function returns. Under ``vmap``, also nested, all
    seeds go into one file with their axis in front. The program computes what it
    computes without the save.

    A call that is due waits while the program's last save but one is being written:
    at most two states are held in memory beside the program's (three with a Run). A
    save that fails leaves the program running: the error is logged, and raised by
    ``wait()``, at the end of a ``with`` block, and by the next call that is traced.

    JAX refuses a save in a ``lax.cond`` under ``vmap`` (pass ``due``), in a
    ``while_loop`` whose condition differs between seeds, and in what is
    differentiated. A save inside ``shard_map`` or ``pmap`` is refused, since each
    device holds a part there: save what the mapped function returns.

    Args:
        target: an open Run, whose policies then decide which of the steps that are due
            are saved; or a file, which each save replaces.
        config: what to record of the agent; of a file alone, as the next two.
        migrations: the registry of the state's layout, or several.
        exclude: patterns of leaves to leave out.

    Returns:
        The saver: ``save(state, step, due)`` inside, ``wait()`` or ``with`` outside.

    Raises:
        InvalidArgumentError: an argument is wrong.

    Example:
        >>> with make_saver(path) as save:
        ...     def body(state, _):
        ...         state = {"w": state["w"] + 1.0, "step": state["step"] + 1}
        ...         save(state, state["step"], state["step"] % 2 == 0)
        ...         return state, None
        ...     start = {"w": jnp.zeros(3), "step": jnp.int32(0)}
        ...     state, _ = jax.jit(lambda s: jax.lax.scan(body, s, None, 5))(start)
        >>> with open_checkpoint(path) as checkpoint:
        ...     checkpoint.step, checkpoint["w"].tolist()
        (4, [4.0, 4.0, 4.0])
    """
    return Saver(target, config, migrations, exclude)
