"""`Task`: model, data and loss to be trained; and a task made of functions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any, ClassVar, final

from typing_extensions import override

from unipar.errors import TaskError
from unipar.task.harmless_warnings import silence_harmless_warnings

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from unipar.task.run import Run

silence_harmless_warnings()  # here, as every process imports this before the code of a task

TASK_FUNCTIONS = ("model", "loss", "data", "weight", "collate", "validation", "metrics", "groups", "length")
"""Names of functions that `launch` takes instead of a task; the first three are required."""

LOSS_ACROSS = ("features", "loss_across")
"""Methods that a task may have in the place of `loss`, if its loss compares samples of the whole global batch."""


class Task(ABC):
    """Training task in plain PyTorch. A subclass defines `model`, `data` and `loss`; all other methods are optional.

    Arguments of its constructor are `task.args` of the config. Each rank creates its own instance.

    Examples:
        >>> class Line(unipar.Task):
        ...     def model(self):
        ...         return torch.nn.Linear(1, 1)
        ...
        ...     def data(self):
        ...         x = torch.linspace(-1, 1, 64).unsqueeze(1)
        ...         return torch.utils.data.TensorDataset(x, 3 * x + 1)
        ...
        ...     def loss(self, model, batch):
        ...         x, y = batch
        ...         return torch.nn.functional.mse_loss(model(x), y)
        >>> task = Line()
        >>> task.loss(task.model(), task.data()[:4]).ndim
        0
    """

    keep_modes: ClassVar[bool] = False
    """True: modules train in the mode in which model() returns them, those in eval mode too. False: a model that is in
    eval mode, as from_pretrained returns it, is put into training mode; frozen modules inside others stay as they are.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        called = {name for f in vars(cls).values() if isinstance(f, FunctionType) for name in _names_in(f.__code__)}
        own = [name for name in vars(cls) if name not in called]
        if (sentence := describe_misspelt_method(own, {n for n in _METHODS if _is_defined(cls, n)})) is not None:
            raise TaskError(f"{cls.__name__}.{sentence}")

    @abstractmethod
    def model(self) -> nn.Module | dict[str, Any]:
        """Return the whole model, or its parts by name, each trained separately.

        Called on every rank; the values of rank 0 are sent to the others.
        """

    @abstractmethod
    def data(self) -> Any:
        """Return a dataset (map-style or stream), or a DataLoader, whose dataset, collate_fn and workers are used."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the loss. Required unless the task has `features` and `loss_across`.

        Args:
            model: The model, or the part that is trained.
            batch: A microbatch, as `collate` made it, on the device.

        Returns:
            The mean over the batch, a scalar tensor.
        """
        from unipar.task.features import FeatureColumns, check_across_loss

        features = FeatureColumns.of(self.features(model, batch))
        return check_across_loss(self.loss_across(features.nest(features.columns)))

    def features(self, model: nn.Module, batch: Any) -> Any:
        """Return what `loss_across` compares: tensors with one row for each sample, in lists, tuples and dicts.

        Called twice in a step for each microbatch: without gradients first, then with those of the loss.
        """
        raise TaskError("the task has neither loss(model, batch) nor features(model, batch) with loss_across(features)")

    def loss_across(self, features: Any) -> Tensor:
        """Return the loss of a whole global batch, a scalar tensor, from the features of all its samples in order.

        It has no parameters of its own: a trained temperature belongs to the features.
        """
        raise TaskError("the task has features(model, batch) and no loss_across(features): add it")

    def weight(self, batch: Any) -> float | Tensor | None:
        """Return the number of items that the loss is a mean over, such as tokens that are not padding.

        Args:
            batch: A microbatch, as `collate` made it.

        Returns:
            The number; None: that of samples.
        """
        return None

    def collate(self, samples: list[Any]) -> Any:
        """Return a batch made of samples.

        Args:
            samples: Entries of the dataset that `data` returned.

        Returns:
            The batch; by default that of PyTorch's `default_collate`.
        """
        from torch.utils.data import default_collate

        return default_collate(samples)

    def length(self, sample: Any) -> int:
        """Return the number of tokens of a sample, as data() gives it; needed under `batch.tokens`.

        The loss is then the mean over tokens, and the weight of a microbatch is their number, unless `weight` says
        another.
        """
        raise TaskError("the task has no length(sample), which says how many tokens a sample has")

    def validation(self) -> Any:
        """Return the dataset or stream that `evaluate` reads, or None."""
        return None

    def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
        """Return the metrics of a batch of validation data; by default the loss.

        A loss across the batch is computed from all validation samples at once.

        Args:
            model: The model in evaluation mode.
            batch: A batch, as `collate` made it.

        Returns:
            Values by name: a mean over the batch, or (mean, weight), which unipar averages over batches and ranks;
            for other metrics `unipar.gathered(...)` or a Metric of torchmetrics.
        """
        if not self.defines("loss_across"):
            return {"loss": self.loss(model, batch)}
        from unipar.task.features import FeatureColumns
        from unipar.task.gathered import gathered

        features = FeatureColumns.of(self.features(model, batch))
        return {"loss": gathered(*features.columns, score=lambda *rows: self.loss_across(features.nest(rows)))}

    def groups(self, model: nn.Module) -> Iterable[Mapping[str, Any]] | None:
        """Return the groups of the optimizer.

        Args:
            model: The model.

        Returns:
            Groups in PyTorch's form, with every trained parameter; None: those of `train.optimizer`.
        """
        return None

    def optimizer(self, groups: Sequence[dict[str, Any]]) -> Optimizer | None:
        """Return your own optimizer.

        Args:
            groups: Groups with parameters, rate and decay.

        Returns:
            An optimizer over these groups; None: that of `train.optimizer`.
        """
        return None

    def schedule(self, step: int, steps: int) -> float:
        """Return the factor of the learning rate, in place of `train.schedule`.

        Args:
            step: The optimizer step, from 0.
            steps: Number of steps of the run.

        Returns:
            The factor, which may depend on these two numbers only.
        """
        return 1.0

    def blocks(self, model: nn.Module) -> Sequence[str] | None:
        """Return the names of the repeated blocks; None to let unipar find them."""
        return None

    def tensor(self, model: nn.Module) -> Mapping[str, str] | None:
        """Return how `parallel.tensor` splits matrices, by pattern of their names: column, row or whole.

        Matrices that no pattern names are split as unipar finds by trying a block; None: all of them.
        """
        return None

    def experts(self, model: nn.Module) -> Sequence[str] | None:
        """Return the layers that `parallel.expert` splits, by their names in the model.

        Each is a module with stacked parameters, called with rows, numbers of experts and their weights, or a list of
        equal modules; None: unipar finds them by trying.
        """
        return None

    def cuts(self, stages: int) -> Sequence[str] | None:
        """Return the blocks with which the second and each further stage of a pipeline begins; None: balanced."""
        return None

    def prepare(self) -> None:  # noqa: B027 - a neutral hook
        """Prepare a machine, for example by downloads: called once on each, before anything else."""

    def state(self) -> Any:
        """Return what checkpoints hold of the task's own: JSON values and tensors, in lists and mappings; rank 0's."""
        return None

    def load_state(self, state: Any) -> None:
        """Take over what `state` returned in the run that goes on here; tuples have become lists.

        Not called if nothing was saved.
        """
        if state is not None:
            raise TaskError("the checkpoint holds a state() of the task, and this task has no load_state(state)")

    def train(self, run: Run) -> None:
        """Run the training loop; override it to write your own.

        Args:
            run: This rank of the run.
        """
        if len(run.parts) > 1:
            raise TaskError(
                f"model() returned several parts ({', '.join(run.parts)}) and the task has no train(run): write one, "
                "which calls run.step(local_batch, part=..., loss=...) for each part to be trained"
            )
        for local_batch in run.batches():
            run.step(local_batch)

    def defines(self, name: str) -> bool:
        """Return whether the task defines an optional method itself."""
        return _is_defined(type(self), name)


