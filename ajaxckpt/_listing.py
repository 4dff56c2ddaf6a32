"""What lies in a run's directory, read from the committed files alone.

Knows names and headers; changes nothing, and decides nothing. There is no index that
could disagree with the files, and no pointer that could run ahead of them.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ajaxckpt._errors import (
    CheckpointError,
    CheckpointNotFoundError,
    InvalidArgumentError,
    NewerFormatError,
    NotACheckpointError,
)
from ajaxckpt._metadata import EXPORT
from ajaxckpt._paths import is_missing
from ajaxckpt._plain import MAX_STEP
from ajaxckpt._reader import Checkpoint
from ajaxckpt._retention import Candidate

SUFFIX = ".safetensors"
PIN = ".pin"
ABANDONED = ".abandoned"
_NAME = re.compile(r"step-([0-9]{1,30})(?:\.([A-Za-z0-9_-]{1,64}))?\.safetensors")
_RUN_ID = re.compile("[A-Za-z0-9_-]{1,64}")

Signature = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEntry:
    """One checkpoint of a run's directory, as its header describes it.

    Attributes:
        path: the file, absolute.
        step: the header's step; where no header can be read, the name's.
        run_id: the run it belongs to; None for a file saved without a run, or where
            no header can be read and the name says nothing.
        checkpoint_id: the id of the save; empty where no header can be read.
        metrics: what was measured at that step.
        time: when it was written, in seconds since the epoch.
        nbytes: bytes of the file.
        pinned: whether its pin keeps it.
        problem: why it cannot be restored; empty where nothing is known against it.
            Damage to the leaves shows only when they are read.
        is_newer: whether a newer release wrote it, which is no damage.
    """

    path: str
    step: int
    run_id: str | None = None
    checkpoint_id: str = ""
    metrics: Mapping[str, float | int | None] = field(default_factory=dict[str, Any])
    time: float = 0.0
    nbytes: int = 0
    pinned: bool = False
    problem: str = ""
    is_newer: bool = False

    @property
    def candidate(self) -> Candidate:
        """What a retention policy may know of it."""
        return Candidate(
            step=self.step, time=self.time, metrics=self.metrics, pinned=self.pinned
        )

    @property
    def is_named(self) -> bool:
        """Whether the file has the name that its run gave it."""
        name = read_name(os.path.basename(self.path))
        return name in ((self.step, None), (self.step, self.run_id))


def is_run_id(run_id: object) -> bool:
    """Tell whether an id can stand in a file name."""
    return isinstance(run_id, str) and _RUN_ID.fullmatch(run_id) is not None


def check_run_id(run_id: object) -> str | None:
    """Return a run's id.

    Raises:
        InvalidArgumentError: it cannot stand in a file name.
    """
    if run_id is None:
        return None
    if isinstance(run_id, str) and is_run_id(run_id):
        return run_id
    problem = f"run_id: {run_id!r} is no id of a run"
    raise InvalidArgumentError(
        problem, hint="pass 1 to 64 of the characters A-Z a-z 0-9 _ -"
    )


def format_name(step: int, suffix: str | None) -> str:
    """Return the name of a step's file.

    Example:
        >>> from ajaxckpt._listing import format_name
        >>> format_name(400, None), format_name(400, "b")
        ('step-400.safetensors', 'step-400.b.safetensors')
    """
    middle = f".{suffix}" if suffix else ""
    return f"step-{step}{middle}{SUFFIX}"


def read_name(name: str) -> tuple[int, str | None] | None:
    """Return the step and the run in a file's name, whatever the padding.

    Returns:
        The step, and the run's id or None; None for a name of another form.

    Example:
        >>> from ajaxckpt._listing import read_name
        >>> read_name("step-0400.safetensors"), read_name("best.safetensors")
        ((400, None), None)
    """
    match = _NAME.fullmatch(name)
    if match is None or int(match[1]) > MAX_STEP:
        return None
    return int(match[1]), match[2]


def read_signature(path: str) -> Signature:
    """Return what changes when a file is written anew."""
    status = os.stat(path)
    return status.st_ino, status.st_mtime_ns, status.st_size


def list_directory(directory: str) -> list[str]:
    """Return the paths in a directory that end like a checkpoint's.

    Returns:
        Absolute paths; none where nothing at all is at the path.

    Raises:
        NotACheckpointError: a file is at the path.
        OSError: the directory is there and cannot be read.
    """
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        if is_missing(directory):
            return []
        raise
    except NotADirectoryError:
        hint = "pass the directory of a run; a file is read with restore_into"
        raise NotACheckpointError(
            "is no directory", path=directory, hint=hint
        ) from None
    return [os.path.join(directory, name) for name in names if name.endswith(SUFFIX)]


def describe_problem(error: Exception) -> str:
    """Say in one line why a file cannot be restored."""
    if isinstance(error, CheckpointError):
        details = f": {error.details[0]}" if error.details else ""
        return f"{error.problem}{details}"
    return f"{type(error).__name__}: {getattr(error, 'strerror', '') or error}"


def read_entry(path: str) -> RunEntry | None:
    """Describe one file of a run's directory.

    Returns:
        None for one that is gone meanwhile, and for one that is none of a run's: it
        has neither a step nor a run's name, or it is an export.
    """
    try:
        with Checkpoint(path) as checkpoint:
            return _describe(path, checkpoint)
    except CheckpointNotFoundError as error:
        return _describe_broken(path, error) if os.path.islink(path) else None
    except NotACheckpointError as error:
        named = read_name(os.path.basename(path)) is not None
        return _describe_broken(path, error) if named else None
    except (CheckpointError, OSError) as error:
        return _describe_broken(path, error)


def _describe_broken(path: str, error: Exception) -> RunEntry:
    """Describe a file by its name alone; by step 0 where that says nothing."""
    step, run_id = read_name(os.path.basename(path)) or (0, None)
    nbytes, seconds = 0, 0.0
    with contextlib.suppress(OSError):
        status = os.lstat(path)
        nbytes, seconds = status.st_size, status.st_mtime
    return RunEntry(
        path=path,
        step=step,
        run_id=run_id,
        time=seconds,
        nbytes=nbytes,
        pinned=os.path.lexists(path + PIN),
        problem=describe_problem(error),
        is_newer=isinstance(error, NewerFormatError),
    )


def _describe(path: str, checkpoint: Checkpoint) -> RunEntry | None:
    if EXPORT in checkpoint.provenance:  # it has a step, and cannot be resumed
        return None
    name = read_name(os.path.basename(path))
    step = checkpoint.step
    if step is None:
        if name is None:
            return None
        step = name[0]
    return RunEntry(
        path=path,
        step=step,
        run_id=checkpoint.run_id if is_run_id(checkpoint.run_id) else None,
        checkpoint_id=checkpoint.checkpoint_id,
        metrics=checkpoint.metrics,
        time=_read_time(checkpoint),
        nbytes=checkpoint.nbytes,
        pinned=os.path.lexists(path + PIN),
    )


def _read_time(checkpoint: Checkpoint) -> float:
    text = checkpoint.provenance.get("time")
    with contextlib.suppress(ValueError, TypeError):
        return datetime.datetime.fromisoformat(str(text)).timestamp()
    return os.stat(checkpoint.path).st_mtime
