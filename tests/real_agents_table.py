"""Make the table of agents, and of how exactly each goes on: ajaxckpt/AGENT_TABLE.md.

    python tests/real_agents_table.py [--only WORD …]
    python tests/real_agents_table.py --check AGENT …

Run it where the agents' packages are installed; ajax-rl's need Python 3.12. Each agent
is measured in a process of its own, and goes on in a new one after a restore. Rows of
agents that cannot be imported here are kept as they are, so that the table can be made
in several environments one after the other. Exits with the number of agents that are
not as the page says agents are. ``--check`` writes nothing and is quicker: all agents
in one process, and no new one.
"""

import argparse
import importlib.util
import itertools
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import example_agents
import numpy as np
from compile_events import count_compiles
from other_agents import AGENTS, OtherAgent, is_installed

from ajaxckpt import open_checkpoint, restore_into, save_checkpoint, state_digest
from ajaxckpt.testing import assert_resume_equivalent, find_insensitive_leaves

PAGE = Path(__file__).parent.parent / "ajaxckpt" / "AGENT_TABLE.md"
HEAD = """# Agents, and how exactly they go on

Made by `python tests/real_agents_table.py`, never by hand. Every agent trains two seeds
(brax: one) on a CPU with its smallest networks, is cut at the places named, saved
there, restored into a newly built skeleton and trained on.

*checkpoint = memory* compares with the same cut without a file: all leaves, bit for
bit, weak types included, and no program more is compiled. *new process* is the same
where a new process restores at a cut. *whole = split* compares with one unbroken call
and involves no checkpoint: it is the agent's own property. Seconds are of processor
time; nearly all of them go into compiling.

## The agents of the examples

One program takes the number of steps as an operand, so the whole run is the split one
bit for bit, too, and so are its logs. *noticed* are groups of leaves that were reset at
the third cut, each by itself, and changed how the run ended.

"""
OTHERS = """
## Agents that others wrote

*whole = split* is `bitwise`, or the largest difference of any leaf of floats, relative
to the largest value of that leaf, where the longer call is another compiled program
that rounds otherwise. Integers, keys and counters are always the same. Programs are
compiled with `--xla_backend_optimization_level=0`, but those of an agent that is called
optimised, which are compiled as by default.

"""
COLUMNS = {
    "example": "example | leaves | cut at | checkpoint = memory | new process | "
    "whole = split | noticed | s | versions",
    "other": "agent | leaves | cut at | checkpoint = memory | new process | "
    "whole = split | s | versions",
}
NOT_MEASURED = "not measured"
QUICK = "--xla_backend_optimization_level=0"
YES = {True: "bitwise", False: "**differs**", None: "not run"}


# ------------------------------------------------------- agents that others wrote


@dataclass(frozen=True, kw_only=True)
class Row:
    """What was measured of one agent.

    Attributes:
        in_process: whether going on from a restored state is going on from memory.
        compiles: whether it compiles no more than from memory.
        new_process: as in_process, where the restore is in a new process.
        whole: how far apart one unbroken call is, 0 where it is not at all.
    """

    agent: str
    leaves: int
    cuts: str
    in_process: bool
    compiles: bool
    new_process: bool | None
    whole: float
    seconds: int
    versions: str

    @property
    def holds(self) -> bool:
        """Whether the agent is as the page says."""
        allowed = AGENTS[self.agent].rounding
        exact = self.in_process and self.compiles and self.new_process is not False
        return exact and self.whole <= allowed

    def __str__(self) -> str:
        in_process = YES[self.in_process]
        if not self.compiles:
            in_process += ", **compiles more**"
        return render_row(
            *(self.agent, self.leaves, self.cuts, in_process, YES[self.new_process]),
            f"{self.whole:.0e}" if self.whole else "bitwise",
            *(self.seconds, self.versions),
        )


def render_row(*cells: object) -> str:
    """Render one row of a table."""
    return f"| {' | '.join(map(str, cells))} |"


def relative_difference(a: Any, b: Any) -> float:
    """Return how far apart two states are, relative to each leaf's largest value."""
    import jax

    worst = 0.0
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        if x.shape != y.shape or x.dtype != y.dtype:
            return float("inf")
        if x.tobytes() == y.tobytes():
            continue
        if not np.issubdtype(x.dtype, np.inexact):
            return float("inf")  # a counter, key or cursor: never a matter of rounding
        if not np.array_equal(np.isnan(x), np.isnan(y)):
            return float("inf")
        worst = max(worst, float(np.nanmax(abs(x - y)) / (np.nanmax(abs(x)) or 1)))
    return worst


def copied(state: Any) -> Any:
    """Copy a state, which training may donate."""
    import jax

    def copy(leaf: Any) -> Any:
        return leaf.copy() if isinstance(leaf, jax.Array) else leaf

    return jax.tree.map(copy, state)


