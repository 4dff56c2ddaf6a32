"""What ``inspect`` shows of one checkpoint: its facts, and its leaves as a tree.

Knows open checkpoints, of which it reads the header alone; prints nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ajaxckpt._layout import Layout, LeafSpec
from ajaxckpt._names import join_segments, split_name
from ajaxckpt._reader import Checkpoint
from ajaxckpt._tables import (
    align_rows,
    escape,
    shorten,
    show_bytes,
    show_count,
    show_share,
    show_value,
    wrap_entry,
)

# Deeper segments stay together: nobody nests that deep, and a file may say anything
MAX_LEVELS = 64


@dataclass(slots=True, kw_only=True)
class Subtree:
    """One node of the tree of leaf names, and all that lies below it.

    Attributes:
        segments: the name of the node.
        spec: the leaf of just this name, if there is one.
        leaves: how many leaves the node and those below it are.
        nbytes: the payload bytes of these leaves.
        children: the nodes right below, by segment, in the state's order.
    """

    segments: tuple[str, ...] = ()
    spec: LeafSpec | None = None
    leaves: int = 0
    nbytes: int = 0
    children: dict[str, Subtree] = field(default_factory=dict[str, "Subtree"])


def build_tree(layout: Layout, depth: int) -> Subtree:
    """Arrange leaves by the first ``depth`` segments of their names."""
    root = Subtree()
    for name, spec in layout.items():
        nodes = [root]
        segments = _split_levels(name)
        for segment in segments[:depth]:
            nodes.append(_descend(nodes[-1], segment))
        for node in nodes:
            node.leaves += 1
            node.nbytes += spec.nbytes
        if len(segments) <= depth:
            nodes[-1].spec = spec
    return root


def _split_levels(name: str) -> tuple[str, ...]:
    segments = split_name(name)
    if len(segments) <= MAX_LEVELS:
        return segments
    deep = join_segments(segments[MAX_LEVELS - 1 :])
    return (*segments[: MAX_LEVELS - 1], deep)


def _descend(node: Subtree, segment: str) -> Subtree:
    if segment not in node.children:
        node.children[segment] = Subtree(segments=(*node.segments, segment))
    return node.children[segment]


def walk_tree(node: Subtree, depth: int) -> Iterator[Subtree]:
    """Yield a node and those up to ``depth`` levels below it, parents first."""
    yield node
    if depth > 0:
        for child in node.children.values():
            yield from walk_tree(child, depth - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """A checkpoint as ``inspect`` shows it.

    Attributes:
        path: the path as the user gave it.
        checkpoint: the open checkpoint.
        layout: the leaves that were selected.
        depth: how many levels of names to show.
    """

    path: str
    checkpoint: Checkpoint
    layout: Layout
    depth: int

    def lines(self, width: int) -> list[str]:
        """Return the text for a terminal of some width."""
        facts = [
            line
            for label, text in self._facts()
            for line in wrap_entry(label, text, width)
        ]
        return [*facts, "", *align_rows(list(self._rows()), width)]

    def document(self) -> dict[str, Any]:
        """Return the same as data for JSON."""
        ckpt = self.checkpoint
        return {
            "path": self.path,
            "checkpoint_id": ckpt.checkpoint_id,
            "run_id": ckpt.run_id,
            "parent_id": ckpt.parent_id,
            "step": ckpt.step,
            "metrics": ckpt.metrics,
            "config": ckpt.config,
            "excluded": list(ckpt.excluded),
            "layouts": ckpt.layouts,
            "provenance": ckpt.provenance,
            "digest": ckpt.digest,
            "file_bytes": ckpt.nbytes,
            "payload_bytes": self._payload_bytes(),
            "leaf_count": len(ckpt),
            "leaves": [self._leaf(name, spec) for name, spec in self.layout.items()],
            "subtrees": [
                {
                    "name": join_segments(node.segments),
                    "leaves": node.leaves,
                    "bytes": node.nbytes,
                }
                for node in self._walk()
                if node.children
            ],
        }

    def _payload_bytes(self) -> int:
        return sum(spec.nbytes for spec in self.checkpoint.layout.values())

    def _value(self, name: str, spec: LeafSpec) -> str | None:
        """Spell the value of a leaf that lies in the header, None for the others."""
        if spec.payload_dtype:
            return None
        value = self.checkpoint[name]
        return escape(value) if isinstance(value, str) else show_value(value)

    def _leaf(self, name: str, spec: LeafSpec) -> dict[str, Any]:
        return {
            "name": name,
            "spec": str(spec),
            "kind": spec.kind,
            "dtype": spec.dtype or None,
            "shape": list(spec.shape),
            "weak_type": spec.weak_type,
            "key_impl": spec.key_impl or None,
            "bytes": spec.nbytes,
            "value": self._value(name, spec),
        }

    def _facts(self) -> list[tuple[str, str]]:
        ckpt, payload = self.checkpoint, self._payload_bytes()
        step = "none given" if ckpt.step is None else str(ckpt.step)
        size = f"{show_bytes(payload)} ({payload:,}) of leaves, "
        size += f"{show_bytes(ckpt.nbytes)} ({ckpt.nbytes:,}) in the file"
        facts = [
            ("checkpoint", escape(self.path)),
            ("step", step),
            ("metrics", _show_mapping(ckpt.metrics)),
            (
                "config",
                "" if ckpt.config is None else shorten(_show_json(ckpt.config), 4000),
            ),
            ("leaves", f"{len(ckpt):,}"),
            ("bytes", size),
            ("left out", ", ".join(map(escape, ckpt.excluded))),
            ("layouts", _show_mapping(ckpt.layouts)),
            ("digest", ckpt.digest),
            ("id", escape(ckpt.checkpoint_id)),
            ("run", escape(ckpt.run_id or "")),
            ("parent", escape(ckpt.parent_id or "")),
            *_provenance_facts(ckpt.provenance),
        ]
        return [(label, text) for label, text in facts if text]

    def _walk(self) -> Iterator[Subtree]:
        # one level more than is shown: a node with children is a subtree
        root = build_tree(self.layout, self.depth + 1)
        return walk_tree(root, self.depth)

    def _rows(self) -> Iterator[Sequence[str]]:
        yield ("leaf", "kind", "size", "bytes", "share")
        whole = self._payload_bytes()
        for node in self._walk():
            size = (show_bytes(node.nbytes), f"{node.nbytes:,}")
            share = show_share(node.nbytes, whole)
            yield (self._label(node), escape(self._kind(node)), *size, share)

    def _label(self, node: Subtree) -> str:
        if node.segments:
            return "  " * (len(node.segments) - 1) + escape(node.segments[-1])
        return "total" if len(self.layout) == len(self.checkpoint) else "selected"

    def _kind(self, node: Subtree) -> str:
        """Spell a leaf's spec, and value if the header holds it; or count leaves."""
        if node.spec is None:
            return show_count(node.leaves, "leaf")
        value = self._value(join_segments(node.segments), node.spec)
        return " ".join((str(node.spec), shorten(value or "", 32))).rstrip()


def _show_json(value: object) -> str:
    return escape(json.dumps(value, ensure_ascii=False))


def _show_mapping(items: dict[str, Any]) -> str:
    return ", ".join(f"{escape(key)} {_show_json(item)}" for key, item in items.items())


def _provenance_facts(provenance: dict[str, Any]) -> list[tuple[str, str]]:
    written = str(provenance.pop("time", ""))
    commit = str(provenance.pop("git_commit", ""))
    if provenance.pop("git_dirty", False):
        commit += " with uncommitted changes"
    host = str(provenance.pop("host", ""))
    versions = ", ".join(f"{package} {text}" for package, text in provenance.items())
    facts = [("written", written), ("host", host), ("commit", commit)]
    facts.append(("versions", versions))
    return [(label, escape(text)) for label, text in facts]
