"""Selection of the cells that run, and the reasons why others do not."""

from __future__ import annotations

from collections.abc import Iterable

from unipar.backend.cells import ONE, expand_cell_patterns
from unipar.backend.checks import settled_in
from unipar.config import Cell
from unipar.config.config import Eval
from unipar.config.settled import SettledConfig
from unipar.errors import BackendNotInstalled, ConfigError, Unsupported
from unipar.results.row import CellResult

SelectedCells = dict[str, tuple[CellResult, SettledConfig | None]]
"""Row and config of each cell, by name; a cell that cannot run has a row with the reason, and no config."""


def select_cells(settled: SettledConfig, patterns: Iterable[str]) -> SelectedCells:
    """Return a row and a config for each cell that these patterns name; `single` is always the first."""
    one, alone = ONE, settled
    notes: list[str] = []
    if settled.config.train.precision == "bf16-master":
        alone = alone.changed({"train.precision": "fp32"})
        notes.append("in fp32: one process keeps no second copy of the weights")
    if settled.config.model.offload != "none":
        alone = alone.changed({"model.offload": "none"})
        notes.append("without model.offload")
    row = CellResult(cell=str(one), outcome="waits", note="; ".join(notes))
    found: SelectedCells = {str(one): (row, _without_extras(settled_in(alone, one)))}
    for pattern in patterns:
        try:
            cells = expand_cell_patterns((pattern,))
        except Unsupported as e:
            found[pattern] = CellResult(cell=pattern, outcome="refused", note="; ".join(e.reasons)), None
            continue
        for cell in cells:
            if str(cell) not in found:
                found[str(cell)] = result_of_check(settled, cell)
    return found


def result_of_check(settled: SettledConfig, cell: Cell) -> tuple[CellResult, SettledConfig | None]:
    """Return the row of a cell and its config, or a row with the reason and None if the cell cannot run."""
    name = str(cell)
    try:
        at = settled_in(settled, cell)
    except Unsupported as e:
        return CellResult(cell=name, outcome="refused", note="; ".join(e.reasons)), None
    except ConfigError as e:  # an option contradicts this cell
        return CellResult(cell=name, outcome="refused", note=str(e)), None
    except BackendNotInstalled as e:
        return CellResult(cell=name, outcome="absent", note=str(e)), None
    return CellResult(cell=name, outcome="waits"), _without_extras(at)


def _without_extras(settled: SettledConfig) -> SettledConfig:
    """Return the config without evaluation, trackers and memory logging, which would be timed with the steps."""
    return settled.changed({"eval": Eval(), "log.to": (), "log.memory": False})
