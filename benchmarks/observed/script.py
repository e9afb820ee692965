"""A training of the quickstart's model in one of several ways, without unipar: `torchrun ... script.py ddp`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler

from examples.char_gpt import GPT, CharGPT

STEPS = int(os.environ.get("STEPS", "12"))
RATE = 3e-4


VOCABULARY = len(set(CharGPT().text))
TASK = CharGPT(context=64)
"""Source of the data alone."""


def make_model() -> GPT:
    """Return the model, with the same values on all ranks."""
    torch.manual_seed(0)
    return GPT(VOCABULARY, 5, 384, 6, 64)


def loss_of(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """Return the mean loss of a batch."""
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return the parameters with and without weight decay."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": [p for p in model.parameters() if p.dim() < 2]}]


def adamw(model: nn.Module) -> torch.optim.AdamW:
    """Return the optimizer."""
    return torch.optim.AdamW(groups(model), lr=RATE, weight_decay=0.0, fused=True)


def batches(rank: int | None = None, size: int | None = None) -> Iterable[list[Tensor]]:
    """Yield this rank's batches, as many as there are steps."""
    data = TASK.data()
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, size, rank))
    return (batch for _, batch in zip(range(STEPS), loader, strict=False))


def train_native(how: str) -> None:
    """Train by PyTorch's own wrappers."""
    dist.init_process_group("gloo")
    model: nn.Module = make_model()
    if how.startswith("fsdp2"):
        from torch.distributed.fsdp import fully_shard

        for block in (*model.layers, model):  # pyright: ignore[reportCallIssue, reportGeneralTypeIssues]
            fully_shard(block, reshard_after_forward=not how.endswith("kept"))
    else:
        model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer: Any = adamw(model)
    if how == "zero-redundancy":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        optimizer = ZeroRedundancyOptimizer(groups(model), torch.optim.AdamW, lr=RATE, weight_decay=0.0, fused=True)  # pyright: ignore[reportArgumentType]
    for x, y in batches():
        loss_of(model, x, y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


def train_deepspeed(stage: int) -> None:
    """Train by DeepSpeed, with the buckets that unipar gives it."""
    import deepspeed

    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    model = make_model()
    bucket = sum(p.numel() for p in model.parameters()) // 32 * 2
    zero: dict[str, Any] = {"stage": stage, "reduce_bucket_size": bucket}
    if stage == 3:
        zero |= {
            "memory_efficient_linear": False,
            "stage3_prefetch_bucket_size": bucket,
            "stage3_param_persistence_threshold": 4096,
            "stage3_max_live_parameters": 2 * bucket,
            "stage3_max_reuse_distance": 0,
        }
    else:
        zero["allgather_bucket_size"] = bucket
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 1.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(model), config=config)
    for x, y in batches():
        engine.backward(loss_of(engine, x, y))
        engine.step()
    dist.destroy_process_group()


def train_horovod() -> None:
    """Train by Horovod."""
    import horovod.torch as hvd

    hvd.init()
    model = make_model()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer: Any = hvd.DistributedOptimizer(adamw(model), named_parameters=model.named_parameters())
    for x, y in batches(hvd.rank(), hvd.size()):
        loss_of(model, x, y).backward()
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with optimizer.skip_synchronize():
            optimizer.step()
        optimizer.zero_grad()


def train_accelerate() -> None:
    """Train by Accelerate."""
    from accelerate import Accelerator, DistributedDataParallelKwargs

    accelerator = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)])
    made = make_model()
    batches = DataLoader(TASK.data(), batch_size=4, shuffle=True)
    model, optimizer, loader = accelerator.prepare(made, adamw(made), batches)
    for _, (x, y) in zip(range(STEPS), loader, strict=False):
        accelerator.backward(loss_of(model, x, y))
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.end_training()


if __name__ == "__main__":
    way = sys.argv[1]
    torch.set_num_threads(1)
    if way in ("zero1", "zero2", "zero3"):
        train_deepspeed(int(way[-1]))
    elif way == "horovod":
        train_horovod()
    elif way == "accelerate":
        train_accelerate()
    else:
        train_native(way)
