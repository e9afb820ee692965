"""Closed forms of what a rank of a mesh holds and sends beside its part of the model: FSDP2 over data and context."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Final, Literal

from unipar.backend import offered_strategies as strategies
from unipar.config import Config
from unipar.distributed.mesh import Mesh
from unipar.memory.recording.bytes_sent_recorder import axis_of_ranks
from unipar.prediction.bytes_sent import FP64_NORM_BYTES, sent_by_fsdp2
from unipar.prediction.fsdp2_groups import ShardedModel, padded_elements
from unipar.prediction.fsdp2_terms import predict_sharded
from unipar.prediction.terms import clips_in_fp64, norm_terms, predict_whole, refuse_unplanned, whole_tensors
from unipar.prediction.timeline import CommVolume, Prediction, StepTimeline, Term
from unipar_mesh.expert.small_blocks import small_blocks
from unipar_mesh.options import MeshOptions

SKETCH_BYTES: Final = 3 * 8 + 1
"""Bytes of an element of a gradient while it is sketched: in fp64, with its sign, and padded."""

SHAPE_FLAG_BYTES: Final = 4
"""Bytes of the number by which ranks tell whether a batch of a new shape has come."""


def predict_mesh(
    config: Config,
    timeline: StepTimeline,
    ranks: int,
    options: MeshOptions,
    *,
    device: str,
    reshard_rest: bool = True,
    in_copies: bool = True,
) -> Prediction:
    """Return what a rank holds and sends whose part of the model is that of the timeline.

    `reshard_rest`: under `shard: parameters`, what lies outside of blocks is freed after forward, too. `in_copies`:
    FSDP2's mesh has a dimension of copies, be it of one.
    """
    parallel, axes = config.parallel, config.parallel.axes
    compiled = ["model.compile beside other axes"] if config.model.compiling is not None else []
    refuse_unplanned(str(strategies.strategy_of(config)), config, *compiled, planned=[f"parallel ({axes})"])
    fp64, mesh = clips_in_fp64(config), Mesh.of(0, ranks, **axes.sizes)
    shards = _ranks_of_a_copy(config, mesh)
    alike = [mesh.rank_at(data=d, context=c) for d in range(mesh.sizes["data"]) for c in range(mesh.sizes["context"])]
    traffic = [
        CommVolume(
            "pipeline",
            "all_reduce",
            padded_elements(p, shards) // shards * p.element_size,
            1,
            p.stages,
            stride=(axes.pipeline - 1) // (p.stages - 1),  # which stages have it is not known here: first and last
        )
        for p in timeline.parameters
        if p.trained and p.stages > 1
    ]
    norm = CommVolume(_axis(mesh, range(ranks)), "all_reduce", FP64_NORM_BYTES, 1, ranks)
    traffic.append(norm)
    if axes.pieces > 1 and mesh.sizes["data"] > 1:  # whether any share of the data has batches of a new shape
        traffic.append(CommVolume(_axis(mesh, range(ranks)), "all_reduce", SHAPE_FLAG_BYTES, 1, ranks))
    built = tuple(built_split(timeline, options.proof)) if device == "cpu" else ()  # else that is the host's memory
    if axes.schedule == "zerobubble" and len(alike) > 1:  # without FSDP2: gradients are averaged one by one
        trained = [p.size for p in timeline.parameters if p.trained]
        traffic.append(CommVolume(_axis(mesh, alike), "all_reduce", sum(trained), len(trained), len(alike)))
    if len(alike) == 1 or axes.schedule == "zerobubble":
        norm_of_whole = norm_terms(timeline, whole_tensors(timeline.parameters)) if fp64 else ()
        return Prediction((*predict_whole(timeline, buckets=False), *norm_of_whole), tuple(traffic), built)
    once = parallel.shard in ("nothing", "optimizer")
    if once and axes.pieces == 1:
        timeline = _small_blocks_with_rest(timeline)
    model = ShardedModel(
        timeline,
        shards,
        masters=False,
        staged=device == "cpu" and shards > 1,
        reshard=parallel.shard == "parameters",
        reshard_rest=parallel.shard == "parameters" and reshard_rest,
        once=once,
        in_copies=in_copies,
        ranks_of_groups=dict.fromkeys(timeline.experts, _ranks_of_experts(config, mesh)),
        whole_groups=timeline.experts if len(alike) == mesh.expert else frozenset(),
    )
    traffic += sent_by_fsdp2(
        model,
        len(alike) // shards,
        axis=_axis(mesh, alike[:shards]),
        axis_of_copies=_axis(mesh, alike[::shards]),
        stride=max(1, shards // mesh.sizes["context"]),
        passes=axes.pieces,
        groups=[g for g in model.order if g not in timeline.experts],
    )
    traffic += _sent_for_experts(model, mesh, _ranks_of_experts(config, mesh))
    return Prediction(tuple(predict_sharded(model, norm_in_fp64=fp64)), tuple(traffic), built)


def built_split(timeline: StepTimeline, proof: Literal["whole", "blocks", "off"]) -> Iterator[Term]:
    """Yield what rank 0 holds on the CPU before the first step: the whole model, with what the proof makes of it."""
    yield Term("temporaries", "whole model, of rank 0", sum(p.size for p in timeline.whole))
    if proof == "off":
        yield Term("parameters", "its part", sum(p.size for p in timeline.parameters))
        return
    blocks = Counter[int]()
    for p in timeline.whole:
        blocks[p.block] += p.size if p.trained else 0
    gradients = blocks.total() if proof == "whole" else max(blocks.values())
    yield Term("temporaries", "gradients that prove that the split model is the same", gradients)
    largest = max(p.numel for p in timeline.whole if p.trained)
    yield Term("temporaries", "sketch of one of them in fp64, with signs", largest * SKETCH_BYTES)


def _small_blocks_with_rest(timeline: StepTimeline) -> StepTimeline:
    """Return the timeline with parameters of blocks that are small besides their experts as those of no block."""
    sizes = Counter[int]()
    for p in timeline.parameters:
        sizes[p.block] += p.numel
    by_name = {name: sizes[number] for number, name in enumerate(timeline.blocks)}
    small = small_blocks(by_name, [timeline.blocks[number] for number in timeline.experts])
    numbers = {number for number, name in enumerate(timeline.blocks) if name in small}
    parameters = (replace(p, block=-1) if p.block in numbers else p for p in timeline.parameters)
    return replace(timeline, parameters=tuple(parameters))


def _ranks_of_a_copy(config: Config, mesh: Mesh) -> int:
    """Return over how many ranks of data and context FSDP2 shards one copy of a rank's part."""
    if config.parallel.shard == "nothing":
        return 1
    over = config.parallel.shard_over or mesh.sizes["data"]
    assert over != "machine"  # a plan gives a number
    return over * mesh.sizes["context"]


