"""`trace_task`: a step of the config's task on fake tensors, as what `unipar plan` adds a backend's memory to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from unipar.backend.precision import autocast_dtype
from unipar.config import Config
from unipar.config.sections.strategy import Axes
from unipar.data.lengths import TokenRows
from unipar.errors import TaskError
from unipar.model.state_names import CheckpointBytes
from unipar.model.without_values import NeedsValuesError
from unipar.planning.activations import Activations, AllocatedBlock, MicrobatchVolume
from unipar.planning.schedule_walk import Line, PlannedRank, PlannedStage
from unipar.prediction.rank_part import RankPart
from unipar.prediction.request import PlannedDevice
from unipar.prediction.timeline import StepTimeline
from unipar.task import Task
from unipar.training.fake_run.assumed_values import AssumedValues
from unipar.training.fake_run.compiled import compile_parts
from unipar.training.fake_run.fake_task import FEWEST_SAMPLES, FakeTask, fake_task
from unipar.training.fake_run.repeats import ENDS, ShortModel, find_equal_blocks
from unipar.training.fake_run.step import FakeStep, trace_step
from unipar.training.fake_run.step_recorder import FakeBlock
from unipar.training.task_facts import user_errors_as_task_errors


@dataclass(frozen=True)
class TracedTask:
    """A step of a task: what a backend needs for its closed forms, and what the model itself allocates."""

    rank: PlannedRank
    parameters: int
    """Number of the model's parameters."""

    even: bool
    """True if a third microbatch has allocated what the first two led to expect."""

    units: float | None = None
    """Weight of a sample, or token, of the first microbatch, as the task counts it; None: it defines no weight."""

    checkpoint: CheckpointBytes | None = None
    """Bytes of tensors in checkpoints; None if the optimizer cannot be tried without values."""

    allocated: int = 0
    """Bytes of parameters with values that model() needed to be created; 0: it runs without values."""

    assumed: tuple[str, ...] = ()
    """Assumptions on values, in sentences; empty if none are needed."""

    sent: tuple[MicrobatchVolume, ...] = ()
    """Bytes that a microbatch sends along the axes of a mesh."""

    worst_routing: Activations | None = None
    """Memory of the model if this rank's experts get the rows of all ranks; None: it has all experts itself."""

    logged_of_experts: tuple[int, ...] = ()
    """Bytes that all ranks combine at a logged step to count tokens of experts, of each collective."""

    proof: Proof | None = None
    """Proof in the set-up that parts are the whole model; None: there is none."""

    @property
    def timeline(self) -> StepTimeline:
        """Moments of a microbatch on the rank."""
        return self.rank.whole.timeline

    @property
    def activations(self) -> Activations:
        """Memory that the model allocates then; of several stages, blocks of the first and work of all."""
        return self.rank.whole.activations

    def rank_on(self, device: PlannedDevice) -> PlannedRank:
        """Return the rank with what it allocates on a device."""
        return self.rank if device == "cpu" else self.rank.without_copies


@dataclass(frozen=True)
class Proof:
    """Passes of the set-up without autocast, which hold no optimizer's tensors."""

    whole: PlannedStage
    """Record of the whole model, on the CPU of rank 0."""

    part: PlannedStage | None
    """That of the rank's part; None: it needs less than a step, which computes in the same precision."""


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


def trace_whole(fake: FakeTask) -> TracedTask:
    """Return a step of the whole model."""
    first, second, third = _trace_steps(fake, [n * fake.micro for n in (1, 2, 3)])
    activations = combine_steps(first, second)
    refuse_repeated_blocks(fake.blocks, activations)
    with user_errors_as_task_errors("weight()"):
        weight = fake.task.weight(fake.batch(fake.micro))
    return TracedTask(
        PlannedRank.alone(PlannedStage(fake.timeline(fake.blocks, first.record), activations)),
        sum(p.numel() for p in fake.model.parameters()),
        even=_is_even(activations, third),
        units=None if weight is None else float(weight) / fake.micro,
        checkpoint=fake.checkpoint,
        allocated=fake.allocated,
        assumed=() if fake.assumed is None else tuple(fake.assumed.notes()),
    )


