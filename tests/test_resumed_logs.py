"""The example of logs that continue: killed for real, each log is one curve."""

import itertools
import os
import signal
import struct
import subprocess
import sys
import types
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ajaxckpt import InvalidArgumentError
from ajaxckpt._metrics_log import LogHook, MetricsLog, read_metrics

EXAMPLES = Path(__file__).parent.parent / "examples"
# the example itself, killed once it has reported a step, and has saved it if it must
KILLED = """
import glob, os, signal, sys, time
import resumed_logs as example
report, last = example.Run.step, int(sys.argv[1])

def step(run, state, *, step):
    report(run, state, step=step)
    if step == last:
        while step % 20 == 0 and not glob.glob(f"{run.directory}/step-{step}.*"):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)

example.Run.step = step
sys.exit(example.main(sys.argv[2:]))
"""
NEVER = 0


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import resumed_logs

    yield resumed_logs


def run_code(code: str, *arguments: object) -> "subprocess.CompletedProcess[str]":
    """Run code in a process that finds the examples and keeps wandb from the net."""
    paths = os.pathsep.join([str(EXAMPLES), *sys.path])
    offline = {"WANDB_MODE": "offline", "WANDB_ERROR_REPORTING": "false"}
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": paths, **offline},
    )


def run_killed(directory: Path, *arguments: str) -> str:
    """Let the example be killed twice, and then end; return what it printed then."""
    for last in (40, 58, NEVER):
        done = run_code(KILLED, last, directory, "--steps", "70", *arguments)
        assert done.returncode == (-signal.SIGKILL if last else 0), done.stderr
    return done.stdout


def losses(steps: int) -> list[float]:
    """What the example logs, computed anew: numpy's float32, without JAX."""
    x = speed = np.float32(0)
    found: list[float] = []
    for _ in range(steps):
        found.append(float((x - np.float32(3)) ** 2))
        gradient = np.float32(2) * (x - np.float32(3))
        speed = np.float32(0.9) * speed - np.float32(0.01) * gradient
        x = x + speed
    return found


def read_losses(directory: Path) -> list[tuple[Any, Any]]:
    rows = read_metrics(directory / "metrics.csv")
    return [(row["step"], row["loss"]) for row in rows]


def read_tensorboard(directory: Path, tag: str = "loss") -> list[tuple[int, float]]:
    """Read a curve as TensorBoard does."""
    accumulator = import_module(
        "tensorboard.backend.event_processing.event_accumulator"
    )
    events = accumulator.EventAccumulator(str(directory), size_guidance={"scalars": 0})
    events.Reload()
    if tag not in events.Tags()["scalars"]:
        return []
    return [(point.step, point.value) for point in events.Scalars(tag)]


