"""What is worth knowing of a restore and changes no value: then and now.

Knows what a checkpoint says of itself; decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

from ajaxckpt._metadata import dump_json
from ajaxckpt._migrations import Migrations
from ajaxckpt._provenance import gather_provenance

_PASSING = ("time",)
_SHOWN = 60
_ABSENT: Any = object()


def note_provenance(then: Mapping[str, Any]) -> Iterator[str]:
    """Yield the versions and the commit that are not those of the save."""
    now = gather_provenance()
    for key in dict.fromkeys((*then, *now)):
        if key not in _PASSING and then.get(key) != now.get(key):
            yield f"{key}: {_show(then.get(key))} then, {_show(now.get(key))} now"


def note_config(
    then: Mapping[str, Any] | None, now: Mapping[str, Any] | None
) -> Iterator[str]:
    """Yield the entries of the config that are not those of the save."""
    if now is None:
        return
    yield from _compare(then or {}, now, "config")


def _compare(then: Any, now: Any, place: str) -> Iterator[str]:
    if isinstance(then, Mapping) and isinstance(now, Mapping):
        old, new = cast("dict[str, Any]", then), cast("dict[str, Any]", now)
        for key in dict.fromkeys((*old, *new)):
            inner = f"{place}.{key}"
            yield from _compare(old.get(key, _ABSENT), new.get(key, _ABSENT), inner)
    elif _differ(then, now):
        yield f"{place}: {_show(then)} then, {_show(now)} now"


def _differ(then: Any, now: Any) -> bool:
    if then is _ABSENT or now is _ABSENT:
        return then is not now
    return type(then) is not type(now) or repr(then) != repr(now)


def _show(value: Any) -> str:
    if value is _ABSENT or value is None:
        return "none"
    text = value if type(value) is str else repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


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
