"""`make_forecast`: planning of a comparison's strategies, in a process of its own, which can end nothing but itself."""

from __future__ import annotations

import socket
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pydantic import ValidationError

from unipar.backend import Category, registry
from unipar.backend.offered_strategies import is_single_process
from unipar.comparison.make_plan import PlanLimits, StrategyPlanner, import_what_traces, traced_config
from unipar.config import BatchSizes, Config
from unipar.config.sections.batch import Batch
from unipar.config.settled import SettledConfig
from unipar.distributed.gpus import smallest_gpu_memory
from unipar.distributed.place import Place
from unipar.errors import ConfigError, Stopped, UniparError
from unipar.launcher.processes.group import WorkerGroup
from unipar.launcher.processes.starters import SharedForkServer
from unipar.results.forecast.records import Forecast, ForecastPhase, ForecastWorld, MemorySource, StrategyForecast
from unipar.run_folder import folder
from unipar.run_folder.layout import read_launch_file
from unipar.task.reference import TaskRef
from unipar.utils.files import write_file_atomically
from unipar.utils.procfs import memory_limit_bytes
from unipar.utils.text import format_duration

if TYPE_CHECKING:
    from unipar.planning.peaks import PredictedPeak
    from unipar.planning.planned_strategy import PlannedStrategy
    from unipar.task import Task

FORECAST_ENTRY: Final = f"{__name__}:write_forecast"
MOST_SECONDS: Final = 120.0
"""Seconds after which planning is ended."""

_SECONDS_BETWEEN_LOOKS = 0.1

OTHER_WORLDS: Final = tuple(2**i for i in range(11))
"""Numbers of ranks for which each strategy is planned besides the compared one."""


def make_forecast(
    compared: SettledConfig,
    strategies: Sequence[SettledConfig],
    ref: TaskRef,
    server: SharedForkServer,
    threads: str,
    most_seconds: float = MOST_SECONDS,
    *,
    per: int | None = None,
) -> Forecast:
    """Return the predictions for these strategies; if there are none, a forecast that says why. No error is raised.

    `per`: ranks of a machine, of several; None: all ranks of the compared world are on this one.
    """
    size, source = device_memory(compared)
    asked = Forecast(
        device="cpu" if compared.device == "cpu" else "cuda",
        ranks=compared.ranks,
        samples=compared.sizes.total,
        unit=compared.sizes.unit,
        share=compared.sizes.local,
        memory=size,
        memory_from=source,
        headroom=compared.config.batch.headroom,
        per=per or compared.ranks,
    )
    try:
        with tempfile.TemporaryDirectory(prefix="unipar-plan-") as place:
            return _in_process(asked, compared, strategies, ref, server, threads, Path(place) / "run", most_seconds)
    except (KeyboardInterrupt, Stopped):
        why = "planning was interrupted"
    except (UniparError, ValidationError, OSError) as e:
        why = f"planning failed: {str(e).partition(chr(10))[0]}"
    return asked.model_copy(update={"problem": why})


def _in_process(
    asked: Forecast,
    compared: SettledConfig,
    strategies: Sequence[SettledConfig],
    ref: TaskRef,
    server: SharedForkServer,
    threads: str,
    run: Path,
    most_seconds: float,
) -> Forecast:
    texts = compared.texts({"task": ref.to_json(), "forecast": job_of(asked, compared, strategies)})
    began = time.monotonic()
    with (
        folder.create_run_folder(run, *texts, overwrite=False),
        WorkerGroup(
            run,
            1,
            FORECAST_ENTRY,
            environment={"OMP_NUM_THREADS": threads},
            pickled_task=ref.pickled_task,
            starter=server.starter_of(registry.find_backend(strategies[0].strategy.backend)),
        ) as workers,
    ):
        while not workers.poll(_SECONDS_BETWEEN_LOOKS):
            if time.monotonic() - began > most_seconds:
                why = f"planning took more than {format_duration(most_seconds)} and was ended; try `unipar plan`"
                return asked.model_copy(update={"problem": why})
    return Forecast.model_validate_json(forecast_path(run).read_bytes())


def device_memory(compared: SettledConfig) -> tuple[int | None, MemorySource]:
    """Return the memory of a rank's device and where the number is from: batch.memory, the GPU, or this machine."""
    config: Config = compared.config
    if config.batch.memory is not None:
        return config.batch.memory, "batch.memory"
    try:
        if compared.device == "cpu":
            return memory_limit_bytes(), "machine"
        shared_by = compared.ranks if ":" in compared.device else 1
        return smallest_gpu_memory() // shared_by, "GPU"
    except (OSError, ValueError, LookupError):
        return None, ""


def job_of(asked: Forecast, compared: SettledConfig, strategies: Sequence[SettledConfig]) -> Mapping[str, Any]:
    """Return the job of `write_forecast`, as launch.json holds it."""
    return {
        "asked": asked.model_dump(mode="json"),
        "config": compared.config.json_for_ranks(),
        "strategies": [{"config": at.config.json_for_ranks(), "settled": at.to_json()} for at in strategies],
    }


def forecast_path(run: Path) -> Path:
    """Return the path of the file with the predictions."""
    return run / "forecast.json"


def write_forecast(place: Place, run: Path, control: socket.socket | None) -> None:
    """Plan the strategies that launch.json names, and write the forecast; a worker's entry."""
    from unipar.training.task_facts import prepare_task

    launch = read_launch_file(run)
    job = launch["forecast"]
    compared = SettledConfig.from_json(job["config"], launch["settled"])
    strategies = [SettledConfig.from_json(each["config"], each["settled"]) for each in job["strategies"]]
    import_what_traces()
    began = time.process_time()
    asked = Forecast.model_validate(job["asked"], strict=False)
    task = TaskRef.from_json(launch["task"]).load()
    prepare_task(task)
    forecaster = Forecaster(compared, task, asked)
    planned = tuple(forecaster.forecast(strategy) for strategy in strategies)
    changes = {"strategies": planned, "notes": forecaster.notes, "seconds": time.process_time() - began}
    write_file_atomically(forecast_path(run), asked.model_copy(update=changes).model_dump_json())


