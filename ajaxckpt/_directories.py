"""Where a run's directory is changed: locks, pins, removals, appends, probes.

With ``_files`` the only module that changes the disk. Every change of a name is made
durable before the call returns. An ``OSError`` passes through untouched.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable

from ajaxckpt._files import (
    Sink,
    above_standard,
    create_temp,
    discard,
    make_directories,
    sync_directory,
    sync_file,
    try_lock,
    write_atomically,
)
from ajaxckpt._paths import OPEN_FLAGS, is_missing

_MOMENT = 0.02
_PROBE_CHUNK = bytes(1 << 20)


class LockHeldError(Exception):
    """Another process holds the lock; its text says which."""


def hold_lock(path: str) -> tuple[int, bool, str]:
    """Lock a file until the descriptor is closed or the process is gone.

    Args:
        path: the lock file, made where it is missing and never removed.

    Returns:
        The descriptor, whether the file system knows locks at all, and the text that
        the last holder left.

    Raises:
        LockHeldError: somebody else holds it.
    """
    make_directories(os.path.dirname(path))
    flags = os.O_RDWR | os.O_CREAT | OPEN_FLAGS
    fd = above_standard(os.open(path, flags, 0o666))
    try:
        locked = _try_lock_thrice(fd)
        text = os.read(fd, 1024).decode("utf-8", "replace")
        if locked is False:
            raise LockHeldError(text.split("\n")[0].strip() or "another process")
    except BaseException:
        os.close(fd)
        raise
    return fd, locked is True, text


def sign_lock(fd: int, text: str) -> None:
    """Write into a lock that is held: for those that come in vain, or later."""
    os.ftruncate(fd, 0)
    os.lseek(fd, 0, os.SEEK_SET)
    append_bytes(fd, text.encode())
    sync_file(fd)


def _try_lock_thrice(fd: int) -> bool | None:
    """Try to lock, waiting out somebody who only asks who holds it."""
    for _ in range(2):
        if (locked := try_lock(fd)) is not False:
            return locked
        time.sleep(_MOMENT)
    return try_lock(fd)


def read_holder(path: str) -> str:
    """Return who holds a lock; empty if nobody does."""
    try:
        fd = above_standard(os.open(path, os.O_RDONLY | OPEN_FLAGS))
    except FileNotFoundError:
        return ""
    try:
        if try_lock(fd) is not False:
            return ""
        text = os.read(fd, 1024).decode("utf-8", "replace")
        return text.split("\n")[0].strip() or "a process"
    finally:
        os.close(fd)


def close_descriptor(fd: int) -> None:
    """Close what another call here opened; a lock is released."""
    with contextlib.suppress(OSError):
        os.close(fd)


def remove_files(paths: Iterable[str]) -> None:
    """Remove files, in this order; those that are gone already are no error."""
    directories: set[str] = set()
    try:
        for path in paths:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
                directories.add(os.path.dirname(path))
    finally:
        for directory in directories:
            sync_directory(directory)


def touch(path: str) -> None:
    """Make an empty file."""
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | OPEN_FLAGS, 0o666))
    sync_directory(os.path.dirname(path))


def set_aside(path: str, suffix: str) -> str:
    """Rename a file out of the way, over nothing.

    Returns:
        Its new path: the old one with a number, where needed, and the suffix.
    """
    target, count = path + suffix, 1
    while not is_missing(target):
        count += 1
        target = f"{path}.{count}{suffix}"
    os.rename(path, target)
    sync_directory(os.path.dirname(path))
    return target


def open_append(path: str) -> int:
    """Open a file to which bytes are added; it is made where it is missing."""
    make_directories(os.path.dirname(path))
    new = is_missing(path)
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | OPEN_FLAGS
    fd = above_standard(os.open(path, flags, 0o666))
    if new:
        sync_directory(os.path.dirname(path))
    return fd


def append_bytes(fd: int, data: bytes) -> None:
    """Add bytes at the end of a file."""
    while data:
        data = data[os.write(fd, data) :]


def sync_descriptor(fd: int) -> None:
    """Make what was appended durable."""
    sync_file(fd)


def replace_file(path: str, data: bytes) -> None:
    """Replace a whole file, atomically and durably, whatever it holds."""

    def write(sink: Sink) -> None:
        sink.write(data)
        sink.flush()

    write_atomically(path, write, lambda head: True)


def probe_write(directory: str, nbytes: int) -> None:
    """Write, fsync and remove a temp of that size: can a save work here?"""
    make_directories(directory)
    temp, fd = create_temp(directory)
    try:
        for _ in range(-(-nbytes // len(_PROBE_CHUNK))):
            append_bytes(fd, _PROBE_CHUNK)
        sync_file(fd)
    finally:
        os.close(fd)
        discard(temp)
