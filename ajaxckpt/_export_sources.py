"""Some leaves of whatever a user holds: a state, a checkpoint, a run, a path.

Of a file only the wanted leaves are read; of a state of vmapped seeds, one row of
each may be taken. Knows nothing of policies, nor of where the leaves go.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from ajaxckpt._dtypes import STORED_DTYPES
from ajaxckpt._errors import (
    CheckpointNotFoundError,
    DamagedCheckpointError,
    InvalidArgumentError,
    NewerFormatError,
)
from ajaxckpt._layout import TEXT_KINDS, Layout, LeafSpec
from ajaxckpt._metadata import Metadata
from ajaxckpt._names import is_canonical, relative_name
from ajaxckpt._paths import resolve_path
from ajaxckpt._patterns import near_names, top_level
from ajaxckpt._payload import LeafData, whole_leaf
from ajaxckpt._reader import Checkpoint
from ajaxckpt._scalars import encode_text
from ajaxckpt._seed_leaves import Axes, choose_axes, count_seeds, find_seed
from ajaxckpt._writer import StateData

if TYPE_CHECKING:
    from ajaxckpt._listing import RunEntry
    from ajaxckpt._runs import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Which leaves to take.

    Attributes:
        nodes: the argument that names a node, to the name: all leaves below them.
        seed: which row of each leaf; None for whole leaves.
        axis: the axis of the rows, as ``take_seeds`` takes it.
    """

    nodes: Mapping[str, str]
    seed: int | None = None
    axis: Axes = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered:
    """What was taken, and from what.

    Attributes:
        data: the leaves, ready to be written.
        facts: what is known of the state: step, config, ids.
        left: the names of the leaves that were not taken.
        seed: which row was taken, counted from the front.
    """

    data: StateData
    facts: Metadata
    left: tuple[str, ...]
    seed: int | None


def gather_leaves(source: Any, wanted: Wanted) -> Gathered:
    """Take some leaves of whatever a user holds.

    Args:
        source: a state; an open checkpoint; the path of one; a run, or the path of
            its directory, for its newest checkpoint whose wanted leaves are whole.
        wanted: which leaves.

    Raises:
        InvalidArgumentError: there is no such node, or no such seed.
        UnsupportedLeafError: a leaf of a state cannot be saved.
        CheckpointNotFoundError: nothing is at the path, or the run is empty.
        DamagedCheckpointError, NewerFormatError: the source cannot be read.
    """
    from ajaxckpt._runs import Run  # loads jax, which loading a policy does not need

    if isinstance(source, Checkpoint):
        return _gather_file(source, wanted)
    if isinstance(source, Run):
        return _gather_newest(source, wanted)
    if not isinstance(source, str | os.PathLike):
        from ajaxckpt._tree import flatten_state

        return gather_state(flatten_state(source).leaves, wanted)
    path = resolve_path(cast("str | os.PathLike[str]", source))
    if os.path.isdir(path):
        return _gather_newest(Run(path), wanted)
    with Checkpoint(path) as checkpoint:
        return _gather_file(checkpoint, wanted)


def _gather_newest(run: Run, wanted: Wanted) -> Gathered:
    for entry in reversed(run.list()):
        if entry.is_newer:
            hint = "upgrade ajaxckpt, or pass the path of an older checkpoint"
            raise NewerFormatError(entry.problem, path=entry.path, hint=hint)
        if (found := _try_entry(entry, wanted)) is not None:
            return found
    run.newest()  # says of each why it is not whole
    hint = "pass the directory of a run that has saved"
    problem = "the run has no checkpoint"
    raise CheckpointNotFoundError(problem, path=run.directory, hint=hint)


def _try_entry(entry: RunEntry, wanted: Wanted) -> Gathered | None:
    """Take leaves of a checkpoint of a run; None if it is damaged, or gone."""
    if entry.problem:
        return None
    try:
        with Checkpoint(entry.path) as checkpoint:
            return _gather_file(checkpoint, wanted)
    except (DamagedCheckpointError, CheckpointNotFoundError):
        return None


