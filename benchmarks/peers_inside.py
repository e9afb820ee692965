"""Training of the quickstart by other libraries, as their guides write it, and by unipar: entries of the workers."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from typing_extensions import override

from unipar.backend import registry
from unipar.config import Config
from unipar.config.settled import read_settled
from unipar.distributed.place import Place
from unipar.launcher.processes.group import CONTROL_MESSAGE_BYTES
from unipar.launcher.processes.worker import exit_on_error
from unipar.model.parameter_groups import parameter_groups
from unipar.task import Task
from unipar.task.reference import TaskRef
from unipar.training.setup import open_run


class Turns:
    """Boundary between two steps, at which a process waits, blocked, until it has the next turn."""

    def __init__(self, control: socket.socket) -> None:
        self._control, self._left = control, 0
        self._began: tuple[float, float] | None = None
        self._steps = 0
        self.before_waiting: Callable[[], object] | None = None
        self.loss = float("nan")
        """Loss that was logged last."""

    def pass_boundary(self, *_: object) -> None:
        """Count a step, except before the first one; at the end of a turn send its time and wait for the next."""
        self._left -= 1
        if self._left > 0:
            return
        said = {"loss": self.loss}
        if self._began is not None:
            said["seconds"] = (time.perf_counter() - self._began[0]) / self._steps
            said["cpu"] = (time.process_time() - self._began[1]) / self._steps
        if self.before_waiting is not None:
            self.before_waiting()
        self._control.sendall(json.dumps(said).encode())
        message = self._control.recv(CONTROL_MESSAGE_BYTES)
        if not message:
            os._exit(0)  # the libraries' loops cannot be left in the middle
        self._left = self._steps = int(message)
        self._began = time.perf_counter(), time.process_time()


@dataclass(frozen=True)
class Quickstart:
    """The quickstart's task and config, and the place of this process."""

    config: Config
    task: Task
    place: Place
    run: Path
    turns: Turns

    @property
    def steps(self) -> int:
        assert self.config.train.steps is not None
        return self.config.train.steps

    @property
    def micro(self) -> int:
        return self.config.batch.settle(self.place.size).micro

    @property
    def clip(self) -> float:
        assert self.config.train.clipping is not None
        return float(self.config.train.clipping.max)

    @property
    def every(self) -> int:
        return self.config.log.every

    def model(self) -> nn.Module:
        """Return the model, the same on every rank."""
        torch.manual_seed(self.config.train.seed)
        model: Any = self.task.model()
        return model

    def groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """Return the optimizer's groups: matrices decay, the rest does not."""
        named = dict(model.named_parameters())
        decay = float(self.config.train.optimizer.weight_decay)
        return [
            {"params": [named[name] for name in group.names], "weight_decay": decay, **group.settings}
            for group in parameter_groups(model, self.config, None, own_optimizer=False)
        ]

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return AdamW as people write it: what is fused or not is left to PyTorch."""
        return torch.optim.AdamW(self.groups(model), lr=float(self.config.train.optimizer.lr))

    def schedule(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
        """Return the config's schedule."""
        return torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: self.config.train.schedule.factor(step, self.steps)
        )

    def sampled(self) -> tuple[DataLoader[Any], DistributedSampler[Any]]:
        """Return a DataLoader of this rank's samples, and its sampler."""
        data = self.task.data()
        sampler: DistributedSampler[Any] = DistributedSampler(data, self.place.size, self.place.rank)
        return DataLoader(data, batch_size=self.micro, sampler=sampler), sampler

    def epochs(self, loader: Any, sampler: Any = None) -> Iterator[tuple[int, Any]]:
        """Yield (step, batch) without end, and wait between two steps for this process's turn."""
        step = 0
        for epoch in count():
            if sampler is not None:
                sampler.set_epoch(epoch)
            for batch in loader:  # the time of reading it counts: the boundary is at the end of the body
                if step == 0:
                    self.turns.pass_boundary()
                step += 1
                yield step, batch
                self.turns.pass_boundary()

    def log(self, step: int, loss: Tensor) -> None:
        """Print the loss of a logged step on rank 0."""
        if step % self.every == 0:
            self.turns.loss = loss.item()
            if self.place.rank == 0:
                print(f"step {step} loss {self.turns.loss:.4f}")


