"""What a command tells while it runs, and how its failures are called.

Knows the errors; prints nothing.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from ajaxckpt._errors import (
    CheckpointError,
    CheckpointNotFoundError,
    DamagedCheckpointError,
    InvalidArgumentError,
    LayoutMismatchError,
    MigrationError,
    NewerFormatError,
    NotACheckpointError,
    RunLockedError,
)

T = TypeVar("T")

FOREIGN = "not a checkpoint"
_STATUS_OF = (
    (CheckpointNotFoundError, "not found"),
    (DamagedCheckpointError, "damaged"),
    (NewerFormatError, "newer format"),
    (NotACheckpointError, FOREIGN),
    (LayoutMismatchError, "does not fit"),
    (MigrationError, "cannot migrate"),
    (RunLockedError, "locked"),
    (InvalidArgumentError, "usage"),
)


class Session(Protocol):
    """What a command tells while it runs."""

    @property
    def as_json(self) -> bool:
        """Whether the result is wanted as data, all at once."""
        ...

    def say(self, line: str) -> None:
        """Show a line of the result, where that is text."""
        ...

    def refresh(
        self, lines: Sequence[str], errors: list[dict[str, str]], body: dict[str, Any]
    ) -> None:
        """Show a result that replaces the one before: lines, or one line of JSON."""
        ...

    def find(self) -> None:
        """Remember that something was found: exit status 1."""
        ...

    def fail(self, path: str, status: str, error: CheckpointError | OSError) -> None:
        """Show what is wrong with a path, and remember it."""
        ...


def attempt(
    session: Session,
    path: str,
    act: Callable[[str, Namespace], T],
    arguments: Namespace,
) -> T | None:
    """Return what the act gives for a path; None after saying why it failed."""
    try:
        return act(path, arguments)
    except (CheckpointError, OSError) as error:
        session.fail(path, status_of(error), error)
        return None


def status_of(error: Exception | None) -> str:
    if error is None:
        return "sound"
    found = (word for kind, word in _STATUS_OF if isinstance(error, kind))
    return next(found, "unreadable")
