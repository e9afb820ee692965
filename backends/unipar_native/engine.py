"""Engines of PyTorch itself: one process, DDP and FSDP2."""

from __future__ import annotations

from abc import abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from unipar.backend import Part
from unipar.birth import arrive, lower, parameters_of, refuse_scalars, settle, travel
from unipar.call import Call
from unipar.config import Config
from unipar.errors import TaskError
from unipar.open import Open, clipped, span
from unipar.world import World
from unipar_native import ddp_settings, options_of

_REACHED_IN = (
    "the loss reads a parameter of a block outside that block's forward, where it is split: "
    "read it in the block's own forward, or set model.blocks: none"
)


@final
class One(Open):
    """One process without a wrapper."""

    divisor = 1.0

    def __init__(self, part: Part, config: Config, world: World) -> None:
        arrive(part.module, world.device)
        super().__init__(part, config, world)

    @override
    def sync(self, micros: int, *, last: bool) -> AbstractContextManager[Any]:
        return nullcontext()


class FirstByHand(Open):
    """For wrappers that must know in advance whether the loss leaves parameters unused.

    The first step runs without the wrapper, its gradients are reduced here, and it shows which parameters
    the loss uses; then the library wraps the model with the right setting.
    """

    find_unused: bool | None = None
    """None until the first step has shown it."""

    def __init__(self, part: Part, config: Config, world: World) -> None:
        arrive(part.module, world.device)
        super().__init__(part, config, world)
        self.backend = config.backend
        self.names = {id(p): n for n, p in part.module.named_parameters()}
        self.divisor = float(world.size)

    @abstractmethod
    def wrap(self, *, find_unused: bool) -> nn.Module: ...

    @abstractmethod
    def no_sync(self) -> AbstractContextManager[Any]: ...

    @override
    @final
    def sync(self, micros: int, *, last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if last or self.find_unused is None else self.no_sync()

    @override
    @final
    def reduced(self) -> None:
        if self.find_unused is None:
            self._reduce_by_hand()
        elif not self.find_unused:
            unused = next((p for p in self.trained if p.grad is None), None)
            if unused is not None:
                raise TaskError(
                    f"the loss does not use the parameter {self.names[id(unused)]!r} in this step, though it used all "
                    f"in the first: set options.{self.backend}.find_unused: true, or use it times 0.0"
                )

    def _reduce_by_hand(self) -> None:
        used = torch.tensor([p.grad is not None for p in self.trained], dtype=torch.float32, device=self.world.device)
        self.world.sum(used)
        for p, ranks in zip(self.trained, used.tolist(), strict=True):
            if ranks:
                grad = torch.zeros_like(p) if p.grad is None else p.grad
                p.grad = self.world.sum(grad.div_(self.world.size))
        self._unused = bool((used < self.world.size).any())

    @override
    @final
    def update(self) -> None:
        super().update()
        if self.find_unused is None:
            self.settle(find_unused=self._unused)

    @final
    def settle(self, *, find_unused: bool) -> None:
        self.find_unused = find_unused
        self.wrapped = self.wrap(find_unused=find_unused)


@final
class DDP(FirstByHand):
    def __init__(self, part: Part, config: Config, world: World) -> None:
        super().__init__(part, config, world)
        options = options_of(config)
        self.settings = ddp_settings(options)
        if options.find_unused != "auto":
            self.settle(find_unused=options.find_unused)

    @override
    def wrap(self, *, find_unused: bool) -> nn.Module:
        settings: dict[str, Any] = self.settings | {"find_unused_parameters": find_unused}
        self.ddp = DistributedDataParallel(self.call, **settings)
        self.ddp.broadcast_buffers = False  # running statistics are shared before they are used, as in every cell
        return self.ddp

    @override
    def no_sync(self) -> AbstractContextManager[Any]:
        return self.ddp.no_sync()


@final
class FSDP2(Open):
    def __init__(self, part: Part, config: Config, world: World) -> None:
        refuse_scalars(part.module, "native/parameters")
        mixed = config.train.precision == "bf16-master"
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if mixed else MixedPrecisionPolicy()
        shell = _split(part, world, policy)
        if mixed:
            lower(part.module, torch.bfloat16)
        super().__init__(part, config, world)
        # the root that was split is the module that is called
        shell.autocast, shell.cast = self.call.autocast, self.call.cast
        self.call = self.wrapped = shell
        self.divisor = float(world.size)

    @override
    def sync(self, micros: int, *, last: bool) -> AbstractContextManager[Any]:
        return nullcontext()  # every microbatch is reduced and scattered: less memory than whole gradients

    @override
    def backward(self, loss: Tensor) -> None:
        if isinstance(loss, DTensor):
            raise TaskError(_REACHED_IN)
        loss.backward()

    @override
    def norm(self) -> Tensor:
        norm: Any = clipped(self.trained, self.limit)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm  # each rank's own otherwise

    @override
    def _local_grads(self) -> tuple[list[Tensor], bool]:
        return [span(p.grad)[2] for p in self.trained if p.grad is not None], True


def _split(part: Part, world: World, policy: MixedPrecisionPolicy) -> Call:
    """Split on meta, then fill chunk by chunk: never more than one whole tensor on a rank."""
    module, device = part.module, world.device
    whole = dict(module.named_parameters(remove_duplicate=False))
    _to_meta(module)
    shell = Call(module, device)
    mesh = init_device_mesh(device.type, (world.size,))
    for name in part.blocks:
        fully_shard(module.get_submodule(name), mesh=mesh, reshard_after_forward=True, mp_policy=policy)
    fully_shard(shell, mesh=mesh, reshard_after_forward=True, mp_policy=policy)
    source = {id(p): whole[n] for n, p in module.named_parameters(remove_duplicate=False)}

    def place(p: Tensor) -> Tensor:
        full = travel(source[id(p)], device)
        assert isinstance(p, DTensor)
        local = torch.empty_like(p.to_local(), device=device)
        new = DTensor.from_local(local, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride())
        local.view(-1).copy_(full.view(-1)[slice(*span(new)[1])])
        return new

    now = dict(module.named_parameters(remove_duplicate=False))
    settle(module, place, device, origin={id(p): now[n] for n, p in whole.items()})
    return shell


def _to_meta(root: nn.Module) -> None:
    """`module.to("meta")`, but tied parameters stay tied and buffers stay where they are."""
    done: dict[int, nn.Parameter] = {}
    for module in root.modules():
        for name, p in parameters_of(module).items():
            if p is not None:
                if id(p) not in done:
                    done[id(p)] = nn.Parameter(p.detach().to("meta"), p.requires_grad)
                setattr(module, name, done[id(p)])
