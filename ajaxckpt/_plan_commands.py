"""The two commands that load the user's code: plan and migrate.

Knows the public verbs; prints nothing: it tells a session, which does.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ajaxckpt._errors import InvalidArgumentError
from ajaxckpt._loading import call_object, load_object
from ajaxckpt._sessions import Session, attempt
from ajaxckpt._tables import escape, show_bytes, show_count

if TYPE_CHECKING:
    from ajaxckpt._plan import RestorePlan
    from ajaxckpt._writer import CheckpointRecord


def _plan(path: str, arguments: Namespace) -> RestorePlan:
    from ajaxckpt._checkpoint import plan_restore

    config = None
    if arguments.config is not None:
        config = load_object(arguments.config, "--config")
        if callable(config) and not isinstance(config, Mapping | type):
            config = call_object(arguments.config, "--config")
    return plan_restore(
        _skeleton(arguments.skeleton),
        path,
        subtree=arguments.subtree,
        keep=arguments.keep,
        ignore=arguments.ignore,
        resize=arguments.resize,
        migrations=[load_object(text, "--migrations") for text in arguments.migrations],
        config=config,
    )


def _skeleton(text: str) -> Any:
    """Return what the argument names; None is a forgotten return."""
    skeleton = call_object(text, "--skeleton")
    if skeleton is None:
        problem = f"--skeleton {text}: it returned None"
        raise InvalidArgumentError(problem, hint="return the skeleton")
    return skeleton


def run_plan(session: Session, arguments: Namespace) -> dict[str, Any]:
    """Show what a restore would do; a finding where it would not restore."""
    plan = attempt(session, arguments.path, _plan, arguments)
    if plan is None:
        return {"plan": None}
    from ajaxckpt._plan_table import plan_document, plan_lines

    for line in plan_lines(plan, all_rows=arguments.all):
        session.say(line)
    if plan.mismatches:
        session.find()
    return {"plan": plan_document(plan)}


def _migrate(path: str, arguments: Namespace) -> CheckpointRecord:
    from ajaxckpt._copying import migrate_checkpoint

    skeleton = None
    if arguments.skeleton is not None:
        skeleton = _skeleton(arguments.skeleton)
    registries = [load_object(text, "--migrations") for text in arguments.migrations]
    return migrate_checkpoint(path, arguments.new, registries, skeleton=skeleton)


def run_migrate(session: Session, arguments: Namespace) -> dict[str, Any]:
    """Write an upgraded copy."""
    record = attempt(session, arguments.old, _migrate, arguments)
    if record is None:
        return {"copy": None}
    from ajaxckpt._opening import open_checkpoint

    with open_checkpoint(record.path) as copy:
        parent = copy.parent_id
    what = f"{show_count(record.leaves, 'leaf')}, {show_bytes(record.nbytes)}"
    session.say(f"verified  {what}  {escape(record.path)}")
    return {
        "copy": {
            "path": record.path,
            "checkpoint_id": record.checkpoint_id,
            "parent_id": parent,
            "step": record.step,
            "digest": record.digest,
            "leaves": record.leaves,
            "bytes": record.nbytes,
        }
    }
