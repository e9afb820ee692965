"""Checks of a config against its backend: names, options, and every reason why it cannot run."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from unipar.backend import registry, resources
from unipar.backend.description import Backend
from unipar.backend.offered_strategies import (
    check_offers,
    config_in_strategy,
    config_with_strategy,
    is_single_process,
    is_strategy_name,
    named_strategy,
    read_strategy,
    refuse_axes,
    strategies_of_backend,
    strategy_of,
)
from unipar.backend.precision import FP8_RECIPES
from unipar.backend.refusals import OFFLOADED_ACTIVATIONS, REFUSALS_OF_MODEL, conditions_of, refusals_met
from unipar.backend.registry import backend_names, find_backend, why_not_installed
from unipar.config import SHARDS, Config, Precision, Section, Shard, Strategy
from unipar.config.config import Trace
from unipar.config.config_source import (
    INTERVALS,
    KEPT_ORIGIN,
    OVERRIDES,
    ConfigSource,
    Given,
    keep_changes,
    load_config_file,
    load_given_config,
)
from unipar.config.foreign_words import advise_on_value
from unipar.config.job_system import find_job_system, job_system_names
from unipar.config.sections.machines import Machines
from unipar.config.settled import NO_CHANGES, Changes, SettledConfig
from unipar.config.validation_errors import KeyOrigins, join_mistakes, list_option_mistakes
from unipar.distributed.place import Place
from unipar.errors import BackendNotFound, BackendNotInstalled, ConfigError, UniparError, Unsupported, WorldMismatch
from unipar.tracking import tracker
from unipar.utils.mappings import nested_mapping, value_at
from unipar.utils.text import did_you_mean, show_value, yaml_word


@dataclass(frozen=True, kw_only=True)
class CheckedSource(ConfigSource):
    """Config as given, with all names checked, and the backend and the strategy that it selects."""

    backend: Backend
    """Description of the backend; its library may not be installed."""

    strategy: Strategy

    @property
    def alone(self) -> bool:
        """True if the strategy is one process, whatever the config says about ranks."""
        return is_single_process(self.strategy, self.backend)


def read_source(
    file: Path, sets: Sequence[str] = (), overrides: Mapping[str, Any] | None = None, more: Sequence[Path] = ()
) -> CheckedSource:
    """Return the config in a file, changed by `more` files, `--set key=value` and overrides, with its names checked."""
    return check_names(load_config_file(file, sets, overrides, _name_sentences, more))


def given_source(config: Given, overrides: Mapping[str, Any] | None = None) -> CheckedSource:
    """Return the config that a script gave, with its overrides applied and its names checked."""
    source = load_given_config(config, overrides, _name_sentences)
    return source if isinstance(source, CheckedSource) else check_names(source)


def with_earlier_changes(source: ConfigSource, earlier: Sequence[tuple[str, Any]]) -> CheckedSource:
    """Return a config with the changes that an earlier command made, as far as this one does not make them anew."""
    return check_names(keep_changes(source, earlier, _name_sentences))


def check_names(source: ConfigSource) -> CheckedSource:
    """Return the source with its backend; raise if a backend, an option or a tracker has an unknown name.

    Options of backends that are not used are checked too: a typo would only show once the backend is used.
    """
    config = source.config
    named: dict[str, Any] = {"backend": config.backend, "log": {"to": config.log.to}, "options": config.options}
    if config.machines is not None:
        named["machines"] = {"on": config.machines.on, **config.machines.options}
    mistakes = list(_name_mistakes(named, source.places))
    if mistakes:
        kind = mistakes[0][0] if len(mistakes) == 1 else ConfigError
        raise kind(f"{source.label}: {join_mistakes([sentence for _, sentence in mistakes])}")
    return _checked(source, find_backend(config.backend))


def _name_sentences(data: Mapping[str, Any], places: KeyOrigins) -> Iterator[str]:
    return (sentence for _, sentence in _name_mistakes(data, places))


def _name_mistakes(data: Mapping[str, Any], places: KeyOrigins) -> Iterator[tuple[type[UniparError], str]]:
    """Yield each wrong name in a config as the error's type and a sentence; what is no name at all is left out."""
    backend, to, options = data.get("backend"), nested_mapping(data, "log").get("to"), nested_mapping(data, "options")
    if isinstance(backend, str) and is_strategy_name(backend):
        yield ConfigError, f"backend{_place(places, 'backend')}: {_refuse_strategy(backend)}"
    elif isinstance(backend, str):
        yield from _unknown_backend(backend, "backend", places)
    names: list[Any] = list(to) if isinstance(to, list | tuple) else []
    for i, name in enumerate(names):
        try:
            if isinstance(name, str):
                tracker.find_tracker(name)
        except ConfigError as e:
            yield ConfigError, f"log.to{_place(places, f'log.to.{i}') or _place(places, 'log.to')}: {e}"
    for name, section in options.items():
        unknown = list(_unknown_backend(name, f"options.{name}", places))
        yield from unknown
        if not unknown and isinstance(section, dict):
            for sentence in _option_mistakes(find_backend(name).options, section, f"options.{name}", places):
                yield ConfigError, sentence
    for sentence in _machines_mistakes(nested_mapping(data, "machines"), places):
        yield ConfigError, sentence


