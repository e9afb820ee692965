"""DDP as written by hand, for torchrun: the training of train.py. The third forward pass notes the time."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Generator, nn, rand
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
points = rand(4096, 8, generator=Generator().manual_seed(0))
data = TensorDataset(points, points.sum(1, keepdim=True))
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 1)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(data, batch_size=32, sampler=DistributedSampler(data))
for step, (x, y) in enumerate(loader, 1):
    if step == 3:
        Path(os.environ["TIME_FILE"]).write_text(str(time.monotonic()), "ascii")
    nn.functional.mse_loss(model(x), y).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if step == 3:
        break
dist.destroy_process_group()
os._exit(0)  # gloo's threads may abort an ordinary exit
