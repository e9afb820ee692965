"""A training with DeepSpeed on two ranks."""

import deepspeed
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
torch.manual_seed(1)
samples = TensorDataset(torch.randn(96, 8), torch.randint(4, (96,)))
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
config = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 0},
    "zero_allow_untested_optimizer": True,
}
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
loader = DataLoader(samples, batch_size=4, sampler=DistributedSampler(samples))
torch.manual_seed(engine.global_rank)

for x, y in loader:
    engine.backward(nn.functional.cross_entropy(engine(x), y))
    engine.step()
