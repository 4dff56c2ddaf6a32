"""SAC on Pendulum-v1 in pure JAX, killed and resumed as often as you like.

    python examples/sac_pendulum.py --run runs/sac_pendulum
    python examples/sac_pendulum.py --resume runs/sac_pendulum total_timesteps=20000

The whole training state is one pytree, so one file holds the run. Training goes in
chunks with a checkpoint after each; start the same command again after a kill and it
ends bit for bit where the run that never stopped ends: the last line, the digest of
the final state, is the same, and so is the curve in metrics.csv. SIGTERM and Ctrl-C
end it after the current chunk, with a checkpoint and an exit code that asks to be
started again (examples/requeue.py does).

All that is in `train_run`: open a run, restore or start, report each step, leave.
Everything above it is an ordinary agent that knows nothing of files.

The algorithm is Soft Actor-Critic with twin critics and automatic temperature
(Haarnoja et al. 2018, https://arxiv.org/abs/1812.05905).
"""

import argparse
import functools
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, NoReturn

import flashbax
import flax.linen as nn
import flax.struct
import gymnax
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

from ajaxckpt import (
    InvalidArgumentError,
    KeepLast,
    MetricsLog,
    Restored,
    Run,
    SaveEvery,
    StepReport,
    describe_differences,
    resume_config,
    state_digest,
)

START_AGAIN = 75  # the exit code after a request to stop: EX_TEMPFAIL

say = functools.partial(print, flush=True)


@dataclass(frozen=True, kw_only=True)
class Config:
    """What a run is: saved with every checkpoint, compared at every resume.

    `total_timesteps` only says how far to go: a longer run continues a shorter one,
    so it takes no part in the comparison.
    """

    env_name: str = "Pendulum-v1"
    seeds: tuple[int, ...] = (0, 1)
    total_timesteps: int = field(default=8_000, compare=False)
    learning_starts: int = 500
    buffer_size: int = 20_000
    batch_size: int = 64
    hidden_size: int = 64
    learning_rate: float = 2e-3
    gamma: float = 0.98
    tau: float = 0.01


def config_from(saved: Mapping[str, Any]) -> Config:
    """Rebuild the Config from its saved form, in which tuples came back as lists."""
    return Config(**{**saved, "seeds": tuple(saved["seeds"])})


# ------------------------------------------------------------------- networks


