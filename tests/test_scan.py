"""Saves in a jitted scan: between its chunks, and from inside of it."""

import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import compile_events
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from identical import assert_identical, assert_same_bits
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import ajaxckpt._files
from ajaxckpt import (
    BackgroundSaveError,
    InvalidArgumentError,
    Run,
    SaveEvery,
    UnsupportedLeafError,
    open_checkpoint,
    restore_into,
    save_checkpoint,
    verify_checkpoint,
)
from ajaxckpt.scan import make_saver, scan_in_chunks

Save = Callable[..., None]


def begin(key: jax.Array) -> dict[str, Any]:
    """Build a little learner: weak and strong counters, two kinds of keys, bfloat16."""
    params = {"b": jnp.zeros(3), "w": jnp.linspace(-1, 1, 12).reshape(4, 3)}
    return {
        "half": jnp.ones(2, jnp.bfloat16),
        "key": key,
        "opt": jax.tree.map(jnp.zeros_like, params),
        "params": params,
        "rbg": jax.random.wrap_key_data(jnp.arange(4, dtype="uint32"), impl="rbg"),
        "step": jnp.int32(0),
        "weak": lax.full((), 0),
    }


def learn(state: dict[str, Any], _: Any) -> tuple[dict[str, Any], Any]:
    key = jax.random.fold_in(state["key"], 1)
    x = jnp.sin(jax.random.key_data(key)[:1].astype(jnp.float32) + jnp.arange(4.0))

    def loss(params: Any) -> jax.Array:
        return jnp.mean((jnp.tanh(x @ params["w"] + params["b"]) - 0.3) ** 2)

    value, grads = jax.value_and_grad(loss)(state["params"])
    opt = jax.tree.map(lambda m, g: 0.9 * m + g, state["opt"], grads)
    new = {
        "half": state["half"] * 1.5,
        "key": key,
        "opt": opt,
        "params": jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], opt),
        "rbg": state["rbg"],
        "step": state["step"] + 1,
        "weak": state["weak"] + 1,
    }
    return new, {"loss": value, "weak": new["weak"], "key": key}


def saving(save: Save, every: int) -> Callable[..., Any]:
    def body(state: Any, x: Any) -> Any:
        state, y = learn(state, x)
        save(state, state["step"], state["step"] % every == 0)
        return state, y

    return body


def scan(body: Any, length: int) -> Any:
    return lambda state: lax.scan(body, state, None, length)


def seeds(*shape: int) -> jax.Array:
    return jax.random.split(jax.random.key(1), shape)


def make_mesh(*shape: int) -> Mesh:
    kinds = (AxisType.Auto,) * len(shape)
    return jax.make_mesh(shape, ("a", "b")[: len(shape)], axis_types=kinds)


@pytest.fixture(scope="module")
def whole() -> Any:
    return jax.jit(scan(learn, 10))(begin(jax.random.key(0)))


# ------------------------------------------------------------------ scan in chunks


@pytest.mark.parametrize(("chunk", "donate"), [(5, False), (3, True), (50, False)])
def test_chunks_are_the_unbroken_scan(whole: Any, chunk: int, donate: bool) -> None:
    seen: list[int] = []
    done = scan_in_chunks(
        learn,
        begin(jax.random.key(0)),
        10,
        chunk=chunk,
        donate=donate,
        save=lambda carry, step: seen.append(step),
    )
    assert_same_bits((done.carry, done.ys), whole)
    assert seen == [*range(chunk, 10, chunk), 10] and done.step == 10


def test_all_full_chunks_are_one_program() -> None:
    def body(carry: Any, x: Any) -> Any:
        # a strong integer that comes out weak: another program, and another sum with
        # int8, were it passed in anew
        new = (jnp.where(carry[0] > 0, 0, 1), carry[1] * 1.5 + x)
        return new, {"sum": carry[0] + jnp.int8(1), "x": carry[1]}

    xs, start = jnp.arange(9.0), (jnp.int32(0), jnp.float32(1))
    scan_in_chunks(body, start, 9, chunk=2, xs=xs)  # slicing and joining compile too
    with compile_events.count_compiles() as count:
        done = scan_in_chunks(body, start, 9, chunk=2, xs=xs)
    assert count.compiles == 2  # full chunks, and the shorter last one
    expected = jax.jit(lambda c, xs: lax.scan(body, c, xs))(start, xs)
    assert_same_bits((done.carry, done.ys), expected)


def test_a_killed_scan_goes_on_from_carry_and_step(whole: Any, tmp_path: Path) -> None:
    def killing(carry: Any, step: int) -> None:
        save_checkpoint(carry, tmp_path / "c", step=step)
        if step == 8:
            raise KeyboardInterrupt

    start = begin(jax.random.key(0))
    with pytest.raises(KeyboardInterrupt):
        scan_in_chunks(learn, start, 10, chunk=4, save=killing)
    carry = restore_into(begin(jax.random.key(3)), tmp_path / "c")
    done = scan_in_chunks(learn, carry, 10, chunk=4, start=8)
    assert_same_bits(done.carry, whole[0])
    assert_same_bits(done.ys, jax.tree.map(lambda y: y[8:], whole[1]))
    over = scan_in_chunks(learn, done.carry, 10, chunk=4, start=10)
    assert over.ys["loss"].shape == (0,) and over.step == 10


