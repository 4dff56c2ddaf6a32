"""The exception tree and the one renderer of messages.

Knows nothing of trees, bytes or paths beyond their text::

    CheckpointError
    ├── NotACheckpointError         something else lies at the path
    ├── DamagedCheckpointError      a checkpoint of ours, but not whole
    ├── NewerFormatError            written by a newer format version
    ├── UnsupportedLeafError        a leaf that cannot be saved or filled
    ├── LayoutMismatchError         file and skeleton differ
    ├── MigrationError              a migration cannot be applied
    ├── InvalidArgumentError        an argument is wrong; also ValueError
    ├── StepExistsError             also FileExistsError
    ├── RunLockedError              another process writes this run
    ├── BackgroundSaveError         a save that was accepted failed
    ├── NoSpaceError                the disk has no room; also OSError
    └── CheckpointNotFoundError     also FileNotFoundError

An ``OSError`` of the operating system (disk full, permission) passes through
untouched.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ajaxckpt._layout import Mismatch

MAX_DETAILS = 10


def render_message(
    path: object, act: str, problem: str, details: Sequence[str], hint: str
) -> str:
    """Lay out one error: where, what failed, the details, how to mend it."""
    head = ": ".join(str(part) for part in (path, act, problem) if part)
    lines = [head, *(f"  {line}" for line in details[:MAX_DETAILS])]
    if len(details) > MAX_DETAILS:
        lines.append(f"  and {len(details) - MAX_DETAILS} more")
    if hint:
        lines.append(f"To mend: {hint}")
    return "\n".join(lines)


class CheckpointError(Exception):
    """Anything ajaxckpt refuses; carries its parts as data and renders them.

    Attributes:
        problem: what is wrong, in one line.
        act: what was being done, such as ``cannot restore``.
        path: the file concerned, or None.
        details: one line per leaf concerned.
        mismatches: the same as data, where layouts were compared.
        hint: what to call, pass or run to mend it.
    """

    def __init__(
        self,
        problem: str,
        *,
        act: str = "",
        path: object = None,
        details: Sequence[str] = (),
        mismatches: Sequence[Mismatch] = (),
        hint: str = "",
    ) -> None:
        """Keep the parts; the message is rendered when it is asked for."""
        super().__init__(problem)
        self.problem = problem
        self.act = act
        self.path = path
        self.details = tuple(details)
        self.mismatches = tuple(mismatches)
        self.hint = hint

    def __str__(self) -> str:
        """Render the one shape all errors share."""
        return render_message(
            self.path, self.act, self.problem, self.details, self.hint
        )


class NotACheckpointError(CheckpointError):
    """What lies at the path is not a file that ajaxckpt wrote."""


class DamagedCheckpointError(CheckpointError):
    """The file is a checkpoint, but some of its bytes are not those written."""


class NewerFormatError(CheckpointError):
    """The file was written in a format version this release cannot read."""


class UnsupportedLeafError(CheckpointError):
    """A leaf of the state or skeleton cannot be saved or filled."""


class LayoutMismatchError(CheckpointError):
    """The file's layout does not fit the skeleton's."""


class MigrationError(CheckpointError):
    """A migration cannot be registered, planned or applied."""


class InvalidArgumentError(CheckpointError, ValueError):
    """An argument of the call is wrong."""


class StepExistsError(CheckpointError, FileExistsError):
    """Another checkpoint of this step is there already."""


class RunLockedError(CheckpointError):
    """Another live process writes this run."""


class BackgroundSaveError(CheckpointError):
    """A save that was accepted failed later; its cause is the ``__cause__``.

    Attributes:
        step: the step that was not saved, or None.
    """

    step: int | None = None


class NoSpaceError(CheckpointError, OSError):
    """The disk has no room for what a run is to keep."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """Nothing is at the path."""


@contextmanager
def error_context(path: object, act: str) -> Generator[None]:
    """Say where and in which act an error arose that does not know it itself."""
    try:
        yield
    except CheckpointError as error:
        error.path = error.path if error.path is not None else path
        error.act = error.act or act
        raise
