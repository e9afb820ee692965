"""Description of the backend `accelerate`: Hugging Face Accelerate over DDP, FSDP2 or DeepSpeed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar, Literal, final

from typing_extensions import override
from unipar_deepspeed import backend as deepspeed
from unipar_mesh.mesh_settings import axes_refusals
from unipar_mesh.options import MeshOptions

from unipar.backend import Backend, Capabilities, Dtypes, Engine, Part, Variant, registry
from unipar.backend.precision import default_dtypes
from unipar.backend.torch_libraries import TORCH_CALL_SITES, torch_library, torch_overlaps, uses_ddp
from unipar.config import Config, Section
from unipar.distributed.launchers import TORCH_VARIABLES, Launcher
from unipar.distributed.place import Place
from unipar_accelerate.launch_variables import find_contradictions

if TYPE_CHECKING:
    from unipar.distributed.world import World
    from unipar.prediction.rank_part import RankPart
    from unipar.prediction.timeline import OverlapWindow, Prediction, StepTimeline


class AccelerateOptions(Section):
    """Section options.accelerate of the config."""

    find_unused_parameters: bool | Literal["auto"] = "auto"
    """DDP's search for parameters that the loss does not use. auto: the first step shows whether it is needed;
    true: at every step, for a model that uses other parameters at other times; false: never."""

    through: Literal["auto", "deepspeed"] = "auto"
    """Library that Accelerate shards with. auto: FSDP2; deepspeed: DeepSpeed's ZeRO, with options.deepspeed."""


