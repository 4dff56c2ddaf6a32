"""A state inside a traced function, on its way to a save outside of it.

Knows tracers and callbacks; knows nothing of files. What a leaf is (weak type, key
implementation, whether it is an array at all) is read off the trace, because in the
callback it is bare numbers; shapes are read off what arrives, because a ``vmap``
adds axes in between.
"""

# jax's own annotations are partial
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false
# pyright: reportUnknownLambdaType=false

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.custom_batching import custom_vmap
from jax.experimental import io_callback

from ajaxckpt._dtypes import STORED_DTYPES
from ajaxckpt._errors import InvalidArgumentError, UnsupportedLeafError
from ajaxckpt._layout import LeafSpec, storage_dtype
from ajaxckpt._leaves import describe_leaf, leaf_data, scalar_value
from ajaxckpt._payload import LeafData, whole_leaf
from ajaxckpt._placement import is_traced
from ajaxckpt._plain import plain_step
from ajaxckpt._tree import flatten_state
from ajaxckpt._writer import StateData

_NUMBERS = (bool, int, float, complex)
_SHOWN = 10
# the ends of a program's step and due, and the arrays of the state
Receive = Callable[[Any, Any, Sequence[Any]], None]
MakeData = Callable[[Sequence[Any]], StateData]


def is_inside_trace(*trees: Any) -> bool:
    """Tell whether a call stands inside a traced function, or was given its values."""
    leaves = jax.tree_util.tree_leaves(trees)
    return is_traced() or any(isinstance(leaf, Tracer) for leaf in leaves)


def refuse_parts() -> None:
    """Refuse a call where the state of one device is all that is known.

    The callback would be called once for each, and the last one would be kept.

    Raises:
        UnsupportedLeafError: the caller stands inside ``shard_map`` or ``pmap``.
    """
    if jax.sharding.get_abstract_mesh().manual_axes:
        raise UnsupportedLeafError(
            "the call stands inside shard_map or pmap, where each device holds a part",
            hint="save what the mapped function returns: map the step, and scan and "
            "save around it",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedState:
    """What is known of a state while it is traced.

    Attributes:
        layout: leaf name to leaf spec, without the axes that a ``vmap`` adds.
        constants: the leaves that are no arrays: text, functions, enum members.
        arrays: leaf name to the array to be handed over; of a key its words.
    """

    layout: Mapping[str, LeafSpec]
    constants: Mapping[str, Any]
    arrays: Mapping[str, Any]


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    weak = bool(getattr(leaf, "weak_type", False))
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=weak)


def describe_traced(state: Any) -> TracedState:
    """Say what each leaf is, as the traced function would return it.

    Numbers and numpy arrays are jax arrays there.

    Raises:
        UnsupportedLeafError: a leaf cannot be saved.
    """
    layout: dict[str, LeafSpec] = {}
    constants: dict[str, Any] = {}
    arrays: dict[str, Any] = {}
    for name, leaf in flatten_state(state).leaves.items():
        if not isinstance(leaf, Tracer):
            layout[name] = describe_leaf(name, leaf)
            if type(leaf) in _NUMBERS or isinstance(leaf, np.ndarray | np.generic):
                leaf = _as_array(name, leaf)
            if not isinstance(leaf, jax.Array):
                constants[name] = leaf
                continue
        layout[name] = spec = describe_leaf(name, _abstract(leaf))
        arrays[name] = jax.random.key_data(leaf) if spec.kind == "key" else leaf
    return TracedState(layout=layout, constants=constants, arrays=arrays)


def _as_array(name: str, leaf: Any) -> Any:
    """Return a number, or a numpy leaf, as the array it is inside a trace.

    Raises:
        UnsupportedLeafError: an integer has no place in its dtype there.
    """
    values = np.asarray(leaf)
    if type(leaf) is int or values.dtype.kind in "iu":
        dtype = jax.dtypes.canonicalize_dtype(getattr(leaf, "dtype", int))
        if (found := find_beyond(values, dtype)) is not None:
            hint = "set jax_enable_x64, or keep it out of the state"
            raise UnsupportedLeafError(f"{name}: {found} is beyond {dtype}", hint=hint)
    return jnp.asarray(leaf)


def find_beyond(values: Any, dtype: Any) -> int | None:
    """Return an integer that a dtype has no place for; None if there is none."""
    limits = np.iinfo(dtype)
    ends = (int(values.min()), int(values.max())) if values.size else ()
    return next((n for n in ends if not limits.min <= n <= limits.max), None)


def _copy_leaf(name: str, spec: LeafSpec, array: Any) -> tuple[LeafSpec, LeafData]:
    """Copy an array of the callback: JAX promises nothing of its memory after it."""
    dtype = storage_dtype(name, spec)
    data = np.array(array)
    if data.dtype != dtype:
        raise UnsupportedLeafError(
            f"{name}: {dtype} arrives as {data.dtype} in the callback",
            hint="set jax_enable_x64 for the process, not for a block, or save "
            "between the calls of the train step",
        )
    shape = data.shape[:-1] if spec.kind == "key" else data.shape
    row = STORED_DTYPES[spec.dtype]
    return replace(spec, shape=shape), whole_leaf(data, row, frozen=True)


