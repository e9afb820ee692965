"""A task's own state on its way into a checkpoint and back: JSON values, and tensors by the path to them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from unipar.errors import TaskError

_MARK = "unipar tensor"
"""Only key of the object that stands for a tensor."""


def pack_task_state(state: Any) -> tuple[Any, dict[str, Tensor]]:
    """Return a task's state with its tensors taken out, and the tensors by their path; raise TaskError for the rest."""
    tensors: dict[str, Tensor] = {}

    def pack(value: Any, path: str) -> Any:
        if isinstance(value, Tensor):
            tensors[path] = value.detach()
            return {_MARK: path}
        if isinstance(value, Mapping):
            if not all(isinstance(key, str) for key in value):
                raise TaskError(f"state(): the keys of {path} are not all text, which JSON needs")
            if set(value) == {_MARK}:
                raise TaskError(f"state(): {path} has {_MARK!r} as its only key, a word of unipar's own")
            return {key: pack(inner, f"{path}.{key}") for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [pack(inner, f"{path}[{i}]") for i, inner in enumerate(value)]
        if isinstance(value, float) and not math.isfinite(value):
            raise TaskError(f"state(): {path} is {value}, which JSON has no word for")
        if value is None or isinstance(value, str | bool | int | float):
            return value
        raise TaskError(
            f"state(): {path} is of type {type(value).__name__}; return numbers, texts, lists, mappings and tensors"
        )

    return pack(state, "state"), tensors


def unpack_task_state(packed: Any, read: Callable[[str], Tensor]) -> Any:
    """Return a task's state as it was packed, with its tensors read; tuples have become lists."""
    if isinstance(packed, dict):
        if set(packed) == {_MARK}:
            return read(packed[_MARK])
        return {key: unpack_task_state(inner, read) for key, inner in packed.items()}
    if isinstance(packed, list):
        return [unpack_task_state(inner, read) for inner in packed]
    return packed
