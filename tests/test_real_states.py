"""Real training states come back identical, and trained on they stay identical."""

import dataclasses
import functools
import os
import subprocess
import sys
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any

import chex
import equinox as eqx
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import real_states
from flax.core import FrozenDict
from flax.training.train_state import TrainState
from identical import array_bytes, assert_identical, assert_same_bits, paths_and_leaves
from real_states import REAL_STATES, RealState, file_name, train
from strategies import KeyedNode, KeylessNode

from ajaxckpt import (
    LayoutMismatchError,
    UnsupportedLeafError,
    plan_restore,
    restore_into,
    save_checkpoint,
)


@functools.cache
def real_state(name: str) -> RealState:
    """Return a real state whose compiled step all tests share."""
    return REAL_STATES[name]()


def changed_paths(left: Any, right: Any) -> set[str]:
    """Return the paths of the arrays that differ, to see that training moves."""
    both = zip(paths_and_leaves(left), paths_and_leaves(right), strict=True)
    return {path for (path, a), (_, b) in both if is_changed(a, b)}


def is_changed(left: Any, right: Any) -> bool:
    if callable(left) or isinstance(left, str):
        return left is not right
    if isinstance(left, jax.Array) and jnp.issubdtype(left.dtype, jax.dtypes.prng_key):
        left, right = jax.random.key_data(left), jax.random.key_data(right)
    return array_bytes(left) != array_bytes(right)


@pytest.mark.parametrize("name", REAL_STATES)
def test_split_run_of_a_real_state_is_the_whole_run(name: str, tmp_path: Path) -> None:
    path, real = tmp_path / "state.safetensors", real_state(name)
    state = train(real, real.build(), 3)
    assert changed_paths(state, real.build())
    # built anew by other objects: functions and classes of its own
    skeleton = REAL_STATES[name]().build()
    save_checkpoint(state, path)
    plan = plan_restore(skeleton, path)
    assert not plan.mismatches
    # a scheduled rate is another one by now, which is worth a note
    assert all(".hyperparams." in note for note in plan.notes)
    restored = plan.apply()
    assert_identical(restored, state, skeleton)
    whole, split = train(real, state, 2), train(real, restored, 2)
    assert changed_paths(whole, state)
    assert_identical(split, whole, split)


def test_split_runs_continue_in_a_fresh_process(tmp_path: Path) -> None:
    names = (
        *("flax TrainState", "host counters", "keys rbg"),
        *("optax multi_transform", "two seeds"),
    )
    whole = {}
    for name in names:
        real = real_state(name)
        state = train(real, real.build(), 3)
        save_checkpoint(state, tmp_path / file_name(name))
        whole[name] = train(real, state, 2)
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, real_states.__file__, "restore", str(tmp_path)]
    subprocess.run(command, check=True, env=environment, timeout=300)
    for name in names:
        skeleton = REAL_STATES[name]().build()
        after = restore_into(skeleton, tmp_path / "after" / file_name(name))
        assert_identical(after, whole[name], skeleton)


@pytest.mark.parametrize("name", ["optax adam", "nnx State", "two seeds", "keys rbg"])
def test_abstract_skeleton_gives_the_concrete_state(name: str, tmp_path: Path) -> None:
    path, real = tmp_path / "state.safetensors", real_state(name)
    state = train(real, real.build(), 2)
    skeleton = jax.eval_shape(real.build)
    save_checkpoint(state, path)
    restored = restore_into(skeleton, path)
    assert_identical(restored, state, skeleton)
    assert_same_bits(train(real, restored, 1), train(real, state, 1))


def test_abstract_state_cannot_be_saved(tmp_path: Path) -> None:
    abstract = jax.eval_shape(REAL_STATES["optax adam"]().build)
    with pytest.raises(UnsupportedLeafError, match=r"opt\.0\.count: an abstract leaf"):
        save_checkpoint(abstract, tmp_path / "run" / "state.safetensors")
    assert list(tmp_path.iterdir()) == []


