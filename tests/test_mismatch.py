"""Skeletons and arguments that do not fit: what is refused, and in which words."""

from __future__ import annotations

import argparse
import dataclasses
import enum
import math
import os
import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from identical import assert_identical
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ajaxckpt import (
    CheckpointError,
    CheckpointNotFoundError,
    DamagedCheckpointError,
    InvalidArgumentError,
    LayoutMismatchError,
    MigrationError,
    NewerFormatError,
    NotACheckpointError,
    StepExistsError,
    UnsupportedLeafError,
    open_checkpoint,
    plan_restore,
    restore_into,
    save_checkpoint,
)

BUILD_HINT = "To mend: build the skeleton with the configuration that saved this file"


class Phase(enum.Enum):
    WARM_UP = 1
    TRAIN = 2


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a.safetensors"


def _zeros(*shape: int, dtype: Any = np.float32) -> jax.Array:
    return jnp.zeros(shape, dtype)


def _refuse(skeleton: Any, path: Path, **kwargs: Any) -> LayoutMismatchError:
    """Return the error of a restore that must fail, and of its plan the same."""
    plan = plan_restore(skeleton, path, **kwargs)
    with pytest.raises(LayoutMismatchError) as caught:
        restore_into(skeleton, path, **kwargs)
    with pytest.raises(LayoutMismatchError) as applied:
        plan.apply()
    assert str(applied.value) == str(caught.value)
    assert tuple(caught.value.mismatches) == plan.mismatches
    assert os.fspath(caught.value.path) == str(path)
    return caught.value


# one leaf ---------------------------------------------------------------------


def _key(impl: str = "threefry2x32", *shape: int) -> jax.Array:
    key = jax.random.key(0, impl=impl)
    return jax.random.split(key, shape) if shape else key


def _wide(dtype: Any, *shape: int) -> jax.Array:
    with jax.enable_x64(True):
        return jnp.zeros(shape, dtype)


def _relu(x: jax.Array) -> jax.Array:
    return x


# name: (the skeleton's leaf, the saved leaf, the problem, the words)
ONE_LEAF: dict[str, tuple[Callable[[], Any], Callable[[], Any], str, str]] = {
    "shape": (
        lambda: _zeros(8, 4),
        lambda: _zeros(8, 6),
        "shape",
        "expected float32[8,4], found float32[8,6]",
    ),
    "rank": (
        lambda: _zeros(8),
        lambda: _zeros(8, 1, 1),
        "shape",
        "expected float32[8], found float32[8,1,1]",
    ),
    "scalar against one element": (
        lambda: _zeros(1, 1),
        lambda: _zeros(),
        "shape",
        "expected float32[1,1], found float32[]",
    ),
    "empty against none": (
        lambda: _zeros(0, 3),
        lambda: _zeros(3, 0),
        "shape",
        "expected float32[0,3], found float32[3,0]",
    ),
    "half into single": (
        lambda: _zeros(3),
        lambda: _zeros(3, dtype=np.float16),
        "dtype",
        "expected float32[3], found float16[3]",
    ),
    "bfloat16 against float16": (
        lambda: _zeros(3, dtype=jnp.bfloat16),
        lambda: _zeros(3, dtype=np.float16),
        "dtype",
        "expected bfloat16[3], found float16[3]",
    ),
    "int32 into float32": (
        lambda: _zeros(3),
        lambda: _zeros(3, dtype=np.int32),
        "dtype",
        "expected float32[3], found int32[3]",
    ),
    "signed against unsigned": (
        lambda: _zeros(3, dtype=np.uint32),
        lambda: _zeros(3, dtype=np.int32),
        "dtype",
        "expected uint32[3], found int32[3]",
    ),
    "bool against uint8": (
        lambda: _zeros(3, dtype=bool),
        lambda: _zeros(3, dtype=np.uint8),
        "dtype",
        "expected bool[3], found uint8[3]",
    ),
    "float64 into float32": (
        lambda: _zeros(3),
        lambda: _wide(np.float64, 3),
        "dtype",
        "expected float32[3], found float64[3]",
    ),
    "float32 into float64": (
        lambda: _wide(np.float64, 3),
        lambda: _zeros(3),
        "dtype",
        "expected float64[3], found float32[3]",
    ),
    "int64 into int32": (
        lambda: _zeros(dtype=np.int32),
        lambda: _wide(np.int64),
        "dtype",
        "expected int32[], found int64[]",
    ),
    "int64 into weak int32": (
        lambda: jnp.asarray(0),
        lambda: _wide(np.int64),
        "dtype",
        "expected ~int32[], found int64[]",
    ),
    "complex128 into complex64": (
        lambda: _zeros(2, dtype=np.complex64),
        lambda: _wide(np.complex128, 2),
        "dtype",
        "expected complex64[2], found complex128[2]",
    ),
    "numpy float64 into jax float32": (
        lambda: _zeros(3),
        lambda: np.zeros(3),
        "dtype",
        "expected float32[3], found numpy float64[3]",
    ),
    "jax float32 into numpy float64": (
        lambda: np.zeros(3),
        lambda: _zeros(3),
        "dtype",
        "expected numpy float64[3], found float32[3]",
    ),
    "key of another implementation": (
        lambda: _key("rbg"),
        lambda: _key("threefry2x32"),
        "key implementation",
        "expected key<rbg>[], found key<threefry2x32>[]",
    ),
    "rbg against unsafe_rbg": (
        lambda: _key("rbg"),
        lambda: _key("unsafe_rbg"),
        "key implementation",
        "expected key<rbg>[], found key<unsafe_rbg>[]",
    ),
    "batch of keys": (
        lambda: _key("rbg", 3),
        lambda: _key("rbg", 2, 2),
        "shape",
        "expected key<rbg>[3], found key<rbg>[2,2]",
    ),
    "raw key into typed key": (
        lambda: _key(),
        lambda: jax.random.PRNGKey(0),
        "kind",
        "expected key<threefry2x32>[], found uint32[2]",
    ),
    "typed key into raw key": (
        lambda: jax.random.PRNGKey(0),
        lambda: _key(),
        "kind",
        "expected uint32[2], found key<threefry2x32>[]",
    ),
    "str into array": (
        lambda: _zeros(3),
        lambda: "abc",
        "kind",
        "expected float32[3], found Python str",
    ),
    "bytes into str": (
        lambda: "abc",
        lambda: b"abc",
        "kind",
        "expected Python str, found Python bytes",
    ),
    "array into Python int": (
        lambda: 0,
        lambda: _zeros(2, dtype=np.int32),
        "shape",
        "expected Python int, found int32[2]",
    ),
    "str into Python int": (
        lambda: 0,
        lambda: "0",
        "kind",
        "expected Python int, found Python str",
    ),
    "Python int into a vector": (
        lambda: _zeros(2, dtype=np.int32),
        lambda: 3,
        "kind",
        "expected int32[2], found Python int",
    ),
    "Python float into int32": (
        lambda: _zeros(dtype=np.int32),
        lambda: 3.5,
        "kind",
        "expected int32[], found Python float",
    ),
    "enum into int": (
        lambda: 0,
        lambda: Phase.TRAIN,
        "kind",
        "expected Python int, found enum member",
    ),
    "function into array": (
        lambda: _zeros(2),
        lambda: _relu,
        "kind",
        "expected float32[2], found function",
    ),
    "array into function": (
        lambda: _relu,
        lambda: _zeros(2),
        "kind",
        "expected function, found float32[2]",
    ),
    "None against data": (
        lambda: None,
        lambda: _zeros(2),
        "extra",
        "expected nothing, found float32[2]",
    ),
    "data against None": (
        lambda: _zeros(2),
        lambda: None,
        "missing",
        "expected float32[2], found nothing",
    ),
    "an empty container against data": (
        lambda: {},
        lambda: np.float32(1),
        "extra",
        "expected nothing, found numpy float32 scalar",
    ),
}


