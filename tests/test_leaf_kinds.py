"""Which leaves can be saved, which fit which skeleton, and what is refused by name."""

import array
import collections
import datetime
import decimal
import enum
import functools
import gc
import pathlib
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from identical import assert_identical, assert_same_bits, paths_and_leaves
from strategies import Mode, Name, bent, plus, to_jax, to_weak

from ajaxckpt import (
    LayoutMismatchError,
    Run,
    UnsupportedLeafError,
    plan_restore,
    restore_into,
    save_checkpoint,
)
from ajaxckpt._leaves import _builtin_key_impls


def strong(shape: tuple[int, ...], dtype: Any = np.float32) -> jax.Array:
    return to_jax(np.full(shape, 1, dtype))


def weak(shape: tuple[int, ...], dtype: Any = np.float32) -> jax.Array:
    return to_weak(np.full(shape, 1, dtype))


def host(shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
    return np.full(shape, 1, dtype)


def abstract(shape: tuple[int, ...], dtype: Any = np.float32, **facts: Any) -> Any:
    return jax.ShapeDtypeStruct(shape, np.dtype(dtype), **facts)


def key(impl: str | None = None, shape: tuple[int, ...] = ()) -> jax.Array:
    one = jax.random.key(1, impl=impl)
    return jax.random.split(one, shape) if shape else one


class Old(enum.Enum):
    SLOW = 1
    FAST = 2


class New(enum.Enum):
    FAST = "renumbered"


class OldFlag(enum.Flag):
    A = 1
    B = 2
    C = 4


class NewFlag(enum.Flag):
    C = 1
    A = 2


# --- what fits what --------------------------------------------------------------

FITS = {
    # a Python number in the skeleton promises its shape alone
    "int, weak int": (0, weak((), np.int32)),
    "int, weak float": (0, weak(())),
    "int, strong float": (0, strong(())),
    "float, numpy 0-d": (0.0, host((), np.float64)),
    "int, numpy scalar": (0, np.int64(3)),
    "bool, int": (False, 3),
    "int, float": (0, 1.5),
    # so does a weak type, up to 64 bits
    "weak int, float": (weak((3,), np.int32), strong((3,))),
    "weak int, weak float": (weak((3,), np.int32), weak((3,))),
    "weak float, bfloat16": (weak((3,)), strong((3,), jnp.bfloat16)),
    "weak int 0-d, float": (weak((), np.int32), strong(())),
    "weak int, numpy int8": (weak((3,), np.int32), host((3,), np.int8)),
    # a weak type alone is no difference
    "strong float, weak float": (strong((3,)), weak((3,))),
    "weak float, strong float": (weak((3,)), strong((3,))),
    "strong bool, weak bool": (strong((2,), bool), weak((2,), bool)),
    # a saved Python number fits a 0-d leaf that is weak or of its default dtype
    "weak int 0-d, int": (weak((), np.int32), 3),
    "weak int 0-d, long int": (weak((), np.int32), 2**70),
    "weak float 0-d, int": (weak(()), 3),
    "float32 0-d, float": (strong(()), 1.5),
    "int32 0-d, int": (strong((), np.int32), 3),
    "bool 0-d, bool": (strong((), bool), True),
    "complex64 0-d, complex": (strong((), np.complex64), 1j),
    "numpy float64 0-d, float": (host((), np.float64), 1.5),
    "numpy int64 scalar, int": (np.int64(0), 3),
    # host or device is the skeleton's to say
    "numpy, jax": (host((3,)), strong((3,))),
    "jax, numpy": (strong((3,)), host((3,))),
    "numpy, weak jax": (host((3,)), weak((3,))),
    "numpy scalar, jax 0-d": (np.float32(0), strong(())),
    "jax 0-d, numpy scalar": (strong(()), np.float32(3)),
    "big-endian numpy, jax": (host((3,), ">f4"), strong((3,))),
    "jax, big-endian numpy": (strong((3,)), host((3,), ">f4")),
    "jax 64 bits, numpy": (strong((3,), np.int64), host((3,), np.int64)),
    # abstract skeletons
    "abstract, jax": (abstract((3,)), strong((3,))),
    "abstract, numpy": (abstract((3,)), host((3,))),
    "abstract weak int, int": (abstract((), np.int32, weak_type=True), 3),
    "abstract weak int, float": (abstract((), np.int32, weak_type=True), weak(())),
    # classes and functions are the skeleton's
    "function, other function": (plus, bent),
}


@pytest.mark.parametrize("case", FITS)
def test_leaf_that_fits_comes_back_as_saved(case: str, tmp_path: Path) -> None:
    like, saved = FITS[case]
    path = tmp_path / "state.safetensors"
    save_checkpoint({"leaf": saved}, path)
    plan = plan_restore({"leaf": like}, path)
    assert plan.load == ("leaf",) and not plan.mismatches
    restored = plan.apply()
    if isinstance(like, np.ndarray) and getattr(saved, "weak_type", False):
        assert_identical(restored, {"leaf": np.asarray(saved)}, {"leaf": like})
    else:
        assert_identical(restored, {"leaf": saved}, {"leaf": like})


@pytest.mark.parametrize(
    ("like", "saved", "expected"),
    [
        (New.FAST, Old.FAST, New.FAST),
        (NewFlag.A, OldFlag.A | OldFlag.C, NewFlag.A | NewFlag.C),
        (NewFlag.A, OldFlag(0), NewFlag(0)),
        (Old.SLOW, Old.FAST, Old.FAST),
    ],
)
def test_enum_members_are_found_by_name_in_the_skeletons_class(
    like: enum.Enum, saved: enum.Enum, expected: enum.Enum, tmp_path: Path
) -> None:
    path = tmp_path / "state.safetensors"
    save_checkpoint({"leaf": saved}, path)
    assert restore_into({"leaf": like}, path)["leaf"] is expected


NUMBER_OR_SHAPE = "kind or shape"
MISFITS = {
    # Python numbers
    "float32 0-d, int": (strong(()), 3, "kind"),
    "float32 0-d, bool": (strong(()), True, "kind"),
    "int32 0-d, float": (strong((), np.int32), 1.5, "kind"),
    "int32 0-d, bool": (strong((), np.int32), True, "kind"),
    "float16 0-d, float": (strong((), np.float16), 1.5, "kind"),
    "bfloat16 0-d, float": (strong((), jnp.bfloat16), 1.5, "kind"),
    "int8 0-d, int": (strong((), np.int8), 3, "kind"),
    "numpy int32 scalar, float": (np.int32(0), 1.5, "kind"),
    "one float32, float": (strong((1,)), 1.5, NUMBER_OR_SHAPE),
    "one weak float, float": (weak((1,)), 1.5, NUMBER_OR_SHAPE),
    "int, one int32": (0, strong((1,), np.int32), "shape"),
    "int, weak ints": (0, weak((2,), np.int32), "shape"),
    # 64 bits into fewer
    "int32, int64": (strong((3,), np.int32), strong((3,), np.int64), "dtype"),
    "weak int32, int64": (weak((3,), np.int32), strong((3,), np.int64), "dtype"),
    "weak float32, float64": (weak(()), strong((), np.float64), "dtype"),
    # a number is as wide as x64 says: the next step would narrow what came back
    "float, float64 of jax": (0.5, strong((), np.float64), "dtype"),
    "int, int64 of jax": (0, strong((), np.int64), "dtype"),
    "weak float32, numpy int64": (weak(()), host((), np.int64), "dtype"),
    "weak complex64, uint64": (
        weak((), np.complex64),
        strong((), np.uint64),
        "dtype",
    ),
    "float32, numpy float64": (strong((3,)), host((3,), np.float64), "dtype"),
    # dtypes are strict
    "int64, int32": (strong((3,), np.int64), strong((3,), np.int32), "dtype"),
    "float32, float16": (strong((3,)), strong((3,), np.float16), "dtype"),
    "float16, float32": (strong((3,), np.float16), strong((3,)), "dtype"),
    "float32, int32": (strong((3,)), strong((3,), np.int32), "dtype"),
    "int32, float32": (strong((3,), np.int32), strong((3,)), "dtype"),
    "int32, weak float": (strong((3,), np.int32), weak((3,)), "dtype"),
    "numpy int32, weak float": (host((3,), np.int32), weak((3,)), "dtype"),
    "uint32, int32": (strong((3,), np.uint32), strong((3,), np.int32), "dtype"),
    "uint8, bool": (strong((3,), np.uint8), strong((3,), bool), "dtype"),
    "bfloat16, float16": (strong((3,), jnp.bfloat16), strong((3,), "f2"), "dtype"),
    "float8 kinds": (
        strong((3,), jnp.float8_e4m3fn),
        strong((3,), jnp.float8_e5m2),
        "dtype",
    ),
    "int8, int4": (strong((3,), np.int8), strong((3,), jnp.int4), "dtype"),
    "float32, complex64": (strong((3,)), strong((3,), np.complex64), "dtype"),
    "numpy float64, float32": (host((3,), np.float64), host((3,)), "dtype"),
    "numpy scalars": (np.float64(0), np.float32(0), "dtype"),
    "abstract float32, float64": (abstract((3,)), strong((3,), np.float64), "dtype"),
    "abstract float32, int32": (abstract((3,)), strong((3,), np.int32), "dtype"),
    # shapes that would broadcast, too
    "5 of 1": (strong((5,)), strong((1,)), "shape"),
    "1 of 0-d": (strong((1,)), strong(()), "shape"),
    "0-d of 1": (strong(()), strong((1,)), "shape"),
    "transposed": (strong((2, 3)), strong((3, 2)), "shape"),
    "flattened": (host((2, 3)), host((6,)), "shape"),
    "weak": (weak((3,), np.int32), strong((4,)), "shape"),
    "empty": (strong((0,)), strong((0, 1)), "shape"),
    "numpy scalar of 1": (np.float32(0), strong((1,)), "shape"),
    "abstract shape": (abstract((3,)), strong((1, 3)), "shape"),
    # keys
    "key, raw key": (key(), jax.random.key_data(key()), "kind"),
    "raw key, key": (jax.random.key_data(key()), key(), "kind"),
    "key, int": (key(), 3, "kind"),
    "int, key": (0, key(), "kind"),
    "threefry, rbg": (key("threefry2x32"), key("rbg"), "key implementation"),
    "rbg, unsafe_rbg": (key("rbg"), key("unsafe_rbg"), "key implementation"),
    "unsafe_rbg, rbg": (key("unsafe_rbg"), key("rbg"), "key implementation"),
    "key batches": (key(shape=(3,)), key(shape=(2,)), "shape"),
    "key, key batch": (key(), key(shape=(1,)), "shape"),
    # kinds
    "str, int": ("3", 3, "kind"),
    "int, str": (3, "3", "kind"),
    "str, bytes": ("a", b"a", "kind"),
    "bytes, str": (b"a", "a", "kind"),
    "bytes, uint8": (b"a", strong((1,), np.uint8), "kind"),
    "uint8, bytes": (strong((1,), np.uint8), b"a", "kind"),
    "enum, str": (Name.ACTOR, "actor", "kind"),
    "str, enum": ("actor", Name.ACTOR, "kind"),
    "enum, int": (Mode.TRAIN, 1, "kind"),
    "int, enum": (1, Mode.TRAIN, "kind"),
    "function, int": (plus, 1, "kind"),
    "int, function": (1, plus, "kind"),
    "function, array": (plus, strong((3,)), "kind"),
    "array, function": (strong((3,)), plus, "kind"),
    "array, str": (strong(()), "1.0", "kind"),
    "enum without that member": (New.FAST, Old.SLOW, "kind"),
    "flag without that member": (NewFlag.A, OldFlag.A | OldFlag.B, "kind"),
}


@pytest.mark.parametrize("case", MISFITS)
def test_leaf_that_does_not_fit_is_refused_by_name(case: str, tmp_path: Path) -> None:
    like, saved, problem = MISFITS[case]
    path = tmp_path / "state.safetensors"
    save_checkpoint({"a": {"leaf": saved}, "sound": 1}, path)
    skeleton = {"a": {"leaf": like}, "sound": 0}
    with pytest.raises(LayoutMismatchError) as raised:
        restore_into(skeleton, path)
    (mismatch,) = raised.value.mismatches
    assert mismatch.name == "a.leaf"
    assert mismatch.problem in problem.split(" or ")
    assert "1 of 2 leaves does not fit" in str(raised.value)
    assert f"a.leaf: expected {mismatch.expected}, found {mismatch.found}" in str(
        raised.value
    )


def test_mismatches_show_both_sides(tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    state = {
        "keys": key("rbg"),
        "lost": strong((2,)),
        "mode": Old.SLOW,
        "w": strong((3, 10)),
        "wide": strong((), np.float64),
    }
    skeleton = {
        "keys": key("unsafe_rbg"),
        "mode": New.FAST,
        "new": strong((4,), np.int32),
        "w": strong((3, 20)),
        "wide": weak((), np.int32),
    }
    save_checkpoint(state, path)
    with pytest.raises(LayoutMismatchError) as raised:
        restore_into(skeleton, path)
    lines = {line.strip() for line in str(raised.value).splitlines()}
    assert lines >= {
        "keys: expected key<unsafe_rbg>[], found key<rbg>[]",
        "lost: expected nothing, found float32[2]",
        "new: expected int32[4], found nothing",
        "w: expected float32[3,20], found float32[3,10]",
        "wide: expected ~int32[], found float64[]",
    }
    (mode,) = [line for line in lines if line.startswith("mode:")]
    assert "New has no member 'SLOW'" in mode
    assert len(raised.value.mismatches) == 6


# --- what is refused -------------------------------------------------------------


class Opaque:
    pass


class MyInt(int):
    pass


class MyFloat(float):
    pass


class MyStr(str):
    pass


class MyArray(np.ndarray):
    pass


class Loose(enum.Flag, boundary=enum.KEEP):
    A = 1


def memory_map(folder: Path) -> np.memmap:
    return np.memmap(folder / "map", np.float32, "w+", shape=(3,))


def deleted(folder: Path) -> jax.Array:
    array = jnp.ones(3)
    array.delete()
    return array


def donated(folder: Path) -> jax.Array:
    array = jnp.ones(3)
    jax.block_until_ready(jax.jit(lambda x: x + 1, donate_argnums=0)(array))
    assert array.is_deleted()
    return array


def of(make: Callable[[], Any]) -> Callable[[Path], Any]:
    return lambda folder: make()


REFUSED: dict[str, Callable[[Path], Any]] = {
    "object array": of(lambda: np.array([object(), None])),
    "object array of numbers": of(lambda: np.array([1, 2], object)),
    "str array": of(lambda: np.array(["a", "b"])),
    "bytes array": of(lambda: np.array([b"a"])),
    "StringDType array": of(lambda: np.array(["a"], np.dtypes.StringDType())),
    "numpy str": of(lambda: np.str_("a")),
    "numpy bytes": of(lambda: np.bytes_(b"a")),
    "datetime array": of(lambda: np.array(["2024-01-01"], "datetime64[D]")),
    "datetime scalar": of(lambda: np.datetime64("2024-01-01")),
    "timedelta scalar": of(lambda: np.timedelta64(3, "s")),
    "structured array": of(lambda: np.zeros(2, [("a", "f4"), ("b", "i4")])),
    "structured scalar": of(lambda: np.zeros(2, [("a", "f4")])[0]),
    "void array": of(lambda: np.zeros(2, "V3")),
    "longdouble array": of(lambda: np.zeros(2, np.longdouble)),
    "longdouble scalar": of(lambda: np.longdouble(1)),
    "clongdouble array": of(lambda: np.zeros(2, np.clongdouble)),
    "masked array": of(lambda: np.ma.masked_array([1.0, 2.0], [True, False])),
    "masked constant": of(lambda: np.ma.masked),
    "memory map": memory_map,
    "matrix": of(lambda: np.ones(2).view(np.matrix)),
    "record array": of(lambda: np.zeros(2, [("a", "f4")]).view(np.recarray)),
    "array subclass": of(lambda: np.zeros(2).view(MyArray)),
    "float0 array": of(lambda: np.zeros(2, jax.dtypes.float0)),
    "set": of(lambda: {1, 2}),
    "frozenset": of(lambda: frozenset((1,))),
    "range": of(lambda: range(3)),
    "bytearray": of(lambda: bytearray(b"a")),
    "memoryview": of(lambda: memoryview(b"a")),
    "array.array": of(lambda: array.array("f", [1.0])),
    "deque": of(lambda: collections.deque([1])),
    "object": of(Opaque),
    "int subclass": of(lambda: MyInt(3)),
    "float subclass": of(lambda: MyFloat(3)),
    "str subclass": of(lambda: MyStr("a")),
    "Decimal": of(lambda: decimal.Decimal("0.1")),
    "datetime": of(lambda: datetime.datetime(2024, 1, 1)),
    "path": of(lambda: pathlib.PurePosixPath("a")),
    "dtype": of(lambda: np.dtype("f4")),
    "numpy generator": of(lambda: np.random.default_rng(0)),
    "module": of(lambda: np),
    "ellipsis": of(lambda: ...),
    "flag with unnamed bits": of(lambda: Loose(6)),
    "jax reference": of(lambda: jax.new_ref(jnp.zeros(3))),
    "abstract array": of(lambda: jax.ShapeDtypeStruct((3,), np.float32)),
    "abstract key": of(lambda: jax.eval_shape(lambda: jax.random.key(0))),
    "deleted array": deleted,
    "donated array": donated,
    "deleted key": of(lambda: _deleted_key()),
}


def _deleted_key() -> jax.Array:
    one = jax.random.key(3)
    one.delete()
    return one


def inside(folder: Path) -> list[Path]:
    return [entry for entry in folder.rglob("*") if entry.name != "map"]


@pytest.mark.parametrize("case", REFUSED)
def test_unsupported_leaf_is_refused_before_a_byte(case: str, tmp_path: Path) -> None:
    leaf = REFUSED[case](tmp_path)
    state = {"fine": np.zeros(3), "node": [1.0, {"bad": leaf}]}
    with pytest.raises(UnsupportedLeafError, match=r"node\.1\.bad") as raised:
        save_checkpoint(state, tmp_path / "new" / "deep" / "state.safetensors")
    assert "To mend: " in str(raised.value)
    assert inside(tmp_path) == []


@pytest.mark.parametrize("case", ["object", "set", "object array", "memory map"])
def test_refused_save_leaves_the_old_file(case: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    path = folder / "state.safetensors"
    save_checkpoint({"x": 1}, path)
    before = path.read_bytes()
    with pytest.raises(UnsupportedLeafError):
        save_checkpoint({"x": REFUSED[case](tmp_path)}, path)
    assert path.read_bytes() == before
    assert inside(folder) == [path]


@pytest.mark.parametrize("case", ["object", "set", "object array", "jax reference"])
def test_unsupported_skeleton_leaf_is_refused(case: str, tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    save_checkpoint({"node": [1.0, {"bad": 3}]}, path)
    with pytest.raises(UnsupportedLeafError, match=r"node\.1\.bad"):
        restore_into({"node": [1.0, {"bad": REFUSED[case](tmp_path)}]}, path)


def test_unsupported_leaf_can_be_left_out_and_kept(tmp_path: Path) -> None:
    path, opaque = tmp_path / "state.safetensors", Opaque()
    save_checkpoint({"x": 1, "env": Opaque()}, path, exclude="env")
    restored = restore_into({"x": 0, "env": opaque}, path, keep="env")
    assert restored["x"] == 1
    assert restored["env"] is opaque


def test_tracers_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"

    @jax.jit
    def step(w: jax.Array) -> jax.Array:
        save_checkpoint({"actor": {"w": w}}, path)
        return w

    with pytest.raises(UnsupportedLeafError, match=r"actor\.w: a tracer") as raised:
        step(jnp.ones(3))
    assert "scan.make_saver" in raised.value.hint
    assert "scan.scan_in_chunks" in raised.value.hint
    with pytest.raises(UnsupportedLeafError, match=r"actor\.w: a tracer"):
        jax.vmap(lambda w: save_checkpoint({"actor": {"w": w}}, path) and w)(
            jnp.ones(3)
        )
    assert inside(tmp_path) == []


def test_saving_and_restoring_under_a_trace_is_refused(tmp_path: Path) -> None:
    path, state = tmp_path / "state.safetensors", {"w": jnp.ones(3)}

    @jax.jit
    def save(x: jax.Array) -> jax.Array:
        save_checkpoint(state, path)
        return x

    with pytest.raises(UnsupportedLeafError, match="inside a traced function"):
        save(jnp.ones(()))
    assert inside(tmp_path) == []
    save_checkpoint(state, path)
    with pytest.raises(UnsupportedLeafError, match="inside a traced function") as no:
        jax.jit(lambda: restore_into(state, path))()
    assert "scan.make_saver" in no.value.hint
    with Run(path.parent / "run") as run:
        with pytest.raises(UnsupportedLeafError) as no:
            jax.jit(lambda x: run.step({"w": x}, step=1) and x)(jnp.ones(3))
    assert "scan.scan_in_chunks" in no.value.hint


def test_donated_arrays_hint_at_the_order_of_calls(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedLeafError) as raised:
        save_checkpoint({"w": donated(tmp_path)}, tmp_path / "state.safetensors")
    assert "save before passing the state to train" in str(raised.value)


@jax.tree_util.register_pytree_with_keys_class
class Twins:
    """A node whose children have one name."""

    def __init__(self, left: Any, right: Any) -> None:
        self.pair = (left, right)

    def tree_flatten_with_keys(self) -> Any:
        return [(jax.tree_util.GetAttrKey("x"), leaf) for leaf in self.pair], None

    @classmethod
    def tree_unflatten(cls, aux: None, children: Any) -> "Twins":
        return cls(*children)


def test_two_leaves_of_one_name_are_refused_naming_both(tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    with pytest.raises(UnsupportedLeafError) as raised:
        save_checkpoint({"node": Twins(1, 2)}, path)
    message = str(raised.value)
    assert "node.x" in message
    assert message.count("['node'].x") == 2
    assert inside(tmp_path) == []


def test_a_key_without_a_name_is_refused_naming_its_parent(tmp_path: Path) -> None:
    state = {"table": OrderedDict([(Opaque, 1), ("a", 2)])}
    with pytest.raises(UnsupportedLeafError, match="below table"):
        save_checkpoint(state, tmp_path / "state.safetensors")
    assert inside(tmp_path) == []


# --- kinds one by one ------------------------------------------------------------


def test_a_lone_leaf_is_a_state(tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    for state, skeleton in [
        (jnp.ones(3), jnp.zeros(3)),
        (3, 0),
        ("a", ""),
        (key(), key()),
    ]:
        save_checkpoint(state, path)
        assert_identical(restore_into(skeleton, path), state, skeleton)


def test_python_scalars_keep_type_and_bits(tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    state = {
        "bool": True,
        "bytes": b"\x00\xff",
        "complex": complex(-0.0, float("inf")),
        "float": 0.1,
        "int": 2**70,
        "longest": -(2**20000),
        "mode": Mode.TRAIN,
        "nan": float("nan"),
        "nan with a payload": np.uint64(0xFFF0_0000_DEAD_BEEF).view(np.float64).item(),
        "str": "CartPole-v1",
        "surrogate": "\ud800\x00",
    }
    skeleton = {
        name: type(value)() if not isinstance(value, enum.Enum) else Mode.EVAL
        for name, value in state.items()
    }
    save_checkpoint(state, path)
    restored = restore_into(skeleton, path)
    assert_identical(restored, state, skeleton)
    assert type(restored["bool"]) is bool and type(restored["int"]) is int
    assert restored["longest"] == -(2**20000)


def test_none_against_data_is_a_mismatch_both_ways(tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    bare, full = {"ema": None, "w": jnp.ones(3)}, {"ema": jnp.ones(3), "w": jnp.ones(3)}
    save_checkpoint(bare, path)
    assert_identical(restore_into(bare, path), bare, bare)
    with pytest.raises(LayoutMismatchError) as raised:
        restore_into(full, path)
    (mismatch,) = raised.value.mismatches
    assert (mismatch.name, mismatch.problem) == ("ema", "missing")
    save_checkpoint(full, path)
    with pytest.raises(LayoutMismatchError) as raised:
        restore_into(bare, path)
    (mismatch,) = raised.value.mismatches
    assert (mismatch.name, mismatch.problem) == ("ema", "extra")


def test_zero_size_arrays_and_keys_are_ordinary_leaves(tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    state = {
        "empty": jnp.zeros((0,)),
        "holes": jnp.zeros((4, 0, 2), jnp.int8),
        "host": np.zeros((0, 3), ">f8"),
        "keys": jax.random.split(jax.random.key(0), 0),
        "text": "",
    }
    skeleton = jax.tree.map(lambda leaf: leaf, state)
    save_checkpoint(state, path)
    assert_identical(restore_into(skeleton, path), state, skeleton)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_draws_continue_where_the_saved_key_stood(impl: str, tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"

    def draw(one: jax.Array) -> tuple[jax.Array, float]:
        one, sub = jax.random.split(one)
        return one, float(jax.random.uniform(sub))

    one, draws = jax.random.key(5, impl=impl), []
    for turn in range(5):
        if turn == 3:
            save_checkpoint({"key": one}, path)
        one, number = draw(one)
        draws.append(number)
    one = restore_into({"key": jax.random.key(0, impl=impl)}, path)["key"]
    again = []
    for _ in range(2):
        one, number = draw(one)
        again.append(number)
    assert again == draws[3:]
    assert len(set(draws)) == 5


def test_typed_keys_stay_typed_and_raw_keys_raw(tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"

    def build(seed: int) -> Any:
        one = jax.random.key(seed)
        batch = jax.random.split(one, 8)
        grid = batch.reshape(2, 4)
        return {"b": batch, "g": grid, "k": one, "raw": jax.random.PRNGKey(seed)}

    save_checkpoint(build(1), path)
    restored = restore_into(build(0), path)
    assert_identical(restored, build(1), build(0))
    for name, old in build(1).items():
        typed = jnp.issubdtype(restored[name].dtype, jax.dtypes.prng_key)
        assert typed == (name != "raw")
        first = (lambda k: k) if name in ("k", "raw") else (lambda k: k.ravel()[0])
        drawn = jax.random.uniform(first(restored[name]))
        assert drawn == jax.random.uniform(first(old))


def test_abstract_keys_are_understood(tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"

    def build(seed: int = 0) -> Any:
        one = jax.random.key(seed)
        return {
            "k": one,
            "ks": jax.random.split(one, 3),
            "rbg": jax.random.key(seed, impl="rbg"),
            "unsafe": jax.random.key(seed, impl="unsafe_rbg"),
        }

    skeleton = jax.eval_shape(build)
    save_checkpoint(build(4), path)
    assert_identical(restore_into(skeleton, path), build(4), skeleton)


def test_key_implementations_of_one_width_are_not_confused(tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    save_checkpoint({"k": key("rbg")}, path)
    for other in ("unsafe_rbg", "threefry2x32"):
        with pytest.raises(LayoutMismatchError) as raised:
            restore_into({"k": key(other)}, path)
        expected = f"k: expected key<{other}>[], found key<rbg>[]"
        assert expected in str(raised.value)


def test_64_bit_leaves_come_back_while_jax_is_set_to_32(tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    with jax.enable_x64(True):
        state = {
            "f": jnp.array([0.1, -0.0, jnp.nan]),
            "i": jnp.array([2**40, -1]),
            "z": jnp.array([1 + 2**-40j]),
        }
        skeleton = jax.tree.map(jnp.zeros_like, state)
    assert not jax.config.jax_enable_x64
    save_checkpoint(state, path)
    restored = restore_into(skeleton, path)
    assert_identical(restored, state, skeleton)
    assert restored["i"].dtype == np.int64
    assert np.asarray(restored["i"]).tolist() == [2**40, -1]


# --- functions -------------------------------------------------------------------


def test_functions_are_the_skeletons_and_other_names_are_noted(tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    mine = functools.partial(plus, 2)
    saved = {"act": jax.nn.relu, "f": lambda x: x, "g": plus, "p": mine}
    skeleton = {"act": jnp.tanh, "f": lambda x: x + 1, "g": plus, "p": mine}
    save_checkpoint(saved, path)
    plan = plan_restore(skeleton, path)
    restored = plan.apply()
    assert all(restored[name] is skeleton[name] for name in skeleton)
    assert [note.split(":")[0] for note in plan.notes] == ["act"]
    (note,) = plan.notes
    assert "relu" in note and "tanh" in note
    assert note in str(plan)


# --- no two share memory ---------------------------------------------------------


class Net:
    """A callable that is no pytree and holds an array."""

    def __init__(self, weight: Any) -> None:
        self.weight = weight

    def __call__(self, x: Any) -> Any:
        return self.weight * x


@pytest.mark.parametrize(
    "leaf",
    [
        Net(np.ones(3)),
        Net(jnp.ones(3)).__call__,
        functools.partial(np.add, np.ones(2)),
        functools.partial(jnp.add, y=jnp.ones(2)),
        np.random.default_rng(0).normal,
    ],
)
def test_callables_that_hold_arrays_are_no_code_and_refused(
    leaf: Any, tmp_path: Path
) -> None:
    path = tmp_path / "state.safetensors"
    with pytest.raises(UnsupportedLeafError, match="f: a callable that holds arrays"):
        save_checkpoint({"f": leaf, "n": 1}, path)
    assert not path.exists()


@pytest.mark.parametrize(
    "leaf",
    [jax.nn.relu, jax.jit(plus), jnp.float32, functools.partial(plus, 1), np.add, Net],
)
def test_callables_that_are_code_are_markers(leaf: Any, tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    save_checkpoint({"f": leaf, "n": 1}, path)
    assert restore_into({"f": leaf, "n": 0}, path) == {"f": leaf, "n": 1}


@pytest.mark.parametrize("impl", ["threefry4x32", "philox2x32", "philox4x32"])
def test_newer_key_implementations_are_known_where_jax_has_them(
    impl: str, tmp_path: Path
) -> None:
    path = tmp_path / "state.safetensors"
    try:
        key = jax.random.key(3, impl=impl)
    except ValueError:
        assert impl not in {known for known, _ in _builtin_key_impls().values()}
        return
    save_checkpoint({"key": key}, path)
    abstract = jax.eval_shape(lambda: {"key": jax.random.key(0, impl=impl)})
    restored = restore_into(abstract, path)["key"]
    assert str(jax.random.key_impl(restored)) == impl
    assert_identical({"key": restored}, {"key": key}, {"key": key})


def test_one_array_at_two_places_comes_back_apart(tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    shared, host_array = jnp.arange(300.0), np.arange(300.0)
    state = {"params": shared, "target": shared, "a": host_array, "b": host_array}
    save_checkpoint(state, path)
    restored = restore_into(state, path)
    assert_identical(restored, state, state)
    restored["params"].delete()
    assert not restored["target"].is_deleted()
    assert restored["target"].tolist() == list(range(300))
    assert not np.shares_memory(restored["a"], restored["b"])
    restored["a"][:] = -1
    assert restored["b"].tolist() == list(range(300))
    assert host_array.tolist() == list(range(300))
    assert shared.tolist() == list(range(300))


def test_donating_one_restored_leaf_leaves_the_others(tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    shared = jnp.arange(4096.0)
    state = {"params": shared, "target": shared, "other": jnp.ones(4096)}
    save_checkpoint(state, path)
    restored = restore_into(state, path)
    add = jax.jit(lambda x: x - 5, donate_argnums=0)
    moved = add(restored["params"])
    assert restored["params"].is_deleted()
    assert moved.tolist() == [x - 5 for x in range(4096)]
    assert restored["target"].tolist() == list(range(4096))
    assert restored["other"].tolist() == [1] * 4096


def test_restored_numpy_arrays_are_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    state = [np.ones(5, dtype) for dtype in ("f4", "f4", ">i8", "?", "c16")]
    save_checkpoint(state, path)
    first, second = restore_into(state, path), restore_into(state, path)
    before = path.read_bytes()
    leaves = [*first, *second]
    for leaf in leaves:
        assert leaf.flags.writeable
        owner = leaf if leaf.base is None else leaf.base
        assert type(owner) is np.ndarray and owner.flags.owndata
    for i, left in enumerate(leaves):
        assert not any(np.shares_memory(left, right) for right in leaves[i + 1 :])
        assert not any(np.shares_memory(left, old) for old in state)
    for leaf in first:
        leaf[:] = 0
    assert_same_bits(second, state)
    assert path.read_bytes() == before
    path.unlink()
    gc.collect()
    assert_same_bits(second, state)


def test_the_skeleton_is_not_changed(tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    mapping = {"w": np.zeros(3), "n": 0, "j": jnp.zeros(3), "k": key(), "l": [1, "a"]}
    state = {"w": np.ones(3), "n": 7, "j": jnp.ones(3), "k": key("threefry2x32")}
    state["l"] = [2, "b"]
    old = [(path_, leaf) for path_, leaf in paths_and_leaves(mapping)]
    values = mapping["w"].copy(), np.asarray(mapping["j"]).copy()
    save_checkpoint(state, path)
    restored = restore_into(mapping, path)
    now = paths_and_leaves(mapping)
    assert [name for name, _ in now] == [name for name, _ in old]
    assert all(a is b for (_, a), (_, b) in zip(now, old, strict=True))
    assert np.array_equal(mapping["w"], values[0])
    assert np.array_equal(mapping["j"], values[1])
    restored["w"][:] = 9
    restored["l"].append(3)
    assert np.array_equal(mapping["w"], values[0]) and len(mapping["l"]) == 2


def test_a_donated_skeleton_still_gives_its_places(tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    device = jax.devices()[1]

    def build(value: float) -> Any:
        return {
            "committed": jax.device_put(jnp.full(3, value), device),
            "k": jax.random.key(int(value)),
            "w": jnp.full(3, value),
            "weak": jax.jit(lambda: value)(),
        }

    state, skeleton, twin = build(1.0), build(0.0), build(0.0)
    save_checkpoint(state, path)
    for leaf in jax.tree.leaves(skeleton):
        leaf.delete()
    assert_identical(restore_into(skeleton, path), state, twin)
