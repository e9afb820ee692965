"""`Place`: rank, world size, local rank and rendezvous address of this process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


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
    def meeting(self) -> Path | None:
        """File to which rank 0 writes its port, or None if there is an address or no run folder."""
        return self.folder / f".meet-{self.launcher}-{self.job}" if self.folder and self.address is None else None

    @property
    def started_by_unipar(self) -> bool:
        return self.launcher == "unipar"
