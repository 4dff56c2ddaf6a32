"""What a leaf is, and its data on the host: where it is told what kind it is.

Knows jax; knows nothing of trees, bytes or files.
"""

# jax's own annotations are partial
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false
# pyright: reportUnknownLambdaType=false, reportPrivateImportUsage=false

from __future__ import annotations

import contextlib
import enum
import functools
import types
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from ajaxckpt._dtypes import STORED_DTYPES, stored_dtype
from ajaxckpt._errors import UnsupportedLeafError
from ajaxckpt._layout import MAX_AXES, TEXT_KINDS, Kind, LeafSpec, is_key_type
from ajaxckpt._payload import LeafData, Part, whole_leaf
from ajaxckpt._plain import plain_text
from ajaxckpt._scalars import Value, encode_scalar, encode_text

_SCALAR_KINDS: Mapping[type, Kind] = {
    bool: "bool",
    int: "int",
    float: "float",
    complex: "complex",
    str: "str",
    bytes: "bytes",
}
# those that some JAX has; an unknown one is passed over
_KEY_IMPLS = (
    *("threefry2x32", "rbg", "unsafe_rbg"),
    *("threefry4x32", "philox2x32", "philox4x32"),
)
OUTSIDE_TRACES = (
    "outside jit, vmap, grad and scan, or use what is made for the inside: "
    "ajaxckpt.scan.make_saver, and ajaxckpt.scan.scan_in_chunks"
)
_ARRAYS = (
    *(np.ndarray, np.generic, jax.Array),
    *(np.random.Generator, np.random.RandomState),
)


@cache
def _builtin_key_impls() -> Mapping[Any, tuple[str, int]]:
    """Map a key dtype to its implementation's name and words, without computing."""

    def shapes(impl: str) -> tuple[Any, Any]:
        key = jax.random.key(0, impl=impl)
        return key, jax.random.key_data(key)

    table: dict[Any, tuple[str, int]] = {}
    for impl in _KEY_IMPLS:
        with contextlib.suppress(ValueError):
            key, data = jax.eval_shape(lambda impl=impl: shapes(impl))
            table[key.dtype] = (impl, data.shape[-1])
    return table


def _key_impl(leaf: Any) -> tuple[str, int] | None:
    """Return a typed key's implementation and words; None for one we cannot name."""
    if (known := _builtin_key_impls().get(leaf.dtype)) is not None:
        return known
    if not isinstance(leaf, jax.Array):
        return None
    impl, data = jax.random.key_impl(leaf), jax.random.key_data(leaf)
    if data.ndim != leaf.ndim + 1 or not is_key_type(impl, data.shape[-1]):
        return None
    return str(impl), data.shape[-1]


