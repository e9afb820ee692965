"""Engine of DeepSpeed, ZeRO 0 to 3: DeepSpeed's own engine reduces, clips and steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any, final

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override
from unipar_mesh.expert.token_counts import TokenCounts
from unipar_mesh.look_at_model import WholeModel

from unipar.backend import Backend, ExpertTokens, Factor, Fn, Holding, LossFn, Mark, Micro, Part, Piece, Read, Step
from unipar.backend import offered_strategies as strategies
from unipar.backend.joining import meet
from unipar.backend.precision import autocast_dtype, batch_dtype
from unipar.config import SHARDS, Config
from unipar.distributed.place import Place
from unipar.distributed.world import World
from unipar.engines.forward import ForwardCall, OpaqueBatch, eval_mode, plain_evaluation, unrecorded_forward
from unipar.engines.gradients import clip_counted, clip_gradients, clip_in_fp64, scale_loss
from unipar.engines.learning_rate import BaseRates
from unipar.engines.optimizer_engine import OptimizerEngine
from unipar.engines.placement import (
    broadcast_model,
    broadcast_tensor,
    cast_buffers,
    place_tensors,
    refuse_scalar_parameters,
)
from unipar.engines.state import buffer_pieces, module_holdings, restore_buffers
from unipar.engines.update_guard import UpdateGuard, skips_updates
from unipar.errors import TaskError
from unipar_deepspeed.expert_parallel import (
    ExpertSplit,
    check_replaced,
    count_tokens,
    let_experts_follow_autocast,
    plan_experts,
    regroup,
    replaceable_layers,
)
from unipar_deepspeed.gathered_parameters import all_parameters, parameters_away
from unipar_deepspeed.matrices.states import names_of_matrices
from unipar_deepspeed.offload import cpu_optimizer_for
from unipar_deepspeed.options import options_of, remove_offload_files
from unipar_deepspeed.partitions import ZeroPartitions, keep_exact_values
from unipar_deepspeed.tensor_parallel_by_plan import (
    TensorSplit,
    finish_split,
    forget_groups,
    keep_sizes,
    let_sizes,
    plan_tensor,
    prove_split,
    use_groups,
)
from unipar_deepspeed.zero_holdings import zero_holdings

InitializeEngine = Callable[[nn.Module, Any, dict[str, Any]], Any]
"""Function that calls `deepspeed.initialize`, itself or through a library that wraps it, and returns the engine."""


def initialize_deepspeed(model: nn.Module, optimizer: Any, settings: dict[str, Any]) -> Any:
    """Return DeepSpeed's engine for the model; `optimizer`: one, or a function that returns it."""
    return deepspeed.initialize(model=model, optimizer=optimizer, config=settings, dist_init_required=False)[0]


