"""Bytes sent of a step of DDP, ZeroRedundancyOptimizer, FSDP2 and local SGD, as closed forms."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Final, Literal, NamedTuple

from unipar.config import Config
from unipar.prediction.fsdp2_groups import ShardedModel
from unipar.prediction.timeline import CommVolume, PredictedParameter, StepTimeline

LIBRARY_BUCKETS: Final = (2**20, 25 * 2**20)
"""Sizes of DDP's first bucket and of all others if it is told none: the first is sent early."""

USED_FLAG_BYTES: Final = 4
"""Bytes with which DDP tells other ranks whether a parameter has been used."""

EMPTY_BUCKET_BYTES: Final = 4
"""Bytes that stand for the parameters of a rank that has none."""

NORM_BYTES, FP64_NORM_BYTES = 4, 8
"""Bytes of each parameter's norm of FSDP2, all sent together; and of the sum of squares in fp64."""


class DDPBuckets(NamedTuple):
    """Sizes of the buckets in which DDP sends gradients, and its search for unused parameters."""

    limits: Sequence[int]
    """Bytes at which a bucket is full, one after another; the last of them holds for all that follow."""

    find_unused_parameters: bool | Literal["auto"]


def sent_by_ddp(timeline: StepTimeline, buckets: DDPBuckets, ranks: int) -> tuple[CommVolume, ...]:
    """Return what DDP sends: gradients in buckets, and flags of use where it searches for unused parameters."""
    if ranks == 1:
        return ()
    trained = [(number, p) for number, p in enumerate(timeline.parameters) if p.trained]
    size = sum(p.size for _, p in trained)
    unused = any(not timeline.has_gradient(number) for number, _ in trained)
    if buckets.find_unused_parameters is True or (buckets.find_unused_parameters == "auto" and unused):
        calls = count_buckets(
            [p for _, p in trained], buckets.limits
        )  # it does not learn their order, and keeps its first
        return (CommVolume("data", "all_reduce", size + USED_FLAG_BYTES * len(trained), calls + 1, ranks),)
    ready = [p for _, p in sorted(trained, key=lambda each: timeline.gradient_at(each[0]))]
    return (CommVolume("data", "all_reduce", size, count_buckets(ready, buckets.limits), ranks),)


def count_buckets(parameters: Sequence[PredictedParameter], limits: Sequence[int]) -> int:
    """Return in how many buckets DDP puts parameters in this order: each bucket has one dtype, and closes when full."""
    closed: Counter[int] = Counter()
    filled: Counter[int] = Counter()
    for p in parameters:
        filled[p.element_size] += p.size
        if filled[p.element_size] >= limits[min(closed[p.element_size], len(limits) - 1)]:
            closed[p.element_size] += 1
            filled[p.element_size] = 0
    return closed.total() + sum(size > 0 for size in filled.values())


def updated_parameters(timeline: StepTimeline, ranks: int) -> CommVolume:
    """Return what ZeroRedundancyOptimizer sends: each rank's parameters, after it has updated them.

    A rank that has none sends one number of fp32.
    """
    idle = sum(not share for share in shares_of_ranks(timeline, ranks))
    size = sum(p.size for p in timeline.parameters if p.trained) + EMPTY_BUCKET_BYTES * idle
    return CommVolume("data", "broadcast", size, ranks, ranks)


def shares_of_ranks(timeline: StepTimeline, ranks: int) -> Sequence[Sequence[PredictedParameter]]:
    """Return the parameters of which each rank has the optimizer's state: the largest first, to who has least.

    ZeroRedundancyOptimizer goes from one of the optimizer's groups to the next.
    """
    shares: list[list[PredictedParameter]] = [[] for _ in range(ranks)]
    sizes = [(0, rank) for rank in range(ranks)]
    for p in sorted((p for p in timeline.parameters if p.trained), key=lambda p: (p.group, -p.numel)):
        size, rank = heapq.heappop(sizes)
        shares[rank].append(p)
        heapq.heappush(sizes, (size + p.numel, rank))
    return shares


def averages(timeline: StepTimeline, config: Config, ranks: int) -> tuple[CommVolume, ...]:
    """Return what local SGD sends when it averages parameters and moments, as a mean over the steps between."""
    assert config.train.local_steps is not None
    if ranks == 1:
        return ()
    trained = [p for p in timeline.parameters if p.trained]
    size = sum(p.size + p.numel * sum(p.states) for p in trained)
    calls = sum(1 + len(p.states) for p in trained)
    every = config.train.local_steps
    return (CommVolume("data", "all_reduce", size // every, -(-calls // every), ranks),)


def sent_by_fsdp2(
    model: ShardedModel,
    copies: int,
    *,
    axis: str = "data",
    axis_of_copies: str = "data",
    stride: int | None = None,
    stride_of_shards: int = 1,
    passes: int = 1,
    groups: Collection[int] | None = None,
) -> Iterator[CommVolume]:
    """Yield what FSDP2 sends in a step: parameters gathered and gradients summed up, of each group that has some.

    `axis`: name of the ranks over which the model is sharded. `copies`: number of such shardings, averaged along
    `axis_of_copies`, in which they are `stride` ranks apart (None: as many as a copy has). `passes`: times that a
    microbatch goes through the rank, each of which gathers the rest. `groups`: those that are sharded alike, if not all
    are, over ranks that are `stride_of_shards` apart.
    """
    order = [g for g in model.order if groups is None or g in groups]
    again = [g for g in model.gathered_again if g in order]
    ranks, times = model.ranks_in(order[0]) if order else 1, 1 if model.once else model.timeline.microbatches
    gathers = [model.gathered[g] for g in (*order, *again)]
    if not model.once:
        gathers += (passes - 1) * [model.gathered[g] for g in (*order, *again) if g < 0]
    reduces = [size for g in order if (size := model.gradient_bytes[g])]
    if ranks > 1:
        yield CommVolume(axis, "all_gather", times * sum(gathers), times * len(gathers), ranks, stride_of_shards)
        yield CommVolume(axis, "reduce_scatter", times * sum(reduces), times * len(reduces), ranks, stride_of_shards)
    if copies > 1 and reduces:
        size, calls = times * sum(reduces) // ranks, times * len(reduces)
        yield CommVolume(axis_of_copies, "all_reduce", size, calls, copies, stride or ranks)


def norm_of_fsdp2(model: ShardedModel, copies: int, *, fp64: bool) -> tuple[CommVolume, ...]:
    """Return what the norm of all gradients sends: the norm of each in one call, or in fp64 the sum of squares.

    Norms are summed up over the ranks that split a copy, squares over all ranks.
    """
    if model.ranks == 1:
        return ()
    if fp64:
        return (CommVolume("data", "all_reduce", FP64_NORM_BYTES, 1, model.ranks * copies),)
    size = NORM_BYTES * sum(p.trained for p in model.timeline.parameters)
    return (CommVolume("data", "all_reduce", size, 1, model.ranks),)
