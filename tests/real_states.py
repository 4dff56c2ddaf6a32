"""Real training states: how each is built anew, and how it is trained on.

Run as a script, ``python tests/real_states.py restore FOLDER``, it restores what a
test saved there into skeletons built by this process, trains on, and saves again.
"""

import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import chex
import equinox as eqx
import flashbax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.training.dynamic_scale import DynamicScale
from flax.training.train_state import TrainState

State = Any


@dataclasses.dataclass(frozen=True)
class RealState:
    """One kind of state: ``build`` a fresh skeleton, ``advance`` a state by a step."""

    build: Callable[[], State]
    advance: Callable[[State], State]


# --- optax -----------------------------------------------------------------------

_LABELS = {"b": "still", "w": "moving"}


def _optimisers() -> Mapping[str, Any]:
    schedule = optax.cosine_decay_schedule(0.1, 10)
    adam = optax.adam(0.1)
    return {
        "adam": adam,
        "adamw": optax.adamw(schedule),
        "chain with clip": optax.chain(optax.clip_by_global_norm(0.5), adam),
        "inject_hyperparams": optax.inject_hyperparams(optax.adam)(schedule),
        "multi_transform": optax.multi_transform(
            {"moving": adam, "still": optax.set_to_zero()}, _LABELS
        ),
        "masked": optax.masked(adam, {"b": False, "w": True}),
        "MultiSteps": optax.MultiSteps(adam, 3).gradient_transformation(),
        "adafactor": optax.adafactor(0.1, min_dim_size_to_factor=2),
        "lion": optax.lion(0.1, mu_dtype=jnp.bfloat16),
        "schedule-free": optax.contrib.schedule_free_adamw(0.1, warmup_steps=2),
        "apply_if_finite": optax.apply_if_finite(adam, 2),
        "reduce_on_plateau": optax.chain(
            adam, optax.contrib.reduce_on_plateau(patience=1)
        ),
        "add_noise": optax.chain(optax.add_noise(0.1, 0.5, 7), adam),
    }


def _params() -> Mapping[str, jax.Array]:
    w = jnp.linspace(-1.0, 1.0, 6, dtype=jnp.float32).reshape(2, 3)
    return {"b": jnp.zeros(3), "w": w}


def _loss(params: Any) -> jax.Array:
    return jnp.sum((params["w"].sum(0) + params["b"] - 3.0) ** 2)


def _optax_state(name: str) -> RealState:
    tx = optax.with_extra_args_support(_optimisers()[name])

    def build() -> State:
        params = _params()
        return {"opt": tx.init(params), "params": params}

    @jax.jit
    def advance(state: State) -> State:
        params = state["params"]
        value, grads = jax.value_and_grad(_loss)(params)
        updates, opt = tx.update(grads, state["opt"], params, value=value)
        return {"opt": opt, "params": optax.apply_updates(params, updates)}

    return RealState(build, advance)


# --- networks --------------------------------------------------------------------


class _Mlp(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(1)(nn.tanh(nn.Dense(4)(x)))


def _inputs() -> jax.Array:
    return jnp.linspace(0.0, 1.0, 6).reshape(3, 2)


def _train_state() -> RealState:
    def build() -> State:
        model = _Mlp()
        params = model.init(jax.random.key(0), _inputs())
        return TrainState.create(
            apply_fn=model.apply, params=params, tx=optax.adam(0.1)
        )

    apply, tx = _Mlp().apply, optax.adam(0.1)

    @jax.jit
    def step(params: Any, opt_state: Any, number: Any) -> Any:
        grads = jax.grad(lambda p: jnp.mean(apply(p, _inputs()) ** 2))(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, number + 1

    def advance(state: State) -> State:
        params, opt_state, number = step(state.params, state.opt_state, state.step)
        return state.replace(params=params, opt_state=opt_state, step=number)

    return RealState(build, advance)


def _dynamic_scale() -> RealState:
    def build() -> State:
        return {"params": _params(), "scale": DynamicScale(growth_interval=2)}

    @jax.jit
    def advance(state: State) -> State:
        grad = state["scale"].value_and_grad(_loss)
        scale, _, _, grads = grad(state["params"])
        params = jax.tree.map(lambda p, g: p - 0.01 * g, state["params"], grads)
        return {"params": params, "scale": scale}

    return RealState(build, advance)


def _nnx_state() -> RealState:
    def create() -> Any:
        rngs = nnx.Rngs(params=0, dropout=1)
        return nnx.Sequential(
            nnx.Linear(2, 4, rngs=rngs),
            nnx.BatchNorm(4, rngs=rngs),
            nnx.Dropout(0.5, rngs=rngs),
            nnx.Linear(4, 1, rngs=rngs),
        )

    graph = nnx.graphdef(create())

    @jax.jit
    def advance(state: State) -> State:
        model = nnx.merge(graph, state)

        def loss(net: Any) -> jax.Array:
            return jnp.mean(net(_inputs()) ** 2)

        grads = nnx.grad(loss)(model)
        params = jax.tree.map(
            lambda p, g: p - 0.1 * g, nnx.state(model, nnx.Param), grads
        )
        nnx.update(model, params)
        return nnx.state(model)

    return RealState(lambda: nnx.state(create()), advance)


def _equinox_mlp() -> RealState:
    def build() -> State:
        return eqx.nn.MLP(2, 1, 4, 1, activation=jax.nn.gelu, key=jax.random.key(0))

    @eqx.filter_jit
    def advance(model: State) -> State:
        grads = eqx.filter_grad(lambda m: jnp.mean(jax.vmap(m)(_inputs()) ** 2))(model)
        return eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, grads))

    return RealState(build, advance)


