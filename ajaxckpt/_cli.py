"""The command line: arguments, one call, print. The only module that prints.

Knows the commands, and loads none of jax, flax, optax, orbax, chex or rich itself.
Results go to standard output, the library's own error messages to standard error,
in characters that no terminal acts on.
"""

from __future__ import annotations

import contextlib
import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO

from ajaxckpt._arguments import build_parser
from ajaxckpt._commands import COMMANDS
from ajaxckpt._document import encode_document
from ajaxckpt._errors import CheckpointError, InvalidArgumentError
from ajaxckpt._patterns import parse_pattern
from ajaxckpt._tables import escape

_SOUND, _FINDING, _USAGE = 0, 1, 2
_INTERRUPTED, _BROKEN_PIPE = 130, 141  # as a shell reports SIGINT and SIGPIPE
_CLEAR = "\x1b[H\x1b[2J"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: the arguments; those of the process by default.

    Returns:
        The exit status: 0 sound or equal, 1 a finding, 2 usage.

    Raises:
        SystemExit: from argparse, on ``--help``, ``--version`` and wrong usage.
    """
    arguments = build_parser().parse_args(argv)
    try:
        return _run(arguments)
    except BrokenPipeError:
        _silence_stdout()
        return _BROKEN_PIPE
    except OSError as error:
        # what reading raises was told by then: standard output cannot be written
        _silence_stdout()
        _print_error(f"standard output: {error.strerror or error}")
        return _FINDING
    except KeyboardInterrupt:
        return _INTERRUPTED


def _run(arguments: Namespace) -> int:
    session = _Session(command=arguments.command, as_json=arguments.json)
    try:
        for pattern in getattr(arguments, "select", ()):
            parse_pattern(pattern)
    except InvalidArgumentError as error:
        _print_error(str(error))
        return _USAGE
    body = COMMANDS[arguments.command](session, arguments)
    if arguments.json and body is not None:
        _print(encode_document(arguments.command, session.errors, body), sys.stdout)
    _flush_stdout()
    return session.code


@dataclass(slots=True, kw_only=True)
class _Session:
    """One call: what went wrong so far, and whether results are text or JSON."""

    command: str
    as_json: bool
    code: int = _SOUND
    errors: list[dict[str, str]] = field(default_factory=list[dict[str, str]])

    def say(self, line: str) -> None:
        """Print a line of the result, where that is text."""
        if not self.as_json:
            _print(line, sys.stdout)

    def refresh(
        self, lines: Sequence[str], errors: list[dict[str, str]], body: dict[str, Any]
    ) -> None:
        """Show a result that replaces the one before: on a terminal, in its place."""
        if self.as_json:
            text = encode_document(self.command, errors, body, indent=None)
        else:
            clear = _CLEAR if sys.stdout and sys.stdout.isatty() else ""
            text = clear + "\n".join(lines)
        _print(text, sys.stdout)
        _flush_stdout()

    def find(self, code: int = _FINDING) -> None:
        """Remember that the exit status is at least this."""
        self.code = max(self.code, code)

    def fail(self, path: str, status: str, error: CheckpointError | OSError) -> None:
        """Print what is wrong with a path, and remember it."""
        message = _render_error(path, error)
        self.errors.append({"path": path, "status": status, "message": message})
        self.find(_USAGE if isinstance(error, InvalidArgumentError) else _FINDING)
        _flush_stdout()
        _print_error(message)


def _render_error(path: str, error: CheckpointError | OSError) -> str:
    if isinstance(error, CheckpointError):
        return str(error)
    return f"{path}: {error.strerror or error}"


def _print(text: str, stream: TextIO) -> None:
    """Print, with what the stream's encoding lacks spelled as escapes."""
    encoding = getattr(stream, "encoding", None) or "ascii"
    print(text.encode(encoding, "backslashreplace").decode(encoding), file=stream)


def _print_error(message: str) -> None:
    for line in message.split("\n"):
        _print(escape(line), sys.stderr)


def _flush_stdout() -> None:
    if sys.stdout:
        sys.stdout.flush()


def _silence_stdout() -> None:
    """Keep the interpreter from complaining when it flushes at its end."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
