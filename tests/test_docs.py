"""The documents say what is so: README blocks run, tables name real tests."""

import ast
import contextlib
import doctest
import importlib
import io
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ajaxckpt
from ajaxckpt import save_checkpoint, state_digest
from ajaxckpt._cli import main
from ajaxckpt._dtypes import STORED_DTYPES
from ajaxckpt._layout import LeafSpec
from ajaxckpt._metadata import Metadata
from ajaxckpt._payload import whole_leaf
from ajaxckpt._writer import StateData, write_checkpoint

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
FORMAT = (ROOT / "ajaxckpt" / "FORMAT.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def as_pattern(expected: str) -> str:
    """Turn a transcript into a regex: an ellipsis stands for what varies."""
    return ".*?".join(map(re.escape, expected.split("…")))


@pytest.fixture
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    yield tmp_path


def test_the_example_in_the_readme_runs_and_resumes(
    in_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    code = blocks("python")[0].replace("500", "20").replace("1_000", "60")
    assert len(code.strip().splitlines()) <= 15
    printed: list[str] = []
    with jax.numpy_rank_promotion("allow"):
        for _ in range(2):
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(compile(code, "README.md", "exec"), {})
            printed.append(out.getvalue())
    assert re.fullmatch(r"[0-9a-f]{32}\n", printed[0])
    assert printed[0] == printed[1]


def test_the_run_in_the_readme_stops_and_goes_on(
    in_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    code = run_block().replace("250", "20").replace("1_000", "60")
    with jax.numpy_rank_promotion("allow"):
        exec(compile(code.replace("60", "30"), "README.md", "exec"), {})
        assert [entry.step for entry in ajaxckpt.Run("runs/b").list()] == [20, 40]
        names: dict[str, object] = {}
        exec(compile(code, "README.md", "exec"), names)
    assert [entry.step for entry in ajaxckpt.Run("runs/b").list()] == [40, 60]
    state = names["state"]
    restored = ajaxckpt.Run("runs/b").restore(state).state
    assert state_digest(restored) == state_digest(state)


def run_block() -> str:
    section = README.split("## A run that survives preemption")[1].split("\n## ")[0]
    (block,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    return block


def test_the_error_in_the_readme_is_the_error(in_tmp_path: Path) -> None:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(blocks("python")[1], "README.md", "exec"), {})
    assert re.fullmatch(as_pattern(blocks("text")[0]), out.getvalue())


def build_agent() -> dict[str, object]:
    params = {
        "Dense_0": {"kernel": jnp.zeros((3, 64)), "bias": jnp.zeros(64)},
        "Dense_1": {"kernel": jnp.zeros((64, 1)), "bias": jnp.zeros(1)},
    }
    return {
        "actor": params,
        "opt_state": optax.adam(1e-3).init(params),
        "buffer": {"obs": jnp.zeros((10_000, 3)), "index": jnp.int32(0)},
        "key": jax.random.key(0),
        "step": 400,
    }


def save_two() -> None:
    config = {"env": "Pendulum-v1", "hidden": 64}
    state = build_agent()
    path = "step-400.safetensors"
    save_checkpoint(state, path, step=400, metrics={"return": -180.5}, config=config)
    state["step"] = 500
    state["actor"]["Dense_1"]["bias"] = jnp.ones(1)  # type: ignore[index]
    save_checkpoint(state, "step-500.safetensors", step=500, config=config)


def transcripts(block: str) -> Iterator[tuple[str, str]]:
    """Yield each command of a console block with what it shows."""
    for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        command, _, shown = part.partition("\n")
        yield command, shown


def check_transcript(block: str) -> None:
    for command, shown in transcripts(block):
        program, *arguments = command.split()
        assert program == "ajaxckpt"
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            main(arguments)
        # wrapped lines of versions are what an ellipsis may stand for too
        match = re.fullmatch(as_pattern(shown), out.getvalue(), re.DOTALL)
        assert match, f"{command}\n{out.getvalue()}"


def test_the_transcripts_in_the_readme_are_what_is_shown(in_tmp_path: Path) -> None:
    sound, damaged, _, _ = blocks("console")
    save_two()
    check_transcript(sound)
    path = in_tmp_path / "step-500.safetensors"
    data = bytearray(path.read_bytes())
    data[-100_000] ^= 1
    path.write_bytes(bytes(data))
    check_transcript(damaged)


def test_the_transcript_of_a_run_is_what_is_shown(in_tmp_path: Path) -> None:
    keep = [ajaxckpt.KeepLast(3), ajaxckpt.KeepBest("return", "max")]
    scores = {1000: -900.0, 2000: -180.5, 3000: -300.0, 4000: None, 5000: -310.25}
    with ajaxckpt.Run("runs/c", keep=keep, signals=()) as run:
        for step, score in scores.items():
            state = {"step": step, "w": jnp.zeros((256, 64))}
            run.step(state, step=step, metrics={"return": score})
        run.pin(3000)
    path = Path(run.path(5000))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    check_transcript(blocks("console")[2])


MY_AGENT = """
import jax.numpy as jnp
from ajaxckpt import Migrations

def skeleton():
    return {"trunk": {"w": jnp.zeros((8, 4))}, "step": 0}

migrations = Migrations("my-agent")
migrations.step(1, "a trunk").move("Dense_0", "trunk")
"""


def test_the_transcript_of_a_plan_is_what_is_shown(
    in_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (in_tmp_path / "my_agent.py").write_text(MY_AGENT)
    monkeypatch.setattr(sys, "path", [str(in_tmp_path), *sys.path])
    state = {"Dense_0": {"w": jnp.ones((8, 4))}, "step": 400}
    save_checkpoint(state, "old.safetensors", step=400)
    check_transcript(blocks("console")[3])


def promises() -> list[tuple[str, str]]:
    """Return the rows of the README's table: promise, and the tests' cell."""
    section = README.split("## What is promised")[1].split("\n## ")[0]
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", section, re.MULTILINE)
    return [row for row in rows if not row[0].startswith(("promise", "---"))]


def existing_tests(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_promise_names_tests_that_exist() -> None:
    rows = promises()
    assert len(rows) >= 15
    for promise, cell in rows:
        named = re.findall(r"`(tests/\w+\.py)::(\w+)`", cell)
        assert named, promise
        for path, name in named:
            assert name in existing_tests(ROOT / path), f"{promise}: {path}::{name}"


def package_modules() -> list[str]:
    names = sorted(path.stem for path in (ROOT / "ajaxckpt").glob("*.py"))
    return [name for name in names if not name.startswith("__")]


@pytest.mark.parametrize("name", package_modules())
def test_examples_in_docstrings_are_so(name: str, in_tmp_path: Path) -> None:
    tmp_path = in_tmp_path
    path = str(tmp_path / "state.safetensors")
    save_checkpoint({"w": jnp.ones(3), "step": 7}, path, step=7)
    module = importlib.import_module(f"ajaxckpt.{name}")
    public = {name: getattr(ajaxckpt, name) for name in ajaxckpt.__all__}
    names = {"path": path, "jnp": jnp, **public}
    result = doctest.testmod(module, extraglobs=names)
    assert result.failed == 0


def test_every_public_verb_shows_an_example() -> None:
    for name in ajaxckpt.__all__:
        public = getattr(ajaxckpt, name)
        if callable(public) and not isinstance(public, type):
            assert ">>> " in (public.__doc__ or ""), name


def test_links_between_documents_lead_somewhere() -> None:
    package = ROOT / "ajaxckpt"
    for document in (
        ROOT / "README.md",
        package / "FORMAT.md",
        package / "MIGRATIONS.md",
        package / "RUNS.md",
        package / "TESTING.md",
    ):
        for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", document.read_text()):
            assert (document.parent / target).exists(), target


def test_the_example_in_the_format_specification_is_what_is_written(
    tmp_path: Path,
) -> None:
    row = STORED_DTYPES["float32"]
    values = np.array([1.0, -2.0], np.float32)
    state = StateData(
        layout={
            "w": LeafSpec(kind="jax", dtype="float32", shape=(2,)),
            "step": LeafSpec(kind="int"),
        },
        values={"step": "0x7"},
        sources={"w": lambda: whole_leaf(values, row, frozen=True)},
    )
    path = str(tmp_path / "example.safetensors")
    record = write_checkpoint(path, state, Metadata(checkpoint_id="0" * 32, step=7))
    dump = FORMAT.rsplit("```\n", 2)[1]
    lines = [line[10:57].split() for line in dump.strip().splitlines()]
    assert (
        bytes.fromhex("".join("".join(line) for line in lines))
        == Path(path).read_bytes()
    )
    assert f"`{record.digest}`" in FORMAT


def test_the_format_specification_lists_every_dtype() -> None:
    table = FORMAT.split("## Payload")[1].split("Values without payload")[0]
    named = set(re.findall(r"`(\w+)`", table))
    ranges = {"uint16", "int16", "uint32", "int32"}  # "uint8 int8 … uint64 int64"
    assert set(STORED_DTYPES) <= named | ranges


@pytest.mark.parametrize("name", ["example", "tests"])
def test_ci_finds_the_two_commands(name: str) -> None:
    script = str(ROOT / ".ci" / "readme_command.py")
    done = subprocess.run(
        [sys.executable, script, name], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("python -m venv .venv && .venv/bin/pip install")