# --- statistics, buffers, environments, keys ----------------------------------------


@chex.dataclass
class Statistics:
    """A running mean that starts as weak ints and becomes floats."""

    count: Any
    mean: Any
    var: Any


def _statistics() -> RealState:
    def build() -> State:
        zero = jnp.asarray(0)
        return Statistics(count=0, mean=zero, var=jax.lax.full((3,), 1))

    @jax.jit
    def advance(state: State) -> State:
        count = state.count + 1
        return Statistics(
            count=count,
            mean=state.mean + (3.5 - state.mean) / count,
            var=state.var * 0.5 + 0.25,
        )

    return RealState(build, advance)


def _item(number: Any) -> Mapping[str, Any]:
    return {"done": number > 3, "obs": jnp.full((2,), number, jnp.float32)}


def _item_buffer() -> RealState:
    buffer = flashbax.make_item_buffer(8, 2, 2)

    @jax.jit
    def advance(state: State) -> State:
        filled = buffer.add(state["buffer"], _item(state["n"]))
        key, sub = jax.random.split(state["key"])
        drawn = buffer.sample(filled, sub).experience["obs"].sum()
        return {"buffer": filled, "drawn": drawn, "key": key, "n": state["n"] + 1}

    return RealState(functools.partial(_buffer_state, buffer), advance)


def _buffer_state(buffer: Any) -> State:
    return {
        "buffer": buffer.init(_item(jnp.int32(0))),
        "drawn": jnp.float32(0),
        "key": jax.random.key(3),
        "n": 0,
    }


def _trajectory_buffer() -> RealState:
    buffer = flashbax.make_trajectory_buffer(
        add_batch_size=1,
        sample_batch_size=2,
        sample_sequence_length=2,
        period=1,
        min_length_time_axis=2,
        max_length_time_axis=6,
    )

    @jax.jit
    def advance(state: State) -> State:
        batch = jax.tree.map(lambda x: jnp.stack([x, x])[None], _item(state["n"]))
        filled = buffer.add(state["buffer"], batch)
        key, sub = jax.random.split(state["key"])
        drawn = buffer.sample(filled, sub).experience["obs"].sum()
        return {"buffer": filled, "drawn": drawn, "key": key, "n": state["n"] + 1}

    return RealState(functools.partial(_buffer_state, buffer), advance)


def _prioritised_buffer() -> RealState:
    buffer = flashbax.make_prioritised_flat_buffer(8, 2, 2)

    @jax.jit
    def advance(state: State) -> State:
        filled = buffer.add(state["buffer"], _item(state["n"]))
        filled = buffer.add(filled, _item(state["n"] + 1))
        key, sub = jax.random.split(state["key"])
        sample = buffer.sample(filled, sub)
        drawn = sample.experience.first["obs"].sum()
        priorities = 0.5 + jnp.arange(2.0) + state["n"]
        filled = buffer.set_priorities(filled, sample.indices, priorities)
        return {"buffer": filled, "drawn": drawn, "key": key, "n": state["n"] + 1}

    return RealState(functools.partial(_buffer_state, buffer), advance)


def _gymnax_env(name: str, action: Any) -> RealState:
    import gymnax  # it brings many more packages along

    env, params = gymnax.make(name)

    def build() -> State:
        key, sub = jax.random.split(jax.random.key(0))
        obs, state = env.reset(sub, params)
        return {"env": state, "key": key, "obs": obs}

    @jax.jit
    def advance(state: State) -> State:
        key, sub = jax.random.split(state["key"])
        obs, env_state, *_ = env.step(sub, state["env"], action, params)
        return {"env": env_state, "key": key, "obs": obs}

    return RealState(build, advance)


