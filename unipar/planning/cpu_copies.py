"""Memory that is exact on the CPU alone: copies by oneDNN and gloo, gloo's scratch memory, and what gloo frees late.

A plan for CUDA leaves all of it out. What gloo copies of the tensors that a library sends is among that library's terms
(`staged`), because it ends with them.

oneDNN's convolutions have tensors in a format of their own. Processors without AVX-512 have no such kernel for the
weight's gradient where the input is smaller than the kernel (2 x 2 under 3 x 3): what the matrix product there holds
for each thread is not counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from unipar.memory.recording.bytes_sent_recorder import bytes_of_call, collective_of
from unipar.planning.activations import Activations, CopyOnCPU
from unipar.planning.peaks import PlannedMemory
from unipar.prediction.timeline import CommVolume, Prediction

MOST_GLOO_SCRATCH: Final = 2 * 2**20
"""Most bytes that gloo allocates for one sum, beside copies: two segments of at most 1 MiB."""

LATE_MOMENTS: Final = 16
"""Moments of a step, of which each module has about two, after which gloo has freed what it sent."""

_COPIED_BY_GLOO: Final = ("all_gather", "reduce_scatter")
"""Collectives whose tensors gloo copies."""

_ATEN: Any = torch.ops.aten
FEWEST_ELEMENTS: Final = 20_480
"""Elements of a single sample above which torch hands its convolution to oneDNN; that of several, always."""

_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)


class CopyInOperation(NamedTuple):
    """A copy that is there while an operation runs."""

    size: int
    name: str
    made_by: CopyOnCPU


def copies_in_operation(func: Any, args: Sequence[Any], out: Any) -> Iterator[CopyInOperation]:
    """Yield the copies that one operation of torch makes, one after another."""
    for size in copies_of_convolution(func, args, out):
        yield CopyInOperation(size, f"{func.__name__}, copied by oneDNN", "oneDNN")
    if (kind := collective_of(func._schema.name)) in _COPIED_BY_GLOO:
        yield CopyInOperation(bytes_of_call(args, out), f"{kind}, copied by gloo", "gloo")


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


def needed_with_gloo(memory: PlannedMemory) -> int:
    """Return the bytes in which a step fits though gloo frees late what it has sent.

    A thread of gloo lets go of it after the training goes on, when the next tensors may be there; and it has scratch
    memory. At each moment one such copy is counted, the largest of those that were freed shortly before.
    """
    late = np.zeros_like(memory.totals)
    for term in memory.terms:
        if term.category == "communication" and term.until is not None:
            after = np.arange(term.until, term.until + LATE_MOMENTS) % len(late)  # also in the next step
            late[after] = np.maximum(late[after], term.size)
    largest = _largest_copy_of_gloo(memory.activations, memory.micro)
    return memory.highest(late + largest + _gloo_scratch(memory.prediction.sent))


def late_bytes(prediction: Prediction, activations: Activations, micro: int) -> int:
    """Return the bytes that gloo frees late, at most, whenever that is."""
    sent = [t.size for t in prediction.terms if t.category == "communication" and t.until is not None]
    return max(*sent, _largest_copy_of_gloo(activations, micro), 0) + _gloo_scratch(prediction.sent)


def _largest_copy_of_gloo(activations: Activations, micro: int) -> int:
    return max((block.size(micro) for block in activations.blocks if block.copied_by == "gloo"), default=0)


def _gloo_scratch(sent: Sequence[CommVolume]) -> int:
    """Return the scratch memory of the largest sum: two of the segments into which gloo cuts it, two for each rank."""
    return min(max((p.size // p.ranks for p in sent), default=0), MOST_GLOO_SCRATCH)
