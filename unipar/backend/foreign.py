"""Conversion of another library's config: keys that are converted, left out, refused or asked for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

from unipar.config.sections.optimizer import OPTIMIZERS
from unipar.errors import ConfigError
from unipar.utils.text import did_you_mean, show_value

AUTO = "auto"
"""Value by which a config leaves a key to its library."""
_T = TypeVar("_T")


@dataclass(frozen=True)
class Answer:
    """Value of one unipar key that the file leaves to the script."""

    value: Any
    why: str
    from_user: bool
    """Whether the user gave it by `--args`, rather than a default."""

    usual: bool = False
    """Whether it is the default of the Trainer whose arguments are given, which needs no remark."""


@dataclass(frozen=True)
class Answers:
    """Values of unipar keys that the file leaves to the script."""

    by_key: Mapping[str, Answer]
    precision: str | None = None
    """`bf16` or `fp16`, if `--args` say so; the strategy decides what it means."""

    precision_why: str = ""


@dataclass
class ForeignConfigReader:
    """State of converting one file: the resulting config, and messages on keys that were left out or are wrong."""

    label: str
    folder: Path
    """Folder of the file; paths in it are relative to that, or to the working directory, as the libraries take them."""

    lines: Mapping[str, int]
    """Dotted key -> its line in the file, where known."""

    overrides: Mapping[str, Any]
    """Keys of the unipar config given by `--set`: they override the file, and fill in values that it leaves open."""

    leave: frozenset[str] = frozenset()
    """Keys of the file to be left out, given by `--leave`."""

    world: int | None = None
    answers: Answers | None = None
    """Values of what the file leaves open; None: ask for each of them."""

    strict: bool = False
    """Whether nothing is to be assumed."""

    asks_for_optimizer: bool = False
    """Whether the file leaves the optimizer to the script."""

    assumed: list[str] = field(default_factory=list[str])
    """Keys that were filled by a default, each with its value."""

    config: dict[str, Any] = field(default_factory=dict[str, Any])
    """Resulting unipar config, by dotted key."""

    notes: dict[str, str] = field(default_factory=dict[str, str])
    """Remarks written beside keys of the resulting config."""

    left_out: list[str] = field(default_factory=list[str])
    wrong: list[str] = field(default_factory=list[str])
    read: set[str] = field(default_factory=set[str])
    """Keys of the file whose values were read."""

    used: set[str] = field(default_factory=set[str])
    """Keys of `leave` that the file has."""

    def locate(self, named: str) -> Path:
        """Return the path of a file that this one names; raise ConfigError if there is none."""
        beside = self.folder / named
        if beside.exists():
            return beside
        here = Path(named).absolute()
        if here.exists():
            return here
        raise ConfigError(
            f"{self.label}: it names {named}, and there is no such file, neither from its folder ({beside}) nor from "
            "the working directory: call import in the folder from which the path leads there"
        )

    def put(self, key: str, value: Any, note: str = "") -> None:
        """Set a key of the unipar config, with a remark, unless `--set` gave it."""
        if not self.answered(key):
            self.config[key] = value
            if note:
                self.notes[key] = note

    def answered(self, key: str) -> bool:
        """Return whether `--set` gave this key, one below it or one above it."""
        return any(k == key or k.startswith(f"{key}.") or key.startswith(f"{k}.") for k in self.overrides)

    def refuse(self, theirs: str, why: str, ours: str | None = None) -> None:
        """Record that a key cannot be converted.

        The way out is `--set` of the unipar key `ours`, or `--leave` if unipar has no such key.
        """
        if ours is not None and self.answered(ours):
            self.left_out.append(f"{theirs}: {why} (replaced by --set {ours})")
        elif ours is None and theirs in self.leave:
            self.used.add(theirs)
            self.left_out.append(f"{theirs}: {why} (left out by --leave)")
        else:
            way = f"choose a value with --set {ours}=..." if ours else f"leave it out with --leave {theirs}"
            self.wrong.append(f"{self.place(theirs)}: {why}; {way}")

    def omit(self, theirs: str, why: str) -> None:
        """Record that a key is left out because training does not depend on it."""
        self.left_out.append(f"{theirs}: {why}")

    def assume(self, ours: str) -> bool:
        """Fill the unipar key `ours`, and those below it, from the answers; return False if none of them knows it."""
        known = self.answers.by_key if self.answers else {}
        wanted = ("train.steps", "train.epochs") if ours == "train.steps" else (ours,)
        answers = {k: a for k, a in known.items() if any(k == w or k.startswith(f"{w}.") for w in wanted)}
        for key, answer in answers.items():
            if key in self.config or self.answered(key) or not self._fits_optimizer(key):
                continue
            if answer.value is not None:
                self.put(key, answer.value, answer.why)
            if not answer.from_user and not answer.usual:
                self.assumed.append(f"{key}: {show_value(answer.value)}")
        return bool(answers)

    def assume_default(self, key: str, value: Any, why: str) -> bool:
        """Put a value that the reader itself assumes; return False if nothing is to be assumed."""
        if self.strict:
            return False
        if not self.answered(key):
            self.put(key, value, f"assumed: {why}")
            self.assumed.append(f"{key}: {show_value(value)}")
        return True

    def _fits_optimizer(self, key: str) -> bool:
        """Return whether the optimizer that `--set` names has this key, if it is one of an optimizer."""
        if (name := self.overrides.get("train.optimizer.name")) is None or not key.startswith("train.optimizer."):
            return True
        return str(name) in OPTIMIZERS and key.split(".")[2] in OPTIMIZERS[str(name)].model_fields

    def ask_optimizer(self, theirs: str) -> None:
        """Ask for the optimizer, which the file leaves to the script; what `--set` gives of it leaves the rest open."""
        self.asks_for_optimizer = True
        known = "train.optimizer" in self.overrides or self.assume("train.optimizer")
        if not known and not self.answered("train.optimizer"):
            way = "give it with --set train.optimizer='{name: adamw, lr: 3.0e-4}'"
            self.wrong.append(f"{self.place(theirs)}: {way}")

    def ask(self, theirs: str, ours: str, example: str) -> None:
        """Ask for the unipar key `ours` by `--set`, if the file leaves its value open and no answer is known."""
        if not self.answered(ours) and not self.assume(ours):
            self.wrong.append(f"{self.place(theirs)}: give it with --set {ours}={example}")

    def place(self, theirs: str) -> str:
        """Return a key with its line, if that is known."""
        line = self.lines.get(theirs)
        return f"{theirs} (line {line})" if line else theirs

    def drop_options(self) -> None:
        """Leave out options that were carried, as another library trains."""
        for key in [key for key in self.config if key.startswith("options.")]:
            self.omit(self.notes.get(key) or key, f"{self.config.pop(key)}: an option of another library")

    def replace_master_weights(self, theirs: str, axes: str) -> None:
        """Take fp32 weights instead of master weights beside such axes; under --strict refuse the file's key."""
        if self.config.get("train.precision") != "bf16-master":
            return
        why = f"fp32 weights, computed in bf16: bf16-master does not go with {axes}"
        if not self.assume_default("train.precision", "bf16-mixed", why):
            self.refuse(theirs, f"bf16-master does not go with {axes}", "train.precision")

    def section(self, data: Mapping[str, Any], prefix: str = "") -> ForeignSection:
        """Return a section over a mapping of the file; `prefix` stands before its keys in messages."""
        return ForeignSection(self, dict(data), prefix)


