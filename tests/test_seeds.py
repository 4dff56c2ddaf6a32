"""One seed, or some, out of a checkpoint of many; and seeds put together again."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from identical import assert_identical, assert_same_bits
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

import ajaxckpt._leaf_file
from ajaxckpt import (
    DamagedCheckpointError,
    InvalidArgumentError,
    LayoutMismatchError,
    Migrations,
    open_checkpoint,
    save_checkpoint,
)
from ajaxckpt.seeds import stack_seeds, take_seeds

COUNT = 4
NAN16 = np.array([0x7F81, 0xFFC1, 0x8000], np.uint16).view(ml_dtypes.bfloat16)


def many() -> dict[str, Any]:
    """A state of four seeds: every kind of leaf, an inner seeds axis, shared leaves."""
    return {
        "bits": jnp.array(np.stack([NAN16] * COUNT)),
        "buffer": jnp.arange(2 * COUNT * 3.0).reshape(2, COUNT, 3),
        "host": np.arange(COUNT * 2).reshape(COUNT, 2),
        "key": jax.random.split(jax.random.key(0), COUNT),
        "name": "sac",
        "rbg": jax.random.split(jax.random.key(0, impl="rbg"), (COUNT, 2)),
        "shared": jnp.arange(3.0),
        "small": jnp.arange(COUNT).astype("int4"),
        "step": lax.full((COUNT,), 7),
        "w": jnp.arange(COUNT * 1500.0).reshape(COUNT, 1500),
    }


AXIS = {"buffer": -2, "shared": None}
AXES = {**dict.fromkeys(many(), 0), "buffer": 1, "shared": None, "name": None}


def pick(state: dict[str, Any], seeds: Any) -> dict[str, Any]:
    """Take seeds with jax and numpy alone; weak types stay."""

    def one(name: str, leaf: Any) -> Any:
        axis = AXES[name]
        if axis is None:
            return leaf
        index = (*(slice(None),) * axis, np.array(seeds))
        if isinstance(leaf, np.ndarray):
            return leaf[index]
        if name == "step":
            return lax.full(np.shape(seeds), 7)
        return leaf[index]

    return {name: one(name, leaf) for name, leaf in state.items()}


def blank(state: Any) -> Any:
    """Build a skeleton of a state's specs: other values, same types."""

    def one(leaf: Any) -> Any:
        if isinstance(leaf, str):
            return ""
        if isinstance(leaf, np.ndarray):
            return np.zeros_like(leaf)
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            words = jnp.zeros_like(jax.random.key_data(leaf))
            return jax.random.wrap_key_data(words, impl=jax.random.key_impl(leaf))
        return lax.full_like(leaf, 0) if leaf.weak_type else jnp.zeros_like(leaf)

    return jax.tree.map(one, state)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_checkpoint(many(), tmp_path / "many", step=7)
    return tmp_path / "many"


@pytest.mark.parametrize(
    ("seeds", "verify"),
    [
        (2, True),
        (-1, False),
        ([0, 3], True),
        ([2], False),
        (np.array([3, 1, 1]), False),
    ],
    ids=str,
)
def test_seeds_are_taken_as_they_are(path: Path, seeds: Any, verify: bool) -> None:
    expected = pick(many(), seeds)
    skeleton = blank(expected)
    taken = take_seeds(path, skeleton, seeds, axis=AXIS, verify=verify)
    assert_identical(taken, expected, skeleton)


@pytest.mark.parametrize("verify", [True, False])
def test_seeds_are_taken_into_shards(tmp_path: Path, verify: bool) -> None:
    w = np.arange(3 * 8 * 2048.0, dtype=np.float32).reshape(3, 8, 2048)
    save_checkpoint({"w": w}, tmp_path / "many")
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    place = NamedSharding(mesh, PartitionSpec("d"))
    skeleton = {"w": jax.device_put(jnp.zeros((8, 2048)), place)}
    taken = take_seeds(tmp_path / "many", skeleton, 1, verify=verify)
    assert taken["w"].sharding == place
    assert np.array_equal(taken["w"], w[1])


def test_unverified_only_the_rows_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"a": np.arange(8 * 4096.0).reshape(8, 4096), "b": np.ones((2, 8, 1024))}
    save_checkpoint(state, tmp_path / "many")
    read: list[int] = []
    real = ajaxckpt._leaf_file.read_into

    def counting(fd: int, buffers: Any, start: int) -> int:
        read.append(sum(len(buffer) for buffer in buffers))
        return real(fd, buffers, start)

    monkeypatch.setattr(ajaxckpt._leaf_file, "read_into", counting)
    skeleton = {"a": np.zeros(4096), "b": np.zeros((2, 1024))}
    for verify, expected in ((False, 8 * (4096 + 2048)), (True, 64 * (4096 + 2048))):
        read.clear()
        take_seeds(tmp_path / "many", skeleton, 5, axis={"b": 1}, verify=verify)
        header = open_checkpoint(tmp_path / "many").file.header.nbytes
        assert expected <= sum(read) <= expected + 2 * header + 2 * 4096


