"""Counting of experts' tokens on an emulated device."""

from __future__ import annotations

from tests.support.softcuda.processes import EmulatedDevice


def test_counting_does_not_wait(emulated: EmulatedDevice) -> None:
    """Forwards in training add up on the device, others are not counted; the host waits when it reads the tokens."""
    run = emulated.run("""
import os
from types import SimpleNamespace
import torch
import torch.distributed as dist
from unipar.distributed.mesh import Mesh
from unipar_mesh.expert.expert_layer import ExpertLayer
from unipar_mesh.expert.token_counts import TokenCounts

device = torch.device("cuda", 0)
mesh = Mesh.of(0, 1, tensor=1, pipeline=1, context=1, expert=1)
world = SimpleNamespace(device=device, mesh=mesh, data_size=1, sum=lambda tensor: tensor)
counts = TokenCounts([ExpertLayer("a", "stacked", 4), ExpertLayer("b", "list", 2)], world)
sent = torch.tensor([3, 1, 0, 0], device=device)
with counts.counting():
    for got in (4, 6, 2):
        counts.add("a", sent, got)
    with counts.counting(on=False):
        counts.add("a", sent, 4)
counts.add("a", sent, 4)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
taken = [counts.take() for _ in range(2)]
result = [{name: tokens.to_row() for name, tokens in layers.items()} for layers in taken]
""")
    row = {"tokens": [9, 3, 0, 0], "fullest": 3.0, "entropy": 0.406, "unused": 2, "rank": 1.0, "microbatch": 1.5}
    assert run.result == [{"a": row}, {}]
    waits = [finding.where[0] for finding in run.findings if finding.kind == "wait"]
    assert [where for where in waits if "token_counts" not in where] == ["<string>:14"]  # `sent` itself
    assert len(waits) == 1 + 2 * 3
