"""`Launcher`: how a launcher's variables are read, as data; detection."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from unipar.distributed.place import Place
from unipar.errors import WorldMismatch


class LauncherVariables(TypedDict):
    """Where a launcher says who a process is."""

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
"""The names that PyTorch's launcher uses, and others after it."""


LAUNCHER_ARGUMENTS = ("--local_rank", "--local-rank")
"""Arguments that launchers add to a worker's own; ours to take away."""


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """How a launcher's workers are told from others, as data; a backend's Capabilities hold its own."""

    name: str
    order: int
    """Launchers inherit one another's variables: the lowest number that fits wins."""

    marks: tuple[str, ...]
    """Variables that are all there under this launcher, and not under those after it."""

    rank: str
    size: str
    local_rank: str
    local_size: str
    node: str | None = None
    """A variable with this machine's number, where `local_size` counts for all of them as Slurm does: `2(x3),1`."""

    local: bool = True
    """The two local variables are set. False: they may be missing where all meet on a loopback address."""

    address: tuple[str, str] | None = None
    """Variables with the host and port where the processes meet; None: they meet by a file of the run."""

    job: tuple[str, ...] = ()
    """Variables that together are one job's own; needed to meet by a file."""

    serves: tuple[str, ...] | None = None
    """The backends it starts; None: all."""

    least: int = 1
    """The smallest world that is one: where a single task is somebody's shell, ours is started in it."""

    between: int = 0
    """Processes of the launcher's own between it and a rank, which live on when it is killed."""

    refusal: str = ""
    """Why its worlds cannot be joined; empty: they can."""

    opens: str = ""
    """What it opens beyond loopback, a sentence for `doctor`."""


def find_launcher(launchers: Iterable[Launcher], environ: Mapping[str, str] = os.environ) -> Launcher | None:
    """The launcher whose marks this process carries; None when nobody started a world."""
    return next((x for x in sorted(launchers, key=lambda x: x.order) if all(m in environ for m in x.marks)), None)


def place_from_environment(
    launchers: Iterable[Launcher], folder: Path | None = None, environ: Mapping[str, str] = os.environ
) -> Place | None:
    """This process's place in a world that another launcher started; None when nobody did."""
    found = find_launcher(launchers, environ)
    if found is None:
        return None
    if found.refusal:
        raise WorldMismatch(f"{found.name}: {found.refusal}")
    said = _LauncherEnvironment(found, environ)
    size = said.number(found.size)
    if size < found.least:
        return None
    address = (
        (said.text(found.address[0], "rank 0's address"), said.number(found.address[1])) if found.address else None
    )
    rank = said.number(found.rank)
    local_rank, local_size = said.local(rank, size, address)
    if address is None and local_size != size:
        raise WorldMismatch(
            f"{found.name} started {size} processes, {local_size} of them on this machine, and says no address where "
            "they could meet; over several machines let it start torchrun, once on each"
        )
    return Place(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        launcher=found.name,
        address=address,
        hosted=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        folder=None if address else folder,
        job=".".join(said.text(variable, "the job's id") for variable in found.job) or None,
        between=found.between,
    )


@dataclass(frozen=True)
class _LauncherEnvironment:
    """What a launcher said, read with suspicion."""

    launcher: Launcher
    environ: Mapping[str, str]

    def number(self, variable: str) -> int:
        text = self.environ.get(variable, "")
        if not text.isdecimal():
            raise self._should(variable, "a number", repr(text) if text else "not set")
        return int(text)

    def text(self, variable: str, what: str) -> str:
        if not (text := self.environ.get(variable, "").strip()):
            raise self._should(variable, what, "not set")
        return text

    def local(self, rank: int, size: int, address: tuple[str, int] | None) -> tuple[int, int]:
        """This rank's number and its world's size on this machine."""
        says = self.launcher
        if not says.local and address is not None and _is_loopback_host(address[0]):
            return self._or(says.local_rank, rank), self._or(says.local_size, size)
        if says.node is None:
            return self.number(says.local_rank), self.number(says.local_size)
        counts = tasks_per_node(self.text(says.local_size, "the tasks of each machine"))
        node = self.number(says.node)
        if node >= len(counts):
            raise self._should(
                says.local_size, f"the tasks of at least {node + 1} machines", repr(self.environ[says.local_size])
            )
        return self.number(says.local_rank), counts[node]

    def _or(self, variable: str, otherwise: int) -> int:
        return self.number(variable) if variable in self.environ else otherwise

    def _should(self, variable: str, what: str, found: str) -> WorldMismatch:
        return WorldMismatch(f"{self.launcher.name} should have set {variable} to {what}; it is {found}")


def _is_loopback_host(host: str) -> bool:
    try:
        return ipaddress.ip_address(socket.gethostbyname(host)).is_loopback
    except OSError:
        return False


def tasks_per_node(text: str) -> list[int]:
    """Slurm's `2(x3),1` is 2, 2, 2, 1; what is not of that kind counts for no machine."""
    counts: list[int] = []
    for word in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", word.strip())
        if found is None:
            return []
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def without_launcher_arguments(argv: list[str]) -> list[str]:
    """`argv` less what launchers add: `--local_rank=0`, `--local-rank 0`."""
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
