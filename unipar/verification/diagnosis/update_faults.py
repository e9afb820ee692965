"""Kinds of faults between the gradient and the weights: the clip, weight decay, and what the optimizer does."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from torch import Tensor

from unipar.utils.text import count_of, first_few
from unipar.verification.diagnosis.case import Fault, FaultCase, run_gradient, whole_gradient
from unipar.verification.judgement.record import SketchVector, norm_of

LEAST_LOSS_SCALE = 16.0
"""Smallest factor between norms that is taken for a loss scale."""


def clip_factor(case: FaultCase, norm: float) -> float:
    """Return the factor by which gradients of this norm are clipped."""
    clip = case.config.train.clipping
    return 1.0 if clip is None else min(1.0, clip.max / (norm + 1e-6))


def classify_clip(case: FaultCase, factor: float, step: int) -> Fault | None:
    """Return the fault of a clip that is not applied; `factor` is that of the gradient, if the clip was right."""
    clip, norm, right = case.config.train.clipping, case.run.norms[step - 1][0], case.base.norms[step - 1][0]
    wanted = clip_factor(case, right)
    applied = factor * clip_factor(case, norm)  # between the optimizer's gradient and the whole one of one process
    if clip is None or not math.isfinite(norm) or case.is_near(wanted, 1.0):
        return None
    if case.is_near(applied, 1.0) and not case.is_near(factor, 1.0):
        return Fault(
            "not clipped",
            f"the optimizer got the gradient of step {step} with its norm of {right:.5g}, although train.clip is "
            f"{clip.max:g}",
        )
    return None


def classify_scaled_norm(case: FaultCase, step: int) -> Fault | None:
    """Return the fault of a norm, and so of a clip, that was taken while a loss scale multiplied the gradients."""
    norm, right = case.run.norms[step - 1][0], case.base.norms[step - 1][0]
    if not (math.isfinite(norm) and right > 0 and norm >= LEAST_LOSS_SCALE * right):
        return None
    power = math.log2(norm / right)
    gradient, expected = run_gradient(case, step), whole_gradient(case, step)
    factors = [_factor(gradient[name], right) for name, right in expected.items() if name in gradient]
    if abs(power - round(power)) > 1e-3 or not factors or not case.is_near(float(np.median(factors)), 1.0):
        return None  # a gradient that is too large itself is something else
    clip = case.config.train.clipping
    then = (
        "" if clip is None else f", so that a clip to {clip.max:g} leaves a norm of {clip.max / 2 ** round(power):.2g}"
    )
    return Fault(
        "clipped while scaled",
        f"the norm of step {step} is {2 ** round(power)} times the right one: it is that of gradients which a loss "
        f"scale still multiplied{then}; unscale them first",
    )


def classify_norm_of_groups(case: FaultCase, step: int) -> Fault | None:
    """Return the fault of a clip by the norm of each group of the optimizer, or of each parameter."""
    norm = case.run.norms[step - 1][0]
    if case.config.train.clipping is None or not math.isfinite(norm):
        return None
    mine, right = run_gradient(case, step), whole_gradient(case, step)
    lengths: dict[str, float] = case.replay.shares[step - 1]["lengths"]
    groups = [[name for name in g["names"] if name in mine and norm_of(right[name]) > 0] for g in case.groups(step)]
    whole_norm = math.hypot(*lengths.values())
    for what, several in (("group", groups), ("parameter", [[name] for names in groups for name in names])):
        norms = [math.hypot(*(lengths[name] for name in names)) for names in several if names]
        wanted = [clip_factor(case, own) / clip_factor(case, norm) for own in norms]
        if len(norms) < 2 or all(case.is_near(factor, 1.0) for factor in wanted):
            continue
        if all(
            case.is_near(_factor(mine[name], right[name]), factor)
            for names, factor in zip(filter(None, several), wanted, strict=True)
            for name in names
            if lengths[name] > 1e-3 * whole_norm
        ):
            shown = f" ({', '.join(f'{own:.5g}' for own in norms)})" if what == "group" else ""
            return Fault(
                f"a norm taken per {what}",
                f"in step {step} each {what} of the optimizer is clipped by its own norm{shown} instead of that of all "
                f"gradients, {case.base.norms[step - 1][0]:.5g}",
            )
    return None


def classify_decay(case: FaultCase, step: int) -> Fault | None:
    """Return the fault of another weight decay than the config's, if that explains the difference of an update."""
    decays = {name: group["decay"] for group in case.groups(step) for name in group["names"]}
    decoupled = case.config.train.optimizer.decoupled
    off = _decoupled_decays(case, step, decays) if decoupled else _coupled_decays(case, step, decays)
    wrong = {name: decay for name, decay in off.items() if abs(decay - decays[name]) > 1e-3}
    if not wrong:
        return None
    values, right = sorted({round(d, 3) for d in wrong.values()}), sorted({round(decays[n], 3) for n in wrong})
    where = "the weights of" if decoupled else "the gradients of"
    way = "" if decoupled or values != [0.0] else "; taken off the weights instead, it is the decay of AdamW"
    return Fault(
        "another weight decay",
        f"in step {step}, {where} {count_of(len(wrong), 'parameter')} ({first_few(list(wrong))}) get a weight decay of "
        f"{_shown(values)} instead of {_shown(right)}{way}",
    )


