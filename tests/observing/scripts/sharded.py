"""A training in plain PyTorch whose weights are split over the ranks by FSDP2."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1)
samples = TensorDataset(torch.randn(96, 8), torch.randint(4, (96,)))
model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 4))
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = DataLoader(samples, batch_size=4, sampler=DistributedSampler(samples))
torch.manual_seed(rank)

for x, y in loader:
    nn.functional.cross_entropy(model(x), y).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()

dist.destroy_process_group()
