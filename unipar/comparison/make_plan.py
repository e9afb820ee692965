"""`plan`: memory and speed of each strategy on each number of ranks, predicted before a process starts."""

from __future__ import annotations

import math
import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Final

from unipar.backend import checks, registry, resources
from unipar.backend import offered_strategies as backend_strategies
from unipar.backend.precision import FP8_RECIPES
from unipar.config import SHARDS, BatchSizes, Config, Strategy
from unipar.config.config_source import Given, load_given_config
from unipar.config.sections.parallel import Parallel
from unipar.config.sections.strategy import AXES
from unipar.errors import ConfigError, UniparError
from unipar.prediction.request import PlannedDevice, PredictionRequest
from unipar.utils.text import format_size, parse_bytes

if TYPE_CHECKING:
    from unipar.planning.machines.machine import Machine
    from unipar.planning.plan import Plan
    from unipar.planning.planned_strategy import PlannedStrategy
    from unipar.planning.speed import StepSpeed
    from unipar.training.fake_run.recompute_fit import RecomputeTraces
    from unipar.training.fake_run.task_traces import PredictedStep, TaskTraces
    from unipar.training.fake_run.token_traces import TokenTraces
    from unipar.training.fake_run.trace_task import TracedTask

MOST_RANKS: Final = 1024
"""Largest world in which a strategy that does not fit is tried."""


def plan(
    config: Given,
    *,
    strategies: Sequence[str] = (),
    worlds: Sequence[int] = (),
    memory: int | str | None = None,
    headroom: float = 0.05,
    machine: str | Machine | None = None,
    device: PlannedDevice | None = None,
    exclude: Sequence[str] = (),
    pick: str | Path | None = None,
    overwrite: bool = False,
) -> Plan:
    """Predict the memory and speed of each strategy, and recommend one. Nothing is trained.

    The task's model and loss run on tensors without memory.

    Args:
        config: Path of a config, a mapping, or a `Config`.
        strategies: Strategies in place of `compare.strategies`.
        worlds: Numbers of ranks in place of that of the config; this machine need not have them.
        memory: Memory of a rank, in bytes or as text such as `80GiB`; None: that of the machine.
        headroom: Fraction of that memory to keep free.
        machine: Name of a preset, such as `h100-sxm`, or a file, for seconds and rates.
        device: Device to plan for; None: that of the config.
        exclude: Strategies that are never recommended.
        pick: File to which the recommended config is written.
        overwrite: Replace that file.

    Returns:
        A row for each strategy and number of ranks, and the recommendations; it prints as a table.

    Raises:
        ConfigError: The config is invalid, or a strategy does not exist.
        TaskError: The config names no task, or the task cannot run on such tensors.

    Examples:
        >>> plan = unipar.plan("train.yaml", strategies=["native/*"], worlds=[2], memory="1GiB")
        >>> "native/nothing" in str(plan)
        True
    """
    from unipar.planning.machines.machine import load_machine
    from unipar.planning.plan import Plan

    source = load_given_config(config)
    config = source.config
    memory = config.batch.memory if memory is None else memory
    if config.batch.is_auto:  # rows are of the smallest microbatch, and tell the largest that fits
        config = config.changed({"batch.micro": 1})
    wanted = backend_strategies.expand_strategy_patterns(tuple(strategies or config.compare.strategies))
    excluded = tuple(str(strategy) for strategy in backend_strategies.expand_strategy_patterns(tuple(exclude)))
    if isinstance(machine, str):
        machine = load_machine(machine)
    device = _device(config, device, machine)
    limits = PlanLimits(_memory(memory, machine), _share(headroom))
    import_what_traces()
    began = time.process_time()
    planner = StrategyPlanner.trace(config.model_copy(update={"device": device}), device, limits, machine)
    numbers = tuple(worlds) or (resources.count_ranks(config).number,)
    rows = [row for strategy in wanted for ranks in numbers for row in planner.rows(strategy, ranks)]
    made = Plan(
        tuple(rows),
        limits.memory,
        limits.headroom,
        device,
        planner.traced.parameters,
        time.process_time() - began,
        tuple(planner.notes(rows)),
        machine="" if machine is None else machine.name,
        units=config.batch.unit if planner.traced.units is None else "weight",
        counted=config.batch.unit,
        checkpoint=planner.traced.checkpoint,
        allocated=planner.traced.allocated,
        blocks=planner.traced.timeline.blocks,
        exclude=excluded,
    )
    if pick is not None:
        from unipar.comparison.pick import write_picked_config

        write_picked_config(made, source, Path(pick), overwrite=overwrite)
    return made


