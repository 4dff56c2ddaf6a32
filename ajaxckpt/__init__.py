"""A JAX agent's whole training state in one atomic file, and back into a skeleton.

Importing this package imports nothing else: each name is fetched when first used,
so that the command line and plain inspection never load jax.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ajaxckpt._background_saves import BackgroundSave, save_in_background
    from ajaxckpt._checkpoint import (
        plan_restore,
        restore_into,
        save_checkpoint,
        state_digest,
    )
    from ajaxckpt._copying import migrate_checkpoint
    from ajaxckpt._errors import (
        BackgroundSaveError,
        CheckpointError,
        CheckpointNotFoundError,
        DamagedCheckpointError,
        InvalidArgumentError,
        LayoutMismatchError,
        MigrationError,
        NewerFormatError,
        NoSpaceError,
        NotACheckpointError,
        RunLockedError,
        StepExistsError,
        UnsupportedLeafError,
    )
    from ajaxckpt._host_rng import host_rng_state, set_host_rng_state
    from ajaxckpt._layout import LeafSpec, Mismatch
    from ajaxckpt._listing import RunEntry
    from ajaxckpt._metrics_log import LogHook, MetricsLog, read_metrics
    from ajaxckpt._migrating import Origin
    from ajaxckpt._migrations import Migrations
    from ajaxckpt._opening import (
        VerifyReport,
        checkpoint_exists,
        open_checkpoint,
        verify_checkpoint,
    )
    from ajaxckpt._plan import RestorePlan
    from ajaxckpt._preflight import PreflightReport
    from ajaxckpt._reader import Checkpoint
    from ajaxckpt._resume_config import ABSENT, describe_differences, resume_config
    from ajaxckpt._retention import KeepBest, KeepEvery, KeepLast, KeepPerPeriod
    from ajaxckpt._rules import Rules
    from ajaxckpt._run_restoring import Restored, Skipped
    from ajaxckpt._run_saving import StepReport
    from ajaxckpt._runs import Run
    from ajaxckpt._schedule import SaveAt, SaveEvery, SaveOnImprovement
    from ajaxckpt._scopes import View
    from ajaxckpt._writer import CheckpointRecord

__version__ = "0.1.0"

__all__ = [
    "ABSENT",
    "BackgroundSave",
    "BackgroundSaveError",
    "Checkpoint",
    "CheckpointError",
    "CheckpointNotFoundError",
    "CheckpointRecord",
    "DamagedCheckpointError",
    "InvalidArgumentError",
    "KeepBest",
    "KeepEvery",
    "KeepLast",
    "KeepPerPeriod",
    "LayoutMismatchError",
    "LeafSpec",
    "LogHook",
    "MetricsLog",
    "MigrationError",
    "Migrations",
    "Mismatch",
    "NewerFormatError",
    "NoSpaceError",
    "NotACheckpointError",
    "Origin",
    "PreflightReport",
    "RestorePlan",
    "Restored",
    "Rules",
    "Run",
    "RunEntry",
    "RunLockedError",
    "SaveAt",
    "SaveEvery",
    "SaveOnImprovement",
    "Skipped",
    "StepExistsError",
    "StepReport",
    "UnsupportedLeafError",
    "VerifyReport",
    "View",
    "checkpoint_exists",
    "describe_differences",
    "host_rng_state",
    "migrate_checkpoint",
    "open_checkpoint",
    "plan_restore",
    "read_metrics",
    "restore_into",
    "resume_config",
    "save_checkpoint",
    "save_in_background",
    "set_host_rng_state",
    "state_digest",
    "verify_checkpoint",
]

_HOMES = {
    "_background_saves": ("BackgroundSave", "save_in_background"),
    "_checkpoint": ("plan_restore", "restore_into", "save_checkpoint", "state_digest"),
    "_copying": ("migrate_checkpoint",),
    "_errors": tuple(name for name in __all__ if name.endswith("Error")),
    "_host_rng": ("host_rng_state", "set_host_rng_state"),
    "_layout": ("LeafSpec", "Mismatch"),
    "_listing": ("RunEntry",),
    "_metrics_log": ("LogHook", "MetricsLog", "read_metrics"),
    "_migrating": ("Origin",),
    "_migrations": ("Migrations",),
    "_opening": (
        "VerifyReport",
        "checkpoint_exists",
        "open_checkpoint",
        "verify_checkpoint",
    ),
    "_plan": ("RestorePlan",),
    "_preflight": ("PreflightReport",),
    "_reader": ("Checkpoint",),
    "_resume_config": ("ABSENT", "describe_differences", "resume_config"),
    "_retention": ("KeepBest", "KeepEvery", "KeepLast", "KeepPerPeriod"),
    "_rules": ("Rules",),
    "_run_restoring": ("Restored", "Skipped"),
    "_run_saving": ("StepReport",),
    "_runs": ("Run",),
    "_schedule": ("SaveAt", "SaveEvery", "SaveOnImprovement"),
    "_scopes": ("View",),
    "_writer": ("CheckpointRecord",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


_MODULES = ("export", "optax_moves", "scan", "seeds", "testing")


def __getattr__(name: str) -> object:
    """Import a public name when it is first asked for."""
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names."""
    return sorted(__all__)
