"""Descriptions of the backends `single` and `native`: PyTorch itself, with DDP, FSDP2 and others. See engine.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, final

from typing_extensions import override
from unipar_mesh.mesh_settings import describe_attention, describe_proof, mesh_refusals

from unipar.backend import Backend, Capabilities, Dtypes, Engine, Part, Variant, resources
from unipar.backend.precision import default_dtypes
from unipar.backend.torch_libraries import TORCH_CALL_SITES, torch_library, torch_overlaps, uses_ddp
from unipar.config import SHARDS, Config, Section
from unipar.distributed import accelerators
from unipar.distributed.place import Place
from unipar_native.options import NativeOptions, options_of

if TYPE_CHECKING:
    from unipar.distributed.world import World
    from unipar.prediction.rank_part import RankPart
    from unipar.prediction.timeline import OverlapWindow, Prediction, StepTimeline

_NO_FP32_MASTER = "keeps one copy of the parameters, so there is no fp32 master beside bf16 ones"


@final
class Single(Backend):
    """Backend of one process without a wrapper: the reference that all other strategies must match."""

    name = "single"
    capabilities = Capabilities(
        shards=("nothing",),
        devices=("cpu", "cuda", "xpu", "npu", "hpu", "mps"),
        tried={"cpu": "", "cuda": "one GPU", "npu": "emulated"},
        alone=True,
        gaps={
            (None, "bf16-master"): f"one process {_NO_FP32_MASTER}; compare with it in fp32",
        },
    )

    @override
    def library_name(self, config: Config) -> str:
        return "one process"

    @override
    def dtypes(self, config: Config) -> Dtypes:
        return default_dtypes(config.train.precision, reduction="-")

    @override
    def native_config(self, config: Config, parameters: int | None = None) -> dict[str, Any]:
        return {}

    @override
    def predict(self, config: Config, timeline: StepTimeline, ranks: int, *, device: str) -> Prediction:
        from unipar_native.prediction import predict_single

        return predict_single(config, timeline)

    @override
    def join(self, config: Config, place: Place) -> World:
        return _meet(config, place)

    @override
    def build(self, part: Part, config: Config, world: World) -> Engine:
        from unipar_native.single_process import SingleEngine

        return SingleEngine(part, config, world)


@final
class Native(Backend):
    """Backend of PyTorch's own parallel training."""

    name = "native"
    exports = "torchrun"
    exported_axes = ("pipeline", "schedule", "tensor", "context", "sequence")
    options: ClassVar[type[Section]] = NativeOptions
    capabilities = Capabilities(
        shards=("nothing", "optimizer", "gradients", "parameters"),
        short_names={"ddp": "nothing", "fsdp2": "parameters"},
        devices=("cpu", "cuda", "xpu", "npu", "hpu", "mps"),
        tried={"cpu": "", "cuda": "one GPU", "npu": "emulated"},
        also={
            "parallel.shard_over": ("optimizer", "gradients", "parameters"),
            "train.local_steps": ("nothing",),
            "model.offload": ("parameters",),
        },
        axes={"tensor": SHARDS, "pipeline": SHARDS, "context": SHARDS, "expert": SHARDS},
        gaps={
            (
                "nothing",
                "bf16-master",
            ): f"DDP, as nn.DataParallel, {_NO_FP32_MASTER}; use another shard, or deepspeed/*",
        },
        variants={
            "dp": Variant(
                options={"wrapper": "dp"}, shards=("nothing",), says="nn.DataParallel in one process", alone=True
            )
        },
        waits=("torch/distributed/",),
        sites=TORCH_CALL_SITES,
    )

    @override
    def library_name(self, config: Config) -> str:
        if options_of(config).wrapper == "dp":
            return "nn.DataParallel"
        if config.train.local_steps is not None:
            return "local SGD"
        return torch_library(config)

    @override
    def fills_from_files(self, config: Config) -> bool:
        return config.parallel.shard in ("gradients", "parameters") and not config.parallel.axes.split

    @override
    def refuse(self, config: Config) -> Iterator[str]:
        if config.model.offloaded_state == "optimizer":
            yield (
                "model.offload: optimizer is not available: FSDP2 moves parameters, gradients and the optimizer's "
                "states together; say model.offload: parameters"
            )
        if options_of(config).wrapper == "dp":
            yield from _data_parallel_refusals(config)
        if config.parallel.axes.split:
            yield from mesh_refusals(config)
        yield from _ddp_refusals(config)

    @override
    def idle_options(self, config: Config) -> Iterator[tuple[str, str]]:
        options, axes = options_of(config), config.parallel.axes
        no_ddp = "it is DDP's, which this strategy does not use"
        idle: dict[str, tuple[bool, str]] = {
            "vocabulary": (axes.tensor == 1, "parallel.tensor is 1"),
            "attention": (axes.context == 1, "parallel.context is 1"),
            "proof": (not axes.split, "nothing is split over tensor, pipeline, context or expert"),
            "powersgd_rank": (options.hook != "powersgd", "hook is not powersgd"),
            "powersgd_start": (options.hook != "powersgd", "hook is not powersgd"),
            "find_unused_parameters": (not wraps_in_ddp(config), no_ddp),
            "bucket_cap_mb": (not wraps_in_ddp(config), no_ddp),
        }
        for name in options.model_dump(exclude_defaults=True):
            is_idle, why = idle.get(name, (False, ""))
            if is_idle:
                yield f"options.native.{name}", why

    @override
    def dtypes(self, config: Config) -> Dtypes:
        if config.train.local_steps is not None:
            return default_dtypes(config.train.precision, reduction="-")
        hook = options_of(config).hook
        return default_dtypes(config.train.precision, reduction=None if hook == "none" else hook)

    @override
    def native_config(self, config: Config, parameters: int | None = None) -> dict[str, Any]:
        if config.train.local_steps is not None:
            return {"mean of parameters and moments": f"every {config.train.local_steps} steps, and after the last"}
        if options_of(config).wrapper == "dp":
            return {"DataParallel": {"device_ids": data_parallel_devices(config)}}
        if (axes := config.parallel.axes).split:
            over = config.parallel.shard_over or "all of them"
            over = "those on a machine" if over == "machine" else over
            ways = "each holds a copy" if config.parallel.shard == "nothing" else f"a copy is sharded over {over}"
            settings = fsdp_settings(config) | {"mesh": f"ranks that hold the same cuts of the same blocks: {ways}"}
            if config.parallel.shard == "nothing":
                once = "the last microbatch"
                settings |= {"reshard_after_backward": f"after {once}", "requires_gradient_sync": f"in {once}"}
            attention = {"attention": describe_attention(config)} if axes.context > 1 else {}
            proof = {"proof": describe_proof(config, parameters)}
            return {"mesh": str(axes), "fully_shard": settings, **attention, **proof}
        if not uses_ddp(config):
            return {"fully_shard": fsdp_settings(config)}
        options = options_of(config)
        settings: dict[str, Any] = {"DistributedDataParallel": ddp_settings(options)}
        if options.hook != "none":
            settings["communication hook"] = describe_hook(options)
        return settings | (
            {"ZeroRedundancyOptimizer": ZERO_OPTIMIZER_SETTINGS} if config.parallel.shard == "optimizer" else {}
        )

    @override
    def overlaps(self, config: Config) -> Mapping[str, OverlapWindow]:
        if options_of(config).wrapper == "dp":
            return {}
        return torch_overlaps(config)

    @override
    def predict(self, config: Config, timeline: StepTimeline, ranks: int, *, device: str) -> Prediction:
        from unipar_mesh.prediction.predict_mesh import predict_mesh

        from unipar_native.prediction import predict_native

        if config.parallel.axes.split:
            return predict_mesh(config, timeline, ranks, options_of(config), device=device)
        return predict_native(config, timeline, ranks, device=device)

    @override
    def split_for_plan(self, part: Part, config: Config) -> Sequence[RankPart]:
        from unipar_mesh.prediction.split_for_plan import split_model

        return split_model(part, config, options_of(config))

    @override
    def plan_split(self, part: Part, config: Config) -> Iterator[str]:
        from unipar_mesh.context.model_attentions import describe_attentions
        from unipar_mesh.model_split import describe_cuts

        if config.parallel.tensor > 1:
            yield from describe_cuts(part, config)
        elif config.parallel.context > 1:
            yield from describe_attentions(part, config)

    @override
    def join(self, config: Config, place: Place) -> World:
        return _meet(config, place)

    @override
    def build(self, part: Part, config: Config, world: World) -> Engine:
        from unipar_native.data_parallel import DataParallelEngine
        from unipar_native.ddp import DDPEngine
        from unipar_native.fsdp2 import FSDP2Engine
        from unipar_native.local_sgd import LocalSGDEngine

        if options_of(config).wrapper == "dp":
            return DataParallelEngine(part, config, world)
        if config.parallel.axes.split:
            from unipar_mesh.engine import MeshEngine

            return MeshEngine(part, config, world)
        if config.train.local_steps is not None:
            return LocalSGDEngine(part, config, world)
        return DDPEngine(part, config, world) if uses_ddp(config) else FSDP2Engine(part, config, world)