@final
class Accelerate(Backend):
    """Backend of Hugging Face Accelerate."""

    name = "accelerate"
    observes = True
    exports = "accelerate"
    imports = "an accelerate.yaml"
    requires = ("accelerate",)
    hint = "pip install 'unipar[accelerate]'"
    launch_variables = "ACCELERATE_"
    options: ClassVar[type[Section]] = AccelerateOptions
    capabilities = Capabilities(
        shards=("nothing", "gradients", "parameters"),
        devices=("cpu", "cuda", "xpu", "npu", "hpu", "mps"),
        tried={"cpu": "", "cuda": "one GPU"},
        variants={
            "zero": Variant(
                options={"through": "deepspeed"},
                shards=("optimizer", "gradients", "parameters"),
                says="through DeepSpeed's ZeRO",
            )
        },
        axes={"tensor": ("nothing", "gradients", "parameters"), "context": ("gradients", "parameters")},
        axes_lacked={
            "pipeline": "Accelerate runs pipelines for inference alone",
            "expert": "Accelerate's ParallelismConfig has no size for experts",
            "context": "Accelerate's ParallelismConfig takes cp_size with an FSDP2 plugin only, which shards the model "
            "over these ranks as well; use shard: parameters or gradients",
        },
        gaps={
            ("nothing", "bf16-master"): "Accelerate's DDP keeps one copy of the parameters, so there is no fp32 master "
            "beside bf16 ones; use accelerate/parameters, native/parameters or deepspeed/*",
        },
        launchers=(
            Launcher(
                name="accelerate launch",
                order=15,
                marks=("TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION"),
                **TORCH_VARIABLES,
                address=("MASTER_ADDR", "MASTER_PORT"),
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
        sites={**TORCH_CALL_SITES, **deepspeed.capabilities.sites},
    )

    @override
    def refuse(self, config: Config) -> Iterator[str]:
        if config.parallel.axes.split:
            yield from _axes_refusals(config)
        if not uses_deepspeed(config):
            return
        if config.parallel.shard == "nothing":
            yield "options.accelerate.through: deepspeed has no effect, as nothing is split; leave it out"
            return
        if why := registry.why_not_installed(deepspeed):
            yield f"options.accelerate.through: deepspeed: {why}"
        if reason := deepspeed.capabilities.gaps.get((config.parallel.shard, config.train.precision)):
            yield f"train.precision: {config.train.precision} is not available: {reason}"
        yield from deepspeed.refuse(config)

    @override
    def launch_refusals(self, config: Config) -> Iterator[str]:
        if config.backend == self.name:
            half = config.train.precision == "fp16" and config.parallel.shard == "nothing"  # unipar scales the loss
            word = "fp16" if half else accelerate_precision(config)
            yield from find_contradictions(config, splitting_library(config), word)
        else:
            yield from find_contradictions(config, _library_of_backend(config), None)

    @override
    def used_options(self, config: Config) -> tuple[str, ...]:
        return (self.name,) if config.parallel.shard == "nothing" else (self.name, deepspeed.name)

    @override
    def idle_options(self, config: Config) -> Iterator[tuple[str, str]]:
        own = options_of(config)
        if own.find_unused_parameters != "auto" and (config.parallel.shard != "nothing" or config.parallel.axes.split):
            yield "options.accelerate.find_unused_parameters", "it is DDP's, which this strategy does not use"
        if own.through != "deepspeed" and config.parallel.shard != "nothing":
            theirs = deepspeed.options.model_validate(config.options.get("deepspeed", {}))
            for name in theirs.model_dump(exclude_defaults=True):
                yield f"options.deepspeed.{name}", "Accelerate shards with FSDP2 (options.accelerate.through: auto)"

    @override
    def dtypes(self, config: Config) -> Dtypes:
        return deepspeed.dtypes(config) if uses_deepspeed(config) else default_dtypes(config.train.precision)

    @override
    def library_name(self, config: Config) -> str:
        if uses_deepspeed(config):
            return deepspeed.library_name(config)
        return torch_library(config)

    @override
    def native_config(self, config: Config, parameters: int | None = None) -> dict[str, Any]:
        settings: dict[str, Any] = {
            "Accelerator": {"mixed_precision": accelerate_precision(config), "gradient_accumulation_steps": 1}
        }
        if config.parallel.axes.split:
            settings["ParallelismConfig"] = parallelism_settings(config, config.parallel.data)
        if uses_deepspeed(config):
            return settings | {"DeepSpeedPlugin": {"hf_ds_config": deepspeed.native_config(config, parameters)}}
        if config.parallel.shard != "nothing":
            return settings | {"FullyShardedDataParallelPlugin": fsdp_plugin_settings(config)}
        if config.parallel.axes.split:
            return settings
        find_unused_parameters = options_of(config).find_unused_parameters
        return settings | {
            "DistributedDataParallelKwargs": {
                "gradient_as_bucket_view": True,
                "find_unused_parameters": find_unused_parameters,
            }
        }

    @override
    def plan_split(self, part: Part, config: Config) -> Iterator[str]:
        from unipar_mesh.context.model_attentions import describe_attentions
        from unipar_mesh.model_split import describe_cuts

        if config.parallel.tensor > 1:
            yield from describe_cuts(part, config)
        elif config.parallel.context > 1:
            yield from describe_attentions(part, config)

    @override
    def host(self, config: Config, size: int) -> AbstractContextManager[Mapping[str, str]]:
        return deepspeed.host(config, size) if uses_deepspeed(config) else super().host(config, size)

    @override
    def overlaps(self, config: Config) -> Mapping[str, OverlapWindow]:
        return deepspeed.overlaps(config) if uses_deepspeed(config) else torch_overlaps(config)

    @override
    def predict(self, config: Config, timeline: StepTimeline, ranks: int, *, device: str) -> Prediction:
        if uses_deepspeed(config):
            return deepspeed.predict(config, timeline, ranks, device=device)
        if config.parallel.axes.split:
            from unipar_mesh.prediction.predict_mesh import predict_mesh

            options = MeshOptions()
            return predict_mesh(config, timeline, ranks, options, device=device, reshard_rest=False, in_copies=False)
        from unipar.prediction.bytes_sent import LIBRARY_BUCKETS, DDPBuckets
        from unipar.prediction.terms import refuse_unplanned
        from unipar.prediction.timeline import Prediction
        from unipar.prediction.torch_engines import predict_ddp, predict_fsdp2, unwrapped_terms

        refuse_unplanned(f"accelerate/{config.parallel.shard}", config, planned=("model.offload: parameters",))
        if ranks == 1 and device != "cpu" and config.parallel.shard == "nothing":
            return Prediction(unwrapped_terms(config, timeline))  # one process is wrapped on the CPU alone
        if not uses_ddp(config):
            return predict_fsdp2(config, timeline, ranks, device=device, reshard_rest=False)
        return predict_ddp(
            config, timeline, ranks, DDPBuckets(LIBRARY_BUCKETS, options_of(config).find_unused_parameters)
        )

    @override
    def split_for_plan(self, part: Part, config: Config) -> Sequence[RankPart]:
        from unipar_mesh.prediction.split_for_plan import split_model

        return split_model(part, config, MeshOptions())

    @override
    def join(self, config: Config, place: Place) -> World:
        from unipar.backend.joining import require_package_of_device

        require_package_of_device(config, "Accelerate")
        if uses_deepspeed(config):
            from unipar_accelerate.zero import join_over_deepspeed

            return join_over_deepspeed(config, place)
        from unipar_accelerate.engine import join

        return join(config, place)

    @override
    def build(self, part: Part, config: Config, world: World) -> Engine:
        if uses_deepspeed(config):
            from unipar_accelerate.zero import build_zero_engine

            return build_zero_engine(part, config, world)
        if config.parallel.axes.split:
            from unipar_accelerate.mesh_engine import AccelerateMeshEngine

            return AccelerateMeshEngine(part, config, world)
        if config.parallel.shard != "nothing":
            from unipar_accelerate.fsdp2_engine import AccelerateFSDP2Engine

            return AccelerateFSDP2Engine(part, config, world)
        from unipar_accelerate.engine import AccelerateDDPEngine

        return AccelerateDDPEngine(part, config, world)


def options_of(config: Config) -> AccelerateOptions:
    """Return options.accelerate of the config."""
    return AccelerateOptions.model_validate(config.options.get("accelerate", {}))


def uses_deepspeed(config: Config) -> bool:
    """Return whether Accelerate runs over DeepSpeed."""
    return options_of(config).through == "deepspeed"


def splitting_library(config: Config) -> str:
    """Return the library that Accelerate shards with; "" where nothing is sharded."""
    if config.parallel.shard == "nothing":
        return ""
    return "DeepSpeed" if uses_deepspeed(config) else "FSDP2"


def _library_of_backend(config: Config) -> str:
    """Return the library that another backend shards with, if Accelerate has it too; "" if it does not."""
    if config.backend == deepspeed.name and config.parallel.shard != "nothing":
        return "DeepSpeed"
    return "FSDP2" if config.backend == "native" and config.parallel.shard in ("gradients", "parameters") else ""


def accelerate_precision(config: Config) -> str:
    """Return the mixed_precision that Accelerate gets.

    Under FSDP2 and DeepSpeed its bf16 means bf16 parameters, so bf16-mixed is "no" there: unipar autocasts itself.
    """
    if config.parallel.axes.split:
        return "no"
    word = "bf16-mixed" if config.parallel.shard == "nothing" else "bf16-master"
    return "bf16" if config.train.precision == word else "no"


def fsdp_plugin_settings(config: Config) -> dict[str, Any]:
    """Return the settings of its FSDP2 plugin; the engine adds the classes of the blocks, which the model gives."""
    bf16 = {"param_dtype": "bfloat16", "reduce_dtype": "float32"} if config.train.precision == "bf16-master" else None
    return {
        "fsdp_version": 2,
        "reshard_after_forward": config.parallel.shard == "parameters",
        "auto_wrap_policy": "no_wrap" if config.model.blocks == "none" else "transformer_based_wrap",
        "cpu_ram_efficient_loading": False,
        "mixed_precision_policy": bf16,
    }


def parallelism_settings(config: Config, data: int | Literal["auto"]) -> dict[str, Any]:
    """Return the sizes of its ParallelismConfig, for this many ranks of the data."""
    axes = config.parallel.axes
    return {
        "dp_replicate_size": 1,
        "dp_shard_size": data,
        "cp_size": axes.context,
        "tp_size": axes.tensor,
        "sp_size": 1,
    }


def _axes_refusals(config: Config) -> Iterator[str]:
    """Yield a sentence for each key that Accelerate, or unipar's split of the model, does not take beside the axes."""
    axes, parallel = config.parallel.axes, config.parallel
    if uses_deepspeed(config):
        yield f"options.accelerate.through: deepspeed is not available with {axes}: use backend: deepspeed"
        return
    if parallel.data != "auto":
        yield from refuse_sizes(config, parallel.data)
    yield from axes_refusals(config)


def refuse_sizes(config: Config, data: int) -> Iterator[str]:
    """Yield a sentence if Accelerate's ParallelismConfig refuses the sizes, or would leave gradients unreduced."""
    axes, shard = config.parallel.axes, config.parallel.shard
    if shard == "nothing" and data > 1:
        yield (
            f"parallel.data: {data} is not available with {axes} and shard: nothing: Accelerate's ParallelismConfig "
            "has no copies of a model (dp_replicate_size) beside tp_size without FSDP; use shard: parameters or "
            "gradients"
        )
    if shard != "nothing" and data == 1 and axes.context == 1:
        yield (
            f"parallel.shard: {shard} is not available with data 1 and {axes}: nothing is left for Accelerate's FSDP2 "
            "to shard over, which its ParallelismConfig refuses; use shard: nothing"
        )


backend = Accelerate()
