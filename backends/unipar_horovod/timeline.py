"""Horovod's timeline: which tensors it reduced, and how large they are."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, Final

import horovod.torch as hvd
import torch
import torch.distributed as dist

from unipar.distributed.world import World

MARKER_TENSOR: Final = "unipar's own"
COLLECTIVE_OF_EVENT: Final = {
    "ALLREDUCE": "all_reduce",
    "ALLGATHER": "all_gather",
    "REDUCESCATTER": "reduce_scatter",
    "ALLTOALL": "all_to_all",
    "BROADCAST": "broadcast",
}


@contextmanager
def record_sends(world: World) -> Generator[dict[str, int]]:
    """Bytes by collective; they are there when it is closed. Rank 0 alone is given the timeline, and tells the rest."""
    found: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "timeline.json"
        hvd.start_timeline(str(file))
        for _ in range(2):  # it begins with a cycle of Horovod's thread: the first may be under way already
            hvd.allreduce(torch.zeros(1), name=MARKER_TENSOR)
        yield found
        hvd.stop_timeline()
        told = [bytes_by_collective(json.loads(file.read_bytes())) if world.rank == 0 else None]
    dist.broadcast_object_list(told, 0)
    assert told[0] is not None
    found.update(told[0])


def bytes_by_collective(events: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Each tensor is a process with a name; what began with a collective ends with the tensor's type and shape."""
    names: dict[int, str] = {}
    begun: dict[int, list[str]] = {}
    found: Counter[str] = Counter()
    for event in events:
        at, args = event["pid"], event.get("args", {})
        if event["ph"] == "M":
            names[at] = args.get("name", names.get(at, ""))
        elif event["ph"] == "B":
            begun.setdefault(at, []).append(event["name"])
        elif event["ph"] == "E" and (opened := begun.get(at)):
            kind = opened.pop()
            if "shape" in args and not names[at].endswith(MARKER_TENSOR):
                size = getattr(torch, args["dtype"]).itemsize * prod(json.loads(args["shape"]))
                found[COLLECTIVE_OF_EVENT.get(kind, kind.lower())] += size
    return dict(found)
