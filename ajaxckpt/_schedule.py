"""When a run saves: policies, and the pure decision whether one is due.

Knows steps, seconds and metrics; knows no files and no clock.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ajaxckpt._errors import InvalidArgumentError
from ajaxckpt._retention import (
    Metrics,
    Mode,
    check_count,
    check_metric,
    check_seconds,
    read_metric,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """What a policy may know when a step is reported.

    Attributes:
        step: the step reported.
        seconds: what the clock says.
        last_step: the step of the last save or restore, 0 before any.
        last_seconds: what the clock said then, or when the run was opened.
        metrics: what was measured at this step, if that is known already.
        best: per metric and mode, the best value of the checkpoints so far.
    """

    step: int
    seconds: float
    last_step: int = 0
    last_seconds: float = 0.0
    metrics: Metrics = field(default_factory=dict[str, Any])
    best: Mapping[tuple[str, Mode], float] = field(
        default_factory=dict[tuple[str, Mode], float]
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveEvery:
    """Save when a multiple of ``steps`` was passed, or after so many ``minutes``.

    Each is off where it is None or 0. Multiples are counted from step 0, so that a
    resumed run saves at the steps at which the unbroken one does.

    Example:
        >>> SaveEvery(steps=1_000, minutes=10).steps
        1000
    """

    steps: int | None = None
    minutes: float | None = None

    def __post_init__(self) -> None:
        """Check the intervals."""
        if self.steps:
            check_count(self.steps, "SaveEvery steps")
        if self.minutes:
            check_seconds(self.minutes, "SaveEvery minutes")

    def find_reason(self, moment: Moment) -> str:
        """Say why a save is due; empty if none is."""
        steps, minutes = self.steps or 0, self.minutes or 0
        if steps and moment.step // steps > moment.last_step // steps:
            return f"every {steps} steps"
        if minutes and moment.seconds - moment.last_seconds >= 60 * minutes:
            return f"every {minutes:g} minutes"
        return ""


@dataclass(frozen=True, slots=True, init=False)
class SaveAt:
    """Save at given steps, or at the first step reported after each.

    Example:
        >>> SaveAt(1_000, 50_000).steps
        (1000, 50000)
    """

    steps: tuple[int, ...]

    def __init__(self, *steps: int) -> None:
        """Take the steps, in any order."""
        for step in steps:
            check_count(step, "SaveAt steps", 0)
        object.__setattr__(self, "steps", tuple(sorted(steps)))

    def find_reason(self, moment: Moment) -> str:
        """Say why a save is due; empty if none is."""
        for step in self.steps:
            if moment.last_step < step <= moment.step or step == moment.step == 0:
                return f"step {step}"
        return ""


@dataclass(frozen=True, slots=True)
class SaveOnImprovement:
    """Save when a metric is better than at every checkpoint of the run so far.

    Example:
        >>> SaveOnImprovement("return", "max").metric
        'return'
    """

    metric: str
    mode: Mode

    def __post_init__(self) -> None:
        """Check metric and mode."""
        check_metric(self.metric, self.mode, "SaveOnImprovement")

    def find_reason(self, moment: Moment) -> str:
        """Say why a save is due; empty if none is."""
        value = read_metric(moment.metrics, self.metric)
        if value is None:
            return ""
        best = moment.best.get((self.metric, self.mode))
        better = best is None or (value > best if self.mode == "max" else value < best)
        return f"{self.metric} improved" if better else ""


SavePolicy = SaveEvery | SaveAt | SaveOnImprovement


def find_reasons(policies: Sequence[SavePolicy], moment: Moment) -> tuple[str, ...]:
    """Return why a save is due, one reason per policy; empty if none is.

    Example:
        >>> from ajaxckpt._schedule import Moment, find_reasons
        >>> find_reasons([SaveEvery(steps=20)], Moment(step=21, seconds=0.0))
        ('every 20 steps',)
    """
    reasons = (policy.find_reason(moment) for policy in policies)
    return tuple(filter(None, reasons))


def metrics_needed(policies: Sequence[object]) -> Iterator[str]:
    """Yield the metrics that policies name."""
    for policy in policies:
        if (metric := getattr(policy, "metric", None)) is not None:
            yield metric


def refuse_other(policies: object, kinds: Any, argument: str) -> tuple[Any, ...]:
    """Return policies as a tuple; one alone stands for itself.

    Raises:
        InvalidArgumentError: something else is among them.
    """
    found = (policies,) if isinstance(policies, kinds) else policies
    if not isinstance(found, list | tuple) or not all(
        isinstance(policy, kinds)
        for policy in found  # pyright: ignore[reportUnknownVariableType]
    ):
        names = ", ".join(kind.__name__ for kind in kinds.__args__)
        problem = f"{argument}: expected policies, found {policies!r}"
        raise InvalidArgumentError(problem, hint=f"pass one or several of {names}")
    return tuple(found)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
