"""Ready-made migrations for the changes people make to optax optimisers.

Each function takes the ``Rules`` of an entry and the place of an optimiser's state, a
name or a pattern such as ``**.opt_state``, registers what moves where, and returns
the rules. Moments and counts keep their bits. Knows the field names of optax's states
(0.2) and nothing else of it::

    chain(a, b)            0.…, 1.…
    inject_hyperparams(a)  count, hyperparams.…, hyperparams_states.…, inner_state.…
    MultiSteps(a)          mini_step, gradient_step, acc_grads.…, inner_opt_state.…
    masked(a)              inner_state.…
    multi_transform(a…)    inner_states.LABEL.inner_state.…
    apply_if_finite(a)     notfinite_count, last_finite, total_notfinite, inner_state.…

Every function takes ``rules``, the entry to add to, and ``place``, a name or pattern
of the optimiser's whole state, old and new; an index counts the links of a chain from
0, those without leaves too. A state that was saved with a chain and is restored
without one is no matter of ``remove_link``: see ``unwrap_chain``. All raise
``MigrationError`` where the place cannot be read as a pattern; what new fields hold is
the skeleton's, so an upgraded copy needs one.

Example:
    >>> from ajaxckpt import optax_moves
    >>> migrations = Migrations("agent")
    >>> step = migrations.step(1, "gradients are clipped")
    >>> optax_moves.wrap_chain(step, "**.opt_state", 1)
    <Rules agent step 1 "gradients are clipped": 2 verbs>
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from ajaxckpt import _moves
from ajaxckpt._errors import MigrationError
from ajaxckpt._names import join_names
from ajaxckpt._rules import Rules
from ajaxckpt._scopes import Scope
from ajaxckpt._templates import parse_source

_HELD_BACK = (
    "MultiSteps holds gradients that were not applied yet: save at a multiple of "
    "every_k_schedule, with the old optimiser, and migrate that file"
)


def insert_link(rules: Rules, place: str, index: int) -> Rules:
    """Make room in a chain for a new link: those from ``index`` on move up.

    The new link's leaves, if it has any, are the skeleton's.
    """
    _check_index(index)
    _renumber(rules, place, lambda n: n + 1 if n >= index else n, f"insert {index}")
    return _fill(rules.under(place), str(index))


def remove_link(rules: Rules, place: str, index: int) -> Rules:
    """Drop a link of a chain with its leaves: those behind it move down."""
    _check_index(index)

    def number(link: int) -> int | None:
        return None if link == index else link - (link > index)

    return _renumber(rules, place, number, f"remove {index}")


def move_link(rules: Rules, place: str, source: int, target: int) -> Rules:
    """Move a link of a chain to another index; those between make room."""
    _check_index(source)
    _check_index(target)

    def number(link: int) -> int:
        if link == source:
            return target
        behind = link - (link > source)
        return behind + (behind >= target)

    return _renumber(rules, place, number, f"move {source} to {target}")


def wrap_chain(rules: Rules, place: str, index: int) -> Rules:
    """Make a lone transformation the link ``index`` of a chain.

    The other links' leaves, if they have any, are the skeleton's: a gradient clip
    before adam has none.
    """
    _check_index(index)
    scope = rules.under(place).move("", str(index))

    def act(scope: Scope) -> bool:
        links = {name.partition(".")[0] for name in scope.wanted()}
        return _moves.fill_wanted(scope, sorted(links - {str(index)}))

    return scope.custom("the other links from the skeleton", act, guard=True)


def unwrap_chain(rules: Rules, place: str, index: int) -> Rules:
    """Make the link ``index`` of a chain the lone transformation; drop the others."""
    _check_index(index)
    _renumber(
        rules, place, lambda n: n if n == index else None, f"keep link {index} alone"
    )
    return rules.under(place).move(str(index), "")


def wrap_inject_hyperparams(
    rules: Rules, place: str, *, count: str | None = "**.count"
) -> Rules:
    """Put a state into inject_hyperparams; the hyperparameters are the skeleton's.

    Args:
        rules: the entry.
        place: where the state is.
        count: which leaf of the old state counts its updates, for schedules; the
            first that the pattern finds. None to begin at the skeleton's count.
    """
    scope = rules.under(place).move("", "inner_state")
    if count is not None:
        _copy_first(scope, join_names("inner_state", count), "count")
    return _fill(scope, "count", "hyperparams", "hyperparams_states")


def unwrap_inject_hyperparams(rules: Rules, place: str) -> Rules:
    """Take a state out of inject_hyperparams: the hyperparameters are dropped."""
    return _unwrap(rules, place, "inner_state")


def wrap_multi_steps(
    rules: Rules, place: str, *, count: str | None = "**.count"
) -> Rules:
    """Put a state into MultiSteps, at an accumulation boundary.

    Args:
        rules: the entry.
        place: where the state is.
        count: which leaf of the old state counts its updates, for a schedule of
            steps; the first that the pattern finds. None for the skeleton's.
    """
    scope = rules.under(place).move("", "inner_opt_state")
    if count is not None:
        _copy_first(scope, join_names("inner_opt_state", count), "gradient_step")
    return _fill(scope, "mini_step", "gradient_step", "acc_grads", "skip_state")


def unwrap_multi_steps(rules: Rules, place: str) -> Rules:
    """Take a state out of MultiSteps; refused off an accumulation boundary."""
    rules.under(place).check("mini_step", _all_zero, _HELD_BACK)
    return _unwrap(rules, place, "inner_opt_state")


def wrap_masked(rules: Rules, place: str) -> Rules:
    """Put a state into masked; moments of what the mask leaves out are dropped."""
    scope = rules.under(place).move("", "inner_state")
    text = "drop what the mask leaves out"
    act = partial(_moves.drop_unwanted, node="inner_state")
    return scope.custom(text, act, guard=True)


def unwrap_masked(rules: Rules, place: str) -> Rules:
    """Take a state out of masked; what the mask left out begins as the skeleton's."""
    scope = rules.under(place).move("inner_state", "")
    text = "what the mask left out from the skeleton"
    return scope.custom(text, _moves.fill_siblings, guard=True)


