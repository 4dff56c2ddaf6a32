"""Exports act as the trained agent acts, without its code; nothing is forgotten."""

import doctest
import enum
import hashlib
import importlib
import inspect
import json
import re
import subprocess
import sys
import tempfile
import textwrap
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import ajaxckpt._export_json
import ajaxckpt._exporting
import ajaxckpt._normalisers
import ajaxckpt._programs
import ajaxckpt.export
from ajaxckpt import (
    CheckpointError,
    CheckpointNotFoundError,
    DamagedCheckpointError,
    InvalidArgumentError,
    KeepBest,
    KeepLast,
    LayoutMismatchError,
    Migrations,
    NotACheckpointError,
    Run,
    UnsupportedLeafError,
    migrate_checkpoint,
    open_checkpoint,
    plan_restore,
    restore_into,
    save_checkpoint,
    state_digest,
    verify_checkpoint,
)
from ajaxckpt._export_sources import Wanted, gather_state
from ajaxckpt._exporting import write_export
from ajaxckpt._normalisers import find_normalisers
from ajaxckpt._tree import flatten_state
from ajaxckpt.export import (
    export_function,
    export_policy,
    load_function,
    load_policy,
)

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "examples"))
sac_pendulum = importlib.import_module("sac_pendulum")
ppo = importlib.import_module("ppo")

GOLDEN = ROOT / "tests/goldens/exports/act-jax-0.10.2.safetensors"
OBS = np.random.default_rng(0).normal(size=(7, 3)).astype(np.float32)
ACTOR = sac_pendulum.Actor(action_dim=1, hidden_size=8)


class Agent(NamedTuple):
    """A trained agent: how it acts on (parameters, raw observations)."""

    act: Callable[[Any, Any], Any]
    parameters: Any


def fill(abstract: Any, *leading: int) -> Any:
    """Return values for abstract leaves, as training might leave them: no init runs."""
    rng = np.random.default_rng(1)

    def values(path: Any, leaf: Any) -> Any:
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        numbers = rng.normal(0.1, 0.5, (*leading, *leaf.shape)).astype(leaf.dtype)
        is_spread = "var" in jax.tree_util.keystr(path)
        return jnp.asarray(np.abs(numbers) + 0.1 if is_spread else numbers)

    return jax.tree_util.tree_map_with_path(values, abstract)


def abstract_sac() -> Any:
    with jax.numpy_rank_promotion("allow"):
        params = jax.eval_shape(lambda: ACTOR.init(jax.random.key(0), OBS[0]))
    shape = jax.ShapeDtypeStruct((3,), jnp.float32)
    count = jax.ShapeDtypeStruct((1,), jnp.float32)
    normaliser = sac_pendulum.Normaliser(mean=shape, var=shape, count=count)
    return {
        "step": jax.ShapeDtypeStruct((), jnp.int32),
        "actor": {"params": params, "opt_state": params},
        "normaliser": normaliser,
    }


def sac_state(seeds: int = 2) -> Any:
    """Build what acting needs of an agent of several seeds, its normaliser in use."""
    return {**fill(abstract_sac(), seeds), "step": jnp.asarray([6] * seeds)}


def act_sac(parameters: Any, obs: Any) -> Any:
    params, normaliser = parameters
    with jax.numpy_rank_promotion("allow"):
        return jnp.tanh(ACTOR.apply(params, normaliser(obs))[0])


def sac_parameters(state: Any, seed: int = 0) -> Any:
    both = (state["actor"]["params"], state["normaliser"])
    return jax.tree.map(lambda leaf: leaf[seed], both)


def sac_agent() -> Agent:
    state = fill(abstract_sac())
    return Agent(act_sac, (state["actor"]["params"], state["normaliser"]))


def act_ppo(parameters: Any, obs: Any) -> Any:
    params, normaliser = parameters
    normal = (obs - normaliser.mean) / jnp.sqrt(normaliser.var + 1e-8)
    # the logits: more can differ in them than in the action they lead to
    return ppo.ActorCritic(8).apply(params, normal)[0]


