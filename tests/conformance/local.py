"""Local steps, written out by hand in one process: a model for each rank, and their mean now and then."""

from __future__ import annotations

import copy
from typing import Any

import torch

from tests.conformance.cases import Case
from unipar.config import Strategy
from unipar.data.order import SampleOrder, split_batch
from unipar.utils.seeding import seed_all


def train_locally_by_hand(case: Case, size: int) -> dict[str, Any]:
    """Each step's loss, and the parameters at the end; AdamW without fused, and no schedule."""
    config = case.config(Strategy("native"), size)
    every, clip, wanted = config.train.local_steps, config.train.clipping, config.train.optimizer
    task: Any = case.task()
    seed_all(config.train.seed)
    first = task.model()
    ranks = [first, *(copy.deepcopy(first) for _ in range(size - 1))]
    made = [torch.optim.AdamW(m.parameters(), wanted.lr, weight_decay=wanted.weight_decay, eps=1e-6) for m in ranks]
    data = task.data()
    order = SampleOrder(len(data), config.batch.total or 0, config.train.seed, shuffle=True, last_batch="keep")
    sizes = config.batch.settle(size)
    steps = config.train.steps
    assert every
    assert clip
    assert steps
    losses: list[float] = []
    for step, (_, indices) in zip(range(steps), order.batches(0), strict=False):
        total = 0.0
        for rank, (model, optimizer) in enumerate(zip(ranks, made, strict=True)):
            for micro in split_batch(indices, sizes.accumulate, size):
                mine = micro[rank]
                loss = task.loss(model, task.collate([data[i] for i in mine])) * (len(mine) / len(indices))
                (loss * size).backward()
                total += loss.item()
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip.max)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(total)
        if (step + 1) % every == 0 or step + 1 == steps:
            _mean([list(model.parameters()) for model in ranks])
            for kind in ("exp_avg", "exp_avg_sq"):
                states: list[Any] = [optimizer.state for optimizer in made]
                _mean([[s[p][kind] for p in m.parameters()] for s, m in zip(states, ranks, strict=True)])
    return {"losses": losses, "params": {n: p.detach().flatten() for n, p in first.named_parameters()}}


@torch.no_grad()
def _mean(ranks: list[list[torch.Tensor]]) -> None:
    for held in zip(*ranks, strict=True):
        mean = torch.stack(held).mean(0)
        for tensor in held:
            tensor.copy_(mean)
