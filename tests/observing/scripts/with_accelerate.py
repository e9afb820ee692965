"""A training with Hugging Face Accelerate on two ranks."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, step_scheduler_with_optimizer=False)
torch.manual_seed(1)
samples = TensorDataset(torch.randn(160, 8), torch.randint(4, (160,)))
bare = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 4))
model, optimizer = accelerator.prepare(bare, torch.optim.AdamW(bare.parameters(), lr=1e-2))
loader = accelerator.prepare(DataLoader(samples, batch_size=4, shuffle=True))
schedule = accelerator.prepare(torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=20))
set_seed(2, device_specific=True)

for x, y in loader:
    with accelerator.accumulate(model):
        accelerator.backward(nn.functional.cross_entropy(model(x), y))
        optimizer.step()
        if accelerator.sync_gradients:
            schedule.step()
        optimizer.zero_grad()

accelerator.end_training()
