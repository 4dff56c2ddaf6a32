"""A save whose calls fail: the error passes, the old file stays, no temp is left."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from _fake_os import Call, FakeOs, fail_at, install
from _tracing import find_temps, read_calls, save_traced
from _writer_process import (
    BIG,
    Nursery,
    numbered_state,
    nursery,
    read_number,
    save_number,
    writer_environment,
)

from ajaxckpt import CheckpointError, save_checkpoint
from ajaxckpt._metadata import Metadata
from ajaxckpt._writer import write_checkpoint

OLD, NEW = 1, 2
MEDIUM = 5 << 18
CODES = (errno.ENOSPC, errno.EIO, errno.EROFS, errno.EACCES)
STALE = ".ajaxckpt-0123456789abcdef.tmp"

__all__ = ["nursery"]


def save_faultily(
    path: Path, before: Callable[..., None], **attributes: Any
) -> tuple[FakeOs, BaseException | None]:
    """Save the new state through a fake; return it and what was raised."""
    fake = FakeOs(**attributes)
    fake.before = before
    with pytest.MonkeyPatch.context() as patch:
        install(patch, fake)
        try:
            save_number(str(path), NEW, big=MEDIUM)
        except BaseException as error:
            return fake, error
    return fake, None


def is_tolerated(call: Call) -> bool:
    """Tell whether a save goes on without this call: locks and tidying are extras."""
    return call.name == "flock" or call.file == STALE


@pytest.fixture
def old(tmp_path: Path) -> bytes:
    """Return the bytes of the old state; the directory stays empty."""
    save_number(str(tmp_path / "old"), OLD, big=MEDIUM)
    whole = (tmp_path / "old").read_bytes()
    (tmp_path / "old").unlink()
    return whole


@pytest.mark.parametrize("stale", [False, True], ids=["tidy", "with a stale temp"])
@pytest.mark.parametrize("code", CODES, ids=errno.errorcode.get)
def test_any_failing_call_passes_its_error_and_keeps_the_old_file(
    tmp_path: Path, old: bytes, code: int, stale: bool
) -> None:
    path, junk = tmp_path / "state.safetensors", tmp_path / STALE

    def save(before: Callable[..., None]) -> tuple[FakeOs, BaseException | None]:
        path.write_bytes(old)
        if stale:
            junk.write_bytes(bytes(100))
        return save_faultily(path, before)

    unharmed, error = save(lambda *_: None)
    assert error is None and os.listdir(tmp_path) == [path.name]
    assert junk.name in {call.file for call in unharmed.calls} or not stale
    failed: list[str] = []
    for k in range(len(unharmed.calls)):
        fake, error = save(fail_at(k, OSError(code, "injected")))
        call, left = fake.calls[k], set(os.listdir(tmp_path))
        assert not fake.open_files, f"{call}: a descriptor is left open"
        if is_tolerated(call):
            assert error is None, call
            assert read_number(str(path)) == NEW
            assert left <= {path.name, STALE}
            continue
        assert type(error) is type(OSError(code, "")), call
        assert error.errno == code
        assert left - {STALE} == {path.name}, f"{call} left {left}"
        if "replace" in fake.names[:k]:
            assert read_number(str(path)) == NEW
        else:
            assert path.read_bytes() == old
        failed.append(call.name)
    counted = [call.name for call in unharmed.calls if not is_tolerated(call)]
    assert failed == counted and len(failed) >= 30
    assert {"open", "writev", "fsync", "close", "replace", "listdir"} <= set(failed)


@pytest.mark.parametrize("code", CODES, ids=errno.errorcode.get)
def test_any_failing_call_of_a_first_save_leaves_no_file(
    tmp_path: Path, code: int
) -> None:
    unharmed, _ = save_faultily(tmp_path / "x" / "run" / "s", lambda *_: None)
    for k in range(len(unharmed.calls)):
        path = tmp_path / str(k) / "run" / "state.safetensors"
        fake, error = save_faultily(path, fail_at(k, OSError(code, "injected")))
        assert not fake.open_files
        if is_tolerated(fake.calls[k]):
            assert error is None
            continue
        assert isinstance(error, OSError) and error.errno == code
        assert not find_temps(path.parent)
        assert path.exists() == ("replace" in fake.names[:k])
        _, error = save_faultily(path, lambda *_: None)
        assert error is None and os.listdir(path.parent) == [path.name]


def test_an_interrupt_at_any_call_leaves_no_temp(tmp_path: Path, old: bytes) -> None:
    path = tmp_path / "state.safetensors"
    path.write_bytes(old)
    unharmed, _ = save_faultily(path, lambda *_: None)
    for k in range(len(unharmed.calls)):
        path.write_bytes(old)
        fake, error = save_faultily(path, fail_at(k, KeyboardInterrupt()))
        assert isinstance(error, KeyboardInterrupt)
        assert not fake.open_files
        assert os.listdir(tmp_path) == [path.name], fake.calls[k]
        expected = NEW if "replace" in fake.names[:k] else OLD
        assert read_number(str(path)) == expected


@pytest.mark.parametrize("code", CODES, ids=errno.errorcode.get)
def test_a_disk_that_fails_from_some_call_on_keeps_the_old_or_the_new_file(
    tmp_path: Path, old: bytes, code: int
) -> None:
    path = tmp_path / "state.safetensors"
    path.write_bytes(old)
    unharmed, _ = save_faultily(path, lambda *_: None)
    for k in range(len(unharmed.calls)):
        path.write_bytes(old)
        before = fail_at(k, OSError(code, "injected"), ever_after=True)
        fake, error = save_faultily(path, before)
        assert isinstance(error, OSError) and error.errno == code, fake.calls[k]
        assert not fake.open_files
        assert read_number(str(path)) == (NEW if "replace" in fake.names[:k] else OLD)
    save_number(str(path), OLD)
    assert os.listdir(tmp_path) == [path.name]


def test_the_public_verb_passes_the_error_of_the_system_untouched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "state.safetensors"
    save_checkpoint({"w": np.zeros(3)}, path)
    old = path.read_bytes()
    fault = OSError(errno.ENOSPC, "No space left on device")
    fake = install(monkeypatch, FakeOs())

    def before(number: int, call: Call, args: tuple[Any, ...]) -> None:
        if call.name == "writev":
            raise fault

    fake.before = before
    with pytest.raises(OSError) as caught:
        save_checkpoint({"w": np.ones(3)}, path)
    assert caught.value is fault
    assert path.read_bytes() == old and os.listdir(tmp_path) == [path.name]


@pytest.mark.parametrize("fault", [MemoryError(), KeyboardInterrupt(), ValueError()])
def test_a_leaf_that_cannot_be_fetched_midway_keeps_the_old_file(
    tmp_path: Path, fault: BaseException
) -> None:
    path = tmp_path / "state.safetensors"
    save_number(str(path), OLD)
    old = path.read_bytes()

    def fail() -> None:
        assert len(find_temps(tmp_path)) == 1
        raise fault

    state = numbered_state(NEW, before_replay=fail)
    with pytest.raises(type(fault)) as caught:
        write_checkpoint(str(path), state, Metadata(checkpoint_id="2" * 32))
    assert caught.value is fault
    assert path.read_bytes() == old and os.listdir(tmp_path) == [path.name]


def test_a_retry_after_a_failed_fsync_starts_a_new_temp(tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    save_number(str(path), OLD)
    unharmed, _ = save_faultily(path, lambda *_: None)
    k = unharmed.names.index("fsync")
    first, error = save_faultily(path, fail_at(k, OSError(errno.EIO, "injected")))
    assert isinstance(error, OSError) and first.names.count("fsync") == 1
    second, error = save_faultily(path, lambda *_: None)
    assert error is None
    temps = [
        {call.file for call in fake.calls if call.name == "writev"}
        for fake in (first, second)
    ]
    assert len(temps[0]) == len(temps[1]) == 1 and temps[0] != temps[1]


def test_short_writes_and_short_reads_are_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "state.safetensors"
    save_number(str(path), NEW, big=1 << 16)
    whole = path.read_bytes()
    path.unlink()
    sizes: list[int] = []

    class Slow(FakeOs):
        def writev(self, fd: int, buffers: list[memoryview]) -> int:
            sizes.append(os.write(fd, b"".join(buffers)[:777]))
            return sizes[-1]

        def preadv(self, fd: int, buffers: list[memoryview], offset: int) -> int:
            sizes.append(os.preadv(fd, [buffers[0][:777]], offset))
            return sizes[-1]

    install(monkeypatch, Slow())
    save_number(str(path), NEW, big=1 << 16)
    assert path.read_bytes() == whole
    assert read_number(str(path)) == NEW
    assert len(sizes) > 2 * len(whole) / 777 and max(sizes) == 777


@pytest.mark.parametrize("code", CODES, ids=errno.errorcode.get)
def test_any_failing_call_of_a_read_passes_its_error_and_leaks_nothing(
    tmp_path: Path, code: int
) -> None:
    path = tmp_path / "state.safetensors"
    save_number(str(path), OLD)

    def read(before: Callable[..., None]) -> tuple[FakeOs, OSError | None]:
        fake = FakeOs()
        fake.before = before
        with pytest.MonkeyPatch.context() as patch:
            install(patch, fake)
            try:
                assert read_number(str(path)) == OLD
            except OSError as error:
                return fake, error
        return fake, None

    unharmed, _ = read(lambda *_: None)
    assert {"stat", "open", "fstat", "preadv"} <= set(unharmed.names)
    descriptors = len(os.listdir("/dev/fd"))
    for k in range(len(unharmed.calls)):
        fake, error = read(fail_at(k, OSError(code, "injected")))
        assert error is not None and error.errno == code, fake.calls[k]
        assert not isinstance(error, CheckpointError)
    assert len(os.listdir("/dev/fd")) == descriptors


def test_failures_injected_by_the_kernel_pass_and_keep_the_old_file(
    nursery: Nursery, tmp_path: Path
) -> None:
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed: the faults through the seam take over")
    path = tmp_path / "ckpt" / "state.safetensors"
    save_number(str(path), OLD)
    assert save_traced(nursery, path, NEW, tmp_path / "log") == (["saved"], 0)
    calls = read_calls(tmp_path / "log")
    tried = ("open", "writev", "fsync", "rename", "lseek", "fchmod", "getdents")
    faults = [call for call in calls if call[0].startswith(tried)]
    renamed = next(i for i, (name, _) in enumerate(calls) if name.startswith("rename"))
    for i, (name, k) in enumerate(faults):
        save_number(str(path), OLD)
        code = CODES[i % len(CODES)]
        inject = f"inject={name}:error={errno.errorcode[code]}:when={k}"
        words, signalled = save_traced(
            nursery, path, NEW, tmp_path / "log", "-e", inject
        )
        assert signalled == 0
        assert [word["errno"] for word in words] == [code], (name, k, words)
        expected = NEW if calls.index((name, k)) > renamed else OLD
        assert read_number(str(path)) == expected
        assert os.listdir(path.parent) == [path.name], (name, k)
    assert len(faults) >= 15
    assert all(any(name.startswith(kind) for name, _ in faults) for kind in tried)


@pytest.mark.parametrize("limit", [0, 1000, BIG // 2, BIG], ids=str)
def test_a_file_size_limit_midway_keeps_the_old_file(
    nursery: Nursery, tmp_path: Path, limit: int
) -> None:
    path = tmp_path / "state.safetensors"
    save_number(str(path), OLD)
    old = path.read_bytes()
    child = nursery.start("save", path=str(path), number=NEW, file_bytes=limit)
    assert child.hear() == "ready"
    child.go()
    assert child.end() == ([{"error": "OSError", "errno": errno.EFBIG}], 0)
    assert path.read_bytes() == old
    assert os.listdir(tmp_path) == [path.name]


_FULL_DISK = """
import errno, os, sys
sys.path.insert(0, sys.argv[1])
from _writer_process import read_number, save_number
path = os.path.join(sys.argv[2], "state.safetensors")
save_number(path, 1)
old = open(path, "rb").read()
for attempt in range(3):
    try:
        save_number(path, 2)
    except OSError as error:
        assert error.errno == errno.ENOSPC, error
        assert type(error) is OSError, error
    else:
        raise AssertionError("the disk was not full")
    assert open(path, "rb").read() == old
    assert os.listdir(sys.argv[2]) == ["state.safetensors"]
