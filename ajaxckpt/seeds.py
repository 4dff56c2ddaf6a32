"""One seed, or some, out of a checkpoint of vmapped seeds; and seeds put together.

A state of vmapped seeds has an axis of seeds in every array. ``take_seeds`` restores
some of them into a skeleton of so many; ``stack_seeds`` is its inverse on live states.
"""

# jax's own annotations are partial
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from operator import index as as_index
from typing import Any, TypeVar, cast

import jax
import numpy as np

from ajaxckpt._checkpoint import Registries, restore_into
from ajaxckpt._collecting import collect_state, refuse_traced
from ajaxckpt._decisions import Patterns
from ajaxckpt._dtypes import STORED_DTYPES
from ajaxckpt._errors import InvalidArgumentError, error_context
from ajaxckpt._layout import ARRAY_KINDS, LeafSpec, shown_name, storage_dtype
from ajaxckpt._leaves import describe_leaf, find_unsavable
from ajaxckpt._paths import resolve_path
from ajaxckpt._patterns import parse_pattern
from ajaxckpt._payload import Array, Part, iter_payload, whole_leaf
from ajaxckpt._placement import restore_leaves
from ajaxckpt._places import Target
from ajaxckpt._seed_leaves import (
    Axes,
    Rows,
    SeedCheckpoint,
    choose_axes,
    count_seeds,
)
from ajaxckpt._tree import FlatState, flatten_state, unflatten_state
from ajaxckpt._writer import digest_leaf

__all__ = ["stack_seeds", "take_seeds"]

State = TypeVar("State")


def take_seeds(
    path: str | os.PathLike[str],
    skeleton: State,
    seeds: int | Iterable[int],
    *,
    axis: Axes = 0,
    step: str | None = "step",
    verify: bool = True,
    keep: Patterns = (),
    ignore: Patterns = (),
    resize: Patterns = (),
    migrations: Registries = None,
) -> State:
    """Restore one seed, or some, of a checkpoint of vmapped seeds.

    A leaf's digest covers the leaf of all seeds. By default it is checked: the leaf is
    read in pieces of 1 MiB, and memory is taken for the chosen seeds alone. With
    ``verify=False`` the bytes of the chosen seeds alone are read, and not checked; the
    header is, and so are leaves whose rows are shorter than 4 KiB or cut across
    devices, which are read as before.

    Args:
        path: the file.
        skeleton: a state of one seed, or of as many seeds as are taken.
        seeds: one seed's index: the seeds axis is gone from the result; or several
            indices: it stays, in their order.
        axis: the seeds axis of every array; or patterns to axes, the later ones
            winning, None for what the seeds share. What no pattern selects has axis 0.
        step: the pattern of the step counter, on which the seeds must agree where
            several are taken and the state has it; None to let them differ.
        verify: whether to read and check all bytes of the leaves.
        keep: patterns of leaves to take from the skeleton.
        ignore: patterns of the file's leaves to leave unread.
        resize: patterns of leaves that may take the file's shape.
        migrations: the registry of the state's layout, or several; it acts on what was
            taken.

    Returns:
        A new pytree of the skeleton's structure, in the skeleton's place.

    Raises:
        InvalidArgumentError: no such seed or axis, or the seeds disagree on the step.
        LayoutMismatchError: what was taken does not fit the skeleton.
        DamagedCheckpointError: bytes that were checked are not those written.

    Example:
        >>> many = {"w": jnp.arange(6.0).reshape(3, 2), "step": jnp.full(3, 7)}
        >>> record = save_checkpoint(many, path, step=many["step"])
        >>> one = take_seeds(path, {"w": jnp.zeros(2), "step": jnp.int32(0)}, 2)
        >>> one["w"].tolist(), int(one["step"])
        ([4.0, 5.0], 7)
    """
    resolved = resolve_path(path)
    with (
        error_context(resolved, "cannot take seeds"),
        closing(SeedCheckpoint(resolved)) as checkpoint,
    ):
        refuse_traced("the seeds are taken")
        layout = checkpoint.layout
        axes = choose_axes(layout, axis)
        chosen, keep_axis = _choose(seeds, count_seeds(layout, axes))
        rows = {
            name: Rows(axis=place, rows=chosen, keep_axis=keep_axis)
            for name, place in axes.items()
        }
        checkpoint.choose(rows, checked=verify)
        if keep_axis and step is not None:
            _check_stored_steps(checkpoint, step, chosen)
        return restore_into(
            skeleton,
            checkpoint,
            keep=keep,
            ignore=ignore,
            resize=resize,
            migrations=migrations,
        )