# --- node classes are the skeleton's ------------------------------------------------


def round_trip(state: Any, skeleton: Any, folder: Path) -> Any:
    path = folder / "state.safetensors"
    save_checkpoint(state, path)
    return restore_into(skeleton, path)


def test_optimiser_nodes_keep_their_named_tuple_classes(tmp_path: Path) -> None:
    tx, params = optax.adam(0.1), {"w": jnp.ones(3)}
    grads = {"w": jnp.full(3, 0.5)}
    _, state = tx.update(grads, tx.init(params), params)
    skeleton = tx.init(params)
    restored = round_trip(state, skeleton, tmp_path)
    assert jax.tree.structure(restored) == jax.tree.structure(skeleton)
    assert type(restored[0]) is type(skeleton[0]) is optax.ScaleByAdamState
    assert type(restored[1]) is type(skeleton[1])
    assert restored[0].mu["w"].tolist() == state[0].mu["w"].tolist()
    assert restored[0].nu["w"].tolist() == state[0].nu["w"].tolist()
    assert int(restored[0].count) == 1
    tx.update(grads, restored, params)


def test_named_tuples_of_equal_fields_are_not_confused(tmp_path: Path) -> None:
    # what is saved as one class goes into another of the same names
    state = optax.TraceState(trace=jnp.ones(3))
    restored = round_trip(state, {"trace": jnp.zeros(3)}, tmp_path)
    assert type(restored) is dict
    assert_same_bits(restored, {"trace": jnp.ones(3)})


def test_tuples_and_lists_are_the_skeletons(tmp_path: Path) -> None:
    a, b = jnp.ones(2), jnp.arange(3)
    zeros = (jnp.zeros(2), jnp.zeros(3, jnp.int32))
    as_tuple = round_trip((a, b), zeros, tmp_path)
    assert type(as_tuple) is tuple
    picked = jax.jit(
        lambda first, s: jax.lax.cond(first, lambda x: x, lambda x: zeros, s)
    )(True, as_tuple)
    assert_same_bits(tuple(picked), (a, b))
    as_list = round_trip((a, b), list(zeros), tmp_path)
    assert type(as_list) is list
    assert_same_bits(as_list, [a, b])


def test_int_and_str_keys_are_different_keys(tmp_path: Path) -> None:
    def build(x: float) -> Any:
        return {
            "i": {0: x, -3: x + 1, 7: {1: x + 2}},
            "mixed": OrderedDict([(0, x + 3), ("0", x + 4), ("-3", x + 5), (-3, x)]),
            "s": {"0": x + 6, "-3": x + 7},
        }

    restored = round_trip(build(1.5), build(0.0), tmp_path)
    assert_identical(restored, build(1.5), build(0.0))
    assert restored == build(1.5)
    assert [type(key) for key in restored["mixed"]] == [int, str, str, int]
    with pytest.raises(LayoutMismatchError) as raised:
        round_trip({"d": {0: 1.5}}, {"d": {"0": 0.0}}, tmp_path)
    found = {(item.name, item.problem) for item in raised.value.mismatches}
    assert found == {('d."0"', "missing"), ("d.0", "extra")}


def test_empty_containers_keep_type_and_place_without_a_warning(tmp_path: Path) -> None:
    def build(x: int) -> Any:
        return {
            "a": {},
            "b": (),
            "c": [],
            "d": optax.EmptyState(),
            "e": {"f": {}, "x": x},
            "g": optax.MaskedNode(),
            "n": None,
        }

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        restored = round_trip(build(1), build(0), tmp_path)
        empty = {"a": {}, "n": None}
        (tmp_path / "empty").mkdir()
        nothing = round_trip(empty, empty, tmp_path / "empty")
    assert restored == build(1)
    assert_identical(restored, build(1), build(0))
    assert type(restored["d"]) is optax.EmptyState
    assert nothing == {"a": {}, "n": None}


