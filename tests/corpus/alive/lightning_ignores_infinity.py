"""Lightning's FSDP strategy ignores error_if_nonfinite, which DDP's obeys."""

from __future__ import annotations

import tempfile

import torch
import torch.distributed as dist
from lightning.fabric.strategies import DDPStrategy, FSDPStrategy
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel


def clip(strategy: DDPStrategy | FSDPStrategy, model: nn.Module) -> str:
    """Return what clipping an infinite gradient leads to, and how the weight is after a step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.full((1, 1), float("inf"))).sum().backward()
    try:
        norm = strategy.clip_gradients_norm(model, optimizer, max_norm=1.0, error_if_nonfinite=True)
    except RuntimeError as error:
        return f"RuntimeError: {str(error).split(',')[0]}"
    optimizer.step()
    return f"returns {float(norm)}; the weight after the step: {float(next(model.parameters()))}"


if __name__ == "__main__":
    with tempfile.NamedTemporaryFile() as store:
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.FileStore(store.name, 1))
        print("clip_gradients_norm(error_if_nonfinite=True) with an infinite gradient:")
        print(f"  DDPStrategy:  {clip(DDPStrategy(), nn.Linear(1, 1, bias=False))}")
        sharded = FullyShardedDataParallel(nn.Linear(1, 1, bias=False), device_id=torch.device("cpu"))
        print(f"  FSDPStrategy: {clip(FSDPStrategy(), sharded)}")
        dist.destroy_process_group()