def test_a_run_is_told_of_each_chunk_and_ends_the_scan(tmp_path: Path) -> None:
    with Run(tmp_path, save=SaveEvery(steps=4)) as run:
        body = lambda n, _: (n + 1, None)  # noqa: E731
        assert scan_in_chunks(body, jnp.int32(0), 10, chunk=2, run=run).step == 10
        assert [entry.step for entry in run.list()] == [4, 8]
        run.request_stop()
        stopped = scan_in_chunks(body, jnp.int32(10), 30, chunk=4, start=10, run=run)
        assert stopped.step == 14 and int(stopped.carry) == 14
    assert [entry.step for entry in run.list()] == [4, 8, 14]


def test_sharded_carries_stay_sharded() -> None:
    place = NamedSharding(make_mesh(8), PartitionSpec("a"))

    def start() -> Any:
        rows = jax.device_put(jnp.arange(16.0).reshape(8, 2), place)
        return {"n": jnp.int32(0), "rows": rows}

    def body(c: Any, _: Any) -> Any:
        return {"n": c["n"] + 1, "rows": jnp.sin(c["rows"]) * 1.25}, c["n"]

    whole = jax.jit(scan(body, 7))(start())
    done = scan_in_chunks(body, start(), 7, chunk=3)
    assert_same_bits((done.carry, done.ys), whole)


def weaken(state: Any, _: Any) -> Any:
    """A strong number that comes out weak: a bfloat16 sum becomes one in float32."""
    total = (state["n"] * jnp.ones(3, jnp.bfloat16)).sum()
    return {"n": jnp.asarray(1.0) * 3.3, "y": state["y"] + total}, total


def strengthen(state: Any, _: Any) -> Any:
    """A weak number that comes out strong."""
    total = (state["n"] * jnp.ones(3, jnp.bfloat16)).sum()
    return {"n": state["n"] * jnp.float32(1.01), "y": state["y"] + total}, total


def swap(state: Any, _: Any) -> Any:
    """Both, and leaves that are neither numbers nor alone."""
    new = (jnp.asarray([0.1, 0.2]) + 0.0 * state[1].sum(), jnp.float32(1) * state[0])
    low = (state[0] * jnp.float16(1.1)).sum() + (state[1] * jnp.float16(3)).sum()
    return (lax.full((2,), 0.3) * 1.1, new[1], state[2], low), (low, state[2])


def promote(state: Any, _: Any) -> Any:
    """A weak integer that the body turns into a float."""
    half = (state["n"] * jnp.ones(3, jnp.bfloat16)).sum()
    return {"n": state["n"] * 1.37, "y": state["y"] + half}, half


CHANGING: dict[str, tuple[Any, Any]] = {
    "strong to weak": (weaken, {"n": jnp.float32(1.3), "y": jnp.float32(0)}),
    "weak to strong": (strengthen, {"n": 1.3, "y": np.float32(0)}),
    "both": (
        swap,
        (jnp.ones(2), lax.full((2,), 1.7), jax.random.key(1), jnp.float32(0)),
    ),
    "promoted": (promote, {"n": 1, "y": jnp.float32(0)}),
}


@pytest.mark.parametrize("case", CHANGING)
def test_a_carry_whose_types_change_goes_on_as_the_unbroken_one(
    case: str, tmp_path: Path
) -> None:
    (body, start), donate = CHANGING[case], case != "weak to strong"
    whole = jax.jit(scan(body, 8))(start)
    kept: list[Any] = []

    def keep(carry: Any, step: int) -> None:
        save_checkpoint(carry, tmp_path / f"{step}")
        kept.append(jax.eval_shape(lambda c: c, carry))

    copy = jax.tree.map(lambda x: x.copy() if isinstance(x, jax.Array) else x, start)
    done = scan_in_chunks(body, copy, 8, chunk=3, save=keep, donate=donate)
    assert_same_bits((done.carry, done.ys), whole)
    for step, skeleton in zip((3, 6, 8), kept, strict=True):
        carry = restore_into(skeleton, tmp_path / f"{step}")
        rest = scan_in_chunks(body, carry, 8, chunk=5, start=step, donate=donate)
        ys = jax.tree.map(lambda y, step=step: y[step:], whole[1])
        assert_same_bits((rest.carry, rest.ys), (whole[0], ys))


