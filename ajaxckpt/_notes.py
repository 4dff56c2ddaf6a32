"""What is worth knowing of a restore and changes no value: then and now.

Knows what a checkpoint says of itself; decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ajaxckpt._differences import Path, describe_difference, diff_plain
from ajaxckpt._layout import LeafSpec
from ajaxckpt._metadata import dump_json
from ajaxckpt._migrations import Migrations
from ajaxckpt._plain import Json, read_json
from ajaxckpt._provenance import gather_provenance
from ajaxckpt._roles import find_role

_PASSING = ("time",)


def note_provenance(then: Mapping[str, Any]) -> Iterator[str]:
    """Yield the versions and the commit that are not those of the save."""
    yield from _note(_list_known(then), _list_known(gather_provenance()))


def _list_known(facts: Mapping[str, Any]) -> dict[str, Json]:
    """Return the facts that last, without those that were looked for in vain."""
    return {k: v for k, v in facts.items() if k not in _PASSING and v is not None}


def note_config(
    then: dict[str, Any] | None, now: Mapping[str, Json] | None
) -> Iterator[str]:
    """Yield the entries of the config that are not those of the save."""
    if now is not None:
        yield from _note(then or {}, read_json(dict(now)), ("config",))


def _note(then: Json, now: Json, path: Path = ()) -> Iterator[str]:
    for key, pair in diff_plain(then, now, path):
        yield describe_difference(key, *pair)


def note_versions(
    recorded: Mapping[str, int], registries: tuple[Migrations, ...]
) -> Iterator[str]:
    """Yield the registries that the file records and the caller did not pass."""
    passed = {registry.name for registry in registries}
    for name, version in recorded.items():
        if name not in passed:
            yield (
                f"the file has layout version {version} of {dump_json(name)}, "
                "a registry that migrations= does not pass"
            )


def note_left_out(leaves: Iterable[tuple[str, LeafSpec]], why: str) -> Iterator[str]:
    """Yield what it usually means that leaves do not come from the file.

    Args:
        leaves: their names and specs.
        why: what was done with them instead.
    """
    lost: dict[str, list[str]] = {}
    for name, spec in leaves:
        role = find_role(name, spec)
        if not role.is_unknown:
            lost.setdefault(role.lost, []).append(name)
    for meaning, names in lost.items():
        more = f" and {len(names) - 1:,} more" if names[1:] else ""
        yield f"{names[0]}{more}, {why}: {meaning}"
