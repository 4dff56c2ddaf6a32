"""The example of a scheduler: whatever it does to a job, the job ends the same."""

import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ajaxckpt import read_metrics, state_digest

EXAMPLES = Path(__file__).parent.parent / "examples"
START_AGAIN = 75  # EX_TEMPFAIL
EXIT_CODES = {
    "SIGTERM": START_AGAIN,
    "SIGTERM, soon SIGKILL": -signal.SIGKILL,
    "SIGKILL": -signal.SIGKILL,
}


@pytest.fixture
def requeue(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import requeue

    yield requeue


class Start(NamedTuple):
    first_step: int
    kind: str
    last_step: int
    code: int


def read_starts(printed: str) -> list[Start]:
    found = re.findall(
        r"^from step (\d+): (.+) at 'step (\d+)', exit code (-?\d+)$",
        printed,
        re.MULTILINE,
    )
    return [Start(int(a), kind, int(b), int(code)) for a, kind, b, code in found]


def curve(directory: Path) -> list[tuple[object, object]]:
    return [
        (row["step"], row["loss"]) for row in read_metrics(directory / "metrics.csv")
    ]


def train_alone(requeue: Any, steps: int) -> tuple[str, list[tuple[object, object]]]:
    """Train in this process, with no run, files or signals."""
    state, rows = requeue.init_state(), []
    for step in range(1, steps + 1):
        state, loss = requeue.train(state)
        rows.append((step, float(loss)))
    return state_digest(state), rows


def check_preempted(
    requeue: Any, printed: str, directory: Path, preemptions: int
) -> list[Start]:
    """Check a whole session; return the starts that were preempted."""
    *told, alone, preempted = printed.splitlines()
    steps = requeue.STEPS_PER_START * (preemptions + 1)
    digest, rows = train_alone(requeue, steps)
    assert alone.split() == ["left", "alone", "digest:", digest]
    assert preempted.split() == ["preempted", "digest:", digest]
    assert curve(directory / "alone") == curve(directory / "preempted") == rows

    starts = read_starts(printed)
    assert len(starts) == preemptions == len(told) - 1
    assert re.fullmatch(r"from step \d+: left alone at .+, exit code 0", told[-1])
    last_start = int(told[-1].split(":")[0].removeprefix("from step "))
    resumed = [*(start.first_step for start in starts[1:]), last_start]
    for start, next_first in zip(starts, resumed, strict=True):
        assert start.code == EXIT_CODES[start.kind]
        if start.kind == "SIGTERM":  # it lost nothing
            assert next_first == start.last_step
        else:  # at most what two saves in the making held, and a step not yet told
            assert start.last_step - 9 <= next_first <= start.last_step + 1
    assert last_start > 0
    return starts


def test_a_job_preempted_in_every_way_ends_as_one_left_alone(
    requeue: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--directory", str(tmp_path), "--preemptions", "4", "--seed", "1"]
    assert requeue.main(arguments) == 0
    starts = check_preempted(requeue, capsys.readouterr().out, tmp_path, 4)
    kinds = Counter(start.kind for start in starts)
    assert kinds == {"SIGTERM": 2, "SIGKILL": 1, "SIGTERM, soon SIGKILL": 1}


@pytest.mark.slow
@pytest.mark.parametrize("seed", [2])
def test_a_job_preempted_many_times_ends_as_one_left_alone(
    requeue: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], seed: int
) -> None:
    arguments = ["--preemptions", "15", "--seed", str(seed)]
    assert requeue.main(["--directory", str(tmp_path), *arguments]) == 0
    starts = check_preempted(requeue, capsys.readouterr().out, tmp_path, 15)
    assert set(Counter(start.kind for start in starts).values()) == {5}


def test_it_fails_where_the_preempted_job_ends_differently(
    requeue: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start_job(directory: Path, steps: int) -> "subprocess.Popen[str]":
        code = f"print('from step 0'); print('digest: {directory.name}')"
        command = [sys.executable, "-c", code]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    monkeypatch.setattr(requeue, "start_job", start_job)
    assert requeue.main(["--directory", str(tmp_path), "--preemptions", "0"]) == 1


@pytest.mark.parametrize("kinds", [[], ["SIGTERM"]])
def test_a_job_that_fails_is_not_started_again(
    requeue: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kinds: list[str]
) -> None:
    started: list[Path] = []

    def start_job(directory: Path, steps: int) -> "subprocess.Popen[str]":
        started.append(directory)
        command = [sys.executable, "-c", "raise SystemExit(3)"]
        job = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        job.wait()
        return job

    monkeypatch.setattr(requeue, "start_job", start_job)
    with pytest.raises(SystemExit, match="the job failed with exit code 3"):
        requeue.supervise(tmp_path, 9, kinds, seed=0)
    assert started == [tmp_path]


def test_the_script_in_the_docstring_uses_the_exit_code(requeue: Any) -> None:
    assert requeue.START_AGAIN == START_AGAIN
    assert f"if [ $code -eq {START_AGAIN} ]; then scontrol requeue" in requeue.__doc__
