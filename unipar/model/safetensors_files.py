"""Tensors in safetensors files, read in parts: one file, or a folder with an index of several."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from unipar.backend.engine import Region
from unipar.errors import ConfigError
from unipar.model.weight_file import read_safetensors_header, safetensors_in

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "U16": torch.uint16, "U32": torch.uint32,
    "U64": torch.uint64, "C64": torch.complex64,
}  # fmt: skip


_BUFFER_BYTES = 2**22


@final
class SafetensorsFiles:
    """Tensors of a file, or of a folder, by name; only headers are read before a tensor is asked for."""

    def __init__(self, path: Path) -> None:
        self.bytes_read = 0
        """Bytes of tensors that were read so far."""

        self.buffer = torch.empty(_BUFFER_BYTES, dtype=torch.uint8)
        self.tensors: dict[str, TensorInFile] = {}
        for file in safetensors_in(path):
            for name, tensor in self._tensors_of(file):
                self.tensors[name] = tensor

    def _tensors_of(self, file: Path) -> Iterator[tuple[str, TensorInFile]]:
        first, header = read_safetensors_header(file)
        for name, entry in header.items():
            if entry["dtype"] not in _DTYPES:
                raise ConfigError(f"model.weights: {file}: {name} is {entry['dtype']}, which PyTorch does not have")
            shape = torch.Size(entry["shape"])
            yield name, TensorInFile(self, file, first + entry["data_offsets"][0], shape, _DTYPES[entry["dtype"]])


@final
@dataclass(frozen=True)
class TensorInFile:
    """Tensor in a safetensors file."""

    owner: SafetensorsFiles
    file: Path
    begin: int
    """First byte in the file."""

    shape: torch.Size
    dtype: torch.dtype

    def __call__(self) -> Tensor:
        """Return the whole tensor."""
        out = torch.empty(self.shape, dtype=self.dtype)
        self.read_into(Region(0, self.shape.numel()), out.view(-1))
        return out

    def read_into(self, where: Region, out: Tensor) -> None:
        """Fill a tensor, which may have another dtype and device, with elements in their order.

        It reads into the tensor itself, or through one small buffer: temporary tensors between those that stay would
        leave holes in the heap that nothing fits into, as many bytes as the tensors themselves.
        """
        flat = out.view(-1)
        direct = flat.dtype == self.dtype and flat.device.type == "cpu"
        with self.file.open("rb", buffering=0) as opened:
            for run in range(where.runs):
                mine, first = flat[run * where.length : (run + 1) * where.length], where.start + run * where.stride
                if direct:
                    self._read(opened.fileno(), first, mine)
                    continue
                buffer = self.owner.buffer.view(self.dtype)
                for at in range(0, where.length, len(buffer)):
                    part = mine[at : at + len(buffer)]
                    self._read(opened.fileno(), first + at, buffer[: len(part)])
                    part.copy_(buffer[: len(part)])

    def _read(self, fd: int, first: int, into: Tensor) -> None:
        if not len(into):
            return
        data: Any = into.view(torch.uint8).numpy()
        left, at = memoryview(data), self.begin + first * into.element_size()
        while left:
            read = os.preadv(fd, [left], at)
            if read == 0:
                raise ConfigError(
                    f"model.weights: {self.file} ends at byte {at:,}, within a tensor; download or copy it again"
                )
            left, at = left[read:], at + read
        self.owner.bytes_read += data.nbytes
