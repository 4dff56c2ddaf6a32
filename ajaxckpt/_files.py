"""Where the disk is changed: temp, write, fsync, rename, fsync of the directory.

The only module that does. Knows paths and bytes; knows nothing of what the bytes
mean. An ``OSError`` passes through untouched.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Generator

from ajaxckpt._errors import CheckpointNotFoundError, NotACheckpointError
from ajaxckpt._paths import (
    BUFFERS_PER_CALL,
    NO_WAIT,
    OPEN_FLAGS,
    Buffer,
    drop_bytes,
    is_missing,
    open_file,
    read_into,
)

try:
    import fcntl
except ImportError:  # Windows: temps are neither locked nor swept there
    fcntl = None

_GATHER_BYTES = 1 << 20
_TEMP_NAME = re.compile(r"\.ajaxckpt-[0-9a-f]{16}\.tmp")
_NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)
_SHARING_RETRIES = 5
# what a file system answers that knows no such operation
_UNKNOWN_OPERATION = (errno.EINVAL, errno.ENOTSUP)


def _write_some(fd: int, views: list[memoryview]) -> int:
    if hasattr(os, "writev"):
        return os.writev(fd, views)
    return os.write(fd, views[0])


class Sink:
    """An open temp: takes payload in order, then the bytes at its head.

    Small buffers are gathered into one call; they must stay unchanged until then.
    """

    def __init__(self, fd: int) -> None:
        """Write to an open descriptor."""
        self._fd = fd
        self._pending: list[memoryview] = []
        self._pending_bytes = 0

    def skip(self, nbytes: int) -> None:
        """Leave room at the head of the file."""
        os.lseek(self._fd, nbytes, os.SEEK_SET)

    def write(self, buffer: Buffer) -> None:
        """Append a buffer."""
        view = memoryview(buffer).cast("B")
        self._pending.append(view)
        self._pending_bytes += len(view)
        full = len(self._pending) >= BUFFERS_PER_CALL
        if full or self._pending_bytes >= _GATHER_BYTES:
            self.flush()

    def flush(self) -> None:
        """Hand all gathered buffers to the operating system."""
        views = [view for view in self._pending if len(view)]
        while views:
            views = drop_bytes(views, _write_some(self._fd, views))
        self._pending, self._pending_bytes = [], 0

    def drop(self) -> None:
        """Let go of what was not written: an error that is kept keeps this, too."""
        self._pending, self._pending_bytes = [], 0

    def write_head(self, head: bytes) -> None:
        """Write the first bytes of the file, after all others."""
        self.flush()
        os.lseek(self._fd, 0, os.SEEK_SET)
        self.write(head)
        self.flush()


def sync_file(fd: int) -> None:
    """Make a descriptor's bytes durable; macOS needs a stronger word for it."""
    full = getattr(fcntl, "F_FULLFSYNC", None)
    if full is not None and fcntl is not None:
        with _ignoring_unknown_operation():
            fcntl.fcntl(fd, full)
            return
    os.fsync(fd)


@contextlib.contextmanager
def _ignoring_unknown_operation() -> Generator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in _UNKNOWN_OPERATION:
            raise


def sync_directory(directory: str) -> None:
    if os.name == "nt":  # a directory cannot be opened there
        return
    fd = os.open(directory, os.O_RDONLY | OPEN_FLAGS)
    try:
        with _ignoring_unknown_operation():  # some network file systems
            os.fsync(fd)
    finally:
        os.close(fd)


def make_directories(directory: str) -> None:
    """Create a directory and its parents, each made durable in its own parent."""
    missing: list[str] = []
    while not os.path.isdir(directory) and directory not in missing:
        missing.append(directory)
        directory = os.path.dirname(directory)
    for path in reversed(missing):
        with contextlib.suppress(FileExistsError):
            os.mkdir(path)
            sync_directory(os.path.dirname(path))


def try_lock(fd: int) -> bool | None:
    """Try to lock a temp.

    Returns:
        True if it is locked now, False if somebody else holds it, None where the
        system or the file system knows no locks.
    """
    if fcntl is None:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _sweep_temps(directory: str) -> None:
    """Remove the temps of writers that died: those whose lock can be won."""
    if fcntl is None:
        return
    for name in filter(_TEMP_NAME.fullmatch, os.listdir(directory)):
        # another sweeper, or the writer's rename, may be faster
        with contextlib.suppress(OSError):
            path = os.path.join(directory, name)
            fd = _open_temp(path)
            try:
                if stat.S_ISREG(os.fstat(fd).st_mode) and try_lock(fd):
                    os.unlink(path)
            finally:
                os.close(fd)


