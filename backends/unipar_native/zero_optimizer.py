"""ZeroRedundancyOptimizer: each rank keeps the optimizer's states of some whole parameters, and steps those."""

from __future__ import annotations

from typing import Any

from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import Optimizer

from unipar.errors import TaskError
from unipar_native import ZERO_OPTIMIZER_SETTINGS


def split_optimizer(whole: Optimizer) -> ZeroRedundancyOptimizer:
    """Each rank steps some of the parameters with what is left of `whole`, and sends them to all."""
    dtypes = sorted({str(p.dtype) for group in whole.param_groups for p in group["params"]})
    if len(dtypes) > 1:
        raise TaskError(
            f"native/optimizer cannot hold parameters of {' and '.join(dtypes)} together, as ZeroRedundancyOptimizer "
            "takes one dtype: give all the same, or set parallel.shard: nothing"
        )

    def mine(groups: list[dict[str, Any]]) -> Optimizer:
        """The optimizer itself, whatever its class, less the parameters of other ranks."""
        for group, own in zip(whole.param_groups, groups, strict=True):
            group["params"] = own["params"]
        kept = {p for group in groups for p in group["params"]}
        for p in set(whole.state) - kept:
            del whole.state[p]
        return whole

    groups = [dict(group) for group in whole.param_groups]
    make: Any = mine  # annotated as a class; any callable will do
    return ZeroRedundancyOptimizer(groups, make, **ZERO_OPTIMIZER_SETTINGS)
