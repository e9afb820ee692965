"""Strategies that backends offer, and configs moved to another strategy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from unipar.backend.description import Backend, Variant
from unipar.backend.registry import backend_names, find_backend
from unipar.config import SHARDS, Config, Strategy
from unipar.config.sections.parallel import Parallel
from unipar.config.sections.strategy import AXES, Axes
from unipar.errors import ConfigError, Unsupported

_AXES_KEYS = (*AXES, "sequence", "schedule")
"""Keys of `parallel` that say how ranks which train on the same samples split the work."""

ONE = Strategy("single")
"""Strategy of one process without a wrapper: the reference that all other strategies are compared with."""


def strategies_of_backend(backend: Backend) -> list[Strategy]:
    """Return all strategies of a backend: first those without a variant, in the order of `SHARDS`."""
    can = backend.capabilities
    plain = [Strategy(backend.name, shard) for shard in SHARDS if shard in can.shards]
    return plain + [Strategy(backend.name, s, v) for v, x in can.variants.items() for s in SHARDS if s in x.shards]


def read_strategy(text: str) -> Strategy:
    """Return the strategy that a text names, `native/parameters+tensor2` or, by a short name, `fsdp2+tensor2`."""
    return Strategy.parse(_without_short_name(text))


def is_strategy_name(text: str) -> bool:
    """Return whether a text names more than a backend: `native/parameters`, `fsdp2`."""
    return "/" in text or _without_short_name(text) != text


def _without_short_name(text: str) -> str:
    head, plus, words = text.partition("+")
    if "/" in head or head in (known := backend_names()):
        return text
    short = {s: f"{name}/{shard}" for name in known for s, shard in find_backend(name).capabilities.short_names.items()}
    return short.get(head, head) + plus + words


def expand_strategy_patterns(patterns: tuple[str, ...]) -> list[Strategy]:
    """Return the strategies that the patterns name, in order, each once.

    `*` is every strategy of every installed backend, `name/*` the strategies of one backend that have no variant.
    """
    strategies: dict[Strategy, None] = {}
    for text in patterns:
        if text == "*":
            strategies.update(dict.fromkeys(c for n in backend_names() for c in strategies_of_backend(find_backend(n))))
        elif text.endswith("/*"):
            strategies.update(
                dict.fromkeys(c for c in strategies_of_backend(find_backend(text.removesuffix("/*"))) if not c.variant)
            )
        else:
            strategies[require_strategy(read_strategy(text))] = None
    return list(strategies)


def require_strategy(strategy: Strategy) -> Strategy:
    """Return `strategy`; raise Unsupported, which lists the backend's strategies, if it has no such one."""
    check_offers(find_backend(strategy.backend), strategy)
    return strategy


def check_offers(backend: Backend, strategy: Strategy) -> None:
    """Raise Unsupported if the backend has no such strategy."""
    if strategy.without_axes in strategies_of_backend(backend):
        for reason in refuse_axes(backend, strategy):
            raise Unsupported(str(strategy), [reason])
        return
    have = ", ".join(map(str, strategies_of_backend(backend)))
    if strategy.variant and strategy.variant not in backend.capabilities.variants:
        raise Unsupported(
            str(strategy), [f"{strategy.backend} has no variant {strategy.variant!r}; its strategies: {have}"]
        )
    raise Unsupported(str(strategy), [f"there is no such strategy; {strategy.backend} has: {have}"])


def refuse_axes(backend: Backend, strategy: Strategy) -> Iterator[str]:
    """Yield a sentence for each axis of the mesh that the backend does not have in this strategy."""
    for name, size in strategy.axes.sizes.items():
        if strategy.shard not in backend.capabilities.axes.get(name, ()):
            have = [f"{n}/{s}" for n in backend_names() for s in find_backend(n).capabilities.axes.get(name, ())]
            where = f"only in {', '.join(have)}" if have else "in no backend yet"
            why = backend.capabilities.axes_lacked.get(name)
            yield f"parallel.{name}: {size} is not available here, {where}" + (f": {why}" if why else "")


def strategy_of(config: Config, backend: Backend | None = None) -> Strategy:
    """Return the strategy of a config; its backend's options decide on the variant; `backend` spares a lookup."""
    backend = backend or find_backend(config.backend)
    options = config.options.get(backend.name, {})
    for name, variant in backend.capabilities.variants.items():
        if variant.options.items() <= options.items():
            return Strategy(backend.name, config.parallel.shard, name, config.parallel.axes)
    return Strategy(backend.name, config.parallel.shard, axes=config.parallel.axes)


def is_single_process(strategy: Strategy, backend: Backend | None = None) -> bool:
    """Return whether the strategy is one process, whatever a config says about ranks; `backend` spares a lookup."""
    can = (backend or find_backend(strategy.backend)).capabilities
    return can.alone or (strategy.variant is not None and can.variants[strategy.variant].alone)