def _option_mistakes(
    options: type[Section], values: Mapping[str, Any], section: str, places: KeyOrigins
) -> Iterator[str]:
    try:
        options.model_validate(values)
    except ValidationError as e:
        yield from list_option_mistakes(e, options, section, places)


def _machines_mistakes(machines: Mapping[str, Any], places: KeyOrigins) -> Iterator[str]:
    """Yield a sentence for each key of `machines` that is neither its own nor a job system, and for wrong options."""
    own, systems = list(Machines.model_fields), job_system_names()
    if isinstance(on := machines.get("on"), str):
        try:
            find_job_system(on)
        except ConfigError as e:
            yield f"machines.on{_place(places, 'machines.on')}: {e}"
    for name, section in machines.items():
        key = f"machines.{name}"
        if name in own:
            continue
        if name not in systems:
            homes = [system for system in systems if name in find_job_system(system).options.model_fields]
            near = did_you_mean(name, [*own, *systems])
            near = near or (f"; did you mean machines.{homes[0]}.{name}?" if homes else "")
            near = near or f"; machines has {', '.join(own + systems)}"
            yield f"{key}{_place(places, key)}: there is no such key{near}"
        elif not isinstance(section, dict):
            options = ", ".join(find_job_system(name).options.model_fields)
            yield f"{key}{_place(places, key)}: wanted a section with the keys {options}, got {show_value(section)}"
        else:
            yield from _option_mistakes(find_job_system(name).options, section, key, places)


def _place(places: KeyOrigins, key: str) -> str:
    return f" ({places[key]})" if key in places else ""


def _refuse_strategy(backend: str) -> str:
    try:
        strategy = read_strategy(backend)
    except ConfigError as e:
        return str(e)
    return f"{backend!r} is a strategy; write backend: {strategy.backend} and parallel: {{shard: {strategy.shard}}}"


def _unknown_backend(name: str, key: str, places: KeyOrigins) -> Iterator[tuple[type[UniparError], str]]:
    try:
        find_backend(name)
    except BackendNotFound as e:
        advice = advise_on_value("backend", name)
        why = f"no backend {name!r}; {advice}" if advice else str(e)
        yield BackendNotFound, f"{key}{_place(places, key)}: {why}"


STRATEGY: Final = "--backend"
"""Key of a change that moves a config to another strategy."""


