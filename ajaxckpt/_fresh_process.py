"""The part after a restore in a process of its own, as a restarted job runs it.

Knows how functions are found again by module and name, and what of JAX's settings a
new process must be told. The functions are the user's own; no file names any.
"""

# jax's own annotations are partial
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import enum
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from ajaxckpt._advances import is_pair
from ajaxckpt._checkpoint import save_checkpoint
from ajaxckpt._equivalence import Held, StateDifferenceError
from ajaxckpt._errors import InvalidArgumentError
from ajaxckpt._layout import TEXT_KINDS
from ajaxckpt._reader import Checkpoint
from ajaxckpt._trials import Options, Trial, call_once, record_rows

_SETTINGS = (
    *("jax_enable_x64", "jax_platforms", "jax_default_prng_impl"),
    *("jax_threefry_partitionable", "jax_default_matmul_precision"),
    *("jax_numpy_dtype_promotion", "jax_numpy_rank_promotion"),
)
_LONGEST_TAIL = 3_000


def locate_function(function: Any, argument: str) -> tuple[str, str]:
    """Return the module and the name under which another process finds a function.

    Raises:
        InvalidArgumentError: it is a lambda, a local, or otherwise not to be found.
    """
    module = getattr(function, "__module__", None)
    path = getattr(function, "__qualname__", None)
    problem = ""
    if not isinstance(module, str) or not isinstance(path, str):
        problem = f"a {type(function).__name__} has no name"
    elif "<lambda>" in path:
        problem = "it is a lambda"
    elif "<locals>" in path:
        problem = f"{path} is local to a function"
    elif module == "__main__":
        problem = f"{path} stands in the script itself, __main__"
    elif _look_up(module, path) is not function:
        problem = f"{module}:{path} is another object"
    if problem:
        raise InvalidArgumentError(
            f"fresh_process: {argument} cannot be imported: {problem}",
            hint=f"define {argument} at the top level of a module",
        )
    return str(module), str(path)


def _look_up(module: str, path: str) -> Any:
    found: Any = sys.modules.get(module)
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Errand:
    """What a fresh process is to do: restore, advance once, save what came of it.

    Attributes:
        source: the checkpoint to restore.
        asked: how far to advance.
        end: where to save the state as it is.
        logs: where to save what was logged.
        handed: where to save the state for the next part, or empty.
    """

    source: str
    asked: int
    end: str
    logs: str
    handed: str = ""


def run_errand(
    errand: Errand,
    functions: Mapping[str, tuple[str, str]],
    options: Mapping[str, Any],
) -> None:
    """Do an errand in a fresh process.

    Args:
        errand: what to do.
        functions: argument name to module and name, of the user's functions.
        options: of ``Options``, as plain data.

    Raises:
        StateDifferenceError: the process failed; shows the end of what it said.
    """
    modules = sorted({module for module, _ in functions.values()})
    lines = ["import json, sys", "from ajaxckpt._fresh_process import do_errand"]
    lines += [f"import {m} as m{i}" for i, m in enumerate(modules)]
    named = (f"{a}=m{modules.index(m)}.{path}" for a, (m, path) in functions.items())
    lines.append(f"do_errand(*map(json.loads, sys.argv[1:3]), {', '.join(named)})")
    told = {name: getattr(errand, name) for name in Errand.__slots__}
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines), *map(json.dumps, (told, options))],
        env=_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise StateDifferenceError(
            "the checkpoint changes it in a fresh process: the fresh process ended "
            f"with exit code {done.returncode}:\n{done.stderr[-_LONGEST_TAIL:]}",
            meaning="the functions read what this process alone holds: a global, a "
            "setting, an argument of the script",
            hint="carry it in the state, or set it up in the module of the functions",
        )


def _environment() -> dict[str, str]:
    """Return this process's environment, with what it was told otherwise."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    for setting in _SETTINGS:
        value = getattr(jax.config, setting, None)
        value = value.value if isinstance(value, enum.Enum) else value
        if value is not None:
            environment[setting.upper()] = str(value)
    return environment


def do_errand(
    told: Mapping[str, Any],
    options: Mapping[str, Any],
    make_skeleton: Callable[[], Any],
    advance: Callable[[Any, int], Any],
    step: Callable[[Any], Any] | None = None,
    logs: Callable[[], Any] | None = None,
    save: Callable[[Any, str], object] | None = None,
    restore: Callable[[Any, str], Any] | None = None,
) -> None:
    """Be the fresh process."""
    errand, plain = Errand(**told), Options(**options)
    trial = Trial(
        make_skeleton=make_skeleton,
        advance=advance,
        step=step,
        logs=logs,
        save=save or plain.save,
        restore=restore or plain.restore,
    )
    skeleton = make_skeleton()
    state = trial.restore(skeleton, errand.source)
    state, part = call_once(trial, state, errand.asked, is_pair(skeleton))
    save_checkpoint(state, errand.end)
    record = record_rows(part.rows)
    values = [_shaped(held) for held in record.values()]
    save_checkpoint(values, errand.logs, config={"names": list(record)})
    if errand.handed:
        trial.save(state, errand.handed)


def _shaped(held: Held) -> Any:
    value = held.value
    return value.reshape(held.spec.shape) if isinstance(value, np.ndarray) else value


def read_end(errand: Errand) -> tuple[dict[str, Held], dict[str, Held]]:
    """Return the state an errand ended in, and what it logged."""
    with Checkpoint(errand.end) as end, Checkpoint(errand.logs) as logs:
        names = (logs.config or {})["names"]
        rows = dict(zip(names, _capture(logs).values(), strict=True))
        return _capture(end), rows


def _capture(checkpoint: Checkpoint) -> dict[str, Held]:
    """Return the record of what a checkpoint holds."""
    values = checkpoint.read(list(checkpoint))
    return {
        name: Held(
            spec=spec,
            value=values[name].reshape(-1)
            if spec.payload_dtype and spec.kind not in TEXT_KINDS
            else values[name],
        )
        for name, spec in checkpoint.layout.items()
    }
