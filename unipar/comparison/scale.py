"""`scale`: the same strategies in worlds of several sizes, all alive at once and training in turns."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any

from unipar.backend import resources
from unipar.backend.installed import installed_versions, machine_summary
from unipar.backend.offered_strategies import (
    config_in_strategy,
    count_data_ranks,
    expand_strategy_patterns,
    is_single_process,
)
from unipar.comparison import store
from unipar.comparison.request import (
    CompareRequest,
    batch_with_fixed_total,
    batch_with_share,
    parse_world_sizes,
    threads_per_rank,
)
from unipar.comparison.strategy_world import StrategyWorld
from unipar.comparison.training_rounds import TurnRunner
from unipar.config import Config, Strategy
from unipar.config.config_source import Given
from unipar.config.sections.batch import Batch
from unipar.config.settled import SettledConfig
from unipar.errors import ConfigError, Unsupported
from unipar.launcher.processes.signals import sigterm_as_interrupt
from unipar.launcher.strategy_selection import library_names, result_of_check
from unipar.report.build import try_write_page, write_html
from unipar.report.pages.scaling_page import render_scaling
from unipar.results.live_table import LiveTable
from unipar.results.result_files import ORIGINAL_CONFIG_FOLDER
from unipar.results.row import StrategyResult
from unipar.results.scaling import SCALING_KINDS, ScaledStrategy, Scaling, ScalingKind
from unipar.run_folder import folder
from unipar.run_folder.layout import PAGE_FILE_NAME
from unipar.task import Task

SCALE_JSON, SCALE_CSV = "scale.json", "scale.csv"


def scale(
    config: Given,
    *,
    worlds: Sequence[int] | str,
    task: type[Task] | None = None,
    strategies: Sequence[str] = (),
    overrides: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> Scaling:
    """Train what `config` says in worlds of several sizes, in turns. Progress goes to stderr.

    Args:
        config: Path of a config, a mapping, or a `Config`.
        worlds: Numbers of ranks, as in `[1, 2, 4]` or `"1,2,4"`.
        task: The `Task` class, if the config has no `task.use`.
        strategies: Strategies in place of that of the config.
        overrides: Values by dotted key that replace those of the config.
        overwrite: Replace the contents of the run folder.

    Returns:
        Samples a second and efficiency of each world, which print as a table.

    Raises:
        ConfigError: The config is invalid.
        Unsupported: No world can run.
        OutExists: The run folder is in use.

    Examples:
        >>> scaling = unipar.scale("train.yaml", worlds=[1, 2], overwrite=True)
        >>> scaling.code
        0
    """
    sizes = parse_world_sizes(worlds)
    asked = CompareRequest.of(config, overrides, task, "scale starts a world for each size")
    asked = asked.settle_micro(tuple(strategies) or (str(asked.source.strategy),), sizes)
    with asked.on_machines(sizes[-1]) as asked:
        return _scale_worlds(asked, sizes, strategies, overwrite=overwrite)


def _scale_worlds(
    request: CompareRequest, sizes: Sequence[int], strategies: Sequence[str], *, overwrite: bool
) -> Scaling:
    source, settings = request.source, request.source.config
    prepared = request.prepared
    resources.check_device_count(prepared.computed, sizes[-1], request.ranks_here(sizes[-1]), asking_key="--world")
    wanted = expand_strategy_patterns(tuple(strategies)) if strategies else [source.strategy]
    selected = list(select_worlds(settings, sizes, wanted, prepared.device))
    waiting = [(world, at) for world, row, at in selected if row.outcome == "waits" and at is not None]
    if not waiting:
        raise Unsupported(selected[0][0].strategy, list(dict.fromkeys(row.note for _, row, _ in selected)))
    out, each = source.out / "scale", threads_per_rank(request.ranks_here(max(world.ranks for world, _ in waiting)))
    first = Scaling(
        name=source.name,
        out=str(out),
        precision=settings.train.precision,
        unit=settings.batch.unit,
        worlds=tuple(world.changed(machines=request.machines_of(world.ranks)) for world, _, _ in selected),
        rows=[row for _, row, _ in selected],
        library_names=library_names({world.strategy: (row, at) for world, row, at in selected}),
        cores=len(os.sched_getaffinity(0)),
        threads=each,
        device=prepared.device,
        warmup=request.turns.warmup,
        held=settings.train.local_steps is None,
        unwatched=request.unwatched,
        versions=installed_versions(strategy.backend for strategy in wanted),
        machine=machine_summary(),
    )
    with folder.lock_folder(out):
        folder.clear_own_files(
            out,
            "scale",
            (SCALE_JSON, SCALE_CSV, PAGE_FILE_NAME, ORIGINAL_CONFIG_FOLDER),
            "scaling",
            overwrite=overwrite,
        )
        with folder.explain_write_errors(out):
            store.write_original_config(out, source.name, settings)
        server = request.fork_server()
        runs = {
            world.name: StrategyWorld(
                at, request.ref, out / _world_folder_name(world), request.meter_environment, server, request.micro
            )
            for world, at in waiting
        }

        def keep(now: Scaling) -> str:
            return store.write_or_explain(out, lambda: store.write_scaling(out, SCALE_JSON, SCALE_CSV, now))

        with sigterm_as_interrupt(), LiveTable() as board, server:
            now = TurnRunner(first, board, runs, each, keep, server).run_turns(request.turns)
        return now.changed(
            unkept=keep(now),
            note=try_write_page(lambda: write_html(render_scaling(now, out), out / PAGE_FILE_NAME)),
        )


def _world_folder_name(world: ScaledStrategy) -> str:
    return "world-" + world.name.replace("/", "-").replace(" ", "-")


def select_worlds(
    config: Config, sizes: Sequence[int], strategies: Iterable[Strategy], device: str
) -> Generator[tuple[ScaledStrategy, StrategyResult, SettledConfig | None]]:
    """Yield each world with its row and config, the smallest of each strategy first.

    A world that cannot run has the reason in its row, and None instead of a config: sizes that the strategy's axes do
    not divide among them.
    """
    for strategy in strategies:
        if is_single_process(strategy):
            world = _left_out(strategy, sizes[0])
            note = "it is one process, whatever the size of the world"
            yield world, StrategyResult(strategy=world.name, outcome="refused", note=note), None
            continue
        divisible: list[int] = []
        for ranks in sizes:
            try:
                count_data_ranks(ranks, strategy)
                divisible.append(ranks)
            except ConfigError as e:
                world = _left_out(strategy, ranks)
                yield world, StrategyResult(strategy=world.name, outcome="refused", note=str(e)), None
        for world, batch in _worlds_of_strategy(_batch_of_strategy(config, sizes[0], strategy), divisible, strategy):
            row, at = _check_world(config, batch, world, strategy, device)
            yield world, row.changed(strategy=world.name), at
            if row.outcome != "waits" and world.ranks == divisible[0]:
                break  # without the smallest world the larger ones have nothing to be compared with


def _check_world(
    config: Config, batch: Batch, world: ScaledStrategy, strategy: Strategy, device: str
) -> tuple[StrategyResult, SettledConfig | None]:
    """Return the row of a world and its config, or a row with the reason and None if it cannot run."""
    try:
        moved = config_in_strategy(config.changed({"batch": batch, "parallel.data": "auto"}), strategy)
    except ConfigError as e:  # an option contradicts this strategy
        return StrategyResult(strategy=world.name, outcome="refused", note=str(e)), None
    return result_of_check(SettledConfig.of(moved, strategy, world.ranks, device), strategy)


def _left_out(strategy: Strategy, ranks: int) -> ScaledStrategy:
    return ScaledStrategy(strategy=str(strategy), ranks=ranks, kinds=SCALING_KINDS, samples=0, micro=0, accumulate=0)


def _batch_of_strategy(config: Config, smallest: int, strategy: Strategy) -> Batch:
    """Return the batch for a strategy; one with other axes than the config has its total, not its share."""
    batch, axes = config.batch, config.parallel.axes.ranks
    if batch.size is not None or strategy.axes.ranks == axes:
        return batch
    return Batch(total=batch.settle(max(1, smallest // axes)).total, micro=batch.micro)


def _worlds_of_strategy(
    batch: Batch, sizes: Sequence[int], strategy: Strategy
) -> Generator[tuple[ScaledStrategy, Batch]]:
    """Yield the smallest world; then for each size one with the same total batch, and one with the same share.

    A share is what each rank of the data trains on: ranks along further axes train on the same samples.
    """
    for i, ranks in enumerate(sizes):
        data, smallest = (count_data_ranks(n, strategy) for n in (ranks, sizes[0]))
        least, same = batch.settle(smallest), batch_with_fixed_total(batch, smallest)
        grows = batch_with_share(batch, least, data)
        plans: list[tuple[tuple[ScalingKind, ...], Batch]] = [(("strong",), same), (("weak",), grows)]
        for kinds, cut_as in plans if i else [(SCALING_KINDS, same)]:
            cut = cut_as.settle(data)
            sizes_of_batch = {"samples": cut.total, "micro": cut.micro, "accumulate": cut.accumulate}
            yield ScaledStrategy(strategy=str(strategy), ranks=ranks, kinds=kinds, **sizes_of_batch), cut_as
