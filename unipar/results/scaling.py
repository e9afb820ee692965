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
from unipar.memory.account import MemoryAccount
from unipar.memory.cuda_total import total_on_cuda
from unipar.results.agreement import Agreement, loss_tolerance, measure_agreement
from unipar.results.comparison import TurnResults
from unipar.results.memory_tables import (
    RSS,
    bytes_on_this_machine,
    describe_memory_columns,
    largest_account,
    largest_peak_bytes,
)
from unipar.results.row import OUTCOME_PREFIXES, CellResult, cell_result_from_json, cell_result_to_json, format_spread
from unipar.results.same_training import describe_training_difference
from unipar.utils.table import Remark, format_table_rows, table_remarks
from unipar.utils.text import count_of, format_size

ScalingKind = Literal["strong", "weak"]
SCALING_KINDS: tuple[ScalingKind, ...] = ("strong", "weak")

NO_FIGURE = "-"

_FIELDS_STORED_ELSEWHERE = ("worlds", "rows", "unkept")
"""What its file holds in another form, or not at all."""
"""strong: the total batch is the same in every world; weak: each rank's share of it is."""


@dataclass(frozen=True, kw_only=True)
class ScaledCell:
    """One cell on so many ranks."""

    cell: str
    ranks: int
    kinds: tuple[ScalingKind, ...]
    """The smallest world is both."""

    samples: int
    """In one optimizer step, over all ranks."""

    micro: int
    accumulate: int

    @property
    def name(self) -> str:
        return f"{self.cell} x{self.ranks}" + (f" {self.kinds[0]}" if len(self.kinds) == 1 else "")

    @property
    def table_head(self) -> tuple[str, str, str]:
        """How a table's row begins."""
        return self.cell, str(self.ranks), " ".join(self.kinds) if len(self.kinds) == 1 else "both"


