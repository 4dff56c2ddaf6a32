"""What was measured at a step, when it is measured, and the best of it so far.

Knows metrics and policies; knows no states or threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

from ajaxckpt._errors import InvalidArgumentError
from ajaxckpt._plain import plain_metrics, read_json
from ajaxckpt._retention import Candidate, Metrics, Mode, rank_best, read_metric
from ajaxckpt._schedule import SaveOnImprovement, SavePolicy, metrics_needed

Measured = Mapping[str, Any] | Callable[[], Mapping[str, Any] | None] | None
Best = dict[tuple[str, Mode], float]


def given_metrics(metrics: Measured) -> Metrics:
    """Return metrics as far as they are known without measuring."""
    if metrics is None or callable(metrics):
        return {}
    plain = dict(plain_metrics(metrics))
    return cast("dict[str, Any]", read_json(plain))


def measure(metrics: Measured, policies: Sequence[object]) -> Metrics:
    """Return metrics, measuring them if they are a function.

    Raises:
        InvalidArgumentError: one that a policy names is not among them, or one is
            not a single number.
    """
    measured = metrics() if callable(metrics) else metrics
    if measured is None:
        return {}
    found = given_metrics(measured)
    for name in metrics_needed(policies):
        if name not in found:
            given = ", ".join(found) or "none"
            raise InvalidArgumentError(
                f"metrics: {name!r}, which a policy names, is not among {given}",
                hint=f"measure it, or pass {name!r}: None where it was not",
            )
    return found


def refuse_function(metrics: Measured, policies: Sequence[SavePolicy]) -> None:
    """Refuse metrics that nobody has seen where they decide whether to save.

    Raises:
        InvalidArgumentError: they are a function.
    """
    if callable(metrics) and any(isinstance(p, SaveOnImprovement) for p in policies):
        raise InvalidArgumentError(
            "SaveOnImprovement cannot see metrics that are a function",
            hint="pass the metrics themselves, measured at every step",
        )


def better_of(best: Best, other: Best) -> Best:
    """Return the better value of each metric.

    Example:
        >>> from ajaxckpt._measuring import better_of
        >>> better_of({("r", "max"): 1.0}, {("r", "max"): 2.0, ("l", "min"): 3.0})
        {('r', 'max'): 2.0, ('l', 'min'): 3.0}
    """
    merged = dict(best)
    for (metric, mode), value in other.items():
        choose = max if mode == "max" else min
        merged[metric, mode] = choose(value, best.get((metric, mode), value))
    return merged


def find_best(policies: Sequence[SavePolicy], candidates: Iterable[Candidate]) -> Best:
    """Return the best value so far of each metric that decides whether to save."""
    found, best = list(candidates), Best()
    for policy in policies:
        if not isinstance(policy, SaveOnImprovement):
            continue
        if ranked := rank_best(found, policy.metric, policy.mode):
            value = read_metric(ranked[0].metrics, policy.metric)
            best[policy.metric, policy.mode] = 0 if value is None else value
    return best
