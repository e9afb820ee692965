"""Memory account of one rank: measured peaks of each phase, and their bytes by category."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal, get_args

from pydantic import Field, ValidationError

from unipar.backend import Category
from unipar.config import Section
from unipar.errors import ReportError

CATEGORIES: Final[tuple[Category, ...]] = get_args(Category)
CATEGORY_PRECEDENCE: Final = {category: i for i, category in enumerate(CATEGORIES)}
"""Rank of each category: a storage with several names gets the category with the lowest rank."""

PhaseName = Literal["built", "forward", "backward", "update", "steady"]
MEMORY_PHASES: Final[tuple[PhaseName, ...]] = get_args(PhaseName)
"""Phases of an account. built: from the start until the first step; steady: between two steps."""


RecordingPass = Literal["plain", "placed", "saved", "sent"]
"""Extra recording in one recorded step: none; call site of each operation; tensors saved by autograd; bytes sent."""

PASSES_BY_IMPORTANCE: Final[tuple[RecordingPass, ...]] = ("placed", "saved", "plain", "sent", "plain")
"""Passes to choose from, the most important first: a short run has too few steps for all."""

PASSES_IN_ORDER: Final[tuple[RecordingPass, ...]] = get_args(RecordingPass)
"""Passes in the order in which they run: plain ones first, because resident memory is read during them."""


ALL_RANKS: Final = "all ranks"
UNKNOWN_AXIS: Final = "unknown"
SENT_AXES: Final = ("data", "data x context", "tensor", "pipeline", "context", "expert", ALL_RANKS, UNKNOWN_AXIS)
"""Axes along which a step sends, in the order of columns; a group along several is named by all: `data x context`."""


class NamedBlock(Section):
    """Block of memory: its category, its size, and its name or the place that allocated it."""

    category: Category
    name: str
    size: int


class PhasePeak(Section):
    """Memory at the peak of one phase."""

    name: PhaseName
    peak: int
    """Bytes beyond the base, as measured, not as a sum of named blocks."""

    held: dict[Category, int]
    """Bytes by category at the peak; their sum is the peak."""

    largest: tuple[NamedBlock, ...] = ()
    """The largest blocks at the peak."""

    tensors: dict[Category, int] = Field(default_factory=dict)
    """Bytes of tensors by category when their sum is highest: a workspace of MKL may put the peak at another moment."""

    reserved: int | None = None
    """CUDA only: highest number of bytes that torch reserved in this phase, counted from 0 and not from the base."""

    active: int | None = None
    """CUDA only: highest number of bytes in blocks that are allocated or still in use by another stream."""

    requested: int | None = None
    """CUDA only: highest number of bytes as requested, without rounding."""

    @property
    def unattributed(self) -> float:
        """Share of the peak that has no known category, from 0 to 1."""
        return self.held.get("unattributed", 0) / self.peak if self.peak else 0.0


class ResidentMemory(Section):
    """Resident memory of a process in bytes, as the system counts it, without pages of files.

    Pages that a fork shares with its fork server are left out: the libraries that it has imported, mostly.
    """

    base: int
    peak: int
    own: int
    """Private pages, which no other process shares, between two steps."""


class DeviceMemory(Section):
    """A GPU and the bytes that one process uses on it, after all recorded steps."""

    name: str
    reserved: int
    """Bytes reserved by torch's allocator."""

    used: int | None = None
    """Bytes of the whole process, as the driver counts them (NVML): CUDA's context and NCCL's buffers included."""

    @property
    def outside_allocator(self) -> int | None:
        """Bytes used outside torch's allocator: CUDA's context, NCCL, other libraries."""
        return None if self.used is None else self.used - self.reserved


