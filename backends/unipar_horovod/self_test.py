"""Two processes sum a tensor over loopback: what an installed Horovod must do before it counts.

`python -m unipar_horovod.proof` prints, as JSON, what it was built with; it exits with 1 and a sentence otherwise.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

RANKS = 2
PATIENCE = 120.0


def main() -> None:
    if "HOROVOD_RANK" in os.environ:
        sys.stdout.write(json.dumps(_sum()) + "\n")
    else:
        sys.stdout.write(_prove())


def _sum() -> dict[str, bool]:
    import horovod.torch as hvd
    import torch

    hvd.init()
    seen = (hvd.rank(), hvd.size())
    if seen != (int(os.environ["HOROVOD_RANK"]), RANKS):
        sys.exit(f"horovod sees rank {seen[0]} of {seen[1]}, not rank {os.environ['HOROVOD_RANK']} of {RANKS}")
    summed = hvd.allreduce(torch.tensor([hvd.rank() + 1.0]), op=hvd.Sum).item()
    if summed != 3.0:
        sys.exit(f"horovod sums 1 and 2 to {summed:g}")
    built = {"gloo": hvd.gloo_built(), "mpi": hvd.mpi_built(), "nccl": hvd.nccl_built()}
    hvd.shutdown()
    return {name: bool(there) for name, there in built.items()}


def _prove() -> str:
    from unipar_horovod.rendezvous import serving, variables

    with serving(RANKS, RANKS) as port:
        ranks = [
            subprocess.Popen(
                [sys.executable, "-P", "-m", "unipar_horovod.self_test"],
                env=os.environ | variables(rank=rank, size=RANKS, local_size=RANKS, port=port),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(RANKS)
        ]
        until = time.monotonic() + PATIENCE
        try:
            told = [rank.communicate(timeout=max(0.0, until - time.monotonic())) for rank in ranks]
        except subprocess.TimeoutExpired:
            sys.exit(f"{RANKS} processes did not sum a tensor within {PATIENCE:g} s")
        finally:
            for rank in ranks:
                rank.kill()
                rank.communicate()
    for number, (rank, (_, err)) in enumerate(zip(ranks, told, strict=True)):
        if rank.returncode:
            why = err.strip().splitlines() or [f"exit code {rank.returncode}"]
            sys.exit(f"rank {number}: {why[-1]}")
    return told[0][0].splitlines()[-1] + "\n"


if __name__ == "__main__":
    main()
