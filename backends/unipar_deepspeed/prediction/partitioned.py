"""Stage 3: parameters in partitions, gathered as modules need them, and gradients that are scattered in buckets."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from unipar.prediction.terms import buffer_terms
from unipar.prediction.timeline import Category, Prediction, Term
from unipar_deepspeed.prediction.gathering import GatherPlan, persistent_terms
from unipar_deepspeed.prediction.offloaded import (
    converted_parameters,
    moved_gradient,
    offloaded_partitions,
    sub_group_terms,
)
from unipar_deepspeed.prediction.swapped import (
    SwappedParameters,
    is_swapped,
    kept_gradient,
    optimizer_buffers,
    swapped_numbers,
    swapped_states,
)
from unipar_deepspeed.prediction.zero_model import (
    MASTER_BYTES,
    NORM_BYTES,
    SentBytes,
    ZeroModel,
    alternatives,
    merged_states,
    partition_of,
    sub_groups,
    update_of_partition,
)

OFFLOADED_NORM_BYTES = 4
"""Bytes of the norm of offloaded gradients as it is summed up."""


def predict_partitioned(model: ZeroModel) -> Prediction:
    """Return what a rank of stage 3 holds and sends."""
    sent = SentBytes(model.ranks)
    terms = [*_states(model)]
    if model.ranks > 1 or model.parameters_offloaded:
        once = SentBytes(model.ranks)
        # with accumulation, the order is known before the first update, which makes small parameters whole for good
        first = GatherPlan(model, SentBytes(1)).run(first=True) if model.timeline.accumulates else None
        plan = GatherPlan(model, once, first=first).run()
        sent.repeat(once, model.timeline.microbatches)
        gathered = [*plan.terms, *persistent_terms(plan, model, sent)]
        terms += gathered if model.ranks > 1 or model.host == "host" else ()  # one on the CPU has them whole already
    terms += _reductions(model, sent)
    terms += _update(model)
    for _ in sub_groups(model):
        sent.add("all_reduce", OFFLOADED_NORM_BYTES if model.offloaded else NORM_BYTES)
    return Prediction(tuple(terms), sent.volumes())


def _states(model: ZeroModel) -> Iterator[Term]:
    yield from buffer_terms(model.timeline)
    partitions = {number: partition_of(model, number) for number in range(len(model.parameters))}
    if model.parameters_on_disk:
        yield from SwappedParameters(model).terms()
    elif model.parameters_offloaded:
        yield from offloaded_partitions(model, model.groups, partitions)
    else:
        for number, p in enumerate(model.parameters):
            yield Term("parameters", p.name, partitions[number] * model.element_of(number))
    for i, members in enumerate(sub_groups(model)):
        elements = sum(partition_of(model, number) for number in members)
        if is_swapped(model, members):
            yield from swapped_states(model, members, f"group {i}")
            continue
        yield from merged_states(model, elements, members, f"group {i}, partition")
        if model.offloaded:
            yield from sub_group_terms(model, elements, f"group {i}")
        else:
            yield Term("gradients", f"group {i}, partition", elements * model.element)
    if model.optimizer_on_disk:
        yield from optimizer_buffers(model)
    if model.offloaded:
        size = sum(partition_of(model, number) for number in model.trained) * model.element
        yield Term("gradients", "partitions", model.pinned(size), place=model.home)
    if model.contiguous:
        yield Term("communication", "bucket", model.bucket * model.element)


def _reductions(model: ZeroModel, sent: SentBytes) -> Iterator[Term]:
    """Yield the gradients that wait for their reduction, and what the reduction copies."""
    timeline, waiting, elements = model.timeline, list[int](), 0
    swapped = swapped_numbers(model)
    alone: dict[int, int] = {}
    for number in timeline.gradient_order:
        at, size = timeline.gradient_at(number), model.parameters[number].numel
        if waiting and elements + size > model.bucket:
            yield from _scatter(model, waiting, swapped, alone, at, sent)
            waiting, elements = [], 0
        waiting.append(number)
        if model.contiguous and elements + size <= model.bucket:
            yield Term("gradients", f"{model.parameters[number].name}, new", model.bytes_of(number), at, at + 1)
        else:
            alone[number] = at
        elements += size
    if waiting:
        yield from _scatter(model, waiting, swapped, alone, timeline.at("backward", "finish"), sent)


def _scatter(
    model: ZeroModel,
    numbers: Sequence[int],
    swapped: Collection[int],
    alone: dict[int, int],
    at: int,
    sent: SentBytes,
) -> Iterator[Term]:
    size = sum(partition_of(model, n) * model.ranks * model.element for n in numbers)
    sent.add("reduce_scatter", size * model.timeline.microbatches, model.timeline.microbatches)
    if len(numbers) > 1 or model.parameters[numbers[0]].numel % model.ranks:
        yield Term("communication", "gradients, flat", size, at, at + 1)
    staged = [Term("communication", "gradients, staged", size, at, at + 1)] if model.staged else []
    yield from alternatives([staged, *_moves(model, numbers, swapped, at)])
    for number in numbers:
        name = model.parameters[number].name
        if number in alone:
            yield Term("gradients", f"{name}, waiting", model.bytes_of(number), alone.pop(number), at + 1)
        if number in swapped and model.home == "host" and (kept := kept_gradient(model, number)):
            yield Term("gradients", f"{name}, to the update", kept, at + 1, model.timeline.at("steady"))


def _moves(model: ZeroModel, numbers: Sequence[int], swapped: Collection[int], at: int) -> Iterator[list[Term]]:
    """Yield what is there as each gradient moves to the host; those that go to the disk wait for one another."""
    waiting = 0
    for number in numbers if model.offloaded else ():
        elements = partition_of(model, number)
        moved = moved_gradient(model, elements, at)
        if model.home == "host":  # the partition comes back from the host
            size = elements * model.element
            moved += [replace(moved[0], name="gradients, on the device", size=waiting + size)]
            waiting += size if number in swapped else 0
        yield moved


def _update(model: ZeroModel) -> Iterator[Term]:
    """Yield what the update holds beside the states: a gradient in fp64 for the norm, then a sub-group's gradients."""
    update, steady = model.timeline.at("update"), model.timeline.at("steady")
    at_once = SwappedParameters(model).in_memory if model.parameters_on_disk else frozenset(model.trained)

    def term(category: Category, name: str, size: int) -> Term:
        return Term(category, name, size, update, steady)

    own = [
        [*update_of_partition(model, sum(partition_of(model, n) for n in members), members)]
        for members in sub_groups(model)
    ]
    for i, members in enumerate(sub_groups(model)):
        sizes = [partition_of(model, number) for number in members]
        yield from converted_parameters(model, sum(sizes) if members[0] in at_once else max(sizes), f"group {i}")
    if model.offloaded:
        yield from alternatives(own)
        return
    largest = max((partition_of(model, number) for number in model.trained), default=0)
    instants = [[term("temporaries", "a gradient in fp64, for the norm", largest * model.norm_bytes)]]
    for i, members in enumerate(sub_groups(model)):
        elements = sum(partition_of(model, number) for number in members)
        copies = [term("temporaries", f"group {i}, gradients flat", elements * model.element)]
        if model.element != MASTER_BYTES:
            copies.append(term("temporaries", f"group {i}, gradients in fp32", elements * MASTER_BYTES))
        instants += [copies, [copies[-1], *own[i]]]
    yield from alternatives(instants)
