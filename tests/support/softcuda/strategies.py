"""Training on the emulated device, held against one process on the CPU: `make emulated` prints all of it as a table."""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.softcuda.emulation import ROOT
from tests.support.softcuda.processes import EmulatedDevice, EmulatedRun
from unipar.utils.table import format_table

STEPS = 6
TIMEOUT = 300.0
SETTINGS: Mapping[str, Any] = {
    "task": {
        "use": f"{ROOT}/examples/char_gpt.py:CharGPT",
        "args": {"layers": 2, "width": 32, "heads": 2, "context": 16},
    },
    "device": "cuda",
    "batch": {"total": 8, "micro": 2},
    "train": {"steps": STEPS, "optimizer": {"name": "adamw", "lr": 1e-2}, "clip": 1.0},
    "log": {"every": 1},
}
CODE = """
import json
import unipar
from unipar.backend import cells
from unipar.config import Cell, Config
config = Config.model_validate(json.loads({settings!r}))
report = unipar.launch(cells.config_in_cell(config, Cell.parse({cell!r})))
result = [loss for _, loss in report.losses]
"""

NEAR = {"fp32": 1e-5, "bf16-mixed": 0.03, "fp16": 0.01, "bf16-master": 0.06}
"""How far a loss may be from that of one process in fp32 on the CPU."""


