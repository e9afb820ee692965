"""`Task`; a task made of functions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

from typing_extensions import override

from unipar.errors import TaskError

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from unipar.task.run import Run


TASK_FUNCTIONS = ("model", "loss", "data", "weight", "collate", "validation", "metrics", "groups")
"""What the functional form of `launch` takes; the first three are needed."""


class Task(ABC):
    """What is trained: the model, its data and its loss, in plain PyTorch."""

    @abstractmethod
    def model(self) -> nn.Module | dict[str, Any]:
        """The whole model, or its parts by name, each trained by itself.

        Called on every rank; one of them fills it, the others receive its values.
        """

    @abstractmethod
    def data(self) -> Any:
        """A dataset, by index or as a stream, or a DataLoader whose dataset, collate_fn and workers are taken."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The mean over the batch, a scalar; calls the model as it likes."""

    def weight(self, batch: Any) -> float | Tensor | None:
        """What the loss is a mean over, counted in this batch; None: its samples."""
        return None

    def collate(self, samples: list[Any]) -> Any:
        """Samples into a batch."""
        from torch.utils.data import default_collate

        return default_collate(samples)

    def validation(self) -> Any:
        """The dataset or stream that `evaluate` reads, or None."""
        return None

    def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
        """Named means over the batch, or (mean, weight); unipar adds them up over batches and ranks."""
        return {"loss": self.loss(model, batch)}

    def groups(self, model: nn.Module) -> Iterable[Mapping[str, Any]] | None:
        """The optimizer's groups, as PyTorch takes them; None: as `train.optimizer` says."""
        return None

    def optimizer(self, groups: Sequence[dict[str, Any]]) -> Optimizer | None:
        """An optimizer of your own over these groups: parameters, rate, decay. None: as `train.optimizer` says."""
        return None

    def blocks(self, model: nn.Module) -> Sequence[str] | None:
        """Names of the repeated blocks; None: found by themselves."""
        return None

    def prepare(self) -> None:  # noqa: B027 - a neutral hook
        """Called once on each machine before anything else: downloads belong here."""

    def train(self, run: Run) -> None:
        """The loop. Replace it to write your own."""
        if len(run.parts) > 1:
            raise TaskError(
                f"model() returned several parts ({', '.join(run.parts)}) and the task has no train(run): write one, "
                "which says by run.step(share, part=..., loss=...) which part is trained when"
            )
        for share in run.batches():
            run.step(share)

    def defines(self, name: str) -> bool:
        """Whether the task defines an optional method itself."""
        return getattr(type(self), name) is not getattr(Task, name)


@final
class FunctionTask(Task):
    """A task made of functions: what `launch(config, model=, loss=, data=)` trains."""

    def __init__(self, functions: Mapping[str, Callable[..., Any]]) -> None:
        self._functions = functions

    @override
    def model(self) -> nn.Module | dict[str, Any]:
        return self._functions["model"]()

    @override
    def data(self) -> Any:
        return self._functions["data"]()

    @override
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return self._functions["loss"](model, batch)

    @override
    def weight(self, batch: Any) -> float | Tensor | None:
        return self._functions["weight"](batch) if "weight" in self._functions else None

    @override
    def collate(self, samples: list[Any]) -> Any:
        return self._functions["collate"](samples) if "collate" in self._functions else super().collate(samples)

    @override
    def validation(self) -> Any:
        return self._functions["validation"]() if "validation" in self._functions else None

    @override
    def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
        if "metrics" in self._functions:
            return self._functions["metrics"](model, batch)
        return super().metrics(model, batch)

    @override
    def groups(self, model: nn.Module) -> Iterable[Mapping[str, Any]] | None:
        return self._functions["groups"](model) if "groups" in self._functions else None

    @override
    def defines(self, name: str) -> bool:
        return name in self._functions
