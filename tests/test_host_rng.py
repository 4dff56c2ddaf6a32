"""The host's random streams continue where they were saved, or nothing is set."""

import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ajaxckpt import (
    InvalidArgumentError,
    LayoutMismatchError,
    restore_into,
    save_checkpoint,
)
from ajaxckpt._host_rng import host_rng_state, set_host_rng_state

BIT_GENERATORS = (
    *(np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937),
    *(np.random.Philox, np.random.SFC64),
)
Draw = Callable[[Any], Any]


@pytest.fixture(autouse=True)
def keep_global_streams() -> Iterator[None]:
    python, numpy = random.getstate(), np.random.get_state()
    yield
    random.setstate(python)
    np.random.set_state(numpy)


def make_generators(seed: int) -> dict[str, Any]:
    return {
        **{kind.__name__: np.random.Generator(kind(seed)) for kind in BIT_GENERATORS},
        **{
            f"legacy_{kind.__name__}": np.random.RandomState(kind(seed))
            for kind in BIT_GENERATORS
        },
        "python": random.Random(seed),  # a name that a global's place has too
    }


PYTHON_DRAWS: list[Draw] = [
    lambda r: r.random(),
    lambda r: r.gauss(0.0, 1.0),
    lambda r: r.randrange(10**30),
    lambda r: r.getrandbits(7),
    lambda r: r.sample(range(100), 5),
]
LEGACY_DRAWS: list[Draw] = [
    lambda r: r.standard_normal(),
    lambda r: r.normal(size=3),
    lambda r: r.randint(0, 7, dtype=np.uint8),
    lambda r: r.random_sample(2),
    lambda r: r.permutation(5),
]
NUMPY_DRAWS: list[Draw] = [
    lambda r: r.integers(2**31, dtype=np.uint32),  # half of a 64-bit word
    lambda r: r.integers(7, size=3, dtype=np.uint8),
    lambda r: r.random(),
    lambda r: r.random(dtype=np.float32),
    lambda r: r.standard_normal(3),
    lambda r: r.permutation(5),
]


def draw_once(generator: Any, choice: int) -> object:
    if isinstance(generator, random.Random) or generator is random:
        draws = PYTHON_DRAWS
    elif isinstance(generator, np.random.Generator):
        draws = NUMPY_DRAWS
    else:
        draws = LEGACY_DRAWS
    drawn = draws[choice % len(draws)](generator)
    return drawn.tolist() if hasattr(drawn, "tolist") else drawn


def draw_all(generators: dict[str, Any], choices: list[int]) -> list[object]:
    streams = [random, np.random, *generators.values()]
    return [[draw_once(stream, choice) for choice in choices] for stream in streams]


def seed_all(seed: int) -> dict[str, Any]:
    random.seed(seed)
    np.random.seed(seed)
    return make_generators(seed)


def describe_tree(tree: object) -> list[object]:
    """List what a skeleton fixes of each leaf: its path, type, dtype, shape."""
    leaves, treedef = jax.tree_util.tree_flatten_with_path(tree)
    described: list[object] = [treedef]
    for path, leaf in leaves:
        array = isinstance(leaf, np.ndarray)
        facts = (leaf.dtype, leaf.shape) if array else ()
        described.append((jax.tree_util.keystr(path), type(leaf), facts))
    return described


CHOICES = st.lists(st.integers(0, 29), min_size=1, max_size=6)


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**32 - 1),
    *(CHOICES, CHOICES, st.lists(st.integers(0, 29), min_size=1, max_size=40)),
)
def test_all_streams_continue_through_a_file(
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    other_seed: int,
    before: list[int],
    elsewhere: list[int],
    after: list[int],
) -> None:
    path = tmp_path_factory.mktemp("rng") / "state.safetensors"
    generators = seed_all(seed)
    draw_all(generators, before)
    save_checkpoint({"host": host_rng_state(**generators)}, path)
    expected = draw_all(generators, after)

    fresh = seed_all(other_seed)
    skeleton = {"host": host_rng_state(**fresh)}
    draw_all(fresh, elsewhere)
    set_host_rng_state(restore_into(skeleton, path)["host"], **fresh)
    assert draw_all(fresh, after) == expected


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1), CHOICES)
def test_the_skeleton_of_the_start_fits_at_all_times(
    seed: int, choices: list[int]
) -> None:
    generators = seed_all(seed)
    start = describe_tree(host_rng_state(**generators))
    draw_all(generators, choices)
    assert describe_tree(host_rng_state(**generators)) == start


def test_long_streams_continue_over_every_refill() -> None:
    generators = seed_all(3)
    for count in (1, 623, 1, 625):
        draw_all(generators, [0] * count)
        state = host_rng_state(**generators)
        expected = draw_all(generators, [0] * 700)
        set_host_rng_state(state, **generators)
        assert draw_all(generators, [0] * 700) == expected


