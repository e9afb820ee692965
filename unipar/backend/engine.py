"""`Engine` and what it is given and gives: `Part`, `Micro`, `Step`, `Piece`, `Holding`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from typing_extensions import override

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer


Fn = Callable[["nn.Module", Any], Any]
"""A task's loss or metrics: `fn(model, batch)`."""


Mark = Callable[[str], None]
"""Tells the run which phase an engine is in."""


Category = Literal[
    "parameters",
    "masters",
    "gradients",
    "optimizer",
    "communication",
    "buffers",
    "activations",
    "temporaries",
    "library",
    "runtime",
    "unattributed",
]
"""What memory is for. Engines name the first six; the rest is told by who allocated it and how long it lived."""


@dataclass(frozen=True)
class Micro:
    """One microbatch, and its weight over the global batch's; scale 0 is a real sample that does not count."""

    batch: Any
    scale: float


@dataclass(frozen=True)
class Part:
    """A model to be trained: real on rank 0, on meta elsewhere."""

    name: str
    module: nn.Module
    optimizer: Callable[[nn.Module], Optimizer]
    """Called when the parameters are where they stay."""

    blocks: Sequence[str]
    """Names of the repeated blocks."""


@dataclass(frozen=True, slots=True)
class Step:
    """What one optimizer step gave, still on the device."""

    loss: Tensor
    """This rank's share: the sum over ranks is the loss of the global batch."""

    norm: Tensor
    """Of all gradients, before clipping, equal on all ranks."""

    skipped: bool = False
    """Weights were left alone because of an overflow: fp16 lowers its loss scale; elsewhere it is an error."""


@dataclass(frozen=True)
class Piece:
    """Part of one tensor of the state, held by this rank."""

    name: str
    kind: str
    """weight, buffer, or the optimizer's own key."""

    shape: tuple[int, ...]
    where: tuple[int, int]
    """A range of the whole tensor in row-major order."""

    tensor: Tensor


@dataclass(frozen=True, slots=True)
class Holding:
    """One tensor that an engine keeps, and what for; a storage that several share counts once."""

    category: Category
    name: str
    tensor: Tensor


class Read(Protocol):
    """Gives state back, a range at a time."""

    def __call__(self, name: str, kind: str, where: tuple[int, int]) -> Tensor: ...

    def kinds(self, name: str) -> set[str]:
        """weight and the optimizer's keys that are known for a parameter."""
        ...


class Engine(ABC):
    """One live model in one process. Every method is called by all ranks together."""

    @abstractmethod
    def step(self, fn: Fn, micros: Sequence[Micro], factor: float, mark: Mark) -> Step:
        """Forward and backward over all microbatches, clip, update at each group's rate times `factor`."""

    @abstractmethod
    def evaluate(self, fn: Fn, batch: Any) -> Any:
        """Forward only, through the same wrapper."""

    @abstractmethod
    def call_frozen(self, fn: Fn, given: Any) -> Any:
        """Return `fn(model, given)` inside another part's loss, while this part's parameters take no gradients.

        Gradients flow through it to `given`; each module is in its own mode.
        """

    def before_state_access(self) -> None:  # noqa: B027 - a neutral hook
        """Put parameters where they stay between steps: called before state is read or `requires_grad` changes."""

    @abstractmethod
    def pieces(self) -> Iterator[Piece]:
        """State out: what this rank holds, without a collective."""

    @abstractmethod
    def restore(self, read: Read) -> None:
        """State in: asks for what this rank holds."""

    @abstractmethod
    def holdings(self) -> Iterator[Holding]:
        """All tensors that this rank keeps just now, without a collective and without changing anything.

        Asked where phases meet, too: between forward and backward, backward and update.
        """

    def learning_rates(self) -> list[float]:
        """Return each group's rate as the optimizer itself holds it; empty if the library does not tell."""
        return []

    def take_mean(self) -> None:  # noqa: B027 - a neutral hook
        """Ranks that stepped by themselves take the mean of their states: `train.sync_every`."""

    def close(self) -> None:  # noqa: B027 - a neutral hook
        """Release what `build` took."""


class DelegatingEngine(Engine):
    """An engine around another that does all the work: override what shall be different."""

    def __init__(self, inner: Engine) -> None:
        self.inner = inner

    @override
    def step(self, fn: Fn, micros: Sequence[Micro], factor: float, mark: Mark) -> Step:
        return self.inner.step(fn, micros, factor, mark)

    @override
    def evaluate(self, fn: Fn, batch: Any) -> Any:
        return self.inner.evaluate(fn, batch)

    @override
    def call_frozen(self, fn: Fn, given: Any) -> Any:
        return self.inner.call_frozen(fn, given)

    @override
    def before_state_access(self) -> None:
        self.inner.before_state_access()

    @override
    def pieces(self) -> Iterator[Piece]:
        return self.inner.pieces()

    @override
    def restore(self, read: Read) -> None:
        self.inner.restore(read)

    @override
    def holdings(self) -> Iterator[Holding]:
        return self.inner.holdings()

    @override
    def learning_rates(self) -> list[float]:
        return self.inner.learning_rates()

    @override
    def take_mean(self) -> None:
        self.inner.take_mean()

    @override
    def close(self) -> None:
        self.inner.close()
