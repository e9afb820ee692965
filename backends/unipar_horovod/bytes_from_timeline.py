"""Bytes that Horovod sends, read from its timeline: which tensors it reduced, and how large they are."""

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
"""Name of the tensors that unipar sends to start the timeline; they are not counted."""

COLLECTIVE_OF_EVENT: Final = {
    "ALLREDUCE": "all_reduce",
    "ALLGATHER": "all_gather",
    "REDUCESCATTER": "reduce_scatter",
    "ALLTOALL": "all_to_all",
    "BROADCAST": "broadcast",
}


@contextmanager
def record_sends(world: World) -> Generator[dict[str, int]]:
    """Context manager: yield a dict that holds the bytes by collective after exit.

    Horovod writes the timeline on rank 0 only, which sends the result to the other ranks.
    """
    bytes_sent: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "timeline.json"
        hvd.start_timeline(str(file))
        for _ in range(2):  # recording starts with the next cycle of Horovod's thread: the first may run already
            hvd.allreduce(torch.zeros(1), name=MARKER_TENSOR)
        yield bytes_sent
        hvd.stop_timeline()
        result = [bytes_by_collective(json.loads(file.read_bytes())) if world.rank == 0 else None]
    dist.broadcast_object_list(result, 0)
    assert result[0] is not None
    bytes_sent.update(result[0])


def bytes_by_collective(events: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Return the bytes of the timeline's events by collective.

    In the timeline each tensor is a process with a name; the event that ends a collective has its dtype and shape.
    """
    names: dict[int, str] = {}
    begun: dict[int, list[str]] = {}
    sizes: Counter[str] = Counter()
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
                sizes[COLLECTIVE_OF_EVENT.get(kind, kind.lower())] += size
    return dict(sizes)