def _choose(seeds: int | Iterable[int], count: int) -> tuple[tuple[int, ...], bool]:
    """Return the indices from the front, and whether the axis stays."""
    several = isinstance(seeds, Iterable)
    wanted = list(seeds) if several else [seeds]
    numbers: list[int] = []
    for seed in wanted:
        if isinstance(seed, bool) or not hasattr(seed, "__index__"):
            problem = f"seeds: expected indices, found {seed!r}"
            raise InvalidArgumentError(problem, hint="pass seeds=2 or seeds=[0, 3]")
        number = as_index(seed)
        if not -count <= number < count:
            problem = f"no seed {number}: the file holds {count} seeds"
            raise InvalidArgumentError(problem, hint=f"pass 0 … {count - 1}")
        numbers.append(number % count)
    if not numbers:
        problem = "seeds: none are chosen"
        raise InvalidArgumentError(problem, hint="pass seeds=2 or seeds=[0, 3]")
    return tuple(numbers), several


def _check_stored_steps(
    checkpoint: SeedCheckpoint, pattern: str, seeds: Sequence[int]
) -> None:
    for name in _step_names(checkpoint.layout, pattern):
        if name in checkpoint.rows:
            axis = checkpoint.rows[name].axis
            values = np.moveaxis(checkpoint[name], axis, 0)
            _refuse_other_steps(name, values, seeds)


def _step_names(layout: Mapping[str, LeafSpec], pattern: str) -> list[str]:
    matches = parse_pattern(pattern, "step").matches
    return [
        name
        for name, spec in layout.items()
        if matches(name) and spec.kind in ARRAY_KINDS and "int" in spec.dtype
    ]


def _refuse_other_steps(name: str, values: Any, seeds: Sequence[int]) -> None:
    """Refuse seeds that are not at one step, naming each."""
    steps = [np.unique(value).tolist() for value in values]
    if all(found == steps[0] for found in steps):
        return
    raise InvalidArgumentError(
        f"the seeds disagree on the step, {shown_name(name)}",
        details=[
            f"seed {seed}: {', '.join(map(str, found))}"
            for seed, found in zip(seeds, steps, strict=True)
        ],
        hint="bring the seeds behind to the others' step, or pass step=None",
    )


def stack_seeds(
    states: Sequence[State], *, axis: Axes = 0, step: str | None = "step"
) -> State:
    """Put states of single seeds together into one state of vmapped seeds.

    The inverse of ``take_seeds(…, seeds=0)``, ``take_seeds(…, seeds=1)``, …: bits, weak
    types and key implementations stay. What has no axis to stack (text, functions,
    Python numbers) and what ``axis`` says is shared must be equal in all states.

    Args:
        states: the states of the seeds, in their order; of one layout.
        axis: where the seeds axis goes, as in ``take_seeds``.
        step: the pattern of the step counter, on which the seeds must agree where the
            states have it; None to let them differ.

    Returns:
        A new pytree; arrays lie where those of the first state do.

    Raises:
        InvalidArgumentError: the states differ in layout, in what they share, or in
            their step.

    Example:
        >>> one = {"w": jnp.zeros(2), "step": jnp.int32(7)}
        >>> stack_seeds([one, one])["w"].shape
        (2, 2)
    """
    with error_context(None, "cannot stack seeds"), jax.transfer_guard("allow"):
        refuse_traced("the seeds are stacked")
        flats = [flatten_state(state) for state in states]
        layouts = [_describe(flat) for flat in flats]
        if not layouts:
            raise InvalidArgumentError("there are no states", hint="pass one or more")
        _refuse_other_layouts(layouts)
        for flat in flats:
            if (error := find_unsavable(flat.leaves.items())) is not None:
                raise error
        layout = _stacked_layout(layouts[0], axis, len(flats))
        stacked = {name: place for name, (_, place) in layout.items() if place >= 0}
        _refuse_unequal(flats, [n for n in layout if n not in stacked])
        source = _Stacks(flats, layouts[0], stacked)
        if step is not None:
            for name in _step_names(layouts[0], step):
                if name in stacked:
                    values = [np.asarray(flat.leaves[name]) for flat in flats]
                    _refuse_other_steps(name, values, range(len(flats)))
        targets = [
            Target(name=name, spec=layout[name][0], like=_like(name, flats[0]))
            for name in stacked
        ]
        restored = restore_leaves(targets, source, flats[0].leaves.values())
        return unflatten_state(flats[0], {**flats[0].leaves, **restored})


