"""ZeroRedundancyOptimizer: each rank keeps the optimizer states of some whole parameters, and updates those."""

from __future__ import annotations

from typing import Any

from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import Optimizer

from unipar.errors import TaskError
from unipar_native import ZERO_OPTIMIZER_SETTINGS


def split_optimizer(optimizer: Optimizer) -> ZeroRedundancyOptimizer:
    """Return an optimizer that updates on each rank its share of the parameters of `optimizer`, and sends them."""
    dtypes = sorted({str(p.dtype) for group in optimizer.param_groups for p in group["params"]})
    if len(dtypes) > 1:
        raise TaskError(
            f"native/optimizer does not support parameters of {' and '.join(dtypes)} together, as "
            "ZeroRedundancyOptimizer takes one dtype: use one for all, or set parallel.shard: nothing"
        )

    def local_part(groups: list[dict[str, Any]]) -> Optimizer:
        """Return `optimizer` itself, whatever its class, without the parameters of other ranks."""
        for group, own in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = own["params"]
        own_parameters = {p for group in groups for p in group["params"]}
        for p in set(optimizer.state) - own_parameters:
            del optimizer.state[p]
        return optimizer

    groups = [dict(group) for group in optimizer.param_groups]
    make: Any = local_part  # ZeroRedundancyOptimizer's annotation wants a class, but it calls any callable
    return ZeroRedundancyOptimizer(groups, make, **ZERO_OPTIMIZER_SETTINGS)
