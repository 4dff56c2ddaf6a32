"""The command line: transcripts, exit statuses, the JSON contract, and no jax."""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tracemalloc
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import ajaxckpt
from ajaxckpt import _cli
from ajaxckpt._cli import main
from ajaxckpt._dtypes import STORED_DTYPES
from ajaxckpt._layout import TEXT_KINDS, LeafSpec
from ajaxckpt._metadata import Metadata
from ajaxckpt._payload import whole_leaf
from ajaxckpt._plain import plain_config, plain_metrics
from ajaxckpt._scalars import encode_scalar, encode_text
from ajaxckpt._writer import StateData, write_checkpoint

HEAVY = ("jax", "jaxlib", "flax", "optax", "orbax", "chex", "rich")
COMMANDS = ("inspect", "verify", "diff", "digest")
ZEROS = "0" * 32


def leaf(value, kind="jax", **facts):
    array = np.asarray(value)
    spec = LeafSpec(kind=kind, dtype=array.dtype.name, shape=array.shape, **facts)
    return spec, array


def key(words, impl="fry"):
    words = np.asarray(words, np.uint32)
    facts = {"key_impl": impl, "key_words": words.shape[-1]}
    return LeafSpec(kind="key", dtype="uint32", shape=words.shape[:-1], **facts), words


def scalar(kind, value):
    if kind in TEXT_KINDS:
        data = encode_text(value)
        return LeafSpec(kind=kind, length=len(data)), data
    return LeafSpec(kind=kind), encode_scalar(kind, value)


def source(spec, value):
    if isinstance(value, bytes):
        return lambda: value
    return lambda: whole_leaf(value, STORED_DTYPES[spec.dtype], frozen=True)


def write(path, leaves, *, metrics=None, config=None, **facts):
    state = StateData(
        layout={name: spec for name, (spec, _) in leaves.items()},
        values={n: value for n, (spec, value) in leaves.items() if not spec.dtype},
        sources={
            name: source(spec, value)
            for name, (spec, value) in leaves.items()
            if spec.payload_dtype
        },
    )
    metadata = Metadata(
        **{"checkpoint_id": ZEROS, **facts},
        metrics=plain_metrics(metrics),
        config=plain_config(config),
    )
    return write_checkpoint(os.path.abspath(path), state, metadata)


def agent(**changes):
    return {
        "actor.Dense_0.bias": leaf(np.zeros(4, np.float32)),
        "actor.Dense_0.kernel": leaf(np.arange(12, dtype=np.float32).reshape(3, 4)),
        "actor.activation": scalar("function", "jax.nn.relu"),
        "buffer.obs": leaf(np.zeros((600, 2), np.uint8), "numpy"),
        "opt.count": leaf(np.int32(3), weak_type=True),
        "rng": key([[0, 7], [0, 8]]),
        "step": scalar("int", 400),
        **changes,
    }


FACTS = {
    "step": 400,
    "metrics": {"return": -123.5, "loss": float("nan")},
    "config": {"agent": "sac", "lr": 3e-4, "net": {"hidden": [256, 256]}},
    "excluded": ("replay",),
    "layouts": {"agent": 3},
    "run_id": "a-run",
    "parent_id": "f" * 32,
    "provenance": {
        "time": "2025-01-01T00:00:00+00:00",
        "python": "3.11.4",
        "ajaxckpt": "0.1.0",
        "host": "node-7",
        "git_commit": "abc123",
        "git_dirty": True,
    },
}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Work in an empty directory, so that transcripts show relative paths."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    return tmp_path


@pytest.fixture
def call(capsys, tmp_path):
    """Run the command line; returns exit status, stdout and stderr."""

    def run(*arguments):
        code = main([*map(str, arguments)])
        out, err = capsys.readouterr()
        return code, out, err.replace(str(tmp_path), "DIR")

    return run


def flip(path, position):
    raw = bytearray(Path(path).read_bytes())
    raw[position] ^= 1
    Path(path).write_bytes(raw)


def cut(path, count):
    Path(path).write_bytes(Path(path).read_bytes()[:-count])


def write_foreign(path):
    header = json.dumps(
        {"w": {"dtype": "U8", "shape": [200], "data_offsets": [0, 200]}}
    )
    head = len(header).to_bytes(8, "little") + header.encode()
    Path(path).write_bytes(head + bytes(range(200)))


# --- inspect


