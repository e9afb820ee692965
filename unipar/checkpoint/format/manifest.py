"""Manifest of a checkpoint: its files with sizes and hashes, its tensors with the pieces they are made of."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

from typing_extensions import override

from unipar.backend import Region
from unipar.checkpoint.format.names import (
    FORMAT,
    ITEM_BYTES,
    LARGEST_JSON,
    LARGEST_NUMBER,
    LONGEST_NAME,
    MOST_DIMENSIONS,
    PLAIN_FORMAT,
    STATE_FILE,
    folder_of_shard,
    is_beside,
    is_shard_name,
    normal_region,
)
from unipar.checkpoint.format.strict_json import parse_strict_json
from unipar.errors import CheckpointError
from unipar.utils.text import show_value

_HASH = re.compile(r"[0-9a-f]{32}\Z", re.ASCII)
_DEPTH = 8


class FileRecord(NamedTuple):
    """Size and hash of one file."""

    bytes: int
    xxh3_128: str


class StoredPiece(NamedTuple):
    """Region of a tensor, and the file and key under which its elements are."""

    file: str
    key: str
    where: Region


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a checkpoint; an empty one has no piece."""

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[StoredPiece, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @override
    def __str__(self) -> str:
        return f"{self.name} ({self.kind})"


def is_kept_beside(tensor: StoredTensor) -> bool:
    """Return whether all of a tensor is in files beside the checkpoint."""
    return bool(tensor.pieces) and all(is_beside(piece.file) for piece in tensor.pieces)


@dataclass(frozen=True)
class Manifest:
    """Contents of one checkpoint."""

    step: int
    files: Mapping[str, FileRecord]
    tensors: Mapping[tuple[str, str], StoredTensor]
    """Tensors by name and kind."""

    @property
    def bytes(self) -> int:
        """Size of the files in the checkpoint's own folder."""
        return sum(record.bytes for name, record in self.files.items() if not is_beside(name))

    @property
    def bytes_beside(self) -> int:
        """Size of the files that checkpoints share, beside this one."""
        return sum(record.bytes for name, record in self.files.items() if is_beside(name))

    @property
    def folders_beside(self) -> set[str]:
        """Names of the folders with these files."""
        return {folder_of_shard(name) for name in self.files if is_beside(name)}

    @property
    def format(self) -> int:
        """Version of the format that a reader needs."""
        return FORMAT if self.folders_beside else PLAIN_FORMAT

    @cached_property
    def pieces_by_file(self) -> Mapping[str, Mapping[str, tuple[StoredTensor, Region]]]:
        """Keys of each shard, with the tensor and the region that each one holds."""
        by_file: dict[str, dict[str, tuple[StoredTensor, Region]]] = {name: {} for name in self.files}
        for tensor in self.tensors.values():
            for piece in tensor.pieces:
                by_file[piece.file][piece.key] = (tensor, piece.where)
        return by_file

    def to_json(self) -> bytes:
        """Return the text of manifest.json: one line for each file and each tensor."""
        files = [
            f"{json.dumps(name)}: {json.dumps({'bytes': record.bytes, 'xxh3_128': record.xxh3_128})}"
            for name, record in sorted(self.files.items())
        ]
        tensors = [
            json.dumps(
                {
                    "name": tensor.name,
                    "kind": tensor.kind,
                    "dtype": tensor.dtype,
                    "shape": list(tensor.shape),
                    "pieces": [[piece.file, piece.key, *piece.where] for piece in tensor.pieces],
                }
            )
            for _, tensor in sorted(self.tensors.items())
        ]
        text = (
            f'{{"format": {self.format}, "step": {self.step},\n'
            f'"files": {{\n{_lines(files)}}},\n'
            f'"tensors": [\n{_lines(tensors)}]}}\n'
        )
        data = text.encode("utf-8")
        if len(data) > LARGEST_JSON:
            raise CheckpointError(
                f"the manifest of {len(tensors):,} tensors has {len(data):,} bytes; at most {LARGEST_JSON:,} are read"
            )
        return data


def _lines(rows: list[str]) -> str:
    return ",\n".join(rows) + ("\n" if rows else "")


def parse_manifest(data: bytes, called: str) -> Manifest:
    """Return the manifest of a text; raise CheckpointError, beginning with `called`, if anything in it is amiss."""
    value = parse_strict_json(data, called, largest=LARGEST_JSON, deepest=_DEPTH)
    check_format_version(value, called)
    top = _object(value, ("format", "step", "files", "tensors"), called)
    step = _number(top["step"], f"{called}: step")
    if not isinstance(top["files"], dict):
        raise CheckpointError(f"{called}: files is {show_value(top['files'])}, not an object")
    files = {name: _file_record(name, record, called) for name, record in top["files"].items()}
    if STATE_FILE not in files:
        raise CheckpointError(f"{called}: files does not list {STATE_FILE}")
    if not isinstance(top["tensors"], list):
        raise CheckpointError(f"{called}: tensors is {show_value(top['tensors'])}, not a list")
    tensors: dict[tuple[str, str], StoredTensor] = {}
    places: set[tuple[str, str]] = set()
    for i, entry in enumerate(top["tensors"]):
        tensor = _tensor(entry, f"{called}: tensors[{i}]")
        if (tensor.name, tensor.kind) in tensors:
            raise CheckpointError(f"{called}: tensors[{i}] lists {tensor} a second time")
        tensors[tensor.name, tensor.kind] = tensor
        for piece in tensor.pieces:
            if piece.file not in files:
                raise CheckpointError(f"{called}: {tensor} has a piece in {piece.file}, which files does not list")
            if (piece.file, piece.key) in places:
                raise CheckpointError(f"{called}: {tensor} names {piece.key!r} in {piece.file}, as another piece does")
            places.add((piece.file, piece.key))
    return Manifest(step, files, tensors)


def check_format_version(value: Any, called: str) -> None:
    """Raise CheckpointError if an object of a checkpoint has no format version that this unipar reads."""
    version = value.get("format") if isinstance(value, dict) else None
    if type(version) is not int or version < 1:
        raise CheckpointError(f"{called}: no format version; this is not a file of a unipar checkpoint")
    if version > FORMAT:
        raise CheckpointError(
            f"{called}: written in format {version}, and this unipar reads formats up to {FORMAT}; "
            "install the version of unipar that wrote it, or a newer one"
        )


def _object(value: Any, keys: tuple[str, ...], called: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise CheckpointError(f"{called} is {show_value(value)}, not an object")
    if set(value) != set(keys):
        strange = [*sorted(set(value) - set(keys)), *sorted(set(keys) - set(value))]
        raise CheckpointError(f"{called} must have the keys {', '.join(keys)}; {strange[0]!r} is extra or missing")
    return value


def _number(value: Any, called: str, least: int = 0) -> int:
    if type(value) is not int or not least <= value <= LARGEST_NUMBER:
        raise CheckpointError(f"{called} is {show_value(value)}, not a whole number from {least} to {LARGEST_NUMBER}")
    return value


def _text(value: Any, called: str) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= LONGEST_NAME:
        raise CheckpointError(f"{called} is {show_value(value)}, not a text of 1 to {LONGEST_NAME} characters")
    return value


def _file_record(name: str, value: Any, called: str) -> FileRecord:
    if name != STATE_FILE and not is_shard_name(name):
        raise CheckpointError(f"{called}: files lists {show_value(name)}, which is no name of a checkpoint's file")
    record = _object(value, ("bytes", "xxh3_128"), f"{called}: files[{name!r}]")
    if not isinstance(record["xxh3_128"], str) or not _HASH.match(record["xxh3_128"]):
        raise CheckpointError(
            f"{called}: files[{name!r}].xxh3_128 is {show_value(record['xxh3_128'])}, not 32 hexadecimal digits"
        )
    return FileRecord(_number(record["bytes"], f"{called}: files[{name!r}].bytes"), record["xxh3_128"])


def _tensor(value: Any, called: str) -> StoredTensor:
    entry = _object(value, ("name", "kind", "dtype", "shape", "pieces"), called)
    name, kind = _text(entry["name"], f"{called}.name"), _text(entry["kind"], f"{called}.kind")
    dtype = entry["dtype"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise CheckpointError(f"{called}.dtype is {show_value(dtype)}; known are {', '.join(ITEM_BYTES)}")
    shape = entry["shape"]
    if not isinstance(shape, list) or len(shape) > MOST_DIMENSIONS:
        raise CheckpointError(f"{called}.shape is {show_value(shape)}, not a list of at most {MOST_DIMENSIONS} numbers")
    dimensions = tuple(_number(size, f"{called}.shape[{i}]") for i, size in enumerate(shape))
    if prod(dimensions) * ITEM_BYTES[dtype] > LARGEST_NUMBER:
        raise CheckpointError(f"{called}.shape is {show_value(shape)}: more bytes than a file can hold")
    if not isinstance(entry["pieces"], list):
        raise CheckpointError(f"{called}.pieces is {show_value(entry['pieces'])}, not a list")
    pieces = tuple(_piece(piece, f"{called}.pieces[{i}]") for i, piece in enumerate(entry["pieces"]))
    return StoredTensor(name, kind, dtype, dimensions, pieces)


def _piece(value: Any, called: str) -> StoredPiece:
    if not isinstance(value, list) or len(value) != 6:
        raise CheckpointError(f"{called} is {show_value(value)}, not [file, key, start, length, stride, runs]")
    file, key = _text(value[0], f"{called}[0]"), _text(value[1], f"{called}[1]")
    if not is_shard_name(file):
        raise CheckpointError(f"{called}[0] is {show_value(file)}, which is no name of a shard")
    start, length, stride, runs = (
        _number(number, f"{called}[{i + 2}]", least)
        for i, (number, least) in enumerate(zip(value[2:], (0, 1, 0, 1), strict=True))
    )
    where = Region(start, length, stride, runs)
    if where != normal_region(where) or (runs > 1 and stride < length):
        raise CheckpointError(f"{called} is {show_value(value)}: its runs touch or overlap, as unipar writes none")
    return StoredPiece(file, key, where)
