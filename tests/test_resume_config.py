"""A resumed run's config: explicit overrides of the saved one, and what differs."""

import copy
import dataclasses
import json
import math
import random
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ajaxckpt import InvalidArgumentError, open_checkpoint, save_checkpoint
from ajaxckpt._resume_config import ABSENT, describe_differences, resume_config

SAVED: dict[str, Any] = {
    "env": "Pendulum-v1",
    "lr": 3e-4,
    "steps": 1000,
    "anneal": True,
    "name": "8",
    "clip": None,
    "seeds": [0, 1],
    "betas": [0.9, 0.999],
    "optimiser": {"kind": "adam", "eps": 1e-8, "more": {}},
    "layers": [{"width": 64}, {"width": 32}],
    "mixed": [64, "relu", None],
    "a.b": 1,
    "0": 5,
    "k=v": 6,
    "+p": 7,
}


def same(a: object, b: object) -> bool:
    """Compare in value and type: 1 is neither 1.0 nor True, NaN is NaN."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and repr(a) == repr(b)


ACCEPTED: list[tuple[str, str, Any]] = [
    ("env=Hopper-v4", "env", "Hopper-v4"),
    ("env=", "env", ""),
    ("env=a=b", "env", "a=b"),
    ("env=two words", "env", "two words"),
    ('env="true"', "env", "true"),
    ("env=null", "env", None),
    ("lr=1e-3", "lr", 1e-3),
    ("lr=1", "lr", 1.0),
    ("lr=-0.0", "lr", -0.0),
    ("lr=Infinity", "lr", math.inf),
    ("lr=NaN", "lr", math.nan),
    ("lr=None", "lr", None),
    ("steps=1e6", "steps", 1_000_000),
    ("steps= 7 ", "steps", 7),
    ("steps=-3.0", "steps", -3),
    (f"steps={2**53}.0", "steps", 2**53),
    (f"steps={10**40}", "steps", 10**40),
    ("anneal=false", "anneal", False),
    ("anneal=False", "anneal", False),
    ('name="9"', "name", "9"),
    ("clip=0.5", "clip", 0.5),
    ("clip=text", "clip", "text"),
    ('clip={"norm": 1}', "clip", {"norm": 1}),
    ("seeds=[3, 4, 5.0]", "seeds", [3, 4, 5]),
    ("seeds=[]", "seeds", []),
    ("seeds=[1, null]", "seeds", [1, None]),
    ("seeds.1=7", "seeds", [0, 7]),
    ("betas=[1, 0.5, 0]", "betas", [1.0, 0.5, 0.0]),
    ('mixed=[32, "tanh", 3]', "mixed", [32, "tanh", 3]),
    ('mixed=["tanh"]', "mixed", ["tanh"]),
    ("optimiser.eps=1", "optimiser.eps", 1.0),
    ('optimiser={"eps": 1}', "optimiser.eps", 1.0),
    ("optimiser=null", "optimiser", None),
    ("layers.1.width=8", "layers.1.width", 8),
    ('layers=[{"width": 1}]', "layers", [{"width": 1}]),
    ('"a.b"=2', '"a.b"', 2),
    ("0=2", '"0"', 2),
    ('"0"=2', '"0"', 2),
    ('"k=v"=2', '"k=v"', 2),
    ('"+p"=2', '"+p"', 2),
    ("++lr=fast", "lr", "fast"),
    ("++steps=1.5", "steps", 1.5),
    ("++seeds=3", "seeds", 3),
    ("++seeds.0=x", "seeds", ["x", 1]),
    ("+new=1", "new", 1),
    ("+new=.5", "new", ".5"),
    ('+new={"a": [1]}', "new", {"a": [1]}),
    ("+optimiser.nesterov=true", "optimiser.nesterov", True),
    ("+optimiser.more.x=1", "optimiser.more.x", 1),
    ("~lr", "lr", ABSENT),
    ("~optimiser.eps", "optimiser.eps", ABSENT),
    ("~optimiser", "optimiser", ABSENT),
    ("~seeds", "seeds", ABSENT),
]
PLAIN_PATHS = {'"a.b"': ["a.b"], '"0"': ["0"], '"k=v"': ["k=v"], '"+p"': ["+p"]}


def look_up(config: Any, dotted: str) -> Any:
    for key in PLAIN_PATHS.get(dotted) or dotted.split("."):
        if isinstance(config, list):
            config = config[int(key)]
        elif key in config:
            config = config[key]
        else:
            return ABSENT
    return config


@pytest.mark.parametrize(("override", "key", "value"), ACCEPTED)
def test_an_override_changes_its_key_and_nothing_else(
    override: str, key: str, value: Any
) -> None:
    config, differences = resume_config(SAVED, [override])
    assert same(look_up(config, key), value)
    assert list(differences) == [key]
    old, new = differences[key]
    assert same(old, look_up(SAVED, key)) and same(new, value)
    top = (PLAIN_PATHS.get(key) or key.split("."))[0]
    assert all(same(config[k], SAVED[k]) for k in config if k != top)
    assert [k for k in SAVED if k in config] == [k for k in config if k in SAVED]


@pytest.mark.parametrize(
    "override",
    [
        *("lr=3e-4", "lr=0.0003", "steps=1e3", 'name="8"', "seeds=[0, 1.0]"),
        *("optimiser.more={}", 'optimiser={"kind": "adam"}', "clip=null"),
    ],
)
def test_an_override_with_the_saved_value_is_no_difference(override: str) -> None:
    config, differences = resume_config(SAVED, [override])
    assert same(config, SAVED) and differences == {}


FORM = "write key=value, +key=value to add a key, ~key to remove one"
ANY_TYPE = "or put ++ before the key to change the type"
JSON_HINT = "mend the JSON, or put the whole value in double quotes to make it text"
NUMBER = "write a number such as 3e-4, or Infinity, -Infinity or NaN"
TEXT = """write the text in double quotes that the shell leaves: 'key="8"'"""
REFUSED: list[tuple[Any, str, str]] = [
    # malformed
    ("", '"": no override', FORM),
    ("lr", "lr: no override", FORM),
    ("=3", "=3: no override", FORM),
    ("+=3", "+=3: no override", FORM),
    ("+lr", "+lr: no override", FORM),
    ("~", "~: no override", FORM),
    (".lr=1", ".lr=1: no override", FORM),
    ("lr.=1", "lr.=1: no override", FORM),
    ("optimiser..eps=1", "optimiser..eps=1: no override", FORM),
    ('"lr=1', '"lr=1: no override', FORM),
    ('"lr"x=1', '"lr"x=1: no override', FORM),
    (r'"\q"=1', r'"\q"=1: "\q" is no quoted key', "escape in quotes as JSON does"),
    ("~lr=3", "~lr=3: a removal takes no value", "write ~lr"),
    ("lr=1e400", "lr=1e400: 1e400 is beyond all floats", JSON_HINT),
    (
        '+x={"a": 1, "a": 2}',
        '+x={"a": 1, "a": 2}: a key stands twice in the mapping',
        JSON_HINT,
    ),
    (3, "overrides: a int holds no overrides", ""),
    (None, "overrides: a NoneType holds no overrides", ""),
    (b"lr=1", "overrides: a bytes holds no overrides", ""),
    ([3], "overrides: 3 is no str", FORM),
    ({3: 4}, "overrides: the key 3 is no str", "spell keys as text"),
    ({"lr=3": 4}, "lr=3=4: no override", FORM),
    ({"~lr": 3}, "~lr: a removal takes no value", "write ~lr"),
    # unknown
    (
        "optimiser.esp=1",
        "optimiser.esp=1: the config has no optimiser.esp",
        None,
    ),
    ("a.b=1", "a.b=1: the config has no a", 'use "a.b", or write +a={…} to add it'),
    (
        "optimizer.eps=1",
        "optimizer.eps=1: the config has no optimizer",
        None,
    ),
    (
        "optimiser.more.zzzzzz=1",
        "optimiser.more.zzzzzz=1: the config has no optimiser.more.zzzzzz",
        None,
    ),
    (
        "~zzzz",
        "~zzzz: the config has no zzzz",
        "the keys there are env, lr, steps, anneal, name, clip, seeds, betas and 7 "
        "more",
    ),
    ("++stepz=1", "++stepz=1: the config has no stepz", None),
    ('optimiser={"epz": 1}', "the config has no optimiser.epz", None),
    (
        "+optimizer.x=1",
        "+optimizer.x=1: the config has no optimizer",
        None,
    ),
    (
        "seeds.2=1",
        "seeds.2=1: no such item: seeds is a list of 2",
        "count its items from 0, or override the list as a whole",
    ),
    ("seeds.-1=1", "seeds.-1=1: no such item: seeds is a list of 2", None),
    ("seeds.01=1", "seeds.01=1: no such item: seeds is a list of 2", None),
    ('seeds."1"=1', 'seeds."1"=1: no such item: seeds is a list of 2', None),
    ("seeds.x=1", "seeds.x=1: no such item: seeds is a list of 2", None),
    # through what has no keys
    (
        "lr.x=1",
        "lr.x=1: lr was 0.0003, which has no keys",
        "override lr itself",
    ),
    (
        "+clip.x=1",
        "+clip.x=1: clip was none, which has no keys",
        "override clip itself",
    ),
    ("~seeds.1.x", "~seeds.1.x: seeds.1 was 1, which has no keys", None),
    # adding and removing
    ("+lr=1", "+lr=1: lr is there already", "leave out the + to override it"),
    (
        "+seeds.2=1",
        "+seeds.2=1: seeds is a list",
        "override the list as a whole: seeds=[…]",
    ),
    (
        "~seeds.0",
        "~seeds.0: seeds is a list",
        "override the list as a whole: seeds=[…]",
    ),
    (
        "optimiser={}",
        "optimiser={}: an empty mapping overrides no entry",
        "remove entries one by one: ~optimiser.kind",
    ),
    # types
    (
        "lr=fast",
        "lr=fast: lr was 0.0003 (float), this is of type str",
        f"{NUMBER}, {ANY_TYPE}",
    ),
    ("lr=", "lr=: lr was 0.0003 (float), this is of type str", None),
    ("lr=.5", "lr=.5: lr was 0.0003 (float), this is of type str", None),
    ("lr=true", "lr=true: lr was 0.0003 (float), this is of type bool", None),
    ("lr=[1]", "lr=[1]: lr was 0.0003 (float), this is of type list", None),
    (
        "steps=1.5",
        "steps=1.5: steps was 1000 (int), this is of type float",
        f"write an integer, {ANY_TYPE}",
    ),
    ("steps=NaN", "steps was 1000 (int), this is of type float", None),
    ("steps=Infinity", "steps was 1000 (int), this is of type float", None),
    ('steps="7"', "steps was 1000 (int), this is of type str", None),
    ("steps=true", "steps was 1000 (int), this is of type bool", None),
    (
        "steps=1e23",
        "steps=1e23: a float so large is not exact",
        "write all its digits",
    ),
    (
        f"lr={10**400}",
        "0…: an int beyond all floats",
        "write a smaller number, or Infinity",
    ),
    (
        "anneal=1",
        "anneal=1: anneal was True (bool), this is of type int",
        f"write true or false, {ANY_TYPE}",
    ),
    ("anneal=yes", "anneal was True (bool), this is of type str", None),
    (
        "name=9",
        'name=9: name was "8" (str), this is of type int',
        f"{TEXT}, {ANY_TYPE}",
    ),
    ("env=true", "env was Pendulum-v1 (str), this is of type bool", None),
    (
        "seeds=(0,1)",
        "seeds=(0,1): seeds was [0, 1] (list), this is of type str",
        f"write a JSON list such as [0, 1], {ANY_TYPE}",
    ),
    ('seeds=[0, "1"]', "seeds.1 was 1 (int), this is of type str", None),
    ("seeds=[0, 1, 2.5]", "seeds.0 was 0 (int), this is of type float", None),
    ('mixed=[1, 2, "x"]', "mixed.1 was relu (str), this is of type int", None),
    (
        "optimiser=adam",
        "(mapping), this is of type str",
        f"override its entries by their dotted keys, {ANY_TYPE}",
    ),
    ("optimiser.more=1", "optimiser.more was {} (mapping)", None),
    ('optimiser={"eps": "x"}', "optimiser.eps was 1e-08 (float)", None),
    ({"lr": "3e-4"}, 'lr="3e-4": lr was 0.0003 (float), this is of type str', None),
    # what no config can hold
    ({"+x": object}, "a type is not JSON-like data", "pass its name, as a str"),
    ({"+x": {1: 2}}, "the key 1 is a int, not a str", None),
    (f"+x={2**2048}", "an int of 2049 bits", "pass it as a str"),
    (f"+x={'[' * 70}{']' * 70}", "nested deeper than 64 levels", None),
    # twice
    (["lr=1", "lr=2"], "lr=1 and lr=2 are both about lr", "give each key once"),
    (["lr=1", '"lr"=1'], 'lr=1 and "lr"=1 are both about lr', None),
    (["+x=1", "+x=2"], "+x=1 and +x=2 are both about x", None),
    (["~lr", "lr=1"], "~lr and lr=1 are both about lr", None),
    (
        ["optimiser.eps=1", "~optimiser"],
        "~optimiser and optimiser.eps=1 are both about optimiser.eps",
        None,
    ),
    (
        ["seeds.0=1", "seeds=[1]"],
        "seeds=[1] and seeds.0=1 are both about seeds.0",
        None,
    ),
    ({"optimiser.eps": 1, "optimiser": {"eps": 2}}, "both about optimiser.eps", None),
]


@pytest.mark.parametrize(("overrides", "problem", "hint"), REFUSED)
def test_a_refusal_names_the_override_and_how_to_mend_it(
    overrides: Any, problem: str, hint: str | None
) -> None:
    before = copy.deepcopy(SAVED)
    with pytest.raises(InvalidArgumentError) as caught:
        resume_config(SAVED, overrides)
    first, *rest = str(caught.value).splitlines()
    assert first.startswith("cannot resume: ") and problem in first
    assert len(rest) == 1 and rest[0].startswith("To mend: ")
    if hint:
        assert rest == [f"To mend: {hint}"]
    assert same(SAVED, before)


@pytest.mark.parametrize(
    ("override", "nearest", "added"),
    [
        ("optimiser.esp=1", "optimiser.eps", "+optimiser.esp=…"),
        ("optimizer.eps=1", "optimiser.eps", "+optimizer={…}"),
        ("stepz=1", "steps", "+stepz=…"),
        ("+optimiser.moer.x=1", "optimiser.more", "+optimiser.moer={…}"),
    ],
)
def test_an_unknown_key_names_the_nearest_and_how_to_add_it(
    override: str, nearest: str, added: str
) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        resume_config(SAVED, [override])
    assert caught.value.hint.startswith(f"use {nearest}")
    assert caught.value.hint.endswith(f", or write {added} to add it")


def test_an_empty_config_has_no_keys_to_name() -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        resume_config({}, ["~x"])
    assert caught.value.hint == "leave it out: there are no keys there"
    assert resume_config({}, ["+x=1"]) == ({"x": 1}, {"x": (ABSENT, 1)})


def test_all_refused_overrides_are_listed() -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        resume_config(SAVED, ["lr=1e-3", "+lr=1", "steps=1.5"])
    assert str(caught.value).splitlines() == [
        "cannot resume: 2 overrides are refused",
        "  +lr=1: lr is there already (leave out the + to override it)",
        "  steps=1.5: steps was 1000 (int), this is of type float "
        f"(write an integer, {ANY_TYPE})",
        "To mend: mend each as its line says; nothing was changed",
    ]


@pytest.mark.parametrize("text", ["+x=" + "[" * 100_000, "+x=" + "1" * 5_000])
def test_a_value_that_json_cannot_read_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        resume_config(SAVED, [text])
    assert len(str(caught.value)) < 400


def test_an_override_with_hidden_characters_shows_none() -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        resume_config(SAVED, ["lr=\x1b[31m\n"])
    assert "\x1b" not in str(caught.value)
    assert len(str(caught.value).splitlines()) == 2


# --- what may be given -------------------------------------------------------------


@dataclasses.dataclass
class Config:
    lr: float = 3e-4
    seeds: tuple[int, ...] = (0, 1)
    limit: float = math.inf


EXPECTED = {"lr": 1e-3, "seeds": [0, 1], "limit": math.inf}


def test_a_checkpoint_gives_its_config(tmp_path: Path) -> None:
    # a leaf is named as an entry is: the leaves are no config
    save_checkpoint({"lr": 7.0}, tmp_path / "a", config=Config())
    with open_checkpoint(tmp_path / "a") as checkpoint:
        config, differences = resume_config(checkpoint, ["lr=1e-3"])
        again, _ = resume_config(checkpoint.config, ["lr=1e-3"])
    assert config == again == EXPECTED
    assert differences == {"lr": (3e-4, 1e-3)}
    save_checkpoint({"w": 1}, tmp_path / "b", config=config)
    with open_checkpoint(tmp_path / "b") as checkpoint:
        assert checkpoint.config == EXPECTED


@pytest.mark.parametrize(
    "saved",
    [
        Config(),
        dataclasses.asdict(Config()),
        MappingProxyType({"lr": np.float64(3e-4), "seeds": (0, 1), "limit": math.inf}),
    ],
)
def test_a_config_may_be_a_mapping_or_a_dataclass(saved: Any) -> None:
    config, differences = resume_config(saved, ["lr=1e-3"])
    assert same(config, EXPECTED)
    assert differences == {"lr": (3e-4, 1e-3)}


@pytest.mark.parametrize(
    "make_overrides",
    [
        lambda: "lr=1e-3",
        lambda: ["lr=1e-3"],
        lambda: ("lr=1e-3",),
        lambda: iter(["lr=1e-3"]),
        lambda: {"lr": 1e-3},
        lambda: {"lr": np.float64(1e-3)},
        lambda: MappingProxyType({"lr": 1e-3}),
    ],
)
def test_overrides_may_be_texts_or_a_mapping(make_overrides: Any) -> None:
    assert same(resume_config(Config(), make_overrides())[0], EXPECTED)


def test_the_values_of_a_mapping_are_taken_as_they_are() -> None:
    overrides = {"env": "true", "optimiser": {"eps": 1}, "++steps": "8", "~lr": None}
    config, _ = resume_config(SAVED, {**overrides, "clip": "1.5", "anneal": None})
    assert (config["env"], config["steps"], config["clip"]) == ("true", "8", "1.5")
    assert same(config["optimiser"], {"kind": "adam", "eps": 1.0, "more": {}})
    assert "lr" not in config and config["anneal"] is None


def test_a_checkpoint_without_config_is_refused(tmp_path: Path) -> None:
    save_checkpoint({"w": 1}, tmp_path / "a")
    with open_checkpoint(tmp_path / "a") as checkpoint:
        for saved in (checkpoint, checkpoint.config):
            with pytest.raises(InvalidArgumentError) as caught:
                resume_config(saved, [])
            assert str(caught.value).splitlines() == [
                "cannot resume: no config was saved",
                "To mend: save with config=…, or pass the config of then, such as {}",
            ]


@pytest.mark.parametrize("saved", [3, [("lr", 1)], "lr"])
def test_what_is_no_config_is_refused(saved: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="neither a mapping nor a dataclass"):
        resume_config(saved, [])


def test_a_config_that_is_not_plain_is_refused_by_its_place() -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        resume_config({"optimiser": {"schedule": abs}}, [])
    assert str(caught.value).startswith("cannot resume: config.optimiser.schedule: a ")


def test_a_result_that_no_checkpoint_could_hold_is_refused() -> None:
    saved: dict[str, Any] = {}
    for _ in range(60):
        saved = {"a": saved}
    deep = "+" + ".".join(["a"] * 60) + ".b=" + "[" * 10 + "]" * 10
    with pytest.raises(InvalidArgumentError, match="nested deeper than 64 levels"):
        resume_config(saved, [deep])


def test_nothing_is_shared_with_what_was_saved() -> None:
    saved = copy.deepcopy(SAVED)
    config, differences = resume_config(saved, ["layers.0.width=1", "seeds=[5]"])
    config["layers"][1]["width"] = 0
    config["optimiser"]["more"]["x"] = 1
    config["seeds"].append(9)
    assert same(saved, SAVED)
    assert differences["seeds"] == ([0, 1], [5])


# --- what differs, in words --------------------------------------------------------

LINES: list[tuple[Any, Any, str]] = [
    (3e-4, 1e-3, "k: 0.0003 then, 0.001 now"),
    ("a", "b c", "k: a then, b c now"),
    ("8", 8, 'k: "8" then, 8 now'),
    ("true", True, 'k: "true" then, True now'),
    ("None", None, 'k: "None" then, none now'),
    ("none", "absent", 'k: "none" then, "absent" now'),
    ("nan", math.nan, 'k: "nan" then, nan now'),
    ("[1", [1], 'k: "[1" then, [1] now'),
    ("", " ", 'k: "" then, " " now'),
    (ABSENT, None, "k: absent then, none now"),
    ("a\nb", "a\x1b", r'k: "a\u000ab" then, "a\u001b" now'),
    ("x" * 80, "y", f"k: {'x' * 60}… then, y now"),
    (
        "x" * 80 + "1" + "z" * 70,
        "x" * 80 + "2",
        f"k: …{'x' * 20}1{'z' * 39}… then, …{'x' * 20}2 now",
    ),
]


@pytest.mark.parametrize(("then", "now", "line"), LINES)
def test_a_difference_is_one_line(then: Any, now: Any, line: str) -> None:
    assert describe_differences({"k": (then, now)}) == [line]


def test_a_quoted_key_may_hold_any_character() -> None:
    key = 'tab\tquote"dot.'
    for text in ('"tab\tquote\\"dot."=2', r'"tab\u0009quote\"dot."=2'):
        assert resume_config({key: 1}, [text])[0] == {key: 2}


def test_the_sentinel_is_one_object_and_shows_as_a_word() -> None:
    assert copy.deepcopy(ABSENT) is ABSENT and repr(ABSENT) == "absent"


def test_differences_stand_in_the_order_of_the_config() -> None:
    overrides = ["+new=1", "steps=1", "~env", "optimiser.eps=1", "lr=1", "+also=2"]
    _, differences = resume_config(SAVED, overrides)
    expected = ["env", "lr", "steps", "optimiser.eps", "new", "also"]
    assert list(differences) == expected


# --- properties --------------------------------------------------------------------

KEYS = st.one_of(
    st.sampled_from(["a", "b", "lr", "0", "a.b", "+a", "~a", "=", "", '"', "\\", "é"]),
    st.text(st.characters(codec="utf-8"), max_size=4),
).filter(lambda key: key != "__float__")  # reserved in a config
SCALARS = st.one_of(
    *(st.none(), st.booleans(), st.integers(-(2**70), 2**70)),
    *(st.floats(), st.text(st.characters(codec="utf-8"), max_size=6)),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=3)
    ),
    max_leaves=8,
)
CONFIGS = st.dictionaries(KEYS, VALUES, max_size=5)


def list_scalars(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    if isinstance(node, dict):
        return [p for k, item in node.items() for p in list_scalars(item, (*path, k))]
    if isinstance(node, list):
        pairs = enumerate(node)
        return [p for i, item in pairs for p in list_scalars(item, (*path, i))]
    return [path]


def spell_path(path: tuple[Any, ...]) -> str:
    """Quote every key: a spelling that needs no rules."""
    return ".".join(json.dumps(key) for key in path)


def value_at(node: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        node = node[key]
    return node


def put_at(config: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    config = copy.deepcopy(config)
    value_at(config, path[:-1])[path[-1]] = value
    return config


@settings(max_examples=150, deadline=None)
@given(st.data(), CONFIGS)
def test_any_entry_can_be_set_to_any_value(
    data: st.DataObject, saved: dict[str, Any]
) -> None:
    assume(paths := list_scalars(saved))
    path = data.draw(st.sampled_from(paths))
    value = data.draw(VALUES)
    before = copy.deepcopy(saved)
    text = f"++{spell_path(path)}={json.dumps(value)}"
    config, differences = resume_config(saved, [text])
    assert same(config, put_at(saved, path, value))
    assert same(saved, before)
    lines = describe_differences(differences)
    assert len(lines) == len(differences)
    assert all(len(line.splitlines()) == 1 for line in lines)
    if same(value, value_at(saved, path)):
        assert differences == {}


@settings(max_examples=150, deadline=None)
@given(st.data(), CONFIGS)
def test_a_value_keeps_the_type_of_the_saved_one(
    data: st.DataObject, saved: dict[str, Any]
) -> None:
    assume(paths := list_scalars(saved))
    path = data.draw(st.sampled_from(paths))
    old, new = value_at(saved, path), data.draw(SCALARS)
    text = f"{spell_path(path)}={json.dumps(new)}"
    fits = old is None or new is None or type(old) is type(new)
    if type(old) is int and type(new) is float and new.is_integer():
        fits, new = abs(new) <= 2**53, int(new)
    if type(old) is float and type(new) is int:
        fits, new = True, float(new)
    if fits:
        assert same(resume_config(saved, [text])[0], put_at(saved, path, new))
    else:
        with pytest.raises(InvalidArgumentError):
            resume_config(saved, [text])


@settings(max_examples=100, deadline=None)
@given(CONFIGS, CONFIGS, st.randoms(use_true_random=False))
def test_overrides_turn_any_config_into_any_other_in_any_order(
    saved: dict[str, Any], now: dict[str, Any], shuffler: random.Random
) -> None:
    overrides = [f"~{json.dumps(key)}" for key in saved if key not in now]
    for key, value in now.items():
        sign = "++" if key in saved else "+"
        overrides.append(f"{sign}{json.dumps(key)}={json.dumps(value)}")
    config, differences = resume_config(saved, overrides)
    assert same(config, now)
    assert (differences == {}) is same(saved, now)
    shuffler.shuffle(overrides)
    again, others = resume_config(saved, overrides)
    assert same(again, now)
    assert {key: repr(pair) for key, pair in others.items()} == {
        key: repr(pair) for key, pair in differences.items()
    }


@settings(max_examples=100, deadline=None)
@given(CONFIGS, CONFIGS)
def test_the_differences_are_overrides_that_lead_there(
    saved: dict[str, Any], now: dict[str, Any]
) -> None:
    signs = {key: "++" if key in saved else "+" for key in now}
    given = {signs[key] + json.dumps(key): value for key, value in now.items()}
    config, differences = resume_config(saved, given)
    texts: list[str] = []
    for key, (old, new) in differences.items():
        sign = "~" if new is ABSENT else "+" if old is ABSENT else "++"
        texts.append(sign + key + ("" if new is ABSENT else f"={json.dumps(new)}"))
    assert same(resume_config(saved, texts)[0], config)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.text(max_size=12),
            st.text('lrseeds.=+~"\\01{}[]:, enaNI', max_size=16),
        ),
        max_size=3,
    )
)
def test_any_texts_are_applied_or_refused(overrides: list[str]) -> None:
    before = copy.deepcopy(SAVED)
    try:
        _, differences = resume_config(SAVED, overrides)
        describe_differences(differences)
    except InvalidArgumentError as error:
        assert error.hint and error.act == "cannot resume"
    assert same(SAVED, before)
