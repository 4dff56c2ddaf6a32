"""How a file's bytes become jax arrays: in few transfers, never held twice.

Knows jax; knows nothing of trees, headers or files.
"""

# jax's own annotations are partial
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false
# pyright: reportUnknownLambdaType=false, reportPrivateImportUsage=false

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from ajaxckpt._layout import storage_dtype
from ajaxckpt._payload import Array, Part, aligned_empty, as_bytes
from ajaxckpt._places import (
    LeafSource,
    Place,
    Target,
    is_multi_device,
    on_device,
    place_of,
)

_LARGE_BYTES = 16 << 20
# XLA rounds narrower floats through float32 while it copies, and loses NaN bits
_COPIED_EXACTLY = re.compile(r"bool|u?int(8|16|32|64)|float(32|64)|complex(64|128)")


def _shard_buffers(
    target: Target, sharding: Sharding
) -> dict[Any, tuple[tuple[slice, ...], Array]]:
    """Allocate one buffer per device, replicas included."""
    shape, dtype = target.spec.payload_shape, storage_dtype(target.name, target.spec)
    buffers: dict[Any, tuple[tuple[slice, ...], Array]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        box = tuple(
            slice(*axis.indices(size)[:2])
            for axis, size in zip(index or (), shape, strict=True)
        )
        extent = tuple(axis.stop - axis.start for axis in box)
        buffers[device] = (box, aligned_empty(extent, dtype))
    return buffers


def _read_sharded(target: Target, sharding: Sharding, source: LeafSource) -> jax.Array:
    """Read shard by shard: the whole never exists on the host beside its shards."""
    buffers = _shard_buffers(target, sharding)
    first: dict[str, Part] = {}
    for box, data in buffers.values():
        first.setdefault(str(box), Part(index=box, data=data))
    source.fill_parts(target.name, list(first.values()))
    for box, data in buffers.values():
        if data is not first[str(box)].data:
            np.copyto(data, first[str(box)].data)
    singles = jax.device_put(
        [data for _, data in buffers.values()],
        [
            SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
            for device in buffers
        ],
    )
    return jax.make_array_from_single_device_arrays(
        target.spec.payload_shape, sharding, singles
    )


def _put(buffers: dict[str, Array], place: Place) -> dict[str, jax.Array]:
    """Move host buffers to one place in one call."""
    if place.sharding is not None:
        arrays = jax.device_put(list(buffers.values()), place.sharding)
    else:
        with on_device(place):
            arrays = jax.device_put(list(buffers.values()))
    return dict(zip(buffers, arrays, strict=True))


def _identity(array: jax.Array) -> jax.Array:
    return array


@lru_cache(maxsize=512)
def _compile_weakener(
    shape: tuple[int, ...], dtype: Any, sharding: Sharding | None, device: Any
) -> Any:
    """Compile what turns a strong array weak, bit for bit.

    The only public way that keeps NaN payloads, works for bool and leaves an
    uncommitted array uncommitted. ``device`` is part of the key alone.
    """
    del device
    struct = jax.ShapeDtypeStruct(shape, dtype, weak_type=True, sharding=sharding)
    return jax.jit(_identity).lower(struct).compile()


def _weaken(array: jax.Array, place: Place) -> jax.Array:
    args = (array.shape, array.dtype, place.sharding)
    with on_device(place):
        default = cast("Any", jax.config).jax_default_device
        weak = _compile_weakener(*args, default)(array)
    if place.sharding is None or weak.sharding == place.sharding:
        return weak
    return jax.device_put(weak, place.sharding)  # compiled results forget memory kinds


@lru_cache(maxsize=64)
def _compile_weak_fill(
    shape: tuple[int, ...], dtype: Any, sharding: Sharding | None, device: Any
) -> tuple[Any, Any, Any]:
    """Compile how a large weak array is filled in place: empty, write, finish."""
    del device
    size = math.prod(shape)
    flat = jax.ShapeDtypeStruct((size,), dtype, weak_type=True, sharding=sharding)

    def write(flat: jax.Array, piece: jax.Array, start: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice(flat, piece, (start,))

    empty = jax.jit(lambda: jax.numpy.zeros((size,), dtype), out_shardings=sharding)
    finish = jax.jit(lambda flat: flat.reshape(shape), donate_argnums=0)
    return (
        empty,
        jax.jit(write, donate_argnums=0),
        finish.lower(flat).compile(),
    )


def _is_large_weak(target: Target, place: Place) -> bool:
    """Tell whether a leaf is worth filling in place; it must lie in device memory."""
    spec = target.spec
    if not spec.weak_type or spec.nbytes <= _LARGE_BYTES:
        return False
    if not _COPIED_EXACTLY.fullmatch(spec.dtype):
        return False
    if place.sharding is None:
        return True
    (device,) = place.sharding.device_set
    return place.sharding.memory_kind == device.default_memory().kind


def _read_large_weak(target: Target, place: Place, source: LeafSource) -> jax.Array:
    """Read a weak array without ever holding it twice.

    Weakening copies what JAX took over from the host, so the pieces are written into
    an array that JAX owns, whose memory the weak one then takes over.
    """
    spec = target.spec
    with on_device(place):
        default = cast("Any", jax.config).jax_default_device
        empty, write, finish = _compile_weak_fill(
            spec.shape, storage_dtype(target.name, spec), place.sharding, default
        )
        flat, start = empty(), 0
        for piece in source.iter_pieces(target.name):
            # the next piece overwrites this one
            flat = jax.block_until_ready(write(flat, piece, np.int64(start)))
            start += piece.size
        return finish(flat)


def _wrap_key(data: jax.Array, target: Target, place: Place) -> jax.Array:
    with on_device(place):
        key = jax.random.wrap_key_data(data, impl=target.spec.key_impl)
    return key if place.sharding is None else jax.device_put(key, place.sharding)


def restore_on_devices(
    targets: Sequence[Target], source: LeafSource, common: Place
) -> dict[str, jax.Array]:
    """Read leaves and put each on its device, a transfer per place."""
    places = {target.name: place_of(target.like, common) for target in targets}
    arrays: dict[str, jax.Array] = {}
    groups: dict[Place, dict[str, Array]] = defaultdict(dict)
    for target in targets:
        place = places[target.name]
        if target.spec.kind == "key":
            place = Place(device=place.device)
        if is_multi_device(place) and place.sharding is not None:
            arrays[target.name] = _read_sharded(target, place.sharding, source)
        elif _is_large_weak(target, place):
            arrays[target.name] = _read_large_weak(target, place, source)
        else:
            shape, dtype = (
                target.spec.payload_shape,
                storage_dtype(target.name, target.spec),
            )
            groups[place][target.name] = aligned_empty(shape, dtype)
    source.fill({n: as_bytes(a) for group in groups.values() for n, a in group.items()})
    for place, buffers in groups.items():
        arrays.update(_put(buffers, place))
    groups.clear()
    for target in targets:
        name, spec = target.name, target.spec
        if spec.kind == "key":
            arrays[name] = _wrap_key(arrays[name], target, places[name])
        elif spec.weak_type and not arrays[name].weak_type:
            arrays[name] = _weaken(arrays[name], places[name])
    return jax.block_until_ready(arrays)
