"""Open MPI: one mpirun command that starts the ranks over ssh, for a few machines without a queue."""

from __future__ import annotations

import ipaddress
import math
import shlex
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from pydantic import Field
from typing_extensions import override

from unipar.config.job_system import JobSystem, NewJob, SubmittedJob
from unipar.config.sections.section import Section
from unipar.errors import Stopped
from unipar.jobs.client import ClientFailed, unset_variables
from unipar.jobs.submitted import EXIT_CODE_FILE, OUTPUT_FILE
from unipar.utils.text import count_of

_Names = Annotated[tuple[str, ...], Field(strict=False)]


class MpiOptions(Section):
    """Config section `machines.mpi`."""

    hosts: _Names = ()
    """Names or addresses of the machines, which ssh reaches without a password; rank 0 is on the first."""

    address: str | None = None
    """Address of the first machine at which the others reach it; null: its name in `hosts`."""

    port: Annotated[int, Field(ge=1024, le=65535)] = 29400
    """Port on the first machine where the ranks meet."""

    secrets: _Names = ()
    """Names of variables with secrets, such as WANDB_API_KEY: mpirun passes their values on, no file holds them."""

    python: str | None = None
    """Interpreter on the machines; null: the one that submits."""

    extra_args: _Names = ()
    """Further options of mpirun, such as `--mca btl_tcp_if_include eth0`, one word each."""


class Mpi(JobSystem[MpiOptions]):
    """Open MPI, through mpirun, which runs here as long as the job."""

    name = "mpi"
    options = MpiOptions
    clients = ("mpirun",)
    remedy = "install Open MPI here and on the other machines (on Debian: apt-get install openmpi-bin)"
    prints_id = False

    @override
    def refuse(self, job: NewJob) -> Iterator[str]:
        hosts, key = self.chosen.hosts, "machines.mpi.hosts"
        if len(hosts) != job.nodes:
            named = f"{count_of(len(hosts), 'machine')} ({', '.join(hosts)})" if hosts else "no machine"
            yield f"{key}: names {named}, and machines.nodes is {job.nodes}: name so many, or change machines.nodes"
        if len(set(hosts)) < len(hosts):
            yield (
                f"{key}: {', '.join(hosts)}: a machine is named twice; name each once, "
                "with machines.ranks_per_node ranks"
            )
        if hosts and (why := _why_unreachable(self._address, job.nodes)):
            yield why
        if job.config.launch.restarts:
            yield "launch.restarts: mpirun starts nothing again; set it to 0, and go on by hand with --resume"
        if why := unset_variables(self.chosen.secrets, "machines.mpi.secrets"):
            yield why

    @property
    def _address(self) -> str:
        return self.chosen.address or self.chosen.hosts[0]

    @override
    def texts(self, job: NewJob) -> dict[str, str]:
        return {}

    @override
    def hand_over(self, job: NewJob) -> list[str]:
        chosen, time = self.chosen, job.machines.time
        words = [chosen.python or sys.executable, "-m", "unipar", *job.words(str(job.file), str(job.out))]
        if job.machines.setup:
            words = ["bash", "-c", "\n".join([*job.machines.setup, 'exec "$0" "$@"']), *words]
        return [
            *("mpirun", "-np", str(job.ranks), "-H", ",".join(f"{host}:{job.per}" for host in chosen.hosts)),
            *("-x", f"MASTER_ADDR={self._address}", "-x", f"MASTER_PORT={chosen.port}"),
            *(word for name in chosen.secrets for word in ("-x", name)),
            *("--wdir", str(Path.cwd()), "--bind-to", "none"),
            *(() if time is None else ("--timeout", str(math.ceil(time)))),
            *(word for option in chosen.extra_args for word in shlex.split(option)),
            *words,
        ]

    @override
    def id_of(self, job: NewJob, output: str) -> str:
        raise NotImplementedError("mpirun's process is the job")

    @override
    def state(self, job: SubmittedJob) -> str:
        code = Path(job.folder) / EXIT_CODE_FILE
        if code.exists():
            number = code.read_text("utf-8").strip()
            return {"0": "ended", str(Stopped.code): "stopped"}.get(number, f"failed ({number})")
        if job.host != socket.gethostname():
            return f"unknown here: it was started on {job.host}"
        return "running" if self._is_alive(job) else "died"

    def _is_alive(self, job: SubmittedJob) -> bool:
        try:
            words = Path(f"/proc/{job.id}/cmdline").read_bytes().split(b"\0")
        except OSError:
            return False
        return str(Path(job.folder).parents[1]).encode() in words  # the run folder: --out of this job

    @override
    def logs(self, job: SubmittedJob, *, follow: bool) -> list[str]:
        log = Path(job.folder) / OUTPUT_FILE
        if not log.exists():
            raise ClientFailed(f"job {job.id} printed to its terminal; with --detach it prints to a file")
        return ["tail", "--lines=+1", *(["--follow", f"--pid={job.id}"] if follow else []), str(log)]

    @override
    def cancel(self, job: SubmittedJob) -> list[str]:
        if (state := self.state(job)) != "running":
            raise ClientFailed(f"job {job.id} does not run on this machine ({state})")
        return ["kill", "-USR1", job.id]  # mpirun passes it on to the ranks, which stop at a step boundary


def _why_unreachable(address: str, nodes: int) -> str:
    """Return why ranks on other machines cannot reach rank 0 at this address, or ""."""
    try:
        addresses = {info[4][0] for info in socket.getaddrinfo(address, None)}
    except OSError:
        return (
            f"machines.mpi.hosts: {address} does not resolve here; name the first machine by an address that the "
            "others reach, or give one in machines.mpi.address"
        )
    if nodes > 1 and all(ipaddress.ip_address(str(one).partition("%")[0]).is_loopback for one in addresses):
        return (
            f"machines.mpi.hosts: {address} means loopback here, where the other machines do not reach it; give an "
            "address that they reach in machines.mpi.address"
        )
    return ""
