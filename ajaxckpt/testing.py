"""Helpers for your own suite: resume is exact, states are the same, old files restore.

What each does stands in modules of its own; nothing here loads jax before it is used.
"""

from __future__ import annotations

import glob
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ajaxckpt._advances import Advanced as Advanced
    from ajaxckpt._migrations import Migrations
    from ajaxckpt._sensitivity import Sensitivity

__all__ = [
    "Advanced",
    "assert_files_restore",
    "assert_resume_equivalent",
    "assert_same_state",
    "find_insensitive_leaves",
    "lint_state",
]

Paths = str | os.PathLike[str]
Patterns = str | Sequence[str]
Split = int | Sequence[int | Sequence[int]]


def __getattr__(name: str) -> object:
    """Fetch the one class when it is first asked for: it takes numpy."""
    if name != "Advanced":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ajaxckpt._advances import Advanced

    return Advanced


def assert_resume_equivalent(
    make_skeleton: Callable[[], Any],
    advance: Callable[[Any, int], Any],
    *,
    total: int,
    split: Split,
    tolerance: Mapping[str, float | tuple[float, float]] | None = None,
    fresh_process: bool = False,
    step: Callable[[Any], Any] | None = None,
    logs: Callable[[], Any] | None = None,
    exclude: Patterns = (),
    keep: Patterns = (),
    ignore: Patterns = (),
    resize: Patterns = (),
    migrations: Migrations | Iterable[Migrations] | None = None,
    save: Callable[[Any, str], object] | None = None,
    restore: Callable[[Any, str], Any] | None = None,
    compare_whole: bool = True,
    compare_compiles: bool = True,
    directory: str | os.PathLike[str] | None = None,
) -> None:
    """Assert that a run split by a checkpoint is the run that never stopped.

    Compares three runs leaf by leaf, and their logs row by row: *whole* (one call),
    *split in memory* (several calls, the state handed over), and *split through a
    checkpoint* (saved, and restored into a newly built skeleton). The whole run is
    made twice. The last two must agree bit for bit, weak types and compiles
    included, whatever the agent; the first two to ``tolerance``. Where two differ,
    the run in memory is made once more, to tell apart an agent that is not
    deterministic. ``save`` must leave its state as it is, and what moves in a run must
    be a leaf: static data that does is the new skeleton's after a restore.

    Args:
        make_skeleton: builds the state before the first step; called anew for every
            run and every restore.
        advance: takes a state, which it may donate, and a number of steps. Returns
            the new state; or a pair of it and its logs (unless the state is a plain
            pair itself); or an ``Advanced``.
        total: steps of the whole run, as ``advance`` counts them.
        split: a place between 0 and ``total``; or several, each tried by itself, of
            which one that is a tuple cuts a single run into more than two parts.
        tolerance: between whole and split in memory, pattern to number: how far the
            floats of a leaf may be apart, relative to its largest value; or to a
            pair ``(rtol, atol)`` for each element. The last pattern that selects a
            leaf counts; other leaves are compared bit for bit, as are integers,
            keys, dtypes, shapes and weak types always.
        fresh_process: whether to restore and go on in a process of its own too; the
            functions are then imported there by module and name.
        step: reads from a state how far it is, where ``advance`` rounds up.
        logs: returns, and forgets, the rows logged since it was last called, where
            they are not part of what ``advance`` returns.
        exclude: as in ``save_checkpoint``.
        keep: as in ``restore_into``.
        ignore: as in ``restore_into``.
        resize: as in ``restore_into``.
        migrations: as in ``restore_into``.
        save: your own, ``save(state, path)``; the five above are then not used by it.
        restore: your own, ``restore(skeleton, path)``, returns the state.
        compare_whole: whether to make and compare the whole run at all.
        compare_compiles: whether the call after the restore may compile nothing that
            it would not compile with the state handed over in memory.
        directory: where to leave the checkpoints; a temporary one by default.

    Raises:
        AssertionError: two runs differ. It tells apart ``the agent is not
            deterministic``, ``splitting changes it`` and ``the checkpoint changes
            it``, and names the leaves, how far apart they are, and what that usually
            means; ``.differences`` has them as data. What was saved does not restore
            into a new skeleton: the checkpoint changes it, and the cause is a
            ``LayoutMismatchError``.
        InvalidArgumentError: an argument is wrong.

    Example:
        >>> def advance(state, n):
        ...     return {"w": state["w"] + n, "step": state["step"] + n}
        >>> build = lambda: {"w": jnp.zeros(3), "step": jnp.int32(0)}
        >>> assert_resume_equivalent(build, advance, total=6, split=[2, 3, (2, 4)])
    """
    from ajaxckpt._resume_runs import Comparison, check_equivalence

    options, trial, functions = _gather_trial(
        {"make_skeleton": make_skeleton, "advance": advance},
        {"step": step, "logs": logs, "save": save, "restore": restore},
        {"exclude": exclude, "keep": keep, "ignore": ignore, "resize": resize},
        migrations,
    )
    with _scratch(directory) as folder:
        check_equivalence(
            Comparison(
                trial=trial,
                options=options,
                total=total,
                split=split,
                tolerance=tolerance,
                compare_whole=compare_whole,
                compare_compiles=compare_compiles,
                fresh_process=fresh_process,
                directory=folder,
                functions=functions,
            )
        )