def test_the_example_starts_resumes_and_has_one_curve(
    example: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert example.main([str(tmp_path / "whole"), "--steps", "70"]) == 0
    whole = capsys.readouterr().out.splitlines()
    assert whole[0] == "starting"
    assert example.main([str(tmp_path / "split"), "--steps", "30"]) == 0
    assert example.main([str(tmp_path / "split"), "--steps", "70"]) == 0
    split = capsys.readouterr().out.splitlines()
    assert split[2] == "resuming at step 30"
    assert split[-1] == whole[-1]
    assert read_losses(tmp_path / "split") == read_losses(tmp_path / "whole")


def test_the_record_of_a_killed_run_is_that_of_the_unbroken_one(
    example: Any, tmp_path: Path
) -> None:
    assert run_killed(tmp_path / "killed").startswith("resuming at step 40\n")
    example.main([str(tmp_path / "whole"), "--steps", "70"])
    record = (tmp_path / "killed" / "metrics.csv").read_bytes()
    assert record == (tmp_path / "whole" / "metrics.csv").read_bytes()
    curve = read_losses(tmp_path / "killed")
    assert [step for step, _ in curve] == list(range(1, 71))
    np.testing.assert_allclose([loss for _, loss in curve], losses(70), rtol=1e-4)


def test_another_run_id_is_refused_by_the_record(tmp_path: Path, example: Any) -> None:
    assert example.main([str(tmp_path), "--steps", "20"]) == 0
    before = (tmp_path / "metrics.csv").read_bytes()
    with pytest.raises(InvalidArgumentError, match="the run 'toy', not of 'other'"):
        example.main([str(tmp_path), "--steps", "20", "--run-id", "other"])
    assert (tmp_path / "metrics.csv").read_bytes() == before


def test_the_hooks_are_log_hooks(example: Any, tmp_path: Path) -> None:
    assert isinstance(example.TensorBoardLog(tmp_path), LogHook)
    assert isinstance(example.WandbLog(tmp_path, tmp_path / "metrics.csv"), LogHook)


# TensorBoard


def test_the_tensorboard_curve_of_a_killed_run_has_no_overlap_and_no_gap(
    tmp_path: Path,
) -> None:
    import_module("tensorboardX")
    run_killed(tmp_path / "killed", "--tensorboard")
    curve = read_tensorboard(tmp_path / "killed" / "tensorboard")
    assert curve == read_losses(tmp_path / "killed")
    assert [step for step, _ in curve] == list(range(1, 71))


def test_tensorboard_files_of_one_second_are_read_in_their_order(
    example: Any, tmp_path: Path
) -> None:
    import_module("tensorboardX")
    log = example.TensorBoardLog(tmp_path)
    for attempt in range(5):
        log.resume("toy", attempt or None)
        for step in range(attempt + 1, attempt + 4):
            log.append(step, {"loss": 10 * attempt + step, "none": None})
        log.sync()
    log.close()
    assert len(list(tmp_path.glob("events.*"))) == 5
    expected = [1, 12, 23, 34, 45, 46, 47]
    assert read_tensorboard(tmp_path) == list(enumerate(expected, start=1))
    assert read_tensorboard(tmp_path, "none") == []


def test_a_fresh_start_voids_the_whole_tensorboard_curve(
    example: Any, tmp_path: Path
) -> None:
    import_module("tensorboardX")
    log = example.TensorBoardLog(tmp_path)
    for value in (1.0, 2.0):
        log.resume("toy", None)
        log.append(0, {"loss": value})
        log.append(1, {"loss": value} if value == 1.0 else {})
    log.close()
    assert read_tensorboard(tmp_path) == [(0, 2.0)]


def test_a_torn_event_is_no_gap(example: Any, tmp_path: Path) -> None:
    import_module("tensorboardX")
    log = example.TensorBoardLog(tmp_path)
    log.resume("toy", None)
    for step in range(1, 6):
        log.append(step, {"loss": float(step)})
    log.close()
    (file,) = tmp_path.glob("events.*")
    os.truncate(file, file.stat().st_size - 5)
    assert read_tensorboard(tmp_path) == [(step, step) for step in range(1, 5)]
    log.resume("toy", 3)
    log.append(4, {"loss": 40.0})
    log.close()
    assert read_tensorboard(tmp_path) == [(1, 1), (2, 2), (3, 3), (4, 40)]


def test_what_tensorboard_was_given_before_a_sync_survives_a_kill(
    tmp_path: Path,
) -> None:
    import_module("tensorboardX")
    code = (
        "import os, signal, sys\nfrom pathlib import Path\n"
        "from resumed_logs import TensorBoardLog\n"
        "log = TensorBoardLog(Path(sys.argv[1]))\nlog.resume('toy', None)\n"
        "for step in range(50): log.append(step, {'loss': step})\n"
        "log.sync()\nos.kill(os.getpid(), signal.SIGKILL)"
    )
    done = run_code(code, tmp_path)
    assert done.returncode == -signal.SIGKILL
    assert read_tensorboard(tmp_path) == [(step, step) for step in range(50)]


def test_the_tensorboard_log_of_another_run_is_refused(
    example: Any, tmp_path: Path
) -> None:
    import_module("tensorboardX")
    log = example.TensorBoardLog(tmp_path)
    log.resume("run-b", None)
    log.append(1, {"loss": 1.0})
    log.close()
    before = sorted(tmp_path.iterdir())
    with pytest.raises(InvalidArgumentError) as caught:
        example.TensorBoardLog(tmp_path).resume("run-a", 1)
    assert str(caught.value) == (
        f"{tmp_path}: its log is of the run 'run-b', not of 'run-a'\n"
        "To mend: log to another directory"
    )
    assert sorted(tmp_path.iterdir()) == before


def test_a_claim_that_a_kill_tore_is_made_again(example: Any, tmp_path: Path) -> None:
    (tmp_path / "run_id").touch()
    example.claim_directory(tmp_path, "run-a")
    assert (tmp_path / "run_id").read_text() == "run-a"


# Weights & Biases


def read_records(data: bytes) -> Iterator[bytes]:
    """Split one of wandb's files: LevelDB's log format behind seven bytes."""
    at, joined = 7, b""
    while at + 7 <= len(data):
        if (left := 32_768 - at % 32_768) < 7:
            at += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        if kind == 0:
            return
        joined += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # the whole, or its last part
            yield joined
            joined = b""


def read_wandb(file: Path) -> list[tuple[int, float]]:
    """Read a curve out of what wandb keeps for the service."""
    messages = import_module("wandb.proto.wandb_internal_pb2")
    curve: list[tuple[int, float]] = []
    for data in read_records(file.read_bytes()):
        record = messages.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = {
                item.key or item.nested_key[0]: item.value_json
                for item in record.history.item
            }
            curve.append((record.history.step.num, float(items["loss"])))
    return curve


def test_offline_the_last_wandb_log_of_a_killed_run_is_the_whole_curve(
    tmp_path: Path,
) -> None:
    import_module("wandb")
    run_killed(tmp_path / "killed", "--wandb")
    files = (tmp_path / "killed" / "wandb" / "wandb").glob("offline-run-*/*.wandb")
    found = sorted(files, key=lambda file: file.stat().st_ctime_ns)
    assert [file.name for file in found] == ["run-toy.wandb"] * 3
    curve = read_wandb(found[-1])
    assert [step for step, _ in curve] == list(range(1, 71))
    np.testing.assert_allclose(
        [loss for _, loss in curve],
        [loss for _, loss in read_losses(tmp_path / "killed")],
    )


def test_a_wandb_run_of_another_id_that_is_open_is_refused(tmp_path: Path) -> None:
    import_module("wandb")
    prelude = f"import wandb; wandb.init(id='other', dir={str(tmp_path)!r})\n"
    done = run_code(prelude + KILLED, NEVER, tmp_path / "run", "--wandb")
    assert done.returncode == 1
    assert "wandb's run 'other' is open, not 'toy'" in done.stderr


class Service:
    """Stands for wandb and its service, as their documentation describes them.

    It keeps the first of two rows of a step, and knows no run that was not begun.
    """

    def __init__(self) -> None:
        self.runs: dict[str, dict[int, Mapping[str, Any]]] = {}
        self.run: Any = None
        self.inits: list[dict[str, Any]] = []

    def init(self, *, id: str, resume: str, **settings: Any) -> Any:
        self.inits.append({"id": id, "resume": resume, **settings})
        if resume == "must" and id not in self.runs:
            raise LookupError(f"no run {id}")
        rows = self.runs.setdefault(id, {})

        def log(values: Mapping[str, Any], *, step: int) -> None:
            if step > max(rows, default=-1):
                rows[step] = values

        def finish() -> None:
            self.run = None

        start = max(rows, default=-1) + 1
        self.run = types.SimpleNamespace(
            id=id, log=log, finish=finish, starting_step=start
        )
        return self.run


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Service:
    service = Service()
    monkeypatch.setitem(sys.modules, "wandb", service)  # type: ignore[arg-type]
    return service


def metrics_of(step: int, scale: int) -> dict[str, Any]:
    return {"loss": scale / step} | ({"rare": step} if step % 3 == 0 else {})


def log_steps(logs: list[Any], first: int, last: int, scale: int) -> None:
    for step, log in itertools.product(range(first, last + 1), logs):
        log.append(step, {"rare": None} | metrics_of(step, scale))


@pytest.mark.parametrize("sent", [1, 4, 6, 8])
def test_online_a_resumed_wandb_run_has_no_overlap_and_no_gap(
    example: Any, tmp_path: Path, service: Service, sent: int
) -> None:
    record = tmp_path / "metrics.csv"
    logs = [
        MetricsLog(record),
        example.WandbLog(tmp_path / "wandb", record, project="p"),
    ]
    for log in logs:
        log.resume("toy", None)
    log_steps(logs, 1, 8, scale=1)
    # the run is killed; its newest checkpoint is of step 6, and this much was sent
    service.runs["toy"] = {
        step: service.runs["toy"][step] for step in range(1, sent + 1)
    }
    logs[0].close()
    service.run = None
    resumed = [
        example.WandbLog(tmp_path / "wandb", record, project="p"),
        MetricsLog(record),
    ]
    for log in resumed:
        log.resume("toy", 6)
    log_steps(resumed, 7, 10, scale=2)  # to see which of two rows is kept
    for log in resumed:
        log.close()
    assert service.runs["toy"] == {
        step: metrics_of(step, scale=1 if step <= max(6, sent) else 2)
        for step in range(1, 11)
    }
    settings = {"dir": str(tmp_path / "wandb"), "project": "p"}
    assert service.inits == [
        {"id": "toy", "resume": "allow", **settings},
        {"id": "toy", "resume": "must", **settings},
    ]


def test_a_wandb_run_that_the_service_does_not_know_is_not_resumed(
    example: Any, tmp_path: Path, service: Service
) -> None:
    log = example.WandbLog(tmp_path / "wandb", tmp_path / "metrics.csv")
    with pytest.raises(LookupError, match="no run toy"):
        log.resume("toy", 3)


def test_the_wandb_log_of_another_run_is_refused(
    example: Any, tmp_path: Path, service: Service
) -> None:
    log = example.WandbLog(tmp_path, tmp_path / "metrics.csv")
    log.resume("run-b", None)
    log.close()
    with pytest.raises(InvalidArgumentError, match="the run 'run-b', not of 'run-a'"):
        example.WandbLog(tmp_path, tmp_path / "metrics.csv").resume("run-a", 1)
    assert len(service.inits) == 1
