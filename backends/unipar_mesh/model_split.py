"""Split of a model over a mesh: what rank 0 finds out about the whole model, and what each rank gets of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import cycle, islice
from math import prod
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeVar

from torch import nn

from unipar.backend import Part
from unipar.backend.precision import batch_dtype
from unipar.config import Config
from unipar.config.sections.strategy import Axes
from unipar.distributed.world import World
from unipar.engines.batch_transfer import cast_floats
from unipar.engines.router_choices import RouterChoice
from unipar.errors import TaskError
from unipar_mesh.expert.expert_layer import ExpertLayer, cuts_of_experts, experts_left_out
from unipar_mesh.expert.find_experts import experts_by_shape_left_out, find_experts
from unipar_mesh.expert.small_blocks import small_blocks
from unipar_mesh.look_at_model import ModelFacts, WholeModel, look_at_model, names_in_several, whole_gradients
from unipar_mesh.proof.proof_of_blocks import WholeBlocks, blocks_to_prove, sketch_blocks
from unipar_mesh.proof.router_ties import recorded_choices
from unipar_mesh.refusal_sentences import refuse_empty_plans
from unipar_mesh.tensor.cuts import BlockPlan, OwnPart, ParameterCut
from unipar_mesh.tensor.tensor_model import cuts_of_model, derive_model_plan, plan_blocks
from unipar_mesh.tensor.vocabulary import Vocabulary, find_vocabulary

ProofWay = Literal["whole", "blocks", "off"]
_Made = TypeVar("_Made")


class LookAtModel(NamedTuple):
    """Sample, facts of the model, and plans of its blocks: what all ranks need to split it alike."""

    batch: Any
    facts: ModelFacts
    plans: Mapping[str, BlockPlan]
    experts: Sequence[ExpertLayer] = ()
    others: Sequence[Any] = ()
    """Further microbatches: each rank with other experts is tried on one of its own."""

    choices: Mapping[str, Sequence[RouterChoice]] = MappingProxyType({})
    """Choices of the full model's routers for these microbatches, by layer of experts."""

    def choices_of(self, seat: int) -> dict[str, RouterChoice]:
        """Return what the routers choose for the microbatch of the ranks with these experts."""
        return {name: each[seat] for name, each in self.choices.items()}

    def batch_of(self, seat: int) -> Any:
        """Return the microbatch of the ranks with these experts."""
        return self.others[seat - 1] if seat else self.batch


def look_together(
    part: Part, config: Config, world: World, proof: ProofWay
) -> tuple[LookAtModel, WholeModel | WholeBlocks | None]:
    """Return what rank 0 finds out about the whole model, and what that computes on the sample."""

    def look() -> tuple[LookAtModel, WholeModel | WholeBlocks | None]:
        assert part.loss is not None
        assert part.sample is not None
        axes = config.parallel.axes
        batch, *others = microbatches(part, axes.expert)
        cast_to = batch_dtype(config.train.precision)
        inputs, *other_inputs = (each if cast_to is None else cast_floats(each, cast_to) for each in (batch, *others))
        facts = look_at_model(part.module, part.blocks, part.loss, inputs, axes.stages, part.cuts)
        trained = replace(part, blocks=facts.blocks)  # a frozen teacher's experts stay as they are
        experts = find_experts(trained, inputs, axes.expert) if axes.expert > 1 else ()
        with experts_left_out(part.module, experts or _experts_beside_tensor(trained, inputs, axes)):
            plans = _plan_tensor(part, facts, world, axes)
        full: WholeModel | WholeBlocks | None = None
        choices: Mapping[str, Sequence[RouterChoice]] = {}
        if proof == "whole":
            with recorded_choices(part.module, experts) as calls:
                full = whole_gradients(part.module, part.loss, inputs, *other_inputs)
            choices = {name: made for name, made in calls.items() if len(made) == 1 + len(others)}
        elif proof == "blocks":
            names = blocks_to_prove(part.module, facts, plans)
            full = sketch_blocks(part.module, part.loss, inputs, names)
        return LookAtModel(batch, replace(facts, block_inputs={}), plans, experts, others, choices), full

    return made_on_first_rank(world, look)


