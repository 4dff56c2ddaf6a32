"""The registry: what each verb makes of a layout, and every error by its own name."""

import hashlib
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ajaxckpt import (
    CheckpointError,
    InvalidArgumentError,
    LayoutMismatchError,
    MigrationError,
    Migrations,
    Rules,
    UnsupportedLeafError,
    migrate_checkpoint,
    open_checkpoint,
    plan_restore,
    restore_into,
    save_checkpoint,
    verify_checkpoint,
)

W = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a.safetensors"


def one_step(register: Callable[[Rules], Any]) -> Migrations:
    migrations = Migrations("agent")
    register(migrations.step(1, "a change"))
    return migrations


def migrated(
    path: Path, saved: Any, skeleton: Any, register: Callable[[Rules], Any]
) -> Any:
    save_checkpoint(saved, path)
    return restore_into(skeleton, path, migrations=one_step(register))


def refused(
    path: Path, saved: Any, skeleton: Any, register: Callable[[Rules], Any]
) -> str:
    """Return the words of a migration error, which names path and rule."""
    save_checkpoint(saved, path)
    before = path.read_bytes()
    with pytest.raises(MigrationError) as caught:
        restore_into(skeleton, path, migrations=one_step(register))
    text = str(caught.value)
    assert text.startswith(f"{path}: cannot ")
    assert 'agent step 1 "a change"' in text
    assert path.read_bytes() == before
    return text


def same(left: Any, right: Any) -> None:
    assert type(left) is type(right) or isinstance(left, jax.Array)
    a, b = np.asarray(left), np.asarray(right)
    assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())


# --- what each verb makes --------------------------------------------------------

VERBS: dict[str, tuple[Any, Any, Callable[[Rules], Any], Any]] = {
    "move a leaf": (W, np.zeros((2, 3), np.float32), lambda r: r.move("x", "y"), W),
    "map": (W, np.zeros((2, 3)), lambda r: r.map("x", np.float64), W.astype(float)),
    "map, of the other byte order": (
        W,
        np.zeros((2, 3), ">f8"),
        lambda r: r.map("x", lambda x: x.astype(">f8")),
        W.astype(">f8"),
    ),
    "map a number": (3, 0, lambda r: r.map("x", lambda n: n + 1), 4),
    "map a text": ("a", "", lambda r: r.map("x", lambda s: s + "b"), "ab"),
    "map bytes": (b"a", b"", lambda r: r.map("x", lambda s: s * 2), b"aa"),
    "cast": (
        W,
        np.zeros((2, 3), np.int8),
        lambda r: r.cast("x", np.int8),
        W.astype(np.int8),
    ),
    "cast, rounding": (
        W + 0.5,
        np.zeros((2, 3), np.int32),
        lambda r: r.cast("x", "int32", exact=False),
        (W + 0.5).astype(np.int32),
    ),
    "cast NaN": (
        np.array([np.nan, 1], np.float64),
        np.zeros(2, np.float32),
        lambda r: r.cast("x", "float32"),
        np.array([np.nan, 1], np.float32),
    ),
    "reshape": (
        W,
        np.zeros((3, 2), np.float32),
        lambda r: r.reshape("x", (3, -1)),
        W.reshape(3, 2),
    ),
    "squeeze": (
        W[:, None],
        np.zeros((2, 3), np.float32),
        lambda r: r.squeeze("x", 1),
        W,
    ),
    "expand": (
        W,
        np.zeros((2, 4, 3), np.float32),
        lambda r: r.expand("x", 4, axis=1),
        np.stack([W] * 4, axis=1),
    ),
    "take": (
        W,
        np.zeros(2, np.float32),
        lambda r: r.take("x", -1, axis=1),
        W[:, -1],
    ),
    "chained": (
        W,
        np.zeros(3, np.int32),
        lambda r: r.map("x", np.negative).take("x", 1).cast("x", "int32"),
        -W[1].astype(np.int32),
    ),
    "a copy of itself": (
        W,
        np.zeros((2, 3), np.float32),
        lambda r: r.move("x", "z").move("z", "y"),
        W,
    ),
}


@pytest.mark.parametrize("name", VERBS)
def test_each_verb_makes_what_it_says(name: str, path: Path) -> None:
    saved, skeleton, register, expected = VERBS[name]
    place = "y" if "move" in name or "copy" in name else "x"
    if name == "chained":  # of a mapped leaf only the skeleton knows the shape
        register = lambda r: r.take("x", 1).map("x", np.negative).map("x", np.int32)  # noqa: E731
    state = {"x": saved, "other": jnp.ones(2)}
    restored = migrated(path, state, {place: skeleton, "other": jnp.zeros(2)}, register)
    same(restored[place], expected)
    same(restored["other"], np.ones(2, np.float32))


def test_split_concatenate_stack_and_unstack_are_inverse(path: Path) -> None:
    parts = {name: np.zeros((2, n), np.float32) for name, n in (("a", 1), ("b", 2))}
    cut = migrated(
        path, {"x": W}, parts, lambda r: r.split("x", ["a", "b"], sizes=[1, 2])
    )
    same(cut["a"], W[:, :1])
    same(cut["b"], W[:, 1:])
    whole = {"x": np.zeros((2, 3), np.float32)}
    same(migrated(path, cut, whole, lambda r: r.concatenate(["a", "b"], "x"))["x"], W)
    rows = {"r": [np.zeros(3, np.float32)] * 2}
    apart = migrated(path, {"x": W}, rows, lambda r: r.unstack("x", "r.{index}"))
    same(apart["r"][1], W[1])
    same(migrated(path, apart, whole, lambda r: r.stack("r.*", "x"))["x"], W)


