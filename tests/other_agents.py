"""Agents that others wrote: how each is built anew, and how it is trained on.

Every entry is an ``OtherAgent``; what is measured of one stands in
``real_agents_table.py``, which is also the command that makes the committed table.
An agent's library is imported when it is asked for: not all can be installed together.
"""

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

State = Any


@dataclass(frozen=True, kw_only=True)
class OtherAgent:
    """One agent.

    Attributes:
        family: the package it comes from.
        make: returns ``build()`` and ``advance(state, n)``; imports the package.
        total: units of ``advance`` in the whole run.
        splits: where the run is cut: into two parts, or more.
        resize: leaves that outgrow their skeleton.
        cheap: whether it belongs in the default tests.
        rounding: how far apart the whole run and the split one may be, as two
            programs; relative to the largest value of each leaf.
        why: why they are further apart than others, if they are.
        optimised: whether its programs are compiled as by default.
    """

    family: str
    make: Callable[[], tuple[Callable[[], State], Callable[[State, int], State]]]
    total: int
    splits: tuple[tuple[int, ...], ...]
    resize: tuple[str, ...] = ()
    cheap: bool = False
    rounding: float = 1e-5
    why: str = ""
    optimised: bool = False


def is_installed(agent: OtherAgent) -> bool:
    """Tell whether the agent's package can be imported here."""
    return importlib.util.find_spec(MODULES[agent.family]) is not None


MODULES = {"rejax": "rejax", "brax": "brax", "ajax-rl": "ajax"}


# --- rejax -----------------------------------------------------------------------


def with_five_values(env: Any) -> Any:
    """Give a gymnax environment of today the step that rejax 0.1.3 expects."""
    kind = type(env)

    def step(self: Any, key: Any, state: Any, action: Any, params: Any) -> Any:
        stepped = kind.step(self, key, state, action, params)
        obs, state, reward, terminated, truncated, info = stepped
        return obs, state, reward, terminated | truncated, info

    return type(kind.__name__, (kind,), {"step": step})()


def _rejax(name: str, env_name: str, **settings: Any) -> Any:
    def make() -> Any:
        import gymnax
        import jax

        algorithms = importlib.import_module("rejax")
        env, params = gymnax.make(env_name)
        algorithm = getattr(algorithms, name).create(
            env=with_five_values(env),
            env_params=params,
            total_timesteps=200,
            normalize_observations=True,
            **settings,
        )
        # in place of two layers of 64: compiling is nearly all the time of these tests
        nets = {n: getattr(algorithm, n, None) for n in ("agent", "actor", "critic")}
        algorithm = algorithm.replace(
            **{n: net.clone(hidden_layer_sizes=(8,)) for n, net in nets.items() if net}
        )
        fast = {"xla_backend_optimization_level": 0}

        def init(key: Any) -> State:
            return jax.vmap(algorithm.init_state)(jax.random.split(key, 2))

        init_leaves = jax.jit(
            lambda key: jax.tree.leaves(init(key)), compiler_options=fast
        )

        def build() -> State:
            # a new class with every call, as init_state makes it
            key = jax.random.PRNGKey(0)
            treedef = jax.tree.structure(jax.eval_shape(init, key))
            return jax.tree.unflatten(treedef, init_leaves(key))

        compiled: list[Any] = []

        def advance(state: State, n: int) -> State:
            leaves, treedef = jax.tree.flatten(state)

            def iterate(leaves: Any, n: Any) -> Any:
                state = jax.tree.unflatten(treedef, leaves)
                iteration = jax.vmap(algorithm.train_iteration)
                done = jax.lax.fori_loop(0, n, lambda _, s: iteration(s), state)
                return jax.tree.leaves(done)

            # every state is of a class of its own: one program for all takes leaves
            if not compiled:
                compiled.append(jax.jit(iterate, compiler_options=fast))
            return jax.tree.unflatten(treedef, compiled[0](leaves, n))

        return build, advance

    return cache(make)


_OFF_POLICY: dict[str, Any] = {
    "num_envs": 2,
    "buffer_size": 64,
    "fill_buffer": 16,
    "batch_size": 4,
}
_ON_POLICY: dict[str, Any] = {"num_envs": 2, "num_steps": 4, "num_minibatches": 2}
_SPLITS = ((20,), (7,), (3, 25))

