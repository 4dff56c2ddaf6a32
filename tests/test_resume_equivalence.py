"""Resume is exact, or the run at fault is named, and the leaf, and the cause."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _resume_agent import (
    HORIZON,
    advance,
    advance_by_hash,
    advance_in_the_parent_only,
    advance_logging,
    advance_logging_the_process,
    make_skeleton,
)
from flax import nnx

from ajaxckpt import (
    InvalidArgumentError,
    LayoutMismatchError,
    UnsupportedLeafError,
    restore_into,
    save_checkpoint,
)
from ajaxckpt._layout import LeafSpec
from ajaxckpt._roles import find_role
from ajaxckpt.testing import (
    Advanced,
    assert_resume_equivalent,
    assert_same_state,
    find_insensitive_leaves,
)

State = dict[str, Any]
ROOT = Path(__file__).parent.parent


def message_of(call: Callable[[], object]) -> str:
    with pytest.raises(AssertionError) as caught:
        call()
    return str(caught.value)


# ------------------------------------------------------------- what is equivalent


def test_a_whole_state_is_equivalent_wherever_it_is_cut(tmp_path: Path) -> None:
    # past a wrapped buffer, mid-schedule, in two parts and in three
    assert_resume_equivalent(
        make_skeleton, advance, total=8, split=[1, 7, (2, 5)], directory=tmp_path
    )
    assert len(list(tmp_path.rglob("*.safetensors"))) == 4


def test_a_state_may_be_donated() -> None:
    step = jax.jit(lambda s: {"w": s["w"] * 2, "n": s["n"] + 1}, donate_argnums=0)

    def donating(state: State, n: int) -> State:
        for _ in range(n):
            state = step(state)
        return state

    def build() -> State:
        return {"w": jnp.arange(3.0), "n": jnp.int32(0)}

    assert_resume_equivalent(build, donating, total=4, split=[2, (1, 2)])


def test_states_on_the_host_are_equivalent() -> None:
    def build() -> State:
        return {"q": np.zeros((3, 2)), "step": 0, "name": "q", "eps": 1.0, "m": None}

    def learn(state: State, n: int) -> State:
        q, step = state["q"].copy(), state["step"]
        for step in range(step + 1, step + n + 1):  # noqa: B020
            rng = np.random.default_rng(step)
            q[rng.integers(3), rng.integers(2)] += rng.normal()
        return {**state, "q": q, "step": step, "eps": 0.9**step}

    assert_resume_equivalent(build, learn, total=7, split=[1, (2, 3)])


def test_equinox_modules_with_functions_among_the_leaves_are_equivalent() -> None:
    def build() -> Any:
        return eqx.nn.MLP(2, 1, 3, 0, key=jax.random.key(0)), jax.random.key(1)

    @eqx.filter_jit
    def once(state: Any) -> Any:
        model, key = state
        key, draw = jax.random.split(key)
        x = jax.random.normal(draw, (2,))
        grads = eqx.filter_grad(lambda m: m(x).sum())(model)
        return eqx.apply_updates(model, grads), key

    def learn(state: Any, n: int) -> Any:
        for _ in range(n):
            state = once(state)
        return state  # a plain pair, and no state with logs

    assert_resume_equivalent(build, learn, total=3, split=2)


def test_an_nnx_state_is_equivalent() -> None:
    graph, _ = nnx.split(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))

    def build() -> Any:
        return nnx.split(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))[1]

    @jax.jit
    def once(state: Any) -> Any:
        return jax.tree.map(lambda x: x * 1.5, nnx.split(nnx.merge(graph, state))[1])

    def learn(state: Any, n: int) -> Any:
        for _ in range(n):
            state = once(state)
        return state

    assert_resume_equivalent(build, learn, total=3, split=1)


ROLLOUT = 4


def roll(state: State, n: int) -> State:
    """Round up to whole rollouts."""
    rollouts = -(-n // ROLLOUT)
    return {"w": state["w"] * 2.0**rollouts, "step": state["step"] + ROLLOUT * rollouts}


def build_rolling() -> State:
    return {"w": jnp.ones(2), "step": jnp.zeros(2, jnp.int32)}


def test_an_agent_that_rounds_up_says_how_far_it_went() -> None:
    def reporting(state: State, n: int) -> Advanced:
        return Advanced(state=roll(state, n), steps=ROLLOUT * -(-n // ROLLOUT))

    assert_resume_equivalent(build_rolling, reporting, total=10, split=[3, (3, 4, 5)])
    assert_resume_equivalent(
        build_rolling, roll, total=10, split=3, step=lambda state: state["step"]
    )


def test_an_agent_that_rounds_up_and_does_not_say_so_is_split_otherwise() -> None:
    message = message_of(
        lambda: assert_resume_equivalent(build_rolling, roll, total=8, split=3)
    )
    # 3 + 5 are asked for, and are 4 + 8
    assert message.startswith("splitting changes it: 2 of 2 leaves differ between one")
    assert (
        "step (a counter): 2 of 2 elements differ, first at [0]: expected 8, found"
        in (message)
    )
    assert "work that each call does once (a first rollout" in message


def test_parts_that_do_not_add_up_are_told() -> None:
    def short_calls_go_further(state: State, n: int) -> Advanced:
        return Advanced(state={"w": state["w"] + 1}, steps=n if n > 4 else n + 1)

    message = message_of(
        lambda: assert_resume_equivalent(
            lambda: {"w": 0.0}, short_calls_go_further, total=6, split=3
        )
    )
    assert "one call of 6 steps and calls of 3 + 2 go 6 and 7 steps" in message
    assert "rounds up to whole rollouts, or begins with one" in message


def test_a_tolerance_is_for_floats_of_the_pattern_alone() -> None:
    def rounding(state: State, n: int) -> State:
        return {**state, "w": (state["w"] + n) * (1 + 1e-7), "n": state["n"] + n}

    def build() -> State:
        return {"w": np.ones(3), "n": 0}

    def check(tolerance: Any) -> None:
        assert_resume_equivalent(build, rounding, total=6, split=3, tolerance=tolerance)

    message = message_of(lambda: check(None))
    assert message.startswith("splitting changes it: 1 of 2 leaves differs between")
    assert "two programs that round differently" in message
    (suggested,) = re.findall(r"tolerance=(\{.*\})", message)
    check(eval(suggested))
    check({"w": (1e-6, 0.0)})
    assert "w" in message_of(lambda: check({"w": 1e-9}))
    assert "w" in message_of(lambda: check({"w": 1e-6, "**": 0.0}))  # the last counts
    with pytest.raises(InvalidArgumentError, match="selects no leaf"):
        check({"v": 1e-6})


# -------------------------------------------------------------- planted faults


def forget(*names: str) -> Callable[[State, str], State]:
    """Return a restore that leaves some leaves as in the skeleton."""

    def restore(skeleton: State, path: str) -> State:
        restored = restore_into(skeleton, path)
        return {**restored, **{name: skeleton[name] for name in names}}

    return restore


DROPPED = {
    "key": ("key", "a PRNG key", "random numbers are drawn a second time"),
    "step": ("step", "a counter", "schedules, evaluations and stop criteria start"),
    "opt": ("opt.0.count", "an optimiser's count", "schedules and bias corrections"),
    "buffer": ("buffer.index", "a buffer cursor", "writing at another row"),
    "rms": ("rms.count", "a normaliser's statistic", "inputs on another scale"),
    "env": ("env.x", "an environment's state", "the episode under way is torn"),
    "params": ("params.w", "a parameter", "not the one that was trained"),
}


@pytest.mark.parametrize("name", DROPPED)
def test_a_dropped_leaf_is_named_with_its_cause(name: str) -> None:
    leaf, role, cause = DROPPED[name]
    message = message_of(
        lambda: assert_resume_equivalent(
            make_skeleton, advance, total=8, split=3, restore=forget(name)
        )
    )
    assert re.match(r"the checkpoint changes it: \d of 13 leaves differs? ", message)
    means = f"Usually means: {leaf} is {role}, and it was not saved or not restored: "
    assert f"\n  {leaf} ({role}): " in message
    assert means in message
    assert cause in message.split(means)[1]
    assert message.splitlines()[-1].startswith("To mend: ")


def test_a_save_of_the_policy_alone_is_named() -> None:
    def save(state: State, path: str) -> None:
        save_checkpoint({"params": state["params"]}, path)

    def restore(skeleton: State, path: str) -> State:
        kept = [name for name in skeleton if name != "params"]
        return restore_into(skeleton, path, keep=kept)

    message = message_of(
        lambda: assert_resume_equivalent(
            make_skeleton, advance, total=8, split=3, save=save, restore=restore
        )
    )
    assert message.startswith("the checkpoint changes it: 12 of 13 leaves differ")
    assert "key is a PRNG key, and it was not saved" in message


def test_what_is_left_out_on_purpose_is_listed() -> None:
    message = message_of(
        lambda: assert_resume_equivalent(
            make_skeleton, advance, total=8, split=3, exclude="buffer", keep="buffer"
        )
    )
    assert message.startswith("the checkpoint changes it: ")
    assert "at the end of the run cut at 3 of 8" in message
    assert "(exclude=, keep=, ignore=): buffer.index, buffer.obs" in message


def make_strong(skeleton: State, path: str) -> State:
    restored = restore_into(skeleton, path)
    return {**restored, "step": jnp.asarray(np.asarray(restored["step"]))}


def test_a_lost_weak_type_is_named() -> None:
    message = message_of(
        lambda: assert_resume_equivalent(
            make_skeleton, advance, total=8, split=3, restore=make_strong
        )
    )
    assert "step (a counter): expected ~int32[], found int32[]" in message
    assert "one lost or gained a weak type" in message


def commit(skeleton: State, path: str) -> State:
    restored = restore_into(skeleton, path)
    return {**restored, "step": jax.device_put(restored["step"], jax.devices()[0])}


def test_a_compile_that_memory_does_not_need_is_told() -> None:
    def check(**options: Any) -> None:
        assert_resume_equivalent(
            make_skeleton, advance, total=8, split=3, restore=commit, **options
        )

    message = message_of(check)
    assert re.match(
        "the checkpoint changes it: programs that advance compiled after the restore: "
        r"1, with the state handed over in memory: 0\n  step: handed over on .*, "
        "uncommitted, restored on .*, committed\nUsually means: ",
        message,
    )
    check(compare_compiles=False)


def test_code_that_is_built_anew_compiles_through_no_fault_of_the_checkpoint() -> None:
    @jax.tree_util.register_pytree_node_class
    class WithCode:
        def __init__(self, w: jax.Array, tx: Any) -> None:
            self.w, self.tx = w, tx

        def tree_flatten(self) -> Any:
            return (self.w,), self.tx

        @classmethod
        def tree_unflatten(cls, tx: Any, leaves: Any) -> Any:
            return cls(leaves[0], tx)

    once = jax.jit(lambda state: WithCode(state.w * 2, state.tx))
    before = once._cache_size()

    def learn(state: Any, n: int) -> Any:
        for _ in range(n):
            state = once(state)
        return state

    def build() -> Any:
        return WithCode(jnp.ones(3), optax.sgd(0.1))  # closures of its own

    assert_resume_equivalent(build, learn, total=3, split=1)
    assert once._cache_size() > before + 1


def test_an_agent_that_is_not_deterministic_is_told_apart() -> None:
    rng = np.random.default_rng()

    def noisy(state: State, n: int) -> State:
        return {**state, "w": state["w"] + rng.normal(), "n": state["n"] + n}

    def build() -> State:
        return {"w": jnp.ones(3), "n": 0}

    message = message_of(
        lambda: assert_resume_equivalent(build, noisy, total=4, split=2)
    )
    assert message.startswith(
        "the agent is not deterministic: 1 of 2 leaves differs between two equal calls "
        "of 4 steps\n  w (a parameter): 3 of 3 elements differ, first at [0]: "
    )
    assert "no leaf of the state is a PRNG key" in message
    message = message_of(
        lambda: assert_resume_equivalent(
            lambda: {"w": rng.normal(size=3)}, lambda s, n: s, total=4, split=2
        )
    )
    assert "between two calls of make_skeleton" in message


def over_the_call(state: State, n: int) -> State:
    """Let a learning rate decay over the call instead of the horizon."""
    w = state["w"]
    for i in range(n):
        w = w - 0.1 * (1 - i / n)
    return {"w": w, "step": state["step"] + n}


def over_the_horizon(state: State, n: int) -> State:
    w = state["w"]
    for i in range(state["step"], state["step"] + n):
        w = w - 0.1 * (1 - i / HORIZON)
    return {"w": w, "step": state["step"] + n}


def build_scheduled() -> State:
    return {"w": np.ones(3), "step": 0}


def test_a_schedule_over_the_call_is_told_apart() -> None:
    assert_resume_equivalent(build_scheduled, over_the_horizon, total=6, split=3)
    message = message_of(
        lambda: assert_resume_equivalent(
            build_scheduled, over_the_call, total=6, split=3
        )
    )
    assert message.startswith("splitting changes it: 1 of 2 leaves differs between one")
    assert (
        "no checkpoint involved\n  w (a parameter): 3 of 3 elements differ" in message
    )
    assert (
        "Usually means: a schedule that runs over the steps of the call, not over the "
        "horizon" in message
    )
    assert "total_timesteps" in message.splitlines()[-1]
    # the layer's own promise holds all the same
    assert_resume_equivalent(
        build_scheduled, over_the_call, total=6, split=3, compare_whole=False
    )


@pytest.mark.parametrize(
    ("leaf", "cause"),
    [
        ("key", "a PRNG key: a key is derived from the seed or the call"),
        ("step", "a counter: two calls go another way than one"),
        ("rms", "a normaliser's statistic: the statistics are set up again"),
    ],
)
def test_what_each_call_sets_up_again_is_named(leaf: str, cause: str) -> None:
    def forgetful(state: State, n: int) -> State:
        fresh = make_skeleton()[leaf]
        like = jax.tree.map(lambda a, b: jnp.asarray(a), fresh, state[leaf])
        return advance({**state, leaf: like}, n)

    message = message_of(
        lambda: assert_resume_equivalent(make_skeleton, forgetful, total=8, split=3)
    )
    assert message.startswith("splitting changes it: ")
    assert cause in message


def test_state_outside_the_state_is_told_apart_from_what_was_not_restored() -> None:
    held = {"scale": 1.0}

    def build() -> State:
        held["scale"] = 1.0
        return {"w": np.ones(2)}

    def learn(state: State, n: int) -> State:
        for _ in range(n):
            held["scale"] += 1  # a counter outside the state
            state = {"w": state["w"] + held["scale"]}
        return state

    message = message_of(
        lambda: assert_resume_equivalent(build, learn, total=4, split=2)
    )
    assert message.startswith("the checkpoint changes it: 1 of 1 leaf differs at the")
    assert "every leaf was restored as it was saved, so something outside" in message


def test_what_was_restored_rightly_is_not_blamed_at_the_next_cut() -> None:
    held = {"scale": 1.0}

    def build() -> State:
        held["scale"] = 1.0
        return {"w": np.ones(2)}

    def learn(state: State, n: int) -> State:
        held["scale"] += 1
        return {"w": state["w"] + held["scale"]}

    message = message_of(
        lambda: assert_resume_equivalent(
            build, learn, total=6, split=[(2, 4)], compare_whole=False
        )
    )
    assert message.startswith(
        "the checkpoint changes it: 1 of 1 leaf differs at 4 steps into the run cut at "
        "2, 4 of 6\n"
    )
    assert "so something outside the state takes part" in message


def test_steps_that_only_the_checkpoint_changes_are_told() -> None:
    held = {"rollout": 4}

    def build() -> State:
        held["rollout"] = 4
        return {"w": np.ones(2)}

    def learn(state: State, n: int) -> Advanced:
        return Advanced(state=state, steps=max(n, held["rollout"]))

    def check(rollout: int) -> None:
        def restore(skeleton: State, path: str) -> State:
            held["rollout"] = rollout
            return restore_into(skeleton, path)

        assert_resume_equivalent(
            build, learn, total=12, split=[(4, 6, 8)], restore=restore
        )

    check(4)
    for rollout, found in ((9, "9 steps"), (1, "more calls"), (5, "5 + 5 steps")):
        message = message_of(lambda rollout=rollout: check(rollout))
        assert message.startswith(
            f"the checkpoint changes it: after the restore it takes {found}, with "
        )
        assert "something outside the state" in message


@pytest.mark.parametrize("seen", ["at once", "after a call", "in the whole run's"])
def test_chance_is_told_apart_wherever_it_is_first_seen(seen: str) -> None:
    calls = iter(range(100))

    def learn(state: State, n: int) -> State:
        call = 1e-9 * next(calls) * (seen == "at once" or state["step"] > 0)
        return {"w": state["w"] + n + call, "step": state["step"] + n}

    tolerance = None if seen == "in the whole run's" else {"w": 1e-3}
    message = message_of(
        lambda: assert_resume_equivalent(
            build_scheduled,
            learn,
            total=6,
            split=3,
            compare_whole=seen != "at once",
            tolerance=tolerance,
        )
    )
    assert message.startswith(
        "the agent is not deterministic: 1 of 2 leaves differs between two equal runs "
        "cut at 3 of 6, in memory\n  w ("
    )


@dataclasses.dataclass
class Counted:
    x: Any
    n: int = 0


class CountedModule(eqx.Module):
    x: Any
    n: int = eqx.field(static=True, default=0)


@flax.struct.dataclass
class CountedStruct:
    x: Any
    n: int = flax.struct.field(pytree_node=False, default=0)


@jax.tree_util.register_pytree_node_class
class CountedNode(Counted):
    def tree_flatten(self) -> Any:
        return (self.x,), {"n": self.n}

    @classmethod
    def tree_unflatten(cls, static: Any, leaves: Any) -> Any:
        return cls(leaves[0], **static)


jax.tree_util.register_dataclass(Counted, ["x"], ["n"])


@pytest.mark.parametrize(
    ("node", "name"),
    [
        (Counted, "a.n: expected 3, found 0"),
        (CountedModule, "a.n: expected 3, found 0"),
        (CountedStruct, "a.n: expected 3, found 0"),
        (CountedNode, "a<static 0>: expected {'n': 3}, found {'n': 0}"),
    ],
)
def test_static_data_that_moves_is_named(node: Any, name: str) -> None:
    def learn(state: State, n: int) -> State:
        # read too late for the end of this run to tell
        step = 5.0 if state["a"].n > 1000 else 1.0
        return {"a": node(state["a"].x + step * n, state["a"].n + n)}

    def build() -> State:
        return {"a": node(np.zeros(2))}

    def check(**options: Any) -> None:
        assert_resume_equivalent(build, learn, total=6, split=3, **options)

    message = message_of(check)
    assert message.startswith(
        "the checkpoint changes it: static data moved on the way to 3 of 6, and is the "
        f"new skeleton's after the restore\n  {name}\nUsually means: a field that is "
    )
    message = message_of(
        lambda: find_insensitive_leaves(build, learn, total=6, split=3)
    )
    assert "static data moved on the way to 3 of 6, and is the new " in message

    def restore(skeleton: State, path: str) -> State:
        x = restore_into(skeleton, path)["a"].x
        return {"a": node(x, int(x[0]))}

    check(restore=restore)


def test_functions_that_move_are_named_and_code_built_anew_is_not() -> None:
    names = iter(map(str, range(100)))

    @dataclasses.dataclass(frozen=True)
    class Config:
        schedule: Any
        name: str  # of each skeleton its own, and never moved

    def build() -> State:
        config = Config(lambda n: 0.1 * n, next(names))
        return {"a": CountedModule(np.zeros(2), config), "f": jnp.sin}

    def same(state: State, n: int) -> State:
        x = state["a"].x + n
        return {"a": CountedModule(x, state["a"].n), "f": state["f"]}

    assert_resume_equivalent(build, same, total=6, split=[3, (2, 4)])
    message = message_of(
        lambda: assert_resume_equivalent(
            build, lambda s, n: {**same(s, n), "f": jnp.cos}, total=6, split=3
        )
    )
    assert "static data moved on the way" in message
    assert "\n  f: expected " in message
    assert "cos" in message


def spoil_value(state: State) -> None:
    state["x"] = state["x"] + 1


def spoil_cache(state: State) -> None:
    del state["x"]


def spoil_buffer(state: State) -> None:
    state["buffer"][:] = 0


def spoil_array(state: State) -> None:
    state["w"].delete()


def spoil_static(state: State) -> None:
    state["s"].n += 1


@pytest.mark.parametrize("cut", [0, 1])
@pytest.mark.parametrize(
    ("spoil", "leaf"),
    [
        (spoil_value, "x (a leaf): 2 of 2 elements differ"),
        (spoil_cache, "x (a leaf): expected numpy float64[2], found nothing"),
        (spoil_buffer, "buffer (a buffer's content): 2 of 2 elements"),
        (spoil_array, "w: the array was donated or deleted"),
        (spoil_static, "s.n: expected 0, found 1"),
    ],
)
def test_a_save_that_changes_the_state_is_blamed(
    spoil: Callable[[State], None], leaf: str, cut: int
) -> None:
    def build() -> State:
        arrays = {"x": np.ones(2), "buffer": np.ones(2), "w": jnp.ones(2)}
        return {**arrays, "s": Counted(np.ones(1))}

    def learn(state: State, n: int) -> State:
        return {**state, "buffer": state["buffer"] + n}

    saved: list[str] = []

    def save(state: State, path: str) -> None:
        save_checkpoint(state, path)
        saved.append(path)
        if len(saved) > cut:
            spoil(state)

    message = message_of(
        lambda: assert_resume_equivalent(
            build, learn, total=6, split=[(2, 4)], save=save
        )
    )
    assert message.startswith(
        f"the checkpoint changes it: save= changed the state it was given\n  {leaf}"
    )


def test_a_save_that_changes_what_is_beside_the_state_is_blamed() -> None:
    held = {"draws": 0}

    def build() -> State:
        held["draws"] = 0
        return {"x": 0.0}

    def learn(state: State, n: int) -> State:
        held["draws"] += n
        return {"x": state["x"] + held["draws"]}

    def save(state: State, path: str) -> None:
        held["draws"] += 100
        save_checkpoint(state, path)

    def restore(skeleton: State, path: str) -> State:
        held["draws"] = 3
        return restore_into(skeleton, path)

    def learn_by_step(state: State, n: int) -> State:
        for _ in range(n):
            state = learn(state, 1)
        return state

    assert_resume_equivalent(build, learn_by_step, total=6, split=3, restore=restore)
    message = message_of(
        lambda: assert_resume_equivalent(
            build, learn_by_step, total=6, split=3, save=save, restore=restore
        )
    )
    assert message.startswith("the checkpoint changes it: a run that saves goes on as ")
    assert "\n  x (a leaf): expected " in message


def none_at_first(state: State, n: int) -> State:
    return {"x": state["x"] + n, "rms": np.ones(2)}


def growing(state: State, n: int) -> State:
    return {"x": state["x"] + n, "rows": np.append(state["rows"], np.ones(n))}


@pytest.mark.parametrize(
    ("build", "learn", "leaf"),
    [
        (lambda: {"x": 0.0, "rms": None}, none_at_first, "rms"),
        (lambda: {"x": 0.0, "rows": np.zeros(0)}, growing, "rows"),
    ],
)
def test_what_does_not_restore_is_blamed_on_the_checkpoint(
    build: Any, learn: Any, leaf: str
) -> None:
    start = "the checkpoint changes it: it does not restore into a new skeleton: "
    for check in (assert_resume_equivalent, find_insensitive_leaves):
        with pytest.raises(AssertionError) as caught:
            check(build, learn, total=6, split=3)
        assert str(caught.value).startswith(start)
        assert f"\n  {leaf}" in str(caught.value)
        assert "\nUsually means: the first steps build or grow " in str(caught.value)
        assert isinstance(caught.value.__cause__, LayoutMismatchError)


def test_a_skeleton_that_hands_out_what_was_donated_is_told_so() -> None:
    step = jax.jit(lambda s: {"w": s["w"] * 2}, donate_argnums=0)
    for options in ({}, {"compare_whole": False}):
        shared = jnp.ones(3)
        with pytest.raises(
            InvalidArgumentError, match="make_skeleton hands out what"
        ) as caught:
            assert_resume_equivalent(
                lambda shared=shared: {"w": shared},
                lambda s, n: step(s),
                total=4,
                split=2,
                **options,
            )
        assert str(caught.value).endswith(
            "To mend: build every array anew in make_skeleton, none beside it"
        )


def test_an_error_of_the_agent_passes_through_and_says_where() -> None:
    def failing(state: State, n: int) -> State:
        if n == 2:
            raise RuntimeError("no such environment")
        return {"w": state["w"] + n}

    with pytest.raises(RuntimeError, match="no such environment") as caught:
        assert_resume_equivalent(lambda: {"w": 1.0}, failing, total=5, split=3)
    (note,) = caught.value.__notes__
    assert "cut at 3 of 5, in memory, 3 steps in" in note


@pytest.mark.parametrize("split", [0, 8, [], [(2, 2)], [(5, 3)], [3, 9]])
def test_a_split_that_splits_nothing_is_refused(split: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="split="):
        assert_resume_equivalent(make_skeleton, advance, total=8, split=split)


# ------------------------------------------------------------------------ logs


def build_logged() -> State:
    return {"w": np.float64(1.0), "step": 0}


def make_logging(
    due: Callable[[int, int], bool], value: Callable[[float, int], float]
) -> Callable[[State, int], Any]:
    """Log when due, given the step and the step of the call."""

    def learn(state: State, n: int) -> Any:
        rows, w = [], state["w"]
        for i in range(1, n + 1):
            w, step = w * 1.5, state["step"] + i
            if due(step, i):
                rows.append({"step": step, "eval": {"return": value(w, i)}})
        return {"w": w, "step": state["step"] + n}, rows

    return learn


def test_logs_by_the_step_of_the_state_are_the_same() -> None:
    learn = make_logging(lambda step, _: step % 2 == 0, lambda w, _: w)
    assert_resume_equivalent(build_logged, learn, total=8, split=[3, 4, (1, 6)])


def test_logs_on_the_cadence_of_the_call_are_off_by_one() -> None:
    learn = make_logging(lambda _, i: i % 2 == 0, lambda w, _: w)
    message = message_of(
        lambda: assert_resume_equivalent(build_logged, learn, total=8, split=3)
    )
    assert message.startswith(
        "splitting changes it: the logs differ between one call of 8 steps and calls"
    )
    assert "\n  rows expected at 2, 4, 6, 8\n  rows found at 2, 5, 7\n" in message
    assert "off by one at the cut" in message


def test_logged_values_of_the_call_are_named() -> None:
    learn = make_logging(lambda step, _: step % 2 == 0, lambda w, i: w + i)
    message = message_of(
        lambda: assert_resume_equivalent(build_logged, learn, total=8, split=3)
    )
    assert "\n  logs.4.eval/return (" in message
    assert "a value is taken over the call" in message


def test_logs_may_be_columns_or_kept_elsewhere() -> None:
    def columns(state: State, n: int) -> Any:
        steps = state["step"] + np.arange(1, n + 1)
        return Advanced(
            state={"w": state["w"] + n, "step": state["step"] + n},
            logs={"step": steps, "loss": 1.0 / steps},
        )

    assert_resume_equivalent(build_logged, columns, total=6, split=2)
    kept: list[Any] = []

    def keeping(state: State, n: int, first: int = 0) -> State:
        kept.extend((state["step"] + i + first, {"loss": i}) for i in range(n))
        return {"w": state["w"] + n, "step": state["step"] + n}

    def drain() -> list[Any]:
        rows, kept[:] = list(kept), []
        return rows

    message = message_of(
        lambda: assert_resume_equivalent(
            build_logged, keeping, total=6, split=2, logs=drain
        )
    )
    assert "logs.2.loss" in message
    assert kept == []


def test_logs_that_only_the_checkpoint_changes_are_told() -> None:
    beside = {"best": 0.0}

    def learn(state: State, n: int) -> Any:
        beside["best"] = max(beside["best"], float(state["step"] + n))
        state = {"w": state["w"] + n, "step": state["step"] + n}
        return state, [{"step": state["step"], "best": beside["best"]}]

    def build() -> State:
        beside["best"] = 0.0
        return build_logged()

    def restore(skeleton: State, path: str) -> State:
        beside["best"] = 100.0
        return restore_into(skeleton, path)

    message = message_of(
        lambda: assert_resume_equivalent(
            build, learn, total=8, split=3, restore=restore, compare_whole=False
        )
    )
    assert message.startswith(
        "the checkpoint changes it: the logs after the restore are others"
    )
    assert "logs.8.best" in message
    assert "from outside the state (a running mean or a best that the" in message
    assert "over the call" not in message


def test_rows_that_only_the_checkpoint_changes_are_told() -> None:
    beside = {"calls": 0}

    def learn(state: State, n: int) -> Any:
        beside["calls"] += 1
        state = {"w": state["w"] + n, "step": state["step"] + n}
        rows = [{"step": state["step"], "return": 1.0}]
        return state, rows if beside["calls"] <= 2 else []

    def build() -> State:
        beside["calls"] = 0
        return build_logged()

    def restore(skeleton: State, path: str) -> State:
        beside["calls"] = 2
        return restore_into(skeleton, path)

    message = message_of(
        lambda: assert_resume_equivalent(
            build, learn, total=8, split=3, restore=restore, compare_whole=False
        )
    )
    assert message.startswith("the checkpoint changes it: the logs after the restore")
    assert "\n  rows expected at 8\n  rows found at none\n" in message
    assert "when to log is told from outside the state" in message


def test_logs_of_an_agent_that_is_not_deterministic_are_told() -> None:
    calls = iter(range(100))
    message = message_of(
        lambda: assert_resume_equivalent(
            build_logged, lambda s, n: (s, [{"t": next(calls)}]), total=8, split=3
        )
    )
    assert message.startswith("the agent is not deterministic: two equal calls of 8 ")
    assert "a time, or something else from outside the state, is logged" in message


# --------------------------------------------------------------- fresh process


def test_a_run_goes_on_in_fresh_processes(tmp_path: Path) -> None:
    assert_resume_equivalent(
        make_skeleton, advance_logging, total=6, split=3, fresh_process=True
    )


@pytest.mark.slow
def test_every_later_part_has_a_process_of_its_own(tmp_path: Path) -> None:
    assert_resume_equivalent(
        make_skeleton,
        advance_logging,
        total=6,
        split=[(2, 3)],
        fresh_process=True,
        directory=tmp_path,
    )
    assert len(list(tmp_path.rglob("*-end.safetensors"))) == 2


@pytest.mark.slow
def test_what_only_another_process_shows_is_told() -> None:
    message = message_of(
        lambda: assert_resume_equivalent(
            make_skeleton, advance_by_hash, total=6, split=3, fresh_process=True
        )
    )
    assert message.startswith("the checkpoint changes it in a fresh process: ")
    assert "env.x (an environment's state)" in message
    message = message_of(
        lambda: assert_resume_equivalent(
            make_skeleton,
            advance_in_the_parent_only,
            total=6,
            split=3,
            fresh_process=True,
        )
    )
    assert message.startswith(
        "the checkpoint changes it in a fresh process: the fresh process ended with "
        "exit code 1:\n"
    )
    assert "no display in this process" in message


@pytest.mark.slow
def test_logs_that_only_another_process_changes_are_told() -> None:
    message = message_of(
        lambda: assert_resume_equivalent(
            make_skeleton,
            advance_logging_the_process,
            total=6,
            split=3,
            fresh_process=True,
        )
    )
    assert message.startswith("the checkpoint changes it in a fresh process: the logs")
    assert "logs.4.speed" in message


def test_functions_that_no_process_can_import_are_refused_at_once() -> None:
    def local(state: State, n: int) -> State:
        raise AssertionError("was called")

    for function, why in (
        (local, r"advance cannot be imported: .*\.local is local to a function"),
        (lambda state, n: state, "advance cannot be imported: it is a lambda"),
        (np.add.__call__, "advance cannot be imported: "),
    ):
        with pytest.raises(InvalidArgumentError, match=why) as caught:
            assert_resume_equivalent(
                make_skeleton, function, total=6, split=3, fresh_process=True
            )
        assert "at the top level of a module" in str(caught.value)


# ------------------------------------------------------------- states compared


@pytest.mark.parametrize(
    ("a", "b", "line"),
    [
        (1, 2, "n (a counter): expected 1, found 2; apart by up to 1"),
        (1, 1.0, "n (a counter): expected Python int, found Python float"),
        (1, jnp.int32(1), "n (a counter): expected Python int, found int32[]"),
        (np.ones(2), jnp.ones(2), "n (a leaf): expected numpy float64[2], found "),
        (jnp.ones(2), jnp.ones(3), "n (a leaf): expected float32[2], found float32[3]"),
        (jnp.int32(1), jnp.asarray(1), "expected int32[], found ~int32[]"),
        (jnp.int32(1), jnp.int8(1), "expected int32[], found int8[]"),
        (0.0, -0.0, "expected 0.0, found -0.0; apart by up to 0"),
        ("a", "b", "expected 'a', found 'b'"),
        (
            np.array([1.0, np.nan]),
            np.array([1.0, 2.0]),
            "1 of 2 elements differ, first",
        ),
        (np.uint8(3), np.uint8(255), "expected 3, found 255; apart by up to 252"),
        (jax.random.key(1), jax.random.key(2), "(a PRNG key): expected [0, 1], found "),
        (
            jnp.bfloat16(1),
            jnp.bfloat16(2),
            "expected 1, found 2; apart by up to 1, 5.0e",
        ),
        (1, None, "n (a counter): expected Python int, found nothing"),
    ],
)
def test_states_that_differ_are_told_so(a: Any, b: Any, line: str) -> None:
    message = message_of(lambda: assert_same_state({"n": a}, {"n": b}))
    assert message.startswith("the states differ: 1 of 1 leaf differs\n  ")
    assert line in message
    assert "\nUsually means: " in message
    assert_same_state({"n": a, "z": 0}, {"n": b, "z": 0}, ignore="n")
    assert_same_state({"n": a}, {"n": a})


@pytest.mark.parametrize(
    ("a", "b", "meaning"),
    [
        (1, 1.0, "another type of Python number: a jitted"),
        (1, True, "another type of Python number: a jitted"),
        (1, jnp.int32(1), "as a Python number or in numpy, the other in jax: a jitted"),
        (np.ones(1), jnp.ones(1), "as a Python number or in numpy, the other in jax"),
        (np.ones(()), np.float64(1), "in a numpy array, the other in a scalar"),
        (np.float64(1), 1.0, "in a numpy array, the other in a scalar"),
        ("a", b"a", "data of another type"),
        ("a", 1, "data of another type"),
        (len, 1, "data of another type"),
        (jax.random.key(0), jnp.zeros(2, jnp.uint32), "one holds a typed key"),
        (jnp.zeros(2, jnp.uint32), jax.random.key(0), "one holds a typed key"),
        (jnp.ones(2), jnp.ones(2, int), "at another precision, or converted"),
    ],
)
def test_what_it_means_that_kinds_differ_is_true_of_them(
    a: Any, b: Any, meaning: str
) -> None:
    message = message_of(lambda: assert_same_state({"n": a}, {"n": b}))
    assert meaning in message.split("\nUsually means: ")[1]


def test_more_leaves_than_fit_are_counted_and_all_of_them_are_data() -> None:
    a, b = ({f"x{i:02}": i + j for i in range(15)} for j in (0, 1))
    with pytest.raises(AssertionError, match="15 of 15 leaves differ") as caught:
        assert_same_state(a, b)
    assert "\n  and 5 more\n" in str(caught.value)
    differences: Any = caught.value
    assert [item.name for item in differences.differences] == list(a)


def test_near_is_relative_to_the_leafs_largest_value() -> None:
    a = np.array([1e-9, 1000.0, np.nan, np.inf])
    b = np.array([2e-9, 1000.5, np.nan, np.inf])
    assert_same_state(a, b, tolerance={"**": 1e-3})
    for tolerance in (1e-4, (1e-3, 0.0)):
        with pytest.raises(AssertionError):
            assert_same_state(a, b, tolerance={"**": tolerance})
    assert_same_state(a, b, tolerance={"**": (1e-3, 1e-8)})
    for other in (np.array([1e-9, 1000.0, 0.0, np.inf]), -a):
        with pytest.raises(AssertionError):
            assert_same_state(a, other, tolerance={"**": 1.0})


@pytest.mark.parametrize("tolerance", [1e-6, {"w": "1"}, {"w": -1}, {"w": (1, 2, 3)}])
def test_a_tolerance_that_is_none_is_refused(tolerance: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="tolerance"):
        assert_same_state({"w": 1.0}, {"w": 2.0}, tolerance=tolerance)


def test_a_donated_state_is_refused_by_name() -> None:
    state = {"w": jnp.ones(3)}
    state["w"].delete()
    with pytest.raises(UnsupportedLeafError, match=r"cannot compare: w: .* donated"):
        assert_same_state(state, state)


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("collector_state.rng", "a PRNG key"),
        ("buffer.current_index", "a buffer cursor"),
        ("buffer_state.is_full", "a buffer cursor"),
        ("opt_state.0.count", "an optimiser's count"),
        ("actor.opt_state.0.mu.kernel", "an optimiser's moment"),
        ("obs_norm_info.count", "a normaliser's statistic"),
        ("env_state.time", "a counter"),
        ("hidden_state", "a recurrent memory"),
        ("target_params.w", "a target network"),
        ("critic.params.Dense_0.kernel", "a parameter"),
        ("whatever", "a leaf"),
    ],
)
def test_names_of_real_agents_tell_what_a_leaf_is(name: str, role: str) -> None:
    whole = ("rng", "count", "index", "is_full", "time")
    dtype = "uint32" if name.endswith("rng") else "int32"
    shape = (2,) if name.endswith("rng") else ()
    if not name.endswith(whole):
        dtype = "float32"
    assert find_role(name, LeafSpec(kind="jax", dtype=dtype, shape=shape)).name == role


# ----------------------------------------------------------------- the self-guard


def test_every_leaf_that_counts_is_noticed_and_the_others_are_listed() -> None:
    found = find_insensitive_leaves(make_skeleton, advance, total=8, split=3)
    assert found.unnoticed == ("last_loss",)
    assert found.unchanged == ()
    assert len(found.noticed) == 12
    assert found.noticed["key"] == "key"
    assert found.noticed["buffer.obs"] != ""
    text = "12 of 13 resets are noticed\n  unnoticed: last_loss (a leaf)"
    assert str(found) == text


def test_groups_are_reset_together_and_unchanged_ones_are_told() -> None:
    groups = {"moments": ["opt.*.mu", "opt.*.nu"], "constant": "c"}
    found = find_insensitive_leaves(
        lambda: {**make_skeleton(), "c": jnp.ones(2)},
        lambda s, n: {**advance({k: s[k] for k in s if k != "c"}, n), "c": s["c"]},
        total=8,
        split=3,
        groups=groups,
    )
    assert found.noticed == {"moments": "opt.0.mu.w"}
    assert found.unchanged == ("constant",)
    with pytest.raises(
        InvalidArgumentError, match=r"groups\['a'\]=\"x\" selects no leaf"
    ):
        find_insensitive_leaves(
            make_skeleton, advance, total=8, split=3, groups={"a": "x"}
        )


def test_resets_that_would_show_nothing_are_refused() -> None:
    drawn = iter(range(100))
    beside = {"calls": 0}

    def check(advance: Any, build: Any = build_dead) -> str:
        return message_of(
            lambda: find_insensitive_leaves(build, advance, total=6, split=3)
        )

    def learn(state: State, n: int, more: float = 0) -> State:
        return {"x": state["x"] + n + more, "dead": 0 * state["dead"]}

    found = find_insensitive_leaves(
        lambda: {**build_dead(), "dead": np.ones(1)}, learn, total=6, split=3
    )
    assert found.unnoticed == ("dead",)
    message = check(lambda state, n: learn(state, n, next(drawn)))
    assert message.startswith("the agent is not deterministic: 1 of 2 leaves differs ")

    def build_counting() -> State:
        beside["calls"] = 0
        return build_dead()

    def count(state: State, n: int) -> State:
        beside["calls"] += 1
        return learn(state, n, beside["calls"])

    message = check(count, build_counting)
    assert message.startswith(
        "the checkpoint changes it: nothing was reset, and the end is another\n  x ("
    )
    message = check(learn, lambda: {**build_dead(), "x": np.full(2, next(drawn))})
    assert "between two calls of make_skeleton" in message


def test_an_error_with_nothing_reset_passes_through() -> None:
    calls = iter(range(100))

    def learn(state: State, n: int) -> State:
        if next(calls) == 2:
            raise ValueError("the third call")
        return {"x": state["x"] + n}

    with pytest.raises(ValueError, match="the third call"):
        find_insensitive_leaves(lambda: {"x": 0.0}, learn, total=6, split=3)


def build_dead() -> State:
    return {"x": np.zeros(2), "dead": np.zeros(1)}


def test_a_reset_that_makes_the_agent_fail_is_noticed() -> None:
    def learn(state: State, n: int) -> State:
        if state["step"] and not state["rows"].any():
            raise ValueError("the buffer is empty")
        return {"rows": state["rows"] + 1, "step": state["step"] + n}

    found = find_insensitive_leaves(
        lambda: {"rows": np.zeros(2), "step": 0}, learn, total=4, split=2
    )
    assert found.noticed["rows"] == "ValueError: the buffer is empty"


# ------------------------------------------------------------------- the plugin

MINE = """
def make_skeleton():
    return {"w": 1.0, "step": 0}

def advance(state, n):
    return {"w": state["w"] * 2.0**n, "step": state["step"] + n}

def test_resume_is_exact(assert_resume_equivalent):
    assert_resume_equivalent(make_skeleton, advance, total=4, split=2)

def test_it_fails(assert_resume_equivalent):
    assert_resume_equivalent(make_skeleton, advance, total=4, split=2, keep="step")
"""


def test_the_fixture_takes_three_lines(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(MINE)
    options = ["-q", "-p", "ajaxckpt.pytest_plugin", "-p", "no:cacheprovider"]
    command = [sys.executable, "-W", "error", "-m", "pytest", *options]
    done = subprocess.run(
        [*command, "--basetemp", str(tmp_path / "temp"), "test_mine.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
    )
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert "left out on purpose (exclude=, keep=, ignore=): step" in done.stdout
    # the checkpoints of the failed test can be looked into
    assert list((tmp_path / "temp").rglob("resume/split-0/cut-0.safetensors"))


def test_the_fixture_is_found_by_itself_and_loads_nothing_else() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    name = "ajaxckpt.pytest_plugin"
    assert project["entry-points"]["pytest11"] == {name: name}
    code = f"import sys, {name}; print({{'jax', 'numpy'}} & set(sys.modules))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
