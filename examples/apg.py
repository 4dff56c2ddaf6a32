"""An actor-critic that learns through its environment's derivative, in pure JAX.

    python examples/apg.py --run runs/apg

The pendulum below is a differentiable function, so what a torque does to all later
rewards is a gradient and needs no sampling: the actor climbs the returns of short
rollouts, in which the critic stands for what comes after (the analytic policy gradient,
cut short as in SHAC, Xu et al. 2022, https://arxiv.org/abs/2204.07137).

Killed and started again it ends bit for bit where the run that never stopped ends. With
`--reset-optimizer` it goes on with an optimiser that starts anew, once per start of the
command, and where a run is cut does change how it ends. The learning rate is the same
in either case: it falls over the whole run (`total_timesteps`) by the state's `step`,
which nothing resets. By the optimiser's count a reset would put it back to its start.

Returns rise from about -1100 to -200, upright, in 820,000 steps: half a minute of CPU.
"""

import argparse
import functools
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import optax

from ajaxckpt import KeepLast, MetricsLog, Run, SaveEvery, state_digest

START_AGAIN = 75  # the exit code after a request to stop: EX_TEMPFAIL
EXAM_SEED = 1_000_003  # of all evaluations, and of no run


@dataclass(frozen=True, kw_only=True)
class Config:
    """What a run is."""

    seeds: tuple[int, ...] = (0, 1)
    total_timesteps: int = 819_200
    n_envs: int = 32
    rollout_length: int = 16
    episode_length: int = 200
    hidden_size: int = 64
    learning_rate: float = 1e-3
    gamma: float = 0.99
    td_lambda: float = 0.95
    noise: float = 0.1
    eval_every: int = 163_840
    eval_episodes: int = 16

    @property
    def rollout_size(self) -> int:
        """Return how many environment steps one update takes."""
        return self.n_envs * self.rollout_length


class Pendulum(NamedTuple):
    """The state of a pendulum; it stands upright at angle 0."""

    angle: jax.Array
    speed: jax.Array
    time: jax.Array


def reset_envs(key: jax.Array, *shape: int) -> Pendulum:
    """Return pendulums that stand anywhere, slow."""
    angle, speed = jax.random.uniform(key, (2, *shape), minval=-1.0)
    return Pendulum(jnp.pi * angle, speed, jnp.zeros(shape, jnp.int32))


def step_envs(env_state: Pendulum, action: jax.Array) -> tuple[Pendulum, jax.Array]:
    """Turn by an action in [-1, 1]; return rewards too. Gym's Pendulum-v1."""
    angle, speed, time = env_state
    torque = 2.0 * action
    wrapped = jnp.mod(angle + jnp.pi, 2 * jnp.pi) - jnp.pi
    reward = -(wrapped**2 + 0.1 * speed**2 + 0.001 * torque**2)
    speed = speed + 0.05 * (15.0 * jnp.sin(angle) + 3.0 * torque)
    speed = jnp.clip(speed, -8.0, 8.0)
    return Pendulum(angle + 0.05 * speed, speed, time + 1), reward


def observe(env_state: Pendulum) -> jax.Array:
    """Return what the agent sees, of shape [..., 3]."""
    angle, speed, _ = env_state
    return jnp.stack([jnp.cos(angle), jnp.sin(angle), speed / 8.0], axis=-1)


def make_network(config: Config) -> nn.Module:
    """Return the network of actor or critic: observation[..., 3] -> number[...]."""
    size = config.hidden_size
    layers = [nn.Dense(size), nn.tanh, nn.Dense(size), nn.tanh, nn.Dense(1)]
    return nn.Sequential([*layers, lambda x: x.squeeze(-1)])


def make_optimiser() -> optax.GradientTransformation:
    """Return Adam before its learning rate."""
    return optax.chain(optax.clip_by_global_norm(0.3), optax.scale_by_adam())


def learning_rate(config: Config, step: jax.Array, horizon: jax.Array) -> jax.Array:
    """Return the rate: it falls to 0 over the run's steps, optimiser kept or reset."""
    return config.learning_rate * jnp.maximum(1.0 - step / horizon, 0.0)


