"""Channel between neighbouring stages: hidden states of any shape forward, their gradients back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, final

import torch
import torch.distributed as dist
from torch import Tensor

from unipar.backend import Holding
from unipar.config.sections.strategy import Axes
from unipar.distributed.device import generator_state
from unipar.distributed.world import World
from unipar_mesh.pipeline.stage import Arrival
from unipar_mesh.sequence.sequence_collectives import Span
from unipar_mesh.sequence.sequence_parts import CutSequence, part_alone

_DTYPES: Final = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_HEADER_NUMBERS: Final = 12
"""Numbers in a header: dimensions, dtype, where a sequence is cut and its length, and up to eight sizes."""

_FORWARD_TAG, _BACKWARD_TAG, _GENERATOR_TAG = 1, 2, 3


@final
class Channel:
    """Messages of one rank to and from the same seat in the stages before and behind it.

    Messages of one direction arrive in the order in which they are sent. A header precedes hidden states, as their
    shape may change from microbatch to microbatch; a gradient has the shape of what was sent. Headers go from host to
    host, so that no rank waits for its device to learn a shape.
    """

    def __init__(
        self,
        forward_group: dist.ProcessGroup,
        backward_group: dist.ProcessGroup,
        header_group: dist.ProcessGroup,
        *,
        before: int | None,
        behind: int | None,
        device: torch.device,
        tensor: dist.ProcessGroup | None = None,
    ) -> None:
        """Take ranks of the neighbours. NCCL knows no tags, so that the two directions need a group each.

        `header_group`: the same ranks, for tensors in host memory. `tensor`: ranks over which a sequence may be cut;
        each sends its part to the same seat.
        """
        self._tensor = tensor
        self._forward_group, self._backward_group = forward_group, backward_group
        self._header_group = header_group
        self._before, self._behind, self._device = before, behind, device
        self._state_bytes = generator_state(device).numel()
        self._works: dict[tuple[str, int], list[tuple[Any, Tensor]]] = {}

    def send_hidden(self, micro: int, hidden: Tensor) -> None:
        """Send hidden states of a microbatch, and the generator's state, to the next stage."""
        assert self._behind is not None
        cut, length = (hidden.cut_dim + 1, hidden.span.length) if isinstance(hidden, CutSequence) else (0, 0)
        hidden = part_alone(hidden)
        if hidden.ndim > _HEADER_NUMBERS - 4 or hidden.dtype not in _DTYPES:
            raise ValueError(f"a stage cannot send hidden states of {hidden.ndim} dimensions and {hidden.dtype}")
        numbers = torch.zeros(_HEADER_NUMBERS, dtype=torch.int64)
        facts = [hidden.ndim, _DTYPES.index(hidden.dtype), cut, length, *hidden.shape]
        numbers[: len(facts)] = torch.tensor(facts)
        header = torch.cat([numbers.view(torch.uint8), generator_state(self._device).cpu()])
        messages = (header, self._header_group), (hidden.detach().contiguous(), self._forward_group)
        for message, group in messages:
            work = dist.isend(message, self._behind, group=group, tag=_FORWARD_TAG)
            self._works.setdefault(("hidden", micro), []).append((work, message))

    def receive_hidden(self, *, gradient: bool) -> Arrival:
        """Return the next hidden states of the stage before, a leaf, or of one, that takes a gradient if asked for."""
        header = torch.empty(_HEADER_NUMBERS * 8 + self._state_bytes, dtype=torch.uint8)
        dist.recv(header, self._before, group=self._header_group, tag=_FORWARD_TAG)
        dimensions, kind, cut, length, *sizes = header[: _HEADER_NUMBERS * 8].view(torch.int64).tolist()
        hidden = torch.empty(sizes[:dimensions], dtype=_DTYPES[kind], device=self._device)
        dist.recv(hidden, self._before, group=self._forward_group, tag=_FORWARD_TAG)
        hidden = leaf = hidden.requires_grad_(gradient)
        if cut and self._tensor is not None:
            span = Span(length, self._tensor.size(), self._tensor.rank(), self._tensor)
            hidden = CutSequence.of(hidden, cut - 1, span)
        return Arrival(hidden, header[_HEADER_NUMBERS * 8 :].clone(), leaf)

    def send_generator(self, stage: int, micro: int) -> None:
        """Send the generator's state behind a stage's microbatch: hidden states travel by another way."""
        assert self._behind is not None
        state = generator_state(self._device).cpu()
        work = dist.isend(state, self._behind, group=self._header_group, tag=_GENERATOR_TAG + stage)
        self._works.setdefault(("generator", micro), []).append((work, state))

    def receive_generator(self, stage: int, micro: int) -> Tensor:
        """Return the generator's state behind a microbatch of a stage of the rank before."""
        state = torch.empty(self._state_bytes, dtype=torch.uint8)
        dist.recv(state, self._before, group=self._header_group, tag=_GENERATOR_TAG + stage)
        return state

    def send_gradient(self, micro: int, gradient: Tensor) -> None:
        """Send the gradient of what the stage before had sent."""
        assert self._before is not None
        message = gradient.contiguous()
        work = dist.isend(message, self._before, group=self._backward_group, tag=_BACKWARD_TAG)
        self._works["gradient", micro] = [(work, message)]
        self.wait("gradient", micro - 2)  # the stage before has taken it, as it has gone on since

    def receive_gradient(self, micro: int, sent: Tensor) -> Tensor:
        """Return the gradient of the hidden states that were sent for a microbatch."""
        gradient = torch.empty(sent.shape, dtype=sent.dtype, device=self._device)
        dist.recv(gradient, self._behind, group=self._backward_group, tag=_BACKWARD_TAG)
        self.wait("hidden", micro)
        return gradient

    def wait(self, what: str, micro: int) -> None:
        """Wait until messages of a microbatch are sent, and let their tensors go."""
        for work, _ in self._works.pop((what, micro), ()):
            work.wait()

    def holdings(self) -> Iterator[Holding]:
        """Yield the messages that are kept until they are sent."""
        for (what, micro), works in self._works.items():
            yield from (Holding("communication", f"{what} of microbatch {micro}", message) for _, message in works)

    def wait_for_all(self) -> None:
        """Wait until everything is sent."""
        for what, micro in list(self._works):
            self.wait(what, micro)


def open_channel(world: World, axes: Axes) -> Channel:
    """Return this rank's channel to its neighbours in the pipeline, a ring where a rank has several stages."""
    seat, ranks, ring = world.mesh.seat["pipeline"], axes.pipeline, axes.pieces > 1
    return Channel(
        world.groups.group("pipeline"),
        world.groups.second_group("pipeline"),
        world.groups.host_group("pipeline"),
        before=world.mesh.rank_at(pipeline=(seat - 1) % ranks) if seat > 0 or ring else None,
        behind=world.mesh.rank_at(pipeline=(seat + 1) % ranks) if seat < ranks - 1 or ring else None,
        device=world.device,
        tensor=world.groups.group("tensor") if axes.sequence else None,
    )
