"""The host's random generators as plain leaves, and back: the streams continue.

Knows Python's ``random`` and ``numpy.random``; knows nothing of files or jax. Of one
program, the tree and each leaf's kind, dtype and shape are the same at all times, so
that a skeleton made at the start fits what is saved later.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Iterator, Mapping
from typing import Any, cast

import numpy as np

from ajaxckpt._errors import InvalidArgumentError
from ajaxckpt._grammar import type_name
from ajaxckpt._names import format_key

HostGenerator = random.Random | np.random.RandomState | np.random.Generator

_BIT_GENERATORS = (
    *(np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937),
    *(np.random.Philox, np.random.SFC64),
)
_NAMES = ", ".join(kind.__name__ for kind in _BIT_GENERATORS)
# What a number may be at most. Not every numpy that we run on checks it: an index
# past its buffer would read foreign memory.
_LIMITS = {
    **{"state": 2**128 - 1, "inc": 2**128 - 1, "uinteger": 2**32 - 1},
    **{"pos": 624, "buffer_pos": 4, "has_uint32": 1, "has_gauss": 1},
}
_SAME_GENERATORS = "pass the generators that host_rng_state was given, by their names"


def host_rng_state(**generators: HostGenerator) -> dict[str, Any]:
    """Return the state of the host's random generators, as a pytree to save.

    Python's ``random`` and NumPy's global ``RandomState`` are always in it. Its
    leaves are Python numbers of any size, strings and numpy arrays: keep it beside
    what ``jax.jit`` sees, and draw nothing in other threads meanwhile.

    Args:
        **generators: by a name of your choice, each ``np.random.Generator``,
            ``np.random.RandomState`` and ``random.Random`` that the program draws
            from, over PCG64, PCG64DXSM, MT19937, Philox or SFC64.

    Returns:
        A pytree that shares nothing with the generators. It is also the skeleton
        that a saved one is restored into.

    Raises:
        InvalidArgumentError: no generator of these kinds, or one of two names.

    Example:
        >>> state = host_rng_state(env=np.random.default_rng(0))
        >>> state["generators"]["env"]["bit_generator"], state["python"]["kind"]
        ('PCG64', 'random.Random')
    """
    named = _gather(generators, "cannot read the host's generators")
    states = {place: _read(generator) for place, generator in named.items()}
    globals_ = {place: states.pop(place) for place in ("python", "numpy")}
    by_name = dict(zip(generators, states.values(), strict=True))
    return {**globals_, "generators": by_name}


def set_host_rng_state(
    state: Mapping[str, Any], /, **generators: HostGenerator
) -> None:
    """Set the host's random generators, so that all streams continue from a state.

    Everything is checked before anything is set: all generators, or an error.

    Args:
        state: what ``host_rng_state`` returned, or a restored one.
        **generators: those that were named there, by the same names.

    Raises:
        InvalidArgumentError: the names are not those of the state, a generator is
            of another kind than the saved one, or a leaf is none that it can take.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> state = host_rng_state(env=rng); drawn = rng.random()
        >>> set_host_rng_state(state, env=rng); rng.random() == drawn
        True
    """
    act = "cannot set the host's generators"
    named = _gather(generators, act)
    skeleton = {name: None for name in generators}
    expected = {"python": None, "numpy": None, "generators": skeleton}
    if problems := list(_compare_names(state, expected)):
        raise _join(problems, act, _SAME_GENERATORS)
    saved = [state["python"], state["numpy"]]
    saved += [state["generators"][name] for name in generators]
    fitted: list[tuple[HostGenerator, dict[str, Any]]] = []
    for (place, generator), tree in zip(named.items(), saved, strict=True):
        try:
            fitted.append((generator, _fit_generator(place, generator, tree)))
        except _UnfitError as error:
            problems.append(str(error))
    if problems:
        hint = "build the generators as the run that saved them did"
        raise _join(problems, act, hint)
    for generator, tree in fitted:
        _write(generator, tree)


class _UnfitError(Exception):
    """A saved leaf is none that this generator can take."""


def _join(problems: list[str], act: str, hint: str) -> InvalidArgumentError:
    if len(problems) == 1:
        return InvalidArgumentError(problems[0], act=act, hint=hint)
    text = "the state does not fit"
    return InvalidArgumentError(text, act=act, details=problems, hint=hint)


def _gather(
    generators: Mapping[str, HostGenerator], act: str
) -> dict[str, HostGenerator]:
    """Return all generators by their place in the state, each of a known kind.

    One generator of two names could be given two states: the last would win.
    """
    everything: dict[str, HostGenerator] = {
        "python": cast("Any", random.getstate).__self__,
        "numpy": cast("Any", np.random.get_state).__self__,
    }
    for name, generator in generators.items():
        everything[f"generators.{format_key(name)}"] = generator
    sources: dict[int, str] = {}
    for place, generator in everything.items():
        if why := _find_unknown(generator):
            hint = (
                "pass a numpy.random.Generator or RandomState over "
                f"{_NAMES}, or a random.Random; a jax key is a leaf as it is"
            )
            raise InvalidArgumentError(f"{place}: {why}", act=act, hint=hint)
        first = sources.setdefault(id(_source(generator)), place)
        if first != place:
            hint = "name each once; Python's and NumPy's global ones are always there"
            why = f"{first} and {place} are one generator"
            raise InvalidArgumentError(why, act=act, hint=hint)
    return everything


def _source(generator: HostGenerator) -> object:
    """Return what is drawn from: a Generator and a RandomState may share it."""
    if isinstance(generator, random.Random):
        return generator
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator
    return cast("Any", generator)._bit_generator


def _find_unknown(generator: object) -> str | None:
    """Return why a generator's state is not one we know to be whole."""
    if isinstance(generator, random.Random):
        known = all(
            getattr(type(generator), name) is getattr(random.Random, name)
            for name in ("random", "getrandbits", "getstate", "setstate")
        )
        return None if known else f"a {type_name(generator)} draws in its own way"
    if not isinstance(generator, np.random.Generator | np.random.RandomState):
        return f"a {type_name(generator)} is no generator"
    kind = type(_source(generator))
    if kind in _BIT_GENERATORS:
        return None
    return f"the bit generator {kind.__module__}.{kind.__qualname__} is unknown"


