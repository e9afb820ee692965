"""One rank's memory, named: by phase and category, beside what was measured without any names."""

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
"""Of a storage with several names, the category that comes first holds."""

PhaseName = Literal["built", "forward", "backward", "update", "steady"]
MEMORY_PHASES: Final[tuple[PhaseName, ...]] = get_args(PhaseName)
"""built: from the start until the first step; steady: between two steps."""


RecordingPass = Literal["plain", "placed", "saved", "sent"]
"""How a watched step is watched: as it is; with each operation's place; with what autograd saves; with what is sent."""

PASSES_BY_IMPORTANCE: Final[tuple[RecordingPass, ...]] = ("placed", "saved", "plain", "sent", "plain")
"""What matters most comes first, for those who have few steps."""

PASSES_IN_ORDER: Final[tuple[RecordingPass, ...]] = get_args(RecordingPass)
"""In which they are done: what is resident is read while steps are plain."""


class NamedBlock(Section):
    """A piece of memory with a name, or what is known of one that has none."""

    category: Category
    name: str
    size: int


class PhasePeak(Section):
    """The fullest moment of one phase."""

    name: PhaseName
    peak: int
    """Bytes beyond the base, measured without regard to names."""

    held: dict[Category, int]
    """Bytes by category at that moment; their sum is the peak."""

    largest: tuple[NamedBlock, ...] = ()
    """The largest blocks of that moment."""

    reserved: int | None = None
    """On CUDA the most in this phase, from 0 and not from the base: bytes that the allocator has of the device."""

    active: int | None = None
    """So, in blocks that are allocated or that another stream has yet to be done with."""

    requested: int | None = None
    """So, as it was asked for."""

    @property
    def unattributed(self) -> float:
        """The share that nobody could name."""
        return self.held.get("unattributed", 0) / self.peak if self.peak else 0.0


class ResidentMemory(Section):
    """What the system counts for a process, in bytes; pages of files left out."""

    base: int
    peak: int
    own: int
    """Pages that no other process shares, between two steps."""


class DeviceMemory(Section):
    """A GPU, and what it has of one process when all watched steps are done, in bytes."""

    name: str
    reserved: int
    """By torch's allocator."""

    used: int | None = None
    """By the process, as the driver counts (NVML): with CUDA's context, NCCL's buffers and what else has its own."""

    @property
    def beside(self) -> int | None:
        """CUDA's context, NCCL and whoever else does not ask torch."""
        return None if self.used is None else self.used - self.reserved


class MemoryAccount(Section):
    """What one rank allocated, from its base mark on."""

    rank: int
    method: str
    """How allocations were seen, in words."""

    device: str
    """Whose memory: cpu or cuda."""

    base: int
    """Bytes allocated at the base mark: after imports, with the group met and a toy step done."""

    phases: tuple[PhasePeak, ...]
    peaks: tuple[int, ...]
    """Of each step that was measured, beyond the base."""

    curve: tuple[tuple[float, int], ...] = ()
    """(part of a step's time from 0 to 1, bytes beyond the base): phases as long as in a plain step."""

    marks: tuple[tuple[float, str], ...] = ()
    """(part of that step, phase that begins there)."""

    resident: ResidentMemory | None = None
    sent: dict[str, int] = Field(default_factory=dict)
    """Payload bytes of one step by collective: of each call the whole tensor that it is about."""

    sent_by: str = ""
    """How that was seen, in words; empty where it was not."""

    saved: tuple[int, int] | None = None
    """Bytes of activations at the end of a forward: by lifetime, and as autograd saved them, in a pass apart."""

    notes: tuple[str, ...] = ()
    on: DeviceMemory | None = None
    """On CUDA: the device."""

    pinned: tuple[PhasePeak, ...] = ()
    """Beside CUDA's: the host's pages that CUDA pins, which malloc does not give; from 0, and not from the base."""

    host: MemoryAccount | None = None
    """Beside CUDA's: the same of the host's memory."""

    @property
    def reserved(self) -> int | None:
        """The most that CUDA's allocator had of the device."""
        return max((phase.reserved for phase in self.phases if phase.reserved is not None), default=None)

    def gaps(self, phase: PhasePeak) -> int | None:
        """What the allocator had of the device and nobody had of it: fragmentation."""
        return None if phase.reserved is None else phase.reserved - self.base - phase.peak

    @property
    def peak(self) -> PhasePeak:
        """The fullest phase of all."""
        return max(self.phases, key=lambda phase: phase.peak)

    def residing(self, resident: ResidentMemory | None) -> MemoryAccount:
        """With what the system counts, which is of the host's memory."""
        if self.device == "cpu":
            return self.model_copy(update={"resident": resident})
        host = self.host and self.host.residing(resident)
        return self.model_copy(update={"host": host})

    def write(self, run: Path) -> None:
        account_path(run, self.rank).write_text(self.model_dump_json(), encoding="utf-8")


_ACCOUNT_FILE: Final = r"rank-(\d+)\.memory\.json"


def read_account(run: Path, rank: int) -> MemoryAccount:
    """What a rank wrote down; an error where it wrote nothing, or not all of it."""
    file = account_path(run, rank)
    try:
        account = MemoryAccount.model_validate_json(file.read_bytes())
    except FileNotFoundError:
        raise ReportError(f"rank {rank} wrote down nothing of its memory: there is no {file}") from None
    except OSError as e:
        raise ReportError(f"{file} cannot be read: {e.strerror}") from None
    except ValidationError as e:
        first = e.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the whole file"
        raise ReportError(f"{file} is not the account of a rank's memory ({where}: {first['msg']})") from None
    if account.rank != rank:
        raise ReportError(f"{file} tells of rank {account.rank}")
    return account


def read_accounts(run: Path, problems: list[str]) -> Iterator[MemoryAccount]:
    """Of all ranks that wrote any, the lowest first; one that cannot be read leaves the others."""
    found = sorted(int(m[1]) for file in run.glob("*.memory.json") if (m := re.fullmatch(_ACCOUNT_FILE, file.name)))
    for rank in found:
        try:
            yield read_account(run, rank)
        except ReportError as e:
            problems.append(f"{e}: it is left out")


def account_path(run: Path, rank: int) -> Path:
    return run / f"rank-{rank}.memory.json"
