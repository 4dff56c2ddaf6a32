"""How long a save in the background stops training: in copies of the state.

Every figure is a ratio to a memcpy of the same bytes, measured side by side: *warm*
into memory that was written before, *fresh* into pages that the kernel must clear
first. The stall is what ``step`` takes; the whole save is over once the file is
durable and was read back. A first save copies into fresh memory, later ones use it
again::

    python benchmarks/stall.py [--mib 1024] [--saves 3] [--seconds 8]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ajaxckpt import KeepLast, Run

MIB = 1 << 20


def one_jax_array(nbytes: int) -> dict[str, Any]:
    """Return one leaf on the device."""
    return {"w": jnp.ones((nbytes // 4,))}


def mixture(nbytes: int) -> dict[str, Any]:
    """Return 200 leaves: on the device, on the host, wide, narrow, keys and bools."""
    each, state = nbytes // 200, dict[str, Any]()
    for number in range(0, 200, 8):
        words = np.ones((each // 16, 4), np.float32)
        state |= {
            f"{number} float32": jnp.asarray(words),
            f"{number} bfloat16": jnp.ones((each // 2,), jnp.bfloat16),
            f"{number} bool": jnp.ones((each,), bool),
            f"{number} int32": jnp.ones((each // 4,), np.int32),
            f"{number} keys": jax.random.wrap_key_data(
                jnp.ones((each // 8, 2), np.uint32), impl="threefry2x32"
            ),
            f"{number} host": np.ones(each // 8),
            f"{number} host transposed": np.ones((each // 512, 64)).T,
            f"{number} host uint8": np.ones(each, np.uint8),
        }
    return state


def numpy_replay(nbytes: int) -> dict[str, Any]:
    """Return a buffer of transitions on the host."""
    rows = nbytes // (4 * (2 * 30 + 4))
    shapes = {"obs": (rows, 30), "next_obs": (rows, 30), "action": (rows, 4)}
    return {name: np.ones(shape, np.float32) for name, shape in shapes.items()}


STATES: dict[str, Callable[[int], dict[str, Any]]] = {
    "one jax array": one_jax_array,
    "200 leaves": mixture,
    "numpy replay": numpy_replay,
}


def seconds_of(act: Callable[[], object]) -> float:
    """Return how long a call takes."""
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


class Memcpy:
    """What a copy costs at this moment, warm and into fresh pages."""

    def __init__(self, nbytes: int) -> None:
        """Write the memory once, so that every page of it is there."""
        self._source = np.ones(nbytes, np.uint8)
        self._target = np.ones(nbytes, np.uint8)

    def warm(self) -> float:
        """Return the seconds of a copy into memory that was written before."""
        return seconds_of(lambda: np.copyto(self._target, self._source))

    def fresh(self) -> float:
        """Return the seconds of a copy into memory that was never written."""
        target = np.empty_like(self._source)
        return seconds_of(lambda: np.copyto(target, self._source))


def measure(
    build: Callable[[int], dict[str, Any]],
    nbytes: int,
    saves: int,
    seconds: float,
    directory: Path,
) -> list[tuple[float, ...]]:
    """Return stall, whole save, warm and fresh memcpy in seconds, save by save.

    After the second save, none begins once the seconds are over.
    """
    begin = time.perf_counter()
    memcpy, state = Memcpy(nbytes), jax.block_until_ready(build(nbytes))
    rows: list[tuple[float, ...]] = []
    memcpy.fresh()  # a virtual machine may have to ask its host for the pages first
    with Run(directory, keep=KeepLast(1), preflight=False) as run:
        for step in range(1, saves + 1):
            if step > 2 and time.perf_counter() - begin > seconds:
                break
            copies = [(memcpy.warm(), memcpy.fresh()) for _ in range(2)]
            start = time.perf_counter()
            run.step(state, step=step)
            stall = time.perf_counter() - start
            run.wait()
            whole = time.perf_counter() - start
            copies.append((memcpy.warm(), memcpy.fresh()))
            warm, fresh = (
                statistics.median(column) for column in zip(*copies, strict=True)
            )
            rows.append((stall, whole, warm, fresh))
    return rows


def render(name: str, which: str, rows: list[tuple[float, ...]]) -> str:
    """Lay out one line: the median ratios of some saves."""
    stalls = [stall / warm for stall, _, warm, _ in rows]
    against_fresh = [stall / fresh for stall, _, _, fresh in rows]
    wholes = [whole / warm for _, whole, warm, _ in rows]
    wholes_fresh = [whole / fresh for _, whole, _, fresh in rows]
    figures = (stalls, against_fresh, wholes, wholes_fresh)
    cells = "".join(f"{statistics.median(column):>11.2f} x" for column in figures)
    return f"{name:<15}{which:<7}{cells}"


def main() -> None:
    """Measure every state, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--mib", type=int, default=1024, help="size of the state")
    parser.add_argument("--saves", type=int, default=3, help="saves of each state")
    parser.add_argument("--seconds", type=float, default=8, help="for each state")
    parser.add_argument("--directory", help="where to save; by default the temporary")
    args = parser.parse_args()
    title = "ajaxckpt: stall and whole save in copies of the state"
    print(f"{title}, {args.mib} MiB, {jax.default_backend()}\n")
    columns = ("stall/warm", "stall/fresh", "whole/warm", "whole/fresh")
    print(f"{'state':<15}{'save':<7}" + "".join(f"{c:>13}" for c in columns))
    for name, build in STATES.items():
        with tempfile.TemporaryDirectory(dir=args.directory) as directory:
            # the first save of a process imports and compiles: that is no copy
            with Run(Path(directory) / "warm") as run:
                run.step(build(MIB), step=1)
            run_directory = Path(directory) / "run"
            nbytes = args.mib * MIB
            rows = measure(build, nbytes, args.saves, args.seconds, run_directory)
        print(render(name, "first", rows[:1]), flush=True)
        if rows[1:]:
            print(render(name, "later", rows[1:]), flush=True)


if __name__ == "__main__":
    main()
