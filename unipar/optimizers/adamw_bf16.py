"""`AdamWBf16`: PyTorch's AdamW with moments in bf16, rounded up or down by chance, the same in every world."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw
from typing_extensions import override

from unipar.optimizers.chunked_updates import InPieces, split_in_pieces
from unipar.optimizers.closure import loss_of_closure
from unipar.optimizers.stochastic_rounding import MOMENTS, ElementRuns, RoundedMoments, draw_bits, round_by_chance


@final
class AdamWBf16(RoundedMoments, InPieces):
    """AdamW, by PyTorch's own function in the precision of the weights, whose moments are in bf16 between steps.

    Rounded to the nearest, a second moment would stand still: a step changes it by a thousandth, and the next number
    that bf16 has is a 256th away. So each becomes one of its two neighbours by chance, and is right on average. The
    chance depends on the seed, the parameter's name, the element's place in it and the step: every rank that has an
    element draws the same.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        fused: bool | None = None,
        foreach: bool | None = None,
        seed: int = 0,
    ) -> None:
        """Take groups like any optimizer of PyTorch's, each with the `names` of its parameters; else they are numbers.

        `seed` is that of the roundings.
        """
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "seed": seed}
        super().__init__(params, defaults | {"fused": fused, "foreach": foreach})

    @override
    def new_moment(self, p: Tensor) -> Tensor:
        return torch.zeros_like(p, dtype=torch.bfloat16)

    @override
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        loss = loss_of_closure(closure)
        before = 0
        for group in self.param_groups:
            names: Sequence[str] = group.get("names", ())
            for number, p in enumerate(group["params"], before):
                name = names[number - before] if len(names) == len(group["params"]) else str(number)
                if p.grad is not None:
                    self._update(p, p.grad, group, name)
            before += len(group["params"])
        return loss

    def _update(self, p: Tensor, gradient: Tensor, group: Mapping[str, Any], own_name: str) -> None:
        state: dict[str, Any] = self.state[p]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=p.device if group["fused"] else "cpu")
            state |= {key: self.new_moment(p) for key in MOMENTS}
        each = [self._parts(p, t.detach(), own_name) for t in (p, gradient, *(state[key] for key in MOMENTS))]
        for parts in zip(*each, strict=True):
            name, runs, _ = parts[0]
            for first, tensors in split_in_pieces([t for _, _, t in parts], self.elements_at_once(p.device.type)):
                numbers = runs.numbers(first, first + tensors[0].numel(), p.device)
                bits = draw_bits(numbers, state["step"], f"{group['seed']} {name}")
                _update_piece(tensors, bits, state["step"], group)
        state["step"] += 1

    def _parts(self, p: Tensor, t: Tensor, own_name: str) -> list[tuple[str, ElementRuns, Tensor]]:
        if self.views is not None:
            return list(self.views(p, t))
        return [(own_name, ElementRuns(0, t.numel()), t.to_local() if isinstance(t, DTensor) else t)]


def _update_piece(tensors: Sequence[Tensor], bits: Tensor, step: Tensor, group: Mapping[str, Any]) -> None:
    """Update a piece of a weight, and of its moments."""
    weight, _, *moments = tensors
    wide = torch.promote_types(weight.dtype, torch.float32)
    # fused kernels take contiguous tensors of one dtype
    new, gradient, first, second = (t.to(wide).contiguous() for t in tensors)
    beta1, beta2 = group["betas"]
    adamw(
        [new],
        [gradient],
        [first],
        [second],
        [],
        [step.clone()],
        foreach=group["foreach"],
        fused=group["fused"],
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )
    if new is not weight:
        weight.copy_(new)
    for moment, updated, half in zip(moments, (first, second), (bits & 0xFFFF, (bits >> 16) & 0xFFFF), strict=True):
        moment.copy_(round_by_chance(updated.to(torch.float32), half))
