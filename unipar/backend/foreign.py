"""Another library's config on its way to one of ours: what is carried, left out, refused or asked for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from unipar.errors import ConfigError
from unipar.utils.text import did_you_mean, show_value

AUTO = "auto"
_T = TypeVar("_T")


@dataclass
class ForeignConfigReader:
    """One file being read. The reader takes its keys one by one; what is left over at the end is not known."""

    label: str
    folder: Path
    """What paths in the file are relative to."""

    lines: Mapping[str, int]
    """Dotted key -> its line, where that is known."""

    said: Mapping[str, Any]
    """Keys of our config that were given by `--set`: they win, and answer what the file leaves open."""

    leave: frozenset[str] = frozenset()
    """Keys of the file that shall be left out."""

    world: int | None = None
    config: dict[str, Any] = field(default_factory=dict[str, Any])
    """Dotted keys of ours."""

    notes: dict[str, str] = field(default_factory=dict[str, str])
    """What is to be said beside them."""

    left_out: list[str] = field(default_factory=list[str])
    wrong: list[str] = field(default_factory=list[str])
    used: set[str] = field(default_factory=set[str])
    """Keys of `leave` that were there."""

    def put(self, key: str, value: Any, note: str = "") -> None:
        """A key of ours; what `--set` says stands."""
        if not self.answered(key):
            self.config[key] = value
            if note:
                self.notes[key] = note

    def answered(self, key: str) -> bool:
        """Whether `--set` gave this key, one below it or one above it."""
        return any(k == key or k.startswith(f"{key}.") or key.startswith(f"{k}.") for k in self.said)

    def refuse(self, theirs: str, why: str, ours: str | None = None) -> None:
        """A key that cannot be carried. The way out: `--set` of `ours`, or `--leave` where we have no such thing."""
        if ours is not None and self.answered(ours):
            self.left_out.append(f"{theirs}: {why} (--set {ours} stands instead)")
        elif ours is None and theirs in self.leave:
            self.used.add(theirs)
            self.left_out.append(f"{theirs}: {why} (left out as asked)")
        else:
            way = f"say what shall hold with --set {ours}=..." if ours else f"--leave {theirs} goes on without it"
            self.wrong.append(f"{self.place(theirs)}: {why}; {way}")

    def omit(self, theirs: str, why: str) -> None:
        """A key on which training does not depend."""
        self.left_out.append(f"{theirs}: {why}")

    def ask(self, theirs: str, ours: str, example: str) -> None:
        """A value that the file leaves open."""
        if not self.answered(ours):
            self.wrong.append(f"{self.place(theirs)}: say it with --set {ours}={example}")

    def place(self, theirs: str) -> str:
        line = self.lines.get(theirs)
        return f"{theirs} (line {line})" if line else theirs

    def section(self, data: Mapping[str, Any], prefix: str = "") -> ForeignSection:
        return ForeignSection(self, dict(data), prefix)


class ForeignSection:
    """A mapping of the file, emptied key by key."""

    def __init__(self, reading: ForeignConfigReader, data: dict[str, Any], prefix: str) -> None:
        self.reading, self.data, self.prefix = reading, data, prefix

    def name(self, key: str) -> str:
        return f"{self.prefix}{key}"

    def __contains__(self, key: str) -> bool:
        return key in self.data

    def take(self, key: str, kind: type[_T], default: _T) -> _T:
        """The value, removed; one of another kind is wrong, and the default goes on."""
        value: Any = self.data.pop(key, None)
        if value is None:
            return default
        if isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
            return value
        number = _as_number(value, kind)
        if number is not None:
            return number
        self.reading.wrong.append(
            f"{self.reading.place(self.name(key))}: {show_value(value)} is not {_TYPE_NAMES[kind]}"
        )
        return default

    def open(self, key: str, ours: str, example: str) -> bool:
        """Whether the value is `auto`, which is then asked for, and taken as not there."""
        if self.data.get(key) != AUTO:
            return False
        del self.data[key]
        self.reading.ask(f'{self.name(key)}: "auto"', ours, example)
        return True

    def below(self, key: str) -> ForeignSection:
        return ForeignSection(self.reading, dict(self.take(key, dict, {})), f"{self.name(key)}.")

    def omit(self, keys: Mapping[str, str]) -> None:
        for key, why in keys.items():
            if key in self.data:
                del self.data[key]
                self.reading.omit(self.name(key), why)

    def refuse(self, keys: Mapping[str, str], *, unless: tuple[Any, ...] = (None, False, {}, [], "")) -> None:
        """Those that say something; one that says nothing is dropped."""
        for key, why in keys.items():
            if key in self.data:
                value = self.data.pop(key)
                off = isinstance(value, dict) and value.get("enabled") is False
                if not off and not any(value is u or (type(value) is type(u) and value == u) for u in unless):
                    self.reading.refuse(self.name(key), why)

    def expect(self, key: str, value: Any, why: str) -> None:
        """A key that may only say what is so anyway."""
        if key in self.data and self.data.pop(key) not in (value, AUTO):
            self.reading.refuse(self.name(key), why)

    def end(self, known: Iterable[str]) -> None:
        """What is still there is not known."""
        words = sorted(known)
        for key in self.data:
            name = self.name(key)
            if name in self.reading.leave:
                self.reading.used.add(name)
                self.reading.omit(name, "not known (left out as asked)")
            else:
                self.reading.wrong.append(f"{self.reading.place(name)}: there is no such key{did_you_mean(key, words)}")


def _as_number(value: object, kind: type) -> Any:
    """A whole number where one with a point is wanted, or a number in quotes."""
    if kind not in (int, float) or isinstance(value, bool) or not isinstance(value, int | str):
        return None
    try:
        return kind(value)
    except ValueError:
        return None


_TYPE_NAMES: Mapping[type, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    list: "a list",
    dict: "a mapping",
}


def import_error(reading: ForeignConfigReader) -> ConfigError:
    """All that is wrong, a line each."""
    if len(reading.wrong) == 1:
        return ConfigError(f"{reading.label}: {reading.wrong[0]}")
    return ConfigError("\n  - ".join([f"{reading.label} cannot be carried as it is:", *reading.wrong]))
