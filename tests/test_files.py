"""What may lie at a path, and what a save makes of it: modes, links, other files."""

from __future__ import annotations

import errno
import json
import os
import pickle
import re
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from _fake_os import Call, FakeOs, install
from _writer_process import numbered_state, read_number, save_number

from ajaxckpt import (
    CheckpointError,
    CheckpointNotFoundError,
    DamagedCheckpointError,
    InvalidArgumentError,
    NotACheckpointError,
    _files,
    _paths,
    checkpoint_exists,
    open_checkpoint,
    restore_into,
    save_checkpoint,
    verify_checkpoint,
)
from ajaxckpt._metadata import Metadata
from ajaxckpt._writer import write_checkpoint

# nothing here may wait: a FIFO that blocks is to fail, not to hang
pytestmark = pytest.mark.timeout(60)

BIG = 1 << 12


def save(path: object, number: int = 1) -> None:
    save_checkpoint({"w": np.full(3, number)}, path, step=number)


def restore(path: object) -> int:
    state = restore_into({"w": np.zeros(3, np.int64)}, path)
    assert len(set(state["w"].tolist())) == 1
    return int(state["w"][0])


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def write_with(path: Path, number: int, midway: Callable[[], None]) -> None:
    """Save, and do something when half of the payload is out."""
    state = numbered_state(number, big=BIG, before_replay=midway)
    write_checkpoint(str(path), state, Metadata(checkpoint_id="1" * 32, step=number))


@pytest.fixture
def umask() -> Iterator[Callable[[int], int]]:
    old = os.umask(0o022)
    yield os.umask
    os.umask(old)


# modes


@pytest.mark.parametrize("mask", [0o000, 0o002, 0o022, 0o027, 0o077], ids=oct)
def test_a_new_file_has_the_mode_of_the_umask(
    tmp_path: Path, umask: Callable[[int], int], mask: int
) -> None:
    umask(mask)
    save(tmp_path / "new" / "state")
    assert mode_of(tmp_path / "new" / "state") == 0o666 & ~mask
    assert mode_of(tmp_path / "new") == 0o777 & ~mask


@pytest.mark.parametrize("mode", [0o400, 0o444, 0o600, 0o640, 0o666, 0o755], ids=oct)
def test_a_replaced_file_hands_down_its_mode(
    tmp_path: Path, umask: Callable[[int], int], mode: int
) -> None:
    path = tmp_path / "state"
    save(path, 1)
    path.chmod(mode)
    umask(0o027)
    save(path, 2)
    assert mode_of(path) == mode
    assert restore(path) == 2


def test_the_temp_is_no_more_readable_than_the_file_it_replaces(
    tmp_path: Path, umask: Callable[[int], int]
) -> None:
    path = tmp_path / "state"
    save(path)
    path.chmod(0o600)
    umask(0)
    modes: list[int] = []

    def look() -> None:
        (temp,) = tmp_path.glob(".ajaxckpt-*.tmp")
        modes.append(mode_of(temp))

    write_with(path, 2, look)
    assert modes == [0o600]


# links


def test_a_symbolic_link_is_followed_and_stays_a_link(tmp_path: Path) -> None:
    real, links = tmp_path / "real", tmp_path / "links"
    real.mkdir()
    links.mkdir()
    save(real / "state", 1)
    (links / "middle").symlink_to("../real/state")
    (links / "latest").symlink_to("middle")
    record = save_checkpoint({"w": np.full(3, 2)}, links / "latest")
    assert record.path == str(real / "state")
    assert os.readlink(links / "latest") == "middle"
    assert os.readlink(links / "middle") == "../real/state"
    assert restore(real / "state") == restore(links / "latest") == 2
    assert os.listdir(real) == ["state"]
    assert sorted(os.listdir(links)) == ["latest", "middle"]


def test_a_linked_directory_is_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    save(tmp_path / "link" / "run" / "state", 4)
    assert restore(tmp_path / "real" / "run" / "state") == 4
    assert (tmp_path / "link").is_symlink()


