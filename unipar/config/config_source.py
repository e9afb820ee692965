"""`ConfigSource`: a config read from a file or a mapping, with overrides, and the origin of each key."""

from __future__ import annotations

import copy
import math
import os
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeGuard

from pydantic import BaseModel, TypeAdapter, ValidationError

from unipar.config import safe_yaml
from unipar.config.config import Config
from unipar.config.config_file import read_yaml_file
from unipar.config.foreign_words import library_of_file
from unipar.config.sections.schedule import Schedule
from unipar.config.validation_errors import KeyOrigins, join_mistakes, list_mistakes
from unipar.errors import ConfigError
from unipar.utils.mappings import nested_mapping
from unipar.utils.text import show_value

NameCheck = Callable[[Mapping[str, Any], KeyOrigins], Iterable[str]]
"""Function that yields a sentence for each wrong name of a backend or tracker in a config that may be invalid."""

OVERRIDES = ("--set", "overrides")
"""Origins of values that a command line or a call gave beside a config."""

LENGTH_KEYS = ("steps", "epochs")
INTERVALS = ("eval.every", "train.ema.every", "train.consistency_check.every")
"""Keys that are numbers of steps between two actions, which have no effect beyond the last step."""

SHORTENED = "shortened for"
"""First words of the origin of a length that an overridden `train.steps` has changed."""

FROM_SCRIPT = "given"
"""Origin of a value that a script gave in a mapping or a Config."""

KEPT_ORIGIN = "kept from the run before"
"""Origin of a value that an earlier attempt's command has set, in a run that goes on."""

_CHANGES = (*OVERRIDES, KEPT_ORIGIN)
"""Origins of values that a command line or a call gave, now or before."""


class WrittenConfig(NamedTuple):
    """A config as its file, or a script's mapping, has it: before a command or overrides changed it."""

    values: Mapping[str, Any]
    origins: Mapping[str, str]


@dataclass(frozen=True)
class ConfigSource:
    """A config, its name, and the origin of each of its keys."""

    config: Config
    name: str
    """Name of the config, after which the run folder is named: the file's stem, or `run` without a file."""

    folder: Path
    """Folder to which `task.use` and `model.weights` are relative."""

    origins: Mapping[str, str] = field(default_factory=dict[str, str])
    """Origin of each dotted key: "line 12", "--set" or "overrides"; a key without one has its default value."""

    label: str = "the config"
    """Name of the config in error messages."""

    notes: tuple[str, ...] = ()
    """Sentences on values that were changed so that they fit to an overridden one."""

    written: WrittenConfig = field(default_factory=lambda: WrittenConfig({}, {}))
    changes: tuple[tuple[str, Any, str], ...] = ()
    """Changes that the command or the overrides made, in order: key, value and origin."""

    @property
    def out(self) -> Path:
        """Path of the run folder."""
        return Path(self.config.out or f"runs/{self.name}")

    @property
    def places(self) -> dict[str, str]:
        """Origins that errors show: those of values from a file or from overrides, not from a script's mapping."""
        return _places(self.origins)

    def place(self, key: str) -> str:
        """Return the origin of a key as " (line 12)", or "" if there is none."""
        origin = self.places.get(key)
        return f" ({origin})" if origin else ""

    def with_out(self, out: str) -> Self:
        """Return a copy with another run folder."""
        config = self.config.model_copy(update={"out": out})
        changes = (*self.changes, ("out", out, "--out"))
        return replace(self, config=config, origins={**self.origins, "out": "--out"}, changes=changes)


def load_config_file(
    file: Path,
    sets: Sequence[str] = (),
    overrides: Mapping[str, Any] | None = None,
    names: NameCheck | None = None,
    more: Sequence[Path] = (),
) -> ConfigSource:
    """Return the config of a file, changed by `more` files, each `--set key=value`, and the overrides of a script.

    Of several values of a key the last one counts. If the config is invalid, the error also has the sentences of
    `names`.
    """
    files = (file, *more)
    draft = _ConfigDraft({}, {}, " + ".join(map(str, files)))
    for each in files:
        data, lines = _read_keys(each)
        before = f"{each}, " if more else ""
        draft.add_file(data, {key: f"{before}line {n}" for key, n in lines.items()}, str(each))
        draft.locate(each.resolve().parent)
    draft.finish_written()
    for text in sets:
        draft.put(*parse_set_argument(text), "--set")
    for key, value in (overrides or {}).items():
        draft.put(key, value, "overrides")
    return draft.checked("+".join(each.stem for each in files), file.resolve().parent, names)


