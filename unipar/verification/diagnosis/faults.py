"""What kind of fault fits: read off facts that were measured, one kind after another."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from unipar.config import Config, Precision
from unipar.verification.diagnosis.gradients import (
    GradientMix,
    GradientSketches,
    StateRule,
    find_unmoved_parameters,
    fit_gradient_mix,
    gradients_from_state,
)
from unipar.verification.diagnosis.modules import ModuleDifference
from unipar.verification.judgement.judge import Judgement, count_used_batches
from unipar.verification.judgement.record import RunRecord, SketchVector

FACTOR_TOLERANCE: dict[Precision, float] = {"fp64": 0.005, "fp32": 0.005}
"""How near a measured factor is to the one that it is taken for, in proportion."""

COARSE_FACTOR_TOLERANCE = 0.03
"""The same in precisions of 8 bits or so."""

ROUNDING_ERROR_RANGES = {"bf16": (4e-4, 6e-3), "fp16": (4e-5, 4e-4)}
"""What rounding a gradient once or twice to these leaves of it, in proportion."""


@dataclass(frozen=True)
class Fault:
    """A kind of fault, and the sentence with the figures that speak for it."""

    name: str
    says: str
    candidates: tuple[str, ...] = ()
    """Kinds that fit equally well, where it is not one alone; `name` lists them all."""

    measured: str = ""
    """The part of `says` that holds whichever of them it is."""


@dataclass(frozen=True)
class FaultCase:
    """A run that parts, and all that it is looked at with."""

    run: RunRecord
    base: RunRecord
    replay: RunRecord
    """In fp64, with each microbatch's gradient apart."""

    judgement: Judgement
    config: Config
    ranks: int
    accumulate: int
    limit: float
    """How far the ranks' norms may lie apart, in proportion."""

    partings: Mapping[str, ModuleDifference]
    own: bool | None
    """Of a task that makes its own optimizer: whether that goes by whole tensors."""

    def groups(self, step: int) -> list[dict[str, Any]]:
        """The optimizer's that is at work in this step."""
        return [g for g in self.replay.groups if g["prefix"] == self.run.prefixes[step - 1]]

    @property
    def near(self) -> float:
        return FACTOR_TOLERANCE.get(self.config.train.precision, COARSE_FACTOR_TOLERANCE)


def classify_fault(case: FaultCase) -> Fault | None:
    """None: nothing known fits."""
    first = case.judgement.first
    assert first is not None
    at = first.step
    if first.what in ("samples", "sample weight"):
        return _classify_samples(case, at)
    if first.what == "rate":
        return _classify_rate(case, at)
    if "forward" in case.partings:
        place = case.partings["forward"]
        return Fault(
            "another forward",
            f"{place.module} puts out something else on rank {place.rank}, off by {place.off:.1e}, though samples and "
            f"weights are the same before step {at}",
        )
    if case.own is not None:  # what it was given cannot be read off its state
        return _classify_missing_update(case, at) or _classify_whole_tensor_optimizer(case, at)
    return _classify_missing_update(case, at) or _classify_norms(case, at) or _classify_gradient(case, at)


