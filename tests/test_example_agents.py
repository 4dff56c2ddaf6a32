"""The example agents: a run cut anywhere is the one that never stopped.

Each is made small, and advances by the `train` of its file; what it logs on the way
belongs to the comparison. The rows are in example_agents.py.
"""

import ast
import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from example_agents import (
    AGENTS,
    CASES,
    EXAMPLES,
    Agent,
    advance_all,
    all_skeletons,
    compile_quickly,
)
from jax.experimental.compilation_cache import compilation_cache

from ajaxckpt import (
    Run,
    open_checkpoint,
    read_metrics,
    restore_into,
    save_checkpoint,
)
from ajaxckpt._patterns import select_names
from ajaxckpt._tree import flatten_state
from ajaxckpt.testing import (
    assert_resume_equivalent,
    assert_same_state,
    find_insensitive_leaves,
)

CACHE = {
    "jax_persistent_cache_min_compile_time_secs": 0.2,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}


def each(condition: str = "file") -> pytest.MarkDecorator:
    """Parametrise over the agents for which an attribute of the case is true."""
    return pytest.mark.parametrize(
        "agent",
        [
            pytest.param(
                AGENTS[case.file],
                id=case.file,
                marks=pytest.mark.slow if case.slow else (),
            )
            for case in CASES
            if getattr(case, condition)
        ],
    )


each_group = pytest.mark.parametrize(
    ("agent", "group"),
    [
        pytest.param(
            AGENTS[case.file],
            group,
            id=f"{case.file}-{group}",
            marks=pytest.mark.slow if case.slow else (),
        )
        for case in CASES
        for group in case.groups
    ],
)


