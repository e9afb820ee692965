"""Executor of interleaved and zero-bubble schedules, which are torch's own: a rank has several stages of the model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Final, cast, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble
from typing_extensions import override

from unipar.backend import Fn, Holding, LossFn, Mark, Micro
from unipar.config.sections.strategy import Axes
from unipar.distributed.world import World
from unipar.engines.batch_transfer import map_tensors
from unipar.engines.forward import ForwardCall, OpaqueBatch, eval_mode
from unipar.engines.gradients import scale_loss
from unipar.errors import TaskError
from unipar.utils.seeding import kept_random_state
from unipar_mesh.pipeline.channel import Channel
from unipar_mesh.pipeline.stage import Arrival, Stage
from unipar_mesh.trials_without_trace import kept_attributes

_CLASSES: Final[Mapping[str, Any]] = {
    "interleaved": ScheduleInterleaved1F1B,
    "zerobubble": ScheduleInterleavedZeroBubble,
}
"""Schedules of torch. Its V-shaped zero-bubble would have the last stage on the first rank, and waits longer."""

_WRAPPED: Final = ("failed to run forward", "failed to run stage backward")
"""Words of the errors into which torch puts those of a stage."""

Shape = tuple[tuple[int, ...], torch.dtype]


@final
class TorchScheduleExecutor:
    """Runs microbatches through the stages that this rank has, in the order of one of torch's schedules.

    torch receives into buffers of a fixed shape, so that all microbatches of a step must have one. It is found by a
    forward in evaluation mode through the channel of evaluations, which changes nothing, when a batch of another shape
    comes. Each stage gets a microbatch's number from torch, and takes the batch from the step's list.
    """

    def __init__(
        self,
        shell: ForwardCall,
        stages: Sequence[Stage],
        needs: Sequence[frozenset[str]],
        loss: Fn,
        axes: Axes,
        world: World,
        channel: Channel,
        *,
        once: bool,
    ) -> None:
        """Take this rank's stages and the parameters that each uses; `once`: gradients are reduced after the last."""
        self._shell, self._stages, self._loss, self._channel = shell, stages, loss, channel
        self._axes, self._seat, self._device = axes, world.mesh.seat["pipeline"], world.device
        self._group, self._world = world.groups.group("pipeline"), world
        named = dict(shell.model.named_parameters())
        self._parameters = [[p for name, p in named.items() if name in names] for names in needs]
        self._stem = _buffers_of_stem(shell.model, stages[0]) if stages[0].is_first else []
        self._once, self._fsdp = once, list(_fsdp_modules(shell, stages))
        self._blocks = [_fsdp_blocks(shell.model, stage) for stage in stages]
        for before, block in (both for own in self._blocks for both in pairwise(own)):
            block.set_modules_to_backward_prefetch([before])
        self._shapes: dict[Any, dict[int, Shape]] = {}
        """Shapes of hidden states by number of the stage that puts them out, for each shape of a batch."""

        self._made: tuple[Any, Any] = None, None
        self._of_torch: Sequence[Any] = ()
        self._fn: LossFn | None = None
        self._micros: Sequence[Micro] = ()
        self._divisor = 1.0
        self._loss_scale: Tensor | None = None
        self._share: Tensor | None = None
        self._mark: Mark = _no_mark
        self._backwards = 0
        self._sizes: Mapping[int, Shape] = {}
        for name in ("schedules", "stage"):  # they log the whole schedule when a stage raises an error
            logging.getLogger(f"torch.distributed.pipelining.{name}").setLevel(logging.CRITICAL)

    # Training

    def run(
        self, fn: LossFn, micros: Sequence[Micro], divisor: float, mark: Mark, loss_scale: Tensor | None = None
    ) -> Tensor:
        """Run forward and backward on all microbatches; return this rank's share of the loss."""
        refuse_other_shapes(self._axes.schedule, micros)
        key = _shapes_of(micros[0].batch), self._shell.autocast
        if self._is_new_to_a_share(key):
            self._shapes[key] = self._find_shapes(micros[0].batch)
        self._sizes = self._shapes[key]
        if self._made[0] != (key, len(micros)):
            self._made = (key, len(micros)), self._make_schedule(len(micros))
        self._fn, self._micros, self._divisor, self._mark = fn, micros, divisor, mark
        self._loss_scale = loss_scale
        self._share, self._backwards = None, 0
        numbers = torch.arange(len(micros))
        try:
            self._made[1].step(i=numbers, target=numbers, return_outputs=False)
        except RuntimeError as e:
            raise _first_cause(e) from None
        finally:
            self._fn, self._micros = None, ()
        self._channel.wait_for_all()
        return torch.zeros((), device=self._device) if self._share is None else self._share

    def _is_new_to_a_share(self, key: Any) -> bool:
        """Return whether any share of the data must find its shapes: FSDP2 gathers on all ranks or on none."""
        new = key not in self._shapes
        if self._world.data_size == 1:
            return new
        return self._world.sum(torch.tensor(float(new), device=self._device)).item() > 0

    def _make_schedule(self, count: int) -> Any:
        total = self._axes.stages
        stages = [
            _ReportingStage(
                _StageModule(partial(self._forward, place), self._parameters[place]),
                number,
                total,
                self._device,
                input_args=(self._example(number - 1),) if number else (),
                output_args=self._example(number) if number < total - 1 else torch.empty((), device="meta"),
                group=self._group,
                before_backward=partial(self._begin_backward, place),
            )
            for place, number in enumerate(self._numbers())
        ]
        self._of_torch = stages
        return _CLASSES[self._axes.schedule](stages, count, loss_fn=self._scaled_loss, scale_grads=False)

    def holdings(self) -> Iterator[Holding]:
        """Yield the buffers into which torch receives, one for each microbatch of a step, and gradients of inputs."""
        for stage in self._of_torch:
            for way, infos in (("hidden states", stage.args_recv_info), ("gradient", stage.grad_recv_info)):
                for micro, buffers in infos.items():
                    for tensor in (info.buffer for info in buffers if info.buffer is not None):
                        name = f"stage {stage.stage_index}, {way} of microbatch {micro}"
                        yield Holding("communication", name, tensor)
                        if tensor.grad is not None:
                            yield Holding("communication", f"{name}, gradient", tensor.grad)

    def _numbers(self) -> range:
        return range(self._seat, self._axes.stages, self._axes.pipeline)

    def _example(self, number: int) -> Tensor:
        """Return a tensor without memory that is as what a stage puts out."""
        shape, dtype = self._sizes[number]
        return torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)

    def _forward(self, place: int, number: int, hidden: Tensor | None) -> Tensor:
        """Run a microbatch through one stage; return what goes to the next, or the loss."""
        self._mark("forward")
        assert self._fn is not None
        stage, micro, own = self._stages[place], self._micros[number], self._numbers()[place]
        if hidden is not None:
            arrival = Arrival(hidden, self._channel.receive_generator(own - 1, number))
            stage.inlet = lambda: arrival
        bound = micro.bind(self._fn)
        before = [buffer.clone() for buffer in self._stem] if place else []
        stage.enter()
        try:
            out: Tensor = self._shell(partial(stage.run, bound), OpaqueBatch(micro.batch))
        finally:
            stage.leave()
            stage.inlet = None
        with torch.no_grad():
            for buffer, value in zip(self._stem if place else [], before, strict=True):
                buffer.copy_(value)  # what precedes the blocks counts once, though every stage runs it
        if stage.is_last:
            return own_memory(out)
        expected = self._sizes[own]
        if (tuple(out.shape), out.dtype) != expected:
            raise TaskError(
                f"parallel.schedule: {self._axes.schedule} hands hidden states of one shape from stage to stage: "
                f"{stage.blocks[stage.end - 1]} put out {tuple(out.shape)} in {out.dtype} for microbatch {number}, and "
                f"{expected[0]} in {expected[1]} was planned; use schedule 1f1b, which takes any"
            )
        self._channel.send_generator(own, number)
        return own_memory(out.contiguous())

    def _scaled_loss(self, loss: Tensor, number: Tensor) -> Tensor:
        out, self._share = scale_loss(loss, self._micros[int(number)].scale, self._divisor, self._share)
        return own_memory(out if self._loss_scale is None else out * self._loss_scale)

    def _begin_backward(self, place: int, *, last_of_stage: bool) -> None:
        self._mark("backward")
        self._backwards += 1
        if own := self._blocks[place]:  # else FSDP2 gathers what ran forward last, which may be another stage
            cast("Any", self._shell).set_modules_to_backward_prefetch(own[-1:])
        last = self._backwards == len(self._micros) * len(self._stages)
        for module, home in self._fsdp:
            if not self._once:  # a backward frees what it used, and no other stage
                module.set_reshard_after_backward(home in (None, place), recurse=False)
            elif home is None or home == place or self._backwards == 1:
                wanted = last if home is None else last_of_stage and home == place
                module.set_requires_gradient_sync(wanted, recurse=False)
                module.set_reshard_after_backward(wanted, recurse=False)

    # Evaluation

    def forward(self, fn: Fn, batch: Any) -> Any:
        """Return what `fn` returns in the last of this rank's stages, each of which runs all of it."""
        return self._pass(fn, batch, {})

    def _find_shapes(self, batch: Any) -> dict[int, Shape]:
        shapes: dict[int, Shape] = {}
        owners = [*self._shell.model.modules(), getattr(self._loss, "__self__", None)]
        with kept_random_state(), kept_attributes(owners), eval_mode(self._shell):
            self._pass(self._loss, batch, shapes)
        return shapes

    def _pass(self, fn: Fn, batch: Any, shapes: dict[int, Shape]) -> Any:
        out: Any = None
        passes = iter(range(-1, -1_000_000_000, -1))

        def receive(number: int) -> Arrival:
            arrival = self._channel.receive_hidden(gradient=False)
            shapes[number] = tuple(arrival.hidden.shape), arrival.hidden.dtype
            return arrival

        def send(number: int, hidden: Tensor) -> None:
            shapes[number] = tuple(hidden.shape), hidden.dtype
            self._channel.send_hidden(next(passes), hidden)

        for number, stage in zip(self._numbers(), self._stages, strict=True):
            stage.inlet = None if stage.is_first else partial(receive, number - 1)
            stage.outlet = None if stage.is_last else partial(send, number)
            stage.repeats = True
            stage.enter()
            try:
                out = self._shell(partial(stage.run, fn), OpaqueBatch(batch))
            finally:
                stage.leave()
                stage.inlet, stage.outlet, stage.repeats = None, None, False
        self._channel.wait_for_all()
        return out


