"""Counts what XLA compiles, by the events JAX itself reports."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import jax

BACKEND_COMPILE = "/jax/core/compile/backend_compile_duration"
TRACE = "/jax/core/compile/jaxpr_trace_duration"


@dataclass(slots=True, eq=False)
class CompileCount:
    """What happened between entering and leaving ``count_compiles``."""

    events: list[str] = field(default_factory=list)

    @property
    def compiles(self) -> int:
        return self.events.count(BACKEND_COMPILE)

    @property
    def traces(self) -> int:
        return self.events.count(TRACE)


_active: list[CompileCount] = []


def _listen(event: str, duration: float, **kwargs: Any) -> None:
    del duration, kwargs
    for count in _active:
        count.events.append(event)


# once and for all: older versions of JAX cannot take a listener back
jax.monitoring.register_event_duration_secs_listener(_listen)


@contextmanager
def count_compiles() -> Generator[CompileCount]:
    """Collect the trace and backend-compile events of a block."""
    count = CompileCount()
    _active.append(count)
    try:
        yield count
    finally:
        _active.remove(count)


@dataclass(frozen=True, slots=True)
class Costs:
    """What running a step on a state cost: compiles, traces, cache entries."""

    compiles: int
    traces: int
    entries: int


def run_steps(step: Callable[[Any], Any], state: Any, times: int) -> tuple[Any, Costs]:
    """Run a jitted step and count what it cost beyond what was compiled before."""
    before = step._cache_size()
    with count_compiles() as count:
        for _ in range(times):
            state = step(state)
        jax.block_until_ready([x for x in jax.tree.leaves(state) if is_array(x)])
    entries = step._cache_size() - before
    return state, Costs(count.compiles, count.traces, entries)


def is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array)
