"""A JAX agent's whole training state in one atomic file, and back into a skeleton.

Importing this package imports nothing else: each name is fetched when first used,
so that the command line and plain inspection never load jax.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ajaxckpt._checkpoint import (
        plan_restore,
        restore_into,
        save_checkpoint,
        state_digest,
    )
    from ajaxckpt._copying import migrate_checkpoint
    from ajaxckpt._errors import (
        CheckpointError,
        CheckpointNotFoundError,
        DamagedCheckpointError,
        InvalidArgumentError,
        LayoutMismatchError,
        MigrationError,
        NewerFormatError,
        NotACheckpointError,
        StepExistsError,
        UnsupportedLeafError,
    )
    from ajaxckpt._layout import LeafSpec, Mismatch
    from ajaxckpt._migrating import Origin
    from ajaxckpt._migrations import Migrations
    from ajaxckpt._opening import (
        VerifyReport,
        checkpoint_exists,
        open_checkpoint,
        verify_checkpoint,
    )
    from ajaxckpt._plan import RestorePlan
    from ajaxckpt._reader import Checkpoint
    from ajaxckpt._rules import Rules
    from ajaxckpt._scopes import View
    from ajaxckpt._writer import CheckpointRecord

__version__ = "0.1.0"

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "CheckpointNotFoundError",
    "CheckpointRecord",
    "DamagedCheckpointError",
    "InvalidArgumentError",
    "LayoutMismatchError",
    "LeafSpec",
    "MigrationError",
    "Migrations",
    "Mismatch",
    "NewerFormatError",
    "NotACheckpointError",
    "Origin",
    "RestorePlan",
    "Rules",
    "StepExistsError",
    "UnsupportedLeafError",
    "VerifyReport",
    "View",
    "checkpoint_exists",
    "migrate_checkpoint",
    "open_checkpoint",
    "plan_restore",
    "restore_into",
    "save_checkpoint",
    "state_digest",
    "verify_checkpoint",
]

_HOMES = {
    "_checkpoint": ("plan_restore", "restore_into", "save_checkpoint", "state_digest"),
    "_copying": ("migrate_checkpoint",),
    "_errors": tuple(name for name in __all__ if name.endswith("Error")),
    "_layout": ("LeafSpec", "Mismatch"),
    "_migrating": ("Origin",),
    "_migrations": ("Migrations",),
    "_opening": (
        "VerifyReport",
        "checkpoint_exists",
        "open_checkpoint",
        "verify_checkpoint",
    ),
    "_plan": ("RestorePlan",),
    "_reader": ("Checkpoint",),
    "_rules": ("Rules",),
    "_scopes": ("View",),
    "_writer": ("CheckpointRecord",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


_MODULES = ("optax_moves", "testing")


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