ZERO_OPTIMIZER_SETTINGS: dict[str, Any] = {"parameters_as_bucket_view": True}
"""Arguments of ZeroRedundancyOptimizer besides groups and optimizer: one broadcast per rank, not per parameter."""


def wraps_in_ddp(config: Config) -> bool:
    """Return whether the config's options of DDP have an effect: neither nn.DataParallel nor a mesh takes its place."""
    plain = not config.parallel.axes.split and config.train.local_steps is None
    return uses_ddp(config) and plain and options_of(config).wrapper != "dp"


def ddp_settings(options: NativeOptions) -> dict[str, Any]:
    """Return DDP's arguments; with find_unused_parameters: auto the first step decides on the search."""
    settings: dict[str, Any] = {"bucket_cap_mb": options.bucket_cap_mb, "gradient_as_bucket_view": True}
    settings |= {"static_graph": True} if options.static_graph else {}
    return settings | {"init_sync": False, "find_unused_parameters": options.find_unused_parameters}


def fsdp_settings(config: Config) -> dict[str, Any]:
    """Return the settings of FSDP2 in words, for `unipar explain`."""
    mixed = {"param_dtype": "bfloat16", "reduce_dtype": "float32"} if config.train.precision == "bf16-master" else None
    once = config.parallel.shard == "optimizer"
    over = config.parallel.shard_over
    ranks = "the ranks of a machine" if over == "machine" else f"{over} ranks"
    return {
        "mesh": "all ranks" if over is None else f"2-D: copies x {ranks} that shard one copy",
        "reshard_after_forward": config.parallel.shard == "parameters",
        "reshard_after_backward": "after the last microbatch" if once else True,
        "requires_gradient_sync": "in the last microbatch" if once else True,
        "mp_policy": mixed,
        "offload_policy": "CPUOffloadPolicy" if config.model.offloaded_state == "parameters" else None,
        "blocks": config.model.blocks,
    }


