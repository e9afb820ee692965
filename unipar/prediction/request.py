"""`PredictionRequest`: what is to be predicted: a config in its strategy, its ranks, batch, device and machines."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from unipar.config import BatchSizes, Config
from unipar.prediction.timeline import Term

PlannedDevice = Literal["cpu", "cuda"]
"""Kind of device for which memory is predicted."""


@dataclass(frozen=True)
class PredictionRequest:
    """A step whose memory is to be predicted."""

    config: Config
    """Config in its strategy."""

    ranks: int
    """Number of ranks of the world."""

    sizes: BatchSizes
    device: PlannedDevice
    ranks_per_machine: int | None = None
    """None: it is not known."""

    runtime: tuple[Term, ...] = ()
    """Memory of a process beside the backend's terms."""

    @property
    def uses_gloo(self) -> bool:
        """True if ranks communicate through gloo."""
        return self.device == "cpu" and self.ranks > 1

    def with_micro(self, micro: int) -> PredictionRequest:
        """Return the request with microbatches of another size, and the same total batch."""
        return replace(self, sizes=self.sizes.with_micro(micro))
