"""Horovod's build before and after unipar's recipe, in turn on this machine, and the speed of what came out.

    python -m benchmarks.horovod_build [--rounds 1] [--jobs 2] [--keep FOLDER] [--calls 200]

`released` changes the C++ standard alone, without which it does not compile; `unipar` is what `unipar install horovod`
builds. CPU seconds are those of the whole tree of processes (configure, compile, link and pack), which other work on
the machine changes little; wall seconds are only comparable on a quiet machine. Neither wheel replaces the installed
Horovod. `--keep` keeps the wheels, or takes those that are there.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from horovod.runner.common.util.hosts import SlotInfo

LARGE, SMALL, SMALL_SIZE = 10_000_000, 100, 1_000
LARGE_CALLS = 3
RANKS = 2
KINDS = ("released", "unipar")


def main() -> None:
    """Build both wheels, `--rounds` times in turn, and compare them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1, help="builds of each kind")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="compilers at once")
    parser.add_argument("--keep", type=Path, help="folder for the wheels")
    parser.add_argument("--calls", type=int, default=20, help="timings of each kind, in turn")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder: Path = args.keep or Path(scratch)
        for kind in KINDS * args.rounds:
            if not list((folder / kind).glob("*.whl")) or args.rounds > 1:
                print(f"{kind:9}  {build(kind, folder, args.jobs)}", flush=True)
        for kind in KINDS:
            (wheel,) = (folder / kind).glob("*.whl")
            with zipfile.ZipFile(wheel) as packed:
                packed.extractall(Path(scratch) / "installed" / kind)
            (library,) = (Path(scratch) / "installed" / kind).rglob("mpi_lib_v2*.so")
            print(f"{kind:9}  wheel {wheel.stat().st_size / 1e6:.1f} MB, library {library.stat().st_size / 1e6:.1f} MB")
        compare_speed(Path(scratch) / "installed", args.calls)


def build(kind: str, folder: Path, jobs: int) -> str:
    """Build the wheel of one kind in `folder`; return its CPU seconds and wall seconds as text."""
    from unipar_horovod import install, recipe, toolchain

    torch = toolchain.query_torch()
    if isinstance(torch, str):
        sys.exit(torch)
    out = folder / kind
    out.mkdir(parents=True, exist_ok=True)
    plan = toolchain.BuildFeatures(("gloo",), {"HOROVOD_WITHOUT_MPI": "1", "MAKEFLAGS": f"-j{jobs}"})
    with tempfile.TemporaryDirectory() as scratch:
        source = install.unpack(install.fetch_source(Path(scratch), out / "log"), Path(scratch) / "source")
        if kind == "unipar":
            recipe.prepare_source(source, torch, plan)
        else:
            recipe.patch_cxx_standard(source, torch.standard)
        before, begun = _cpu_seconds(), time.monotonic()
        install.run_build(source, out, plan, out / "log")
        return f"{_cpu_seconds() - before:6.1f} s of CPU, {time.monotonic() - begun:6.1f} s of wall, {jobs} compilers"


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def compare_speed(installed: Path, calls: int) -> None:
    """Time all-reduces of both libraries in turn; print the ratio: median, middle half, fastest."""
    from unipar_horovod.horovod_rendezvous import serve_rendezvous, slots_of

    from unipar.distributed.world_machines import WorldMachines

    slots = slots_of(WorldMachines.one(RANKS))
    times = {kind: list[list[float]]() for kind in KINDS}
    workers: dict[str, list[subprocess.Popen[str]]] = {}
    with ExitStack() as stack:
        for kind in KINDS:
            workers[kind] = _start(installed / kind, slots, stack.enter_context(serve_rendezvous(slots)))
            for rank in workers[kind]:
                stack.enter_context(rank)  # its end waits for the rank
                stack.callback(rank.kill)
        for _ in range(calls):
            for kind in KINDS:
                times[kind].append(_one_round(workers[kind]))
    for number, what in enumerate((f"{LARGE / 1e6:g}M floats", f"{SMALL} tensors of {SMALL_SIZE}")):
        old, new = ([row[number] for row in times[kind]] for kind in KINDS)
        low, middle, high = statistics.quantiles([b / a for a, b in zip(old, new, strict=True)], n=4)
        print(
            f"all-reduce of {what}: {statistics.median(old) * 1e3:.2f} ms released, "
            f"{statistics.median(new) * 1e3:.2f} ms unipar, ratio {middle:.3f} [{low:.3f}..{high:.3f}], "
            f"of the fastest {min(new) / min(old):.3f}"
        )


def _start(installed: Path, slots: list[SlotInfo], port: int) -> list[subprocess.Popen[str]]:
    """Start the ranks with one library; they wait for a line before each round."""
    from unipar_horovod.horovod_rendezvous import rendezvous_variables

    path = os.pathsep.join([str(installed), os.environ.get("PYTHONPATH", "")])
    return [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.horovod_build_rank"],
            env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | rendezvous_variables(slot, port=port),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for slot in slots
    ]


def _one_round(ranks: list[subprocess.Popen[str]]) -> list[float]:
    for rank in ranks:
        assert rank.stdin is not None
        rank.stdin.write("\n")
        rank.stdin.flush()
    answers: list[list[float]] = []
    for rank in ranks:
        assert rank.stdout is not None
        answers.append(json.loads(rank.stdout.readline()))
    return [max(both) for both in zip(*answers, strict=True)]


if __name__ == "__main__":
    main()
