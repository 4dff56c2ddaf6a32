"""Saving without a run while training goes on: one file, in the background.

Joins ``_snapshot``, ``_background`` and ``_writer``; decides nothing.
"""

# jax's own annotations are partial
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import atexit
import logging
import os
import threading
import traceback
from collections.abc import Mapping
from typing import Any

import jax

from ajaxckpt._background import Worker
from ajaxckpt._checkpoint import Registries, describe_save
from ajaxckpt._collecting import collect_state, refuse_nothing
from ajaxckpt._decisions import Patterns
from ajaxckpt._errors import BackgroundSaveError, error_context
from ajaxckpt._metadata import Metadata
from ajaxckpt._paths import resolve_path
from ajaxckpt._snapshot import Arena, Snapshot, take_snapshot
from ajaxckpt._writer import CheckpointRecord, write_checkpoint

_worker = Worker()
_untold: list[BackgroundSave] = []
_log = logging.getLogger("ajaxckpt")


class BackgroundSave:
    """A save that was accepted and is finished before the process ends.

    Attributes:
        path: the file, absolute.
        step: the step, if given.

    Example:
        >>> save = save_in_background({"w": jnp.ones(3)}, path, step=7)
        >>> save.result().step
        7
    """

    def __init__(self, path: str, step: int | None) -> None:
        """Stand for a save that has not begun."""
        self.path, self.step = path, step
        self._finished = threading.Event()
        self._record: CheckpointRecord | None = None
        self._error: Exception | None = None

    @property
    def done(self) -> bool:
        """Whether it is finished, well or not."""
        return self._finished.is_set()

    def result(self, timeout: float | None = None) -> CheckpointRecord:
        """Wait, and return what was written.

        Raises:
            BackgroundSaveError: the save failed; its cause is the ``__cause__``.
            TimeoutError: it is not finished after so many seconds.
        """
        if not self._finished.wait(timeout):
            raise TimeoutError(f"{self.path}: not saved after {timeout} seconds")
        if self in _untold:
            _untold.remove(self)
        if self._record is None:
            raise self._failure()
        return self._record

    def _failure(self) -> BackgroundSaveError:
        step = "the state" if self.step is None else f"step {self.step}"
        failure = BackgroundSaveError(
            f"{step} was not saved: {self._error}",
            path=self.path,
            hint="mend the cause, and save again",
        )
        failure.step = self.step
        failure.__cause__ = self._error
        return failure

    def _carry_out(self, snapshot: Snapshot, metadata: Metadata) -> None:
        try:
            self._record = write_checkpoint(self.path, snapshot.data, metadata)
        except Exception as error:
            self._error = error
            traceback.clear_frames(error.__traceback__)  # they hold the snapshot
            _untold.append(self)
        finally:
            snapshot.discard()
            self._finished.set()


def save_in_background(
    state: Any,
    path: str | os.PathLike[str],
    *,
    step: Any = None,
    metrics: Mapping[str, Any] | None = None,
    config: Any = None,
    migrations: Registries = None,
    exclude: Patterns = (),
) -> BackgroundSave:
    """Save a state to one file; return once it is copied, and write meanwhile.

    Neither a donation nor a write into a numpy leaf changes what is saved. Saves are
    written one after the other, in their order; at most one snapshot waits beside
    the one being taken, so a call waits where saves come faster than the disk takes
    them. All arguments are those of ``save_checkpoint``, and checked now.

    Returns:
        The save: ``result()`` waits for it, and raises if it failed.

    Raises:
        BackgroundSaveError: an earlier save failed and nobody asked for its result.
        UnsupportedLeafError: a leaf cannot be saved.
        InvalidArgumentError: another argument is wrong.

    Example:
        >>> save_in_background({"w": jnp.ones(3)}, path).result().leaves
        1
    """
    if _untold:
        _untold[0].result()
    target = resolve_path(path)
    with error_context(target, "cannot save"), jax.transfer_guard("allow"):
        metadata = describe_save(step, metrics, config, migrations, exclude)
        data = collect_state(state, metadata.excluded)
        refuse_nothing(data, metadata.excluded, target)
        _worker.wait(1)
        snapshot = take_snapshot(data, Arena())
    save = BackgroundSave(target, metadata.step)
    _worker.submit(lambda: save._carry_out(snapshot, metadata))  # pyright: ignore[reportPrivateUsage]
    return save


if hasattr(os, "register_at_fork"):  # the parent's failures are the parent's
    os.register_at_fork(after_in_child=_untold.clear)


@atexit.register
def _tell_the_untold() -> None:
    """Say at the end what failed and nobody asked about."""
    for save in _untold:
        _log.error("%s", save._failure())  # pyright: ignore[reportPrivateUsage]
