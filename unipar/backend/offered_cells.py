"""Cells that backends offer, and configs moved to another cell."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from unipar.backend.description import Backend, Variant
from unipar.backend.registry import backend_names, find_backend
from unipar.config import SHARDS, Cell, Config
from unipar.config.sections.cell import AXES, Axes
from unipar.config.sections.parallel import Parallel
from unipar.errors import ConfigError, Unsupported

_AXES_KEYS = (*AXES, "sequence", "schedule")
"""Keys of `parallel` that say how ranks which train on the same samples split the work."""

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
    """Return `config` moved to another cell of a list, with the same global batch and the same number of ranks.

    In a cell of one process, ranks become further microbatches; and so they do in one whose axes leave fewer ranks for
    the data. Keys that have no effect there are left out: a list has cells of several kinds.
    """
    backend = find_backend(cell.backend)
    check_offers(backend, cell)
    can, one = backend.capabilities, is_single_process(cell, backend)
    parallel = _parallel_in_cell(config.parallel, cell, one=one)
    if cell.shard == "nothing":
        parallel = parallel.model_copy(update={"shard_over": None})
    options = dict(config.options)
    if cell.variant:
        options[backend.name] = _with_variant(options.get(backend.name, {}), can.variants[cell.variant], cell)
    elif backend.name in options:
        options[backend.name] = _without_variants(options[backend.name], can.variants.values())
    moved = _with_parallel(config.changed({"backend": cell.backend, "options": options}), parallel, one=one)
    if one:
        moved = moved.changed({"train.sync_every": None})
    return _without_idle_options(moved, backend)


def named_cell(config: Config, text: str) -> tuple[Cell, dict[str, Any]]:
    """Return the cell of a config once a text such as `native/parameters+tensor2` is applied, and the keys it names.

    Keys that it does not name stay: a bare backend keeps `parallel.shard`. A cell of one process names all of them.
    """
    cell = Cell.parse(text)
    backend = find_backend(cell.backend)
    check_offers(backend, cell)
    named: dict[str, Any] = {"backend": cell.backend}
    if is_single_process(cell, backend):
        named |= {"parallel.data": 1, "parallel.shard": "nothing"}
        named |= {f"parallel.{name}": getattr(Axes(), name) for name in _AXES_KEYS}
        return cell, named
    if "/" in text:
        named["parallel.shard"] = cell.shard
    named |= {f"parallel.{n}": v for n in _AXES_KEYS if (v := getattr(cell.axes, n)) != getattr(Axes(), n)}
    variant = backend.capabilities.variants[cell.variant].options if cell.variant else {}
    named |= {f"options.{backend.name}.{key}": value for key, value in variant.items()}
    parallel = {key.partition(".")[2]: value for key, value in named.items() if key.startswith("parallel.")}
    kept = config.parallel.model_copy(update=parallel)
    given = {**config.options.get(backend.name, {}), **variant}
    options = {**config.options, backend.name: given}
    return cell_of(config.changed({"backend": backend.name, "parallel": kept, "options": options}), backend), named


def config_with_cell(config: Config, cell: Cell, *, keep_data: bool = False) -> Config:
    """Return `config` in a cell as `named_cell` gives it, with the same global batch; every other key stays.

    The number of ranks stays too, and `parallel.data` follows from it, unless `keep_data`.
    """
    backend = find_backend(cell.backend)
    one = is_single_process(cell, backend)
    parallel = _parallel_in_cell(config.parallel, cell, one=one)
    if keep_data:
        parallel = parallel.model_copy(update={"data": config.parallel.data})
    options = dict(config.options)
    if cell.variant:
        variant = backend.capabilities.variants[cell.variant]
        options[backend.name] = {**options.get(backend.name, {}), **variant.options}
    return _with_parallel(config.changed({"backend": cell.backend, "options": options}), parallel, one=one)


def _parallel_in_cell(parallel: Parallel, cell: Cell, *, one: bool) -> Parallel:
    """Return the section `parallel` of a cell, on as many ranks."""
    axes, data = cell.axes, parallel.data
    if one:
        data = 1
    elif isinstance(ranks := parallel.ranks, int):
        data = count_data_ranks(ranks, cell)
    keys = {name: getattr(axes, name) for name in _AXES_KEYS}
    return parallel.model_copy(update={"data": data, "shard": cell.shard, **keys})


def _with_parallel(config: Config, parallel: Parallel, *, one: bool) -> Config:
    """Return `config` with another section `parallel`, and the same global batch; `one`: in one process."""
    before, data, batch = config.parallel.data, parallel.data, config.batch
    other = one or data != before
    if batch.tokens is not None:
        if isinstance(before, int) and isinstance(data, int):
            batch = batch.on_other_ranks(before, data)
    elif other and batch.total is None and isinstance(before, int):
        sizes = batch.settle(before)  # the same microbatches, one after another
        batch = batch.model_copy(update={"total": sizes.total, "accumulate": None})
    elif other and batch.micro is None and isinstance(before, int):
        batch = batch.model_copy(update={"micro": batch.settle(before).micro, "accumulate": None})
    elif other and batch.micro is not None:
        batch = batch.model_copy(update={"accumulate": None})
    return config.model_copy(update={"parallel": parallel, "batch": batch})


def _without_idle_options(config: Config, backend: Backend) -> Config:
    """Return the config without options that have no effect in its cell."""
    options = {name: dict(given) for name, given in config.options.items()}
    for key, _ in backend.idle_options(config):
        _, name, option = key.split(".")
        del options[name][option]
    return config.model_copy(update={"options": options})


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