def by_unipar(quick: Quickstart) -> None:
    """Train as the worker that `unipar.launch` starts, with its loader, run log and heartbeat."""
    settled = read_settled(quick.run)
    backend = registry.find_backend(settled.strategy.backend)
    with (
        open_run(settled, backend, quick.task, quick.place, quick.run) as run,
        exit_on_error(quick.run, quick.place.rank, run),
    ):
        (part,) = run.parts.values()

        def before_waiting() -> None:
            run.mark("waiting")
            if part.last is not None:
                quick.turns.loss = part.last["loss"]

        quick.turns.before_waiting = before_waiting
        run.at_boundary(quick.turns.pass_boundary)
        quick.task.train(run)


def by_ddp(quick: Quickstart) -> None:
    """Train with DistributedDataParallel."""
    torch.distributed.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(quick.model())
    optimizer = quick.optimizer(model)
    schedule = quick.schedule(optimizer)
    for step, batch in quick.epochs(*quick.sampled()):
        loss = quick.task.loss(model, batch)
        loss.backward()
        clip_grad_norm_(model.parameters(), quick.clip)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        quick.log(step, loss)


def by_accelerate(quick: Quickstart) -> None:
    """Train with Accelerate."""
    accelerate: Any = import_module("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    assert accelerator.num_processes == quick.place.size
    model = quick.model()
    optimizer = quick.optimizer(model)
    loader = DataLoader(quick.task.data(), batch_size=quick.micro, shuffle=True)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, quick.schedule(optimizer))
    for step, batch in quick.epochs(loader):
        loss = quick.task.loss(model, batch)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), quick.clip)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        quick.log(step, loss)


def by_fabric(quick: Quickstart) -> None:
    """Train with Lightning Fabric."""
    lightning: Any = import_module("lightning")
    fabric = lightning.Fabric(accelerator="cpu", devices=quick.place.size, strategy="ddp")
    fabric.launch()
    assert fabric.world_size == quick.place.size
    model = quick.model()
    optimizer = quick.optimizer(model)
    schedule = quick.schedule(optimizer)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(DataLoader(quick.task.data(), batch_size=quick.micro, shuffle=True))
    for step, batch in quick.epochs(loader):
        loss = quick.task.loss(model, batch)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=quick.clip)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        quick.log(step, loss)


def by_lightning(quick: Quickstart) -> None:
    """Train with Lightning's Trainer."""
    lightning: Any = import_module("lightning")
    module_class: Any = lightning.LightningModule
    callback_class: Any = lightning.Callback

    class Net(module_class):
        def __init__(self) -> None:
            super().__init__()
            self.model = quick.model()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = quick.task.loss(self.model, batch)
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> dict[str, Any]:
            optimizer = quick.optimizer(self.model)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": quick.schedule(optimizer), "interval": "step"},
            }

    class Wait(callback_class):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            assert trainer.world_size == quick.place.size
            quick.turns.pass_boundary()

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if "loss" in trainer.logged_metrics:
                quick.turns.loss = float(trainer.logged_metrics["loss"])
            quick.turns.pass_boundary()

    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=quick.place.size,
        strategy="ddp",
        max_steps=quick.steps,
        gradient_clip_val=quick.clip,
        log_every_n_steps=quick.every,
        callbacks=[Wait()],
        default_root_dir=quick.run,
    )
    trainer.fit(Net(), DataLoader(quick.task.data(), batch_size=quick.micro, shuffle=True))


