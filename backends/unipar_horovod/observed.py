"""Knowledge about scripts that use Horovod, for `unipar observe`."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from types import ModuleType
from typing import Any, ClassVar, Final, final

from typing_extensions import override

from unipar.backend.observed_library import ObservedLibrary, TrainingFault

_COLLECTIVE_OF_FUNCTION: Final = {
    "_allreduce_async": "all_reduce",
    "_grouped_allreduce_async": "all_reduce",
    "_allgather_async": "all_gather",
    "_grouped_allgather_async": "all_gather",
    "_broadcast_async": "broadcast",
    "_alltoall_async": "all_to_all",
    "_reducescatter_async": "reduce_scatter",
    "_grouped_reducescatter_async": "reduce_scatter",
}
"""Collective of each function of horovod.torch.mpi_ops through which all others go."""


@final
class _ScriptsOfHorovod(ObservedLibrary):
    name = "Horovod"
    module = "horovod"
    ways_out: ClassVar[Mapping[TrainingFault, str]] = {
        "unreduced gradients": "wrap the optimizer in hvd.DistributedOptimizer and call its step",
        "unequal initial weights": "call hvd.broadcast_parameters(model.state_dict(), root_rank=0) before training",
        "unequal copies": "call hvd.broadcast_parameters and hvd.broadcast_optimizer_state before training",
        "same batches": "give the DataLoader a DistributedSampler(num_replicas=hvd.size(), rank=hvd.rank())",
    }

    @override
    def place(self) -> tuple[int, int] | None:
        library: Any = sys.modules.get("horovod.torch")
        if library is None or not library.is_initialized():
            return None
        return library.rank(), library.size()

    @override
    def sends(self) -> AbstractContextManager[Mapping[str, int]] | None:
        operations = sys.modules.get("horovod.torch.mpi_ops")
        return None if operations is None else _count_calls(operations)


@contextmanager
def _count_calls(operations: ModuleType) -> Generator[Mapping[str, int]]:
    """Context manager: yield the bytes of the tensors that are given to Horovod's functions meanwhile."""
    sent: Counter[str] = Counter()
    real = {name: getattr(operations, name) for name in _COLLECTIVE_OF_FUNCTION if hasattr(operations, name)}

    def counting(name: str) -> Any:
        @wraps(real[name])
        def call(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            handle = real[name](tensors, *args, **kwargs)
            given = tensors if isinstance(tensors, list | tuple) else (tensors,)
            sent[_COLLECTIVE_OF_FUNCTION[name]] += sum(tensor.nbytes for tensor in given)
            return handle

        return call

    for name in real:
        setattr(operations, name, counting(name))
    try:
        yield sent
    finally:
        for name, function in real.items():
            setattr(operations, name, function)


LIBRARY: Final = _ScriptsOfHorovod()