def test_a_dangling_link_is_no_missing_file_and_a_save_fills_it(
    tmp_path: Path,
) -> None:
    link, target = tmp_path / "latest", tmp_path / "far" / "state"
    link.symlink_to("far/state")
    for verb in (checkpoint_exists, open_checkpoint, verify_checkpoint, restore):
        with pytest.raises(CheckpointNotFoundError) as caught:
            verb(link)
        assert f"points to {target}, where nothing is" in str(caught.value)
    save(link, 3)
    assert link.is_symlink() and checkpoint_exists(link)
    assert restore(target) == restore(link) == 3


def test_links_in_a_circle_are_an_error_and_stay(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    for verb in (save, restore, checkpoint_exists):
        with pytest.raises(OSError) as caught:
            verb(tmp_path / "a")
        assert caught.value.errno == errno.ELOOP
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]
    assert (tmp_path / "a").is_symlink()


def test_a_hard_link_keeps_the_old_state(tmp_path: Path) -> None:
    save(tmp_path / "state", 1)
    os.link(tmp_path / "state", tmp_path / "kept")
    save(tmp_path / "state", 2)
    assert restore(tmp_path / "kept") == 1
    assert restore(tmp_path / "state") == 2


# parents


def test_missing_parents_are_created(tmp_path: Path) -> None:
    save(tmp_path / "a" / "b" / "c" / "state", 5)
    assert restore(tmp_path / "a" / "b" / "c" / "state") == 5


def test_a_parent_that_is_a_file_is_an_error_and_stays(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "file" / "state", tmp_path / "file" / "a" / "state"):
        for verb in (save, restore, checkpoint_exists):
            with pytest.raises(NotADirectoryError):
                verb(path)
    assert (tmp_path / "file").read_text() == "mine"
    assert os.listdir(tmp_path) == ["file"]


# other people's files


def foreign_safetensors() -> bytes:
    header = json.dumps(
        {
            "__metadata__": {"note": "made for ajaxckpt"},
            "w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
        }
    ).encode()
    return len(header).to_bytes(8, "little") + header + bytes(4)


FOREIGN = {
    "one byte": b"x",
    "text": b"reward,step\n1.0,2\n",
    "a script that imports us": b"import jax\nimport ajaxckpt\n\nsave = 1\n",
    "a note that begins with us": b"ajaxckpt ajaxckpt ajaxckpt",
    "zeros": bytes(4096),
    "a pickle": pickle.dumps({"ajaxckpt": [1.0] * 9}),
    "a safetensors file of others": foreign_safetensors(),
    "a zip": b"PK\x03\x04" + bytes(100),
}


