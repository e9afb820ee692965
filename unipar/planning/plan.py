"""`Plan`: predicted memory of cells on numbers of ranks, as a table and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Final

from unipar.backend import Category
from unipar.planning.peaks import PredictedPeak
from unipar.utils.table import format_table
from unipar.utils.text import format_size

_COLUMNS: Final[dict[str, tuple[Category, ...]]] = {
    "param": ("parameters", "masters", "buffers"),
    "grad": ("gradients",),
    "optim": ("optimizer",),
    "comm": ("communication",),
    "activ": ("activations",),
    "temp": ("temporaries",),
}
"""Categories in each column of the table."""

_TERMS_SHOWN = 5


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

    @property
    def peak(self) -> PredictedPeak:
        """The fullest phase."""
        return max(self.phases, key=lambda phase: phase.peak)


@dataclass(frozen=True)
class Plan:
    """Predicted memory of cells, and the limit that it is held against."""

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

    @property
    def limit(self) -> int | None:
        """Bytes that a rank may use."""
        return None if self.memory is None else int(self.memory * (1.0 - self.headroom))

    def table(self, width: int) -> str:
        """Return the plan as text."""
        verdict = ("fits", "largest micro") if self.memory is not None else ()
        header = ("cell", "ranks", "micro", "peak", "in", *_COLUMNS, *verdict)
        rows = [self._row(row) for row in self.rows]
        right = (1, 2, 3, *range(5, 5 + len(_COLUMNS)), *range(6 + len(_COLUMNS), len(header)))
        return "\n".join([format_table(header, rows, right=right, width=width), "", *self._remarks()])

    def _row(self, row: PlannedCell) -> Sequence[str]:
        if row.refusal:
            return row.cell, str(row.ranks), row.refusal
        peak = row.peak
        sums = (sum(peak.held.get(category, 0) for category in categories) for categories in _COLUMNS.values())
        shown = [format_size(size) if size else "-" for size in sums]
        fits = () if self.limit is None else ("yes" if peak.peak <= self.limit else "no", str(row.largest or "-"))
        return row.cell, str(row.ranks), str(row.micro), format_size(peak.peak), peak.phase, *shown, *fits

    def _remarks(self) -> Iterator[str]:
        yield f"{self.parameters:,} parameters; planned in {self.seconds:.1f} s of CPU, without allocating them"
        yield (
            "peak: tensors of the fullest rank at the fullest moment of a step; not in it: what libraries and Python "
            "hold for themselves" + (", CUDA's context, NCCL, gaps" if self.device != "cpu" else "")
        )
        if self.memory is not None:
            yield (
                f"fits: at most {format_size(self.memory)} less {self.headroom:.0%}; largest micro: the most samples a "
                "microbatch that do, with the total batch kept"
            )
        yield from self.notes

    def as_json(self) -> str:
        """Return the plan as JSON, each peak with its largest terms."""
        rows = [
            {
                "cell": row.cell,
                "ranks": row.ranks,
                "refusal": row.refusal,
                "micro": row.micro,
                "largest_micro": row.largest,
                "phases": [
                    {
                        "phase": phase.phase,
                        "peak": phase.peak,
                        "held": phase.held,
                        "largest": [asdict(term) for term in phase.terms[:_TERMS_SHOWN]],
                    }
                    for phase in row.phases
                ],
            }
            for row in self.rows
        ]
        named = {"parameters": self.parameters, "device": self.device, "memory": self.memory, "headroom": self.headroom}
        return json.dumps({**named, "notes": self.notes, "rows": rows}, indent=1)
