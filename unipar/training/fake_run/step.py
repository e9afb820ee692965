"""`trace_step`: what one microbatch of the user's task allocates in a step, on tensors without memory."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

import unipar.training.fake_run.fake_kernels  # noqa: F401  # pyright: ignore[reportUnusedImport] - registers fake forms
from unipar.backend.precision import autocast_dtype, batch_dtype
from unipar.config import Config
from unipar.distributed.mesh import Mesh
from unipar.engines.forward import ForwardCall, OpaqueBatch
from unipar.errors import TaskError
from unipar.memory.account import UNKNOWN_AXIS
from unipar.memory.recording.bytes_sent_recorder import CollectiveCounter, axis_of_ranks
from unipar.model.without_values import explain_values
from unipar.prediction.rank_part import RankPart
from unipar.prediction.timeline import CommVolume
from unipar.profiling.compiling import graphs_compiled
from unipar.training.fake_run.compiled import run_until_compiled
from unipar.training.fake_run.fake_task import FakeTask
from unipar.training.fake_run.step_recorder import StepRecord, StepRecorder
from unipar.training.task_facts import user_errors_as_task_errors

_NUMBER_BYTES: Final = 8
"""Bytes of a number in fp64, in which the training loop adds over ranks."""


def sent_by_loop(config: Config, ranks: int, *, weighs: bool, of_experts: Sequence[int] = ()) -> Iterator[CommVolume]:
    """Yield what the training loop sends in every step, beside the engine; `weighs`: the task defines `weight`.

    `of_experts`: bytes that count tokens of experts, of each collective.
    """
    if ranks == 1:
        return
    axis = axis_of_ranks(Mesh.of(0, ranks, **config.parallel.axes.sizes), list(range(ranks))) or UNKNOWN_AXIS
    if weighs:  # the weight of the global batch
        yield CommVolume(axis, "all_reduce", _NUMBER_BYTES, 1, ranks)
    if config.log.every == 1:  # the loss, and whether it is finite everywhere
        yield CommVolume(axis, "all_reduce", 2 * _NUMBER_BYTES, 1, ranks)
        if of_experts:
            yield CommVolume(axis, "all_reduce", sum(of_experts), len(of_experts), ranks)


@dataclass(frozen=True)
class FakeStep:
    """Record of one microbatch, of this many samples."""

    micro: int
    record: StepRecord
    batch: int
    """Bytes of the batch."""

    sent: Mapping[tuple[str, str], int] = field(default_factory=dict[tuple[str, str], int])
    """Bytes sent by axis and collective."""

    calls: Mapping[tuple[str, str], int] = field(default_factory=dict[tuple[str, str], int])
    """Number of calls of each."""

    passed: tuple[int, int, int] = (0, 0, 0)
    """Bytes that went to the stage behind and to the one before, and bytes of buffers in which others arrived."""


@contextmanager
def _only_asked_collection() -> Generator[None]:
    """Context manager: Python frees cycles of references when it is asked to, and looks at new objects alone.

    A process that has frozen objects before, as a fork server has for its forks, keeps them frozen.
    """
    was_on, was_frozen = gc.isenabled(), gc.get_freeze_count() > 0
    gc.freeze()  # what is garbage already has no part in the step; to search for it would take a third of a plan
    gc.disable()
    try:
        yield
    finally:
        if not was_frozen:
            gc.unfreeze()
        if was_on:
            gc.enable()


def trace_step(
    fake: FakeTask, micro: int, part: RankPart | None = None, blocks: Sequence[str] | None = None
) -> FakeStep:
    """Run the task's loss on a fake microbatch of this many samples, and its backward; return what was allocated.

    `part`: what a rank has of the model, already in its place. `blocks`: those that are there, if not all. What
    torch.compile compiles, if it is at work, runs before once.
    """
    batch = fake.batch(micro)
    with user_errors_as_task_errors("loss()"), explain_values("loss()"):
        with fake.mode:
            batch = tree_map_only(Tensor, fake.mode.from_tensor, batch)
        return _record_step(fake, micro, batch, blocks or (fake if part is None else part).blocks, part)


def _record_step(
    fake: FakeTask, micro: int, batch: Any, blocks: Sequence[str], part: RankPart | None = None
) -> FakeStep:
    model, loss, mode, assumed = fake.model, fake.task.loss, fake.mode, fake.assumed
    precision = fake.config.train.precision
    call = ForwardCall(model, torch.device("cpu"), autocast=autocast_dtype(precision), cast=batch_dtype(precision))
    tensors = [x for x in tree_leaves(batch) if isinstance(x, Tensor)]

    def run() -> None:
        with mode, nullcontext() if assumed is None else assumed:
            call(loss, OpaqueBatch(batch)).backward()
        for p in model.parameters():
            p.grad = None

    if fake.compiled:
        run_until_compiled(run)
    before = graphs_compiled()
    recorder = StepRecorder([*model.parameters(), *model.buffers(), *tensors])
    traffic = Counter[tuple[str, str]]()
    counter = None if part is None else CollectiveCounter(traffic, part.mesh)
    if part is not None:
        part.keep = recorder.keep
    with ExitStack() as stack:
        stack.enter_context(recorder.follow(model, blocks))
        stack.enter_context(nullcontext() if part is None else part.armed())
        if part is not None and part.halves:  # torch adds to earlier gradients without autograd's knowledge
            with mode:
                for p in model.parameters():
                    p.grad = torch.zeros_like(p) if p.requires_grad else None
            recorder.keep_sums(model, blocks)
        stack.enter_context(_only_asked_collection())  # hooks on all modules are there, and are not looked at
        for entered in (mode, assumed, counter, recorder):
            if entered is not None:
                stack.enter_context(entered)
        recorder.begin("forward")
        opaque = OpaqueBatch(batch)
        out = call(loss, opaque) if part is None else part.forward(call, loss, opaque)
        recorder.begin("backward")
        out.backward() if part is None else part.backward(out)
        if part is not None and part.halves:
            recorder.note("weights")
            part.backward_of_weights(out)
        recorder.note("finish")
        del out
        if part is not None:
            part.end_step()
        recorder.begin("update")
        recorder.begin("steady")
    for p in model.parameters():
        p.grad = None
    if fake.compiled and graphs_compiled() > before:
        raise TaskError(
            "the model is compiled again when its memory is recorded, so that it cannot be planned; set "
            "model.compile: false"
        )
    return FakeStep(
        micro,
        recorder.record(),
        sum(x.untyped_storage().nbytes() for x in tensors),
        traffic,
        {} if counter is None else counter.calls,
        (0, 0, 0) if part is None else (part.sent_on, part.sent_back, part.received),
    )
