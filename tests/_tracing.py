"""A save under strace: which system calls it makes, and what if one goes wrong."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

from _writer_process import Nursery

_SYSTEM_CALL = re.compile(r"^([a-z0-9_]+)\(")


def find_temps(directory: Path) -> list[Path]:
    """List the temps in a directory."""
    return sorted(directory.glob(".ajaxckpt-*.tmp"))


class _Tracer:
    """strace, attached to a writer that waits to be let go."""

    def __init__(self, pid: int, log: Path, *inject: str) -> None:
        command = ["strace", "-p", str(pid), "-o", str(log), *inject]
        self._process = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, encoding="utf-8"
        )
        first = self._process.stderr.readline()
        assert "attached" in first, first

    def end(self) -> None:
        self._process.communicate(timeout=60)


def save_traced(
    nursery: Nursery, path: Path, number: int, log: Path, *inject: str
) -> tuple[list[Any], int]:
    """Save in a traced process; return what it said and the signal that killed it."""
    child = nursery.start("save", path=str(path), number=number)
    assert child.hear() == "ready"
    tracer = _Tracer(child.pid, log, *inject)
    child.go()
    fate = child.end()
    tracer.end()
    return fate


def read_calls(log: Path) -> list[tuple[str, int]]:
    """Return the system calls between the marks: name, and how many-th of its name."""
    seen: Counter[str] = Counter()
    marks, calls = 0, []
    for line in log.read_text().splitlines():
        name = match.group(1) if (match := _SYSTEM_CALL.match(line)) else ""
        seen[name] += 1
        marks += name == "getppid"
        if marks == 1 and name and name != "getppid":
            calls.append((name, seen[name]))
    assert marks == 2, log.read_text()
    return calls
