"""The command line for runs: ls, prune and watch."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from fuzz_headers import seal

from ajaxckpt import (
    KeepLast,
    Run,
    _directories,
    _opening,
    _run_commands,
    save_checkpoint,
)
from ajaxckpt._cli import main
from ajaxckpt._dtypes import STORED_DTYPES
from ajaxckpt._errors import NewerFormatError
from ajaxckpt._files import try_lock
from ajaxckpt._layout import LeafSpec
from ajaxckpt._listing import PIN, format_name
from ajaxckpt._metadata import Metadata
from ajaxckpt._payload import whole_leaf
from ajaxckpt._plain import plain_metrics
from ajaxckpt._run_files import RunFiles
from ajaxckpt._run_locks import RunLock
from ajaxckpt._run_reports import show_age
from ajaxckpt._tables import text_width
from ajaxckpt._writer import StateData, write_checkpoint

HEAVY = ("jax", "jaxlib", "flax", "optax", "orbax", "chex", "rich")
NOW = 1_735_689_600.0  # 2025-01-01T00:00:00+00:00
LAST_TWO = ("--keep", "last=2")
QUICKLY = ("--interval", "0.01", "--count")


def write(step, *, run="a", metrics=None, named=None, age=60.0, directory="r"):
    """Write a checkpoint of a run without jax; return its path."""
    array = np.arange(100, dtype=np.float32) + step
    spec = LeafSpec(kind="numpy", dtype="float32", shape=array.shape)
    written = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime(NOW - age))
    state = StateData(
        layout={"w": spec},
        values={},
        sources={"w": lambda: whole_leaf(array, STORED_DTYPES["float32"], frozen=True)},
    )
    metadata = Metadata(
        checkpoint_id=f"{step:032x}",
        run_id=run,
        step=step,
        metrics=plain_metrics(metrics),
        provenance={"time": written},
    )
    path = Path(directory, named or format_name(step, None)).absolute()
    path.parent.mkdir(exist_ok=True)
    write_checkpoint(str(path), state, metadata)
    return path


def flip(path, position=-1):
    raw = bytearray(Path(path).read_bytes())
    raw[position] ^= 1
    Path(path).write_bytes(raw)


def set_newer(path):
    """Make a file say that a newer release wrote it."""
    raw = Path(path).read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    assert raw.count(b'"ajaxckpt":"1"') == 1
    head = raw[:end].replace(b'"ajaxckpt":"1"', b'"ajaxckpt":"9"')
    Path(path).write_bytes(seal(head) + raw[end:])


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Work in an empty directory, at a fixed time and width."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(_run_commands.time, "time", lambda: NOW)
    return tmp_path


@pytest.fixture
def call(capsys, tmp_path):
    """Run the command line; returns exit status, stdout and stderr."""

    def run(*arguments):
        try:
            code = main([*map(str, arguments)])
        except SystemExit as error:  # argparse's
            code = error.code
        out, err = capsys.readouterr()
        return code, out, err.replace(str(tmp_path), "DIR")

    return run


@pytest.fixture
def ls(call):
    """Return the rows of ``ls --json`` by file name, and the whole of it."""

    def run(*arguments):
        code, out, err = call("ls", "r", "--json", *arguments)
        document = json.loads(out)
        rows = document["run"]["checkpoints"]
        return code, {os.path.basename(r["path"]): r for r in rows}, document, err

    return run


def bytes_of(directory="r"):
    return {
        p.name: p.read_bytes() for p in Path(directory).iterdir() if p.suffix != ".lock"
    }


# --- ls


def test_ls_shows_a_row_per_checkpoint_by_step(call):
    first = {"return": -1.25, "n": 3, "top": float("inf")}
    paths = [
        write(0, metrics=first, age=3 * 86400),
        write(200, metrics={"return": float("nan"), "loss": None}, age=7200),
        write(1000, metrics={"return": 12.5}, age=59),
    ]
    Path(f"r/step-200.safetensors{PIN}").touch()
    sizes = [os.path.getsize(path) for path in paths]
    assert all(100 <= size < 1000 for size in sizes)
    assert call("ls", "r", "--best", "return:max") == (
        0,
        f"""\
step  state   size   age  flags        metrics
   0  whole  {sizes[0]} B   3 d               return -1.25, n 3, top Infinity
 200  whole  {sizes[1]} B   2 h  pinned       return NaN, loss null
