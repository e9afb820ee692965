"""Shards: bytes that safetensors reads, and what its reader refuses."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from xxhash import xxh3_128

from unipar.checkpoint.format import shard_file
from unipar.checkpoint.format.names import ITEM_BYTES
from unipar.checkpoint.format.shard_file import ShardReader, ShardTensor, write_shard
from unipar.checkpoint.storage.disk import Disk
from unipar.errors import CheckpointError

TENSORS = {
    "matrix": torch.arange(12, dtype=torch.float32).view(3, 4),
    "scalar": torch.tensor(42, dtype=torch.int64),
    "empty": torch.zeros(0, 3, dtype=torch.float64),
    "byte": torch.tensor([7], dtype=torch.uint8),
    "flags": torch.tensor([True, False, True]),
    "half": torch.arange(3, dtype=torch.bfloat16),
    "columns": torch.arange(12, dtype=torch.float16).view(3, 4)[:, 1:3],
    "complex": torch.tensor([1 + 2j], dtype=torch.complex64),
    "eight": torch.tensor([1.5, -2.0]).to(torch.float8_e4m3fn),
    "wide": torch.tensor([2**63 + 1], dtype=torch.uint64),
}
NAMES = {
    torch.float32: "F32",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.uint64: "U64",
}


def bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().data


def shard_tensors() -> list[ShardTensor]:
    return [
        ShardTensor(key, NAMES[tensor.dtype], tuple(tensor.shape), bytes_of(tensor)) for key, tensor in TENSORS.items()
    ]


def test_safetensors_reads_a_shard(tmp_path: Path) -> None:
    """Tensors of no dimension, without elements, of odd sizes and of columns: all bits come back, with their shapes."""
    write_shard(Disk(), tmp_path / "a", shard_tensors(), metadata={"step": "42"})
    loaded = safetensors.torch.load_file(tmp_path / "a")
    assert loaded.keys() == TENSORS.keys()
    for key, tensor in TENSORS.items():
        assert (loaded[key].dtype, loaded[key].shape) == (tensor.dtype, tensor.shape)
        assert bytes(bytes_of(loaded[key])) == bytes(bytes_of(tensor))


def test_a_shard_that_safetensors_wrote_is_read(tmp_path: Path) -> None:
    """The other way about, bytes from the middle of a tensor included."""
    safetensors.torch.save_file({key: t.contiguous() for key, t in TENSORS.items()}, tmp_path / "a")
    with ShardReader(tmp_path, "a") as shard:
        assert {key: (entry.dtype, entry.shape) for key, entry in shard.tensors.items()} == {
            key: (NAMES[tensor.dtype], tuple(tensor.shape)) for key, tensor in TENSORS.items()
        }
        part = np.zeros(2, dtype=np.float32)
        shard.read_tensor_into("matrix", 20, part.data)
        assert part.tolist() == [5.0, 6.0]
        shard.read_tensor_into("empty", 0, b"")


def test_every_dtype_of_safetensors_is_known() -> None:
    """What it saves of torch's dtypes of whole bytes has its size here."""
    seen: set[str] = set()
    dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    warned = ("torch.complex32", "torch.qint", "torch.quint")
    for dtype in sorted((d for d in dtypes if not str(d).startswith(warned)), key=str):
        try:
            data = safetensors.torch.save({"x": torch.empty(2, dtype=dtype)})
        except (KeyError, RuntimeError, NotImplementedError, ValueError):
            continue  # complex128, sub-byte types
        name = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["x"]["dtype"]
        if name != "F4":  # two elements in a byte
            assert ITEM_BYTES[name] == dtype.itemsize
            seen.add(name)
    assert seen >= {"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "I64", "U64", "U8", "BOOL", "C64"}


def test_size_and_hash_are_those_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large data goes in chunks, whose bytes add up in `progress`; data may be asked for late."""
    monkeypatch.setattr(shard_file, "CHUNK", 1000)
    data, written = np.arange(5000, dtype=np.uint16), list[int]()
    record = write_shard(
        Disk(), tmp_path / "a", [ShardTensor("x", "U16", (5000,), lambda: data.data)], progress=written.append
    )
    raw = (tmp_path / "a").read_bytes()
    assert record == (len(raw), xxh3_128(raw).hexdigest())
    assert sum(written) == len(raw)
    assert max(written) == 1000
    assert raw.endswith(data.tobytes())


def test_tensors_are_aligned_to_their_elements(tmp_path: Path) -> None:
    """Whatever their order was, large elements come first, and the header ends at a multiple of eight bytes."""
    write_shard(Disk(), tmp_path / "a", shard_tensors())
    with ShardReader(tmp_path, "a") as shard:
        assert {entry.begin % ITEM_BYTES[entry.dtype] for entry in shard.tensors.values()} == {0}
        assert shard.metadata == {"format": "pt"}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([("x", "F32", (2,), b"1234567")], "x has 7 bytes; F32 of shape [2] is 8"),
        ([("x", "U8", (1,), b"1"), ("x", "U8", (1,), b"1")], "the key 'x' is empty, too long, or there twice"),
        ([("", "U8", (1,), b"1")], "the key '' is empty, too long, or there twice"),
        ([("__metadata__", "U8", (1,), b"1")], "the key '__metadata__' is empty, too long, or there twice"),
        ([("k" * 5000, "U8", (1,), b"1")], "is empty, too long, or there twice"),
    ],
)
def test_a_shard_that_nobody_could_read_is_not_written(tmp_path: Path, tensors: list[Any], message: str) -> None:
    """The sentence names the tensor."""
    with pytest.raises(CheckpointError) as caught:
        write_shard(Disk(), tmp_path / "a", [ShardTensor(*tensor) for tensor in tensors])
    assert message in str(caught.value)


def test_more_keys_than_are_read_are_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both limits are told."""
    monkeypatch.setattr(shard_file, "MOST_KEYS", 2)
    with pytest.raises(CheckpointError) as caught:
        write_shard(Disk(), tmp_path / "a", [ShardTensor(f"k{i}", "U8", (0,), b"") for i in range(3)])
    assert str(caught.value) == (
        "3 tensors with a header of 192 bytes in one shard; at most 2 with 33,554,432 bytes are read"
    )


def header(text: bytes, body: bytes = b"") -> bytes:
    return struct.pack("<Q", len(text)) + text + body


def entry(dtype: object = "U8", shape: object = (1,), offsets: object = (0, 1), key: str = "x") -> bytes:
    return json.dumps({key: {"dtype": dtype, "shape": shape, "data_offsets": offsets}}).encode()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"1234567", "7 bytes, too few for a header; it is truncated"),
        (
            struct.pack("<Q", 2**64 - 1),
            "its header claims 18,446,744,073,709,551,615 bytes; at most 33,554,432 are read",
        ),
        (struct.pack("<Q", 3) + b"{}", "10 bytes hold no complete header; it is truncated"),
        (header(b"[]"), "its header is not an object"),
        (header(b"{"), "header: not valid JSON (Expecting property name enclosed in double quotes"),
        (header(b'{"a": 1, "a": 2}'), "header: not valid JSON (the key 'a' stands there twice)"),
        (header(b'{"a": NaN}'), "header: not valid JSON (NaN is no JSON)"),
        (header(b"[" * 100_000), "header: nested deeper than 4 levels"),
        (header(b'{"a":[[[[[1]]]]]}'), "header: nested deeper than 4 levels"),
        (header(b'{"a": ' + b"9" * 5000 + b"}"), "header: not valid JSON (Exceeds the limit (4300 digits)"),
        (header(b'{"\xff": 1}'), "header: not valid JSON ('utf-8' codec can't decode byte 0xff"),
        (header(b'{"__metadata__": {"a": 1}}'), "__metadata__ in its header does not hold texts"),
        (header(b'{"x": 1}'), "'x' in its header does not consist of dtype, shape and data_offsets"),
        (header(entry(key=""), b"1"), "'' in its header is a name of 0 characters; 1 to 4096 are read"),
        (header(entry("F31"), b"1"), "'x' in its header has the dtype 'F31'; known are BOOL, U8,"),
        (header(entry(shape=[-1]), b"1"), "'x' in its header has the shape"),
        (header(entry(shape=[1] * 65), b"1"), "'x' in its header has the shape"),
        (header(entry(shape=[True]), b"1"), "'x' in its header has the shape"),
        (header(entry(offsets=[1, 0]), b"1"), "'x' in its header has the data_offsets"),
        (header(entry(offsets=[0]), b"1"), "'x' in its header has the data_offsets"),
        (header(entry(shape=[2]), b"1"), "'x' in its header is U8 of shape [2], 2 bytes, but has 1"),
        (
            header(entry("F64", [2**62, 2**62])),
            "is F64 of shape [4611686018427387904, 4611686018427387904], 170,141,183,460,469,231,731,687,303,715,884",
        ),
        (header(entry(offsets=[1, 2]), b"12"), "'x' begins at byte 69, and what is before it ends at 68"),
        (header(entry(), b""), "its header describes 69 bytes, but it has 68"),
        (header(entry(), b"12"), "its header describes 69 bytes, but it has 70"),
    ],
    ids=range(25),
)
def test_a_header_that_is_not_right_is_refused(tmp_path: Path, data: bytes, message: str) -> None:
    """The sentence begins with the file's name."""
    (tmp_path / "a").write_bytes(data)
    with pytest.raises(CheckpointError) as caught:
        ShardReader(tmp_path, "a")
    assert str(caught.value).startswith(f"{tmp_path}/a: ")
    assert message in str(caught.value)