_METHODS = frozenset(name for name in vars(Task) if not name.startswith("_"))
"""Names of a task's methods and settings."""


def describe_misspelt_method(own: Iterable[str], defined: Collection[str]) -> str | None:
    """Return a sentence on a name of a task's class that is nearly that of a method of Task, or None.

    `own`: names that the class defines and does not use itself, as it uses its helpers. `defined`: methods of Task that
    it defines.
    """
    for name in own:
        near = () if name.startswith("_") or name in _METHODS else get_close_matches(name, _METHODS, 1, 0.75)
        if near and near[0] not in defined:
            return f"{name} is never called; did you mean {near[0]}? Call a helper of your own _{name}"
    return None


def _is_defined(task: type[Task], name: str) -> bool:
    return getattr(task, name) is not getattr(Task, name)


def _names_in(code: CodeType) -> Iterator[str]:
    """Yield the names of attributes and globals that a function uses, those of functions inside it too."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names_in(inner)


@final
class FunctionTask(Task):
    """Task made of functions, as `launch(config, model=, loss=, data=)` trains it."""

    def __init__(self, functions: Mapping[str, Callable[..., Any]]) -> None:
        self.functions = functions

    @override
    def model(self) -> nn.Module | dict[str, Any]:
        return self.functions["model"]()

    @override
    def data(self) -> Any:
        return self.functions["data"]()

    @override
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return self.functions["loss"](model, batch)

    @override
    def weight(self, batch: Any) -> float | Tensor | None:
        return self.functions["weight"](batch) if "weight" in self.functions else None

    @override
    def collate(self, samples: list[Any]) -> Any:
        return self.functions["collate"](samples) if "collate" in self.functions else super().collate(samples)

    @override
    def validation(self) -> Any:
        return self.functions["validation"]() if "validation" in self.functions else None

    @override
    def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
        if "metrics" in self.functions:
            return self.functions["metrics"](model, batch)
        return super().metrics(model, batch)

    @override
    def length(self, sample: Any) -> int:
        return self.functions["length"](sample) if "length" in self.functions else super().length(sample)

    @override
    def groups(self, model: nn.Module) -> Iterable[Mapping[str, Any]] | None:
        return self.functions["groups"](model) if "groups" in self.functions else None

    @override
    def defines(self, name: str) -> bool:
        return name in self.functions
