"""Verification of the corpus: all cases of a task at once, and what the diagnosis was given for each."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import unipar
from tests.corpus.cases import CASES, Case
from tests.support.forks import ROOT, Forks
from unipar.backend import registry
from unipar.results.verdicts import Finding, Verdict
from unipar.verification import verification_steps as session
from unipar.verification import world_pool
from unipar.verification.diagnosis import faults, mesh_faults
from unipar.verification.diagnosis.case import Fault, FaultCase
from unipar.verification.judgement.record import RunRecord

BACKEND = ROOT / "tests" / "corpus" / "backend"

STEPS = 5
"""Steps that are verified: an epoch has four."""

TRAIN: dict[str, Any] = {
    "steps": 20,
    "optimizer": {"name": "adamw", "lr": 1e-2, "weight_decay": 0.1, "decay": "matrices"},
    "schedule": {"name": "cosine", "warmup": 4},
    "clip": 0.3,
}

OF_TASK: dict[str, dict[str, Any]] = {
    "MixedTexts": {"precision": "bf16-mixed"},
    "AdamTexts": {"optimizer": {"name": "adam", "lr": 1e-2, "weight_decay": 0.1, "decay": "matrices"}},
}
"""Keys of `train` with which a task is verified, if they are not those of all."""


@dataclass(frozen=True)
class Verified:
    """Verdict on a case, and its diagnosis, which can be made once more."""

    verdict: Verdict
    diagnose: Callable[[], Fault | None]

    @property
    def finding(self) -> Finding:
        """Finding of the verdict."""
        assert self.verdict.finding is not None, self.verdict
        return self.verdict.finding


def strategy_of(name: str, case: Case) -> str:
    """Return the strategy of a case."""
    shard, _, axes = case.strategy.partition("+")
    return f"corpus/{shard}+{name}{f'+{axes}' if axes else ''}"


def place_of(finding: Finding) -> str:
    """Return the place that a finding names: step, first modules or else first parameter.

    How many parameters differ depends on the processor where few of their digits do.
    """
    modules = [f"{way} {at}" for way, at in (("forward", finding.forward), ("backward", finding.backward)) if at]
    more = " and others" if finding.parameters > 1 else ""
    parameter = [f"{finding.parameter}{more}"] if finding.parameter and not modules else []
    return ", ".join([f"step {finding.step}", *modules, *parameter])


def verify_cases(forks: Forks, folder: Path, names: Iterable[str], device: str = "cpu") -> dict[str, Verified]:
    """Verify cases, those of one task at once, beside the same engines without an error; return them by name."""
    by_task: dict[str, list[str]] = {}
    for name in names:
        by_task.setdefault(CASES[name].task, []).append(name)
    verified: dict[str, Verified] = {}
    for task, several in by_task.items():
        place = folder / task
        place.mkdir()
        verified |= verify_task(forks, place, task, several, device)
    return verified


def verify_task(
    forks: Forks, folder: Path, task: str, names: Sequence[str], device: str = "cpu", **args: Any
) -> dict[str, Verified]:
    """Verify cases on this task, whatever theirs is."""
    healthy = list({strategy_of("none", CASES[name]): None for name in names})
    strategies = {strategy_of(name, CASES[name]): name for name in names}
    config = {
        "task": {"use": f"tests.corpus.tasks:{task}", "args": args},
        "device": device,
        "parallel": {"data": 2},
        "batch": {"total": 16, "micro": 4},
        "train": TRAIN | OF_TASK.get(task, {}),
        "out": str(folder / "out"),
    }
    file = folder / "corpus.yaml"
    file.write_text(json.dumps(config), "utf-8")
    diagnoses: dict[str, Callable[[], Fault | None]] = {}
    classify = faults.classify_fault

    def keep(case: FaultCase) -> Fault | None:
        diagnoses[str(case.settled.strategy)] = partial(classify, case)
        return classify(case)

    def keep_masks(run: RunRecord, replay: RunRecord) -> Fault:
        again = partial(_classify_masks, run, replay)
        diagnoses.update(
            {strategy: again for strategy in strategies if strategy not in diagnoses}
        )  # the others are not run with it
        return again()

    path = [str(BACKEND), str(ROOT), os.environ.get("PYTHONPATH", "")]
    with pytest.MonkeyPatch.context() as patch, forks.instead():
        patch.syspath_prepend(BACKEND)
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setattr(world_pool, "SubprocessStarter", lambda: forks)  # on a device
        patch.setattr(faults, "classify_fault", keep)
        patch.setattr(session, "classify_masks", keep_masks)
        registry.find_backend.cache_clear()
        verdicts = unipar.verify(str(file), strategies=[*healthy, *strategies], steps=STEPS)
    registry.find_backend.cache_clear()
    rows = {row.strategy: row for row in verdicts.rows}
    wrong = {strategy: rows[strategy] for strategy in healthy if rows[strategy].outcome != "agrees"}
    assert not wrong, wrong
    return {
        name: Verified(rows[strategy], diagnoses.get(strategy, lambda: None)) for strategy, name in strategies.items()
    }


def _classify_masks(run: RunRecord, replay: RunRecord) -> Fault:
    return mesh_faults.classify_masks(run, replay)
