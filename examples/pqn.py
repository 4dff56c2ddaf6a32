"""PQN on CartPole-v1 in pure JAX: Q-learning without a replay or a target network.

    python examples/pqn.py --run runs/pqn

Killed and started again it ends bit for bit where the run that never stopped ends. Two
schedules run over the whole run (`total_timesteps`), not over one call of `train`:
epsilon by the count of steps, the learning rate by the count in the optimiser's state.
The number of rollouts is an operand of one compiled program, and evaluations draw from
keys made from their count: cutting the run changes nothing.

The algorithm is that of Gallici et al. 2024 (https://arxiv.org/abs/2407.04811).
"""

import argparse
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import flax.struct
import gymnax
import jax
import jax.numpy as jnp
import optax

from ajaxckpt import KeepLast, MetricsLog, Run, SaveEvery, state_digest

ENV, ENV_PARAMS = gymnax.make("CartPole-v1")
reset_envs = jax.vmap(ENV.reset, (0, None))
step_envs = jax.vmap(ENV.step, (0, 0, 0, None))
START_AGAIN = 75  # the exit code after a request to stop: EX_TEMPFAIL
EXAM_SEED = 1_000_003  # of all evaluations, and of no run


@dataclass(frozen=True, kw_only=True)
class Config:
    """What a run is."""

    seeds: tuple[int, ...] = (0, 1)
    total_timesteps: int = 65_536
    n_envs: int = 16
    rollout_length: int = 64
    n_epochs: int = 4
    n_minibatches: int = 8
    hidden_size: int = 64
    learning_rate: float = 1e-3
    gamma: float = 0.99
    q_lambda: float = 0.95
    reward_scale: float = 0.1
    epsilon_end: float = 0.05
    exploration: float = 0.3  # the part of the run over which epsilon falls
    eval_every: int = 8_192
    eval_episodes: int = 8

    @property
    def rollout_size(self) -> int:
        """Return how many environment steps one update takes."""
        return self.n_envs * self.rollout_length


class QNetwork(nn.Module):
    """Observation -> one value per action; normalised layers stand in for a target."""

    hidden_size: int

    @nn.compact
    def __call__(self, obs: jax.Array) -> jax.Array:
        """Map obs[..., obs_dim] to q[..., actions]."""
        x = nn.relu(nn.LayerNorm()(nn.Dense(self.hidden_size)(obs)))
        x = nn.relu(nn.LayerNorm()(nn.Dense(self.hidden_size)(x)))
        return nn.Dense(ENV.num_actions)(x)


@flax.struct.dataclass
class PQNState:
    """The whole run. In a trained state each leaf has a leading axis: the seeds."""

    step: jax.Array  # environment steps; epsilon is a function of it
    key: jax.Array
    params: Any
    opt_state: Any
    env_state: Any
    obs: jax.Array


def make_optimiser(config: Config, horizon: int) -> optax.GradientTransformation:
    """Return RAdam with a learning rate that falls to 0 over the horizon."""
    n_updates = horizon / config.rollout_size * config.n_epochs * config.n_minibatches

    def schedule(count: jax.Array) -> jax.Array:
        return config.learning_rate * jnp.maximum(1 - count / n_updates, 0.0)

    return optax.chain(optax.clip_by_global_norm(10.0), optax.radam(schedule))


@functools.partial(jax.jit, static_argnums=0)
def init_agent(config: Config) -> PQNState:
    """Build the state of all seeds before the first step."""

    def init_seed(seed: jax.Array) -> PQNState:
        key, key_env, key_params = jax.random.split(jax.random.key(seed), 3)
        keys_env = jax.random.split(key_env, config.n_envs)
        obs, env_state = reset_envs(keys_env, ENV_PARAMS)
        params = QNetwork(config.hidden_size).init(key_params, obs)
        return PQNState(
            step=jnp.int32(0),
            key=key,
            params=params,
            opt_state=make_optimiser(config, 1).init(params),
            # gymnax resets to weak types and steps to strong ones: start with those
            env_state=jax.tree.map(lambda x: x.astype(x.dtype), env_state),
            obs=obs,
        )

    return jax.vmap(init_seed)(jnp.array(config.seeds))


def epsilon(config: Config, step: jax.Array, horizon: int) -> jax.Array:
    """Return the rate of random actions: it falls from 1 over a part of the run."""
    done = jnp.minimum(step / (config.exploration * horizon), 1.0)
    return 1.0 + done * (config.epsilon_end - 1.0)


def env_step(
    config: Config, rate: jax.Array, state: PQNState, _: None
) -> tuple[PQNState, Any]:
    """Take one step in each environment, a random one at the given rate."""
    key, key_explore, key_action, key_env = jax.random.split(state.key, 4)
    apply = functools.partial(QNetwork(config.hidden_size).apply, state.params)
    explore = jax.random.uniform(key_explore, (config.n_envs,)) < rate
    random = jax.random.randint(key_action, (config.n_envs,), 0, ENV.num_actions)
    action = jnp.where(explore, random, apply(state.obs).argmax(-1))
    keys_env = jax.random.split(key_env, config.n_envs)
    obs, env_state, reward, terminated, truncated, info = step_envs(
        keys_env, state.env_state, action, ENV_PARAMS
    )
    kept = {
        "obs": state.obs,
        "action": action,
        # `obs` may open a new episode already: what was reached is in the info
        "next_q": apply(info["final_observation"]).max(-1),
        "reward": config.reward_scale * reward,
        "terminated": terminated,
        "done": terminated | truncated,
    }
    return state.replace(key=key, env_state=env_state, obs=obs), kept