def in_strategy(source: ConfigSource, text: str, origin: str = STRATEGY) -> CheckedSource:
    """Return the same run in the strategy that `origin` names, on as many ranks; keys that it does not name stay.

    Raise ConfigError if another argument of the command, or an override, says otherwise.
    """
    config, places = source.config, source.origins
    strategy, named = named_strategy(config, text)
    for key, value in named.items():
        if (said := places.get(key)) in OVERRIDES and (other := value_at(config, key)) != value:
            raise ConfigError(
                f"{origin} {text} sets {key}: {yaml_word(value)}, and {said} sets {key}: {yaml_word(other)}; leave one "
                "of them out"
            )
    of_data = places.get("parallel.data")
    keep_data = (of_data in OVERRIDES or of_data == origin == KEPT_ORIGIN) and "parallel.data" not in named
    ranks, least = config.parallel.ranks, strategy.axes.fewest_ranks
    if isinstance(ranks, int) and ranks % least and not keep_data:
        raise ConfigError(
            f"{origin}: {strategy} needs a multiple of {least} ranks ({strategy.axes}), and the config has {ranks}: "
            f"set parallel.data to {least}, or to a multiple of it"
        )
    origins = {**places, **dict.fromkeys(named, origin)}
    moved = replace(
        source,
        config=config_with_strategy(config, strategy, keep_data=keep_data),
        origins=origins,
        changes=(*source.changes, (STRATEGY, text, origin)),
    )
    return _checked(moved, registry.find_backend(strategy.backend))


def settle_run(
    source: CheckedSource, device: str, place: Place | None, changes: Changes
) -> tuple[SettledConfig, resources.RankCount]:
    """Return the config of a run, checked, settled and changed, and its ranks; raise with every reason against it.

    `device`: what `choose_device` returned; `place`: this process's in the world of a foreign launcher.
    """
    config = source.config.on_device(device) if device == "cpu" else source.config
    check_strategy(config, source.backend, source.strategy, source.places)
    ranks = resources.ranks_in(source.strategy, source.config, place, alone=source.alone)
    if place is not None and place.size != ranks.number:
        raise WorldMismatch(f"{place.launcher} started {place.size} processes, and {ranks.why}; start it with python")
    local = None if place is None else place.local_size
    refuse_absent_ranks(config.log.trace, ranks.number, source.origins)
    return settle_source(source, ranks.number, device, local, launched=place is not None, changes=changes), ranks


def refuse_absent_ranks(trace: Trace | None, ranks: int, places: KeyOrigins) -> None:
    """Raise ConfigError if a rank is to be traced that the run does not have; `places`: origins of keys."""
    if trace is not None and max(trace.ranks) >= ranks:
        have = f"{ranks} ranks, 0 to {ranks - 1}" if ranks > 1 else "one rank, 0"
        key = "log.trace.ranks"
        raise ConfigError(
            f"{key}{_place(places, key)}: there is no rank {max(trace.ranks)}, the run has {have}; leave it out"
        )


def settle_source(
    source: CheckedSource,
    ranks: int,
    device: str,
    local: int | None = None,
    asked: str = "parallel.data",
    *,
    launched: bool = False,
    changes: Changes = NO_CHANGES,
) -> SettledConfig:
    """Return a config settled for this many ranks, `local` of them here, and changed; errors name the key `asked`.

    `launched`: whether a foreign launcher has started the ranks.
    """
    settled = SettledConfig.of(source.config, source.strategy, ranks, device, changes)
    resources.check_device_count(settled.on_device, ranks, local, asked, launched=launched)
    return settled


def settle(config: Config, ranks: int) -> SettledConfig:
    """Check and settle a config that was made in code; raise with every reason why it cannot run."""
    backend = registry.find_backend(config.backend)
    strategy = strategy_of(config, backend)
    return _settled(config, backend, strategy, ranks, resources.choose_device(config)[0])


def settled_in(settled: SettledConfig, strategy: Strategy, changes: Changes) -> SettledConfig:
    """Return a settled config in another strategy, then changed; raise with every reason why it cannot run there."""
    backend = registry.find_backend(strategy.backend)
    config = config_in_strategy(settled.config, strategy)
    return _settled(config, backend, strategy, settled.ranks, settled.device, changes)


