"""`trace_task`: a step of the config's task on fake tensors, as what `unipar plan` adds a backend's memory to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from unipar.backend.precision import parameter_dtype
from unipar.config import BatchSizes, Config
from unipar.data.dataset import training_data_source
from unipar.data.lengths import TokenRows
from unipar.engines.placement import cast_buffers, replace_parameters
from unipar.errors import TaskError
from unipar.model.blocks import find_blocks
from unipar.model.create import cast_if_float, check_parts, narrow_frozen_parameters
from unipar.model.modes import enter_training_mode
from unipar.model.transforms import apply_transforms
from unipar.model.without_values import NeedsValuesError, create_without_values, explain_values
from unipar.planning.activations import Activations, AllocatedBlock, MicrobatchPayload
from unipar.planning.interleaved_peaks import PlannedPieces, StagePiece
from unipar.planning.pipeline_stages import PlannedStage
from unipar.prediction.rank_part import RankPart
from unipar.prediction.timeline import PredictedModule, PredictedParameter, StepTimeline
from unipar.task import Task
from unipar.training.fake_run.assumed_values import AssumedValues
from unipar.training.fake_run.compiled import compile_parts
from unipar.training.fake_run.fake_optimizer import FakeOptimizer
from unipar.training.fake_run.repeats import KEPT, ShortModel, find_equal_blocks
from unipar.training.fake_run.step import FakeStep, trace_step
from unipar.training.fake_run.step_recorder import FakeBlock, owners_of_parameters
from unipar.training.local_batches import read_first_microbatch
from unipar.training.task_facts import checkpoint_bytes, load_task, user_errors_as_task_errors

FEWEST_SAMPLES: Final = 2
"""Samples of the smallest microbatch that is traced: one of a single sample may run other operations than larger ones,
so that it is planned from those."""


@dataclass(frozen=True)
class TracedTask:
    """A step of a task: what a backend needs for its closed forms, and what the model itself allocates."""

    timeline: StepTimeline
    activations: Activations
    parameters: int
    """Number of the model's parameters."""

    even: bool
    """True if a third microbatch has allocated what the first two led to expect."""

    units: float | None = None
    """Weight of a sample, or token, of the first microbatch, as the task counts it; None: it defines no weight."""

    checkpoint: int | None = None
    """Bytes of tensors in a checkpoint; None if the optimizer cannot be tried without values."""

    allocated: int = 0
    """Bytes of parameters with values that model() needed to be created; 0: it runs without values."""

    assumed: tuple[str, ...] = ()
    """Assumptions on values, in sentences; empty if none are needed."""

    sent: tuple[MicrobatchPayload, ...] = ()
    """Bytes that a microbatch sends along the axes of a mesh."""

    stage: PlannedStage | None = None
    """Stage of a pipeline; None: there is none, or there are several on a rank."""

    piece: StagePiece | None = None
    """One of several stages that a rank has."""

    pieces: PlannedPieces | None = None
    """Several stages of a pipeline, which are all of the rank."""

    proof: Proof | None = None
    """Proof in the set-up that parts are the whole model; None: there is none."""


@dataclass(frozen=True)
class Proof:
    """Passes of the set-up without autocast, which hold no optimizer's tensors."""

    whole: TracedTask
    """That of the whole model, on the CPU of rank 0."""

    part: Activations | None
    """That of the rank's part; None: it needs less than a step, which computes in the same precision."""


