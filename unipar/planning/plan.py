"""`Plan`: predicted memory and speed of strategies by number of ranks, with a recommendation; a table and JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, final

from unipar.planning.explanation import explain_row
from unipar.planning.peaks import OffloadedBytes, PredictedPeak
from unipar.planning.plan_screen import format_plan_screen
from unipar.planning.plan_table import format_plan
from unipar.planning.planned_strategy import PlannedStrategies, PlannedStrategy
from unipar.planning.recommendation import Recommendation, recommend

_TERMS_IN_JSON = 5


@final
class Plan(PlannedStrategies):
    """Predicted memory and speed of strategies, with a recommendation for each number of ranks."""

    @property
    def recommendations(self) -> list[Recommendation]:
        """The strategy to take on each number of ranks."""
        return recommend(self.rows, self.limit, exclude=self.exclude)

    def screen(self, width: int = 80, next_steps: Sequence[str] = ()) -> str:
        """Return what to take, the table and the next steps, in one screen."""
        return format_plan_screen(self, width, next_steps)

    def table(self, width: int) -> str:
        """Return all of the plan as text: what `--details` prints."""
        return format_plan(self, width)

    def why(self, strategy: str, ranks: int | None = None, *, every: bool = False) -> str:
        """Return the terms of a strategy's peak as text; all of them if `every`."""
        return explain_row(self, strategy, ranks, every=every)

    def as_json(self) -> str:
        """Return the plan as JSON, each peak with its largest terms."""
        named = {
            "parameters": self.parameters,
            "device": self.device,
            "machine": self.machine or None,
            "memory": self.memory,
            "headroom": self.headroom,
            "checkpoint": None if self.checkpoint is None else self.checkpoint.each,
            "checkpoints_share": None if self.checkpoint is None else self.checkpoint.once,
            "units": self.units,
        }
        chosen = [
            {
                "ranks": each.ranks,
                "strategy": None if each.row is None else each.row.strategy,
                "micro": each.micro or None,
                "why": each.why,
            }
            for each in self.recommendations
        ]
        rows = [_row_as_json(row) for row in self.rows]
        return json.dumps({**named, "notes": self.notes, "recommended": chosen, "rows": rows}, indent=1)


def _row_as_json(row: PlannedStrategy) -> dict[str, Any]:
    return {
        "strategy": row.strategy,
        "ranks": row.ranks,
        "refusal": row.refusal,
        "micro": row.micro,
        "largest_micro": row.largest,
        "recomputed": row.recomputed,
        "to_fit": row.ways,
        "sent": [asdict(volume) for volume in row.sent],
        "speed": None if (s := row.speed) is None else {**asdict(s), "seconds": s.seconds, "rate": s.rate},
        "late": row.late,
        "phases": [_phase_as_json(phase) for phase in row.phases],
        "offloaded": {outside.place: _offloaded_as_json(outside) for outside in row.offloaded},
    }


def _offloaded_as_json(outside: OffloadedBytes) -> dict[str, Any]:
    largest: Sequence[Any] = outside.terms[:_TERMS_IN_JSON]
    return {"size": outside.size, "largest": [asdict(term) for term in largest]}


def _phase_as_json(phase: PredictedPeak) -> dict[str, Any]:
    largest: Sequence[Any] = phase.terms[:_TERMS_IN_JSON]
    return {
        "phase": phase.phase,
        "peak": phase.peak,
        "held": phase.held,
        "largest": [asdict(term) for term in largest],
    }
