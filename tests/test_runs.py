"""A run: restore or begin, report steps, keep what the policies say, go back."""

import math
import os
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from identical import assert_identical

from ajaxckpt import (
    CheckpointNotFoundError,
    InvalidArgumentError,
    KeepBest,
    KeepEvery,
    KeepLast,
    LayoutMismatchError,
    Migrations,
    NoSpaceError,
    NotACheckpointError,
    Run,
    RunLockedError,
    SaveAt,
    SaveEvery,
    SaveOnImprovement,
    StepExistsError,
    UnsupportedLeafError,
    open_checkpoint,
    restore_into,
    save_checkpoint,
)


def state(step: int) -> dict[str, Any]:
    """A state of which every leaf says the step."""
    return {
        "key": jax.random.key(step),
        "replay": np.full(4, step, np.float64),
        "step": step,
        "w": jnp.full(3, step, jnp.float32),
    }


def assert_same(found: Any, expected: Any) -> None:
    assert_identical(found, expected, expected)


def open_run(directory: Path, **options: Any) -> Run:
    return Run(directory, **{"signals": (), "on_exit": False, **options})


def write_run(directory: Path, *steps: int, **options: Any) -> None:
    with open_run(directory, **options) as run:
        run.restore_or_init(lambda: state(0))
        for step in steps:
            run.step(state(step), step=step)


def steps(directory: Path, **options: Any) -> list[int]:
    return [entry.step for entry in open_run(directory, **options).list()]


def flip(path: str | Path, place: int = -1) -> None:
    data = bytearray(Path(path).read_bytes())
    data[place] ^= 1
    Path(path).write_bytes(data)


# --------------------------------------------------------------- restore or begin


def test_an_empty_directory_begins_and_a_filled_one_goes_on(tmp_path: Path) -> None:
    with open_run(tmp_path / "new" / "run") as run:
        start = run.restore_or_init(lambda: state(0))
        assert (start.restored, start.step, start.path) == (False, None, "")
        assert_same(start.state, state(0))
        run.step(state(5), step=5)
    with open_run(tmp_path / "new" / "run") as run:
        again = run.restore_or_init(state(0))
        assert (again.restored, again.step, again.skipped) == (True, 5, ())
        assert again.path == str(tmp_path / "new" / "run" / "step-5.safetensors")
        assert_same(again.state, state(5))


def test_a_state_that_can_be_called_is_a_state(tmp_path: Path) -> None:
    model = eqx.nn.MLP(2, 2, 2, 1, key=jax.random.key(1))
    with open_run(tmp_path) as run:
        assert run.restore_or_init(model).state is model
        run.step(model, step=1)
    other = eqx.nn.MLP(2, 2, 2, 1, key=jax.random.key(2))
    with open_run(tmp_path) as run:
        restored = run.restore_or_init(other).state
        assert_same(restored, model)
        bias = jax.jit(lambda: jnp.zeros(2))  # a function, too
        found = run.restore(bias, step=1, subtree="layers.0.bias")
        assert_same(found.state, model.layers[0].bias)


def test_an_abstract_skeleton_restores_but_cannot_begin(tmp_path: Path) -> None:
    abstract = jax.eval_shape(lambda: {"w": jnp.zeros(3)})
    with open_run(tmp_path) as run:
        with pytest.raises(UnsupportedLeafError) as caught:
            run.restore_or_init(abstract)
        assert "w: an abstract leaf cannot start a run" in str(caught.value)
        run.step({"w": jnp.ones(3)}, step=1)
        run.wait()
        found = run.restore_or_init(abstract)
        assert found.state["w"].tolist() == [1, 1, 1]


def test_a_layout_that_does_not_fit_is_no_damage(tmp_path: Path) -> None:
    write_run(tmp_path, 1, 2)
    with open_run(tmp_path) as run, pytest.raises(LayoutMismatchError) as caught:
        run.restore_or_init({**state(0), "w": jnp.zeros(4, jnp.float32)})
    assert "step-2.safetensors" in str(caught.value)
    assert steps(tmp_path) == [1, 2]