@pytest.mark.parametrize("name", ONE_LEAF)
def test_one_leaf_that_does_not_fit_is_named(name: str, path: Path) -> None:
    like, saved, problem, words = ONE_LEAF[name]
    save_checkpoint({"a": {"leaf": saved()}, "n": 1}, path)
    error = _refuse({"a": {"leaf": like()}, "n": 0}, path)
    first, leaf, *hint = str(error).splitlines()
    assert first == (f"{path}: cannot restore: 1 of 2 leaves does not fit the skeleton")
    assert leaf == f"  a.leaf: {words}"
    assert len(hint) == 1
    assert hint[0].startswith("To mend: ")
    (item,) = error.mismatches
    assert (item.name, item.problem) == ("a.leaf", problem)
    assert f"{item}" == f"a.leaf: {words}"


FITS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "weak against strong": (lambda: jnp.asarray(0), lambda: _zeros(dtype=np.int32)),
    "strong against weak": (lambda: _zeros(dtype=np.int32), lambda: jnp.asarray(3)),
    "weak int against float32": (lambda: jnp.asarray(0), lambda: _zeros()),
    "Python int against int32": (lambda: 0, lambda: _zeros(dtype=np.int32)),
    "Python int against float32": (lambda: 0, lambda: _zeros()),
    "weak int32 against Python int": (lambda: jnp.asarray(0), lambda: 3),
    "int32 against Python int": (lambda: _zeros(dtype=np.int32), lambda: 3),
    "Python int against Python float": (lambda: 0, lambda: 2.5),
    "numpy against jax": (lambda: np.zeros(3, np.float32), lambda: _zeros(3)),
    "jax against numpy": (lambda: _zeros(3), lambda: np.zeros(3, np.float32)),
    "another member of the enum": (lambda: Phase.TRAIN, lambda: Phase.WARM_UP),
    "a list against a tuple": (lambda: [1, 2], lambda: (3, 4)),
}


@pytest.mark.parametrize("name", FITS)
def test_what_is_no_mismatch(name: str, path: Path) -> None:
    like, saved = (build() for build in FITS[name])
    save_checkpoint({"leaf": saved}, path)
    assert plan_restore({"leaf": like}, path).mismatches == ()
    restored = restore_into({"leaf": like}, path)
    if name == "a list against a tuple":
        assert restored == {"leaf": [3, 4]}
        return
    assert_identical(restored, {"leaf": saved}, {"leaf": like})


def test_a_member_that_the_enum_has_lost_is_named(path: Path) -> None:
    class Later(enum.Enum):
        WARM_UP = 1

    save_checkpoint({"phase": Phase.TRAIN}, path)
    error = _refuse({"phase": Later.WARM_UP}, path)
    assert "phase: expected enum member, found enum member" in str(error)
    assert "has no member 'TRAIN'" in str(error)


# many leaves ------------------------------------------------------------------


class Agent(NamedTuple):
    actor: Any
    critic: Any
    key: Any
    step: Any


def test_all_mismatches_stand_in_one_error_in_the_skeletons_order(path: Path) -> None:
    saved = Agent(
        actor={"w": _zeros(8, 6), "b": _zeros(4), "old": _zeros(2)},
        critic=None,
        key=_key("rbg"),
        step=jnp.asarray(3),
    )
    skeleton = Agent(
        actor={"w": _zeros(8, 4), "b": _zeros(4, dtype=np.float16), "new": _zeros(2)},
        critic=_zeros(3),
        key=_key(),
        step=0,
    )
    before = jax.tree.leaves(skeleton)
    save_checkpoint(saved, path)
    error = _refuse(skeleton, path)
    assert str(error).splitlines() == [
        f"{path}: cannot restore: 6 of 7 leaves do not fit the skeleton",
        "  actor.b: expected float16[4], found float32[4]",
        "  actor.new: expected float32[2], found nothing",
        "  actor.w: expected float32[8,4], found float32[8,6]",
        "  critic: expected float32[3], found nothing",
        "  key: expected key<threefry2x32>[], found key<rbg>[]",
        "  actor.old: expected nothing, found float32[2]",
        f"{BUILD_HINT}, or name the exceptions: keep= for what the file lacks, "
        "ignore= for what the skeleton lacks, resize= for other shapes, or register a "
        'migration: step.move("actor.old", "actor.new") and 2 more, which the plan '
        "prints",
    ]
    assert [(item.name, item.problem) for item in error.mismatches] == [
        ("actor.b", "dtype"),
        ("actor.new", "missing"),
        ("actor.w", "shape"),
        ("critic", "missing"),
        ("key", "key implementation"),
        ("actor.old", "extra"),
    ]
    shape = error.mismatches[2]
    assert shape.expected is not None
    assert shape.found is not None
    assert (shape.expected.shape, shape.found.shape) == ((8, 4), (8, 6))
    assert (shape.expected.dtype, shape.expected.kind) == ("float32", "jax")
    assert error.mismatches[1].found is None
    assert error.mismatches[5].expected is None
    after = jax.tree.leaves(skeleton)
    assert all(old is new for old, new in zip(before, after, strict=True))