def widen(act: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Let an agent promote ranks, as its own code does."""

    def wide(parameters: Any, obs: Any) -> Any:
        with jax.numpy_rank_promotion("allow"):
            return act(parameters, obs)

    return wide


def ppo_agent() -> Agent:
    with jax.numpy_rank_promotion("allow"):
        init = ppo.ActorCritic(8).init
        params = jax.eval_shape(lambda: init(jax.random.key(0), jnp.zeros(3)))
    shape = jax.ShapeDtypeStruct((3,), jnp.float32)
    count = jax.ShapeDtypeStruct((), jnp.float32)
    normaliser = ppo.Normaliser(mean=shape, var=shape, count=count)
    return Agent(widen(act_ppo), fill((params, normaliser)))


def equinox_agent() -> Agent:
    mlp = eqx.filter_eval_shape(
        lambda key: eqx.nn.MLP(3, 2, 8, 2, activation=jax.nn.silu, key=key),
        jax.random.key(0),
    )
    return Agent(lambda mlp, obs: jnp.tanh(jax.vmap(mlp)(obs)), fill(mlp))


class NnxPolicy(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.BatchNorm(3, use_running_average=True, rngs=rngs)
        self.hidden = nnx.Linear(3, 8, rngs=rngs)
        self.out = nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, obs: Any) -> Any:
        with jax.numpy_rank_promotion("allow"):
            return self.out(nnx.gelu(self.hidden(self.norm(obs))))


def nnx_agent() -> Agent:
    graph, abstract = nnx.split(nnx.eval_shape(lambda: NnxPolicy(nnx.Rngs(0))))
    return Agent(lambda params, obs: nnx.merge(graph, params)(obs), fill(abstract))


AGENTS = {
    "sac": sac_agent,
    "ppo": ppo_agent,
    "equinox": equinox_agent,
    "nnx": nnx_agent,
}

# a process in which none of the agent's libraries can be imported, and ajaxckpt late
ALONE = """
import sys

refused = {"ajaxckpt", *"LIBRARIES".split()}

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in refused:
            raise ImportError(name + " is not here")

sys.meta_path.insert(0, Refuse())
import jax
import jax.export
import numpy as np
import safetensors.numpy

obs = np.load("obs.npy")
path = "sac.safetensors"
BLOCK
np.save("action.npy", action)
refused.remove("ajaxckpt")
from ajaxckpt.export import load_function

for kind in ("sac", "ppo", "equinox", "nnx"):
    act = load_function(f"{kind}.safetensors")
    for n in (7, 1) if kind == "sac" else (7,):
        np.save(f"{kind}{n}.npy", act(obs[:n]))
"""
LIBRARIES = "flax equinox optax gymnax flashbax chex sac_pendulum ppo test_export"


def without_ajaxckpt() -> str:
    """Return the lines of the docstring that call a function without ajaxckpt."""
    text = inspect.cleandoc(ajaxckpt.export.__doc__ or "")
    return textwrap.dedent(text.split("::\n")[-1])


def run_alone(folder: Path) -> None:
    np.save(folder / "obs.npy", OBS)
    script = ALONE.replace("LIBRARIES", LIBRARIES)
    script = script.replace("BLOCK", without_ajaxckpt())
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def same_bits(a: Any, b: Any) -> bool:
    a, b = np.asarray(a), np.asarray(b)
    return (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Export each agent, and let a process without its code act."""
    folder = tmp_path_factory.mktemp("exported")
    for kind, build in AGENTS.items():
        act, parameters = build()
        path = folder / f"{kind}.safetensors"
        export_function(act, OBS, path, parameters=parameters, batched=True, step=12)
    run_alone(folder)
    return folder


@pytest.mark.parametrize("kind", AGENTS)
def test_a_function_acts_as_the_agent_where_its_code_cannot_be_imported(
    kind: str, exported: Path
) -> None:
    act, parameters = AGENTS[kind]()
    jitted = eqx.filter_jit(act)  # jax.jit, for parameters that hold functions too
    for n in (7, 1) if kind == "sac" else (7,):
        expected = jitted(parameters, OBS[:n])
        assert same_bits(np.load(exported / f"{kind}{n}.npy"), expected)
    # other parameters give other actions: the comparison can fail
    loaded = load_function(exported / f"{kind}.safetensors")
    assert loaded.step == 12
    is_float = eqx.is_inexact_array
    other = jax.tree.map(lambda x: x * 1.01 if is_float(x) else x, parameters)
    assert same_bits(loaded(OBS, parameters=other), jitted(other, OBS))
    assert not same_bits(loaded(OBS, parameters=other), jitted(parameters, OBS))


def test_a_function_is_called_with_jax_and_safetensors_alone(exported: Path) -> None:
    act, parameters = sac_agent()
    expected = jax.jit(act)(parameters, OBS)
    assert same_bits(np.load(exported / "action.npy"), expected)


def test_a_loaded_policy_acts_as_the_trained_agent(tmp_path: Path) -> None:
    path = tmp_path / "policy.safetensors"
    state = sac_state()
    export_policy(state, path, normaliser="normaliser", step=state["step"], seed=1)
    params, normaliser = trained = sac_parameters(state, seed=1)
    act = jax.jit(act_sac)
    expected = act(trained, OBS)
    policy = load_policy(path, normaliser=normaliser)
    assert isinstance(policy.normaliser, sac_pendulum.Normaliser)
    assert same_bits(act((policy.parameters, policy.normaliser), OBS), expected)
    plain = load_policy(path)
    rebuilt = sac_pendulum.Normaliser(**plain.normaliser)
    assert same_bits(act((plain.parameters, rebuilt), OBS), expected)
    new = sac_pendulum.Normaliser(jnp.zeros(3), jnp.ones(3), jnp.ones(1))
    assert not same_bits(act((params, new), OBS), expected)  # it is needed
    skeleton = jax.eval_shape(lambda: ACTOR.init(jax.random.key(0), OBS[0]))
    into = load_policy(path, parameters=skeleton)
    assert state_digest(into.parameters) == state_digest(params)
    assert plain.step == 6


def train_plainly(train: Callable[..., Any], *arguments: Any) -> Any:
    """Train, compiled without optimisations: compiling is what takes its time."""
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        return train(*arguments)
    finally:
        jax.config.update("jax_disable_most_optimizations", False)


@pytest.mark.slow
@pytest.mark.parametrize("agent", ["sac", "ppo"])
def test_a_trained_agent_acts_alike_from_its_checkpoint(
    agent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ajaxckpt.export, "_warned", set())
    with jax.numpy_rank_promotion("allow"):
        if agent == "sac":
            config = sac_pendulum.Config(
                learning_starts=5, buffer_size=32, batch_size=4, hidden_size=8
            )
            state = train_plainly(sac_pendulum.train, config, 12)
            node, names = "actor.params", ("normaliser", state.normaliser)
            both, act, width = (state.actor.params, state.normaliser), act_sac, 3
        else:
            config = ppo.Config(n_envs=2, rollout_length=8, hidden_size=8, n_epochs=1)
            state = train_plainly(ppo.train, config, 32)
            node, names = "params", ("obs_norm", state.obs_norm)
            both, act, width = (state.params, state.obs_norm), act_ppo, 4
        save_checkpoint(state, tmp_path / "state", step=state.step, config=config)
        obs = np.random.default_rng(2).normal(size=(9, width)).astype(np.float32)
        trained = jax.tree.map(lambda leaf: leaf[1], both)
        expected = jax.jit(act)(trained, obs)
        path = tmp_path / "policy.safetensors"
        export_policy(
            tmp_path / "state", path, parameters=node, normaliser=names[0], seed=1
        )
        policy = load_policy(path, parameters=trained[0], normaliser=trained[1])
        loaded = (policy.parameters, policy.normaliser)
        assert same_bits(jax.jit(act)(loaded, obs), expected)
        function = tmp_path / "act.safetensors"
        export_function(act, obs, function, parameters=trained, batched=True)
        assert same_bits(load_function(function)(obs), expected)
        with pytest.warns(UserWarning, match=f"normaliser={names[0]!r}"):
            export_policy(tmp_path / "state", path, parameters=node)
    assert policy.step == int(state.step[0])
    assert policy.config == open_checkpoint(path).config


def test_an_equinox_and_an_nnx_policy_load_into_their_classes(tmp_path: Path) -> None:
    for kind in ("equinox", "nnx"):
        parameters = AGENTS[kind]().parameters
        path = tmp_path / f"{kind}.safetensors"
        export_policy({"net": parameters}, path, parameters="net", normaliser=())
        loaded = load_policy(path, parameters=parameters).parameters
        assert type(loaded) is type(parameters)
        assert state_digest(loaded) == state_digest(parameters)
    # without a skeleton functions stay behind, sequences are dicts of indices
    plain = load_policy(tmp_path / "equinox.safetensors").parameters
    assert sorted(plain) == ["layers"]
    assert sorted(plain["layers"]) == [0, 1, 2]


def test_safetensors_and_json_read_an_export_without_ajaxckpt(tmp_path: Path) -> None:
    state = {
        "actor": {
            "params": {"a.b": jnp.arange(3.0), "w": jnp.ones((2, 3), "bfloat16")}
        },
        "rms": {"mean": jnp.full(3, 2.0), "var": jnp.full(3, 4.0), "eps": 1e-5},
        "buffer": jnp.zeros(1000),
    }
    path = tmp_path / "policy.safetensors"
    record = export_policy(
        state, path, normaliser="rms", step=400, config={"hidden": [8, 8]}
    )
    said = json.loads((tmp_path / "policy.json").read_text())
    arrays = safetensors.numpy.load_file(path)
    assert set(arrays) == set(said["leaves"]) - {"rms.eps"}
    for name, array in arrays.items():
        assert said["leaves"][name]["shape"] == list(array.shape)
        assert said["leaves"][name]["dtype"] == array.dtype.name
    assert said["leaves"]["rms.eps"]["value"] == 1e-5
    assert said["step"] == 400
    assert said["config"] == {"hidden": [8, 8]}
    assert said["parameters"] == "actor.params"
    assert said["normaliser"] == "rms"
    assert said["file"] == "policy.safetensors"
    assert said["provenance"]["jax"] == jax.__version__
    assert said["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    kept = {"actor": state["actor"], "rms": state["rms"]}
    assert said["digest"] == state_digest(kept) == record.digest
    assert load_policy(path).parameters["a.b"].tolist() == [0.0, 1.0, 2.0]


def test_a_checkpoint_a_run_and_their_paths_export_alike(tmp_path: Path) -> None:
    def state(value: float) -> Any:
        params = {"w": jnp.full((2, 3), value)}
        return {"actor": {"params": params}, "rms": {"mean": jnp.ones((2, 3))}}

    with Run(tmp_path / "run", config={"a": 1}) as run:
        for step in (1, 2):
            run.save(state(step), step=step)
    newest = run.path(2)
    target = tmp_path / "p.safetensors"
    with open_checkpoint(newest) as checkpoint:
        parent = checkpoint.checkpoint_id
        for source in (Run(tmp_path / "run"), tmp_path / "run", newest, checkpoint):
            record = export_policy(source, target, normaliser="rms", seed=1)
            assert record.leaves == ("actor.params.w", "rms.mean")
            assert record.step == 2
            policy = load_policy(target)
            assert policy.parameters["w"].tolist() == [2.0, 2.0, 2.0]
            assert policy.config == {"a": 1}
            said = json.loads(Path(record.json_path).read_text())
            assert said["parent_id"] == parent
            with open_checkpoint(target) as file:
                assert file.run_id == run.run_id
        assert checkpoint["rms.mean"].shape == (2, 3)  # still open
    one = jax.tree.map(lambda leaf: leaf[1], state(2))
    assert record.digest == state_digest(one)
    assert export_policy(state(2), target, normaliser="rms", seed=1).digest == (
        record.digest
    )


def test_one_seed_is_taken_or_the_axis_is_kept(tmp_path: Path) -> None:
    w = jnp.arange(12.0).reshape(2, 3, 2)
    state = {
        "params": {"w": w, "b": jnp.asarray([[1.0], [2.0]])},
        "norm": {"mean": jnp.ones(3), "key": jax.random.split(jax.random.key(0), 2)},
    }
    path = tmp_path / "p.safetensors"
    save_checkpoint(state, tmp_path / "state")
    shared = {"norm.mean": None}
    for source in (state, tmp_path / "state"):
        export = partial(export_policy, source, path, parameters="params")
        export(normaliser="norm")
        assert load_policy(path).parameters["w"].shape == (2, 3, 2)
        for seed in (1, -1, np.int64(1), jnp.int32(1)):
            record = export(normaliser="norm", seed=seed, axis=shared)
            said = json.loads(Path(record.json_path).read_text())
            assert said["seed"] == 1
            policy = load_policy(path)
            assert policy.parameters["w"].tolist() == w[1].tolist()
            assert policy.parameters["b"].tolist() == [2.0]
            assert policy.normaliser["mean"].tolist() == [1.0] * 3
            words = jax.random.key_data(state["norm"]["key"][1])
            assert policy.normaliser["key"].tolist() == words.tolist()
        export(normaliser=(), parameters="params.w", seed=1, axis=2)
        assert load_policy(path).parameters.tolist() == w[:, :, 1].tolist()
        with pytest.raises(InvalidArgumentError, match="not of one size"):
            export(normaliser="norm", seed=1)


def test_a_run_gives_its_newest_checkpoint_of_which_the_policy_is_whole(
    tmp_path: Path,
) -> None:
    with Run(tmp_path / "run") as run:
        for step in (1, 2, 3):
            state = {"actor": {"params": jnp.full(4, step)}, "z": jnp.ones(5000)}
            run.save(state, step=step)
    target = tmp_path / "p.safetensors"
    for step, leaf, chosen in [(3, "z", 3), (3, "actor.params", 2), (2, "z", 2)]:
        flip_byte_of(leaf, run.path(step))
        assert export_policy(tmp_path / "run", target).step == chosen
        assert load_policy(target).parameters.tolist() == [chosen] * 4
    flip_byte_of("actor.params", run.path(2))
    flip_byte_of("actor.params", run.path(1))
    with pytest.raises(DamagedCheckpointError, match="none is whole"):
        export_policy(Run(tmp_path / "run"), target)
    assert load_policy(target).parameters.tolist() == [2] * 4


def flip_byte_of(leaf: str, path: Any) -> None:
    with open_checkpoint(path) as checkpoint:
        tensors = checkpoint.file.header.tensors
    # places are counted from the beginning of the payload, which ends the file
    place = tensors[leaf].begin - max(tensor.end for tensor in tensors.values())
    data = bytearray(Path(path).read_bytes())
    data[place] ^= 1
    Path(path).write_bytes(data)


def test_an_export_reads_only_the_leaves_it_writes(tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    state = {"actor": {"params": jnp.ones(4)}, "buffer": jnp.full(5000, 3.0)}
    save_checkpoint(state, path)
    data = bytearray(path.read_bytes())
    data[-6] ^= 1  # in the buffer, which lies last
    path.write_bytes(data)
    with pytest.raises(DamagedCheckpointError, match="buffer"):
        verify_checkpoint(path)
    assert export_policy(path, tmp_path / "p").leaves == ("actor.params",)


def test_restore_into_reads_an_export_as_it_reads_a_checkpoint(tmp_path: Path) -> None:
    state = {"actor": {"params": {"w": jnp.ones(4)}}, "step": 3}
    export_policy(state, tmp_path / "p.safetensors")
    skeleton = {"w": jnp.zeros(4)}
    path = tmp_path / "p.safetensors"
    restored = restore_into(skeleton, path, subtree="actor.params")
    assert restored["w"].tolist() == [1.0] * 4
    with pytest.raises(LayoutMismatchError, match="step"):
        restore_into(state, path)


KEYS = st.one_of(
    st.text(),
    st.integers(),
    st.integers().map(str),
    st.sampled_from(["²", "--1", "-", "٣", "-0", "00", "1_000", "²3", '"', "\\"]),
)


@settings(max_examples=60, deadline=None)
@given(keys=st.lists(KEYS, min_size=1, max_size=3))
def test_without_a_skeleton_keys_come_back_as_they_were(keys: list[Any]) -> None:
    tree: Any = np.arange(2.0)
    for key in keys:
        tree = {key: tree}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "p.safetensors"
        export_policy({"net": tree}, path, parameters="net")
        found = load_policy(path).parameters
    for key in keys[::-1]:
        assert list(found) == [key]
        assert type(next(iter(found))) is type(key)
        found = found[key]
    assert found.tolist() == [0.0, 1.0]


# ------------------------------------------------------------- beside a run's files


def run_state(value: float) -> Any:
    return {"actor": {"params": jnp.full(3, float(value))}, "buffer": jnp.zeros(9)}


def export_act(path: Path, step: int) -> None:
    w = run_state(step)["actor"]["params"]
    export_function(lambda w, x: x * w, jnp.ones(3), path, parameters=w, step=step)


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.name[0] != ".")


def test_an_export_in_a_runs_directory_is_never_its_best(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    with Run(directory, keep=KeepLast(1)) as run:
        run.save(run_state(1), step=1, metrics={"return": 9.0})
        export_policy(run, directory / "policy.safetensors")
        run.save(run_state(2), step=2, metrics={"return": 1.0})
    keep = [KeepLast(1), KeepBest("return", "max")]
    with Run(directory, keep=keep) as run:
        for step, value in ((3, 5.0), (4, 2.0)):
            run.save(run_state(step), step=step, metrics={"return": value})
        assert [entry.step for entry in run.list()] == [3, 4]
        best = run.best("return", "max")
        assert best is not None and best.step == 3
        assert run.restore_best(run_state(0)).step == 3
        assert run.prune(KeepLast(1)) and [entry.step for entry in run.list()] == [4]
    assert names_in(directory) == [
        "policy.json",
        "policy.safetensors",
        "step-4.safetensors",
    ]
    assert load_policy(directory / "policy.safetensors").step == 1


def test_an_export_of_a_later_step_does_not_keep_a_run_from_going_on(
    tmp_path: Path,
) -> None:
    directory = tmp_path / "run"
    with Run(directory) as run:
        run.save(run_state(1), step=400)
    export_act(directory / "act.safetensors", 450)
    export_policy(run_state(9), directory / "policy.safetensors", step=460)
    save_checkpoint(run_state(2), directory / "mine.safetensors", step=410)
    before = {name: (directory / name).read_bytes() for name in names_in(directory)}
    with Run(directory) as run:
        restored = run.restore_or_init(run_state(0))
        assert restored.step == 410  # what was saved by hand counts
        run.save(run_state(3), step=420)
        run.rollback(400)
    for name, content in before.items():
        there = directory / (name + ".abandoned" * (name == "mine.safetensors"))
        assert there.read_bytes() == content
    assert [entry.step for entry in Run(directory).list()] == [400]


def test_exports_alone_are_no_run_and_those_of_another_no_second_one(
    tmp_path: Path,
) -> None:
    with Run(tmp_path / "other") as run:
        run.save(run_state(1), step=7)
    directory = tmp_path / "run"
    policy, act = directory / "policy.safetensors", directory / "act.safetensors"
    export_policy(tmp_path / "other", policy)
    export_act(act, 9)
    content = bytearray(policy.read_bytes())
    content[-1] ^= 1
    (directory / "damaged.safetensors").write_bytes(content)
    assert Run(directory).list() == ()
    with pytest.raises(CheckpointNotFoundError, match="the run has no checkpoint"):
        export_policy(directory, tmp_path / "p.safetensors")
    with Run(directory, keep=KeepLast(1)) as run:
        assert not run.restore_or_init(run_state(0)).restored
        assert run.run_id != open_checkpoint(policy).run_id
        run.save(run_state(1), step=1)
        run.save(run_state(2), step=2)
    newest = Run(directory).newest()
    assert newest is not None and newest.step == 2
    assert load_policy(policy).step == 7
    assert load_function(act).step == 9


def test_an_export_where_a_step_is_saved_is_set_aside_whole(tmp_path: Path) -> None:
    place = tmp_path / "step-2.safetensors"
    for step in (1, 2):
        export_act(place, step)
    content = place.read_bytes()
    with Run(tmp_path) as run:
        run.save(run_state(2), step=2)
        assert run.restore(run_state(0), step=2).step == 2
    (aside,) = tmp_path.glob("*.aside")
    assert aside.read_bytes() == content


def test_restoring_a_whole_state_from_an_export_says_what_it_is(
    tmp_path: Path,
) -> None:
    policy, act = tmp_path / "policy.safetensors", tmp_path / "act.safetensors"
    export_policy(run_state(1), policy)
    export_act(act, 1)
    for path, hint in [
        (
            policy,
            "the file is an exported policy, not a whole state: pass "
            "subtree='actor.params', or restore a checkpoint",
        ),
        (
            act,
            "the file is an exported function, not a whole state: pass it to "
            "load_function, or restore a checkpoint",
        ),
    ]:
        with pytest.raises(LayoutMismatchError) as caught:
            restore_into(run_state(0), path)
        assert caught.value.hint == hint
        plan = plan_restore(run_state(0), path)
        assert plan.notes[0] == hint
        assert plan.suggestions == ()
    # where a node is asked for, what differs is what matters
    with pytest.raises(LayoutMismatchError) as caught:
        restore_into(jnp.zeros(4), policy, subtree="actor.params")
    assert "exported" not in caught.value.hint
    export_policy(run_state(1), policy, parameters="")
    assert state_digest(restore_into(run_state(0), policy)) == (
        state_digest(run_state(1))
    )
    with pytest.raises(LayoutMismatchError) as caught:
        restore_into({"actor": {"params": jnp.zeros(3)}}, policy)
    assert "exported" not in caught.value.hint


def test_an_export_is_not_migrated_into_a_checkpoint(tmp_path: Path) -> None:
    migrations = Migrations("agent")
    migrations.step(1, "actors are policies").move("actor", "policy")
    path, new = tmp_path / "policy.safetensors", tmp_path / "new.safetensors"
    export_policy(run_state(1), path, step=3)
    with pytest.raises(InvalidArgumentError, match="is an exported policy") as caught:
        migrate_checkpoint(path, new, migrations)
    assert "export again" in caught.value.hint
    assert not new.exists()
    # read through the same migrations
    restored = restore_into(
        jnp.zeros(3), path, subtree="policy.params", migrations=migrations
    )
    assert restored.tolist() == [1.0] * 3


# ------------------------------------------------------------ a normaliser forgotten

FORGETFUL = {
    "normaliser": {"mean": jnp.zeros(3), "var": jnp.ones(3), "count": jnp.int32(1)},
    "actor": {"params": {"mean": {"kernel": jnp.ones(3)}, "LayerNorm_0": jnp.ones(3)}},
    "opt": {"0": {"mu": {"mean": jnp.ones(3), "var": jnp.ones(3)}}},
    "reward_normaliser": {"mean": jnp.zeros(()), "var": jnp.ones(())},
}


def test_a_normaliser_left_behind_is_warned_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ajaxckpt.export, "_warned", set())
    path = tmp_path / "p.safetensors"
    with pytest.warns(UserWarning) as caught:
        export_policy(FORGETFUL, path)
        export_policy(FORGETFUL, path)
    assert [str(item.message) for item in caught] == [
        f"{path}: exported without a normaliser, but the state seems to hold one: "
        "normaliser\nTo mend: pass normaliser='normaliser' to include it, or "
        "normaliser=() to leave it out on purpose"
    ]
    assert caught[0].filename == __file__
    assert load_policy(path).normaliser is None
    save_checkpoint({**FORGETFUL, "norm": FORGETFUL["normaliser"]}, tmp_path / "state")
    with pytest.warns(UserWarning, match="norm, normaliser"):
        export_policy(tmp_path / "state", path)


def test_what_is_said_on_purpose_is_not_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ajaxckpt.export, "_warned", set())
    without = {name: FORGETFUL[name] for name in FORGETFUL if name != "normaliser"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        export_policy(FORGETFUL, tmp_path / "p", normaliser=())
        export_policy(FORGETFUL, tmp_path / "p", normaliser="normaliser")
        export_policy(without, tmp_path / "p")


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["obs_rms_state.mean", "obs_rms_state.var"], ["obs_rms_state"]),
        (["rew_rms_state.mean", "rew_rms_state.var"], []),
        (["normalizer_params.std.x", "normalizer_params.count"], ["normalizer_params"]),
        (["collector.obs_norm_info.mean"], ["collector.obs_norm_info"]),
        (["batch_stats.BatchNorm_0.mean"], ["batch_stats"]),
        (["stats.mean", "stats.m2"], ["stats"]),
        (["episodic_mean_return", "mean", "var"], []),
        (["params.LayerNorm_0.scale", "opt_state.0.mu.normaliser.mean"], []),
        (["step", ""], []),
    ],
)
def test_what_looks_like_a_normaliser(names: list[str], found: list[str]) -> None:
    assert find_normalisers(names) == found


