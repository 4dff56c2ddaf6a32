"""What a restore notes of a config and of versions: only what differs, then and now."""

import math
from typing import Any

import pytest

from ajaxckpt import _notes as notes
from ajaxckpt._notes import note_config, note_provenance
from ajaxckpt._plain import plain_config


@pytest.mark.parametrize(
    ("then", "now", "lines"),
    [
        ({"lr": 1.0}, {"lr": 2.0}, ["config.lr: 1.0 then, 2.0 now"]),
        ({"k": 8}, {"k": "8"}, ['config.k: 8 then, "8" now']),
        ({"k": 1}, {"k": 1.0}, ["config.k: 1 then, 1.0 now"]),
        ({"k": None}, {}, ["config.k: none then, absent now"]),
        ({}, {"k": None}, ["config.k: absent then, none now"]),
        (None, {"k": 1}, ["config.k: absent then, 1 now"]),
        ({"a": {"b.c": 1}}, {"a": {"b.c": 2}}, ['config.a."b.c": 1 then, 2 now']),
        ({"l": [{"w": 1}]}, {"l": [{"w": 2}]}, ["config.l.0.w: 1 then, 2 now"]),
        ({"k": math.inf}, {"k": -math.inf}, ["config.k: inf then, -inf now"]),
    ],
)
def test_an_entry_that_differs_is_noted(then: Any, now: Any, lines: list[str]) -> None:
    assert list(note_config(then, plain_config(now))) == lines


@pytest.mark.parametrize(
    "config",
    [
        {"k": math.inf, "l": [-math.inf, {"n": math.nan}]},
        {"l": [{"a": 1, "b": 2}]},
    ],
)
def test_the_same_config_is_not_noted(config: dict[str, Any]) -> None:
    now = {
        **config,
        "l": [
            dict(reversed(i.items())) if isinstance(i, dict) else i for i in config["l"]
        ],
    }
    assert list(note_config(config, plain_config(now))) == []


def test_no_config_of_now_is_no_difference() -> None:
    assert list(note_config({"lr": 1.0}, None)) == []


def test_versions_that_differ_are_noted_and_the_time_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = {"time": "b", "jax": "0.10.2", "numpy": "2.0.0", "git_dirty": None}
    monkeypatch.setattr(notes, "gather_provenance", lambda: now)
    then = {"time": "a", "jax": "0.9.0", "numpy": "2.0.0", "flax": "0.12.0"}
    assert list(note_provenance(then)) == [
        "jax: 0.9.0 then, 0.10.2 now",
        "flax: 0.12.0 then, absent now",
    ]