def test_the_runs_migrations_are_recorded_and_applied(tmp_path: Path) -> None:
    write_run(tmp_path, 3)
    migrations = Migrations("agent")
    migrations.step(1, "w is the trunk now").move("w", "trunk")
    skeleton = {**state(0), "trunk": state(0)["w"]}
    del skeleton["w"]
    with open_run(tmp_path, migrations=migrations) as run:
        found = run.restore_or_init(skeleton)
        assert found.state["trunk"].tolist() == [3, 3, 3]
        run.step(found.state, step=4)
        run.wait()
        with open_checkpoint(run.path(4)) as checkpoint:
            assert checkpoint.layouts == {"agent": 1}
        assert run.restore(skeleton).step == 4


def test_notes_say_what_differs_then_and_now(tmp_path: Path) -> None:
    write_run(tmp_path, 7, config={"lr": 1.0, "env": "Pendulum-v1"})
    with open_run(tmp_path, config={"lr": 2.0, "env": "Pendulum-v1"}) as run:
        notes = run.restore_or_init(lambda: state(0)).notes
    assert [n for n in notes if n.startswith("config")] == [
        "config.lr: 1.0 then, 2.0 now"
    ]
    assert not [n for n in notes if "the state's" in n]


def test_a_counter_that_disagrees_with_the_step_is_noted(tmp_path: Path) -> None:
    with open_run(tmp_path) as run:
        run.step({"step": jnp.full(2, 4000), "w": 1.0}, step=5000)
        run.wait()
        skeleton = {"step": jnp.zeros(2, jnp.int32), "w": 0.0}
        notes = run.restore(skeleton).notes
    assert "the checkpoint says step 5000, the state's step 4000" in notes


def test_pieces_of_two_moments_are_reported(tmp_path: Path) -> None:
    write_run(tmp_path, 1, 2)
    run = open_run(tmp_path)
    whole = run.restore(state(0), step=2)
    assert whole.state["step"] == 2
    run.restore(jnp.zeros(3), step=2, subtree="w")
    run.restore(np.zeros(4), step=2, subtree="replay")
    with pytest.warns(RuntimeWarning, match="pieces were restored from 2 checkpoints"):
        found = run.restore(np.zeros(4), step=1, subtree="replay")
    assert "different moments do not agree" in found.notes[-1]


def test_a_run_can_be_read_without_opening_it(tmp_path: Path) -> None:
    write_run(tmp_path, 1, 2, config={"lr": (1, 2)})
    before = sorted(os.listdir(tmp_path))
    run = open_run(tmp_path)
    assert run.config == {"lr": [1, 2]}
    assert run.newest() is not None and run.newest().step == 2
    assert_same(run.restore(lambda: state(0), step=1).state, state(1))
    assert run.prune(KeepLast(1), dry_run=True) == (run.path(1),)
    for act in (
        lambda: run.step(state(3), step=3),
        lambda: run.save(state(3), step=3),
        lambda: run.restore_or_init(state(0)),
        lambda: run.prune(KeepLast(1)),
        lambda: run.rollback(1),
        lambda: run.log(3, {}),
    ):
        with pytest.raises(InvalidArgumentError, match="the run is not open"):
            act()
    assert sorted(os.listdir(tmp_path)) == before


def test_what_is_not_there_is_not_found(tmp_path: Path) -> None:
    run = open_run(tmp_path / "no" / "such")
    assert run.newest() is None and run.list() == () and run.config is None
    with pytest.raises(CheckpointNotFoundError, match="the run has no such checkpoint"):
        run.restore(state(0))
    with pytest.raises(CheckpointNotFoundError, match="no checkpoint of step 3"):
        run.restore(state(0), step=3)
    assert not (tmp_path / "no").exists()
    (tmp_path / "file").write_text("mine")
    for act in (
        open_run(tmp_path / "file").list,
        open_run(tmp_path / "file").__enter__,
    ):
        with pytest.raises(NotACheckpointError, match="is no directory"):
            act()


def test_restore_into_a_runs_directory_names_run(tmp_path: Path) -> None:
    with pytest.raises(NotACheckpointError, match=r"ajaxckpt\.Run\(directory\)"):
        restore_into(state(0), tmp_path)


# ------------------------------------------------------------------ when it saves


def test_saves_at_the_interval_and_the_tail_at_the_end(tmp_path: Path) -> None:
    with open_run(tmp_path, save=SaveEvery(steps=20), on_exit=True) as run:
        for step in range(1, 22):
            report = run.step(state(step), step=step)
            assert report.saved == (step == 20)
    assert steps(tmp_path) == [20, 21]