def by_transformers(quick: Quickstart) -> None:
    """Train with the Trainer of transformers."""
    transformers: Any = import_module("transformers")
    callback_class: Any = transformers.TrainerCallback

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = quick.model()

        @override
        def forward(self, codes: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": quick.task.loss(self.model, (codes, labels))}

    class Named(Dataset[dict[str, Tensor]]):
        def __init__(self) -> None:
            self.data = quick.task.data()

        def __len__(self) -> int:
            return len(self.data)

        @override
        def __getitem__(self, index: int) -> dict[str, Tensor]:
            codes, labels = self.data[index]
            return {"codes": codes, "labels": labels}

    class Wait(callback_class):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            quick.turns.pass_boundary()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            quick.turns.pass_boundary()

        def on_log(self, arguments: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
            quick.turns.loss = float(logs.get("loss", quick.turns.loss))

    settings = transformers.TrainingArguments(
        output_dir=str(quick.run / "trainer"),
        use_cpu=True,
        per_device_train_batch_size=quick.micro,
        max_steps=quick.steps,
        learning_rate=float(quick.config.train.optimizer.lr),
        weight_decay=float(quick.config.train.optimizer.weight_decay),
        lr_scheduler_type="cosine",
        warmup_steps=quick.config.train.schedule.warmup,
        max_grad_norm=quick.clip,
        logging_steps=quick.every,
    )
    assert settings.world_size == quick.place.size
    transformers.Trainer(model=Net(), args=settings, train_dataset=Named(), callbacks=[Wait()]).train()


def by_deepspeed(quick: Quickstart, stage: int, **optimizer: Any) -> None:
    """Train with DeepSpeed's engine; without `torch_adam` it compiles an AdamW of its own, once on a machine."""
    deepspeed: Any = import_module("deepspeed")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # on the CPU it compiles for a minute
    deepspeed.init_distributed("gloo")
    model, train = quick.model(), quick.config.train
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": quick.micro,
        "gradient_clipping": quick.clip,
        "steps_per_print": quick.every,
        "optimizer": {"type": "AdamW", "params": {"lr": float(train.optimizer.lr), **optimizer}},
        "scheduler": {
            "type": "WarmupCosineLR",
            "params": {"total_num_steps": quick.steps, "warmup_num_steps": train.schedule.warmup},
        },
        "zero_optimization": {"stage": stage},
    }
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=quick.groups(model), config=settings)
    assert engine.world_size == quick.place.size
    for step, batch in quick.epochs(*quick.sampled()):
        loss = quick.task.loss(engine, batch)
        engine.backward(loss)
        engine.step()
        quick.log(step, loss)


TRAININGS: dict[str, Callable[[Quickstart], None]] = {
    "unipar": by_unipar,
    "DDP": by_ddp,
    "Accelerate": by_accelerate,
    "Fabric": by_fabric,
    "Lightning": by_lightning,
    "HF Trainer": by_transformers,
    "DeepSpeed ZeRO-0": lambda quick: by_deepspeed(quick, 0),
    "DeepSpeed ZeRO-1": lambda quick: by_deepspeed(quick, 1),
    "DeepSpeed ZeRO-2": lambda quick: by_deepspeed(quick, 2),
    "ZeRO-2, torch_adam": lambda quick: by_deepspeed(quick, 2, torch_adam=True),
}
"""How each contestant trains."""


def train_in_turns(place: Place, run: Path, control: socket.socket | None) -> NoReturn:
    """Train as the contestant whose name is in the run folder; entry function of the workers."""
    assert control is not None
    launch: dict[str, Any] = json.loads((run / "launch.json").read_text("utf-8"))
    task: Task = TaskRef.from_json(launch["task"]).load()
    contestant: dict[str, Any] = json.loads((run / "contestant.json").read_text("utf-8"))
    if contestant["name"] != "unipar":
        _look_as_under_torchrun(place, contestant["port"])
    TRAININGS[contestant["name"]](Quickstart(read_settled(run).config, task, place, run, Turns(control)))
    raise AssertionError("the training ended before the turns did")


def _look_as_under_torchrun(place: Place, port: int) -> None:
    """Set the variables that torchrun sets."""
    os.environ |= {
        "RANK": str(place.rank),
        "LOCAL_RANK": str(place.local_rank),
        "WORLD_SIZE": str(place.size),
        "LOCAL_WORLD_SIZE": str(place.local_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "peers",
        "GLOO_SOCKET_IFNAME": "lo",  # as unipar: otherwise a library may reach its own machine by another way
    }
