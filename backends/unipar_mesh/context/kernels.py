"""Kernels of attention to some of the keys: each gives its log-sum-exp, and takes that of all keys for the backward."""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

_ATEN: Any = torch.ops.aten


def kernel_for(q: Tensor, k: Tensor, v: Tensor) -> Literal["cpu", "flash", "efficient", "products"]:
    """Return which of torch's kernels takes these: they must give their log-sum-exp, and take it for the backward."""
    width = q.shape[-1]
    if width != v.shape[-1]:
        return "products"
    if q.device.type == "cpu":
        return "cpu"
    if q.device.type == "cuda" and width % 8 == 0 and width <= 256:
        if q.dtype in (torch.float16, torch.bfloat16) and has_flash(q.device):
            return "flash"
        if q.dtype in (torch.float16, torch.float32):
            return "efficient"
    return "products"


@cache
def has_flash(device: torch.device) -> bool:
    """Return whether flash attention runs there: torch may be built without, and it needs Ampere or newer."""
    built = torch.backends.cuda.is_flash_attention_available()
    return built and torch.get_device_module(device).get_device_capability(device) >= (8, 0)


def masked_scores(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    scores = (q * scale) @ k.transpose(-1, -2)
    if causal:
        scores = scores.masked_fill(_after(scores.shape[-2], scores.shape[-1], q.device), float("-inf"))
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype is torch.bool else scores + mask
    return scores


def share_in_sum(part: Tensor, full: Tensor) -> Tensor:
    """Return the share of a part in a sum, both as logarithms; 0 in a sum of nothing, as in a row that sees no key."""
    return (part - full.masked_fill(full == float("-inf"), 0.0)).exp()


def _after(rows: int, columns: int, device: torch.device) -> Tensor:
    return torch.ones(rows, columns, dtype=torch.bool, device=device).triu(1)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Return the attention of queries to some of the keys, and the log-sum-exp of each query's scores."""
    kernel = "products" if mask is not None else kernel_for(q, k, v)
    if kernel == "cpu":
        out, lse = _ATEN._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
        return out, lse
    if kernel == "flash":
        out, lse = _ATEN._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)[:2]
        return out, lse
    if kernel == "efficient":
        out, lse = _ATEN._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal, scale=scale)[:2]
        return out, lse[..., : q.shape[-2]]  # the kernel pads rows to a multiple of 32
    dtype = q.dtype
    with torch.autocast(q.device.type, enabled=False):
        q, k, v = _wide(q, k, v)
        scores = masked_scores(q, k, mask, causal, scale)
        lse = scores.logsumexp(-1)
        return (share_in_sum(scores, lse.unsqueeze(-1)) @ v).to(dtype), lse


def _wide(*tensors: Tensor) -> list[Tensor]:
    """Return tensors in which kernels add up: fp32 for bf16 and fp16."""
    return [t.float() if t.dtype in (torch.bfloat16, torch.float16) else t for t in tensors]


def attend_backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, and of these keys and values, given the result over *all* keys."""
    kernel = "products" if mask is not None else kernel_for(q, k, v)
    if kernel == "cpu":
        # the kernel reads the log-sum-exp as it writes it, heads fastest
        lse = lse.transpose(1, 2).contiguous().transpose(1, 2)
        return _ATEN._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, q, k, v, out, lse, 0.0, causal, scale=scale
        )
    if kernel == "flash":
        none = torch.zeros(2, dtype=torch.uint64, device=q.device)  # the state of a dropout that is not there
        return _ATEN._scaled_dot_product_flash_attention_backward(
            gradient, q, k, v, out, lse.contiguous(), None, None, q.shape[-2], k.shape[-2], 0.0, causal, none, none[0],
            scale=scale,
        )  # fmt: skip
    if kernel == "efficient":
        lse = F.pad(lse, (0, -lse.shape[-1] % 32), value=float("inf"))
        none = torch.zeros((), dtype=torch.int64, device=q.device)
        return _ATEN._scaled_dot_product_efficient_attention_backward(
            gradient, q, k, v, None, out, lse, none, none, 0.0, [True, True, True, False], causal, scale=scale
        )[:3]
    dtype = q.dtype
    gradient, q, k, v, out = _wide(gradient, q, k, v, out)
    weights = share_in_sum(masked_scores(q, k, mask, causal, scale), lse.unsqueeze(-1))
    towards = gradient @ v.transpose(-1, -2)
    scores = weights * (towards - (gradient * out).sum(-1, keepdim=True))
    dq, dk, dv = (scores @ k) * scale, (scores.transpose(-1, -2) @ q) * scale, weights.transpose(-1, -2) @ gradient
    return dq.to(dtype), dk.to(dtype), dv.to(dtype)
