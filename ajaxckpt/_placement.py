"""Where file leaves become live ones: in the skeleton's place, with the file's values.

Knows jax, and a source of checked bytes; knows nothing of headers or names' meaning.
Value facts (dtype, shape, weak type) are the file's, placement (host or device,
sharding, memory kind, committed or not) is the skeleton's.
"""

# jax's own annotations are partial
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false
# pyright: reportUnknownLambdaType=false, reportPrivateImportUsage=false

from __future__ import annotations

import contextlib
import enum
import math
from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol, cast

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import (
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
)

from ajaxckpt._dtypes import STORED_DTYPES
from ajaxckpt._errors import InvalidArgumentError
from ajaxckpt._layout import ARRAY_KINDS, LeafSpec
from ajaxckpt._payload import Array, Part, aligned_empty, as_bytes
from ajaxckpt._tree import find_member

_LARGE_BYTES = 16 << 20


class LeafSource(Protocol):
    """Hands out the checked bytes and values of leaves by name."""

    def fill(self, buffers: Mapping[str, Array]) -> None:
        """Read leaves into flat uint8 buffers of their size."""
        ...

    def fill_parts(self, name: str, parts: Sequence[Part]) -> None:
        """Read one leaf into parts that cover it."""
        ...

    def iter_pieces(self, name: str) -> Iterator[Array]:
        """Yield one leaf's elements in C order, each array overwritten by the next."""
        ...

    def read(self, names: Sequence[str]) -> Mapping[str, Any]:
        """Read leaves as host values."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One leaf to be restored.

    Attributes:
        name: its name in the file.
        spec: what the file holds.
        like: the skeleton's leaf, whose place it takes.
    """

    name: str
    spec: LeafSpec
    like: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where a device array goes: a sharding it is committed to, or just a device."""

    sharding: Sharding | None = None
    device: Any = None


def is_traced() -> bool:
    """Tell whether the caller stands inside a traced function."""
    with jax.transfer_guard("allow"):
        return isinstance(jax.device_put(np.int32(0)), Tracer)


@contextlib.contextmanager
def _neutral_context() -> Generator[None]:
    """Keep the caller's settings from changing a value or raising.

    An ambient mesh would commit what a compiled function returns, a narrow x64 flag
    would wrap 64-bit values, and the debug flags would reject NaNs that were saved.
    """
    with (
        jax.set_mesh(Mesh(np.empty((), object), ())),
        jax.enable_x64(True),
        jax.debug_nans(False),
        jax.debug_infs(False),
        jax.disable_jit(False),
        jax.transfer_guard("allow"),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        yield


def _committed_sharding(like: Any) -> Sharding | None:
    if isinstance(like, jax.ShapeDtypeStruct):
        return like.sharding
    return like.sharding if isinstance(like, jax.Array) and like.committed else None


def find_indivisible(like: Any, shape: tuple[int, ...]) -> str | None:
    """Return why a leaf's sharding cannot cut a shape; None if it can."""
    sharding = _committed_sharding(like)
    if sharding is None or len(sharding.device_set) == 1:
        return None
    try:
        sharding.shard_shape(shape)
    except ValueError:
        return f"{sharding} does not divide {list(shape)} evenly"
    return None


def _common_place(skeleton: Iterable[Any]) -> _Place:
    """Return where a compiled step puts a result whose skeleton names no place.

    Beside committed arrays, what comes out of a compiled function is committed too:
    replicated over their mesh, or on their device.
    """
    found = {_committed_sharding(like) for like in skeleton} - {None}
    meshes = {item.mesh for item in found if isinstance(item, NamedSharding)}
    if len(meshes) == 1 and all(isinstance(item, NamedSharding) for item in found):
        return _Place(sharding=NamedSharding(meshes.pop(), PartitionSpec()))
    devices = {device for item in found if item for device in item.device_set}
    if len(devices) == 1:
        return _Place(sharding=SingleDeviceSharding(devices.pop()))
    return _Place()


def _place_of(like: Any, common: _Place) -> _Place:
    if (sharding := _committed_sharding(like)) is not None:
        return _Place(sharding=sharding)
    if isinstance(like, jax.Array):
        return _Place(device=next(iter(like.sharding.device_set)))
    return common


def _host_kind(target: Target) -> str:
    """Return as what a leaf comes back: jax, numpy or numpy scalar."""
    like = target.like
    if isinstance(like, np.generic):
        return "numpy" if target.spec.shape else "numpy scalar"
    if isinstance(like, np.ndarray):
        return "numpy"
    unplaced = isinstance(like, jax.ShapeDtypeStruct) and like.sharding is None
    if isinstance(like, jax.Array) or not (unplaced or _is_python(like)):
        return "jax"
    return "jax" if target.spec.kind == "key" else target.spec.kind


def _is_python(like: Any) -> bool:
    return not hasattr(like, "dtype")


def _storage_dtype(spec: LeafSpec) -> np.dtype[Any]:
    dtype = STORED_DTYPES[spec.payload_dtype].dtype
    if dtype is None:
        hint = "pip install --upgrade ml_dtypes"
        problem = f"this ml_dtypes has no dtype {spec.payload_dtype}"
        raise InvalidArgumentError(problem, hint=hint)
    return dtype