def _read(generator: HostGenerator) -> dict[str, Any]:
    """Return a generator's state in numpy's form, its kind first."""
    if isinstance(generator, random.Random):
        _, words, gauss = generator.getstate()
        return {
            "kind": "random.Random",
            "state": {"key": np.array(words[:-1], np.uint32), "pos": words[-1]},
            # None is no leaf: it would change the tree
            "has_gauss": int(gauss is not None),
            "gauss": 0.0 if gauss is None else float(gauss),
        }
    if isinstance(generator, np.random.Generator):
        return {"kind": "numpy.random.Generator", **generator.bit_generator.state}
    return {"kind": "numpy.random.RandomState", **generator.get_state(legacy=False)}


def _write(generator: HostGenerator, state: Mapping[str, Any]) -> None:
    """Set a generator to a state that fits it."""
    if isinstance(generator, random.Random):
        words = (*state["state"]["key"].tolist(), state["state"]["pos"])
        gauss = state["gauss"] if state["has_gauss"] else None
        generator.setstate((random.Random.VERSION, words, gauss))
        return
    own = {key: value for key, value in state.items() if key != "kind"}
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = own
    else:
        generator.set_state(own)


def _make_twin(generator: HostGenerator) -> HostGenerator:
    if isinstance(generator, random.Random):
        return random.Random(0)
    source = type(cast("Any", _source(generator)))(0)
    if isinstance(generator, np.random.Generator):
        return np.random.Generator(source)
    return np.random.RandomState(source)


