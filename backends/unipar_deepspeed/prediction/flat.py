"""Stages 1 and 2: flat groups of parameters, one partition of each on a rank, and gradients reduced in buckets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from math import ceil
from typing import final

from unipar.prediction.terms import buffer_terms
from unipar.prediction.timeline import Category, Prediction, Term
from unipar_deepspeed.prediction.offloaded import (
    flat_group_terms,
    moved_gradient,
    passing_buffers,
    summed_gradients,
)
from unipar_deepspeed.prediction.zero_model import (
    MASTER_BYTES,
    Instants,
    SentBytes,
    ZeroModel,
    alternatives,
    merged_states,
    update_of_partition,
)

ALIGNMENT = 2
"""Elements of which every partition's size is a multiple (`nccl_start_alignment_factor`)."""

FIRST_RANKS = 8
"""Number of ranks that are looked at for the fullest moment of stage 1, beside the one that holds most gradients."""


@dataclass(frozen=True)
class FlatGroup:
    """Parameters of one group of the optimizer, in one flat tensor."""

    members: tuple[int, ...]
    offsets: tuple[int, ...]
    """Place of each parameter's first element; one more for the end of the last."""

    partition: int
    """Elements of one rank."""

    @classmethod
    def of(cls, model: ZeroModel, members: Sequence[int]) -> FlatGroup:
        """Return the group of these parameters."""
        sizes = [model.parameters[number].numel for number in members]
        each = ALIGNMENT * model.ranks
        padded = ceil(sum(sizes) / each) * each
        return cls(tuple(members), tuple(accumulate(sizes, initial=0)), padded // model.ranks)

    def slices(self, place: int) -> Iterator[tuple[int, int]]:
        """Yield the ranks that update a part of a parameter, each with the number of its elements."""
        at, end = self.offsets[place], self.offsets[place + 1]
        while at < end:
            rank = at // self.partition
            stop = min(end, (rank + 1) * self.partition)
            yield rank, stop - at
            at = stop


@dataclass(frozen=True)
class FlatModel:
    """All groups, and one rank, which holds the gradients of the whole parameters of which it updates a part."""

    model: ZeroModel
    groups: tuple[FlatGroup, ...]
    slices: dict[int, tuple[tuple[int, int], ...]]
    """Ranks that update a parameter, with their numbers of elements, by its number."""

    rank: int
    gradients: int
    """Elements of the gradients that this rank holds between backward and update."""

    @classmethod
    def of(cls, model: ZeroModel) -> FlatModel:
        """Return the flat groups of a model, with the rank that holds most gradients."""
        groups = tuple(FlatGroup.of(model, members) for members in model.groups)
        slices = {n: tuple(group.slices(i)) for group in groups for i, n in enumerate(group.members)}
        held = [0] * model.ranks
        for number, parts in slices.items():
            for rank, _ in parts:
                held[rank] += model.parameters[number].numel
        rank = max(range(model.ranks), key=lambda r: held[r])
        return cls(model, groups, slices, rank, held[rank])

    def on(self, rank: int) -> FlatModel:
        """Return the same with another rank."""
        held = sum(
            self.model.parameters[n].numel for n, parts in self.slices.items() if any(r == rank for r, _ in parts)
        )
        return replace(self, rank=rank, gradients=held)

    def updates(self, number: int) -> bool:
        """Return whether the rank updates a part of a parameter."""
        return any(rank == self.rank for rank, _ in self.slices[number])

    def largest_part(self, numbers: Sequence[int]) -> int:
        """Return the elements of the largest part that the rank updates, of some parameters."""
        return max((size for n in numbers for rank, size in self.slices[n] if rank == self.rank), default=0)

    @property
    def padding_bytes(self) -> int:
        """Bytes of zeros that fill the rank's partitions up, beside its gradients."""
        mine = sum(size for parts in self.slices.values() for rank, size in parts if rank == self.rank)
        return (sum(group.partition for group in self.groups) - mine) * self.model.element

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients that the rank holds between backward and update."""
        return self.gradients * self.model.element


def predict_flat(model: ZeroModel, *, stage: int) -> Prediction:
    """Return what the fullest rank of stage 1 or 2 holds and sends."""
    flat, sent = FlatModel.of(model), SentBytes(model.ranks)
    terms = [*_states(flat)]
    order = [n for n in model.timeline.gradient_order if model.parameters[n].trained]
    got = set(order)
    if stage == 2 or model.overlap:
        terms += _hooked_terms(flat, sent, order, frees=stage == 2)
        times = model.timeline.microbatches if stage == 2 else 1
    else:
        terms += _reduced_at_end(flat, sent, [n for group in model.groups for n in group if n in got])
        times = 1
    if times > 1:
        each = SentBytes(model.ranks)
        _Hooked(flat, each, frees=True).run(order)
        sent.repeat(each, times - 1)
    terms += _update(flat)
    if model.element == 2:
        sent.add("all_reduce", 1)  # one byte tells whether a gradient overflowed
    for group in flat.groups:
        sent.add("all_reduce", 4)  # the norm
        sent.add("all_gather", group.partition * model.ranks * model.element)
    return Prediction(tuple(terms), sent.volumes())


def _states(flat: FlatModel) -> Iterator[Term]:
    model = flat.model
    yield from buffer_terms(model.timeline)
    for number, p in enumerate(model.parameters):
        if not p.trained:
            yield Term("parameters", p.name, model.bytes_of(number))
    for i, group in enumerate(flat.groups):
        yield Term("parameters", f"group {i}, flat", group.partition * model.ranks * model.element)
        yield from merged_states(model, group.partition, group.members, f"group {i}, partition", pins=True)
        if model.offloaded:
            yield from flat_group_terms(model, group.partition, f"group {i}")
    if model.offloaded:
        yield from passing_buffers(model)


def _hooked_terms(flat: FlatModel, sent: SentBytes, order: Sequence[int], *, frees: bool) -> Iterator[Term]:
    """Yield the terms of the last rank, which holds its gradients first, and what another holds more of them later."""
    model, update = flat.model, flat.model.timeline.at("update")
    last, fullest = _Hooked(flat.on(model.ranks - 1), sent, frees=frees), _Hooked(flat, SentBytes(1), frees=frees)
    yield from last.run(order)
    fullest.run(order)
    if model.offloaded:
        if model.timeline.accumulates and frees:
            yield from summed_gradients(model, [number for number in model.trained if flat.updates(number)])
        return
    more = flat.gradient_bytes - last.flat.gradient_bytes
    if more and fullest.since is not None:
        yield Term("gradients", "of the fullest rank", more, fullest.since, update)


@final
class _Hooked:
    """Reduction as the gradients come: a bucket is reduced when the next gradient does not fit."""

    def __init__(self, flat: FlatModel, sent: SentBytes, *, frees: bool) -> None:
        """`frees`: a gradient that this rank does not update is freed when it is reduced."""
        self.flat, self._model, self._sent, self._frees = flat, flat.model, sent, frees
        self._waiting: list[int] = []
        self._alone: dict[int, int] = {}
        """Gradients that have memory of their own, each with the moment since when."""

        self.since: int | None = None
        """Moment since when the gradients of this rank are held; None: it has none."""

        self._terms: list[Term] = []

    def run(self, order: Sequence[int]) -> list[Term]:
        """Return the terms of a microbatch whose gradients come in this order."""
        model, timeline = self._model, self._model.timeline
        update, end = timeline.at("update"), timeline.at("backward", "finish")
        once = timeline.accumulates and not self._frees  # stage 1 sums them up over microbatches, and reduces once
        for number in order:
            at = timeline.gradient_at(number)
            size = model.parameters[number].numel
            if sum(model.parameters[n].numel for n in self._waiting) + size > model.bucket:
                self._reduce(at)
            self._alone[number] = 0 if once else at
            self._waiting.append(number)
            if model.contiguous and size <= model.bucket:
                self._free(number, at + 1)
            elif model.offloaded:  # it gets memory of its own
                copied = Term("temporaries", "a gradient, copied", model.bytes_of(number), at, at + 1)
                self._terms.append(copied)
        self._reduce(end)
        for number in list(self._alone):
            self._free(number, update)
        if model.contiguous and order:
            buckets = (2 if model.overlap else 1) * model.bucket * model.element
            first = 0 if once else timeline.gradient_at(order[0])
            self._terms.append(Term("communication", "bucket", buckets, first, update))
        self._held_gradients(update)
        return self._terms

    def _held_gradients(self, update: int) -> None:
        if self._model.offloaded:
            return
        size, sums = self.flat.gradient_bytes, self._model.timeline.accumulates and self._frees
        if self.since is not None:
            self._terms.append(Term("gradients", "of this rank", size, self.since, update))
        if sums:
            self._terms.append(Term("gradients", "of this rank, summed up", size, 0, update))

    def _free(self, number: int, until: int) -> None:
        name = f"{self._model.parameters[number].name}, not reduced"
        self._terms.append(Term("gradients", name, self._model.bytes_of(number), self._alone.pop(number), until))

    def _reduce(self, at: int) -> None:
        if not self._waiting:
            return
        copied = count_reduction(self.flat, self._waiting, self._sent)
        reduced = [Term("communication", "gradients, flat", copied, at, at + 1)]
        moved = self.flat.largest_part(self._waiting) if self._model.offloaded else 0
        own: list[Term] = []
        if self.since is None and not self._model.offloaded:
            first = sum(self._model.bytes_of(n) for n in self._waiting if self.flat.updates(n))
            own.append(Term("gradients", "of this rank, beside the bucket", first, at, at + 1))
        self._terms += alternatives([reduced, own, moved_gradient(self._model, moved, at)])
        for number in self._waiting:
            if self.flat.updates(number):
                self.since = at + 1 if self.since is None else self.since
                if number in self._alone:
                    self._free(number, at + 1)
            elif self._frees and number in self._alone:
                self._free(number, at + 1)
        self._waiting = []


def count_reduction(flat: FlatModel, numbers: Sequence[int], sent: SentBytes) -> int:
    """Count what a bucket sends; return the bytes of the largest copy that it makes to send it."""
    model = flat.model
    if not model.contiguous:
        size = sum(model.bytes_of(number) for number in numbers)
        sent.add("all_reduce", size)
        return size if len(numbers) > 1 else 0
    pieces: list[tuple[int, int]] = []
    for rank, elements in chain.from_iterable(flat.slices[number] for number in numbers):
        if pieces and pieces[-1][0] == rank:
            pieces[-1] = rank, pieces[-1][1] + elements
        else:
            pieces.append((rank, elements))
    largest = elements = count = 0
    for i, (_, size) in enumerate(pieces):
        elements, count = elements + size, count + 1
        if elements > model.bucket or i == len(pieces) - 1:
            sent.add("all_reduce", elements * model.element)
            largest = max(largest, elements if count > 1 else 0)  # one piece alone is not copied
            elements = count = 0
    return largest * model.element


def _reduced_at_end(flat: FlatModel, sent: SentBytes, order: Sequence[int]) -> Iterator[Term]:
    """Yield the terms of gradients that stay whole until the last microbatch's backward is over (stage 1)."""
    model, timeline = flat.model, flat.model.timeline
    end, update = timeline.at("backward", "finish"), timeline.at("update")
    if not order:
        return
    for number in order:
        since = 0 if timeline.accumulates else timeline.gradient_at(number)
        yield Term("gradients", f"{model.parameters[number].name}, not reduced", model.bytes_of(number), since, end)
    if model.contiguous:
        since = 0 if timeline.accumulates else min(timeline.gradient_at(number) for number in order)
        yield Term("communication", "bucket", model.bucket * model.element, since, update)
    _fullest_instant(flat, sent, order, end, update)
    ranks = {*range(min(model.ranks, FIRST_RANKS)), flat.rank}  # the first ones make room for theirs before others free
    yield from alternatives(_fullest_instant(flat.on(r), SentBytes(1), order, end, update) for r in sorted(ranks))


def _fullest_instant(flat: FlatModel, sent: SentBytes, order: Sequence[int], end: int, update: int) -> list[Term]:
    model, instants = flat.model, Instants()
    alone, waiting, held = {n: model.bytes_of(n) for n in order}, list[int](), 0

    def reach(copied: int) -> None:
        instants.reach(
            Term("gradients", "not reduced", sum(alone.values()), end, update),
            Term("gradients", "of this rank", held, end, update),
            Term("communication", "gradients, flat", copied, end, update),
        )

    def reduce() -> None:
        nonlocal held
        reach(count_reduction(flat, waiting, sent))
        for number in waiting:
            if flat.updates(number) and model.offloaded:
                instants.reach(
                    Term("gradients", "not reduced", sum(alone.values()), end, update),
                    *moved_gradient(model, flat.largest_part([number]), end),
                )
                alone.pop(number, None)
            elif flat.updates(number) and model.contiguous:
                held = flat.gradient_bytes
                reach(0)
                alone.pop(number, None)
        waiting.clear()

    elements = 0
    for number in order:
        size = model.parameters[number].numel
        if elements + size > model.bucket and waiting:
            reduce()
            elements = 0
        waiting.append(number)
        elements += size
        if model.contiguous and size <= model.bucket:
            del alone[number]  # it is a part of the bucket from now on
        elif model.offloaded:  # it gets memory of its own
            reach(model.bytes_of(number))
    reduce()
    return instants.terms


def _update(flat: FlatModel) -> Iterator[Term]:
    """Yield what the update holds beside the states: gradients and copies of them, or what gloo gathers.

    Norms come first; then each group is updated, and then parameters are gathered.
    """
    model, update, steady = flat.model, flat.model.timeline.at("update"), flat.model.timeline.at("steady")

    def term(category: Category, name: str, size: int) -> Term:
        return Term(category, name, size, update, steady)

    parts = [size for number in flat.slices for rank, size in flat.slices[number] if rank == flat.rank]
    held = term("gradients", "of this rank", flat.gradient_bytes + flat.padding_bytes)
    instants = [
        [held, term("temporaries", "a gradient in fp64, for the norm", max(parts, default=0) * model.norm_bytes)]
    ]
    if model.offloaded:
        instants = []
    for i, group in enumerate(flat.groups):
        copies = [term("temporaries", f"group {i}, gradients flat", group.partition * model.element)]
        if model.element != MASTER_BYTES:
            copies.append(term("temporaries", f"group {i}, gradients in fp32", group.partition * MASTER_BYTES))
        own = update_of_partition(model, group.partition, group.members)
        if model.offloaded:
            yield from own
        else:
            instants.append([held, *copies])
            later = [n for other in flat.groups[i + 1 :] for n in other.members if flat.updates(n)]
            waiting = term("gradients", "of later groups", sum(model.bytes_of(n) for n in later))
            instants.append([copies[-1], waiting, *own])
        if model.staged and model.ranks > 1:
            gathered_bytes = group.partition * model.ranks * model.element
            instants.append([term("communication", f"group {i}, gathered, staged", gathered_bytes)])
    yield from alternatives(instants)