def test_overlapping_tensors_are_refused(tmp_path: Path) -> None:
    """Two tensors that share bytes."""
    x, y = (json.loads(entry(key=key, shape=[2], offsets=[i, i + 2])) for i, key in enumerate("xy"))
    (tmp_path / "a").write_bytes(header(json.dumps(x | y).encode(), b"123"))
    with pytest.raises(CheckpointError, match="'y' begins at byte 129, and what is before it ends at 130"):
        ShardReader(tmp_path, "a")


def test_reading_beyond_a_tensor_is_refused(tmp_path: Path) -> None:
    """Neither its neighbour's bytes nor the header's are given away."""
    write_shard(Disk(), tmp_path / "a", [ShardTensor("x", "U8", (4,), b"abcd"), ShardTensor("y", "U8", (4,), b"efgh")])
    with ShardReader(tmp_path, "a") as shard:
        for first, count in ((1, 4), (-1, 2), (5, 0)):
            with pytest.raises(CheckpointError, match=rf"x has 4 bytes; {count} from {first} were wanted"):
                shard.read_tensor_into("x", first, bytearray(count))


def test_a_file_that_becomes_shorter_is_an_error(tmp_path: Path) -> None:
    """A reader that has it open says where it ends now."""
    write_shard(Disk(), tmp_path / "a", [ShardTensor("x", "U8", (4,), b"abcd")])
    with ShardReader(tmp_path, "a") as shard:
        begin = shard.tensors["x"].begin
        (tmp_path / "a").write_bytes((tmp_path / "a").read_bytes()[: begin + 1])
        with pytest.raises(CheckpointError, match=f"a: ends at byte {begin + 1}; it became shorter while it was read"):
            shard.read_tensor_into("x", 0, bytearray(4))