def find_insensitive_leaves(
    make_skeleton: Callable[[], Any],
    advance: Callable[[Any, int], Any],
    *,
    total: int,
    split: int,
    groups: Mapping[str, Patterns] | None = None,
    step: Callable[[Any], Any] | None = None,
    logs: Callable[[], Any] | None = None,
    resize: Patterns = (),
    directory: str | os.PathLike[str] | None = None,
) -> Sensitivity:
    """Find the leaves that ``assert_resume_equivalent`` would not miss.

    At the split each leaf, or group of leaves, is reset to the skeleton's in turn,
    and the run goes on. What makes no difference at the end is either not read
    before it is written, or the run is too short to tell: a comparison that passes
    says nothing of those leaves.

    Args:
        make_skeleton: as in ``assert_resume_equivalent``.
        advance: as in ``assert_resume_equivalent``; called once more per reset, and
            once with nothing reset.
        total: as in ``assert_resume_equivalent``.
        split: where leaves are reset.
        groups: name to patterns: leaves to reset together. Each leaf by itself if
            there are none.
        step: as in ``assert_resume_equivalent``.
        logs: as in ``assert_resume_equivalent``.
        resize: as in ``restore_into``.
        directory: as in ``assert_resume_equivalent``.

    Returns:
        ``.noticed``, a mapping from leaf or group to the first leaf that then
        differs (its own where they do); ``.unnoticed``; and ``.unchanged``, those
        that are at the split what they are in the skeleton. It prints as a list.

    Raises:
        AssertionError: the run ends otherwise with nothing reset, so that resets would
            show nothing; says whose fault it is, as in ``assert_resume_equivalent``.
        InvalidArgumentError: an argument is wrong.

    Example:
        >>> def advance(state, n):
        ...     return {"w": state["w"] + n, "last": jnp.float32(n)}
        >>> build = lambda: {"w": jnp.zeros(3), "last": jnp.float32(0)}
        >>> find_insensitive_leaves(build, advance, total=6, split=3).unnoticed
        ('last',)
    """
    from ajaxckpt._sensitivity import find_sensitivity

    required = {"make_skeleton": make_skeleton, "advance": advance}
    optional = {"step": step, "logs": logs}
    _, trial, _ = _gather_trial(required, optional, {"resize": resize}, None)
    with _scratch(directory) as folder:
        return find_sensitivity(trial, total, split, groups, folder)


def _gather_trial(
    required: Mapping[str, Any],
    optional: Mapping[str, Any],
    patterns: Mapping[str, Patterns],
    migrations: Any,
) -> tuple[Any, Any, dict[str, Any]]:
    """Return options, trial and the functions that were given, by argument."""
    from ajaxckpt._trials import Options, Trial

    registries = None if migrations is None else _as_given(migrations)
    options = Options(**patterns, migrations=registries)
    given = {name: f for name, f in optional.items() if f is not None}
    own: dict[str, Any] = {"step": None, "logs": None}
    own |= {"save": options.save, "restore": options.restore}
    trial = Trial(**{**own, **required, **given})
    return options, trial, {**required, **given}


def _scratch(
    directory: str | os.PathLike[str] | None,
) -> AbstractContextManager[str]:
    """Return a context that gives a directory: the user's, or one that goes again."""
    if directory is not None:
        return nullcontext(os.fspath(directory))
    return tempfile.TemporaryDirectory(prefix="ajaxckpt-")


