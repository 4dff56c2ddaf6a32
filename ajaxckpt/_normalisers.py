"""Which leaves look like statistics that observations are normalised with.

Knows leaf names alone; a guess for a warning: nothing is decided by it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from ajaxckpt._names import join_segments, split_name

_NAME = re.compile(
    r"(^|_)(normali[sz](er|ation|ations)|running_(statistics|stats|mean_std)"
    r"|obs(ervation)?_(norm|rms|stats)\w*|rms(_state)?|batch_stats)(_|$)",
    re.IGNORECASE,
)
# statistics of rewards, and what an optimiser keeps, are of no use to a policy
_OF_OTHERS = re.compile(
    r"(^|_)(rews?|rewards?|returns?|opt|optim|optimi[sz]er|opt_state|critic|values?"
    r"|buffer|replay|target\w*|mu|nu)(_|$)",
    re.IGNORECASE,
)
_CENTRES = frozenset(("mean", "running_mean"))
_SPREADS = frozenset(
    ("var", "variance", "running_var", "std", "m2", "summed_variance", "sum_sq")
)


def find_normalisers(names: Iterable[str]) -> list[str]:
    """Return the nodes that look like an observation normaliser, outermost first.

    Example:
        >>> from ajaxckpt._normalisers import find_normalisers
        >>> find_normalisers(["actor.w", "obs_rms.mean", "obs_rms.var", "step"])
        ['obs_rms']
    """
    found: dict[str, None] = {}
    for node, children in _group_by_parent(names).items():
        if any(_OF_OTHERS.search(segment) for segment in node):
            continue
        named = [i for i, segment in enumerate(node) if _NAME.search(segment)]
        if named:
            found[join_segments(node[: named[0] + 1])] = None
        elif node and children & _CENTRES and children & _SPREADS:
            found[join_segments(node)] = None
    return list(found)


def _group_by_parent(names: Iterable[str]) -> Mapping[tuple[str, ...], set[str]]:
    groups: dict[tuple[str, ...], set[str]] = {}
    for name in names:
        if segments := split_name(name):
            groups.setdefault(segments[:-1], set()).add(segments[-1])
    return groups