1000  whole  {sizes[2]} B  59 s  newest best  return 12.5
3 checkpoints: 3 whole; {sum(sizes) / 1024:.1f} KiB
""",
        "",
    )


def test_the_metric_asked_for_is_shown_first_and_the_best_is_no_nan(ls, call):
    values = {1: 3.0, 2: 1.0, 3: 1.0, 4: float("nan"), 5: None, 6: float("-inf")}
    for step, value in values.items():
        write(step, metrics={"other": 1, "loss": value})
    for best, step in (("loss:min", 3), ("loss:max", 1)):  # the newer one of equals
        _, rows, _, _ = ls("--best", best)
        assert [r["step"] for r in rows.values() if r["best"]] == [step]
    assert not any(r["best"] for r in ls()[1].values())
    assert "  loss 3.0, other 1\n" in call("ls", "r", "--best", "loss:min")[1]
    assert rows["step-4.safetensors"]["metrics"] == {"other": 1, "loss": "NaN"}


def test_a_metric_nobody_measured_is_wrong_usage(call):
    write(1, metrics={"return": 1.0})
    code, out, err = call("ls", "r", "--best", "retrun:max")
    assert (code, out) == (2, "")
    assert "no checkpoint has the metric retrun" in err and "one of return" in err


@pytest.mark.parametrize("text", ["return", "return:best", ":max", "r:max:2", "max"])
def test_a_ranking_of_another_form_is_wrong_usage(call, text):
    code, _, err = call("ls", "r", "--best", text)
    assert code == 2 and "is not METRIC:min or METRIC:max" in err


def test_what_is_not_whole_is_a_finding_with_its_reason_and_never_newest(
    ls, call, monkeypatch
):
    for step in range(1, 8):
        write(step, metrics={"return": step})
    flip("r/step-7.safetensors")
    Path("r/step-6.safetensors").write_bytes(b"")
    set_newer("r/step-5.safetensors")
    Path("r/step-4.safetensors").unlink()
    os.symlink("nowhere", "r/step-4.safetensors")
    Path("r/step-8.safetensors").mkdir()

    def verify(path, verify=_opening.verify_checkpoint):
        if path.endswith("step-3.safetensors"):
            raise PermissionError(13, "Permission denied", path)
        return verify(path)

    monkeypatch.setattr(_opening, "verify_checkpoint", verify)
    code, rows, document, err = ls("--best", "return:max")
    assert code == 1
    assert {row["step"]: row["status"] for row in rows.values()} == {
        1: "whole",
        2: "whole",
        3: "unreadable",
        4: "not found",
        5: "newer format",
        6: "damaged",
        7: "damaged",
        8: "not a checkpoint",
    }
    assert [r["step"] for r in rows.values() if r["newest"]] == [2]
    assert [r["step"] for r in rows.values() if r["best"]] == [2]
    heads = [line for line in err.splitlines() if line.startswith("DIR")]
    names = [f"DIR/r/step-{step}.safetensors" for step in range(3, 9)]
    assert [head.partition(":")[0] for head in heads] == names
    for reason in ("w: bytes", "Permission denied", "format version 9"):
        assert reason in err
    assert [error["status"] for error in document["errors"]] == [
        row["status"] for row in rows.values() if row["status"] != "whole"
    ]
    assert "8 checkpoints: 2 whole, 1 unreadable, 1 not found" in call("ls", "r")[1]


def test_every_byte_is_read_and_quick_reads_headers_only(ls, monkeypatch):
    size = os.path.getsize(write(1))
    write(2)
    for position in range(0, size, 67):
        flip("r/step-2.safetensors", position)
        assert ls()[0] == 1, position
        flip("r/step-2.safetensors", position)
    flip("r/step-2.safetensors")
    read = []
    with monkeypatch.context() as patch:
        for name in ("verify_checkpoint", "open_checkpoint"):
            patch.setattr(_opening, name, read.append)
        code, rows, _, err = ls("--quick")
    assert (code, err, read) == (0, "", [])
    assert [r["status"] for r in rows.values()] == ["header only"] * 2
    assert rows["step-2.safetensors"]["newest"]
    flip("r/step-2.safetensors", 100)
    code, rows, _, err = ls("--quick")
    assert code == 1 and "step-2" in err
    assert rows["step-2.safetensors"]["status"] == "damaged"
    assert rows["step-1.safetensors"]["newest"]


def test_empty_missing_and_damaged_directories_are_three_outcomes(call):
    Path("r").mkdir()
    assert call("ls", "r") == (0, "no checkpoint in r\n", "")
    code, out, err = call("ls", "missing")
    assert (code, out) == (1, "") and "missing: cannot list the run: no such dir" in err
    write(1)
    flip("r/step-1.safetensors")
    code, out, err = call("ls", "r")
    assert code == 1 and "1 checkpoint: 1 damaged" in out and "is not whole" in err
    code, out, err = call("ls", "r/step-1.safetensors")
    assert (code, out) == (1, "") and "is no directory" in err
    assert not Path("missing").exists()


def test_a_directory_that_cannot_be_read_is_a_finding(call, monkeypatch):
    write(1)

    def refuse(path):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(os, "listdir", refuse)
    assert call("ls", "r") == (1, "", "r: Permission denied\n")


def test_several_runs_are_told_apart_by_a_column(ls, call):
    for run, steps in (("b", (1, 2)), ("a", (1, 3))):
        for step in steps:
            write(
                step,
                run=run,
                metrics={"m": step},
                named=f"step-{step}.{run}.safetensors",
            )
    flip("r/step-3.a.safetensors")
    code, rows, document, _ = ls("--best", "m:max")
    assert code == 1 and document["run"]["run_ids"] == ["a", "b"]
    assert [(r["run_id"], r["step"]) for r in rows.values()] == [
        *(("a", 1), ("a", 3), ("b", 1), ("b", 2))
    ]
    newest = {name for name, row in rows.items() if row["newest"] and row["best"]}
    assert newest == {"step-1.a.safetensors", "step-2.b.safetensors"}
    lines = call("ls", "r")[1].splitlines()
    assert [line.split()[:3] for line in lines[:5]] == [
        ["run", "step", "state"],
        ["a", "1", "whole"],
        ["a", "3", "damaged"],
        ["b", "1", "whole"],
        ["b", "2", "whole"],
    ]
    code, rows, document, _ = ls("--run-id", "b")
    assert (code, [*rows]) == (0, ["step-1.b.safetensors", "step-2.b.safetensors"])
    assert not call("ls", "r", "--run-id", "b")[1].startswith("run")
    code, _, err = call("ls", "r", "--run-id", "c")
    assert code == 1 and "no checkpoint of run c" in err and "one of a, b" in err
    code, _, err = call("ls", "r", "--run-id", "../c")
    assert code == 2 and "no id of a run" in err


def test_files_of_other_names_show_their_name(call):
    write(4, named="best.safetensors")
    Path("r/handpicked.safetensors").write_bytes(write(5).read_bytes()[:-1])
    foreign = b'{"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
    head = len(foreign).to_bytes(8, "little")
    Path("r/foreign.safetensors").write_bytes(head + foreign + b"w")
    lines = call("ls", "r")[1].splitlines()
    rows = [line.split() for line in lines if "safetensors" in line]
    assert [(row[0], row[-1]) for row in rows] == [
        *(("?", "handpicked.safetensors"), ("4", "best.safetensors"))
    ]
    assert "foreign" not in "".join(lines)


def test_abandoned_files_are_counted(call):
    with Run("r", signals=()) as run:
        for step in (1, 2, 3):
            run.save({"n": step}, step=step)
        run.wait()
        run.pin(3)
        run.rollback(1)
        run.save({"n": 2}, step=2)
        run.rollback(1)
    code, out, _ = call("ls", "r")
    assert code == 0 and "3 abandoned files, set aside by a rollback" in out
    assert "1 checkpoint: 1 whole" in out


def test_a_live_writer_is_told_and_left_in_peace(ls, call):
    with Run("r", signals=()) as run:
        run.save({"n": 1}, step=1)
        run.wait()
        owner = f"being written by process {os.getpid()} on "
        assert owner in call("ls", "r")[1]
        _, _, document, _ = ls()
        (writer,) = document["run"]["writers"]
        assert writer["run_id"] == run.run_id
        assert f"being written by {writer['owner']}".startswith(owner)
        run.save({"n": 2}, step=2)
    assert "being written" not in call("ls", "r")[1]
    lock = RunLock(RunFiles(os.path.abspath("r"), "fresh"), "fresh")
    lock.take()  # a run that has not saved yet
    code, out, err = call("ls", "r", "--run-id", "fresh")
    assert (code, err) == (0, "") and "no checkpoint" in out and owner in out
    lock.release()
    assert call("ls", "r", "--run-id", "fresh")[0] == 1


def test_a_file_that_goes_while_it_is_listed_is_no_finding(ls, monkeypatch):
    for step in (1, 2, 3):
        write(step)

    def vanish(path, verify=_opening.verify_checkpoint):
        if path.endswith("step-2.safetensors"):
            os.unlink(path)
        return verify(path)

    monkeypatch.setattr(_opening, "verify_checkpoint", vanish)
    code, rows, _, err = ls()
    assert (code, err) == (0, "")
    assert [row["step"] for row in rows.values()] == [1, 3]


def test_age_is_spelled_in_the_unit_that_fits():
    spelled = {0: "0 s", 59.9: "59 s", 60: "1 min", 3599: "59 min", 86399: "23 h"}
    spelled |= {864e5: "1,000 d", -30: "0 s", -61: "future"}
    assert {age: show_age(age) for age in spelled} == spelled


HOSTILE = "\x1b[2J\r\n\x9b\u202e\u2028"


def test_nothing_printed_can_act_on_a_terminal(call):
    write(1, metrics={HOSTILE: 1.0, f"{HOSTILE}2": 2})
    write(2, named=f"x{HOSTILE}.safetensors")
    flip(f"r/x{HOSTILE}.safetensors")
    Path("r/.ajaxckpt-run-a.lock").write_text(HOSTILE)
    with open("r/.ajaxckpt-run-a.lock") as file:
        assert try_lock(file.fileno())
        calls = [("ls", "r"), ("ls", "r", "--json"), ("ls", f"{HOSTILE}no")]
        calls += [("prune", "r", *LAST_TWO), ("ls", "r", "--best", f"{HOSTILE}:max")]
        calls += [("watch", "r", *QUICKLY, "1"), ("prune", "r", *LAST_TWO, "--dry-run")]
        for arguments in calls:
            _, out, err = call(*arguments)
            assert all(c.isprintable() for c in (out + err).replace("\n", ""))
            assert r"\x1b[2J" in (out + err).replace("\\\\", "\\") or "u001b" in out


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_many_and_long_metrics_keep_to_the_width(call, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    write(1, metrics={f"metric_{i}": i / 7 for i in range(300)})
    write(2, metrics={"n" * 500: 1e300, "m": 2})
    write(3, metrics={"\N{CJK UNIFIED IDEOGRAPH-4E00}" * 200: -1 / 3})
    write(4, metrics={"huge": 1 << 62})
    out = call("ls", "r")[1]
    assert all(text_width(line) <= columns for line in out.splitlines())
    (row,) = (line for line in out.splitlines() if "metric_0 0" in line)
    shown = len(re.findall(r"metric_\d+ [\d.]+", row))
    assert shown >= 1 and row.endswith(f", {300 - shown} more")
    assert re.search(r"  n+\.\.\.n+ 1e\+300", out) and " -0.333333\n" in out
    assert "huge 461168...387904\n" in out


# --- prune


def steps_left(directory="r"):
    names = (path.name for path in Path(directory).iterdir())
    found = (re.fullmatch(r"step-(\d+)\.\S*", name) for name in names)
    return sorted({int(match[1]) for match in found if match})


RETURNS = {0: 5.0, 100: 1.0, 200: 9.0, 300: float("nan"), 400: 7.0, 500: 2.0, 600: 3.0}


@pytest.mark.parametrize(
    ("keep", "left"),
    [
        (["last=1"], [600]),
        (["last=3"], [400, 500, 600]),
        (["best=return:max:2"], [200, 400, 600]),
        (["best=return:min"], [100, 600]),
        (["every=250"], [0, 300, 500, 600]),
        (["period=3600"], [0, 400, 600]),
        (["last=2", "best=return:max", "every=600"], [0, 200, 500, 600]),
    ],
)
def test_prune_keeps_what_any_policy_keeps(call, keep, left):
    for step, value in RETURNS.items():
        age = 3 * 3600 - 1 if step < 400 else 2 * 3600 - 1
        write(step, metrics={"return": value}, age=age)
    options = [option for text in keep for option in ("--keep", text)]
    before = bytes_of()
    code, dry, err = call("prune", "r", *options, "--dry-run", "--json")
    assert (code, err) == (0, "") and bytes_of() == before
    code, out, err = call("prune", "r", *options, "--json")
    assert (code, err) == (0, "")
    assert steps_left() == left
    dry, done = json.loads(dry)["prune"], json.loads(out)["prune"]
    assert dry.pop("dry_run") and not done.pop("dry_run")
    assert dry == done
    assert [item["step"] for item in done["removed"]] == sorted({*RETURNS} - {*left})
    assert [item["step"] for item in done["kept"]] == left
    assert all(item["reasons"] for item in done["kept"])


def test_prune_says_what_goes_what_stays_and_why(call):
    for step in (1, 2, 3, 4, 5, 6, 7):
        write(step, metrics={"return": -step})
    Path(f"r/step-1.safetensors{PIN}").touch()
    flip("r/step-6.safetensors")
    set_newer("r/step-7.safetensors")
    write(8, run=None)
    write(9, run="other", named="step-9.other.safetensors")
    write(3, named="step-3-copy.safetensors")
    write(0, metrics={"return": 0}, named="mine.safetensors")
    Path("r/notes.txt").touch()
    code, out, err = call(
        *("prune", "r", "--run-id", "a", *LAST_TWO, "--keep", "best=return:max:2")
    )
    rows = [re.split("  +", line.strip()) for line in out.splitlines()]
    verdicts = {row[3]: (row[0], *row[4:]) for row in rows[1:-2]}
    assert verdicts == {
        "mine.safetensors": (
            "stays",
            "best=return:max:2, not under the name that the run gave it",
        ),
        "step-1.safetensors": ("stays", "best=return:max:2, pinned"),
        "step-2.safetensors": ("removed",),
        "step-3.safetensors": ("removed",),
        "step-4.safetensors": ("stays", "last=2"),
        "step-5.safetensors": ("stays", "newest, last=2"),
        "step-6.safetensors": ("stays", "damaged"),
        "step-7.safetensors": ("stays", "newer format"),
    }
    assert rows[-2][0].startswith("2 checkpoints removed, ")
    assert rows[-1] == ["not this run's, and left alone: other"]
    assert (code, err) == (0, "")
    assert sorted(p.name for p in Path("r").iterdir() if p.suffix != ".lock") == [
        "mine.safetensors",
        "notes.txt",
        "step-1.safetensors",
        f"step-1.safetensors{PIN}",
        "step-3-copy.safetensors",
        *(f"step-{step}.safetensors" for step in (4, 5, 6, 7, 8)),
        "step-9.other.safetensors",
    ]


@pytest.mark.parametrize(
    "text",
    [
        *("3", "last", "last=", "last=0", "last=-1", "last=1.5", "first=3", ""),
        *("best=return", "best=return:up", "best=:max", "best=return:max:0"),
        *("every=0", "every=x", "period=0", "period=nan", "period=inf", "period=-1"),
        *("best=return:max:two", f"last={'9' * 5000}"),
    ],
)
def test_a_policy_of_another_form_is_wrong_usage_that_names_the_forms(call, text):
    write(1)
    code, out, err = call("prune", "r", "--keep", text)
    assert (code, out) == (2, "")
    forms = "last=N, best=METRIC:min|max[:N], every=STEPS or period=SECONDS"
    assert forms in " ".join(err.split()) and steps_left() == [1]


def test_metric_names_may_hold_colons_and_equals_signs(call):
    for step, value in ((1, 1.0), (2, 3.0), (3, 2.0)):
        write(step, metrics={"eval:max=a:min": value})
    assert call("prune", "r", "--keep", "best=eval:max=a:min:max:1")[0] == 0
    assert steps_left() == [2, 3]


def test_at_least_one_policy_is_required(call):
    write(1)
    code, _, err = call("prune", "r")
    assert code == 2 and "--keep" in err


def test_a_misspelled_metric_removes_nothing(call):
    for step in (1, 2, 3):
        write(step, metrics={"return": 1.0})
    code, _, err = call("prune", "r", "--keep", "best=retrun:max", "--keep", "last=1")
    assert code == 2 and "choose one of return" in err
    assert steps_left() == [1, 2, 3]


def test_while_a_process_writes_the_run_nothing_is_removed(call):
    with Run("r", signals=()) as run:
        for step in (1, 2, 3):
            run.save({"n": step}, step=step)
        run.wait()
        code, out, err = call("prune", "r", *LAST_TWO, "--json")
        document = json.loads(out)
        assert code == 1 and document["prune"] is None
        assert [error["status"] for error in document["errors"]] == ["locked"]
        assert f"being written by process {os.getpid()} on" in err
        assert steps_left() == [1, 2, 3]
        code, out, _ = call("prune", "r", *LAST_TWO, "--dry-run")
        assert code == 0 and "1 checkpoint would go" in out
        assert steps_left() == [1, 2, 3]
    assert call("prune", "r", *LAST_TWO)[0] == 0
    assert steps_left() == [2, 3]


def test_the_lock_is_held_while_files_go_and_free_afterwards(call, monkeypatch):
    for step in (1, 2, 3):
        write(step)
    held = []

    def remove(self, entries, remove=RunFiles.remove):
        lock = RunLock(RunFiles(self.directory, "a"), "a")
        with contextlib.suppress(Exception):
            lock.take()
        held.append(not lock.is_held)
        lock.release()
        remove(self, entries)

    monkeypatch.setattr(RunFiles, "remove", remove)
    assert call("prune", "r", *LAST_TWO)[0] == 0
    assert (held, steps_left()) == ([True], [2, 3])
    with Run("r", signals=()) as run:
        assert run.run_id == "a"


def test_a_file_system_without_locks_is_noted(call, monkeypatch):
    for step in (1, 2, 3):
        write(step)
    monkeypatch.setattr(_directories, "try_lock", lambda fd: None)
    code, out, _ = call("prune", "r", *LAST_TWO)
    assert code == 0 and steps_left() == [2, 3]
    assert out.splitlines()[-1].startswith("this file system knows no locks")
    assert "no locks" not in call("prune", "r", *LAST_TWO, "--dry-run")[1]


def test_a_removal_that_fails_is_told_with_what_went(call, monkeypatch):
    for step in (1, 2, 3, 4):
        write(step)

    def refuse(path, unlink=os.unlink):
        if os.fspath(path).endswith("step-2.safetensors"):
            raise PermissionError(13, "Permission denied", path)
        unlink(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refuse)
        code, out, err = call("prune", "r", "--keep", "last=1", "--json")
    done = json.loads(out)["prune"]
    assert code == 1 and "Permission denied" in err
    assert [item["step"] for item in done["removed"]] == [1]
    assert [item["step"] for item in done["kept"]] == [2, 3, 4]


def test_prune_of_several_runs_asks_which_and_leaves_the_others(call):
    for run in ("a", "b"):
        for step in (1, 2, 3):
            write(step, run=run, named=f"step-{step}.{run}.safetensors")
    code, _, err = call("prune", "r", *LAST_TWO)
    assert code == 2 and "--run-id: a, b" in err
    code, _, err = call("prune", "r", *LAST_TWO, "--run-id", "c")
    assert code == 1 and "no checkpoint of run c" in err
    assert call("prune", "r", *LAST_TWO, "--run-id", "b")[0] == 0
    names = {p.name for p in Path("r").glob("*.safetensors")}
    left = {"a": (1, 2, 3), "b": (2, 3)}
    assert names == {format_name(s, run) for run in left for s in left[run]}


def test_prune_leaves_alone_what_no_run_wrote_and_where_there_is_nothing(call):
    for step in (1, 2, 3):
        save_checkpoint({"n": step}, f"r/step-{step}.safetensors", step=step)
    for option in ((), ("--dry-run",)):
        code, out, _ = call("prune", "r", "--keep", "last=1", *option)
        assert code == 0 and "3 stay" in out and out.count("not this run's") == 3
    assert steps_left() == [1, 2, 3]
    Path("empty").mkdir()
    assert call("prune", "empty", *LAST_TWO)[0] == 0
    assert [*Path("empty").iterdir()] == []
    code, _, err = call("prune", "missing", *LAST_TWO)
    assert code == 1 and "no such directory" in err
    assert not Path("missing").exists()


def test_damaged_files_neither_count_nor_go(call):
    for step in range(1, 7):
        write(step)
    for step in (4, 6):
        flip(f"r/step-{step}.safetensors")
    assert call("prune", "r", *LAST_TWO)[0] == 0
    left = steps_left()
    assert {3, 5} <= {*left} and 6 in left and 1 not in left and 2 not in left


def test_prune_and_the_run_choose_the_same(call):
    for step in range(1, 7):
        write(step)
    flip("r/step-5.safetensors")
    gone = Run("r").prune(KeepLast(2), dry_run=True)
    out = call("prune", "r", *LAST_TWO, "--json")[1]
    assert [item["path"] for item in json.loads(out)["prune"]["removed"]] == [*gone]


def test_a_run_id_that_is_a_path_makes_no_file_elsewhere(call):
    write(1, run="/../../escaped/x")
    write(2, run="/../../escaped/x")
    before = sorted(map(str, Path().rglob("*")))
    call("prune", "r", "--keep", "last=1")
    call("ls", "r")
    after = sorted(map(str, Path().rglob("*")))
    assert [p for p in after if not p.endswith(".lock")] == before
    assert not Path("escaped").exists() and not Path("../escaped").exists()


# --- watch


def watched(out):
    return [json.loads(line) for line in out.splitlines()]


@pytest.fixture
def between(monkeypatch):
    """Do something between two refreshes, instead of waiting."""

    def set_up(*acts):
        left = list(acts)

        def sleep(seconds):
            assert seconds == 0.01
            left.pop(0)()

        monkeypatch.setattr(_run_commands.time, "sleep", sleep)

    return set_up


def test_watch_sees_what_changes_and_reads_no_file_twice(call, between, monkeypatch):
    read = []

    def verify(path, verify=_opening.verify_checkpoint):
        read.append(os.path.basename(path))
        return verify(path)

    monkeypatch.setattr(_opening, "verify_checkpoint", verify)
    write(1)
    damage = (lambda: flip("r/step-2.safetensors"), lambda: None)
    prune = lambda: os.unlink("r/step-1.safetensors")  # noqa: E731
    between(lambda: write(2), *damage, prune)
    code, out, err = call("watch", "r", *QUICKLY, "5", "--json")
    assert (code, err) == (0, "")
    states = [
        [(row["step"], row["status"], row["newest"]) for row in d["run"]["checkpoints"]]
        for d in watched(out)
    ]
    damaged = (2, "damaged", False)
    assert states == [
        [(1, "whole", True)],
        [(1, "whole", False), (2, "whole", True)],
        *[[(1, "whole", True), damaged]] * 2,
        [damaged],
    ]
    assert [len(d["errors"]) for d in watched(out)] == [0, 0, 1, 1, 1]
    assert read == [*("step-1.safetensors", "step-2.safetensors", "step-2.safetensors")]


def test_watch_as_text_says_when_and_what_is_wrong(call, between):
    write(1, metrics={"return": 0.5})
    between(lambda: flip("r/step-1.safetensors"))
    code, out, err = call("watch", "r", *QUICKLY, "2")
    assert (code, err) == (0, "") and "\x1b" not in out
    assert len(re.findall(r"^r  \d\d:\d\d:\d\d$", out, re.M)) == 2
    assert out.count("return 0.5") == 2
    assert "step-1.safetensors: damaged: 1 of 1 leaves is damaged: w: bytes" in out


def test_watch_waits_for_a_run_that_has_not_begun(call, between):
    between(lambda: os.mkdir("r"), lambda: write(1, run="b"))
    options = (*QUICKLY, "3", "--run-id", "b", "--best", "return:max", "--json")
    code, out, err = call("watch", "r", *options)
    assert (code, err) == (0, "")
    missing, empty, begun = watched(out)
    assert missing["run"] is None
    assert [error["status"] for error in missing["errors"]] == ["not found"]
    assert empty["run"]["checkpoints"] == []
    assert [row["step"] for row in begun["run"]["checkpoints"]] == [1]


def test_watch_of_a_file_and_wrong_numbers_end_at_once(call):
    path = write(1)
    code, out, err = call("watch", path)
    assert (code, out) == (1, "") and "is no directory" in err
    for options in (("--interval", "0"), ("--interval", "nan"), ("--count", "0")):
        assert call("watch", "r", *options)[0] == 2
    assert call("watch", "r", "--run-id", "a/b")[0] == 2


def test_watch_keeps_the_newest_rows_on_a_small_terminal(call, monkeypatch):
    monkeypatch.setenv("LINES", "15")
    for step in range(40):
        write(step)
    for step in range(10):
        flip(f"r/step-{step}.safetensors")
    lines = call("watch", "r", *QUICKLY, "1")[1].splitlines()
    assert len(lines) < 15
    assert re.match(r"\(\d+ earlier rows\)", lines[2])
    cut = int(lines[2][1:].split()[0])
    rows = [line for line in lines[3:] if "whole " in line]
    assert rows and [int(row.split()[0]) for row in rows] == [*range(cut, 40)]
    assert any("more: see ajaxckpt ls" in line for line in lines)


# --- whole processes


def environment():
    """Return an environment in which stdout is buffered, as a shell's pipe is."""
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    variables.pop("PYTHONUNBUFFERED", None)
    return variables


