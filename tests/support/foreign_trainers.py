"""Training by other libraries alone, without unipar: some steps, their own checkpoint, and the steps after it.

`python -m tests.support.foreign_trainers LIBRARY FOLDER` in a world of one or more ranks. It saves after step SAVED_AT
to FOLDER/saved, goes on to step LAST, and rank 0 writes the losses of all steps to FOLDER/losses.json.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

SAVED_AT, LAST = 3, 8
TOTAL, SAMPLES, WIDTH = 6, 24, 5
"""Samples of a global batch, of an epoch, and features of each: the fourth step after the save begins an epoch."""

RATE, DECAY = 0.02, 0.1

Loss = Callable[[Tensor, Tensor], Tensor]


class Net(nn.Module):
    """Layers whose sizes divide by no number of ranks, with a persistent buffer and one that is not."""

    seen: Tensor
    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 7)
        self.frozen = nn.Linear(7, 7)
        self.frozen.requires_grad_(False)
        self.out = nn.Linear(7, 3, bias=False)
        self.register_buffer("seen", torch.tensor([3.0]))
        self.register_buffer("shift", torch.full((3,), 0.25), persistent=False)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.frozen(torch.tanh(self.inner(x))))) * self.seen + self.shift


def make_net() -> Net:
    torch.manual_seed(5)
    return Net()


def samples() -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(9)
    return torch.randn(SAMPLES, WIDTH, generator=made), torch.randn(SAMPLES, 3, generator=made)


def batch(step: int, rank: int = 0, world: int = 1) -> tuple[Tensor, Tensor]:
    """Return a rank's share of the batch of a step, counted from 0, in the order of the samples."""
    first = step * TOTAL % SAMPLES + rank * TOTAL // world
    x, y = samples()
    return x[first : first + TOTAL // world], y[first : first + TOTAL // world]


def loss_of(model: Any, step: int, rank: int, world: int) -> Tensor:
    x, y = batch(step, rank, world)
    return (model(x) - y).square().mean()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    wanted = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(wanted, lr=RATE, weight_decay=DECAY)


def mean_over_ranks(loss: Tensor) -> float:
    value = loss.detach().clone()
    if dist.is_initialized():
        dist.all_reduce(value)
        value /= dist.get_world_size()
    return float(value)


def train(step: Callable[[int], Tensor], save: Callable[[], None]) -> list[float]:
    losses: list[float] = []
    for number in range(LAST):
        losses.append(mean_over_ranks(step(number)))
        if number + 1 == SAVED_AT:
            save()
    return losses


def with_deepspeed(folder: Path, stage: int) -> list[float]:
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiles for a minute or more
    deepspeed.init_distributed("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = make_net()
    config = {
        "train_batch_size": TOTAL,
        "train_micro_batch_size_per_gpu": TOTAL // world,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
    }
    engine: Any = deepspeed.initialize(model=model, optimizer=adamw(model), config=config)[0]

    def step(number: int) -> Tensor:
        loss = loss_of(engine, number, rank, world)
        engine.backward(loss)
        engine.step()
        return loss

    return train(step, lambda: engine.save_checkpoint(str(folder)))


def with_accelerate(folder: Path, kind: str) -> list[float]:
    from accelerate import Accelerator

    plugin: Any = None
    if kind == "fsdp":
        from accelerate.utils import FullyShardedDataParallelPlugin

        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, state_dict_type="SHARDED_STATE_DICT", auto_wrap_policy="no_wrap"
        )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    rank, world = accelerator.process_index, accelerator.num_processes
    net = make_net()
    model, optimizer = accelerator.prepare(net, adamw(net))

    def step(number: int) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, number, rank, world)
        accelerator.backward(loss)
        optimizer.step()
        return loss

    safe = kind != "pickle"
    return train(step, lambda: void(accelerator.save_state(str(folder), safe_serialization=safe)))


def void(_: object) -> None:
    """Return nothing."""


def with_torch(folder: Path, kind: str) -> list[float]:
    """One process that saves a .pt, or FSDP2 that saves by torch.distributed.checkpoint."""
    model: Any = make_net()
    rank, world = 0, 1
    if kind == "fsdp":
        from torch.distributed.fsdp import fully_shard

        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
        mesh = dist.init_device_mesh("cpu", (world,))
        fully_shard(model, mesh=mesh)
    optimizer = adamw(model)

    def step(number: int) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, number, rank, world)
        loss.backward()
        optimizer.step()
        return loss

    def save() -> None:
        if kind == "fsdp":
            from torch.distributed import checkpoint as dcp
            from torch.distributed.checkpoint.state_dict import get_state_dict

            weights, moments = get_state_dict(model, optimizer)
            dcp.save({"model": weights, "optimizer": moments, "step": torch.tensor(SAVED_AT)}, checkpoint_id=folder)
        else:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": SAVED_AT}
            folder.mkdir()
            torch.save(state, folder / "state.pt")

    return train(step, save)


def with_lightning(folder: Path) -> list[float]:
    import lightning

    losses: list[float] = []

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = make_net()

        @override
        def training_step(self, batch: Any, number: int) -> Tensor:
            x, y = batch
            loss = (self.model(x) - y).square().mean()
            losses.append(float(loss))
            return loss

        @override
        def configure_optimizers(self) -> Any:
            return adamw(self)

    class Keep(lightning.Callback):
        @override
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_step == SAVED_AT:
                trainer.save_checkpoint(folder / "last.ckpt")

    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*samples()), batch_size=TOTAL)
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(
        max_steps=LAST, accelerator="cpu", devices=1, callbacks=[Keep()], enable_model_summary=False, **quiet
    )
    trainer.fit(Module(), loader)
    return losses


def main() -> None:
    library, _, kind = sys.argv[1].partition("-")
    folder = Path(sys.argv[2])
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    if library == "deepspeed":
        losses = with_deepspeed(folder / "saved", int(kind))
    elif library == "accelerate":
        losses = with_accelerate(folder / "saved", kind)
    elif library == "lightning":
        losses = with_lightning(folder / "saved")
    else:
        losses = with_torch(folder / "saved", kind)
    if int(os.environ.get("RANK", "0")) == 0:
        (folder / "losses.json").write_text(json.dumps(losses), encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)  # gloo may abort at exit, with all done


if __name__ == "__main__":
    main()
