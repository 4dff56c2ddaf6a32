"""What looks like a move is shown as one, with the line that mends it."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ajaxckpt import Migrations, plan_restore, restore_into, save_checkpoint
from ajaxckpt._layout import LeafSpec, find_problem
from ajaxckpt._suggestions import find_moves

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
    "a leaf that went to the device": (
        {"old": np.ones(3, np.float32), "n": 1},
        {"new": B, "n": 0},
        ['step.move("old", "new")'],
    ),
    "a counter that became an array": (
        {"old": 3, "w": W},
        {"new": jnp.asarray(3), "w": W},
        ['step.move("old", "new")'],
    ),
    "a node of numpy leaves": (
        {"old": {"a": np.ones(3, np.float32), "b": np.ones((4, 3), np.float32)}},
        {"new": {"a": B, "b": W}},
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


SPECS = [
    LeafSpec(kind="jax", dtype="float32", shape=(3,)),
    LeafSpec(kind="jax", dtype="float32", shape=(4, 3)),
    LeafSpec(kind="key", dtype="uint32", key_impl="fry", key_words=2),
    LeafSpec(kind="int"),
]
SEGMENTS = st.sampled_from(["a", "b", "0", "1", "mu", "w"])


def trees(depth: int) -> st.SearchStrategy[Any]:
    leaf = st.sampled_from(SPECS)
    if depth == 0:
        return leaf
    inner = st.dictionaries(SEGMENTS, trees(depth - 1), min_size=1, max_size=3)
    return leaf | inner


def flatten(tree: Any, name: str = "") -> dict[str, LeafSpec]:
    if isinstance(tree, LeafSpec):
        return {name: tree}
    return {
        inner: spec
        for key, below in tree.items()
        for inner, spec in flatten(below, f"{name}.{key}".lstrip(".")).items()
    }


def rename(name: str, source: str, target: str) -> str:
    if name == source:
        return target
    return target + name[len(source) :] if name.startswith(f"{source}.") else name


@settings(max_examples=400, deadline=None)
@given(
    tree=st.dictionaries(SEGMENTS, trees(2), min_size=1, max_size=4),
    data=st.data(),
)
def test_a_renamed_node_is_found_and_nothing_else_moved(
    tree: Any, data: st.DataObject
) -> None:
    file = flatten(tree)
    nodes = {
        ".".join(name.split(".")[:n]) for name in file for n in range(1, len(file) + 3)
    }
    source = data.draw(st.sampled_from(sorted(nodes)))
    skeleton = {rename(name, source, "new.place"): file[name] for name in file}
    missing = {n: spec for n, spec in skeleton.items() if n not in file}
    extra = {n: spec for n, spec in file.items() if n not in skeleton}
    moves = find_moves(missing, extra, list(file))
    moved = dict(file)
    for move in moves:
        for name in file:  # as the line would: everything below the source
            if (new := rename(name, move.source, move.target)) != name:
                assert name in extra
                moved[new] = moved.pop(name)
    assert set(moved) <= {*skeleton, *extra}
    assert all(
        find_problem(skeleton[n], spec) is None
        for n, spec in moved.items()
        if n in skeleton
    )
    # a node of one leaf may look like another that is as new; else all is mended
    assert len(extra) < 2 or set(moved) == set(skeleton)


def test_equal_candidates_are_not_guessed_between(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_checkpoint({"x": DENSE, "y": DENSE}, path)
    plan = plan_restore({"p": DENSE, "q": DENSE}, path)
    (line,) = plan.suggestions
    assert line.startswith("# not guessed")
    assert "not guessed" in str(plan)


def test_many_lines_end_in_a_comment_that_says_how_many_more(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_checkpoint({f"x{chr(97 + n)}": n for n in range(25)}, path)
    lines = plan_restore({}, path).suggestions
    assert lines[0] == 'step.drop("xa")'
    assert lines[20:] == ("# and 5 lines more, like these",)


def test_shifted_layers_are_not_guessed(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_checkpoint({"pi": {f"Dense_{n}": DENSE for n in (0, 1)}}, path)
    plan = plan_restore({"net": {f"Dense_{n}": DENSE for n in (1, 2)}}, path)
    assert [line[:13] for line in plan.suggestions] == ["# not guessed"]


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
