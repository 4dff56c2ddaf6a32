"""Damaged, unreadable and foreign files in a run's directory: passed over, kept."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from _run_writer import (
    RunNursery,
    check_state,
    list_files,
    make_state,
    open_run,
    quick_disk,
    read_tree,
    run_nursery,
    save_steps,
)
from make_goldens import _foreign, _newer

from ajaxckpt import (
    CheckpointError,
    CheckpointNotFoundError,
    DamagedCheckpointError,
    KeepBest,
    KeepLast,
    NewerFormatError,
    NotACheckpointError,
    StepExistsError,
    open_checkpoint,
    save_checkpoint,
)

__all__ = ["quick_disk", "run_nursery"]


def name_of(step: int, run: str = "") -> str:
    return f"step-{step}{run}.safetensors"


def header_end(data: bytes) -> int:
    return 8 + int.from_bytes(data[:8], "little")


def flip(data: bytes, position: int) -> bytes:
    changed = bytearray(data)
    changed[position] ^= 16
    return bytes(changed)


def rewrite(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    return lambda path: void(path.write_bytes(change(path.read_bytes())))


def replace(make: Callable[[Path], object]) -> Callable[[Path], None]:
    return lambda path: void(path.unlink(), make(path))


def void(*_: object) -> None:
    return None


@dataclass(frozen=True)
class Damage:
    """What befalls a file, what is said of it, and whether a save may write over it."""

    inflict: Callable[[Path], None]
    reason: str
    is_kept: bool = False


DAMAGES = {
    "empty": Damage(rewrite(lambda data: b""), "empty"),
    "cut in the length": Damage(rewrite(lambda data: data[:5]), "5 bytes", True),
    "cut in the header": Damage(rewrite(lambda data: data[:200]), "200 bytes"),
    "cut in the payload": Damage(rewrite(lambda data: data[:-1]), "bytes"),
    "cut to the header": Damage(
        rewrite(lambda data: data[: header_end(data)]), "bytes"
    ),
    "flip in the length": Damage(rewrite(lambda data: flip(data, 1)), "header"),
    "flip in the head": Damage(rewrite(lambda data: flip(data, 20)), "first", True),
    "flip in the header": Damage(
        rewrite(lambda data: flip(data, header_end(data) - 60)), "header"
    ),
    "flip in the payload": Damage(
        rewrite(lambda data: flip(data, len(data) - 9)), "payload of a leaf is damaged"
    ),
    "appended": Damage(rewrite(lambda data: data + b"\n"), "bytes"),
    "zeros": Damage(rewrite(lambda data: bytes(len(data))), "", True),
    "directory": Damage(replace(Path.mkdir), "is a directory", True),
    "FIFO": Damage(replace(os.mkfifo), "is a FIFO", True),
    "dangling link": Damage(
        replace(lambda path: path.symlink_to(path.parent / "gone")), "gone", True
    ),
    "foreign": Damage(rewrite(lambda data: _foreign()), "", True),
}
EACH = pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)


@EACH
def test_a_damaged_newest_is_passed_over_by_name_and_reason(
    tmp_path: Path, damage: Damage
) -> None:
    save_steps(tmp_path, 1, 2, 3)
    damage.inflict(tmp_path / name_of(3))
    before = read_tree(tmp_path)
    with open_run(tmp_path) as run:
        found = run.restore_or_init(make_state(0))
        check_state(found.state, 2)
        assert (found.step, found.restored) == (2, True)
        (skipped,) = found.skipped
        assert skipped.path == str(tmp_path / name_of(3))
        assert skipped.step == 3
        assert skipped.reason and damage.reason in skipped.reason
        assert f"skipped {name_of(3)}: {skipped.reason}" in found.notes
    reader = open_run(tmp_path)
    newest = reader.newest()
    assert newest is not None and newest.step == 2
    assert reader.restore(make_state(0)).step == 2
    assert [entry.step for entry in reader.list()] == [1, 2, 3]
    with pytest.raises((CheckpointError, OSError)):
        reader.restore(make_state(0), step=3)
    assert read_tree(tmp_path) == before


@EACH
def test_all_damaged_is_an_error_that_names_each_and_changes_nothing(
    tmp_path: Path, damage: Damage
) -> None:
    save_steps(tmp_path, 1, 2, 3)
    for step in (1, 2, 3):
        damage.inflict(tmp_path / name_of(step))
    before = read_tree(tmp_path)
    with open_run(tmp_path, keep=KeepLast(1)) as run:
        for act in (
            lambda: run.restore_or_init(make_state(0)),
            lambda: run.restore(make_state(0)),
            run.newest,
            lambda: run.save(make_state(0), step=0),
            lambda: run.step(make_state(0), step=0),
            lambda: run.save(make_state(3), step=3),
            lambda: run.save(make_state(9), step=9),
        ):
            with pytest.raises(DamagedCheckpointError) as caught:
                act()
            error = caught.value
            assert error.problem == "3 checkpoints are there and none is whole"
            assert error.path == str(tmp_path)
            assert [line.split(": ")[0] for line in error.details] == [
                name_of(step) for step in (3, 2, 1)
            ]
            assert all(damage.reason in line for line in error.details)
            assert "move the files named here" in error.hint
        assert run.prune() == ()
    assert read_tree(tmp_path) == before


@EACH
def test_a_save_of_the_damaged_step_puts_a_whole_file_in_its_place(
    tmp_path: Path, damage: Damage
) -> None:
    save_steps(tmp_path, 1, 2)
    path, aside = tmp_path / name_of(2), tmp_path / f"{name_of(2)}.aside"
    damage.inflict(path)
    lying = read_tree(tmp_path)[path.name]
    with open_run(tmp_path) as run:
        assert run.restore_or_init(make_state(0)).step == 1
        run.step(make_state(2), step=2)
        run.wait()
        assert any(str(aside) in note for note in run.notes) == os.path.lexists(aside)
    assert not path.is_symlink()
    again = open_run(tmp_path).restore(make_state(0))
    check_state(again.state, 2)
    assert again.skipped == ()
    # what may not be ours is moved, never written over
    kept = {aside.name} if damage.is_kept else set[str]()
    assert list_files(tmp_path) == {name_of(1), name_of(2), *kept}
    if damage.is_kept:
        assert read_tree(tmp_path)[aside.name] == lying


@EACH
def test_retention_neither_counts_nor_removes_what_is_damaged(
    tmp_path: Path, damage: Damage
) -> None:
    save_steps(tmp_path, 1, 2, 3, 4, 5)
    for step in (2, 5):
        damage.inflict(tmp_path / name_of(step))
    before = read_tree(tmp_path)
    with open_run(tmp_path, keep=KeepLast(2)) as run:
        assert run.restore_or_init(make_state(0)).step == 4
        expected = (str(tmp_path / name_of(1)),)
        assert run.prune(dry_run=True) == expected
        run.step(make_state(6), step=6)
        run.wait()
        assert run.prune() == ()
    after = read_tree(tmp_path)
    assert set(after) == {name_of(step) for step in (2, 4, 5, 6)}
    for step in (2, 5):
        assert after[name_of(step)] == before[name_of(step)]


@EACH
def test_a_damaged_best_gives_way_to_the_next_best(
    tmp_path: Path, damage: Damage
) -> None:
    """Step 2 is the best of them; 1 and 3 come next, and of equals the newer."""
    save_steps(tmp_path, 1, 2, 3, 4)
    damage.inflict(tmp_path / name_of(2))
    keep = (KeepLast(1), KeepBest("r", "max"))
    with open_run(tmp_path, keep=keep) as run:
        best = run.best()
        assert best is not None and best.step == 3
        found = run.restore_best(make_state(0))
        check_state(found.state, 3)
        assert run.prune() == (str(tmp_path / name_of(1)),)


@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_newer_format_is_not_passed_over(tmp_path: Path, step: int) -> None:
    save_steps(tmp_path, 1, 2, 3)
    path = tmp_path / name_of(step)
    path.write_bytes(_newer(path.read_bytes()))
    before = read_tree(tmp_path)
    with open_run(tmp_path, keep=KeepLast(1)) as run:
        if step < 3:
            assert run.restore_or_init(make_state(0)).step == 3
        else:
            for act in (
                lambda: run.restore_or_init(make_state(0)),
                lambda: run.save(make_state(0), step=0),
                lambda: run.save(make_state(4), step=4),
                run.newest,
            ):
                with pytest.raises(NewerFormatError, match="format version 2") as info:
                    act()
                assert info.value.path == str(path)
                assert "run.rollback" in info.value.hint
            assert read_tree(tmp_path) == before
            run.rollback(2)
            assert run.restore_or_init(make_state(0)).step == 2
        run.save(make_state(9), step=9)
        run.wait()
    left = {name_of(9), name_of(step)} if step < 3 else {name_of(9)}
    assert left <= list_files(tmp_path), "a newer release's file is never removed"


@pytest.mark.parametrize("kind", ["file", "all", "directory"])
def test_what_may_not_be_read_is_passed_over_or_refused(
    run_nursery: RunNursery, tmp_path: Path, kind: str
) -> None:
    """In a process that file modes bind: root's reads what it likes."""
    save_steps(tmp_path, 1, 2)
    closed = {
        "file": [tmp_path / name_of(2)],
        "all": [tmp_path / name_of(step) for step in (1, 2)],
        "directory": [tmp_path],
    }[kind]
    before = read_tree(tmp_path)
    for path in closed:
        path.chmod(0o300 if path == tmp_path else 0)
    try:
        job = {"directory": str(tmp_path), "bound_by_modes": True}
        child = run_nursery.start("resume_or_say", then=[2, 3], **job)
        said, fate = child.end()
    finally:
        for path in closed:
            path.chmod(0o700 if path == tmp_path else 0o600)
    assert fate == 0
    if kind == "file":
        reason = "PermissionError: Permission denied"
        assert said == [[1, [[name_of(2), reason]]]]
        assert list_files(tmp_path) == {
            *map(name_of, (1, 2, 3)),
            f"{name_of(2)}.aside",
        }
        check_state(open_run(tmp_path).restore(make_state(0), step=2).state, 2)
        return
    ((error, text),) = said
    if kind == "all":
        assert error == "DamagedCheckpointError"
        assert "2 checkpoints are there and none is whole" in text
        assert text.count("PermissionError: Permission denied") == 2
    else:
        assert error == "PermissionError"
    contents = {name: found[1] for name, found in read_tree(tmp_path).items()}
    assert contents == {name: found[1] for name, found in before.items()}


