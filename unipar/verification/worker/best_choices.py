"""Choices of the largest scores (`topk`), by which routers choose experts: recorded, or followed where scores tie."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from unipar.engines.router_choices import widest_tie

Choices = Mapping[str, Tensor]
"""Numbers chosen in one step, by microbatch, module and call."""


@final
class BestChoices:
    """Choices of a run, step by step: recorded, or taken from another run where only rounding makes them differ."""

    def __init__(self, followed: Sequence[Choices] | None = None) -> None:
        """`followed`: choices of the other run; None: those of this one are recorded."""
        self.steps: list[dict[str, Tensor]] = []
        """Recorded choices."""

        self.moved: dict[str, int] = {}
        """Number of rows whose choice was taken from the other run, by step, microbatch, module and call."""

        self._followed = followed

    @contextmanager
    def of_microbatch(self, model: nn.Module, step: int, number: int) -> Generator[None]:
        """Context manager: choices in the body are those of the microbatch of this number, in this step, from 1."""
        self.steps += [{} for _ in range(step - len(self.steps))]
        calls = Counter[str]()
        with _running_modules(model) as running:

            def take(scores: Tensor, values: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
                name = running[-1]
                calls[name] += 1
                place = f"{number}/{name}#{calls[name]}"
                if self._followed is None:
                    self.steps[step - 1][place] = chosen.to(torch.int32).cpu()
                    return values, chosen
                return self._follow(step, place, scores, values, chosen)

            with _TopK(take):
                yield

    def _follow(self, step: int, place: str, scores: Tensor, values: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Return the choice with that of the other run in each row in which both are equal up to rounding."""
        assert self._followed is not None
        other = self._followed[step - 1].get(place)
        if other is None or other.shape != chosen.shape:
            return values, chosen
        other = other.to(chosen)
        differs = (other.sort(-1).values != chosen.sort(-1).values).any(-1)
        gap = (scores.gather(-1, other).sort(-1).values - values.sort(-1).values).abs().amax(-1)
        ties = differs & (gap <= widest_tie(scores.dtype) * values.abs().amax(-1))
        if not (count := int(ties.sum())):
            return values, chosen
        self.moved[f"{step}/{place}"] = count
        chosen = torch.where(ties[..., None], other, chosen)
        return scores.gather(-1, chosen), chosen


@contextmanager
def _running_modules(model: nn.Module) -> Generator[list[str]]:
    """Context manager: yield the names of the modules that run now, the innermost last."""
    running = ["(the model)"]

    def leave(name: str, *_: Any) -> None:
        while running.pop() != name:
            pass

    handles: list[Any] = []
    for name, module in model.named_modules():
        if name:
            handles.append(module.register_forward_pre_hook(partial(_enter, running, name)))
            handles.append(module.register_forward_hook(partial(leave, name), always_call=True))
    try:
        yield running
    finally:
        for handle in handles:
            handle.remove()


def _enter(running: list[str], name: str, *_: Any) -> None:
    running.append(name)


@final
class _TopK(TorchDispatchMode):
    """Mode that passes each choice of the largest scores of rows through a function, below autograd."""

    def __init__(self, take: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self._take = take

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is not torch.ops.aten.topk.default or args[0].ndim < 2 or not args[0].is_floating_point():
            return out
        last = len(args) < 3 or args[2] in (-1, args[0].ndim - 1)
        return self._take(args[0], *out) if last else out