class ForeignSection:
    """Mapping of the file; each key that is handled is removed, so that unknown keys remain."""

    def __init__(self, reading: ForeignConfigReader, data: dict[str, Any], prefix: str) -> None:
        self.reading, self.data, self.prefix = reading, data, prefix
        self._known: set[str] = set()
        """Keys that were asked for, whether the file has them or not."""

    def name(self, key: str) -> str:
        """Return the dotted name of a key in the file."""
        return f"{self.prefix}{key}"

    def __contains__(self, key: str) -> bool:
        self._known.add(key)
        return key in self.data

    def take(self, key: str, kind: type[_T], default: _T) -> _T:
        """Remove a key and return its value; record an error and return the default if it has another type."""
        self._known.add(key)
        self.reading.read.add(self.name(key))
        value: Any = self.data.pop(key, None)
        if value is None:
            return default
        if isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
            return value
        number = _as_number(value, kind)
        if number is not None:
            return number
        if kind is bool and str(value).lower() in ("true", "false"):
            return cast("_T", str(value).lower() == "true")
        self.reading.wrong.append(
            f"{self.reading.place(self.name(key))}: {show_value(value)} is not {_TYPE_NAMES[kind]}"
        )
        return default

    def open(self, key: str, ours: str, example: str) -> bool:
        """Return whether the value is `auto`; if so, remove the key and ask for the unipar key `ours`."""
        self._known.add(key)
        if self.data.get(key) != AUTO:
            return False
        self.reading.read.add(self.name(key))
        del self.data[key]
        self.reading.ask(f'{self.name(key)}: "auto"', ours, example)
        return True

    def carry(self, key: str, ours: str, default: object, *, example: str = "", note: str = "") -> None:
        """Carry a value, or else its default, whose type it has; with an example `auto` asks for the unipar key."""
        if not example or not self.open(key, ours, example):
            self.reading.put(ours, self.take(key, type(default), default), note)

    def below(self, key: str) -> ForeignSection:
        """Remove a key and return its mapping as a section; an empty one if the key is missing."""
        return ForeignSection(self.reading, dict(self.take(key, dict, {})), f"{self.name(key)}.")

    def omit(self, keys: Mapping[str, str]) -> None:
        """Leave out the keys that are present, each with its reason."""
        for key, why in keys.items():
            if key in self:
                del self.data[key]
                self.reading.omit(self.name(key), why)

    def refuse(self, keys: Mapping[str, str], *, unless: tuple[Any, ...] = (None, False, {}, [], "")) -> None:
        """Refuse the keys that have an effect, each with its reason; leave out those that are off or among `unless`."""
        for key, why in keys.items():
            if key in self:
                value = self.data.pop(key)
                off = isinstance(value, dict) and value.get("enabled") in (False, "false", AUTO)
                if not off and not any(value is u or (type(value) is type(u) and value == u) for u in unless):
                    self.reading.refuse(self.name(key), why)
                else:
                    self.reading.omit(self.name(key), f"{show_value(value)} has no effect")

    def expect(self, key: str, value: Any, why: str) -> None:
        """Refuse a key whose value is neither `value`, which unipar does anyway, nor `auto`; leave it out otherwise."""
        if key not in self:
            return
        if self.data.pop(key) in (value, AUTO):
            self.reading.omit(self.name(key), why)
        else:
            self.reading.refuse(self.name(key), why)

    def omit_unknown(self, known: Iterable[str], why: str) -> None:
        """Leave out the keys that remain, except those that look like a known one misspelt."""
        words = sorted(known)
        self.omit({key: why for key in self.data if key not in words and not did_you_mean(key, words)})

    def leave_rest(self, why: str) -> None:
        """Leave out all keys that remain, with one reason."""
        self.omit(dict.fromkeys(list(self.data), why))

    def end(self, known: Iterable[str] = ()) -> None:
        """Record each remaining key as unknown; `known`: keys that may be meant besides those that were asked for."""
        words = sorted({*known, *self._known})
        for key in self.data:
            name = self.name(key)
            if name in self.reading.leave:
                self.reading.used.add(name)
                self.reading.omit(name, "not known (left out by --leave)")
            else:
                self.reading.wrong.append(f"{self.reading.place(name)}: there is no such key{did_you_mean(key, words)}")


def _as_number(value: object, kind: type) -> Any:
    """Return a number given as an integer or in quotes as `kind`; None if it is not a number."""
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
    """Return the error that lists everything wrong with the file, one line each."""
    if len(reading.wrong) == 1:
        return ConfigError(f"{reading.label}: {reading.wrong[0]}")
    return ConfigError("\n  - ".join([f"{reading.label} cannot be converted as it is:", *reading.wrong]))
