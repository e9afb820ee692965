"""A plan as text: its table, in as many columns as fit, below what to take, and what the numbers are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Final

from unipar.backend import Category
from unipar.planning.planned_strategy import PlannedStrategies, PlannedStrategy
from unipar.planning.recommendation import recommend
from unipar.planning.speed import StepSpeed
from unipar.prediction.timeline import MemoryPlace
from unipar.utils.columns import Column, Reason, fitting_table, known_columns
from unipar.utils.table import wrap_lines
from unipar.utils.text import format_duration, format_rate, format_size

_CATEGORIES: Final[dict[str, tuple[Category, ...]]] = {
    "param": ("parameters", "masters", "buffers"),
    "grad": ("gradients",),
    "optim": ("optimizer",),
    "ema": ("averages",),
    "comm": ("communication",),
    "activ": ("activations",),
    "temp": ("temporaries",),
    "runtime": ("runtime",),
}
"""Categories in each column of the table."""

_OUTSIDE_REMARKS: Final[dict[MemoryPlace, str]] = {
    "host": "host: bytes of a rank that are offloaded to the host's memory, pinned ones rounded up as torch does; "
    "the ranks of a machine share that memory, and 'fits' does not count it",
    "disk": "disk: bytes of the files in which a rank keeps what is offloaded; 'fits' does not count them",
}
"""Explanation of the column of each place other than the device."""

_SENT_REMARK: Final = "sent: bytes of a rank's collectives in a step, as compare counts them"
_ACROSS_REMARK: Final = "between machines: those of collectives whose ranks are on several machines"

LIBRARY_NAME: Final = "known as"
"""Head of the column with what a strategy's library calls it; the screen has it, all of the plan as text has not."""

_MOST_WAYS = 3


def format_plan(plan: PlannedStrategies, width: int) -> str:
    """Return the plan as text, of lines of at most this many characters where that is possible."""
    columns, blocks = fitting_table(
        [column for column in plan_columns(plan) if column.head != LIBRARY_NAME],
        [*(row for row in plan.rows if not row.refusal), *merge_refusals(plan)],
        width=width,
        reason=lambda row: Reason("refused", row.refusal) if row.refusal else None,
        leading=2,
    )
    answer = wrap_lines([*describe_recommendations(plan), *ways_to_fit(plan)], width)
    parts = [answer, chain.from_iterable(blocks), wrap_lines(_explanations(plan, columns), width)]
    return "\n\n".join(map("\n".join, parts))


def plan_columns(plan: PlannedStrategies) -> list[Column[PlannedStrategy]]:
    """Return the columns of the table; those in which no row has anything are left out."""
    planned = [row for row in plan.rows if not row.refusal]
    on_gpus = plan.device != "cpu"
    weighs = "; weight: what the task's weight counts, such as tokens" if plan.units == "weight" else ""

    def speed_of(row: PlannedStrategy) -> StepSpeed | None:
        return row.speed

    columns: list[Column[PlannedStrategy]] = [
        Column("strategy", lambda row: row.strategy, right=False),
        Column("ranks", lambda row: row.ranks or "all"),
        Column(
            LIBRARY_NAME, lambda row: row.library_name or None, right=False, shortened=True, dropped=8, optional=True
        ),
        Column("micro", lambda row: row.micro, dropped=5),
        Column(
            "peak",
            lambda row: row.peak.peak,
            format_size,
            remark="peak: tensors of the fullest rank at the fullest moment of a step"
            + (
                ", CUDA's context and NCCL; not in it: gaps between tensors, scratch memory of kernels"
                if on_gpus
                else "; not in it: what libraries and Python hold for themselves, and copies that gloo frees late, "
                "which 'fits' counts"
            ),
        ),
        Column("in", lambda row: row.peak.phase, right=False, dropped=2),
        *(
            _bytes_column(name, partial(_held_bytes, categories), dropped=1, optional=name == "ema")
            for name, categories in _CATEGORIES.items()
            if on_gpus or name != "runtime"
        ),
        *(
            _bytes_column(place, lambda row, place=place: row.offloaded_to(place), remark, optional=True)
            for place, remark in _OUTSIDE_REMARKS.items()
        ),
        _bytes_column("sent", lambda row: row.sent_bytes, _SENT_REMARK, dropped=3, optional=True),
        _bytes_column("between machines", lambda row: row.sent_across, _ACROSS_REMARK, optional=True),
    ]
    if plan.machine:
        remark = (
            f"step, {plan.units}/s, MFU: predicted for {plan.machine}{weighs}; MFU: the model's own operations, of the "
            "device's peak"
        )
        speed = [
            Column[StepSpeed]("step", lambda speed: speed.seconds, format_duration, remark=remark),
            Column[StepSpeed](f"{plan.units}/s", lambda speed: speed.rate, format_rate),
            Column[StepSpeed]("MFU", lambda speed: speed.mfu, "{:.1%}".format, dropped=4),
        ]
        columns += [column.of(speed_of) for column in speed]
    if plan.memory is not None:
        remark = (
            f"fits: at most {format_size(plan.memory)} less {plan.headroom:.0%}; largest micro: the most "
            f"{plan.counted} a microbatch that do, with the total batch kept"
        )
        fits = Column[PlannedStrategy](
            "fits", lambda row: "yes" if row.fits(plan.limit) else "no", remark=remark, right=False
        )
        columns += [fits, Column("largest micro", _largest_micro, dropped=7)]
    return known_columns(columns, planned)


