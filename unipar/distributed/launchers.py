"""`Launcher`: description of a launcher's environment variables; detection of the launcher of this process."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from unipar.distributed.addresses import first_host, port_of_job
from unipar.distributed.place import Place
from unipar.errors import WorldMismatch


class LauncherVariables(TypedDict):
    """Names of the environment variables in which a launcher gives a process its ranks and sizes."""

    rank: str
    size: str
    local_rank: str
    local_size: str


TORCH_VARIABLES: LauncherVariables = {
    "rank": "RANK",
    "size": "WORLD_SIZE",
    "local_rank": "LOCAL_RANK",
    "local_size": "LOCAL_WORLD_SIZE",
}
"""Variables of torchrun, which other launchers set as well."""

LAUNCHER_ARGUMENTS = ("--local_rank", "--local-rank")
"""Arguments that launchers add to a script's own, and that unipar removes."""


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """Description of a launcher: how to recognise its workers and read their variables. Backends list theirs."""

    name: str
    order: int
    """Priority in detection: launchers inherit one another's variables, so the lowest number that fits wins."""

    marks: tuple[str, ...]
    """Variables that are all set under this launcher, and not all set under launchers with a higher `order`."""

    rank: str
    size: str
    local_rank: str
    local_size: str
    node: str | None = None
    """Variable with this machine's number, if `local_size` lists the counts of all machines, as Slurm's `2(x3),1`."""

    local: bool = True
    """Whether the two local variables are always set; if not, they may be missing if the address is on loopback."""

    address: tuple[str, str] | None = None
    """Variables with the host and port of the rendezvous; None: the processes meet through a file in the run folder."""

    passed_on: tuple[str, str] | None = None
    """Variables with host and port that a person may pass on, where the launcher itself gives none."""

    nodes: str | None = None
    """Variable that lists the machines, that of rank 0 first: with the job's id it makes host and port."""

    server: tuple[str, str] | None = None
    """Variables with host and port of the launcher's own key-value server, where rank 0 can say its address."""

    job: tuple[str, ...] = ()
    """Variables that together identify the job; needed for the rendezvous through a file."""

    serves: tuple[str, ...] | None = None
    """Names of the backends that the launcher can start; None: all."""

    least: int = 1
    """Smallest number of processes that counts as a world: a single Slurm task may be a shell that starts unipar."""

    between: int = 0
    """Number of processes between the launcher and a rank that survive when the launcher is killed."""

    refusal: str = ""
    """Reason why processes of this launcher cannot be joined to a world; empty: they can."""

    opens: str = ""
    """Sentence for `unipar doctor` about the ports that the launcher opens beyond loopback."""


def find_launcher(launchers: Iterable[Launcher], environ: Mapping[str, str] = os.environ) -> Launcher | None:
    """Return the launcher that started this process, or None if no launcher's variables are set."""
    return next((x for x in sorted(launchers, key=lambda x: x.order) if all(m in environ for m in x.marks)), None)


def place_from_environment(
    launchers: Iterable[Launcher], folder: Path | None = None, environ: Mapping[str, str] = os.environ
) -> Place | None:
    """Return this process's place in a world that another launcher started, or None if none did."""
    launcher = find_launcher(launchers, environ)
    if launcher is None:
        return None
    if launcher.refusal:
        raise WorldMismatch(f"{launcher.name}: {launcher.refusal}")
    variables = _LauncherEnvironment(launcher, environ)
    size = variables.number(launcher.size)
    if size < launcher.least:
        return None
    address = None
    if launcher.address is not None:
        host, port = launcher.address
        address = (variables.text(host, "rank 0's address"), variables.number(port))
    rank = variables.number(launcher.rank)
    local_rank, local_size = variables.local(rank, size, address)
    server = None
    if address is None and local_size != size:
        address, server = variables.meeting_point()
        if address is None and server is None:
            first, second = launcher.passed_on or ("MASTER_ADDR", "MASTER_PORT")
            raise WorldMismatch(
                f"{launcher.name} started {size} processes, {local_size} of them on this machine, and gives no address "
                f"where they can meet: pass one on ({launcher.name} -x {first}=HOST -x {second}=29500, HOST being rank "
                "0's machine), or let it start torchrun, once on each machine"
            )
    return Place(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        launcher=launcher.name,
        address=address,
        server=server,
        hosted=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        folder=None if address or server else folder,
        job=".".join(variables.text(variable, "the job's id") for variable in launcher.job) or None,
        between=launcher.between,
    )


