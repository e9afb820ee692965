"""`plan`: the memory of each cell on each number of ranks, predicted before a process starts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from unipar.backend import cells as backend_cells
from unipar.backend import checks, registry, resources
from unipar.config import BatchSizes, Cell, Config
from unipar.config.sections.parallel import Parallel
from unipar.config.source import Given, load_given_config
from unipar.errors import UniparError

if TYPE_CHECKING:
    from unipar.planning.plan import Plan, PlannedCell
    from unipar.training.fake_run.parts import TaskTraces


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
    from unipar.training.fake_run.parts import TaskTraces

    config = load_given_config(config).config
    wanted = backend_cells.expand_cell_patterns(tuple(cells or config.compare.cells))
    device = "cpu" if resources.choose_device(config)[0] == "cpu" else "cuda"
    began = time.process_time()
    traces = TaskTraces(config, config.batch.settle(1).micro if config.batch.micro is None else config.batch.micro)
    traced = traces.whole
    rows: list[PlannedCell] = []
    numbers = tuple(worlds) or (resources.count_ranks(config).number,)
    for cell in wanted:
        for ranks in numbers:
            limit = None if memory is None else int(memory * (1.0 - headroom))
            rows += _plan_cell(config, cell, ranks, traces, limit, device)
    notes = [] if traced.even else ["activations do not grow evenly with the microbatch: other sizes are estimates"]
    if not traced.fused:
        notes.append("the optimizer is not fused, and its temporaries are not planned: the update may need more")
    return Plan(tuple(rows), memory, headroom, device, traced.parameters, time.process_time() - began, tuple(notes))


def _plan_cell(
    config: Config, cell: Cell, ranks: int, traces: TaskTraces, limit: int | None, device: str
) -> Iterator[PlannedCell]:
    """Yield the row of a cell on so many ranks; none for a cell of one process on several."""
    from unipar.planning.plan import PlannedCell

    backend = registry.find_backend(cell.backend)
    if backend_cells.is_single_process(cell, backend) and ranks > 1:
        return
    try:
        moved = backend_cells.config_in_cell(_on_ranks(config, ranks), cell)
        checks.check_cell(moved, backend, cell)
        sizes = moved.batch.settle(ranks // cell.axes.ranks or 1)
        phases = traces.predict(moved, ranks, sizes, device=device).phases
        largest = None if limit is None else _largest_micro(moved, ranks, traces, sizes, device, limit)
    except UniparError as e:
        yield PlannedCell(str(cell), ranks, refusal=str(e).replace("\n", " "))
        return
    yield PlannedCell(str(cell), ranks, sizes.micro, phases, largest)


def _on_ranks(config: Config, ranks: int) -> Config:
    """Return a config with so many ranks of the data and no other axes: a cell brings its own."""
    parallel = Parallel(data=ranks, shard=config.parallel.shard, shard_over=config.parallel.shard_over)
    return config.model_copy(update={"parallel": parallel})


def _largest_micro(
    config: Config, ranks: int, traces: TaskTraces, sizes: BatchSizes, device: str, limit: int
) -> int | None:
    """Return the largest microbatch that fits, among those that divide a rank's share of the batch."""
    share = sizes.total // sizes.ranks
    for micro in (n for n in range(share, 0, -1) if share % n == 0):
        tried = replace(sizes, micro=micro, accumulate=share // micro)
        if max(phase.peak for phase in traces.predict(config, ranks, tried, device=device).phases) <= limit:
            return micro
    return None
