"""Agents that others wrote go on from a checkpoint as from memory, bit for bit."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import example_agents
import jax
import jax.numpy as jnp
import pytest
import real_agents_table
from other_agents import AGENTS, MODULES
from real_agents_table import (
    Row,
    measure,
    read_rows,
    relative_difference,
    write_rows,
)

from ajaxckpt import restore_into
from ajaxckpt._patterns import select_names
from ajaxckpt._tree import flatten_state
from ajaxckpt.testing import assert_resume_equivalent

# what rejax imports runs behind the JAX under test
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning:(tensorflow_probability|distrax|rejax)"
)

ROOT = Path(__file__).parent.parent
CHEAP = [name for name, agent in AGENTS.items() if agent.cheap]


@pytest.fixture(autouse=True)
def promotion() -> Iterator[None]:
    """Let agents add arrays of unlike ranks."""
    with jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.parametrize("name", CHEAP)
def test_cut_by_a_checkpoint_it_is_the_run_handed_over_in_memory(
    name: str, tmp_path: Path
) -> None:
    found = measure(name, tmp_path, new_process=False)
    assert found.holds, str(found)
    assert found.whole == 0.0


@pytest.mark.slow
def test_so_it_is_in_a_new_process(tmp_path: Path) -> None:
    found = measure("rejax DQN", tmp_path)
    assert found.new_process is True


@pytest.mark.slow
def test_the_command_checks_agents_and_leaves_the_page_alone() -> None:
    page = real_agents_table.PAGE
    before = page.read_text()
    command = [sys.executable, real_agents_table.__file__, "--check", "rejax PPO"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("| bitwise | not run | bitwise |") == 1
    assert page.read_text() == before


# the leaves that each group of an agent's state is of
GROUPS = {
    "rejax DQN": {
        "moments": ["q_ts.opt_state.**.mu", "q_ts.opt_state.**.nu"],
        "counts": "q_ts.opt_state.**.count",
        "target": "q_target_params",
        "replay": "replay_buffer.data",
        "cursor": "replay_buffer.index",
        "environment": ["env_state", "last_obs"],
        "normaliser": "obs_rms_state",
        "key": "rng",
        "epsilon's counter": "global_step",
    },
    "rejax PQN": {
        "moments": ["q_ts.opt_state.**.mu", "q_ts.opt_state.**.nu"],
        "counts": "q_ts.opt_state.**.count",
        "environment": ["env_state", "last_obs"],
        "normaliser": "obs_rms_state",
        "key": "rng",
        "epsilon's counter": "global_step",
    },
}


@pytest.mark.parametrize(
    ("name", "group"), [(name, group) for name in GROUPS for group in GROUPS[name]]
)
def test_a_group_of_leaves_that_is_not_restored_is_named(name: str, group: str) -> None:
    agent, patterns = AGENTS[name], GROUPS[name][group]
    build, advance = agent.make()

    def forget(skeleton: Any, path: str) -> Any:
        return restore_into(skeleton, path, keep=patterns)

    with pytest.raises(AssertionError, match="the checkpoint changes it") as failed:
        assert_resume_equivalent(
            build,
            advance,
            total=agent.total,
            split=agent.splits[0][0],
            restore=forget,
            compare_whole=False,
        )
    named = str(failed.value).splitlines()[1].split()[0]
    names = list(flatten_state(build()).leaves)
    assert named in select_names(patterns, names, argument="patterns")


def test_every_agent_that_is_cheap_has_its_groups() -> None:
    assert list(GROUPS) == CHEAP


def test_every_agent_has_a_row_and_each_that_was_measured_is_exact() -> None:
    rows = read_rows()
    assert list(rows) == [*example_agents.AGENTS, *AGENTS]
    for name, agent in AGENTS.items():
        _, _, in_memory, new_process, whole, *_ = rows[name][1:]
        assert (in_memory, new_process) == ("bitwise", "bitwise"), name
        assert whole == "bitwise" or float(whole) <= agent.rounding, name


def test_an_agent_that_is_further_apart_than_others_is_explained() -> None:
    page = real_agents_table.PAGE.read_text()
    for name, agent in AGENTS.items():
        assert bool(agent.why) == (agent.rounding > 1e-5), name
        assert not agent.why or f"- {name}: {agent.why}" in page


def test_every_example_that_trains_by_steps_has_a_row_that_is_bitwise() -> None:
    rows = read_rows()
    files = (ROOT / "examples").glob("*.py")
    train = re.compile(r"^def train\([^)]*\bn_timesteps\b", re.MULTILINE)
    agents = {file.stem for file in files if train.search(file.read_text())}
    assert {"dqn", "sac_pendulum"} <= agents
    assert agents <= set(rows), "run python tests/real_agents_table.py --only …"
    for name in agents:
        _, cuts, *exact, noticed, _, _ = rows[name][1:]
        assert exact == ["bitwise"] * 3, name
        case = example_agents.AGENTS[name].case
        total = example_agents.AGENTS[name].total
        assert cuts == real_agents_table.describe_cuts(case.split, total)
        groups = len(case.groups)
        assert noticed == f"{groups} of {groups}: {', '.join(case.groups)}"


@pytest.mark.parametrize(
    ("a", "b", "apart"),
    [
        (1.0, 1.0, 0.0),
        (float("nan"), float("nan"), 0.0),
        (2.0, 2.5, 0.25),
        (2.0, float("nan"), float("inf")),
        (jnp.int32(3), jnp.int32(4), float("inf")),
        (jnp.float32(1), jnp.float16(1), float("inf")),
    ],
)
def test_how_far_apart_two_states_are(a: Any, b: Any, apart: float) -> None:
    assert relative_difference({"x": a}, {"x": b}) == apart


def row(**changes: Any) -> Row:
    exact: dict[str, Any] = {
        **{"agent": "rejax DQN", "leaves": 41, "cuts": "3 of 6", "seconds": 9},
        **{"in_process": True, "compiles": True, "new_process": True, "whole": 0.0},
        "versions": "rejax 0.1.3",
    }
    return Row(**{**exact, **changes})


@pytest.mark.parametrize(
    ("changes", "holds", "cells"),
    [
        ({}, True, "bitwise | bitwise | bitwise"),
        ({"new_process": None}, True, "bitwise | not run | bitwise"),
        ({"whole": 1e-6}, True, "bitwise | bitwise | 1e-06"),
        ({"whole": 1e-4}, False, "bitwise | bitwise | 1e-04"),
        ({"whole": float("inf")}, False, "bitwise | bitwise | inf"),
        ({"in_process": False}, False, "**differs** | bitwise | bitwise"),
        ({"new_process": False}, False, "bitwise | **differs** | bitwise"),
        ({"compiles": False}, False, "bitwise, **compiles more** | bitwise | bitwise"),
    ],
)
def test_a_row_says_what_does_not_hold(
    changes: dict[str, Any], holds: bool, cells: str
) -> None:
    assert row(**changes).holds == holds
    assert str(row(**changes)) == (
        f"| rejax DQN | 41 | 3 of 6 | {cells} | 9 | rejax 0.1.3 |"
    )


def test_a_row_that_is_made_anew_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.md"
    page.write_text(real_agents_table.PAGE.read_text())
    monkeypatch.setattr(real_agents_table, "PAGE", page)
    rows = read_rows()
    write_rows(rows)
    assert page.read_text() == (ROOT / "ajaxckpt" / "AGENT_TABLE.md").read_text()
    dqn = str(row(leaves=1)).strip("| ").split(" | ")
    write_rows({**rows, "rejax DQN": dqn})
    assert read_rows() == {**rows, "rejax DQN": dqn}
    page.unlink()
    write_rows({"rejax DQN": dqn})
    assert list(read_rows()) == list(rows)
    assert page.read_text().count(str(row(leaves=1))) == 1
    assert set(read_rows()["dqn"][1:]) == {real_agents_table.NOT_MEASURED}


def test_every_family_names_its_package() -> None:
    assert {agent.family for agent in AGENTS.values()} == set(MODULES)
