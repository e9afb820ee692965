"""A training in plain PyTorch on two ranks, in which nothing is wrong; faults are planted by exchanging lines."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1)
samples = TensorDataset(torch.randn(48, 8), torch.randint(4, (48,)))
model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 4))
ddp = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=20)
sampler = DistributedSampler(samples)
loader = DataLoader(samples, batch_size=4, sampler=sampler)
torch.manual_seed(rank)
done = 0

for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        nn.functional.cross_entropy(ddp(x), y).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        done += 1

dist.destroy_process_group()