def _experts_beside_tensor(part: Part, inputs: Any, axes: Axes) -> Sequence[ExpertLayer]:
    """Return the layers of experts that every rank has whole, whose choices by value no trial of a cut can follow."""
    if axes.tensor == 1:
        return ()
    try:
        return [layer for layer in find_experts(part, inputs, 1) if layer.kind == "stacked"]
    except TaskError:
        return ()


def microbatches(part: Part, number: int) -> list[Any]:
    """Return this many microbatches, the same one again where the data has fewer."""
    assert part.sample is not None
    if number == 1 or part.samples is None:
        return [part.sample()] * number
    return list(islice(cycle(part.samples(number)), number))


def made_on_first_rank(world: World, make: Callable[[], _Made]) -> _Made:
    """Return on all ranks what a function returns on rank 0; raise a TaskError on all of them that it raises there."""
    made: Any = None
    if world.rank == 0:
        try:
            made = make()
        except TaskError as e:
            made = e
    made = world.tell_objects(made, 0)
    if isinstance(made, TaskError):
        raise made
    return made


def _plan_tensor(part: Part, facts: ModelFacts, world: World, axes: Axes) -> dict[str, BlockPlan]:
    """Return the plan of each block; those of one kind are tried once."""
    if axes.tensor == 1:
        return {}
    mesh, wanted_cuts = world.groups.devices["tensor"], part.tensor or {}
    plans = plan_blocks(part.module, facts.blocks, facts.block_inputs, mesh, wanted_cuts, sequence=axes.sequence)
    refuse_empty_plans(axes.tensor, plans.values(), part.blocks)
    return plans


def describe_cuts(part: Part, config: Config) -> Iterator[str]:
    """Yield sentences on how `parallel.tensor` cuts each kind of block, for `unipar explain --model`."""
    assert part.loss is not None
    assert part.sample is not None
    ranks = config.parallel.tensor
    model, sequence = part.module, config.parallel.sequence
    with experts_by_shape_left_out(model, part.blocks):
        plan = derive_model_plan(model, part.blocks, part.loss, part.sample(), ranks, part.tensor, sequence=sequence)
    yield from plan.sentences()
    trials = sum(plan.blocks[name].trials for name in plan.tried)
    yield f"found in {trials} trials of {len(plan.tried)} blocks, {plan.seconds:.1f} s of CPU"


