"""The helper for a user's own suite: it passes for good files and nothing else."""

import doctest
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

import ajaxckpt.testing
from ajaxckpt import Migrations, save_checkpoint
from ajaxckpt.testing import assert_files_restore


@pytest.fixture
def goldens(tmp_path: Path) -> Path:
    folder = tmp_path / "goldens"
    for number in (1, 2):
        state = {"w": jnp.full(3, float(number)), "step": number}
        save_checkpoint(state, folder / f"v{number}.safetensors")
    return folder


def build() -> dict[str, object]:
    return {"w": jnp.zeros(3), "step": 0}


@pytest.mark.parametrize("how", ["directory", "pattern", "iterable", "file"])
def test_every_file_is_restored_and_checked(goldens: Path, how: str) -> None:
    files = sorted(map(str, goldens.iterdir()))
    paths = {
        "directory": goldens,
        "pattern": str(goldens / "v*.safetensors"),
        "iterable": (Path(file) for file in files),
        "file": files[0],
    }[how]
    seen: dict[str, int] = {}
    assert_files_restore(
        paths, build, check=lambda state, path: seen.update({path: state["step"]})
    )
    expected = {files[0]: 1, files[1]: 2}
    assert seen == (expected if how != "file" else {files[0]: 1})


def test_a_wrong_skeleton_lists_every_file_with_its_message(goldens: Path) -> None:
    with pytest.raises(AssertionError) as caught:
        assert_files_restore(goldens, lambda: {"v": jnp.zeros(3), "step": 0})
    message = str(caught.value)
    assert message.startswith("2 of 2 files do not restore\n")
    for number in (1, 2):
        assert f"v{number}.safetensors: cannot restore: " in message
    assert message.count("v: expected float32[3], found nothing") == 2


def test_a_file_among_good_ones_that_fails_is_named_alone(goldens: Path) -> None:
    (goldens / "v2.safetensors").write_bytes(b"")
    with pytest.raises(AssertionError, match="1 of 2 files do not") as caught:
        assert_files_restore(goldens, build)
    assert "v2.safetensors" in str(caught.value)
    assert "v1.safetensors" not in str(caught.value)


@pytest.mark.parametrize("how", ["directory", "pattern", "iterable"])
def test_nothing_to_restore_is_a_failure(tmp_path: Path, how: str) -> None:
    paths = {"directory": tmp_path, "pattern": str(tmp_path / "*"), "iterable": []}
    with pytest.raises(AssertionError, match="no files to restore"):
        assert_files_restore(paths[how], build)


def test_a_file_named_but_absent_is_a_failure(goldens: Path) -> None:
    with pytest.raises(AssertionError, match=r"v3\.safetensors"):
        assert_files_restore([goldens / "v3.safetensors"], build)


def test_a_failing_check_names_the_file(goldens: Path) -> None:
    def check(state: dict[str, int], path: str) -> None:
        assert state["step"] == 1, "the step is not 1"

    with pytest.raises(AssertionError, match=r"1 of 2 files") as caught:
        assert_files_restore(goldens, build, check=check)
    assert "v2.safetensors: check failed: the step is not 1" in str(caught.value)


def test_an_error_of_the_skeleton_builder_passes_through(goldens: Path) -> None:
    def broken() -> object:
        raise RuntimeError("no such environment")

    with pytest.raises(RuntimeError, match="no such environment"):
        assert_files_restore(goldens, broken)


def test_registries_and_exceptions_are_passed_on(goldens: Path) -> None:
    registry = Migrations("agent")
    registry.step(1, "weights by name").move("w", "kernel")
    skeleton = {"kernel": jnp.zeros(2), "new": 5}
    assert_files_restore(
        goldens,
        lambda: skeleton,
        migrations=(item for item in [registry]),
        keep="new",
        ignore="step",
        resize="kernel",
        check=lambda state, _: None if state["new"] == 5 else pytest.fail("new"),
    )


def test_importing_it_loads_no_jax() -> None:
    code = "import sys, ajaxckpt.testing; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_examples_in_its_docstrings_run(goldens: Path) -> None:
    names = {"path": str(goldens / "v1.safetensors"), "jnp": jnp}
    result = doctest.testmod(ajaxckpt.testing, extraglobs=names)
    assert (result.failed, result.attempted) == (0, 9)