def q_targets(config: Config, steps: Any) -> jax.Array:
    """Return Q(lambda) returns: they follow the rollout as far as its episode goes."""

    def backwards(later: jax.Array, step: Any) -> tuple[jax.Array, jax.Array]:
        mixed = step["next_q"] + config.q_lambda * (later - step["next_q"])
        onwards = jnp.where(step["done"], step["next_q"], mixed)
        target = step["reward"] + config.gamma * (1 - step["terminated"]) * onwards
        return target, target

    return jax.lax.scan(backwards, steps["next_q"][-1], steps, reverse=True)[1]


def loss_fn(params: Any, config: Config, batch: Any) -> jax.Array:
    """Return the squared error of the values of the actions taken."""
    steps, target = batch
    q = QNetwork(config.hidden_size).apply(params, steps["obs"])
    q = jnp.take_along_axis(q, steps["action"][:, None], -1).squeeze(-1)
    return 0.5 * ((q - target) ** 2).mean()


def update(config: Config, horizon: int, state: PQNState) -> PQNState:
    """Roll out and learn from it in minibatches."""
    rate = epsilon(config, state.step, horizon)
    step = functools.partial(env_step, config, rate)
    state, steps = jax.lax.scan(step, state, None, config.rollout_length)
    data = (steps, q_targets(config, steps))
    data = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), data)
    optimiser = make_optimiser(config, horizon)

    def minibatch(carry: Any, indices: jax.Array) -> tuple[Any, None]:
        params, opt_state = carry
        batch = jax.tree.map(lambda x: x[indices], data)
        grads = jax.grad(loss_fn)(params, config, batch)
        updates, opt_state = optimiser.update(grads, opt_state)
        return (optax.apply_updates(params, updates), opt_state), None

    key, key_shuffle = jax.random.split(state.key)
    keys = jax.random.split(key_shuffle, config.n_epochs)
    shuffled = jax.vmap(jax.random.permutation, (0, None))(keys, config.rollout_size)
    learner = (state.params, state.opt_state)
    batches = shuffled.reshape(config.n_epochs * config.n_minibatches, -1)
    (params, opt_state), _ = jax.lax.scan(minibatch, learner, batches)
    step = state.step + config.rollout_size
    return state.replace(step=step, key=key, params=params, opt_state=opt_state)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def train_chunk(config: Config, state: PQNState, n: int, horizon: int) -> PQNState:
    """Advance all seeds by n rollouts of a run that is horizon steps long."""
    update_all = jax.vmap(functools.partial(update, config, horizon))
    return jax.lax.fori_loop(0, n, lambda _, state: update_all(state), state)


@functools.partial(jax.jit, static_argnums=0)
def evaluate(config: Config, state: PQNState, count: int) -> jax.Array:
    """Return the greedy policy's mean return of each seed, at its count-th exam."""
    key = jax.random.fold_in(jax.random.key(EXAM_SEED), count)
    key_reset, key_steps = jax.random.split(key)
    keys_reset = jax.random.split(key_reset, config.eval_episodes)
    shape = ENV_PARAMS.max_steps_in_episode, config.eval_episodes
    start = (*reset_envs(keys_reset, ENV_PARAMS), jnp.ones(shape[1], bool))

    def evaluate_seed(state: PQNState) -> jax.Array:
        def step(carry: Any, keys: jax.Array) -> Any:
            obs, env_state, alive = carry
            q = QNetwork(config.hidden_size).apply(state.params, obs)
            obs, env_state, reward, terminated, truncated, _ = step_envs(
                keys, env_state, q.argmax(-1), ENV_PARAMS
            )
            still = alive & ~(terminated | truncated)
            return (obs, env_state, still), (reward * alive).mean()

        return jax.lax.scan(step, start, jax.random.split(key_steps, shape))[1].sum()

    return jax.vmap(evaluate_seed)(state)


def train(
    config: Config,
    n_timesteps: int,
    initial_state: PQNState | None = None,
    total_timesteps: int | None = None,
    log: Callable[[int, dict[str, float]], object] | None = None,
) -> PQNState:
    """Train all seeds for n_timesteps each, from scratch or from initial_state.

    n_timesteps is a multiple of `rollout_size`; with 0 the result is the skeleton.
    The initial state is donated. Epsilon and learning rate fall over
    total_timesteps (by default the config's), in however many calls. `log` is
    called with step and returns at multiples of `eval_every`.
    """
    if n_timesteps % config.rollout_size or config.eval_every % config.rollout_size:
        raise ValueError(f"no multiple of the rollout's {config.rollout_size} steps")
    horizon = total_timesteps or config.total_timesteps
    state = init_agent(config) if initial_state is None else initial_state
    step = int(state.step[0])
    end = step + n_timesteps
    while step < end:
        n = min(end - step, config.eval_every - step % config.eval_every)
        state = train_chunk(config, state, n // config.rollout_size, horizon)
        step += n
        if log is not None and step % config.eval_every == 0:
            returns = evaluate(config, state, step // config.eval_every)
            log(step, {f"return_{i}": float(x) for i, x in enumerate(returns)})
    return jax.block_until_ready(state)


def main(argv: Sequence[str] | None = None) -> int:
    """Train with a checkpoint after each chunk; print the final state's digest."""
    parser = argparse.ArgumentParser(description="Train PQN, resumably.")
    parser.add_argument("--run", metavar="DIR", default="runs/pqn")
    parser.add_argument("--total-timesteps", type=int, default=Config.total_timesteps)
    parser.add_argument("--chunk", type=int, default=8_192, help="steps between saves")
    args = parser.parse_args(argv)
    config = Config(total_timesteps=args.total_timesteps)
    lengths, size = (args.chunk, args.total_timesteps), config.rollout_size
    if min(lengths) < 1 or any(n % size for n in lengths):
        parser.error(f"--chunk and --total-timesteps: expected multiples of {size}")
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
