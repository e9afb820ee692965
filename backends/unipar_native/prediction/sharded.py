"""Closed forms of what a rank of FSDP2 holds in a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import ceil, prod
from typing import Final

from unipar.backend.prediction.terms import buffer_terms, pinned_bytes, state_terms
from unipar.backend.prediction.timeline import MemoryPlace, PredictedParameter, StepTimeline, Term


@dataclass(frozen=True)
class ShardedModel:
    """A model that FSDP2 shards over so many ranks, in groups, which are its blocks and the rest (-1)."""

    timeline: StepTimeline
    ranks: int
    gathered: Mapping[int, int]
    """Bytes of a group as it computes, by number of its block."""

    gradient_bytes: Mapping[int, int]
    """Bytes of the whole gradients of a group as they are summed up over ranks."""

    masters: bool
    """True if shards, gradients and the optimizer's state are fp32 beside parameters that compute in bf16."""

    staged: bool
    """True if collectives copy what they send, as gloo does."""

    reshard: bool
    """True if blocks are freed between their forward and their backward."""

    reshard_rest: bool
    """True if the rest is, too."""

    once: bool
    """True if parameters stay gathered, and gradients whole, until the last microbatch of a step."""

    offloaded: bool
    """True if shards, their gradients and the optimizer's tensors are on the host."""

    in_copies: bool
    """True if the mesh has a dimension of copies, be it of one: what was reduced is then kept until backward ends."""

    @classmethod
    def of(
        cls,
        timeline: StepTimeline,
        ranks: int,
        *,
        masters: bool,
        staged: bool,
        reshard: bool,
        reshard_rest: bool,
        once: bool,
        offloaded: bool = False,
        in_copies: bool = False,
    ) -> ShardedModel:
        """Return the model with the bytes of its groups."""
        gathered: dict[int, int] = {-1: 0, **dict.fromkeys(range(len(timeline.blocks)), 0)}
        gradients = dict(gathered)
        for p in timeline.parameters:
            elements = padded_elements(p, ranks)
            gathered[p.block] += elements * (COMPUTING_BYTES if masters else p.element_size)
            gradients[p.block] += elements * p.element_size if p.trained else 0
        alone = ranks == 1
        return cls(
            timeline,
            ranks,
            gathered,
            gradients,
            masters=masters,
            staged=staged and not alone,
            reshard=reshard,
            reshard_rest=reshard_rest,
            once=once,
            offloaded=offloaded,
            in_copies=in_copies,
        )

    def of_block(self, block: int) -> Iterator[PredictedParameter]:
        """Yield the parameters of a group."""
        return (p for p in self.timeline.parameters if p.block == block)

    @property
    def home(self) -> MemoryPlace:
        """Place of a rank's shards."""
        return "host" if self.offloaded else "device"

    @property
    def prefetches(self) -> bool:
        """True if a block is gathered while the one behind it runs backward: FSDP2 forgets their order behind one."""
        return self.timeline.turn is None or self.timeline.turn.after != "backward"

    @property
    def frees_blocks(self) -> bool:
        """True if blocks are gathered once more in backward.

        That is also so if the microbatch before has freed in its backward what this one had gathered in its forward.
        """
        return self.reshard or (not self.once and not self.prefetches)

    @property
    def gathered_before(self) -> bool:
        """True if an earlier microbatch has left parameters gathered."""
        turn = self.timeline.turn
        kept = not self.reshard and turn is not None and turn.phase == turn.after == "forward"
        return kept or (self.once and self.timeline.follows)

    @property
    def summed_before(self) -> bool:
        """True if an earlier microbatch has left gradients whole."""
        return self.once and self.timeline.accumulates

    @property
    def reduced_before(self) -> bool:
        """True if gradients of earlier microbatches are there, reduced."""
        return not self.once and self.timeline.accumulates

    @property
    def reduces(self) -> bool:
        """True if gradients are reduced in this microbatch."""
        return not self.once or self.timeline.is_last


COMPUTING_BYTES: Final = 2
"""Bytes of an element of a parameter that computes in bf16 beside an fp32 master."""


