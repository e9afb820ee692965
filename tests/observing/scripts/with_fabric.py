"""A training with Lightning Fabric on two ranks."""

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
fabric.launch()
torch.manual_seed(1)
samples = TensorDataset(torch.randn(96, 8), torch.randint(4, (96,)))
bare = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
model, optimizer = fabric.setup(bare, torch.optim.AdamW(bare.parameters(), lr=1e-2))
loader = fabric.setup_dataloaders(DataLoader(samples, batch_size=4, shuffle=True))
torch.manual_seed(fabric.global_rank)

for i, (x, y) in enumerate(loader):
    with fabric.no_backward_sync(model, enabled=i % 2 == 0):
        fabric.backward(nn.functional.cross_entropy(model(x), y) / 2)
    if i % 2 == 1:
        optimizer.step()
        optimizer.zero_grad()
