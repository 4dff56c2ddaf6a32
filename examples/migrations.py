"""Real changes of a training state's layout, and the migration that each one needs.

Each registry stands right above the old state and the new skeleton that it joins.
Run the file to see every old state saved, restored into today's skeleton, and counted::

    python examples/migrations.py
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax

from ajaxckpt import Migrations, optax_moves, plan_restore, save_checkpoint

ROWS = 6  # of the replay's ring
PARAMS = {
    "Dense_0": {"kernel": jnp.linspace(-1.0, 1.0, 6).reshape(2, 3)},
    "Dense_1": {"kernel": jnp.linspace(0.0, 1.0, 3).reshape(3, 1)},
}


@flax.struct.dataclass
class Replay:
    """A ring of transitions, (environments, rows, features) each."""

    experience: dict[str, jax.Array]
    current_index: jax.Array
    is_full: jax.Array


@flax.struct.dataclass
class Agent:
    """An agent's state, of the parts that these examples need."""

    params: Any
    opt_state: Any
    buffer: Any
    timestep: jax.Array


def rows(*shape: int, start: float = 0.0) -> jax.Array:
    """Return distinct numbers, so that a value in a wrong place shows."""
    return start + jnp.arange(float(np.prod(shape))).reshape(shape)


def replay(**fields: jax.Array) -> Replay:
    """Return a full ring that was last written at row 2."""
    return Replay(fields, jnp.asarray(2), jnp.asarray(True))


# --- a: the replay stores each row's next observation -----------------------------

next_observations = Migrations("replay")
next_observations.rule("each row stores its next observation").add(
    "**.experience.next_obs",
    compute=lambda obs: np.roll(obs, -1, axis=-2),  # the ring wraps round
    inputs="{1}.experience.obs",
)


def old_replay() -> Any:
    """Return a replay whose next observation is that of the following row."""
    return {"buffer": replay(obs=rows(2, ROWS, 3), action=rows(2, ROWS, 1))}


def new_replay() -> Any:
    """Return today's empty replay."""
    obs = jnp.zeros((2, ROWS, 3))
    fields = {"obs": obs, "action": jnp.zeros((2, ROWS, 1)), "next_obs": obs}
    return {"buffer": replay(**fields)}


# --- b: raw observations and expert flags, which today's replay lacks, are kept ----

expert_fields = Migrations("expert")
expert_fields.rule("kept only for an expert since").adopt("**.experience.raw_obs")
expert_fields.rule("flags likewise").adopt("**.experience.is_expert")


def old_expert_replay() -> Any:
    """Return a replay that kept them for everyone."""
    flags = jnp.arange(2 * ROWS).reshape(2, ROWS, 1) % 3 == 0
    fields = {"obs": rows(2, ROWS, 3), "raw_obs": rows(2, ROWS, 3, start=100.0)}
    return {"buffer": replay(**fields, is_expert=flags)}


def new_expert_replay() -> Any:
    """Return today's replay without an expert."""
    return {"buffer": replay(obs=jnp.zeros((2, ROWS, 3)))}


def write_row(buffer: Replay, row: dict[str, jax.Array]) -> Replay:
    """Write one row into whatever fields the replay has."""
    experience = {
        name: data.at[:, buffer.current_index].set(row[name])
        for name, data in buffer.experience.items()
    }
    index = (buffer.current_index + 1) % ROWS
    return buffer.replace(experience=experience, current_index=index)


# --- c: a field that the new layout leaves empty needs no migration ---------------


@flax.struct.dataclass
class Collector:
    """An actor's place in its environment."""

    obs: jax.Array
    hidden: Any = None  # filled by recurrent agents alone


nothing_to_do = Migrations("collector")


def old_collector() -> Any:
    """Return a collector's state from before it had a field for a memory."""
    return {"collector": {"obs": rows(2, 3)}}


def new_collector() -> Any:
    """Return today's, with an empty field."""
    return {"collector": Collector(jnp.zeros((2, 3)))}


# --- d: the environment's normaliser keeps the raw observation ---------------------


@flax.struct.dataclass
class Statistics:
    """Running statistics of the observations."""

    mean: jax.Array
    var: jax.Array


@flax.struct.dataclass
class EnvState:
    """A state of a wrapped environment."""

    obs: jax.Array
    info: dict[str, Any]


