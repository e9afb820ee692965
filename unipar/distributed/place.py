"""`Place`: rank, world size, local rank and rendezvous address of this process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

LARGE_WORLD = 64
"""Ranks of the largest world in which each rank looks at what every other one has written to the store."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Place of this process in its world, known before it has connected to the others."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    launcher: str
    """Name of the launcher; "unipar" if unipar started this process."""

    address: tuple[str, int] | None = None
    """Host and port of the rendezvous; None: the launcher gave none."""

    server: tuple[str, int] | None = None
    """Host and port of the launcher's own key-value server, at which rank 0 says where the others can meet it."""

    listener: int | None = None
    """File descriptor of rank 0's listening socket, opened by the parent so that no other process takes the port."""

    hosted: bool = False
    """Whether the launcher itself listens at `address`."""

    folder: Path | None = None
    """Run folder, through which processes without an address meet."""

    job: str | None = None
    """Identifier of the launcher's job, in the name of the file through which processes without an address meet."""

    between: int = 0
    """Number of processes between the launcher and this one that survive when the launcher is killed."""

    @property
    def several_machines(self) -> bool:
        """Whether some ranks are on other machines."""
        return self.local_size != self.size

    @property
    def meeting(self) -> Path | None:
        """File to which rank 0 writes its port, or None if there is an address or no run folder."""
        if self.folder is None or self.address or self.server:
            return None
        return self.folder / f".meet-{self.launcher}-{self.job}"

    @property
    def started_by_unipar(self) -> bool:
        return self.launcher == "unipar"