def _keys(impl: str) -> RealState:
    words = 2 if impl == "threefry2x32" else 4

    def keys(*shape: int) -> jax.Array:
        data = np.arange(int(np.prod(shape)) * words, dtype=np.uint32)
        data = jnp.asarray(data.reshape(*shape, words))
        return jax.random.wrap_key_data(data, impl=impl)

    def build() -> State:
        return {
            "batch": keys(4),
            "drawn": jnp.zeros((2, 3)),
            "empty": keys(0),
            "grid": keys(2, 3),
            "key": keys(),
            "raw": jax.random.key_data(keys()),
        }

    @jax.jit
    def advance(state: State) -> State:
        split = jax.vmap(lambda key: jax.random.split(key)[0])
        return {
            "batch": split(state["batch"]),
            "drawn": jax.vmap(jax.vmap(jax.random.uniform))(state["grid"]),
            "empty": state["empty"],
            "grid": jax.vmap(split)(state["grid"]),
            "key": jax.random.fold_in(state["key"], 1),
            "raw": state["raw"] + jnp.uint32(1),
        }

    return RealState(build, advance)


def _host_counters() -> RealState:
    """What lives on the host: numpy statistics, Python counters, a name, a flag."""

    def build() -> State:
        return {
            "best": -np.inf,
            "episodes": 0,
            "env": "Pendulum-v1",
            "returns": np.zeros(4),
            "seen": np.int64(0),
            "warm": False,
        }

    def advance(state: State) -> State:
        episodes = state["episodes"] + 1
        returns = np.roll(state["returns"], 1)
        returns[0] = episodes * 0.1
        return {
            **state,
            "best": max(state["best"], float(returns.max())),
            "episodes": episodes,
            "returns": returns,
            "seen": state["seen"] + np.int64(2**33),
            "warm": episodes > 1,
        }

    return RealState(build, advance)


def _seeds() -> RealState:
    """Two seeds under vmap: counters and learning rates weak, of shape (seeds,)."""
    tx = optax.adam(0.1)

    def one(key: jax.Array) -> State:
        params = {"b": jnp.zeros(3), "w": jax.random.normal(key, (2, 3))}
        return {"key": key, "opt": tx.init(params), "params": params, "step": 0}

    def build() -> State:
        states = jax.vmap(one)(jax.random.split(jax.random.key(0), 2))
        return {**states, "step": jax.lax.full((2,), 0)}

    @jax.jit
    @jax.vmap
    def advance(state: State) -> State:
        key, sub = jax.random.split(state["key"])
        grads = jax.tree.map(
            lambda g: g + jax.random.normal(sub, ()), jax.grad(_loss)(state["params"])
        )
        updates, opt = tx.update(grads, state["opt"])
        params = optax.apply_updates(state["params"], updates)
        return {"key": key, "opt": opt, "params": params, "step": state["step"] + 1}

    return RealState(build, advance)


REAL_STATES: Mapping[str, Callable[[], RealState]] = {
    **{
        f"optax {name}": functools.partial(_optax_state, name)
        for name in (
            *("adam", "adamw", "chain with clip", "inject_hyperparams"),
            *("multi_transform", "masked", "MultiSteps", "adafactor", "lion"),
            *("schedule-free", "apply_if_finite", "reduce_on_plateau", "add_noise"),
        )
    },
    "flax TrainState": _train_state,
    "flax DynamicScale": _dynamic_scale,
    "nnx State": _nnx_state,
    "equinox MLP": _equinox_mlp,
    "chex statistics": _statistics,
    "flashbax item buffer": _item_buffer,
    "flashbax trajectory buffer": _trajectory_buffer,
    "flashbax prioritised buffer": _prioritised_buffer,
    "gymnax Pendulum": functools.partial(_gymnax_env, "Pendulum-v1", 0.5),
    "gymnax CartPole": functools.partial(_gymnax_env, "CartPole-v1", 1),
    **{
        f"keys {impl}": functools.partial(_keys, impl)
        for impl in ("threefry2x32", "rbg", "unsafe_rbg")
    },
    "host counters": _host_counters,
    "two seeds": _seeds,
}


def train(real: RealState, state: State, steps: int) -> State:
    """Advance a state by some steps."""
    # flashbax and flax lean on rank promotion
    with jax.numpy_rank_promotion("allow"):
        for _ in range(steps):
            state = real.advance(state)
    return state


def file_name(name: str) -> str:
    """Name the file of a real state."""
    return f"{name.replace(' ', '-')}.safetensors"


def _continue_in_this_process(folder: Path) -> None:
    from ajaxckpt import restore_into, save_checkpoint

    for name, make in REAL_STATES.items():
        path = folder / file_name(name)
        if path.exists():
            real = make()
            state = train(real, restore_into(real.build(), path), 2)
            save_checkpoint(state, folder / "after" / file_name(name))


if __name__ == "__main__":
    _continue_in_this_process(Path(sys.argv[-1]))