def import_what_traces() -> None:
    """Import what takes seconds, so that the plan's own seconds do not have it."""
    import_module("unipar.training.fake_run.task_traces")
    import_module("torch._dynamo")  # torch's fake tensors ask for it


def traced_config(config: Config, device: PlannedDevice) -> Config:
    """Return the config whose task is traced for a device: fp8 is emulated on the CPU, which takes other memory."""
    return config.changed({"device": device}) if config.train.precision in FP8_RECIPES else config


def _device(config: Config, device: PlannedDevice | None, machine: Machine | None) -> PlannedDevice:
    if machine is not None:
        if device not in (None, machine.device):
            raise ConfigError(
                f"device {device}: the machine {machine.name} has {machine.device}; leave one of them out"
            )
        return machine.device
    if device is not None:
        return device
    return "cpu" if resources.choose_device(config)[0] == "cpu" else "cuda"


def _memory(memory: int | str | None, machine: Machine | None) -> int | None:
    if isinstance(memory, str):
        try:
            return int(parse_bytes(memory))
        except ValueError as e:
            raise ConfigError(f"memory {memory}: {e}") from None
    if memory is not None and memory <= 0:
        raise ConfigError(f"memory {memory}: a size is positive: 80GiB")
    return int(machine.memory) if memory is None and machine is not None else memory


def _share(headroom: float) -> float:
    if not 0.0 <= headroom < 1.0:
        raise ConfigError(f"headroom {headroom}: a share is from 0 to less than 1: 0.05")
    return headroom


@dataclass(frozen=True)
class PlanLimits:
    """Memory that a rank has, and the share of it that stays free."""

    memory: int | None
    headroom: float

    @property
    def bytes(self) -> int | None:
        from unipar.planning.planned_strategy import usable_bytes

        return usable_bytes(self.memory, self.headroom)


