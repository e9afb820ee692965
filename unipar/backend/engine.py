"""`Engine`, and the types that it takes and returns: `Part`, `Micro`, `Step`, `Piece`, `Holding`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple, Protocol, Union

from typing_extensions import override

from unipar.backend.expert_tokens import ExpertTokens
from unipar.errors import TaskError
from unipar.prediction.timeline import Category as Category

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer


Factor = Union[float, "Tensor"]
"""Factor of the learning rate; a tensor on the device if the host does not know how many updates were skipped."""


Fn = Callable[["nn.Module", Any], Any]
"""Loss or metrics of a task: `fn(model, batch)`."""


LossFn = Callable[["nn.Module", Any, int], Any]
"""Loss in a step: `fn(model, batch, number)`, with the microbatch's number."""


Mark = Callable[[str], None]
"""Callback by which an engine reports the phase that begins."""


@dataclass(slots=True)  # not frozen, as Step and the plan: each is made in every step, and freezing triples the time
class Micro:
    """One microbatch, with its weight divided by that of the global batch.

    Scale 0 marks a real sample that does not count: every rank must run the same number of microbatches.
    """

    batch: Any
    scale: float
    number: int = 0
    """Number within the global batch, the same in a world of any size: random numbers of the forward depend on it."""

    def bind(self, fn: LossFn) -> Fn:
        """Return this microbatch's loss as a function of model and batch."""
        number = self.number
        return lambda model, batch: fn(model, batch, number)


@dataclass(frozen=True)
class Part:
    """Model to be trained, or one of several: with values on rank 0, on the meta device elsewhere."""

    name: str
    module: nn.Module
    optimizer: Callable[[nn.Module], Optimizer]
    """Factory of the optimizer, called once the parameters have their final place."""

    blocks: Sequence[str]
    """Names of the repeated blocks."""

    loss: Fn | None = None
    """The task's loss, for an engine that tries the model before the first step."""

    sample: Callable[[], Any] | None = None
    """Function that reads one microbatch for such a trial."""

    samples: Callable[[int], Sequence[Any]] | None = None
    """Function that reads the first microbatches, up to a number."""

    experts: Sequence[str] | None = None
    """Layers of experts: modules with stacked parameters, and lists of equal modules; None: found by trying."""

    tensor: Mapping[str, str] | None = None
    """How matrices are split over `tensor`, by pattern of their names: column, row or whole; None: found by trying."""

    cuts: Sequence[str] | None = None
    """Blocks with which the stages of a pipeline begin, except the first; None: balanced."""


@dataclass(slots=True)
class Step:
    """Result of one optimizer step, still on the device."""

    loss: Tensor
    """This rank's share of the loss: the sum over ranks is the loss of the global batch."""

    norm: Tensor
    """Norm of all gradients before clipping, equal on all ranks."""

    skipped: bool | Tensor = False
    """True if the weights did not change because the norm is not finite; a tensor if the host does not wait for it."""


class Region(NamedTuple):
    """Elements of a tensor in row-major order: `runs` runs of `length` elements, `stride` from one run to the next.

    A range of elements is one run; some columns of a matrix are one run in each row.
    """

    start: int
    length: int
    stride: int = 0
    runs: int = 1

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.length * self.runs

    def of(self, full: Tensor) -> Tensor:
        """Return these elements of a whole, contiguous tensor: a view with one row for each run."""
        flat = full.view(-1)
        steps = (self.stride or self.length, 1)
        return flat.as_strided((self.runs, self.length), steps, flat.storage_offset() + self.start)


KIND_OF_AVERAGES: Final = "average"
"""Kind of the pieces that are moving averages of weights (`train.ema`)."""


@dataclass(frozen=True)
class Piece:
    """Region of one tensor of the state that this rank holds."""

    name: str
    kind: str
    """`weight`, `buffer`, `average`, or the optimizer's own key."""

    shape: tuple[int, ...]
    where: Region
    tensor: Tensor
    """The region's elements, in their order."""


@dataclass(frozen=True, slots=True)
class Holding:
    """One tensor that an engine keeps, and its purpose; a storage that several tensors share counts once."""

    category: Category
    name: str
    tensor: Tensor


