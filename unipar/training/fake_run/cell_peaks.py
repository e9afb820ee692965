"""Predicted peaks of a traced task in one cell."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from unipar.backend import registry
from unipar.backend.prediction.timeline import Payload, Term
from unipar.config import BatchSizes, Cell, Config
from unipar.config.settled import SettledConfig
from unipar.planning.peaks import PredictedPeak, predict_peaks
from unipar.training.fake_run.trace import TracedTask


@dataclass(frozen=True)
class PredictedCell:
    """Memory of a rank in each phase of a step, and what it sends."""

    phases: tuple[PredictedPeak, ...]
    sent: tuple[Payload, ...]

    @property
    def peak(self) -> int:
        """Bytes at the fullest moment."""
        return max(phase.peak for phase in self.phases)


def predict_traced_cell(
    config: Config,
    cell: Cell,
    ranks: int,
    traced: TracedTask,
    sizes: BatchSizes,
    device: str,
    runtime: tuple[Term, ...] = (),
) -> PredictedCell:
    """Return what a step needs, in a config that was moved to the cell; `device`: cpu or cuda.

    `runtime`: what a process holds beside the backend's terms.
    """
    timeline = replace(traced.timeline, microbatches=sizes.accumulate)
    prediction = registry.find_backend(cell.backend).predict(config, timeline, ranks, device=device)
    held = replace(prediction, terms=(*prediction.terms, *runtime))
    phases = predict_peaks(timeline, held, traced.activations, sizes.micro, sizes.accumulate)
    return PredictedCell(tuple(phases), prediction.sent)


def predict_peaks_by_micro(settled: SettledConfig, traced: TracedTask, micros: Iterable[int]) -> Mapping[int, int]:
    """Return the largest peak of a step for microbatches of these sizes, with the total batch kept."""
    sizes, device = settled.sizes, "cpu" if settled.device == "cpu" else "cuda"
    share = sizes.total // sizes.ranks
    found: dict[int, int] = {}
    for micro in micros:
        config = settled.config.changed({"batch.micro": micro, "batch.accumulate": None})
        tried = replace(sizes, micro=micro, accumulate=share // micro)
        found[micro] = predict_traced_cell(config, settled.cell, settled.ranks, traced, tried, device).peak
    return found
