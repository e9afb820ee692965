"""`PlannedStrategy`, `PlannedStrategies`: numbers of a plan, row by row, and the limit that they are held against."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from unipar.model.state_names import CheckpointBytes
from unipar.planning.peaks import OffloadedBytes, PredictedPeak
from unipar.planning.speed import StepSpeed
from unipar.prediction.timeline import CommVolume, MemoryPlace

UNEVEN: Final = "activations do not grow evenly with the microbatch: other sizes are estimates"
"""Note of a plan whose figures for other microbatches than the configured one are extrapolated."""


@dataclass(frozen=True)
class PlannedStrategy:
    """One strategy on one number of ranks."""

    strategy: str
    ranks: int
    micro: int = 0
    """Samples, or padded tokens, of a microbatch, as configured."""

    phases: tuple[PredictedPeak, ...] = ()
    """Peak of each phase; empty if the strategy is refused."""

    largest: int | None = None
    """The most samples of a microbatch that fit, with the total batch kept; None: none fits, or no limit is given."""

    refusal: str = ""
    """Why it cannot be planned or run; empty otherwise."""

    library_name: str = ""
    """The library's own name of the strategy."""

    late: int = 0
    """Bytes by which the peak may be higher for a moment, because collectives free their copies late."""

    sent: tuple[CommVolume, ...] = ()
    """Bytes that a rank sends in a step."""

    speed: StepSpeed | None = None
    """Seconds of a step; None without a machine."""

    largest_peak: int | None = None
    """Bytes with the largest microbatch that fits."""

    largest_speed: StepSpeed | None = None
    """Seconds of a step with it."""

    least: int | None = None
    """Smaller peak of those of two microbatches, one sample and a rank's whole share, if no microbatch fits."""

    ways: tuple[str, ...] = ()
    """Changes with which it would fit; empty if it does."""

    offloaded: tuple[OffloadedBytes, ...] = ()
    """Bytes of a rank on the host and on the disk."""

    recomputed: str = ""
    """Blocks that `model.recompute: {fit: ...}` chooses, in a sentence; empty without it."""

    simplicity: tuple[int, ...] = ()
    """Place in the order of simplicity: smaller is simpler."""

    @property
    def peak(self) -> PredictedPeak:
        """The fullest phase."""
        return max(self.phases, key=lambda phase: phase.peak)

    @property
    def needed(self) -> int:
        """Bytes in which it fits whenever collectives free their copies."""
        return self.peak.peak + self.late

    @property
    def sent_bytes(self) -> int:
        """Bytes that a rank sends in a step."""
        return sum(volume.size for volume in self.sent)

    @property
    def sent_across(self) -> int:
        """Bytes of them in groups that have ranks on several machines."""
        return sum(volume.across for volume in self.sent)

    def offloaded_to(self, place: MemoryPlace) -> int:
        """Return the bytes that a rank keeps in a place other than its device."""
        return sum(outside.size for outside in self.offloaded if outside.place == place)

    def fits(self, limit: int | None) -> bool:
        """Return whether it fits as configured."""
        return limit is None or self.needed <= limit

    def fitting_micro(self, limit: int | None) -> int:
        """Return the configured microbatch if it fits, otherwise the largest that does."""
        return self.micro if self.fits(limit) else self.largest or 0

    def peak_of_fitting(self, limit: int | None) -> int:
        """Return the peak with that microbatch."""
        return self.peak.peak if self.fits(limit) else self.largest_peak or 0

    def speed_of_fitting(self, limit: int | None) -> StepSpeed | None:
        """Return the speed with that microbatch."""
        return self.speed if self.fits(limit) else self.largest_speed


@dataclass(frozen=True)
class PlannedStrategies:
    """Predicted memory and speed of strategies, and the limit that they are held against."""

    rows: tuple[PlannedStrategy, ...]
    memory: int | None
    """Bytes of memory that a rank has; None: not given."""

    headroom: float
    """Share of it that is to stay free."""

    device: str
    parameters: int
    seconds: float
    """CPU seconds that planning took, after imports."""

    notes: tuple[str, ...] = ()
    machine: str = ""
    """Name of the machine; empty if none is given."""

    units: str = "samples"
    """Unit of the rate: samples, tokens, or units of the task's weight."""

    counted: str = "samples"
    """Unit of a microbatch: samples or tokens."""

    checkpoint: CheckpointBytes | None = None
    """Bytes of tensors in checkpoints."""

    allocated: int = 0
    """Bytes of parameters with values that model() needed to be created; 0: none."""

    blocks: tuple[str, ...] = ()
    """Names of the model's blocks."""

    exclude: tuple[str, ...] = ()
    """Strategies that the user does not want."""

    @property
    def limit(self) -> int | None:
        """Bytes that a rank may use."""
        return usable_bytes(self.memory, self.headroom)


def usable_bytes(memory: int | None, headroom: float) -> int | None:
    """Return the bytes that a rank may use of its memory."""
    return None if memory is None else int(memory * (1.0 - headroom))
