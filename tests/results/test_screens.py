"""Screens of `compare`, `scale` and `verify`: the answer first, at most 24 lines of 80 characters."""

from __future__ import annotations

from tests.support.compared_rows import FAR, ONE, SAME, compared, ran
from tests.support.scalings import made, one_strategy, timed
from tests.support.verifications import cut_dependent_verdicts, disagreeing_verdicts
from unipar.results.comparison import Comparison
from unipar.results.row import StrategyResult
from unipar.results.verdicts import Verdict, Verdicts

NAMES = {
    "single": "one process",
    "native/nothing": "DDP",
    "native/optimizer": "ZeroRedundancyOptimizer",
    "deepspeed/gradients+library": "ZeRO-2",
}
ANSWER = (
    "native/parameters is smallest: 119 MiB on its largest rank, 36 % less than native/nothing, mostly optimizer "
    "states (68 MiB to 34 MiB); native/nothing is fastest: 200 ms a step, but the difference from horovod/nothing is "
    "within noise."
)
REFUSED = StrategyResult(strategy="accelerate/parameters", outcome="refused", note="its FSDP2 is not there yet; " * 3)
FAILED = StrategyResult(strategy="horovod/nothing", outcome="failed", note="rank 1 died\nits log")


def test_compare() -> None:
    """Answer, table with the libraries' names, commands, page; a reason is cut where the screen ends."""
    found = compared(ONE, SAME, ran("native/optimizer", [4.0, 3.5, 3.0]), REFUSED, note="page: x", library_names=NAMES)
    assert found.screen(76, ["unipar verify x.yaml"]).splitlines() == [
        "all 2 strategies agree with one process bit for bit, over 3 steps",
        "RSS: peak of the largest rank; not for ranking: allocators keep freed memory",
        "",
        "strategy               known as          step  samples/s      RSS  agreement",
        "single                 one process      20 ms        400  600 MiB  reference",
        "native/nothing         DDP              10 ms        800  600 MiB  same bits",
        "native/optimizer       ZeroRedundan...  10 ms        800  600 MiB  same bits",
        "accelerate/parameters  refused: its FSDP2 is not there yet; its FSDP2 is ...",
        "",
        "next: unipar verify x.yaml",
        "page: x",
    ]


def test_ten_strategies_fit_in_twenty_four_lines() -> None:
    """With the longest names, a long answer, three commands and the page."""
    strategies = [ran(f"native/{i}", [4.0, 3.5, 3.0]) for i in range(8)]
    long = ran("deepspeed/gradients+library", [4.0, 3.5, 3.0])
    names = NAMES | {"native/0": "ZeroRedundancyOptimizer"}
    found = compared(
        ONE, *strategies, long, answer=ANSWER, note="page: runs/x/compare/report.html", library_names=names
    )
    steps = ["unipar verify x.yaml", "unipar scale x.yaml --world 1,2", "unipar compare x.yaml --details"]
    lines = found.screen(80, steps).splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("all 9 strategies agree with one process bit for bit, over 3 steps;")
    assert any(line.startswith("deepspeed/gradients+library  ZeRO-2 ") for line in lines)


def test_compare_says_what_changes_the_answer() -> None:
    """A strategy that failed, one that disagrees, one that was reused, and results that were not kept."""
    found = compared(ONE, SAME.changed(reused=True), FAILED, unkept="no room on the disk")
    assert found.screen().splitlines()[:4] == [
        "native/nothing agrees with one process bit for bit, over 3 steps; 1 failed:",
        "  horovod/nothing",
        "no room on the disk",
        "native/nothing: reused from an earlier run, not timed in turns with the others",
    ]
    assert "horovod/nothing  failed: rank 1 died" in found.screen().splitlines()
    assert (
        compared(ONE, SAME, FAR)
        .screen()
        .startswith(
            "DISAGREES: deepspeed/gradients by 1.0e-01 at step 3: 3.1 instead of 3; allowed\n  in fp32: 2e-06\n"
        )
    )


def test_many_failures_are_a_line() -> None:
    """Fourteen strategies, of which four failed: the others' rows, and a line that says where to read on."""
    strategies = [ran(f"native/{i}", [4.0, 3.5, 3.0]) for i in range(10)]
    failed = [FAILED.changed(strategy=f"horovod/{i}") for i in range(4)]
    lines = compared(ONE, *strategies, *failed).screen().splitlines()
    assert sum(line.startswith("native/") for line in lines) == 10
    assert lines[0].endswith("over 3 steps; 4 failed:")
    assert lines[-2:] == [
        "4 failed: horovod/0, horovod/1, horovod/2 and 1 more (reasons: --details, or the",
        "  page)",
    ]