def test_a_stopped_scan_returns_what_the_next_step_takes(tmp_path: Path) -> None:
    start = {"n": jnp.float32(1.3), "y": jnp.float32(0)}
    whole, _ = jax.jit(scan(weaken, 7))(start)
    with Run(tmp_path) as run:
        run.request_stop()
        stopped = scan_in_chunks(weaken, start, 7, chunk=2, run=run)
        assert stopped.step == 2
    restored = run.restore(start).state
    for carry in (stopped.carry, restored):
        rest = scan_in_chunks(weaken, carry, 7, chunk=5, start=2)
        assert_same_bits(rest.carry, whole)


def test_sharded_leaves_change_their_types_in_place() -> None:
    place = NamedSharding(make_mesh(8), PartitionSpec("a"))
    seen: list[jax.Array] = []

    def weak(rows: jax.Array, _: Any) -> Any:
        return rows * jnp.float32(1.5), None

    start = jax.device_put(lax.full((16,), 1.0), place)
    assert start.weak_type
    done = scan_in_chunks(
        weak, start, 3, chunk=2, save=lambda carry, step: seen.append(carry)
    )
    assert not done.carry.weak_type
    for rows, power in zip(seen, (2, 3), strict=True):
        assert rows.weak_type and rows.sharding.is_equivalent_to(place, 1)
        assert rows.tolist() == [1.5**power] * 16


@pytest.mark.parametrize("factor", [1.5, 2j, jnp.bfloat16(1.1)], ids=str)
def test_numbers_are_promoted_as_by_the_unbroken_scan(factor: Any) -> None:
    def body(carry: Any, x: jax.Array) -> Any:
        return jax.tree.map(lambda leaf: leaf * factor, carry), (carry, x)

    strong = jnp.asarray(3.0).astype(jnp.result_type(jnp.float16, factor))
    xs, start = np.arange(5), {"a": 1, "b": [lax.full((2,), 3), strong]}
    whole = jax.jit(lambda carry: lax.scan(body, carry, xs))(start)
    for chunk in (2, 5):
        done = scan_in_chunks(body, start, 5, chunk=chunk, xs=xs)
        assert_same_bits((done.carry, done.ys), whole)


def test_without_jit_the_chunks_are_the_scan_without_jit() -> None:
    def body(carry: Any, x: jax.Array) -> Any:
        assert isinstance(float(x), float)  # what one disables jit for
        return (carry[0] * 1.5, carry[1] + x * carry[0]), carry[1]

    xs, start = jnp.arange(5.0), (1, jnp.float32(2))
    with jax.disable_jit():
        whole = jax.jit(lambda c: lax.scan(body, c, xs))(start)
        seen: list[Any] = []
        done = scan_in_chunks(
            body, start, 5, chunk=2, xs=xs, save=lambda carry, step: seen.append(carry)
        )
        assert_same_bits((done.carry, done.ys), whole)
        rest = scan_in_chunks(body, seen[0], 5, chunk=2, xs=xs, start=2)
        assert_same_bits((rest.carry, rest.ys), (whole[0], whole[1][2:]))
        plain = lambda c, x: (c * 1.5, c)  # noqa: E731
        over = scan_in_chunks(plain, jnp.float32(2), 5, chunk=2, xs=xs, start=5)
    assert over.ys.shape == (0,) and float(over.carry) == 2


@pytest.mark.parametrize("length", [0, 3])
def test_no_steps_return_what_a_scan_of_none_returns(length: int) -> None:
    body = lambda c, x: ((c[0] + 1, c[1] * 2.5), (c, x))  # noqa: E731
    xs = np.arange(length)
    done = scan_in_chunks(body, (0, 3), length, chunk=2, xs=xs, start=length)
    whole = jax.jit(lambda c: lax.scan(body, c, xs[:0]))((0, 3))
    assert_same_bits((done.carry, done.ys), whole)


