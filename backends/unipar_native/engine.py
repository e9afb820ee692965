"""Engines of the backends `single` and `native`: one process, DDP, FSDP2, local SGD and nn.DataParallel."""

from __future__ import annotations

from unipar_native.data_parallel import DataParallelEngine
from unipar_native.ddp import DDPEngine
from unipar_native.fsdp2 import FSDP2Engine
from unipar_native.local_sgd import LocalSGDEngine
from unipar_native.single_process import SingleEngine

__all__ = [
    "DDPEngine",
    "DataParallelEngine",
    "FSDP2Engine",
    "LocalSGDEngine",
    "SingleEngine",
]
