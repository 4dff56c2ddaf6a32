"""The commands that load the user's code: what fits, what does not, upgraded copies."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from ajaxckpt import open_checkpoint, restore_into, save_checkpoint
from ajaxckpt._cli import main
from ajaxckpt._document import CONTRACT

MODULE = """
import jax.numpy as jnp
from ajaxckpt import Migrations

migrations = Migrations("agent")
migrations.step(1, "a trunk").move("Dense_0", "trunk")
config = {"lr": 0.2}

class spaces:
    @staticmethod
    def skeleton():
        return {"trunk": {"w": jnp.zeros(3)}, "n": 0}

def same():
    return {"Dense_0": {"w": jnp.zeros(3)}, "n": 0}

def nothing():
    return None

def broken():
    raise RuntimeError("no environment")
"""


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return a checkpoint in a directory that holds a user's module."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "user_code.py").write_text(MODULE)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "user_code", raising=False)
    state = {"Dense_0": {"w": jnp.arange(3.0)}, "n": 4}
    save_checkpoint(state, "old.safetensors", step=4, config={"lr": 0.1})
    return "old.safetensors"


SKELETON = ("--skeleton", "user_code:spaces.skeleton")
RULES = ("--migrations", "user_code:migrations")


def test_what_would_not_restore_is_a_finding_with_the_way_out(
    path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", path, *SKELETON]) == 1
    out = capsys.readouterr().out
    assert "does not restore: 2 of 3 leaves do not fit" in out
    assert 'step.move("Dense_0", "trunk")' in out


def test_what_would_restore_is_none(
    path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = ("--config", "user_code:config")
    assert main(["plan", path, *SKELETON, *RULES, *config]) == 0
    out = capsys.readouterr().out
    assert ": restores\n" in out
    assert re.search(r"trunk\.w +migrate +float32\[3\] +from Dense_0\.w, by agent", out)
    assert "note  config.lr: 0.1 then, 0.2 now" in out
    assert main(["plan", path, "--skeleton", "user_code:same"]) == 0


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (["--keep", "trunk.w", "--ignore", "Dense_0"], 0),
        (["--keep", "trunk.w"], 1),
        (["--keep", "nowhere"], 2),
    ],
)
def test_exceptions_are_those_of_restore_into(
    options: list[str], code: int, path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", path, *SKELETON, *options]) == code
    assert bool(capsys.readouterr().err) == (code == 2)


def test_below_a_subtree(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("part.py").write_text("import numpy as np\nw = np.zeros(3, np.float32)\n")
    sys.modules.pop("part", None)
    arguments = ["plan", path, "--skeleton", "part:w", "--subtree", "Dense_0.w"]
    assert main(arguments) == 0
    assert "below Dense_0.w: restores" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("user_code", "expected module:name"),
        ("no_such_module:x", "ModuleNotFoundError"),
        ("user_code:no_such_name", "AttributeError"),
        ("user_code:broken", "RuntimeError: no environment"),
    ],
)
def test_what_cannot_be_loaded_is_wrong_usage(
    text: str, words: str, path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", path, "--skeleton", text]) == 2
    error = capsys.readouterr().err
    assert f"--skeleton {text}: " in error
    assert words in error
    assert "Traceback" not in error


def test_a_rule_that_cannot_be_applied_is_a_finding(
    path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    save_checkpoint({"trunk": {"w": jnp.zeros(3)}, "n": 4}, path)
    assert main(["plan", path, *SKELETON, *RULES]) == 1
    assert 'agent step 1 "a trunk": move Dense_0 to trunk: finds nothing' in (
        capsys.readouterr().err
    )


def keys_of(value: Any, place: str = "") -> set[str]:
    """Return the paths of the leaves of a document, as the contract spells them."""
    if isinstance(value, dict):
        inner = [keys_of(x, f"{place}.{key}") for key, x in value.items()]
        return {key for keys in inner for key in keys}
    if isinstance(value, list):
        return {key for item in value for key in keys_of(item, f"{place}[]")}
    return {place.removeprefix(".")}


def promised(command: str) -> set[str]:
    return {line.split()[0] for line in CONTRACT[command].splitlines() if line}


def test_json_keeps_the_contract(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    seen: set[str] = set()
    config = ("--config", "user_code:config")
    for options in (config, RULES, ("--keep", "trunk.w", "--ignore", "Dense_0")):
        code = main(["plan", path, *SKELETON, *options, "--json"])
        document = json.loads(capsys.readouterr().out)
        assert document["plan"]["restores"] == (code == 0)
        seen |= keys_of(document)
    assert main(["plan", "absent", *SKELETON, "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["plan"] is None
    seen |= keys_of(document)
    assert seen <= promised("plan")
    unseen = promised("plan") - seen
    assert all("adopt" in k or "drop" in k or "resize" in k for k in unseen), unseen
    main(["migrate", path, "new.safetensors", *RULES, "--json"])
    document = json.loads(capsys.readouterr().out)
    assert keys_of(document) <= promised("migrate")
    assert document["copy"]["parent_id"] == open_checkpoint(path).checkpoint_id


def test_an_upgraded_copy_restores_without_migrations_and_the_old_file_stays(
    path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = Path(path).read_bytes()
    assert main(["migrate", path, "new.safetensors", *RULES, *SKELETON]) == 0
    assert capsys.readouterr().out.startswith("verified  2 leaves")
    assert Path(path).read_bytes() == before
    skeleton = {"trunk": {"w": jnp.zeros(3)}, "n": 0}
    restored = restore_into(skeleton, "new.safetensors")
    assert (restored["trunk"]["w"].tolist(), restored["n"]) == ([0.0, 1.0, 2.0], 4)
    assert main(["migrate", path, "new.safetensors", *RULES]) == 2
    assert "is there already" in capsys.readouterr().err


def test_a_copy_that_would_not_fit_is_not_written(
    path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = ("--skeleton", "user_code:same")
    assert main(["migrate", path, "new.safetensors", *RULES, *wrong]) == 1
    assert "would not fit the skeleton" in capsys.readouterr().err
    none = ("--skeleton", "user_code:nothing")
    assert main(["migrate", path, "new.safetensors", *RULES, *none]) == 2
    assert not Path("new.safetensors").exists()


def test_from_a_shell_the_current_directory_is_searched(path: str) -> None:
    command = [sys.executable, "-m", "ajaxckpt", "plan", path, *SKELETON, *RULES]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "restores" in done.stdout


def test_a_copy_needs_no_jax(path: str) -> None:
    Path("rules.py").write_text(
        "from ajaxckpt import Migrations\n"
        'migrations = Migrations("agent")\n'
        'migrations.step(1, "a trunk").move("Dense_0", "trunk")\n'
    )
    code = (
        "import sys; sys.modules['jax'] = None\n"
        "from ajaxckpt._cli import main\n"
        f"sys.exit(main(['migrate', '{path}', 'new.safetensors', "
        "'--migrations', 'rules:migrations']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "trunk.w" in open_checkpoint("new.safetensors")
