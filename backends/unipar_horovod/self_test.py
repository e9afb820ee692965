"""Self-test of an installed Horovod: two processes sum a tensor over loopback.

`python -m unipar_horovod.self_test` prints as JSON the libraries that Horovod was built with, or exits with 1 and
a sentence.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

SELF_TEST_RANKS = 2
SELF_TEST_SECONDS = 120.0


def run_self_test() -> None:
    """Start both ranks; in a rank, sum the tensor and print what Horovod was built with."""
    if "HOROVOD_RANK" in os.environ:
        sys.stdout.write(json.dumps(_sum_over_ranks()) + "\n")
    else:
        sys.stdout.write(_run_ranks())


def _sum_over_ranks() -> dict[str, bool]:
    import horovod.torch as hvd
    import torch

    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    if (rank, size) != (int(os.environ["HOROVOD_RANK"]), SELF_TEST_RANKS):
        sys.exit(f"horovod sees rank {rank} of {size}, not rank {os.environ['HOROVOD_RANK']} of {SELF_TEST_RANKS}")
    summed = hvd.allreduce(torch.tensor([hvd.rank() + 1.0]), op=hvd.Sum).item()
    if summed != 3.0:
        sys.exit(f"horovod sums 1 and 2 to {summed:g}")
    built = {"gloo": hvd.gloo_built(), "mpi": hvd.mpi_built(), "nccl": hvd.nccl_built()}
    hvd.shutdown()
    return {name: bool(there) for name, there in built.items()}


def _run_ranks() -> str:
    from unipar.distributed.world_machines import WorldMachines
    from unipar_horovod.horovod_rendezvous import rendezvous_variables, serve_rendezvous, slots_of

    slots = slots_of(WorldMachines.one(SELF_TEST_RANKS))
    with serve_rendezvous(slots) as port:
        ranks = [
            subprocess.Popen(
                [sys.executable, "-P", "-m", "unipar_horovod.self_test"],
                env=os.environ | rendezvous_variables(slot, port=port),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for slot in slots
        ]
        until = time.monotonic() + SELF_TEST_SECONDS
        try:
            outputs = [rank.communicate(timeout=max(0.0, until - time.monotonic())) for rank in ranks]
        except subprocess.TimeoutExpired:
            sys.exit(f"{SELF_TEST_RANKS} processes did not sum a tensor within {SELF_TEST_SECONDS:g} s")
        finally:
            for rank in ranks:
                rank.kill()
                rank.communicate()
    for number, (rank, (_, err)) in enumerate(zip(ranks, outputs, strict=True)):
        if rank.returncode:
            why = err.strip().splitlines() or [f"exit code {rank.returncode}"]
            sys.exit(f"rank {number}: {why[-1]}")
    return outputs[0][0].splitlines()[-1] + "\n"


if __name__ == "__main__":
    run_self_test()
