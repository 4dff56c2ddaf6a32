"""The agents of the examples as the comparison calls them, made small: one row each.

A new example is one more `Case`. All that is asked of its file is what the others have:
`Config`, `init_agent(config)`, `train(config, n_timesteps, initial_state,
total_timesteps, log)`, `evaluate(config, …, count)`, `main(argv)` and `START_AGAIN`.
"""

import functools
import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from typing import Any

import jax

EXAMPLES = Path(__file__).parent.parent / "examples"


@dataclass(frozen=True, kw_only=True)
class Case:
    """An example: its file, a small configuration, and what its state holds.

    Attributes:
        file: The example's name, without `.py`.
        config: What differs from the default configuration, `total_timesteps` too.
        split: Three places to cut at, and one pair of places.
        groups: Name to patterns: leaves that belong together. Each must change by the
            second cut, and matter from the third to the end.
        rollout: Steps are trained in multiples of this.
        full_at: The step at which the replay is full, if there is one; it wraps then.
        amid: How far the environments are in their episodes, 0 where one begins.
        scheduled: Whether anything runs over `total_timesteps`.
        evaluates: Whether it logs evaluations, every `eval_every` steps.
        slow: Whether its tests run on demand only.
    """

    file: str
    config: dict[str, Any]
    split: Sequence[Any] = (24, 32, 40, (16, 48))
    groups: dict[str, Any]
    rollout: int = 1
    full_at: int | None = None
    amid: Callable[[Any], Any] = lambda state: state.env_state.time
    scheduled: bool = True
    evaluates: bool = True
    slow: bool = False


GROUPS = {
    "parameters": "params",
    "moments": ["opt_state.**.mu", "opt_state.**.nu"],
    "counts": "opt_state.**.count",
    "environments": ["env_state", "obs"],
    "key": "key",
}
REPLAY = {
    "buffer": "buffer.experience",
    "cursor": ["buffer.current_index", "buffer.is_full"],
}
SMALL = {"hidden_size": 8, "eval_episodes": 2}
ROLLOUTS = {
    **SMALL,
    **{"n_envs": 2, "rollout_length": 4, "n_epochs": 2, "n_minibatches": 2},
    **{"total_timesteps": 64, "eval_every": 16},
}

CASES = [
    Case(
        file="dqn",
        config={
            **SMALL,
            **{"learning_starts": 8, "buffer_size": 24, "batch_size": 4},
            **{"target_every": 10, "exploration": 1.0},
            **{"total_timesteps": 60, "eval_every": 20},
        },
        # the replay is part full, just wrapped, and midway once more
        split=(13, 29, 41, (17, 40)),
        full_at=24,
        groups={
            **GROUPS,
            **REPLAY,
            "target network": "target_params",
            "epsilon's counter": "step",
        },
    ),
    Case(
        file="ppo",
        config=ROLLOUTS,
        rollout=8,
        groups={
            **GROUPS,
            "normaliser of observations": "obs_norm",
            "normaliser of rewards": ["reward_norm", "discounted"],
            "step": "step",
        },
    ),
    Case(
        file="ppo_gru",
        config=ROLLOUTS,
        rollout=8,
        groups={**GROUPS, "memory": "memory", "step": "step"},
        slow=True,
    ),
    Case(
        file="pqn",
        config={**ROLLOUTS, "exploration": 1.0},
        rollout=8,
        groups={**GROUPS, "epsilon's counter": "step"},
        slow=True,
    ),
    Case(
        file="sac_pendulum",
        config={
            **{"learning_starts": 8, "buffer_size": 24, "batch_size": 4},
            **{"hidden_size": 8, "total_timesteps": 60},
        },
        split=(13, 29, 41, (17, 40)),
        full_at=24,
        groups={
            "parameters": ["actor.params", "critic.params"],
            "temperature": "temperature.params",
            "moments": ["**.mu", "**.nu"],
            "counts": "**.count",
            "environments": ["env_state", "obs"],
            "key": "key",
            **REPLAY,
            "target network": "target_critic_params",
            "normaliser": "normaliser",
            "returns": ["episode_return", "recent_returns"],
            "step": "step",
        },
        scheduled=False,
        evaluates=False,
        slow=True,
    ),
    Case(
        file="apg",
        config={
            **SMALL,
            **{"n_envs": 2, "rollout_length": 4, "episode_length": 11},
            **{"total_timesteps": 64, "eval_every": 16},
        },
        rollout=8,
        groups={
            **GROUPS,
            "environments": "env_state",
            "learning rate's counter": "step",
        },
    ),
    Case(
        file="world_model",
        config={
            **SMALL,
            **{"learning_starts": 8, "buffer_size": 24, "batch_size": 2},
            **{"sequence_length": 4, "plan_length": 3, "n_plans": 4, "n_best": 2},
            **{"n_rounds": 2, "total_timesteps": 60, "eval_every": 20},
        },
        # the last cut stands near the end: a plan is soon made anew
        split=(13, 29, 57, (17, 40)),
        full_at=24,
        groups={
            **GROUPS,
            **REPLAY,
            "environments": ["env_state", "obs", "first"],
            "memory": "memory",
            "plan": "plan",
            "noise's counter": "step",
        },
        slow=True,
    ),
]


