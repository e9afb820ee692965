"""Sentences of the mesh engine: what it refuses, and what a task says about its matrices."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase  # pyright: ignore[reportPrivateUsage]

from unipar.backend import Part
from unipar.config import Config
from unipar.engines.placement import refuse_scalar_parameters, refuse_shared_parameters
from unipar.errors import TaskError
from unipar.model.create import ONLY_PART
from unipar.utils.text import first_few
from unipar_mesh.tensor.cuts import BlockPlan


def kinds_in_block(kinds: Mapping[str, str], name: str, block: nn.Module) -> dict[str, str]:
    """Return what the task's tensor(model) says of a block's matrices, by their names in the block."""
    return {
        inner: kind
        for pattern, kind in kinds.items()
        for inner, _ in block.named_modules()
        if inner and fnmatchcase(f"{name}.{inner}", pattern)
    }


def refuse_unknown_patterns(kinds: Mapping[str, str], module: nn.Module, blocks: Sequence[str]) -> None:
    """Raise TaskError for a pattern of the task's tensor(model) that names nothing in any block."""
    known = [f"{name}.{inner}" for name in blocks for inner, _ in module.get_submodule(name).named_modules() if inner]
    for pattern in kinds:
        if not any(fnmatchcase(name, pattern) for name in known):
            weights = [(name, getattr(module.get_submodule(name), "weight", None)) for name in known]
            matrices = [name for name, weight in weights if isinstance(weight, Tensor) and weight.ndim > 1]
            raise TaskError(
                f"tensor() says {kinds[pattern]} for {pattern!r}, and no module of a block has that name; name one of "
                f"{first_few(matrices, most=8)}"
            )


def refuse_empty_plans(ranks: int, plans: Collection[BlockPlan], blocks: Sequence[str]) -> None:
    """Raise TaskError if none of the blocks has a matrix that can be cut."""
    if any(plan.cuts for plan in plans):
        return
    if plans and all("weight" in plan.whole and plan.whole.keys() <= {"weight", "bias"} for plan in plans):
        raise TaskError(
            f"parallel.tensor: {ranks} splits matrices within blocks, and each block of this model is one layer "
            f"({first_few(blocks, most=3)}): name the modules around them in model.blocks, or leave tensor out"
        )
    reasons = {f"{name}: {why}" for plan in plans for name, why in plan.whole.items()}
    shown = "; ".join(sorted(reasons)[:3])
    raise TaskError(
        f"parallel.tensor: {ranks} would split nothing of this model ({shown or 'its blocks have no matrices'}): "
        "leave tensor out, or name what it can split in the task's tensor(model)"
    )


def refuse_part(part: Part, config: Config) -> None:
    """Raise TaskError for what no mesh can split."""
    axes = config.parallel.axes
    strategy = f"parallel ({axes})"
    if part.name != ONLY_PART:
        raise TaskError(
            f"{strategy} splits one model, and model() returned parts by name ({part.name!r} is one): use ranks of "
            "data alone, with parallel.shard"
        )
    if not part.blocks:
        raise TaskError(
            f"{strategy} splits blocks, and the model has none: name them in model.blocks or in the task's blocks()"
        )
    refuse_shared_parameters(part, strategy)
    if config.parallel.data != 1 or axes.context > 1:
        refuse_scalar_parameters(part.module, strategy)
    if axes.stages > len(part.blocks):
        of_ranks = f" ({axes.pieces} on each of {axes.pipeline} ranks, by {axes.schedule})" if axes.pieces > 1 else ""
        other = ", take schedule 1f1b" if axes.pieces > 1 else ""
        raise TaskError(
            f"parallel.pipeline: {axes.stages} stages{of_ranks} need a block each, and the model has "
            f"{len(part.blocks)} ({', '.join(part.blocks)}): lower pipeline{other}, or name smaller blocks in "
            "model.blocks"
        )
    for axis in ("tensor", "context"):
        for name in part.blocks if axes.sizes.get(axis, 1) > 1 else ():
            for inner, module in part.module.get_submodule(name).named_modules():
                if isinstance(module, _NormBase) and module.track_running_stats:
                    raise TaskError(
                        f"parallel.{axis}: {axes.sizes[axis]} splits what {name}.{inner} computes statistics of, a "
                        f"{type(module).__name__}: replace it by LayerNorm or GroupNorm, or leave parallel.{axis} out"
                    )