def _describe(flat: FlatState) -> dict[str, LeafSpec]:
    return {name: describe_leaf(name, leaf) for name, leaf in flat.leaves.items()}


def _like(name: str, flat: FlatState) -> Any:
    """Return what tells where a stacked leaf goes."""
    leaf = flat.leaves[name]
    if isinstance(leaf, jax.Array) and len(leaf.sharding.device_set) > 1:
        raise InvalidArgumentError(
            f"{shown_name(name)}: lies on several devices",
            hint="bring the states to one device first, and shard the stacked one",
        )
    return leaf


def _refuse_other_layouts(layouts: Sequence[Mapping[str, LeafSpec]]) -> None:
    first = layouts[0]
    for seed, layout in enumerate(layouts[1:], 1):
        names = [n for n in {**first, **layout} if first.get(n) != layout.get(n)]
        if names:
            raise InvalidArgumentError(
                f"seed {seed} is not of the layout of seed 0",
                details=[
                    f"{shown_name(n)}: {first.get(n, 'nothing')} in seed 0, "
                    f"{layout.get(n, 'nothing')} in seed {seed}"
                    for n in names
                ],
                hint="pass states of one skeleton",
            )


def _stacked_layout(
    layout: Mapping[str, LeafSpec], axis: Axes, count: int
) -> dict[str, tuple[LeafSpec, int]]:
    """Return each leaf's spec and axis once stacked; -1 for no axis."""
    wide = {
        name: replace(spec, shape=(*spec.shape, count))
        if spec.kind in ARRAY_KINDS or spec.kind == "key"
        else spec
        for name, spec in layout.items()
    }
    axes = choose_axes(wide, axis)
    result: dict[str, tuple[LeafSpec, int]] = {}
    for name, spec in layout.items():
        at = axes.get(name, -1)
        if at >= 0:
            kind = "numpy" if spec.kind == "numpy scalar" else spec.kind
            shape = (*spec.shape[:at], count, *spec.shape[at:])
            spec = replace(spec, kind=kind, shape=shape)
        result[name] = spec, at
    return result


def _refuse_unequal(flats: Sequence[FlatState], names: Sequence[str]) -> None:
    """Refuse what the seeds should share and do not."""
    data = [collect_state({n: flat.leaves[n] for n in names}, ()) for flat in flats]
    for seed, other in enumerate(data[1:], 1):
        for name in other.layout:
            stored = name in other.sources
            same = (
                digest_leaf(other.sources[name]) == digest_leaf(data[0].sources[name])
                if stored
                else other.values[name] == data[0].values[name]
            )
            if not same:
                raise InvalidArgumentError(
                    f"{shown_name(name)}: shared by the seeds, and different in seed "
                    f"0 and seed {seed}",
                    hint="make it an array to give each seed its own",
                )


class _Stacks:
    """Hands out the leaves of several states, stacked."""

    def __init__(
        self,
        flats: Sequence[FlatState],
        layout: Mapping[str, LeafSpec],
        axes: Mapping[str, int],
    ) -> None:
        self._flats, self._layout, self._axes = flats, layout, axes

    def _stack(self, name: str) -> Array:
        spec = self._layout[name]
        leaves = [flat.leaves[name] for flat in self._flats]
        if spec.kind == "key":
            leaves = [jax.random.key_data(leaf) for leaf in leaves]
        arrays = [np.asarray(leaf) for leaf in leaves]
        return np.stack(arrays, self._axes[name])

    def fill(self, buffers: Mapping[str, Array]) -> None:
        """Write stacked leaves into flat uint8 buffers."""
        for name, buffer in buffers.items():
            row = STORED_DTYPES[self._layout[name].dtype]
            start = 0
            for raw in iter_payload(whole_leaf(self._stack(name), row, frozen=True)):
                buffer[start : start + raw.size] = raw
                start += raw.size

    def fill_parts(self, name: str, parts: Sequence[Part]) -> None:
        """Write one stacked leaf into parts that cover it."""
        whole = self._stack(name)
        for part in parts:
            part.data[...] = whole[part.index]

    def iter_pieces(self, name: str) -> Iterator[Array]:
        """Yield one stacked leaf's elements."""
        dtype = storage_dtype(name, self._layout[name])
        yield cast("Array", self._stack(name).astype(dtype, copy=False).reshape(-1))

    def read(self, names: Sequence[str]) -> Mapping[str, Any]:
        """Return stacked leaves as host values."""
        return {name: self._stack(name) for name in names}