class MemoryAccount(Section):
    """Memory that one rank allocated after its base mark."""

    rank: int
    method: str
    """Description of how allocations were recorded."""

    device: str
    """Device of the memory: cpu or cuda."""

    base: int
    """Bytes allocated at the base mark: after imports, after the process group was set up and a toy step ran."""

    phases: tuple[PhasePeak, ...]
    peaks: tuple[int, ...]
    """Peak of each measured step, in bytes beyond the base."""

    curve: tuple[tuple[float, int], ...] = ()
    """Points of a step: (time from 0 to 1, bytes beyond the base); phases take as long as in a plain step."""

    marks: tuple[tuple[float, str], ...] = ()
    """Starts of phases in that step: (time from 0 to 1, phase)."""

    resident: ResidentMemory | None = None
    sent: dict[str, int] = Field(default_factory=dict)
    """Bytes sent in one step by collective; each call counts with its whole tensor."""

    sent_along: dict[str, dict[str, int]] = Field(default_factory=dict)
    """The same bytes by axis of the mesh (`SENT_AXES`), then collective; empty in files of earlier versions."""

    sent_across: int = 0
    """Those of them that calls send in groups whose ranks are on several machines."""

    sent_by: str = ""
    """Description of how `sent` was recorded; empty if it was not."""

    saved: tuple[int, int] | None = None
    """Bytes of activations at the end of a forward: by lifetime, and as saved by autograd (from a pass of its own)."""

    notes: tuple[str, ...] = ()
    on: DeviceMemory | None = None
    """The GPU, if `device` is cuda."""

    pinned: tuple[PhasePeak, ...] = ()
    """Pinned host memory, if `device` is cuda: CUDA's pages, not malloc's; counted from 0 and not from the base."""

    host: MemoryAccount | None = None
    """Account of the host's memory, if `device` is cuda."""

    @property
    def reserved(self) -> int | None:
        """Highest number of bytes that torch's CUDA allocator reserved, over all phases."""
        return max((phase.reserved for phase in self.phases if phase.reserved is not None), default=None)

    def gaps(self, phase: PhasePeak) -> int | None:
        """Return the bytes that the allocator reserved and that were not allocated (fragmentation); None on the CPU."""
        return None if phase.reserved is None else phase.reserved - self.base - phase.peak

    @property
    def peak(self) -> PhasePeak:
        """Phase with the highest peak."""
        return max(self.phases, key=lambda phase: phase.peak)

    def residing(self, resident: ResidentMemory | None) -> MemoryAccount:
        """Return a copy with `resident` in the account of the host's memory."""
        if self.device == "cpu":
            return self.model_copy(update={"resident": resident})
        host = self.host and self.host.residing(resident)
        return self.model_copy(update={"host": host})

    def write(self, run: Path) -> None:
        """Write the account into the run folder."""
        account_path(run, self.rank).write_text(self.model_dump_json(), encoding="utf-8")


_ACCOUNT_FILE: Final = r"rank-(\d+)\.memory\.json"


def read_account(run: Path, rank: int) -> MemoryAccount:
    """Return the account that a rank wrote; raise ReportError if there is none or it is not complete."""
    file = account_path(run, rank)
    try:
        account = MemoryAccount.model_validate_json(file.read_bytes())
    except FileNotFoundError:
        raise ReportError(
            f"rank {rank} wrote no account of its memory ({file} is missing); run it again with log.memory: true"
        ) from None
    except OSError as e:
        raise ReportError(f"{file} cannot be read: {e.strerror}") from None
    except ValidationError as e:
        first = e.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the whole file"
        raise ReportError(f"{file} is not the account of a rank's memory ({where}: {first['msg']})") from None
    if account.rank != rank:
        raise ReportError(f"{file} is the account of rank {account.rank}, not of rank {rank}")
    return account


def read_accounts(run: Path, problems: list[str]) -> Iterator[MemoryAccount]:
    """Yield the accounts in a run folder, lowest rank first; add a sentence to `problems` for each unreadable one."""
    ranks = sorted(int(m[1]) for file in run.glob("*.memory.json") if (m := re.fullmatch(_ACCOUNT_FILE, file.name)))
    for rank in ranks:
        try:
            yield read_account(run, rank)
        except ReportError as e:
            problems.append(f"{e}: it is left out")


def account_path(run: Path, rank: int) -> Path:
    """Return the path of a rank's memory account in a run folder."""
    return run / f"rank-{rank}.memory.json"
