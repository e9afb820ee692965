"""Engine of one mesh: stages of a pipeline, blocks split over `tensor`, sequences over `context`, FSDP2 beneath."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim import Optimizer
from typing_extensions import override

from unipar.backend import ExpertTokens, Fn, Holding, LossFn, Mark, Micro, Part, Region
from unipar.config import Config
from unipar.distributed.copies_by_machine import copies_by_machine
from unipar.distributed.device import has_own_memory
from unipar.distributed.mesh import Mesh
from unipar.distributed.world import World
from unipar.engines.batch_transfer import map_tensors, to_device
from unipar.engines.forward import ForwardCall, OpaqueBatch
from unipar.engines.fsdp2_sharded import ShardedEngine
from unipar.engines.gradients import clip_counted, scale_loss
from unipar.engines.state import is_first_copy, local_part
from unipar.planning.pipeline_order import microbatch_order
from unipar_mesh.context import SequenceSplit
from unipar_mesh.context.spread_attention import Choice
from unipar_mesh.expert.expert_parallel import arm_experts
from unipar_mesh.expert.token_counts import TokenCounts
from unipar_mesh.look_at_model import WholeModel
from unipar_mesh.model_split import LookAtModel, MeshSplit, ProofWay, look_together
from unipar_mesh.options import MeshOptions, options_of
from unipar_mesh.pipeline.channel import open_channel
from unipar_mesh.pipeline.stage import Arrival, Stage
from unipar_mesh.pipeline.torch_schedules import TorchScheduleExecutor, average_over_copies
from unipar_mesh.placement_of_parts import Placement, place_model
from unipar_mesh.proof.proof_of_blocks import WholeBlocks, prove_blocks, say_unproved
from unipar_mesh.proof.proof_of_model import prove, trained_and_narrowest_dtypes
from unipar_mesh.proof.router_ties import RouterTies
from unipar_mesh.refusal_sentences import refuse_part
from unipar_mesh.sequence.sequence_parts import join_before, part_alone
from unipar_mesh.tensor.tensor_model import CallsOfBlock, calls_of_blocks
from unipar_mesh.tensor.tensor_parallel import arm_block
from unipar_mesh.tensor.vocabulary import arm_vocabulary
from unipar_mesh.trials_without_trace import modules_not_fused


class MeshEngine(ShardedEngine):
    """Engine whose rank has some blocks of the model, a part of their matrices, and a shard of that."""

    def __init__(self, part: Part, config: Config, world: World, options: MeshOptions | None = None) -> None:
        refuse_part(part, config)
        options = options or options_of(config)
        self.axes, self.mesh = config.parallel.axes, world.mesh
        axes = self.axes
        self._stage_seat, self._stages = world.mesh.seat["pipeline"], axes.pipeline
        self.once = config.parallel.shard in ("nothing", "optimizer")
        self.dtype, narrowest = trained_and_narrowest_dtypes(part.module)
        world.groups.create_together()
        look, full = look_together(part, config, world, options.proof)
        self.split = MeshSplit.of(part, look, world, axes, vocabulary=options.vocabulary == "split")
        self._parts = self.split.own_parts(world.mesh.seat["tensor"])
        sites = calls_of_blocks(part.module, {} if axes.context > 1 else look.plans)
        shell = place_model(part.module, self.placement(config, world), world.device)
        super().__init__(replace(part, optimizer=partial(_optimizer_by_mesh, part.optimizer)), config, world)
        self._call_through(shell, part, config)
        self._count_elements_once()
        self._arm_tensor(part, sites)
        self._tokens = TokenCounts(self.split.experts, world)
        for layer in self.split.own_experts:
            arm_experts(part.module, layer, self.world.groups.experts(), count=self._tokens.add)
        self._sequences = self._arm_context(part, options.attention)
        self._stage, self._executor = self._arm_pipeline(part, shell)
        self._prove(part, look, full, narrowest, options.proof)
        self._tokens.forget()

    # Set-up, in this order

    def _call_through(self, shell: ForwardCall, part: Part, config: Config) -> None:
        """Call the model through the shell that FSDP2 has sharded, and let a library wrap model and optimizer."""
        shell.autocast, shell.cast = self.call.autocast, self.call.cast
        self.call = self.wrapped = shell
        self.wrap(part, config)
        self.divisor = float(self.world.data_size)

    def _count_elements_once(self) -> None:
        """Make groups of stages that share parameters; know of which gradients this rank counts the elements."""
        self._owner_groups = self._groups_of_owners(self.world)
        names = {id(p): name for name, p in self.kept.items()}
        self._counted = [self.speaks_for(names[id(p)], p) for p in self.trained]
        self._gradients_of_experts = [p for p in self.trained if names[id(p)] in self.split.names_of_experts]

    def _arm_tensor(self, part: Part, sites: Mapping[str, CallsOfBlock]) -> None:
        """Let blocks, embedding and head compute with parts of their matrices."""
        for name in self.split.own_blocks:
            if (plan := self.split.plans.get(name)) is not None:
                arm_block(block := part.module.get_submodule(name), plan, self.group("tensor"), sites=sites.get(name))
                if self.axes.sequence and plan.sequence is None:
                    join_before(block)
        if self.split.vocabulary is not None:
            arm_vocabulary(part.module, self.split.vocabulary, self.group("tensor"))

    def _arm_context(self, part: Part, way: Choice) -> SequenceSplit | None:
        """Return the hooks that cut sequences over `context`, if they are."""
        if self.axes.context == 1:
            return None
        own, blocks = self.split.own_blocks, self.split.facts.blocks
        first, last = own[0] == blocks[0], own[-1] == blocks[-1]
        sequences = SequenceSplit(part.module, own, self.group("context"), enters=first, leaves=last, attention=way)
        sequences.around_trial = partial(self._tokens.counting, on=False)
        sequences.arm()
        sequences.follow_length(part.module.get_submodule(blocks[0]))
        return sequences

    def _arm_pipeline(self, part: Part, shell: ForwardCall) -> tuple[Stage | None, TorchScheduleExecutor | None]:
        """Return this rank's only stage, or what runs its several stages by one of torch's schedules."""
        if self._stages == 1:
            return None, None
        facts = self.split.facts
        stages = [Stage(part.module, facts.blocks, first, end, facts.tuples) for first, end in self.split.ranges]
        self._channel = open_channel(self.world, self.axes)
        if self.axes.pieces == 1:
            (stage,) = stages
            if self._sequences is not None and not stage.is_last:
                stage.widen = self._sequences.widened
            stage.enter()
            return stage, None
        assert part.loss is not None
        needs = facts.needs[self._stage_seat :: self._stages]
        executor = TorchScheduleExecutor(
            shell, stages, needs, part.loss, self.axes, self.world, self._channel, once=self.once
        )
        return None, executor

    def _prove(
        self,
        part: Part,
        look: LookAtModel,
        full: WholeModel | WholeBlocks | None,
        narrowest: torch.dtype,
        way: ProofWay,
    ) -> None:
        """Raise an error unless the split model computes what the whole one does, on the sample."""
        if way == "off":
            say_unproved(self.world.rank)
            return
        assert part.loss is not None
        batch = look.batch_of(self.split.expert_seat)
        batch = to_device(batch, self.world.device) if has_own_memory(self.world.device) else batch
        proof: Any = partial(prove_blocks, sequences=self._sequences)
        if way == "whole":
            ties = RouterTies(look.choices_of(self.split.expert_seat), self.split.own_experts)
            proof = partial(prove, ties=ties)
        proof(self, part.loss, batch, full, dtype=narrowest, words=self.split.words)

    def wrap(self, part: Part, config: Config) -> None:
        """Let a library wrap model and optimizer, which has its parameters' parts by now; without one nothing does."""

    def group(self, axis: str) -> dist.ProcessGroup:
        """Return this rank's process group along `tensor` or `context`, in which parts of blocks meet."""
        return self.world.groups.group(axis)

    def placement(self, config: Config, world: World) -> Placement:
        """Return what this rank holds, and how FSDP2 splits it further."""
        ranks = world.data_size * self.axes.context
        settings: dict[str, Any] = {"reshard_after_forward": config.parallel.shard == "parameters"}
        mesh = None
        if ranks > 1 and self.axes.schedule != "zerobubble":
            over = config.parallel.shard_over or world.data_size
            if config.parallel.shard == "nothing":
                mesh = world.groups.copies_and_shards(1)
            elif over == "machine":
                mesh = world.groups.copies_of_ranks(*copies_by_machine(world.mesh, world.machines))
            else:
                mesh = world.groups.copies_and_shards(over * self.axes.context)
        gathered_once = self.once and self.axes.pieces == 1
        blocks = self.split.larger_blocks(self._parts) if gathered_once else self.split.own_blocks
        return Placement(self.split.absent, self._parts, mesh, blocks, *self._experts_of_rank(config, world), settings)

    def _experts_of_rank(self, config: Config, world: World) -> tuple[list[str], DeviceMesh | None]:
        """Return the modules of this rank's experts, and the mesh of ranks that train the same ones, if others do."""
        expert = self.axes.expert
        if expert == 1:
            return [], None
        over = config.parallel.shard_over or world.data_size
        assert isinstance(over, int)
        shards = 1 if config.parallel.shard == "nothing" else max(1, over // expert) * self.axes.context
        layers = self.split.own_experts
        names = [name for layer in layers for name in layer.sharded_modules(self.split.expert_seat, expert)]
        mesh = world.groups.copies_and_shards_of_experts(shards)
        return names, mesh if mesh.size() > 1 else None

    def _groups_of_owners(self, world: World) -> Mapping[tuple[int, ...], dist.ProcessGroup]:
        """Return this rank's group for each set of stages that share parameters; all ranks make all groups."""
        mine: dict[tuple[int, ...], dist.ProcessGroup] = {}
        for stages in sorted(set(self.split.shared.values())):
            groups = {
                tuple(Mesh.of(rank, world.size, **self.axes.sizes).rank_at(pipeline=stage) for stage in stages)
                for rank in range(world.size)
            }
            for ranks in sorted(groups):
                group = dist.new_group(list(ranks))
                if world.rank in ranks:
                    mine[stages] = cast("dist.ProcessGroup", group)
                    world.groups.axis_of_group[mine[stages].group_name] = "pipeline"
        return mine

    # Steps

    def _surrounded(self, fn: Fn) -> Fn:
        """Return the function with what a cut sequence needs around it."""
        return fn if self._sequences is None else partial(self._sequences.run_loss, fn)

    @override
    def forward_loss(self, fn: LossFn, micro: Micro) -> Tensor:
        return self.wrapped(self._surrounded(micro.bind(fn)), OpaqueBatch(micro.batch))

    @override
    def run_microbatches(self, fn: LossFn, micros: Sequence[Micro], divisor: float, mark: Mark) -> Tensor:
        with self._tokens.counting():
            if self._executor is not None:
                return self._executor.run(fn, micros, divisor, mark, None if self.scaler is None else self.scaler.scale)
            if self._stage is None:
                return super().run_microbatches(fn, micros, divisor, mark)
            return self._run_stage(self._stage, fn, micros, divisor, mark)

    @override
    def take_expert_tokens(self) -> Mapping[str, ExpertTokens]:
        return self._tokens.take()

    def _run_stage(self, stage: Stage, fn: LossFn, micros: Sequence[Micro], divisor: float, mark: Mark) -> Tensor:
        """Run forward and backward of this rank's only stage; return its share of the loss."""
        live: dict[int, tuple[Tensor, Tensor | None]] = {}
        share: Tensor | None = None
        count = len(micros)
        for turn in microbatch_order(self.axes.schedule, self._stages, self._stage_seat, count):
            if turn.way == "forward":
                mark("forward")
                out, hidden = self._forward_stage(stage, fn, micros[turn.micro], turn.micro)
                if stage.is_last:
                    out, share = scale_loss(out, micros[turn.micro].scale, divisor, share)
                    out = out if self.scaler is None else out * self.scaler.scale
                live[turn.micro] = out, hidden
                continue
            mark("backward")
            out, hidden = live.pop(turn.micro)
            gradient = None if stage.is_last else self._channel.receive_gradient(turn.micro, out)
            with self.sync(count, last=turn.micro == count - 1) or nullcontext():
                if stage.is_last:
                    self.backward(out)
                elif out.requires_grad:
                    torch.autograd.backward(out, gradient)
            if hidden is not None:
                self._channel.send_gradient(turn.micro, zeros_if_none(hidden.grad, hidden))
        self._channel.wait_for_all()
        return torch.zeros((), device=self.world.device) if share is None else share

    def _forward_stage(self, stage: Stage, fn: LossFn, micro: Micro, number: int) -> tuple[Tensor, Tensor | None]:
        """Run a microbatch through this stage; return its output, and the hidden states that it got."""
        got: list[Tensor] = []

        def receive() -> Arrival:
            arrival = self._channel.receive_hidden(gradient=True)
            got.append(arrival.hidden if arrival.leaf is None else arrival.leaf)
            return arrival

        stage.inlet = None if stage.is_first else receive
        bound = self._surrounded(micro.bind(fn))
        out = self.wrapped(partial(stage.run, bound), OpaqueBatch(micro.batch))
        stage.inlet = None  # it would keep what has arrived, and its gradient, until the next step
        if not stage.is_last:
            self._channel.send_hidden(number, out)
        return part_alone(out), got[0] if got else None

    @override
    def run_forward(self, fn: Fn, batch: Any) -> Any:
        fn = self._surrounded(fn)
        with modules_not_fused():
            if self._stages == 1:
                return super().run_forward(fn, batch)
            out = self._forward_alone(fn, batch) if self._executor is None else self._executor.forward(fn, batch)
        last = self._stages - 1
        outputs = [map_tensors(out, lambda t: t.cpu()) if self._stage_seat == last else None]
        dist.broadcast_object_list(outputs, self.mesh.rank_at(pipeline=last), group=self.world.groups.group("pipeline"))
        return to_device(outputs[0], self.world.device)

    def _forward_alone(self, fn: Fn, batch: Any) -> Any:
        """Return what `fn` returns on this rank: in the last stage, the answer."""
        stage = self._stage
        assert stage is not None
        passes = iter(range(-1, -1_000_000_000, -1))
        stage.inlet = None if stage.is_first else lambda: self._channel.receive_hidden(gradient=False)
        stage.outlet = None if stage.is_last else lambda hidden: self._channel.send_hidden(next(passes), hidden)
        stage.repeats = True
        try:
            out = self.wrapped(partial(stage.run, fn), OpaqueBatch(batch))
        finally:
            stage.outlet, stage.repeats = None, False
        self._channel.wait_for_all()
        return out

    @override
    def finish_reduction(self) -> None:
        """Add up the gradients of what several stages use: all of them have one and the same."""
        for name, stages in self.split.shared.items():
            if self._stage_seat in stages and (p := self.kept[name]).requires_grad:
                if p.grad is None:
                    p.grad = torch.zeros_like(p)
                dist.all_reduce(local_part(p.grad), group=self._owner_groups[stages])
        if self._gradients_of_experts:  # FSDP2 takes their mean over fewer ranks than those whose tokens they got
            grads = [local_part(p.grad) for p in self._gradients_of_experts if p.grad is not None]
            torch._foreach_mul_(grads, 1.0 / self.axes.expert)  # pyright: ignore[reportPrivateUsage]
        if self.axes.schedule == "zerobubble":
            average_over_copies(self.trained, self.world)

    @override
    def extra_holdings(self) -> Iterator[Holding]:
        yield from super().extra_holdings()
        if self._stages > 1:
            yield from self._channel.holdings()
        if self._executor is not None:
            yield from self._executor.holdings()

    # Norm: each element counts once

    @override
    def norm(self) -> Tensor:
        grads = self._counted_grads()
        norms = torch._foreach_norm(grads) if grads else []  # pyright: ignore[reportPrivateUsage]
        zero = torch.zeros((), dtype=torch.float64, device=self.world.device)
        total = torch.stack(norms).double().square().sum() if norms else zero
        norm = self.world.sum(total).sqrt()
        if self.limit < inf:
            factor = (self.limit / (norm + 1e-6)).clamp(max=1.0).to(self.dtype)
            torch._foreach_mul_(self._local_grads()[0], factor)  # pyright: ignore[reportPrivateUsage]
        return norm.to(self.dtype)

    @override
    def norm_in_fp64(self) -> Tensor:
        return clip_counted(self._local_grads()[0], self._counted_grads(), self.limit, self.world)

    def _counted_grads(self) -> list[Tensor]:
        return [
            local_part(p.grad)
            for p, mine in zip(self.trained, self._counted, strict=True)
            if mine and p.grad is not None
        ]

    # State: who holds what of the whole model

    @override
    def whole_shape(self, name: str, t: Tensor) -> tuple[int, ...]:
        return self.split.shapes[name] if name in self._parts and t.ndim else tuple(t.shape)

    @override
    def local_regions(self, name: str, t: Tensor) -> Iterator[tuple[Region, Tensor]]:
        part = self._parts.get(name)
        if part is None or t.ndim == 0:
            yield from super().local_regions(name, t)
            return
        local, first = local_part(t), 0
        if isinstance(t, DTensor):
            _, (first, *_) = compute_local_shape_and_global_offset(t.shape, t.device_mesh, t.placements)
        regions = part.cut.regions(part.seat, first, len(local))
        for region, (rows, *columns) in regions:
            yield region, local[(slice(rows.start - first, rows.stop - first), *columns)]
        if not regions:
            yield Region(0, 0), local.view(-1)

    @override
    def speaks_for(self, name: str, t: Tensor) -> bool:
        seat = self.mesh.seat
        if self.split.shared.get(name, (self._stage_seat,))[0] != self._stage_seat:
            return False
        if seat["tensor"] != 0 and (name not in self.split.cuts or t.ndim == 0):
            return False
        if isinstance(t, DTensor):
            return is_first_copy(t, self.world)
        differs = name in self.split.names_of_experts and (t.ndim > 0 or name not in self.split.expert_cuts)
        return seat["data"] == (self.split.expert_seat if differs else 0) and seat["context"] == 0

    @override
    def buffers_to_save(self) -> Iterator[tuple[str, Tensor]]:
        for name, buffer in self.model.named_buffers():
            if self.world.rank == self._home_of_buffer(name):
                yield name, buffer

    @override
    def share_buffers(self) -> None:
        if self.world.size > 1:
            for name, buffer in self.model.named_buffers():
                dist.broadcast(buffer, self._home_of_buffer(name))

    def _home_of_buffer(self, name: str) -> int:
        return self.mesh.rank_at(pipeline=self.split.seat_of_buffer(name), data=0, context=0, tensor=0)


def _optimizer_by_mesh(make: Callable[[nn.Module], Optimizer], module: nn.Module) -> Optimizer:
    """Return the optimizer, with parameters of one mesh in each of its groups: kernels take no others together."""
    optimizer = make(module)
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        by_mesh: dict[Any, list[Any]] = {}
        for p in group["params"]:
            by_mesh.setdefault(p.device_mesh if isinstance(p, DTensor) else None, []).append(p)
        groups += [{**group, "params": params} for params in by_mesh.values()]
    if len(groups) > len(optimizer.param_groups):
        optimizer.param_groups[:] = groups
    return optimizer


def zeros_if_none(gradient: Tensor | None, like: Tensor) -> Tensor:
    """Return a gradient, or zeros where nothing depended on the tensor."""
    return torch.zeros_like(like) if gradient is None else gradient