@pytest.mark.parametrize("spare", [False, True])
def test_the_spare_values_continue(spare: bool) -> None:
    """A spare gauss of Python's and NumPy's, half a word of a Generator's."""
    word = np.random.default_rng(5)
    streams: list[Draw] = [
        lambda _: random.gauss(0.0, 1.0),
        lambda _: np.random.standard_normal(),
        lambda _: int(word.integers(2**32, dtype=np.uint32)),
    ]
    random.seed(1)
    np.random.seed(1)
    if spare:
        for draw in streams:
            draw(None)
    state = host_rng_state(word=word)
    flags = [state["python"]["has_gauss"], state["numpy"]["has_gauss"]]
    flags.append(state["generators"]["word"]["has_uint32"])
    assert flags == [int(spare)] * 3
    expected = [draw(None) for _ in range(3) for draw in streams]
    for draw in streams:  # flips each flag, if it was drawn an odd number of times
        draw(None)
    set_host_rng_state(state, word=word)
    assert [draw(None) for _ in range(3) for draw in streams] == expected


def test_later_draws_do_not_change_a_state() -> None:
    generators = seed_all(0)
    state = host_rng_state(**generators)
    arrays = [x for x in jax.tree.leaves(state) if isinstance(x, np.ndarray)]
    copies = [array.copy() for array in arrays]
    draw_all(generators, [0, 1] * 700)
    assert all(map(np.array_equal, arrays, copies))
    set_host_rng_state(state, **generators)
    draw_all(generators, [0, 1] * 700)
    assert all(map(np.array_equal, arrays, copies))


SCRIPT = """
import random, sys
import numpy as np
from ajaxckpt import restore_into
from ajaxckpt._host_rng import host_rng_state, set_host_rng_state

rng, own = np.random.default_rng(), random.Random()
skeleton = {"host": host_rng_state(rng=rng, own=own), "step": 0}
state = restore_into(skeleton, sys.argv[1])
set_host_rng_state(state["host"], rng=rng, own=own)
print([random.gauss(0, 1), random.random(), np.random.standard_normal(),
    int(rng.integers(2**32, dtype=np.uint32)), rng.random(), own.randrange(10**30)])
"""


def test_all_streams_continue_in_a_fresh_process(tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    rng, own = np.random.default_rng(4), random.Random(4)
    random.gauss(0, 1)
    np.random.standard_normal()
    rng.integers(2**32, dtype=np.uint32)
    save_checkpoint({"host": host_rng_state(rng=rng, own=own), "step": 1}, path)
    drawn = [random.gauss(0, 1), random.random(), np.random.standard_normal()]
    drawn += [int(rng.integers(2**32, dtype=np.uint32)), rng.random()]
    drawn += [own.randrange(10**30)]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(path)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == str(drawn)


def test_the_global_bit_generator_may_be_another_one() -> None:
    default = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(9))
        state = host_rng_state()
        assert state["numpy"]["bit_generator"] == "PCG64"
        expected = np.random.normal(size=5).tolist()
        set_host_rng_state(state)
        assert np.random.normal(size=5).tolist() == expected
        np.random.set_bit_generator(np.random.SFC64(9))
        with pytest.raises(InvalidArgumentError, match="the state is of a PCG64"):
            set_host_rng_state(state)
    finally:
        np.random.set_bit_generator(default)


def to_numpy(leaf: Any) -> Any:
    if isinstance(leaf, int) and leaf >= 2**64:
        return leaf
    return leaf if isinstance(leaf, str) else np.asarray(leaf)


def to_scalars(leaf: Any) -> Any:
    array = to_numpy(leaf)
    return array[()] if isinstance(array, np.ndarray) else array


def to_jax(leaf: Any) -> Any:
    array = to_numpy(leaf)
    if not isinstance(array, np.ndarray):
        return array
    with jax.enable_x64(True):
        return jnp.asarray(array)


@pytest.mark.parametrize("convert", [to_numpy, to_scalars, to_jax])
def test_leaves_may_be_of_numpy_or_jax(convert: Callable[[Any], Any]) -> None:
    generators = seed_all(2)
    draw_all(generators, [0, 1])
    state = host_rng_state(**generators)
    expected = draw_all(generators, [0, 1, 2, 3, 4, 5])
    set_host_rng_state(jax.tree.map(convert, state), **generators)
    assert draw_all(generators, [0, 1, 2, 3, 4, 5]) == expected


def test_a_subclass_that_draws_as_its_base_does_is_a_generator() -> None:
    class Dice(random.Random):
        def roll(self) -> int:
            return self.randint(1, 6)

    dice = Dice(0)
    state = host_rng_state(dice=dice)
    expected = [dice.roll() for _ in range(9)]
    set_host_rng_state(state, dice=dice)
    assert [dice.roll() for _ in range(9)] == expected


