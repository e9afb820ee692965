"""Tables and sentences on what the ranks of an observed command did, as a terminal shows them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from unipar.memory.account import MemoryAccount, PhasePeak
from unipar.results.memory_tables import category_column, category_groups, format_mib
from unipar.results.observed_rank import ObservedRank, guess_precision
from unipar.results.observed_recipe import Recipe
from unipar.results.run_report import Report
from unipar.results.step_work.figures import step_figures
from unipar.utils.columns import Column, fitting_table, known_columns
from unipar.utils.text import count_of, cut_middle, first_few, format_duration, format_flops, format_size

_LONGEST_MODEL: Final = 60

STEP_PARTS: Final = ("data", "forward", "backward", "update", "between")
"""Parts of a step's time, in the order in which they are shown."""


def describe_script(ranks: Sequence[ObservedRank]) -> str:
    """Return what the script trains, with what, and on how many ranks."""
    first = ranks[0]
    by = f", called by {' in '.join(reversed(first.libraries))}" if first.libraries else " in the script's own loop"
    models = "; ".join(cut_middle(model, _LONGEST_MODEL) for model in first.models) or "no model that is still alive"
    optimizers = ", ".join(dict.fromkeys(first.optimizers)) or "an optimizer that is not known"
    return (
        f"{models}, {first.parameters:,} parameters{describe_dtypes(first)}, trained by {optimizers}{by}"
        f"; {count_of(first.size, 'rank')}; {describe_steps(first)}"
    )


def describe_dtypes(rank: ObservedRank) -> str:
    """Return the dtypes of trained parameters in words, with numbers if there are several."""
    if len(rank.dtypes) < 2:
        return "".join(f" in {dtype}" for dtype in rank.dtypes)
    return f" ({', '.join(f'{number:,} in {dtype}' for dtype, number in rank.dtypes.items())})"


def describe_steps(rank: ObservedRank) -> str:
    """Return how many steps there were, of how many backwards, and how many were skipped."""
    micros = max(rank.backwards, default=0)
    gathered = f" of {micros} backwards each" if micros > 1 else ""
    skipped = f", {rank.skipped} of them skipped by loss scaling" if rank.skipped else ""
    return f"{count_of(rank.steps, 'step')}{gathered}{skipped}"


def _part_column(phase: str) -> Column[ObservedRank]:
    return Column(
        phase,
        lambda rank: rank.phases.get(phase),
        format_duration,
        optional=True,
        dropped={"between": 1, "data": 2}.get(phase, 0),
    )


RANK_COLUMNS: Final[Sequence[Column[ObservedRank]]] = (
    Column("rank", lambda rank: rank.rank),
    Column("a step", lambda rank: rank.seconds, format_duration),
    *map(_part_column, STEP_PARTS),
    Column("waits", lambda rank: rank.waiting, "{:.0%}".format, optional=True),
    Column("loss", lambda rank: rank.losses[-1] if rank.losses else None, "{:.4f}".format, optional=True, dropped=3),
)
"""What each rank did in a step: medians of the steps in which nothing was recorded."""


def shown_ranks(ranks: Sequence[ObservedRank], most: int) -> list[ObservedRank]:
    """Return all ranks, or the first and as many of the slowest as there is room for."""
    if len(ranks) <= most:
        return list(ranks)
    slowest = sorted(ranks[1:], key=lambda rank: -(rank.seconds or 0.0))[: most - 1]
    return [ranks[0], *sorted(slowest, key=lambda rank: rank.rank)]


def format_ranks_table(ranks: Sequence[ObservedRank], width: int) -> list[str]:
    """Return the lines of a table with a row for each rank."""
    _, blocks = fitting_table(known_columns(RANK_COLUMNS, ranks), ranks, width=width)
    return [line for block in blocks for line in block]


