"""What to keep of a run: policies, and the pure choice of what survives them.

Knows steps, times and metrics; knows no files, and deletes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ajaxckpt._errors import InvalidArgumentError

Mode = Literal["min", "max"]
Metrics = Mapping[str, float | int | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """What a policy may know of one checkpoint.

    Attributes:
        step: its training step.
        time: when it was written, in seconds since the epoch.
        metrics: what was measured at that step.
        pinned: whether a user asked to keep it whatever the policies say.
    """

    step: int
    time: float = 0.0
    metrics: Metrics = field(default_factory=dict[str, Any])
    pinned: bool = False


def check_count(value: object, what: str, least: int = 1) -> None:
    """Refuse what is no whole number of that size.

    Raises:
        InvalidArgumentError: it is not.
    """
    if type(value) is not int or value < least:
        problem = f"{what}: expected an int of at least {least}, found {value!r}"
        raise InvalidArgumentError(problem, hint=f"pass {what.split()[-1]}=<int>")


def check_seconds(value: object, what: str) -> None:
    """Refuse what is no positive, finite number of seconds.

    Raises:
        InvalidArgumentError: it is not.
    """
    number = value if isinstance(value, int | float) else math.nan
    if isinstance(value, bool) or not 0 < number < math.inf:
        problem = f"{what}: expected a positive number, found {value!r}"
        raise InvalidArgumentError(problem, hint=f"pass {what.split()[-1]}=<number>")


def check_metric(metric: object, mode: object, what: str) -> None:
    """Refuse what names no metric, or no direction.

    Raises:
        InvalidArgumentError: it does not.
    """
    if not isinstance(metric, str) or not metric:
        problem = f"{what} metric: expected a name, found {metric!r}"
        raise InvalidArgumentError(problem, hint=f'pass {what}("return", "max")')
    if mode not in ("min", "max"):
        problem = f"{what} mode: expected 'min' or 'max', found {mode!r}"
        raise InvalidArgumentError(problem, hint=f'pass {what}({metric!r}, "max")')


@dataclass(frozen=True, slots=True)
class KeepLast:
    """Keep the newest ``count`` checkpoints.

    Example:
        >>> KeepLast(3).count
        3
    """

    count: int

    def __post_init__(self) -> None:
        """Check the count."""
        check_count(self.count, "KeepLast count")

    def choose(self, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        """Return those to keep; the candidates come oldest first."""
        return candidates[-self.count :]


@dataclass(frozen=True, slots=True)
class KeepBest:
    """Keep the ``count`` checkpoints whose metric is best; the newer one of equals.

    A metric that is missing, None, NaN or infinite is never best. A checkpoint with
    other metrics and not this one was measured under another name: it is kept, for
    nobody knows whether it is worse.

    Example:
        >>> KeepBest("return", "max").count
        1
    """

    metric: str
    mode: Mode
    count: int = 1

    def __post_init__(self) -> None:
        """Check metric, mode and count."""
        check_metric(self.metric, self.mode, "KeepBest")
        check_count(self.count, "KeepBest count")

    def choose(self, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        """Return those to keep."""
        best = rank_best(candidates, self.metric, self.mode)[: self.count]
        others = (c for c in candidates if c.metrics and self.metric not in c.metrics)
        return [*best, *others]


@dataclass(frozen=True, slots=True)
class KeepEvery:
    """Keep the first checkpoint at or after every multiple of ``steps``.

    Of the multiple 0 only step 0 itself is kept.

    Example:
        >>> KeepEvery(10_000).steps
        10000
    """

    steps: int

    def __post_init__(self) -> None:
        """Check the number of steps."""
        check_count(self.steps, "KeepEvery steps")

    def choose(self, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        """Return those to keep; the candidates come oldest first."""
        counted = (c for c in candidates if c.step >= self.steps or c.step == 0)
        return _first_of_each((c.step // self.steps, c) for c in counted)


@dataclass(frozen=True, slots=True)
class KeepPerPeriod:
    """Keep the first checkpoint written in every period of ``seconds``.

    Example:
        >>> KeepPerPeriod(3600).seconds
        3600
    """

    seconds: float

    def __post_init__(self) -> None:
        """Check the number of seconds."""
        check_seconds(self.seconds, "KeepPerPeriod seconds")

    def choose(self, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        """Return those to keep; the candidates come oldest first."""
        return _first_of_each((c.time // self.seconds, c) for c in candidates)


KeepPolicy = KeepLast | KeepBest | KeepEvery | KeepPerPeriod


def _first_of_each(pairs: Iterable[tuple[float, Candidate]]) -> Sequence[Candidate]:
    first: dict[float, Candidate] = {}
    for period, candidate in pairs:
        first.setdefault(period, candidate)
    return list(first.values())


def read_metric(metrics: Metrics, metric: str) -> float | int | None:
    """Return a metric that can be compared; None for one that cannot be best."""
    value = metrics.get(metric)
    finite = value is not None and (isinstance(value, int) or math.isfinite(value))
    return value if finite else None


def rank_best(
    candidates: Iterable[Candidate], metric: str, mode: Mode
) -> Sequence[Candidate]:
    """Return the candidates that have the metric, best first, of equals the newer.

    Example:
        >>> from ajaxckpt._retention import Candidate, rank_best
        >>> scores = {100: 0.5, 200: 2.0, 300: float("nan")}
        >>> runs = [Candidate(step=s, metrics={"r": r}) for s, r in scores.items()]
        >>> [c.step for c in rank_best(runs, "r", "max")]
        [200, 100]
    """
    sign = -1 if mode == "max" else 1
    scored = [
        (value, candidate)
        for candidate in candidates
        if (value := read_metric(candidate.metrics, metric)) is not None
    ]
    scored.sort(key=lambda pair: (sign * pair[0], -pair[1].step))
    return [candidate for _, candidate in scored]


def choose_survivors(
    candidates: Iterable[Candidate], policies: Sequence[KeepPolicy] | None
) -> frozenset[int]:
    """Choose what is kept: the union of what each policy keeps.

    The newest and the pinned survive whatever the policies say. Without policies
    (None) everything does.

    Example:
        >>> from ajaxckpt._retention import Candidate, choose_survivors
        >>> run = [Candidate(step=step) for step in range(0, 50, 10)]
        >>> sorted(choose_survivors(run, [KeepLast(2), KeepEvery(20)]))
        [0, 20, 30, 40]
    """
    ordered = sorted(candidates, key=lambda candidate: candidate.step)
    if policies is None:
        return frozenset(candidate.step for candidate in ordered)
    kept = [*ordered[-1:], *(item for item in ordered if item.pinned)]
    for policy in policies:
        kept += policy.choose(ordered)
    return frozenset(candidate.step for candidate in kept)
