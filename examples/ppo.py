"""PPO on CartPole-v1 in pure JAX: rollouts, GAE, running normalisation, a schedule.

    python examples/ppo.py --run runs/ppo

Killed and started again it ends bit for bit where the run that never stopped ends: the
environments stay in the middle of their episodes, where the rollout left them; the
normalisers of observations and rewards are leaves like the weights; the learning rate
falls over the whole run (`total_timesteps`), by the count in the optimiser's state; the
number of rollouts is an operand of one compiled program; evaluations come at multiples
of `eval_every`, with keys made from their count.

The algorithm is that of Schulman et al. 2017 (https://arxiv.org/abs/1707.06347).
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
cross_entropy = optax.softmax_cross_entropy_with_integer_labels  # -log probability
START_AGAIN = 75  # the exit code after a request to stop: EX_TEMPFAIL
EXAM_SEED = 1_000_003  # of all evaluations, and of no run


@dataclass(frozen=True, kw_only=True)
class Config:
    """What a run is."""

    seeds: tuple[int, ...] = (0, 1)
    total_timesteps: int = 32_768
    n_envs: int = 8
    rollout_length: int = 64
    n_epochs: int = 4
    n_minibatches: int = 4
    hidden_size: int = 64
    learning_rate: float = 2e-3
    gamma: float = 0.99
    gae_lambda: float = 0.95
    clip: float = 0.2
    entropy_bonus: float = 0.01
    eval_every: int = 4_096
    eval_episodes: int = 8

    @property
    def rollout_size(self) -> int:
        """Return how many environment steps one update takes."""
        return self.n_envs * self.rollout_length


class ActorCritic(nn.Module):
    """Observation -> action logits and value."""

    hidden_size: int

    @nn.compact
    def __call__(self, obs: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Map obs[..., obs_dim] to logits[..., actions] and value[...]."""
        actor = nn.tanh(nn.Dense(self.hidden_size)(obs))
        critic = nn.tanh(nn.Dense(self.hidden_size)(obs))
        return nn.Dense(ENV.num_actions)(actor), nn.Dense(1)(critic).squeeze(-1)


@flax.struct.dataclass
class Normaliser:
    """Running mean and variance."""

    mean: jax.Array
    var: jax.Array
    count: jax.Array

    def update(self, batch: jax.Array) -> "Normaliser":
        """Take in a batch[n, ...] (the parallel form of Welford's update)."""
        count = self.count + len(batch)
        delta = batch.mean(0) - self.mean
        share = len(batch) / count
        var = self.var + share * (batch.var(0) - self.var + (1 - share) * delta**2)
        return Normaliser(mean=self.mean + share * delta, var=var, count=count)


@flax.struct.dataclass
class PPOState:
    """The whole run. In a trained state each leaf has a leading axis: the seeds."""

    step: jax.Array
    key: jax.Array
    params: Any
    opt_state: Any
    obs_norm: Normaliser
    reward_norm: Normaliser  # of the discounted sums of rewards below
    discounted: jax.Array
    env_state: Any
    obs: jax.Array


def make_optimiser(config: Config, horizon: int) -> optax.GradientTransformation:
    """Return Adam with a learning rate that falls to 0 over the horizon."""
    n_updates = horizon / config.rollout_size * config.n_epochs * config.n_minibatches

    def schedule(count: jax.Array) -> jax.Array:
        return config.learning_rate * jnp.maximum(1 - count / n_updates, 0.0)

    return optax.chain(optax.clip_by_global_norm(0.5), optax.adam(schedule))


@functools.partial(jax.jit, static_argnums=0)
def init_agent(config: Config) -> PPOState:
    """Build the state of all seeds before the first step."""

    def init_seed(seed: jax.Array) -> PPOState:
        key, key_env, key_params = jax.random.split(jax.random.key(seed), 3)
        keys_env = jax.random.split(key_env, config.n_envs)
        obs, env_state = reset_envs(keys_env, ENV_PARAMS)
        params = ActorCritic(config.hidden_size).init(key_params, obs)
        zero = jnp.float32(0)
        return PPOState(
            step=jnp.int32(0),
            key=key,
            params=params,
            opt_state=make_optimiser(config, 1).init(params),
            obs_norm=Normaliser(jnp.zeros(4), jnp.ones(4), zero + 1),
            reward_norm=Normaliser(zero, zero + 1, zero + 1),
            discounted=jnp.zeros(config.n_envs),
            # gymnax resets to weak types and steps to strong ones: start with those
            env_state=jax.tree.map(lambda x: x.astype(x.dtype), env_state),
            obs=obs,
        )

    return jax.vmap(init_seed)(jnp.array(config.seeds))


