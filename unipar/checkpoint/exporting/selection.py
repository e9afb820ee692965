"""Weights that an export takes from a checkpoint, under the names that they get."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from unipar.backend.engine import KIND_OF_AVERAGES
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
    averages: bool = True,
) -> list[ChosenTensor]:
    """Return the weights and persistent buffers to be exported, in the order of their names.

    `averages`: of weights that have one, their average. `only`: patterns of names, tied ones included. `trainable`:
    parameters that were trained. `rename`: beginnings of names, each with what takes its place.
    """
    names = {t.name: t for _, t in sorted(contents.manifest.tensors.items()) if t.kind in ("weight", "buffer")}
    if not names:
        raise CheckpointError(f"{contents.path} holds no weights: there is nothing to export")
    unsaved = set(_named_in_parts(contents.state, "unsaved"))
    tied = {first: tuple(more) for first, *more in _tied(contents.state)}
    for pattern in only:
        if not any(fnmatchcase(name, pattern) for name in (*names, *(n for more in tied.values() for n in more))):
            raise CheckpointError(
                f"--only {pattern!r} matches no name in {contents.path}; write one of {first_few(list(names))}"
            )
    trained = trained_names(contents) if trainable else None
    chosen: list[ChosenTensor] = []
    for name, stored in names.items():
        if (stored.kind == "buffer" and name in unsaved) or (trained is not None and name not in trained):
            continue
        mine = [n for n in (name, *tied.get(name, ())) if not only or any(fnmatchcase(n, p) for p in only)]
        if mine:
            first, *also = (rename_beginning(n, rename) for n in mine)
            average = contents.manifest.tensors.get((name, KIND_OF_AVERAGES)) if averages else None
            chosen.append(ChosenTensor(first, average or stored, tuple(also)))
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
    of_model = ("weight", "buffer", "task", "stream", KIND_OF_AVERAGES)
    trained = trained or {name for name, kind in tensors if kind not in of_model}
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
    owners: dict[str, str] = {}
    for tensor in chosen:
        for name in (tensor.name, *tensor.also):
            if name in owners:
                raise CheckpointError(
                    f"{tensor.stored.name} and {owners[name]} would both be called {name!r} in the export; choose "
                    "another --rename, or fewer tensors with --only"
                )
            owners[name] = tensor.stored.name


def parse_rename(text: str) -> tuple[str, str]:
    """Return the two beginnings of `OLD=NEW`; raise CheckpointError if there is no `=`."""
    old, equals, new = text.partition("=")
    if not equals:
        raise CheckpointError(f"--rename {text}: write OLD=NEW, beginnings of names; 'model.=' takes model. away")
    return old, new


def adapter_tensors(
    chosen: Sequence[ChosenTensor], adapter: str, config: Mapping[str, Any]
) -> tuple[list[ChosenTensor], list[str]]:
    """Return tensors under the names that peft gives them in a file, and the names of those that it has no place for.

    `base_model.model.attn.lora_A.default.weight` in the model is `base_model.model.attn.lora_A.weight` in the file;
    modules that are trained as a whole (`modules_to_save`) have the name of the module that they replace. `config`: the
    adapter's, which says what biases are trained with it; empty if it is not known.
    """
    named: list[ChosenTensor] = []
    left: list[str] = []
    for tensor in chosen:
        steps = tensor.name.split(".")
        if (at := _adapter_step(steps, adapter, config)) is not None:
            del steps[at]
            if at and steps[at - 1] == "modules_to_save":
                del steps[at - 1]
        elif not _is_bias_of_adapter(tensor.name, config):
            left.append(tensor.name)
            continue
        bare = ".".join(steps)
        named.append(replace(tensor, name=bare if steps[0] == "base_model" else f"base_model.model.{bare}", also=()))
    if not any(_adapter_step(tensor.name.split("."), adapter, config) is not None for tensor in chosen):
        trained = first_few([tensor.name for tensor in chosen])
        raise CheckpointError(
            f"--to peft: none of the trained names holds {adapter!r} as a part ({trained}): "
            "the model has no adapter of that name; say --adapter NAME, or export with --trainable"
        )
    _refuse_same_names(named)
    return named, left


_BEFORE_ADAPTER = ("modules_to_save", "trainable_tokens_delta")
"""Modules of peft besides LoRA's own in which each adapter has an entry of its name."""


def _adapter_step(steps: Sequence[str], adapter: str, config: Mapping[str, Any]) -> int | None:
    """Return where a name has the adapter's own, which may be that of a module of the model besides; None if nowhere.

    As peft has it: behind `modules_to_save`, else the last step of that name.
    """
    places = [at for at, step in enumerate(steps) if step == adapter and "base_layer" not in steps[at:]]
    for at in places:
        if at and steps[at - 1] == "modules_to_save":
            return at
    if config.get("peft_type") in ("LORA", "ADALORA"):
        places = [at for at in places if steps[at - 1].startswith("lora_") or steps[at - 1] in _BEFORE_ADAPTER]
    return places[-1] if places else None


def _is_bias_of_adapter(name: str, config: Mapping[str, Any]) -> bool:
    """Return whether a bias of the model is trained and saved with the adapter."""
    which = str(config.get("bias") or "none")
    return name.endswith(".bias") if which == "all" else which.endswith("_only") and name.endswith(".base_layer.bias")