def test_a_file_at_the_directorys_path_is_refused(tmp_path: Path) -> None:
    save_checkpoint(make_state(1), tmp_path / "one.safetensors")
    for path in (tmp_path / "one.safetensors", tmp_path / "mine"):
        if not path.exists():
            path.write_text("mine")
        before = read_tree(tmp_path)
        reader = open_run(path)
        for act in (reader.list, reader.newest, reader.__enter__):
            with pytest.raises(NotACheckpointError, match="is no directory"):
                act()
        assert read_tree(tmp_path) == before


@pytest.mark.parametrize(
    "stride", [61, pytest.param(7, marks=pytest.mark.slow)], ids=str
)
@pytest.mark.parametrize("kind", ["flip", "cut"])
def test_wherever_the_newest_is_damaged_the_one_before_is_used(
    tmp_path: Path, kind: str, stride: int
) -> None:
    save_steps(tmp_path, 1, 2)
    path = tmp_path / name_of(2)
    whole = path.read_bytes()
    positions = range(0, len(whole), stride)
    for position in positions:
        if kind == "flip":
            damaged = bytearray(whole)
            damaged[position] ^= 1 << position % 8
        else:
            damaged = whole[:position]
        path.write_bytes(damaged)
        found = open_run(tmp_path).restore(make_state(0))
        assert found.step == 1, position
        check_state(found.state, 1)
        assert [Path(skipped.path).name for skipped in found.skipped] == [path.name]
        assert path.read_bytes() == damaged
    assert len(positions) >= 100
    path.write_bytes(whole)
    assert open_run(tmp_path).restore(make_state(0)).step == 2


