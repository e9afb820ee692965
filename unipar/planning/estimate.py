"""Estimate of the bytes that a rank keeps, and advice on a micro-batch or strategy that would fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from typing import Final

from unipar.backend import Category, checks, registry
from unipar.backend import offered_strategies as strategies
from unipar.config import SHARDS, BatchSizes, Config, Shard, Strategy
from unipar.config.sections.strategy import Axes
from unipar.errors import UniparError
from unipar.utils.text import format_size

_SHARDED_FROM: Final[dict[Category, Shard]] = {
    "parameters": "parameters",
    "gradients": "gradients",
    "masters": "optimizer",
    "optimizer": "optimizer",
    "averages": "optimizer",
}
"""Lowest value of `parallel.shard` at which a rank keeps only its share of a category."""


@dataclass(frozen=True)
class ModelSize:
    """Numbers of parameters of a model, for estimates of what one rank of a mesh holds."""

    parameters: int
    blocks: int = 0
    """Number of repeated blocks; 0 if it is not known."""

    in_blocks: int = 0
    """Parameters in all blocks together."""

    matrices: int = 0
    """Those of them that are in matrices, which ranks of `tensor` split."""

    experts: int = 0
    """Parameters in blocks that are stacked, which ranks of `expert` split if they are layers of experts."""

    def bytes_on_largest_rank(self, axes: Axes, each: int, shards: int) -> int:
        """Return what the rank holds that has most, of `each` bytes a parameter that `shards` ranks of the data split.

        What lies outside the blocks counts whole: a stage of a pipeline may hold all of it. Ranks with different
        experts split these already.
        """
        if not self.blocks:
            return ceil(self.parameters / (axes.tensor * axes.pipeline)) * each // shards
        share = ceil(self.blocks / axes.pipeline) / self.blocks
        experts = self.experts if axes.expert > 1 else 0
        matrices = self.matrices - experts
        cut = self.in_blocks - experts - matrices + matrices / axes.tensor
        others = self.parameters - self.in_blocks + ceil(cut * share)
        return others * each // shards + ceil(experts * share) * each // max(shards, axes.expert)


BLOCK_SIZES: Final = ("blocks", "in_blocks", "matrices", "experts")
"""Fields of `ModelSize` that the run log's first event has if axes split the blocks."""


_PHASES_BEFORE_BATCH: Final = ("start", "update")
"""Phases in which no memory grows with the microbatch."""


def estimate_kept_bytes(config: Config, ranks: int, model: ModelSize) -> dict[Category, int]:
    """Return the bytes that the largest of this many ranks keeps from step to step, by category.

    Buckets and the like are left out. Stages of a pipeline are taken to have equal blocks, and `tensor` to split all
    matrices of the blocks; all ranks to be on one machine, unless the config's `machines` say otherwise.
    """
    precision, optimizer = config.train.precision, config.train.optimizer
    weight = {"fp64": 8, "bf16-master": 2}.get(precision, 4)
    state = max(4, weight)
    each: dict[Category, int] = {
        "parameters": weight,
        "masters": 4 if precision == "bf16-master" else 0,
        "gradients": weight,
        "optimizer": optimizer.states * (optimizer.moment_bytes or state),
        "averages": 0 if config.train.ema is None else state,
    }
    axes = config.parallel.axes
    data = ranks // axes.ranks
    over = config.parallel.shard_over or data
    if over == "machine":
        over = max(1, (config.ranks_of_machine(ranks) or ranks) // axes.ranks)
    among = over * axes.context  # ranks that split a sequence hold the same parameters
    level = SHARDS.index(config.parallel.shard)
    return {
        category: model.bytes_on_largest_rank(
            axes, number, among if level >= SHARDS.index(_SHARDED_FROM[category]) else 1
        )
        for category, number in each.items()
        if number
    }


def suggest_what_fits(
    config: Config,
    sizes: BatchSizes,
    model: ModelSize,
    phase: str,
    *,
    moving: int | None = None,
    lack: int | None = None,
) -> str:
    """Return a sentence on what would have fitted: a smaller micro-batch, another strategy, or why neither.

    `moving` is the number of bytes that grows with the microbatch, `lack` the number that was missing. If they are
    unknown, the sentence names what needs less memory, without the claim that it fits.
    """
    if not model.parameters and config.parallel.axes.split:
        return "rank 0 builds the whole model, and tries it on one microbatch, before it is split: " + (
            f"batch.micro: {sizes.micro} is what can be less" if sizes.micro > 1 else "batch.micro is 1 already"
        )
    if not model.parameters:
        return "no other strategy or batch size needs less: the whole model is built before it is split"
    ways = [
        *_smaller_microbatch(sizes.micro, phase, moving, lack),
        *_strategy_that_keeps_less(config, sizes.ranks * config.parallel.axes.ranks, model, lack),
    ]
    if ways:
        return f"by an estimate {' or '.join(ways)} " + ("needs less" if lack is None else "would have fitted")
    if lack is None:
        return "no strategy here splits more" + (
            "" if phase in _PHASES_BEFORE_BATCH else ", and batch.micro is 1 already"
        )
    tried = (
        "no strategy that splits more"
        if phase in _PHASES_BEFORE_BATCH
        else "neither a smaller batch.micro nor a strategy that splits more"
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


def _strategy_that_keeps_less(config: Config, ranks: int, model: ModelSize, lack: int | None) -> Iterator[str]:
    """Yield the strategy that splits least and saves `lack` bytes, if one does; the config's backend comes first.

    Strategies have the config's axes, or none.
    """
    here = sum(estimate_kept_bytes(config, ranks, model).values())
    more = SHARDS[SHARDS.index(config.parallel.shard) + 1 :]
    axes = config.parallel.axes
    for backend in sorted(registry.backend_names(), key=lambda name: name != config.backend):
        for strategy in (
            Strategy(backend, shard, axes=some) for some in dict.fromkeys((axes, Axes())) for shard in more
        ):
            if (at := _moved(config, strategy)) is None:
                continue
            there = sum(estimate_kept_bytes(at, ranks, model).values())
            if here - there >= (lack or 1):
                less, now = format_size(there), format_size(here)
                where = "a rank" if not axes.split else "on the largest rank"
                yield f"{strategy} (parameters, gradients and optimizer {less} {where}, here {now})"
                return


def _moved(config: Config, strategy: Strategy) -> Config | None:
    """Return the config in another strategy, or None if it cannot run there."""
    try:
        at = strategies.config_in_strategy(config, strategy)
        checks.check_can_run(at)
    except UniparError:
        return None
    return at
