"""Bytes that a script sends by Horovod's own functions, as `unipar observe` counts them."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import torch
import horovod.torch as hvd
from unipar_horovod.observed import LIBRARY

hvd.init()
model = torch.nn.Linear(4, 2)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
before = hvd.mpi_ops._allreduce_async
with LIBRARY.sends() as sent:
    hvd.allreduce(torch.ones(3))
    hvd.grouped_allreduce_([torch.ones(5), torch.ones(7, dtype=torch.float64)])
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.allgather(torch.ones(2, 3))
hvd.allreduce(torch.ones(3))
assert hvd.mpi_ops._allreduce_async is before
print(dict(sent))
"""


def test_bytes_of_each_collective() -> None:
    """Each call counts with the tensors that it is given, within the context manager alone."""
    ran = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert ran.stdout == f"{{'all_reduce': {12 + 20 + 56}, 'broadcast': 40, 'all_gather': 24}}\n"
