"""The page on exports says what is so: its blocks run, and warn as it shows."""

import inspect
import re
import warnings
from pathlib import Path
from typing import Any

import jax
import pytest

import ajaxckpt
from ajaxckpt import export

PAGE = (Path(ajaxckpt.__file__).parent / "EXPORT.md").read_text()


def as_pattern(expected: str) -> str:
    return ".*?".join(map(re.escape, expected.split("…")))


def test_every_block_runs_and_warns_as_the_page_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(export, "_warned", set())
    blocks = re.findall(r"```(python|text)\n(.*?)```", PAGE, re.DOTALL)
    kinds = ["python", "python", "python", "text", "python", "python"]
    assert [kind for kind, _ in blocks] == kinds
    names: dict[str, Any] = {"__name__": "page"}
    warned = ""
    for number, (kind, block) in enumerate(blocks):
        if kind == "text":
            assert re.fullmatch(as_pattern(block), warned), warned
            warned = ""
            continue
        assert warned == ""  # what is warned of stands on the page
        with (
            jax.numpy_rank_promotion("allow"),
            warnings.catch_warnings(record=True) as caught,
        ):
            warnings.simplefilter("always", UserWarning)
            exec(compile(block, f"EXPORT.md block {number}", "exec"), names)
        warned = "".join(
            f"{one.message}\n" for one in caught if one.category is UserWarning
        )
    assert (tmp_path / "forgotten.json").exists()


def test_every_function_is_on_the_page_and_every_argument_in_its_docstring() -> None:
    for name in export.__all__:
        public = getattr(export, name)
        if inspect.isclass(public):
            assert "Attributes:" in public.__doc__, name
            continue
        assert re.search(rf"\b{name}\b", PAGE), name
        assert ">>> " in public.__doc__, name
        for argument in inspect.signature(public).parameters:
            assert f"    {argument}: " in inspect.getdoc(public), (name, argument)
