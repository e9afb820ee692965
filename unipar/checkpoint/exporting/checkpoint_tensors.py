"""Tensors of a checkpoint on their way into other files: read one at a time, cast, or mapped from the disk."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, final

import torch
from torch import Tensor

from unipar.backend import Region
from unipar.checkpoint.exporting.selection import ChosenTensor
from unipar.checkpoint.format.names import ITEM_BYTES
from unipar.checkpoint.saved_state import SavedState
from unipar.checkpoint.tensor_bytes import DTYPE_OF_NAME, bytes_of, dtype_name

_AT_ONCE = 2**22
"""Elements that are cast at a time, so that no tensor is in memory in two dtypes."""

Advance = Callable[[int], None]
"""Callback with the number of bytes that were just written."""


@final
class ExportSource:
    """Chosen tensors of one checkpoint, in the dtypes of the export."""

    def __init__(self, state: SavedState, chosen: Sequence[ChosenTensor], dtype: torch.dtype | None) -> None:
        """`dtype`: that of all floating-point tensors; None: as they are."""
        self.state, self.chosen, self._dtype = state, chosen, dtype

    def dtype(self, tensor: ChosenTensor) -> torch.dtype:
        """Return the dtype that a tensor has in the export."""
        mine = DTYPE_OF_NAME[tensor.stored.dtype]
        return self._dtype if self._dtype is not None and mine.is_floating_point else mine

    def dtype_name(self, tensor: ChosenTensor) -> str:
        """Return the name of that dtype in safetensors."""
        return dtype_name(torch.empty(0, dtype=self.dtype(tensor)), tensor.name)

    def bytes(self, tensor: ChosenTensor) -> int:
        """Return the number of bytes that a tensor has in the export."""
        return math.prod(tensor.stored.shape) * ITEM_BYTES[self.dtype_name(tensor)]

    @property
    def total(self) -> int:
        """Number of bytes of all tensors in the export."""
        return sum(map(self.bytes, self.chosen))

    def read(self, tensor: ChosenTensor) -> Tensor:
        """Return a tensor as it is exported."""
        stored, dtype = tensor.stored, self.dtype(tensor)
        out = torch.empty(stored.shape, dtype=dtype)
        flat = out.view(-1)
        step = _AT_ONCE if dtype != DTYPE_OF_NAME[stored.dtype] else max(1, stored.numel)
        for first in range(0, stored.numel, step):
            where = Region(first, min(step, stored.numel - first))
            self.state.fill(flat[first : first + step], stored.name, stored.kind, where)
        return out

    def memory(self, tensor: ChosenTensor) -> memoryview:
        """Return the bytes of a tensor as it is exported."""
        return bytes_of(self.read(tensor).contiguous())

    @contextmanager
    def mapped(self, beside: Path, advance: Advance) -> Generator[dict[str, Tensor]]:
        """Context manager: all tensors by name, tied ones under each, mapped from files so that none is in memory."""
        with TemporaryDirectory(prefix=".tmp-export-", dir=beside) as folder:
            tensors: dict[str, Tensor] = {}
            for number, tensor in enumerate(self.chosen):
                size = self.bytes(tensor)
                file = Path(folder) / str(number)
                if size:
                    file.write_bytes(self.memory(tensor))
                    storage = torch.UntypedStorage.from_file(str(file), shared=False, nbytes=size)
                    flat: Any = torch.empty(0, dtype=self.dtype(tensor))
                    made: Tensor = flat.set_(storage, 0, tensor.stored.shape)
                else:
                    made = torch.empty(tensor.stored.shape, dtype=self.dtype(tensor))
                for name in (tensor.name, *tensor.also):
                    tensors[name] = made
                advance(size)
            yield tensors
