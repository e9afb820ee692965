"""Ways to damage or forge a checkpoint, each of which a reader must refuse; random ones repeat with their seed."""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xxhash import xxh3_128

from tests.support.checkpoints import save_two_steps
from unipar.checkpoint.verifying import seal_of_manifest, verify_checkpoint
from unipar.errors import CheckpointError

SHARDS = ("shards/rank-00000.safetensors", "shards/rank-00001.safetensors")
FILES = ("manifest.json", "manifest.sha256", "state.json", *SHARDS)
PAYLOAD = b"cos\nsystem\n(S'touch payload-ran'\ntR."
"""Pickle that runs a command when it is loaded."""


@dataclass
class Mutated:
    """Copy of a checkpoint, to be changed; `other` is a whole one of the same run, to be left as it is."""

    path: Path
    other: Path
    draw: random.Random

    def read(self, name: str) -> bytes:
        return (self.path / name).read_bytes()

    def write(self, name: str, data: bytes) -> None:
        (self.path / name).write_bytes(data)

    def any_file(self) -> str:
        return self.draw.choice(FILES)

    def any_shard(self) -> str:
        return self.draw.choice(SHARDS)

    def manifest(self) -> Any:
        return json.loads(self.read("manifest.json"))

    def seal(self, manifest: Any) -> None:
        """Write a manifest with its SHA-256, as a forger would."""
        self.seal_bytes(json.dumps(manifest).encode())

    def seal_bytes(self, data: bytes) -> None:
        self.write("manifest.json", data)
        self.write("manifest.sha256", seal_of_manifest(data))

    def forge(self, name: str, data: bytes) -> None:
        """Write a file, and the manifest with its new size and hash."""
        self.write(name, data)
        manifest = self.manifest()
        manifest["files"][name] = {"bytes": len(data), "xxh3_128": xxh3_128(data).hexdigest()}
        self.seal(manifest)

    def header(self, name: str) -> tuple[Any, bytes]:
        data = self.read(name)
        length = int.from_bytes(data[:8], "little")
        return json.loads(data[8 : 8 + length]), data[8 + length :]

    def forge_header(self, name: str, header: Any, body: bytes) -> None:
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        self.forge(name, struct.pack("<Q", len(text)) + text + body)


def _flip(m: Mutated) -> None:
    name = m.any_file()
    data = bytearray(m.read(name))
    data[m.draw.randrange(len(data))] ^= 1 << m.draw.randrange(8)
    m.write(name, bytes(data))


def _truncate(m: Mutated) -> None:
    name = m.any_file()
    data = m.read(name)
    m.write(name, data[: m.draw.randrange(len(data))])


def _lengthen(m: Mutated) -> None:
    name = m.any_file()
    m.write(name, m.read(name) + m.draw.randbytes(m.draw.randint(1, 40)))


def _overwrite(m: Mutated) -> None:
    """Some bytes become others: at least one changes."""
    name = m.any_file()
    data = bytearray(m.read(name))
    first = m.draw.randrange(len(data))
    count = min(m.draw.randint(1, 64), len(data) - first)
    data[first : first + count] = bytes(b ^ m.draw.randint(1, 255) for b in data[first : first + count])
    m.write(name, bytes(data))


def _delete(m: Mutated) -> None:
    (m.path / m.any_file()).unlink()


def _delete_shards(m: Mutated) -> None:
    shutil.rmtree(m.path / "shards")


def _swap(m: Mutated) -> None:
    one, two = m.draw.sample(FILES, 2)
    first, second = m.read(one), m.read(two)
    m.write(one, second)
    m.write(two, first)


def _stale(m: Mutated) -> None:
    name = m.any_file()
    m.write(name, (m.other / name).read_bytes())


def _stale_pair(m: Mutated) -> None:
    for name in ("manifest.json", "manifest.sha256"):
        m.write(name, (m.other / name).read_bytes())


def _renamed(m: Mutated) -> None:
    name = m.any_file()
    (m.path / name).rename(m.path / f"{name}{m.draw.randrange(10)}")


def _extra(m: Mutated) -> None:
    name = m.draw.choice(
        ("notes.txt", ".metadata", "data.pkl", "shards/rank-00002.safetensors", "shards/.hidden", "state.json~")
    )
    m.write(name, m.draw.choice((b"", PAYLOAD, m.read(SHARDS[0]))))


