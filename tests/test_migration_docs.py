"""The page on migrations says what is so: its blocks and its table's rows run."""

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ajaxckpt
from ajaxckpt import MigrationError, Migrations, restore_into, save_checkpoint
from ajaxckpt._rules import Rules

PAGE = (Path(ajaxckpt.__file__).parent / "MIGRATIONS.md").read_text()
README = (Path(__file__).parent.parent / "README.md").read_text()
ROWS = {
    int(number): code
    for number, code in re.findall(r"^\| (\d+) \|[^|]+\| `(.+)` \|$", PAGE, re.M)
}
X = jnp.arange(6.0).reshape(3, 2)


def registry(number: int) -> Migrations:
    migrations = Migrations("agent")
    exec(compile(ROWS[number], f"row {number}", "exec"), {"m": migrations, "np": np})
    return migrations


def test_every_block_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) >= 10
    names: dict[str, Any] = {"__name__": "page"}
    for number, block in enumerate(blocks):
        exec(compile(block, f"MIGRATIONS.md block {number}", "exec"), names)


def test_the_example_in_the_readme_moves_moments_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    section = README.split("## When the code changes")[1].split("\n## ")[0]
    (block,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(block, "README.md", "exec"), names)
    for net in (names["state"]["params"], names["state"]["opt"]["mu"]):
        np.testing.assert_array_equal(net["trunk"], np.ones(2))


def test_every_verb_is_listed() -> None:
    table = PAGE.split("| verb |")[1].split("\n\n")[0]
    verbs = {name for name in vars(Rules) if not name.startswith("_")} - {"custom"}
    assert verbs == {v for v in re.findall(r"`(\w+)", table) if hasattr(Rules, v)}


def test_the_table_has_eleven_rows() -> None:
    assert sorted(ROWS) == list(range(1, 12))


RESTORED = [
    (4, {"b": {"obs": X, "cum_rewards": X}}, {}, {"b": {"obs": X}}),
    (
        5,
        {"b": {"n": X}},
        {},
        {"b": {"n": X, "first_loss": X * np.nan, "last_loss": X * np.nan}},
    ),
    (6, {"b": {"obs": X}}, {}, {"b": {"obs": X, "next_obs": X[jnp.array([1, 2, 0])]}}),
    (7, {"b": {"obs": X, "raw_obs": X}}, {}, {"b": {"obs": X}}),
    (8, {"obs": X}, {}, {"obs": X, "hidden": None}),
    (
        9,
        {"a": {"opt_state": ((), {"mu": X})}},
        {"agent": "PPO"},
        {"a": {"opt_state": {"mu": X}}},
    ),
    (
        10,
        {"e": {"obs": X, "info": {"mean": X + 1, "var": X * 0 + 4}}},
        {},
        {
            "e": {
                "obs": X,
                "info": {"mean": X + 1, "var": X * 0 + 4, "raw_obs": 3 * X + 1},
            }
        },
    ),
]


@pytest.mark.parametrize("row", RESTORED, ids=lambda row: f"row{row[0]}")
def test_a_row_that_mends_restores_the_values(row: Any, tmp_path: Path) -> None:
    number, old, config, expected = row
    path = tmp_path / "old.safetensors"
    save_checkpoint(old, path, config=config)
    skeleton = jax.tree.map(jnp.zeros_like, expected)
    state = restore_into(skeleton, path, migrations=registry(number))
    assert jax.tree.structure(state) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, state, expected)


REFUSED = [
    (1, {"buffer": {"obs": X}}, {"buffer": {"obs": X}}, {}, "Resume with"),
    (2, {"p": {"ln_f": X}}, {"p": {"w": X}}, {}, "final_norm=True"),
    (2, {"p": {"w": X}}, {"p": {"ln_f": X}}, {}, "final_norm=False"),
    (3, {"p": {"log_std": X}}, {"p": {"log_std_param": X}}, {}, "head's"),
    (3, {"p": {"log_std_param": X}}, {"p": {"log_std": X}}, {}, "parameter's"),
    (7, {"b": {"raw_obs": X}, "n": X}, {"n": X}, {"normalize": True}, "normalised"),
    (11, {"params": {"w": X}}, {"params": {"w": X[:2]}}, {"agent": "APO"}, "of 128"),
]


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: f"row{row[0]}-{row[4]}")
def test_a_row_that_refuses_does_in_its_words(row: Any, tmp_path: Path) -> None:
    number, old, skeleton, config, words = row
    path = tmp_path / "old.safetensors"
    save_checkpoint(old, path, config=config)
    with pytest.raises(MigrationError, match=re.escape(words)):
        restore_into(skeleton, path, migrations=registry(number))


SOUND = [(1, {"n": X}), (2, {"p": {"ln_f": X}}), (2, {"p": {"w": X}})]
SOUND += [(3, {"log_std": X}), (3, {"log_std_param": X}), (11, {"params": {"w": X}})]


@pytest.mark.parametrize("row", SOUND, ids=lambda row: f"row{row[0]}")
def test_a_row_that_refuses_lets_sound_files_pass(row: Any, tmp_path: Path) -> None:
    number, state = row
    path = tmp_path / "same.safetensors"
    save_checkpoint(state, path, config={"agent": "APO"})
    restore_into(state, path, migrations=registry(number))


def test_the_clip_of_another_agent_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "old.safetensors"
    save_checkpoint({"opt_state": ((), {"mu": X})}, path, config={"agent": "SAC"})
    with pytest.raises(ajaxckpt.LayoutMismatchError):
        restore_into({"opt_state": {"mu": X}}, path, migrations=registry(9))
