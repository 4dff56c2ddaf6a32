"""Stand-ins for ``os`` and ``fcntl`` in the file layer: the seam of the tests.

Every call that can touch the disk is counted, and the one that a test names fails,
kills the process (as far as the disk can tell), or does half of its work. A module
function that the stand-in does not know is refused, so that no call slips past it.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from ajaxckpt import _directories, _files, _paths

_OPENERS = {"open", "dup"}
_CALLS = _OPENERS | {
    *("close", "fchmod", "fstat", "fsync", "listdir", "lseek", "lstat", "mkdir"),
    *("preadv", "read", "rename", "replace", "stat", "unlink", "write", "writev"),
    "ftruncate",
}
# these neither change the disk nor report its errors
_PLAIN = {"altsep", "fsdecode", "fsencode", "fspath", "name", "path", "sep"}


class Killed(BaseException):
    """The process is gone: nothing it would still do gets done."""


@dataclass(frozen=True)
class Call:
    """One call: its name, and the name of the file it was about."""

    name: str
    file: str


class FakeOs:
    """The ``os`` module, with one call at which something happens."""

    def __init__(self, **attributes: Any) -> None:
        """Take attributes that differ from the real module's."""
        self.__dict__.update(attributes)
        self.calls: list[Call] = []
        self.open_files: dict[int, str] = {}
        self.modes: dict[str, int] = {}
        self.missing: set[str] = set()
        self.before: Callable[[int, Call, tuple[Any, ...]], None] = lambda *_: None

    def __getattr__(self, name: str) -> Any:
        """Return the real attribute, wrapped if it is a call."""
        if name in self.missing or not hasattr(os, name):
            raise AttributeError(f"module 'os' has no attribute {name!r}")
        if name in _CALLS:
            return lambda *args: self._call(name, getattr(os, name), args)
        if name in _PLAIN or name.isupper():
            return getattr(os, name)
        raise AssertionError(f"teach the fake what os.{name} does")

    def _call(self, name: str, real: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        first = args[0]
        path = self.open_files.get(first, "?") if isinstance(first, int) else first
        call = Call(name, os.path.basename(path))
        self.calls.append(call)
        if name == "close":
            # a close that fails closes all the same
            real(*args)
            self.open_files.pop(first)
            self.before(len(self.calls) - 1, call, args)
            return None
        self.before(len(self.calls) - 1, call, args)
        if name == "fsync":
            return None  # what the disk does is not what is tested here
        result = real(*args)
        if name in _OPENERS:
            self.open_files[result] = path
        return result

    def flock(self, fd: int, operation: int) -> None:
        """Count and do ``fcntl.flock``."""
        self._call("flock", fcntl.flock, (fd, operation))

    def bury(self) -> None:
        """Close what a killed process had open, as the kernel does."""
        for fd in self.open_files:
            os.close(fd)
        self.open_files.clear()

    @property
    def names(self) -> list[str]:
        """The names of the calls so far."""
        return [call.name for call in self.calls]


class FakeFcntl:
    """The ``fcntl`` module; its ``flock`` is counted with the other calls."""

    LOCK_EX, LOCK_NB = fcntl.LOCK_EX, fcntl.LOCK_NB

    def __init__(self, fake: FakeOs) -> None:
        """Count calls with those of ``fake``."""
        self.flock = fake.flock


def install(patch: pytest.MonkeyPatch, fake: FakeOs) -> FakeOs:
    """Put a fake in the place of ``os`` and ``fcntl``."""
    patch.setattr(_files, "os", fake)
    patch.setattr(_paths, "os", fake)
    patch.setattr(_directories, "os", fake)
    patch.setattr(_files, "fcntl", FakeFcntl(fake))
    return fake


def fail_at(index: int, error: BaseException, *, ever_after: bool = False) -> Any:
    """Let the call of that index raise, or it and all that follow."""

    def before(number: int, call: Call, args: tuple[Any, ...]) -> None:
        if number == index or (ever_after and number > index):
            raise error

    return before


def die_at(index: int, *, halfway: bool = False) -> Any:
    """Let the process die before the call of that index, or in the middle of it."""

    def before(number: int, call: Call, args: tuple[Any, ...]) -> None:
        if number == index and halfway:
            joined = b"".join(args[1])
            os.write(args[0], joined[: len(joined) // 2])
        if number >= index:
            raise Killed

    return before