# ------------------------------------------------------------------- what is refused


def test_arguments_that_select_nothing_are_refused(tmp_path: Path) -> None:
    state = {"actor": {"params": {"w": jnp.ones((2, 3)), "s": jnp.ones(())}}}
    path = tmp_path / "p.safetensors"
    matrix = {"parameters": "actor.params.w"}
    for arguments, message in [
        ({"parameters": "actor.param"}, "actor.params"),
        ({"parameters": None}, "parameters=None: no leaf"),
        ({"parameters": "actor.*"}, "no leaf has this name or lies below it"),
        ({"normaliser": "rms"}, "normaliser='rms': no leaf"),
        ({"normaliser": False}, "normaliser=False: no leaf"),
        ({"seed": 0}, "actor.params.s: float32[] has no axis 0"),
        ({**matrix, "seed": 2}, "no seed 2: there are 2 seeds"),
        ({**matrix, "seed": -3}, "no seed -3"),
        (
            {"seed": 0, "axis": "x"},
            "axis: expected a whole number, or patterns to them, found 'x'",
        ),
        ({**matrix, "seed": True}, "expected the index of a seed, found True"),
        ({**matrix, "seed": [0, 1]}, "expected the index of a seed, found [0, 1]"),
        ({"step": "x"}, "step: 'x' is not an integer"),
        ({"config": object()}, "config: a object is not JSON-like data"),
    ]:
        with pytest.raises(InvalidArgumentError) as caught:
            export_policy(state, path, **arguments)
        assert message in str(caught.value)
        assert str(caught.value).startswith(f"{path}: cannot ")
    for nothing in (None, 3, b"bytes", object()):
        with pytest.raises(InvalidArgumentError, match="no leaves with names"):
            export_policy(nothing, path)
    with pytest.raises(CheckpointNotFoundError):
        export_policy(tmp_path / "none.safetensors", path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointNotFoundError, match="the run has no checkpoint"):
        export_policy(tmp_path / "empty", path)
    w = state["actor"]["params"]["w"]
    w.delete()
    with pytest.raises(UnsupportedLeafError, match=r"actor\.params\.w: the array was"):
        export_policy(state, path, seed=1, parameters="actor.params.w")
    assert sorted(item.name for item in tmp_path.iterdir()) == ["empty"]


