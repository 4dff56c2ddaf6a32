"""A run that is signalled, forked or left: real processes, really signalled."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from _run_process import SECONDS, Nursery, Process, shared_nursery, weights_at

from ajaxckpt import open_checkpoint, verify_checkpoint


def slow(*values: Any) -> Any:
    """Mark one set of a test's parameters as slow."""
    return pytest.param(*values, marks=pytest.mark.slow)


SIGNALS = [("SIGTERM", 75), slow("SIGINT", None), slow("SIGUSR1", 3)]


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    yield from shared_nursery()


def read_steps(directory: Path) -> list[int]:
    """Return the steps on disk, each of them whole and of one step boundary."""
    steps = []
    for path in directory.glob("step-*"):
        assert path.suffix == ".safetensors", path
        verify_checkpoint(path)
        with open_checkpoint(path) as checkpoint:
            leaves = checkpoint.read(["w", "step"])
            step = checkpoint.step
        assert int(leaves["step"]) == step, path
        np.testing.assert_array_equal(leaves["w"], weights_at(step))
        steps.append(step)
    return sorted(steps)


def assert_swept(directory: Path) -> None:
    assert list(directory.glob(".ajaxckpt-*.tmp")) == []


def await_step(directory: Path, step: int) -> None:
    """Wait until a step is on disk."""
    end = time.monotonic() + SECONDS
    while not (directory / f"step-{step}.safetensors").exists():
        assert time.monotonic() < end, f"step {step} is not saved"
        time.sleep(0.01)


def await_gone(process: Process) -> None:
    """Wait until a process ended by itself, though nobody lets it go on."""
    end = time.monotonic() + SECONDS
    while process.is_alive():
        assert time.monotonic() < end, "it does not leave"
        time.sleep(0.01)


def end_with(process: Process, code: int) -> list[Any]:
    """Return what a process said until it ended, with that code."""
    words, found = process.end()
    assert found == code, f"exit code {found}\n{process.stderr}"
    return words


# --------------------------------------------------------------------- one signal


@pytest.mark.parametrize(("name", "exit_code"), SIGNALS)
def test_a_signal_in_a_jitted_step_saves_the_step_once_it_is_finished(
    nursery: Nursery, tmp_path: Path, name: str, exit_code: int | None
) -> None:
    place = tmp_path / "run"
    process = nursery.start(
        "train",
        place,
        last=1000,
        at=3,
        act="jitted",
        save=1000,
        exit_code=exit_code,
    )
    assert process.hear() == ["in", "jitted"]
    time.sleep(0.2)
    process.send(getattr(signal, name))
    words = end_with(process, exit_code or 0)
    assert process.steps == {1: False, 2: False, 3: False, 4: True}
    assert words == ([] if exit_code is not None else [["left", name]])
    assert read_steps(place) == [4]
    assert_swept(place)


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("call", ["fsync", slow("replace")])
def test_a_signal_during_a_save_lets_it_finish(
    nursery: Nursery, tmp_path: Path, background: bool, call: str
) -> None:
    place = tmp_path / "run"
    process = nursery.start(
        "train",
        place,
        last=1000,
        at=3,
        call={"name": call},
        save=2,
        background=background,
        seconds=0.05,
        exit_code=75,
    )
    assert process.hear() == ["in", call]
    process.send(signal.SIGTERM)
    time.sleep(0.2)
    process.go()
    assert end_with(process, 75) == []
    accepted = {step for step, saved in process.steps.items() if saved}
    assert {2, 4} <= accepted
    assert read_steps(place) == sorted(accepted | {max(process.steps)})
    assert max(process.steps) <= 6, "it went on after the signal"
    assert_swept(place)


@pytest.mark.parametrize(("name", "exit_code"), SIGNALS)
def test_a_signal_during_a_restore_leaves_the_run_as_it_was(
    nursery: Nursery, tmp_path: Path, name: str, exit_code: int | None
) -> None:
    place = tmp_path / "run"
    end_with(nursery.start("train", place, last=2, kind="numpy", save=2), 0)
    before = {p.name: p.read_bytes() for p in place.glob("step-*")}
    process = nursery.start(
        "restore", place, call={"name": "preadv"}, exit_code=exit_code
    )
    assert process.hear() == ["in", "preadv"]
    process.send(getattr(signal, name))
    process.go()
    words = end_with(process, exit_code or 0)
    assert words[0] == ["restored", 2, True]
    assert words[1:] == ([["left", name]] if exit_code is None else [])
    assert {p.name: p.read_bytes() for p in place.glob("step-*")} == before
    assert_swept(place)