def test_jax_leaves_keep_weak_types_and_keys_their_implementation(path: Path) -> None:
    weak = jnp.full((2, 1), 3.0)
    assert weak.weak_type
    keys = jax.random.split(jax.random.key(1, impl="rbg"), 3)
    skeleton = {"x": jnp.full((1,), 0.0), "k": jax.random.key(0, impl="rbg")}
    restored = migrated(
        path,
        {"x": weak, "k": keys},
        skeleton,
        lambda r: r.take("x", 1).take("k", -1),
    )
    assert restored["x"].weak_type
    assert jax.random.key_impl(restored["k"]) == "rbg"
    same(jax.random.key_data(restored["k"]), jax.random.key_data(keys[2]))


def test_added_values_fill_the_skeletons_shape(path: Path) -> None:
    skeleton = {
        "x": 0,
        "nan": jnp.zeros((2, 2), jnp.bfloat16),
        "seven": np.zeros(3, np.int8),
        "own": jnp.arange(3),
        "key": jax.random.key(3),
        "n": 5,
        "sum": np.zeros((), np.float64),
        "copy": jnp.zeros((2, 3)),
    }
    restored = migrated(
        path,
        {"x": 1, "w": jnp.asarray(W), "v": W},
        skeleton,
        lambda r: (
            r.add("nan", np.nan)
            .add("seven", 7)
            .add("own", from_skeleton=True)
            .add("key", from_skeleton=True)
            .add("n", 9)
            .add("sum", compute=lambda v: v.sum(dtype=np.float64), inputs="v")
            .add("copy", inputs="w")
            .drop("w")
            .drop("v")
        ),
    )
    assert np.isnan(np.asarray(restored["nan"], np.float32)).all()
    same(restored["seven"], np.full(3, 7, np.int8))
    same(restored["own"], np.arange(3, dtype=np.int32))
    assert restored["key"] == jax.random.key(3)
    assert restored["n"] == 9
    same(restored["sum"], np.asarray(15.0))
    same(restored["copy"], W)


def increment(array: Any) -> Any:
    array += 1
    return array


def test_a_function_that_works_in_place_harms_nothing(path: Path) -> None:
    constant = np.zeros(3, np.float32)
    migrations = Migrations("agent")
    migrations.step(1, "added").add("n", constant)
    migrations.step(2, "counted").map("n", increment).map("x", increment)
    save_checkpoint(X, path)
    skeleton = {**ZEROS, "n": np.zeros(3, np.float32)}
    for _ in range(2):
        restored = restore_into(skeleton, path, migrations=migrations)
        same(restored["n"], np.ones(3, np.float32))
        same(restored["x"], W + 1)
    same(constant, np.zeros(3, np.float32))


def test_what_was_adopted_may_move_or_go(path: Path) -> None:
    save_checkpoint({"a": W, "w": 1}, path)
    migrations = Migrations("agent")
    migrations.step(1, "kept").adopt("a")
    migrations.step(2, "renamed").move("a", "b")
    restored = restore_into({"w": 0}, path, migrations=migrations)
    same(restored["b"], W)
    migrations.step(3, "dropped").drop("b")
    assert restore_into({"w": 0}, path, migrations=migrations) == {"w": 1}


# --- captures and scopes ---------------------------------------------------------

CAPTURES = {
    ("a.b.c", "a.*.c", "z.{1}"): "z.b",
    ("a.b.c", "**.c", "{1}.d"): "a.b.d",
    ("c", "**.c", "{1}.d"): "d",
    ("a.b.c.d", "**.b", "{1}.x"): "a.x.c.d",
    ("l_10.w", "l_*", "m_{1}_"): "m_10_.w",
    ("l_10.w", "l_*", "{1}"): "10.w",
    ("a.x1y2", "a.x*y*", "{2}.{1}"): "2.1",
    ('a."x.y".w', "a.*.w", "b.{1}"): 'b."x.y"',
    ("a.b.a.b.w", "**.b", "{1}.c"): "a.c.a.b.w",
    ("a.b", "", "top"): "top.a.b",
    ("top.a.b", "top", ""): "a.b",
}


@pytest.mark.parametrize("case", CAPTURES)
def test_captures_fill_the_target(case: tuple[str, str, str], path: Path) -> None:
    name, source, target = case
    plan = plan_of(path, name, lambda r: r.move(source, target))
    assert [item.name for item in plan.mismatches] == [CAPTURES[case]]


def plan_of(path: Path, name: str, register: Callable[[Rules], Any]) -> Any:
    """Return the plan for a state of one leaf of this name and an empty skeleton."""
    state: Any = W
    for key in reversed(split(name)):
        state = {key: state}
    save_checkpoint(state, path)
    return plan_restore({}, path, migrations=one_step(register))


def split(name: str) -> list[Any]:
    if name.startswith('a."x.y"'):
        return ["a", "x.y", "w"]
    return [int(part) if part.isdecimal() else part for part in name.split(".")]


def test_filled_text_that_is_no_name_is_refused(path: Path) -> None:
    text = refused(path, {"a": {"x.y": W}}, {}, lambda r: r.move("a.*", "b_{1}"))
    assert 'b_"x.y"' in text.replace("\\", "")


PARAMS = {"Dense_0": {"w": jnp.ones((4, 3)), "b": jnp.ones(3)}}
TRUNK = {"trunk": PARAMS["Dense_0"]}


def trained(tx: optax.GradientTransformation, params: Any) -> Any:
    state = tx.init(params)
    for _ in range(2):
        _, state = tx.update(params, state, params)
    return state


