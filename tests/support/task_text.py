"""The text of a task's file."""

from __future__ import annotations

TASK = '''
import torch
from torch import nn
from torch.utils.data import TensorDataset

import unipar


class Sums(unipar.Task):
    """The second layer's weight is read outside of it: what FSDP2 cannot have where it is a block."""

    def __init__(self, reach=False, early=False):
        self.reach, self.early = reach, early

    def model(self):
        return nn.Sequential(*(nn.Linear(8, 8) for _ in range(2)), nn.Linear(8, 1))

    def blocks(self, model):
        return ["0", "1"]

    def data(self):
        x = torch.randn(32, 8, generator=torch.Generator().manual_seed(1))
        return TensorDataset(x, x.sum(1, keepdim=True))

    def loss(self, model, batch):
        loss = nn.functional.mse_loss(model(batch[0]), batch[1])
        return loss + 0.01 * model[1].weight.square().mean() if self.reach else loss

    def train(self, run):
        for local_batch in run.batches():
            run.step(local_batch)
            if self.early:
                break
'''
