r"""Fuzz the reader with sealed headers: ``python tests/fuzz_headers.py``.

A header is only worth parsing if its digest is right, so damage by accident never
gets this far; these files are made by hand. Each is a valid file, changed in one to
three places: in the JSON it means, in its text, in its raw bytes or in the payload.
It must open and be encoded again to the same bytes, or be refused by the one error;
in bounded memory either way.

Also the forge for other tests: ``encode`` writes a file without jax, ``Draft`` makes
one from whatever its parts say, and ``forge`` seals any header text.
"""

from __future__ import annotations

import argparse
import copy
import faulthandler
import json
import random
import re
import sys
import time
import traceback
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from ajaxckpt._dtypes import STORED_DTYPES
from ajaxckpt._errors import CheckpointError
from ajaxckpt._format import arrange_tensors, draft_header, seal_header
from ajaxckpt._layout import LeafSpec
from ajaxckpt._metadata import Metadata
from ajaxckpt._opening import checkpoint_exists, open_checkpoint
from ajaxckpt._reader import Checkpoint

ZEROS = "0" * 32
SLACK_BYTES = 32 << 20
SECONDS_PER_FILE = 60
_DIGEST_KEY = b'"ajaxckpt.digest":"'


def digest(data: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(data)


def forge(text: str | bytes, payload: bytes = b"") -> bytes:
    """Pad a header text, give it its length and the digest that is right for it."""
    raw = text.encode() if isinstance(text, str) else text
    raw += b" " * (-(8 + len(raw)) % 64)
    return seal(len(raw).to_bytes(8, "little") + raw) + payload


def seal(raw: bytes) -> bytes:
    """Write the right digest into a header that has its length already."""
    start = raw.find(_DIGEST_KEY) + len(_DIGEST_KEY)
    if start < len(_DIGEST_KEY):
        return raw
    zeroed = raw[:start] + ZEROS.encode() + raw[start + 32 :]
    return raw[:start] + digest(zeroed).encode() + raw[start + 32 :]


def compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


@dataclass(slots=True)
class Draft:
    """The parts of a file, free to say anything.

    Attributes:
        leaves: the list that says in which order which leaf is what.
        facts: the other metadata.
        tensors: [name, tag, shape, begin, end] per tensor entry.
        digests: the leaf digests, None for those that the payload really has.
        meta: the metadata's JSON text, None for that of ``leaves`` and ``facts``.
    """

    leaves: Any
    facts: dict[str, Any]
    tensors: list[list[Any]]
    payload: bytes
    version: str = "1"
    digests: str | None = None
    meta: str | None = None

    def meta_text(self) -> str:
        if self.meta is not None:
            return self.meta
        return compact({"leaves": self.leaves, **self.facts})

    def text(self) -> str:
        """Spell the header as the format does, with zeros for its own digest."""
        entries = "".join(
            f',{json.dumps(name)}:{{"dtype":{json.dumps(tag)},"shape":{compact(shape)},'
            f'"data_offsets":[{begin},{end}]}}'
            for name, tag, shape, begin, end in self.tensors
        )
        digests = self.digests
        if digests is None:
            digests = "".join(digest(_span(self.payload, t)) for t in self.tensors)
        return (
            f'{{"__metadata__":{{"ajaxckpt":"{self.version}",'
            f'"ajaxckpt.digest":"{ZEROS}","ajaxckpt.leaves":"{digests}",'
            f'"ajaxckpt.meta":{json.dumps(self.meta_text())}}}{entries}}}'
        )

    def forge(self) -> bytes:
        return forge(self.text(), self.payload)


def _span(payload: bytes, tensor: list[Any]) -> bytes:
    begin, end = tensor[3:]
    sound = type(begin) is int and type(end) is int and begin >= 0
    return payload[begin:end] if sound else b""


def parse(data: bytes) -> Draft:
    """Take a valid file apart."""
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    ours = header.pop("__metadata__")
    facts = json.loads(ours["ajaxckpt.meta"])
    tensors = [
        [name, row["dtype"], row["shape"], *row["data_offsets"]]
        for name, row in header.items()
    ]
    return Draft(facts.pop("leaves"), facts, tensors, data[8 + size :])


def encode(
    layout: Mapping[str, LeafSpec],
    values: Mapping[str, Any],
    payloads: Mapping[str, bytes],
    metadata: Metadata,
) -> bytes:
    """Return the bytes that a save of these leaves writes."""
    tensors = arrange_tensors(layout)
    header, problem = draft_header(layout, values, metadata, tensors)
    assert not problem, problem
    sealed = seal_header(header, [digest(payloads[item.name]) for item in tensors])
    return sealed + b"".join(payloads[item.name] for item in tensors)


def seed_files() -> list[bytes]:
    """Return valid files that between them hold every kind of leaf."""
    plain = Metadata(checkpoint_id="0123456789abcdef" * 2)
    full = Metadata(
        checkpoint_id="f" * 32,
        run_id="run",
        parent_id="0" * 32,
        step=400,
        metrics={"return": -1.5, "loss": {"__float__": "nan"}, "none": None},  # type: ignore[dict-item]
        config={"net": {"sizes": [64, 64], "act": "relu"}, "lr": 3e-4, "on": True},
        excluded=("replay", "**.mu"),
        layouts={"agent": 3},
        provenance={"time": "2026-01-01T00:00:00+00:00", "git_dirty": None},
    )
    scalars: dict[str, tuple[Any, Any]] = {
        "flag": ("bool", True),
        "big": ("int", "-0x1fffffffffffffffffffff"),
        "rate": ("float", "3fb999999999999a"),
        "wave": ("complex", "3ff00000000000007ff8000000000001"),
        "mode": ("enum", "RED"),
        "act": ("function", "jax.nn.relu"),
    }
    arrays = {
        "w": LeafSpec(kind="jax", dtype="float32", shape=(2, 3)),
        "step": LeafSpec(kind="jax", dtype="int32", weak_type=True),
        "host": LeafSpec(kind="numpy", dtype="float64", shape=(2,)),
        "one": LeafSpec(kind="numpy scalar", dtype="int8"),
        "z": LeafSpec(kind="numpy", dtype="complex128", shape=(1,)),
        "key": LeafSpec(
            kind="key",
            dtype="uint32",
            shape=(2,),
            key_impl="threefry2x32",
            key_words=2,
        ),
        "q": LeafSpec(kind="jax", dtype="int4", shape=(3,)),
        "none": LeafSpec(kind="jax", dtype="float16", shape=(0, 4)),
        'od."d, \\u0000"': LeafSpec(kind="str", length=2),
        "raw": LeafSpec(kind="bytes", length=3),
    }
    payloads = {name: bytes(spec.nbytes) for name, spec in arrays.items()}
    values = {name: value for name, (_, value) in scalars.items()}
    kinds = {name: LeafSpec(kind=kind) for name, (kind, _) in scalars.items()}
    lone = {"": LeafSpec(kind="jax", dtype="bool", shape=(2,))}
    return [
        encode({**arrays, **kinds}, values, payloads, full),
        encode(lone, {}, {"": b"\1\0"}, plain),
        encode(kinds, values, {}, plain),
        encode({}, {}, {}, full),
    ]


# --- changes -------------------------------------------------------------------

Change = Callable[[random.Random, Draft], None]
_NUMBERS = (0, 1, 2, 8, -1, 255, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64)
_NASTY: tuple[Any, ...] = (
    *_NUMBERS,
    10**25,
    -(2**63),
    None,
    True,
    False,
    1.5,
    -0.0,
    1e308,
    "",
    "a",
    "a.b",
    '"a"',
    "\0",
    "\ud800",
    "\U0001f600",
    "0x1",
    "0X1",
    "-0x0",
    "7ff8000000000001",
    "3ff0",
    "f" * 5000,
    [],
    {},
    [[]],
    [1] * 3000,
    {"__float__": "nan"},
    {"__float__": "1.0"},
    {"__float__": []},
    {"tensor": 0},
    {"name": "a", "kind": "bool", "value": True},
    "float3_x",
    "threefry2x32",
    *("jax", "numpy", "numpy scalar", "key", "bool", "int", "float", "complex"),
    *("str", "bytes", "enum", "function"),
    *STORED_DTYPES,
    *sorted({row.tag for row in STORED_DTYPES.values()}),
)


def _nasty(rng: random.Random) -> Any:
    if rng.random() < 0.03:
        value: Any = 1
        for _ in range(rng.choice((3, 63, 65, 150))):
            value = [value] if rng.random() < 0.5 else {"a": value}
        return value
    return copy.deepcopy(rng.choice(_NASTY))


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield (container, key) of every place in JSON-like data."""
    keys = value if isinstance(value, dict) else range(len(value))
    for key in list(keys):
        yield value, key
        if isinstance(value[key], dict | list):
            yield from _places(value[key])


def change_meta(rng: random.Random, draft: Draft) -> None:
    root = {"leaves": draft.leaves, "facts": draft.facts}
    container, key = rng.choice(list(_places(root)))
    if container is root:
        container, key = draft.facts, rng.choice(list(draft.facts) or ["step"])
    match rng.randrange(5):
        case 0 | 1:
            container[key] = _nasty(rng)
        case 2:
            container.pop(key, None) if isinstance(container, dict) else container.pop(
                key
            )
        case 3 if isinstance(container, dict):
            container[rng.choice(("kind", "dtype", "impl", "value", "x", ""))] = _nasty(
                rng
            )
        case _ if isinstance(container, list):
            container.insert(key, copy.deepcopy(rng.choice(container)))
        case _:
            items = list(container.items())
            rng.shuffle(items)
            container.clear()
            container.update(items)


def change_tensor(rng: random.Random, draft: Draft) -> None:
    if not draft.tensors:
        draft.tensors.append(["n", "U8", [0], 0, 0])
        return
    tensor = rng.choice(draft.tensors)
    match rng.randrange(8):
        case 0 | 1:
            at = rng.choice((3, 4))
            step = rng.choice((-8, -4, -1, 1, 4, 8, 64))
            tensor[at] = rng.choice((tensor[at] + step, *_NUMBERS, 10**30, -5, "0"))
        case 2:
            tensor[2] = rng.choice(
                ([], [0], [0, 2**40], [2**62, 2], [1] * 70, [-1], [2, 2], [0, 2**63])
            )
        case 3:
            tensor[1] = rng.choice((*_NASTY[-20:], "F6_E2M3", "u8", ""))
        case 4:
            tensor[0] = str(_nasty(rng))[:99]
        case 5:
            draft.tensors.remove(tensor)
        case 6:
            draft.tensors.append(list(tensor))
        case _:
            rng.shuffle(draft.tensors)


def change_digests(rng: random.Random, draft: Draft) -> None:
    digests = "".join(digest(_span(draft.payload, item)) for item in draft.tensors)
    draft.digests = rng.choice(
        (digests.upper(), digests[:-1], digests + ZEROS, digests[32:], "", "g" * 32)
    )


def change_version(rng: random.Random, draft: Draft) -> None:
    draft.version = rng.choice(("0", "2", "01", "1.0", "-1", "", "99999999999", "1 "))


def change_payload(rng: random.Random, draft: Draft) -> None:
    payload = bytearray(draft.payload)
    for _ in range(rng.randint(1, 8)):
        if payload:
            payload[rng.randrange(len(payload))] = rng.randrange(256)
    draft.payload = bytes(payload)


_CHANGES: tuple[Change, ...] = (
    *(change_meta, change_meta, change_meta, change_tensor, change_tensor),
    *(change_digests, change_version, change_payload),
)
_SPELLINGS = (
    (rb'"(?=a)', b'"\\u0061'),
    (rb'\\"', b"\\u0022"),
    (rb",", b", "),
    (rb":", b": "),
    (rb"\[(?=[0-9])", b"[0"),
    (rb"(?<=[0-9])(?=[,\]])", b".0"),
    (rb"(?<=[0-9])(?=[,\]])", b"e0"),
    (rb"null", b"NaN"),
    (rb"null", b"[" * 5000 + b"]" * 5000),
    (rb"true", b"1"),
    (rb"[a-f]", b"A"),
    (rb"\}", b"}}"),
    (rb"\{", b"{,"),
    (rb"[a-z]", "\u00e9".encode()),
    (rb"[a-z]", b"\xff"),
    (rb"[a-z]", b"\0"),
    (rb" *\Z", b"\n"),
)


def change_text(rng: random.Random, text: bytes) -> bytes:
    """Spell one place of a header's text otherwise."""
    if rng.random() < 0.4:
        start = rng.randrange(len(text))
        stop = min(len(text), start + rng.choice((0, 1, 1, 5, 40)))
        piece = text[rng.randrange(len(text)) :][: rng.choice((0, 1, 5, 40))]
        return text[:start] + piece + text[stop:]
    pattern, other = rng.choice(_SPELLINGS)
    places = list(re.finditer(pattern, text))
    if not places:
        return text
    match = rng.choice(places)
    return text[: match.start()] + other + text[match.end() :]


def change_raw(rng: random.Random, data: bytes) -> bytes:
    """Change raw bytes of a file, its length field perhaps."""
    match rng.randrange(5):
        case 0:
            length = rng.choice((0, 56, 120, 2**25 - 8, 2**25 + 56, 2**63, 2**64 - 1))
            return length.to_bytes(8, "little") + data[8:]
        case 1:
            return data[: rng.randrange(len(data))]
        case 2:
            return data + bytes(rng.choice((1, 8, 64)))
        case _:
            at = rng.randrange(len(data))
            return data[:at] + rng.randbytes(1) + data[at + 1 :]


def make_variant(rng: random.Random, seeds: list[bytes]) -> bytes:
    """Return one changed file."""
    data = rng.choice(seeds)
    kind = rng.random()
    if kind < 0.02:
        return data
    if kind < 0.62:
        draft = parse(data)
        for _ in range(rng.choice((1, 1, 2, 3))):
            rng.choice(_CHANGES)(rng, draft)
        return draft.forge()
    size = 8 + int.from_bytes(data[:8], "little")
    if kind < 0.92:
        text = data[8:size].rstrip(b" ")
        for _ in range(rng.choice((1, 1, 2))):
            text = change_text(rng, text)
        return forge(text, data[size:])
    changed = change_raw(rng, data)
    return seal(changed[:size]) + changed[size:] if rng.random() < 0.5 else changed


# --- the check -----------------------------------------------------------------


def read_everything(checkpoint: Checkpoint) -> None:
    """Touch all that a checkpoint can be asked for."""
    repr((checkpoint.step, checkpoint.metrics, checkpoint.config, checkpoint.layouts))
    repr((checkpoint.provenance, checkpoint.excluded, checkpoint.digest))
    repr((checkpoint.checkpoint_id, checkpoint.run_id, checkpoint.parent_id))
    for name, spec in checkpoint.layout.items():
        str(spec)
        checkpoint[name]


def encode_again(checkpoint: Checkpoint) -> bytes:
    """Encode the header anew from what was understood, placing the tensors anew."""
    header = checkpoint._header
    tensors = arrange_tensors(header.layout)
    draft, problem = draft_header(
        header.layout, header.values, header.metadata, tensors
    )
    assert not problem, problem
    return seal_header(draft, [header.tensors[item.name].digest for item in tensors])


@dataclass(slots=True)
class Tally:
    """What became of the files."""

    outcomes: Counter[str] = field(default_factory=Counter)
    files: int = 0
    peak_bytes: int = 0


def check_file(path: Path, data: bytes, tally: Tally) -> None:
    """Open one file; raise AssertionError for whatever should not happen."""
    path.write_bytes(data)
    length = 8 + int.from_bytes(data[:8], "little")
    length = length if length <= len(data) else len(data)
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    outcome = "refused"
    try:
        with open_checkpoint(path) as checkpoint:
            outcome = "refused when read"
            assert encode_again(checkpoint) == data[:length], "not canonical"
            assert checkpoint_exists(path)
            read_everything(checkpoint)
            outcome = "opened"
    except CheckpointError as error:
        lines = str(error).splitlines()
        assert lines[0].startswith(f"{path}: "), str(error)
        assert lines[-1].startswith("To mend: "), str(error)
        assert len(lines) <= 13, str(error)
        outcome += f": {type(error).__name__}"
    peak = tracemalloc.get_traced_memory()[1] - before
    assert peak <= 16 * length + SLACK_BYTES, f"{peak} bytes for {length} of header"
    tally.outcomes[outcome] += 1
    tally.files += 1
    tally.peak_bytes = max(tally.peak_bytes, peak)


def run(seed: int, folder: Path, enough: Callable[[Tally], bool]) -> Tally:
    """Check files until it is enough; a failing one stays in the folder."""
    rng, seeds, tally = random.Random(seed), seed_files(), Tally()
    path = folder / f"fuzz-{seed}.safetensors"
    tracemalloc.start()
    try:
        while not enough(tally):
            check_file(path, make_variant(rng, seeds), tally)
    finally:
        tracemalloc.stop()
    path.unlink()
    return tally


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path())
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    seen = Tally()

    def enough(tally: Tally) -> bool:
        nonlocal seen
        seen = tally
        # a file that hangs the reader ends the process and stays in the folder
        faulthandler.dump_traceback_later(
            SECONDS_PER_FILE, exit=True, file=sys.__stderr__
        )
        return time.monotonic() > end

    try:
        run(options.seed, options.out, enough)
    except Exception:
        traceback.print_exc()
        kept = options.out / f"fuzz-{options.seed}.safetensors"
        print(f"FAILED after {seen.files} files; reproducer: {kept}")
        return 1
    finally:
        faulthandler.cancel_dump_traceback_later()
    for outcome, count in sorted(seen.outcomes.items()):
        print(f"{count:8d} {outcome}")
    print(f"{seen.files:8d} files, at most {seen.peak_bytes / 2**20:.1f} MiB each")
    return 0


if __name__ == "__main__":
    sys.exit(main())
