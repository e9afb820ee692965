"""`FakeOptimizer`: what the task's optimizer keeps, and what its update needs for a moment, without memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fractions import Fraction
from importlib import import_module
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.optim import Optimizer

from unipar.backend.resources import choose_device
from unipar.config import Config
from unipar.errors import TaskError
from unipar.model.parameter_groups import (
    MakeOptimizer,
    OptimizerFactory,
    ParameterGroup,
    optimizer_class,
    parameter_groups,
)
from unipar.optimizers.block_states import BlockStates, block_tensors, inner_tensors
from unipar.optimizers.chunked_updates import InPieces
from unipar.optimizers.matrix_optimizer import MatrixOptimizer
from unipar.prediction.timeline import UpdatedTensor
from unipar.task import Task
from unipar.training.fake_run.step_recorder import StepRecorder, levels_of

_MOST_ALIKE: Final = 2
"""Tensors of a shape that show what a loop over tensors needs: one, and what is left of the one before."""

_DTYPES: Final = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}


@dataclass(frozen=True)
class FakeOptimizer:
    """A task's optimizer, as it is on tensors without memory."""

    groups: Sequence[ParameterGroup]
    config: Config
    own: MakeOptimizer | None
    mode: FakeTensorMode
    states: Mapping[str, tuple[int | Fraction, ...]]
    """Bytes of its state for an element of each parameter, one number for each of its tensors."""

    tables: Mapping[str, int]
    """Bytes of tables beside them, which do not become smaller with the parameter."""

    group_of: Mapping[str, int]
    """Number of the group of each parameter."""

    fused: bool
    """True if one kernel updates all parameters of the model as it is, without tensors of its own."""

    _known: dict[object, int] = field(default_factory=dict[object, int])

    @classmethod
    def of(cls, task: Task, model: nn.Module, config: Config, mode: FakeTensorMode) -> FakeOptimizer:
        """Return the optimizer of a model on tensors without memory, after a step of it."""
        own = task.optimizer if task.defines("optimizer") else None
        if own is None:
            optimizer_class(config.train.optimizer)  # a module that makes tables when it is imported needs numbers
        groups = parameter_groups(model, config, task_groups=task.groups(model), own_optimizer=own is not None)
        names = {id(p): name for name, p in model.named_parameters()}
        with mode:
            optimizer = OptimizerFactory(groups, config, torch.device(_device_type(config)), own=own)(model)
            if isinstance(optimizer, MatrixOptimizer):
                raise TaskError(
                    f"plan: {type(optimizer).__name__} joins each matrix on one rank for its update, and a plan does "
                    "not know what that takes; measure it with compare"
                )
            trained = [p for group in optimizer.param_groups for p in group["params"]]
            if isinstance(optimizer, BlockStates):
                kept = {names[id(p)]: _sizes_in_blocks(optimizer, p) for p in trained}
            else:
                _step(optimizer)
                kept = {names[id(p)]: (_sizes(p, state), 0) for p, state in optimizer.state.items()}
        group_of = {
            names[id(p)]: number for number, group in enumerate(optimizer.param_groups) for p in group["params"]
        }
        for p in trained:
            p.grad = None
        fused = all(group.get("fused") for group in optimizer.param_groups)
        states = {name: sizes for name, (sizes, _) in kept.items()}
        tables = {name: size for name, (_, size) in kept.items()}
        return cls(groups, config, own, mode, states, tables, group_of, fused)

    def temporaries(self, tensors: Sequence[UpdatedTensor], *, split: bool = False) -> int:
        """Return the bytes that the update of these tensors needs for a moment, by the optimizer's own code.

        `split`: they are parts of parameters that are split over ranks, as in FSDP2.
        """
        if not self._has_temporaries(split=split):
            return 0
        key = tuple(tensors), split
        if key not in self._known:
            few, more = (_fewer_alike(tensors, most) for most in (_MOST_ALIKE, _MOST_ALIKE + 1))
            size = self._run(few, split=split)
            if len(few) < len(tensors) and size != self._run(more, split=split):
                size = self._run(tensors, split=split)  # it has temporaries of all at once
            self._known[key] = size
        return self._known[key]

    def _has_temporaries(self, *, split: bool) -> bool:
        if self.own is not None:
            return not self.fused
        if self.config.train.optimizer.moments_in_bf16:
            return True  # its moments are in fp32 while they are updated
        return not self.config.train.optimizer.arguments(_device_type(self.config), split=split).get("fused")

    def _run(self, tensors: Sequence[UpdatedTensor], *, split: bool) -> int:
        """Return the most bytes that are allocated at once while the optimizer updates these tensors."""
        in_pieces = self.own is None and issubclass(optimizer_class(self.config.train.optimizer), InPieces)
        device = torch.device("cpu" if in_pieces else _device_type(self.config))  # they copy, for which CUDA needs CUDA
        names = [str(number) for number in range(len(tensors))]
        groups = [
            replace(group, names=tuple(name for name, t in zip(names, tensors, strict=True) if t.group == number))
            for number, group in enumerate(self.groups)
        ]
        with self.mode, _several_at_once():
            module = nn.Module()
            for name, t in zip(names, tensors, strict=True):
                empty = torch.empty(t.shape, dtype=_DTYPES[t.element_size], device=device)
                module.register_parameter(name, nn.Parameter(empty))
            filled = tuple(group for group in groups if group.names)
            optimizer = OptimizerFactory(filled, self.config, device, own=self.own)(module, split=split)
            if isinstance(optimizer, InPieces):
                optimizer.piece = optimizer.elements_at_once(_device_type(self.config))
            trained = _step(optimizer)
            states = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
            kept = [t for state in states for t in inner_tensors(state).values() or (state,)]
            gradients = [p.grad for p in trained if p.grad is not None]
            with StepRecorder([*trained, *gradients, *kept]) as recorder:
                optimizer.step()
        return int(levels_of(recorder.blocks, recorder.ticks).max())


