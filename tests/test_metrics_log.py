"""The metrics record: rows come back exactly, and a resumed curve is one curve."""

import csv
import errno
import fcntl
import math
import os
import random
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from _fake_os import FakeOs, Killed, die_at, install
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ajaxckpt import CheckpointNotFoundError, InvalidArgumentError
from ajaxckpt import _metrics_log as metrics_log
from ajaxckpt._metrics_log import LogHook, MetricsLog, read_metrics

RUN = "run-a"


def metrics_of(step: int) -> dict[str, Any]:
    """Metrics as a training loop has them: some rare, one that first comes later."""
    metrics: dict[str, Any] = {"loss": 1 / (step + 1), "count": step}
    if step % 2 == 0:
        metrics["evaluation, return"] = -100.0 / 3 + step
    if step == 0:
        del metrics["count"]
    return metrics


def log_steps(log: MetricsLog, first: int, last: int) -> None:
    for step in range(first, last + 1):
        log.append(step, metrics_of(step))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.csv"


def make_log(path: Path, last: int, run_id: str = RUN) -> bytes:
    """Log steps 0 to ``last`` and return the file's bytes."""
    log = MetricsLog(path)
    log.resume(run_id, None)
    log_steps(log, 0, last)
    log.close()
    return path.read_bytes()


def steps_in(path: Path) -> list[Any]:
    return [row["step"] for row in read_metrics(path)]


# the file


def test_the_file_is_a_wide_csv(path: Path) -> None:
    content = make_log(path, 2)
    assert content.decode().split("\n") == [
        'run_id,step,loss,"evaluation, return",count',
        "run-a,0,1.0,-33.333333333333336,",
        "run-a,1,0.5,,1",
        "run-a,2,0.3333333333333333,-31.333333333333336,2",
        "",
    ]


def test_any_csv_reader_reads_it(path: Path) -> None:
    make_log(path, 3)
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == [0, 1, 2, 3]
    assert [float(row["loss"]) for row in rows] == [1.0, 1 / 2, 1 / 3, 1 / 4]


def test_a_row_has_every_metric_of_the_file(path: Path) -> None:
    make_log(path, 1)
    assert read_metrics(path) == [
        {
            **{"run_id": RUN, "step": 0, "loss": 1.0},
            **{"evaluation, return": -100.0 / 3, "count": None},
        },
        {
            **{"run_id": RUN, "step": 1, "loss": 0.5},
            **{"evaluation, return": None, "count": 1},
        },
    ]


def test_a_later_metric_widens_the_file_by_replacing_it(path: Path) -> None:
    log = MetricsLog(path)
    log.resume(RUN, None)
    log.append(1, {"b": 1})
    with path.open("rb") as old:
        log.append(2, {"a": 2, "b": 3})
        # the old file is whole for whoever has it open
        assert old.read() == b"run_id,step,b\nrun-a,1,1\n"
    log.append(3, {"b": 4})
    log.close()
    expected = b"run_id,step,b,a\nrun-a,1,1,\nrun-a,2,3,2\nrun-a,3,4,\n"
    assert path.read_bytes() == expected