def _decoupled_decays(case: FaultCase, step: int, decays: dict[str, float]) -> dict[str, float]:
    """Return the decay by which each weight that differs was multiplied, {} if a difference is something else."""
    measured: dict[str, float] = {}
    rates = dict(zip(map(id, case.groups(step)), case.run.rates[step - 1][0], strict=False))
    rate_of = {name: rates.get(id(group), 0.0) for group in case.groups(step) for name in group["names"]}
    for name, kind in case.judgement.differing:
        if kind != "weight" or not rate_of.get(name):
            return {}
        before = case.base.states[step - 1][name, kind]
        change = case.run.states[step][name, kind] - case.base.states[step][name, kind]
        times = _factor(change, before)
        if norm_of(change - times * before) > 0.02 * norm_of(change):
            return {}
        measured[name] = decays[name] - times / rate_of[name]
    return measured


def _coupled_decays(case: FaultCase, step: int, decays: dict[str, float]) -> dict[str, float]:
    """Return the decay that each gradient contains, {} if a difference of the gradients is something else."""
    gradient, expected = run_gradient(case, step), whole_gradient(case, step)
    measured: dict[str, float] = {}
    scale = clip_factor(case, case.run.norms[step - 1][0])
    for name, mine in gradient.items():
        if name not in expected or name not in decays:
            continue
        weight = case.run.states[step - 1][name, "weight"]
        change = (mine - expected[name]) * scale  # decay is added after the clip
        times = _factor(change, weight)
        if norm_of(change - times * weight) > 0.02 * norm_of(change) + 1e-5 * norm_of(expected[name]):
            return {}
        measured[name] = decays[name] + times
    return measured


def classify_step_count(case: FaultCase, step: int) -> Fault | None:
    """Return the fault of an optimizer that has counted more or fewer steps than there were, and corrects by that."""
    counts = {name: (float(case.run.state[name, "step"]), float(right)) for name, right in _step_counts(case)}
    wrong = {name: pair for name, pair in counts.items() if pair[0] != pair[1]}
    if not wrong or not any(kind == "weight" for _, kind in case.judgement.differing):
        return None
    mine, right = next(iter(wrong.values()))
    return Fault(
        "another step count",
        f"after step {step} the optimizer has counted {mine:g} instead of {right:g} for "
        f"{count_of(len(wrong), 'parameter')} ({first_few(list(wrong))}): what it corrects by that number is that of "
        "another step",
    )


def _step_counts(case: FaultCase) -> Iterator[tuple[str, Tensor]]:
    """Yield the step counts of one process that the run has, too."""
    for (name, kind), count in case.own.state.items():
        if kind == "step" and (name, kind) in case.run.state:
            yield name, count


def classify_update(case: FaultCase, step: int) -> Fault | None:
    """Return the fault of an optimizer that does something else with the right gradient."""
    first = case.judgement.first
    assert first is not None
    if first.what in ("loss", "norm", "ranks' norms") or "backward" in case.module_differences:
        return None
    if (fault := classify_step_count(case, step)) is not None:
        return fault
    if case.optimizer_uses_whole_tensors is None and (fault := classify_decay(case, step)) is not None:
        return fault
    kinds = list(dict.fromkeys(kind for _, kind in case.judgement.differing)) or [first.what]
    whose = "that of train.optimizer" if case.optimizer_uses_whole_tensors is None else "the task's own"
    return Fault(
        "another update",
        f"step {step} makes other {' and '.join(kinds)} of {count_of(len(case.judgement.differing), 'tensor')} "
        f"({first.name} first), although the losses, the norm and every module's gradient are those of one process: "
        f"the optimizer's rule is not {whose}",
    )


def _factor(mine: SketchVector, right: SketchVector) -> float:
    return float(np.dot(mine, right)) / max(float(np.dot(right, right)), 1e-300)


def _shown(values: list[float]) -> str:
    return " and ".join(f"{value:g}" for value in values)
