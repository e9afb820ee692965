"""Weights that an export takes from a checkpoint, under the names that they get."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from unipar.checkpoint.format.manifest import StoredTensor
from unipar.checkpoint.protocol.verifying import CheckpointContents
from unipar.errors import CheckpointError
from unipar.utils.text import first_few


@dataclass(frozen=True)
class ChosenTensor:
    """Weight or buffer of a checkpoint that is exported."""

    name: str
    """Name in the export."""

    stored: StoredTensor
    also: tuple[str, ...] = ()
    """Further names of the same parameter."""


def choose_tensors(
    contents: CheckpointContents,
    *,
    only: Sequence[str] = (),
    trainable: bool = False,
    rename: Sequence[tuple[str, str]] = (),
) -> list[ChosenTensor]:
    """Return the weights and persistent buffers to be exported, in the order of their names.

    `only`: patterns of names, tied ones included. `trainable`: parameters that were trained. `rename`: beginnings of
    names, each with what takes its place.
    """
    names = {t.name: t for _, t in sorted(contents.manifest.tensors.items()) if t.kind in ("weight", "buffer")}
    if not names:
        raise CheckpointError(f"{contents.path} holds no weights: there is nothing to export")
    unsaved = set(_named_in_parts(contents.state, "unsaved"))
    tied = {first: tuple(more) for first, *more in _tied(contents.state)}
    for pattern in only:
        if not any(fnmatchcase(name, pattern) for name in (*names, *(n for more in tied.values() for n in more))):
            raise CheckpointError(
                f"--only {pattern!r} matches none of the names in {contents.path}: {first_few(list(names))}"
            )
    trained = trained_names(contents) if trainable else None
    chosen: list[ChosenTensor] = []
    for name, stored in names.items():
        if (stored.kind == "buffer" and name in unsaved) or (trained is not None and name not in trained):
            continue
        mine = [n for n in (name, *tied.get(name, ())) if not only or any(fnmatchcase(n, p) for p in only)]
        if mine:
            first, *also = (rename_beginning(n, rename) for n in mine)
            chosen.append(ChosenTensor(first, stored, tuple(also)))
    if not chosen:
        raise CheckpointError(
            f"--trainable and --only {first_few(list(only))} have no name in common in {contents.path}: trained are "
            f"{first_few(sorted(trained or ()))}"
        )
    _refuse_same_names(chosen)
    return chosen


def trained_names(contents: CheckpointContents) -> set[str]:
    """Return the names of the parameters that were trained; raise CheckpointError if the checkpoint does not tell."""
    tensors = contents.manifest.tensors
    trained = set(_named_in_parts(contents.state, "trained"))
    trained = trained or {name for name, kind in tensors if kind not in ("weight", "buffer", "task", "stream")}
    trained = {name for name in trained if (name, "weight") in tensors}
    if not trained:
        raise CheckpointError(
            f"--trainable: {contents.path} does not say which parameters were trained: it names none, and has no state "
            "of an optimizer; name them with --only 'PATTERN'"
        )
    return trained


def _named_in_parts(state: Mapping[str, Any], key: str) -> Iterator[str]:
    parts = state.get("parts") or {}
    for part, about in parts.items():
        for name in about.get(key) or []:
            yield name if len(parts) == 1 else f"{part}.{name}"


def _tied(state: Mapping[str, Any]) -> Iterator[list[str]]:
    parts = state.get("parts") or {}
    for part, about in parts.items():
        for names in about.get("tied") or []:
            yield list(names) if len(parts) == 1 else [f"{part}.{name}" for name in names]


def rename_beginning(name: str, rename: Sequence[tuple[str, str]]) -> str:
    """Return the name with the first of these beginnings that it has replaced."""
    for old, new in rename:
        if name.startswith(old):
            return new + name[len(old) :]
    return name


def _refuse_same_names(chosen: Sequence[ChosenTensor]) -> None:
    seen: dict[str, str] = {}
    for tensor in chosen:
        for name in (tensor.name, *tensor.also):
            if name in seen:
                raise CheckpointError(
                    f"{tensor.stored.name} and {seen[name]} would both be called {name!r} in the export; choose "
                    "another --rename, or fewer tensors with --only"
                )
            seen[name] = tensor.stored.name


def parse_rename(text: str) -> tuple[str, str]:
    """Return the two beginnings of `OLD=NEW`; raise CheckpointError if there is no `=`."""
    old, equals, new = text.partition("=")
    if not equals:
        raise CheckpointError(f"--rename {text}: write OLD=NEW, beginnings of names; 'model.=' takes model. away")
    return old, new


def adapter_tensors(chosen: Sequence[ChosenTensor], adapter: str) -> list[ChosenTensor]:
    """Return tensors under the names that peft gives them in a file: without the adapter's own name.

    `base_model.model.attn.lora_A.default.weight` in the model is `base_model.model.attn.lora_A.weight` in the file;
    modules that are trained as a whole (`modules_to_save`) have the name of the module that they replace.
    """
    named = [tensor for tensor in chosen if adapter in tensor.name.split(".")]
    if not named:
        trained = first_few([tensor.name for tensor in chosen])
        raise CheckpointError(
            f"--to peft: none of the trained names holds {adapter!r} as a part ({trained}): "
            "the model has no adapter of that name; say --adapter NAME, or export with --trainable"
        )
    return [ChosenTensor(_adapter_name(tensor.name, adapter), tensor.stored) for tensor in named]


def _adapter_name(name: str, adapter: str) -> str:
    steps = name.split(".")
    at = steps.index(adapter)
    del steps[at]
    if at and steps[at - 1] == "modules_to_save":
        del steps[at - 1]
    bare = ".".join(steps)
    return bare if bare.startswith("base_model.") else f"base_model.model.{bare}"
