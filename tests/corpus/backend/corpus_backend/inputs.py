"""Errors in what a rank reads, and in the model that it computes with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

import torch
from typing_extensions import override

from tests.support.healthy_engines import HealthyDDP
from unipar.backend import Part
from unipar.config import Config
from unipar.data.microbatch_loader import MicrobatchLoader
from unipar.data.order import MicrobatchPlan, SampleOrder, split_batch
from unipar.distributed.world import World


class OtherPlans(HealthyDDP):
    """Base of engines whose ranks read something else, until they are closed."""

    def __init__(self, part: Part, config: Config, world: World) -> None:
        super().__init__(part, config, world)
        self._plans, self._permutation = MicrobatchLoader.plans, SampleOrder.permutation
        self.read_otherwise()

    def read_otherwise(self) -> None:
        """Replace what a loader reads."""
        raise NotImplementedError

    @override
    def close(self) -> None:
        MicrobatchLoader.plans, SampleOrder.permutation = self._plans, self._permutation


@final
class SameSamples(OtherPlans):
    """The stream is not split by rank: each process iterates over all of it."""

    @override
    def read_otherwise(self) -> None:
        plans = self._plans

        def first_rank(self: MicrobatchLoader, start: int) -> Iterator[list[MicrobatchPlan]]:
            self.rank = 0
            return plans(self, start)

        MicrobatchLoader.plans = first_rank


@final
class SplitTwice(OtherPlans):
    """The stream of a rank, split already, is split over the ranks once more: half of its batches are skipped."""

    @override
    def read_otherwise(self) -> None:
        def every_other(self: MicrobatchLoader, start: int) -> Iterator[list[MicrobatchPlan]]:
            sizes, rank = self.sizes, self.rank or 0
            for number, (epoch, batch) in enumerate(self.order.batches(start)):
                if number % sizes.ranks == rank:
                    cuts = split_batch(batch, sizes.accumulate, sizes.ranks)
                    yield [MicrobatchPlan([(epoch, i) for i in cut[rank]], len(cut[rank]) / len(batch)) for cut in cuts]

        MicrobatchLoader.plans = every_other


@final
class SameOrder(OtherPlans):
    """The sampler is not told the epoch, and shuffles by that of the first."""

    @override
    def read_otherwise(self) -> None:
        permutation = self._permutation

        def first_epoch(self: SampleOrder, epoch: int) -> list[int]:
            return permutation(self, 0)

        SampleOrder.permutation = first_epoch


@final
class Bf16Table(HealthyDDP):
    """The library casts buffers along with the parameters: the table of frequencies loses its digits."""

    def __init__(self, part: Part, config: Config, world: World) -> None:
        super().__init__(part, config, world)
        for buffer in part.module.buffers():
            buffer.copy_(buffer.to(torch.bfloat16))


@final
class MoreDigits(HealthyDDP):
    """The layers that compute in fewer digits are not used."""

    def __init__(self, part: Part, config: Config, world: World) -> None:
        super().__init__(part, config, world)
        self.call.autocast = self.call.cast = None
