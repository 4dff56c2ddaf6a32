"""Optimiser states in another wrapping: moments and counts keep their bits."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ajaxckpt import (
    LayoutMismatchError,
    MigrationError,
    Migrations,
    Rules,
    migrate_checkpoint,
    optax_moves,
    plan_restore,
    restore_into,
    save_checkpoint,
)

PARAMS = {
    "a": {"w": jnp.linspace(-1.0, 1.0, 12).reshape(3, 4), "b": jnp.ones(4)},
    "c": {"w": jnp.linspace(0.5, 2.0, 4)},
}
LABELS = {"a": "left", "c": "right"}
ADAM = optax.adam(1e-2)
CLIP = optax.clip_by_global_norm(1e6)  # never clips: equal gradients reach adam


def grads(step: int) -> Any:
    return jax.tree.map(lambda x: jnp.sin(x * (step + 1)) + 0.1 * step, PARAMS)


def assert_identical(left: Any, right: Any) -> None:
    """Assert that two trees have equal structure, dtypes, weak types and bits."""
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert (a.dtype, a.shape, a.weak_type) == (b.dtype, b.shape, b.weak_type)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def run(tx: optax.GradientTransformation, state: Any, start: int, count: int) -> Any:
    """Return the last updates and the state after some jitted steps."""
    update = jax.jit(tx.update)
    updates: Any = None
    for step in range(start, start + count):
        updates, state = update(grads(step), state, PARAMS)
    return updates, state


def adam_of(state: Any) -> Any:
    """Return the one ScaleByAdamState of a state built by optax."""
    found = [
        node
        for node in jax.tree.leaves(
            state, is_leaf=lambda x: isinstance(x, optax.ScaleByAdamState)
        )
        if isinstance(node, optax.ScaleByAdamState)
    ]
    (adam,) = found
    return adam


def migrate(
    path: Path,
    old: optax.GradientTransformation,
    new: optax.GradientTransformation,
    move: Callable[[Rules], Rules],
    steps: int = 3,
) -> tuple[Any, Any]:
    """Return the old state, and the new one restored from its file."""
    _, before = run(old, old.init(PARAMS), 0, steps)
    save_checkpoint({"agent": {"opt_state": before}, "n": 1}, path)
    migrations = Migrations("agent")
    move(migrations.step(1, "another optimiser"))
    skeleton = {"agent": {"opt_state": new.init(PARAMS)}, "n": 0}
    restored = restore_into(skeleton, path, migrations=migrations)
    return before, restored["agent"]["opt_state"]


def assert_next_is(
    tx: optax.GradientTransformation, restored: Any, by_hand: Any
) -> None:
    """Assert that state and next update equal those of a state built by hand."""
    assert_identical(restored, by_hand)
    assert_identical(run(tx, restored, 3, 1), run(tx, by_hand, 3, 1))


def assert_close(left: Any, right: Any) -> None:
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=0)


PLACE = "**.opt_state"


def chained(*links: Any) -> optax.GradientTransformation:
    return optax.chain(*links)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a.safetensors"


NOISE = optax.trace(0.9)  # a link with leaves
CHAINS = {
    "a clip before a lone adam": (
        ADAM,
        chained(CLIP, ADAM),
        lambda r: optax_moves.wrap_chain(r, PLACE, 1),
        lambda old, new: (new[0], old),
    ),
    "the clip away again": (
        chained(CLIP, ADAM),
        ADAM,
        lambda r: optax_moves.unwrap_chain(r, PLACE, 1),
        lambda old, new: old[1],
    ),
    "a clip in a chain": (
        chained(ADAM, optax.scale(0.5)),
        chained(CLIP, ADAM, optax.scale(0.5)),
        lambda r: optax_moves.insert_link(r, PLACE, 0),
        lambda old, new: (new[0], *old),
    ),
    "a link with leaves added": (
        chained(ADAM, optax.scale(0.5)),
        chained(NOISE, ADAM, optax.scale(0.5)),
        lambda r: optax_moves.insert_link(r, PLACE, 0),
        lambda old, new: (new[0], *old),
    ),
    "a link with leaves removed": (
        chained(NOISE, ADAM, optax.scale(0.5)),
        chained(ADAM, optax.scale(0.5)),
        lambda r: optax_moves.remove_link(r, PLACE, 0),
        lambda old, new: old[1:],
    ),
    "a link moved back": (
        chained(NOISE, CLIP, ADAM),
        chained(CLIP, ADAM, NOISE),
        lambda r: optax_moves.move_link(r, PLACE, 0, 2),
        lambda old, new: (old[1], old[2], old[0]),
    ),
    "a link moved to the front": (
        chained(CLIP, ADAM, NOISE),
        chained(NOISE, CLIP, ADAM),
        lambda r: optax_moves.move_link(r, PLACE, 2, 0),
        lambda old, new: (old[2], old[0], old[1]),
    ),
}


@pytest.mark.parametrize("name", CHAINS)
def test_links_of_a_chain_change_and_their_neighbours_keep_their_state(
    name: str, path: Path
) -> None:
    old_tx, new_tx, move, build = CHAINS[name]
    old, restored = migrate(path, old_tx, new_tx, move)
    assert_next_is(new_tx, restored, build(old, new_tx.init(PARAMS)))
    assert_identical(adam_of(restored), adam_of(old))
    assert int(adam_of(restored).count) == 3


@pytest.mark.parametrize("add", [True, False])
def test_an_inactive_clip_changes_the_next_update_by_rounding_alone(
    add: bool, path: Path
) -> None:
    both = (ADAM, chained(CLIP, ADAM))
    old_tx, new_tx = both if add else both[::-1]
    move = optax_moves.wrap_chain if add else optax_moves.unwrap_chain
    old, restored = migrate(path, old_tx, new_tx, lambda r: move(r, PLACE, 1))
    assert_close(run(new_tx, restored, 3, 1)[0], run(old_tx, old, 3, 1)[0])


# betas that are traced, too, would be rounded to float32: optax's own doing
STATIC = ("b1", "b2", "eps", "eps_root")
INJECTED = optax.inject_hyperparams(optax.adam, STATIC)(learning_rate=1e-2)
MULTI = optax.MultiSteps(ADAM, every_k_schedule=1)
SLOW = optax.MultiSteps(ADAM, every_k_schedule=2)
FINITE = optax.apply_if_finite(ADAM, max_consecutive_errors=2)
MASKED = optax.masked(ADAM, jax.tree.map(lambda _: True, PARAMS))
PARTED = optax.multi_transform({"left": ADAM, "right": ADAM}, LABELS)
LABELLED = optax.multi_transform({"all": ADAM}, {key: "all" for key in PARAMS})


def wrap_inject(old: Any, new: Any) -> Any:
    return new._replace(count=old[0].count, inner_state=old)


def wrap_multi(old: Any, new: Any) -> Any:
    return new._replace(gradient_step=old[0].count, inner_opt_state=old)


def split_adam(old: Any, label: str) -> Any:
    """Return the share of a label, its other parameters masked."""
    adam, *rest = old
    share = {key: optax.MaskedNode() for key in PARAMS}
    mine = [key for key, value in LABELS.items() if value == label]

    def pick(tree: Any) -> Any:
        return {**share, **{key: tree[key] for key in mine}}

    return (adam._replace(mu=pick(adam.mu), nu=pick(adam.nu)), *rest)


def wrap_parted(old: Any, new: Any) -> Any:
    inner = {
        label: state._replace(inner_state=split_adam(old, label))
        for label, state in new.inner_states.items()
    }
    return new._replace(inner_states=inner)


WRAPPERS = {
    "inject_hyperparams": (
        INJECTED,
        optax_moves.wrap_inject_hyperparams,
        optax_moves.unwrap_inject_hyperparams,
        wrap_inject,
        False,
    ),
    "MultiSteps": (
        MULTI.gradient_transformation(),
        optax_moves.wrap_multi_steps,
        optax_moves.unwrap_multi_steps,
        wrap_multi,
        False,
    ),
    "apply_if_finite": (
        FINITE,
        optax_moves.wrap_apply_if_finite,
        optax_moves.unwrap_apply_if_finite,
        lambda old, new: new._replace(inner_state=old),
        True,
    ),
    "masked": (
        MASKED,
        optax_moves.wrap_masked,
        optax_moves.unwrap_masked,
        lambda old, new: new._replace(inner_state=old),
        True,
    ),
    "multi_transform": (
        LABELLED,
        optax_moves.wrap_multi_transform,
        optax_moves.unwrap_multi_transform,
        lambda old, new: new._replace(
            inner_states={"all": new.inner_states["all"]._replace(inner_state=old)}
        ),
        True,
    ),
    # XLA fuses two counts otherwise than one: optax and XLA's own doing
    "multi_transform of two labels": (
        PARTED,
        optax_moves.wrap_multi_transform,
        optax_moves.unwrap_multi_transform,
        wrap_parted,
        False,
    ),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_wrapped_it_is_the_state_built_by_hand(name: str, path: Path) -> None:
    tx, wrap, _, build, bitwise = WRAPPERS[name]
    old, restored = migrate(path, ADAM, tx, lambda r: wrap(r, PLACE))
    assert_next_is(tx, restored, build(old, tx.init(PARAMS)))
    updates, expected = run(tx, restored, 3, 1)[0], run(ADAM, old, 3, 1)[0]
    assert_close(updates, expected)
    if bitwise:
        assert_identical(updates, expected)


@pytest.mark.parametrize("name", WRAPPERS)
def test_unwrapped_it_is_the_state_that_was_never_wrapped(
    name: str, path: Path
) -> None:
    tx, _, unwrap, _, bitwise = WRAPPERS[name]
    old, restored = migrate(path, tx, ADAM, lambda r: unwrap(r, PLACE))
    adam = restored[0]
    assert int(adam.count) == 3
    if name == "multi_transform of two labels":
        left, right = (
            old.inner_states[label].inner_state[0] for label in ("left", "right")
        )
        by_hand = left._replace(
            mu={"a": left.mu["a"], "c": right.mu["c"]},
            nu={"a": left.nu["a"], "c": right.nu["c"]},
        )
        assert_next_is(ADAM, restored, (by_hand, restored[1]))
    else:
        assert_next_is(ADAM, restored, (adam_of(old), optax.EmptyState()))
    updates, expected = run(ADAM, restored, 3, 1)[0], run(tx, old, 3, 1)[0]
    assert_close(updates, expected)
    if bitwise:
        assert_identical(updates, expected)


def test_multi_steps_off_a_boundary_are_refused(path: Path) -> None:
    tx = SLOW.gradient_transformation()
    with pytest.raises(MigrationError, match="were not applied yet") as caught:
        migrate(
            path, tx, ADAM, lambda r: optax_moves.unwrap_multi_steps(r, PLACE), steps=3
        )
    assert "mini_step" in str(caught.value)
    assert "agent step 1" in str(caught.value)
    old, restored = migrate(
        path, tx, ADAM, lambda r: optax_moves.unwrap_multi_steps(r, PLACE), steps=4
    )
    assert_identical(restored, old.inner_opt_state)


def seeded(tx: optax.GradientTransformation, steps: int) -> Any:
    """Return the state of two seeds after some updates, which differ."""
    params = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), PARAMS)
    state = jax.vmap(tx.init)(params)
    for _ in range(steps):
        _, state = jax.vmap(tx.update)(params, state, params)
    return state


def test_seeds_move_together_and_a_boundary_is_asked_of_each(path: Path) -> None:
    tx = SLOW.gradient_transformation()
    state = seeded(tx, 4)
    migrations = Migrations("seeds")
    optax_moves.unwrap_multi_steps(migrations.step(1, "no steps"), "")
    save_checkpoint(state, path)
    restored = restore_into(seeded(ADAM, 0), path, migrations=migrations)
    assert_identical(restored, state.inner_opt_state)
    assert restored[0].count.tolist() == [2, 2]
    save_checkpoint(state._replace(mini_step=jnp.array([0, 1])), path)
    with pytest.raises(MigrationError, match="not applied yet"):
        restore_into(seeded(ADAM, 0), path, migrations=migrations)


def test_wrapped_it_goes_on_over_a_whole_accumulation(path: Path) -> None:
    tx = SLOW.gradient_transformation()
    old, restored = migrate(
        path, ADAM, tx, lambda r: optax_moves.wrap_multi_steps(r, PLACE)
    )
    by_hand = wrap_multi(old, tx.init(PARAMS))
    assert_identical(run(tx, restored, 3, 4), run(tx, by_hand, 3, 4))


SCHEDULE = optax.adam(optax.linear_schedule(1e-2, 1e-3, 10))  # counts twice


@pytest.mark.parametrize(
    "tx",
    [
        optax.adamw(1e-2),
        optax.adafactor(1e-2, min_dim_size_to_factor=2),
        SCHEDULE,
        optax.sgd(1e-2, momentum=0.9),
    ],
    ids=["adamw", "adafactor", "a schedule", "momentum"],
)
def test_other_optimisers_move_too(tx: Any, path: Path) -> None:
    clipped = chained(CLIP, tx)
    wrap, unwrap = optax_moves.wrap_chain, optax_moves.unwrap_chain
    old, new = migrate(path, tx, clipped, lambda r: wrap(r, PLACE, 1))
    assert_next_is(clipped, new, (clipped.init(PARAMS)[0], old))
    old, new = migrate(path, clipped, tx, lambda r: unwrap(r, PLACE, 1))
    assert_next_is(tx, new, old[1])


def test_two_labels_are_the_old_optimiser_bit_for_bit_op_by_op(path: Path) -> None:
    """Compiled, XLA fuses two counts otherwise than one, in memory likewise."""
    old, restored = migrate(
        path, ADAM, PARTED, lambda r: optax_moves.wrap_multi_transform(r, PLACE)
    )
    with jax.disable_jit():
        updates, _ = PARTED.update(grads(3), restored, PARAMS)
        assert_identical(updates, ADAM.update(grads(3), old, PARAMS)[0])
    old, restored = migrate(
        path, PARTED, ADAM, lambda r: optax_moves.unwrap_multi_transform(r, PLACE)
    )
    with jax.disable_jit():
        updates, _ = ADAM.update(grads(3), restored, PARAMS)
        assert_identical(updates, PARTED.update(grads(3), old, PARAMS)[0])


@pytest.mark.parametrize("name", [n for n in WRAPPERS if n != "multi_transform"])
def test_an_upgraded_copy_asks_for_a_skeleton_or_is_whole(
    name: str, path: Path, tmp_path: Path
) -> None:
    tx, wrap, *_ = WRAPPERS[name]
    _, old = run(ADAM, ADAM.init(PARAMS), 0, 2)
    save_checkpoint({"opt_state": old}, path)
    migrations = Migrations("agent")
    wrap(migrations.step(1, "wrapped"), "opt_state")
    new, skeleton = tmp_path / "new.safetensors", {"opt_state": tx.init(PARAMS)}
    with pytest.raises(MigrationError, match="the skeleton's to say"):
        migrate_checkpoint(path, new, migrations)
    migrate_checkpoint(path, new, migrations, skeleton=skeleton)
    expected = restore_into(skeleton, path, migrations=migrations)
    assert_identical(restore_into(skeleton, new), expected)


def test_labels_of_unequal_counts_are_not_joined(path: Path) -> None:
    _, state = run(PARTED, PARTED.init(PARAMS), 0, 2)
    left = state.inner_states["left"]
    adam, *rest = left.inner_state
    ahead = left._replace(inner_state=(adam._replace(count=adam.count + 1), *rest))
    state = state._replace(inner_states={**state.inner_states, "left": ahead})
    save_checkpoint(state, path)
    migrations = Migrations("parts")
    optax_moves.unwrap_multi_transform(migrations.step(1, "one for all"), "")
    with pytest.raises(MigrationError, match=r"differ and cannot both be 0\.count"):
        restore_into(ADAM.init(PARAMS), path, migrations=migrations)


def test_a_mask_drops_the_moments_it_leaves_out_and_they_begin_anew(
    path: Path,
) -> None:
    mask = {"a": {"w": True, "b": False}, "c": {"w": True}}
    tx = optax.masked(ADAM, mask)
    old, restored = migrate(path, ADAM, tx, lambda r: optax_moves.wrap_masked(r, PLACE))
    adam = restored.inner_state[0]
    assert_identical(adam.mu["a"]["w"], old[0].mu["a"]["w"])
    assert adam.mu["a"]["b"] == optax.MaskedNode()
    old, restored = migrate(
        path, tx, ADAM, lambda r: optax_moves.unwrap_masked(r, PLACE)
    )
    assert_identical(restored[0].mu["a"]["w"], old.inner_state[0].mu["a"]["w"])
    assert_identical(restored[0].mu["a"]["b"], jnp.zeros(4))


def test_another_optimiser_is_not_filled_from_the_skeleton(path: Path) -> None:
    momentum = optax.masked(
        optax.sgd(0.1, momentum=0.9), jax.tree.map(lambda _: True, PARAMS)
    )
    with pytest.raises(LayoutMismatchError, match="mu"):
        migrate(path, momentum, ADAM, lambda r: optax_moves.unwrap_masked(r, PLACE))


def test_a_state_that_counts_nothing_needs_to_be_told(path: Path) -> None:
    sgd = optax.sgd(0.1, momentum=0.9)
    new = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1, momentum=0.9)
    with pytest.raises(MigrationError, match="count"):
        migrate(path, sgd, new, lambda r: optax_moves.wrap_inject_hyperparams(r, PLACE))
    old, restored = migrate(
        path,
        sgd,
        new,
        lambda r: optax_moves.wrap_inject_hyperparams(r, PLACE, count=None),
    )
    assert_identical(restored.inner_state, old)


@pytest.mark.parametrize("names", [(), ("learning_rate",)])
def test_a_stored_learning_rate_against_a_new_one(
    names: tuple[str, ...], path: Path
) -> None:
    new = optax.inject_hyperparams(optax.adam, STATIC)(learning_rate=5e-3)
    _, before = run(INJECTED, INJECTED.init(PARAMS), 0, 3)
    save_checkpoint(before, path)
    plan = plan_restore(new.init(PARAMS), path)
    (note,) = [note for note in plan.notes if "hyperparams.learning_rate" in note]
    assert "0.005" in note
    assert float(plan.apply().hyperparams["learning_rate"]) == np.float32(1e-2)
    migrations = Migrations("rates")
    optax_moves.use_new_hyperparams(migrations.step(1, "slower"), "", *names)
    restored = restore_into(new.init(PARAMS), path, migrations=migrations)
    assert float(restored.hyperparams["learning_rate"]) == np.float32(5e-3)
    assert_identical(restored.inner_state, before.inner_state)
    assert int(restored.count) == 3


def test_every_optimiser_of_an_agent_moves_at_once(path: Path) -> None:
    _, state = run(ADAM, ADAM.init(PARAMS), 0, 2)
    save_checkpoint({"actor": {"opt_state": state}, "q": {"opt_state": state}}, path)
    migrations = Migrations("agent")
    optax_moves.wrap_chain(migrations.step(1, "clipped"), PLACE, 1)
    new = chained(CLIP, ADAM).init(PARAMS)
    skeleton = {"actor": {"opt_state": new}, "q": {"opt_state": new}}
    restored = restore_into(skeleton, path, migrations=migrations)
    for part in ("actor", "q"):
        assert_identical(restored[part]["opt_state"][1], state)


def test_what_is_no_chain_is_refused(path: Path) -> None:
    with pytest.raises(MigrationError, match="stands in no chain"):
        migrate(path, INJECTED, ADAM, lambda r: optax_moves.remove_link(r, PLACE, 0))
    with pytest.raises(MigrationError, match="expected an index"):
        optax_moves.insert_link(Migrations("a").step(1, "x"), PLACE, -1)