def _extra_folder(m: Mutated) -> None:
    (m.path / m.draw.choice(("more", "shards/more", ".git"))).mkdir()


def _symlink(m: Mutated) -> None:
    """The same bytes, but in another place."""
    name = m.any_file()
    outside = m.path.parent / "outside"
    (m.path / name).rename(outside)
    (m.path / name).symlink_to(outside)


def _symlinked_folder(m: Mutated) -> None:
    outside = m.path.parent / "outside-shards"
    (m.path / "shards").rename(outside)
    (m.path / "shards").symlink_to(outside)


def _symlinked_checkpoint(m: Mutated) -> None:
    real = m.path.parent / "real"
    m.path.rename(real)
    m.path.symlink_to(real)


def _dangling(m: Mutated) -> None:
    name = m.any_file()
    (m.path / name).unlink()
    (m.path / name).symlink_to("/nowhere/at/all")


def _hard_link(m: Mutated) -> None:
    os.link(m.path / m.any_file(), m.path.parent / "second-name")


def _fifo(m: Mutated) -> None:
    name = m.any_file()
    (m.path / name).unlink()
    os.mkfifo(m.path / name)


def _device(m: Mutated) -> None:
    """A folder instead of a file."""
    name = m.any_file()
    (m.path / name).unlink()
    (m.path / name).mkdir()


def _pickled(m: Mutated) -> None:
    """Pickle in place of a file, with its hash in the manifest."""
    name = m.draw.choice(("state.json", *SHARDS))
    m.forge(name, PAYLOAD)


def _path_trick(m: Mutated) -> None:
    """A name in the manifest that leads elsewhere; the file is there."""
    outside = m.path.parent / "outside.safetensors"
    outside.write_bytes(m.read(SHARDS[0]))
    name = m.draw.choice(
        (
            "../outside.safetensors",
            "shards/../../outside.safetensors",
            str(outside),
            "shards//rank-00000.safetensors",
            "shards/./rank-00000.safetensors",
            "shards/rank-00000.safetensors\x00",
            "shards/rank-00000.safetensors\n",
            "manifest.json",
            "",
            "shards",
            "shards/rank-٠٠٠٠٠.safetensors",
        )
    )
    text = json.dumps(m.manifest()).replace(json.dumps(SHARDS[0]), json.dumps(name))
    m.seal_bytes(text.encode())


def _twice(m: Mutated) -> None:
    """A key that stands twice in JSON: readers that take the first and the last see different checkpoints."""
    data = m.read("manifest.json")
    key = m.draw.choice((b'"step": 2', b'"format": 1', b'"kind": "weight"'))
    m.seal_bytes(data.replace(key, key + b", " + key, 1))


def _header_twice(m: Mutated) -> None:
    name = m.any_shard()
    header, body = m.header(name)
    text = json.dumps(header)[:-1]
    key = m.draw.choice([key for key in header if key != "__metadata__"])
    m.forge_header(name, f"{text}, {json.dumps(key)}: {json.dumps(header[key])}}}".encode(), body)


def _header_bomb(m: Mutated) -> None:
    """A header length far beyond the file, or beyond the limit in a sparse file."""
    name = m.any_shard()
    data = m.read(name)
    length = m.draw.choice((2**63, 2**64 - 1, 2**40, 33 * 2**20, len(data), len(data) - 7))
    m.forge(name, struct.pack("<Q", length) + data[8:])
    if length == 33 * 2**20:
        os.truncate(m.path / name, 8 + length)
        manifest = m.manifest()
        manifest["files"][name]["bytes"] = 8 + length
        m.seal(manifest)


def _many_keys(m: Mutated) -> None:
    name = m.any_shard()
    empty = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    m.forge_header(name, {f"k{i}": empty for i in range(1000)}, b"")


def _offsets(m: Mutated) -> None:
    """Tensors that overlap, leave gaps, or lie outside of the file."""
    name = m.any_shard()
    header, body = m.header(name)
    key = m.draw.choice([key for key in header if key != "__metadata__"])
    first, end = header[key]["data_offsets"]
    shift = m.draw.choice((-8, -1, 1, 4, 2**62, -(2**62)))
    header[key]["data_offsets"] = m.draw.choice(
        ([first + shift, end + shift], [first, end + shift], [end, first], [first], [first, end, end], [first, 1e3])
    )
    m.forge_header(name, header, body)


