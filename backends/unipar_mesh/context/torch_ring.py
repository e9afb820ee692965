"""torch's own ring attention over a cut sequence: its templates around the kernels of a GPU, and what they need."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from unipar_mesh.context.kernels import kernel_for

TEMPLATES = "torch.distributed.tensor.experimental._context_parallel._attention"
"""torch's module of the ring: not public, so that it is looked for, and a torch without it is told."""

_ATEN: Any = torch.ops.aten
_SEQUENCE = 2
"""Dimension of positions in queries, keys and values; torch's rings have the same number written in."""


@dataclass(frozen=True)
class RingKernel:
    """Operators of a kernel, with the names under which torch's templates hand them their tensors."""

    forward: Callable[..., Any]
    backward: Callable[..., Any]
    gradient: str = "grad_out"
    """Name of the backward's argument for the gradient of the result."""

    forward_arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Further arguments of the forward."""

    saved_names: Sequence[str] = ()
    """Names in the backward of what the forward returns behind result and log-sum-exp."""

    backward_arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Further arguments of the backward."""


RING_KERNELS: dict[str, RingKernel] = {
    "flash": RingKernel(
        _ATEN._scaled_dot_product_flash_attention.default,
        _ATEN._scaled_dot_product_flash_attention_backward.default,
        saved_names=("cum_seq_q", "cum_seq_k", "max_q", "max_k", "philox_seed", "philox_offset"),
    ),
    "efficient": RingKernel(
        _ATEN._scaled_dot_product_efficient_attention.default,
        _ATEN._scaled_dot_product_efficient_attention_backward.default,
        gradient="grad_out_",
        forward_arguments={"attn_bias": None, "compute_log_sumexp": True},
        saved_names=("philox_seed", "philox_offset"),
        backward_arguments={"attn_bias": None, "grad_input_mask": (True, True, True, False)},
    ),
}
"""Kernels of a GPU, by what `kernel_for` calls them."""


def why_no_torch_ring(
    q: Tensor, k: Tensor, v: Tensor, *, length: int, ranks: int, causal: bool, masked: bool, dropout: float
) -> str:
    """Return why torch's ring cannot do this attention, in words, or "" if it can; all ranks say the same.

    `q`, `k`, `v`: this rank's part of a sequence of `length`, in the dtype in which attention is computed.
    """
    if missing := why_no_templates():
        return missing
    if masked:
        return "there is a mask, and torch's ring takes is_causal alone"
    if dropout:
        return f"there is dropout ({dropout:g}), which torch's ring would draw for each part by itself"
    rows, rest = divmod(length, 2 * ranks if causal else ranks)  # causal: what a call has at least is half a part
    if rest:
        by = f"2 x {ranks}" if causal else f"{ranks}"
        return f"torch's ring needs equal parts, and {by} does not divide the sequence of {length}"
    kernel = kernel_for(q, k, v)
    if kernel not in RING_KERNELS:
        words = f"{str(q.dtype).removeprefix('torch.')} and heads of width {q.shape[-1]}"
        return f"no kernel that gives its log-sum-exp takes {words} on this device ({q.device.type})"
    if kernel == "efficient" and rows % 32:
        return (
            f"the kernel for {str(q.dtype).removeprefix('torch.')} pads its log-sum-exp to multiples of 32 rows, and "
            f"torch's ring merges {rows}"
        )
    return ""


def why_no_templates() -> str:
    """Return why torch's templates cannot be called, in words, or "" if they can."""
    try:
        module = importlib.import_module(TEMPLATES)
    except ImportError:
        return f"torch {torch.__version__} has no {TEMPLATES}"
    names = ("_templated_ring_attention", "_templated_ring_attention_backward", "_cp_options")
    absent = [name for name in names if not hasattr(module, name)]
    return f"torch {torch.__version__} has no {absent[0]} in {TEMPLATES}" if absent else ""


def attend_in_torch_ring(
    q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup, *, causal: bool, scale: float
) -> Tensor:
    """Return the attention of this rank's queries to the whole sequence, whose parts lie as torch's head-tail order."""
    kernel = kernel_for(q, k, v)
    q = q if q.stride(-1) == 1 else q.contiguous()  # as kernels read rows; torch's ring sees to keys and values itself
    if kernel != "flash" and k.shape[1] != q.shape[1]:  # flash knows heads that share keys, the others do not
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    return _Ring.apply(q, k, v, RING_KERNELS[kernel], group, causal, scale)  # pyright: ignore[reportReturnType]


@contextmanager
def _ring_settings(causal: bool, dtype: torch.dtype) -> Generator[Any]:
    """Set torch's options, which hold for the whole process, for one call of its templates; yield their module.

    Its load balance means that each rank has parts r and 2C-1-r, as ours have; it is defined for causal attention
    alone, and all others compute every pair. Sums are fp32, but not those of fp64.
    """
    module: Any = importlib.import_module(TEMPLATES)
    options = module._cp_options
    before = options.enable_load_balance, options.convert_to_f32
    options.enable_load_balance, options.convert_to_f32 = causal, dtype is not torch.float64
    try:
        yield module
    finally:
        options.enable_load_balance, options.convert_to_f32 = before


class _Ring(torch.autograd.Function):
    """torch's ring forward and backward, which it calls by DTensor's dispatch, on plain tensors and a group."""

    @staticmethod
    @override
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, kernel: RingKernel, group: dist.ProcessGroup, causal: bool,
        scale: float,
    ) -> Tensor:  # fmt: skip
        with _ring_settings(causal, q.dtype) as templates:
            out, lse, *rest = templates._templated_ring_attention(
                group, _SEQUENCE, kernel.forward, query=q, key=k, value=v, is_causal=causal, dropout_p=0.0, scale=scale,
                **kernel.forward_arguments,
            )  # fmt: skip
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.kernel, ctx.group, ctx.causal, ctx.scale = kernel, group, causal, scale
        ctx.kept = dict(zip(kernel.saved_names, rest, strict=False))
        return out

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: Any) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        kernel: RingKernel = ctx.kernel
        with _ring_settings(ctx.causal, q.dtype) as templates:
            dq, dk, dv, *_ = templates._templated_ring_attention_backward(
                ctx.group, _SEQUENCE, kernel.backward, grad_out=gradients[0].contiguous(),
                grad_out_name=kernel.gradient, query=q, key=k, value=v, out=out, logsumexp=lse, is_causal=ctx.causal,
                dropout_p=0.0, scale=ctx.scale, **ctx.kept, **kernel.backward_arguments,
            )  # fmt: skip
        return dq, dk, dv, None, None, None, None