def _network(layers: int) -> dict[str, Any]:
    return {
        f"layer_{i}": {"b": _zeros(2), "w": _zeros(2, 2)} for i in range(layers)
    } | {"step": 0}


def test_a_deeper_network_lists_ten_leaves_and_counts_the_rest(path: Path) -> None:
    save_checkpoint(_network(4), path)
    error = _refuse(_network(12), path)
    first, *leaves, more, hint = str(error).splitlines()
    # eight layers of two leaves are missing, of 12 * 2 + 1
    assert first.endswith("16 of 25 leaves do not fit the skeleton")
    names = sorted(f"layer_{i}" for i in range(4, 12))
    expected = [f"  {n}.{x}: expected float32" for n in names for x in ("b", "w")]
    assert len(leaves) == 10
    for line, start in zip(leaves, expected, strict=False):
        assert line.startswith(start)
        assert line.endswith(", found nothing")
    assert more == "  and 6 more"
    assert hint == (
        f"{BUILD_HINT}, or name the exceptions: keep=…, or register a migration: "
        'step.add("layer_10", from_skeleton=True) and 7 more, which the plan prints'
    )
    assert len(error.mismatches) == 16


def test_a_shallower_network_lists_what_it_has_no_place_for(path: Path) -> None:
    save_checkpoint(_network(12), path)
    error = _refuse(_network(4), path)
    first, *leaves, more, _ = str(error).splitlines()
    assert first.endswith("16 of 25 leaves do not fit the skeleton")
    assert all("expected nothing, found float32" in line for line in leaves)
    assert (len(leaves), more) == (10, "  and 6 more")
    assert {item.problem for item in error.mismatches} == {"extra"}


@pytest.mark.parametrize("count", [9, 10, 11])
def test_ten_lines_stand_whole(count: int, path: Path) -> None:
    save_checkpoint({}, path)
    error = _refuse({f"leaf_{i:02}": 0 for i in range(count)}, path)
    lines = str(error).splitlines()
    assert len([line for line in lines if line.startswith("  leaf_")]) == min(count, 10)
    assert ("  and 1 more" in lines) == (count == 11)


def test_the_state_that_is_one_leaf_has_the_empty_name(path: Path) -> None:
    save_checkpoint(_zeros(3), path)
    error = _refuse(_zeros(4), path)
    assert '  "": expected float32[4], found float32[3]' in str(error).splitlines()


# a leading axis ---------------------------------------------------------------


def _seeds(count: int) -> dict[str, Any]:
    return {"w": _zeros(count, 8, 4), "key": _key("threefry2x32", count)}


def _one_seed() -> dict[str, Any]:
    return {"w": _zeros(8, 4), "key": _key()}


def _last_line(error: CheckpointError) -> str:
    return str(error).splitlines()[-1]


def test_a_leading_axis_too_many_in_the_file_is_hinted_at(path: Path) -> None:
    save_checkpoint(_seeds(5), path)
    hint = _last_line(_refuse(_one_seed(), path))
    assert hint == (
        "To mend: the file's leaves have one more leading axis, of size 5 (seeds or "
        "devices?): build the skeleton with the same axis"
    )


def test_a_leading_axis_too_many_in_the_skeleton_is_hinted_at(path: Path) -> None:
    save_checkpoint(_one_seed(), path)
    hint = _last_line(_refuse(_seeds(5), path))
    assert hint == (
        "To mend: the skeleton's leaves have one more leading axis, of size 5 (seeds "
        "or devices?): build the skeleton with the same axis"
    )


def test_other_shapes_are_no_leading_axis(path: Path) -> None:
    save_checkpoint({**_seeds(5), "w": _zeros(6, 8, 4)}, path)
    resize = f"{BUILD_HINT}, or name the exceptions: resize="
    assert _last_line(_refuse(_one_seed(), path)).startswith(resize)
    save_checkpoint({**_one_seed(), "w": _zeros(8, 4, 5)}, path)
    assert _last_line(_refuse(_one_seed(), path)).startswith(resize)


def test_the_hint_names_the_argument_that_helps_and_it_does(path: Path) -> None:
    saved = {"w": _zeros(3), "n": jnp.asarray(1)}
    save_checkpoint(saved, path)
    for skeleton, argument, name, verb in (
        ({**saved, "ema": _zeros(3)}, "keep", "ema", 'add("ema", from_skeleton=True)'),
        ({"w": _zeros(3)}, "ignore", "n", 'drop("n")'),
        ({**saved, "w": _zeros(4)}, "resize", "w", ""),
    ):
        hint = _last_line(_refuse(skeleton, path))
        rule = f", or register a migration: step.{verb}" if verb else ""
        exception = f", or name the exceptions: {argument}=({name!r},)"
        assert hint == f"{BUILD_HINT}{exception}{rule}"
        restore_into(skeleton, path, **{argument: (name,)})
    hint = _last_line(_refuse({**saved, "w": _zeros(3, dtype=np.float16)}, path))
    leave_out = "only keep= and ignore= can leave out what is of another dtype or kind"
    rule = 'step.cast("w", "float16")'
    assert hint == f"{BUILD_HINT}; {leave_out}, or register a migration: {rule}"


def test_what_is_ignored_and_wanted_says_so(path: Path) -> None:
    save_checkpoint({"w": _zeros(3), "n": 1}, path)
    error = _refuse({"w": _zeros(3), "n": 1}, path, ignore="w")
    assert "w: expected float32[3], found nothing (ignored by ignore=)" in str(error)


