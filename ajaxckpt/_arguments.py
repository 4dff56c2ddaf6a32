"""The arguments of the command line, and its help.

Knows argparse; knows nothing of checkpoints, so that ``--help`` is instant.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import re
from typing import Any, cast

from ajaxckpt import __version__
from ajaxckpt._document import CONTRACT, SCHEMA

_OVERVIEW = """\
Look at checkpoints without jax, without a device, and without changing a file.
plan and migrate load your code, and what it needs. prune removes files.

exit status:
  0  sound, or equal
  1  a finding: damaged, missing, no checkpoint, different, would not restore
  2  usage: wrong arguments, or a pattern that selects nothing
With several paths, a bad one does not stop the others.
"""
_INSPECT = """\
Show what a checkpoint holds: its facts, and its leaves as a tree.

Reads the header alone. Damage to the leaves does not show: see verify.
"""
_VERIFY = """\
Read every byte and compare it with the digests in the file.

One line per file on standard output; what is damaged, by name, on standard
error. Of a directory, every *.safetensors file right in it is read. Files there
that ajaxckpt did not write are listed as "not a checkpoint", which is a finding
only for a file named on the command line. A directory without any checkpoint is
a finding.
"""
_DIFF = """\
Compare two checkpoints: leaf names and specs, and with --values every value.

Leaves that only one has, and leaves whose dtype, shape or kind differs, are
findings; with --values, so is every leaf that differs in any bit. Where an array
lived (jax or numpy) is no difference. Another step, config, layout version or
list of leaves left out is noted, and is no finding. Values are read only where
the digests in the headers differ.
"""
_DIGEST = """\
Print the digest of the state in each file, as ajaxckpt.state_digest gives it.

Equal states have equal digests, whatever path, time, step or version. Reads the
header alone. Damage to the leaves does not show: see verify.
"""
_PLAN = """\
Show what restoring a checkpoint into your skeleton would do, leaf by leaf.

Imports your module from the current directory or from what is installed; nothing
is restored. A checkpoint that would not restore is a finding, and where leaves
look moved, the migration that may mend it is shown, ready to paste.
"""
_MIGRATE = """\
Write an upgraded copy of a checkpoint, and verify it; the old file is not touched.

Rules that ask for the skeleton's dtypes, shapes or values need --skeleton; with
it, nothing is written unless the copy fits. Nothing may be at NEW.
"""
_LS = """\
Show the checkpoints of a run's directory: a row each, by step.

Reads every byte, as verify does: what is not whole is a finding, told on standard
error; newest and best are chosen among the whole. With --quick only headers are
read. A directory without checkpoints is no finding; a missing one is, and so is a
run that was asked for and is not there.
"""
_PRUNE = """\
Remove the checkpoints of a run that no policy keeps, and say why the others stay.

Kept is what any --keep keeps, and always the newest that is whole, what is pinned
or damaged, and every file that is not the run's own under the name it gave it.
While a live process writes the run, nothing is removed, which is a finding.
"""
_WATCH = """\
Show what ls shows, again and again while a run goes on, until Ctrl-C.

