"""Reading of a config file: its text or its keys, or an error that says why it cannot be read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unipar.config import safe_yaml
from unipar.errors import ConfigError
from unipar.utils.text import closest

BYTES = 1 << 20
"""Largest size of a config file."""


def read_config_text(file: Path) -> str:
    """Return the text of a config file; raise ConfigError if there is none, it is too large, or it is not UTF-8."""
    if not file.is_file():
        raise ConfigError(_why_no_file(file))
    if file.suffix == ".py":
        raise ConfigError(f"{file} is a Python file, not a config: start it with `python {file}`")
    try:
        with file.open("rb") as opened:
            raw = opened.read(BYTES + 1)
    except OSError as e:
        raise ConfigError(f"{file} cannot be read: {e.strerror}") from None
    if len(raw) > BYTES:
        line = raw.count(b"\n") + 1
        raise ConfigError(f"{file}, line {line}: the file is larger than 1 MiB, so it is not a config")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as e:
        line = raw.count(b"\n", 0, e.start) + 1
        raise ConfigError(
            f"{file}, line {line}: byte 0x{raw[e.start]:02x} is not UTF-8; save the file as UTF-8"
        ) from None


def read_yaml_file(file: Path) -> tuple[Any, dict[str, int]]:
    """Return the values of a .yaml file, and the line of each dotted key; raise ConfigError with the line if wrong."""
    try:
        data, lines = safe_yaml.parse_yaml(read_config_text(file))
    except safe_yaml.YamlError as e:
        raise ConfigError(f"{file}, line {e.line}: {e.sentence}") from None
    return data, {".".join(path): line for path, line in lines.items()}


def read_mapping_file(
    file: Path, wanted: str = "a mapping of keys and values is wanted"
) -> tuple[dict[str, Any], Mapping[str, int]]:
    """Return the keys of a .json file, or a .yaml one, and the line of each dotted key, where known.

    `wanted`: sentence of the error if it holds something else.
    """
    data, lines = (_read_json_file(file), dict[str, int]()) if file.suffix == ".json" else read_yaml_file(file)
    if not isinstance(data, dict):
        raise ConfigError(f"{file}, line 1: {wanted}")
    return data, lines


def _read_json_file(file: Path) -> Any:
    def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        mapping: dict[str, Any] = {}
        for key, value in pairs:
            if key in mapping:
                raise ConfigError(f"{file}: the key {key!r} is given twice; remove one")
            mapping[key] = value
        return mapping

    def refuse_constant(word: str) -> Any:
        raise ConfigError(f"{file}: the number {word} is not finite")

    try:
        return json.loads(read_config_text(file), object_pairs_hook=without_duplicates, parse_constant=refuse_constant)
    except json.JSONDecodeError as e:
        raise ConfigError(f"{file}, line {e.lineno}: {e.msg}") from None
    except RecursionError:
        raise ConfigError(f"{file}: nested too deep to be a config") from None


def _why_no_file(file: Path) -> str:
    """Return why a path is not a file that can be read, and which file was perhaps meant."""
    if file.is_dir():
        return f"{file} is a folder; name a config file in it"
    if file.exists():
        return f"{file} is not a plain file"
    if not file.parent.is_dir():
        return f"there is no file {file}: there is no folder {file.parent}"
    siblings = sorted(p.name for p in file.parent.iterdir() if p.suffix in (".yaml", ".yml"))
    near = closest(file.name, siblings)
    return f"there is no file {file}" + (f"; did you mean {file.parent / near}?" if near else "")
