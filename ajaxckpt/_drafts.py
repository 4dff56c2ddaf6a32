"""A layout on its way through migrations: what each leaf is, and how it comes about.

Knows specs and host values; reads nothing itself. A leaf of a draft is a stored one,
a constant, the skeleton's, or computed from other leaves; its value is made when it
is asked for, from the file's leaves that it needs and no others.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from ajaxckpt._dtypes import stored_dtype
from ajaxckpt._errors import CheckpointError, MigrationError
from ajaxckpt._layout import (
    ARRAY_KINDS,
    NUMBER_KINDS,
    TEXT_KINDS,
    Layout,
    LeafSpec,
    shown_name,
    storage_dtype,
)

Read = Callable[[Sequence[str]], Mapping[str, Any]]
Form = Literal["stored", "constant", "skeleton", "computed"]
_PYTHON_NUMBERS = (bool, int, float, complex)


class InexactError(ValueError):
    """A value cannot be what a rule wants of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftLeaf:
    """One leaf as migrations have it so far.

    Attributes:
        spec: what it is; None if it is to be what the skeleton has at its name.
        form: where its value comes from.
        stored: the file's name, of a stored leaf.
        value: the value, of a constant.
        parts: the leaves it is computed from.
        function: computes its value from the values of the parts.
        rule: the last rule that touched it; empty if none did.
        adopted: the rule that keeps it although the skeleton lacks it, if any.
    """

    spec: LeafSpec | None
    form: Form = "stored"
    stored: str = ""
    value: Any = None
    parts: tuple[DraftLeaf, ...] = ()
    function: Callable[..., Any] | None = None
    rule: str = ""
    adopted: str = ""

    @property
    def sources(self) -> tuple[str, ...]:
        """The file's leaves that its value is made of."""
        if self.form == "stored":
            return (self.stored,)
        return tuple(dict.fromkeys(n for part in self.parts for n in part.sources))


@dataclass(slots=True, kw_only=True)
class Draft:
    """A layout as migrations have it so far.

    Attributes:
        leaves: by name, in the file's order.
        dropped: the file's leaves that a rule dropped, and which.
    """

    leaves: dict[str, DraftLeaf]
    dropped: dict[str, str] = field(default_factory=dict[str, str])

    def copy(self) -> Draft:
        """Return a draft that can be changed on its own."""
        return Draft(leaves=dict(self.leaves), dropped=dict(self.dropped))


def draft_layout(layout: Layout) -> Draft:
    """Begin a draft with a file's leaves as they are."""
    leaves = {n: DraftLeaf(spec=spec, stored=n) for n, spec in layout.items()}
    return Draft(leaves=leaves)


def evaluate_leaf(leaf: DraftLeaf, name: str, spec: LeafSpec | None, read: Read) -> Any:
    """Return a draft leaf's host value.

    Args:
        leaf: the leaf.
        name: its name, for messages.
        spec: what it must be, None where only its function knows.
        read: reads the file's leaves as host values.

    Raises:
        MigrationError: its function raised, or returned something else.
    """
    if leaf.form == "stored":
        return read([leaf.stored])[leaf.stored]
    if leaf.form == "constant":
        value = deepcopy(leaf.value)  # what comes after may write into it
        return _conform_or_blame(value, leaf, name, spec)
    if leaf.form == "skeleton" or leaf.function is None:
        raise _blame(leaf, name, "its value is the skeleton's, which is not there")
    values = [evaluate_leaf(part, name, part.spec, read) for part in leaf.parts]
    try:
        value = leaf.function(*values)
    except CheckpointError:
        raise
    except InexactError as error:
        raise _blame(leaf, name, str(error)) from None
    except Exception as error:
        said = f"{type(error).__name__}: {error}".rstrip(": ")
        raise _blame(leaf, name, f"the function raised {said}") from error
    return _conform_or_blame(value, leaf, name, spec)


def _conform_or_blame(
    value: Any, leaf: DraftLeaf, name: str, spec: LeafSpec | None
) -> Any:
    try:
        return _conform(value, leaf, name, spec)
    except InexactError as error:
        raise _blame(leaf, name, str(error)) from error


def _blame(leaf: DraftLeaf, name: str, problem: str) -> MigrationError:
    return MigrationError(
        f"{leaf.rule}: {shown_name(name)}: {problem}",
        hint="mend the rule; nothing was restored and the file is as it was",
    )


