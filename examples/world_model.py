"""A small world model of a pendulum in pure JAX, and an agent that plans in it.

    python examples/world_model.py --run runs/world_model

A recurrent model learns from sequences of the replay what it will see next and be
rewarded with. The agent acts by planning in it: the cross-entropy method draws
sequences of actions, lets the model dream what comes of them, and draws again around
the best (as in PlaNet, Hafner et al. 2019, https://arxiv.org/abs/1811.04551).

Killed and started again it ends bit for bit where the run that never stopped ends. What
such an agent adds to the state: the replay's cursor, for a sequence must not be read
across it; the memory the model has in the middle of an episode; and the plan, from
which the next one starts. The noise of exploration falls over the whole run
(`total_timesteps`), by the state's `step`; evaluations draw from keys made from their
count. Their returns rise from about -550 to -70 between steps 500 and 1500, in about a
minute of CPU.
"""

import argparse
import functools
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import flashbax
import flax.linen as nn
import flax.struct
import gymnax
import jax
import jax.numpy as jnp
import optax

from ajaxckpt import KeepLast, MetricsLog, Run, SaveEvery, state_digest

ENV, ENV_PARAMS = gymnax.make("Pendulum-v1")
# fewer, longer steps: a plan of a few actions then reaches far enough to swing up
ENV_PARAMS = ENV_PARAMS.replace(dt=0.1, max_steps_in_episode=100)
START_AGAIN = 75  # the exit code after a request to stop: EX_TEMPFAIL
EXAM_SEED = 1_000_003  # of all evaluations, and of no run


@dataclass(frozen=True, kw_only=True)
class Config:
    """What a run is."""

    seeds: tuple[int, ...] = (0, 1)
    total_timesteps: int = 2_000
    learning_starts: int = 200
    buffer_size: int = 2_000
    batch_size: int = 32
    sequence_length: int = 12
    hidden_size: int = 32
    learning_rate: float = 1e-3
    noise: float = 0.3  # of the first action; falls to 0 over the run
    plan_length: int = 15
    n_plans: int = 64
    n_best: int = 8
    n_rounds: int = 3
    eval_every: int = 500
    eval_episodes: int = 8


class Model(nn.Module):
    """Memory, what is seen and what is done -> memory, what is seen next, reward."""

    hidden_size: int

    @nn.compact
    def __call__(self, memory: jax.Array, obs: jax.Array, action: jax.Array) -> Any:
        """Map memory[..., hidden_size], obs[..., 3] and action[...]."""
        x = jnp.concatenate([obs, action[..., None]], axis=-1)
        x = nn.silu(nn.Dense(self.hidden_size)(x))
        memory, x = nn.GRUCell(self.hidden_size)(memory, x)
        x = nn.silu(nn.Dense(self.hidden_size)(x))
        return memory, obs + nn.Dense(3)(x), nn.Dense(1)(x).squeeze(-1)


class Step(NamedTuple):
    """One environment step as the replay keeps it."""

    obs: jax.Array
    action: jax.Array
    reward: jax.Array
    memory: jax.Array  # before the step, as it was then
    first: jax.Array  # whether an episode begins here


@flax.struct.dataclass
class WorldModelState:
    """The whole run. In a trained state each leaf has a leading axis: the seeds."""

    step: jax.Array  # environment steps; the noise is a function of it
    key: jax.Array
    params: Any
    opt_state: Any
    buffer: Any
    env_state: Any
    obs: jax.Array
    first: jax.Array
    memory: jax.Array
    plan: jax.Array


def observe(obs: jax.Array) -> jax.Array:
    """Return what the agent sees, each number about 1 at most."""
    return obs / jnp.array([1.0, 1.0, 8.0])


def make_buffer(config: Config) -> Any:
    """Return the functions of the replay: a long row of steps, read in sequences."""
    return flashbax.make_trajectory_buffer(
        add_batch_size=1,
        sample_batch_size=config.batch_size,
        sample_sequence_length=config.sequence_length,
        period=1,
        min_length_time_axis=config.sequence_length,
        max_length_time_axis=config.buffer_size,
    )


def make_optimiser(config: Config) -> optax.GradientTransformation:
    """Return Adam, its gradients clipped."""
    clip = optax.clip_by_global_norm(1.0)
    return optax.chain(clip, optax.adam(config.learning_rate))