@pytest.mark.parametrize("save", [SaveEvery(steps=0), SaveEvery(), SaveAt(), []])
def test_an_interval_of_nothing_never_saves_unless_asked(
    tmp_path: Path, save: Any
) -> None:
    with open_run(tmp_path, save=save) as run:
        run.step(state(1), step=1)
        assert run.list() == ()
        assert run.save(state(1), step=1).saved
        assert not run.save(state(1), step=1).saved
    assert steps(tmp_path) == [1]


def test_a_resumed_run_saves_where_the_unbroken_one_does(tmp_path: Path) -> None:
    for directory, cuts in (("whole", [100]), ("split", [33, 61, 100])):
        for cut in cuts:
            with open_run(tmp_path / directory, save=SaveEvery(steps=25)) as run:
                first = run.restore_or_init(lambda: state(0)).step or 0
                for step in range(first + 3, cut + 1, 3):
                    run.step(state(step), step=step)
                run.save(state(cut), step=cut)
    assert steps(tmp_path / "whole") == [27, 51, 75, 100]
    assert set(steps(tmp_path / "split")) == {27, 33, 51, 61, 76, 100}


def test_metrics_are_measured_only_where_a_save_is_due(tmp_path: Path) -> None:
    calls: list[int] = []
    with open_run(tmp_path, save=SaveEvery(steps=10)) as run:
        for step in range(1, 31):

            def measure(step: int = step) -> dict[str, Any]:
                calls.append(step)
                return {"return": np.float32(step)}

            run.step(state(step), step=step, metrics=measure)
    assert calls == [10, 20, 30]
    entries = open_run(tmp_path).list()
    assert [entry.metrics["return"] for entry in entries] == [10, 20, 30]


def test_saves_when_a_metric_improves_also_after_a_resume(tmp_path: Path) -> None:
    policy = SaveOnImprovement("return", "max")
    scores = [1.0, 3.0, 2.0, math.nan, None, 3.0, 4.0]
    for first in (0, 4):
        with open_run(tmp_path, save=policy) as run:
            run.restore_or_init(lambda: state(0))
            for step in range(first + 1, first + 5):
                if step > len(scores):
                    break
                run.step(state(step), step=step, metrics={"return": scores[step - 1]})
    assert steps(tmp_path) == [1, 2, 7]


def test_metrics_as_a_function_cannot_improve(tmp_path: Path) -> None:
    with (
        open_run(tmp_path, save=SaveOnImprovement("r", "max")) as run,
        pytest.raises(InvalidArgumentError, match="cannot see metrics that are a func"),
    ):
        run.step(state(1), step=1, metrics=lambda: {"r": 1.0})


def test_a_metric_that_a_policy_names_must_be_among_the_metrics(tmp_path: Path) -> None:
    with open_run(tmp_path, keep=KeepBest("retrun", "max")) as run:
        with pytest.raises(InvalidArgumentError) as caught:
            run.step(state(1), step=1, metrics={"return": 1.0, "loss": 2.0})
        assert "'retrun', which a policy names, is not among return, loss" in str(
            caught.value
        )
        assert run.list() == ()
        run.step(state(1), step=1, metrics={"retrun": None})
        run.step(state(2), step=2)
    assert steps(tmp_path) == [2]


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float, /) -> None:
        self.now += seconds


def test_saves_after_minutes_of_the_clock_it_is_given(tmp_path: Path) -> None:
    clock = Clock()
    with open_run(tmp_path, save=SaveEvery(minutes=1), clock=clock) as run:
        for step in range(1, 10):
            clock.now += 25
            run.step(state(step), step=step)
    assert steps(tmp_path) == [3, 6, 9]


# ------------------------------------------------------------- what may be saved


def test_steps_must_be_numbers_in_their_order(tmp_path: Path) -> None:
    with open_run(tmp_path) as run:
        for wrong in (None, -1, 1.5, "3", True, jnp.array([1, 2])):
            with pytest.raises(InvalidArgumentError, match="step"):
                run.step(state(1), step=wrong)
        run.step(state(7), step=jnp.array([7, 7]))
        with pytest.raises(InvalidArgumentError, match="step 6 was reported after"):
            run.step(state(6), step=6)
    assert steps(tmp_path) == [7]


