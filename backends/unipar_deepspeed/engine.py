"""DeepSpeed, ZeRO 0 to 3: its engine reduces, clips and steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from math import inf
from typing import Any, final

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from unipar.backend import Backend, Engine, Fn, Holding, Mark, Micro, Part, Piece, Read, Step, cells
from unipar.backend.joining import meet
from unipar.backend.precision import autocast_as, batch_as
from unipar.config import SHARDS, Config
from unipar.distributed.place import Place
from unipar.distributed.world import World
from unipar.engines.forward import Call, Held, resting
from unipar.engines.gradients import clip64, clipped, scaled
from unipar.engines.learning_rate import Rates, rates_of
from unipar.engines.loss_scale import Scaler
from unipar.engines.placement import arrive, lower, refuse_scalars, settle, travel
from unipar.engines.state import buffers, held_by_modules, restore_buffers
from unipar.errors import TaskError
from unipar_deepspeed.holdings import held
from unipar_deepspeed.offload import offloaded
from unipar_deepspeed.options import clear, options_of
from unipar_deepspeed.partitions import Holder, keep_masters

Start = Callable[[nn.Module, Optimizer, dict[str, Any]], Any]
"""Who calls `deepspeed.initialize`: here, or a library that wraps it. Gives DeepSpeed's engine."""


def started(model: nn.Module, optimizer: Optimizer, told: dict[str, Any]) -> Any:
    return deepspeed.initialize(model=model, optimizer=optimizer, config=told, dist_init_required=False)[0]


@final
class Zero(Engine):
    def __init__(self, part: Part, config: Config, world: World, backend: Backend, start: Start = started) -> None:
        refuse_scalars(part.module, str(cells.cell_of(config)))
        self.world, self.model = world, part.module
        self.stage = SHARDS.index(config.parallel.shard)
        clip = config.train.clipping
        self.limit = inf if clip is None else float(clip.max)
        self.fp64 = clip is not None and clip.norm == "fp64"
        self.scaler = Scaler() if config.train.precision == "fp16" else None
        parameters = sum(p.numel() for p in part.module.parameters())
        told = backend.native_config(config, parameters)
        masters = keep_masters(part.module, config, world)  # before the library rounds them
        if self.stage == 3:
            low = torch.bfloat16 if config.train.precision == "bf16-master" else None
            _split(part.module, told, world, low)
        else:
            arrive(part.module, world.device)
        if config.train.precision == "bf16-master":
            lower(part.module, torch.bfloat16)
        optimizer = offloaded(part.optimizer(part.module), config)
        if self.stage and optimizer.state:
            raise TaskError(
                f"{cells.cell_of(config)} cannot take {type(optimizer).__name__}: it makes its states before the "
                "first step, for parameters that ZeRO then replaces; set parallel.shard: nothing, or backend: native"
            )
        self.rates = Rates(optimizer)
        self.trained = tuple(p for p in part.module.parameters() if p.requires_grad)
        self.call = Call(part.module, world.device, autocast=autocast_as(config.train.precision))
        self.call.cast = batch_as(config.train.precision)
        if config.train.precision == "fp64":
            _allow_fp64()
        self.engine: Any = start(self.call, optimizer, told)
        if config.train.precision == "fp64":
            self.engine.communication_data_type = torch.float64
        self.zero, self.base = self.engine.optimizer, self.engine.basic_optimizer
        self.bare = self.zero is self.base  # stage 0 in full precision: gradients lie in the open
        world.alone.append(lambda: clear(config, [world.rank]))
        self.swapped = options_of(config).offload_optimizer == "disk"
        self.holder = Holder(self.model, self.engine, self.stage, world, swapped=self.swapped)
        self.holder.forget_first_step()
        if masters is not None:
            self.holder.put("weight", masters)

    @override
    def step(self, fn: Fn, micros: Sequence[Micro], factor: float, mark: Mark) -> Step:
        engine, share, count = self.engine, None, len(micros)
        divisor = self.world.size * (1.0 if self.scaler is None else self.scaler.scale)
        for i, micro in enumerate(micros, 1):
            engine.set_gradient_accumulation_boundary(i == count)
            mark("forward")
            loss: Tensor = engine(fn, Held(micro.batch))
            mark("backward")
            mine, share = scaled(loss, micro.scale, divisor, share)
            engine.backward(mine, scale_wrt_gas=False)
            if i == 1 and self.stage == 3:
                self.holder.forget_gradients()
        mark("update")
        self.rates.set(self.base, factor)
        norm = self._clip()
        assert share is not None
        if self.stage == 0 and self.scaler is not None:
            assert norm is not None
            if self.scaler.overflowed(norm):
                engine.zero_grad()
                return Step(share, norm, skipped=True)
        engine.step()
        skipped = bool(getattr(self.zero, "overflow", False))
        if norm is None or skipped:
            norm = torch.as_tensor(engine.get_global_grad_norm(), device=self.world.device)
        if self.stage and self.scaler is not None:
            self.zero.loss_scale = 1.0  # the loss is scaled here, not in its backward
            self.scaler.overflowed(norm)
        return Step(share, norm, skipped=skipped)

    def _clip(self) -> Tensor | None:
        """The norm where the clip is ours; None where the library clips inside its step."""
        if self.stage == 0:
            for p in self.trained:
                if p.grad is None:
                    p.grad = torch.zeros_like(p)
            grads = [p.grad for p in self.trained if p.grad is not None]
            if self.scaler is not None:
                self.scaler.unscale(grads)
            if self.fp64:
                return clip64((grads, False), self.limit, self.world)
            return clipped(self.trained, self.limit) if self.bare else None
        if not self.fp64:
            if self.scaler is not None:
                self.zero.loss_scale = self.scaler.scale  # its step divides gradients and norm by it
            return None
        partition = [g for held in self.zero.averaged_gradients.values() for g in held or []]  # padding is zero
        if self.scaler is not None:
            self.scaler.unscale(partition)
        return clip64((partition, True), self.limit, self.world)

    @override
    def evaluate(self, fn: Fn, batch: Any) -> Any:
        with resting(self.engine):
            return self.engine(fn, Held(batch))

    @override
    def call_frozen(self, fn: Fn, given: Any) -> Any:
        """Without the library's engine, which would take the outer loss's backward for its own."""
        return self.call(fn, Held(given))

    @override
    def pieces(self) -> Iterator[Piece]:
        yield from self.holder.pieces()
        yield from buffers(self.model, self.world)

    @override
    def restore(self, read: Read) -> None:
        if self.swapped:
            raise TaskError(
                "options.deepspeed.offload_optimizer: disk takes no state in; put it in with cpu, or begin anew"
            )
        self.holder.restore(read)
        restore_buffers(self.model, read)

    @override
    def holdings(self) -> Iterator[Holding]:
        yield from held(self.model, self.engine)
        yield from held_by_modules(self.model)

    @override
    def learning_rates(self) -> list[float]:
        return rates_of(self.base)

    @override
    def close(self) -> None:
        self.engine.destroy()