Whatever is found, the exit status is 0 unless the path is no directory; one that is
missing is waited for. A file is read once, and again only when it has changed.
With --json, one document per refresh, each on a line of its own.
"""
_KEEP_FORMS = "last=N, best=METRIC:min|max[:N], every=STEPS or period=SECONDS"
_SKELETON_HELP = "a function without arguments that builds the skeleton"
_MIGRATIONS_HELP = "a Migrations registry; may be given several times"
_SELECT_HELP = (
    "only the leaves of this name or pattern and all below them, such as "
    "'opt_state' or '**.kernel'; may be given several times"
)
_HEADING = """\
--json, schema {schema}: one document for all paths. Of each key: where it stands,
and its types. NaN and infinities are "NaN", "Infinity" and "-Infinity".
"""
_RANKING = re.compile(r"(.+):(min|max)(?::([0-9]{1,9}))?", re.DOTALL)
_LONGEST_SECONDS = 1e6  # a sleep that every system takes


def build_parser() -> argparse.ArgumentParser:
    """Return the parser; ``command`` holds the name of the command."""
    parser = argparse.ArgumentParser(
        prog="ajaxckpt",
        description=_OVERVIEW,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    inspect = _add_command(commands, "inspect", _INSPECT)
    _add_paths(inspect, "a checkpoint")
    _add_select(inspect)
    depth = "show N levels of names; what lies deeper is summed up"
    inspect.add_argument("--depth", metavar="N", type=_depth, default=64, help=depth)
    _add_paths(_add_command(commands, "verify", _VERIFY), "a checkpoint or directory")
    diff = _add_command(commands, "diff", _DIFF)
    diff.add_argument("a", metavar="A", help="a checkpoint")
    diff.add_argument("b", metavar="B", help="another checkpoint")
    diff.add_argument("--values", action="store_true", help="compare values too")
    _add_select(diff)
    _add_paths(_add_command(commands, "digest", _DIGEST), "a checkpoint")
    _add_plan(_add_command(commands, "plan", _PLAN))
    migrate = _add_command(commands, "migrate", _MIGRATE)
    migrate.add_argument("old", metavar="OLD", help="a checkpoint")
    migrate.add_argument("new", metavar="NEW", help="the copy's path")
    _add_named(
        migrate, "--migrations", _MIGRATIONS_HELP, action="append", required=True
    )
    _add_named(migrate, "--skeleton", _SKELETON_HELP)
    _add_listing(_add_command(commands, "ls", _LS))
    prune = _add_command(commands, "prune", _PRUNE)
    _add_run(prune)
    text = f"what to keep: {_KEEP_FORMS}; may be given several times"
    prune.add_argument(
        "--keep",
        metavar="POLICY",
        type=_keep,
        action="append",
        required=True,
        help=text,
    )
    prune.add_argument("--dry-run", action="store_true", help="remove nothing")
    watch = _add_command(commands, "watch", _WATCH)
    _add_listing(watch)
    text = "between two refreshes, 2 by default"
    watch.add_argument(
        "--interval", metavar="SECONDS", type=_seconds, default=2.0, help=text
    )
    watch.add_argument(
        "--count", metavar="N", type=_count, help="end after N refreshes"
    )
    return parser


def _add_run(command: argparse.ArgumentParser) -> None:
    command.add_argument("run", metavar="RUN", help="a run's directory")
    text = "which of the runs in the directory"
    command.add_argument("--run-id", metavar="ID", help=text)


def _add_listing(command: argparse.ArgumentParser) -> None:
    _add_run(command)
    text = "mark the best by this metric, and show it first"
    command.add_argument("--best", metavar="METRIC:min|max", type=_best, help=text)
    text = "read headers only; damage to the leaves does not show"
    command.add_argument("--quick", action="store_true", help=text)


def _add_plan(plan: argparse.ArgumentParser) -> None:
    plan.add_argument("path", metavar="PATH", help="a checkpoint")
    _add_named(plan, "--skeleton", _SKELETON_HELP, required=True)
    _add_named(plan, "--migrations", _MIGRATIONS_HELP, action="append", default=[])
    _add_named(plan, "--config", "the config of now, to compare with the file's")
    plan.add_argument("--subtree", default="", metavar="NAME", help="as restore_into's")
    for name in ("--keep", "--ignore", "--resize"):
        text = "as restore_into's; may be given several times"
        plan.add_argument(
            name, metavar="PATTERN", action="append", default=[], help=text
        )
    plan.add_argument("--all", action="store_true", help="a row for every leaf")


def _add_named(
    command: argparse.ArgumentParser, name: str, text: str, **options: Any
) -> None:
    command.add_argument(name, metavar="MODULE:NAME", help=text, **options)


def _add_command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],  # pyright: ignore[reportPrivateUsage]
    name: str,
    description: str,
) -> argparse.ArgumentParser:
    contract = CONTRACT[name].replace("\n", "\n  ").rstrip()
    command = commands.add_parser(
        name,
        help=description.partition("\n")[0].rstrip("."),
        description=description,
        epilog=_HEADING.format(schema=SCHEMA) + contract,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.add_argument("--json", action="store_true", help="print JSON, see below")
    return command


def _add_paths(command: argparse.ArgumentParser, what: str) -> None:
    command.add_argument("paths", metavar="PATH", nargs="+", help=what)


def _add_select(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--select", metavar="PATTERN", action="append", default=[], help=_SELECT_HELP
    )


def _depth(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of levels")
    return int(text)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of refreshes")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < _LONGEST_SECONDS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return seconds


def _best(text: str) -> tuple[str, str]:
    match = _RANKING.fullmatch(text)
    if match is None or match[3]:
        raise argparse.ArgumentTypeError(f"{text!r} is not METRIC:min or METRIC:max")
    return match[1], match[2]


def _keep(text: str) -> tuple[str, Any]:
    """Return a policy, and how it was asked for."""
    kind, _, value = text.partition("=")
    with contextlib.suppress(ValueError):  # InvalidArgumentError is one
        if (policy := _read_policy(kind, value)) is not None:
            return text, policy
    raise argparse.ArgumentTypeError(f"{text!r} is none of {_KEEP_FORMS}")


def _read_policy(kind: str, value: str) -> Any:
    from ajaxckpt import _retention as policies

    if kind == "best" and (match := _RANKING.fullmatch(value)):
        count = int(match[3]) if match[3] else 1
        return policies.KeepBest(match[1], cast("policies.Mode", match[2]), count)
    if kind == "period":
        return policies.KeepPerPeriod(float(value))
    if kind == "last" and value.isdecimal():
        return policies.KeepLast(int(value))
    if kind == "every" and value.isdecimal():
        return policies.KeepEvery(int(value))
    return None
