"""`try_largest`: steps on the largest microbatches of a run, so that a lack of memory shows before the first step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from unipar.backend import Engine, Micro
from unipar.data.microbatch_loader import MicrobatchLoader
from unipar.data.order import MicrobatchPlan, SampleKey
from unipar.data.token_split import padded_tokens
from unipar.distributed.device import has_own_memory, peak_bytes_allocated
from unipar.distributed.world import World
from unipar.engines.batch_transfer import to_device
from unipar.errors import OutOfMemory, TaskError
from unipar.task import Task
from unipar.utils.text import format_size


class TriedRun(Protocol):
    """Part of a run in training that is needed to try microbatches."""

    task: Task
    world: World
    device: torch.device
    rank: int

    @property
    def parts(self) -> Mapping[str, object]:
        """Parts that are trained, by name."""
        ...

    @property
    def engine(self) -> Engine:
        """Engine of the model."""
        ...

    @property
    def loader(self) -> object:
        """Loader of this rank."""
        ...

    def mark(self, phase: str) -> None:
        """Set the phase of the heartbeat."""
        ...


@dataclass(frozen=True)
class MeanStep:
    """A step of a rank in the mean of several."""

    micro: float
    """Samples, or padded tokens, of a microbatch."""

    microbatches: float
    total: float
    """Samples, or tokens without padding, of all ranks."""


@dataclass(frozen=True)
class LargestMicrobatches:
    """Samples of the largest microbatches, and how many microbatches a rank has in a step at most."""

    fullest: list[SampleKey]
    """Microbatch of the first epoch that has most tokens, with padding."""

    longest: list[SampleKey]
    """As many of the longest samples of the data as `batch.micro` holds; without it, the longest one."""

    rounds: int
    """Microbatches of a rank in a step at most."""

    mean: MeanStep
    """Mean of the first epoch."""

    def steps(self) -> list[list[list[SampleKey]]]:
        """Return the microbatches of each step to try: from the second on, states of the optimizer are there."""
        if self.rounds > 1:
            return [[self.longest, self.fullest], [self.fullest, self.longest]]
        return [[self.longest], [self.fullest], [self.longest]]


def find_largest_microbatches(loader: MicrobatchLoader) -> LargestMicrobatches:
    """Return the largest microbatches of a loader whose batches are counted in tokens."""
    limits, lengths = loader.sizes.tokens, loader.lengths
    assert limits is not None
    assert lengths is not None
    full_loader = copy(loader)  # of the same order: a sampler is not drawn again
    full_loader.rank = None
    steps = list(islice(full_loader.plans(0), full_loader.order.per_epoch))

    def padded(plan: MicrobatchPlan) -> tuple[int, int]:
        mine = [i for _, i in plan.keys]
        return padded_tokens(mine, lengths.of, packed=limits.packed), max(lengths.of[i] for i in mine)

    fullest = max((plan for step in steps for plan in step), key=padded)
    ordered = sorted(range(len(lengths.of)), key=lambda i: -lengths.of[i])
    most = None if limits.micro is None else min(limits.micro, loader.sizes.total)  # a step has no more than its budget
    count = 1 if most is None else max(1, most // lengths.longest)
    rounds = max(map(len, steps)) // loader.sizes.ranks
    number = sum(map(len, steps))
    mean = MeanStep(
        sum(padded(plan)[0] for step in steps for plan in step) / number,
        number / loader.sizes.ranks / len(steps),
        sum(step[0].of_tokens for step in steps) / len(steps),
    )
    return LargestMicrobatches(fullest.keys, [(0, i) for i in ordered[:count]], rounds, mean)


def try_largest(live: TriedRun, is_lack: Callable[[BaseException], bool]) -> tuple[MicrobatchLoader, str]:
    """Do steps on the largest microbatches in a run that is thrown away; return its loader, and a sentence on them.

    All ranks work on the same samples at the same time. Raise OutOfMemory, with the sizes, if they do not fit;
    `is_lack`: whether an error means that.
    """
    if len(live.parts) > 1:
        raise TaskError(
            f"batch.memory_check: true: model() returned several parts ({', '.join(live.parts)}), and which loss each "
            "takes is known to the task's loop alone; leave it out"
        )
    if not live.task.defines("data"):
        raise TaskError(
            "batch.memory_check: true: the task has no data(), and the loader of run.over() is known later; leave it "
            "out"
        )
    loader, engine, shares = live.loader, live.engine, live.world.data_size
    assert isinstance(loader, MicrobatchLoader)  # a stream is refused under batch.tokens
    largest = find_largest_microbatches(loader)
    described = f"{_described(largest.longest, loader)} and {_described(largest.fullest, loader)}"

    def loss(model: nn.Module, batch: Any, number: int) -> Tensor:
        return live.task.loss(model, batch)

    peak = 0
    try:
        for step in largest.steps():
            live.mark("data")
            micros = [
                Micro(to_device(loader.read(keys), live.device), 1.0 / (shares * len(step)), number)
                for number, keys in enumerate(step)
            ]
            engine.step(loss, micros, 1.0, live.mark)
        if has_own_memory(live.device):
            peak = peak_bytes_allocated(live.device)
    except Exception as e:
        if not is_lack(e):
            raise
        raise OutOfMemory(
            f"batch.memory_check: rank {live.rank} has no memory for the largest microbatches of the run, {described} "
            f"({str(e).partition(chr(10))[0]}): lower batch.micro, or cut samples to a smaller batch.max_length"
        ) from e
    live.mark("start")
    used = f", peak {format_size(peak)}" if peak else ""
    return loader, f"the largest microbatches, {described}, were tried before the first step{used}"


def _described(keys: Sequence[SampleKey], loader: MicrobatchLoader) -> str:
    assert loader.lengths is not None
    lengths = [loader.lengths.of[i] for _, i in keys]
    return f"{len(lengths)} x {max(lengths)} tokens"
