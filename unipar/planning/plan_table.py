"""A plan as text: its table, in as many columns as fit, what to take, and what the numbers are."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from unipar.backend import Category
from unipar.backend.prediction.timeline import MemoryPlace
from unipar.planning.peaks import OUTSIDE_DEVICE
from unipar.planning.planned_cell import PlannedCell, PlannedCells
from unipar.planning.recommendation import recommend
from unipar.utils.table import format_table
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

_DROPPED_FIRST: Final = (tuple(_CATEGORIES), ("in",), ("sent",), ("MFU",), ("micro",), ("largest micro",))
"""Columns that are left out where the table is too wide, in this order."""

_LEFT: Final = ("cell", "in", "fits")

_MOST_WAYS = 3


def format_plan(plan: PlannedCells, width: int) -> str:
    """Return the plan as text, of lines of at most so many characters where that is possible."""
    columns = _columns(plan)
    table = _table(plan, columns, width)
    for names in _DROPPED_FIRST:
        if max(map(len, table.splitlines())) <= width:
            break
        columns = {name: show for name, show in columns.items() if name not in names}
        table = _table(plan, columns, width)
    remarks = [*_ways(plan), *_recommended(plan), *_explanations(plan, columns)]
    lines = [line for text in remarks for line in textwrap.wrap(text, width, subsequent_indent="  ")]
    return "\n".join([table, "", *lines])


Shown = Callable[[PlannedCell], str]


def _columns(plan: PlannedCells) -> Mapping[str, Shown]:
    """Return how each column shows a row; those in which no row has anything are left out."""
    planned = [row for row in plan.rows if not row.refusal]

    def size_of(categories: Sequence[Category]) -> Shown:
        def shown(row: PlannedCell) -> str:
            size = sum(row.peak.held.get(category, 0) for category in categories)
            return format_size(size) if size else "-"

        return shown

    columns: dict[str, Shown] = {
        "cell": lambda row: row.cell,
        "ranks": lambda row: str(row.ranks),
        "micro": lambda row: str(row.micro),
        "peak": lambda row: format_size(row.peak.peak),
        "in": lambda row: row.peak.phase,
        **{name: size_of(categories) for name, categories in _CATEGORIES.items() if name != "runtime"},
    }
    if not any("averages" in row.peak.held for row in planned):
        del columns["ema"]
    if plan.device != "cpu":
        columns["runtime"] = size_of(_CATEGORIES["runtime"])
    for place in OUTSIDE_DEVICE:
        if any(row.offloaded_to(place) for row in planned):
            columns[place] = _size_offloaded(place)
    if any(row.sent for row in planned):
        columns["sent"] = lambda row: format_size(row.sent_bytes) if row.sent else "-"
    if any(row.sent_across for row in planned):
        columns["between machines"] = lambda row: format_size(row.sent_across) if row.sent_across else "-"
    if plan.machine:
        columns["step"] = lambda row: format_duration(row.speed.seconds) if row.speed else "-"
        columns[f"{plan.units}/s"] = lambda row: format_rate(row.speed.rate) if row.speed else "-"
        columns["MFU"] = lambda row: f"{row.speed.mfu:.1%}" if row.speed else "-"
    if plan.limit is not None:
        columns["fits"] = lambda row: "yes" if row.fits(plan.limit) else "no"
        columns["largest micro"] = lambda row: str(row.largest or "-")
    return columns


def _size_offloaded(place: MemoryPlace) -> Shown:
    def shown(row: PlannedCell) -> str:
        size = row.offloaded_to(place)
        return format_size(size) if size else "-"

    return shown


def _table(plan: PlannedCells, columns: Mapping[str, Shown], width: int) -> str:
    right = [place for place, name in enumerate(columns) if name not in _LEFT]
    return format_table(tuple(columns), list(_rows(plan, columns)), right=right, width=width)


def _rows(plan: PlannedCells, columns: Mapping[str, Shown]) -> Iterator[Sequence[str]]:
    """Yield the texts of each row; a refusal of several cells is one row at the end, one on all ranks is one row."""
    cells_refused: dict[tuple[int, str], list[str]] = {}
    refusals_of: dict[str, list[str]] = {}
    for row in plan.rows:
        refusals_of.setdefault(row.cell, []).append(row.refusal)
        if row.refusal:
            cells_refused.setdefault((row.ranks, row.refusal), []).append(row.cell)
    told: set[str] = set()
    for row in plan.rows:
        if not row.refusal:
            yield [show(row) for show in columns.values()]
        elif len(cells_refused[row.ranks, row.refusal]) == 1 and row.cell not in told:
            everywhere = len(refusals_of[row.cell]) > 1 and set(refusals_of[row.cell]) == {row.refusal}
            told |= {row.cell} if everywhere else set()
            yield row.cell, "all" if everywhere else str(row.ranks), row.refusal
    for (ranks, refusal), cells in cells_refused.items():
        if len(cells) > 1:
            whole = len(cells) == sum(row.ranks == ranks for row in plan.rows)
            yield f"{'all' if whole else 'other'} {len(cells)} cells", str(ranks), refusal


def _ways(plan: PlannedCells) -> Iterator[str]:
    """Yield what would have to change for rows of which no microbatch fits; the others' is in the table."""
    for row in (row for row in plan.rows if row.ways and row.largest is None):
        yield f"{row.cell} on {row.ranks}: {'; '.join(row.ways[:_MOST_WAYS])}"


