"""Runs that a verification needs: one process in several ways, then every cell in two."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from unipar.backend.cells import ONE, config_in_cell
from unipar.config import Config, Precision
from unipar.config.sections.optimizer import Clip
from unipar.config.settled import SettledConfig
from unipar.verification.worker.jobs import Job, RunKey

TASK_PROBE_NAME, FP64_RUN_NAME, FP32_RUN_NAME, BASE_RUN_NAME = (
    RunKey("probe"),
    RunKey("one process", precision="fp64"),
    RunKey("one process", precision="fp32"),
    RunKey("one process"),
)
"""Runs of one process: the probe of the task, a run in fp64 (or else in fp32), and the run that cells are compared
with."""

SHARES_REPLAY_NAME, MICROBATCH_REPLAY_NAME = RunKey("shares", bitwise=True), RunKey("micros", bitwise=True)
"""Replays in bitwise arithmetic, which cells may equal bit for bit."""

SHARES_CONFIGURED, MICROS_CONFIGURED, SHARES_FP64, SHARES_FP32 = (
    RunKey("shares"),
    RunKey("micros"),
    RunKey("shares", precision="fp64"),
    RunKey("shares", precision="fp32"),
)
"""Further replays, for a task whose numbers depend on how a batch is split."""

SHARES_PERTURBED = RunKey("shares", perturbed=True)
"""Replay from initial weights that differ in the last place, for a model that cannot run in fp64."""


@dataclass(frozen=True)
class RunPlan:
    """Jobs of a verification, for a config whose number of ranks is settled."""

    settled: SettledConfig
    steps: int
    fp64: bool = True
    """Whether the model can run in fp64; if not, what fp64 runs would show is taken from runs in fp32."""

    @property
    def config(self) -> Config:
        """Config of the cells."""
        return self.settled.config

    @property
    def ranks(self) -> int:
        """Number of ranks of each cell."""
        return self.settled.ranks

    @property
    def precision(self) -> Precision:
        """Precision of the one-process runs: bf16-mixed stands in for bf16-master, which needs master copies."""
        wanted = self.config.train.precision
        return "bf16-mixed" if wanted == "bf16-master" else wanted

    @property
    def exact_precision(self) -> Precision:
        """Finest precision in which the model can run."""
        return "fp64" if self.fp64 else "fp32"

    @property
    def exact_run(self) -> RunKey:
        """Key of the run of one process in the finest precision."""
        if self.fp64:
            return FP64_RUN_NAME
        return BASE_RUN_NAME if self.precision == "fp32" else FP32_RUN_NAME

    @property
    def exact_shares(self) -> RunKey:
        """Key of the replay, share by share, in the finest precision."""
        if self.fp64:
            return SHARES_FP64
        return SHARES_CONFIGURED if self.precision == "fp32" else SHARES_FP32

    @property
    def fixed_micro(self) -> int | None:
        """Size of a microbatch in any number of ranks; None if it or the global batch follows from that number."""
        batch = self.config.batch
        return None if batch.total is None else batch.micro

    @property
    def accumulate(self) -> int:
        """Number of microbatches of each rank in a step."""
        return self.settled.sizes.accumulate

    def one_process_config(self, precision: Precision | None = None) -> SettledConfig:
        """Return the config of one process without a wrapper, which takes the same microbatches one after another."""
        config = config_in_cell(self.config, ONE).changed({"train.precision": precision or self.precision})
        return SettledConfig.of(config, ONE, 1, self.settled.device)

    def reference_jobs(self) -> list[list[Job]]:
        """Return the jobs of the references, as two lists that can run side by side."""
        one, exactly = self.one_process_config(), with_bitwise_arithmetic(self.one_process_config())
        others = [
            replace(self._run(RunKey("one process", micro=m), _with_micro_size(one, self._total, m)), may_fail=True)
            for m in self._cuts()
        ]
        return [
            [
                Job(key=TASK_PROBE_NAME, kind="probe", settled=self.one_process_config("fp64"), steps=0),
                replace(self._run(FP64_RUN_NAME, self.one_process_config("fp64")), may_fail=True),
                self.replay_job(MICROBATCH_REPLAY_NAME, exactly),
            ],
            [self._run(BASE_RUN_NAME, one), *others, self.replay_job(SHARES_REPLAY_NAME, exactly)],
        ]

    def further_reference_jobs(self, *, cut_matters: bool) -> list[list[Job]]:
        """Return further jobs of one process, as two lists that can run side by side.

        If the task's numbers depend on how a batch is split: replays that split it as cells do. If the model cannot
        run in fp64: a replay from perturbed weights, and an fp32 run if the config's precision is a coarser one.
        """
        as_configured, exactly = self.one_process_config(), self.one_process_config(self.exact_precision)
        first = [self.replay_job(SHARES_CONFIGURED, as_configured)] if cut_matters else []
        second = [self.replay_job(MICROS_CONFIGURED, as_configured)] if cut_matters else []
        if not self.fp64:
            first.append(self.replay_job(SHARES_PERTURBED, as_configured))
            if self.exact_run != BASE_RUN_NAME:
                second.append(self._run(self.exact_run, exactly))
        if cut_matters and self.exact_shares != SHARES_CONFIGURED:
            second.append(self.replay_job(self.exact_shares, exactly))
        return [first, second]

    def exact_replay_key(self, step: int) -> RunKey:
        """Return the key of the replay up to a step that shows rounding: in fp64, or else from perturbed weights."""
        return RunKey("shares", step=step, precision=self.exact_precision, perturbed=not self.fp64)

    def cell_jobs(self, configs: Mapping[str, SettledConfig]) -> list[Job]:
        """Return two jobs per cell: as configured, and in the arithmetic that a replay can repeat bit for bit."""
        jobs: list[Job] = []
        for name, settled in configs.items():
            jobs.append(self._run(RunKey("cell", name), settled))
            jobs.append(self._run(RunKey("cell", name, bitwise=True), with_bitwise_arithmetic(settled)))
        return jobs

    def replay_job(self, key: RunKey, settled: SettledConfig, *, apart: bool = False) -> Job:
        """Return a replay that adds in the order `key.kind`, up to `key.step`, or all steps if that is None."""
        steps = key.step or self.steps
        job = Job(key=key, kind="replay", settled=settled, steps=steps, ranks=self.ranks, order=key.kind)
        return replace(job, trace_at=key.step, apart=apart)

    def _run(self, key: RunKey, settled: SettledConfig) -> Job:
        return Job(key=key, kind="run", settled=settled, steps=self.steps)

    @property
    def _total(self) -> int:
        return self.settled.sizes.total

    def _cuts(self) -> list[int]:
        """Return up to two other sizes of a microbatch, smaller ones preferred, because they need no more memory."""
        sizes = self.settled.sizes
        others = [m for m in range(1, sizes.total + 1) if sizes.total % m == 0 and m != sizes.micro]
        smaller, larger = [m for m in others if m < sizes.micro][::-1], [m for m in others if m > sizes.micro]
        return sorted((smaller[:2] + larger)[:2])


def with_bitwise_arithmetic(settled: SettledConfig) -> SettledConfig:
    """Return the config with a for-loop optimizer and an fp64 norm, which do not depend on how tensors are split."""
    clip = settled.config.train.clipping
    loops = {"train.optimizer.fused": False, "train.optimizer.foreach": False}
    return settled.changed({**loops, "train.clip": None if clip is None else Clip(max=clip.max, norm="fp64")})


def with_accumulation(settled: SettledConfig, accumulate: int) -> SettledConfig:
    """Return the config with the same global batch in `accumulate` microbatches on each rank."""
    total = settled.sizes.total
    return _with_micro_size(settled, total, total // (settled.ranks * accumulate))


def _with_micro_size(settled: SettledConfig, total: int, micro: int) -> SettledConfig:
    return settled.changed({"batch.total": total, "batch.micro": micro, "batch.accumulate": None})
