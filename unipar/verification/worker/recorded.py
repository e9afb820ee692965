"""Files of what a rank has recorded: thousands of small tensors, written and read as a few large ones."""

from __future__ import annotations

import marshal
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

SMALL: Final = 1 << 14
"""Elements of the largest tensor that is written together with others: torch reads each tensor of a file in Python."""


def write_recorded(value: Any, file: Path) -> None:
    """Write dicts, lists and tuples of numbers, texts and tensors; tensors are written as they are on the CPU."""
    tensors: list[Tensor] = []
    tree = _take_tensors(value, tensors)
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel() <= SMALL:
            by_dtype.setdefault(tensor.dtype, []).append(tensor.reshape(-1))
    dtypes = list(by_dtype)
    places = [(dtypes.index(t.dtype) if t.numel() <= SMALL else -1, tuple(t.shape)) for t in tensors]
    text = torch.frombuffer(bytearray(marshal.dumps((tree, places))), dtype=torch.uint8)
    flat = [torch.cat(small) for small in by_dtype.values()]
    torch.save([text, flat, [t for t in tensors if t.numel() > SMALL]], file)


def read_recorded(file: Path) -> Any:
    """Return what `write_recorded` has written."""
    text, flat, large = torch.load(file, map_location="cpu", weights_only=True)
    tree, places = marshal.loads(text.numpy().tobytes())
    lengths: list[list[int]] = [[] for _ in flat]
    for dtype, shape in places:
        if dtype >= 0:
            lengths[dtype].append(torch.Size(shape).numel())
    small = [iter(tensor.split(sizes)) for tensor, sizes in zip(flat, lengths, strict=True)]
    others = iter(large)
    return _put_tensors(tree, [next(others) if d < 0 else next(small[d]).view(shape) for d, shape in places])


def _take_tensors(value: Any, tensors: list[Tensor]) -> Any:
    """Return the value with `(..., number)` in place of each tensor; append these to `tensors`."""
    if isinstance(value, Tensor):
        tensors.append(value.detach().cpu())
        return (..., len(tensors) - 1)
    if isinstance(value, dict):
        return {key: _take_tensors(inner, tensors) for key, inner in value.items()}
    if isinstance(value, list):
        return [_take_tensors(inner, tensors) for inner in value]
    if isinstance(value, tuple):
        return tuple(_take_tensors(inner, tensors) for inner in value)
    return value


def _put_tensors(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, dict):
        return {key: _put_tensors(inner, tensors) for key, inner in value.items()}
    if isinstance(value, list):
        return [_put_tensors(inner, tensors) for inner in value]
    if isinstance(value, tuple):
        if value and value[0] is ...:
            return tensors[value[1]]
        return tuple(_put_tensors(inner, tensors) for inner in value)
    return value
