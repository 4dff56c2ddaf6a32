"""When, where, with which versions, and from which commit a checkpoint was written.

Never arguments or environment: those hold secrets. Knows the process; knows nothing
of states or files.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import os
import platform
import subprocess
import sys
from functools import cache

from ajaxckpt import __version__
from ajaxckpt._plain import plain_text

_PACKAGES = ("jax", "jaxlib", "numpy", "flax", "optax")
_GIT_SECONDS = 2.0


@cache
def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "ajaxckpt": __version__}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _ask_git(directory: str, *arguments: str) -> str | None:
    """Return what git prints, None where it fails, is missing or takes too long."""
    # no hook, no monitor: the repository's own configuration must run nothing
    options = ("-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null")
    command = ("git", "-C", directory, *options, "--no-optional-locks", *arguments)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_GIT_SECONDS,
            check=True,
            stdin=subprocess.DEVNULL,
            env=environment,
        )
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return done.stdout.strip()


@cache
def _git_facts(directory: str) -> dict[str, str | bool | None]:
    """Ask once per process: the code that runs is the code that was loaded."""
    commit = _ask_git(directory, "rev-parse", "--verify", "HEAD")
    if not commit:
        return {}
    changes = _ask_git(directory, "status", "--porcelain", "--untracked-files=no")
    return {
        "git_commit": commit,
        "git_dirty": None if changes is None else changes != "",
    }


def _user_directory() -> str:
    """Return where the user's code lies: beside the script, or right here."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    return os.path.dirname(os.path.abspath(script)) if script else os.getcwd()


def gather_provenance() -> dict[str, str | bool | None]:
    """Return the time in UTC, the host, package versions and the user's commit."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    facts: dict[str, str | bool | None] = {"time": now, **_versions()}
    if host := plain_text(platform.node()):
        facts["host"] = host
    with contextlib.suppress(OSError):  # the directory may be gone: still a save
        facts.update(_git_facts(_user_directory()))
    return facts
