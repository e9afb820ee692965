"""Libraries that an observed script uses: those with a backend describe themselves, the others are described here."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Final, final

from unipar.backend import registry
from unipar.backend.observed_library import ObservedLibrary, TrainingFault


@final
class _PyTorch(ObservedLibrary):
    name = "PyTorch"
    module = "torch"
    wrappers: ClassVar[Mapping[str, str]] = {
        "DistributedDataParallel": "DDP",
        "FullyShardedDataParallel": "FSDP1",
        "FSDPModule": "FSDP2",
        "DataParallel": "DataParallel",
        "OptimizedModule": "compiled",
    }
    ways_out: ClassVar[Mapping[TrainingFault, str]] = {
        "no group": "call torch.distributed.init_process_group and wrap the model, or start one process",
        "unreduced gradients": "wrap the model in DistributedDataParallel, call it through the wrapper and not through "
        "its module, and leave no_sync in the last microbatch of a step",
        "unequal copies": "wrap the model before training, and change no weight on one rank alone",
        "unequal initial weights": "seed all ranks alike before the model is made, or let DistributedDataParallel "
        "broadcast rank 0's weights",
        "unequal microbatches": "give each rank equally many batches: DistributedSampler(drop_last=True), or "
        "`with model.join():`",
        "same batches": "give the DataLoader a DistributedSampler, or seed each rank's data by its rank",
        "repeated order": "call loader.sampler.set_epoch(epoch) at the beginning of each epoch",
        "same dropout": "seed each rank by its rank after the model is made: torch.manual_seed(seed + rank)",
        "unsynced batch norm": "convert the model before wrapping: nn.SyncBatchNorm.convert_sync_batchnorm(model); or "
        "leave it, if a rank has enough samples",
        "schedule too fast": "step the schedule once for each step of the optimizer",
        "weights outside the optimizer": "make the optimizer after the model has its final parameters: after to(), "
        "wrapping and copying",
        "update without effect": "keep the weights in fp32 and compute under torch.autocast, or raise the rate",
        "coarse dtype": "keep the weights in fp32 and compute under torch.autocast, or use an optimizer that keeps "
        "fp32 copies",
    }


@final
class _Lightning(ObservedLibrary):
    name = "Lightning"
    module = "lightning"
    wrappers: ClassVar[Mapping[str, str]] = {"_FabricModule": "Fabric", "_FabricOptimizer": "Fabric"}
    ways_out: ClassVar[Mapping[TrainingFault, str]] = {
        "unreduced gradients": "prepare model and optimizer by fabric.setup, call the model that it returns, and use "
        "fabric.no_backward_sync in all microbatches but the last",
        "same batches": "prepare the loader by fabric.setup_dataloaders, or leave the Trainer use_distributed_sampler",
        "repeated order": "call loader.sampler.set_epoch(epoch) in a loop of your own; the Trainer does",
        "unequal initial weights": "call seed_everything before the model is made",
        "same dropout": "call seed_everything(seed + rank) after the model is made",
        "unsynced batch norm": "give the Trainer sync_batchnorm=True, or leave it, if a rank has enough samples",
    }


@final
class _Transformers(ObservedLibrary):
    name = "transformers' Trainer"
    module = "transformers"
    ways_out: ClassVar[Mapping[TrainingFault, str]] = {
        "coarse dtype": "load the model in fp32 and give TrainingArguments bf16=True",
        "update without effect": "load the model in fp32 and give TrainingArguments bf16=True, or raise the rate",
        "same dropout": "set TrainingArguments(seed=...) by rank after the model is loaded",
        "unequal initial weights": "call transformers.set_seed before the model is made",
    }


_OTHERS: Final = (_Transformers(), _Lightning(), _PyTorch())

_LABELS: Final = {"trl": "TRL", "torchtune": "torchtune", "torchtitan": "torchtitan", "peft": "PEFT"}
"""Further libraries that are named when they call the optimizer, by their module."""


def libraries_here() -> list[ObservedLibrary]:
    """Return the libraries that this process has imported, plain PyTorch last."""
    return [library for library in known_libraries() if library.module in sys.modules]


def known_libraries() -> list[ObservedLibrary]:
    """Return all libraries that unipar knows, plain PyTorch last."""
    of_backends = [
        library
        for name in registry.backend_names()
        if (library := registry.find_backend(name).observed_library) is not None
    ]
    return [*of_backends, *_OTHERS]


def name_callers(frame: Any, optimizers: Iterable[object] = ()) -> tuple[str, ...]:
    """Return the names of the libraries among the callers of a frame, the outermost first.

    A library that has made the class of an optimizer, as Horovod does, calls torch's own step in it.
    """
    by_module = {library.module: library.name for library in known_libraries()} | dict(_LABELS)
    by_module.pop("torch", None)
    names: list[str] = []
    while frame is not None:
        module = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if (name := by_module.get(module)) is not None and name not in names:
            names.append(name)
        frame = frame.f_back
    for optimizer in optimizers:
        name = by_module.get(type(optimizer).__module__.partition(".")[0])
        if name is not None and name not in names:
            names.insert(0, name)
    return tuple(reversed(names))


def way_out(fault: TrainingFault, names: tuple[str, ...]) -> str:
    """Return what users of these libraries do about a fault: what the outermost one of them that knows it says."""
    by_name = {library.name: library for library in known_libraries()}
    for name in (*names, "PyTorch"):
        library = by_name.get(name)
        if library is not None and fault in library.ways_out:
            return library.ways_out[fault]
    return ""
