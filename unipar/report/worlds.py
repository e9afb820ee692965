"""What `scale` found: cells in worlds of several sizes, how much faster each is, and how near to the ideal."""

from __future__ import annotations

import textwrap
from dataclasses import asdict, dataclass, field, fields, replace
from statistics import median
from typing import Any, Literal

from typing_extensions import override

from unipar.config import Precision
from unipar.report.comparison import Agreement, Row, agreement, spread, tolerance
from unipar.report.memory import largest
from unipar.report.table import blocks, counted, size

Kind = Literal["strong", "weak"]
KINDS: tuple[Kind, ...] = ("strong", "weak")
"""strong: the total batch is the same in every world; weak: each rank's share of it is."""

LAST = ("allocated", "RSS")
"""The table's last column, which goes where there is no room."""


@dataclass(frozen=True, kw_only=True)
class World:
    """One cell on so many ranks."""

    cell: str
    ranks: int
    kinds: tuple[Kind, ...]
    """The smallest world is both."""

    samples: int
    """In one optimizer step, over all ranks."""

    micro: int
    accumulate: int

    @property
    def name(self) -> str:
        return f"{self.cell} x{self.ranks}" + (f" {self.kinds[0]}" if len(self.kinds) == 1 else "")


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """All worlds; of each cell the smallest comes first, and is what its others are held to."""

    name: str
    out: str
    precision: Precision
    worlds: tuple[World, ...]
    rows: list[Row]
    """What came of each world, in the same order, by its name."""

    cores: int
    """That these processes may use."""

    threads: str
    """Of each rank."""

    device: str
    warmup: int
    """Steps before the timed ones."""

    held: bool = True
    """Whether worlds with the same total batch must have the same losses: not where ranks step by themselves."""

    unwatched: str = ""
    """Why no memory is shown."""

    note: str = ""
    interrupted: bool = False
    versions: dict[str, str] = field(default_factory=dict[str, str])
    machine: dict[str, Any] = field(default_factory=dict[str, Any])

    def row(self, world: World) -> Row:
        return next(row for row in self.rows if row.cell == world.name)

    def of(self, cell: str, kind: Kind) -> list[World]:
        """The worlds of one cell that were timed, the smallest first."""
        return [w for w in self.worlds if w.cell == cell and kind in w.kinds and self.rate(w) is not None]

    @property
    def cells(self) -> list[str]:
        return list(dict.fromkeys(world.cell for world in self.worlds))

    def base(self, world: World) -> World:
        return next(w for w in self.worlds if w.cell == world.cell)

    def rate(self, world: World) -> float | None:
        """Samples in a second, by the median step."""
        row = self.row(world)
        return world.samples / median(row.timed) if row.timed and row.outcome in ("ran", "waits") else None

    def faster(self, world: World) -> float | None:
        """How many times the samples of the smallest world in the same time."""
        rate, base = self.rate(world), self.rate(self.base(world))
        return None if rate is None or base is None else rate / base

    def efficiency(self, world: World) -> float | None:
        """Of the ideal, in which twice the ranks do twice as much."""
        faster = self.faster(world)
        return None if faster is None else faster * self.base(world).ranks / world.ranks

    def memory(self, world: World) -> int | None:
        """What the largest rank allocated at its peak."""
        row = self.row(world)
        return largest(row.memory) if row.memory and row.outcome in ("ran", "waits") else None

    def agreement(self, world: World) -> Agreement | None:
        """Of its losses with the smallest world's, which trains on the same batches; None where nothing is to hold."""
        row, base = self.row(world), self.row(self.base(world))
        if not self.held or world.kinds != ("strong",) or row.outcome != "ran" or base.outcome != "ran":
            return None
        return agreement(row.losses, base.losses, tolerance(self.precision))

    @property
    def agreements(self) -> list[tuple[World, Agreement]]:
        return [(world, found) for world in self.worlds if (found := self.agreement(world)) is not None]

    @property
    def code(self) -> int:
        """What the command line exits with."""
        if self.interrupted:
            return 130
        outcomes = [row.outcome for row in self.rows]
        wrong = any(not found.within for _, found in self.agreements)
        return 1 if "failed" in outcomes or "ran" not in outcomes or wrong else 0

    @override
    def __str__(self) -> str:
        return self.table()

    def table(self, width: int = 80) -> str:
        made = self.blocks(width)
        rows = ["\n".join(lines) for lines in made]
        remarks = [r for r in self.remarks() if (head := r.partition(":")[0]) not in LAST or head in made[0][0]]
        said = [line for text in remarks for line in textwrap.wrap(text, width, subsequent_indent="  ")]
        return "\n".join([*rows, "", *said])

    def blocks(self, width: int) -> list[list[str]]:
        """The lines of the header, then of each world; where they would be too wide, without the middle half."""
        last = LAST[0] if any(row.memory for row in self.rows) else LAST[1]
        header = ("cell", "ranks", "scaling", "step ms", "samples/s", "speed-up", "efficiency", last)
        for narrow in (False, True):
            rows = [self._shown(world, narrow=narrow) for world in self.worlds]
            made = blocks(header, rows, right=(1, 3, 4, 5, 6, 7), width=width)
            if max(len(line) for block in made for line in block) <= width:
                return made
        less = [header[:-1], *(row[:-1] if len(row) == len(header) else row for row in rows)]
        return blocks(less[0], less[1:], right=(1, 3, 4, 5, 6), width=width)

    def _shown(self, world: World, *, narrow: bool) -> tuple[str, ...]:
        row, rate = self.row(world), self.rate(world)
        at = world.cell, str(world.ranks), " ".join(world.kinds) if len(world.kinds) == 1 else "both"
        if rate is None:
            head = "" if row.outcome in ("waits", "absent") else f"{row.outcome}: "
            return *at, head + (row.note or "waits")
        step, (faster, efficient) = spread(row.timed), (self.faster(world), self.efficiency(world))
        allocated = self.memory(world) or max(row.peak_rss, default=None)
        return (
            *at,
            step.partition(" ")[0] if narrow else step,
            f"{rate:.{1 if rate < 100 else 0}f}",
            "-" if faster is None else f"{faster:.2f}",
            "-" if efficient is None else percent(efficient),
            "-" if allocated is None else size(allocated),
        )

    def remarks(self) -> list[str]:
        """What the table means, and what is wrong."""
        first = self.worlds[0]
        share = first.micro * first.accumulate
        lines = [
            *self.verdict(),
            f"strong: {counted(first.samples, 'sample')} a step in every world; weak: {share} for each rank",
            "speed-up: samples/s in proportion to the smallest world's; efficiency: that in proportion to the ranks",
            self.shared(),
        ]
        ran = next((row for row in self.rows if row.outcome == "ran"), None)
        if ran is not None:
            turns = f"{counted(len(ran.timed), 'step')} in {counted(len(ran.seconds), 'turn')}"
            lines.append(f"step ms: the median [and middle half] of {turns}, of the slowest rank")
        if any(row.memory for row in self.rows):
            lines.append("allocated: the peak of the largest rank beyond its base, every block counted")
        elif ran is not None:
            lines.append("RSS: peak of the largest rank; no ranking: the allocator keeps what is freed")
        if self.unwatched:
            lines.append(self.unwatched)
        return [*lines, *([self.note] if self.note else [])]

    def shared(self) -> str:
        """What ranks on one machine have in common: efficiency is no statement on a cell without it."""
        what = f"one machine: {counted(self.cores, 'core')}, {self.threads} thread{'s' * (self.threads != '1')} a rank"
        if ":" in self.device:
            return f"{what}; all ranks share {self.device}: no efficiency here is that of a GPU a rank"
        if self.device != "cpu":
            return f"{what}, a GPU each"
        free = self.cores // int(self.threads) if self.threads.isdecimal() and int(self.threads) else 0
        if free and all(world.ranks <= free for world in self.worlds):
            return f"{what}; ranks share its memory and caches, and no core"
        return f"{what}; in worlds of more than {counted(free, 'rank')} they share cores, which no cell can make good"

    def verdict(self) -> list[str]:
        """Whether worlds with the same total batch trained alike."""
        if self.interrupted:
            return ["interrupted: worlds without figures did not come to their end"]
        found = self.agreements
        wrong = [
            f"DISAGREES: {world.name} with {self.base(world).name} by {a.off:.1e} at step {a.step}; "
            f"allowed in {self.precision}: {tolerance(self.precision):g}"
            for world, a in found
            if not a.within
        ]
        if wrong or not found:
            return wrong
        least = min((a.digits for _, a in found if a.digits is not None), default=None)
        how = "bit for bit" if least is None else f"to {least} digits or more"
        return [f"the losses of strong scaling agree with the smallest world's {how}"]

    def to_json(self) -> dict[str, Any]:
        """Every figure."""
        made = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("worlds", "rows")}
        return {**made, "worlds": [self._world_json(world) for world in self.worlds]}

    def _world_json(self, world: World) -> dict[str, Any]:
        row, found = self.row(world), self.agreement(world)
        return {
            **asdict(replace(row, memory=[])),
            **asdict(world),
            "memory": [account.model_dump(mode="json") for account in row.memory],
            "samples_per_second": self.rate(world),
            "speed_up": self.faster(world),
            "efficiency": self.efficiency(world),
            "agreement": None if found is None else {"says": str(found), **asdict(found)},
        }


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"
