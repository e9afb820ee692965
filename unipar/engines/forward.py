"""The module that engines wrap, the opaque batch, eval mode restored."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import nn
from typing_extensions import override

from unipar.backend import Fn
from unipar.engines.batch import cast_floats


@final
class OpaqueBatch:
    """A batch that no library looks into: they move, cast and halve the tensors that they see."""

    __slots__ = ("batch",)  # not a dataclass, not a tuple: those are walked into

    def __init__(self, batch: object) -> None:
        self.batch = batch


@final
class ForwardCall(nn.Module):
    """`forward(fn, held)` is `fn(model, batch)`, under autocast and with the batch cast where a precision asks."""

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
    def forward(self, fn: Fn, held: OpaqueBatch) -> Any:
        batch = held.batch if self.cast is None else cast_floats(held.batch, self.cast)
        if self.autocast is None:
            model: Any = self._modules["model"]  # its attribute is looked for everywhere else first
            return fn(model, batch)
        with torch.autocast(self.device_type, self.autocast):
            return fn(self.model, batch)


@contextmanager
def eval_mode(model: nn.Module) -> Generator[None]:
    """Evaluation mode, then each module's own mode again: a frozen teacher stays in eval."""
    was = [(m, m.training) for m in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in was:
            module.training = mode
