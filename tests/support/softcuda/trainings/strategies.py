"""Trainings on the emulated device: each strategy in each precision that it has, held against the CPU."""

from __future__ import annotations

import json
import math
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.support.forks import Forks
from tests.support.softcuda.emulation import ROOT
from tests.support.softcuda.processes import EmulatedDevice, EmulatedRun, run_code

STEPS, LOG_EVERY = 8, 4
BETWEEN = range(6, 8)

TIMEOUT = 300.0
STEPWISE = f"{ROOT}/tests/support/softcuda/trainings/stepwise.py"
MIXTURES = f"{ROOT}/tests/support/softcuda/trainings/mixtures.py"
SIZES = {"layers": 2, "width": 32, "heads": 2, "context": 16}
SETTINGS: Mapping[str, Any] = {
    "task": {"use": f"{STEPWISE}:StepwiseGPT", "args": SIZES},
    "device": "cuda",
    "batch": {"total": 8, "micro": 2},
    "train": {"steps": STEPS, "optimizer": {"name": "adamw", "lr": 1e-2}, "clip": 1.0},
    "log": {"every": LOG_EVERY},
}
CODE = """
import json
import unipar
from unipar.backend import offered_strategies as strategies
from unipar.config import Strategy, Config
config = Config.model_validate(json.loads({settings!r}))
report = unipar.launch(strategies.config_in_strategy(config, Strategy.parse({strategy!r})))
result = [loss for _, loss in report.losses]
"""

NEAR = {"fp32": 1e-5, "bf16-mixed": 0.03, "fp16": 0.01, "bf16-master": 0.06}
"""How far a loss may be from that of one process in fp32 on the CPU."""


@dataclass(frozen=True)
class EmulatedTraining:
    """A strategy with settings, and what it can be trained in."""

    strategy: str
    more: Mapping[str, Any] = field(default_factory=dict[str, Any])
    precisions: tuple[str, ...] = ("fp32", "bf16-mixed", "fp16")
    ranks: int = 2
    near: float | None = None
    """How far losses may be from those of one process, if they are not to be as near as can be."""

    task: str = ""
    """What the task is, if it is not a character GPT."""

    between: range = BETWEEN
    """Steps between two logged ones, when libraries have set up all that they set up in their first steps."""

    @property
    def name(self) -> str:
        """The strategy and what is beside it."""
        if self.task:
            return f"{self.strategy}, {self.task}"
        words = [f"{key}: {_shown(value)}" for keys in self.more.values() for key, value in keys.items()]
        return ", ".join([self.strategy, *words])

    def settings(self, precision: str, out: Path, device: str = "cuda") -> dict[str, Any]:
        """Return the config of a run."""
        made: dict[str, Any] = json.loads(json.dumps({**SETTINGS, "device": device, "out": str(out)}))
        made["train"]["precision"] = precision
        for section, keys in self.more.items():
            made[section] = dict(keys) if section in ("task", "batch") else {**made.get(section, {}), **keys}
        made.setdefault("parallel", {})["data"] = self.ranks
        return made

    def beside(self, model: Mapping[str, Any]) -> EmulatedTraining:
        """Return the same training with further keys in the section `model`."""
        return replace(self, more={**self.more, "model": {**self.more.get("model", {}), **model}})

    def run(self, device: EmulatedDevice, precision: str, folder: Path) -> EmulatedRun:
        """Train on the emulated device."""
        settings = json.dumps(self.settings(precision, folder / "run"))
        code = CODE.format(settings=settings, strategy=self.strategy)
        try:
            return device.run(code, devices=max(2, self.ranks), timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            return EmulatedRun(None, -1, f"no end after {TIMEOUT:.0f} s", ())

    def losses_on_cpu(self, forks: Forks, folder: Path) -> list[float]:
        """Return the losses of the same training in fp32 on the CPU, where nothing is emulated or offloaded."""
        on_cpu = replace(self, more={}) if "offload" in self.more.get("model", {}) else self
        settings = json.dumps(on_cpu.settings("fp32", folder / "cpu", "cpu"))
        return run_code(forks, CODE.format(settings=settings, strategy=self.strategy), folder)


ALL = ("fp32", "bf16-mixed", "fp16", "bf16-master")
FP32, MIXED = ("fp32",), ("fp32", "bf16-mixed")
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
    EmulatedTraining("deepspeed/nothing+tensor2", precisions=FP32),
    EmulatedTraining("deepspeed/optimizer+tensor2", precisions=FP32, ranks=4),
    EmulatedTraining("deepspeed/optimizer", precisions=ALL),
    EmulatedTraining("deepspeed/gradients", precisions=ALL),
    EmulatedTraining("deepspeed/parameters", precisions=ALL),
    EmulatedTraining("accelerate/nothing"),
    EmulatedTraining("accelerate/nothing+tensor2", precisions=FP32),
    EmulatedTraining("accelerate/parameters+tensor2", precisions=FP32, ranks=4),
    EmulatedTraining("accelerate/gradients", precisions=ALL),
    EmulatedTraining("accelerate/parameters", precisions=ALL),
    EmulatedTraining("accelerate/optimizer+zero", precisions=ALL),
    EmulatedTraining("accelerate/parameters+zero", precisions=ALL),
)
"""Every strategy, in each precision that it has."""


