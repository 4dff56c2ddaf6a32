"""A function of raw observations, once it is loaded: call it, or learn why not.

Knows an exported program and what it takes; knows nothing of agents.
"""

# jax's own annotations are partial
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.export

from ajaxckpt._errors import (
    DamagedCheckpointError,
    InvalidArgumentError,
    error_context,
)
from ajaxckpt._layout import LeafSpec, shown_name
from ajaxckpt._leaves import describe_leaf
from ajaxckpt._names import relative_name
from ajaxckpt._programs import is_input, load_program, place_inputs, plain_input
from ajaxckpt._reader import Checkpoint
from ajaxckpt._tables import show_count
from ajaxckpt._tree import flatten_state

PROGRAM = "program"
PARAMETERS = "parameters"


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
        names = {relative_name(name, PARAMETERS): name for name in file}
        names.pop(None, None)  # the program
        arrays = file.read(list(file))
        if not isinstance(arrays.get(PROGRAM), bytes):
            raise DamagedCheckpointError("the file holds no program")
        self._exported = load_program(
            arrays.pop(PROGRAM), str(file.provenance.get("jax"))
        )
        self._call = jax.jit(self._exported.call)
        self._specs = {str(short): file.layout[name] for short, name in names.items()}
        self.inputs: Mapping[str, Any] = {
            str(short): arrays[name] for short, name in names.items()
        }
        _check_inputs(self._exported, self.inputs)
        self._placed = place_inputs(self.inputs)
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
                batch, a batch of any size.
            parameters: others than the file's, such as those of a later step.

        Returns:
            What the function returns.

        Raises:
            InvalidArgumentError: observation or parameters do not fit the program.
        """
        with error_context(self.path, "cannot act"):
            inputs = self._placed
            if parameters is not None:
                inputs = name_inputs(parameters, self._specs)
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


def name_inputs(parameters: Any, expected: Mapping[str, LeafSpec]) -> dict[str, Any]:
    """Flatten other parameters for a program.

    Raises:
        InvalidArgumentError: they are not the program's in name, dtype or shape.
    """
    leaves = flatten_state(parameters).leaves
    arrays = {n: plain_input(x) for n, x in leaves.items() if is_input(n, x)}
    found = {name: describe_leaf(name, array) for name, array in arrays.items()}
    wrong = [
        f"{shown_name(name)}: expected {_show_spec(expected.get(name))}, "
        f"found {_show_spec(found.get(name))}"
        for name in sorted(expected.keys() | found.keys())
        if _show_spec(expected.get(name)) != _show_spec(found.get(name))
    ]
    if wrong:
        fit = "does not fit" if len(wrong) == 1 else "do not fit"
        raise InvalidArgumentError(
            f"parameters: {show_count(len(wrong), 'leaf')} {fit} the function",
            details=wrong,
            hint="pass parameters of the same agent, or export the function again",
        )
    return arrays


def _show_spec(spec: LeafSpec | None) -> str:
    if spec is None:
        return "nothing"
    return f"{spec.dtype}[{','.join(map(str, spec.shape))}]"


def explain_call(
    exported: Any, obs: Any, error: Exception
) -> InvalidArgumentError | None:
    """Say what was wrong with a call that failed; None where nothing is known."""
    arguments, _ = jax.tree.unflatten(exported.in_tree, exported.in_avals)
    details = list(_compare_observation(flatten_state(arguments[1]).leaves, obs))
    if details:
        hint = "pass an observation such as that of export_function, as arrays"
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
        shown = _show_leaf(want, known), _show_leaf(have, shape)
        if shown[0] != shown[1]:
            where = f"obs.{name}" if name else "obs"
            yield f"{where}: expected {shown[0]}, found {shown[1]}"


def _show_leaf(leaf: Any, shape: list[str]) -> str:
    if leaf is None:
        return "nothing"
    if not hasattr(leaf, "dtype"):
        return f"a {type(leaf).__name__}"
    dtype = leaf.dtype
    if jax.dtypes.issubdtype(dtype, jax.numpy.number):
        dtype = jax.dtypes.canonicalize_dtype(dtype)
    return f"{dtype}[{','.join(shape)}]"
