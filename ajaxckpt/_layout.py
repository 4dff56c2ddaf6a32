"""What a state looks like without its data, and how two layouts differ.

A layout is the ordered map from leaf name to leaf spec: all that save and restore
share. Knows dtype names; knows nothing of pytrees, bytes or files.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ajaxckpt._dtypes import STORED_DTYPES
from ajaxckpt._errors import InvalidArgumentError

Kind = Literal[
    "jax",
    "numpy",
    "numpy scalar",
    "key",
    "bool",
    "int",
    "float",
    "complex",
    "str",
    "bytes",
    "enum",
    "function",
]
Problem = Literal["missing", "extra", "kind", "dtype", "shape", "key implementation"]

ARRAY_KINDS = frozenset(("jax", "numpy", "numpy scalar"))
NUMBER_KINDS = frozenset(("bool", "int", "float", "complex"))
MAX_AXES = 64  # numpy's limit
MAX_KEY_WORDS = 1024
_KEY_IMPL = re.compile("[!-~]{1,64}")
TEXT_KINDS = frozenset(("str", "bytes"))
# what a Python number becomes when it meets the library without further words
_DEFAULT_DTYPES = {
    "bool": {"jax": ("bool",), "numpy": ("bool",)},
    "int": {"jax": ("int32", "int64"), "numpy": ("int64",)},
    "float": {"jax": ("float32", "float64"), "numpy": ("float64",)},
    "complex": {"jax": ("complex64", "complex128"), "numpy": ("complex128",)},
}
X64_DTYPES = frozenset(("int64", "uint64", "float64", "complex128"))


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafSpec:
    """What one leaf is, without its data.

    Attributes:
        kind: array (``jax``, ``numpy``, ``numpy scalar``), typed PRNG ``key``,
            Python scalar, ``str``, ``bytes``, ``enum`` member or ``function``.
        dtype: the dtype's name; of arrays, and ``uint32`` for a key's data.
        shape: the array's shape; of a key array, its batch shape.
        weak_type: whether a jax array is weakly typed.
        key_impl: the name of a typed key's implementation.
        key_words: the uint32 words of one typed key.
        length: the encoded bytes of a ``str`` or ``bytes`` leaf.
    """

    kind: Kind
    dtype: str = ""
    shape: tuple[int, ...] = ()
    weak_type: bool = False
    key_impl: str = ""
    key_words: int = 0
    length: int = 0

    def __str__(self) -> str:
        """Spell the spec as errors and tables show it, such as float32[8,4]."""
        axes = "[" + ",".join(map(str, self.shape)) + "]"
        weak = "~" if self.weak_type else ""
        if self.kind == "jax":
            return f"{weak}{self.dtype}{axes}"
        if self.kind == "numpy":
            return f"numpy {self.dtype}{axes}"
        if self.kind == "numpy scalar":
            return f"numpy {self.dtype} scalar"
        if self.kind == "key":
            return f"key<{self.key_impl}>{axes}"
        if self.kind == "function":
            return "function"
        return f"Python {self.kind}" if self.kind != "enum" else "enum member"

    @property
    def payload_shape(self) -> tuple[int, ...]:
        """The shape of the elements the payload holds, a key's words included."""
        if self.kind in TEXT_KINDS:
            return (self.length,)
        return (*self.shape, self.key_words) if self.kind == "key" else self.shape

    @property
    def payload_dtype(self) -> str:
        """The dtype of the payload's elements; empty where there is no payload."""
        return "uint8" if self.kind in TEXT_KINDS else self.dtype

    @property
    def nbytes(self) -> int:
        """The payload bytes of the leaf; 0 where the header holds its value."""
        if not self.payload_dtype:
            return 0
        itemsize = STORED_DTYPES[self.payload_dtype].itemsize
        return math.prod(self.payload_shape) * itemsize


Layout = Mapping[str, LeafSpec]


def is_key_type(impl: object, words: int) -> bool:
    """Tell whether a typed key of this implementation and size can be saved."""
    named = type(impl) is str and _KEY_IMPL.fullmatch(impl) is not None
    return named and 0 < words <= MAX_KEY_WORDS


def is_array(spec: LeafSpec) -> bool:
    """Tell whether a leaf is an array, of keys or of numbers."""
    return spec.kind == "key" or spec.kind in ARRAY_KINDS