def _classify_samples(case: FaultCase, step: int) -> Fault:
    mine, wanted = count_used_batches(case.run.batches[step - 1]), count_used_batches(case.replay.batches[step - 1])
    missing, more = wanted - mine, mine - wanted
    count, of = sum(missing.values()), sum(wanted.values())
    if missing and more and not set(more) - set(wanted):
        return Fault(
            "samples seen twice",
            f"{count} of the {of} microbatches of step {step} are not seen by any rank, and as many are seen twice",
        )
    if missing and not more:
        gone = {i // case.ranks + 1 for i, mark in enumerate(_order(case, step)) if missing[mark]}
        last = gone == {case.accumulate}
        which = "the last microbatch" if last else f"microbatch {', '.join(map(str, sorted(gone)))}"
        return Fault(
            "a microbatch left out",
            f"{which} of {case.accumulate} of each rank is not used in step {step}: {count} of {of} in all",
        )
    if not missing and not more:
        weight = sum(rank.weight for rank in case.run.batches[step - 1])
        return Fault("weights that do not add up to 1", f"the microbatches of step {step} weigh {weight:.6g} in all")
    return Fault("other samples", f"{count} of the {of} microbatches of step {step} hold something else")


def _order(case: FaultCase, step: int) -> Sequence[str]:
    return case.replay.batches[step - 1][0].used_fingerprints


def _classify_rate(case: FaultCase, step: int) -> Fault:
    wanted = [rank[0] for rank in case.base.rates]
    mine = [rank[0] for rank in case.run.rates]
    own, right = mine[step - 1], wanted[step - 1]
    for times in range(2, len(wanted) + 1):
        pairs = [(mine[t], wanted[(t + 1) * times - 1]) for t in range(len(mine)) if (t + 1) * times <= len(wanted)]
        if pairs and all(_equal(a, b) for a, b in pairs):
            each = " (one for each rank)" if times == case.ranks else ""
            return Fault(
                "a rate that runs ahead",
                f"the rate of step {step} is that of step {step * times}: it takes {times} steps in one{each}",
            )
    ratios = {round(a[0] / b[0], 6) for a, b in zip(mine, wanted, strict=True) if b[0]}
    if len(ratios) == 1:
        return Fault(
            "a rate off by a factor", f"the rate is {ratios.pop():g} times the one that is wanted, at every step"
        )
    return Fault("another rate", f"the rate of step {step} is {own[0]:.6g}, and {right[0]:.6g} is wanted")


def _equal(one: Sequence[float], other: Sequence[float]) -> bool:
    return all(math.isclose(a, b, rel_tol=1e-6) for a, b in zip(one, other, strict=True))


def _classify_missing_update(case: FaultCase, step: int) -> Fault | None:
    gone = find_unmoved_parameters(case.run, case.base, step)
    if not gone:
        return None
    groups = case.groups(step)
    whole = [i for i, g in enumerate(groups) if g["names"] and set(g["names"]) <= set(gone)]
    exact = {n for i in whole for n in groups[i]["names"]} == set(gone)
    if len(whole) == len(groups):
        return Fault("no update", f"step {step} moves no parameter")
    if exact:
        which = ", ".join(str(i + 1) for i in whole)
        return Fault(
            "a group left out",
            f"step {step} does not move the {len(gone)} parameters of group {which} of {len(groups)} ({gone[0]} first)",
        )
    return Fault("parameters left out", f"step {step} does not move {len(gone)} parameters, {gone[0]} first")


def _classify_whole_tensor_optimizer(case: FaultCase, step: int) -> Fault | None:
    first = case.judgement.first
    assert first is not None
    if not case.own or case.config.parallel.shard == "nothing" or first.what in ("loss", "norm", "ranks' norms"):
        return None
    return Fault(
        "an optimizer that uses a tensor's norm",
        f"step {step} moves {first.name} otherwise, though losses and norms are the same: the task's optimizer goes by "
        "whole tensors, and this cell keeps them in parts; take shard: nothing, or one that goes element by element",
    )


def _classify_norms(case: FaultCase, step: int) -> Fault | None:
    norms, right = case.run.norms[step - 1], case.base.norms[step - 1][0]
    if max(norms) - min(norms) <= case.limit * right:
        return None
    shown = ", ".join(f"{n:.5g}" for n in norms)
    of_shares: list[float] = case.replay.shares[step - 1]["norms"]
    if all(_near(case, a, b) for a, b in zip(norms, of_shares, strict=True)):
        found = _classify_gradient(case, step)
        if found is not None and found.name == "not reduced":
            return found
        what = "each is the norm of that rank's own share of the batch, taken before the ranks are added"
    elif _near(case, math.sqrt(sum(n * n for n in norms)), right):
        what = "their squares add up to that of the whole: each rank sees its own part of the gradient"
    else:
        what = "they should be one"
    return Fault("a norm taken per rank", f"the ranks clip by {shown} in step {step}, for {right:.5g}: {what}")


def _classify_gradient(case: FaultCase, step: int) -> Fault | None:
    found = run_gradient(case, step)
    names = [n for n, _ in case.judgement.differing if n in found] or list(found)
    parts = _share_gradients(case, step)
    stale = whole_gradient(case, step - 1) if step > 1 else {}
    mix = fit_gradient_mix(found, parts, stale, list(dict.fromkeys(names)))
    if mix is None:
        return None
    return _classify_mix(case, mix, step)


def _share_gradients(case: FaultCase, step: int) -> dict[tuple[int, int], GradientSketches]:
    made: dict[tuple[int, int], GradientSketches] = {}
    for text, grads in case.replay.shares[step - 1]["parts"].items():
        micro, rank = map(int, text.split("."))
        made[micro, rank] = {name: sketch.numpy() for name, sketch in grads.items()}
    return made


def run_gradient(case: FaultCase, step: int) -> dict[str, SketchVector]:
    """What a step of the run was given."""
    config = case.config.of_part(case.run.prefixes[step - 1].removesuffix("."))
    return gradients_from_state(case.run, StateRule.of(config, case.groups(step)), step, _rate_by_parameter(case, step))


def whole_gradient(case: FaultCase, step: int) -> GradientSketches:
    """What one process has in it."""
    whole: dict[str, Any] = {}
    for grads in _share_gradients(case, step).values():
        for name, sketch in grads.items():
            whole[name] = whole[name] + sketch if name in whole else sketch
    return whole


def _rate_by_parameter(case: FaultCase, step: int) -> dict[str, float]:
    rates = case.run.rates[step - 1][0]
    return {n: rate for g, rate in zip(case.groups(step), rates, strict=False) for n in g["names"]}


def _classify_mix(case: FaultCase, mix: GradientMix, step: int) -> Fault | None:
    ranks, micros = case.ranks, case.accumulate
    values = np.array([[mix.parts[i, r] for r in range(ranks)] for i in range(micros)])
    middle = float(np.median(values))
    if abs(mix.stale) > 5 * case.near and _near(case, middle, 1.0):
        return Fault(
            "a stale gradient",
            f"the gradient of step {step} is its own and {mix.stale:.3g} of the one of the step before",
        )
    if np.abs(values - middle).max() <= case.near * abs(middle):
        return _classify_factor(case, middle, mix.unexplained_share, step)
    return _classify_uneven_mix(case, values, step)


def _classify_factor(case: FaultCase, factor: float, left: float, step: int) -> Fault | None:
    ranks, micros = case.ranks, case.accumulate
    said = f"the gradient of step {step} is {factor:.4g} times that of one process"
    by_world = {
        float(ranks): ("not averaged", f"a sum over the {ranks} ranks, where the mean is wanted"),
        1.0 / ranks: ("averaged twice", f"divided by the {ranks} ranks once more"),
    }
    by_micros = {
        1.0 / micros: ("divided twice by accumulation", f"divided by the {micros} microbatches once more"),
        float(micros): ("not divided by accumulation", f"a sum over {micros} microbatches, where the mean is wanted"),
    }
    if not _near(case, factor, 1.0):
        fits = [x for known in (by_world, by_micros) for value, x in known.items() if _near(case, factor, value)]
        if not fits:
            return Fault("a gradient off by a factor", said)
        names, says = tuple(name for name, _ in fits), f"{said}: {', or '.join(why for _, why in fits)}"
        return Fault(" or ".join(names), says, names if len(names) > 1 else (), said)
    for name, (least, most) in ROUNDING_ERROR_RANGES.items():
        if least <= left <= most:
            return Fault(
                f"rounded to {name}",
                f"the gradient of step {step} is right on the whole and off by {left:.1e} everywhere, "
                f"as numbers are that were rounded to {name}",
            )
    return None


def _classify_uneven_mix(case: FaultCase, values: Any, step: int) -> Fault | None:
    micros, near = case.accumulate, 2 * case.near * float(np.abs(values).max())
    by_micro, by_rank = values.mean(1), values.mean(0)
    if np.abs(values - by_micro[:, None]).max() <= near:
        gone = [i + 1 for i in range(micros) if abs(by_micro[i]) <= near]
        if gone:
            which = "the last microbatch" if gone == [micros] else f"microbatch {', '.join(map(str, gone))}"
            return Fault("a microbatch left out", f"the gradient of step {step} holds nothing of {which}")
    if np.abs(values - by_rank[None, :]).max() <= near:
        shown = ", ".join(f"{x:.3f}" for x in by_rank)
        rule = f"the gradient of step {step} holds the ranks' shares {shown} times"
        if case.config.train.clipping is not None and _is_clipped_per_rank(case, by_rank, step):
            return Fault("a norm taken per rank", f"{rule}: each was clipped by its own norm before they were added")
        if sum(abs(x) > near for x in by_rank) == 1:
            return Fault("not reduced", f"{rule}: each rank goes by its own samples")
        return Fault("ranks that count differently", rule)
    return None


def _is_clipped_per_rank(case: FaultCase, by_rank: Any, step: int) -> bool:
    clip = case.config.train.clipping
    assert clip is not None
    norms: list[float] = case.replay.shares[step - 1]["norms"]
    wanted = np.array([min(1.0, clip.max / n) for n in norms])
    return bool(np.abs(by_rank / by_rank.max() - wanted / wanted.max()).max() <= 2 * case.near)


def _near(case: FaultCase, value: float, wanted: float) -> bool:
    return abs(value - wanted) <= case.near * abs(wanted)


def resolve_fault(case: FaultCase, kind: Fault, measured: float, micros: int) -> Fault:
    """Two factors fit, for there are as many microbatches as ranks: which, a run with other microbatches has shown."""
    if len(kind.candidates) != 2:
        return kind
    ranks = case.ranks
    by_world = _near(case, measured, float(ranks)) or _near(case, measured, 1.0 / ranks)
    name = kind.candidates[0 if by_world else 1]
    stays = "stays" if by_world else "goes with them"
    return Fault(
        name, f"{kind.measured}; with {_count_microbatches(micros)} in place of {ranks} it {stays} ({measured:.4g})"
    )


def _count_microbatches(micros: int) -> str:
    return "1 microbatch" if micros == 1 else f"{micros} microbatches"