def test_a_step_is_saved_once_and_never_replaced_by_another_state(
    tmp_path: Path,
) -> None:
    with open_run(tmp_path) as run:
        assert run.step(state(4), step=4).saved
        run.wait()
        before = os.stat(run.path(4))
        assert not run.step(state(4), step=4).saved
        assert not run.save(state(4), step=4).saved
        with pytest.raises(StepExistsError, match="step 4 is saved already, with anot"):
            run.save(state(5), step=4)
        run.wait()
        assert os.stat(run.path(4)).st_ino == before.st_ino
        # the same state, measured now: nothing is lost by replacing the file
        assert run.save(state(4), step=4, metrics={"return": 1.0}).saved
        run.wait()
        assert run.best("return", "max").step == 4


@pytest.mark.parametrize("restores", [False, True])
def test_a_run_does_not_grow_beside_its_own_past(
    tmp_path: Path, restores: bool
) -> None:
    write_run(tmp_path, 4, 9)
    with open_run(tmp_path) as run:
        if restores:
            assert run.restore(state(0), step=4).step == 4
        with pytest.raises(StepExistsError) as caught:
            run.step(state(5), step=5)
        assert "step 5 lies before step 9, the run's newest" in str(caught.value)
        assert "run.rollback(step)" in caught.value.hint
    assert steps(tmp_path) == [4, 9]


def test_rolled_back_the_later_steps_are_set_aside_for_good(tmp_path: Path) -> None:
    write_run(tmp_path, 4, 7, 9)
    open_run(tmp_path).pin(9)
    with open_run(tmp_path) as run:
        aside = run.rollback(4)
        assert [os.path.basename(path) for path in aside] == [
            *("step-9.safetensors.abandoned", "step-7.safetensors.abandoned"),
        ]
        run.step(state(5), step=5)
    with open_run(tmp_path) as run:
        assert run.restore_or_init(lambda: state(0)).step == 5
        run.rollback(4)
        run.step(state(9), step=9)
        run.wait()
        assert not run.list()[-1].pinned
        run.rollback(4)
    left = sorted(n for n in os.listdir(tmp_path) if not n.startswith("."))
    assert left == [
        "step-4.safetensors",
        "step-5.safetensors.abandoned",
        "step-7.safetensors.abandoned",
        "step-9.safetensors.2.abandoned",
        "step-9.safetensors.abandoned",
        "step-9.safetensors.pin.abandoned",
    ]
    with open_run(tmp_path) as run, pytest.raises(CheckpointNotFoundError):
        run.rollback(8)


def test_files_say_which_run_and_which_parent_they_have(tmp_path: Path) -> None:
    write_run(tmp_path, 1, 2)
    write_run(tmp_path, 3)
    run = open_run(tmp_path)
    headers = [open_checkpoint(entry.path) for entry in run.list()]
    assert {header.run_id for header in headers} == {run.run_id}
    ids = [header.checkpoint_id for header in headers]
    assert [header.parent_id for header in headers] == [None, *ids[:-1]]


# --------------------------------------------------------------- what is kept


def test_the_best_and_the_newest_are_kept_whatever_the_scores(tmp_path: Path) -> None:
    keep = [KeepLast(2), KeepBest("error", "min")]
    with open_run(tmp_path, keep=keep) as run:
        for i in range(1, 6):
            run.step(state(100 * i), step=100 * i, metrics={"error": i})
        run.wait()
        assert run.newest().step == 500 and run.best().step == 100
        assert_same(run.restore_best(state(0)).state, state(100))
    assert steps(tmp_path) == [100, 400, 500]


def test_best_passes_over_nan_none_and_the_damaged(tmp_path: Path) -> None:
    scores = {1: 1.0, 2: 5.0, 3: math.nan, 4: None, 5: math.inf, 6: 2.0}
    with open_run(tmp_path) as run:
        for step, score in scores.items():
            run.step(state(step), step=step, metrics={"r": score})
        run.wait()
        assert run.best("r", "max").step == 2
        assert run.best("r", "min").step == 1
        flip(run.path(2))
        assert run.best("r", "max").step == 6
        found = run.restore_best(state(0), metric="r", mode="max")
        assert (found.step, [s.step for s in found.skipped]) == (6, [2])
        assert run.best("other", "max") is None
        with pytest.raises(InvalidArgumentError, match="best metric"):
            run.best()


