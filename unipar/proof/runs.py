"""Which runs a proof needs: one process in several ways, then every cell in two."""

from __future__ import annotations

from dataclasses import dataclass, replace

from unipar import registry
from unipar.config import Config, Precision
from unipar.proof.jobs import Job, RunKey
from unipar.training import Clip

LOOK, EXACT, BASE = RunKey("look"), RunKey("one process", precision="fp64"), RunKey("one process")
SHARES, MICROS = RunKey("shares", bitwise=True), RunKey("micros", bitwise=True)

SHARES_CONFIGURED, MICROS_CONFIGURED, SHARES_EXACT = (
    RunKey("shares"),
    RunKey("micros"),
    RunKey("shares", precision="fp64"),
)
"""Replays for a task whose numbers depend on how a batch is cut."""


@dataclass(frozen=True)
class Runs:
    """What is run of a config whose number of ranks is settled."""

    config: Config
    steps: int

    @property
    def ranks(self) -> int:
        assert isinstance(self.config.parallel.data, int)
        return self.config.parallel.data

    @property
    def precision(self) -> Precision:
        """Of one process: it keeps no second copy, so bf16-master has its stand-in."""
        wanted = self.config.train.precision
        return "bf16-mixed" if wanted == "bf16-master" else wanted

    @property
    def accumulate(self) -> int:
        return self.config.batch.settle(self.ranks).accumulate

    def one(self, precision: Precision | None = None) -> Config:
        """One process without a wrapper, through the same microbatches one after another."""
        return in_precision(registry.at(self.config, registry.ONE), precision or self.precision)

    def references(self) -> list[list[Job]]:
        """Two worlds of one process, side by side."""
        one, exactly = self.one(), bitwise(self.one())
        others = [self._run(RunKey("one process", micro=m), _cut(one, self._total, m)) for m in self._cuts()]
        return [
            [
                Job(key=LOOK, kind="look", config=self.one("fp64").written(), steps=0),
                self._run(EXACT, self.one("fp64")),
                self.replay(MICROS, exactly),
            ],
            [self._run(BASE, one), *others, self.replay(SHARES, exactly)],
        ]

    def cut_alike(self) -> list[list[Job]]:
        """More replays, for a task whose numbers depend on how a batch is cut: nothing else is cut alike."""
        return [
            [self.replay(SHARES_CONFIGURED, self.one())],
            [self.replay(MICROS_CONFIGURED, self.one()), self.replay(SHARES_EXACT, self.one("fp64"))],
        ]

    def cells(self, configs: dict[str, Config]) -> list[Job]:
        """Each as it is configured, and once more by the arithmetic that a replay can repeat to the bit."""
        jobs: list[Job] = []
        for name, config in configs.items():
            jobs.append(self._run(RunKey("cell", name), config))
            jobs.append(self._run(RunKey("cell", name, bitwise=True), bitwise(config)))
        return jobs

    def replay(self, key: RunKey, config: Config, *, apart: bool = False) -> Job:
        """Return a replay in the order that `key` says, up to the step that it says; all steps without one."""
        steps = key.step or self.steps
        made = Job(key=key, kind="replay", config=config.written(), steps=steps, ranks=self.ranks, order=key.kind)
        return replace(made, trace_at=key.step, apart=apart)

    def _run(self, key: RunKey, config: Config) -> Job:
        return Job(key=key, kind="run", config=config.written(), steps=self.steps)

    @property
    def _total(self) -> int:
        return self.config.batch.settle(self.ranks).total

    def _cuts(self) -> list[int]:
        """Other microbatches than the config's: smaller ones first, for they need no more memory."""
        sizes = self.config.batch.settle(self.ranks)
        others = [m for m in range(1, sizes.total + 1) if sizes.total % m == 0 and m != sizes.micro]
        smaller, larger = [m for m in others if m < sizes.micro][::-1], [m for m in others if m > sizes.micro]
        return sorted((smaller[:2] + larger)[:2])


def bitwise(config: Config) -> Config:
    """The optimizer by for-loop, the norm summed in fp64: what does not depend on how tensors are split."""
    train, clip = config.train, config.train.clipping
    optimizer = train.optimizer.model_copy(update={"fused": False, "foreach": False})
    changed = {"optimizer": optimizer, "clip": None if clip is None else Clip(max=clip.max, norm="fp64")}
    return config.model_copy(update={"train": train.model_copy(update=changed)})


def in_precision(config: Config, precision: Precision) -> Config:
    return config.model_copy(update={"train": config.train.model_copy(update={"precision": precision})})


def recut(config: Config, ranks: int, accumulate: int) -> Config:
    """The same global batch in so many microbatches on each rank."""
    total = config.batch.settle(ranks).total
    return _cut(config, total, total // (ranks * accumulate))


def _cut(config: Config, total: int, micro: int) -> Config:
    batch = config.batch.model_copy(update={"total": total, "micro": micro, "accumulate": None})
    return config.model_copy(update={"batch": batch})