def assert_same_state(
    a: Any,
    b: Any,
    *,
    tolerance: Mapping[str, float | tuple[float, float]] | None = None,
    ignore: Patterns = (),
) -> None:
    """Assert that two states agree in every leaf: name, kind, dtype, shape and bits.

    Weak types count, and so does whether a leaf lies in jax, in numpy or in Python;
    the device, node classes and functions do not. NaN equals the same NaN.

    Args:
        a: the state expected.
        b: the state found.
        tolerance: as in ``assert_resume_equivalent``.
        ignore: patterns of leaves to pass over.

    Raises:
        AssertionError: they differ; names the leaves, how far apart they are, and
            what that usually means.

    Example:
        >>> assert_same_state({"w": jnp.ones(3)}, {"w": jnp.ones(3)})
    """
    from ajaxckpt._equivalence import assert_same

    assert_same(a, b, tolerance, ignore)


def lint_state(state: Any) -> tuple[str, ...]:
    """Return what a training state seems to lack, told by the names of its leaves.

    A guess, for a look before the first long run: whether a run resumes exactly is
    what ``assert_resume_equivalent`` tells.

    Args:
        state: the state, or a skeleton.

    Returns:
        One line each if no leaf is a PRNG key, and if none is a counter.

    Raises:
        UnsupportedLeafError: a leaf is of a kind that no checkpoint can hold.

    Example:
        >>> [line.split(":")[0] for line in lint_state({"w": jnp.ones(3), "step": 0})]
        ['no leaf is a PRNG key']
    """
    from ajaxckpt._roles import lint_roles
    from ajaxckpt._skeletons import describe_skeleton
    from ajaxckpt._tree import flatten_state

    return lint_roles(describe_skeleton(flatten_state(state), ()).items())


def assert_files_restore(
    paths: Paths | Iterable[Paths],
    make_skeleton: Callable[[], Any],
    *,
    migrations: Migrations | Iterable[Migrations] | None = None,
    keep: Patterns = (),
    ignore: Patterns = (),
    resize: Patterns = (),
    check: Callable[[Any, str], object] | None = None,
) -> None:
    """Assert that every golden file restores into what the code builds today.

    Keep one small file per layout that you released, and never change it.

    Args:
        paths: a directory (each file in it, hidden ones aside), a glob pattern, one
            file, or several paths.
        make_skeleton: builds the skeleton; called anew for every file.
        migrations: as in ``restore_into``.
        keep: as in ``restore_into``.
        ignore: as in ``restore_into``.
        resize: as in ``restore_into``.
        check: gets each restored state and its path, and raises AssertionError if
            the values are not right.

    Raises:
        AssertionError: a file does not restore or fails ``check``, each listed with
            its message; or there is no file at all.

    Example:
        >>> assert_files_restore([path], lambda: {"w": jnp.zeros(3), "step": 0})
    """
    from ajaxckpt._checkpoint import restore_into
    from ajaxckpt._errors import CheckpointError

    found = _list_files(paths)
    if not found:
        raise AssertionError(f"no files to restore: {paths!r} matches nothing")
    registries = migrations if migrations is None else _as_given(migrations)
    failures: list[str] = []
    for path in found:
        try:
            state = restore_into(
                make_skeleton(),
                path,
                keep=keep,
                ignore=ignore,
                resize=resize,
                migrations=registries,
            )
            if check is not None:
                check(state, path)
        except CheckpointError as error:
            failures.append(str(error))
        except AssertionError as error:
            failures.append(f"{path}: check failed: {error}")
    if failures:
        head = f"{len(failures)} of {len(found)} files do not restore"
        raise AssertionError("\n\n".join([head, *failures]))


def _as_given(migrations: Migrations | Iterable[Migrations]) -> tuple[Migrations, ...]:
    """Hold what may be a generator: it serves every file."""
    from ajaxckpt._migrations import as_registries

    return as_registries(migrations)


def _list_files(paths: Paths | Iterable[Paths]) -> list[str]:
    if not isinstance(paths, str | os.PathLike):
        return [os.fspath(path) for path in paths]
    path = os.fspath(paths)
    if os.path.isdir(path):
        names = (name for name in sorted(os.listdir(path)) if name[0] != ".")
        files = (os.path.join(path, name) for name in names)
        return [file for file in files if os.path.isfile(file)]
    return [path] if os.path.exists(path) else sorted(glob.glob(path, recursive=True))
