"""Process group that a process had before unipar, as Ray Train makes one. Nothing is imported to look for it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from unipar.distributed.launchers import Launcher, place_from_environment
from unipar.distributed.meeting.roll_call import decide_together
from unipar.distributed.place import Place
from unipar.distributed.world_machines import machine_key

if TYPE_CHECKING:
    import torch.distributed as dist

_SECONDS_TO_MEET: Final = 600.0


def store_of_alive_group() -> dist.Store | None:
    """Return the store of a process group that is not unipar's; None if this process has none."""
    torch_module: Any = sys.modules.get("torch.distributed")
    world_module: Any = sys.modules.get("unipar.distributed.world")
    if torch_module is None or not torch_module.is_available() or not torch_module.is_initialized():
        return None
    if world_module is not None and world_module.is_group_of_unipar():
        return None
    return torch_module.distributed_c10d._get_default_store()


_places: dict[int, Place] = {}
"""Place in each group that was alive, by the identity of its store: it is asked for more than once."""


def find_place(launchers: Iterable[Launcher], folder: Path | None = None) -> Place | None:
    """Return this process's place in a world that it was started in, or None; a group that is alive counts.

    Where no launcher has set variables, all ranks of the group call this together.
    """
    place = place_from_environment(launchers, folder)
    if place is not None or (store := store_of_alive_group()) is None:
        return place
    if id(store) not in _places:
        _places[id(store)] = _place_in_group(store)
    return _places[id(store)]


def _place_in_group(store: dist.Store) -> Place:
    torch_module: Any = sys.modules["torch.distributed"]
    rank, size = torch_module.get_rank(), torch_module.get_world_size()
    name = f"unipar/where/{len(_places)}"
    answer = decide_together(store, rank, size, name, machine_key(), _count_on_machines, _SECONDS_TO_MEET)
    local_rank, local_size = json.loads(answer)[rank]
    return Place(
        rank=rank,
        size=size,
        local_rank=int(os.environ.get("LOCAL_RANK") or local_rank),
        local_size=local_size,
        launcher="whoever made the process group",
    )


def _count_on_machines(keys: list[str]) -> str:
    """Return each rank's position on its machine and the number of ranks there, as JSON."""
    return json.dumps([(keys[:rank].count(key), keys.count(key)) for rank, key in enumerate(keys)])