raw_observations = Migrations("normaliser")
raw_observations.rule("the normaliser keeps the raw observation").add(
    "**.info.raw_obs",
    compute=lambda obs, mean, var: obs * np.sqrt(var + np.float32(1e-8)) + mean,
    inputs=("{1}.obs", "{1}.info.stats.mean", "{1}.info.stats.var"),
)


def _statistics() -> Statistics:
    return Statistics(jnp.array([1.0, 2.0]), jnp.array([4.0, 9.0]))


def old_environment() -> Any:
    """Return an environment that knows the normalised observation only."""
    info = {"stats": _statistics()}
    return {"env": EnvState(jnp.array([[0.5, -1.0], [0.0, 2.0]]), info)}


def new_environment() -> Any:
    """Return one that stores both."""
    zeros = jnp.zeros((2, 2))
    info = {"stats": Statistics(jnp.zeros(2), jnp.ones(2)), "raw_obs": zeros}
    return {"env": EnvState(zeros, info)}


# --- e: a running sum that nothing read is dropped ---------------------------------

unread_sum = Migrations("segments")
unread_sum.rule("nothing read the running sum").drop("**.buffer.cum_rewards")


def old_segments() -> Any:
    """Return a segment buffer with the sum."""
    return {
        "buffer": {
            "rewards": rows(2, ROWS),
            "cum_rewards": jnp.cumsum(rows(2, ROWS), axis=1),
        }
    }


def new_segments() -> Any:
    """Return one without."""
    return {"buffer": {"rewards": jnp.zeros((2, ROWS))}}


# --- f: a second copy is dropped, normalised observations are refused -------------

second_copy = Migrations("segments")
rule = second_copy.rule("obs holds what raw_obs copied", until="2126-11-17")
rule.refuse(
    "segments of normalised observations cannot be used any more: start afresh",
    when=lambda view: view.config.get("normalize_observations", False),
)
rule.drop("**.buffer.raw_obs")


def old_copies() -> Any:
    """Return a buffer with the environment's own observations twice."""
    return {"buffer": {"obs": rows(2, ROWS, 3), "raw_obs": rows(2, ROWS, 3)}}


def new_copies() -> Any:
    """Return one with them once."""
    return {"buffer": {"obs": jnp.zeros((2, ROWS, 3))}}


# --- g: the optimiser's own gradient clip is gone, for the agents named -----------

own_clip = Migrations("clip")
optax_moves.unwrap_chain(
    own_clip.rule(
        "one clip over both networks",
        when=lambda view: (
            view.config.get("agent") in ("PPO", "APO")
            and not view.has("**.opt_state.0.count")
        ),
    ),
    "**.opt_state",
    1,
)


def old_clipped() -> Any:
    """Return an optimiser's state behind a clip, after three updates."""
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-3))
    return {"actor": {"opt_state": _trained(tx, PARAMS)}}


def new_unclipped() -> Any:
    """Return the state of the optimiser without it."""
    return {"actor": {"opt_state": optax.adam(1e-3).init(PARAMS)}}


def _trained(tx: optax.GradientTransformation, params: Any) -> Any:
    state = tx.init(params)
    for _ in range(3):
        _, state = tx.update(jax.tree.map(lambda x: x + 0.1, params), state, params)
    return state


# --- h: new float fields that the old run never computed --------------------------


class PretrainLosses(NamedTuple):
    """Losses of a pretraining phase."""

    mean_loss: jax.Array
    first_loss: Any = None
    last_loss: Any = None


never_computed = Migrations("pretraining")
added = never_computed.rule("first and last losses are recorded")
added.add("**.first_loss", np.nan).add("**.last_loss", np.nan)


def old_losses() -> Any:
    """Return what a run recorded before."""
    return {"losses": {"mean_loss": rows(2)}}


def new_losses() -> Any:
    """Return what it records today."""
    return {"losses": PretrainLosses(jnp.zeros(2), jnp.zeros(2), jnp.zeros(2))}


# --- dtypes and shapes -------------------------------------------------------------

flag_type = Migrations("flags")
flag_type.step(1, "flags are flags").cast("**.done", "bool")


def old_flags() -> Any:
    """Return int8 flags."""
    return {"done": jnp.array([0, 1, 1, 0], jnp.int8)}


def new_flags() -> Any:
    """Return bool flags."""
    return {"done": jnp.zeros(4, bool)}


number_type = Migrations("numbers")
number_type.step(1, "flags are numbers again").cast("**.done", "int8")

