"""`AdamW8bit`: torchao's AdamW with moments of 8 bits, by torchao's own update and codes, the same in every world.

Imported when a config asks for it: torchao takes seconds to import.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, final

import torch
import torchao.optim
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchao.optim.adam import single_param_adam
from torchao.optim.subclass_8bit import OptimState8bit, get_qmap_signed, get_qmap_unsigned
from typing_extensions import override

from unipar.optimizers.block_states import BlockStates, blocks_fit
from unipar.optimizers.chunked_updates import InPieces, split_in_pieces
from unipar.optimizers.closure import loss_of_closure

_CODEBOOKS: Final = {"exp_avg": get_qmap_signed(), "exp_avg_sq": get_qmap_unsigned()}
"""Numbers that the 256 codes of a moment stand for."""

_LEAST: Final = 4096
"""Elements below which a parameter's moments stay in fp32, as in torchao and bitsandbytes."""


@final
class AdamW8bit(torchao.optim.AdamW8bit, BlockStates, InPieces):
    """torchao's AdamW8bit, whose moments are in the same blocks however a parameter is split.

    torchao itself decides by each rank's part, and compiles its update, which takes minutes on a CPU. Here a moment is
    in 8 bits only if each row of the whole parameter is whole blocks, and the update runs as it is written.
    """

    def __init__(
        self, params: Iterable[Tensor] | Iterable[dict[str, Any]], *, block_size: int = 256, **settings: Any
    ) -> None:
        super().__init__(params, block_size=block_size, **settings)
        for group in self.param_groups:
            group.setdefault("block_size", block_size)
        self.block_size = self.param_groups[0]["block_size"]  # a library that copies an optimizer copies its groups

    @property
    @override
    def block_keys(self) -> frozenset[str]:
        return frozenset({"exp_avg", "exp_avg_sq"})

    @override
    def new_state(self, p: Tensor, key: str) -> Tensor:
        local = p.to_local() if isinstance(p, DTensor) else p
        if p.numel() >= _LEAST and local.numel() and blocks_fit(p, self.block_size):
            state = self._subclass_zeros(local, signed=key == "exp_avg", block_size=self.block_size)
        else:
            state = torch.zeros_like(local)
        if not isinstance(p, DTensor):
            return state
        return DTensor.from_local(state, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride())

    @override
    def values_of(self, key: str, codes: Tensor, scale: Tensor) -> Tensor:
        codebook = torch.tensor(_CODEBOOKS[key], device=codes.device)
        return OptimState8bit(codes, scale, codebook, key == "exp_avg").dequantize()

    @override
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        loss = loss_of_closure(closure)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, p.grad, self.state[p], group)
        return loss

    def _update(self, p: Tensor, gradient: Tensor, state: dict[str, Any], group: Mapping[str, Any]) -> None:
        if not state:
            state["step"] = torch.tensor(0.0)
            state |= {key: self.new_state(p, key) for key in sorted(self.block_keys)}
        state["step"] += 1
        beta1, beta2 = group["betas"]
        most = self.elements_at_once(p.device.type) // self.block_size * self.block_size
        tensors = p.detach(), gradient, state["exp_avg"], state["exp_avg_sq"]
        local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
        local[1] = local[1].contiguous()  # torchao views the new moments, laid out like it, as rows of blocks
        for _, (weight, grad, first, second) in split_in_pieces(local, most):
            single_param_adam(
                weight,
                grad,
                state["step"],
                first,
                second,
                None,
                group["lr"],
                beta1,
                beta2,
                group["weight_decay"],
                group["eps"],
                IS_ADAMW=True,
                BF16_STOCHASTIC_ROUND=False,
            )