class Actor(nn.Module):
    """Observation -> mean and log standard deviation of a squashed Gaussian."""

    action_dim: int
    hidden_size: int

    @nn.compact
    def __call__(self, obs: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Map obs[..., obs_dim] to two arrays of shape [..., action_dim]."""
        x = nn.relu(nn.Dense(self.hidden_size)(obs))
        x = nn.relu(nn.Dense(self.hidden_size)(x))
        mean = nn.Dense(self.action_dim, name="mean")(x)
        log_std = nn.Dense(self.action_dim, name="log_std")(x)
        return mean, jnp.clip(log_std, -5.0, 2.0)


class Critic(nn.Module):
    """Observation and action -> one Q value."""

    hidden_size: int

    @nn.compact
    def __call__(self, obs: jax.Array, action: jax.Array) -> jax.Array:
        """Map obs[..., obs_dim] and action[..., action_dim] to q[...]."""
        x = jnp.concatenate([obs, action], axis=-1)
        x = nn.relu(nn.Dense(self.hidden_size)(x))
        x = nn.relu(nn.Dense(self.hidden_size)(x))
        return nn.Dense(1)(x).squeeze(-1)


TwinCritic = nn.vmap(
    Critic,
    variable_axes={"params": 0},
    split_rngs={"params": True},
    in_axes=None,
    out_axes=0,
    axis_size=2,
)


def sample_action(
    actor_output: tuple[jax.Array, jax.Array], key: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Draw tanh-squashed actions in [-1, 1] and their log probabilities."""
    mean, log_std = actor_output
    noise = jax.random.normal(key, mean.shape)
    pre_tanh = mean + jnp.exp(log_std) * noise
    log_normal = -0.5 * noise**2 - log_std - 0.5 * jnp.log(2 * jnp.pi)
    # log(1 - tanh(x)^2) in a form that survives large |x|
    log_det = 2 * (jnp.log(2.0) - pre_tanh - jax.nn.softplus(-2 * pre_tanh))
    return jnp.tanh(pre_tanh), (log_normal - log_det).sum(-1)


# ---------------------------------------------------------------------- state


@flax.struct.dataclass
class Normaliser:
    """Running mean and variance of all observations seen."""

    mean: jax.Array
    var: jax.Array
    count: jax.Array

    def update(self, obs: jax.Array) -> "Normaliser":
        """Take in one observation (Welford's update)."""
        count = self.count + 1
        delta = obs - self.mean
        mean = self.mean + delta / count
        var = self.var + (delta * (obs - mean) - self.var) / count
        return Normaliser(mean=mean, var=var, count=count)

    def __call__(self, obs: jax.Array) -> jax.Array:
        """Normalise observations, whatever their leading axes."""
        return (obs - self.mean) / jnp.sqrt(self.var + 1e-8)


class Transition(NamedTuple):
    """One environment step as the replay buffer keeps it, observations raw."""

    obs: jax.Array
    action: jax.Array
    reward: jax.Array
    terminated: jax.Array
    next_obs: jax.Array


@flax.struct.dataclass
class SACState:
    """The whole run. In a trained state each leaf has a leading axis: the seeds."""

    step: jax.Array
    key: jax.Array
    actor: TrainState
    critic: TrainState
    target_critic_params: Any
    temperature: TrainState
    normaliser: Normaliser
    buffer: Any
    env_state: Any
    obs: jax.Array
    episode_return: jax.Array
    recent_returns: jax.Array  # of the last 10 episodes, newest last, NaN before
    critic_loss: jax.Array


class Parts(NamedTuple):
    """The code of an agent: never saved, built anew from the Config."""

    env: Any
    env_params: Any
    actor: Actor
    critic: Any
    optimiser: optax.GradientTransformation
    buffer: Any


@functools.cache  # one optimiser per Config, so two skeletons share one compilation
def build_parts(config: Config) -> Parts:
    """Build environment, networks, optimiser and buffer functions."""
    env, env_params = gymnax.make(config.env_name)
    action_dim = env.action_space(env_params).shape[0]
    return Parts(
        env=env,
        env_params=env_params,
        actor=Actor(action_dim, config.hidden_size),
        critic=TwinCritic(config.hidden_size),
        optimiser=optax.adam(config.learning_rate),
        buffer=flashbax.make_item_buffer(
            max_length=config.buffer_size,
            min_length=config.learning_starts,
            sample_batch_size=config.batch_size,
        ),
    )


def init_seed(config: Config, seed: jax.Array) -> SACState:
    """Build the state of one seed before its first step."""
    parts = build_parts(config)
    key, key_env, key_actor, key_critic = jax.random.split(jax.random.key(seed), 4)
    obs, env_state = parts.env.reset(key_env, parts.env_params)
    action, zero = jnp.zeros(parts.actor.action_dim), jnp.float32(0)
    actor_params = parts.actor.init(key_actor, obs)
    critic_params = parts.critic.init(key_critic, obs, action)
    create = functools.partial(TrainState.create, tx=parts.optimiser)
    return SACState(
        step=jnp.int32(0),
        key=key,
        actor=create(apply_fn=parts.actor.apply, params=actor_params),
        critic=create(apply_fn=parts.critic.apply, params=critic_params),
        # a copy: one buffer at two places of the state could not be donated
        target_critic_params=jax.tree.map(jnp.copy, critic_params),
        temperature=create(apply_fn=None, params={"log_alpha": zero}),
        normaliser=Normaliser(jnp.zeros_like(obs), jnp.ones_like(obs), zero + 1),
        buffer=parts.buffer.init(Transition(obs, action, zero, zero > 0, obs)),
        # gymnax resets to weak-typed zeros and steps to strong types: start with those,
        # or the second chunk would compile again
        env_state=jax.tree.map(lambda x: x.astype(x.dtype), env_state),
        obs=obs,
        episode_return=zero,
        recent_returns=jnp.full(10, jnp.nan, jnp.float32),
        critic_loss=zero,
    )


@functools.partial(jax.jit, static_argnums=0)
def init_agent(config: Config) -> SACState:
    """Build the state of all seeds before the first step."""
    return jax.vmap(functools.partial(init_seed, config))(jnp.array(config.seeds))


# ------------------------------------------------------------------- training


def collect(config: Config, state: SACState) -> SACState:
    """Take one environment step and store it."""
    parts = build_parts(config)
    key, key_action, key_env = jax.random.split(state.key, 3)
    action = choose_action(config, state, key_action)
    obs, env_state, reward, terminated, truncated, info = parts.env.step(
        key_env, state.env_state, scale_action(parts, action), parts.env_params
    )
    # `obs` may open a new episode: the replay wants the true successor. A time limit is
    # no terminal state: `terminated` alone stops the bootstrap.
    next_obs = info["final_observation"]
    transition = Transition(state.obs, action, reward, terminated, next_obs)
    state = record_return(state, reward, done=terminated | truncated)
    return state.replace(
        step=state.step + 1,
        key=key,
        normaliser=state.normaliser.update(next_obs),
        buffer=parts.buffer.add(state.buffer, transition),
        env_state=env_state,
        obs=obs,
    )


def choose_action(config: Config, state: SACState, key: jax.Array) -> jax.Array:
    """Sample the policy, or uniformly before learning starts."""
    policy = state.actor.apply_fn(state.actor.params, state.normaliser(state.obs))
    action, _ = sample_action(policy, key)
    random_action = jax.random.uniform(key, action.shape, minval=-1.0)
    return jnp.where(state.step < config.learning_starts, random_action, action)


def scale_action(parts: Parts, action: jax.Array) -> jax.Array:
    """Map an action in [-1, 1] to the environment's box."""
    space = parts.env.action_space(parts.env_params)
    return space.low + (action + 1) / 2 * (space.high - space.low)


def record_return(state: SACState, reward: jax.Array, done: jax.Array) -> SACState:
    """Add a reward to the running episode; file its return when it is over."""
    total = state.episode_return + reward
    filed = jnp.append(state.recent_returns[1:], total)
    return state.replace(
        episode_return=jnp.where(done, 0.0, total),
        recent_returns=jnp.where(done, filed, state.recent_returns),
    )


def update(config: Config, state: SACState) -> SACState:
    """Take one gradient step on critics, actor and temperature."""
    key, key_batch, key_next, key_actor = jax.random.split(state.key, 4)
    batch = build_parts(config).buffer.sample(state.buffer, key_batch).experience
    batch = batch._replace(
        obs=state.normaliser(batch.obs), next_obs=state.normaliser(batch.next_obs)
    )
    state, critic_loss = update_critic(config, state, batch, key_next)
    state, entropy = update_actor(state, batch, key_actor)
    # the temperature rises where the entropy is below its target, -action_dim
    excess_entropy = entropy + batch.action.shape[-1]
    temperature = state.temperature.apply_gradients(grads={"log_alpha": excess_entropy})
    target_critic_params = optax.incremental_update(
        state.critic.params, state.target_critic_params, config.tau
    )
    return state.replace(
        key=key,
        temperature=temperature,
        target_critic_params=target_critic_params,
        critic_loss=critic_loss,
    )


def alpha(state: SACState) -> jax.Array:
    """Return the entropy temperature."""
    return jnp.exp(state.temperature.params["log_alpha"])


def update_critic(
    config: Config, state: SACState, batch: Transition, key: jax.Array
) -> tuple[SACState, jax.Array]:
    """Fit both critics to the soft target of the lower target critic."""
    apply = state.critic.apply_fn
    policy = state.actor.apply_fn(state.actor.params, batch.next_obs)
    next_action, next_log_prob = sample_action(policy, key)
    next_q = apply(state.target_critic_params, batch.next_obs, next_action).min(0)
    next_value = next_q - alpha(state) * next_log_prob
    target = batch.reward + config.gamma * (1 - batch.terminated) * next_value

    def loss_fn(params: Any) -> jax.Array:
        return ((apply(params, batch.obs, batch.action) - target) ** 2).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.critic.params)
    return state.replace(critic=state.critic.apply_gradients(grads=grads)), loss