def test_inspect_shows_facts_and_tree(call):
    record = write("a.safetensors", agent(), **FACTS)
    code, out, err = call("inspect", "a.safetensors")
    size = os.path.getsize("a.safetensors")
    assert (code, err) == (0, "")
    assert (
        out
        == f"""\
checkpoint  a.safetensors
step        400
metrics     return -123.5, loss NaN
config      {{"agent": "sac", "lr": 0.0003, "net": {{"hidden": [256, 256]}}}}
leaves      7
bytes       1.3 KiB (1,284) of leaves, {size / 1024:.1f} KiB ({size:,}) in the file
left out    replay
layouts     agent 3
digest      {record.digest}
id          {ZEROS}
run         a-run
parent      {"f" * 32}
written     2025-01-01T00:00:00+00:00
host        node-7
commit      abc123 with uncommitted changes
versions    python 3.11.4, ajaxckpt 0.1.0

leaf          kind                     size  bytes   share
total         7 leaves              1.3 KiB  1,284  100.0%
actor         3 leaves                 64 B     64    5.0%
  Dense_0     2 leaves                 64 B     64    5.0%
    bias      float32[4]               16 B     16    1.2%
    kernel    float32[3,4]             48 B     48    3.7%
  activation  function jax.nn.relu      0 B      0    0.0%
buffer        1 leaf                1.2 KiB  1,200   93.5%
  obs         numpy uint8[600,2]    1.2 KiB  1,200   93.5%
opt           1 leaf                    4 B      4    0.3%
  count       ~int32[]                  4 B      4    0.3%
rng           key<fry>[2]              16 B     16    1.2%
step          Python int 400            0 B      0    0.0%
"""
    )


def tree_of(out):
    return [re.split(r"  +", line.strip()) for line in out.split("\n\n")[1].split("\n")]


def test_inspect_depth_sums_up_what_lies_deeper(call):
    write("a.safetensors", agent())
    rows = tree_of(call("inspect", "--depth", 1, "a.safetensors")[1])[1:-1]
    assert [row[0] for row in rows] == ["total", *"actor buffer opt rng step".split()]
    assert rows[1] == ["actor", "3 leaves", "64 B", "64", "5.0%"]
    assert len(tree_of(call("inspect", "--depth", 0, "a.safetensors")[1])) == 3


def test_inspect_select_shows_only_the_selected_in_share_of_all(call):
    write("a.safetensors", agent())
    out = call("inspect", "--select", "**.kernel", "--select", "opt", "a.safetensors")[
        1
    ]
    rows = tree_of(out)[1:-1]
    assert [row[0] for row in rows] == "selected actor Dense_0 kernel opt count".split()
    assert rows[0] == ["selected", "2 leaves", "52 B", "52", "4.0%"]