@pytest.mark.parametrize(
    ("xs", "start", "message"),
    [
        (jnp.arange(6.0), 0, r"xs: expected an array of 8 rows, found \[6\]"),
        (np.arange(6.0), 0, r"xs: expected an array of 8 rows, found \[6\]"),
        (jnp.zeros((10, 2)), 0, r"xs: expected an array of 8 rows, found \[10, 2\]"),
        (jnp.arange(8.0)[4:], 4, r"found \[4\][^$]*those before start included"),
        (jnp.zeros((0, 8)), 8, r"found \[0, 8\]"),
        ({"a": np.zeros(8), "b": [np.zeros(8), np.zeros(7)]}, 0, r"xs\['b'\]\[1\]: "),
        ((jnp.zeros(8), jnp.float32(8)), 0, r"xs\[1\]: .* found \[\]"),
        (list(range(8)), 0, r"xs\[0\]: .* found \[\]"),
        (8, 0, r"xs: .* found \[\]"),
        (jax.random.split(jax.random.key(0), 7), 0, r"xs: .* found \[7\]"),
    ],
)
def test_xs_of_another_length_are_refused(xs: Any, start: int, message: str) -> None:
    body = lambda carry, x: (carry, x)  # noqa: E731
    with pytest.raises(InvalidArgumentError, match=message):
        scan_in_chunks(body, jnp.float32(0), 8, chunk=3, xs=xs, start=start)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"length": 4, "chunk": 0}, "at least 1 step, found 0"),
        ({"length": 4, "chunk": 2, "start": 5}, r"start: expected 0 … 4, found 5"),
    ],
)
def test_wrong_numbers_are_refused(numbers: dict[str, int], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        scan_in_chunks(learn, 0, **numbers)  # type: ignore[arg-type]


def test_chunks_inside_a_trace_name_the_saver() -> None:
    with pytest.raises(UnsupportedLeafError, match="make_saver"):
        jax.jit(lambda: scan_in_chunks(learn, 0, 4, chunk=2))()


@pytest.mark.parametrize("what", ["carry", "xs", "body"])
@pytest.mark.parametrize("transform", [jax.vmap, jax.grad, jax.jit], ids="vgj")
def test_chunks_of_traced_values_are_refused(transform: Any, what: str) -> None:
    def chunks(x: Any) -> Any:
        carry = x if what == "carry" else jnp.float32(0)
        xs = jnp.stack([x, x]) if what == "xs" else None
        step = x if what == "body" else 1.0
        body = lambda c, _: (c + step, None)  # noqa: E731
        return scan_in_chunks(body, carry, 2, chunk=1, xs=xs).carry

    with pytest.raises(UnsupportedLeafError, match=r"inside a traced.*[^$]*make_saver"):
        transform(chunks)(jnp.ones(2) if transform is jax.vmap else 1.0)


def test_what_a_body_closes_over_or_writes_is_no_trace(tmp_path: Path) -> None:
    """Arrays are constants, references and callbacks effects: no values of a trace."""
    rows, calls = jnp.arange(3.0), jax.new_ref(jnp.int32(0))

    def body(carry: Any, _: Any) -> Any:
        calls[...] += 1
        save({"x": carry}, 1)
        return carry + rows.sum(), None

    with make_saver(tmp_path / "s") as save:
        done = scan_in_chunks(body, jnp.float32(0), 5, chunk=2)
    assert float(done.carry) == 15.0 and int(calls[...]) == 5
    with open_checkpoint(tmp_path / "s") as checkpoint:
        assert float(checkpoint["x"]) == 12.0


# -------------------------------------------------------------- saving from inside


def check_file(path: Path, state: Any, step: int) -> None:
    """Assert that a file is the one that a save of the state outside writes."""
    outside = path.with_suffix(".outside")
    save_checkpoint(state, outside, step=step)
    with open_checkpoint(path) as got, open_checkpoint(outside) as want:
        assert dict(got.layout) == dict(want.layout)
        assert got.digest == want.digest and got.step == step
    verify_checkpoint(path)
    assert_identical(restore_into(state, path), state, state)


@pytest.mark.parametrize("donate", [False, True])
def test_a_saved_scan_is_the_unsaved_one(
    whole: Any, tmp_path: Path, donate: bool
) -> None:
    with make_saver(tmp_path / "s") as save:
        program = jax.jit(
            scan(saving(save, 4), 10), donate_argnums=(0,) if donate else ()
        )
        start = begin(jax.random.key(0))
        assert_same_bits(program(start), whole)
    assert start["params"]["w"].is_deleted() == donate
    state, _ = jax.jit(scan(learn, 8))(begin(jax.random.key(0)))
    check_file(tmp_path / "s", state, 8)


@pytest.mark.parametrize("shape", [(3,), (2, 3)], ids=["vmap", "vmap of vmap"])
def test_vmapped_seeds_go_into_one_file(shape: tuple[int, ...], tmp_path: Path) -> None:
    def vmapped(function: Any) -> Any:
        for _ in shape:
            function = jax.vmap(function)
        return jax.jit(function)

    states = vmapped(begin)(seeds(*shape))
    with make_saver(tmp_path / "s") as save:
        saved = vmapped(scan(saving(save, 2), 3))(states)
    assert_same_bits(saved, vmapped(scan(learn, 3))(states))
    state, _ = vmapped(scan(learn, 2))(states)
    check_file(tmp_path / "s", state, 2)


def test_what_the_seeds_share_gets_their_axis(tmp_path: Path) -> None:
    shared = jnp.arange(3.0)

    def one(x: jax.Array) -> Any:
        state = {"mine": x, "shared": shared, "name": "sac", "n": 4, "host": np.ones(2)}
        save(state, 5)
        return {name: state[name] for name in ("host", "mine", "n", "shared")}

    with make_saver(tmp_path / "s") as save:
        returned = jax.jit(jax.vmap(one))(jnp.arange(2.0))
    check_file(tmp_path / "s", {**returned, "name": "sac"}, 5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "int8", "bool"])