def _settled(
    config: Config, backend: Backend, strategy: Strategy, ranks: int, device: str, changes: Changes = NO_CHANGES
) -> SettledConfig:
    check_strategy(config, backend, strategy)
    ranks = 1 if is_single_process(strategy, backend) else ranks
    return SettledConfig.of(config, strategy, ranks, device, changes)


def _checked(source: ConfigSource, backend: Backend) -> CheckedSource:
    strategy = strategy_of(source.config, backend)
    values = {field.name: getattr(source, field.name) for field in fields(ConfigSource)}
    return CheckedSource(**values, backend=backend, strategy=strategy)


def check_can_run(config: Config) -> Backend:
    """Return the backend of `config`; raise with every reason why it cannot run.

    Starts no process and imports no library.
    """
    backend = find_backend(config.backend)
    check_strategy(config, backend, strategy_of(config, backend))
    if isinstance(ranks := config.parallel.ranks, int):
        SettledConfig.of(config, strategy_of(config, backend), ranks, "cpu")
    return backend


def check_strategy(config: Config, backend: Backend, strategy: Strategy, places: KeyOrigins | None = None) -> None:
    """Raise with every reason why `config` cannot run in its strategy of this backend. Imports no library.

    `places`: origins of keys, which the reasons then name.
    """
    if why := why_not_installed(backend):
        raise BackendNotInstalled(why)
    for key, its in config.train.optimizers.items():
        if (package := its.package) and find_spec(package) is None:
            raise BackendNotInstalled(
                f"{key}.name: {its.name} needs {package}, not installed here: pip install 'unipar[{package}]'"
            )
    if config.train.precision in FP8_RECIPES and find_spec("torchao") is None:
        raise BackendNotInstalled(
            f"train.precision: {config.train.precision} needs torchao, not installed here: pip install "
            "'unipar[torchao]'; or take bf16-mixed"
        )
    places = places or {}
    reasons = [_with_place(reason, places) for reason in list_refusals(backend, config, strategy)]
    if reasons:
        plain = Strategy(backend.name, config.parallel.shard, axes=strategy.axes)
        title = str(strategy if strategy.without_axes in strategies_of_backend(backend) else plain)
        chosen = [places[key] for key in ("backend", "parallel.shard") if places.get(key, "").startswith("--")]
        raise Unsupported(title + (f" ({' and '.join(dict.fromkeys(chosen))})" if chosen else ""), reasons)
    check_offers(backend, strategy)


def _with_place(reason: str, places: KeyOrigins) -> str:
    """Return a reason that begins with a key with the origin of that key."""
    key, colon, rest = reason.partition(":")
    return f"{key}{_place(places, key)}:{rest}" if colon and key in places else reason


def list_refusals(backend: Backend, config: Config, strategy: Strategy) -> Iterator[str]:
    """Yield each reason why a backend cannot run a config whose strategy is `strategy`."""
    can = backend.capabilities
    shard, precision = config.parallel.shard, config.train.precision
    if shard not in can.shards and strategy.variant is None:
        yield f"parallel.shard: {shard} is not available; {backend.name} has {', '.join(_describe_shards(backend))}"
    keys: tuple[tuple[Shard | None, Precision], ...] = ((None, precision), (shard, precision))
    for key in keys:
        if key in can.gaps:
            yield f"train.precision: {precision} is not available: {can.gaps[key]}"
    kind = config.device.partition(":")[0]
    if kind != "auto" and kind not in can.devices:
        yield f"device: {config.device} is not supported; {backend.name} runs on {', '.join(can.devices)}"
    if is_single_process(strategy, backend) and config.parallel.data not in (1, "auto"):
        yield f"parallel.data: {config.parallel.data} contradicts the strategy: {strategy} is one process"
    conditions = conditions_of(config)
    for key in ("parallel.shard_over", "train.local_steps", "model.offload"):
        if key in conditions and shard not in can.also.get(key, ()):
            have = [
                str(Strategy(n, s)) for n in backend_names() for s in find_backend(n).capabilities.also.get(key, ())
            ]
            yield f"{conditions[key]} is not available here, only in {', '.join(have)}"
    yield from refuse_axes(backend, strategy)
    yield from refusals_met(conditions)
    yield from refusals_met(conditions, REFUSALS_OF_MODEL)
    if kind == "mps" and config.model.offloads_activations:
        yield f"{OFFLOADED_ACTIVATIONS} is not available with device: mps, which has no memory of its own; leave it out"
    if kind == "cpu":
        yield from _refuse_on_cpu(config)
    if precision in FP8_RECIPES and kind not in ("auto", "cpu", "cuda"):
        yield f"train.precision: {precision} needs CUDA, or the CPU for trials, and device is {kind}: take bf16-mixed"
    for key, why in backend.idle_options(config) if config.options else ():
        yield f"{key}: {yaml_word(value_at(config, key))} has no effect: {why}; leave it out"
    yield from backend.refuse(config)
    for other in map(find_backend, backend_names()):
        if any(variable.startswith(other.launch_variables) for variable in os.environ):
            yield from other.launch_refusals(config)