def test_inspect_shows_a_state_that_is_one_leaf_and_one_without_leaves(call):
    write("one.safetensors", {"": leaf(np.zeros(3, np.float64))})
    assert (
        "total  float64[3]  24 B     24  100.0%"
        in call("inspect", "one.safetensors")[1]
    )
    write("none.safetensors", {})
    assert re.search(
        r"total +0 leaves +0 B +0 +-\n", call("inspect", "none.safetensors")[1]
    )
    assert "step        none given" in call("inspect", "none.safetensors")[1]


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_inspect_keeps_to_the_width_and_loses_nothing(call, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    config = {f"parameter_{i}": "x" * (i % 40) for i in range(40)}
    wide = "\N{CJK UNIFIED IDEOGRAPH-4E00}" * 7
    long = "n" * 300
    leaves = agent(**{wide: leaf(np.zeros(1)), long: leaf(np.zeros(2))})
    write("a.safetensors", leaves, config=config)
    out = call("inspect", "a.safetensors")[1]
    lines = out.splitlines()
    assert long in lines
    after = lines[lines.index(long) + 1]
    assert after.split() == ["float64[2]", "16", "B", "16", "1.2%"]
    assert all(len(line) <= columns for line in lines if line != long)
    start, end = lines.index("step        none given") + 1, lines.index("leaves      9")
    text = "".join(line[12:] for line in lines[start:end])
    assert text.replace(" ", "") == json.dumps(config).replace(" ", "")
    (row,) = (line for line in lines if line.startswith(wide))
    assert len(row) + len(wide) == len(after)  # each of its characters fills two cells


def test_inspect_parts_several_files_by_a_blank_line(call):
    write("a", {"x": leaf(0.0)})
    one = call("inspect", "a")[1]
    assert call("inspect", "no", "a", "a")[:2] == (1, f"{one}\n{one}")


def test_inspect_spells_sizes_in_the_unit_that_fits(call):
    sizes = {"a": 1023, "b": 1024, "c": 1024**2 - 1, "d": 3 * 1024**2 // 2}
    write("a.safetensors", {n: leaf(np.zeros(s, np.uint8)) for n, s in sizes.items()})
    rows = {
        row[0]: row[2:4] for row in tree_of(call("inspect", "a.safetensors")[1])[:-1]
    }
    assert rows["a"] == ["1023 B", "1,023"]
    assert rows["b"] == ["1.0 KiB", "1,024"]
    assert rows["c"] == ["1.0 MiB", "1,048,575"]
    assert rows["d"] == ["1.5 MiB", "1,572,864"]


def test_inspect_survives_names_nested_beyond_reason(call):
    deep = ".".join(["x"] * 5000)
    write("a.safetensors", {f"{deep}.a": leaf(np.zeros(2)), f"{deep}.b": leaf(0.0)})
    for arguments in ([], ["--json"], ["--depth", 10**6]):
        code, out, _ = call("inspect", *arguments, "a.safetensors")
        assert code == 0 and "x.x.x.x.a" in out


def test_inspect_shortens_ints_that_python_refuses_to_spell(call):
    write("a.safetensors", {"n": scalar("int", 1 << 20000)})
    assert "Python int 0x1000" in call("inspect", "a.safetensors")[1]


NASTY = "\x1b[2J\r\n\x00\x9b\u202e\u2028\ud800"


def test_nothing_printed_can_act_on_a_terminal(call, tmp_path):
    nasty_name = r'"\u001b[2J"'
    for name, number in (("a", 1), ("b", 2)):
        write(
            f"{name}{NASTY[:1]}\r.safetensors",
            {
                nasty_name: leaf(np.zeros(number)),
                "not\u061chidden\U000e0041": leaf(np.zeros(number)),
                f"only{number}\u061c": leaf(np.zeros(number)),
                "text": scalar("str", NASTY + name),
                "mode": scalar("enum", NASTY + name),
                "act": scalar("function", NASTY + name),
                "raw": scalar("bytes", b"\x1b[2J" + name.encode()),
            },
            config={NASTY: NASTY + name, "n": [NASTY]},
            metrics={NASTY: 1.0},
            excluded=(nasty_name, f"{nasty_name}.{name}"),
            layouts={NASTY: number},
            provenance={"time": NASTY, NASTY: NASTY, "git_commit": NASTY},
        )
    a, b = sorted(path.name for path in tmp_path.iterdir())
    calls = [
        ("inspect", a),
        ("inspect", "--json", a),
        ("verify", ".", "no\x1bpe"),
        ("diff", "--values", a, b),
        ("diff", "--values", "--json", a, b),
        ("digest", a, "no\x1bpe"),
        ("inspect", "--select", "\x1b[2J", a),
    ]
    for arguments in calls:
        _, out, err = call(*arguments)
        assert out or arguments[1] == "--select"
        assert bool(err) == ("no\x1bpe" in arguments or not out)
        assert all(c.isprintable() for c in (out + err).replace("\n", ""))
    assert r"\x1b[2J\r\n\x00\x9b\u202e\u2028\ud800" in call("diff", "--values", a, b)[1]


# --- verify


def verify_row(status, record, path):
    if record is None:
        return f"{status:<65}{path}"
    size = f"{record.nbytes / 1024:.1f} KiB"
    row = (
        f"{status:<16} {record.leaves:>7} leaves {size:>10} {record.nbytes:>15,} bytes"
    )
    return f"{row}  {path}"


def test_verify_tells_of_each_file_and_goes_on(call, tmp_path):
    os.mkdir("run")
    record = write("run/step-9.safetensors", agent())
    for name in ("step-10", "step-11", "step-12"):
        write(f"run/{name}.safetensors", agent())
    size = record.nbytes
    flip("run/step-10.safetensors", size - 1)  # buffer.obs has the smallest items
    cut("run/step-11.safetensors", 5)
    write_foreign("run/other.safetensors")
    Path("run/.ajaxckpt-0123456789abcdef.tmp").write_bytes(b"\0" * 8)
    Path("run/step-9.safetensors.pin").write_bytes(b"")
    Path("run/notes.txt").write_text("x")
    os.mkdir("run/older")
    write("run/older/step-1.safetensors", agent())
    cut("run/older/step-1.safetensors", 1)
    code, out, err = call("verify", "run", "nothing", "run/other.safetensors")
    assert code == 1
    assert out.splitlines() == [
        verify_row("not a checkpoint", None, "run/other.safetensors"),
        verify_row("sound", record, "run/step-9.safetensors"),
        verify_row("damaged", None, "run/step-10.safetensors"),
        verify_row("damaged", None, "run/step-11.safetensors"),
        verify_row("sound", record, "run/step-12.safetensors"),
        verify_row("not found", None, "nothing"),
        verify_row("not a checkpoint", None, "run/other.safetensors"),
        "7 paths: 2 not a checkpoint, 2 sound, 2 damaged, 1 not found",
    ]
    whole = "restore another checkpoint, or copy this one again from where it is whole"
    heads = [line for line in err.splitlines() if line.startswith("DIR")]
    assert [head.partition(":")[0] for head in heads] == [
        "DIR/run/step-10.safetensors",
        "DIR/run/step-11.safetensors",
        "DIR/nothing",
        "DIR/run/other.safetensors",
    ]
    assert "1 of 7 leaves is damaged" in heads[0]
    assert f"  buffer.obs: bytes {size - 1200}-{size - 1} are not" in err
    assert f"truncated: the file has {size - 5} bytes" in heads[1]
    assert "no such file" in heads[2]
    assert "ajaxckpt did not write this file" in heads[3]
    assert err.count(f"To mend: {whole}") == 2


def test_verify_is_silent_on_stderr_where_all_is_sound(call):
    record = write("a.safetensors", agent())
    assert call("verify", "a.safetensors") == (
        0,
        verify_row("sound", record, "a.safetensors") + "\n",
        "",
    )
    write_foreign("other.safetensors")
    code, out, err = call("verify", ".")
    assert (code, err) == (0, "")
    assert "not a checkpoint" in out and "2 paths: 1 sound, 1 not a checkpoint" in out


def test_verify_names_every_damaged_leaf(call):
    size = write("a.safetensors", agent()).nbytes
    flip("a.safetensors", size - 1)
    flip("a.safetensors", size - 1284)
    err = call("verify", "a.safetensors")[2]
    assert "2 of 7 leaves are damaged" in err
    assert re.findall(r"^  (\S+): bytes", err, re.M) == [
        "actor.Dense_0.bias",
        "buffer.obs",
    ]


def test_verify_reads_every_byte(call):
    size = write("a.safetensors", agent()).nbytes
    for position in range(0, size, 97):
        flip("a.safetensors", position)
        assert call("verify", "a.safetensors")[0] == 1, position
        flip("a.safetensors", position)
    assert call("verify", "a.safetensors")[0] == 0


def test_verify_finds_a_directory_without_checkpoints(call):
    os.mkdir("empty")
    code, out, err = call("verify", "empty")
    assert code == 1
    assert out == verify_row("not a checkpoint", None, "empty") + "\n"
    assert "DIR" not in out and "no checkpoint in this directory, of 0 *.safe" in err
    write_foreign("empty/other.safetensors")
    code, out, err = call("verify", "empty")
    assert code == 1 and "of 1 *.safetensors files" in err


def test_verify_tells_of_a_directory_that_cannot_be_read(call, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", path)

    record = write("a.safetensors", agent())
    os.mkdir("run")
    monkeypatch.setattr(os, "listdir", refuse)
    code, out, err = call("verify", "run", "a.safetensors")
    assert (code, err) == (1, "run: Permission denied\n")
    assert out.splitlines()[:2] == [
        verify_row("unreadable", None, "run"),
        verify_row("sound", record, "a.safetensors"),
    ]


def test_verify_takes_a_directory_below_home(call, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    os.makedirs("home/run")
    record = write("home/run/a.safetensors", agent())
    code, out, _ = call("verify", "~/run")
    assert (code, out) == (0, verify_row("sound", record, "~/run/a.safetensors\n"))


def test_verify_does_not_wait_for_a_fifo(call):
    write("a.safetensors", agent())
    os.mkfifo("b.safetensors")
    assert call("verify", ".")[0] == 0
    assert call("verify", "b.safetensors")[0] == 1


@pytest.mark.parametrize("command", ["inspect", "verify", "digest"])
def test_a_bad_path_is_told_and_does_not_stop_the_others(call, command):
    record = write("a.safetensors", agent())
    Path("file").write_text("x")
    code, out, err = call(command, "file/x", "nothing", "..", "a.safetensors")
    assert code == 1
    assert record.digest in out or verify_row("sound", record, "a.safetensors") in out
    lines = err.splitlines()
    assert lines[0] == "file/x: Not a directory"
    assert lines[1].startswith("DIR/nothing: ") and "no such file" in lines[1]
    assert "Traceback" not in err


# --- digest


def test_digest_is_that_of_the_state(call):
    state = {
        "w": jnp.arange(6.0).reshape(2, 3),
        "host": np.arange(3),
        "step": 4,
        "name": "sac",
    }
    for path, step in (("a.safetensors", 1), ("b.safetensors", 2)):
        ajaxckpt.save_checkpoint(state, path, step=step)
    digest = ajaxckpt.state_digest(state)
    assert re.fullmatch("[0-9a-f]{32}", digest)
    assert call("digest", "a.safetensors", "b.safetensors") == (
        0,
        f"{digest}  a.safetensors\n{digest}  b.safetensors\n",
        "",
    )


# --- diff


def test_diff_of_equal_states_is_empty(call):
    record = write("a.safetensors", agent())
    write("b.safetensors", agent())
    for arguments in ([], ["--values"]):
        assert call("diff", *arguments, "a.safetensors", "b.safetensors") == (
            0,
            f"A           a.safetensors  {record.digest}\n"
            f"B           b.safetensors  {record.digest}\n"
            "equal: 7 leaves, layout and values, by the digests in the files\n",
            "",
        )


def test_diff_shows_layout_values_and_notes(call):
    a = write("a.safetensors", agent(old=leaf(np.zeros((2, 2), np.int32))), **FACTS)
    kernel = np.arange(12, dtype=np.float32).reshape(3, 4)
    kernel[1, 2] += 0.5
    kernel[2, 0] = np.nan
    changes = {
        "actor.Dense_0.bias": leaf(np.zeros(6, np.float32)),
        "actor.Dense_0.kernel": leaf(kernel),
        "actor.activation": scalar("function", "jax.nn.tanh"),
        "opt.count": leaf(np.int32(5), weak_type=True),
        "rng": key([[0, 7], [0, 9]]),
        "step": scalar("int", 500),
        "new": scalar("str", "x"),
    }
    facts = {**FACTS, "step": 500, "excluded": (), "layouts": {"agent": 4}}
    facts["config"] = {"agent": "sac", "net": {"hidden": [64]}, "seed": None}
    facts["config"]["alpha"] = 1.5
    b = write("b.safetensors", agent(**changes), **facts)
    heads = f"""\
A           a.safetensors  {a.digest}
B           b.safetensors  {b.digest}
only in A   old: int32[2,2]
only in B   new: Python str
changed     actor.Dense_0.bias: float32[4] in A, float32[6] in B
"""
    values = """\
value       actor.Dense_0.kernel: 2 of 12 elements differ by at most 0.5, 1 by NaN; \
first at [1,2]: 6.0 in A, 6.5 in B
value       actor.activation: 'jax.nn.relu' in A, 'jax.nn.tanh' in B
value       opt.count: 3 in A, 5 in B
value       rng: 1 of 2 keys differ; first at [1]: [0, 8] in A, [0, 9] in B
value       step: 400 in A, 500 in B
"""
    notes = """\
note        step: 400 in A, 500 in B
note        config.lr: 0.0003 in A, nothing in B
note        config.net.hidden: [256, 256] in A, [64] in B
note        left out: ('replay',) in A, nothing in B
note        layouts.agent: 3 in A, 4 in B
note        config.alpha: nothing in A, 1.5 in B
"""
    code, out, err = call("diff", "a.safetensors", "b.safetensors")
    assert (code, err) == (1, "")
    assert out == heads + notes + "different: 3 of 9 leaves\n"
    code, out, err = call("diff", "--values", "a.safetensors", "b.safetensors")
    assert (code, err) == (1, "")
    assert out == heads + values + notes + "different: 8 of 9 leaves\n"


def test_diff_without_values_finds_only_layouts(call):
    write("a.safetensors", agent(), step=1)
    write("b.safetensors", agent(step=scalar("int", 1)), step=2)
    code, out, _ = call("diff", "a.safetensors", "b.safetensors")
    assert code == 0
    assert out.splitlines()[2:] == [
        "note        step: 1 in A, 2 in B",
        "same layout: 7 leaves, of which 1 differ in value, see --values",
    ]


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        (leaf(np.zeros(2)), leaf(np.zeros(2), "numpy"), True),
        (leaf(np.float32(1)), leaf(np.float32(1), "numpy scalar"), True),
        (leaf(np.float32(1)), leaf(np.float32(1), weak_type=True), False),
        (leaf(np.zeros(2)), leaf(np.zeros(2, np.float32)), False),
        (leaf(np.zeros((2, 1))), leaf(np.zeros((1, 2))), False),
        (key([0, 1]), key([0, 1], impl="other"), False),
        (key([0, 1]), leaf(np.array([0, 1], np.uint32)), False),
        (scalar("int", 1), scalar("float", 1.0), False),
        (scalar("int", 1), leaf(np.int32(1)), False),
        (scalar("str", "a"), scalar("bytes", b"a"), False),
        (scalar("str", "a"), scalar("str", "a"), True),
        (scalar("float", 0.0), scalar("float", 0.0), True),
    ],
)
def test_diff_agrees_with_the_digest_on_what_is_the_same(call, a, b, same):
    digests = {write(p, {"x": x}).digest for p, x in (("a", a), ("b", b))}
    assert (len(digests) == 1) == same
    assert call("diff", "a", "b")[0] == (0 if same else 1)
    assert call("diff", "--values", "a", "b")[0] == (0 if same else 1)


QUIET = np.array([0x7FC00000, 0x7FC00001], np.uint32).view(np.float32)
LOW, HIGH = -(2**63), 2**63 - 1


@pytest.mark.parametrize(
    ("dtype", "a", "b", "differing", "largest", "nans"),
    [
        ("uint8", [0, 255, 7], [255, 0, 7], 2, 255, 0),
        ("int8", [-128, 5], [127, 5], 1, 255, 0),
        ("int64", [LOW, 0], [HIGH, 1], 2, 2**64 - 1, 0),
        ("uint64", [2**64 - 1], [0], 1, 2**64 - 1, 0),
        ("int64", [2**53], [2**53 + 1], 1, 1, 0),
        ("bool", [True, False], [False, False], 1, None, 0),
        ("float16", [60000, 1], [-60000, 1], 1, 120000.0, 0),
        ("bfloat16", [1, 2], [1, 2.5], 1, 0.5, 0),
        ("float8_e4m3fn", [1, 2], [1, 4], 1, 2.0, 0),
        ("int4", [-8, 1], [7, 1], 1, 15, 0),
        ("uint2", [3, 1], [0, 1], 1, 3, 0),
        ("float32", [0.0], [-0.0], 1, 0.0, 0),
        ("float32", [1, np.nan, np.nan], [2, 0, np.nan], 2, 1.0, 1),
        ("float32", [np.nan], [1], 1, None, 1),
        ("float32", QUIET[:1], QUIET[1:], 1, None, 1),
        ("float64", [np.inf, 1], [1, 1], 1, "Infinity", 0),
        ("float64", [1.5e308], [-1.5e308], 1, "Infinity", 0),
        ("complex64", [3 + 4j], [0], 1, 5.0, 0),
        ("complex128", [1, 3j], [1, 0], 1, 3.0, 0),
    ],
)
def test_diff_measures_values(call, dtype, a, b, differing, largest, nans):
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    for path, values in (("a", a), ("b", b)):
        write(path, {"x": leaf(np.asarray(values).astype(kind))})
    code, out, _ = call("diff", "--values", "--json", "a", "b")
    (found,) = json.loads(out)["comparison"]["values"]
    assert code == 1
    assert found["elements"] == len(a)
    assert (found["differing"], found["largest"], found["nans"]) == (
        differing,
        largest,
        nans,
    )


def test_diff_compares_large_leaves_in_bounded_memory(call):
    shape = (6, 1 << 20)  # 48 MiB of float64, many pieces
    big = np.zeros(shape)
    write("a", {"x": leaf(big)})
    big[3, 5], big[5, 1 << 19] = 0.25, -8
    write("b", {"x": leaf(big)})
    del big
    call("diff", "--values", "a", "a")  # imports
    tracemalloc.start()
    _, out, _ = call("diff", "--values", "a", "b")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "x: 2 of 6,291,456 elements differ by at most 8.0;" in out
    assert "first at [3,5]: 0.0 in A, 0.25 in B" in out
    assert peak < 24 << 20


def test_diff_spells_the_empty_name_of_a_state_that_is_one_leaf(call):
    write("a", {"": leaf(np.zeros(3))})
    write("b", {"": leaf(np.ones(3))})
    write("c", {"": leaf(np.zeros(4))})
    assert '\nvalue       "": 3 of 3 elements' in call("diff", "--values", "a", "b")[1]
    assert (
        '\nchanged     "": float64[3] in A' in call("diff", "--select", "", "a", "c")[1]
    )


def test_diff_of_texts_of_any_length_and_empty_ones(call):
    write("a", {"x": scalar("str", "y" * 5000), "z": scalar("bytes", b"")})
    write("b", {"x": scalar("str", "y" * 5001), "z": scalar("bytes", b"z")})
    code, out, _ = call("diff", "--values", "a", "b")
    assert code == 1
    assert "z: b'' in A, b'z' in B" in out
    assert max(map(len, out.splitlines())) < 200


def test_diff_select_compares_only_the_selected(call):
    write("a", agent(old=leaf(0.0)))
    write("b", agent(new=leaf(0.0)))
    assert call("diff", "a", "b")[0] == 1
    assert call("diff", "--select", "actor", "--select", "rng", "a", "b")[0] == 0
    code, out, _ = call("diff", "--select", "new", "a", "b")
    assert code == 1 and "only in B   new: float64[]" in out and "old" not in out


def test_diff_tells_of_damage_and_of_missing_files(call):
    size = write("a", agent()).nbytes
    write("b", agent(**{"buffer.obs": leaf(np.ones((600, 2), np.uint8), "numpy")}))
    flip("a", size - 1)
    code, out, err = call("diff", "--values", "a", "b")
    assert (code, out) == (1, "")
    assert err.startswith("DIR/a: ") and "  buffer.obs: bytes" in err
    code, out, err = call("diff", "no", "neither")
    assert (code, out) == (1, "")
    assert "DIR/no: " in err and "DIR/neither: " in err


# --- usage


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["mend", "a"],
        ["inspect"],
        ["verify"],
        ["diff", "a"],
        ["inspect", "--depth", "-1", "a"],
        ["inspect", "--depth", "x", "a"],
        ["verify", "--values", "a"],
        ["inspect", "--sel", "x", "a"],
    ],
)
def test_wrong_arguments_exit_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as exit_info:
        main(arguments)
    assert exit_info.value.code == 2
    assert "usage: ajaxckpt" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["inspect", "diff"])
