"""Which migration lines would mend mismatches: what moved, what is new, what is gone.

Pure: knows layouts and names. A suggestion is a guess from names and specs, for the
user to read; nothing acts on it.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from ajaxckpt._errors import CheckpointError
from ajaxckpt._grammar import SEGMENT
from ajaxckpt._layout import ARRAY_KINDS, NUMBER_KINDS, LeafSpec, Mismatch, find_problem
from ajaxckpt._names import join_names, relative_name
from ajaxckpt._templates import parse_source, parse_template

_MAX_PAIRS = 50_000
_MAX_LINES = 20
_MAX_TRIED = 2_000
_NUMBER = re.compile(r"(?<![0-9])[0-9]+(?![0-9])")


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A node, or a leaf, that seems to have another name now.

    Attributes:
        source: its name in the file.
        target: its name in the skeleton.
        leaves: the file's leaves there, and what they would be called.
    """

    source: str
    target: str
    leaves: Mapping[str, str]


def suggest_rules(
    mismatches: Sequence[Mismatch],
    file_names: Sequence[str],
    skeleton_names: Sequence[str],
) -> tuple[str, ...]:
    """Return verb calls on a ``Rules`` value named ``step`` that may mend mismatches.

    Args:
        mismatches: what does not fit.
        file_names: all leaves of the file.
        skeleton_names: all leaves of the skeleton.
    """
    missing = {m.name: m.expected for m in mismatches if m.problem == "missing"}
    extra = {m.name: m.found for m in mismatches if m.problem == "extra"}
    lines = list(_generalise(find_moves(missing, extra, file_names), file_names))
    moved = {new for _, move in lines for new in move.leaves.items()}
    gone = set(extra) - {old for old, _ in moved}
    new = set(missing) - {new for _, new in moved}
    unsure = {_alike(extra[n]) for n in gone} & {_alike(missing[n]) for n in new}
    doubtful = {n for n in gone if _alike(extra[n]) in unsure}
    gone -= doubtful
    new -= {n for n in new if _alike(missing[n]) in unsure}
    found = (
        *(line for line, _ in lines),
        *(f"step.drop({_text(name)})" for name in _collapse(gone, file_names)),
        *(
            f"step.add({_text(name)}, from_skeleton=True)"
            for name in _collapse(new, skeleton_names)
        ),
        *(line for item in mismatches for line in _change(item)),
        *_doubt(sorted(doubtful)),
    )
    if (more := len(found) - _MAX_LINES) > 0:
        return (*found[:_MAX_LINES], f"# and {more} lines more, like these")
    return found


def _doubt(names: Sequence[str]) -> Iterator[str]:
    """Yield a comment on leaves that may have moved to any of several places."""
    if names:
        few = ", ".join(names[:3]) + (" …" if len(names) > 3 else "")
        yield f"# not guessed, several new leaves are of the same kind: {few}"


def _text(name: str) -> str:
    """Spell a name as Python code."""
    return repr(name) if '"' in name or "\\" in name else f'"{name}"'


def find_moves(
    missing: Mapping[str, LeafSpec | None],
    extra: Mapping[str, LeafSpec | None],
    file_names: Sequence[str],
) -> list[Move]:
    """Return the moves of whole nodes that explain the most, each leaf once."""
    left, gone = dict(missing), dict(extra)
    ordered = sorted(file_names)
    moves: list[Move] = []
    for rivals in _candidates(left, gone):
        found = [_try_move(*pair, left, gone, ordered) for pair in rivals]
        sound = [move for move in found if move is not None]
        for move in _undisputed(sound):
            moves.append(move)
            for old, new in move.leaves.items():
                del gone[old], left[new]
    return _consistent([*moves, *_only_pairs(left, gone)])


def _consistent(moves: Sequence[Move]) -> list[Move]:
    """Leave out moves of alike names of which some keep their number, some do not.

    Layers were shifted, and which became which cannot be told.
    """
    kept: dict[tuple[str, str], set[bool]] = defaultdict(set)
    for move in moves:
        numbers = _NUMBER.findall(move.source) == _NUMBER.findall(move.target)
        kept[_mask(move.source), _mask(move.target)].add(numbers)
    return [m for m in moves if len(kept[_mask(m.source), _mask(m.target)]) == 1]


def _undisputed(moves: Sequence[Move]) -> Iterator[Move]:
    """Yield the moves, equally likely, that no other one contradicts."""
    sources = Counter(old for move in moves for old in move.leaves)
    targets = Counter(new for move in moves for new in move.leaves.values())
    for move in moves:
        once = all(sources[old] == 1 for old in move.leaves)
        if once and all(targets[new] == 1 for new in move.leaves.values()):
            yield move


