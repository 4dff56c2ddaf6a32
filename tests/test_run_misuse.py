"""Loops that are written otherwise: nothing is lost, falsified or silently skipped."""

import logging
import math
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from ajaxckpt import (
    BackgroundSaveError,
    InvalidArgumentError,
    KeepBest,
    KeepLast,
    LayoutMismatchError,
    MetricsLog,
    Run,
    RunLockedError,
    SaveEvery,
    SaveOnImprovement,
    StepExistsError,
    read_metrics,
    save_checkpoint,
)


def state(step: int) -> dict[str, Any]:
    return {"step": step, "w": jnp.full(3, float(step))}


def open_run(directory: Path, **options: Any) -> Run:
    return Run(directory, **{"signals": (), **options})


def steps(directory: Path) -> list[int]:
    return [entry.step for entry in Run(directory).list()]


@pytest.mark.parametrize("odd", [math.inf, -math.inf, math.nan])
def test_a_config_of_any_float_is_resumed(tmp_path: Path, odd: float) -> None:
    config = {"clip": odd, "lr": 1e-3}
    for expected in (None, 1):
        with open_run(tmp_path, config=config) as run:
            start = run.restore_or_init(state(0))
            assert start.step == expected
            assert not [note for note in start.notes if "config" in note]
            run.step(state(1), step=1)


@pytest.mark.parametrize("nothing", [None, {}, {"a": {}}])
def test_a_state_without_leaves_never_takes_the_place_of_a_good_one(
    tmp_path: Path, nothing: Any
) -> None:
    with open_run(tmp_path, save=SaveEvery(steps=10), keep=KeepLast(1)) as run:
        run.step(state(10), step=10)
        with pytest.raises(InvalidArgumentError, match="the state has no leaves"):
            run.step(nothing, step=11)
    assert steps(tmp_path) == [10]


def test_a_later_file_put_there_meanwhile_costs_no_accepted_save(
    tmp_path: Path,
) -> None:
    with open_run(tmp_path, keep=KeepLast(1), on_exit=False) as run:
        run.step(state(1), step=1)
        run.wait()
        save_checkpoint(state(50), tmp_path / "extern.safetensors", step=50)
        with pytest.raises(StepExistsError, match="step 2 lies before step 50, which"):
            run.step(state(2), step=2)
    assert steps(tmp_path) == [1, 50]


def test_what_was_just_saved_is_never_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ajaxckpt._run_files import RunFiles

    with open_run(tmp_path, keep=KeepLast(1)) as run:
        every = lambda self, policies: list(self.entries())  # noqa: E731
        monkeypatch.setattr(RunFiles, "choose_removals", every)
        run.step(state(1), step=1)
        run.step(state(2), step=2)
    assert steps(tmp_path) == [2]


