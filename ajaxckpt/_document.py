"""The JSON documents of the command line: what they promise, and their encoding.

``--json`` prints one document per call, however many paths it takes, and none where
the call itself is wrong; ``watch`` prints one per refresh, each on a line of its
own. Within a schema number keys are only ever added. ``CONTRACT`` lists every key by
its path from the top, ``[]`` for the items of a list, with the types it may have;
``object`` stands for data whose keys are the user's.
"""

from __future__ import annotations

import json
import math
from typing import Any, cast

SCHEMA = 1

_EVERY = """
ajaxckpt.command                     str
ajaxckpt.schema                      int
errors[].path                        str
errors[].status                      str
errors[].message                     str
"""
_INSPECT = """
files[].path                         str
files[].checkpoint_id                str
files[].run_id                       str | null
files[].parent_id                    str | null
files[].step                         int | null
files[].metrics                      object
files[].config                       object | null
files[].excluded[]                   str
files[].layouts                      object
files[].provenance                   object
files[].digest                       str
files[].file_bytes                   int
files[].payload_bytes                int
files[].leaf_count                   int
files[].leaves[].name                str
files[].leaves[].spec                str
files[].leaves[].kind                str
files[].leaves[].dtype               str | null
files[].leaves[].shape[]             int
files[].leaves[].weak_type           bool
files[].leaves[].key_impl            str | null
files[].leaves[].bytes               int
files[].leaves[].value               str | null
files[].subtrees[].name              str
files[].subtrees[].leaves            int
files[].subtrees[].bytes             int
"""
_VERIFY = """
files[].path                         str
files[].status                       str
files[].leaves                       int | null
files[].bytes                        int | null
files[].digest                       str | null
"""
_DIGEST = """
files[].path                         str
files[].digest                       str
"""
_DIFF = """
comparison                           null
comparison.a.path                    str
comparison.a.checkpoint_id           str
comparison.a.step                    int | null
comparison.a.digest                  str
comparison.b.path                    str
comparison.b.checkpoint_id           str
comparison.b.step                    int | null
comparison.b.digest                  str
comparison.equal                     bool
comparison.values_compared           bool
comparison.leaves                    int
comparison.only_a[].name             str
comparison.only_a[].spec             str
comparison.only_b[].name             str
comparison.only_b[].spec             str
comparison.changed[].name            str
comparison.changed[].a               str
comparison.changed[].b               str
comparison.unequal[]                 str
comparison.values[].name             str
comparison.values[].spec             str
comparison.values[].elements         int
comparison.values[].differing        int
comparison.values[].largest          int | float | str | null
comparison.values[].nans             int
comparison.values[].index[]          int
comparison.values[].a                str
comparison.values[].b                str
comparison.notes[].fact              str
comparison.notes[].a                 str | null
comparison.notes[].b                 str | null
"""
_PLAN = """
plan                                 null
plan.path                            str
plan.subtree                         str
plan.checkpoint_id                   str
plan.step                            int | null
plan.restores                        bool
plan.load[]                          str
plan.migrate[].name                  str
plan.migrate[].sources[]             str
plan.migrate[].rule                  str
plan.keep[]                          str
plan.ignore[]                        str
plan.resize[]                        str
plan.adopt[]                         str
plan.drop[].name                     str
plan.drop[].rule                     str
plan.mismatches[].name               str
plan.mismatches[].problem            str
plan.mismatches[].expected           str | null
plan.mismatches[].found              str | null
plan.mismatches[].note               str
plan.notes[]                         str
plan.suggestions[]                   str
"""
_MIGRATE = """
copy                                 null
copy.path                            str
copy.checkpoint_id                   str
copy.parent_id                       str
copy.step                            int | null
copy.digest                          str
copy.leaves                          int
copy.bytes                           int
"""
_LS = """
run                                  null
run.path                             str
run.run_ids[]                        str
run.writers[].run_id                 str
run.writers[].owner                  str
run.abandoned                        int
run.checkpoints[].path               str
run.checkpoints[].step               int | null
run.checkpoints[].bytes              int
run.checkpoints[].run_id             str | null
run.checkpoints[].checkpoint_id      str | null
run.checkpoints[].time               float
run.checkpoints[].status             str
run.checkpoints[].newest             bool
run.checkpoints[].best               bool
run.checkpoints[].pinned             bool
run.checkpoints[].metrics            object
"""
_PRUNE = """
prune                                null
prune.path                           str
prune.run_id                         str | null
prune.dry_run                        bool
prune.removed[].path                 str
prune.removed[].step                 int
prune.removed[].bytes                int
prune.kept[].path                    str
prune.kept[].step                    int | null
prune.kept[].bytes                   int
prune.kept[].reasons[]               str
prune.other_runs[]                   str
prune.notes[]                        str
"""
CONTRACT = {
    "inspect": _EVERY + _INSPECT.lstrip(),
    "verify": _EVERY + _VERIFY.lstrip(),
    "diff": _EVERY + _DIFF.lstrip(),
    "digest": _EVERY + _DIGEST.lstrip(),
    "plan": _EVERY + _PLAN.lstrip(),
    "migrate": _EVERY + _MIGRATE.lstrip(),
    "ls": _EVERY + _LS.lstrip(),
    "prune": _EVERY + _PRUNE.lstrip(),
    "watch": _EVERY + _LS.lstrip(),
}


def encode_document(
    command: str,
    errors: list[dict[str, str]],
    body: dict[str, Any],
    indent: int | None = 2,
) -> str:
    """Write a document as JSON, in ASCII; on one line where nothing is indented."""
    head = {"ajaxckpt": {"command": command, "schema": SCHEMA}, "errors": errors}
    return json.dumps(_name_floats({**head, **body}), indent=indent, allow_nan=False)


def _name_floats(value: object) -> object:
    """Replace the floats that JSON has no words for by NaN, Infinity, -Infinity."""
    if isinstance(value, float) and not math.isfinite(value):
        return json.dumps(value)
    if isinstance(value, dict):
        items = cast("dict[str, object]", value).items()
        return {key: _name_floats(item) for key, item in items}
    if isinstance(value, list):
        return [_name_floats(item) for item in cast("list[object]", value)]
    return value
