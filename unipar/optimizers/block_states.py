"""Optimizer states in blocks: codes of a few bits, and one scale for each block of elements."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


class BlockStates(ABC):
    """Base of optimizers that keep states in blocks where each row is whole blocks, and in full elsewhere."""

    @property
    @abstractmethod
    def block_keys(self) -> frozenset[str]:
        """Keys of the states that may be in blocks."""

    @abstractmethod
    def new_state(self, p: Tensor, key: str) -> Tensor:
        """Return a parameter's state of zeros, in blocks if they fit: a DTensor if the parameter is one."""

    @abstractmethod
    def values_of(self, key: str, codes: Tensor, scale: Tensor) -> Tensor:
        """Return the numbers that codes and the scales of their blocks stand for."""


class BlockTensors(NamedTuple):
    """Tensors of a state in blocks: writing into them changes it."""

    codes: Tensor
    scale: Tensor

    @property
    def block(self) -> int:
        """Elements of a block."""
        return self.codes.numel() // max(1, self.scale.numel())


def block_tensors(state: Tensor) -> BlockTensors | None:
    """Return codes and scales of a state, or None if it is not in blocks."""
    inner = inner_tensors(state)
    return BlockTensors(inner["codes"], inner["scale"]) if {"codes", "scale"} <= inner.keys() else None


def inner_tensors(state: Tensor) -> Mapping[str, Tensor]:
    """Return the tensors that a state is made of, by name; {} for a plain tensor, which is its own."""
    if isinstance(state, DTensor) or not is_traceable_wrapper_subclass(state):
        return {}
    made_of: Any = state
    return {name: getattr(made_of, name) for name in made_of.__tensor_flatten__()[0]}


def blocks_fit(p: Tensor, block: int) -> bool:
    """Return whether each row of a parameter is whole blocks, so that they are the same whichever rank has the row."""
    if p.ndim < 2 or (p.numel() // max(1, p.shape[0])) % block:
        return False
    return not isinstance(p, DTensor) or all(cut.is_replicate() or cut == Shard(0) for cut in p.placements)