def test_wrong_patterns_exit_with_2(call, command):
    write("a", agent())
    paths = ["a", "a"]
    code, out, err = call(command, "--select", "a[0]", *paths)
    assert (code, out) == (2, "")
    assert err.startswith('pattern="a[0]" is not a pattern: position 1')
    assert err.endswith("To mend: write a.0\n")
    code, out, err = call(command, "--select", "actr", *paths)
    assert (code, out) == (2, "")
    assert ': --select="actr" selects no leaf\nTo mend: use actor\n' in err


def test_a_pattern_that_one_file_lacks_does_not_stop_the_others(call):
    write("a", {"x": leaf(0.0)})
    write("b", {"y": leaf(0.0)})
    code, out, err = call("inspect", "--select", "y", "a", "b", "no")
    assert code == 2
    assert "checkpoint  b" in out and "checkpoint  a" not in out
    assert "a: cannot inspect: --select" in err and "DIR/no: " in err


def test_version_and_help(capsys):
    for arguments, text in (
        (["--version"], ajaxckpt.__version__ + "\n"),
        (["--help"], "exit status:\n  0  sound, or equal\n  1  a finding"),
        (["verify", "--help"], "a directory, every *.safetensors file right in it"),
        (["diff", "--help"], "is noted, and is no finding"),
    ):
        with pytest.raises(SystemExit) as exit_info:
            main(arguments)
        assert exit_info.value.code == 0
        assert text in capsys.readouterr().out


