"""A small agent that has one of everything: what resuming it takes is all in its state.

Of a module of its own, so that a fresh process can import it.
"""

import os
import sys
from typing import Any

import jax
import jax.numpy as jnp
import optax

HORIZON, ROWS = 20, 5
ADAM = optax.adam(optax.linear_schedule(1e-2, 0.0, HORIZON))


def make_skeleton(tx: Any = ADAM) -> dict[str, Any]:
    params = {"w": jnp.ones((3, 2))}
    return {
        "params": params,
        "opt": tx.init(params),
        "key": jax.random.key(0),
        "step": 0,
        "rms": {"mean": jnp.zeros(3), "count": 0.0},
        "buffer": {"obs": jnp.zeros((ROWS, 3)), "index": 0},
        "env": {"x": jnp.zeros(3)},
        "last_loss": jnp.float32(0),
    }


def one_step(state: dict[str, Any]) -> dict[str, Any]:
    key, noise = jax.random.split(state["key"])
    x = 0.9 * state["env"]["x"] + jax.random.normal(noise, (3,))
    count = state["rms"]["count"] + 1
    mean = state["rms"]["mean"] + (x - state["rms"]["mean"]) / count
    index = state["buffer"]["index"]
    obs = state["buffer"]["obs"].at[index].set(x)

    def loss(params: dict[str, jax.Array]) -> jax.Array:
        return jnp.mean(((obs - mean[None]) @ params["w"] - 1) ** 2)

    value, grads = jax.value_and_grad(loss)(state["params"])
    updates, opt = ADAM.update(grads, state["opt"], state["params"])
    return {
        "params": optax.apply_updates(state["params"], updates),
        "opt": opt,
        "key": key,
        "step": state["step"] + 1,
        "rms": {"mean": mean, "count": count},
        "buffer": {"obs": obs, "index": (index + 1) % ROWS},
        "env": {"x": x},
        "last_loss": value,
    }


@jax.jit
def _advance(state: dict[str, Any], n: jax.Array) -> dict[str, Any]:
    return jax.lax.fori_loop(0, n, lambda _, state: one_step(state), state)


def advance(state: dict[str, Any], n: int) -> dict[str, Any]:
    return _advance(state, jnp.int32(n))


def advance_logging(
    state: dict[str, Any], n: int
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Log every second step, by the step in the state."""
    rows = []
    for _ in range(n):
        state = advance(state, 1)
        if int(state["step"]) % 2 == 0:
            rows.append({"step": int(state["step"]), "loss": state["last_loss"]})
    return state, rows


def advance_by_hash(state: dict[str, Any], n: int) -> dict[str, Any]:
    """Take a seed from the hash of a string, which every process draws anew."""
    shift = hash("seed") % (1 << 20) / (1 << 20)
    for _ in range(n):
        state = advance(state, 1)
        state = {**state, "env": {"x": state["env"]["x"] + shift}}
    return state


def advance_in_the_parent_only(state: dict[str, Any], n: int) -> dict[str, Any]:
    if "pytest" not in sys.modules:
        raise RuntimeError("no display in this process")
    return advance(state, n)


def advance_logging_the_process(state: dict[str, Any], n: int) -> Any:
    state, rows = advance_logging(state, n)
    return state, [{**row, "speed": os.getpid()} for row in rows]
