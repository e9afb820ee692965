"""Closed forms of FSDP2's reductions: whole gradients, what is sent of them, and a rank's share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from unipar.prediction.fsdp2_groups import COMPUTING_BYTES, ShardedModel
from unipar.prediction.terms import pinned_bytes
from unipar.prediction.timeline import PredictedParameter, Term


@dataclass(frozen=True)
class LastReductions:
    """Groups that are reduced when a backward is over, one after another: the rest, then blocks whose input takes none.

    All of that lies between two moments of a timeline, so that the fullest of them is told.
    """

    model: ShardedModel
    groups: Sequence[int]
    fullest: int
    """Place of the group in whose reduction the rank holds most; -1: nothing is reduced in this microbatch."""

    @classmethod
    def of(cls, model: ShardedModel) -> LastReductions:
        """Return the groups that end with the backward."""
        groups = [g for g in sorted(model.order) if g < 0 or not model.timeline.happens("backward", "finish", g)]
        places = range(len(groups)) if model.reduces else ()
        return cls(model, groups, max(places, key=lambda place: cls(model, groups, place)._held(), default=-1))

    def freed(self, group: int) -> int:
        """Return the moment at which a group's parameters and gradients are gone, as far as the fullest shows it."""
        return self._moment(self.groups.index(group) <= self.fullest)

    def forgotten(self, group: int) -> int:
        """Return the moment at which a group is gone that was gathered ahead for nothing."""
        return self._moment(self.groups.index(group) < self.fullest)

    def terms(self) -> Iterator[Term]:
        """Yield gradients of these groups, and what is sent of them."""
        end, update = self._moment(is_over=True), self._moment(is_over=False)
        for place, group in enumerate(self.groups):
            if self.fullest < 0:
                yield from _whole_gradients(self.model, group, None, None)
                continue
            is_now = place == self.fullest
            is_reduced = place < self.fullest or (is_now and _reduces_late(self.model, group))
            yield from _whole_gradients(self.model, group, self._moment(is_reduced), self.freed(group))
            if is_now:
                yield from _sent(self.model, group, end, update, update)
            yield from _local_batches(self.model, group, self._moment(is_reduced))

    def _moment(self, is_over: bool) -> int:
        """Return the moment at which something ends that is over, or is not, when the rank holds most."""
        return self.model.timeline.at("backward", "finish") if is_over else self.model.timeline.at("update")

    def _held(self) -> int:
        model, before, behind = self.model, self.groups[: self.fullest], self.groups[self.fullest + 1 :]
        now = self.groups[self.fullest]
        held = sum(_bytes_of_share(model, group) for group in before if not (model.reduced_before or model.offloaded))
        held += sum(model.gathered[g] for g in behind if model.is_reached(g) or not model.is_freed(g))
        held += sum(_bytes_of_whole(model, group) + _bytes_to_add(model, group) for group in behind)
        full_bytes = _bytes_of_whole(model, now) + _bytes_of_padded(model, now)
        held += model.gradient_bytes[now] + max(full_bytes, _bytes_of_reduced(model, now))
        for_nothing = [group for group in (now, *behind) if model.is_gathered_for_nothing(group)]
        return held + sum(model.sent_with(group).get("all-gather", 0) for group in for_nothing)


def reduce_block(model: ShardedModel, last: LastReductions, group: int) -> Iterator[Term]:
    """Yield gradients of a block that is reduced as its backward ends, and what is sent of them."""
    timeline = model.timeline
    if not model.reduces:
        yield from _whole_gradients(model, group, None, timeline.at("backward", "finish", group))
        return
    finish, leave = (timeline.at("backward", what, group) for what in ("finish", "leave"))
    reduced = finish if _reduces_late(model, group) else leave
    ends = [timeline.at("backward", "finish", g) for g in model.order if g >= 0 and g not in last.groups]
    if later := [end for end in ends if end > finish]:
        until = min(later)
    else:
        until = timeline.at("backward", "finish") if last.groups else timeline.at("update")
    yield from _whole_gradients(model, group, reduced, finish)
    yield from _sent(model, group, finish, leave, until)
    yield from _local_batches(model, group, reduced)


