"""The user's code on the command line: what it prints, raises, ends or returns."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ajaxckpt import plan_restore, save_checkpoint

CODE = """
print("at import")
def skeleton():
    print("building")
    return {"n": 0}
def nothing(): return None
def leaves(): raise SystemExit(0)
def config(): raise RuntimeError("no config")
empty = {}
"""


@pytest.fixture
def plan(tmp_path: Path):
    (tmp_path / "user_more.py").write_text(CODE)
    (tmp_path / "ends.py").write_text("raise SystemExit(0)\n")
    save_checkpoint({"n": 1}, tmp_path / "a.safetensors", config={"lr": 1})

    def run(*options: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "ajaxckpt", "plan", "a.safetensors", *options]
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)

    return run


def test_what_the_users_code_prints_is_not_in_the_json(plan):
    done = plan("--skeleton", "user_more:skeleton", "--json")
    assert json.loads(done.stdout)["plan"]["restores"]


@pytest.mark.parametrize("text", ["ends:x", "user_more:leaves", "user_more:nothing"])
def test_a_skeleton_that_ends_or_is_none_is_wrong_usage(plan, text):
    done = plan("--skeleton", text)
    assert done.returncode == 2
    assert f"--skeleton {text}: " in done.stderr


def test_a_config_that_raises_is_wrong_usage(plan):
    done = plan("--skeleton", "user_more:skeleton", "--config", "user_more:config")
    assert done.returncode == 2
    assert "--config user_more:config: RuntimeError: no config" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_empty_config_is_compared(plan):
    done = plan("--skeleton", "user_more:skeleton", "--config", "user_more:empty")
    assert "config.lr" in done.stdout


def test_a_plan_of_many_leaves_fits_in_a_log(tmp_path: Path):
    state = {f"k{i:04}": 0 for i in range(2000)}
    save_checkpoint(state, tmp_path / "a.safetensors")
    assert len(str(plan_restore(state, tmp_path / "a.safetensors")).splitlines()) < 60
