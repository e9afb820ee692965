"""`Place`: rank, size, local rank, address of this process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


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
    between: int = 0
    """As the launcher's."""

    @property
    def meeting(self) -> Path | None:
        """Where rank 0 says its port, in a world that was given no address."""
        return self.folder / f".meet-{self.launcher}-{self.job}" if self.folder and self.address is None else None

    @property
    def started_by_unipar(self) -> bool:
        return self.launcher == "unipar"
