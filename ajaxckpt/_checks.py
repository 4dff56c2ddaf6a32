"""What a restore refuses beside layouts: what this JAX or this skeleton cannot hold.

Knows jax's leaves and placements; decides nothing about names.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import Any

from ajaxckpt._layout import (
    ARRAY_KINDS,
    NUMBER_KINDS,
    X64_DTYPES,
    LeafSpec,
    Mismatch,
)
from ajaxckpt._leaves import find_member
from ajaxckpt._placement import array_form
from ajaxckpt._places import can_hold, find_indivisible, is_x64


def find_lost_member(name: str, like: Any, member: Any) -> Mismatch | None:
    """Refuse an enum member that the skeleton's class no longer has."""
    if not isinstance(like, enum.Enum) or find_member(type(like), member) is not None:
        return None
    note = f"{type(like).__qualname__} has no member {member!r}"
    spec = LeafSpec(kind="enum")
    return Mismatch(name=name, problem="kind", expected=spec, found=spec, note=note)


def _find_indivisible(
    name: str, like: Any, expected: LeafSpec, found: LeafSpec
) -> Mismatch | None:
    """Refuse a shape that the skeleton's sharding cannot cut."""
    if (note := find_indivisible(like, found.shape)) is None:
        return None
    return Mismatch(
        name=name, problem="shape", expected=expected, found=found, note=note
    )


def _find_unholdable(
    name: str, like: Any, expected: LeafSpec, found: LeafSpec
) -> Mismatch | None:
    """Refuse a dtype that numpy has and this JAX has not, where JAX is to hold it."""
    arrays = found.kind in ARRAY_KINDS and array_form(like, found) == "jax"
    if not arrays or found.dtype == expected.dtype or can_hold(found.dtype):
        return None
    note = f"this JAX has no arrays of {found.dtype}"
    return Mismatch(
        name=name, problem="dtype", expected=expected, found=found, note=note
    )


def _find_wide(
    name: str, like: Any, expected: LeafSpec, found: LeafSpec
) -> Mismatch | None:
    """Refuse a 64-bit jax leaf for a number that this JAX would make a narrow one."""
    del like
    wide = found.kind == "jax" and found.dtype in X64_DTYPES
    if not (wide and expected.kind in NUMBER_KINDS) or is_x64():
        return None
    note = "x64 is off here: jax.config.update('jax_enable_x64', True)"
    return Mismatch(
        name=name, problem="dtype", expected=expected, found=found, note=note
    )


def find_unfit(
    name: str, like: Any, expected: LeafSpec, found: LeafSpec
) -> Iterator[Mismatch]:
    """Yield why a leaf whose spec fits cannot be restored all the same."""
    for check in (_find_indivisible, _find_unholdable, _find_wide):
        if (mismatch := check(name, like, expected, found)) is not None:
            yield mismatch
