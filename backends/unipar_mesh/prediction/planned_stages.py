"""Stages of a pipeline for `unipar plan`: cuts of a model without values, and a microbatch's way through one."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from unipar.backend import Fn, Part
from unipar.config.sections.strategy import Axes
from unipar.distributed.mesh import Mesh, MeshGroups
from unipar.engines.batch_transfer import map_tensors
from unipar_mesh.look_at_model import CutTrial, LossRun, check_block_order, kind_of_block
from unipar_mesh.pipeline.balance import balanced_cuts, cuts_at
from unipar_mesh.pipeline.channel import Channel
from unipar_mesh.pipeline.stage import Arrival, Stage
from unipar_mesh.sequence.sequence_collectives import Span
from unipar_mesh.sequence.sequence_parts import CutSequence, part_alone
from unipar_mesh.trials_without_trace import unchanged


@dataclass(frozen=True)
class PlannedStages:
    """Cuts of a model into stages, found without values: blocks take as long as they have operations."""

    blocks: Sequence[str]
    tuples: Sequence[int]
    cuts: Sequence[int]
    needs: Sequence[frozenset[str]]
    """Names of the parameters that each stage uses."""

    ranks: int
    """Number of ranks of the pipeline; stage k is on rank k mod `ranks`."""

    @property
    def needs_of_ranks(self) -> Sequence[frozenset[str]]:
        """Names of the parameters that each rank of the pipeline uses, in all of its stages."""
        return [frozenset().union(*self.needs[rank :: self.ranks]) for rank in range(self.ranks)]

    def needs_beside(self, stage: int) -> frozenset[str]:
        """Return the names of what a stage uses, and of what its rank does outside of blocks, in other stages."""
        inside = tuple(f"{name}." for name in self.blocks)
        of_rank = self.needs_of_ranks[stage % self.ranks]
        return self.needs[stage] | {name for name in of_rank if not name.startswith(inside)}

    def alike(self, model: nn.Module) -> list[int]:
        """Return for each stage the first of those that have equal blocks, and whose ranks use as much else."""
        first: dict[Hashable, int] = {}
        first_stages: list[int] = []
        for stage in range(len(self.needs)):
            own = self.blocks[self.cuts[stage] : self.cuts[stage + 1]]
            inside = tuple(f"{name}." for name in own)
            others = frozenset(name for name in self.needs_beside(stage) if not name.startswith(inside))
            end = (stage == 0, stage == len(self.needs) - 1)
            key = (end, others, *(kind_of_block(model.get_submodule(name)) for name in own))
            first_stages.append(first.setdefault(key, stage))
        return first_stages


def plan_stages(part: Part, blocks: Sequence[str], axes: Axes, batch: Any, mode: Any) -> PlannedStages:
    """Return the stages of a model on fake tensors, `mode`, for which the loss runs on one batch of any tensors."""
    model, loss = part.module, part.loss
    assert loss is not None
    counter = FlopCounterMode(display=False)
    run = LossRun(model, blocks, counter.get_total_flops, keeps_inputs=False)
    with mode, unchanged(model, loss):
        batch = map_tensors(batch, mode.from_tensor)
        with torch.no_grad(), run.recorded(), counter:
            loss(model, batch)
        check_block_order(run.order, blocks)
        numbers = [sum(p.numel() for p in model.get_submodule(name).parameters()) for name in blocks]
        rest = sum(p.numel() for p in model.parameters()) - sum(numbers)
        if part.cuts is None:
            flops, behind = [run.times[name] for name in blocks], counter.get_total_flops() - run.end
            cuts = balanced_cuts(axes.stages, flops, numbers, last_seconds=behind, last_numbers=rest)
        else:
            cuts = cuts_at(part.cuts, blocks, axes.stages)
        tuples = [run.tuples[name] for name in blocks]
        needs, _ = CutTrial(model, blocks, tuples, loss, batch).needs(cuts)
    return PlannedStages(blocks, tuples, cuts, needs, axes.pipeline)


@dataclass(frozen=True)
class Hidden:
    """Hidden states that a stage puts out."""

    shape: torch.Size
    dtype: torch.dtype
    cut_dim: int | None
    length: int

    @classmethod
    def of(cls, out: Tensor) -> Hidden:
        part = part_alone(out)
        if isinstance(out, CutSequence):
            return cls(part.shape, part.dtype, out.cut_dim, out.span.length)
        return cls(part.shape, part.dtype, None, 0)


@dataclass
class StageFlow:
    """A microbatch's way through one stage: what it receives, runs and sends, as the mesh engine does it."""

    stage: Stage
    groups: MeshGroups
    mesh: Mesh
    axes: Axes
    arriving: dict[Hashable, Hidden]
    """Outputs of the stage before, by the shapes of the batch."""

    leaving: dict[Hashable, Hidden]
    sent_on: int = 0
    """Bytes of hidden states for the stage behind."""

    sent_back: int = 0
    """Bytes of the gradient for the stage before."""

    _key: Hashable = None

    def __post_init__(self) -> None:
        seat, ranks = self.mesh.seat["pipeline"], self.axes.pipeline
        group = self.groups.group("pipeline")
        self._channel = Channel(
            group,
            group,
            group,
            before=self.mesh.rank_at(pipeline=seat - 1) if seat > 0 else None,
            behind=self.mesh.rank_at(pipeline=seat + 1) if seat < ranks - 1 else None,
            device=torch.device("cpu"),
        )

    def forward(self, call: nn.Module, fn: Fn, opaque: Any) -> tuple[Any, Tensor | None]:
        """Return the stage's output, and the hidden states that it got."""
        self._key = shapes_of_batch(opaque.batch)
        got: list[Tensor] = []
        self.stage.inlet = None if self.stage.is_first else partial(self._receive, got)
        out = call(partial(self.stage.run, fn), opaque)
        if not self.stage.is_last:
            self.leaving[self._key] = Hidden.of(out)
            self.sent_on = part_alone(out).nbytes
            self._channel.send_hidden(0, out)
        return part_alone(out), got[0] if got else None

    def backward(self, kept: tuple[Tensor, Tensor | None]) -> None:
        """Run the backward, between the gradients of the stages behind and before."""
        out, hidden = kept
        if self.stage.is_last:
            out.backward()
        else:
            torch.autograd.backward(out, self._channel.receive_gradient(0, out))
        if hidden is not None:
            gradient = torch.zeros_like(hidden) if hidden.grad is None else hidden.grad
            self.sent_back = gradient.nbytes
            self._channel.send_gradient(0, gradient)
        self._channel.wait_for_all()

    def _receive(self, got: list[Tensor]) -> Arrival:
        """Return hidden states as the channel does, whose header has values here."""
        arriving = self.arriving[self._key]
        hidden = torch.empty(arriving.shape, dtype=arriving.dtype)
        dist.recv(hidden, self.mesh.rank_at(pipeline=self.mesh.seat["pipeline"] - 1), self.groups.group("pipeline"))
        got.append(hidden.requires_grad_())
        if arriving.cut_dim is not None:
            tensor = self.groups.group("tensor")
            span = Span(arriving.length, tensor.size(), tensor.rank(), tensor)
            return Arrival(CutSequence.of(hidden, arriving.cut_dim, span), None, hidden)
        return Arrival(hidden, None, hidden)


def shapes_of_batch(batch: Any) -> Hashable:
    """Return the shapes of a batch's tensors."""
    return tuple(tuple(x.shape) for x in tree_leaves(batch) if isinstance(x, Tensor))
