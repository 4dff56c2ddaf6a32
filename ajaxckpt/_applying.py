"""Where migrations are applied: a file's draft, brought to today's layout.

Knows registries and drafts; reads nothing but what a rule's check asks for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ajaxckpt._drafts import Draft
from ajaxckpt._entries import Entry, Verb, show_until
from ajaxckpt._errors import MigrationError
from ajaxckpt._migrations import Migrations
from ajaxckpt._names import join_names
from ajaxckpt._patterns import near_names, parse_pattern
from ajaxckpt._scopes import Facts, Scope
from ajaxckpt._templates import Source
from ajaxckpt._verbs import ask_user


def apply_migrations(
    draft: Draft,
    registries: Sequence[Migrations],
    versions: Mapping[str, int],
    facts: Facts,
) -> None:
    """Bring a draft to today's layout, in place.

    Args:
        draft: the file's layout.
        registries: applied one after the other.
        versions: the layout version per registry that the file records.
        facts: what rules may look at.

    Raises:
        MigrationError: a rule cannot be applied; the draft is then of no use.
    """
    for registry in registries:
        version = versions.get(registry.name, 0)
        if version > registry.version:
            raise MigrationError(
                f"the file has layout version {version} of {registry.name!r}, "
                f"this code knows up to {registry.version}",
                hint="restore it with the newer code that saved it",
            )
        for entry in registry.entries:
            if entry.number:
                if entry.number > version:
                    _apply_entry(draft, registry, entry, facts)
            elif _is_due(draft, entry, facts):
                _apply_entry(draft, registry, entry, facts)


def _is_due(draft: Draft, entry: Entry, facts: Facts) -> bool:
    """Tell whether a structural rule applies to a draft."""
    if entry.when is not None:
        return ask_user(_root(draft, entry, facts), entry.when)
    verbs = [verb for verb in entry.verbs if not verb.guard]
    if not verbs:  # what only refuses looks for itself
        return True
    return _act(draft.copy(), entry, verbs[0], facts, strict=False)


def _root(draft: Draft, entry: Entry, facts: Facts, node: str = "") -> Scope:
    numbered = entry.number > 0
    title = entry.title
    return Scope(draft=draft, node=node, rule=title, facts=facts, numbered=numbered)


def _apply_entry(
    draft: Draft, registry: Migrations, entry: Entry, facts: Facts
) -> None:
    changes = any(not verb.guard for verb in entry.verbs)
    if entry.until is not None and changes and registry.has_expired(entry):
        raise MigrationError(
            f"{entry.title} ended with {show_until(entry.until)}; the file needs it",
            hint="restore and save it once with code from before, or lengthen until=",
        )
    for verb in entry.verbs:
        left_out = _was_left_out(verb, facts.excluded)
        found = _act(draft, entry, verb, facts, strict=not left_out)
        excused = left_out or verb.guard or (verb.asks_skeleton and facts.partial)
        if not found and not excused:
            raise _nothing_found(draft, registry, entry, verb, facts)


def _was_left_out(verb: Verb, excluded: Sequence[str]) -> bool:
    """Tell whether what a verb looks for may have been left out on purpose.

    A pattern of any depth may lie anywhere. What is missing all the same is a
    mismatch, as ever.
    """
    scopes = [source.text for source in verb.scopes] or [""]
    names = [join_names(scope, text) for scope in scopes for text in verb.sources]
    return any(
        name.startswith("**")
        or parse_pattern(pattern).matches(name)
        or parse_pattern(name).matches(pattern)
        for pattern in excluded
        for name in names
    )


def _nothing_found(
    draft: Draft, registry: Migrations, entry: Entry, verb: Verb, facts: Facts
) -> MigrationError:
    near = near_names(verb.sources[0], draft.leaves) if verb.sources else []
    hint = f"near names: {', '.join(near)}" if near else "look at ajaxckpt inspect"
    if verb.asks_skeleton and facts.skeleton is None:
        hint = "pass skeleton= (--skeleton): what it finds is the skeleton's to say"
    elif entry.number:
        hint += (
            f"; a file saved by today's code must record its version: save_checkpoint("
            f"…, migrations={registry.name})"
        )
    return MigrationError(f"{entry.title}: {verb.text}: finds nothing", hint=hint)


def _act(draft: Draft, entry: Entry, verb: Verb, facts: Facts, *, strict: bool) -> bool:
    """Let a verb act on each of its scopes; tell whether it found what it must."""
    if not verb.scopes:
        return verb.act(_root(draft, entry, facts))
    found: list[bool] = []
    for source in verb.scopes:
        nodes = list(_nodes(draft, source, facts))
        if not nodes and strict and not verb.guard and not facts.partial:
            root = _root(draft, entry, facts)
            raise root.error(f"{verb.text}: no node is named {source.text or repr('')}")
        scopes = [_root(draft, entry, facts, node) for node in nodes]
        found.append(any([verb.act(scope) for scope in scopes]))
    return found[0]


def _nodes(draft: Draft, source: Source, facts: Facts) -> Iterator[str]:
    """Yield the nodes that a pattern names, in the file or in the skeleton."""
    names = dict.fromkeys((*draft.leaves, *(facts.skeleton or ())))
    matches = (source.match(name) for name in names)
    yield from dict.fromkeys(match.node for match in matches if match is not None)