def test_an_export_replaces_exports_and_nothing_else(tmp_path: Path) -> None:
    state = {"actor": {"params": jnp.ones(3)}}
    path, beside = tmp_path / "p.safetensors", tmp_path / "p.json"
    save_checkpoint(state, path)
    before = path.read_bytes()
    with pytest.raises(InvalidArgumentError, match="a checkpoint is there"):
        export_policy(state, path)
    assert path.read_bytes() == before
    path.write_bytes(b"theirs, and long enough to be no header of anything")
    with pytest.raises(NotACheckpointError):
        export_policy(state, path)
    path.unlink()
    beside.write_text('{"mine": 1}')
    with pytest.raises(NotACheckpointError, match=r"p\.json: cannot export: a file is"):
        export_policy(state, path)
    assert not path.exists()
    assert beside.read_text() == '{"mine": 1}'
    beside.unlink()
    for value in (1, 2):
        export_policy({"actor": {"params": jnp.full(3, value)}}, path)
        assert load_policy(path).parameters.tolist() == [value] * 3
    # two files may not share one JSON, as long as both are there
    with pytest.raises(NotACheckpointError, match=r"is the JSON of p\.safetensors"):
        export_policy(state, tmp_path / "p")
    path.rename(tmp_path / "p")
    export_policy(state, tmp_path / "p")
    assert json.loads(beside.read_text())["file"] == "p"
    # a damaged file may be a checkpoint, for all that is known
    path.write_bytes((tmp_path / "p").read_bytes()[:50])
    beside.unlink()
    with pytest.raises(DamagedCheckpointError, match="a damaged file is there"):
        export_policy(state, path)
    assert path.stat().st_size == 50