# ------------------------------------------------------------------------- names


def test_steps_are_numbers_whatever_their_padding(tmp_path: Path) -> None:
    save_steps(tmp_path, 99, 500, 2500, 100000, 900000)
    for step, name in ((99, "step-00099"), (900000, "step-0900000")):
        (tmp_path / name_of(step)).rename(tmp_path / f"{name}.safetensors")
    shutil.copy(tmp_path / name_of(500), tmp_path / "handpicked.safetensors")
    run = open_run(tmp_path)
    steps = [99, 500, 2500, 100000, 900000]
    assert [entry.step for entry in run.list()] == steps
    assert run.path(99) == str(tmp_path / "step-00099.safetensors")
    for step in steps:
        check_state(run.restore(make_state(0), step=step).state, step)
    assert run.restore(make_state(0)).step == 900000
    with open_run(tmp_path) as run:
        with pytest.raises(StepExistsError, match="before step 900000"):
            run.step(make_state(100001), step=100001)
        run.step(make_state(900001), step=900001)
    assert open_run(tmp_path).restore(make_state(0)).step == 900001


def test_the_headers_step_wins_over_the_name(tmp_path: Path) -> None:
    save_steps(tmp_path, 7, 8)
    copy = tmp_path / name_of(100)
    shutil.copy(tmp_path / name_of(7), copy)
    mine = copy.read_bytes()
    with open_run(tmp_path, keep=KeepLast(1)) as run:
        found = run.restore_or_init(make_state(0))
        assert (found.step, found.skipped) == (8, ())
        assert [entry.step for entry in run.list()] == [7, 8]
        run.step(make_state(9), step=9)
        run.wait()
        assert copy.read_bytes() == mine, "the copy is the user's, not the run's"
        run.step(make_state(100), step=100)
        run.wait()
        assert run.restore(make_state(0)).step == 100
    kept = [p for p in tmp_path.iterdir() if p.is_file() and p.read_bytes() == mine]
    assert len(kept) == 1, "nor is it written over"