def test_an_interrupt_ends_without_traceback(call, monkeypatch):
    def interrupt(session, arguments):
        raise KeyboardInterrupt

    monkeypatch.setitem(_cli.COMMANDS, "digest", interrupt)
    assert call("digest", "a") == (130, "", "")


# --- JSON


def key_paths(value, opaque, path=""):
    """Yield where each key of a document stands, and the JSON type found there."""
    if isinstance(value, dict) and path not in opaque:
        for name, item in value.items():
            yield from key_paths(item, opaque, f"{path}.{name}" if path else name)
    elif isinstance(value, list):
        for item in value:
            yield from key_paths(item, opaque, f"{path}[]")
    else:
        yield path, "object" if isinstance(value, dict) else type(value).__name__


def refuse_constant(text):
    raise AssertionError(f"{text} is not JSON")


def documents_of(call, command):
    """Return documents that together show every key of a command."""
    write("a", agent(old=leaf(0.0), same=leaf(0.0)), **FACTS)
    changes = {"step": scalar("int", 1), "same": leaf(np.float32(0)), "new": leaf(0.0)}
    changes["opt.count"] = leaf(np.int32(4), weak_type=True)
    kernel = np.full((3, 4), np.inf, np.float32)
    changes["actor.Dense_0.kernel"] = leaf(kernel)
    config = {"a": float("inf"), "b": float("-inf"), "nan": float("nan")}
    write("b", agent(**changes), config=config)
    write("c", agent(**{"actor.Dense_0.kernel": leaf(kernel + np.nan)}))
    many = [["a", "b", "no"]]
    diffs = [["--values", "a", "b"], ["a", "no"], ["--values", "a", "c"]]
    diffs.append(["--values", "b", "c"])
    for arguments in diffs if command == "diff" else many:
        code, out, err = call(command, "--json", *arguments)
        assert code == 1
        assert ("no such file" in err) == ("no" in arguments)
        assert out.isascii()
        yield json.loads(out, parse_constant=refuse_constant)


