"""Kinds of faults of ranks that share the work on the same samples: tensor, pipeline and context parallelism."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from unipar.config.sections.strategy import EXPERT_AXIS
from unipar.utils.text import count_of, first_few
from unipar.verification.diagnosis.case import Fault, FaultCase, gradient_factors, is_right
from unipar.verification.diagnosis.modules import MIN_RELATIVE_DIFFERENCE, ModuleDifference
from unipar.verification.judgement.judge import copy_distances
from unipar.verification.judgement.record import RunRecord, SketchVector, tensor_distance

AXIS_OF_SEAT = ("pipeline", "context", "tensor")
"""Axes along which ranks train on the same samples."""

_SKETCH_NEAR = 1e-3
"""Relative distance within which two sums of sketches are the same: far above rounding, far below any fault."""


def classify_before_update(case: FaultCase, step: int) -> Fault | None:
    """Return a fault in what happens before the update of a step, if one of these kinds fits."""
    first = case.judgement.first
    assert first is not None
    if first.what == "ranks' samples":
        return _other_samples(case, step)
    if first.what == "buffer":
        return _stale_statistics(case)
    if "forward" in case.module_differences:
        return _wrong_forward(case, case.module_differences["forward"], step)
    if case.loss_differences:
        return None
    fault = _loss_counted_twice(case, step) or _partial_backward(case, step) or _unequal_copies(case, step)
    if fault is None and case.optimizer_uses_whole_tensors is None:
        fault = _wrong_gradients(case, step)  # computed from the state of an optimizer whose rule is known
    return fault


def _other_samples(case: FaultCase, step: int) -> Fault:
    strays = case.run.strays[step - 1]
    return Fault(
        "other samples on ranks that share the work",
        f"{count_of(len(strays), 'rank')} ({', '.join(map(str, strays))}) got other microbatches in step {step} than "
        f"the ranks with which they split the work ({case.settled.strategy.axes}); all of them must "
        "read the same share",
    )


def _stale_statistics(case: FaultCase) -> Fault:
    run, right, before = case.run, case.own.buffers, case.own.first_buffers
    changed = {name: tensor_distance(buffer, before[name]) for name, buffer in right.items()}
    off = {name: tensor_distance(run.buffers[name], buffer) for name, buffer in right.items() if name in run.buffers}
    wrong = [name for name in right if not off.get(name, math.inf) <= 0.1 * changed[name]]
    stale = [name for name in wrong if name in off and bool((run.buffers[name] == before[name]).all())]
    if stale and len(stale) == len(wrong):
        return Fault(
            "a stage's stale running statistics",
            f"after step {run.steps}, {count_of(len(stale), 'buffer')} ({first_few(stale)}) are still what they were "
            "before the first step: they come from a rank that does not run these modules, not from their own stage",
        )
    return Fault(
        "other buffers",
        f"after step {run.steps}, {count_of(len(wrong), 'buffer')} ({first_few(list(wrong))}) differ from those of one "
        "process: running statistics must come from the rank that runs the module on the first share of each batch",
    )


# Forward


def _wrong_forward(case: FaultCase, place: ModuleDifference, step: int) -> Fault | None:
    axes = case.settled.strategy.axes
    key, wanted = _row_of(case, place, "forward")
    outputs = _sketches_of_ranks(case, key)
    if axes.tensor > 1 and len(outputs) > 1:
        bias = _rows(case.own)[0].get(("bias", *key[1:]))
        fault = _wrong_sum(place, outputs, wanted, None if bias is None else bias["sketch"].numpy(), axes.tensor, step)
        if fault is not None:
            return fault
    inputs = [k for k in _rows(case.own)[0] if k[0] == "input" and k[2] == key[2] and k[1].startswith(_call_of(key[1]))]
    wrong = [k for k in inputs if not _any_rank_has(case, k, place.rank)]
    if axes.pipeline > 1 and wrong and case.run.seats[place.rank].pipeline > 0:
        stage = case.run.seats[place.rank].pipeline
        which = int(wrong[0][1].rpartition(".")[2]) + 1
        return Fault(
            "a skip across a cut",
            f"in step {step} {place.module} in stage {stage} gets another input {which} than in one process, although "
            "the stages before it computed the same: a stage gets only the output of the last block before the cut, "
            "and what else was computed there does not reach it; let the cut lie elsewhere (cuts(stages) in the task)",
        )
    if axes.tensor > 1 and not wrong and len(outputs) > 1 and _all_alike(outputs):
        return Fault(
            "a wrong plan",
            f"in step {step} {place.module} gives all ranks of tensor the same output, off by {place.off:.1e}, and "
            "what can be compared before it is right: in it, or between it and that, a matrix is cut in the wrong way "
            "(columns as rows, or the wrong columns together); say in the task's tensor(model) what is to stay whole",
        )
    return None


def _wrong_sum(
    place: ModuleDifference,
    outputs: dict[int, SketchVector],
    wanted: SketchVector,
    bias: SketchVector | None,
    parts: int,
    step: int,
) -> Fault | None:
    """Return the fault of a sum over ranks that is missing, or that contains a bias several times."""
    size = float(np.linalg.norm(wanted))
    total = np.sum(list(outputs.values()), axis=0)
    without = [np.zeros_like(wanted)] if bias is None else [bias * k for k in range(parts)]
    if not _all_alike(outputs) and any(np.linalg.norm(total - b - wanted) <= _SKETCH_NEAR * size for b in without):
        return Fault(
            "a partial sum that is not added up",
            f"in step {step} the outputs of {place.module} on the {len(outputs)} ranks of tensor differ, and their sum "
            "is the output of one process: it is cut into rows, and nothing adds up the parts",
        )
    mean = total / len(outputs)
    if bias is not None and np.linalg.norm(bias) > MIN_RELATIVE_DIFFERENCE * size and _all_alike(outputs):
        times = float(np.dot(mean - wanted, bias) / np.dot(bias, bias))
        off = float(np.linalg.norm(mean - wanted - times * bias))
        if round(times) >= 1 and abs(times - round(times)) < 0.01 and off <= 0.01 * float(np.linalg.norm(bias)):
            return Fault(
                "a bias added several times",
                f"in step {step} the output of {place.module} contains its bias {round(times) + 1} times: each of the "
                f"{parts} ranks of tensor adds it to its part of the sum, and only one must",
            )
    return None


def _any_rank_has(case: FaultCase, key: tuple[str, str, int], rank: int) -> bool:
    """Return whether an input of a module is that of one process on a rank, or is not comparable there."""
    mine, right = _rows(case.run)[rank].get(key), _rows(case.own)[0][key]
    if mine is None or mine["shape"] != right["shape"]:
        return True
    off = float((mine["sketch"] - right["sketch"]).norm())
    return off <= _SKETCH_NEAR * float(right["sketch"].norm())


def _row_of(case: FaultCase, place: ModuleDifference, way: str) -> tuple[tuple[str, str, int], SketchVector]:
    """Return the key and the right sketch of the row at which a module differs first."""
    share = case.run.seats[place.rank].share
    number = place.micro * case.shares + share
    for key, row in _rows(case.own)[0].items():
        if key[0] == way and row["module"] == place.module and key[2] == number:
            return key, row["sketch"].numpy()
    raise LookupError(place)


def _rows(run: RunRecord) -> list[dict[tuple[str, str, int], dict[str, Any]]]:
    return [{(row["way"], row["at"], row["number"]): row for row in rows} for rows in run.traced]


def _call_of(at: str) -> str:
    return at.rpartition(".")[0] + "."


def _sketches_of_ranks(case: FaultCase, key: tuple[str, str, int]) -> dict[int, SketchVector]:
    """Return what the ranks of one tensor group have at a place, in the stage that is nearest to one process."""
    right = _rows(case.own)[0][key]
    by_group: dict[tuple[int, int], dict[int, SketchVector]] = {}
    for rank, rows in enumerate(_rows(case.run)):
        seat, row = case.run.seats[rank], rows.get(key)
        if row is not None and row["shape"] == right["shape"] and seat.share == key[2] % case.shares:
            by_group.setdefault((seat.pipeline, seat.context), {})[rank] = row["sketch"].numpy()
    wanted = right["sketch"].numpy()
    return min(
        by_group.values(), key=lambda g: float(np.linalg.norm(np.sum(list(g.values()), axis=0) - wanted)), default={}
    )


def _all_alike(sketches: dict[int, SketchVector]) -> bool:
    first, *others = sketches.values()
    return all(np.linalg.norm(other - first) <= _SKETCH_NEAR * np.linalg.norm(first) for other in others)


# Loss and gradients


def _loss_counted_twice(case: FaultCase, step: int) -> Fault | None:
    mine, right = case.run.losses[step - 1], case.base.losses[step - 1]
    factor = mine / right if right else math.nan
    for name, size in case.settled.strategy.axes.sizes.items():
        if case.is_near(factor, float(size)):
            return Fault(
                "a loss counted more than once",
                f"the loss of step {step} is {factor:.4g} times that of one process, while every microbatch's loss is "
                f"the same: the {size} ranks of {name} have the same microbatches, and the loss of each is counted",
            )
    return None


def _partial_backward(case: FaultCase, step: int) -> Fault | None:
    """Return the fault of a gradient inside the model that is not added up over the ranks of tensor."""
    place = case.module_differences.get("backward")
    if place is None or case.settled.strategy.axes.tensor == 1:
        return None
    key, wanted = _row_of(case, place, "backward")
    sketches = _sketches_of_ranks(case, key)
    if len(sketches) < 2 or _all_alike(sketches):
        return None
    total = np.sum(list(sketches.values()), axis=0)
    times = float(np.dot(total, wanted) / max(float(np.dot(wanted, wanted)), 1e-300))
    if times <= 0 or np.linalg.norm(total / times - wanted) > 10 * _SKETCH_NEAR * np.linalg.norm(wanted):
        return None
    return Fault(
        "a partial gradient that is not added up",
        f"in step {step} the ranks of tensor have different gradients of the output of {place.module}, and their sum "
        "is in proportion to that of one process: what it is given to is cut into columns, and nothing adds up the "
        "parts in the backward pass",
    )


def _unequal_copies(case: FaultCase, step: int) -> Fault | None:
    """Return the fault of a parameter that several ranks have, and update differently."""
    unequal: dict[str, tuple[int, int]] = {}
    for (name, _), copies in (case.run.copies[step - 1] if case.run.copies else {}).items():
        size = float(np.linalg.norm(next(iter(copies.values()))))
        distances = {ranks: off for ranks, off in copy_distances(case.run, copies).items() if off > 1e-7 * size}
        if distances:
            unequal[name] = max(distances, key=lambda ranks: distances[ranks])
    if not unequal:
        return None
    name, (one, other) = next(iter(unequal.items()))
    first, second = case.run.seats[one], case.run.seats[other]
    axes = [axis for axis in AXIS_OF_SEAT if getattr(first, axis) != getattr(second, axis)]
    several = f"{count_of(len(unequal), 'parameter')} ({first_few(list(unequal))}) differ"
    names = several if len(unequal) > 1 else f"{name} differs"
    if axes == ["pipeline"]:
        return Fault(
            "a tied gradient not summed",
            f"after step {step}, {names} between stage {first.pipeline} and stage {second.pipeline}, which both use "
            "it: each stage updates it by its own part of the gradient, and the parts must be added up first",
        )
    if axes == ["tensor"] and case.settled.strategy.axes.sequence:
        return Fault(
            "a partial gradient that is not added up",
            f"after step {step}, {names} between ranks {one} and {other}, which split the sequence along tensor: each "
            "rank's gradient of a parameter that is not cut comes from its own positions, and the parts must be added "
            "up before the update",
        )
    return Fault(
        "copies that differ",
        f"after step {step}, {names} between ranks {one} and {other}, which keep copies of it along "
        f"{' and '.join(axes)}: their gradients of a parameter that is not cut must be equal before the update",
    )


def _wrong_gradients(case: FaultCase, step: int) -> Fault | None:
    """Return the fault of some parameters' gradients, or of all by the size of an axis."""
    factors = dict(gradient_factors(case, step))
    wrong = {name: fit for name, fit in factors.items() if not is_right(case, *fit)}
    if not wrong:
        return None
    shared = _names_of_several_stages(case)
    if case.settled.strategy.axes.pipeline > 1 and set(wrong) <= shared:
        return Fault(
            "a tied gradient not summed",
            f"in step {step} only the gradient of {first_few(list(wrong))} differs from that of one process, and "
            "several modules use it, which are in different stages: the parts of its gradient must be added up",
        )
    values = [factor for factor, _ in wrong.values()]
    middle = float(np.median(values))
    if any(left > 10 * case.near for _, left in wrong.values()) or not all(case.is_near(v, middle) for v in values):
        return None
    some = len(wrong) < len(factors)
    if not some and any(case.is_near(middle, k) for n in (case.shares, case.accumulate) for k in (n, 1 / n) if n > 1):
        return None  # ranks with other samples, or microbatches, explain it as well
    which = f"{count_of(len(wrong), 'parameter')} ({first_few(list(wrong))})" if some else "all parameters"
    for axis, size in case.settled.strategy.axes.sizes.items():
        measured = f"the gradient of {which} is {middle:.4g} times that of one process in step {step}"
        apart = axis == EXPERT_AXIS
        if case.is_near(middle, float(size)):
            says = (
                f"{measured}: it was added up over the {size} ranks of expert, whose tokens it contains already"
                if apart
                else f"{measured}: the {size} ranks of {axis} train on the same samples, and a gradient must not grow "
                "with their number; it may have been added up over ranks that all have the whole of it"
            )
            return Fault(f"scaled by the size of {axis}", says)
        if case.is_near(middle, 1.0 / size):
            why = "whose tokens it contains already" if apart else "which train on the same samples"
            return Fault(
                f"divided by the size of {axis}", f"{measured}: it was divided by the {size} ranks of {axis}, {why}"
            )
    return None


