"""Trace of one step: a sketch of every module's inputs, of its output and of the gradient with respect to that; every
loss; and what dropout drew."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from unipar.engines.batch_transfer import map_tensors
from unipar.engines.fingerprint import (
    SKETCH_NUMBERS,
    TensorSketcher,
    collect_tensors,
    fingerprint_batch,
    sketch_whole_tensor,
)


@final
class StepTrace:
    """Trace of one step, as rows in the order of events."""

    def __init__(self, *, slots: bool = False) -> None:
        """`slots`: record what each expert adds to a row, by further calls of layers of experts."""
        self._slots, self._quiet = slots, False
        self.rows: list[dict[str, Any]] = []
        self._sketches = TensorSketcher(keep=False)
        self._calls: Counter[tuple[int, str]] = Counter()

    @contextmanager
    def record_modules(self, model: nn.Module, number: int) -> Generator[None]:
        """Context manager: record the modules while the loss of the microbatch of this number is computed."""
        handles = [
            # also of a block behind which another hook leaves the loss, as at the end of a pipeline's stage
            module.register_forward_hook(
                partial(self._forward, name or "(the model)", number), with_kwargs=True, always_call=True
            )
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

    def _forward(self, name: str, number: int, module: nn.Module, inputs: Any, named: Any, out: Any) -> None:
        if self._quiet:
            return
        self._calls[number, name] += 1
        call = f"{name}#{self._calls[number, name]}"
        for i, tensor in enumerate(t for t in collect_tensors((inputs, named)) if t.is_floating_point()):
            self._note("input", name, f"{call}.{i}", number, tensor)
        bias = getattr(module, "bias", None)
        for i, tensor in enumerate(t for t in collect_tensors(out) if t.is_floating_point()):
            at = f"{call}.{i}"
            self._note("forward", name, at, number, tensor)
            if isinstance(bias, Tensor) and bias.shape == tensor.shape[-1:]:
                self._note("bias", name, at, number, bias.expand(tensor.shape))
            if tensor.requires_grad:
                tensor.register_hook(partial(self._note, "backward", name, at, number))

        self._note_experts(name, f"{call}.rows", number, module, (inputs, named), out)

    def _note_experts(self, name: str, at: str, number: int, module: nn.Module, given: Any, out: Any) -> None:
        """Record the rows of a layer of experts: it is called with two numbers of experts a row, and their weights."""
        tensors = collect_tensors(given)
        numbers = [t for t in tensors if t.ndim == 2 and not t.is_floating_point() and t.dtype != torch.bool]
        if len(tensors) != 3 or len(numbers) != 1 or not isinstance(out, Tensor) or out.ndim != 2:
            return
        weights = [t for t in tensors if t.is_floating_point() and t.shape == numbers[0].shape]
        if not weights or len(out) != len(numbers[0]):
            return
        signs = torch.randint(0, 2, (out.shape[1], SKETCH_NUMBERS), generator=torch.Generator().manual_seed(0))
        signs = (signs * 2.0 - 1.0).to(out.device, torch.float64)

        def project(rows: Tensor) -> Tensor:
            return (rows.detach().double() @ signs).cpu()

        row = {"way": "rows", "module": name, "at": at, "number": number, "shape": tuple(out.shape)}
        choice = {"experts": numbers[0].detach().cpu(), "weights": weights[-1].detach().cpu()}
        self.rows.append({**row, "sketch": project(out), **choice})
        if not self._slots:
            return
        self._quiet, parts = True, list[Tensor]()
        with torch.no_grad():
            for slot in range(weights[-1].shape[1]):
                only = torch.zeros_like(weights[-1])
                only[:, slot] = weights[-1][:, slot]
                args, kwargs = map_tensors(given, lambda t, only=only: only if t is weights[-1] else t)
                parts.append(project(module.forward(*args, **kwargs)))
        self._quiet = False
        self.rows[-1]["parts"] = torch.stack(parts, 1)

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


_DRAWS = (torch.ops.aten.bernoulli_.float, torch.ops.aten.bernoulli.p)


@final
class DropoutDraws(TorchDispatchMode):
    """Mode that keeps a fingerprint of every mask that dropout draws, in order."""

    def __init__(self, masks: list[str]) -> None:
        """Add them to `masks`."""
        super().__init__()
        self.masks = masks

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in _DRAWS:
            self.masks.append(fingerprint_batch(out))
        elif func is torch.ops.aten.native_dropout.default:
            self.masks.append(fingerprint_batch(out[1]))
        return out