def contract_of(command, capsys):
    """Read the contract out of the command's help."""
    with pytest.raises(SystemExit):
        main([command, "--help"])
    lines = capsys.readouterr().out.split("--json, schema 1")[1].splitlines()
    rows = [line.split(maxsplit=1) for line in lines if line.startswith("  ")]
    names = {"null": "NoneType"}
    return {
        path: {names.get(kind, kind) for kind in kinds.split(" | ")}
        for path, kinds in rows
    }


@pytest.mark.parametrize("command", COMMANDS)
def test_json_holds_the_keys_that_the_help_declares(call, capsys, command):
    contract = contract_of(command, capsys)
    opaque = {path for path, kinds in contract.items() if "object" in kinds}
    seen = {}
    for document in documents_of(call, command):
        assert document["ajaxckpt"] == {"command": command, "schema": 1}
        for path, kind in key_paths(document, opaque):
            seen.setdefault(path, set()).add(kind)
    assert seen.keys() == contract.keys()
    for path, kinds in seen.items():
        assert kinds <= contract[path], path


def test_json_tells_what_the_text_tells(call):
    a = write("a", agent(), **FACTS)
    code, out, _ = call("inspect", "--json", "--depth", 1, "--select", "opt", "a", "a")
    first, second = json.loads(out)["files"]
    assert code == 0 and first == second
    assert first["metrics"] == {"return": -123.5, "loss": "NaN"}
    assert first["config"] == FACTS["config"]
    assert (first["leaf_count"], first["payload_bytes"]) == (7, 1284)
    assert first["file_bytes"] == os.path.getsize("a")
    assert first["leaves"] == [
        {
            "name": "opt.count",
            "spec": "~int32[]",
            "kind": "jax",
            "dtype": "int32",
            "shape": [],
            "weak_type": True,
            "key_impl": None,
            "bytes": 4,
            "value": None,
        }
    ]
    assert first["subtrees"] == [
        {"name": "", "leaves": 1, "bytes": 4},
        {"name": "opt", "leaves": 1, "bytes": 4},
    ]
    flip("a", a.nbytes - 1)
    code, out, err = call("verify", "--json", "a", "no")
    document = json.loads(out)
    assert [file["status"] for file in document["files"]] == ["damaged", "not found"]
    assert [error["path"] for error in document["errors"]] == ["a", "no"]
    messages = "".join(error["message"] + "\n" for error in document["errors"])
    assert messages.replace(os.getcwd(), "DIR") == err
    code, out, _ = call("digest", "--json", "a")
    assert json.loads(out)["files"] == [{"path": "a", "digest": a.digest}]