def _ranks_of_experts(config: Config, mesh: Mesh) -> int:
    """Return over how many ranks of data and context FSDP2 shards one copy of a rank's experts."""
    if config.parallel.shard == "nothing":
        return 1
    over = config.parallel.shard_over or mesh.sizes["data"]
    assert over != "machine"
    return max(1, over // mesh.expert) * mesh.sizes["context"]


def _sent_for_experts(model: ShardedModel, mesh: Mesh, shards: int) -> Iterator[CommVolume]:
    """Yield what FSDP2 sends of the experts, among the ranks that have the same ones."""
    data, context = range(0, mesh.sizes["data"], mesh.expert), range(mesh.sizes["context"])
    same = [mesh.rank_at(data=d, context=c) for d in data for c in context]
    yield from sent_by_fsdp2(
        model,
        len(same) // shards,
        axis=_axis(mesh, same[:shards]),
        axis_of_copies=_axis(mesh, same[::shards]),
        stride=mesh.expert * max(1, shards // mesh.sizes["context"]),
        stride_of_shards=mesh.expert if mesh.sizes["context"] == 1 else 1,
        groups=model.timeline.experts,
    )


def _axis(mesh: Mesh, ranks: range | list[int]) -> str:
    return axis_of_ranks(mesh, list(ranks)) or ""
