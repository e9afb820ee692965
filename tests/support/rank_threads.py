"""Ranks that are threads of this process and share a store, each by a connection of its own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")
PATIENCE = 20.0


def serve_store() -> dist.Store:
    return dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=PATIENCE), wait_for_workers=False)


def own_connection(store: dist.Store) -> dist.Store:
    """Return the store as another process would have it: calls over one connection wait for each other."""
    assert isinstance(store, dist.TCPStore)
    return dist.TCPStore("127.0.0.1", store.port, None, False, timedelta(seconds=PATIENCE))


def in_ranks(size: int, function: Callable[[int], T], first: int = 0) -> list[T]:
    """Return what a function returns on each rank, each in a thread of its own."""
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(function, range(first, size)))
