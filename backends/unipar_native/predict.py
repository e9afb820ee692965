"""Closed forms of what one process, DDP, ZeroRedundancyOptimizer and FSDP2 hold and send in a step."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil, prod

from unipar.backend.prediction.terms import buffer_terms, predict_whole, refuse_unplanned, state_terms
from unipar.backend.prediction.timeline import PredictedParameter, Prediction, StepTimeline, Term
from unipar.config import Config
from unipar.errors import Unsupported
from unipar_native import options_of, uses_ddp


def predict_optimizer(timeline: StepTimeline, ranks: int) -> Iterator[Term]:
    """Yield the terms of the fullest rank if each rank keeps the optimizer's state of some whole parameters."""
    mine = {p.name for p in largest_share(timeline, ranks)}
    for term in predict_whole(timeline, buckets=True):
        if term.category != "optimizer" or term.name.rpartition(" ")[0] in mine:
            yield term


def largest_share(timeline: StepTimeline, ranks: int) -> list[PredictedParameter]:
    """Return the parameters of the rank that gets most of them by size: the largest first, to who has least."""
    shares: list[list[PredictedParameter]] = [[] for _ in range(ranks)]
    sizes = [(0, rank) for rank in range(ranks)]
    for p in sorted((p for p in timeline.parameters if p.trained), key=lambda p: -p.numel):
        size, rank = heapq.heappop(sizes)
        shares[rank].append(p)
        heapq.heappush(sizes, (size + p.numel, rank))
    return shares[max(sizes, key=lambda size: (size[0], -size[1]))[1]]


@dataclass(frozen=True)
class ShardedModel:
    """A model that FSDP2 shards over so many ranks: bytes of each of its groups, which are blocks and the rest (-1)."""

    timeline: StepTimeline
    ranks: int
    gathered: Mapping[int, int]
    """Bytes of a group as it computes, by number of its block."""

    gradient_bytes: Mapping[int, int]
    """Bytes of the whole gradients of a group as they are summed up over ranks."""

    staged: bool
    """True if collectives copy what they send, as gloo does."""

    once: bool = False
    """True if parameters stay gathered, and gradients whole, until the last microbatch."""

    in_copies: bool = False
    """True if the mesh has a dimension of copies, be it of one: what was reduced is then kept until backward ends."""

    @classmethod
    def of(
        cls,
        timeline: StepTimeline,
        ranks: int,
        *,
        compute: int | None,
        staged: bool,
        once: bool = False,
        in_copies: bool = False,
    ) -> ShardedModel:
        """Return the model; `compute`: bytes of an element as it computes, if not as it is kept."""
        gathered: dict[int, int] = {-1: 0, **dict.fromkeys(range(len(timeline.blocks)), 0)}
        gradients = dict(gathered)
        for p in timeline.parameters:
            elements = padded_elements(p, ranks)
            gathered[p.block] += elements * (compute or p.element_size)
            gradients[p.block] += elements * p.element_size if p.trained else 0
        return cls(timeline, ranks, gathered, gradients, staged, once, in_copies)

    @property
    def prefetches(self) -> bool:
        """True if a block is gathered while the one behind it runs backward: FSDP2 forgets their order behind one."""
        return self.timeline.turn is None or self.timeline.turn.after != "backward"

    @property
    def gathers_again(self) -> bool:
        """True if the microbatch before has freed in its backward what this one had gathered in its forward."""
        return not self.once and not self.prefetches

    @property
    def gathered_before(self) -> bool:
        """True if an earlier microbatch has left parameters gathered."""
        return self.once and self.timeline.follows

    @property
    def summed_before(self) -> bool:
        """True if an earlier microbatch has left gradients whole."""
        return self.once and self.timeline.accumulates

    @property
    def reduces(self) -> bool:
        """True if gradients are reduced in this microbatch."""
        return not self.once or self.timeline.is_last

    @property
    def reduced_before(self) -> bool:
        """True if gradients of earlier microbatches are there, reduced."""
        return not self.once and self.timeline.accumulates


def padded_elements(p: PredictedParameter, ranks: int) -> int:
    """Return the elements of a parameter with its first dimension made a multiple of the number of ranks."""
    rows = p.shape[0] if p.shape else 1
    return ceil(rows / ranks) * ranks * prod(p.shape[1:])