def format_phases_table(account: MemoryAccount, width: int, *, only_peak: bool = False) -> list[str]:
    """Return the lines of a table of a rank's memory: its peak in each phase, or in the fullest one, by category."""
    columns = [
        Column[PhasePeak](f"MiB, rank {account.rank}", lambda phase: phase.name, right=False),
        Column[PhasePeak]("allocated", lambda phase: phase.peak, format_mib),
        *(category_column(head, group) for head, group in category_groups([account]).items()),
    ]
    rows = [account.peak] if only_peak else account.phases
    _, blocks = fitting_table(columns, rows, width=width)
    return [line for block in blocks for line in block]


def sent_rows(account: MemoryAccount) -> list[tuple[str, str, int]]:
    """Return group, collective and bytes of what a rank sends in a step."""
    along = account.sent_along or ({"data": account.sent} if account.sent else {})
    return [
        ("all ranks" if axis == "data" else axis, kind, size)
        for axis, kinds in along.items()
        for kind, size in kinds.items()
    ]


def describe_sent(account: MemoryAccount) -> list[str]:
    """Return a sentence on what a rank sends in a step; none if that was not recorded."""
    rows = sent_rows(account)
    if not rows:
        return ["sent in a step through torch.distributed: nothing"] if account.sent_by else []
    groups: dict[str, list[str]] = {}
    for group, kind, size in rows:
        groups.setdefault(group, []).append(f"{kind} {format_size(size)}")
    return ["sent in a step: " + "; ".join(f"{', '.join(kinds)} ({group})" for group, kinds in groups.items())]


def describe_work(ranks: Sequence[ObservedRank]) -> list[str]:
    """Return a sentence on the operations of a step on all ranks; none if they were not counted on one of them."""
    work = [rank.work for rank in ranks if rank.work is not None and rank.work.flops is not None]
    if len(work) < len(ranks):
        return []
    flops = sum(rank.flops or 0.0 for rank in work)
    precision, _ = guess_precision(ranks[0], ranks[0].recipe or Recipe())
    seconds = [max(times)] if (times := [rank.seconds for rank in ranks if rank.seconds is not None]) else []
    figures = step_figures(work, seconds, flops, precision)
    speed = "" if figures.flops_per_second is None else f"; {format_flops(figures.flops_per_second)}/s"
    mfu = "" if figures.mfu is None else f"; MFU {figures.mfu:.1%} in {precision}"
    where = f" on {count_of(len(ranks), 'rank')}" if ranks[0].size > 1 else ""
    return [f"forward and backward of a step: {format_flops(flops)}{where}, counted {work[0].flops_by}{speed}{mfu}"]


def describe_training(rank: ObservedRank, report: Report) -> list[str]:
    """Return a sentence on loss, gradient norm and learning rate, as far as they are known."""
    parts: list[str] = []
    if report.losses:
        (first, a), (last, b) = report.losses[0], report.losses[-1]
        parts.append(f"loss {a:.4f} at step {first}, {b:.4f} at step {last}")
    if lost := describe_not_finite(rank):
        parts.append(lost)
    if rank.norms:
        step, norm = max(rank.norms.items())
        clip = f", clipped at {rank.clip:g}" if rank.clip is not None else ""
        parts.append(f"gradient norm {norm:.4g} before the clip at step {step}{clip}")
    if known := {step: rates for step, rates in rank.rates.items() if rates}:
        step = max(known)
        parts.append(f"rate {', '.join(f'{rate:.3g}' for rate in dict.fromkeys(known[step]))}")
    return [f"rank {rank.rank}: {'; '.join(parts)}"] if parts else []


def describe_not_finite(rank: ObservedRank) -> str:
    """Return at which of the first steps the loss was not finite, or ""."""
    steps = [str(step) for step, loss in enumerate(rank.losses, 1) if not math.isfinite(loss)]
    return f"loss not finite at step {first_few(steps)}" if steps else ""


def describe_times(ranks: Sequence[ObservedRank]) -> str:
    """Return what the columns of the ranks' table mean, or "" if no step was timed."""
    if all(rank.seconds is None for rank in ranks):
        return ""
    waits = any(rank.waiting is not None for rank in ranks)
    return "a step: median of steps without recording" + (
        f"; waits: share of them spent waiting{', mostly for other ranks' if ranks[0].size > 1 else ''}"
        if waits
        else ""
    )
