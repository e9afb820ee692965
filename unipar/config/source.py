"""A config as it was given: read from a file or a mapping, overridden in one order, with where each key came from."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ValidationError

from unipar.config import safe_yaml
from unipar.config.config import Config
from unipar.config.config_file import read_config_text
from unipar.config.sections.parallel import UNSUPPORTED_KEYS
from unipar.config.validation_errors import describe_errors
from unipar.errors import ConfigError
from unipar.utils.text import show_value

LENGTH_KEYS = ("steps", "epochs")
_FROM_SCRIPT = "given"
"""Where a value came from that a script gave as a mapping or a Config."""


@dataclass(frozen=True)
class ConfigSource:
    """A config, its name, and where each of its keys was given."""

    config: Config
    name: str
    """The file's stem; `run` for a config that came from no file. The run folder is named after it."""

    folder: Path
    """What `task.use` and `model.weights` are relative to."""

    origins: Mapping[str, str] = field(default_factory=dict[str, str])
    """Dotted key -> "line 12", "--set" or "overrides"; a key that is not in it is a default."""

    label: str = "the config"
    """How errors call it."""

    @property
    def out(self) -> Path:
        """The run folder."""
        return Path(self.config.out or f"runs/{self.name}")

    @property
    def places(self) -> dict[str, str]:
        """Origins as errors name them: a value that a script gave has none."""
        return _places(self.origins)

    def place(self, key: str) -> str:
        """Return where a key was given, in brackets after a blank, or ""."""
        origin = self.places.get(key)
        return f" ({origin})" if origin else ""

    def with_out(self, out: str, origin: str = "--out") -> Self:
        """Return the same run with another run folder."""
        config = self.config.model_copy(update={"out": out})
        return replace(self, config=config, origins={**self.origins, "out": origin})


def load_config_file(file: Path, sets: Sequence[str] = (), overrides: Mapping[str, Any] | None = None) -> ConfigSource:
    """The config in a file, then each `--set key=value` in order, then the overrides of a script."""
    label = str(file)
    data, lines = _parse_file(read_config_text(file), label)
    if not isinstance(data, dict):
        what = "empty" if data is None else f"{'a list' if isinstance(data, list) else show_value(data)}, not a mapping"
        raise ConfigError(
            f"{label}, line 1: a config is keys and values, such as `batch: {{total: 32}}`; this is {what}"
        )
    draft = _ConfigDraft(data, {".".join(path): f"line {n}" for path, n in lines.items()}, label)
    draft.locate(file.resolve().parent)
    for text in sets:
        draft.put(*parse_set_argument(text), "--set")
    for key, value in (overrides or {}).items():
        draft.put(key, value, "overrides")
    return draft.checked(file.stem, file.resolve().parent)


def load_given_config(config: Given, overrides: Mapping[str, Any] | None = None) -> ConfigSource:
    """What `launch` was given, with its overrides."""
    if isinstance(config, ConfigSource):
        if not overrides:
            return config
        draft = _ConfigDraft(_explicit_values(config.config), dict(config.origins), config.label)
        name, folder = config.name, config.folder
    elif isinstance(config, str | Path):
        return load_config_file(Path(config), (), overrides)
    else:
        name, folder = "run", Path.cwd()
        draft = _ConfigDraft({}, {}, "the config")
        if isinstance(config, Config):
            draft.data = _explicit_values(config)
            draft.origins.update((key, _FROM_SCRIPT) for key in _dotted_keys(draft.data))
        else:
            for key, value in config.items():
                draft.put(key, value, _FROM_SCRIPT)
    draft.locate(folder)
    for key, value in (overrides or {}).items():
        draft.put(key, value, "overrides")
    return draft.checked(name, folder)


Given = str | Path | Mapping[str, Any] | Config | ConfigSource
"""What a config may be given as."""


