"""DQN on CartPole-v1 in pure JAX: a replay, a target network, a falling epsilon.

    python examples/dqn.py --run runs/dqn

Start the same command again after a kill and it ends bit for bit where the run that
never stopped ends. What that takes of the agent:

- all that changes is in the state: the replay with its cursor, the target network, the
  environment in the middle of its episode, the key, the counters;
- epsilon falls over the whole run (`total_timesteps`), not over one call of `train`;
- the number of steps is an operand of one compiled program: cutting changes nothing;
- evaluations come at multiples of `eval_every`, with keys made from their count.

The algorithm is that of Mnih et al. 2015 (https://doi.org/10.1038/nature14236).
"""

import argparse
import functools
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

ENV, ENV_PARAMS = gymnax.make("CartPole-v1")
START_AGAIN = 75  # the exit code after a request to stop: EX_TEMPFAIL
EXAM_SEED = 1_000_003  # of all evaluations, and of no run


@dataclass(frozen=True, kw_only=True)
class Config:
    """What a run is."""

    seeds: tuple[int, ...] = (0, 1)
    total_timesteps: int = 10_000
    learning_starts: int = 500
    update_every: int = 1
    target_every: int = 500
    buffer_size: int = 10_000
    batch_size: int = 64
    hidden_size: int = 64
    learning_rate: float = 5e-4
    gamma: float = 0.99
    epsilon_end: float = 0.05
    exploration: float = 0.4  # the part of the run over which epsilon falls
    eval_every: int = 2_000
    eval_episodes: int = 8


def make_network(config: Config) -> nn.Module:
    """Return the network: observation[..., obs_dim] -> one value per action."""
    size = config.hidden_size
    layers = [nn.Dense(size), nn.relu, nn.Dense(size), nn.relu]
    return nn.Sequential([*layers, nn.Dense(ENV.num_actions)])


class Transition(NamedTuple):
    """One environment step as the replay keeps it."""

    obs: jax.Array
    action: jax.Array
    reward: jax.Array
    terminated: jax.Array
    next_obs: jax.Array


@flax.struct.dataclass
class DQNState:
    """The whole run. In a trained state each leaf has a leading axis: the seeds."""

    step: jax.Array  # environment steps; epsilon is a function of it
    key: jax.Array
    params: Any
    target_params: Any
    opt_state: Any
    buffer: Any
    env_state: Any
    obs: jax.Array


def make_buffer(config: Config) -> Any:
    """Return the functions of the replay."""
    return flashbax.make_item_buffer(
        max_length=config.buffer_size,
        min_length=config.learning_starts,
        sample_batch_size=config.batch_size,
    )


@functools.partial(jax.jit, static_argnums=0)
def init_agent(config: Config) -> DQNState:
    """Build the state of all seeds before the first step."""

    def init_seed(seed: jax.Array) -> DQNState:
        key, key_env, key_params = jax.random.split(jax.random.key(seed), 3)
        obs, env_state = ENV.reset(key_env, ENV_PARAMS)
        params = make_network(config).init(key_params, obs)
        zero = jnp.float32(0)
        transition = Transition(obs, jnp.int32(0), zero, zero > 0, obs)
        return DQNState(
            step=jnp.int32(0),
            key=key,
            params=params,
            # a copy: one buffer at two places of the state could not be donated
            target_params=jax.tree.map(jnp.copy, params),
            opt_state=optax.adam(config.learning_rate).init(params),
            buffer=make_buffer(config).init(transition),
            # gymnax resets to weak types and steps to strong ones: start with those
            env_state=jax.tree.map(lambda x: x.astype(x.dtype), env_state),
            obs=obs,
        )

    return jax.vmap(init_seed)(jnp.array(config.seeds))


def epsilon(config: Config, step: jax.Array, horizon: jax.Array) -> jax.Array:
    """Return the rate of random actions: it falls from 1 over a part of the run."""
    done = jnp.minimum(step / (config.exploration * horizon), 1.0)
    return 1.0 + done * (config.epsilon_end - 1.0)


def collect(config: Config, horizon: jax.Array, state: DQNState) -> DQNState:
    """Take one environment step and store it."""
    key, key_explore, key_action, key_env = jax.random.split(state.key, 4)
    greedy = make_network(config).apply(state.params, state.obs).argmax()
    explore = jax.random.uniform(key_explore) < epsilon(config, state.step, horizon)
    random = jax.random.randint(key_action, (), 0, ENV.num_actions)
    action = jnp.where(explore, random, greedy)
    obs, env_state, reward, terminated, _, info = ENV.step(
        key_env, state.env_state, action, ENV_PARAMS
    )
    # `obs` may open a new episode: the replay wants the true successor. A time limit is
    # no terminal state: `terminated` alone stops the bootstrap.
    next_obs = info["final_observation"]
    transition = Transition(state.obs, action, reward, terminated, next_obs)
    return state.replace(
        step=state.step + 1,
        key=key,
        buffer=make_buffer(config).add(state.buffer, transition),
        env_state=env_state,
        obs=obs,
    )


