"""PPO with a GRU memory on CartPole-v1 in pure JAX; it sees positions, no speeds.

    python examples/ppo_gru.py --run runs/ppo_gru

Killed and started again it ends bit for bit where the run that never stopped ends. What
a memory adds to the state is what the agent remembers in the middle of its episodes:
begin with an empty memory after a resume, and the policy acts on another past than the
one it lives in. The learning rate falls over the whole run (`total_timesteps`), by the
count in the optimiser's state; evaluations draw from keys made from their count.

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
    total_timesteps: int = 40_960
    n_envs: int = 16
    rollout_length: int = 64
    n_epochs: int = 8
    n_minibatches: int = 4
    hidden_size: int = 64
    learning_rate: float = 2e-3
    gamma: float = 0.95
    gae_lambda: float = 0.95
    clip: float = 0.2
    entropy_bonus: float = 0.01
    eval_every: int = 8_192
    eval_episodes: int = 8

    @property
    def rollout_size(self) -> int:
        """Return how many environment steps one update takes."""
        return self.n_envs * self.rollout_length


class Agent(nn.Module):
    """Memory and observation -> memory, action logits and value."""

    hidden_size: int

    @nn.compact
    def __call__(
        self, memory: jax.Array, obs: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Map memory[..., hidden_size] and obs[..., obs_dim], its speeds unseen."""
        x = nn.tanh(nn.Dense(self.hidden_size)(5 * obs[..., ::2]))
        memory, x = nn.GRUCell(self.hidden_size)(memory, x)
        return memory, nn.Dense(ENV.num_actions)(x), nn.Dense(1)(x).squeeze(-1)


@flax.struct.dataclass
class GRUState:
    """The whole run. In a trained state each leaf has a leading axis: the seeds."""

    step: jax.Array
    key: jax.Array
    params: Any
    opt_state: Any
    memory: jax.Array
    env_state: Any
    obs: jax.Array


def make_optimiser(config: Config, horizon: int) -> optax.GradientTransformation:
    """Return Adam with a learning rate that falls to 0 over the horizon."""
    n_updates = horizon / config.rollout_size * config.n_epochs * config.n_minibatches

    def schedule(count: jax.Array) -> jax.Array:
        return config.learning_rate * jnp.maximum(1 - count / n_updates, 0.0)

    return optax.chain(optax.clip_by_global_norm(0.5), optax.adam(schedule))


@functools.partial(jax.jit, static_argnums=0)
def init_agent(config: Config) -> GRUState:
    """Build the state of all seeds before the first step."""

    def init_seed(seed: jax.Array) -> GRUState:
        key, key_env, key_params = jax.random.split(jax.random.key(seed), 3)
        keys_env = jax.random.split(key_env, config.n_envs)
        obs, env_state = reset_envs(keys_env, ENV_PARAMS)
        memory = jnp.zeros((config.n_envs, config.hidden_size))
        params = Agent(config.hidden_size).init(key_params, memory, obs)
        return GRUState(
            step=jnp.int32(0),
            key=key,
            params=params,
            opt_state=make_optimiser(config, 1).init(params),
            memory=memory,
            # gymnax resets to weak types and steps to strong ones: start with those
            env_state=jax.tree.map(lambda x: x.astype(x.dtype), env_state),
            obs=obs,
        )

    return jax.vmap(init_seed)(jnp.array(config.seeds))


def env_step(config: Config, state: GRUState, _: None) -> tuple[GRUState, Any]:
    """Take one step in each environment."""
    key, key_action, key_env = jax.random.split(state.key, 3)
    apply = functools.partial(Agent(config.hidden_size).apply, state.params)
    memory, logits, value = apply(state.memory, state.obs)
    action = jax.random.categorical(key_action, logits)
    keys_env = jax.random.split(key_env, config.n_envs)
    obs, env_state, reward, terminated, truncated, info = step_envs(
        keys_env, state.env_state, action, ENV_PARAMS
    )
    done = terminated | truncated
    kept = {
        "obs": state.obs,
        "action": action,
        "log_prob": -cross_entropy(logits, action),
        "value": value,
        # `obs` may open a new episode already: what was reached is in the info
        "next_value": apply(memory, info["final_observation"])[2],
        "reward": reward,
        "terminated": terminated,
        "done": done,
    }
    memory = forget(memory, done)
    return state.replace(key=key, memory=memory, env_state=env_state, obs=obs), kept


def forget(memory: jax.Array, done: jax.Array) -> jax.Array:
    """Empty the memory of the environments whose episode is over."""
    return jnp.where(done[..., None], 0.0, memory)


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


