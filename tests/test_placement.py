"""Each leaf comes back in its skeleton leaf's place, whatever place it was saved in."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compile_events import Costs, count_compiles, run_steps
from identical import array_bytes, assert_identical
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from ajaxckpt import (
    DamagedCheckpointError,
    LayoutMismatchError,
    open_checkpoint,
    plan_restore,
    restore_into,
    save_checkpoint,
    state_digest,
)

Place = Callable[[np.ndarray], Any]


def _mesh(*axes: int, reverse: bool = False, start: int = 0) -> Mesh:
    count = int(np.prod(axes))
    devices = jax.devices()[start : start + count]
    devices = devices[::-1] if reverse else devices
    names = ("x", "y", "z")[: len(axes)]
    shape = np.array(devices).reshape(axes)
    return Mesh(shape, names, axis_types=(AxisType.Auto,) * len(axes))


def _on(sharding: Callable[[], Any]) -> Place:
    return lambda data: jax.device_put(data, sharding())


def _named(mesh: Callable[[], Mesh], *spec: Any) -> Place:
    return _on(lambda: NamedSharding(mesh(), P(*spec)))


def _uncommitted_on_3(data: np.ndarray) -> jax.Array:
    with jax.default_device(jax.devices()[3]):
        return jax.device_put(data)


# where an array of shape (8, 16) can lie
PLACES: dict[str, Place] = {
    "numpy": lambda data: data.copy(),
    "numpy, Fortran order": np.asfortranarray,
    "uncommitted": jax.device_put,
    "uncommitted on device 3": _uncommitted_on_3,
    "committed to device 1": _on(lambda: SingleDeviceSharding(jax.devices()[1])),
    "rows over 8": _named(lambda: _mesh(8), "x"),
    "rows over 8, reversed": _named(lambda: _mesh(8, reverse=True), "x", None),
    "columns over 8": _named(lambda: _mesh(8), None, "x"),
    "rows over 4": _named(lambda: _mesh(4), "x"),
    "columns over the last 4": _named(lambda: _mesh(4, start=4), None, "x"),
    "rows over 2": _named(lambda: _mesh(2), "x"),
    "a mesh of 1": _named(lambda: _mesh(1, start=6), "x"),
    "tiles over 2x4": _named(lambda: _mesh(2, 4), "x", "y"),
    "tiles over 4x2, transposed": _named(lambda: _mesh(4, 2), "y", "x"),
    "partly replicated, rows": _named(lambda: _mesh(2, 4), "x", None),
    "partly replicated, columns": _named(lambda: _mesh(2, 4), None, "y"),
    "rows over both axes": _named(lambda: _mesh(2, 4), ("x", "y")),
    "rows over both axes, swapped": _named(lambda: _mesh(2, 4), ("y", "x")),
    "a mesh of three axes": _named(lambda: _mesh(2, 2, 2), ("x", "z"), "y"),
    "replicated over 8": _named(lambda: _mesh(8)),
    "host memory": _on(
        lambda: SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    ),
    "unpinned host memory": _on(
        lambda: SingleDeviceSharding(jax.devices()[2], memory_kind="unpinned_host")
    ),
    "host memory over 8": _on(
        lambda: NamedSharding(_mesh(8), P("x"), memory_kind="pinned_host")
    ),
}


# dtypes that not every byte is a value of: how many values they have
SMALL = {"bool": 2, "int2": 4, "int4": 16, "uint4": 16, "float4_e2m1fn": 16}


def _data(dtype: Any = np.float32, shape: tuple[int, ...] = (8, 16)) -> np.ndarray:
    count = int(np.prod(shape))
    nbytes = count * np.dtype(dtype).itemsize
    raw = np.frombuffer(np.random.default_rng(7).bytes(nbytes), np.uint8)
    if limit := SMALL.get(np.dtype(dtype).name):
        return (raw % limit).view(np.int8).astype(dtype).reshape(shape)
    return raw.view(dtype).reshape(shape)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "a.safetensors"
    save_checkpoint({"w": jax.device_put(_data()), "n": 1}, path)
    return path


@pytest.mark.parametrize("name", PLACES)
def test_restores_into_the_skeletons_place(name: str, saved: Path) -> None:
    skeleton = {"w": PLACES[name](np.zeros((8, 16), np.float32)), "n": 0}
    restored = restore_into(skeleton, saved)
    source = _data()
    assert_identical(restored, {"w": PLACES[name](source), "n": 1}, skeleton)
    if isinstance(restored["w"], jax.Array):
        for shard in restored["w"].addressable_shards:
            assert array_bytes(shard.data) == source[shard.index].tobytes()


@pytest.mark.parametrize("name", PLACES)
def test_the_payload_does_not_know_where_the_leaf_lay(
    name: str, saved: Path, tmp_path: Path
) -> None:
    state = {"w": PLACES[name](_data()), "n": 1}
    record = save_checkpoint(state, tmp_path / "a.safetensors")
    assert record.digest == state_digest(state)
    with open_checkpoint(saved) as one, open_checkpoint(record.path) as other:
        assert one.digest == other.digest
        assert one.leaf_digest("w") == other.leaf_digest("w")
        assert other["w"].tobytes() == _data().tobytes()
    if isinstance(state["w"], jax.Array):
        # a copy of the whole on the host would stay cached in the array
        assert len(state["w"].sharding.device_set) == 1 or state["w"]._npy_value is None


@pytest.mark.parametrize("target", PLACES)
@pytest.mark.parametrize(
    "source", ["rows over 8", "columns over 8", "partly replicated, rows", "numpy"]
)
def test_from_any_place_to_any_other(source: str, target: str, tmp_path: Path) -> None:
    save_checkpoint({"w": PLACES[source](_data())}, tmp_path / "a.safetensors")
    skeleton = {"w": PLACES[target](np.zeros((8, 16), np.float32))}
    restored = restore_into(skeleton, tmp_path / "a.safetensors")
    assert_identical(restored, {"w": PLACES[target](_data())}, skeleton)


@pytest.mark.parametrize(
    "name", [n for n in PLACES if not n.startswith(("numpy", "uncommitted"))]
)
def test_an_abstract_skeleton_names_the_place_by_its_sharding(
    name: str, saved: Path
) -> None:
    like = PLACES[name](_data())
    struct = jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=like.sharding)
    restored = restore_into({"w": struct, "n": 0}, saved)
    assert restored["w"].sharding == like.sharding
    assert restored["w"].sharding.memory_kind == like.sharding.memory_kind
    assert restored["w"].committed
    assert_identical(restored["w"], like, like)


def test_one_leaf_numpy_one_uncommitted_one_committed(tmp_path: Path) -> None:
    def init(number: int) -> dict[str, Any]:
        data = np.arange(6, dtype=np.float32) * number
        return {
            "numpy": data,
            "free": jnp.asarray(data) + 0,
            "second": jax.device_put(data, jax.devices()[1]),
        }

    train = jax.jit(lambda leaf: leaf * 2)
    state = init(1)
    # the three meet their step before the interruption and after it
    for leaf in state.values():
        train(leaf)
    save_checkpoint(state, tmp_path / "a.safetensors")
    restored = restore_into(init(0), tmp_path / "a.safetensors")
    assert_identical(restored, state, init(0))
    assert type(restored["numpy"]) is np.ndarray
    assert not restored["free"].committed
    assert restored["free"].device == jax.devices()[0]
    assert restored["second"].committed
    assert restored["second"].device == jax.devices()[1]
    for leaf in restored.values():
        _, costs = run_steps(train, leaf, 1)
        assert costs == Costs(compiles=0, traces=0, entries=0)


DTYPES = (
    "bool",
    "int8",
    "uint16",
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "int4",
    "uint4",
    "int2",
    "float4_e2m1fn",
    "complex64",
    "complex128",
    "float64",
    "int64",
)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["rows over 8", "tiles over 2x4", "columns over 8"])
def test_every_width_is_sharded_bit_for_bit(
    name: str, dtype: str, tmp_path: Path
) -> None:
    data = _data(jnp.dtype(dtype))
    with jax.enable_x64(True):
        state = {"w": PLACES[name](data)}
        skeleton = {"w": PLACES[name](np.zeros_like(data))}
    assert state["w"].dtype == data.dtype
    save_checkpoint(state, tmp_path / "a.safetensors")
    # 64-bit leaves too, though this thread is back at 32 bits
    restored = restore_into(skeleton, tmp_path / "a.safetensors")
    assert_identical(restored, state, skeleton)
    with open_checkpoint(tmp_path / "a.safetensors") as file:
        assert array_bytes(file["w"]) == array_bytes(data)


@pytest.mark.parametrize("shape", [(0, 16), (8, 0), (0,), (0, 0, 8)])
def test_leaves_without_elements_keep_their_sharding(
    shape: tuple[int, ...], tmp_path: Path
) -> None:
    place = NamedSharding(_mesh(8), P("x") if len(shape) < 3 else P(None, None, "x"))
    state = {"w": jax.device_put(np.zeros(shape, np.int16), place)}
    save_checkpoint(state, tmp_path / "a.safetensors")
    restored = restore_into(state, tmp_path / "a.safetensors")
    assert_identical(restored, state, state)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
@pytest.mark.parametrize(
    "sharding",
    [
        lambda: NamedSharding(_mesh(8), P("x")),
        lambda: NamedSharding(_mesh(2, 4), P("y")),
        lambda: NamedSharding(_mesh(8), P()),
        lambda: SingleDeviceSharding(jax.devices()[2]),
    ],
    ids=["sharded", "partly replicated", "replicated", "committed"],
)
def test_typed_keys_lie_where_the_skeletons_lie(
    impl: str, sharding: Callable[[], Any], tmp_path: Path
) -> None:
    def keys(seed: int) -> jax.Array:
        return jax.random.split(jax.random.key(seed, impl=impl), 8)

    state = {"keys": jax.device_put(keys(1), sharding())}
    skeleton = {"keys": jax.device_put(keys(2), sharding())}
    record = save_checkpoint(state, tmp_path / "a.safetensors")
    assert record.digest == state_digest({"keys": keys(1)})
    restored = restore_into(skeleton, tmp_path / "a.safetensors")
    assert_identical(restored, state, skeleton)
    elsewhere = restore_into({"keys": keys(2)}, tmp_path / "a.safetensors")
    assert_identical(elsewhere, {"keys": keys(1)}, {"keys": keys(2)})


@pytest.mark.parametrize("name", ["rows over 8", "replicated over 8"])
def test_weak_types_with_a_shape_are_sharded_too(name: str, tmp_path: Path) -> None:
    def build(value: float) -> jax.Array:
        like = PLACES[name](np.zeros((8, 16), np.float32))
        weak = jnp.broadcast_to(jnp.asarray(value), (8, 16))
        return jax.device_put(weak, like.sharding)

    state, skeleton = {"w": build(1.5)}, {"w": build(0.0)}
    assert state["w"].weak_type
    save_checkpoint(state, tmp_path / "a.safetensors")
    assert_identical(
        restore_into(skeleton, tmp_path / "a.safetensors"), state, skeleton
    )


def _weak(data: np.ndarray, device: jax.Device) -> jax.Array:
    """Build a weak array of any bits, uncommitted: no other way keeps NaN payloads."""
    struct = jax.ShapeDtypeStruct(data.shape, data.dtype, weak_type=True)
    with jax.default_device(device):
        return jax.jit(lambda x: x).lower(struct).compile()(jax.device_put(data))


@pytest.mark.parametrize(
    "dtype",
    ["float32", "float16", "bfloat16", "float8_e5m2", "int32", "bool", "complex64"],
)
@pytest.mark.parametrize("number", [0, 1])
def test_large_weak_leaves_come_back_bit_for_bit(
    number: int, dtype: str, tmp_path: Path
) -> None:
    device = jax.devices()[number]
    rows = 20_000_003 // jnp.dtype(dtype).itemsize // 7  # no multiple of any chunk
    data = _data(jnp.dtype(dtype), (rows, 7))
    state = {"w": _weak(data, device), "after": np.arange(3)}
    assert state["w"].weak_type
    if number:
        state["w"] = jax.device_put(state["w"], device)
    save_checkpoint(state, tmp_path / "a.safetensors")
    with jax.debug_nans(True), jax.numpy_dtype_promotion("strict"):
        restored = restore_into(state, tmp_path / "a.safetensors")
        with count_compiles() as count:
            again = restore_into(state, tmp_path / "a.safetensors")
    assert count.compiles == 0
    assert_identical(restored, state, state)
    jax.block_until_ready(jax.jit(lambda x: ~x if dtype == "bool" else -x)(again["w"]))
    again["w"].delete()
    assert array_bytes(restored["w"]) == array_bytes(data)


def test_a_damaged_large_weak_leaf_is_not_handed_out(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    state = {"w": jnp.full((5_000_000,), 0.5)}
    assert state["w"].weak_type
    save_checkpoint(state, path)
    with path.open("r+b") as file:
        file.seek(-7, os.SEEK_END)
        file.write(b"!")
    with pytest.raises(DamagedCheckpointError, match="w: bytes"):
        restore_into(state, path)


def test_a_layout_that_is_not_row_major_is_saved_by_its_values(tmp_path: Path) -> None:
    from jax.experimental.layout import Format, Layout

    data = np.arange(12.0, dtype=np.float32).reshape(3, 4)
    columns = Format(Layout((1, 0)), SingleDeviceSharding(jax.devices()[0]))
    turned = jax.jit(lambda x: x + 0, out_shardings=columns)(data)
    assert np.asarray(turned).strides == (4, 12)
    record = save_checkpoint({"w": turned}, tmp_path / "a.safetensors")
    assert record.digest == state_digest({"w": data})
    restored = restore_into({"w": turned}, tmp_path / "a.safetensors")
    assert np.array_equal(restored["w"], data)
    assert restored["w"].sharding == turned.sharding


def test_a_shape_that_the_mesh_does_not_divide_is_refused_by_name(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.safetensors"
    save_checkpoint({"w": np.zeros((6, 2), np.float32), "n": 1}, path)
    rows = NamedSharding(_mesh(8), P("x"))
    skeleton = {"w": jax.device_put(np.zeros((8, 2), np.float32), rows), "n": 0}
    with pytest.raises(LayoutMismatchError) as caught:
        restore_into(skeleton, path, resize="w")
    assert "w: expected float32[8,2], found numpy float32[6,2]" in str(caught.value)
    assert [item.name for item in caught.value.mismatches] == ["w"]
    plan = plan_restore(skeleton, path, resize="w")
    assert [item.problem for item in plan.mismatches] == ["shape"]


def test_a_leaf_may_grow_on_its_mesh(tmp_path: Path) -> None:
    place = PLACES["rows over 8"]
    state = {"w": place(_data(shape=(16, 4)))}
    save_checkpoint(state, tmp_path / "a.safetensors")
    skeleton = {"w": place(np.zeros((8, 4), np.float32))}
    restored = restore_into(skeleton, tmp_path / "a.safetensors", resize="w")
    assert_identical(restored, state, state)


# memory ------------------------------------------------------------------------


def _pointers(state: Any) -> list[int]:
    leaves = [leaf for leaf in jax.tree.leaves(state) if hasattr(leaf, "dtype")]
    return [
        shard.data.unsafe_buffer_pointer()
        if isinstance(leaf, jax.Array)
        else leaf.__array_interface__["data"][0]
        for leaf in leaves
        for shard in (leaf.addressable_shards if isinstance(leaf, jax.Array) else [0])
    ]


def test_restored_leaves_share_no_memory(tmp_path: Path) -> None:
    data = np.arange(4096.0, dtype=np.float32)
    both = jax.device_put(data)
    state = {
        "params": both,
        "target": both,  # one array at two places comes back as two
        "replicated": PLACES["replicated over 8"](_data()),
        "partly": PLACES["partly replicated, rows"](_data()),
        "numpy": data,
        "numpy too": data,
    }
    save_checkpoint(state, tmp_path / "a.safetensors")
    restored = restore_into(state, tmp_path / "a.safetensors")
    again = restore_into(state, tmp_path / "a.safetensors")
    pointers = [*_pointers(restored), *_pointers(again)]
    assert len(pointers) == 2 * (2 + 8 + 8 + 2)
    assert len(set(pointers)) == len(pointers)
    assert set(pointers).isdisjoint(_pointers(state))
    assert_identical(restored, state, state)


def test_restored_leaves_can_be_donated(tmp_path: Path) -> None:
    both = jnp.arange(4096.0)
    state = {
        "params": both,
        "target": both,
        "replicated": PLACES["replicated over 8"](_data()),
        "rows": PLACES["rows over 8"](_data()),
    }
    save_checkpoint(state, tmp_path / "a.safetensors")
    for name in ("params", "replicated", "rows"):
        restored = restore_into(state, tmp_path / "a.safetensors")
        other = restore_into(state, tmp_path / "a.safetensors")
        overwrite = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)
        jax.block_until_ready(overwrite(restored[name]))
        assert restored[name].is_deleted()
        rest = {key: leaf for key, leaf in restored.items() if key != name}
        assert_identical(rest, {key: state[key] for key in rest}, rest)
        assert_identical(other, state, state)
    # the file gave bytes, not a mapping that a donated step writes into
    assert_identical(restore_into(state, tmp_path / "a.safetensors"), state, state)


def test_restored_numpy_leaves_can_be_written(tmp_path: Path) -> None:
    state = {"a": np.arange(5), "b": np.arange(5)}
    save_checkpoint(state, tmp_path / "a.safetensors")
    restored = restore_into(state, tmp_path / "a.safetensors")
    restored["a"][:] = -1
    assert restored["b"].tolist() == state["a"].tolist() == [0, 1, 2, 3, 4]
    again = restore_into(state, tmp_path / "a.safetensors")
    assert again["a"].tolist() == [0, 1, 2, 3, 4]


def test_a_donated_skeleton_still_says_where_its_leaves_lay(tmp_path: Path) -> None:
    state = {"w": PLACES["rows over 8"](_data()), "n": jnp.asarray(3)}
    skeleton = {"w": state["w"] * 0, "n": jnp.asarray(0)}
    save_checkpoint(state, tmp_path / "a.safetensors")
    for leaf in skeleton.values():
        leaf.delete()
    restored = restore_into(skeleton, tmp_path / "a.safetensors")
    assert_identical(restored, state, state)


def test_restoring_leaves_the_skeleton_as_it_was(tmp_path: Path) -> None:
    skeleton = {name: place(_data()) for name, place in PLACES.items()}
    state = {name: place(_data() * 0) for name, place in PLACES.items()}
    before = {name: array_bytes(leaf) for name, leaf in skeleton.items()}
    save_checkpoint(state, tmp_path / "a.safetensors")
    restored = restore_into(skeleton, tmp_path / "a.safetensors")
    assert_identical(restored, state, skeleton)
    assert {name: array_bytes(leaf) for name, leaf in skeleton.items()} == before


def test_saving_a_sharded_leaf_leaves_no_copy_of_it_on_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wholes: list[tuple[int, ...]] = []
    asarray = np.asarray

    def spy(value: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(value, jax.Array) and len(value.sharding.device_set) > 1:
            wholes.append(value.shape)
        return asarray(value, *args, **kwargs)

    state = {
        "w": PLACES["rows over 8"](_data()),
        "r": PLACES["replicated over 8"](_data()),
    }
    monkeypatch.setattr(np, "asarray", spy)
    save_checkpoint(state, tmp_path / "a.safetensors")
    state_digest(state)
    assert wholes == []
    assert state["w"]._npy_value is None
    assert state["r"]._npy_value is None
    np.asarray(state["w"])
    assert wholes == [(8, 16)]  # the spy sees what it is there to see
    assert state["w"]._npy_value is not None
