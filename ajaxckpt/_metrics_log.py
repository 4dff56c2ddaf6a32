"""The metrics record of a run: a CSV that grows by rows and is cut back at a resume.

Knows when rows are written and made durable; knows no checkpoints, no jax and no
plotting library. What a row looks like is ``_metrics_rows``' business, how bytes get to
the disk ``_directories``'.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

from ajaxckpt._directories import (
    append_bytes,
    close_descriptor,
    open_append,
    replace_file,
    sync_descriptor,
)
from ajaxckpt._errors import (
    CheckpointError,
    CheckpointNotFoundError,
    InvalidArgumentError,
    NotACheckpointError,
)
from ajaxckpt._metrics_rows import (
    KEY_COLUMNS,
    Row,
    Value,
    check_names,
    check_owner,
    check_text,
    choose_rows,
    decode_record,
    encode_record,
    encode_row,
    plain_values,
)
from ajaxckpt._paths import is_missing, open_file, read_into, resolve_path
from ajaxckpt._plain import MAX_STEP, plain_step


@runtime_checkable
class LogHook(Protocol):
    """What a run tells a log, so that the log of a resumed run is one curve.

    `MetricsLog` is one; a hook for TensorBoard or Weights & Biases is another.
    """

    def resume(self, run_id: str, step: int | None) -> None:
        """Forget what was logged after a step.

        Called before anything is appended, after the run has restored its state.

        Args:
            run_id: the run whose log this is; a log of another run must be refused.
            step: the step of the restored state; None if the run starts afresh.
        """
        ...

    def append(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Log the metrics of a step."""
        ...

    def sync(self) -> None:
        """Make all that was appended as durable as a checkpoint.

        Called before each checkpoint is written, perhaps from another thread: what
        is durable later than a checkpoint can be missing once that one is restored.
        """
        ...

    def close(self) -> None:
        """End the log; only `resume` may follow."""
        ...


@contextmanager
def _naming(path: str, act: str) -> Generator[None]:
    """Say where and in which act: this is no save, whatever a lower layer thinks."""
    try:
        yield
    except CheckpointError as error:
        error.path, error.act = path, act
        raise


def _read_bytes(path: str) -> bytes | None:
    """Return a file's bytes, None if there is none.

    Raises:
        InvalidArgumentError: a directory, FIFO, socket or device is at the path.
    """
    try:
        fd, size = open_file(path)
    except CheckpointNotFoundError:
        return None
    except NotACheckpointError as error:
        raise InvalidArgumentError(error.problem, hint=error.hint) from None
    try:
        data = bytearray(size)
        return bytes(data[: read_into(fd, [data], 0)])
    finally:
        os.close(fd)


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, str | Value]]:
    r"""Read a metrics record, also while its run is writing it.

    A last line torn by a kill, or not yet whole, is left out.

    Args:
        path: the CSV file of a `MetricsLog`.

    Returns:
        One dict a row: ``run_id``, ``step``, and every metric of the file; None where
        a row has no value for it. Floats are bit for bit those logged (but a NaN is
        any NaN).

    Raises:
        CheckpointNotFoundError: nothing is at the path.
        InvalidArgumentError: no metrics record, or a damaged one.

    Example:
        >>> log = MetricsLog(f"{path}.csv")
        >>> log.resume("toy", None)
        >>> log.append(1, {"loss": 0.5})
        >>> read_metrics(f"{path}.csv")
        [{'run_id': 'toy', 'step': 1, 'loss': 0.5}]
    """
    where = resolve_path(path)
    with _naming(where, "cannot read the metrics"):
        if (data := _read_bytes(where)) is None:
            hint = "check the path; the first row that is logged creates the file"
            raise CheckpointNotFoundError("no such file", hint=hint)
        record = decode_record(data)
        keys = (*KEY_COLUMNS, *record.names)
        return [
            dict(zip(keys, (row.run_id, row.step, *row.values), strict=True))
            for row in choose_rows(record, MAX_STEP)
        ]


