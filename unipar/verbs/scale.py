"""`unipar scale`: the same cells in worlds of several sizes, all alive at once and taking turns."""

from __future__ import annotations

import json
import os
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from unipar import devices, folder, registry
from unipar.config import Batch, Cell, Config
from unipar.errors import ConfigError, ReportError, Unsupported, WorldMismatch
from unipar.plan import look_at_weights
from unipar.report.board import Board
from unipar.report.comparison import Row
from unipar.report.worlds import KINDS, Kind, Scaling, World
from unipar.report.worlds_page import page
from unipar.source import Source, given
from unipar.task import Reached, Task, TaskRef, importing
from unipar.verbs import kept
from unipar.verbs.compare import Contest, checked, cut, each, terminable
from unipar.verbs.contestant import Contestant
from unipar.verbs.report import NAME, written

FIGURES = "scale.json"


def scale(
    config: str | Path | Mapping[str, Any] | Config | Source,
    *,
    worlds: Sequence[int] | str,
    task: type[Task] | None = None,
    cells: Sequence[str] = (),
    overrides: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> Scaling:
    """Train what `config` says in worlds of these sizes, by turns; `cells` are instead of its own cell.

    Progress goes to stderr; the Scaling prints as a table.
    """
    if importing():
        raise Reached
    source = given(config, overrides)
    asked, sizes = source.config, sizes_of(worlds)
    if (place := devices.found()) is not None:
        raise WorldMismatch(
            f"scale starts a world for each size, and this is rank {place.rank} of one that {place.launcher} "
            "started: run it without that launcher"
        )
    devices.check_enough(asked, sizes[-1], asked="--world")
    turns, meter, unwatched = cut(asked)
    ref = TaskRef.of(task, asked.task, {})
    ref.look()
    look_at_weights(source)
    wanted = registry.expand(tuple(cells)) if cells else [registry.cell_of(asked)]
    entrants = list(entered(asked, sizes, wanted))
    waiting = [(world, at) for world, row, at in entrants if row.outcome == "waits"]
    if not waiting:
        refused = entrants[0][1]
        raise Unsupported(entrants[0][0].cell, [refused.note])
    out = source.out / "scale"
    first = Scaling(
        name=source.name,
        out=str(out),
        precision=asked.train.precision,
        worlds=tuple(world for world, _, _ in entrants),
        rows=[row for _, row, _ in entrants],
        cores=len(os.sched_getaffinity(0)),
        threads=os.environ.get("OMP_NUM_THREADS", str(each(max(world.ranks for world, _ in waiting)))),
        device=devices.device(asked)[0],
        warmup=turns.warmup,
        held=asked.train.sync_every is None,
        unwatched=unwatched,
        versions=kept.versions([str(cell) for cell in wanted]),
        machine=kept.machine(),
    )
    with folder.owned(out):
        folder.make_room(out, "scale", (FIGURES, NAME), "scaling", overwrite=overwrite)
        runs = {
            world.name: Contestant(Cell.parse(world.cell), at, ref, out / _slug(world), meter) for world, at in waiting
        }
        with terminable(), Board() as board:
            now = Contest(first, board, runs).play(turns)
        (out / FIGURES).write_text(json.dumps(now.to_json(), indent=2) + "\n", encoding="utf-8")
        return replace(now, note=beside(out, now))


def beside(out: Path, now: Scaling) -> str:
    """The page, as a sentence for the table: what was measured is shown without it, too."""
    try:
        return f"page: {written(page(now), out / NAME)}"
    except ReportError as e:
        return f"no page: {e}"


def _slug(world: World) -> str:
    return "world-" + world.name.replace("/", "-").replace(" ", "-")


def sizes_of(worlds: Sequence[int] | str) -> list[int]:
    """The smallest first; `1,2,4` is a list, too."""
    if isinstance(worlds, str):
        words = [word.strip() for word in worlds.split(",")]
        if not all(word.isdecimal() for word in words):
            raise ConfigError(f"--world: {worlds!r} is no list of sizes; put commas between them (--world 1,2,4)")
        worlds = [int(word) for word in words]
    made = sorted(set(worlds))
    if len(made) < 2 or made[0] < 1:
        raise ConfigError(
            f"--world: {','.join(map(str, worlds)) or 'none'} does not scale: "
            "give two sizes or more, each of at least 1 (--world 1,2)"
        )
    return made


def entered(config: Config, sizes: Sequence[int], cells: Iterable[Cell]) -> Generator[tuple[World, Row, Config]]:
    """Each world with its config, the smallest of each cell first; what cannot run has its sentence already."""
    for cell in cells:
        for world, batch in _worlds(config.batch, sizes, str(cell)):
            parallel = config.parallel.model_copy(update={"data": world.ranks})
            row, at = checked(config.model_copy(update={"batch": batch, "parallel": parallel}), cell)
            if registry.alone(cell):
                row = replace(row, outcome="refused", note="it is one process, whatever the size of the world")
            at.parallel.settle(world.ranks)
            yield world, replace(row, cell=world.name), at
            if row.outcome != "waits" and world.ranks == sizes[0]:
                break  # there is nothing to hold its larger worlds to


def _worlds(batch: Batch, sizes: Sequence[int], cell: str) -> Generator[tuple[World, Batch]]:
    """The smallest; then for each size the same total, and the same share of each rank."""
    least = batch.settle(sizes[0])
    same = batch if batch.total is not None else Batch(total=least.total, accumulate=least.accumulate)
    grows = Batch(micro=least.micro, accumulate=least.accumulate)
    for ranks in sizes:
        plans: list[tuple[tuple[Kind, ...], Batch]] = [(("strong",), same), (("weak",), grows)]
        for kinds, cut_as in [(KINDS, same)] if ranks == sizes[0] else plans:
            made = cut_as.settle(ranks)
            told = {"samples": made.total, "micro": made.micro, "accumulate": made.accumulate}
            yield World(cell=cell, ranks=ranks, kinds=kinds, **told), cut_as
