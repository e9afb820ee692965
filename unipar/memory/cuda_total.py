"""What a rank's memory comes to on CUDA: measured there; elsewhere a prediction, and its assumptions."""

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
    """On CUDA what torch's allocator had of the device, gaps and rounding included."""

    context: int
    nccl: int
    rounding: int

    @property
    def total(self) -> int:
        return self.allocated + self.context + self.nccl + self.rounding


@dataclass(frozen=True)
class Measured:
    """The parts of what the driver counts, in bytes."""

    reserved: int
    """The most that torch's allocator had of the device."""

    beside: int
    """What the driver counts for the process beside that: CUDA's context, NCCL, Horovod."""

    @property
    def total(self) -> int:
        return self.reserved + self.beside


def there(account: Account, ranks: int) -> Predicted | Measured:
    """Of one rank on CUDA, in a world of so many: measured where it ran there and the driver told, else predicted."""
    if account.on is None:
        return predicted(account, ranks)
    reserved = account.reserved or account.on.reserved
    if account.on.beside is None:
        return Predicted(reserved, CONTEXT, NCCL if ranks > 1 else 0, 0)
    return Measured(reserved, account.on.beside)


def predicted(account: Account, ranks: int) -> Predicted:
    """Of one rank at its peak, in a world of so many."""
    peak = account.peak
    blocks = sum(-block.size % BLOCK for block in peak.largest)
    return Predicted(peak.peak, CONTEXT, NCCL if ranks > 1 else 0, blocks + -(peak.peak + blocks) % SEGMENT)
