"""`Comparison`: results of all strategies, verdict, table."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator
from typing_extensions import override

from unipar.config import Precision
from unipar.errors import Stopped
from unipar.memory.account import MemoryAccount
from unipar.planning.machines.device_peaks import find_device_peaks
from unipar.results.forecast.forecast_difference import FORECAST_COLUMNS, describe_forecast, forecast_differences
from unipar.results.forecast.records import Forecast
from unipar.results.loss_agreement import (
    AGREEMENT_COLUMNS,
    Agreement,
    agreement_for_readers,
    loss_tolerance,
    measure_agreement,
)
from unipar.results.memory_tables import (
    ACROSS_REMARK,
    MEMORY_COLUMNS,
    RSS,
    SENT_REMARK,
    RanksMemory,
    describe_memory_columns,
    describe_peak_ranges,
    describe_setup_peaks,
    format_memory_tables,
    format_sent_table,
    largest_peak_bytes,
    sends_across,
    sent_axes,
)
from unipar.results.row import (
    StrategyResult,
    format_median,
    format_spread,
    format_units_a_second,
    library_name_column,
    row_reason,
)
from unipar.results.same_training import TrainingMarks, describe_training_difference, judged_precision
from unipar.results.step_work.figures import StepFigures, StrategyWork, flops_of_step, step_figures
from unipar.results.step_work.work_table import describe_work_columns, figure_columns, format_work_table
from unipar.results.stored import StoredResult
from unipar.run_folder.layout import PAGE_FILE_NAME
from unipar.utils.columns import Column, Row, choose_columns, fitting_table
from unipar.utils.notebook import ShownAsPage
from unipar.utils.screen import Screen
from unipar.utils.table import Remark, table_remarks, wrap_lines
from unipar.utils.text import count_of, first_few, format_duration, format_size


class TurnResults(StoredResult, ShownAsPage):
    """Results of worlds that trained in turns, a row for each."""

    name: str
    out: str
    precision: Precision
    warmup: int
    """Steps before the timed ones."""

    rows: list[StrategyResult]
    unit: str = "samples"
    """Unit in which the batch is counted: samples or tokens."""

    note: str = ""
    unwatched: str = ""
    """Reason why memory was not recorded, or not completely."""

    interrupted: bool = False
    unkept: str = Field(default="", exclude=True)
    """Reason why the results could not be written to their folder."""

    library_names: Mapping[str, str] = Field(default={}, exclude=True)
    """The libraries' own names of strategies; not stored."""

    @abstractmethod
    def samples_of(self, row: StrategyResult) -> int:
        """Return the samples in one optimizer step of a row."""

    @property
    def judged_as(self) -> Precision:
        """Precision whose tolerance losses have."""
        return judged_precision(self.precision, self.rows[0].marks if self.rows else None)

    @property
    def work_by_samples(self) -> dict[int, list[StrategyWork]]:
        """Name of each row and the work of its ranks, by the samples in a step, on which its operations depend."""
        by_samples: dict[int, list[StrategyWork]] = {}
        for row in self.rows:
            by_samples.setdefault(self.samples_of(row), []).append((row.strategy, row.work))
        return by_samples

    def step_flops(self, row: StrategyResult) -> float | None:
        """Return the operations of one step of a row, or None if no row with as many samples has counted them."""
        if self.unit == "tokens":  # padding differs between worlds
            return flops_of_step([(row.strategy, row.work)])
        return flops_of_step(self.work_by_samples[self.samples_of(row)])

    def step_figures(self) -> dict[str, StepFigures]:
        """Return what a step of each row does, by the row's name."""
        return {
            row.strategy: step_figures(
                row.work, row.timed_seconds if row.outcome == "ran" else [], self.step_flops(row), self.precision
            )
            for row in self.rows
        }

    @property
    def peak_description(self) -> str:
        """Peak to which MFU is in proportion, in words."""
        names = sorted({rank.device for row in self.rows for rank in row.work if rank.device})
        peaks = [(name, find_device_peaks(name)) for name in names]
        known = [(name, p.flops[self.precision]) for name, p in peaks if p is not None and self.precision in p.flops]
        each = [f"{flops / 1e12:,.0f} TFLOP/s of {name}" for name, flops in known]
        return f"the peak of all devices in {self.precision}, {', '.join(each)} each"

    @property
    def has_memory(self) -> bool:
        """Whether memory was recorded in any row."""
        return any(row.memory for row in self.rows)

    def measured_columns(
        self,
        result_of: Callable[[Row], StrategyResult],
        ranks_of: Callable[[Row], int],
        rate_of: Callable[[Row], float | None],
        agreement_of: Callable[[Row], Agreement | None],
    ) -> list[Column[Row]]:
        """Return the columns of what every row of such results has measured, for rows that hold a result each."""
        figures = self.step_figures()

        def seconds(row: Row) -> list[float] | None:
            result = result_of(row)
            return result.timed_seconds or None if result.outcome in ("ran", "waits") else None

        def rate(row: Row) -> float | None:
            return None if seconds(row) is None else rate_of(row)

        def memory(row: Row) -> RanksMemory | None:
            result = result_of(row)
            known = result.memory and result.outcome not in ("failed", "unlike")
            return RanksMemory(result.strategy, ranks_of(row), result.memory) if known else None

        def work(row: Row) -> StepFigures:
            return figures[result_of(row).strategy]

        timed: list[Column[list[float]]] = [
            Column("step", median, format_duration, key="median_step_s", optional=True),
            Column("step ms", list, format_spread, key="spread", short=format_median),
        ]
        return [
            Column("outcome", lambda row: result_of(row).outcome),
            *(column.of(agreement_of) for column in AGREEMENT_COLUMNS),
            *(column.of(seconds) for column in timed),
            Column(
                f"{self.unit}/s", rate, format_units_a_second, key=f"{self.unit}_per_s", page_format="{:.1f}".format
            ),
            Column("RSS", lambda row: max(result_of(row).peak_rss, default=None), format_size, key="rss"),
            *(column.of(memory) for column in MEMORY_COLUMNS),
            Column(
                "operations",
                lambda row: self.step_flops(result_of(row)) if work(row) != StepFigures() else None,
                key="step_flops",
            ),
            *(column.of(work) for column in figure_columns(list(figures.values()))),
        ]

    @abstractmethod
    def training_difference(self, row: StrategyResult) -> str:
        """Return why this row did not train the same as the others, or "" if no difference is known."""

    @property
    @abstractmethod
    def ran_and_agrees(self) -> bool:
        """Whether at least one world that is to be judged ran, and none disagrees."""

    @property
    def code(self) -> int:
        """Exit code of the command line: 0 with refusals too, 1 for failures and disagreement."""
        if self.interrupted:
            return Stopped.code
        if self.unkept:
            return 1
        return 0 if self.ran_and_agrees and not {"failed", "unlike"} & {row.outcome for row in self.rows} else 1

    @override
    def __str__(self) -> str:
        return self.screen()

    @property
    @override
    def page(self) -> Path:
        return Path(self.out) / PAGE_FILE_NAME

    @abstractmethod
    def screen(self, width: int = 80, next_steps: Sequence[str] = ()) -> str:
        """Return the answer, the table and the next steps, in one screen."""

    @override
    def table(self, width: int = 80) -> str:
        """Return the answer, then all tables, each with the remarks on it: what `--details` prints."""
        parts = [self._remark_lines(table_remarks(*self.answer_lines()), (), width)]
        for lines, remarks in zip(self.tables(width), self.remarks_by_table(), strict=True):
            parts.append([*lines, *self._remark_lines(remarks, lines, width)])
        parts.append(self._remark_lines(self.closing_remarks(), (), width))
        return "\n\n".join("\n".join(lines) for lines in parts if lines)

    @staticmethod
    def _remark_lines(remarks: Sequence[Remark], table: Sequence[str], width: int) -> list[str]:
        """Return remarks as lines, without those on columns that the table does not have."""
        head = " ".join(table).split()
        return wrap_lines((r.text for r in remarks if not r.column or r.column in head), width)

    @abstractmethod
    def blocks(self, width: int) -> list[list[str]]:
        """Return the lines of the main table's header, then of each of its rows."""

    @abstractmethod
    def verdict(self) -> list[str]:
        """Return whether losses agree, in sentences."""

    @abstractmethod
    def answer_lines(self) -> list[str]:
        """Return what the result answers, and what is wrong, in sentences."""

    @abstractmethod
    def tables(self, width: int) -> list[list[str]]:
        """Return the lines of each table, the main one first; a table without rows has no lines."""

    @abstractmethod
    def remarks_by_table(self) -> list[list[Remark]]:
        """Return the explanations of each table, each with the column that it explains."""

    @abstractmethod
    def closing_remarks(self) -> list[Remark]:
        """Return what there is to say besides."""

    def column_remarks(self) -> list[Remark]:
        """Return the verdict and all explanations, each with the column that it explains."""
        explained = [remark for remarks in self.remarks_by_table() for remark in remarks]
        return [*table_remarks(*self.verdict()), *explained, *self.closing_remarks()]

    def remarks(self, *, work: bool = True) -> list[str]:
        """Return explanations of the table and what is wrong; `work`: with those of the table of work."""
        left_out = [] if work else self.work_remarks()
        return [remark.text for remark in self.column_remarks() if remark not in left_out]

    def work_remarks(self, *, reasons: bool = True) -> list[Remark]:
        """Return explanations of the table of work; `reasons`: with those of graph breaks and recompiles."""
        figures, peak = self.step_figures(), self.peak_description
        return describe_work_columns(self.work_by_samples, figures, peak, unit=self.unit, reasons=reasons)

    def timing(self) -> list[str]:
        """Return an explanation of the step times."""
        ran = next((row for row in self.rows if row.outcome == "ran"), None)
        if ran is None:
            return []
        turns = f"{count_of(len(ran.timed_seconds), 'step')} in {count_of(len(ran.seconds), 'turn')}"
        return [f"step ms: median [middle half] of {turns}, of the slowest rank"]

    def row_notes(self) -> list[str]:
        """Return the notes of rows that ran, each with the row's name."""
        return [f"{row.strategy}: {row.note}" for row in self.rows if row.outcome == "ran" and row.note]

    def marks_of_others(self, row: StrategyResult) -> dict[str, TrainingMarks]:
        """Return the training marks of the other rows, by name."""
        others = ((r.strategy, r.marks) for r in self.rows if r is not row and r.outcome in ("ran", "waits"))
        return {name: marks for name, marks in others if marks is not None}