def test_each_loader_refuses_what_is_of_another_sort(tmp_path: Path) -> None:
    state = {"actor": {"params": jnp.ones(3)}}
    policy, function = tmp_path / "p.safetensors", tmp_path / "f.safetensors"
    export_policy(state, policy)
    export_function(jnp.sin, jnp.zeros(3), function)
    save_checkpoint(state, tmp_path / "c")
    for load, path, message in [
        (load_policy, function, "an exported function, not an exported policy"),
        (load_function, policy, "an exported policy, not an exported function"),
        (load_policy, tmp_path / "c", "a checkpoint, no export"),
    ]:
        with pytest.raises(InvalidArgumentError, match=message):
            load(path)
    with pytest.raises(InvalidArgumentError, match="exported without a normaliser"):
        load_policy(policy, normaliser={"mean": jnp.zeros(3)})
    with pytest.raises(LayoutMismatchError, match=r"expected float32\[4\]"):
        load_policy(policy, parameters=jnp.zeros(4))


def test_any_changed_byte_of_an_export_is_found(tmp_path: Path) -> None:
    policy, function = tmp_path / "p.safetensors", tmp_path / "f.safetensors"
    export_policy({"actor": {"params": jnp.ones(3)}}, policy)
    export_function(lambda w, x: w * x, jnp.ones(3), function, parameters=jnp.ones(3))
    for path, load in ((policy, load_policy), (function, load_function)):
        whole = path.read_bytes()
        places = np.random.default_rng(0).integers(8, len(whole), 40)
        for place in (*places, len(whole) - 1):
            damaged = bytearray(whole)
            damaged[place] ^= 1
            path.write_bytes(damaged)
            with pytest.raises(CheckpointError) as caught:
                load(path)
            assert "restore another checkpoint" not in caught.value.hint
        path.write_bytes(whole)
        load(path)