def _candidates(
    missing: Mapping[str, LeafSpec | None], extra: Mapping[str, LeafSpec | None]
) -> Iterator[list[tuple[str, str]]]:
    """Yield pairs of prefixes with a common rest, in groups of equal likelihood.

    Most leaves first; among as many, those whose names have most in common: the
    parameters, a target and two moments all have the same leaves.
    """
    by_last: dict[tuple[str, str], list[list[str]]] = defaultdict(list)
    for name, spec in extra.items():
        segments = SEGMENT.findall(name)
        by_last[segments[-1] if segments else "", _alike(spec)].append(segments)
    votes: Counter[tuple[str, str]] = Counter()
    pairs = 0
    for name, spec in missing.items():
        new = SEGMENT.findall(name)
        for old in by_last.get((new[-1] if new else "", _alike(spec)), ()):
            pairs += 1
            if pairs > _MAX_PAIRS:
                break
            votes.update(_prefixes(old, new))
    scores = {pair: (-count, -_likeness(*pair)) for pair, count in votes.items()}
    ranked = sorted(scores, key=lambda pair: (scores[pair], len(pair[0]), pair))
    for _, group in groupby(
        ranked[:_MAX_TRIED], key=lambda pair: (scores[pair], len(pair[0]))
    ):
        yield list(group)


def _likeness(source: str, target: str) -> int:
    """Return how much two names have in common: segments, then numbers."""

    def common(parts: Callable[[str], list[str]]) -> int:
        return (Counter(parts(source)) & Counter(parts(target))).total()

    return 100 * common(SEGMENT.findall) + common(_NUMBER.findall)


def _prefixes(old: list[str], new: list[str]) -> Iterator[tuple[str, str]]:
    """Yield what remains of two names after each common ending."""
    common = 0
    while common < min(len(old), len(new)) and old[-1 - common] == new[-1 - common]:
        common += 1
        source = ".".join(old[: len(old) - common])
        target = ".".join(new[: len(new) - common])
        yield source, target


def _below(ordered: Sequence[str], prefix: str) -> Iterator[str]:
    """Yield the names at and below a node, of sorted ones."""
    place = bisect_left(ordered, prefix)
    while place < len(ordered) and ordered[place].startswith(prefix):
        if relative_name(ordered[place], prefix) is not None:
            yield ordered[place]
        place += 1


def _try_move(
    source: str,
    target: str,
    missing: Mapping[str, LeafSpec | None],
    extra: Mapping[str, LeafSpec | None],
    ordered: Sequence[str],
) -> Move | None:
    """Return the move if all that lies below the source finds its place."""
    leaves: dict[str, str] = {}
    for name in _below(ordered, source):
        new = join_names(target, relative_name(name, source) or "")
        expected, found = missing.get(new), extra.get(name)
        if expected is None or found is None or find_problem(expected, found):
            return None
        leaves[name] = new
    return Move(source=source, target=target, leaves=leaves) if leaves else None


def _only_pairs(
    missing: Mapping[str, LeafSpec | None], extra: Mapping[str, LeafSpec | None]
) -> Iterator[Move]:
    """Yield single leaves that are alone with their spec on both sides.

    Where several have one spec, those alone with the numbers in their names, too.
    """
    left, gone = dict(missing), dict(extra)
    for rule in (_exactly, _numbered, _loosely):
        old, new = _by_kind(gone, rule), _by_kind(left, rule)
        for kind, names in new.items():
            if len(names) != 1 or len(old.get(kind, ())) != 1:
                continue
            source, target = old[kind][0], names[0]
            expected, found = left[target], gone[source]
            if expected and found and find_problem(expected, found) is None:
                yield Move(source=source, target=target, leaves={source: target})
                del gone[source], left[target]


def _exactly(name: str, spec: LeafSpec | None) -> tuple[str, ...]:
    del name
    return (str(spec),)


def _numbered(name: str, spec: LeafSpec | None) -> tuple[str, ...]:
    return (str(spec), *_NUMBER.findall(name))


def _loosely(name: str, spec: LeafSpec | None) -> tuple[str, ...]:
    del name
    return (_alike(spec),)