def test_pins_keep_what_no_policy_keeps(tmp_path: Path) -> None:
    with open_run(tmp_path, keep=KeepLast(1)) as run:
        run.step(state(1), step=1)
        run.wait()
        run.pin(1)
        for step in (2, 3):
            run.step(state(step), step=step)
        run.wait()
        assert [(e.step, e.pinned) for e in run.list()] == [(1, True), (3, False)]
        run.unpin(1)
        assert run.prune() == (run.path(1),)
        with pytest.raises(CheckpointNotFoundError):
            run.pin(1)
    assert steps(tmp_path) == [3]


def test_pruning_says_what_it_would_do_and_does_that(tmp_path: Path) -> None:
    write_run(tmp_path, *range(10, 60, 10))
    with open_run(tmp_path) as run:
        keep = [KeepLast(1), KeepEvery(40)]
        would = run.prune(keep, dry_run=True)
        assert [os.path.basename(p) for p in would] == [
            *("step-10.safetensors", "step-20.safetensors", "step-30.safetensors")
        ]
        assert steps(tmp_path) == [10, 20, 30, 40, 50]
        assert run.prune() == ()
        assert run.prune(keep) == would
    assert steps(tmp_path) == [40, 50]


def test_a_retention_of_one_never_removes_what_it_just_saved(tmp_path: Path) -> None:
    write_run(tmp_path, 4, 9)
    with open_run(tmp_path, keep=KeepLast(1)) as run:
        run.rollback(4)
        report = run.step(state(5), step=5)
        run.wait()
        assert os.path.exists(report.path)
    assert steps(tmp_path) == [5]


# ------------------------------------------------------------- names and runs


def test_steps_are_numbers_whatever_the_names(tmp_path: Path) -> None:
    for name, step in {
        "step-100000": 100_000,
        "step-0900000": 900_000,
        "step-99": 99,
        "handpicked": 5,
        "step-12": 2_500,  # the header's step wins
    }.items():
        save_checkpoint(state(step), tmp_path / f"{name}.safetensors", step=step)
    save_checkpoint(state(1), tmp_path / "step-31.safetensors")  # no step in the header
    (tmp_path / "step_2_backup").write_text("mine")
    (tmp_path / "notes.safetensors").write_text("mine, too, and no checkpoint")
    run = open_run(tmp_path, keep=KeepLast(1))
    assert steps(tmp_path) == [5, 31, 99, 2_500, 100_000, 900_000]
    assert run.newest().step == 900_000
    with run:
        run.restore_or_init(lambda: state(0))
        run.step(state(900_001), step=900_001)
        run.step(state(900_002), step=900_002)
    # of what no run wrote nothing was removed
    assert len(os.listdir(tmp_path)) == 8 + 1 + 2


def test_runs_share_a_directory_unharmed(tmp_path: Path) -> None:
    with open_run(tmp_path, run_id="a") as a, open_run(tmp_path, run_id="b") as b:
        for step in (1, 2, 3):
            a.step(state(step), step=step)
        b_keep = KeepLast(2)
        for step in (3, 4, 5, 6):
            b.step(state(step + 100), step=step)
        b.wait()
        assert len(b.prune(b_keep)) == 2
        a.wait()
        assert [e.step for e in a.list()] == [1, 2, 3]
        assert [e.step for e in b.list()] == [5, 6]
        assert a.path(3) != b.path(3)
    assert_same(open_run(tmp_path, run_id="a").restore(state(0)).state, state(3))
    with pytest.raises(InvalidArgumentError, match="2 runs share this directory: a, b"):
        open_run(tmp_path).list()


def test_a_run_that_ended_before_its_first_save_keeps_its_id(tmp_path: Path) -> None:
    with open_run(tmp_path) as run:
        first = run.run_id
    with open_run(tmp_path) as run:
        assert run.run_id == first
        run.step(state(1), step=1)
    assert open_run(tmp_path).run_id == first
    with open_run(tmp_path / "other") as run:
        assert run.run_id != first