def check_run_settings(source: CheckedSource, launcher: str = "") -> None:
    """Raise ConfigError with a sentence for each key that is set and has no effect in a run.

    `launcher`: name of the foreign launcher that starts the ranks; "" if unipar starts them.
    """
    if idle := list(_idle_settings(source, launcher)):
        raise ConfigError(f"{source.label}: {join_mistakes(idle)}")


def _idle_settings(source: CheckedSource, launcher: str) -> Iterator[str]:
    config, explicit = source.config, source.origins
    steps, batch = config.train.steps, config.batch
    for key in INTERVALS:
        if key in explicit and steps is not None and (every := value_at(config, key) or 0) > steps:
            yield (
                f"{key}{source.place(key)}: {every} is beyond the last step, train.steps{source.place('train.steps')}: "
                f"{steps}; lower it, or leave it out"
            )
    trace = config.log.trace
    if trace is not None and steps is not None and trace.steps[1] > steps:
        yield (
            f"log.trace.steps{source.place('log.trace.steps')}: {list(trace.steps)} ends beyond the last step, "
            f"train.steps{source.place('train.steps')}: {steps}; choose steps from 1 to {steps}, or leave log.trace out"
        )
    for key in ("batch.memory", "batch.headroom"):
        if key in explicit and value_at(config, key) is not None and not batch.is_auto:
            yield (
                f"{key}{source.place(key)} limits the search of batch.micro: auto, and a run with a microbatch of its "
                "own has no limit; leave it out, or set batch.micro: auto"
            )
    if "launch.restarts" in explicit and config.launch.restarts and launcher:
        yield (
            f"launch.restarts{source.place('launch.restarts')}: {config.launch.restarts} has no effect under "
            f"{launcher}, which starts the ranks: use its own restarts"
        )
    used = source.backend.used_options(config)
    for key, origin in explicit.items():
        if origin in OVERRIDES and key.count(".") == 2 and key.startswith("options.") and key.split(".")[1] not in used:
            yield (
                f"{key} ({origin}) has no effect: {source.strategy} uses options.{' and options.'.join(used)}; "
                "leave it out"
            )


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


def _refuse_on_cpu(config: Config) -> Iterator[str]:
    """Yield each reason why a config cannot run on the CPU."""
    if config.train.precision == "fp16":
        yield "train.precision: fp16 needs CUDA, where it is fast; on the CPU use bf16-mixed or fp32"
    if config.model.sync_batchnorm:
        yield "model.sync_batchnorm: true needs CUDA: torch's SyncBatchNorm accepts no CPU tensors; leave it out"
    if config.model.offload != "none":
        offload = yaml_word(config.model.offload)
        yield f"model.offload: {offload} needs CUDA: on the CPU everything is in host memory; leave it out"