class Read(Protocol):
    """Reader of saved state, one region of a tensor at a time."""

    def __call__(self, name: str, kind: str, where: Region) -> Tensor:
        """Return the region's elements, in a tensor of any shape."""
        ...

    def fill(self, out: Tensor, name: str, kind: str, where: Region) -> None:
        """Copy the region's elements into a tensor of as many."""
        out.copy_(self(name, kind, where).view(out.shape))

    def kinds(self, name: str) -> set[str]:
        """Return what is saved for a parameter: `weight` and the optimizer's keys."""
        ...

    def has(self, name: str, kind: str) -> bool:
        """Return whether such a tensor is saved, of any kind, averages too."""
        return kind in self.kinds(name)

    def shape(self, name: str, kind: str) -> tuple[int, ...]:
        """Return the shape of a tensor of the state as a whole."""
        ...


class Engine(ABC):
    """One model in training in one process. All ranks call every method together."""

    traced: ClassVar[Mapping[str, str]] = {}
    """Methods of this class that a trace of a step shows, with their names there (`log.trace`)."""

    @abstractmethod
    def step(self, fn: LossFn, micros: Sequence[Micro], factor: Factor, mark: Mark) -> Step:
        """Run forward and backward over all microbatches, clip, and update at each group's rate times `factor`.

        `factor` is a tensor only after a step whose `Step.skipped` was one.
        """

    @abstractmethod
    def evaluate(self, fn: Fn, batch: Any) -> Any:
        """Return `fn(model, batch)`, computed without gradients through the same wrapper as in training."""

    @abstractmethod
    def call_frozen(self, fn: Fn, inputs: Any) -> Any:
        """Return `fn(model, inputs)` inside another part's loss, while this part's parameters take no gradients.

        Gradients flow through the call to `inputs`; every module keeps its own train or eval mode.
        """

    def forward_only(self, fn: Fn, batch: Any) -> Any:
        """Return `fn(model, batch)` without gradients, with every module in its own mode, and buffers left unchanged.

        Called in a step before `step`, which computes the same again: features of a loss across the batch. Ranks that
        share the samples get one answer, all ranks of a pipeline the last stage's.
        """
        raise TaskError(
            f"loss_across(): {type(self).__name__} cannot run a forward apart from its backward (Engine.forward_only); "
            "use another backend"
        )

    def whole(self) -> AbstractContextManager[nn.Module]:
        """Context manager: the user's model with all its parameters, in evaluation mode and without gradients.

        All ranks enter and leave it together; in between each may call the model as often as it likes.
        """
        raise TaskError(f"run.whole(): {type(self).__name__} cannot gather a model; evaluate by metrics() instead")

    def whole_bytes(self) -> int:
        """Return how many bytes `whole` takes on this rank, besides what it holds."""
        return 0

    def before_state_access(self) -> None:  # noqa: B027 - a neutral hook
        """Move parameters to their place between steps; called before state is read or `requires_grad` changes."""

    @abstractmethod
    def pieces(self) -> Iterator[Piece]:
        """Yield the state that this rank holds, without a collective."""

    def held_weights(self) -> Iterator[Piece]:
        """Yield each region of a weight that this rank computes with, without a collective.

        Unlike `pieces` also those of which other ranks have copies: `train.consistency_check` asks whether the copies
        are equal.
        """
        return (piece for piece in self.pieces() if piece.kind == "weight")

    def full_weights(self) -> Iterator[Piece]:
        """Yield each region of a trained weight that this rank keeps as its optimizer updates it, masters if there are.

        Like `held_weights` without a collective, and with regions of which other ranks have copies. Whoever writes into
        the tensors calls `use_full_weights` then.
        """
        raise TaskError(
            f"train.ema is not available here: {type(self).__name__} does not show the weights that its optimizer "
            "updates (Engine.full_weights); leave train.ema out, or use another backend"
        )

    def use_full_weights(self) -> None:  # noqa: B027 - a neutral hook
        """Compute with the values that were written into the tensors of `full_weights`: cast and send them."""

    def averages_in_place(self) -> AbstractContextManager[None]:
        """Context manager: the model has the moving averages of its weights inside, if there are any (`train.ema`)."""
        return nullcontext()

    def unsaved_values(self) -> Iterator[str]:
        """Yield a sentence for each value of the optimizer's state that `pieces` leaves out."""
        yield from ()

    @abstractmethod
    def restore(self, read: Read) -> None:
        """Load the state that this rank holds from `read`."""

    @abstractmethod
    def share_buffers(self) -> None:
        """Copy buffers, such as running statistics, from one rank to all that have them: they evaluate one model."""

    @abstractmethod
    def holdings(self) -> Iterator[Holding]:
        """Yield all tensors that this rank keeps now, without a collective and without changing anything.

        Called between phases of a step too: after forward, and after backward.
        """

    def learning_rates(self) -> list[float]:
        """Return each group's learning rate as the optimizer used it last; empty if the library does not show it.

        Called at logged steps: a rate that is a tensor on a device is read there.
        """
        return []

    def counters(self) -> dict[str, float]:
        """Return the numbers besides tensors on which the next step depends, such as fp16's loss scale."""
        return {}

    def restore_counters(self, saved: Mapping[str, float]) -> None:  # noqa: B027 - a neutral hook
        """Set the numbers that `counters` returned in another run."""

    def optimizer_groups(self) -> Sequence[dict[str, Any]]:
        """Return the optimizer's groups as it uses them; empty if the library does not show them."""
        return ()

    def seconds_waited(self) -> float | None:
        """Return the seconds, of all steps so far, that the library waited for communication without sleeping.

        None: a thread of this library that waits sleeps, so that the system can tell for how long.
        """
        return None

    def take_expert_tokens(self) -> Mapping[str, ExpertTokens]:
        """Return the tokens of experts in training since the last call, of all ranks, by name of the layer.

        Called at logged steps; the host may wait for the device there. Empty if experts are not on several ranks.
        """
        return {}

    def take_mean(self) -> None:  # noqa: B027 - a neutral hook
        """Replace the state of ranks that trained independently by its mean over ranks: `train.local_steps`."""

    def close(self) -> None:  # noqa: B027 - a neutral hook
        """Release the resources that `Backend.build` took."""


