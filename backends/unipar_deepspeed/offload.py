"""Optimizers for offloaded parameters: DeepSpeed's CPU Adam, and the cache of its compiled op."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from torch.optim import Adam, AdamW, Optimizer

from unipar.config import Config
from unipar.utils.files import cache_folder
from unipar_deepspeed.options import options_of

COMPILE_LOCK_SECONDS = 900.0
"""Age in seconds beyond which a lock in the cache is stale: a compilation takes one minute."""


def cpu_optimizer_for(optimizer: Optimizer, config: Config) -> Optimizer:
    """Return DeepSpeed's CPU Adam for an offloaded Adam or AdamW; else, or with cpu_adam: torch, `optimizer` itself."""
    options = options_of(config)
    if options.offload_optimizer == "none" or options.cpu_adam == "torch":
        return optimizer
    if type(optimizer) not in (Adam, AdamW):
        return optimizer
    keep_compiled_ops()
    taken = ("params", "lr", "betas", "eps", "weight_decay")
    groups: list[dict[str, Any]] = [{k: group[k] for k in taken} for group in optimizer.param_groups]
    return DeepSpeedCPUAdam(groups, adamw_mode=type(optimizer) is AdamW)


def keep_compiled_ops() -> None:
    """Set the folder of compiled ops, one for each torch in the user's cache unless the environment names another.

    Stale locks in it are removed.
    """
    if "TORCH_EXTENSIONS_DIR" not in os.environ:
        os.environ["TORCH_EXTENSIONS_DIR"] = str(cache_folder() / "torch_extensions" / torch.__version__)
    for lock in Path(os.environ["TORCH_EXTENSIONS_DIR"]).glob("*/lock"):
        try:
            if time.time() - lock.stat().st_mtime > COMPILE_LOCK_SECONDS:
                lock.unlink()
        except FileNotFoundError:  # another rank was faster
            pass
