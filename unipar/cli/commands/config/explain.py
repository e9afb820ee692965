"""`unipar explain`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unipar.cli.commands.options import (
    STRATEGIES_METAVAR,
    BackendOption,
    ConfigArgument,
    JsonOption,
    SetOption,
    read_config_file,
    split_at_commas,
)

if TYPE_CHECKING:
    from pydantic import BaseModel

    from unipar.backend.resources import RankCount
    from unipar.config import BatchSizes, Config, Strategy
    from unipar.config.config_source import ConfigSource
    from unipar.config.sections.checkpoint import Checkpoint
    from unipar.model.state_names import CheckpointBytes
    from unipar.training.task_facts import TaskFacts


def explain(
    files: ConfigArgument,
    strategies: Annotated[
        list[str] | None,
        typer.Option(
            "--strategy",
            metavar=STRATEGIES_METAVAR,
            callback=split_at_commas,
            help="Show the settings of these strategies; deepspeed/* for all of one backend.",
        ),
    ] = None,
    strategy: BackendOption = None,
    sets: SetOption = None,
    *,
    compare: Annotated[bool, typer.Option("--compare", help="Show all strategies of compare.strategies.")] = False,
    deep: Annotated[
        bool, typer.Option("--deep", help="Import the task, and count its parameters and samples.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show every value of the config, and where it came from; with --backend, as `run` in that strategy has them.

    Then, for each strategy, the settings that its library will get, and the dtype of parameters, gradients and so on;
    with further axes of the mesh (native/nothing+pipeline2) its part of the batch, and how long a stage waits.

    \b
    unipar explain configs/char_gpt.yaml
    unipar explain configs/char_gpt.yaml --strategy 'deepspeed/*' --deep
    unipar explain configs/char_gpt.yaml --backend native/parameters
    unipar explain configs/char_gpt.yaml --set train.optimizer.lr=1e-3 --json
    """
    source = read_config_file(files, sets, strategy, runs=True)
    explanation = explain_config(source, strategies or (), compare=compare, deep=deep)
    if as_json:
        typer.echo(explanation.to_json())
    elif sys.stdout.isatty():
        explanation.draw()
    else:
        typer.echo(explanation.plain())


TextRows = list[tuple[str, ...]]


MAX_COLUMN_WIDTH = 44


@dataclass(frozen=True)
class ExplainedValue:
    """One resolved value."""

    key: str
    value: Any
    origin: str
    """Place that gave the value: a line of the file, `--set`, default, or the rule that derived it."""


@dataclass(frozen=True)
class StrategyExplanation:
    """Dtypes and library settings of one strategy."""

    strategy: str
    note: str
    """Reason why the strategy cannot run here; empty where it can."""

    dtypes: Mapping[str, str]
    library_settings: Mapping[str, Any]
    """Settings that the strategy's library will get."""

    axes: Sequence[ExplainedValue] = ()
    """Consequences of the axes of the mesh beside the data's: ranks, share of the batch, a pipeline's bubble."""


@dataclass(frozen=True)
class Explanation:
    """Everything that `unipar explain` prints."""

    label: str
    values: Sequence[ExplainedValue]
    follows: Sequence[ExplainedValue]
    """Values that no key gives, and that follow from several."""

    strategies: Sequence[StrategyExplanation]

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2, default=str)

    def tables(self) -> Iterator[tuple[str, tuple[str, ...], TextRows]]:
        """Yield each table as title, header and rows: the same for a terminal and for a pipe."""
        from unipar.utils.mappings import flatten

        yield self.label, ("key", "value", "from"), [(v.key, _explained_text(v.value), v.origin) for v in self.values]
        yield (
            "derived values",
            ("name", "value", "from"),
            [(v.key, _explained_text(v.value), v.origin) for v in self.follows],
        )
        dtypes = [t for t in self.strategies if t.dtypes]
        if dtypes:
            header = ("strategy", *dtypes[0].dtypes)
            yield "dtypes", header, [(t.strategy, *t.dtypes.values()) for t in dtypes]
        for t in self.strategies:
            rows: TextRows = [("cannot run", t.note)] if t.note else []
            rows += [(key, _explained_text(value)) for key, value in flatten(t.library_settings)]
            yield t.strategy, ("library setting", "value"), rows or [("none", "plain PyTorch")]
            if t.axes:
                header = ("name", "value", "from")
                yield f"mesh of {t.strategy}", header, [(v.key, _explained_text(v.value), v.origin) for v in t.axes]

    def plain(self) -> str:
        """Return the tables as text for a pipe or a file: one line for each row, however long."""
        return "\n\n".join(f"{title}\n{_align_columns([header, *rows])}" for title, header, rows in self.tables())

    def draw(self) -> None:
        """Draw the tables on the terminal."""
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        for title, header, rows in self.tables():
            drawn = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
            for i, name in enumerate(header):
                drawn.add_column(name, overflow="fold", no_wrap=i == 0)
            for row in rows:
                drawn.add_row(*(Text(text, style="" if text != "default" else "dim") for text in row))
            Console().print(drawn)


