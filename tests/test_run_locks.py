"""One live writer per run, across threads and processes; runs share a directory."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from _run_writer import (
    RunNursery,
    check_state,
    go_on,
    list_files,
    make_state,
    open_run,
    quick_disk,
    read_tree,
    run_nursery,
    save_steps,
)

from ajaxckpt import InvalidArgumentError, KeepLast, RunLockedError, _files

__all__ = ["quick_disk", "run_nursery"]


@pytest.mark.parametrize(
    ("first", "second", "may"),
    [
        (None, None, False),
        ("a", "a", False),
        (None, "its own", False),
        ("its own", None, False),
        ("a", "b", True),
        ("a", "A", True),
        (None, "b", True),
    ],
)
def test_one_writer_per_run_id(
    tmp_path: Path, first: str | None, second: str | None, may: bool
) -> None:
    """Also where one names the run that the other found in the directory."""
    if "its own" in (first, second):
        save_steps(tmp_path, 1)
        own = open_run(tmp_path).run_id
        first, second = (own if each == "its own" else each for each in (first, second))
    before = read_tree(tmp_path)
    with open_run(tmp_path, run_id=first) as run:
        other = open_run(tmp_path, run_id=second)
        if may:
            with other:
                assert other.run_id != run.run_id
        else:
            for _ in range(2):
                with pytest.raises(RunLockedError) as caught, other:
                    pass
            error, me = caught.value, f"process {os.getpid()} on {socket.gethostname()}"
            assert error.problem.startswith(f"the run is being written by {me} since 2")
            assert error.path == str(tmp_path)
            assert "run_id=" in error.hint
            with pytest.raises(InvalidArgumentError, match="the run is not open"):
                other.save(make_state(1), step=1)
    assert read_tree(tmp_path) == before
    with other:
        assert other.run_id


def test_a_run_is_opened_once(tmp_path: Path) -> None:
    with open_run(tmp_path) as run:
        with pytest.raises(InvalidArgumentError, match="open already"), run:
            pass
        go_on(run, (1,))
    assert open_run(tmp_path).restore(make_state(0)).step == 1


def test_of_many_threads_one_gets_the_run(tmp_path: Path) -> None:
    barrier, winners, losers = threading.Barrier(8), [], []
    done = threading.Event()

    def compete() -> None:
        barrier.wait()
        try:
            with open_run(tmp_path):
                winners.append(threading.get_ident())
                done.wait(60)
        except RunLockedError:
            losers.append(threading.get_ident())
            if len(losers) == 7:
                done.set()

    threads = [threading.Thread(target=compete) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(winners), len(losers)) == (1, 7)


def test_of_many_processes_one_gets_the_run(
    run_nursery: RunNursery, tmp_path: Path
) -> None:
    """In an empty directory, where each would give the run an id of its own."""
    job = {"directory": str(tmp_path / "run")}
    children = [run_nursery.start("hold_run", **job) for _ in range(5)]
    said = [child.hear() for child in children]
    holders = [k for k, (word, _) in enumerate(said) if word == "open"]
    assert len(holders) == 1
    holder = children[holders[0]]
    for k, (word, text) in enumerate(said):
        if k not in holders:
            assert word == "locked"
            assert f"process {holder.pid} on {socket.gethostname()}" in text
    holder.go()
    for child in children:
        assert child.end()[1] == 0
    save_steps(tmp_path / "run", 1)
    assert open_run(tmp_path / "run").restore(make_state(0)).step == 1


def locks_in(directory: Path) -> set[str]:
    return {name for name in os.listdir(directory) if name.endswith(".lock")}


@pytest.mark.parametrize("run_id", [None, "a"])
def test_the_lock_of_a_killed_process_is_taken_over(
    run_nursery: RunNursery, tmp_path: Path, run_id: str | None
) -> None:
    save_steps(tmp_path, 1, run_id=run_id)
    job = {"directory": str(tmp_path), "run_id": run_id}
    child = run_nursery.start("hold_run", **job)
    assert child.hear()[0] == "open"
    with pytest.raises(RunLockedError, match=f"process {child.pid} "):
        save_steps(tmp_path, 2, run_id=run_id)
    # to read needs no lock
    reader = open_run(tmp_path, run_id=run_id)
    check_state(reader.restore(make_state(0)).state, 1)
    assert reader.newest() == reader.list()[-1]
    assert reader.prune(KeepLast(1), dry_run=True) == ()
    child.kill()
    assert child.end() == ([], signal.SIGKILL)
    locks = locks_in(tmp_path)
    save_steps(tmp_path, 2, run_id=run_id)
    assert locks_in(tmp_path) == locks, "a lock file stays, and is no lock"
    assert open_run(tmp_path, run_id=run_id).restore(make_state(0)).step == 2


@pytest.mark.parametrize("end", ["killed", "closed"])
def test_a_forked_child_that_outlives_its_parent_holds_no_lock(
    run_nursery: RunNursery, tmp_path: Path, end: str
) -> None:
    child = run_nursery.start("hold_run", directory=str(tmp_path), forks=True)
    heard = dict([child.hear(), child.hear()])
    orphan = heard["open"]
    try:
        assert "a forked child does not write its parent's run" in heard["orphan"]
        with pytest.raises(RunLockedError):
            save_steps(tmp_path, 1)
        if end == "killed":
            child.kill()
            assert child.end() == ([], signal.SIGKILL)
        else:
            child.go()
            assert child.end() == (["closed"], 0)
        os.kill(orphan, 0)  # it lives
        save_steps(tmp_path, 2)
    finally:
        os.kill(orphan, signal.SIGKILL)
    assert list_files(tmp_path) == {"step-2.safetensors"}


def test_a_program_started_meanwhile_holds_no_lock(tmp_path: Path) -> None:
    with open_run(tmp_path):
        code = "import sys; sys.stdin.read()"
        program = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, close_fds=False
        )
    try:
        with open_run(tmp_path) as run:
            assert run.run_id
        assert program.poll() is None
    finally:
        program.communicate()


def test_an_opening_that_fails_gives_its_locks_back(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, run_id="a")
    save_steps(tmp_path, 1, run_id="b")
    for _ in range(2):
        with (
            pytest.raises(InvalidArgumentError, match="2 runs share this directory"),
            open_run(tmp_path),
        ):
            pass
    descriptors = len(os.listdir("/proc/self/fd"))
    with open_run(tmp_path, run_id="a"):
        for _ in range(3):
            with pytest.raises(RunLockedError), open_run(tmp_path, run_id="a"):
                pass
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_file_system_without_locks_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "injected")

    monkeypatch.setattr(_files.fcntl, "flock", refuse)
    with open_run(tmp_path) as run:
        go_on(run, (1,))
    assert [note for note in run.notes if "knows no locks" in note]
    assert open_run(tmp_path).restore(make_state(0)).step == 1


# ----------------------------------------------------- runs that share a directory


@pytest.mark.parametrize("ids", [("a", "b"), (None, "b")], ids=str)
def test_equal_steps_of_two_runs_never_collide(
    tmp_path: Path, ids: tuple[str | None, str]
) -> None:
    """Both save the same steps at once, each keeping its last one."""
    errors: list[BaseException] = []
    runs = [open_run(tmp_path, run_id=each, keep=KeepLast(1)) for each in ids]
    barrier = threading.Barrier(2)

    def train(run: Any, branch: str) -> None:
        try:
            barrier.wait()
            for step in range(25):
                run.step(make_state(step, branch), step=step)
        except BaseException as error:
            errors.append(error)

    with contextlib.ExitStack() as stack:
        for run in runs:
            stack.enter_context(run)
            assert not run.restore_or_init(make_state(0)).restored
        threads = [
            threading.Thread(target=train, args=(run, str(k)))
            for k, run in enumerate(runs)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert errors == []
    names = {
        f"step-24.{each}.safetensors" if each else "step-24.safetensors" for each in ids
    }
    assert list_files(tmp_path) == names
    for k, run in enumerate(runs):
        again = open_run(tmp_path, run_id=run.run_id)
        check_state(again.restore(make_state(0)).state, 24, str(k))
        assert [entry.run_id for entry in again.list()] == [run.run_id]


def test_a_damaged_file_of_another_run_is_no_concern(tmp_path: Path) -> None:
    save_steps(tmp_path, 4, 5)
    save_steps(tmp_path, 1, 2, run_id="b")
    save_steps(tmp_path, 5, run_id="c")
    for name in ("step-5.safetensors", "step-5.c.safetensors"):
        data = bytearray((tmp_path / name).read_bytes())
        data[20] ^= 1
        (tmp_path / name).write_bytes(data)
    before = read_tree(tmp_path)
    with open_run(tmp_path, run_id="b", keep=KeepLast(1)) as run:
        found = run.restore_or_init(make_state(0))
        assert (found.step, found.skipped) == (2, ())
        run.step(make_state(5), step=5)
    after = read_tree(tmp_path)
    assert set(before) - set(after) == {f"step-{k}.b.safetensors" for k in (1, 2)}
    assert set(after) - set(before) == {"step-5.b.safetensors"}
    assert all(after[name] == before[name] for name in set(before) & set(after))
    with open_run(tmp_path, run_id="d") as run:
        assert not run.restore_or_init(make_state(0)).restored


def test_a_rollback_of_one_run_leaves_the_other_alone(tmp_path: Path) -> None:
    for run_id in ("a", "b"):
        save_steps(tmp_path, 1, 2, 3, run_id=run_id)
    before = read_tree(tmp_path)
    with open_run(tmp_path, run_id="a") as run:
        assert len(run.rollback(1)) == 2
    after = read_tree(tmp_path)
    others = [name for name in before if ".b." in name]
    assert len(others) == 3
    assert all(after[name] == before[name] for name in others)
    assert open_run(tmp_path, run_id="a").restore(make_state(0)).step == 1
    assert open_run(tmp_path, run_id="b").restore(make_state(0)).step == 3