def test_damage_of_another_seed_is_found_where_bytes_are_checked(path: Path) -> None:
    with open_checkpoint(path) as checkpoint:
        header = checkpoint.file.header
        place = header.nbytes + header.tensors["w"].begin + 3 * 6000 + 1
    raw = bytearray(path.read_bytes())
    raw[place] ^= 1
    path.write_bytes(raw)
    expected = pick(many(), 2)
    with pytest.raises(DamagedCheckpointError, match="w: bytes"):
        take_seeds(path, blank(expected), 2, axis=AXIS)
    taken = take_seeds(path, blank(expected), 2, axis=AXIS, verify=False)
    assert_identical(taken, expected, blank(expected))


def test_taken_one_by_one_and_stacked_it_is_the_state(path: Path) -> None:
    skeleton = blank(pick(many(), 0))
    singles = [take_seeds(path, skeleton, n, axis=AXIS) for n in range(COUNT)]
    assert_same_bits(stack_seeds(singles, axis=AXIS), many())


def test_a_taken_seed_goes_on_as_the_run_of_that_seed(tmp_path: Path) -> None:
    def begin(key: jax.Array) -> Any:
        return {"key": key, "step": jnp.int32(0), "w": jax.random.normal(key, (3,))}

    def advance(state: Any) -> Any:
        key, sub = jax.random.split(state["key"])
        w = state["w"] * 0.5 + jax.random.normal(sub, (3,))
        return {"key": key, "step": state["step"] + 1, "w": w}

    keys = jax.random.split(jax.random.key(0), COUNT)
    states = jax.vmap(advance)(jax.vmap(begin)(keys))
    save_checkpoint(states, tmp_path / "c", step=states["step"])
    one = take_seeds(tmp_path / "c", begin(keys[0]), 2)
    assert_same_bits(advance(one), advance(advance(begin(keys[2]))))


def test_exceptions_and_migrations_act_on_what_was_taken(path: Path) -> None:
    migrations = Migrations("agent")
    migrations.step(1, "the weights moved").move("w", "net.w")
    expected = pick(many(), 1)
    skeleton = {**blank(expected), "net": {"w": jnp.zeros(1500)}, "new": jnp.ones(2)}
    del skeleton["w"]
    taken = take_seeds(path, skeleton, 1, axis=AXIS, keep="new", migrations=migrations)
    assert np.array_equal(taken["net"]["w"], many()["w"][1])
    assert np.array_equal(taken["new"], [1, 1])


def test_seeds_that_disagree_on_the_step_are_named(tmp_path: Path) -> None:
    states = {"step": jnp.array([300, 400, 300]), "w": jnp.ones((3, 2))}
    with pytest.raises(InvalidArgumentError, match="between 300 and 400"):
        save_checkpoint(states, tmp_path / "c", step=states["step"])
    save_checkpoint(states, tmp_path / "c")
    skeleton = {"step": jnp.zeros(2, jnp.int32), "w": jnp.ones((2, 2))}
    with pytest.raises(InvalidArgumentError) as raised:
        take_seeds(tmp_path / "c", skeleton, [0, 1])
    assert raised.value.details == ("seed 0: 300", "seed 1: 400")
    take_seeds(tmp_path / "c", skeleton, [0, 2])
    take_seeds(tmp_path / "c", skeleton, [0, 1], step=None)
    singles = [{"step": jnp.int32(n)} for n in (300, 400)]
    with pytest.raises(InvalidArgumentError) as raised:
        stack_seeds(singles)
    assert raised.value.details == ("seed 0: 300", "seed 1: 400")
    assert stack_seeds(singles, step=None)["step"].tolist() == [300, 400]


