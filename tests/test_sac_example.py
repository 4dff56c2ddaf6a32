"""The main job: an agent trained in chunks, killed at will, resumed bit for bit."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import pytest

from ajaxckpt import Run, open_checkpoint, read_metrics

EXAMPLES = Path(__file__).parent.parent / "examples"
SAC = str(EXAMPLES / "sac_pendulum.py")
KILLED = str(Path(__file__).parent / "_killed_example.py")
LAST_LINE = re.compile(r"^digest: ([0-9a-f]{32})$")
START_AGAIN = 75  # EX_TEMPFAIL


@pytest.fixture
def sac(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import sac_pendulum

    with jax.numpy_rank_promotion("allow"):  # flax adds its biases by promotion
        yield sac_pendulum


@pytest.fixture
def untrained(sac: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the example with an agent that counts its steps and learns nothing."""

    def count(config: object, state: Any, n: Any) -> Any:
        return state.replace(step=state.step + n)

    init_agent = sac.init_agent  # compiled once, for the default config
    monkeypatch.setattr(sac, "init_agent", lambda config: init_agent(sac.Config()))
    monkeypatch.setattr(sac, "train_chunk", count)
    monkeypatch.setattr(sac, "evaluate", lambda *args: jax.numpy.zeros(2))
    return sac


def run(*command: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=600
    )


def digest_of(output: str) -> str:
    match = LAST_LINE.match(output.strip().splitlines()[-1])
    assert match, output
    return match[1]


def arguments(directory: Path, total: int, chunk: int) -> list[str]:
    return [
        *("--run", str(directory), "--total-timesteps", str(total)),
        *("--chunk", str(chunk), "--eval-episodes", "1"),
    ]


def curve(directory: Path) -> list[str]:
    """Return the recorded rows, without the run's id, as text: NaN equals NaN."""
    rows = read_metrics(directory / "metrics.csv")
    assert len({row.pop("run_id") for row in rows}) == 1
    return [repr(row) for row in rows]


def recorded_steps(directory: Path) -> list[object]:
    return [row["step"] for row in read_metrics(directory / "metrics.csv")]


