"""Gradients of a run, computed from sketches of its state, and their composition from known gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from unipar.config import Config
from unipar.config.sections.optimizer import SGD, Adam, AdamW
from unipar.verification.judgement.record import RunRecord, SketchVector

GradientSketches = Mapping[str, SketchVector]
"""Sketches of gradients by parameter."""


@dataclass(frozen=True)
class StateRule:
    """Rule by which the optimizer's state follows from gradients, so that gradients can be computed from the state."""

    kind: str
    """Kind of state that accumulates gradients; weight, if the optimizer has none."""

    keeps: float
    """Factor on the old state in an update."""

    adds: float
    """Factor on the gradient in an update."""

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
    """Return the gradients of a step (from 1), without weight decay, before they were clipped by the run's own norm."""
    before, after = run.states[step - 1], run.states[step]
    norm = run.norms[step - 1][0]
    clip = 1.0 if rule.limit is None else min(1.0, rule.limit / (norm + 1e-6))
    gradients: dict[str, SketchVector] = {}
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
        gradients[name] = (given - rule.decay[name] * weight) / clip
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
        moved = base.states[step][name, kind] - base.states[step - 1][name, kind] if kind == "weight" else None
        if moved is not None and np.any(moved) and not np.any(run.states[step][name, kind] - was):
            unmoved.append(name)
    return unmoved