@pytest.mark.parametrize(
    ("tx", "mirrors"),
    [
        (optax.adam(1e-3), ["opt.**.mu", "opt.**.nu"]),
        (optax.adafactor(1e-3, min_dim_size_to_factor=2), ["opt.**.v_*", "opt.**.v"]),
        (
            optax.masked(optax.adam(1e-3), {"Dense_0": {"w": True, "b": False}}),
            ["opt.**.mu", "opt.**.nu"],
        ),
        (optax.ema(0.9), ["opt.**.ema"]),
    ],
    ids=["adam", "adafactor", "masked", "ema"],
)
def test_what_mirrors_the_parameters_follows_them(
    tx: Any, mirrors: list[str], path: Path
) -> None:
    old = {"params": PARAMS, "opt": trained(tx, PARAMS), "target": PARAMS}
    if isinstance(old["opt"], optax.MaskedState):
        new_tx = optax.masked(optax.adam(1e-3), {"trunk": {"w": True, "b": False}})
    else:
        new_tx = tx
    new = {"params": TRUNK, "opt": new_tx.init(TRUNK), "target": TRUNK}
    restored = migrated(
        path,
        old,
        jax.tree.map(jnp.zeros_like, new),
        lambda r: r.under("params", "target", *mirrors).move("Dense_0", "trunk"),
    )
    # renamed by hand: the only child of every node of that name
    renamed = jax.tree.leaves(old)
    assert len(renamed) == len(jax.tree.leaves(restored))
    for before, after in zip(renamed, jax.tree.leaves(restored), strict=True):
        same(after, before)


def test_every_node_of_a_pattern_is_a_scope_of_its_own(path: Path) -> None:
    saved = {"a": {"buffer": {"x": W, "n": 1}}, "b": [{"buffer": {"x": W + 1, "n": 2}}]}
    skeleton = {
        "a": {"buffer": {"y": np.zeros_like(W), "n": 0}},
        "b": [{"buffer": {"y": np.zeros_like(W), "n": 0}}],
    }
    restored = migrated(
        path, saved, skeleton, lambda r: r.under("**.buffer").move("x", "y")
    )
    same(restored["a"]["buffer"]["y"], W)
    same(restored["b"][0]["buffer"]["y"], W + 1)


def test_mirrors_may_lack_leaves_but_must_be_there(path: Path) -> None:
    saved = {"params": {"a": W}, "mu": {"other": W}}
    skeleton = {"params": {"b": np.zeros_like(W)}, "mu": {"other": np.zeros_like(W)}}
    migrated(path, saved, skeleton, lambda r: r.under("params", "mu").move("a", "b"))
    text = refused(
        path, saved, skeleton, lambda r: r.under("params", "nu").move("a", "b")
    )
    assert "no node is named nu" in text
    text = refused(
        path, saved, skeleton, lambda r: r.under("mu", "params").move("a", "b")
    )
    assert "finds nothing" in text


# --- errors, each by its own name ------------------------------------------------

X = {"x": W}
FLAT = {"x": np.zeros(6, np.float32)}
ZEROS = {"x": np.zeros_like(W)}


def raising(value: Any) -> Any:
    raise RuntimeError("no luck")