def update_actor(
    state: SACState, batch: Transition, key: jax.Array
) -> tuple[SACState, jax.Array]:
    """Raise soft value under the lower critic; return the policy's entropy too."""

    def loss_fn(params: Any) -> tuple[jax.Array, jax.Array]:
        policy = state.actor.apply_fn(params, batch.obs)
        action, log_prob = sample_action(policy, key)
        q = state.critic.apply_fn(state.critic.params, batch.obs, action).min(0)
        return (alpha(state) * log_prob - q).mean(), -log_prob.mean()

    grads, entropy = jax.grad(loss_fn, has_aux=True)(state.actor.params)
    return state.replace(actor=state.actor.apply_gradients(grads=grads)), entropy


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def train_chunk(config: Config, state: SACState, n_timesteps: jax.Array) -> SACState:
    """Advance all seeds by n_timesteps.

    The number of steps is an argument, not a constant of the program: all chunks run
    one program, so where a run is cut into chunks does not change a bit of it.
    """
    collect_all = jax.vmap(functools.partial(collect, config))
    update_all = jax.vmap(functools.partial(update, config))

    def train_step(_: jax.Array, state: SACState) -> SACState:
        state = collect_all(state)
        learning = state.step[0] >= config.learning_starts  # all seeds are in step
        return jax.lax.cond(learning, update_all, lambda state: state, state)

    return jax.lax.fori_loop(0, n_timesteps, train_step, state)


