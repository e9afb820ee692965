"""Gradients of a run, computed from sketches of its state, and their composition from known gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from unipar.config import Config
from unipar.config.sections.optimizer_settings import Accumulation
from unipar.verification.judgement.record import RunRecord, SketchVector

GradientSketches = Mapping[str, SketchVector]
"""Sketches of gradients by parameter."""


@dataclass(frozen=True)
class StateRule:
    """Rule by which the optimizer's state follows from gradients, so that gradients can be computed from the state."""

    kinds: Mapping[str, Accumulation]
    """Kinds of state that accumulate gradients, of which a parameter has one; weight, if the optimizer has none; none
    at all if no sum of gradients can be computed from what it keeps."""

    decay: Mapping[str, float]
    """Share of the weight that is added to the gradient, by name of every trained parameter."""

    limit: float | None
    """Largest norm of the gradient; None without clipping."""

    @classmethod
    def of(cls, config: Config, groups: Sequence[Mapping[str, object]]) -> StateRule:
        """Return the rule of the optimizer in `config`, for these parameter groups."""
        wanted, clip = config.train.optimizer, config.train.clipping
        decay: dict[str, float] = {}
        for group in groups:
            names, own = group["names"], group["decay"]
            assert isinstance(names, list)
            assert isinstance(own, float)
            decay |= dict.fromkeys(names, own)
        if wanted.decoupled:
            decay = dict.fromkeys(decay, 0.0)
        return cls(wanted.gradient_sums, decay, None if clip is None else clip.max)


def gradients_from_state(
    run: RunRecord, rule: StateRule, step: int, rates: Mapping[str, float]
) -> dict[str, SketchVector]:
    """Return the gradients of a step (from 1), without weight decay, before they were clipped by the run's own norm."""
    before, after = run.states[step - 1], run.states[step]
    norm = run.norms[step - 1][0]
    clip = 1.0 if rule.limit is None else min(1.0, rule.limit / (norm + 1e-6))
    gradients: dict[str, SketchVector] = {}
    for (name, kind), now in after.items():
        own = rule.kinds.get(kind)
        if own is None or name not in rule.decay:
            continue
        was = before.get((name, kind), np.zeros_like(now))
        if kind == "weight":
            if not rates.get(name):
                continue
            gradient = (was - now) / rates[name]
        elif own.begins_whole and (name, kind) not in before:
            gradient = now
        else:
            gradient = (now - own.keeps * was) / own.adds
        weight = before[name, "weight"]
        gradients[name] = (gradient - rule.decay[name] * weight) / clip
    return gradients


@dataclass(frozen=True)
class GradientMix:
    """Gradient as a weighted sum of known gradients."""

    parts: Mapping[tuple[int, int], float]
    """Weight of each share by microbatch and rank; 1 in a correct gradient."""

    stale: float
    """Weight of the previous step's gradient."""

    unexplained_share: float
    """Part that no known gradient explains, relative to the whole."""


def fit_gradient_mix(
    gradient: GradientSketches,
    parts: Mapping[tuple[int, int], GradientSketches],
    stale: GradientSketches,
    names: Sequence[str],
) -> GradientMix | None:
    """Return the least-squares fit over these parameters, with equal weights; None if none of them has a gradient."""
    keys = sorted(parts)
    columns = [*(parts[k] for k in keys), *([stale] if stale else [])]
    lines: list[SketchVector] = []
    wanted: list[SketchVector] = []
    for name in names:
        if name not in gradient:
            continue
        block = np.stack([c.get(name, np.zeros_like(gradient[name])) for c in columns], axis=1)
        size = float(np.linalg.norm(block[:, : len(keys)].sum(1))) or float(np.linalg.norm(block))
        if size > 0:
            lines.append(block / size)
            wanted.append(gradient[name] / size)
    if not lines:
        return None
    a, y = np.concatenate(lines), np.concatenate(wanted)
    answer = np.linalg.lstsq(a, y, rcond=1e-10)[0]
    rest = float(np.linalg.norm(y - a @ answer) / max(float(np.linalg.norm(y)), 1e-300))
    return GradientMix(
        {k: float(c) for k, c in zip(keys, answer[: len(keys)], strict=True)},
        float(answer[len(keys)]) if stale else 0.0,
        rest,
    )


def find_unmoved_parameters(run: RunRecord, base: RunRecord, step: int) -> list[str]:
    """Return parameters that a step did not change, although it changes them in one process."""
    unmoved: list[str] = []
    for (name, kind), was in run.states[step - 1].items():
        if kind != "weight" or (name, kind) not in base.states[step]:  # a tied one may have two names in the run
            continue
        moved = base.states[step][name, kind] - base.states[step - 1][name, kind]
        if np.any(moved) and not np.any(run.states[step][name, kind] - was):
            unmoved.append(name)
    return unmoved
