"""Process groups of a mesh in one process without peers, whose collectives move nothing: for `unipar plan`."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from unipar.distributed.mesh import Mesh, MeshGroups
from unipar.errors import TaskError


@contextmanager
def fake_groups(mesh: Mesh) -> Generator[MeshGroups]:
    """Context manager: groups along the axes of a mesh, in which this process has the mesh's seat."""
    if dist.is_initialized():
        raise TaskError(
            "plan: a model that is split over tensor, pipeline or context is planned in groups without peers, and this "
            "process is in a process group already: plan in another process, or before training starts"
        )
    dist.init_process_group("fake", rank=mesh.rank_at(), world_size=mesh.ranks, store=FakeStore())
    try:
        yield MeshGroups(mesh, "cpu")
    finally:
        dist.destroy_process_group()
