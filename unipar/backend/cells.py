"""Cells that backends offer, and configs moved to another cell."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from unipar.backend.description import Backend, Variant
from unipar.backend.registry import backend_names, find_backend
from unipar.config import SHARDS, Cell, Config, Shard
from unipar.config.sections.cell import AXES
from unipar.config.sections.parallel import Parallel
from unipar.errors import ConfigError, Unsupported

ONE = Cell("single")
"""Cell of one process without a wrapper: the reference that all other cells are compared with."""


def cells_of_backend(backend: Backend) -> list[Cell]:
    """Return all cells of a backend: first those without a variant, in the order of `SHARDS`."""
    can = backend.capabilities
    plain = [Cell(backend.name, shard) for shard in SHARDS if shard in can.shards]
    return plain + [Cell(backend.name, s, v) for v, x in can.variants.items() for s in SHARDS if s in x.shards]


def expand_cell_patterns(patterns: tuple[str, ...]) -> list[Cell]:
    """Return the cells that the patterns name, in order, each once.

    `*` is every cell of every installed backend, `name/*` the cells of one backend that have no variant.
    """
    cells: dict[Cell, None] = {}
    for text in patterns:
        if text == "*":
            cells.update(dict.fromkeys(c for n in backend_names() for c in cells_of_backend(find_backend(n))))
        elif text.endswith("/*"):
            cells.update(
                dict.fromkeys(c for c in cells_of_backend(find_backend(text.removesuffix("/*"))) if not c.variant)
            )
        else:
            cells[require_cell(Cell.parse(text))] = None
    return list(cells)


def require_cell(cell: Cell) -> Cell:
    """Return `cell`; raise Unsupported, which lists the existing cells, if its backend has no such cell."""
    check_offers(find_backend(cell.backend), cell)
    return cell


def check_offers(backend: Backend, cell: Cell) -> None:
    """Raise Unsupported if the backend has no such cell."""
    if cell.without_axes in cells_of_backend(backend):
        for reason in refuse_axes(backend, cell):
            raise Unsupported(str(cell), [reason])
        return
    have = ", ".join(map(str, cells_of_backend(backend)))
    if cell.variant and cell.variant not in backend.capabilities.variants:
        raise Unsupported(str(cell), [f"{cell.backend} has no variant {cell.variant!r}; its cells: {have}"])
    raise Unsupported(str(cell), [f"there is no such cell; {cell.backend} has: {have}"])


def refuse_axes(backend: Backend, cell: Cell) -> Iterator[str]:
    """Yield a sentence for each axis of the mesh that the backend does not have in this cell."""
    for name, size in cell.axes.sizes.items():
        if cell.shard not in backend.capabilities.axes.get(name, ()):
            have = [f"{n}/{s}" for n in backend_names() for s in find_backend(n).capabilities.axes.get(name, ())]
            where = f"only in {', '.join(have)}" if have else "in no backend yet"
            why = backend.capabilities.axes_lacked.get(name)
            yield f"parallel.{name}: {size} is not available here, {where}" + (f": {why}" if why else "")


def cell_of(config: Config, backend: Backend | None = None) -> Cell:
    """Return the cell that a config runs in; its backend's options decide on the variant; `backend` spares a lookup."""
    backend = backend or find_backend(config.backend)
    given = config.options.get(backend.name, {})
    for name, variant in backend.capabilities.variants.items():
        if variant.options.items() <= given.items():
            return Cell(backend.name, config.parallel.shard, name, config.parallel.axes)
    return Cell(backend.name, config.parallel.shard, axes=config.parallel.axes)


def is_single_process(cell: Cell, backend: Backend | None = None) -> bool:
    """Return whether the cell is one process, whatever a config says about ranks; `backend` spares a lookup."""
    can = (backend or find_backend(cell.backend)).capabilities
    return can.alone or (cell.variant is not None and can.variants[cell.variant].alone)


def config_in_cell(config: Config, cell: Cell) -> Config:
    """Return `config` moved to another cell, with the same global batch.

    In a cell of one process, ranks become further microbatches; and so they do in one whose axes leave fewer ranks for
    the data, because the number of ranks in all stays the same.
    """
    backend = find_backend(cell.backend)
    check_offers(backend, cell)
    can, one = backend.capabilities, is_single_process(cell, backend)
    shard: Shard = cell.shard
    data, over = config.parallel.data, config.parallel.shard_over
    axes = cell.axes
    if one:
        data = 1
    elif isinstance(ranks := config.parallel.ranks, int):
        data = count_data_ranks(ranks, cell)
    parallel = Parallel(
        data=data,
        shard=shard,
        shard_over=None if shard == "nothing" else over,  # it has a meaning only where something is split
        **{name: getattr(axes, name) for name in (*AXES, "sequence", "schedule")},
    )
    options = dict(config.options)
    if cell.variant:
        options[backend.name] = _with_variant(options.get(backend.name, {}), can.variants[cell.variant], cell)
    elif backend.name in options:
        options[backend.name] = _without_variants(options[backend.name], can.variants.values())
    batch, other = config.batch, one or data != config.parallel.data
    if batch.tokens is not None:
        before = config.parallel.data
        if isinstance(before, int) and isinstance(data, int):
            batch = batch.on_other_ranks(before, data)
    elif other and batch.total is None and isinstance(config.parallel.data, int):
        sizes = batch.settle(config.parallel.data)  # the same microbatches, one after another
        batch = batch.model_copy(update={"total": sizes.total, "accumulate": None})
    elif other and batch.micro is None and isinstance(config.parallel.data, int):
        batch = batch.model_copy(update={"micro": batch.settle(config.parallel.data).micro, "accumulate": None})
    elif other and batch.micro is not None:
        batch = batch.model_copy(update={"accumulate": None})
    return config.model_copy(update={"backend": cell.backend, "parallel": parallel, "options": options, "batch": batch})


def count_data_ranks(ranks: int, cell: Cell) -> int:
    """Return how many parts of a batch so many ranks train on; raise ConfigError if the cell's sizes do not fit."""
    data, left = divmod(ranks, cell.axes.ranks)
    if left:
        raise ConfigError(f"{cell} needs a multiple of {cell.axes.ranks} ranks ({cell.axes}), and there are {ranks}")
    return data


def _with_variant(given: Mapping[str, Any], variant: Variant, cell: Cell) -> dict[str, Any]:
    for key, value in variant.options.items():
        if key in given and given[key] != value:
            raise ConfigError(
                f"options.{cell.backend}.{key}: {given[key]!r} contradicts the cell {cell}, which sets it to {value!r}"
            )
    return {**given, **variant.options}


def _without_variants(given: Mapping[str, Any], variants: Iterable[Variant]) -> dict[str, Any]:
    """Return the options without those that select a variant."""
    selecting = [v.options for v in variants if v.options.items() <= given.items()]
    return {key: value for key, value in given.items() if not any(key in options for options in selecting)}
