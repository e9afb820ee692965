"""Shards, files of tensors in the format of safetensors: hashed while they are written, read by ranges of bytes."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, Self

from typing_extensions import Buffer
from xxhash import xxh3_128

from unipar.checkpoint.format.manifest import FileRecord
from unipar.checkpoint.format.names import (
    ITEM_BYTES,
    LARGEST_HEADER,
    LARGEST_NUMBER,
    LONGEST_NAME,
    MOST_DIMENSIONS,
    MOST_KEYS,
    is_beside,
)
from unipar.checkpoint.format.strict_json import parse_strict_json
from unipar.checkpoint.storage.disk import Disk, OutputFile
from unipar.checkpoint.storage.remote import RemoteFile
from unipar.errors import CheckpointError
from unipar.utils.address import Address, Location
from unipar.utils.text import show_value

CHUNK = 2**18
"""Bytes that are written, or read, and hashed at a time: few enough to be in the processor's cache for the second."""

_METADATA = "__metadata__"
_HEADER_DEPTH = 4
_LARGEST_READ = 2**30


class ShardTensor(NamedTuple):
    """Tensor to be written: `data` is its bytes in row-major order, or a function that returns them when needed."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    data: Buffer | Callable[[], Buffer]

    @property
    def bytes(self) -> int:
        """Number of bytes of the elements."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]


def sorted_for_shard(tensors: Sequence[ShardTensor]) -> list[ShardTensor]:
    """Return tensors in the order of a shard: large elements first, so that each tensor is aligned to its elements."""
    return sorted(tensors, key=lambda tensor: -ITEM_BYTES[tensor.dtype])


def shard_header(tensors: Sequence[ShardTensor], metadata: Mapping[str, str]) -> bytes:
    """Return the first bytes of a shard: the header's length and the header, for tensors in the order of a shard."""
    entries: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    offset = 0
    for tensor in tensors:
        if not 0 < len(tensor.key) <= LONGEST_NAME or tensor.key in entries or tensor.key == _METADATA:
            raise CheckpointError(f"the key {show_value(tensor.key)} is empty, too long, or there twice")
        end = offset + tensor.bytes
        entries[tensor.key] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * (-len(text) % 8)
    if len(tensors) > MOST_KEYS or len(text) > LARGEST_HEADER:
        raise CheckpointError(
            f"{len(tensors):,} tensors with a header of {len(text):,} bytes in one shard; at most {MOST_KEYS:,} with "
            f"{LARGEST_HEADER:,} bytes are read"
        )
    return len(text).to_bytes(8, "little") + text


def write_shard(
    disk: Disk,
    path: Path,
    tensors: Sequence[ShardTensor],
    *,
    metadata: Mapping[str, str] | None = None,
    progress: Callable[[int], None] | None = None,
) -> FileRecord:
    """Write a new shard and flush it to the device; return its size and hash. `progress` gets each chunk's bytes."""
    return write_tensors(HashedFile(disk.create(path), progress), tensors, metadata or {})


def write_tensors(writing: HashedFile, tensors: Sequence[ShardTensor], metadata: Mapping[str, str]) -> FileRecord:
    """Write and flush the contents of a shard to a new file; return its size and hash."""
    tensors = sorted_for_shard(tensors)
    with writing:
        writing.write(shard_header(tensors, {"format": "pt", **metadata}))
        for tensor in tensors:
            data = memoryview(tensor.data() if callable(tensor.data) else tensor.data)
            if data.nbytes != tensor.bytes:
                raise CheckpointError(
                    f"{tensor.key} has {data.nbytes:,} bytes; {tensor.dtype} of shape {list(tensor.shape)} is "
                    f"{tensor.bytes:,}"
                )
            writing.write(data)
            del data  # before the next tensor is read, so that one at a time is in memory
        return writing.finish()


