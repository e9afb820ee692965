"""`compare`: train the same in several strategies, in turns; a comparison for each of several world sizes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, overload

from unipar.backend import resources
from unipar.backend.checks import refuse_absent_ranks
from unipar.backend.installed import installed_versions, machine_summary
from unipar.backend.offered_strategies import ONE
from unipar.backend.precision import FP8_RECIPES
from unipar.comparison import store
from unipar.comparison.make_forecast import make_forecast
from unipar.comparison.request import CompareRequest, batch_with_fixed_total, parse_world_sizes, threads_per_rank
from unipar.comparison.strategy_world import StrategyWorld
from unipar.comparison.training_rounds import TurnRunner
from unipar.config import Config, Strategy
from unipar.config.config_source import Given
from unipar.config.sections.optimizer_settings import OptimizerSettings
from unipar.config.settled import SettledConfig
from unipar.errors import ConfigError, Unsupported
from unipar.launcher.processes.signals import sigterm_as_interrupt
from unipar.launcher.strategy_selection import library_names, select_strategies
from unipar.report.build import try_write_page, write_html
from unipar.report.data.comparison_data import ComparisonPageData
from unipar.report.data.headline import comparison_headline
from unipar.report.pages import comparison_page as comparison
from unipar.report.pages import scaling_page as scaling
from unipar.results.comparison import Comparison
from unipar.results.live_table import LiveTable
from unipar.results.loss_agreement import measure_agreement
from unipar.results.row import REUSED, StrategyResult
from unipar.results.scaling import ScaledStrategy, Scaling
from unipar.run_folder.folder import check_folder_content, explain_write_errors, lock_folder
from unipar.run_folder.layout import PAGE_FILE_NAME
from unipar.task import Task
from unipar.utils.text import count_of, format_size

WORLDS_JSON, WORLDS_CSV = "worlds.json", "worlds.csv"
"""Result files of a comparison in several world sizes; each size has a folder beside them."""


@overload
def compare(
    config: Given,
    *,
    task: type[Task] | None = None,
    strategies: Sequence[str] = (),
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
    strategies: Sequence[str] = (),
    overrides: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> Scaling: ...


def compare(
    config: Given,
    *,
    task: type[Task] | None = None,
    strategies: Sequence[str] = (),
    world: int | Sequence[int] | str | None = None,
    overrides: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> Comparison | Scaling:
    """Train what `config` says in every strategy, in turns. Progress goes to stderr.

    Args:
        config: Path of a config, a mapping, or a `Config`.
        task: The `Task` class, if the config has no `task.use`.
        strategies: Strategies in place of `compare.strategies`, such as `native/*`.
        world: Number of ranks in place of `parallel.data`; several numbers make a comparison for each.
        overrides: Values by dotted key that replace those of the config.
        overwrite: Replace the contents of the run folder.

    Returns:
        The comparison, which prints as a table; a Scaling for several numbers of ranks.

    Raises:
        ConfigError: The config is invalid, or a strategy does not exist.
        TaskError: The task is missing or incomplete.
        OutExists: The run folder is in use.

    Examples:
        >>> comparison = unipar.compare("train.yaml", strategies=["native/nothing"], overwrite=True)
        >>> comparison.ran_and_agrees
        True
    """
    if isinstance(world, int) and world < 1:
        raise ConfigError(f"--world: {world}: wanted a whole number above 0, or several: 1,2,4")
    sizes = parse_world_sizes(world) if isinstance(world, Sequence) else []
    asked = CompareRequest.of(config, overrides, task, "compare starts a world for each strategy")
    tried = ("single", *(tuple(strategies) or asked.source.config.compare.strategies))
    if sizes:
        asked = asked.settle_micro(tried, sizes)
        with asked.on_machines(sizes[-1]) as asked:
            return _compare_by_world_size(asked, sizes, strategies, overwrite=overwrite)
    wanted = world or asked.source.config.parallel.ranks
    ranks = wanted if isinstance(wanted, int) else asked.prepared.ranks().number
    by = "parallel.data" if world is None else "--world"
    refuse_absent_ranks(asked.source.config.log.trace, ranks, asked.source.origins)
    asked = asked.settle_micro(tried, [ranks])
    with asked.on_machines(ranks) as asked:
        return compare_strategies(asked, ranks, strategies, asked.source.out / "compare", overwrite=overwrite, by=by)


def compare_strategies(
    request: CompareRequest,
    ranks: int,
    strategies: Sequence[str],
    folder: Path,
    *,
    overwrite: bool,
    widest: int = 0,
    by: str = "parallel.data",
) -> Comparison:
    """Compare strategies on this many ranks; reuse the results of an earlier run of the same comparison.

    `widest`: ranks of the largest world, for the threads of each rank; `by`: the key that errors name.
    """
    settled = request.prepared.settled(ranks, request.ranks_here(ranks), asking_key=by)
    config = settled.config
    selected = select_strategies(settled, tuple(strategies) or config.compare.strategies)
    each = threads_per_rank(request.ranks_here(max(ranks, widest)))
    of = store.comparison_identity(config, list(selected), request.ref, each, request.unwatched)
    first = Comparison(
        name=request.source.name,
        out=str(folder),
        precision=config.train.precision,
        samples=settled.sizes.total,
        unit=settled.sizes.unit,
        ranks=ranks,
        machines=request.machines_of(ranks),
        warmup=request.turns.warmup,
        rows=[row for row, _ in selected.values()],
        library_names=library_names(selected),
        unwatched=request.unwatched,
    )
    with lock_folder(folder):
        earlier = store.reuse_or_clear(folder, of, overwrite=overwrite)
        if earlier is not None:
            finished_rows = {row.strategy: row for row in earlier.rows if row.outcome == "ran"}
            more = any(row.outcome == "waits" and row.strategy not in finished_rows for row in first.rows)
            if not more and not earlier.interrupted:
                note = f"from {folder / store.COMPARE_JSON}; --overwrite runs it again"
                return _write_page(folder, earlier.changed(note=note, library_names=first.library_names))
            kept_rows = {strategy: _reused(row) if more else row for strategy, row in finished_rows.items()}
            first = first.changed(rows=[kept_rows.get(row.strategy, row) for row in first.rows])
        server = request.fork_server()
        runs = {
            row.strategy: StrategyWorld(
                at, request.ref, folder / at.strategy.slug, request.meter_environment, server, request.micro
            )
            for row in first.rows
            if row.outcome == "waits" and (at := selected[row.strategy][1]) is not None
        }
        with explain_write_errors(folder):
            store.write_comparison(folder, of, first)
            store.write_original_config(folder, first.name, config)

        def keep(so_far: Comparison) -> str:
            return store.write_or_explain(folder, lambda: store.write_comparison(folder, of, so_far))

        with sigterm_as_interrupt(), LiveTable() as board, server:
            now = TurnRunner(first, board, runs, each, keep, server).run_turns(request.turns)
            ran = [at for row in now.rows if row.outcome == "ran" and (at := selected[row.strategy][1]) is not None]
            if ran and config.compare.memory and not now.interrupted:
                board.show(now, f"{count_of(len(ran), 'strategy')} to be planned")
                now = now.changed(
                    forecast=make_forecast(settled, ran, request.ref, server, each, per=request.ranks_here(ranks))
                )
        if config.train.narrow_moments is not None and now.reference is not None and not (widest or now.interrupted):
            now = now.changed(moments=_describe_moments(request, ranks, now.reference, folder))
        if config.train.precision in FP8_RECIPES and now.reference is not None and not (widest or now.interrupted):
            now = now.changed(fp8=_describe_fp8(request, ranks, now.reference, folder))
        why = keep(now)
        return now.changed(unkept=why) if why else _write_page(folder, now)


def _describe_moments(request: CompareRequest, ranks: int, row: StrategyResult, folder: Path) -> str:
    """Return what narrow moments save in one process, and how many digits they cost: it runs again with AdamW."""
    changes = _full_moments(request.source.config)
    adamw = _run_one_process(request, ranks, changes, folder.with_name(f"{folder.name}-adamw"))
    intro = f"{request.source.config.train.narrow_moments} beside adamw, in one process: "
    if adamw.reference is None:
        return f"{intro}no figures, as adamw's run {adamw.rows[0].outcome}: {adamw.rows[0].note.splitlines()[0]}"
    small, full = (_optimizer_bytes(one) for one in (row, adamw.reference))
    saved = f"optimizer states of {format_size(small)} instead of {format_size(full)}; " if small and full else ""
    agrees = measure_agreement(row.losses, adamw.reference.losses, 0.0)
    return f"{intro}{saved}losses equal to {agrees} over {count_of(len(row.losses), 'step')}"


def _describe_fp8(request: CompareRequest, ranks: int, row: StrategyResult, folder: Path) -> str:
    """Return what multiplied in fp8, and how many digits that costs: one process runs again in bf16-mixed."""
    changes = {"train.precision": "bf16-mixed"}
    mixed = _run_one_process(request, ranks, changes, folder.with_name(f"{folder.name}-bf16-mixed"))
    said = "" if row.marks is None else f"{row.marks.fp8}; each strategy was checked in its first step; "
    intro = f"{said}{request.source.config.train.precision} beside bf16-mixed, in one process: "
    if mixed.reference is None:
        return f"{intro}no figures, as that run {mixed.rows[0].outcome}: {mixed.rows[0].note.splitlines()[0]}"
    agrees = measure_agreement(row.losses, mixed.reference.losses, 0.0)
    return f"{intro}losses equal to {agrees} over {count_of(len(row.losses), 'step')}"


def _run_one_process(request: CompareRequest, ranks: int, changes: Mapping[str, Any], folder: Path) -> Comparison:
    """Return the comparison of one process alone, with another config."""
    source = replace(request.source, config=request.source.config.changed(changes))
    other = replace(request, prepared=replace(request.prepared, source=source))
    return compare_strategies(other, ranks, [str(ONE)], folder, overwrite=True)


def _optimizer_bytes(row: StrategyResult) -> int:
    """Return what the fullest rank keeps of optimizer states between two steps; 0 if memory was not recorded."""
    kept = [phase.held.get("optimizer", 0) for one in row.memory for phase in one.phases if phase.name == "steady"]
    return max(kept, default=0)


def _full_moments(config: Config) -> dict[str, Any]:
    """Return the changes of a config that put full moments in the place of narrow ones."""

    def full(optimizer: OptimizerSettings | None) -> OptimizerSettings | None:
        if optimizer is None or (kind := optimizer.full_moments) is None:
            return optimizer
        return kind.model_validate(optimizer.model_dump(include=kind.model_fields.keys() - {"name"}))

    parts = {
        name: part.model_copy(update={"optimizer": full(part.optimizer)}) for name, part in config.train.parts.items()
    }
    return {"train.optimizer": full(config.train.optimizer), "train.parts": parts}


def _compare_by_world_size(
    request: CompareRequest, ranks: Sequence[int], strategies: Sequence[str], *, overwrite: bool
) -> Scaling:
    """Run a comparison for each size of world, one after another, all with the same total batch."""
    prepared, out = request.prepared, request.source.out / "worlds"
    resources.check_device_count(prepared.computed, ranks[-1], request.ranks_here(ranks[-1]), asking_key="--world")
    settings = request.source.config
    settings = settings.changed({"batch": batch_with_fixed_total(settings.batch, ranks[0])})
    request = replace(request, prepared=replace(prepared, source=replace(request.source, config=settings)))
    settled = {n: SettledConfig.of(settings, request.source.strategy, n, prepared.device) for n in ranks}
    selected = {
        n: select_strategies(one, tuple(strategies) or settings.compare.strategies) for n, one in settled.items()
    }
    if list(selected[ranks[0]]) == [str(ONE)]:
        raise Unsupported(str(ONE), ["it is one process, whatever the size of the world"])
    by_n: dict[int, Comparison] = {}
    with lock_folder(out):
        check_folder_content(out, "compare", (WORLDS_JSON, WORLDS_CSV, PAGE_FILE_NAME))
        for n in ranks:
            folder = out / f"world-{n}"
            by_n[n] = compare_strategies(
                request, n, strategies, folder, overwrite=overwrite, widest=ranks[-1], by="--world"
            )
            if by_n[n].interrupted:
                break
        rows = [{row.strategy: row for row in one.rows[1:]} for one in by_n.values()]
        worlds: list[ScaledStrategy] = []
        results: list[StrategyResult] = []
        for strategy in rows[0]:
            for i, n in enumerate(ranks):
                at = selected[n][strategy][1]
                cut = (at or settled[n]).sizes
                batch = {"samples": cut.total, "micro": cut.micro, "accumulate": cut.accumulate}
                where = request.machines_of(n)
                worlds.append(ScaledStrategy(strategy=strategy, ranks=n, kinds=("strong",), machines=where, **batch))
                row = rows[i].get(strategy) if i < len(rows) else None
                results.append(
                    (row or StrategyResult(strategy=strategy, outcome="waits")).changed(strategy=worlds[-1].name)
                )
        now = Scaling(
            verb="compare",
            name=request.source.name,
            out=str(out),
            precision=settings.train.precision,
            unit=settings.batch.unit,
            worlds=tuple(worlds),
            rows=results,
            cores=len(os.sched_getaffinity(0)),
            threads=threads_per_rank(request.ranks_here(ranks[-1])),
            device=prepared.device,
            warmup=request.turns.warmup,
            library_names={name: words for of in selected.values() for name, words in library_names(of).items()},
            held=settings.train.local_steps is None,
            unwatched=request.unwatched,
            interrupted=any(one.interrupted for one in by_n.values()),
            wrong=tuple(
                f"{count_of(n, 'rank')}: {line}" for n, one in by_n.items() for line in describe_comparison_errors(one)
            ),
            versions=installed_versions(Strategy.parse(strategy).backend for strategy in rows[0]),
            machine=machine_summary(),
        ).mark_different_training()
        why = store.write_or_explain(out, lambda: store.write_scaling(out, WORLDS_JSON, WORLDS_CSV, now))
        return now.changed(
            unkept=why,
            note=try_write_page(lambda: write_html(scaling.render_scaling(now, out), out / PAGE_FILE_NAME)),
        )


def describe_comparison_errors(one: Comparison) -> list[str]:
    """Return the errors of a comparison for a table that has no row for `single`."""
    first = one.rows[0]
    if first.outcome == "failed":
        return [f"single, the reference for the other strategies, failed: {first.note.splitlines()[0]}"]
    return one.verdict() if one.disagreeing_rows else []


def _reused(row: StrategyResult) -> StrategyResult:
    """Return the row of a strategy that does not run again, with a note that says so."""
    return row if row.reused else row.changed(reused=True, note="; ".join(filter(None, [row.note, REUSED])))


def _write_page(folder: Path, now: Comparison) -> Comparison:
    """Write the comparison's page; return the comparison with its first sentence and a note on the page."""
    sentence: list[str] = []

    def write() -> Path:
        data = ComparisonPageData.read(folder)
        if now.ran_and_agrees:
            sentence.append(comparison_headline(data))
        return write_html(comparison.render_comparison(data), folder / PAGE_FILE_NAME)

    page = try_write_page(write)
    return now.changed(answer="".join(sentence), note="; ".join(filter(None, [now.note, page])))


def suggest_next_commands(result: Comparison | Scaling, name: str) -> list[str]:
    """Return commands to try next, after this result of `compare` on the config `name`."""
    if result.interrupted:
        return [f"unipar compare {name}   # the same again goes on where it stopped"]
    if isinstance(result, Comparison) and (wrong := result.disagreeing_rows):
        return [f"unipar verify {name} --strategy {wrong[0].strategy}   # what differs first, and the kind of fault"]
    if result.code:
        return [f"unipar compare {name} --details   # runs what failed again"]
    if isinstance(result, Scaling):
        return [f"unipar compare {name}   # step and memory of each strategy"]
    return [
        f"unipar verify {name}",
        f"unipar scale {name} --world 1,2",
        f"unipar compare {name} --details   # all tables, and what they mean",
    ]
