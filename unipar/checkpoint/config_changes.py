"""Comparison of the config of a checkpoint with that of the run that goes on from it, key by key."""

from __future__ import annotations

from collections.abc import Collection, Mapping
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
    "train.parts.*.optimizer.name",
    "data.shuffle",
    "data.last_batch",
    "data.stream",
)
"""Keys, or sections, that must be as they were: the run would be another one; a star is any one name."""

FREE = ("model.weights", "model.blocks", "model.offload")
"""Keys within FIXED that do not change what is trained: where parameters lie, and what the first run began from."""

TOLD = ("train.optimizer", "train.clip", "train.parts", "train.ema", "train.local_steps", "train.lr_scale")
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
    _name_optimizers(old, new)
    keys = [key for key in dict.fromkeys((*old, *new)) if _within(key, among)]
    return [ChangedKey(key, old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key)]


def refuse_changes(
    before: Mapping[str, Any], now: Mapping[str, Any], given_keys: Collection[str], called: str
) -> list[ChangedKey]:
    """Raise CheckpointError if a fixed key has another value than in the checkpoint `called`, unless it was said now.

    Return the changes that are told.
    """
    fixed = [change for change in changed_keys(before, now, FIXED) if not _within(change.key, FREE)]
    if refused := [change for change in fixed if not _within(change.key, given_keys)]:
        first, *more = refused
        others = f" (also {', '.join(change.key for change in more)})" if more else ""
        raise CheckpointError(
            f"{called}: {first}{others}: going on would train something else; take the old value back, or say the new "
            f"one again with --set {first.key}={show_value(first.now)}"
        )
    reported = [change for change in changed_keys(before, now, TOLD) if not _within(change.key, FIXED)]
    return [*fixed, *reported]


def describe_other_code(saved: Mapping[str, Any], revision: str | None, code: str | None) -> list[str]:
    """Return a sentence if the task's code is another than in a checkpoint, as far as both say it; else none.

    `saved`: contents of its state.json. `revision`: of the code now, in git. `code`: hash of the task's files now.
    """
    before = str(saved.get("git") or "")
    moved = bool(before and revision and before != revision)
    commits = f": it was at commit {_short(before)}, and is at {_short(revision or '')}" if moved else ""
    if code and (saved.get("code_sha256") or code) != code:
        return [f"the code of the task's model or loss has changed since the checkpoint{commits}"]
    return [f"the code around the task may have changed since the checkpoint{commits}"] if moved else []


def _short(revision: str) -> str:
    """Return the beginning of a commit, and whether files differ from it."""
    commit, dash, dirty = revision.partition("-")
    return commit[:12] + dash + dirty


def _within(key: str, sections: Collection[str]) -> bool:
    """Return whether a key is one of some keys, or within one of some sections."""
    steps = key.split(".")
    for section in sections:
        wanted = section.split(".")
        if len(wanted) <= len(steps) and all(mine in ("*", step) for mine, step in zip(wanted, steps, strict=False)):
            return True
    return False


def find_new_optimizers(
    saved: Mapping[str, Any],
    now: Mapping[str, str],
    config: Mapping[str, Any],
    given_keys: Collection[str],
    called: str,
) -> dict[str, str]:
    """Return a sentence for each part whose optimizer is of another class than in a checkpoint, and begins anew.

    Raise CheckpointError where that was not said. `saved`: contents of the checkpoint's state.json. `now`: each part's
    class, which is another without another `config` if the task makes it.
    """
    sentences: dict[str, str] = {}
    for part, is_now in now.items():
        of_part = f" of {part!r}" if len(now) > 1 else ""
        section, settings = _optimizer_section(config, part)
        was = str(saved["parts"][part].get("optimizer") or "")
        if not was:  # an import, or an older checkpoint, which had the config's optimizer
            was, is_now = _optimizer_section(saved["config"], part)[1]["name"], settings["name"]
        if was.lower() == is_now.lower():
            continue
        if not any(_within(f"{section}.{key}", given_keys) for key in ("name", "lr")):
            raise CheckpointError(
                f"{called}: the optimizer{of_part} was {was} and is {is_now}, whose state is another: go on with the "
                f"old one, or say the rate of the new one with --set {section}.lr={settings['lr']}, and it begins "
                "without state"
            )
        sentences[part] = f"the optimizer{of_part} was {was} and is {is_now}: it begins without state"
    return sentences


def _optimizer_section(config: Mapping[str, Any], part: str) -> tuple[str, Mapping[str, Any]]:
    """Return the section that says a part's optimizer, its own one or that of the run, and what is in it."""
    own = config["train"]["parts"].get(part)
    if own is None or own["optimizer"] is None:
        return "train.optimizer", config["train"]["optimizer"]
    return f"train.parts.{part}.optimizer", own["optimizer"]


def _name_optimizers(*configs: dict[str, Any]) -> None:
    """Name in all configs, by dotted keys, the optimizer of each part that has a section of its own in one of them."""
    keys = {key for config in configs for key in config if _within(key, ("train.parts.*.optimizer.name",))}
    for config in configs:
        for key in sorted(keys):
            config.setdefault(key, config.get("train.optimizer.name"))


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config by dotted keys; a file of code is the same wherever it lies."""
    return dict(_without_folder(key, value) for key, value in flatten(config))


def _without_folder(key: str, value: Any) -> tuple[str, Any]:
    return key, PurePath(value).name if key == "task.use" and isinstance(value, str) else value
