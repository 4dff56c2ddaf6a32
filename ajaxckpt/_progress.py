"""A progress bar on the terminal for saves and restores that take long.

The only module that knows rich, which is optional: without it, off a terminal and
for little data there is no bar.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager

LEAST_BYTES = 64 << 20  # what takes a moment is over before a bar is read

Told = Callable[[int], None]


def ignore_bytes(nbytes: int) -> None:
    """Show nothing."""
    del nbytes


@contextmanager
def show_progress(label: str, total: int, *, wanted: bool) -> Generator[Told]:
    """Show a bar while the block runs; it is gone afterwards.

    Args:
        label: what is done, such as ``saving step-400.safetensors``.
        total: bytes to come.
        wanted: whether a bar was asked for.

    Yields:
        A function to be told of every number of bytes that is through.
    """
    if not wanted or total < LEAST_BYTES or not _is_terminal():
        yield ignore_bytes
        return
    try:
        import rich.console
        import rich.progress
    except ImportError:
        yield ignore_bytes
        return
    bar = rich.progress.Progress(
        rich.progress.TextColumn("{task.description}", markup=False),
        rich.progress.BarColumn(),
        rich.progress.DownloadColumn(binary_units=True),
        rich.progress.TimeRemainingColumn(),
        console=rich.console.Console(stderr=True),
        transient=True,
    )
    with bar:
        task = bar.add_task(label, total=total)
        yield lambda nbytes: bar.advance(task, nbytes)


def _is_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()
