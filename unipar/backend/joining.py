"""Usual implementation of `Backend.join`: device, transport and process group from a config."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from importlib.util import find_spec

import torch
import torch.distributed as dist

from unipar.backend.offered_strategies import strategy_of
from unipar.backend.resources import choose_device
from unipar.config import Config
from unipar.distributed.accelerators import ACCELERATORS
from unipar.distributed.device import DeviceUnusable, device_name, device_uuid, select_device, transport_of
from unipar.distributed.meeting.world_session import Session, interface_for, session_of
from unipar.distributed.place import Place
from unipar.distributed.world import World
from unipar.errors import Unsupported, WorldMismatch


def device_of_rank(config: Config, place: Place) -> torch.device:
    """Return the device on which this rank computes; raise Unsupported if torch cannot use it in this process."""
    kind, _ = choose_device(config)
    if kind == "cpu":
        return torch.device("cpu")
    try:
        return select_device(kind, place.local_rank)
    except DeviceUnusable as e:
        raise Unsupported(
            str(strategy_of(config)),
            [f"device: {kind}: torch cannot use it on rank {place.rank}: {e}; set device: cpu"],
        ) from None


def require_package_of_device(config: Config, library: str) -> None:
    """Raise Unsupported if a library does not find this kind of device without a package that is not installed."""
    kind = choose_device(config)[0].partition(":")[0]
    package = ACCELERATORS[kind].package if kind in ACCELERATORS else ""
    if package and find_spec(package) is None:
        raise Unsupported(
            str(strategy_of(config)),
            [
                f"device: {kind}: {library} finds such a device by the package {package}, which is not installed; "
                "install it, set device: cpu, or choose backend: native"
            ],
        )


def choose_transport(config: Config, device: torch.device) -> str:
    """Return the backends of torch.distributed; gloo on `device: cuda:N`, because NCCL needs one GPU for each rank."""
    transport = transport_of(device)
    if transport == "gloo" or (":" in config.device and ACCELERATORS[device.type].can_be_shared):
        return "gloo"
    # gloo beside nccl under offload: norms are summed over tensors in host memory
    return transport if config.model.offloaded_state == "none" else f"cpu:gloo,{device.type}:{transport}"


def _check_own_devices(world: World) -> None:
    """Raise WorldMismatch on every rank if two compute on one device, for which transports such as NCCL hang."""
    store = world.store
    assert store is not None
    key = f"device {device_uuid(world.device)} of {socket.gethostname()}"
    if store.add(key, 1) == 1:
        store.set(f"{key} rank", str(world.rank))
    else:
        ranks = sorted([int(store.get(f"{key} rank")), world.rank])
        store.set(
            "device of two",
            f"ranks {ranks[0]} and {ranks[1]} are on one {device_name(world.device)}: start no more processes on a "
            f"machine than it has devices, or let them share one with device: {world.device.type}:0",
        )
    if store.add("devices", 1) == world.size:  # the last rank tells the others
        store.set("devices compared", store.get("device of two").decode() if store.check(["device of two"]) else "")
    if conflict := store.get("devices compared").decode():
        raise WorldMismatch(conflict)


def meet(config: Config, place: Place) -> World:
    """Join the other processes of this run and return the world; sets up torch.distributed."""
    device = device_of_rank(config, place)
    session, interface = join_session(config, place), _chosen_interface(config)
    launch = session.next_launch()
    world = World(place, device, dist.PrefixStore(launch, session.store))
    world.machines, world.tree, world.launch = session.machines, session.tree, launch
    network = interface_for(session, interface)
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        alone = place.started_by_unipar and not session.machines.several
        if network is not None and (alone or interface or variable not in os.environ):
            world.set_variables(**{variable: network})
    kind = choose_transport(config, device)
    if kind != "gloo" and place.size > 1:
        _check_own_devices(world)
    if session.adopted:
        world.owns_group = False
        if kind != "gloo" and f"{device.type}:{transport_of(device)}" in dist.get_backend_config():
            world.barrier_devices = [device.index]
    else:
        dist.init_process_group(
            kind,
            store=world.store,
            rank=place.rank,
            world_size=place.size,
            timeout=timedelta(seconds=config.launch.timeout),
            device_id=device if kind != "gloo" else None,
        )
    if (dist.get_rank(), dist.get_world_size()) != (place.rank, place.size):
        raise WorldMismatch(f"torch sees rank {dist.get_rank()} of {dist.get_world_size()}, not {place}")
    return world


def join_session(config: Config, place: Place) -> Session:
    """Return the session of this rank's world: the ranks on several machines find each other."""
    return session_of(place, config.launch.rendezvous_timeout, config.launch.timeout, _chosen_interface(config))


def _chosen_interface(config: Config) -> str | None:
    """Return the network interface that the config names, or None: it is found by the route to rank 0."""
    return config.machines.interface if config.machines is not None else None
