"""One rank's memory, named: by phase and category, beside what was measured without any names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, Self, get_args

from unipar.backend import Category

CATEGORIES: Final[tuple[Category, ...]] = get_args(Category)

PhaseName = Literal["built", "forward", "backward", "update", "steady"]
PHASES: Final[tuple[PhaseName, ...]] = get_args(PhaseName)
"""built: from the start until the first step; steady: between two steps."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """A piece of memory with a name, or what is known of one that has none."""

    category: Category
    name: str
    size: int


@dataclass(frozen=True, kw_only=True)
class Phase:
    """The fullest moment of one phase."""

    name: PhaseName
    peak: int
    """Bytes beyond the base, measured without regard to names."""

    held: Mapping[Category, int]
    """Bytes by category at that moment; their sum is the peak."""

    largest: tuple[Block, ...] = ()
    """The largest blocks of that moment."""

    @property
    def unattributed(self) -> float:
        """The share that nobody could name."""
        return self.held.get("unattributed", 0) / self.peak if self.peak else 0.0


@dataclass(frozen=True, kw_only=True)
class Resident:
    """What the system counts for a process, in bytes; pages of files left out."""

    base: int
    peak: int
    own: int
    """Pages that no other process shares, between two steps."""


@dataclass(frozen=True, kw_only=True)
class Account:
    """What one rank allocated, from its base mark on."""

    rank: int
    method: str
    """How allocations were seen, in words."""

    device: str
    """Whose memory: cpu or cuda."""

    base: int
    """Bytes allocated at the base mark: after imports, with the group met and a toy step done."""

    phases: tuple[Phase, ...]
    peaks: tuple[int, ...]
    """Of each step that was measured, beyond the base."""

    curve: tuple[tuple[float, int], ...] = ()
    """(part of a step from 0 to 1, bytes beyond the base), by allocations."""

    marks: tuple[tuple[float, str], ...] = ()
    """(part of that step, phase that begins there)."""

    resident: Resident | None = None
    sent: Mapping[str, int] = field(default_factory=dict[str, int])
    """Payload bytes of one step by collective."""

    saved: tuple[int, int] | None = None
    """Bytes of activations at the end of a forward: by lifetime, and as autograd saved them, in a pass apart."""

    notes: tuple[str, ...] = ()

    @property
    def peak(self) -> Phase:
        """The fullest phase of all."""
        return max(self.phases, key=lambda phase: phase.peak)

    def phase(self, name: PhaseName) -> Phase | None:
        return next((phase for phase in self.phases if phase.name == name), None)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        phases = tuple(
            Phase(**{**phase, "largest": tuple(Block(**block) for block in phase["largest"])})
            for phase in data["phases"]
        )
        pairs = {name: tuple((a, b) for a, b in data[name]) for name in ("curve", "marks")}
        rest: dict[str, Any] = {
            "peaks": tuple(data["peaks"]),
            "resident": Resident(**data["resident"]) if data["resident"] else None,
            "saved": (data["saved"][0], data["saved"][1]) if data["saved"] else None,
            "notes": tuple(data["notes"]),
        }
        return cls(**{**data, **pairs, **rest, "phases": phases})

    def write(self, run: Path) -> None:
        account_of(run, self.rank).write_text(json.dumps(self.to_json()), encoding="utf-8")


def account_of(run: Path, rank: int) -> Path:
    return run / f"rank-{rank}.memory.json"
