"""Stages of a pipeline: each runs the loss with its own blocks alone, and leaves it behind the last of them.

It needs PyTorch alone, and lies beside a script that `unipar export` has written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from typing_extensions import override


class Elsewhere(nn.Module):
    """Place of a block that another rank has."""


class Left(Exception):
    """Carrier of a stage's output out of the loss, which only the last stage runs to its end."""

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


class Stages(nn.Module):
    """A model and its loss, of which one stage runs at a time: blocks of others return what they are given."""

    def __init__(self, loss: Any, blocks: Sequence[str], firsts: Sequence[int], group: Any, hidden: int | str) -> None:
        """`loss` has the model as an attribute; `firsts`: number of each stage's first block; `group`: the pipeline's.

        `hidden`: place or name of the hidden states among a block's arguments.
        """
        super().__init__()
        self.loss, self.blocks, self.hidden, self.group = loss, blocks, hidden, group
        self.bounds = (*firsts, len(blocks))
        self.count, self.ranks, rank = len(firsts), dist.get_world_size(group), dist.get_rank(group)
        self.numbers = range(rank, self.count, self.ranks)  # this rank's stages
        self.own = [self.blocks_of(stage) for stage in self.numbers]
        for name in set(blocks).difference(*self.own):
            loss.model.set_submodule(name, Elsewhere())
        self.first, self.end = 0, len(blocks)
        self.arrived: Sequence[Tensor] = ()
        self.kept: list[tuple[Tensor, Tensor]] = []

    def blocks_of(self, stage: int) -> Sequence[str]:
        """Return the names of a stage's blocks."""
        return self.blocks[self.bounds[stage] : self.bounds[stage + 1]]

    def used(self, stage: int) -> Sequence[nn.Parameter]:
        """Return the parameters of a stage's blocks, and those outside of blocks."""
        others = tuple(f"{name}." for name in set(self.blocks).difference(self.blocks_of(stage)))
        named = self.loss.model.named_parameters()
        return [p for name, p in named if p.requires_grad and not name.startswith(others)]

    @override
    def forward(self, batch: Any) -> Tensor:
        try:
            return self.loss(batch)
        except Left as left:
            return left.hidden

    def run(self, stage: int, batch: Any, arrived: Sequence[Tensor]) -> Tensor:
        """Return the loss in the last stage, in others the hidden states for the next one."""
        self.first, self.end = self.bounds[stage], self.bounds[stage + 1]
        self.arrived = arrived
        inside = tuple(f"{name}." for name in self.blocks)
        outside = [buffer for name, buffer in self.loss.model.named_buffers() if not name.startswith(inside)]
        self.kept = [(buffer, buffer.clone()) for buffer in outside] if stage >= self.ranks else []
        return self(batch)

    def surround(self) -> None:
        """Let blocks do what the stage asks that runs; after FSDP's own hooks."""
        for number, name in enumerate(self.blocks):
            block: Any = self.loss.model.get_submodule(name)
            block.forward = partial(self._run_block, number, block.forward)
            block.register_forward_hook(partial(self._leave, number))

    def _run_block(self, number: int, forward: Any, *args: Any, **kwargs: Any) -> Any:
        if self.first <= number < self.end:
            return forward(*args, **kwargs)
        if number != self.first - 1:
            return kwargs[self.hidden] if isinstance(self.hidden, str) else args[self.hidden]
        hidden, generator = self.arrived
        set_random_state(generator)  # dropout goes on as in one process
        for buffer, value in self.kept:
            buffer.data.copy_(value)  # what lies before the blocks runs in both stages of a rank, and counts once
        return hidden

    def _leave(self, number: int, block: nn.Module, args: Any, hidden: Any) -> None:
        """Leave the loss behind a stage's last block."""
        if number != self.end - 1 or self.end == len(self.blocks):
            return
        if not isinstance(hidden, Tensor):
            words = "this script hands one tensor from block to block"
            raise SystemExit(f"a block returned {type(hidden).__name__}: {words}")
        raise Left(hidden)