@pytest.mark.parametrize("content", FOREIGN.values(), ids=FOREIGN.keys())
def test_a_foreign_file_is_never_replaced(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "state"
    path.write_bytes(content)
    before = path.stat()
    with pytest.raises(NotACheckpointError) as caught:
        save(path)
    assert str(caught.value) == (
        f"{path}: cannot save: a file is there that ajaxckpt did not write\n"
        "To mend: save to another path, or remove the file yourself"
    )
    assert path.read_bytes() == content
    after = path.stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert os.listdir(tmp_path) == ["state"]


@pytest.mark.parametrize("content", FOREIGN.values(), ids=FOREIGN.keys())
def test_a_foreign_file_is_never_read_as_a_checkpoint(
    tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "state"
    path.write_bytes(content)
    for verb in (checkpoint_exists, open_checkpoint, verify_checkpoint, restore):
        with pytest.raises((NotACheckpointError, DamagedCheckpointError)) as caught:
            verb(path)
        assert caught.value.path == str(path) and caught.value.hint


def test_a_foreign_file_behind_a_link_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")
    (tmp_path / "state").symlink_to("notes")
    with pytest.raises(NotACheckpointError):
        save(tmp_path / "state")
    assert (tmp_path / "notes").read_text() == "mine"
    assert (tmp_path / "state").is_symlink()


@pytest.mark.parametrize("old", [True, False], ids=["over a checkpoint", "first save"])
def test_a_foreign_file_that_appears_during_the_save_is_never_replaced(
    tmp_path: Path, old: bool
) -> None:
    path = tmp_path / "state"
    if old:
        save_number(str(path), 1, big=BIG)

    def appear() -> None:
        (tmp_path / "draft").write_text("mine")
        os.replace(tmp_path / "draft", path)

    with pytest.raises(NotACheckpointError):
        write_with(path, 2, appear)
    assert path.read_text() == "mine"
    assert os.listdir(tmp_path) == ["state"]


def test_a_checkpoint_that_appears_during_the_save_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "state"
    write_with(path, 2, lambda: save_number(str(path), 1, big=BIG))
    assert read_number(str(path)) == 2


def test_a_checkpoint_removed_during_the_save_is_saved_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "state"
    save_number(str(path), 1, big=BIG)
    write_with(path, 2, path.unlink)
    assert read_number(str(path)) == 2
    # and between the two looks that a save takes at it
    fake = install(monkeypatch, FakeOs())
    looks: list[int] = []

    def before(number: int, call: Call, args: tuple[Any, ...]) -> None:
        if call == Call("stat", "state"):
            looks.append(number)
            path.unlink(missing_ok=True)

    fake.before = before
    save_number(str(path), 3, big=BIG)
    assert looks
    fake.before = lambda *_: None
    assert read_number(str(path)) == 3


def test_an_empty_file_is_replaced_and_hands_down_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "state"
    path.touch()
    path.chmod(0o640)
    with pytest.raises(DamagedCheckpointError, match="the file is empty"):
        checkpoint_exists(path)
    save(path, 2)
    assert restore(path) == 2 and mode_of(path) == 0o640


def test_a_damaged_checkpoint_is_no_missing_file_and_may_be_replaced(
    tmp_path: Path,
) -> None:
    path = tmp_path / "state"
    save(path, 1)
    whole = path.read_bytes()
    for damaged in (whole[:-5], whole[:100], whole[:-1] + b"\xff", whole + b"x"):
        path.write_bytes(damaged)
        with pytest.raises(DamagedCheckpointError):
            verify_checkpoint(path)
        save(path, 2)
        assert restore(path) == 2
    path.write_bytes(whole[:100])
    with pytest.raises(DamagedCheckpointError):
        checkpoint_exists(path)


# what is no file


@pytest.fixture(params=["a directory", "a FIFO", "a socket", "a device"])
def oddity(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, str]]:
    path = tmp_path / "odd"
    if request.param == "a directory":
        path.mkdir()
    elif request.param == "a FIFO":
        os.mkfifo(path)
    elif request.param == "a socket":
        directory = os.open(tmp_path, os.O_RDONLY)
        with socket.socket(socket.AF_UNIX) as server:
            # the address of a socket may have no more than 107 bytes
            server.bind(f"/proc/self/fd/{directory}/odd")
        os.close(directory)
    else:
        path = Path("/dev/null")
    yield request.param, str(path)


def test_what_is_no_file_is_refused_at_once_and_stays(oddity: tuple[str, str]) -> None:
    kind, path = oddity
    before = os.lstat(path)
    descriptors = len(os.listdir("/dev/fd"))
    verbs = {
        save: "cannot save",
        restore: "cannot restore",
        open_checkpoint: "cannot open",
        checkpoint_exists: "cannot tell whether a checkpoint exists",
        verify_checkpoint: "",
    }
    for verb, act in verbs.items():
        with pytest.raises(NotACheckpointError) as caught:
            verb(path)
        message = str(caught.value)
        assert message.startswith(f"{path}: {act}")
        mend = "pass the path of a file"
        if kind == "a directory":
            mend += ", or read a run's directory with ajaxckpt.Run(directory)"
        assert message.endswith(f": is {kind}\nTo mend: {mend}")
    after = os.lstat(path)
    assert (after.st_ino, after.st_mode) == (before.st_ino, before.st_mode)
    assert len(os.listdir("/dev/fd")) == descriptors
    if path != "/dev/null":
        assert os.listdir(os.path.dirname(path)) == ["odd"]


def test_a_fifo_that_takes_the_place_of_a_file_while_it_is_opened_blocks_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "state"
    fake = install(monkeypatch, FakeOs())

    def swap(number: int, call: Call, args: tuple[Any, ...]) -> None:
        if call == Call("open", "state") and path.is_file():
            path.unlink()
            os.mkfifo(path)

    for verb in (save, restore, checkpoint_exists):
        fake.before = lambda *_: None
        path.unlink(missing_ok=True)
        save(path)
        fake.before = swap
        with pytest.raises(NotACheckpointError, match="is a FIFO"):
            verb(path)
        assert os.listdir(tmp_path) == ["state"]


def test_a_fifo_that_appears_during_the_save_is_never_replaced(tmp_path: Path) -> None:
    path = tmp_path / "state"
    with pytest.raises(NotACheckpointError, match="is a FIFO"):
        write_with(path, 2, lambda: os.mkfifo(path))
    assert stat.S_ISFIFO(path.stat().st_mode)
    assert os.listdir(tmp_path) == ["state"]


# how a path may be written


def test_relative_paths_are_resolved_when_the_call_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    monkeypatch.chdir(here)

    def wander(fd: int, buffers: list[Any]) -> int:
        os.chdir(there)
        return os.writev(fd, buffers)

    with pytest.MonkeyPatch.context() as patch:
        install(patch, FakeOs(writev=wander))
        record = save_checkpoint({"w": np.full(3, 6)}, "runs/state")
    assert Path.cwd() == there
    assert record.path == str(here / "runs" / "state")
    assert os.listdir(there) == []
    assert restore(here / "runs" / "state") == 6

    monkeypatch.chdir(here)
    checkpoint = open_checkpoint(Path("runs") / "state")
    monkeypatch.chdir(there)
    with checkpoint:
        assert checkpoint.path == str(here / "runs" / "state")
        assert checkpoint["w"].tolist() == [6, 6, 6]
    assert not checkpoint_exists("runs/state")
    assert checkpoint_exists("../here/runs/state")


def test_a_plan_made_before_a_chdir_reads_the_file_it_was_made_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ajaxckpt import plan_restore

    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path)
    save("state", 8)
    plan = plan_restore({"w": np.zeros(3, np.int64)}, "state")
    monkeypatch.chdir("there")
    assert plan.apply()["w"].tolist() == [8, 8, 8]


