"""Ways to forge a checkpoint, hashes included where that helps, each of which a reader must refuse."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable

from tests.support.checkpoint_copies import SHARDS, Mutated


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
        m.seal(m.manifest() | {"format": 3})
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


FORGERIES: tuple[Callable[[Mutated], None], ...] = (
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
"""All of them."""
