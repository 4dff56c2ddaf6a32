"""Provenance tells where a checkpoint came from, and never costs one."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from ajaxckpt import _provenance, open_checkpoint, save_checkpoint

SCRIPT = """
import os, sys
from ajaxckpt import save_checkpoint
os.makedirs("gone"); os.chdir("gone"); os.rmdir("../gone")
save_checkpoint({"n": 1}, sys.argv[1])
"""


def git(directory: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    subprocess.run(
        ["git", "-C", str(directory), *identity, *arguments],
        check=True,
        capture_output=True,
    )


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    git(tmp_path, "init")
    (tmp_path / "train.py").write_text("pass\n")
    git(tmp_path, "add", "train.py")
    git(tmp_path, "commit", "-m", "first")
    _provenance._git_facts.cache_clear()
    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "__file__", str(tmp_path / "train.py"), raising=False)
    return tmp_path


def facts(path: Path) -> dict[str, object]:
    save_checkpoint({"n": 1}, path)
    with open_checkpoint(path) as checkpoint:
        return dict(checkpoint.provenance)


def test_the_commit_of_the_script_is_recorded_and_whether_it_changed(
    repository: Path, tmp_path: Path
) -> None:
    commit = subprocess.run(
        ["git", "-C", str(repository), "rev-parse", "HEAD"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    found = facts(tmp_path / "a")
    assert (found["git_commit"], found["git_dirty"]) == (commit, False)
    (repository / "train.py").write_text("changed\n")
    assert facts(tmp_path / "a")["git_dirty"] is False, "asked once per process"
    _provenance._git_facts.cache_clear()
    assert facts(tmp_path / "a")["git_dirty"] is True


def test_versions_and_time_are_recorded_and_no_arguments(tmp_path: Path) -> None:
    found = facts(tmp_path / "a")
    assert {"time", "python", "ajaxckpt", "jax", "jaxlib", "numpy"} <= set(found)
    assert set(found) <= {
        *("time", "python", "ajaxckpt", "jax", "jaxlib", "numpy", "flax", "optax"),
        *("host", "git_commit", "git_dirty"),
    }
    assert found["host"] == platform.node()


def test_the_repositorys_configuration_runs_nothing(
    repository: Path, tmp_path: Path
) -> None:
    mark = tmp_path / "ran"
    git(repository, "config", "core.fsmonitor", f"touch {mark}; false")
    assert facts(tmp_path / "a")["git_commit"]
    assert not mark.exists()


def test_git_variables_of_the_environment_name_no_other_repository(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    assert facts(tmp_path / "a")["git_commit"]


def test_a_working_directory_that_is_gone_fails_no_save(tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(path)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    with open_checkpoint(path) as checkpoint:
        assert checkpoint["n"] == 1