def _names_of_several_stages(case: FaultCase) -> set[str]:
    """Return the parameters that several modules use, or that ranks of several stages have."""
    tied = {name for group in case.replay.groups for name in group["tied"]}
    copies = case.run.copies[-1] if case.run.copies else {}
    seats = case.run.seats
    return tied | {name for (name, _), ranks in copies.items() if len({seats[rank].pipeline for rank in ranks}) > 1}


# Dropout


def classify_masks(run: RunRecord, replay: RunRecord) -> Fault:
    """Return the fault of a run that differs from one process with dropout, and not without."""
    rights = replay.masks[0][0]
    for rank, by_number in enumerate(run.masks[0]):
        for number, mine in by_number.items():
            right = rights.get(number, [])
            stage = run.seats[rank].pipeline
            where = f"in step 1, microbatch {number + 1} of the batch"
            if stage > 0 and mine and mine == right[: len(mine)] and len(mine) < len(right):
                return Fault(
                    "the same dropout masks on two stages",
                    f"{where}, stage {stage} draws the masks of the first stage again, from the first on: the state of "
                    "the random generator must travel with the hidden states",
                )
            if others := sum(mask not in right for mask in mine):
                return Fault(
                    "other dropout masks",
                    f"{where}, rank {rank} draws {count_of(others, 'mask')} of {len(mine)} that one process does not: "
                    "ranks that share the work must take their parts of the same masks",
                )
    return Fault(
        "other numbers with dropout",
        "without dropout all numbers are those of one process, and with it they are not, although the masks drawn in "
        "step 1 are the same: they are applied to other elements, or modules with dropout run in another mode",
    )