def forge(path: Path, sort: str, leaves: dict[str, Any], **said: Any) -> Path:
    """Write a file whose bytes are whole, and whose content is none of an export."""
    found = gather_state(leaves, Wanted(nodes={"": ""}))
    facts = (found.data, found.facts)
    write_export(path.as_posix(), sort, *facts, step=None, config=None, said=said)
    return path


def test_whole_files_that_hold_no_export_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    w = jnp.ones(3)
    exported = jax.export.export(jax.jit(lambda p, x: (p, x)))({"w": w}, w)
    program = bytes(exported.serialize())
    alone = bytes(jax.export.export(jax.jit(jnp.sin))(w).serialize())
    for leaves, message in [
        ({"w": w}, "holds no program"),
        ({"program": w}, "holds no program"),
        ({"program": b"garbage" * 20}, "cannot read the program"),
        ({"program": b""}, "cannot read the program"),
        ({"program": alone}, "not of one export"),
        ({"program": program}, "not of one export"),
        ({"program": program, "parameters": {"w": w[:2]}}, "not of one export"),
        ({"program": program, "parameters": {"w": "text"}}, "not of one export"),
    ]:
        with pytest.raises(CheckpointError, match=message):
            load_function(forge(path, "function", flatten_state(leaves).leaves))
    for said in ({}, {"parameters": "b"}, {"parameters": "w", "normaliser": "rms"}):
        with pytest.raises(DamagedCheckpointError, match="which the file says it"):
            load_policy(forge(path, "policy", {"w": w}, **said))
    with pytest.raises(InvalidArgumentError, match="an exported sculpture"):
        load_policy(forge(path, "sculpture", {"w": w}))


# ------------------------------------------------------------------------- functions


def test_keys_weak_types_and_code_among_the_parameters_act_as_under_jit(
    tmp_path: Path,
) -> None:
    parameters = {
        "activation": jnp.tanh,
        "key": jax.random.key(3),
        "scale": jnp.asarray(1.5),  # weakly typed: a bfloat16 observation stays one
        "offset": 0.25,
        "host": np.linspace(0, 1, 3),  # float64, which jit narrows
    }

    def act(p: Any, obs: Any) -> Any:
        noise = jax.random.normal(p["key"], obs["x"].shape, obs["x"].dtype)
        x = p["activation"](obs["x"] * p["scale"] + p["offset"] + noise)
        return {"x": x, "host": (obs["steps"] + p["host"],)}

    obs = {"x": jnp.ones((2, 3), jnp.bfloat16), "steps": np.arange(3)}
    path = tmp_path / "act.safetensors"
    export_function(act, obs, path, parameters=parameters)
    rest = {n: parameters[n] for n in parameters if n != "activation"}
    jitted = jax.jit(lambda p, obs: act({**p, "activation": jnp.tanh}, obs))
    expected = jitted(rest, obs)
    found = load_function(path)(obs)
    assert expected["x"].dtype == jnp.bfloat16
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(
        lambda a, b: pytest.fail() if not same_bits(a, b) else 0, found, expected
    )
    assert load_function(path).platforms == ("cpu",)


def test_what_cannot_be_exported_is_refused_with_its_reason(tmp_path: Path) -> None:
    path = tmp_path / "act.safetensors"

    class Action(NamedTuple):
        force: Any

    for fn, arguments, message in [
        (lambda x: float(x.sum()), {}, "fn cannot be exported: "),
        (lambda x: x[:5] if len(x) > 5 else x, {"batched": True}, "batched=False"),
        (Action, {}, "may be arrays in dicts, lists and tuples"),
        (lambda x: jax.debug.print("{}", x), {}, "callbacks"),
        (None, {}, "fn is no function: None"),
        (lambda p, x: x, {}, "missing 1 required positional argument"),
        (lambda x: x, {"parameters": jnp.ones(1)}, "takes 1 positional argument"),
        (jnp.sin, {"platforms": "cpu"}, "platforms='cpu': expected some of cpu, cuda"),
        (jnp.sin, {"platforms": ["gpu"]}, "platforms=['gpu']: expected some of"),
        (jnp.sin, {"platforms": []}, "platforms=[]: expected some of"),
    ]:
        with pytest.raises(InvalidArgumentError) as caught:
            export_function(fn, jnp.ones((2, 3)), path, **arguments)
        assert message in str(caught.value)
    with pytest.raises(InvalidArgumentError, match="has no axis"):
        export_function(jnp.sin, jnp.float32(1), path, batched=True)
    for obs, message in [("text", "it holds a str"), (None, "it holds no arrays")]:
        with pytest.raises(InvalidArgumentError, match=message):
            export_function(lambda obs: jnp.ones(3), obs, path)
    spread = eight_devices(jax.sharding.AxisType.Auto)
    with pytest.raises(InvalidArgumentError, match="fn acts on 8 devices"):
        export_function(
            lambda x: jax.lax.with_sharding_constraint(x, spread), jnp.ones(8), path
        )
    assert not path.exists()


def test_an_observation_that_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "act.safetensors"
    obs = {"x": jnp.ones((2, 3)), "goal": jnp.ones(2)}
    export_function(lambda obs: obs["x"].sum(-1) + obs["goal"], obs, path, batched=True)
    act = load_function(path)
    x = np.ones((4, 3), np.float32)
    assert act({"x": np.ones((4, 3)), "goal": np.ones(4)}).shape == (4,)  # float64
    for wrong, details in [
        (
            {"x": x[:, :2], "goal": x[:, 0]},
            ["x: expected float32[4,3], found float32[4,2]"],
        ),
        ({"x": x, "goal": x[:2, 0]}, ["x: expected float32[2,3], found float32[4,3]"]),
        (
            {"x": x[:0], "goal": x[:0, 0]},
            ["x: expected float32[batch,3], found float32[0,3]"],
        ),
        (
            {"x": x.astype(int), "goal": x[:, 0]},
            ["x: expected float32[4,3], found int32[4,3]"],
        ),
        ({"x": x}, ["goal: expected float32[batch], found nothing"]),
        ({"x": "text", "goal": x[:, 0]}, ["x: expected float32[4,3], found a str"]),
        (x, ["obs: expected nothing, found float32[4,3]"]),
    ]:
        with pytest.raises(InvalidArgumentError) as caught:
            act(wrong)
        assert set(details) & {d.removeprefix("obs.") for d in caught.value.details}, (
            caught.value.details
        )
        assert "cannot act: the observation does not fit" in str(caught.value)
    with pytest.raises(InvalidArgumentError, match="batched=True, and pass the batch"):
        jax.vmap(act)({"x": x[None], "goal": x[None, :, 0]})


def eight_devices(
    kind: jax.sharding.AxisType = jax.sharding.AxisType.Explicit,
) -> jax.sharding.NamedSharding:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))


