"""`WrapperEngine`: base class of engines for libraries that leave gradients and the optimizer to unipar."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from math import inf, prod
from types import MappingProxyType
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from unipar.backend import Factor, Fn, Holding, LossFn, Mark, Micro, Part, Piece, Read, Region, Step
from unipar.backend.precision import autocast_dtype, batch_dtype
from unipar.config import Config
from unipar.distributed.world import World
from unipar.engines.block_pieces import restore_blocks, split_blocks, state_holdings
from unipar.engines.forward import ForwardCall, OpaqueBatch, eval_mode, plain_evaluation, unrecorded_forward
from unipar.engines.gradients import clip_alike, clip_gradients, clip_in_fp64, scale_loss
from unipar.engines.learning_rate import BaseRates
from unipar.engines.optimizer_engine import OptimizerEngine
from unipar.engines.plain_state import KINDS_OF_MODEL, decode_plain, describe_unsaved_value, encode_plain, plain_key
from unipar.engines.state import (
    buffer_pieces,
    is_first_copy,
    local_part,
    local_regions,
    module_holdings,
    restore_buffers,
    steps_on_device,
)
from unipar.engines.update_guard import UpdateGuard
from unipar.errors import TaskError
from unipar.optimizers.block_states import BlockStates
from unipar.optimizers.matrix_optimizer import MatrixOptimizer
from unipar.optimizers.stochastic_rounding import MOMENTS, ElementRuns, RoundedMoments


class WrapperEngine(OptimizerEngine):
    """Engine that runs microbatches, clips and updates as one process does, while the library reduces gradients."""

    divisor: float
    """Number by which the library divides the sum of gradients over ranks."""

    copies: int = 1
    """Number of whole copies of a split model that the parts of all ranks make together."""

    traced = MappingProxyType(
        {"finish_reduction": "reduction", "norm": "clip", "norm_in_fp64": "clip", "update": "optimizer"}
    )

    splits_states_by_tensor: bool = False
    """Whether every rank has all weights, while the optimizer's state of each weight is on one rank only."""

    def __init__(self, part: Part, config: Config, world: World) -> None:
        """Make the optimizer: parameters are placed before this, the library wraps model and optimizer after it."""
        super().__init__(part, config, world)
        precision = config.train.precision
        self.call = ForwardCall(
            part.module, world.device, autocast=autocast_dtype(precision), cast=batch_dtype(precision)
        )
        self.wrapped: nn.Module = self.call
        self.optimizer: Any = part.optimizer(part.module)
        self.base: Optimizer = self.optimizer
        self.kept: Mapping[str, nn.Parameter] = dict(self.local_parameters())
        """Parameters that stay allocated between steps, frozen ones included."""

        self.rates = BaseRates(self.base)
        self.trained: tuple[nn.Parameter, ...] = tuple(p for g in self.base.param_groups for p in g["params"])
        self._names: dict[int, str] = {}
        self.share_views()

    @abstractmethod
    def sync(self, micros: int, *, last: bool) -> AbstractContextManager[Any] | None:
        """Context manager around one of `micros` microbatches, if any; gradients are reduced in the last backward."""

    def forward_loss(self, fn: LossFn, micro: Micro) -> Tensor:
        """Run forward on one microbatch and return its loss."""
        return self.wrapped(fn, OpaqueBatch(micro.batch), micro.number)

    def backward(self, loss: Tensor) -> None:
        """Run backward on the scaled loss of one microbatch."""
        loss.backward()

    def finish_reduction(self) -> None:
        """Complete the reduction of gradients, after the last backward: the optimizer uses them as they are then."""

    def norm(self) -> Tensor:
        """Clip gradients and return their norm before clipping."""
        if self.limit < inf and self._are_alike:
            return clip_alike(self._local_grads()[0], self.limit)
        return clip_gradients(self.trained, self.limit)

    @cached_property
    def _are_alike(self) -> bool:
        """Whether all trained parameters are plain, and of one device and dtype."""
        plain = all(type(p) is nn.Parameter for p in self.trained)
        return plain and len({(p.device, p.dtype) for p in self.trained}) == 1

    def norm_in_fp64(self) -> Tensor:
        """Clip gradients by their norm, added up in fp64, and return it."""
        return clip_in_fp64(self._local_grads(), self.limit, self.world, self.copies)

    def update(self) -> None:
        """Take one optimizer step, then clear gradients."""
        self.optimizer.step()
        self.clear_gradients()

    @final
    def clear_gradients(self) -> None:
        """Clear gradients as the optimizer does, without the label that PyTorch's own puts into profiles."""
        if self._clears_plainly:
            for p in self.trained:
                p.grad = None
        else:
            self.optimizer.zero_grad()

    @cached_property
    def _clears_plainly(self) -> bool:
        """Whether neither the library nor the task has an own way to clear gradients."""
        return getattr(self.optimizer.zero_grad, "__func__", None) is Optimizer.zero_grad

    def run_forward(self, fn: Fn, batch: Any) -> Any:
        """Return `fn(model, batch)`, run through the library's wrapper without gradients."""
        return self.wrapped(fn, OpaqueBatch(batch))

    def run_microbatches(self, fn: LossFn, micros: Sequence[Micro], divisor: float, mark: Mark) -> Tensor:
        """Run forward and backward on all microbatches; return this rank's share of the loss."""
        share: Tensor | None = None
        count = len(micros)
        for i, micro in enumerate(micros, 1):
            context = self.sync(count, last=i == count)
            if context is None:
                share = self._run_microbatch(fn, micro, divisor, mark, share)
                continue
            with context:
                share = self._run_microbatch(fn, micro, divisor, mark, share)
        assert share is not None
        return share

    def _run_microbatch(self, fn: LossFn, micro: Micro, divisor: float, mark: Mark, share: Tensor | None) -> Tensor:
        """Run forward and backward on one microbatch; return this rank's share of the loss up to it."""
        mark("forward")
        loss = self.forward_loss(fn, micro)
        mark("backward")
        mine, share = scale_loss(loss, micro.scale, divisor, share)
        self.backward(mine if self.scaler is None else mine * self.scaler.scale)
        return share

    def local_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters that this rank has, each once, with their names."""
        return self.model.named_parameters()

    def local_regions(self, name: str, t: Tensor) -> Iterator[tuple[Region, Tensor]]:
        """Yield each region that this rank has of a parameter or its state, with its elements."""
        return local_regions(t)

    @final
    def share_views(self) -> None:
        """Tell an optimizer that rounds by chance which elements this rank has."""
        if isinstance(self.base, RoundedMoments):
            self.base.views = self._named_views

    def _named_views(self, p: Tensor, t: Tensor) -> Iterator[tuple[str, ElementRuns, Tensor]]:
        """Yield this rank's parts of `t`, a parameter of the optimizer or a tensor like it."""
        if id(p) not in self._names:
            self._names = {id(p): name for name, p in self.local_parameters()}  # libraries put others in their place
        name = self._names[id(p)]
        for region, local in self.local_regions(name, t):
            yield name, ElementRuns(*region), local

    def whole_shape(self, name: str, t: Tensor) -> tuple[int, ...]:
        """Return the shape that a parameter, or its state, has as a whole."""
        return tuple(t.shape)

    def speaks_for(self, name: str, t: Tensor) -> bool:
        """Return whether this rank yields the pieces of a parameter or its state, of which others may have copies."""
        return is_first_copy(t, self.world)

    def buffers_to_save(self) -> Iterable[tuple[str, Tensor]]:
        """Return the buffers whose values this rank yields as pieces: all of them on rank 0."""
        return self.model.named_buffers() if self.world.rank == 0 else ()

    @override
    @final
    def step(self, fn: LossFn, micros: Sequence[Micro], factor: Factor, mark: Mark) -> Step:
        share = self.run_microbatches(fn, micros, self.divisor, mark)
        if not self.world.leads:
            share = torch.zeros_like(share)
        mark("update")
        self.finish_reduction()
        for p in self.trained:
            if p.grad is None:  # an unused parameter: weight decay must apply under every backend alike
                p.grad = torch.zeros_like(p)
        if self.scaler is not None:
            self.scaler.unscale(self._local_grads()[0])
        norm = self.norm_in_fp64() if self.fp64 else self.norm()
        self.rates.set(self.optimizer, factor)
        left_out = self._guard.leaves_out(norm, self.scaler)
        if left_out is True:
            self.clear_gradients()
        else:
            self.update()
        return Step(share, norm, left_out)

    @cached_property
    def _guard(self) -> UpdateGuard:
        return UpdateGuard(self.base, self.trained, self.rates, self.world.device, self.config)

    def _local_grads(self) -> tuple[list[Tensor], bool]:
        """Return this rank's gradients, and whether other ranks hold other parts of them."""
        return [p.grad for p in self.trained if p.grad is not None], False

    @override
    @final
    def evaluate(self, fn: Fn, batch: Any) -> Any:
        with eval_mode(self.wrapped):
            return self.run_forward(fn, batch)

    @override
    @final
    def forward_only(self, fn: Fn, batch: Any) -> Any:
        with unrecorded_forward(self.model), self.apart_from_backward():
            return self.run_forward(fn, batch)

    def apart_from_backward(self) -> AbstractContextManager[None]:
        """Context manager around a forward in training that no backward follows."""
        return nullcontext()

    @override
    @final
    @contextmanager
    def whole(self) -> Generator[nn.Module]:
        with self.all_parameters(), plain_evaluation(self.call) as model:
            yield model

    def all_parameters(self) -> AbstractContextManager[None]:
        """Context manager: this rank has all parameters, and a forward neither gathers nor releases any."""
        return nullcontext()

    @override
    @final
    def pieces(self) -> Iterator[Piece]:
        self.before_state_access()
        state: Any = self.base.state
        for name, p in self.local_parameters():
            for key, held in {**state.get(p, {}), "weight": p}.items():
                piece = (key, held) if isinstance(held, Tensor) else encode_plain(key, held)
                if piece is None:
                    continue
                kind, value = piece
                if kind != "weight" and self._updates_whole(p):
                    if self.speaks_for(name, p):
                        yield Piece(name, kind, tuple(value.shape), Region(0, value.numel()), value)
                elif (self.splits_states_by_tensor and kind != "weight") or self.speaks_for(name, value):
                    for where, local in self.local_regions(name, value):
                        yield from split_blocks(
                            Piece(name, kind, self.whole_shape(name, value), where, local), self.base
                        )
        yield from buffer_pieces(self.buffers_to_save())

    @override
    @final
    def held_weights(self) -> Iterator[Piece]:
        self.before_state_access()
        for name, p in self.local_parameters():
            for where, local in self.local_regions(name, p):
                yield Piece(name, "weight", self.whole_shape(name, p), where, local)

    @override
    @final
    def full_weights(self) -> Iterator[Piece]:
        self.before_state_access()
        mine = {id(p) for p in self.trained}
        for name, p in self.local_parameters():
            if id(p) in mine:
                for where, local in self.local_regions(name, p.detach()):
                    yield Piece(name, "weight", self.whole_shape(name, p), where, local)

    @override
    @final
    def unsaved_values(self) -> Iterator[str]:
        state: Any = self.base.state
        for name, p in self.local_parameters():
            for key, value in state.get(p, {}).items():
                unknown = not isinstance(value, Tensor) and encode_plain(key, value) is None
                if unknown or (isinstance(value, Tensor) and key in KINDS_OF_MODEL):
                    yield describe_unsaved_value(key, name, value)

    @override
    @final
    @torch.no_grad()
    def restore(self, read: Read) -> None:
        self.before_state_access()
        state: Any = self.base.state
        mine = {id(p) for group in self.base.param_groups for p in group["params"]}
        for name, p in self.local_parameters():
            in_full = self._updates_whole(p)
            kinds = read.kinds(name) if id(p) in mine and in_full is not False else {"weight"}
            if isinstance(self.base, BlockStates):
                states, used = restore_blocks(self.base, read, name, p, kinds, self.local_regions)
                state[p].update(states)
                kinds = kinds - used
            for kind in sorted(kinds):
                if (key := plain_key(kind)) is not None:
                    state[p][key] = decode_plain(kind, read(name, kind, Region(0, 1)))
                    continue
                if kind == "weight":
                    value: Tensor = p
                else:
                    value = self._new_state(name, kind, p, read)
                    state[p][kind] = value = self._on_its_device(kind, value, p.device)
                    if in_full:
                        read.fill(value, name, kind, Region(0, value.numel()))
                        continue
                for where, local in self.local_regions(name, value):
                    read.fill(local, name, kind, where)
        restore_buffers(self.model.named_buffers(), read)

    @override
    @final
    def holdings(self) -> Iterator[Holding]:
        names: dict[Any, str] = {p: name for name, p in self.kept.items()}
        for name, p in self.kept.items():
            yield Holding("parameters", name, local_part(p))
            if p.grad is not None:
                yield Holding("gradients", name, local_part(p.grad))
        for p, state in self.base.state.items():
            for key, value in state.items():
                if isinstance(value, Tensor):
                    yield from state_holdings(names[p], key, local_part(value))
        yield from module_holdings(self.model)
        yield from self.extra_holdings()

    def _updates_whole(self, p: nn.Parameter) -> bool | None:
        """Return whether the optimizer updates the whole of a split matrix on this rank; None: it is no such matrix."""
        return self.base.owns(p) if isinstance(self.base, MatrixOptimizer) else None

    def extra_holdings(self) -> Iterator[Holding]:
        """Yield tensors that only this library keeps: gathered parameters, buckets."""
        yield from ()

    def _new_state(self, name: str, kind: str, p: nn.Parameter, read: Read) -> Tensor:
        """Return an optimizer's tensor to be filled: one like the parameter, a single number, or of a shape its own."""
        shape = read.shape(name, kind)
        if kind == "step" and not shape:
            return torch.zeros((), dtype=torch.float32)
        if self._updates_whole(p):
            dtype = p.dtype if shape == self.whole_shape(name, p) else None
            return torch.zeros(shape, dtype=dtype or read(name, kind, Region(0, prod(shape))).dtype, device=p.device)
        if shape == self.whole_shape(name, p):
            if isinstance(self.base, RoundedMoments) and kind in MOMENTS:
                return self.base.new_moment(p)
            return torch.empty_like(p)
        if shape and isinstance(p, DTensor):
            raise TaskError(
                f"the optimizer's {kind!r} of {name} has the shape {shape}, the parameter {tuple(p.shape)}: such a "
                "state is loaded where parameters are whole; choose parallel.shard: nothing, or optimizer"
            )
        return torch.zeros(shape, dtype=read(name, kind, Region(0, prod(shape))).dtype, device=p.device)

    def _on_its_device(self, kind: str, value: Tensor, device: torch.device) -> Tensor:
        """Move a step count to its parameter's device if the optimizer counts there."""
        return value.to(device) if kind == "step" and steps_on_device(self.base) else value
