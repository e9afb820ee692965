"""`ranks_of_pieces`: ranks that have several stages of a pipeline each, from fake microbatches through these stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from unipar.config.sections.strategy import Axes
from unipar.planning.activations import Activations, MicrobatchVolume
from unipar.planning.schedule_walk import PlannedRank, PlannedStage
from unipar.prediction.timeline import Moment, PredictedParameter, StepTimeline
from unipar.training.fake_run.trace_task import TracedTask


def ranks_of_pieces(axes: Axes, traced: Mapping[int, TracedTask], alike: Sequence[int]) -> list[TracedTask]:
    """Return the ranks of a pipeline that hold or do something else; `alike`: for each stage, the one that ran for it.

    Of equal ranks the first has the most microbatches in flight; under zerobubble later ones may need more, as
    gradients of weights wait longer there.
    """
    traced_ranks: list[TracedTask] = []
    known = set[tuple[int, ...]]()
    for rank in range(axes.pipeline):
        stages = tuple(alike[rank :: axes.pipeline])
        if stages in known and axes.schedule != "zerobubble":
            continue
        known.add(stages)
        own = [traced[stage].rank.whole for stage in stages]
        work = _work_of_rank([stage.activations for stage in own])
        combined = PlannedStage(timeline_of_rank([stage.timeline for stage in own]), work)
        sent = tuple(_sent_by_rank([traced[stage].sent for stage in stages]))
        planned = PlannedRank(combined, own, axes.schedule, axes.pipeline, rank)
        traced_ranks.append(replace(traced[stages[0]], rank=planned, sent=sent))
    return traced_ranks


def timeline_of_rank(timelines: Sequence[StepTimeline]) -> StepTimeline:
    """Return one timeline of what a rank does in several stages with a microbatch: one stage after another."""
    parameters: dict[str, PredictedParameter] = {}
    numbers: list[list[int]] = []
    blocks: list[str] = []
    firsts: list[int] = []
    for timeline in timelines:
        firsts.append(len(blocks))
        blocks += timeline.blocks
        for p in timeline.parameters:
            block = p.block + firsts[-1] if p.block >= 0 else -1
            parameters.setdefault(p.name, replace(p, block=block))
        names = list(parameters)
        numbers.append([names.index(p.name) for p in timeline.parameters])
    moments: list[Moment] = []
    for begin in (m for m in timelines[0].moments if m.what == "begin"):
        moments.append(begin)
        for timeline, first, own in zip(timelines, firsts, numbers, strict=True):
            for m in timeline.moments:
                if m.phase == begin.phase and m.what != "begin":
                    block = m.block + first if m.block >= 0 else -1
                    parameter = own[m.parameter] if m.parameter >= 0 else -1
                    moments.append(m._replace(block=block, parameter=parameter))
    return replace(
        timelines[0], parameters=tuple(parameters.values()), blocks=tuple(blocks), moments=tuple(moments), modules=()
    )


def _work_of_rank(stages: Sequence[Activations]) -> Activations:
    """Return the first stage's, with the operations of all."""
    flops, recomputed = (
        (sum(line[0] for line in lines), sum(line[1] for line in lines))
        for lines in ([stage.flops for stage in stages], [stage.recomputed for stage in stages])
    )
    operators = sum(stage.operators for stage in stages)
    return replace(stages[0], flops=flops, recomputed=recomputed, operators=operators)


def _sent_by_rank(stages: Sequence[Sequence[MicrobatchVolume]]) -> Sequence[MicrobatchVolume]:
    volumes: dict[tuple[str, str], MicrobatchVolume] = {}
    for one in (one for sent in stages for one in sent):
        key = one.axis, one.collective
        if (other := volumes.get(key)) is None:
            volumes[key] = one
        else:
            base, slope, calls = one.base + other.base, one.slope + other.slope, one.calls + other.calls
            volumes[key] = replace(one, base=base, slope=slope, calls=calls)
    return list(volumes.values())