def data_parallel_devices(config: Config) -> list[int]:
    """Return the CUDA devices of nn.DataParallel: the one that `device` names, or all that are visible."""
    _, _, index = resources.choose_device(config)[0].partition(":")
    return [int(index)] if index else list(range(accelerators.count_visible_gpus()))


def _data_parallel_refusals(config: Config) -> Iterator[str]:
    shard, model = config.parallel.shard, config.model
    if (axes := config.parallel.axes).split:
        yield f"parallel ({axes}) is not available: nn.DataParallel is one process; leave options.native.wrapper out"
    if shard != "nothing":
        yield (
            f"parallel.shard: {shard} is not available: nn.DataParallel splits nothing; "
            "leave options.native.wrapper out"
        )
    if config.train.local_steps is not None:
        yield f"train.local_steps: {config.train.local_steps} is not available: nn.DataParallel is one process"
    forwards = [f"model.recompute: {model.recomputes}"] * (model.recomputes != "none")
    forwards += ["model.compile"] * (model.compiling is not None)
    forwards += ["model.offload: activations"] * model.offloads_activations
    for key in forwards:
        yield f"{key} is not available: nn.DataParallel's copies would call the original's forward; leave it out"
    if model.sync_batchnorm:
        yield "model.sync_batchnorm: true has no effect: it works between processes, and this is one; leave it out"
    kind, why = resources.choose_device(config)
    if kind == "cpu":
        because = f" ({why})" if why else ""
        yield (
            f"device: cpu{because} is not available: nn.DataParallel is for CUDA devices; use native/nothing, or single"
        )
        return
    wanted, sizes = len(data_parallel_devices(config)), config.batch.settle(1)
    if sizes.tokens is not None:
        if sizes.tokens.accumulate is not None and sizes.tokens.accumulate < wanted:
            yield (
                f"batch.accumulate: {sizes.tokens.accumulate} leaves some of {wanted} GPUs without a microbatch; raise "
                "it, or say device: cuda:0"
            )
        return
    if sizes.accumulate < wanted:
        yield (
            f"batch: total {sizes.total} = micro {sizes.micro} x accumulate {sizes.accumulate} leaves some of {wanted} "
            "GPUs without a microbatch; lower batch.micro, or say device: cuda:0"
        )


def _ddp_refusals(config: Config) -> Iterator[str]:
    options = options_of(config)
    settings = [f"hook: {options.hook}"] * (options.hook != "none") + ["static_graph: true"] * options.static_graph
    if settings and not wraps_in_ddp(config):
        for what in settings:
            yield f"options.native.{what} is not available: it is DDP's, which this strategy does not use; leave it out"
        return
    if options.static_graph and options.find_unused_parameters is True:
        yield (
            "options.native.static_graph: true and find_unused_parameters: true exclude each other: a graph that is "
            "the same in every step leaves nothing to search for; leave one of them out"
        )
    if options.hook == "bf16" and resources.choose_device(config)[0] == "cpu":
        yield ("options.native.hook: bf16 is not available: torch's hook asks for NCCL, and the CPU has gloo; use fp16")
    if options.hook == "powersgd" and config.checkpoint is not None:
        yield (
            "options.native.hook: powersgd is not available with checkpoint: the errors that PowerSGD adds to the next "
            "step's gradients cannot be saved, so that a run would go on otherwise; leave one of them out"
        )
    if options.hook == "powersgd" and config.train.precision == "fp16":
        yield (
            "options.native.hook: powersgd is not available with precision: fp16: a gradient that overflows would stay "
            "in PowerSGD's memory of errors, though its step is skipped; use bf16-mixed, or hook: fp16"
        )


def describe_hook(options: NativeOptions) -> str:
    """Return what DDP's communication hook does, for `unipar explain`."""
    if options.hook == "powersgd":
        ranks, start = options.powersgd_rank, options.powersgd_start
        return f"powerSGD_hook (matrices of {ranks}, from its step {start:,} on)"
    return f"{options.hook}_compress_hook"


def _meet(config: Config, place: Place) -> World:
    from unipar.backend.joining import meet

    return meet(config, place)


single = Single()
backend = Native()
