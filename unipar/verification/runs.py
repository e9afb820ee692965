"""Runs that a verification needs: one process in several ways, then every strategy in two."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from unipar.backend.offered_strategies import ONE, config_in_strategy
from unipar.config import Config, Precision
from unipar.config.sections.optimizer import Clip
from unipar.config.sections.strategy import Axes
from unipar.config.settled import SettledConfig
from unipar.utils.address import Location
from unipar.verification.numbers import REPEATS, DeviceNumbers
from unipar.verification.worker.jobs import Job, RunKey

TASK_PROBE_NAME, FP64_RUN_NAME, FP32_RUN_NAME, BASE_RUN_NAME = (
    RunKey("probe"),
    RunKey("one process", precision="fp64"),
    RunKey("one process", precision="fp32"),
    RunKey("one process"),
)
"""Runs of one process: the probe of the task, a run in fp64 (or fp32), and that which strategies are compared with."""


IN_PARTS = 5
"""Replays that add up matrix products in parts, for each axis along which ranks do so.

With the run that strategies are compared with there are six that round each sample in another way. If all draw from one
normal distribution, a seventh is off from that run by more than four times their spread in 1 of 4,300 cases; with one
replay it would be in 1 of 7.
"""


@dataclass(frozen=True)
class ReplayKeys:
    """Keys of the replays that split a batch into as many shares as some strategies do."""

    shares: int | None = None
    """Number of shares; None: the largest number of any strategy."""

    @property
    def bitwise_shares(self) -> RunKey:
        """Key of the replay in bitwise arithmetic, share by share, which strategies may equal bit for bit."""
        return RunKey("shares", bitwise=True, shares=self.shares)

    @property
    def bitwise_micros(self) -> RunKey:
        """Key of the replay in bitwise arithmetic, microbatch by microbatch."""
        return RunKey("micros", bitwise=True, shares=self.shares)

    @property
    def configured_shares(self) -> RunKey:
        """Key of the replay as configured, share by share, for a task whose numbers depend on how a batch is split."""
        return RunKey("shares", shares=self.shares)

    @property
    def configured_micros(self) -> RunKey:
        """Key of the replay as configured, microbatch by microbatch, for such a task."""
        return RunKey("micros", shares=self.shares)

    @property
    def perturbed(self) -> RunKey:
        """Key of the replay from weights that differ in the last place, for a model that cannot run in fp64."""
        return RunKey("shares", perturbed=True, shares=self.shares)

    def exact(self, precision: Precision | None) -> RunKey:
        """Key of the replay as configured, share by share, in another precision."""
        return RunKey("shares", precision=precision, shares=self.shares)

    def in_parts(self, axes: Axes) -> list[RunKey]:
        """Return the keys of the replays that add up parts of matrix products, as the ranks of these axes do.

        However a batch is cut, each sample is rounded alike, so no other run shows by how much that rounding moves the
        numbers. One replay has as many parts as there are ranks, the others have more.
        """
        more = range(IN_PARTS)
        keys = [RunKey("shares", shares=self.shares, tensor=axes.tensor + n) for n in more] if axes.tensor > 1 else []
        if axes.context > 1:
            keys += [RunKey("shares", shares=self.shares, context=axes.context + n) for n in more]
        return keys


@dataclass(frozen=True)
class RunPlan:
    """Jobs of a verification, for a config whose number of ranks is settled."""

    settled: SettledConfig
    steps: int
    strategies: Mapping[str, SettledConfig]
    """Config of each strategy, by name."""

    halfway: int | None = None
    """Step after which strategies go on from a state that was saved; None: each strategy runs by itself."""

    checkpoint: Location | None = None
    """Checkpoint from which they go on; None: one strategy makes it."""

    numbers: DeviceNumbers | None = None
    """Settings that decide the last digits on the device; None on the CPU."""

    fp64: bool = True
    """Whether the model can run in fp64; if not, what fp64 runs would show is taken from runs in fp32."""

    @property
    def config(self) -> Config:
        """Config of the strategies."""
        return self.settled.config

    @property
    def share_counts(self) -> list[int]:
        """Numbers of shares into which strategies split a batch, largest first: ranks along other axes share one."""
        return sorted({settled.sizes.ranks for settled in self.strategies.values()}, reverse=True)

    def replays(self, shares: int) -> ReplayKeys:
        """Return the keys of the replays with this many shares."""
        return ReplayKeys(None if shares == self.share_counts[0] else shares)

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

    def exact_shares(self, shares: int) -> RunKey:
        """Return the key of the replay, share by share, in the finest precision."""
        same = not self.fp64 and self.precision == "fp32"
        return self.replays(shares).exact(None if same else self.exact_precision)

    @property
    def fixed_micro(self) -> int | None:
        """Size of a microbatch in any number of ranks; None if it or the global batch follows from that number."""
        batch = self.config.batch
        return batch.micro if batch.total is not None and isinstance(batch.micro, int) else None

    def one_process_config(self, precision: Precision | None = None) -> SettledConfig:
        """Return the config of one process without a wrapper, which takes the same microbatches one after another."""
        config = config_in_strategy(self.config, ONE).changed({"train.precision": precision or self.precision})
        return SettledConfig.of(config, ONE, 1, self.settled.device)

    def kernel_search(self) -> Job:
        """Return the job that finds operations without a deterministic kernel on the device."""
        job = self._run(RunKey("kernels"), self.one_process_config())
        return replace(job, kind="kernels", steps=min(2, self.steps))

    @property
    def repeats(self) -> list[RunKey]:
        """Keys of repeats of the run of one process: only where they need not give the same bits."""
        if self.numbers is None or self.numbers.repeats_bits:
            return []
        return [RunKey("one process", repeat=n + 1) for n in range(REPEATS)]

    def reference_jobs(self) -> list[list[Job]]:
        """Return the jobs of the references, as two lists that can run side by side."""
        one, exactly = self.one_process_config(), with_bitwise_arithmetic(self.one_process_config())
        others = [
            replace(self._run(RunKey("one process", micro=m), _with_micro_size(one, self._total, m)), may_fail=True)
            for m in self._cuts()
        ]
        by_shares, by_micros, in_parts = list[Job](), list[Job](), dict[RunKey, Job]()
        for shares in self.share_counts:
            keys = self.replays(shares)
            by_shares.append(self.replay_job(keys.bitwise_shares, exactly))
            if shares > 1:  # both orders are the same for one share
                by_micros.append(self.replay_job(keys.bitwise_micros, exactly))
        for settled in self.strategies.values():
            for key in self.replays(settled.sizes.ranks).in_parts(settled.strategy.axes):
                in_parts[key] = self.replay_job(key, one)
        return [
            [
                Job(key=TASK_PROBE_NAME, kind="probe", settled=self.one_process_config("fp64"), steps=0),
                replace(self._run(FP64_RUN_NAME, self.one_process_config("fp64")), may_fail=True),
                *by_micros,
            ],
            [
                *(self._run(key, one) for key in (BASE_RUN_NAME, *self.repeats)),
                *others,
                *by_shares,
                *in_parts.values(),
            ],
        ]

    def further_reference_jobs(self, *, cut_matters: bool) -> list[list[Job]]:
        """Return further jobs of one process, as two lists that can run side by side.

        If the task's numbers depend on how a batch is split: replays that split it as strategies do. If the model
        cannot run in fp64: a replay from perturbed weights, and an fp32 run if the config's precision is a coarser one.
        """
        as_configured, exactly = self.one_process_config(), self.one_process_config(self.exact_precision)
        first: list[Job] = []
        second: list[Job] = []
        if not self.fp64 and self.exact_run != BASE_RUN_NAME:
            second.append(self._run(self.exact_run, exactly))
        for shares in self.share_counts:
            keys = self.replays(shares)
            if cut_matters:
                first.append(self.replay_job(keys.configured_shares, as_configured))
                if shares > 1:
                    second.append(self.replay_job(keys.configured_micros, as_configured))
            if not self.fp64:
                first.append(self.replay_job(keys.perturbed, as_configured))
            if cut_matters and (key := self.exact_shares(shares)) != keys.configured_shares:
                second.append(self.replay_job(key, exactly))
        return [first, second]

    def step_replay_keys(self, shares: int, step: int) -> tuple[RunKey, RunKey]:
        """Return the keys of two replays up to a step: in the run's precision, and one that shows rounding.

        The latter is in fp64, or else from perturbed weights.
        """
        number = self.replays(shares).shares
        exact = RunKey("shares", step=step, precision=self.exact_precision, perturbed=not self.fp64, shares=number)
        return RunKey("shares", step=step, shares=number), exact

    def strategy_jobs(self) -> list[Job]:
        """Return two jobs per strategy: as configured, and in the arithmetic that a replay can repeat bit for bit.

        The latter is left out where no run repeats another bit for bit.
        """
        repeats_bits = self.numbers is None or self.numbers.repeats_bits
        jobs: list[Job] = []
        for name, settled in self.strategies.items():
            jobs.append(self._run(RunKey("strategy", name), settled))
            if repeats_bits:
                jobs.append(self._run(RunKey("strategy", name, bitwise=True), with_bitwise_arithmetic(settled)))
        return jobs

    def choices_key(self, shares: int) -> RunKey:
        """Return the key of the replay, as configured, that records which experts routers choose."""
        return replace(self.replays(shares).configured_shares, choices=True)

    def following_job(self, name: str, choices: Path) -> Job:
        """Return the job of a strategy that takes choices from this file where those of its routers are near-ties."""
        return replace(self._run(RunKey("strategy", name, choices=True), self.strategies[name]), follows=str(choices))

    @property
    def saver(self) -> str:
        """Name of the strategy that saves: the config's own, if it is among those that run."""
        own = str(self.settled.strategy)
        return own if own in self.strategies else next(iter(self.strategies))

    def saving_job(self, folder: Path) -> Job:
        """Return the job that runs the first half in one strategy and saves its state."""
        assert self.halfway is not None
        key = RunKey("strategy", self.saver, half="first")
        return replace(self._run(key, self.strategies[self.saver]), steps=self.halfway, saves_in=str(folder))

    def resuming_jobs(self, checkpoint: Location) -> list[Job]:
        """Return a job for each strategy that goes on from the state that was saved."""
        return [
            replace(self._run(RunKey("strategy", name, half="second"), settled), resumes=str(checkpoint))
            for name, settled in self.strategies.items()
        ]

    def dropout_jobs(self, strategies: Sequence[str]) -> tuple[list[Job], list[Job]]:
        """Return the jobs that run strategies with dropout: the replays, and the strategies."""
        one, exactly = self.one_process_config(), self.one_process_config(self.exact_precision)
        keys = {key: None for name in strategies for key in self.dropout_replays(self.strategies[name])}
        replays = [self.replay_job(key, exactly if key.precision else one) for key in keys]
        return replays, [
            self._run(RunKey("strategy", name, dropout=True), self.strategies[name]) for name in strategies
        ]

    def dropout_replays(self, strategy: SettledConfig) -> list[RunKey]:
        """Return the keys of the replays with dropout: as configured, in the finest precision, and in parts."""
        shares = strategy.sizes.ranks
        keys = self.replays(shares)
        every = [keys.configured_shares, self.exact_shares(shares), *keys.in_parts(strategy.strategy.axes)]
        return list(dict.fromkeys(replace(key, dropout=True) for key in every))

    def replay_job(self, key: RunKey, settled: SettledConfig, *, per_microbatch: bool = False) -> Job:
        """Return a replay that adds in the order `key.kind`, up to `key.step`, or all steps if that is None."""
        steps = key.step or self.steps
        shares = key.shares or self.share_counts[0]
        job = Job(key=key, kind="replay", settled=settled, steps=steps, shares=shares, order=key.kind)
        return replace(job, trace_at=key.step, per_microbatch=per_microbatch)

    def _run(self, key: RunKey, settled: SettledConfig) -> Job:
        return Job(key=key, kind="run", settled=settled, steps=self.steps)

    @property
    def _total(self) -> int:
        return self.settled.sizes.total

    def _cuts(self) -> list[int]:
        """Return up to two other sizes of a microbatch, smaller ones preferred, because they need no more memory."""
        sizes = self.settled.sizes
        if (limits := sizes.tokens) is not None:
            if limits.micro is None:
                return [sizes.total, 2 * sizes.total]
            half = limits.micro // 2
            return [half] * (limits.max_length is not None and half >= limits.max_length) + [2 * limits.micro]
        others = [m for m in range(1, sizes.total + 1) if sizes.total % m == 0 and m != sizes.micro]
        smaller, larger = [m for m in others if m < sizes.micro][::-1], [m for m in others if m > sizes.micro]
        return sorted((smaller[:2] + larger)[:2])


def with_bitwise_arithmetic(settled: SettledConfig) -> SettledConfig:
    """Return the config with a for-loop optimizer and an fp64 norm, which do not depend on how tensors are split."""
    clip = settled.config.train.clipping
    keys = type(settled.config.train.optimizer).model_fields.keys() & {"fused", "foreach"}
    loops = {f"train.optimizer.{key}": False for key in sorted(keys)}
    return settled.changed({**loops, "train.clip": None if clip is None else Clip(max=clip.max, norm="fp64")})


def with_accumulation(settled: SettledConfig, accumulate: int) -> SettledConfig:
    """Return the config with the same global batch in `accumulate` microbatches of each share."""
    sizes = settled.sizes
    if sizes.tokens is not None:
        return settled.changed({"batch.micro": None, "batch.accumulate": accumulate})
    return _with_micro_size(settled, sizes.total, sizes.total // (sizes.ranks * accumulate))


def _with_micro_size(settled: SettledConfig, total: int, micro: int) -> SettledConfig:
    size = {"batch.total": total} if settled.sizes.tokens is None else {}
    return settled.changed({**size, "batch.micro": micro, "batch.accumulate": None})