def test_seeds_share_what_a_scan_takes_for_constants(
    dtype: str, tmp_path: Path
) -> None:
    """A scan gives them to the rule of vmap as Python numbers, without a dtype."""
    half = jnp.asarray(1.5).astype(dtype)

    def one(x: jax.Array) -> Any:
        def body(state: Any, _: Any) -> Any:
            state = {"half": half, "step": state["step"] + 1, "x": state["x"] * 2}
            save({**state, "name": "sac"}, state["step"])
            return state, None

        start = {"half": half, "step": jnp.int32(0), "x": x}
        return lax.scan(body, start, None, 3)[0]

    with make_saver(tmp_path / "s") as save:
        returned = jax.jit(jax.vmap(one))(jnp.arange(2.0))
    check_file(tmp_path / "s", {**returned, "name": "sac"}, 3)


@pytest.mark.parametrize("loop", ["fori_loop", "while_loop", "python", "eager scan"])
def test_it_saves_in_every_loop(loop: str, tmp_path: Path) -> None:
    def body(state: Any) -> Any:
        state = {"n": state["n"] + 1, "x": state["x"] * 2}
        save(state, state["n"], state["n"] == 3)
        return state

    def run(state: Any) -> Any:
        if loop == "fori_loop":
            return lax.fori_loop(0, 5, lambda i, s: body(s), state)
        if loop == "while_loop":
            return lax.while_loop(lambda s: s["n"] < 5, body, state)
        if loop == "eager scan":
            return lax.scan(lambda s, _: (body(s), None), state, None, 5)[0]
        for _ in range(5):
            state = body(state)
        return state

    start = {"n": jnp.int32(0), "x": jnp.float32(1)}
    with make_saver(tmp_path / "s") as save:
        end = run(start) if loop in ("python", "eager scan") else jax.jit(run)(start)
    assert (int(end["n"]), float(end["x"])) == (5, 32.0)
    with open_checkpoint(tmp_path / "s") as checkpoint:
        assert (checkpoint.step, float(checkpoint["x"])) == (3, 8.0)


def test_a_step_that_is_not_due_brings_nothing_to_the_host(tmp_path: Path) -> None:
    calls: list[int] = []
    save = make_saver(tmp_path / "s")
    save._receive = lambda traced, due, step, arrays: calls.append(int(step))  # type: ignore[method-assign]
    jax.jit(scan(saving(save, 4), 10))(begin(jax.random.key(0)))
    jax.effects_barrier()
    assert calls == [4, 8]


def test_a_run_keeps_what_its_policies_say(tmp_path: Path) -> None:
    start = begin(jax.random.key(0))
    with Run(tmp_path, save=SaveEvery(steps=4), exclude="opt") as run:
        with make_saver(run) as save:
            jax.jit(scan(saving(save, 2), 11))(start)
        assert [entry.step for entry in run.list()] == [4, 8]
    # the step reported last is saved at the end, whatever the program wrote since
    assert [entry.step for entry in run.list()] == [4, 8, 10]
    for step in (4, 8, 10):
        state, _ = jax.jit(scan(learn, step))(start)
        restored = run.restore(start, step=step, keep="opt").state
        assert_identical(restored, {**state, "opt": start["opt"]}, start)


def test_saves_hold_two_states_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[int] = []
    gate, written = threading.Semaphore(0), ajaxckpt.scan.write_checkpoint
    copy = ajaxckpt.scan.copy_arrays

    def slow(*args: Any) -> Any:
        assert gate.acquire(timeout=60)
        # before this one is through: itself, and one that waits
        ahead.append(len(copied) - len(ahead))
        return written(*args)

    def counting(*args: Any) -> Any:
        copied.append(0)
        if len(copied) > 1:
            gate.release()
        return copy(*args)

    ahead: list[int] = []
    monkeypatch.setattr(ajaxckpt.scan, "write_checkpoint", slow)
    monkeypatch.setattr(ajaxckpt.scan, "copy_arrays", counting)
    with make_saver(tmp_path / "s") as save:
        jax.jit(scan(saving(save, 1), 6))(begin(jax.random.key(0)))
        jax.effects_barrier()
        gate.release()
    assert len(ahead) == 6 and max(ahead) == 2


def test_a_failure_surfaces_outside_and_the_program_goes_on(
    whole: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ajaxckpt.scan, "write_checkpoint", full)
    save = make_saver(tmp_path / "s")
    assert_same_bits(
        jax.jit(scan(saving(save, 4), 10))(begin(jax.random.key(0))), whole
    )
    with pytest.raises(
        BackgroundSaveError, match=r"step 4 was not saved.*No space"
    ) as e:
        save.wait()
    assert e.value.step == 4 and isinstance(e.value.__cause__, OSError)
    assert "step 8" in e.value.__notes__[0] and save.failed == 2
    save.wait()  # it was told
    with pytest.raises(KeyboardInterrupt) as cut, save:
        jax.jit(lambda x: save({"x": x}, 1))(1.0)
        raise KeyboardInterrupt
    assert "step 1 was not saved" in cut.value.__notes__[0]
    jax.jit(lambda x: save({"x": x}, 2))(1.0)
    jax.effects_barrier()
    save._target.wait()
    with pytest.raises(BackgroundSaveError, match="step 2"):
        jax.jit(lambda x: save({"x": x}, 3))(1.0)


