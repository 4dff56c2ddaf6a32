"""Runs killed before every call that touches the disk, and runs whose calls fail."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from _fake_os import Call, FakeOs, Killed, die_at, fail_at, install
from _run_writer import (
    CHANGES,
    RunNursery,
    bare_nursery,
    check_state,
    go_on,
    list_files,
    make_state,
    metrics_of,
    open_run,
    quick_disk,
    read_tree,
    run_nursery,
    save_bare,
    save_steps,
)
from _tracing import find_temps
from _writer_process import read_number

from ajaxckpt import (
    BackgroundSaveError,
    CheckpointError,
    DamagedCheckpointError,
    KeepBest,
    KeepLast,
    Run,
)
from ajaxckpt._background import Worker
from ajaxckpt._files import create_temp
from ajaxckpt._listing import SUFFIX
from ajaxckpt._run_files import RunFiles

__all__ = ["bare_nursery", "quick_disk", "run_nursery"]

MODES = pytest.mark.parametrize("background", [False, True], ids=["fore", "back"])
SLOW_IN_FRONT = pytest.mark.parametrize(
    "background",
    [pytest.param(False, marks=pytest.mark.slow), True],
    ids=["fore", "back"],
)


def files_of(*steps: int) -> set[str]:
    return {f"step-{step}.safetensors" for step in steps}


def is_save(call: Call) -> bool:
    return call.name == "replace"


def is_save_or_abandon(call: Call) -> bool:
    aside = call.name == "rename" and call.file.endswith(".safetensors")
    return call.name == "replace" or aside


@dataclass(frozen=True, kw_only=True)
class Story:
    """What a run finds, what it does until it is killed, and what must be there.

    After each of its ``events`` the next of ``newest`` is the newest checkpoint:
    a step and its branch. A run that was killed does the same again and saves
    ``last``; then the directory holds what is ``left``, as if none had been killed.
    """

    prepare: Callable[[Path], None]
    act: Callable[[Run], None]
    newest: Sequence[int | tuple[int, str] | None]
    last: int
    left: set[str]
    keep: Any = None
    events: Callable[[Call], bool] = is_save
    best: int | None = None
    branch: str = ""

    def count_newest(self, calls: Sequence[Call]) -> tuple[int | None, str]:
        return self.read_newest(self.newest[sum(map(self.events, calls))])

    @staticmethod
    def read_newest(found: Any) -> tuple[int | None, str]:
        return found if isinstance(found, tuple) else (found, "")

    def finish(self, run: Run) -> None:
        self.act(run)
        state = make_state(self.last, self.branch)
        run.step(state, step=self.last, metrics=metrics_of(self.last))


def steps(*numbers: int) -> Callable[[Run], None]:
    return lambda run: go_on(run, numbers)


def prepare(*numbers: int) -> Callable[[Path], None]:
    return lambda directory: save_steps(directory, *numbers)


def prepare_guarded(directory: Path) -> None:
    """Leave a pinned step, a user's copy, a user's file and a foreign one."""
    save_steps(directory, 1, 2, 3, 4)
    open_run(directory).pin(1)
    shutil.copy(directory / "step-2.safetensors", directory / "mine.safetensors")
    shutil.copy(directory / "step-3.safetensors", directory / "step-3.safetensors.bak")
    (directory / "step-0.safetensors").write_bytes(b"not a checkpoint, but mine")


def prepare_damaged(directory: Path) -> None:
    save_steps(directory, 1, 2, 3)
    damage(directory / "step-3.safetensors", -1)


def damage(path: Path, position: int) -> None:
    """Flip one bit of a file."""
    data = bytearray(path.read_bytes())
    data[position] ^= 4
    path.write_bytes(data)


def prepare_directory(directory: Path) -> None:
    save_steps(directory, 1)
    (directory / "step-2.safetensors").mkdir()


def prepare_pinned(directory: Path) -> None:
    save_steps(directory, 1, 2, 3, 4)
    open_run(directory).pin(3)


def roll_back(run: Run) -> None:
    found = run.restore_or_init(make_state(0))
    branched = make_state(3, "b")["replay"].tobytes()
    if found.state["replay"].tobytes() != branched:
        run.rollback(2)
    run.step(make_state(3, "b"), step=3)
    run.wait()


def pin_and_prune(run: Run) -> None:
    """Keep step 2 through one pruning, and let it go in the next."""
    run.restore_or_init(make_state(0))
    present = {entry.step for entry in run.list()}
    if 2 in present:
        run.pin(2)
    run.prune(KeepLast(2))
    if 2 in present:
        run.unpin(2)
    run.prune(KeepLast(1))


STORIES = {
    "keep-last-1": Story(
        prepare=prepare(1),
        keep=KeepLast(1),
        act=steps(2, 3),
        newest=(1, 2, 3),
        last=4,
        left=files_of(4),
    ),
    "first": Story(
        prepare=lambda directory: None,
        keep=KeepLast(1),
        act=steps(1, 2),
        newest=(None, 1, 2),
        last=3,
        left=files_of(3),
    ),
    "keep-best": Story(
        prepare=prepare(1, 2, 3, 4, 5),
        keep=(KeepLast(2), KeepBest("r", "max")),
        act=steps(6),
        newest=(5, 6),
        last=7,
        left=files_of(2, 6, 7),
        best=2,
    ),
    "guarded": Story(
        prepare=prepare_guarded,
        keep=KeepLast(1),
        act=steps(5),
        newest=(4, 5),
        last=6,
        left=files_of(0, 1, 6)
        | {"step-1.safetensors.pin", "mine.safetensors", "step-3.safetensors.bak"},
    ),
    "damaged": Story(
        prepare=prepare_damaged,
        keep=KeepLast(1),
        act=steps(3),
        newest=(2, 3),
        last=4,
        left=files_of(4),
    ),
    "directory": Story(
        prepare=prepare_directory,
        keep=KeepLast(1),
        act=steps(2),
        newest=(1, 2),
        last=3,
        left=files_of(3) | {"step-2.safetensors.aside"},
    ),
    "rollback": Story(
        prepare=prepare_pinned,
        act=roll_back,
        newest=(4, 3, 2, (3, "b")),
        events=is_save_or_abandon,
        last=4,
        branch="b",
        left=files_of(1, 2, 3, 4)
        | {f"step-{step}.safetensors.abandoned" for step in (3, 4)}
        | {"step-3.safetensors.pin.abandoned"},
    ),
    "prune": Story(
        prepare=prepare(1, 2, 3, 4, 5),
        act=pin_and_prune,
        newest=(5,),
        last=6,
        left=files_of(5, 6),
    ),
}


def act_through(
    fake: FakeOs, directory: Path, act: Callable[[Run], None], **options: Any
) -> None:
    """Open a run through a fake and act; after a death nothing more happens.

    Every save is over before the main thread goes on, so that the order of the calls
    is one; it is carried out in the background thread all the same.
    """
    real_wait, real_submit = Worker.wait, Worker.submit

    def submit(worker: Worker, job: Callable[[], object]) -> None:
        real_submit(worker, job)
        wait(worker)

    def wait(worker: Worker, *args: Any) -> bool:
        done = real_wait(worker, *args)
        if getattr(fake, "dead", False):
            raise Killed
        return done

    real_before = fake.before

    def before(number: int, call: Call, args: tuple[Any, ...]) -> None:
        try:
            real_before(number, call, args)
        except Killed:
            fake.dead = True
            raise

    fake.before = before
    with pytest.MonkeyPatch.context() as patch:
        install(patch, fake)
        patch.setattr(Worker, "wait", wait)
        patch.setattr(Worker, "submit", submit)
        # a death in the background thread is no error of the test
        patch.setattr(threading, "excepthook", lambda _: None)
        try:
            with open_run(directory, **options) as run:
                act(run)
        finally:
            bury(fake)


def bury(fake: FakeOs) -> None:
    """Close what the dead run had open to write; what it read closes by itself."""
    is_read = {fd for fd, path in fake.open_files.items() if path.endswith(SUFFIX)}
    for fd in is_read:
        del fake.open_files[fd]
    fake.bury()


def record(story: Story, directory: Path, background: bool) -> list[Call]:
    """Live through a story unharmed; return what was called."""
    fake = FakeOs()
    story.prepare(directory)
    act_through(fake, directory, story.act, keep=story.keep, background=background)
    return fake.calls


def check_restart(story: Story, directory: Path, calls: Sequence[Call]) -> int | None:
    """Check where a new process goes on, and that it ends as the unbroken run."""
    expected, branch = story.count_newest(calls)
    for pin in directory.glob("*.pin"):
        assert pin.with_suffix("").exists(), "a pin outlived its checkpoint"
    with open_run(directory, keep=story.keep, background=False) as run:
        found = run.restore_or_init(make_state(0))
        assert (found.step, found.restored) == (expected, expected is not None)
        check_state(found.state, expected, branch)
        if story.best is not None:
            best = run.restore_best(make_state(0), metric="r", mode="max")
            assert best.step == story.best
            check_state(best.state, story.best)
        story.finish(run)
    assert list_files(directory) == story.left
    return expected


@MODES
@pytest.mark.parametrize("name", STORIES)
def test_a_kill_before_any_change_leaves_the_newest_restorable(
    tmp_path: Path, name: str, background: bool, request: pytest.FixtureRequest
) -> None:
    story = STORIES[name]
    calls = record(story, tmp_path / "whole", background)
    names = [call.name for call in calls]
    prepared = tmp_path / "prepared"
    story.prepare(prepared)
    everywhere = name == "keep-last-1" and background
    everywhere = everywhere or request.config.getoption("--slow")
    kills = range(len(calls)) if everywhere else changes_of(calls)
    found: Counter[object] = Counter()
    for k in kills:
        directory = tmp_path / "killed"
        if prepared.exists():
            shutil.copytree(prepared, directory, symlinks=True)
        fake = FakeOs()
        fake.before = die_at(k)
        options = {"keep": story.keep, "background": background}
        with pytest.raises(Killed):
            act_through(fake, directory, story.act, **options)
        assert fake.names[: k + 1] == names[: k + 1]
        found[check_restart(story, directory, calls[:k])] += 1
        shutil.rmtree(directory)
    # fewer would mean that the seam has a hole
    assert sum(found.values()) == len(kills) >= (75 if everywhere else 13)
    assert set(found) == {found for found, _ in map(story.read_newest, story.newest)}


def changes_of(calls: Sequence[Call]) -> list[int]:
    return [k for k, call in enumerate(calls) if call.name in CHANGES]


@MODES
def test_a_kill_in_the_middle_of_any_write_leaves_the_newest_restorable(
    tmp_path: Path, background: bool
) -> None:
    story = STORIES["keep-last-1"]
    calls = record(story, tmp_path / "whole", background)
    writes = [k for k, call in enumerate(calls) if call.name == "writev"]
    for k in writes:
        directory = tmp_path / str(k)
        story.prepare(directory)
        fake = FakeOs()
        fake.before = die_at(k, halfway=True)
        with pytest.raises(Killed):
            options = {"keep": story.keep, "background": background}
            act_through(fake, directory, story.act, **options)
        assert len(find_temps(directory)) == 1
        check_restart(story, directory, calls[:k])
    assert len(writes) >= 4


@MODES
def test_nothing_is_removed_before_the_new_file_is_durable_and_was_read_back(
    tmp_path: Path, background: bool
) -> None:
    calls = record(STORIES["keep-best"], tmp_path / "run", background)
    kinds = [(call.name, call.file) for call in calls]
    renamed = next(k for k, call in enumerate(calls) if call.name == "replace")
    first_removal = kinds.index(("unlink", "step-1.safetensors"))
    assert kinds[renamed - 1 :: -1].index(("fsync", calls[renamed].file)) < renamed
    durable = kinds.index(("fsync", "run"), renamed)
    read_back = kinds.index(("open", "step-6.safetensors"), durable)
    assert renamed < durable < read_back < first_removal
    read = [call for call in calls[read_back:first_removal] if call.name == "preadv"]
    assert any(call.file == "step-6.safetensors" for call in read)
    removed = [k for k, (name, _) in enumerate(kinds) if name == "unlink"]
    assert [kinds[k][1] for k in removed] == [
        f"step-{step}.safetensors" for step in (1, 3, 4)
    ]
    assert ("fsync", "run") in kinds[removed[-1] :]


@MODES
def test_a_file_that_does_not_read_back_costs_no_older_one(
    tmp_path: Path, background: bool
) -> None:
    """A disk that loses a bit between the write and the reading of it."""
    story, fake = STORIES["keep-best"], FakeOs()
    story.prepare(tmp_path)
    before = read_tree(tmp_path)

    def lose_a_bit(number: int, call: Call, args: tuple[Any, ...]) -> None:
        if call == Call("fsync", tmp_path.name) and "replace" in fake.names:
            damage(tmp_path / "step-6.safetensors", -1)

    fake.before = lose_a_bit
    with pytest.raises(CheckpointError, match="does not read back") as caught:
        act_through(fake, tmp_path, story.act, keep=story.keep, background=background)
    error: BaseException | None = caught.value
    if background:
        assert isinstance(error, BackgroundSaveError) and error.step == 6
        error = error.__cause__
    assert isinstance(error, DamagedCheckpointError)
    after = read_tree(tmp_path)
    assert {name: after[name] for name in before} == before
    with open_run(tmp_path) as run:
        found = run.restore_or_init(make_state(0))
        check_state(found.state, 5)
        assert [skipped.step for skipped in found.skipped] == [6]


@SLOW_IN_FRONT
def test_a_real_process_killed_at_any_call_leaves_the_old_or_the_new_step(
    bare_nursery: RunNursery, tmp_path: Path, background: bool
) -> None:
    """SIGKILL, also in the background thread, while the main thread waits."""

    def save(directory: Path, die_at: int) -> list[Any]:
        job = {"directory": str(directory), "background": background}
        child = bare_nursery.start("save_bare", steps=[2], die_at=die_at, **job)
        said, fate = child.end()
        assert fate == (signal.SIGKILL if die_at >= 0 else 0)
        return said[0]

    old = tmp_path / "old"
    save_bare(old, [1], background=False)
    shutil.copytree(old, tmp_path / "whole")
    calls = [Call(*call) for call in save(tmp_path / "whole", -1)]
    assert list_files(tmp_path / "whole") == files_of_w(2)
    found: Counter[int] = Counter()
    for k, call in enumerate(calls):
        directory = tmp_path / "killed"
        shutil.copytree(old, directory)
        assert save(directory, k)[0] == call.name
        newest = RunFiles(str(directory), "w").newest()
        assert newest is not None
        assert newest.step == 1 + sum(map(is_save, calls[:k]))
        assert read_number(newest.path) == newest.step
        found[newest.step] += 1
        save_bare(directory, [3], background=False)
        assert list_files(directory) == files_of_w(3)
        shutil.rmtree(directory)
    assert sum(found.values()) == len(calls) >= 40
    assert found[1] >= 20 and found[2] >= 10


def files_of_w(*numbers: int) -> set[str]:
    return {f"step-{number}.w.safetensors" for number in numbers}


@pytest.mark.parametrize(
    "times", [6, pytest.param(60, marks=pytest.mark.slow)], ids=str
)
def test_a_training_killed_at_random_goes_on_from_what_was_durable(
    run_nursery: RunNursery, tmp_path: Path, times: int
) -> None:
    generator, directory, last = random.Random(5), tmp_path / "run", 0
    for _ in range(times):
        child = run_nursery.start("train", directory=str(directory), stop=100_000)
        first = child.hear()
        time.sleep(generator.uniform(0, 0.2))
        child.kill()
        said, fate = child.end()
        assert fate == signal.SIGKILL
        durable = [first, *said][-1]
        assert durable > last
        found = open_run(directory).restore(make_state(0))
        check_state(found.state, found.step)
        assert found.step is not None and durable <= found.step <= durable + 3
        last = found.step
        assert len(list_files(directory)) <= 4
    save_steps(directory, last + 1, keep=KeepLast(2))
    assert list_files(directory) == files_of(last, last + 1)


@MODES
def test_a_writer_killed_at_any_change_leaves_another_run_unharmed(
    tmp_path: Path, background: bool
) -> None:
    save_steps(tmp_path, 1, run_id="b")
    old = (tmp_path / "step-1.b.safetensors").read_bytes()
    b = {"run_id": "b", "keep": KeepLast(1), "background": background}

    def put_back() -> None:
        for path in tmp_path.glob("*.b.safetensors"):
            path.unlink()
        (tmp_path / "step-1.b.safetensors").write_bytes(old)

    def read_a() -> dict[str, object]:
        found = read_tree(tmp_path).items()
        return {name: what for name, what in found if ".a." in name or name in temp}

    with open_run(tmp_path, run_id="a", keep=KeepLast(2)) as a:
        go_on(a, (1, 2))
        temp, fd = create_temp(str(tmp_path))  # a save of a's in progress
        os.write(fd, b"half of")
        fake = FakeOs()
        act_through(fake, tmp_path, steps(2), **b)
        kills = changes_of(fake.calls)
        for step, k in enumerate(kills, 3):
            put_back()
            before = read_a()
            fake = FakeOs()
            fake.before = die_at(k)
            with pytest.raises(Killed):
                act_through(fake, tmp_path, steps(2), **b)
            assert read_a() == before
            a.step(make_state(step), step=step)
            a.wait()
            with open_run(tmp_path, **b) as again:
                go_on(again, (2,))
                go_on(again, (3,))
            left = {"step-3.b.safetensors", Path(temp).name}
            both = {f"step-{number}.a.safetensors" for number in (step - 1, step)}
            assert list_files(tmp_path) == left | both
        os.close(fd)
    assert len(kills) >= 9
    found = open_run(tmp_path, run_id="a").restore(make_state(0))
    check_state(found.state, len(kills) + 2)


SECOND = "step-2.safetensors"
FAILURES = {
    "eio-once": (OSError(errno.EIO, "injected"), False),
    "refused-once": (PermissionError(errno.EACCES, "injected"), False),
    "full-for-ever": (OSError(errno.ENOSPC, "injected"), True),
}


@SLOW_IN_FRONT
@pytest.mark.parametrize("failure", FAILURES)
def test_a_failing_call_costs_a_save_at_most(
    tmp_path: Path, failure: str, background: bool, request: pytest.FixtureRequest
) -> None:
    """Whatever fails, the newest stays restorable, and the next run tidies up."""
    story, (error, ever_after) = STORIES["keep-last-1"], FAILURES[failure]
    calls = record(story, tmp_path / "whole", background)
    prepared = tmp_path / "prepared"
    story.prepare(prepared)
    begun = next(k for k, call in enumerate(calls) if call.file == SECOND)
    everywhere = failure == "eio-once" or request.config.getoption("--slow")
    failing = range(len(calls)) if everywhere else changes_of(calls)
    raised: Counter[str] = Counter()
    for k in failing:
        directory = tmp_path / "failed"
        shutil.copytree(prepared, directory)
        fake = FakeOs()
        fake.before = fail_at(k, error, ever_after=ever_after)
        outcome = "nothing"
        try:
            options = {"keep": story.keep, "background": background}
            act_through(fake, directory, story.act, **options)
        except (OSError, CheckpointError) as found:
            outcome = type(found).__name__
        raised[outcome] += 1
        # an error that passes is tried again: training goes on
        if failure == "eio-once" and k >= begun:
            assert outcome == "nothing", (k, calls[k])
        with open_run(directory, keep=story.keep, background=False) as run:
            found = run.restore_or_init(make_state(0))
            assert found.step is not None and found.skipped == ()
            if outcome == "nothing":
                assert found.step == 3
            check_state(found.state, found.step)
            story.finish(run)
        assert list_files(directory) == story.left
        shutil.rmtree(directory)
    assert sum(raised.values()) == len(failing) >= (100 if everywhere else 18)
    assert len(raised) >= 2


@MODES
def test_a_file_that_cannot_be_removed_costs_no_training(
    tmp_path: Path, background: bool
) -> None:
    story, fake = STORIES["keep-last-1"], FakeOs()
    story.prepare(tmp_path)
    notes: list[str] = []

    def refuse(number: int, call: Call, args: tuple[Any, ...]) -> None:
        if call.name == "unlink" and call.file.startswith("step-"):
            raise PermissionError(errno.EACCES, "injected")

    def act(run: Run) -> None:
        story.act(run)
        notes.extend(run.notes)
        assert run.failures == ()

    fake.before = refuse
    act_through(fake, tmp_path, act, keep=story.keep, background=background)
    assert notes == ["old checkpoints stay: PermissionError: injected"] * 2
    assert list_files(tmp_path) == files_of(1, 2, 3)
    with open_run(tmp_path, keep=story.keep, background=False) as run:
        story.finish(run)
    assert list_files(tmp_path) == story.left


def test_a_run_that_was_rolled_back_never_goes_on_from_what_was_abandoned(
    tmp_path: Path,
) -> None:
    save_steps(tmp_path, 1, 2, 3, 4, 5)
    with open_run(tmp_path) as run:
        aside = run.rollback(2)
    names = [f"step-{step}.safetensors.abandoned" for step in (5, 4, 3)]
    assert [Path(path).name for path in aside] == names
    for _ in range(2):
        with open_run(tmp_path) as run:
            assert run.restore_or_init(make_state(0)).step == 2
            assert [entry.step for entry in run.list()] == [1, 2]
    with open_run(tmp_path) as run:
        run.restore_or_init(make_state(0))
        run.step(make_state(3, "b"), step=3)
    with open_run(tmp_path) as run:
        check_state(run.restore_or_init(make_state(0)).state, 3, "b")
        run.rollback(2)
    assert list_files(tmp_path) == {
        *files_of(1, 2),
        *names,
        "step-3.safetensors.2.abandoned",
    }


def test_a_rollback_to_what_is_not_whole_changes_nothing(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2, 3)
    damage(tmp_path / "step-2.safetensors", -1)
    before = read_tree(tmp_path)
    with open_run(tmp_path) as run:
        for step in (2, 7):
            with pytest.raises(CheckpointError, match=f"step-2|step {step}"):
                run.rollback(step)
    assert read_tree(tmp_path) == before