def test_scale() -> None:
    """Parts of the ideal speed, what the ranks share, and the table."""
    found = one_strategy().changed(note="page: x", library_names=NAMES)
    assert found.screen(80, ["unipar plan x.yaml --world 8,64"]).splitlines() == [
        "Part of the ideal speed: strong scaling: 80 % for native/nothing on 2 ranks;",
        "  weak scaling: 80 % for native/nothing on 2 ranks; the losses of strong scaling",
        "  agree with the smallest world's bit for bit",
        "measured on one machine: 2 cores, 1 thread a rank; ranks share its memory and",
        "  caches, but no cores",
        "",
        "strategy        ranks  scaling  known as    step  samples/s  efficiency",
        "native/nothing      1  both     DDP        80 ms        100       100 %",
        "native/nothing      2  strong   DDP        50 ms        160        80 %",
        "native/nothing      2  weak     DDP       100 ms        160        80 %",
        "",
        "next: unipar plan x.yaml --world 8,64",
        "page: x",
    ]


def test_scale_that_disagrees() -> None:
    """Which world differs, and by how much, is a part of the answer."""
    one = timed("native/nothing", 1, 0.08, "strong", "weak")
    lines = made(one, timed("native/nothing", 2, 0.05, "strong", off=1e-3)).screen().splitlines()
    assert lines[1:3] == [
        "DISAGREES: native/nothing x2 strong with native/nothing x1 by 1.0e-03 at step 1;",
        "  allowed in fp32: 2e-06",
    ]


def test_verify() -> None:
    """The verdict, a row for each strategy, and the page; what the columns mean is in the details."""
    rows = [
        Verdict(strategy="native/nothing", outcome="agrees", digits=7, share=0.2, bits="shares"),
        Verdict(strategy="horovod/nothing", outcome="refused", note="no such strategy"),
    ]
    found = Verdicts(
        name="x", out="o", precision="fp32", ranks=2, steps=10, rows=rows, note="page: x", library_names=NAMES
    )
    assert found.screen(80, ["unipar compare x.yaml"]).splitlines() == [
        "1 of 2 strategies agrees with one process over 10 steps on 2 ranks; 1 cannot run",
        "  this model: horovod/nothing (no such strategy)",
        "",
        "strategy         known as  agreement  of allowed  verdict",
        "native/nothing   DDP       7 digits         0.20  agrees bit for bit",
        "horovod/nothing  refused: no such strategy",
        "",
        "next: unipar compare x.yaml",
        "page: x",
    ]


def test_verify_names_the_fault() -> None:
    """Below the verdict: the step, the module and the parameter that differ first."""
    lines = disagreeing_verdicts().screen().splitlines()
    assert len(lines) <= 24
    assert lines[:7] == [
        "2 of 5 strategies disagree with one process over 12 steps on 2 ranks; 1 failed",
        "deepspeed/parameters DISAGREES: loss at step 3 is off by 1.0e-03, 1.0e-06 is",
        "  allowed",
        "  kind: not averaged: the gradient of step 3 is 2.000 times that of one process",
        "  first step: 3; first difference in it: loss",
        "  first module backward: first, on rank 1, microbatch 1",
        "  first parameter: first.weight, and 3 more",
    ]


def test_verify_says_that_the_cut_matters() -> None:
    """The way out stands below the verdict."""
    lines = cut_dependent_verdicts().screen().splitlines()
    assert lines[3] == "  way out: return the mean over the batch"


def test_results_print_as_their_screen() -> None:
    """So does a prompt; files have no names of libraries, and a file's result none either."""
    found = compared(ONE, SAME, library_names=NAMES)
    assert str(found) == found.screen()
    assert str(disagreeing_verdicts()) == disagreeing_verdicts().screen()
    scaled = one_strategy().changed(library_names=NAMES)
    verified = disagreeing_verdicts().changed(library_names=NAMES)
    assert [
        key for one in (found, scaled, verified) for key in one.model_dump(mode="json") if key == "library_names"
    ] == []
    assert Comparison.read(found.model_dump(mode="json")).library_names == {}
