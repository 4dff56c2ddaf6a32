"""After a restore nothing compiles that handing the state over would not compile."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compile_events import Costs, count_compiles, run_steps
from flax.training.train_state import TrainState
from identical import assert_identical
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from ajaxckpt import restore_into, save_checkpoint

SEEDS = 2


def _mesh(kind: AxisType = AxisType.Auto) -> Mesh:
    return jax.make_mesh((8,), ("x",), axis_types=(kind,))


def _advance(state: Any) -> Any:
    """Change every leaf and keep its dtype, shape, weak type and placement."""

    def change(leaf: Any) -> Any:
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            words = jax.random.key_data(leaf) + 1  # compiles sooner than a split
            return jax.random.wrap_key_data(words, impl=jax.random.key_impl(leaf))
        if leaf.dtype == bool:
            return ~leaf
        return leaf + 1

    return jax.tree.map(change, jax.tree.map(jnp.asarray, state))


def _weak_seeds() -> dict[str, Any]:
    """What a vmapped zero-step train call builds: counters with a seeds axis."""

    def one(seed: jax.Array) -> dict[str, Any]:
        counters = {"steps": 0, "loss": 0.0, "done": False, "phase": 0j}
        return {"params": seed * jnp.ones(3), **counters}

    return jax.jit(jax.vmap(one))(jnp.arange(SEEDS, dtype=jnp.float32))


def _apply(variables: Any, x: jax.Array) -> jax.Array:
    return x @ variables["w"]


# made once: each optax.adam is another static field, and retraces the step by itself
ADAM = optax.adam(1e-3)


def _train_state() -> TrainState:
    params = {"w": jnp.ones((4, 2)), "b": jnp.zeros(2)}
    return TrainState.create(apply_fn=_apply, params=params, tx=ADAM)


def _train_step(state: TrainState) -> TrainState:
    grads = jax.tree.map(lambda p: 0.1 * p + 1.0, state.params)
    return state.apply_gradients(grads=grads)


def _keys() -> dict[str, Any]:
    return {
        impl: {
            "one": jax.random.key(1, impl=impl),
            "many": jax.random.split(jax.random.key(2, impl=impl), 3),
        }
        for impl in ("threefry2x32", "rbg", "unsafe_rbg")
    } | {"raw": jax.random.PRNGKey(3)}


def _uncommitted() -> dict[str, Any]:
    return {
        "f32": jnp.arange(6.0).reshape(2, 3),
        "bf16": jnp.ones(5, jnp.bfloat16),
        "int4": jnp.zeros(3, jnp.int4),
        "empty": jnp.zeros((0, 4)),
        "mask": jnp.zeros(3, bool),
        "weak": jnp.asarray(1),
    }


def _on_device_1() -> dict[str, Any]:
    return jax.device_put(_uncommitted(), jax.devices()[1])


def _sharded(kind: AxisType = AxisType.Auto) -> dict[str, Any]:
    mesh = _mesh(kind)

    def put(leaf: jax.Array, *spec: str | None) -> jax.Array:
        if kind == AxisType.Explicit:  # a step names every axis in what it returns
            spec = (*spec, *[None] * (leaf.ndim - len(spec)))
        return jax.device_put(leaf, NamedSharding(mesh, P(*spec)))

    return {
        "rows": put(jnp.arange(32.0).reshape(8, 4), "x"),
        "columns": put(jnp.arange(32.0).reshape(4, 8), None, "x"),
        "replicated": put(jnp.ones(3)),
        "weak": put(jnp.asarray(2)),
        "weak rows": put(jnp.broadcast_to(jnp.asarray(0.5), 8), "x"),
        "key": put(jax.random.key(0)),
        "keys": put(jax.random.split(jax.random.key(0), 8), "x"),
    }


def _sharded_explicit() -> dict[str, Any]:
    return _sharded(AxisType.Explicit)


def _mixed() -> dict[str, Any]:
    return {
        "committed": jax.device_put(jnp.ones(4), jax.devices()[1]),
        "committed weak": jax.device_put(jnp.asarray(3), jax.devices()[1]),
        "free": jnp.ones(4),
        "free weak": jnp.asarray(3),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A state that trains: how its skeleton is built and how a step changes it."""

    init: Callable[[], Any]
    step: Callable[[Any], Any] = _advance
    donate: bool = False
    context: Callable[[], Any] = field(default=contextlib.nullcontext)


