"""What a restore would do, leaf by leaf, decided from the header alone.

``plan_layouts`` is pure: two layouts and the named exceptions in, decisions out.
A ``RestorePlan`` carries them with the open file, and acts.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ajaxckpt._errors import LayoutMismatchError
from ajaxckpt._layout import (
    Layout,
    LeafSpec,
    Mismatch,
    extra_leading_axis,
    find_problem,
)
from ajaxckpt._patterns import parse_pattern, select_names
from ajaxckpt._placement import Target, find_indivisible, restore_leaves
from ajaxckpt._reader import Checkpoint
from ajaxckpt._tree import FlatState, find_member, function_name, unflatten_state

Patterns = str | Iterable[str]
_FEW_NAMES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Decisions:
    """What becomes of every leaf; names relative to the subtree.

    Attributes:
        load: filled from the file.
        keep: taken from the skeleton.
        ignore: in the file, not read.
        resize: loaded in the file's shape, which differs from the skeleton's.
        mismatches: what stands in the way; nothing is restored while there is any.
    """

    load: tuple[str, ...]
    keep: tuple[str, ...]
    ignore: tuple[str, ...]
    resize: tuple[str, ...]
    mismatches: tuple[Mismatch, ...]


def _compare_leaf(
    name: str, expected: LeafSpec | None, found: LeafSpec | None, resizable: bool
) -> Mismatch | None:
    if expected is None or found is None:
        problem = "extra" if expected is None else "missing"
        return Mismatch(name=name, problem=problem, expected=expected, found=found)
    problem = find_problem(expected, found, resizable=resizable)
    if problem is None:
        return None
    return Mismatch(name=name, problem=problem, expected=expected, found=found)


def plan_layouts(
    skeleton: Layout,
    file: Layout,
    *,
    keep: Patterns = (),
    ignore: Patterns = (),
    resize: Patterns = (),
) -> Decisions:
    """Decide what becomes of every leaf.

    Args:
        skeleton: the layout to fill.
        file: the layout saved.
        keep: patterns over skeleton names: leaves to leave as they are.
        ignore: patterns over file names: leaves to leave unread.
        resize: patterns over skeleton names: leaves that may take the file's shape.

    Raises:
        InvalidArgumentError: a pattern is wrong or selects nothing.
    """
    kept = select_names(keep, list(skeleton), argument="keep")
    ignored = select_names(ignore, list(file), argument="ignore")
    resizable = select_names(resize, list(skeleton), argument="resize")
    wanted = [name for name in skeleton if name not in kept]
    extra = [n for n in file if n not in skeleton and n not in ignored]
    compared = (
        _compare_leaf(
            name,
            skeleton.get(name),
            None if name in ignored else file.get(name),
            name in resizable,
        )
        for name in (*wanted, *extra)
    )
    mismatches = tuple(item for item in compared if item is not None)
    failed = {item.name for item in mismatches}
    load = tuple(name for name in wanted if name not in failed)
    return Decisions(
        load=load,
        keep=tuple(name for name in skeleton if name in kept),
        ignore=tuple(name for name in file if name in ignored),
        resize=tuple(n for n in load if skeleton[n].shape != file[n].shape),
        mismatches=mismatches,
    )


def _find_lost_member(name: str, like: Any, member: Any) -> Mismatch | None:
    """Refuse an enum member that the skeleton's class no longer has."""
    if not isinstance(like, enum.Enum) or find_member(type(like), member) is not None:
        return None
    note = f"{type(like).__qualname__} has no member {member!r}"
    spec = LeafSpec(kind="enum")
    return Mismatch(name=name, problem="kind", expected=spec, found=spec, note=note)


def _find_indivisible(name: str, like: Any, spec: LeafSpec) -> Mismatch | None:
    """Refuse a shape that the skeleton's sharding cannot cut."""
    if (problem := find_indivisible(like, spec.shape)) is None:
        return None
    return Mismatch(name=name, problem="shape", expected=spec, found=spec, note=problem)


@dataclass(frozen=True, slots=True, kw_only=True)
class RestorePlan:
    """What a restore would do; the data, a readable table, and the act.

    Attributes:
        path: the file.
        subtree: the name in the file that the skeleton's root stands for.
        decisions: per leaf, what becomes of it.
        notes: what is worth knowing and changes no value.
    """

    path: str
    subtree: str
    decisions: Decisions
    notes: tuple[str, ...]
    _checkpoint: Checkpoint
    _skeleton: FlatState
    _file: Layout

    @property
    def names(self) -> tuple[str, ...]:
        """The skeleton's leaf names."""
        return tuple(self._skeleton.leaves)

    @property
    def load(self) -> tuple[str, ...]:
        """The leaves to be filled from the file."""
        return self.decisions.load

    @property
    def keep(self) -> tuple[str, ...]:
        """The leaves to be taken from the skeleton."""
        return self.decisions.keep

    @property
    def ignore(self) -> tuple[str, ...]:
        """The file's leaves to be left unread."""
        return self.decisions.ignore

    @property
    def resize(self) -> tuple[str, ...]:
        """The leaves to be loaded in another shape than the skeleton's."""
        return self.decisions.resize

    @property
    def mismatches(self) -> tuple[Mismatch, ...]:
        """What stands in the way of restoring."""
        return self.decisions.mismatches

    def __str__(self) -> str:
        """Render the plan: a count per decision, then what stands in the way."""
        bytes_read = sum(self._file[name].nbytes for name in self.load)
        counts = (
            f"load {len(self.load)} ({bytes_read:,} bytes), keep {len(self.keep)}, "
            f"ignore {len(self.ignore)}, resize {len(self.resize)}, "
            f"mismatches {len(self.mismatches)}"
        )
        where = f" (subtree {self.subtree})" if self.subtree else ""
        lines = [f"{self.path}{where}: {counts}", *map(str, self.mismatches)]
        return "\n  ".join([*lines, *self.notes])

    def apply(self) -> Any:
        """Restore.

        Returns:
            A new pytree of the skeleton's structure; the skeleton is not changed.

        Raises:
            LayoutMismatchError: the plan has mismatches; nothing is restored.
            DamagedCheckpointError: a leaf's bytes are not those written.
        """
        if self.mismatches:
            raise _mismatch_error(self, self._checkpoint.excluded)
        targets = [
            Target(
                name=_file_name(self.subtree, name),
                spec=self._file[name],
                like=self._skeleton.leaves[name],
            )
            for name in self.load
        ]
        skeleton = self._skeleton.leaves.values()
        restored = restore_leaves(targets, self._checkpoint, skeleton)
        leaves = dict(self._skeleton.leaves)
        for name in self.load:
            leaves[name] = restored[_file_name(self.subtree, name)]
        return unflatten_state(self._skeleton, leaves)


