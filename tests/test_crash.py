"""A save killed at every system call, in the middle of one, and at random times."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
from _fake_os import FakeOs, Killed, die_at, install
from _tracing import find_temps, read_calls, save_traced
from _writer_process import Nursery, nursery, read_number, save_number

from ajaxckpt import DamagedCheckpointError, open_checkpoint

OLD, NEW = 1, 2
_NEEDED = ("open", "writev", "fsync", "close", "rename", "flock", "lseek", "fchmod")

__all__ = ["nursery"]


def check_after_kill(path: Path, expected: int, *, whole_temp: bool) -> None:
    """Check what a killed save left, and that the next one tidies up."""
    assert read_number(str(path)) == expected
    temps = find_temps(path.parent)
    assert len(temps) <= 1
    assert len(os.listdir(path.parent)) == 1 + len(temps)
    for temp in temps:
        if whole_temp:
            assert read_number(str(temp)) == NEW
        else:
            assert not any(temp.read_bytes()[:64])
            with pytest.raises(DamagedCheckpointError):
                open_checkpoint(temp)
    save_number(str(path), OLD)
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.skipif(
    shutil.which("strace") is None,
    reason="strace is not installed: the kills through the seam cover its place",
)
def test_a_kill_at_any_system_call_leaves_the_old_or_the_new_file(
    nursery: Nursery, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, log = tmp_path / "ckpt" / "state.safetensors", tmp_path / "trace"
    path.parent.mkdir()
    save_number(str(path), OLD)
    assert save_traced(nursery, path, NEW, log) == (["saved"], 0)
    assert read_number(str(path)) == NEW
    calls = read_calls(log)
    names = [name for name, _ in calls]
    renamed = next(i for i, name in enumerate(names) if name.startswith("rename"))
    sealed = max(i for i, name in enumerate(names) if name == "writev")
    save_number(str(path), OLD)

    killed: Counter[str] = Counter()
    found: Counter[int] = Counter()
    for i, (name, k) in enumerate(calls):
        inject = ("-e", f"inject={name}:signal=KILL:when={k}")
        fate = save_traced(nursery, path, NEW, tmp_path / "log", *inject)
        assert fate == ([], signal.SIGKILL), f"{name} {k}: not killed"
        # the signal comes before the call is carried out
        expected = OLD if i <= renamed else NEW
        check_after_kill(path, expected, whole_temp=i > sealed)
        killed[name] += 1
        found[expected] += 1

    assert sum(killed.values()) == len(calls) >= 40
    for kind in _NEEDED:
        assert any(name.startswith(kind) for name in killed), f"no kill at {kind}"
    assert killed["writev"] >= 5 and killed["fsync"] == 2
    assert found[OLD] and found[NEW]
    with capsys.disabled():
        table = ", ".join(f"{name} {count}" for name, count in sorted(killed.items()))
        print(
            f"\n{len(calls)} kills by strace: {table}; "
            f"old file {found[OLD]} times, new file {found[NEW]} times"
        )


def save_through(fake: FakeOs, path: Path) -> bool:
    """Save the new state through a fake; return whether the process survived."""
    with pytest.MonkeyPatch.context() as patch:
        install(patch, fake)
        try:
            save_number(str(path), NEW)
        except Killed:
            return False
        finally:
            fake.bury()
    return True


def record_save(path: Path) -> FakeOs:
    """Save once over the old state, unharmed, and return what was called."""
    fake = FakeOs()
    save_number(str(path), OLD)
    assert save_through(fake, path)
    assert read_number(str(path)) == NEW
    save_number(str(path), OLD)
    return fake


def test_a_kill_before_any_call_of_the_file_layer_leaves_the_old_or_the_new_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "state.safetensors"
    names = record_save(path).names
    renamed, last_write = (
        names.index("replace"),
        len(names) - 1 - names[::-1].index("writev"),
    )
    found: Counter[int] = Counter()
    for k in range(len(names)):
        fake = FakeOs()
        fake.before = die_at(k)
        assert not save_through(fake, path)
        assert fake.names[: k + 1] == names[: k + 1]
        expected = OLD if k <= renamed else NEW
        check_after_kill(path, expected, whole_temp=k > last_write)
        found[expected] += 1
    assert found[OLD] + found[NEW] == len(names) >= 30
    assert found[NEW] >= 3
    with capsys.disabled():
        print(f"\n{len(names)} kills through the seam: {dict(Counter(names))}")


def test_a_kill_in_the_middle_of_any_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    names = record_save(path).names
    writes = [k for k, name in enumerate(names) if name == "writev"]
    assert len(writes) >= 5
    for k in writes:
        fake = FakeOs()
        fake.before = die_at(k, halfway=True)
        assert not save_through(fake, path)
        (temp,) = find_temps(tmp_path)
        with pytest.raises(DamagedCheckpointError):
            open_checkpoint(temp)
        assert read_number(str(path)) == OLD
        save_number(str(path), OLD)
        assert os.listdir(tmp_path) == [path.name]


def test_a_kill_during_the_first_save_leaves_nothing_or_the_whole_file(
    tmp_path: Path,
) -> None:
    fake = FakeOs()
    assert save_through(fake, tmp_path / "unharmed" / "run" / "state.safetensors")
    names = fake.names
    assert names.count("mkdir") == 2
    for k in range(len(names)):
        path = tmp_path / str(k) / "run" / "state.safetensors"
        fake = FakeOs()
        fake.before = die_at(k)
        assert not save_through(fake, path)
        assert path.exists() == (k > names.index("replace"))
        if path.exists():
            assert read_number(str(path)) == NEW
        save_number(str(path), OLD)
        assert os.listdir(path.parent) == [path.name]
        shutil.rmtree(tmp_path / str(k))


def test_the_bytes_are_durable_before_the_rename_and_the_rename_before_the_return(
    tmp_path: Path,
) -> None:
    path = tmp_path / "state.safetensors"
    calls = record_save(path).calls
    steps = [
        (call.name, re.sub("[0-9a-f]{16}", "*", call.file))
        for call in calls
        if call.name in ("writev", "fsync", "replace")
    ]
    temp = ".ajaxckpt-*.tmp"
    tail = [("fsync", temp), ("replace", temp), ("fsync", tmp_path.name)]
    assert steps == [*[("writev", temp)] * (len(steps) - 3), *tail]
    between = calls[
        [call.name for call in calls].index("fsync") : [
            call.name for call in calls
        ].index("replace")
    ]
    assert "close" in [call.name for call in between if call.file.endswith(".tmp")]


def test_every_new_directory_is_made_durable_in_its_parent(tmp_path: Path) -> None:
    fake = FakeOs()
    assert save_through(fake, tmp_path / "a" / "b" / "state.safetensors")
    steps = [
        (call.name, call.file)
        for call in fake.calls
        if call.name in ("mkdir", "fsync") and not call.file.endswith(".tmp")
    ]
    expected = [("mkdir", "a"), ("fsync", tmp_path.name), ("mkdir", "b")]
    assert steps == [*expected, ("fsync", "a"), ("fsync", "b")]


def test_the_temp_of_a_dead_writer_is_swept_and_that_of_a_living_one_is_not(
    nursery: Nursery, tmp_path: Path
) -> None:
    path = tmp_path / "state.safetensors"
    save_number(str(path), OLD)
    child = nursery.start("hold", path=str(path), number=NEW)
    assert child.hear() == "holding"
    (held,) = find_temps(tmp_path)
    for number in (3, 4):
        save_number(str(path), number)
        assert find_temps(tmp_path) == [held]
    child.kill()
    assert child.end() == ([], signal.SIGKILL)
    assert find_temps(tmp_path) == [held], "the killed writer leaves its temp"
    save_number(str(tmp_path / "other.safetensors"), 5)
    assert find_temps(tmp_path) == []
    assert read_number(str(path)) == 4


def test_a_slow_writer_finishes_after_others_saved_to_its_path(
    nursery: Nursery, tmp_path: Path
) -> None:
    path = tmp_path / "state.safetensors"
    child = nursery.start("hold", path=str(path), number=NEW)
    assert child.hear() == "holding"
    save_number(str(path), 3)
    child.go()
    assert child.end() == (["saved"], 0)
    assert read_number(str(path)) == NEW
    assert os.listdir(tmp_path) == [path.name]


def test_the_temp_of_a_read_only_file_is_swept_without_privilege(
    nursery: Nursery, tmp_path: Path
) -> None:
    path = tmp_path / "state.safetensors"
    save_number(str(path), OLD)
    path.chmod(0o444)
    job = {"path": str(path), "bound_by_modes": True}
    child = nursery.start("hold", number=NEW, **job)
    assert child.hear() == "holding"
    child.kill()
    child.end()
    assert len(find_temps(tmp_path)) == 1
    child = nursery.start("save", number=3, **job)
    child.go()
    assert child.end() == (["ready", "saved"], 0)
    assert os.listdir(tmp_path) == [path.name]
    assert read_number(str(path)) == 3


def test_the_sweep_leaves_alone_what_is_no_temp_of_ours(tmp_path: Path) -> None:
    names = (
        ".ajaxckpt-0123456789abcde.tmp",
        ".ajaxckpt-0123456789abcdef.tmp.bak",
        ".ajaxckpt-0123456789ABCDEF.tmp",
        "x.ajaxckpt-0123456789abcdef.tmp",
        ".ajaxckpt-notes.tmp",
        "state.tmp",
    )
    for name in names:
        (tmp_path / name).write_text("mine")
    victim = tmp_path / "victim"
    victim.write_text("mine")
    link = tmp_path / ".ajaxckpt-0123456789abcdef.tmp"
    link.symlink_to(victim)
    folder = tmp_path / ".ajaxckpt-fedcba9876543210.tmp"
    folder.mkdir()
    save_number(str(tmp_path / "state.safetensors"), OLD)
    left = {*names, "victim", link.name, folder.name, "state.safetensors"}
    assert set(os.listdir(tmp_path)) == left
    assert victim.read_text() == "mine"


def kill_at_random(nursery: Nursery, directory: Path, times: int) -> tuple[int, int]:
    """Kill writers at random times; return how often a temp and how often none lay."""
    path, generator = directory / "state.safetensors", random.Random(7)
    last, temps = 0, 0
    save_number(str(path), last, big=1 << 20)
    for _ in range(times):
        first = last % 100 + 1
        job = {"path": str(path), "first": first, "stop": 240, "big": 1 << 20}
        child = nursery.start("loop", **job)
        time.sleep(generator.uniform(0, 0.1))
        child.kill()
        said, fate = child.end()
        assert fate == signal.SIGKILL
        assert said == list(range(first, first + len(said)))
        durable = said[-1] if said else last
        running = said[-1] + 1 if said else first
        number = read_number(str(path))
        assert number in (durable, running)
        temps += bool(find_temps(directory))
        assert len(find_temps(directory)) <= 1
        last = number
    return temps, times - temps


@pytest.mark.parametrize(
    "times", [30, pytest.param(200, marks=pytest.mark.slow)], ids=str
)
def test_a_writer_killed_at_random_times_leaves_one_of_its_last_two_states(
    nursery: Nursery, tmp_path: Path, times: int
) -> None:
    with_temp, _ = kill_at_random(nursery, tmp_path, times)
    assert with_temp >= times // 10, "the kills must fall into saves"
    save_number(str(tmp_path / "state.safetensors"), 0)
    assert os.listdir(tmp_path) == ["state.safetensors"]