CASES = {
    "weak scalars": Case(
        init=lambda: {"n": jnp.asarray(0), "x": jnp.asarray(0.5), "w": jnp.ones(3)}
    ),
    "Python numbers, weak when trained": Case(
        init=lambda: {"n": 0, "x": 0.5, "b": True, "z": 1j, "w": jnp.ones(3)}
    ),
    "weak leaves with a seeds axis": Case(init=_weak_seeds),
    "weak leaves with a seeds axis, donated": Case(init=_weak_seeds, donate=True),
    "TrainState": Case(init=_train_state, step=_train_step),
    "TrainState from a jitted init": Case(
        init=lambda: jax.jit(_train_state)(), step=_train_step
    ),
    "TrainState, donated": Case(
        init=lambda: jax.jit(_train_state)(), step=_train_step, donate=True
    ),
    "typed keys": Case(init=_keys),
    "uncommitted": Case(init=_uncommitted),
    "uncommitted, donated": Case(init=_uncommitted, donate=True),
    "committed to device 1": Case(init=_on_device_1),
    "committed to device 1, donated": Case(init=_on_device_1, donate=True),
    "sharded over 8": Case(init=_sharded),
    "sharded over 8, donated": Case(init=_sharded, donate=True),
    "sharded over 8, axes explicit": Case(
        init=_sharded_explicit, context=lambda: jax.set_mesh(_mesh(AxisType.Explicit))
    ),
    "uncommitted under an ambient mesh": Case(
        init=_uncommitted, context=lambda: jax.set_mesh(_mesh())
    ),
    "uncommitted on another default device": Case(
        init=_uncommitted, context=lambda: jax.default_device(jax.devices()[3])
    ),
    "Python numbers on another default device": Case(
        init=lambda: {"n": 0, "w": jnp.ones(3)},
        context=lambda: jax.default_device(jax.devices()[3]),
    ),
    "committed beside uncommitted": Case(init=_mixed),
    "64 bits": Case(
        init=lambda: {"w": jnp.ones(3), "n": jnp.asarray(0), "c": jnp.ones(2) * 1j},
        context=lambda: jax.enable_x64(True),
    ),
}


def _fresh_step(case: Case) -> Any:
    """Jit the step anew: neither its cache nor its trace is shared."""

    def step(state: Any) -> Any:
        return case.step(state)

    return jax.jit(step, donate_argnums=0 if case.donate else ())


@pytest.mark.parametrize("name", CASES)
def test_the_next_steps_cost_what_they_cost_in_memory(
    name: str, tmp_path: Path
) -> None:
    case = CASES[name]
    with case.context():
        in_memory = _fresh_step(case)
        # by the third step JAX's own cache has settled; sharded keys take so long
        state, _ = run_steps(in_memory, case.init(), 3)
        state, expected = run_steps(in_memory, state, 3)

        interrupted = _fresh_step(case)
        saved, _ = run_steps(interrupted, case.init(), 3)
        save_checkpoint(saved, tmp_path / "a.safetensors")
        skeleton = case.init()
        restored = restore_into(skeleton, tmp_path / "a.safetensors")
        assert_identical(restored, saved, skeleton)
        with count_compiles() as second:
            restored = restore_into(skeleton, tmp_path / "a.safetensors")
        assert_identical(restored, saved, skeleton)
        assert second.compiles == 0
        restored, costs = run_steps(interrupted, restored, 3)

        assert costs == expected == Costs(compiles=0, traces=0, entries=0)
        assert_identical(restored, state, state)


@pytest.mark.parametrize(
    "name",
    [
        "Python numbers, weak when trained",
        "weak leaves with a seeds axis",
        "TrainState",
        "typed keys",
        "committed to device 1",
        "sharded over 8, donated",
        "sharded over 8, axes explicit",
    ],
)
def test_a_new_process_compiles_what_the_state_handed_over_would(
    name: str, tmp_path: Path
) -> None:
    case = CASES[name]
    with case.context():
        state, _ = run_steps(_fresh_step(case), case.init(), 3)
        save_checkpoint(state, tmp_path / "a.safetensors")
        restored = restore_into(case.init(), tmp_path / "a.safetensors")
        _, costs = run_steps(_fresh_step(case), restored, 3)
        _, expected = run_steps(_fresh_step(case), state, 3)
    assert costs == expected
    assert costs.compiles >= 1


@pytest.mark.parametrize(
    "name", ["weak leaves with a seeds axis", "uncommitted", "64 bits"]
)
def test_an_abstract_skeleton_costs_no_more(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    with case.context():
        step = _fresh_step(case)
        state, _ = run_steps(step, case.init(), 2)
        save_checkpoint(state, tmp_path / "a.safetensors")
        skeleton = jax.eval_shape(case.init)
        restored = restore_into(skeleton, tmp_path / "a.safetensors")
        _, costs = run_steps(step, restored, 2)
    assert costs == Costs(compiles=0, traces=0, entries=0)


@pytest.mark.parametrize("name", ["sharded over 8", "committed to device 1"])
def test_an_abstract_skeleton_with_shardings_costs_no_more(
    name: str, tmp_path: Path
) -> None:
    case = CASES[name]
    step = _fresh_step(case)
    state, _ = run_steps(step, case.init(), 3)
    save_checkpoint(state, tmp_path / "a.safetensors")
    skeleton = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            x.shape,
            x.dtype,
            sharding=x.sharding,
            weak_type=getattr(x, "weak_type", False),  # a key array has none
        ),
        state,
    )
    restored = restore_into(skeleton, tmp_path / "a.safetensors")
    _, costs = run_steps(step, restored, 2)
    assert costs == Costs(compiles=0, traces=0, entries=0)


