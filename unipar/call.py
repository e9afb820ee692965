"""The one module that engines wrap: the user's loss runs inside, so it sees the plain model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn
from typing_extensions import override

from unipar.backend import Fn


@final
class Held:
    """A batch that no library looks into: they move, cast and halve the tensors that they see."""

    __slots__ = ("batch",)  # not a dataclass, not a tuple: those are walked into

    def __init__(self, batch: object) -> None:
        self.batch = batch


@final
class Call(nn.Module):
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
    def forward(self, fn: Fn, held: Held) -> Any:
        batch = held.batch if self.cast is None else cast_floats(held.batch, self.cast)
        if self.autocast is None:
            model: Any = self._modules["model"]  # its attribute is looked for everywhere else first
            return fn(model, batch)
        with torch.autocast(self.device_type, self.autocast):
            return fn(self.model, batch)


def walked(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """`batch` with every tensor in it changed; containers of the usual kinds are rebuilt."""
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, dict):
        return type(batch)((k, walked(v, change)) for k, v in batch.items())
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(walked(v, change) for v in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(walked(v, change) for v in batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        made = {f.name: walked(getattr(batch, f.name), change) for f in dataclasses.fields(batch) if f.init}
        return dataclasses.replace(batch, **made)
    return batch


def cast_floats(batch: Any, dtype: torch.dtype) -> Any:
    return walked(batch, lambda t: t.to(dtype) if t.is_floating_point() else t)


def moved(batch: Any, device: torch.device) -> Any:
    """The batch where the model is; an object with its own `to` is asked to move itself."""
    if device.type == "cpu":
        return batch
    if not isinstance(batch, Tensor | dict | list | tuple) and callable(getattr(batch, "to", None)):
        return batch.to(device)
    return walked(batch, lambda t: t.to(device, non_blocking=True))


@contextmanager
def resting(model: nn.Module) -> Generator[None]:
    """Evaluation mode, then each module's own mode again: a frozen teacher stays in eval."""
    was = [(m, m.training) for m in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in was:
            module.training = mode
