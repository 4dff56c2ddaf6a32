"""A restore, planned from the header alone, then applied: all or nothing."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ajaxckpt._adoption import extend_skeleton
from ajaxckpt._checks import find_lost_member, find_unfit
from ajaxckpt._decisions import (
    Decisions,
    Patterns,
    advise,
    file_name,
    note_absences,
    plan_layouts,
)
from ajaxckpt._derived import DerivedLeaves
from ajaxckpt._drafts import Draft
from ajaxckpt._errors import InvalidArgumentError, LayoutMismatchError
from ajaxckpt._layout import Layout, LeafSpec, Mismatch
from ajaxckpt._leaves import function_name
from ajaxckpt._metadata import EXPORT
from ajaxckpt._migrating import (
    Origin,
    list_origins,
    migrate_layout,
    resolve_layout,
    select_adopted,
    select_kept,
)
from ajaxckpt._migrations import Migrations
from ajaxckpt._names import relative_name, split_name
from ajaxckpt._notes import (
    note_config,
    note_left_out,
    note_provenance,
    note_versions,
)
from ajaxckpt._patterns import top_level
from ajaxckpt._placement import restore_leaves
from ajaxckpt._places import LeafSource, Target
from ajaxckpt._plan_table import plan_lines
from ajaxckpt._progress import ignore_bytes, show_progress
from ajaxckpt._reader import Checkpoint
from ajaxckpt._roles import is_update_count
from ajaxckpt._skeletons import (
    describe_skeleton,
    note_hyperparameters,
    refuse_abstract,
    spec_of,
)
from ajaxckpt._suggestions import suggest_rules
from ajaxckpt._tree import FlatState, flatten_state, unflatten_state


@dataclass(frozen=True, slots=True, kw_only=True)
class RestorePlan:
    """What a restore would do; the data, a readable table, and the act.

    Names are relative to the subtree. Every leaf of the skeleton stands in ``load``,
    ``migrate``, ``keep`` or ``mismatches``.

    Attributes:
        path: the file.
        subtree: the name in the file that the skeleton's root stands for.
        decisions: per leaf, what becomes of it.
        migrate: the leaves to be filled through a migration, and where from.
        adopt: those of them that the skeleton lacks and the result will have.
        drop: the file's leaves that a migration drops, by their names in the file,
            and which rule did.
    """

    path: str
    subtree: str
    decisions: Decisions
    migrate: Mapping[str, Origin]
    adopt: tuple[str, ...]
    drop: Mapping[str, str]
    _checkpoint: Checkpoint
    _source: LeafSource
    _skeleton: FlatState
    _expected: Layout
    _file: Layout
    _notes: tuple[str, ...]
    _config: Mapping[str, Any] | None
    _registries: tuple[Migrations, ...]

    @property
    def step(self) -> int | None:
        """The step recorded in the file."""
        return self._checkpoint.step

    @property
    def checkpoint_id(self) -> str:
        """The id of the save: plans of one snapshot share it."""
        return self._checkpoint.checkpoint_id

    @property
    def names(self) -> tuple[str, ...]:
        """The skeleton's leaf names."""
        return tuple(self._skeleton.leaves)

    @property
    def load(self) -> tuple[str, ...]:
        """The leaves to be filled from the file as they are."""
        return tuple(n for n in self.decisions.load if n not in self.migrate)

    @property
    def keep(self) -> tuple[str, ...]:
        """The leaves to be taken from the skeleton."""
        return self.decisions.keep

    @property
    def ignore(self) -> tuple[str, ...]:
        """The file's leaves, after migration, to be left unread."""
        return self.decisions.ignore

    @property
    def resize(self) -> tuple[str, ...]:
        """The leaves to be filled in another shape than the skeleton's."""
        return self.decisions.resize

    @property
    def mismatches(self) -> tuple[Mismatch, ...]:
        """What stands in the way of restoring."""
        return self.decisions.mismatches

    @property
    def notes(self) -> tuple[str, ...]:
        """What is worth knowing and changes no value: then and now."""
        checkpoint = self._checkpoint
        return (
            *filter(None, [self._export_advice]),
            *self._notes,
            *note_left_out(self._kept(), "kept as the skeleton's"),
            *note_left_out(self._outside(), f"outside {self.subtree}"),
            *note_versions(checkpoint.layouts, self._registries),
            *note_config(checkpoint.config, self._config),
            *note_provenance(checkpoint.provenance),
        )

    @property
    def _export_advice(self) -> str:
        """What to do where a whole state is asked of an export; else nothing."""
        if not self.mismatches or self.subtree:
            return ""
        return _advise_export(self._checkpoint)

    def _kept(self) -> list[tuple[str, LeafSpec]]:
        leaves = self._skeleton.leaves
        found = ((n, self._file.get(n) or spec_of(n, leaves.get(n))) for n in self.keep)
        return [(name, spec) for name, spec in found if spec is not None]

    def _outside(self) -> list[tuple[str, LeafSpec]]:
        """Return the counts of optimisers that a restored part leaves in the file."""
        if not self.subtree:
            return []
        return [
            leaf
            for leaf in self._checkpoint.layout.items()
            if relative_name(leaf[0], self.subtree) is None and is_update_count(*leaf)
        ]

    @property
    def suggestions(self) -> tuple[str, ...]:
        """Migration lines that may mend the mismatches; read them before use."""
        if self._export_advice:
            return ()
        found = [
            replace(item, name=file_name(self.subtree, item.name))
            for item in self.mismatches
            if not item.note
        ]
        names = ([file_name(self.subtree, n) for n in layout] for layout in self._both)
        return suggest_rules(found, *names) if found else ()

    @property
    def _both(self) -> tuple[Layout, Layout]:
        return self._file, self._expected

    def specs(self, name: str) -> tuple[LeafSpec | None, LeafSpec | None]:
        """Return the skeleton's and the migrated file's spec of a leaf."""
        return self._expected.get(name), self._file.get(name)

    def __str__(self) -> str:
        """Render the plan as a table, what stands in the way and the way out."""
        return "\n".join(plan_lines(self))

    @property
    def nbytes(self) -> int:
        """The payload bytes to be restored."""
        return sum(self._file[name].nbytes for name in self.decisions.load)

    def apply(self, *, progress: bool = False) -> Any:
        """Restore.

        Args:
            progress: whether to show a bar, on a terminal and for much data.

        Returns:
            A new pytree of the skeleton's structure, and of what was adopted; the
            skeleton is not changed.

        Raises:
            LayoutMismatchError: the plan has mismatches; nothing is restored.
            MigrationError: a rule's function raised, or returned something else.
            DamagedCheckpointError: a leaf's bytes are not those written.
        """
        if self.mismatches:
            raise _mismatch_error(self, self._export_advice, self._checkpoint.excluded)
        targets = [
            Target(
                name=file_name(self.subtree, name),
                spec=self._file[name],
                like=self._skeleton.leaves[name],
            )
            for name in self.decisions.load
        ]
        skeleton = self._skeleton.leaves.values()
        label = f"restoring {os.path.basename(self.path)}"
        with show_progress(label, self.nbytes, wanted=progress) as told:
            self._checkpoint.file.told = told
            try:
                restored = restore_leaves(targets, self._source, skeleton)
            finally:
                self._checkpoint.file.told = ignore_bytes
        leaves = dict(self._skeleton.leaves)
        for name in self.decisions.load:
            leaves[name] = restored[file_name(self.subtree, name)]
        return unflatten_state(self._skeleton, leaves)