def _read_keys(file: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the values of a config file, and the line of each dotted key."""
    data, lines = read_yaml_file(file)
    if not isinstance(data, dict):
        what = "empty" if data is None else f"{'a list' if isinstance(data, list) else show_value(data)}, not a mapping"
        raise ConfigError(
            f"{file}, line 1: a config consists of keys and values, such as `batch: {{total: 32}}`; this is {what}"
        )
    if not data.keys() & {"batch", "train"} and (library := library_of_file(data)):
        quoted = shlex.quote(str(file))
        raise ConfigError(
            f"{file} is a config of {library}: `unipar import {quoted} -o train.yaml` makes one of unipar"
        )
    return data, lines


def load_given_config(
    config: Given, overrides: Mapping[str, Any] | None = None, names: NameCheck | None = None
) -> ConfigSource:
    """Return the config that `launch` was given, changed by its overrides; `names` as in `load_config_file`."""
    if isinstance(config, ConfigSource):
        if not overrides:
            return config
        draft = _ConfigDraft(_explicit_values(config.config), dict(config.origins), config.label)
        draft.written, draft.changes = config.written, [*config.changes]
        name, folder = config.name, config.folder
    elif isinstance(config, str | Path):
        return load_config_file(Path(config), (), overrides, names)
    else:
        name, folder = "run", Path.cwd()
        draft = _ConfigDraft({}, {}, "the config")
        if isinstance(config, Config):
            draft.data = _explicit_values(config)
            draft.origins.update((key, FROM_SCRIPT) for key in _dotted_keys(draft.data))
        else:
            for key, value in config.items():
                draft.put(key, value, FROM_SCRIPT)
        draft.finish_written()
    draft.locate(folder)
    for key, value in (overrides or {}).items():
        draft.put(key, value, "overrides")
    return draft.checked(name, folder, names)


def keep_changes(
    source: ConfigSource, earlier: Iterable[tuple[str, Any]], names: NameCheck | None = None
) -> ConfigSource:
    """Return the config as written, with an earlier command's changes before those of this one; `names` as above."""
    draft = _ConfigDraft(copy.deepcopy({**source.written.values}), {**source.written.origins}, source.label)
    draft.written = source.written
    for key, value in earlier:
        draft.put(key, value, KEPT_ORIGIN)
    for change in source.changes:
        draft.put(*change)
    return draft.checked(source.name, source.folder, names)


Given = str | Path | Mapping[str, Any] | Config | ConfigSource
"""Types in which a config may be given."""


class _ConfigDraft:
    """Values of a config and their origins, before validation."""

    def __init__(self, data: dict[str, Any], origins: dict[str, str], label: str) -> None:
        self.data, self.origins, self.label = data, origins, label
        self._written_steps: Any = None
        """`train.steps` before the first override."""

        self.written = WrittenConfig({}, {})
        self.changes: list[tuple[str, Any, str]] = []

    def finish_written(self) -> None:
        """Keep what is in the draft as the config that was written: what follows are changes to it."""
        self.written = WrittenConfig(copy.deepcopy(self.data), {**self.origins})
        self.changes.clear()

    def add_file(self, data: Mapping[str, Any], origins: Mapping[str, str], file: str) -> None:
        """Add the keys of a file, which count instead of those of the files before it."""
        for key, value in data.items():
            self._drop_other_length([key], value, file)
            self._merge(self.data, key, value, (key,), file)
        self.origins.update(origins)

    def put(self, dotted: str, value: Any, origin: str) -> None:
        """Set one key. A section changes only the keys that it names; one with another `name` replaces the old one."""
        value = _plain_copy(value, dotted, origin)
        self.changes.append((dotted, value, origin))
        steps = dotted.split(".")
        if origin in _CHANGES and self.origins.get("train.steps") not in _CHANGES:
            self._written_steps = nested_mapping(self.data, "train").get("steps")
        into = self.data
        for i, step in enumerate(steps[:-1]):
            above = ".".join(steps[: i + 1])
            if into.get(step) is None:
                into[step] = {}
                self.origins[above] = origin
            into = into[step]
            if not isinstance(into, dict):
                place = self.origins.get(above, "a default")
                raise ConfigError(
                    f"{origin} {dotted}: {above} is {show_value(into)} ({place}), not a section; "
                    f"give {above} in full: {{{steps[i + 1]}: ..., ...}}"
                )
        if origin != FROM_SCRIPT:
            self._drop_other_length(steps, value, origin)
        self._merge(into, steps[-1], value, tuple(steps), origin)

    def _merge(self, into: dict[str, Any], key: str, value: Any, path: tuple[str, ...], origin: str) -> None:
        old = into.get(key)
        if isinstance(value, dict) and isinstance(old, dict) and not _has_other_name(old, value):
            if not value and old:
                raise ConfigError(f"{origin} {'.'.join(path)}: {{}} changes nothing; name a key, or leave it out")
            for name, inner in value.items():
                self._merge(old, name, inner, (*path, name), origin)
            return
        dotted = ".".join(path)
        for known in [k for k in self.origins if k == dotted or k.startswith(f"{dotted}.")]:
            del self.origins[known]
        into[key] = value
        self.origins.update((k, origin) for k in (dotted, *_dotted_keys(value, f"{dotted}.")))

    def _drop_other_length(self, steps: Sequence[str], value: Any, origin: str) -> None:
        """Unset `train.steps` if `train.epochs` is overridden, and the reverse, unless that was an override, too."""
        changes = value if steps == ["train"] and isinstance(value, dict) else {}
        if len(steps) == 2 and steps[0] == "train":
            changes = {steps[1]: value}
        new = [name for name in LENGTH_KEYS if changes.get(name) is not None]
        train = self.data.get("train")
        if len(new) != 1 or not isinstance(train, dict):
            return
        other = LENGTH_KEYS[1 - LENGTH_KEYS.index(new[0])]
        if self.origins.get(f"train.{other}", "") not in OVERRIDES and train.get(other) is not None:
            train[other] = None
            self.origins[f"train.{other}"] = f"{origin} train.{new[0]}"

    def locate(self, folder: Path) -> None:
        """Make `task.use` and the file of `model.weights` absolute, relative to `folder`."""
        task = self.data.get("task")
        use = task.get("use") if isinstance(task, dict) else None
        if isinstance(task, dict) and isinstance(use, str):
            task["use"] = _absolute_use(use, folder)
        model = self.data.get("model")
        weights = model.get("weights") if isinstance(model, dict) else None
        if isinstance(model, dict) and isinstance(weights, str):
            model["weights"] = _absolute_path(weights, folder)
        elif isinstance(weights, dict) and isinstance(weights.get("file"), str):
            weights["file"] = _absolute_path(weights["file"], folder)

    def checked(self, name: str, folder: Path, names: NameCheck | None) -> ConfigSource:
        """Return the validated config; raise ConfigError if it is invalid."""
        self.locate(Path.cwd())  # paths from the command line or a script, which are still relative
        notes = (*self._shorten_schedule(), *self._shorten_intervals())
        places = _places(self.origins)
        try:
            config = Config.model_validate(self.data)
        except ValidationError as e:
            mistakes = [*list_mistakes(e, places), *(names(self.data, places) if names is not None else ())]
            raise ConfigError(f"{self.label}: {join_mistakes(mistakes)}") from None
        return ConfigSource(config, name, folder, self.origins, self.label, notes, self.written, tuple(self.changes))

    def _shorten_schedule(self) -> tuple[str, ...]:
        """Shorten a schedule that does not fit into an overridden `train.steps`; return a sentence that says so.

        One that was overridden as well, or that did not fit before, stays as it is, and is refused.
        """
        train = nested_mapping(self.data, "train")
        steps, schedule_section, written = train.get("steps"), nested_mapping(train, "schedule"), self._written_steps
        origin = self.origins.get("train.steps")
        is_chosen = any(self.origins[key] in _CHANGES for key in self.origins if key.startswith("train.schedule"))
        if origin not in _CHANGES or is_chosen or not _is_count(steps):
            return ()
        schedule = _read_schedule(schedule_section)
        if schedule is None or schedule.misfit(steps) is None:
            return ()
        of = written if _is_count(written) else steps
        while of != written and schedule.misfit(of) is not None:
            of *= 2  # the file gives train.epochs, and their number of steps is not known here
        if schedule.misfit(of) is not None:
            return ()
        lengths = schedule.shortened(steps, of)
        shorter = _read_schedule({**schedule_section, **lengths})
        if shorter is not None and shorter.misfit(steps) is None:
            schedule_section.update(lengths)
            change = ", ".join(
                f"{key} {show_value(getattr(schedule, key))} -> {show_value(lengths[key])}" for key in lengths
            )
        else:  # a run of one or two steps
            train["schedule"], lengths = {"name": "constant"}, {"name": "constant"}
            change = f"{schedule.name} -> constant"
        why = f"{origin} train.steps={steps}"
        self.origins.update({f"train.schedule.{key}": f"{SHORTENED} {why}" for key in lengths})
        return (f"{why} shortens train.schedule{f', written for {written} steps' if of == written else ''}: {change}",)

    def _shorten_intervals(self) -> Iterator[str]:
        """Lower each number of steps between two actions to an overridden `train.steps`; yield a sentence for each.

        One that was overridden as well stays as it is, and is refused by a run.
        """
        steps, origin = nested_mapping(self.data, "train").get("steps"), self.origins.get("train.steps")
        if origin not in _CHANGES or not _is_count(steps):
            return
        for key in INTERVALS:
            section, (*path, name) = self.data, key.split(".")
            for step in path:
                section = nested_mapping(section, step)
            every = section.get(name)
            if _is_count(every) and every > steps and self.origins.get(key) not in _CHANGES:
                section[name] = steps
                self.origins[key] = f"{SHORTENED} {origin} train.steps={steps}"
                yield f"{origin} train.steps={steps} lowers {key}: {every} -> {steps}"


def _read_schedule(data: Mapping[str, Any]) -> Schedule | None:
    """Return a section train.schedule, or None if it is invalid."""
    try:
        return _SCHEDULE.validate_python(data)
    except ValidationError:
        return None


_SCHEDULE: TypeAdapter[Schedule] = TypeAdapter(Schedule)


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _places(origins: Mapping[str, str]) -> dict[str, str]:
    return {key: origin for key, origin in origins.items() if origin != FROM_SCRIPT}


def parse_set_argument(text: str) -> tuple[str, Any]:
    """Return the key and the value, read as YAML, of a `key=value` argument."""
    key, equals, value = text.partition("=")
    if not equals or not all(key.split(".")):
        raise ConfigError(f"--set {text}: write key=value, as in --set train.steps=100")
    try:
        return key, safe_yaml.parse_yaml(value)[0]
    except safe_yaml.YamlError as e:
        raise ConfigError(f"--set {text}: {e.sentence}") from None


def _absolute_use(use: str, folder: Path) -> str:
    file, colon, name = use.rpartition(":")
    return f"{(folder / file).resolve()}:{name}" if colon and (file.endswith(".py") or "/" in file) else use


def _absolute_path(file: str, folder: Path) -> str:
    """Return an absolute path without resolving links; their targets are checked before the file is read."""
    return os.path.normpath(folder / file)


def _has_other_name(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Return whether a section names another optimizer or schedule, which does not inherit the old one's keys."""
    return "name" in new and new["name"] != old.get("name")


def _dotted_keys(value: Any, prefix: str = "") -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield (dotted := f"{prefix}{key}")
            yield from _dotted_keys(inner, f"{dotted}.")


def _explicit_values(section: BaseModel) -> dict[str, Any]:
    """Return the keys that were set explicitly, and each section's `name`, which says which section it is."""
    names = section.model_fields_set | ({"name"} & type(section).model_fields.keys())
    values = {name: getattr(section, name) for name in names}
    return {
        name: _explicit_values(value) if isinstance(value, BaseModel) else copy.deepcopy(value)
        for name, value in values.items()
    }


def _plain_copy(value: Any, key: str, origin: str, depth: int = 1) -> Any:
    """Return a copy; raise ConfigError for values that a config file cannot hold and other processes would not get."""
    if depth > safe_yaml.MAX_YAML_DEPTH:
        raise ConfigError(f"{origin} {key}: nested more than {safe_yaml.MAX_YAML_DEPTH} levels deep")
    if value is None or isinstance(value, str | bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
        return {name: _plain_copy(inner, f"{key}.{name}", origin, depth + 1) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain_copy(inner, f"{key}.{i}", origin, depth + 1) for i, inner in enumerate(value)]
    raise ConfigError(
        f"{origin} {key}: {show_value(value)} is not a plain value: a config holds text, finite numbers, true, false, "
        "null, lists, and mappings whose keys are text"
    )