@final
class ZeroEngine(OptimizerEngine):
    """Engine of one part under ZeRO 0 to 3."""

    scales_on_host = True
    traced = MappingProxyType({"_clip": "clip"})

    def __init__(
        self, part: Part, config: Config, world: World, backend: Backend, start: InitializeEngine = initialize_deepspeed
    ) -> None:
        refuse_scalar_parameters(part.module, str(strategies.strategy_of(config)))
        super().__init__(part, config, world)
        self.stage = SHARDS.index(config.parallel.shard)
        split, full = _plan_split(part, config, world)
        use_groups(world)
        named = part.module.named_parameters()
        parameters = sum(p.numel() if split is None else split.numel(name, p) for name, p in named)
        settings = backend.native_config(config, parameters)
        if split is not None:
            settings[split.key] = split.section("model.")
        masters = keep_exact_values(part.module, config, world)  # before DeepSpeed rounds the parameters to bf16
        if self.stage == 3:
            low = torch.bfloat16 if config.train.precision == "bf16-master" else None
            _partition_parameters(part.module, settings, world, low)
        else:
            broadcast_model(part.module, world.device)
        if config.train.precision == "bf16-master":
            cast_buffers(part.module, torch.bfloat16)
        optimizer = cpu_optimizer_for(part.optimizer(part.module), config)
        matrices = names_of_matrices(part.module, optimizer)
        if matrices and options_of(config).offload_optimizer != "none":
            raise TaskError(
                f"options.deepspeed.offload_optimizer: {options_of(config).offload_optimizer} is not available with "
                f"{type(optimizer).__name__}, which joins matrices on the device; leave one of them out"
            )
        if matrices and isinstance(split, ExpertSplit):
            raise TaskError(
                f"parallel.expert: {split.ranks} is not available with {type(optimizer).__name__}, which updates whole "
                "matrices: no run of DeepSpeed's AutoEP with it has been compared with one process; leave one of them "
                "out, or use backend: native"
            )
        if self.stage and optimizer.state:
            raise TaskError(
                f"{strategies.strategy_of(config)} does not support {type(optimizer).__name__}: it creates its states "
                "before the first step, for parameters that ZeRO then replaces; set parallel.shard: nothing, or "
                "backend: native"
            )
        self.call = ForwardCall(part.module, world.device, autocast=autocast_dtype(config.train.precision))
        self.call.cast = batch_dtype(config.train.precision)
        if config.train.precision == "fp64":
            _allow_fp64()
        self._tokens = TokenCounts((), world)
        self.engine: Any = self._start(part, split, partial(start, self.call), optimizer, settings)
        self.trained = tuple(p for p in part.module.parameters() if p.requires_grad)
        if config.train.precision == "fp64":
            self.engine.communication_data_type = torch.float64
        self.zero, self.base = self.engine.optimizer, self.engine.basic_optimizer
        self.bare = self.zero is self.base  # stage 0 in full precision: gradients are in `p.grad`
        world.local_closers.append(lambda: remove_offload_files(config, [world.rank]))
        self.swapped = options_of(config).offload_optimizer == "disk"
        self.holder = ZeroPartitions(
            self.model, self.engine, self.stage, world, split=split, swapped=self.swapped, matrices=matrices
        )
        self.holder.forget_first_step()
        if masters is not None:
            self.holder.put_masters(masters, world.device)
        if split is not None and full is not None:
            prove_split(part, split, self.call, world, full, config)
            if self.stage == 3:
                self.zero._partition_all_parameters()  # the proof's backward ended before the hooks that do it

    def _start(
        self,
        part: Part,
        split: TensorSplit | ExpertSplit | None,
        start: Callable[[Any, dict[str, Any]], Any],
        optimizer: Optimizer,
        settings: dict[str, Any],
    ) -> Any:
        """Return DeepSpeed's engine, which cuts the model as planned while it starts."""
        if isinstance(split, ExpertSplit):
            users = {id(p): name for name, p in part.module.named_parameters()}

            def make(parameters: Any) -> Optimizer:
                return self._with_rates(regroup(optimizer, users, part.module, split))

            with replaceable_layers(self.call, split):
                engine = start(make, settings)
            check_replaced(part.module, users.values(), split)
            let_experts_follow_autocast(part.module, split)
            self._tokens = count_tokens(part.module, split, self.world)
            return engine
        marked = [] if split is None else keep_sizes(part.module, split)
        engine = start(self._with_rates(optimizer), settings)
        let_sizes(marked)
        if split is not None:
            finish_split(part, split, engine, self.world)
        return engine

    def _with_rates(self, optimizer: Optimizer) -> Optimizer:
        """Return the optimizer, of whose groups, which are final here, the engine now sets the learning rates."""
        self.rates = BaseRates(optimizer)
        return optimizer

    @override
    def step(self, fn: LossFn, micros: Sequence[Micro], factor: Factor, mark: Mark) -> Step:
        engine, share, count = self.engine, None, len(micros)
        divisor = self.world.data_size * (1.0 if self.scaler is None else float(self.scaler.scale))
        for i, micro in enumerate(micros, 1):
            engine.set_gradient_accumulation_boundary(i == count)
            mark("forward")
            with self._tokens.counting():
                loss: Tensor = engine(fn, OpaqueBatch(micro.batch), micro.number)
            mark("backward")
            mine, share = scale_loss(loss, micro.scale, divisor, share)
            engine.backward(mine, scale_wrt_gas=False)
            if i == 1 and self.stage == 3:
                self.holder.forget_gradients()
        mark("update")
        self.rates.set(self.base, factor)
        norm = self._clip()
        assert share is not None
        if not self.world.leads:
            share = torch.zeros_like(share)  # another rank of `tensor` trained on the same samples
        left_out: bool | Tensor = False
        if norm is not None and self.stage == 0:
            left_out = self._guard.leaves_out(norm, self.scaler)
            if left_out is True:
                engine.zero_grad()
                return Step(share, norm, left_out)
        engine.step()
        skipped = left_out if isinstance(left_out, Tensor) else bool(getattr(self.zero, "overflow", False))
        if norm is None or skipped is True:
            norm = self._norm_of_library()
        if self.stage and self.scaler is not None:
            self.zero.loss_scale = 1.0  # the loss is scaled in `step`, not in DeepSpeed's backward
            self.scaler.overflow(norm)
            self.scaler.check()
        return Step(share, norm, skipped=skipped)

    @cached_property
    def _guard(self) -> UpdateGuard:
        waits = skips_updates(self.config)  # the rate, which then depends on it, is a number that DeepSpeed reads
        return UpdateGuard(self.base, self.trained, self.rates, self.world.device, self.config, waits=waits)

    def _norm_of_library(self) -> Tensor:
        """Return the norm that DeepSpeed's step has computed, on the device; a number is put there without a wait."""
        norm: Any = self.engine.get_global_grad_norm()
        if isinstance(norm, Tensor) and norm.device == self.world.device:
            return norm
        return torch.full((), float(norm), device=self.world.device)

    def _clip(self) -> Tensor | None:
        """Clip, and return the norm; return None where DeepSpeed clips in its own step."""
        if self.stage == 0:
            for p in self.trained:
                if p.grad is None:
                    p.grad = torch.zeros_like(p)
            grads = [p.grad for p in self.trained if p.grad is not None]
            if self.scaler is not None:
                self.scaler.unscale(grads)
            if self.holder.split is not None and (self.fp64 or self.bare):
                counted = [p.grad for p in self.trained if self.holder.counts_whole(p) and p.grad is not None]
                return clip_counted(grads, counted, self.limit, self.world)
            if self.fp64:
                return clip_in_fp64((grads, False), self.limit, self.world)
            return clip_gradients(self.trained, self.limit) if self.bare else None
        if not self.fp64:
            if self.scaler is not None:
                self.zero.loss_scale = float(self.scaler.scale)  # DeepSpeed's step divides gradients and norm by it
            return None
        partition = [g for held in self.zero.averaged_gradients.values() for g in held or []]  # padding is zero
        if self.scaler is not None:
            self.scaler.unscale(partition)
        if self.holder.split is not None:
            return clip_counted(partition, list(self.holder.counted_gradients()), self.limit, self.world)
        return clip_in_fp64((partition, True), self.limit, self.world)

    @override
    def take_expert_tokens(self) -> Mapping[str, ExpertTokens]:
        return self._tokens.take()

    @override
    def evaluate(self, fn: Fn, batch: Any) -> Any:
        with eval_mode(self.engine):
            return self.engine(fn, OpaqueBatch(batch))

    @override
    def forward_only(self, fn: Fn, batch: Any) -> Any:
        with unrecorded_forward(self.model):
            return self.call(fn, OpaqueBatch(batch))

    @override
    @contextmanager
    def whole(self) -> Generator[nn.Module]:
        with all_parameters(self.model), plain_evaluation(self.call) as model:
            yield model

    @override
    def whole_bytes(self) -> int:
        return sum(p.ds_numel * p.element_size() for p in parameters_away(self.model))

    @override
    def pieces(self) -> Iterator[Piece]:
        yield from self.holder.pieces()
        if self.world.rank == 0:
            yield from buffer_pieces(self._saved_buffers())

    @override
    def held_weights(self) -> Iterator[Piece]:
        return self.holder.held_weights()

    @override
    def full_weights(self) -> Iterator[Piece]:
        return self.holder.full_weights()

    @override
    def use_full_weights(self) -> None:
        self.holder.use_masters()

    @override
    def unsaved_values(self) -> Iterator[str]:
        return self.holder.unsaved_values()

    @override
    def restore(self, read: Read) -> None:
        if self.swapped:
            raise TaskError(
                "options.deepspeed.offload_optimizer: disk cannot load a saved state; load it with cpu, or start a new "
                "run"
            )
        self.holder.restore(read)
        restore_buffers(self._saved_buffers(), read)

    def _saved_buffers(self) -> Iterable[tuple[str, Tensor]]:
        """Return the buffers by the user's names."""
        split, named = self.holder.split, self.model.named_buffers()
        return split.saved_buffers(self.model) if isinstance(split, ExpertSplit) else named

    @override
    def holdings(self) -> Iterator[Holding]:
        yield from zero_holdings(self.model, self.engine)
        yield from module_holdings(self.model)

    @override
    def close(self) -> None:
        self.engine.destroy()