def test_a_row_is_one_append_of_one_line(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = MetricsLog(path)
    log.resume(RUN, None)
    log.append(1, {"a": 1})
    real, written = metrics_log.append_bytes, []

    def append_bytes(fd: int, data: bytes) -> None:
        assert fd > 2
        assert fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_APPEND
        written.append(data)
        real(fd, data)

    monkeypatch.setattr(metrics_log, "append_bytes", append_bytes)
    monkeypatch.setattr(metrics_log, "replace_file", None)
    log.append(2, {"a": 2})
    log.append(2, {})
    log.append(3, {"a": None})
    assert written == [b"run-a,2,2\n", b"run-a,2,\n", b"run-a,3,\n"]
    log.close()


def test_rows_without_metrics_are_rows(path: Path) -> None:
    log = MetricsLog(path)
    log.resume(RUN, None)
    log.append(1, {})
    log.append(2, {})
    log.close()
    assert read_metrics(path) == [
        {"run_id": RUN, "step": 1},
        {"run_id": RUN, "step": 2},
    ]


def test_missing_directories_are_made(tmp_path: Path) -> None:
    make_log(tmp_path / "a" / "b" / "metrics.csv", 1)
    assert steps_in(tmp_path / "a" / "b" / "metrics.csv") == [0, 1]


def test_a_relative_path_is_resolved_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    log = MetricsLog("metrics.csv")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    log.resume(RUN, None)
    log.append(1, {"a": 1})
    log.close()
    assert log.path == str(tmp_path / "metrics.csv")
    assert steps_in(tmp_path / "metrics.csv") == [1]


# values


def bits(value: float) -> bytes:
    return struct.pack("<d", value)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (0.1, 0.1),
        (-0.0, -0.0),
        (5e-324, 5e-324),
        (1.7976931348623157e308, 1.7976931348623157e308),
        (math.inf, math.inf),
        (-math.inf, -math.inf),
        (1.0, 1.0),
        (1, 1),
        (-(2**1000), -(2**1000)),
        (True, True),
        (False, False),
        (None, None),
        (np.float32(0.1), 0.10000000149011612),
        (np.float64(0.1), 0.1),
        (ml_dtypes.bfloat16(0.1), 0.10009765625),
        (np.int8(-3), -3),
        (np.uint64(2**64 - 1), 2**64 - 1),
        (np.bool_(True), True),
        (np.array(2.5), 2.5),
        (jnp.float32(0.1), 0.10000000149011612),
        (jnp.int32(7), 7),
        (jnp.asarray(True), True),
    ],
)
def test_a_number_comes_back_exactly(path: Path, given: object, expected: Any) -> None:
    log = MetricsLog(path)
    log.resume(RUN, None)
    log.append(1, {"other": 0})
    log.append(2, {"value": given})  # by a rewrite
    log.append(3, {"value": given})  # by an append
    log.close()
    for row in read_metrics(path)[1:]:
        assert type(row["value"]) is type(expected)
        assert row["value"] == expected
        if isinstance(expected, float):
            assert bits(row["value"]) == bits(expected)  # type: ignore[arg-type]


def test_nan_comes_back_as_nan(path: Path) -> None:
    log = MetricsLog(path)
    log.resume(RUN, None)
    log.append(1, {"a": math.nan, "b": jnp.float32(math.nan)})
    log.close()
    (row,) = read_metrics(path)
    assert math.isnan(row["a"]) and math.isnan(row["b"])  # type: ignore[arg-type]


NAMES = st.text(
    st.characters(codec="utf-8").filter(str.isprintable), min_size=1, max_size=8
).filter(lambda name: name not in ("run_id", "step", "__float__"))
VALUES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.floats(width=32, allow_nan=False).map(np.float32)
)


