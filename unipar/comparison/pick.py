"""The recommended config as a file: the user's text, with the backend, the split and the batch changed."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unipar.backend import offered_strategies as strategies
from unipar.backend import registry
from unipar.config import Config, Strategy
from unipar.config.config_file import read_config_text
from unipar.config.config_source import SHORTENED, ConfigSource, load_config_file
from unipar.config.sections.strategy import AXES
from unipar.config.yaml_edit import CannotEdit, change_keys
from unipar.errors import ConfigError, OutExists
from unipar.utils.files import whole
from unipar.utils.mappings import value_at

if TYPE_CHECKING:
    from unipar.planning.plan import Plan

_CHANGED = ("backend", "parallel", "batch", "options")


def write_picked_config(plan: Plan, source: ConfigSource, out: Path, *, overwrite: bool = False) -> None:
    """Write the config that the plan recommends to `out`, as a whole or not at all; never follow a symbolic link."""
    strategy, ranks, micro, kept = _picked(plan)
    if out.is_symlink():
        raise OutExists(f"--pick {out}: it is a link; name the file itself")
    if out.exists() and (out.is_dir() or not overwrite):
        way = "name another file" if out.is_dir() else "name another file, or write over it (--overwrite)"
        raise OutExists(f"--pick {out}: it already exists; {way}")
    file = Path(source.label)
    if not file.is_file():
        raise ConfigError("--pick changes a config's file, and this config was not read from one: write it to a file")
    wanted = config_to_pick(source.config, strategy, ranks, micro, kept=kept)
    changes = dict(_changes(source, wanted, out.resolve().parent))
    try:
        text = change_keys(read_config_text(file), changes)
        with whole(out) as partial:
            partial.write_text(text, encoding="utf-8")
            partial.chmod(0o644)
            _check(load_config_file(partial).config, wanted, strategy)
    except CannotEdit as e:
        raise ConfigError(
            f"--pick: {e} cannot be changed in {file} alone (an alias, or not a mapping); set it yourself: "
            + ", ".join(f"{key}={value}" for key, value in changes.items())
        ) from None
    except OSError as e:
        raise ConfigError(f"--pick {out}: it cannot be written ({e.strerror}); name another file") from None


def _picked(plan: Plan) -> tuple[Strategy, int, int, bool]:
    """Return the recommended strategy, ranks and microbatch, and whether that is the configured one."""
    recommendations = plan.recommendations
    if len(recommendations) != 1:
        numbers = ", ".join(str(each.ranks) for each in recommendations)
        raise ConfigError(f"--pick writes one config, and the plan is for {numbers} ranks: name one (--world N)")
    if (row := recommendations[0].row) is None:
        raise ConfigError(f"--pick: on {recommendations[0].ranks} ranks {recommendations[0].why}")
    return Strategy.parse(row.strategy), row.ranks, recommendations[0].micro, recommendations[0].micro == row.micro


def config_to_pick(config: Config, strategy: Strategy, ranks: int, micro: int, *, kept: bool) -> Config:
    """Return the config in a strategy on this many ranks, with microbatches of this many samples and its total batch.

    `kept`: whether that is the configured microbatch, which under `batch.tokens` may follow from lengths of samples.
    """
    parallel = config.parallel.changed({"data": ranks, **dict.fromkeys(AXES, 1)})
    moved = strategies.config_in_strategy(config.model_copy(update={"parallel": parallel}), strategy)
    assert isinstance(moved.parallel.data, int)
    sizes = moved.batch.settle(moved.parallel.data)
    batch = config.batch
    if batch.tokens is not None:
        return moved if kept else moved.changed({"batch.micro": micro, "batch.accumulate": None})
    values: dict[str, int | None] = {
        "total": None if batch.total is None else sizes.total,
        "micro": None if batch.micro is None and batch.accumulate is not None else micro,
        "accumulate": None if batch.accumulate is None else sizes.with_micro(micro).accumulate,
    }
    return moved.model_copy(update={"batch": moved.batch.model_copy(update=values)})


def _changes(source: ConfigSource, wanted: Config, folder: Path) -> Iterator[tuple[str, Any]]:
    """Yield the keys to change in the file, and what was given by --set."""
    config = source.config
    for key, origin in source.origins.items():
        value = value_at(config, key)
        changed = origin in ("--set", "overrides") or origin.startswith(SHORTENED)
        if changed and not isinstance(value, Mapping) and not key.startswith(_CHANGED):
            yield key, value
    yield from _paths(source, folder)
    if wanted.backend != config.backend or "backend" in source.origins:
        yield "backend", wanted.backend
    for section in ("parallel", "batch"):
        new = getattr(wanted, section)
        for name, field in type(new).model_fields.items():
            value = getattr(new, name)
            if value != field.get_default(call_default_factory=True) or f"{section}.{name}" in source.origins:
                yield f"{section}.{name}", value
    yield from _option_changes(config, wanted)


def _option_changes(config: Config, wanted: Config) -> Iterator[tuple[str, Any]]:
    fields = registry.find_backend(wanted.backend).options.model_fields
    old, new = (each.options.get(wanted.backend, {}) for each in (config, wanted))
    for name in dict.fromkeys((*old, *new)):
        value = new[name] if name in new else fields[name].get_default(call_default_factory=True)
        if old.get(name, ...) != value:
            yield f"options.{wanted.backend}.{name}", value


def _paths(source: ConfigSource, folder: Path) -> Iterator[tuple[str, Any]]:
    """Yield the paths that are relative to the config's folder, if that changes."""
    if folder == source.folder:
        return
    task = source.config.task
    use = None if task is None else task.use
    if use is not None and os.path.isabs(use):
        file, _, name = use.rpartition(":")
        yield "task.use", f"{os.path.relpath(file, folder)}:{name}"
    weights = source.config.model.weights
    if isinstance(weights, str):
        yield "model.weights", os.path.relpath(weights, folder)
    elif weights is not None:
        yield "model.weights.file", os.path.relpath(weights.file, folder)


def _check(written: Config, wanted: Config, strategy: Strategy) -> None:
    """Raise CannotEdit unless the written config is the wanted one."""
    actual, meant = (config.model_dump(exclude={"options"}) for config in (written, wanted))
    differing = [name for name, value in meant.items() if actual[name] != value]
    if differing or strategies.strategy_of(written) != strategy:
        raise CannotEdit(", ".join(differing) or "backend")
