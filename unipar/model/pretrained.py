"""Loading of pre-trained weights into a new model, on rank 0 before its values are sent to the other ranks."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from unipar.backend.file_values import set_file_values
from unipar.config.sections.model import Weights
from unipar.errors import ConfigError
from unipar.model.safetensors_files import SafetensorsFiles, TensorInFile
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
"""Largest number of names that the run log lists of missing, unexpected and kept ones each."""

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
    mine, taken, loaded = _match_names(module, wanted, in_file)
    _copy_values(mine, {name: in_file[name] for name in taken}, wanted.file)
    return loaded


def point_to_weights(module: nn.Module, wanted: Weights) -> tuple[LoadedWeights, SafetensorsFiles] | None:
    """Have a model that was created empty read its parameters when they are placed, and fill its buffers now.

    Return None if some parameter gets no value from the file, or if the file is not safetensors: then the model has to
    be created with values.
    """
    path = Path(wanted.file)
    if not path.is_dir() and path.suffix != ".safetensors":
        return None
    files = SafetensorsFiles(path)
    in_file = _without_prefixes(files.tensors.items(), path)
    mine, taken, loaded = _match_names(module, wanted, in_file)
    if {id(p) for p in module.parameters()} - {id(mine[name]) for name in taken}:
        return None
    first: dict[int, str] = {}
    for name in taken:
        target, stored = mine[name], in_file[name]
        if wrong := _describe_misfit(name, stored, target):
            raise ConfigError(f"model.weights: {path}: {wrong}; leave such names out with only: [patterns]")
        if not isinstance(target, nn.Parameter):
            if target.device.type != "meta":
                with torch.no_grad():
                    target.copy_(stored())
        elif (before := first.get(id(target))) is None:
            first[id(target)] = name
            set_file_values(target, stored)
        elif not torch.equal(stored(), in_file[before]()):
            raise ConfigError(
                f"model.weights: {path}: {before} and {name} are one parameter in the model and have two values in the "
                "file; leave such names out with only: [patterns]"
            )
    return loaded, files


def _match_names(
    module: nn.Module, wanted: Weights, in_file: Mapping[str, ReadTensor]
) -> tuple[dict[str, Tensor], list[str], LoadedWeights]:
    """Return the model's tensors by name, the names to take from the file, and what is said of them; raise if wrong."""
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
    kept = [name for name in mine if name not in set(asked)]
    return (
        mine,
        taken,
        LoadedWeights(
            file=wanted.file,
            names=len(mine),
            loaded=len(asked) - len(missing),
            missing=len(missing),
            missing_names=missing[:_MAX_NAMES_LISTED],
            unexpected=len(unexpected),
            unexpected_names=unexpected[:_MAX_NAMES_LISTED],
            kept=len(kept),
            kept_names=kept[:_MAX_NAMES_LISTED],
        ),
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
        if misfit := _describe_misfit(name, value, target):
            wrong.append(misfit)
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


def _describe_misfit(name: str, value: Tensor | TensorInFile, target: Tensor) -> str:
    """Return why a value of a file does not fit into the model's tensor, or ""."""
    if value.shape != target.shape:
        return f"{name} is {list(value.shape)} in the file and {list(target.shape)} in the model"
    if _number_kind(value.dtype) != _number_kind(target.dtype):
        in_file, in_model = (str(dtype).removeprefix("torch.") for dtype in (value.dtype, target.dtype))
        return f"{name} is {in_file} in the file and {in_model} in the model"
    return ""


def _number_kind(dtype: torch.dtype) -> tuple[bool, bool]:
    """Return (is floating point, is complex): a copy that changed them would silently lose part of a value."""
    return dtype.is_floating_point, dtype.is_complex


def _tensors_in_file(wanted: Weights) -> dict[str, ReadTensor]:
    """Return readers of the file's tensors by name, without the prefixes of wrappers."""
    file = Path(wanted.file)
    if file.is_dir():
        return dict(_without_prefixes(SafetensorsFiles(file).tensors.items(), file))
    return _without_prefixes(_read_safetensors(file) if file.suffix == ".safetensors" else _read_pickle(file), file)


_Value = TypeVar("_Value")


def _without_prefixes(read: Iterable[tuple[str, _Value]], file: Path) -> dict[str, _Value]:
    """Return the values by name without what wrappers add; raise ConfigError if two get the same name, or for none."""
    tensors: dict[str, _Value] = {}
    for name, value in read:
        if (bare := strip_wrapper_prefixes(name)) in tensors:
            raise ConfigError(f"model.weights: {file} has {bare!r} twice, with and without a wrapper's prefix")
        tensors[bare] = value
    if not tensors:
        raise ConfigError(f"model.weights: {file} holds no tensors: name a file of weights")
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