class Comparison(TurnResults):
    """Results of all strategies of one comparison; `single`, the reference, is the first row."""

    samples: int
    """Samples in one optimizer step; tokens at most, if `unit` says so."""

    ranks: int
    """Ranks of every strategy except `single`; 0 if an older file does not say."""

    machines: int = 1
    """Machines on which the ranks of every strategy except `single` are."""

    moments: str = ""
    """Sentence on moments of 8 or 16 bits beside those of AdamW: bytes and digits; empty with another optimizer."""

    fp8: str = ""
    """Sentence on layers that multiplied in fp8: which, by what, and digits; empty in another precision."""

    answer: str = Field(default="", exclude=True)
    """Sentence on the smallest and the fastest strategy, and why; the page's first sentence, not stored."""

    forecast: Forecast | None = None
    """Prediction for the strategies that ran; None in files of earlier versions, and until they have ended."""

    @model_validator(mode="before")
    @classmethod
    def _read_rows(cls, data: dict[str, Any]) -> dict[str, Any]:
        """Return the values of a file, with the number of ranks, which an older one does not say."""
        if "rows" in data:
            return data
        ranks = max((len(row.get("peak_rss", [])) for row in data["strategies"]), default=0)
        return {"ranks": ranks, **data, "rows": data["strategies"]}

    @model_serializer(mode="wrap")
    def _store(self, figures: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Return what compare.json holds: every figure, and the agreement of each strategy for readers of the file."""
        data = figures(self)
        rows, forecast = data.pop("rows"), data.pop("forecast")
        agreements = [{"agreement": agreement_for_readers(self.agreement(row))} for row in self.rows]
        return {**data, "strategies": [row | agreement for row, agreement in zip(rows, agreements, strict=True)]} | {
            "forecast": forecast
        }

    @property
    def reference(self) -> StrategyResult | None:
        """Row of `single` if it ran."""
        row = self.rows[0]
        return row if row.outcome == "ran" else None

    @override
    def samples_of(self, row: StrategyResult) -> int:
        return self.samples

    @override
    def training_difference(self, row: StrategyResult) -> str:
        return describe_training_difference(row.marks, self.marks_of_others(row)) if row.marks is not None else ""

    def rate(self, row: StrategyResult) -> float | None:
        """Return samples, or tokens, per second in the median step; None if that is not known."""
        if not row.timed_seconds:
            return None
        if self.unit == "tokens":  # of which each step has another number
            return self.step_figures()[row.strategy].tokens_per_second
        return self.samples / median(row.timed_seconds)

    def describe_batch(self) -> str:
        """Return the size of a batch in words."""
        size = count_of(self.samples, "sample") if self.unit == "samples" else f"{self.samples} tokens"
        return f"{size} a step"

    def describe_ranks(self) -> str:
        """Return the number of ranks in words, and on how many machines they are if on several."""
        where = f" on {count_of(self.machines, 'machine')}" if self.machines > 1 else ""
        return f"{count_of(self.ranks, 'rank')}{where}"

    def rank_count(self, row: StrategyResult) -> int:
        """Return how many ranks the row's strategy has, whether or not all of them left results."""
        return len(row.peak_rss) or (1 if row is self.rows[0] else self.ranks)

    @property
    def baseline(self) -> StrategyResult | None:
        """First row after `single` with step times; column x is in proportion to it."""
        return next((row for row in self.rows[1:] if row.timed_seconds and row.outcome in ("ran", "waits")), None)

    def agreement(self, row: StrategyResult) -> Agreement | None:
        """Return the agreement of a row's losses with those of `single`, or None if one of them did not run."""
        if self.reference is None or row is self.reference or row.outcome != "ran":
            return None
        allowed = loss_tolerance(self.judged_as)
        if not row.parts:
            return measure_agreement(row.losses, self.reference.losses, allowed)
        parts = [
            replace(measure_agreement(row.parts[p], one, allowed), part=p)
            for p, one in self.reference.parts.items()
            if one
        ]
        return min(parts, key=lambda a: (a.within, math.inf if a.digits is None else a.digits))

    @property
    def disagreeing_rows(self) -> list[StrategyResult]:
        """Rows whose losses are beyond the tolerance."""
        agreements = [(row, self.agreement(row)) for row in self.rows]
        return [row for row, agreement in agreements if agreement is not None and not agreement.within]

    @property
    def finished(self) -> bool:
        """Whether every strategy ran or was refused, so that another run has nothing to add."""
        return not self.interrupted and all(row.outcome in ("ran", "refused") for row in self.rows)

    @property
    @override
    def ran_and_agrees(self) -> bool:
        return any(row.outcome == "ran" for row in self.rows[1:]) and not self.disagreeing_rows

    @override
    def screen(self, width: int = 80, next_steps: Sequence[str] = ()) -> str:
        answer, *wrong = self.verdict()
        if not self.disagreeing_rows:
            wrong = []
        failed = [row.strategy for row in self.rows if row.outcome in ("failed", "unlike")]
        answer += f"; {len(failed)} failed: {first_few(failed)}" if failed else ""
        reused = [row.strategy for row in self.rows if row.reused]
        limits = [
            self.unkept,
            *wrong,
            self.fp8,
            self.moments,
            f"{first_few(reused)}: reused from an earlier run, not timed in turns with the others" if reused else "",
            *([] if self.has_memory else [self.unwatched, RSS.text]),
        ]
        keys = ("strategy", "known_as", "median_step_s", f"{self.unit}_per_s", self._peak_key, "agreement")
        return Screen(
            answer=f"{answer}; {self.answer}" if self.answer else answer,
            warnings=limits,
            columns=choose_columns(self.columns(), *keys),
            rows=self.rows,
            reason=row_reason,
            next_steps=next_steps,
            last=[self.note],
        ).format(width)

    @property
    def _peak_key(self) -> str:
        """Key of the column with the memory that was recorded."""
        return "peak" if self.has_memory else "rss"

    def columns(self) -> list[Column[StrategyResult]]:
        """Return the columns of every table and file."""
        differences = {each.strategy: each for each in forecast_differences(self.forecast, self.rows)}
        return [
            Column("strategy", lambda row: row.strategy, right=False),
            library_name_column(self.library_names, dropped=1).of(lambda row: row.strategy),
            Column("agreement", self._agreement_text, right=False, page_format=lambda text: text.replace("!", " ✗")),
            Column("x", self._factor, "{:.2f}".format, key="factor", dropped=1),
            Column("peak", lambda row: largest_peak_bytes(row.memory) if row.memory else None, format_size),
            *self.measured_columns(lambda row: row, self.rank_count, self.rate, self.agreement),
            *(column.of(lambda row: differences.get(row.strategy)) for column in FORECAST_COLUMNS),
        ]

    def _agreement_text(self, row: StrategyResult) -> str | None:
        if row is self.reference:
            return "reference"
        agreement = self.agreement(row)
        return None if agreement is None else f"{agreement}{'' if agreement.within else '!'}"

    def _factor(self, row: StrategyResult) -> float | None:
        """Return the step time of a row in proportion to that of the baseline."""
        if self.baseline is None or not row.timed_seconds:
            return None
        return median(row.timed_seconds) / median(self.baseline.timed_seconds)

    @override
    def answer_lines(self) -> list[str]:
        return [text for text in (*self.verdict(), self.answer) if text]

    @override
    def tables(self, width: int) -> list[list[str]]:
        work = [((strategy,), one) for strategy, one in self.step_figures().items()]
        known = [row for row in self.rows if row.memory and row.outcome != "unlike"]
        strategies = [RanksMemory(row.name_until_failure, self.rank_count(row), row.memory) for row in known]
        memory = [*format_memory_tables(strategies, width), *format_sent_table(strategies, width)] if strategies else []
        main = [line for block in self.blocks(width) for line in block]
        return [main, format_work_table(("work",), work, width), memory]

    @override
    def blocks(self, width: int) -> list[list[str]]:
        """Return the lines of the header, then of each row; without column x if they would be too wide."""
        keys = ("strategy", "agreement", "spread", "factor", f"{self.unit}_per_s", self._peak_key)
        columns = choose_columns(self.columns(), *keys, agreement="loss", peak="allocated")
        shown = [replace(c, dropped=int(c.key == "factor"), short=None) for c in columns]
        return fitting_table(shown, self.rows, width=width, reason=row_reason)[1]

    @override
    def remarks_by_table(self) -> list[list[Remark]]:
        main = table_remarks(*self.row_notes(), *self.timing())
        if self.baseline is not None:
            main.append(Remark(column="x", text=f"x: step time in proportion to {self.baseline.strategy}"))
        if not self.has_memory:
            main += [RSS] if any(row.outcome == "ran" for row in self.rows) else []
            return [main, self.work_remarks(), []]
        known, measured = [account for row in self.rows for account in row.memory], self._rows_with_memory
        memory = describe_memory_columns(known)
        memory += table_remarks(*describe_peak_ranges(measured), *describe_setup_peaks(measured))
        memory += [SENT_REMARK] if sent_axes(known) or sends_across(known) else []
        memory += [ACROSS_REMARK] if sends_across(known) else []
        return [main, self.work_remarks(), memory]

    @property
    def _rows_with_memory(self) -> list[tuple[str, list[MemoryAccount]]]:
        return [(row.strategy, row.memory) for row in self.rows if row.memory]

    @override
    def closing_remarks(self) -> list[Remark]:
        forecast = describe_forecast(self.forecast, self.rows)
        return table_remarks(*forecast, self.fp8, self.moments, self.unwatched, self.unkept, self.note)

    @override
    def verdict(self) -> list[str]:
        """Return whether the strategies agree, in one sentence or several."""
        if self.interrupted:
            return ["interrupted: strategies without figures did not finish"]
        if self.reference is None:
            return ["no verdict: single, the reference for the other strategies, did not run"]
        judged = [(row, agreement) for row in self.rows if (agreement := self.agreement(row)) is not None]
        if not judged:
            return ["no verdict: no strategy except single ran"]
        steps, allowed = len(self.reference.losses), loss_tolerance(self.judged_as)
        wrong = [
            f"DISAGREES: {row.strategy} by {agreement.off:.1e} at step {agreement.step}{agreement.part_suffix}: "
            f"{_loss_furthest_off(row, agreement):.8g} instead of {_loss_furthest_off(self.reference, agreement):.8g}; "
            f"allowed in {self.judged_as}: {allowed:g}"
            for row, agreement in judged
            if not agreement.within
        ]
        if wrong:
            return wrong
        least = min((agreement.digits for _, agreement in judged if agreement.digits is not None), default=None)
        how = "bit for bit" if least is None else f"to {least} digits or more"
        strategies = f"all {len(judged)} strategies agree" if len(judged) > 1 else f"{judged[0][0].strategy} agrees"
        first, last = self.reference.losses[0], self.reference.losses[-1]
        where = f", on {self.describe_ranks()}" if self.machines > 1 else ""
        return [
            f"{strategies} with one process {how}, over {count_of(steps, 'step')}{where}",
            f"loss of one process: {first:.4f} at step 1, {last:.4f} at step {steps}",
        ]


def _loss_furthest_off(row: StrategyResult, agreement: Agreement) -> float:
    """Return the row's loss in the step with the largest difference."""
    return (row.parts[agreement.part] if agreement.part else row.losses)[agreement.step - 1]
