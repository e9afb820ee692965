"""nn.DataParallel: one process, whose microbatches are dealt over several CUDA devices, a whole one to each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from typing_extensions import override

from unipar.backend import Fn, Micro, Part
from unipar.config import Config
from unipar.distributed.world import World
from unipar.engines.batch import to_device
from unipar.engines.forward import ForwardCall, OpaqueBatch
from unipar.engines.gradients import scale_loss
from unipar.engines.placement import broadcast_model, plain_attributes
from unipar.engines.wrapper import WrapperEngine
from unipar.errors import TaskError
from unipar.model.create import ONLY_PART
from unipar_native import data_parallel_devices


@final
class DataParallelEngine(WrapperEngine):
    """Its numbers are those of one process that takes the same microbatches one after another."""

    divisor = 1.0

    def __init__(self, part: Part, config: Config, world: World) -> None:
        if part.name != ONLY_PART:
            raise TaskError(
                "nn.DataParallel trains one model, and model() returned parts by name, which could not reach each "
                "other on its devices: use native/nothing"
            )
        broadcast_model(part.module, world.device)
        super().__init__(part, config, world)
        self.devices = data_parallel_devices(config)
        self.wrapped = RoundDataParallel(self.call, self.devices)

    @override
    def sync(self, micros: int, *, last: bool) -> AbstractContextManager[Any]:
        return nullcontext()

    @override
    def rounds(self, micros: Sequence[Micro]) -> Sequence[Micro]:
        return group_into_rounds(micros, len(self.devices))


@final
@dataclass(frozen=True)
class MicrobatchRound:
    """Microbatches that go forward side by side, one on each device."""

    micros: Sequence[Micro]


def group_into_rounds(micros: Sequence[Micro], devices: int) -> Sequence[Micro]:
    """As many at a time as there are devices; the last round may have fewer."""
    if devices == 1:
        return micros
    return [Micro(MicrobatchRound(micros[i : i + devices]), 1.0) for i in range(0, len(micros), devices)]


def sum_losses(losses: Iterable[Tensor], micros: Iterable[Micro]) -> Tensor:
    """A round's loss: each times its scale, where the first device is."""
    first, *others = (scale_loss(loss, m.scale, 1.0, None)[0] for loss, m in zip(losses, micros, strict=True))
    for other in others:
        first = first + other
    return first


@final
class RoundDataParallel(nn.DataParallel[ForwardCall]):
    """A round is dealt over the devices; anything else is the first one's."""

    @override
    def forward(self, fn: Fn, held: OpaqueBatch) -> Any:
        if not isinstance(held.batch, MicrobatchRound):
            return self.module(fn, held)
        return sum_losses(super().forward(fn, held), held.batch.micros)

    @override
    def scatter(self, inputs: Any, kwargs: Any, device_ids: Sequence[int | torch.device]) -> Any:
        """The library would cut every tensor that it finds along its first dimension."""
        fn, held = inputs
        given = [
            (fn, OpaqueBatch(to_device(micro.batch, torch.device(device))))
            for micro, device in zip(held.batch.micros, device_ids, strict=False)  # a short round leaves some idle
        ]
        return given, [{} for _ in given]

    @override
    def replicate(self, module: ForwardCall, device_ids: Sequence[int | torch.device]) -> list[ForwardCall]:
        """The library leaves `parameters()` of a replica empty, and plain tensors where they were."""
        made = super().replicate(module, device_ids)
        for replica, device in zip(made, device_ids, strict=True):
            for inner in replica.modules():
                inner._parameters.update(inner._former_parameters)  # pyright: ignore[reportPrivateUsage, reportArgumentType, reportCallIssue]
                for name, value in plain_attributes(inner).items():
                    if isinstance(value, Tensor):
                        vars(inner)[name] = value.to(torch.device(device))
        return made

    @override
    def parallel_apply(self, replicas: Sequence[ForwardCall], inputs: Sequence[Any], kwargs: Any) -> list[Any]:
        """From one thread, where the library has one for each device: CUDA does not wait for what it is given, and
        every microbatch draws its own random numbers, the CPU's too."""
        losses: list[Any] = []
        for replica, given, device in zip(replicas, inputs, self.device_ids, strict=False):
            with torch.cuda.device(device):
                losses.append(replica(*given))
        return losses

    @override
    def gather(self, outputs: Sequence[Tensor], output_device: int | torch.device) -> list[Tensor]:
        return [loss.to(torch.device(output_device)) for loss in outputs]