def _gather_file(checkpoint: Checkpoint, wanted: Wanted) -> Gathered:
    header = checkpoint.file.header
    names = _choose_names(list(header.layout), wanted.nodes)
    whole = {name: header.layout[name] for name in names}
    cut = _choose_rows(whole, wanted)
    layout = {name: _cut_spec(spec, cut.get(name)) for name, spec in whole.items()}
    read = checkpoint.read([name for name in names if whole[name].payload_dtype])
    data = StateData(
        layout=layout,
        values={n: header.values[n] for n in names if not whole[n].payload_dtype},
        sources={
            name: partial(_stored_leaf, layout[name], _cut_array(value, cut.get(name)))
            for name, value in read.items()
        },
    )
    facts = replace(header.metadata, parent_id=header.metadata.checkpoint_id)
    taken = set(names)
    left = tuple(name for name in header.layout if name not in taken)
    seed = _row_number(cut)
    return Gathered(data=data, facts=facts, left=left, seed=seed)


def _stored_leaf(spec: LeafSpec, value: Any) -> LeafData | bytes:
    if spec.kind in TEXT_KINDS:
        return encode_text(value)
    return whole_leaf(value, STORED_DTYPES[spec.payload_dtype], frozen=True)


def gather_state(leaves: Mapping[str, Any], wanted: Wanted) -> Gathered:
    """Take some leaves of a state in memory, by name.

    Raises:
        InvalidArgumentError: there is no such node, or no such seed.
        UnsupportedLeafError: one cannot be saved.
    """
    import jax

    from ajaxckpt._collecting import refuse_traced
    from ajaxckpt._leaves import (
        describe_leaf,
        find_unsavable,
        leaf_data,
        scalar_value,
    )

    names = _choose_names(list(leaves), wanted.nodes)
    taken = {name: leaves[name] for name in names}
    whole = {name: describe_leaf(name, leaf) for name, leaf in taken.items()}
    if (error := find_unsavable(taken.items())) is not None:
        raise error
    refuse_traced("the state is exported")
    cut = _choose_rows(whole, wanted)
    layout = {name: _cut_spec(spec, cut.get(name)) for name, spec in whole.items()}
    with jax.transfer_guard("allow"):  # the index of a row is one, too
        taken = {name: _cut_array(leaf, cut.get(name)) for name, leaf in taken.items()}
    values: dict[str, Any] = {}
    sources: dict[str, Callable[[], LeafData | bytes]] = {}
    for name, spec in layout.items():
        if spec.payload_dtype:
            sources[name] = partial(leaf_data, name, taken[name], spec)
        else:
            values[name] = scalar_value(name, taken[name], spec)
    return Gathered(
        data=StateData(layout=layout, values=values, sources=sources),
        facts=Metadata(checkpoint_id=""),
        left=tuple(name for name in leaves if name not in taken),
        seed=_row_number(cut),
    )


def _choose_names(names: Sequence[str], nodes: Mapping[str, str]) -> list[str]:
    """Return the leaves of all nodes, in the state's order."""
    chosen: set[str] = set()
    for argument, node in nodes.items():
        chosen.update(_names_below(names, node, argument))
    return [name for name in names if name in chosen]


def _names_below(names: Sequence[str], node: object, argument: str) -> list[str]:
    found: list[str] = []
    if isinstance(node, str) and is_canonical(node):
        found = [name for name in names if relative_name(name, node) is not None]
    if found:
        return found
    known = [name for name in top_level(names) if name]
    near = near_names(node, names) if isinstance(node, str) else []
    if not known:
        raise InvalidArgumentError(
            f"{argument}={node!r}: what was passed has no leaves with names",
            hint="pass a state, a Run, an open checkpoint, or the path of either",
        )
    raise InvalidArgumentError(
        f"{argument}={node!r}: no leaf has this name or lies below it",
        hint=f"pass the name of a node of the state, such as: "
        f"{', '.join(near or known)}",
    )


Row = tuple[int, int]  # an axis, and the index along it


def _choose_rows(layout: Layout, wanted: Wanted) -> dict[str, Row]:
    """Return the row to take of each leaf that has an axis of seeds.

    Raises:
        InvalidArgumentError: no such seed; or a leaf has no such axis.
    """
    seed = wanted.seed
    if seed is None:
        return {}
    axes = choose_axes(layout, wanted.axis)
    number = find_seed(seed, count_seeds(layout, axes))
    return {name: (axis, number) for name, axis in axes.items()}


def _row_number(cut: Mapping[str, Row]) -> int | None:
    return next((number for _, number in cut.values()), None)


def _cut_spec(spec: LeafSpec, row: Row | None) -> LeafSpec:
    if row is None:
        return spec
    axis, _ = row
    return replace(spec, shape=(*spec.shape[:axis], *spec.shape[axis + 1 :]))


def _cut_array(leaf: Any, row: Row | None) -> Any:
    if row is None:
        return leaf
    axis, number = row
    return leaf[(*(slice(None),) * axis, number, ...)]