def test_a_tilde_is_the_home_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    save("~/run/state", 7)
    assert restore(tmp_path / "run" / "state") == restore("~/run/state") == 7
    assert restore(Path("~/run/state")) == 7
    assert checkpoint_exists("~/run/state")


def test_a_path_may_be_any_path_like(tmp_path: Path) -> None:
    class Place:
        def __fspath__(self) -> str:
            return str(tmp_path / "state")

    save(Place(), 9)
    assert restore(Place()) == restore(tmp_path / "state") == 9
    assert checkpoint_exists(Place()) and verify_checkpoint(Place()).leaves == 1


@pytest.mark.parametrize("path", [None, 3, 1.5, ["state"]], ids=repr)
def test_what_is_no_path_is_a_type_error(path: object) -> None:
    for verb in (save, restore, checkpoint_exists, open_checkpoint, verify_checkpoint):
        with pytest.raises(TypeError):
            verb(path)


@pytest.mark.parametrize(
    "name", ["x" * 255, "zäh 状態", "a b\nc", "-", "state.tmp", "%s{}", "c:d", "s3:x"]
)
def test_any_name_that_the_system_takes_is_taken(tmp_path: Path, name: str) -> None:
    save(tmp_path / name, 1)
    save(tmp_path / name, 2)
    assert os.listdir(tmp_path) == [name]
    assert restore(tmp_path / name) == 2


