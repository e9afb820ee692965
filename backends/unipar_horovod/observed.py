"""Knowledge about scripts that use Horovod, for `unipar observe`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, ClassVar, Final, final

from typing_extensions import override

from unipar.backend.observed_library import ObservedLibrary, TrainingFault


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


LIBRARY: Final = _ScriptsOfHorovod()
