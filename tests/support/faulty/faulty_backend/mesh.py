"""The native engine of one mesh, and one thing wrong with it: each fault is put in after the engine has proved itself.

What the proof before the first step sees is planted without it, as `skip-across-cut` is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from unipar_native.mesh import engine as native
from unipar_native.mesh.stage import Arrival

from unipar.backend import Engine, Part
from unipar.config import Config
from unipar.data.feed import MicrobatchFeed
from unipar.data.order import MicrobatchPlan
from unipar.distributed.world import World

UNPROVED = ("skip-across-cut",)
"""Faults that the proof before the first step refuses."""


def plant(fault: str, part: Part, config: Config, world: World) -> Engine:
    """Return the native engine with a fault."""
    if fault in UNPROVED:
        with mock.patch.object(native, "prove"):
            return native.MeshEngine(part, config, world)
    engine = native.MeshEngine(part, config, world)
    if fault in PLANTS:
        PLANTS[fault](engine)
    return engine


def _tied_not_summed(engine: Any) -> None:
    """Each stage keeps its own part of the gradient of what several stages use."""
    engine.finish_reduction = lambda: None


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
    plans = MicrobatchFeed.plans

    def reversed_plans(self: MicrobatchFeed, start: int) -> Iterator[list[MicrobatchPlan]]:
        return (step[::-1] for step in plans(self, start))

    def restore() -> None:
        MicrobatchFeed.plans = plans

    MicrobatchFeed.plans, engine.close = reversed_plans, restore


def _stale_statistics(engine: Any) -> None:
    """Rank 0 speaks for buffers, as it does where all ranks run all modules."""

    def first_rank(name: str) -> int:
        return 0

    engine._home_of_buffer = first_rank


PLANTS: dict[str, Callable[[Any], None]] = {
    "tied-not-summed": _tied_not_summed,
    "norm-counts-twice": _norm_counts_twice,
    "same-masks": _same_masks,
    "world-times": _world_times,
    "loss-of-each-rank": _loss_of_each_rank,
    "other-samples": _other_samples,
    "stale-statistics": _stale_statistics,
}