class _ConfigDraft:
    """Values on their way to a Config."""

    def __init__(self, data: dict[str, Any], origins: dict[str, str], label: str) -> None:
        self.data, self.origins, self.label = data, origins, label

    def put(self, dotted: str, value: Any, origin: str) -> None:
        """One key: a section changes only the keys that it names; one with another `name` begins anew."""
        value = _plain_copy(value, dotted, origin)
        steps = dotted.split(".")
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
                    f"give {above} as a whole: {{{steps[i + 1]}: ..., ...}}"
                )
        if origin != _FROM_SCRIPT:
            self._drop_other_length(steps, value, origin)
        self._merge(into, steps[-1], value, tuple(steps), origin)

    def _merge(self, into: dict[str, Any], key: str, value: Any, path: tuple[str, ...], origin: str) -> None:
        old = into.get(key)
        if isinstance(value, dict) and isinstance(old, dict) and not _has_other_name(old, value):
            if not value and old:
                raise ConfigError(
                    f"{origin} {'.'.join(path)}: {{}} changes nothing; a section changes the keys it names"
                )
            for name, inner in value.items():
                self._merge(old, name, inner, (*path, name), origin)
            return
        dotted = ".".join(path)
        for known in [k for k in self.origins if k == dotted or k.startswith(f"{dotted}.")]:
            del self.origins[known]
        into[key] = value
        self.origins.update((k, origin) for k in (dotted, *_dotted_keys(value, f"{dotted}.")))

    def _drop_other_length(self, steps: Sequence[str], value: Any, origin: str) -> None:
        """A length given here replaces the other one that only the config gave."""
        said = value if steps == ["train"] and isinstance(value, dict) else {}
        if len(steps) == 2 and steps[0] == "train":
            said = {steps[1]: value}
        now = [name for name in LENGTH_KEYS if said.get(name) is not None]
        train = self.data.get("train")
        if len(now) != 1 or not isinstance(train, dict):
            return
        other = LENGTH_KEYS[1 - LENGTH_KEYS.index(now[0])]
        if self.origins.get(f"train.{other}", "") not in ("--set", "overrides") and train.get(other) is not None:
            train[other] = None
            self.origins[f"train.{other}"] = f"{origin} train.{now[0]}"

    def locate(self, folder: Path) -> None:
        """`file.py:Class` and a file of weights become absolute; they are relative to what names them."""
        task = self.data.get("task")
        use = task.get("use") if isinstance(task, dict) else None
        if isinstance(task, dict) and isinstance(use, str):
            task["use"] = _absolute_use(use, folder)
        model = self.data.get("model")
        said = model.get("weights") if isinstance(model, dict) else None
        if isinstance(model, dict) and isinstance(said, str):
            model["weights"] = _absolute_path(said, folder)
        elif isinstance(said, dict) and isinstance(said.get("file"), str):
            said["file"] = _absolute_path(said["file"], folder)

    def checked(self, name: str, folder: Path) -> ConfigSource:
        self.locate(Path.cwd())  # one that was given on the command line or by a script
        places = _places(self.origins)
        for key, sentence in UNSUPPORTED_KEYS.items():
            if _has_key(self.data, key.split(".")):
                way = "" if ";" in sentence else "; leave the key out"
                place = f" ({places[key]})" if key in places else ""
                raise ConfigError(f"{self.label}: {key}{place}: {sentence}{way}")
        try:
            config = Config.model_validate(self.data)
        except ValidationError as e:
            raise ConfigError(f"{self.label}: {describe_errors(e, places)}") from None
        return ConfigSource(config, name, folder, self.origins, self.label)


def _places(origins: Mapping[str, str]) -> dict[str, str]:
    return {key: origin for key, origin in origins.items() if origin != _FROM_SCRIPT}


def _parse_file(text: str, label: str) -> tuple[Any, dict[safe_yaml.KeyPath, int]]:
    try:
        return safe_yaml.parse_yaml(text)
    except safe_yaml.YamlError as e:
        raise ConfigError(f"{label}, line {e.line}: {e.sentence}") from None


def parse_set_argument(text: str) -> tuple[str, Any]:
    """`key=value`, its value read as YAML."""
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
    """Absolute, links not followed: where they lead is looked at before the file is read."""
    return os.path.normpath(folder / file)


def _has_other_name(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Another optimizer or schedule does not inherit the keys of the one before it."""
    return "name" in new and new["name"] != old.get("name")


def _has_key(data: Any, steps: Sequence[str]) -> bool:
    for step in steps:
        if not isinstance(data, dict) or step not in data:
            return False
        data = data[step]
    return True


def _dotted_keys(value: Any, prefix: str = "") -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield (dotted := f"{prefix}{key}")
            yield from _dotted_keys(inner, f"{dotted}.")


def _explicit_values(section: BaseModel) -> dict[str, Any]:
    """The keys that whoever made a Config named; a section's `name` always, as it says which section it is."""
    named = section.model_fields_set | ({"name"} & type(section).model_fields.keys())
    said = {name: getattr(section, name) for name in named}
    return {
        name: _explicit_values(value) if isinstance(value, BaseModel) else copy.deepcopy(value)
        for name, value in said.items()
    }


def _plain_copy(value: Any, key: str, origin: str, depth: int = 1) -> Any:
    """A copy made of what a file could hold as well, so that every process sees the same."""
    if depth > safe_yaml.MAX_YAML_DEPTH:
        raise ConfigError(f"{origin} {key}: nested more than {safe_yaml.MAX_YAML_DEPTH} deep")
    if value is None or isinstance(value, str | bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
        return {name: _plain_copy(inner, f"{key}.{name}", origin, depth + 1) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain_copy(inner, f"{key}.{i}", origin, depth + 1) for i, inner in enumerate(value)]
    raise ConfigError(
        f"{origin} {key}: {show_value(value)} is not plain: a config holds text, finite numbers, true, false, null, "
        "lists, and mappings whose keys are text"
    )
