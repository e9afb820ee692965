"""Checks of a config against its backend: names, options, and every reason why it cannot run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from unipar.backend import registry, resources
from unipar.backend.cells import cell_of, cells_of_backend, check_offers, config_in_cell, is_single_process
from unipar.backend.description import Backend
from unipar.backend.registry import backend_names, find_backend, why_not_installed
from unipar.config import SHARDS, Cell, Config, Precision, Shard
from unipar.config.settled import SettledConfig
from unipar.config.source import ConfigSource, Given, load_config_file, load_given_config
from unipar.config.validation_errors import describe_option_errors
from unipar.errors import BackendNotFound, BackendNotInstalled, ConfigError, Unsupported
from unipar.tracking import tracker


@dataclass(frozen=True, kw_only=True)
class CheckedSource(ConfigSource):
    """Config as given, with all names checked, and the backend and the cell that it selects."""

    backend: Backend
    """Description of the backend; its library may not be installed."""

    cell: Cell

    @property
    def alone(self) -> bool:
        """True if the cell is one process, whatever the config says about ranks."""
        return is_single_process(self.cell, self.backend)


def read_source(file: Path, sets: Sequence[str] = (), overrides: Mapping[str, Any] | None = None) -> CheckedSource:
    """Return the config in a file, with `--set key=value` and a script's overrides applied and its names checked."""
    return check_names(load_config_file(file, sets, overrides))


def given_source(config: Given, overrides: Mapping[str, Any] | None = None) -> CheckedSource:
    """Return the config that a script gave, with its overrides applied and its names checked."""
    source = load_given_config(config, overrides)
    return source if isinstance(source, CheckedSource) else check_names(source)


def check_names(source: ConfigSource) -> CheckedSource:
    """Return the source with its backend; raise if a backend, an option or a tracker has an unknown name.

    Options of backends that are not used are checked too: a typo would only show once the backend is used.
    """
    config = source.config
    if "/" in config.backend:
        cell = Cell.parse(config.backend)
        raise ConfigError(
            f"{source.label}: backend{source.place('backend')}: {config.backend!r} is a cell; "
            f"write backend: {cell.backend} and parallel: {{shard: {cell.shard}}}"
        )
    backend = _find(source, "backend", config.backend)
    for i, name in enumerate(config.log.to):
        try:
            tracker.find_tracker(name)
        except ConfigError as e:
            place = source.place(f"log.to.{i}") or source.place("log.to")
            raise ConfigError(f"{source.label}: log.to{place}: {e}") from None
    for name, options in config.options.items():
        owner = backend if name == config.backend else _find(source, f"options.{name}", name)
        try:
            owner.options.model_validate(options)
        except ValidationError as e:
            sentence = describe_option_errors(e, owner.options, name, source.places)
            raise ConfigError(f"{source.label}: {sentence}") from None
    return _checked(source, backend)


def in_cell(source: ConfigSource, cell: Cell, origin: str = "--backend") -> CheckedSource:
    """Return the same run in another cell, which `origin` asked for."""
    origins = {**source.origins, "backend": origin, "parallel.shard": origin}
    moved = replace(source, config=config_in_cell(source.config, cell), origins=origins)
    return _checked(moved, registry.find_backend(cell.backend))


def settle(config: Config, ranks: int) -> SettledConfig:
    """Check and settle a config that was made in code; raise with every reason why it cannot run."""
    backend = registry.find_backend(config.backend)
    cell = cell_of(config, backend)
    return _settled(config, backend, cell, ranks, resources.choose_device(config)[0])


def settled_in(settled: SettledConfig, cell: Cell) -> SettledConfig:
    """Return a settled config in another cell; raise with every reason why it cannot run there."""
    backend = registry.find_backend(cell.backend)
    config = config_in_cell(settled.config, cell)
    return _settled(config, backend, cell, settled.ranks, settled.device)


def _settled(config: Config, backend: Backend, cell: Cell, ranks: int, device: str) -> SettledConfig:
    check_cell(config, backend, cell)
    ranks = 1 if is_single_process(cell, backend) else ranks
    config.parallel.settle(ranks)
    return SettledConfig.of(config, cell, ranks, device)