@flax.struct.dataclass
class APGState:
    """The whole run. In a trained state each leaf has a leading axis: the seeds."""

    step: jax.Array  # environment steps; the learning rate is a function of it
    key: jax.Array
    params: Any
    opt_state: Any
    env_state: Pendulum


@functools.partial(jax.jit, static_argnums=0)
def init_agent(config: Config) -> APGState:
    """Build the state of all seeds before the first step."""

    def init_seed(seed: jax.Array) -> APGState:
        key, key_env, *keys = jax.random.split(jax.random.key(seed), 4)
        env_state = reset_envs(key_env, config.n_envs)
        actor, critic = (make_network(config).init(k, observe(env_state)) for k in keys)
        params = {"actor": actor, "critic": critic}
        opt_state = make_optimiser().init(params)
        return APGState(jnp.int32(0), key, params, opt_state, env_state)

    return jax.vmap(init_seed)(jnp.array(config.seeds))


@functools.partial(jax.jit, donate_argnums=0)
def restart_optimiser(state: APGState) -> APGState:
    """Forget the optimiser's moments and count; the learning rate stays as it was."""
    return state.replace(opt_state=jax.vmap(make_optimiser().init)(state.params))


def roll_out(config: Config, actor: Any, env_state: Pendulum, key: jax.Array) -> Any:
    """Return where a rollout ends and its steps, differentiable by the actor."""
    shape = config.rollout_length, config.n_envs
    key_noise, key_reset = jax.random.split(key)
    noise = config.noise * jax.random.normal(key_noise, shape)
    start_again = reset_envs(key_reset, *shape)  # for those whose episode ends

    def env_step(env_state: Pendulum, now: Any) -> tuple[Pendulum, Any]:
        noise, fresh = now
        obs = observe(env_state)
        mean = make_network(config).apply(actor, obs)
        env_state, reward = step_envs(env_state, jnp.tanh(mean + noise))
        done = env_state.time >= config.episode_length
        # values of about 1 are learned sooner
        steps = (obs, reward / 10, observe(env_state), done)
        return jax.tree.map(functools.partial(jnp.where, done), fresh, env_state), steps

    return jax.lax.scan(env_step, env_state, (noise, start_again))


def returns_of(config: Config, critic: Any, steps: Any) -> jax.Array:
    """Return the TD(lambda) return of each step; a time limit is no terminal state."""
    _, reward, next_obs, done = steps
    next_value = make_network(config).apply(critic, next_obs)

    def backwards(later: jax.Array, now: Any) -> tuple[jax.Array, jax.Array]:
        reward, value, decay = now
        later = config.gamma * (value + decay * (later - value))
        return (total := reward + later), total

    steps = (reward, next_value, config.td_lambda * (1 - done))
    return jax.lax.scan(backwards, next_value[-1], steps, reverse=True)[1]


def update(config: Config, horizon: jax.Array, state: APGState) -> APGState:
    """Roll out and learn from it: the actor through the dynamics, the critic by TD."""
    key, key_rollout = jax.random.split(state.key)

    def loss_fn(params: Any) -> tuple[jax.Array, Pendulum]:
        env_state, steps = roll_out(
            config, params["actor"], state.env_state, key_rollout
        )
        # the parameters of before, not those to learn: the actor moves no critic
        returns = returns_of(config, state.params["critic"], steps)
        obs, target = jax.lax.stop_gradient((steps[0], returns))
        value = make_network(config).apply(params["critic"], obs)
        return ((value - target) ** 2).mean() - returns.mean(), env_state

    grads, env_state = jax.grad(loss_fn, has_aux=True)(state.params)
    updates, opt_state = make_optimiser().update(grads, state.opt_state)
    rate = learning_rate(config, state.step, horizon)
    params = jax.tree.map(lambda p, u: p - rate * u, state.params, updates)
    step = state.step + config.rollout_size
    return APGState(step, key, params, opt_state, env_state)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def train_chunk(
    config: Config, state: APGState, n_updates: int, horizon: int
) -> APGState:
    """Advance all seeds by n_updates of a run that is horizon steps long."""
    update_all = jax.vmap(functools.partial(update, config, horizon))
    return jax.lax.fori_loop(0, n_updates, lambda _, state: update_all(state), state)