def train(
    config: Config, n_timesteps: int, initial_state: SACState | None = None
) -> SACState:
    """Train all seeds for n_timesteps each, from scratch or from initial_state.

    Args:
        config: The run.
        n_timesteps: Environment steps per seed. With 0 the result is the fresh state:
            the skeleton that a checkpoint is restored into.
        initial_state: Where to go on from. It is donated: report it before, not after.

    Returns:
        The state after the last step, computed (not merely dispatched).
    """
    state = init_agent(config) if initial_state is None else initial_state
    if n_timesteps > 0:
        state = train_chunk(config, state, jnp.int32(n_timesteps))
    return jax.block_until_ready(state)


# ----------------------------------------------------------------- evaluation


@functools.partial(jax.jit, static_argnames=("config", "n_episodes"))
def evaluate(
    config: Config,
    actor_params: Any,
    normaliser: Normaliser,
    n_episodes: int = 10,
    seed: int = 123,
) -> jax.Array:
    """Run the deterministic policy with the frozen normaliser.

    It takes only what acting needs and a seed of its own, so it cannot disturb a run.

    Returns:
        Mean return over n_episodes for each seed of the run, shape [seeds].
    """
    episode = functools.partial(evaluate_episode, config)
    over_episodes = jax.vmap(episode, in_axes=(None, None, 0))
    over_seeds = jax.vmap(over_episodes, in_axes=(0, 0, None))
    keys = jax.random.split(jax.random.key(seed), n_episodes)
    return over_seeds(actor_params, normaliser, keys).mean(axis=1)


def evaluate_episode(
    config: Config, actor_params: Any, normaliser: Normaliser, key: jax.Array
) -> jax.Array:
    """Return the undiscounted return of one episode, up to the time limit."""
    env, env_params, actor = build_parts(config)[:3]

    def step(carry: tuple[jax.Array, Any], key: jax.Array) -> Any:
        obs, env_state = carry
        mean, _ = actor.apply(actor_params, normaliser(obs))
        action = scale_action(build_parts(config), jnp.tanh(mean))
        obs, env_state, reward, *_ = env.step(key, env_state, action, env_params)
        return (obs, env_state), reward

    key_reset, key_steps = jax.random.split(key)
    step_keys = jax.random.split(key_steps, env_params.max_steps_in_episode)
    _, rewards = jax.lax.scan(step, env.reset(key_reset, env_params), step_keys)
    return rewards.sum()


# -------------------------------------------------------------------- the run


def train_run(config: Config, directory: str, chunk: int) -> SACState:
    """Train up to the total in chunks, from wherever the run has got to.

    Raises:
        SystemExit: the run was asked to stop, and has saved where it stopped.
    """
    with Run(
        directory,
        save=SaveEvery(steps=chunk),
        keep=KeepLast(3),
        config=config,
        logs=[MetricsLog(os.path.join(directory, "metrics.csv"))],
        exit_code=START_AGAIN,
    ) as run:
        start = run.restore_or_init(lambda: train(config, n_timesteps=0))
        tell_start(start, directory)
        state = start.state
        while (left := config.total_timesteps - int(state.step[0])) > 0:
            began = time.perf_counter()
            state = train(config, min(chunk, left), initial_state=state)
            rate = min(chunk, left) / (time.perf_counter() - began)
            metrics = measure(state)
            run.log(state.step, metrics)  # before the save, so that no row is missing
            report = run.step(state, step=state.step, metrics=metrics)
            tell_step(config, state, metrics, rate, report)
            if run.stop_requested:
                say(f"stopped by {run.stop_signal}: start the same command again")
                break
    return state


