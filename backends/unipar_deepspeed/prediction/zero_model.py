"""`ZeroModel`: a model, the sizes of ZeRO's buckets and a number of ranks, as the closed forms take it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import ceil
from typing import final

from unipar.prediction.terms import pinned_bytes, update_terms
from unipar.prediction.timeline import (
    CommVolume,
    MemoryPlace,
    PredictedParameter,
    StepTimeline,
    Term,
    UpdatedTensor,
)

AXIS = "data"
"""Axis along which ZeRO sends, in an account."""

MASTER_BYTES = 4
"""Bytes of an element of a master copy; DeepSpeed keeps one in fp32 too."""

NORM_BYTES = 8
"""Bytes of an element of a gradient while its norm is computed: a copy of it in fp64."""

SUB_GROUP = 1_000_000_000
"""Elements of a rank's partition that stage 3 updates at once; unipar does not set it."""


@dataclass(frozen=True)
class ZeroModel:
    """A model under ZeRO on this many ranks."""

    timeline: StepTimeline
    ranks: int
    element: int
    """Bytes of an element of parameters and gradients; frozen parameters may have fewer."""

    has_separate_masters: bool
    """True if stage 0 keeps fp32 copies of parameters that are in bf16."""

    bucket: int
    """Elements that are reduced at once."""

    prefetch: int
    """Elements that stage 3 gathers ahead of their use."""

    persistence: int
    """Elements of the largest parameters that stage 3 keeps whole."""

    live: int
    """Elements that may be whole in stage 3 when it gathers ahead."""

    reuse: int
    """Elements within which a parameter is used again that stage 3 keeps whole."""

    staged: bool
    """True if collectives copy what they send, as gloo does."""

    contiguous: bool = True
    overlap: bool = False

    norm_in_fp64: bool = False
    """True if the norm of gradients is added up in fp64, before DeepSpeed does it."""

    offloaded: bool = False
    """True if masters, the optimizer's tensors and the gradients of the update leave the device."""

    own_kernel: bool = False
    """True if DeepSpeed's own kernel updates what is offloaded."""

    parameters_offloaded: bool = False
    """True if stage 3's partitions of parameters do."""

    optimizer_on_disk: bool = False
    """True if what leaves the device goes to the disk, except for small tensors and gradients."""

    parameters_on_disk: bool = False
    """True if partitions of parameters go to the disk, except for those that the host's memory is to hold."""

    @property
    def parameters(self) -> tuple[PredictedParameter, ...]:
        """Parameters of the model."""
        return self.timeline.parameters

    @property
    def host(self) -> MemoryPlace:
        """Place of offloaded tensors, which on the CPU is the device's memory."""
        return "device" if self.staged else "host"

    @property
    def home(self) -> MemoryPlace:
        """Place of masters and the optimizer's tensors."""
        return self.host if self.offloaded else "device"

    @property
    def norm_bytes(self) -> int:
        """Bytes of an element while the norm is computed: its gradient in fp64, and what fp64 squares beside it."""
        return NORM_BYTES * (2 if self.norm_in_fp64 else 1)

    def pinned(self, size: int) -> int:
        """Return the bytes of an offloaded tensor whose memory DeepSpeed pins, which it cannot on the CPU."""
        return size if self.staged else pinned_bytes(size)

    def element_of(self, number: int) -> int:
        """Return the bytes of an element of a parameter: frozen ones stay narrower than those that are trained."""
        p = self.parameters[number]
        return self.element if p.trained else min(self.element, p.element_size)

    def bytes_of(self, number: int) -> int:
        """Return the bytes of a parameter, or of its gradient."""
        return self.parameters[number].numel * self.element_of(number)

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Numbers of the trained parameters, by groups of the optimizer."""
        groups: dict[int, list[int]] = {}
        for number, p in enumerate(self.parameters):
            if p.trained:
                groups.setdefault(p.group, []).append(number)
        return tuple(tuple(groups[group]) for group in sorted(groups))

    @cached_property
    def trained(self) -> tuple[int, ...]:
        """Numbers of the trained parameters."""
        return tuple(number for number, p in enumerate(self.parameters) if p.trained)


@final
class SentBytes:
    """Sum of the bytes and calls of each collective of a step; a group of one rank sends nothing."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._bytes: Counter[str] = Counter()
        self._calls: Counter[str] = Counter()

    def add(self, collective: str, size: int, calls: int = 1) -> None:
        """Count this many bytes, sent in this many calls."""
        if self._ranks > 1 and size:
            self._bytes[collective] += size
            self._calls[collective] += calls

    def repeat(self, other: SentBytes, times: int) -> None:
        """Count this many times what another has counted."""
        for volume in other.volumes():
            self.add(volume.collective, volume.size * times, volume.calls * times)

    def volumes(self) -> tuple[CommVolume, ...]:
        """Return what was counted."""
        return tuple(CommVolume(AXIS, kind, size, self._calls[kind], self._ranks) for kind, size in self._bytes.items())


@dataclass
class Instants:
    """Terms at each of the instants that follow one another within a span of the step."""

    terms: list[Term] = field(default_factory=list[Term])
    """Terms at the fullest instant until now."""

    def reach(self, *there: Term) -> None:
        """Note an instant."""
        if sum(term.size for term in there) > sum(term.size for term in self.terms):
            self.terms = list(there)


def alternatives(instants: Iterable[Sequence[Term]]) -> Iterator[Term]:
    """Yield the terms of the fullest of several instants."""
    reached = Instants()
    for there in instants:
        reached.reach(*there)
    yield from (term for term in reached.terms if term.size)


def merged_states(
    model: ZeroModel, elements: int, numbers: Sequence[int], name: str, *, pins: bool = False
) -> Iterator[Term]:
    """Yield the master copy, averages and the optimizer's tensors of a flat partition with this many elements.

    `pins`: the memory of an offloaded master is pinned; that of the optimizer's tensors is not.
    """
    size = elements * MASTER_BYTES
    size = model.pinned(size) if pins and model.offloaded else size
    yield Term("masters", f"{name}, master", size, place=model.home)
    if model.timeline.averages:
        yield Term("averages", name, elements * MASTER_BYTES, place=model.home)
    for number, each in enumerate(model.parameters[numbers[0]].states, 1):
        since = model.timeline.at("forward")
        yield Term("optimizer", f"{name} {number}", int(elements * each), since, place=model.home)


def update_of_partition(model: ZeroModel, elements: int, numbers: Sequence[int]) -> Iterator[Term]:
    """Yield what the optimizer needs beside its states as it updates the master of a flat partition."""
    if model.own_kernel:
        return
    tensor = UpdatedTensor((elements,), MASTER_BYTES, model.parameters[numbers[0]].group)
    yield from update_terms(model.timeline, [tensor], place=model.home)


def partition_of(model: ZeroModel, number: int) -> int:
    """Return the elements of a parameter that a rank of stage 3 keeps."""
    return ceil(model.parameters[number].numel / model.ranks)


def sub_groups(model: ZeroModel, groups: Iterable[Sequence[int]] | None = None) -> Iterator[tuple[int, ...]]:
    """Yield the parameters that stage 3 updates at once, of some of the optimizer's groups or of all."""
    for members in model.groups if groups is None else groups:
        part, elements = list[int](), 0
        for number in members:
            part.append(number)
            elements += partition_of(model, number)
            if elements >= SUB_GROUP:
                yield tuple(part)
                part, elements = [], 0
        if part:
            yield tuple(part)
