"""What lies at a path, and its bytes: resolve, look, open, read.

Changes nothing on the disk. Knows paths and bytes; knows nothing of what the bytes
mean. An ``OSError`` passes through untouched.
"""

from __future__ import annotations

import os
import re
import stat
import threading
from collections.abc import Sequence
from typing import Any

from ajaxckpt._errors import (
    CheckpointNotFoundError,
    InvalidArgumentError,
    NotACheckpointError,
)

BUFFERS_PER_CALL = 512  # operating systems take 1,024
OPEN_FLAGS = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
NO_WAIT = getattr(os, "O_NONBLOCK", 0)  # a FIFO must not block the open
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_seek_lock = threading.Lock()

Buffer = Any  # memoryview, bytes or a flat uint8 array


def resolve_path(path: str | os.PathLike[str]) -> str:
    """Return the absolute path a call means, resolved once.

    ``~`` is the user's home; a relative path is below the current directory.

    Raises:
        InvalidArgumentError: no local path of a file.
    """
    text = os.fsdecode(path)
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        hint = "pass a path that the file system's encoding can spell"
        raise InvalidArgumentError(f"{text!r} is no path", hint=hint) from None
    if _URL.match(text):
        hint = "pass a path on a local file system"
        raise InvalidArgumentError(f"{text!r} is a URL, not a local path", hint=hint)
    if not text or "\0" in text or text.endswith((os.sep, os.altsep or os.sep)):
        hint = "pass the path of a file, such as runs/latest.safetensors"
        raise InvalidArgumentError(f"{text!r} is not the path of a file", hint=hint)
    expanded = os.path.expanduser(text)
    if text.startswith("~") and expanded == text:
        hint = "write ./~… for a file of that name"
        raise InvalidArgumentError(f"{text!r} names the home of nobody", hint=hint)
    return os.path.abspath(expanded)


def describe_file_type(mode: int) -> str:
    """Name what a path holds that is no regular file; empty for one that is."""
    names = {
        stat.S_IFDIR: "a directory",
        stat.S_IFIFO: "a FIFO",
        stat.S_IFSOCK: "a socket",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
    }
    return names.get(stat.S_IFMT(mode), "")


def _refuse_other_types(path: str, mode: int) -> None:
    if kind := describe_file_type(mode):
        hint = "pass the path of a file"
        if stat.S_ISDIR(mode):
            hint += ", or read a run's directory with ajaxckpt.Run(directory)"
        raise NotACheckpointError(f"is {kind}", path=path, hint=hint)


def _not_found(path: str) -> CheckpointNotFoundError:
    parent = os.path.dirname(path)
    while not os.path.isdir(parent) and parent != os.path.dirname(parent):
        parent = os.path.dirname(parent)
    link = os.path.islink(path)
    problem = (
        f"the symbolic link points to {os.path.realpath(path)}, where nothing is"
        if link
        else f"no such file; the nearest directory that exists is {parent}"
    )
    hint = "check the path, or ask checkpoint_exists(path) first"
    return CheckpointNotFoundError(problem, path=path, hint=hint)


def open_file(path: str) -> tuple[int, int]:
    """Open a regular file for reading.

    Returns:
        The descriptor, and the file's size in bytes.

    Raises:
        CheckpointNotFoundError: nothing is at the path.
        NotACheckpointError: a directory, FIFO, socket or device is.
    """
    try:
        # asked first: opening a socket fails, and opening a device may act on it
        _refuse_other_types(path, os.stat(path).st_mode)
        fd = os.open(path, os.O_RDONLY | OPEN_FLAGS | NO_WAIT)
    except FileNotFoundError:
        raise _not_found(path) from None
    try:
        status = os.fstat(fd)
        _refuse_other_types(path, status.st_mode)
    except BaseException:
        os.close(fd)
        raise
    return fd, status.st_size


def is_missing(path: str) -> bool:
    """Tell whether nothing at all is at the path, a dangling link included."""
    try:
        os.lstat(path)
    except FileNotFoundError:
        return True
    return False


def read_into(fd: int, buffers: Sequence[Buffer], offset: int) -> int:
    """Fill buffers one after the other from a place in the file.

    Returns:
        The bytes read: fewer than asked for only at the end of the file.
    """
    views = [memoryview(buffer).cast("B") for buffer in buffers if len(buffer)]
    total = 0
    while views:
        done = _read_some(fd, views[:BUFFERS_PER_CALL], offset + total)
        if done == 0:
            break
        total += done
        views = drop_bytes(views, done)
    return total


def _read_some(fd: int, views: list[memoryview], offset: int) -> int:
    if hasattr(os, "preadv"):
        return os.preadv(fd, views, offset)
    with _seek_lock:  # Windows has no positioned read
        os.lseek(fd, offset, os.SEEK_SET)
        data = os.read(fd, len(views[0]))
    views[0][: len(data)] = data
    return len(data)


def drop_bytes(views: list[memoryview], done: int) -> list[memoryview]:
    """Return what is left of buffers once the first ``done`` bytes are through."""
    first = 0
    while first < len(views) and done >= len(views[first]):
        done -= len(views[first])
        first += 1
    rest = views[first:]
    if done:
        rest[0] = rest[0][done:]
    return rest
