"""Closed forms of what a rank of FSDP2 holds in a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from unipar.prediction.fsdp2_groups import ShardedModel
from unipar.prediction.fsdp2_reductions import LastReductions, reduce_block
from unipar.prediction.terms import buffer_terms, gradient_term, norm_terms, pinned_bytes, state_terms, update_terms
from unipar.prediction.timeline import Term, UpdatedTensor


def built_sharded(model: ShardedModel) -> Iterator[Term]:
    """Yield what rank 0 holds on the CPU when the shards are filled: they, and the whole model that it created."""
    parameters = model.timeline.parameters
    yield Term("temporaries", "whole model, of rank 0", sum(p.size for p in parameters))
    yield Term("parameters", "shards", sum(model.bytes_of_shard(p) for p in parameters))


def predict_sharded(model: ShardedModel, *, norm_in_fp64: bool = False) -> Iterator[Term]:
    """Yield the terms of a rank of FSDP2; `norm_in_fp64`: so the norm of gradients is added up."""
    timeline, last = model.timeline, LastReductions.of(model)
    yield from buffer_terms(timeline)
    yield from update_terms(timeline, _shards(model), split=True, place=model.home)
    if norm_in_fp64:
        yield from norm_terms(timeline, _shards(model), place=model.home)
    for number, p in enumerate(timeline.parameters):
        size = pinned_bytes(model.bytes_of_shard(p)) if model.offloaded else model.bytes_of_shard(p)
        yield Term("parameters", p.name, size, place=model.home)
        if p.trained:
            states = state_terms(timeline, p, model.elements_of_shard(p))
            yield from (replace(term, place=model.home) for term in states)
            if p.block in model.whole_groups:
                yield gradient_term(timeline, number)
            elif not timeline.has_gradient(number):
                name = f"{p.name}, filled with zeros"
                yield Term("gradients", name, size, timeline.at("update"), timeline.at("steady"), place=model.home)
    yield from _gathered_in_forward(model, last)
    for group in reversed(model.order):
        if model.is_reached(group):
            yield from _gathered_in_backward(model, last, group)
    for group in reversed(model.order):
        if group not in last.groups:
            yield from reduce_block(model, last, group)
    yield from last.terms()


def _shards(model: ShardedModel) -> Sequence[UpdatedTensor]:
    """Return what the optimizer of the rank with the largest shards updates."""
    trained = [p for p in model.timeline.parameters if p.trained]
    return [
        UpdatedTensor((-(-p.shape[0] // model.ranks_in(p.block)), *p.shape[1:]), p.element_size, p.group)
        for p in trained
    ]


def _gathered_in_forward(model: ShardedModel, last: LastReductions) -> Iterator[Term]:
    """Yield what forward gathers: an output of the collective stays until the next group has been copied out."""
    timeline = model.timeline
    output: tuple[str, int, int] | None = None
    for group in sorted(model.order, key=lambda g: (g >= 0, timeline.at("forward", "reach", g))):
        name, size = model.name(group), model.gathered[group]
        freed = timeline.at("backward") if group < 0 else timeline.at("forward", "leave", group)
        until = freed if model.is_freed(group) else _freed_in_backward(model, last, group)
        if model.gathered_before:
            yield Term("communication", f"{name} gathered", size, 0, until)
            continue
        reach, enter = timeline.at("forward"), timeline.at("forward", "call")
        if group >= 0:
            reach, enter = (timeline.at("forward", what, group) for what in ("reach", "enter"))
        sent = dict(model.sent_with(group))
        if gathered := sent.pop("all-gather", 0):
            if output is not None:
                yield Term("communication", *output, enter)
            output = f"{name} all-gather", gathered, reach
        fills = size + model.cast_alone(group)
        if sum(sent.values()) > fills:  # what is copied to be sent is freed before the group gets its memory
            yield from _named(name, sent, reach, enter)
        else:
            yield from _named(name, {"gathered": size, "cast": fills - size}, reach, enter)
        yield Term("communication", f"{name} gathered", size, enter, until)
    if output is not None:
        yield Term("communication", *output, timeline.at("backward"))


def _gathered_in_backward(model: ShardedModel, last: LastReductions, group: int) -> Iterator[Term]:
    """Yield what is there as a gradient arrives at a group: it is gathered, and then the one before it is, ahead."""
    timeline, name, ahead = model.timeline, model.name(group), model.gathered_ahead_by(group)
    reach, enter = (timeline.at("backward", what, group) for what in ("reach", "enter"))
    moments: list[Mapping[str, int]] = []
    gathered = {f"{name} gathered": model.gathered[group]} if model.is_freed(group) else {}
    if gathered:
        sent = {f"{name} {what}": size for what, size in model.sent_with(group).items()}
        output = {what: size for what, size in sent.items() if what.endswith("all-gather")}
        if group < 0:  # asked for as soon as the backward begins
            yield from _terms(sent, timeline.at("backward"), reach)
        elif model.gathered_ahead_of(group) is None:
            moments.append(sent)
        moments.append(output | gathered | {f"{name} cast": model.cast_alone(group)})
        yield from _terms(gathered, enter, _freed_in_backward(model, last, group))
    if ahead is not None:
        sent = {f"{model.name(ahead)} {what}": size for what, size in model.sent_with(ahead).items()}
        output = {what: size for what, size in sent.items() if what.endswith("all-gather")}
        moments.append(gathered | sent)
        until = timeline.at("backward", "reach", ahead) if model.is_reached(ahead) else last.forgotten(ahead)
        yield from _terms(output, enter, until)
    yield from _terms(max(moments, key=lambda sizes: sum(sizes.values()), default={}), reach, enter)


def _freed_in_backward(model: ShardedModel, last: LastReductions, group: int) -> int:
    """Return the moment at which a group that is gathered in backward is freed."""
    if not model.reduces:
        return model.timeline.at("update")
    return last.freed(group) if group in last.groups else model.timeline.at("backward", "finish", group)


def _named(name: str, sizes: Mapping[str, int], first: int, until: int) -> Iterator[Term]:
    return _terms({f"{name} {what}": size for what, size in sizes.items()}, first, until)


def _terms(sizes: Mapping[str, int], first: int, until: int) -> Iterator[Term]:
    for name, size in sizes.items():
        if size:
            yield Term("communication", name, size, first, until)
