"""The native engine of one mesh, and one thing wrong with it: each fault is put in after the engine has proved itself.

What the proof before the first step sees is planted without it, as `skip-across-cut` is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from unipar_mesh import engine as native
from unipar_mesh.pipeline.stage import Arrival
from unipar_mesh.tensor import tensor_parallel
from unipar_mesh.tensor.sum_collectives import enter

from tests.support.mesh_faults import (
    leave_gradients_of_norms_apart,
    leave_tied_gradients_apart,
    let_each_rank_add_the_bias,
    replace_until_closed,
)
from unipar.backend import Engine, Part, Piece, Region
from unipar.config import Config
from unipar.data.microbatch_loader import MicrobatchLoader
from unipar.data.order import MicrobatchPlan
from unipar.distributed.world import World

UNPROVED = ("skip-across-cut",)
"""Faults that the proof before the first step refuses."""


def plant(fault: str, part: Part, config: Config, world: World) -> Engine:
    """Return the native engine with a fault."""
    if fault in UNPROVED:
        part = replace(part, cuts=[part.blocks[len(part.blocks) // 2]])  # else the engine would cut where it may
        with mock.patch.object(native, "prove"):
            return native.MeshEngine(part, config, world)
    engine = native.MeshEngine(part, config, world)
    if fault in PLANTS:
        PLANTS[fault](engine)
    return engine


def _norm_counts_twice(engine: Any) -> None:
    """Every rank counts all that it has."""
    engine._counted = [True] * len(engine.trained)


def _same_masks(engine: Any) -> None:
    """The generator's state does not travel: each stage begins with the seed of the microbatch."""
    receive = engine._channel.receive_hidden

    def without_state(*, gradient: bool) -> Arrival:
        return Arrival(receive(gradient=gradient).hidden, None)

    engine._channel.receive_hidden = without_state


def _world_times(engine: Any) -> None:
    """The gradient is taken for one that will be divided by the ranks, and is not."""
    engine.divisor = float(engine.world.size)


def _loss_of_each_rank(engine: Any) -> None:
    """Ranks with the same samples all report their loss."""
    run = engine.run_microbatches

    def counted_by_each(*args: Any) -> Any:
        return run(*args) * engine.world.size

    engine.run_microbatches = counted_by_each


def _other_samples(engine: Any) -> None:
    """The first stage reads its microbatches in another order than the last."""
    if engine.world.leads:
        return
    plans = MicrobatchLoader.plans

    def reversed_plans(self: MicrobatchLoader, start: int) -> Iterator[list[MicrobatchPlan]]:
        return (step[::-1] for step in plans(self, start))

    def restore() -> None:
        MicrobatchLoader.plans = plans

    MicrobatchLoader.plans, engine.close = reversed_plans, restore


def _stale_statistics(engine: Any) -> None:
    """Rank 0 speaks for buffers, as it does where all ranks run all modules."""

    def first_rank(name: str) -> int:
        return 0

    engine._home_of_buffer = first_rank


def _rows_not_added(engine: Any) -> None:
    """The sum over ranks behind a matrix that is cut into rows is left out."""

    def alone(x: Tensor, group: Any) -> Tensor:
        return x

    replace_until_closed(engine, tensor_parallel, "leave", alone)


def _columns_not_added(engine: Any) -> None:
    """The sum over ranks in the backward pass, before a matrix that is cut into columns, is left out."""

    def unsummed(x: Tensor, group: Any, *, alone: bool = False) -> Tensor:
        return x

    replace_until_closed(engine, tensor_parallel, "enter", unsummed)


def _bias_counted_again(engine: Any) -> None:
    """The gradient of a row's bias, summed over the parts of the sequence, is summed over the ranks again."""

    def twice(x: Tensor, group: Any, *, alone: bool = False) -> Tensor:
        return enter(enter(x, group, alone=alone), group, alone=alone)

    replace_until_closed(engine, tensor_parallel, "enter", twice)


def _bias_of_each_rank(engine: Any) -> None:
    """Every rank of tensor adds a row's bias to its part of the sum."""
    let_each_rank_add_the_bias(engine, engine.split.facts.blocks)


def _whole_added_up(engine: Any) -> None:
    """Gradients of what is not cut are the same on all ranks of tensor, and are added up over them."""
    names = [name for name in engine.kept if ".norm" in name]

    def add_up() -> None:
        for name in names:
            dist.all_reduce(engine.kept[name].grad, group=engine.world.groups.group("tensor"))

    engine.finish_reduction = add_up


def _copies_apart(engine: Any) -> None:
    """One rank of tensor has another gradient of what is not cut."""

    def change() -> None:
        if engine.world.mesh.seat["tensor"] == 1:
            engine.kept["blocks.1.norm2.weight"].grad.mul_(0.5)

    engine.finish_reduction = change


def _other_columns(engine: Any) -> None:
    """The parts of a fused projection are taken as one: the first rank has the queries and half of the keys."""
    rank, group = engine.world.rank, engine.world.groups.group("tensor")
    for name in engine.split.facts.blocks:
        for key in ("weight", "bias"):
            part = engine.kept[f"{name}.qkv.{key}"]
            parts = [torch.empty_like(part.data) for _ in range(2)]
            dist.all_gather(parts, part.data, group=group)
            thirds = [torch.cat([one, other]) for one, other in zip(*(p.chunk(3) for p in parts), strict=True)]
            part.data.copy_(torch.cat(thirds).chunk(2)[rank])
    pieces = engine.pieces

    def as_cut() -> Iterator[Piece]:
        """Yield what this rank keeps where this cut has it: the start is that of one process."""
        fused: dict[tuple[str, str], list[Piece]] = {}
        for piece in pieces():
            if ".qkv." in piece.name:
                fused.setdefault((piece.name, piece.kind), []).append(piece)
            else:
                yield piece
        for parts in fused.values():
            whole = torch.cat([piece.tensor.flatten() for piece in parts])
            yield replace(parts[0], where=Region(rank * whole.numel(), whole.numel()), tensor=whole)

    engine.pieces = as_cut


PLANTS: dict[str, Callable[[Any], None]] = {
    "tied-not-summed": leave_tied_gradients_apart,
    "norm-counts-twice": _norm_counts_twice,
    "same-masks": _same_masks,
    "world-times": _world_times,
    "loss-of-each-rank": _loss_of_each_rank,
    "other-samples": _other_samples,
    "stale-statistics": _stale_statistics,
    "rows-not-added": _rows_not_added,
    "columns-not-added": _columns_not_added,
    "bias-of-each-rank": _bias_of_each_rank,
    "whole-added-up": _whole_added_up,
    "other-columns": _other_columns,
    "copies-apart": _copies_apart,
    "norm-not-summed": leave_gradients_of_norms_apart,
    "bias-counted-again": _bias_counted_again,
}