@settings(
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(rows=st.lists(st.dictionaries(NAMES, VALUES, max_size=4), max_size=6))
def test_any_rows_come_back(path: Path, rows: list[dict[str, Any]]) -> None:
    path.unlink(missing_ok=True)
    log = MetricsLog(path)
    log.resume(RUN, None)
    for step, row in enumerate(rows):
        log.append(step, row)
    log.close()
    if not rows:
        assert not path.exists()
        return
    names = list(dict.fromkeys(name for row in rows for name in row))
    assert read_metrics(path) == [
        {"run_id": RUN, "step": step} | {name: row.get(name) for name in names}
        for step, row in enumerate(rows)
    ]
    # what is read back is what was written: nothing to cut, nothing to rewrite
    before = path.read_bytes()
    log.resume(RUN, len(rows))
    assert path.read_bytes() == before


# resuming


@pytest.mark.parametrize("step", range(0, 7))
def test_a_resumed_record_is_the_unbroken_one(path: Path, step: int) -> None:
    unbroken = make_log(path, 10)
    make_log(path, 6)
    log = MetricsLog(path)
    log.resume(RUN, step)
    assert steps_in(path) == list(range(step + 1))
    log_steps(log, step + 1, 10)
    log.close()
    assert path.read_bytes() == unbroken


def test_wherever_a_kill_tears_the_tail_the_record_becomes_the_unbroken_one(
    path: Path,
) -> None:
    unbroken, restored = make_log(path, 8), 3
    durable = len(make_log(path, restored))
    torn = make_log(path, 6)
    for length in range(durable, len(torn) + 1):
        path.write_bytes(torn[:length])
        whole = torn[:length].count(b"\n") - 1
        assert steps_in(path) == list(range(whole))
        log = MetricsLog(path)
        log.resume(RUN, restored)
        assert steps_in(path) == list(range(restored + 1))
        log_steps(log, restored + 1, 8)
        log.close()
        assert path.read_bytes() == unbroken, length


@pytest.mark.parametrize("tail", [b"\0" * 40, b"run-a,7\n\0\0\n", b"\xff\xfe\n\n"])
def test_a_tail_that_a_power_cut_garbled_is_dropped(path: Path, tail: bytes) -> None:
    content = make_log(path, 6)
    path.write_bytes(content + tail)
    assert steps_in(path) == list(range(7))
    MetricsLog(path).resume(RUN, 6)
    assert path.read_bytes() == content


def test_later_rows_after_a_garbled_line_are_dropped_with_it(path: Path) -> None:
    content = make_log(path, 3)
    path.write_bytes(content + b"\0\0\nrun-a,5,0.5,,5\n")
    MetricsLog(path).resume(RUN, 3)
    assert path.read_bytes() == content


def test_a_fresh_start_drops_all_rows_and_columns(path: Path) -> None:
    make_log(path, 3)
    log = MetricsLog(path)
    log.resume(RUN, None)
    assert read_metrics(path) == []
    log.append(0, {"other": 1})
    log.close()
    assert path.read_bytes() == b"run_id,step,other\nrun-a,0,1\n"


def test_a_log_can_be_resumed_while_it_is_open(path: Path) -> None:
    unbroken = make_log(path, 5)
    log = MetricsLog(path)
    log.resume(RUN, None)
    log_steps(log, 0, 4)
    log.resume(RUN, 2)
    log_steps(log, 3, 5)
    log.close()
    assert path.read_bytes() == unbroken


@pytest.mark.parametrize("content", [None, b"", b"run_id,step\n", b"run_id,step,a\n"])
def test_a_record_without_rows_is_any_runs(path: Path, content: bytes | None) -> None:
    if content is not None:
        path.write_bytes(content)
    log = MetricsLog(path)
    log.resume(RUN, 5)
    assert content is not None or not path.exists()
    log.append(6, {"a": 1})
    log.close()
    assert path.read_bytes() == b"run_id,step,a\nrun-a,6,1\n"


def test_nothing_to_cut_leaves_the_file_alone(path: Path) -> None:
    make_log(path, 3)
    before = path.stat()
    MetricsLog(path).resume(RUN, 3)
    after = path.stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def test_lines_that_an_editor_ended_its_own_way_are_rows(path: Path) -> None:
    content = make_log(path, 3)
    path.write_bytes(content.replace(b"\n", b"\r\n"))
    assert steps_in(path) == [0, 1, 2, 3]
    MetricsLog(path).resume(RUN, 3)
    assert path.read_bytes() == content


@settings(
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_however_often_a_run_is_killed_its_curve_is_the_unbroken_one(
    path: Path, data: st.DataObject
) -> None:
    path.unlink(missing_ok=True)
    unbroken = make_log(path, 12)
    path.unlink()
    saved: int | None = None
    for _ in range(data.draw(st.integers(0, 4))):
        log = MetricsLog(path)
        log.resume(RUN, saved)
        first = 0 if saved is None else saved + 1
        reached = data.draw(st.integers(first - 1, 12))
        durable, inode = 0, 0
        if path.exists():
            durable, inode = path.stat().st_size, path.stat().st_ino
        for step in range(first, reached + 1):
            log.append(step, metrics_of(step))
            checkpoint = data.draw(st.booleans())
            if checkpoint:
                log.sync()
                saved = step
            if checkpoint or path.stat().st_ino != inode:  # replaced: durable as it is
                durable, inode = path.stat().st_size, path.stat().st_ino
        if durable:
            os.truncate(path, data.draw(st.integers(durable, path.stat().st_size)))
    log = MetricsLog(path)
    log.resume(RUN, saved)
    log_steps(log, 0 if saved is None else saved + 1, 12)
    log.close()
    assert path.read_bytes() == unbroken


# what is refused


def refused(act: Callable[[], object], path: Path) -> str:
    """Return the message, and see that nothing was changed."""
    before = path.read_bytes() if path.is_file() else None
    with pytest.raises(InvalidArgumentError) as caught:
        act()
    assert (path.read_bytes() if path.is_file() else None) == before
    return str(caught.value)


@pytest.mark.parametrize("step", [None, 0, 2, 9])
def test_the_record_of_another_run_is_refused(path: Path, step: int | None) -> None:
    make_log(path, 2, run_id="run-b")
    log = MetricsLog(path)
    assert refused(lambda: log.resume(RUN, step), path) == (
        f"{path}: cannot continue the log: its rows are of the run 'run-b', not of "
        "'run-a'\n"
        "To mend: give each run a record of its own, or move the file away"
    )
    assert "is not open" in refused(lambda: log.append(3, {}), path)


def test_one_row_of_another_run_is_enough(path: Path) -> None:
    content = make_log(path, 2)
    path.write_bytes(content + b"run-b,3,0.25,,3\n")
    message = refused(lambda: MetricsLog(path).resume(RUN, 1), path)
    assert "of the run 'run-b', not of 'run-a'" in message


@pytest.mark.parametrize(
    "content",
    [
        b"step,loss\n1,0.5\n",
        b"time,step,loss\n1,2,3\n",
        b"run_id\n",
        b"run_id,step,a,a\nrun-a,1,2,3\n",
        b"run_id,step,step\nrun-a,1,2\n",
        b"run_id,step,a",
        b"no newline",
        b"\n",
        b"\0\0\0\0",
        b"\x89PNG\r\n\x1a\n",
    ],
)
def test_a_file_that_is_no_record_is_refused(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    problem = (
        "no metrics record: its first line is not run_id,step and metrics\n"
        "To mend: give another path, or move the file away"
    )
    message = refused(lambda: MetricsLog(path).resume(RUN, None), path)
    assert message == f"{path}: cannot continue the log: {problem}"
    message = refused(lambda: read_metrics(path), path)
    assert message == f"{path}: cannot read the metrics: {problem}"


def test_a_directory_is_refused(tmp_path: Path) -> None:
    message = refused(lambda: MetricsLog(tmp_path).resume(RUN, None), tmp_path)
    assert f"{tmp_path}: cannot continue the log: is a directory" in message


@pytest.mark.parametrize("line", [b"garbage", b"run-a,1", b"run-a,x,1,,", b""])
def test_a_damaged_line_with_rows_to_keep_behind_it_is_refused(
    path: Path, line: bytes
) -> None:
    lines = make_log(path, 4).split(b"\n")
    lines[2] = line  # step 1
    path.write_bytes(b"\n".join(lines))
    message = refused(lambda: MetricsLog(path).resume(RUN, 3), path)
    assert message == (
        f"{path}: cannot continue the log: line 3 is no row of this record, but "
        "others follow\n"
        "To mend: mend or delete line 3, or move the file away"
    )
    assert "line 3 is no row" in refused(lambda: read_metrics(path), path)
    MetricsLog(path).resume(RUN, 0)
    assert steps_in(path) == [0]


@pytest.mark.parametrize("number", ["0.5x", "1,5", "--", "'3'", "None", "0x10"])
def test_a_cell_that_is_no_number_makes_its_line_no_row(
    path: Path, number: str
) -> None:
    content = b"run_id,step,a\nrun-a,1,2\n"
    path.write_bytes(content + f'run-a,2,"{number}"\n'.encode())
    assert steps_in(path) == [1]
    MetricsLog(path).resume(RUN, 9)
    assert path.read_bytes() == content


def test_steps_must_not_go_back(path: Path) -> None:
    log = MetricsLog(path)
    log.resume(RUN, None)
    log.append(4, {"a": 1})
    log.append(4, {"a": 2})
    assert refused(lambda: log.append(3, {"a": 3}), path) == (
        f"{path}: cannot log: step 3 is not at or after step 4, the last one\n"
        "To mend: log steps in order; to go back, call resume('run-a', step)"
    )
    log.resume(RUN, 4)
    assert "after step 4" in refused(lambda: log.append(3, {"a": 3}), path)
    log.append(5, {"a": 5})
    log.close()
    assert steps_in(path) == [4, 4, 5]


@pytest.mark.parametrize("step", [None, -1, 1.5, True, "3", np.arange(3), 2**63])
def test_what_is_no_step_is_refused(path: Path, step: Any) -> None:
    log = MetricsLog(path)
    log.resume(RUN, 0)
    message = refused(lambda: log.append(step, {"a": 1}), path)
    assert message.startswith(f"{path}: cannot log: step")
    if step is not None:
        message = refused(lambda: log.resume(RUN, step), path)
        assert message.startswith(f"{path}: cannot continue the log: step")


def test_a_step_may_be_an_integer_of_any_library(path: Path) -> None:
    log = MetricsLog(path)
    log.resume(RUN, jnp.int32(3))  # type: ignore[arg-type]
    log.append(np.int64(4), {})  # type: ignore[arg-type]
    log.append(jnp.array([5, 5]), {})  # type: ignore[arg-type]
    log.close()
    assert steps_in(path) == [4, 5]


@pytest.mark.parametrize(
    ("metrics", "problem"),
    [
        ({"a": "1"}, "metrics.a: a str is not a single number"),
        ({"a": [1]}, "metrics.a: a list is not a single number"),
        ({"a": np.ones(3)}, "metrics.a: a ndarray is not a single number"),
        ({"a": 1j}, "metrics.a: a complex is not a single number"),
        ([1], "metrics: a list is not a mapping"),
        ({"step": 1}, "the metric 'step' has the name of a column of its own"),
        ({"run_id": 1}, "the metric 'run_id' has the name of a column of its own"),
        ({"a\nb": 1}, r"the metric 'a\nb' cannot stand in a line of a CSV"),
        ({"a\rb": 1}, r"the metric 'a\rb' cannot stand in a line of a CSV"),
        ({"\ud800": 1}, r"the metric '\ud800' cannot stand in a line of a CSV"),
        ({"": 1}, "the metric '' cannot stand in a line of a CSV"),
        ({"a" * 1_001: 1}, "cannot stand in a line of a CSV"),
    ],
)
def test_metrics_that_fit_no_row_are_refused(
    path: Path, metrics: Any, problem: str
) -> None:
    log = MetricsLog(path)
    log.resume(RUN, None)
    log.append(1, {"loss": 1})
    message = refused(lambda: log.append(2, metrics), path)
    assert message.startswith(f"{path}: cannot log: ")
    assert problem in message.splitlines()[0]
    log.append(2, {"loss": 2})
    log.close()
    assert steps_in(path) == [1, 2]


@pytest.mark.parametrize("run_id", ["", "a\nb", None, 3])
def test_a_run_id_that_is_no_cell_is_refused(path: Path, run_id: Any) -> None:
    message = refused(lambda: MetricsLog(path).resume(run_id, None), path)
    assert message == (
        f"{path}: cannot continue the log: the run id {run_id!r} cannot stand in a "
        "line of a CSV\nTo mend: use 1 to 1,000 visible characters"
    )


@pytest.mark.parametrize("close_first", [False, True])
def test_a_log_that_is_not_open_takes_no_rows(path: Path, close_first: bool) -> None:
    log = MetricsLog(path)
    if close_first:
        log.resume(RUN, None)
        log.append(1, {"a": 1})
        log.close()
        log.close()
    log.sync()
    assert refused(lambda: log.append(2, {"a": 1}), path) == (
        f"{path}: cannot log: the log is not open\n"
        "To mend: call resume(run_id, step) first; a run's restore_or_init does"
    )


def test_reading_nothing_says_so(path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError) as caught:
        read_metrics(path)
    assert isinstance(caught.value, FileNotFoundError)
    assert str(caught.value) == (
        f"{path}: cannot read the metrics: no such file\n"
        "To mend: check the path; the first row that is logged creates the file"
    )


@pytest.mark.parametrize("path", ["", "gs://bucket/metrics.csv", "logs/"])
def test_what_is_no_path_is_refused_at_once(path: str) -> None:
    with pytest.raises(InvalidArgumentError):
        MetricsLog(path)


# durability


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bytes]]:
    """What the file held at each fsync of its descriptor."""
    contents: list[bytes] = []
    real = metrics_log.sync_descriptor

    def sync_descriptor(fd: int) -> None:
        contents.append(os.pread(fd, 1 << 20, 0))
        real(fd)

    monkeypatch.setattr(metrics_log, "sync_descriptor", sync_descriptor)
    yield contents


def test_sync_makes_all_rows_durable_and_asks_once(
    path: Path, synced: list[bytes]
) -> None:
    make_log(path, 0)
    synced.clear()
    log = MetricsLog(path)
    log.resume(RUN, None)
    log.append(0, {"a": 0})
    log.sync()
    assert synced == []  # a file that was replaced is durable already
    log.append(1, {"a": 1})
    log.append(2, {"a": 2})
    log.sync()
    log.sync()
    assert synced == [path.read_bytes()]
    log.append(3, {"a": 3})
    log.close()
    assert synced[1:] == [path.read_bytes()]


def test_rows_kept_from_a_killed_process_are_made_durable_too(
    path: Path, synced: list[bytes]
) -> None:
    content = make_log(path, 3)
    synced.clear()
    log = MetricsLog(path)
    log.resume(RUN, 3)  # nothing is cut, and so nothing is written
    log.sync()
    assert synced == [content]
    log.close()


def fill_disk(fd: int, data: bytes) -> None:
    os.write(fd, data[: len(data) // 2])
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_failed_append_leaves_no_row_and_no_half_of_one(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unbroken = make_log(path, 6)
    log = MetricsLog(path)
    log.resume(RUN, None)
    log_steps(log, 0, 3)
    with monkeypatch.context() as patch:
        patch.setattr(metrics_log, "append_bytes", fill_disk)
        with pytest.raises(OSError, match="No space left"):
            log.append(4, metrics_of(4))
    assert steps_in(path) == [0, 1, 2, 3]
    log_steps(log, 4, 6)
    log.close()
    assert path.read_bytes() == unbroken


def test_an_append_that_fails_after_its_row_may_be_repeated(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = MetricsLog(path)
    log.resume(RUN, None)
    log.append(1, {"a": 1})
    real = metrics_log.append_bytes

    def interrupted(fd: int, data: bytes) -> None:
        real(fd, data)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(metrics_log, "append_bytes", interrupted)
        with pytest.raises(KeyboardInterrupt):
            log.append(2, {"a": 2})
    log.append(2, {"a": 2})
    log.close()
    assert steps_in(path) == [1, 2]


def test_a_failed_widening_may_be_repeated_or_left(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = MetricsLog(path)
    log.resume(RUN, None)
    log.append(1, {"a": 1})
    real = metrics_log.replace_file

    def too_late(target: str, data: bytes) -> None:
        real(target, data)
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(metrics_log, "replace_file", too_late)
        with pytest.raises(OSError, match="Input/output"):
            log.append(2, {"b": 2})
    log.append(3, {"a": 3})
    log.append(4, {"c": 4})
    log.close()
    assert path.read_bytes() == b"run_id,step,a,c\nrun-a,1,1,\nrun-a,3,3,\nrun-a,4,,4\n"


def test_after_a_failed_fsync_the_rows_are_written_anew(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = MetricsLog(path)
    log.resume(RUN, None)
    log_steps(log, 0, 3)

    def fail(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    inode = path.stat().st_ino
    with monkeypatch.context() as patch:
        patch.setattr(metrics_log, "sync_descriptor", fail)
        with pytest.raises(OSError, match="Input/output"):
            log.sync()
    content = path.read_bytes()
    with path.open("rb"):  # its inode is not used again
        log.sync()
        assert path.stat().st_ino != inode
    assert path.read_bytes() == content
    log.close()


def test_a_file_removed_before_the_first_row_starts_again(path: Path) -> None:
    make_log(path, 3)
    log = MetricsLog(path)
    log.resume(RUN, 3)
    path.unlink()
    log.append(4, {"loss": 4})
    log.close()
    assert steps_in(path) == [4]


def test_killed_at_any_call_of_a_cut_the_file_is_the_old_or_the_new_one(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut, old = make_log(path, 3), make_log(path, 6)
    seen: set[bytes] = set()
    for index in range(100):
        path.write_bytes(old)
        with monkeypatch.context() as patch:
            fake = install(patch, FakeOs())
            patch.setattr(metrics_log, "os", fake)
            fake.before = die_at(index)
            try:
                MetricsLog(path).resume(RUN, 3)
                break
            except Killed:
                fake.bury()
        assert path.read_bytes() in (cut, old)
        seen.add(path.read_bytes())
        log = MetricsLog(path)
        log.resume(RUN, 3)
        assert path.read_bytes() == cut
        log.close()
    else:
        raise AssertionError("the cut never came through")
    assert seen == {cut, old}


KILLED = """
import sys
from ajaxckpt._metrics_log import MetricsLog
path, step = sys.argv[1], int(sys.argv[2])
log = MetricsLog(path)
log.resume("run-a", None if step < 0 else step)
while True:
    step += 1
    metrics = {"loss": 1 / (step + 1)} | ({"rare": step} if step % 7 == 0 else {})
    log.append(step, metrics)
    if step % 5 == 0:
        log.sync()
        print(step, flush=True)  # stands for the checkpoint
"""


def test_a_run_killed_at_will_leaves_one_curve(path: Path) -> None:
    rng, saved = random.Random(3), -1
    for _ in range(3):
        process = subprocess.Popen(
            [sys.executable, "-c", KILLED, str(path), str(saved)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(rng.randrange(3, 40))]
        process.kill()
        lines += process.stdout.readlines()
        assert process.wait() == -signal.SIGKILL
        process.stdout.close()
        # the last line may itself be torn by the kill
        saved = int([line for line in lines if line.endswith("\n")][-1])
    log = MetricsLog(path)
    log.resume(RUN, saved)
    log.append(saved + 1, {"loss": 1 / (saved + 2)})
    log.close()
    rows = read_metrics(path)
    assert [row["step"] for row in rows] == list(range(saved + 2))
    assert [row["loss"] for row in rows] == [
        1 / (step + 1) for step in range(saved + 2)
    ]
    assert all(row["rare"] == row["step"] for row in rows[: saved + 1 : 7])


def test_a_thread_may_sync_while_the_loop_appends_and_widens(path: Path) -> None:
    log = MetricsLog(path)
    log.resume(RUN, None)
    done, errors = threading.Event(), []

    def keep_syncing() -> None:
        try:
            while not done.is_set():
                log.sync()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=keep_syncing)
    thread.start()
    for step in range(200):
        log.append(step, {"a": step} | ({f"m{step}": 1} if step % 20 == 0 else {}))
    done.set()
    thread.join()
    log.close()
    assert errors == []
    assert [(row["step"], row["a"]) for row in read_metrics(path)] == [
        (step, step) for step in range(200)
    ]


def test_the_loop_appends_while_a_sync_waits_for_the_disk(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = MetricsLog(path)
    log.resume(RUN, None)
    log_steps(log, 0, 3)
    waiting, go_on = threading.Event(), threading.Event()
    contents: list[bytes] = []

    def sync_descriptor(fd: int) -> None:
        waiting.set()
        assert go_on.wait(60)
        contents.append(os.pread(fd, 1 << 20, 0))

    monkeypatch.setattr(metrics_log, "sync_descriptor", sync_descriptor)
    thread = threading.Thread(target=log.sync)
    thread.start()
    assert waiting.wait(60)
    log.append(4, metrics_of(4))
    go_on.set()
    thread.join()
    assert steps_in(path) == [0, 1, 2, 3, 4]
    log.sync()  # the row that came meanwhile is not taken for durable
    assert len(contents) == 2
    log.close()


def test_no_descriptor_stays_open(path: Path) -> None:
    log = MetricsLog(path)
    log.resume(RUN, None)
    log.append(0, {"warm": 1})
    log.close()
    before = set(os.listdir("/proc/self/fd"))
    for _ in range(3):
        log.resume(RUN, None)
        log_steps(log, 0, 4)
        log.resume(RUN, 2)
        log_steps(log, 3, 4)
        read_metrics(path)
    log.close()
    assert set(os.listdir("/proc/self/fd")) == before


# the hook


def test_a_metrics_log_is_a_log_hook(path: Path) -> None:
    assert isinstance(MetricsLog(path), LogHook)
    assert not isinstance(path, LogHook)


def test_it_needs_neither_jax_nor_pandas() -> None:
    code = (
        "import sys, ajaxckpt._metrics_log\n"
        "print([m for m in ('jax', 'jaxlib', 'pandas') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
