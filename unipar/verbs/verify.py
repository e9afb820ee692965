"""`unipar verify`: do all cells give the numbers of one process on this very task? If not, where do they part?"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from unipar import devices, folder, registry
from unipar.config import Cell, Config, Eval
from unipar.errors import ConfigError, WorldMismatch
from unipar.procfs import cores_per_rank
from unipar.report.board import Board
from unipar.report.comparison import Row
from unipar.report.verdicts import Verdict, Verdicts
from unipar.source import Source, given
from unipar.task import Reached, Task, TaskRef, importing
from unipar.verbs.compare import select_cells
from unipar.verbs.contest import terminable

STEPS = 10
NAMES = ("verify.json", "verify.svg", "verify.html")


def verify(
    config: str | Path | Mapping[str, Any] | Config | Source,
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
    if importing():
        raise Reached
    source = given(config, overrides)
    settled = _settled(source.config, world)
    ref = TaskRef.of(task, settled.task, {})
    ref.look()
    entrants = of_ranks(settled, tuple(cells) or settled.compare.cells)
    wanted = min(steps or STEPS, settled.train.steps or steps or STEPS)
    out = source.out / "verify"
    assert isinstance(settled.parallel.data, int)
    first = Verdicts(
        name=source.name,
        out=str(out),
        precision=settled.train.precision,
        ranks=settled.parallel.data,
        steps=wanted,
        rows=[Verdict(cell=row.cell, outcome=_outcome(row.outcome), note=row.note) for row, _ in entrants.values()],
    )
    configs = {name: at for name, (row, at) in entrants.items() if row.outcome == "waits"}
    with folder.owned(out):
        folder.make_room(out, "verify", NAMES, "proof", overwrite=overwrite)
        now = _proved(settled, ref, configs, first) if configs else first
        _write(out, now)
    return now


def of_ranks(config: Config, patterns: Iterable[str]) -> dict[str, tuple[Row, Config]]:
    """Compare's cells; what is one process has no ranks that could be held to one."""
    found = select_cells(config, patterns)
    del found[str(registry.ONE)]
    for name, (row, at) in found.items():
        if row.outcome == "waits" and registry.alone(Cell.parse(name)):
            note = "it is one process, and verify holds several ranks to one; `unipar compare` runs it"
            found[name] = replace(row, outcome="refused", note=note), at
    return found


def _outcome(said: str) -> Any:
    return said if said in ("waits", "refused", "absent") else "failed"


def _settled(config: Config, world: int | None) -> Config:
    """With the number of ranks of every cell, and nothing between steps."""
    if (place := devices.found()) is not None:
        raise WorldMismatch(
            f"verify starts a world for each library, and this is rank {place.rank} of one that {place.launcher} "
            "started: run it without that launcher"
        )
    said = config.parallel.data
    number = world or (said if isinstance(said, int) else max(2, devices.ranks(config).number))
    if number < 2:
        raise ConfigError(
            f"verify holds several ranks to one process, and this is a world of {number}; "
            "give it at least two (--world 2, or verify(..., world=2))"
        )
    devices.check_enough(config, number)
    config = config.model_copy(update={"parallel": config.parallel.model_copy(update={"data": number})})
    config.batch.settle(number)
    return config.model_copy(update={"eval": Eval(), "log": config.log.model_copy(update={"to": ()})})


def _proved(config: Config, ref: TaskRef, configs: Mapping[str, Config], first: Verdicts) -> Verdicts:
    from unipar.proof.proving import Proof
    from unipar.proof.runs import Runs
    from unipar.proof.worlds import worlds

    runs = Runs(config, first.steps)
    registry.check(runs.one())
    threads = cores_per_rank(first.ranks)  # in one process too: the same arithmetic
    with terminable(), Board() as board:
        board.show(first, "starts")
        with worlds(Path(first.out), ref, [runs.one(), *configs.values()], threads) as made:
            return Proof(runs, made, configs, first, board.show).run()


def _write(out: Path, now: Verdicts) -> None:
    from unipar.report.curves import drawn, page

    (out / "verify.json").write_text(json.dumps(now.to_json(), indent=2, allow_nan=True) + "\n", encoding="utf-8")
    (out / "verify.svg").write_text(drawn(now), encoding="utf-8")
    (out / "verify.html").write_text(page(now), encoding="utf-8")
