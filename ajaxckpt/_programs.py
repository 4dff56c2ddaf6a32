"""A function and its parameters as StableHLO, and back: what jax.export is for.

Knows jax; knows nothing of files. Parameters are inputs of the program and no
constants of it: XLA computes with constants at compile time, and rounds otherwise.
"""

# jax's own annotations are partial
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false
# pyright: reportUnknownLambdaType=false, reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import jax.export
import numpy as np

from ajaxckpt._errors import CheckpointError, InvalidArgumentError
from ajaxckpt._layout import X64_DTYPES, is_array
from ajaxckpt._leaves import describe_leaf, find_unsavable
from ajaxckpt._names import join_names
from ajaxckpt._tree import flatten_state, unflatten_state

X64 = "jax_enable_x64"
PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
_OBSERVATION = "pass an array as the environment gives it, or a dict of some"
_INSTALL = "pip install 'ajaxckpt[export]', or flatbuffers alone"


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """An exported function.

    Attributes:
        blob: the serialised StableHLO.
        inputs: the arrays it takes beside the observation, by leaf name.
        constants: what else stood among the parameters, and went into the program; of a
            random key, its implementation.
        platforms: where it runs.
    """

    blob: bytes
    inputs: Mapping[str, Any]
    constants: Mapping[str, Any]
    platforms: tuple[str, ...]


def export_program(
    fn: Callable[..., Any],
    example_obs: Any,
    parameters: Any,
    *,
    batched: bool,
    platforms: Sequence[str] | None,
) -> Program:
    """Trace a function of (parameters, observation), or of an observation alone.

    Raises:
        InvalidArgumentError: it cannot be traced so, or returns what cannot be written.
        UnsupportedLeafError: a parameter has no data.
        CheckpointError: the package flatbuffers is missing.
    """
    if not callable(fn):
        hint = "pass fn(parameters, obs), or fn(obs) without parameters="
        raise InvalidArgumentError(f"fn is no function: {fn!r}", hint=hint)
    chosen = None if platforms is None else _check_platforms(platforms)
    flat = flatten_state(() if parameters is None else parameters)
    inputs = {name: x for name, x in flat.leaves.items() if is_input(name, x)}
    if (error := find_unsavable(inputs.items())) is not None:
        raise error
    keys = {n: str(jax.random.key_impl(x)) for n, x in inputs.items() if _is_key(x)}
    plain = {name: plain_input(leaf) for name, leaf in inputs.items()}

    def program(arrays: Mapping[str, Any], obs: Any) -> Any:
        if parameters is None:
            return fn(obs)
        wrapped = {n: jax.random.wrap_key_data(arrays[n], impl=keys[n]) for n in keys}
        return fn(unflatten_state(flat, {**flat.leaves, **arrays, **wrapped}), obs)

    described = jax.tree.map(_on_one_device, jax.eval_shape(lambda x: x, plain))
    observation = _describe_observation(example_obs, batched=batched)
    exporting = jax.export.export(jax.jit(program), platforms=chosen)
    try:
        with _without_paths():
            exported = exporting(described, observation)
    except Exception as error:
        raise _explain(error, batched=batched) from error
    if exported.nr_devices != 1:
        raise InvalidArgumentError(
            f"fn acts on {exported.nr_devices} devices",
            hint="pass what it closes over as parameters=, or bring it to one device",
        )
    code = {name: leaf for name, leaf in flat.leaves.items() if name not in inputs}
    return Program(
        blob=_serialize(exported),
        inputs=plain,
        constants={**code, **keys},
        platforms=tuple(exported.platforms),
    )


@contextmanager
def _without_paths() -> Generator[None]:
    """Keep the directories of source files out of the program: it travels."""
    name = "jax_hlo_source_file_canonicalization_regex"
    before = getattr(jax.config, name)
    jax.config.update(name, before or r".*[/\\]")
    try:
        yield
    finally:
        jax.config.update(name, before)


def _check_platforms(platforms: Sequence[str]) -> tuple[str, ...]:
    """Refuse platforms that nothing runs on: jax would write such a program."""
    wanted = [platforms] if isinstance(platforms, str) else list(platforms)
    if isinstance(platforms, str) or not wanted or set(wanted) - set(PLATFORMS):
        raise InvalidArgumentError(
            f"platforms={platforms!r}: expected some of {', '.join(PLATFORMS)}",
            hint="pass platforms=('cpu',), or platforms=('cpu', 'cuda')",
        )
    return tuple(wanted)


