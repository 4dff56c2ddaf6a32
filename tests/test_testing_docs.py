"""The page on testing says what is so: its blocks run, and print what it shows."""

import contextlib
import inspect
import io
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import ajaxckpt
from ajaxckpt import testing

PAGE = (Path(ajaxckpt.__file__).parent / "TESTING.md").read_text()


def as_pattern(expected: str) -> str:
    return ".*?".join(map(re.escape, expected.split("…")))


def test_every_block_runs_and_prints_what_the_page_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```(python|text)\n(.*?)```", PAGE, re.DOTALL)
    assert [kind for kind, _ in blocks] == [
        "python",
        *("python", "text") * 3,
    ]
    names: dict[str, Any] = {"__name__": "page"}
    printed = ""
    for number, (kind, block) in enumerate(blocks):
        if kind == "text":
            assert re.fullmatch(as_pattern(block), printed), printed
            continue
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(block, f"TESTING.md block {number}", "exec"), names)
        printed = out.getvalue()
    check = partial(testing.assert_resume_equivalent, directory=tmp_path)
    names["test_resume_is_exact"](check)


def test_every_helper_and_argument_is_on_the_page_or_in_its_docstring() -> None:
    for name in testing.__all__:
        assert re.search(rf"\b{name}\b", PAGE), name
        public = getattr(testing, name)
        described = inspect.getdoc(public)
        assert described is not None and ">>> " in described, name
        if not inspect.isclass(public):
            for argument in inspect.signature(public).parameters:
                assert f"    {argument}: " in described, (name, argument)