@pytest.mark.parametrize("keep", ["", "**", ("w", "n")])
def test_keep_of_everything_restores_nothing_and_is_refused(
    path: Path, keep: Any
) -> None:
    save_checkpoint({"w": _zeros(3), "n": 1}, path)
    with pytest.raises(InvalidArgumentError, match="nothing would be restored"):
        restore_into({"w": _zeros(3), "n": 1}, path, keep=keep)


@pytest.mark.parametrize("state", [None, {}, [], {"a": None, "b": ()}])
def test_a_state_without_leaves_replaces_no_other(path: Path, state: Any) -> None:
    save_checkpoint(state, path)
    save_checkpoint(state, path)  # one without leaves it may
    save_checkpoint({"w": _zeros(3)}, path)
    before = path.read_bytes()
    with pytest.raises(InvalidArgumentError, match="the state has no leaves"):
        save_checkpoint(state, path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("exclude", ["", "**", ("w", "n")])
def test_exclude_of_everything_saves_nothing_and_is_refused(
    path: Path, exclude: Any
) -> None:
    with pytest.raises(InvalidArgumentError, match="exclude= selects every leaf"):
        save_checkpoint({"w": _zeros(3), "n": 1}, path, exclude=exclude)
    assert not path.exists()


def test_more_patterns_than_a_reader_takes_are_refused_before_a_byte(
    path: Path,
) -> None:
    state: dict[str, Any] = {f"x{i}" * 150: i for i in range(30)}
    with pytest.raises(InvalidArgumentError, match="the limit is 10000"):
        save_checkpoint(state, path, exclude=list(state)[:29])
    assert not path.exists()


def test_wide_leaves_are_refused_for_a_number_while_x64_is_off(path: Path) -> None:
    with jax.enable_x64(True):
        wide = jnp.asarray(2**40, jnp.int64)
    save_checkpoint({"n": wide}, path)
    error = _refuse({"n": 0}, path)
    assert "n: expected Python int, found int64[] (x64 is off here" in str(error)
    assert plan_restore({"n": 0}, path).load == ()
    with jax.enable_x64(True):
        assert int(restore_into({"n": 0}, path)["n"]) == 2**40


@pytest.mark.parametrize("subtree", [5, None, b"w"])
def test_a_subtree_that_is_no_name_is_refused(path: Path, subtree: Any) -> None:
    save_checkpoint({"w": 1}, path)
    with pytest.raises(InvalidArgumentError, match="subtree: expected a leaf name"):
        restore_into({"w": 1}, path, subtree=subtree)


@pytest.mark.parametrize("patterns", [None, 5, b"w", (None,)])
def test_what_is_no_pattern_is_refused_whatever_the_argument(
    path: Path, patterns: Any
) -> None:
    state = {"w": _zeros(3), "n": 1}
    with pytest.raises(InvalidArgumentError, match="exclude: expected"):
        save_checkpoint(state, path, exclude=patterns)
    assert not path.exists()
    save_checkpoint(state, path)
    for argument in ("keep", "ignore", "resize"):
        with pytest.raises(InvalidArgumentError, match=f"{argument}: expected"):
            restore_into(state, path, **{argument: patterns})


def test_a_dtype_that_only_numpy_has_goes_to_no_jax_leaf(path: Path) -> None:
    scalar = np.zeros((), ml_dtypes.float8_e4m3)
    for dtype in (ml_dtypes.float6_e2m3fn, scalar.dtype):
        save_checkpoint({"a": np.zeros((), dtype)}, path)
        try:
            jax.device_put(np.zeros((), dtype))
        except (TypeError, ValueError, RuntimeError):
            assert "this JAX has no arrays" in str(
                _refuse({"a": jnp.asarray(0.0)}, path)
            )
        else:
            assert restore_into({"a": jnp.asarray(0.0)}, path)["a"].dtype == dtype


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        (argparse.Namespace(lr=1), "pass vars(value), or a dataclass"),
        (Path("runs"), "pass its name, as a str"),
        (Phase.TRAIN, "pass its name, as a str"),
        (jnp.tanh, "pass its name, as a str"),
        (np.zeros(2), "pass value.tolist()"),
    ],
)
def test_a_refused_config_names_the_way_out(path: Path, value: Any, hint: str) -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        save_checkpoint({"w": 1}, path, config={"x": value})
    assert raised.value.hint == hint


def test_config_values_come_back_as_they_were_given(path: Path) -> None:
    class Act(str, enum.Enum):  # noqa: UP042 - what users still write
        RELU = "relu"

    config = {"seed": np.str_("007"), "act": Act.RELU, Act.RELU: jnp.int4(3)}
    config["big"] = np.int64(2**60 + 1)
    save_checkpoint({"w": 1}, path, config=config)
    with open_checkpoint(path) as checkpoint:
        read = checkpoint.config
    assert read == {"seed": "007", "act": "relu", "relu": 3, "big": 2**60 + 1}
    assert [type(value) for value in read.values()] == [str, str, int, int]


@pytest.mark.parametrize(
    "value",
    [
        "\ud83d\ude00",
        {"\ud83d\ude00": 1},
        np.timedelta64(5, "ns"),
        np.array(2**70, dtype=object),
        np.longdouble(1),
        np.complex64(1),
    ],
)
def test_config_values_that_would_change_are_refused(path: Path, value: Any) -> None:
    with pytest.raises(InvalidArgumentError):
        save_checkpoint({"w": 1}, path, config={"x": value})
    assert not path.exists()


def test_a_zero_size_array_of_huge_axes_comes_back(path: Path) -> None:
    empty = np.zeros((0, 2**57), np.complex128)
    save_checkpoint({"e": empty}, path)
    assert restore_into({"e": empty}, path)["e"].shape == empty.shape


def test_looking_up_a_node_says_what_is_below(path: Path) -> None:
    save_checkpoint({"actor": {"w": _zeros(3), "b": 2}}, path)
    with open_checkpoint(path) as checkpoint:
        with pytest.raises(KeyError, match=r"actor is no leaf; below it are actor\.b"):
            checkpoint["actor"]
        assert checkpoint.get("actor") is None
        assert checkpoint.get(5) is None  # type: ignore[call-overload]
    with pytest.raises(InvalidArgumentError, match="the checkpoint is closed"):
        checkpoint["actor.w"]


