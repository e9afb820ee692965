"""PyTorch's own engines as several backends use them: what a strategy runs through, and where it allocates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from unipar.backend.engine import Category
from unipar.config import Config

if TYPE_CHECKING:
    from unipar.prediction.timeline import OverlapWindow

_FSDP_FOLDER = "torch/distributed/fsdp/_fully_shard"
TORCH_CALL_SITES: Final[dict[str, Category]] = {
    f"{_FSDP_FOLDER}/_fsdp_collectives.py:foreach_all_gather": "communication",
    f"{_FSDP_FOLDER}/_fsdp_collectives.py:foreach_reduce": "communication",
    f"{_FSDP_FOLDER}/_fsdp_param_group.py:wait_for_unshard": "communication",
    f"{_FSDP_FOLDER}/_fsdp_param.py:to_accumulated_grad_if_needed": "gradients",  # up to torch 2.13
    f"{_FSDP_FOLDER}/_fsdp_param_group.py:_set_unsharded_grad_dtypes": "gradients",  # the same in torch 2.15
    "torch/nn/parallel/distributed.py:_ddp_init_helper": "gradients",  # buckets, before gradients are views of them
    "torch/nn/parallel/distributed.py:_pre_forward": "gradients",
}
"""Category of what these functions of PyTorch allocate."""

AXIS_NAMES: Final = {"tensor": "TP", "pipeline": "PP", "context": "CP", "expert": "EP"}
"""Names that users of PyTorch have for splitting along an axis."""


def uses_ddp(config: Config) -> bool:
    """Return whether DDP wraps the model; only FSDP2 has fp32 masters of bf16 parameters, and parallel.shard_over."""
    alike = config.train.precision != "bf16-master" and config.parallel.shard_over is None
    return config.parallel.shard == "nothing" or (config.parallel.shard == "optimizer" and alike)


def torch_library(config: Config) -> str:
    """Return the names that users of PyTorch have for what a strategy runs through."""
    axes, shard = config.parallel.axes, config.parallel.shard
    if axes.split:
        return " + ".join([*(("FSDP2",) if shard != "nothing" else ()), *(AXIS_NAMES[name] for name in axes.sizes)])
    if uses_ddp(config):
        return "DDP" if shard == "nothing" else "ZeroRedundancyOptimizer"
    return "FSDP2" if shard == "parameters" else "FSDP2, no reshard"


def torch_overlaps(config: Config) -> Mapping[str, OverlapWindow]:
    """Return during what each kind of collective of DDP or FSDP2 runs."""
    return {"all_reduce": "last backward"} if uses_ddp(config) else {"all_gather": "step", "reduce_scatter": "step"}