def _on_one_device(leaf: Any) -> Any:
    """Drop where an array lies: the program is to run anywhere."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=leaf.weak_type)


def _describe_observation(example_obs: Any, *, batched: bool) -> Any:
    try:
        observation = jax.eval_shape(lambda obs: obs, example_obs)
    except Exception as error:
        others = [x for x in jax.tree.leaves(example_obs) if not hasattr(x, "dtype")]
        found = f"a {type(others[0]).__name__}" if others else _first_line(error)
        problem = f"example_obs is no observation: it holds {found}"
        raise InvalidArgumentError(problem, hint=_OBSERVATION) from error
    if not jax.tree.leaves(observation):
        problem = "example_obs is no observation: it holds no arrays"
        raise InvalidArgumentError(problem, hint=_OBSERVATION)
    symbolic = _make_symbolic() if batched else _on_one_device
    return jax.tree.map(symbolic, observation)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(
        leaf.dtype, jax.dtypes.prng_key
    )


def is_input(name: str, leaf: Any) -> bool:
    """Tell arrays from what is code here: functions, static numbers, strings."""
    return is_array(describe_leaf(name, leaf))


def plain_input(leaf: Any) -> Any:
    """Return an input as a program takes it: as ``jit`` would, keys as words."""
    if _is_key(leaf):
        return jax.random.key_data(leaf)
    if isinstance(leaf, jax.Array):
        return leaf
    return np.asarray(leaf, jax.dtypes.canonicalize_dtype(leaf.dtype))


def _make_symbolic() -> Callable[[Any], Any]:
    (batch,) = jax.export.symbolic_shape("batch")

    def symbolic(leaf: Any) -> Any:
        if not leaf.shape:
            raise InvalidArgumentError(
                "batched=True: a leaf of example_obs has no axis",
                hint="give every observation a leading batch axis, or batched=False",
            )
        shape = (batch, *leaf.shape[1:])
        return jax.ShapeDtypeStruct(shape, leaf.dtype, weak_type=leaf.weak_type)

    return symbolic


def _explain(error: Exception, *, batched: bool) -> InvalidArgumentError:
    hint = "fn(parameters, obs), or fn(obs), must run under jax.jit on example_obs"
    if batched:
        hint += "; if it cannot take a batch of any size, pass batched=False"
    return InvalidArgumentError(
        f"fn cannot be exported: {_first_line(error)}", hint=hint
    )


def _serialize(exported: Any) -> bytes:
    try:
        return bytes(exported.serialize())
    except ImportError as error:
        raise _no_flatbuffers() from error
    except ValueError as error:
        hint = "observations and actions may be arrays in dicts, lists and tuples"
        raise InvalidArgumentError(f"fn: {_first_line(error)}", hint=hint) from error


def _no_flatbuffers() -> CheckpointError:
    return CheckpointError("the package flatbuffers is missing", hint=_INSTALL)


def load_program(blob: bytes, written_with: str) -> Any:
    """Return a ``jax.export.Exported`` that this process can run.

    Raises:
        CheckpointError: this JAX does not read it, it is for other platforms, or
            flatbuffers is missing.
    """
    try:
        exported = jax.export.deserialize(bytearray(blob))
        exported.mlir_module()  # else a program of a newer jax fails when it is called
    except ImportError as error:
        raise _no_flatbuffers() from error
    except Exception as error:
        raise CheckpointError(
            f"jax {jax.__version__} cannot read the program, which jax {written_with} "
            f"wrote: {_first_line(error)}",
            hint=f"load it with jax {written_with} or newer, or export it again with "
            "this one",
        ) from error
    if not any(map(_is_here, exported.platforms)):
        raise CheckpointError(
            f"the function is for {', '.join(exported.platforms)}, and jax runs on "
            f"{jax.export.default_export_platform()} here",
            hint="load it where it runs, or export it again with platforms=",
        )
    return exported


def _is_here(platform: str) -> bool:
    try:
        return bool(jax.devices(platform))
    except RuntimeError:
        return False


def find_wide(exported: Any) -> str:
    """Return what a program takes of 64 bits while JAX is set to 32; else nothing."""
    (arrays, obs), _ = jax.tree.unflatten(exported.in_tree, exported.in_avals)
    takes = {name or "its parameters": aval for name, aval in arrays.items()}
    for name, aval in flatten_state(obs).leaves.items():
        takes[join_names("obs", name)] = aval
    for name, aval in takes.items():
        dtype = str(aval.dtype)
        if dtype in X64_DTYPES and str(jax.dtypes.canonicalize_dtype(dtype)) != dtype:
            return (
                f"the function acts with {dtype} ({name}), which {X64} turns off here"
            )
    return ""


def place_inputs(exported: Any, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Bring the inputs of a program to the device, uncommitted.

    Raises:
        CheckpointError: it takes some of 64 bits, and JAX is set to 32.
    """
    if problem := find_wide(exported):
        hint = f"jax.config.update('{X64}', True) before loading it"
        raise CheckpointError(problem, hint=hint)
    with jax.transfer_guard("allow"):
        return {name: jax.numpy.asarray(array) for name, array in arrays.items()}