# named exceptions -------------------------------------------------------------


def _file_state() -> dict[str, Any]:
    return {
        "actor": {"w": _zeros(3) + 1, "b": _zeros(2) + 2},
        "opt": {"mu": _zeros(3) + 3, "count": jnp.asarray(4)},
        "replay": {"data": np.arange(6.0), "size": 6},
    }


def test_keep_takes_the_skeletons_own_leaf(path: Path) -> None:
    save_checkpoint(_file_state(), path)
    skeleton = {**_file_state(), "fresh": np.zeros(2)}
    skeleton["actor"] = {"w": _zeros(3), "b": _zeros(2)}
    plan = plan_restore(skeleton, path, keep=["fresh", "actor.b"], ignore="actor.b")
    assert plan.keep == ("actor.b", "fresh")
    restored = plan.apply()
    assert restored["fresh"] is skeleton["fresh"]
    assert restored["actor"]["b"] is skeleton["actor"]["b"]
    assert restored["actor"]["w"].tolist() == [1, 1, 1]


def test_keep_may_be_of_a_kind_that_no_file_holds(path: Path) -> None:
    save_checkpoint({"n": 3}, path)
    writer = SimpleNamespace()
    skeleton = {"n": 0, "writer": writer}
    with pytest.raises(UnsupportedLeafError, match="writer"):
        restore_into(skeleton, path)
    restored = restore_into(skeleton, path, keep="writer")
    assert restored == {"n": 3, "writer": writer}


def test_keep_of_an_abstract_leaf_is_refused(path: Path) -> None:
    save_checkpoint({"w": _zeros(3)}, path)
    skeleton = jax.eval_shape(lambda: {"w": _zeros(3), "new": _zeros(2)})
    with pytest.raises(UnsupportedLeafError) as caught:
        restore_into(skeleton, path, keep="new")
    assert str(caught.value).splitlines() == [
        f"{path}: cannot restore: new: keep= of an abstract leaf",
        "To mend: build the skeleton with a zero-step call instead of jax.eval_shape",
    ]


def test_ignore_leaves_the_files_leaf_unread(path: Path) -> None:
    save_checkpoint(_file_state(), path)
    skeleton = {"actor": _file_state()["actor"]}
    assert len(_refuse(skeleton, path).mismatches) == 4
    plan = plan_restore(skeleton, path, ignore=("opt", "replay.*"))
    assert plan.ignore == ("opt.count", "opt.mu", "replay.data", "replay.size")
    assert plan.load == ("actor.b", "actor.w")
    assert_identical(plan.apply(), {"actor": _file_state()["actor"]}, skeleton)


def test_an_ignored_leaf_that_the_skeleton_wants_is_missing(path: Path) -> None:
    save_checkpoint(_file_state(), path)
    error = _refuse(_file_state(), path, ignore="actor.w")
    assert [(m.name, m.problem) for m in error.mismatches] == [("actor.w", "missing")]


def test_resize_takes_the_files_shape_and_no_other_dtype(path: Path) -> None:
    save_checkpoint({"replay": np.arange(6.0), "obs": _zeros(6, 2) + 1}, path)
    skeleton = {"replay": np.zeros(0), "obs": _zeros(0, 2)}
    assert len(_refuse(skeleton, path).mismatches) == 2
    assert len(_refuse(skeleton, path, resize="obs").mismatches) == 1
    plan = plan_restore(skeleton, path, resize="**")
    assert plan.resize == ("obs", "replay")
    restored = plan.apply()
    assert restored["replay"].tolist() == [0, 1, 2, 3, 4, 5]
    assert restored["obs"].shape == (6, 2)
    narrow = {**skeleton, "obs": _zeros(0, 2, dtype=np.int32)}
    error = _refuse(narrow, path, resize="**")
    assert [(m.name, m.problem) for m in error.mismatches] == [("obs", "dtype")]


def test_a_leaf_that_fits_is_not_listed_as_resized(path: Path) -> None:
    save_checkpoint({"a": np.zeros(3), "b": np.zeros(4)}, path)
    plan = plan_restore({"a": np.ones(3), "b": np.ones(3)}, path, resize="**")
    assert plan.resize == ("b",)
    assert plan.load == ("a", "b")


def test_subtree_restores_from_below_a_name(path: Path) -> None:
    save_checkpoint(_file_state(), path)
    skeleton = {"w": _zeros(3), "b": _zeros(2)}
    restored = restore_into(skeleton, path, subtree="actor")
    assert_identical(restored, _file_state()["actor"], skeleton)
    assert restore_into(_zeros(3), path, subtree="opt.mu").tolist() == [3, 3, 3]
    plan = plan_restore(skeleton, path, subtree="actor", keep="b", ignore="b")
    assert (plan.subtree, plan.load, plan.keep, plan.ignore) == (
        "actor",
        ("w",),
        ("b",),
        ("b",),
    )


def test_mismatches_below_a_subtree_say_so(path: Path) -> None:
    save_checkpoint(_file_state(), path)
    error = _refuse({"w": _zeros(4), "b": _zeros(2)}, path, subtree="actor")
    assert str(error).splitlines()[:2] == [
        f"{path}: cannot restore: 1 of 2 leaves below actor does not fit the skeleton",
        "  w: expected float32[4], found float32[3]",
    ]


@pytest.mark.parametrize("subtree", ["critic", "act", "actor.w.x", "actor.*"])
def test_a_subtree_that_is_not_there_lists_what_is(subtree: str, path: Path) -> None:
    save_checkpoint(_file_state(), path)
    with pytest.raises(InvalidArgumentError) as caught:
        restore_into(_zeros(3), path, subtree=subtree)
    text = str(caught.value)
    assert text.startswith(f"{path}: cannot restore: subtree")
    if "*" not in subtree:
        assert f"subtree={subtree!r} selects no leaf" in text
        assert "actor, opt, replay" in text