@pytest.mark.parametrize("left", [0, 100, -1])
def test_a_damaged_file_whose_name_says_no_step_is_not_taken_for_none(
    tmp_path: Path, left: int
) -> None:
    save_steps(tmp_path, 5)
    path = tmp_path / "handpicked.safetensors"
    (tmp_path / name_of(5)).rename(path)
    path.write_bytes(path.read_bytes()[:left])
    before = read_tree(tmp_path)
    with open_run(tmp_path) as run:
        for act in (
            lambda: run.restore_or_init(make_state(0)),
            lambda: run.save(make_state(0), step=0),
        ):
            with pytest.raises(DamagedCheckpointError) as info:
                act()
            assert "1 checkpoint is there and none is whole" in str(info.value)
            assert info.value.details[0].startswith("handpicked.safetensors: ")
    assert read_tree(tmp_path) == before


def test_what_is_no_checkpoint_and_has_no_step_is_none_of_the_runs(
    tmp_path: Path,
) -> None:
    others = {
        "model.safetensors": _foreign(),
        "step-x.safetensors": b"mine, not a checkpoint",
        "step-3.safetensors.bak": b"mine",
        "metrics.csv": b"step\n",
        "step-9.safetensors.tmp": b"",
    }
    for name, data in others.items():
        (tmp_path / name).write_bytes(data)
    with open_run(tmp_path, keep=KeepLast(1)) as run:
        assert not run.restore_or_init(make_state(0)).restored
        for step in (1, 2):
            run.step(make_state(step), step=step)
    assert list_files(tmp_path) == {*others, name_of(2)}
    for name, data in others.items():
        assert (tmp_path / name).read_bytes() == data


