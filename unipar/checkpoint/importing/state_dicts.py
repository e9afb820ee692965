"""State dicts of models and optimizers, as torch makes them, in files or in folders of files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from unipar.checkpoint.importing.found_state import StateCollector
from unipar.checkpoint.importing.inert_pickle import load_inert
from unipar.checkpoint.importing.parameter_order import names_by_number
from unipar.errors import CheckpointError
from unipar.utils.text import first_few

PICKLED = (".pt", ".pth", ".bin", ".ckpt")
"""Endings of files that torch.save writes."""

WEIGHT_KEYS = ("state_dict", "model_state_dict", "model", "module")
OPTIMIZER_KEYS = ("optimizer_states", "optimizer_state_dict", "optimizer")
STEP_KEYS = ("global_step", "global_steps", "step")
WEIGHT_FILES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin")
OPTIMIZER_FILE = "optimizer.bin"


def holds_weight_files(folder: Path) -> bool:
    """Return whether a folder holds the weights of a model in files of known names."""
    return any((folder / name).is_file() for name in WEIGHT_FILES)


def needs_pickle(path: Path, *, weights_only: bool) -> bool:
    """Return whether a file or folder can be read by unpickling only."""
    if path.is_file():
        return path.suffix in PICKLED
    pickled = not any((path / name).is_file() for name in WEIGHT_FILES[:2])
    return pickled or (not weights_only and (path / OPTIMIZER_FILE).is_file())


def collect_files(path: Path, into: StateCollector, *, weights_only: bool) -> None:
    """Collect the state in one file, or in a folder with files of known names."""
    if path.is_file():
        if path.suffix == ".safetensors":
            _collect_weights(_safetensors([path]), into)
        else:
            _collect_content(load_inert(path), into, path, weights_only=weights_only)
        return
    single, index, pickled = (path / name for name in WEIGHT_FILES)
    if index.is_file():
        names = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
        _collect_weights(_safetensors([path / Path(name).name for name in names]), into)
    elif single.is_file():
        _collect_weights(_safetensors([single]), into)
    else:
        _collect_content(load_inert(pickled), into, pickled, weights_only=True)
    if (path / OPTIMIZER_FILE).is_file() and not weights_only:
        collect_optimizer(load_inert(path / OPTIMIZER_FILE), into)


def _safetensors(files: Sequence[Path]) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            tensors |= load_file(file)
        except (SafetensorError, OSError) as e:
            raise CheckpointError(f"{file}: cannot be read: {e}") from None
    return tensors


def _collect_content(content: Any, into: StateCollector, file: Path, *, weights_only: bool) -> None:
    """Collect what a training script has saved: a state dict, or one beside other things."""
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{file} holds {type(content).__name__}, not a state dict: save model.state_dict() in it")
    weights: Any = content
    if not any(isinstance(value, Tensor) for value in content.values()):
        weights = next((content[key] for key in WEIGHT_KEYS if isinstance(content.get(key), Mapping)), {})
    if not any(isinstance(value, Tensor) for value in weights.values()):
        raise CheckpointError(
            f"{file} holds no state dict: it has the keys {first_few([str(key) for key in content])}; tensors by name "
            f"are looked for at the top and under {', '.join(WEIGHT_KEYS)}"
        )
    _collect_weights(weights, into)
    if weights is content:
        return
    step = next((content[key] for key in STEP_KEYS if isinstance(content.get(key), int | Tensor)), None)
    into.state.step = None if step is None else int(step)
    optimizer: Any = next((content[key] for key in OPTIMIZER_KEYS if content.get(key)), None)
    if isinstance(optimizer, list) and len(optimizer) > 1 and not weights_only:
        raise CheckpointError(f"{file} holds {len(optimizer)} optimizers; one is read, or none with --weights-only")
    optimizer = optimizer[0] if isinstance(optimizer, list) else optimizer
    if isinstance(optimizer, Mapping) and not weights_only:
        collect_optimizer(optimizer, into)


def _collect_weights(weights: Mapping[str, Any], into: StateCollector) -> None:
    into.learn_prefix(weights)
    for name, value in weights.items():
        if isinstance(value, Tensor):
            into.add_weight(name, value)


def collect_optimizer(saved: Mapping[str, Any], into: StateCollector) -> None:
    """Collect the state of an optimizer, whose parameters have numbers: named as `names_by_number` finds."""
    state: Mapping[Any, Any] = saved["state"]
    names = names_by_number(saved, into)
    for number, kept in state.items():
        for kind, value in kept.items():
            if isinstance(value, Tensor | int | float) and not isinstance(value, bool):
                into.add_moment_of(names[number], kind, value)
