"""Bytes that engines hold at a moment, by category; a storage with several names counts once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from unipar.backend import Category, Engine
from unipar.memory.account import CATEGORY_PRECEDENCE


def find_storages(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    """Yield the storage of a tensor on this rank, if it has one: not on meta, not sparse."""
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    if tensor.layout == torch.strided and tensor.device.type != "meta":
        yield tensor.untyped_storage()


def bytes_held_by(engines: Iterable[Engine], device: str) -> dict[Category, int]:
    """Return the bytes that `engines` hold on `device` (cpu or cuda), by category."""
    storages: dict[int, tuple[Category, int]] = {}
    for engine in engines:
        for holding in engine.holdings():
            for storage in find_storages(holding.tensor):
                if storage.device.type != device or not storage.nbytes():
                    continue
                before = storages.get(storage.data_ptr())
                if before is None or CATEGORY_PRECEDENCE[holding.category] < CATEGORY_PRECEDENCE[before[0]]:
                    storages[storage.data_ptr()] = holding.category, storage.nbytes()
    sums: dict[Category, int] = {}
    for category, size in storages.values():
        sums[category] = sums.get(category, 0) + size
    return sums
