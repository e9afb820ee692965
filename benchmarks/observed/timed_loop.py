"""A loop that times its own steps after those that are recorded: `timed_loop.py tiny|quickstart FILE`."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from examples.char_gpt import GPT

WARM_UP = 12
"""Steps before those that are timed: memory is recorded in some of them, values are compared after some."""


def main(size: str, file: Path) -> None:
    """Train, and write the seconds of each step."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    if size == "tiny":
        model: nn.Module = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 100))
        data, steps = TensorDataset(torch.randn(4096, 8), torch.randint(0, 100, (4096,))), 800
    else:
        model = GPT(100, 5, 384, 6, 64)
        characters = torch.randint(0, 100, (1024, 65))
        data, steps = TensorDataset(characters[:, :-1], characters[:, 1:]), 36
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    seconds: list[float] = []
    began = time.perf_counter()
    for number, (x, y) in zip(range(steps), DataLoader(data, batch_size=4), strict=False):
        optimizer.zero_grad()
        F.cross_entropy(model(x).flatten(0, -2), y.flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        now = time.perf_counter()
        if number >= WARM_UP and number != 49:
            seconds.append(now - began)
        began = now
    file.write_text(json.dumps(seconds), "utf-8")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
