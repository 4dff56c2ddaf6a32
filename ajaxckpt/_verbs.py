"""The verbs that say where leaves go: move, drop, add, adopt, refuse, check.

Each acts on one scope of a draft and tells whether it found something there; a verb
that finds nothing changes nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ajaxckpt._drafts import DraftLeaf, evaluate_leaf
from ajaxckpt._errors import MigrationError
from ajaxckpt._layout import shown_name
from ajaxckpt._names import relative_name
from ajaxckpt._scopes import Scope, View
from ajaxckpt._templates import Match, Source, Template


def move_leaves(scope: Scope, source: Source, target: Template, merge: bool) -> bool:
    """Give leaves other names; what lies below a moved node comes along."""
    found = source.find(scope.names())
    origins: dict[str, list[str]] = defaultdict(list)
    for name, match in found.items():
        origins[scope.fill(target, match)].append(name)
    moved: dict[str, DraftLeaf] = {}
    for new, names in origins.items():
        if len(names) > 1:
            _check_merge(scope, new, names, merge)
        moved[new] = replace(scope.get(names[0]), rule=scope.rule)
    scope.replace(found, moved)
    return bool(found)


def _check_merge(scope: Scope, new: str, names: Sequence[str], merge: bool) -> None:
    """Refuse several sources for one target, unless equality was asked for."""
    listed = " and ".join(shown_name(scope.full(name)) for name in names[:3])
    target = shown_name(scope.full(new))
    if not merge:
        hint = "give each its own target, or pass merge=True if they are equal"
        raise scope.error(f"two sources for {target}: {listed}", hint)
    leaves = [scope.get(name) for name in names]
    if any(leaf.form != "stored" for leaf in leaves):
        raise scope.error(f"{listed} are computed: merge takes stored leaves")
    facts = {(leaf.spec, scope.facts.digest(leaf.stored)) for leaf in leaves}
    if len(facts) > 1:
        hint = "choose one: drop the others before, then move it"
        raise scope.error(f"{listed} differ and cannot both be {target}", hint)


def drop_leaves(scope: Scope, source: Source) -> bool:
    """Leave out leaves of the file."""
    found = source.find(scope.names())
    drop_names(scope, list(found))
    return bool(found)


def drop_names(scope: Scope, names: Sequence[str]) -> None:
    """Leave out leaves by name, and remember which of the file's they were."""
    for name in names:
        leaf = scope.get(name)
        for stored in leaf.sources or (scope.full(name),):
            scope.draft.dropped[stored] = scope.rule
    scope.replace(dict.fromkeys(names), {})


def add_leaves(
    scope: Scope,
    target: Source,
    inputs: Sequence[Template],
    make: Callable[[Scope, Match], DraftLeaf],
) -> bool:
    """Add what the file lacks: the skeleton's leaves that a pattern selects.

    A plain name that is no leaf of the skeleton stands for what the step's own
    layout had there; a later step may move it, and a node is filled in the end.
    """
    found = target.find(scope.wanted())
    leaf = Match(node=target.text, captures=(), rest="")
    if target.stars == 0 and leaf.node not in found and _is_free(scope, leaf.node):
        if all(
            scope.full(scope.fill(item, leaf)) in scope.draft.leaves for item in inputs
        ):
            found = {leaf.node: leaf}
    scope.replace({}, {new: make(scope, match) for new, match in found.items()})
    return bool(found)


def _is_free(scope: Scope, name: str) -> bool:
    """Tell whether a plain name can be added that no skeleton asks for.

    A numbered step stands in a history: a later one may give it today's name.
    """
    if scope.facts.skeleton is not None and not scope.numbered:
        return False
    return all(relative_name(taken, name) is None for taken in scope.names())


def constant_leaf(scope: Scope, match: Match, value: Any) -> DraftLeaf:
    """Return a leaf that holds a value, spread over the skeleton's shape."""
    del match
    return DraftLeaf(spec=None, form="constant", value=value, rule=scope.rule)


def skeleton_leaf(scope: Scope, match: Match) -> DraftLeaf:
    """Return a leaf that is the skeleton's."""
    del match
    return DraftLeaf(spec=None, form="skeleton", rule=scope.rule)


def computed_leaf(
    scope: Scope, match: Match, inputs: Sequence[Template], function: Any
) -> DraftLeaf:
    """Return a leaf computed from others."""
    names = [scope.fill(item, match) for item in inputs]
    parts = tuple(scope.get(name) for name in names)
    if function is None:  # a copy
        return replace(parts[0], rule=scope.rule)
    return DraftLeaf(
        spec=None, form="computed", parts=parts, function=function, rule=scope.rule
    )


def adopt_leaves(scope: Scope, source: Source) -> bool:
    """Keep leaves of the file that the skeleton lacks."""
    found = [name for name in source.find(scope.names()) if scope.unwanted(name)]
    if scope.facts.skeleton is None:
        return bool(source.find(scope.names()))
    for name in found:
        leaf = replace(scope.get(name), adopted=scope.rule)
        scope.draft.leaves[scope.full(name)] = leaf
    return bool(found)


def refuse_layout(scope: Scope, source: Source | None, when: Any, words: str) -> bool:
    """Refuse the file with the user's words, where the condition holds."""
    if source is not None and not source.find(scope.names()):
        return False
    if when is not None and not ask_user(scope, when):
        return False
    raise MigrationError(words, details=(f"refused by {scope.rule}",))


def ask_user(scope: Scope, when: Callable[[View], Any]) -> bool:
    """Return what a user's condition says of the draft.

    Raises:
        MigrationError: it raised.
    """
    try:
        return bool(when(scope.facts.view(scope.draft)))
    except Exception as error:
        said = f"{type(error).__name__}: {error}".rstrip(": ")
        problem = f"its condition raised {said}"
        hint = "a condition may look at view.file, .skeleton, .config and .step"
        raise scope.error(problem, hint) from error


def check_leaves(
    scope: Scope, source: Source, predicate: Callable[[Any], Any], words: str
) -> bool:
    """Refuse the file where a leaf's value is not as the user says it must be."""
    found = source.find(scope.names())
    for name in found:
        leaf = replace(scope.get(name), rule=scope.rule)
        value = evaluate_leaf(leaf, scope.full(name), leaf.spec, scope.facts.read)
        try:
            sound = bool(predicate(value))
        except Exception as error:
            said = f"{type(error).__name__}: {error}".rstrip(": ")
            place = shown_name(scope.full(name))
            raise scope.error(f"{place}: the check raised {said}") from error
        if not sound:
            details = (f"{shown_name(scope.full(name))}: refused by {scope.rule}",)
            raise MigrationError(words, details=details)
    return bool(found)


def map_leaves(
    scope: Scope,
    source: Source,
    change: Callable[[Scope, str, DraftLeaf], DraftLeaf],
) -> bool:
    """Change leaves one by one, in their places."""
    found = source.find(scope.names())
    changed: Mapping[str, DraftLeaf] = {
        name: change(scope, name, scope.get(name)) for name in found
    }
    leaves = scope.draft.leaves
    leaves.update({scope.full(name): leaf for name, leaf in changed.items()})
    return bool(found)


def mapped(function: Callable[[Any], Any]) -> Callable[..., DraftLeaf]:
    """Return the change that computes a leaf anew from its own value."""

    def change(scope: Scope, name: str, leaf: DraftLeaf) -> DraftLeaf:
        del name
        return DraftLeaf(
            spec=None,
            form="computed",
            parts=(leaf,),
            function=function,
            rule=scope.rule,
        )

    return change
