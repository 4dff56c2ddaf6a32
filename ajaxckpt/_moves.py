"""The verbs behind the ready-made moves of optimiser states.

Each acts on one scope of a draft, as those of ``_verbs`` do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ajaxckpt._drafts import DraftLeaf
from ajaxckpt._grammar import SEGMENT
from ajaxckpt._names import join_names, relative_name
from ajaxckpt._scopes import Scope
from ajaxckpt._templates import Source
from ajaxckpt._verbs import drop_names


def renumber_nodes(scope: Scope, number: Callable[[int], int | None]) -> bool:
    """Give the children of a tuple other indices; None drops one with its leaves."""
    old: dict[str, str] = {}
    gone: list[str] = []
    for name in scope.names():
        first = SEGMENT.match(name)
        if first is None or not first[0].isdecimal():
            problem = f"{scope.full(name)}: stands in no chain"
            raise scope.error(problem, "name the place of a chain's state")
        if (new := number(int(first[0]))) is None:
            gone.append(name)
        else:
            old[name] = join_names(str(new), relative_name(name, first[0]) or "")
    drop_names(scope, gone)
    moved = {
        new: replace(scope.get(name), rule=scope.rule) for name, new in old.items()
    }
    scope.replace(old, moved)
    return bool(old or gone)


def _need_skeleton(scope: Scope) -> None:
    if scope.facts.skeleton is None:
        hint = "pass skeleton= (--skeleton)"
        raise scope.error("what it adds or drops is the skeleton's to say", hint)


def fill_wanted(scope: Scope, nodes: Sequence[str]) -> bool:
    """Take from the skeleton what it wants below these nodes and the draft lacks.

    Raises:
        MigrationError: there is no skeleton.
    """
    _need_skeleton(scope)
    new = [
        name
        for name in scope.wanted()
        if any(relative_name(name, node) is not None for node in nodes)
    ]
    leaf = DraftLeaf(spec=None, form="skeleton", rule=scope.rule)
    scope.replace({}, dict.fromkeys(new, leaf))
    return bool(new)


def fill_siblings(scope: Scope) -> bool:
    """Take from the skeleton what it wants of a field that the draft has in part.

    A field is what stands before the parameters' names, such as ``0.mu``. Of a field
    that is not there at all nothing is taken: that is another optimiser.
    """
    fields = {_field(name) for name in scope.names()}
    return fill_wanted(scope, [n for n in scope.wanted() if _field(n) in fields])


def _field(name: str) -> str:
    segments: list[str] = []
    for segment in SEGMENT.findall(name):
        segments.append(segment)
        if not segment.isdecimal():
            break
    return ".".join(segments)


def drop_except(scope: Scope, node: str) -> bool:
    """Drop what does not lie below a node; find nothing if nothing does."""
    names = scope.names()
    outside = [name for name in names if relative_name(name, node) is None]
    if len(outside) == len(names):
        return False
    drop_names(scope, outside)
    return True


def drop_unwanted(scope: Scope, node: str) -> bool:
    """Drop what lies below a node and the skeleton lacks, of fields that it has.

    Raises:
        MigrationError: there is no skeleton.
    """
    _need_skeleton(scope)
    below = [n for n in scope.names() if relative_name(n, node) is not None]
    fields = {
        _field(relative_name(name, node) or "")
        for name in below
        if not scope.unwanted(name)
    }
    gone = [
        name
        for name in below
        if scope.unwanted(name) and _field(relative_name(name, node) or "") in fields
    ]
    drop_names(scope, gone)
    return bool(gone)


def copy_first(scope: Scope, source: Source, target: str) -> bool:
    """Copy the first leaf that a pattern spells whole."""
    found = (n for n, match in source.find(scope.names()).items() if not match.rest)
    name = next(found, None)
    if name is None:
        return False
    scope.replace({}, {target: replace(scope.get(name), rule=scope.rule)})
    return True


def share_leaves(scope: Scope, places: Source) -> bool:
    """Give each of several nodes of the skeleton its leaves of the whole state.

    Raises:
        MigrationError: there is no skeleton.
    """
    _need_skeleton(scope)
    whole = {name: scope.get(name) for name in scope.names()}
    found = places.find(scope.wanted())
    shared = {
        name: replace(whole[match.rest], rule=scope.rule)
        for name, match in found.items()
        if match.rest in whole
    }
    if not shared:
        return False
    used = {match.rest for match in found.values()}
    drop_names(scope, [name for name in whole if name not in used])
    scope.replace({name: None for name in whole if name in used}, shared)
    return True
