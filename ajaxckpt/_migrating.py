"""A file's layout brought to today's: registries joined with an open checkpoint.

Knows open checkpoints and drafts; knows nothing of pytrees.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ajaxckpt._applying import apply_migrations
from ajaxckpt._drafts import Draft, DraftLeaf, draft_layout, resolve_spec
from ajaxckpt._layout import Layout, LeafSpec
from ajaxckpt._migrations import Migrations
from ajaxckpt._names import join_names, relative_name
from ajaxckpt._reader import Checkpoint
from ajaxckpt._scopes import Facts


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a migrated leaf comes from.

    Attributes:
        sources: the file's leaves that its value is made of; none for a constant.
        rule: the last rule that touched it.
    """

    sources: tuple[str, ...]
    rule: str


def migrate_layout(
    checkpoint: Checkpoint,
    skeleton: Layout | None,
    subtree: str,
    registries: tuple[Migrations, ...],
) -> Draft:
    """Apply registries to a checkpoint's layout.

    Args:
        checkpoint: the open file.
        skeleton: the skeleton's layout below the subtree; None where there is none.
        subtree: the name that the skeleton's root stands for.
        registries: applied one after the other.

    Raises:
        MigrationError: a rule cannot be applied.
    """
    draft = draft_layout(checkpoint.layout)
    if not registries:
        return draft
    named = skeleton and {join_names(subtree, n): spec for n, spec in skeleton.items()}
    facts = Facts(
        skeleton=named if skeleton is not None else None,
        partial=bool(subtree),
        config=checkpoint.config or {},
        step=checkpoint.step,
        metrics=checkpoint.metrics,
        excluded=checkpoint.excluded,
        digest=checkpoint.leaf_digest,
        read=checkpoint.read,
    )
    apply_migrations(draft, registries, checkpoint.layouts, facts)
    draft.leaves = dict(_expand_nodes(draft, named or {}))
    return draft


def _expand_nodes(draft: Draft, skeleton: Layout) -> Iterator[tuple[str, DraftLeaf]]:
    """Yield leaves, and for a node that was added under an older name its leaves."""
    for name, leaf in draft.leaves.items():
        added = leaf.form in ("skeleton", "constant") and name not in skeleton
        below = [n for n in skeleton if added and relative_name(n, name) is not None]
        free = [n for n in below if n not in draft.leaves]
        yield from ((n, leaf) for n in free or (name,))


def select_adopted(draft: Draft, subtree: str) -> dict[str, LeafSpec]:
    """Return the adopted leaves below a subtree, by relative name."""
    found = {
        relative_name(full, subtree): leaf.spec
        for full, leaf in draft.leaves.items()
        if leaf.adopted
    }
    return {n: spec for n, spec in found.items() if n is not None and spec is not None}


def select_kept(draft: Draft, subtree: str) -> dict[str, str]:
    """Return the leaves that a rule takes from the skeleton, and which rule."""
    found = {
        relative_name(name, subtree): leaf.rule
        for name, leaf in draft.leaves.items()
        if leaf.form == "skeleton"
    }
    return {name: rule for name, rule in found.items() if name is not None}


def resolve_layout(draft: Draft, skeleton: Layout, subtree: str) -> dict[str, LeafSpec]:
    """Return what the migrated file holds below a subtree, by relative name.

    Raises:
        MigrationError: a rule makes a leaf that the skeleton lacks.
    """
    layout: dict[str, LeafSpec] = {}
    for full, leaf in draft.leaves.items():
        name = relative_name(full, subtree)
        if name is None:
            continue
        if leaf.form != "skeleton" or name not in skeleton:
            layout[name] = resolve_spec(name, leaf, skeleton)
    return layout


def list_origins(draft: Draft, subtree: str) -> Mapping[str, Origin]:
    """Return where each leaf that a rule touched comes from, by relative name."""
    origins: dict[str, Origin] = {}
    for full, leaf in draft.leaves.items():
        name = relative_name(full, subtree)
        rule = leaf.adopted or leaf.rule
        if name is not None and rule and leaf.form != "skeleton":
            origins[name] = Origin(sources=leaf.sources, rule=rule)
    return origins