assert read_number(path) == 1
assert os.statvfs(sys.argv[2]).f_bfree > 0
save_number(path, 3, big=1 << 20)
assert read_number(path) == 3
print("kept")
"""


def test_a_full_disk_midway_removes_the_temp_and_keeps_the_old_file(
    tmp_path: Path,
) -> None:
    # a file system of 5 MiB, mounted where only this child sees it
    mount = 'mount -t tmpfs -o size=5m none "$3" && exec "$0" -c "$1" "$2" "$3"'
    options = ["--mount"] if os.geteuid() == 0 else ["--mount", "--map-root-user"]
    space = ["unshare", *options, "sh", "-c", mount]
    here = str(Path(__file__).parent)
    command = [*space, sys.executable, _FULL_DISK, here, str(tmp_path)]
    if shutil.which("unshare") is None:
        pytest.skip("unshare is not installed: the file size limit takes its place")
    run = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=writer_environment()
    )
    if "mount:" in run.stderr or "unshare:" in run.stderr:
        pytest.skip(f"no mount allowed, the file size limit takes its place: {run}")
    assert run.stdout == "kept\n", run.stderr


def test_modes_that_forbid_writing_pass_as_permission_errors(
    nursery: Nursery, tmp_path: Path
) -> None:
    path = tmp_path / "run" / "state.safetensors"
    save_number(str(path), OLD)
    old = path.read_bytes()
    path.parent.chmod(0o555)
    for target in (path, path.parent / "new.safetensors", path.parent / "d" / "new"):
        job = {"path": str(target), "bound_by_modes": True}
        child = nursery.start("save", number=NEW, **job)
        child.go()
        words, _ = child.end()
        assert words == ["ready", {"error": "PermissionError", "errno": errno.EACCES}]
    path.parent.chmod(0o755)
    assert path.read_bytes() == old
    assert os.listdir(path.parent) == [path.name]


def test_an_unreadable_file_is_neither_missing_nor_replaced(
    nursery: Nursery, tmp_path: Path
) -> None:
    path = tmp_path / "state.safetensors"
    save_number(str(path), OLD)
    path.chmod(0)
    for do in ("save", "read"):
        job = {"path": str(path), "bound_by_modes": True}
        child = nursery.start(do, number=NEW, **job)
        child.go()
        words, _ = child.end()
        assert words[-1] == {"error": "PermissionError", "errno": errno.EACCES}
    path.chmod(0o600)
    assert read_number(str(path)) == OLD
    assert os.listdir(tmp_path) == [path.name]


def test_no_descriptor_left_passes_as_its_error_and_leaks_no_temp(
    tmp_path: Path,
) -> None:
    path = tmp_path / "state.safetensors"
    save_number(str(path), OLD)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    failures = 0
    # one free descriptor more each time: every place that opens one fails once
    for free in range(4):
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + free, hard))
        try:
            save_number(str(path), NEW)
        except OSError as error:
            assert error.errno == errno.EMFILE
            failures += 1
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert find_temps(tmp_path) == []
        assert read_number(str(path)) == (OLD if failures == free + 1 else NEW)
    assert failures == 2


def test_a_file_size_signal_is_left_to_python() -> None:
    # the size limit tests rest on it: the signal would kill the writer
    assert signal.getsignal(signal.SIGXFSZ) is signal.SIG_IGN


def test_a_directory_that_cannot_be_synced_is_no_failure(tmp_path: Path) -> None:
    # CIFS and some FUSE file systems say so of every directory
    path = tmp_path / "state.safetensors"
    for code in (errno.EINVAL, errno.ENOTSUP):
        save_number(str(path), OLD)

        def before(
            number: int, call: Call, args: tuple[Any, ...], code: int = code
        ) -> None:
            if call == Call("fsync", tmp_path.name):
                raise OSError(code, "injected")

        fake, error = save_faultily(path, before)
        assert error is None
        assert Call("fsync", tmp_path.name) in fake.calls
        assert read_number(str(path)) == NEW


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP], ids=str)
def test_a_temp_that_cannot_be_synced_is_a_failure(tmp_path: Path, code: int) -> None:
    path = tmp_path / "state.safetensors"
    save_number(str(path), OLD)

    def before(number: int, call: Call, args: tuple[Any, ...]) -> None:
        if call.name == "fsync" and call.file.endswith(".tmp"):
            raise OSError(code, "injected")

    _, error = save_faultily(path, before)
    assert isinstance(error, OSError) and error.errno == code
    assert read_number(str(path)) == OLD


def test_a_temp_reads_as_a_checkpoint_only_once_all_is_written(tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    heads: dict[str, set[bool]] = {}

    def before(number: int, call: Call, args: tuple[Any, ...]) -> None:
        for temp in find_temps(tmp_path):
            heads.setdefault(call.name, set()).add(any(temp.read_bytes()[:64]))

    _, error = save_faultily(path, before)
    assert error is None
    # the temp begins with zeros at every write, the last one included
    assert heads["writev"] == {False}
    assert heads["fsync"] == heads["replace"] == {True}
