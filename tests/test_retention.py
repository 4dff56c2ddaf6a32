"""What is kept of a run: a pure choice, as a table and by its properties."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ajaxckpt import InvalidArgumentError, KeepBest, KeepEvery, KeepLast, KeepPerPeriod
from ajaxckpt._retention import Candidate, choose_survivors, rank_best

NAN, INF = math.nan, math.inf


def run(*scores: Any, pinned: tuple[int, ...] = (), metric: str = "m") -> list:
    """Checkpoints at 100, 200, … an hour apart, each with its score."""
    return [
        Candidate(
            step=100 * i,
            time=3600.0 * i,
            metrics={} if score == "absent" else {metric: score},
            pinned=100 * i in pinned,
        )
        for i, score in enumerate(scores, 1)
    ]


FIVE = run(1, 2, 3, 4, 5)


@pytest.mark.parametrize(
    ("candidates", "policies", "kept"),
    [
        (FIVE, None, [100, 200, 300, 400, 500]),
        (FIVE, [], [500]),
        ([], [KeepLast(3)], []),
        (FIVE, [KeepLast(1)], [500]),
        (FIVE, [KeepLast(2)], [400, 500]),
        (FIVE, [KeepLast(9)], [100, 200, 300, 400, 500]),
        # the scores get worse and worse: the newest stay all the same
        (FIVE, [KeepLast(2), KeepBest("m", "min")], [100, 400, 500]),
        (FIVE, [KeepBest("m", "min", 2)], [100, 200, 500]),
        (FIVE, [KeepBest("m", "max", 2)], [400, 500]),
        (run(7, NAN, 9, None, "absent"), [KeepBest("m", "max", 3)], [100, 300, 500]),
        (run(NAN, None, "absent", -INF, INF), [KeepBest("m", "max", 4)], [500]),
        (run(3, 3, 3, 1), [KeepBest("m", "max")], [300, 400]),
        (run(1.5, 2, True, 0), [KeepBest("m", "max")], [200, 400]),
        (run(2**70, 2**70 + 1, 0), [KeepBest("m", "max")], [200, 300]),
        # measured under another name: nobody knows whether they are worse
        (FIVE, [KeepBest("other", "max")], [100, 200, 300, 400, 500]),
        (run(1, 2, "absent", "absent"), [KeepBest("m", "min")], [100, 400]),
        (FIVE, [KeepEvery(200)], [200, 400, 500]),
        (FIVE, [KeepEvery(1000)], [500]),
        (
            [Candidate(step=s) for s in (0, 3, 64, 128, 192, 256)],
            [KeepEvery(100)],
            None,
        ),
        (FIVE, [KeepPerPeriod(7200)], [100, 200, 400, 500]),
        (FIVE, [KeepPerPeriod(1)], [100, 200, 300, 400, 500]),
        (run(1, 2, 3, pinned=(100,)), [KeepLast(1)], [100, 300]),
        (run(1, 2, 3, pinned=(100, 200)), [], [100, 200, 300]),
    ],
)
def test_what_survives(candidates: list, policies: Any, kept: Any) -> None:
    if kept is None:  # vectorised steps: the first at or after 100 and 200, and 0
        kept = [0, 128, 256]
    assert sorted(choose_survivors(candidates, policies)) == kept
    assert sorted(choose_survivors(candidates[::-1], policies)) == kept


def test_of_equal_scores_the_newer_is_better() -> None:
    assert [c.step for c in rank_best(run(3, 5, 5, 4), "m", "max")] == [
        *(300, 200),
        *(400, 100),
    ]


scores = st.none() | st.floats() | st.integers(-5, 5)
policies = st.one_of(
    st.builds(KeepLast, st.integers(1, 4)),
    st.builds(
        KeepBest, st.just("m"), st.sampled_from(["min", "max"]), st.integers(1, 3)
    ),
    st.builds(KeepEvery, st.integers(1, 50)),
    st.builds(KeepPerPeriod, st.floats(0.5, 500)),
)
candidates = st.lists(
    st.builds(
        Candidate,
        step=st.integers(0, 100),
        time=st.floats(0, 1e6),
        metrics=st.fixed_dictionaries({}, optional={"m": scores}),
        pinned=st.booleans(),
    ),
    max_size=12,
    unique_by=lambda c: c.step,
)


@given(candidates, st.lists(policies, max_size=4))
def test_the_newest_and_the_pinned_always_survive(found: list, chosen: list) -> None:
    kept = choose_survivors(found, chosen)
    assert {c.step for c in found if c.pinned} <= kept
    assert not found or max(c.step for c in found) in kept
    assert kept <= {c.step for c in found}


@given(candidates, st.lists(policies, max_size=3), policies)
def test_a_further_policy_never_deletes_more(
    found: list, chosen: list, more: Any
) -> None:
    assert choose_survivors(found, chosen) <= choose_survivors(found, [*chosen, more])


@given(candidates, policies)
def test_pruning_twice_is_pruning_once(found: list, policy: Any) -> None:
    once = choose_survivors(found, [policy])
    left = [c for c in found if c.step in once]
    assert choose_survivors(left, [policy]) == once


@given(candidates, st.sampled_from(["min", "max"]), st.integers(1, 3))
def test_a_worse_metric_never_deletes_a_better_one(
    found: list, mode: Any, count: int
) -> None:
    kept = choose_survivors(found, [KeepBest("m", mode, count)])
    for lost in (c for c in found if c.step not in kept):
        score = lost.metrics.get("m")
        if score is None or not math.isfinite(score):
            continue
        better = [
            c
            for c in found
            if (other := c.metrics.get("m")) is not None
            and math.isfinite(other)
            and (other >= score if mode == "max" else other <= score)
            and c.step in kept
        ]
        assert len(better) >= count


@given(candidates)
def test_nan_and_none_are_never_best(found: list) -> None:
    for mode in ("min", "max"):
        for candidate in rank_best(found, "m", mode):
            assert math.isfinite(candidate.metrics["m"])


WRONG: list[tuple[Any, str]] = [
    (lambda: KeepLast(0), "KeepLast count: expected an int of at least 1, found 0"),
    (lambda: KeepLast(True), "found True"),
    (lambda: KeepLast(2.0), "found 2.0"),  # type: ignore[arg-type]
    (lambda: KeepBest("", "max"), "KeepBest metric: expected a name, found ''"),
    (lambda: KeepBest("m", "best"), "expected 'min' or 'max', found 'best'"),  # type: ignore[arg-type]
    (lambda: KeepBest("m", "max", 0), "KeepBest count: expected an int"),
    (lambda: KeepEvery(0), "KeepEvery steps: expected an int of at least 1, found 0"),
    (lambda: KeepPerPeriod(0), "KeepPerPeriod seconds: expected a positive number"),
    (lambda: KeepPerPeriod(NAN), "found nan"),
    (lambda: KeepPerPeriod(True), "found True"),
    (lambda: KeepPerPeriod("1"), "found '1'"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("build", "message"), WRONG)
def test_a_wrong_policy_is_refused_when_it_is_written(build: Any, message: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        build()
    assert message in str(caught.value)
    assert caught.value.hint