@pytest.fixture(scope="module", autouse=True)
def settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Compile quickly, and leave what is compiled where a fresh process finds it."""
    folder = tmp_path_factory.mktemp("compiled")
    wanted = {**CACHE, "jax_compilation_cache_dir": str(folder)}
    before = {name: getattr(jax.config, name) for name in wanted}
    for name, value in wanted.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()  # or it stays unused, as it was
    compile_quickly()
    yield folder
    compile_quickly(False)
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def test_every_example_agent_has_a_row() -> None:
    agents = {path.stem for path in EXAMPLES.glob("*.py") if trains_by_steps(path)}
    assert agents == set(AGENTS)


def trains_by_steps(path: Path) -> bool:
    """Tell whether a file has a `train` that takes n_timesteps, as agents have."""
    return any(
        isinstance(node, ast.FunctionDef)
        and node.name == "train"
        and "n_timesteps" in [argument.arg for argument in node.args.args]
        for node in ast.walk(ast.parse(path.read_text()))
    )


@each()
def test_a_run_cut_anywhere_is_the_run_that_never_stopped(agent: Agent) -> None:
    assert_resume_equivalent(
        agent.make_skeleton,
        agent.advance,
        total=agent.total,
        split=list(agent.case.split),
    )


@each()
def test_the_cuts_are_amid_episodes_and_amid_schedules(agent: Agent) -> None:
    case = agent.case
    full = []
    for cut in case.split[:3]:
        state, _ = agent.advance(agent.make_skeleton(), cut)
        amid = np.asarray(case.amid(state)).reshape(len(state.step), -1)
        assert (amid > 0).any(axis=-1).all()
        assert 0 < state.step[0] == cut < agent.total
        if case.full_at is not None:
            assert (np.asarray(state.buffer.is_full) == (cut >= case.full_at)).all()
            full.append(cut >= case.full_at)
    assert case.full_at is None or full == [False, True, True]


@each("evaluates")
def test_evaluations_stand_at_their_cadence_whatever_the_cuts(agent: Agent) -> None:
    state, rows = agent.make_skeleton(), []
    for part in np.diff([0, *agent.case.split[3], agent.total]):
        state, more = agent.advance(state, int(part))
        rows += more
    every = agent.config.eval_every
    expected = list(range(every, agent.total + 1, every))
    assert [row["step"] for row in rows] == expected
    _, whole = agent.advance(agent.make_skeleton(), agent.total)
    assert rows == whole


@each("evaluates")
def test_evaluations_disturb_nothing(agent: Agent) -> None:
    watched, rows = agent.advance(agent.make_skeleton(), agent.total)
    with jax.numpy_rank_promotion("allow"):
        unwatched = agent.module.train(agent.config, agent.total)
    assert rows
    assert_same_state(watched, unwatched)


@each("scheduled")
def test_schedules_run_over_the_total_not_over_the_call(agent: Agent) -> None:
    near, _ = agent.advance(agent.make_skeleton(), agent.total)
    same, far = (
        agent.advance(agent.make_skeleton(), agent.total, total_timesteps=horizon)[0]
        for horizon in (agent.total, 10 * agent.total)
    )
    assert int(near.step[0]) == int(far.step[0])
    assert equal(near.params, same.params)
    assert not equal(near.params, far.params)


def equal(a: Any, b: Any) -> bool:
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.array_equal(x, y) for x, y in pairs)


@each_group
def test_a_forgotten_group_is_named(agent: Agent, group: str) -> None:
    patterns = agent.case.groups[group]

    def forget(skeleton: Any, path: str) -> Any:
        return restore_into(skeleton, path, keep=patterns)

    with pytest.raises(AssertionError) as failed:
        assert_resume_equivalent(
            agent.make_skeleton,
            agent.advance,
            total=agent.total,
            split=agent.case.split[1],
            restore=forget,
            compare_whole=False,
        )
    message = str(failed.value)
    assert message.startswith("the checkpoint changes it")
    named = message.splitlines()[1].split()[0]
    assert named in leaves_of(agent, group)


@each()
def test_every_group_changes_how_the_run_ends(agent: Agent) -> None:
    found = find_insensitive_leaves(
        agent.make_skeleton,
        agent.advance,
        total=agent.total,
        split=agent.case.split[2],
        groups=agent.case.groups,
    )
    assert list(found.noticed) == list(agent.case.groups), str(found)
    for group, leaf in found.noticed.items():
        assert leaf in leaves_of(agent, group), group


def leaves_of(agent: Agent, group: str) -> set[str]:
    names = list(flatten_state(agent.make_skeleton()).leaves)
    return select_names(agent.case.groups[group], names, argument="patterns")


@each()
def test_no_part_of_a_rollout_is_trained(agent: Agent) -> None:
    rollout = agent.case.rollout
    if rollout == 1:
        assert int(agent.advance(agent.make_skeleton(), 3)[0].step[0]) == 3
        return
    with pytest.raises(
        ValueError, match=f"no multiple of the rollout's {rollout} step"
    ):
        agent.advance(agent.make_skeleton(), rollout + rollout // 2)


@each("evaluates")
def test_stopped_by_a_signal_and_started_again_it_ends_with_the_same_digest(
    agent: Agent,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    module, every = agent.module, agent.config.eval_every
    monkeypatch.setattr(module, "Config", agent.small)
    evaluate = module.evaluate

    def signalled(*args: Any) -> Any:
        if args[-1] == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(*args)

    def main(directory: Path) -> int:
        with jax.numpy_rank_promotion("allow"):
            return module.main(["--run", str(directory), "--chunk", "8"])

    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert main(whole) == 0
    unbroken = capsys.readouterr().out
    assert "digest: " in unbroken
    with monkeypatch.context() as patched:
        patched.setattr(module, "evaluate", signalled)
        with pytest.raises(SystemExit) as left:
            main(stopped)
    assert left.value.code == module.START_AGAIN
    newest = Run(stopped).newest()
    assert newest is not None and 2 * every <= newest.step < 3 * every
    capsys.readouterr()
    assert main(stopped) == 0
    assert capsys.readouterr().out == unbroken
    assert curve(stopped) == curve(whole)
    assert [row["step"] for row in curve(whole)][:2] == [every, 2 * every]


@pytest.mark.parametrize("agent", AGENTS.values(), ids=AGENTS)
@pytest.mark.parametrize(
    "arguments",
    [("--chunk", "0"), ("--chunk", "-8"), ("--total-timesteps", "0")],
    ids=" ".join,
)
def test_lengths_that_make_no_run_are_refused_before_there_is_one(
    agent: Agent,
    arguments: tuple[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as left:
        agent.module.main(["--run", str(tmp_path / "run"), *arguments])
    assert left.value.code == 2
    assert arguments[0] in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "agent",
    [a for a in AGENTS.values() if a.case.rollout > 1],
    ids=lambda a: a.case.file,
)
def test_parts_of_a_rollout_are_refused_before_there_is_a_run(
    agent: Agent, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("--chunk", "--total-timesteps"):
        with pytest.raises(SystemExit) as left:
            agent.module.main(["--run", str(tmp_path / "run"), name, "1000001"])
        assert left.value.code == 2
    size = agent.module.Config().rollout_size
    assert f"expected multiples of {size}" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@each("evaluates")
def test_another_total_is_told_since_schedules_run_over_it(
    agent: Agent,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(agent.module, "Config", agent.small)
    command = ["--run", str(tmp_path), "--chunk", "8", "--total-timesteps"]
    with jax.numpy_rank_promotion("allow"):
        assert agent.module.main([*command, "8"]) == 0
        assert "note:" not in capsys.readouterr().out
        assert agent.module.main([*command, "16"]) == 0
    assert "note: config.total_timesteps: 8 then, 16 now" in capsys.readouterr().out


def test_the_target_network_moves_at_its_steps_whenever_updates_come() -> None:
    agent = AGENTS["dqn"]
    config = dataclasses.replace(agent.config, update_every=3, target_every=10)
    with jax.numpy_rank_promotion("allow"):
        before = agent.module.train(config, 19)
        at = agent.module.train(config, 1, initial_state=jax.tree.map(jnp.copy, before))
    assert not equal(before.params, before.target_params)
    assert equal(at.params, at.target_params)


def curve(directory: Path) -> list[dict[str, Any]]:
    rows = read_metrics(directory / "metrics.csv")
    return [{name: row[name] for name in row if name != "run_id"} for row in rows]


@pytest.mark.slow
def test_all_go_on_in_a_fresh_process(
    settings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(settings))
    for name, value in CACHE.items():
        monkeypatch.setenv(name.upper(), str(value))
    assert_resume_equivalent(
        all_skeletons,
        advance_all,
        total=2,
        split=1,
        fresh_process=True,
        compare_whole=False,
    )


OTHER_PYTHON = os.environ.get("AJAXCKPT_OTHER_PYTHON")
GO_ON = """
import sys
import jax
from ajaxckpt import restore_into, save_checkpoint
from example_agents import AGENTS, compile_quickly