def _conform(value: Any, leaf: DraftLeaf, name: str, spec: LeafSpec | None) -> Any:
    """Return a host value that is what the spec says, without changing the value."""
    if spec is None:
        return value if type(value) in (*_PYTHON_NUMBERS, str, bytes) else _host(value)
    named = spec.kind in ("enum", "function")  # their values are names
    if named or spec.kind in (*NUMBER_KINDS, *TEXT_KINDS):
        found = value.item() if _is_scalar_array(value) else value
        wanted = "str" if named else spec.kind
        if type(found).__name__ == wanted:
            return found
        raise _blame(leaf, name, f"expected {spec}, found {describe_value(value)}")
    dtype = storage_dtype(name, spec)
    number = type(value) in _PYTHON_NUMBERS and spec.payload_shape == ()
    if leaf.form == "constant" or number:
        return _fill(value, leaf, name, spec, dtype)
    array = _host(value)
    if array.dtype != dtype or array.shape != spec.payload_shape:
        found = describe_value(array if hasattr(value, "dtype") else value)
        raise _blame(leaf, name, f"expected {spec}, found {found}")
    return array


def _host(value: Any) -> np.ndarray[Any, Any]:
    """Return a value as a numpy array, of little-endian elements.

    Raises:
        InexactError: it is none, such as a typed key.
    """
    try:
        array = np.asarray(value)
    except Exception as error:
        found = f"{type(value).__module__}.{type(value).__qualname__}"
        problem = f"expected a number or an array, found a {found} ({error})"
        raise InexactError(problem) from error
    return array.astype(array.dtype.newbyteorder("<"), copy=False)


def _is_scalar_array(value: Any) -> bool:
    return _is_numpy(value) and value.ndim == 0


def _is_numpy(value: Any) -> bool:
    return isinstance(value, np.generic | np.ndarray)


def _fill(
    value: Any, leaf: DraftLeaf, name: str, spec: LeafSpec, dtype: np.dtype[Any]
) -> np.ndarray[Any, Any]:
    """Fill an array of the spec with a value that its dtype holds exactly."""
    given = _host(value)
    try:
        if stored_dtype(given.dtype) is None:  # text, objects
            raise TypeError(given.dtype)
        array = convert_values(given, dtype)
        if not equal_values(convert_values(array, given.dtype), given):
            raise ValueError("not exact")
        filled = np.broadcast_to(array, spec.payload_shape)
    except (TypeError, ValueError, OverflowError):
        shown = repr(value) if given.ndim == 0 else describe_value(given)
        raise _blame(leaf, name, f"{shown} does not fit {spec}") from None
    return np.array(filled)


def convert_values(
    array: np.ndarray[Any, Any], dtype: np.dtype[Any]
) -> np.ndarray[Any, Any]:
    """Return an array in another dtype, whatever that does to its values."""
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # complex to real
        return array.astype(dtype)


def equal_values(left: np.ndarray[Any, Any], right: np.ndarray[Any, Any]) -> bool:
    """Tell whether arrays hold equal numbers, NaN being equal to NaN."""
    if np.iscomplexobj(left) and np.iscomplexobj(right):
        parts = ((left.real, right.real), (left.imag, right.imag))
        return all(equal_values(a, b) for a, b in parts)
    same = (left == right) | ((left != left) & (right != right))
    return bool(np.all(same))


def describe_value(value: Any) -> str:
    """Spell what a host value is as specs are spelled, for messages."""
    if not _is_numpy(value):
        return type(value).__qualname__
    row = stored_dtype(value.dtype)
    dtype = str(value.dtype) if row is None else row.name
    return f"{dtype}[{','.join(map(str, value.shape))}]"


def resolve_spec(name: str, leaf: DraftLeaf, skeleton: Layout) -> LeafSpec:
    """Return what a draft leaf is to be, where its rule leaves that to the skeleton.

    Raises:
        MigrationError: the skeleton has no such leaf, or none that a rule can make.
    """
    if leaf.spec is not None:
        return leaf.spec
    spec = skeleton.get(name)
    if spec is None:
        problem = f"{leaf.rule}: makes {shown_name(name)}, which the skeleton lacks"
        hint = "correct the target; its dtype and shape are the skeleton's"
        raise MigrationError(problem, hint=hint)
    if spec.kind == "function":
        raise MigrationError(f"{leaf.rule}: {shown_name(name)} is a function's place")
    return spec


def is_array(spec: LeafSpec | None) -> bool:
    """Tell whether a leaf has axes: an array, a key, or yet to be seen."""
    return spec is None or spec.kind in ARRAY_KINDS or spec.kind == "key"