@final
class _StageModule(nn.Module):
    """Module that torch calls for a stage: with what arrives from the one before, and the microbatch's number."""

    def __init__(self, run: Callable[[int, Tensor | None], Tensor], parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self._run, self._own = run, tuple(parameters)

    @override
    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Yield the parameters whose gradients torch computes apart from those of inputs."""
        yield from self._own

    @override
    def forward(self, hidden: Tensor | None = None, *, i: Tensor) -> Tensor:
        return self._run(int(i), None if hidden is None else cast("Tensor", ContiguousGradient.apply(hidden)))


@final
class _ReportingStage(PipelineStage):
    """Stage of torch that tells when a backward begins."""

    def __init__(self, *args: Any, before_backward: Callable[..., None], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._before_backward = before_backward

    @override
    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        self._before_backward(last_of_stage=last_backward)
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)


@final
class ContiguousGradient(torch.autograd.Function):
    """Identity whose gradient is contiguous, as what is sent must be."""

    @staticmethod
    @override
    def forward(ctx: Any, hidden: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return hidden.view_as(hidden)

    @staticmethod
    @override
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient.contiguous()


def average_over_copies(parameters: Sequence[nn.Parameter], world: World) -> None:
    """Replace gradients by their mean over the ranks that train the same parameters on other samples.

    zerobubble needs this: it adds to gradients of weights outside of the backward in which FSDP2 would reduce them.
    """
    if world.data_size == 1:
        return
    group = world.groups.copies_and_shards(1).get_group("copies")
    works: list[Any] = []
    for p in parameters:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        works.append(dist.all_reduce(p.grad, group=group, async_op=True))
    for work in works:
        work.wait()
    torch._foreach_div_([p.grad for p in parameters if p.grad is not None], float(world.data_size))  # pyright: ignore[reportPrivateUsage]


def refuse_other_shapes(schedule: str, micros: Sequence[Micro]) -> None:
    """Raise TaskError unless all microbatches have tensors of the same shapes."""
    first = _shapes_of(micros[0].batch)
    for number, micro in enumerate(micros):
        if (shapes := _shapes_of(micro.batch)) != first:
            mine, other = next((a, b) for a, b in zip([*shapes, None], [*first, None], strict=False) if a != b)
            raise TaskError(
                f"parallel.schedule: {schedule} needs microbatches of one shape: microbatch {number} of this step has "
                f"{_words_of(mine)}, and microbatch 0 has {_words_of(other)}; pad them alike, or use schedule 1f1b or "
                "gpipe, which take any"
            )


def _buffers_of_stem(model: nn.Module, stage: Stage) -> list[Tensor]:
    """Return the buffers outside of blocks: statistics there change in what the first stage runs."""
    prefixes = tuple(f"{name}." for name in stage.blocks)
    return [buffer for name, buffer in model.named_buffers() if not name.startswith(prefixes)]


def _fsdp_modules(shell: ForwardCall, stages: Sequence[Stage]) -> Iterator[tuple[FSDPModule, int | None]]:
    """Yield what FSDP2 shards by itself, with the place of its stage, or None if all of them use it."""
    model: nn.Module = shell.model
    homes = {
        id(module): place
        for place, stage in enumerate(stages)
        for name in stage.blocks[stage.first : stage.end]
        for module in model.get_submodule(name).modules()
    }
    for module in shell.modules():
        if isinstance(module, FSDPModule):
            yield module, homes.get(id(module))


def _fsdp_blocks(model: nn.Module, stage: Stage) -> list[FSDPModule]:
    """Return the blocks of a stage that FSDP2 shards."""
    blocks = [model.get_submodule(name) for name in stage.blocks[stage.first : stage.end]]
    return [block for block in blocks if isinstance(block, FSDPModule)]


def _shapes_of(batch: Any) -> tuple[Shape, ...]:
    shapes: list[Shape] = []

    def note(t: Tensor) -> Tensor:
        shapes.append((tuple(t.shape), t.dtype))
        return t

    map_tensors(batch, note)
    return tuple(shapes)


def _words_of(shape: Shape | None) -> str:
    return "no such tensor" if shape is None else f"{shape[0]} of {shape[1]}"


def own_memory(t: Tensor) -> Tensor:
    """Return the tensor, or a copy of a view: torch detaches in place, which a view does not allow."""
    return t.clone() if t._is_view() else t


def _first_cause(e: BaseException) -> BaseException:
    """Return the error that a stage raised, which torch has put into others."""
    while e.__cause__ is not None and any(words in str(e).lower() for words in _WRAPPED):
        e = e.__cause__
    return e


def _no_mark(phase: str) -> None:
    """Do nothing: no step runs."""