def _recommended(plan: PlannedCells) -> Iterator[str]:
    for each in recommend(plan.rows, plan.limit, exclude=plan.exclude):
        ranks = f"{each.ranks} rank{'s' * (each.ranks != 1)}"
        if each.row is None:
            yield f"take, on {ranks}: {each.why}"
        else:
            yield f"take, on {ranks}: {each.row.cell} with micro {each.micro}: {each.why}"


def _explanations(plan: PlannedCells, columns: Mapping[str, Shown]) -> Iterator[str]:
    took = (
        f"; model() needed their values: {format_size(plan.allocated)}"
        if plan.allocated
        else ", without allocating them"
    )
    yield f"{plan.parameters:,} parameters; planned in {plan.seconds:.1f} s of CPU{took}"
    if plan.checkpoint is not None:
        yield f"one checkpoint: {format_size(plan.checkpoint)} of tensors"
    if plan.device == "cpu":
        built = any(row.peak.phase == "built" for row in plan.rows if not row.refusal)
        whole = ", where the whole model that rank 0 creates at set-up (built) does not count" if built else ""
        yield f"planned for the CPU; --device cuda or --machine plans for GPUs{whole}"
        yield (
            "peak: tensors of the fullest rank at the fullest moment of a step; not in it: what libraries and Python "
            "hold for themselves, and copies that gloo frees late, which 'fits' counts"
        )
    else:
        yield (
            "peak: tensors of the fullest rank at the fullest moment of a step, CUDA's context and NCCL; not in it: "
            "gaps between tensors, scratch memory of kernels"
        )
    if "sent" in columns:
        yield "sent: bytes of a rank's collectives in a step, as compare counts them"
    if "between machines" in columns:
        yield "between machines: those of collectives whose ranks are on several machines"
    if "host" in columns:
        yield (
            "host: bytes of a rank that are offloaded to the host's memory, pinned ones rounded up as torch does; the "
            "ranks of a machine share that memory, and 'fits' does not count it"
        )
    if "disk" in columns:
        yield "disk: bytes of the files in which a rank keeps what is offloaded; 'fits' does not count them"
    if plan.machine:
        weighs = "; weight: what the task's weight counts, such as tokens" if plan.units == "weight" else ""
        yield (
            f"step, {plan.units}/s, MFU: predicted for {plan.machine}{weighs}; MFU: the model's own operations, of the "
            "device's peak"
        )
    if plan.memory is not None:
        yield (
            f"fits: at most {format_size(plan.memory)} less {plan.headroom:.0%}; largest micro: the most "
            f"{plan.counted} a microbatch that do, with the total batch kept"
        )
    yield from plan.notes