class OwnPipeline:
    """A rank's only stage, which runs forwards and backwards by GPipe or 1F1B."""

    DTYPES = (torch.float32, torch.float64, torch.bfloat16)

    def __init__(
        self, stages: Any, seed: Callable[[int], None], device: torch.device, *, gpipe: bool, late: bool
    ) -> None:
        """`late`: FSDP has wrapped the stages, and gradients travel once, at the end of a step's last backward."""
        self.stages, self.seed, self.device, self.gpipe, self.late = stages, seed, device, gpipe, late
        (self.number,) = stages.numbers
        self.is_last = self.number == stages.count - 1
        each = dist.get_world_size() // stages.ranks
        self.before, self.behind = dist.get_rank() - each, dist.get_rank() + each
        self.forth, self.back = dist.new_group(), dist.new_group()  # NCCL waits in one for what comes first
        self.sent: list[tuple[Any, Tensor]] = []  # kept until they have gone

    def step(self, micros: Sequence[tuple[Any, float]], seeds: Sequence[int]) -> Tensor:
        """Run forward and backward on all microbatches; return the loss where this rank has the last stage, or 0."""
        mean = torch.zeros((), dtype=torch.float64, device=self.device)
        live: dict[int, tuple[Tensor, Sequence[Tensor]]] = {}
        for turn, i in self.order(len(micros)):
            if turn == "forward":
                batch, weight = micros[i]
                arrived = self.receive_hidden() if self.number > 0 else ()
                self.seed(seeds[i])
                out = self.stages.run(self.number, batch, arrived)
                if self.is_last:
                    out = out * (weight / len(micros))
                    mean += out.detach()
                else:
                    self.send_hidden(out)
                live[i] = out, arrived
                continue
            if self.late:
                self.stages.set_requires_gradient_sync(i + 1 == len(micros))
            out, arrived = live.pop(i)
            gradient = None if self.is_last else self.receive(torch.empty_like(out), self.behind, self.back)
            if out.requires_grad:
                out.backward(gradient)
            for hidden in arrived[:1]:
                self.send(torch.zeros_like(hidden) if hidden.grad is None else hidden.grad, self.before, self.back)
        for work, _ in self.sent:
            work.wait()
        self.sent.clear()
        return mean

    def order(self, micros: int) -> list[tuple[str, int]]:
        """Return what this stage does in one step: forwards and backwards of the microbatches."""
        ahead = min(micros if self.gpipe else self.stages.count - 1 - self.number, micros)  # forwards not waited for
        turns = [("forward", i) for i in range(ahead)]
        for i in range(ahead, micros):
            turns += [("forward", i), ("backward", i - ahead)]
        return turns + [("backward", i) for i in range(micros - ahead, micros)]

    def send(self, message: Tensor, to: int, group: Any) -> None:
        """Begin to send a message."""
        message = message.contiguous()
        self.sent.append((dist.isend(message, to, group=group), message))

    def receive(self, message: Tensor, source: int, group: Any) -> Tensor:
        """Return a message that arrives in this memory."""
        dist.recv(message, source, group=group)
        return message

    def send_hidden(self, hidden: Tensor) -> None:
        """Send hidden states of any shape, and the state of the random generator."""
        header = torch.zeros(8, dtype=torch.int64)
        header[: hidden.ndim + 2] = torch.tensor([hidden.ndim, self.DTYPES.index(hidden.dtype), *hidden.shape])
        for message in (header.to(self.device), random_state(self.device), hidden.detach()):
            self.send(message, self.behind, self.forth)

    def receive_hidden(self) -> Sequence[Tensor]:
        """Return hidden states and the state of the generator from the stage before."""
        header = self.receive(torch.empty(8, dtype=torch.int64, device=self.device), self.before, self.forth)
        generator = self.receive(torch.empty_like(random_state(self.device)), self.before, self.forth)
        dimensions, dtype, *sizes = header.tolist()
        hidden = torch.empty(sizes[:dimensions], dtype=self.DTYPES[dtype], device=self.device)
        return self.receive(hidden, self.before, self.forth).requires_grad_(), generator