@pytest.mark.parametrize("background", [slow(False), True])
def test_a_signal_while_old_checkpoints_are_removed_leaves_the_newest(
    nursery: Nursery, tmp_path: Path, background: bool
) -> None:
    place = tmp_path / "run"
    process = nursery.start(
        "train",
        place,
        last=1000,
        at=3,
        call={"name": "unlink", "ending": ".safetensors"},
        save=2,
        keep=1,
        background=background,
        seconds=0.05,
        exit_code=75,
    )
    assert process.hear() == ["in", "unlink"]
    process.send(signal.SIGTERM)
    time.sleep(0.1)
    process.go()
    assert end_with(process, 75) == []
    assert read_steps(place) == [max(process.steps)]
    assert_swept(place)


# ------------------------------------------------------------------- two signals


@pytest.mark.parametrize("exit_code", [None, slow(75)])
def test_a_second_signal_interrupts_a_loop_that_looks_at_nothing(
    nursery: Nursery, tmp_path: Path, exit_code: int | None
) -> None:
    place = tmp_path / "run"
    process = nursery.start(
        "train",
        place,
        last=1000,
        at=3,
        act="in Python",
        save=1000,
        exit_code=exit_code,
    )
    assert process.hear() == ["in", "in Python"]
    process.send(signal.SIGTERM)
    time.sleep(0.1)
    assert process.is_alive()
    process.send(signal.SIGTERM)
    # an uncaught KeyboardInterrupt ends Python by SIGINT
    assert end_with(process, -signal.SIGINT if exit_code is None else 75) == []
    assert ("a second signal, SIGTERM" in process.stderr) is (exit_code is None)
    assert read_steps(place) == [3]
    assert_swept(place)


@pytest.mark.parametrize(
    ("act", "pause", "exit_code"),
    [slow("in C", 0.1, None), ("in C", 0.001, 75), slow("in Python", 0.0, 75)],
)
def test_two_signals_end_a_process_wherever_it_is(
    nursery: Nursery, tmp_path: Path, act: str, pause: float, exit_code: int | None
) -> None:
    place = tmp_path / "run"
    process = nursery.start(
        "train",
        place,
        last=1000,
        at=3,
        act=act,
        save=1000,
        exit_code=exit_code,
        grace=5,  # the kernel may make one signal of two
    )
    assert process.hear() == ["in", act]
    time.sleep(0.1)
    process.send(signal.SIGTERM)
    time.sleep(pause)
    process.send(signal.SIGTERM)
    await_gone(process)
    assert end_with(process, exit_code or 128 + signal.SIGTERM) == []
    assert read_steps(place) == [3]
    assert_swept(place)


@pytest.mark.slow
def test_a_second_signal_ends_a_computation_begun_after_the_first(
    nursery: Nursery, tmp_path: Path
) -> None:
    place = tmp_path / "run"
    process = nursery.start(
        "train",
        place,
        last=1000,
        at=3,
        act="in C",
        call=None,
        polls=False,
        save=1000,
        seconds=0.2,
        exit_code=75,
        grace=30,
    )
    process.hear_step(2)
    process.send(signal.SIGTERM)  # taken in Python; this loop looks at nothing
    assert process.hear() == ["in", "in C"]
    time.sleep(0.1)
    process.send(signal.SIGTERM)
    await_gone(process)
    end_with(process, 75)
    assert read_steps(place)[-1:] == [3]


@pytest.mark.parametrize("exit_code", [slow(None), 75])
def test_a_second_signal_while_the_last_save_is_written_loses_nothing(
    nursery: Nursery, tmp_path: Path, exit_code: int | None
) -> None:
    place = tmp_path / "run"
    process = nursery.start(
        "train",
        place,
        last=4,
        at=3,
        call={"name": "fsync"},
        save=1000,
        exit_code=exit_code,
    )
    assert process.hear() == ["in", "fsync"]
    time.sleep(0.1)
    process.send(signal.SIGTERM)
    time.sleep(0.1)
    process.send(signal.SIGTERM)
    time.sleep(0.2)
    process.go()
    end_with(process, -signal.SIGINT if exit_code is None else exit_code)
    assert read_steps(place) == [4]
    assert_swept(place)


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("times", [1, 2])
def test_signals_between_any_two_lines_of_a_save_leave_it_whole(
    nursery: Nursery, tmp_path: Path, times: int, background: bool
) -> None:
    place = tmp_path / "run"
    process = nursery.start(
        "sweep", place, times=times, background=background, first=11, by=401
    )
    words = end_with(process, 0)
    assert words[-1][0] == "done" and len(words) > 3


