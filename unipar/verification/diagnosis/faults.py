"""Kinds of faults, and their classification from measured facts, one kind after another."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from unipar.backend.engine import KIND_OF_AVERAGES
from unipar.utils.text import count_of, first_few
from unipar.verification.diagnosis import expert_faults, mesh_faults
from unipar.verification.diagnosis import update_faults as updates
from unipar.verification.diagnosis import weight_faults as copies
from unipar.verification.diagnosis.case import (
    Fault,
    FaultCase,
    gradient_factors,
    norm_factor,
    run_gradient,
    share_gradients,
    whole_gradient,
)
from unipar.verification.diagnosis.modules import count_loss_ranks, has_right_gradient, loss_rounding
from unipar.verification.diagnosis.sketched_gradients import (
    GradientMix,
    GradientSketches,
    find_unmoved_parameters,
    fit_gradient_mix,
)
from unipar.verification.judgement.judge import count_used_batches

ROUNDING_ERROR_RANGES = {"bf16": (4e-4, 6e-3), "fp16": (4e-5, 4e-4)}
"""Relative error of a gradient that was rounded once or twice to a precision: smallest and largest."""

MOST_OF_FULL_DIGITS = 1e-5
"""Relative distance of a loss in fp32 from that in fp64 at most, in a microbatch."""

_ZERO = 1e-6
"""Length of a gradient, relative to the right one, that counts as zero."""

IN_PART = ", of some parameters"
"""End of the name of a fault that only some parameters' gradients have."""


def classify_fault(case: FaultCase) -> Fault | None:
    """Return the kind of fault that fits, or None if no known kind does."""
    first = case.judgement.first
    assert first is not None
    at = first.step
    if first.what in ("samples", "sample weight"):
        return _classify_samples(case, at)
    if first.what == "rate":
        return _classify_rate(case, at)
    if first.what == KIND_OF_AVERAGES:
        return _classify_averages(case, at)
    if (fault := copies.classify_start(case)) is not None:
        return fault
    forward = "forward" in case.module_differences
    if forward and (fault := expert_faults.classify_forward(case, at)) is not None:
        return fault
    if case.settled.strategy.axes.split and (fault := mesh_faults.classify_before_update(case, at)) is not None:
        return fault
    if (fault := _classify_digits(case, at)) is not None:
        return fault
    if forward:
        return _classify_forward(case, at)
    if case.loss_differences:
        return _classify_loss(case, at)
    if (
        fault := _classify_no_gradient(case, at)
        or expert_faults.classify_backward(case, at)
        or _classify_backward(case, at)
    ) is not None:
        return fault
    if first.what == "ranks' weights":
        return copies.classify_parted_ranks(case, at)
    if case.optimizer_uses_whole_tensors is not None:
        # gradients cannot be computed from the state of an optimizer that the task makes
        return (
            _classify_missing_update(case, at)
            or copies.classify_kept_dtype(case)
            or _classify_whole_tensor_optimizer(case, at)
            or _classify_norm_factor(case, at)
            or updates.classify_update(case, at)
        )
    return (
        _classify_missing_update(case, at)
        or copies.classify_kept_dtype(case)
        or expert_faults.classify_idle(case, at)
        or _classify_norms(case, at)
        or updates.classify_scaled_norm(case, at)
        or updates.classify_norm_of_groups(case, at)
        or _classify_part(case, at)
        or _classify_gradient(case, at)
        or mesh_faults.classify_norm(case, at)
        or updates.classify_update(case, at)
    )


