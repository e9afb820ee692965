"""Payloads of a step of DDP, ZeroRedundancyOptimizer, FSDP2 and local SGD, as closed forms."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from unipar.backend.prediction.timeline import Payload, PredictedParameter, StepTimeline
from unipar.config import Config
from unipar_native.options import NativeOptions
from unipar_native.prediction.sharded import ShardedModel

FIRST_BUCKET_BYTES: Final = 2**20
"""Size of DDP's first bucket, whatever bucket_mb is: its reduction begins early."""

USED_FLAG_BYTES: Final = 4
"""Bytes with which DDP tells other ranks whether a parameter has been used."""

NORM_BYTES, FP64_NORM_BYTES = 4, 8
"""Bytes of each parameter's norm of FSDP2, all sent together; and of the sum of squares in fp64."""


def sent_by_ddp(timeline: StepTimeline, options: NativeOptions, ranks: int) -> tuple[Payload, ...]:
    """Return what DDP sends: gradients in buckets, flags of use where it searches for unused parameters, buffers."""
    if ranks == 1:
        return ()
    trained = [(number, p) for number, p in enumerate(timeline.parameters) if p.trained]
    ready = [p for _, p in sorted(trained, key=lambda each: timeline.gradient_at(each[0]))]
    size, calls = sum(p.size for p in ready), count_buckets(ready, options.bucket_mb * 2**20)
    unused = any(not timeline.has_gradient(number) for number, _ in trained)
    if options.find_unused is True or (options.find_unused == "auto" and unused):
        size, calls = size + USED_FLAG_BYTES * len(trained), calls + 1
    reduced = Payload("data", "all_reduce", size, calls, ranks)
    buffers = sum(timeline.buffers.values())
    return (reduced, Payload("data", "broadcast", buffers, 1, ranks)) if buffers else (reduced,)


def count_buckets(parameters: list[PredictedParameter], limit: int) -> int:
    """Return in how many buckets DDP sends gradients that are ready in this order."""
    count = filled = 0
    for p in parameters:
        filled += p.size
        if filled >= (limit if count else min(FIRST_BUCKET_BYTES, limit)):
            count, filled = count + 1, 0
    return count + bool(filled)


def updated_parameters(timeline: StepTimeline, ranks: int) -> Payload:
    """Return what ZeroRedundancyOptimizer sends: each rank's parameters, after it has updated them."""
    return Payload("data", "broadcast", sum(p.size for p in timeline.parameters if p.trained), ranks, ranks)


def averages(timeline: StepTimeline, config: Config, ranks: int) -> tuple[Payload, ...]:
    """Return what local SGD sends when it averages parameters and moments, as a mean over the steps between."""
    assert config.train.sync_every is not None
    if ranks == 1:
        return ()
    trained = [p for p in timeline.parameters if p.trained]
    size = sum(p.size + p.numel * sum(p.states) for p in trained)
    calls = sum(1 + len(p.states) for p in trained)
    every = config.train.sync_every
    return (Payload("data", "all_reduce", size // every, -(-calls // every), ranks),)


def sent_by_fsdp2(
    model: ShardedModel, copies: int, *, axis: str = "data", axis_of_copies: str = "data"
) -> Iterator[Payload]:
    """Yield what FSDP2 sends in a step: parameters gathered and gradients summed up, of each group that has some.

    `axis`: name of the ranks over which the model is sharded. `copies`: number of such shardings, averaged along
    `axis_of_copies`.
    """
    ranks, times = model.ranks, 1 if model.once else model.timeline.microbatches
    groups = [group for group, size in model.gathered.items() if size]
    again = [g for g in groups if (model.reshard_rest if g < 0 else model.reshard)]
    gathers = [model.gathered[g] for g in (*groups, *again)]
    reduces = [size for size in model.gradient_bytes.values() if size]
    if ranks > 1:
        yield Payload(axis, "all_gather", times * sum(gathers), times * len(gathers), ranks)
        yield Payload(axis, "reduce_scatter", times * sum(reduces), times * len(reduces), ranks)
    if copies > 1:
        yield Payload(axis_of_copies, "all_reduce", times * sum(reduces) // ranks, times * len(reduces), copies)


def norm_of_fsdp2(model: ShardedModel, *, fp64: bool) -> tuple[Payload, ...]:
    """Return what the norm of all gradients sends: the norm of each in one call, or in fp64 the sum of squares."""
    if model.ranks == 1:
        return ()
    size = FP64_NORM_BYTES if fp64 else NORM_BYTES * sum(p.trained for p in model.timeline.parameters)
    return (Payload("data", "all_reduce", size, 1, model.ranks),)