class TorchStage(nn.Module):
    """A stage as torch calls it: with a microbatch's number and, behind the first stage, what has arrived."""

    def __init__(self, run: Callable[..., Any], used: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self.run, self.used = run, tuple(used)

    @override
    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Return what torch computes gradients of, apart from those of what has arrived."""
        return iter(self.used)

    @override
    def forward(self, *arrived: Tensor, i: Tensor) -> Any:
        return self.run(int(i), arrived)


class TorchPipeline:
    """A rank's stages, which run in the order of one of torch's schedules."""

    def __init__(
        self,
        stages: Any,
        seed: Callable[[int], None],
        device: torch.device,
        *,
        schedule: Callable[..., Any],
        copies: Any,
        late: bool,
    ) -> None:
        """`schedule`: class of torch; `copies`: group of ranks that have the same stages; `late`: as above."""
        self.stages, self.seed, self.device, self.late = stages, seed, device, late
        self.schedule_class, self.copies = schedule, copies
        self.known: dict[Any, list[Any]] = {}  # shape and dtype of what stages put out, by the shapes of a batch
        self.hidden: list[Any] = []
        self.schedule: Any = None
        self.backwards = 0

    def step(self, micros: Sequence[tuple[Any, float]], seeds: Sequence[int]) -> Tensor:
        """Run forward and backward on all microbatches; return the loss where this rank has the last stage, or 0."""
        self.micros, self.seeds, self.backwards = micros, seeds, 0
        self.mean = torch.zeros((), dtype=torch.float64, device=self.device)
        key = shapes(micros[0][0])
        if any(shapes(batch) != key for batch, _ in micros):
            raise SystemExit("this schedule needs microbatches of one shape in each step: pad them alike")
        unknown = torch.tensor(float(key not in self.known), device=self.device)
        dist.all_reduce(unknown, group=self.copies)  # FSDP gathers on all ranks or none
        if unknown:
            self.known[key] = self.find_shapes(micros[0][0])
        if self.hidden != self.known[key]:
            self.hidden = self.known[key]
            self.schedule = self.make()
        numbers = torch.arange(len(micros))
        self.schedule.step(i=numbers, target=numbers, return_outputs=False)
        return self.mean

    @torch.no_grad()
    def find_shapes(self, batch: Any) -> list[Any]:
        """Return shape and dtype of what each stage puts out, from a pass that changes nothing."""
        kept = [(buffer, buffer.clone()) for buffer in self.stages.buffers()]
        found: list[Any] = []
        for stage in range(self.stages.count - 1):
            facts: list[Any] = [None]
            if stage in self.stages.numbers:
                out = self.stages.run(stage, batch, self.examples(found[-1], self.device) if found else ())
                facts = [(out.shape, out.dtype)]
            dist.broadcast_object_list(facts, group=self.stages.group, group_src=stage % self.stages.ranks)
            found += facts
        for buffer, value in kept:
            buffer.copy_(value)
        return found

    def examples(self, hidden: tuple[Any, Any], device: torch.device) -> tuple[Tensor, Tensor]:
        """Return what a stage puts out: hidden states of a shape, and the state of the random generator."""
        (shape, dtype), generator = hidden, random_state(self.device).to(device)
        return torch.zeros(shape, dtype=dtype, device=device, requires_grad=True), generator

    def make(self) -> Any:
        """Return torch's schedule, which receives into memory of fixed shapes."""
        stages, meta, count = list[PipelineStage](), torch.device("meta"), self.stages.count
        for number in self.stages.numbers:
            stage = TorchStage(partial(self.forward, number), self.stages.used(number))
            taken = self.examples(self.hidden[number - 1], meta) if number else ()
            given = self.examples(self.hidden[number], meta) if number < count - 1 else torch.zeros((), device=meta)
            stages.append(PipelineStage(stage, number, count, self.device, taken, given, group=self.stages.group))
        return self.schedule_class(stages, len(self.micros), loss_fn=_loss_of_last, scale_grads=False)

    def forward(self, stage: int, i: int, arrived: Sequence[Tensor]) -> Any:
        """Run one stage on a microbatch; return the loss, or what goes to the next stage."""
        batch, weight = self.micros[i]
        self.seed(self.seeds[i])
        if arrived:
            arrived[0].register_hook(Tensor.contiguous)  # as what is sent must be
        out = self.stages.run(stage, batch, arrived)
        if self.late:
            out.register_hook(self.begin_backward)
        if stage == self.stages.count - 1:
            out = out * (weight / len(self.micros))
            self.mean += out.detach()
            return out
        if (out.shape, out.dtype) != self.hidden[stage]:
            raise SystemExit(f"stage {stage} put out {tuple(out.shape)} for microbatch {i}, and another shape before")
        return out.clone(memory_format=torch.contiguous_format), random_state(self.device)

    def begin_backward(self, gradient: Tensor) -> None:
        """Let gradients travel once, at the end of a step's last backward."""
        self.backwards += 1
        self.stages.set_requires_gradient_sync(self.backwards == len(self.micros) * len(self.stages.numbers))


def _loss_of_last(loss: Tensor, target: Tensor) -> Tensor:
    return loss


def random_state(device: torch.device) -> Tensor:
    """Return the state of the generator of dropout, in the device's memory: it travels with hidden states."""
    if device.type == "cpu":
        return torch.get_rng_state()
    return torch.get_device_module(device).get_rng_state(device).to(device)


def set_random_state(state: Tensor) -> None:
    """Let dropout go on from a state that has arrived."""
    if state.device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(state.device).set_rng_state(state.cpu(), state.device)


def shapes(batch: Any) -> tuple[Any, ...]:
    """Return the shapes of all tensors in a batch."""
    if isinstance(batch, Tensor):
        return (tuple(batch.shape),)
    values: Any = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ()
    return tuple(shape for value in values for shape in shapes(value))