def measure(state: SACState) -> dict[str, float]:
    """Return the means over all seeds that are recorded."""
    return {
        "return": float(jnp.nanmean(state.recent_returns)),
        "critic_loss": float(state.critic_loss.mean()),
        "alpha": float(alpha(state).mean()),
    }


def tell_start(start: Restored, directory: str) -> None:
    """Print where the run begins, and what is worth knowing about that."""
    for note in start.notes:
        say(f"note: {note}")
    if start.restored:
        say(f"resuming at step {start.step} from {start.path}")
    else:
        say(f"starting: no checkpoint in {directory}")


def tell_step(
    config: Config,
    state: SACState,
    metrics: Mapping[str, float],
    rate: float,
    report: StepReport,
) -> None:
    """Print one line about a chunk."""
    say(
        f"step {report.step:6d}/{config.total_timesteps}  {rate:5.0f} steps/s"
        f"  return {show(jnp.nanmean(state.recent_returns, axis=1))}"
        f"  critic loss {metrics['critic_loss']:.3f}  alpha {metrics['alpha']:.3f}"
        f"  held up {report.waited_seconds + report.snapshot_seconds:.3f} s by saving"
    )


def show(returns: jax.Array) -> str:
    """Render one return per seed."""
    return " ".join(f"{value:7.1f}" for value in returns.tolist())


# --------------------------------------------------------------- command line


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train SAC on Pendulum-v1, resumably.")
    parser.add_argument("--run", metavar="DIR", default="runs/sac_pendulum")
    parser.add_argument(
        "--resume",
        nargs="+",
        metavar=("DIR", "key=value"),
        help="go on with the config saved there, changed as said",
    )
    parser.add_argument("--total-timesteps", type=int, default=Config.total_timesteps)
    parser.add_argument("--seeds", type=int, nargs="+", default=Config.seeds)
    parser.add_argument("--chunk", type=int, default=1_000, help="steps between saves")
    parser.add_argument("--eval-episodes", type=int, default=10)
    args = parser.parse_args(argv)
    if min(args.chunk, args.total_timesteps, args.eval_episodes) < 1:
        parser.error(
            "--chunk, --total-timesteps and --eval-episodes must be at least 1"
        )
    return args


def choose_config(args: argparse.Namespace) -> tuple[str, Config]:
    """Return the run's directory, and the config to go on with.

    Raises:
        SystemExit: the directory is of another config, or an override is refused.
    """
    if args.resume:
        directory, *overrides = args.resume
        return directory, override_config(directory, overrides)
    config = Config(seeds=tuple(args.seeds), total_timesteps=args.total_timesteps)
    saved = Run(args.run).config
    if saved is not None and (changes := describe_changes(saved, config)):
        refuse(f"{args.run} is of another run: {changes}; or say --resume {args.run}")
    return args.run, config


def override_config(directory: str, overrides: Sequence[str]) -> Config:
    """Return a run's saved config with overrides, and print what they change."""
    try:
        config, differences = resume_config(Run(directory).config, overrides)
        changed = config_from(config)
    except (InvalidArgumentError, TypeError) as error:
        refuse(str(error))
    for line in describe_differences(differences):
        say(f"overridden: {line}")
    return changed


def describe_changes(saved: Mapping[str, Any], config: Config) -> str:
    """List the fields in which a saved config is not today's; empty if it is."""
    now = {**asdict(config), "seeds": list(config.seeds)}
    names = sorted((saved.keys() | now.keys()) - {"total_timesteps"})
    return ", ".join(
        f"{name} was {saved.get(name)}, now {now.get(name)}"
        for name in names
        if saved.get(name) != now.get(name)
    )


def refuse(why: str) -> NoReturn:
    """Say why nothing is done, and leave."""
    print(f"refused: {why}", file=sys.stderr)
    raise SystemExit(2)


def main(argv: Sequence[str] | None = None) -> int:
    """Run, evaluate and print the digest of the final state."""
    args = parse_args(argv)
    directory, config = choose_config(args)
    state = train_run(config, directory, args.chunk)
    returns = evaluate(config, state.actor.params, state.normaliser, args.eval_episodes)
    print(f"mean return of {args.eval_episodes} evaluation episodes: {show(returns)}")
    print(f"digest: {state_digest(state)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