@dataclass(frozen=True)
class StrategyPlanner:
    """A traced task, and what its strategies are planned for."""

    config: Config
    traces: TaskTraces | TokenTraces
    device: PlannedDevice
    limits: PlanLimits
    machine: Machine | None
    per: int | None = None
    """Ranks of a machine; None: as `machine` says, or the config's `machines`."""

    recompute: RecomputeTraces | None = None
    """Fake steps among which `model.recompute: {fit: ...}` chooses; None: there is nothing to choose."""

    @property
    def traced(self) -> TracedTask:
        """The whole model's step."""
        return self.traces.whole

    @classmethod
    def trace(
        cls, config: Config, device: PlannedDevice, limits: PlanLimits, machine: Machine | None
    ) -> StrategyPlanner:
        from unipar.training.fake_run.recompute_fit import trace_all

        micro = config.batch.micro
        traced = traced_config(config, device)
        traces, recompute = trace_all(traced, micro if isinstance(micro, int) else config.batch.settle(1).micro)
        return cls(config, traces, device, limits, machine, recompute=recompute)

    def fitted(self, request: PredictionRequest) -> tuple[StrategyPlanner, str]:
        """Return the planner with as few blocks recomputed as `fit` asks for, and what it has chosen in a sentence."""
        if self.recompute is None:
            return self, ""
        from unipar.training.fake_run.recompute_fit import choose_recomputed

        choice = choose_recomputed(request, self.recompute)
        return replace(self, traces=self.recompute.of(choice.recompute), recompute=None), choice.says

    def rows(self, strategy: Strategy, ranks: int) -> Iterator[PlannedStrategy]:
        """Yield the row of a strategy on this many ranks; none for a strategy of one process on several."""
        from unipar.planning.planned_strategy import PlannedStrategy

        if backend_strategies.is_single_process(strategy) and ranks > 1:
            return
        try:
            request = self.settle(strategy, ranks)
            planner, recomputed = self.fitted(request)
            yield replace(planner.row(strategy, request), recomputed=recomputed)
        except UniparError as e:
            yield PlannedStrategy(str(strategy), ranks, refusal=str(e).replace("\n", " "))

    def row(self, strategy: Strategy, request: PredictionRequest) -> PlannedStrategy:
        """Return the row of a strategy whose config is settled; raise Unsupported if it is not planned."""
        from unipar.planning.planned_strategy import PlannedStrategy

        now = self.predict(request)
        limit = self.limits.bytes
        fitting = None if limit is None else self._largest(request, limit)
        row = PlannedStrategy(
            str(strategy),
            request.ranks,
            self.traces.micro_of(request.sizes),
            now.phases,
            late=now.late,
            offloaded=now.offloaded,
            sent=now.sent,
            speed=now.speed,
            simplicity=simplicity(strategy),
            library_name=registry.find_backend(strategy.backend).library_name(request.config),
        )
        if fitting is not None:
            micro, candidate = fitting
            row = replace(row, largest=micro, largest_peak=candidate.peak, largest_speed=candidate.speed)
        if limit is not None and now.needed > limit:
            least = self._least(request) if fitting is None else None
            row = replace(row, least=least)
            row = replace(row, ways=tuple(self._ways(row, strategy, limit)))
        return row

    def notes(self, rows: Sequence[PlannedStrategy]) -> Iterator[str]:
        """Yield what a reader should know of the numbers."""
        from unipar.planning.planned_strategy import UNEVEN

        yield from self.traced.assumed
        yield from self.traces.describe()
        yield from self.traces.notes_on_experts()
        yield from (f"{row.strategy} on {row.ranks}: {row.recomputed}" for row in rows if row.recomputed)
        if not self.traced.even:
            yield UNEVEN
        if self.device == "cuda" and self.traces.compiled:
            yield "model.compile: buffers are those of the code that torch's compiler writes for the CPU"
        if self.machine is None:
            return
        precision = self.config.train.precision
        if self.machine.peak(precision) is None:
            yield f"no seconds: {self.machine.name} has no known peak for train.precision: {precision}"
            return
        if precision in FP8_RECIPES:
            yield f"matrix products are planned at the speed of bf16: by how much {precision} is faster is not known"
        if away := [row.strategy for row in rows if row.offloaded]:
            yield (
                f"no seconds for {', '.join(dict.fromkeys(away))}: the host updates what is offloaded to it, and a "
                "machine's file says nothing of its speed; `unipar compare` measures it"
            )
        if silent := [row.strategy for row in rows if not row.refusal and not row.offloaded and row.speed is None]:
            names = ", ".join(dict.fromkeys(silent))
            yield f"no seconds for {names}: the bytes that they send are not planned yet; `unipar compare` measures it"

    def settle(self, strategy: Strategy, ranks: int) -> PredictionRequest:
        """Return a strategy on this many ranks with its config and batch; raise an error if they do not fit."""
        backend = registry.find_backend(strategy.backend)
        moved = backend_strategies.config_in_strategy(config_on_ranks(self.config, ranks), strategy)
        checks.check_strategy(moved, backend, strategy)
        return self.request(moved, ranks, moved.batch.settle(ranks // strategy.axes.ranks or 1))

    def request(self, config: Config, ranks: int, sizes: BatchSizes) -> PredictionRequest:
        """Return what to predict for a config in its strategy."""
        from unipar.planning.cuda_total import runtime_terms

        named = None if self.machine is None else self.machine.ranks
        per_machine = self.per or named or self.config.ranks_of_machine(ranks)
        runtime = tuple(runtime_terms(ranks)) if self.device == "cuda" else ()
        return PredictionRequest(config, ranks, sizes, self.device, per_machine, runtime)

    def predict(self, request: PredictionRequest) -> PredictedStep:
        """Return the memory and the speed of a config in its strategy."""
        step = self.traces.predict(request)
        if self.machine is not None and (request.ranks == 1 or step.sent) and not step.offloaded:
            return replace(step, speed=self._speed(self.machine, request, step))
        return step

    def _speed(self, machine: Machine, request: PredictionRequest, step: PredictedStep) -> StepSpeed | None:
        from unipar.planning.speed import StepWork, predict_speed

        config = request.config
        activations, mean = step.traced.activations, self.traces.mean_step(request.sizes)
        micros = mean.microbatches
        flops = activations.flops[0] + activations.flops[1] * mean.micro
        again = activations.recomputed[0] + activations.recomputed[1] * mean.micro
        held = next(phase.held for phase in step.phases if phase.phase == "update")
        rewritten = sum(held.get(category, 0) for category in ("parameters", "masters", "optimizer", "averages"))
        work = StepWork(
            flops=flops * micros,
            model_flops=(flops - again) * micros,
            operations=round(activations.operators * micros),
            update_bytes=2 * rewritten + held.get("gradients", 0),
            units=mean.total * (1.0 if self.traced.units is None else self.traced.units),
            microbatches=math.ceil(micros),
        )
        overlaps = registry.find_backend(config.backend).overlaps(config)
        axes, precision = config.parallel.axes, config.train.precision
        return predict_speed(machine, precision, work, step.sent, overlaps, axes, request.ranks)

    def _largest(self, request: PredictionRequest, limit: int) -> tuple[int, PredictedStep] | None:
        """Return the largest microbatch that fits, among those that divide a rank's share of the batch."""
        micros = self.traces.possible_micros(request.sizes)

        def needed(micro: int) -> int:
            return self.traces.predict_needed(request.with_micro(micro))

        if needed(micros[-1]) <= limit:
            fitting = len(micros)
        else:  # larger microbatches need more
            fitting = bisect_right(micros, limit, hi=len(micros) - 1, key=needed)
        if not fitting:
            return None
        largest = micros[fitting - 1]
        return largest, self.predict(request.with_micro(largest))

    def _least(self, request: PredictionRequest) -> int:
        """Return the fewest bytes that a rank needs, with the smallest microbatch or one alone, which makes no sums."""
        micros = self.traces.possible_micros(request.sizes)
        return min(self.traces.predict_needed(request.with_micro(micro)) for micro in {micros[0], micros[-1]})

    def _ways(self, row: PlannedStrategy, strategy: Strategy, limit: int) -> Iterator[str]:
        """Yield what would have to change for a row to fit."""
        if row.largest is not None:
            yield f"micro {row.largest} fits"
            return
        lack = format_size((row.least or row.needed) - limit)
        yield f"needs {lack} more, whatever the micro"
        backend = registry.find_backend(strategy.backend)
        for shard in SHARDS[SHARDS.index(strategy.shard) + 1 :]:
            other = replace(strategy, shard=shard)
            if other.without_axes in backend_strategies.strategies_of_backend(backend) and self._fits_somehow(
                other, row.ranks
            ):
                yield f"{other} fits"
                break
        if strategy.shard != "nothing" and not backend_strategies.is_single_process(strategy, backend):
            worlds = [row.ranks << doubled for doubled in range(1, MOST_RANKS.bit_length())]
            worlds = [ranks for ranks in worlds if ranks <= MOST_RANKS and self._can_run(strategy, ranks)]
            place = bisect_left(worlds, True, key=lambda ranks: self._fits_somehow(strategy, ranks))
            if place < len(worlds):
                yield f"fits on {worlds[place]} ranks"

    def _can_run(self, strategy: Strategy, ranks: int) -> bool:
        try:
            self.settle(strategy, ranks)
        except UniparError:
            return False
        return True

    def _fits_somehow(self, strategy: Strategy, ranks: int) -> bool:
        """Return whether a strategy fits with some microbatch."""
        limit = self.limits.bytes
        assert limit is not None
        try:
            return self._least(self.settle(strategy, ranks)) <= limit
        except UniparError:
            return False


def config_on_ranks(config: Config, ranks: int) -> Config:
    """Return a config with this many ranks of the data and no other axes: a strategy brings its own."""
    axes = dict.fromkeys(AXES, 1)
    parallel = Parallel(data=ranks, shard=config.parallel.shard, shard_over=config.parallel.shard_over, **axes)
    return config.model_copy(update={"parallel": parallel})


def simplicity(strategy: Strategy) -> tuple[int, ...]:
    """Return a strategy's place in the order of simplicity: smaller is simpler.

    One process; then what splits less, along fewer axes, without a variant; then the default backend before others.
    """
    backend = registry.find_backend(strategy.backend)
    names = sorted(registry.backend_names(), key=lambda name: name != Config.model_fields["backend"].default)
    return (
        0 if backend_strategies.is_single_process(strategy, backend) and strategy.variant is None else 1,
        SHARDS.index(strategy.shard),
        len(strategy.axes.sizes),
        int(strategy.variant is not None),
        names.index(strategy.backend),
    )
