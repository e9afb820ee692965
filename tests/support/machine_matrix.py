"""Every launcher with every backend over machines that share nothing but a wire: `make machines` prints a table.

With --shared the run folder is one that all machines write to. A strategy is equal if the report in rank 0's folder has
the losses of the same ranks on one machine, and every other machine's folder has them, too. --faults prints another
table: what becomes of a run to which something happens.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console

from tests.support.machine_faults import FAULTS, draw_drills, drill
from tests.support.machine_launches import LAUNCHERS, Job, needs_slurm, reason_not_here
from tests.support.machine_runs import Started, size_arguments
from tests.support.machines.slurm import slurm_over
from tests.support.machines.start import machines, reason_no_machines
from tests.support.matrix import BACKENDS, Outcome, all_equal, draw_outcomes, run_command
from unipar.backend import registry


def _parse() -> argparse.Namespace:
    asked = argparse.ArgumentParser(prog="python -m tests.support.machine_matrix", description=__doc__)
    asked.add_argument("--launcher", action="append", choices=LAUNCHERS, help="only this one; repeat it for more")
    asked.add_argument("--backend", action="append", choices=BACKENDS, help="only this one; repeat it for more")
    asked.add_argument("--shared", action="store_true", help="a run folder that all machines write to")
    asked.add_argument("--machines", type=int, default=2, help="how many")
    asked.add_argument("--per", default="1", help="ranks on each machine; 2,1: two on the first, one on the second")
    asked.add_argument(
        "--hosts", choices=["network", "debian"], default="network", help="debian: own name is 127.0.1.1"
    )
    asked.add_argument("--family", choices=["ipv4", "ipv6"], default="ipv4", help="addresses of the network")
    asked.add_argument("--management", action="store_true", help="a second network, with the default route")
    asked.add_argument("--faults", action="store_true", help="what becomes of a run to which something happens")
    asked.add_argument("--fault", action="append", choices=FAULTS, help="only this one; repeat it for more")
    asked.add_argument("--keep", type=Path, help="folder for logs and disks of the machines; else they are removed")
    return asked.parse_args()


def _ranks(chosen: argparse.Namespace) -> list[int]:
    ranks = [int(word) for word in str(chosen.per).split(",")]
    ranks = ranks * chosen.machines if len(ranks) == 1 else ranks
    if len(ranks) != chosen.machines:
        sys.exit(f"--per {chosen.per}: {len(ranks)} numbers for {chosen.machines} machines")
    return ranks


def _play(chosen: argparse.Namespace, launchers: Sequence[str], backends: Sequence[str], folder: Path) -> bool:
    """Start every strategy, one after the other, on the same machines; print the table."""
    ranks, err = _ranks(chosen), Console(stderr=True)
    size = sum(ranks)
    by = run_command([sys.executable, "-m", "unipar", "run", "x.yaml", *size_arguments(size)], folder / "by")
    assert by.code == 0, by.said
    shared = folder / "shared"
    shared.mkdir()
    found: dict[tuple[str, str], Outcome] = {}
    with ExitStack() as stack:
        options = {"hosts": chosen.hosts, "family": chosen.family, "management": chosen.management}
        made = stack.enter_context(machines(chosen.machines, folder / "machines", share=[shared], ssh=True, **options))
        job = Job(made, ranks)
        if any(needs_slurm(name) and not reason_not_here(name, ranks, chosen.family) for name in launchers):
            job = dataclasses.replace(job, variables=stack.enter_context(slurm_over(made)))
        for launcher in launchers:
            for backend in backends:
                err.print(f"{launcher} x {backend} ...", end=" ", highlight=False)
                found[launcher, backend] = _run(job, launcher, backend, folder, shared if chosen.shared else None)
                err.print(found[launcher, backend].describe(by), markup=False, highlight=False)
    each = " + ".join(map(str, ranks))
    place = "a shared run folder" if chosen.shared else "nothing shared"
    draw_outcomes(found, {}, by, f"{each} ranks on {chosen.machines} machines, {place}")
    return all_equal(found, by)


def _run(job: Job, launcher: str, backend: str, folder: Path, shared: Path | None) -> Outcome:
    not_installed = registry.why_not_installed(registry.find_backend(backend))
    if why := reason_not_here(launcher, job.ranks, job.machines[0].family) or not_installed:
        return Outcome(said=f"not here: {why}")
    name = f"{launcher}-{backend}".replace(" ", "-")
    if shared:
        (shared / name).mkdir()
    with Started(job, launcher, backend, folder / name, shared=shared and shared / name) as run:
        return run.wait()


def main() -> int:
    """Print a table; return 1 if a strategy is not equal."""
    chosen = _parse()
    if why := reason_no_machines():
        sys.exit(f"no machines: {why}")
    with ExitStack() as stack:
        folder = Path(chosen.keep or stack.enter_context(tempfile.TemporaryDirectory(prefix="machines-", dir="/tmp")))
        folder.mkdir(parents=True, exist_ok=True)
        if not (chosen.faults or chosen.fault):
            return int(not _play(chosen, chosen.launcher or LAUNCHERS, chosen.backend or BACKENDS, folder))
        drills = [
            drill(fault, folder / f"{fault}-{launcher}-{backend}".replace(" ", "-"), launcher, backend, chosen.shared)
            for launcher in chosen.launcher or ["torchrun static"]
            for backend in chosen.backend or BACKENDS[:1]
            for fault in chosen.fault or FAULTS
        ]
    draw_drills(drills)
    return int(not all(one.well for one in drills))


if __name__ == "__main__":
    sys.exit(main())
