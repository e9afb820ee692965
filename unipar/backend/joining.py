"""Usual implementation of `Backend.join`: device, transport and process group from a config."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from unipar.config import Config
from unipar.distributed.place import Place
from unipar.distributed.rendezvous import on_loopback, open_store
from unipar.distributed.world import World
from unipar.errors import WorldMismatch


def device_of_rank(config: Config, place: Place) -> torch.device:
    """Return the device on which this rank computes."""
    if config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if ":" in config.device:
        return torch.device(config.device)
    return torch.device("cuda", place.local_rank)


def choose_transport(config: Config, device: torch.device) -> str:
    """Return the backends of torch.distributed; gloo on `device: cuda:N`, because NCCL needs one GPU for each rank."""
    if device.type != "cuda" or ":" in config.device:
        return "gloo"
    # gloo beside nccl under offload: norms are summed over tensors in host memory
    return "nccl" if config.model.offload == "none" else "cpu:gloo,cuda:nccl"


_stores: dict[tuple[str, int] | None, dist.Store] = {}
"""Store by address: rank 0 listens at an address until its process ends."""


def store_at(place: Place, patience: timedelta) -> dist.Store:
    """Return the store of a world; at one address it is opened once in a process."""
    if place.address in _stores:
        return _stores[place.address]
    # torchrun keeps its store when it restarts the ranks: what they wrote before must not be read again
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if place.hosted else "0"
    store = dist.PrefixStore(f"attempt/{attempt}", open_store(place, patience))
    if place.address is not None:
        _stores[place.address] = store
    return store


_places_joined: list[Place] = []
"""Places of this process in all worlds that it has joined."""


def meet(config: Config, place: Place) -> World:
    """Join the other processes of this run and return the world; sets up torch.distributed."""
    device = device_of_rank(config, place)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    patience = timedelta(seconds=config.launch.timeout)
    store = dist.HashStore() if place.size == 1 and place.address is None else store_at(place, patience)
    _places_joined.append(place)
    store = dist.PrefixStore(f"unipar/{len(_places_joined)}", store)  # a script may launch twice in one foreign world
    world = World(place, device, store)
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if place.started_by_unipar or (on_loopback(place) and variable not in os.environ):
            world.set_variables(**{variable: "lo"})
    kind = choose_transport(config, device)
    dist.init_process_group(
        kind,
        store=store,
        rank=place.rank,
        world_size=place.size,
        timeout=patience,
        device_id=device if "nccl" in kind else None,
    )
    if (dist.get_rank(), dist.get_world_size()) != (place.rank, place.size):
        raise WorldMismatch(f"torch sees rank {dist.get_rank()} of {dist.get_world_size()}, not {place}")
    return world
