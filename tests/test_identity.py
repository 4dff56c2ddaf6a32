"""Generated states of every leaf kind and node class come back identical."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from identical import array_bytes, assert_identical, assert_same_bits
from strategies import (
    FEW_BITS,
    HOST_DTYPES,
    NODES,
    Mode,
    Nothing,
    Pair,
    fill_bits,
    jax_dtypes,
    leaf_kinds,
    pairs,
    places,
    plus,
    to_dtype,
    to_jax,
    to_weak,
)

from ajaxckpt import restore_into, save_checkpoint

BATCHES, MOST_BATCHES = 25, 50
EXAMPLES_PER_BATCH = 20
LEAST_SEEN = 20
# besides every leaf kind and node class, forms of skeletons
FORMS = (
    "abstract skeleton",
    "number skeleton",
    "numpy skeleton of a jax array",
    "jax skeleton of a numpy array",
    "skeleton committed",
    "skeleton sharded",
    "skeleton pinned",
    "weak array for a number",
    "0-d array",
    "zero-size array",
)


def run_examples(check: Callable[[Pair], None], batch: int) -> None:
    """Run one batch; each puts other kinds and classes into all of its examples.

    Hypothesis repeats what it drew before, so chance alone would leave some kinds
    rare in hundreds of examples.
    """
    options = settings(
        max_examples=EXAMPLES_PER_BATCH,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    share = slice(batch % BATCHES, None, BATCHES)
    drawn = pairs(some_kinds=tuple(leaf_kinds())[share], some_nodes=tuple(NODES)[share])
    seed(batch)(options(given(drawn)(check)))()


def test_generated_states_come_back_identical(tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    seen: Counter[str] = Counter()

    def check(pair: Pair) -> None:
        save_checkpoint(pair.state, path)
        restored = restore_into(pair.skeleton, path)
        assert_identical(restored, pair.state, pair.skeleton)
        seen.update({*pair.tags, "any"})

    def find_rare() -> dict[str, int]:
        expected = (*leaf_kinds(), *NODES, *FORMS)
        return {name: seen[name] for name in expected if seen[name] < LEAST_SEEN}

    for batch in range(MOST_BATCHES):
        # what Hypothesis draws depends on the modules that are loaded
        if batch < BATCHES or find_rare():
            run_examples(check, batch)
    assert seen["any"] >= BATCHES * EXAMPLES_PER_BATCH
    rare = find_rare()
    assert not rare, f"seen in fewer than {LEAST_SEEN} examples: {rare}"


# --- every dtype, with the bits that a conversion would change --------------------


def all_patterns(name: str) -> np.ndarray:
    """Return every bit pattern of a small dtype, and many special ones of a large."""
    dtype = to_dtype(name)
    if dtype.itemsize > 1:
        return fill_bits(7, (64, 9), name)
    bits = 2 if name == "bool" else 256
    raw = np.arange(bits, dtype=np.uint8)
    return to_dtype_bits(raw, name)


def to_dtype_bits(raw: np.ndarray, name: str) -> np.ndarray:
    few = FEW_BITS.get(name)
    return (raw & ((1 << few) - 1) if few else raw).view(to_dtype(name))


@pytest.mark.parametrize("name", jax_dtypes())
def test_bit_patterns_of_a_jax_dtype_survive(name: str, tmp_path: Path) -> None:
    state = {"x": to_jax(all_patterns(name)), "rank 0": to_jax(fill_bits(3, (), name))}
    skeleton = jax.tree.map(lambda x: to_jax(np.zeros(x.shape, x.dtype)), state)
    path = tmp_path / "state.safetensors"
    save_checkpoint(state, path)
    restored = restore_into(skeleton, path)
    assert_identical(restored, state, skeleton)
    assert array_bytes(restored["x"]) == array_bytes(all_patterns(name))


@pytest.mark.parametrize("name", HOST_DTYPES)
def test_bit_patterns_of_a_numpy_dtype_survive(name: str, tmp_path: Path) -> None:
    patterns = all_patterns(name)
    state = {"x": patterns, "scalar": patterns.reshape(-1)[1], "rank 0": patterns[0]}
    skeleton = jax.tree.map(np.zeros_like, state)
    skeleton["scalar"] = np.zeros((), to_dtype(name))[()]
    path = tmp_path / "state.safetensors"
    save_checkpoint(state, path)
    restored = restore_into(skeleton, path)
    assert_identical(restored, state, skeleton)
    assert restored["x"].tobytes() == patterns.tobytes()


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64"])
def test_special_values_are_among_the_patterns(name: str) -> None:
    values = all_patterns(name)
    bits = values.view(f"uint{8 * values.itemsize}")
    with np.errstate(invalid="ignore"):
        nan, zero, infinite = np.isnan(values), values == 0, np.isinf(values)
        tiny = (np.abs(values) < ml_dtypes.finfo(name).smallest_normal) & ~zero
    assert len(np.unique(bits[nan])) > 2
    assert infinite.any()
    assert tiny.any()
    assert set(np.signbit(values[zero]).tolist()) == {True, False}


# --- the comparison itself -------------------------------------------------------


def one_changed(tree: Any) -> dict[str, Any]:
    return {"leaf": tree, "other": 1}


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (np.float32(0.0), np.float32(-0.0)),
        (0.0, -0.0),
        (float("nan"), -float("nan")),
        (1, True),
        (1, 1.0),
        (0j, complex(0.0, -0.0)),
        ("a", "b"),
        (b"a", b"b"),
        (np.zeros(2), np.zeros((1, 2))),
        (np.zeros(2, np.int32), np.zeros(2, np.uint32)),
        (np.zeros(()), np.zeros(())[()]),
        (np.zeros(2, np.float32), to_jax(np.zeros(2, np.float32))),
        (to_jax(np.int32(1)), to_weak(np.array(1, np.int32))),
        (jax.random.key(0), jax.random.key(1)),
        (jax.random.key(0, impl="rbg"), jax.random.key(0, impl="unsafe_rbg")),
        (jax.random.key(0), jax.random.PRNGKey(0)),
        (Mode.TRAIN, Mode.EVAL),
        (plus, len),
        (to_jax(np.zeros(2)), to_jax(np.zeros(2), places()["committed"])),
        (to_jax(np.zeros(2), places()["committed"]), to_jax(np.zeros(2))),
        (to_jax(np.zeros(2), places()["pinned"]), to_jax(np.zeros(2))),
        ((1, 2), [1, 2]),
        (Nothing(), ()),
        ({}, None),
    ],
    ids=lambda value: repr(value).split(" at 0x")[0],  # the same in each process
)
def test_the_comparison_tells_small_differences(left: Any, right: Any) -> None:
    assert_same_bits(one_changed(left), one_changed(left))
    with pytest.raises(AssertionError):
        assert_identical(one_changed(left), one_changed(right), one_changed(right))
