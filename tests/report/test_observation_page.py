"""`unipar report` of an observed command, and of two trainings of which one was observed."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from tests.support.comparisons import account, write_example_comparison
from tests.support.cuda_accounts import account as cuda_account
from tests.support.observations import SAME_DROPOUT, UNEQUAL, observed_rank, write_observation
from tests.support.run_folders import plain
from unipar.errors import ReportError
from unipar.profiling.work import RankWork
from unipar.report.build import write_page, write_pages
from unipar.report.data.observation_data import ObservationPageData
from unipar.report.pages.observation_page import render_observation


def page_of(folder: Path) -> str:
    return render_observation(ObservationPageData.read(folder / "observed.json")).replace("\N{NO-BREAK SPACE}", " ")


def sections(text: str) -> list[str]:
    return re.findall('<section id="([a-z-]+)">', text)


def test_an_observed_command_has_a_page_of_its_own(tmp_path: Path) -> None:
    """Not that of a run, whose run log is in the folder, too; with every section."""
    folder = write_observation(tmp_path / "seen", findings=(UNEQUAL, SAME_DROPOUT))
    assert write_pages(folder) == [f"page: {folder}/report.html"]
    text = (folder / "report.html").read_text("utf-8").replace("\N{NO-BREAK SPACE}", " ")
    assert sections(text) == ["findings", "times", "losses", "memory", "through", "sent", "script", "how"]
    assert "<h1>DDP &gt; GPT trained for 12 steps on 2 ranks, 210 ms a step: 1 fault, 1 note.</h1>" in text
    assert '<p class="badge bad"><b aria-hidden="true">✗</b> 1 fault, 1 note</p>' in text
    assert "<pre>unipar observe -- torchrun --nproc-per-node 2 train.py</pre>" in text
    assert re.findall(r"<script|<link|<img|https?:|@import|url\(|\son\w+=", text) == []


def test_findings_are_first_with_everything_about_them(tmp_path: Path) -> None:
    """Kind, sentence, way out, step, ranks and parameter; then what was compared, and what was not observed."""
    ranks = [observed_rank(0, notes=("the loader is not one of torch",)), observed_rank(1)]
    text = page_of(write_observation(tmp_path / "seen", ranks, findings=(UNEQUAL, SAME_DROPOUT)))
    assert (
        """\
<h3 class="bad">Fault: unequal copies</h3>
<p>After step 8 1 of 54 weights differ between the ranks: blocks.0.attention.query.weight on rank 1.</p>
<p>Way out: wrap the model before training, and change no weight on one rank alone.</p>
<p class="note">step 8 · rank 1 · blocks.0.attention.query.weight</p>
<h3 class="open">Note: same dropout</h3>
<p>Dropout drops the same places on all ranks.</p>"""
        in text
    )
    assert '<p class="note">step 2 · all ranks</p>' in text
    assert "<p>Compared without a finding: initial weights, batches.</p>" in text
    assert "<h3>Not observed</h3>\n<ul><li>the loader is not one of torch</li></ul>" in text


def test_times_losses_memory_and_bytes(tmp_path: Path) -> None:
    """Each figure has its numbers as a table; equal ranks share the rows of what they send."""
    text = page_of(write_observation(tmp_path / "seen"))
    assert '<th scope="row">1</th><td>210 ms</td><td>1.0 ms</td><td>50 ms</td><td>110 ms</td>' in text
    assert "rank 1, between: 19 ms" in text
    assert '<th scope="row" class="text">2</th><td>4.25</td><td>1.75</td><td>1</td><td>0.0003</td><td>1</td>' in text
    assert "Dashed: before the script&#x27;s clip, which is at 1." in text
    assert "<p>0.0003 in all logged steps.</p>" in text
    assert "Rank 0, the fullest, in the update: 178 MiB, beyond 1.9 MiB allocated before the first model" in text
    assert "Unattributed, in no category that was found: 0 B, 0.0% of it." in text
    assert '<th scope="row" class="text">optimizer states</th><td>41</td><td>54</td><td>63</td>' in text
    assert '<th scope="col">rank 1, update</th>' in text
    assert (
        '<th scope="row" class="text">all</th><td class="text">all ranks</td><td class="text">all_reduce</td>'
        "<td>34 MiB</td>" in text
    )


def test_operations_of_a_step(tmp_path: Path) -> None:
    """The page has the sentence of the terminal, below the meaning of the times."""
    work = RankWork(flops=2e12, flops_by="in step 2")
    text = page_of(write_observation(tmp_path / "x", [observed_rank(rank, work=work) for rank in (0, 1)]))
    assert "Forward and backward of a step: 4 TFLOP on 2 ranks, counted in step 2; 19 TFLOP/s." in text


def test_what_was_not_recorded_is_a_sentence(tmp_path: Path) -> None:
    """A script that ended in its second step, by a signal."""
    rank = observed_rank(
        size=1, steps=2, seconds=None, phases={}, losses=(), norms={}, norms_after={}, rates={}, models=()
    )
    text = page_of(write_observation(tmp_path / "seen", [rank], memory=None, exit_code=-9))
    assert sections(text) == ["findings", "times", "memory", "script", "how"]
    assert "<h1>A script trained for 2 steps on 1 rank: no fault was found.</h1>" in text
    assert "</b> was ended by SIGKILL</p>" in text
    assert "No step was timed" in text
    assert "Memory was not recorded" in text


def test_rates_of_groups_are_drawn_where_they_change(tmp_path: Path) -> None:
    """One curve for each group of the optimizer; a constant rate is a sentence."""
    rates = {step: (0.001 / step, 0.002 / step) for step in range(1, 11)}
    text = page_of(write_observation(tmp_path / "seen", [observed_rank(0, rates=rates)]))
    assert "group 1: 0.0020 to 0.0002" in text
    assert "in all logged steps" not in text
    assert "in all logged steps" in page_of(
        write_observation(tmp_path / "two", [observed_rank(0, rates=dict.fromkeys(rates, (0.001, 0.002)))])
    )


def test_losses_that_are_not_finite(tmp_path: Path) -> None:
    """Their steps are named above the figure, which leaves them out; rank 0 may have written nothing."""
    rank = observed_rank(1, losses=(4.5, math.nan, 4.0), norms={1: math.inf, 2: 2.0}, norms_after={2: math.nan})
    text = page_of(write_observation(tmp_path / "seen", [rank]))
    assert '<p class="worry">Loss not finite at step 2</p>' in text
    assert "loss: 4.5000 to 4.0000" in text
    assert "Loss of rank 1, as it was given to backward" in text


def test_memory_of_a_gpu(tmp_path: Path) -> None:
    """The device's allocator, the driver's figures and the host's memory of the fullest rank."""
    folder = write_observation(tmp_path / "seen", memory=None)
    cuda_account(host=account("native/nothing", 0)).model_copy(update={"rank": 0}).write(folder)
    text = page_of(folder)
    assert "device" in sections(text)
    assert '<th scope="col" class="text">rank</th><th scope="col" class="text">phase</th>' in text
    assert "Host memory at its own peak" in text


