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
from collections import defaultdict
from collections.abc import Generator, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh

from ajaxckpt._device_arrays import restore_on_devices
from ajaxckpt._layout import ARRAY_KINDS, LeafSpec, storage_dtype
from ajaxckpt._leaves import find_member
from ajaxckpt._payload import Array, as_bytes
from ajaxckpt._places import LeafSource, Target, common_place


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


def array_form(like: Any, spec: LeafSpec) -> str:
    """Return as what an array comes back: jax, numpy or numpy scalar."""
    if isinstance(like, np.generic):
        return "numpy" if spec.shape else "numpy scalar"
    if isinstance(like, np.ndarray):
        return "numpy"
    unplaced = isinstance(like, jax.ShapeDtypeStruct) and like.sharding is None
    if isinstance(like, jax.Array) or not (unplaced or _is_python(like)):
        return "jax"
    return "jax" if spec.kind == "key" else spec.kind


def _is_python(like: Any) -> bool:
    return not hasattr(like, "dtype")


def _finish_numpy(buffer: Array, target: Target) -> Any:
    """Give a filled host array the skeleton's byte order and type."""
    order = getattr(getattr(target.like, "dtype", None), "byteorder", "=")
    if order == ">":
        buffer = buffer.byteswap(inplace=True).view(buffer.dtype.newbyteorder(">"))
    form = array_form(target.like, target.spec)
    return buffer[()] if form == "numpy scalar" else buffer


def _restore_on_host(targets: Sequence[Target], source: LeafSource) -> dict[str, Any]:
    buffers = {
        target.name: np.empty(
            target.spec.payload_shape, storage_dtype(target.name, target.spec)
        )
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
        form = array_form(target.like, target.spec) if arrays else "value"
        by_form["host" if form.startswith("numpy") else form].append(target)
    leaves = _restore_values(by_form["value"], source)
    leaves.update(_restore_on_host(by_form["host"], source))
    with _neutral_context():
        common = common_place(skeleton)
        leaves.update(restore_on_devices(by_form["jax"], source, common))
    return leaves
