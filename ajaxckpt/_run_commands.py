"""The commands about runs: ls, watch and prune.

Knows the files and the lock of a run; loads numpy only once a command runs, and jax
never. Prints nothing: it tells a session, which does.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ajaxckpt._errors import (
    CheckpointError,
    CheckpointNotFoundError,
    InvalidArgumentError,
    NotACheckpointError,
    error_context,
)
from ajaxckpt._sessions import Session, attempt, status_of

if TYPE_CHECKING:
    from ajaxckpt._listing import RunEntry, Signature
    from ajaxckpt._retention import KeepPolicy, Mode
    from ajaxckpt._run_files import RunFiles
    from ajaxckpt._run_reports import Listing, Pruning, Row

    _Error = CheckpointError | OSError
    _Policies = Sequence[tuple[str, KeepPolicy]]

_PIPE_WIDTH = 100
_LOCK_NAME = re.compile(r"\.ajaxckpt-run-([A-Za-z0-9_-]{1,64})\.lock")
_ABANDONED_NAME = re.compile(r".*\.safetensors(?:\.[0-9]+)?\.abandoned", re.DOTALL)


def _open_files(path: str, run_id: str | None) -> RunFiles:
    from ajaxckpt._listing import check_run_id
    from ajaxckpt._paths import resolve_path
    from ajaxckpt._run_files import RunFiles

    return RunFiles(resolve_path(path.rstrip("/") or path), check_run_id(run_id))


def _require_directory(directory: str) -> None:
    if not os.path.lexists(directory):
        hint = "check the path; a run makes its directory when it is opened"
        raise CheckpointNotFoundError("no such directory", path=directory, hint=hint)


# ---------------------------------------------------------------------- ls, watch


class _Reader:
    """Lists a directory again and again, and reads no file twice that stays the same.

    Attributes:
        files: the directory's.
        metric: what is ranked by, and the better end; None if nothing is.
    """

    def __init__(self, path: str, arguments: Namespace) -> None:
        """Look at nothing yet."""
        self.files = _open_files(path, arguments.run_id)
        self.metric: tuple[str, Mode] | None = arguments.best
        self._path, self._run_id = path, arguments.run_id
        self._quick: bool = arguments.quick
        self._known: dict[str, tuple[Signature, CheckpointError | None]] = {}

    def read(self) -> Listing:
        """List the directory as it is now.

        Raises:
            CheckpointNotFoundError: nothing is at the path.
            NotACheckpointError: a file is.
        """
        from ajaxckpt._run_reports import Listing

        directory = self.files.directory
        with error_context(directory, "cannot list the run"):
            _require_directory(directory)
            rows: dict[str, Row] = {}
            run_ids = self.files.run_ids() if self._run_id is None else [self._run_id]
            for run_id in run_ids or [None]:
                self.files.run_id = run_id
                for row in self._read_run(run_id, alone=len(run_ids) < 2):
                    rows.setdefault(row.entry.path, row)
            self._known = {p: self._known[p] for p in rows if p in self._known}
            names = os.listdir(directory)
        return Listing(
            path=self._path,
            run_ids=run_ids,
            rows=sorted(rows.values(), key=partial(_place, by_run=len(run_ids) > 1)),
            writers=dict(_find_writers(directory, names, self._run_id)),
            abandoned=sum(1 for name in names if _ABANDONED_NAME.fullmatch(name)),
            metric=self.metric[0] if self.metric else "",
        )

    def _read_run(self, run_id: str | None, *, alone: bool) -> Iterator[Row]:
        from ajaxckpt._retention import rank_best
        from ajaxckpt._run_reports import UNREAD, WHOLE, Row

        found: list[tuple[RunEntry, _Error | None]] = []
        for entry in self.files.entries():
            with contextlib.suppress(_GoneError):
                found.append((entry, self._examine(entry)))
        good = {
            entry.step: entry
            for entry, error in found
            if error is None and (alone or entry.run_id == run_id)
        }
        newest = max(good, default=None)
        best: int | None = None
        if self.metric is not None:
            ranked = rank_best((e.candidate for e in good.values()), *self.metric)
            best = ranked[0].step if ranked else None
        for entry, error in found:
            ours = entry is good.get(entry.step)
            fine = UNREAD if self._quick else WHOLE
            yield Row(
                entry=entry,
                status=fine if error is None else status_of(error),
                error=error,
                newest=ours and entry.step == newest,
                best=ours and entry.step == best,
            )

    def _examine(self, entry: RunEntry) -> _Error | None:
        """Return why a file cannot be restored.

        Raises:
            _GoneError: it was removed since it was listed, as live runs do.
        """
        from ajaxckpt._listing import read_signature

        path = entry.path
        if self._quick and not entry.problem:
            return None
        try:
            # of a link to nothing its own error tells where it points
            signature = read_signature(path) if os.path.exists(path) else ()
            known = self._known.get(path)
            if known is not None and known[0] == signature:
                return known[1]
            error = self._read_file(path)
        except OSError as error:
            if not os.path.lexists(path):
                raise _GoneError from None
            return error
        self._known[path] = (signature, error)
        return error

    def _read_file(self, path: str) -> CheckpointError | None:
        from ajaxckpt._opening import open_checkpoint, verify_checkpoint

        try:
            if self._quick:
                open_checkpoint(path).close()
            else:
                verify_checkpoint(path)
        except CheckpointNotFoundError:
            raise
        except CheckpointError as error:
            return error
        return None


class _GoneError(Exception):
    """A file is gone since it was listed."""


def _place(row: Row, *, by_run: bool) -> tuple[str, int, str]:
    run_id = row.entry.run_id or ""
    return run_id if by_run else "", row.entry.step, row.entry.path


def _find_writers(
    directory: str, names: Sequence[str], run_id: str | None
) -> Iterator[tuple[str, str]]:
    """Yield who writes a run right now: who holds its lock."""
    from ajaxckpt._directories import read_holder

    for name in sorted(names):
        match = _LOCK_NAME.fullmatch(name)
        path = os.path.join(directory, name)
        if match and run_id in (None, match[1]) and os.path.isfile(path):
            with contextlib.suppress(OSError):
                if holder := read_holder(path):
                    yield match[1], holder


def _list(path: str, arguments: Namespace) -> Listing:
    reader = _Reader(path, arguments)
    listing = reader.read()
    entries = [row.entry for row in listing.rows]
    with error_context(reader.files.directory, "cannot list the run"):
        run_id: str | None = arguments.run_id
        known = run_id in (None, *(e.run_id for e in entries), *listing.writers)
        if not known:
            others = ", ".join(reader.files.run_ids()[:10])
            hint = f"choose one of {others}" if others else "save one first"
            problem = f"no checkpoint of run {run_id}"
            raise CheckpointNotFoundError(problem, hint=hint)
        if reader.metric is not None:
            _refuse_unknown(reader.metric[0], entries)
    return listing


def _refuse_unknown(metric: str, entries: Sequence[RunEntry]) -> None:
    """Refuse a metric that was never measured: it would be taken for none the best.

    Raises:
        InvalidArgumentError: no checkpoint has it, and there are checkpoints.
    """
    metrics = sorted({name for entry in entries for name in entry.metrics})
    if entries and metric not in metrics:
        names = ", ".join(metrics[:10])
        hint = f"choose one of {names}" if names else "the run saves no metrics"
        raise InvalidArgumentError(f"no checkpoint has the metric {metric}", hint=hint)


def _text_lines(listing: Listing) -> list[str]:
    from ajaxckpt._run_reports import listing_lines

    width = shutil.get_terminal_size((_PIPE_WIDTH, 0)).columns
    return list(listing_lines(listing, time.time(), width))


def run_ls(session: Session, arguments: Namespace) -> dict[str, Any]:
    """Show a row per checkpoint; a finding where one is not whole."""
    listing = attempt(session, arguments.run, _list, arguments)
    if listing is None:
        return {"run": None}
    from ajaxckpt._run_reports import listing_document

    for line in _text_lines(listing):
        session.say(line)
    for row in listing.rows:
        if row.error is not None:
            session.fail(row.entry.path, row.status, row.error)
    return {"run": listing_document(listing)}


def run_watch(session: Session, arguments: Namespace) -> None:
    """Show the same again and again, until it is enough or Ctrl-C."""
    with contextlib.suppress(KeyboardInterrupt):
        reader = attempt(session, arguments.run, _Reader, arguments)
        count: int | None = arguments.count
        while reader is not None:
            if not _refresh(session, arguments.run, reader):
                return
            count = None if count is None else count - 1
            if count == 0:
                return
            time.sleep(arguments.interval)


def _refresh(session: Session, path: str, reader: _Reader) -> bool:
    """Show what is there now; False where no run can ever be."""
    from ajaxckpt._run_reports import (
        listing_document,
        trouble_documents,
        trouble_lines,
    )

    body: dict[str, Any] = {"run": None}
    lines: list[str] = []
    troubles: list[tuple[str, str, _Error]] = []
    try:
        listing = reader.read()
        troubles += [(r.entry.path, r.status, r.error) for r in listing.rows if r.error]
        lines, body = _text_lines(listing), {"run": listing_document(listing)}
    except (InvalidArgumentError, NotACheckpointError) as error:
        session.fail(path, status_of(error), error)
        return False
    except (CheckpointError, OSError) as error:
        # a run that has not begun, or a file system that is away for a moment
        troubles.append((path, status_of(error), error))
    height = shutil.get_terminal_size((_PIPE_WIDTH, 0)).lines
    lines = _fit_height(lines, list(trouble_lines(troubles)), height)
    session.refresh([_head(path), *lines], trouble_documents(troubles), body)
    return True


def _head(path: str) -> str:
    from ajaxckpt._tables import escape

    return f"{escape(path)}  {time.strftime('%H:%M:%S')}"


def _fit_height(lines: list[str], troubles: list[str], height: int) -> list[str]:
    """Leave out the oldest rows that a terminal has no lines for; 0 has them all."""
    room = max(height - 3, 8)  # a line above, and a cursor below
    if not height or len(lines) + len(troubles) <= room:
        return [*lines, *troubles]
    few = troubles[: room // 3]
    if len(few) < len(troubles):
        few[-1:] = [f"{len(troubles) - len(few) + 1:,} more: see ajaxckpt ls"]
    cut = len(lines) + len(few) - room + 1
    if cut > 0:
        lines = [lines[0], f"({cut:,} earlier rows)", *lines[1 + cut :]]
    return [*lines, *few]


# -------------------------------------------------------------------------- prune


def _prune(path: str, arguments: Namespace) -> tuple[Pruning, OSError | None]:
    from ajaxckpt._run_locks import RunLock

    files = _open_files(path, arguments.run_id)
    with error_context(files.directory, "cannot prune"):
        _require_directory(files.directory)
        run_ids = files.run_ids()
        run_id: str | None = arguments.run_id
        if run_id is None and len(run_ids) > 1:
            problem = f"{len(run_ids)} runs share this directory"
            hint = f"say which with --run-id: {', '.join(run_ids[:10])}"
            raise InvalidArgumentError(problem, hint=hint)
        if run_id is not None and run_id not in run_ids:
            others = ", ".join(run_ids[:10])
            hint = f"choose one of {others}" if others else "check the directory"
            raise CheckpointNotFoundError(f"no checkpoint of run {run_id}", hint=hint)
        run_id = files.find_run()
        if run_id is None or arguments.dry_run:
            return _choose(path, files, arguments, remove=False)
        lock = RunLock(files, run_id)
        try:
            notes = lock.take()
            return _choose(path, files, arguments, notes, remove=True)
        finally:
            lock.release()


def _choose(
    path: str,
    files: RunFiles,
    arguments: Namespace,
    notes: Sequence[str] = (),
    *,
    remove: bool,
) -> tuple[Pruning, OSError | None]:
    """Choose what goes, and remove it; also return what kept that from being done."""
    from ajaxckpt._run_reports import Pruning

    policies: _Policies = arguments.keep
    entries = files.entries()
    usable = [entry for entry in entries if not entry.problem]
    for _, policy in policies:
        if metric := getattr(policy, "metric", ""):
            _refuse_unknown(metric, usable)
    gone: Sequence[RunEntry] = ()
    if files.run_id is not None:
        gone = files.choose_removals([policy for _, policy in policies])
    reasons = _find_reasons(files, entries, policies)
    failure = None
    if remove:
        try:
            files.remove(gone)
        except OSError as error:
            failure = error
            gone = [entry for entry in gone if not os.path.lexists(entry.path)]
    away = {entry.path for entry in gone}
    pruning = Pruning(
        path=path,
        run_id=files.run_id,
        dry_run=arguments.dry_run,
        removed=gone,
        kept=[(e, reasons[e.path]) for e in entries if e.path not in away],
        other_runs=[run_id for run_id in files.run_ids() if run_id != files.run_id],
        notes=notes,
    )
    return pruning, failure


def _fault(files: RunFiles, entry: RunEntry) -> str:
    """Say in a word why a checkpoint does not count; unreadable it may be whole."""
    return "unreadable" if "PermissionError" in files.verdict(entry) else "damaged"


def _find_reasons(
    files: RunFiles, entries: Sequence[RunEntry], policies: _Policies
) -> dict[str, list[str]]:
    """Say of every checkpoint why it stays; nothing of one that need not."""
    whole = _leave_damaged(files, entries, [policy for _, policy in policies])
    candidates = [entry.candidate for entry in whole]
    chosen = [
        (text, {candidate.step for candidate in policy.choose(candidates)})
        for text, policy in policies
    ]
    newest = max((entry.step for entry in whole), default=None)
    reasons: dict[str, list[str]] = {}
    for entry in entries:
        why = reasons[entry.path] = [] if entry in whole else [_fault(files, entry)]
        if entry.is_newer:
            why[:] = ["newer format"]
        if entry in whole:
            why += ["newest"] if entry.step == newest else []
            why += [text for text, steps in chosen if entry.step in steps]
        why += ["pinned"] if entry.pinned else []
        if entry.run_id != files.run_id or entry.run_id is None:
            why += [] if entry.problem else ["not this run's"]
        why += [] if entry.is_named else ["not under the name that the run gave it"]
    return reasons


def _leave_damaged(
    files: RunFiles, entries: Sequence[RunEntry], policies: Sequence[KeepPolicy]
) -> list[RunEntry]:
    """Return the entries that count, as the choice of removals does."""
    from ajaxckpt._retention import KeepBest, KeepLast, choose_survivors

    ranked = [p for p in policies if isinstance(p, KeepLast | KeepBest)]
    whole = [entry for entry in entries if not entry.problem]
    while True:
        kept = choose_survivors((entry.candidate for entry in whole), ranked)
        damaged = [e for e in whole if e.step in kept and files.verdict(e)]
        if not damaged:
            return whole
        whole = [entry for entry in whole if entry not in damaged]


def run_prune(session: Session, arguments: Namespace) -> dict[str, Any]:
    """Remove what the policies let go; a finding where a live process writes."""
    done = attempt(session, arguments.run, _prune, arguments)
    if done is None:
        return {"prune": None}
    pruning, failure = done
    from ajaxckpt._run_reports import pruning_document, pruning_lines

    width = shutil.get_terminal_size((_PIPE_WIDTH, 0)).columns
    for line in pruning_lines(pruning, width):
        session.say(line)
    if failure is not None:
        session.fail(arguments.run, status_of(failure), failure)
    return {"prune": pruning_document(pruning)}
