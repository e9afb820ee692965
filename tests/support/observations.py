"""Folders of observed commands, written by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.comparisons import PARAMETER_COUNT, account
from tests.support.run_folders import wrote
from unipar.results.observation import ObservedCommand, TrainingFinding
from unipar.results.observed_rank import ObservedRank, observed_rank_path

STEPS = 12
LOSSES = (4.5, 4.25, 4.125, 4.0, 3.875, 3.75, 3.625, 3.5, 3.375, 3.25)
UNEQUAL = TrainingFinding(
    kind="unequal copies",
    severity="fault",
    ranks=(1,),
    step=8,
    parameter="blocks.0.attention.query.weight",
    says="after step 8 1 of 54 weights differ between the ranks: blocks.0.attention.query.weight on rank 1",
    way_out="wrap the model before training, and change no weight on one rank alone",
)
SAME_DROPOUT = TrainingFinding(
    kind="same dropout", severity="note", step=2, says="dropout drops the same places on all ranks", way_out=""
)


def observed_rank(rank: int = 0, **changes: Any) -> ObservedRank:
    """One of two ranks under DDP, without a finding."""
    known: dict[str, Any] = {
        "rank": rank,
        "size": 2,
        "launched_size": 2,
        "host": "one",
        "pid": 100 + rank,
        "models": ("DDP > GPT (model)",),
        "optimizers": ("AdamW",),
        "parameters": PARAMETER_COUNT,
        "dtypes": {"float32": PARAMETER_COUNT},
        "steps": STEPS,
        "seconds": 0.2 + 0.01 * rank,
        "phases": {"data": 0.001, "forward": 0.05, "backward": 0.11, "update": 0.03, "between": 0.009 + 0.01 * rank},
        "waiting": 0.05,
        "backwards": (1,) * 10,
        "losses": LOSSES,
        "first_dimension": 4,
        "norms": {step: 2.0 - 0.125 * step for step in range(1, 11)},
        "norms_after": {2: 1.0, 8: 1.0},
        "clip": 1.0,
        "rates": dict.fromkeys(range(1, 11), (0.0003,)),
        "settings": {"lr": 0.0003, "weight_decay": 0.1},
    }
    return ObservedRank.model_validate(known | changes)


def write_observation(
    folder: Path,
    ranks: Sequence[ObservedRank] | None = None,
    *,
    findings: Sequence[TrainingFinding] = (),
    exit_code: int = 0,
    memory: float | None = 1.0,
    loss: float = 0.0,
    ended: bool = True,
) -> Path:
    """Write an observed command into a folder; `memory`: scale of its accounts; `loss`: what is added to each loss."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank in ranks or (observed_rank(0), observed_rank(1)):
        observed_rank_path(folder, rank.rank).write_text(rank.model_dump_json(), "utf-8")
        wrote(folder, rank.rank, _events(rank, loss))
        if memory is not None:
            account("native/nothing", rank.rank % 4, memory).model_copy(update={"rank": rank.rank}).write(folder)
    if ended:
        command = ObservedCommand(
            command=("torchrun", "--nproc-per-node", "2", "train.py"),
            exit_code=exit_code,
            findings=tuple(findings),
            checked=("initial weights", "batches"),
        )
        (folder / "observed.json").write_text(command.model_dump_json(), "utf-8")
    return folder


def _events(rank: ObservedRank, more: float) -> list[dict[str, Any]]:
    steps = [
        {
            "event": "step",
            "time": 101.0 + step,
            "step": step,
            "loss": loss + more if math.isfinite(loss) else None,
            "norm": norm if math.isfinite(norm := rank.norms.get(step, math.nan)) else None,
            "lr": 0.0003,
            **({"seconds": rank.seconds, "waiting": 0.05} if step > 5 and rank.seconds else {}),
        }
        for step, loss in enumerate(rank.losses, 1)
    ]
    start = {
        "event": "start",
        "time": 100.0,
        "strategy": "observed: DDP",
        "size": rank.size,
        "parameters": rank.parameters,
    }
    return [start, *steps, {"event": "end", "time": 113.0, "steps": rank.steps, "peak_rss": 3 * 2**20}]