def _fit_generator(place: str, generator: HostGenerator, saved: Any) -> dict[str, Any]:
    """Return a saved state as this generator takes it.

    Raises:
        _UnfitError: it cannot take it.
    """
    expected = _read(generator)
    tree = cast("Mapping[str, Any]", saved if isinstance(saved, Mapping) else {})
    for key in ("kind", "bit_generator"):
        found = tree.get(key)
        if isinstance(found, str) and key in expected and found != expected[key]:
            why = f"{place}: the state is of a {found}, the generator a {expected[key]}"
            raise _UnfitError(why)
    if problems := list(_compare_names(saved, expected, place)):
        raise _UnfitError("; ".join(problems))
    fitted = _fit(place, expected, saved)
    try:  # what numpy or Python refuses beside, they refuse of a twin
        _write(_make_twin(generator), fitted)
    except (ValueError, TypeError, OverflowError) as error:
        raise _UnfitError(f"{place}: {error}") from error
    return fitted


def _compare_names(
    saved: Any, expected: Mapping[str, Any], place: str = ""
) -> Iterator[str]:
    """Yield what the saved tree lacks, or has and should not."""
    if not isinstance(saved, Mapping):
        where = place or "the state"
        yield f"{where}: expected a mapping, found a {type_name(saved)}"
        return
    tree = cast("Mapping[str, Any]", saved)
    for key, item in expected.items():
        name = f"{place}.{format_key(key)}" if place else format_key(key)
        if key not in tree:
            yield f"{name}: not in the state"
        elif isinstance(item, dict):
            yield from _compare_names(tree[key], cast("dict[str, Any]", item), name)
    for key in tree:
        if key not in expected:
            name = f"{place}.{format_key(key)}" if place else format_key(key)
            yield f"{name}: in the state alone"


def _fit(place: str, expected: Any, saved: Any) -> Any:
    """Return saved leaves as a generator's state takes them; the names are right."""
    if isinstance(expected, dict):
        tree = cast("dict[str, Any]", expected)
        return {key: _fit(f"{place}.{key}", tree[key], saved[key]) for key in tree}
    if isinstance(expected, np.ndarray):
        return _fit_array(place, cast("np.ndarray[Any, Any]", expected), saved)
    if isinstance(expected, str):
        if saved != expected:
            raise _UnfitError(f"{place}: expected {expected}, found {saved!r:.60}")
        return expected
    if isinstance(expected, float):
        if getattr(saved, "shape", ()) != () or not _is_float64(saved):
            raise _UnfitError(f"{place}: expected a float, found {_describe(saved)}")
        return float(saved)
    return _fit_int(place, saved)


def _is_float64(saved: Any) -> bool:
    """Tell whether a number has all bits of a Python float."""
    return isinstance(saved, float) or getattr(saved, "dtype", None) == np.float64


def _fit_int(place: str, saved: Any) -> int:
    try:
        number = operator.index(saved)
    except TypeError:
        raise _UnfitError(
            f"{place}: expected an int, found {_describe(saved)}"
        ) from None
    limit = _LIMITS.get(place.rpartition(".")[2], 2**128 - 1)
    if not 0 <= number <= limit:
        raise _UnfitError(f"{place}: {number:#x} is not within 0 … {limit:#x}")
    return number


def _fit_array(place: str, expected: np.ndarray[Any, Any], saved: Any) -> Any:
    dtype, shape = getattr(saved, "dtype", None), getattr(saved, "shape", None)
    if dtype != expected.dtype or shape != expected.shape:
        wanted = f"{expected.dtype}{list(expected.shape)}"
        raise _UnfitError(f"{place}: expected {wanted}, found {_describe(saved)}")
    try:
        values = np.array(saved)
    except (RuntimeError, ValueError, TypeError) as error:  # a donated jax array
        reason = str(error).partition("\n")[0]
        raise _UnfitError(f"{place}: no values: {reason:.80}") from error
    if values.dtype != expected.dtype:  # an abstract leaf, as one object
        raise _UnfitError(f"{place}: a {type_name(saved)} holds no values")
    return values


def _describe(saved: Any) -> str:
    if hasattr(saved, "dtype") and hasattr(saved, "shape"):
        return f"{saved.dtype}{list(saved.shape)}"
    return f"a {type_name(saved)}"
