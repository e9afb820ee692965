"""Module that engines wrap, batch that libraries cannot look into, and evaluation mode."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import nn
from typing_extensions import override

from unipar.engines.batch_transfer import cast_floats


@final
class OpaqueBatch:
    """Batch whose tensors are hidden from libraries, which would otherwise move, cast or split them."""

    __slots__ = ("batch",)  # neither a dataclass nor a tuple: libraries look into those

    def __init__(self, batch: object) -> None:
        self.batch = batch


@final
class ForwardCall(nn.Module):
    """Module whose forward is `fn(model, batch)`, with autocast and a cast of the batch if the precision needs them.

    A microbatch's loss gets its number, too: `fn(model, batch, number)`.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        *,
        autocast: torch.dtype | None = None,
        cast: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.device_type, self.autocast, self.cast = device.type, autocast, cast

    @override
    def forward(self, fn: Callable[..., Any], opaque: OpaqueBatch, *number: int) -> Any:
        batch = opaque.batch if self.cast is None else cast_floats(opaque.batch, self.cast)
        if self.autocast is None:
            model: Any = self._modules["model"]  # faster than self.model: nn.Module looks elsewhere first
            return fn(model, batch, *number)
        with torch.autocast(self.device_type, self.autocast):
            return fn(self.model, batch, *number)


@contextmanager
def plain_evaluation(call: ForwardCall) -> Generator[nn.Module]:
    """Context manager: the user's model in evaluation mode and autocast, to be called without the library's wrapper."""
    with eval_mode(call), torch.autocast(call.device_type, call.autocast, enabled=call.autocast is not None):
        yield call.model


@contextmanager
def eval_mode(model: nn.Module) -> Generator[None]:
    """Context manager: evaluation mode without gradients; on exit each module gets its own earlier mode back.

    A frozen teacher that was in evaluation mode before stays in it.
    """
    modes = [(m, m.training) for m in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def unrecorded_forward(model: nn.Module) -> Generator[None]:
    """Context manager: no gradients; on exit buffers, such as running statistics, have the values that they had."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    with torch.no_grad():
        try:
            yield
        finally:
            for buffer, before in buffers:
                buffer.copy_(before)