# --- what is refused --------------------------------------------------------------


class OwnDraws(random.Random):
    def random(self) -> float:
        return 0.5


class OwnBits(np.random.PCG64):
    pass


UNKNOWN: list[tuple[Any, str]] = [
    (7, "generators.env: a int is no generator"),
    (np.random, "generators.env: a module is no generator"),
    (np.random.PCG64(0), "a numpy.random._pcg64.PCG64 is no generator"),
    (random.SystemRandom(), "a random.SystemRandom draws in its own way"),
    (OwnDraws(0), "OwnDraws draws in its own way"),
    (np.random.Generator(OwnBits(0)), "OwnBits is unknown"),
]


@pytest.mark.parametrize(("generator", "problem"), UNKNOWN)
def test_an_unknown_kind_of_generator_is_refused(generator: Any, problem: str) -> None:
    state = host_rng_state(env=np.random.default_rng(0))
    for call in (
        lambda: host_rng_state(env=generator),
        lambda: set_host_rng_state(state, env=generator),
    ):
        with pytest.raises(InvalidArgumentError) as caught:
            call()
        assert problem in str(caught.value)
        assert "To mend: pass a numpy.random.Generator or RandomState" in str(
            caught.value
        )


def test_a_jax_key_is_refused_and_the_hint_says_where_it_belongs() -> None:
    with pytest.raises(InvalidArgumentError, match="a jax key is a leaf as it is"):
        host_rng_state(key=jax.random.key(0))  # type: ignore[arg-type]


def shared_streams() -> list[dict[str, Any]]:
    rng, own = np.random.default_rng(0), random.Random(0)
    bits = np.random.MT19937(0)
    return [
        {"a": rng, "b": rng},
        {"a": own, "b": own},
        {"a": np.random.Generator(bits), "b": np.random.RandomState(bits)},
        {"a": np.random.Generator(np.random.get_bit_generator())},
        {"a": np.random.mtrand._rand},
        {"a": random._inst},  # type: ignore[attr-defined]
    ]


@pytest.mark.parametrize("index", range(6))
def test_one_generator_of_two_names_is_refused(index: int) -> None:
    generators = shared_streams()[index]
    with pytest.raises(InvalidArgumentError, match="are one generator"):
        host_rng_state(**generators)


def list_bits(state: dict[str, Any]) -> list[object]:
    leaves = jax.tree.leaves(state)
    return [x.tobytes() if isinstance(x, np.ndarray) else x for x in leaves]


Damage = Callable[[dict[str, Any]], object]


def put(place: str, value: Any) -> Damage:
    """Return what puts a value at a dotted place of a state."""
    *parents, last = place.split(".")

    def change(state: dict[str, Any]) -> None:
        for key in parents:
            state = state[key]
        state[last] = value

    return change


def drop(place: str) -> Damage:
    *parents, last = place.split(".")

    def change(state: dict[str, Any]) -> None:
        for key in parents:
            state = state[key]
        del state[last]

    return change


def delete_array(tree: dict[str, Any]) -> None:
    tree["key"] = jnp.asarray(tree["key"])
    tree["key"].delete()


PCG, LAST = "generators.PCG64", "generators.python"
DAMAGES: list[tuple[Damage, str]] = [
    (drop("python"), "python: not in the state"),
    (drop("generators"), "generators: not in the state"),
    (drop("generators.SFC64"), "generators.SFC64: not in the state"),
    (put("generators.more", {}), "generators.more: in the state alone"),
    (put("more", {}), "more: in the state alone"),
    (put("generators", 3), "generators: expected a mapping, found a int"),
    (put(LAST, 3), "generators.python: expected a mapping, found a int"),
    (drop("python.gauss"), "python.gauss: not in the state"),
    (put("python.more", 1), "python.more: in the state alone"),
    (put("python.kind", "dice"), "python: the state is of a dice, the generator a "),
    (put("python.kind", 3), "python.kind: expected random.Random, found 3"),
    (
        put(f"{PCG}.bit_generator", "PCG64DXSM"),
        "PCG64: the state is of a PCG64DXSM, the generator a PCG64",
    ),
    (
        put(f"{LAST}.state.key", np.zeros(623, np.uint32)),
        "python.state.key: expected uint32[624], found uint32[623]",
    ),
    (
        put("generators.Philox.state.key", np.zeros(2, np.uint32)),
        "Philox.state.key: expected uint64[2], found uint32[2]",
    ),
    (put(f"{LAST}.state.key", [1] * 624), "uint32[624], found a list"),
    (
        put(f"{LAST}.state.key", jax.ShapeDtypeStruct((624,), np.uint32)),
        "ShapeDtypeStruct holds no values",
    ),
    (
        lambda state: delete_array(state["generators"]["python"]["state"]),
        "python.state.key: no values: Array has been deleted",
    ),
    (put(f"{PCG}.state.inc", 1.0), "state.inc: expected an int, found a float"),
    (put(f"{PCG}.state.inc", np.ones(1, int)), "expected an int, found int64[1]"),
    (put(f"{PCG}.state.state", 2**128), "PCG64.state.state: 0x1"),
    (put(f"{PCG}.state.state", -1), "PCG64.state.state: -0x1 is not within"),
    (put(f"{PCG}.has_uint32", 2), "has_uint32: 0x2 is not within 0 … 0x1"),
    (put(f"{PCG}.uinteger", 2**32), "uinteger: 0x100000000 is not within"),
    (put("generators.MT19937.state.pos", 625), "state.pos: 0x271 is not within"),
    (put("generators.Philox.buffer_pos", 5), "buffer_pos: 0x5 is not within"),
    (put(f"{LAST}.state.pos", 625), "python.state.pos: 0x271 is not within"),
    (put("numpy.gauss", np.float32(1)), "numpy.gauss: expected a float, found float32"),
    (put("numpy.gauss", None), "numpy.gauss: expected a float, found a NoneType"),
    (put("numpy.gauss", np.zeros(1)), "expected a float, found float64[1]"),
]


