"""The native engine of one mesh, and one thing wrong with it: each fault is put in after the engine has proved itself.

What the proof before the first step sees is planted without it, as `skip-across-cut` is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.models.mixtral import modeling_mixtral
from unipar_mesh import engine as native
from unipar_mesh.expert.exchange import Exchange
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
from unipar.engines.state import local_part

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


def _experts_divided(engine: Any) -> None:
    """Gradients of experts are divided by the ranks that have all of them together once more."""
    _after_reduction(engine, lambda: [g.div_(engine.axes.expert) for g in _gradients_of_experts(engine)])


def _gradients_of_experts(engine: Any) -> list[Tensor]:
    return [local_part(p.grad) for p in engine._gradients_of_experts]


def _after_reduction(engine: Any, change: Callable[[], Any]) -> None:
    reduce = engine.finish_reduction

    def finish_reduction() -> None:
        reduce()
        change()

    engine.finish_reduction = finish_reduction


def _experts_doubled(engine: Any) -> None:
    """What experts have accumulated is added to itself in each further microbatch."""
    layers = [engine.model.get_submodule(layer.name) for layer in engine.split.own_experts]
    backward = engine.backward

    def doubled(loss: Tensor) -> None:
        for layer in layers:
            for p in layer.parameters():  # no other rank has these experts, so FSDP2 does not
                if p.grad is not None:
                    p.grad.mul_(2)
        backward(loss)

    engine.backward = doubled


def _router_apart(engine: Any) -> None:
    """Each rank takes its own gradient of the routers: the parts of the ranks are not added up."""
    own: dict[str, Tensor] = {}
    known: set[int] = set()

    def enter(name: str, module: nn.Module, args: Any) -> None:
        for inner, p in module.named_parameters():
            if p.requires_grad and id(p) not in known:
                known.add(id(p))
                p.register_hook(partial(keep, f"{name}.{inner}"))

    def keep(name: str, gradient: Tensor) -> None:
        own[name] = own.get(name, 0.0) + gradient

    for name, module in engine.model.named_modules():
        if name.endswith((".gate", ".router")):
            module.register_forward_pre_hook(partial(enter, name))

    def restore() -> None:
        for name, gradient in own.items():
            local_part(engine.kept[name].grad).copy_(gradient)
        own.clear()

    _after_reduction(engine, restore)


def _auxiliary_loss_times(engine: Any) -> None:
    """The loss that balances experts is added up over the ranks, which each have it."""
    once = modeling_mixtral.load_balancing_loss_func

    def of_all_ranks(*args: Any, **kwargs: Any) -> Any:
        return once(*args, **kwargs) * engine.world.size

    replace_until_closed(engine, modeling_mixtral, "load_balancing_loss_func", of_all_ranks)


def _tokens_dropped(engine: Any) -> None:
    """Of the rows that a rank gets back the last quarter is not there."""
    back = Exchange.back

    def in_part(self: Exchange, rows: Tensor) -> Tensor:
        out = back(self, rows)
        return out * (torch.arange(len(out))[:, None] < 0.75 * len(out))

    replace_until_closed(engine, Exchange, "back", in_part)


def _tokens_misplaced(engine: Any) -> None:
    """Each row that a rank gets back is taken for the next one."""
    back = Exchange.back

    def moved(self: Exchange, rows: Tensor) -> Tensor:
        return back(self, rows).roll(1, 0)

    replace_until_closed(engine, Exchange, "back", moved)


def _stale_experts(engine: Any) -> None:
    """Experts without tokens keep the gradient of the step before."""
    before: list[Tensor] = []

    def keep() -> None:
        gradients = _gradients_of_experts(engine)
        for gradient, was in zip(gradients, before, strict=False):
            idle = gradient.view(len(gradient), -1).abs().sum(1) == 0
            gradient[idle] = was[idle]
        before[:] = [gradient.clone() for gradient in gradients]

    _after_reduction(engine, keep)


def _experts_swapped(engine: Any) -> None:
    """The first rank's first two experts of each layer have each other's weights."""
    if engine.world.rank == 0:
        for name in engine.split.names_of_experts:
            local = local_part(engine.kept[name].data)
            local[:2] = local[:2].flip(0)


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
    "experts-divided": _experts_divided,
    "experts-doubled": _experts_doubled,
    "router-apart": _router_apart,
    "auxiliary-loss-times": _auxiliary_loss_times,
    "tokens-dropped": _tokens_dropped,
    "tokens-misplaced": _tokens_misplaced,
    "stale-experts": _stale_experts,
    "experts-swapped": _experts_swapped,
}
