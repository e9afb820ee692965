"""The user's side: what is trained. And where that code is, so that other processes find it."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Self, final

from typing_extensions import override

from unipar.config import TaskUse
from unipar.errors import TaskError
from unipar.location import CodeLocation
from unipar.parcel import called, handed, packed, typed

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from unipar.share import Run

FUNCTIONS = ("model", "loss", "data", "weight", "collate", "validation", "metrics", "groups")
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

    def gives(self, name: str) -> bool:
        """Whether the task defines an optional method itself."""
        return getattr(type(self), name) is not getattr(Task, name)


@final
class Functions(Task):
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
    def gives(self, name: str) -> bool:
        return name in self._functions


class Reached(BaseException):
    """A worker that imports the user's file came to the `launch` that started it: nothing after it is its own."""


@dataclass
class _Import:
    earlier: list[str]
    """Run folders of the launches before ours, in their order."""


_import: _Import | None = None


def importing() -> bool:
    """Whether a worker is reading the user's file right now."""
    return _import is not None


def pass_launch() -> str:
    """Called by `launch` and `join` in a file that a worker imports: an earlier run's folder, or Reached."""
    assert _import is not None
    if not _import.earlier:
        raise Reached
    return _import.earlier.pop(0)


@dataclass(frozen=True)
class TaskRef:
    """Where a task's code is; travels as JSON."""

    task: CodeLocation | None = None
    functions: Mapping[str, CodeLocation] = field(default_factory=dict[str, CodeLocation])
    args: Mapping[str, Any] = field(default_factory=dict[str, Any])
    path: Sequence[str] = ()
    """The parent's sys.path."""

    earlier: Sequence[str] = ()
    """Run folders of launches that the same script made before."""

    carried: str = ""
    """Names and a digest of what has no file to be found in."""

    parcel: bytes = field(default=b"", repr=False)
    """That itself: it travels by a pipe, not as JSON."""

    @classmethod
    def of(
        cls,
        task: type[Task] | None,
        use: TaskUse | None,
        functions: Mapping[str, Callable[..., Any]],
        earlier: Sequence[str] = (),
    ) -> Self:
        path, args = tuple(p or str(Path.cwd()) for p in sys.path), use.args if use else {}
        if functions:
            absent = [name for name in FUNCTIONS[:3] if name not in functions]
            if task is not None or absent:
                way = "a task and functions were both given" if task is not None else f"{absent[0]}= is missing"
                raise TaskError(f"{way}: give a task, or model=, loss= and data=")
            if any(typed(f) for f in functions.values()):
                names = ", ".join(f"{name}={called(f)}" for name, f in functions.items())
                return cls(path=path, earlier=tuple(earlier)).carrying(names, dict(functions))
            found = {name: CodeLocation.of(f) for name, f in functions.items()}
            return cls(functions=found, path=path, earlier=tuple(earlier))
        if task is not None and typed(task):
            _whole(task, called(task))
            return cls(args=args, path=path, earlier=tuple(earlier)).carrying(called(task), task)
        if task is not None:
            return cls(CodeLocation.of(task), args=args, path=path, earlier=tuple(earlier))
        if use is None:
            raise TaskError("there is no task: give the config task.use, or launch a task= or model=, loss= and data=")
        return cls(CodeLocation.used(use.use), args=args, path=path, earlier=tuple(earlier))

    def carrying(self, names: str, thing: Any) -> Self:
        """With something that other processes cannot find by name."""
        parcel = packed(names, thing)
        told = f"{names}: {len(parcel)} bytes, {hashlib.sha256(parcel).hexdigest()[:16]}"
        return replace(self, carried=told, parcel=parcel)

    def to_json(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(replace(self, parcel=b"")).items() if key != "parcel"}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        return cls(
            task=CodeLocation(**data["task"]) if data["task"] else None,
            functions={k: CodeLocation(**v) for k, v in data["functions"].items()},
            args=data["args"],
            path=tuple(data["path"]),
            earlier=tuple(data["earlier"]),
            carried=data["carried"],
        )

    def look(self) -> None:
        """What can be seen without importing: the file is there, the class is in it and whole."""
        from unipar.look import look

        if self.task is not None:
            look(self.task, self.args, self.path)

    def load(self) -> Task:
        """The task itself, in a process of its own: imports the user's code."""
        sys.path[:0] = [p for p in self.path if p not in sys.path]
        if self.carried:
            thing = handed()
            return Functions(thing) if isinstance(thing, dict) else _made(thing, self.args, thing.__name__)
        if self.functions:
            return Functions({name: _fetch(where, self.earlier) for name, where in self.functions.items()})
        assert self.task is not None
        return _made(_fetch(self.task, self.earlier), self.args, self.task.shown)


def _made(found: Any, args: Mapping[str, Any], shown: str) -> Task:
    _whole(found, shown)
    try:
        return found(**args)
    except TypeError as e:
        if e.__traceback__ is not None and e.__traceback__.tb_next is None:  # the call itself, not the constructor
            raise TaskError(f"task.args do not fit {found.__name__}: {e}") from None
        raise


def _whole(found: Any, shown: str) -> None:
    if not (isinstance(found, type) and issubclass(found, Task)):
        raise TaskError(f"{shown} is {found!r}; a class that derives from unipar.Task is wanted")
    unwritten = sorted(getattr(found, "__abstractmethods__", ()))
    if unwritten:
        raise TaskError(f"{shown} lacks {', '.join(f'{m}()' for m in unwritten)}")


def _fetch(where: CodeLocation, earlier: Sequence[str]) -> Any:
    module = _import_module(where.module, earlier) if where.module else _import_file(str(where.file), earlier)
    found: Any = module
    for name in where.name.split("."):
        found = getattr(found, name, None)
        if found is None:
            raise TaskError(f"{where.shown}: there is no {where.name}, or it is defined after the launch that needs it")
    return found


_files: dict[str, ModuleType] = {}


def _import_module(name: str, earlier: Sequence[str]) -> ModuleType:
    """A module of the path, up to its own `launch` if it has one: `python -m package.train` without a guard."""
    if name in sys.modules:
        return sys.modules[name]
    above, _, last = name.rpartition(".")
    package = importlib.import_module(above) if above else None
    spec = importlib.util.find_spec(name)
    if spec is None or spec.loader is None:
        raise TaskError(f"there is no module {name!r} on the path")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        with _upto_launch(earlier):  # an import statement would take back what stands before the launch
            spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    if package is not None:
        setattr(package, last, module)
    return module


@contextmanager
def _upto_launch(earlier: Sequence[str]) -> Generator[None]:
    """The body imports the user's code; what it defined before a launch of its own remains."""
    global _import
    _import = _Import(list(earlier))
    try:
        yield
    except Reached:
        pass
    finally:
        _import = None


def _import_file(file: str, earlier: Sequence[str]) -> ModuleType:
    """The user's file under another name, up to its own `launch`."""
    if file in _files:
        return _files[file]
    name = "unipar_task" if "unipar_task" not in sys.modules else f"unipar_task_{len(_files)}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None or not Path(file).exists():
        raise TaskError(f"the task's file {file} is not there")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    folder = str(Path(file).parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    with _upto_launch(earlier):
        spec.loader.exec_module(module)
    _files[file] = module
    return module
