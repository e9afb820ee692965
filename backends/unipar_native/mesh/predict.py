"""Closed forms of what a rank of a mesh holds and sends beside its part of the model: FSDP2 over data and context."""

from __future__ import annotations

from collections.abc import Iterator

from unipar.backend.prediction.terms import predict_whole, refuse_unplanned
from unipar.backend.prediction.timeline import Payload, Prediction, StepTimeline
from unipar.config import Cell, Config
from unipar.distributed.mesh import Mesh
from unipar.memory.recording.collectives import axis_of_ranks
from unipar_native.prediction.groups import ShardedModel, padded_elements
from unipar_native.prediction.sharded import predict_sharded

_NORM_BYTES = 8
"""The norm of gradients is added up over all ranks in fp64."""


def predict_mesh(config: Config, timeline: StepTimeline, ranks: int, *, device: str) -> Prediction:
    """Return what a rank holds and sends whose part of the model is that of the timeline."""
    parallel, axes = config.parallel, config.parallel.axes
    refuse_unplanned(
        str(Cell("native", parallel.shard, axes=axes)), config, *_unplanned(config), planned=[f"parallel ({axes})"]
    )
    mesh = Mesh.of(0, ranks, **axes.sizes)
    shards = _ranks_of_a_copy(config, mesh)
    alike = mesh.sizes["data"] * mesh.sizes["context"]
    traffic = [
        Payload("pipeline", "all_reduce", padded_elements(p, shards) // shards * p.element_size, 1, p.stages)
        for p in timeline.parameters
        if p.trained and p.stages > 1
    ]
    norm = Payload(_axis(mesh, range(ranks)), "all_reduce", _NORM_BYTES, 1, ranks)
    traffic.append(norm)
    if alike == 1:
        return Prediction(tuple(predict_whole(timeline, buckets=False)), tuple(traffic))
    model = ShardedModel.of(
        timeline,
        shards,
        masters=False,
        staged=device == "cpu",
        reshard=parallel.shard == "parameters",
        reshard_rest=parallel.shard == "parameters",
        once=parallel.shard in ("nothing", "optimizer"),
        in_copies=True,
    )
    traffic += _sent_by_fsdp(model, mesh)
    return Prediction(tuple(predict_sharded(model)), tuple(traffic))


def _unplanned(config: Config) -> Iterator[str]:
    """Yield settings that are planned without axes alone."""
    parallel, train = config.parallel, config.train
    if train.precision == "bf16-master":
        yield "train.precision: bf16-master beside other axes"
    if parallel.shard_over is not None:
        yield f"parallel.shard_over: {parallel.shard_over} beside other axes"
    if config.model.compiling is not None:
        yield "model.compile beside other axes"


def _ranks_of_a_copy(config: Config, mesh: Mesh) -> int:
    """Return over how many ranks of data and context FSDP2 shards one copy of a rank's part."""
    if config.parallel.shard == "nothing":
        return 1
    return (config.parallel.shard_over or mesh.sizes["data"]) * mesh.sizes["context"]


def _sent_by_fsdp(model: ShardedModel, mesh: Mesh) -> Iterator[Payload]:
    """Yield what FSDP2 gathers and reduces in a step, of each of its groups that has parameters."""
    data, context = mesh.sizes["data"], mesh.sizes["context"]
    alike = [mesh.rank_at(data=d, context=c) for d in range(data) for c in range(context)]
    times = 1 if model.once else model.timeline.microbatches
    gathers = [*model.order, *model.gathered_again]
    reduced = [size for size in model.gradient_bytes.values() if size]
    if model.ranks > 1:
        axis = _axis(mesh, alike[: model.ranks])
        size = sum(model.gathered[group] for group in gathers)
        yield Payload(axis, "all_gather", times * size, times * len(gathers), model.ranks)
        yield Payload(axis, "reduce_scatter", times * sum(reduced), times * len(reduced), model.ranks)
    if (copies := len(alike) // model.ranks) > 1:
        axis = _axis(mesh, alike[:: model.ranks])
        yield Payload(axis, "all_reduce", times * sum(reduced) // model.ranks, times * len(reduced), copies)


def _axis(mesh: Mesh, ranks: range | list[int]) -> str:
    return axis_of_ranks(mesh, list(ranks)) or ""
