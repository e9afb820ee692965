"""Parts of a model without values as ranks of a mesh have them, for `unipar plan`: placed and armed as in training."""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, final

import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from unipar.backend import Fn, Part
from unipar.config import Config
from unipar.config.sections.strategy import Axes
from unipar.distributed.mesh import Mesh, MeshGroups, fake_groups
from unipar.engines.batch_transfer import map_tensors
from unipar.engines.placement import direct_parameters
from unipar.errors import TaskError
from unipar.prediction.rank_part import RankPart
from unipar_mesh.context import SequenceSplit
from unipar_mesh.context.spread_attention import Choice
from unipar_mesh.expert.expert_layer import ExpertLayer, cuts_of_experts, experts_left_out
from unipar_mesh.expert.expert_parallel import arm_experts
from unipar_mesh.expert.find_experts import find_experts_without_values
from unipar_mesh.expert.token_counts import logged_bytes
from unipar_mesh.look_at_model import names_in_several, without_frozen_models
from unipar_mesh.options import MeshOptions
from unipar_mesh.pipeline.stage import Stage
from unipar_mesh.prediction.planned_stages import PlannedStages, StageFlow, plan_stages
from unipar_mesh.prediction.stage_path import PieceFlow
from unipar_mesh.refusal_sentences import refuse_empty_plans, refuse_part
from unipar_mesh.sequence.sequence_parts import join_before
from unipar_mesh.tensor.cuts import BlockPlan, ParameterCut
from unipar_mesh.tensor.tensor_model import cuts_of_model, derive_model_plan
from unipar_mesh.tensor.tensor_parallel import Undo, arm_block
from unipar_mesh.tensor.vocabulary import Vocabulary, arm_vocabulary, find_vocabulary


