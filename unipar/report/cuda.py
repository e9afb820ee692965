"""What a rank's memory would come to on CUDA: a prediction from what was allocated here, and its assumptions."""

from __future__ import annotations

from dataclasses import dataclass

from unipar.memory.account import Account

MIB = 2**20
CONTEXT = 500 * MIB
"""Of one process: CUDA's context and the kernels that torch loads. Assumed."""

NCCL = 200 * MIB
"""Of one process in a group of several: NCCL's channels and buffers. Assumed."""

BLOCK, SEGMENT = 512, 2 * MIB
"""torch rounds each block up to the one, and asks CUDA for multiples of the other."""

ASSUMED = (
    f"CUDA's context and torch's kernels take {CONTEXT // MIB} MiB in each process",
    f"NCCL takes {NCCL // MIB} MiB in each process of a world of several, nothing in a world of one",
    f"each of the largest blocks is rounded up to {BLOCK} bytes, and the whole to {SEGMENT // MIB} MiB; "
    "gaps between blocks are not foreseen",
    "tensors are as large there as here; what kernels use as scratch is left out",
)
"""For the page: none of it was measured."""


@dataclass(frozen=True)
class Predicted:
    """The parts of a prediction, in bytes."""

    allocated: int
    context: int
    nccl: int
    rounding: int

    @property
    def total(self) -> int:
        return self.allocated + self.context + self.nccl + self.rounding


def predicted(account: Account, ranks: int) -> Predicted:
    """Of one rank at its peak, in a world of so many."""
    peak = account.peak
    blocks = sum(-block.size % BLOCK for block in peak.largest)
    return Predicted(peak.peak, CONTEXT, NCCL if ranks > 1 else 0, blocks + -(peak.peak + blocks) % SEGMENT)
