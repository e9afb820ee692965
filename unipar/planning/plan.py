"""`Plan`: predicted memory and speed of cells on numbers of ranks, with a recommendation; as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from unipar.backend.prediction.timeline import Payload
from unipar.planning.peaks import PredictedPeak
from unipar.planning.speed import StepSpeed

if TYPE_CHECKING:
    from unipar.planning.recommendation import Recommendation

_TERMS_IN_JSON = 5


@dataclass(frozen=True)
class PlannedCell:
    """One cell on one number of ranks."""

    cell: str
    ranks: int
    micro: int = 0
    """Samples of a microbatch, as configured."""

    phases: tuple[PredictedPeak, ...] = ()
    """Peak of each phase; empty if the cell is refused."""

    largest: int | None = None
    """The most samples of a microbatch that fit, with the total batch kept; None: none fits, or no limit is given."""

    refusal: str = ""
    """Why it cannot be planned or run; empty otherwise."""

    sent: tuple[Payload, ...] = ()
    """What a rank sends in a step."""

    speed: StepSpeed | None = None
    """Seconds of a step; None without a machine."""

    largest_peak: int | None = None
    """Bytes with the largest microbatch that fits."""

    largest_speed: StepSpeed | None = None
    """Seconds of a step with it."""

    least: int | None = None
    """Bytes with microbatches of one sample, if nothing fits."""

    ways: tuple[str, ...] = ()
    """What would have to change for it to fit; empty if it does."""

    simplicity: tuple[int, ...] = ()
    """Place in the order of simplicity: smaller is simpler."""

    @property
    def peak(self) -> PredictedPeak:
        """The fullest phase."""
        return max(self.phases, key=lambda phase: phase.peak)

    @property
    def sent_bytes(self) -> int:
        """Bytes that a rank sends in a step."""
        return sum(payload.size for payload in self.sent)

    def fits(self, limit: int | None) -> bool:
        """Return whether it fits as configured."""
        return limit is None or self.peak.peak <= limit

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
class Plan:
    """Predicted memory and speed of cells, and the limit that they are held against."""

    rows: tuple[PlannedCell, ...]
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
    """What the rate counts: samples, or units of the task's weight."""

    checkpoint: int | None = None
    """Bytes of tensors in one checkpoint."""

    blocks: tuple[str, ...] = ()
    """Names of the model's blocks."""

    exclude: tuple[str, ...] = ()
    """Cells that the user does not want."""

    @property
    def limit(self) -> int | None:
        """Bytes that a rank may use."""
        return usable_bytes(self.memory, self.headroom)

    @property
    def recommendations(self) -> list[Recommendation]:
        """The cell to take on each number of ranks."""
        from unipar.planning.recommendation import recommend

        return recommend(self.rows, self.limit, exclude=self.exclude)

    def table(self, width: int) -> str:
        """Return the plan as text."""
        from unipar.planning.plan_table import format_plan

        return format_plan(self, width)

    def why(self, cell: str, ranks: int | None = None, *, every: bool = False) -> str:
        """Return the terms of a cell's peak as text; all of them if `every`."""
        from unipar.planning.explanation import explain_row

        return explain_row(self, cell, ranks, every=every)

    def as_json(self) -> str:
        """Return the plan as JSON, each peak with its largest terms."""
        named = {
            "parameters": self.parameters,
            "device": self.device,
            "machine": self.machine or None,
            "memory": self.memory,
            "headroom": self.headroom,
            "checkpoint": self.checkpoint,
            "units": self.units,
        }
        chosen = [
            {
                "ranks": each.ranks,
                "cell": None if each.row is None else each.row.cell,
                "micro": each.micro or None,
                "why": each.why,
            }
            for each in self.recommendations
        ]
        rows = [_row_as_json(row) for row in self.rows]
        return json.dumps({**named, "notes": self.notes, "recommended": chosen, "rows": rows}, indent=1)


def usable_bytes(memory: int | None, headroom: float) -> int | None:
    """Return the bytes that a rank may use of its memory."""
    return None if memory is None else int(memory * (1.0 - headroom))


def _row_as_json(row: PlannedCell) -> dict[str, Any]:
    return {
        "cell": row.cell,
        "ranks": row.ranks,
        "refusal": row.refusal,
        "micro": row.micro,
        "largest_micro": row.largest,
        "to_fit": row.ways,
        "sent": [asdict(payload) for payload in row.sent],
        "speed": None if row.speed is None else _speed_as_json(row.speed),
        "phases": [_phase_as_json(phase) for phase in row.phases],
    }


def _speed_as_json(speed: StepSpeed) -> dict[str, float]:
    return {**asdict(speed), "seconds": speed.seconds, "rate": speed.rate}


def _phase_as_json(phase: PredictedPeak) -> dict[str, Any]:
    largest: Sequence[Any] = phase.terms[:_TERMS_IN_JSON]
    return {
        "phase": phase.phase,
        "peak": phase.peak,
        "held": phase.held,
        "largest": [asdict(term) for term in largest],
    }