def refuse_repeated_blocks(blocks: Sequence[str], activations: Activations) -> None:
    """Raise TaskError if a block runs more than once in a forward: each has one time at which it is gathered."""
    entered = Counter(m.block for _, m in activations.moments if (m.phase, m.what) == ("forward", "enter"))
    if twice := next((blocks[block] for block, times in entered.items() if times > 1), ""):
        raise TaskError(
            f"plan: the loss runs the block {twice} more than once, and a plan knows blocks that run once: name other "
            "blocks in model.blocks, or measure it (unipar compare)"
        )


def trace_compiled(fake: FakeTask, traced: TracedTask, micro: int) -> TracedTask:
    """Return a step of the whole model under torch.compile, with microbatches of exactly this size.

    For another size, the compiler may take another order. Operations are those that were counted without it, since it
    computes some products without one that can be counted.
    """
    assert fake.config.model.compiling is not None
    with compile_parts(fake.model, fake.blocks, fake.config.model.compiling):
        (step,) = _trace_steps(replace(fake, compiled=True), [micro])
    combined = combine_steps(step, replace(step, micro=micro + 1))
    counted = traced.activations
    activations = replace(combined, batch=counted.batch, flops=counted.flops, recomputed=counted.recomputed)
    return replace(traced, rank=PlannedRank.alone(PlannedStage(fake.timeline(fake.blocks, step.record), activations)))


def trace_part(
    fake: FakeTask, traced: TracedTask, part: RankPart, axes: Axes, proof_of_whole: PlannedStage | None
) -> TracedTask:
    """Return a step of a rank's part of the model, or of one of its stages; `traced`: a step of the full model.

    `proof_of_whole`: that step without autocast, if the set-up proves by it that the parts are the whole model.
    """
    few = max(FEWEST_SAMPLES, fake.micro)  # of one sample, parts of a sequence may need no copies
    counts = (few, few + fake.micro)
    in_full: Activations | None = None
    worst: Activations | None = None
    with part.placed():
        if proof_of_whole is not None and axes.pieces == 1 and autocast_dtype(fake.config.train.precision) is not None:
            in_full = combine_steps(*_trace_steps(in_full_precision(fake), counts, part))
        steps = _trace_steps(fake, counts, part)
        if axes.expert > 1:
            part.routing = "worst"
            worst = combine_steps(*_trace_steps(fake, counts, part))
            part.routing = "even"
        timeline = fake.timeline(part.blocks, steps[0].record, part.stages_of)
    experts = frozenset(number for number, name in enumerate(part.blocks) if name in part.experts_of_blocks)
    timeline = replace(timeline, whole=traced.timeline.parameters, experts=experts)
    passed = zip(*(step.passed for step in steps), strict=True)
    on, back, received = (line_through(*zip(counts, each, strict=True)) for each in passed)
    stage = PlannedStage(timeline, combine_steps(*steps), sent_on=on, sent_back=back, received=received)
    schedule = axes.schedule if axes.pipeline > 1 else None
    rank = PlannedRank.alone(stage, schedule, axes.pipeline, part.stage % axes.pipeline)
    proof = None
    if proof_of_whole is not None:
        proof = Proof(proof_of_whole, None if in_full is None else replace(stage, activations=in_full))
    return replace(
        traced,
        rank=rank,
        sent=tuple(_volumes(steps, part)),
        proof=proof,
        worst_routing=worst,
        logged_of_experts=tuple(part.logged_of_experts),
    )


def in_full_precision(fake: FakeTask) -> FakeTask:
    """Return a task that computes without autocast."""
    return replace(fake, config=fake.config.changed({"train.precision": "fp32"}))


def _volumes(steps: Sequence[FakeStep], part: RankPart) -> Sequence[MicrobatchVolume]:
    first, second = steps
    volumes: list[MicrobatchVolume] = []
    for (axis, collective), size in first.sent.items():
        base, slope = line_through((first.micro, size), (second.micro, second.sent[axis, collective]))
        calls = first.calls[axis, collective]
        ranks = part.mesh.expert if axis == "expert" else part.mesh.sizes.get(axis, part.mesh.ranks)
        volumes.append(MicrobatchVolume(axis, collective, base, slope, calls, ranks))
    return volumes


