"""Hypothesis strategies for pytrees of every leaf kind and node class.

A drawn state comes with a skeleton that was built apart: the same structure, other
values, other static fields, and for each leaf one of the forms a skeleton leaf may
have: the same, on another device, numpy where the state has a jax array or the other
way round, abstract, or a plain number. ``tags`` names what the example holds, so that
a test can assert that all of it was seen.
"""

import dataclasses
import enum
import functools
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import chex
import equinox as eqx
import flax.struct
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
from flax import nnx
from flax.core import FrozenDict
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

# --- dtypes ---------------------------------------------------------------------

_NUMPY_DTYPES = [
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
    *("bool", "float16", "float32", "float64", "complex64", "complex128"),
]
_ML_DTYPES = [
    *("bfloat16", "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn"),
    *("float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    *("float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn"),
    *("int1", "int2", "int4", "uint1", "uint2", "uint4"),
]
FEW_BITS = {
    **{"float4_e2m1fn": 4, "float6_e2m3fn": 6, "float6_e3m2fn": 6, "bool": 1},
    **{f"{sign}int{bits}": bits for sign in ("", "u") for bits in (1, 2, 4)},
}
WEAK_DTYPES = ("bool", "int32", "float32", "complex64")
KEY_IMPLS = ("threefry2x32", "rbg", "unsafe_rbg")


def to_dtype(name: str) -> np.dtype:
    """Return the numpy dtype of a name, ml_dtypes' included."""
    return np.dtype(getattr(ml_dtypes, name, name))


def to_jax(array: np.ndarray, place: Any = None) -> jax.Array:
    """Put an array on a device as it is, 64-bit dtypes too."""
    with jax.enable_x64(True):
        return jax.device_put(array, place)


def _is_jax_dtype(name: str) -> bool:
    try:
        return to_jax(np.zeros(1, to_dtype(name))).dtype == to_dtype(name)
    except Exception:
        return False


HOST_DTYPES = [*_NUMPY_DTYPES, *(n for n in _ML_DTYPES if hasattr(ml_dtypes, n))]


@functools.cache
def jax_dtypes() -> tuple[str, ...]:
    """Name every dtype of which this JAX can build an array."""
    return tuple(name for name in HOST_DTYPES if _is_jax_dtype(name))


def fill_bits(seed: int, shape: tuple[int, ...], name: str) -> np.ndarray:
    """Make an array of arbitrary bits, rich in NaN payloads, infinities and -0.0."""
    rng, dtype = np.random.default_rng(seed), to_dtype(name)
    raw = rng.integers(0, 256, (*shape, dtype.itemsize), np.uint8)
    width = dtype.itemsize // 2 if dtype.kind == "c" else dtype.itemsize
    if width > 1 and dtype.kind not in "iu":
        raw = raw.reshape(*shape, dtype.itemsize // width, width)
        # the upper two bytes of every half, quarter of a NaN, infinity, zero, subnormal
        tops = [0x7C00, 0x7C01, 0xFE01, 0x7F80, 0x7FA0, 0xFFC1, 0x7FF0, 0x7FF4]
        tops += [0xFFF8, 0x8000, 0x0000, 0x0001, 0x8001]
        top = rng.choice(np.array(tops, np.uint16), raw.shape[:-1])
        special = rng.random(raw.shape[:-1]) < 0.6
        raw[..., -1] = np.where(special, top >> 8, raw[..., -1])
        raw[..., -2] = np.where(special, top & 0xFF, raw[..., -2])
        # and often nothing below them: infinities and zeros proper
        clean = special & (rng.random(raw.shape[:-1]) < 0.5)
        raw[..., : width - 2] = np.where(clean[..., None], 0, raw[..., : width - 2])
        raw = raw.reshape(*shape, dtype.itemsize)
    if name in FEW_BITS:
        raw &= (1 << FEW_BITS[name]) - 1
    return raw.reshape(-1).view(dtype).reshape(shape)


@functools.cache
def _weakener(shape: tuple[int, ...], name: str, place: Any) -> Any:
    struct = jax.ShapeDtypeStruct(shape, to_dtype(name), weak_type=True, sharding=place)
    return jax.jit(lambda x: x).lower(struct).compile()


def to_weak(array: np.ndarray, place: Any = None) -> jax.Array:
    """Make a weakly typed array of these bits, of any shape, of bool too."""
    weak = _weakener(array.shape, array.dtype.name, place)(to_jax(array, place))
    assert weak.weak_type
    return weak


# --- leaves ---------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Pair:
    """A state, the skeleton that is to receive it, and what both hold."""

    state: Any
    skeleton: Any
    tags: frozenset[str] = frozenset()


class Mode(enum.Enum):
    TRAIN = 1
    EVAL = "eval"
    ÜBER = (1, 2)


class Level(enum.IntEnum):
    LOW = -1
    HIGH = 2**40


class Name(enum.StrEnum):
    ACTOR = "actor"
    EMPTY = ""


class Ability(enum.Flag):
    RUN = 1
    JUMP = 2
    BOTH = 3
    FLY = 8


def plus(x: Any, y: Any) -> Any:
    return x + y


@jax.custom_jvp
def bent(x: Any) -> Any:
    return x


FUNCTIONS = (
    plus,
    lambda x: x,
    functools.partial(plus, 1),
    bent,
    jax.nn.relu,
    jnp.tanh,
    len,
    Mode,
    np.float32,
)
_SHAPES = ((), (), (1,), (3,), (0,), (2, 2), (4,), (2, 0, 3), (2, 1, 2))
_FORMS = ("same",) * 4 + ("abstract", "swapped", "number", "placed", "placed")


@functools.cache
def places() -> Mapping[str, Any]:
    """Return shardings to commit to: other devices, two at once, host memory."""
    devices = jax.devices()
    pair = Mesh(np.array(devices[2:4]), ("x",))
    return {
        "committed": SingleDeviceSharding(devices[0]),
        "other device": SingleDeviceSharding(devices[1]),
        "replicated": NamedSharding(pair, PartitionSpec()),
        "sharded": NamedSharding(pair, PartitionSpec("x")),
        "pinned": SingleDeviceSharding(devices[0], memory_kind="pinned_host"),
    }


def _tags_of_shape(shape: tuple[int, ...]) -> set[str]:
    if shape == ():
        return {"0-d array"}
    return {"zero-size array"} if 0 in shape else set()


def _place_fits(name: str, shape: tuple[int, ...]) -> bool:
    return name != "sharded" or (shape != () and shape[0] % 2 == 0)


def _draw_skeleton_array(
    draw: Any, state: Any, build: Callable[[Any], Any], *, numbers: bool
) -> tuple[Any, set[str]]:
    """Draw the form in which a skeleton holds the place of an array."""
    form, shape = draw(st.sampled_from(_FORMS)), tuple(state.shape)
    is_key = isinstance(state, jax.Array) and jnp.issubdtype(
        state.dtype, jax.dtypes.prng_key
    )
    if form == "abstract":
        weak = getattr(state, "weak_type", False) if draw(st.booleans()) else False
        name = draw(st.sampled_from(("", "", *places())))
        sharding = places()[name] if name and _place_fits(name, shape) else None
        dtype = state.dtype.newbyteorder("=") if not is_key else state.dtype
        usable = is_key or dtype.name in jax_dtypes()
        if usable and isinstance(state, jax.Array):
            abstract = jax.ShapeDtypeStruct(
                shape, dtype, weak_type=weak, sharding=sharding
            )
            return abstract, {"abstract skeleton"}
    if form == "swapped" and not is_key:
        zeros = np.zeros(shape, state.dtype.newbyteorder("="))
        if isinstance(state, jax.Array):
            return zeros, {"numpy skeleton of a jax array"}
        if zeros.dtype.name in jax_dtypes():
            return to_jax(zeros), {"jax skeleton of a numpy array"}
    # without x64, a number is no skeleton for a wide jax leaf
    wide = isinstance(state, jax.Array) and not is_key and is_wide(state.dtype)
    if form == "number" and numbers and shape == () and not wide:
        number = draw(st.sampled_from((0, 0.0, False, 7, -1.5)))
        return number, {"number skeleton"}
    if form == "placed" and isinstance(state, jax.Array):
        name = draw(st.sampled_from(tuple(places())))
        if _place_fits(name, shape):
            return build(places()[name]), {f"skeleton {name}"}
    return build(None), set()


def is_wide(dtype: Any) -> bool:
    return np.dtype(dtype).name in {"int64", "uint64", "float64", "complex128"}


def _jax_leaf(name: str) -> st.SearchStrategy[Pair]:
    @st.composite
    def leaf(draw: Any) -> Pair:
        shape = draw(st.sampled_from(_SHAPES))
        bits = fill_bits(draw(st.integers(0, 2**32 - 1)), shape, name)
        other = draw(st.sampled_from((None, None, None, *places())))
        place = places()[other] if other and _place_fits(other, shape) else None
        state = to_jax(bits, place)
        zeros = np.zeros(shape, bits.dtype)
        like, tags = _draw_skeleton_array(
            draw, state, lambda place: to_jax(zeros, place), numbers=True
        )
        return Pair(state, like, frozenset(tags | _tags_of_shape(shape)))

    return leaf()


def _weak_leaf(name: str, shapes: tuple[tuple[int, ...], ...]) -> Any:
    @st.composite
    def leaf(draw: Any) -> Pair:
        shape = draw(st.sampled_from(shapes))
        bits = fill_bits(draw(st.integers(0, 2**32 - 1)), shape, name)
        state = to_weak(bits)
        # a skeleton may promise another dtype where it is weak, or none at all
        promised = draw(st.sampled_from(WEAK_DTYPES))
        zeros = np.zeros(shape, promised)
        strong = draw(st.booleans())

        def build(place: Any) -> Any:
            if strong:
                return to_jax(np.zeros(shape, name), place)
            return to_weak(zeros, place)

        like, tags = _draw_skeleton_array(draw, state, build, numbers=True)
        return Pair(state, like, frozenset(tags | _tags_of_shape(shape)))

    return leaf()


def _lay_out(array: np.ndarray, how: str) -> np.ndarray:
    """Give an array of the same values another memory layout."""
    if how == "Fortran":
        return np.asfortranarray(array)
    if how == "strided":
        wide = np.zeros((*array.shape, 3), array.dtype)
        wide[..., 1] = array
        return wide[..., 1]
    if how == "reversed":
        return np.ascontiguousarray(array[::-1])[::-1] if array.ndim else array
    if how == "big-endian":
        return array.byteswap().view(array.dtype.newbyteorder(">"))
    if how == "read-only":
        array.setflags(write=False)
    return array


def _numpy_leaf(how: str, names: list[str]) -> st.SearchStrategy[Pair]:
    @st.composite
    def leaf(draw: Any) -> Pair:
        shape = draw(st.sampled_from(_SHAPES))
        name = draw(st.sampled_from(names))
        bits = fill_bits(draw(st.integers(0, 2**32 - 1)), shape, name)
        state = _lay_out(bits, how)
        zeros = _lay_out(np.zeros(shape, to_dtype(name)), how)
        like, tags = _draw_skeleton_array(
            draw, state, lambda place: zeros, numbers=True
        )
        return Pair(state, like, frozenset(tags | _tags_of_shape(shape)))

    return leaf()


def _numpy_scalar_leaf(names: list[str]) -> st.SearchStrategy[Pair]:
    @st.composite
    def leaf(draw: Any) -> Pair:
        name = draw(st.sampled_from(names))
        state = fill_bits(draw(st.integers(0, 2**32 - 1)), (), name)[()]
        zero = np.zeros((), to_dtype(name))[()]
        like, tags = _draw_skeleton_array(draw, state, lambda place: zero, numbers=True)
        return Pair(state, like, frozenset(tags))

    return leaf()


def _key_leaf(impl: str) -> st.SearchStrategy[Pair]:
    @st.composite
    def leaf(draw: Any) -> Pair:
        shape = draw(st.sampled_from(((), (), (3,), (0,), (2, 2))))
        words = 2 if impl == "threefry2x32" else 4
        seed = draw(st.integers(0, 2**32 - 1))
        bits = to_jax(fill_bits(seed, (*shape, words), "uint32"))
        zeros = to_jax(np.zeros((*shape, words), np.uint32))

        def build(place: Any) -> Any:
            key = jax.random.wrap_key_data(zeros, impl=impl)
            return key if place is None else jax.device_put(key, place)

        state = jax.random.wrap_key_data(bits, impl=impl)
        like, tags = _draw_skeleton_array(draw, state, build, numbers=False)
        return Pair(state, like, frozenset(tags))

    return leaf()


def _raw_key_leaf() -> st.SearchStrategy[Pair]:
    seeds = st.integers(0, 2**31 - 1)
    return seeds.map(lambda s: Pair(jax.random.PRNGKey(s), jax.random.PRNGKey(0)))


@st.composite
def _number_leaf(draw: Any, values: Any, zero: Any) -> Pair:
    """A Python number; its skeleton may be another number, weak or of its dtype."""
    dtypes = {"bool": "bool", "int": "int32", "float": "float32"}
    dtype = dtypes.get(type(zero).__name__, "complex64")
    zeros = np.zeros((), dtype)
    wide = {"int32": "int64", "float32": "float64", "complex64": "complex128"}
    likes = {
        "number": lambda: zero,
        "other number": lambda: 1,
        "weak array": lambda: to_weak(zeros),
        "array of its default dtype": lambda: to_jax(zeros),
        "numpy scalar": lambda: np.zeros((), wide.get(dtype, dtype))[()],
        "abstract": lambda: jax.ShapeDtypeStruct((), dtype, weak_type=True),
    }
    form = draw(st.sampled_from(("number", "number", *likes)))
    tags = frozenset() if form == "number" else frozenset({f"{form} for a number"})
    return Pair(draw(values), likes[form](), tags)


_TEXTS = st.one_of(
    st.sampled_from(["", "0", "\0", "\ud800", "\udfff!", "é", "\U0001f600", "a\nb"]),
    st.text(st.characters(exclude_categories=()), max_size=6),
)


def _of(values: Any, zero: Any) -> st.SearchStrategy[Pair]:
    return st.builds(Pair, values, st.just(zero))


def _nan_payloads() -> st.SearchStrategy[float]:
    return st.integers(0, 2**64 - 1).map(lambda n: np.uint64(n).view(np.float64).item())


_FLOATS = st.one_of(
    st.sampled_from([0.0, -0.0, float("inf"), -float("inf"), 5e-324]),
    st.integers(1, 2**52 - 1).map(
        lambda n: np.uint64(n | 0xFFF << 52).view(np.float64).item()
    ),
    _nan_payloads(),
)
_INTS = st.one_of(
    st.integers(-(2**70), 2**70),
    st.sampled_from([2**20000, -(2**20000) + 1, 2**63, -(2**63) - 1, 0]),
)


@functools.cache
def leaf_kinds() -> Mapping[str, st.SearchStrategy[Pair]]:
    """Return a strategy per kind of leaf, by name."""
    host = [name for name in HOST_DTYPES if name in _NUMPY_DTYPES]
    young = [name for name in HOST_DTYPES if name not in _NUMPY_DTYPES]
    layouts = ("plain", "Fortran", "strided", "reversed", "big-endian", "read-only")
    complexes = st.builds(complex, _FLOATS, _FLOATS)
    return {
        **{f"jax {name}": _jax_leaf(name) for name in jax_dtypes()},
        **{f"weak {name}": _weak_leaf(name, ((),)) for name in WEAK_DTYPES},
        **{
            f"weak {name} with shape": _weak_leaf(name, ((2,), (0,)))
            for name in WEAK_DTYPES
        },
        **{f"numpy {how}": _numpy_leaf(how, host) for how in layouts},
        "numpy ml_dtypes": _numpy_leaf("plain", young),
        "numpy ml_dtypes strided": _numpy_leaf("strided", young),
        "numpy scalar": _numpy_scalar_leaf(host),
        "numpy scalar ml_dtypes": _numpy_scalar_leaf(young),
        **{f"key {impl}": _key_leaf(impl) for impl in KEY_IMPLS},
        "raw key": _raw_key_leaf(),
        "Python bool": _number_leaf(st.booleans(), False),
        "Python int": _number_leaf(_INTS, 0),
        "Python float": _number_leaf(_FLOATS, 0.0),
        "Python complex": _number_leaf(complexes, 0j),
        "str": _of(_TEXTS, "skeleton"),
        "bytes": _of(st.binary(max_size=6), b"skeleton"),
        "Enum": _of(st.sampled_from(Mode), Mode.EVAL),
        "IntEnum": _of(st.sampled_from(Level), Level.LOW),
        "StrEnum": _of(st.sampled_from(Name), Name.ACTOR),
        "Flag": _of(st.integers(0, 11).map(_to_ability), Ability.RUN),
        "function": st.builds(
            Pair, st.sampled_from(FUNCTIONS), st.sampled_from(FUNCTIONS)
        ),
    }


def _to_ability(bits: int) -> Ability:
    return Ability(bits & 11)


# --- nodes ----------------------------------------------------------------------


class Point(NamedTuple):
    x: Any
    y: Any


class Nothing(NamedTuple):
    pass


@flax.struct.dataclass
class FlaxNode:
    w: Any
    b: Any
    static: str = flax.struct.field(pytree_node=False, default="")


@chex.dataclass
class ChexNode:
    mean: Any
    var: Any


class EqxNode(eqx.Module):
    weight: Any
    bias: Any
    static: str = eqx.field(static=True)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["x", "y"], meta_fields=["static"]
)
@dataclasses.dataclass
class PlainNode:
    x: Any
    y: Any
    static: str


@jax.tree_util.register_pytree_node_class
class KeylessNode:
    """A hand-registered node: jax knows its children by their position alone."""

    def __init__(self, children: Any, static: str) -> None:
        self.children, self.static = tuple(children), static

    def tree_flatten(self) -> Any:
        return self.children, self.static

    @classmethod
    def tree_unflatten(cls, static: str, children: Any) -> "KeylessNode":
        return cls(children, static)


@jax.tree_util.register_pytree_with_keys_class
class KeyedNode:
    """A hand-registered node that names its children itself."""

    def __init__(self, children: Any, static: str) -> None:
        self.children, self.static = tuple(children), static

    def tree_flatten_with_keys(self) -> Any:
        keys = [jax.tree_util.GetAttrKey(f"child{i}") for i in range(9)]
        return list(zip(keys, self.children, strict=False)), self.static

    @classmethod
    def tree_unflatten(cls, static: str, children: Any) -> "KeyedNode":
        return cls(children, static)


_STR_KEYS = st.one_of(
    st.sampled_from(["w", "0", "-3", "", "a.b", "*", "**", '"', "\\", "__metadata__"]),
    st.sampled_from(["mlp/~/linear_0", "\0", "\ud800", "\u2028", "<none>", "{x}", "?"]),
    _TEXTS,
)
_SORTABLE_KEYS = {
    "str": _STR_KEYS,
    "int": st.integers(-(2**70), 2**70),
    "bool": st.booleans(),
    "float": st.floats(allow_nan=False),
    "bytes": st.binary(max_size=3),
    "tuple": st.tuples(st.integers(-2, 2), _STR_KEYS),
    "IntEnum": st.sampled_from(Level),
    "StrEnum": st.sampled_from(Name),
    "numpy int": st.integers(-9, 9).map(np.int16),
}


def _jax_takes(key: Any) -> bool:
    """Tell whether this JAX flattens a dict of such a key: not None before 0.10.1."""
    try:
        jax.tree_util.tree_flatten_with_path(OrderedDict({key: 0}))
    except TypeError:
        return False
    return True


_ANY_KEYS = {
    **_SORTABLE_KEYS,
    **({"none": st.none()} if _jax_takes(None) else {}),
    "Enum": st.sampled_from(Mode),
    "complex": st.complex_numbers(allow_nan=False, max_magnitude=9),
    "frozenset": st.frozensets(st.integers(0, 5), max_size=3),
}


def _draw_keys(draw: Any, families: Any, count: int, *, mixed: bool) -> list[Any]:
    family = draw(st.sampled_from(tuple(families)))
    keys = st.one_of(*families.values()) if mixed else families[family]
    most = {"bool": 2, "IntEnum": 2, "StrEnum": 2}.get(family, count)
    size = count if mixed else min(most, count)
    return draw(st.lists(keys, min_size=size, max_size=size, unique=True))


_Make = Callable[[list[Any], str], Any]


@dataclasses.dataclass(frozen=True)
class _Node:
    """A node class: how many children it takes, and what builds it from them."""

    least: int
    most: int
    make: Callable[[Any, int], _Make]


def _mapping(kind: Callable[[Any], Any], *, mixed: bool = False) -> _Node:
    def make(draw: Any, count: int) -> _Make:
        families = _ANY_KEYS if mixed else _SORTABLE_KEYS
        keys = _draw_keys(draw, families, count, mixed=mixed)
        rest = len(keys)

        def build(children: list[Any], side: str) -> Any:
            # what found no key of its own goes below the last
            if rest and len(children) > rest:
                children = [*children[: rest - 1], tuple(children[rest - 1 :])]
            return kind(dict(zip(keys, children, strict=True)))

        return build

    return _Node(1, 4, make)


def _fixed(least: int, most: int, build: _Make) -> _Node:
    return _Node(least, most, lambda draw, count: build)


def _default_dict(items: Any) -> Any:
    return defaultdict(list, items)


NODES: Mapping[str, _Node] = {
    "dict": _mapping(dict),
    "OrderedDict": _mapping(OrderedDict, mixed=True),
    "defaultdict": _mapping(_default_dict),
    "list": _fixed(1, 4, lambda c, side: list(c)),
    "tuple": _fixed(1, 4, lambda c, side: tuple(c)),
    "NamedTuple": _fixed(2, 2, lambda c, side: Point(*c)),
    "None": _fixed(0, 0, lambda c, side: None),
    "empty dict": _fixed(0, 0, lambda c, side: {}),
    "empty list": _fixed(0, 0, lambda c, side: []),
    "empty tuple": _fixed(0, 0, lambda c, side: ()),
    "empty NamedTuple": _fixed(0, 0, lambda c, side: Nothing()),
    "flax.struct": _fixed(2, 2, lambda c, side: FlaxNode(*c, static=side)),
    "chex.dataclass": _fixed(2, 2, lambda c, side: ChexNode(mean=c[0], var=c[1])),
    "FrozenDict": _fixed(
        1, 3, lambda c, side: FrozenDict({f"k{i}": (x,) for i, x in enumerate(c)})
    ),
    "equinox Module": _fixed(2, 2, lambda c, side: EqxNode(*c, static=side)),
    "register_dataclass": _fixed(2, 2, lambda c, side: PlainNode(*c, static=side)),
    "hand-registered without keys": _fixed(1, 3, KeylessNode),
    "hand-registered with keys": _fixed(1, 3, KeyedNode),
    "optax EmptyState": _fixed(0, 0, lambda c, side: optax.EmptyState()),
    "optax MaskedNode": _fixed(0, 0, lambda c, side: optax.MaskedNode()),
    "optax state": _fixed(3, 3, lambda c, side: optax.ScaleByAdamState(*c)),
    "nnx.State": _fixed(
        1, 3, lambda c, side: nnx.State({f"v{i}": (x,) for i, x in enumerate(c)})
    ),
}


def _some_of(names: Mapping[str, Any], least: int, most: int) -> Any:
    choices = st.sampled_from(tuple(names))
    return st.lists(choices, min_size=least, max_size=most, unique=True)


@st.composite
def pairs(
    draw: Any, *, some_kinds: Sequence[str] = (), some_nodes: Sequence[str] = ()
) -> Pair:
    """Draw a state and a skeleton built apart from it.

    Args:
        draw: Hypothesis's.
        some_kinds: kinds of leaves that every example is to hold.
        some_nodes: node classes that every example is to hold.
    """
    kinds = draw(st.permutations((*some_kinds, *draw(_some_of(leaf_kinds(), 1, 6)))))
    pool = [draw(leaf_kinds()[kind]) for kind in kinds]
    tags = set(kinds).union(*(pair.tags for pair in pool))
    nodes = draw(st.permutations((*some_nodes, *draw(_some_of(NODES, 1, 5)))))
    for name in (*nodes, "tuple"):
        node = NODES[name]
        count = draw(st.integers(node.least, node.most))
        if name == "tuple" and len(pool) > 1:
            count = min(max(count, 2), len(pool))
        taken, pool = pool[:count], pool[count:]
        taken += [Pair(None, None)] * (node.least - len(taken))
        make = node.make(draw, len(taken))
        pool.append(
            Pair(
                make([pair.state for pair in taken], "saved"),
                make([pair.skeleton for pair in taken], "skeleton"),
            )
        )
        tags.add(name)
    if len(pool) == 1:
        return Pair(pool[0].state, pool[0].skeleton, frozenset(tags))
    state = {str(i): pair.state for i, pair in enumerate(pool)}
    skeleton = {str(i): pair.skeleton for i, pair in enumerate(pool)}
    return Pair(state, skeleton, frozenset(tags))