def test_masked_and_partitioned_states_keep_masked_nodes(tmp_path: Path) -> None:
    for name in ("optax masked", "optax multi_transform"):
        real = real_state(name)
        state = train(real, real.build(), 2)
        restored = round_trip(state, real.build(), tmp_path)
        is_masked = functools.partial(lambda x: isinstance(x, optax.MaskedNode))
        nodes = jax.tree.leaves(restored, is_leaf=is_masked)
        assert sum(map(is_masked, nodes)) == 2
        assert_identical(restored, state, real.build())


def test_str_leaves_of_a_config_dataclass(tmp_path: Path) -> None:
    @flax.struct.dataclass
    class Config:
        env: Any = ""
        rate: Any = 0.0

    restored = round_trip(Config("CartPole-v1", 0.5), Config(), tmp_path)
    assert restored == Config("CartPole-v1", 0.5)


@flax.struct.dataclass
class FlaxRoot:
    w: Any
    size: int = flax.struct.field(pytree_node=False, default=0)


class EqxRoot(eqx.Module):
    w: Any
    size: int = eqx.field(static=True)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["w"], meta_fields=["size"]
)
@dataclasses.dataclass
class PlainRoot:
    w: Any
    size: int


@chex.dataclass
class ChexRoot:
    w: Any


@pytest.mark.parametrize("kind", [FlaxRoot, EqxRoot, PlainRoot])
def test_dataclass_as_root_keeps_the_skeletons_static_fields(
    kind: Any, tmp_path: Path
) -> None:
    skeleton = kind(w={"k": jnp.zeros(3)}, size=5)
    state = kind(w={"k": jnp.arange(3.0)}, size=4)
    restored = round_trip(state, skeleton, tmp_path)
    assert type(restored) is kind
    assert restored.size == 5
    assert_identical(restored, state, skeleton)


@pytest.mark.parametrize("kind", [KeylessNode, KeyedNode])
def test_hand_registered_class_as_root(kind: Any, tmp_path: Path) -> None:
    skeleton = kind([jnp.zeros(3), 0], "skeleton")
    state = kind([jnp.arange(3.0), 1], "saved")
    restored = round_trip(state, skeleton, tmp_path)
    assert type(restored) is kind and restored.static == "skeleton"
    assert_identical(restored, state, skeleton)


def test_chex_dataclass_and_frozen_dict_as_root(tmp_path: Path) -> None:
    for kind in (lambda x: ChexRoot(w=x), lambda x: FrozenDict({"w": x})):
        state, skeleton = kind(jnp.arange(3.0)), kind(jnp.zeros(3))
        restored = round_trip(state, skeleton, tmp_path)
        assert type(restored) is type(skeleton)
        assert_identical(restored, state, skeleton)


def test_kinds_of_nodes_do_not_enter_the_names(tmp_path: Path) -> None:
    """Turning a dict into a dataclass is no migration."""
    w = {"k": jnp.arange(3.0)}
    zero = {"k": jnp.zeros(3)}
    nodes = [
        lambda x: {"w": x},
        lambda x: OrderedDict(w=x),
        lambda x: FrozenDict({"w": x}),
        lambda x: FlaxRoot(w=x),
        lambda x: ChexRoot(w=x),
        lambda x: PlainRoot(w=x, size=1),
        lambda x: EqxRoot(w=x, size=1),
    ]
    for saved in nodes:
        for wanted in nodes:
            restored = round_trip(saved(w), wanted(zero), tmp_path)
            assert_identical(restored, wanted(w), wanted(zero))


