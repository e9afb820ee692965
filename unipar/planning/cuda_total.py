"""Total memory of a rank on CUDA: measured on a GPU, otherwise predicted under stated assumptions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from unipar.memory.account import MemoryAccount
from unipar.prediction.timeline import Term

MIB = 2**20
CUDA_CONTEXT_BYTES = 500 * MIB
"""Assumed bytes of CUDA's context and of the kernels that torch loads, in each process."""

NCCL_BYTES = 200 * MIB
"""Assumed bytes of NCCL's channels and buffers, in each process of a group of several."""

BLOCK_ROUNDING_BYTES, SEGMENT_ROUNDING_BYTES = 512, 2 * MIB
"""Units of torch's CUDA allocator: a block is a multiple of the first, a request to CUDA of the second."""

CUDA_ASSUMPTIONS = (
    f"CUDA's context and torch's kernels take {CUDA_CONTEXT_BYTES // MIB} MiB in each process",
    f"NCCL takes {NCCL_BYTES // MIB} MiB in each process of a world of several, nothing in a world of one",
    f"each of the largest blocks is rounded up to {BLOCK_ROUNDING_BYTES} bytes, and the whole to "
    f"{SEGMENT_ROUNDING_BYTES // MIB} MiB; gaps between blocks are not predicted",
    "tensors have the same size on CUDA as here; scratch memory of kernels is left out",
)
"""Sentences for the page: assumptions of the prediction, none of them measured."""


def runtime_terms(ranks: int) -> Iterator[Term]:
    """Yield what CUDA and NCCL hold in each process of a world of this many ranks."""
    yield Term("runtime", "CUDA's context and torch's kernels", CUDA_CONTEXT_BYTES)
    if ranks > 1:
        yield Term("runtime", "NCCL's channels and buffers", NCCL_BYTES)


@dataclass(frozen=True)
class PredictedCudaMemory:
    """Predicted memory of a rank on CUDA, by part, in bytes."""

    allocated: int
    """Bytes allocated at the peak; if the run was on CUDA, bytes that torch reserved, gaps and rounding included."""

    context: int
    nccl: int
    rounding: int

    @property
    def total(self) -> int:
        return self.allocated + self.context + self.nccl + self.rounding


@dataclass(frozen=True)
class MeasuredCudaMemory:
    """Measured memory of a rank on CUDA, by part, in bytes."""

    reserved: int
    """Highest number of bytes that torch's allocator reserved."""

    outside_allocator: int
    """Bytes that the driver counts for the process beyond that: CUDA's context, NCCL, Horovod."""

    @property
    def total(self) -> int:
        return self.reserved + self.outside_allocator


def total_on_cuda(account: MemoryAccount, ranks: int) -> PredictedCudaMemory | MeasuredCudaMemory:
    """Return a rank's total on CUDA: measured if the run was there and the driver reported it, otherwise predicted."""
    if account.on is None:
        return predict_on_cuda(account, ranks)
    reserved = account.reserved or account.on.reserved
    if account.on.outside_allocator is None:
        return PredictedCudaMemory(reserved, CUDA_CONTEXT_BYTES, NCCL_BYTES if ranks > 1 else 0, 0)
    return MeasuredCudaMemory(reserved, account.on.outside_allocator)


def predict_on_cuda(account: MemoryAccount, ranks: int) -> PredictedCudaMemory:
    """Predict a rank's total on CUDA at its peak, in a world of `ranks` ranks."""
    peak = account.peak
    blocks = sum(-block.size % BLOCK_ROUNDING_BYTES for block in peak.largest)
    return PredictedCudaMemory(
        peak.peak,
        CUDA_CONTEXT_BYTES,
        NCCL_BYTES if ranks > 1 else 0,
        blocks + -(peak.peak + blocks) % SEGMENT_ROUNDING_BYTES,
    )