WRONG: dict[str, tuple[Any, Any, Callable[[Rules], Any], str]] = {
    "nothing matched": (X, ZEROS, lambda r: r.move("z.*", "y"), "move z.* to y: finds"),
    "nothing dropped": (X, ZEROS, lambda r: r.drop("q"), "drop q: finds nothing"),
    "nothing added": (X, ZEROS, lambda r: r.add("x", 1), "add x with 1: finds nothing"),
    "nothing adopted": (X, ZEROS, lambda r: r.adopt("x"), "adopt x: finds nothing"),
    "two sources": (
        {"a": {"x": W}, "b": {"x": W + 1}},
        ZEROS,
        lambda r: r.move("*.x", "x"),
        "two sources for x: a.x and b.x",
    ),
    "a name that is taken": (
        {"x": W, "y": W},
        ZEROS,
        lambda r: r.move("y", "x"),
        "two sources for x: the file has a leaf of this name",
    ),
    "merged but unequal": (
        {"a": {"x": W}, "b": {"x": W + 1}},
        ZEROS,
        lambda r: r.move("*.x", "x", merge=True),
        "differ and cannot both be x",
    ),
    "wrong dtype": (
        X,
        ZEROS,
        lambda r: r.map("x", lambda x: x.astype(np.float64)),
        "x: expected numpy float32[2,3], found float64[2,3]",
    ),
    "wrong shape": (
        X,
        FLAT,
        lambda r: r.map("x", lambda x: x),
        "x: expected numpy float32[6], found float32[2,3]",
    ),
    "a number for an array": (
        X,
        ZEROS,
        lambda r: r.map("x", lambda x: float(x.sum())),
        "x: expected numpy float32[2,3], found float",
    ),
    "cut after it is computed": (
        X,
        ZEROS,
        lambda r: r.map("x", np.negative).split("x", ["a", "b"]),
        "x: its shape is not known yet",
    ),
    "unstacked after it is computed": (
        X,
        ZEROS,
        lambda r: r.map("x", np.negative).unstack("x", "a.{index}"),
        "x: its shape is not known yet",
    ),
    "wrong type": (
        {"x": 1},
        {"x": 0},
        lambda r: r.map("x", str),
        "x: expected Python int, found str",
    ),
    "a typed key": (
        X,
        {**ZEROS, "n": np.zeros(2)},
        lambda r: r.add("n", jax.random.key(0)),
        "n: expected a number or an array, found a jax",
    ),
    "nothing returned": (
        X,
        ZEROS,
        lambda r: r.map("x", lambda x: None),
        "x: expected numpy float32[2,3], found NoneType",
    ),
    "raising": (X, ZEROS, lambda r: r.map("x", raising), "x: the function raised Runt"),
    "inexact": (
        {"x": W * 100},
        {"x": np.zeros((2, 3), np.int8)},
        lambda r: r.cast("x", "int8"),
        "x: values, such as 200.0, are not exact in int8",
    ),
    "NaN as a number": (
        X,
        {**ZEROS, "n": np.zeros(2, np.int32)},
        lambda r: r.add("n", np.nan),
        "n: nan does not fit numpy int32[2]",
    ),
    "a text as a number": (
        X,
        {**ZEROS, "n": np.zeros(2)},
        lambda r: r.add("n", "3"),
        "n: '3' does not fit numpy float64[2]",
    ),
    "an imaginary part": (
        X,
        {**ZEROS, "n": np.zeros(2)},
        lambda r: r.add("n", complex(np.nan, 4)),
        "does not fit numpy float64[2]",
    ),
    "an imaginary part beside NaN": (
        {"x": np.array([complex(np.nan, 5), 1], np.complex64)},
        {"x": np.zeros(2, np.float32)},
        lambda r: r.cast("x", "float32"),
        "are not exact in float32",
    ),
    "too large": (
        X,
        {**ZEROS, "n": np.zeros(2, np.int8)},
        lambda r: r.add("n", 300),
        "n: 300 does not fit numpy int8[2]",
    ),
    "no input": (
        X,
        {**ZEROS, "n": np.zeros(2)},
        lambda r: r.add("n", inputs="q"),
        "the file has no leaf q",
    ),
    "no such axis": (X, FLAT, lambda r: r.take("x", 0, axis=2), "x: no axis 2 of 2"),
    "no such index": (X, FLAT, lambda r: r.take("x", 5), "x: no index 5 on axis 0"),
    "an axis of more": (
        X,
        FLAT,
        lambda r: r.squeeze("x"),
        "axis 0 of [2, 3] is not",
    ),
    "no such shape": (X, FLAT, lambda r: r.reshape("x", (5,)), "[2, 3] cannot become"),
    "no thirds": (
        X,
        FLAT,
        lambda r: r.split("x", ["a", "b"]),
        "axis -1 of [2, 3] is",
    ),
    "no axes": ({"x": 1}, {"x": 0}, lambda r: r.squeeze("x"), "Python int has no axes"),
    "unlike layers": (
        {"a": W, "b": W[0]},
        FLAT,
        lambda r: r.stack("*", "x"),
        "a is numpy float32[2,3], b is numpy float32[3]",
    ),
    "a condition that raises": (
        X,
        ZEROS,
        lambda r: r.refuse("no", when=lambda view: view.config["z"]),
        "its condition raised KeyError: 'z'",
    ),
    "a check that raises": (
        X,
        ZEROS,
        lambda r: r.check("x", raising, "no"),
        "x: the check raised RuntimeError: no luck",
    ),
    "refused": (
        X,
        ZEROS,
        lambda r: r.refuse("ask Ann", "x"),
        "restore: ask Ann",
    ),
    "checked": (
        X,
        ZEROS,
        lambda r: r.check("x", lambda x: x.sum() < 0, "ask Bob"),
        "cannot restore: ask Bob",
    ),
    "no place for a target": (
        X,
        {},
        lambda r: r.map("x", np.negative),
        "makes x, which the skeleton lacks",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_each_error_names_rule_and_leaf(name: str, path: Path) -> None:
    saved, skeleton, register, words = WRONG[name]
    assert words in refused(path, saved, skeleton, register)


REGISTRATIONS: dict[str, tuple[Callable[[], Any], str]] = {
    "a gap": (lambda: Migrations("m").step(2, "x"), "m: step 2 leaves a gap"),
    "a duplicate": (
        lambda: (m := Migrations("m"), m.step(1, "x"), m.step(1, "y")),
        "m: step 1 is registered already",
    ),
    "step 0": (lambda: Migrations("m").step(0, "x"), "m: step 0 leaves a gap"),
    "a step of text": (
        lambda: Migrations("m").step("1", "x"),  # type: ignore[arg-type]
        "m: step '1' leaves a gap",
    ),
    "no reason": (lambda: Migrations("m").step(1, " "), "expected a reason"),
    "a reason twice": (
        lambda: (m := Migrations("m"), m.rule("x"), m.rule("x")),
        "the reason 'x' is registered already",
    ),
    "no name": (lambda: Migrations(""), "expected a name"),
    "a bad release": (lambda: Migrations("m", release="1.x"), "not made of numbers"),
    "a release without one": (
        lambda: Migrations("m").rule("x", until="0.5"),
        "needs the release of the code",
    ),
    "neither date nor release": (
        lambda: Migrations("m").rule("x", until="soon"),
        "neither a date nor a release",
    ),
    "no condition": (
        lambda: Migrations("m").rule("x", when=1),  # type: ignore[arg-type]
        "cannot be called",
    ),
    "one star, two holes": (
        lambda: Migrations("m").step(1, "x").move("a.*", "b.{1}.{2}"),
        "asks for {2} of 1 stars",
    ),
    "hole 0": (
        lambda: Migrations("m").step(1, "x").move("a.*", "{0}"),
        "asks for {0} of 1 stars",
    ),
    "a star in a target": (
        lambda: Migrations("m").step(1, "x").move("a", "b.*"),
        "is no leaf name",
    ),
    "a bad pattern": (
        lambda: Migrations("m").step(1, "x").drop("a..b"),
        "is not a pattern",
    ),
    "an index nowhere": (
        lambda: Migrations("m").step(1, "x").unstack("a", "b"),
        "has no {index}",
    ),
    "an index too many": (
        lambda: Migrations("m").step(1, "x").move("a", "b.{index}"),
        "only unstack has an {index}",
    ),
    "nothing to add": (
        lambda: Migrations("m").step(1, "x").add("a"),
        "expected one of value, from_skeleton, compute",
    ),
    "two things to add": (
        lambda: Migrations("m").step(1, "x").add("a", 1, from_skeleton=True),
        "expected one of value, from_skeleton, compute",
    ),
    "no dtype": (lambda: Migrations("m").step(1, "x").cast("a", "text"), "no dtype"),
    "no function": (
        lambda: Migrations("m").step(1, "x").map("a", 1),  # type: ignore[arg-type]
        "cannot be called",
    ),
}


@pytest.mark.parametrize("name", REGISTRATIONS)
def test_mistakes_are_found_at_registration(name: str) -> None:
    register, words = REGISTRATIONS[name]
    with pytest.raises(MigrationError) as caught:
        register()
    assert str(caught.value).startswith("cannot register: ")
    assert words in str(caught.value)


# --- versions, rules and expiry --------------------------------------------------


def test_steps_lead_from_the_files_version_to_the_newest(path: Path) -> None:
    migrations = Migrations("agent")
    migrations.step(1, "first").move("a", "b")
    save_checkpoint({"b": W}, path, migrations=migrations)
    assert open_checkpoint(path).layouts == {"agent": 1}
    migrations.step(2, "second").move("b", "c")
    skeleton = {"c": np.zeros_like(W)}
    same(restore_into(skeleton, path, migrations=migrations)["c"], W)
    save_checkpoint({"a": W}, path)  # version 0
    same(restore_into(skeleton, path, migrations=migrations)["c"], W)
    save_checkpoint({"c": W}, path, migrations=migrations)
    same(restore_into(skeleton, path, migrations=migrations)["c"], W)
    save_checkpoint({"c": W}, path)  # today's, but nobody said so
    with pytest.raises(MigrationError, match="must record its version"):
        restore_into(skeleton, path, migrations=migrations)


def test_what_a_step_adds_a_later_step_may_rename_or_drop(path: Path) -> None:
    migrations = Migrations("agent")
    migrations.step(1, "added").add("n", 1).add("batch", from_skeleton=True)
    migrations.step(2, "renamed").move("n", "count").move("batch", "last_batch")
    migrations.step(3, "dropped").drop("x")
    save_checkpoint(X, path)
    batch = {"obs": np.ones(2), "act": np.zeros(1)}
    skeleton = {"count": 0, "last_batch": batch}
    restored = restore_into(skeleton, path, migrations=migrations)
    assert restored["count"] == 1
    same(restored["last_batch"]["obs"], np.ones(2))
    with pytest.raises(MigrationError, match="makes last_batch, which the skeleton"):
        restore_into({"count": 0}, path, migrations=migrations)


@pytest.mark.parametrize("how", ["a value", "computed"])
def test_what_a_step_adds_may_move_below_its_own_name(how: str, path: Path) -> None:
    migrations = Migrations("agent")
    step = migrations.step(1, "added")
    if how == "a value":
        step.add("b", 1)
    else:
        step.add("b", compute=lambda x: x * 0 + 1, inputs="x")
    migrations.step(2, "a level more").move("b", "b.c")
    save_checkpoint(X, path)
    skeleton = {**ZEROS, "b": {"c": np.zeros_like(W)}}
    restored = restore_into(skeleton, path, migrations=migrations)
    same(restored["b"]["c"], np.ones_like(W))


def test_a_newer_layout_is_refused_by_number(path: Path) -> None:
    newer = Migrations("agent")
    for number in range(1, 6):
        newer.step(number, f"change {number}")
    save_checkpoint(X, path, migrations=newer)
    older = one_step(lambda r: r.move("x", "y"))
    with pytest.raises(MigrationError) as caught:
        restore_into(ZEROS, path, migrations=older)
    assert "layout version 5 of 'agent', this code knows up to 1" in str(caught.value)
    # without the registry nothing is migrated, and the plan says what is recorded
    plan = plan_restore(ZEROS, path)
    assert 'layout version 5 of "agent"' in " ".join(plan.notes)


def test_two_registries_compose_and_record_a_version_each(path: Path) -> None:
    library, mine = Migrations("library"), Migrations("mine")
    library.step(1, "theirs").move("agent.a", "agent.b")
    mine.step(1, "mine").move("agent.b", "agent.c")
    mine.step(2, "mine again").move("agent.c", "agent.d")
    save_checkpoint({"agent": {"a": W}}, path)
    skeleton = {"agent": {"d": np.zeros_like(W)}}
    both = (library, mine)
    restored = restore_into(skeleton, path, migrations=both)
    same(restored["agent"]["d"], W)
    save_checkpoint(restored, path, migrations=both)
    assert open_checkpoint(path).layouts == {"library": 1, "mine": 2}
    same(restore_into(skeleton, path, migrations=both)["agent"]["d"], W)
    with pytest.raises(InvalidArgumentError, match="two registries have one name"):
        restore_into(skeleton, path, migrations=(mine, Migrations("mine")))


def test_a_rule_applies_where_the_old_shape_shows(path: Path) -> None:
    migrations = Migrations("agent")
    migrations.rule("a name").move("old", "new").drop("extra")
    skeleton = {"new": np.zeros_like(W)}
    save_checkpoint({"new": W}, path)
    same(restore_into(skeleton, path, migrations=migrations)["new"], W)
    save_checkpoint({"old": W, "extra": 1}, path)
    same(restore_into(skeleton, path, migrations=migrations)["new"], W)
    save_checkpoint({"old": W}, path)  # the first verb finds something, the next not
    with pytest.raises(MigrationError, match="drop extra: finds nothing"):
        restore_into(skeleton, path, migrations=migrations)


def test_a_rule_that_only_refuses_looks_at_each_of_its_reasons(path: Path) -> None:
    migrations = Migrations("agent")
    rule = migrations.rule("two reasons", until="2020-01-01")
    rule.refuse("no ln_f", "**.ln_f")
    rule.refuse("no w", "w", when=lambda view: view.step == 3)
    save_checkpoint({"w": W}, path, step=2)
    restore_into({"w": np.zeros_like(W)}, path, migrations=migrations)
    save_checkpoint({"w": W}, path, step=3)
    with pytest.raises(MigrationError, match="no w"):
        restore_into({"w": np.zeros_like(W)}, path, migrations=migrations)


def test_a_condition_sees_layouts_config_and_step(path: Path) -> None:
    seen: list[Any] = []
    migrations = Migrations("agent")
    migrations.rule("look", when=lambda view: seen.append(view)).drop("x")
    save_checkpoint(X, path, step=7, config={"env": "a"}, metrics={"r": 1.5})
    restore_into(ZEROS, path, migrations=migrations)
    (view,) = seen
    assert str(view.file["x"]) == str(view.skeleton["x"]) == "numpy float32[2,3]"
    assert (view.config["env"], view.step, view.metrics["r"]) == ("a", 7, 1.5)
    assert view.has("**.x") and not view.has("y")
    for mapping in (view.file, view.skeleton, view.config, view.metrics):
        with pytest.raises(TypeError):
            mapping["new"] = 1


@pytest.mark.parametrize(
    ("until", "release", "refused"),
    [
        ("2020-01-01", None, True),
        ("2999-01-01", None, False),
        ("0.5", "0.4.9", False),
        ("0.5", "0.5", True),
        ("0.5.0", "0.5", True),
        ("0.5", "0.10", True),
    ],
)
def test_a_rule_ends_on_its_date_or_release(
    until: str, release: str | None, refused: bool, path: Path
) -> None:
    for kind in ("step", "rule"):
        migrations = Migrations("agent", release=release)
        entry = (
            migrations.step(1, "a name", until=until)
            if kind == "step"
            else migrations.rule("a name", until=until)
        )
        entry.move("old", "x")
        save_checkpoint({"old": W}, path)
        if not refused:
            same(restore_into(ZEROS, path, migrations=migrations)["x"], W)
            continue
        with pytest.raises(MigrationError) as caught:
            restore_into(ZEROS, path, migrations=migrations)
        words = until if release is None else f"release {until.removesuffix('.0')}"
        assert f"agent {kind}" in str(caught.value)
        assert f"ended with {words}" in str(caught.value)
        # a file that is past it restores
        save_checkpoint(X, path, migrations=migrations)
        same(restore_into(ZEROS, path, migrations=migrations)["x"], W)


def test_the_registry_prints_as_a_changelog() -> None:
    migrations = Migrations("agent", release="0.4")
    migrations.step(1, "a trunk").move("a", "b").drop("c")
    scope = migrations.step(2, "flags", until="2999-01-01").under("p", "q")
    scope.cast("done", "bool")
    migrations.rule("no sum", until="0.3").drop("**.sum")
    assert str(migrations).splitlines() == [
        "agent: layout version 2",
        "  2  flags (until 2999-01-01)",
        "       cast done to bool (under p and q)",
        "  1  a trunk",
        "       move a to b",
        "       drop c",
        "  -  no sum (ended release 0.3)",
        "       drop **.sum",
    ]


# --- plans, exceptions, subtrees -------------------------------------------------


def test_the_plan_says_where_every_leaf_comes_from(path: Path) -> None:
    saved = {"old": W, "gone": 1, "same": 2, "extra": 3, "raw": W}
    save_checkpoint(saved, path, step=3, config={"lr": 0.1, "env": "a"})
    skeleton = {"new": np.zeros_like(W), "same": 0, "fresh": 1, "mine": 2, "raw": None}
    migrations = one_step(
        lambda r: (
            r.move("old", "new")
            .drop("gone")
            .add("fresh", from_skeleton=True)
            .adopt("raw")
        )
    )
    plan = plan_restore(
        skeleton,
        path,
        migrations=migrations,
        keep="mine",
        ignore="extra",
        config={"lr": 0.2, "env": "a"},
    )
    title = 'agent step 1 "a change"'
    assert plan.load == ("same",)
    assert {n: (o.sources, o.rule) for n, o in plan.migrate.items()} == {
        "new": (("old",), title),
        "raw": (("raw",), title),
    }
    assert (plan.keep, plan.ignore) == (("fresh", "mine"), ("extra",))
    assert (plan.adopt, dict(plan.drop)) == (("raw",), {"gone": title})
    assert (plan.step, plan.mismatches, plan.resize) == (3, (), ())
    assert plan.checkpoint_id == open_checkpoint(path).checkpoint_id
    assert "config.lr: 0.1 then, 0.2 now" in plan.notes
    assert not any("env" in note for note in plan.notes)
    text = str(plan)
    for words in ("restores", f"from old, by {title}", f"adopted raw, by {title}"):
        assert words in text
    same(plan.apply()["raw"], W)


def test_ignore_names_what_the_file_has_after_migration(path: Path) -> None:
    migrations = one_step(lambda r: r.move("old", "new"))
    save_checkpoint({"old": W, "x": W}, path)
    restore_into(ZEROS, path, migrations=migrations, ignore="new")
    with pytest.raises(InvalidArgumentError, match="selects no leaf"):
        restore_into(ZEROS, path, migrations=migrations, ignore="old")


def test_a_subtree_is_migrated_by_the_rules_of_the_whole(path: Path) -> None:
    migrations = one_step(
        lambda r: (
            r.move("agent.p", "agent.params")
            .map("agent.params.w", np.negative)
            .add("agent.extra", 1)
        )
    )
    save_checkpoint({"agent": {"p": {"w": W}}, "buffer": W}, path)
    skeleton = {"w": np.zeros_like(W)}
    plan = plan_restore(skeleton, path, subtree="agent.params", migrations=migrations)
    assert list(plan.migrate) == ["w"]
    same(plan.apply()["w"], -W)


def test_parameters_of_one_snapshot_and_the_buffer_of_another_show(
    tmp_path: Path,
) -> None:
    a, b = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    save_checkpoint({"params": W, "buffer": W}, a, step=1)
    save_checkpoint({"params": W + 1, "buffer": W + 1}, b, step=2)
    plans = [
        plan_restore(np.zeros_like(W), path, subtree=name)
        for path, name in ((a, "params"), (b, "buffer"))
    ]
    same(plans[0].apply(), W)
    same(plans[1].apply(), W + 1)
    assert [plan.step for plan in plans] == [1, 2]
    assert plans[0].checkpoint_id != plans[1].checkpoint_id
    for plan in plans:
        assert f"checkpoint {plan.checkpoint_id}, step {plan.step}" in str(plan)


def test_what_was_left_out_at_save_needs_no_migration(path: Path) -> None:
    saved = {"w": W, "buffer": {"obs": W, "sum": W}}
    save_checkpoint(saved, path, exclude="buffer")
    skeleton = {"w": np.zeros_like(W), "buffer": {"data": W + 5}}
    migrations = Migrations("agent")
    step = migrations.step(1, "another buffer")
    step.move("buffer.obs", "buffer.data").drop("**.sum").drop("buffer.sum")
    step.under("buffer").map("data", np.negative)
    restored = restore_into(skeleton, path, keep="buffer", migrations=migrations)
    same(restored["w"], W)
    same(restored["buffer"]["data"], W + 5)
    migrations.step(2, "a slip").move("wieght", "w")
    with pytest.raises(MigrationError, match="move wieght to w: finds nothing"):
        restore_into(skeleton, path, keep="buffer", migrations=migrations)


def test_an_abstract_skeleton_is_migrated_but_gives_no_values(path: Path) -> None:
    save_checkpoint({"old": jnp.asarray(W)}, path)
    skeleton = jax.eval_shape(lambda: {"new": jnp.zeros((3, 2)), "more": jnp.ones(2)})
    move = one_step(lambda r: r.move("old", "new").map("new", np.transpose))
    with pytest.raises(LayoutMismatchError, match="more"):
        restore_into(skeleton, path, migrations=move)
    filled = one_step(
        lambda r: r.move("old", "new").map("new", np.transpose).add("more", 2.0)
    )
    restored = restore_into(skeleton, path, migrations=filled)
    same(restored["new"], np.ascontiguousarray(W.T))
    own = one_step(lambda r: r.move("old", "new").add("more", from_skeleton=True))
    with pytest.raises(UnsupportedLeafError, match="more: a migration takes"):
        restore_into(skeleton, path, migrations=own)


def test_a_field_that_became_static_is_dropped(path: Path) -> None:
    save_checkpoint({"w": W, "tau": 0.5}, path)
    skeleton = {"w": np.zeros_like(W)}
    with pytest.raises(LayoutMismatchError, match="tau: expected nothing") as caught:
        restore_into(skeleton, path)
    assert 'step.drop("tau")' in str(caught.value)
    same(
        restore_into(skeleton, path, migrations=one_step(lambda r: r.drop("tau")))["w"],
        W,
    )


def test_a_subtree_that_is_new_is_added(path: Path) -> None:
    save_checkpoint({"params": W}, path)
    batch = {"obs": jnp.ones(2), "n": jnp.asarray(1)}
    skeleton = {"params": np.zeros_like(W), "last_batch": batch}
    with pytest.raises(LayoutMismatchError) as caught:
        restore_into(skeleton, path)
    line = 'step.add("last_batch", from_skeleton=True)'
    assert line in str(caught.value)
    migrations = one_step(lambda r: r.add("last_batch", from_skeleton=True))
    restored = restore_into(skeleton, path, migrations=migrations)
    same(restored["params"], W)
    same(restored["last_batch"]["obs"], np.ones(2, np.float32))


# --- laziness --------------------------------------------------------------------


def test_a_migration_holds_no_more_than_the_leaf_it_touches(path: Path) -> None:
    small = np.ones((1 << 20) // 4, np.float32)
    big = np.ones((64 << 20) // 4, np.float32)
    save_checkpoint({"small": small, "big": big}, path)
    del big
    skeleton = {
        "small": np.empty((1 << 20) // 4, np.float32),
        "big": jax.ShapeDtypeStruct(((64 << 20) // 4,), np.float32),
    }
    migrations = one_step(lambda r: r.map("small", np.negative))
    tracemalloc.start()
    restored = restore_into(skeleton, path, migrations=migrations)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < (64 << 20) + (1 << 20) + (8 << 20)
    same(restored["small"], -small)


def test_below_a_subtree_it_holds_that_leaf_alone(path: Path) -> None:
    small = np.ones((1 << 20) // 4, np.float32)
    save_checkpoint({"small": small, "big": np.ones((64 << 20) // 4, "f4")}, path)
    migrations = one_step(lambda r: r.map("small", np.negative).map("big", np.sin))
    skeleton = np.empty_like(small)
    tracemalloc.start()
    restored = restore_into(skeleton, path, subtree="small", migrations=migrations)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 5 << 20
    same(restored, -small)


@pytest.mark.parametrize("verb", ["move", "map"])
def test_migrated_leaves_lie_in_the_skeletons_shards(verb: str, path: Path) -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
    sharding = jax.NamedSharding(mesh, jax.P("x"))
    values = np.arange(32, dtype=np.float32).reshape(16, 2)
    skeleton = {"new": jax.device_put(jnp.zeros((16, 2)), sharding)}
    migrations = one_step(
        lambda r: (
            r.move("old", "new").map("new", np.negative)
            if verb == "map"
            else r.move("old", "new")
        )
    )
    save_checkpoint({"old": values}, path)
    restored = restore_into(skeleton, path, migrations=migrations)["new"]
    assert restored.sharding == sharding
    same(restored, -values if verb == "map" else values)
    assert {shard.data.shape for shard in restored.addressable_shards} == {(2, 2)}


def test_what_was_saved_by_other_versions_is_noted(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ajaxckpt import _checkpoint

    then = {**_checkpoint.gather_provenance(), "jax": "0.0.1", "time": "long ago"}
    with monkeypatch.context() as patched:
        patched.setattr(_checkpoint, "gather_provenance", lambda: then)
        save_checkpoint(X, path)
    plan = plan_restore(ZEROS, path)
    assert plan.notes == (f"jax: 0.0.1 then, {jax.__version__} now",)
    assert plan.notes[0] in str(plan)


def test_a_plan_reads_no_payload(path: Path) -> None:
    save_checkpoint({"x": W, "n": 1}, path)
    damaged = bytearray(path.read_bytes())
    damaged[-4] ^= 1  # of the payload
    path.write_bytes(damaged)
    migrations = one_step(lambda r: r.map("x", np.negative))
    plan = plan_restore({**ZEROS, "n": 0}, path, migrations=migrations)
    assert str(plan)
    with pytest.raises(CheckpointError, match="damaged"):
        plan.apply()


# --- upgraded copies -------------------------------------------------------------


def test_a_copy_is_verified_and_says_where_it_comes_from(
    path: Path, tmp_path: Path
) -> None:
    key = jax.random.key(0)
    saved = {"w": jnp.asarray(W), "n": 3, "s": "é", "k": key, "f": abs, "b": True}
    old = save_checkpoint(saved, path, step=5, metrics={"r": 1.0}, config={"a": [1]})
    before = hashlib.sha256(path.read_bytes()).digest()
    migrations = one_step(
        lambda r: (
            r.move("w", "kernel")
            .map("s", lambda s: s + "!")
            .add("more", np.arange(3))
            .map("n", lambda n: n + 1)
        )
    )
    new = tmp_path / "new.safetensors"
    skeleton = {
        **{"kernel": jnp.zeros((2, 3)), "n": 0, "s": "", "k": key, "f": abs},
        **{"b": False, "more": np.zeros(3, np.int64)},
    }
    with pytest.raises(MigrationError, match="the skeleton's to say"):
        migrate_checkpoint(path, new, migrations)
    assert not new.exists()
    record = migrate_checkpoint(path, new, migrations, skeleton=skeleton)
    assert hashlib.sha256(path.read_bytes()).digest() == before
    assert verify_checkpoint(new).digest == record.digest
    with open_checkpoint(new) as copy:
        assert set(copy) == {"kernel", "n", "s", "k", "f", "b", "more"}
        same(copy["kernel"], W)
        assert (copy["n"], copy["s"], copy["b"]) == (4, "é!", True)
        assert (copy.step, copy.metrics, copy.config) == (5, {"r": 1.0}, {"a": [1]})
        assert (copy.parent_id, copy.layouts) == (old.checkpoint_id, {"agent": 1})
        assert copy.checkpoint_id != old.checkpoint_id
    restored = restore_into(skeleton, new, migrations=migrations)
    assert restored["s"] == "é!"
    with pytest.raises(InvalidArgumentError, match="is there already"):
        migrate_checkpoint(path, new, migrations, skeleton=skeleton)


def test_a_copy_that_was_written_wrongly_is_found_at_once(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ajaxckpt import _copying

    write = _copying.write_checkpoint

    def write_on_a_bad_disk(new: str, *rest: Any) -> Any:
        record = write(new, *rest)
        data = bytearray(Path(new).read_bytes())
        data[-1] ^= 1
        Path(new).write_bytes(data)
        return record

    monkeypatch.setattr(_copying, "write_checkpoint", write_on_a_bad_disk)
    save_checkpoint(X, path)
    with pytest.raises(CheckpointError, match="damaged"):
        migrate_checkpoint(
            path, tmp_path / "new.safetensors", one_step(lambda r: r.move("x", "y"))
        )


def test_a_copy_for_a_skeleton_fits_it_or_is_not_written(
    path: Path, tmp_path: Path
) -> None:
    save_checkpoint({"w": jnp.asarray(W)}, path)
    new = tmp_path / "new.safetensors"
    own = one_step(
        lambda r: (
            r.add("key", from_skeleton=True)
            .add("f", from_skeleton=True)
            .add("z", np.nan)
        )
    )
    with pytest.raises(MigrationError, match="pass skeleton="):
        migrate_checkpoint(path, new, own)
    skeleton = {
        **{"w": jnp.zeros((2, 3)), "key": jax.random.key(4), "z": jnp.zeros(2)},
        "f": abs,
    }
    with pytest.raises(LayoutMismatchError, match="would not fit the skeleton"):
        migrate_checkpoint(path, new, own, skeleton={**skeleton, "other": 1})
    assert not new.exists()
    migrate_checkpoint(path, new, own, skeleton=skeleton)
    restored = restore_into(skeleton, new)
    assert restored["key"] == jax.random.key(4)
    assert np.isnan(restored["z"]).all()
