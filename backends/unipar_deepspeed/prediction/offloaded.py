"""Offloading: what ZeRO keeps on the host beside the optimizer's tensors, and what it needs to move it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from unipar.prediction.timeline import Term
from unipar_deepspeed.prediction.zero_model import MASTER_BYTES, NORM_BYTES, ZeroModel


def flat_group_terms(model: ZeroModel, partition: int, name: str) -> Iterator[Term]:
    """Yield a flat group's gradients in fp32, and its parameters on their way to the device (stages 1 and 2)."""
    gradients, parameters = model.pinned(partition * MASTER_BYTES), model.pinned(partition * model.element)
    yield Term("gradients", f"{name}, gradients in fp32", gradients, place=model.home)
    yield Term("communication", f"{name}, updated parameters", parameters, place=model.home)


def passing_buffers(model: ZeroModel) -> Iterator[Term]:
    """Yield the buffers through which gradients go to the host, each as large as the largest one (stages 1 and 2)."""
    size = max((model.bytes_of(number) for number in model.trained), default=0)
    yield Term("communication", "largest gradient, on its way", size)
    yield Term("communication", "largest gradient, on the host", model.pinned(size), place=model.home)


def summed_gradients(model: ZeroModel, numbers: Sequence[int]) -> Iterator[Term]:
    """Yield the gradients that are summed up on the host over microbatches (stage 2)."""
    for number in numbers:
        size = model.pinned(model.bytes_of(number))
        yield Term("gradients", f"{model.parameters[number].name}, summed up", size, place=model.home)


def moved_gradient(model: ZeroModel, elements: int, at: int) -> list[Term]:
    """Return what moving the largest of some gradients needs for a moment: a copy of it in fp64, for the norm.

    `elements`: those of the part that goes to the host.
    """
    return [Term("temporaries", "a gradient in fp64, for the norm", elements * NORM_BYTES, at, at + 1)]


def sub_group_terms(model: ZeroModel, elements: int, name: str) -> Iterator[Term]:
    """Yield a sub-group's gradients in fp32 (stage 3)."""
    gradients = model.pinned(elements * MASTER_BYTES)
    yield Term("gradients", f"{name}, gradients in fp32", gradients, place=model.home)


def converted_parameters(model: ZeroModel, elements: int, name: str) -> Iterator[Term]:
    """Yield the parameters that the host casts if the update moves them between it and the device (stage 3)."""
    if model.host == "host" and model.element != MASTER_BYTES and model.offloaded != model.parameters_offloaded:
        update, steady = model.timeline.at("update"), model.timeline.at("steady")
        size = elements * (model.element if model.offloaded else MASTER_BYTES)  # torch casts what is on the host
        yield Term("temporaries", f"{name}, updated parameters", size, update, steady, place=model.host)


def offloaded_partitions(
    model: ZeroModel, groups: Iterable[Sequence[int]], partitions: Mapping[int, int]
) -> Iterator[Term]:
    """Yield the partitions of parameters on the host: in one tensor for each group; small ones do not move.

    `partitions`: elements of a rank by the number of a parameter.
    """
    for i, members in enumerate(groups):
        size = sum(partitions[number] for number in members) * model.element
        yield Term("parameters", f"group {i}, partitions", model.pinned(size), place=model.host)
    for number, p in enumerate(model.parameters):
        if not p.trained:
            size, small = partitions[number] * model.element_of(number), p.numel <= model.persistence
            place = "device" if small else model.host
            yield Term("parameters", p.name, size if small else model.pinned(size), place=place)
