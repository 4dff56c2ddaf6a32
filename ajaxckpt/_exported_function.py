"""A function of raw observations, once it is loaded: call it, or learn why not.

Knows an exported program and what it takes; knows nothing of agents.
"""

# jax's own annotations are partial
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.export
import numpy as np
from jax.core import Tracer

from ajaxckpt._errors import (
    DamagedCheckpointError,
    InvalidArgumentError,
    error_context,
)
from ajaxckpt._grammar import clip
from ajaxckpt._layout import X64_DTYPES, Layout, LeafSpec, is_array, shown_name
from ajaxckpt._leaves import describe_leaf, enum_name, function_name
from ajaxckpt._names import join_names, relative_name
from ajaxckpt._plain import MAX_INT_BITS
from ajaxckpt._programs import (
    X64,
    find_wide,
    load_program,
    place_inputs,
    plain_input,
)
from ajaxckpt._reader import Checkpoint
from ajaxckpt._tables import show_count
from ajaxckpt._tree import flatten_state

PROGRAM = "program"
PARAMETERS = "parameters"
CONSTANTS = "constants"
_NOTHING = "nothing"
_SAME_AGENT = (
    "pass parameters of the same agent; numbers, text and functions among them are "
    "constants of the program: pass the same, or export the function again"
)


class ExportedFunction:
    """A function of raw observations, loaded from its file.

    It runs under ``jax.jit`` and alone; it has no derivative, and takes a batch
    instead of ``jax.vmap``.

    Attributes:
        path: the file, absolute.
        platforms: the platforms it was exported for, such as ``cpu``.
        inputs: the parameters it acts with, by leaf name, as they lie in the file.
        step: the training step, if known.
        config: the config it was trained with, if known.
        digest: the digest of program and parameters.
        provenance: when and with which versions it was exported.
    """

    def __init__(self, file: Checkpoint) -> None:
        """Read all of an open file."""
        leaves = file.read(list(file))
        if not isinstance(leaves.get(PROGRAM), bytes):
            raise DamagedCheckpointError("the file holds no program")
        self._exported = load_program(
            leaves.pop(PROGRAM), str(file.provenance.get("jax"))
        )
        self._call = jax.jit(self._exported.call)
        self.inputs: Mapping[str, Any] = {
            short: leaves[name] for short, name in _names_below(PARAMETERS, leaves)
        }
        _check_inputs(self._exported, self.inputs)
        self._placed = place_inputs(self._exported, self.inputs)
        self._accepted = _accepted_leaves(file.layout, leaves)
        self.platforms: tuple[str, ...] = tuple(self._exported.platforms)
        self.path = file.path
        self.step = file.step
        self.config = file.config
        self.digest = file.digest
        self.provenance: Mapping[str, str | bool | None] = file.provenance

    def __call__(self, obs: Any, *, parameters: Any = None) -> Any:
        """Act on a raw observation.

        Args:
            obs: an observation of the example's form; where it was exported as a
                batch, a batch of any size from 1.
            parameters: others than the file's, such as those of a later step; all
                that is no array must be the same, functions may be left out.

        Returns:
            What the function returns.

        Raises:
            InvalidArgumentError: observation or parameters do not fit the program.
        """
        with error_context(self.path, "cannot act"):
            inputs = self._placed
            if parameters is not None:
                inputs = name_inputs(parameters, self._accepted)
            try:
                return self._call(inputs, obs)
            except (TypeError, ValueError, NotImplementedError) as error:
                if (why := explain_call(self._exported, obs, error)) is None:
                    raise
                raise why from error

    def __repr__(self) -> str:
        """Show path and step."""
        return f"<ExportedFunction {self.path} step={self.step}>"


def _check_inputs(exported: Any, inputs: Mapping[str, Any]) -> None:
    """Refuse a program that does not take what lies beside it.

    Raises:
        DamagedCheckpointError: they are not of one export.
    """
    arguments, _ = jax.tree.unflatten(exported.in_tree, exported.in_avals)
    takes = arguments[0] if len(arguments) == 2 else None
    if isinstance(takes, dict):
        wanted = {name: (x.dtype, x.shape) for name, x in takes.items()}
        if wanted == {name: _form(x) for name, x in inputs.items()}:
            return
    raise DamagedCheckpointError("program and parameters are not of one export")


def _form(value: Any) -> Any:
    return getattr(value, "dtype", None), getattr(value, "shape", None)


def _names_below(node: str, names: Iterable[str]) -> list[tuple[str, str]]:
    found = ((relative_name(name, node), name) for name in names)
    return [(short, name) for short, name in found if short is not None]


def _accepted_leaves(
    layout: Layout, leaves: Mapping[str, Any]
) -> dict[str, tuple[str, ...]]:
    """Return how a leaf of other parameters may be spelled, the usual spelling first.

    A random key comes as its words, too, and code can be left out.
    """
    accepted: dict[str, tuple[str, ...]] = {
        short: (_spell(layout[name], None),)
        for short, name in _names_below(PARAMETERS, leaves)
    }
    for short, name in _names_below(CONSTANTS, leaves):
        spec, value = layout[name], leaves[name]
        if short in accepted:
            shape = layout[join_names(PARAMETERS, short)].shape[:-1]
            key = LeafSpec(kind="key", key_impl=str(value), shape=shape)
            accepted[short] = (str(key), *accepted[short])
        else:
            is_code = spec.kind == "function"
            accepted[short] = (_spell(spec, value), *([_NOTHING] if is_code else ()))
    return accepted


