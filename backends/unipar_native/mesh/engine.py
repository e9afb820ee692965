"""Engine of one mesh: stages of a pipeline, blocks split over `tensor`, sequences over `context`, FSDP2 beneath."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from typing_extensions import override

from unipar.backend import Fn, Holding, LossFn, Mark, Micro, Part, Region
from unipar.backend.precision import batch_dtype
from unipar.config import Config
from unipar.distributed.copies import copies_by_machine
from unipar.distributed.device import has_own_memory
from unipar.distributed.mesh import Mesh
from unipar.distributed.world import World
from unipar.engines.batch import cast_floats, map_tensors, to_device
from unipar.engines.forward import OpaqueBatch
from unipar.engines.gradients import clip_counted, scale_loss
from unipar.engines.state import is_first_copy, local_part
from unipar.errors import TaskError
from unipar.planning.pipeline import microbatch_order
from unipar_native.fsdp2 import ShardedEngine
from unipar_native.mesh.birth import Placement, place_model
from unipar_native.mesh.block_proof import WholeBlocks, blocks_to_prove, prove_blocks, say_unproved, sketch_blocks
from unipar_native.mesh.context import SequenceSplit
from unipar_native.mesh.context.attention import Way
from unipar_native.mesh.pipeline.channel import open_channel
from unipar_native.mesh.pipeline.stage import Arrival, Stage
from unipar_native.mesh.pipeline.torch_schedules import TorchScheduleExecutor, average_over_copies
from unipar_native.mesh.probe import ModelFacts, WholeModel, look_at_model, names_in_several, whole_gradients
from unipar_native.mesh.proof import prove, trained_and_narrowest_dtypes
from unipar_native.mesh.sequence.parts import join_before, part_alone
from unipar_native.mesh.state_kept import modules_not_fused
from unipar_native.mesh.tensor.cuts import BlockPlan
from unipar_native.mesh.tensor.vocabulary import arm_vocabulary, find_vocabulary
from unipar_native.mesh.tensor_model import calls_of_blocks, cuts_of_model, plan_blocks
from unipar_native.mesh.tensor_parallel import arm_block
from unipar_native.mesh.words import refuse_empty_plans, refuse_part
from unipar_native.options import NativeOptions, options_of


class _Look(NamedTuple):
    """Sample, facts of the model, and plans of its blocks: what all ranks need to split it alike."""

    batch: Any
    facts: ModelFacts
    plans: Mapping[str, BlockPlan]


class MeshEngine(ShardedEngine):
    """Engine whose rank has some blocks of the model, a part of their matrices, and a shard of that."""

    def __init__(self, part: Part, config: Config, world: World, options: NativeOptions | None = None) -> None:
        self.axes, self.mesh = config.parallel.axes, world.mesh
        self._stage_seat, self._stages = world.mesh.seat["pipeline"], self.axes.pipeline
        refuse_part(part, config)
        world.groups.devices  # noqa: B018 - made here by all ranks together
        options = options or options_of(config)
        told, whole = self._look(part, config, world, options.proof)
        batch, facts, plans = told
        self._blocks, self._buffer_stages, self._cuts = facts.blocks, facts.buffer_stages, facts.cuts
        self._needs = facts.needs_of_ranks(self._stages)
        trained = {name for name, p in part.module.named_parameters() if p.requires_grad}
        for seat, names in enumerate(self._needs):  # on all ranks alike, so that none waits for one that has left
            if not names & trained:
                its = [facts.blocks[i] for first, end in self._ranges_of(seat) for i in range(first, end)]
                raise TaskError(
                    f"stage {seat} of the pipeline has no trained parameter (its blocks are {', '.join(its)}): name "
                    "other cuts in the task's cuts(stages), or leave parallel.pipeline out"
                )
        self._shared = dict(names_in_several(self._needs))
        self._shapes = {name: tuple(p.shape) for name, p in part.module.named_parameters()}
        self.dtype, narrowest = trained_and_narrowest_dtypes(part.module)
        vocabulary = None
        if options.vocabulary == "split":
            vocabulary = find_vocabulary(part.module, part.blocks, self.axes.tensor)
        self._parts = cuts_of_model(part.module, plans, vocabulary, self.axes.tensor)
        ranges = self._ranges_of(self._stage_seat)
        own = [name for first, end in ranges for name in facts.blocks[first:end]]
        self.once = config.parallel.shard in ("nothing", "optimizer")
        calls = calls_of_blocks(part.module, {} if self.axes.context > 1 else plans)
        shell = place_model(part.module, own, self.placement(config, world), world.device)
        super().__init__(part, config, world)
        shell.autocast, shell.cast = self.call.autocast, self.call.cast
        self.call = self.wrapped = shell
        self.wrap(part, config)
        self.divisor = float(world.shares)
        self._owner_groups = self._groups_of_owners(world)
        names = {id(p): name for name, p in self.kept.items()}
        self._counted = [self.speaks_for(names[id(p)], p) for p in self.trained]
        for name in own:
            if (plan := plans.get(name)) is not None:
                arm_block(block := part.module.get_submodule(name), plan, self.group("tensor"), sites=calls.get(name))
                if self.axes.sequence and plan.sequence is None:
                    join_before(block)
        stages = [Stage(part.module, facts.blocks, first, end, facts.tuples) for first, end in ranges]
        self._stage = stages[0] if self._stages > 1 and self.axes.pieces == 1 else None
        if vocabulary is not None:
            arm_vocabulary(part.module, vocabulary, self.group("tensor"))
        self._sequences: SequenceSplit | None = None
        self._split_sequences(part, own, options.attention)
        self._executor: TorchScheduleExecutor | None = None
        if self._stages > 1:
            self._channel = open_channel(world, self.axes)
        if self._stage is not None:
            self._stage.enter()
        elif self._stages > 1:
            assert part.loss is not None
            needs = facts.needs[self._stage_seat :: self._stages]
            self._executor = TorchScheduleExecutor(
                shell, stages, needs, part.loss, self.axes, world, self._channel, once=self.once
            )
        if has_own_memory(world.device):
            batch = to_device(batch, world.device)
        assert part.loss is not None
        if options.proof == "off":
            say_unproved(world.rank)
        else:
            proof = prove if options.proof == "whole" else partial(prove_blocks, sequences=self._sequences)
            proof(self, part.loss, batch, whole, dtype=narrowest, words=self.split_words)

    # Set-up

    def _ranges_of(self, seat: int) -> list[Sequence[int]]:
        """Return the first and the end of the blocks of each stage on the ranks of this seat."""
        return [self._cuts[stage : stage + 2] for stage in range(seat, self.axes.stages, self._stages)]

    def _look(
        self, part: Part, config: Config, world: World, proof: Literal["whole", "blocks", "off"]
    ) -> tuple[_Look, Any]:
        """Return what rank 0 finds out about the whole model; on rank 0, what it computes on the sample as well."""
        assert part.loss is not None
        assert part.sample is not None
        whole: WholeModel | WholeBlocks | None = None
        told: list[Any] = [None]
        if world.rank == 0:
            try:
                batch = part.sample()
                cast_to = batch_dtype(config.train.precision)
                given = batch if cast_to is None else cast_floats(batch, cast_to)
                facts = look_at_model(part.module, part.blocks, part.loss, given, self.axes.stages, part.cuts)
                plans = self._plan_tensor(part, facts, world)
                if proof == "whole":
                    whole = whole_gradients(part.module, part.loss, given)
                elif proof == "blocks":
                    names = blocks_to_prove(part.module, facts, plans)
                    whole = sketch_blocks(part.module, part.loss, given, names)
                told = [_Look(batch, replace(facts, block_inputs={}), plans)]
            except TaskError as e:
                told = [e]
        dist.broadcast_object_list(told, 0)
        if isinstance(told[0], TaskError):
            raise told[0]
        return told[0], whole

    def _plan_tensor(self, part: Part, facts: ModelFacts, world: World) -> dict[str, BlockPlan]:
        """Return the plan of each block; those of one kind are tried once."""
        if self.axes.tensor == 1:
            return {}
        mesh = world.groups.devices["tensor"]
        plans = plan_blocks(
            part.module, facts.blocks, facts.block_inputs, mesh, part.tensor or {}, sequence=self.axes.sequence
        )
        refuse_empty_plans(self.axes.tensor, plans.values(), part.blocks)
        return plans

    def _split_sequences(self, part: Part, own: Sequence[str], way: Way) -> None:
        if self.axes.context == 1:
            return
        first, last = own[0] == self._blocks[0], own[-1] == self._blocks[-1]
        split = SequenceSplit(part.module, own, self.group("context"), enters=first, leaves=last, attention=way)
        split.arm()
        self._sequences = split
        split.follow_length(part.module.get_submodule(self._blocks[0]))
        if self._stage is not None and not last:
            self._stage.widen = split.widened

    def wrap(self, part: Part, config: Config) -> None:
        """Let a library wrap model and optimizer, which has its parameters' parts by now; without one nothing does."""

    def group(self, axis: str) -> dist.ProcessGroup:
        """Return this rank's process group along `tensor` or `context`, in which parts of blocks meet."""
        return self.world.groups.group(axis)

    def placement(self, config: Config, world: World) -> Placement:
        """Return what this rank holds, and how FSDP2 splits it further."""
        needed = self._needs[self._stage_seat]
        ranks = world.shares * self.axes.context
        settings: dict[str, Any] = {"reshard_after_forward": config.parallel.shard == "parameters"}
        mesh = None
        if ranks > 1 and self.axes.schedule != "zerobubble":
            over = config.parallel.shard_over or world.shares
            if config.parallel.shard == "nothing":
                mesh = world.groups.copies_and_shards(1)
            elif over == "machine":
                mesh = world.groups.copies_of_ranks(*copies_by_machine(world.mesh, world.machines))
            else:
                mesh = world.groups.copies_and_shards(over * self.axes.context)
        return Placement(frozenset(self._shapes) - needed, self._parts, self.mesh.seat["tensor"], mesh, settings)

    def _groups_of_owners(self, world: World) -> Mapping[tuple[int, ...], dist.ProcessGroup]:
        """Return this rank's group for each set of stages that share parameters; all ranks make all groups."""
        mine: dict[tuple[int, ...], dist.ProcessGroup] = {}
        for stages in sorted(set(self._shared.values())):
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

    @property
    def split_words(self) -> str:
        """Words for errors on how the model is split."""
        cuts = ", ".join(self._blocks[i] for i in self._cuts[1:-1])
        return f"{self.axes}" + (
            f", with stages that begin at {cuts} (a value that skips a block cannot cross such a cut)" if cuts else ""
        )

    # Steps

    def _surrounded(self, fn: Fn) -> Fn:
        """Return the function with what a cut sequence needs around it."""
        return fn if self._sequences is None else partial(self._sequences.run_loss, fn)

    @override
    def forward_loss(self, fn: LossFn, micro: Micro) -> Tensor:
        return self.wrapped(self._surrounded(micro.bind(fn)), OpaqueBatch(micro.batch))

    @override
    def run_microbatches(self, fn: LossFn, micros: Sequence[Micro], divisor: float, mark: Mark) -> Tensor:
        stage = self._stage
        if self._executor is not None:
            return self._executor.run(fn, micros, divisor, mark, None if self.scaler is None else self.scaler.scale)
        if stage is None:
            return super().run_microbatches(fn, micros, divisor, mark)
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
        told = [map_tensors(out, lambda t: t.cpu()) if self._stage_seat == last else None]
        dist.broadcast_object_list(told, self.mesh.rank_at(pipeline=last), group=self.world.groups.group("pipeline"))
        return to_device(told[0], self.world.device)

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
        for name, stages in self._shared.items():
            if self._stage_seat in stages and (p := self.kept[name]).requires_grad:
                if p.grad is None:
                    p.grad = torch.zeros_like(p)
                dist.all_reduce(local_part(p.grad), group=self._owner_groups[stages])
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
        return self._shapes[name] if t.ndim else ()

    @override
    def local_regions(self, name: str, t: Tensor) -> Iterator[tuple[Region, Tensor]]:
        part = self._parts.get(name)
        if part is None or t.ndim == 0:
            yield from super().local_regions(name, t)
            return
        local, first = local_part(t), 0
        if isinstance(t, DTensor):
            _, (first, *_) = compute_local_shape_and_global_offset(t.shape, t.device_mesh, t.placements)
        regions = part.regions(self.mesh.seat["tensor"], first, len(local))
        for region, (rows, *columns) in regions:
            yield region, local[(slice(rows.start - first, rows.stop - first), *columns)]
        if not regions:
            yield Region(0, 0), local.view(-1)

    @override
    def speaks_for(self, name: str, t: Tensor) -> bool:
        seat = self.mesh.seat
        if self._shared.get(name, (self._stage_seat,))[0] != self._stage_seat:
            return False
        if seat["tensor"] != 0 and (name not in self._parts or t.ndim == 0):
            return False
        return is_first_copy(t, self.world) if isinstance(t, DTensor) else seat["data"] == 0 and seat["context"] == 0

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
        seat = self._buffer_stages[name] % self._stages
        return self.mesh.rank_at(pipeline=seat, data=0, context=0, tensor=0)


def zeros_if_none(gradient: Tensor | None, like: Tensor) -> Tensor:
    """Return a gradient, or zeros where nothing depended on the tensor."""
    return torch.zeros_like(like) if gradient is None else gradient
