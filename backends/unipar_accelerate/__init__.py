"""Hugging Face Accelerate, over DDP. A description; the engine is in engine.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

from typing_extensions import override

from unipar.backend import Backend, Capabilities, Dtypes, Engine, Part
from unipar.config import Config
from unipar.place import Launcher, Place
from unipar.precision import stated
if TYPE_CHECKING:
    from unipar.world import World

_TORCH = {"rank": "RANK", "size": "WORLD_SIZE", "local_rank": "LOCAL_RANK", "local_size": "LOCAL_WORLD_SIZE"}


@final
class Accelerate(Backend):
    name = "accelerate"
    requires = ("accelerate",)
    hint = "pip install 'unipar[accelerate]'"
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
                **_TORCH,
                address=("MASTER_ADDR", "MASTER_PORT"),
                serves=("accelerate",),
                opens="its agent listens on every interface at the master port",
            ),
            Launcher(
                name="accelerate launch without a world",
                order=80,
                marks=("ACCELERATE_MIXED_PRECISION",),
                **_TORCH,
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
                "broadcast_buffers": False,
                "find_unused_parameters": "as the first step shows",
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


backend = Accelerate()
