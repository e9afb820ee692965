"""What is asked for, checked before a start; how steps are cut into turns."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from unipar.backend.checks import CheckedSource
from unipar.config import Config
from unipar.config.sections.batch import Batch
from unipar.config.source import Given
from unipar.errors import ConfigError
from unipar.launcher.prepare import Prepared, prepare
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

NO_MEMORY_NOTE = "memory was not watched"


@dataclass(frozen=True)
class TurnSchedule:
    """How a comparison's steps are cut: to warm up, watched, in timed rounds."""

    warmup: int
    rounds: tuple[int, ...]
    memory_passes: tuple[str, ...] = ()

    @classmethod
    def of(cls, config: Config, *, memory: bool = False) -> Self:
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
        return cls(warmup, tuple(each + (i < more) for i in range(repeat)), watched)


@dataclass(frozen=True)
class CompareRequest:
    """What is to be trained in turns; all that can be known without a process was looked at."""

    prepared: Prepared
    ref: TaskRef
    turns: TurnSchedule
    meter_environment: Mapping[str, str] | None
    """What makes workers count what they allocate; None where memory is not watched."""

    unwatched: str
    """Why it is not."""

    @property
    def source(self) -> CheckedSource:
        return self.prepared.source

    @classmethod
    def of(
        cls,
        config: Given,
        overrides: Mapping[str, Any] | None,
        task: type[Task] | None,
        starts: str,
    ) -> Self:
        """`starts`: what a launcher that started this process would make of it."""
        prepared = prepare(config, task, overrides, starts=starts)
        assert prepared.ref is not None
        turns, meter, unwatched = _make_schedule(prepared)
        return cls(prepared, prepared.ref, turns, meter, unwatched)


def _make_schedule(prepared: Prepared) -> tuple[TurnSchedule, dict[str, str] | None, str]:
    """Its turns; what makes workers count what they allocate, or None and why."""
    config = prepared.source.config
    meter, unwatched = _meter_environment(config, prepared.device)
    turns = TurnSchedule.of(config, memory=meter is not None)
    if meter is None or len(turns.memory_passes) == len(PASSES_BY_IMPORTANCE):
        return turns, meter, unwatched
    leaves = f"train.steps: {config.train.steps} leaves no"
    if not turns.memory_passes:
        return turns, None, f"{NO_MEMORY_NOTE}: {leaves} step for it beside those that are timed"
    blind = "" if "sent" in turns.memory_passes else ", so that what a step sends was not seen"
    enough = turns.warmup + len(turns.rounds) + len(PASSES_BY_IMPORTANCE)
    few = f"memory was watched in {count_of(len(turns.memory_passes), 'step')}{blind}: {leaves} more; {enough} would"
    return turns, meter, "; ".join(filter(None, [few, unwatched]))


def _meter_environment(config: Config, device: str) -> tuple[dict[str, str] | None, str]:
    """What makes workers count what they allocate, which is nothing for CUDA's memory; or None; and why."""
    if not config.compare.memory:
        return None, ""
    on_cuda = device != "cpu"
    if on_cuda and (why := why_no_history(os.environ)):
        return None, f"{NO_MEMORY_NOTE}: {why}"
    try:
        return preload_environment(build_meter()), ""
    except MeterUnavailable as e:
        if on_cuda:
            return {}, f"{NO_MEMORY_NOTE}: of the host, {e}"
        return dict(METER_ENVIRONMENT), f"of memory torch's own tensors alone were watched: {e}"


def threads_per_rank(widest: int) -> str:
    """Of a rank, so that those of the largest world share the cores."""
    return os.environ.get("OMP_NUM_THREADS", str(cores_per_rank(widest)))


def parse_world_sizes(worlds: Sequence[int] | str) -> list[int]:
    """The smallest first; `1,2,4` is a list, too."""
    if isinstance(worlds, str):
        words = [word.strip() for word in worlds.split(",")]
        if not all(word.isdecimal() for word in words):
            raise ConfigError(f"--world: {worlds!r} is no list of sizes; put commas between them (--world 1,2,4)")
        worlds = [int(word) for word in words]
    made = sorted(set(worlds))
    if len(made) < 2 or made[0] < 1:
        raise ConfigError(
            f"--world: {','.join(map(str, worlds)) or 'none'} does not scale: "
            "give two sizes or more, each of at least 1 (--world 1,2)"
        )
    return made


def batch_with_fixed_total(batch: Batch, smallest: int) -> Batch:
    """What keeps the total batch of the smallest world in every other one."""
    least = batch.settle(smallest)
    return batch if batch.total is not None else Batch(total=least.total, accumulate=least.accumulate)
