"""`RankWork`: what one rank recorded of the work in its steps, as files hold it."""

from __future__ import annotations

from pydantic import Field

from unipar.config import Section


class CompiledWork(Section):
    """Compiled graphs of a process, since its training began."""

    graphs: int
    breaks: dict[str, int] = Field(default_factory=dict)
    """Number of graph breaks by reason."""

    recompiles: dict[str, int] = Field(default_factory=dict)
    """Number of recompiles by reason."""

    @property
    def break_count(self) -> int:
        """Number of graph breaks."""
        return sum(self.breaks.values())

    @property
    def recompile_count(self) -> int:
        """Number of recompiles."""
        return sum(self.recompiles.values())


class RankWork(Section):
    """Work in the steps of one rank."""

    flops: float | None = None
    """Operations of forward and backward in one step, for the whole global batch; None if they were not counted."""

    flops_by: str = ""
    """Description of how they were counted."""

    weights: tuple[float, ...] = ()
    """Units of the task's weight in the global batch of each step; empty if the task has no weight."""

    waits: tuple[tuple[float, float], ...] = ()
    """Seconds of waiting for communication, and of the whole step, in each step in which they were measured."""

    waits_by: str = ""
    """Description of how waiting was measured."""

    device: str = ""
    """Name of the GPU; empty on the CPU."""

    device_id: str = ""
    """Identifier of the GPU: several ranks may share one."""

    compiled: CompiledWork | None = None
    """None if nothing is compiled."""

    notes: tuple[str, ...] = ()
    """Sentences on what could not be measured, and why."""

    @property
    def waiting(self) -> float | None:
        """Share of a step, from 0 to 1, in which this rank waits for communication: of the measured steps together."""
        seconds = sum(duration for _, duration in self.waits)
        return sum(waiting for waiting, _ in self.waits) / seconds if seconds else None
