"""Engines of PyTorch itself: one process, DDP, FSDP2 and nn.DataParallel."""

from __future__ import annotations

from unipar_native.data_parallel import DP
from unipar_native.ddp import DDP, FirstByHand
from unipar_native.fsdp2 import FSDP2, Sharded
from unipar_native.local_sgd import Local
from unipar_native.single import One

__all__ = ["DDP", "DP", "FSDP2", "FirstByHand", "Local", "One", "Sharded"]