def _finish_numpy(buffer: Array, target: Target) -> Any:
    """Give a filled host array the skeleton's byte order and type."""
    order = getattr(getattr(target.like, "dtype", None), "byteorder", "=")
    if order == ">":
        buffer = buffer.byteswap(inplace=True).view(buffer.dtype.newbyteorder(">"))
    return buffer[()] if _host_kind(target) == "numpy scalar" else buffer


def _is_multi_device(place: _Place) -> bool:
    return place.sharding is not None and len(place.sharding.device_set) > 1


def _shard_buffers(
    target: Target, sharding: Sharding
) -> dict[Any, tuple[tuple[slice, ...], Array]]:
    """Allocate one buffer per device, replicas included."""
    shape, dtype = target.spec.payload_shape, _storage_dtype(target.spec)
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


def _on_device(place: _Place) -> contextlib.AbstractContextManager[Any]:
    """Make a place's device the default, or leave the caller's default alone."""
    if place.device is None:
        return contextlib.nullcontext()
    return jax.default_device(place.device)


def _put(buffers: dict[str, Array], place: _Place) -> dict[str, jax.Array]:
    """Move host buffers to one place in one call."""
    if place.sharding is not None:
        arrays = jax.device_put(list(buffers.values()), place.sharding)
    else:
        with _on_device(place):
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


def _weaken(array: jax.Array, place: _Place) -> jax.Array:
    args = (array.shape, array.dtype, place.sharding)
    with _on_device(place):
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


def _is_large_weak(target: Target, place: _Place) -> bool:
    """Tell whether a leaf is worth filling in place; it must lie in device memory."""
    if not target.spec.weak_type or target.spec.nbytes <= _LARGE_BYTES:
        return False
    if place.sharding is None:
        return True
    (device,) = place.sharding.device_set
    return place.sharding.memory_kind == device.default_memory().kind


def _read_large_weak(target: Target, place: _Place, source: LeafSource) -> jax.Array:
    """Read a weak array without ever holding it twice.

    Weakening copies what JAX took over from the host, so the pieces are written into
    an array that JAX owns, whose memory the weak one then takes over.
    """
    spec = target.spec
    with _on_device(place):
        default = cast("Any", jax.config).jax_default_device
        empty, write, finish = _compile_weak_fill(
            spec.shape, _storage_dtype(spec), place.sharding, default
        )
        flat, start = empty(), 0
        for piece in source.iter_pieces(target.name):
            # the next piece overwrites this one
            flat = jax.block_until_ready(write(flat, piece, np.int64(start)))
            start += piece.size
        return finish(flat)


def _wrap_key(data: jax.Array, target: Target, place: _Place) -> jax.Array:
    with _on_device(place):
        key = jax.random.wrap_key_data(data, impl=target.spec.key_impl)
    return key if place.sharding is None else jax.device_put(key, place.sharding)


def _restore_on_devices(
    targets: Sequence[Target], source: LeafSource, common: _Place
) -> dict[str, jax.Array]:
    places = {target.name: _place_of(target.like, common) for target in targets}
    arrays: dict[str, jax.Array] = {}
    groups: dict[_Place, dict[str, Array]] = defaultdict(dict)
    for target in targets:
        place = places[target.name]
        if target.spec.kind == "key":
            place = _Place(device=place.device)
        if _is_multi_device(place) and place.sharding is not None:
            arrays[target.name] = _read_sharded(target, place.sharding, source)
        elif _is_large_weak(target, place):
            arrays[target.name] = _read_large_weak(target, place, source)
        else:
            shape, dtype = target.spec.payload_shape, _storage_dtype(target.spec)
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


def _restore_on_host(targets: Sequence[Target], source: LeafSource) -> dict[str, Any]:
    buffers = {
        target.name: np.empty(target.spec.payload_shape, _storage_dtype(target.spec))
        for target in targets
    }
    source.fill({name: as_bytes(buffer) for name, buffer in buffers.items()})
    return {
        target.name: _finish_numpy(buffers[target.name], target) for target in targets
    }


def _restore_values(targets: Sequence[Target], source: LeafSource) -> dict[str, Any]:
    values = dict(source.read([target.name for target in targets]))
    for target in targets:
        if target.spec.kind == "function":
            values[target.name] = target.like
        elif isinstance(target.like, enum.Enum):
            values[target.name] = find_member(type(target.like), values[target.name])
    return values


def restore_leaves(
    targets: Sequence[Target], source: LeafSource, skeleton: Iterable[Any]
) -> dict[str, Any]:
    """Read leaves and put each into its skeleton leaf's place.

    Args:
        targets: the leaves to restore.
        source: where their bytes and values come from.
        skeleton: all leaves of the skeleton, those not restored included.

    Returns:
        Name in the file to live leaf. No two share memory.

    Raises:
        DamagedCheckpointError: a leaf's bytes are not those written.
    """
    by_form: dict[str, list[Target]] = defaultdict(list)
    for target in targets:
        arrays = target.spec.kind in ARRAY_KINDS or target.spec.kind == "key"
        form = _host_kind(target) if arrays else "value"
        by_form["host" if form.startswith("numpy") else form].append(target)
    leaves = _restore_values(by_form["value"], source)
    leaves.update(_restore_on_host(by_form["host"], source))
    with _neutral_context():
        common = _common_place(skeleton)
        leaves.update(_restore_on_devices(by_form["jax"], source, common))
    return leaves