def wrap_multi_transform(rules: Rules, place: str) -> Rules:
    """Give each label of multi_transform its share of a state, counts to every one.

    Which label a parameter has is the skeleton's to say. What no label asks for is
    dropped; what a label asks for and the state lacks is missing, as ever.
    """
    places = parse_source("inner_states.*.inner_state")
    act = partial(_moves.share_leaves, places=places)
    return rules.under(place).custom("share among labels", act, asks_skeleton=True)


def unwrap_multi_transform(rules: Rules, place: str) -> Rules:
    """Join the labels' states of multi_transform; their counts must be equal.

    Every label must have had the same transformation.
    """
    scope = rules.under(place)
    return scope.move("inner_states.*.inner_state", "", merge=True)


def wrap_apply_if_finite(rules: Rules, place: str) -> Rules:
    """Put a state into apply_if_finite; its counts begin as the skeleton's."""
    scope = rules.under(place).move("", "inner_state")
    return _fill(scope, "notfinite_count", "last_finite", "total_notfinite")


def unwrap_apply_if_finite(rules: Rules, place: str) -> Rules:
    """Take a state out of apply_if_finite: its counts are dropped."""
    return _unwrap(rules, place, "inner_state")


def use_new_hyperparams(rules: Rules, place: str, *names: str) -> Rules:
    """Take hyperparameters of inject_hyperparams from the skeleton, not the file.

    Args:
        rules: the entry.
        place: where the state is.
        names: which, such as ``learning_rate``; all where none is named.
    """
    scope = rules.under(place)
    for name in names or ("",):
        leaf = join_names("hyperparams", name)
        scope.drop(leaf).add(leaf, from_skeleton=True)
    return scope


def _unwrap(rules: Rules, place: str, inner: str) -> Rules:
    """Let what lies in a field take the place of the whole; drop the rest."""
    act = partial(_moves.drop_except, node=inner)
    return rules.under(place).custom(f"drop all but {inner}", act).move(inner, "")


def _fill(scope: Rules, *nodes: str) -> Rules:
    """Take from the skeleton what it has below nodes and the file lacks."""
    act = partial(_moves.fill_wanted, nodes=nodes)
    return scope.custom(f"{', '.join(nodes)} from the skeleton", act, guard=True)


def _copy_first(scope: Rules, source: str, target: str) -> Rules:
    act = partial(_moves.copy_first, source=parse_source(source), target=target)
    return scope.custom(f"copy {source} to {target}", act)


def _renumber(
    rules: Rules, place: str, number: Callable[[int], int | None], text: str
) -> Rules:
    act = partial(_moves.renumber_nodes, number=number)
    return rules.under(place).custom(f"renumber links: {text}", act)


def _check_index(index: int) -> None:
    if type(index) is not int or index < 0:  # pyright: ignore[reportUnnecessaryComparison]
        problem = f"link {index!r}: expected an index from 0 on"
        raise MigrationError(problem, act="cannot register")


def _all_zero(value: Any) -> bool:
    return not np.any(value)