def test_a_name_that_is_too_long_is_the_systems_error(tmp_path: Path) -> None:
    with pytest.raises(OSError) as caught:
        save(tmp_path / ("x" * 256))
    assert caught.value.errno == errno.ENAMETOOLONG
    assert os.listdir(tmp_path) == []


def test_the_home_of_nobody_is_refused(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    for verb in (save, open_checkpoint, checkpoint_exists):
        with pytest.raises(InvalidArgumentError, match="names the home of nobody"):
            verb("~nobody-of-this-name/x")
    assert os.listdir(tmp_path) == []


def test_a_path_that_no_encoding_spells_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="is no path"):
        checkpoint_exists("\ud800.safetensors")


LOGGING = """
import os, sys, threading, numpy as np
from ajaxckpt._dtypes import STORED_DTYPES
from ajaxckpt._layout import LeafSpec
from ajaxckpt._metadata import Metadata
from ajaxckpt._payload import whole_leaf
from ajaxckpt._writer import StateData, write_checkpoint
os.close(2)
data = np.zeros(1 << 20, np.uint8)
def source():
    try:
        os.write(2, b"W0000 a line of a log")
    except OSError:
        pass
    return whole_leaf(data, STORED_DTYPES["uint8"], frozen=False)
spec = LeafSpec(kind="numpy", dtype="uint8", shape=data.shape)
state = StateData(layout={"a": spec}, values={}, sources={"a": source})
write_checkpoint(sys.argv[1], state, Metadata(checkpoint_id="a"))
"""


def test_what_is_logged_to_a_closed_stderr_goes_into_no_checkpoint(
    tmp_path: Path,
) -> None:
    path = tmp_path / "state"
    subprocess.run([sys.executable, "-c", LOGGING, str(path)], check=True)
    assert verify_checkpoint(path).leaves == 1


def test_a_fifo_named_like_a_temp_blocks_no_save(tmp_path: Path) -> None:
    fifo = tmp_path / ".ajaxckpt-0123456789abcdef.tmp"
    os.mkfifo(fifo)
    save(tmp_path / "state")
    assert stat.S_ISFIFO(fifo.stat().st_mode)