@pytest.mark.slow
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("times", [1, 2])
def test_signals_between_all_lines_of_a_save_leave_it_whole(
    nursery: Nursery, tmp_path: Path, times: int, background: bool
) -> None:
    place = tmp_path / "run"
    process = nursery.start(
        "sweep", place, times=times, background=background, first=1, by=67
    )
    words = end_with(process, 0)
    assert words[-1][0] == "done" and len(words) > 20


# --------------------------------------------------------------------- the grace time

GRACE = [
    ("in C", "jax", None, [2, 4, 5]),
    slow("in C", "jax", 1, [2, 4, 5]),
    slow("in C", "donated", None, [2, 4]),
    ("in C", "donated", 1, [2, 4, 5]),
    slow("in C", "numpy", None, [2, 4]),
    slow("in C", "numpy", 1, [2, 4, 5]),
    slow("in Python", "jax", None, [2, 4, 5]),
    slow("in Python", "jax", 1, [2, 4, 5]),
    slow("in Python", "donated", None, [2, 4]),
    slow("in Python", "donated", 1, [2, 4, 5]),
    ("in Python", "numpy", None, [2, 4]),
    ("in Python", "numpy", 1, [2, 4, 5]),
]


@pytest.mark.parametrize(("act", "kind", "hold", "expected"), GRACE)
def test_a_loop_that_does_not_come_round_is_saved_and_left(
    nursery: Nursery,
    tmp_path: Path,
    act: str,
    kind: str,
    hold: int | None,
    expected: list[int],
) -> None:
    place = tmp_path / "run"
    job: dict[str, Any] = {"hold": hold} if hold else {}
    process = nursery.start(
        "train",
        place,
        last=1000,
        at=5,
        act=act,
        kind=kind,
        save=2,
        seconds=0.05,
        grace=0.5,
        exit_code=75,
        **job,
    )
    assert process.hear() == ["in", act]
    process.send(signal.SIGTERM)
    await_gone(process)
    assert end_with(process, 75) == []
    assert read_steps(place) == expected
    assert_swept(place)


def test_a_state_that_is_not_computed_yet_is_not_waited_for(
    nursery: Nursery, tmp_path: Path
) -> None:
    place = tmp_path / "run"
    process = nursery.start(
        "train",
        place,
        last=1000,
        at=5,
        act="pending",
        save=1000,
        hold=5,
        grace=0.5,
        exit_code=75,
    )
    assert process.hear() == ["in", "jitted"]
    process.hear_step(6)
    time.sleep(0.2)
    process.send(signal.SIGTERM)
    await_gone(process)
    end_with(process, 75)
    assert read_steps(place) == [5]


@pytest.mark.parametrize("act", ["in C", slow("in Python")])
def test_without_an_exit_code_a_late_loop_is_saved_and_may_go_on(
    nursery: Nursery, tmp_path: Path, act: str
) -> None:
    place = tmp_path / "run"
    process = nursery.start("train", place, last=1000, at=5, act=act, save=2, grace=0.2)
    assert process.hear() == ["in", act]
    process.send(signal.SIGTERM)
    await_step(place, 5)
    assert process.is_alive()
    process.go()
    assert end_with(process, 0) == [["left", "SIGTERM"]]
    assert read_steps(place) == [2, 4, 5, 6]
    assert_swept(place)


@pytest.mark.parametrize("exit_code", [75, slow(None)])
def test_a_state_that_is_written_meanwhile_is_saved_whole_or_not_at_all(
    nursery: Nursery, tmp_path: Path, exit_code: int | None
) -> None:
    place = tmp_path / "run"
    process = nursery.start(
        "train",
        place,
        last=1000,
        at=5,
        act="writing",
        kind="numpy",
        save=2,
        grace=0.2,
        exit_code=exit_code,
    )
    assert process.hear() == ["in", "writing"]
    process.send(signal.SIGTERM)
    if exit_code is None:
        time.sleep(0.6)
        process.go()
    end_with(process, exit_code or 0)
    last = [] if exit_code else [6]
    assert read_steps(place) in ([2, 4, *last], [2, 4, 5, *last])


