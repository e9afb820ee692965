"""`Scaling`: results of strategies in worlds of several sizes, with speed-up and efficiency."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal, Self

from pydantic import TypeAdapter, ValidationError
from typing_extensions import override

from unipar.config import Strategy
from unipar.errors import ReportError
from unipar.memory.account import MemoryAccount
from unipar.planning.cuda_total import total_on_cuda
from unipar.results.comparison import TurnResults
from unipar.results.loss_agreement import Agreement, loss_tolerance, measure_agreement
from unipar.results.memory_tables import (
    RSS,
    bytes_on_this_machine,
    describe_memory_columns,
    largest_account,
    largest_peak_bytes,
)
from unipar.results.row import (
    OUTCOME_PREFIXES,
    StrategyResult,
    format_spread,
    library_name_column,
    row_reason,
    strategy_result_from_json,
    strategy_result_to_json,
)
from unipar.results.same_training import describe_training_difference
from unipar.results.step_work.figures import StepFigures
from unipar.results.step_work.work_table import format_work_table
from unipar.utils.screen import Column, Screen
from unipar.utils.table import Remark, format_table_rows, table_remarks
from unipar.utils.text import count_of, first_few, format_duration, format_size

ScalingKind = Literal["strong", "weak"]
SCALING_KINDS: tuple[ScalingKind, ...] = ("strong", "weak")
"""Kinds of scaling; strong: the total batch is the same in every world; weak: each rank's share of it is."""

NO_FIGURE = "-"

_FIELDS_STORED_ELSEWHERE = ("worlds", "rows", "unkept", "library_names")
"""Fields that the file holds in another form, or not at all."""


@dataclass(frozen=True, kw_only=True)
class ScaledStrategy:
    """One strategy in a world of one size."""

    strategy: str
    ranks: int
    kinds: tuple[ScalingKind, ...]
    """Kinds of scaling that the world is part of; the smallest world is part of both."""

    samples: int
    """Samples in one optimizer step, or tokens at most, over all ranks; 0 in a world that the axes do not divide."""

    micro: int
    accumulate: int
    machines: int = 1
    """Machines on which the ranks are."""

    @property
    def name(self) -> str:
        """Name of the world's row and folder: `native/nothing x2 strong`."""
        return f"{self.strategy} x{self.ranks}" + (f" {self.kinds[0]}" if len(self.kinds) == 1 else "")

    @property
    def share(self) -> int:
        """Samples, or tokens, of a rank of the data in one step."""
        return self.samples * Strategy.parse(self.strategy).axes.ranks // self.ranks

    @property
    def table_head(self) -> tuple[str, str, str]:
        """First three columns of the world's row in a table."""
        where = f" on {self.machines}" if self.machines > 1 else ""
        return self.strategy, f"{self.ranks}{where}", " ".join(self.kinds) if len(self.kinds) == 1 else "both"


