"""Config of an earlier attempt: which of its keys a run that goes on keeps, and which have other values now."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final, NamedTuple

from pydantic import BaseModel, ValidationError

from unipar.backend.checks import STRATEGY, CheckedSource, in_strategy, with_earlier_changes
from unipar.backend.offered_strategies import named_strategy
from unipar.config import BatchSizes, Config
from unipar.config.config_source import FROM_SCRIPT, KEPT_ORIGIN, ConfigSource
from unipar.config.settled import SettledConfig
from unipar.run_folder.folder import newest_run_folder
from unipar.run_folder.layout import read_launch_file
from unipar.utils.mappings import flatten
from unipar.utils.text import show_value

_OF_ONE_ATTEMPT: Final = ("out", "resume")
"""Keys that say where a run is and how it begins: they are not kept, and not listed."""

_NOT_OF_THE_STATE: Final = ("backend", "device", "parallel", "log", "launch", "machines", "compare")
"""Keys that are not listed for another run's checkpoint; its strategy and its number of ranks are shown anyway."""


class ChangedValue(NamedTuple):
    """Key of a config with another value than before, and the origin of the new one."""

    key: str
    before: Any
    now: Any
    origin: str


def keep_earlier_changes(source: CheckedSource, *, other_strategy: bool = False) -> CheckedSource:
    """Return the config of a run that goes on, with what the command of the run before has set.

    What this command sets comes after it. A key whose value in the file has changed since is taken from the file.
    `other_strategy`: the caller moves the config to another strategy next, so that the earlier one is not kept.
    """
    if source.config.resume != "auto":
        return source
    run = newest_run_folder(source.out, alone=source.config.out is not None)
    before = {} if run is None else read_launch_file(run).get("given", {})
    if not before:  # a run that an older unipar has begun
        return source
    edited = _changed_keys(before["written"], source.written.values)
    anew = {key for name, value, _ in source.changes for key in _keys_of(name, value)}
    kept: list[tuple[str, Any]] = []
    strategy: str | None = None
    for key, value in before["changes"]:
        if key == STRATEGY:
            strategy = value
        elif not edited & _keys_of(key, value):
            kept.append((key, value))
    source = with_earlier_changes(source, kept)
    if strategy is None or other_strategy or named_strategy(source.config, strategy)[1].keys() & (edited | anew):
        return source
    return in_strategy(source, strategy, KEPT_ORIGIN)


def given_config(source: ConfigSource) -> dict[str, Any]:
    """Return for launch.json what the file says and what the command has set, from which a later attempt keeps it."""
    changes = {(key, json.dumps(value)): [key, value] for key, value, _ in source.changes if key not in _OF_ONE_ATTEMPT}
    return {"written": _plain(source.written.values), "changes": _plain([*changes.values()])}


def kept_keys(source: ConfigSource) -> list[str]:
    """Return each key, with its value, that the command of the run before has set and this one does not mention."""
    kept = [key for key, origin in source.origins.items() if origin == KEPT_ORIGIN]
    values = dict(flatten(source.config.model_dump(mode="json")))
    return [f"{key}: {show_value(values[key])}" for key in kept if key in values]


def list_changed_values(
    before: Mapping[str, Any], settled: SettledConfig, origins: Mapping[str, str], *, of_state: bool = False
) -> list[ChangedValue]:
    """Return each key whose value is another than in the config `before`, of an attempt or, `of_state`, a checkpoint.

    A section that is there in one of them alone is one key.
    """
    left_out = {*_OF_ONE_ATTEMPT, *(_NOT_OF_THE_STATE if of_state else ())}
    now, origins = _with_total(settled.config, settled.sizes), {**origins}
    if settled.config.batch.total is None:
        origins["batch.total"] = "micro, accumulate and the number of ranks"
    return [
        ChangedValue(key, old, new, _origin(key, origins))
        for key, old, new in _differences(_completed(before), now)
        if key.partition(".")[0] not in left_out
    ]


def describe_changed_config(changes: Collection[ChangedValue], kept: Collection[str], config: Config) -> Iterator[str]:
    """Yield the lines that a run which goes on shows: what it keeps, what has changed, and whether it saves nothing."""
    if config.checkpoint is None:
        yield "this run will save nothing, as its config has no section checkpoint (--set checkpoint.every=... adds it)"
    if kept:
        yield f"{KEPT_ORIGIN}: {', '.join(kept)}"
    for key, before, now, origin in changes:
        yield f"{key}: {show_value(before)} -> {show_value(now)} ({origin})"


def _completed(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a config with the default of each key that it does not have; as it is if this unipar refuses it."""
    try:
        completed = Config.model_validate_json(json.dumps(config))
        return _with_total(completed, completed.batch.settle(config["parallel"]["data"]))
    except (ValidationError, ValueError, LookupError, TypeError):
        return config


def _with_total(config: Config, sizes: BatchSizes) -> Mapping[str, Any]:
    """Return a config as plain values, with the batch's total, which micro and accumulate may say."""
    return config.changed({"batch.total": sizes.total} if sizes.tokens is None else {}).model_dump(mode="json")


def _differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    for key in dict.fromkeys((*old, *new)):
        a, b = old.get(key), new.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            yield from _differences(a, b, f"{prefix}{key}.")
        elif a != b:
            yield f"{prefix}{key}", a, b


def _origin(key: str, origins: Mapping[str, str]) -> str:
    """Return where the value of a key comes from; another strategy may also change how many ranks there are."""
    of_strategy = origins.get("backend") if key.startswith("parallel.") else None
    origin = origins.get(key, STRATEGY if of_strategy == STRATEGY else "by default")
    return "the script" if origin == FROM_SCRIPT else origin


def _changed_keys(old: Mapping[str, Any], new: Mapping[str, Any]) -> set[str]:
    before, now = dict(flatten(_plain(old))), dict(flatten(_plain(new)))
    return {key for key in before.keys() | now.keys() if key not in before or key not in now or before[key] != now[key]}


def _keys_of(key: str, value: Any) -> set[str]:
    """Return the keys that a change sets."""
    return {name for name, _ in flatten({key: value})}


def _plain(value: Any) -> Any:
    """Return a value as JSON has it."""
    return json.loads(json.dumps(value, default=_plain_section))


def _plain_section(value: Any) -> Any:
    return value.model_dump(mode="json", exclude_unset=True) if isinstance(value, BaseModel) else str(value)
