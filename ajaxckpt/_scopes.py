"""Where a verb acts: a node of the draft, and the names below it.

Knows drafts and names; knows no verb.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ajaxckpt._drafts import Draft, DraftLeaf, Read
from ajaxckpt._errors import MigrationError
from ajaxckpt._layout import Layout, LeafSpec, shown_name
from ajaxckpt._names import join_names, relative_name
from ajaxckpt._patterns import near_names, parse_pattern
from ajaxckpt._templates import Match, Template


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What a rule may look at, read-only.

    Attributes:
        file: the file's leaf specs by name, as migrated so far; None for one that
            is to be what the skeleton has there.
        skeleton: the skeleton's leaf specs by name; None where there is no skeleton.
        config: the config recorded at save, as plain data; empty if none was.
        step: the training step recorded at save.
        metrics: the metrics recorded at save.
    """

    file: Mapping[str, LeafSpec | None]
    skeleton: Layout | None
    config: Mapping[str, Any]
    step: int | None
    metrics: Mapping[str, Any]

    def has(self, pattern: str) -> bool:
        """Tell whether the file, as migrated so far, has a leaf that this selects."""
        parsed = parse_pattern(pattern)
        return any(map(parsed.matches, self.file))


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is known of a file and a skeleton beside the draft.

    Attributes:
        skeleton: the skeleton's layout, named as in the whole state; None without.
        partial: whether the skeleton is a part of the state only.
        config: the config recorded at save.
        step: the step recorded at save.
        metrics: the metrics recorded at save.
        excluded: the patterns of what was left out at save.
        digest: gives a stored leaf's digest, from the header.
        read: reads stored leaves.
    """

    skeleton: Layout | None
    partial: bool
    config: Mapping[str, Any]
    step: int | None
    metrics: Mapping[str, Any]
    excluded: tuple[str, ...]
    digest: Callable[[str], str]
    read: Read

    def view(self, draft: Draft) -> View:
        """Show the draft to a user's function."""
        specs = {name: leaf.spec for name, leaf in draft.leaves.items()}
        skeleton = self.skeleton
        return View(
            file=MappingProxyType(specs),
            skeleton=None if skeleton is None else MappingProxyType(dict(skeleton)),
            config=MappingProxyType(dict(self.config)),
            step=self.step,
            metrics=MappingProxyType(dict(self.metrics)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """A node of the draft: names there are relative to it.

    Attributes:
        draft: the draft, changed in place.
        node: the node's name.
        rule: the rule that acts, for records and messages.
        facts: what else is known.
        numbered: whether the rule is a step, which others may follow.
    """

    draft: Draft
    node: str
    rule: str
    facts: Facts
    numbered: bool = False

    def names(self) -> list[str]:
        """List the draft's leaves below the node."""
        found = (relative_name(name, self.node) for name in self.draft.leaves)
        return [name for name in found if name is not None]

    def wanted(self) -> list[str]:
        """List the skeleton's leaves below the node that the draft lacks."""
        names = self.facts.skeleton or {}
        missing = (name for name in names if name not in self.draft.leaves)
        found = (relative_name(name, self.node) for name in missing)
        return [name for name in found if name is not None]

    def unwanted(self, name: str) -> bool:
        """Tell whether the skeleton has no such leaf; False without a skeleton."""
        skeleton = self.facts.skeleton
        return skeleton is not None and self.full(name) not in skeleton

    def full(self, name: str) -> str:
        """Return the name in the whole state."""
        return join_names(self.node, name)

    def get(self, name: str) -> DraftLeaf:
        """Return a leaf of the draft.

        Raises:
            MigrationError: there is none.
        """
        full = self.full(name)
        if (leaf := self.draft.leaves.get(full)) is None:
            near = near_names(full, self.draft.leaves)
            hint = f"use {' or '.join(near)}" if near else "look at ajaxckpt inspect"
            problem = f"the file has no leaf {shown_name(full)}"
            raise self.error(problem, hint)
        return leaf

    def replace(self, old: Mapping[str, object], new: Mapping[str, DraftLeaf]) -> None:
        """Take leaves out of the draft and put others in, in the first's place.

        Raises:
            MigrationError: a new leaf's name is taken.
        """
        gone = {self.full(name) for name in old}
        fresh = {self.full(name): leaf for name, leaf in new.items()}
        taken = [n for n in fresh if n in self.draft.leaves and n not in gone]
        if taken:
            name = shown_name(taken[0])
            problem = f"two sources for {name}: the file has a leaf of this name"
            raise self.error(problem, f"drop it before: .drop({taken[0]!r})")
        leaves: dict[str, DraftLeaf] = {}
        for name, leaf in self.draft.leaves.items():
            if name not in gone:
                leaves[name] = leaf
            elif fresh:
                leaves.update(fresh)
                fresh = {}
        self.draft.leaves = {**leaves, **fresh}

    def fill(self, target: Template, match: Match, index: int | None = None) -> str:
        """Return the name that a template makes of a match.

        Raises:
            MigrationError: it is none.
        """
        try:
            return target.fill(match.captures, match.rest, index)
        except MigrationError as error:
            raise self.error(error.problem, error.hint) from error

    def error(self, problem: str, hint: str = "") -> MigrationError:
        """Return an error that names the rule."""
        return MigrationError(f"{self.rule}: {problem}", hint=hint)