def config_in_strategy(config: Config, strategy: Strategy) -> Config:
    """Return `config` moved to another strategy of a list, with the same global batch and the same number of ranks.

    In a strategy of one process, ranks become further microbatches; and so they do in one whose axes leave fewer ranks
    for the data. Keys that have no effect there are left out: a list has strategies of several kinds.
    """
    backend = find_backend(strategy.backend)
    check_offers(backend, strategy)
    can, one = backend.capabilities, is_single_process(strategy, backend)
    parallel = _parallel_in_strategy(config.parallel, strategy, one=one)
    changes: dict[str, Any] = {"backend": strategy.backend}
    if one and config.train.local_steps is not None:
        changes["train"] = config.train.changed({"local_steps": None})
    if strategy.shard == "nothing":
        parallel = parallel.model_copy(update={"shard_over": None})
    options = dict(config.options)
    if strategy.variant:
        options[backend.name] = _with_variant(options.get(backend.name, {}), can.variants[strategy.variant], strategy)
    elif backend.name in options:
        options[backend.name] = _without_variants(options[backend.name], can.variants.values())
    moved = _with_parallel(config, parallel, {**changes, "options": options}, one=one)
    return _without_idle_options(moved, backend) if options else moved


def named_strategy(config: Config, text: str) -> tuple[Strategy, dict[str, Any]]:
    """Return a config's strategy once a text such as `native/parameters+tensor2` is applied, and the keys it names.

    Keys that it does not name stay: a bare backend keeps `parallel.shard`. A strategy of one process names all of them.
    """
    text = _without_short_name(text)
    strategy = Strategy.parse(text)
    backend = find_backend(strategy.backend)
    check_offers(backend, strategy)
    named: dict[str, Any] = {"backend": strategy.backend}
    if is_single_process(strategy, backend):
        named |= {"parallel.data": 1, "parallel.shard": "nothing"}
        named |= {f"parallel.{name}": getattr(Axes(), name) for name in _AXES_KEYS}
        return strategy, named
    if "/" in text:
        named["parallel.shard"] = strategy.shard
    named |= {f"parallel.{n}": v for n in _AXES_KEYS if (v := getattr(strategy.axes, n)) != getattr(Axes(), n)}
    variant = backend.capabilities.variants[strategy.variant].options if strategy.variant else {}
    named |= {f"options.{backend.name}.{key}": value for key, value in variant.items()}
    parallel = {key.partition(".")[2]: value for key, value in named.items() if key.startswith("parallel.")}
    kept = config.parallel.model_copy(update=parallel)
    own_options = {**config.options.get(backend.name, {}), **variant}
    options = {**config.options, backend.name: own_options}
    return strategy_of(config.changed({"backend": backend.name, "parallel": kept, "options": options}), backend), named


def config_with_strategy(config: Config, strategy: Strategy, *, keep_data: bool = False) -> Config:
    """Return `config` in a strategy as `named_strategy` gives it, with the same global batch; every other key stays.

    The number of ranks stays too, and `parallel.data` follows from it, unless `keep_data`.
    """
    backend = find_backend(strategy.backend)
    one = is_single_process(strategy, backend)
    parallel = _parallel_in_strategy(config.parallel, strategy, one=one)
    if keep_data:
        parallel = parallel.model_copy(update={"data": config.parallel.data})
    options = dict(config.options)
    if strategy.variant:
        variant = backend.capabilities.variants[strategy.variant]
        options[backend.name] = {**options.get(backend.name, {}), **variant.options}
    return _with_parallel(config, parallel, {"backend": strategy.backend, "options": options}, one=one)


def _parallel_in_strategy(parallel: Parallel, strategy: Strategy, *, one: bool) -> Parallel:
    """Return the section `parallel` in a strategy, on as many ranks as before; `one`: it is of a single process."""
    axes, data = strategy.axes, parallel.data
    if one:
        data = 1
    elif isinstance(ranks := parallel.ranks, int):
        data = count_data_ranks(ranks, strategy)
    keys = {name: getattr(axes, name) for name in _AXES_KEYS}
    return parallel.model_copy(update={"data": data, "shard": strategy.shard, **keys})


def _with_parallel(config: Config, parallel: Parallel, changes: Mapping[str, Any], *, one: bool) -> Config:
    """Return `config` with another section `parallel` and other sections in `changes`, and the same global batch.

    `one`: in one process.
    """
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
    return config.model_copy(update={**changes, "parallel": parallel, "batch": batch})


def _without_idle_options(config: Config, backend: Backend) -> Config:
    """Return the config without options that have no effect in its strategy."""
    options = {name: dict(values) for name, values in config.options.items()}
    for key, _ in backend.idle_options(config):
        _, name, option = key.split(".")
        del options[name][option]
    return config.model_copy(update={"options": options})


def count_data_ranks(ranks: int, strategy: Strategy) -> int:
    """Return the number of parts of a batch on `ranks` ranks; raise ConfigError if the strategy's sizes do not fit."""
    least = strategy.axes.fewest_ranks
    if ranks % least:
        raise ConfigError(f"{strategy} needs a multiple of {least} ranks ({strategy.axes}), and there are {ranks}")
    return ranks // strategy.axes.ranks


def _with_variant(values: Mapping[str, Any], variant: Variant, strategy: Strategy) -> dict[str, Any]:
    for key, value in variant.options.items():
        if key in values and values[key] != value:
            raise ConfigError(
                f"options.{strategy.backend}.{key}: {values[key]!r} contradicts the strategy {strategy}, "
                f"which sets it to {value!r}"
            )
    return {**values, **variant.options}


def _without_variants(values: Mapping[str, Any], variants: Iterable[Variant]) -> dict[str, Any]:
    """Return the options without those that select a variant."""
    selecting = [v.options for v in variants if v.options.items() <= values.items()]
    return {key: value for key, value in values.items() if not any(key in options for options in selecting)}