def test_a_run_has_one_live_writer(tmp_path: Path) -> None:
    with open_run(tmp_path) as run:
        run.step(state(1), step=1)
        run.wait()
        for other in (open_run(tmp_path), open_run(tmp_path, run_id=run.run_id)):
            with pytest.raises(RunLockedError, match=f"process {os.getpid()} on"):
                other.__enter__()
        with pytest.raises(InvalidArgumentError, match="open already"):
            run.__enter__()
        assert open_run(tmp_path).restore(state(0)).step == 1
    with open_run(tmp_path) as again:
        assert again.restore_or_init(state(0)).step == 1
    with again:
        assert again.step(state(2), step=2).saved


# ------------------------------------------------------------------ arguments


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"run_id": "a/b"}, "'a/b' is no id of a run"),
        ({"run_id": ""}, "'' is no id of a run"),
        ({"run_id": 7}, "7 is no id of a run"),
        ({"save": 20}, "save: expected policies, found 20"),
        ({"save": [KeepLast(1)]}, "save: expected policies"),
        ({"keep": "last"}, "keep: expected policies, found 'last'"),
        ({"keep": SaveEvery(steps=1)}, "keep: expected policies"),
        ({"config": 3}, "neither a mapping nor a dataclass"),
        ({"retries": -1}, "Run retries: expected an int of at least 0"),
        ({"grace": 0}, "Run grace: expected a positive number"),
        ({"on_error": "ignore"}, "expected 'raise' or 'warn', found 'ignore'"),
        ({"exclude": "a..b"}, "exclude"),
        ({"migrations": 3}, "migrations"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_touched(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        Run(tmp_path / "run", **options)
    assert message in str(caught.value)
    assert str(tmp_path / "run") in str(caught.value)
    assert caught.value.hint
    assert os.listdir(tmp_path) == []


def test_what_is_excluded_is_not_in_the_files(tmp_path: Path) -> None:
    write_run(tmp_path, 3, exclude="replay")
    run = open_run(tmp_path)
    with open_checkpoint(run.path(3)) as checkpoint:
        assert "replay" not in checkpoint and checkpoint.excluded == ("replay",)
    assert run.restore(state(0), keep="replay").state["replay"][0] == 0


def test_a_state_that_cannot_be_saved_is_refused_at_once(tmp_path: Path) -> None:
    gone = jnp.zeros(3)
    gone.delete()
    with open_run(tmp_path) as run:
        for wrong, message in (
            ({"w": object()}, "w: a builtins.object is no leaf"),
            ({"w": gone}, "w: the array was donated or deleted"),
        ):
            with pytest.raises(UnsupportedLeafError, match=message):
                run.step(wrong, step=1)
        with pytest.raises(InvalidArgumentError, match="the state has no leaves"):
            run.step({}, step=1)
        with pytest.raises(InvalidArgumentError, match=r"metrics\.r"):
            run.step(state(1), step=1, metrics={"r": "high"})
    assert [n for n in os.listdir(tmp_path) if not n.startswith(".")] == []


# ------------------------------------------------------------------ preflight


def test_a_disk_without_room_is_found_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ajaxckpt import _preflight

    big = {"w": np.zeros(1000, np.float32)}  # 4,000 bytes
    free = 5 * 4_000
    usage = type("Usage", (), {"free": free})
    monkeypatch.setattr(_preflight.shutil, "disk_usage", lambda path: usage)
    with open_run(tmp_path, keep=[KeepLast(3), KeepBest("r", "max")]) as run:
        report = run.preflight(big)
        assert (report.nbytes, report.kept) == (4_000, 4)
        assert (report.needed, report.available) == (20_000, 20_000)
        assert report.seconds is not None and report.seconds > 0
    with open_run(tmp_path, keep=KeepLast(5)) as run:
        for act in (run.preflight, lambda state: run.step(state, step=1)):
            with pytest.raises(NoSpaceError) as caught:
                act(big)
            text = str(caught.value)
            assert "5 of them and one in writing need 24,000 bytes" in text
            assert "20,000 are available" in text
        assert isinstance(caught.value, OSError)
    with open_run(tmp_path, keep=KeepLast(5), preflight=False) as run:
        assert run.step(big, step=1).saved
    with open_run(tmp_path) as run:
        report = run.preflight(big)
        assert (report.kept, report.needed) == (None, 4_000)
    left = [n for n in os.listdir(tmp_path) if not n.startswith(".ajaxckpt-run")]
    assert left == ["step-1.safetensors"]
