"""What becomes of every leaf in a restore: two layouts and the exceptions in, out.

Pure: knows layouts and patterns; knows nothing of jax, trees or files.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from ajaxckpt._errors import InvalidArgumentError
from ajaxckpt._layout import (
    NUMBER_KINDS,
    Layout,
    LeafSpec,
    Mismatch,
    extra_leading_axis,
    find_problem,
)
from ajaxckpt._names import join_names
from ajaxckpt._patterns import Pattern, parse_pattern, select_names

Patterns = str | Iterable[str]
_FEW_NAMES = 3
_BUILD = "build the skeleton with the configuration that saved this file"
_EXCEPTIONS = {"missing": "keep=", "extra": "ignore=", "shape": "resize="}
_IN_WORDS = {
    "missing": "what the file lacks",
    "extra": "what the skeleton lacks",
    "shape": "other shapes",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Decisions:
    """What becomes of every leaf; names relative to the subtree.

    Attributes:
        load: filled from the file.
        keep: taken from the skeleton.
        ignore: in the file, not read.
        resize: loaded in the file's shape, which differs from the skeleton's.
        mismatches: what stands in the way; nothing is restored while there is any.
    """

    load: tuple[str, ...]
    keep: tuple[str, ...]
    ignore: tuple[str, ...]
    resize: tuple[str, ...]
    mismatches: tuple[Mismatch, ...]


def _compare_leaf(
    name: str, expected: LeafSpec | None, found: LeafSpec | None, resizable: bool
) -> Mismatch | None:
    if expected is None or found is None:
        problem = "extra" if expected is None else "missing"
        return Mismatch(name=name, problem=problem, expected=expected, found=found)
    problem = find_problem(expected, found, resizable=resizable)
    if problem is None:
        return None
    return Mismatch(name=name, problem=problem, expected=expected, found=found)


def plan_layouts(
    skeleton: Layout,
    file: Layout,
    *,
    keep: Patterns = (),
    ignore: Patterns = (),
    resize: Patterns = (),
    from_skeleton: Collection[str] = (),
) -> Decisions:
    """Decide what becomes of every leaf.

    Args:
        skeleton: the layout to fill.
        file: the layout saved.
        keep: patterns over skeleton names: leaves to leave as they are.
        ignore: patterns over file names: leaves to leave unread.
        resize: patterns over skeleton names: leaves that may take the file's shape.
        from_skeleton: skeleton names that a migration leaves as they are.

    Raises:
        InvalidArgumentError: a pattern is wrong or selects nothing.
    """
    kept = select_names(keep, list(skeleton), argument="keep")
    kept.update(name for name in from_skeleton if name in skeleton)
    ignored = select_names(ignore, list(file), argument="ignore")
    resizable = select_names(resize, list(skeleton), argument="resize")
    wanted = [name for name in skeleton if name not in kept]
    if skeleton and not wanted:
        raise InvalidArgumentError(
            "keep= selects every leaf of the skeleton: nothing would be restored",
            hint="name the leaves to keep, or use the skeleton as it is",
        )
    extra = [n for n in file if n not in skeleton and n not in ignored]
    compared = (
        _compare_leaf(
            name,
            skeleton.get(name),
            None if name in ignored else file.get(name),
            name in resizable,
        )
        for name in (*wanted, *extra)
    )
    mismatches = tuple(item for item in compared if item is not None)
    failed = {item.name for item in mismatches}
    load = tuple(name for name in wanted if name not in failed)
    return Decisions(
        load=load,
        keep=tuple(name for name in skeleton if name in kept),
        ignore=tuple(name for name in file if name in ignored),
        resize=tuple(n for n in load if skeleton[n].shape != file[n].shape),
        mismatches=mismatches,
    )


def file_name(subtree: str, name: str) -> str:
    """Return the name in the file of a skeleton's leaf below a subtree."""
    return join_names(subtree, name)


def note_absences(
    mismatches: Sequence[Mismatch],
    subtree: str,
    excluded: Sequence[str],
    ignored: Sequence[str],
) -> tuple[Mismatch, ...]:
    """Say of missing leaves that they were left out, or ignored, on purpose."""
    if all(item.problem != "missing" for item in mismatches):
        return tuple(mismatches)
    patterns = [parse_pattern(text) for text in excluded]
    notes = {name: "ignored by ignore=" for name in ignored}
    return tuple(
        replace(
            item, note=notes.get(item.name) or _note_exclusion(item, subtree, patterns)
        )
        if item.problem == "missing"
        else item
        for item in mismatches
    )


def _note_exclusion(item: Mismatch, subtree: str, patterns: Sequence[Pattern]) -> str:
    name = file_name(subtree, item.name)
    found = (pattern for pattern in patterns if pattern.matches(name))
    pattern = next(found, None)
    if pattern is None:
        return item.note
    return f'left out on purpose by exclude="{pattern.text}"'


def _advise_keep(
    mismatches: Sequence[Mismatch], subtree: str, excluded: Sequence[str]
) -> list[str]:
    """Return patterns for ``keep`` that select here what was left out."""
    names = [item.name for item in mismatches]
    if subtree:  # patterns there are relative to it
        return names if len(names) <= _FEW_NAMES else ["**"]
    patterns = {text: parse_pattern(text) for text in excluded}
    return [t for t, pattern in patterns.items() if any(map(pattern.matches, names))]


def advise(
    mismatches: Sequence[Mismatch],
    subtree: str,
    excluded: Sequence[str],
    suggestions: Sequence[str] = (),
) -> str:
    """Choose the one thing most likely to mend all mismatches."""
    if all(item.note.startswith("left out on purpose") for item in mismatches):
        keep = ", ".join(map(repr, _advise_keep(mismatches, subtree, excluded)))
        return f"pass keep=({keep},) to take those leaves from the skeleton"
    if len(mismatches) > 1 and (axis := extra_leading_axis(mismatches)):
        more, size = ("file", axis) if axis > 0 else ("skeleton", -axis)
        return (
            f"the {more}'s leaves have one more leading axis, of size {size} (seeds or "
            "devices?): build the skeleton with the same axis"
        )
    return f"{_BUILD}{_advise_exceptions(mismatches)}{_advise_rules(suggestions)}"


def _advise_rules(suggestions: Sequence[str]) -> str:
    """Name the first migration line, if one is known that would help."""
    suggestions = [line for line in suggestions if not line.startswith("#")]
    if not suggestions:
        return ""
    more = len(suggestions) - 1
    rest = f" and {more} more, which the plan prints" if more else ""
    return f", or register a migration: {suggestions[0]}{rest}"


def _problem_of(item: Mismatch) -> str:
    """Return the problem, but for a number: it has no shape that could change."""
    number = item.expected is not None and item.expected.kind in NUMBER_KINDS
    return "kind" if number and item.problem == "shape" else item.problem


def _advise_exceptions(mismatches: Sequence[Mismatch]) -> str:
    """Name the arguments that can make an exception of these leaves, if any can."""
    problems = {_problem_of(item) for item in mismatches}
    helpful = [(p, argument) for p, argument in _EXCEPTIONS.items() if p in problems]
    if not helpful:
        return "; only keep= and ignore= can leave out what is of another dtype or kind"
    if len(problems) == 1:
        names = [item.name for item in mismatches]
        few = f"({', '.join(map(repr, names))},)" if len(names) <= _FEW_NAMES else "…"
        return f", or name the exceptions: {helpful[0][1]}{few}"
    words = (f"{argument} for {_IN_WORDS[p]}" for p, argument in helpful)
    return f", or name the exceptions: {', '.join(words)}"
