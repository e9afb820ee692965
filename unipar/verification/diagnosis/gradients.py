"""Facts about a run that parts: what its gradients are made of, weighed from sketches of its state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from unipar.config import Config
from unipar.config.sections.optimizer import SGD, Adam, AdamW
from unipar.verification.judgement.record import RunRecord, SketchVector

GradientSketches = Mapping[str, SketchVector]
"""Sketches by parameter."""


@dataclass(frozen=True)
class StateRule:
    """How the optimizer's state follows from gradients, so that gradients follow from its state."""

    kind: str
    """The state that gathers gradients; weight, where there is none."""

    keeps: float
    adds: float
    decay: Mapping[str, float]
    """What of the weight is added to each parameter's gradient; by name of all that are trained."""

    limit: float | None
    """The clip."""

    @classmethod
    def of(cls, config: Config, groups: Sequence[Mapping[str, object]]) -> StateRule:
        wanted, clip = config.train.optimizer, config.train.clipping
        decay: dict[str, float] = {}
        for group in groups:
            names, own = group["names"], group["decay"]
            assert isinstance(names, list)
            assert isinstance(own, float)
            decay |= dict.fromkeys(names, own)
        if isinstance(wanted, AdamW):
            decay = dict.fromkeys(decay, 0.0)
        limit = None if clip is None else clip.max
        if isinstance(wanted, Adam | AdamW):
            first = wanted.betas[0]
            return cls("exp_avg", first, 1.0 - first, decay, limit)
        assert isinstance(wanted, SGD)
        if wanted.momentum:
            return cls("momentum_buffer", wanted.momentum, 1.0, decay, limit)
        return cls("weight", 1.0, 0.0, decay, limit)


def gradients_from_state(
    run: RunRecord, rule: StateRule, step: int, rates: Mapping[str, float]
) -> dict[str, SketchVector]:
    """What a step (from 1) was given of each parameter, less the decay, before it was clipped by the run's own norm."""
    before, after = run.states[step - 1], run.states[step]
    norm = run.norms[step - 1][0]
    clip = 1.0 if rule.limit is None else min(1.0, rule.limit / (norm + 1e-6))
    found: dict[str, SketchVector] = {}
    for (name, kind), now in after.items():
        if kind != rule.kind or name not in rule.decay:
            continue
        was = before.get((name, kind), np.zeros_like(now))
        if kind == "weight":
            if not rates.get(name):
                continue
            given = (was - now) / rates[name]
        elif rule.kind == "momentum_buffer" and (name, kind) not in before:
            given = now
        else:
            given = (now - rule.keeps * was) / rule.adds
        weight = before[name, "weight"]
        found[name] = (given - rule.decay[name] * weight) / clip
    return found


@dataclass(frozen=True)
class GradientMix:
    """A gradient as a sum of known ones."""

    parts: Mapping[tuple[int, int], float]
    """By microbatch and rank: how much of its share is in it; 1 in a healthy one."""

    stale: float
    """How much of the step before."""

    unexplained_share: float
    """What none of them explains, in proportion to the whole."""


def fit_gradient_mix(
    found: GradientSketches,
    parts: Mapping[tuple[int, int], GradientSketches],
    stale: GradientSketches,
    names: Sequence[str],
) -> GradientMix | None:
    """The least squares over these parameters, each counting the same."""
    keys = sorted(parts)
    columns = [*(parts[k] for k in keys), *([stale] if stale else [])]
    lines: list[SketchVector] = []
    wanted: list[SketchVector] = []
    for name in names:
        if name not in found:
            continue
        block = np.stack([c.get(name, np.zeros_like(found[name])) for c in columns], axis=1)
        size = float(np.linalg.norm(block[:, : len(keys)].sum(1))) or float(np.linalg.norm(block))
        if size > 0:
            lines.append(block / size)
            wanted.append(found[name] / size)
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
    """Parameters that a step left where they were, though it moves them in one process."""
    found: list[str] = []
    for (name, kind), was in run.states[step - 1].items():
        moved = base.states[step][name, kind] - base.states[step - 1][name, kind] if kind == "weight" else None
        if moved is not None and np.any(moved) and not np.any(run.states[step][name, kind] - was):
            found.append(name)
    return found
