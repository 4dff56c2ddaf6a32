"""The main job: an agent trained in chunks, killed at will, resumed bit for bit."""

import random
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import pytest

from ajaxckpt import open_checkpoint

EXAMPLES = Path(__file__).parent.parent / "examples"
SAC = str(EXAMPLES / "sac_pendulum.py")
KILLED = str(Path(__file__).parent / "_killed_example.py")
LAST_LINE = re.compile(r"^digest: ([0-9a-f]{32})$")


@pytest.fixture
def sac(monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import sac_pendulum

    with jax.numpy_rank_promotion("allow"):  # flax adds its biases by promotion
        yield sac_pendulum


def run(*command: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=300
    )


def digest_of(output: str) -> str:
    match = LAST_LINE.match(output.strip().splitlines()[-1])
    assert match, output
    return match[1]


def arguments(path: Path, total: int, chunk: int) -> list[str]:
    return [
        *("--path", str(path), "--total-timesteps", str(total)),
        *("--chunk", str(chunk), "--eval-episodes", "1"),
    ]


def test_starts_resumes_and_ends_with_the_same_digest(
    sac, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, split = tmp_path / "whole.safetensors", tmp_path / "split.safetensors"
    assert sac.main(arguments(whole, 60, 20)) == 0
    unbroken = capsys.readouterr().out
    assert f"starting: no checkpoint at {whole}" in unbroken
    assert re.search(r"step +60/60 +\d+ steps/s", unbroken)
    assert "mean return of 1 evaluation episodes:" in unbroken

    assert sac.main(arguments(split, 20, 20)) == 0
    capsys.readouterr()
    assert sac.main(arguments(split, 60, 20)) == 0
    resumed = capsys.readouterr().out
    assert f"resuming at step 20 from {split}" in resumed
    assert digest_of(resumed) == digest_of(unbroken)

    assert sac.main(arguments(split, 60, 20)) == 0
    finished = capsys.readouterr().out
    assert "resuming at step 60" in finished
    assert "steps/s" not in finished
    assert digest_of(finished) == digest_of(unbroken)


def test_refuses_a_checkpoint_of_another_run(
    sac, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.safetensors"
    assert sac.main(arguments(path, 20, 20)) == 0
    before = path.read_bytes()
    with pytest.raises(SystemExit) as stopped:
        sac.main([*arguments(path, 20, 20), "--seeds", "5", "6"])
    assert stopped.value.code == 2
    assert "seeds was [0, 1], now [5, 6]" in capsys.readouterr().err
    assert path.read_bytes() == before


def test_evaluate_rebuilds_the_agent_from_the_file_alone(
    sac, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import evaluate  # beside sac_pendulum

    path = tmp_path / "run.safetensors"
    assert sac.main(arguments(path, 20, 20)) == 0
    trained = capsys.readouterr().out
    returns = re.search(r"evaluation episodes: (.+)", trained)
    assert returns
    assert evaluate.main([str(path), "--episodes", "1"]) == 0
    shown = capsys.readouterr().out
    assert "Pendulum-v1, seeds [0, 1], step 20" in shown
    assert f"mean return of 1 episodes: {returns[1]}" in shown


def kill_after_a_further_checkpoint(
    command: Sequence[str], path: Path, rng: random.Random
) -> int:
    """SIGKILL a run at a random moment after its next checkpoint; return its step."""
    process = subprocess.Popen(
        [sys.executable, *command], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step"):
            break
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=rng.uniform(0.0, 0.4))
    process.kill()
    assert process.wait() == -signal.SIGKILL
    process.stdout.close()
    return saved_step(path)


def saved_step(path: Path) -> int:
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.step is not None
        return checkpoint.step


def temps(directory: Path) -> list[Path]:
    return list(directory.glob(".ajaxckpt-*.tmp"))


@pytest.mark.slow
def test_killed_at_will_it_ends_where_the_unbroken_run_ends(tmp_path: Path) -> None:
    total, chunk, rng = 6_000, 300, random.Random(1)
    whole = run(SAC, *arguments(tmp_path / "whole.safetensors", total, chunk))
    path = tmp_path / "killed" / "run.safetensors"
    command = [SAC, *arguments(path, total, chunk)]
    steps = [0]
    for moment in (None, "before-rename", None, "after-first-write", None):
        if moment is None:
            steps.append(kill_after_a_further_checkpoint(command, path, rng))
        else:
            died = run(KILLED, "2", moment, *command)
            assert died.returncode == -signal.SIGKILL, died.stderr
            assert f"resuming at step {steps[-1]} " in died.stdout
            assert len(temps(path.parent)) == 1
            steps.append(saved_step(path))
    assert steps == sorted(set(steps)), "a further checkpoint before each kill"
    print(f"killed {len(steps) - 1} times, at steps {steps[1:]}")
    last = run(*command)
    assert f"resuming at step {steps[-1]} " in last.stdout
    assert digest_of(last.stdout) == digest_of(whole.stdout)
    assert temps(path.parent) == []


@pytest.mark.slow
def test_it_learns_within_two_minutes(tmp_path: Path) -> None:
    done = run(SAC, "--path", str(tmp_path / "run.safetensors"))
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