def test_an_abstract_skeleton_lands_on_the_default_device(tmp_path: Path) -> None:
    step = jax.jit(_advance)
    with jax.default_device(jax.devices()[3]):
        state, _ = run_steps(step, _uncommitted(), 2)
        save_checkpoint(state, tmp_path / "a.safetensors")
        skeleton = jax.eval_shape(_uncommitted)
        restored = restore_into(skeleton, tmp_path / "a.safetensors")
        assert {leaf.device for leaf in jax.tree.leaves(restored)} == {jax.devices()[3]}
        _, costs = run_steps(step, restored, 2)
    assert costs == Costs(compiles=0, traces=0, entries=0)


@pytest.mark.parametrize(
    "place",
    [
        lambda: SingleDeviceSharding(jax.devices()[1]),
        lambda: NamedSharding(_mesh(), P("x")),
        lambda: NamedSharding(_mesh(), P()),
    ],
    ids=["device 1", "sharded", "replicated"],
)
def test_unjitted_counter_beside_committed_leaves(
    place: Callable[[], Any], tmp_path: Path
) -> None:
    def init() -> dict[str, Any]:
        return {"w": jax.device_put(jnp.arange(8.0), place()), "n": 0}

    step = jax.jit(_advance)
    state, _ = run_steps(step, init(), 2)
    save_checkpoint(state, tmp_path / "a.safetensors")
    restored = restore_into(init(), tmp_path / "a.safetensors")
    _, costs = run_steps(step, restored, 2)
    assert costs == Costs(compiles=0, traces=0, entries=0)


def test_numpy_leaves_stay_on_the_host_and_cost_nothing(tmp_path: Path) -> None:
    @jax.jit
    def sample(table: Any, index: Any, total: jax.Array) -> jax.Array:
        return total + table[index]

    def init() -> dict[str, Any]:
        table = np.arange(6, dtype=np.float32)
        return {"table": table, "index": np.int32(0), "total": jnp.zeros(())}

    def step(state: dict[str, Any]) -> dict[str, Any]:
        total = sample(**state)
        return {**state, "index": np.int32(state["index"] + 1), "total": total}

    state = step(step(init()))
    save_checkpoint(state, tmp_path / "a.safetensors")
    restored = restore_into(init(), tmp_path / "a.safetensors")
    assert_identical(restored, state, init())
    before = sample._cache_size()
    with count_compiles() as count:
        restored, state = step(restored), step(state)
    assert (count.compiles, sample._cache_size()) == (0, before)
    assert_identical(restored, state, state)


def test_leaves_of_one_shape_and_place_share_one_compile(tmp_path: Path) -> None:
    shape = (SEEDS, 11, 13)  # of no other test: what is compiled is kept
    leaf = jnp.broadcast_to(jnp.asarray(0.5), shape)
    assert leaf.weak_type
    state = {f"leaf {i}": leaf + i for i in range(20)}
    save_checkpoint(state, tmp_path / "a.safetensors")
    with count_compiles() as count:
        restored = restore_into(state, tmp_path / "a.safetensors")
    assert count.compiles == 1
    assert_identical(restored, state, state)


def test_saving_planning_and_digesting_leave_the_step_alone(tmp_path: Path) -> None:
    step = _fresh_step(CASES["weak leaves with a seeds axis, donated"])
    state, _ = run_steps(step, _weak_seeds(), 2)
    with count_compiles() as count:
        save_checkpoint(state, tmp_path / "a.safetensors")
    assert count.compiles == 0
    pointers = {name: leaf.unsafe_buffer_pointer() for name, leaf in state.items()}
    donated = dict(state)
    state, costs = run_steps(step, state, 1)
    assert costs == Costs(compiles=0, traces=0, entries=0)
    assert all(leaf.is_deleted() for leaf in donated.values())
    # still donated in place: the save left no view of the buffers behind
    assert {leaf.unsafe_buffer_pointer() for leaf in state.values()} == set(
        pointers.values()
    )


def test_the_counters_see_a_leaf_that_was_committed_by_mistake() -> None:
    step = _fresh_step(CASES["uncommitted"])
    state, _ = run_steps(step, _uncommitted(), 2)
    moved = {name: jax.device_put(x, x.sharding) for name, x in state.items()}
    _, costs = run_steps(step, moved, 1)
    assert costs.compiles == 1
    assert costs.entries == 1


def test_the_counters_see_a_weak_type_that_was_lost() -> None:
    step = _fresh_step(CASES["weak leaves with a seeds axis"])
    state, _ = run_steps(step, _weak_seeds(), 2)
    strong = {name: jnp.asarray(x, dtype=x.dtype) for name, x in state.items()}
    assert state["steps"].weak_type
    assert not strong["steps"].weak_type
    _, costs = run_steps(step, strong, 1)
    assert (costs.compiles, costs.entries) == (1, 1)
    assert costs.traces >= 1
