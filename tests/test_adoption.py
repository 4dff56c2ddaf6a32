"""Leaves that the skeleton lacks find a place, or are refused by name."""

from collections import OrderedDict, defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import flax.core
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ajaxckpt import MigrationError, Migrations, restore_into, save_checkpoint


@flax.struct.dataclass
class Node:
    x: Any
    extra: Any = None


class Pair(NamedTuple):
    x: Any
    extra: Any = None


class Module(eqx.Module):
    x: Any
    extra: Any = None


VALUE = np.arange(3, dtype=np.float32)
PLACES = {
    "a dict": ({"x": 0}, lambda s: s["extra"]),
    "a FrozenDict": (flax.core.freeze({"x": 0}), lambda s: s["extra"]),
    "an OrderedDict": (OrderedDict(x=0), lambda s: s["extra"]),
    "a defaultdict": (defaultdict(list, x=0), lambda s: s["extra"]),
    "a flax dataclass": (Node(0), lambda s: s.extra),
    "a NamedTuple": (Pair(0), lambda s: s.extra),
    "an equinox module": (Module(0), lambda s: s.extra),
    "a None": ({"x": 0, "extra": None}, lambda s: s["extra"]),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a.safetensors"


def adopt(path: Path, saved: Any, skeleton: Any, pattern: str) -> Any:
    save_checkpoint(saved, path)
    migrations = Migrations("m")
    migrations.rule("kept").adopt(pattern)
    return restore_into(skeleton, path, migrations=migrations)


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("name", PLACES)
def test_a_leaf_is_adopted_by(name: str, deep: bool, path: Path) -> None:
    skeleton, find = PLACES[name]
    treedef = jax.tree.structure(skeleton)
    extra: Any = {"in": {"y": VALUE}} if deep else VALUE
    whole = adopt(
        path,
        {"a": [{"x": 1, "extra": extra}], "b": 2},
        {"a": [skeleton], "b": 0},
        "a.*.extra",
    )
    restored = whole["a"][0]
    assert type(restored) is type(skeleton)
    found = find(restored)["in"]["y"] if deep else find(restored)
    assert found.tobytes() == VALUE.tobytes()
    assert whole["b"] == 2
    assert jax.tree.structure(skeleton) == treedef  # it was not changed


LEAVES = {
    "jax": jnp.arange(3),
    "weak": jnp.full((2,), 1.0),
    "numpy": VALUE,
    "a numpy scalar": np.float32(2),
    "a key": jax.random.split(jax.random.key(1, impl="rbg"), 2),
    "an int": 2**70,
    "a bool": True,
    "a float": float("nan"),
    "a text": "é",
    "bytes": b"\0",
}


@pytest.mark.parametrize("name", LEAVES)
def test_it_comes_back_as_it_was_saved(name: str, path: Path) -> None:
    value = LEAVES[name]
    found = adopt(path, {"x": value}, {}, "x")["x"]
    assert type(found) is type(value)
    if name == "a key":
        assert jax.random.key_impl(found) == "rbg"
        assert (found == value).all()
    elif isinstance(value, jax.Array | np.ndarray | np.generic):
        assert (found.dtype, found.tobytes()) == (value.dtype, value.tobytes())
        assert getattr(found, "weak_type", 0) == getattr(value, "weak_type", 0)
    else:
        assert repr(found) == repr(value)


@pytest.mark.parametrize(
    ("saved", "skeleton", "words"),
    [
        (
            {"a": {"x": VALUE}},
            {"a": VALUE},
            "a.x: cannot be adopted: there stands",
        ),
        ({"a": {"x": VALUE}}, {"a": (1,)}, "a.x: cannot be adopted: there stands"),
        ({"a": {"z": VALUE}}, {"a": Pair(1)}, "stands a Pair without this field"),
        ({"f": abs}, {}, "f: function cannot be adopted"),
        ({(1, 2): VALUE}, {}, "a key that is neither text nor a whole number"),
    ],
)
def test_where_there_is_no_place_it_says_so(
    saved: Any, skeleton: Any, words: str, path: Path
) -> None:
    with pytest.raises(MigrationError) as caught:
        adopt(path, saved, skeleton, "**")
    assert words in str(caught.value)
    assert "To mend: " in str(caught.value)


def test_mixed_keys_and_odd_ones_are_refused_or_kept(path: Path) -> None:
    with pytest.raises(MigrationError, match=r"3: cannot be adopted"):
        adopt(path, [{"d": {3: VALUE}}], [{"d": {"a": None}}], "**")
    with pytest.raises(MigrationError, match=r"cannot be adopted.*the skeleton itself"):
        adopt(path, VALUE, None, "**")
    saved = {"d": {"--5": VALUE, "٣": VALUE}}
    assert set(adopt(path, saved, {"d": {}}, "**")["d"]) == {"--5", "٣"}


def test_keys_keep_their_type(path: Path) -> None:
    saved = {"d": {3: VALUE}, "t": {"3": VALUE, 'q".\u2028': VALUE}}
    restored = adopt(path, saved, {"d": {}, "t": None}, "**")
    assert list(restored["d"]) == [3]
    assert set(restored["t"]) == {"3", 'q".\u2028'}
