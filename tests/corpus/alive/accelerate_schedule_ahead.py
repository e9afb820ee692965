"""A scheduler that Accelerate has prepared moves once for every process in each step."""

from __future__ import annotations

import os

import torch
from accelerate import Accelerator
from torch import nn
from torch.multiprocessing import spawn


def train(rank: int, world: int) -> None:
    """Take two steps of a schedule whose rate falls by 1 in each."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1"}
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 10.0 - step)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    rates = [scheduler.get_last_lr()[0]]
    for _ in range(2):
        accelerator.backward(model(torch.ones(1, 1)).sum())
        optimizer.step()
        scheduler.step()
        rates.append(scheduler.get_last_lr()[0])
    if rank == 0:
        print(f"rates with {world} process{'es' * (world > 1)}: {rates}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("MASTER_PORT", "29572")
    for processes in (1, 2):
        spawn(train, (processes,), nprocs=processes)