def _trace_steps(fake: FakeTask, counts: Sequence[int], part: RankPart | None = None) -> list[FakeStep]:
    """Return a step with a microbatch of each of these sizes, of the full model or of a part in its place.

    Of equal blocks only some run, if they stand for the others: one more is added, and must use memory as expected.
    """
    blocks = (fake if part is None else part).blocks
    equal = find_equal_blocks(fake.model, blocks)
    for ends in ENDS:
        short, longer = (ShortModel(fake.model, blocks, equal, ends, middle) for middle in (1, 2))
        if not short.equal:
            break
        with suppress(Exception):  # the model needs all blocks: they run below, and tell what is wrong
            checked = counts[:1] if part is None else counts  # what other sizes of a part send is told from it, too
            return [_trace_short(fake, count, short, longer if count in checked else None, part) for count in counts]
    return [trace_step(fake, count, part) for count in counts]


def _trace_short(
    fake: FakeTask, count: int, short: ShortModel, longer: ShortModel | None, part: RankPart | None
) -> FakeStep:
    """Return a step of all blocks, of which some run; raise ValueError if those do not stand for the others.

    `longer`: model with one more of them; None: it is known that they do.
    """
    step = _trace_open(fake, count, short, part)
    if longer is not None:
        expected = _trace_open(fake, count, longer, part)
        if not short.stands_for(longer, step.record, expected.record):
            raise ValueError(short.left_out)
        step = step if part is None else _with_traffic(short, step, expected)
    return replace(step, record=short.extended(step.record))


def _trace_open(fake: FakeTask, count: int, short: ShortModel, part: RankPart | None) -> FakeStep:
    with short.open():
        if part is not None:
            part.left_out = short.left_out
        try:
            return trace_step(fake, count, part, short.blocks)
        finally:
            if part is not None:
                part.left_out = frozenset()


def _with_traffic(short: ShortModel, step: FakeStep, longer: FakeStep) -> FakeStep:
    """Return a step of a part with what all blocks send; `longer`: that with one more of equal blocks.

    Raise ValueError if that does not tell it.
    """
    more = short.same_left_out
    if more is None or step.passed != longer.passed or list(step.sent) != list(longer.sent):
        raise ValueError(short.left_out)

    def of_all(few: Mapping[tuple[str, str], int], one_more: Mapping[tuple[str, str], int]) -> Mapping[Any, int]:
        return {key: number + more * (one_more[key] - number) for key, number in few.items()}

    return replace(step, sent=of_all(step.sent, longer.sent), calls=of_all(step.calls, longer.calls))


def combine_steps(first: FakeStep, second: FakeStep) -> Activations:
    """Return what a microbatch of any size allocates, from two that differ in their number of samples."""
    a, b = first.record, second.record
    same = [_what(x) for x in a.blocks] == [_what(x) for x in b.blocks] and a.moments == b.moments
    if not same:
        raise TaskError(
            f"plan: microbatches of {first.micro} and {second.micro} samples run different operations, so that their "
            "memory cannot be known in advance: pad batches alike, and let no operation depend on their sizes"
        )

    def line(x: int, y: int) -> Line:
        return line_through((first.micro, x), (second.micro, y))

    return Activations(
        blocks=tuple(_combine_blocks(x, y, line(x.size, y.size)) for x, y in zip(a.blocks, b.blocks, strict=True)),
        moments=a.moments,
        batch=line(first.batch, second.batch),
        flops=line(a.work.flops, b.work.flops),
        recomputed=line(a.work.recomputed, b.work.recomputed),
        operators=a.work.operators,
    )


def _combine_blocks(one: FakeBlock, other: FakeBlock, size: Line) -> AllocatedBlock:
    """Return a block of a microbatch of any size."""
    ends = [died for died in (one.died, other.died) if died is not None]  # cycles of references end by chance
    return AllocatedBlock(
        *size,
        one.operation,
        one.where,
        one.born,
        died=min(ends, default=None),
        becomes_gradient=one.is_gradient,
        copied_by=one.copied_by,
        place=one.place,
    )


def line_through(first: tuple[int, int], second: tuple[int, int]) -> Line:
    """Return base and slope of the line through two points, each a number of samples and a size."""
    slope = (second[1] - first[1]) / (second[0] - first[0])
    return first[1] - slope * first[0], slope


def _what(block: FakeBlock) -> tuple[object, ...]:
    return block.operation, block.born, block.is_gradient, block.place


def _is_even(activations: Activations, third: FakeStep) -> bool:
    """Return whether a third microbatch allocates what is expected of it, to one in a thousand of its largest sum."""
    if len(third.record.blocks) != len(activations.blocks):
        return False
    expected = sum(block.size(third.micro) for block in activations.blocks)
    return abs(expected - sum(block.size for block in third.record.blocks)) <= expected / 1000
