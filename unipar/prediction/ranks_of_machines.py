"""Machines of a planned world: over how many ranks a copy is split, and which bytes cross between machines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from unipar.config import Config
from unipar.config.sections.strategy import EXPERT_AXIS
from unipar.distributed.copies_by_machine import copies_by_machine
from unipar.distributed.mesh import MESH_AXES, Mesh
from unipar.distributed.world_machines import WorldMachines
from unipar.errors import ConfigError
from unipar.prediction.request import PredictionRequest
from unipar.prediction.timeline import CommVolume


def settle_shard_over(config: Config, ranks: int, per: int | None) -> Config:
    """Return the config with a number for `parallel.shard_over: machine`, on machines of `per` ranks.

    Raise ConfigError if it is not known how many these are, or where a run would be refused.
    """
    if config.parallel.shard_over != "machine":
        return config
    if per is None:
        raise ConfigError(
            "parallel.shard_over: machine: a plan must know how many ranks a machine has: say machines.ranks_per_node "
            "(--set machines.ranks_per_node=8), or name a --machine"
        )
    mesh = Mesh.of(0, ranks, **config.parallel.axes.sizes)
    copies = copies_by_machine(mesh, WorldMachines.filled(ranks, per))
    parallel = config.parallel.model_copy(update={"shard_over": copies.shards // mesh.sizes["context"]})
    return config.model_copy(update={"parallel": parallel})


def settle_request(request: PredictionRequest) -> PredictionRequest:
    """Return a request whose config has a number for `parallel.shard_over: machine`."""
    config = settle_shard_over(request.config, request.ranks, request.ranks_per_machine)
    return replace(request, config=config)


def count_across(sent: Sequence[CommVolume], config: Config, ranks: int, per: int | None) -> tuple[CommVolume, ...]:
    """Return the volumes with their bytes across machines of `per` ranks, of the rank where these are most.

    `per`: None where it is not known; then all ranks are taken to be on one machine.
    """
    if per is None or per >= ranks:
        return tuple(sent)
    axes = config.parallel.axes
    sizes = axes.tensor, axes.pipeline, axes.context
    spans = [_spans(each.axis, each.ranks, each.stride, ranks, per, sizes) for each in sent]
    totals = [sum(each.size for each, of in zip(sent, spans, strict=True) if of[rank]) for rank in range(ranks)]
    most = totals.index(max(totals))
    return tuple(replace(each, across=each.size if of[most] else 0) for each, of in zip(sent, spans, strict=True))


@lru_cache
def _spans(axis: str, ranks: int, stride: int, world: int, per: int, sizes: tuple[int, int, int]) -> tuple[bool, ...]:
    """Return for each rank of the world whether its group is on several machines."""
    tensor, pipeline, context = sizes
    mesh = Mesh.of(0, world, tensor=tensor, pipeline=pipeline, context=context)
    names = axis.replace(EXPERT_AXIS, "data").split(" x ")  # its ranks are neighbours along the data
    axes = [name for name in names if name in MESH_AXES] or MESH_AXES
    spans = [False] * world
    covered: set[int] = set()
    for rank in range(world):
        if rank in covered:
            continue
        line = mesh.line(rank, axes)
        covered.update(line)
        for block in range(0, len(line), ranks * stride):
            for first in range(block, min(block + stride, len(line))):
                group = line[first : first + (ranks - 1) * stride + 1 : stride]
                if len({other // per for other in group}) > 1:
                    for other in group:
                        spans[other] = True
    return tuple(spans)
