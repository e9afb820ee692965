"""Python values on their way into a checkpoint and back: JSON, and tensors by the path to them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unipar.errors import TaskError

_TENSOR = "unipar tensor"
"""Only key of the object that stands for a tensor."""

_ARRAY, _TUPLE, _ITEMS, _BYTES, _NUMBER = (f"unipar {word}" for word in ("array", "tuple", "items", "bytes", "number"))
"""Only keys of the objects that stand for other values which JSON lacks: items are those of a mapping."""

_MARKS = (_TENSOR, _ARRAY, _TUPLE, _ITEMS, _BYTES, _NUMBER)


def pack_values(value: Any, root: str, called: str, *, exact: bool = False) -> tuple[Any, dict[str, Tensor]]:
    """Return a value as JSON with its tensors taken out, and the tensors by their path; raise TaskError for the rest.

    `root`: the first step of the paths; `called`: where the value is from, for errors. `exact`: tuples stay tuples, and
    arrays of NumPy, bytes, infinite numbers and keys that are no text are allowed.
    """
    tensors: dict[str, Tensor] = {}

    def pack(value: Any, path: str) -> Any:
        if isinstance(value, Tensor):
            tensors[path] = value.detach()
            return {_TENSOR: path}
        if isinstance(value, Mapping):
            return pack_mapping(value, path)
        if isinstance(value, list | tuple):
            inner = [pack(inner, f"{path}[{i}]") for i, inner in enumerate(value)]
            return {_TUPLE: inner} if exact and isinstance(value, tuple) else inner
        if exact and isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biuf":
            tensors[path] = torch.from_numpy(np.array(value))
            return {_ARRAY: path}
        if exact and isinstance(value, bytes):
            return {_BYTES: value.hex()}
        if isinstance(value, float) and not math.isfinite(value):
            if exact:
                return {_NUMBER: str(value)}
            raise TaskError(f"{called}: {path} is {value}, which JSON has no word for")
        if value is None or isinstance(value, str | bool | int | float):
            return value
        raise TaskError(
            f"{called}: {path} is of type {type(value).__name__}; return numbers, texts, lists, mappings and tensors"
        )

    def pack_mapping(value: Mapping[Any, Any], path: str) -> Any:
        texts = all(isinstance(key, str) for key in value)
        marked = len(value) == 1 and next(iter(value)) in _MARKS
        if exact and (marked or not texts):
            return {_ITEMS: [[pack(k, f"{path} key"), pack(inner, f"{path}.{k}")] for k, inner in value.items()]}
        if not texts:
            raise TaskError(f"{called}: the keys of {path} are not all text, which JSON needs")
        if marked:
            raise TaskError(f"{called}: {path} has {next(iter(value))!r} as its only key, a word of unipar's own")
        return {key: pack(inner, f"{path}.{key}") for key, inner in value.items()}

    return pack(value, root), tensors


def unpack_values(packed: Any, read: Callable[[str], Tensor]) -> Any:
    """Return a value as it was packed, with its tensors read."""
    if isinstance(packed, list):
        return [unpack_values(inner, read) for inner in packed]
    if not isinstance(packed, dict):
        return packed
    if len(packed) == 1 and (mark := next(iter(packed))) in _MARKS:
        return _unpack_marked(mark, packed[mark], read)
    return {key: unpack_values(inner, read) for key, inner in packed.items()}


def _unpack_marked(mark: str, inner: Any, read: Callable[[str], Tensor]) -> Any:
    if mark == _TENSOR:
        return read(inner)
    if mark == _ARRAY:
        return read(inner).numpy()
    if mark == _TUPLE:
        return tuple(unpack_values(inner, read))
    if mark == _ITEMS:
        return {unpack_values(key, read): unpack_values(value, read) for key, value in inner}
    return bytes.fromhex(inner) if mark == _BYTES else float(inner)
