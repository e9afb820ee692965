"""A comparison as requested, checked before a start; its steps divided into turns."""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Self

from unipar.backend.checks import CheckedSource
from unipar.comparison.strategy_world import TURNS_MODULE
from unipar.config import BatchSizes, Config
from unipar.config.config_source import Given
from unipar.config.sections.batch import Batch
from unipar.errors import ConfigError
from unipar.launcher.micro_batch.choice import ChosenMicro
from unipar.launcher.preparation.prepare import Prepared, prepare
from unipar.launcher.processes.starters import SharedForkServer, may_fork
from unipar.launcher.remote.across import StarterOnMachines, starter_on_machines
from unipar.launcher.strategy_selection import settle_one_micro
from unipar.memory.account import PASSES_BY_IMPORTANCE, PASSES_IN_ORDER
from unipar.memory.sources.malloc_build import (
    METER_ENVIRONMENT,
    MeterUnavailable,
    build_meter,
    preload_environment,
    why_no_history,
)
from unipar.task import Task
from unipar.task.reference import TaskRef
from unipar.utils.procfs import cores_per_rank
from unipar.utils.text import count_of

NO_MEMORY_NOTE = "memory was not recorded"


@dataclass(frozen=True)
class TurnSchedule:
    """Division of a comparison's steps: warm-up, steps in which memory is recorded, timed rounds."""

    warmup: int
    rounds: tuple[int, ...]
    memory_passes: tuple[str, ...] = ()

    @classmethod
    def of(cls, config: Config, *, memory: bool = False) -> Self:
        """Return the division of a config's steps; raise ConfigError if there are too few; `memory`: it is recorded."""
        steps, repeat = config.train.steps, config.compare.repeat
        if steps is None:
            raise ConfigError(
                f"train.epochs: {config.train.epochs} cannot be cut into turns, which are counted in steps; "
                "give train.steps instead (--set train.steps=50)"
            )
        if steps < repeat + 1:
            raise ConfigError(
                f"train.steps: {steps} is too few to compare: 1 to warm up and {repeat} timed rounds "
                f"(compare.repeat) of at least 1 make {repeat + 1}"
            )
        warmup = min(2, steps - repeat)
        spare = steps - warmup - repeat if memory else 0
        watched = tuple(sorted(PASSES_BY_IMPORTANCE[:spare], key=PASSES_IN_ORDER.index))
        each, more = divmod(steps - warmup - len(watched), repeat)
        turns = cls(warmup, tuple(each + (i < more) for i in range(repeat)), watched)
        turns.check_trace(config)
        return turns

    def check_trace(self, config: Config) -> None:
        """Raise ConfigError unless steps to be traced are in one timed round, and leave some of it to be timed."""
        if (trace := config.log.trace) is None:
            return
        begin, rounds = self.warmup + len(self.memory_passes) + 1, list[range]()
        for steps in self.rounds:
            rounds.append(range(begin, begin + steps))
            begin += steps
        first, last = trace.steps
        if not any(first in steps and last in steps and last - first + 1 < len(steps) for steps in rounds):
            named = ", ".join(f"{steps[0]} to {steps[-1]}" for steps in rounds)
            raise ConfigError(
                f"log.trace.steps: [{first}, {last}] must be within one timed round of steps, and fewer than it has: "
                f"the rounds are {named}; choose others, a larger train.steps, or leave log.trace out"
            )


@dataclass(frozen=True)
class CompareRequest:
    """Training that is to be compared, after all checks that need no process."""

    prepared: Prepared
    ref: TaskRef
    turns: TurnSchedule
    meter_environment: Mapping[str, str] | None
    """Variables that make workers record their allocations; None if memory is not recorded."""

    unwatched: str
    """Reason why memory is not recorded, or not completely."""

    micro: ChosenMicro | None = None
    """Microbatch of all strategies, if it was found by trial."""

    machines: StarterOnMachines | None = None
    """Starter of workers on several machines; None: all are on this one."""

    @property
    def source(self) -> CheckedSource:
        """Config as given, with its name, folder and backend."""
        return self.prepared.source

    def settle_micro(self, patterns: Sequence[str], worlds: Sequence[int]) -> Self:
        """Return the same with one microbatch for all strategies and numbers of ranks, if its config says auto."""
        if not self.source.config.batch.is_auto:
            return self
        prepared, micro = settle_one_micro(self.prepared, patterns, worlds)
        return replace(self, prepared=prepared, micro=micro)

    def fork_server(self) -> SharedForkServer:
        """Return the process from which the workers of all strategies are forked; it counts memory if they do."""
        use = may_fork(self.source.config, self.prepared.device)
        use = use and self.machines is None
        return SharedForkServer([TURNS_MODULE], self.meter_environment, use=use, starter=self.machines)

    @contextmanager
    def on_machines(self, widest: int) -> Generator[Self]:
        """Context manager: the same, with the machines of the launcher that started this process, if they are several.

        `widest`: ranks of the largest world. On the other machines this does not return: see `starter_on_machines`.
        """
        with starter_on_machines(self.source.config, self.prepared.place) as machines:
            if machines is not None:
                machines.spread(widest)
            yield replace(self, machines=machines)

    def ranks_here(self, ranks: int) -> int:
        """Return how many of the ranks are on this machine, the fullest one."""
        return min(ranks, self.machines.per or ranks) if self.machines is not None else ranks

    def machines_of(self, ranks: int) -> int:
        """Return on how many machines the ranks are."""
        return self.machines.machines_of(ranks) if self.machines is not None else 1

    @classmethod
    def of(
        cls,
        config: Given,
        overrides: Mapping[str, Any] | None,
        task: type[Task] | None,
        starts: str,
    ) -> Self:
        """Return the request after all checks; `starts`: first part of the error under a foreign launcher."""
        prepared = prepare(config, task, overrides, starts=starts)
        assert prepared.ref is not None
        turns, meter, unwatched = _make_schedule(prepared)
        return cls(prepared, prepared.ref, turns, meter, unwatched)


