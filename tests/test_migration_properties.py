"""Random layouts, edited at random: the matching registry leads there."""

from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import HealthCheck, assume, event, given, settings
from hypothesis import strategies as st

from ajaxckpt import Migrations, Rules, plan_restore, save_checkpoint

Model = dict[str, np.ndarray[Any, Any]]
SEGMENTS = ["a", "b", "mu", "0", "1", '"x.y"', "layer_0", "layer_1", "w"]
SHAPES = [(), (3,), (1, 4), (2, 3), (2, 1, 2)]
VERBS = ["move", "move node", "drop", "add", "reshape", "squeeze", "expand", "take"]


def is_free(model: Model, name: str) -> bool:
    """Tell whether a leaf can have a name: no leaf is above, at or below it."""
    return not any(
        other == name or other.startswith(f"{name}.") or name.startswith(f"{other}.")
        for other in model
    )


def names() -> st.SearchStrategy[str]:
    return st.lists(st.sampled_from(SEGMENTS), min_size=1, max_size=3).map(".".join)


@st.composite
def models(draw: st.DrawFn) -> Model:
    model: Model = {}
    for place, name in enumerate(draw(st.lists(names(), min_size=1, max_size=8))):
        if is_free(model, name):
            shape = draw(st.sampled_from(SHAPES))
            size = int(np.prod(shape))
            values = np.arange(size, dtype=np.float32) + 100 * place
            model[name] = values.reshape(shape)
    return model


def nodes_of(model: Model) -> list[str]:
    """Return the inner nodes; of the segments here, one holds a dot."""
    found: dict[str, None] = {}
    for name in model:
        segments = name.replace('"x.y"', "QUOTED").split(".")
        for depth in range(1, len(segments)):
            found[".".join(segments[:depth]).replace("QUOTED", '"x.y"')] = None
    return list(found)


def edit(draw: st.DrawFn, verb: str, model: Model, rules: Rules) -> bool:
    """Edit the model and register the same; tell whether there was a way."""
    name = draw(st.sampled_from(sorted(model)))
    array = model[name]
    if verb == "move":
        new = draw(names())
        if not is_free({n: x for n, x in model.items() if n != name}, new):
            return False
        model[new] = model.pop(name)
        rules.move(name, new)
    elif verb == "move node":
        nodes, new = nodes_of(model), draw(names())
        if not nodes:
            return False
        node = draw(st.sampled_from(nodes))
        moved = {n: x for n, x in model.items() if n.startswith(f"{node}.")}
        rest = {n: x for n, x in model.items() if n not in moved}
        if not is_free(rest, new):
            return False
        model.clear()
        model.update(rest)
        model.update({new + n[len(node) :]: x for n, x in moved.items()})
        rules.move(node, new)
    elif verb == "drop":
        if len(model) == 1:
            return False
        del model[name]
        rules.drop(name)
    elif verb == "add":
        new = draw(names())
        if not is_free(model, new):
            return False
        model[new] = 2 * array
        rules.add(new, compute=lambda x: 2 * x, inputs=name)
    elif verb == "reshape":
        model[name] = array.reshape(-1)
        rules.reshape(name, (-1,))
    elif verb == "squeeze":
        if 1 not in array.shape:
            return False
        axis = array.shape.index(1)
        model[name] = array.squeeze(axis)
        rules.squeeze(name, axis)
    elif verb == "expand":
        axis = draw(st.integers(0, array.ndim))
        model[name] = np.stack([array] * 3, axis=axis)
        rules.expand(name, 3, axis=axis)
    else:
        if not array.ndim:
            return False
        axis = draw(st.integers(-array.ndim, array.ndim - 1))
        index = draw(st.integers(0, array.shape[axis] - 1))
        model[name] = np.take(array, index, axis)
        rules.take(name, index, axis=axis)
    return True


def nest(model: Model) -> Any:
    """Return nested dicts whose leaves have the model's names."""
    tree: dict[Any, Any] = {}
    for name, array in model.items():
        segments = name.replace('"x.y"', "QUOTED").split(".")
        keys = [
            "x.y" if s == "QUOTED" else int(s) if s.isdecimal() else s for s in segments
        ]
        node = tree
        for key in keys[:-1]:
            node = node.setdefault(key, {})
        node[keys[-1]] = array
    return tree


def sortable(model: Model) -> bool:
    """Tell whether JAX can flatten it: no dict has both numbers and texts for keys."""
    kinds: dict[str, set[bool]] = {}
    for name in model:
        segments = name.replace('"x.y"', "QUOTED").split(".")
        for depth, segment in enumerate(segments):
            parent = ".".join(segments[:depth])
            kinds.setdefault(parent, set()).add(segment.isdecimal())
    return all(len(found) == 1 for found in kinds.values())


def look_up(tree: Any, name: str) -> Any:
    for segment in name.replace('"x.y"', "QUOTED").split("."):
        key = "x.y" if segment == "QUOTED" else segment
        tree = tree[int(key) if key.isdecimal() else key]
    return tree


@settings(
    max_examples=300,
    deadline=None,
    suppress_health_check=[
        HealthCheck.function_scoped_fixture,
        HealthCheck.filter_too_much,
        HealthCheck.too_slow,
    ],
)
@given(data=st.data(), model=models().filter(sortable))
def test_edited_layouts_restore_through_the_matching_registry(
    data: st.DataObject, model: Model, tmp_path: Path
) -> None:
    path = tmp_path / "a.safetensors"
    save_checkpoint(nest(model), path)
    migrations = Migrations("edits")
    verbs = data.draw(st.lists(st.sampled_from(VERBS), min_size=1, max_size=6))
    edited = dict(model)
    for verb in verbs:
        trial = dict(edited)
        rules = migrations.step(migrations.version + 1, f"edit {migrations.version}")
        if edit(data.draw, verb, trial, rules):
            edited = trial
            event(verb)
        else:
            rules.check("**", lambda _: True, "always right")  # no change, no error
    assume(sortable(edited))
    skeleton = nest({name: np.zeros_like(array) for name, array in edited.items()})
    plan = plan_restore(skeleton, path, migrations=migrations)
    assert plan.mismatches == ()
    assert {*plan.load, *plan.migrate} == set(edited)
    restored = plan.apply()
    for name, array in edited.items():
        found = look_up(restored, name)
        assert (found.dtype, found.shape) == (array.dtype, array.shape)
        assert found.tobytes() == np.ascontiguousarray(array).tobytes()
