"""Engine of Horovod, which sums gradients: the divisor is 1."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from typing import Any, final

import horovod.torch as hvd
from horovod.torch import mpi_ops
from torch import Tensor
from typing_extensions import override

from unipar.backend import Holding, Part
from unipar.backend.joining import meet
from unipar.config import Config
from unipar.distributed.addresses import LOOPBACK, is_ipv6, resolve_host
from unipar.distributed.device import has_own_memory
from unipar.distributed.place import Place
from unipar.distributed.world import World
from unipar.engines.placement import broadcast_model
from unipar.engines.wrapper import WrapperEngine
from unipar.errors import Unsupported, WorldMismatch
from unipar_horovod import fusion_buffer_bytes, options_of, process_set_refusals
from unipar_horovod.horovod_rendezvous import rendezvous_variables, serve_rendezvous, slots_of

_ONLY_CPU = (
    "device: {kind}: this Horovod was built for tensors of the CPU alone, and the first step would never end; build it "
    "where CUDA's toolkit is (`unipar install horovod`), set device: cpu, or choose another backend"
)


@final
class HorovodEngine(WrapperEngine):
    """Engine of one part, with Horovod's DistributedOptimizer around the part's own."""

    divisor = 1.0

    def __init__(self, part: Part, config: Config, world: World) -> None:
        broadcast_model(part.module, world.device)
        _start_horovod(config, world, sum(p.numel() for p in part.module.parameters()))
        super().__init__(part, config, world)
        half = options_of(config).compression == "fp16"
        compression: Any = hvd.Compression.fp16 if half else hvd.Compression.none
        # Horovod names each collective by its parameter; parts may have parameters of the same name
        named = [(f"{part.name}.{n}", p) for n, p in part.module.named_parameters() if p.requires_grad]
        self.optimizer = hvd.DistributedOptimizer(
            self.base,
            named_parameters=named,
            op=hvd.Sum,
            compression=compression,
        )
        self.base = self.optimizer  # Horovod copies the optimizer, with its state
        self.share_views()
        self.passes = 1
        self._waited = 0.0

    @override
    def sync(self, micros: int, *, last: bool) -> None:
        if micros != self.passes:
            self.optimizer.set_backward_passes_per_step(micros)
            self.passes = micros

    @override
    def finish_reduction(self) -> None:
        began = time.perf_counter()
        self.optimizer.synchronize()  # asks again and again whether it is done, and does not sleep
        self._waited += time.perf_counter() - began

    @override
    def seconds_waited(self) -> float:
        return self._waited

    @override
    def extra_holdings(self) -> Iterator[Holding]:
        """Yield the tensors that are being sent; Horovod's fusion buffer cannot be reached from Python."""
        known: Any = mpi_ops
        for p, (handle, _) in self.optimizer._handles.items():
            for t in known._handle_map.get(handle, ()):
                if isinstance(t, Tensor):
                    yield Holding("communication", f"{self.optimizer._parameter_names[p]}, being sent", t)

    @override
    def update(self) -> None:
        with self.optimizer.skip_synchronize():  # finish_reduction() has synchronized, before the clip
            self.optimizer.step()
        self.optimizer.zero_grad()


_cycle_times_set: list[float] = []
"""Cycle times, other than the default, that this process has set: starting Horovod again after that is a segfault."""


def join(config: Config, place: Place) -> World:
    """Create unipar's process group, and let rank 0 open a rendezvous on loopback, which Horovod needs to start."""
    if _cycle_times_set:
        raise Unsupported(
            "horovod/nothing",
            [
                f"options.horovod.cycle_ms: an earlier run in this process set it to {_cycle_times_set[-1]:g}, and "
                "Horovod crashes when it starts again after that; leave it out, or give each launch a process of its "
                "own"
            ],
        )
    world = meet(config, place)
    options = options_of(config)
    if wrong := list(process_set_refusals(options, place.size)):  # a world whose size the config left open
        raise Unsupported("horovod/nothing", wrong)
    if has_own_memory(world.device) and not (hvd.cuda_built() or hvd.rocm_built()):
        raise Unsupported("horovod/nothing", [_ONLY_CPU.format(kind=world.device.type)])
    if options.cycle_ms != 1.0:
        _cycle_times_set.append(options.cycle_ms)
        world.set_variables(HOROVOD_CYCLE_TIME=options.cycle_ms)
    rendezvous = ExitStack()
    if place.launcher != "horovodrun":
        _open_rendezvous(world, rendezvous)

    def leave() -> None:
        if hvd.is_initialized():
            hvd.shutdown()
        world.barrier()  # no rank may still need the rendezvous when it closes
        rendezvous.close()

    world.closers.append(leave)
    return world


def _start_horovod(config: Config, world: World, parameters: int) -> None:
    """Start Horovod, once for all parts: the size of its buffer must be set before, and fits the first part."""
    if hvd.is_initialized():
        return
    world.set_variables(HOROVOD_FUSION_THRESHOLD=fusion_buffer_bytes(config, parameters))
    hvd.init(process_sets=[hvd.ProcessSet(sorted(ranks)) for ranks in options_of(config).process_sets])
    world.require_same_world("Horovod", rank=hvd.rank(), size=hvd.size())


def _open_rendezvous(world: World, stack: ExitStack) -> None:
    """Open a rendezvous on rank 0, and set the variables that `horovodrun` would set.

    The server that `horovodrun` starts listens on every interface, without authentication.
    """
    assert world.store is not None
    _refuse_unreachable(world)
    slots, address = slots_of(world.machines), world.machines.all[0].address or LOOPBACK
    if world.rank == 0:
        world.store.set("horovod", str(stack.enter_context(serve_rendezvous(slots, address))))
    port = int(world.store.get("horovod").decode())
    network = os.environ["GLOO_SOCKET_IFNAME"] if world.machines.several else "lo"
    world.set_variables(**rendezvous_variables(slots[world.rank], port=port, address=address, interface=network))


def _refuse_unreachable(world: World) -> None:
    """Raise WorldMismatch if Horovod would not find the other machines."""
    here = world.machines.of(world.rank)
    if not world.machines.several:
        return
    if is_ipv6(here.address):
        raise WorldMismatch(
            f"Horovod's processes find each other over IPv4 alone, and {here} is reached over IPv6: use native, "
            "deepspeed or accelerate, or an interface with an IPv4 address (machines.interface)"
        )
    if find_spec("horovod.unipar_changes") is None and resolve_host(socket.gethostname(), 0.0) != here.address:
        raise WorldMismatch(
            f"the name of {here} means another address there, which this build of Horovod would use: build it again "
            "with `unipar install horovod --force`, or correct /etc/hosts"
        )