def update(config: Config, state: DQNState) -> DQNState:
    """Take one gradient step on a batch of the replay."""
    key, key_batch = jax.random.split(state.key)
    batch = make_buffer(config).sample(state.buffer, key_batch).experience
    apply = make_network(config).apply
    next_q = apply(state.target_params, batch.next_obs).max(-1)
    target = batch.reward + config.gamma * (1 - batch.terminated) * next_q

    def loss_fn(params: Any) -> jax.Array:
        q = jnp.take_along_axis(apply(params, batch.obs), batch.action[:, None], -1)
        return optax.huber_loss(q.squeeze(-1), target).mean()

    grads = jax.grad(loss_fn)(state.params)
    updates, opt_state = optax.adam(config.learning_rate).update(grads, state.opt_state)
    params = optax.apply_updates(state.params, updates)
    return state.replace(key=key, params=params, opt_state=opt_state)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def train_chunk(
    config: Config, state: DQNState, n_timesteps: int, horizon: int
) -> DQNState:
    """Advance all seeds by n_timesteps of a run that is horizon steps long."""

    def train_step(_: jax.Array, state: DQNState) -> DQNState:
        state = jax.vmap(functools.partial(collect, config, horizon))(state)
        step = state.step[0]  # all seeds are in step
        due = (step >= config.learning_starts) & (step % config.update_every == 0)
        update_all = jax.vmap(functools.partial(update, config))
        state = jax.lax.cond(due, update_all, lambda state: state, state)
        target_params = optax.periodic_update(
            state.params, state.target_params, step, config.target_every
        )
        return state.replace(target_params=target_params)

    return jax.lax.fori_loop(0, n_timesteps, train_step, state)


@functools.partial(jax.jit, static_argnums=0)
def evaluate(config: Config, params: Any, count: int) -> jax.Array:
    """Return the greedy policy's mean return of each seed, at its count-th exam."""

    def episode(params: Any, key: jax.Array) -> jax.Array:
        def step(carry: Any, key: jax.Array) -> Any:
            obs, env_state, alive = carry
            action = make_network(config).apply(params, obs).argmax()
            obs, env_state, reward, terminated, truncated, _ = ENV.step(
                key, env_state, action, ENV_PARAMS
            )
            return (obs, env_state, alive & ~(terminated | truncated)), reward * alive

        key_reset, key_steps = jax.random.split(key)
        keys = jax.random.split(key_steps, ENV_PARAMS.max_steps_in_episode)
        start = (*ENV.reset(key_reset, ENV_PARAMS), jnp.bool_(True))
        return jax.lax.scan(step, start, keys)[1].sum()

    key = jax.random.fold_in(jax.random.key(EXAM_SEED), count)
    keys = jax.random.split(key, config.eval_episodes)
    over_episodes = jax.vmap(episode, in_axes=(None, 0))
    return jax.vmap(over_episodes, in_axes=(0, None))(params, keys).mean(axis=1)


def train(
    config: Config,
    n_timesteps: int,
    initial_state: DQNState | None = None,
    total_timesteps: int | None = None,
    log: Callable[[int, dict[str, float]], object] | None = None,
) -> DQNState:
    """Train all seeds for n_timesteps each, from scratch or from initial_state.

    With no steps the result is the skeleton. The initial state is donated. Epsilon
    falls over total_timesteps (by default the config's), in however many calls.
    `log` is called with step and returns at multiples of `eval_every`.
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
    parser = argparse.ArgumentParser(description="Train DQN, resumably.")
    parser.add_argument("--run", metavar="DIR", default="runs/dqn")
    parser.add_argument("--total-timesteps", type=int, default=Config.total_timesteps)
    parser.add_argument("--chunk", type=int, default=2_000, help="steps between saves")
    args = parser.parse_args(argv)
    config = Config(total_timesteps=args.total_timesteps)
    if min(args.chunk, args.total_timesteps) < 1:
        parser.error("--chunk and --total-timesteps: expected 1 at least")
    with Run(
        args.run,
        save=SaveEvery(steps=args.chunk),
        keep=KeepLast(3),
        config=config,
        logs=MetricsLog(f"{args.run}/metrics.csv"),
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
    raise SystemExit(main())
