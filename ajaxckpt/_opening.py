"""The public verbs that need no jax: is it there, open it, is it whole."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ajaxckpt._errors import DamagedCheckpointError, error_context
from ajaxckpt._leaf_file import DAMAGED_HINT
from ajaxckpt._paths import is_missing, resolve_path
from ajaxckpt._reader import Checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What ``verify_checkpoint`` found whole.

    Attributes:
        path: the file, absolute.
        leaves: how many leaves it holds.
        nbytes: how many bytes were checked: all of them.
        digest: the state's digest.
    """

    path: str
    leaves: int
    nbytes: int
    digest: str


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a checkpoint for reading, without a skeleton and without jax.

    Returns:
        A lazy, read-only mapping from leaf name to host value, with ``layout``,
        ``step``, ``metrics``, ``config``, ``provenance`` and ids.

    Raises:
        CheckpointNotFoundError: nothing is at the path.
        NotACheckpointError: ajaxckpt did not write what is there.
        DamagedCheckpointError: the header is not as it was written.
        NewerFormatError: a newer release wrote the file.

    Example:
        >>> with open_checkpoint(path) as checkpoint:
        ...     checkpoint.step, checkpoint["w"].tolist()
        (7, [1.0, 1.0, 1.0])
    """
    resolved = resolve_path(path)
    with error_context(resolved, "cannot open"):
        return Checkpoint(resolved)


def checkpoint_exists(path: str | os.PathLike[str]) -> bool:
    """Tell whether a checkpoint is at a path.

    Returns:
        False only if nothing is there, True for a sound header. Anything else
        raises: a damaged file taken for none would make every resume loop start
        again and overwrite it.

    Raises:
        NotACheckpointError: ajaxckpt did not write what is there.
        DamagedCheckpointError: the header is not as it was written.
        NewerFormatError: a newer release wrote the file.

    Example:
        >>> checkpoint_exists(path), checkpoint_exists("elsewhere.safetensors")
        (True, False)
    """
    resolved = resolve_path(path)
    with error_context(resolved, "cannot tell whether a checkpoint exists"):
        if is_missing(resolved):
            return False
        Checkpoint(resolved).close()
        return True


def verify_checkpoint(path: str | os.PathLike[str]) -> VerifyReport:
    """Read every byte of a checkpoint and compare it with its digests.

    Returns:
        What was found whole.

    Raises:
        DamagedCheckpointError: names every part that is damaged.
        CheckpointNotFoundError, NotACheckpointError, NewerFormatError: as opening.

    Example:
        >>> verify_checkpoint(path).leaves
        2
    """
    resolved = resolve_path(path)
    with (
        error_context(resolved, "cannot verify"),
        Checkpoint(resolved) as checkpoint,
    ):
        if damaged := checkpoint.file.find_damage():
            verb = "is" if len(damaged) == 1 else "are"
            raise DamagedCheckpointError(
                f"{len(damaged)} of {len(checkpoint)} leaves {verb} damaged",
                act="is not whole",
                path=checkpoint.path,
                details=damaged,
                hint=DAMAGED_HINT,
            )
        return VerifyReport(
            path=checkpoint.path,
            leaves=len(checkpoint),
            nbytes=checkpoint.nbytes,
            digest=checkpoint.digest,
        )
