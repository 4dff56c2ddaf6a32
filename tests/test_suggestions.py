"""What looks like a move is shown as one, with the line that mends it."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import optax
import pytest

from ajaxckpt import Migrations, plan_restore, restore_into, save_checkpoint

W, B = jnp.ones((4, 3)), jnp.ones(3)
DENSE = {"kernel": W, "bias": B}
PARAMS = {"Dense_0": DENSE, "Dense_1": {"kernel": B, "bias": W}}
ADAM = optax.adam(1e-3)
CHAIN = optax.chain(optax.clip_by_global_norm(1.0), ADAM)

CASES: dict[str, tuple[Any, Any, list[str]]] = {
    "an optimiser out of a chain": (
        {"opt": CHAIN.init(PARAMS), "n": 1},
        {"opt": ADAM.init(PARAMS), "n": 0},
        ['step.move("opt.1.0", "opt.0")'],
    ),
    "an optimiser into a chain": (
        {"opt": ADAM.init(PARAMS)},
        {"opt": CHAIN.init(PARAMS)},
        ['step.move("opt.0", "opt.1.0")'],
    ),
    "a node of another name": (
        {"actor": PARAMS, "n": 1},
        {"policy": PARAMS, "n": 0},
        ['step.move("actor", "policy")'],
    ),
    "a level more, and the moments with it": (
        {"params": {"Dense_0": DENSE}, "opt": ADAM.init({"Dense_0": DENSE})},
        {"params": {"t": DENSE}, "opt": ADAM.init({"t": DENSE})},
        [
            'step.move("opt.0.mu.Dense_0", "opt.0.mu.t")',
            'step.move("opt.0.nu.Dense_0", "opt.0.nu.t")',
            'step.move("params.Dense_0", "params.t")',
        ],
    ),
    "a lone leaf": (
        {"old": W, "n": 1},
        {"new": W, "n": 0},
        ['step.move("old", "new")'],
    ),
    "numbered nodes": (
        {"p": {f"layers_{n}": {"kernel": W} for n in range(12)}},
        {"p": {f"layer_{n}": {"w": W} for n in range(12)}},
        ['step.move("p.layers_*.kernel", "p.layer_{1}.w")'],
    ),
    "a leaf gone, a node new": (
        {"w": W, "tau": 0.5},
        {"w": W, "batch": {"obs": B, "act": W}},
        ['step.drop("tau")', 'step.add("batch", from_skeleton=True)'],
    ),
    "another dtype": (
        {"done": jnp.zeros(3, jnp.int8)},
        {"done": jnp.zeros(3, bool)},
        ['step.cast("done", "bool")'],
    ),
    "an axis of one less": (
        {"x": W[None]},
        {"x": W},
        ['step.squeeze("x", axis=0)'],
    ),
    "an axis of one more": (
        {"x": W},
        {"x": W[:, None]},
        ['step.expand("x", size=1, axis=1)'],
    ),
    "a quoted name": (
        {"a.b": W, "n": 1},
        {"c": W, "n": 1},
        ['step.move(\'"a.b"\', "c")'],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_lines_are_right_and_mend_it(name: str, tmp_path: Path) -> None:
    saved, skeleton, lines = CASES[name]
    path = tmp_path / "a.safetensors"
    save_checkpoint(saved, path)
    plan = plan_restore(skeleton, path)
    assert plan.mismatches
    assert list(plan.suggestions) == lines
    text = str(plan)
    assert ("looks like a move" in text) == any(".move(" in line for line in lines)
    names: dict[str, Any] = {"skeleton": skeleton, "path": path}
    code = [line[4:] for line in text.splitlines() if line.startswith("    ")]
    exec("\n".join(code), names)  # as pasted
    assert names["state"] is not None


def test_equal_candidates_are_not_guessed_between(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_checkpoint({"x": DENSE, "y": DENSE}, path)
    plan = plan_restore({"p": DENSE, "q": DENSE}, path)
    assert not any(".move(" in line for line in plan.suggestions)


def test_what_fits_is_never_moved_along(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_checkpoint({"a": {"x": W, "fits": B}}, path)
    plan = plan_restore({"a": {"fits": B}, "b": {"x": W}}, path)
    assert plan.suggestions == ('step.move("a.x", "b.x")',)


def test_below_a_subtree_the_lines_name_the_whole_state(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_checkpoint({"agent": {"old": W}, "n": 1}, path)
    plan = plan_restore({"new": W}, path, subtree="agent")
    assert plan.suggestions == ('step.move("agent.old", "agent.new")',)
    migrations = Migrations("m")
    migrations.step(1, "x").move("agent.old", "agent.new")
    restore_into({"new": W}, path, subtree="agent", migrations=migrations)


def test_what_was_left_out_on_purpose_is_no_suggestion(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_checkpoint({"w": W, "buffer": B}, path, exclude="buffer")
    plan = plan_restore({"w": W, "buffer": B}, path)
    assert plan.suggestions == ()
    assert "left out on purpose" in str(plan)
