"""Engine of nn.DataParallel: one process that gives each of several CUDA devices a whole microbatch at a time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from typing_extensions import override

from unipar.backend import LossFn, Mark, Micro, Part
from unipar.config import Config
from unipar.distributed.world import World
from unipar.engines.batch_transfer import to_device
from unipar.engines.forward import ForwardCall, OpaqueBatch
from unipar.engines.gradients import scale_loss
from unipar.engines.placement import broadcast_model, plain_attributes
from unipar.engines.wrapper import WrapperEngine
from unipar.errors import TaskError
from unipar.model.create import ONLY_PART
from unipar_native import data_parallel_devices


@final
class DataParallelEngine(WrapperEngine):
    """Engine with the numbers of one process that takes the same microbatches one after another."""

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
    def sync(self, micros: int, *, last: bool) -> None:
        """Return no context, as nothing is reduced: there is one process."""

    @override
    def forward_loss(self, fn: LossFn, micro: Micro) -> Tensor:
        if not isinstance(micro.batch, MicrobatchRound):
            return super().forward_loss(fn, micro)
        return self.wrapped(fn, OpaqueBatch(micro.batch))  # each device's microbatch has a number of its own

    @override
    def run_microbatches(self, fn: LossFn, micros: Sequence[Micro], divisor: float, mark: Mark) -> Tensor:
        return super().run_microbatches(fn, group_into_rounds(micros, len(self.devices)), divisor, mark)


@final
@dataclass(frozen=True)
class MicrobatchRound:
    """Microbatches that run forward at the same time, one on each device."""

    micros: Sequence[Micro]


def group_into_rounds(micros: Sequence[Micro], devices: int) -> Sequence[Micro]:
    """Return rounds of as many microbatches as there are devices; the last round may have fewer."""
    if devices == 1:
        return micros
    return [Micro(MicrobatchRound(micros[i : i + devices]), 1.0) for i in range(0, len(micros), devices)]


def sum_losses(losses: Iterable[Tensor], micros: Iterable[Micro]) -> Tensor:
    """Return the sum of a round's losses, each times its scale, on the first device."""
    first, *others = (scale_loss(loss, m.scale, 1.0, None)[0] for loss, m in zip(losses, micros, strict=True))
    for other in others:
        first = first + other
    return first


@final
class RoundDataParallel(nn.DataParallel[ForwardCall]):
    """nn.DataParallel that spreads a round over the devices, and runs any other batch on the first one."""

    @override
    def forward(self, fn: Any, opaque: OpaqueBatch, *number: int) -> Any:
        if not isinstance(opaque.batch, MicrobatchRound):
            return self.module(fn, opaque, *number)
        return sum_losses(super().forward(fn, opaque), opaque.batch.micros)

    @override
    def scatter(self, inputs: Any, kwargs: Any, device_ids: Sequence[int | torch.device]) -> Any:
        """Give each device one microbatch of the round; PyTorch would split each tensor along its first dimension."""
        fn, opaque = inputs
        moved = [
            (micro.bind(fn), OpaqueBatch(to_device(micro.batch, torch.device(device))))
            for micro, device in zip(opaque.batch.micros, device_ids, strict=False)  # a short round leaves some idle
        ]
        return moved, [{} for _ in moved]

    @override
    def replicate(self, module: ForwardCall, device_ids: Sequence[int | torch.device]) -> list[ForwardCall]:
        """Return replicas with their parameters registered, and with plain tensor attributes moved to the device.

        PyTorch's own replicas have empty `parameters()`, and plain tensors that are still on the first device.
        """
        replicas = super().replicate(module, device_ids)
        for replica, device in zip(replicas, device_ids, strict=True):
            for inner in replica.modules():
                inner._parameters.update(inner._former_parameters)  # pyright: ignore[reportPrivateUsage, reportArgumentType, reportCallIssue]
                for name, value in plain_attributes(inner).items():
                    if isinstance(value, Tensor):
                        vars(inner)[name] = value.to(torch.device(device))
        return replicas

    @override
    def parallel_apply(self, replicas: Sequence[ForwardCall], inputs: Sequence[Any], kwargs: Any) -> list[Any]:
        """Run the replicas from one thread, where PyTorch starts one for each device.

        CUDA runs asynchronously in any case, and each microbatch must draw its own random numbers, on the CPU too.
        """
        losses: list[Any] = []
        for replica, arguments, device in zip(replicas, inputs, self.device_ids, strict=False):
            at = torch.device(device)  # PyTorch keeps numbers
            with torch.get_device_module(at).device(at):
                losses.append(replica(*arguments))
        return losses

    @override
    def gather(self, outputs: Sequence[Tensor], output_device: int | torch.device) -> list[Tensor]:
        return [loss.to(torch.device(output_device)) for loss in outputs]