def test_many_ranks(tmp_path: Path) -> None:
    """The figure has the first and the slowest, the table of memory the fullest and the emptiest."""
    ranks = [observed_rank(rank, size=40, seconds=0.2 + (0.1 if rank == 33 else 0.0)) for rank in range(40)]
    text = page_of(write_observation(tmp_path / "seen", ranks))
    assert "Drawn: rank 0 and the slowest; 24 more are in the table." in text
    assert "rank 33, backward" in text
    assert "Peak of the fullest ranks of 40, and the emptiest" in text


def test_two_observed_commands_on_one_page(tmp_path: Path) -> None:
    """What changed comes first, the later one's own sections follow; the table is printed."""
    one = write_observation(tmp_path / "one", findings=(UNEQUAL,))
    two = write_observation(tmp_path / "two", [observed_rank(0, clip=None), observed_rank(1)], memory=1.25, loss=0.125)
    printed = write_pages(one, two)
    assert printed[0].startswith(f"before: {one} (observed: DDP, 2 ranks)\nafter: {two} ")
    assert printed[1:] == ["", f"page: {two}/report.html"]
    text = (two / "report.html").read_text("utf-8").replace("\N{NO-BREAK SPACE}", " ")
    changed = ["findings", "setup", "times", "memory", "through", "sent", "losses"]
    own = ["findings", "times", "losses", "memory", "through", "sent", "script", "how"]
    assert sections(text) == [*(f"difference-{name}" for name in changed), "after", *own]
    assert '<h3 class="bad">Fault: unequal copies, gone</h3>' in text
    assert '<p class="badge good"><b aria-hidden="true">✓</b> 1 finding gone</p>' in text
    assert "<li>clip: 1 before, none after.</li>" in text
    assert "<td>178 MiB</td><td>222 MiB</td><td>+25.0 %</td>" in text
    assert "before, update, gradients: 34 MiB" in text
    assert "before: 4.5000 to 3.2500" in text


def test_an_observed_command_and_a_run_on_one_page(tmp_path: Path) -> None:
    """In both orders; the page is beside the later one, with the sections of a run if it is one."""
    seen, run = write_observation(tmp_path / "seen"), plain(tmp_path / "run")
    assert write_page(seen, run) == run / "report.html"
    text = (run / "report.html").read_text("utf-8")
    assert sections(text)[:3] == ["difference-setup", "difference-times", "difference-losses"]
    assert "configs" in sections(text)
    assert write_page(run, seen, tmp_path / "x.html") == tmp_path / "x.html"
    assert "script" in sections((tmp_path / "x.html").read_text("utf-8"))
    (tmp_path / "mine.html").write_text("mine", "utf-8")
    with pytest.raises(ReportError, match="is not a page written by unipar"):
        write_page(run, seen, tmp_path / "mine.html")


def test_an_observed_command_and_a_strategy_on_one_page(tmp_path: Path) -> None:
    """The page is in the strategy's folder, which has none of its own."""
    strategy = write_example_comparison(tmp_path / "run") / "compare/native-nothing"
    assert write_pages(write_observation(tmp_path / "seen"), strategy)[-1] == f"page: {strategy}/report.html"
    text = (strategy / "report.html").read_text("utf-8")
    assert sections(text) == [
        f"difference-{name}" for name in ("setup", "times", "memory", "through", "sent", "losses")
    ]
