"""Comparison of the config of a checkpoint with that of the run that goes on from it, key by key."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import PurePath
from typing import Any, NamedTuple

from typing_extensions import override

from unipar.errors import CheckpointError
from unipar.utils.mappings import flatten
from unipar.utils.text import show_value

FIXED = (
    "task",
    "model",
    "train.seed",
    "train.precision",
    "train.optimizer.name",
    "data.shuffle",
    "data.ragged",
    "data.stream",
)
"""Keys, or sections, that must be as they were: the run would be another one."""

FREE = ("model.weights", "model.blocks", "model.offload")
"""Keys within FIXED that do not change what is trained: where parameters lie, and what the first run began from."""

TOLD = ("train.optimizer", "train.clip", "train.parts", "train.sync_every", "train.lr_scale")
"""Keys that may change and are told, for they change what is computed."""


class ChangedKey(NamedTuple):
    """Key of the config whose value differs between two runs."""

    key: str
    before: Any
    now: Any

    @override
    def __str__(self) -> str:
        return f"{self.key} was {show_value(self.before)} and is {show_value(self.now)}"


def changed_keys(before: Mapping[str, Any], now: Mapping[str, Any], among: Collection[str]) -> list[ChangedKey]:
    """Return the keys, in the given sections or equal to them, whose values differ between two configs."""
    old, new = (_plain(config) for config in (before, now))
    keys = [key for key in dict.fromkeys((*old, *new)) if _within(key, among)]
    return [ChangedKey(key, old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key)]


def refuse_changes(before: Mapping[str, Any], now: Mapping[str, Any], said: Collection[str], called: str) -> list[str]:
    """Raise CheckpointError if a fixed key has another value than in the checkpoint `called`, unless it was said now.

    Return a sentence for each change that is told.
    """
    fixed = [change for change in changed_keys(before, now, FIXED) if not _within(change.key, FREE)]
    if refused := [change for change in fixed if not _within(change.key, said)]:
        first, *more = refused
        others = f" (also {', '.join(change.key for change in more)})" if more else ""
        raise CheckpointError(
            f"{called}: {first}{others}: going on would train something else; take the old value back, or say the new "
            f"one again with --set {first.key}={show_value(first.now)}"
        )
    told = [change for change in changed_keys(before, now, TOLD) if not _within(change.key, FIXED)]
    return [str(change) for change in (*fixed, *told)]


def _within(key: str, sections: Collection[str]) -> bool:
    return any(key == section or key.startswith(f"{section}.") for section in sections)


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config by dotted keys; a file of code is the same wherever it lies."""
    return dict(_without_folder(key, value) for key, value in flatten(config))


def _without_folder(key: str, value: Any) -> tuple[str, Any]:
    return key, PurePath(value).name if key == "task.use" and isinstance(value, str) else value


def sections_said(origins: Mapping[str, str], by: Collection[str] = ("--set", "--out", "overrides")) -> Iterator[str]:
    """Yield the keys of a config that a person has given in the command or in the call that starts it."""
    for key, origin in origins.items():
        if origin in by:
            yield key
