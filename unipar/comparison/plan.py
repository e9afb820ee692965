"""`plan`: the memory of each cell on each number of ranks, predicted before a process starts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from unipar.backend import cells as backend_cells
from unipar.backend import checks, registry, resources
from unipar.config import BatchSizes, Cell, Config
from unipar.config.source import Given, load_given_config
from unipar.errors import UniparError

if TYPE_CHECKING:
    from unipar.backend.prediction.timeline import Payload
    from unipar.planning.peaks import PredictedPeak
    from unipar.planning.plan import Plan, PlannedCell
    from unipar.training.fake_run.trace import TracedTask


def plan(
    config: Given,
    *,
    cells: Sequence[str] = (),
    worlds: Sequence[int] = (),
    memory: int | None = None,
    headroom: float = 0.05,
) -> Plan:
    """Return what each cell needs on each number of ranks; `memory` is what a rank has, in bytes.

    The task's model and loss run on tensors without memory. Cells are those of compare.cells unless they are given,
    and worlds the config's number of ranks.
    """
    import time

    from unipar.planning.plan import Plan
    from unipar.training.fake_run.trace import trace_task

    config = load_given_config(config).config
    wanted = backend_cells.expand_cell_patterns(tuple(cells or config.compare.cells))
    device = "cpu" if resources.choose_device(config)[0] == "cpu" else "cuda"
    began = time.process_time()
    traced = trace_task(config, config.batch.settle(1).micro if config.batch.micro is None else config.batch.micro)
    rows: list[PlannedCell] = []
    numbers = tuple(worlds) or (resources.count_ranks(config).number,)
    for cell in wanted:
        for ranks in numbers:
            limit = None if memory is None else int(memory * (1.0 - headroom))
            rows += _plan_cell(config, cell, ranks, traced, limit, device)
    notes = [] if traced.even else ["activations do not grow evenly with the microbatch: other sizes are estimates"]
    if not traced.fused:
        notes.append("the optimizer is not fused, and its temporaries are not planned: the update may need more")
    return Plan(tuple(rows), memory, headroom, device, traced.parameters, time.process_time() - began, tuple(notes))


def _plan_cell(
    config: Config, cell: Cell, ranks: int, traced: TracedTask, limit: int | None, device: str
) -> Iterator[PlannedCell]:
    """Yield the row of a cell on so many ranks; none for a cell of one process on several."""
    from unipar.planning.plan import PlannedCell

    backend = registry.find_backend(cell.backend)
    if backend_cells.is_single_process(cell, backend) and ranks > 1:
        return
    try:
        moved = backend_cells.config_in_cell(config.changed({"parallel.data": ranks // cell.axes.ranks or 1}), cell)
        checks.check_cell(moved, backend, cell)
        sizes = moved.batch.settle(ranks // cell.axes.ranks or 1)
        phases = _predict(moved, cell, ranks, traced, sizes, device).phases
        largest = None if limit is None else _largest_micro(moved, cell, ranks, traced, sizes, device, limit)
    except UniparError as e:
        yield PlannedCell(str(cell), ranks, refusal=str(e).replace("\n", " "))
        return
    yield PlannedCell(str(cell), ranks, sizes.micro, phases, largest)


@dataclass(frozen=True)
class PredictedCell:
    """Memory of a rank in each phase of a step, and what it sends."""

    phases: tuple[PredictedPeak, ...]
    sent: tuple[Payload, ...]


def predict_cell(config: Config, cell: Cell, ranks: int, device: str) -> PredictedCell:
    """Return what a cell needs, for a config that is in it; raise Unsupported if it is not planned."""
    from unipar.training.fake_run.trace import trace_task

    sizes = config.batch.settle(ranks // cell.axes.ranks)
    return _predict(config, cell, ranks, trace_task(config, sizes.micro), sizes, device)


def _predict(
    config: Config, cell: Cell, ranks: int, traced: TracedTask, sizes: BatchSizes, device: str
) -> PredictedCell:
    from unipar.planning.peaks import predict_peaks

    timeline = replace(traced.timeline, microbatches=sizes.accumulate)
    prediction = registry.find_backend(cell.backend).predict(config, timeline, ranks, device=device)
    phases = predict_peaks(timeline, prediction, traced.activations, sizes.micro, sizes.accumulate)
    return PredictedCell(tuple(phases), prediction.sent)


def _largest_micro(
    config: Config, cell: Cell, ranks: int, traced: TracedTask, sizes: BatchSizes, device: str, limit: int
) -> int | None:
    """Return the largest microbatch that fits, among those that divide a rank's share of the batch."""
    share = sizes.total // sizes.ranks
    for micro in (n for n in range(share, 0, -1) if share % n == 0):
        tried = replace(sizes, micro=micro, accumulate=share // micro)
        if max(phase.peak for phase in _predict(config, cell, ranks, traced, tried, device).phases) <= limit:
            return micro
    return None
