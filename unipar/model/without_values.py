"""`create_without_values`: the task's model on fake tensors, which have shapes and take no memory."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils.weak import WeakIdKeyDictionary

from unipar.errors import TaskError
from unipar.utils.procfs import available_memory_bytes
from unipar.utils.text import format_size


def create_without_values(make_model: Callable[[], Any], mode: FakeTensorMode) -> tuple[Any, int]:
    """Return what model() returns, with all its tensors fake, and the bytes of parameters that it took meanwhile.

    A constructor that does not run on fake tensors, as one that reads a file or asks for a number, runs on real ones
    whose parameters become fake as soon as their module has them: at most one of them takes memory. One that needs its
    parameters' values too is run as it is, in up to half of the memory that is left here.
    """
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng([]))
        stack.enter_context(_library_code_on_fakes(mode))
        try:
            with mode:
                return make_model(), 0
        except Exception as e:
            on_fakes = e
        try:
            with _replaced_when_registered(lambda p: _fake_parameter(p, mode)), torch.device("cpu"):
                return _all_fake(make_model(), mode), 0
        except Exception:  # an error that is not caused by this is raised again with values
            pass
        taken = _MemoryTaken(on_fakes)
        with _replaced_when_registered(taken.count), torch.device("cpu"):
            made = make_model()
        return _all_fake(made, mode), taken.size


class _MemoryTaken:
    """Sum of the sizes of parameters, which is limited."""

    def __init__(self, error: Exception) -> None:
        """Take the error because of which values are needed."""
        self.size, self._error, self._limit = 0, error, available_memory_bytes() // 2

    def count(self, p: nn.Parameter) -> nn.Parameter:
        """Return a parameter as it is; raise TaskError if more than the limit is taken."""
        self.size += p.nbytes
        if self.size > self._limit:
            first = next(iter(str(self._error).strip().splitlines()), "")
            raise TaskError(
                f"plan: model() cannot be created without values ({type(self._error).__name__}: {first[:160]}), and "
                f"with values it takes more than {format_size(self._limit)}, half of the memory that is left here: let "
                "it choose by shapes, or plan on a machine with more memory"
            )
        return p


@contextmanager
def _library_code_on_fakes(mode: FakeTensorMode) -> Generator[None]:
    """Context manager: code of torch runs on fake tensors that asks them for values, or exchanges them.

    `trunc_normal_` draws until all numbers are within its bounds. `Module.to` exchanges a fake parameter with the
    converted one, which torch refuses as long as the mode remembers either.
    """
    initialize: Any = nn.init._no_grad_trunc_normal_  # pyright: ignore[reportPrivateUsage]
    swap: Any = torch.utils.swap_tensors

    def initialize_fake(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return tensor if isinstance(tensor, FakeTensor) else initialize(tensor, *args, **kwargs)

    def swap_fakes(t1: Tensor, t2: Tensor) -> None:
        mode.fake_tensor_converter.tensor_memo.clear()
        swap(t1, t2)

    nn.init._no_grad_trunc_normal_ = initialize_fake  # pyright: ignore[reportPrivateUsage]
    torch.utils.swap_tensors = swap_fakes
    try:
        yield
    finally:
        nn.init._no_grad_trunc_normal_ = initialize  # pyright: ignore[reportPrivateUsage]
        torch.utils.swap_tensors = swap


@contextmanager
def _replaced_when_registered(change: Callable[[nn.Parameter], nn.Parameter]) -> Generator[None]:
    """Context manager: modules get `change` of each parameter with values; one of several modules stays one."""
    register = nn.Module.register_parameter
    known = WeakIdKeyDictionary()

    def register_changed(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and param.device.type != "meta" and not isinstance(param, FakeTensor):
            if param not in known:
                known[param] = change(param)
            param = known[param]
        register(self, name, param)

    nn.Module.register_parameter = register_changed
    try:
        yield
    finally:
        nn.Module.register_parameter = register


def _fake_parameter(p: nn.Parameter, mode: FakeTensorMode) -> nn.Parameter:
    """Return a fake parameter with the marks that groups() may look at."""
    with mode:
        fake = nn.Parameter(torch.empty(p.shape, dtype=p.dtype), p.requires_grad)
    vars(fake).update(vars(p))
    return fake


def _all_fake(made: Any, mode: FakeTensorMode) -> Any:
    """Return a model or its parts with fake parameters and buffers, in place."""
    known: dict[int, Any] = {}
    keep: list[Any] = []  # references, so that Python gives no id to a second object
    parts: list[Any] = list(made.values()) if isinstance(made, dict) else [made]
    for module in (m for part in parts if isinstance(part, nn.Module) for m in part.modules()):
        tensors: dict[str, Any] = vars(module)
        for of in (tensors["_parameters"], tensors["_buffers"]):
            for name, x in of.items():
                if isinstance(x, Tensor) and not isinstance(x, FakeTensor):
                    if id(x) not in known:
                        keep.append(x)
                        known[id(x)] = _fake_of(x, mode)
                    of[name] = known[id(x)]
    return made


def _fake_of(x: Tensor, mode: FakeTensorMode) -> Tensor:
    if isinstance(x, nn.Parameter):
        return _fake_parameter(x, mode)
    with mode:
        return torch.empty(x.shape, dtype=x.dtype)


class NeedsValuesError(TaskError):
    """An operation needs values that fake tensors do not have."""


@contextmanager
def explain_values(what: str) -> Generator[None]:
    """Context manager: turn an error of fake tensors, which have no values, into a TaskError with the operation."""
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException) as e:
        raise NeedsValuesError(
            f"plan: {what} needs the values of a tensor ({e.func}), and a plan computes without values: keep such "
            "numbers in Python, or choose by shapes"
        ) from e
