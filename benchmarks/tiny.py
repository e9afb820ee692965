"""Time that each library adds to a step of a model so small that its own time is negligible."""

from __future__ import annotations

import socket
from collections.abc import Callable
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

import unipar
from benchmarks.timing import Loop, count_calls, interleaved
from benchmarks.worlds import write_found
from unipar.backend import registry
from unipar.backend.checks import settle
from unipar.config import Config
from unipar.distributed.place import Place
from unipar.training.setup import open_run

ROUNDS, STEPS, WARM = 240, 12, 50
BATCH, WIDTH, STEPS_OF_ALL = 4, 16, 1_000_000


class MLP(unipar.Task):
    """Task of three linear layers of width 16."""

    @override
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))

    @override
    def data(self) -> TensorDataset:
        return TensorDataset(torch.randn(4096, WIDTH), torch.randn(4096, WIDTH))

    @override
    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.mse_loss(model(batch[0]), batch[1])


CONFIG = Config.model_validate(
    {
        "backend": "single",
        "device": "cpu",
        "batch": {"total": BATCH},
        "train": {
            "steps": STEPS_OF_ALL,
            "clip": 1.0,
            "optimizer": {"name": "adamw", "lr": 1e-3},
            "schedule": {"name": "linear"},
        },
        "log": {"every": STEPS_OF_ALL},
    }
)


def create_training() -> tuple[nn.Module, torch.optim.Optimizer, LambdaLR]:
    """Return model, optimizer and schedule of the loops without unipar: the same kernels and the same schedule."""
    model = MLP().model()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.0, fused=True)
    return model, optimizer, LambdaLR(optimizer, lambda step: 1.0 - step / STEPS_OF_ALL)


def by_hand(next_batch: Callable[[], Any]) -> Loop:
    """Return the loop of plain PyTorch."""
    model, optimizer, schedule = create_training()
    task, parameters = MLP(), tuple(model.parameters())

    def step() -> None:
        task.loss(model, next_batch()).backward()
        clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()

    return step


def by_accelerate(batch: Any) -> Loop:
    """Return the loop of Accelerate."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == 1
    model, optimizer, schedule = accelerator.prepare(*create_training())
    task, parameters = MLP(), tuple(model.parameters())

    def step() -> None:
        accelerator.backward(task.loss(model, batch))
        accelerator.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()

    return step


def by_fabric(batch: Any) -> Loop:
    """Return the loop of Lightning Fabric."""
    from lightning_fabric import Fabric  # pyright: ignore[reportMissingImports] - make bench installs it

    fabric: Any = Fabric(accelerator="cpu", devices=1)
    plain, base, schedule = create_training()
    model, optimizer = fabric.setup(plain, base)
    task = MLP()

    def step() -> None:
        fabric.backward(task.loss(model, batch))
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()

    return step


def measure(place: Place, run: Path, control: socket.socket | None) -> None:
    """Time all loops in turns; entry function of the worker."""
    dataset = MLP().data()
    batch = next(iter(DataLoader(dataset, BATCH)))
    with open_run(settle(CONFIG, 1), registry.find_backend(CONFIG.backend), MLP(), place, run) as live:
        data = live.batches()
        local_batch = next(data)
        live.step(local_batch)

        def again() -> None:  # the same share each time, as the other loops repeat the same batch
            before = live.done
            live.step(local_batch)
            live.seek(before)

        plain = chain.from_iterable(DataLoader(dataset, BATCH, shuffle=True) for _ in repeat(None))
        loops: dict[str, Loop] = {
            "hand": by_hand(lambda: batch),
            "hand again": by_hand(lambda: batch),
            "unipar": again,
            "fabric": by_fabric(batch),
            "accelerate": by_accelerate(batch),
            "hand + DataLoader": by_hand(lambda: next(plain)),
            "unipar + its data": lambda: live.step(next(data)),
        }
        for loop in loops.values():
            for _ in range(WARM):
                loop()
        times = interleaved(loops, ROUNDS, STEPS)
        found = {name: {"seconds": times[name], "calls": count_calls(loop)} for name, loop in loops.items()}
    write_found(run, found)
