"""Folders of torch.distributed.checkpoint, whose metadata are pickled: tensors by the names that they hold."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unipar.checkpoint.importing.found_state import StateCollector
from unipar.checkpoint.importing.state_dicts import STEP_KEYS
from unipar.errors import CheckpointError

_METADATA = ".metadata"
_STATE = "optimizer.state."


def dcp_folders(path: Path) -> list[Path]:
    """Return a folder that torch.distributed.checkpoint wrote, or those in it, if the model has one of its own."""
    if (path / _METADATA).is_file():
        return [path]
    return sorted(file.parent for file in path.glob(f"*/{_METADATA}"))


def collect_dcp(path: Path, into: StateCollector, *, weights_only: bool) -> None:
    """Collect `model.NAME`, or plain names, and `optimizer.state.NAME.KIND`."""
    tensors = dict(_tensors(path))
    moments = {name for name in tensors if name.startswith("optimizer.")}
    weights = {name: name.removeprefix("model.") for name in tensors if name not in moments}
    scalars = {key: name for name in weights for key in STEP_KEYS if name == key or name.endswith(f".{key}")}
    into.learn_prefix(weights.values())
    for key in STEP_KEYS:
        name = scalars.get(key)
        if name is not None and tensors[name][1].numel() == 1 and into.name(weights[name]) is None:
            into.state.step = int(_read(tensors[name][0], name, tensors[name][1]))
            del weights[name]
    for name, plain in weights.items():
        into.add_weight(plain, _read(tensors[name][0], name, tensors[name][1]))
    for name in () if weights_only else sorted(moments):
        if name.startswith(_STATE):
            plain, _, kind = name.removeprefix(_STATE).rpartition(".")
            into.add_moment(plain, kind, _read(tensors[name][0], name, tensors[name][1]))


def _tensors(path: Path) -> Iterator[tuple[str, tuple[Path, Tensor]]]:
    """Yield the name of each tensor, its folder, and a tensor of its shape and dtype on the meta device."""
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    for folder in dcp_folders(path):
        try:
            metadata = FileSystemReader(folder).read_metadata()
        except (OSError, EOFError, pickle.UnpicklingError, AttributeError) as e:
            raise CheckpointError(f"{folder / _METADATA}: cannot be read: {e}") from None
        for name, entry in metadata.state_dict_metadata.items():
            if isinstance(entry, TensorStorageMetadata):
                yield name, (folder, torch.empty(entry.size, dtype=entry.properties.dtype, device="meta"))


def _read(folder: Path, name: str, like: Tensor) -> Tensor:
    import torch.distributed.checkpoint as dcp

    into: dict[str, Any] = {name: torch.empty_like(like, device="cpu")}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is", category=UserWarning)
        dcp.load(into, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    return into[name]
