"""Reading of a config file: its text, or an error that says why it cannot be read."""

from __future__ import annotations

from pathlib import Path

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