def copy_arrays(traced: TracedState, arrays: Sequence[Any]) -> StateData:
    """Turn what arrived in the callback into a state of its own memory.

    Raises:
        UnsupportedLeafError: an array is not of its dtype any more.
    """
    layout = dict(traced.layout)
    sources: dict[str, Any] = {}
    values: dict[str, Any] = {}
    for name, array in zip(traced.arrays, arrays, strict=True):
        layout[name], data = _copy_leaf(name, layout[name], array)
        sources[name] = partial(_same, data)
    for name, leaf in traced.constants.items():
        if layout[name].payload_dtype:
            sources[name] = partial(leaf_data, name, leaf, layout[name])
        else:
            values[name] = scalar_value(name, leaf, layout[name])
    return StateData(layout=layout, values=values, sources=sources)


def _same(data: LeafData) -> LeafData:
    return data


def hand_over(receive: Receive, due: Any, step: Any, arrays: Sequence[Any]) -> None:
    """Call a function outside the trace, where ``due`` holds, with values.

    An ordered callback cannot be vmapped, and a condition with one in it neither: the
    rule below widens the values and makes the same call, one for all seeds. Only a
    call that is due brings the state to the host.
    """
    values = (due, step, list(arrays))
    dtypes = jax.tree_util.tree_map(lambda x: x.dtype, values)

    @custom_vmap
    def call(due: Any, step: Any, arrays: Any) -> tuple[()]:
        def now() -> None:
            io_callback(receive, None, due, step, arrays, ordered=True)

        lax.cond(jnp.any(due), now, lambda: None)
        return ()

    def widen(size: int, batched: Any, *args: Any) -> tuple[tuple[()], tuple[()]]:
        def full(x: Any, dtype: Any, has_axis: bool) -> Any:
            if has_axis:
                return x
            x = jnp.asarray(x, dtype)  # a constant may come as a Python number
            return jnp.broadcast_to(x, (size, *x.shape))

        call(*jax.tree_util.tree_map(full, args, dtypes, tuple(batched)))
        return (), ()

    call.def_vmap(widen)
    call(*values)


def as_due(due: Any) -> Any:
    """Return ``due`` as a boolean array.

    Raises:
        InvalidArgumentError: it is none.
    """
    array = jnp.asarray(due)
    if array.dtype != np.bool_:
        problem = f"due: expected a bool, found {array.dtype}"
        raise InvalidArgumentError(problem, hint="pass due=step % 1000 == 0")
    return array


def as_steps(step: Any) -> Any:
    """Return the step as an integer array, on its way out of a trace.

    Raises:
        InvalidArgumentError: it holds no integers; or it is known already, and is
            negative, too large, or not one.
    """
    if isinstance(step, Tracer):
        return check_steps(step)
    number = number_of(step)
    dtype = jax.dtypes.canonicalize_dtype(getattr(step, "dtype", int))
    if find_beyond(np.asarray(number), dtype) is not None:
        hint = "set jax_enable_x64, or count in larger units"
        raise InvalidArgumentError(f"step: {number} is beyond {dtype}", hint=hint)
    return jnp.asarray(number, dtype)


def number_of(step: Any) -> int:
    """Return a step that is known as the one number it is.

    Raises:
        InvalidArgumentError: it holds no integers, or not one that is a step.
    """
    if type(step) is int:
        return read_steps([step])
    return read_steps(check_steps(np.asarray(step)))


def check_steps(array: Any) -> Any:
    """Return an array, if it holds integers.

    Raises:
        InvalidArgumentError: it holds none.
    """
    if not jnp.issubdtype(array.dtype, jnp.integer) or array.size == 0:
        problem = f"step: {array.dtype}{list(array.shape)} holds no integer"
        raise InvalidArgumentError(problem, hint="pass step=state.step")
    return array


def read_due(due: Any) -> None:
    """Refuse to save some seeds of a state.

    Raises:
        InvalidArgumentError: it is not due for all.
    """
    values = np.asarray(due)
    if not values.all():
        problem = f"due for {int(values.sum())} of {values.size} seeds"
        hint = "compute due from what all seeds share, such as the step"
        raise InvalidArgumentError(problem, hint=hint)


def read_steps(step: Any) -> int:
    """Return the one step of all seeds.

    Raises:
        InvalidArgumentError: they disagree, or it is negative or too large; names
            the steps.
    """
    steps = sorted({int(value) for value in np.ravel(step)})
    if len(steps) > 1:
        raise disagreement(steps)
    plain_step(steps[0])  # refuses what no file can hold
    return steps[0]


def disagreement(steps: Sequence[int]) -> InvalidArgumentError:
    """Return the error that names the steps of seeds that disagree."""
    shown = ", ".join(map(str, steps[:_SHOWN]))
    more = f" and {len(steps) - _SHOWN} more" if len(steps) > _SHOWN else ""
    return InvalidArgumentError(
        f"the seeds disagree on the step: {shown}{more}",
        hint="bring them to one step, or save each to a file of its own",
    )
