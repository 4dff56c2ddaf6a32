"""What becomes of every leaf in a restore: two layouts and the exceptions in, out.

Pure: knows layouts and patterns; knows nothing of jax, trees or files.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ajaxckpt._layout import (
    Layout,
    LeafSpec,
    Mismatch,
    extra_leading_axis,
    find_problem,
)
from ajaxckpt._patterns import parse_pattern, select_names

Patterns = str | Iterable[str]
_FEW_NAMES = 3


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
) -> Decisions:
    """Decide what becomes of every leaf.

    Args:
        skeleton: the layout to fill.
        file: the layout saved.
        keep: patterns over skeleton names: leaves to leave as they are.
        ignore: patterns over file names: leaves to leave unread.
        resize: patterns over skeleton names: leaves that may take the file's shape.

    Raises:
        InvalidArgumentError: a pattern is wrong or selects nothing.
    """
    kept = select_names(keep, list(skeleton), argument="keep")
    ignored = select_names(ignore, list(file), argument="ignore")
    resizable = select_names(resize, list(skeleton), argument="resize")
    wanted = [name for name in skeleton if name not in kept]
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
    return ".".join(part for part in (subtree, name) if part)


def note_excluded(item: Mismatch, subtree: str, excluded: Sequence[str]) -> Mismatch:
    """Say of a missing leaf that it was left out on purpose."""
    if item.problem != "missing":
        return item
    name = file_name(subtree, item.name)
    for pattern in excluded:
        if parse_pattern(pattern).matches(name):
            note = f'left out on purpose by exclude="{pattern}"'
            return replace(item, note=note)
    return item


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
    mismatches: Sequence[Mismatch], subtree: str, excluded: Sequence[str]
) -> str:
    """Choose the one thing most likely to mend all mismatches."""
    if all(item.note.startswith("left out on purpose") for item in mismatches):
        keep = ", ".join(map(repr, _advise_keep(mismatches, subtree, excluded)))
        return f"pass keep=({keep},) to take those leaves from the skeleton"
    if axis := extra_leading_axis(mismatches):
        more, size = ("file", axis) if axis > 0 else ("skeleton", -axis)
        return (
            f"the {more}'s leaves have one more leading axis, of size {size} (seeds or "
            "devices?): build the skeleton with the same axis"
        )
    return (
        "build the skeleton with the configuration that saved this file, or name the "
        "exceptions: keep=, ignore= or resize="
    )
