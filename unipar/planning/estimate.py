"""Estimate of the bytes that a rank keeps, and advice on a micro-batch or cell that would fit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from unipar.backend import Category, cells, checks, registry
from unipar.config import SHARDS, BatchSizes, Cell, Config, Shard
from unipar.errors import UniparError
from unipar.utils.text import format_size

_SHARDED_FROM: Final[dict[Category, Shard]] = {
    "parameters": "parameters",
    "gradients": "gradients",
    "masters": "optimizer",
    "optimizer": "optimizer",
}
"""Lowest value of `parallel.shard` at which a rank keeps only its share of a category."""


_PHASES_BEFORE_BATCH: Final = ("start", "update")
"""Phases in which no memory grows with the microbatch."""


def estimate_kept_bytes(config: Config, ranks: int, parameters: int, shard: Shard | None = None) -> dict[Category, int]:
    """Return the bytes that a rank keeps from step to step, by category; buckets and the like are left out."""
    precision, optimizer = config.train.precision, config.train.optimizer
    weight = {"fp64": 8, "bf16-master": 2}.get(precision, 4)
    state = max(4, weight)
    moments = (1 if optimizer.momentum else 0) if optimizer.name == "sgd" else 2
    each: dict[Category, int] = {
        "parameters": weight,
        "masters": 4 if precision == "bf16-master" else 0,
        "gradients": weight,
        "optimizer": moments * state,
    }
    among = config.parallel.shard_over or ranks
    level = SHARDS.index(shard or config.parallel.shard)
    return {
        category: parameters * number // (among if level >= SHARDS.index(_SHARDED_FROM[category]) else 1)
        for category, number in each.items()
        if number
    }


def suggest_what_fits(
    config: Config,
    sizes: BatchSizes,
    parameters: int,
    phase: str,
    *,
    moving: int | None = None,
    lack: int | None = None,
) -> str:
    """Return a sentence on what would have fitted: a smaller micro-batch, another cell, or why neither.

    `moving` is the number of bytes that grows with the microbatch, `lack` the number that was missing. If they are
    unknown, the sentence names what needs less memory, without the claim that it fits.
    """
    if not parameters:
        return "no other cell or batch size needs less: the whole model is built before it is split"
    ways = [
        *_smaller_microbatch(sizes.micro, phase, moving, lack),
        *_cell_that_keeps_less(config, sizes.ranks, parameters, lack),
    ]
    if ways:
        return f"by an estimate {' or '.join(ways)} " + ("needs less" if lack is None else "would have fitted")
    if lack is None:
        return "no cell here splits more" + ("" if phase in _PHASES_BEFORE_BATCH else ", and batch.micro is 1 already")
    tried = (
        "no cell that splits more"
        if phase in _PHASES_BEFORE_BATCH
        else "neither a smaller batch.micro nor a cell that splits more"
    )
    return f"by an estimate {tried} would have fitted"


def _smaller_microbatch(now: int, phase: str, moving: int | None, lack: int | None) -> Iterator[str]:
    """Yield the largest smaller microbatch that saves `lack` bytes, if there is one."""
    if phase in _PHASES_BEFORE_BATCH:
        return
    for micro in (n for n in range(now - 1, 0, -1) if now % n == 0):
        if lack is None or moving is None or moving * (now - micro) / now >= lack:
            yield f"batch.micro: {micro} instead of {now}"
            return


def _cell_that_keeps_less(config: Config, ranks: int, parameters: int, lack: int | None) -> Iterator[str]:
    """Yield the cell that splits least and saves `lack` bytes, if there is one; the config's backend is tried first."""
    here = sum(estimate_kept_bytes(config, ranks, parameters).values())
    more = SHARDS[SHARDS.index(config.parallel.shard) + 1 :]
    for backend in sorted(registry.backend_names(), key=lambda name: name != config.backend):
        for shard in more:
            there = sum(estimate_kept_bytes(config, ranks, parameters, shard).values())
            cell = Cell(backend, shard)
            if here - there >= (lack or 1) and _can_run(config, cell):
                less, now = format_size(there), format_size(here)
                yield f"{cell} (parameters, gradients and optimizer {less} a rank, here {now})"
                return


def _can_run(config: Config, cell: Cell) -> bool:
    try:
        checks.check_can_run(cells.config_in_cell(config, cell))
    except UniparError:
        return False
    return True
