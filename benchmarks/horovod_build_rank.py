"""Rank of benchmarks/horovod_build.py: it times all-reduces of the Horovod that is first on the path."""

from __future__ import annotations

import json
import sys
import time

import horovod.torch as hvd
import torch

from benchmarks.horovod_build import LARGE, LARGE_CALLS, SMALL, SMALL_SIZE


def main() -> None:
    """Print, for each line that comes in, the seconds of one large all-reduce and of many small ones at once."""
    hvd.init()
    large = torch.ones(LARGE)
    small = [torch.ones(SMALL_SIZE) for _ in range(SMALL)]
    for _ in sys.stdin:
        hvd.barrier()
        begun = time.perf_counter()
        for _ in range(LARGE_CALLS):
            hvd.allreduce_(large, op=hvd.Average, name="large")
        middle = time.perf_counter()
        for _ in range(LARGE_CALLS):
            for handle in [hvd.allreduce_async_(x, op=hvd.Average, name=f"s{i}") for i, x in enumerate(small)]:
                hvd.synchronize(handle)
        ended = time.perf_counter()
        print(json.dumps([(middle - begun) / LARGE_CALLS, (ended - middle) / LARGE_CALLS]), flush=True)


if __name__ == "__main__":
    main()
