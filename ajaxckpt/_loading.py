"""A user's object by name: the one place that imports what an argument names.

The name comes from the command line, never from a file.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from typing import Any

from ajaxckpt._errors import InvalidArgumentError


def load_object(text: str, argument: str) -> Any:
    """Return what ``module:name`` names, the current directory's modules included.

    Args:
        text: the module, a colon, and a name in it (dots go deeper).
        argument: what the user knows it as, for messages.

    Raises:
        InvalidArgumentError: no such module or name, or importing it failed.
    """
    module_name, colon, path = text.partition(":")
    if not colon or not module_name or not path:
        hint = f"such as {argument} train:make_skeleton"
        raise InvalidArgumentError(
            f"{argument} {text}: expected module:name", hint=hint
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        with contextlib.redirect_stdout(sys.stderr):
            found: Any = importlib.import_module(module_name)
            for name in path.split("."):
                found = getattr(found, name)
    except (Exception, SystemExit) as error:
        raise _explain(error, text, argument) from error
    return found


def call_object(text: str, argument: str) -> Any:
    """Return what the function that ``module:name`` names returns, without arguments.

    What is no function is returned itself.

    Raises:
        InvalidArgumentError: as ``load_object``, or the function raised.
    """
    found = load_object(text, argument)
    if not callable(found):
        return found
    try:
        with contextlib.redirect_stdout(sys.stderr):
            return found()
    except (Exception, SystemExit) as error:
        raise _explain(error, text, argument) from error


def _explain(error: BaseException, text: str, argument: str) -> InvalidArgumentError:
    said = f"{type(error).__name__}: {error}".rstrip(": ")
    hint = "run from the directory of the module, or install it"
    if not isinstance(error, ImportError | AttributeError):
        hint = "mend what it names; nothing was read or written"
    return InvalidArgumentError(f"{argument} {text}: {said}", hint=hint)
