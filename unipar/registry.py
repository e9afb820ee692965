"""Finding a backend by its name, and what it says of a config. Ours are found in the same way as anyone's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any

from typing_extensions import TypeIs

from unipar.backend import Backend, Variant
from unipar.config import SHARDS, Cell, Config, Parallel, Precision, Shard
from unipar.errors import BackendNotFound, BackendNotInstalled, ConfigError, Unsupported
from unipar.place import Launcher
from unipar.points import PluginGroup


def _is_backend(plugin: object) -> TypeIs[Backend]:
    return isinstance(plugin, Backend)


BACKENDS = PluginGroup(
    "unipar.backends", "backend", "backend {!r}", "an instance of Backend", _is_backend, BackendNotFound
)

ONE = Cell("single")
"""The cell of one process without a wrapper: what all others are held to."""


def names() -> list[str]:
    """Return the names of all backends that are installed."""
    return BACKENDS.names()


@cache
def find(name: str) -> Backend:
    """Return the description of a backend; its library may be missing."""
    return BACKENDS.find(name)


def missing(backend: Backend) -> str | None:
    """Return why the backend cannot be loaded, or None. Imports nothing."""
    return BACKENDS.missing(backend.name, backend.requires, backend.hint)


def load(name: str) -> Backend:
    """Return the description of a backend whose library is installed."""
    backend = find(name)
    BACKENDS.require(backend.name, backend.requires, backend.hint)
    return backend


def cells(backend: Backend) -> list[Cell]:
    """All that a backend offers: plain cells first, in the order of what they split."""
    can = backend.capabilities
    plain = [Cell(backend.name, shard) for shard in SHARDS if shard in can.shards]
    return plain + [Cell(backend.name, s, v) for v, x in can.variants.items() for s in SHARDS if s in x.shards]


def expand(patterns: tuple[str, ...]) -> list[Cell]:
    """`*` is every cell of every backend known, `name/*` the plain ones of one; each cell once, in order."""
    made: dict[Cell, None] = {}
    for text in patterns:
        if text == "*":
            made.update(dict.fromkeys(c for n in names() for c in cells(find(n))))
        elif text.endswith("/*"):
            made.update(dict.fromkeys(c for c in cells(find(text.removesuffix("/*"))) if not c.variant))
        else:
            made[existing(Cell.parse(text))] = None
    return list(made)


def existing(cell: Cell) -> Cell:
    """`cell`, or the sentence that says which ones there are."""
    _check_offers(find(cell.backend), cell)
    return cell


def _check_offers(backend: Backend, cell: Cell) -> None:
    """Raise Unsupported where the backend has no such cell."""
    if cell in cells(backend):
        return
    have = ", ".join(map(str, cells(backend)))
    if cell.variant and cell.variant not in backend.capabilities.variants:
        raise Unsupported(str(cell), [f"{cell.backend} has no variant {cell.variant!r}; its cells: {have}"])
    raise Unsupported(str(cell), [f"there is no such cell; {cell.backend} has: {have}"])


def cell_of(config: Config) -> Cell:
    """The cell that a config runs in: its options say which variant."""
    return cell_in(find(config.backend), config)


def cell_in(backend: Backend, config: Config) -> Cell:
    """Return the cell that a config of this backend runs in."""
    given = config.options.get(backend.name, {})
    for name, variant in backend.capabilities.variants.items():
        if variant.options.items() <= given.items():
            return Cell(backend.name, config.parallel.shard, name)
    return Cell(backend.name, config.parallel.shard)


def alone(cell: Cell) -> bool:
    """Whether the cell is one process, whatever a config says about ranks."""
    return is_alone(find(cell.backend), cell)


def is_alone(backend: Backend, cell: Cell) -> bool:
    """Return whether a cell of this backend is one process, whatever a config says about ranks."""
    can = backend.capabilities
    return can.alone or (cell.variant is not None and can.variants[cell.variant].alone)


def at(config: Config, cell: Cell) -> Config:
    """`config`, run in another cell; what it says about batch and data keeps its meaning."""
    backend = find(cell.backend)
    _check_offers(backend, cell)
    can, one = backend.capabilities, is_alone(backend, cell)
    shard: Shard = cell.shard
    data, over = config.parallel.data, config.parallel.shard_over
    # ranks that split nothing have nothing to say about how many of them share it
    parallel = Parallel(data=1 if one else data, shard=shard, shard_over=None if shard == "nothing" else over)
    options = dict(config.options)
    if cell.variant:
        options[backend.name] = _with_variant(options.get(backend.name, {}), can.variants[cell.variant], cell)
    elif backend.name in options:
        options[backend.name] = _without_variants(options[backend.name], can.variants.values())
    batch = config.batch
    if one and batch.total is None and isinstance(config.parallel.data, int):
        sizes = batch.settle(config.parallel.data)  # the same global batch and the same microbatches, one after another
        batch = batch.model_copy(update={"total": sizes.total, "accumulate": None})
    elif one and batch.micro is None and isinstance(config.parallel.data, int):
        batch = batch.model_copy(update={"micro": batch.settle(config.parallel.data).micro, "accumulate": None})
    elif one and batch.micro is not None:
        batch = batch.model_copy(update={"accumulate": None})
    return config.model_copy(update={"backend": cell.backend, "parallel": parallel, "options": options, "batch": batch})


def _with_variant(given: Mapping[str, Any], variant: Variant, cell: Cell) -> dict[str, Any]:
    for key, value in variant.options.items():
        if key in given and given[key] != value:
            raise ConfigError(
                f"options.{cell.backend}.{key}: {given[key]!r} contradicts the cell {cell}, which sets it to {value!r}"
            )
    return {**given, **variant.options}


def _without_variants(given: Mapping[str, Any], variants: Iterable[Variant]) -> dict[str, Any]:
    """The options of a plain cell, where the config's own would make another of it."""
    made = [v.options for v in variants if v.options.items() <= given.items()]
    return {key: value for key, value in given.items() if not any(key in options for options in made)}