def make_plan(
    checkpoint: Checkpoint,
    skeleton: Any,
    subtree: str,
    exceptions: Mapping[str, Patterns],
    registries: tuple[Migrations, ...],
    config: Mapping[str, Any] | None,
) -> RestorePlan:
    """Plan how the leaves of an open checkpoint fill a skeleton."""
    _check_subtree(subtree)
    flat = flatten_state(skeleton)
    expected = describe_skeleton(flat, exceptions["keep"])
    draft = migrate_layout(checkpoint, expected, subtree, registries)
    if adopted := select_adopted(draft, subtree):
        flat = flatten_state(extend_skeleton(skeleton, adopted))
        expected = describe_skeleton(flat, exceptions["keep"])
    kept = select_kept(draft, subtree)
    refuse_abstract(flat, kept, "a migration takes")
    file = _file_below(draft, expected, subtree)
    source = (
        checkpoint.file if not registries else _derive(checkpoint, draft, file, subtree)
    )
    decisions = plan_layouts(expected, file, from_skeleton=kept, **exceptions)
    decisions, notes = _check_leaves(decisions, flat, expected, file, source, subtree)
    origins = list_origins(draft, subtree)
    excluded = tuple(checkpoint.excluded)
    mismatches = note_absences(
        decisions.mismatches, subtree, excluded, decisions.ignore
    )
    return RestorePlan(
        path=checkpoint.path,
        subtree=subtree,
        decisions=replace(decisions, mismatches=mismatches),
        migrate={n: origins[n] for n in decisions.load if n in origins},
        adopt=tuple(name for name in adopted if name in decisions.load),
        drop=dict(draft.dropped),
        _checkpoint=checkpoint,
        _source=source,
        _skeleton=flat,
        _expected=expected,
        _file=file,
        _notes=(*notes, *note_hyperparameters(checkpoint, draft, flat, subtree)),
        _config=config,
        _registries=registries,
    )