def test_json_document_comes_even_when_nothing_could_be_read(call):
    for command in ("inspect", "verify", "digest"):
        code, out, _ = call(command, "--json", "no")
        assert code == 1 and json.loads(out)["errors"][0]["status"] == "not found"
    code, out, _ = call("diff", "--json", "no", "no")
    assert code == 1 and json.loads(out)["comparison"] is None


# --- whole processes


def process_options(stdout=subprocess.PIPE, **variables):
    """Return options for a process whose stdout is buffered, as a shell's is."""
    environment = {**os.environ, **variables}
    environment.pop("PYTHONUNBUFFERED", None)
    return {"stdout": stdout, "stderr": subprocess.PIPE, "env": environment}


def run_python(*arguments, stdout=subprocess.PIPE, **variables):
    command = [sys.executable, *arguments]
    options = process_options(stdout, **variables)
    done = subprocess.run(command, timeout=120, check=False, **options)
    return done.returncode, done.stdout, done.stderr.decode()


BLOCKED = f"""
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {HEAVY}:
            raise AssertionError(name + " was imported")

sys.meta_path.insert(0, Block())
from ajaxckpt._cli import main
codes = [main(arguments) for arguments in (
    ["inspect", "a"], ["verify", "."], ["verify", "a", "b"],
    ["diff", "--values", "a", "b"], ["digest", "a", "b"], ["inspect", "no"],
    *([command, "--json", "a", "b"] for command in {COMMANDS}),
)]
print("codes", codes)
"""


