"""A restore, planned from the header alone, then applied: all or nothing."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ajaxckpt._decisions import (
    Decisions,
    Patterns,
    advise,
    file_name,
    note_absences,
    plan_layouts,
)
from ajaxckpt._errors import LayoutMismatchError
from ajaxckpt._layout import (
    ARRAY_KINDS,
    NUMBER_KINDS,
    X64_DTYPES,
    Layout,
    LeafSpec,
    Mismatch,
)
from ajaxckpt._leaves import find_member, function_name
from ajaxckpt._placement import array_form, restore_leaves
from ajaxckpt._places import Target, can_hold, find_indivisible, is_x64
from ajaxckpt._reader import Checkpoint
from ajaxckpt._tree import FlatState, unflatten_state


def _find_lost_member(name: str, like: Any, member: Any) -> Mismatch | None:
    """Refuse an enum member that the skeleton's class no longer has."""
    if not isinstance(like, enum.Enum) or find_member(type(like), member) is not None:
        return None
    note = f"{type(like).__qualname__} has no member {member!r}"
    spec = LeafSpec(kind="enum")
    return Mismatch(name=name, problem="kind", expected=spec, found=spec, note=note)


def _find_indivisible(
    name: str, like: Any, expected: LeafSpec, found: LeafSpec
) -> Mismatch | None:
    """Refuse a shape that the skeleton's sharding cannot cut."""
    if (note := find_indivisible(like, found.shape)) is None:
        return None
    return Mismatch(
        name=name, problem="shape", expected=expected, found=found, note=note
    )


def _find_unholdable(
    name: str, like: Any, expected: LeafSpec, found: LeafSpec
) -> Mismatch | None:
    """Refuse a dtype that numpy has and this JAX has not, where JAX is to hold it."""
    arrays = found.kind in ARRAY_KINDS and array_form(like, found) == "jax"
    if not arrays or found.dtype == expected.dtype or can_hold(found.dtype):
        return None
    note = f"this JAX has no arrays of {found.dtype}"
    return Mismatch(
        name=name, problem="dtype", expected=expected, found=found, note=note
    )


def _find_wide(
    name: str, like: Any, expected: LeafSpec, found: LeafSpec
) -> Mismatch | None:
    """Refuse a 64-bit jax leaf for a number that this JAX would make a narrow one."""
    del like
    wide = found.kind == "jax" and found.dtype in X64_DTYPES
    if not (wide and expected.kind in NUMBER_KINDS) or is_x64():
        return None
    note = "x64 is off here: jax.config.update('jax_enable_x64', True)"
    return Mismatch(
        name=name, problem="dtype", expected=expected, found=found, note=note
    )


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
                name=file_name(self.subtree, name),
                spec=self._file[name],
                like=self._skeleton.leaves[name],
            )
            for name in self.load
        ]
        skeleton = self._skeleton.leaves.values()
        restored = restore_leaves(targets, self._checkpoint.file, skeleton)
        leaves = dict(self._skeleton.leaves)
        for name in self.load:
            leaves[name] = restored[file_name(self.subtree, name)]
        return unflatten_state(self._skeleton, leaves)


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
    names = [(n, file_name(subtree, n)) for n in decisions.load]
    enums = [pair for pair in names if file[pair[0]].kind == "enum"]
    functions = [pair for pair in names if file[pair[0]].kind == "function"]
    stored = checkpoint.read([full for _, full in (*enums, *functions)])
    lost = [_find_lost_member(n, flat.leaves[n], stored[full]) for n, full in enums]
    checked = [
        check(name, flat.leaves[name], skeleton[name], file[name])
        for name in decisions.load
        for check in (_find_indivisible, _find_unholdable, _find_wide)
    ]
    found = [item for item in (*lost, *checked) if item is not None]
    failed = {item.name for item in found}
    mismatches = (*decisions.mismatches, *found)
    excluded = tuple(checkpoint.excluded)
    return RestorePlan(
        path=checkpoint.path,
        subtree=subtree,
        decisions=replace(
            decisions,
            load=tuple(name for name in decisions.load if name not in failed),
            resize=tuple(name for name in decisions.resize if name not in failed),
            mismatches=note_absences(mismatches, subtree, excluded, decisions.ignore),
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
        hint=advise(mismatches, plan.subtree, excluded),
    )
