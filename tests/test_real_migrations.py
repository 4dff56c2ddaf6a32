"""Real layout changes, as the example has them: values in their places, bit for bit."""

import ast
import hashlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ajaxckpt import (
    LayoutMismatchError,
    MigrationError,
    Migrations,
    restore_into,
    save_checkpoint,
)

SCRIPT = Path(__file__).parent.parent / "examples" / "migrations.py"


def load_example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("migrations_example", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


example = load_example()
CONFIG = {"agent": "PPO"}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "old.safetensors"


def migrate(name: str, path: Path, **config: Any) -> tuple[Any, Any]:
    """Return an example's old state, and what becomes of it."""
    migrations, old, new = example.EXAMPLES[name]
    state = old()
    save_checkpoint(state, path, config={**CONFIG, **config})
    before = hashlib.sha256(path.read_bytes()).digest()
    restored = restore_into(new(), path, migrations=migrations)
    assert hashlib.sha256(path.read_bytes()).digest() == before
    assert jax.tree.all(jax.tree.map(lambda x: isinstance(x, jax.Array), restored))
    return state, restored


def bits(left: Any, right: Any) -> None:
    left, right = np.asarray(left), np.asarray(right)
    assert (left.dtype, left.shape) == (right.dtype, right.shape)
    assert left.tobytes() == right.tobytes()


def test_a_next_observations_are_those_of_the_following_row(path: Path) -> None:
    old, new = migrate("a next observations", path)
    obs = np.asarray(old["buffer"].experience["obs"])
    expected = np.stack([obs[:, (row + 1) % 6] for row in range(6)], axis=1)
    bits(new["buffer"].experience["next_obs"], expected)
    bits(new["buffer"].experience["obs"], obs)
    bits(new["buffer"].current_index, np.int32(2))


def test_a_a_replay_that_has_them_is_left_alone(path: Path) -> None:
    migrations, _, new = example.EXAMPLES["a next observations"]
    state = new()
    state["buffer"].experience["next_obs"] = jnp.ones((2, 6, 3))
    save_checkpoint(state, path)
    restored = restore_into(new(), path, migrations=migrations)
    bits(restored["buffer"].experience["next_obs"], np.ones((2, 6, 3), np.float32))


def test_b_adopted_fields_are_kept_and_written_on(path: Path) -> None:
    old, new = migrate("b fields kept", path)
    fields = new["buffer"].experience
    assert set(fields) == {"obs", "raw_obs", "is_expert"}
    for name, data in old["buffer"].experience.items():
        bits(fields[name], data)
    row = {
        "obs": jnp.ones((2, 3)),
        "raw_obs": jnp.full((2, 3), 7.0),
        "is_expert": jnp.ones((2, 1), bool),
    }
    written = jax.jit(example.write_row)(new["buffer"], row)
    bits(written.experience["raw_obs"][:, 2], np.full((2, 3), 7, np.float32))
    # the resumed run saves what it has, and a fresh skeleton takes it again
    save_checkpoint({"buffer": written}, path)
    migrations, _, skeleton = example.EXAMPLES["b fields kept"]
    again = restore_into(skeleton(), path, migrations=migrations)
    for name, data in written.experience.items():
        bits(again["buffer"].experience[name], data)


def test_b_fields_that_are_not_listed_still_raise(path: Path) -> None:
    migrations, old, new = example.EXAMPLES["b fields kept"]
    state = old()
    state["buffer"].experience["other"] = jnp.zeros(2)
    save_checkpoint(state, path)
    with pytest.raises(LayoutMismatchError) as caught:
        restore_into(new(), path, migrations=migrations)
    assert [item.name for item in caught.value.mismatches] == [
        "buffer.experience.other"
    ]


def test_c_a_field_left_empty_comes_back_empty(path: Path) -> None:
    old, new = migrate("c an empty field", path)
    assert new["collector"].hidden is None
    bits(new["collector"].obs, old["collector"]["obs"])


def test_c_a_missing_field_that_holds_data_raises(path: Path) -> None:
    save_checkpoint(example.old_collector(), path)
    skeleton = {"collector": example.Collector(jnp.zeros((2, 3)), jnp.zeros(4))}
    with pytest.raises(LayoutMismatchError, match=r"collector\.hidden: expected"):
        restore_into(skeleton, path, migrations=example.nothing_to_do)


def test_d_raw_observations_are_rebuilt_from_the_statistics(path: Path) -> None:
    _, new = migrate("d raw observations", path)
    scale = np.sqrt(np.array([4.0, 9.0]) + 1e-8)
    expected = np.array([[0.5, -1.0], [0.0, 2.0]]) * scale + [1.0, 2.0]
    np.testing.assert_allclose(new["env"].info["raw_obs"], expected, rtol=1e-6)


def test_e_the_sum_is_dropped_and_another_extra_field_raises(path: Path) -> None:
    old, new = migrate("e an unread sum", path)
    assert set(new["buffer"]) == {"rewards"}
    bits(new["buffer"]["rewards"], old["buffer"]["rewards"])
    old["buffer"]["other"] = jnp.zeros(2)
    save_checkpoint(old, path)
    with pytest.raises(LayoutMismatchError, match=r"buffer\.other"):
        restore_into(example.new_segments(), path, migrations=example.unread_sum)


def test_f_a_copy_is_dropped_but_normalised_observations_are_refused(
    path: Path,
) -> None:
    old, new = migrate("f a second copy", path)
    bits(new["buffer"]["obs"], old["buffer"]["obs"])
    with pytest.raises(MigrationError) as caught:
        migrate("f a second copy", path, normalize_observations=True)
    assert "cannot be used any more: start afresh" in str(caught.value)
    assert 'segments rule "obs holds what raw_obs copied"' in str(caught.value)


def test_f_after_its_date_the_rule_is_refused(path: Path) -> None:
    migrations = Migrations("segments")
    ended = migrations.rule("obs holds what raw_obs copied", until="2025-11-17")
    ended.drop("**.buffer.raw_obs")
    save_checkpoint(example.old_copies(), path)
    with pytest.raises(MigrationError, match="ended with 2025-11-17") as caught:
        restore_into(example.new_copies(), path, migrations=migrations)
    assert "obs holds what raw_obs copied" in str(caught.value)
    save_checkpoint(example.new_copies(), path)  # does not need it
    restore_into(example.new_copies(), path, migrations=migrations)


@pytest.mark.parametrize("agent", ["PPO", "APO"])
def test_g_moments_and_counts_survive_the_clip(agent: str, path: Path) -> None:
    old, new = migrate("g a clip less", path, agent=agent)
    before, after = old["actor"]["opt_state"][1][0], new["actor"]["opt_state"][0]
    assert isinstance(after, optax.ScaleByAdamState)
    assert int(after.count) == 3
    jax.tree.map(bits, after, before)


def test_g_another_agents_is_refused(path: Path) -> None:
    with pytest.raises(LayoutMismatchError, match=r"actor\.opt_state\.1\.0\.count"):
        migrate("g a clip less", path, agent="SAC")


def test_g_todays_own_files_restore_with_the_rule(path: Path) -> None:
    state = example.new_unclipped()
    save_checkpoint(state, path, config=CONFIG)
    restored = restore_into(state, path, migrations=example.own_clip)
    jax.tree.map(bits, restored, state)


def test_h_what_was_never_computed_is_nan_and_only_that(path: Path) -> None:
    old, new = migrate("h never computed", path)
    assert np.isnan(new["losses"].first_loss).all()
    assert np.isnan(new["losses"].last_loss).all()
    bits(new["losses"].mean_loss, old["losses"]["mean_loss"])
    skeleton = {**example.new_losses(), "other": jnp.zeros(2)}
    with pytest.raises(LayoutMismatchError, match="other: expected"):
        restore_into(skeleton, path, migrations=example.never_computed)


def test_flags_change_their_type_exactly(path: Path) -> None:
    _, new = migrate("int8 to bool", path)
    bits(new["done"], np.array([False, True, True, False]))
    save_checkpoint({"done": jnp.array([0, 2], jnp.int8)}, path)
    with pytest.raises(MigrationError, match=r"flags step 1 .*: done: .*such as 2"):
        skeleton = {"done": jnp.zeros(2, bool)}
        restore_into(skeleton, path, migrations=example.flag_type)
    save_checkpoint({"done": jnp.array([True, False])}, path)
    skeleton = {"done": jnp.zeros(2, jnp.int8)}
    restored = restore_into(skeleton, path, migrations=example.number_type)
    bits(restored["done"], np.array([1, 0], np.int8))


def test_a_unit_axis_goes(path: Path) -> None:
    old, new = migrate("squeezed", path)
    bits(new["obs"], np.asarray(old["obs"])[0])


def test_a_fused_kernel_is_cut_in_three(path: Path) -> None:
    old, new = migrate("split in three", path)
    whole = np.asarray(old["params"]["attention"]["qkv"]["kernel"])
    for place, name in enumerate("qkv"):
        part = new["params"]["attention"][name]["kernel"]
        bits(part, whole[:, 2 * place : 2 * place + 2])


def test_layers_are_stacked_in_the_order_of_their_numbers(path: Path) -> None:
    old, new = migrate("stacked", path)
    for n in range(12):
        bits(new["params"]["layers"]["w"][n], old["params"][f"layer_{n}"]["w"])


def test_seeds_are_added_and_one_is_taken(path: Path) -> None:
    old, new = migrate("seeds added", path)
    for seed in range(3):
        bits(new["params"][seed], old["params"])
        bits(new["step"][seed], old["step"])
        data = jax.random.key_data
        bits(data(new["key"][seed]), data(old["key"]))
    old, new = migrate("a seed taken", path)
    bits(new["params"], old["params"][1])
    bits(jax.random.key_data(new["key"]), jax.random.key_data(old["key"][1]))
    assert new["key"].shape == ()


def test_moments_follow_their_renamed_parameters(path: Path) -> None:
    old, new = migrate("renamed with moments", path)
    for number in range(2):
        for before, after in (
            (old.params, new.params),
            (old.opt_state[0].mu, new.opt_state[0].mu),
            (old.opt_state[0].nu, new.opt_state[0].nu),
        ):
            moved = after["trunk"][f"layer_{number}"]["kernel"]
            bits(moved, before[f"Dense_{number}"]["kernel"])
    assert int(new.opt_state[0].count) == 3


def registry_statements() -> dict[str, list[ast.stmt]]:
    """Return the module's statements per registry: those that build it."""
    found: dict[str, list[ast.stmt]] = {}
    owner: dict[str, str] = {}
    for node in ast.parse(SCRIPT.read_text()).body:
        text = ast.unparse(node)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            if text.startswith(f"{name} = Migrations("):
                owner[name] = name
                found[name] = [node]
                continue
            used = [n for n in owner if text.startswith(f"{name} = {n}.")]
            if used:
                owner[name] = owner[used[0]]
                found[owner[name]].append(node)
        elif isinstance(node, ast.Expr):
            for name in owner:
                if f"{name}." in text:
                    found[owner[name]].append(node)
                    break
    return found


def test_no_registry_takes_more_than_five_statements_or_a_helper() -> None:
    statements = registry_statements()
    assert len(statements) == len(example.EXAMPLES)
    functions = {
        node.name
        for node in ast.parse(SCRIPT.read_text()).body
        if isinstance(node, ast.FunctionDef)
    }
    for name, nodes in statements.items():
        registry = getattr(example, name)
        assert len(nodes) <= 5, name
        assert len(nodes) > 1 or not registry.entries, name
        used = {
            item.id
            for node in nodes
            for item in ast.walk(node)
            if isinstance(item, ast.Name)
        }
        assert not used & functions, name


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    example.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(example.EXAMPLES)
    assert "b fields kept: 3 loaded, 2 migrated, 0 dropped" in lines