compile_quickly()
name, source, end, steps = sys.argv[1:]
state = restore_into(AGENTS[name].make_skeleton(), source)
state, rows = AGENTS[name].advance(state, int(steps))
python = list(sys.version_info[:2])
told = {"rows": rows, "python": python, "jax": jax.__version__}
save_checkpoint(state, end, config=told)
"""


@pytest.mark.slow
@pytest.mark.skipif(
    not OTHER_PYTHON,
    reason="AJAXCKPT_OTHER_PYTHON names no interpreter of another version",
)
def test_another_python_goes_on_to_the_same_end(tmp_path: Path) -> None:
    agent, cut = AGENTS["dqn"], AGENTS["dqn"].case.split[1]
    source, end = tmp_path / "cut", tmp_path / "end"
    state, _ = agent.advance(agent.make_skeleton(), cut)
    save_checkpoint(state, source)
    whole, rows = agent.advance(state, agent.total - cut)

    assert OTHER_PYTHON
    arguments = ["dqn", str(source), str(end), str(agent.total - cut)]
    done = subprocess.run(
        [OTHER_PYTHON, "-c", GO_ON, *arguments],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    with open_checkpoint(end) as checkpoint:
        told = checkpoint.config
    assert told is not None
    assert told["python"] != list(sys.version_info[:2])
    assert told["jax"] == jax.__version__, "another jax compiles other programs"
    assert_same_state(whole, restore_into(agent.make_skeleton(), end))
    assert told["rows"] == rows
