"""A trained policy as files of its own: what acting needs, and nothing else.

A checkpoint is for going on, an export for acting. Either sort of export is one
safetensors file whose bytes are covered by digests, and a JSON beside it for people
and other tools:

* ``export_policy`` writes parameters and the normaliser they need, by leaf name; any
  safetensors reader opens them, and ``load_policy`` puts them into an agent's code.
* ``export_function`` writes a function of raw observations as StableHLO, together
  with its parameters; ``load_function`` acts without the agent's code.

Digests find accidents, not forgery: load functions only from where you would take
code from. Importing this module loads no jax.

Without ajaxckpt, a function is called so::

    arrays = safetensors.numpy.load_file(path)
    program = jax.export.deserialize(bytearray(arrays.pop("program").tobytes()))
    inputs = {n[11:]: x for n, x in arrays.items() if n.startswith("parameters")}
    action = program.call(inputs, obs)
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from ajaxckpt._errors import error_context
from ajaxckpt._export_sources import Wanted, gather_leaves, gather_state
from ajaxckpt._exporting import ExportRecord, open_export, write_export
from ajaxckpt._names import join_names
from ajaxckpt._normalisers import find_normalisers
from ajaxckpt._paths import resolve_path
from ajaxckpt._policies import Policy, read_policy

if TYPE_CHECKING:
    from ajaxckpt._exported_function import ExportedFunction as ExportedFunction

__all__ = [
    "ExportRecord",
    "ExportedFunction",
    "Policy",
    "export_function",
    "export_policy",
    "load_function",
    "load_policy",
]

Path = str | os.PathLike[str]
Axes = int | Mapping[str, int | None]

_warned: set[str] = set()


def __getattr__(name: str) -> object:
    """Fetch the one class when it is first asked for: it takes jax."""
    if name != "ExportedFunction":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ajaxckpt._exported_function import ExportedFunction

    return ExportedFunction


def export_policy(
    source: Any,
    path: Path,
    *,
    parameters: str = "actor.params",
    normaliser: str | tuple[()] | None = None,
    seed: int | None = None,
    axis: Axes = 0,
    step: Any = None,
    config: Any = None,
) -> ExportRecord:
    """Write the parameters of a policy, and its normaliser, to a file of their own.

    Leaves keep their names, so ``restore_into(skeleton, path, subtree=…)`` reads an
    export as it reads a checkpoint. Beside ``policy.safetensors`` comes
    ``policy.json``: dtype and shape by leaf name, step, digests, provenance.

    Args:
        source: a state; or an open checkpoint, or the path of one; or a ``Run``, or
            the path of its directory, for the newest checkpoint whose exported
            leaves are whole. Of a checkpoint only the exported leaves are read.
        path: the file; an export there is replaced, and nothing else is.
        parameters: the name of the node that holds the parameters.
        normaliser: the name of the node that holds the statistics observations are
            normalised with. With None, a state that seems to hold some is warned
            of, once; ``()`` leaves them out on purpose.
        seed: for a state of vmapped seeds, the seed to export: the seeds axis is gone
            from every leaf. With None the axis stays.
        axis: where the seeds axis is, as in ``take_seeds``; used with ``seed`` alone.
        step: the training step; by default the checkpoint's.
        config: what rebuilds the network; by default the checkpoint's.

    Returns:
        What was written: both paths, digests, leaf names.

    Raises:
        InvalidArgumentError: no such node or seed; or a checkpoint is at the path.
        UnsupportedLeafError: a leaf cannot be saved.
        NotACheckpointError: something else is at the path; it was left alone.
        CheckpointNotFoundError, DamagedCheckpointError, NewerFormatError: the source
            cannot be read.

    Example:
        >>> from ajaxckpt.export import export_policy
        >>> state = {"actor": {"params": jnp.ones(3)}, "rms": {"mean": jnp.zeros(3)}}
        >>> export_policy(state, "policy.safetensors", normaliser="rms").leaves
        ('actor.params', 'rms.mean')
    """
    target = resolve_path(path)
    with error_context(target, "cannot export"):
        nodes = {"parameters": parameters}
        if normaliser is not None and normaliser != ():
            nodes["normaliser"] = cast("str", normaliser)
        found = gather_leaves(source, Wanted(nodes=nodes, seed=seed, axis=axis))
        if normaliser is None:
            _warn_of_normalisers(target, found.left)
        return write_export(
            target,
            "policy",
            found.data,
            found.facts,
            step=step,
            config=config,
            said={
                "parameters": parameters,
                "normaliser": nodes.get("normaliser"),
                "seed": found.seed,
            },
        )


def _warn_of_normalisers(target: str, names: Sequence[str]) -> None:
    """Warn once per process of statistics that stay behind."""
    nodes = find_normalisers(sorted(names))
    shown = ", ".join(nodes)
    if not nodes or shown in _warned:
        return
    text = (
        f"{target}: exported without a normaliser, but the state seems to hold one: "
        f"{shown}\nTo mend: pass normaliser={nodes[0]!r} to include it, or "
        "normaliser=() to leave it out on purpose"
    )
    warnings.warn(text, stacklevel=3)
    _warned.add(shown)


def load_policy(
    path: Path, *, parameters: Any = None, normaliser: Any = None
) -> Policy:
    """Load what ``export_policy`` wrote, every byte of it checked.

    Args:
        path: the file.
        parameters: a skeleton for the parameters, such as ``network.init(key, obs)``
            or its ``jax.eval_shape``; without one they are nested dicts of numpy
            arrays (functions among the leaves left out), and no jax is loaded.
        normaliser: a skeleton for the normaliser, likewise.

    Returns:
        The policy; act with ``network.apply(policy.parameters, …)``.

    Raises:
        InvalidArgumentError: the file is no exported policy; or a skeleton for a
            normaliser that it lacks.
        LayoutMismatchError: file and skeleton differ; lists every leaf that does.
        CheckpointNotFoundError, NotACheckpointError, DamagedCheckpointError,
            NewerFormatError: the file cannot be read.

    Example:
        >>> from ajaxckpt.export import export_policy, load_policy
        >>> record = export_policy({"w": jnp.ones(3)}, "p.safetensors", parameters="w")
        >>> load_policy(record.path).parameters
        array([1., 1., 1.], dtype=float32)
    """
    resolved = resolve_path(path)
    with (
        error_context(resolved, "cannot load the policy"),
        open_export(resolved, "policy") as file,
    ):
        return read_policy(file, parameters, normaliser)


def export_function(
    fn: Callable[..., Any],
    example_obs: Any,
    path: Path,
    *,
    parameters: Any = None,
    batched: bool = False,
    platforms: Sequence[str] | None = None,
    step: Any = None,
    config: Any = None,
) -> ExportRecord:
    """Write a policy as a function of raw observations that needs no code to act.

    The function is traced as ``jax.jit`` traces it, so the loaded one gives what the
    jitted one gives, bit for bit on the same machine. Pass everything that was
    trained as ``parameters``: what ``fn`` closes over becomes a constant of the
    program, which XLA may round otherwise.

    Args:
        fn: maps (parameters, observation), or an observation alone where there are
            no parameters, to an action: normalise in it.
        example_obs: an observation, or its ``jax.eval_shape``; arrays in dicts,
            lists and tuples.
        path: the file; an export there is replaced, and nothing else is.
        parameters: any pytree, such as ``(actor.params, normaliser)``; its arrays
            travel beside the program, all else in it (numbers, text, functions) are
            constants of the program.
        batched: whether the leading axis of the observation is a batch, of any size
            from 1.
        platforms: where it is to run, such as ``("cpu", "cuda")``; by default here.
        step: the training step.
        config: what the agent was trained with.

    Returns:
        What was written: both paths, digests, leaf names.

    Raises:
        InvalidArgumentError: ``fn`` cannot be exported so; or a checkpoint is at
            the path.
        UnsupportedLeafError: a parameter cannot be saved.
        NotACheckpointError: something else is at the path; it was left alone.
        CheckpointError: the package flatbuffers is missing.

    Example:
        >>> from ajaxckpt.export import export_function, load_function
        >>> params = {"w": jnp.ones((3, 1))}
        >>> record = export_function(
        ...     lambda params, obs: jnp.tanh(obs @ params["w"]),
        ...     jnp.zeros((1, 3)),
        ...     "act.safetensors",
        ...     parameters=params,
        ...     batched=True,
        ... )
        >>> load_function("act.safetensors")(jnp.zeros((5, 3))).shape
        (5, 1)
    """
    from ajaxckpt._programs import export_program

    target = resolve_path(path)
    with error_context(target, "cannot export"):
        program = export_program(
            fn, example_obs, parameters, batched=batched, platforms=platforms
        )
        groups = {"parameters": program.inputs, "constants": program.constants}
        leaves: dict[str, Any] = {
            join_names(group, name): leaf
            for group, named in groups.items()
            for name, leaf in named.items()
        }
        leaves["program"] = program.blob
        found = gather_state(leaves, Wanted(nodes={"": ""}))
        return write_export(
            target,
            "function",
            found.data,
            found.facts,
            step=step,
            config=config,
            said={
                "batched": batched,
                "platforms": " ".join(program.platforms),
            },
        )


def load_function(path: Path) -> ExportedFunction:
    """Load what ``export_function`` wrote, every byte of it checked.

    Args:
        path: the file.

    Returns:
        The function: call it with raw observations. It compiles when it is first
        called, once per batch size.

    Raises:
        InvalidArgumentError: the file is no exported function.
        CheckpointError: this JAX does not read the program, it is for another
            platform, or flatbuffers is missing.
        CheckpointNotFoundError, NotACheckpointError, DamagedCheckpointError,
            NewerFormatError: the file cannot be read.

    Example:
        >>> from ajaxckpt.export import export_function, load_function
        >>> record = export_function(jnp.sin, jnp.zeros(3), "sin.safetensors")
        >>> load_function("sin.safetensors")(jnp.zeros(3)).tolist()
        [0.0, 0.0, 0.0]
    """
    resolved = resolve_path(path)
    with (
        error_context(resolved, "cannot load the function"),
        open_export(resolved, "function") as file,
    ):
        from ajaxckpt._exported_function import ExportedFunction

        return ExportedFunction(file)
