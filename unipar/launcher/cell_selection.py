"""Selection of the cells that run, and the reasons why others do not; one microbatch for all of them."""

from __future__ import annotations

from collections.abc import Iterable

from unipar.backend import checks, registry
from unipar.backend.checks import settled_in
from unipar.backend.offered_cells import ONE, config_in_cell, count_data_ranks, expand_cell_patterns, is_single_process
from unipar.config import Cell, Config
from unipar.config.config import Eval
from unipar.config.settled import SettledConfig
from unipar.errors import BackendNotInstalled, ConfigError, UniparError, Unsupported
from unipar.launcher.micro_batch.choice import CandidateWorld, ChosenMicro, list_candidates, usable_memory, with_micro
from unipar.launcher.preparation.prepare import Prepared
from unipar.results.row import CellResult

SelectedCells = dict[str, tuple[CellResult, SettledConfig | None]]
"""Row and config of each cell, by name; a cell that cannot run has a row with the reason, and no config."""


def select_cells(settled: SettledConfig, patterns: Iterable[str]) -> SelectedCells:
    """Return a row and a config for each cell that these patterns name; `single` is always the first."""
    one, changes = ONE, _in_one_process(settled.config)
    alone = settled.changed({key: value for key, (value, _) in changes.items()})
    row = CellResult(cell=str(one), outcome="waits", note="; ".join(note for _, note in changes.values()))
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


def library_name(at: SettledConfig) -> str:
    """Return what the library of a config's cell calls it."""
    return registry.find_backend(at.cell.backend).library_name(at.config)


def _in_one_process(config: Config) -> dict[str, tuple[str, str]]:
    """Return the keys that are other in one process without a wrapper, each with its value there and the reason."""
    changes: dict[str, tuple[str, str]] = {}
    if config.train.precision == "bf16-master":
        changes["train.precision"] = "fp32", "in fp32: one process keeps no second copy of the weights"
    if config.model.offload != "none":
        changes["model.offload"] = "none", "without model.offload"
    return changes


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


def settle_one_micro(
    prepared: Prepared, patterns: Iterable[str], worlds: Iterable[int]
) -> tuple[Prepared, ChosenMicro | None]:
    """Return the same with one microbatch for all cells on all these numbers of ranks, if its config says auto.

    Lines of progress go to stderr.
    """
    config = prepared.source.config
    if not config.batch.is_auto:
        return prepared, None
    from unipar.launcher.micro_batch.choose import choose_microbatch, write_line
    from unipar.launcher.micro_batch.trials import TrialCode

    found: dict[str, CandidateWorld] = {}
    asked: list[Cell] = []
    error: UniparError | None = None
    for pattern in patterns:
        try:
            asked += expand_cell_patterns((pattern,))
        except Unsupported as e:  # a row of the result says so
            error = error or e
    for ranks in worlds:
        for cell in asked:
            try:
                world = _candidate_world(prepared, cell, ranks)
            except UniparError as e:  # a row of the result says so
                error = error or e
                continue
            found.setdefault(world.name, world)
    if not found:
        assert error is not None
        raise error
    most = max(world.settled.ranks for world in found.values())
    limit = usable_memory(prepared.computed, most)
    code = TrialCode(prepared.ref)
    chosen = choose_microbatch(list(found.values()), code, limit, write_line)
    return prepared.with_micro(chosen.micro), chosen


def _candidate_world(prepared: Prepared, cell: Cell, ranks: int) -> CandidateWorld:
    """Return a cell on so many ranks, with the sizes that a microbatch may have there."""
    backend = registry.find_backend(cell.backend)
    if is_single_process(cell, backend):
        ranks = 1
    data = count_data_ranks(ranks, cell)
    whole = with_micro(prepared.computed, 1).changed({"parallel.data": count_data_ranks(ranks, prepared.source.cell)})
    if cell == ONE:
        whole = whole.changed({key: value for key, (value, _) in _in_one_process(whole).items()})
    moved = config_in_cell(whole, cell)
    sizes = list_candidates(moved, backend, cell, data)
    checks.check_cell(with_micro(moved, sizes[0]), backend, cell)
    settled = SettledConfig.of(with_micro(moved, sizes[0]), cell, ranks, prepared.device)
    return CandidateWorld(_without_extras(settled), backend, sizes)
