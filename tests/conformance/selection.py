"""Which cases are played in which cell: for `make conformance` all, for `make test` each a few times."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cache

from tests.conformance.cases import (
    BITS,
    CASES,
    COMPILED,
    EVERYWHERE,
    MAIN_CASES,
    MESH_CASES,
    MESH_CELLS,
    MESH_EVERYWHERE,
    OURS,
    SHORT_CASES,
    SIZES_ONLY_VARIANT,
    THIN,
    VARIANTS,
)
from tests.conformance.marks import MARKS
from unipar.backend import offered_cells as backend_cells
from unipar.backend import registry
from unipar.backend.offered_cells import is_single_process
from unipar.config import Cell


def select_cases(cell: Cell, size: int, *, whole: bool) -> list[str]:
    """Return the cases of a cell in a world of this size: for `make conformance` all.

    `make test` plays, in worlds of two, each case under some libraries (compiled ones as COMPILED says), each mark
    once, and what every cell must do; in worlds of four, once what needs four ranks. A stranger's cells play all cases
    in worlds of two, some in others.
    """
    names: Collection[str] = CASES
    if cell.axes.ranks > 1 and not whole:
        copies = 2 if cell.shard == "parameters" else 1  # of which each keeps a part of the parameters
        if str(cell) in MESH_CELLS[:3] and size == 2:
            turn = MESH_CELLS.index(str(cell))
            names = [name for i, name in enumerate(MESH_CASES) if name in MESH_EVERYWHERE or i % 3 == turn]
        elif size == copies * cell.axes.ranks:
            names = _short_cases(MESH_CELLS.index(str(cell)), 2 if size == 2 else 1)
        else:
            names = ()
    elif not whole and size == 2:
        names = CASES if cell.backend not in OURS else _covering(cell)
    elif not whole and size == 1:
        thin = _short_cases(THIN.index(str(cell)), 2) if str(cell) in THIN else ()
        names = MAIN_CASES if cell.backend not in OURS[1:] else thin
    elif not whole:
        names = SHORT_CASES if cell.backend not in OURS else _cases_for_four_ranks(cell)
    return [name for name, case in CASES.items() if name in names and case.on(cell)]


def _cases_for_four_ranks(cell: Cell) -> set[str]:
    """Return the cases that need four ranks, and are this cell's: they go round among cells."""
    names: set[str] = set()
    for turn, case in enumerate(case for case in CASES.values() if case.sizes == (4,)):
        able = [c for c in backend_cells.cells_of_backend(registry.find_backend("native")) if case.on(c)]
        if able[turn % len(able)] == cell:
            names.add(case.name)
    return names


def _short_cases(turn: int, count: int) -> set[str]:
    """Return what every cell must do, and so many of the other short cases: they go round among cells."""
    others = [name for name in SHORT_CASES if name not in EVERYWHERE]
    return {*EVERYWHERE, *(others[(turn + i) % len(others)] for i in range(count))}


def _covering(cell: Cell) -> set[str]:
    """Return this cell's part of the cases in worlds of two, and what every cell must do."""
    always = (
        EVERYWHERE if cell.variant == SIZES_ONLY_VARIANT else (*BITS, *EVERYWHERE[1:])
    )  # BITS have four microbatches
    return {*always, *_share_out(cell.backend).get(cell, ())}


@cache
def libraries_of(name: str) -> Collection[str]:
    """Return the libraries under which `make test` plays a case in worlds of two.

    Main cases are played under each; a variant of a case under one, by turns; what compiles where COMPILED says; others
    under native, if they can be, and under one more or none, by turns.
    """
    libraries = OURS[1:]
    if "compile" in CASES[name].more.get("model", {}):
        return {cell.partition("/")[0] for cell, names in COMPILED.items() if name in names}
    if name in MAIN_CASES:
        return libraries
    if name in VARIANTS:
        return (libraries[VARIANTS.index(name) % len(libraries)],)
    cells = {library: backend_cells.cells_of_backend(registry.find_backend(library)) for library in libraries}
    first, *more = (library for library in libraries if any(CASES[name].on(cell) for cell in cells[library]))
    turn = list(CASES).index(name)
    return (first,) if turn % 2 or not more else (first, more[turn // 2 % len(more)])


@cache
def _share_out(backend: str) -> Mapping[Cell, Collection[str]]:
    """Return each cell's cases in worlds of two: they go round among cells without a mark for them."""
    every = backend_cells.cells_of_backend(registry.find_backend(backend))
    shares: dict[Cell, list[str]] = {cell: [] for cell in every if not is_single_process(cell)}
    turn = 0
    for name, case in CASES.items():
        if 2 in case.sizes and (backend in libraries_of(name) or backend not in OURS):
            here = [c for c in shares if case.on(c)]
            able = [c for c in here if not any(mark.fits(c, name, 2) for mark in MARKS)] or here
            if "compile" in case.more.get("model", {}):
                able = [c for c in able if name in COMPILED.get(str(c), ())]
            if able:
                shares[able[turn % len(able)]].append(name)
            turn += 1
    for mark in MARKS:
        both = ((c, name) for c in shares for name, case in CASES.items() if 2 in case.sizes and mark.fits(c, name, 2))
        first = next(both, None)
        if first is not None:
            shares[first[0]].append(first[1])
    return shares