@functools.partial(jax.jit, static_argnums=0)
def init_agent(config: Config) -> WorldModelState:
    """Build the state of all seeds before the first step."""

    def init_seed(seed: jax.Array) -> WorldModelState:
        key, key_env, key_params = jax.random.split(jax.random.key(seed), 3)
        obs, env_state = ENV.reset(key_env, ENV_PARAMS)
        zero, memory = jnp.float32(0), jnp.zeros(config.hidden_size)
        params = Model(config.hidden_size).init(key_params, memory, observe(obs), zero)
        step = Step(observe(obs), zero, zero, memory, zero > 0)
        return WorldModelState(
            step=jnp.int32(0),
            key=key,
            params=params,
            opt_state=make_optimiser(config).init(params),
            buffer=make_buffer(config).init(step),
            # gymnax resets to weak types and steps to strong ones: start with those
            env_state=jax.tree.map(lambda x: x.astype(x.dtype), env_state),
            obs=observe(obs),
            first=jnp.bool_(True),
            memory=memory,
            plan=jnp.zeros(config.plan_length),
        )

    return jax.vmap(init_seed)(jnp.array(config.seeds))


def make_plan(
    config: Config, params: Any, memory: jax.Array, obs: jax.Array, plan: Any, key: Any
) -> jax.Array:
    """Return the actions that the model likes best, found from those of a plan."""
    apply = functools.partial(Model(config.hidden_size).apply, params)
    start = jax.tree.map(
        lambda x: jnp.broadcast_to(x, (config.n_plans, *x.shape)), (memory, obs)
    )

    def dream(carry: Any, action: jax.Array) -> tuple[Any, jax.Array]:
        memory, obs, reward = apply(*carry, action)
        return (memory, obs), reward

    def narrow(carry: Any, key: jax.Array) -> tuple[Any, None]:
        mean, std = carry
        noise = jax.random.normal(key, (config.n_plans, config.plan_length))
        plans = jnp.clip(mean + std * noise, -1.0, 1.0)
        rewards = jax.lax.scan(dream, start, plans.T)[1].sum(0)
        best = plans[jax.lax.top_k(rewards, config.n_best)[1]]
        return (best.mean(0), best.std(0)), None

    keys = jax.random.split(key, config.n_rounds)
    return jax.lax.scan(narrow, (plan, jnp.ones_like(plan)), keys)[0][0]


def act(
    config: Config, params: Any, carry: Any, obs: jax.Array, key: jax.Array, noise: Any
) -> tuple[Any, jax.Array]:
    """Plan and return the first action; remember, and keep the rest of the plan."""
    memory, plan = carry
    key_plan, key_noise = jax.random.split(key)
    plan = make_plan(config, params, memory, obs, plan, key_plan)
    action = jnp.clip(plan[0] + noise * jax.random.normal(key_noise), -1.0, 1.0)
    memory, _, _ = Model(config.hidden_size).apply(params, memory, obs, action)
    return (memory, jnp.append(plan[1:], 0.0)), action


def collect(
    config: Config, horizon: jax.Array, state: WorldModelState
) -> WorldModelState:
    """Take one environment step and store it."""
    key, key_act, key_env = jax.random.split(state.key, 3)
    noise = config.noise * jnp.maximum(1.0 - state.step / horizon, 0.0)
    carry = state.memory, state.plan
    carry, action = act(config, state.params, carry, state.obs, key_act, noise)
    obs, env_state, reward, terminated, truncated, _ = ENV.step(
        key_env, state.env_state, 2.0 * action[None], ENV_PARAMS
    )
    done = terminated | truncated
    memory, plan = jax.tree.map(lambda x: jnp.where(done, 0.0, x), carry)
    seen = Step(state.obs, action, reward / 10.0, state.memory, state.first)
    rows = jax.tree.map(lambda x: x[None, None], seen)
    return state.replace(
        step=state.step + 1,
        key=key,
        buffer=make_buffer(config).add(state.buffer, rows),
        env_state=env_state,
        obs=observe(obs),
        first=done,
        memory=memory,
        plan=plan,
    )


def update(config: Config, state: WorldModelState) -> WorldModelState:
    """Take one gradient step on sequences of the replay."""
    key, key_batch = jax.random.split(state.key)
    batch = make_buffer(config).sample(state.buffer, key_batch).experience
    steps = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), batch)  # time comes first

    def loss_fn(params: Any) -> jax.Array:
        def dream(carry: Any, step: Step) -> tuple[Any, Any]:
            memory, obs = carry
            # the model sees where a sequence or an episode begins, and dreams the rest
            first = step.first[:, None]
            memory, obs = jnp.where(first, 0.0, memory), jnp.where(first, step.obs, obs)
            error = obs - step.obs
            apply = Model(config.hidden_size).apply
            memory, obs, reward = apply(params, memory, obs, step.action)
            return (memory, obs), (error, reward - step.reward)

        errors = jax.lax.scan(dream, (steps.memory[0], steps.obs[0]), steps)[1]
        return sum((error**2).mean() for error in errors)

    grads = jax.grad(loss_fn)(state.params)
    updates, opt_state = make_optimiser(config).update(grads, state.opt_state)
    params = optax.apply_updates(state.params, updates)
    return state.replace(key=key, params=params, opt_state=opt_state)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def train_chunk(
    config: Config, state: WorldModelState, n_timesteps: int, horizon: int
) -> WorldModelState:
    """Advance all seeds by n_timesteps of a run that is horizon steps long."""

    def train_step(_: jax.Array, state: WorldModelState) -> WorldModelState:
        state = jax.vmap(functools.partial(collect, config, horizon))(state)
        due = state.step[0] >= config.learning_starts  # all seeds are in step
        update_all = jax.vmap(functools.partial(update, config))
        return jax.lax.cond(due, update_all, lambda state: state, state)

    return jax.lax.fori_loop(0, n_timesteps, train_step, state)