@pytest.mark.parametrize("argument", ["keep", "ignore", "resize"])
def test_a_pattern_that_selects_nothing_names_near_names(
    argument: str, path: Path
) -> None:
    save_checkpoint(_file_state(), path)
    with pytest.raises(InvalidArgumentError) as caught:
        restore_into(_file_state(), path, **{argument: "actr.w"})
    first, hint = str(caught.value).splitlines()
    assert first == (f'{path}: cannot restore: {argument}="actr.w" selects no leaf')
    assert "actor.w" in hint


def test_exclude_that_selects_nothing_writes_nothing(path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"exclude=.*selects no leaf"):
        save_checkpoint(_file_state(), path, exclude=["replay", "relay"])
    assert not path.exists()


def test_what_was_left_out_on_purpose_says_so(path: Path) -> None:
    record = save_checkpoint(_file_state(), path, exclude="replay")
    assert record.excluded == ("replay",)
    error = _refuse(_file_state(), path)
    assert str(error).splitlines() == [
        f"{path}: cannot restore: 2 of 6 leaves do not fit the skeleton",
        "  replay.data: expected numpy float64[6], found nothing "
        '(left out on purpose by exclude="replay")',
        "  replay.size: expected Python int, found nothing "
        '(left out on purpose by exclude="replay")',
        "To mend: pass keep=('replay',) to take those leaves from the skeleton",
    ]
    skeleton = _file_state()
    restored = restore_into(skeleton, path, keep=("replay",))
    assert restored["replay"]["data"] is skeleton["replay"]["data"]


def test_the_hint_names_only_the_patterns_that_are_needed(path: Path) -> None:
    save_checkpoint(_file_state(), path, exclude=("replay", "opt.mu"))
    skeleton = {**_file_state(), "opt": {"count": jnp.asarray(0)}}
    error = _refuse(skeleton, path)
    keep = _last_line(error).removeprefix("To mend: pass keep=").split(" to take")[0]
    assert keep == "('replay',)"
    restore_into(skeleton, path, keep=("replay",))  # the advice works as it stands


def test_left_out_below_a_subtree_gives_advice_that_works(path: Path) -> None:
    save_checkpoint(_file_state(), path, exclude="opt.mu")
    skeleton = {"mu": _zeros(3), "count": jnp.asarray(0)}
    error = _refuse(skeleton, path, subtree="opt")
    assert "left out on purpose" in str(error)
    keep = _last_line(error).removeprefix("To mend: pass keep=('").split("',)")[0]
    restored = restore_into(skeleton, path, subtree="opt", keep=keep)
    assert restored["mu"] is skeleton["mu"]


# the plan ---------------------------------------------------------------------


def test_the_plan_is_data_and_prints_as_a_table(path: Path) -> None:
    save_checkpoint({**_file_state(), "act": _relu}, path)
    skeleton = {
        "actor": {"w": _zeros(3), "b": _zeros(2)},
        "replay": {"data": np.zeros(0), "size": 0},
        "act": abs,
        "fresh": 1,
    }
    plan = plan_restore(
        skeleton, path, keep="fresh", ignore="opt", resize="replay.data"
    )
    assert plan.path == str(path)
    assert plan.load == ("act", "actor.b", "actor.w", "replay.data", "replay.size")
    assert plan.keep == ("fresh",)
    assert plan.ignore == ("opt.count", "opt.mu")
    assert plan.resize == ("replay.data",)
    assert plan.mismatches == ()
    first, *rest = str(plan).splitlines()
    assert str(path) in first
    # 3 and 2 float32, 6 float64; Python numbers and functions stand in the header
    assert "68" in " ".join(rest)
    (note,) = [line for line in rest if "skeleton's function" in line]
    assert "act" in note
    assert f"{__name__}._relu" in note
    assert "builtins.abs" in note


def test_a_plan_prints_its_mismatches(path: Path) -> None:
    save_checkpoint({"a": _zeros(3)}, path)
    text = str(plan_restore({"a": _zeros(4), "b": 0}, path))
    rows = [line.split() for line in text.splitlines()]
    assert any({"a", "float32[4]", "float32[3]"} <= set(row) for row in rows)
    assert any({"b", "Python", "int"} <= set(row) for row in rows)


def test_a_plan_can_be_applied_twice_and_after_the_file_is_replaced(
    path: Path,
) -> None:
    save_checkpoint({"a": _zeros(3) + 1}, path)
    plan = plan_restore({"a": _zeros(3)}, path)
    first, second = plan.apply(), plan.apply()
    assert first["a"].unsafe_buffer_pointer() != second["a"].unsafe_buffer_pointer()
    save_checkpoint({"a": _zeros(3) + 2}, path)
    # it planned for the file it saw
    assert plan.apply()["a"].tolist() == first["a"].tolist() == [1, 1, 1]
    assert second["a"].tolist() == [1, 1, 1]


# errors as values -------------------------------------------------------------

TREE = {
    NotACheckpointError: (CheckpointError,),
    DamagedCheckpointError: (CheckpointError,),
    NewerFormatError: (CheckpointError,),
    UnsupportedLeafError: (CheckpointError,),
    LayoutMismatchError: (CheckpointError,),
    MigrationError: (CheckpointError,),
    InvalidArgumentError: (CheckpointError, ValueError),
    StepExistsError: (CheckpointError, FileExistsError),
    CheckpointNotFoundError: (CheckpointError, FileNotFoundError),
}


@pytest.mark.parametrize("error", TREE, ids=lambda error: error.__name__)
def test_the_exception_tree(error: type[CheckpointError]) -> None:
    assert error.__bases__ == TREE[error]
    others = set(TREE) - {error}
    assert not any(issubclass(error, other) for other in others)


@pytest.mark.parametrize("kind", TREE, ids=lambda error: error.__name__)
def test_errors_survive_pickling(kind: type[CheckpointError]) -> None:
    error = kind(
        "two leaves", act="cannot restore", path="/x", details=("a", "b"), hint="do"
    )
    text = "/x: cannot restore: two leaves\n  a\n  b\nTo mend: do"
    copy = pickle.loads(pickle.dumps(error))
    assert str(error) == str(copy) == text
    assert type(copy) is kind
    assert (copy.path, copy.hint, tuple(copy.details)) == ("/x", "do", ("a", "b"))


