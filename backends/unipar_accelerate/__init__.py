"""Hugging Face Accelerate, over DDP. A description; the engine is in engine.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal, final

from typing_extensions import override

from unipar.backend import Backend, Capabilities, Dtypes, Engine, Part
from unipar.config import Config, Section
from unipar.place import TORCH_VARIABLES, Launcher, Place
from unipar.precision import stated

if TYPE_CHECKING:
    from unipar.world import World


class AccelerateOptions(Section):
    """options.accelerate"""

    find_unused: bool | Literal["auto"] = "auto"
    """DDP's search for parameters that the loss does not use. auto: the first step shows whether it is needed;
    true: at every step, for a model that uses other parameters at other times; false: never."""


@final
class Accelerate(Backend):
    name = "accelerate"
    requires = ("accelerate",)
    hint = "pip install 'unipar[accelerate]'"
    options: ClassVar[type[Section]] = AccelerateOptions
    capabilities = Capabilities(
        shards=("nothing",),
        gaps={
            (None, "fp16"): "it needs CUDA and loss scaling, which are not there yet; use bf16-mixed",
            (None, "bf16-master"): "Accelerate's DDP keeps one copy of the parameters, so there is no fp32 master "
            "beside bf16 ones; use native/parameters or deepspeed/*",
        },
        launchers=(
            Launcher(
                name="accelerate launch",
                order=15,
                marks=("TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION"),
                **TORCH_VARIABLES,
                address=("MASTER_ADDR", "MASTER_PORT"),
                serves=("accelerate",),
                opens="its agent listens on every interface at the master port",
            ),
            Launcher(
                name="accelerate launch without a world",
                order=80,
                marks=("ACCELERATE_MIXED_PRECISION",),
                **TORCH_VARIABLES,
                refusal="it started one process only, as it does with --cpu; add --multi_gpu, which also starts "
                "processes on a machine without a GPU, or run the script with python",
            ),
        ),
        waits=("torch/distributed/", "accelerate/"),
    )

    @override
    def dtypes(self, config: Config) -> Dtypes:
        return stated(config.train.precision)

    @override
    def native_config(self, config: Config, parameters: int | None = None) -> dict[str, Any]:
        mixed = "bf16" if config.train.precision == "bf16-mixed" else "no"
        return {
            "Accelerator": {"mixed_precision": mixed, "gradient_accumulation_steps": 1},
            "DistributedDataParallelKwargs": {
                "gradient_as_bucket_view": True,
                "find_unused_parameters": options_of(config).find_unused,
            },
        }

    @override
    def join(self, config: Config, place: Place) -> World:
        from unipar_accelerate.engine import join

        return join(config, place)

    @override
    def build(self, part: Part, config: Config, world: World) -> Engine:
        from unipar_accelerate.engine import Accelerated

        return Accelerated(part, config, world)


def options_of(config: Config) -> AccelerateOptions:
    return AccelerateOptions.model_validate(config.options.get("accelerate", {}))


backend = Accelerate()
