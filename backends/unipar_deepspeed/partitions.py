"""Partitions of ZeRO 0 to 3: the range of each parameter that a rank keeps in full precision, and its storage."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Set
from typing import TYPE_CHECKING, Any, final

import deepspeed
import torch
from torch import Tensor, nn

from unipar.backend import Piece, Read, Region
from unipar.config import Config
from unipar.distributed.world import World
from unipar.engines.placement import broadcast_tensor
from unipar.engines.plain_state import KINDS_OF_MODEL, describe_reserved_key
from unipar.engines.state import steps_on_device
from unipar.errors import CheckpointError
from unipar.optimizers.stochastic_rounding import MOMENTS, ElementRuns, NamedViews, RoundedMoments
from unipar_deepspeed.matrices.states import MatrixStates, ranges_in_flat_tensors

if TYPE_CHECKING:
    from unipar_deepspeed.expert_parallel import ExpertSplit
    from unipar_deepspeed.tensor_parallel_by_plan import TensorSplit

ReadRegion = Callable[[str, Region], Tensor]


@final
class ZeroPartitions:
    """Access to the weights and moments that this rank keeps."""

    def __init__(
        self,
        model: nn.Module,
        engine: Any,
        stage: int,
        world: World,
        *,
        split: TensorSplit | ExpertSplit | None = None,
        swapped: bool = False,
        matrices: frozenset[str] = frozenset(),
    ) -> None:
        """Remember the engine; with `swapped`, masters and moments are on the disk and are read for each access.

        With `split`, parameters are parts of whole ones, and ranges are ranges of these parts. `matrices`: names of the
        parameters that the optimizer updates as whole matrices.
        """
        self.model, self.stage, self.world, self.swapped, self.split = model, stage, world, swapped, split
        self.zero, self.base = engine.optimizer, engine.basic_optimizer
        self.master = self._masters()
        self.matrices = MatrixStates(model, engine, stage, world, matrices, self.master)
        self._cut_ids = {id(p) for name, p in model.named_parameters() if self.is_cut(name)}
        self._same_experts = world.mesh.expert
        """Distance between ranks of the data that have the same parts of parameters that are cut."""
        if isinstance(self.base, RoundedMoments):
            self.base.views = self._named_views(model)

    def _masters(self) -> dict[int, Tensor]:
        """Return the fp32 masters by the id of their bf16 parameter; only stage 0 with bf16 parameters has any."""
        if self.stage or self.zero is self.base:
            return {}
        pairs = zip(self.zero.fp16_groups, self.zero.fp32_groups, strict=True)
        return {id(low): high for lows, highs in pairs for low, high in zip(lows, highs, strict=True)}

    def _named_views(self, model: nn.Module) -> NamedViews:
        """Return the function that finds the parts of parameters in a tensor of the optimizer."""
        inside: dict[int, list[tuple[str, Region, int]]] = {}
        names = {id(p): name for name, p in model.named_parameters()}
        if self.stage == 0:
            for name, p in model.named_parameters():
                inside[id(self.master.get(id(p), p))] = [(name, Region(0, p.numel()), 0)]
        else:
            for flat, several in ranges_in_flat_tensors(self.zero, self.stage, self.world.data_rank, names):
                inside[id(flat)] = [(names[id(p)], Region(start, length), first) for p, start, length, first in several]

        def views(p: Tensor, t: Tensor) -> Iterator[tuple[str, ElementRuns, Tensor]]:
            for name, where, first in inside[id(p)]:
                for region, local in self._regions_of(name, where, t.view(-1)[first : first + where.numel]):
                    yield name, ElementRuns(*region), local

        return views

    def forget_first_step(self) -> None:
        """Set the optimizer's step count to 0: stage 0 in bf16 takes a real step, of rate 0, while it is created."""
        self.matrices.forget()
        for state in self.base.state.values():
            if "step" in state:
                state["step"] = torch.zeros_like(state["step"]) if isinstance(state["step"], Tensor) else 0

    def forget_gradients(self) -> None:
        """Zero the gradients of parameters that the first microbatch did not use: they still hold the last step's.

        Stage 3 overwrites only the gradients of the parameters that the first microbatch uses.
        """
        partitions = self.zero._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition
        for id_ in partitions.keys() - self.zero._offload_boundary_param_ids:
            partitions[id_].zero_()

    def whole(self, p: nn.Parameter) -> bool:
        """Return whether every rank keeps the whole parameter."""
        return self.stage == 0 or (self.stage < 3 and not p.requires_grad)

    def _copy(self, p: nn.Parameter) -> int:
        """Return this rank's place among those of the data that have the same part of a parameter."""
        return self.world.data_rank // (self._same_experts if id(p) in self._cut_ids else 1)

    def local_range(self, p: Any, kind: str) -> tuple[Region, Tensor] | None:
        """Return the range of `p` that this rank keeps in full precision, and its storage; None for no range."""
        key = None if kind == "weight" else kind
        if self.whole(p):
            master_copy: Any = self.master.get(id(p), p)
            return Region(0, p.numel()), (master_copy.data if key is None else self.base.state[master_copy][key])
        if self.stage < 3:
            part = p._hp_mapping
            if part is None:
                return None
            at = part.lp_fragment_address
            return Region(at.start, at.numel), part.get_hp_fragment(key)
        size = p.ds_tensor.ds_numel
        start = min(self._copy(p) * size, p.ds_numel)
        stop = min(start + size, p.ds_numel)
        master = self.zero._get_fp32_opt_state_partition
        flat = master(p, True, key)[0] if p.requires_grad else p.ds_tensor.data
        if self.swapped:
            flat = flat.clone()  # DeepSpeed reads the next one into the same memory
        return Region(start, stop - start), flat.view(-1)[: stop - start]

    def regions(self, name: str, p: Any, kind: str) -> Iterator[tuple[Region, Tensor]]:
        """Yield each region of the whole parameter that this rank keeps in full precision, and its storage."""
        if (mine := self.local_range(p, kind)) is not None:
            yield from self._regions_of(name, *mine)

    def _regions_of(self, name: str, where: Region, tensor: Tensor) -> Iterator[tuple[Region, Tensor]]:
        if self.split is None or name not in self.split.cuts:
            yield where, tensor
            return
        for region, local in self.split.regions(name, where.start, where.numel):
            yield region, local.of(tensor)

    def is_cut(self, name: str) -> bool:
        """Return whether each rank of `tensor` has another part of this parameter."""
        return self.split is not None and name in self.split.cuts

    def counts(self, p: nn.Parameter) -> bool:
        """Return whether this rank counts its part of a gradient: of those of `tensor` one does, where all have it."""
        return self.world.mesh.seat["tensor"] == 0 or id(p) in self._cut_ids

    def counts_whole(self, p: nn.Parameter) -> bool:
        """Return whether this rank counts its part of a gradient which all ranks of the data have, too."""
        return self.counts(p) and self._copy(p) == 0

    def counted_gradients(self) -> Iterator[Tensor]:
        """Yield this rank's parts of gradients that no other rank has, under stages 1 to 3."""
        groups = self.zero.fp16_groups if self.stage == 3 else self.zero.params_in_partition
        for number, held in self.zero.averaged_gradients.items():
            real = [g for g in held or [] if not getattr(g, "_zero_padding", False)]
            for p, gradient in zip(groups[number], real, strict=False):
                if self.counts(p):
                    yield gradient

    def relink(self) -> None:
        """Link fragments to optimizer states, which DeepSpeed itself does only after the first group's step."""
        if self.stage in (1, 2) and self.base.state:
            self.zero._hp_optimizer_states_linked = False
            self.zero._lazy_init_hp_params_optimizer_state()

    def unsaved_values(self) -> Iterator[str]:
        """Yield a sentence for each kind of value that no piece holds."""
        yield from self.matrices.unsaved_values()
        states = self.matrices.vector_states()
        for key in sorted({k for s in states for k, v in s.items() if isinstance(v, Tensor)} & KINDS_OF_MODEL):
            yield describe_reserved_key(key, "its partitions")
        for key, kind in sorted({(k, type(v).__name__) for s in states for k, v in s.items() if not _is_saved(k, v)}):
            yield (
                f"the optimizer keeps {key!r} as {kind}: of DeepSpeed's flat partitions a checkpoint holds tensors and "
                "the count of steps; keep it as a tensor, or choose another backend"
            )

    def pieces(self) -> Iterator[Piece]:
        self.relink()
        states = self.matrices.vector_states()
        moments = sorted({k for s in states for k, v in s.items() if isinstance(v, Tensor)} - {"step"})
        steps = [s["step"] for s in states if "step" in s]
        seat, counted = self.world.mesh.seat, set[str]()
        for name, p in self.model.named_parameters():
            cut, saved = self.is_cut(name), self._saved(name)
            shape = self.whole_shape(name, p)
            vector = p.requires_grad and name not in self.matrices
            for kind in ("weight", *(moments if vector else ())):
                first = (cut or seat["tensor"] == 0) and not (self.whole(p) and self._copy(p))
                for where, tensor in self.regions(name, p, kind) if first else ():
                    yield Piece(saved, kind, shape, where, tensor)
            if steps and vector and saved not in counted and self.world.rank == 0:
                counted.add(saved)
                yield Piece(saved, "step", (), Region(0, 1), torch.as_tensor(steps[0], dtype=torch.float32))
            if name in self.matrices:
                yield from self.matrices.pieces(name)

    def held_weights(self) -> Iterator[Piece]:
        """Yield each region of a weight that this rank computes with: in the model's precision, whole below stage 3."""
        for name, p in self.model.named_parameters():
            for region, local in self._regions_of(name, *self._held_range(p)):
                yield Piece(self._saved(name), "weight", self.whole_shape(name, p), region, local)

    def full_weights(self) -> Iterator[Piece]:
        """Yield each region of a trained weight that this rank keeps in full precision."""
        for name, p in self.model.named_parameters():
            if p.requires_grad:
                for region, local in self.regions(name, p, "weight"):
                    yield Piece(self._saved(name), "weight", self.whole_shape(name, p), region, local.detach())

    @torch.no_grad()
    def use_masters(self) -> None:
        """Copy what is kept in full precision into the parameters that are computed with, as the end of a step does."""
        if self.stage == 0:
            for p in self.model.parameters():
                if (master := self.master.get(id(p))) is not None:
                    p.copy_(master)
        elif self.stage < 3:
            self.zero.update_lp_params()
        else:
            self.zero._partition_all_parameters()
            for number in range(len(self.zero.fp16_groups)):
                self.zero._reassign_or_swap_out_partitioned_parameters(number)
            if kept_whole := self.zero.persistent_parameters:
                kept_whole[0].all_gather(kept_whole)

    def _held_range(self, p: Any) -> tuple[Region, Tensor]:
        if self.stage < 3:
            return Region(0, p.numel()), p.data
        size = p.ds_tensor.ds_numel
        start = min(self._copy(p) * size, p.ds_numel)
        where = Region(start, min(start + size, p.ds_numel) - start)
        return where, p.ds_tensor.data.view(-1)[: where.length]

    def _saved(self, name: str) -> str:
        """Return the user's name of a parameter: the library's own layers have others."""
        return name if self.split is None else self.split.saved_name(name)

    def whole_shape(self, name: str, p: Any) -> tuple[int, ...]:
        """Return the shape of the whole parameter."""
        if self.split is not None and name in self.split.cuts:
            return self.split.cuts[name].shape
        return tuple(getattr(p, "ds_shape", p.shape))

    @torch.no_grad()
    def restore(self, read: Read) -> None:
        named = list(self.model.named_parameters())
        for name, p in named:  # the working copy: whole, one at a time
            with deepspeed.zero.GatheredParameters([p], modifier_rank=0, enabled=self.stage == 3):
                flat = p.data.view(-1)
                for where, tensor in self._regions_of(name, Region(0, p.numel()), flat):
                    read.fill(tensor, self._saved(name), "weight", where)
        trained = (self._saved(name) for name, p in named if p.requires_grad and name not in self.matrices)
        vectors = {name: read.kinds(name) - {"weight"} for name in trained}
        _refuse_unequal_states(vectors)
        kinds = next(iter(vectors.values()), set[str]())
        if kinds:
            self._new_states(kinds, read(next(iter(vectors)), "step", Region(0, 1)) if "step" in kinds else None)
        self.relink()
        self.matrices.restore(read)
        self.put("weight", lambda name, where: read(name, "weight", where))
        for kind in sorted(kinds - {"step"}):
            self.put(kind, lambda name, where, kind=kind: read(name, kind, where), vectors)

    def _new_states(self, kinds: set[str], step: Tensor | None) -> None:
        """Create zero states for the kinds, with one step count for each flat partition, as DeepSpeed has them."""
        slots = [p for g in self.base.param_groups for p in g["params"]]
        if self.stage == 3:
            slots = list(self.zero.fp32_partitioned_groups_flat)
        for slot in slots:
            if self.matrices.holds(slot):
                continue
            fresh: dict[str, Any] = {k: torch.zeros_like(slot.data) for k in kinds - {"step"}}
            if isinstance(self.base, RoundedMoments):
                fresh |= {k: self.base.new_moment(slot.data) for k in fresh.keys() & MOMENTS}
            if step is not None:
                device = slot.device if steps_on_device(self.base) else step.device
                fresh["step"] = step.to(device, torch.float32, copy=True).view(())
            self.base.state[slot] = fresh

    @torch.no_grad()
    def put(self, kind: str, source: ReadRegion, among: Collection[str] | None = None) -> None:
        """Fill this rank's range of trained parameters from `source`: of all, or of those among some names."""
        for name, p in self.model.named_parameters():
            saved = self._saved(name)
            if p.requires_grad and (among is None or saved in among):
                for where, tensor in self.regions(name, p, kind):
                    tensor.copy_(source(saved, where).view(tensor.shape))

    @torch.no_grad()
    def put_masters(self, exact: Mapping[str, Tensor], device: torch.device) -> None:
        """Fill this rank's range of every trained parameter's master from rank 0's values, one at a time."""
        for name, p in self.model.named_parameters():
            if p.requires_grad:
                full = broadcast_tensor(exact[name], device).view(-1)
                for where, tensor in self.regions(name, p, "weight"):
                    tensor.copy_(where.of(full).view(tensor.shape))


