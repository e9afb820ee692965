"""A reader that was written from docs/checkpoint-format.md alone: json, struct, hashlib, xxhash and numpy."""

from __future__ import annotations

import hashlib
import json
import math
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from tests.support.checkpoints import frozen_of_rank, save_on_ranks, save_two_steps
from unipar.backend import Region
from unipar.checkpoint.format import names as checkpoint_format
from unipar.checkpoint.protocol.save_checkpoint import PieceToSave, SavedCheckpoint, save_checkpoint

PAGE = (Path(__file__).parents[3] / "docs" / "checkpoint-format.md").read_text("utf-8")
DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "U8": "<u1", "BOOL": "?"}


def read_checkpoint(path: Path) -> tuple[dict[str, Any], dict[tuple[str, str], Any]]:
    """Return the state and the tensors of a checkpoint, by name and kind; BF16 as its bits."""
    data = (path / "manifest.json").read_bytes()
    assert (path / "manifest.sha256").read_text() == f"{hashlib.sha256(data).hexdigest()}  manifest.json\n"
    manifest = json.loads(data)
    files = {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}
    beside = {name for name in manifest["files"] if name.startswith("frozen-")}
    assert manifest["format"] == (2 if beside else 1)
    assert set(files) == {*manifest["files"], "manifest.json", "manifest.sha256"} - beside
    files |= {name: (path.parent / name).read_bytes() for name in beside}
    for name, record in manifest["files"].items():
        assert len(files[name]) == record["bytes"]
        assert xxhash.xxh3_128(files[name]).hexdigest() == record["xxh3_128"]
    tensors: dict[tuple[str, str], Any] = {}
    for tensor in manifest["tensors"]:
        dtype = DTYPES[tensor["dtype"]]
        whole = np.zeros(math.prod(tensor["shape"]), dtype)
        filled = np.zeros(whole.shape, int)
        for file, key, start, length, stride, runs in tensor["pieces"]:
            (size,) = struct.unpack("<Q", files[file][:8])
            entry = json.loads(files[file][8 : 8 + size])[key]
            first, last = (8 + size + offset for offset in entry["data_offsets"])
            assert entry["dtype"] == tensor["dtype"]
            at = (start + stride * np.arange(runs)[:, None] + np.arange(length)).ravel()
            whole[at] = np.frombuffer(files[file][first:last], dtype)
            filled[at] += 1
        assert (filled == 1).all()
        tensors[tensor["name"], tensor["kind"]] = whole.reshape(tensor["shape"])
    return json.loads(files["state.json"]), tensors


def test_the_page_is_enough_to_read_a_checkpoint(tmp_path: Path) -> None:
    """What two ranks wrote, by columns, ranges and whole, comes back as it was."""
    _, path = save_two_steps(tmp_path)
    state, tensors = read_checkpoint(path)
    assert state == {"data": {"samples": 16}, "format": 1, "step": 2}
    assert {key: (value.dtype.str, value.tolist()) for key, value in tensors.items()} == {
        ("net.weight", "weight"): ("<f4", [[2.0 + 6 * row + column for column in range(6)] for row in range(4)]),
        ("net.weight", "exp_avg"): (
            "<f4",
            [
                [2.0, 3.0, 4.0, 8.0, 9.0, 10.0],
                [14.0, 15.0, 16.0, 20.0, 21.0, 22.0],
                [5.0, 6.0, 7.0, 11.0, 12.0, 13.0],
                [17.0, 18.0, 19.0, 23.0, 24.0, 25.0],
            ],
        ),
        ("net.weight", "step"): ("<f4", 2.0),
        ("net.bias", "weight"): ("<u2", [0x3F00] * 3),
        ("net.mask", "buffer"): ("|b1", [True, False, True, True, False]),
        ("net.empty", "weight"): ("<f8", []),
    }
    assert tensors["net.empty", "weight"].shape == (0, 4)


def test_the_page_is_enough_to_read_frozen_weights(tmp_path: Path) -> None:
    """They are in files beside the checkpoint, which two ranks wrote."""
    for done in save_on_ranks(tmp_path, 1, frozen=frozen_of_rank):
        assert isinstance(done, SavedCheckpoint)
    state, tensors = read_checkpoint(tmp_path / "step-00000001")
    assert state["format"] == 2
    assert tensors["net.table", "weight"].tolist() == [[0.0, 1.0], [1.0, 1.0]]
    assert len(tensors) == 7


def test_the_page_tells_the_limits_and_dtypes_of_the_code() -> None:
    """Numbers and names in the text are those of unipar/checkpoint/format/names.py."""
    listed = re.search(r"as in safetensors: `([A-Z0-9_ ]+)`", PAGE)
    assert listed
    assert sorted(listed[1].split()) == sorted(checkpoint_format.ITEM_BYTES)
    assert f"Version of the format: {checkpoint_format.FORMAT}." in PAGE
    limits = checkpoint_format
    assert (
        f"a header of {limits.LARGEST_HEADER >> 20} MiB and {limits.MOST_KEYS:,} tensors in a shard, "
        f"{limits.MOST_DIMENSIONS} dimensions, names of {limits.LONGEST_NAME:,} characters, "
        f"{limits.LARGEST_JSON >> 20} MiB of JSON."
    ) in PAGE
    assert f"three bytes `abc` is `{xxhash.xxh3_128(b'abc').hexdigest()}`" in PAGE
    assert f"nested at most {checkpoint_format.DEEPEST_JSON} levels deep" in PAGE


def test_the_example_of_the_page_is_read(tmp_path: Path) -> None:
    """Its tensors are those that its pieces describe."""
    text = re.search(r"```json\n(.*?)```", PAGE, re.DOTALL)
    assert text
    example = json.loads(text[1])
    zeros = [
        PieceToSave(
            tensor["name"], tensor["kind"], tensor["dtype"], tuple(tensor["shape"]), Region(*numbers), bytes(size)
        )
        for tensor in example["tensors"]
        for _, _, *numbers in tensor["pieces"]
        for size in [4 * numbers[1] * numbers[3]]
    ]
    saved = save_checkpoint(tmp_path, example["step"], zeros, {})
    assert isinstance(saved.path, Path)
    _, tensors = read_checkpoint(saved.path)
    assert {key: value.shape for key, value in tensors.items()} == {
        ("net.weight", "weight"): (4, 6),
        ("net.weight", "step"): (),
    }
