"""`plan`: the memory of each cell on each number of ranks, predicted before a process starts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from unipar.backend import cells as backend_cells
from unipar.backend import checks, registry, resources
from unipar.config import Cell, Config
from unipar.config.source import Given, load_given_config
from unipar.errors import UniparError

if TYPE_CHECKING:
    from unipar.planning.plan import Plan, PlannedCell
    from unipar.training.fake_run.cell_peaks import PredictedCell
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
    memory = config.batch.memory if memory is None else memory
    if config.batch.is_auto:  # rows are of the smallest microbatch, and tell the largest that fits
        config = config.changed({"batch.micro": 1})
    wanted = backend_cells.expand_cell_patterns(tuple(cells or config.compare.cells))
    device = "cpu" if resources.choose_device(config)[0] == "cpu" else "cuda"
    began = time.process_time()
    micro = config.batch.micro
    traced = trace_task(config, micro if isinstance(micro, int) else config.batch.settle(1).micro)
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
    from unipar.training.fake_run.cell_peaks import predict_largest_micro, predict_traced_cell

    backend = registry.find_backend(cell.backend)
    if backend_cells.is_single_process(cell, backend) and ranks > 1:
        return
    try:
        moved = backend_cells.config_in_cell(config.changed({"parallel.data": ranks // cell.axes.ranks or 1}), cell)
        checks.check_cell(moved, backend, cell)
        sizes = moved.batch.settle(ranks // cell.axes.ranks or 1)
        phases = predict_traced_cell(moved, cell, ranks, traced, sizes, device).phases
        largest = None if limit is None else predict_largest_micro(moved, cell, ranks, traced, sizes, device, limit)
    except UniparError as e:
        yield PlannedCell(str(cell), ranks, refusal=str(e).replace("\n", " "))
        return
    yield PlannedCell(str(cell), ranks, sizes.micro, phases, largest)


def predict_cell(config: Config, cell: Cell, ranks: int, device: str) -> PredictedCell:
    """Return what a cell needs, for a config that is in it; raise Unsupported if it is not planned."""
    from unipar.training.fake_run.cell_peaks import predict_traced_cell
    from unipar.training.fake_run.trace import trace_task

    sizes = config.batch.settle(ranks // cell.axes.ranks)
    return predict_traced_cell(config, cell, ranks, trace_task(config, sizes.micro), sizes, device)
