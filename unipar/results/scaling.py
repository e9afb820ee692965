"""What `scale` found: cells in worlds of several sizes, how much faster each is, and how near to the ideal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal, Self

from pydantic import TypeAdapter, ValidationError
from typing_extensions import override

from unipar.errors import ReportError
from unipar.memory.account import Account
from unipar.memory.cuda_total import there
from unipar.results.agreement import Agreement, agreement, tolerance
from unipar.results.comparison import Found
from unipar.results.memory_tables import RSS, fullest, here, largest, remarks
from unipar.results.row import HEADS, Row, row_json, row_of, spread
from unipar.results.same_training import unlike
from unipar.utils.table import Remark, blocks, table_remarks
from unipar.utils.text import count_of, format_size

Kind = Literal["strong", "weak"]
KINDS: tuple[Kind, ...] = ("strong", "weak")

NONE = "-"

_APART = ("worlds", "rows", "unkept")
"""What its file holds in another form, or not at all."""
"""strong: the total batch is the same in every world; weak: each rank's share of it is."""


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

    @property
    def shown(self) -> tuple[str, str, str]:
        """How a table's row begins."""
        return self.cell, str(self.ranks), " ".join(self.kinds) if len(self.kinds) == 1 else "both"


@dataclass(frozen=True, kw_only=True)
class Scaling(Found):
    """All worlds; of each cell the smallest comes first, and is what its others are held to."""

    worlds: tuple[World, ...]
    """Each has its row, in the same order, by its name."""

    cores: int
    """That these processes may use."""

    threads: str
    """Of each rank."""

    device: str
    verb: str = "scale"
    """The command that made it. compare: a comparison for each size of world, one after another."""

    held: bool = True
    """Whether worlds with the same total batch must have the same losses: not where ranks step by themselves."""

    wrong: tuple[str, ...] = ()
    """What comparisons in worlds of one size found."""

    versions: dict[str, str] = field(default_factory=dict[str, str])
    machine: dict[str, Any] = field(default_factory=dict[str, Any])

    def row(self, world: World) -> Row:
        return next(row for row in self.rows if row.cell == world.name)

    def of(self, cell: str, kind: Kind) -> list[World]:
        """The worlds of one cell that were timed, the smallest first."""
        return [w for w in self.worlds if w.cell == cell and kind in w.kinds and self.rate(w) is not None]

    @property
    def kinds(self) -> list[Kind]:
        """strong alone, where no world grows its batch."""
        return [kind for kind in KINDS if any(kind in world.kinds for world in self.worlds)]

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

    @override
    def unlike(self, row: Row) -> str:
        """In weak scaling batches have other sizes."""
        return unlike(row.marks, self.others(row), one_total=False) if row.marks is not None else ""

    def sifted(self) -> Self:
        """With those found out that did not train what the ones before them did."""
        rows: list[Row] = []
        for i, row in enumerate(self.rows):
            why = (
                replace(self, worlds=self.worlds[: i + 1], rows=[*rows, row]).unlike(row)
                if row.outcome == "ran"
                else ""
            )
            rows.append(replace(row, outcome="unlike", note=why) if why else row)
        return replace(self, rows=rows)

    def memory(self, world: World) -> int | None:
        """What the largest rank allocated at its peak."""
        row = self.row(world)
        return largest(row.memory) if row.memory and row.outcome in ("ran", "waits") else None

    def agreement(self, world: World) -> Agreement | None:
        """Of its losses with the smallest world's, which trains on the same batches; None where nothing is to hold."""
        row, base = self.row(world), self.row(self.base(world))
        if not self.held or world.kinds != ("strong",) or row is base or {row.outcome, base.outcome} != {"ran"}:
            return None
        return agreement(row.losses, base.losses, tolerance(self.precision))

    @property
    def agreements(self) -> list[tuple[World, Agreement]]:
        return [(world, found) for world in self.worlds if (found := self.agreement(world)) is not None]

    @property
    @override
    def right(self) -> bool:
        return (
            any(row.outcome == "ran" for row in self.rows)
            and not self.wrong
            and all(a.within for _, a in self.agreements)
        )

    @override
    def blocks(self, width: int) -> list[list[str]]:
        """The lines of the header, then of each world; where they are too wide, without the middle half and RSS."""
        header = ("cell", "ranks", "scaling", "step ms", "samples/s", "speed-up", "efficiency")
        last = () if any(row.memory for row in self.rows) else ("RSS",)
        made: list[list[str]] = []
        for narrow, more in ((False, last), (True, last), (True, ())):
            rows = [self._shown(world, narrow=narrow, rss=bool(more)) for world in self.worlds]
            made = blocks((*header, *more), rows, right=(1, 3, 4, 5, 6, 7), width=width)
            if max(len(line) for block in made for line in block) <= width:
                break
        return made

    @override
    def beside(self, width: int) -> list[str]:
        """What the largest rank of each world takes, seen in three ways."""
        watched = [world for world in self.worlds if self.memory(world) is not None]
        if not watched:
            return []
        accounts = {world: self.row(world).memory for world in watched}
        second = "reserved" if any(a.on is not None for of in accounts.values() for a in of) else "resident"
        rows = [[*world.shown, format_size(largest(of)), *_others(of, world.ranks)] for world, of in accounts.items()]
        header = ("memory", "ranks", "scaling", "allocated", second, "on CUDA")
        made = blocks(header, rows, right=(1, 3, 4, 5), width=width)
        return ["", *(line for lines in made for line in lines)]

    def _shown(self, world: World, *, narrow: bool, rss: bool) -> tuple[str, ...]:
        row, rate, at = self.row(world), self.rate(world), world.shown
        if rate is None:
            return *at, HEADS[row.outcome] + (row.note or "waits")
        step, (faster, efficient) = spread(row.timed), (self.faster(world), self.efficiency(world))
        return (
            *at,
            step.partition(" ")[0] if narrow else step,
            f"{rate:.{1 if rate < 100 else 0}f}",
            NONE if faster is None else f"{faster:.2f}",
            NONE if efficient is None else percent(efficient),
            *([format_size(max(row.peak_rss)) if row.peak_rss else NONE] if rss else []),
        )

    @override
    def column_remarks(self) -> list[Remark]:
        smallest = self.worlds[0]
        share = smallest.micro * smallest.accumulate
        weak = f"; weak: {share} for each rank" if "weak" in self.kinds else ""
        lines = table_remarks(
            *self.row_notes(),
            *self.verdict(),
            f"strong: {count_of(smallest.samples, 'sample')} a step in every world{weak}",
            "speed-up: samples/s in proportion to the smallest world's; efficiency: that in proportion to the ranks",
            *(["worlds of one size took turns; those of different sizes did not"] if self.verb == "compare" else []),
            self.shared(),
            *self.timing(),
        )
        if accounts := [account for row in self.rows for account in row.memory]:
            lines += remarks(accounts)
        elif any(row.outcome == "ran" for row in self.rows):
            lines.append(RSS)
        return [*lines, *table_remarks(self.unwatched, self.unkept, self.note)]

    def shared(self) -> str:
        """What ranks on one machine have in common: efficiency is no statement on a cell without it."""
        what = f"one machine: {count_of(self.cores, 'core')}, {self.threads} thread{'s' * (self.threads != '1')} a rank"
        if ":" in self.device:
            return f"{what}; all ranks share {self.device}: no efficiency here is that of a GPU a rank"
        if self.device != "cpu":
            return f"{what}, a GPU each"
        if not self.threads.isdecimal() or not int(self.threads):
            return f"{what}; whether ranks share cores is not known"
        free = self.cores // int(self.threads)
        if not free:
            return f"{what}: one rank alone has more threads than there are cores, which no cell can make good"
        if all(world.ranks <= free for world in self.worlds):
            return f"{what}; ranks share its memory and caches, and no core"
        return f"{what}; in worlds of more than {count_of(free, 'rank')} they share cores, which no cell can make good"

    def verdict(self) -> list[str]:
        """Whether worlds with the same total batch trained alike."""
        if self.interrupted:
            return ["interrupted: worlds without figures did not come to their end"]
        found = self.agreements
        wrong = list(self.wrong) + [
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
        made = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _APART}
        return {**made, "worlds": [self._world_json(world) for world in self.worlds]}

    @classmethod
    def read(cls, file: Path, data: Mapping[str, Any]) -> Self:
        """The same from its file; an error where that holds something else."""
        try:
            raw = cls.from_json(data)
            told = {"rows": [vars(row) for row in raw.rows], "worlds": [vars(world) for world in raw.worlds]}
            found = TypeAdapter(cls).validate_python(vars(raw) | told)
        except (LookupError, TypeError, ValidationError) as e:
            said = f"no key {e}" if isinstance(e, LookupError) else str(e).partition("\n")[0]
            raise ReportError(f"{file} is no scaling that unipar wrote: {said}") from None
        if not found.worlds:
            raise ReportError(f"{file} is no scaling that unipar wrote: it has no worlds")
        return found

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        told: list[dict[str, Any]] = data["worlds"]
        worlds = tuple(_world(world) for world in told)
        rows = [row_of(world | {"cell": at.name}) for at, world in zip(worlds, told, strict=True)]
        known = {f.name: data[f.name] for f in fields(cls) if f.name in data and f.name not in _APART}
        return cls(**known, worlds=worlds, rows=rows)

    def _world_json(self, world: World) -> dict[str, Any]:
        row, found = self.row(world), self.agreement(world)
        return {
            **row_json(row),
            **asdict(world),
            "samples_per_second": self.rate(world),
            "speed_up": self.faster(world),
            "efficiency": self.efficiency(world),
            "agreement": None if found is None else {"says": str(found), **asdict(found)},
        }


def _others(accounts: Sequence[Account], ranks: int) -> tuple[str, str]:
    """Resident, on CUDA reserved; and what it comes to on CUDA."""
    taken = here(accounts)
    return NONE if taken is None else format_size(taken), format_size(there(fullest(accounts), ranks).total)


def _world(told: Mapping[str, Any]) -> World:
    made: dict[str, Any] = {f.name: told[f.name] for f in fields(World)}
    made["kinds"] = tuple(made["kinds"])
    return World(**made)


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"
