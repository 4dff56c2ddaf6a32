"""What each part of an agent is for: with it the run goes on, without it it shows.

Each test goes on from the file as the run would have gone on, and, where it is not
plain, shows that the same test tells when the part is lost.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import flashbax
import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from identical import assert_identical

from ajaxckpt import Run, plan_restore, restore_into, save_checkpoint
from ajaxckpt.testing import lint_state


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture(autouse=True)
def promotion() -> Iterator[None]:
    """Let flashbax add its axes by promotion."""
    with jax.numpy_rank_promotion("allow"):
        yield


def draw(state: Any, n: int) -> tuple[Any, list[float]]:
    drawn = []
    for _ in range(n):
        key, sub = jax.random.split(state["key"])
        state = {"key": key}
        drawn.append(float(jax.random.normal(sub)))
    return state, drawn


def test_draws_go_on_and_are_not_repeated(path: Path) -> None:
    _, whole = draw({"key": jax.random.key(7)}, 5)
    state, first = draw({"key": jax.random.key(7)}, 3)
    save_checkpoint(state, path)
    _, rest = draw(restore_into({"key": jax.random.key(0)}, path), 2)
    assert first + rest == whole
    assert len(set(whole)) == 5


# -------------------------------------------------------------------------- buffers


@pytest.mark.parametrize(("rows", "index", "full"), [(37, 37, False), (112, 12, True)])
def test_a_buffer_keeps_capacity_cursor_and_what_it_samples(
    rows: int, index: int, full: bool, path: Path
) -> None:
    buffer = flashbax.make_item_buffer(100, 1, 16, add_batches=False)
    add, sample = buffer.add, jax.jit(buffer.sample)
    skeleton = buffer.init({"obs": jnp.zeros(2)})
    state = jax.lax.fori_loop(
        0, rows, lambda i, state: add(state, {"obs": jnp.full(2, 1.0 * i)}), skeleton
    )
    save_checkpoint(state, path)
    restored = restore_into(skeleton, path)
    assert restored.experience["obs"].shape == state.experience["obs"].shape
    assert (int(restored.current_index), bool(restored.is_full)) == (index, full)
    key = jax.random.key(3)
    assert_identical(sample(restored, key), sample(state, key), sample(skeleton, key))


def test_priorities_go_on(path: Path) -> None:
    buffer = flashbax.make_prioritised_flat_buffer(64, 8, 4)
    skeleton = buffer.init({"obs": jnp.float32(0)})

    @jax.jit
    def step(state: Any, i: jax.Array) -> tuple[Any, Any]:
        state = buffer.add(state, {"obs": i.astype(jnp.float32)})
        drawn = buffer.sample(state, jax.random.fold_in(jax.random.key(1), i))
        priorities = 0.1 + jnp.abs(jnp.sin(drawn.experience.first["obs"]))
        return buffer.set_priorities(state, drawn.indices, priorities), drawn

    state = jax.lax.fori_loop(0, 500, lambda i, state: step(state, i)[0], skeleton)
    save_checkpoint(state, path)
    restored = restore_into(skeleton, path)
    forgetful = restore_into(skeleton, path, keep="sum_tree_state")
    _, expected = step(state, jnp.int32(500))
    _, found = step(restored, jnp.int32(500))
    np.testing.assert_array_equal(found.indices, expected.indices)
    np.testing.assert_array_equal(found.probabilities, expected.probabilities)
    _, other = step(forgetful, jnp.int32(500))
    assert not np.array_equal(other.probabilities, expected.probabilities)


def test_a_buffer_left_out_is_listed_and_named_where_it_is_missed(path: Path) -> None:
    state = {"buffer": {"obs": jnp.ones(3), "cursor": jnp.int32(2)}, "w": jnp.ones(2)}
    report = save_checkpoint(state, path, exclude="buffer")
    assert [*report.excluded] == ["buffer"]
    plan = plan_restore(state, path)
    assert {item.name for item in plan.mismatches} == {"buffer.cursor", "buffer.obs"}
    kept = plan_restore(state, path, keep="buffer")
    assert not kept.mismatches
    lines = "\n".join(kept.notes)
    assert "buffer.cursor, kept as the skeleton's: the buffer goes on writing" in lines
    assert "buffer.obs, kept as the skeleton's: the run learns from other data" in lines


# ------------------------------------------------------------------------ optimisers


def optimise(optimiser: Any, state: Any, n: int) -> Any:
    @jax.jit
    def update(state: Any) -> Any:
        grads = {"w": jnp.cos(state["params"]["w"])}
        updates, opt = optimiser.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": opt}

    for _ in range(n):
        state = update(state)
    return state


def start(optimiser: Any) -> Any:
    params = {"w": jnp.arange(4.0)}
    return {"params": params, "opt_state": optimiser.init(params)}


def test_moments_go_on_bit_for_bit(path: Path) -> None:
    adam = optax.adam(1e-2)
    state = optimise(adam, start(adam), 100)
    save_checkpoint(state, path)
    expected = optimise(adam, state, 1)["params"]["w"]
    restored = restore_into(start(adam), path)
    assert optimise(adam, restored, 1)["params"]["w"].tobytes() == expected.tobytes()
    dipping = restore_into(start(adam), path, keep="opt_state")
    assert optimise(adam, dipping, 1)["params"]["w"].tobytes() != expected.tobytes()


def test_a_schedule_goes_on_at_its_count(path: Path) -> None:
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 100, 1000)
    # plain gradient descent: the step is the learning rate times the gradient
    optimiser = optax.sgd(schedule)
    state = optimise(optimiser, start(optimiser), 500)
    save_checkpoint(state, path)
    restored = restore_into(start(optimiser), path)
    before = np.asarray(restored["params"]["w"], np.float64)
    after = optimise(optimiser, restored, 1)["params"]["w"]
    np.testing.assert_allclose(
        (before - after) / np.cos(before), float(schedule(500)), rtol=2e-3
    )
    assert abs(float(schedule(500)) - float(schedule(0))) > 5e-3


def test_parameters_alone_are_told_to_begin_the_schedule_anew(path: Path) -> None:
    adam = optax.adam(optax.linear_schedule(1e-2, 0.0, 100))
    state = optimise(adam, start(adam), 5)
    save_checkpoint(state, path)
    skeleton = start(adam)
    anew = "schedules and bias corrections of the optimiser start anew"
    kept = plan_restore(skeleton, path, keep="opt_state")
    line = f"opt_state.0.count and 1 more, kept as the skeleton's: {anew}"
    assert line in kept.notes
    assert line in str(kept)
    part = plan_restore(skeleton["params"], path, subtree="params")
    assert part.notes == (f"opt_state.0.count and 1 more, outside params: {anew}",)
    whole = plan_restore(skeleton, path)
    assert whole.notes == ()
    optimiser = plan_restore(skeleton["opt_state"], path, subtree="opt_state")
    assert optimiser.notes == ()


def test_what_is_kept_and_means_nothing_special_is_not_noted(path: Path) -> None:
    save_checkpoint({"x": jnp.ones(2), "y": jnp.ones(2)}, path)
    plan = plan_restore({"x": jnp.ones(3), "y": jnp.ones(2)}, path, keep="x")
    assert plan.notes == ()
    # kept, and no checkpoint could hold it
    plan = plan_restore({"x": jnp.ones(2), "y": object()}, path, keep="y")
    assert plan.notes == ()


# -------------------------------------------------------------- counters, environments


def test_epsilon_is_what_it_was_and_a_step_of_another_count_is_told(
    tmp_path: Path,
) -> None:
    def epsilon(state: Any) -> float:
        return max(0.05, 1 - int(state["step"]) / 10_000)

    state = {"step": jnp.int32(4000), "w": jnp.ones(2)}
    with Run(tmp_path) as run:
        run.save(state, step=5000)
    skeleton = {"step": jnp.int32(0), "w": jnp.zeros(2)}
    with Run(tmp_path) as run:
        found = run.restore_or_init(skeleton)
    assert "the checkpoint says step 5000, the state's step 4000" in found.notes
    assert epsilon(found.state) == epsilon(state) == 0.6
    assert found.step == 5000


def test_episodes_go_on_where_they_were(path: Path) -> None:
    env, params = gymnax.make("Pendulum-v1")
    reset = jax.vmap(env.reset, (0, None))
    act = jax.jit(jax.vmap(env.step, (0, 0, None, None)))

    def build() -> Any:
        obs, env_state = reset(jax.random.split(jax.random.key(0), 3), params)
        return {"env": env_state, "obs": obs, "key": jax.random.key(1)}

    def go_on(state: Any, n: int) -> tuple[Any, list[Any]]:
        seen = []
        for _ in range(n):
            key, sub = jax.random.split(state["key"])
            keys = jax.random.split(sub, 3)
            obs, env_state, *rest = act(keys, state["env"], jnp.float32(0.5), params)
            state = {"env": env_state, "obs": obs, "key": key}
            seen.append((obs, *rest[:3]))
        return state, seen

    state, _ = go_on(build(), 17)
    assert set(np.asarray(state["env"].time).tolist()) == {17}
    save_checkpoint(state, path)
    restored = restore_into(build(), path)
    # past the end of the episode, which is at 200 steps
    end, seen = go_on(state, 190)
    found_end, found = go_on(restored, 190)
    assert_identical(found_end, end, end)
    for (*expected,), (*again,) in zip(seen, found, strict=True):
        for a, b in zip(expected, again, strict=True):
            np.testing.assert_array_equal(a, b)
    assert any(np.asarray(truncated).any() for *_, truncated in seen)


# ------------------------------------------------------------------------------ lint


def test_a_state_without_a_key_or_a_counter_is_told() -> None:
    whole = {"w": jnp.ones(2), "rng": jax.random.PRNGKey(0), "step": 0}
    assert lint_state(whole) == ()
    assert lint_state({**whole, "rng": jax.random.key(0)}) == ()
    (keyless,) = lint_state({"w": jnp.ones(2), "step": 0})
    assert keyless.startswith("no leaf is a PRNG key: ")
    (uncounted,) = lint_state({"w": jnp.ones(2), "key": jax.random.key(0)})
    assert uncounted.startswith("no leaf is a counter: ")