def _derive(
    checkpoint: Checkpoint, draft: Draft, file: Layout, subtree: str
) -> DerivedLeaves:
    layout = {file_name(subtree, name): spec for name, spec in file.items()}
    return DerivedLeaves(checkpoint.file, draft.leaves, layout)


def _check_subtree(subtree: str) -> None:
    if type(subtree) is not str:  # pyright: ignore[reportUnnecessaryComparison]
        problem = f"subtree: expected a leaf name, found {type(subtree).__name__}"
        raise InvalidArgumentError(problem, hint="pass a str")
    try:
        split_name(subtree or "x")
    except ValueError as error:
        hint = "pass the leaf name of a node, such as subtree='actor.params'"
        raise InvalidArgumentError(f"subtree: {error}", hint=hint) from error


def _file_below(draft: Draft, skeleton: Layout, subtree: str) -> Layout:
    """Return the migrated layout below a name, with names relative to it."""
    below = (relative_name(name, subtree) for name in draft.leaves)
    if subtree and all(name is None for name in below):
        names = ", ".join(top_level(list(draft.leaves)))
        raise InvalidArgumentError(
            f"subtree={subtree!r} selects no leaf of the file",
            hint=f"choose a name below one of: {names}",
        )
    return resolve_layout(draft, skeleton, subtree)


def _check_leaves(
    decisions: Decisions,
    flat: FlatState,
    expected: Layout,
    file: Layout,
    source: LeafSource,
    subtree: str,
) -> tuple[Decisions, tuple[str, ...]]:
    """Add what the specs alone do not show; return notes on functions beside."""
    names = [(n, file_name(subtree, n)) for n in decisions.load]
    enums = [pair for pair in names if file[pair[0]].kind == "enum"]
    functions = [pair for pair in names if file[pair[0]].kind == "function"]
    stored = source.read([full for _, full in (*enums, *functions)])
    lost = [find_lost_member(n, flat.leaves[n], stored[full]) for n, full in enums]
    unfit = (
        item
        for name in decisions.load
        for item in find_unfit(name, flat.leaves[name], expected[name], file[name])
    )
    found = [item for item in (*lost, *unfit) if item is not None]
    failed = {item.name for item in found}
    decisions = replace(
        decisions,
        load=tuple(name for name in decisions.load if name not in failed),
        resize=tuple(name for name in decisions.resize if name not in failed),
        mismatches=(*decisions.mismatches, *found),
    )
    return decisions, _note_functions(functions, flat, stored)


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


def _advise_export(checkpoint: Checkpoint) -> str:
    """Say that a file is an export of a part, if it is one; else nothing."""
    said = checkpoint.provenance
    sort, node = said.get(EXPORT), said.get(f"{EXPORT}.parameters")
    if sort is None or node == "":
        return ""
    call = f"pass subtree={node!r}" if node else "pass it to load_function"
    what = f"an exported {sort}, not a whole state"
    return f"the file is {what}: {call}, or restore a checkpoint"


def _mismatch_error(
    plan: RestorePlan, advice: str, excluded: Sequence[str]
) -> LayoutMismatchError:
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
        hint=advice or advise(mismatches, plan.subtree, excluded, plan.suggestions),
    )
