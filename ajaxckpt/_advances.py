"""What a user's ``advance`` answers, and where a run is cut: plain values.

Knows the forms of an answer and of logs; runs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from ajaxckpt._errors import InvalidArgumentError

Split = int | Sequence[int | Sequence[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Advanced:
    """What a call of ``advance`` came to, where the state alone does not say it.

    Attributes:
        state: the state to go on from.
        steps: how far the call went, if not as far as it was asked: agents that
            gather whole rollouts round up.
        logs: what was logged on the way, one mapping per row, or one mapping of
            arrays whose leading axis is the rows.

    Example:
        >>> Advanced(state={"step": 8}, steps=8).steps
        8
    """

    state: Any
    steps: int | None = None
    logs: Any = None


def read_answer(answer: Any, *, state_is_pair: bool) -> Advanced:
    """Read an answer: a state, a state and its logs, or an ``Advanced``."""
    if isinstance(answer, Advanced):
        return answer
    if type(answer) is tuple and not state_is_pair:
        parts = cast("tuple[Any, ...]", answer)
        if len(parts) == 2:
            return Advanced(state=parts[0], logs=parts[1])
    return Advanced(state=answer)


def is_pair(state: Any) -> bool:
    """Tell whether a state is a plain pair itself, which is no state with logs."""
    return type(state) is tuple and len(cast("tuple[Any, ...]", state)) == 2


def read_rows(logs: Any) -> list[dict[str, Any]]:
    """Turn what was logged into rows of host arrays, in order.

    Raises:
        InvalidArgumentError: the logs have no form that can be compared.
    """
    if logs is None:
        return []
    if isinstance(logs, Mapping):
        return _read_columns(_as_row(cast("Mapping[str, Any]", logs)))
    if not isinstance(logs, Sequence) or isinstance(logs, str | bytes):
        raise _unreadable(logs)
    return [_read_row(row) for row in cast("Sequence[Any]", logs)]


def _read_row(row: Any) -> dict[str, Any]:
    if isinstance(row, Mapping):
        return _as_row(cast("Mapping[str, Any]", row))
    if isinstance(row, Sequence) and not isinstance(row, str):
        parts = cast("Sequence[Any]", row)
        if len(parts) == 2 and isinstance(parts[1], Mapping):
            return _as_row({"step": parts[0], **cast("Mapping[str, Any]", parts[1])})
    raise _unreadable(row)


def _as_row(row: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, Mapping):
            below = _as_row(cast("Mapping[str, Any]", value))
            found.update({f"{key}/{name}": item for name, item in below.items()})
        elif value is None or isinstance(value, str):
            found[key] = value
        else:
            found[key] = np.array(value)
    return found


def _read_columns(columns: dict[str, Any]) -> list[dict[str, Any]]:
    """Cut a mapping of arrays into rows; one of numbers is a row itself."""
    lengths = {np.shape(value)[:1] for value in columns.values()}
    if lengths <= {()}:
        return [columns] if columns else []
    if len(lengths) > 1:
        found = ", ".join(f"{k} {np.shape(v)}" for k, v in columns.items())
        raise InvalidArgumentError(
            f"the logs are columns of different lengths: {found}",
            hint="give every column the rows as its leading axis",
        )
    ((length,),) = lengths
    return [{k: np.array(v[i]) for k, v in columns.items()} for i in range(length)]


def _unreadable(logs: Any) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"logs of type {type(logs).__name__} cannot be compared",
        hint="return a list of mappings, one per row, or one mapping of arrays",
    )


def row_step(row: Mapping[str, Any]) -> int | None:
    """Return the step of a row, None where it has none that is one number."""
    if "step" not in row:
        return None
    values = np.unique(np.asarray(row["step"]))
    whole = values.size == 1 and np.issubdtype(values.dtype, np.integer)
    return int(values[0]) if whole else None


def plan_cuts(total: int, split: Split) -> list[tuple[int, ...]]:
    """Return the places at which each split run is cut.

    Args:
        total: how far the whole run goes.
        split: a place, or several of which each is tried by itself; one that is a
            sequence cuts one run at all its places.

    Raises:
        InvalidArgumentError: a place is not between 0 and the total.
    """
    entries = split if isinstance(split, Sequence) else [split]
    runs = [tuple(x) if isinstance(x, Sequence) else (x,) for x in entries]
    if not runs:
        raise InvalidArgumentError("split=(): expected a place, or several")
    for cuts in runs:
        rising = all(a < b for a, b in zip((0, *cuts), (*cuts, total), strict=True))
        if not cuts or not rising:
            raise InvalidArgumentError(
                f"split={split!r}: expected places between 0 and total={total}, rising",
                hint=f"write split={max(total // 2, 1)}, or a list of places to try",
            )
    return runs