def test_ctrl_c_ends_watch_with_status_0_and_each_refresh_is_flushed():
    write(1)
    command = [sys.executable, "-m", "ajaxckpt", "watch", "r", "--interval", "1000"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
    ) as process:
        bound = threading.Timer(60, process.kill)
        bound.start()
        lines = [process.stdout.readline() for _ in range(4)]
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
        bound.cancel()
    assert b"1 checkpoint: 1 whole" in lines[3]
    assert (process.returncode, out, err) == (0, b"", b"")


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="no pseudo-terminals")
def test_only_a_terminal_is_cleared():
    write(1)
    command = [sys.executable, "-m", "ajaxckpt", "watch", "r", *QUICKLY, "2"]
    ours, theirs = os.openpty()
    with open(ours, "rb", buffering=0) as terminal:
        done = subprocess.run(command, stdout=theirs, env=environment(), timeout=60)
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # Linux's end of a pseudo-terminal
            while piece := terminal.read(65536):
                shown += piece
    assert done.returncode == 0 and shown.count(b"\x1b[H\x1b[2J") == 2
    piped = subprocess.run(command, capture_output=True, env=environment(), timeout=60)
    assert piped.returncode == 0 and b"\x1b" not in piped.stdout


BLOCKED = f"""
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {HEAVY}:
            raise AssertionError(name + " was imported")

sys.meta_path.insert(0, Block())
from ajaxckpt._cli import main
if sys.argv[1:] == ["help"]:
    try:
        main(["prune", "--keep", "best=x:max", "--help"])
    finally:
        assert "numpy" not in sys.modules
codes = [main(arguments) for arguments in (
    ["ls", "r", "--best", "m:max"], ["ls", "r", "--json", "--quick"], ["ls", "no"],
    ["watch", "r", "--interval", "0.01", "--count", "2"],
    ["prune", "r", "--keep", "best=m:max", "--keep", "period=60", "--dry-run"],
    ["prune", "r", "--keep", "last=1", "--json"],
)]
print("codes", codes)
"""


