"""compare.csv: its text, to the letter; and how far peaks lie apart."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import comparisons
from tests.support.compared_rows import FAR, ONE, SAME, compared
from tests.support.scalings import made as scaling
from tests.support.scalings import timed
from unipar.comparison import store
from unipar.memory.account import MemoryAccount, PhasePeak, ResidentMemory
from unipar.profiling.work import RankWork
from unipar.results.forecast.records import Forecast, ForecastPhase, StrategyForecast
from unipar.results.memory_tables import describe_peak_ranges
from unipar.results.row import StrategyOutcome, StrategyResult
from unipar.results.spreadsheet import COMPARISON_COLUMNS, format_comparison_csv, format_scaling_csv


def test_a_row_a_strategy(tmp_path: Path) -> None:
    """Beside compare.json: what is not known is empty, and a note with a comma stays out."""
    phase = PhasePeak(name="backward", peak=3_000_000, held={"parameters": 1_000_000, "activations": 2_000_000})
    account = MemoryAccount(
        rank=0,
        method="m",
        device="cpu",
        base=0,
        phases=(phase,),
        peaks=(3_000_000,),
        resident=ResidentMemory(base=1_000, peak=3_501_000, own=9),
        sent_along={"data": {"all_reduce": 600}},
        sent_by="records",
    )
    planned = ForecastPhase(name="backward", peak=2_500_000, held={"parameters": 1_000_000, "activations": 1_500_000})
    strategy = StrategyForecast(strategy="native/nothing", phases=(planned,), sent={"data": {"all_reduce": 700}})
    ddp = SAME.changed(memory=[account, account])
    found = compared(ONE, ddp, FAR, StrategyResult(strategy="horovod/nothing", outcome="absent", note="not here, so"))
    found = found.changed(forecast=Forecast(strategies=(strategy,)))
    store.write_comparison(tmp_path, {}, found)
    text = (tmp_path / "compare.csv").read_text("utf-8")
    assert text == format_comparison_csv(found)
    assert text.splitlines() == [
        "strategy,outcome,digits,within,median_step_s,samples_per_s,allocated,resident,predicted_on_cuda,"
        "measured_on_cuda,reserved,host,parameters,masters,gradients,optimizer,averages,communication,buffers,activations,"
        "temporaries,library,runtime,unattributed,weight_per_s,step_flops,flops_per_s,mfu,waits_least,waits_most,graph_breaks,recompiles,"
        "planned_peak,measured_peak,planned_sent,measured_sent",
        "single,ran,,,0.02,400,,,,,,,,,,,,,,,,,,,,,,,,,,,,,,",
        "native/nothing,ran,all,yes,0.01,800,3000000,3500000,738197504,,,,1000000,0,0,0,0,0,0,2000000,0,0,0,0,,,,,,,,,"
        "2500000,3000000,700,600",
        "deepspeed/gradients,ran,1,no,0.01,800,,,,,,,,,,,,,,,,,,,,,,,,,,,,,,",
        "horovod/nothing,absent,,,,,,,,,,,,,,,,,,,,,,,,,,,,,,,,,,",
    ]


@pytest.mark.parametrize(("outcome", "known"), [("failed", False), ("unlike", False), ("waits", True), ("ran", True)])
def test_what_a_strategy_held_till_it_failed_is_not_in_the_sheet(outcome: StrategyOutcome, *, known: bool) -> None:
    """A failed strategy has no memory in the CSV; one whose memory was recorded completely has, even if not timed."""
    accounts = [comparisons.account("native/nothing", rank) for rank in (0, 1)]
    lines = format_comparison_csv(compared(ONE, SAME.changed(outcome=outcome, memory=accounts))).splitlines()
    held = dict(zip(lines[0].split(","), lines[2].split(","), strict=True))
    assert (held["allocated"], held["predicted_on_cuda"], held["parameters"]) == (
        ("186205122", "920649728", "35707392") if known else ("", "", "")
    )
    assert {held[name] for name in COMPARISON_COLUMNS[6:]} == {""} or known


def test_a_row_a_world() -> None:
    """Rows of worlds of several sizes have all figures; a failed world has none."""
    late = timed("native/nothing", 4, 0.02, "weak")
    lost = late[0], late[1].changed(outcome="failed", note="no, not so", seconds=[], peak_rss=[])
    work = [RankWork(flops=8e9, weights=(64.0,) * 5, waits=((share, 1.0),)) for share in (0.1, 0.2)]
    small, large = timed("native/nothing", 1, 0.08, "strong", "weak"), timed("native/nothing", 2, 0.05, "strong")
    full = large[0], large[1].changed(memory=[comparisons.account("native/nothing", 0)] * 2, work=work)
    assert format_scaling_csv(scaling(small, full, lost)).splitlines() == [
        "strategy,ranks,scaling,samples,micro,accumulate,outcome,digits,within,median_step_s,samples_per_s,speed_up,"
        "efficiency,allocated,resident,predicted_on_cuda,measured_on_cuda,reserved,host,parameters,masters,gradients,"
        "optimizer,averages,communication,buffers,activations,temporaries,library,runtime,unattributed,weight_per_s,step_flops,"
        "flops_per_s,mfu,waits_least,waits_most,graph_breaks,recompiles",
        "native/nothing,1,both,8,8,1,ran,,,0.08,100,1,1,,,,,,,,,,,,,,,,,,,,8e+09,1e+11,,,,,",
        "native/nothing,2,strong,8,4,1,ran,all,yes,0.05,160,1.6,0.8,186205122,199239481,920649728,,,,"
        "35707392,0,35707392,71414784,0,35707392,0,0,5097230,0,2570932,0,1280,8e+09,1.6e+11,,0.1,0.2,,",
        "native/nothing,4,weak,32,8,1,failed,,,,,,,,,,,,,,,,,,,,,,,,,,,,,,,,",
    ]


def test_peaks_that_differ_from_step_to_step() -> None:
    """Least and most of the watched steps, where they differ by what is shown."""
    steady = comparisons.account("native/nothing", 0)
    moved = steady.model_copy(update={"peaks": (100 * 2**20, 120 * 2**20, 110 * 2**20)})
    assert describe_peak_ranges([("a", [steady]), ("b", [moved])]) == [
        "peaks of the recorded steps: b 100 MiB to 120 MiB; equal in the other strategies"
    ]
    assert describe_peak_ranges([("a", [steady])]) == []
    assert describe_peak_ranges([("a", [steady.model_copy(update={"peaks": (1,)})]), ("b", [moved])]) == [
        "peaks of the recorded steps: b 100 MiB to 120 MiB"
    ]