def _refuse_unequal_states(saved: Mapping[str, Set[str]]) -> None:
    """Raise CheckpointError unless all these parameters have state of the same kinds in a checkpoint."""
    names: dict[tuple[str, ...], str] = {}
    for name, kinds in saved.items():
        names.setdefault(tuple(sorted(kinds)), name)
    if len(names) > 1:
        first, other = (f"{', '.join(kinds) or 'no state'} of {name}" for kinds, name in list(names.items())[:2])
        raise CheckpointError(
            f"the checkpoint has {first}, and {other}: ZeRO keeps one kind of state for all parameters that are no "
            "matrices of Muon, so that train.optimizer.matrices and adamw_for, and what is trained, must be as they "
            "were; take that back, or go on in a strategy that keeps the state of each parameter by itself, as "
            "--backend native and horovod do"
        )


def _is_saved(key: str, value: Any) -> bool:
    return key == "step" or isinstance(value, Tensor)


def keep_exact_values(module: nn.Module, config: Config, world: World) -> Mapping[str, Tensor] | None:
    """Return the exact initial values under bf16-master; DeepSpeed would start from bf16 roundings.

    Rank 0 has them, until masters are filled; others know their shapes.
    """
    if config.train.precision != "bf16-master":
        return None
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    return trained if world.rank == 0 else {name: torch.empty_like(p, device="meta") for name, p in trained.items()}
