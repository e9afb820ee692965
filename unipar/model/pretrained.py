"""Loading of pre-trained weights into a new model, on rank 0 before its values are sent to the other ranks."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unipar.config.sections.model import Weights
from unipar.errors import ConfigError
from unipar.model.state_names import unsaved_buffers
from unipar.model.weight_file import (
    STATE_DICT_KEYS,
    check_weight_patterns,
    matches_any_pattern,
    pickled_code_error,
    strip_wrapper_prefixes,
)
from unipar.utils.text import first_few

_MAX_NAMES_LISTED = 100
"""Largest number of names that the ledger lists of missing, unexpected and kept ones each."""

ReadTensor = Callable[[], Tensor]
"""Function that reads one tensor of a file."""


@dataclass(frozen=True)
class LoadedWeights:
    """Result of loading a file: numbers of loaded, missing, unexpected and kept names, and the first names of each."""

    file: str
    names: int
    """Names in the model: parameters and persistent buffers, tied ones under each of their names."""

    loaded: int
    missing: int
    missing_names: list[str]
    unexpected: int
    unexpected_names: list[str]
    kept: int
    """Names of the model that `only` does not select; their values stay as created."""

    kept_names: list[str]


def load_weights(module: nn.Module, wanted: Weights) -> LoadedWeights:
    """Copy the values of a file into the model; raise ConfigError if they do not fit."""
    in_file = _tensors_in_file(wanted)
    mine = {strip_wrapper_prefixes(name): tensor for name, tensor in _saved_tensors(module)}
    check_weight_patterns(wanted.only, mine, "the model's names")
    check_weight_patterns(wanted.only, in_file, f"the names in {wanted.file}")
    asked = [name for name in mine if matches_any_pattern(name, wanted.only)]
    unexpected = [name for name in in_file if name not in mine and matches_any_pattern(name, wanted.only)]
    taken = [name for name in asked if name in in_file]
    there = {id(mine[name]) for name in taken}
    missing = [name for name in asked if id(mine[name]) not in there]  # a tied name may be loaded under its other name
    if not taken:
        raise ConfigError(
            f"model.weights: {wanted.file} has none of the model's names: it has {first_few(list(in_file))}; "
            f"the model has {first_few(asked)}"
        )
    if wanted.strict and (missing or unexpected):
        raise ConfigError(f"model.weights: {wanted.file} {_describe_mismatch(missing, unexpected)}; {_WAY_OUT}")
    _copy_values(mine, {name: in_file[name] for name in taken}, wanted.file)
    kept = [name for name in mine if name not in set(asked)]
    return LoadedWeights(
        file=wanted.file,
        names=len(mine),
        loaded=len(asked) - len(missing),
        missing=len(missing),
        missing_names=missing[:_MAX_NAMES_LISTED],
        unexpected=len(unexpected),
        unexpected_names=unexpected[:_MAX_NAMES_LISTED],
        kept=len(kept),
        kept_names=kept[:_MAX_NAMES_LISTED],
    )


_WAY_OUT = "give strict: false to take what fits, or only: [patterns] to say which names are meant"


def _describe_mismatch(missing: list[str], unexpected: list[str]) -> str:
    parts = [f"lacks {len(missing)} of the model's names ({first_few(missing)})"] if missing else []
    if unexpected:
        parts.append(f"has {len(unexpected)} that the model lacks ({first_few(unexpected)})")
    return " and ".join(parts)


def _saved_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield what a state dict holds: parameters and persistent buffers, under each of their names."""
    yield from module.named_parameters(remove_duplicate=False)
    unsaved = unsaved_buffers(module)
    yield from ((n, b) for n, b in module.named_buffers(remove_duplicate=False) if n not in unsaved)