class MetricsLog:
    """An append-only CSV of metrics: ``run_id``, ``step``, then a column per metric.

    Each row is one write, so that a kill can tear the last line at most. A metric that
    first comes up later adds a column: the file is then rewritten, atomically. Once
    resumed, the file holds the rows up to the restored step and no others: the curve
    of a run that was killed at any moment has no overlap and no gap, provided that the
    loop logs a step before it saves it.

    Threads may share a log; processes may not (a run's lock sees to that).

    Example:
        >>> log = MetricsLog(f"{path}.csv")
        >>> log.resume("toy", None)
        >>> for step in 1, 2, 3:
        ...     log.append(step, {"loss": 1 / step})
        >>> log.resume("toy", 2)
        >>> [row["step"] for row in read_metrics(log.path)]
        [1, 2]
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Name the file; nothing is read or written before `resume`.

        Args:
            path: the CSV file, such as ``runs/a/metrics.csv``; it need not exist.

        Raises:
            InvalidArgumentError: no local path of a file.
        """
        self._path = resolve_path(path)
        # a background save syncs while the loop appends; a handler may interrupt both
        self._lock = threading.RLock()
        self._run_id: str | None = None
        self._names: tuple[str, ...] = ()
        self._last_step = 0
        self._count = 0  # rows that the file holds, and that a rewrite keeps
        # False: the file is missing, or its tail is in doubt: it must be rewritten
        self._whole = False
        self._durable = True
        self._fd: int | None = None

    @property
    def path(self) -> str:
        """The file, absolute."""
        return self._path

    def resume(self, run_id: str, step: int | None) -> None:
        """Cut the record back to a step; appended rows come after it.

        Drops a torn last line and all rows of later steps, atomically and durably.
        A file that needs no cut is not written.

        Args:
            run_id: the run whose rows these are.
            step: the step of the restored state; None for a fresh start, which drops
                all rows.

        Raises:
            InvalidArgumentError: the rows are of another run, or the file is no
                metrics record, or a damaged one; it is left as it was.
        """
        with self._lock, _naming(self._path, "cannot continue the log"):
            self._end()
            check_text(run_id, "the run id")
            number = plain_step(step)
            data = _read_bytes(self._path)
            record = decode_record(data or b"")
            check_owner(record, run_id)
            rows = choose_rows(record, -1 if number is None else number)
            names = record.names if rows else ()
            content = encode_record(names, rows)
            if data is not None and data != content:
                replace_file(self._path, content)
            self._run_id, self._names, self._count = run_id, names, len(rows)
            self._last_step = number or 0
            self._whole, self._durable = data is not None, data != content

    def append(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Add one row.

        Args:
            step: not below the last one; a step may have several rows.
            metrics: one number per name (Python, numpy or jax; NaN and infinities
                too), or None for none. A metric of other rows that is not named here
                stays blank, as None does.

        Raises:
            InvalidArgumentError: a step that goes back, a metric that is no number
                or has a name that no column can have, or a log not yet resumed.
            OSError: the row is not in the file, and may be appended again.
        """
        with self._lock, _naming(self._path, "cannot log"):
            if self._run_id is None:
                hint = "call resume(run_id, step) first; a run's restore_or_init does"
                raise InvalidArgumentError("the log is not open", hint=hint)
            number = self._check_step(step)
            values = plain_values(metrics)
            new = tuple(name for name in values if name not in self._names)
            check_names(new)
            names = self._names + new
            row = Row(self._run_id, number, tuple(map(values.get, names)))
            if new or (fd := self._open()) is None:
                self._rewrite(names, [row])
            else:
                self._write(fd, encode_row(row, len(names)))
            self._names, self._last_step = names, number
            self._count += 1

    def _check_step(self, step: object) -> int:
        number = plain_step(step)
        if number is None or number < self._last_step:
            last = self._last_step
            problem = f"step {number} is not at or after step {last}, the last one"
            hint = (
                f"log steps in order; to go back, call resume({self._run_id!r}, step)"
            )
            raise InvalidArgumentError(problem, hint=hint)
        return number

    def _open(self) -> int | None:
        """Return a descriptor to append to, None if the file must be rewritten."""
        if self._whole and self._fd is None and not is_missing(self._path):
            self._fd = open_append(self._path)
        return self._fd if self._whole else None

    def _write(self, fd: int, line: bytes) -> None:
        # until it is known to be otherwise: half a line may be there
        self._whole = self._durable = False
        append_bytes(fd, line)
        self._whole = True

    def _rewrite(self, names: tuple[str, ...], rows: Sequence[Row] = ()) -> None:
        """Replace the file by its rows and further ones, with all columns."""
        self._drop_descriptor()  # it is of the file that goes
        self._whole = False
        record = decode_record(_read_bytes(self._path) or b"")
        # a rewrite that failed may have left a row and columns that count for nothing
        kept = [
            replace(row, values=row.values[: len(self._names)])
            for row in record.rows[: self._count]
            if row is not None
        ]
        replace_file(self._path, encode_record(names, [*kept, *rows]))
        self._whole = self._durable = True

    def sync(self) -> None:
        """Make every row durable.

        Raises:
            OSError: they may not be; the next call writes them all anew, because a
                second fsync would not report what the first one lost.
        """
        with self._lock:
            if self._durable:
                return
            if (fd := self._open()) is None:
                self._rewrite(self._names)
                return
            count, copy = self._count, os.dup(fd)
        # outside the lock: the loop must not wait for the disk to append its next row
        try:
            sync_descriptor(copy)
        except BaseException:
            self._whole = False
            raise
        finally:
            close_descriptor(copy)
        with self._lock:
            self._durable = self._durable or self._count == count

    def close(self) -> None:
        """Make every row durable and end the log; `resume` opens it again."""
        with self._lock:
            try:
                self.sync()
            finally:
                self._end()

    def _end(self) -> None:
        self._run_id = None
        self._drop_descriptor()

    def _drop_descriptor(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            close_descriptor(fd)