def _open_temp(path: str) -> int:
    flags = OPEN_FLAGS | NO_WAIT | _NO_FOLLOW
    try:
        return os.open(path, os.O_RDWR | flags)
    except PermissionError:  # it was to replace a file that may not be written
        return os.open(path, os.O_RDONLY | flags)


def discard(path: str) -> None:
    """Remove a temp as well as that goes."""
    with contextlib.suppress(OSError):
        os.unlink(path)


def above_standard(fd: int) -> int:
    """Move a descriptor out of 0 to 2: with stderr closed, logs would go into it."""
    if fd > 2 or fcntl is None:
        return fd
    higher = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
    os.close(fd)
    return higher


def create_temp(directory: str) -> tuple[str, int]:
    """Create and lock a new temp; its mode is the umask's.

    Returns:
        The path, and a descriptor to write to.
    """
    while True:
        name = f".ajaxckpt-{secrets.token_hex(8)}.tmp"
        path = os.path.join(directory, name)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | OPEN_FLAGS
        fd = above_standard(os.open(path, flags, 0o666))
        try:
            if try_lock(fd) is not False and os.fstat(fd).st_nlink:
                return path, fd
        except BaseException:
            os.close(fd)
            discard(path)
            raise
        # a sweeper came between the two calls: it removes the temp, and so do we
        os.close(fd)
        discard(path)


def _check_replaceable(path: str, is_ours: Callable[[bytes], bool]) -> int | None:
    """Return the mode of the file to be replaced, None if there is none.

    Raises:
        NotACheckpointError: what is there must not be replaced.
    """
    if is_missing(path):
        return None
    try:
        fd, size = open_file(path)
    except CheckpointNotFoundError:  # removed since
        return None
    try:
        head = bytearray(min(size, 4096))
        read_into(fd, [head], 0)
        if size and not is_ours(bytes(head)):
            hint = "save to another path, or remove the file yourself"
            problem = "a file is there that ajaxckpt did not write"
            raise NotACheckpointError(problem, path=path, hint=hint)
        return stat.S_IMODE(os.fstat(fd).st_mode)
    finally:
        os.close(fd)


def _replace(source: str, target: str) -> None:
    """Rename over the target, waiting out a reader on Windows."""
    for attempt in range(_SHARING_RETRIES):
        try:
            return os.replace(source, target)
        except PermissionError:
            if os.name != "nt" or attempt == _SHARING_RETRIES - 1:
                raise
            time.sleep(0.05 * 2**attempt)


def _fill_temp(fd: int, mode: int | None, write: Callable[[Sink], None]) -> None:
    """Write, fsync and close; a failing close is a failed write."""
    sink = Sink(fd)
    try:
        if mode is not None and hasattr(os, "fchmod"):
            os.fchmod(fd, mode)
        write(sink)
        sync_file(fd)
    except BaseException:
        sink.drop()
        with contextlib.suppress(OSError):
            os.close(fd)
        raise
    os.close(fd)


@contextlib.contextmanager
def _keeping_lock(fd: int) -> Generator[None]:
    """Let a temp's lock outlive its close: a sweeper that wins it removes the temp."""
    if fcntl is None:
        yield
        return
    try:
        keeper = above_standard(os.dup(fd))
    except BaseException:
        os.close(fd)
        raise
    try:
        yield
    finally:
        os.close(keeper)


def _publish(
    target: str, write: Callable[[Sink], None], is_ours: Callable[[bytes], bool]
) -> None:
    """Fill a temp and rename it over the target; whatever fails, leave no temp."""
    mode = _check_replaceable(target, is_ours)
    temp, fd = create_temp(os.path.dirname(target))
    try:
        with _keeping_lock(fd):
            _fill_temp(fd, mode, write)
            _check_replaceable(target, is_ours)
            _replace(temp, target)
    except BaseException:
        discard(temp)
        raise


def write_atomically(
    path: str, write: Callable[[Sink], None], is_ours: Callable[[bytes], bool]
) -> str:
    """Replace a file so that at every instant it is the old or the new one, whole.

    Args:
        path: an absolute path; a symbolic link is followed.
        write: writes the new bytes; whatever it raises, the old file stays.
        is_ours: tells from a file's first bytes whether it may be replaced.

    Returns:
        The path of the file itself, symbolic links resolved.

    Raises:
        NotACheckpointError: something else is at the path.
    """
    target = os.path.realpath(path)
    directory = os.path.dirname(target)
    _check_replaceable(target, is_ours)
    make_directories(directory)
    _sweep_temps(directory)
    _publish(target, write, is_ours)
    sync_directory(directory)
    return target
