"""One seed, or some, out of a checkpoint of vmapped seeds; and seeds put together.

A state of vmapped seeds has an axis of seeds in every array. ``take_seeds`` restores
some of them into a skeleton of so many; ``stack_seeds`` is its inverse on live states.
"""

# jax's own annotations are partial
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
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
from ajaxckpt._patterns import select_names
from ajaxckpt._payload import Array, Part, iter_payload, whole_leaf
from ajaxckpt._placement import restore_leaves
from ajaxckpt._places import Target
from ajaxckpt._seed_leaves import (
    Axes,
    Rows,
    SeedCheckpoint,
    choose_axes,
    count_seeds,
    find_seed,
)
from ajaxckpt._tree import FlatState, flatten_state, unflatten_state
from ajaxckpt._writer import digest_leaf

__all__ = ["stack_seeds", "take_seeds"]

_STEP = "**.step"
# a variable of nnx has its value below its name
_STEP_NAME = re.compile(r"(?:\A|\.)step(?:\.value)?\Z")
_SHOWN_STEPS = 3

State = TypeVar("State")


def take_seeds(
    path: str | os.PathLike[str],
    skeleton: State,
    seeds: int | Iterable[int],
    *,
    axis: Axes = 0,
    step: Patterns | None = _STEP,
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
        step: patterns of the file's step counters, on which the seeds must agree where
            several are taken: integers, or floats that are whole. By default those
            of the leaves named ``step``, wherever they are; None to let the seeds
            differ.
        verify: whether to read and check all bytes of the leaves.
        keep: patterns of leaves to take from the skeleton.
        ignore: patterns of the file's leaves to leave unread.
        resize: patterns of leaves that may take the file's shape.
        migrations: the registry of the state's layout, or several; it acts on what was
            taken.

    Returns:
        A new pytree of the skeleton's structure, in the skeleton's place.

    Raises:
        InvalidArgumentError: no such seed or axis, the seeds disagree on the step, or
            ``step`` selects no counter.
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
        if step is not None:
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
    # an array without axes says that it can be iterated, and cannot
    several = isinstance(seeds, Iterable) and getattr(seeds, "ndim", 1) != 0
    wanted = list(cast("Iterable[Any]", seeds)) if several else [seeds]
    numbers = [find_seed(seed, count) for seed in wanted]
    if not numbers:
        problem = "seeds: none are chosen"
        raise InvalidArgumentError(problem, hint="pass seeds=2 or seeds=[0, 3]")
    return tuple(numbers), several


def _check_stored_steps(
    checkpoint: SeedCheckpoint, patterns: Patterns, seeds: Sequence[int]
) -> None:
    def read(name: str) -> Any:
        if (rows := checkpoint.rows.get(name)) is None:
            return [checkpoint[name]] * len(seeds)
        values = checkpoint[name]
        return np.moveaxis(values, rows.axis, 0) if rows.keep_axis else [values]

    _refuse_other_steps(checkpoint.layout, patterns, seeds, read)


def _select_steps(layout: Mapping[str, LeafSpec], patterns: Patterns) -> list[str]:
    """Return the names of what may count steps, as far as names and types tell."""
    names = list(layout)
    if patterns == _STEP:
        selected = {name for name in names if _STEP_NAME.search(name)}
    else:
        selected = select_names(patterns, names, argument="step")
    numbers = ARRAY_KINDS | {"int", "float"}
    return [
        name
        for name in names
        if name in selected
        and (spec := layout[name]).kind in numbers
        and spec.dtype != "bool"
        and "complex" not in spec.dtype
    ]


def _refuse_other_steps(
    layout: Mapping[str, LeafSpec],
    patterns: Patterns,
    seeds: Sequence[int],
    read: Callable[[str], Any],
) -> None:
    """Refuse seeds that are not at one step, naming each, and the counters.

    Args:
        layout: the leaves.
        patterns: which of them count steps.
        seeds: the seeds' indices.
        read: returns a leaf's values, seed by seed.
    """
    if patterns == _STEP and len(seeds) == 1:
        return
    steps = {name: _as_steps(read(name)) for name in _select_steps(layout, patterns)}
    counters = {name: found for name, found in steps.items() if found is not None}
    if not counters and patterns != _STEP:
        problem = f"step={patterns!r} selects no counter"
        hint = "name a leaf of whole numbers, or pass step=None"
        raise InvalidArgumentError(problem, hint=hint)
    apart = {
        name: found
        for name, found in counters.items()
        if any(values != found[0] for values in found)
    }
    if not apart:
        return
    names = ", ".join(map(shown_name, apart))
    others = [name for name in counters if name not in apart]
    named = f"name the counter, step={others[0]!r}, " if others else ""
    raise InvalidArgumentError(
        f"the seeds disagree on the step, {names}",
        details=[
            f"seed {seed}: {_show_steps(apart, number)}"
            for number, seed in enumerate(seeds)
        ],
        hint=f"bring the seeds behind to the others' step, {named}or pass step=None",
    )


def _as_steps(values: Iterable[Any]) -> list[list[int]] | None:
    """Return the whole numbers that each seed holds, None if any is not whole."""
    steps: list[list[int]] = []
    for value in values:
        found = np.unique(np.asarray(value))
        if not np.issubdtype(found.dtype, np.integer):
            wide = found.astype(np.float64)
            if not (np.isfinite(wide) & (wide == np.floor(wide))).all():
                return None
            found = wide
        steps.append([int(number) for number in found])
    return steps


def _show_steps(apart: Mapping[str, Sequence[Sequence[int]]], number: int) -> str:
    parts: list[str] = []
    for name, found in apart.items():
        steps = found[number]
        shown = ", ".join(map(str, steps[:_SHOWN_STEPS]))
        shown += ", …" if len(steps) > _SHOWN_STEPS else ""
        parts.append(shown if len(apart) == 1 else f"{shown_name(name)} {shown}")
    return "; ".join(parts)


def stack_seeds(
    states: Sequence[State], *, axis: Axes = 0, step: Patterns | None = _STEP
) -> State:
    """Put states of single seeds together into one state of vmapped seeds.

    The inverse of ``take_seeds(…, seeds=0)``, ``take_seeds(…, seeds=1)``, …: bits, weak
    types and key implementations stay. What has no axis to stack (text, functions,
    Python numbers) and what ``axis`` says is shared must be equal in all states.

    Args:
        states: the states of the seeds, in their order; of one layout.
        axis: where the seeds axis goes, as in ``take_seeds``.
        step: patterns of the step counters, on which the seeds must agree, as in
            ``take_seeds``; None to let them differ.

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
            _refuse_other_steps(
                layouts[0],
                step,
                range(len(flats)),
                lambda name: [flat.leaves[name] for flat in flats],
            )
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