def _is_typed_key(leaf: Any) -> bool:
    return bool(jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def _describe_key(name: str, leaf: Any) -> LeafSpec:
    if (found := _key_impl(leaf)) is None:
        problem = f"{name}: a key of the unnamed implementation {leaf.dtype}"
        hint = "register the implementation under a name (jax.extend.random)"
        raise UnsupportedLeafError(problem, hint=hint)
    spec = LeafSpec(
        kind="key",
        dtype="uint32",
        shape=tuple(leaf.shape),
        key_impl=found[0],
        key_words=found[1],
    )
    return _check_axes(name, spec)


def _refuse(name: str, what: str, hint: str) -> UnsupportedLeafError:
    return UnsupportedLeafError(f"{name or repr('')}: {what}", hint=hint)


_ALTERNATIVES = (
    "make it an array, a number, a string or bytes, a static field, or name it in "
    "exclude= and keep="
)


def _describe_array(name: str, leaf: Any, kind: Kind) -> LeafSpec:
    """Describe an array, or an abstract one, of a dtype the format knows."""
    if _is_typed_key(leaf):
        return _describe_key(name, leaf)
    row = stored_dtype(np.dtype(leaf.dtype))
    if row is None:
        raise _refuse(
            name, f"{kind} arrays of dtype {leaf.dtype} cannot be saved", _ALTERNATIVES
        )
    weak = kind == "jax" and bool(leaf.weak_type)
    shape = tuple(int(axis) for axis in leaf.shape)
    spec = LeafSpec(kind=kind, dtype=row.name, shape=shape, weak_type=weak)
    return _check_axes(name, spec)


def _check_axes(name: str, spec: LeafSpec) -> LeafSpec:
    if (axes := len(spec.payload_shape)) > MAX_AXES:
        raise _refuse(name, f"{axes} axes, more than {MAX_AXES}", "reshape it")
    return spec


def describe_leaf(name: str, leaf: Any) -> LeafSpec:
    """Return the spec of one leaf.

    Raises:
        UnsupportedLeafError: no kind of leaf that a checkpoint can hold.
    """
    if isinstance(leaf, Tracer):
        hint = f"call it {OUTSIDE_TRACES}"
        raise _refuse(name, "a tracer: the call stands inside a traced function", hint)
    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        return _describe_array(name, leaf, "jax")
    if type(leaf) is np.ndarray:
        return _describe_array(name, leaf, "numpy")
    if isinstance(leaf, np.generic):
        return _describe_array(name, leaf, "numpy scalar")
    if isinstance(leaf, enum.Enum):
        enum_name(name, leaf)
        return LeafSpec(kind="enum")
    if (kind := _SCALAR_KINDS.get(type(leaf))) is not None:
        length = len(encode_text(leaf)) if kind in TEXT_KINDS else 0
        return LeafSpec(kind=kind, length=length)
    if callable(leaf):
        if _hides_arrays(leaf):
            raise _refuse(name, "a callable that holds arrays", _ALTERNATIVES)
        return LeafSpec(kind="function")
    module, kind_name = type(leaf).__module__, type(leaf).__qualname__
    raise _refuse(
        name, f"a {module}.{kind_name} is no leaf that can be saved", _ALTERNATIVES
    )


def _hides_arrays(leaf: Any) -> bool:
    """Tell whether a callable is no mere code: arrays in it would be lost."""
    held: list[Any] = []
    for owner in (leaf, getattr(leaf, "__self__", None)):
        if isinstance(owner, type | types.ModuleType):
            continue
        held += [owner, *getattr(owner, "__dict__", {}).values()]
    if isinstance(leaf, functools.partial):
        held += [*leaf.args, *leaf.keywords.values()]
    return any(isinstance(item, _ARRAYS) for item in held)


def enum_name(name: str, member: enum.Enum) -> str:
    """Return what an enum member is stored as: its name, a flag's joined by ``|``."""
    if isinstance(member, enum.Flag):
        text = "|".join(str(part.name) for part in member)
    else:
        text = member.name
    if find_member(type(member), text) is not member or plain_text(text) is None:
        raise _refuse(name, f"{member!r} has no name of its own", _ALTERNATIVES)
    return text


def find_member(kind: type[enum.Enum], text: str) -> enum.Enum | None:
    """Return the member that ``enum_name`` stored; None if the class has it not."""
    if not issubclass(kind, enum.Flag):
        return kind.__members__.get(text)
    member = kind(0)
    for part in filter(None, text.split("|")):
        if part not in kind.__members__:
            return None
        member |= kind.__members__[part]
    return member


def function_name(leaf: Any) -> str:
    """Return the qualified name that stands for a callable in the file."""
    module = getattr(leaf, "__module__", None) or type(leaf).__module__
    name = getattr(leaf, "__qualname__", None) or type(leaf).__qualname__
    return plain_text(f"{module}.{name}") or type(leaf).__qualname__


def scalar_value(name: str, leaf: Any, spec: LeafSpec) -> Value:
    """Return what the header holds of a leaf without payload."""
    if spec.kind == "enum":
        return enum_name(name, leaf)
    if spec.kind == "function":
        return function_name(leaf)
    return encode_scalar(spec.kind, leaf)


def find_unsavable(leaves: Iterable[tuple[str, Any]]) -> UnsupportedLeafError | None:
    """Return why leaves have no data to save now: donated, abstract, elsewhere."""
    for name, leaf in leaves:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            hint = "save the state itself, not its jax.eval_shape"
            return _refuse(name, "an abstract leaf holds no data", hint)
        if not isinstance(leaf, jax.Array):
            continue
        if leaf.is_deleted():
            hint = "save before passing the state to train, which donates it"
            return _refuse(name, "the array was donated or deleted", hint)
        if not leaf.is_fully_addressable:
            hint = "gather it, or save it from a process that sees all its shards"
            return _refuse(name, "the array spans several processes", hint)
    return None


def _shard_parts(array: jax.Array) -> list[Part]:
    """View every shard once; going through the whole would copy and cache it."""
    parts: list[Part] = []
    for shard in array.addressable_shards:
        if shard.replica_id == 0:
            index = tuple(
                slice(*axis.indices(size)[:2])
                for axis, size in zip(shard.index, array.shape, strict=True)
            )
            parts.append(Part(index=index, data=np.asarray(shard.data)))
    return parts


def leaf_data(name: str, leaf: Any, spec: LeafSpec) -> LeafData | bytes:
    """Bring a leaf with a payload to the host: views where that is possible.

    Raises:
        UnsupportedLeafError: it was donated since the save began.
    """
    try:
        return _leaf_data(leaf, spec)
    except RuntimeError:
        if (error := find_unsavable([(name, leaf)])) is not None:
            raise error from None
        raise


def _leaf_data(leaf: Any, spec: LeafSpec) -> LeafData | bytes:
    if spec.kind in TEXT_KINDS:
        return encode_text(leaf)
    row = STORED_DTYPES[spec.dtype]
    if spec.kind == "key":
        leaf = jax.random.key_data(leaf)
    if not isinstance(leaf, jax.Array):
        return whole_leaf(np.asarray(leaf), row, frozen=spec.kind == "numpy scalar")
    # on CPU an array may share memory with numpy's, which others may write
    on_host = next(iter(leaf.sharding.device_set)).platform == "cpu"
    if on_host and len(leaf.sharding.device_set) == 1:
        return whole_leaf(np.asarray(leaf), row, frozen=False)
    shape, parts = tuple(leaf.shape), _shard_parts(leaf)
    return LeafData(row=row, shape=shape, parts=parts, frozen=not on_host)