def _classify_samples(case: FaultCase, step: int) -> Fault:
    mine, wanted = count_used_batches(case.run.batches[step - 1]), count_used_batches(case.replay.batches[step - 1])
    missing, more = wanted - mine, mine - wanted
    count, of = sum(missing.values()), sum(wanted.values())
    if missing and more and not set(more) - set(wanted):
        return Fault(
            "samples seen twice",
            f"{count} of the {of} microbatches of step {step} are not used by any rank, and as many are used twice",
        )
    if missing and not more:
        gone = {i // case.shares + 1 for i, mark in enumerate(_order(case, step)) if missing[mark]}
        last = gone == {case.accumulate}
        which = "the last microbatch" if last else f"microbatch {', '.join(map(str, sorted(gone)))}"
        return Fault(
            "a microbatch left out",
            f"{which} of {case.accumulate} of each rank is not used in step {step}: {count} of {of} in all",
        )
    if not missing and not more:
        weight = sum(rank.weight for rank in case.run.batches[step - 1])
        return Fault("weights that do not add up to 1", f"the weights of step {step} add up to {weight:.6g}")
    return Fault("other samples", f"{count} of the {of} microbatches of step {step} hold different samples")


def _order(case: FaultCase, step: int) -> Sequence[str]:
    return case.replay.batches[step - 1][0].used_fingerprints


def _classify_rate(case: FaultCase, step: int) -> Fault:
    wanted = [rank[0] for rank in case.base.rates]
    mine = [rank[0] for rank in case.run.rates]
    own, right = mine[step - 1], wanted[step - 1]
    for times in range(2, len(wanted) + 1):
        for start in range(times):  # of that many steps at a time, the schedule may be at the first or at a later one
            other = (step - 1) * times + start
            if other < len(wanted) and all(_equal(mine[t], wanted[t * times + start]) for t in range(step)):
                each = " (one for each rank)" if times == case.settled.ranks else ""
                return Fault(
                    "a rate that runs ahead",
                    f"the rate of step {step} is that of step {other + 1}: the schedule moves {times} steps at a "
                    f"time{each}",
                )
    ratios = {round(a[0] / b[0], 6) for a, b in zip(mine, wanted, strict=False) if b[0]}
    if len(ratios) == 1:
        return Fault(
            "a rate off by a factor", f"the rate is {ratios.pop():g} times the right one, in every step so far"
        )
    return Fault("another rate", f"the rate of step {step} is {own[0]:.6g} instead of {right[0]:.6g}")


def _classify_averages(case: FaultCase, step: int) -> Fault:
    """Return the fault of averages that differ first: in its tensors' order a weight comes before its average."""
    names = [name for name, kind in case.judgement.differing if kind == KIND_OF_AVERAGES]
    return Fault(
        "averages of other values",
        f"the averages of train.ema differ after step {step}, of {count_of(len(names), 'weight')} ({names[0]} first), "
        "although weights and the optimizer's state are the same: the engine does not average the values that its "
        "optimizer updates (Engine.full_weights)",
    )


def _equal(one: Sequence[float], other: Sequence[float]) -> bool:
    return all(math.isclose(a, b, rel_tol=1e-6) for a, b in zip(one, other, strict=True))


def _classify_digits(case: FaultCase, step: int) -> Fault | None:
    """Return the fault of a forward that is computed in more digits than the precision has."""
    mine, right = loss_rounding(case.run, case.own, case.replay)
    if mine > MOST_OF_FULL_DIGITS or right < 10 * MOST_OF_FULL_DIGITS:
        return None
    return Fault(
        "more digits than asked for",
        f"the losses of step {step} differ from those in fp64 by {mine:.1e} at most, and in one process with "
        f"train.precision {case.config.train.precision} by up to {right:.1e}: layers compute in a finer precision",
    )


def _classify_forward(case: FaultCase, step: int) -> Fault:
    place = case.module_differences["forward"]
    return Fault(
        "another forward",
        f"the output of {place.module} differs on rank {place.rank}, by {place.off:.1e}, although samples and weights "
        f"are the same before step {step}",
    )


def _classify_loss(case: FaultCase, step: int) -> Fault:
    first = case.loss_differences[0]
    ranks = sorted({difference.rank for difference in case.loss_differences})
    on_all = len(ranks) == count_loss_ranks(case.run)
    which = "every rank" if on_all else f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
    times = f", {first.value / first.wanted:.4g} times" if first.wanted else ""
    return Fault(
        "a loss that depends on the number of ranks" if on_all else "a loss that depends on the rank",
        f"the loss function gives another value on {which} for the same microbatch and model: {first.value:.6g} "
        f"instead of {first.wanted:.6g}{times}, in microbatch {first.micro + 1} of rank {first.rank} in step {step}, "
        "although all modules return the same; let loss() compute the same on every rank: nothing in it may depend "
        "on the rank, on the number of ranks, or on what one rank alone has seen",
    )


def _classify_no_gradient(case: FaultCase, step: int) -> Fault | None:
    """Return the fault of gradients that are zero, if the optimizer's state tells them from those that it never got."""
    if case.optimizer_uses_whole_tensors is not None or "weight" in case.config.train.optimizer.gradient_sums:
        return None
    gone = [name for name, (factor, left) in gradient_factors(case, step) if max(abs(factor), left) < _ZERO]
    if not gone:
        return None
    return Fault(
        "no gradient",
        f"in step {step} the gradient of {count_of(len(gone), 'parameter')} ({first_few(gone)}) is zero, and in one "
        "process it is not: nothing of the loss comes back to them",
    )


def _classify_backward(case: FaultCase, step: int) -> Fault | None:
    """Return the fault of a backward pass that goes wrong inside the model, if a gradient of another module is right.

    A loss that is scaled wrongly changes the gradients of all outputs.
    """
    place = case.module_differences.get("backward")
    if place is None or not place.off > case.near:
        return None
    if not has_right_gradient(case.run, case.own, place, case.shares, case.settled.strategy.axes):
        return None
    return Fault(
        "another backward",
        f"in step {step} the gradient of {place.module}'s output differs on rank {place.rank}, by {place.off:.1e}, "
        "although all outputs and losses, and gradients of other modules' outputs, are those of one process: what "
        "follows it in the forward has another gradient than its own",
    )


def _classify_missing_update(case: FaultCase, step: int) -> Fault | None:
    gone = find_unmoved_parameters(case.run, case.base, step)
    if not gone:
        return None
    groups = case.groups(step)
    missing_groups = [i for i, g in enumerate(groups) if g["names"] and set(g["names"]) <= set(gone)]
    exact = {n for i in missing_groups for n in groups[i]["names"]} == set(gone)
    if len(missing_groups) == len(groups):
        return Fault("no update", f"step {step} moves no parameter")
    if exact:
        which = ", ".join(str(i + 1) for i in missing_groups)
        return Fault(
            "a group left out",
            f"step {step} does not move the {len(gone)} parameters of group {which} of {len(groups)} ({gone[0]} first)",
        )
    return Fault("parameters left out", f"step {step} does not move {len(gone)} parameters, {gone[0]} first")


def _classify_whole_tensor_optimizer(case: FaultCase, step: int) -> Fault | None:
    first = case.judgement.first
    assert first is not None
    if (
        not case.optimizer_uses_whole_tensors
        or case.config.parallel.shard == "nothing"
        or first.what in ("loss", "norm", "ranks' norms")
    ):
        return None
    return Fault(
        "an optimizer that uses a tensor's norm",
        f"step {step} changes {first.name} differently, although losses and norms are the same: the task's optimizer "
        "uses whole tensors, and this strategy keeps them in parts; use shard: nothing, or an optimizer that works "
        "element by element",
    )


def _classify_norms(case: FaultCase, step: int) -> Fault | None:
    norms, right = case.run.norms[step - 1], case.base.norms[step - 1][0]
    if max(norms) - min(norms) <= case.limit * right:
        return None
    shown = ", ".join(f"{n:.5g}" for n in norms)
    fault = _classify_part(case, step) or _classify_gradient(case, step)
    if fault is not None and fault.name.removesuffix(IN_PART) in ("not reduced", "a microbatch not reduced"):
        return fault
    verb = "clip by"
    of_shares: list[float] = case.replay.shares[step - 1]["norms"]
    if all(case.is_near(norm, of_shares[seat.share]) for norm, seat in zip(norms, case.run.seats, strict=True)):
        what = "each is the norm of that rank's own share of the batch, before the ranks are added"
    elif case.is_near(math.sqrt(sum(n * n for n in norms)), right):
        what = "their squares add up to the square of the whole norm: each rank uses its own part of the gradient"
        factor = _fit_factor(case, step) * updates.clip_factor(case, norms[0])
        if case.is_near(factor, updates.clip_factor(case, right)):
            verb = "report"
            what = "their squares add up to the square of the whole norm, by which the gradient was clipped"
    else:
        what = "they should be equal"
    return Fault(
        "a norm taken per rank", f"in step {step} the ranks {verb} the norms {shown} instead of {right:.5g}: {what}"
    )


def _fit_factor(case: FaultCase, step: int) -> float:
    """Return the factor between the run's gradient and that of one process; NaN if there is none."""
    gradient = run_gradient(case, step)
    mix = fit_gradient_mix(gradient, {(0, 0): whole_gradient(case, step)}, {}, sorted(gradient))
    return math.nan if mix is None else mix.parts[0, 0]


def _classify_part(case: FaultCase, step: int) -> Fault | None:
    """Return the fault of the gradients of some parameters, while those of all others are right."""
    factors = dict(gradient_factors(case, step))
    wrong = [name for name, (factor, left) in factors.items() if not case.is_near(factor, 1.0) or left > case.near]
    if len(factors) - len(wrong) < 2:  # a single one may be right by chance
        return None
    mix = _fit_mix(case, run_gradient(case, step), wrong, step)
    if mix is None or mix.unexplained_share > 10 * case.near:
        return None
    fault = _classify_mix(case, mix, step)
    if fault is None:
        return None
    return replace(
        fault,
        name=" or ".join(f"{name}{IN_PART}" for name in fault.candidates) or f"{fault.name}{IN_PART}",
        says=f"in {count_of(len(wrong), 'parameter')} ({first_few(wrong)}) and no other, {fault.says}",
        candidates=tuple(f"{name}{IN_PART}" for name in fault.candidates),
        measured=f"in {count_of(len(wrong), 'parameter')} ({first_few(wrong)}) and no other, {fault.measured}",
        parameters=tuple(wrong),
    )


def _classify_gradient(case: FaultCase, step: int) -> Fault | None:
    gradients = run_gradient(case, step)
    names = [n for n, _ in case.judgement.differing if n in gradients] or list(gradients)
    mix = _fit_mix(case, gradients, list(dict.fromkeys(names)), step)
    if mix is None:
        return _classify_norm_factor(case, step)
    return _classify_mix(case, mix, step)


def _fit_mix(case: FaultCase, gradients: GradientSketches, names: Sequence[str], step: int) -> GradientMix | None:
    """Return the gradients of these parameters as a sum of those of microbatches and of the step before."""
    stale = whole_gradient(case, step - 1) if step > 1 else {}
    return fit_gradient_mix(gradients, share_gradients(case, step), stale, names)


def _classify_norm_factor(case: FaultCase, step: int) -> Fault | None:
    """Return the fault of a gradient whose norm is off by the number of ranks or microbatches.

    It is all that is known of the gradient if the optimizer's state does not say more.
    """
    norms, factor = case.run.norms[step - 1], norm_factor(case, step)
    if max(norms) - min(norms) > case.limit * max(norms) or not math.isfinite(factor) or case.is_near(factor, 1.0):
        return None
    return _known_factor(case, factor, f"the gradient's norm in step {step} is {factor:.4g} times that of one process")


def _classify_mix(case: FaultCase, mix: GradientMix, step: int) -> Fault | None:
    values = np.array([[mix.parts[i, s] for s in range(case.shares)] for i in range(case.accumulate)])
    middle = float(np.median(values))
    if abs(mix.stale) > 5 * case.near and case.is_near(middle, 1.0):
        return Fault(
            "a stale gradient",
            f"the gradient of step {step} is its own plus {mix.stale:.3g} times that of the previous step",
        )
    if np.abs(values - middle).max() <= case.near * abs(middle):
        return _classify_factor(case, middle, mix.unexplained_share, step)
    return _classify_uneven_mix(case, values, step)


def _classify_factor(case: FaultCase, factor: float, left: float, step: int) -> Fault | None:
    measured = f"the gradient of step {step} is {factor:.4g} times that of one process"
    if not case.is_near(factor, 1.0):
        return (
            _known_factor(case, factor, measured)
            or updates.classify_clip(case, factor, step)
            or Fault("a gradient off by a factor", measured)
        )
    for name, (least, most) in ROUNDING_ERROR_RANGES.items():
        if least <= left <= most:
            return Fault(
                f"rounded to {name}",
                f"the gradient of step {step} is right on average and off by {left:.1e} everywhere, "
                f"like numbers that were rounded to {name}",
            )
    return None


def _known_factor(case: FaultCase, factor: float, measured: str) -> Fault | None:
    """Return the fault of a gradient that is off by the number of ranks or microbatches, or both if they are equal."""
    ranks, micros = case.shares, case.accumulate
    by_world = {
        float(ranks): ("not averaged", f"a sum over the {ranks} ranks instead of the mean"),
        1.0 / ranks: ("averaged twice", f"divided by the {ranks} ranks once more"),
    }
    by_micros = {
        1.0 / micros: ("divided twice by accumulation", f"divided by the {micros} microbatches once more"),
        float(micros): ("not divided by accumulation", f"a sum over the {micros} microbatches instead of the mean"),
    }
    fits = [x for known in (by_world, by_micros) for value, x in known.items() if case.is_near(factor, value)]
    if not fits:
        return None
    names, says = tuple(name for name, _ in fits), f"{measured}: {', or '.join(why for _, why in fits)}"
    return Fault(" or ".join(names), says, names if len(names) > 1 else (), measured)


def _classify_uneven_mix(case: FaultCase, values: Any, step: int) -> Fault | None:
    micros, near = case.accumulate, 2 * case.near * float(np.abs(values).max())
    by_micro, by_share = values.mean(1), values.mean(0)
    if (alike := _classify_equal_weights(case, values, step)) is not None:
        return alike
    if np.abs(values - by_micro[:, None]).max() <= near:
        gone = [i + 1 for i in range(micros) if abs(by_micro[i]) <= near]
        if gone and len(gone) < micros:
            which = "the last microbatch" if gone == [micros] else f"microbatch {', '.join(map(str, gone))}"
            return Fault("a microbatch left out", f"the gradient of step {step} contains nothing of {which}")
        shown = ", ".join(f"{x:.3f}" for x in by_micro)
        if not gone and _is_geometric(case, by_micro):
            return Fault(
                "a gradient multiplied in each microbatch",
                f"the gradient of step {step} contains the microbatches, first to last, with the weights {shown}: what "
                "has been accumulated is added up over the ranks again in each further microbatch",
            )
        return Fault(
            "microbatches that count differently",
            f"the gradient of step {step} contains the microbatches, first to last, with the weights {shown}",
        )
    if np.abs(values - by_share[None, :]).max() <= near:
        shown = ", ".join(f"{x:.3f}" for x in by_share)
        rule = f"the gradient of step {step} contains the ranks' shares with the weights {shown}"
        if case.config.train.clipping is not None and _is_clipped_per_rank(case, by_share, step):
            return Fault("a norm taken per rank", f"{rule}: each was clipped by its own norm before they were added")
        if sum(abs(x) > near for x in by_share) == 1:
            return Fault("not reduced", f"{rule}: each rank uses only its own samples")
        return Fault("ranks that count differently", rule)
    spread = np.abs(values - by_micro[:, None]).max(1)
    alone = [i for i in range(micros) if spread[i] > near and sum(abs(x) > near for x in values[i]) == 1]
    if alone and all(spread[i] <= near or i in alone for i in range(micros)):
        which = f"microbatch {', '.join(str(i + 1) for i in alone)} of {micros}"
        return Fault(
            "a microbatch not reduced",
            f"the gradient of step {step} contains {which} of one rank only, and the others of all ranks: it was added "
            "after the ranks' gradients were",
        )
    return None


def _is_geometric(case: FaultCase, weights: Any) -> bool:
    """Return whether each weight is the same whole multiple of the next one, and the last one right."""
    ratios = weights[:-1] / weights[1:]
    times = round(float(ratios[0]))
    return times > 1 and case.is_near(weights[-1], 1.0) and all(case.is_near(ratio, times) for ratio in ratios)


def _classify_equal_weights(case: FaultCase, values: Any, step: int) -> Fault | None:
    """Return the fault of means that count alike, whatever the weights of what they are taken over."""
    scales = np.array(case.replay.batches[step - 1][0].scales).reshape(values.shape)
    near, (micros, shares) = 2 * case.near, values.shape
    if np.abs(values * scales * micros * shares - 1.0).max() <= near:
        which, count = "microbatch", micros * shares
    elif np.abs(values * scales.sum(0) * shares - 1.0).max() <= near:
        which, count = "rank", shares
    else:
        return None
    return Fault(
        f"{'microbatches' if which == 'microbatch' else 'ranks'} that count alike",
        f"in the gradient of step {step} the mean of each {which} counts 1/{count}, although their weights are "
        f"{scales.min():.3g} to {scales.max():.3g} of the batch's: a mean of means is not the mean over all tokens "
        "(weight(batch) in the task)",
    )


def _is_clipped_per_rank(case: FaultCase, by_share: Any, step: int) -> bool:
    clip = case.config.train.clipping
    assert clip is not None
    norms: list[float] = case.replay.shares[step - 1]["norms"]
    wanted = np.array([1.0 if n <= clip.max else clip.max / n for n in norms])  # a share without weight has norm 0
    return bool(np.abs(by_share / by_share.max() - wanted / wanted.max()).max() <= 2 * case.near)


def resolve_fault(case: FaultCase, kind: Fault, measured: float, micros: int) -> Fault:
    """Return which of two candidates fits, from the factor `measured` in a run with `micros` microbatches."""
    if len(kind.candidates) != 2:
        return kind
    ranks = case.shares
    by_world = case.is_near(measured, float(ranks)) or case.is_near(measured, 1.0 / ranks)
    name = kind.candidates[0 if by_world else 1]
    change = "stays the same" if by_world else "changes with them"
    counts = f"with {count_of(micros, 'microbatch')} instead of {case.accumulate}"
    return Fault(name, f"{kind.measured}; {counts} it {change} ({measured:.4g})")
