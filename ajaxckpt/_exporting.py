"""Part of a state as a file of its own, with a JSON beside it that says what it is.

An export is a file in the format of a checkpoint, so that every byte is covered by a
digest and any safetensors reader opens it; its provenance says that it is one. Knows
nothing of policies or programs.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ajaxckpt._directories import replace_file
from ajaxckpt._errors import (
    CheckpointNotFoundError,
    DamagedCheckpointError,
    InvalidArgumentError,
    NotACheckpointError,
)
from ajaxckpt._export_json import check_beside, hash_file, json_path, render_json
from ajaxckpt._metadata import EXPORT, Metadata
from ajaxckpt._paths import is_missing, resolve_path
from ajaxckpt._plain import plain_config, plain_step
from ajaxckpt._provenance import gather_provenance
from ajaxckpt._reader import Checkpoint
from ajaxckpt._writer import StateData, write_checkpoint

_LOADERS = {"policy": "load_policy", "function": "load_function"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportRecord:
    """What an export wrote.

    Attributes:
        path: the safetensors file, absolute.
        json_path: the JSON beside it.
        digest: the digest of the exported leaves, as ``state_digest`` gives it.
        sha256: that of the whole file, which ``sha256sum`` gives too.
        nbytes: bytes of the file.
        leaves: the names of the leaves in it.
        step: the training step, if known.
    """

    path: str
    json_path: str
    digest: str
    sha256: str
    nbytes: int
    leaves: tuple[str, ...]
    step: int | None


def write_export(
    target: str,
    sort: str,
    data: StateData,
    facts: Metadata,
    *,
    step: Any,
    config: Any,
    said: Mapping[str, str | int | None],
) -> ExportRecord:
    """Write an export and the JSON beside it, each atomically, the file first.

    The JSON repeats what the file says itself, and names the file's digest: a kill
    between the two leaves a JSON that shows that it is of an older file.

    Args:
        target: the file, absolute.
        sort: ``policy`` or ``function``: the file says that it is one.
        data: the leaves.
        facts: what is known of the state they come from.
        step: the training step; None to take the state's.
        config: the config; None to take the state's.
        said: what else the file says, such as the name of the parameters.

    Raises:
        InvalidArgumentError: a checkpoint that is no export lies at the path; or
            step or config is wrong.
        DamagedCheckpointError: what lies there might be one.
        NotACheckpointError: something else is at one of the two paths.
    """
    _check_replaceable(target)
    check_beside(target)
    provenance = gather_provenance()
    marks = {f"{EXPORT}.{key}": _as_mark(value) for key, value in said.items()}
    metadata = Metadata(
        checkpoint_id=uuid.uuid4().hex,
        run_id=facts.run_id,
        parent_id=facts.parent_id,
        step=facts.step if step is None else plain_step(step),
        metrics=facts.metrics,
        config=facts.config if config is None else plain_config(config),
        layouts=facts.layouts,
        provenance={**provenance, EXPORT: sort, **marks},
    )
    written = write_checkpoint(target, data, metadata)
    record = ExportRecord(
        path=written.path,
        json_path=json_path(target),
        digest=written.digest,
        sha256=hash_file(written.path),
        nbytes=written.nbytes,
        leaves=tuple(data.layout),
        step=metadata.step,
    )
    head = {
        "ajaxckpt": sort,
        "file": os.path.basename(target),
        "sha256": record.sha256,
        "digest": record.digest,
        "step": record.step,
        **said,
    }
    replace_file(record.json_path, render_json(head, data, metadata, provenance))
    return record


def _as_mark(value: str | int | None) -> str | bool | None:
    """Return a value as provenance holds it, which knows no numbers."""
    return value if value is None or isinstance(value, str | bool) else str(value)


def _check_replaceable(target: str) -> None:
    """Refuse to put an export in the place of what is none, or may be none."""
    if is_missing(target):
        return
    hint = "export to another path, or remove the file yourself"
    try:
        with Checkpoint(target) as there:
            marked = EXPORT in there.provenance
    except CheckpointNotFoundError:  # removed since, or a link to nowhere
        return
    except NotACheckpointError as error:
        error.hint = hint
        raise
    except DamagedCheckpointError as error:
        problem = f"a damaged file is there, perhaps of a whole state: {error.problem}"
        raise DamagedCheckpointError(problem, hint=hint) from error
    if not marked:
        problem = "a checkpoint is there, of a whole state"
        raise InvalidArgumentError(problem, hint=hint)


@contextmanager
def open_export(path: str | os.PathLike[str], sort: str) -> Generator[Checkpoint]:
    """Open an export of one sort, for the time it is read.

    Raises:
        InvalidArgumentError: the file is a checkpoint, or an export of another sort.
        CheckpointNotFoundError, NotACheckpointError, DamagedCheckpointError,
            NewerFormatError: it cannot be read.
    """
    try:
        with Checkpoint(resolve_path(path)) as checkpoint:
            _check_sort(checkpoint, sort)
            yield checkpoint
    except NotACheckpointError as error:
        error.hint = f"pass the path of a file that export_{sort} wrote"
        raise
    except DamagedCheckpointError as error:
        error.hint = "export it again, or copy it again from where it is whole"
        raise


def _check_sort(checkpoint: Checkpoint, sort: str) -> None:
    found = checkpoint.provenance.get(EXPORT)
    if found == sort:
        return
    is_one = "a checkpoint, no export" if found is None else f"an exported {found}"
    call = _LOADERS.get(str(found), "open_checkpoint, or to export_policy first")
    raise InvalidArgumentError(
        f"the file is {is_one}, not an exported {sort}", hint=f"pass it to {call}"
    )