AGENTS: dict[str, OtherAgent] = {
    "rejax DQN": OtherAgent(
        family="rejax",
        make=_rejax("DQN", "CartPole-v1", exploration_fraction=0.9, **_OFF_POLICY),
        total=40,
        splits=((20,), (7,), (3, 34)),
        cheap=True,
    ),
    "rejax PQN": OtherAgent(
        family="rejax",
        make=_rejax("PQN", "CartPole-v1", exploration_fraction=0.9, **_ON_POLICY),
        total=40,
        splits=_SPLITS,
        cheap=True,
    ),
    "rejax IQN": OtherAgent(
        family="rejax",
        make=_rejax("IQN", "CartPole-v1", exploration_fraction=0.9, **_OFF_POLICY),
        total=40,
        splits=((20,), (7,), (3, 34)),
    ),
    "rejax SAC": OtherAgent(
        family="rejax",
        make=_rejax("SAC", "Pendulum-v1", **_OFF_POLICY),
        total=40,
        splits=((20,), (7,), (3, 34)),
    ),
    "rejax TD3": OtherAgent(
        family="rejax",
        make=_rejax("TD3", "Pendulum-v1", **_OFF_POLICY),
        total=40,
        splits=((20,), (7,), (3, 34)),
    ),
    "rejax PPO": OtherAgent(
        family="rejax",
        make=_rejax("PPO", "CartPole-v1", **_ON_POLICY),
        total=40,
        splits=_SPLITS,
    ),
}


# --- brax: its training states, built from its parts -------------------------------


def _brax(name: str) -> Any:
    def make() -> Any:
        import jax
        import jax.numpy as jnp
        import optax
        from brax.training import types
        from brax.training.acme import running_statistics, specs

        train = importlib.import_module(f"brax.training.agents.{name}.train")
        networks = importlib.import_module(f"brax.training.agents.{name}.networks")
        losses = importlib.import_module(f"brax.training.agents.{name}.losses")
        made = getattr(networks, f"make_{name}_networks")(
            3,
            1,
            preprocess_observations_fn=running_statistics.normalize,
            **(
                {"policy_hidden_layer_sizes": (8,), "value_hidden_layer_sizes": (8,)}
                if name == "ppo"
                else {"hidden_layer_sizes": (8,)}
            ),
        )
        tx = optax.adam(1e-3)
        zero = types.UInt64(hi=0, lo=0)

        def statistics() -> Any:
            return running_statistics.init_state(specs.Array((3,), jnp.float32))

        def build_ppo() -> State:
            key = jax.random.PRNGKey(0)
            params = losses.PPONetworkParams(
                policy=made.policy_network.init(key), value=made.value_network.init(key)
            )
            return train.TrainingState(
                optimizer_state=tx.init(params),
                params=params,
                normalizer_params=statistics(),
                env_steps=zero,
            )

        def build_sac() -> State:
            key, log_alpha = jax.random.PRNGKey(0), jnp.asarray(0.0, jnp.float32)
            policy, q = made.policy_network.init(key), made.q_network.init(key)
            return train.TrainingState(
                policy_optimizer_state=tx.init(policy),
                policy_params=policy,
                q_optimizer_state=tx.init(q),
                q_params=q,
                target_q_params=q,
                gradient_steps=zero,
                env_steps=zero,
                alpha_optimizer_state=tx.init(log_alpha),
                alpha_params=log_alpha,
                normalizer_params=statistics(),
            )

        def learn(network: Any, params: Any, moments: Any, *inputs: Any) -> Any:
            def loss(params: Any) -> Any:
                return (network.apply(inputs[0], params, *inputs[1:]) ** 2).mean()

            updates, moments = tx.update(jax.grad(loss)(params), moments, params)
            return optax.apply_updates(params, updates), moments

        def step_ppo(state: Any, obs: Any) -> Any:
            def loss(params: Any) -> Any:
                norm = state.normalizer_params
                policy = made.policy_network.apply(norm, params.policy, obs)
                value = made.value_network.apply(norm, params.value, obs)
                return (policy**2).mean() + (value**2).mean()

            grads = jax.grad(loss)(state.params)
            updates, moments = tx.update(grads, state.optimizer_state, state.params)
            return state.replace(
                optimizer_state=moments,
                params=optax.apply_updates(state.params, updates),
            )

        def step_sac(state: Any, obs: Any) -> Any:
            norm = state.normalizer_params
            policy = learn(
                made.policy_network,
                state.policy_params,
                state.policy_optimizer_state,
                *(norm, obs),
            )
            q = learn(
                made.q_network,
                state.q_params,
                state.q_optimizer_state,
                *(norm, obs, obs[..., :1]),
            )
            return state.replace(
                policy_params=policy[0],
                policy_optimizer_state=policy[1],
                q_params=q[0],
                q_optimizer_state=q[1],
                target_q_params=optax.incremental_update(
                    q[0], state.target_q_params, 0.1
                ),
                gradient_steps=state.gradient_steps + 1,
            )

        step = {"ppo": step_ppo, "sac": step_sac}[name]

        @jax.jit
        def advance_once(pair: Any) -> Any:
            state, key = pair
            key, key_obs = jax.random.split(key)
            obs = jax.random.normal(key_obs, (4, 3))
            norm = running_statistics.update(state.normalizer_params, obs)
            state = state.replace(normalizer_params=norm, env_steps=state.env_steps + 4)
            return step(state, obs), key

        def advance(state: State, n: int) -> State:
            for _ in range(n):
                state = advance_once(state)
            return state

        builders = {"ppo": build_ppo, "sac": build_sac}
        return lambda: (builders[name](), jax.random.PRNGKey(1)), advance

    return cache(make)


