"""Communication hooks of DDP: gradients are sent in half precision, or as PowerSGD's thin matrices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from unipar_native.options import NativeOptions

HALF_DTYPES: Final = {"fp16": torch.float16, "bf16": torch.bfloat16}
"""Dtypes of the hooks that round gradients."""


def register_hook(ddp: DistributedDataParallel, options: NativeOptions) -> Any:
    """Make DDP send gradients as options.native.hook says; return the hook's state, or None if it has none."""
    if options.hook == "none":
        return None
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook  # most runs have no hook

    if options.hook == "powersgd":
        state: Any = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=options.powersgd_rank, start_powerSGD_iter=options.powersgd_start
        )
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return state
    hook: Any = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}[options.hook]
    ddp.register_comm_hook(None, hook)
    return None


def held_by(state: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield names and tensors of what PowerSGD keeps from step to step: its matrices and the errors so far."""
    if state is not None:
        for kind, buckets in (("P", state.p_memory_dict), ("Q", state.q_memory_dict), ("error", state.error_dict)):
            for bucket, tensor in buckets.items():
                yield f"PowerSGD {kind}, bucket {bucket}", tensor
