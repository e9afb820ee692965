"""Accounts of the emulated device's memory in each strategy, held against its allocator's own count and the plan."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typing_extensions import override

from tests.support.softcuda.emulation import ROOT
from tests.support.softcuda.processes import EmulatedDevice
from tests.support.softcuda.trainings.strategies import TRAININGS, EmulatedTraining

TIMEOUT = 1200.0
NEAR = 0.02
"""Share of a peak that may have no name, and by which a plan may be off."""

PLAIN_TASK = f"{ROOT}/examples/char_gpt.py:CharGPT"
"""A task without a loop of its own: only such a one has a plan."""

STEPS_RECORDED = 13
"""Steps in which a comparison has all of its passes of recording."""

CODE = """
import json
import unipar
from unipar.config import Config
from unipar.results.forecast.forecast_difference import forecast_differences
found = unipar.compare(Config.model_validate(json.loads({settings!r})), strategies={strategies!r})
plans = {{plan.strategy: plan.off for plan in forecast_differences(found.forecast, found.rows)}}
result = [
    dict(
        strategy=row.strategy,
        failure="" if row.outcome == "ran" else row.note or row.outcome,
        notes=[note for account in row.memory for note in account.notes],
        allocator=[phase.active - account.base for account in row.memory for phase in account.phases],
        peaks=[phase.peak for account in row.memory for phase in account.phases],
        sums=[sum(phase.held.values()) for account in row.memory for phase in account.phases],
        unnamed=max((phase.unattributed for account in row.memory for phase in account.phases), default=1.0),
        plan=plans.get(row.strategy),
    )
    for row in found.rows
]
"""


@dataclass(frozen=True)
class AccountCheck:
    """The account of a strategy, in all phases and on all ranks."""

    failure: str
    """Why there is no account, or what its recorder has noted; "" if nothing."""

    apart: int
    """Most bytes by which a phase's peak, or the sum of its parts, is not the allocator's peak."""

    unnamed: float
    """Largest share of a phase's peak that has no name."""

    plan: float | None
    """Share by which the planned peak is off; None if there is no plan."""

    @classmethod
    def of(cls, row: dict[str, Any]) -> AccountCheck:
        """Return the check of what the code above has found."""
        counts = [
            abs(n - peak) for kind in ("peaks", "sums") for n, peak in zip(row[kind], row["allocator"], strict=True)
        ]
        failure = row["failure"] or "; ".join(row["notes"]) or ("" if counts else "no phase was recorded")
        return cls(failure, max(counts, default=0), row["unnamed"], row["plan"])

    @override
    def __str__(self) -> str:
        plan = "no plan" if self.plan is None else f"plan {100 * self.plan:+.2f} %"
        return self.failure or f"{self.apart} bytes apart, {100 * self.unnamed:.2f} % unnamed, {plan}"

    @property
    def is_good(self) -> bool:
        """Whether it closes to the byte, all but a fiftieth has a name, and the plan is as near."""
        planned = self.plan is not None and abs(self.plan) <= NEAR
        return planned and not self.failure and self.apart == 0 and self.unnamed <= NEAR


def check_accounts(
    device: EmulatedDevice,
    precision: str,
    trainings: Sequence[EmulatedTraining] = TRAININGS,
    ranks: int = 2,
    task: Mapping[str, Any] | None = None,
    model: Mapping[str, Any] | None = None,
) -> dict[str, AccountCheck]:
    """Return the check of each strategy that has this precision on so many ranks, by its name; and of one process.

    `task`, `model`: sections of the config in place of the usual ones.
    """
    strategies = [t.strategy for t in trainings if precision in t.precisions and t.ranks == ranks]
    if not strategies:
        return {}
    with tempfile.TemporaryDirectory() as folder:
        settings = EmulatedTraining("", ranks=ranks).settings(precision, Path(folder) / "run")
        settings["task"] = {**settings["task"], "use": PLAIN_TASK} if task is None else dict(task)
        settings["train"]["steps"], settings["compare"] = STEPS_RECORDED, {"repeat": 1}
        settings["model"] = dict(model or {})
        code = CODE.format(settings=json.dumps(settings), strategies=strategies)
        run = device.run(code, devices=ranks, timeout=TIMEOUT)
    assert run.result, run.stderr
    return {row["strategy"]: AccountCheck.of(row) for row in run.result}
