"""What the caller has set changes no value, raises nothing, and is left as it was."""

from __future__ import annotations

import contextlib
import sys
import threading
import warnings
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from identical import assert_identical
from jax.sharding import AxisType, Mesh, NamedSharding, get_abstract_mesh
from jax.sharding import PartitionSpec as P

from ajaxckpt import (
    LayoutMismatchError,
    UnsupportedLeafError,
    open_checkpoint,
    plan_restore,
    restore_into,
    save_checkpoint,
    state_digest,
    verify_checkpoint,
)

SPECIAL = np.array([np.nan, -np.nan, np.inf, -np.inf, -0.0, 1e-45, 1.0], np.float32)
SIGNALLING = np.array([0x7FA00001, 0xFFC12345, 0x7F800000], np.uint32).view(np.float32)


def _mesh(*axes: int, kind: AxisType = AxisType.Auto) -> Mesh:
    names = ("x", "y")[: len(axes)]
    return jax.make_mesh(axes, names, axis_types=(kind,) * len(axes))


def _build(number: int) -> dict[str, Any]:
    """Build a state of every kind of placement and many kinds of value."""
    shards = NamedSharding(_mesh(8), P("x"))
    with jax.enable_x64(True):
        wide = {
            "f64": jnp.asarray(np.array([np.nan, 1e300, -0.0, number])),
            "i64": jnp.asarray(np.array([2**62 + number, -1])),
            "c128": jnp.asarray(np.array([complex(number, np.nan)])),
            "weak": jnp.asarray(2**40 + number),
        }
        wide["sharded"] = jax.device_put(np.arange(8) + 2**40 + number, shards)
    key = jax.random.key(number, impl="threefry2x32")
    return {
        "f32": jnp.asarray(SPECIAL * number),
        "signalling": jax.device_put(SIGNALLING if number else SIGNALLING * 0),
        "bf16": jnp.asarray(SPECIAL * number).astype(jnp.bfloat16),
        "f8": jnp.asarray(SPECIAL * number).astype(jnp.float8_e4m3fn),
        "int4": jnp.asarray(np.arange(5) - number).astype(jnp.int4),
        "mask": jnp.asarray([True, False, bool(number)]),
        "empty": jnp.zeros((0, 3)),
        "wide": wide,
        "weak": {
            "count": jnp.asarray(number),
            "nan": jnp.asarray(float("nan") if number else 0.0),
            "seeds": jnp.broadcast_to(jnp.asarray(float("inf") * number), (2,)),
        },
        "rng": {
            "key": key,
            "keys": jax.random.split(key, 8),
            "rbg": jax.random.key(number, impl="rbg"),
            "unsafe": jax.random.key(number, impl="unsafe_rbg"),
            "raw": jax.random.key_data(key),
            "sharded": jax.device_put(jax.random.split(key, 8), shards),
        },
        "committed": jax.device_put(SPECIAL * number, jax.devices()[1]),
        "elsewhere": jax.device_put(jnp.asarray(0.5) * number, jax.devices()[2]),
        "sharded": jax.device_put(np.arange(16.0, dtype=np.float32) / number, shards),
        "numpy": SPECIAL.astype(np.float64) * number,
        "scalar": np.float32(number) * np.float32(np.nan),
        "python": {"n": 2**80 + number, "x": float("nan"), "z": complex(number, -0.0)},
        "text": "step" * number,
    }


@contextlib.contextmanager
def _flag(name: str, value: Any) -> Generator[None]:
    """Set a flag for the whole process, as a command line or a script does."""
    before = getattr(jax.config, name)
    jax.config.update(name, value)
    try:
        yield
    finally:
        jax.config.update(name, before)


@contextlib.contextmanager
def _mesh_block() -> Generator[None]:
    """Enter a mesh the way JAX has deprecated and older code still does."""
    with contextlib.ExitStack() as stack:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            stack.enter_context(_mesh(8))
        yield


CONTEXTS: dict[str, Callable[[], Any]] = {
    "nothing": contextlib.nullcontext,
    "mesh, axes auto": lambda: jax.set_mesh(_mesh(8)),
    "mesh, axes explicit": lambda: jax.set_mesh(_mesh(8, kind=AxisType.Explicit)),
    "mesh of two axes": lambda: jax.set_mesh(_mesh(2, 4, kind=AxisType.Explicit)),
    "mesh of one device": lambda: jax.set_mesh(_mesh(1)),
    "mesh as a with block": _mesh_block,
    "abstract mesh": lambda: jax.sharding.use_abstract_mesh(_mesh(8).abstract_mesh),
    "another default device": lambda: jax.default_device(jax.devices()[3]),
    "another default device, set once": lambda: _flag(
        "jax_default_device", jax.devices()[5]
    ),
    "64 bits": lambda: jax.enable_x64(True),
    "64 bits, set once": lambda: _flag("jax_enable_x64", True),
    "32 bits": lambda: jax.enable_x64(False),
    "keys rbg by default": lambda: jax.default_prng_impl("rbg"),
    "keys unsafe_rbg by default, set once": lambda: _flag(
        "jax_default_prng_impl", "unsafe_rbg"
    ),
    "PRNGKey returns typed keys": lambda: _flag("jax_enable_custom_prng", True),
    "raw keys are an error": lambda: _flag("jax_legacy_prng_key", "error"),
    "keys not partitionable": lambda: _flag("jax_threefry_partitionable", False),
    "seeds offset": lambda: _flag("jax_random_seed_offset", 7),
    "reused keys are an error": lambda: jax.debug_key_reuse(True),
    "debug_nans": lambda: jax.debug_nans(True),
    "debug_infs": lambda: jax.debug_infs(True),
    "debug_nans, set once": lambda: _flag("jax_debug_nans", True),
    "jit disabled": lambda: jax.disable_jit(True),
    "strict dtype promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "rank promotion raises": lambda: jax.numpy_rank_promotion("raise"),
    "no implicit transfer": lambda: jax.transfer_guard("disallow"),
    "no transfer": lambda: jax.transfer_guard("disallow_explicit"),
    "leaked tracers are an error": lambda: jax.check_tracer_leaks(True),
    "JAX checks itself": lambda: _flag("jax_enable_checks", True),
    "matmuls in bfloat16": lambda: jax.default_matmul_precision("bfloat16"),
}