@dataclass(frozen=True)
class FakeTask:
    """A task with its model on tensors without memory, ready to be traced."""

    task: Task
    name: str
    """Name of the model's part."""

    model: nn.Module
    blocks: Sequence[str]
    config: Config
    mode: FakeTensorMode
    optimizer: FakeOptimizer
    element_sizes: Mapping[str, int]
    """Bytes of an element of each parameter, before bf16 takes its place beside an fp32 master."""

    data: Any
    micro: int
    """Samples, or tokens, of the smallest microbatch that is traced."""

    checkpoint: int | None
    allocated: int
    rows: TokenRows | None = None
    """Microbatches if they are counted in tokens; None: in samples."""

    assumed: AssumedValues | None = None
    """Mode that stands in for the values that the loss needs; None: it is not known to need any."""

    compiled: bool = False
    """True if torch.compile compiles it as it runs."""

    _batches: dict[int, Any] = field(default_factory=dict[int, Any])

    def batch(self, count: int) -> Any:
        """Return a microbatch of so many samples, or tokens, with its values; each is read once."""
        if count not in self._batches and self.rows is not None:
            with user_errors_as_task_errors("data()"):
                self._batches[count] = self.rows.read(count // self.rows.length)
        elif count not in self._batches:
            sizes = BatchSizes(total=count, micro=count, accumulate=1, ranks=1)
            with user_errors_as_task_errors("data()"):
                self._batches[count] = read_first_microbatch(self.task, self.data, self.config, sizes)
        return self._batches[count]

    def trace(self, count: int, part: RankPart | None = None, blocks: Sequence[str] | None = None) -> FakeStep:
        """Run a microbatch of so many samples; `blocks`: those that are there, if not all."""
        own = (blocks or self.blocks) if part is None else part.blocks
        batch = self.batch(count)
        with user_errors_as_task_errors("loss()"), explain_values("loss()"):
            given = self.model, own, self.task.loss, batch, count, self.config, self.mode, part, self.assumed
            return trace_step(*given, compiled=self.compiled)

    def timeline(
        self, blocks: Sequence[str], step: FakeStep, stages_of: Mapping[str, int] | None = None
    ) -> StepTimeline:
        """Return a step of the model as it is now, for closed forms.

        `stages_of`: number of stages that have a parameter, by its name, where several do.
        """
        owners = owners_of_parameters(self.model, blocks)
        numbers = {id(p): number for number, p in enumerate(self.model.parameters())}
        return StepTimeline(
            parameters=tuple(
                PredictedParameter(
                    name,
                    tuple(p.shape),
                    self.element_sizes.get(name, p.element_size()),
                    p.requires_grad,
                    owners.get(name, -1),
                    self.optimizer.states.get(name, ()),
                    self.optimizer.tables.get(name, 0),
                    self.optimizer.group_of.get(name, 0),
                    name in step.record.viewed,
                    name in step.record.viewed_again,
                    (stages_of or {}).get(name, 1),
                )
                for name, p in self.model.named_parameters()
            ),
            buffers={name: b.untyped_storage().nbytes() for name, b in self.model.named_buffers()},
            blocks=tuple(blocks),
            moments=tuple(moment for _, moment in step.record.moments),
            modules=tuple(
                PredictedModule(
                    name, tuple(numbers[id(p)] for p in m.parameters(recurse=False)), name in step.record.passing
                )
                for name, m in self.model.named_modules()
            ),
            temporaries_of_update=self.optimizer.temporaries,
            averages=self.config.train.ema is not None,
        )


def trace_task(config: Config, micro: int, task: Task | None = None) -> TracedTask:
    """Return a step of a task; raise TaskError, with the operation, if it needs values of tensors.

    `task`: None for the config's own.
    """
    return trace_fake_task(config, micro, task)[1]


def trace_fake_task(
    config: Config, micro: int, task: Task | None = None, rows: TokenRows | None = None
) -> tuple[FakeTask, TracedTask]:
    """Return a task on tensors without memory, and a step of it; raise TaskError if it needs values of tensors.

    Values that decide where a row goes, or what a mask selects, are assumed. `rows`: microbatches if they are counted
    in tokens, in place of those of `micro` samples.
    """
    fake = fake_task(config, micro, task, rows)
    try:
        return fake, trace_whole(fake)
    except NeedsValuesError:
        for p in fake.model.parameters():
            p.grad = None
        fake = replace(fake, assumed=AssumedValues(fake.mode))
        return fake, trace_whole(fake)


def fake_task(config: Config, micro: int, task: Task | None = None, rows: TokenRows | None = None) -> FakeTask:
    """Return a task on tensors without memory; raise TaskError if its model needs values.

    `task`: None for the config's own. `rows`: microbatches if they are counted in tokens.
    """
    task = task or load_task(config)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with user_errors_as_task_errors("model()"), explain_values("model()"):
        made, allocated = create_without_values(task.model, mode)
        parts = check_parts(made)
        if len(parts) > 1:
            raise TaskError(
                f"plan: model() returned several parts ({', '.join(parts)}), and a plan has one model: "
                "measure it (unipar compare)"
            )
        ((name, model),) = parts.items()
        enter_training_mode(model, keep=task.keep_modes)
        with mode:
            checkpoint = checkpoint_bytes(task, {name: model}, config)
    blocks = find_blocks(model, config, given=task.blocks(model))
    masters = config.train.precision == "bf16-master"
    with mode:
        _cast_parameters(model, torch.float32 if masters else parameter_dtype(config.train.precision))
    with explain_values("the optimizer's step"):
        optimizer = FakeOptimizer.of(task, model, config, mode)
    element_sizes = {name: p.element_size() for name, p in model.named_parameters()}
    if masters:  # the optimizer steps fp32 copies of what computes in bf16
        with mode:
            _cast_parameters(model, torch.bfloat16)
            cast_buffers(model, torch.bfloat16)
    apply_transforms(model, blocks, config.changed({"model.compile": False}))
    with user_errors_as_task_errors("data()"):
        data = task.data()
        micro = rows.length * rows.samples if rows is not None else _samples_to_trace(task, data, config, micro)
    return FakeTask(
        task, name, model, blocks, config, mode, optimizer, element_sizes, data, micro, checkpoint, allocated, rows
    )


def trace_whole(fake: FakeTask) -> TracedTask:
    """Return a step of the whole model."""
    first, second, third = _trace_steps(fake, [n * fake.micro for n in (1, 2, 3)])
    activations = combine_steps(first, second)
    refuse_repeated_blocks(fake.blocks, activations)
    with user_errors_as_task_errors("weight()"):
        weight = fake.task.weight(fake.batch(fake.micro))
    return TracedTask(
        fake.timeline(fake.blocks, first),
        activations,
        sum(p.numel() for p in fake.model.parameters()),
        even=_is_even(activations, third),
        units=None if weight is None else float(weight) / fake.micro,
        checkpoint=fake.checkpoint,
        allocated=fake.allocated,
        assumed=() if fake.assumed is None else tuple(fake.assumed.notes()),
    )


def _cast_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Give all parameters that are floats this dtype, but for frozen ones that stay narrower."""
    kept = {id(p) for p in narrow_frozen_parameters(model, dtype)}

    def cast(p: nn.Parameter) -> nn.Parameter:
        return p if id(p) in kept else nn.Parameter(cast_if_float(p.detach(), dtype), p.requires_grad)

    replace_parameters(model, cast)


def _samples_to_trace(task: Task, data: Any, config: Config, micro: int) -> int:
    """Return how many samples the smallest microbatch has: three times as many must be there."""
    micro = max(micro, FEWEST_SAMPLES)
    sizes = BatchSizes(total=micro, micro=micro, accumulate=1, ranks=1)
    collate = task.collate if task.defines("collate") else None
    length = training_data_source(data, collate, task.collate, config, sizes).length
    if length is None or length >= 3 * micro:
        return micro
    if length < 3:
        raise TaskError(f"plan: data() has {length} samples, and a plan needs 3, for microbatches of three sizes")
    return length // 3


def refuse_repeated_blocks(blocks: Sequence[str], activations: Activations) -> None:
    """Raise TaskError if a block runs more than once in a forward: each has one time at which it is gathered."""
    entered = Counter(m.block for _, m in activations.moments if (m.phase, m.what) == ("forward", "enter"))
    if twice := next((blocks[block] for block, times in entered.items() if times > 1), ""):
        raise TaskError(
            f"plan: the loss runs the block {twice} more than once, and a plan knows blocks that run once: name other "
            "blocks in model.blocks, or measure it (unipar compare)"
        )


def trace_compiled(fake: FakeTask, whole: TracedTask, micro: int) -> TracedTask:
    """Return a step of the whole model under torch.compile, with microbatches of exactly this size.

    For another size, the compiler may take another order. Operations are those that were counted without it, since it
    computes some products without one that can be counted.
    """
    assert fake.config.model.compiling is not None
    with compile_parts(fake.model, fake.blocks, fake.config.model.compiling):
        (step,) = _trace_steps(replace(fake, compiled=True), [micro])
    found = combine_steps(step, replace(step, micro=micro + 1))
    counted = whole.activations
    activations = replace(found, batch=counted.batch, flops=counted.flops, recomputed=counted.recomputed)
    return replace(whole, timeline=fake.timeline(fake.blocks, step), activations=activations)


def _trace_steps(fake: FakeTask, counts: Sequence[int]) -> list[FakeStep]:
    """Return a step with a microbatch of each of these sizes.

    Of equal blocks only some run, if they stand for the others: one more is added, and must use memory as expected.
    """
    model, blocks = fake.model, fake.blocks
    if equal := find_equal_blocks(model, blocks):
        short, longer = (ShortModel(model, blocks, equal, kept) for kept in (KEPT, KEPT + 1))
        with suppress(Exception):  # the model needs all blocks: they run below, and tell what is wrong
            with longer.open():
                expected = fake.trace(counts[0], blocks=longer.blocks)
            with short.open():
                steps = [fake.trace(count, blocks=short.blocks) for count in counts]
            if short.stands_for(longer, steps[0].record, expected.record):
                return [replace(step, record=short.extended(step.record)) for step in steps]
    return [fake.trace(count) for count in counts]


def combine_steps(first: FakeStep, second: FakeStep) -> Activations:
    """Return what a microbatch of any size allocates, from two that differ in their number of samples."""
    a, b = first.record, second.record
    same = [_what(x) for x in a.blocks] == [_what(x) for x in b.blocks] and a.moments == b.moments
    if not same:
        raise TaskError(
            f"plan: microbatches of {first.micro} and {second.micro} samples run different operations, so that their "
            "memory cannot be known in advance: pad batches alike, and let no operation depend on their sizes"
        )

    def line(x: int, y: int) -> tuple[float, float]:
        return line_through((first.micro, x), (second.micro, y))

    blocks = [
        AllocatedBlock(
            *line(x.size, y.size), x.operation, x.where, x.born, _earlier(x.died, y.died), x.is_gradient, x.copied_by
        )
        for x, y in zip(a.blocks, b.blocks, strict=True)
    ]
    work, of_more = a.work, b.work
    return Activations(
        tuple(blocks),
        a.moments,
        line(first.batch, second.batch),
        line(work.flops, of_more.flops),
        line(work.recomputed, of_more.recomputed),
        work.operators,
    )


def line_through(first: tuple[int, int], second: tuple[int, int]) -> tuple[float, float]:
    """Return base and slope of the line through two points, each a number of samples and a size."""
    slope = (second[1] - first[1]) / (second[0] - first[0])
    return first[1] - slope * first[0], slope


def _what(block: FakeBlock) -> tuple[object, ...]:
    return block.operation, block.born, block.is_gradient


def _earlier(one: int | None, other: int | None) -> int | None:
    """Return the earlier of two ticks: what is in a cycle of references goes when Python collects garbage."""
    return min(one, other) if one is not None and other is not None else other if one is None else one


def _is_even(activations: Activations, third: FakeStep) -> bool:
    """Return whether a third microbatch allocates what is expected of it, to one in a thousand of its largest sum."""
    if len(third.record.blocks) != len(activations.blocks):
        return False
    expected = sum(block.size(third.micro) for block in activations.blocks)
    return abs(expected - sum(block.size for block in third.record.blocks)) <= expected / 1000