# Norm

MOST_ROUNDED = 5e-4
"""Share by which half precision changes a norm at most: the error of one number in fp16."""


def classify_norm(case: FaultCase, step: int) -> Fault | None:
    """Return the fault of a norm that is wrong on all ranks alike, while the gradient is right."""
    mine, right = case.run.norms[step - 1][0], case.base.norms[step - 1][0]
    if not math.isfinite(mine) or abs(mine - right) <= case.limit * right:
        return None
    factors = list(gradient_factors(case, step))
    if not factors or not all(is_right(case, *fit) for _, fit in factors):
        return None  # RMSprop's states may tell no gradient
    lengths = case.replay.shares[step - 1]["lengths"]
    text = f"in step {step} the norm is {mine:.6g} instead of {right:.6g}, while all gradients are right"
    kept = case.run.copies[-1] if case.run.copies else {}
    copies = {name: len(ranks) for (name, kind), ranks in kept.items() if kind == "weight"}
    often = {name: count for name, count in copies.items() if count > 1}
    total = math.sqrt(sum(copies.get(name, 1) * length**2 for name, length in lengths.items()))
    if often and abs(total - mine) <= 0.1 * abs(mine - right):
        return Fault(
            "a norm that counts copies twice",
            f"{text}: every copy of {first_few(list(often))} counts, on up to {max(often.values())} ranks, and each "
            "parameter must count once",
        )
    if abs(mine - right) <= MOST_ROUNDED * right:
        return Fault("a rounded norm", f"{text}: so little is lost by gradients in half precision")
    if mine > right:
        return Fault("a norm that counts copies twice", f"{text}: it counts something more than once")
    return Fault("a norm that leaves something out", f"{text}: it does not count what some ranks hold")