def test_a_mismatch_error_crosses_a_process_with_its_data(path: Path) -> None:
    save_checkpoint({"a": _zeros(3), "b": 1}, path)
    error = _refuse({"a": _zeros(4), "c": 2}, path)
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == str(error)
    assert copy.path == error.path
    assert tuple(copy.mismatches) == tuple(error.mismatches)
    assert len(copy.mismatches) == 3


def test_a_missing_file_is_a_file_not_found_error(path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        restore_into({"a": 1}, path)
    assert isinstance(caught.value, CheckpointNotFoundError)
    assert str(path) in str(caught.value)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


# step -------------------------------------------------------------------------


def _read_step(step: Any, path: Path) -> int | None:
    record = save_checkpoint({"n": 1}, path, step=step)
    with open_checkpoint(path) as file:
        assert file.step == record.step
        assert record.step is None or type(record.step) is int
        return record.step


STEPS = {
    "none": (lambda: None, None),
    "int": (lambda: 7, 7),
    "zero": (lambda: 0, 0),
    "largest": (lambda: 2**63 - 1, 2**63 - 1),
    "numpy int64": (lambda: np.int64(7), 7),
    "numpy uint8": (lambda: np.uint8(7), 7),
    "jax scalar": (lambda: jnp.asarray(7), 7),
    "jax uint32": (lambda: jnp.uint32(2**32 - 1), 2**32 - 1),
    "numpy 0-d": (lambda: np.array(7), 7),
    "seeds axis": (lambda: jnp.full(5, 7), 7),
    "seeds and devices": (lambda: np.full((2, 3), 7, np.int32), 7),
    "sharded": (
        lambda: jax.device_put(
            np.full(8, 7, np.int32),
            NamedSharding(
                jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,)), P("x")
            ),
        ),
        7,
    ),
}


@pytest.mark.parametrize("name", STEPS)
def test_steps(name: str, path: Path) -> None:
    build, expected = STEPS[name]
    assert _read_step(build(), path) == expected


BAD_STEPS = {
    "unequal": (lambda: jnp.arange(3), "the values differ: between 0 and 2"),
    "negative": (lambda: -1, "-1 is not within 0"),
    "negative array": (lambda: np.array([-2, -2]), "-2 is not within 0"),
    "too large": (lambda: 2**63, "9223372036854775808 is not within 0"),
    "bool": (lambda: True, "True is not an integer"),
    "numpy bool": (lambda: np.True_, "no integer"),
    "bool array": (lambda: jnp.array([True, True]), "no integer"),
    "float": (lambda: 3.0, "3.0 is not an integer"),
    "float array": (lambda: jnp.ones(2), "no integer"),
    "str": (lambda: "3", "'3' is not an integer"),
    "list": (lambda: [3, 3], "is not an integer"),
    "empty": (lambda: np.zeros(0, int), "no integer"),
    "key": (lambda: jax.random.key(0), ""),
    "abstract": (lambda: jax.ShapeDtypeStruct((), np.int32), ""),
    "deleted": (lambda: _deleted(), ""),
}


def _deleted() -> jax.Array:
    step = jnp.asarray(3) + 0
    step.delete()
    return step


def _assert_refused(path: Path, place: str, words: str, **kwargs: Any) -> None:
    """Assert that a save is refused by the argument's name and touches nothing."""
    save_checkpoint({"old": 1}, path)
    before = path.read_bytes()
    with pytest.raises(InvalidArgumentError) as caught:
        save_checkpoint({"new": 2}, path, **kwargs)
    lines = str(caught.value).splitlines()
    assert lines[0].startswith(f"{path}: cannot save: {place}: ")
    assert words in lines[0]
    assert lines[-1].startswith("To mend: ")
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize("name", BAD_STEPS)
def test_steps_that_are_refused(name: str, path: Path) -> None:
    build, words = BAD_STEPS[name]
    _assert_refused(path, "step", words, step=build())


# metrics ----------------------------------------------------------------------


def test_metrics_come_back_bit_for_bit(path: Path) -> None:
    metrics = {
        "return": -123.25,
        "best": None,
        "nan": math.nan,
        "inf": -math.inf,
        "zero": -0.0,
        "count": 10**20,
        "done": True,
        "numpy": np.float32(0.1),
        "jax": jnp.asarray(2),
        "half": jnp.bfloat16(1.5),
        "0-d": np.array(3.5),
        "with.dots and blanks": 1,
    }
    save_checkpoint({"n": 1}, path, metrics=MappingProxyType(metrics))
    with open_checkpoint(path) as file:
        found = file.metrics
    assert list(found) == list(metrics)
    assert math.isnan(found["nan"])
    assert math.copysign(1, found["zero"]) == -1
    exact = {
        "return": -123.25,
        "best": None,
        "inf": -math.inf,
        "count": 10**20,
        "done": True,
        "numpy": float(np.float32(0.1)),
        "jax": 2,
        "half": 1.5,
        "0-d": 3.5,
        "with.dots and blanks": 1,
    }
    assert {name: found[name] for name in exact} == exact
    assert type(found["jax"]) is int


BAD_METRICS = {
    "array": (lambda: {"loss": jnp.ones(3)}, "metrics.loss", "not a single number"),
    "one element": (lambda: {"l": np.ones(1)}, "metrics.l", "not a single number"),
    "str": (lambda: {"loss": "low"}, "metrics.loss", "a str is not a single number"),
    "complex": (lambda: {"loss": 1j}, "metrics.loss", "not a single number"),
    "list": (lambda: {"loss": [1]}, "metrics.loss", "a list is not a single number"),
    "nested": (lambda: {"a": {"b": 1}}, "metrics.a", "a dict is not a single number"),
    "key": (lambda: {3: 1.0}, "metrics", "the key 3 is a int, not a str"),
    "no mapping": (lambda: [1.0], "metrics", "a list is not a mapping"),
    "huge int": (lambda: {"n": 1 << 5000}, "metrics.n", "5001 bits"),
}


@pytest.mark.parametrize("name", BAD_METRICS)
def test_metrics_that_are_refused(name: str, path: Path) -> None:
    build, place, words = BAD_METRICS[name]
    _assert_refused(path, place, words, metrics=build())


# config -----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Optimiser:
    lr: float
    betas: tuple[float, float]


