"""A helper for your own suite: the files of yesterday restore into today's code.

Knows paths and messages; restores through the public call alone, and loads no jax
before it is used.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ajaxckpt._migrations import Migrations

__all__ = ["assert_files_restore"]

Paths = str | os.PathLike[str]
Patterns = str | Sequence[str]


def assert_files_restore(
    paths: Paths | Iterable[Paths],
    make_skeleton: Callable[[], Any],
    *,
    migrations: Migrations | Iterable[Migrations] | None = None,
    keep: Patterns = (),
    ignore: Patterns = (),
    resize: Patterns = (),
    check: Callable[[Any, str], object] | None = None,
) -> None:
    """Assert that every golden file restores into what the code builds today.

    Keep one small file per layout that you released, and never change it.

    Args:
        paths: a directory (each file in it, hidden ones aside), a glob pattern, one
            file, or several paths.
        make_skeleton: builds the skeleton; called anew for every file.
        migrations: as in ``restore_into``.
        keep: as in ``restore_into``.
        ignore: as in ``restore_into``.
        resize: as in ``restore_into``.
        check: gets each restored state and its path, and raises AssertionError if
            the values are not right.

    Raises:
        AssertionError: a file does not restore or fails ``check``, each listed with
            its message; or there is no file at all.

    Example:
        >>> assert_files_restore([path], lambda: {"w": jnp.zeros(3), "step": 0})
    """
    from ajaxckpt._checkpoint import restore_into
    from ajaxckpt._errors import CheckpointError

    found = _list_files(paths)
    if not found:
        raise AssertionError(f"no files to restore: {paths!r} matches nothing")
    registries = migrations if migrations is None else _as_given(migrations)
    failures: list[str] = []
    for path in found:
        try:
            state = restore_into(
                make_skeleton(),
                path,
                keep=keep,
                ignore=ignore,
                resize=resize,
                migrations=registries,
            )
            if check is not None:
                check(state, path)
        except CheckpointError as error:
            failures.append(str(error))
        except AssertionError as error:
            failures.append(f"{path}: check failed: {error}")
    if failures:
        head = f"{len(failures)} of {len(found)} files do not restore"
        raise AssertionError("\n\n".join([head, *failures]))


def _as_given(migrations: Migrations | Iterable[Migrations]) -> tuple[Migrations, ...]:
    """Hold what may be a generator: it serves every file."""
    from ajaxckpt._migrations import as_registries

    return as_registries(migrations)


def _list_files(paths: Paths | Iterable[Paths]) -> list[str]:
    if not isinstance(paths, str | os.PathLike):
        return [os.fspath(path) for path in paths]
    path = os.fspath(paths)
    if os.path.isdir(path):
        names = (name for name in sorted(os.listdir(path)) if name[0] != ".")
        files = (os.path.join(path, name) for name in names)
        return [file for file in files if os.path.isfile(file)]
    return [path] if os.path.exists(path) else sorted(glob.glob(path, recursive=True))