def _plan_split(part: Part, config: Config, world: World) -> tuple[TensorSplit | ExpertSplit | None, WholeModel | None]:
    """Return how DeepSpeed is to split the model, and loss and gradients of the whole one; None if it is not split."""
    if config.parallel.tensor > 1:
        return plan_tensor(part, config, world)
    return plan_experts(part, config, world) if config.parallel.expert > 1 else (None, None)


def join(config: Config, place: Place) -> World:
    """Create unipar's process group, and start DeepSpeed on it."""
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    world = meet(config, place)
    world.set_variables(LOCAL_RANK=world.local_rank_for_libraries)  # DeepSpeed requires it, and uses that GPU
    world.restore_variables("MASTER_ADDR", "MASTER_PORT")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiles for a minute, leaves files in /dev/shm
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
    world.local_closers.append(lambda: reset_deepspeed(ends_group=world.owns_group))
    return world.require_same_world("DeepSpeed", rank=deepspeed.comm.get_rank(), size=deepspeed.comm.get_world_size())


def reset_deepspeed(*, ends_group: bool = True) -> None:
    """Drop the process groups that DeepSpeed keeps: the next run in this process has others.

    `ends_group`: whether the process group that it has adopted ends with the run.
    """
    forget_groups()
    if ends_group:
        deepspeed.comm.destroy_process_group()
    deepspeed.comm.comm.cdb = None


def _partition_parameters(module: nn.Module, settings: dict[str, Any], world: World, low: torch.dtype | None) -> None:
    """Send rank 0's parameters to all ranks, one at a time, and put them into ZeRO-3's partitions."""
    first: list[Any] = []

    def place(p: Tensor) -> Tensor:
        new: Any = nn.Parameter(broadcast_tensor(p, world.device).to(low or p.dtype), p.requires_grad)
        if first:
            first[0].convert_to_zero_parameters(param_list=[new])
        else:
            holder: Any = nn.Module()
            holder.p = new
            among = world.groups.group("data") if world.data_size < world.size else None
            deepspeed.zero.Init(module=holder, data_parallel_group=among, config_dict_or_path=settings)
            first.append(new)
        return new

    place_tensors(module, place, world.device)


def _allow_fp64() -> None:
    """Add fp64 to the dtypes that DeepSpeed accepts on the CPU: its list lacks fp64, though stage 0 works with it."""
    accelerator: Any = get_accelerator()
    known: list[torch.dtype] = list(accelerator.supported_dtypes())
    if torch.float64 not in known:
        accelerator.supported_dtypes = lambda: [*known, torch.float64]