@pytest.mark.parametrize("how", ["end", "raise", "stop"])
def test_numpy_arrays_written_after_the_last_step_are_not_saved_as_that_step(
    tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    weights = {"w": np.zeros(3)}
    with (
        caplog.at_level(logging.WARNING, "ajaxckpt"),
        pytest.raises(ZeroDivisionError if how == "raise" else KeyError),
        open_run(tmp_path, save=SaveEvery(steps=10)) as run,
    ):
        for step in range(1, 15):
            weights["w"] += 1
            if step == 14:
                break
            run.step(weights, step=step)
        if how == "stop":
            run.request_stop()
        if how == "raise":
            raise ZeroDivisionError
        raise KeyError
    assert steps(tmp_path) == [10]
    assert "step 13, reported last, was not saved: numpy arrays" in caplog.text
    assert run.restore({"w": np.zeros(3)}).state["w"].tolist() == [10.0] * 3


def test_numpy_arrays_that_are_as_they_were_are_saved_at_the_end(
    tmp_path: Path,
) -> None:
    with (
        pytest.raises(KeyError),
        open_run(tmp_path, save=SaveEvery(steps=10)) as run,
    ):
        for step in range(1, 14):
            run.step({"w": np.full(3, float(step))}, step=step)
        raise KeyError
    assert steps(tmp_path) == [10, 13]
    assert run.restore({"w": np.zeros(3)}).state["w"].tolist() == [13.0] * 3


@pytest.mark.parametrize("policy", [SaveOnImprovement("retrun", "max"), SaveEvery()])
def test_metrics_are_checked_at_every_step_due_or_not(
    tmp_path: Path, policy: Any
) -> None:
    keep = [KeepLast(1), KeepBest("retrun", "max")]
    with open_run(tmp_path, save=policy, keep=keep) as run:
        with pytest.raises(InvalidArgumentError, match="'retrun', which a policy nam"):
            run.step(state(1), step=1, metrics={"return": 1.0})
        with pytest.raises(InvalidArgumentError, match=r"metrics\.loss"):
            run.step(state(1), step=1, metrics={"loss": jnp.ones(3), "retrun": 1.0})


def test_metrics_that_cannot_be_measured_at_the_end_cost_no_state(
    tmp_path: Path,
) -> None:
    with (
        pytest.raises(ZeroDivisionError),
        open_run(tmp_path, save=SaveEvery(steps=1000)) as run,
    ):
        for step in range(1, 6):
            run.step(state(step), step=step, metrics=lambda: {"loss": 1 / 0})
    assert steps(tmp_path) == [5]


@pytest.mark.parametrize("what", ["moved", "removed", "replaced", "its lock removed"])
def test_a_run_whose_directory_is_gone_saves_nowhere_else(
    tmp_path: Path, what: str
) -> None:
    place, moved = tmp_path / "run", tmp_path / "moved"
    with pytest.raises(BackgroundSaveError) as caught, open_run(place) as run:
        run.step(state(1), step=1)
        run.wait()
        if what == "its lock removed":
            (place / f".ajaxckpt-run-{run.run_id}.lock").unlink()
        else:
            os.rename(place, moved)
        if what == "removed":
            shutil.rmtree(moved)
        if what == "replaced":
            place.mkdir()
        run.step(state(2), step=2)
        run.wait()
    assert isinstance(caught.value.__cause__, RunLockedError)
    assert "the run is not where it was opened" in str(caught.value)
    assert not list(place.glob("step-2*"))
    if what == "moved":
        assert not place.exists() and steps(moved) == [1]


def test_a_step_that_does_not_move_on_is_told(tmp_path: Path) -> None:
    with open_run(tmp_path, on_exit=False) as run:
        run.step(state(1), step=7)
        assert not run.step(state(1), step=7).saved  # the same content
        with pytest.raises(StepExistsError, match="step 7 is saved already, with ano"):
            run.step(state(2), step=7)
    with open_run(tmp_path, on_exit=False) as run:
        run.restore_or_init(state(0))
        with pytest.raises(StepExistsError, match="step 7 is saved already, with ano"):
            run.step(state(3), step=7)
    assert run.restore(state(0)).state["step"] == 1


def test_after_a_layout_that_did_not_fit_no_save_is_accepted(tmp_path: Path) -> None:
    with open_run(tmp_path) as run:
        run.step(state(1), step=1)
    other = {"step": 5, "w": jnp.zeros(4)}
    with open_run(tmp_path, keep=KeepLast(1)) as run:
        with pytest.raises(LayoutMismatchError):
            run.restore_or_init(other)
        with pytest.raises(StepExistsError, match="nothing was restored, and the run"):
            run.step(other, step=5)
        assert run.restore_or_init(state(0)).step == 1
        assert run.step(state(2), step=2).saved
    assert steps(tmp_path) == [2]


def test_one_log_and_one_signal_stand_for_themselves(tmp_path: Path) -> None:
    import signal

    log = MetricsLog(tmp_path / "metrics.csv")
    with Run(tmp_path, logs=log, signals=signal.SIGUSR1) as run:
        run.restore_or_init(state(0))
        run.log(1, {"loss": 2.0})
        signal.raise_signal(signal.SIGUSR1)
        assert run.stop_signal == "SIGUSR1"
    assert read_metrics(tmp_path / "metrics.csv")[0]["loss"] == 2.0


@pytest.mark.parametrize("code", [-1, 256, True, "75"])
def test_an_exit_code_that_no_process_has_is_refused(tmp_path: Path, code: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="exit_code"):
        Run(tmp_path, exit_code=code)


def test_readers_beside_a_live_writer_get_true_answers(tmp_path: Path) -> None:
    stop, wrong = threading.Event(), list[str]()

    def read() -> None:
        try:
            while not stop.is_set():
                run = Run(tmp_path, signals=(), config=None)
                found = [run.best("m", "max"), run.newest(), run.config]
                if None in found:
                    wrong.append(f"{found}")
                run.restore(state(0))
                run.restore_best(state(0), metric="m", mode="max")
        except Exception as error:
            wrong.append(repr(error))

    with open_run(tmp_path, keep=KeepLast(1), config={"a": 1}) as run:
        run.step(state(1), step=1, metrics={"m": 1.0})
        run.wait()
        readers = [threading.Thread(target=read) for _ in range(2)]
        for reader in readers:
            reader.start()
        for step in range(2, 80):
            run.step(state(step), step=step, metrics={"m": float(step)})
        run.wait()
        stop.set()
        for reader in readers:
            reader.join()
    assert wrong == []


def test_a_misspelled_metric_removes_nothing(tmp_path: Path) -> None:
    with open_run(tmp_path) as run:
        for step in range(1, 5):
            run.step(state(step), step=step, metrics={"m": float(-step)})
        with pytest.raises(InvalidArgumentError, match="has the metric 'retrun'"):
            run.prune(KeepBest("retrun", "max"))
    with open_run(tmp_path, keep=KeepBest("new_name", "max")) as run:
        run.restore_or_init(state(0))
        run.step(state(5), step=5, metrics={"new_name": 1.0})
    assert steps(tmp_path) == [1, 2, 3, 4, 5]


def test_no_policies_at_all_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="would keep nothing but the newest"):
        Run(tmp_path, keep=[])
    with pytest.raises(InvalidArgumentError, match="would keep nothing but the newest"):
        Run(tmp_path).prune([], dry_run=True)


