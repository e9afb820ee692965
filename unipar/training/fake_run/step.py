"""`trace_step`: what one microbatch of the user's task allocates in a step, on tensors without memory."""

from __future__ import annotations

import gc
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode

from unipar.backend.precision import autocast_dtype, batch_dtype
from unipar.config import Config
from unipar.engines.forward import ForwardCall, OpaqueBatch
from unipar.training.fake_run.recorder import ATTENTION_ON_CPU, StepRecord, StepRecorder


@dataclass(frozen=True)
class FakeStep:
    """Record of one microbatch, of so many samples."""

    micro: int
    record: StepRecord
    batch: int
    """Bytes of the batch."""


@contextmanager
def _only_asked_collection() -> Generator[None]:
    """Context manager: Python frees cycles of references when it is asked to, and looks at new objects alone."""
    was_on = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_on:
            gc.enable()


def trace_step(
    model: nn.Module,
    blocks: Sequence[str],
    loss: Callable[[nn.Module, Any], Tensor],
    batch: Any,
    micro: int,
    config: Config,
    mode: FakeTensorMode,
) -> FakeStep:
    """Run the task's loss on a fake batch, and its backward; return what was allocated. `model` is fake, too."""
    precision = config.train.precision
    call = ForwardCall(model, torch.device("cpu"), autocast=autocast_dtype(precision), cast=batch_dtype(precision))

    def faked(x: Any) -> Any:
        return mode.from_tensor(x) if isinstance(x, Tensor) else x

    with mode:
        fake = tree_map(faked, batch)
    given = [x for x in tree_leaves(fake) if isinstance(x, Tensor)]
    counter = FlopCounterMode(display=False, custom_mapping=dict(ATTENTION_ON_CPU))
    recorder = StepRecorder([*model.parameters(), *model.buffers(), *given], counter.get_total_flops)
    with _only_asked_collection(), recorder.follow(model, blocks), mode, counter, recorder:
        recorder.begin("forward")
        value = call(loss, OpaqueBatch(fake))
        recorder.begin("backward")
        value.backward()
        recorder.note("finish")
        del value
        recorder.begin("update")
        recorder.begin("steady")
    for p in model.parameters():
        p.grad = None
    return FakeStep(micro, recorder.record(), sum(x.untyped_storage().nbytes() for x in given))
