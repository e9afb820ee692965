"""The same training loop, written by hand as the guide of each library has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from unipar_accelerate import splitting_library

from benchmarks.timing import Loop
from unipar.backend import registry
from unipar.config import Config, Strategy

Loss = Callable[[nn.Module, Any], Tensor]
CLIP, LR, DECAY = 1.0, 3e-4, 0.1


def adamw(model: nn.Module) -> Optimizer:
    """Return the optimizer of all loops."""
    return torch.optim.AdamW(model.parameters(), LR, weight_decay=DECAY, fused=True)


def constant_schedule(optimizer: Optimizer) -> LambdaLR:
    """Return a schedule that keeps the rate, called in each step as in real loops."""
    return LambdaLR(optimizer, lambda _: 1.0)


def plain_loop(model: nn.Module, loss: Loss, batch: Any, optimizer: Optimizer | None = None) -> Loop:
    """Return the loop for one process, DDP and FSDP2, which differ only in how the model was wrapped before."""
    optimizer = optimizer or adamw(model)
    schedule, parameters = constant_schedule(optimizer), tuple(model.parameters())

    def step() -> None:
        loss(model, batch).backward()
        clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()

    return step


def ddp(model: nn.Module, loss: Loss, batch: Any, config: Config) -> Loop:
    """Return the loop for DDP, with ZeroRedundancyOptimizer where optimizer states are sharded."""
    from torch.nn.parallel import DistributedDataParallel

    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return plain_loop(wrapped, loss, batch, zero(wrapped) if config.parallel.shard == "optimizer" else None)


def zero(model: nn.Module) -> Optimizer:
    """Return a ZeroRedundancyOptimizer around AdamW."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    settings: dict[str, Any] = {"lr": LR, "weight_decay": DECAY, "fused": True, "parameters_as_bucket_view": True}
    return ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **settings)


def fsdp2(model: nn.Module, loss: Loss, batch: Any, config: Config) -> Loop:
    """Return the loop for FSDP2."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    again = config.parallel.shard == "parameters"
    layers: Any = model.get_submodule("layers")
    for layer in layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=again)
    fully_shard(model, mesh=mesh, reshard_after_forward=again)
    return plain_loop(model, loss, batch)


def deepspeed(model: nn.Module, loss: Loss, batch: Any, config: Config) -> Loop:
    """Return the loop for DeepSpeed."""
    import deepspeed

    parameters = sum(p.numel() for p in model.parameters())
    settings = registry.find_backend("deepspeed").native_config(config, parameters) | {"gradient_clipping": CLIP}
    optimizer = adamw(model)
    engine: Any = deepspeed.initialize(model=model, optimizer=optimizer, config=settings, dist_init_required=False)[0]
    schedule = constant_schedule(engine.basic_optimizer)

    def step() -> None:
        engine.backward(loss(engine, batch))
        engine.step()
        schedule.step()

    return step


def horovod(model: nn.Module, loss: Loss, batch: Any, config: Config) -> Loop:
    """Return the loop for Horovod."""
    import horovod.torch as hvd

    optimizer: Any = hvd.DistributedOptimizer(adamw(model), named_parameters=list(model.named_parameters()))
    schedule, parameters = constant_schedule(optimizer), tuple(model.parameters())

    def step() -> None:
        loss(model, batch).backward()
        optimizer.synchronize()
        clip_grad_norm_(parameters, CLIP)
        with optimizer.skip_synchronize():
            optimizer.step()
        schedule.step()
        optimizer.zero_grad()

    return step


def accelerate(model: nn.Module, loss: Loss, batch: Any, config: Config) -> Loop:
    """Return the loop for Accelerate over DDP, FSDP2 or DeepSpeed, which differ only in how it is created."""
    through = splitting_library(config)
    accelerator = {"": over_ddp, "FSDP2": over_fsdp2, "DeepSpeed": over_deepspeed}[through](model, config)
    if through == "FSDP2":
        model = nn.Sequential(model)  # hides the final norm, which Accelerate would shard as a group of its own
    base = adamw(model)
    wrapped, optimizer, schedule = accelerator.prepare(model, base, constant_schedule(base))
    parameters = tuple(wrapped.parameters())

    def step() -> None:
        accelerator.backward(loss(wrapped, batch))
        accelerator.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()

    return step


def over_ddp(model: nn.Module, config: Config) -> Any:
    """Return an Accelerator over DDP."""
    from accelerate import Accelerator
    from accelerate.utils import DistributedDataParallelKwargs

    # as unipar sets it: without it the loop takes 4 to 6 % more CPU time, which would not be unipar's merit
    return Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)])


def over_fsdp2(model: nn.Module, config: Config) -> Any:
    """Return an Accelerator over FSDP2."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils import DistributedType
    from unipar_accelerate.engine import force_distributed_type

    layers: Any = model.get_submodule("layers")
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=config.parallel.shard == "parameters",
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[type(layers[0]).__name__],
        cpu_ram_efficient_loading=False,
    )
    accelerator: Any = Accelerator(cpu=True)
    accelerator.state.fsdp_plugin = plugin
    force_distributed_type(accelerator, DistributedType.FSDP)
    return accelerator


def over_deepspeed(model: nn.Module, config: Config) -> Any:
    """Return an Accelerator over DeepSpeed, which clips itself: its clip_grad_norm_ only reads the norm."""
    from accelerate import Accelerator
    from accelerate.utils import DistributedType
    from unipar_accelerate.engine import force_distributed_type, reset_accelerate_state
    from unipar_accelerate.zero import BareDeepSpeedPlugin

    parameters = sum(p.numel() for p in model.parameters())
    settings = registry.find_backend("deepspeed").native_config(config, parameters) | {"gradient_clipping": CLIP}
    reset_accelerate_state()  # unipar's Accelerator is in the same process, and Accelerate accepts a plugin only once
    plugin = BareDeepSpeedPlugin(hf_ds_config=settings)
    accelerator: Any = Accelerator(cpu=True, deepspeed_plugin=plugin)
    plugin.select(_from_accelerator_state=True)
    accelerator.state.deepspeed_plugins = plugin
    force_distributed_type(accelerator, DistributedType.DEEPSPEED)
    return accelerator


def by_hand(strategy: str, model: nn.Module, loss: Loss, batch: Any, config: Config) -> Loop:
    """Return the loop that a user of the library would write for this strategy."""
    at = Strategy.parse(strategy)
    if at.backend == "single":
        return plain_loop(model, loss, batch)
    if at.backend == "native":
        return (ddp if at.shard in ("nothing", "optimizer") else fsdp2)(model, loss, batch, config)
    return {"deepspeed": deepspeed, "horovod": horovod, "accelerate": accelerate}[at.backend](
        model, loss, batch, config
    )