def _sizes(p: Tensor, state: Mapping[str, Any]) -> tuple[int | Fraction, ...]:
    """Return the bytes of a parameter's states for each of its elements."""
    sizes: list[int | Fraction] = []
    for key, t in state.items():
        if not isinstance(t, Tensor) or not t.ndim or (t.numel() == 1 and p.numel() != 1):
            continue  # a count of steps
        if t.shape != p.shape:
            raise TaskError(
                f"plan: the optimizer's {key!r} has the shape {tuple(t.shape)} for a parameter of "
                f"{tuple(p.shape)}; a plan knows states that are as large as their parameter"
            )
        sizes.append(t.element_size())
    return tuple(sizes)


def _sizes_in_blocks(optimizer: BlockStates, p: Tensor) -> tuple[tuple[int | Fraction, ...], int]:
    """Return the same of states that may be in blocks, and the bytes of tables."""
    sizes: list[int | Fraction] = []
    tables = 0
    for key in sorted(optimizer.block_keys):
        state = optimizer.new_state(p, key)
        parts = block_tensors(state) or (state,)
        sizes += [Fraction(t.nbytes, max(1, p.numel())) for t in parts]
        inner = inner_tensors(state)
        tables += sum(inner[name].nbytes for name in inner.keys() - {"codes", "scale"})
    return tuple(sizes), tables


def _device_type(config: Config) -> str:
    return "cpu" if choose_device(config)[0] == "cpu" else "cuda"


def _step(optimizer: Optimizer) -> list[nn.Parameter]:
    """Make a step with gradients of all parameters, and return these."""
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    for p in trained:
        p.grad = torch.empty_like(p)
    optimizer.step()
    return trained


def _fewer_alike(tensors: Sequence[UpdatedTensor], most: int) -> Sequence[UpdatedTensor]:
    """Return the tensors without those of which this many equal ones came before."""
    counts = Counter[UpdatedTensor]()
    kept: list[UpdatedTensor] = []
    for t in tensors:
        counts[t] += 1
        if counts[t] <= most:
            kept.append(t)
    return kept


@contextmanager
def _several_at_once() -> Generator[None]:
    """Context manager: optimizers take fake tensors for such as they can update together, as they do real ones."""
    taken: list[Any] = import_module("torch.optim.optimizer")._foreach_supported_types
    taken.append(FakeTensor)
    try:
        yield
    finally:
        taken.remove(FakeTensor)
