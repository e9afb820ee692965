"""`unipar scale`: the same cells in worlds of several sizes, all alive at once and taking turns."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from unipar.backend import resources
from unipar.backend.cells import alone, expand
from unipar.backend.installed import machine, versions
from unipar.comparison import store
from unipar.comparison.cell_world import Contestant
from unipar.comparison.request import Asked, batch_with_fixed_total, sizes_of, threads
from unipar.comparison.rounds import Contest
from unipar.config import Cell, Config
from unipar.config.sections.batch import Batch
from unipar.config.settled import SettledConfig
from unipar.config.source import Given
from unipar.errors import Unsupported
from unipar.launcher.cells import check_cell
from unipar.launcher.processes.signals import terminable
from unipar.report.build import NAME, beside, written
from unipar.report.pages.scaling import page
from unipar.results.files import ASKED
from unipar.results.live_table import Board
from unipar.results.row import Row
from unipar.results.scaling import KINDS, Kind, Scaling, World
from unipar.run_folder import folder
from unipar.task import Task

FIGURES, SHEET = "scale.json", "scale.csv"


def scale(
    config: Given,
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
    sizes = sizes_of(worlds)
    asked = Asked.of(config, overrides, task, "scale starts a world for each size")
    source, settings = asked.source, asked.source.config
    prepared = asked.prepared
    resources.check_enough(prepared.computed, sizes[-1], asked="--world")
    wanted = expand(tuple(cells)) if cells else [source.cell]
    entrants = list(entered(settings, sizes, wanted, prepared.device))
    waiting = [(world, at) for world, row, at in entrants if row.outcome == "waits" and at is not None]
    if not waiting:
        refused = entrants[0][1]
        raise Unsupported(entrants[0][0].cell, [refused.note])
    out, each = source.out / "scale", threads(max(world.ranks for world, _ in waiting))
    first = Scaling(
        name=source.name,
        out=str(out),
        precision=settings.train.precision,
        worlds=tuple(world for world, _, _ in entrants),
        rows=[row for _, row, _ in entrants],
        cores=len(os.sched_getaffinity(0)),
        threads=each,
        device=prepared.device,
        warmup=asked.turns.warmup,
        held=settings.train.sync_every is None,
        unwatched=asked.unwatched,
        versions=versions(cell.backend for cell in wanted),
        machine=machine(),
    )
    with folder.owned(out):
        folder.make_room(out, "scale", (FIGURES, SHEET, NAME, ASKED), "scaling", overwrite=overwrite)
        with folder.writing(out):
            store.ask(out, source.name, settings)
        runs = {world.name: Contestant(at, asked.ref, out / _slug(world), asked.meter) for world, at in waiting}

        def keep(now: Scaling) -> str:
            return store.write_or_explain(out, lambda: store.write_worlds(out, FIGURES, SHEET, now))

        with terminable(), Board() as board:
            now = Contest(first, board, runs, each, keep).play(asked.turns)
        return replace(now, unkept=keep(now), note=beside(lambda: written(page(now, out), out / NAME)))


def _slug(world: World) -> str:
    return "world-" + world.name.replace("/", "-").replace(" ", "-")


def entered(
    config: Config, sizes: Sequence[int], cells: Iterable[Cell], device: str
) -> Generator[tuple[World, Row, SettledConfig | None]]:
    """Yield each world with its config, the smallest of each cell first; what cannot run has its sentence, and none."""
    for cell in cells:
        for world, batch in _worlds(config.batch, sizes, str(cell)):
            row, at = check_cell(SettledConfig.of(config.changed({"batch": batch}), cell, world.ranks, device), cell)
            if alone(cell):
                row = replace(row, outcome="refused", note="it is one process, whatever the size of the world")
            if at is None:
                config.parallel.settle(world.ranks)
            yield world, replace(row, cell=world.name), at
            if row.outcome != "waits" and world.ranks == sizes[0]:
                break  # there is nothing to hold its larger worlds to


def _worlds(batch: Batch, sizes: Sequence[int], cell: str) -> Generator[tuple[World, Batch]]:
    """The smallest; then for each size the same total, and the same share of each rank."""
    least, same = batch.settle(sizes[0]), batch_with_fixed_total(batch, sizes[0])
    grows = Batch(micro=least.micro, accumulate=least.accumulate)
    for ranks in sizes:
        plans: list[tuple[tuple[Kind, ...], Batch]] = [(("strong",), same), (("weak",), grows)]
        for kinds, cut_as in [(KINDS, same)] if ranks == sizes[0] else plans:
            made = cut_as.settle(ranks)
            told = {"samples": made.total, "micro": made.micro, "accumulate": made.accumulate}
            yield World(cell=cell, ranks=ranks, kinds=kinds, **told), cut_as