def test_a_loop_that_comes_round_in_time_is_not_saved_twice(
    nursery: Nursery, tmp_path: Path
) -> None:
    place = tmp_path / "run"
    process = nursery.start(
        "train", place, last=1000, at=5, act="in C", save=2, grace=20, exit_code=75
    )
    assert process.hear() == ["in", "in C"]
    process.send(signal.SIGTERM)
    time.sleep(0.2)
    process.go()
    assert end_with(process, 75) == []
    assert read_steps(place) == [2, 4, 6]


@pytest.mark.parametrize("background", [False, slow(True)])
def test_a_save_longer_than_the_grace_time_is_finished(
    nursery: Nursery, tmp_path: Path, background: bool
) -> None:
    place = tmp_path / "run"
    process = nursery.start(
        "train",
        place,
        last=4,
        at=3,
        call={"name": "fsync"},
        save=2,
        background=background,
        grace=0.2,
        exit_code=75,
    )
    assert process.hear() == ["in", "fsync"]
    process.send(signal.SIGTERM)
    time.sleep(0.8)
    assert process.is_alive()
    process.go()
    end_with(process, 75)
    assert read_steps(place) == [2, 4]
    assert_swept(place)


@pytest.mark.slow
def test_a_process_whose_output_is_blocked_leaves_too(
    nursery: Nursery, tmp_path: Path
) -> None:
    place = tmp_path / "run"
    process = nursery.start(
        "train",
        place,
        last=1000,
        at=5,
        act="in print",
        save=1000,
        grace=0.2,
        exit_code=75,
    )
    assert process.hear() == ["in", "in print"]
    time.sleep(0.3)
    process.send(signal.SIGTERM)
    await_gone(process)
    assert end_with(process, 75) == []
    assert read_steps(place) == [5]


# ------------------------------------------------------------------ leaving the run


@pytest.mark.parametrize(
    ("how", "kind", "code", "expected"),
    [
        ("end", "jax", 0, [2, 3]),
        ("end", "numpy", 0, [2, 3]),
        slow("end", "large", 0, [2]),
        slow("sys.exit", "large", 3, [2]),
        slow("sys.exit", "jax", 3, [2, 3]),
        ("sys.exit", "numpy", 3, [2, 3]),
        slow("exception", "jax", 1, [2, 3]),
        ("exception, half-way", "jax", 1, [2, 3]),
        ("exception, half-way in place", "numpy", 1, [2]),
    ],
)
def test_leaving_saves_the_step_reported_last_unless_it_may_be_torn(
    nursery: Nursery,
    tmp_path: Path,
    how: str,
    kind: str,
    code: int,
    expected: list[int],
) -> None:
    place = tmp_path / "run"
    process = nursery.start("leave", place, how=how, kind=kind)
    end_with(process, code)
    assert ("ValueError: stop here" in process.stderr) is (code == 1)
    assert read_steps(place) == expected
    assert_swept(place)


def test_without_on_exit_leaving_saves_no_more(
    nursery: Nursery, tmp_path: Path
) -> None:
    place = tmp_path / "run"
    end_with(nursery.start("leave", place, how="end", kind="numpy", on_exit=False), 0)
    assert read_steps(place) == [2]


def test_an_exit_out_of_an_earlier_handler_saves_no_torn_state(
    nursery: Nursery, tmp_path: Path
) -> None:
    place = tmp_path / "run"
    end_with(nursery.start("leave_by_chained_exit", place), 4)
    assert read_steps(place) == [2]


@pytest.mark.parametrize(("how", "code"), [("end", 1), slow("exception", 1)])
def test_a_save_that_fails_at_exit_is_told(
    nursery: Nursery, tmp_path: Path, how: str, code: int
) -> None:
    place = tmp_path / "run"
    process = nursery.start("fail_at_exit", place, how=how)
    end_with(process, code)
    assert "step 3 was not saved" in process.stderr
    assert ("the first error" in process.stderr) is (how == "exception")
    assert read_steps(place) == [2]
    assert_swept(place)


