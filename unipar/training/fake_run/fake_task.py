"""`FakeTask`: the config's task with its model on tensors without memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from unipar.backend.precision import parameter_dtype
from unipar.config import BatchSizes, Config
from unipar.data.dataset import training_data_source
from unipar.data.lengths import TokenRows
from unipar.engines.placement import cast_buffers, replace_parameters
from unipar.errors import TaskError
from unipar.model.blocks import find_blocks
from unipar.model.create import cast_if_float, check_parts, narrow_frozen_parameters
from unipar.model.fp8_linears import convert_to_fp8
from unipar.model.modes import enter_training_mode
from unipar.model.state_names import CheckpointBytes
from unipar.model.transforms import apply_transforms
from unipar.model.without_values import create_without_values, explain_values
from unipar.prediction.timeline import PredictedModule, PredictedParameter, StepTimeline
from unipar.task import Task
from unipar.training.fake_run.assumed_values import AssumedValues
from unipar.training.fake_run.fake_optimizer import FakeOptimizer
from unipar.training.fake_run.step_recorder import StepRecord, owners_of_parameters
from unipar.training.local_batches import read_first_microbatch
from unipar.training.task_facts import checkpoint_bytes, load_task, user_errors_as_task_errors

FEWEST_SAMPLES: Final = 2
"""Samples of the smallest microbatch that is traced: one of a single sample may run other operations than larger ones,
so that it is planned from those."""


@dataclass(frozen=True)
class FakeTask:
    """A task with its model on tensors without memory, ready to be traced."""

    task: Task
    name: str
    """Name of the model's part."""

    model: nn.Module
    blocks: Sequence[str]
    config: Config
    mode: FakeTensorMode
    optimizer: FakeOptimizer
    element_sizes: Mapping[str, int]
    """Bytes of an element of each parameter, before bf16 takes its place beside an fp32 master."""

    data: Any
    micro: int
    """Samples, or tokens, of the smallest microbatch that is traced."""

    checkpoint: CheckpointBytes | None
    allocated: int
    rows: TokenRows | None = None
    """Microbatches if they are counted in tokens; None: in samples."""

    assumed: AssumedValues | None = None
    """Mode that stands in for the values that the loss needs; None: it is not known to need any."""

    compiled: bool = False
    """True if torch.compile compiles it as it runs."""

    _batches: dict[int, Any] = field(default_factory=dict[int, Any])

    def batch(self, count: int) -> Any:
        """Return a microbatch of this many samples, or tokens, with its values; each is read once."""
        if count not in self._batches and self.rows is not None:
            with user_errors_as_task_errors("data()"):
                self._batches[count] = self.rows.read(count // self.rows.length)
        elif count not in self._batches:
            sizes = BatchSizes(total=count, micro=count, accumulate=1, ranks=1)
            with user_errors_as_task_errors("data()"):
                self._batches[count] = read_first_microbatch(self.task, self.data, self.config, sizes)
        return self._batches[count]

    def timeline(
        self, blocks: Sequence[str], record: StepRecord, stages_of: Mapping[str, int] | None = None
    ) -> StepTimeline:
        """Return a step of the model as it is now, for closed forms.

        `stages_of`: number of stages that have a parameter, by its name, where several do.
        """
        owners = owners_of_parameters(self.model, blocks)
        numbers = {id(p): number for number, p in enumerate(self.model.parameters())}
        return StepTimeline(
            parameters=tuple(
                PredictedParameter(
                    name=name,
                    shape=tuple(p.shape),
                    element_size=self.element_sizes.get(name, p.element_size()),
                    trained=p.requires_grad,
                    block=owners.get(name, -1),
                    states=self.optimizer.states.get(name, ()),
                    tables=self.optimizer.tables.get(name, 0),
                    group=self.optimizer.group_of.get(name, 0),
                    viewed=name in record.viewed,
                    viewed_again=name in record.viewed_again,
                    stages=(stages_of or {}).get(name, 1),
                )
                for name, p in self.model.named_parameters()
            ),
            buffers={name: b.untyped_storage().nbytes() for name, b in self.model.named_buffers()},
            blocks=tuple(blocks),
            moments=tuple(moment for _, moment in record.moments),
            modules=tuple(
                PredictedModule(
                    name, tuple(numbers[id(p)] for p in m.parameters(recurse=False)), name in record.passing
                )
                for name, m in self.model.named_modules()
            ),
            temporaries_of_update=self.optimizer.temporaries,
            averages=self.config.train.ema is not None,
        )


def fake_task(config: Config, micro: int, task: Task | None = None, rows: TokenRows | None = None) -> FakeTask:
    """Return a task on tensors without memory; raise TaskError if its model needs values.

    `task`: None for the config's own. `rows`: microbatches if they are counted in tokens.
    """
    task = task or load_task(config)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with user_errors_as_task_errors("model()"), explain_values("model()"):
        made, allocated = create_without_values(task.model, mode)
        parts = check_parts(made)
        if len(parts) > 1:
            raise TaskError(
                f"plan: model() returned several parts ({', '.join(parts)}), and a plan has one model: "
                "measure it (unipar compare)"
            )
        ((name, model),) = parts.items()
        enter_training_mode(model, keep=task.keep_modes)
        with mode:
            checkpoint = checkpoint_bytes(task, {name: model}, config)
    blocks = find_blocks(model, config, patterns=task.blocks(model))
    masters = config.train.precision == "bf16-master"
    with mode:
        _cast_parameters(model, torch.float32 if masters else parameter_dtype(config.train.precision))
    with explain_values("the optimizer's step"):
        optimizer = FakeOptimizer.of(task, model, config, mode)
    element_sizes = {name: p.element_size() for name, p in model.named_parameters()}
    if masters:  # the optimizer steps fp32 copies of what computes in bf16
        with mode:
            _cast_parameters(model, torch.bfloat16)
            cast_buffers(model, torch.bfloat16)
    kernel = "emulated in fp32" if config.device == "cpu" else "torch._scaled_mm"
    convert_to_fp8(model, blocks, config, kernel, planned=True)
    apply_transforms(model, blocks, config.changed({"model.compile": False}))
    with user_errors_as_task_errors("data()"):
        data = task.data()
        micro = rows.length * rows.samples if rows is not None else _samples_to_trace(task, data, config, micro)
    return FakeTask(
        task=task,
        name=name,
        model=model,
        blocks=blocks,
        config=config,
        mode=mode,
        optimizer=optimizer,
        element_sizes=element_sizes,
        data=data,
        micro=micro,
        checkpoint=checkpoint,
        allocated=allocated,
        rows=rows,
    )


def _cast_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Give all parameters that are floats this dtype, but for frozen ones that stay narrower."""
    kept = {id(p) for p in narrow_frozen_parameters(model, dtype)}

    def cast(p: nn.Parameter) -> nn.Parameter:
        return p if id(p) in kept else nn.Parameter(cast_if_float(p.detach(), dtype), p.requires_grad)

    replace_parameters(model, cast)


def _samples_to_trace(task: Task, data: Any, config: Config, micro: int) -> int:
    """Return how many samples the smallest microbatch has: three times as many must be there."""
    micro = max(micro, FEWEST_SAMPLES)
    sizes = BatchSizes(total=micro, micro=micro, accumulate=1, ranks=1)
    collate = task.collate if task.defines("collate") else None
    length = training_data_source(data, collate, task.collate, config, sizes).length
    if length is None or length >= 3 * micro:
        return micro
    if length < 3:
        raise TaskError(f"plan: data() has {length} samples, and a plan needs 3, for microbatches of three sizes")
    return length // 3
