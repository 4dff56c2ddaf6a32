"""The fixtures that pytest finds by itself once ajaxckpt is installed.

Loaded in every pytest run of the environment, so it imports nothing but pytest.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def assert_resume_equivalent(tmp_path: Path) -> Callable[..., None]:
    """Return ``ajaxckpt.testing.assert_resume_equivalent``, at home in ``tmp_path``.

    The checkpoints stay there, so that those of a failed test can be looked into.

    Example:
        >>> def test_resume_is_exact(assert_resume_equivalent):
        ...     assert_resume_equivalent(make_skeleton, advance, total=20, split=10)
    """
    from ajaxckpt import testing

    check: Any = testing.assert_resume_equivalent
    return partial(check, directory=tmp_path / "resume")