def counting(advance: Callable[[Any, int], Any], state: Any, n: int) -> tuple[Any, int]:
    """Advance, and return how many programs that compiled too."""
    import jax

    with count_compiles() as count:
        state = jax.block_until_ready(advance(state, n))
    return state, count.compiles


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One run in parts, handed over in memory, and again through checkpoints.

    Attributes:
        end: the state in memory at the end.
        digest: its digest.
        through: the digest of the other.
        compiles: of the parts after a cut, in memory and after a restore.
        path: the checkpoint at the last cut.
    """

    end: Any
    digest: str
    through: str
    compiles: tuple[int, int]
    path: Path


def run_pair(
    agent: OtherAgent, skeleton: Any, cuts: tuple[int, ...], folder: Path
) -> Pair:
    """Run in parts twice; the part before the first cut is the same of both."""
    build, advance = agent.make()
    state = advance(copied(skeleton), cuts[0])
    path = folder / f"{'-'.join(map(str, cuts))}.safetensors"
    save_checkpoint(state, path)
    new, compiled = build(), [0, 0]  # a restore leaves the skeleton as it is
    other = restore_into(new, path, resize=agent.resize)
    for begin, end in itertools.pairwise((*cuts, agent.total)):
        if begin != cuts[0]:
            save_checkpoint(other, path)
            other = restore_into(new, path, resize=agent.resize)
        state, count = counting(advance, state, end - begin)
        compiled[0] += count
        other, count = counting(advance, other, end - begin)
        compiled[1] += count
    return Pair(
        end=state,
        digest=state_digest(state),
        through=state_digest(other),
        compiles=(compiled[0], compiled[1]),
        path=path,
    )


def go_on(name: str, path: Path) -> str:
    """Restore at the last of the first cuts, train on, and return the digest."""
    agent = AGENTS[name]
    build, advance = agent.make()
    state = restore_into(build(), path, resize=agent.resize)
    return state_digest(advance(state, agent.total - agent.splits[0][-1]))


def measure(name: str, folder: Path, *, new_process: bool = True) -> Row:
    """Compare the three runs of an agent that others wrote."""
    agent, began = AGENTS[name], processor_seconds()
    build, advance = agent.make()
    skeleton = build()
    whole = advance(copied(skeleton), agent.total)
    pairs = [run_pair(agent, skeleton, cuts, folder) for cuts in agent.splits]
    again = None
    if new_process:
        done = run_again("--go-on", name, str(pairs[0].path))
        again = done.returncode == 0 and done.stdout.split()[-1] == pairs[0].digest
    with open_checkpoint(pairs[0].path) as checkpoint:
        leaves = len(checkpoint)
    return Row(
        agent=name,
        leaves=leaves,
        cuts=describe_cuts(agent.splits, agent.total),
        in_process=all(pair.through == pair.digest for pair in pairs),
        compiles=all(pair.compiles[1] <= pair.compiles[0] for pair in pairs),
        new_process=again,
        whole=max(relative_difference(whole, pair.end) for pair in pairs),
        seconds=round(processor_seconds() - began),
        versions=describe_versions(agent.family, "jax", "flax", "optax"),
    )


def processor_seconds() -> float:
    """Return the processor time of this process so far, and of its children."""
    return sum(os.times()[:4])


def describe_cuts(splits: Sequence[int | Sequence[int]], total: int) -> str:
    """Name the places where runs are cut.

    Example:
        >>> describe_cuts([3, (2, 5)], 8)
        '3; 2 and 5 of 8'
    """
    runs = ((cut,) if isinstance(cut, int) else cut for cut in splits)
    return "; ".join(" and ".join(map(str, run)) for run in runs) + f" of {total}"


def describe_versions(*names: str) -> str:
    """Name the versions of what is installed."""
    found: list[str] = []
    for name in names:
        with suppress(metadata.PackageNotFoundError):
            found.append(f"{name} {metadata.version(name)}")
    return ", ".join([*found, f"Python {sys.version.split()[0]}"])


# -------------------------------------------------------- agents of the examples


def measure_example(name: str) -> str:
    """Compare the runs of an example's agent, and return its row.

    Raises:
        AssertionError: two runs differ, or a group of leaves is not missed.
    """
    import jax

    agent, began = example_agents.AGENTS[name], processor_seconds()
    make_skeleton, advance = example_agents.PUBLISHED[name]
    case, total = agent.case, agent.total
    assert_resume_equivalent(
        make_skeleton, advance, total=total, split=list(case.split)
    )
    assert_resume_equivalent(
        make_skeleton,
        advance,
        total=total,
        split=case.split[1],
        fresh_process=True,
        compare_whole=False,
    )
    found = find_insensitive_leaves(
        make_skeleton, advance, total=total, split=case.split[2], groups=case.groups
    )
    assert len(found.noticed) == len(case.groups), str(found)
    return render_row(
        *(name, len(jax.tree.leaves(make_skeleton()))),
        *(describe_cuts(case.split, total), *["bitwise"] * 3),
        f"{len(found.noticed)} of {len(case.groups)}: {', '.join(found.noticed)}",
        round(processor_seconds() - began),
        describe_versions("jax", "flax", "optax", "gymnax", "flashbax"),
    )


def examples_are_importable() -> bool:
    """Tell whether what the examples need is installed here."""
    needs = ("flax", "optax", "gymnax", "flashbax")
    return all(importlib.util.find_spec(name) for name in needs)


# ---------------------------------------------------------------------- the page


def read_rows() -> dict[str, list[str]]:
    """Return the cells of the page's rows, by agent."""
    lines = PAGE.read_text().splitlines() if PAGE.exists() else []
    rows = [line for line in lines if line.startswith("| ")]
    found = ([x.strip() for x in row.strip("|").split("|")] for row in rows)
    return {cells[0]: cells for cells in found if cells[0] not in ("agent", "example")}