@final
class MeshPart(RankPart):
    """Part of one rank of a mesh: some of the blocks, and its cuts of their matrices."""

    def __init__(self, part: Part, axes: Axes, split: ModelSplit, stage: int, before: MeshPart | None) -> None:
        """Take a stage of the pipeline, and the part that was traced before it, whose hidden states arrive."""
        self.model, self.stage = part.module, stage
        ranks = axes.ranks * axes.expert
        seat = Mesh.of(0, ranks, **axes.sizes).rank_at(pipeline=stage % axes.pipeline)
        self.mesh = Mesh.of(seat, ranks, **axes.sizes)
        self.halves = axes.schedule == "zerobubble"
        self._axes, self._split, self._before = axes, split, before
        self.own_blocks, self.stages_of = split.blocks, {}
        if (stages := split.stages) is not None:
            self.stages_of = {name: len(several) for name, several in names_in_several(stages.needs_of_ranks)}
            self.own_blocks = stages.blocks[stages.cuts[stage] : stages.cuts[stage + 1]]
        inside = tuple(f"{name}." for name in self.own_blocks)
        self.experts = [layer for layer in split.experts if f"{layer.name}.".startswith(inside)]
        sharded = [name for layer in self.experts for name in layer.sharded_modules(0, axes.expert)]
        self.blocks = blocks_and_experts(self.own_blocks, sharded)
        self.logged_of_experts = logged_bytes(split.experts)
        self.experts_of_blocks = frozenset(sharded)
        self._absent = {name for layer in self.experts for name in layer.absent(part.module, 0, axes.expert)}
        self._groups: MeshGroups | None = None
        self._flow: StageFlow | PieceFlow | None = None
        self._way: Choice = split.options.attention
        self.proved = split.options.proof == "whole"
        self._sequences: SequenceSplit | None = None
        self.leaving: dict[Hashable, Any] = {}
        """Hidden states that the stage has put out, by the shapes of a batch."""

    @contextmanager
    @override
    def placed(self) -> Generator[None]:
        before: list[tuple[Any, Any]] = [(module, direct_parameters(module)) for module in self.model.modules()]
        names = {id(p): name for name, p in self.model.named_parameters()}
        made: dict[int, Tensor] = {}

        def local(p: nn.Parameter) -> Tensor:
            if id(p) not in made:
                made[id(p)] = self._local(names[id(p)], p)
            return made[id(p)]

        try:
            for module, own in before:
                for name, p in own.items():
                    if p is not None:
                        delattr(module, name)
                        setattr(module, name, local(p))
            with fake_groups(self.mesh) as self._groups:
                yield
        finally:
            for module, own in before:
                for name in own:
                    vars(module).pop(name, None)
                module._parameters.clear()
                module._parameters.update(own)

    def _local(self, name: str, p: nn.Parameter) -> Tensor:
        """Return this rank's part of a parameter; zeros without memory if only other ranks have it."""
        cut = self._split.cuts.get(name)
        shape = p.shape if cut is None else cut.local_shape()
        stages = self._split.stages
        if name in self._absent or (stages is not None and name not in stages.needs_beside(self.stage)):
            return p.detach().new_zeros(()).expand(shape)
        return p if cut is None else nn.Parameter(p.detach().new_empty(shape), p.requires_grad)

    @contextmanager
    @override
    def armed(self) -> Generator[None]:
        assert self._groups is not None
        split = self._split
        with ExitStack() as undo:
            for name in self._present(self.own_blocks):
                block = self.model.get_submodule(name)
                if (plan := split.plans.get(name)) is None:
                    continue
                for take_back in split.library.arm(block, plan, self._groups.group("tensor")):
                    undo.callback(take_back)
                if self._axes.sequence and plan.sequence is None:
                    undo.callback(join_before(block))
            if split.vocabulary is not None:
                undo.callback(arm_vocabulary(self.model, split.vocabulary, self._groups.group("tensor")))
            for layer in self.experts:
                if self.left_out.intersection(layer.sharded_modules(0, self._axes.expert)):
                    continue
                undo.callback(arm_experts(self.model, layer, self._groups.experts(), assumed=self.routing))
            stage = self._stage()
            self._split_sequence(self._groups, stage, undo)
            if stage is not None:
                undo.callback(stage.leave)
                self._flow = self._flow_through(stage.enter(), self._groups)
            yield

    def _present(self, blocks: Sequence[str]) -> list[str]:
        """Return the names of those blocks that are in the model now."""
        return [name for name in blocks if name not in self.left_out]

    def _flow_through(self, stage: Stage, groups: MeshGroups) -> StageFlow | PieceFlow:
        arriving = {} if self._before is None else self._before.leaving
        if self._axes.pieces == 1:
            return StageFlow(stage, groups, self.mesh, self._axes, arriving, self.leaving)
        assert self._split.stages is not None
        assert self.keep is not None
        needs = self._split.stages.needs[self.stage]
        own = [p for name, p in self.model.named_parameters() if name in needs]
        group = groups.group("pipeline")
        return PieceFlow(stage, group, self.mesh, own, arriving, self.leaving, self.keep, self.halves)

    def _stage(self) -> Stage | None:
        if (stages := self._split.stages) is None:
            return None
        first, end = stages.cuts[self.stage : self.stage + 2]
        tuples = [n for name, n in zip(stages.blocks, stages.tuples, strict=True) if name not in self.left_out]
        end -= len(self.own_blocks) - len(self._present(self.own_blocks))
        return Stage(self.model, self._present(stages.blocks), first, end, tuples)

    def _split_sequence(self, groups: MeshGroups, stage: Stage | None, undo: ExitStack) -> None:
        """Cut sequences over the ranks of context, as the engine does."""
        if self._axes.context == 1:
            return
        own, every = self._present(self.own_blocks), self._split.blocks
        first, last = own[0] == every[0], own[-1] == every[-1]
        split = SequenceSplit(
            self.model, own, groups.group("context"), enters=first, leaves=last, attention=self._way, examines=False
        )
        split.arm()
        undo.callback(split.disarm)
        undo.callback(split.follow_length(self.model.get_submodule(every[0])))
        if stage is not None and not last:
            stage.widen = split.widened
        self._sequences = split

    @override
    def forward(self, call: nn.Module, fn: Fn, opaque: Any) -> Any:
        fn = fn if self._sequences is None else partial(self._sequences.run_loss, fn)
        return super().forward(call, fn, opaque) if self._flow is None else self._flow.forward(call, fn, opaque)

    @override
    def backward(self, out: Any) -> None:
        if self._flow is None:
            super().backward(out)
        else:
            self._flow.backward(out)
            self._count(self._flow)

    @override
    def backward_of_weights(self, out: Any) -> None:
        assert isinstance(self._flow, PieceFlow)
        self._flow.backward_of_weights(out)

    def _count(self, flow: StageFlow | PieceFlow) -> None:
        self.sent_on, self.sent_back = flow.sent_on, flow.sent_back
        if isinstance(flow, PieceFlow):
            self.received = flow.received

    @override
    def end_step(self) -> None:
        super().end_step()
        if isinstance(self._flow, PieceFlow):
            self._flow.forget()