def _shown(value: Any) -> Any:
    """Return a setting, or the name or the first number of several."""
    return next(iter(value.values())) if isinstance(value, Mapping) else value


def _other_tasks(strategy: str) -> tuple[EmulatedTraining, ...]:
    """Return trainings of the other tasks in a strategy."""
    few, tokens = {"total": 16, "micro": 4}, {"tokens": 70, "max_length": 8, "micro": 20}
    parts = {"use": f"{STEPWISE}:StepwiseGan", "args": {"critic_steps": 1}}
    long, late = {"steps": 12}, range(10, 12)  # each part has its first steps
    return (
        EmulatedTraining(
            strategy, {"task": {"use": f"{STEPWISE}:StepwiseTowers"}, "batch": few}, FP32, task="contrastive"
        ),
        EmulatedTraining(strategy, {"task": parts, "batch": few, "train": long}, FP32, task="parts", between=late),
        EmulatedTraining(
            strategy, {"task": {"use": f"{STEPWISE}:StepwiseTexts"}, "batch": tokens}, FP32, task="tokens"
        ),
    )


def _mixture(strategy: str, task: str = "Mixtral", **args: Any) -> EmulatedTraining:
    """Return the training of a mixture of experts."""
    use = {"use": f"{MIXTURES}:Stepwise{task}", "args": args}
    slow = {"optimizer": {"name": "adamw", "lr": 1e-3}}
    return EmulatedTraining(strategy, {"task": use, "train": slow}, MIXED, task=" ".join([task, *args.values()]))


COMPILED = {"model": {"compile": {"backend": "aot_eager"}}}
"""Compilation without kernels of Triton."""

ONE_OF_EACH = ("native/nothing", "native/parameters", "deepspeed/gradients", "accelerate/nothing")
TORCH_ADAM = {"options": {"deepspeed": {"cpu_adam": "torch"}}}
FEATURES = (
    EmulatedTraining("native/parameters", {"model": {"offload": "parameters"}}, FP32),
    EmulatedTraining("deepspeed/optimizer", {"model": {"offload": "optimizer"}, **TORCH_ADAM}, FP32),
    EmulatedTraining("deepspeed/gradients", {"model": {"offload": "optimizer"}, **TORCH_ADAM}, FP32),
    EmulatedTraining("deepspeed/parameters", {"model": {"offload": "parameters"}, **TORCH_ADAM}, FP32),
    EmulatedTraining("native/nothing", {"train": {"ema": {"decay": 0.9}}}, FP32),
    EmulatedTraining("deepspeed/optimizer", {"train": {"ema": {"decay": 0.9}}}, FP32),
    EmulatedTraining("native/nothing", {"model": {"recompute": "blocks"}}, FP32),
    EmulatedTraining("native/nothing", {"checkpoint": {"every": 4}}, FP32),
    EmulatedTraining("native/parameters", {"checkpoint": {"every": 4}}, FP32),
    EmulatedTraining("native/nothing", {"eval": {"every": 4, "batches": 2}}, FP32),
    EmulatedTraining("native/nothing", {"train": {"consistency_check": {"every": 4}}}, FP32),
    EmulatedTraining("native/parameters", {"train": {"consistency_check": {"every": 4}}}, FP32),
    EmulatedTraining("deepspeed/parameters", {"train": {"consistency_check": {"every": 4}}}, FP32),
    EmulatedTraining("accelerate/gradients", {"train": {"consistency_check": {"every": 4}}}, FP32),
    EmulatedTraining("native/nothing", {"train": {"clip": {"norm": "fp64", "max": 1.0}}}, FP32),
    EmulatedTraining("native/nothing", {"train": {"optimizer": {"name": "muon", "lr": 1e-2}}}, FP32, near=math.inf),
    EmulatedTraining("native/parameters", {"train": {"optimizer": {"name": "muon", "lr": 1e-2}}}, FP32, near=math.inf),
    EmulatedTraining("native/nothing", {"train": {"optimizer": {"name": "adamw-8bit", "lr": 1e-2}}}, FP32, near=0.05),
    EmulatedTraining("native/optimizer", {"train": {"optimizer": {"name": "adamw-8bit", "lr": 1e-2}}}, FP32, near=0.05),
    EmulatedTraining("native/nothing", {"train": {"local_steps": 4}}, FP32, near=math.inf),
    _mixture("native/nothing+expert2", kernel="batched_mm"),
    _mixture("native/nothing+expert2", kernel="grouped_mm"),
    _mixture("native/parameters+expert2", kernel="batched_mm"),
    _mixture("deepspeed/optimizer+expert2"),
    _mixture("native/nothing+expert2", "Experts", kind="stacked"),
    _mixture("native/nothing+expert2", "Experts", kind="list"),
    *(EmulatedTraining(strategy, COMPILED, FP32) for strategy in ONE_OF_EACH),
    *(training for strategy in ONE_OF_EACH for training in _other_tasks(strategy)),
)  # fmt: skip
"""What is beside a strategy; where one process with AdamW is no measure, the numbers need only be numbers."""