def _bytes_column(
    head: str,
    size_of: Callable[[PlannedStrategy], int],
    remark: str = "",
    *,
    dropped: int = 0,
    optional: bool = False,
) -> Column[PlannedStrategy]:
    """Return a column of bytes, which is empty where there are none."""
    return Column(
        head, lambda row: size_of(row) or None, format_size, remark=remark, dropped=dropped, optional=optional
    )


def _held_bytes(categories: Sequence[Category], row: PlannedStrategy) -> int:
    return sum(row.peak.held.get(category, 0) for category in categories)


def _largest_micro(row: PlannedStrategy) -> int | None:
    return row.largest or None


def merge_refusals(plan: PlannedStrategies) -> Iterator[PlannedStrategy]:
    """Yield refused rows; a reason that several strategies have is one row at the end, one on all ranks has 0 ranks."""
    strategies_refused: dict[tuple[int, str], list[str]] = {}
    refusals_of: dict[str, list[str]] = {}
    for row in plan.rows:
        refusals_of.setdefault(row.strategy, []).append(row.refusal)
        if row.refusal:
            strategies_refused.setdefault((row.ranks, row.refusal), []).append(row.strategy)
    everywhere = {strategy for strategy, each in refusals_of.items() if len(each) > 1 and set(each) == {each[0]}}
    shown: set[str] = set()
    for row in plan.rows:
        if row.refusal and len(strategies_refused[row.ranks, row.refusal]) == 1 and row.strategy not in shown:
            yield replace(row, ranks=0) if row.strategy in everywhere else row
            shown |= {row.strategy} & everywhere
    for (ranks, refusal), strategies in strategies_refused.items():
        if len(strategies) > 1:
            full = len(strategies) == sum(row.ranks == ranks for row in plan.rows)
            yield PlannedStrategy(f"{'all' if full else 'other'} {len(strategies)} strategies", ranks, refusal=refusal)


def ways_to_fit(plan: PlannedStrategies) -> Iterator[str]:
    """Yield what would have to change for rows of which no microbatch fits; the others' is in the table."""
    for row in (row for row in plan.rows if row.ways and row.largest is None):
        yield f"{row.strategy} on {row.ranks}: {'; '.join(row.ways[:_MOST_WAYS])}"


def describe_recommendations(plan: PlannedStrategies, *, shares: bool = True) -> Iterator[str]:
    """Yield what to take on each number of ranks; `shares`: with the shares of a step."""
    for each in recommend(plan.rows, plan.limit, exclude=plan.exclude):
        ranks = f"{each.ranks} rank{'s' * (each.ranks != 1)}"
        if each.row is None:
            yield f"take, on {ranks}: {each.why}"
        else:
            why = each.why if shares else each.reason
            yield f"take, on {ranks}: {each.row.strategy} with micro {each.micro}: {why}"


def _explanations(plan: PlannedStrategies, columns: Sequence[Column[PlannedStrategy]]) -> Iterator[str]:
    took = (
        f"; model() needed their values: {format_size(plan.allocated)}"
        if plan.allocated
        else ", without allocating them"
    )
    yield f"{plan.parameters:,} parameters; planned in {plan.seconds:.1f} s of CPU{took}"
    if plan.checkpoint is not None:
        each, once = plan.checkpoint
        shared = f", and {format_size(once)} of frozen weights once" if once else ""
        yield f"one checkpoint: {format_size(each)} of tensors{shared}"
    if plan.device == "cpu":
        built = any(row.peak.phase == "built" for row in plan.rows if not row.refusal)
        note = ", where the whole model that rank 0 creates at set-up (built) does not count" if built else ""
        yield f"planned for the CPU; --device cuda or --machine plans for GPUs{note}"
    for column in columns:
        if column.remark:
            yield column.remark
    yield from plan.notes
