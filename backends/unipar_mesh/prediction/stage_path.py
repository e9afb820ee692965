"""A microbatch's way through one of several stages of a rank for `unipar plan`, as torch's schedules take it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import _backward as torch_backward

from unipar.backend import Fn
from unipar.distributed.device import generator_state
from unipar.distributed.mesh import Mesh
from unipar_mesh.pipeline.stage import Arrival, Stage
from unipar_mesh.pipeline.torch_schedules import ContiguousGradient, own_memory
from unipar_mesh.prediction.planned_stages import Hidden, shapes_of_batch

_backward: Any = torch_backward
"""Functions of torch that its stages call; they have no public names."""


@dataclass
class PieceFlow:
    """A microbatch's way through a stage, between torch's buffers: torch computes its gradients, whole or in halves.

    What is sent stays until the step ends, because torch waits for it then.
    """

    stage: Stage
    group: dist.ProcessGroup
    """Ranks of the pipeline."""

    mesh: Mesh
    parameters: Sequence[nn.Parameter]
    """Parameters that the stage uses."""

    arriving: dict[Hashable, Hidden]
    """Outputs of the stage before, by the shapes of the batch."""

    leaving: dict[Hashable, Hidden]
    keep: Callable[[Tensor], None]
    """Function to be told of buffers, which stay from step to step."""

    halves: bool
    sent_on: int = 0
    """Bytes for the stage behind: hidden states, and the generator's state."""

    sent_back: int = 0
    """Bytes of the gradient for the stage before."""

    received: int = 0
    """Bytes of the buffers."""

    _sent: list[Tensor] = field(default_factory=list[Tensor])
    _groups_of_weights: Any = None
    _gradients: list[Tensor | None] | None = None

    def __post_init__(self) -> None:
        self._state_bytes = generator_state(torch.device("cpu")).numel()

    def forward(self, call: nn.Module, fn: Fn, opaque: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return what the stage puts out, and what it got."""
        key = shapes_of_batch(opaque.batch)
        got: tuple[Tensor, ...] = ()
        if not self.stage.is_first:
            arriving = self.arriving[key]
            got = (self._buffer(torch.empty(arriving.shape, dtype=arriving.dtype)).requires_grad_(),)
            hidden: Any = ContiguousGradient.apply(got[0])
            self.stage.inlet = lambda: Arrival(hidden, None)
        out = call(partial(self.stage.run, fn), opaque)
        self.stage.inlet = None
        if self.stage.is_last:
            return own_memory(out), got
        output, state = own_memory(out.contiguous()), torch.empty(self._state_bytes, dtype=torch.uint8)
        self.leaving[key] = Hidden.of(output)
        self.sent_on = output.nbytes + state.nbytes
        for t in (state, output.detach()):
            self._send(t, 1)
        return output, got

    def backward(self, kept: tuple[Tensor, tuple[Tensor, ...]]) -> None:
        """Run the backward, or that of inputs; the first stage has none of these."""
        output, got = kept
        self._gradients = None
        if not self.stage.is_last:
            self._gradients = [self._buffer(torch.empty_like(output))]
        if not self.halves:
            outputs: Any = output if self.stage.is_last else (output,)
            self._send_back(_backward.stage_backward(outputs, self._gradients, got))
        elif got:
            gradients, self._groups_of_weights = _backward.stage_backward_input(
                [output], self._gradients, list(got), iter(self.parameters)
            )
            self._send_back(gradients)

    def backward_of_weights(self, kept: tuple[Tensor, tuple[Tensor, ...]]) -> None:
        """Run the half of a backward that computes gradients of weights; in the first stage, all of it."""
        output, got = kept
        if not got:
            _backward.stage_backward((output,), self._gradients, ())
        else:
            places = {_backward._get_grad_fn_or_grad_acc(p): place for place, p in enumerate(self.parameters)}
            for group in self._groups_of_weights:  # torch has them in sets, in the order of addresses
                group["params"] = sorted(group["params"], key=places.__getitem__)
            _backward.stage_backward_weight(iter(self.parameters), self._groups_of_weights)
        self._groups_of_weights = None

    def forget(self) -> None:
        """Let go of what was sent: the step has ended."""
        self._sent.clear()

    def _send_back(self, gradients: Sequence[Tensor | None]) -> None:
        if gradients and (gradient := gradients[0]) is not None:
            self.sent_back = gradient.nbytes
            self._send(gradient, -1)

    def _send(self, t: Tensor, way: int) -> None:
        seat, ranks = self.mesh.seat["pipeline"], self.mesh.sizes["pipeline"]
        dist.isend(t, self.mesh.rank_at(pipeline=(seat + way) % ranks), self.group)
        self._sent.append(t)

    def _buffer(self, t: Tensor) -> Tensor:
        self.received += t.nbytes
        self.keep(t)
        return t