def test_a_save_in_the_foreground_that_failed_is_not_reported_as_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import errno

    from ajaxckpt import _files

    def full(*args: Any) -> int:
        raise OSError(errno.EDQUOT, "quota")

    options: dict[str, Any] = {"background": False, "on_error": "warn", "retries": 0}
    with open_run(tmp_path, on_exit=False, **options) as run:
        assert run.step(state(1), step=1).saved
        with monkeypatch.context() as patch:
            patch.setattr(_files, "_write_some", full)
            report = run.step(state(2), step=2)
        assert (report.saved, report.path) == (False, "")
        assert [failure.step for failure in run.failures] == [2]
        assert run.step(state(3), step=3).saved
    assert steps(tmp_path) == [1, 3]


def test_verify_beside_a_live_run_finds_nothing_that_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from ajaxckpt import _opening
    from ajaxckpt._cli import main

    with open_run(tmp_path) as run:
        for step in (1, 2):
            run.step(state(step), step=step)
    real = _opening.verify_checkpoint

    def verify(path: str) -> Any:
        if path.endswith("step-1.safetensors"):
            os.unlink(path)  # as a run does meanwhile
        return real(path)

    monkeypatch.setattr(_opening, "verify_checkpoint", verify)
    assert main(["verify", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "step-2" in shown and "step-1" not in shown
    assert "gone" not in shown and "paths" not in shown  # one file, no summary