@dataclass(frozen=True)
class Forecaster:
    """A comparison's task on tensors without memory, and the worlds for which strategies are planned."""

    compared: SettledConfig
    """Config of the comparison in its own strategy."""

    task: Task
    asked: Forecast
    """The forecast without its strategies: device, world and limit."""

    _planners: dict[str, StrategyPlanner | UniparError] = field(
        default_factory=dict[str, "StrategyPlanner | UniparError"]
    )
    """Planners by precision, or why there are none."""

    def forecast(self, at: SettledConfig) -> StrategyForecast:
        """Return the predictions for a strategy, or why there are none."""
        name = str(at.strategy)
        try:
            return self._forecast(name, at)
        except UniparError as e:
            return StrategyForecast(strategy=name, refusal=_in_one_line(e))
        except Exception as e:  # a defect of planning is no failure of the comparison
            return StrategyForecast(
                strategy=name, refusal=f"planning it failed ({type(e).__name__}: {_in_one_line(e)})"
            )

    def _forecast(self, name: str, at: SettledConfig) -> StrategyForecast:
        planner = self._planner(at.config)
        request = planner.request(at.config, at.ranks, at.sizes)
        row = planner.fitted(request)[0].row(at.strategy, request)
        sent: dict[str, dict[str, int]] = {}
        for volume in row.sent:
            of = sent.setdefault(volume.axis, {})
            of[volume.collective] = of.get(volume.collective, 0) + volume.size
        across = sum(volume.across for volume in row.sent)
        here = _world_of(row.peak, row.late, at.ranks, at.sizes)
        return StrategyForecast(
            strategy=name,
            phases=tuple(_phases(row)),
            sent=sent,
            sent_across=across,
            worlds=tuple(sorted([here, *self._other_worlds(planner, at)], key=lambda world: world.ranks)),
            ways=row.ways,
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences on what the numbers lack."""
        planners = [planner for planner in self._planners.values() if isinstance(planner, StrategyPlanner)]
        return tuple(dict.fromkeys(note for planner in planners for note in planner.notes(())))

    def _planner(self, config: Config) -> StrategyPlanner:
        """Return the planner of strategies with a config's precision, which `single` may have for itself."""
        precision = config.train.precision
        if precision not in self._planners:
            try:
                self._planners[precision] = self._new_planner(config)
            except UniparError as e:
                self._planners[precision] = e
        planner = self._planners[precision]
        if isinstance(planner, UniparError):
            raise planner
        return planner

    def _new_planner(self, config: Config) -> StrategyPlanner:
        from unipar.training.fake_run.recompute_fit import trace_all

        traces, recompute = trace_all(traced_config(config, self.asked.device), self.compared.sizes.micro, self.task)
        base = self.compared.config.changed({"train.precision": config.train.precision})
        limits = PlanLimits(self.asked.memory, self.asked.headroom)
        return StrategyPlanner(base, traces, self.asked.device, limits, None, self.asked.per, recompute)

    def _other_worlds(self, planner: StrategyPlanner, at: SettledConfig) -> Iterator[ForecastWorld]:
        """Yield a strategy's peak on other numbers of ranks; nothing for a strategy of one process."""
        if is_single_process(at.strategy):
            return
        for ranks in OTHER_WORLDS:
            if ranks == at.ranks:
                continue
            try:
                yield self._world(planner, at, ranks)
            except UniparError as e:
                yield ForecastWorld(ranks=ranks, refusal=_in_one_line(e))

    def _world(self, planner: StrategyPlanner, at: SettledConfig, ranks: int) -> ForecastWorld:
        for batch in self._batches:
            scaled = replace(planner, config=planner.config.model_copy(update={"batch": batch}))
            try:
                request = scaled.settle(at.strategy, ranks)
            except ConfigError:
                if batch is self._batches[-1]:
                    raise
                continue  # the total batch cannot be divided among so many
            step = scaled.fitted(request)[0].predict(request)
            fullest = max(step.phases, key=lambda phase: phase.peak)
            return _world_of(fullest, step.late, ranks, request.sizes)
        raise AssertionError("the last batch is planned, or its error raised")

    @cached_property
    def _batches(self) -> Sequence[Batch]:
        """The total batch of the comparison, and the share of each rank in it."""
        sizes, batch = self.compared.sizes, self.compared.config.batch
        kept = Batch(total=sizes.total, accumulate=sizes.accumulate) if batch.size is None else batch
        if batch.tokens is not None:  # a budget can be divided among any number of ranks
            return (kept,)
        return kept, Batch(micro=sizes.micro, accumulate=sizes.accumulate)


def _phases(row: PlannedStrategy) -> Iterator[ForecastPhase]:
    """Yield the peak of each phase without what a process holds beside its tensors, which accounts do not have."""
    for phase in row.phases:
        held: dict[Category, int] = {k: v for k, v in phase.held.items() if k != "runtime" and v}
        yield ForecastPhase(name=phase.phase, peak=sum(held.values()), held=held)


def _world_of(fullest: PredictedPeak, late: int, ranks: int, sizes: BatchSizes) -> ForecastWorld:
    total, micro = sizes.total, sizes.micro
    return ForecastWorld(ranks=ranks, samples=total, micro=micro, peak=fullest.peak, phase=fullest.phase, late=late)


def _in_one_line(error: BaseException) -> str:
    return " ".join(str(error).split()).removeprefix("plan: ")
