"""Task whose own loop collects rows of all ranks, and writes what each rank gets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import TensorDataset
from typing_extensions import override

import unipar
from tests.support.stacked import Stacked, T, V


class Gathering(Stacked):
    """Nine samples, each with its number as first token."""

    def __init__(self, to: str) -> None:
        super().__init__()
        self.to = Path(to)

    @override
    def data(self) -> TensorDataset:
        tokens = torch.arange(9)[:, None] + torch.arange(T + 1) % 2
        return TensorDataset(tokens[:, :-1] % V, tokens[:, 1:] % V)

    @override
    def train(self, run: unipar.Run) -> None:
        got: dict[str, list[Any]] = {name: [] for name in ("share", "micro", "chosen", "rank")}
        for local_batch in run.batches():
            run.step(local_batch)
            numbers = [micro.batch[0][:, 0] for micro in local_batch.micros]
            got["share"].append(run.gather(torch.cat(numbers)).tolist())
            first = local_batch.micros[0]
            got["micro"].append(run.gather(_both(numbers[0]), first).tolist())
            odd = numbers[0][numbers[0] % 2 == 1]
            got["chosen"].append(run.gather(odd.bool(), first).tolist())
            got["rank"].append(run.gather(torch.full((3 + run.rank,), run.rank, dtype=torch.bfloat16)).tolist())
        try:
            run.gather(torch.zeros(2, 1 + run.rank % 2))
        except unipar.TaskError as e:
            got["error"] = [str(e)]
        got["after"] = run.gather(torch.tensor(7.0)).tolist()
        (self.to / f"rank-{run.rank}.json").write_text(json.dumps(got), "utf-8")


def _both(numbers: Tensor) -> Tensor:
    return torch.stack([numbers, -numbers], 1)
