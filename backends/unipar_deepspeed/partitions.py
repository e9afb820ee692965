"""Who holds what in ZeRO 0 to 3: which range of each parameter a rank keeps in full precision, and where."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, final

import deepspeed
import torch
from torch import Tensor, nn

from unipar.backend import Piece, Read
from unipar.config import Config
from unipar.distributed.world import World
from unipar.engines.placement import broadcast_tensor

ReadRange = Callable[[str, tuple[int, int]], Tensor]


@final
class ZeroPartitions:
    """Finds the storage of one parameter's weight or moment on this rank."""

    def __init__(self, model: nn.Module, engine: Any, stage: int, world: World, *, swapped: bool = False) -> None:
        """`swapped`: masters and moments are on the disk, and in memory for the moment that they are asked for."""
        self.model, self.stage, self.world, self.swapped = model, stage, world, swapped
        self.zero, self.base = engine.optimizer, engine.basic_optimizer
        self.master = self._masters()

    def _masters(self) -> dict[int, Tensor]:
        """Stage 0 with bf16 parameters keeps whole fp32 copies beside them."""
        if self.stage or self.zero is self.base:
            return {}
        pairs = zip(self.zero.fp16_groups, self.zero.fp32_groups, strict=True)
        return {id(low): high for lows, highs in pairs for low, high in zip(lows, highs, strict=True)}

    def forget_first_step(self) -> None:
        """Stage 0 in bf16 takes one real step while it is made; the rate was 0, but the count is 1 ahead."""
        for state in self.base.state.values():
            if "step" in state:
                state["step"] = torch.zeros_like(state["step"]) if isinstance(state["step"], Tensor) else 0

    def forget_gradients(self) -> None:
        """Stage 3 writes over the gradients of what the first microbatch uses; others' are still the last step's."""
        kept = self.zero._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition
        for id_ in kept.keys() - self.zero._offload_boundary_param_ids:
            kept[id_].zero_()

    def whole(self, p: nn.Parameter) -> bool:
        return self.stage == 0 or (self.stage < 3 and not p.requires_grad)

    def local_range(self, p: Any, kind: str) -> tuple[tuple[int, int], Tensor] | None:
        """The flat range of `p` that this rank keeps in full precision, and its storage."""
        key = None if kind == "weight" else kind
        if self.whole(p):
            kept: Any = self.master.get(id(p), p)
            return (0, p.numel()), (kept.data if key is None else self.base.state[kept][key])
        if self.stage < 3:
            part = p._hp_mapping
            if part is None:
                return None
            at = part.lp_fragment_address
            return (at.start, at.start + at.numel), part.get_hp_fragment(key)
        size = p.ds_tensor.ds_numel
        start = min(self.world.rank * size, p.ds_numel)
        stop = min(start + size, p.ds_numel)
        master = self.zero._get_fp32_opt_state_partition
        flat = master(p, True, key)[0] if p.requires_grad else p.ds_tensor.data
        if self.swapped:
            flat = flat.clone()  # the next one comes into the same memory
        return (start, stop), flat.view(-1)[: stop - start]

    def relink(self) -> None:
        """The library links fragments to states after the first group's step only."""
        if self.stage in (1, 2) and self.base.state:
            self.zero._hp_optimizer_states_linked = False
            self.zero._lazy_init_hp_params_optimizer_state()

    def pieces(self) -> Iterator[Piece]:
        self.relink()
        states = [s for s in self.base.state.values() if s]
        moments = sorted({k for s in states for k, v in s.items() if isinstance(v, Tensor)} - {"step"})
        steps = [s["step"] for s in states if "step" in s]
        for name, p in self.model.named_parameters():
            shape = tuple(getattr(p, "ds_shape", p.shape))
            for kind in ("weight", *(moments if p.requires_grad else ())):
                mine = self.local_range(p, kind)
                if mine is not None and not (self.whole(p) and self.world.rank):
                    yield Piece(name, kind, shape, *mine)
            if steps and p.requires_grad and self.world.rank == 0:
                yield Piece(name, "step", (), (0, 1), torch.as_tensor(steps[0], dtype=torch.float32))

    @torch.no_grad()
    def restore(self, read: Read) -> None:
        named = list(self.model.named_parameters())
        for name, p in named:  # the working copy: whole, one at a time
            with deepspeed.zero.GatheredParameters([p], modifier_rank=0, enabled=self.stage == 3):
                p.data.view(-1).copy_(read(name, "weight", (0, p.numel())))
        trained = [name for name, p in named if p.requires_grad]
        kinds = {k for name in trained for k in read.kinds(name)} - {"weight"}
        if kinds:
            self._new_states(kinds, read(trained[0], "step", (0, 1)).view(()) if "step" in kinds else None)
        self.relink()
        for kind in ("weight", *sorted(kinds - {"step"})):
            self.put(kind, lambda name, where, kind=kind: read(name, kind, where))

    def _new_states(self, kinds: set[str], step: Tensor | None) -> None:
        """The library keeps one step for a whole flat partition."""
        slots = [p for g in self.base.param_groups for p in g["params"]]
        if self.stage == 3:
            slots = list(self.zero.fp32_partitioned_groups_flat)
        for slot in slots:
            fresh: dict[str, Any] = {k: torch.zeros_like(slot.data) for k in kinds - {"step"}}
            if step is not None:
                fresh["step"] = step.clone().to(torch.float32)
            self.base.state[slot] = fresh

    @torch.no_grad()
    def put(self, kind: str, source: ReadRange) -> None:
        """Fill what this rank keeps of every trained parameter."""
        for name, p in self.model.named_parameters():
            if p.requires_grad and (mine := self.local_range(p, kind)) is not None:
                where, tensor = mine
                tensor.view(-1).copy_(source(name, where))


def keep_exact_values(module: nn.Module, config: Config, world: World) -> ReadRange | None:
    """bf16-master: the exact initial values, which the library would take from their bf16 rounding."""
    if config.train.precision != "bf16-master":
        return None
    exact = {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}
    sent: dict[str, Tensor] = {}

    def source(name: str, where: tuple[int, int]) -> Tensor:
        return sent[name][slice(*where)]

    for name, p in exact.items():  # rank 0 has them all; the others keep them until the masters are filled
        sent[name] = broadcast_tensor(p, world.device).clone().view(-1)
    return source
