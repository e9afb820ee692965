"""`Run`: what a task's training loop may use of a run, and the types of its arguments and results."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, final

from unipar.backend import Fn, Micro, Piece, Read

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from unipar.data.microbatch_loader import MicrobatchLoader
    from unipar.data.stream_loader import StreamLoader


@final
@dataclass(frozen=True, slots=True)
class LocalBatch:
    """This rank's microbatches of one optimizer step; `local_batch[0]` is the first batch, as collate returned it."""

    micros: Sequence[Micro]
    samples: int
    """Number of samples in the global batch."""

    weight: float | None = None
    """Units of the task's weight in the global batch; None if the task has no weight of its own."""

    def __getitem__(self, i: int) -> Any:
        return self.micros[i].batch

    def __len__(self) -> int:
        return len(self.micros)


@final
@dataclass(slots=True)
class StepOutcome:
    """Result of a step: its number from 1, and the global batch's loss if the step is logged."""

    step: int
    loss: float | None


@final
@dataclass(frozen=True)
class Position:
    """Position of a run in its data: the place of the next step."""

    step: int
    epoch: int
    batch: int


class TrainedModule(Protocol):
    """One part of a run's model, as the training loop sees it."""

    @property
    def name(self) -> str:
        """Name of the part in `model()`'s dictionary; "model" if that returned one module."""
        ...

    @property
    def module(self) -> nn.Module:
        """Module of the part; if parameters are split, with this rank's share of them."""
        ...


class Run(ABC):
    """One rank of a run, as a training loop uses it: `Task.train` receives it, and `join` yields it.

    Examples:
        ```python
        import unipar
        from train import Line

        with unipar.join("train.yaml", task=Line, quiet=True) as run:
            for batch in run.batches():
                outcome = run.step(batch)
                run.log(twice=2 * outcome.loss)
            assert run.done == run.steps
        ```
    """

    done: int
    """Number of optimizer steps that are done."""

    rank: int
    """Number of this process, from 0."""

    size: int
    """Number of processes."""

    device: torch.device
    """Device on which this rank computes."""

    @property
    @abstractmethod
    def steps(self) -> int:
        """Number of optimizer steps of the whole run."""

    @property
    @abstractmethod
    def parts(self) -> Mapping[str, TrainedModule]:
        """Parts that are trained, by name: one, or the several that `model()` returned."""

    @property
    @abstractmethod
    def position(self) -> Position:
        """Place in the data of the next step."""

    @property
    @abstractmethod
    def loader(self) -> MicrobatchLoader | StreamLoader:
        """Source of the run's own data; the task's `data()` is called at the first use."""

    @abstractmethod
    def batches(self) -> Iterator[LocalBatch]:
        """Yield the run's own data, one local batch for each optimizer step; evaluate between steps when due."""

    @abstractmethod
    def over(self, dataloader: Any) -> Iterator[LocalBatch]:
        """Yield local batches of another DataLoader.

        Args:
            dataloader: A DataLoader; its dataset, collate_fn and workers are used.

        Yields:
            The local batch of each step.
        """

    @abstractmethod
    def step(
        self, local_batch: LocalBatch, part: str | None = None, loss: Fn | Sequence[Fn] | None = None
    ) -> StepOutcome:
        """Do one optimizer step: forward, backward, accumulation, clip, update.

        Args:
            local_batch: A batch that `batches` or `over` yielded.
            part: Name of the part to train, if `model()` returned several.
            loss: Function in place of `Task.loss`. Each of several losses has its own forward and backward; the step
                is that of their sum.

        Returns:
            The number of the step, and the loss of the global batch if the step is logged.
        """

    @abstractmethod
    def step_through(
        self,
        local_batch: LocalBatch,
        through: Mapping[str, Callable[[nn.Module, Any, Mapping[str, Any]], Any]],
        *,
        part: str,
        loss: Callable[[nn.Module, Any, Mapping[str, Any]], Any],
    ) -> StepOutcome:
        """Do one optimizer step of several parts on one loss, `loss(model, batch, outputs)` of the part `part`.

        `through` has a function of the same form for each other part, in order, which returns its output: tensors, in
        lists, tuples and dicts; the functions behind it get the outputs of those before by the part's name.
        """

    @abstractmethod
    def frozen(self, part: str) -> Callable[[Fn, Any], Any]:
        """Return a function that calls another part inside a loss: `run.frozen("critic")(fn, x)` is fn(critic, x).

        Args:
            part: Name of the part, whose parameters get no gradients in this step.

        Returns:
            A function of a function and its input; gradients flow through the part to the input.
        """

    @abstractmethod
    def whole(self, part: str | None = None) -> AbstractContextManager[nn.Module]:
        """Context manager: the model, or a part, with all its parameters on every rank, for `generate` and the like.

        The model is in evaluation mode, without gradients. All ranks enter and leave it together, between two steps.

        Args:
            part: Name of the part; None: the model.

        Raises:
            TaskError: It is called inside a step or an evaluation, or the model does not fit.
        """

    @abstractmethod
    def evaluate(self) -> dict[str, float]:
        """Evaluate on the task's validation data. All ranks call it.

        Returns:
            The metrics, equal on every rank; of several parts, those of the first.
        """

    @abstractmethod
    def averaged(self) -> AbstractContextManager[None]:
        """Context manager: all parts have the averages of `train.ema` inside, as in `evaluate`; nothing without it.

        All ranks enter it together, between steps; no step is taken and nothing saved inside.
        """

    @abstractmethod
    def gather(self, tensor: Tensor, of: LocalBatch | Micro | None = None) -> Tensor:
        """Return the rows of a tensor (its first dimension) of all ranks, in the order of the global batch.

        All ranks call it; they may have different numbers of rows. Ranks with the same samples, such as those of
        `parallel.tensor`, count once.

        Args:
            tensor: A tensor with rows of this rank.
            of: The local batch, or its microbatch, from which the rows were computed. Rows of a microbatch with scale
                0, which a rank has only because others have more samples, are left out. None: the current local batch
                if the tensor has a row for each of its samples on every rank; otherwise every row counts, rank by rank.

        Returns:
            The rows of all ranks, on every rank.
        """

    @abstractmethod
    def log(self, **named: Any) -> None:
        """Write named values of this rank into its run log; rank 0's go to the trackers too.

        Args:
            named: Numbers, or images: an array or tensor of height x width x channels, uint8 or floats from 0 to 1, or
                an image of PIL. Images of rank 0 are kept as PNG files in the run folder.
        """

    @property
    @abstractmethod
    def resumed(self) -> bool:
        """Whether the run goes on from a checkpoint; `done` says how many steps another run has done."""

    @abstractmethod
    def save(self) -> None:
        """Save the state now, between two steps; the config's section `checkpoint` says where, and what is kept."""

    @abstractmethod
    def pieces(self) -> Iterator[Piece]:
        """Yield the state that this rank holds; with several parts, names begin with the part's name."""

    @abstractmethod
    def restore(self, read: Read) -> None:
        """Load the state that this rank holds from `read`."""
