"""Pre-trained weights into a model that was just born: on one rank, before its values travel to the others."""

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
from unipar.model.weight_file import (
    STATE_DICT_KEYS,
    check_weight_patterns,
    matches_any_pattern,
    pickled_code_error,
    strip_wrapper_prefixes,
)
from unipar.utils.text import first_few

_MAX_NAMES_LISTED = 100
"""Names of each kind that the ledger holds."""

ReadTensor = Callable[[], Tensor]


@dataclass(frozen=True)
class LoadedWeights:
    """What became of a file's names and of the model's; the first of each by name."""

    file: str
    names: int
    """Of the model: parameters and buffers that are saved, tied ones under each of their names."""

    loaded: int
    missing: int
    missing_names: list[str]
    unexpected: int
    unexpected_names: list[str]
    kept: int
    """Names of the model that nobody asked for."""

    kept_names: list[str]


def load_weights(module: nn.Module, wanted: Weights) -> LoadedWeights:
    """Fill what the file has of the model, in place; every mistake is a sentence."""
    held = _tensors_in_file(wanted)
    mine = {strip_wrapper_prefixes(name): tensor for name, tensor in _saved_tensors(module)}
    check_weight_patterns(wanted.only, mine, "the model's names")
    check_weight_patterns(wanted.only, held, f"the names in {wanted.file}")
    asked = [name for name in mine if matches_any_pattern(name, wanted.only)]
    unexpected = [name for name in held if name not in mine and matches_any_pattern(name, wanted.only)]
    taken = [name for name in asked if name in held]
    there = {id(mine[name]) for name in taken}
    missing = [name for name in asked if id(mine[name]) not in there]  # a tied one is there under its other name
    if not taken:
        raise ConfigError(
            f"model.weights: {wanted.file} has none of the model's names: it has {first_few(list(held))}; "
            f"the model has {first_few(asked)}"
        )
    if wanted.strict and (missing or unexpected):
        raise ConfigError(f"model.weights: {wanted.file} {_describe_mismatch(missing, unexpected)}; {_WAY_OUT}")
    _copy_values(mine, {name: held[name] for name in taken}, wanted.file)
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
    said = [f"lacks {len(missing)} of the model's names ({first_few(missing)})"] if missing else []
    if unexpected:
        said.append(f"has {len(unexpected)} that the model lacks ({first_few(unexpected)})")
    return " and ".join(said)


def _saved_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """What a state dict holds: parameters and persistent buffers, under every name they have."""
    yield from module.named_parameters(remove_duplicate=False)
    passing = {
        f"{prefix}.{name}" if prefix else name
        for prefix, inner in module.named_modules(remove_duplicate=False)
        for name in inner._non_persistent_buffers_set  # pyright: ignore[reportPrivateUsage] - there is no other way
    }
    yield from ((n, b) for n, b in module.named_buffers(remove_duplicate=False) if n not in passing)


def _copy_values(mine: Mapping[str, Tensor], held: Mapping[str, ReadTensor], file: str) -> None:
    """Values in place, in the model's own dtype; names that are tied in the model have one value in the file."""
    wrong: list[str] = []
    filled: dict[int, str] = {}
    for name, read in held.items():
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
        raise ConfigError(f"model.weights: {file}: {wrong[0]}{more}; leave such names out by only: [patterns]")


def _shape_text(tensor: Tensor) -> str:
    return str(list(tensor.shape))


def _dtype_text(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _number_kind(tensor: Tensor) -> tuple[bool, bool]:
    """What a copy may not change: a fraction or an imaginary part would be lost without a word."""
    return tensor.is_floating_point(), tensor.is_complex()


def _tensors_in_file(wanted: Weights) -> dict[str, ReadTensor]:
    """The file's tensors by their names, wrappers' prefixes off; each is read when it is asked for."""
    file = Path(wanted.file)
    read = _read_safetensors(file) if file.suffix == ".safetensors" else _read_pickle(file)
    made: dict[str, ReadTensor] = {}
    for name, value in read:
        if (bare := strip_wrapper_prefixes(name)) in made:
            raise ConfigError(f"model.weights: {file} has {bare!r} twice, with and without a wrapper's prefix")
        made[bare] = value
    if not made:
        raise ConfigError(f"model.weights: {file} holds no tensors")
    return made


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
    """Nothing but tensors and plain containers is made of it, whatever it says."""
    try:
        found: Any = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as e:
        name = str(e).partition("GLOBAL ")[2].split()[:1]
        raise (pickled_code_error(file, name[0]) if name else _damaged_pickle(file, e)) from None
    except (OSError, EOFError, RuntimeError, ValueError, KeyError, TypeError) as e:
        raise _damaged_pickle(file, e) from None
    state = found
    if isinstance(found, dict) and not any(isinstance(value, Tensor) for value in found.values()):
        state = next((found[key] for key in STATE_DICT_KEYS if isinstance(found.get(key), dict)), found)
    if not isinstance(state, dict) or not any(isinstance(value, Tensor) for value in state.values()):
        has = f"the keys {first_few([str(key) for key in state])}" if isinstance(state, dict) else type(state).__name__
        raise ConfigError(
            f"model.weights: {file} holds no state dict: it has {has}; tensors by their names are wanted, "
            f"at the top or under {', '.join(STATE_DICT_KEYS)}"
        )
    for name, value in state.items():
        if isinstance(value, Tensor):
            yield str(name), lambda value=value: value


def _damaged_pickle(file: Path, error: Exception) -> ConfigError:
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    return ConfigError(f"model.weights: {file} is damaged: {first}")