def write_rows(rows: dict[str, list[str]]) -> None:
    """Write the page, its rows in the order of the agents, those not measured too."""
    tables = {"example": list(example_agents.AGENTS), "other": list(AGENTS)}
    text = ""
    for (table, names), head in zip(tables.items(), (HEAD, OTHERS), strict=True):
        columns = COLUMNS[table].split(" | ")
        blank = [NOT_MEASURED] * (len(columns) - 1)
        text += head + render_row(*columns) + "\n" + "|---" * len(columns) + "|\n"
        for name in names:
            text += render_row(*rows.get(name, [name, *blank])) + "\n"
    apart = [f"- {name}: {agent.why}\n" for name, agent in AGENTS.items() if agent.why]
    PAGE.write_text(text + (EXPLAINED + "".join(apart) if apart else ""))


EXPLAINED = "\nThose that are further apart than 1e-5:\n\n"


def run_again(
    *arguments: str, cache: str | None = None, flags: str = "", capture: bool = True
) -> "subprocess.CompletedProcess[str]":
    """Run this command in a process of its own; what it compiles is kept in a cache."""
    command = (sys.executable, __file__, *arguments)
    environment = dict(os.environ)
    if cache is not None:
        environment |= {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": flags,
            "JAX_COMPILATION_CACHE_DIR": cache,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "AJAX_JAX_COMPILE_CACHE_DIR": cache,  # ajax-rl sets its own
        }
    return subprocess.run(command, capture_output=capture, text=True, env=environment)


def choose(words: Sequence[str]) -> list[str]:
    """Return the agents that can be measured here, and are named if any are."""
    names = list(example_agents.AGENTS) if examples_are_importable() else []
    names += [name for name, agent in AGENTS.items() if is_installed(agent)]
    exact = set(words) & set(names)
    return [
        name
        for name in names
        if not words
        or name in exact
        or any(re.search(word, name) for word in set(words) - exact)
    ]


def is_optimised(name: str) -> bool:
    """Tell whether an agent's programs are compiled as by default."""
    return name in AGENTS and AGENTS[name].optimised


def measure_all(names: Sequence[str]) -> int:
    """Measure agents one after the other, and write each row as it comes.

    Returns:
        How many are not as they should be.
    """
    failed = 0
    for name in names:
        with tempfile.TemporaryDirectory() as cache:
            flags = "" if is_optimised(name) else QUICK
            done = run_again("--measure", name, cache=cache, flags=flags)
        if done.returncode:
            failed += 1
            why = f"{name}: exit code {done.returncode}: {done.stderr[-1500:]}"
            print(why, file=sys.stderr, flush=True)
        if done.stdout:
            row = done.stdout.splitlines()[-1]
            write_rows({**read_rows(), name: row.strip("| ").split(" | ")})
            print(row, flush=True)
    return failed


def print_rows(names: Sequence[str], *, new_process: bool) -> int:
    """Measure agents in this process, and print a row for each.

    Returns:
        How many are not as they should be.
    """
    failed = 0
    for name in names:
        if name in example_agents.AGENTS:
            print(measure_example(name), flush=True)
            continue
        with tempfile.TemporaryDirectory() as folder:
            row = measure(name, Path(folder), new_process=new_process)
        failed += not row.holds
        print(row, flush=True)
    return failed


def main() -> int:
    """Measure the agents named, or all that can be imported here."""
    parser = argparse.ArgumentParser(description="Make ajaxckpt/AGENT_TABLE.md.")
    parser.add_argument("--only", nargs="+", default=[], help="names, or parts of them")
    parser.add_argument("--check", nargs="+", metavar="AGENT", help="write nothing")
    parser.add_argument("--measure", nargs="+", metavar="AGENT", help="print rows")
    parser.add_argument("--here", action="store_true", help="without a new process")
    parser.add_argument("--go-on", nargs=2, metavar=("AGENT", "PATH"))
    args = parser.parse_args()
    if args.go_on:
        print(go_on(args.go_on[0], Path(args.go_on[1])))
        return 0
    if args.measure:
        return print_rows(args.measure, new_process=not args.here)
    if args.check:
        with tempfile.TemporaryDirectory() as cache:
            command = ("--measure", *args.check, "--here")
            done = run_again(*command, cache=cache, flags=QUICK, capture=False)
            return done.returncode
    return measure_all(choose(args.only))


if __name__ == "__main__":
    sys.exit(main())
