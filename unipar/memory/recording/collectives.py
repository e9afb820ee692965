"""Communication of a step: payload bytes of every collective of torch.distributed."""

from __future__ import annotations

from collections import Counter
from typing import Any, Final, final

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

TRAFFIC_METHOD: Final = "each call of torch.distributed's operators"
"""Description of how bytes are counted, for the account."""

_NAMESPACES: Final = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
_COLLECTIVE_OF_PREFIX: Final = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
    "scatter": "scatter",
    "gather": "gather",
    "reduce": "reduce",
    "send": "send",
}
"""Collective by the prefix of its operators' names, underscores removed; barriers are absent: they carry no payload."""


@final
class CollectiveCounter(TorchDispatchMode):
    """Dispatch mode that adds up payload bytes by collective.

    The payload of a call is the larger of the tensor that the rank gives and the tensor that it gets.
    """

    def __init__(self, totals: Counter[str]) -> None:
        super().__init__()
        self._totals = totals

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # DTensor calls the collectives on plain tensors, which are counted then
        out = func(*args, **(kwargs or {}))
        if (kind := collective_of(func._schema.name)) is not None:
            self._totals[kind] += max(_tensor_bytes(part) for part in (*args[:2], out))
        return out


def collective_of(operator: str) -> str | None:
    """Return the collective of an operator (`c10d::_allgather_base_` is an all_gather), or None if it sends nothing."""
    space, _, name = operator.partition("::")
    name = name.replace("_", "")
    if space not in _NAMESPACES:
        return None
    return next((kind for begins, kind in _COLLECTIVE_OF_PREFIX.items() if name.startswith(begins)), None)


def _tensor_bytes(part: Any) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(part) if isinstance(leaf, Tensor))