def _file_name(subtree: str, name: str) -> str:
    return ".".join(part for part in (subtree, name) if part)


def make_plan(
    checkpoint: Checkpoint,
    flat: FlatState,
    skeleton: Layout,
    file: Layout,
    subtree: str,
    exceptions: Mapping[str, Patterns],
) -> RestorePlan:
    """Plan how the leaves of an open checkpoint fill a flattened skeleton."""
    decisions = plan_layouts(skeleton, file, **exceptions)
    names = [(n, _file_name(subtree, n)) for n in decisions.load]
    enums = [pair for pair in names if file[pair[0]].kind == "enum"]
    functions = [pair for pair in names if file[pair[0]].kind == "function"]
    stored = checkpoint.read([full for _, full in (*enums, *functions)])
    lost = [_find_lost_member(n, flat.leaves[n], stored[full]) for n, full in enums]
    split = [_find_indivisible(n, flat.leaves[n], file[n]) for n in decisions.load]
    found = (item for item in (*lost, *split) if item is not None)
    mismatches = (*decisions.mismatches, *found)
    excluded = tuple(checkpoint.excluded)
    return RestorePlan(
        path=checkpoint.path,
        subtree=subtree,
        decisions=replace(
            decisions,
            mismatches=tuple(_note_excluded(m, subtree, excluded) for m in mismatches),
        ),
        notes=_note_functions(functions, flat, stored),
        _checkpoint=checkpoint,
        _skeleton=flat,
        _file=file,
    )


def _note_functions(
    functions: Sequence[tuple[str, str]], flat: FlatState, stored: Mapping[str, Any]
) -> tuple[str, ...]:
    pairs = [
        (name, stored[full], function_name(flat.leaves[name]))
        for name, full in functions
    ]
    return tuple(
        f"{name}: the skeleton's function is {now}, the file's was {then}"
        for name, then, now in pairs
        if then != now
    )


def _note_excluded(item: Mismatch, subtree: str, excluded: Sequence[str]) -> Mismatch:
    """Say of a missing leaf that it was left out on purpose."""
    if item.problem != "missing":
        return item
    name = _file_name(subtree, item.name)
    for pattern in excluded:
        if parse_pattern(pattern).matches(name):
            note = f'left out on purpose by exclude="{pattern}"'
            return replace(item, note=note)
    return item


def _advise_keep(plan: RestorePlan, excluded: Sequence[str]) -> list[str]:
    """Return patterns for ``keep`` that select here what was left out."""
    names = [item.name for item in plan.mismatches]
    if plan.subtree:  # patterns there are relative to it
        return names if len(names) <= _FEW_NAMES else ["**"]
    patterns = {text: parse_pattern(text) for text in excluded}
    return [t for t, pattern in patterns.items() if any(map(pattern.matches, names))]


def _hint(plan: RestorePlan, excluded: Sequence[str]) -> str:
    """Choose the one thing most likely to mend all mismatches."""
    mismatches = plan.mismatches
    if all(item.note.startswith("left out on purpose") for item in mismatches):
        keep = ", ".join(map(repr, _advise_keep(plan, excluded)))
        return f"pass keep=({keep},) to take those leaves from the skeleton"
    if axis := extra_leading_axis(mismatches):
        more, size = ("file", axis) if axis > 0 else ("skeleton", -axis)
        return (
            f"the {more}'s leaves have one more leading axis, of size {size} (seeds or "
            "devices?): build the skeleton with the same axis"
        )
    return (
        "build the skeleton with the configuration that saved this file, or name the "
        "exceptions: keep=, ignore= or resize="
    )


def _mismatch_error(plan: RestorePlan, excluded: Sequence[str]) -> LayoutMismatchError:
    mismatches = plan.mismatches
    total = len({*plan.names, *(item.name for item in mismatches)})
    verb = "does" if len(mismatches) == 1 else "do"
    below = f" below {plan.subtree}" if plan.subtree else ""
    return LayoutMismatchError(
        f"{len(mismatches)} of {total} leaves{below} {verb} not fit the skeleton",
        act="cannot restore",
        path=plan.path,
        details=[str(item) for item in mismatches],
        mismatches=mismatches,
        hint=_hint(plan, excluded),
    )