def test_no_command_of_runs_needs_jax_and_help_not_even_numpy():
    for step in (1, 2):
        write(step, metrics={"m": 1.0})
    command = [sys.executable, "-c", BLOCKED]
    done = subprocess.run(command, capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "codes [0, 0, 1, 0, 0, 0]"
    assert steps_left() == [2]
    done = subprocess.run([*command, "help"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and "prune.kept[]" in done.stdout


# --- the JSON contract


def key_paths(value, path=""):
    """Yield the path of every key, spelled as in the help, and its type."""
    if path and path in OPAQUE:
        yield path, "object" if isinstance(value, dict) else type(value).__name__
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from key_paths(item, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for item in value:
            yield from key_paths(item, f"{path}[]")
    else:
        yield path, "null" if value is None else type(value).__name__


OPAQUE = {"run.checkpoints[].metrics"}


@pytest.mark.parametrize("command", ["ls", "prune", "watch"])
def test_json_holds_the_keys_that_the_help_declares(call, command, monkeypatch):
    for step in (1, 2, 3):
        write(step, metrics={"m": 1.0})
    write(4, run="b", named="step-4.b.safetensors")
    Path("r/noname.safetensors").write_bytes(write(9).read_bytes()[:300])
    Path("r/step-9.safetensors").unlink()
    write(0, run=None, directory="none")
    Path("r/step-0.safetensors.abandoned").touch()
    options = {"ls": (), "watch": (*QUICKLY, "1"), "prune": LAST_TWO}[command]
    files = RunFiles(os.path.abspath("r"), "b")
    lock = RunLock(files, "b")
    lock.take()
    seen = {}
    runs = [("r",), ("no",), ("none",), ("r", "--run-id", "a")]
    for where in runs:
        if where == runs[-1] and command == "prune":
            monkeypatch.setattr(_directories, "try_lock", lambda fd: None)
        out = call(command, *where, *options, "--json")[1]
        document = json.loads(out)
        assert out.isascii()
        assert document["ajaxckpt"] == {"command": command, "schema": 1}
        for path, kind in key_paths(document):
            seen.setdefault(path, set()).add(kind)
    lock.release()
    help_text = call(command, "--help")[1].split("--json, schema 1")[1]
    rows = [r.split(maxsplit=1) for r in help_text.splitlines() if r.startswith("  ")]
    contract = {path: {*kinds.split(" | ")} for path, kinds in rows}
    assert seen.keys() == contract.keys()
    for path, kinds in seen.items():
        assert kinds <= contract[path], path


def test_a_newer_format_is_called_so_by_the_library_too():
    set_newer(write(1))
    with pytest.raises(NewerFormatError):
        _opening.verify_checkpoint("r/step-1.safetensors")
