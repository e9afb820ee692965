"""`MatrixStates`: matrices in ZeRO's flat tensors, and the optimizer's state of each, which is whole on one rank."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from math import prod
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from unipar.backend import Piece, Read, Region
from unipar.distributed.world import World
from unipar.engines.plain_state import KINDS_OF_MODEL, decode_plain, describe_unsaved_value, encode_plain, plain_key
from unipar.optimizers.matrix_optimizer import MatrixOptimizer
from unipar.optimizers.matrix_parts import FlatMatrix, MatrixLayout


def names_of_matrices(model: nn.Module, optimizer: Optimizer) -> frozenset[str]:
    """Return the names of the parameters that an optimizer updates as whole matrices; asked before DeepSpeed has it."""
    if not isinstance(optimizer, MatrixOptimizer):
        return frozenset()
    ids = {id(p) for group in optimizer.param_groups if group["matrices"] for p in group["params"]}
    return frozenset(name for name, p in model.named_parameters() if id(p) in ids)


@final
class MatrixStates:
    """State of the matrices, by name; everything else in the optimizer's state belongs to AdamW."""

    def __init__(
        self,
        model: nn.Module,
        engine: Any,
        stage: int,
        world: World,
        names: frozenset[str],
        masters: Mapping[int, Tensor],
    ) -> None:
        """Tell the optimizer which matrices are in its flat tensors; `masters`: fp32 copies by their parameter's id."""
        self._base, self._world = engine.basic_optimizer, world
        self._keys: dict[str, Any] = {
            name: masters.get(id(p), p) for name, p in model.named_parameters() if name in names
        }
        """Tensor by which the optimizer keeps the state of each matrix."""

        self.flat: frozenset[int] = frozenset()
        """Ids of the flat tensors that hold matrices."""

        if names and stage:
            self._use_flat_tensors(engine.optimizer, stage)

    def _use_flat_tensors(self, zero: Any, stage: int) -> None:
        names: dict[int, str] = {id(key): name for name, key in self._keys.items()}
        spans = list(ranges_in_flat_tensors(zero, stage, self._world.data_rank, names))
        mine = {names[id(p)]: (start, length) for _, several in spans for p, start, length, _ in several}
        of_ranks: list[Any] = [mine]
        if self._world.size > 1:
            of_ranks = [None] * self._world.size
            dist.all_gather_object(of_ranks, mine)
        several_ranks = dist.group.WORLD if self._world.size > 1 else None
        by_flat: dict[Tensor, list[FlatMatrix]] = {}
        for flat, several in spans:
            by_flat[flat] = [
                FlatMatrix(
                    p,
                    MatrixLayout(
                        tuple(getattr(p, "ds_shape", p.shape)),
                        tuple(ranges[names[id(p)]] for ranges in of_ranks),
                        several_ranks,
                        self._world.device.type,
                    ),
                    first,
                )
                for p, _, _, first in several
            ]
        matrices = {flat: several for flat, several in by_flat.items() if several}
        self.flat = frozenset(id(flat) for flat in matrices)
        self._base.use_flat_tensors(matrices)

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor of the optimizer's groups is a matrix, or holds matrices alone."""
        return id(tensor) in self.flat or any(tensor is key for key in self._keys.values())

    def __contains__(self, name: str) -> bool:
        return name in self._keys

    def vector_states(self) -> list[dict[str, Any]]:
        """Return the optimizer's states of everything else, as far as it has any."""
        mine = {id(key) for key in self._keys.values()}
        return [state for key, state in self._base.state.items() if state and id(key) not in mine]

    def _here(self, name: str) -> bool:
        """Return whether this rank has the state of a matrix."""
        return not self.flat or self._base.owns(self._keys[name]) is not False

    def _speaks(self, name: str) -> bool:
        """Return whether this rank yields the state of a matrix: the first of those that have it."""
        owner = self._base.owns(self._keys[name]) if self.flat else None
        return self._world.data_rank == 0 if owner is None else owner

    def forget(self) -> None:
        """Begin again without state."""
        for key in self._keys.values():
            self._base.state.pop(key, None)

    def pieces(self, name: str) -> Iterator[Piece]:
        """Yield the state of a matrix."""
        if self._speaks(name):
            for key, value in self._base.state.get(self._keys[name], {}).items():
                piece = (key, value) if isinstance(value, Tensor) else encode_plain(key, value)
                if piece is not None:
                    kind, t = piece
                    yield Piece(name, kind, tuple(t.shape), Region(0, t.numel()), t)

    def unsaved_values(self) -> Iterator[str]:
        """Yield a sentence for each value that is in no piece."""
        for name, tensor in self._keys.items():
            for key, value in self._base.state.get(tensor, {}).items():
                unknown = not isinstance(value, Tensor) and encode_plain(key, value) is None
                if unknown or (isinstance(value, Tensor) and key in KINDS_OF_MODEL):
                    yield describe_unsaved_value(key, name, value)

    def restore(self, read: Read) -> None:
        """Load the states of the matrices that are on this rank."""
        for name, tensor in self._keys.items():
            if not self._here(name):
                continue
            state = self._base.state[tensor]
            for kind in sorted(read.kinds(name) - {"weight"}):
                if (key := plain_key(kind)) is not None:
                    state[key] = decode_plain(kind, read(name, kind, Region(0, 1)))
                    continue
                shape = read.shape(name, kind)
                saved = read(name, kind, Region(0, prod(shape)))
                state[kind] = torch.empty(shape, dtype=saved.dtype, device=self._world.device)
                state[kind].copy_(saved.view(shape))


def ranges_in_flat_tensors(
    zero: Any, stage: int, share: int, among: Container[int]
) -> Iterator[tuple[Tensor, list[tuple[Any, int, int, int]]]]:
    """Yield each flat tensor of ZeRO's optimizer with the parameters that it has parts of, if their ids are asked for.

    Each comes with where its part begins, its length, and its place in the flat tensor.
    """
    if stage < 3:
        for group, flat in zip(zero.bit16_groups, zero.single_partition_of_fp32_groups, strict=True):
            yield flat, [(p, *_range_in_partition(p)) for p in group if id(p) in among]
    else:
        for group, flat in zip(zero.fp16_groups, zero.fp32_partitioned_groups_flat, strict=True):
            yield flat, [(p, *_range_of_shard(p, zero, flat, share)) for p in group if id(p) in among]


def _range_in_partition(p: Any) -> tuple[int, int, int]:
    """Return this rank's range of a parameter under stages 1 and 2, and its place in the flat tensor."""
    part = p._hp_mapping
    if part is None:
        return 0, 0, 0
    return part.lp_fragment_address.start, part.lp_fragment_address.numel, part.hp_fragment_address.start


def _range_of_shard(p: Any, zero: Any, flat: Tensor, rank: int) -> tuple[int, int, int]:
    """Return this rank's range of a parameter under stage 3, and its place in the flat tensor."""
    size = p.ds_tensor.ds_numel
    start = min(rank * size, p.ds_numel)
    mine: Tensor = zero._get_fp32_opt_state_partition(p, True, None)[0]
    return start, min(start + size, p.ds_numel) - start, int(mine.storage_offset()) - int(flat.storage_offset())