def test_an_error_in_a_plain_callback_ends_the_program() -> None:
    """Why no error may leave the saver's: JAX gives the state up with it."""

    def fail(x: Any) -> None:
        raise OSError("disk full")

    def program(x: jax.Array) -> jax.Array:
        jax.experimental.io_callback(fail, None, x, ordered=True)
        return x + 1

    with pytest.raises(jax.errors.JaxRuntimeError, match="disk full"):
        jax.block_until_ready(jax.jit(program)(jnp.ones(3)))
    jax.effects_barrier()


@pytest.mark.parametrize(
    ("steps", "due", "message"),
    [
        ([3, 5, 3], [True] * 3, "the seeds disagree on the step: 3, 5"),
        ([3, 3, 3], [True, False, True], "due for 2 of 3 seeds"),
    ],
)
def test_seeds_that_disagree_are_refused(
    steps: list[int], due: list[bool], message: str, tmp_path: Path
) -> None:
    save = make_saver(tmp_path / "s")
    call = jax.jit(jax.vmap(lambda x, step, due: save({"x": x}, step, due)))
    call(jnp.ones(3), jnp.array(steps), jnp.array(due))
    with pytest.raises(BackgroundSaveError, match=message):
        save.wait()
    assert not (tmp_path / "s").exists()
    with pytest.raises(InvalidArgumentError, match=message):
        save({"x": jnp.ones(3)}, np.array(steps), np.array(due))


def test_sharded_states_are_saved_whole(tmp_path: Path) -> None:
    place = NamedSharding(make_mesh(8), PartitionSpec("a"))
    rows = jax.device_put(jnp.arange(16.0).reshape(8, 2), place)

    def body(state: Any, _: Any) -> Any:
        state = {"n": state["n"] + 1, "rows": state["rows"] * 2}
        save(state, state["n"], state["n"] == 2)
        return state, None

    with make_saver(tmp_path / "s") as save:
        end, _ = jax.jit(scan(body, 3))({"n": jnp.int32(0), "rows": rows})
    assert end["rows"].sharding.is_equivalent_to(place, 2)
    with open_checkpoint(tmp_path / "s") as checkpoint:
        assert np.array_equal(checkpoint["rows"], np.arange(16.0).reshape(8, 2) * 4)


@pytest.mark.parametrize(
    ("way", "axes"),
    [("jit", "ab"), ("jit", "b"), ("eager", "a"), ("inner jit", "ab"), ("scan", "a")],
)
def test_a_save_of_one_devices_part_is_refused(
    way: str, axes: str, tmp_path: Path
) -> None:
    def train(state: Any) -> Any:
        save(state, state["step"])
        return state

    def scanned(state: Any) -> Any:
        return lax.scan(lambda s, _: (train(s), None), state, None, 2)[0]

    state = {"step": jnp.int32(1), "w": jnp.arange(8.0).reshape(4, 2)}
    specs = {"step": PartitionSpec(), "w": PartitionSpec(tuple(axes))}
    with make_saver(tmp_path / "s") as save:
        inner = {"inner jit": jax.jit(train), "scan": scanned}.get(way, train)
        if way == "inner jit":
            inner(state)  # traced before, where it may save
        mapped = jax.shard_map(
            inner,
            mesh=make_mesh(2, 2),
            in_specs=(specs,),
            out_specs=specs,
            axis_names=set(axes),
        )
        with pytest.raises(UnsupportedLeafError, match="each device holds a part"):
            (mapped if way == "eager" else jax.jit(mapped))(state)
    assert (tmp_path / "s").exists() == (way == "inner jit")


def test_a_save_inside_pmap_is_refused(tmp_path: Path) -> None:
    with make_saver(tmp_path / "s") as save:
        with pytest.raises(UnsupportedLeafError, match="each device holds a part"):
            jax.pmap(lambda x: save({"x": x}, 1))(jnp.arange(2.0))
    assert not (tmp_path / "s").exists()


def test_what_a_mapped_step_returns_is_saved_whole(tmp_path: Path) -> None:
    mesh, rows = make_mesh(4), jnp.arange(8.0).reshape(4, 2)
    half = PartitionSpec("a")
    step = jax.shard_map(lambda w: w * 2, mesh=mesh, in_specs=half, out_specs=half)

    def body(state: Any, _: Any) -> Any:
        state = {"n": state["n"] + 1, "w": step(state["w"])}
        save(state, state["n"])
        return state, None

    with make_saver(tmp_path / "s") as save:
        end, _ = jax.jit(scan(body, 3))({"n": jnp.int32(0), "w": rows})
    check_file(tmp_path / "s", end, 3)


