"""Difference between two checkpoints: tensors element by element, and keys of their states."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unipar.backend import Region
from unipar.checkpoint.format.manifest import StoredTensor
from unipar.checkpoint.protocol.verifying import CheckpointContents
from unipar.checkpoint.saved_state import SavedState
from unipar.utils.mappings import flatten
from unipar.utils.table import format_table
from unipar.utils.text import count_of, show_value

_AT_ONCE = 2**22
"""Elements of a tensor that are compared at a time."""


@dataclass(frozen=True, kw_only=True)
class TensorDifference:
    """Tensor whose elements, or whose shape or dtype, differ between two checkpoints."""

    name: str
    kind: str
    said: str = ""
    """Words on a shape or dtype that differs; its elements are then not compared."""

    largest: float = 0.0
    """Largest difference of two elements; infinite if one of them is not a number."""

    differing: int = 0
    elements: int = 0


@dataclass(frozen=True, kw_only=True)
class CheckpointDifference:
    """Differences between two checkpoints."""

    first: str
    second: str
    equal: int
    """Number of tensors that are equal."""

    tensors: tuple[TensorDifference, ...]
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    keys: tuple[tuple[str, Any, Any], ...]
    """Keys of state.json with both values, as dotted keys; lists are values."""

    @property
    def any(self) -> bool:
        """Whether anything differs in tensors or names; keys of the state alone do not count."""
        return bool(self.tensors or self.only_first or self.only_second)

    def text(self, width: int = 80) -> str:
        """Return the difference as a table and sentences."""
        lines = [f"a: {self.first}", f"b: {self.second}", ""]
        if self.tensors:
            rows = [
                [d.name, d.kind, d.said]
                if d.said
                else [d.name, d.kind, f"{d.largest:.3g}", f"{100 * d.differing / d.elements:.3g} %", f"{d.elements:,}"]
                for d in self.tensors
            ]
            lines += [
                format_table(["name", "kind", "largest", "differ", "elements"], rows, right=(2, 3, 4), width=width),
                "",
            ]
        lines += [f"only in a: {name}" for name in self.only_first]
        lines += [f"only in b: {name}" for name in self.only_second]
        lines += [f"state.json: {key}: {show_value(a)} in a, {show_value(b)} in b" for key, a, b in self.keys]
        differ = f"{count_of(len(self.tensors), 'tensor')} differ{'s' * (len(self.tensors) == 1)}"
        return "\n".join([*lines, f"{count_of(self.equal, 'tensor')} equal, {differ}"])


def compare_checkpoints(
    a: CheckpointContents, b: CheckpointContents, progress: Callable[[int, int], None] | None = None
) -> CheckpointDifference:
    """Return what differs between two checkpoints; tensors are read in parts, so that large ones need no memory."""
    old, new = a.manifest.tensors, b.manifest.tensors
    both = sorted(old.keys() & new.keys())
    total, done = sum(old[key].numel for key in both), 0
    differences: list[TensorDifference] = []
    with SavedState(a.path, a.manifest) as first, SavedState(b.path, b.manifest) as second:
        for key in both:
            difference = _compare(old[key], new[key], first, second)
            if difference is not None:
                differences.append(difference)
            done += old[key].numel
            if progress is not None:
                progress(done, total)
    return CheckpointDifference(
        first=str(a.path),
        second=str(b.path),
        equal=len(both) - len(differences),
        tensors=tuple(differences),
        only_first=tuple(str(old[key]) for key in sorted(old.keys() - new.keys())),
        only_second=tuple(str(new[key]) for key in sorted(new.keys() - old.keys())),
        keys=tuple(_differing_keys(a.state, b.state)),
    )


def _compare(a: StoredTensor, b: StoredTensor, first: SavedState, second: SavedState) -> TensorDifference | None:
    """Return the difference of two tensors, or None if they are equal; NaN is equal to NaN."""
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        reason = f"{a.dtype} of shape {list(a.shape)} in a, {b.dtype} of shape {list(b.shape)} in b"
        return TensorDifference(name=a.name, kind=a.kind, said=reason)
    largest, differing = 0.0, 0
    for start in range(0, a.numel, _AT_ONCE):
        where = Region(start, min(_AT_ONCE, a.numel - start))
        x, y = first(a.name, a.kind, where), second(a.name, a.kind, where)
        unequal = _unequal(x, y)
        if count := int(unequal.sum()):
            differing += count
            distance = (_wide(x[unequal]) - _wide(y[unequal])).abs()
            largest = max(largest, float(distance.nan_to_num(nan=torch.inf, posinf=torch.inf).max()))
    if not differing:
        return None
    return TensorDifference(name=a.name, kind=a.kind, largest=largest, differing=differing, elements=a.numel)


def _unequal(x: Tensor, y: Tensor) -> Tensor:
    return _wide(x).ne(_wide(y)) & ~(_wide(x).isnan() & _wide(y).isnan())


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.complex128 if x.is_complex() else torch.float64)


_ALWAYS_DIFFER = ("time", "config_sha256")


def _differing_keys(a: dict[str, Any], b: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    old, new = dict(flatten(a)), dict(flatten(b))
    keys = [key for key in dict.fromkeys((*old, *new)) if key not in _ALWAYS_DIFFER]
    return [(key, old.get(key), new.get(key)) for key in keys if _text(old.get(key)) != _text(new.get(key))]


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