def _header_types(m: Mutated) -> None:
    name = m.any_shard()
    header, body = m.header(name)
    key = m.draw.choice([key for key in header if key != "__metadata__"])
    field, value = m.draw.choice(
        (
            ("dtype", "F99"),
            ("dtype", None),
            ("dtype", ["F32"]),
            ("shape", [-1]),
            ("shape", [2**63, 2**63]),
            ("shape", [True]),
            ("shape", [1.0]),
            ("shape", "4"),
            ("shape", [1] * 100),
            ("extra", 1),
            ("data_offsets", None),
            ("data_offsets", [-4, 0]),
        )
    )
    header[key][field] = value
    m.forge_header(name, header, body)


def _not_a_header(m: Mutated) -> None:
    name = m.any_shard()
    _, body = m.header(name)
    text = m.draw.choice((b"[]", b"{", b"\xff\xfe", b"null", b'{"a": NaN}', b"[" * 5000, b'{"a":' * 5000, b"9" * 5000))
    m.forge_header(name, text, body)


def _deep_json(m: Mutated) -> None:
    depth = m.draw.choice((65, 100, 900, 5000, 200_000))
    inner = m.draw.choice((b"[" * depth + b"]" * depth, b'{"a":' * depth + b"1" + b"}" * depth))
    if m.draw.random() < 0.5:
        m.forge("state.json", b'{"format": 1, "step": 2, "deep": ' + inner + b"}")
    else:
        m.seal_bytes(m.read("manifest.json").replace(b'"step": 2', b'"step": ' + inner, 1))


def _huge_numbers(m: Mutated) -> None:
    number = m.draw.choice(
        (b"9" * 30, b"9" * 5000, b"1e999", b"-1", b"1.0", b"NaN", b"Infinity", b"-0.0", b'"2"', b"true")
    )
    place = m.draw.choice((b'"step": 2', b'"format": 1'))
    m.seal_bytes(m.read("manifest.json").replace(place, place.split(b" ")[0] + b" " + number, 1))


def _state_numbers(m: Mutated) -> None:
    number = m.draw.choice((b"1e999", b"NaN", b"-Infinity", b"9" * 5000, b"nan", b'"\\ud800"'))
    m.forge("state.json", b'{"format": 1, "step": 2, "loss": ' + number + b"}")


def _state_step(m: Mutated) -> None:
    m.forge(
        "state.json", m.draw.choice((b'{"format": 1, "step": 1}', b'{"format": 1}', b'{"step": 2}', b"[]", b"", b"2"))
    )


def _newer(m: Mutated) -> None:
    if m.draw.random() < 0.5:
        m.seal(m.manifest() | {"format": 2})
    else:
        m.forge("state.json", b'{"format": 7, "step": 2}')


def _piece(m: Mutated) -> None:
    """A tensor whose pieces overlap, leave a hole, or lie outside of it."""
    manifest = m.manifest()
    pieces = m.draw.choice([tensor["pieces"] for tensor in manifest["tensors"] if tensor["pieces"]])
    piece = m.draw.choice(pieces)
    change = m.draw.randrange(6)
    if change == 0:
        pieces.remove(piece)
    elif change == 1:
        pieces.append(piece)
    elif change == 2:
        piece[2] += m.draw.choice((1, 7, 2**40, -1, 2**63))
    elif change == 3:
        piece[3] = m.draw.choice((0, -1, piece[3] + 1, 2**63, None, "3"))
    elif change == 4:
        piece[4:] = m.draw.choice(([1, 3], [0, 2], [6, 2**50], [2**62, 4], [5, 1]))
    else:
        piece[1] = m.draw.choice(("nothing", "", piece[1] + "x", None))
    m.seal(manifest)


def _moved_piece(m: Mutated) -> None:
    """A piece that begins elsewhere in its tensor; all headers are as the manifest says."""
    manifest = m.manifest()
    piece = m.draw.choice([piece for tensor in manifest["tensors"] for piece in tensor["pieces"]])
    piece[2] = m.draw.choice([start for start in (0, 1, 2, 3, 11, 12, 13, 2**40) if start != piece[2]])
    m.seal(manifest)