def test_parameters_on_many_devices_act_on_one(tmp_path: Path) -> None:
    path = tmp_path / "act.safetensors"
    w = jax.device_put(jnp.arange(16.0).reshape(8, 2), eight_devices())
    export_function(lambda w, x: x @ w, jnp.ones((2, 8)), path, parameters=w)
    assert load_function(path)(jnp.ones((2, 8)))[0].tolist() == [56.0, 64.0]


def test_a_function_of_another_platform_or_of_64_bits_is_refused(
    tmp_path: Path,
) -> None:
    path = tmp_path / "act.safetensors"
    record = export_function(jnp.sin, jnp.ones(3), path, platforms=("cuda", "tpu"))
    with pytest.raises(CheckpointError) as caught:
        load_function(path)
    assert str(caught.value).startswith(
        f"{path}: cannot load the function: the function is for cuda, tpu, and jax "
        "runs on cpu here\nTo mend: "
    )
    assert json.loads(Path(record.json_path).read_text())["platforms"] == "cuda tpu"
    export_function(jnp.sin, jnp.ones(3), path, platforms=("cuda", "cpu"))
    assert load_function(path)(jnp.zeros(3)).tolist() == [0.0] * 3
    jax.config.update("jax_enable_x64", True)
    try:
        w = jnp.ones(3)
        assert w.dtype == jnp.float64
        export_function(lambda w, x: w * x, w, path, parameters=w)
        assert load_function(path)(w).dtype == jnp.float64
    finally:
        jax.config.update("jax_enable_x64", False)
    with pytest.raises(CheckpointError, match="acts with float64") as caught:
        load_function(path)
    assert "jax_enable_x64" in caught.value.hint


def test_a_program_in_a_newer_language_is_refused_when_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "act.safetensors"
    serialize = ajaxckpt._programs._serialize

    def serialize_newer(exported: Any) -> bytes:
        blob = serialize(exported)
        newer, count = re.subn(rb"(sine_v)\d", rb"\g<1>9", blob)
        assert count == 1
        return newer

    monkeypatch.setattr(ajaxckpt._programs, "_serialize", serialize_newer)
    export_function(jnp.sin, jnp.ones(3), path)
    with pytest.raises(CheckpointError, match="cannot read the program"):
        load_function(path)


def act_golden(parameters: Any, obs: Any) -> Any:
    with jax.numpy_rank_promotion("allow"):
        normal = (obs - parameters["mean"]) / jnp.sqrt(parameters["var"])
        return jnp.tanh(normal @ parameters["w"])


def test_a_function_that_an_older_jax_wrote_acts_with_this_one() -> None:
    # written by this file, run as a script with jax 0.10.2
    act = load_function(GOLDEN)
    assert act.provenance["jax"] == "0.10.2"
    p = act.inputs
    for n in (7, 1):
        normal = (OBS[:n].astype(float) - p["mean"]) / np.sqrt(p["var"])
        expected = np.tanh(normal @ p["w"])
        np.testing.assert_allclose(act(OBS[:n]), expected, rtol=1e-5, atol=1e-6)


def test_a_function_says_nothing_of_where_its_code_lies(tmp_path: Path) -> None:
    path = tmp_path / "act.safetensors"
    export_function(act_golden, OBS, path, parameters=load_function(GOLDEN).inputs)
    for file in (path, GOLDEN):
        assert str(ROOT).encode() not in file.read_bytes()
    assert b"test_export.py" in path.read_bytes()
    assert jax.config.jax_hlo_source_file_canonicalization_regex is None


def test_without_flatbuffers_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "act.safetensors"
    export_function(jnp.sin, jnp.ones(3), path)
    for name in [name for name in sys.modules if name.endswith("export.serialization")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "flatbuffers", None)
    for call in (
        lambda: load_function(path),
        lambda: export_function(jnp.sin, jnp.ones(3), path),
    ):
        with pytest.raises(CheckpointError, match="flatbuffers is missing") as caught:
            call()
        assert "ajaxckpt[export]" in caught.value.hint


def test_parameters_of_another_agent_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "act.safetensors"
    export_function(
        lambda p, x: x @ p["w"],
        jnp.ones((2, 3)),
        path,
        parameters={"w": jnp.ones((3, 1))},
    )
    act = load_function(path)
    with pytest.raises(InvalidArgumentError) as caught:
        act(jnp.ones((2, 3)), parameters={"w": jnp.ones((3, 2)), "b": jnp.ones(2)})
    assert str(caught.value) == (
        f"{path}: cannot act: parameters: 2 leaves do not fit the function\n"
        "  b: expected nothing, found float32[2]\n"
        "  w: expected float32[3,1], found float32[3,2]\n"
        "To mend: pass parameters of the same agent; numbers, text and functions among "
        "them are constants of the program: pass the same, or export the function again"
    )


class Head(enum.Enum):
    TANH = 1
    SINE = 2


def test_constants_among_other_parameters_must_be_those_of_the_program(
    tmp_path: Path,
) -> None:
    parameters = {
        "w": jnp.ones((3, 1)),
        "scale": 2.0,
        "times": 3,
        "head": "tanh",
        "kind": Head.TANH,
        "act": jnp.tanh,
        "key": jax.random.key(0, impl="rbg"),
        "on": True,
        "big": 1 << 20_000,
    }

    def act(p: Any, obs: Any) -> Any:
        for _ in range(p["times"]):
            obs = obs * p["scale"] if p["on"] else obs
        return p["act"](obs @ p["w"]) + jax.random.normal(p["key"], (1, 1))

    path = tmp_path / "act.safetensors"
    record = export_function(act, jnp.ones((2, 3)), path, parameters=parameters)
    said = json.loads(Path(record.json_path).read_text())
    assert said["leaves"]["constants.scale"] == {"kind": "float", "value": 2.0}
    loaded = load_function(path)
    obs = jnp.full((2, 3), 0.01)
    same = {**parameters, "w": parameters["w"] * 2}
    expected = jax.jit(lambda w: act({**parameters, "w": w}, obs))(same["w"])
    assert same_bits(loaded(obs, parameters=same), expected)
    words = {**same, "key": jax.random.key_data(same["key"])}
    assert same_bits(loaded(obs, parameters=words), expected)
    arrays = {name: same[name] for name in same if name != "act"}
    assert same_bits(loaded(obs, parameters=arrays), expected)  # code can be left out
    for name, value, detail in [
        ("scale", 5.0, "scale: expected Python float 2.0, found Python float 5.0"),
        ("scale", 2, "scale: expected Python float 2.0, found Python int 2"),
        ("scale", jnp.float32(2), "scale: expected Python float 2.0, found float32[]"),
        ("scale", None, "scale: expected Python float 2.0, found nothing"),
        ("times", 4, "times: expected Python int 3, found Python int 4"),
        ("on", False, "on: expected Python bool True, found Python bool False"),
        ("head", "sin", "head: expected Python str 'tanh', found Python str 'sin'"),
        ("kind", Head.SINE, "kind: expected enum member TANH, found enum member SINE"),
        ("more", 1.0, "more: expected nothing, found Python float 1.0"),
        ("w", 1.0, "w: expected float32[3,1], found Python float 1.0"),
        (
            "key",
            jax.random.key(0, impl="unsafe_rbg"),
            "key: expected key<rbg>[], found key<unsafe_rbg>[]",
        ),
    ]:
        with pytest.raises(InvalidArgumentError) as caught:
            loaded(obs, parameters={**same, name: value})
        assert caught.value.details == (detail,)
        assert "constants of the program" in caught.value.hint
    with pytest.raises(InvalidArgumentError, match="found function"):
        loaded(obs, parameters={**same, "act": jnp.sin})
    with pytest.raises(InvalidArgumentError, match="expected Python int 0x1") as caught:
        loaded(obs, parameters={**same, "big": 1 << 20_001})
    assert len(caught.value.details[0]) < 400