@pytest.mark.parametrize(
    ("seeds", "axis", "message"),
    [
        (4, AXIS, "no seed 4: there are 4 seeds"),
        ([], AXIS, "none are chosen"),
        (True, AXIS, "expected the index of a seed, found True"),
        (0, {"shared": None}, "axes are not of one size"),
        (0, {"buffer": 5}, r"buffer: float32\[2,4,3\] has no axis 5"),
        (0, {"buffer": "x"}, "axis: expected a whole number, .* found 'x'"),
        (0, 1.5, "axis: expected a whole number, .* found 1.5"),
        (0, {"bufer": 1}, 'axis="bufer" selects no leaf'),
        (0, {"**": None}, "no leaf has a seeds axis"),
    ],
)
def test_what_is_no_seed_or_axis_is_refused(
    path: Path, seeds: Any, axis: Any, message: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        take_seeds(path, {}, seeds, axis=axis)


def test_a_leaf_without_axes_is_to_be_named(tmp_path: Path) -> None:
    save_checkpoint({"n": jnp.int32(1), "w": jnp.ones((2, 3))}, tmp_path / "c")
    skeleton = {"n": jnp.int32(0), "w": jnp.zeros(3)}
    with pytest.raises(InvalidArgumentError, match=r"axis=\{'n': None\}"):
        take_seeds(tmp_path / "c", skeleton, 0)
    assert int(take_seeds(tmp_path / "c", skeleton, 0, axis={"n": None})["n"]) == 1


def test_a_skeleton_of_another_shape_is_a_mismatch(path: Path) -> None:
    with pytest.raises(LayoutMismatchError, match=r"float32\[4,1500\], found float32"):
        take_seeds(path, blank(many()), 2, axis=AXIS)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"w": jnp.ones(3), "name": "sac"}, "seed 1 is not of the layout of seed 0"),
        ({"w": jnp.ones(2), "name": "td3"}, "name: shared by the seeds, and different"),
    ],
)
def test_states_that_differ_are_not_stacked(other: Any, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        stack_seeds([{"w": jnp.ones(2), "name": "sac"}, other])


def test_nothing_and_shards_are_not_stacked() -> None:
    with pytest.raises(InvalidArgumentError, match="there are no states"):
        stack_seeds([])
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    place = NamedSharding(mesh, PartitionSpec("d"))
    with pytest.raises(InvalidArgumentError, match="w: lies on several devices"):
        stack_seeds([{"w": jax.device_put(jnp.zeros(8), place)}] * 2)


def test_seeds_that_disagree_on_a_step_below_are_named(tmp_path: Path) -> None:
    states = {
        "agent": {"step": jnp.array([1, 1, 2]), "w": jnp.ones((3, 2))},
        "env": {"step": np.array([[1.0], [1.0], [1.0]])},
        "opt": {"step": {"value": jnp.array([3.0, 3.0, 4.0], jnp.bfloat16)}},
        "sgd": {"step": jnp.array([0.1, 0.2, 0.3])},  # a size, and no counter
        "step_size": jnp.array([1, 2, 3]),
    }
    save_checkpoint(states, tmp_path / "c")
    names = "disagree on the step, agent.step, opt.step.value"
    details = ["agent.step 1; opt.step.value 3", "agent.step 2; opt.step.value 4"]

    def pick_one(seed: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf[seed], states)

    skeleton = pick_one(np.array([0, 1]))
    singles = [pick_one(1), pick_one(2)]
    for first, call in (
        (1, lambda **step: take_seeds(tmp_path / "c", skeleton, [1, 2], **step)),
        (0, lambda **step: stack_seeds(singles, **step)),
    ):
        with pytest.raises(InvalidArgumentError, match=names) as raised:
            call()
        assert raised.value.details == tuple(
            f"seed {seed}: {found}" for seed, found in enumerate(details, first)
        )
        assert "step, name the counter, step='env.step', or " in raised.value.hint
        with pytest.raises(InvalidArgumentError, match=r"the step, opt\.step\.value\n"):
            call(step="opt.step")
        call(step="env.step")
        call(step=None)
    take_seeds(tmp_path / "c", skeleton, [0, 1])
    take_seeds(tmp_path / "c", skeleton, [1, 1])


def test_a_step_pattern_that_selects_no_counter_is_refused(tmp_path: Path) -> None:
    states = {"step": jnp.array([1, 1]), "w": jnp.full((2, 2), 0.5), "name": "sac"}
    save_checkpoint(states, tmp_path / "c")
    one = {"step": jnp.int32(1), "w": jnp.full(2, 0.5), "name": "sac"}
    calls = (
        lambda step: take_seeds(tmp_path / "c", states, [0, 1], step=step),
        lambda step: take_seeds(tmp_path / "c", one, 1, step=step),
        lambda step: stack_seeds([one, one], step=step),
    )
    for call in calls:
        for wrong, message in (
            ("stp", 'step="stp" selects no leaf'),
            (["step", "zz"], 'step="zz" selects no leaf'),
            ("w", "step='w' selects no counter"),
            ("name", "step='name' selects no counter"),
            (5, "step: expected patterns, found int"),
        ):
            with pytest.raises(InvalidArgumentError, match=message):
                call(wrong)
        call("step")
        call("**")
    bare = {"w": jnp.ones((2, 2))}
    save_checkpoint(bare, tmp_path / "bare")
    take_seeds(tmp_path / "bare", bare, [0, 1])


@pytest.mark.parametrize("seed", [np.array(2), jnp.array(2), np.int8(2)])
def test_one_seed_may_be_an_array_without_axes(path: Path, seed: Any) -> None:
    expected = pick(many(), 2)
    taken = take_seeds(path, blank(expected), seed, axis=AXIS)
    assert_identical(taken, expected, blank(expected))


@pytest.mark.parametrize(
    "seeds",
    [np.array(2.0), jnp.array(True), [1.0], np.array([[1]]), [True], "12", None],
    ids=repr,
)
def test_what_is_no_index_is_refused(path: Path, seeds: Any) -> None:
    with pytest.raises(
        InvalidArgumentError, match="expected the index of a seed, found"
    ):
        take_seeds(path, {}, seeds, axis=AXIS)
