"""One entry of a registry: its verbs, as the user writes them.

Knows how verbs are spelled and checks that at registration; acts on nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

from ajaxckpt import _axes, _verbs
from ajaxckpt._dtypes import STORED_DTYPES
from ajaxckpt._entries import Condition, Entry, Verb
from ajaxckpt._errors import CheckpointError, InvalidArgumentError, MigrationError
from ajaxckpt._scopes import Scope
from ajaxckpt._templates import (
    INDEX,
    Source,
    Template,
    parse_source,
    parse_template,
)

_MISSING: Any = object()


class Rules:
    """The verbs of one entry of a ``Migrations`` registry; each returns it again.

    Patterns select a leaf and all below it. The n-th star of a pattern is ``{n}`` in
    the target, and what lies below a selected node comes along. A verb that finds
    nothing is an error when the entry is applied (see ``Migrations``).

    Example:
        >>> Migrations("agent").step(1, "a trunk").move("*.Dense_0", "{1}.trunk")
        <Rules agent step 1 "a trunk": 1 verb>
    """

    def __init__(self, entry: Entry, scopes: tuple[Source, ...] = ()) -> None:
        """Keep the entry to add to; made by ``Migrations.step`` and ``.rule``."""
        self._entry = entry
        self._scopes = scopes

    def __repr__(self) -> str:
        """Show the title and how much there is."""
        count = len(self._entry.verbs)
        return f"<Rules {self._entry.title}: {count} verb{'s' * (count != 1)}>"

    def _error(self, problem: str, hint: str = "") -> MigrationError:
        title = self._entry.title
        return MigrationError(f"{title}: {problem}", act="cannot register", hint=hint)

    def _source(self, text: object, argument: str) -> Source:
        try:
            return parse_source(text, argument)
        except InvalidArgumentError as error:
            raise self._error(error.problem, error.hint) from error

    def _template(self, text: object, source: Source, argument: str) -> Template:
        try:
            return parse_template(text, stars=source.stars, argument=argument)
        except CheckpointError as error:
            raise self._error(error.problem, error.hint) from error

    def _plain_target(self, text: object, source: Source) -> Template:
        template = self._template(text, source, "target")
        if INDEX in template.holes:
            raise self._error(f"target={text!r}: only unstack has an {{index}}")
        return template

    def _append(self, text: str, act: Callable[[Scope], bool], **traits: Any) -> Rules:
        shown = " and ".join(scope.text or '""' for scope in self._scopes)
        text = f"{text} (under {shown})" if shown else text
        verb = Verb(text=text, scopes=self._scopes, act=act, **traits)
        self._entry.verbs.append(verb)
        return self

    def custom(
        self,
        text: str,
        act: Callable[[Scope], bool],
        *,
        guard: bool = False,
        asks_skeleton: bool = False,
    ) -> Rules:
        """Register a verb of another module, such as those of ``optax_moves``.

        Args:
            text: how the changelog shows it.
            act: acts on a scope of the draft and tells whether it found something.
            guard: whether finding nothing is as good.
            asks_skeleton: whether what it finds depends on the skeleton.
        """
        return self._append(text, act, guard=guard, asks_skeleton=asks_skeleton)

    def under(self, node: str, *mirrors: str) -> Rules:
        """Return the same entry with names relative to nodes, wherever they are.

        Every pattern names nodes, such as ``**.buffer``, of which each is a scope of
        its own. What mirrors the first follows it: an optimiser's moments, targets
        and averages have their parameters' names.

        Args:
            node: a pattern; a verb must find something below one of its nodes.
            mirrors: patterns of nodes that may lack some of it, but must be there.

        Raises:
            MigrationError: a pattern cannot be read.

        Example:
            >>> rules = Migrations("agent").step(1, "a trunk")
            >>> rules.under("params", "**.mu", "**.nu").move("Dense_0", "trunk")
            <Rules agent step 1 "a trunk": 1 verb>
        """
        scopes = tuple(self._source(text, "under") for text in (node, *mirrors))
        return Rules(self._entry, scopes)

    def move(self, source: str, target: str, *, merge: bool = False) -> Rules:
        """Give leaves, or a node with all below it, another name.

        Args:
            source: a pattern over the file's names.
            target: the new name, with ``{1}``… for what the stars stood for.
            merge: whether several sources may have one target; they must then be
                equal in every bit.

        Raises:
            MigrationError: source or target cannot be read.
        """
        pattern = self._source(source, "source")
        template = self._plain_target(target, pattern)
        act = partial(
            _verbs.move_leaves, source=pattern, target=template, merge=bool(merge)
        )
        text = f"move {source or repr('')} to {target or repr('')}"
        return self._append(text, act, sources=(source,))

    def drop(self, pattern: str) -> Rules:
        """Leave out leaves of the file.

        Raises:
            MigrationError: the pattern cannot be read.
        """
        source = self._source(pattern, "pattern")
        act = partial(_verbs.drop_leaves, source=source)
        return self._append(f"drop {pattern}", act, sources=(pattern,))

    def add(
        self,
        target: str,
        value: Any = _MISSING,
        *,
        from_skeleton: bool = False,
        compute: Callable[..., Any] | None = None,
        inputs: str | Sequence[str] = (),
    ) -> Rules:
        """Add leaves that the file lacks, of the skeleton's dtype and shape.

        One of: a value, spread over the shape; the skeleton's own value; a value
        computed from other leaves; inputs alone, for a copy of one leaf.

        Args:
            target: a pattern over the skeleton's names; it finds those that the file
                lacks.
            value: a number, or an array of the shape.
            from_skeleton: whether to take the skeleton's value.
            compute: gets the inputs' host values (numpy arrays, Python scalars, a
                typed key as its uint32 words), returns one.
            inputs: names of the file's leaves, with ``{1}``… for what the target's
                stars stood for; what is below the target comes along.

        Raises:
            MigrationError: not one of these, or a name cannot be read.
        """
        pattern = self._source(target, "target")
        names = (inputs,) if isinstance(inputs, str) else tuple(inputs)
        given = (value is not _MISSING, bool(from_skeleton), bool(compute or names))
        if sum(given) != 1 or (names and not compute and len(names) > 1):
            problem = f"add {target}: expected one of value, from_skeleton, compute"
            hint = "inputs= go with compute=, or are one name to copy"
            raise self._error(problem, hint)
        templates = [self._template(name, pattern, "inputs") for name in names]
        if given[0]:
            value = deepcopy(value)
            make = partial(_verbs.constant_leaf, value=value)
            how = (
                f"with {value!r}" if isinstance(value, int | float) else "with a value"
            )
        elif from_skeleton:
            make, how = _verbs.skeleton_leaf, "from the skeleton"
        else:
            make = partial(_verbs.computed_leaf, inputs=templates, function=compute)
            how = f"from {', '.join(names)}" if names else "computed"
        act = partial(_verbs.add_leaves, target=pattern, inputs=templates, make=make)
        traits = {"asks_skeleton": True, "sources": names}
        return self._append(f"add {target} {how}", act, **traits)

    def adopt(self, pattern: str) -> Rules:
        """Keep leaves of the file that the skeleton lacks.

        They come back under their dict node of the skeleton, or in place of its
        None: the one case in which the restored tree is not shaped as the skeleton.

        Raises:
            MigrationError: the pattern cannot be read.
        """
        source = self._source(pattern, "pattern")
        act = partial(_verbs.adopt_leaves, source=source)
        traits = {"asks_skeleton": True, "sources": (pattern,)}
        return self._append(f"adopt {pattern}", act, **traits)

    def map(self, pattern: str, function: Callable[[Any], Any]) -> Rules:
        """Compute leaves anew, each from its own host value.

        Args:
            pattern: the leaves.
            function: gets a numpy array or Python scalar, returns one of the
                skeleton's dtype and shape.

        Raises:
            MigrationError: the pattern cannot be read, or that is no function.
        """
        if not callable(function):
            raise self._error(f"map {pattern}: {function!r} cannot be called")
        name = getattr(function, "__name__", "a function")
        return self._change(pattern, f"by {name}", _verbs.mapped(function), "map")

    def cast(self, pattern: str, dtype: Any, *, exact: bool = True) -> Rules:
        """Change the dtype of leaves.

        Args:
            pattern: the leaves.
            dtype: the new one, or its name.
            exact: whether a value that the new dtype cannot hold is an error.

        Raises:
            MigrationError: the pattern cannot be read, or no such dtype is stored.
        """
        name = str(getattr(dtype, "__name__", None) or dtype)
        if name not in STORED_DTYPES:
            raise self._error(f"cast {pattern}: no dtype {dtype!r}", 'such as "int8"')
        how = f"to {name}" + ("" if exact else ", rounding")
        return self._change(pattern, how, _axes.cast(name, bool(exact)), "cast")

    def reshape(self, pattern: str, shape: Sequence[int]) -> Rules:
        """Give leaves another shape of as many elements; one size may be -1."""
        return self._change(
            pattern, f"to {list(shape)}", _axes.reshape(shape), "reshape"
        )

    def squeeze(self, pattern: str, axis: int = 0) -> Rules:
        """Take an axis of size 1 away from leaves."""
        return self._change(pattern, f"axis {axis}", _axes.squeeze(axis), "squeeze")

    def expand(self, pattern: str, size: int = 1, *, axis: int = 0) -> Rules:
        """Add an axis to leaves, along which they repeat, such as one of seeds."""
        how = f"axis {axis} by {size}"
        return self._change(pattern, how, _axes.expand(size, axis), "expand")

    def take(self, pattern: str, index: int, *, axis: int = 0) -> Rules:
        """Take one index along an axis of leaves, such as one seed."""
        how = f"index {index} of axis {axis}"
        return self._change(pattern, how, _axes.take(index, axis), "take")

    def _change(self, pattern: str, how: str, change: _axes.Change, verb: str) -> Rules:
        source = self._source(pattern, "pattern")
        act = partial(_verbs.map_leaves, source=source, change=change)
        text = f"{verb} {pattern or repr('')} {how}"
        return self._append(text, act, sources=(pattern,))

    def split(
        self,
        source: str,
        targets: Sequence[str],
        *,
        axis: int = -1,
        sizes: Sequence[int] | None = None,
    ) -> Rules:
        """Cut leaves along an axis into several, of equal sizes unless told.

        Raises:
            MigrationError: source or a target cannot be read.
        """
        pattern = self._source(source, "source")
        templates = [self._plain_target(item, pattern) for item in targets]
        if not templates or isinstance(targets, str):
            raise self._error(f"split {source}: expected several targets")
        act = partial(
            _axes.split_leaves,
            source=pattern,
            targets=templates,
            axis=axis,
            sizes=sizes,
        )
        text = f"split {source} into {', '.join(targets)}"
        return self._append(text, act, sources=(source,))

    def concatenate(
        self, sources: Sequence[str], target: str, *, axis: int = -1
    ) -> Rules:
        """Join leaves along an axis that they have; the stars are the first's.

        Raises:
            MigrationError: a source or the target cannot be read.
        """
        if isinstance(sources, str) or len(sources) < 2:
            raise self._error("concatenate: expected several sources")
        pattern = self._source(sources[0], "sources")
        others = [self._plain_target(item, pattern) for item in sources[1:]]
        act = partial(
            _axes.concatenate_leaves,
            source=pattern,
            others=others,
            target=self._plain_target(target, pattern),
            axis=axis,
        )
        text = f"concatenate {', '.join(sources)} to {target}"
        return self._append(text, act, sources=tuple(sources))

    def stack(self, source: str, target: str, *, axis: int = 0) -> Rules:
        """Stack the leaves that share a target along a new axis, in number order.

        Raises:
            MigrationError: source or target cannot be read.
        """
        pattern = self._source(source, "source")
        template = self._plain_target(target, pattern)
        act = partial(_axes.stack_leaves, source=pattern, target=template, axis=axis)
        return self._append(f"stack {source} to {target}", act, sources=(source,))

    def unstack(self, source: str, target: str, *, axis: int = 0) -> Rules:
        """Take leaves apart along an axis: ``{index}`` in the target counts from 0.

        Raises:
            MigrationError: source or target cannot be read.
        """
        pattern = self._source(source, "source")
        template = self._template(target, pattern, "target")
        if INDEX not in template.holes:
            raise self._error(f"target={target!r} has no {{index}}")
        act = partial(_axes.unstack_leaves, source=pattern, target=template, axis=axis)
        return self._append(f"unstack {source} to {target}", act, sources=(source,))

    def refuse(
        self, words: str, pattern: str | None = None, *, when: Condition | None = None
    ) -> Rules:
        """Refuse the file, in your own words, where a pattern and a condition hold.

        Args:
            words: what the user needs to know.
            pattern: leaves of the file; any file where it is left out.
            when: looks at the file's and the skeleton's layout, config and step.

        Raises:
            MigrationError: the pattern cannot be read.
        """
        source = None if pattern is None else self._source(pattern, "pattern")
        act = partial(_verbs.refuse_layout, source=source, when=when, words=str(words))
        where = "" if pattern is None else f" {pattern}"
        return self._append(f"refuse{where}: {words}", act, guard=True)

    def check(self, pattern: str, predicate: Callable[[Any], Any], words: str) -> Rules:
        """Refuse the file, in your own words, where a leaf's value is not right.

        The leaves are read while planning: choose small ones.

        Args:
            pattern: the leaves.
            predicate: gets each host value, tells whether it is right.
            words: what the user needs to know if not.

        Raises:
            MigrationError: the pattern cannot be read.
        """
        source = self._source(pattern, "pattern")
        act = partial(
            _verbs.check_leaves, source=source, predicate=predicate, words=str(words)
        )
        return self._append(f"check {pattern}: {words}", act, guard=True)
