"""Knowledge about scripts that use DeepSpeed, for `unipar observe`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final, final

from typing_extensions import override

from unipar.backend import Category, Holding
from unipar.backend.observed_library import ObservedLibrary, TrainingFault
from unipar_deepspeed import DeepSpeed

if TYPE_CHECKING:
    from torch import nn


@final
class _ScriptsOfDeepSpeed(ObservedLibrary):
    name = "DeepSpeed"
    module = "deepspeed"
    wrappers: ClassVar[Mapping[str, str]] = {"DeepSpeedEngine": "DeepSpeed", "PipelineEngine": "DeepSpeed's pipeline"}
    sites: ClassVar[Mapping[str, Category]] = DeepSpeed.capabilities.sites
    ways_out: ClassVar[Mapping[TrainingFault, str]] = {
        "unreduced gradients": "call the engine that deepspeed.initialize returns, its backward and its step, and not "
        "the model's own",
        "same batches": "give deepspeed.initialize the training_data, or the DataLoader a DistributedSampler",
        "coarse dtype": "set bf16.enabled or fp16.enabled in the config instead of converting the model",
        "schedule too fast": "leave the schedule to the engine, or step it once for each update",
    }

    @override
    def holdings(self, model: nn.Module) -> Iterable[Holding] | None:
        if type(model).__name__ != "DeepSpeedEngine" or not hasattr(model, "basic_optimizer"):
            return None
        engine: Any = model
        if not hasattr(engine.optimizer, "zero_grad"):
            return None
        from unipar_deepspeed.zero_holdings import zero_holdings

        return zero_holdings(engine.module, engine) if engine.zero_optimization() else None

    @override
    def norm_before_clip(self, model: nn.Module) -> float | None:
        norm: Any = getattr(model, "get_global_grad_norm", lambda: None)()
        return None if norm is None else float(norm)

    @override
    def config_of(self, model: nn.Module) -> Mapping[str, Any] | None:
        config: Any = getattr(getattr(model, "_config", None), "_param_dict", None)
        return config if isinstance(config, dict) else None


LIBRARY: Final = _ScriptsOfDeepSpeed()
