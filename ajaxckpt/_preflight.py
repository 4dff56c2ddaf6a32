"""Will a run fit on its disk, and how long will a save take: asked before training.

Knows sizes, policies and the free space; the probe it writes is removed again.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ajaxckpt._background import Clock
from ajaxckpt._directories import probe_write
from ajaxckpt._errors import NoSpaceError
from ajaxckpt._retention import KeepBest, KeepLast, KeepPolicy

_PROBE_BYTES = 32 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class PreflightReport:
    """What a run needs of its disk.

    Attributes:
        nbytes: bytes of one checkpoint.
        kept: how many are kept at most; None where the policies set no bound.
        needed: further bytes needed: those of what is kept and of the one being
            written, less what the run's files take already; without a bound, those
            of the next save alone.
        available: bytes free for this user, quotas aside.
        seconds: how long a durable save takes, measured with a small probe; None
            where none was written.
    """

    nbytes: int
    kept: int | None
    needed: int
    available: int
    seconds: float | None = None


def count_kept(policies: Sequence[KeepPolicy] | None) -> int | None:
    """Return how many checkpoints policies keep at most; None without a bound.

    Example:
        >>> from ajaxckpt._preflight import count_kept
        >>> count_kept([KeepLast(3), KeepBest("return", "max")]), count_kept(None)
        (4, None)
    """
    if policies is None:
        return None
    bounded = [p.count for p in policies if isinstance(p, KeepLast | KeepBest)]
    if len(bounded) < len(policies):
        return None
    return max(1, sum(bounded))


def check_space(
    directory: str, nbytes: int, kept: int | None, present: int
) -> PreflightReport:
    """Compare what a run needs with what its disk has.

    Args:
        directory: the run's; it need not exist.
        nbytes: bytes of one checkpoint.
        kept: how many are kept, None without a bound.
        present: bytes that the run's files take already.

    Raises:
        NoSpaceError: the disk has no room for it.
    """
    while not os.path.isdir(directory) and directory != os.path.dirname(directory):
        directory = os.path.dirname(directory)
    available = shutil.disk_usage(directory).free
    needed = nbytes if kept is None else max(0, kept * nbytes - present) + nbytes
    if needed > available:
        what = "the next one" if kept is None else f"{kept} of them and one in writing"
        raise NoSpaceError(
            f"checkpoints of {nbytes:,} bytes each: {what} need {needed:,} bytes, "
            f"{available:,} are available",
            path=directory,
            hint="free space, keep fewer, or save less with exclude=",
        )
    return PreflightReport(nbytes=nbytes, kept=kept, needed=needed, available=available)


def measure_save(directory: str, nbytes: int, clock: Clock = time) -> float:
    """Return how many seconds a durable save of that size takes here.

    Raises:
        OSError: nothing can be written here.
    """
    probe = max(1, min(nbytes, _PROBE_BYTES))
    start = clock.monotonic()
    probe_write(directory, probe)
    return (clock.monotonic() - start) * max(nbytes, 1) / probe