DEEPER = {"task": {"use": f"{STEPWISE}:StepwiseGPT", "args": {**SIZES, "layers": 4}}}
FULL = {**DEEPER, "data": {"last_batch": "drop"}}
RECOMPUTED = {**DEEPER, "model": {"recompute": "blocks"}}
OFFLOADED = (
    *(
        EmulatedTraining(strategy, DEEPER)
        for strategy in (
            "native/nothing", "native/gradients", "native/parameters", "native/nothing+tensor2",
            "native/nothing+pipeline2", "native/nothing+context2", "native/nothing+tensor2+sequence",
            "deepspeed/nothing", "deepspeed/gradients", "deepspeed/parameters", "deepspeed/nothing+tensor2",
            "accelerate/nothing", "accelerate/parameters",
        )
    ),
    EmulatedTraining("single", DEEPER, ranks=1),
    EmulatedTraining("native/nothing+pipeline2+zerobubble", FULL),
    EmulatedTraining("native/nothing+pipeline2+interleaved", FULL),
    *(EmulatedTraining(strategy, RECOMPUTED) for strategy in ("native/parameters", "native/nothing+tensor2+sequence")),
    EmulatedTraining("native/nothing", {**DEEPER, **COMPILED}),
    EmulatedTraining("deepspeed/parameters", {**DEEPER, **COMPILED}),
)  # fmt: skip
"""Trainings in which activations may wait in host memory."""


def losses_of_one_process(forks: Forks, folder: Path) -> list[float]:
    """Return the losses of one process in fp32 on the CPU."""
    return EmulatedTraining("single", ranks=1).losses_on_cpu(forks, folder)


def largest_difference(losses: Sequence[float], wanted: Sequence[float]) -> float:
    """Return how far losses are from those that are wanted; NaN if any is none."""
    apart = [abs(a - b) for a, b in zip(losses, wanted, strict=True)]
    return math.nan if any(map(math.isnan, apart)) else max(apart)


def judge(training: EmulatedTraining, precision: str, run: EmulatedRun, wanted: Sequence[float]) -> str:
    """Return what is wrong with a run; "" if nothing is."""
    if not run.result:
        return next((line for line in reversed(run.stderr.strip().splitlines()) if line.strip()), "no result")
    near = training.near if training.near is not None else NEAR[precision]
    if not (apart := largest_difference(run.result, wanted)) <= near:  # NaN is not near
        return f"losses are {apart:.1g} apart"
    if len({finding.pid for finding in run.findings}) != training.ranks:
        return "not each rank has used the device"
    return next((f"{f.kind}: {f.text} ({' < '.join(f.where)})" for f in run.findings if f.kind in ("race", "hang")), "")


def waits_of_a_step(training: EmulatedTraining, run: EmulatedRun, *, lines: bool = False) -> dict[str, float]:
    """Return how often a rank's host waits in a step between two logged ones, or copies memory that is not pinned.

    By what it does and the file that does it, with the line if asked for.
    """
    found: Counter[str] = Counter()
    for finding in run.findings:
        if finding.step in training.between and finding.kind in ("wait", "unpinned"):
            line = finding.where[0] if finding.where else "torch:"  # a thread of torch's own
            where = line if lines else line.rpartition(":")[0]
            found[f"{finding.text} in {where}"] += 1
    return {what: count / len(training.between) / training.ranks for what, count in found.items()}
