"""What a rank's memory comes to on CUDA: measured there; elsewhere a prediction, and its assumptions."""

from __future__ import annotations

from dataclasses import dataclass

from unipar.memory.account import MemoryAccount

MIB = 2**20
CUDA_CONTEXT_BYTES = 500 * MIB
"""Of one process: CUDA's context and the kernels that torch loads. Assumed."""

NCCL_BYTES = 200 * MIB
"""Of one process in a group of several: NCCL's channels and buffers. Assumed."""

BLOCK_ROUNDING_BYTES, SEGMENT_ROUNDING_BYTES = 512, 2 * MIB
"""torch rounds each block up to the one, and asks CUDA for multiples of the other."""

CUDA_ASSUMPTIONS = (
    f"CUDA's context and torch's kernels take {CUDA_CONTEXT_BYTES // MIB} MiB in each process",
    f"NCCL takes {NCCL_BYTES // MIB} MiB in each process of a world of several, nothing in a world of one",
    f"each of the largest blocks is rounded up to {BLOCK_ROUNDING_BYTES} bytes, and the whole to {SEGMENT_ROUNDING_BYTES // MIB} MiB; "
    "gaps between blocks are not foreseen",
    "tensors are as large there as here; what kernels use as scratch is left out",
)
"""For the page: none of it was measured."""


@dataclass(frozen=True)
class PredictedCudaMemory:
    """The parts of a prediction, in bytes."""

    allocated: int
    """On CUDA what torch's allocator had of the device, gaps and rounding included."""

    context: int
    nccl: int
    rounding: int

    @property
    def total(self) -> int:
        return self.allocated + self.context + self.nccl + self.rounding


@dataclass(frozen=True)
class MeasuredCudaMemory:
    """The parts of what the driver counts, in bytes."""

    reserved: int
    """The most that torch's allocator had of the device."""

    beside: int
    """What the driver counts for the process beside that: CUDA's context, NCCL, Horovod."""

    @property
    def total(self) -> int:
        return self.reserved + self.beside


def total_on_cuda(account: MemoryAccount, ranks: int) -> PredictedCudaMemory | MeasuredCudaMemory:
    """Of one rank on CUDA, in a world of so many: measured where it ran there and the driver told, else predicted."""
    if account.on is None:
        return predict_on_cuda(account, ranks)
    reserved = account.reserved or account.on.reserved
    if account.on.beside is None:
        return PredictedCudaMemory(reserved, CUDA_CONTEXT_BYTES, NCCL_BYTES if ranks > 1 else 0, 0)
    return MeasuredCudaMemory(reserved, account.on.beside)


def predict_on_cuda(account: MemoryAccount, ranks: int) -> PredictedCudaMemory:
    """Of one rank at its peak, in a world of so many."""
    peak = account.peak
    blocks = sum(-block.size % BLOCK_ROUNDING_BYTES for block in peak.largest)
    return PredictedCudaMemory(
        peak.peak,
        CUDA_CONTEXT_BYTES,
        NCCL_BYTES if ranks > 1 else 0,
        blocks + -(peak.peak + blocks) % SEGMENT_ROUNDING_BYTES,
    )