def _sent(model: ShardedModel, group: int, first: int, leave: int, until: int) -> Iterator[Term]:
    """Yield what is there of a group beside gradients as they are reduced, and stays until the next reduction."""
    name, full_bytes = model.name(group), model.gradient_bytes[group]
    yield Term("communication", f"{name} reduce-scatter", full_bytes, first, until)
    late = _reduces_late(model, group)
    if late:
        staged = full_bytes if model.copies_what_is_sent(group) else 0
        yield Term("communication", f"{name} reduce-scatter staged", staged, first, leave)
        yield Term("gradients", f"{name}, last not reduced", _bytes_of_last(model, group), first, leave)
    if not late and (padded := _bytes_of_padded(model, group)):
        yield Term("communication", f"{name} padded", padded, first, leave)
    if model.reduced_before or model.offloaded:  # what is offloaded is on the device until it has moved
        end = model.timeline.at("update") if model.in_copies else leave
        yield Term("communication", f"{name} reduced", _bytes_of_share(model, group), first if late else leave, end)


def _reduces_late(model: ShardedModel, group: int) -> bool:
    """Return whether a rank holds more when a group's whole gradients are gone, and its share of the sum is there."""
    return _bytes_of_reduced(model, group) > _bytes_of_whole(model, group) + _bytes_of_padded(model, group)


def _bytes_of_padded(model: ShardedModel, group: int) -> int:
    """Return the bytes of copies that torch makes on the CPU, of gradients whose rows cannot be split evenly.

    As it casts them, it copies each once more.
    """
    if not model.copies_what_is_sent(group):
        return 0
    sizes = [(model.padded(p) * _bytes_of_element(model, p), p) for _, p in model.used_in(group)]
    cast = max((size for size, _ in sizes), default=0) if model.masters and not model.summed_before else 0
    return cast + sum(size for size, p in sizes if p.shape[0] % model.ranks_in(group))


def _bytes_of_reduced(model: ShardedModel, group: int) -> int:
    """Return the bytes of a group's share, and of what is there beside it for a moment."""
    staged = model.gradient_bytes[group] if model.copies_what_is_sent(group) else 0
    return _bytes_of_share(model, group) + staged + _bytes_of_last(model, group)


def _bytes_of_last(model: ShardedModel, group: int) -> int:
    """Return the bytes of the gradient that FSDP2 still names as it reduces the group: the last one."""
    last = None if model.ranks_in(group) == 1 else model.last_used_in(group)
    return 0 if last is None else last.numel * _bytes_of_element(model, last)


def _bytes_of_share(model: ShardedModel, group: int) -> int:
    return model.gradient_bytes[group] // model.ranks_in(group)


def _local_batches(model: ShardedModel, group: int, reduced: int) -> Iterator[Term]:
    """Yield a rank's share of a group's gradients, which is there from the first microbatch on, or once reduced."""
    since, steady = 0 if model.reduced_before else reduced, model.timeline.at("steady")
    if not model.offloaded:
        yield Term("gradients", model.name(group), _bytes_of_share(model, group), since, steady)
        return
    for _, p in model.used_in(group):
        yield Term("gradients", p.name, pinned_bytes(model.bytes_of_shard(p)), since, steady, place="host")


def _bytes_of_whole(model: ShardedModel, group: int) -> int:
    """Return the bytes of a group's whole gradients as they are reduced."""
    return sum(p.numel * _bytes_of_element(model, p) for _, p in model.used_in(group))


def _bytes_to_add(model: ShardedModel, group: int) -> int:
    """Return the bytes of a group's bf16 gradients that are to be added to earlier ones of fp32."""
    if not (model.masters and model.summed_before):
        return 0
    return sum(p.numel * COMPUTING_BYTES for _, p in model.used_in(group))


def _bytes_of_element(model: ShardedModel, p: PredictedParameter) -> int:
    """Return the bytes of an element of a gradient as it is reduced: earlier microbatches' are summed up in fp32."""
    return COMPUTING_BYTES if model.masters and not model.summed_before else p.element_size


def _whole_gradients(model: ShardedModel, group: int, until: int | None, added: int | None) -> Iterator[Term]:
    """Yield a group's gradients before they are reduced; `added`: when those of this microbatch are, to earlier ones.

    Those are fp32 beside bf16 ones; of one dtype, they are added as they come.
    """
    timeline = model.timeline
    for number, p in model.used_in(group):
        computed = p.numel * COMPUTING_BYTES if model.masters else p.size
        since = timeline.gradient_at(number)
        if model.summed_before:
            yield Term("gradients", f"{p.name}, not reduced", p.size, 0, until)
        else:
            yield Term("gradients", f"{p.name}, not reduced", computed, since, until)
        if model.summed_before and model.masters:
            yield Term("gradients", f"{p.name}, in bf16", computed, since, added)