def saved_steps(directory: Path) -> list[int]:
    return [entry.step for entry in Run(directory).list()]


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_starts_resumes_and_ends_with_the_same_digest_and_curve(
    sac: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, split = tmp_path / "whole", tmp_path / "split"
    assert sac.main(arguments(whole, 100, 20)) == 0
    unbroken = capsys.readouterr().out
    assert f"starting: no checkpoint in {whole}" in unbroken
    assert re.search(r"step +100/100 +\d+ steps/s", unbroken)
    assert "mean return of 1 evaluation episodes:" in unbroken
    assert recorded_steps(whole) == [20, 40, 60, 80, 100]
    assert saved_steps(whole) == [60, 80, 100]

    assert sac.main(arguments(split, 40, 20)) == 0
    capsys.readouterr()
    assert sac.main(arguments(split, 100, 20)) == 0
    resumed = capsys.readouterr().out
    assert f"resuming at step 40 from {split}" in resumed
    assert digest_of(resumed) == digest_of(unbroken)
    assert curve(split) == curve(whole)

    assert sac.main(arguments(split, 100, 20)) == 0
    finished = capsys.readouterr().out
    assert "resuming at step 100" in finished
    assert "steps/s" not in finished
    assert digest_of(finished) == digest_of(unbroken)
    assert curve(split) == curve(whole)


def test_sigterm_stops_it_at_the_end_of_a_chunk_with_a_checkpoint(
    sac: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert sac.main(arguments(whole, 80, 20)) == 0
    unbroken = capsys.readouterr().out

    handler = signal.getsignal(signal.SIGTERM)
    train_chunk = sac.train_chunk

    def signalled(config: object, state: Any, n: Any) -> Any:
        if int(state.step[0]) == 20:
            os.kill(os.getpid(), signal.SIGTERM)
        return train_chunk(config, state, n)

    with monkeypatch.context() as patched:
        patched.setattr(sac, "train_chunk", signalled)
        with pytest.raises(SystemExit) as left:
            sac.main(arguments(stopped, 80, 20))
    assert left.value.code == START_AGAIN
    assert signal.getsignal(signal.SIGTERM) is handler
    printed = capsys.readouterr().out
    assert "stopped by SIGTERM: start the same command again" in printed
    assert "digest" not in printed
    assert saved_steps(stopped) == recorded_steps(stopped) == [20, 40]

    assert sac.main(arguments(stopped, 80, 20)) == 0
    assert digest_of(capsys.readouterr().out) == digest_of(unbroken)
    assert curve(stopped) == curve(whole)


def test_refuses_a_checkpoint_of_another_run(
    untrained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert untrained.main(arguments(tmp_path, 20, 20)) == 0
    before = contents(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        untrained.main([*arguments(tmp_path, 20, 20), "--seeds", "5", "6"])
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert f"refused: {tmp_path} is of another run" in error
    assert "seeds was [0, 1], now [5, 6]" in error
    assert contents(tmp_path) == before


def test_resumes_with_the_saved_config_and_shows_what_is_overridden(
    untrained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert untrained.main([*arguments(tmp_path, 40, 20), "--seeds", "7", "8"]) == 0
    capsys.readouterr()
    overrides = ["total_timesteps=80", "learning_rate=1e-3"]
    command = ["--resume", str(tmp_path), *overrides, "--chunk", "20"]
    assert untrained.main(command) == 0
    printed = capsys.readouterr().out
    assert "overridden: total_timesteps: 40 then, 80 now" in printed
    assert "overridden: learning_rate: 0.002 then, 0.001 now" in printed
    assert f"resuming at step 40 from {tmp_path}" in printed
    assert recorded_steps(tmp_path) == [20, 40, 60, 80]
    newest = Run(tmp_path).newest()
    assert newest is not None
    with open_checkpoint(newest.path) as checkpoint:
        config = untrained.config_from(checkpoint.config)
    assert config == untrained.Config(seeds=(7, 8), learning_rate=1e-3)
    assert config.total_timesteps == 80

    # now these are the run's own: nothing differs, and the defaults are refused
    assert untrained.main(command) == 0
    assert "overridden" not in capsys.readouterr().out
    with pytest.raises(SystemExit) as stopped:
        untrained.main([*arguments(tmp_path, 80, 20), "--seeds", "7", "8"])
    assert stopped.value.code == 2
    assert "learning_rate was 0.001, now 0.002" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("learningrate=1e-3", "the config has no learningrate"),
        ("batch_size=large", "batch_size"),
        ("batch_size", "key=value"),
        ("+note=warm", "unexpected keyword argument 'note'"),
    ],
)
def test_refuses_an_override_that_makes_no_config(
    untrained: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    override: str,
    problem: str,
) -> None:
    assert untrained.main(arguments(tmp_path, 20, 20)) == 0
    before = contents(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        untrained.main(["--resume", str(tmp_path), override])
    assert stopped.value.code == 2
    assert problem in capsys.readouterr().err
    assert contents(tmp_path) == before


def test_a_run_that_died_before_its_first_checkpoint_begins_again(
    untrained: Any, tmp_path: Path
) -> None:
    assert untrained.main(arguments(tmp_path, 20, 20)) == 0
    before = curve(tmp_path)
    Path(Run(tmp_path).path(20)).unlink()  # what is left then: locks and rows
    assert untrained.main(arguments(tmp_path, 20, 20)) == 0
    assert curve(tmp_path) == before


def test_refuses_to_resume_where_no_run_is(
    untrained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        untrained.main(["--resume", str(tmp_path / "none"), "batch_size=8"])
    assert stopped.value.code == 2
    assert "refused: cannot resume" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_evaluate_rebuilds_the_agent_from_the_file_alone(
    sac: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import evaluate  # beside sac_pendulum

    assert sac.main(arguments(tmp_path, 20, 20)) == 0
    trained = capsys.readouterr().out
    returns = re.search(r"evaluation episodes: (.+)", trained)
    assert returns
    assert evaluate.main([Run(tmp_path).path(20), "--episodes", "1"]) == 0
    shown = capsys.readouterr().out
    assert "Pendulum-v1, seeds [0, 1], step 20" in shown
    assert f"mean return of 1 episodes: {returns[1]}" in shown


# when three chunks are reported, the first is durable: at most two wait for the disk
REPORTS = 3


def signal_after_a_further_checkpoint(
    command: Sequence[str], number: signal.Signals, rng: random.Random
) -> str:
    """Signal a run at a random moment after its next checkpoint; return its output."""
    process = subprocess.Popen(
        [sys.executable, *command], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    printed, reports = "", 0
    while reports < REPORTS:
        line = process.stdout.readline()
        assert line, f"it ended too early:\n{printed}"
        printed += line
        reports += line.startswith("step")
    time.sleep(rng.uniform(0.0, 0.4))
    process.send_signal(number)
    printed += process.stdout.read()
    process.stdout.close()
    expected = START_AGAIN if number == signal.SIGTERM else -number
    assert process.wait() == expected, printed
    return printed


def temps(directory: Path) -> list[Path]:
    return list(directory.glob(".ajaxckpt-*.tmp"))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_killed_at_will_it_ends_where_the_unbroken_run_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # as a cluster would have it: only the first process compiles
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "compiled"))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    total, chunk, rng = 3_900, 150, random.Random(1)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    unbroken = run(SAC, *arguments(whole, total, chunk))
    command = [SAC, *arguments(killed, total, chunk)]
    steps = [0]
    for moment in (
        *(signal.SIGKILL, "before-rename", signal.SIGTERM, "after-first-write"),
        *(signal.SIGKILL, "before-removal"),
    ):
        if isinstance(moment, signal.Signals):
            printed = signal_after_a_further_checkpoint(command, moment, rng)
            left = 0 if moment == signal.SIGTERM else None
        else:
            died = run(KILLED, "4", moment, *command)
            assert died.returncode == -signal.SIGKILL, died.stderr
            printed = died.stdout
            left = 0 if moment == "before-removal" else 1
        assert steps[-1] == 0 or f"resuming at step {steps[-1]} " in printed
        if left is not None:
            assert len(temps(killed)) == left
        steps.append(saved_steps(killed)[-1])
        reported = re.findall(r"^step +(\d+)/", printed, re.MULTILINE)
        if moment == signal.SIGTERM:  # it lost nothing
            assert steps[-1] == int(reported[-1])
            assert "stopped by SIGTERM" in printed
        if moment == "before-rename":  # rows that the restored state must not keep
            assert recorded_steps(killed)[-1] > steps[-1]
    assert steps == sorted(set(steps)), "a further checkpoint before each kill"
    print(f"killed {len(steps) - 1} times, at steps {steps[1:]}")
    last = run(*command)
    assert f"resuming at step {steps[-1]} " in last.stdout
    assert digest_of(last.stdout) == digest_of(unbroken.stdout)
    assert curve(killed) == curve(whole)
    assert recorded_steps(killed) == list(range(chunk, total + 1, chunk))
    assert saved_steps(killed) == saved_steps(whole)
    assert temps(killed) == []


@pytest.mark.slow
def test_it_learns_within_two_minutes(tmp_path: Path) -> None:
    done = run(SAC, "--run", str(tmp_path))
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    chunks = re.findall(r"^step +(\d+)/\d+ +(\d+) steps/s", done.stdout, re.MULTILINE)
    steps = [0, *(int(step) for step, _ in chunks)]
    seconds = sum(
        (now - before) / int(rate)
        for before, now, (_, rate) in zip(steps, steps[1:], chunks, strict=False)
    )
    assert seconds <= 120
    found = re.search(r"mean return of 10 evaluation episodes: (.+)", done.stdout)
    assert found
    returns = [float(text) for text in found[1].split()]
    assert len(returns) == 2
    assert min(returns) >= -400  # a random policy gets about -1200