def _alike(spec: LeafSpec | None) -> str:
    """Return what leaves have in common that may fit each other."""
    if spec is None:
        return ""
    if spec.kind in NUMBER_KINDS or (spec.kind in ARRAY_KINDS and not spec.shape):
        return "a scalar"
    return f"{spec.dtype}{spec.shape}" if spec.kind in ARRAY_KINDS else str(spec)


def _by_kind(
    leaves: Mapping[str, LeafSpec | None],
    rule: Callable[[str, LeafSpec | None], tuple[str, ...]],
) -> dict[tuple[str, ...], list[str]]:
    groups: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for name, spec in leaves.items():
        groups[rule(name, spec)].append(name)
    return groups


def _generalise(
    moves: Sequence[Move], file_names: Sequence[str]
) -> Iterator[tuple[str, Move]]:
    """Yield a line per move, and one for those that differ in numbers alone."""
    groups: dict[tuple[str, str], list[Move]] = defaultdict(list)
    for move in moves:
        groups[_mask(move.source), _mask(move.target)].append(move)
    for group in groups.values():
        line = _starred(group, file_names) if len(group) > 1 else None
        if line is not None:
            leaves = {old: new for m in group for old, new in m.leaves.items()}
            yield line, Move(source="", target="", leaves=leaves)
            continue
        for move in group:
            yield _line(move.source, move.target), move


def _line(source: str, target: str) -> str:
    return f"step.move({_text(source)}, {_text(target)})"


def _mask(name: str) -> str:
    return _NUMBER.sub("#", name)


def _starred(group: Sequence[Move], file_names: Sequence[str]) -> str | None:
    """Return one line with captures for moves alike, if it moves just those."""
    first = group[0]
    if any(char in first.source + first.target for char in '"<'):
        return None
    numbers = [_NUMBER.findall(move.source) for move in group]
    columns = enumerate(zip(*numbers, strict=True))
    varying = [place for place, column in columns if len(set(column)) > 1]
    source, target = _fill_stars(first, varying)
    try:
        pattern = parse_source(source)
        template = parse_template(target, stars=pattern.stars)
        found = {
            name: template.fill(match.captures, match.rest)
            for name, match in pattern.find(file_names).items()
        }
    except CheckpointError:
        return None
    leaves = {old: new for move in group for old, new in move.leaves.items()}
    return _line(source, target) if found == leaves else None


def _fill_stars(move: Move, varying: Sequence[int]) -> tuple[str, str]:
    numbers = _NUMBER.findall(move.source)
    count = iter(range(len(numbers)))
    source = _NUMBER.sub(lambda m: "*" if next(count) in varying else m[0], move.source)
    holes = {numbers[place]: n for n, place in enumerate(varying, 1)}
    target = _NUMBER.sub(
        lambda m: "{" + str(holes[m[0]]) + "}" if m[0] in holes else m[0], move.target
    )
    return source, target


def _collapse(names: set[str], everything: Sequence[str]) -> Iterator[str]:
    """Yield the highest nodes below which all leaves are among the names."""
    totals: Counter[str] = Counter()
    mine: Counter[str] = Counter()
    for name in everything:
        segments = SEGMENT.findall(name)
        nodes = [".".join(segments[: n + 1]) for n in range(len(segments))]
        totals.update(nodes)
        if name in names:
            mine.update(nodes)
    done: dict[str, None] = {}
    for name in everything:
        if name not in names:
            continue
        segments = SEGMENT.findall(name)
        nodes = (".".join(segments[: n + 1]) for n in range(len(segments)))
        done[next((n for n in nodes if mine[n] == totals[n]), name)] = None
    yield from done


def _change(item: Mismatch) -> Iterator[str]:
    """Yield the line for a leaf of both sides that has another dtype or axis."""
    expected, found = item.expected, item.found
    if expected is None or found is None:
        return
    if not {expected.kind, found.kind} <= ARRAY_KINDS:
        return
    name = _text(item.name)
    if item.problem == "dtype":
        yield f'step.cast({name}, "{expected.dtype}")'
    if item.problem == "shape":
        new, old = expected.shape, found.shape
        if (axis := _unit_axis(old, new)) is not None:
            yield f"step.squeeze({name}, axis={axis})"
        elif (axis := _unit_axis(new, old)) is not None:
            yield f"step.expand({name}, size=1, axis={axis})"


def _unit_axis(longer: tuple[int, ...], shorter: tuple[int, ...]) -> int | None:
    """Return the axis of size 1 that makes the difference."""
    for axis, size in enumerate(longer):
        if size == 1 and (*longer[:axis], *longer[axis + 1 :]) == shorter:
            return axis
    return None