@pytest.mark.parametrize("dtype", ["int4", "float8_e4m3fn", "bool", "complex64"])
def test_rare_dtypes_pass_the_callback(dtype: str, tmp_path: Path) -> None:
    state = {"x": jnp.array([0, 1, 3, 0]).astype(dtype)}
    with make_saver(tmp_path / "s") as save:
        jax.jit(lambda s: save(s, 1))(state)
    check_file(tmp_path / "s", state, 1)


def test_a_block_of_64_bits_is_exact_or_refused(tmp_path: Path) -> None:
    with jax.enable_x64(True):
        state = {"x": jnp.array([2**53 + 1]), "y": jnp.array([1 / 3])}
        save = make_saver(tmp_path / "s")
        jax.jit(lambda s: save(s, 1))(state)
        try:
            save.wait()
        except BackgroundSaveError as error:
            assert "arrives as" in str(error)
            assert not (tmp_path / "s").exists()
        else:
            check_file(tmp_path / "s", state, 1)


def test_what_jax_refuses_is_refused_and_not_lost(tmp_path: Path) -> None:
    save = make_saver(tmp_path / "s")

    def conditional(x: jax.Array) -> None:
        lax.cond(x > 0, lambda: save({"x": x}, 1), lambda: None)

    with pytest.raises(NotImplementedError, match="vmap-of-cond"):
        jax.vmap(conditional)(jnp.ones(2))

    def loop(x: jax.Array) -> jax.Array:
        return lax.while_loop(
            lambda x: x < 4, lambda x: (save({"x": x}, 1), x + 1)[1], x
        )

    with pytest.raises(Exception, match=r"[Oo]rdered"):
        jax.vmap(loop)(jnp.arange(2.0))

    def loss(x: jax.Array) -> jax.Array:
        return lax.scan(lambda c, _: (save({"c": c}, 1), (c * x, None))[1], x, None, 2)[
            0
        ]

    with pytest.raises(ValueError, match="JVP"):
        jax.grad(loss)(1.0)
    save.wait()
    assert not (tmp_path / "s").exists()


def test_wrong_arguments_are_refused_while_tracing(tmp_path: Path) -> None:
    save = make_saver(tmp_path / "s")
    with pytest.raises(InvalidArgumentError, match="due: expected a bool, found int32"):
        jax.jit(lambda x: save({"x": x}, 1, x))(3)
    with pytest.raises(InvalidArgumentError, match="holds no integer"):
        jax.jit(lambda x: save({"x": x}, x))(0.5)
    with pytest.raises(UnsupportedLeafError, match=r"x: a builtins\.object"):
        jax.jit(lambda x: save({"x": object()}, x))(1)
    with pytest.raises(InvalidArgumentError, match="the run's"):
        make_saver(Run(tmp_path), exclude="x")
    with pytest.raises(InvalidArgumentError, match="expected a Run or a path"):
        make_saver(3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (-3, r"step: -3 is not within 0 … 2\*\*63 - 1"),
        (np.int8(-3), r"step: -3 is not within"),
        (2**63, r"step: 9223372036854775808 is not within"),
        (2**70, r"step: 1180591620717411303424 is not within"),
        (2**40, "step: 1099511627776 is beyond int32"),
        (np.int64(2**40), "step: 1099511627776 is beyond int32"),
        (np.array([2, 2**40]), "the seeds disagree on the step: 2, 1099511627776"),
    ],
)
def test_a_known_step_that_is_none_is_refused_while_tracing(
    step: Any, message: str, tmp_path: Path
) -> None:
    save = make_saver(tmp_path / "s")
    for transform in (jax.jit, jax.vmap):
        with pytest.raises(InvalidArgumentError, match=message):
            transform(lambda x: save({"x": x}, step))(jnp.ones(2))
    if "beyond" not in message:
        with pytest.raises(InvalidArgumentError, match=message):
            save({"x": 1}, step)
    save.wait()
    assert not (tmp_path / "s").exists()


def test_a_step_that_turns_out_negative_is_refused(tmp_path: Path) -> None:
    save = make_saver(tmp_path / "s")
    jax.jit(lambda x: save({"x": x}, x))(-3)
    with pytest.raises(BackgroundSaveError, match="step: -3 is not within"):
        save.wait()
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (2**40, "n: 1099511627776 is beyond int32"),
        (-(2**70), "n: -1180591620717411303424 is beyond int32"),
        (np.int64(2**31), "n: 2147483648 is beyond int32"),
        (np.array([[1, -(2**40)]]), "n: -1099511627776 is beyond int32"),
        (np.uint64(2**63), "n: 9223372036854775808 is beyond uint32"),
    ],
    ids=repr,
)
def test_a_constant_that_jax_would_wrap_is_refused(
    leaf: Any, message: str, tmp_path: Path
) -> None:
    save = make_saver(tmp_path / "s")
    with pytest.raises(UnsupportedLeafError, match=message):
        jax.jit(lambda x: save({"n": leaf, "x": x}, 1))(1.0)