def _copy_values(mine: Mapping[str, Tensor], values: Mapping[str, ReadTensor], file: str) -> None:
    """Copy values into the model, in its dtype; raise ConfigError where shape, kind of number or a tie does not fit."""
    wrong: list[str] = []
    filled: dict[int, str] = {}
    for name, read in values.items():
        target, value = mine[name], read()
        if value.shape != target.shape:
            wrong.append(f"{name} is {_shape_text(value)} in the file and {_shape_text(target)} in the model")
            continue
        if _number_kind(value) != _number_kind(target):
            wrong.append(f"{name} is {_dtype_text(value)} in the file and {_dtype_text(target)} in the model")
            continue
        with torch.no_grad():
            if (first := filled.get(id(target))) is not None:
                if not torch.equal(value.to(target.dtype), target):
                    wrong.append(f"{first} and {name} are one parameter in the model and have two values in the file")
                continue
            target.copy_(value)
        filled[id(target)] = name
    if wrong:
        more = f" (and {len(wrong) - 1} more that do not fit)" if len(wrong) > 1 else ""
        raise ConfigError(f"model.weights: {file}: {wrong[0]}{more}; leave such names out with only: [patterns]")


def _shape_text(tensor: Tensor) -> str:
    return str(list(tensor.shape))


def _dtype_text(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _number_kind(tensor: Tensor) -> tuple[bool, bool]:
    """Return (is floating point, is complex): a copy that changed them would silently lose part of a value."""
    return tensor.is_floating_point(), tensor.is_complex()


def _tensors_in_file(wanted: Weights) -> dict[str, ReadTensor]:
    """Return readers of the file's tensors by name, without the prefixes of wrappers."""
    file = Path(wanted.file)
    read = _read_safetensors(file) if file.suffix == ".safetensors" else _read_pickle(file)
    tensors: dict[str, ReadTensor] = {}
    for name, value in read:
        if (bare := strip_wrapper_prefixes(name)) in tensors:
            raise ConfigError(f"model.weights: {file} has {bare!r} twice, with and without a wrapper's prefix")
        tensors[bare] = value
    if not tensors:
        raise ConfigError(f"model.weights: {file} holds no tensors")
    return tensors


def _read_safetensors(file: Path) -> Iterator[tuple[str, ReadTensor]]:
    from safetensors import SafetensorError, safe_open

    try:
        opened: Any = safe_open(str(file), "pt", device="cpu")
        names: list[str] = list(opened.keys())
    except (SafetensorError, OSError) as e:
        raise ConfigError(f"model.weights: {file} is damaged: {e}") from None
    for name in names:
        yield name, lambda name=name: opened.get_tensor(name)


def _read_pickle(file: Path) -> Iterator[tuple[str, ReadTensor]]:
    """Yield the tensors of a file of torch.save; anything but tensors and plain containers is refused."""
    try:
        content: Any = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as e:
        name = str(e).partition("GLOBAL ")[2].split()[:1]
        raise (pickled_code_error(file, name[0]) if name else _damaged_pickle(file, e)) from None
    except (OSError, EOFError, RuntimeError, ValueError, KeyError, TypeError) as e:
        raise _damaged_pickle(file, e) from None
    state = content
    if isinstance(content, dict) and not any(isinstance(value, Tensor) for value in content.values()):
        state = next((content[key] for key in STATE_DICT_KEYS if isinstance(content.get(key), dict)), content)
    if not isinstance(state, dict) or not any(isinstance(value, Tensor) for value in state.values()):
        has = f"the keys {first_few([str(key) for key in state])}" if isinstance(state, dict) else type(state).__name__
        raise ConfigError(
            f"model.weights: {file} holds no state dict: it has {has}; it must hold tensors by name, "
            f"at the top level or under {', '.join(STATE_DICT_KEYS)}"
        )
    for name, value in state.items():
        if isinstance(value, Tensor):
            yield str(name), lambda value=value: value


def _damaged_pickle(file: Path, error: Exception) -> ConfigError:
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    return ConfigError(f"model.weights: {file} is damaged: {first}")
