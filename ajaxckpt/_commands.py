"""What the commands do: a public verb, then its result as text or data.

Knows the verbs that need no jax; loads numpy only once a command runs. Prints
nothing: it tells a session, which does.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from ajaxckpt._errors import (
    CheckpointError,
    NotACheckpointError,
    error_context,
)
from ajaxckpt._patterns import select_names
from ajaxckpt._plan_commands import run_migrate, run_plan
from ajaxckpt._run_commands import run_ls, run_prune, run_watch
from ajaxckpt._sessions import FOREIGN, Session, attempt, status_of
from ajaxckpt._tables import escape

if TYPE_CHECKING:
    from ajaxckpt._comparison import Comparison, ValueDifference
    from ajaxckpt._inspection import Inspection
    from ajaxckpt._opening import VerifyReport
    from ajaxckpt._reader import Checkpoint

    _Diff = tuple[Comparison, list[ValueDifference] | None]

T = TypeVar("T")
Body = dict[str, Any]

_PIPE_WIDTH = 100
_SUFFIX = ".safetensors"
_GONE = "gone"


def _inspect(path: str, arguments: Namespace) -> Inspection:
    from ajaxckpt._inspection import Inspection
    from ajaxckpt._opening import open_checkpoint

    with open_checkpoint(path) as checkpoint, error_context(path, "cannot inspect"):
        chosen = _choose(arguments.select, list(checkpoint))
        layout = {n: spec for n, spec in checkpoint.layout.items() if n in chosen}
        return Inspection(
            path=path, checkpoint=checkpoint, layout=layout, depth=arguments.depth
        )


def _choose(patterns: list[str], names: list[str]) -> set[str]:
    """Return the names that the patterns select; all if there are no patterns."""
    if not patterns:
        return set(names)
    return select_names(patterns, names, argument="--select")


def _run_inspect(session: Session, arguments: Namespace) -> dict[str, Any]:
    width = shutil.get_terminal_size((_PIPE_WIDTH, 0)).columns
    files: list[dict[str, Any]] = []
    shown = False
    for path in arguments.paths:
        inspection = attempt(session, path, _inspect, arguments)
        if inspection is None:
            continue
        if session.as_json:
            files.append(inspection.document())
            continue
        if shown:
            session.say("")
        shown = True
        for line in inspection.lines(width):
            session.say(line)
    return {"files": files}


def _digest(path: str, arguments: Namespace) -> str:
    from ajaxckpt._opening import open_checkpoint

    with open_checkpoint(path) as checkpoint:
        return checkpoint.digest


def _run_digest(session: Session, arguments: Namespace) -> dict[str, Any]:
    files: list[dict[str, str]] = []
    for path in arguments.paths:
        digest = attempt(session, path, _digest, arguments)
        if digest is not None:
            session.say(f"{digest}  {escape(path)}")
            files.append({"path": path, "digest": digest})
    return {"files": files}


def _run_verify(session: Session, arguments: Namespace) -> dict[str, Any]:
    files: list[dict[str, Any]] = []
    for path in arguments.paths:
        if os.path.isdir(os.path.expanduser(path)):
            files.extend(_verify_directory(session, path))
        else:
            files.append(_verify_file(session, path))
    if len(files) > 1:
        counts = Counter(file["status"] for file in files).items()
        summary = ", ".join(f"{count:,} {status}" for status, count in counts)
        session.say(f"{len(files):,} paths: {summary}")
    return {"files": files}


def _verify_directory(session: Session, path: str) -> Iterator[dict[str, Any]]:
    try:
        names = os.listdir(os.path.expanduser(path))
    except OSError as error:
        yield _verified(session, path, None, error)
        return
    paths = [os.path.join(path, name) for name in names if name.endswith(_SUFFIX)]
    found = False
    for inner in sorted(paths, key=_by_numbers):
        file = _verify_file(session, inner, listed=True)
        if file["status"] == _GONE:
            continue
        found = found or file["status"] != FOREIGN
        yield file
    if not found:
        problem = f"no checkpoint in this directory, of {len(paths)} *{_SUFFIX} files"
        hint = "pass the directory of a run, or the paths of its files"
        error = NotACheckpointError(problem, path=path, act="cannot verify", hint=hint)
        yield _verified(session, path, None, error)


def _by_numbers(path: str) -> list[str | int]:
    """Sort step-9 before step-10."""
    parts: list[str | int] = list(re.split(r"([0-9]+)", path))
    parts[1::2] = map(int, parts[1::2])
    return parts


def _verify_file(
    session: Session, path: str, *, listed: bool = False
) -> dict[str, Any]:
    """Verify one file; ``listed`` if its directory was named, and not the file."""
    from ajaxckpt._opening import verify_checkpoint

    report, error = None, None
    try:
        report = verify_checkpoint(path)
    except (CheckpointError, OSError) as caught:
        error = caught
    if listed and not os.path.lexists(os.path.expanduser(path)):
        return {"status": _GONE}  # a live run let it go meanwhile
    foreign = listed and isinstance(error, NotACheckpointError)
    return _verified(session, path, report, error, finding=not foreign)


def _verified(
    session: Session,
    path: str,
    report: VerifyReport | None,
    error: CheckpointError | OSError | None,
    *,
    finding: bool = True,
) -> dict[str, Any]:
    from ajaxckpt._reports import verify_document, verify_line

    status = status_of(error)
    session.say(verify_line(path, status, report))
    if error is not None and finding:
        session.fail(path, status, error)
    return verify_document(path, status, report)


def _open(path: str, arguments: Namespace) -> Checkpoint:
    from ajaxckpt._opening import open_checkpoint

    return open_checkpoint(path)


def _compare(a: Checkpoint, b: Checkpoint, path: str, arguments: Namespace) -> _Diff:
    from ajaxckpt._comparison import compare_checkpoints, compare_values

    with error_context(path, "cannot compare"):
        names = list({**a.layout, **b.layout})
        chosen = _choose(arguments.select, names)
        comparison = compare_checkpoints(a, b, [n for n in names if n in chosen])
        if not arguments.values:
            return comparison, None
        unequal = comparison.unequal.items()
        return comparison, [compare_values(a, b, *item) for item in unequal]


def _run_diff(session: Session, arguments: Namespace) -> dict[str, Any]:
    from ajaxckpt._reports import diff_document, diff_lines

    with contextlib.ExitStack() as stack:
        sides: list[tuple[str, Checkpoint]] = []
        for path in (arguments.a, arguments.b):
            if (checkpoint := attempt(session, path, _open, arguments)) is not None:
                sides.append((path, stack.enter_context(checkpoint)))
        if len(sides) < 2:
            return {"comparison": None}
        compare = partial(_compare, *(checkpoint for _, checkpoint in sides))
        both = f"{arguments.a} and {arguments.b}"
        if (diff := attempt(session, both, compare, arguments)) is None:
            return {"comparison": None}
    for line in diff_lines(sides, *diff):
        session.say(line)
    document = diff_document(sides, *diff)
    if not document["equal"]:
        session.find()
    return {"comparison": document}


COMMANDS = {
    "inspect": _run_inspect,
    "verify": _run_verify,
    "diff": _run_diff,
    "digest": _run_digest,
    "plan": run_plan,
    "migrate": run_migrate,
    "ls": run_ls,
    "prune": run_prune,
    "watch": run_watch,
}
