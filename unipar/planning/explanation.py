"""Why a peak is as high as it is: its terms by category and block, down to the tensor's name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from unipar.backend import Category
from unipar.errors import ConfigError
from unipar.planning.peaks import PredictedPeak
from unipar.planning.planned_strategy import PlannedStrategies, PlannedStrategy
from unipar.prediction.timeline import Term
from unipar.utils.text import closest, count_of, format_size

OUTSIDE: Final = "outside the blocks"
_TENSORS_SHOWN = 3
_BLOCKS_SHOWN = 4
_OFFLOADED_SHOWN = 8


@dataclass(frozen=True)
class TermGroup:
    """Terms of one category in one block; their sizes add up to `size`."""

    category: Category
    block: str
    terms: tuple[Term, ...]
    """The largest first."""

    @property
    def size(self) -> int:
        """Bytes of all of them."""
        return sum(term.size for term in self.terms)


def group_terms(peak: PredictedPeak, blocks: Sequence[str]) -> dict[Category, list[TermGroup]]:
    """Return the terms of a peak by category and block, the largest first; together they are the peak."""
    by_block: dict[tuple[Category, str], list[Term]] = {}
    for term in peak.terms:
        if term.size:
            by_block.setdefault((term.category, block_of(term.name, blocks)), []).append(term)
    groups = [
        TermGroup(category, block, tuple(sorted(terms, key=lambda term: -term.size)))
        for (category, block), terms in by_block.items()
    ]
    by_category: dict[Category, list[TermGroup]] = {}
    for group in sorted(groups, key=lambda group: -group.size):
        by_category.setdefault(group.category, []).append(group)
    return dict(sorted(by_category.items(), key=lambda item: -sum(group.size for group in item[1])))


def block_of(name: str, blocks: Sequence[str]) -> str:
    """Return the block in whose name a term's begins, after the operation if it names one."""
    place = name.rpartition(" in ")[2]
    inside = [b for b in blocks if place == b or place.startswith((f"{b}.", f"{b} ", f"{b},"))]
    return max(inside, key=len, default=OUTSIDE)


def explain_row(plan: PlannedStrategies, strategy: str, ranks: int | None, *, every: bool = False) -> str:
    """Return the peak of a strategy's row in words; raise ConfigError if the plan has no such row."""
    row = _find_row(plan, strategy, ranks)
    if row.refusal:
        return f"{row.strategy} on {count_of(row.ranks, 'rank')}: {row.refusal}"
    peak = row.peak
    lines = [
        f"{row.strategy} on {count_of(row.ranks, 'rank')}, micro {row.micro}: {format_size(peak.peak)} in {peak.phase}",
        "phases: " + ", ".join(f"{phase.phase} {format_size(phase.peak)}" for phase in row.phases),
        "",
    ]
    for category, groups in group_terms(peak, plan.blocks).items():
        size = sum(group.size for group in groups)
        lines.append(f"{category:<14} {format_size(size):>9}  {size / peak.peak:>4.0%}  {size:,} bytes")
        shown = groups if every else groups[:_BLOCKS_SHOWN]
        for group in shown:
            lines.append(f"  {format_size(group.size):>9}  {group.block}{_in_short(group, every=every)}")
            if every:
                lines += [f"    {format_size(term.size):>9}  {term.name}" for term in group.terms]
        if rest := groups[len(shown) :]:
            lines.append(f"  {format_size(sum(g.size for g in rest)):>9}  in {count_of(len(rest), 'further place')}")
    lines += [f"{'peak':<14} {format_size(peak.peak):>9}  100%  {peak.peak:,} bytes"]
    for outside in row.offloaded:
        lines += ["", f"on the {outside.place}, beside it: {format_size(outside.size)}  {outside.size:,} bytes"]
        shown = [term for term in outside.terms if term.size][: None if every else _OFFLOADED_SHOWN]
        lines += [f"  {format_size(term.size):>9}  {term.category}: {term.name}" for term in shown]
        if rest := [term for term in outside.terms if term.size][len(shown) :]:
            size = format_size(sum(term.size for term in rest))
            lines.append(f"  {size:>9}  {count_of(len(rest), 'further tensor')}")
    if row.late:
        lines += [
            "",
            f"up to {format_size(row.late)} more for a moment, which 'fits' counts: gloo's scratch memory, and what it "
            "frees late",
        ]
    if row.ways:
        lines += ["", f"to fit: {'; '.join(row.ways)}"]
    if not every:
        lines += ["", "every tensor: --all"]
    return "\n".join(lines)


def _in_short(group: TermGroup, *, every: bool) -> str:
    if every:
        return ""
    names = [f"{term.name} {format_size(term.size)}" for term in group.terms[:_TENSORS_SHOWN]]
    rest = len(group.terms) - len(names)
    return f": {', '.join(names)}" + (f" and {rest} more" if rest else "")


def _find_row(plan: PlannedStrategies, strategy: str, ranks: int | None) -> PlannedStrategy:
    rows = [row for row in plan.rows if row.strategy == strategy and ranks in (None, row.ranks)]
    if not rows:
        planned = list(dict.fromkeys(row.strategy for row in plan.rows))
        near = closest(strategy, planned)
        where = "" if ranks is None else f" on {count_of(ranks, 'rank')}"
        way = f"did you mean {near}? " if near and near != strategy else ""
        raise ConfigError(f"why {strategy}: the plan has no such row{where}; {way}It has {', '.join(planned)}")
    if len(rows) > 1:
        numbers = ", ".join(str(row.ranks) for row in rows)
        raise ConfigError(
            f"why {strategy}: it is planned on {numbers} ranks; name one of them (--world {rows[-1].ranks})"
        )
    return rows[0]