class DelegatingEngine(Engine):
    """Engine that passes every call to another one; override the methods that are to differ."""

    def __init__(self, inner: Engine) -> None:
        self.inner = inner

    @property
    @override
    def traced(self) -> Mapping[str, str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.inner.traced

    @override
    def step(self, fn: LossFn, micros: Sequence[Micro], factor: Factor, mark: Mark) -> Step:
        return self.inner.step(fn, micros, factor, mark)

    @override
    def evaluate(self, fn: Fn, batch: Any) -> Any:
        return self.inner.evaluate(fn, batch)

    @override
    def call_frozen(self, fn: Fn, inputs: Any) -> Any:
        return self.inner.call_frozen(fn, inputs)

    @override
    def forward_only(self, fn: Fn, batch: Any) -> Any:
        return self.inner.forward_only(fn, batch)

    @override
    def whole(self) -> AbstractContextManager[nn.Module]:
        return self.inner.whole()

    @override
    def whole_bytes(self) -> int:
        return self.inner.whole_bytes()

    @override
    def before_state_access(self) -> None:
        self.inner.before_state_access()

    @override
    def pieces(self) -> Iterator[Piece]:
        return self.inner.pieces()

    @override
    def held_weights(self) -> Iterator[Piece]:
        return self.inner.held_weights()

    @override
    def full_weights(self) -> Iterator[Piece]:
        return self.inner.full_weights()

    @override
    def use_full_weights(self) -> None:
        self.inner.use_full_weights()

    @override
    def averages_in_place(self) -> AbstractContextManager[None]:
        return self.inner.averages_in_place()

    @override
    def unsaved_values(self) -> Iterator[str]:
        return self.inner.unsaved_values()

    @override
    def restore(self, read: Read) -> None:
        self.inner.restore(read)

    @override
    def share_buffers(self) -> None:
        self.inner.share_buffers()

    @override
    def holdings(self) -> Iterator[Holding]:
        return self.inner.holdings()

    @override
    def learning_rates(self) -> list[float]:
        return self.inner.learning_rates()

    @override
    def counters(self) -> dict[str, float]:
        return self.inner.counters()

    @override
    def restore_counters(self, saved: Mapping[str, float]) -> None:
        self.inner.restore_counters(saved)

    @override
    def optimizer_groups(self) -> Sequence[dict[str, Any]]:
        return self.inner.optimizer_groups()

    @override
    def seconds_waited(self) -> float | None:
        return self.inner.seconds_waited()

    @override
    def take_expert_tokens(self) -> Mapping[str, ExpertTokens]:
        return self.inner.take_expert_tokens()

    @override
    def take_mean(self) -> None:
        self.inner.take_mean()

    @override
    def close(self) -> None:
        self.inner.close()
