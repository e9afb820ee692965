"""`unipar check`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from unipar.cli.commands.options import (
    BackendOption,
    ConfigArgument,
    OutOption,
    OverwriteOption,
    SetOption,
    read_config_file,
)
from unipar.utils.text import count_of

if TYPE_CHECKING:
    from unipar.config import Strategy
    from unipar.config.config_source import ConfigSource
    from unipar.config.settled import SettledConfig
    from unipar.launcher.preparation.prepared_run import PreparedRun


def check_run(
    files: ConfigArgument,
    strategy: BackendOption = None,
    sets: SetOption = None,
    out: OutOption = None,
    *,
    overwrite: OverwriteOption = False,
    deep: Annotated[bool, typer.Option("--deep", help="Import the task's file as well.")] = False,
) -> None:
    """Check whether FILE would train on this machine.

    Reads the config and the text of the task's file, and does not import torch.

    \b
    unipar check configs/char_gpt.yaml
    unipar check configs/char_gpt.yaml --backend native/parameters --set batch.micro=3
    """
    typer.echo(check_config(read_config_file(files, sets, strategy, out, runs=True), deep=deep, overwrite=overwrite))


def check_config(source: ConfigSource, *, deep: bool = False, overwrite: bool = False) -> str:
    """Return a description of the run in a few lines; raise a UniparError that says why it cannot run."""
    from unipar.launcher.preparation.prepare import prepare
    from unipar.launcher.preparation.prepared_run import PreparedRun

    config = source.config
    plan = PreparedRun.of(prepare(source, code="if named"), overwrite=overwrite)
    compared = _expand_compare_strategies(source)
    settled = plan.settled
    ranks = "one process" if plan.size == 1 else f"{plan.size} ranks"
    because = f" ({plan.why})" if plan.why else ""
    rows = [
        ("strategy", f"{settled.strategy}, {ranks} on {settled.device}{because}"),
        ("batch", _describe_batch(plan)),
        *_describe_mesh(settled),
        ("task", _describe_task(source, deep=deep)),
        ("compare", f"{count_of(len(compared), 'strategy')}: {', '.join(config.compare.strategies)}"),
        ("out", str(plan.out)),
        *(("note", note) for note in source.notes),
    ]
    return "\n".join([f"{source.label}: good", *(f"  {name:<8}  {text}" for name, text in rows)])


def _describe_batch(plan: PreparedRun) -> str:
    """Return the sizes of the batch, or those among which a trial chooses."""
    sizes = plan.settled.sizes
    if (limits := sizes.tokens) is not None:
        longest = f", samples of at most {limits.max_length}" if limits.max_length else ""
        micro = (
            f"{limits.accumulate} on each rank" if limits.micro is None else f"of at most {limits.micro} padded tokens"
        )
        return f"at most {sizes.total} tokens over data {sizes.ranks}, microbatches: {micro}{longest}"
    if plan.auto is None:
        return f"total {sizes.total} = micro {sizes.micro} x accumulate {sizes.accumulate} x data {sizes.ranks}"
    among = ", ".join(map(str, plan.auto.candidates))
    return f"total {sizes.total}; micro auto: one of {among}, found by trial when the run starts"


def _describe_mesh(settled: SettledConfig) -> list[tuple[str, str]]:
    """Return a row on the axes of the mesh and a pipeline's bubble, or nothing if there is only the data's axis."""
    from unipar.planning.pipeline_order import describe_bubble

    axes, sizes = settled.strategy.axes, settled.sizes
    if not axes.split:
        return []
    known = axes.pipeline > 1 and sizes.tokens is None
    waits = f"; a stage waits {describe_bubble(axes, sizes.accumulate)}" if known else ""
    return [("mesh", f"{axes.with_data(sizes.ranks)}{waits}")]


def _expand_compare_strategies(source: ConfigSource) -> list[Strategy]:
    """Return the strategies that `unipar compare` would run; raise ConfigError if one is unknown."""
    from unipar.backend import offered_strategies as strategies
    from unipar.errors import BackendNotFound, ConfigError, Unsupported

    try:
        return strategies.expand_strategy_patterns(source.config.compare.strategies)
    except (BackendNotFound, Unsupported, ConfigError) as e:
        place = source.origins.get("compare.strategies")
        raise ConfigError(f"{source.label}: compare.strategies{f' ({place})' if place else ''}: {e}") from None


def _describe_task(source: ConfigSource, *, deep: bool) -> str:
    task = source.config.task
    if task is None or task.use is None:
        return "not in this config; a script passes it to unipar.launch"
    if not deep:
        return f"{task.use}, checked without importing it (--deep imports it)"
    from unipar.training.task_facts import load_task

    load_task(source.config, prepared=False)  # which may download
    return f"{task.use}, imported and created"
