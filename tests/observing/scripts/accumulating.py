"""A training in plain PyTorch that gathers the gradients of two microbatches in a step."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
ddp = DistributedDataParallel(model)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
micros = 2
torch.manual_seed(rank)

for _ in range(10):
    for micro in range(micros):
        with ddp.no_sync() if micro < micros - 1 else nullcontext():
            (ddp(torch.randn(4, 8)).square().mean() / micros).backward()
    torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()

dist.destroy_process_group()
