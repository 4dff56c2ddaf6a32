"""When a run saves: a pure decision."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ajaxckpt import InvalidArgumentError, SaveAt, SaveEvery, SaveOnImprovement
from ajaxckpt._schedule import Moment, find_reasons


def at(step: int, **facts: Any) -> Moment:
    return Moment(step=step, **{"seconds": 0.0, **facts})


BEST = {("r", "max"): 5.0, ("r", "min"): 5.0}


@pytest.mark.parametrize(
    ("policy", "moment", "reason"),
    [
        (SaveEvery(steps=20), at(19), ""),
        (SaveEvery(steps=20), at(20), "every 20 steps"),
        (SaveEvery(steps=20), at(0), ""),
        (SaveEvery(steps=20), at(21, last_step=20), ""),
        # steps of 64 environments: the first at or after a multiple
        (SaveEvery(steps=100), at(128, last_step=0), "every 100 steps"),
        (SaveEvery(steps=100), at(192, last_step=128), ""),
        (SaveEvery(steps=100), at(256, last_step=128), "every 100 steps"),
        # resumed at 21: the multiples stay where they are
        (SaveEvery(steps=20), at(39, last_step=21), ""),
        (SaveEvery(steps=20), at(40, last_step=21), "every 20 steps"),
        (SaveEvery(steps=0), at(10**9), ""),
        (SaveEvery(), at(10**9, seconds=1e9), ""),
        (SaveEvery(minutes=2), at(1, seconds=119.0), ""),
        (SaveEvery(minutes=2), at(1, seconds=120.0), "every 2 minutes"),
        (SaveEvery(minutes=2), at(1, seconds=220.0, last_seconds=101.0), ""),
        (SaveEvery(steps=9, minutes=2), at(3, seconds=120.0), "every 2 minutes"),
        (SaveEvery(steps=9, minutes=2), at(9, seconds=3.0), "every 9 steps"),
        (SaveAt(7, 30), at(6), ""),
        (SaveAt(7, 30), at(7), "step 7"),
        (SaveAt(30, 7), at(8, last_step=3), "step 7"),
        (SaveAt(7, 30), at(8, last_step=7), ""),
        (SaveAt(0), at(0), "step 0"),
        (SaveAt(), at(5), ""),
        (SaveOnImprovement("r", "max"), at(1, metrics={"r": 5.0}, best=BEST), ""),
        (
            SaveOnImprovement("r", "max"),
            at(1, metrics={"r": 5.1}, best=BEST),
            "r improved",
        ),
        (
            SaveOnImprovement("r", "min"),
            at(1, metrics={"r": 4.9}, best=BEST),
            "r improved",
        ),
        (SaveOnImprovement("r", "min"), at(1, metrics={"r": math.nan}), ""),
        (SaveOnImprovement("r", "max"), at(1, metrics={"r": None}), ""),
        (SaveOnImprovement("r", "max"), at(1, metrics={"r": math.inf}), ""),
        (SaveOnImprovement("r", "max"), at(1, metrics={"r": -9.0}), "r improved"),
        (SaveOnImprovement("r", "max"), at(1, metrics={"s": 1.0}), ""),
    ],
)
def test_whether_a_save_is_due(policy: Any, moment: Moment, reason: str) -> None:
    assert find_reasons([policy], moment) == ((reason,) if reason else ())


def test_every_policy_gives_its_reason() -> None:
    moment = at(40, seconds=600.0, metrics={"r": 1.0})
    policies = [SaveEvery(steps=20), SaveAt(40), SaveOnImprovement("r", "max")]
    assert find_reasons(policies, moment) == ("every 20 steps", "step 40", "r improved")


def saves(every: int, steps: list[int], last: int = 0) -> list[int]:
    """The steps at which a loop that reports these steps saves."""
    saved: list[int] = []
    for step in steps:
        if find_reasons([SaveEvery(steps=every)], at(step, last_step=last)):
            saved.append(step)
            last = step
    return saved


@given(
    st.integers(1, 30),
    st.lists(st.integers(1, 40), min_size=1, max_size=40),
    st.integers(0, 39),
)
def test_a_resumed_run_saves_at_the_steps_of_the_unbroken_one(
    every: int, strides: list[int], cut: int
) -> None:
    steps = [sum(strides[: i + 1]) for i in range(len(strides))]
    whole = saves(every, steps)
    resumed_at = steps[cut % len(steps)]
    before = [step for step in steps if step <= resumed_at]
    after = [step for step in steps if step > resumed_at]
    # the first half ends with a save of its last step, as leaving a run does
    assert saves(every, before) + saves(every, after, resumed_at) == whole


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: SaveEvery(steps=-1), "SaveEvery steps: expected an int"),
        (lambda: SaveEvery(steps=1.5), "found 1.5"),
        (lambda: SaveEvery(minutes=-2), "SaveEvery minutes: expected a positive"),
        (lambda: SaveEvery(minutes=math.nan), "found nan"),
        (lambda: SaveAt(3, -1), "SaveAt steps: expected an int of at least 0"),
        (lambda: SaveOnImprovement("r", "up"), "found 'up'"),
        (lambda: SaveOnImprovement(3, "max"), "expected a name, found 3"),
    ],
)
def test_a_wrong_policy_is_refused_when_it_is_written(build: Any, message: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        build()
    assert message in str(caught.value)
    assert caught.value.hint
