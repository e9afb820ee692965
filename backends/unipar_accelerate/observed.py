"""Knowledge about scripts that use Hugging Face Accelerate, for `unipar observe`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Final, final

from unipar.backend.observed_library import ObservedLibrary, TrainingFault


@final
class _ScriptsOfAccelerate(ObservedLibrary):
    name = "Accelerate"
    module = "accelerate"
    ways_out: ClassVar[Mapping[TrainingFault, str]] = {
        "no group": "give `accelerate launch` --multi_cpu or --multi_gpu, or a config made by `accelerate config`",
        "unreduced gradients": "pass the model through accelerator.prepare, call what it returns, and accumulate by "
        "`with accelerator.accumulate(model):`",
        "schedule too fast": "Accelerator(step_scheduler_with_optimizer=False), or give the schedule world times as "
        "many steps",
        "same batches": "pass the DataLoader through accelerator.prepare",
        "weights outside the optimizer": "pass model and optimizer through accelerator.prepare in one call",
        "same dropout": "call accelerate.utils.set_seed(seed, device_specific=True) after the model is made",
        "unequal initial weights": "call accelerate.utils.set_seed before the model is made",
        "repeated order": "pass the DataLoader through accelerator.prepare, or call its set_epoch",
    }


LIBRARY: Final = _ScriptsOfAccelerate()
