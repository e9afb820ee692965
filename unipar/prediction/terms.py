"""Terms that several backends share: a whole model on each rank, its buffers, and the optimizer's state."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from math import prod
from typing import Final

from unipar.config import Config
from unipar.errors import Unsupported
from unipar.prediction.timeline import MemoryPlace, PredictedParameter, StepTimeline, Term, UpdatedTensor

FP64_BYTES: Final = 8

AVERAGED_AT_ONCE: Final = 2**22
"""Elements of averages that are updated at once: 16 MiB in fp32."""

TEMPORARIES_OF_UPDATE: Final = "the optimizer's own tensors"
"""Name of what an optimizer that is not fused needs beside its states."""


def predict_whole(timeline: StepTimeline, *, buckets: bool) -> Iterator[Term]:
    """Yield the terms of a rank that holds the whole model; `buckets`: gradients are views of buckets that stay."""
    yield from buffer_terms(timeline)
    yield from update_terms(timeline, whole_tensors(timeline.parameters))
    for number, p in enumerate(timeline.parameters):
        yield Term("parameters", p.name, p.size)
        if p.trained:
            yield from state_terms(timeline, p, p.numel)
            used = timeline.has_gradient(number)
            yield Term("gradients", p.name, p.size, 0, None) if buckets else gradient_term(timeline, number)
            if buckets and not used:
                yield Term(
                    "gradients", f"{p.name}, filled with zeros", p.size, timeline.at("update"), timeline.at("steady")
                )
            elif buckets and timeline.accumulates:  # earlier microbatches have added up beside the buckets
                yield Term("gradients", f"{p.name}, not reduced", p.size, 0, timeline.gradient_at(number))


def gradient_term(timeline: StepTimeline, number: int) -> Term:
    """Return the gradient of a whole parameter, which is added to that of earlier microbatches, until the update."""
    p = timeline.parameters[number]
    since = 0 if timeline.has_gradient(number) and timeline.accumulates else timeline.gradient_at(number)
    return Term("gradients", p.name, p.size, since, timeline.at("steady"))


def buffer_terms(timeline: StepTimeline) -> Iterator[Term]:
    """Yield the model's buffers."""
    for name, size in timeline.buffers.items():
        yield Term("buffers", name, size)


def state_terms(timeline: StepTimeline, p: PredictedParameter, elements: int) -> Iterator[Term]:
    """Yield averages, and the optimizer's tensors that the first step has made, for elements of a parameter."""
    for number, each in enumerate(p.states, 1):
        yield Term("optimizer", f"{p.name} {number}", int(elements * each), timeline.at("forward"))
    if p.tables and elements:
        yield Term("optimizer", f"{p.name} tables", p.tables, timeline.at("forward"))
    if timeline.averages:
        yield Term("averages", p.name, elements * p.element_size)


def update_terms(
    timeline: StepTimeline,
    tensors: Sequence[UpdatedTensor],
    *,
    split: bool = False,
    place: MemoryPlace = "device",
) -> Iterator[Term]:
    """Yield what an optimizer that is not fused needs beside its states, as it updates these tensors in one call.

    `split`: they are parts of parameters that are split over ranks, as in FSDP2.
    """
    temporaries = timeline.temporaries_of_update
    if temporaries is not None and (size := temporaries(tensors, split=split)):
        update, steady = timeline.at("update"), timeline.at("steady")
        yield Term("temporaries", TEMPORARIES_OF_UPDATE, size, update, steady, place)


def averaging_terms(timeline: StepTimeline, terms: Iterable[Term]) -> Iterator[Term]:
    """Yield what an update of averages needs beyond the memory that the update of weights, before it, has freed."""
    update, steady = timeline.at("update"), timeline.at("steady")
    needed, freed = 0, 0
    for term in terms:
        needed += term.size if term.category == "averages" and term.place == "device" else 0
        freed += term.size if term.first <= update and term.until == steady and term.place == "device" else 0
    if (size := min(needed, AVERAGED_AT_ONCE * 4) - freed) > 0:
        yield Term("temporaries", "distances of weights from their averages", size, update, steady)


def clips_in_fp64(config: Config) -> bool:
    """Return whether the norm of all gradients is added up in fp64."""
    clip = config.train.clipping
    return clip is not None and clip.norm == "fp64"


def norm_terms(
    timeline: StepTimeline, tensors: Sequence[UpdatedTensor], *, place: MemoryPlace = "device"
) -> Iterator[Term]:
    """Yield what adding up the norm in fp64 needs: a gradient of one of these tensors in fp64, and its squares."""
    sizes = [prod(t.shape) * FP64_BYTES * (1 if t.element_size == FP64_BYTES else 2) for t in tensors]
    update, steady = timeline.at("update"), timeline.at("steady")
    yield Term(
        "temporaries", "a gradient in fp64 and its squares, for the norm", max(sizes, default=0), update, steady, place
    )


def whole_tensors(parameters: Iterable[PredictedParameter]) -> tuple[UpdatedTensor, ...]:
    """Return what an optimizer updates that has whole parameters."""
    return tuple(UpdatedTensor(p.shape, p.element_size, p.group) for p in parameters if p.trained)


def pinned_bytes(size: int) -> int:
    """Return the bytes of host memory that torch pins for a tensor: the next power of two."""
    return 1 << (size - 1).bit_length() if size else 0


def refuse_unplanned(strategy: str, config: Config, *more: str, planned: Collection[str] = ()) -> None:
    """Raise Unsupported for settings that hardly any closed forms cover, but for those `planned`, and for `more`."""
    parallel, model = config.parallel, config.model
    settings = {
        f"parallel ({parallel.axes})": parallel.axes.split,
        f"model.offload: {model.offloaded_state}": model.offloaded_state != "none",
    }
    if unplanned := [*(what for what, is_set in settings.items() if is_set and what not in planned), *more]:
        raise Unsupported(strategy, [not_planned_yet(what) for what in unplanned])


def not_planned_yet(what: str) -> str:
    """Return the reason why there is no plan: no closed form covers `what`."""
    return f"{what} is not planned yet; `unipar compare` measures it"
