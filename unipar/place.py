"""Who this process is, and which launcher started it. Needs no torch."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from unipar.errors import WorldMismatch


class Variables(TypedDict):
    """Where a launcher says who a process is."""

    rank: str
    size: str
    local_rank: str
    local_size: str


TORCH_VARIABLES: Variables = {
    "rank": "RANK",
    "size": "WORLD_SIZE",
    "local_rank": "LOCAL_RANK",
    "local_size": "LOCAL_WORLD_SIZE",
}
"""The names that PyTorch's launcher uses, and others after it."""

SWALLOWED = ("--local_rank", "--local-rank")
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
    address: tuple[str, str] | None = None
    """Variables with the host and port where the processes meet; None: they meet by a file of the run."""

    job: str | None = None
    """A variable with an id that is one job's own; needed to meet by a file."""

    serves: tuple[str, ...] | None = None
    """The backends it starts; None: all."""

    refusal: str = ""
    """Why its worlds cannot be joined; empty: they can."""

    opens: str = ""
    """What it opens beyond loopback, a sentence for `doctor`."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where this process stands in its world, before it has met the others."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    launcher: str
    """A launcher's name, or "unipar"."""

    address: tuple[str, int] | None = None
    listener: int | None = None
    """Rank 0's listening socket, made by the parent: the port cannot be stolen."""

    hosted: bool = False
    """The launcher itself listens at `address`."""

    folder: Path | None = None
    """The run folder: where processes meet that were given no address."""

    job: str | None = None

    @property
    def ours(self) -> bool:
        return self.launcher == "unipar"


def started_by(launchers: Iterable[Launcher], environ: Mapping[str, str] = os.environ) -> Launcher | None:
    """The launcher whose marks this process carries; None when nobody started a world."""
    return next((x for x in sorted(launchers, key=lambda x: x.order) if all(m in environ for m in x.marks)), None)


def probe(
    launchers: Iterable[Launcher], folder: Path | None = None, environ: Mapping[str, str] = os.environ
) -> Place | None:
    """This process's place in a world that another launcher started; None when nobody did."""
    found = started_by(launchers, environ)
    if found is None:
        return None
    if found.refusal:
        raise WorldMismatch(f"{found.name}: {found.refusal}")

    def number(variable: str) -> int:
        text = environ.get(variable, "")
        if not text.isdecimal():
            raise WorldMismatch(f"{found.name} should have set {variable} to a number; it is {text or 'not set'!r}")
        return int(text)

    def host(variable: str) -> str:
        if not (text := environ.get(variable, "").strip()):
            raise WorldMismatch(f"{found.name} should have set {variable} to rank 0's address; it is 'not set'")
        return text

    address = (host(found.address[0]), number(found.address[1])) if found.address is not None else None
    return Place(
        rank=number(found.rank),
        size=number(found.size),
        local_rank=number(found.local_rank),
        local_size=number(found.local_size),
        launcher=found.name,
        address=address,
        hosted=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        folder=folder,
        job=environ.get(found.job) if found.job else None,
    )


def without_launcher_arguments(argv: list[str]) -> list[str]:
    """`argv` less what launchers add: `--local_rank=0`, `--local-rank 0`."""
    kept: list[str] = []
    skip = False
    for word in argv:
        name, equals, _ = word.partition("=")
        if skip and word.isdecimal():
            skip = False
        elif name in SWALLOWED:
            skip = not equals
        else:
            skip = False
            kept.append(word)
    return kept