@dataclasses.dataclass(frozen=True)
class Config:
    env: str
    optimiser: Optimiser
    layers: tuple[int, ...]
    seed: int | None = None
    extras: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class Size(enum.IntEnum):
    SMALL = 1


def test_a_config_comes_back_as_plain_data(path: Path) -> None:
    config = Config(
        env="Pendulum-v1",
        optimiser=Optimiser(lr=3e-4, betas=(0.9, 0.999)),
        layers=(256, 256),
        extras=OrderedDict(
            gamma=np.float32(0.5),
            tau=jnp.asarray(0.25),
            steps=np.int64(10**12),
            flag=np.True_,
            low=-math.inf,
            unknown=math.nan,
            big=1 << 2000,
            size=Size.SMALL,
            text="é\ud800\n",
            nothing=None,
            nested=[[], {}, [1, (2, 3)]],
        ),
    )
    save_checkpoint({"n": 1}, path, config=config)
    with open_checkpoint(path) as file:
        found = file.config
    assert found is not None
    unknown = found["extras"].pop("unknown")
    assert math.isnan(unknown)
    assert found == {
        "env": "Pendulum-v1",
        "optimiser": {"lr": 3e-4, "betas": [0.9, 0.999]},
        "layers": [256, 256],
        "seed": None,
        "extras": {
            "gamma": 0.5,
            "tau": 0.25,
            "steps": 10**12,
            "flag": True,
            "low": -math.inf,
            "big": 1 << 2000,
            "size": 1,
            "text": "é\ud800\n",
            "nothing": None,
            "nested": [[], {}, [1, [2, 3]]],
        },
    }
    assert list(found["extras"])[:3] == ["gamma", "tau", "steps"]
    assert type(found["extras"]["flag"]) is bool
    assert type(found["extras"]["size"]) is int
    assert type(found["extras"]["steps"]) is int


def test_no_config_is_none_and_an_empty_one_is_empty(path: Path) -> None:
    save_checkpoint({"n": 1}, path)
    assert open_checkpoint(path).config is None
    save_checkpoint({"n": 1}, path, config={})
    assert open_checkpoint(path).config == {}


def _deep(levels: int) -> dict[str, Any]:
    config: dict[str, Any] = {}
    for _ in range(levels):
        config = {"a": config}
    return config


def _recursive() -> dict[str, Any]:
    config: dict[str, Any] = {}
    config["self"] = [config]
    return config


BAD_CONFIGS: dict[str, tuple[Callable[[], Any], str, str]] = {
    "int key": (lambda: {"a": {"b": {3: 1}}}, "config.a.b", "the key 3 is a int"),
    "None key": (lambda: {None: 1}, "config", "the key None is a NoneType"),
    "function": (lambda: {"net": {"act": _relu}}, "config.net.act", "a function is"),
    "class": (lambda: {"env": Config}, "config.env", "a type is not JSON-like data"),
    "object": (lambda: {"a": [1, {"b": object()}]}, "config.a[1].b", "a object is not"),
    "namespace": (lambda: SimpleNamespace(a=1), "config", "is not JSON-like data"),
    "list": (lambda: [1], "config", "a list is neither a mapping nor a dataclass"),
    "class itself": (lambda: Config, "config", "a type is not JSON-like data"),
    "set": (lambda: {"a": {1, 2}}, "config.a", "a set is not JSON-like data"),
    "bytes": (lambda: {"a": b"x"}, "config.a", "a bytes is not JSON-like data"),
    "complex": (lambda: {"a": 1j}, "config.a", "a complex is not JSON-like data"),
    "array": (lambda: {"a": np.ones(2)}, "config.a", "a ndarray is not JSON-like"),
    "jax array": (lambda: {"a": jnp.ones(2)}, "config.a", "is not JSON-like data"),
    "path": (lambda: {"a": Path("x")}, "config.a", "is not JSON-like data"),
    "enum": (lambda: {"a": Phase.TRAIN}, "config.a", "a Phase is not JSON-like data"),
    "dtype": (lambda: {"a": np.dtype("f4")}, "config.a", "is not JSON-like data"),
    "huge int": (lambda: {"a": 1 << 2048}, "config.a", "an int of 2049 bits"),
    "huge negative int": (lambda: {"a": -(1 << 9999)}, "config.a", "of 10000 bits"),
    "reserved key": (lambda: {"a": {"__float__": "nan"}}, "config.a", "reserved"),
    "in a dataclass": (
        lambda: Config(env="x", optimiser=_relu, layers=()),  # type: ignore[arg-type]
        "config.optimiser",
        "a function is not JSON-like data",
    ),
}


@pytest.mark.parametrize("name", BAD_CONFIGS)
def test_configs_that_are_refused(name: str, path: Path) -> None:
    build, place, words = BAD_CONFIGS[name]
    _assert_refused(path, place, words, config=build())


@pytest.mark.parametrize(
    "build", [lambda: _deep(100), lambda: _deep(20_000), _recursive]
)
def test_configs_without_a_bottom_are_refused(
    build: Callable[[], Any], path: Path
) -> None:
    with pytest.raises(InvalidArgumentError, match="nested deeper than 64 levels"):
        save_checkpoint({"n": 1}, path, config=build())
    assert os.listdir(path.parent) == []


def test_a_config_as_deep_as_is_allowed_comes_back(path: Path) -> None:
    save_checkpoint({"n": 1}, path, config=_deep(64))
    assert open_checkpoint(path).config == _deep(64)


def test_configs_do_not_enter_the_states_digest(path: Path) -> None:
    plain = save_checkpoint({"n": 1}, path).digest
    other = save_checkpoint({"n": 1}, path, config={"a": 1}, step=4, metrics={"b": 2})
    assert other.digest == plain


@pytest.mark.parametrize("wrong", [3, "agent", [3], {"agent": 1}, b"agent"])
def test_what_is_no_registry_of_migrations_is_refused(wrong: Any, path: Path) -> None:
    _assert_refused(path, "migrations", "expected registries, found", migrations=wrong)
    with pytest.raises(InvalidArgumentError, match="migrations: expected registries"):
        restore_into({"old": 0}, path, migrations=wrong)
