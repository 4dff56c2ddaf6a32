"""The compiled chunks of a scan: each sees its carry in the types of the unbroken one.

Knows jax's scans and shardings; saves nothing.
"""

# jax's own annotations are partial
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false
# pyright: reportUnknownLambdaType=false

from __future__ import annotations

from functools import partial
from typing import Any, cast

import jax
import numpy as np
from jax import lax

from ajaxckpt._errors import UnsupportedLeafError, error_context
from ajaxckpt._places import committed_sharding


def refuse_traced_scan(inside: bool) -> None:
    """Refuse to cut a scan where there are no values to save.

    Raises:
        UnsupportedLeafError: the call stands inside a traced function.
    """
    if inside:
        raise UnsupportedLeafError(
            "the scan is cut into chunks inside a traced function",
            hint="call it outside jit, vmap, grad and scan (a vmap goes into its "
            "body), or save from inside with make_saver",
        )


def _is_weak(leaf: Any) -> bool:
    return bool(getattr(leaf, "weak_type", False))  # keys have none


def _struct(leaf: Any) -> Any:
    """Return what a leaf is traced as, whatever becomes of it."""
    if not isinstance(leaf, jax.Array):
        return leaf
    return jax.ShapeDtypeStruct(
        leaf.shape,
        leaf.dtype,
        weak_type=_is_weak(leaf),
        sharding=committed_sharding(leaf),
    )


def _same(tree: Any) -> Any:
    return tree


class ScanPrograms:
    """The compiled scans of one body, all traced with the types of the first carry.

    So is the unbroken scan: a carry that comes out of the body weak-typed would be
    traced differently, were it passed in anew.
    """

    def __init__(self, body: Any, carry: Any, donate: bool) -> None:
        self._body, self._donate = body, (0,) if donate else ()
        self._first = jax.tree_util.tree_map(_struct, carry)
        self._seen: Any = None
        self._promoted = False
        self._compiled: dict[int, Any] = {}
        self._retyping: dict[Any, Any] = {}

    def call(self, size: int, carry: Any, xs: Any) -> tuple[Any, Any]:
        """Run so many steps."""
        if size and cast("Any", jax.config).jax_disable_jit:
            return lax.scan(self._body, carry, xs, length=size)
        with jax.disable_jit(False):  # which a scan of no steps cannot do without
            if (program := self._compiled.get(size)) is None:
                program = self._compiled[size] = self._compile(size, xs)
            if self._promoted:
                carry = jax.tree_util.tree_map(_convert, carry, self._seen)
            return program(_place(carry, program), xs)

    def _compile(self, size: int, xs: Any) -> Any:
        scan = partial(lax.scan, self._body, length=size)
        jitted = jax.jit(scan, donate_argnums=self._donate)
        traced = jitted.trace(self._first, xs)
        inputs = jax.tree_util.tree_leaves((self._first, xs))
        with error_context(None, "cannot scan"):
            # beside its arguments: values of a trace that the body closes over
            refuse_traced_scan(len(traced.jaxpr.in_avals) > len(inputs))
        if self._seen is None:
            self._settle(traced.out_info[0])
            if self._promoted:
                traced = jitted.trace(self._first, xs)
        return traced.lower().compile()

    def _settle(self, returned: Any) -> None:
        """Find the types in which every step of the scan sees the carry.

        ``lax.scan`` begins with a number of the type that the body turns it into.
        """

        def promote(leaf: Any, seen: Any, returned: Any) -> Any:
            if seen.dtype == returned.dtype:
                return leaf
            self._promoted = True
            place = committed_sharding(leaf)
            return jax.ShapeDtypeStruct(seen.shape, returned.dtype, sharding=place)

        seen = jax.eval_shape(_same, self._first)
        self._first = jax.tree_util.tree_map(promote, self._first, seen, returned)
        self._seen = jax.eval_shape(_same, self._first)

    def as_seen(self, carry: Any) -> Any:
        """Give a carry the weak types in which the next step of the scan sees it."""
        if self._seen is None:  # without jit, each step sees what the last returned
            return carry
        leaves, treedef = jax.tree_util.tree_flatten(carry)
        seen = map(_is_weak, jax.tree_util.tree_leaves(self._seen))
        weak = {i: w for i, w in enumerate(seen) if w != _is_weak(leaves[i])}
        if not weak:
            return carry
        retyped = self._retype([leaves[i] for i in weak], list(weak.values()))
        for i, leaf in zip(weak, retyped, strict=True):
            leaves[i] = leaf
        return jax.tree_util.tree_unflatten(treedef, leaves)

    def _retype(self, leaves: list[Any], weak: list[bool]) -> list[Any]:
        """Copy arrays bit for bit into other weak types, through a program of those."""
        places = tuple(map(committed_sharding, leaves))
        if (program := self._retyping.get(places)) is None:
            structs = [
                jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=w, sharding=place)
                for x, w, place in zip(leaves, weak, places, strict=True)
            ]
            with jax.disable_jit(False):
                program = jax.jit(_same).lower(structs).compile()
            self._retyping[places] = program
        return program(leaves)


def _convert(leaf: Any, seen: Any) -> Any:
    if getattr(leaf, "dtype", None) == seen.dtype:
        return leaf
    return lax.convert_element_type(leaf, seen.dtype)


def _place(carry: Any, program: Any) -> Any:
    """Bring a sharded carry to where a compiled program expects it."""
    leaves, treedef = jax.tree_util.tree_flatten(carry)
    if not any(map(_is_sharded, leaves)):
        return carry  # and ask for no shardings, which JAX mixes up with references
    wanted = jax.tree_util.tree_leaves(program.input_shardings[0][0])
    if len(wanted) != len(leaves):  # what the body does not use
        return carry
    for place, (leaf, sharding) in enumerate(zip(leaves, wanted, strict=True)):
        several = len(sharding.device_set) > 1 and isinstance(leaf, jax.Array)
        if several and leaf.committed and leaf.sharding != sharding:
            leaves[place] = jax.device_put(leaf, sharding)
    return jax.tree_util.tree_unflatten(treedef, leaves)


def _is_sharded(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and len(leaf.sharding.device_set) > 1


def slice_rows(xs: Any, start: int, size: int) -> Any:
    """Return some rows of what a scan runs over."""

    def part(x: Any) -> Any:
        if isinstance(x, jax.Array):
            return lax.dynamic_slice_in_dim(x, np.int32(start), size)
        return x[start : start + size]

    return jax.tree_util.tree_map(part, xs)


def join_rows(pieces: list[Any]) -> Any:
    """Put the stacked outputs of chunks together."""
    if len(pieces) == 1:
        return pieces[0]
    return jax.tree_util.tree_map(lambda *parts: lax.concatenate(parts, 0), *pieces)