def test_other_parameters_act_under_jit_but_for_traced_constants(
    tmp_path: Path,
) -> None:
    path = tmp_path / "act.safetensors"
    obs = jnp.ones((2, 3))
    parameters = {"w": jnp.ones((3, 1)), "s": 2.0, "key": jax.random.key(0)}

    def act(p: Any, obs: Any) -> Any:
        return obs @ p["w"] * p["s"] + jax.random.normal(p["key"], (1, 1))

    export_function(act, obs, path, parameters=parameters)
    loaded = load_function(path)

    def later(arrays: Any) -> Any:
        return loaded(obs, parameters={**arrays, "s": 2.0})

    arrays = {"w": jnp.full((3, 1), 0.5), "key": jax.random.key(1)}
    expected = jax.jit(lambda arrays: act({**arrays, "s": 2.0}, obs))(arrays)
    assert same_bits(jax.jit(later)(arrays), expected)
    with pytest.raises(InvalidArgumentError) as caught:
        jax.jit(lambda p: loaded(obs, parameters=p))(parameters)
    assert caught.value.details == ("s: expected Python float 2.0, found float32[]",)


@pytest.mark.parametrize(
    "parameters",
    [
        jnp.ones((3, 1)),
        [jnp.ones((3, 1)), "text", b"bytes", 2.0, jnp.tanh],
        {"parameters": {"a.b": jnp.ones((3, 1), "bfloat16")}, "program": jnp.ones(1)},
        {"key": jax.ShapeDtypeStruct((), jnp.uint32)},
        None,
    ],
    ids=["an array", "constants", "names", "a key", "none"],
)
def test_the_lines_without_ajaxckpt_call_whatever_was_exported(
    parameters: Any, tmp_path: Path
) -> None:
    if isinstance(parameters, dict) and "key" in parameters:
        parameters = {"key": jax.random.key(3)}

    def act(p: Any, obs: Any) -> Any:
        noise = 0.0
        for leaf in jax.tree.leaves(p):
            if isinstance(leaf, jax.Array):
                is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
                leaf = jax.random.normal(leaf) if is_key else leaf.sum()
                noise = noise + leaf
        return obs * 2 + noise

    path = tmp_path / "act.safetensors"
    obs = jnp.ones((2, 3))
    if parameters is None:
        export_function(partial(act, None), obs, path)
    else:
        export_function(act, obs, path, parameters=parameters)
    names = {"safetensors": safetensors, "jax": jax, "path": path, "obs": obs}
    exec(without_ajaxckpt(), names)
    assert same_bits(names["action"], load_function(path)(obs))


def test_what_takes_64_bits_is_refused_where_jax_has_none(tmp_path: Path) -> None:
    path = tmp_path / "act.safetensors"
    obs = {"x": np.ones((2, 3)), "n": np.ones(2, np.int32)}
    with jax.enable_x64(True):
        export_function(lambda o: o["x"] * 2, obs, path, batched=True)
        loaded = load_function(path)
        assert loaded(obs).dtype == jnp.float64
    with pytest.raises(CheckpointError) as caught:
        load_function(path)
    assert str(caught.value) == (
        f"{path}: cannot load the function: the function acts with float64 (obs.x), "
        "which jax_enable_x64 turns off here\nTo mend: jax.config.update("
        "'jax_enable_x64', True) before loading it"
    )
    with pytest.raises(InvalidArgumentError) as caught:
        loaded(obs)
    assert caught.value.details == ("obs.x: expected float64[2,3], found float32[2,3]",)
    assert "jax_enable_x64" in caught.value.hint


def test_a_transfer_guard_does_not_keep_a_function_from_loading(
    tmp_path: Path,
) -> None:
    path = tmp_path / "act.safetensors"
    obs = jnp.ones((2, 3))
    parameters = {"w": jnp.ones((2, 3)), "key": jax.random.key(0)}
    expected = obs + parameters["w"]
    with jax.transfer_guard("disallow"):
        export_function(lambda p, x: x + p["w"], obs, path, parameters=parameters)
        found = load_function(path)(obs)
        again = load_function(path)(obs, parameters=parameters)
    assert same_bits(found, expected)
    assert same_bits(again, expected)


def test_a_program_that_this_jax_does_not_read_says_which_wrote_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "act.safetensors"
    export_function(jnp.sin, jnp.ones(3), path)

    def refuse(blob: bytearray) -> Any:
        raise ValueError("version 99 is not known")

    monkeypatch.setattr(jax.export, "deserialize", refuse)
    with pytest.raises(CheckpointError, match="version 99 is not known") as caught:
        load_function(path)
    assert f"load it with jax {jax.__version__} or newer" in caught.value.hint


def test_importing_and_loading_without_a_skeleton_load_no_jax(tmp_path: Path) -> None:
    export_policy({"actor": {"params": {"w": jnp.ones(3)}}}, tmp_path / "p.safetensors")
    code = (
        "import sys, ajaxckpt\n"
        "print(ajaxckpt.export.load_policy('p.safetensors').parameters['w'].tolist())\n"
        "print('jax' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split("\n")[:2] == ["[1.0, 1.0, 1.0]", "False"]


def test_examples_in_docstrings_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ajaxckpt.export, "_warned", {"rms"})
    names = {"jnp": jnp, "__name__": "ajaxckpt.export"}
    for module in (ajaxckpt.export, ajaxckpt._export_json, ajaxckpt._normalisers):
        result = doctest.testmod(module, extraglobs=names)
        assert result.attempted and not result.failed


if __name__ == "__main__":  # writes the golden file anew, saying nothing of the machine
    ajaxckpt._exporting.gather_provenance = lambda: {"jax": jax.__version__}
    statistics = {"mean": jnp.asarray([1.0, 0.0, 2.0]), "var": jnp.asarray([4.0, 1, 9])}
    weights = {"w": jnp.asarray([[0.5, 1.0], [-1.0, 0.25], [0.25, -0.5]])}
    export_function(
        act_golden, OBS, GOLDEN, parameters={**statistics, **weights}, batched=True
    )
    Path(GOLDEN).with_suffix(".json").unlink(missing_ok=True)