def _spell(spec: LeafSpec, value: Any) -> str:
    """Spell a leaf so that two of one spelling act alike: a constant by its value."""
    if spec.kind == "key":
        return str(spec)
    if is_array(spec):
        return f"{spec.dtype}[{','.join(map(str, spec.shape))}]"
    if spec.kind in ("enum", "function"):
        return f"{spec} {value}"
    is_long = type(value) is int and value.bit_length() > MAX_INT_BITS
    return f"{spec} {hex(value) if is_long else repr(value)}"


def _spell_found(name: str, leaf: Any) -> str:
    spec = _describe(name, leaf)
    if spec.kind == "enum":
        return _spell(spec, enum_name(name, leaf))
    return _spell(spec, function_name(leaf) if spec.kind == "function" else leaf)


def _describe(name: str, leaf: Any) -> LeafSpec:
    """Return the spec of a leaf as a program would take it; it may be traced."""
    is_traced = isinstance(leaf, Tracer)
    spec = None if is_traced else describe_leaf(name, leaf)
    if spec is not None and not isinstance(leaf, np.ndarray | np.generic):
        return spec
    dtype = leaf.dtype if is_traced else jax.dtypes.canonicalize_dtype(leaf.dtype)
    return describe_leaf(name, jax.ShapeDtypeStruct(leaf.shape, dtype))


def name_inputs(
    parameters: Any, accepted: Mapping[str, tuple[str, ...]]
) -> dict[str, Any]:
    """Flatten other parameters for a program.

    Raises:
        InvalidArgumentError: they are not the program's in name, dtype or shape, or
            in the value of a constant.
    """
    leaves = flatten_state(parameters).leaves
    found = {name: _spell_found(name, leaf) for name, leaf in leaves.items()}
    wrong = {
        name: (accepted.get(name, (_NOTHING,)), found.get(name, _NOTHING))
        for name in sorted(accepted.keys() | found.keys())
        if found.get(name, _NOTHING) not in accepted.get(name, (_NOTHING,))
    }
    if wrong:
        fit = "does not fit" if len(wrong) == 1 else "do not fit"
        raise InvalidArgumentError(
            f"parameters: {show_count(len(wrong), 'leaf')} {fit} the function",
            details=[
                f"{shown_name(name)}: expected {clip(expected[0])}, found {clip(item)}"
                for name, (expected, item) in wrong.items()
            ],
            hint=_SAME_AGENT,
        )
    return {n: plain_input(x) for n, x in leaves.items() if is_array(_describe(n, x))}


def explain_call(
    exported: Any, obs: Any, error: Exception
) -> InvalidArgumentError | None:
    """Say what was wrong with a call that failed; None where nothing is known."""
    arguments, _ = jax.tree.unflatten(exported.in_tree, exported.in_avals)
    details = list(_compare_observation(flatten_state(arguments[1]).leaves, obs))
    if details:
        hint = "pass an observation such as that of export_function, as arrays"
        if problem := find_wide(exported):
            hint = f"{problem}: jax.config.update('{X64}', True)"
        problem = "the observation does not fit the function"
        return InvalidArgumentError(problem, details=details, hint=hint)
    if isinstance(error, NotImplementedError):
        hint = "export it with batched=True, and pass the batch"
        return InvalidArgumentError(
            "a loaded function cannot be transformed by vmap", hint=hint
        )
    here = jax.export.default_export_platform()
    if here not in exported.platforms:
        hint = "act below jax.default_device(jax.devices(…)[0]), or export it again"
        where = ", ".join(exported.platforms)
        problem = f"the function is for {where}, and was called on {here}"
        return InvalidArgumentError(problem, hint=hint)
    return None


def _compare_observation(expected: Mapping[str, Any], obs: Any) -> Iterator[str]:
    """Yield a line per leaf that is not as expected; batches must be of one size."""
    found: Mapping[str, Any] = flatten_state(obs).leaves
    sizes: dict[str, str] = {}
    for name in {**expected, **found}:
        want, have = expected.get(name), found.get(name)
        known = [sizes.get(str(size), str(size)) for size in getattr(want, "shape", ())]
        shape = [str(size) for size in getattr(have, "shape", ())]
        if len(known) == len(shape) and known and not known[0].isdigit():
            if shape[0] != "0":
                sizes[known[0]] = known[0] = shape[0]
        shown = _show_leaf(want, known), _show_leaf(have, shape, as_passed=True)
        if shown[0] != shown[1]:
            where = f"obs.{name}" if name else "obs"
            yield f"{where}: expected {shown[0]}, found {shown[1]}"


def _show_leaf(leaf: Any, shape: list[str], *, as_passed: bool = False) -> str:
    if leaf is None:
        return "nothing"
    if not hasattr(leaf, "dtype"):
        return f"a {type(leaf).__name__}"
    dtype = leaf.dtype
    if as_passed and str(dtype) in X64_DTYPES:
        dtype = jax.dtypes.canonicalize_dtype(dtype)
    return f"{dtype}[{','.join(shape)}]"