@dataclass(frozen=True)
class MeshSplit:
    """Blocks, parts of matrices and shared parameters that each rank has of a model."""

    axes: Axes
    seat: int
    """Seat of this rank along the pipeline."""

    facts: ModelFacts
    plans: Mapping[str, BlockPlan]
    vocabulary: Vocabulary | None
    cuts: Mapping[str, ParameterCut]
    """Cuts of parameters over `tensor`, by their names; whole ones are left out."""

    experts: Sequence[ExpertLayer]
    expert_seat: int
    expert_cuts: Mapping[str, ParameterCut]
    """Cuts of experts' stacked parameters over `expert`."""

    absent_experts: frozenset[str]
    """Parameters of experts that only other ranks have."""

    shapes: Mapping[str, tuple[int, ...]]
    """Shapes of the whole model's parameters."""

    @classmethod
    def of(cls, part: Part, look: LookAtModel, world: World, axes: Axes, *, vocabulary: bool) -> MeshSplit:
        """Return the split of the whole model; raise TaskError on all ranks if one of them has nothing to train."""
        seat = world.mesh.expert_seat
        absent = [layer.absent(part.module, seat, axes.expert) for layer in look.experts]
        embedding_and_head = find_vocabulary(part.module, part.blocks, axes.tensor) if vocabulary else None
        split = cls(
            axes,
            world.mesh.seat["pipeline"],
            look.facts,
            look.plans,
            embedding_and_head,
            cuts_of_model(part.module, look.plans, embedding_and_head, axes.tensor),
            look.experts,
            seat,
            cuts_of_experts(part.module, look.experts, axes.expert),
            frozenset[str]().union(*absent),
            {name: tuple(p.shape) for name, p in part.module.named_parameters()},
        )
        split._refuse_idle_stages(part.module)
        return split

    def _refuse_idle_stages(self, model: nn.Module) -> None:
        trained = {name for name, p in model.named_parameters() if p.requires_grad}
        for seat, names in enumerate(self.needs):
            if not names & trained:
                blocks = [self.facts.blocks[i] for first, end in self._ranges(seat) for i in range(first, end)]
                raise TaskError(
                    f"stage {seat} of the pipeline has no trained parameter (its blocks are {', '.join(blocks)}): "
                    "name other cuts in the task's cuts(stages), or leave parallel.pipeline out"
                )

    def _ranges(self, seat: int) -> list[Sequence[int]]:
        stages = range(seat, self.axes.stages, self.axes.pipeline)
        return [self.facts.cuts[stage : stage + 2] for stage in stages]

    @cached_property
    def ranges(self) -> list[Sequence[int]]:
        """First block and end of each stage on this rank."""
        return self._ranges(self.seat)

    @cached_property
    def own_blocks(self) -> list[str]:
        """Names of the blocks that this rank runs."""
        return [name for first, end in self.ranges for name in self.facts.blocks[first:end]]

    @cached_property
    def needs(self) -> Sequence[frozenset[str]]:
        """Names of the parameters that ranks need, by their seat along the pipeline."""
        return self.facts.needs_of_ranks(self.axes.pipeline)

    @cached_property
    def absent(self) -> frozenset[str]:
        """Names of the parameters that this rank does not have."""
        return frozenset(self.shapes) - self.needs[self.seat] | self.absent_experts

    @cached_property
    def own_experts(self) -> list[ExpertLayer]:
        """Layers of experts that this rank runs."""
        needs = self.needs[self.seat]
        return [layer for layer in self.experts if any(name.startswith(f"{layer.name}.") for name in needs)]

    @cached_property
    def names_of_experts(self) -> frozenset[str]:
        """Names of the parameters of which ranks along `expert` have different ones."""
        prefixes = tuple(f"{layer.name}." for layer in self.experts)
        return frozenset(name for name in self.shapes if name.startswith(prefixes))

    def larger_blocks(self, parts: Mapping[str, OwnPart]) -> list[str]:
        """Return the names of the blocks that this rank runs, without those that are small besides their experts."""
        local = {name: parts[name].cut.local_shape() if name in parts else shape for name, shape in self.shapes.items()}
        rest = {name: prod(shape) for name, shape in local.items() if name not in self.names_of_experts}
        sizes = {
            block: sum(size for name, size in rest.items() if name.startswith(f"{block}.")) for block in self.own_blocks
        }
        small = small_blocks(sizes, [layer.name for layer in self.experts])
        return [block for block in self.own_blocks if block not in small]

    def own_parts(self, tensor_seat: int) -> dict[str, OwnPart]:
        """Return this rank's part of each parameter that is cut."""
        parts = {name: OwnPart(cut, tensor_seat) for name, cut in self.cuts.items()}
        return parts | {name: OwnPart(cut, self.expert_seat) for name, cut in self.expert_cuts.items()}

    @cached_property
    def shared(self) -> Mapping[str, tuple[int, ...]]:
        """Stages of each parameter that several stages use."""
        return dict(names_in_several(self.needs))

    def seat_of_buffer(self, name: str) -> int:
        """Return the seat along the pipeline of the ranks whose values of a buffer count."""
        return self.facts.buffer_stages[name] % self.axes.pipeline

    @property
    def words(self) -> str:
        """Words for errors on how the model is split."""
        starts = ", ".join(self.facts.blocks[i] for i in self.facts.cuts[1:-1])
        skips = f", with stages that begin at {starts} (a value that skips a block cannot cross such a cut)"
        return f"{self.axes}{skips if starts else ''}"
