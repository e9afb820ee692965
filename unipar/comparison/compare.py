"""`compare`."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, overload

from unipar.backend import resources
from unipar.backend.cells import ONE
from unipar.backend.installed import machine, versions
from unipar.comparison import store
from unipar.comparison.cell_world import Contestant
from unipar.comparison.request import Asked, batch_with_fixed_total, sizes_of, threads
from unipar.comparison.rounds import Contest
from unipar.config import Cell
from unipar.config.settled import SettledConfig
from unipar.config.source import Given
from unipar.errors import ConfigError, Unsupported
from unipar.launcher.cells import select_cells
from unipar.launcher.processes.signals import terminable
from unipar.report.build import NAME, beside, written
from unipar.report.data.comparison import Told
from unipar.report.data.headline import answer
from unipar.report.pages import comparison, scaling
from unipar.results.comparison import Comparison
from unipar.results.live_table import Board
from unipar.results.row import REUSED, Row
from unipar.results.scaling import Scaling, World
from unipar.run_folder.folder import only_ours, owned, writing
from unipar.task import Task
from unipar.utils.text import count_of

FIGURES, SHEET = "worlds.json", "worlds.csv"
"""What several worlds came to, beside a folder for each."""


@overload
def compare(
    config: Given,
    *,
    task: type[Task] | None = None,
    cells: Sequence[str] = (),
    world: int | None = None,
    overrides: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> Comparison: ...


@overload
def compare(
    config: Given,
    *,
    world: Sequence[int] | str,
    task: type[Task] | None = None,
    cells: Sequence[str] = (),
    overrides: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> Scaling: ...


def compare(
    config: Given,
    *,
    task: type[Task] | None = None,
    cells: Sequence[str] = (),
    world: int | Sequence[int] | str | None = None,
    overrides: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> Comparison | Scaling:
    """Train what `config` says in every cell, by turns; `cells` are instead of its `compare.cells`.

    `world`: on so many ranks; several numbers are a comparison each, and what is found is a Scaling.
    Progress goes to stderr; what is found prints as a table.
    """
    if isinstance(world, int) and world < 1:
        raise ConfigError(f"--world: {world}: wanted a whole number above 0, or several: 1,2,4")
    sizes = sizes_of(world) if isinstance(world, Sequence) else []
    asked = Asked.of(config, overrides, task, "compare starts a world for each cell")
    if sizes:
        return _by_size(asked, sizes, cells, overwrite=overwrite)
    said = world or asked.source.config.parallel.data
    ranks = said if isinstance(said, int) else asked.prepared.ranks().number
    by = "parallel.data" if world is None else "--world"
    return compared(asked, ranks, cells, asked.source.out / "compare", overwrite=overwrite, by=by)


def compared(
    asked: Asked,
    ranks: int,
    cells: Sequence[str],
    folder: Path,
    *,
    overwrite: bool,
    widest: int = 0,
    by: str = "parallel.data",
) -> Comparison:
    """On so many ranks, which `by` asked for; what an earlier go has left of the same comparison is kept."""
    settled = asked.prepared.settled(ranks, asked=by)
    config = settled.config
    entrants = select_cells(settled, tuple(cells) or config.compare.cells)
    each = threads(max(ranks, widest))
    of = store.identity(config, list(entrants), asked.ref, each, asked.unwatched)
    first = Comparison(
        name=asked.source.name,
        out=str(folder),
        precision=config.train.precision,
        samples=settled.sizes.total,
        ranks=ranks,
        warmup=asked.turns.warmup,
        rows=[row for row, _ in entrants.values()],
        unwatched=asked.unwatched,
    )
    with owned(folder):
        earlier = store.reuse_or_clear(folder, of, overwrite=overwrite)
        if earlier is not None:
            whole = {row.cell: row for row in earlier.rows if row.outcome == "ran"}
            more = any(row.outcome == "waits" and row.cell not in whole for row in first.rows)
            if not more and not earlier.interrupted:
                said = f"from {folder / store.NAME}; --overwrite runs it again"
                return _with_page(folder, replace(earlier, note=said))
            kept_rows = {cell: _reused(row) if more else row for cell, row in whole.items()}
            first = replace(first, rows=[kept_rows.get(row.cell, row) for row in first.rows])
        runs = {
            row.cell: Contestant(at, asked.ref, folder / at.cell.slug, asked.meter)
            for row in first.rows
            if row.outcome == "waits" and (at := entrants[row.cell][1]) is not None
        }
        with writing(folder):
            store.write(folder, of, first)
            store.ask(folder, first.name, config)

        def keep(so_far: Comparison) -> str:
            return store.write_or_explain(folder, lambda: store.write(folder, of, so_far))

        with terminable(), Board() as board:
            now = Contest(first, board, runs, each, keep).play(asked.turns)
        why = keep(now)
        return replace(now, unkept=why) if why else _with_page(folder, now)


def _by_size(asked: Asked, ranks: Sequence[int], cells: Sequence[str], *, overwrite: bool) -> Scaling:
    """A comparison for each size of world, one after another, all with the same total batch."""
    prepared, out = asked.prepared, asked.source.out / "worlds"
    resources.check_enough(prepared.computed, ranks[-1], asked="--world")
    settings = asked.source.config
    settings = settings.changed({"batch": batch_with_fixed_total(settings.batch, ranks[0])})
    asked = replace(asked, prepared=replace(prepared, source=replace(asked.source, config=settings)))
    settled = {n: SettledConfig.of(settings, asked.source.cell, n, prepared.device) for n in ranks}
    sizes = {n: one.sizes for n, one in settled.items()}
    if list(select_cells(settled[ranks[0]], tuple(cells) or settings.compare.cells)) == [str(ONE)]:
        raise Unsupported(str(ONE), ["it is one process, whatever the size of the world"])
    found: dict[int, Comparison] = {}
    with owned(out):
        only_ours(out, "compare", (FIGURES, SHEET, NAME))
        for n in ranks:
            folder = out / f"world-{n}"
            found[n] = compared(asked, n, cells, folder, overwrite=overwrite, widest=ranks[-1], by="--world")
            if found[n].interrupted:
                break
        rows = [{row.cell: row for row in one.rows[1:]} for one in found.values()]
        worlds: list[World] = []
        made: list[Row] = []
        for cell in rows[0]:
            for i, (n, cut) in enumerate(sizes.items()):
                told = {"samples": cut.total, "micro": cut.micro, "accumulate": cut.accumulate}
                worlds.append(World(cell=cell, ranks=n, kinds=("strong",), **told))
                row = rows[i].get(cell) if i < len(rows) else None
                made.append(replace(row or Row(cell=cell, outcome="waits"), cell=worlds[-1].name))
        now = Scaling(
            verb="compare",
            name=asked.source.name,
            out=str(out),
            precision=settings.train.precision,
            worlds=tuple(worlds),
            rows=made,
            cores=len(os.sched_getaffinity(0)),
            threads=threads(ranks[-1]),
            device=prepared.device,
            warmup=asked.turns.warmup,
            held=settings.train.sync_every is None,
            unwatched=asked.unwatched,
            interrupted=any(one.interrupted for one in found.values()),
            wrong=tuple(f"{count_of(n, 'rank')}: {said}" for n, one in found.items() for said in wrong(one)),
            versions=versions(Cell.parse(cell).backend for cell in rows[0]),
            machine=machine(),
        ).sifted()
        why = store.write_or_explain(out, lambda: store.write_worlds(out, FIGURES, SHEET, now))
        return replace(now, unkept=why, note=beside(lambda: written(scaling.page(now, out), out / NAME)))


def wrong(one: Comparison) -> list[str]:
    """What a table that has not `single` must say of a comparison."""
    first = one.rows[0]
    if first.outcome == "failed":
        return [f"single, which the others are held to, has failed: {first.note.splitlines()[0]}"]
    return one.verdict() if one.disagree else []


def _reused(row: Row) -> Row:
    """Return the row of a cell that does not run again, with a note that says so."""
    return row if row.reused else replace(row, reused=True, note="; ".join(filter(None, [row.note, REUSED])))


def _with_page(folder: Path, now: Comparison) -> Comparison:
    """With the page's first sentence, and a word on the page."""
    sentence: list[str] = []

    def made() -> Path:
        told = Told.read(folder)
        if now.right:
            sentence.append(answer(told))
        return written(comparison.page(told), folder / NAME)

    said = beside(made)
    return replace(now, answer="".join(sentence), note="; ".join(filter(None, [now.note, said])))


def onwards(file: Path) -> str:
    """What to try next, in lines after the table."""
    name = shlex.quote(str(file))
    ways = (f"verify {name}", f"scale {name} --world 1,2", f"explain {name} --compare")
    return "\nnext: " + "\n      ".join(f"unipar {way}" for way in ways)