def predict_sharded(model: ShardedModel, *, reshard: bool) -> Iterator[Term]:
    """Yield the terms of a rank of FSDP2; `reshard`: parameters are freed between a block's forward and backward."""
    timeline, blocks = model.timeline, range(len(model.timeline.blocks))
    yield from buffer_terms(timeline)
    for p in timeline.parameters:
        own = padded_elements(p, model.ranks) // model.ranks
        yield Term("parameters", p.name, own * p.element_size)
        if p.trained:
            yield from state_terms(timeline, p, own)
    turn = timeline.turn
    kept = not reshard and turn is not None and turn.phase == turn.after == "forward"
    yield from _gathered_in_forward(model, reshard=reshard or model.gathers_again, kept=model.gathered_before or kept)
    for block in reversed(blocks):
        yield from _backward_of(model, block, reshard=reshard or model.gathers_again)
    yield from _unsharded_gradients(model, -1, timeline.at("update"))
    since = 0 if model.reduced_before else timeline.at("update")
    yield Term("gradients", "rest", model.gradient_bytes[-1] // model.ranks, since, timeline.at("steady"))


def _gathered_in_forward(model: ShardedModel, *, reshard: bool, kept: bool) -> Iterator[Term]:
    """Yield what is gathered in forward: an output of the collective stays until the next one has been copied.

    `kept`: an earlier microbatch has left it gathered.
    """
    timeline, last = model.timeline, _last_block(model.timeline)
    if kept:
        for block, size in model.gathered.items():
            until = (
                timeline.at("update") if block < 0 or not model.reduces else timeline.at("backward", "finish", block)
            )
            yield Term("communication", f"{_name(timeline, block)} gathered", size, 0, until)
        return
    begin, backward = timeline.at("forward"), timeline.at("backward")
    yield Term("communication", "rest gathered", model.gathered[-1], begin, timeline.at("update"))
    before, since = -1, begin
    for block in range(len(timeline.blocks)):
        reach, enter = timeline.at("forward", "reach", block), timeline.at("forward", "enter", block)
        if model.ranks > 1:
            yield Term("communication", f"{_name(timeline, before)} all-gather", model.gathered[before], since, enter)
        if model.staged:
            yield Term("communication", f"{_name(timeline, block)} staged", model.gathered[block], reach, enter)
        until = timeline.at("forward", "leave", block) if reshard else timeline.at("backward", "finish", block)
        yield Term("communication", f"{_name(timeline, block)} gathered", model.gathered[block], enter, until)
        before, since = block, reach
    if model.ranks > 1:
        yield Term("communication", f"{_name(timeline, last)} all-gather", model.gathered[last], since, backward)


def _last_block(timeline: StepTimeline) -> int:
    """Return the number of the last block; -1 if there is none."""
    return len(timeline.blocks) - 1


def _backward_of(model: ShardedModel, block: int, *, reshard: bool) -> Iterator[Term]:
    """Yield what a block holds in backward: gathered again, its gradients, and what reduces them.

    While a block computes, the one before it is gathered already.
    """
    timeline, size, name = model.timeline, model.gathered[block], _name(model.timeline, block)
    reach, finish, leave = (timeline.at("backward", what, block) for what in ("reach", "finish", "leave"))
    behind = min(block + 1, _last_block(timeline))
    if reshard and not model.prefetches:
        reach = timeline.at("backward", "enter", block)
        asked = timeline.at("backward", "reach", block)
        if model.ranks > 1:
            yield Term("communication", f"{name} all-gather", size, asked, reach)
        if model.staged:
            yield Term("communication", f"{name} staged", size, asked, reach)
    elif reshard and model.ranks > 1:
        asked = timeline.at("backward", "reach", behind)
        yield Term("communication", f"{name} all-gather", size, asked, reach)
        if model.staged and behind > block:
            yield Term("communication", f"{name} staged", size, asked, timeline.at("backward", "enter", behind))
    if reshard:
        yield Term("communication", f"{name} gathered", size, reach, finish)
    if not model.reduces:
        yield from _unsharded_gradients(model, block, leave)
        return
    whole = model.gradient_bytes[block]
    until = timeline.at("backward", "finish", block - 1) if block else timeline.at("update")
    yield Term("communication", f"{name} reduce-scatter", whole, finish, until)
    if model.staged:
        yield Term("communication", f"{name} reduce-scatter staged", whole, finish, leave)
    yield from _unsharded_gradients(model, block, finish if model.staged else leave)
    reduced = finish if model.staged else leave
    if model.reduced_before:
        end = timeline.at("update") if model.in_copies else leave
        yield Term("communication", f"{name} reduced", whole // model.ranks, finish, end)
    yield Term("gradients", name, whole // model.ranks, 0 if model.reduced_before else reduced, timeline.at("steady"))


def _unsharded_gradients(model: ShardedModel, block: int, until: int) -> Iterator[Term]:
    for number, p in enumerate(model.timeline.parameters):
        if p.block == block and p.trained:
            since = 0 if model.summed_before else model.timeline.gradient_at(number)
            yield Term("gradients", f"{p.name}, not reduced", p.size, since, until if model.reduces else None)


def _name(timeline: StepTimeline, block: int) -> str:
    return timeline.blocks[block] if block >= 0 else "rest"


def predict_single(config: Config, timeline: StepTimeline) -> Prediction:
    """Return what one process holds, without a wrapper."""
    _refuse_unplanned("single", config)
    return Prediction(tuple(predict_whole(timeline, buckets=False)))


def predict_native(config: Config, timeline: StepTimeline, ranks: int, *, device: str) -> Prediction:
    """Return what a rank of native holds, by what is split over so many ranks."""
    shard = config.parallel.shard
    _refuse_unplanned(f"native/{shard}", config)
    if uses_ddp(config):
        terms = predict_whole(timeline, buckets=True) if shard == "nothing" else predict_optimizer(timeline, ranks)
        return Prediction(tuple(terms))
    if scalar := next((p.name for p in timeline.parameters if not p.shape), ""):
        raise Unsupported(
            f"native/{shard}", [f"FSDP2 does not take parameters without dimensions, and {scalar} has none"]
        )
    compute = 2 if config.train.precision == "bf16-master" else None
    model = ShardedModel.of(timeline, ranks, compute=compute, staged=device == "cpu" and ranks > 1)
    return Prediction(tuple(predict_sharded(model, reshard=shard == "parameters")))


def _refuse_unplanned(cell: str, config: Config) -> None:
    """Raise Unsupported for settings that the closed forms do not cover."""
    refuse_unplanned(cell, config, *(["options.native.wrapper: dp"] if options_of(config).wrapper == "dp" else ()))
