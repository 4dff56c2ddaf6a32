"""A bar for long saves and restores: on a terminal, with rich, and only if asked."""

import builtins
import io
import os
import pty
import sys
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ajaxckpt import Run, _progress, restore_into, save_checkpoint

STATE = {"replay": np.arange(1 << 16, dtype=np.float64), "step": 3}
NBYTES = STATE["replay"].nbytes


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal for stderr's place, and 1 KiB is much."""
    stream = Terminal()
    monkeypatch.setattr(_progress, "LEAST_BYTES", 1024)
    monkeypatch.setenv("TERM", "xterm")
    return stream


def save_and_restore(path: Path, **options: Any) -> None:
    save_checkpoint(STATE, path, **options)
    restored = restore_into({**STATE, "replay": 0 * STATE["replay"]}, path, **options)
    np.testing.assert_array_equal(restored["replay"], STATE["replay"])


def test_a_bar_shows_what_is_saved_and_restored(
    tmp_path: Path, terminal: Terminal
) -> None:
    with redirect_stderr(terminal):
        save_and_restore(tmp_path / "state.safetensors", progress=True)
    shown = terminal.getvalue()
    assert "saving state.safetensors" in shown
    assert "restoring state.safetensors" in shown
    assert shown.count("512.0/512.0 KiB") >= 2 or shown.count("512") >= 4


def test_a_run_shows_its_saves_and_restores(tmp_path: Path, terminal: Terminal) -> None:
    options: dict[str, Any] = {"progress": True, "signals": ()}
    with redirect_stderr(terminal), Run(tmp_path, **options) as run:
        run.step(STATE, step=3)
    with redirect_stderr(terminal), Run(tmp_path, **options) as run:
        assert run.restore_or_init(STATE).step == 3
    assert "saving step-3.safetensors" in terminal.getvalue()
    assert "restoring step-3.safetensors" in terminal.getvalue()


def test_every_byte_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[str, int, int]] = []

    @contextmanager
    def record(label: str, total: int, *, wanted: bool) -> Any:
        seen = [0]
        yield lambda nbytes: seen.__setitem__(0, seen[0] + nbytes)
        told.append((label.split()[0], total, seen[0]))

    for module in ("_checkpoint", "_plan"):
        monkeypatch.setattr(f"ajaxckpt.{module}.show_progress", record)
    save_and_restore(tmp_path / "state.safetensors", progress=True)
    assert told == [("saving", NBYTES, NBYTES), ("restoring", NBYTES, NBYTES)]


@pytest.mark.parametrize("why", ["not asked for", "no terminal", "little", "no rich"])
def test_there_is_no_bar(
    why: str, tmp_path: Path, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    if why == "no terminal":
        monkeypatch.setattr(Terminal, "isatty", lambda self: False)
    if why == "little":
        monkeypatch.setattr(_progress, "LEAST_BYTES", NBYTES + 1024)
    if why == "no rich":
        real = builtins.__import__

        def forbid(name: str, *args: Any) -> Any:
            if name.startswith("rich"):
                raise ImportError(name)
            return real(name, *args)

        monkeypatch.setattr(builtins, "__import__", forbid)
    with redirect_stderr(terminal):
        save_and_restore(tmp_path / "s.safetensors", progress=why != "not asked for")
    assert terminal.getvalue() == ""


def test_on_a_real_terminal_the_bar_is_gone_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leader, follower = pty.openpty()
    monkeypatch.setattr(_progress, "LEAST_BYTES", 1024)
    monkeypatch.setenv("TERM", "xterm")
    with os.fdopen(follower, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        save_checkpoint(STATE, tmp_path / "s.safetensors", progress=True)
        stream.flush()
        shown = os.read(leader, 1 << 16).decode()
    os.close(leader)
    assert "saving s.safetensors" in shown
    assert shown.rstrip("\r").endswith("\x1b[2K")  # the line is wiped
