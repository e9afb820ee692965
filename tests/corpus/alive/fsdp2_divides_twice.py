"""FSDP2 divides by set_gradient_divide_factor twice if its group has one rank and sums are forced, or in fp16."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def gradient(dtype: torch.dtype | None, *, force: bool) -> float:
    """Return a gradient that is 4 before it is divided by 2."""
    model: Any = nn.Linear(1, 1, bias=False)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)), mp_policy=MixedPrecisionPolicy(reduce_dtype=dtype))
    model.set_gradient_divide_factor(2.0)
    model.set_force_sum_reduction_for_comms(force)
    model(torch.full((1, 1), 4.0)).sum().backward()
    return float(model.weight.grad.to_local())


if __name__ == "__main__":
    with tempfile.NamedTemporaryFile() as store:
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.FileStore(store.name, 1))
        print("a gradient of 4, divided by 2:")
        print(f"  reduced in fp32: {gradient(None, force=False)}")
        print(f"  reduced in fp16: {gradient(torch.float16, force=False)}")
        print(f"  sums forced:     {gradient(None, force=True)}")
        dist.destroy_process_group()
