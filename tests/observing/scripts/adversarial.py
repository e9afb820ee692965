"""A GAN in plain PyTorch: two models and two optimizers, one step each."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(1)
generator = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8)))
judge = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)))
of_generator = torch.optim.Adam(generator.parameters(), lr=1e-3)
of_judge = torch.optim.Adam(judge.parameters(), lr=1e-3)
score = nn.functional.binary_cross_entropy_with_logits
torch.manual_seed(dist.get_rank())
steps_of_judge = 1

for _ in range(10):
    for _ in range(steps_of_judge):
        of_judge.zero_grad()
        real, made = torch.randn(4, 8) + 1, generator(torch.randn(4, 4)).detach()
        (score(judge(real), torch.ones(4, 1)) + score(judge(made), torch.zeros(4, 1))).backward()
        of_judge.step()
    of_generator.zero_grad()
    score(judge(generator(torch.randn(4, 4))), torch.ones(4, 1)).backward()
    of_generator.step()

dist.destroy_process_group()