for _name in ("ppo", "sac"):
    AGENTS[f"brax {_name.upper()} state"] = OtherAgent(
        family="brax", make=_brax(_name), total=12, splits=((6,), (1,), (3, 8))
    )


# --- ajax-rl -----------------------------------------------------------------------

_NET = ("8", "relu", "8", "relu")
_NETS: dict[str, Any] = {"actor_architecture": _NET, "critic_architecture": _NET}
_NORMS: dict[str, Any] = {"normalize_observations": True, "normalize_rewards": True}
_REPLAY: dict[str, Any] = {"buffer_size": 64, "batch_size": 4, "learning_starts": 8}
_ROLLOUT: dict[str, Any] = {"n_envs": 2, "n_steps": 8, "n_epochs": 1}
_GRU: dict[str, Any] = {"memory": {"kind": "gru", "hidden_size": 8}}
_WINDOWS: dict[str, Any] = {**_GRU, "burn_in": 2, "sequence_length": 4}
_OWN: dict[str, dict[str, Any]] = {
    # by default the actor learns from step 2,000 on
    "SAC": {"policy_update_start": 8, "alpha_update_start": 8},
    "REDQ": {"num_critics": 3, "num_critic_updates": 2},
}


def _ajax(
    name: str, env: str, settings: dict[str, Any], unit: int, *, rounds_up: bool = False
) -> Any:
    """Build and train an agent of ajax-rl; ``unit`` timesteps are one of ``advance``.

    One that runs n // unit + 1 rollouts is asked for one less; its zero-step call runs
    one. The horizon is passed to every call, as schedules run over it.
    """

    def make() -> Any:
        agent = getattr(importlib.import_module("ajax"), name)(env, **settings)
        options: dict[str, Any] = {"seed": [0, 1], "num_episode_test": 1}
        options["total_timesteps"] = 8 * unit
        if name == "APG":
            options["reset_optimizer_on_resume"] = False

        def build() -> State:
            return agent.train(n_timesteps=0, **options)[0]

        def advance(state: State, n: int) -> State:
            timesteps = (n - 1 if rounds_up else n) * unit
            return agent.train(n_timesteps=timesteps, initial_state=state, **options)[0]

        return build, advance

    return cache(make)


def _ajax_tasks() -> Any:
    """Build TDMPC2MultiTask on episodes of two tasks, of other sizes each."""
    import numpy as np
    from ajax import TDMPC2MultiTask
    from ajax.agents.TDMPC2.dataset import TaskEpisodes, pool_tasks

    draw = np.random.default_rng(0)
    tasks = [
        TaskEpisodes(
            obs=draw.normal(size=(3, 9, obs)).astype(np.float32),
            action=draw.uniform(-1, 1, size=(3, 9, action)).astype(np.float32),
            reward=draw.normal(size=(3, 9)).astype(np.float32),
            episode_length=8,
            name=f"task {obs}",
        )
        for obs, action in ((3, 1), (5, 2))
    ]
    settings = {**_PLANNER, "task_dim": 4, "batch_size": 4}
    agent = TDMPC2MultiTask(pool_tasks(tasks), **settings)
    options: dict[str, Any] = {"seed": [0, 1], "total_timesteps": 48}

    def build() -> State:
        return agent.train(n_timesteps=0, **options)[0]

    def advance(state: State, n: int) -> State:
        return agent.train(n_timesteps=8 * n, initial_state=state, **options)[0]

    return build, advance