def act(config: Config, state: PPOState, obs: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return logits and value of raw observations."""
    normal = (obs - state.obs_norm.mean) / jnp.sqrt(state.obs_norm.var + 1e-8)
    return ActorCritic(config.hidden_size).apply(state.params, normal)


def env_step(config: Config, state: PPOState, _: None) -> tuple[PPOState, Any]:
    """Take one step in each environment."""
    key, key_action, key_env = jax.random.split(state.key, 3)
    logits, value = act(config, state, state.obs)
    action = jax.random.categorical(key_action, logits)
    keys_env = jax.random.split(key_env, config.n_envs)
    obs, env_state, reward, terminated, truncated, info = step_envs(
        keys_env, state.env_state, action, ENV_PARAMS
    )
    done = terminated | truncated
    discounted = config.gamma * state.discounted + reward
    kept = {
        "obs": state.obs,
        "action": action,
        "log_prob": -cross_entropy(logits, action),
        "value": value,
        # `obs` may open a new episode already: what was reached is in the info
        "next_value": act(config, state, info["final_observation"])[1],
        "reward": reward / jnp.sqrt(state.reward_norm.var + 1e-8),
        "terminated": terminated,
        "done": done,
        "discounted": discounted,
    }
    discounted = jnp.where(done, 0.0, discounted)
    state = state.replace(key=key, discounted=discounted, env_state=env_state, obs=obs)
    return state, kept


def advantages(config: Config, steps: Any) -> jax.Array:
    """Return GAE; a time limit ends the sum, a terminal state the bootstrap too."""
    next_value = config.gamma * (1 - steps["terminated"]) * steps["next_value"]
    deltas = steps["reward"] + next_value - steps["value"]
    decays = config.gamma * config.gae_lambda * (1 - steps["done"])

    def backwards(later: jax.Array, now: Any) -> tuple[jax.Array, jax.Array]:
        delta, decay = now
        return (total := delta + decay * later), total

    start = jnp.zeros(config.n_envs)
    return jax.lax.scan(backwards, start, (deltas, decays), reverse=True)[1]


def loss_fn(params: Any, config: Config, state: PPOState, batch: Any) -> jax.Array:
    """Return the clipped surrogate loss, with value loss and entropy bonus."""
    steps, advantage, target = batch
    logits, value = act(config, state.replace(params=params), steps["obs"])
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    ratio = jnp.exp(-cross_entropy(logits, steps["action"]) - steps["log_prob"])
    clipped = jnp.clip(ratio, 1 - config.clip, 1 + config.clip)
    policy_loss = -jnp.minimum(ratio * advantage, clipped * advantage).mean()
    entropy = -(jax.nn.softmax(logits) * jax.nn.log_softmax(logits)).sum(-1).mean()
    value_loss = 0.5 * ((value - target) ** 2).mean()
    return policy_loss + value_loss - config.entropy_bonus * entropy


def update(config: Config, horizon: int, state: PPOState) -> PPOState:
    """Roll out, learn from it in minibatches, then take it into the normalisers."""
    step = functools.partial(env_step, config)
    state, steps = jax.lax.scan(step, state, None, config.rollout_length)
    advantage = advantages(config, steps)
    data = (steps, advantage, advantage + steps["value"])
    data = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), data)
    optimiser = make_optimiser(config, horizon)

    def minibatch(carry: Any, indices: jax.Array) -> tuple[Any, None]:
        params, opt_state = carry
        batch = jax.tree.map(lambda x: x[indices], data)
        grads = jax.grad(loss_fn)(params, config, state, batch)
        updates, opt_state = optimiser.update(grads, opt_state)
        return (optax.apply_updates(params, updates), opt_state), None

    key, key_shuffle = jax.random.split(state.key)
    keys = jax.random.split(key_shuffle, config.n_epochs)
    shuffled = jax.vmap(jax.random.permutation, (0, None))(keys, config.rollout_size)
    learner = (state.params, state.opt_state)
    batches = shuffled.reshape(config.n_epochs * config.n_minibatches, -1)
    (params, opt_state), _ = jax.lax.scan(minibatch, learner, batches)
    return state.replace(
        step=state.step + config.rollout_size,
        key=key,
        params=params,
        opt_state=opt_state,
        obs_norm=state.obs_norm.update(data[0]["obs"]),
        reward_norm=state.reward_norm.update(data[0]["discounted"]),
    )


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def train_chunk(config: Config, state: PPOState, n: int, horizon: int) -> PPOState:
    """Advance all seeds by n rollouts of a run that is horizon steps long."""
    update_all = jax.vmap(functools.partial(update, config, horizon))
    return jax.lax.fori_loop(0, n, lambda _, state: update_all(state), state)


@functools.partial(jax.jit, static_argnums=0)
def evaluate(config: Config, state: PPOState, count: int) -> jax.Array:
    """Return the greedy policy's mean return of each seed, at its count-th exam."""
    key = jax.random.fold_in(jax.random.key(EXAM_SEED), count)
    key_reset, key_steps = jax.random.split(key)
    keys_reset = jax.random.split(key_reset, config.eval_episodes)
    shape = ENV_PARAMS.max_steps_in_episode, config.eval_episodes
    start = (*reset_envs(keys_reset, ENV_PARAMS), jnp.ones(shape[1], bool))

    def evaluate_seed(state: PPOState) -> jax.Array:
        def step(carry: Any, keys: jax.Array) -> Any:
            obs, env_state, alive = carry
            action = act(config, state, obs)[0].argmax(-1)
            obs, env_state, reward, terminated, truncated, _ = step_envs(
                keys, env_state, action, ENV_PARAMS
            )
            still = alive & ~(terminated | truncated)
            return (obs, env_state, still), (reward * alive).mean()

        return jax.lax.scan(step, start, jax.random.split(key_steps, shape))[1].sum()

    return jax.vmap(evaluate_seed)(state)


def train(
    config: Config,
    n_timesteps: int,
    initial_state: PPOState | None = None,
    total_timesteps: int | None = None,
    log: Callable[[int, dict[str, float]], object] | None = None,
) -> PPOState:
    """Train all seeds for n_timesteps each, from scratch or from initial_state.

    n_timesteps is a multiple of `rollout_size`; with 0 the result is the skeleton.
    The initial state is donated. The learning rate falls over total_timesteps (by
    default the config's), in however many calls. `log` is called with step and
    returns at multiples of `eval_every`.
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
    parser = argparse.ArgumentParser(description="Train PPO, resumably.")
    parser.add_argument("--run", metavar="DIR", default="runs/ppo")
    parser.add_argument("--total-timesteps", type=int, default=Config.total_timesteps)
    parser.add_argument("--chunk", type=int, default=4_096, help="steps between saves")
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