@pytest.mark.parametrize(("damage", "problem"), DAMAGES)
def test_a_state_that_does_not_fit_sets_nothing(damage: Damage, problem: str) -> None:
    generators = seed_all(1)
    state = host_rng_state(**generators)
    draw_all(generators, [0, 1])  # so that setting anything would show
    damage(state)
    before = host_rng_state(**generators)
    with pytest.raises(InvalidArgumentError) as caught:
        set_host_rng_state(state, **generators)
    assert problem in str(caught.value)
    assert "cannot set the host's generators" in str(caught.value)
    assert "To mend: " in str(caught.value)
    after = host_rng_state(**generators)
    assert list_bits(after) == list_bits(before)


def test_a_state_that_is_no_mapping_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="the state: expected a mapping"):
        set_host_rng_state([])  # type: ignore[arg-type]


def test_every_generator_that_does_not_fit_is_listed() -> None:
    rng, own = np.random.default_rng(0), random.Random(0)
    state = host_rng_state(rng=rng, own=own)
    other = np.random.Generator(np.random.MT19937(0))
    state["generators"]["own"]["has_gauss"] = 7
    with pytest.raises(InvalidArgumentError) as caught:
        set_host_rng_state(state, rng=other, own=own)
    assert str(caught.value).splitlines() == [
        "cannot set the host's generators: the state does not fit",
        "  generators.rng: the state is of a PCG64, the generator a MT19937",
        "  generators.own.has_gauss: 0x7 is not within 0 … 0x1",
        "To mend: build the generators as the run that saved them did",
    ]


def test_names_that_are_not_those_of_the_state_are_listed() -> None:
    rng = np.random.default_rng(0)
    state = host_rng_state(env=rng)
    with pytest.raises(InvalidArgumentError) as caught:
        set_host_rng_state(state, envs=rng)
    assert str(caught.value).splitlines() == [
        "cannot set the host's generators: the state does not fit",
        "  generators.envs: not in the state",
        "  generators.env: in the state alone",
        "To mend: pass the generators that host_rng_state was given, by their names",
    ]


def test_a_generator_may_be_named_state() -> None:
    rng = np.random.default_rng(0)
    state = host_rng_state(state=rng)
    expected = rng.random()
    set_host_rng_state(state, state=rng)
    assert rng.random() == expected


def test_another_tree_of_bits_is_a_layout_mismatch(tmp_path: Path) -> None:
    save_checkpoint(host_rng_state(rng=np.random.default_rng(0)), tmp_path / "a")
    skeleton = host_rng_state(rng=np.random.Generator(np.random.Philox(0)))
    with pytest.raises(LayoutMismatchError, match=r"generators\.rng\.buffer"):
        restore_into(skeleton, tmp_path / "a")


def test_what_numpy_alone_refuses_sets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    generators = seed_all(1)
    state = host_rng_state(**generators)
    draw_all(generators, [0])
    monkeypatch.setattr("ajaxckpt._host_rng._LIMITS", {})
    state["generators"]["python"]["state"]["pos"] = 625  # the last to be set
    before = host_rng_state(**generators)
    with pytest.raises(InvalidArgumentError, match=r"python: invalid state"):
        set_host_rng_state(state, **generators)
    after = host_rng_state(**generators)
    assert list_bits(after) == list_bits(before)