_PLANNER: dict[str, Any] = {
    **{"enc_dim": 8, "mlp_dim": 8, "latent_dim": 8, "num_enc_layers": 1, "num_q": 2},
    **{"num_bins": 11, "iterations": 2, "num_samples": 16, "num_elites": 4},
    **{"num_pi_trajs": 2},
}
_DREAMS: dict[str, Any] = {
    **{"n_envs": 2, "units": 8, "deter": 16, "hidden": 8, "classes": 4, "stoch": 4},
    **{"blocks": 2, "enc_layers": 1, "dec_layers": 1, "actor_layers": 1},
    **{"critic_layers": 1, "bins": 11, "batch_size": 2, "batch_length": 4},
    **{"imag_horizon": 3, "train_ratio": 1, "warmup": 4},
}


def _add_ajax(label: str, make: Any, **settings: Any) -> None:
    AGENTS[f"ajax-rl {label}"] = OtherAgent(
        **{"family": "ajax-rl", "make": make, "total": 6, "splits": ((3,),), **settings}
    )


def _add_on_policy(label: str, env: str, **settings: Any) -> None:
    settings = {**_ROLLOUT, **_NORMS, **settings}
    name = label.split()[0]
    _add_ajax(label, _ajax(name, env, settings, 16, rounds_up=True))


_add_ajax(
    "DQN",
    _ajax("DQN", "CartPole-v1", {"architecture": _NET, **_REPLAY, **_NORMS}, 16),
)
_add_on_policy("PPO", "Pendulum-v1", **_NETS, batch_size=8)
_add_ajax(
    "APG",
    _ajax(
        "APG",
        "Pendulum-v1",
        {"actor_architecture": _NET, "n_envs": 2, "horizon": 8},
        *(16,),
    ),
)
for _name in ("SAC", "ASAC", "REDQ", "TD3"):
    _settings = {**_NETS, **_REPLAY, **_NORMS, **_OWN.get(_name, {})}
    _add_ajax(_name, _ajax(_name, "Pendulum-v1", _settings, 16))
    if _name == "SAC":
        # its calls are programs that then round differently
        _add_ajax(
            "SAC, optimised", _ajax(_name, "Pendulum-v1", _settings, 16), optimised=True
        )
_add_ajax(
    "IQL",
    _ajax(
        "IQL",
        "Pendulum-v1",
        {**_NETS, **_REPLAY, "normalize_observations": True},
        *(16,),
    ),
)
_add_ajax("AVG", _ajax("AVG", "Pendulum-v1", _NETS, 16))
_add_on_policy("APO", "Pendulum-v1", **_NETS, batch_size=8)
_add_on_policy("PQN", "CartPole-v1", architecture=_NET, num_minibatches=2)
_add_ajax(
    "UDRL",
    _ajax(
        "UDRL",
        "CartPole-v1",
        {
            "actor_architecture": _NET,
            **{"n_steps": 16, "batch_size": 4, "buffer_capacity": 4},
            **{"n_updates_per_iter": 2, **_NORMS},
        },
        *(16,),
    ),
)
_add_ajax(
    "DreamerV3",
    _ajax("DreamerV3", "CartPole-v1", _DREAMS, 16),
    resize=("replay_state.**",),
)
_add_ajax(
    "TDMPC2",
    _ajax(
        "TDMPC2",
        "Pendulum-v1",
        {**_PLANNER, "batch_size": 4, "seed_steps": 210},
        *(110,),
    ),
    total=4,
    splits=((2,),),
    resize=("buffer_state.**",),
)
_add_ajax("TDMPC2MultiTask", cache(_ajax_tasks))
for _name in ("SAC", "ASAC", "REDQ", "TD3"):
    _settings = {**_NETS, **_REPLAY, **_NORMS, **_WINDOWS, **_OWN.get(_name, {})}
    _add_ajax(f"{_name} GRU", _ajax(_name, "Pendulum-v1", _settings, 16))
_add_on_policy("PPO GRU", "Pendulum-v1", **_NETS, **_GRU, batch_size=8)
