"""A plan's table: a row for what is special, sums for the rest, and no end of rows."""

import json
from pathlib import Path

import pytest

from ajaxckpt import Migrations, plan_restore, save_checkpoint
from ajaxckpt._cli import main
from ajaxckpt._layout import LeafSpec
from ajaxckpt._migrating import Origin
from ajaxckpt._plan_table import plan_document, plan_lines


def spec(*shape: int) -> LeafSpec:
    return LeafSpec(kind="jax", dtype="float32", shape=shape)


class Plan:
    """A plan of given data; every leaf is float32[2] on both sides."""

    path, subtree, step, checkpoint_id = "a.safetensors", "", 7, "c0"
    load = keep = ignore = resize = adopt = mismatches = notes = suggestions = ()

    def __init__(self, **facts):
        self.migrate, self.drop = {}, {}
        vars(self).update(facts)
        self.names = (*self.load, *self.migrate, *self.keep)

    def specs(self, name):
        return spec(2), spec(2)


def rows(plan, **options):
    """Return the table's rows, cut where two blanks or more stand."""
    lines = plan_lines(plan, **options)
    start = lines.index("") + 1
    table = lines[start : lines.index("", start)] if "" in lines[start:] else None
    return [line.split() for line in (table or lines[start:])[1:]]


def test_each_action_has_its_row():
    plan = Plan(
        load=("a.x", "a.y", "r"),
        migrate={"m": Origin(sources=("old",), rule="agent step 1")},
        keep=("k",),
        ignore=("i",),
        resize=("r",),
        drop={"d": "agent step 2"},
    )
    found = {(row[0], row[1]): row[2:] for row in rows(plan)}
    assert found == {
        ("a", "load"): ["2", "leaves,", "16", "B"],
        ("r", "resize"): ["float32[2]", "float32[2]"],
        ("m", "migrate"): ["float32[2]", "from", "old,", "by", "agent", "step", "1"],
        ("k", "keep"): ["the", "skeleton's"],
        ("i", "ignore"): ["float32[2]"],
        ("d", "drop"): ["by", "agent", "step", "2"],
    }


def test_what_is_read_counts_what_is_migrated():
    plan = Plan(load=("a",), migrate={"m": Origin(sources=("o",), rule="x")})
    assert plan_lines(plan)[2].endswith("; 16 B to read")


@pytest.mark.parametrize("action", ["keep", "ignore"])
def test_an_action_shows_thirty_rows_and_how_many_more(action):
    plan = Plan(**{action: tuple(f"n{i}" for i in range(31))})
    assert [row[0] for row in rows(plan)] == [f"n{i}" for i in range(30)] + ["and"]
    assert rows(plan)[-1] == ["and", "1", "more", action]
    assert [row[0] for row in rows(plan, all_rows=True)] == [f"n{i}" for i in range(31)]
    assert plan_document(plan)[action] == [f"n{i}" for i in range(31)]


def test_nothing_in_it_moves_a_terminal():
    plan = Plan(
        path="a\x1b[2J",
        subtree="s\x1b",
        load=("l\x1b",),
        migrate={"m": Origin(sources=("o\x1b",), rule="r\x1b")},
        drop={"d": "r\x1b"},
        notes=("n\x1b\n",),
    )
    assert all(line.isprintable() for line in plan_lines(plan))
    assert all(line.isprintable() for line in plan_lines(plan, all_rows=True))


def test_all_gives_every_leaf_a_row(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("all_rows_code.py").write_text("state = {'a': {'x': 1, 'y': 2}}\n")
    save_checkpoint({"a": {"x": 1, "y": 2}}, "a.safetensors")
    command = ["plan", "a.safetensors", "--skeleton", "all_rows_code:state"]
    assert main(command) == 0
    assert "a.x" not in capsys.readouterr().out
    assert main([*command, "--all"]) == 0
    assert {"a.x", "a.y"} <= set(capsys.readouterr().out.split())


def test_a_real_plan_is_plain_data(tmp_path: Path):
    path = tmp_path / "a.safetensors"
    save_checkpoint({"old": 1, "gone": 2}, path, step=3)
    migrations = Migrations("agent")
    migrations.step(1, "why").move("old", "new").drop("gone")
    document = plan_document(plan_restore({"new": 0}, path, migrations=migrations))
    assert json.loads(json.dumps(document)) == document
    assert document["restores"] is True
    assert [item["name"] for item in document["drop"]] == ["gone"]
    assert document["migrate"][0]["sources"] == ["old"]