@pytest.mark.parametrize(
    "url", ["s3://bucket/run/state", "gs://b/s", "file:///tmp/s", "hdfs+x.y-z://h/s"]
)
def test_a_url_is_refused_and_nothing_is_created(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for verb in (save, restore, checkpoint_exists, open_checkpoint, verify_checkpoint):
        with pytest.raises(InvalidArgumentError) as caught:
            verb(url)
        assert f"{url!r} is a URL, not a local path" in str(caught.value)
        assert "To mend: pass a path on a local file system" in str(caught.value)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("path", ["", "runs/", "runs/x/", "a\0b"], ids=repr)
def test_what_cannot_be_a_files_path_is_refused_and_nothing_is_created(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for verb in (save, restore, checkpoint_exists, open_checkpoint, verify_checkpoint):
        with pytest.raises(InvalidArgumentError) as caught:
            verb(path)
        assert f"{path!r} is not the path of a file" in str(caught.value)
        assert "such as runs/latest.safetensors" in str(caught.value)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("path", [".", "..", "sub/.", "~"])
def test_a_directory_by_any_name_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for verb in (save, restore, checkpoint_exists):
        with pytest.raises(NotACheckpointError, match="is a directory"):
            verb(path)
    assert os.listdir(tmp_path) == ["sub"]


# is it there


def test_a_checkpoint_exists_is_false_only_if_nothing_is_there(tmp_path: Path) -> None:
    assert checkpoint_exists(tmp_path / "state") is False
    assert checkpoint_exists(tmp_path / "no" / "such" / "place") is False
    save(tmp_path / "state")
    assert checkpoint_exists(tmp_path / "state") is True
    assert checkpoint_exists(str(tmp_path / "state")) is True


def test_a_missing_file_names_the_nearest_directory_that_exists(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    cases = {
        tmp_path / "runs" / "state": tmp_path / "runs",
        tmp_path / "runs" / "seed0" / "x" / "state": tmp_path / "runs",
        tmp_path / "rums" / "state": tmp_path,
    }
    for path, nearest in cases.items():
        with pytest.raises(CheckpointNotFoundError) as caught:
            restore(path)
        assert str(caught.value) == (
            f"{path}: cannot restore: no such file; "
            f"the nearest directory that exists is {nearest}\n"
            "To mend: check the path, or ask checkpoint_exists(path) first"
        )
        assert isinstance(caught.value, FileNotFoundError)
    assert os.listdir(tmp_path) == ["runs"] and os.listdir(tmp_path / "runs") == []


# systems that lack something


def without(monkeypatch: pytest.MonkeyPatch, *names: str, **attributes: Any) -> FakeOs:
    """Take functions away from the file layer, and ``fcntl`` altogether."""
    fake = FakeOs(**attributes)
    fake.missing = set(names)
    monkeypatch.setattr(_files, "os", fake)
    monkeypatch.setattr(_paths, "os", fake)
    monkeypatch.setattr(_files, "fcntl", None)
    return fake


def test_a_system_without_gathered_calls_locks_and_modes_saves_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "state"
    save_number(str(path), 2)
    whole = path.read_bytes()
    save_number(str(path), 1)
    fake = without(monkeypatch, "writev", "preadv", "fchmod")
    save_number(str(path), 2)
    assert path.read_bytes() == whole
    assert os.listdir(tmp_path) == ["state"] and not fake.open_files
    assert read_number(str(path)) == 2
    assert {"write", "read"} <= set(fake.names)
    assert not {"writev", "preadv", "fchmod", "flock"} & set(fake.names)


def test_threads_share_an_open_checkpoint_without_a_positioned_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "state"
    state = {f"w{i}": np.full(50, i) for i in range(16)}
    save_checkpoint(state, path)
    fake = without(monkeypatch, "preadv")

    def dawdle(number: int, call: Call, args: tuple[Any, ...]) -> None:
        if call.name == "read":
            time.sleep(0.002)  # the other threads seek meanwhile, if they can

    fake.before = dawdle
    with open_checkpoint(path) as checkpoint, ThreadPoolExecutor(8) as pool:
        for name, value in zip(state, pool.map(checkpoint.get, state), strict=True):
            assert np.array_equal(value, state[name])


class Windows(FakeOs):
    """A system that renames and removes no file that anybody has open."""

    def __init__(self) -> None:
        super().__init__(name="nt")
        self.missing = {"writev", "preadv", "fchmod"}
        self.held: dict[str, int] = {}

    def _refuse_open(self, *paths: str) -> None:
        for path in paths:
            left = self.held.get(path, 0)
            self.held[path] = left - 1
            if left > 0 or path in self.open_files.values():
                raise PermissionError(errno.EACCES, "used by another process", path)

    def replace(self, source: str, target: str) -> None:
        self.calls.append(Call("replace", os.path.basename(source)))
        self._refuse_open(source, target)
        os.replace(source, target)

    def unlink(self, path: str) -> None:
        self._refuse_open(path)
        os.unlink(path)


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> Windows:
    fake = Windows()
    monkeypatch.setattr(_files, "os", fake)
    monkeypatch.setattr(_paths, "os", fake)
    monkeypatch.setattr(_files, "fcntl", None)
    waits: list[float] = []
    monkeypatch.setattr(_files.time, "sleep", waits.append)
    fake.__dict__["waits"] = waits
    return fake


def test_windows_saves_twice_to_one_path(tmp_path: Path, windows: Windows) -> None:
    path = tmp_path / "state"
    save_number(str(path), 1)
    save_number(str(path), 2)
    assert os.listdir(tmp_path) == ["state"] and not windows.open_files
    assert read_number(str(path)) == 2


def test_windows_waits_for_a_reader_to_let_go(tmp_path: Path, windows: Windows) -> None:
    path = tmp_path / "state"
    save_number(str(path), 1)
    before = windows.names.count("replace")
    windows.held[str(path)] = 2
    save_number(str(path), 2)
    assert windows.names.count("replace") - before == 3
    assert windows.waits == sorted(windows.waits) and len(windows.waits) == 2
    assert read_number(str(path)) == 2


def test_windows_gives_up_on_a_reader_that_never_lets_go(
    tmp_path: Path, windows: Windows
) -> None:
    path = tmp_path / "state"
    save_number(str(path), 1)
    with open_checkpoint(path), pytest.raises(PermissionError, match="another process"):
        save_number(str(path), 2)
    assert 2 <= len(windows.waits) <= 10 and sum(windows.waits) < 5
    assert list(windows.open_files.values()) == [str(path)], "the reader's alone"
    assert os.listdir(tmp_path) == ["state"]
    assert read_number(str(path)) == 1


def test_windows_removes_the_temp_of_a_failed_save(
    tmp_path: Path, windows: Windows
) -> None:
    path = tmp_path / "state"
    save_number(str(path), 1)

    def before(number: int, call: Call, args: tuple[Any, ...]) -> None:
        if call.name == "fsync":
            raise OSError(errno.ENOSPC, "full")

    windows.before = before
    with pytest.raises(OSError, match="full"):
        save_number(str(path), 2)
    assert read_number(str(path)) == 1
    assert os.listdir(tmp_path) == ["state"]


def test_elsewhere_a_refused_rename_is_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = install(monkeypatch, FakeOs())

    def before(number: int, call: Call, args: tuple[Any, ...]) -> None:
        if call.name == "replace":
            raise PermissionError(errno.EACCES, "no")

    fake.before = before
    with pytest.raises(PermissionError):
        save_number(str(tmp_path / "state"), 1)
    assert fake.names.count("replace") == 1


def test_a_system_that_syncs_more_than_fsync_is_asked_to_and_may_decline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # macOS: fsync reaches the drive, F_FULLFSYNC the platter; not every volume can
    fake = install(monkeypatch, FakeOs())
    asked: list[str] = []

    def full_sync(fd: int, command: int) -> None:
        asked.append(fake.open_files[fd])
        if len(asked) > 1:
            raise OSError(errno.ENOTSUP, "not supported")

    monkeypatch.setattr(_files.fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(_files.fcntl, "fcntl", full_sync, raising=False)
    synced: list[list[Call]] = []
    for number in (1, 2):
        fake.calls.clear()
        save_number(str(tmp_path / "state"), number)
        synced.append([call for call in fake.calls if call.name == "fsync"])
    assert [path.endswith(".tmp") for path in asked] == [True, True]
    assert [call.file for call in synced[0]] == [tmp_path.name]
    assert [call.file for call in synced[1]] == [
        os.path.basename(asked[1]),
        tmp_path.name,
    ]


def test_temp_names_are_new_each_time_and_hold_no_reserved_character(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = install(monkeypatch, FakeOs())
    for number in range(20):
        save_number(str(tmp_path / "con: state?"), number, big=64)
    names = [call.file for call in fake.calls if call.name == "replace"]
    assert len(set(names)) == 20
    assert all(re.fullmatch(r"[A-Za-z0-9.-]+", name) for name in names)
    assert all(not name.endswith(".") and len(name) < 64 for name in names)


def test_every_refusal_is_a_checkpoint_error_with_a_way_out(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("mine")
    for path in ("s3://b/x", "", str(tmp_path), tmp_path / "text"):
        with pytest.raises(CheckpointError) as caught:
            save(path)
        assert caught.value.hint and "\nTo mend: " in str(caught.value)