@dataclass(frozen=True)
class EmulatedTraining:
    """A strategy with settings, and what it can be trained in."""

    cell: str
    more: Mapping[str, Any] = field(default_factory=dict[str, Any])
    precisions: tuple[str, ...] = ("fp32", "bf16-mixed", "fp16")
    ranks: int = 2
    near: float | None = None
    """How far losses may be from those of one process, if they are not to be as near as can be."""

    @property
    def name(self) -> str:
        """The strategy and what is beside it."""
        words = [f"{section}.{key}" for section, keys in self.more.items() for key in keys]
        return " ".join([self.cell, *words])

    def settings(self, precision: str, out: Path) -> dict[str, Any]:
        """Return the config of a run."""
        made: dict[str, Any] = json.loads(json.dumps({**SETTINGS, "out": str(out)}))
        made["train"]["precision"] = precision
        for section, keys in self.more.items():
            made.setdefault(section, {}).update(keys)
        made.setdefault("parallel", {})["data"] = self.ranks
        return made

    def run(self, device: EmulatedDevice, precision: str, folder: Path) -> EmulatedRun:
        """Train on the emulated device."""
        settings = json.dumps(self.settings(precision, folder / "run"))
        code = CODE.format(settings=settings, cell=self.cell)
        try:
            return device.run(code, devices=max(2, self.ranks), timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            return EmulatedRun(None, -1, f"no end after {TIMEOUT:.0f} s", ())


ALL = ("fp32", "bf16-mixed", "fp16", "bf16-master")
TRAININGS = (
    EmulatedTraining("single", ranks=1),
    EmulatedTraining("native/nothing"),
    EmulatedTraining("native/optimizer"),
    EmulatedTraining("native/gradients", precisions=ALL),
    EmulatedTraining("native/parameters", precisions=ALL),
    EmulatedTraining("native/nothing+tensor2"),
    EmulatedTraining("native/nothing+pipeline2"),
    EmulatedTraining("native/nothing+context2"),
    EmulatedTraining("native/parameters+tensor2", ranks=4),
    EmulatedTraining("deepspeed/nothing", precisions=ALL),
    EmulatedTraining("deepspeed/optimizer", precisions=ALL),
    EmulatedTraining("deepspeed/gradients", precisions=ALL),
    EmulatedTraining("deepspeed/parameters", precisions=ALL),
    EmulatedTraining("accelerate/nothing"),
    EmulatedTraining("accelerate/gradients", precisions=ALL),
    EmulatedTraining("accelerate/parameters", precisions=ALL),
    EmulatedTraining("accelerate/optimizer+zero", precisions=ALL),
    EmulatedTraining("accelerate/parameters+zero", precisions=ALL),
)
"""Every strategy, in each precision that it has."""

FP32 = ("fp32",)
FEATURES = (
    EmulatedTraining("native/parameters", {"model": {"offload": "parameters"}}, FP32),
    EmulatedTraining("deepspeed/parameters", {"model": {"offload": "parameters"}}, FP32),
    EmulatedTraining("native/nothing", {"train": {"ema": {"decay": 0.9}}}, FP32),
    EmulatedTraining("native/nothing", {"model": {"recompute": "blocks"}}, FP32),
    EmulatedTraining("native/nothing", {"checkpoint": {"every": 3}}, FP32),
    EmulatedTraining("native/parameters", {"checkpoint": {"every": 3}}, FP32),
    EmulatedTraining("native/nothing", {"eval": {"every": 3, "batches": 2}}, FP32),
    EmulatedTraining("native/nothing", {"train": {"optimizer": {"name": "muon", "lr": 1e-2}}}, FP32, near=math.inf),
    EmulatedTraining(
        "native/nothing", {"train": {"optimizer": {"name": "adamw-8bit", "lr": 1e-2}}}, FP32, near=0.05
    ),
    EmulatedTraining("native/nothing", {"train": {"sync_every": 3}}, FP32, near=math.inf),
)  # fmt: skip
"""What is beside a strategy; where one process with AdamW is no measure, the numbers need only be numbers."""


def losses_of_one_process(device: EmulatedDevice, folder: Path) -> list[float]:
    """Return the losses that the rest is held against: fp32, on the CPU."""
    one = EmulatedTraining("single", ranks=1)
    settings = {**one.settings("fp32", folder / "cpu"), "device": "cpu"}
    run = device.run(CODE.format(settings=json.dumps(settings), cell="single"))
    assert run.result, run.stderr
    assert run.findings == (), "the CPU's run has used the device"
    return run.result


def judge(training: EmulatedTraining, precision: str, run: EmulatedRun, wanted: Sequence[float]) -> str:
    """Return what is wrong with a run; "" if nothing is."""
    if not run.result:
        return next((line for line in reversed(run.stderr.strip().splitlines()) if line.strip()), "no result")
    near = training.near if training.near is not None else NEAR[precision]
    apart = (abs(a - b) for a, b in zip(run.result, wanted, strict=True))
    if too_far := [difference for difference in apart if not difference <= near]:  # NaN is not near
        return f"losses are {too_far[0]:.1g} apart"
    if len({finding.pid for finding in run.findings}) != training.ranks:
        return "not each rank has used the device"
    return next((f"{f.kind}: {f.text} ({' < '.join(f.where)})" for f in run.findings if f.kind in ("race", "hang")), "")


def main() -> int:
    """Play what is asked for, print a table, and return 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description="every strategy and precision on the emulated device")
    parser.add_argument("only", nargs="*", help="words that a row's name must have one of")
    asked = parser.parse_args()
    rows: list[list[str]] = []
    wrong = 0
    with tempfile.TemporaryDirectory() as folder, EmulatedDevice(Path(folder)) as device:
        wanted = losses_of_one_process(device, Path(folder))
        for training in (*TRAININGS, *FEATURES):
            if asked.only and not any(word in training.name for word in asked.only):
                continue
            for precision in training.precisions:
                start, out = time.monotonic(), Path(tempfile.mkdtemp(dir=folder))
                run = training.run(device, precision, out)
                said, seconds = judge(training, precision, run, wanted), time.monotonic() - start
                wrong += bool(said)
                kinds = Counter(finding.kind for finding in run.findings)
                apart = max((abs(a - b) for a, b in zip(run.result or [], wanted, strict=False)), default=math.nan)
                waits = f"{kinds['wait'] / training.ranks / STEPS:.1f}"
                unpinned = f"{kinds['unpinned'] / training.ranks / STEPS:.1f}"
                rows.append(
                    [training.name, precision, f"{apart:.1e}", waits, unpinned, f"{seconds:.0f} s", said or "ok"]
                )
                print(*rows[-1], sep="  ", flush=True)
    head = ["strategy", "precision", "from one process", "waits a step", "unpinned a step", "time", ""]
    print(format_table(head, rows, width=160))
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