def _checked(source: ConfigSource, backend: Backend) -> CheckedSource:
    cell = cell_of(source.config, backend)
    return CheckedSource(
        source.config, source.name, source.folder, source.origins, source.label, backend=backend, cell=cell
    )


def _find(source: ConfigSource, key: str, name: str) -> Backend:
    try:
        return registry.find_backend(name)
    except BackendNotFound as e:
        raise BackendNotFound(f"{source.label}: {key}{source.place(key)}: {e}") from None


def check_can_run(config: Config) -> Backend:
    """Return the backend of `config`; raise with every reason why it cannot run.

    Starts no process and imports no library.
    """
    backend = find_backend(config.backend)
    check_cell(config, backend, cell_of(config, backend))
    if isinstance(config.parallel.data, int):
        config.batch.settle(config.parallel.data)
        config.parallel.settle(config.parallel.data)
    return backend


def check_cell(config: Config, backend: Backend, cell: Cell) -> None:
    """Raise with every reason why `config` cannot run in its cell of this backend. Imports no library."""
    if why := why_not_installed(backend):
        raise BackendNotInstalled(why)
    reasons = list(list_refusals(backend, config, cell))
    if reasons:
        plain = Cell(backend.name, config.parallel.shard)
        raise Unsupported(str(cell if cell in cells_of_backend(backend) else plain), reasons)
    check_offers(backend, cell)


def list_refusals(backend: Backend, config: Config, cell: Cell) -> Iterator[str]:
    """Yield each reason why a backend cannot run a config whose cell is `cell`."""
    can = backend.capabilities
    shard, precision = config.parallel.shard, config.train.precision
    if shard not in can.shards and cell.variant is None:
        yield f"parallel.shard: {shard} is not available; {backend.name} has {', '.join(_describe_shards(backend))}"
    keys: tuple[tuple[Shard | None, Precision], ...] = ((None, precision), (shard, precision))
    for key in keys:
        if key in can.gaps:
            yield f"train.precision: {precision} is not available: {can.gaps[key]}"
    kind = config.device.partition(":")[0]
    if kind != "auto" and kind not in can.devices:
        yield f"device: {config.device} is not supported; {backend.name} runs on {', '.join(can.devices)}"
    if is_single_process(cell, backend) and config.parallel.data not in (1, "auto"):
        yield f"parallel.data: {config.parallel.data} contradicts the cell: {cell} is one process"
    for key, value in _optional_keys_in_use(config).items():
        if value is not None and shard not in can.also.get(key, ()):
            have = [str(Cell(n, s)) for n in backend_names() for s in find_backend(n).capabilities.also.get(key, ())]
            yield f"{key}: {value} is not available here, only in {', '.join(have)}"
    if kind == "cpu":
        yield from _refuse_on_cpu(config)
    yield from backend.refuse(config)


def _describe_shards(backend: Backend) -> Iterator[str]:
    """Yield each shard that the backend offers, with the option that a variant of it needs."""
    can = backend.capabilities
    for shard in SHARDS:
        if shard in can.shards:
            yield shard
            continue
        for variant in can.variants.values():
            if shard in variant.shards:
                options = ", ".join(f"options.{backend.name}.{key}: {value}" for key, value in variant.options.items())
                yield f"{shard} (with {options})"


def _optional_keys_in_use(config: Config) -> dict[str, object]:
    """Return the keys that not every backend supports, with their values; None for a key that is not set."""
    offload = config.model.offload
    return {
        "parallel.shard_over": config.parallel.shard_over,
        "train.sync_every": config.train.sync_every,
        "model.offload": None if offload == "none" else offload,
    }


def _refuse_on_cpu(config: Config) -> Iterator[str]:
    """Yield each reason why a config cannot run on the CPU."""
    if config.train.precision == "fp16":
        yield "train.precision: fp16 needs CUDA, where it is fast; on the CPU use bf16-mixed or fp32"
    if config.model.sync_batchnorm:
        yield "model.sync_batchnorm: true needs CUDA: torch's SyncBatchNorm accepts no CPU tensors; leave it out"
    if config.model.offload != "none":
        yield f"model.offload: {config.model.offload} needs CUDA: on the CPU everything is in host memory; leave it out"