@dataclass(frozen=True, kw_only=True)
class Scaling(TurnResults):
    """All worlds; of each cell the smallest comes first, and is what its others are held to."""

    worlds: tuple[ScaledCell, ...]
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

    def row(self, world: ScaledCell) -> CellResult:
        return next(row for row in self.rows if row.cell == world.name)

    def timed_worlds(self, cell: str, kind: ScalingKind) -> list[ScaledCell]:
        """The worlds of one cell that were timed, the smallest first."""
        return [w for w in self.worlds if w.cell == cell and kind in w.kinds and self.samples_per_second(w) is not None]

    @property
    def kinds(self) -> list[ScalingKind]:
        """strong alone, where no world grows its batch."""
        return [kind for kind in SCALING_KINDS if any(kind in world.kinds for world in self.worlds)]

    @property
    def cells(self) -> list[str]:
        return list(dict.fromkeys(world.cell for world in self.worlds))

    def base(self, world: ScaledCell) -> ScaledCell:
        return next(w for w in self.worlds if w.cell == world.cell)

    def samples_per_second(self, world: ScaledCell) -> float | None:
        """Samples in a second, by the median step."""
        row = self.row(world)
        return (
            world.samples / median(row.timed_seconds) if row.timed_seconds and row.outcome in ("ran", "waits") else None
        )

    def speed_up(self, world: ScaledCell) -> float | None:
        """How many times the samples of the smallest world in the same time."""
        rate, base = self.samples_per_second(world), self.samples_per_second(self.base(world))
        return None if rate is None or base is None else rate / base

    def efficiency(self, world: ScaledCell) -> float | None:
        """Of the ideal, in which twice the ranks do twice as much."""
        faster = self.speed_up(world)
        return None if faster is None else faster * self.base(world).ranks / world.ranks

    @override
    def training_difference(self, row: CellResult) -> str:
        """In weak scaling batches have other sizes."""
        return (
            describe_training_difference(row.marks, self.marks_of_others(row), one_total=False)
            if row.marks is not None
            else ""
        )

    def mark_different_training(self) -> Self:
        """With those found out that did not train what the ones before them did."""
        rows: list[CellResult] = []
        for i, row in enumerate(self.rows):
            why = (
                replace(self, worlds=self.worlds[: i + 1], rows=[*rows, row]).training_difference(row)
                if row.outcome == "ran"
                else ""
            )
            rows.append(replace(row, outcome="unlike", note=why) if why else row)
        return replace(self, rows=rows)

    def memory(self, world: ScaledCell) -> int | None:
        """What the largest rank allocated at its peak."""
        row = self.row(world)
        return largest_peak_bytes(row.memory) if row.memory and row.outcome in ("ran", "waits") else None

    def agreement(self, world: ScaledCell) -> Agreement | None:
        """Of its losses with the smallest world's, which trains on the same batches; None where nothing is to hold."""
        row, base = self.row(world), self.row(self.base(world))
        if not self.held or world.kinds != ("strong",) or row is base or {row.outcome, base.outcome} != {"ran"}:
            return None
        return measure_agreement(row.losses, base.losses, loss_tolerance(self.precision))

    @property
    def agreements(self) -> list[tuple[ScaledCell, Agreement]]:
        return [(world, found) for world in self.worlds if (found := self.agreement(world)) is not None]

    @property
    @override
    def ran_and_agrees(self) -> bool:
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
            made = format_table_rows((*header, *more), rows, right=(1, 3, 4, 5, 6, 7), width=width)
            if max(len(line) for block in made for line in block) <= width:
                break
        return made

    @override
    def extra_tables(self, width: int) -> list[str]:
        """What the largest rank of each world takes, seen in three ways."""
        watched = [world for world in self.worlds if self.memory(world) is not None]
        if not watched:
            return []
        accounts = {world: self.row(world).memory for world in watched}
        second = "reserved" if any(a.on is not None for of in accounts.values() for a in of) else "resident"
        rows = [
            [*world.table_head, format_size(largest_peak_bytes(of)), *_other_memory_columns(of, world.ranks)]
            for world, of in accounts.items()
        ]
        header = ("memory", "ranks", "scaling", "allocated", second, "on CUDA")
        made = format_table_rows(header, rows, right=(1, 3, 4, 5), width=width)
        return ["", *(line for lines in made for line in lines)]

    def _shown(self, world: ScaledCell, *, narrow: bool, rss: bool) -> tuple[str, ...]:
        row, rate, at = self.row(world), self.samples_per_second(world), world.table_head
        if rate is None:
            return *at, OUTCOME_PREFIXES[row.outcome] + (row.note or "waits")
        step, (faster, efficient) = format_spread(row.timed_seconds), (self.speed_up(world), self.efficiency(world))
        return (
            *at,
            step.partition(" ")[0] if narrow else step,
            f"{rate:.{1 if rate < 100 else 0}f}",
            NO_FIGURE if faster is None else f"{faster:.2f}",
            NO_FIGURE if efficient is None else format_percent(efficient),
            *([format_size(max(row.peak_rss)) if row.peak_rss else NO_FIGURE] if rss else []),
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
            lines += describe_memory_columns(accounts)
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
            f"allowed in {self.precision}: {loss_tolerance(self.precision):g}"
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
        made = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _FIELDS_STORED_ELSEWHERE}
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
        worlds = tuple(_scaled_cell_from_json(world) for world in told)
        rows = [cell_result_from_json(world | {"cell": at.name}) for at, world in zip(worlds, told, strict=True)]
        known = {f.name: data[f.name] for f in fields(cls) if f.name in data and f.name not in _FIELDS_STORED_ELSEWHERE}
        return cls(**known, worlds=worlds, rows=rows)

    def _world_json(self, world: ScaledCell) -> dict[str, Any]:
        row, found = self.row(world), self.agreement(world)
        return {
            **cell_result_to_json(row),
            **asdict(world),
            "samples_per_second": self.samples_per_second(world),
            "speed_up": self.speed_up(world),
            "efficiency": self.efficiency(world),
            "agreement": None if found is None else {"says": str(found), **asdict(found)},
        }


def _other_memory_columns(accounts: Sequence[MemoryAccount], ranks: int) -> tuple[str, str]:
    """Resident, on CUDA reserved; and what it comes to on CUDA."""
    taken = bytes_on_this_machine(accounts)
    return NO_FIGURE if taken is None else format_size(taken), format_size(
        total_on_cuda(largest_account(accounts), ranks).total
    )


def _scaled_cell_from_json(told: Mapping[str, Any]) -> ScaledCell:
    made: dict[str, Any] = {f.name: told[f.name] for f in fields(ScaledCell)}
    made["kinds"] = tuple(made["kinds"])
    return ScaledCell(**made)


def format_percent(share: float) -> str:
    return f"{100 * share:.0f} %"
