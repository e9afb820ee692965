"""`unipar verify`: do all cells give the numbers of one process on this very task? If not, where do they part?"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from unipar.backend import checks, registry
from unipar.backend.cells import ONE, is_single_process
from unipar.config import Cell
from unipar.config.config import Eval
from unipar.config.settled import SettledConfig
from unipar.config.source import Given
from unipar.errors import ConfigError
from unipar.launcher.cells import Entrants, select_cells
from unipar.launcher.prepare import Prepared, prepare
from unipar.launcher.processes.signals import sigterm_as_interrupt
from unipar.results.live_table import LiveTable
from unipar.results.verdicts import Verdict, Verdicts
from unipar.run_folder import folder
from unipar.task import Task
from unipar.task.reference import TaskRef
from unipar.utils.procfs import cores_per_rank

DEFAULT_STEPS = 10
VERIFY_FILE_NAMES = ("verify.json", "verify.svg", "verify.html")


def verify(
    config: Given,
    *,
    task: type[Task] | None = None,
    cells: Sequence[str] = (),
    world: int | None = None,
    steps: int | None = None,
    overrides: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> Verdicts:
    """Train some steps of what `config` says in one process and in every cell, and hold them together.

    `cells` are instead of its `compare.cells`, `world` instead of its `parallel.data` (2, if that is
    open), `steps` instead of 10. Progress goes to stderr; the Verdicts print as a table.
    """
    prepared = prepare(config, task, overrides, starts="verify starts a world for each library")
    assert prepared.ref is not None
    source, settled = prepared.source, _with_rank_count(prepared, world)
    said = settled.config.train
    entrants = select_multi_rank_cells(settled, tuple(cells) or settled.config.compare.cells)
    wanted = min(steps or DEFAULT_STEPS, said.steps or steps or DEFAULT_STEPS)
    out = source.out / "verify"
    first = Verdicts(
        name=source.name,
        out=str(out),
        precision=said.precision,
        ranks=settled.ranks,
        steps=wanted,
        rows=[
            Verdict(cell=row.cell, outcome=_initial_outcome(row.outcome), note=row.note) for row, _ in entrants.values()
        ],
    )
    configs = {name: at for name, (row, at) in entrants.items() if row.outcome == "waits" and at is not None}
    with folder.lock_folder(out):
        folder.clear_own_files(out, "verify", VERIFY_FILE_NAMES, "proof", overwrite=overwrite)
        now = _run_session(settled, prepared.ref, configs, first) if configs else first
        _write(out, now)
    return now


def select_multi_rank_cells(settled: SettledConfig, patterns: Iterable[str]) -> Entrants:
    """Compare's cells; what is one process has no ranks that could be held to one."""
    found = select_cells(settled, patterns)
    del found[str(ONE)]
    for name, (row, at) in found.items():
        if row.outcome == "waits" and is_single_process(Cell.parse(name)):
            note = "it is one process, and verify holds several ranks to one; `unipar compare` runs it"
            found[name] = replace(row, outcome="refused", note=note), at
    return found


def _initial_outcome(said: str) -> Any:
    return said if said in ("waits", "refused", "absent") else "failed"


def _with_rank_count(prepared: Prepared, world: int | None) -> SettledConfig:
    """Return the config in the number of ranks of every cell, with nothing between steps."""
    said = prepared.source.config.parallel.data
    number = world or (said if isinstance(said, int) else max(2, prepared.ranks().number))
    if number < 2:
        raise ConfigError(
            f"verify holds several ranks to one process, and this is a world of {number}; "
            "give it at least two (--world 2, or verify(..., world=2))"
        )
    return prepared.settled(number).changed({"eval": Eval(), "log.to": ()})


def _run_session(
    settled: SettledConfig, ref: TaskRef, configs: Mapping[str, SettledConfig], first: Verdicts
) -> Verdicts:
    from unipar.verification.runs import RunPlan
    from unipar.verification.session import VerificationSession
    from unipar.verification.world_pool import open_world_pool

    runs = RunPlan(settled, first.steps)
    one = runs.one_process_config()
    checks.check_cell(one.config, registry.find_backend(one.cell.backend), one.cell)
    threads = cores_per_rank(first.ranks)  # in one process too: the same arithmetic
    backends = {one.cell.backend, *(at.cell.backend for at in configs.values())}
    with sigterm_as_interrupt(), LiveTable() as board:
        board.show(first, "starts")
        with open_world_pool(Path(first.out), ref, backends, threads) as made:
            return VerificationSession(runs, made, configs, first, board.show).run()


def _write(out: Path, now: Verdicts) -> None:
    from unipar.report.pages.verification import draw_verification, render_verification

    (out / "verify.json").write_text(json.dumps(now.to_json(), indent=2, allow_nan=True) + "\n", encoding="utf-8")
    (out / "verify.svg").write_text(draw_verification(now), encoding="utf-8")
    (out / "verify.html").write_text(render_verification(now), encoding="utf-8")