def check(config: Config) -> Backend:
    """The backend of `config`, or every reason why it cannot run. Starts nothing, imports no library."""
    backend = find(config.backend)
    check_cell(config, backend, cell_in(backend, config))
    if isinstance(config.parallel.data, int):
        config.batch.settle(config.parallel.data)
        config.parallel.settle(config.parallel.data)
    return backend


def check_cell(config: Config, backend: Backend, cell: Cell) -> None:
    """Raise with every reason why `config` cannot run in its cell of this backend. Imports no library."""
    if why := missing(backend):
        raise BackendNotInstalled(why)
    reasons = list(refusals(backend, config, cell))
    if reasons:
        plain = Cell(backend.name, config.parallel.shard)
        raise Unsupported(str(cell if cell in cells(backend) else plain), reasons)
    _check_offers(backend, cell)


def refusals(backend: Backend, config: Config, cell: Cell) -> Iterator[str]:
    """Each reason why a backend cannot run a config, which is in `cell`."""
    can = backend.capabilities
    shard, precision = config.parallel.shard, config.train.precision
    if shard not in can.shards and cell.variant is None:
        yield f"parallel.shard: {shard} is not there; {backend.name} has {', '.join(_shards(backend))}"
    keys: tuple[tuple[Shard | None, Precision], ...] = ((None, precision), (shard, precision))
    for key in keys:
        if key in can.gaps:
            yield f"train.precision: {precision} cannot be had: {can.gaps[key]}"
    kind = config.device.partition(":")[0]
    if kind != "auto" and kind not in can.devices:
        yield f"device: {config.device} is not among its devices ({', '.join(can.devices)})"
    if is_alone(backend, cell) and config.parallel.data not in (1, "auto"):
        yield f"parallel.data: {config.parallel.data} contradicts it: {cell} is one process"
    for key, value in _asked(config).items():
        if value is not None and shard not in can.also.get(key, ()):
            have = [str(Cell(n, s)) for n in names() for s in find(n).capabilities.also.get(key, ())]
            yield f"{key}: {value} cannot be had here; what can: {', '.join(have)}"
    if kind == "cpu":
        yield from _cuda_only(config)
    yield from backend.refuse(config)


def _shards(backend: Backend) -> Iterator[str]:
    """What it splits, and by which option where it needs one."""
    can = backend.capabilities
    for shard in SHARDS:
        if shard in can.shards:
            yield shard
            continue
        for variant in can.variants.values():
            if shard in variant.shards:
                said = ", ".join(f"options.{backend.name}.{key}: {value}" for key, value in variant.options.items())
                yield f"{shard} (with {said})"


def _asked(config: Config) -> dict[str, object]:
    """The keys that not every backend obeys, where somebody gave them."""
    offload = config.model.offload
    return {
        "parallel.shard_over": config.parallel.shard_over,
        "train.sync_every": config.train.sync_every,
        "model.offload": None if offload == "none" else offload,
    }


def _cuda_only(config: Config) -> Iterator[str]:
    """What a config asks for that the CPU does not have."""
    if config.train.precision == "fp16":
        yield "train.precision: fp16 needs CUDA, where it is fast; on the CPU use bf16-mixed or fp32"
    if config.model.sync_batchnorm:
        yield "model.sync_batchnorm: true needs CUDA: torch's SyncBatchNorm takes no tensor of the CPU; leave it out"
    if config.model.offload != "none":
        yield f"model.offload: {config.model.offload} needs CUDA: on the CPU all is in the host's memory; leave it out"


def launchers() -> list[Launcher]:
    """Every launcher that some backend knows."""
    return [launcher for name in names() for launcher in find(name).capabilities.launchers]