@pytest.mark.parametrize(
    ("how", "code"), [("end", 0), ("exception", 1), ("sys.exit", 3)]
)
def test_a_background_save_without_a_run_is_finished_before_the_process_ends(
    nursery: Nursery, tmp_path: Path, how: str, code: int
) -> None:
    place = tmp_path / "run"
    end_with(nursery.start("save_and_leave", place, how=how), code)
    assert read_steps(place) == [1, 2, 3]
    assert_swept(place)


def test_a_background_save_without_a_run_that_fails_at_exit_is_told(
    nursery: Nursery, tmp_path: Path
) -> None:
    place = tmp_path / "run"
    process = nursery.start("save_and_leave", place, how="failure")
    end_with(process, 0)
    assert "step 1 was not saved" in process.stderr
    assert read_steps(place) == []
    assert_swept(place)


# ----------------------------------------------------------------- threads and forks


def test_a_run_off_the_main_thread_warns_and_works_without_signals(
    nursery: Nursery, tmp_path: Path
) -> None:
    place = tmp_path / "run"
    process = nursery.start("train_in_thread", place)
    assert process.hear() == ["in", "thread"]
    process.send(signal.SIGTERM)
    time.sleep(0.1)
    process.go()
    words = end_with(process, 0)
    (word, found, taken) = words[0]
    assert word == "found" and taken == [signal.SIGTERM]
    assert found[0] is False
    ((file, message),) = found[1:]
    assert file.endswith("_run_process.py")
    assert "off the main thread" in message
    assert read_steps(place) == [3]


@pytest.mark.parametrize("way", ["os.fork", "multiprocessing"])
def test_a_forked_child_dies_by_its_own_signal_and_saves_nothing(
    nursery: Nursery, tmp_path: Path, way: str
) -> None:
    place = tmp_path / "run"
    process = nursery.start("fork", place, what="is signalled", way=way)
    heard = {}
    while not {"in fsync", "in child", "child"} <= set(heard):
        words = process.hear()
        assert words is not None, process.stderr
        heard[words[0] if words[0] == "child" else " ".join(words)] = words
    os.kill(heard["child"][1], signal.SIGTERM)
    time.sleep(0.1)
    process.go()
    words = end_with(process, 0)
    assert words == [["ended", -signal.SIGTERM], ["left", ""]]
    assert read_steps(place) == [2, 4]
    assert_swept(place)


@pytest.mark.parametrize(
    ("what", "code"),
    [
        slow("leaves by an exception", 1),
        ("leaves by exit", 9),
        ("steps", 7),
        ("waits", 7),
        ("saves a file of its own", 7),
    ],
)
def test_a_forked_child_leaves_the_run_to_its_parent(
    nursery: Nursery, tmp_path: Path, what: str, code: int
) -> None:
    place = tmp_path / "run"
    process = nursery.start("fork", place, what=what)
    first = [process.hear(), process.hear()]
    assert ["in", "fsync"] in first
    time.sleep(0.3)
    process.go()
    assert end_with(process, 0)[-2:] == [["ended", code], ["left", ""]]
    assert read_steps(place) == [2, 4]
    assert_swept(place)
    if what == "saves a file of its own":
        assert (place / "child" / "step-1.safetensors").exists()


# -------------------------------------------------------------------------- handlers


@pytest.mark.parametrize(
    "scene",
    [
        "asyncio_in_run",
        "chain_handlers",
        "choose_signals",
        "fail_to_open",
        "keep_wakeup",
        "keep_wakeup_until_the_end",
        "leave_later_handler",
        "nest",
        "nest_and_interrupt",
        "open_again",
        "respect_ignored",
        "restore_after_error",
        "run_in_asyncio",
    ],
)
def test_handlers_are_shared_and_given_back(
    nursery: Nursery, tmp_path: Path, scene: str
) -> None:
    process = nursery.start(scene, tmp_path / "run")
    words = end_with(process, 0)
    assert words == ([["interrupted"]] if scene == "nest_and_interrupt" else [])


@pytest.mark.parametrize("scene", ["close_outer_first", "chain_from_later"])
def test_a_closed_run_swallows_no_signal(
    nursery: Nursery, tmp_path: Path, scene: str
) -> None:
    process = nursery.start(scene, tmp_path / "run")
    assert end_with(process, -signal.SIGTERM) == [["closed"]]
