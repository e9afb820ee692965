"""Trace of one step: a sketch of every module's output and of the gradient with respect to it, and every loss."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from typing import Any, final

from torch import Tensor, nn

from unipar.training.fingerprint import TensorSketcher, collect_tensors, sketch_whole_tensor


@final
class StepTrace:
    """Trace of one step, as rows in the order of events."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self._sketches = TensorSketcher(keep=False)
        self._calls: Counter[tuple[int, str]] = Counter()

    @contextmanager
    def record_modules(self, model: nn.Module, number: int) -> Generator[None]:
        """Context manager: record the modules while the loss of the microbatch of this number is computed."""
        handles = [
            module.register_forward_hook(partial(self._forward, name or "(the model)", number))
            for name, module in model.named_modules()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def record_loss(self, number: int, loss: Any) -> None:
        """Record what the loss function returned for the microbatch of this number."""
        if isinstance(loss, Tensor) and loss.numel() == 1:
            value = loss.detach().double().reshape(1).cpu()
            self.rows.append(
                {"way": "loss", "module": "", "at": "loss", "number": number, "shape": (), "sketch": value}
            )

    def _forward(self, name: str, number: int, module: nn.Module, given: Any, out: Any) -> None:
        self._calls[number, name] += 1
        for i, tensor in enumerate(t for t in collect_tensors(out) if t.is_floating_point()):
            at = f"{name}#{self._calls[number, name]}.{i}"
            self._note("forward", name, at, number, tensor)
            if tensor.requires_grad:
                tensor.register_hook(partial(self._note, "backward", name, at, number))

    def _note(self, way: str, name: str, at: str, number: int, tensor: Tensor) -> None:
        self.rows.append(
            {
                "way": way,
                "module": name,
                "at": at,
                "number": number,
                "shape": tuple(tensor.shape),
                "sketch": sketch_whole_tensor(self._sketches, at, tensor.detach()),
            }
        )
