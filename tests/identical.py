"""What *identical* means, spelled out once more for the tests.

Compares a restored state with the one that was saved and with the skeleton that was
filled, leaf by leaf, through jax and numpy alone: nothing of ajaxckpt is used, so a
mistake in its layouts, digests or placements cannot hide itself.
"""

import enum
import struct
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

_PYTHON_NUMBERS = (bool, int, float, complex)
# where an element fills part of its byte, the rest means nothing
_ELEMENT_BITS = {
    "int1": 1,
    "uint1": 1,
    "int2": 2,
    "uint2": 2,
    "int4": 4,
    "uint4": 4,
    "float4_e2m1fn": 4,
    "float6_e2m3fn": 6,
    "float6_e3m2fn": 6,
}


def array_bytes(array: Any) -> bytes:
    """Return an array's elements in C order, little-endian, unused high bits zero."""
    data = np.asarray(array)
    if data.dtype.byteorder == ">":
        data = data.byteswap().view(data.dtype.newbyteorder("<"))
    raw = np.frombuffer(data.tobytes(), np.uint8)
    bits = _ELEMENT_BITS.get(data.dtype.name)
    return (raw & ((1 << bits) - 1)).tobytes() if bits else raw.tobytes()


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) and jax.dtypes.issubdtype(
        leaf.dtype, jax.dtypes.prng_key
    )


def _is_number(leaf: Any) -> bool:
    return type(leaf) in _PYTHON_NUMBERS


def _form(leaf: Any) -> str:
    """Tell where a leaf lies: on a device, on the host, or in Python alone."""
    if isinstance(leaf, jax.Array):
        return "jax"
    if isinstance(leaf, np.ndarray):
        return "numpy"
    return "numpy scalar" if isinstance(leaf, np.generic) else "python"


def _expected_form(saved: Any, like: Any) -> str:
    form = _form(saved)
    if form == "python" or _is_key(saved):
        return form
    if isinstance(like, jax.ShapeDtypeStruct):
        return "jax" if like.sharding is not None else form
    if _is_number(like):
        return form
    if _form(like) == "numpy scalar" and np.shape(saved):
        return "numpy"
    return _form(like)


def _promised_sharding(like: Any) -> Any:
    """Return what a skeleton leaf commits to; None if it commits to nothing."""
    if isinstance(like, jax.ShapeDtypeStruct):
        return like.sharding
    return like.sharding if isinstance(like, jax.Array) and like.committed else None


def _common_sharding(skeleton: Any) -> Any:
    """Return where a compiled step commits what the skeleton gives no place.

    A result is committed as soon as one argument is: to the arguments' one device,
    or replicated over their one mesh. Mixed arguments tell nothing.
    """
    shardings = [_promised_sharding(leaf) for leaf in jax.tree.leaves(skeleton)]
    shardings = [sharding for sharding in shardings if sharding is not None]
    named = [item for item in shardings if isinstance(item, NamedSharding)]
    if named and len(named) == len(shardings):
        if all(item.mesh == named[0].mesh for item in named):
            return NamedSharding(named[0].mesh, PartitionSpec())
    devices = set().union(*(item.device_set for item in shardings))
    return SingleDeviceSharding(devices.pop()) if len(devices) == 1 else None


def _assert_same_sharding(name: str, leaf: jax.Array, promised: Any) -> None:
    if _is_key(leaf):
        # jax itself spells a key's P() as P(None)
        assert leaf.sharding.is_equivalent_to(promised, leaf.ndim), name
    else:
        assert leaf.sharding == promised, name
    assert leaf.sharding.device_set == promised.device_set, name
    assert leaf.sharding.memory_kind == promised.memory_kind, name


def _assert_same_placement(name: str, leaf: jax.Array, like: Any, common: Any) -> None:
    if isinstance(like, jax.Array):
        assert leaf.committed == like.committed, name
        _assert_same_sharding(name, leaf, like.sharding)
        return
    promised = _promised_sharding(like) or common
    assert leaf.committed == (promised is not None), name
    if promised is None:
        promised = jax.device_put(np.zeros(())).sharding
    _assert_same_sharding(name, leaf, promised)


def _assert_same_array(
    name: str, leaf: Any, saved: Any, like: Any, common: Any
) -> None:
    form = _form(leaf)
    assert form == _expected_form(saved, like), f"{name}: came back as {form}"
    assert leaf.shape == saved.shape, name
    if _is_key(saved):
        assert leaf.dtype == saved.dtype, name
        assert str(jax.random.key_impl(leaf)) == str(jax.random.key_impl(saved)), name
        leaf_data, saved_data = jax.random.key_data(leaf), jax.random.key_data(saved)
        assert array_bytes(leaf_data) == array_bytes(saved_data), name
    else:
        assert leaf.dtype.newbyteorder("=") == saved.dtype.newbyteorder("="), name
        assert array_bytes(leaf) == array_bytes(saved), name
    if form == "numpy":
        assert type(leaf) is np.ndarray, name
        assert leaf.flags.writeable and leaf.flags.aligned, name
        if isinstance(like, np.ndarray):
            assert leaf.dtype == like.dtype or leaf.dtype.isnative, name
            assert leaf.dtype.isnative == like.dtype.isnative, name
    if form == "numpy scalar":
        assert type(leaf) is saved.dtype.type, name
    if form == "jax":
        weak = getattr(leaf, "weak_type", False)
        assert weak == getattr(saved, "weak_type", False), name
        _assert_same_placement(name, leaf, like, common)


def _float_bits(value: float) -> bytes:
    return struct.pack("<d", value)


def _assert_same_leaf(name: str, leaf: Any, saved: Any, like: Any, common: Any) -> None:
    if isinstance(saved, jax.Array | np.ndarray | np.generic):
        _assert_same_array(name, leaf, saved, like, common)
    elif isinstance(saved, enum.Enum):
        assert type(leaf) is type(like), name
        assert leaf is type(like)(saved.value), name
    elif callable(saved):
        assert leaf is like, name
    else:
        assert type(leaf) is type(saved), f"{name}: came back as {type(leaf)}"
        if isinstance(saved, float):
            assert _float_bits(leaf) == _float_bits(saved), name
        elif isinstance(saved, complex):
            for part in ("real", "imag"):
                bits = _float_bits(getattr(leaf, part))
                assert bits == _float_bits(getattr(saved, part)), name
        else:
            assert leaf == saved, name


def paths_and_leaves(tree: Any) -> list[tuple[str, Any]]:
    """Return every leaf with its key path, spelled by jax."""
    pairs = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [("".join(map(repr, path)), leaf) for path, leaf in pairs]


def assert_identical(restored: Any, saved: Any, skeleton: Any) -> None:
    """Assert that a restored state is the saved one in the skeleton's place.

    Args:
        restored: what came back.
        saved: the state that was handed over, still alive.
        skeleton: what was filled: its node classes, static fields, functions and
            placement are the ones to find again.
    """
    assert jax.tree.structure(restored) == jax.tree.structure(skeleton)
    got, want = paths_and_leaves(restored), paths_and_leaves(saved)
    like = paths_and_leaves(skeleton)
    assert [path for path, _ in got] == [path for path, _ in want]
    common = _common_sharding(skeleton)
    for (name, leaf), (_, old), (_, place) in zip(got, want, like, strict=True):
        _assert_same_leaf(name, leaf, old, place, common)


def assert_same_bits(left: Any, right: Any) -> None:
    """Assert that two live states agree in every name, type, dtype, shape and bit."""
    assert_identical(left, right, left)