def test_nothing_but_the_runs_own_files_is_ever_removed(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2, 3, run_id="a")
    save_steps(tmp_path, 1, 2, 3, run_id="b")
    save_checkpoint(make_state(2), tmp_path / "step-2.safetensors", step=2)
    a = {step: tmp_path / name_of(step, ".a") for step in (1, 2, 3)}
    shutil.copy(a[1], tmp_path / "best.safetensors")
    shutil.copy(a[1], tmp_path / "step-1.a.copy.safetensors")
    shutil.copytree(tmp_path, tmp_path / "step-0")
    open_run(tmp_path, run_id="a").pin(2)
    before = read_tree(tmp_path)
    with open_run(tmp_path, run_id="a", keep=KeepLast(1)) as run:
        assert run.restore_or_init(make_state(0)).step == 3
        run.step(make_state(4), step=4)
    after = read_tree(tmp_path)
    gone = {a[1].name, a[3].name}
    assert set(before) - set(after) == gone
    assert set(after) - set(before) == {name_of(4, ".a")}
    assert all(after[name] == before[name] for name in set(before) & set(after))
    with open_run(tmp_path, run_id="a", keep=KeepLast(1)) as run:
        run.unpin(2)
        assert run.prune() == (str(a[2]),)
        assert [entry.step for entry in run.list()] == [1, 4]


def test_a_checkpoint_that_no_run_wrote_is_used_and_never_removed(
    tmp_path: Path,
) -> None:
    for step in (1, 2):
        save_checkpoint(make_state(step), tmp_path / name_of(step), step=step)
    before = read_tree(tmp_path)
    with open_run(tmp_path, keep=KeepLast(1)) as run:
        assert run.restore_or_init(make_state(0)).step == 2
        with pytest.raises(StepExistsError, match="with another content"):
            run.save(make_state(2, "b"), step=2)
        for step in (3, 4):
            run.step(make_state(step), step=step)
    after = read_tree(tmp_path)
    assert set(after) == {name_of(step) for step in (1, 2, 4)}
    assert all(after[name] == before[name] for name in before)


def test_three_outcomes_are_kept_apart(tmp_path: Path) -> None:
    """None there; an older one used; some there and none whole, which is an error."""
    with open_run(tmp_path / "run") as run:
        found = run.restore_or_init(lambda: make_state(0))
        assert (found.restored, found.step, found.path) == (False, None, "")
    with pytest.raises(CheckpointNotFoundError):
        run.restore(make_state(0))
    save_steps(tmp_path / "run", 1, 2, 3)
    path = tmp_path / "run" / name_of(3)
    path.write_bytes(path.read_bytes()[:100])
    with open_run(tmp_path / "run") as run:
        assert run.restore_or_init(make_state(0)).step == 2
    for step in (1, 2):
        path = tmp_path / "run" / name_of(step)
        path.write_bytes(path.read_bytes()[:100])
    with (
        open_run(tmp_path / "run") as run,
        pytest.raises(DamagedCheckpointError, match="none is whole"),
    ):
        run.restore_or_init(make_state(0))
    assert list_files(tmp_path / "run") == {name_of(step) for step in (1, 2, 3)}


def test_damage_found_in_the_middle_of_a_run_does_not_spread(tmp_path: Path) -> None:
    """A step is reported while an older file is damaged behind the run's back."""
    with open_run(tmp_path, keep=KeepLast(2)) as run:
        run.restore_or_init(make_state(0))
        for step in range(1, 7):
            run.step(make_state(step), step=step)
            run.wait()
            if step == 3:
                path = tmp_path / name_of(3)
                path.write_bytes(flip(path.read_bytes(), -1))
    assert list_files(tmp_path) == {name_of(step) for step in (3, 5, 6)}
    with open_checkpoint(tmp_path / name_of(6)) as checkpoint:
        assert checkpoint.step == 6
