"""A state on its way to bytes: what is saved of it, and what is refused.

Joins ``_tree`` and ``_leaves`` for ``_writer``; writes nothing.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from ajaxckpt._errors import (
    CheckpointError,
    InvalidArgumentError,
    UnsupportedLeafError,
)
from ajaxckpt._leaves import (
    OUTSIDE_TRACES,
    describe_leaf,
    find_unsavable,
    leaf_data,
    scalar_value,
)
from ajaxckpt._paths import is_missing
from ajaxckpt._patterns import select_names
from ajaxckpt._placement import is_traced
from ajaxckpt._reader import Checkpoint
from ajaxckpt._tree import flatten_state
from ajaxckpt._writer import StateData


def refuse_traced(what: str) -> None:
    """Refuse a call under a trace, where there are no values.

    Raises:
        UnsupportedLeafError: the caller stands inside a traced function.
    """
    if is_traced():
        raise UnsupportedLeafError(
            f"{what} inside a traced function",
            hint=f"call it {OUTSIDE_TRACES}",
        )


def collect_state(state: Any, exclude: tuple[str, ...]) -> StateData:
    """Turn a state into layout and sources; refuse all that cannot be saved.

    Raises:
        UnsupportedLeafError: names the leaf.
        InvalidArgumentError: an exclude pattern is wrong or selects nothing.
    """
    if isinstance(state, StateData):  # collected in a callback of a traced function
        return _leave_out(state, exclude)
    flat = flatten_state(state)
    left_out = select_names(exclude, list(flat.leaves), argument="exclude")
    leaves = {name: x for name, x in flat.leaves.items() if name not in left_out}
    layout = {name: describe_leaf(name, leaf) for name, leaf in leaves.items()}
    if (error := find_unsavable(leaves.items())) is not None:
        raise error
    refuse_traced("the state is saved")
    return StateData(
        layout=layout,
        values={
            name: scalar_value(name, leaves[name], spec)
            for name, spec in layout.items()
            if not spec.payload_dtype
        },
        sources={
            name: partial(leaf_data, name, leaves[name], spec)
            for name, spec in layout.items()
            if spec.payload_dtype
        },
    )


def _leave_out(data: StateData, exclude: tuple[str, ...]) -> StateData:
    """Leave leaves out of a state that was collected before."""
    gone = select_names(exclude, list(data.layout), argument="exclude")
    return StateData(
        layout={n: item for n, item in data.layout.items() if n not in gone},
        values={n: item for n, item in data.values.items() if n not in gone},
        sources={n: item for n, item in data.sources.items() if n not in gone},
    )


def _holds_leaves(path: str) -> bool:
    """Tell whether what is at a path may hold a state: all but an empty one."""
    if is_missing(path):
        return False
    try:
        with Checkpoint(path) as checkpoint:
            return len(checkpoint) > 0
    except CheckpointError:
        return True


def refuse_nothing(data: StateData, excluded: tuple[str, ...], target: str) -> None:
    """Keep a state without leaves from replacing one with: a train without return.

    Raises:
        InvalidArgumentError: nothing would be saved.
    """
    if data.layout or not (excluded or _holds_leaves(target)):
        return
    why = "exclude= selects every leaf" if excluded else "the state has no leaves"
    raise InvalidArgumentError(
        f"{why}: nothing would be saved",
        hint="check what the train call returned, and what exclude= selects",
    )
