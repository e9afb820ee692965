"""What a loop is given and what it gives: a share of the data, the outcome of a step, a place in the data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

from unipar.backend import Micro


@final
@dataclass(frozen=True, slots=True)
class Share:
    """This rank's microbatches of one optimizer step; `share[0]` is what collate made."""

    micros: Sequence[Micro]
    samples: int
    """In the global batch."""

    def __getitem__(self, i: int) -> Any:
        return self.micros[i].batch

    def __len__(self) -> int:
        return len(self.micros)


@final
@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step gave: its number from 1, and the global batch's loss on the steps that log."""

    step: int
    loss: float | None


@final
@dataclass(frozen=True)
class Position:
    """Where in the data a run stands: the next step's."""

    step: int
    epoch: int
    batch: int