def _tensor(m: Mutated) -> None:
    """A tensor that is described otherwise than its shard says."""
    manifest = m.manifest()
    tensor = m.draw.choice([tensor for tensor in manifest["tensors"] if tensor["pieces"]])
    field, value = m.draw.choice(
        (
            ("dtype", "F16"),
            ("dtype", "I16"),
            ("dtype", "pickle"),
            ("shape", [1, 1]),
            ("shape", [-1]),
            ("shape", [2**40, 2**40]),
            ("shape", {}),
            ("shape", [2] * 65),
            ("pieces", {}),
            ("pieces", [[]]),
            ("name", ""),
            ("name", None),
            ("name", "x" * 5000),
            ("kind", 3),
            ("more", 1),
        )
    )
    tensor[field] = value
    m.seal(manifest)


def _repeated_tensor(m: Mutated) -> None:
    manifest = m.manifest()
    manifest["tensors"].append(m.draw.choice(manifest["tensors"]))
    m.seal(manifest)


def _forged_files(m: Mutated) -> None:
    """A manifest that lists less, more, or other sizes than there are."""
    manifest = m.manifest()
    name = m.draw.choice(("state.json", *SHARDS))
    change = m.draw.randrange(6)
    if change == 0:
        del manifest["files"][name]
    elif change == 1:
        manifest["files"][name]["bytes"] += m.draw.choice((1, -1, 2**62, -(2**62)))
    elif change == 2:
        manifest["files"][name]["xxh3_128"] = m.draw.choice(("0" * 32, "", None, "F" * 32, "0" * 31, "٠" * 32))
    elif change == 3:
        manifest["files"]["shards/rank-00009.safetensors"] = manifest["files"][name]
    elif change == 4:
        manifest["files"] = m.draw.choice(([], None, {}, {name: None}))
    else:
        del manifest[m.draw.choice(("files", "tensors", "step", "format"))]
    m.seal(manifest)


def _wrong_folder(m: Mutated) -> None:
    """A whole checkpoint under the name of another step."""
    shutil.rmtree(m.path)
    shutil.copytree(m.other, m.path)


MUTATIONS: tuple[Callable[[Mutated], None], ...] = (
    _flip,
    _truncate,
    _lengthen,
    _overwrite,
    _delete,
    _delete_shards,
    _swap,
    _stale,
    _stale_pair,
    _renamed,
    _extra,
    _extra_folder,
    _symlink,
    _symlinked_folder,
    _symlinked_checkpoint,
    _dangling,
    _hard_link,
    _fifo,
    _device,
    _pickled,
    _path_trick,
    _twice,
    _header_twice,
    _header_bomb,
    _many_keys,
    _offsets,
    _header_types,
    _not_a_header,
    _deep_json,
    _huge_numbers,
    _state_numbers,
    _state_step,
    _newer,
    _piece,
    _moved_piece,
    _tensor,
    _repeated_tensor,
    _forged_files,
    _wrong_folder,
)


def play_mutations(folder: Path, rounds: int, seed: int) -> list[tuple[str, int, int, float]]:
    """Apply each mutation `rounds` times, each to a new copy; return rows of name, trials, refused and seconds.

    Raises whatever a reader raises that is not a CheckpointError. A mutation that was accepted is told by its row.
    """
    old, new = save_two_steps(folder / "whole")
    verify_checkpoint(old)
    verify_checkpoint(new)
    rows: list[tuple[str, int, int, float]] = []
    for mutation in MUTATIONS:
        refused, began = 0, time.perf_counter()
        for number in range(rounds):
            draw = random.Random(f"{seed} {mutation.__name__} {number}")
            trial = folder / "trial"
            copy = trial / new.name
            shutil.copytree(new, copy)
            mutation(Mutated(copy, old, draw))
            try:
                verify_checkpoint(copy, threads=1)
            except CheckpointError:
                refused += 1
            shutil.rmtree(trial)
        rows.append((mutation.__name__.lstrip("_"), rounds, refused, time.perf_counter() - began))
    return rows