def test_leaf_made_static_shows_as_an_extra_leaf(tmp_path: Path) -> None:
    class WithLeaf(eqx.Module):
        w: Any
        tau: Any

    class WithStatic(eqx.Module):
        w: Any
        tau: float = eqx.field(static=True)

    path = tmp_path / "state.safetensors"
    save_checkpoint({"agent": WithLeaf(jnp.ones(3), 0.1)}, path)
    skeleton = {"agent": WithStatic(jnp.zeros(3), 0.2)}
    with pytest.raises(LayoutMismatchError) as raised:
        restore_into(skeleton, path)
    (mismatch,) = raised.value.mismatches
    assert (mismatch.name, mismatch.problem) == ("agent.tau", "extra")
    restored = restore_into(skeleton, path, ignore="agent.tau")["agent"]
    assert restored.w.tolist() == [1, 1, 1] and restored.tau == 0.2


def test_train_state_restores_a_weak_step_into_an_int(tmp_path: Path) -> None:
    real = real_state("flax TrainState")
    skeleton = real.build()
    assert type(skeleton.step) is int
    state = train(real, real.build(), 2)
    assert state.step.weak_type
    restored = round_trip(state, skeleton, tmp_path)
    assert isinstance(restored, TrainState)
    assert restored.step.weak_type and int(restored.step) == 2
    assert restored.apply_fn == skeleton.apply_fn and restored.tx is skeleton.tx


def test_untrained_train_state_goes_into_a_trained_one(tmp_path: Path) -> None:
    real = real_state("flax TrainState")
    trained = train(real, real.build(), 2)
    restored = round_trip(real.build(), trained, tmp_path)
    assert type(restored.step) is int and restored.step == 0
    assert_identical(restored, real.build(), trained)


def test_fresh_statistics_take_the_trained_dtypes(tmp_path: Path) -> None:
    real = real_state("chex statistics")
    skeleton, state = real.build(), train(real, real.build(), 3)
    assert skeleton.mean.dtype == skeleton.var.dtype == np.int32
    restored = round_trip(state, skeleton, tmp_path)
    assert restored.mean.dtype == restored.var.dtype == np.float32
    assert_identical(restored, state, skeleton)


def test_functions_of_an_equinox_module_are_the_skeletons(tmp_path: Path) -> None:
    def build(activation: Any) -> Any:
        return eqx.nn.MLP(2, 1, 4, 1, activation=activation, key=jax.random.key(0))

    path, skeleton = tmp_path / "state.safetensors", build(jnp.tanh)
    save_checkpoint(build(jax.nn.relu), path)
    plan = plan_restore(skeleton, path)
    restored = plan.apply()
    # equinox wraps an activation without parameters; whatever it is, it is kept
    assert eqx.tree_equal(
        eqx.filter(restored, callable), eqx.filter(skeleton, callable)
    )
    assert all("relu" in note and "tanh" in note for note in plan.notes)
    assert plan.notes


def test_wider_and_deeper_skeletons_are_refused_whole(tmp_path: Path) -> None:
    def build(layers: int, width: int) -> Any:
        return {
            f"layer_{i:02}": {"w": jnp.full((3, width), i, "f4")} for i in range(layers)
        }

    path = tmp_path / "state.safetensors"
    save_checkpoint(build(12, 10), path)
    skeleton = build(16, 10)
    before = paths_and_leaves(skeleton)
    with pytest.raises(LayoutMismatchError) as raised:
        restore_into(skeleton, path)
    lost = [(item.name, item.problem) for item in raised.value.mismatches]
    assert lost == [(f"layer_{i}.w", "missing") for i in (12, 13, 14, 15)]
    assert all(
        a is b
        for (_, a), (_, b) in zip(before, paths_and_leaves(skeleton), strict=True)
    )
    with pytest.raises(LayoutMismatchError) as raised:
        restore_into(build(8, 10), path)
    extra = [(item.name, item.problem) for item in raised.value.mismatches]
    assert extra == [(f"layer_{i:02}.w", "extra") for i in (8, 9, 10, 11)]
    with pytest.raises(LayoutMismatchError) as raised:
        restore_into(build(12, 20), path)
    assert len(raised.value.mismatches) == 12
    assert "layer_00.w: expected float32[3,20], found float32[3,10]" in str(
        raised.value
    )
    assert "and 2 more" in str(raised.value)
