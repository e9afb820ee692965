"""`Scaling`: results of strategies in worlds of several sizes, with speed-up and efficiency."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any, Final, Literal, Self

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator
from typing_extensions import override

from unipar.config import Strategy
from unipar.results.comparison import TurnResults
from unipar.results.loss_agreement import Agreement, agreement_for_readers, loss_tolerance, measure_agreement
from unipar.results.memory_tables import RSS, describe_memory_columns, largest_peak_bytes
from unipar.results.row import StrategyResult, library_name_column, row_reason
from unipar.results.same_training import describe_training_difference
from unipar.results.step_work.figures import StepFigures
from unipar.results.step_work.work_table import format_work_table
from unipar.results.stored import StoredResult
from unipar.utils.columns import Column, Reason, choose_columns, fitting_table, table_blocks
from unipar.utils.screen import Screen
from unipar.utils.table import Remark, table_remarks
from unipar.utils.text import count_of, first_few, format_size

ScalingKind = Literal["strong", "weak"]
SCALING_KINDS: tuple[ScalingKind, ...] = ("strong", "weak")
"""Kinds of scaling; strong: the total batch is the same in every world; weak: each rank's share of it is."""


class ScaledStrategy(StoredResult):
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


WORLD_COLUMNS: Final[Sequence[Column[ScaledStrategy]]] = (
    Column("strategy", lambda world: world.strategy, right=False),
    Column("ranks", lambda world: world.ranks),
    Column("ranks", lambda world: world.table_head[1], key="place"),
    Column("scaling", lambda world: world.table_head[2], right=False),
    Column("scaling", lambda world: " and ".join(world.kinds), key="kinds", right=False),
    Column("samples a step", lambda world: world.samples or None, key="samples"),
    Column("micro", lambda world: world.micro if world.samples else None),
    Column("accumulate", lambda world: world.accumulate if world.samples else None),
)
"""Columns of what a world is."""


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

    versions: dict[str, str] = Field(default_factory=dict)
    machine: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _read_rows(cls, data: dict[str, Any]) -> dict[str, Any]:
        """Return the values of a file, whose worlds hold their rows; raise LookupError without worlds."""
        if "rows" in data:
            return data
        names = [ScaledStrategy.read(world).name for world in data["worlds"]]
        rows = [world | {"strategy": name} for world, name in zip(data["worlds"], names, strict=True)]
        return {**data, "rows": rows}

    @model_serializer(mode="wrap")
    def _store(self, figures: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Return what the file holds: every figure, and for its readers what follows from them."""
        data = figures(self)
        worlds, rows, work = data.pop("worlds"), data.pop("rows"), self.step_figures()
        of_rows = {row["strategy"]: row for row in rows}
        return data | {
            "worlds": [
                {**of_rows[at.name], **world, **self._figures_for_readers(at, work[at.name])}
                for at, world in zip(self.worlds, worlds, strict=True)
            ]
        }

    def _figures_for_readers(self, world: ScaledStrategy, figures: StepFigures) -> dict[str, Any]:
        return {
            "samples_per_second": self.rate(world) if self.unit == "samples" else None,
            "tokens_per_second": figures.tokens_per_second,
            "flops": self.step_flops(self.row(world)),
            "flops_per_second": figures.flops_per_second,
            "mfu": figures.mfu,
            "waiting": figures.waiting,
            "most_waiting": figures.most_waiting,
            "speed_up": self.speed_up(world),
            "efficiency": self.efficiency(world),
            "agreement": agreement_for_readers(self.agreement(world)),
        }

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
                self.changed(worlds=self.worlds[: i + 1], rows=[*rows, row]).training_difference(row)
                if row.outcome == "ran"
                else ""
            )
            rows.append(row.changed(outcome="unlike", note=why) if why else row)
        return self.changed(rows=rows)

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
        return [(world, agreement) for world in self.worlds if (agreement := self.agreement(world)) is not None]

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
        verdict_lines = self.verdict()
        right = not self.interrupted and not self.wrong and all(a.within for _, a in self.agreements)
        failed = [world.name for world in self.worlds if self.row(world).outcome in ("failed", "unlike")]
        ends = [*(verdict_lines if right else ()), *([f"{len(failed)} failed: {first_few(failed)}"] if failed else [])]
        return Screen(
            answer="; ".join([self.summary, *ends]),
            warnings=[self.unkept, *(() if right else verdict_lines), f"measured on {self.shared()}"],
            columns=choose_columns(
                self.columns(),
                *("strategy", "place", "scaling", "known_as", "median_step_s", f"{self.unit}_per_s"),
                *("speed_up", "efficiency", "peak", "agreement"),
            ),
            rows=self.worlds,
            reason=self.reason_of,
            leading=3,
            next_steps=next_steps,
            last=[self.note],
        ).format(width)

    def columns(self) -> list[Column[ScaledStrategy]]:
        """Return the columns of every table and file."""

        def agreement(world: ScaledStrategy) -> str | None:
            agreement = self.agreement(world)
            return None if agreement is None else f"{agreement}{'' if agreement.within else '!'}"

        def share(world: ScaledStrategy) -> str | None:
            if self.unit == "tokens":  # in microbatches whose number varies
                return str(world.share) if world.samples else None
            return f"{world.micro} × {world.accumulate}" if world.samples else None

        return [
            *WORLD_COLUMNS,
            Column("on a rank", share, key="share"),
            library_name_column(self.library_names, dropped=3).of(lambda row: row.strategy),
            *self.measured_columns(self.row, lambda world: world.ranks, self.rate, self.agreement),
            Column("speed-up", self.speed_up, "{:.2f}".format, key="speed_up", dropped=1),
            Column("efficiency", self.efficiency, format_percent),
            Column("peak", self.memory, format_size, dropped=4, optional=True),
            Column("agreement", agreement, right=False, dropped=2, optional=True),
        ]

    @override
    def blocks(self, width: int) -> list[list[str]]:
        """Return the lines of the header, then of each world; if too wide, without the middle half and RSS."""
        keys = ["strategy", "place", "scaling", "spread", f"{self.unit}_per_s", "speed_up", "efficiency"]
        columns = choose_columns(self.columns(), *keys, *([] if self.has_memory else ["rss"]))
        shown = [replace(column, dropped=int(column.key == "rss")) for column in columns]
        return fitting_table(shown, self.worlds, width=width, reason=self.reason_of, leading=3)[1]

    def reason_of(self, world: ScaledStrategy) -> Reason | None:
        """Return why a world has no figures, or None if it has some."""
        return row_reason(self.row(world))

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
        reserved = any(a.on is not None for world in measured for a in self.row(world).memory)
        keys = ("strategy", "place", "scaling", "allocated", "taken", "on_cuda")
        heads = {"strategy": "memory", "taken": "reserved" if reserved else "resident"}
        columns = choose_columns(self.columns(), *keys, **heads)
        return [line for block in table_blocks(columns, measured, width=width, fold=True) for line in block]

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
            axes = any(Strategy.parse(strategy).axes.split for strategy in strategies)
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
        agreements = self.agreements
        wrong = list(self.wrong) + [
            f"DISAGREES: {world.name} with {self.base(world).name} by {a.off:.1e} at step {a.step}; "
            f"allowed in {self.judged_as}: {loss_tolerance(self.judged_as):g}"
            for world, a in agreements
            if not a.within
        ]
        if wrong or not agreements:
            return wrong
        least = min((a.digits for _, a in agreements if a.digits is not None), default=None)
        how = "bit for bit" if least is None else f"to {least} digits or more"
        return [f"the losses of strong scaling agree with the smallest world's {how}"]


def format_percent(share: float) -> str:
    """Return a share as percent: 0.8 as "80 %"."""
    return f"{100 * share:.0f} %"