class HashedFile:
    """New file whose bytes are hashed while they are written."""

    def __init__(self, file: OutputFile, progress: Callable[[int], None] | None = None) -> None:
        self._file = file
        self._hash = xxh3_128()
        self._bytes = 0
        self._progress = progress

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._file.close()

    def write(self, data: Buffer) -> None:
        """Write all bytes of contiguous memory."""
        view = memoryview(data)
        if view.nbytes == 0:
            return
        if view.format != "B" or view.ndim != 1:
            view = view.cast("B")
        for first in range(0, len(view), CHUNK):
            chunk = view[first : first + CHUNK]
            left = chunk
            while left:
                left = left[self._file.write(left) :]
            self._hash.update(chunk)  # after the write: on tmpfs 4 % faster than before it
            self._bytes += len(chunk)
            if self._progress is not None:
                self._progress(len(chunk))

    def finish(self) -> FileRecord:
        """Flush and close the file; return its size and hash."""
        self._file.flush()
        self._file.close()
        return FileRecord(self._bytes, self._hash.hexdigest())


class ShardEntry(NamedTuple):
    """One tensor of a shard: where its bytes are, counted from the beginning of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class RegularFile:
    """Regular file of a checkpoint, open for reading: no symlink in its folder, no pipe, no second hard link."""

    chunk = CHUNK
    """Bytes that are read at a time where the whole file is."""

    def __init__(self, folder: Path, name: str) -> None:
        self.called = f"{folder / name}"
        try:
            self._number = _open_below(folder, name)
        except OSError as e:
            raise CheckpointError(f"{self.called}: cannot be opened ({_reason(e)})") from None
        status = os.fstat(self._number)
        self.bytes = status.st_size
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise CheckpointError(f"{self.called}: not a regular file")
        if status.st_nlink != 1:
            self.close()
            raise CheckpointError(
                f"{self.called}: has {status.st_nlink} hard links, so that it changes when another file does; copy the "
                "checkpoint instead"
            )

    def close(self) -> None:
        """Close the file; a second time does nothing."""
        number, self._number = self._number, -1
        if number >= 0:
            os.close(number)

    def read_into(self, first: int, buffer: Buffer) -> None:
        """Fill a buffer with the bytes from `first`; several threads may read at the same time."""
        view = memoryview(buffer)
        view = view if view.format == "B" and view.ndim == 1 else view.cast("B")
        while view:
            try:
                count = os.preadv(self._number, [view[:_LARGEST_READ]], first)
            except OSError as e:
                raise CheckpointError(f"{self.called}: cannot be read at byte {first:,} ({_reason(e)})") from None
            if count == 0:
                raise CheckpointError(f"{self.called}: ends at byte {first:,}; it became shorter while it was read")
            first += count
            view = view[count:]


@contextmanager
def open_stored_file(folder: Location, name: str) -> Generator[RegularFile | RemoteFile]:
    """Context manager: a file of a checkpoint, open for reading."""
    file = _open_stored(folder, name)
    try:
        yield file
    finally:
        file.close()


def read_stored(file: RegularFile | RemoteFile, first: int, count: int) -> bytes:
    """Return bytes of a file from `first`."""
    data = bytearray(count)
    file.read_into(first, data)
    return bytes(data)


def _open_stored(folder: Location, name: str) -> RegularFile | RemoteFile:
    folder = folder_of_file(folder, name)
    return RemoteFile(folder, name) if isinstance(folder, Address) else RegularFile(folder, name)


def folder_of_file(checkpoint: Location, name: str) -> Location:
    """Return the folder below which a file of a checkpoint is: the checkpoint's own, or that above it."""
    if not is_beside(name):
        return checkpoint
    return checkpoint.parent if isinstance(checkpoint, Address) else checkpoint.absolute().parent


