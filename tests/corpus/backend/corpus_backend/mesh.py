"""Errors of ranks that share the work, put into the native engine after it has proved itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from unipar_mesh.engine import MeshEngine

from tests.support.mesh_faults import (
    leave_gradients_of_norms_apart,
    leave_tied_gradients_apart,
    let_each_rank_add_the_bias,
)
from unipar.backend import Engine, Part
from unipar.config import Config
from unipar.distributed.world import World


def bias_of_each_rank(part: Part, config: Config, world: World) -> Engine:
    """Return an engine whose ranks of tensor each add a row's bias to their part, before the parts are added up."""
    engine: Any = MeshEngine(part, config, world)
    let_each_rank_add_the_bias(engine, part.blocks)
    return engine


def bias_gradient_divided(part: Part, config: Config, world: World) -> Engine:
    """Return an engine whose rows add a bias divided by the ranks, and whose bias gets its gradient through that."""
    engine: Any = MeshEngine(part, config, world)
    names = [f"{block}.{row}.bias" for block in part.blocks for row in ("out", "down")]
    biases = [engine.kept[name] for name in names if engine.kept[name].requires_grad]

    def divide() -> None:
        for bias in biases:
            bias.grad.div_(world.mesh.sizes["tensor"])

    engine.finish_reduction = divide
    return engine


def head_gradient_partial(part: Part, config: Config, world: World) -> Engine:
    """Return an engine in which the gradient of the head's input is that of this rank's part of the vocabulary."""
    engine: Any = MeshEngine(part, config, world)

    def keep_own_part(module: Any, given: tuple[Tensor | None, ...], out: tuple[Tensor, ...]) -> tuple[Tensor]:
        mine = [whole.chunk(world.mesh.sizes["tensor"], -1)[world.mesh.seat["tensor"]] for whole in out]
        rows = module.weight.detach().chunk(world.mesh.sizes["tensor"])[world.mesh.seat["tensor"]]
        return (mine[0] @ rows,)

    engine.model.head.register_full_backward_hook(keep_own_part)
    return engine


def attention_without_gradient(part: Part, config: Config, world: World) -> Engine:
    """Return an engine whose exchange of queries, keys and values has no gradient."""
    engine: Any = MeshEngine(part, config, world)
    for block in part.blocks:
        engine.model.get_submodule(f"{block}.qkv").register_forward_hook(_cut_gradient)
    return engine


def _cut_gradient(module: nn.Module, given: Any, out: Tensor) -> None:
    if out.requires_grad:
        out.register_hook(torch.zeros_like)


def sequence_loss_times(part: Part, config: Config, world: World) -> Engine:
    """Return an engine whose loss is divided by the tokens of one rank's part of the sequence."""
    return _scaled_loss(part, config, world, world.mesh.sizes["context"])


def sequence_loss_divided(part: Part, config: Config, world: World) -> Engine:
    """Return an engine whose loss is a mean over ranks that each have a part of the same sequence."""
    return _scaled_loss(part, config, world, 1 / world.mesh.sizes["context"])


def _scaled_loss(part: Part, config: Config, world: World, factor: float) -> Engine:
    engine: Any = MeshEngine(part, config, world)
    run = engine.run_microbatches

    def run_scaled(fn: Any, micros: Any, divisor: float, mark: Any) -> Tensor:
        return run(fn, [replace(micro, scale=micro.scale * factor) for micro in micros], divisor, mark)

    engine.run_microbatches = run_scaled
    return engine


def sequence_gradient_divided(part: Part, config: Config, world: World) -> Engine:
    """Return an engine that divides gradients by all ranks, those along the sequence included."""
    engine: Any = MeshEngine(part, config, world)
    finish = engine.finish_reduction

    def divide() -> None:
        finish()
        for p in engine.trained:
            if p.grad is not None:
                p.grad.div_(world.mesh.sizes["context"])

    engine.finish_reduction = divide
    return engine


def norms_drift(part: Part, config: Config, world: World) -> Engine:
    """Return an engine in which one rank of tensor clips the gradients of norms otherwise than the other."""
    engine: Any = MeshEngine(part, config, world)
    weights = [p for name, p in engine.kept.items() if "norm" in name and p.requires_grad]

    def change() -> None:
        if world.mesh.seat["tensor"] == 1:
            for p in weights:
                p.grad.mul_(0.9)

    engine.finish_reduction = change
    return engine


def norm_gradient_parts(part: Part, config: Config, world: World) -> Engine:
    """Return an engine whose norms keep the gradient of this rank's own positions."""
    engine: Any = MeshEngine(part, config, world)

    leave_gradients_of_norms_apart(engine)
    return engine


def tied_apart(part: Part, config: Config, world: World) -> Engine:
    """Return an engine whose first and last stage each keep their own part of the tied weight's gradient."""
    engine: Any = MeshEngine(part, config, world)
    leave_tied_gradients_apart(engine)
    return engine


def wiped(part: Part, config: Config, world: World) -> Engine:
    """Return an engine whose stages drop what they have accumulated whenever a microbatch begins."""
    engine: Any = MeshEngine(part, config, world)
    run = engine.run_microbatches

    def run_each(fn: Any, micros: Any, divisor: float, mark: Any) -> Tensor:
        losses: list[Tensor] = []
        for micro in micros:
            engine.optimizer.zero_grad()
            losses.append(run(fn, [micro], divisor, mark))
        return torch.stack(losses).sum()

    engine.run_microbatches = run_each
    return engine


def generator_ahead(part: Part, config: Config, world: World) -> Engine:
    """Return an engine whose first rank of tensor has drawn one number more than the other: for a loader's seed."""
    engine: Any = MeshEngine(part, config, world)
    if world.mesh.seat["tensor"] == 0:
        engine.model.token.register_forward_hook(_draw)
    return engine


def _draw(module: nn.Module, given: Any, out: Tensor) -> None:
    if module.training:
        torch.rand((), device=out.device)