def loss_fn(params: Any, config: Config, batch: Any) -> jax.Array:
    """Return the clipped surrogate loss, remembering anew with today's parameters."""
    memory, steps, advantage, target = batch

    def remember(memory: jax.Array, step: Any) -> tuple[jax.Array, Any]:
        memory, *output = Agent(config.hidden_size).apply(params, memory, step["obs"])
        return forget(memory, step["done"]), output

    _, (logits, value) = jax.lax.scan(remember, memory, steps)
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    ratio = jnp.exp(-cross_entropy(logits, steps["action"]) - steps["log_prob"])
    clipped = jnp.clip(ratio, 1 - config.clip, 1 + config.clip)
    policy_loss = -jnp.minimum(ratio * advantage, clipped * advantage).mean()
    entropy = -(jax.nn.softmax(logits) * jax.nn.log_softmax(logits)).sum(-1).mean()
    value_loss = 0.5 * ((value - target) ** 2).mean()
    return policy_loss + 0.01 * value_loss - config.entropy_bonus * entropy


def update(config: Config, horizon: int, state: GRUState) -> GRUState:
    """Roll out and learn from it, in minibatches of whole sequences."""
    memory = state.memory
    step = functools.partial(env_step, config)
    state, steps = jax.lax.scan(step, state, None, config.rollout_length)
    advantage = advantages(config, steps)
    data = (steps, advantage, advantage + steps["value"])
    optimiser = make_optimiser(config, horizon)

    def minibatch(carry: Any, envs: jax.Array) -> tuple[Any, None]:
        params, opt_state = carry
        batch = (memory[envs], *jax.tree.map(lambda x: x[:, envs], data))
        grads = jax.grad(loss_fn)(params, config, batch)
        updates, opt_state = optimiser.update(grads, opt_state)
        return (optax.apply_updates(params, updates), opt_state), None

    key, key_shuffle = jax.random.split(state.key)
    keys = jax.random.split(key_shuffle, config.n_epochs)
    shuffled = jax.vmap(jax.random.permutation, (0, None))(keys, config.n_envs)
    learner = (state.params, state.opt_state)
    batches = shuffled.reshape(config.n_epochs * config.n_minibatches, -1)
    (params, opt_state), _ = jax.lax.scan(minibatch, learner, batches)
    step = state.step + config.rollout_size
    return state.replace(step=step, key=key, params=params, opt_state=opt_state)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def train_chunk(config: Config, state: GRUState, n: int, horizon: int) -> GRUState:
    """Advance all seeds by n rollouts of a run that is horizon steps long."""
    update_all = jax.vmap(functools.partial(update, config, horizon))
    return jax.lax.fori_loop(0, n, lambda _, state: update_all(state), state)


@functools.partial(jax.jit, static_argnums=0)
def evaluate(config: Config, state: GRUState, count: int) -> jax.Array:
    """Return the greedy policy's mean return of each seed, at its count-th exam."""
    key = jax.random.fold_in(jax.random.key(EXAM_SEED), count)
    key_reset, key_steps = jax.random.split(key)
    keys_reset = jax.random.split(key_reset, config.eval_episodes)
    shape = ENV_PARAMS.max_steps_in_episode, config.eval_episodes
    memory = jnp.zeros((config.eval_episodes, config.hidden_size))
    start = (memory, *reset_envs(keys_reset, ENV_PARAMS), jnp.ones(shape[1], bool))

    def evaluate_seed(state: GRUState) -> jax.Array:
        def step(carry: Any, keys: jax.Array) -> Any:
            memory, obs, env_state, alive = carry
            apply = Agent(config.hidden_size).apply
            memory, logits, _ = apply(state.params, memory, obs)
            obs, env_state, reward, terminated, truncated, _ = step_envs(
                keys, env_state, logits.argmax(-1), ENV_PARAMS
            )
            still = alive & ~(terminated | truncated)
            return (memory, obs, env_state, still), (reward * alive).mean()

        return jax.lax.scan(step, start, jax.random.split(key_steps, shape))[1].sum()

    return jax.vmap(evaluate_seed)(state)


def train(
    config: Config,
    n_timesteps: int,
    initial_state: GRUState | None = None,
    total_timesteps: int | None = None,
    log: Callable[[int, dict[str, float]], object] | None = None,
) -> GRUState:
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
    parser = argparse.ArgumentParser(description="Train PPO with a memory, resumably.")
    parser.add_argument("--run", metavar="DIR", default="runs/ppo_gru")
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