def blocks_and_experts(blocks: Sequence[str], experts: Sequence[str]) -> Sequence[str]:
    """Return the modules that FSDP2 has in groups, in the order in which a forward leaves them."""
    return [name for block in blocks for name in (*(e for e in experts if e.startswith(f"{block}.")), block)]


@dataclass(frozen=True)
class TensorLibrary:
    """Way in which a library computes with parts of matrices."""

    arm: Callable[[nn.Module, BlockPlan, dist.ProcessGroup], Sequence[Undo]]
    """Function that makes a block with parts of matrices compute what the whole one does."""

    left_whole: Callable[[nn.Module], Mapping[str, str]] | None = None
    """Function that returns the matrices of a block that the library cannot cut, each with the reason."""


OWN_LAYERS: Final = TensorLibrary(arm_block)
"""Native's way, which is also Accelerate's."""


@final
class ModelSplit:
    """Blocks of a model, cuts of their matrices over the ranks of tensor, and stages of a pipeline."""

    def __init__(self, part: Part, config: Config, options: MeshOptions, library: TensorLibrary) -> None:
        assert part.loss is not None
        assert part.sample is not None
        self.options, self.library = options, library
        axes, batch = config.parallel.axes, part.sample()
        self.blocks = without_frozen_models(part.module, part.blocks)
        first: Any = next(part.module.parameters())
        self.experts: Sequence[ExpertLayer] = ()
        left_out: Sequence[ExpertLayer] = ()
        if axes.expert > 1 or (axes.tensor > 1 and hasattr(first, "fake_mode")):
            mode = first.fake_mode
            with mode, nullcontext() if axes.expert > 1 else suppress(TaskError):  # tensor needs none
                fake_batch = map_tensors(batch, mode.from_tensor)
                trained = replace(part, blocks=self.blocks)
                left_out = find_experts_without_values(trained, fake_batch, axes.expert)
                if axes.tensor > 1:
                    _refuse_lists(left_out)
        if axes.expert > 1:
            self.experts = left_out
        self.plans: Mapping[str, BlockPlan] = {}
        self.vocabulary: Vocabulary | None = None
        if axes.tensor > 1:
            with experts_left_out(part.module, left_out):
                self.plans = derive_model_plan(
                    part.module,
                    self.blocks,
                    part.loss,
                    batch,
                    axes.tensor,
                    part.tensor,
                    library.left_whole,
                    sequence=axes.sequence,
                ).blocks
            refuse_empty_plans(axes.tensor, self.plans.values(), part.blocks)
            if options.vocabulary == "split":
                self.vocabulary = find_vocabulary(part.module, part.blocks, axes.tensor)
        self.cuts: Mapping[str, ParameterCut] = {
            **cuts_of_model(part.module, self.plans, self.vocabulary, axes.tensor),
            **cuts_of_experts(part.module, self.experts, axes.expert),
        }
        self.stages: PlannedStages | None = None
        if axes.pipeline > 1:
            self.stages = plan_stages(part, self.blocks, axes, batch, first.fake_mode)


def _refuse_lists(layers: Sequence[ExpertLayer]) -> None:
    for layer in layers:
        if layer.kind == "list":
            raise TaskError(
                f"plan: the experts {layer.name} are a list of modules, which get their rows by value, and a plan "
                "under parallel.tensor knows experts with stacked parameters: measure it (unipar compare)"
            )


def split_model(
    part: Part, config: Config, options: MeshOptions, library: TensorLibrary = OWN_LAYERS
) -> list[RankPart]:
    """Return the parts of a model that ranks of a mesh have; those of ranks that are alike once."""
    refuse_part(part, config)
    axes, split = config.parallel.axes, ModelSplit(part, config, options, library)
    if split.stages is None:
        return [MeshPart(part, axes, split, 0, None)]
    mesh_parts: list[MeshPart] = []
    alike = split.stages.alike(part.module)
    for stage in sorted(set(alike)):
        mesh_parts.append(MeshPart(part, axes, split, stage, mesh_parts[-1] if mesh_parts else None))
        mesh_parts[-1].alike = alike if axes.pieces > 1 else ()
    return list(mesh_parts)
