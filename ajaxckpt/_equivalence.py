"""Two states leaf by leaf: which leaves differ first, how far, and what that means.

Knows states as records: specs and host values by leaf name, copied, so that neither
a donation nor a later write changes them. Runs nothing and reads no file.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from ajaxckpt._collecting import collect_state
from ajaxckpt._dtypes import STORED_DTYPES
from ajaxckpt._errors import InvalidArgumentError, error_context, render_message
from ajaxckpt._layout import (
    ARRAY_KINDS,
    NUMBER_KINDS,
    TEXT_KINDS,
    LeafSpec,
    shown_name,
)
from ajaxckpt._patterns import select_names
from ajaxckpt._payload import Array, iter_payload
from ajaxckpt._roles import find_role, most_telling
from ajaxckpt._scalars import decode_scalar, decode_text, encode_scalar
from ajaxckpt._writer import StateData

Tolerance = float | tuple[float, float]
ROUNDING = 1e-4  # what separately compiled programs may differ by, of a leaf's largest
_LONGEST_VALUE = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """One leaf of a record: its spec, and its value on the host.

    Attributes:
        spec: what the leaf is.
        value: a flat array of the elements (of a key's words), or the Python value;
            of an enum member or a function, the name.
    """

    spec: LeafSpec
    value: Any


Record = Mapping[str, Held]


def capture_state(state: Any) -> dict[str, Held]:
    """Copy a state's leaves to the host, as they are now.

    Raises:
        UnsupportedLeafError: a leaf was donated, or is of no kind that can be saved.
    """
    with error_context(None, "cannot compare"):
        data = collect_state(state, ())
        return {
            name: Held(spec=spec, value=_fetch(name, spec, data))
            for name, spec in data.layout.items()
        }


def _fetch(name: str, spec: LeafSpec, data: StateData) -> Any:
    if not spec.payload_dtype:
        return decode_scalar(spec.kind, data.values[name])
    found = data.sources[name]()
    if isinstance(found, bytes):
        return decode_text(spec.kind, found)
    pieces = [np.empty(0, np.uint8), *iter_payload(found)]
    dtype = STORED_DTYPES[spec.payload_dtype].dtype
    return np.concatenate(pieces).view(dtype or np.uint8)


# --------------------------------------------------------------- differences


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafDifference:
    """How one leaf differs between two states.

    Attributes:
        name: the leaf's name.
        problem: ``missing``, ``extra``, ``kind``, ``dtype``, ``shape``, ``weak type``,
            ``key implementation`` or ``value``.
        spec: the leaf's spec, the expected one where both have it.
        expected: the spec expected, or the first element that differs, as text.
        found: the same of what was found.
        found_kind: the kind found, where it is not the one expected.
        elements: how many elements the leaf has.
        differing: how many of them differ.
        largest: the largest absolute difference; None where there is no number.
        relative: that, relative to the leaf's largest value; None likewise.
        place: the place of the first element that differs, such as ``[3,0]``.
    """

    name: str
    problem: str
    spec: LeafSpec
    expected: str
    found: str
    found_kind: str = ""
    elements: int = 1
    differing: int = 1
    largest: float | None = None
    relative: float | None = None
    place: str = ""

    @property
    def is_rounding(self) -> bool:
        """Whether two programs that round differently could be all there is to it."""
        return self.relative is not None and self.relative <= ROUNDING

    def __str__(self) -> str:
        """Render the line that messages show."""
        role = find_role(self.name, self.spec).name
        head = f"{shown_name(self.name)} ({role})"
        found = f"expected {self.expected}, found {self.found}"
        if self.problem != "value":
            return f"{head}: {found}"
        where = f" at {self.place}" if self.place else ""
        if self.elements > 1:
            head += f": {self.differing} of {self.elements} elements differ, first"
            head += where
        apart = ""
        if self.largest is not None:
            apart = f"; apart by up to {self.largest:.3g}"
            if self.relative is not None:
                apart += f", {self.relative:.1e} of the leaf's largest value"
        return f"{head}: {found}{apart}"


def diff_records(
    expected: Record,
    found: Record,
    *,
    tolerance: Mapping[str, Tolerance] | None = None,
    skip: Iterable[str] = (),
    any_place: bool = False,
) -> list[LeafDifference]:
    """Compare two records leaf by leaf, in the order of the expected one.

    Args:
        expected: what it should be.
        found: what it is.
        tolerance: how far the float leaves of a name may be apart, by leaf name.
        skip: names of leaves to pass over.
        any_place: whether a jax array and a numpy array may be the same leaf.
    """
    passed, near = set(skip), tolerance or {}
    found_differences: list[LeafDifference] = []
    for name in dict.fromkeys([*expected, *found]):
        if name not in passed:
            difference = _diff_leaf(
                name, expected.get(name), found.get(name), near.get(name), any_place
            )
            if difference is not None:
                found_differences.append(difference)
    return found_differences


def _diff_leaf(
    name: str,
    expected: Held | None,
    found: Held | None,
    tolerance: Tolerance | None,
    any_place: bool,
) -> LeafDifference | None:
    if expected is None or found is None:
        held = expected or found
        assert held is not None
        return LeafDifference(
            name=name,
            problem="extra" if expected is None else "missing",
            spec=held.spec,
            expected="nothing" if expected is None else str(expected.spec),
            found="nothing" if found is None else str(found.spec),
        )
    if problem := _diff_specs(expected.spec, found.spec, any_place):
        return LeafDifference(
            name=name,
            problem=problem,
            spec=expected.spec,
            expected=str(expected.spec),
            found=str(found.spec),
            found_kind=found.spec.kind if problem == "kind" else "",
        )
    if expected.spec.payload_dtype and expected.spec.kind not in TEXT_KINDS:
        return _diff_elements(name, expected, found, tolerance)
    if expected.spec.kind in ("float", "complex"):
        a, b = (
            Held(spec=held.spec, value=np.array([held.value]))
            for held in (expected, found)
        )
        return _diff_elements(name, a, b, tolerance)
    return _diff_values(name, expected, found)


def _diff_specs(expected: LeafSpec, found: LeafSpec, any_place: bool) -> str:
    """Return which fact of two specs differs, empty if none does."""
    arrays = any_place and {expected.kind, found.kind} <= ARRAY_KINDS
    facts = {
        "kind": (expected.kind == found.kind or arrays, True),
        "dtype": (expected.dtype, found.dtype),
        "shape": (expected.shape, found.shape),
        "weak type": (expected.weak_type, found.weak_type),
        "key implementation": (expected.key_impl, found.key_impl),
    }
    return next((fact for fact, (a, b) in facts.items() if a != b), "")


def _diff_values(name: str, expected: Held, found: Held) -> LeafDifference | None:
    kind = expected.spec.kind
    if kind == "function":  # code is the skeleton's
        return None
    if kind in TEXT_KINDS:
        same = expected.value == found.value
    else:
        same = encode_scalar(kind, expected.value) == encode_scalar(kind, found.value)
    if same:
        return None
    largest = None
    if kind == "int" and max(abs(expected.value), abs(found.value)) < 1 << 62:
        largest = float(abs(expected.value - found.value))
    return LeafDifference(
        name=name,
        problem="value",
        spec=expected.spec,
        expected=_show(expected.value),
        found=_show(found.value),
        largest=largest,
    )


def _diff_elements(
    name: str, expected: Held, found: Held, tolerance: Tolerance | None
) -> LeafDifference | None:
    spec, words = expected.spec, expected.spec.key_words or 1
    a, b = expected.value.reshape(-1, words), found.value.reshape(-1, words)
    unequal = (_bits(a) != _bits(b)).any(axis=1)
    if not unequal.any():
        return None
    largest = relative = None
    if _is_number(spec):
        distance, size = _measure(a[:, 0], b[:, 0], spec)
        if tolerance is not None and _is_inexact(spec):
            unequal &= ~_are_near(a[:, 0], b[:, 0], distance, size, tolerance)
            if not unequal.any():
                return None
        apart = distance[unequal]
        largest = _finite(float(apart.max())) if not np.isnan(apart).all() else None
        largest = largest if not np.isnan(apart).any() else None
        if largest is not None and _is_inexact(spec) and size > 0:
            relative = largest / size
    first = int(np.flatnonzero(unequal)[0])
    index = np.unravel_index(first, spec.shape) if spec.shape else ()
    return LeafDifference(
        name=name,
        problem="value",
        spec=spec,
        expected=_show_row(a[first]),
        found=_show_row(b[first]),
        elements=math.prod(spec.shape),
        differing=int(unequal.sum()),
        largest=largest,
        relative=relative,
        place="[" + ",".join(map(str, map(int, index))) + "]" if spec.shape else "",
    )


def _is_number(spec: LeafSpec) -> bool:
    arrays = spec.kind in ARRAY_KINDS and spec.dtype != "bool"
    return arrays or spec.kind in ("float", "complex")


def _is_inexact(spec: LeafSpec) -> bool:
    return _is_number(spec) and not spec.dtype.startswith(("int", "uint"))


def _bits(rows: Array) -> Array:
    """View elements as unsigned integers, for which NaN equals itself."""
    return rows.view(np.dtype(f"u{min(rows.dtype.itemsize, 8)}"))


def _widen(array: Array, spec: LeafSpec) -> Array:
    if "complex" in (spec.dtype or spec.kind):
        return array.astype(np.complex128)
    return array.astype(np.float64)


def _measure(a: Array, b: Array, spec: LeafSpec) -> tuple[Array, float]:
    """Return how far elements are apart, and the largest finite value of both."""
    with np.errstate(all="ignore"):
        wide_a, wide_b = _widen(a, spec), _widen(b, spec)
        distance = np.abs(wide_a - wide_b)
        sizes = np.abs(np.concatenate([wide_a, wide_b]))
    finite = sizes[np.isfinite(sizes)]
    return distance, float(finite.max()) if finite.size else 0.0


def _are_near(
    a: Array, b: Array, distance: Array, size: float, tolerance: Tolerance
) -> Array:
    """Tell which elements are near enough; NaN is near NaN, infinity to itself."""
    if isinstance(tolerance, tuple):
        relative, absolute = tolerance
        with np.errstate(all="ignore"):
            limit = absolute + relative * np.abs(a.astype(np.complex128))
    else:
        limit = np.full(distance.shape, tolerance * size)
    with np.errstate(all="ignore"):
        return (distance <= limit) | ((a != a) & (b != b)) | (a == b)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _show(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # an int of very many digits
        text = "an int too long to show"
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 1] + "…"


def _show_row(row: Array) -> str:
    """Spell one element, or the words of one typed key."""
    words = list(map(str, row))
    return words[0] if len(words) == 1 else f"[{', '.join(words)}]"


# ----------------------------------------------------------------- tolerances


def resolve_tolerance(
    tolerance: Mapping[str, Any] | None, names: Sequence[str]
) -> dict[str, Tolerance]:
    """Return the tolerance of each leaf; the last pattern that selects it counts.

    Raises:
        InvalidArgumentError: a pattern is wrong or selects nothing, or a tolerance is
            no number and no pair of numbers, or negative.
    """
    resolved: dict[str, Tolerance] = {}
    for pattern, given in _checked(tolerance).items():
        for name in select_names(pattern, names, argument="tolerance"):
            resolved[name] = given
    return resolved


def _checked(tolerance: Any) -> dict[str, Tolerance]:
    if tolerance is None:
        return {}
    if not isinstance(tolerance, Mapping):
        raise InvalidArgumentError(
            f"tolerance={tolerance!r}: expected a mapping from pattern to tolerance",
            hint=f'write tolerance={{"**": {tolerance!r}}} for all leaves',
        )
    entries = cast("Mapping[str, object]", tolerance)
    return {p: _check_tolerance(p, given) for p, given in entries.items()}


def _check_tolerance(pattern: object, given: object) -> Tolerance:
    pair = isinstance(given, tuple)
    parts = cast("tuple[object, ...]", given) if pair else (given,)
    numbers = [x for x in parts if isinstance(x, int | float) and x >= 0]
    if len(numbers) != len(parts) or len(parts) != 1 + pair:
        raise InvalidArgumentError(
            f"tolerance of {pattern!r}: expected a number, relative to the leaf's "
            f"largest value, or a pair (rtol, atol), found {given!r}"
        )
    return (numbers[0], numbers[1]) if pair else numbers[0]


# --------------------------------------------------------------------- errors


class StateDifferenceError(AssertionError):
    """Two states, or two runs, are not what they should be to each other.

    Attributes:
        problem: what differs, in one line.
        differences: the leaves that differ, in the order of the expected state.
        meaning: what that usually means.
        hint: how to mend it.
    """

    def __init__(
        self,
        problem: str,
        *,
        differences: Sequence[LeafDifference] = (),
        details: Sequence[str] = (),
        meaning: str = "",
        hint: str = "",
    ) -> None:
        """Keep the parts, and render the one shape all messages share."""
        lines = [*details, *map(str, differences)]
        text = render_message(None, "", problem, lines, "")
        if meaning:
            text += f"\nUsually means: {meaning}"
        if hint:
            text += f"\nTo mend: {hint}"
        super().__init__(text)
        self.problem = problem
        self.differences = tuple(differences)
        self.meaning = meaning
        self.hint = hint


def telling_leaf(differences: Sequence[LeafDifference]) -> tuple[str, LeafSpec]:
    """Return the differing leaf that says most about why: a key before a weight."""
    specs = {item.name: item.spec for item in differences}
    name = most_telling(specs.items())
    return name, specs[name]


def count_leaves(differences: Sequence[object], leaves: int) -> str:
    """Spell how many of how many leaves differ.

    Example:
        >>> count_leaves(["x"], 3)
        '1 of 3 leaves differs'
    """
    verb = "differs" if len(differences) == 1 else "differ"
    noun = "leaf" if leaves == 1 else "leaves"
    return f"{len(differences)} of {leaves} {noun} {verb}"


_SPEC_MEANINGS = {
    "missing": "one of the two was built by another configuration",
    "extra": "one of the two was built by another configuration",
    "dtype": "one was computed at another precision, or converted",
    "shape": "one was built by another configuration, or a buffer grew",
    "weak type": "one lost or gained a weak type, as np.asarray or astype do: a jitted "
    "call would compile again",
    "key implementation": "the keys were made by two implementations",
}


def _explain_kinds(expected: str, found: str) -> str:
    """Say what it usually means that a leaf is of another kind."""
    kinds = {expected, found}
    host = {"numpy", "numpy scalar", *NUMBER_KINDS}
    if "key" in kinds:
        return (
            "one holds a typed key, the other something else, such as the words of "
            "one: jax.random.key makes the former, PRNGKey and key_data the latter"
        )
    if "jax" in kinds and kinds & host:
        return (
            "one holds it as a Python number or in numpy, the other in jax: a jitted "
            "call would compile again"
        )
    if kinds <= NUMBER_KINDS:
        return (
            "one was computed or converted to another type of Python number: a jitted "
            "call would compile again"
        )
    if kinds <= host:
        return (
            "one holds it in a numpy array, the other in a scalar: numpy's arithmetic "
            "makes scalars of arrays without axes, and int() and .item() of both"
        )
    return "one holds data of another type: they were built or read by other code"


def explain_states(differences: Sequence[LeafDifference]) -> str:
    """Say what it usually means that two states differ so."""
    name, spec = telling_leaf(differences)
    item = next(item for item in differences if item.name == name)
    role = find_role(name, spec)
    what = f"{shown_name(name)} is {role.name}: "
    if item.problem == "kind":
        return what + _explain_kinds(spec.kind, item.found_kind)
    if item.problem != "value":
        return what + _SPEC_MEANINGS[item.problem]
    if all(item.is_rounding for item in differences):
        return "two programs that round differently, and no leaf that counts"
    return f"{what}if it is not the same, {role.lost}"


def assert_same(
    a: Any, b: Any, tolerance: Mapping[str, Any] | None, ignore: Any
) -> None:
    """Compare two live states; see ``ajaxckpt.testing.assert_same_state``."""
    expected, found = capture_state(a), capture_state(b)
    names = list(dict.fromkeys([*expected, *found]))
    skip = select_names(ignore, names, argument="ignore")
    near = resolve_tolerance(tolerance, names)
    differences = diff_records(expected, found, tolerance=near, skip=skip)
    if differences:
        counted = count_leaves(differences, len(names) - len(skip))
        raise StateDifferenceError(
            f"the states differ: {counted}",
            differences=differences,
            meaning=explain_states(differences),
            hint="find where the two part; or say tolerance= or ignore= for those "
            "leaves, by pattern",
        )
