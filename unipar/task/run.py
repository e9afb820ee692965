"""What a task's loop may do with a run: `Run`, and what it takes and gives (shares, outcomes, positions)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, final

from unipar.backend import Fn, Micro, Piece, Read

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from unipar.data.feed import MicrobatchFeed
    from unipar.data.stream_feed import StreamFeed


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
class StepOutcome:
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


class TrainedModule(Protocol):
    """One part of a run, as its loop sees it."""

    @property
    def name(self) -> str:
        """The part's name in `model()`'s dictionary; "model" where that returned one module."""
        ...

    @property
    def module(self) -> nn.Module:
        """The module itself; where parameters are split, this rank's share of them."""
        ...


class Run(ABC):
    """One rank's side of a run, as a task's own loop uses it."""

    done: int
    """Optimizer steps that are done."""

    rank: int
    """Number of this process, from 0."""

    size: int
    """Number of processes."""

    device: torch.device
    """Where this rank computes."""

    @property
    @abstractmethod
    def steps(self) -> int:
        """Optimizer steps of the whole run."""

    @property
    @abstractmethod
    def parts(self) -> Mapping[str, TrainedModule]:
        """What is trained, by name: one part, or the several that `model()` returned."""

    @property
    @abstractmethod
    def position(self) -> Position:
        """Where in the data the next step is."""

    @property
    @abstractmethod
    def feed(self) -> MicrobatchFeed | StreamFeed:
        """The run's own data, read from the task when first asked for."""

    @abstractmethod
    def batches(self) -> Iterator[Share]:
        """Yield the run's own data, one share an optimizer step; evaluates between steps when that is due."""

    @abstractmethod
    def over(self, loader: Any) -> Iterator[Share]:
        """Yield shares of a loader of the script's own, whose dataset, collate_fn and workers are taken."""

    @abstractmethod
    def step(self, share: Share, part: str | None = None, loss: Fn | None = None) -> StepOutcome:
        """Do one optimizer step (forward, backward, accumulate, clip, update), of one part by a loss of its own."""

    @abstractmethod
    def frozen(self, part: str) -> Callable[[Fn, Any], Any]:
        """Return a call of another part inside a loss: `run.frozen("critic")(fn, x)` is fn(critic, x).

        That part takes no gradients in this step; they flow through it to `x`.
        """

    @abstractmethod
    def evaluate(self) -> dict[str, float]:
        """Return the task's metrics over its validation data, the same on every rank; of several parts, the first's."""

    @abstractmethod
    def log(self, **named: float | Tensor) -> None:
        """Write named values of this rank into its ledger; rank 0's go to the trackers too."""

    @abstractmethod
    def pieces(self) -> Iterator[Piece]:
        """Yield the state of all parts that this rank holds; of several parts, with the part's name in front."""

    @abstractmethod
    def restore(self, read: Read) -> None:
        """Take state in from `read`."""
