"""`Forecast`: what planning predicted for the strategies of a comparison, as files hold it."""

from __future__ import annotations

from typing import Final, Literal

from pydantic import Field

from unipar.backend import Category
from unipar.config import Section
from unipar.memory.account import PhaseName

MemorySource = Literal["", "batch.memory", "GPU", "machine"]
"""Where the memory of a device is from; machine: all memory of this one, which its ranks share."""

NOT_PLANNED: Final[tuple[Category, ...]] = ("library", "runtime")
"""Categories that no plan has: what libraries and Python hold for themselves."""


class ForecastPhase(Section):
    """Predicted memory of the fullest rank at the fullest moment of one phase, without what no plan has."""

    name: PhaseName
    peak: int
    held: dict[Category, int]
    """Bytes by category; their sum is the peak."""


class ForecastWorld(Section):
    """Predicted peak of a strategy on one number of ranks."""

    ranks: int
    samples: int = 0
    """Samples of a step, of all ranks."""

    micro: int = 0
    """Samples of a microbatch."""

    peak: int | None = None
    """Bytes of the fullest rank, on CUDA with its context and NCCL; None: it cannot be planned or run there."""

    phase: str = ""
    late: int = 0
    """Bytes by which it may be higher for a moment, because gloo frees late what it sent."""

    refusal: str = ""
    """Why there is no peak."""


class StrategyForecast(Section):
    """Predicted memory and bytes sent of one strategy."""

    strategy: str
    refusal: str = ""
    """Why the strategy was not planned; empty if it was."""

    phases: tuple[ForecastPhase, ...] = ()
    """Peak of each phase in the compared world."""

    sent: dict[str, dict[str, int]] = Field(default_factory=dict)
    """Bytes sent in one step in the compared world, by axis of the mesh, then collective."""

    sent_across: int = 0
    """Those of them in groups that have ranks on several machines."""

    worlds: tuple[ForecastWorld, ...] = ()
    """The compared world and others, by ascending number of ranks."""

    ways: tuple[str, ...] = ()
    """Changes with which the strategy would fit in the compared world; empty if it does."""

    @property
    def planned_worlds(self) -> list[ForecastWorld]:
        """Worlds in which it has a peak."""
        return [world for world in self.worlds if world.peak is not None]

    @property
    def peak(self) -> ForecastPhase:
        """The fullest phase of a step in the compared world."""
        return max((phase for phase in self.phases if phase.name != "built"), key=lambda phase: phase.peak)


class Forecast(Section):
    """Predictions for the strategies of a comparison that ran."""

    problem: str = ""
    """Why nothing was planned; empty otherwise."""

    device: Literal["cpu", "cuda"] = "cpu"
    ranks: int = 0
    """Ranks of the compared world."""

    per: int | None = None
    """Ranks of a machine in the compared world; None in files of earlier versions."""

    samples: int = 0
    """Samples of a step in the compared world, or tokens at most."""

    unit: Literal["samples", "tokens"] = "samples"
    """Unit in which the batch is counted."""

    share: int = 0
    """Samples of a step that a rank of the data trains on in the compared world."""

    memory: int | None = None
    """Bytes of the device's memory; None if they are not known."""

    memory_from: MemorySource = ""
    headroom: float = 0.0
    """Share of that memory that is to stay free."""

    strategies: tuple[StrategyForecast, ...] = ()
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    """CPU seconds that planning took, after imports."""

    @property
    def limit(self) -> int | None:
        """Bytes that a rank may use."""
        return None if self.memory is None else int(self.memory * (1.0 - self.headroom))

    def strategy(self, name: str) -> StrategyForecast | None:
        """Return the forecast of the strategy of that name, or None."""
        return next((strategy for strategy in self.strategies if strategy.strategy == name), None)

    def fits(self, world: ForecastWorld) -> bool:
        """Return whether a strategy fits on a number of ranks for which it is planned."""
        assert world.peak is not None
        return self.limit is None or world.peak + world.late <= self.limit