@functools.partial(jax.jit, static_argnums=0)
def evaluate(config: Config, params: Any, count: int) -> jax.Array:
    """Return the noiseless policy's mean return of each seed, at its count-th exam."""
    key = jax.random.fold_in(jax.random.key(EXAM_SEED), count)

    def evaluate_seed(params: Any) -> jax.Array:
        def step(env_state: Pendulum, _: None) -> tuple[Pendulum, jax.Array]:
            mean = make_network(config).apply(params["actor"], observe(env_state))
            return step_envs(env_state, jnp.tanh(mean))

        start = reset_envs(key, config.eval_episodes)
        rewards = jax.lax.scan(step, start, None, config.episode_length)[1]
        return rewards.sum(0).mean()

    return jax.vmap(evaluate_seed)(params)


def train(
    config: Config,
    n_timesteps: int,
    initial_state: APGState | None = None,
    total_timesteps: int | None = None,
    log: Callable[[int, dict[str, float]], object] | None = None,
    reset_optimizer: bool = False,
) -> APGState:
    """Train all seeds for n_timesteps each, from scratch or from initial_state.

    Args:
        config: The run.
        n_timesteps: A multiple of `rollout_size`; with 0 the result is the skeleton.
        initial_state: Where to go on from. It is donated.
        total_timesteps: How long the whole run is, in however many calls: the learning
            rate falls over it, by the state's step. By default the config's.
        log: Is called with step and returns at every multiple of `eval_every`.
        reset_optimizer: Whether the optimiser starts anew; the learning rate does not.
    """
    if n_timesteps % config.rollout_size or config.eval_every % config.rollout_size:
        raise ValueError(f"no multiple of the rollout's {config.rollout_size} steps")
    horizon = total_timesteps or config.total_timesteps
    state = init_agent(config) if initial_state is None else initial_state
    state = restart_optimiser(state) if reset_optimizer else state
    step = int(state.step[0])
    end = step + n_timesteps
    while step < end:
        n = min(end - step, config.eval_every - step % config.eval_every)
        state = train_chunk(config, state, n // config.rollout_size, horizon)
        step += n
        if log is not None and step % config.eval_every == 0:
            returns = evaluate(config, state.params, step // config.eval_every)
            log(step, {f"return_{i}": float(x) for i, x in enumerate(returns)})
    return jax.block_until_ready(state)


def main(argv: Sequence[str] | None = None) -> int:
    """Train with a checkpoint after each chunk; print the final state's digest."""
    parser = argparse.ArgumentParser(description="Train APG on a pendulum, resumably.")
    parser.add_argument("--run", metavar="DIR", default="runs/apg")
    parser.add_argument("--total-timesteps", type=int, default=Config.total_timesteps)
    parser.add_argument("--chunk", type=int, default=81_920, help="steps between saves")
    parser.add_argument("--reset-optimizer", action="store_true")
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
        logs=[MetricsLog(os.path.join(args.run, "metrics.csv"))],
        exit_code=START_AGAIN,
    ) as run:
        start = run.restore_or_init(lambda: train(config, n_timesteps=0))
        state = start.state
        for note in start.notes:  # of another total, say: it is part of the run
            print(f"note: {note}")
        if args.reset_optimizer and start.restored:
            print(
                f"the optimiser starts anew at step {start.step}; the learning rate "
                f"goes on: it falls to 0 at step {config.total_timesteps}"
            )
            state = train(config, 0, state, reset_optimizer=True)
        while (left := config.total_timesteps - int(state.step[0])) > 0:
            state = train(config, min(args.chunk, left), state, log=run.log)
            run.step(state, step=state.step)
            if run.stop_requested:
                break
    print(f"digest: {state_digest(state)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