def _make_schedule(prepared: Prepared) -> tuple[TurnSchedule, dict[str, str] | None, str]:
    """Return the turns, the variables that make workers record allocations (or None), and why something is missing."""
    config = prepared.source.config
    meter, unwatched = _meter_environment(config, prepared.device)
    turns = TurnSchedule.of(config, memory=meter is not None)
    if meter is None or len(turns.memory_passes) == len(PASSES_BY_IMPORTANCE):
        return turns, meter, unwatched
    leaves = f"train.steps: {config.train.steps} leaves no"
    if not turns.memory_passes:
        return turns, None, f"{NO_MEMORY_NOTE}: {leaves} step for it besides the timed ones"
    blind = "" if "sent" in turns.memory_passes else ", communication in none"
    enough = turns.warmup + len(turns.rounds) + len(PASSES_BY_IMPORTANCE)
    steps = f"memory was recorded in {count_of(len(turns.memory_passes), 'step')}{blind}"
    few = f"{steps}: {leaves} more; {enough} steps are enough"
    return turns, meter, "; ".join(filter(None, [few, unwatched]))


def _meter_environment(config: Config, device: str) -> tuple[dict[str, str] | None, str]:
    """Return the variables that make workers record allocations, or None, and what is not recorded.

    CUDA's memory needs no variables: the result is an empty mapping if only that is recorded.
    """
    if not config.compare.memory:
        return None, ""
    on_cuda = device != "cpu"
    if on_cuda and (why := why_no_history(os.environ)):
        return None, f"{NO_MEMORY_NOTE}: {why}"
    try:
        return preload_environment(build_meter()), ""
    except MeterUnavailable as e:
        if on_cuda:
            return {}, f"the host's {NO_MEMORY_NOTE}: {e}"
        return dict(METER_ENVIRONMENT), f"memory was recorded of torch's own tensors only: {e}"


def threads_per_rank(widest: int) -> str:
    """Return the number of threads of each rank: the cores divided by the ranks of the largest world."""
    return os.environ.get("OMP_NUM_THREADS", str(cores_per_rank(widest)))


def parse_world_sizes(worlds: Sequence[int] | str) -> list[int]:
    """Return the sizes in ascending order, from numbers or from a text such as `1,2,4`."""
    if isinstance(worlds, str):
        words = [word.strip() for word in worlds.split(",")]
        if not all(word.isdecimal() for word in words):
            raise ConfigError(f"--world: {worlds!r} is not a list of sizes; put commas between them (--world 1,2,4)")
        worlds = [int(word) for word in words]
    sizes = sorted(set(worlds))
    if len(sizes) < 2 or sizes[0] < 1:
        raise ConfigError(
            f"--world: {','.join(map(str, worlds)) or 'none'} does not scale: "
            "give two sizes or more, each of at least 1 (--world 1,2)"
        )
    return sizes


def batch_with_fixed_total(batch: Batch, smallest: int) -> Batch:
    """Return a batch that has the total of the smallest world in every other world."""
    if batch.size is not None:
        return batch
    least = batch.settle(smallest)
    return Batch(total=least.total, accumulate=least.accumulate)


def batch_with_share(batch: Batch, least: BatchSizes, data: int) -> Batch:
    """Return a batch in which each of `data` ranks has its share of `least`, the batch of a smaller world."""
    if batch.tokens is None:
        return Batch(micro=least.micro, accumulate=least.accumulate)
    return batch.model_copy(update={"tokens": least.total * data // least.ranks})
