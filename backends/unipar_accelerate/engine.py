"""Engine of Accelerate over DDP: Accelerate wraps model and optimizer; unipar decides when gradients are reduced."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from math import inf
from typing import Any, final

from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedDataParallelKwargs, DistributedType
from torch import Tensor, nn
from typing_extensions import override

from unipar.backend import Part
from unipar.backend.joining import meet
from unipar.config import Config
from unipar.distributed.place import Place
from unipar.distributed.world import World
from unipar.engines.late_wrapped import LateWrappedEngine
from unipar_accelerate import accelerate_precision, options_of


@final
class AccelerateDDPEngine(LateWrappedEngine):
    """Engine whose model, optimizer, backward and clip are Accelerate's, over DDP."""

    def __init__(self, part: Part, config: Config, world: World) -> None:
        super().__init__(part, config, world)
        self.mixed = accelerate_precision(config)
        self.accelerator: Any = None  # until the first step has shown whether parameters are left unused
        wanted = options_of(config).find_unused_parameters
        if wanted != "auto":
            self.settle(find_unused_parameters=wanted)

    @override
    def wrap(self, *, find_unused_parameters: bool) -> nn.Module:
        reset_accelerate_state()
        ddp = DistributedDataParallelKwargs(gradient_as_bucket_view=True, find_unused_parameters=find_unused_parameters)
        cpu = self.world.device.type == "cpu"
        with hide_launch_variables():
            self.accelerator = Accelerator(cpu=cpu, mixed_precision=self.mixed, kwargs_handlers=[ddp])
        self.world.require_same_world(
            "Accelerate", rank=self.accelerator.process_index, size=self.accelerator.num_processes
        )
        if self.mixed != "no":
            self.call.autocast = None  # Accelerate autocasts from here on; not for fp16: it would scale the loss, too
        # the optimizer's tensors are on the device already: placing them would copy all of them once more
        wrapped, self.optimizer = self.accelerator.prepare(self.call, self.base, device_placement=[True, False])
        wrapped.broadcast_buffers = False  # unipar itself shares running statistics before they are used
        return wrapped

    @override
    def no_sync(self) -> AbstractContextManager[Any]:
        return self.accelerator.no_sync(self.wrapped)

    @override
    def backward(self, loss: Tensor) -> None:
        if self.accelerator is None:
            loss.backward()
        else:
            self.accelerator.backward(loss)

    @override
    def norm(self) -> Tensor:
        if self.accelerator is None or self.limit == inf:
            return super().norm()
        return self.accelerator.clip_grad_norm_(self.trained, self.limit)


def join(config: Config, place: Place) -> World:
    """Create unipar's process group, and start Accelerate on it."""
    world = meet(config, place)
    return hand_world_to_accelerate(world)


def hand_world_to_accelerate(world: World) -> World:
    """Start Accelerate on the world's process group: it reads rank and size from the environment."""
    place = world.place
    world.set_variables(RANK=place.rank, WORLD_SIZE=place.size)
    world.set_variables(LOCAL_RANK=world.local_rank_for_libraries, LOCAL_WORLD_SIZE=place.local_size)
    world.restore_variables("MASTER_ADDR", "MASTER_PORT")
    if world.machines.several and "MASTER_ADDR" not in os.environ:  # it asks for them, and connects to neither
        world.set_variables(MASTER_ADDR=world.machines.all[0].address, MASTER_PORT=29500)
    reset_accelerate_state()
    with hide_launch_variables():
        state = PartialState(cpu=world.device.type == "cpu")
    return world.require_same_world("Accelerate", rank=state.process_index, size=state.num_processes)


def reset_accelerate_state() -> None:
    """Drop the state that Accelerate keeps for the whole process, so that a new engine starts with a new one."""
    for state in (AcceleratorState, PartialState):
        state._reset_state()  # pyright: ignore[reportPrivateUsage]


def force_distributed_type(accelerator: Any, kind: DistributedType) -> None:
    """Set the accelerator's type: on a machine without GPUs it ignores its plugins silently, and would train by DDP."""
    PartialState().distributed_type = accelerator.state.distributed_type = kind


@contextmanager
def hide_launch_variables() -> Generator[None]:
    """Context manager: remove the variables of `accelerate launch`, so that Accelerate follows the config alone.

    `find_contradictions` has compared the variables with the config before.
    """
    hidden = {name: value for name, value in os.environ.items() if _is_launch_variable(name)}
    for name in hidden:
        del os.environ[name]
    try:
        yield
    finally:
        for name in [name for name in os.environ if _is_launch_variable(name)]:
            del os.environ[name]
        os.environ.update(hidden)


def _is_launch_variable(name: str) -> bool:
    return name.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_"))