def padded_elements(p: PredictedParameter, ranks: int) -> int:
    """Return the elements of a parameter with its first dimension made a multiple of the number of ranks."""
    rows = p.shape[0] if p.shape else 1
    return ceil(rows / ranks) * ranks * prod(p.shape[1:])


def built_sharded(model: ShardedModel) -> Iterator[Term]:
    """Yield what rank 0 holds on the CPU when the shards are filled: they, and the whole model that it created."""
    shards = sum(padded_elements(p, model.ranks) // model.ranks * p.element_size for p in model.timeline.parameters)
    yield Term("temporaries", "whole model, of rank 0", sum(p.size for p in model.timeline.parameters))
    yield Term("parameters", "shards", shards)


def predict_sharded(model: ShardedModel) -> Iterator[Term]:
    """Yield the terms of a rank of FSDP2."""
    timeline, blocks = model.timeline, range(len(model.timeline.blocks))
    yield from buffer_terms(timeline)
    for p in timeline.parameters:
        own = padded_elements(p, model.ranks) // model.ranks
        size = own * p.element_size
        yield Term("parameters", p.name, pinned_bytes(size) if model.offloaded else size, place=model.home)
        if p.trained:
            yield from (replace(term, place=model.home) for term in state_terms(timeline, p, own))
    if model.gathered_before:
        for block in (-1, *blocks):
            stays = block < 0 or not model.reduces
            until = timeline.at("update") if stays else timeline.at("backward", "finish", block)
            yield Term("communication", f"{_name(timeline, block)} gathered", model.gathered[block], 0, until)
    else:
        yield from _gathered_in_forward(model)
        yield from _rest_in_backward(model)
    for block in reversed(blocks):
        yield from _backward_of(model, block)
    yield from _unsharded_gradients(model, -1, timeline.at("update") if model.reduces else None)
    yield from _sharded_gradients(model, -1, timeline.at("update"))


def _gathered_in_forward(model: ShardedModel) -> Iterator[Term]:
    """Yield what is gathered in forward: an output of the collective stays until the next one has been copied."""
    timeline, last = model.timeline, _last_block(model.timeline)
    begin, backward = timeline.at("forward"), timeline.at("backward")
    until = backward if model.reshard_rest else timeline.at("update")
    yield Term("communication", "rest gathered", model.gathered[-1], begin, until)
    before, since = -1, begin
    for block in range(len(timeline.blocks)):
        reach, enter = timeline.at("forward", "reach", block), timeline.at("forward", "enter", block)
        if model.ranks > 1:
            yield Term("communication", f"{_name(timeline, before)} all-gather", model.gathered[before], since, enter)
        yield from _sent(model, block, reach, enter)
        if model.masters:
            cast = model.gathered[block] // model.ranks
            yield Term("communication", f"{_name(timeline, block)} shards in bf16", cast, reach, enter)
        left, ended = timeline.at("forward", "leave", block), timeline.at("backward", "finish", block)
        until = left if model.frees_blocks else ended
        yield Term("communication", f"{_name(timeline, block)} gathered", model.gathered[block], enter, until)
        before, since = block, reach
    if model.ranks > 1:
        yield Term("communication", f"{_name(timeline, last)} all-gather", model.gathered[last], since, backward)


def _rest_in_backward(model: ShardedModel) -> Iterator[Term]:
    """Yield what is gathered when a backward begins: the rest again, then the last block, ahead of its time."""
    timeline, last = model.timeline, _last_block(model.timeline)
    begin, reach, enter = (timeline.at("backward", what) for what in ("begin", "reach", "enter"))
    if model.reshard_rest:
        yield Term("communication", "rest gathered", model.gathered[-1], begin, timeline.at("update"))
        if model.ranks > 1:
            yield Term("communication", "rest all-gather", model.gathered[-1], begin, reach)
        yield from _sent(model, -1, begin, reach)
    if model.frees_blocks and model.prefetches and last >= 0 and model.gathered[-1]:
        if model.ranks > 1:
            until = timeline.at("backward", "reach", last)
            yield Term("communication", f"{_name(timeline, last)} all-gather", model.gathered[last], reach, until)
        yield from _sent(model, last, reach, enter)


def _sent(model: ShardedModel, block: int, since: int, until: int) -> Iterator[Term]:
    """Yield what gathering a group needs for a while: a copy that gloo makes, or shards that come from the host."""
    name = _name(model.timeline, block)
    if model.staged:
        yield Term("communication", f"{name} staged", model.gathered[block], since, until)
    if model.offloaded:
        own = [padded_elements(p, model.ranks) // model.ranks * p.element_size for p in model.of_block(block)]
        moved = max(own, default=0) if model.masters else sum(own)  # one after the other is cast to bf16
        yield Term("communication", f"{name} shards, from the host", moved, since, until)


def _last_block(timeline: StepTimeline) -> int:
    """Return the number of the last block; -1 if there is none."""
    return len(timeline.blocks) - 1


def _backward_of(model: ShardedModel, block: int) -> Iterator[Term]:
    """Yield what a block holds in backward: gathered again, its gradients, and what reduces them.

    While a block computes, the one before it is gathered already.
    """
    timeline, size, name = model.timeline, model.gathered[block], _name(model.timeline, block)
    reach, finish, leave = (timeline.at("backward", what, block) for what in ("reach", "finish", "leave"))
    if model.frees_blocks and not model.gathered_before:
        if not model.prefetches:
            asked, reach = reach, timeline.at("backward", "enter", block)
            if model.ranks > 1:
                yield Term("communication", f"{name} all-gather", size, asked, reach)
            yield from _sent(model, block, asked, reach)
        elif model.ranks > 1 and block < _last_block(timeline):
            asked, enter = (timeline.at("backward", what, block + 1) for what in ("reach", "enter"))
            yield Term("communication", f"{name} all-gather", size, asked, reach)
            yield from _sent(model, block, asked, enter)
        yield Term("communication", f"{name} gathered", size, reach, finish)
    if not model.reduces:
        yield from _unsharded_gradients(model, block, None)
        return
    whole = model.gradient_bytes[block]
    until = timeline.at("backward", "finish", block - 1) if block else timeline.at("update")
    yield Term("communication", f"{name} reduce-scatter", whole, finish, until)
    if model.staged:
        yield Term("communication", f"{name} reduce-scatter staged", whole, finish, leave)
    reduced = finish if model.staged else leave
    yield from _unsharded_gradients(model, block, reduced)
    if model.reduced_before or model.offloaded:  # what is offloaded is on the device until it has moved
        end = timeline.at("update") if model.in_copies else leave
        yield Term("communication", f"{name} reduced", whole // model.ranks, finish, end)
    yield from _sharded_gradients(model, block, reduced)


def _sharded_gradients(model: ShardedModel, block: int, reduced: int) -> Iterator[Term]:
    """Yield a group's gradients of one rank, which are there from the first microbatch on, or once reduced."""
    timeline = model.timeline
    since, steady = 0 if model.reduced_before else reduced, timeline.at("steady")
    if not model.offloaded:
        yield Term("gradients", _name(timeline, block), model.gradient_bytes[block] // model.ranks, since, steady)
        return
    for p in model.of_block(block):
        if p.trained:
            size = pinned_bytes(padded_elements(p, model.ranks) // model.ranks * p.element_size)
            yield Term("gradients", p.name, size, since, steady, place="host")


def _unsharded_gradients(model: ShardedModel, block: int, until: int | None) -> Iterator[Term]:
    """Yield a group's gradients before they are summed up; in fp32 if earlier microbatches' are kept with them."""
    for number, p in enumerate(model.timeline.parameters):
        if p.block == block and p.trained:
            kept = p.numel * COMPUTING_BYTES if model.masters and not model.summed_before else p.size
            since = 0 if model.summed_before else model.timeline.gradient_at(number)
            yield Term("gradients", f"{p.name}, not reduced", kept, since, until)


def _name(timeline: StepTimeline, block: int) -> str:
    return timeline.blocks[block] if block >= 0 else "rest"