def join(config: Config, place: Place) -> World:
    """Our own process group first; DeepSpeed takes it over."""
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    world = meet(config, place)
    world.tell(LOCAL_RANK=place.local_rank)  # it insists
    world.guard("MASTER_ADDR", "MASTER_PORT")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiles for a minute, and leaves /dev/shm full
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
    world.alone.append(_forget)
    return world.agreed("DeepSpeed", rank=deepspeed.comm.get_rank(), size=deepspeed.comm.get_world_size())


def _forget() -> None:
    """It keeps this world's groups in many places, for a next run that has others."""
    deepspeed.comm.destroy_process_group()
    deepspeed.comm.comm.cdb = None


def _split(module: nn.Module, told: dict[str, Any], world: World, low: torch.dtype | None) -> None:
    """Rank 0's parameters, one by one, into ZeRO-3's partitions."""
    first: list[Any] = []

    def place(p: Tensor) -> Tensor:
        new: Any = nn.Parameter(travel(p, world.device).to(low or p.dtype), p.requires_grad)
        if first:
            first[0].convert_to_zero_parameters(param_list=[new])
        else:
            holder: Any = nn.Module()
            holder.p = new
            deepspeed.zero.Init(module=holder, config_dict_or_path=told)
            first.append(new)
        return new

    settle(module, place, world.device)


def _allow_fp64() -> None:
    """The library's list for the CPU lacks it, though stage 0 needs nothing that fp64 has not."""
    accelerator: Any = get_accelerator()
    known: list[torch.dtype] = list(accelerator.supported_dtypes())
    if torch.float64 not in known:
        accelerator.supported_dtypes = lambda: [*known, torch.float64]
