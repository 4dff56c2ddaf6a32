r"""Leaf names: one spelling per key path.

Knows the grammar of names and nothing of jax, files or bytes. A name is the
segments of a key path joined by dots, and every segment has exactly one spelling::

    int       0, -1, 42           integer keys and sequence indices
    bare      Dense_0             a str that can be mistaken for nothing else
    quoted    "a.b", "0", ""      any other str; \" and \\, hidden characters \uXXXX
    typed     <none> <bool:True> <float:1.0> <complex:0.0,1.0> <bytes:00ff>
              <enum:RED> <tuple:1,a> <frozenset:1,a>

So two different paths never share a name, and a name that is spelled otherwise was
not written by this module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any, cast

from ajaxckpt._grammar import (
    BARE_TEXT,
    EVERYDAY_LENGTH,
    MAX_NESTING,
    PLAIN_NAME,
    quote,
    scan,
    scan_segment,
    type_name,
)


class UnnameableKeyError(TypeError):
    """A key has no spelling in the grammar of leaf names."""


def format_key(key: object) -> str:
    """Spell one key, attribute name or index as a segment of a name.

    A subclass that equals its built-in value is spelled as that value: a StrEnum as
    its text, an IntEnum as its number, a NamedTuple as a tuple.

    Raises:
        UnnameableKeyError: the key's type, depth or size has no spelling.

    Example:
        >>> format_key("Dense_0"), format_key(0), format_key("0")
        ('Dense_0', '0', '"0"')
    """
    return _format(key, MAX_NESTING)


def _format(key: object, depth: int) -> str:
    for kind, spell in _FORMATS:
        if isinstance(key, kind):
            return spell(key, depth)
    plain = _as_python(key)
    if plain is not key:
        return _format(plain, depth)
    raise UnnameableKeyError(f"keys of type {type_name(key)} cannot be named")


def _as_python(key: object) -> object:
    """Turn numpy's integers and bools into Python's; its other scalars stay."""
    # Only rare keys come here, so that most users of this module load no numpy.
    import numpy as np

    if isinstance(key, np.bool_):
        return bool(cast("Any", key))
    # numpy derives its time differences from its integers.
    if isinstance(key, np.integer) and not isinstance(key, np.timedelta64):
        return int(cast("Any", key))
    return key


def _format_str(text: str) -> str:
    # A subclass may render itself as anything; its stored text is the key.
    text = str.__str__(text)
    return text if BARE_TEXT.fullmatch(text) else quote(text)


def _format_int(number: int) -> str:
    try:
        return int.__repr__(number)
    except ValueError:
        bits = int.bit_length(number)
        raise UnnameableKeyError(f"an int of {bits} bits is too long to name") from None


def _format_enum(member: Enum) -> str:
    # Flags that combine no member have none, whatever the stubs say.
    name = cast("str | None", member.name)
    if name is None:
        raise UnnameableKeyError(f"a {type_name(member)} without a name")
    return f"<enum:{_format_str(name)}>"


def _format_members(members: Iterable[object], depth: int) -> list[str]:
    if not depth:
        raise UnnameableKeyError(f"a key nested deeper than {MAX_NESTING} levels")
    return [_format(member, depth - 1) for member in members]


def _format_tuple(key: tuple[object, ...], depth: int) -> str:
    return f"<tuple:{','.join(_format_members(key, depth))}>"


def _format_frozenset(key: frozenset[object], depth: int) -> str:
    return f"<frozenset:{','.join(sorted(_format_members(key, depth)))}>"


def _format_complex(key: complex) -> str:
    real, imag = float.__repr__(key.real), float.__repr__(key.imag)
    return f"<complex:{real},{imag}>"


# In this order: bool is an int, StrEnum is a str, IntEnum is an int.
_FORMATS: tuple[tuple[type, Callable[[Any, int], str]], ...] = (
    (str, lambda key, _: _format_str(key)),
    (bool, lambda key, _: f"<bool:{key}>"),
    (int, lambda key, _: _format_int(key)),
    (Enum, lambda key, _: _format_enum(key)),
    (type(None), lambda key, _: "<none>"),
    (float, lambda key, _: f"<float:{float.__repr__(key)}>"),
    (complex, lambda key, _: _format_complex(key)),
    (bytes, lambda key, _: f"<bytes:{bytes.hex(key)}>"),
    (tuple, _format_tuple),
    (frozenset, _format_frozenset),
)


def join_segments(segments: Iterable[str]) -> str:
    """Join spelled segments to a name; no segments give the name of a lone leaf, "".

    Example:
        >>> join_segments(["actor", "0", '"a.b"'])
        'actor.0."a.b"'
    """
    return ".".join(segments)


def join_names(*names: str) -> str:
    """Join names, of which the name of a lone leaf, "", adds nothing.

    Example:
        >>> join_names("actor", "", "params.w")
        'actor.params.w'
    """
    return ".".join(filter(None, names))


def split_name(name: str) -> tuple[str, ...]:
    """Split a name into its spelled segments, checking every character.

    Raises:
        ValueError: the text is not the one spelling of any key path.

    Example:
        >>> split_name('actor.0."a.b"')
        ('actor', '0', '"a.b"')
    """
    # One regex is several times faster, but its memory grows with the name.
    if len(name) <= EVERYDAY_LENGTH and PLAIN_NAME.fullmatch(name):
        return tuple(name.split("."))
    return tuple(scan(name, scan_segment))


def is_canonical(name: str) -> bool:
    """Tell whether the text is the one spelling of some key path.

    Example:
        >>> is_canonical("layers.0"), is_canonical("layers.00")
        (True, False)
    """
    try:
        split_name(name)
    except ValueError:
        return False
    return True


def relative_name(name: str, prefix: str) -> str | None:
    """Return the name as seen from the prefix, or None where it is not below it.

    Both must be canonical: then a prefix before a dot is a whole ancestor.

    Example:
        >>> relative_name("a.b.c", "a"), relative_name("ab", "a")
        ('b.c', None)
    """
    if not prefix:
        return name
    if not name.startswith(prefix):
        return None
    if len(name) == len(prefix):
        return ""
    return name[len(prefix) + 1 :] if name[len(prefix)] == "." else None
