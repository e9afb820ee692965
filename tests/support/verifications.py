"""Verifications: of a small training on two ranks, by the command; and made up, as `verify` leaves them in a folder."""

from __future__ import annotations

import json
import math
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.forks import ROOT, Forks
from unipar.results.verdicts import CutDependence, Finding, Verdict, Verdicts

STEPS = 12
LOSSES = [2.0 - 0.1 * i for i in range(STEPS)]
NORMS = [4.0 + 0.5 * i for i in range(STEPS)]


def verified(
    forks: Forks,
    folder: Path,
    task: str,
    strategies: Sequence[str],
    *,
    steps: int,
    backend: str,
    more: Sequence[str] = (),
    **args: Any,
) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """Verify a task on two ranks, with a backend of tests/support; return the command's end and verify.json."""
    config = {
        "task": {"use": task, "args": args},
        "device": "cpu",
        "parallel": {"data": 2},
        "batch": {"total": 16, "micro": 4},
        "train": {"steps": 20, "optimizer": {"name": "adamw", "lr": 1e-2, "decay": "matrices"}, "clip": 0.3},
        "out": str(folder / "out"),
    }
    (folder / "c.yaml").write_text(json.dumps(config), "utf-8")
    path = os.pathsep.join([str(ROOT / "tests" / "support" / backend), str(ROOT)])
    words = [word for strategy in strategies for word in ("--strategies", strategy)]
    done = forks.unipar(["verify", str(folder / "c.yaml"), "--steps", str(steps), *words, *more], {"PYTHONPATH": path})
    file = folder / "out" / "verify" / "verify.json"
    assert file.exists(), done.stdout + done.stderr
    return done, json.loads(file.read_text("utf-8"))


def _strategy(strategy: str, off: float, share: float, bits: str = "shares") -> Verdict:
    return Verdict(
        strategy=strategy,
        outcome="agrees",
        digits=7,
        bits=bits,
        worst=f"loss at step 3 is off by {off:.1e}, 1.0e-06 is allowed",
        share=share,
        shares={"samples": 0.0, "loss": share, "norm": share / 2, "weight": share / 4},
        losses=[v + off * (i % 3) / 2 for i, v in enumerate(LOSSES)],
        norms=[v + off * (i % 2) for i, v in enumerate(NORMS)],
    )


def agreeing_verdicts() -> Verdicts:
    """Three strategies that agree, and one that is refused."""
    return Verdicts(
        name="digits",
        out="runs/digits/verify",
        precision="fp32",
        ranks=2,
        steps=STEPS,
        rows=[
            _strategy("native/nothing", 2e-7, 0.2),
            _strategy("native/optimizer", 2e-7, 0.2),
            _strategy("deepspeed/gradients", 4e-7, 0.4, ""),
            Verdict(strategy="native/nothing+dp", outcome="refused", note="device: cpu is <not> available", alone=True),
        ],
        one={
            "one process, fp64": {"loss": [v + 1e-8 for v in LOSSES], "norm": NORMS},
            "one process": {"loss": LOSSES, "norm": NORMS},
            "one process, microbatches of 8": {"loss": LOSSES, "norm": [v + 3e-7 for v in NORMS]},
        },
        base="one process",
        allowed={"loss": [1e-6] * STEPS, "norm": [2e-6] * STEPS},
        remarks=["dropout is set to 0 for this verification: dropout"],
        versions={"python": "3.11.7", "torch": "2.13.0"},
        machine={"cpu": "A Processor", "cores": 2},
    )


def disagreeing_verdicts() -> Verdicts:
    """Beside the agreeing strategies one with a fault, one with losses that are not numbers, and one that failed."""
    now = agreeing_verdicts()
    fault = Finding(
        step=3,
        what="loss",
        kind="not averaged",
        says="the gradient of step 3 is 2.000 times that of one process",
        parameter="first.weight",
        parameters=4,
        backward="first, on rank 1, microbatch 1",
    )
    doubled = _strategy("deepspeed/parameters", 1e-3, 812.5).changed(
        outcome="disagrees",
        digits=2,
        bits="",
        worst="loss at step 3 is off by 1.0e-03, 1.0e-06 is allowed",
        finding=fault,
    )
    broken = _strategy("horovod/nothing", 0.0, math.inf).changed(
        outcome="disagrees",
        bits="",
        worst="loss at step 9 is missing or not a number",
        shares={"samples": 0.0, "loss": math.inf, "norm": 0.0},
        losses=[*LOSSES[:8], *[math.nan] * 4],
    )
    failed = Verdict(
        strategy="accelerate/nothing", outcome="failed", note="rank 1 died of SIGKILL\nits log is rank-1.log"
    )
    return now.changed(rows=[*now.rows, doubled, broken, failed])


def cut_dependent_verdicts() -> Verdicts:
    """All strategies agree, and the loss is a sum; they were compared with a replay that cuts as they do."""
    now = agreeing_verdicts()
    replay = "a replay, share by share, as configured"
    cut = CutDependence(kind="sum", off=1.9, micro=None, way_out="return the mean over the batch")
    return now.changed(
        cut_dependence=cut,
        base=replay,
        one={
            "one process": {"loss": [2 * v for v in LOSSES], "norm": NORMS},
            replay: {"loss": LOSSES, "norm": NORMS},
        },
    )
