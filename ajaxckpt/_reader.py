"""A checkpoint opened for reading: what it says, and its leaves by name.

The lazy, read-only face of a ``LeafFile``; knows nothing of jax or pytrees.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from ajaxckpt._digest import digest_state
from ajaxckpt._layout import Layout
from ajaxckpt._leaf_file import LeafFile
from ajaxckpt._payload import Array
from ajaxckpt._plain import Json, read_json


class Checkpoint(Mapping[str, Any]):
    """An open checkpoint: a read-only mapping from leaf name to host value.

    Looking a leaf up reads that leaf's bytes alone and checks their digest. Arrays
    and numpy scalars come as numpy arrays, a typed key as its uint32 words (its
    implementation stands in ``layout``), Python scalars, ``str`` and ``bytes`` as
    themselves, an enum member or a function as its name. Classes are not rebuilt:
    that takes a skeleton, see ``restore_into``.

    The file stays open, and the same, even if it is replaced meanwhile; close it
    with ``close()`` or a ``with`` block.

    Attributes:
        path: the file, absolute.
        nbytes: bytes of the whole file.
        file: the open file below, from which restoring and verifying read.

    Example:
        >>> checkpoint = Checkpoint(path)
        >>> list(checkpoint), checkpoint.layout["w"].shape, checkpoint["step"]
        (['step', 'w'], (3,), 7)
    """

    def __init__(self, path: str) -> None:
        """Open a file and check its header; ``path`` is absolute.

        Raises:
            CheckpointNotFoundError: nothing is at the path.
            NotACheckpointError: ajaxckpt did not write what is there.
            DamagedCheckpointError: the header is not as it was written.
            NewerFormatError: a newer release wrote it.
        """
        self.file = LeafFile(path)
        self._header = self.file.header
        self.path = path
        self.nbytes = self.file.nbytes

    def __getitem__(self, name: str) -> Any:
        """Read one leaf."""
        return self.read([name])[name]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the leaf names in the state's order."""
        return iter(self._header.layout)

    def __len__(self) -> int:
        """Count the leaves."""
        return len(self._header.layout)

    def __contains__(self, name: object) -> bool:
        """Tell whether a leaf of this name was saved, reading nothing."""
        return name in self._header.layout

    def __eq__(self, other: object) -> bool:
        """Be equal to nothing but itself: comparing contents would read them all."""
        return self is other

    def __hash__(self) -> int:
        """Hash by identity."""
        return id(self)

    def __repr__(self) -> str:
        """Show path, step and size."""
        return (
            f"<Checkpoint {self.path} step={self.step} "
            f"leaves={len(self)} bytes={self.nbytes}>"
        )

    def __enter__(self) -> Checkpoint:
        """Return the open checkpoint."""
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Close the file."""
        self.close()

    def close(self) -> None:
        """Close the file; what the header says stays readable."""
        self.file.close()

    @property
    def layout(self) -> Layout:
        """The leaf specs by name, in the state's order."""
        return MappingProxyType(dict(self._header.layout))

    @property
    def step(self) -> int | None:
        """The step given at save."""
        return self._header.metadata.step

    @property
    def metrics(self) -> dict[str, float | int | None]:
        """The metrics given at save."""
        return self._plain(self._header.metadata.metrics)

    @property
    def config(self) -> dict[str, Any] | None:
        """The config given at save, as plain data; tuples come back as lists."""
        config = self._header.metadata.config
        return None if config is None else self._plain(config)

    @property
    def provenance(self) -> dict[str, str | bool | None]:
        """When and with which versions it was written."""
        return dict(self._header.metadata.provenance)

    @property
    def checkpoint_id(self) -> str:
        """The id of this save."""
        return self._header.metadata.checkpoint_id

    @property
    def run_id(self) -> str | None:
        """The id of the run it belongs to, if any."""
        return self._header.metadata.run_id

    @property
    def parent_id(self) -> str | None:
        """The id of the checkpoint it continues, if known."""
        return self._header.metadata.parent_id

    @property
    def layouts(self) -> dict[str, int]:
        """The layout version per migrations registry."""
        return dict(self._header.metadata.layouts)

    @property
    def excluded(self) -> tuple[str, ...]:
        """The patterns of the leaves left out on purpose."""
        return self._header.metadata.excluded

    @property
    def digest(self) -> str:
        """The state's digest, as ``state_digest`` gives it; the header holds it all."""
        digests = {name: item.digest for name, item in self._header.tensors.items()}
        return digest_state(self._header.layout, self._header.values, digests)

    def leaf_digest(self, name: str) -> str:
        """Return the digest of a leaf's payload, or its value where it has none."""
        tensor = self._header.tensors.get(name)
        return str(self._header.values[name]) if tensor is None else tensor.digest

    def read(self, names: Sequence[str]) -> dict[str, Any]:
        """Read several leaves in as few calls as their places allow.

        Returns:
            Leaf name to host value, as looking each up would give.

        Raises:
            DamagedCheckpointError: a leaf's bytes are not those written.
            KeyError: the file has no such leaf.
        """
        return self.file.read(names)

    def iter_pieces(self, name: str) -> Iterator[Array]:
        """Yield an array leaf's elements in C order, flat, at most 1 MiB at a time.

        Each piece is overwritten by the next; the digest is checked after the last.

        Raises:
            DamagedCheckpointError: the leaf's bytes are not those written.
        """
        return self.file.iter_pieces(name)

    def _plain(self, value: Mapping[str, Any]) -> dict[str, Any]:
        plain = read_json(dict[str, Json](value))
        return plain if isinstance(plain, dict) else {}
