"""The checkpoints of one run: which are its own, which is newest, what may go.

Knows the files of one directory and the retention policies; knows no states, threads
or signals. Reads the whole of a file at most once while it stays the same.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Mapping, Sequence

from ajaxckpt._directories import remove_files, set_aside, touch
from ajaxckpt._errors import (
    CheckpointError,
    CheckpointNotFoundError,
    DamagedCheckpointError,
    InvalidArgumentError,
    NewerFormatError,
)
from ajaxckpt._listing import (
    ABANDONED,
    PIN,
    RunEntry,
    Signature,
    describe_problem,
    format_name,
    list_directory,
    read_entry,
    read_name,
    read_signature,
)
from ajaxckpt._opening import verify_checkpoint
from ajaxckpt._retention import KeepBest, KeepLast, KeepPolicy, choose_survivors

TRIES = 20  # of looking again, where a live writer removes what was just listed
UNREADABLE = "give this user the right to read them: they may be whole"
LOSES_NOTHING = (
    "move the files named here out of the directory, or use another directory"
)


class RunFiles:
    """The checkpoints of one run in a directory that others may share.

    Attributes:
        directory: the directory, absolute.
        run_id: the run; None for whichever single run the directory holds.
    """

    def __init__(self, directory: str, run_id: str | None) -> None:
        """Look at nothing yet."""
        self.directory = directory
        self._given = run_id
        self.run_id = run_id
        self._entries: dict[str, tuple[Signature, RunEntry | None]] = {}
        self._verdicts: dict[str, tuple[Signature, str]] = {}

    def find_run(self) -> str | None:
        """Return the run the directory holds; None where it holds none.

        Raises:
            InvalidArgumentError: it holds several, and none was chosen.
        """
        if self.run_id is None:
            ids = self.run_ids()
            if len(ids) > 1:
                raise InvalidArgumentError(
                    f"{len(ids)} runs share this directory: {', '.join(ids[:10])}",
                    path=self.directory,
                    hint="say which with run_id=",
                )
            self.run_id = ids[0] if ids else None
        return self.run_id

    def run_ids(self) -> list[str]:
        """Return the ids of the runs whose files lie in the directory, sorted."""
        return sorted({e.run_id for e in self._read_all() if e.run_id})

    def adopt(self, begun: str | None = None) -> str:
        """Settle which run this is: the one that is there, else one begun, else new.

        Args:
            begun: the id of a run that was begun here and has no checkpoint yet.
        """
        self.run_id = self.find_run() or begun or secrets.token_hex(8)
        return self.run_id

    def path_of(self, step: int) -> str:
        """Return where a step is, or would be saved."""
        entry = self.find(step)
        return self.path_for(step, None) if entry is None else entry.path

    def path_for(self, step: int, entry: RunEntry | None) -> str:
        """Return where a step would be saved: never onto another run's file.

        Args:
            step: the step.
            entry: what the run has of it, as ``find`` says.
        """
        if entry is not None and entry.is_named and entry.run_id == self.run_id:
            return entry.path
        return os.path.join(self.directory, format_name(step, self._given))

    def entries(self) -> list[RunEntry]:
        """Return the run's checkpoints by step, those that cannot be used included.

        Files that no run wrote count where they have a step; of several of one step
        the one under the run's own name does.
        """
        by_place: dict[tuple[int, str], RunEntry] = {}
        for entry in sorted(self._own_entries(), key=_preference):
            by_place[entry.step, _stray_name(entry)] = entry
        return [by_place[place] for place in sorted(by_place)]

    def find(self, step: int) -> RunEntry | None:
        """Return the run's checkpoint of a step."""
        found = (e for e in self.entries() if not _stray_name(e))
        return next((entry for entry in found if entry.step == step), None)

    def _own_entries(self) -> list[RunEntry]:
        """Return the run's entries, and those that may be its own.

        A file without a run counts where the run's id was not given. A damaged one,
        of which nobody can say, counts too, for it must not be taken for none; but
        not where all whole files of such names are known to be another run's.
        """
        run, entries = self.find_run(), self._read_all()
        alone = self._given is None
        plain = {e.run_id for e in entries if not e.problem and _is_plain(e)}
        damaged = alone or not plain or bool(plain & {run, None})
        return [
            entry
            for entry in entries
            if entry.run_id == run
            or (entry.run_id is None and (damaged if entry.problem else alone))
        ]

    def require(self, step: int) -> RunEntry:
        """Return the run's checkpoint of a step.

        Raises:
            CheckpointNotFoundError: the run has none.
        """
        if (entry := self.find(step)) is not None:
            return entry
        steps = ", ".join(str(entry.step) for entry in self.entries()[-10:])
        raise CheckpointNotFoundError(
            f"no checkpoint of step {step}",
            path=self.directory,
            hint=f"choose one of the steps {steps}" if steps else "save one first",
        )

    def verdict(self, entry: RunEntry) -> str:
        """Read a file once, and say why it cannot be restored; empty if it can."""
        if entry.problem:
            return entry.problem
        try:
            signature = read_signature(entry.path)
            known = self._verdicts.get(entry.path)
            if known is not None and known[0] == signature:
                return known[1]
            problem = _verify(entry.path)
        except OSError as error:
            return describe_problem(error)
        self._verdicts[entry.path] = (signature, problem)
        return problem

    def read_back(self, path: str) -> None:
        """Read a file that was just written.

        Raises:
            DamagedCheckpointError: its bytes are not those written.
        """
        verify_checkpoint(path)
        self._verdicts[path] = (read_signature(path), "")

    def condemn(self, entry: RunEntry, error: Exception) -> str:
        """Remember that a file proved damaged when it was read; return why."""
        problem = describe_problem(error)
        with contextlib.suppress(OSError):
            if isinstance(error, DamagedCheckpointError):
                self._verdicts[entry.path] = (read_signature(entry.path), problem)
        return problem

    def first_whole(
        self, find: Callable[[], Sequence[RunEntry]]
    ) -> tuple[RunEntry | None, Sequence[RunEntry]]:
        """Return the first of some entries that is whole, and all of them.

        Args:
            find: says which; asked again where a file was removed meanwhile.

        Raises:
            NewerFormatError: a newer release wrote one that comes first.
        """
        entries: Sequence[RunEntry] = ()
        for _ in range(TRIES):
            entries = find()
            for entry in entries:
                self.refuse_newer(entry)
                if not self.verdict(entry):
                    return entry, entries
            if all(os.path.lexists(entry.path) for entry in entries):
                break
        return None, entries

    def newest(self) -> RunEntry | None:
        """Return the newest checkpoint that is whole; None where there is none.

        Raises:
            DamagedCheckpointError: there are some, and none is whole.
        """
        entry, entries = self.first_whole(lambda: self.entries()[::-1])
        if entry is None and entries:
            raise self.none_loads([(e, self.verdict(e)) for e in entries])
        return entry

    def refuse_newer(self, entry: RunEntry) -> None:
        """Keep a run from going on before a checkpoint that it cannot read yet.

        Raises:
            NewerFormatError: a newer release wrote the file.
        """
        if entry.is_newer:
            hint = "upgrade ajaxckpt, or go back on purpose with run.rollback(step)"
            raise NewerFormatError(entry.problem, path=entry.path, hint=hint)

    def none_loads(
        self, skipped: Sequence[tuple[RunEntry, str]]
    ) -> DamagedCheckpointError:
        """Return the error of a run whose every checkpoint is unusable."""
        count = len(skipped)
        verb = "is" if count == 1 else "are"
        unreadable = any(why.startswith("PermissionError") for _, why in skipped)
        return DamagedCheckpointError(
            f"{count} checkpoint{'s' * (count > 1)} {verb} there and none is whole",
            path=self.directory,
            details=[f"{os.path.basename(e.path)}: {why}" for e, why in skipped],
            hint=UNREADABLE if unreadable else LOSES_NOTHING,
        )

    def choose_removals(self, policies: Sequence[KeepPolicy] | None) -> list[RunEntry]:
        """Return what the policies let go, oldest first.

        Only the run's own files under the names it gave them; never a damaged one,
        and damaged ones do not count: what goes, and what KeepLast and KeepBest keep
        instead, was read once.
        """
        entries = [entry for entry in self.entries() if not entry.problem]
        while True:
            kept = choose_survivors((e.candidate for e in entries), policies)
            gone = [e for e in entries if e.step not in kept and self._is_own(e)]
            damaged = self._find_damaged(entries, policies) if gone else []
            if not damaged:
                return [entry for entry in gone if not self.verdict(entry)]
            entries = [entry for entry in entries if entry not in damaged]

    def _find_damaged(
        self, entries: Sequence[RunEntry], policies: Sequence[KeepPolicy] | None
    ) -> list[RunEntry]:
        ranked = [p for p in policies or () if isinstance(p, KeepLast | KeepBest)]
        kept = choose_survivors((e.candidate for e in entries), ranked)
        return [e for e in entries if e.step in kept and self.verdict(e)]

    def _is_own(self, entry: RunEntry) -> bool:
        ours = self.run_id is not None and entry.run_id == self.run_id
        return ours and entry.is_named and not entry.pinned

    def remove(self, entries: Sequence[RunEntry]) -> None:
        """Remove checkpoints; the caller made sure that a newer one is durable."""
        remove_files(entry.path for entry in entries)

    def pin(self, step: int) -> None:
        """Keep a checkpoint whatever the policies say."""
        touch(self.require(step).path + PIN)

    def unpin(self, step: int) -> None:
        """Leave a checkpoint to the policies again."""
        remove_files([self.require(step).path + PIN])

    def abandon_after(self, step: int) -> tuple[str, ...]:
        """Set every later checkpoint aside, the newest first; return their new paths.

        Raises:
            CheckpointNotFoundError: the run has no checkpoint of that step.
            DamagedCheckpointError: it is damaged.
        """
        entry = self.require(step)
        if problem := self.verdict(entry):
            raise DamagedCheckpointError(
                problem, path=entry.path, hint="choose a step that is whole"
            )
        later = [entry for entry in self._own_entries() if entry.step > step]
        aside: list[str] = []
        for entry in sorted(later, key=lambda e: -e.step):
            if entry.pinned:  # first: a pin without its file would pin another
                set_aside(entry.path + PIN, ABANDONED)
            aside.append(set_aside(entry.path, ABANDONED))
        return tuple(aside)

    def _read_all(self) -> list[RunEntry]:
        """Describe every file, reading again only those that changed."""
        known = self._entries  # another thread may put a new one in its place
        found: dict[str, tuple[Signature, RunEntry | None]] = {}
        for _ in range(TRIES):
            paths = list_directory(self.directory)
            found = {path: _read(path, known) for path in paths}
            # a live writer puts a new file there before it removes an old one
            if all(
                entry is not None or signature for signature, entry in found.values()
            ):
                break
        self._entries = found
        verdicts = list(self._verdicts.items())
        self._verdicts = {path: item for path, item in verdicts if path in found}
        return [entry for _, entry in found.values() if entry is not None]


def _read(
    path: str, known: Mapping[str, tuple[Signature, RunEntry | None]]
) -> tuple[Signature, RunEntry | None]:
    """Return a file's signature and entry; neither if it is gone."""
    try:
        signature = (*read_signature(path), os.path.lexists(path + PIN))
    except OSError:
        return (), read_entry(path)
    if path in known and known[path][0] == signature:
        return known[path]
    entry = read_entry(path)
    is_gone = entry is None and not os.path.lexists(path)
    return () if is_gone else signature, entry


def _is_plain(entry: RunEntry) -> bool:
    """Tell whether a file's name says a step and no run."""
    name = read_name(os.path.basename(entry.path))
    return name is not None and name[1] is None


def _verify(path: str) -> str:
    try:
        verify_checkpoint(path)
    except CheckpointError as error:
        return describe_problem(error)
    return ""


def _stray_name(entry: RunEntry) -> str:
    """Return the path of a damaged file whose name tells no step; else nothing."""
    known = not entry.problem or read_name(os.path.basename(entry.path))
    return "" if known else entry.path


def _preference(entry: RunEntry) -> tuple[bool, bool, float]:
    return not entry.problem, entry.is_named, entry.time
