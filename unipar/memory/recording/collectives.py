"""What a step sends: the payload of every collective that torch.distributed is asked for."""

from __future__ import annotations

from collections import Counter
from typing import Any, Final, final

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

TRAFFIC_METHOD: Final = "each call of torch.distributed's operators"

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
"""How operators' names begin, without underscores, and what they are called here; barriers carry nothing."""


@final
class CollectiveCounter(TorchDispatchMode):
    """Adds up bytes by collective. A payload is the whole tensor that a call is about: of what a rank gives and what it
    gets the larger."""

    def __init__(self, found: Counter[str]) -> None:
        super().__init__()
        self._found = found

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # it asks for what it sends itself, and that comes by here
        out = func(*args, **(kwargs or {}))
        if (kind := collective_of(func._schema.name)) is not None:
            self._found[kind] += max(_tensor_bytes(part) for part in (*args[:2], out))
        return out


def collective_of(operator: str) -> str | None:
    """`c10d::_allgather_base_` is an all_gather; None where nothing is sent."""
    space, _, name = operator.partition("::")
    name = name.replace("_", "")
    if space not in _NAMESPACES:
        return None
    return next((kind for begins, kind in _COLLECTIVE_OF_PREFIX.items() if name.startswith(begins)), None)


def _tensor_bytes(part: Any) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(part) if isinstance(leaf, Tensor))
