"""What a leaf usually is, told by its name and spec, and what it means if it differs.

Knows the words that agents are written in; knows no values and no trees. These are
guesses for messages: nothing is decided by them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ajaxckpt._layout import LeafSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """What leaves of one sort are for.

    Attributes:
        name: what to call one, with its article.
        lost: what happens where one does not come back from a checkpoint.
        split: what it usually means where two calls leave another one than one call.
        is_downstream: whether it follows from the others, and so explains nothing.
        is_unknown: whether this says no more than that it is a leaf.
    """

    name: str
    lost: str
    split: str
    is_downstream: bool = False
    is_unknown: bool = False


def _words(pattern: str) -> Callable[[str], bool]:
    """Match whole words of a name; an underscore ends a word as a dot does."""
    search = re.compile(rf"(?:^|[._])(?:{pattern})(?=[._]|$)").search
    return lambda name: search(name) is not None


_is_keyish = _words(r"rngs?|prng|keys?|random|seed")
_is_buffer = _words(r"buffer|replay|storage|experience|ring|segments?")
_is_cursor = _words(
    r"index|idx|is_full|full|cursor|ptr|pointer|pos|position|head|size|insert"
)
_is_priority = _words(r"sum|tree|priorit(?:y|ies)|max_recorded_priority")
_is_optimiser = _words(r"opt|optim|optimi[sz]er|opt_state|adam|tx")
_is_moment = _words(r"mu|nu|trace|momentum|moments?|acc_grads")
_is_counter = _words(
    r"count|counts|counter|steps?|timesteps?|updates|iterations?|episodes?|epochs?|t"
    r"|time|total|logs|n"
)
_is_schedule = _words(r"epsilon|eps|lr|learning_rate|hyperparams|rate|annealing")
_is_normaliser = _words(
    r"norm|normali[sz](?:er|ation)|rms|running|statistics|stats|batch_stats"
)
_is_env = _words(r"env|envs|obs|observations?|last_obs|timestep_state|done|episode")
_is_memory = _words(r"hidden|carry|hstate|lstm|gru|memory|recurrent")
_is_target = _words(r"target|targets|ema")
_is_parameter = _words(r"params?|kernel|bias|weights?|w|b|actor|critic|policy|net|log")


def _is_whole(spec: LeafSpec) -> bool:
    return spec.dtype.startswith(("int", "uint")) or spec.kind == "int"


def _is_discrete(spec: LeafSpec) -> bool:
    return _is_whole(spec) or spec.dtype == "bool" or spec.kind == "bool"


def _is_key(name: str, spec: LeafSpec) -> bool:
    raw = spec.dtype == "uint32" and spec.shape[-1:] in ((2,), (4,))
    return spec.kind == "key" or (_is_keyish(name) and (raw or _is_whole(spec)))


def is_update_count(name: str, spec: LeafSpec) -> bool:
    """Tell whether a leaf counts an optimiser's updates.

    Example:
        >>> spec = LeafSpec(kind="jax", dtype="int32")
        >>> is_update_count("opt_state.0.count", spec), is_update_count("step", spec)
        (True, False)
    """
    lowered = name.lower()
    return _is_whole(spec) and _is_optimiser(lowered) and _is_counter(lowered)


# the most telling first: what comes later differs because what comes earlier does
_ROLES: tuple[tuple[Callable[[str, LeafSpec], bool], Role], ...] = (
    (
        _is_key,
        Role(
            name="a PRNG key",
            lost="the key starts anew, and random numbers are drawn a second time",
            split="a key is derived from the seed or the call, not carried in the "
            "state, or one of the two draws more often",
        ),
    ),
    (
        lambda name, spec: _is_discrete(spec) and _is_buffer(name) and _is_cursor(name),
        Role(
            name="a buffer cursor",
            lost="the buffer goes on writing at another row, or counts as empty",
            split="the buffer is set up again, or filled again, at every call",
        ),
    ),
    (
        lambda name, _: _is_buffer(name) and _is_priority(name),
        Role(
            name="a priority tree",
            lost="the priorities are gone, so other rows are sampled",
            split="the priorities are set up again at every call",
        ),
    ),
    (
        is_update_count,
        Role(
            name="an optimiser's count",
            lost="schedules and bias corrections of the optimiser start anew",
            split="the optimiser is set up again at every call",
        ),
    ),
    (
        lambda name, spec: (
            spec.dtype in ("", "float32", "float64", "float16", "bfloat16")
            and _is_schedule(name)
        ),
        Role(
            name="a scheduled value",
            lost="the schedule starts anew",
            split="a schedule runs over the steps of the call, not over the horizon",
        ),
    ),
    (
        lambda name, _: _is_normaliser(name),
        Role(
            name="a normaliser's statistic",
            lost="the networks see inputs on another scale",
            split="the statistics are set up again, or taken in again, at every call",
        ),
    ),
    (
        lambda name, spec: _is_discrete(spec) and _is_counter(name),
        Role(
            name="a counter",
            lost="schedules, evaluations and stop criteria start anew",
            split="two calls go another way than one: work that each call does "
            "once (a first rollout, a last evaluation), or a counter of the call",
        ),
    ),
    (
        lambda name, _: _is_moment(name) or _is_optimiser(name),
        Role(
            name="an optimiser's moment",
            lost="the optimiser starts anew, and the run dips while it warms up",
            split="the optimiser is set up again at every call",
            is_downstream=True,
        ),
    ),
    (
        lambda name, _: _is_buffer(name),
        Role(
            name="a buffer's content",
            lost="the run learns from other data than it gathered",
            split="the buffer is set up again, or filled again, at every call",
        ),
    ),
    (
        lambda name, _: _is_memory(name),
        Role(
            name="a recurrent memory",
            lost="the policy forgets the episode under way",
            split="the memory is cleared at every call",
        ),
    ),
    (
        lambda name, _: _is_env(name),
        Role(
            name="an environment's state",
            lost="the episode under way is torn, and another one begins",
            split="the environment is reset at every call",
        ),
    ),
    (
        lambda name, _: _is_target(name),
        Role(
            name="a target network",
            lost="the targets jump",
            split="the targets are copied again at every call",
        ),
    ),
    (
        lambda name, _: _is_parameter(name),
        Role(
            name="a parameter",
            lost="the network is not the one that was trained",
            split="the updates of two calls are not those of one",
            is_downstream=True,
        ),
    ),
)
_OTHER = Role(
    name="a leaf",
    lost="the run goes on from another state",
    split="it is set up again at every call",
    is_downstream=True,
    is_unknown=True,
)


def _rank(name: str, spec: LeafSpec) -> int:
    lowered = name.lower()
    found = (i for i, (holds, _) in enumerate(_ROLES) if holds(lowered, spec))
    return next(found, len(_ROLES))


def find_role(name: str, spec: LeafSpec) -> Role:
    """Return what a leaf of this name and spec usually is.

    Example:
        >>> find_role("buffer.current_index", LeafSpec(kind="jax", dtype="int32")).name
        'a buffer cursor'
    """
    rank = _rank(name, spec)
    return _ROLES[rank][1] if rank < len(_ROLES) else _OTHER


def most_telling(leaves: Iterable[tuple[str, LeafSpec]]) -> str:
    """Return the name of the leaf that says most about why others differ too."""
    return min(leaves, key=lambda pair: _rank(*pair))[0]


def lint_roles(leaves: Iterable[tuple[str, LeafSpec]]) -> tuple[str, ...]:
    """Return what a training state of these leaves seems to lack.

    Example:
        >>> lines = lint_roles([("step", LeafSpec(kind="jax", dtype="int32"))])
        >>> [line.split(":")[0] for line in lines]
        ['no leaf is a PRNG key']
    """
    listed = [(name.lower(), spec) for name, spec in leaves]
    notes: list[str] = []
    if not any(_is_key(*leaf) for leaf in listed):
        notes.append(
            "no leaf is a PRNG key: random numbers that are drawn from elsewhere "
            "are drawn a second time, or are others, after a restore"
        )
    counters = [leaf for leaf in listed if _is_discrete(leaf[1])]
    if not any(_is_counter(name) for name, _ in counters):
        notes.append(
            "no leaf is a counter: schedules, evaluations and stop criteria that "
            "count elsewhere start anew after a restore"
        )
    return tuple(notes)