@functools.partial(jax.jit, static_argnums=0)
def evaluate(config: Config, params: Any, count: int) -> jax.Array:
    """Return the noiseless agent's mean return of each seed, at its count-th exam."""

    def episode(params: Any, key: jax.Array) -> jax.Array:
        def step(carry: Any, key: jax.Array) -> Any:
            carry, obs, env_state = carry
            key_act, key_env = jax.random.split(key)
            carry, action = act(config, params, carry, observe(obs), key_act, 0.0)
            obs, env_state, reward, *_ = ENV.step(
                key_env, env_state, 2.0 * action[None], ENV_PARAMS
            )
            return (carry, obs, env_state), reward

        key_reset, key_steps = jax.random.split(key)
        keys = jax.random.split(key_steps, ENV_PARAMS.max_steps_in_episode)
        carry = jnp.zeros(config.hidden_size), jnp.zeros(config.plan_length)
        start = (carry, *ENV.reset(key_reset, ENV_PARAMS))
        return jax.lax.scan(step, start, keys)[1].sum()

    key = jax.random.fold_in(jax.random.key(EXAM_SEED), count)
    keys = jax.random.split(key, config.eval_episodes)
    over_episodes = jax.vmap(episode, in_axes=(None, 0))
    return jax.vmap(over_episodes, in_axes=(0, None))(params, keys).mean(axis=1)


def train(
    config: Config,
    n_timesteps: int,
    initial_state: WorldModelState | None = None,
    total_timesteps: int | None = None,
    log: Callable[[int, dict[str, float]], object] | None = None,
) -> WorldModelState:
    """Train all seeds for n_timesteps each, from scratch or from initial_state.

    Args:
        config: The run.
        n_timesteps: Environment steps; with 0 the result is the skeleton.
        initial_state: Where to go on from. It is donated.
        total_timesteps: How long the whole run is, in however many calls: the noise
            falls over it. By default the config's.
        log: Is called with step and returns at every multiple of `eval_every`.
    """
    horizon = total_timesteps or config.total_timesteps
    state = init_agent(config) if initial_state is None else initial_state
    step = int(state.step[0])
    end = step + n_timesteps
    while step < end:
        n = min(end - step, config.eval_every - step % config.eval_every)
        state = train_chunk(config, state, n, horizon)
        step += n
        if log is not None and step % config.eval_every == 0:
            returns = evaluate(config, state.params, step // config.eval_every)
            log(step, {f"return_{i}": float(x) for i, x in enumerate(returns)})
    return jax.block_until_ready(state)


def main(argv: Sequence[str] | None = None) -> int:
    """Train with a checkpoint after each chunk; print the final state's digest."""
    parser = argparse.ArgumentParser(description="Train a world model, resumably.")
    parser.add_argument("--run", metavar="DIR", default="runs/world_model")
    parser.add_argument("--total-timesteps", type=int, default=Config.total_timesteps)
    parser.add_argument("--chunk", type=int, default=500, help="steps between saves")
    args = parser.parse_args(argv)
    config = Config(total_timesteps=args.total_timesteps)
    if min(args.chunk, args.total_timesteps) < 1:
        parser.error("--chunk and --total-timesteps: expected 1 at least")
    with Run(
        args.run,
        save=SaveEvery(steps=args.chunk),
        keep=KeepLast(3),
        config=config,
        logs=[MetricsLog(os.path.join(args.run, "metrics.csv"))],
        exit_code=START_AGAIN,
    ) as run:
        start = run.restore_or_init(lambda: train(config, n_timesteps=0))
        for note in start.notes:  # of another total, say: it is part of the run
            print(f"note: {note}")
        state = start.state
        while (left := config.total_timesteps - int(state.step[0])) > 0:
            state = train(config, min(args.chunk, left), state, log=run.log)
            run.step(state, step=state.step)
            if run.stop_requested:
                break
    print(f"digest: {state_digest(state)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