class Agent:
    """What the comparison calls: `make_skeleton` and `advance` of one example."""

    def __init__(self, case: Case) -> None:
        self.case = case

    @functools.cached_property
    def module(self) -> Any:
        if str(EXAMPLES) not in sys.path:
            sys.path.insert(0, str(EXAMPLES))
        return importlib.import_module(self.case.file)

    @functools.cached_property
    def small(self) -> Any:
        """The example's Config with other defaults: `main` can be given it, too."""
        defaults = [(k, Any, field(default=v)) for k, v in self.case.config.items()]
        return make_dataclass(
            "Small", defaults, bases=(self.module.Config,), frozen=True, kw_only=True
        )

    @functools.cached_property
    def config(self) -> Any:
        return self.small()

    @property
    def total(self) -> int:
        return self.config.total_timesteps

    def make_skeleton(self) -> Any:
        with jax.numpy_rank_promotion("allow"):  # flax adds its biases by promotion
            return self.module.train(self.config, n_timesteps=0)

    def advance(
        self, state: Any, n: int, **horizon: int
    ) -> tuple[Any, list[dict[str, float]]]:
        """Train on for n steps; return the state, and a row for each evaluation."""
        rows: list[dict[str, float]] = []

        def log(step: int, metrics: dict[str, float]) -> None:
            rows.append({"step": step, **metrics})

        if self.case.evaluates:
            horizon["log"] = log
        with jax.numpy_rank_promotion("allow"):
            state = self.module.train(self.config, n, initial_state=state, **horizon)
        return state, rows


AGENTS = {case.file: Agent(case) for case in CASES}


def compile_quickly(yes: bool = True) -> None:
    """Spend less on compiling; another program, so all runs compared must say it."""
    jax.config.update("jax_disable_most_optimizations", yes)


def _publish(agent: Agent) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Make an agent's two functions ones that a fresh process finds in this module."""

    def skeleton() -> Any:
        compile_quickly()  # no fixture runs there
        return agent.make_skeleton()

    def advance(state: Any, n: int) -> Any:
        return agent.advance(state, n)

    for function in (skeleton, advance):
        function.__qualname__ = f"{agent.case.file}_{function.__name__}"
        globals()[function.__qualname__] = function
    return skeleton, advance


PUBLISHED = {name: _publish(agent) for name, agent in AGENTS.items()}


# One fresh process for all of them, which then imports everything once.


def all_skeletons() -> dict[str, Any]:
    compile_quickly()
    return {name: agent.make_skeleton() for name, agent in AGENTS.items()}


def advance_all(states: Any, n: int) -> tuple[Any, list[dict[str, float]]]:
    """Advance each agent by n of two parts: to its second cut, and to its end."""
    after: dict[str, Any] = {}
    rows: list[dict[str, float]] = []
    for name, agent in AGENTS.items():
        cuts = [0, agent.case.split[1], agent.total]
        step = int(states[name].step[0])
        distance = cuts[cuts.index(step) + n] - step
        after[name], logged = agent.advance(states[name], distance)
        rows += [{f"{name}.{key}": x for key, x in row.items()} for row in logged]
    return after, rows