def explain_config(
    source: ConfigSource, strategies: Sequence[str] = (), *, compare: bool = False, deep: bool = False
) -> Explanation:
    """Return all that is known of a run before it starts; `deep` imports the task and counts its parameters."""
    from unipar.backend import resources
    from unipar.backend.offered_strategies import expand_strategy_patterns, strategy_of
    from unipar.launcher.micro_batch.choice import explain_auto

    place = resources.find_foreign_place()
    ranks = resources.count_ranks(source.config, place)
    source.config.parallel.settle(ranks.number)
    config, auto = explain_auto(source, ranks.number)
    source = replace(source, config=config)
    sizes = config.batch.settle(ranks.number // config.parallel.axes.ranks)
    depth = None
    if deep:
        from unipar.training.task_facts import gather_task_facts

        depth = gather_task_facts(config, sizes)
    resolved = _resolve_open_values(source, ranks, sizes, depth)
    resolved |= {key: ExplainedValue(key, *value_and_origin) for key, value_and_origin in auto.items()}
    values = [resolved.get(v.key, v) for v in _all_values(source)]
    asked = expand_strategy_patterns(tuple(strategies) + (config.compare.strategies if compare else ()))
    own = strategy_of(config)
    parameters = depth.parameters if depth else None
    return Explanation(
        source.label,
        values,
        list(_derived_values(config, sizes, own, depth, source.out)),
        [_explain_strategy(config, strategy, own, parameters, ranks.number, deep=deep) for strategy in asked or [own]],
    )


def _all_values(source: ConfigSource) -> Iterator[ExplainedValue]:
    """Yield every key of the config; of plugins' options, those in use and those that the config gives for others."""
    from unipar.backend import registry
    from unipar.config.job_system import find_job_system
    from unipar.config.sections.machines import Machines

    config, machines = source.config, source.config.machines or Machines()
    used = registry.find_backend(config.backend).used_options(config)
    plugins: dict[str, tuple[Callable[[str], Any], dict[str, Any]]]
    plugins = {"options": (registry.find_backend, {config.backend: {}, **config.options})}
    plugins["machines.setup"] = find_job_system, {**({machines.on: {}} if machines.on else {}), **machines.options}
    for key, value in _section_values(config):
        if key != "options":
            yield ExplainedValue(key, value, source.origins.get(key, "default"))
        find, options_by_name = plugins.get(key, (registry.find_backend, {}))
        for name, options in options_by_name.items():
            unused = f"; {config.backend} does not use it" if key == "options" and name not in used else ""
            for inner, v in _section_values(find(name).options.model_validate(options), f"{key.split('.')[0]}.{name}."):
                origin = source.origins.get(inner)
                yield ExplainedValue(inner, v, "default" if origin is None else f"{origin}{unused}")


def _section_values(section: BaseModel, prefix: str = "") -> Iterator[tuple[str, Any]]:
    from pydantic import BaseModel

    from unipar.utils.mappings import flatten

    fields = type(section).model_fields
    for name in sorted(fields, key=lambda n: n != "name"):  # the name of an optimizer or a schedule comes first
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            yield from _section_values(value, f"{prefix}{name}.")
        elif isinstance(value, dict) and value and f"{prefix}{name}" != "options":
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _resolve_open_values(
    source: ConfigSource, ranks: RankCount, sizes: BatchSizes, depth: TaskFacts | None
) -> dict[str, ExplainedValue]:
    """Return the values that the config leaves open, with the reason for each."""
    from unipar.backend import resources
    from unipar.run_folder.folder import first_free_folder

    config, origins = source.config, source.origins
    resolved: dict[str, ExplainedValue] = {}

    def settled(key: str, value: Any, why: str) -> None:
        if why:
            resolved[key] = ExplainedValue(key, value, f"{origins.get(key, 'default')}; {why}")

    settled("parallel.data", sizes.ranks, ranks.why)
    settled("device", *resources.choose_device(config))
    for key, value, why in config.batch.derived_keys(sizes):
        resolved[key] = ExplainedValue(key, value, f"derived: {why}")
    if config.out is None:
        out = first_free_folder(source.out)
        why = "" if out == source.out else f"; {source.out} is there already"
        resolved["out"] = ExplainedValue("out", str(out), f"derived: runs/ and the config's name{why}")
    if depth is not None:
        if config.train.steps is None and depth.per_epoch is not None:
            epochs = config.train.epochs
            why = f"derived: epochs x batches an epoch = {epochs} x {depth.per_epoch}"
            if sizes.tokens is not None:
                why = f"derived: the batches of {epochs} epochs, of which the first has {depth.per_epoch}"
            resolved["train.steps"] = ExplainedValue("train.steps", depth.steps, why)
        if config.model.blocks == "auto":
            settled("model.blocks", list(depth.blocks), "auto: found in the model")
        for key, value in ((f"data.{name}", value) for name, value in depth.data.items()):
            if key in origins:
                configured = getattr(config.data, key.removeprefix("data."))
                resolved[key] = ExplainedValue(
                    key, configured, f"{origins[key]}; the task's DataLoader says {_explained_text(value)}"
                )
            else:
                by = (
                    "the task's stream"
                    if depth.stream_description and key == "data.shuffle"
                    else "the task's DataLoader"
                )
                resolved[key] = ExplainedValue(key, value, by)
    return resolved


def _derived_values(
    config: Config, sizes: BatchSizes, own: Strategy, depth: TaskFacts | None, out: Path
) -> Iterator[ExplainedValue]:
    from unipar.backend import resources
    from unipar.verification.numbers import numbers_on

    yield ExplainedValue("strategy", str(own), "derived: backend, parallel.shard and the backend's options")
    place = resources.find_foreign_place()
    yield ExplainedValue("started by", place.launcher if place else "unipar", "derived: the environment's variables")
    yield _full_learning_rate(config, sizes)
    if (numbers := numbers_on(resources.choose_device(config)[0])) is not None:
        for name, value in numbers.settings().items():
            yield ExplainedValue(name, value, f"set by `unipar verify` on {numbers.device}; a run leaves it as it is")
    if depth is not None:
        yield ExplainedValue(
            "parameters", depth.parameters, f"the task's model(); {depth.trainable_parameters:,} of them are trained"
        )
        if modes := depth.modes.describe():
            yield ExplainedValue("training mode", depth.modes.changed, modes)
        if depth.fp8:
            yield ExplainedValue("products in fp8", config.train.precision, depth.fp8)
        if depth.stream_description:
            yield ExplainedValue("stream", config.data.stream, depth.stream_description)
        if config.checkpoint is not None and depth.checkpoint is not None:
            yield _explain_checkpoint(config.checkpoint, depth.checkpoint, out)
        if depth.per_epoch is not None:
            of = f"{sizes.total} an epoch" if sizes.tokens is None else f"{sizes.total} tokens in the first epoch"
            each = f"the task's data(); {depth.per_epoch:,} batches of {of}"
            yield ExplainedValue("samples", depth.samples, each)


def _explain_checkpoint(settings: Checkpoint, size: CheckpointBytes, out: Path) -> ExplainedValue:
    """Return the size of one checkpoint, and why: how many there are at a time, and the room for them."""
    from shutil import disk_usage

    from unipar.run_folder.layout import checkpoint_folder
    from unipar.utils.text import format_size

    many = settings.keep + (settings.best.keep if settings.best else 0) + 1
    what = "trained weights" if size.once else "weights"
    all_of_them = format_size(many * size.each + size.once)
    why = f"{what}, buffers and optimizer state, {format_size(size.each)}; "
    why += f"frozen weights, {format_size(size.once)}, once; " if size.once else ""
    why += f"{many} at a time are {all_of_them}"
    folder = checkpoint_folder(out, settings.to)
    if isinstance(folder, Path):
        there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
        why += f", and {there} has {format_size(disk_usage(there).free)} free"
    return ExplainedValue("checkpoint bytes", size.each, why)


def _full_learning_rate(config: Config, sizes: BatchSizes) -> ExplainedValue:
    lr, scale = config.train.optimizer.lr, config.train.lr_scale
    if scale.rule == "none":
        return ExplainedValue("full learning rate", lr, "derived: train.optimizer.lr, not scaled")
    ratio = f"{sizes.total} / {scale.base_batch_size}"
    size = "batch.total" if sizes.tokens is None else "batch.tokens"
    how = f"x {size} / base_batch_size = {lr:g} x {ratio}"
    if scale.rule == "sqrt":
        how = f"x sqrt({size} / base_batch_size) = {lr:g} x sqrt({ratio})"
    return ExplainedValue("full learning rate", lr * scale.factor(sizes.total), f"derived: train.optimizer.lr {how}")


def _explain_strategy(
    config: Config, strategy: Strategy, own: Strategy, parameters: int | None, ranks: int, *, deep: bool
) -> StrategyExplanation:
    from unipar.backend import checks, registry
    from unipar.backend import offered_strategies as strategies
    from unipar.config.sections.model import RecomputeFit
    from unipar.errors import UniparError

    backend = registry.find_backend(strategy.backend)
    try:
        settled = config.changed({"parallel.data": ranks // own.axes.ranks})
        at = config if strategy == own else strategies.config_in_strategy(settled, strategy)
        note = registry.why_not_installed(backend) or ""
        if not note:
            checks.check_can_run(at)
    except UniparError as e:
        return StrategyExplanation(str(strategy), str(e), {}, {})
    axes = list(_explain_axes(at, strategy, ranks)) if strategy.axes.split else []
    if deep and strategy.axes.tensor * strategy.axes.context > 1:
        from unipar.training.task_facts import describe_split

        sizes = at.batch.settle(ranks // strategy.axes.ranks)
        lines = describe_split(at, sizes, backend)
        axes += [ExplainedValue("split of blocks", sentence, "derived on tensors without values") for sentence in lines]
    if deep and isinstance(at.model.recompute, RecomputeFit):
        axes.append(_explain_recompute(at, strategy, ranks))
    return StrategyExplanation(
        str(strategy), note, asdict(backend.dtypes(at)), backend.native_config(at, parameters), axes
    )


def _explain_recompute(config: Config, strategy: Strategy, ranks: int) -> ExplainedValue:
    """Return the blocks that `model.recompute: {fit: ...}` chooses, or why it cannot."""
    from unipar.backend.resources import choose_device
    from unipar.config.settled import SettledConfig
    from unipar.errors import UniparError
    from unipar.training.fake_run.recompute_fit import choose_for_run

    try:
        choice = choose_for_run(SettledConfig.of(config, strategy, ranks, choose_device(config)[0]))
    except UniparError as e:
        return ExplainedValue("recomputed blocks", None, str(e))
    return ExplainedValue("recomputed blocks", list(choice.names), f"derived: {choice.says}")


def _explain_axes(config: Config, strategy: Strategy, ranks: int) -> Iterator[ExplainedValue]:
    """Yield what follows from a cell's axes, in a config moved to it."""
    from unipar.planning.pipeline_order import bubble, describe_bubble, microbatches_in_flight, order_of_rank

    axes = strategy.axes
    sizes = config.batch.settle(ranks // axes.ranks)
    yield ExplainedValue("ranks", ranks, f"derived: {axes.with_data(sizes.ranks)}")
    if sizes.tokens is not None:
        return
    together = f", for {axes.ranks} ranks together" if axes.ranks > 1 else ""
    share = f"{sizes.total} / {sizes.ranks}{together}: micro {sizes.micro} x {sizes.accumulate}"
    yield ExplainedValue("samples of a step", sizes.local, f"derived: batch.total / data = {share}")
    if axes.pipeline == 1:
        return
    micros = sizes.accumulate
    waits = round(bubble(axes.schedule, axes.pipeline, micros), 4)
    yield ExplainedValue("pipeline bubble", waits, f"derived: a stage waits {describe_bubble(axes, micros)}")
    orders = [order_of_rank(axes.schedule, axes.pipeline, rank, micros) for rank in range(axes.pipeline)]
    kept = [microbatches_in_flight([turn for _, turn in order]) for order in orders]
    who = "stage keeps at the same time" if axes.pieces == 1 else "rank keeps at the same time, counted in each stage"
    why = f"derived: microbatches whose activations each {who}, the first {who.partition(' ')[0]} first"
    yield ExplainedValue("microbatches in flight", kept, why)


def _align_columns(rows: TextRows) -> str:
    """Return the rows with aligned columns; a text beyond MAX_COLUMN_WIDTH shifts the rest of its own row only."""
    widths = [min(max(len(row[i]) for row in rows), MAX_COLUMN_WIDTH) for i in range(len(rows[0]))]
    return "\n".join("  ".join(text.ljust(widths[i]) for i, text in enumerate(row)).rstrip() for row in rows)


def _explained_text(value: Any) -> str:
    """Return a value as it is written in a config; text without quotes."""
    from unipar.utils.text import show_value

    if isinstance(value, str):
        return value
    if isinstance(value, float):
        return f"{value:.12g}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_explained_text, value))}]"
    return show_value(value)
