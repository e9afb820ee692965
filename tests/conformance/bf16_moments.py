"""AdamW with moments in bf16 by hand, for the conformance suite: roundings are drawn in numpy's unsigned numbers."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override


def bits_by_hand(name: str, count: int, step: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.uint32]]:
    """Return the 32 bits of each element of a parameter in a step, counted from 0."""
    one, other = np.frombuffer(blake2b(f"{seed} {name}".encode(), digest_size=8).digest(), "<u4")
    now = np.array(step, dtype=np.uint32)
    with np.errstate(over="ignore"):
        x = np.arange(count, dtype=np.uint32) * np.uint32(0x9E3779B1) + (now * np.uint32(0x85EBCA6B) + one)
        x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
        x = ((x ^ (x >> np.uint32(15))) + (now * np.uint32(0x27D4EB2F) + other)) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def rounded_by_hand(t: Tensor, share: np.ndarray[Any, np.dtype[np.float64]]) -> Tensor:
    """Return bf16 numbers: towards zero, or the next one away from it where the rest is above 1 - share of the gap."""
    bits = t.detach().contiguous().numpy().view(np.uint32).reshape(-1)
    low = bits & np.uint32(0xFFFF)
    away = low / 65536 + share >= 1.0
    kept = (bits - low).astype(np.uint64) + np.where(away, 0x10000, 0).astype(np.uint64)
    return torch.from_numpy(kept.astype(np.uint32).view(np.float32)).view(t.shape).to(torch.bfloat16)


@final
class Bf16ByHand(torch.optim.AdamW):
    """PyTorch's AdamW, whose moments are rounded after each step."""

    def __init__(self, model: nn.Module, groups: Any, **settings: Any) -> None:
        super().__init__(groups, **settings)
        self._names: dict[Any, str] = {p: name for name, p in model.named_parameters()}

    @override
    def step(self, closure: Any = None) -> Any:
        loss: Any = super().step(closure)
        for p, state in self.state.items():
            bits = bits_by_hand(self._names[p], p.numel(), int(state["step"]) - 1)
            for key, half in (("exp_avg", bits & np.uint32(0xFFFF)), ("exp_avg_sq", bits >> np.uint32(16))):
                state[key].copy_(rounded_by_hand(state[key].float(), half / 65536.0))
        return loss