class ShardReader:
    """Shard that is open for reading, with a header that was checked; the bytes of tensors are not."""

    def __init__(self, folder: Location, name: str) -> None:
        self._file = _open_stored(folder, name)
        self.called, self.bytes = self._file.called, self._file.bytes
        try:
            self.tensors, self.metadata = self._read_header()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; a second time does nothing."""
        self._file.close()

    def read_tensor_into(self, key: str, first_byte: int, buffer: Buffer) -> None:
        """Fill a buffer with bytes of a tensor, from its byte `first_byte`."""
        entry = self.tensors[key]
        count = memoryview(buffer).nbytes
        if not 0 <= first_byte <= first_byte + count <= entry.end - entry.begin:
            raise CheckpointError(
                f"{self.called}: {key} has {entry.end - entry.begin:,} bytes; {count:,} from {first_byte:,} were wanted"
            )
        if count:
            self._file.read_into(entry.begin + first_byte, buffer)

    def _read_header(self) -> tuple[dict[str, ShardEntry], dict[str, str]]:
        if self.bytes < 8:
            raise CheckpointError(f"{self.called}: {self.bytes} bytes, too few for a header; it is truncated")
        length = int.from_bytes(read_stored(self._file, 0, 8), "little")
        if length > LARGEST_HEADER:
            raise CheckpointError(
                f"{self.called}: its header claims {length:,} bytes; at most {LARGEST_HEADER:,} are read"
            )
        if length > self.bytes - 8:
            raise CheckpointError(f"{self.called}: {self.bytes:,} bytes hold no complete header; it is truncated")
        header = parse_strict_json(
            read_stored(self._file, 8, length), f"{self.called}: header", largest=length, deepest=_HEADER_DEPTH
        )
        if not isinstance(header, dict):
            raise CheckpointError(f"{self.called}: its header is not an object")
        metadata = header.pop(_METADATA, {})
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            raise CheckpointError(f"{self.called}: {_METADATA} in its header does not hold texts")
        if len(header) > MOST_KEYS:
            raise CheckpointError(
                f"{self.called}: {len(header):,} tensors; at most {MOST_KEYS:,} are read from a shard"
            )
        base = 8 + length
        tensors = {key: _entry(key, value, base, self.called) for key, value in header.items()}
        position = base
        for key, entry in sorted(tensors.items(), key=_place):
            if entry.begin != position:
                raise CheckpointError(
                    f"{self.called}: {show_value(key)} begins at byte {entry.begin:,}, and what is before it ends at "
                    f"{position:,}"
                )
            position = entry.end
        if position != self.bytes:
            raise CheckpointError(f"{self.called}: its header describes {position:,} bytes, but it has {self.bytes:,}")
        return tensors, metadata


def _entry(key: str, value: Any, base: int, called: str) -> ShardEntry:
    where = f"{called}: {show_value(key)} in its header"
    if not 0 < len(key) <= LONGEST_NAME:
        raise CheckpointError(f"{where} is a name of {len(key)} characters; 1 to {LONGEST_NAME} are read")
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{where} does not consist of dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise CheckpointError(f"{where} has the dtype {show_value(dtype)}; known are {', '.join(ITEM_BYTES)}")
    if not _numbers(shape) or len(shape) > MOST_DIMENSIONS:
        raise CheckpointError(f"{where} has the shape {show_value(shape)}")
    if not _numbers(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{where} has the data_offsets {show_value(offsets)}")
    needed = prod(shape) * ITEM_BYTES[dtype]
    if needed != offsets[1] - offsets[0]:
        raise CheckpointError(
            f"{where} is {dtype} of shape {show_value(shape)}, {needed:,} bytes, but has {offsets[1] - offsets[0]:,}"
        )
    return ShardEntry(dtype, tuple(shape), base + offsets[0], base + offsets[1])


def _place(item: tuple[str, ShardEntry]) -> tuple[int, int]:
    return item[1].begin, item[1].end


def _numbers(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item <= LARGEST_NUMBER for item in value)


def _open_below(folder: Path, name: str) -> int:
    """Open a file below a folder; neither the folder nor anything between may be a symlink."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    steps = Path(name).parts
    number = os.open(folder, flags | os.O_DIRECTORY)
    try:
        for step in steps[:-1]:
            inner = os.open(step, flags | os.O_DIRECTORY, dir_fd=number)
            os.close(number)
            number = inner
        return os.open(steps[-1], flags | os.O_NONBLOCK, dir_fd=number)  # O_NONBLOCK: opening a pipe must not wait
    finally:
        os.close(number)


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
