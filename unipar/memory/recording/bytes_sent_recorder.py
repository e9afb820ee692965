"""Communication of a step: bytes sent of every collective of torch.distributed, by axis of the mesh."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple, Protocol, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from unipar.config.sections.strategy import EXPERT_AXIS
from unipar.distributed.mesh import Mesh
from unipar.distributed.world_machines import WorldMachines
from unipar.memory.account import ALL_RANKS, UNKNOWN_AXIS

TRAFFIC_METHOD: Final = "each call of torch.distributed's operators"
"""Description of how bytes are counted, for the account."""

Traffic = Counter[tuple[str, str]]
"""Bytes sent by axis and collective."""

_NAMESPACES: Final = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
_GROUP_ARGUMENTS: Final = ("process_group", "group_name")
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
"""Collective by the prefix of its operators' names, underscores removed; barriers are absent: they carry no bytes."""


class AxesOfRanks(Protocol):
    """Axes along which ranks lie, such as a mesh's."""

    @property
    def ranks(self) -> int:
        """Number of ranks in all."""
        ...

    def axes_among(self, ranks: Iterable[int]) -> tuple[str, ...]:
        """Return the axes along which these ranks differ."""
        ...


class GroupOfCall(NamedTuple):
    """Axis of a process group, and whether it is on several machines."""

    axis: str | None
    """Axis along which it lies; None: it is one rank."""

    across: bool
    """Whether it has ranks on several machines."""


@final
class CallGroups:
    """Process groups of calls: each is looked up once."""

    def __init__(self, mesh: AxesOfRanks, machines: WorldMachines | None = None) -> None:
        self._mesh, self._machines = mesh, machines
        self._has_experts = isinstance(mesh, Mesh) and mesh.expert > 1
        self._groups: dict[str, GroupOfCall] = {}

    def of_call(self, kind: str, schema: Any, args: Any, kwargs: Any) -> GroupOfCall:
        """Return the group of a call of the collective `kind`; that of experts has an axis of its own."""
        arguments = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | kwargs
        return self.find(kind, next((arguments[name] for name in _GROUP_ARGUMENTS if name in arguments), None))

    def find(self, kind: str, group: Any) -> GroupOfCall:
        """Return the same of a process group, or of its name."""
        try:
            if isinstance(group, torch.ScriptObject):
                group = dist.ProcessGroup.unbox(group)
            elif isinstance(group, str):
                group = _group_by_name(group)
            name: str = group.group_name
            if name not in self._groups:
                ranks = dist.get_process_group_ranks(group)
                across = self._machines is not None and self._machines.between(ranks)
                self._groups[name] = GroupOfCall(axis_of_ranks(self._mesh, ranks), across)
            found = self._groups[name]
        except Exception:  # a group that torch does not know; its bytes count all the same
            return GroupOfCall(UNKNOWN_AXIS, across=False)
        to_experts = self._has_experts and (found.axis, kind) == ("data", "all_to_all")  # all others send no rows
        return found._replace(axis=EXPERT_AXIS) if to_experts else found


class CollectiveMode(TorchDispatchMode, ABC):
    """Dispatch mode that meets each collective of torch.distributed; autograd's threads inherit it."""

    def __init__(self) -> None:
        super().__init__()
        self._kinds: dict[Any, str | None] = {}

    @abstractmethod
    def call(self, kind: str, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Return what the operator `func`, a collective of this kind, returns."""

    @classmethod
    @override
    def is_infra_mode(cls) -> bool:
        """Return True: what torch.compile has compiled runs under it, instead of what it was compiled from."""
        return True

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # DTensor calls the collectives on plain tensors, which are met then
        if func not in self._kinds:
            self._kinds[func] = collective_of(func._schema.name)
        kind = self._kinds[func]
        return func(*args, **(kwargs or {})) if kind is None else self.call(kind, func, args, kwargs or {})


@final
class CollectiveCounter(CollectiveMode):
    """Dispatch mode that adds up bytes sent by axis of the mesh and collective.

    The bytes of a call are the larger of the tensor that the rank gives and the tensor that it gets. Calls in a group
    of one rank send nothing, and do not count.
    """

    def __init__(self, traffic: Traffic, mesh: AxesOfRanks, machines: WorldMachines | None = None) -> None:
        super().__init__()
        self._traffic, self._groups = traffic, CallGroups(mesh, machines)
        self.calls: Counter[tuple[str, str]] = Counter()
        """Number of calls by axis and collective."""

        self.across = 0
        """Bytes of calls whose group has ranks on several machines."""

    @override
    def call(self, kind: str, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        out = func(*args, **kwargs)
        axis, across = self._groups.of_call(kind, func._schema, args, kwargs)
        if axis is not None:
            size = bytes_of_call(args, out)
            self._traffic[axis, kind] += size
            self.across += size if across else 0
            self.calls[axis, kind] += 1
        return out


_group_by_name: Final[Callable[[str], Any]] = vars(distributed_c10d)["_resolve_process_group"]
"""Group by its name; torch has no public name for it."""


def axis_of_ranks(mesh: AxesOfRanks, ranks: list[int]) -> str | None:
    """Return the axis of the mesh along which a group of these ranks lies, or None if it is one rank.

    A group along several axes is named by all of them. One of all ranks is `all ranks` if it lies along tensor or
    pipeline and others; ranks of data and context train the same parameters, and share their gradients.
    """
    if len(ranks) < 2:
        return None
    axes = mesh.axes_among(ranks)
    everywhere = len(ranks) == mesh.ranks and len(axes) > 1 and axes != ("data", "context")
    return ALL_RANKS if everywhere else " x ".join(axes)


def collective_of(operator: str) -> str | None:
    """Return the collective of an operator (`c10d::_allgather_base_` is an all_gather), or None if it sends nothing."""
    space, _, name = operator.partition("::")
    name = name.replace("_", "")
    if space not in _NAMESPACES:
        return None
    return next((kind for begins, kind in _COLLECTIVE_OF_PREFIX.items() if name.startswith(begins)), None)


def bytes_of_call(args: Any, out: Any) -> int:
    """Return the bytes of a call of such an operator: the larger of what it is given and what it returns."""
    return max(_tensor_bytes(part) for part in (*args[:2], out))


def _tensor_bytes(part: Any) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(part) if isinstance(leaf, Tensor))
