"""`TaskTraces`: fake steps of a task, whole and split along axes of a mesh, each traced when it is first asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, final

from torch import nn

from unipar.backend import Backend, Part, registry
from unipar.backend.prediction.rank_part import RankPart
from unipar.backend.prediction.timeline import Payload
from unipar.config import BatchSizes, Config
from unipar.config.sections.cell import Axes
from unipar.planning.activations import MicrobatchPayload
from unipar.planning.peaks import PredictedPeak, predict_peaks
from unipar.planning.stages import PlannedStage, predict_stage_peaks
from unipar.training.fake_run.step import FakeStep
from unipar.training.fake_run.trace import (
    FakeTask,
    TracedTask,
    combine_steps,
    explain_values,
    fake_task,
    line_through,
    trace_whole,
)


@dataclass(frozen=True)
class PredictedStep:
    """A step of the fullest rank of a cell."""

    phases: tuple[PredictedPeak, ...]
    """Peak of each phase."""

    sent: tuple[Payload, ...]


@final
class TaskTraces:
    """Fake steps of a config's task, of which each is traced once: numbers of ranks of the data share them."""

    def __init__(self, config: Config, micro: int) -> None:
        """Take the microbatch from which others are told; raise TaskError if the task needs values of tensors."""
        self._fake = fake_task(config, micro)
        self.whole = trace_whole(self._fake)
        self._parts: dict[object, tuple[TracedTask, ...]] = {}

    def of(self, config: Config) -> Sequence[TracedTask]:
        """Return a step of each rank that holds or does something else, in a config of the same task."""
        axes = config.parallel.axes
        if axes.ranks == 1:
            return (self.whole,)
        key = config.backend, axes, str(config.options.get(config.backend))
        if key not in self._parts:
            self._parts[key] = tuple(self._trace_parts(config, registry.find_backend(config.backend)))
        return self._parts[key]

    def predict(self, config: Config, ranks: int, sizes: BatchSizes, *, device: str) -> PredictedStep:
        """Return a step of the fullest of so many ranks; raise Unsupported for what is not planned yet."""
        steps = self.predict_ranks(config, ranks, sizes, device=device)
        return max(steps, key=lambda step: max(phase.peak for phase in step.phases))

    def predict_ranks(self, config: Config, ranks: int, sizes: BatchSizes, *, device: str) -> list[PredictedStep]:
        """Return a step of each of so many ranks that holds or does something else."""
        predict = partial(registry.find_backend(config.backend).predict, config, ranks=ranks, device=device)
        found: list[PredictedStep] = []
        for traced in self.of(config):
            timeline = replace(traced.timeline, microbatches=sizes.accumulate)
            prediction = predict(timeline)
            if traced.stage is None:
                phases = predict_peaks(timeline, prediction, traced.activations, sizes.micro, sizes.accumulate)
            else:
                phases = predict_stage_peaks(traced.stage, timeline, predict, traced.activations, sizes.micro)
            traffic = tuple(each.of_step(sizes.micro, sizes.accumulate) for each in traced.sent)
            found.append(PredictedStep(tuple(phases), (*prediction.sent, *traffic)))
        return found

    def _trace_parts(self, config: Config, backend: Backend) -> list[TracedTask]:
        fake = self._fake
        part = Part(
            fake.name,
            fake.model,
            optimizer=_no_optimizer,
            blocks=fake.blocks,
            loss=fake.task.loss,
            sample=lambda: fake.batch(fake.micro),
            tensor=fake.task.tensor(fake.model),
            cuts=fake.task.cuts(config.parallel.axes.stages),
        )
        with explain_values("the split model"):
            axes = config.parallel.axes
            return [
                _trace_part(fake, self.whole, rank_part, axes) for rank_part in backend.split_for_plan(part, config)
            ]


def _trace_part(fake: FakeTask, whole: TracedTask, part: RankPart, axes: Axes) -> TracedTask:
    few = max(2, fake.micro)  # of one sample, parts of a sequence may need no copies
    counts = (few, few + fake.micro)
    with part.placed():
        steps: list[FakeStep] = []
        sent_on: list[tuple[int, int]] = []
        sent_back: list[tuple[int, int]] = []
        for count in counts:
            steps.append(fake.trace(count, fake.batch(count), part))
            sent_on.append((count, part.sent_on))
            sent_back.append((count, part.sent_back))
        first, second = steps
        activations = combine_steps(first, second)
        timeline = fake.timeline(part.blocks, activations.moments, part.stages_of)
    sent = tuple(_payloads(first, second, part))
    stage = None
    if axes.pipeline > 1:
        stage = PlannedStage(axes.schedule, axes.pipeline, part.stage, line_through(*sent_on), line_through(*sent_back))
    return replace(whole, timeline=timeline, activations=activations, sent=sent, stage=stage)


def _payloads(first: FakeStep, second: FakeStep, part: RankPart) -> Sequence[MicrobatchPayload]:
    found: list[MicrobatchPayload] = []
    for (axis, collective), size in first.sent.items():
        base, slope = line_through((first.micro, size), (second.micro, second.sent[axis, collective]))
        calls = first.calls[axis, collective]
        found.append(
            MicrobatchPayload(axis, collective, base, slope, calls, part.mesh.sizes.get(axis, part.mesh.ranks))
        )
    return found


def _no_optimizer(model: nn.Module) -> Any:
    raise AssertionError("nothing is trained")
