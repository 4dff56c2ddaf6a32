"""Runs in a process of its own: measures what saving and restoring add to memory.

Prints one JSON object: for each way a state can lie, the bytes of the state and the
peaks above the memory in use before, while saving and while restoring.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ajaxckpt import restore_into, save_checkpoint

MIB = 1 << 20


def _read_status(field: str) -> int:
    """Return a field of this process's memory in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"{field} is not in /proc/self/status")


def peak_of(call: Callable[[], Any]) -> tuple[Any, int]:
    """Return a call's result, and its peak memory beyond what was in use before."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
    before = _read_status("VmRSS")
    result = call()
    return result, _read_status("VmHWM") - before


def _mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))


def _sharded(nbytes: int, spec: P, last: int) -> dict[str, Any]:
    sharding = NamedSharding(_mesh(), spec)
    shape = (nbytes // 4 // last, last)
    part = sharding.shard_shape(shape)
    # a replica is the same on every device, a shard is not
    shards = [
        jax.device_put(np.full(part, i if part != shape else 7, np.float32), device)
        for i, device in enumerate(jax.devices())
    ]
    make = jax.make_array_from_single_device_arrays
    return {"leaf": make(shape, sharding, shards)}


def one_jax_leaf(nbytes: int) -> dict[str, Any]:
    return {"leaf": jax.device_put(np.full(nbytes // 4, 2.0, np.float32))}


def many_jax_leaves(nbytes: int) -> dict[str, Any]:
    leaves = [np.full((256, 1024), i, np.float32) for i in range(nbytes // MIB)]
    return {f"leaf {i}": jax.device_put(x) for i, x in enumerate(leaves)}


def bools_and_halves(nbytes: int) -> dict[str, Any]:
    half = jax.device_put(np.full(nbytes // 4, 1, jnp.bfloat16))
    return {"half": half, "mask": jax.device_put(np.full(nbytes // 2, True))}


def weak_leaf(nbytes: int) -> dict[str, Any]:
    state = {"leaf": jnp.full((nbytes // 4,), 2.0)}
    assert state["leaf"].weak_type
    return state


def one_numpy_leaf(nbytes: int) -> dict[str, Any]:
    return {"leaf": np.full(nbytes // 8, 2.0)}


def strided_numpy_leaf(nbytes: int) -> dict[str, Any]:
    return {"leaf": np.full((nbytes // 8 // 1024, 1024), 2.0).T}


def big_endian_leaf(nbytes: int) -> dict[str, Any]:
    return {"leaf": np.full(nbytes // 8, 2.0, ">f8")}


def many_numpy_leaves(nbytes: int) -> dict[str, Any]:
    return {f"leaf {i}": np.full(MIB // 8, i + 0.5) for i in range(nbytes // MIB)}


def sharded_by_rows(nbytes: int) -> dict[str, Any]:
    return _sharded(nbytes, P("x", None), 1024)


def sharded_by_columns(nbytes: int) -> dict[str, Any]:
    return _sharded(nbytes, P(None, "x"), 1024)


def sharded_in_one_long_row(nbytes: int) -> dict[str, Any]:
    return _sharded(nbytes, P(None, "x"), nbytes // 8)


def replicated(nbytes: int) -> dict[str, Any]:
    """Lie on every device: the state is eight times its bytes in the file."""
    return _sharded(nbytes // 8, P(), 1024)


STATES = (
    one_jax_leaf,
    many_jax_leaves,
    bools_and_halves,
    weak_leaf,
    one_numpy_leaf,
    strided_numpy_leaf,
    big_endian_leaf,
    many_numpy_leaves,
    sharded_by_rows,
    sharded_by_columns,
    sharded_in_one_long_row,
    replicated,
)


def _skeleton(state: Any) -> Any:
    """Build a skeleton that takes no memory: abstract, or pages never touched."""

    def empty(leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray):
            return np.zeros(leaf.shape, leaf.dtype)
        return jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=leaf.sharding, weak_type=leaf.weak_type
        )

    return jax.tree.map(empty, state)


def _nbytes(state: Any) -> int:
    leaves = jax.tree.leaves(state)
    return sum(
        sum(shard.data.nbytes for shard in leaf.addressable_shards)
        if isinstance(leaf, jax.Array)
        else leaf.nbytes
        for leaf in leaves
    )


def _sample(state: Any) -> list[Any]:
    """Return the last element of each leaf, to see that it came back."""
    last = [leaf[(-1,) * leaf.ndim] for _, leaf in sorted(state.items())]
    return [float(np.asarray(element)) for element in last]


def measure(build: Callable[[int], Any], nbytes: int, path: Path) -> dict[str, int]:
    warm = jax.block_until_ready(
        build(4 * MIB)
    )  # compiles, imports and thread stacks are no state
    save_checkpoint(warm, path)
    restore_into(_skeleton(warm), path)
    state = jax.block_until_ready(build(nbytes))
    _, saving = peak_of(partial(save_checkpoint, state, path))
    size, sample, skeleton = _nbytes(state), _sample(state), _skeleton(state)
    del state, warm
    restored, restoring = peak_of(partial(restore_into, skeleton, path))
    assert _sample(restored) == sample
    path.unlink()
    return {"state": size, "saving": saving, "restoring": restoring}


def main() -> None:
    directory, nbytes = Path(sys.argv[1]), int(sys.argv[2])
    path = directory / "a.safetensors"
    wanted = sys.argv[3:]
    results = {
        build.__name__: measure(build, nbytes, path)
        for build in STATES
        if not wanted or build.__name__ in wanted
    }
    print(json.dumps(results))


if __name__ == "__main__":
    main()
