"""Microbatch that was chosen for `batch.micro: auto`, with its trials; and the sizes among which it is chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from pydantic import TypeAdapter

from unipar.backend import Backend, checks
from unipar.backend.offered_strategies import strategy_of
from unipar.backend.registry import find_backend
from unipar.backend.resources import choose_device
from unipar.config import Config, Strategy
from unipar.config.config_source import ConfigSource
from unipar.config.sections.batch import Batch
from unipar.config.settled import SettledConfig
from unipar.distributed.gpus import smallest_gpu_memory
from unipar.errors import ConfigError, Unsupported
from unipar.run_folder.folder import newest_run_folder
from unipar.run_folder.layout import read_launch_file
from unipar.utils.procfs import memory_limit_bytes
from unipar.utils.text import count_of, format_size

PREFIX = "batch.micro: auto"
"""Beginning of each line and sentence about the choice."""


@dataclass(frozen=True)
class MicroTrial:
    """One trial: some steps of a training with a microbatch of this size."""

    world: str
    """Strategy and number of ranks."""

    micro: int
    fits: bool
    peak: int | None = None
    """Bytes that the fullest rank used; None if it did not fit."""

    why: str = ""
    """Reason why it does not fit."""


@dataclass(frozen=True)
class ChosenMicro:
    """Largest microbatch that fits in a world, or in all of several; kept in launch.json."""

    micro: int
    total: int
    worlds: tuple[str, ...]
    """Strategies, each with its number of ranks."""

    device: str
    limit: int
    """Bytes that a rank may use."""

    planned: Mapping[str, int | None]
    """Size that each world's plan led to expect; None: nothing fits by it. A world that was not planned is left out."""

    trials: tuple[MicroTrial, ...]

    @property
    def says(self) -> str:
        """Sentence that says how the size was found."""
        tried = "; ".join(_describe_trial(trial) for trial in self.trials)
        return f"the largest that fits in {format_size(self.limit)} a rank ({tried})"

    def why_not_kept(self, other: Sequence[str], total: int, device: str, limit: int) -> str:
        """Return what is other than it was when this size was found; "" if nothing is, so that it is kept."""
        if self.worlds != tuple(other):
            return f"it ran as {', '.join(self.worlds)}, and is {', '.join(other)} now"
        if self.total != total:
            return f"batch.total was {self.total}, and is {total} now"
        if (self.device, self.limit) != (device, limit):
            before, now = (
                f"{format_size(size)} on {where}" for size, where in ((self.limit, self.device), (limit, device))
            )
            return f"a rank could use {before}, and can use {now}"
        return ""

    def to_json(self) -> dict[str, Any]:
        """Return the choice as JSON data."""
        return asdict(self)

    @classmethod
    def of_run(cls, run: Path) -> Self | None:
        """Return the choice of the run in this folder, or None if it has none."""
        data: dict[str, Any] | None = read_launch_file(run).get("micro")
        return None if data is None else TypeAdapter(cls).validate_python(data)


def name_of_world(strategy: Strategy, ranks: int) -> str:
    """Return how trials name a world."""
    return f"{strategy} on {count_of(ranks, 'rank')}"


def usable_memory(config: Config, ranks: int) -> int:
    """Return the bytes that a rank may use under `batch.micro: auto`; raise ConfigError if nothing says it."""
    batch, (device, _) = config.batch, choose_device(config)
    if batch.memory is not None:
        return batch.limit_of(batch.memory)
    if device == "cpu":
        each = memory_limit_bytes() // ranks
        raise ConfigError(
            f"{PREFIX} needs batch.memory on the CPU, the bytes that a rank may use: this machine has "
            f"{format_size(memory_limit_bytes())} for {count_of(ranks, 'rank')} and all else, so say for example "
            f"batch: {{micro: auto, memory: {max(1, int(each * 0.75) >> 20)}MiB}}"
        )
    try:
        return batch.limit_of(smallest_gpu_memory() // (ranks if ":" in device else 1))
    except OSError as e:
        raise ConfigError(f"{PREFIX}: {e}; say it in batch.memory, such as 80GiB") from None


def list_candidates(config: Config, backend: Backend, strategy: Strategy, data: int) -> list[int]:
    """Return the sizes that a microbatch may have, ascending: divisors of a rank's share that the strategy can run.

    Raise an error if there are none; the batch of `config` has a total.
    """
    total = config.batch.total
    assert total is not None
    micros = Batch(total=total, accumulate=1).settle(data).possible_micros
    possible = [n for n in micros if not list(checks.list_refusals(backend, with_micro(config, n), strategy))]
    if not possible:
        raise Unsupported(str(strategy), list(checks.list_refusals(backend, with_micro(config, micros[0]), strategy)))
    return possible


def with_micro(config: Config, micro: int) -> Config:
    """Return the config with a microbatch of this size."""
    return config.changed({"batch.micro": micro})


@dataclass(frozen=True)
class CandidateWorld:
    """World in which a microbatch is sought."""

    settled: SettledConfig
    """Config with the smallest candidate as a stand-in."""

    backend: Backend
    candidates: Sequence[int]

    @property
    def name(self) -> str:
        """Name in lines and in the run log."""
        return name_of_world(self.settled.strategy, self.settled.ranks)

    def at(self, micro: int) -> SettledConfig:
        """Return the config with a microbatch of this size."""
        return self.settled.changed({"batch.micro": micro})


def common_candidates(worlds: Sequence[CandidateWorld]) -> list[int]:
    """Return the sizes that are possible in all worlds; raise ConfigError if there are none."""
    first, *others = (set(world.candidates) for world in worlds)
    if not (common := sorted(first.intersection(*others))):
        each = "; ".join(f"{w.name}: {', '.join(map(str, w.candidates))}" for w in worlds)
        raise ConfigError(f"{PREFIX}: no size of a microbatch is possible in all of them ({each}): leave some out")
    return common


def _describe_trial(trial: MicroTrial) -> str:
    used = f" in {format_size(trial.peak)}" if trial.peak is not None else ""
    return f"{trial.world}: {trial.micro} {'fits' + used if trial.fits else 'does not fit: ' + trial.why}"


def explain_auto(source: ConfigSource, ranks: int) -> tuple[Config, dict[str, tuple[int | str, str]]]:
    """Return the config with a number for `batch.micro: auto`, if it says so, and values with their reasons by key.

    The number is that of the newest run, or the smallest that is possible, where no trial has been made.
    """
    config, origin = source.config, source.origins.get("batch.micro", "default")
    if not config.batch.is_auto:
        return config, {}
    backend, strategy = find_backend(config.backend), strategy_of(config)
    sizes = list_candidates(config, backend, strategy, ranks // strategy.axes.ranks)
    run = newest_run_folder(source.out, alone=config.out is not None)
    chosen = ChosenMicro.of_run(run) if run is not None else None
    if chosen is not None and chosen.micro in sizes:
        why = f"{origin}; auto: found for {run}, {chosen.says}"
        return with_micro(config, chosen.micro), {"batch.micro": (chosen.micro, why)}
    among = f"{origin}; one of {', '.join(map(str, sizes))}, found by trial when the run starts"
    follows = "derived: total / (micro x data), when micro is found"
    return with_micro(config, sizes[0]), {"batch.micro": ("auto", among), "batch.accumulate": ("auto", follows)}
