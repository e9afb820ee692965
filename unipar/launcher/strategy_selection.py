"""Selection of the strategies that run, and the reasons why others do not; one microbatch for all of them."""

from __future__ import annotations

from collections.abc import Iterable

from unipar.backend import checks, registry
from unipar.backend.checks import settled_in
from unipar.backend.offered_strategies import (
    ONE,
    config_in_strategy,
    count_data_ranks,
    expand_strategy_patterns,
    is_single_process,
)
from unipar.config import Config, Strategy
from unipar.config.config import Eval
from unipar.config.settled import Changes, SettledConfig
from unipar.errors import BackendNotInstalled, ConfigError, UniparError, Unsupported
from unipar.launcher.micro_batch.choice import CandidateWorld, ChosenMicro, list_candidates, usable_memory, with_micro
from unipar.launcher.preparation.prepare import Prepared
from unipar.results.row import StrategyResult

SelectedStrategies = dict[str, tuple[StrategyResult, SettledConfig | None]]
"""Row and config of each strategy, by name; a strategy that cannot run has a row with the reason, and no config."""

_WITHOUT_EXTRAS: Changes = {"eval": Eval(), "log.to": (), "log.memory": False}
"""Changes that leave out evaluation, trackers and memory logging, which would be timed with the steps."""


def select_strategies(settled: SettledConfig, patterns: Iterable[str]) -> SelectedStrategies:
    """Return a row and a config for each strategy that these patterns name; `single` is always the first."""
    one, changes = ONE, _in_one_process(settled.config)
    alone = settled.changed({key: value for key, (value, _) in changes.items()}) if changes else settled
    row = StrategyResult(strategy=str(one), outcome="waits", note="; ".join(note for _, note in changes.values()))
    selected: SelectedStrategies = {str(one): (row, settled_in(alone, one, _WITHOUT_EXTRAS))}
    for pattern in patterns:
        try:
            strategies = expand_strategy_patterns((pattern,))
        except Unsupported as e:
            selected[pattern] = StrategyResult(strategy=pattern, outcome="refused", note="; ".join(e.reasons)), None
            continue
        for strategy in strategies:
            if str(strategy) not in selected:
                selected[str(strategy)] = result_of_check(settled, strategy)
    return selected


def library_names(selected: SelectedStrategies) -> dict[str, str]:
    """Return what its library calls each strategy that can run."""
    running = {name: at for name, (_, at) in selected.items() if at is not None}
    return {name: registry.find_backend(at.strategy.backend).library_name(at.config) for name, at in running.items()}


def _in_one_process(config: Config) -> dict[str, tuple[str, str]]:
    """Return the keys that are other in one process without a wrapper, each with its value there and the reason."""
    changes: dict[str, tuple[str, str]] = {}
    if config.train.precision == "bf16-master":
        changes["train.precision"] = "fp32", "in fp32: one process keeps no second copy of the weights"
    if (state := config.model.offloaded_state) != "none":
        left = "activations" if config.model.offloads_activations else "none"
        changes["model.offload"] = left, f"without model.offload: {state}"
    return changes


def result_of_check(settled: SettledConfig, strategy: Strategy) -> tuple[StrategyResult, SettledConfig | None]:
    """Return the row of a strategy and its config, or a row with the reason and None if the strategy cannot run."""
    name = str(strategy)
    try:
        at = settled_in(settled, strategy, _WITHOUT_EXTRAS)
    except Unsupported as e:
        return StrategyResult(strategy=name, outcome="refused", note="; ".join(e.reasons)), None
    except ConfigError as e:  # an option contradicts this strategy
        return StrategyResult(strategy=name, outcome="refused", note=str(e)), None
    except BackendNotInstalled as e:
        return StrategyResult(strategy=name, outcome="absent", note=str(e)), None
    return StrategyResult(strategy=name, outcome="waits"), at


def settle_one_micro(
    prepared: Prepared, patterns: Iterable[str], worlds: Iterable[int]
) -> tuple[Prepared, ChosenMicro | None]:
    """Return the same with one microbatch for all strategies on all these numbers of ranks, if its config says auto.

    Lines of progress go to stderr.
    """
    if not prepared.source.config.batch.is_auto:
        return prepared, None
    from unipar.launcher.micro_batch.choose import choose_microbatch, write_line
    from unipar.launcher.micro_batch.trials import TrialCode

    by_name: dict[str, CandidateWorld] = {}
    asked: list[Strategy] = []
    error: UniparError | None = None
    for pattern in patterns:
        try:
            asked += expand_strategy_patterns((pattern,))
        except Unsupported as e:  # a row of the result says so
            error = error or e
    for ranks in worlds:
        for strategy in asked:
            try:
                world = _candidate_world(prepared, strategy, ranks)
            except UniparError as e:  # a row of the result says so
                error = error or e
                continue
            by_name.setdefault(world.name, world)
    if not by_name:
        assert error is not None
        raise error
    most = max(world.settled.ranks for world in by_name.values())
    limit = usable_memory(prepared.computed, most)
    code = TrialCode(prepared.ref)
    chosen = choose_microbatch(list(by_name.values()), code, limit, write_line)
    return prepared.with_micro(chosen.micro), chosen


def _candidate_world(prepared: Prepared, strategy: Strategy, ranks: int) -> CandidateWorld:
    """Return a strategy on this many ranks, with the sizes that a microbatch may have there."""
    backend = registry.find_backend(strategy.backend)
    if is_single_process(strategy, backend):
        ranks = 1
    data = count_data_ranks(ranks, strategy)
    computed = with_micro(prepared.computed, 1).changed(
        {"parallel.data": count_data_ranks(ranks, prepared.source.strategy)}
    )
    if strategy == ONE:
        computed = computed.changed({key: value for key, (value, _) in _in_one_process(computed).items()})
    moved = config_in_strategy(computed, strategy)
    sizes = list_candidates(moved, backend, strategy, data)
    checks.check_strategy(with_micro(moved, sizes[0]), backend, strategy)
    settled = SettledConfig.of(with_micro(moved, sizes[0]), strategy, ranks, prepared.device, _WITHOUT_EXTRAS)
    return CandidateWorld(settled, backend, sizes)
