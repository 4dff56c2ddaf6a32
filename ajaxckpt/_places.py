"""Where a restored leaf goes: the skeleton's device, sharding, memory kind.

Knows jax's placements; reads no bytes.
"""

# jax's own annotations are partial
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false
# pyright: reportUnknownLambdaType=false, reportPrivateImportUsage=false

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol, cast

import jax
import numpy as np
from jax.sharding import (
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
)

from ajaxckpt._dtypes import STORED_DTYPES
from ajaxckpt._layout import LeafSpec
from ajaxckpt._payload import Array, Part


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
class Place:
    """Where a device array goes: a sharding it is committed to, or just a device."""

    sharding: Sharding | None = None
    device: Any = None


def committed_sharding(like: Any) -> Sharding | None:
    """Return the sharding a skeleton leaf is committed to, or names; None if free."""
    if isinstance(like, jax.ShapeDtypeStruct):
        return like.sharding
    return like.sharding if isinstance(like, jax.Array) and like.committed else None


def find_indivisible(like: Any, shape: tuple[int, ...]) -> str | None:
    """Return why a leaf's sharding cannot cut a shape; None if it can."""
    sharding = committed_sharding(like)
    if sharding is None or len(sharding.device_set) == 1:
        return None
    try:
        sharding.shard_shape(shape)
    except ValueError:
        return f"{sharding} does not divide {list(shape)} evenly"
    return None


@cache
def can_hold(dtype: str) -> bool:
    """Tell whether this JAX has arrays of a dtype that numpy has."""
    row = STORED_DTYPES[dtype]
    if row.dtype is None:
        return False
    try:
        with jax.enable_x64(True), jax.transfer_guard("allow"):
            jax.block_until_ready(jax.device_put(np.zeros((), row.dtype)))
    except (TypeError, ValueError, RuntimeError):
        return False
    return True


def is_x64() -> bool:
    """Tell whether this JAX makes 64-bit arrays of Python numbers."""
    return bool(cast("Any", jax.config).jax_enable_x64)


def common_place(skeleton: Iterable[Any]) -> Place:
    """Return where a compiled step puts a result whose skeleton names no place.

    Beside committed arrays, what comes out of a compiled function is committed too:
    replicated over their mesh, or on their device.
    """
    found = {committed_sharding(like) for like in skeleton} - {None}
    meshes = {item.mesh for item in found if isinstance(item, NamedSharding)}
    if len(meshes) == 1 and all(isinstance(item, NamedSharding) for item in found):
        return Place(sharding=NamedSharding(meshes.pop(), PartitionSpec()))
    devices = {device for item in found if item for device in item.device_set}
    if len(devices) == 1:
        return Place(sharding=SingleDeviceSharding(devices.pop()))
    return Place()


def place_of(like: Any, common: Place) -> Place:
    """Return the place of a skeleton leaf, the common one where it names none."""
    if (sharding := committed_sharding(like)) is not None:
        return Place(sharding=sharding)
    if isinstance(like, jax.Array):
        return Place(device=next(iter(like.sharding.device_set)))
    return common


def is_multi_device(place: Place) -> bool:
    """Tell whether a leaf lies in several shards."""
    return place.sharding is not None and len(place.sharding.device_set) > 1


def on_device(place: Place) -> contextlib.AbstractContextManager[Any]:
    """Make a place's device the default, or leave the caller's default alone."""
    if place.device is None:
        return contextlib.nullcontext()
    return jax.default_device(place.device)
