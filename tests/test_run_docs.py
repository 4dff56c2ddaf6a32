"""The page on runs says what is so: its blocks run, and its tests exist."""

import re
from pathlib import Path
from typing import Any

import pytest
from test_docs import existing_tests

import ajaxckpt

ROOT = Path(__file__).parent.parent
PAGE = (Path(ajaxckpt.__file__).parent / "RUNS.md").read_text()


def test_every_block_runs_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) >= 3
    names: dict[str, Any] = {"__name__": "page"}
    for number, block in enumerate(blocks):
        exec(compile(block, f"RUNS.md block {number}", "exec"), names)


def rows(heading: str) -> list[list[str]]:
    table = PAGE.split(heading)[1].split("\n\n")[0]
    cells = (line.strip("| ").split(" | ") for line in table.splitlines()[2:])
    return [row for row in cells if len(row) > 1]


def test_every_row_names_tests_that_exist() -> None:
    features, weaknesses = rows("| # | TorchRL |"), rows("| weakness |")
    assert [row[0] for row in features] == [str(n) for n in range(1, 42)]
    assert len(weaknesses) == 12
    for row in (*features, *weaknesses):
        named = re.findall(r"`(tests/\w+\.py)::(\w+)`", row[-1])
        assert named, row
        for path, name in named:
            assert name in existing_tests(ROOT / path), f"{path}::{name}"


def test_every_verb_and_policy_is_on_the_page() -> None:
    policies = {n for n in ajaxckpt.__all__ if re.match("(Keep|Save)[A-Z]", n)}
    verbs = {"restore_or_init", "restore", "restore_best", "rollback", "step", "save"}
    for name in policies | verbs | {"prune", "newest", "best", "log"}:
        assert re.search(rf"\b{name}\b", PAGE), name