@pytest.mark.parametrize(
    "leaf", [2**31 - 1, -(2**31), np.uint32(2**32 - 1), np.array([], int), 1.5, True]
)
def test_a_constant_that_fits_is_saved(leaf: Any, tmp_path: Path) -> None:
    with make_saver(tmp_path / "s") as save:
        state = jax.jit(lambda x: [save([leaf, x], 1), [leaf, x]][1])(1.0)
    check_file(tmp_path / "s", state, 1)


def test_what_a_program_saved_is_written_when_the_process_ends(tmp_path: Path) -> None:
    script = """
        import os, sys, time
        import jax, jax.numpy as jnp
        from ajaxckpt import _files
        from ajaxckpt.scan import make_saver

        class Slow:
            def __getattr__(self, name):
                return getattr(os, name)
            def open(self, path, flags, mode=0o777):
                if flags & os.O_EXCL:
                    time.sleep(0.3)  # not finished when the main thread is
                return os.open(path, flags, mode)

        _files.os = Slow()
        save = make_saver(sys.argv[1])

        def body(state, _):
            state = {"w": state["w"] + 1, "step": state["step"] + 1}
            save(state, state["step"])
            return state, None

        # too large to be computed by the main thread: what the callback starts is
        # started by a thread of JAX's, a daemon
        start = {"w": jnp.zeros(2_000_000), "step": jnp.int32(0)}
        jax.block_until_ready(jax.jit(lambda s: jax.lax.scan(body, s, None, 3))(start))
        """
    root = os.path.dirname(os.path.dirname(ajaxckpt._files.__file__))
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path / "s")],
        check=True,
        timeout=100,
        env={**os.environ, "PYTHONPATH": root},  # the package that is tested here
    )
    with open_checkpoint(tmp_path / "s") as checkpoint:
        assert checkpoint.step == 3 and set(checkpoint["w"].tolist()) == {3.0}


@pytest.mark.slow
def test_seeds_of_a_real_learner_are_the_unbroken_ones(tmp_path: Path) -> None:
    """Chunks of one step are loops that XLA dissolves: here the bits stay even so."""
    import optax

    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-3))
    sizes = ((7, 33), (33, 33), (33, 3))

    def start(key: jax.Array) -> Any:
        params = [(jax.random.normal(key, n) * 0.3, jnp.zeros(n[1])) for n in sizes]
        return {"k": key, "m": jnp.zeros(7), "n": 0, "o": tx.init(params), "p": params}

    def apply(params: Any, x: jax.Array) -> jax.Array:
        for w, b in params:
            x = jnp.tanh(x @ w + b[None])
        return x

    def advance(s: Any, _: Any) -> Any:
        key, sub = jax.random.split(s["k"])
        x = jax.random.normal(sub, (17, 7))
        mean = s["m"] * 0.99 + 0.01 * x.mean(0)
        x = (x - mean[None]) / jnp.sqrt(1 + mean[None] ** 2)

        def loss(params: Any) -> jax.Array:
            miss = jnp.mean((apply(params, x) - jnp.sin(x[:, :3] * 3)) ** 2)
            return miss + jnp.mean(apply(params, jnp.exp(x) * 0.1))

        value, grads = jax.value_and_grad(loss)(s["p"])
        updates, opt = tx.update(grads, s["o"], s["p"])
        params = optax.apply_updates(s["p"], updates)
        return {"k": key, "m": mean, "n": s["n"] + 1, "o": opt, "p": params}, value

    def body(s: Any, x: Any) -> Any:
        return jax.vmap(advance, in_axes=(0, None))(s, x)

    def begin() -> Any:
        state = jax.vmap(start)(seeds(3))
        return {**state, "n": jnp.zeros_like(state["n"])}

    whole = jax.jit(scan(body, 30))(begin())
    for chunk in (1, 29):
        done = scan_in_chunks(body, begin(), 30, chunk=chunk)
        assert_same_bits((done.carry, done.ys), whole)

    def one(s: Any) -> Any:
        def saved(s: Any, x: Any) -> Any:
            s, y = advance(s, x)
            save(s, s["n"], s["n"] % 7 == 0)
            return s, y

        return lax.scan(saved, s, None, 30)

    with make_saver(tmp_path / "s") as save:
        state, _ = jax.jit(jax.vmap(one))(begin())
    assert_same_bits(state, whole[0])
    with open_checkpoint(tmp_path / "s") as checkpoint:
        assert checkpoint.step == 28 and checkpoint["n"].tolist() == [28] * 3
