"""Description of the backend `deepspeed`: DeepSpeed with ZeRO 0 to 3. Its engine is in engine.py."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, final

from typing_extensions import override

from unipar.backend import Backend, Capabilities, Category, Dtypes, Engine, Part, Variant
from unipar.backend.precision import default_dtypes
from unipar.backend.refusals import ALL, Refusals, conditions_of, refusals_met
from unipar.backend.torch_libraries import AXIS_NAMES
from unipar.config import SHARDS, Config, Section, Shard
from unipar.distributed.launchers import Launcher
from unipar.distributed.place import Place
from unipar_deepspeed.options import (
    DeepSpeedOptions,
    deepspeed_option_refusals,
    options_of,
    remove_offload_files,
    zero_settings,
)

if TYPE_CHECKING:
    from unipar.distributed.world import World
    from unipar.prediction.rank_part import RankPart
    from unipar.prediction.timeline import OverlapWindow, Prediction, StepTimeline

_NO_FP64 = "ZeRO keeps its masters in fp32; use deepspeed/nothing, native/* or fp32"
_SPLITTING_SHARDS: tuple[Shard, ...] = ("optimizer", "gradients", "parameters")
_OFFLOAD = "options.deepspeed.offload_optimizer"
_AUTOTP, _ACTIVATIONS, _AUTOEP = "AutoTP", "activations under AutoTP", "AutoEP"
_BF16_COPIES = (
    "DeepSpeed keeps bf16 copies of the parameters, with which the split model cannot be proved equal to the whole one",
    "use fp32 or bf16-mixed, or backend: native",
)
_OWN_LAYERS = (
    "DeepSpeed's AutoTP puts layers of its own, which multiply in bf16, in the place of the model's linear layers",
    "use bf16-mixed, or backend: native",
)
_REFUSALS: Refusals = {
    "parallel.sequence": {
        _ACTIVATIONS: (
            "DeepSpeed's AutoTP keeps activations whole between the matrices that it cuts",
            "leave it out, or use backend: native",
        )
    },
    "train.precision: bf16-master": dict.fromkeys((_AUTOTP, _AUTOEP), _BF16_COPIES),
    "train.precision: fp8": {_AUTOTP: _OWN_LAYERS},
    "train.precision: fp8-rowwise": {_AUTOTP: _OWN_LAYERS},
    "train.precision: fp64": {
        _AUTOEP: (
            "DeepSpeed's AutoEP multiplies the matrices of experts by a kernel that has no fp64",
            "use fp32 or bf16-mixed, or backend: native",
        )
    },
    "parallel.tensor": {
        _AUTOEP: (
            "no run of DeepSpeed's AutoEP beside AutoTP has been compared with one process",
            "leave one of them out, or use backend: native",
        )
    },
    "offloading": {
        _AUTOTP: (
            "no run of DeepSpeed's AutoTP with offloaded state has been compared with one process",
            "leave one of them out",
        ),
        _AUTOEP: (
            "no run of DeepSpeed's AutoEP with offloaded state has been compared with one process",
            "leave one of them out",
        ),
    },
    "whole_matrices": {
        _OFFLOAD: ("its matrices are joined on the device", "leave one of them out"),
        _AUTOEP: (
            "DeepSpeed's AutoEP keeps each gate_up_proj as two parameters, whose matrices are halves of those that are "
            "updated as a whole",
            "use backend: native, or take adamw",
        ),
    },
    "moments_in_bf16": {
        _OFFLOAD: ("moments in host memory take none of the device, in bf16 or fp32", "leave one of them out"),
        _AUTOEP: (
            "no run of DeepSpeed's AutoEP with moments in bf16 has been compared with one process",
            "use backend: native, or take adamw",
        ),
    },
    "model.compile: model": {
        _AUTOTP: ("torch cannot compile the layers that DeepSpeed's AutoTP puts in their place", "compile blocks"),
    },
    "model.compile": {
        _AUTOEP: (
            "no compiled run of DeepSpeed's AutoEP has been compared with one process",
            "leave one of them out, or use backend: native",
        )
    },
    "moments_in_blocks": {
        ALL: (
            "ZeRO joins parameters in flat tensors, where blocks of moments would reach from one parameter into the "
            "next",
            "use native, horovod or accelerate (without options.accelerate.through), or take adamw",
        )
    },
}
_CALL_SITES: dict[str, Category] = {
    "deepspeed/runtime/engine.py:allreduce_bucket": "communication",
    "deepspeed/runtime/zero/stage_1_and_2.py:setup_buckets": "communication",
    "deepspeed/runtime/zero/stage_1_and_2.py:average_tensor": "communication",
    "deepspeed/runtime/zero/stage_1_and_2.py:allreduce_bucket": "communication",
    "deepspeed/runtime/zero/stage_1_and_2.py:copy_grads_in_partition": "gradients",
    "deepspeed/runtime/zero/stage_1_and_2.py:_build_compact_grad_partition_buffer": "gradients",
    "deepspeed/runtime/zero/stage_1_and_2.py:get_flat_partition": "gradients",
    "deepspeed/runtime/zero/stage3.py:__reduce_and_partition_ipg_grads": "communication",
    "deepspeed/runtime/zero/partitioned_param_coordinator.py:fetch_sub_module": "communication",
    "deepspeed/runtime/zero/partition_parameters.py:all_gather_coalesced": "communication",
    "deepspeed/runtime/zero/partition_parameters.py:_all_gather": "communication",
    "deepspeed/runtime/zero/partition_parameters.py:wait": "communication",
}


@final
class DeepSpeed(Backend):
    """Backend of DeepSpeed's ZeRO."""

    name = "deepspeed"
    observes = True
    exports = "deepspeed"
    imports = "a ds_config.json"
    reads_checkpoints = True
    requires = ("deepspeed",)
    hint = "pip install 'unipar[deepspeed]'"
    options: ClassVar[type[Section]] = DeepSpeedOptions
    capabilities = Capabilities(
        shards=SHARDS,
        short_names={f"zero{stage}": shard for stage, shard in enumerate(SHARDS)},
        devices=("cpu", "cuda", "xpu", "npu", "hpu"),
        tried={"cpu": "", "cuda": "one GPU"},
        variants={
            "library": Variant(
                options={"buckets": "library"},
                shards=_SPLITTING_SHARDS,
                says="with DeepSpeed's own bucket sizes",
                library_defaults=True,
            )
        },
        gaps={(shard, "fp64"): _NO_FP64 for shard in _SPLITTING_SHARDS},
        also={"model.offload": _SPLITTING_SHARDS},
        axes={"tensor": SHARDS, "expert": SHARDS},
        axes_lacked={
            "pipeline": "DeepSpeed's PipelineModule takes a list of layers, so the model would have to be rewritten; "
            "with a clip and ZeRO-0 it was 2e-3 off one process, and it refuses ZeRO-2 and ZeRO-3",
            "context": "DeepSpeed's Ulysses is an attention layer, which has to be written into the model",
        },
        launchers=(
            Launcher(
                name="deepspeed",
                order=30,
                marks=("RANK", "LOCAL_SIZE", "CROSS_SIZE"),
                rank="RANK",
                size="WORLD_SIZE",
                local_rank="LOCAL_RANK",
                local_size="LOCAL_SIZE",
                address=("MASTER_ADDR", "MASTER_PORT"),
                between=1,
            ),
        ),
        waits=("torch/distributed/", "deepspeed/comm/"),
        sites=_CALL_SITES,
    )

    @override
    def library_name(self, config: Config) -> str:
        split = "".join(f" + {AXIS_NAMES[name]}" for name in config.parallel.axes.sizes)
        return f"ZeRO-{SHARDS.index(config.parallel.shard)}{split}"

    @override
    def fills_from_files(self, config: Config) -> bool:
        exact = config.train.precision == "bf16-master"  # masters are made of rank 0's whole parameters
        return config.parallel.shard == "parameters" and not config.parallel.axes.split and not exact

    @override
    def refuse(self, config: Config) -> Iterator[str]:
        yield from deepspeed_option_refusals(config)
        options = options_of(config)
        conditions = conditions_of(config) | {ALL: ""}
        if config.parallel.tensor > 1:
            conditions |= {_AUTOTP: "parallel.tensor", _ACTIVATIONS: ""}
        if config.parallel.expert > 1:
            conditions[_AUTOEP] = "parallel.expert"
        if options.offload_optimizer != "none":
            conditions[_OFFLOAD] = f"{_OFFLOAD}: {options.offload_optimizer}"
        if options.offload_optimizer != "none" or options.offload_parameters != "none":
            conditions["offloading"] = "offloading"
        yield from refusals_met(conditions, _REFUSALS)

    @override
    def dtypes(self, config: Config) -> Dtypes:
        shard, precision = config.parallel.shard, config.train.precision
        if precision == "bf16-master":
            reduction = "bf16"
            return Dtypes("bf16", "fp32" if shard == "nothing" else "fp32 shards", "bf16", reduction, "bf16")
        plain = default_dtypes(precision)
        if shard == "nothing":
            return plain
        return Dtypes(plain.parameter, "fp32 shards", plain.gradient, plain.reduction, plain.compute)

    @override
    def native_config(self, config: Config, parameters: int | None = None) -> dict[str, Any]:
        clip = config.train.clipping
        settings: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,  # has no effect, as the next: the engine sets the boundary by hand
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 0.0 if clip is None or clip.norm == "fp64" or clips_outside(config) else clip.max,
            "zero_optimization": zero_settings(config, parameters),
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,  # the engine has chosen the CPU optimizer already
            "steps_per_print": None,
            "wall_clock_breakdown": False,
            "timers": {"throughput": {"enabled": False}},  # they wait for the device in each microbatch
        }
        if config.train.precision == "bf16-master":
            settings["bf16"] = {"enabled": True}
        if (tensor := config.parallel.tensor) > 1:
            settings["tensor_parallel"] = {"autotp_size": tensor, "partition_config": "derived when the run starts"}
        if (expert := config.parallel.expert) > 1:
            preset = "chosen when the run starts"
            settings["expert_parallel"] = {"enabled": True, "autoep_size": expert, "preset_model": preset}
        return settings

    @override
    def overlaps(self, config: Config) -> Mapping[str, OverlapWindow]:
        stage, overlap = SHARDS.index(config.parallel.shard), options_of(config).overlap
        if stage == 3 and overlap is not False:
            return {"all_gather": "step", "reduce_scatter": "step", "all_reduce": "step"}
        if stage and overlap:
            return {"all_reduce": "backward", "reduce_scatter": "backward", "reduce": "backward"}
        return {}

    @override
    def predict(self, config: Config, timeline: StepTimeline, ranks: int, *, device: str) -> Prediction:
        from unipar_deepspeed.predict import predict_zero

        return predict_zero(config, timeline, ranks, device=device)

    @override
    def split_for_plan(self, part: Part, config: Config) -> Sequence[RankPart]:
        from unipar_mesh.options import MeshOptions
        from unipar_mesh.prediction.split_for_plan import TensorLibrary, split_model

        from unipar_deepspeed.autotp import arm_as_autotp, matrices_left_whole

        return split_model(part, config, MeshOptions(), TensorLibrary(arm_as_autotp, matrices_left_whole))

    @override
    @contextmanager
    def host(self, config: Config, size: int) -> Generator[Mapping[str, str]]:
        """Context manager: remove the ranks' offload files on exit, even if ranks failed or were killed."""
        try:
            yield dict(_CPU_ACCELERATOR) if config.device == "cpu" else {}
        finally:
            remove_offload_files(config, range(size))

    @override
    def join(self, config: Config, place: Place) -> World:
        if config.device == "cpu":
            for name, value in _CPU_ACCELERATOR.items():
                os.environ.setdefault(name, value)
        from unipar.backend.joining import require_package_of_device

        require_package_of_device(config, "DeepSpeed")
        from unipar_deepspeed.engine import join

        return join(config, place)

    @override
    def build(self, part: Part, config: Config, world: World) -> Engine:
        from unipar_deepspeed.engine import ZeroEngine

        return ZeroEngine(part, config, world, backend)


_CPU_ACCELERATOR = {"DS_ACCELERATOR": "cpu"}
"""Variable that DeepSpeed reads when it is imported; without it, it uses a GPU wherever there is one."""


def clips_outside(config: Config) -> bool:
    """Return whether unipar clips, not DeepSpeed: ZeRO-0 leaves whole gradients in `p.grad`."""
    return config.parallel.shard == "nothing" and config.train.precision != "bf16-master"


backend = DeepSpeed()
