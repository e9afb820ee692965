"""Copies that kernels of the CPU make for themselves: oneDNN's convolutions have tensors in a format of their own.

Processors without AVX-512 have no such kernel for the weight's gradient where the input is smaller than the kernel
(2 x 2 under 3 x 3): what the matrix product there holds for each thread is not counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor

_ATEN: Any = torch.ops.aten
FEWEST_ELEMENTS: Final = 20_480
"""Elements of a single sample above which torch hands its convolution to oneDNN; that of several, always."""

_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)


def copies_of_convolution(func: Any, args: Sequence[Any], out: Any) -> Iterator[int]:
    """Yield the bytes that one convolution, or its backward, holds for itself beside its results, one after another."""
    if func is _ATEN.convolution.default:
        x, weight = args[:2]
        if _by_onednn(x, weight):
            yield _reordered(x, x) + _reordered(x, weight)
            yield _reordered(x, out)
    elif func is _ATEN.convolution_backward.default:
        gradient, x, weight = args[:3]
        if _by_onednn(x, weight):
            of_weight = 0 if out[1] is None else out[1].numel()
            sums = of_weight * torch.float32.itemsize if x.element_size() < torch.float32.itemsize else 0
            yield _reordered(x, gradient) + _reordered(x, x) + sums
            yield of_weight * x.element_size()


def _by_onednn(x: Tensor, weight: Tensor) -> bool:
    if not torch.backends.mkldnn.enabled or x.dtype not in _DTYPES or x.ndim < 3:
        return False
    large_kernel = all(size > 3 for size in weight.shape[-2:])
    return large_kernel or x.shape[0] > 1 or x.numel() > FEWEST_ELEMENTS or weight.shape[1] < x.shape[1]


def _reordered(x: Tensor, t: Tensor) -> int:
    """Return the bytes of a copy in oneDNN's format; none of a tensor whose channels come last, if the input's do."""
    last = x.ndim == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)
    return 0 if last and t.is_contiguous(memory_format=torch.channels_last) else t.nbytes
