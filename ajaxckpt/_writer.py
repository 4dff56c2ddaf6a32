"""Layout and leaf data to one file: a single pass, hashed while it is written.

Joins ``_format``, ``_payload`` and ``_files``; knows nothing of jax or pytrees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import xxhash

from ajaxckpt._digest import digest_state
from ajaxckpt._errors import InvalidArgumentError
from ajaxckpt._files import Sink, write_atomically
from ajaxckpt._format import (
    Tensor,
    arrange_tensors,
    draft_header,
    is_ours,
    seal_header,
)
from ajaxckpt._layout import Layout
from ajaxckpt._metadata import Metadata, find_unreadable
from ajaxckpt._payload import LeafData, iter_payload
from ajaxckpt._scalars import Value

# fetched when its turn comes, so that few leaves are on the host at a time
Source = Callable[[], LeafData | bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateData:
    """A state on its way to bytes: what it is, and where its payloads come from."""

    layout: Layout
    values: Mapping[str, Value]
    sources: Mapping[str, Source]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRecord:
    """What a save wrote.

    Attributes:
        path: the file, absolute.
        checkpoint_id: the id in its header.
        step: the step in its header.
        digest: the state's digest, as ``state_digest`` gives it.
        nbytes: bytes of the file.
        leaves: how many leaves it holds.
        excluded: the patterns of what was left out on purpose.
    """

    path: str
    checkpoint_id: str
    step: int | None
    digest: str
    nbytes: int
    leaves: int
    excluded: tuple[str, ...]


def _iter_source(source: Source) -> Iterator[Any]:
    data = source()
    return iter((data,)) if isinstance(data, bytes) else iter_payload(data)


def _hash_chunks(chunks: Iterable[Any], consume: Callable[[Any], None]) -> str:
    hasher = xxhash.xxh3_128()
    for chunk in chunks:
        hasher.update(chunk)
        consume(chunk)
    return hasher.hexdigest()


def _ignore(item: Any) -> None:
    del item


def digest_leaf(source: Source) -> str:
    """Return the digest of one leaf's payload without writing it."""
    return _hash_chunks(_iter_source(source), _ignore)


def digest_data(state: StateData) -> str:
    """Return the digest of a state without writing it."""
    digests = {name: digest_leaf(source) for name, source in state.sources.items()}
    return digest_state(state.layout, state.values, digests)


def _write_payload(
    sink: Sink,
    tensors: Iterable[Tensor],
    sources: Mapping[str, Source],
    told: Callable[[int], None],
) -> dict[str, str]:
    def write(chunk: Any) -> None:
        sink.write(chunk)
        told(len(chunk))

    return {
        tensor.name: _hash_chunks(_iter_source(sources[tensor.name]), write)
        for tensor in tensors
    }


def state_bytes(state: StateData) -> int:
    """Return the payload bytes of a state's file."""
    tensors = arrange_tensors(state.layout)
    return tensors[-1].end if tensors else 0


def write_checkpoint(
    path: str,
    state: StateData,
    metadata: Metadata,
    told: Callable[[int], None] = _ignore,
) -> CheckpointRecord:
    """Write a state to an absolute path, atomically and durably.

    Args:
        path: the file, absolute.
        state: what to write.
        metadata: what the file says of itself.
        told: called with every number of payload bytes that was handed on.

    Raises:
        InvalidArgumentError: the header would exceed the format's limits.
        NotACheckpointError: something else is at the path.
    """
    tensors = arrange_tensors(state.layout)
    draft, limit = draft_header(state.layout, state.values, metadata, tensors)
    if problem := limit or find_unreadable(metadata):
        hint = "save fewer leaves per file, a smaller config, or exclude= with stars"
        raise InvalidArgumentError(problem, hint=hint)
    digests: dict[str, str] = {}

    def write(sink: Sink) -> None:
        sink.skip(len(draft))
        digests.update(_write_payload(sink, tensors, state.sources, told))
        sink.flush()
        # last: a temp whose writer died begins with zeros and is no checkpoint
        sink.write_head(seal_header(draft, [digests[item.name] for item in tensors]))

    target = write_atomically(path, write, is_ours)
    return CheckpointRecord(
        path=target,
        checkpoint_id=metadata.checkpoint_id,
        step=metadata.step,
        digest=digest_state(state.layout, state.values, digests),
        nbytes=len(draft) + (tensors[-1].end if tensors else 0),
        leaves=len(state.layout),
        excluded=metadata.excluded,
    )
