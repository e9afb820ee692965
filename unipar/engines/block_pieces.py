"""Optimizer states in blocks as pieces of a checkpoint: codes and scales are saved as they are, and read back."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from math import prod
from typing import Any, Final

from torch import Tensor

from unipar.backend import Holding, Piece, Read, Region
from unipar.optimizers.block_states import BlockStates, BlockTensors, block_tensors, inner_tensors

_CODES: Final = " codes"
_SCALE: Final = " scale"


def split_blocks(piece: Piece, optimizer: object) -> Iterator[Piece]:
    """Yield a piece; one of a state in blocks as two: its codes, and the scales of these blocks."""
    inner = block_tensors(piece.tensor) if isinstance(optimizer, BlockStates) else None
    if inner is None:
        if piece.where.numel or not isinstance(optimizer, BlockStates) or piece.kind not in optimizer.block_keys:
            yield piece  # a rank without rows says nothing: it cannot know whether other ranks have blocks
        return
    where, block = piece.where, inner.block
    yield Piece(piece.name, piece.kind + _CODES, piece.shape, where, inner.codes)
    scales = Region(where.start // block, where.numel // block)
    yield Piece(piece.name, piece.kind + _SCALE, (prod(piece.shape) // block,), scales, inner.scale)


def state_holdings(name: str, key: str, state: Tensor) -> Iterator[Holding]:
    """Yield the tensors that a parameter's state is made of."""
    inner = inner_tensors(state)
    if not inner:
        yield Holding("optimizer", f"{name}.{key}", state)
    for part, tensor in inner.items():
        yield Holding("optimizer", f"{name}.{key} {part}", tensor)


def restore_blocks(
    optimizer: BlockStates,
    read: Read,
    name: str,
    p: Tensor,
    kinds: Collection[str],
    regions: Callable[[str, Tensor], Iterable[tuple[Region, Tensor]]],
) -> tuple[dict[str, Any], set[str]]:
    """Return a parameter's states that may be in blocks, as saved, and the kinds of pieces that they are made of.

    They are in this run's blocks, whatever they were when they were saved.
    """
    states: dict[str, Any] = {}
    used: set[str] = set()
    for key in sorted(optimizer.block_keys):
        mine = {key, key + _CODES, key + _SCALE} & set(kinds)
        if not mine:
            continue
        used |= mine
        states[key] = state = optimizer.new_state(p, key)
        for where, local in regions(name, state):
            inner = block_tensors(local)
            if not where.numel:
                continue
            if key in mine:
                local.copy_(read(name, key, where).view(local.shape).to(local.device))
            elif inner is None or inner.block != _block_of(read, name, key):
                local.copy_(_read_values(optimizer, read, name, key, where).view(local.shape).to(local.device))
            else:
                _read_blocks(inner, read, name, key, where)
    return states, used


def _read_blocks(inner: BlockTensors, read: Read, name: str, key: str, where: Region) -> None:
    """Fill codes and scales with those of a region of whole blocks."""
    read.fill(inner.codes, name, key + _CODES, where)
    read.fill(inner.scale, name, key + _SCALE, Region(where.start // inner.block, where.numel // inner.block))


def _read_values(optimizer: BlockStates, read: Read, name: str, key: str, where: Region) -> Tensor:
    """Return the numbers of a region that may begin or end inside a block."""
    block, end = _block_of(read, name, key), where.start + where.numel
    first, last = where.start // block, -(-end // block)
    codes = read(name, key + _CODES, Region(first * block, (last - first) * block)).view(-1)
    scale = read(name, key + _SCALE, Region(first, last - first)).view(-1)
    return optimizer.values_of(key, codes, scale)[where.start - first * block : end - first * block]


def _block_of(read: Read, name: str, key: str) -> int:
    """Return the elements of a block of a saved state."""
    return prod(read.shape(name, key + _CODES)) // prod(read.shape(name, key + _SCALE))