@contextlib.contextmanager
def _all_at_once() -> Generator[None]:
    names = (
        "mesh, axes explicit",
        "another default device",
        "64 bits",
        "keys rbg by default",
        "debug_nans",
        "debug_infs",
        "jit disabled",
        "strict dtype promotion",
        "rank promotion raises",
        "no transfer",
    )
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(CONTEXTS[name]())
        yield


CONTEXTS["all at once"] = _all_at_once


def _settings() -> dict[str, Any]:
    """Read every setting that JAX knows, as the calling thread sees it."""
    # some flags are read by XLA alone and are no attributes
    settings = {name: getattr(jax.config, name, None) for name in jax.config.values}
    settings["abstract mesh"] = get_abstract_mesh()
    if hasattr(jax.sharding, "get_mesh"):  # the oldest JAX has no word for it
        settings["mesh"] = jax.sharding.get_mesh()
    return settings


@pytest.fixture(scope="module")
def state() -> dict[str, Any]:
    return _build(3)


@pytest.fixture(scope="module")
def skeleton() -> dict[str, Any]:
    return {**_build(1), "sharded": _build(3)["sharded"] * 0}


@pytest.fixture(scope="module")
def digest(state: dict[str, Any]) -> str:
    return state_digest(state)


@pytest.fixture(scope="module")
def saved(state: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "a.safetensors"
    save_checkpoint(state, path)
    return path


def _forget() -> None:
    """Clear what the package remembers, so that a context meets it anew."""
    modules = [m for name, m in sys.modules.items() if name.startswith("ajaxckpt.")]
    for value in [value for module in modules for value in vars(module).values()]:
        if callable(clear := getattr(value, "cache_clear", None)):
            clear()


@pytest.mark.parametrize("name", CONTEXTS)
def test_restores_the_same_values_in_the_same_places(
    name: str, state: Any, skeleton: Any, saved: Path
) -> None:
    _forget()
    with CONTEXTS[name]():
        before = _settings()
        plan = plan_restore(skeleton, saved)
        restored = restore_into(skeleton, saved)
        applied = plan.apply()
        assert _settings() == before
    assert plan.mismatches == ()
    assert_identical(restored, state, skeleton)
    assert_identical(applied, state, skeleton)


@pytest.mark.parametrize("name", CONTEXTS)
def test_saves_and_digests_the_same_values(
    name: str, state: Any, skeleton: Any, digest: str, saved: Path, tmp_path: Path
) -> None:
    path = tmp_path / "b.safetensors"
    step = jax.device_put(np.array([4, 4], np.int32))
    loss = jax.device_put(np.float32(0.5))
    with CONTEXTS[name]():
        before = _settings()
        record = save_checkpoint(
            state, path, step=step, metrics={"loss": loss}, config={"lr": loss}
        )
        live = state_digest(state)
        report = verify_checkpoint(path)
        assert _settings() == before
    assert record.digest == live == report.digest == digest
    with open_checkpoint(path) as file, open_checkpoint(saved) as reference:
        assert file.layout == reference.layout
        assert [file.leaf_digest(leaf) for leaf in file] == [
            reference.leaf_digest(leaf) for leaf in reference
        ]
        assert (file.step, file.metrics, file.config) == (4, {"loss": 0.5}, {"lr": 0.5})
    assert_identical(restore_into(skeleton, path), state, skeleton)


@pytest.mark.parametrize("name", CONTEXTS)
def test_an_abstract_skeleton_is_filled_the_same(name: str, tmp_path: Path) -> None:
    state = {"w": jnp.asarray(SPECIAL), "n": jnp.asarray(2), "k": jax.random.key(1)}
    save_checkpoint(state, tmp_path / "a.safetensors")
    skeleton = jax.eval_shape(lambda: state)
    with CONTEXTS[name]():
        restored = restore_into(skeleton, tmp_path / "a.safetensors")
        device = jax.config.jax_default_device or jax.devices()[0]
    assert {leaf.device for leaf in restored.values()} == {device}
    assert not any(leaf.committed for leaf in restored.values())
    home = jax.device_put(restored, jax.devices()[0])
    assert_identical(home, jax.device_put(state, jax.devices()[0]), home)


@pytest.mark.parametrize("name", CONTEXTS)
def test_a_failing_restore_leaves_the_settings_alone(
    name: str, state: Any, skeleton: Any, saved: Path, tmp_path: Path
) -> None:
    damaged = tmp_path / "damaged.safetensors"
    raw = bytearray(saved.read_bytes())
    raw[-1] ^= 1
    damaged.write_bytes(raw)
    with CONTEXTS[name]():
        before = _settings()
        with pytest.raises(LayoutMismatchError):
            restore_into({**skeleton, "more": 1}, saved)
        with pytest.raises(Exception, match="the payload of a leaf is damaged"):
            restore_into(skeleton, damaged)
        assert _settings() == before


def test_restoring_needs_no_implicit_settings_of_its_thread(
    state: Any, skeleton: Any, saved: Path
) -> None:
    restored: list[Any] = []
    thread = threading.Thread(
        target=lambda: restored.append(restore_into(skeleton, saved))
    )
    with CONTEXTS["all at once"]():
        thread.start()
        thread.join()
    assert_identical(restored[0], state, skeleton)


# inside traced functions ------------------------------------------------------


def _call_save(state: Any, path: Path) -> None:
    save_checkpoint(state, path)


def _call_digest(state: Any, path: Path) -> None:
    state_digest(state)


def _call_restore(state: Any, path: Path) -> None:
    restore_into(state, path)


def _call_plan(state: Any, path: Path) -> None:
    plan_restore(state, path)


CALLS = (_call_save, _call_digest, _call_restore, _call_plan)


def _inside_jit(call: Callable[[Any], None], state: Any) -> None:
    jax.jit(lambda x: (call(x), x)[1])(state)


def _inside_scan(call: Callable[[Any], None], state: Any) -> None:
    def body(carry: Any, _: Any) -> tuple[Any, None]:
        call(carry)
        return carry, None

    jax.lax.scan(body, state, length=2)


def _inside_vmap(call: Callable[[Any], None], state: Any) -> None:
    jax.vmap(lambda x: (call(x), x)[1])(state)


def _inside_grad(call: Callable[[Any], None], state: Any) -> None:
    jax.grad(lambda x: (call(x), x["w"].sum())[1])(state)


def _inside_eval_shape(call: Callable[[Any], None], state: Any) -> None:
    jax.eval_shape(lambda x: (call(x), x)[1], state)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    "inside",
    [_inside_jit, _inside_scan, _inside_vmap, _inside_grad, _inside_eval_shape],
)
def test_a_tracer_is_refused_by_the_name_of_its_leaf(
    inside: Callable[..., None], call: Callable[..., None], tmp_path: Path
) -> None:
    state = {"w": jnp.ones(3)}
    path = tmp_path / "a.safetensors"
    if call in (_call_restore, _call_plan):
        save_checkpoint(state, path)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(UnsupportedLeafError) as caught:
        inside(lambda x: call(x, path), state)
    text = str(caught.value)
    assert "inside a traced function" in text
    assert "outside jit" in text
    if call in (_call_save, _call_digest):
        assert "w: a tracer" in text
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("inside", [_inside_jit, _inside_scan, _inside_eval_shape])
def test_a_state_from_outside_is_refused_under_a_trace_too(
    inside: Callable[..., None], call: Callable[..., None], tmp_path: Path
) -> None:
    state = {"w": jnp.ones(3)}
    path = tmp_path / "a.safetensors"
    if call in (_call_restore, _call_plan):
        save_checkpoint(state, path)
    before = sorted(tmp_path.iterdir())
    # called once while tracing, it would save once and then never again
    with pytest.raises(UnsupportedLeafError, match="inside a traced function"):
        inside(lambda _: call(state, path), {"w": jnp.ones(3)})
    assert sorted(tmp_path.iterdir()) == before


def test_one_tracer_among_many_leaves_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"

    concrete = jnp.ones(2)

    @jax.jit
    def train(x: jax.Array) -> jax.Array:
        save_checkpoint({"a": concrete, "b": {"c": x}, "d": 3}, path)
        return x

    with pytest.raises(UnsupportedLeafError) as caught:
        train(jnp.ones(3))
    assert str(caught.value).splitlines() == [
        f"{path}: cannot save: b.c: a tracer: the call stands inside a traced function",
        "To mend: call it outside jit, vmap, grad and scan, or use what is made for "
        "the inside: ajaxckpt.scan.make_saver, and ajaxckpt.scan.scan_in_chunks",
    ]
    assert list(tmp_path.iterdir()) == []


def test_jit_disabled_is_no_trace(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"

    @jax.jit
    def train(x: jax.Array) -> jax.Array:
        save_checkpoint({"x": x}, path)
        return x

    with jax.disable_jit():
        train(jnp.ones(3))
    assert restore_into({"x": jnp.zeros(3)}, path)["x"].tolist() == [1.0] * 3