def test_no_command_needs_jax():
    write("a", agent(), **FACTS)
    write("b", agent(step=scalar("int", 1)))
    write("c.safetensors", agent())
    code, out, err = run_python("-c", BLOCKED)
    assert code == 0, err
    assert out.decode().splitlines()[-1] == "codes [0, 0, 0, 1, 0, 1, 0, 0, 0, 0]"


def test_importing_the_package_and_the_command_line_loads_nothing_heavy():
    script = f"""
import sys
import ajaxckpt
assert not {{"numpy", "ml_dtypes", "xxhash"}} & set(sys.modules)
from ajaxckpt import _cli, _comparison, _inspection, _opening, _reports
print(sorted(set({HEAVY}) & set(sys.modules)))
"""
    assert run_python("-c", script)[:2] == (0, b"[]\n")


def test_help_loads_not_even_numpy():
    script = """
import sys
from ajaxckpt._cli import main
try:
    main(["diff", "--help"])
finally:
    assert "numpy" not in sys.modules
"""
    code, out, err = run_python("-c", script)
    assert (code, err) == (0, "") and b"comparison.equal" in out


def test_a_pipe_closed_after_a_line_ends_quietly():
    write("a", {f"layer_{i}": leaf(float(i)) for i in range(5000)})
    command = [sys.executable, "-m", "ajaxckpt", "inspect", "a"]
    with subprocess.Popen(command, **process_options()) as process:
        assert process.stdout.readline() == b"checkpoint  a\n"
        process.stdout.close()
        err = process.stderr.read()
        assert (process.wait(timeout=60), err) == (141, b"")


@pytest.mark.parametrize("arguments", [["digest", "a"], ["verify", "a"]])
def test_a_pipe_closed_from_the_start_ends_quietly(arguments):
    write("a", agent())
    reader, writer = os.pipe()
    os.close(reader)
    code, _, err = run_python("-m", "ajaxckpt", *arguments, stdout=writer)
    os.close(writer)
    assert (code, err) == (141, "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux's full device")
def test_a_full_disk_under_stdout_is_one_line():
    write("a", agent())
    with open("/dev/full", "wb") as full:
        code, _, err = run_python("-m", "ajaxckpt", "inspect", "a", stdout=full)
    assert (code, err) == (1, "standard output: No space left on device\n")


def test_stdout_in_ascii_gets_escapes():
    write("a", {"\u00e9": leaf(0.0)}, config={"name": "\u00e9\ud800"})
    variables = {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "LC_ALL": "C"}
    for arguments in (["inspect", "a"], ["inspect", "--select", "\u00e8", "a"]):
        code, out, err = run_python("-m", "ajaxckpt", *arguments, **variables)
        assert "Traceback" not in err
        assert code == (0 if "--select" not in arguments else 2)
        assert out.isascii() and err.isascii()
        if code == 0:
            assert rb'{"name": "\xe9\ud800"}' in out


def test_the_command_is_installed_under_its_name():
    (entry,) = importlib.metadata.entry_points(group="console_scripts", name="ajaxckpt")
    assert entry.load() is main
    code, out, _ = run_python("-m", "ajaxckpt", "--version")
    assert (code, out.decode()) == (0, f"{ajaxckpt.__version__}\n")