unit_axis = Migrations("axes")
unit_axis.step(1, "no axis of one environment").squeeze("obs", axis=0)


def old_axis() -> Any:
    """Return a leaf of shape (1, n)."""
    return {"obs": rows(1, 5)}


def new_axis() -> Any:
    """Return one of shape (n,)."""
    return {"obs": jnp.zeros(5)}


fused_kernel = Migrations("attention")
fused_kernel.step(1, "q, k and v apart").split(
    "**.qkv.kernel", ["{1}.q.kernel", "{1}.k.kernel", "{1}.v.kernel"]
)


def old_kernel() -> Any:
    """Return one fused kernel."""
    return {"params": {"attention": {"qkv": {"kernel": rows(4, 6)}}}}


def new_kernel() -> Any:
    """Return three."""
    parts = {name: {"kernel": jnp.zeros((4, 2))} for name in "qkv"}
    return {"params": {"attention": parts}}


scanned_layers = Migrations("layers")
scanned_layers.step(1, "scan over layers").stack("params.layer_*", "params.layers")


def old_layers() -> Any:
    """Return twelve layers by number: 10 comes after 9."""
    layer = {f"layer_{n}": {"w": rows(2, 2, start=10.0 * n)} for n in range(12)}
    return {"params": layer}


def new_layers() -> Any:
    """Return them stacked."""
    return {"params": {"layers": {"w": jnp.zeros((12, 2, 2))}}}


more_seeds = Migrations("seeds")
more_seeds.step(1, "one run becomes three seeds").expand("**", 3)

one_seed = Migrations("seeds")
one_seed.step(1, "the best seed goes on alone").take("**", 1)


def single() -> Any:
    """Return a state without an axis of seeds."""
    return {"params": rows(2, 2), "key": jax.random.key(7), "step": jnp.asarray(5)}


def seeded() -> Any:
    """Return one of three seeds."""
    keys = jax.random.split(jax.random.key(7), 3)
    return {"params": rows(3, 2, 2), "key": keys, "step": jnp.arange(3)}


renamed_trunk = Migrations("names")
renamed_trunk.step(1, "layers of the trunk by name").under(
    "params", "opt_state.**.mu", "opt_state.**.nu"
).move("Dense_*", "trunk.layer_{1}")


def old_names() -> Any:
    """Return parameters and Adam's moments of the same names."""
    state = _trained(optax.adam(1e-3), PARAMS)
    return Agent(PARAMS, state, None, jnp.asarray(3))


def new_names() -> Any:
    """Return them below a trunk."""
    layers = {name.replace("Dense", "layer"): PARAMS[name] for name in PARAMS}
    params = jax.tree.map(jnp.zeros_like, {"trunk": layers})
    return Agent(params, optax.adam(1e-3).init(params), None, jnp.asarray(0))


Example = tuple[Migrations, Callable[[], Any], Callable[[], Any]]
EXAMPLES: dict[str, Example] = {
    "a next observations": (next_observations, old_replay, new_replay),
    "b fields kept": (expert_fields, old_expert_replay, new_expert_replay),
    "c an empty field": (nothing_to_do, old_collector, new_collector),
    "d raw observations": (raw_observations, old_environment, new_environment),
    "e an unread sum": (unread_sum, old_segments, new_segments),
    "f a second copy": (second_copy, old_copies, new_copies),
    "g a clip less": (own_clip, old_clipped, new_unclipped),
    "h never computed": (never_computed, old_losses, new_losses),
    "int8 to bool": (flag_type, old_flags, new_flags),
    "bool to int8": (number_type, new_flags, old_flags),
    "squeezed": (unit_axis, old_axis, new_axis),
    "split in three": (fused_kernel, old_kernel, new_kernel),
    "stacked": (scanned_layers, old_layers, new_layers),
    "seeds added": (more_seeds, single, seeded),
    "a seed taken": (one_seed, seeded, single),
    "renamed with moments": (renamed_trunk, old_names, new_names),
}


def main() -> None:
    """Save every old state, and restore it into today's skeleton."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "old.safetensors")
        for name, (migrations, old, new) in EXAMPLES.items():
            save_checkpoint(old(), path, config={"agent": "PPO"})
            plan = plan_restore(new(), path, migrations=migrations)
            plan.apply()
            counts = f"{len(plan.migrate)} migrated, {len(plan.drop)} dropped"
            print(f"{name}: {len(plan.load)} loaded, {counts}")


if __name__ == "__main__":
    main()