def shown_name(name: str) -> str:
    """Spell a leaf name for people: the name of a state that is one leaf is empty."""
    return name or '""'


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """One leaf on which a file and a skeleton do not agree.

    Attributes:
        name: the leaf's name.
        problem: which fact differs.
        expected: the skeleton's spec, None if it has no such leaf.
        found: the file's spec, None if it has no such leaf.
        note: what else is known, such as that it was left out on purpose.
    """

    name: str
    problem: Problem
    expected: LeafSpec | None
    found: LeafSpec | None
    note: str = ""

    def __str__(self) -> str:
        """Render the line that errors and tables show."""
        expected = "nothing" if self.expected is None else str(self.expected)
        found = "nothing" if self.found is None else str(self.found)
        note = f" ({self.note})" if self.note else ""
        return f"{shown_name(self.name)}: expected {expected}, found {found}{note}"


def storage_dtype(name: str, spec: LeafSpec) -> np.dtype[Any]:
    """Return the numpy dtype of a leaf's elements.

    Raises:
        InvalidArgumentError: the installed ml_dtypes has no such dtype.
    """
    dtype = STORED_DTYPES[spec.payload_dtype].dtype
    if dtype is None:
        problem = f"{shown_name(name)}: this ml_dtypes has no dtype {spec.dtype}"
        raise InvalidArgumentError(problem, hint="pip install --upgrade ml_dtypes")
    return dtype


def _is_default(spec: LeafSpec, number: LeafSpec) -> bool:
    library = "jax" if spec.kind == "jax" else "numpy"
    return spec.dtype in _DEFAULT_DTYPES[number.kind][library]


def _find_number_problem(expected: LeafSpec, found: LeafSpec) -> Problem | None:
    """Compare where a Python number stands on at least one side."""
    if found.kind not in NUMBER_KINDS:
        if found.kind not in ARRAY_KINDS:
            return "kind"
        return None if found.shape == () else "shape"
    if expected.kind in NUMBER_KINDS:
        return None
    if expected.kind in ARRAY_KINDS and expected.shape == ():
        fits = expected.weak_type or _is_default(expected, found)
        return None if fits else "kind"
    return "kind"


def _same_dtype(expected: LeafSpec, found: LeafSpec) -> bool:
    """Tell whether the dtypes agree; a weak type promises none but its width."""
    if expected.dtype == found.dtype:
        return True
    narrower = found.dtype in X64_DTYPES and expected.dtype not in X64_DTYPES
    return expected.weak_type and not narrower


def find_problem(
    expected: LeafSpec, found: LeafSpec, *, resizable: bool = False
) -> Problem | None:
    """Return why a file's leaf does not fit a skeleton's, or None if it does.

    Value facts are the file's and must agree with what the skeleton promises: a
    Python number and a weak-typed array promise their shape, not their dtype.
    Placement (jax or numpy, device) is the skeleton's and never compared.
    """
    if expected.kind in NUMBER_KINDS or found.kind in NUMBER_KINDS:
        return _find_number_problem(expected, found)
    arrays = expected.kind in ARRAY_KINDS and found.kind in ARRAY_KINDS
    if not arrays and expected.kind != found.kind:
        return "kind"
    if expected.key_impl != found.key_impl or expected.key_words != found.key_words:
        return "key implementation"
    if arrays and not _same_dtype(expected, found):
        return "dtype"
    return None if resizable or expected.shape == found.shape else "shape"


def extra_leading_axis(mismatches: Sequence[Mismatch]) -> int:
    """Return the leading axis that every mismatch has too many or too few.

    Returns:
        n if the file's leaves all have one more axis of size n, -n if the
        skeleton's do, 0 if neither holds.
    """
    axes: set[int] = set()
    for item in mismatches:
        if item.problem != "shape" or item.expected is None or item.found is None:
            return 0
        expected, found = item.expected.shape, item.found.shape
        if found[1:] == expected and len(found) == len(expected) + 1:
            axes.add(found[0])
        elif expected[1:] == found and len(expected) == len(found) + 1:
            axes.add(-expected[0])
        else:
            return 0
    return axes.pop() if len(axes) == 1 else 0
