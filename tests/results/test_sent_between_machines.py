"""Bytes between machines in a comparison's table and on its page."""

from __future__ import annotations

import json
from pathlib import Path

from unipar.memory.account import MemoryAccount, PhasePeak
from unipar.report.data.comparison_data import ComparisonPageData
from unipar.report.pages.comparison_page import render_comparison
from unipar.results.comparison import Comparison
from unipar.results.row import StrategyResult

COUNTED = "between machines: those of them in calls whose ranks are on several machines, with the whole tensor as well"


def sending(rank: int, across: int) -> MemoryAccount:
    peak = PhasePeak(name="update", peak=2**20, held={"parameters": 2**20})
    sent = {"all_reduce": 3 * 2**20}
    return MemoryAccount(
        rank=rank,
        method="m",
        device="cpu",
        base=1,
        phases=(peak,),
        peaks=(2**20,),
        sent=sent,
        sent_along={"data": sent},
        sent_across=across,
        sent_by="calls",
    )


def compared(*across: int) -> Comparison:
    """One strategy, whose ranks send so much between machines."""
    memory = [sending(rank, size) for rank, size in enumerate(across)]
    row = StrategyResult(
        strategy="native/nothing", outcome="ran", losses=[1.0], seconds=[[0.1]], memory=memory, peak_rss=[1, 1]
    )
    machines = 2 if any(across) else 1
    return Comparison(name="x", out="x", precision="fp32", warmup=1, samples=8, ranks=2, machines=machines, rows=[row])


def test_the_table() -> None:
    """Beside those of the data, of the rank that has most; nothing on one machine."""
    lines = compared(0, 2**20).tables(120)[2]
    at = next(i for i, line in enumerate(lines) if line.startswith("sent "))
    assert lines[at:] == [
        "sent               data  between machines",
        "native/nothing  3.0 MiB           1.0 MiB",
    ]
    assert COUNTED in compared(0, 2**20).table(120).splitlines()
    assert "between machines" not in compared(0, 0).table(120)


def test_the_page(tmp_path: Path) -> None:
    """A column of the table by collective, and what it counts."""
    (tmp_path / "compare.json").write_text(json.dumps(compared(2**20, 0).model_dump(mode="json")), encoding="utf-8")
    text = render_comparison(ComparisonPageData.read(tmp_path))
    sent = text[text.index("What a step sends") :].partition("</section>")[0]
    assert '<th scope="col">between machines</th>' in sent
    assert "Between machines: those of them in calls whose ranks are on several machines" in sent