@dataclass(frozen=True, kw_only=True)
class Scaling(TurnResults):
    """Results of all worlds; the smallest world of each strategy comes first and is the reference for its others."""

    worlds: tuple[ScaledStrategy, ...]
    """Worlds, in the order of their rows, which have their names."""

    cores: int
    """Cores that these processes may use."""

    threads: str
    """Threads of each rank."""

    device: str
    verb: str = "scale"
    """Command that made the result; compare: a comparison for each size of world, one after another."""

    held: bool = True
    """Whether worlds with the same total batch must have the same losses: not if ranks step independently."""

    wrong: tuple[str, ...] = ()
    """Errors of the comparisons in worlds of one size."""

    versions: dict[str, str] = field(default_factory=dict[str, str])
    machine: dict[str, Any] = field(default_factory=dict[str, Any])

    def row(self, world: ScaledStrategy) -> StrategyResult:
        """Return the row of a world."""
        return next(row for row in self.rows if row.strategy == world.name)

    @override
    def samples_of(self, row: StrategyResult) -> int:
        return next(world.samples for world in self.worlds if world.name == row.strategy)

    def timed_worlds(self, strategy: str, kind: ScalingKind) -> list[ScaledStrategy]:
        """Return the worlds of one strategy that were timed, the smallest first."""
        return [w for w in self.worlds if w.strategy == strategy and kind in w.kinds and self.rate(w) is not None]

    @property
    def kinds(self) -> list[ScalingKind]:
        """Kinds of scaling in this result."""
        return [kind for kind in SCALING_KINDS if any(kind in world.kinds for world in self.worlds)]

    @property
    def strategies(self) -> list[str]:
        """Names of all strategies, in the order of their worlds."""
        return list(dict.fromkeys(world.strategy for world in self.worlds))

    def base(self, world: ScaledStrategy) -> ScaledStrategy:
        """Return the smallest world of the same strategy that is not refused."""
        worlds = [w for w in self.worlds if w.strategy == world.strategy]
        return next((w for w in worlds if self.row(w).outcome not in ("refused", "absent")), worlds[0])

    def rate(self, world: ScaledStrategy) -> float | None:
        """Return samples, or tokens, per second in the median step, or None if the world has no step times."""
        row = self.row(world)
        if not row.timed_seconds or row.outcome not in ("ran", "waits"):
            return None
        if self.unit == "tokens":  # of which each step has another number
            return self.step_figures()[row.strategy].tokens_per_second
        return world.samples / median(row.timed_seconds)

    def speed_up(self, world: ScaledStrategy) -> float | None:
        """Return samples, or tokens, per second, divided by those of the smallest world."""
        rate, base = self.rate(world), self.rate(self.base(world))
        return None if rate is None or base is None else rate / base

    def efficiency(self, world: ScaledStrategy) -> float | None:
        """Return the speed-up, divided by the ideal one, in which twice the ranks are twice as fast."""
        faster = self.speed_up(world)
        return None if faster is None else faster * self.base(world).ranks / world.ranks

    @override
    def training_difference(self, row: StrategyResult) -> str:
        """Return why the row trained something else, or ""; in weak scaling batches differ in size."""
        return (
            describe_training_difference(row.marks, self.marks_of_others(row), one_total=False)
            if row.marks is not None
            else ""
        )

    def mark_different_training(self) -> Self:
        """Return the result in which worlds that trained something else than those before have no figures."""
        rows: list[StrategyResult] = []
        for i, row in enumerate(self.rows):
            why = (
                replace(self, worlds=self.worlds[: i + 1], rows=[*rows, row]).training_difference(row)
                if row.outcome == "ran"
                else ""
            )
            rows.append(replace(row, outcome="unlike", note=why) if why else row)
        return replace(self, rows=rows)

    def memory(self, world: ScaledStrategy) -> int | None:
        """Return the peak of the largest rank's allocated memory, or None if the world has no figures."""
        row = self.row(world)
        return largest_peak_bytes(row.memory) if row.memory and row.outcome in ("ran", "waits") else None

    def agreement(self, world: ScaledStrategy) -> Agreement | None:
        """Return the agreement of the world's losses with the smallest world's, or None if these need not be equal."""
        row, base = self.row(world), self.row(self.base(world))
        if not self.held or world.kinds != ("strong",) or row is base or {row.outcome, base.outcome} != {"ran"}:
            return None
        return measure_agreement(row.losses, base.losses, loss_tolerance(self.judged_as))

    @property
    def agreements(self) -> list[tuple[ScaledStrategy, Agreement]]:
        """Worlds whose losses must equal the smallest world's, with their agreement."""
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
    def screen(self, width: int = 80, next_steps: Sequence[str] = ()) -> str:
        said = self.verdict()
        right = not self.interrupted and not self.wrong and all(a.within for _, a in self.agreements)
        failed = [world.name for world in self.worlds if self.row(world).outcome in ("failed", "unlike")]
        ends = [*(said if right else ()), *([f"{len(failed)} failed: {first_few(failed)}"] if failed else [])]
        return Screen(
            answer="; ".join([self.summary, *ends]),
            warnings=[self.unkept, *(() if right else said), f"measured on {self.shared()}"],
            columns=self._screen_columns(),
            rows=self.worlds,
            reason=lambda world: row_reason(self.row(world)),
            leading=3,
            next_steps=next_steps,
            last=[self.note],
        ).format(width)

    def _screen_columns(self) -> list[Column[ScaledStrategy]]:
        def percent(world: ScaledStrategy) -> str:
            share = self.efficiency(world)
            return NO_FIGURE if share is None else format_percent(share)

        def factor(world: ScaledStrategy) -> str:
            faster = self.speed_up(world)
            return NO_FIGURE if faster is None else f"{faster:.2f}"

        def peak(world: ScaledStrategy) -> str:
            size = self.memory(world)
            return "" if size is None else format_size(size)

        def agrees(world: ScaledStrategy) -> str:
            found = self.agreement(world)
            return "" if found is None else f"{found}{'' if found.within else '!'}"

        def step(world: ScaledStrategy) -> str:
            seconds = self.row(world).timed_seconds
            return format_duration(median(seconds)) if seconds else ""

        return [
            Column(head="strategy", text=lambda world: world.table_head[0], right=False),
            Column(head="ranks", text=lambda world: world.table_head[1]),
            Column(head="scaling", text=lambda world: world.table_head[2], right=False),
            library_name_column(self.library_names, ScaledStrategy, dropped=3),
            Column(head="step", text=step),
            Column(head=f"{self.unit}/s", text=self._rate_text),
            Column(head="speed-up", text=factor, dropped=1),
            Column(head="efficiency", text=percent),
            Column(head="peak", text=peak, dropped=4),
            Column(head="agreement", text=agrees, right=False, dropped=2),
        ]

    def _rate_text(self, world: ScaledStrategy) -> str:
        rate = self.rate(world)
        return NO_FIGURE if rate is None else f"{rate:.{1 if rate < 100 else 0}f}"

    @override
    def blocks(self, width: int) -> list[list[str]]:
        """Return the lines of the header, then of each world; if too wide, without the middle half and RSS."""
        header = ("strategy", "ranks", "scaling", "step ms", f"{self.unit}/s", "speed-up", "efficiency")
        last = () if any(row.memory for row in self.rows) else ("RSS",)
        blocks: list[list[str]] = []
        for narrow, more, fold in ((False, last, False), (True, last, False), (True, (), True)):
            rows = [self._shown(world, narrow=narrow, rss=bool(more)) for world in self.worlds]
            blocks = format_table_rows((*header, *more), rows, right=(1, 3, 4, 5, 6, 7), width=width, fold=fold)
            if max(len(line) for block in blocks for line in block) <= width:
                break
        return blocks

    @override
    def answer_lines(self) -> list[str]:
        return [self.summary, *self.verdict()]

    @override
    def tables(self, width: int) -> list[list[str]]:
        figures = self.step_figures()
        work = [(world.table_head, figures[world.name]) for world in self.worlds]
        main = [line for block in self.blocks(width) for line in block]
        return [main, format_work_table(("work", "ranks", "scaling"), work, width), self._memory_table(width)]

    def _memory_table(self, width: int) -> list[str]:
        """Return the lines of a table of the largest rank's memory in each world, counted in three ways."""
        measured = [world for world in self.worlds if self.memory(world) is not None]
        if not measured:
            return []
        accounts = {world: self.row(world).memory for world in measured}
        second = "reserved" if any(a.on is not None for of in accounts.values() for a in of) else "resident"
        rows = [
            [*world.table_head, format_size(largest_peak_bytes(of)), *_other_memory_columns(of, world.ranks)]
            for world, of in accounts.items()
        ]
        header = ("memory", "ranks", "scaling", "allocated", second, "on CUDA")
        blocks = format_table_rows(header, rows, right=(1, 3, 4, 5), width=width, fold=True)
        return [line for lines in blocks for line in lines]

    def _shown(self, world: ScaledStrategy, *, narrow: bool, rss: bool) -> tuple[str, ...]:
        row, rate, at = self.row(world), self.rate(world), world.table_head
        if rate is None:
            return *at, OUTCOME_PREFIXES[row.outcome] + (row.note or "waits")
        step, (faster, efficient) = format_spread(row.timed_seconds), (self.speed_up(world), self.efficiency(world))
        return (
            *at,
            step.partition(" ")[0] if narrow else step,
            self._rate_text(world),
            NO_FIGURE if faster is None else f"{faster:.2f}",
            NO_FIGURE if efficient is None else format_percent(efficient),
            *([format_size(max(row.peak_rss)) if row.peak_rss else NO_FIGURE] if rss else []),
        )

    @override
    def remarks_by_table(self) -> list[list[Remark]]:
        main = table_remarks(
            *self.row_notes(),
            *self.batches(),
            f"speed-up: {self.unit}/s in proportion to the smallest world's; efficiency: that in proportion to "
            "the ranks",
            *(["worlds of one size took turns; those of different sizes did not"] if self.verb == "compare" else []),
            self.shared(),
            *self.timing(),
        )
        accounts = [account for row in self.rows for account in row.memory]
        if not accounts and any(row.outcome == "ran" for row in self.rows):
            main.append(RSS)
        return [main, self.work_remarks(), describe_memory_columns(accounts) if accounts else []]

    @override
    def closing_remarks(self) -> list[Remark]:
        return table_remarks(self.unwatched, self.unkept, self.note)

    def batches(self) -> list[str]:
        """Return how many samples a step has, in sentences; strategies with other axes may have another share."""
        strategies_of: dict[tuple[int, int], list[str]] = {}
        for strategy in self.strategies:
            smallest = self.base(next(world for world in self.worlds if world.strategy == strategy))
            if smallest.samples:
                share = smallest.micro * smallest.accumulate if self.unit == "samples" else smallest.share
                strategies_of.setdefault((smallest.samples, share), []).append(strategy)
        lines: list[str] = []
        for (samples, share), strategies in strategies_of.items():
            of = f" of {', '.join(strategies)}" if len(strategies_of) > 1 else ""
            axes = any(Strategy.parse(strategy).axes.ranks > 1 for strategy in strategies)
            ranks = "each rank, or group of ranks, with samples of its own" if axes else "each rank"
            weak = f"; weak: {share} for {ranks}" if "weak" in self.kinds else ""
            size = count_of(samples, "sample") if self.unit == "samples" else f"at most {samples} tokens"
            lines.append(f"strong: {size} a step in every world{of}{weak}")
        return lines

    def shared(self) -> str:
        """Return what the ranks on this machine share, without which efficiency cannot be judged."""
        number = max((world.machines for world in self.worlds), default=1)
        where = "one machine" if number == 1 else f"{number} machines (ranks on machines), each"
        what = f"{where}: {count_of(self.cores, 'core')}, {self.threads} thread{'s' * (self.threads != '1')} a rank"
        if ":" in self.device:
            return f"{what}; all ranks share {self.device}: efficiency with one GPU per rank would be different"
        if self.device != "cpu":
            return f"{what}, one GPU per rank"
        if not self.threads.isdecimal() or not int(self.threads):
            return f"{what}; whether ranks share cores is not known"
        free = self.cores // int(self.threads)
        if not free:
            return f"{what}: even one rank has more threads than there are cores, which limits every strategy"
        if all(world.ranks <= free for world in self.worlds):
            return f"{what}; ranks share its memory and caches, but no cores"
        return f"{what}; in worlds of more than {count_of(free, 'rank')} they share cores, which limits every strategy"

    @property
    def summary(self) -> str:
        """Efficiency in the largest world of each strategy, the best first, as a sentence without its full stop."""
        parts: list[str] = []
        for kind in self.kinds:
            last = [worlds[-1] for strategy in self.strategies if len(worlds := self.timed_worlds(strategy, kind)) > 1]
            by = {world: share for world in last if (share := self.efficiency(world)) is not None}
            best = sorted(by, key=lambda world: -by[world])
            shares = [f"{format_percent(by[w])} for {w.strategy} on {count_of(w.ranks, 'rank')}" for w in best]
            parts += [f"{kind} scaling: {first_few(shares)}"] if shares else []
        if not parts:
            return "No strategy ran in two worlds, so there is nothing to compare"
        return f"Part of the ideal speed: {'; '.join(parts)}"

    @override
    def verdict(self) -> list[str]:
        """Return whether worlds with the same total batch have the same losses, in sentences."""
        if self.interrupted:
            return ["interrupted: worlds without figures did not finish"]
        found = self.agreements
        wrong = list(self.wrong) + [
            f"DISAGREES: {world.name} with {self.base(world).name} by {a.off:.1e} at step {a.step}; "
            f"allowed in {self.judged_as}: {loss_tolerance(self.judged_as):g}"
            for world, a in found
            if not a.within
        ]
        if wrong or not found:
            return wrong
        least = min((a.digits for _, a in found if a.digits is not None), default=None)
        how = "bit for bit" if least is None else f"to {least} digits or more"
        return [f"the losses of strong scaling agree with the smallest world's {how}"]

    def to_json(self) -> dict[str, Any]:
        """Return every figure as a mapping for JSON."""
        data = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _FIELDS_STORED_ELSEWHERE}
        figures = self.step_figures()
        return {**data, "worlds": [self._world_json(world, figures[world.name]) for world in self.worlds]}

    @classmethod
    def read(cls, file: Path, data: Mapping[str, Any]) -> Self:
        """Return the result in a file's mapping; raise ReportError if unipar cannot have written it."""
        try:
            raw = cls.from_json(data)
            lists = {"rows": [vars(row) for row in raw.rows], "worlds": [vars(world) for world in raw.worlds]}
            result = TypeAdapter(cls).validate_python(vars(raw) | lists)
        except (LookupError, TypeError, ValidationError) as e:
            why = f"no key {e}" if isinstance(e, LookupError) else str(e).partition("\n")[0]
            raise ReportError(f"{file} is not a scaling written by unipar: {why}") from None
        if not result.worlds:
            raise ReportError(f"{file} is not a scaling written by unipar: it has no worlds")
        return result

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Return the result in a file's mapping, without checks."""
        entries: list[dict[str, Any]] = data["worlds"]
        worlds = tuple(_scaled_strategy_from_json(world) for world in entries)
        rows = [
            strategy_result_from_json(world | {"strategy": at.name}) for at, world in zip(worlds, entries, strict=True)
        ]
        known = {f.name: data[f.name] for f in fields(cls) if f.name in data and f.name not in _FIELDS_STORED_ELSEWHERE}
        return cls(**known, worlds=worlds, rows=rows)

    def _world_json(self, world: ScaledStrategy, figures: StepFigures) -> dict[str, Any]:
        row, found = self.row(world), self.agreement(world)
        return {
            **strategy_result_to_json(row),
            **asdict(world),
            "samples_per_second": self.rate(world) if self.unit == "samples" else None,
            "tokens_per_second": figures.tokens_per_second,
            "flops": self.step_flops(row),
            "flops_per_second": figures.flops_per_second,
            "mfu": figures.mfu,
            "waiting": figures.waiting,
            "most_waiting": figures.most_waiting,
            "speed_up": self.speed_up(world),
            "efficiency": self.efficiency(world),
            "agreement": None if found is None else {"says": str(found), **asdict(found)},
        }


def _other_memory_columns(accounts: Sequence[MemoryAccount], ranks: int) -> tuple[str, str]:
    """Return the memory taken on this machine (resident, or reserved on CUDA) and the total on CUDA, as text."""
    taken = bytes_on_this_machine(accounts)
    return NO_FIGURE if taken is None else format_size(taken), format_size(
        total_on_cuda(largest_account(accounts), ranks).total
    )


def _scaled_strategy_from_json(data: Mapping[str, Any]) -> ScaledStrategy:
    data = {"machines": 1, **data}
    values: dict[str, Any] = {f.name: data[f.name] for f in fields(ScaledStrategy)}
    values["kinds"] = tuple(values["kinds"])
    return ScaledStrategy(**values)


def format_percent(share: float) -> str:
    """Return a share as percent: 0.8 as "80 %"."""
    return f"{100 * share:.0f} %"