@dataclass(frozen=True)
class _LauncherEnvironment:
    """Variables of a launcher; reading one that is missing or malformed raises WorldMismatch."""

    launcher: Launcher
    environ: Mapping[str, str]

    def number(self, variable: str) -> int:
        """Return the value of a variable as a number."""
        text = self.environ.get(variable, "")
        if not text.isdecimal():
            raise self._bad_variable(variable, "a number", repr(text) if text else "not set")
        return int(text)

    def text(self, variable: str, wanted: str) -> str:
        """Return the value of a variable; `wanted` describes the value if the variable is not set."""
        if not (text := self.environ.get(variable, "").strip()):
            raise self._bad_variable(variable, wanted, "not set")
        return text

    def local(self, rank: int, size: int, address: tuple[str, int] | None) -> tuple[int, int]:
        """Return the local rank of this process and the number of ranks on this machine."""
        names = self.launcher
        if not names.local and address is not None and _is_loopback_host(address[0]):
            return self._number_or(names.local_rank, rank), self._number_or(names.local_size, size)
        if names.node is None:
            return self.number(names.local_rank), self.number(names.local_size)
        counts = tasks_per_node(self.text(names.local_size, "the tasks of each machine"))
        node = self.number(names.node)
        if node >= len(counts):
            raise self._bad_variable(
                names.local_size, f"the tasks of at least {node + 1} machines", repr(self.environ[names.local_size])
            )
        return self.number(names.local_rank), counts[node]

    def meeting_point(self) -> tuple[tuple[str, int] | None, tuple[str, int] | None]:
        """Return where ranks on several machines meet if the launcher gives no address: there, or its server."""
        launcher, environ = self.launcher, self.environ
        if launcher.passed_on is not None and all(environ.get(name) for name in launcher.passed_on):
            host, port = launcher.passed_on
            return (self.text(host, "rank 0's address"), self.number(port)), None
        if launcher.nodes is not None:
            job = ".".join(self.text(variable, "the job's id") for variable in launcher.job)
            return (first_host(self.text(launcher.nodes, "the machines")), port_of_job(job)), None
        if launcher.server is not None:
            host, port = launcher.server
            return None, (self.text(host, "its server's address"), self.number(port))
        return None, None

    def _number_or(self, variable: str, default: int) -> int:
        return self.number(variable) if variable in self.environ else default

    def _bad_variable(self, variable: str, wanted: str, actual: str) -> WorldMismatch:
        return WorldMismatch(f"{self.launcher.name} should have set {variable} to {wanted}; it is {actual}")


def _is_loopback_host(host: str) -> bool:
    try:
        return ipaddress.ip_address(socket.gethostbyname(host)).is_loopback
    except OSError:
        return False


def tasks_per_node(text: str) -> list[int]:
    """Return the tasks of each machine from Slurm's notation: `2(x3),1` gives 2, 2, 2, 1. Malformed text gives []."""
    counts: list[int] = []
    for word in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", word.strip())
        if match is None:
            return []
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def without_launcher_arguments(argv: list[str]) -> list[str]:
    """Return `argv` without the arguments that launchers add: `--local_rank=0`, `--local-rank 0`."""
    kept: list[str] = []
    skip = False
    for word in argv:
        name, equals, _ = word.partition("=")
        if skip and word.isdecimal():
            skip = False
        elif name in LAUNCHER_ARGUMENTS:
            skip = not equals
        else:
            skip = False
            kept.append(word)
    return kept
