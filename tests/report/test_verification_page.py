"""report.html of a verification: the verdict, faults, figures with their tables, and files of earlier versions."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from tests.support.run_folders import plain
from tests.support.verifications import (
    agreeing_verdicts,
    cut_dependent_verdicts,
    disagreeing_verdicts,
)
from unipar.errors import ReportError
from unipar.report.build import write_page, write_pages
from unipar.report.charts.verification_chart import draw_step_shares, draw_verdict_shares
from unipar.report.data.verification_data import VerificationPageData
from unipar.report.pages.verification_page import render_verification
from unipar.results.verdicts import Verdicts


def page_of(verdicts: Verdicts) -> VerificationPageData:
    return VerificationPageData(folder=Path("runs/digits/verify"), verdicts=verdicts, config={"backend": "native"})


def write_example_verification(run: Path, verdicts: Verdicts | None = None) -> Path:
    """A run folder with a verification and the config that was verified."""
    folder = run / "verify"
    (folder / "asked").mkdir(parents=True)
    (folder / "asked/digits.json").write_text(json.dumps({"backend": "native", "train": {"steps": 12}}), "utf-8")
    (folder / "verify.json").write_text(
        json.dumps((verdicts or agreeing_verdicts()).model_dump(mode="json"), allow_nan=True), "utf-8"
    )
    return run


def test_the_first_sentence_is_the_verdict() -> None:
    """The headline is the first line below the table of `verify`; then what is bit for bit, and the machine."""
    text = render_verification(page_of(agreeing_verdicts()))
    assert "<h1>All 3 strategies agree with one process over 12 steps on 2 ranks.</h1>" in text
    assert (
        '<p class="badge good"><b aria-hidden="true">✓</b> 2 of them bit for bit with a replay in one process '
        "(optimizer by for-loop, norm in fp64)</p>"
    ) in text
    assert '<p class="where">Verified on A Processor, 2 cores, torch 2.13.0.</p>' in text
    assert "What is wrong" not in text
    assert "<li>dropout is set to 0 for this verification: dropout</li>" in text


def test_the_headline_counts_strategies_that_cannot_run() -> None:
    """With the reason, as the table's first line does."""
    verdicts = agreeing_verdicts()
    rows = [row.changed(alone=False) for row in verdicts.rows]
    assert (
        "<h1>3 of 4 strategies agree with one process over 12 steps on 2 ranks; 1 cannot run this model: "
        "native/nothing+dp (device: cpu is &lt;not&gt; available).</h1>"
    ) in render_verification(page_of(verdicts.changed(rows=rows)))


def test_a_training_that_depends_on_the_cut_is_told_first() -> None:
    """The headline says so, the way out is below it; losses are compared with the replay that cuts alike."""
    page = page_of(cut_dependent_verdicts())
    text = render_verification(page)
    assert (
        "<h1>All 3 strategies agree with one process over 12 steps on 2 ranks, and the training depends on how a batch "
        "is cut, so another number of ranks trains another model.</h1>"
    ) in text
    assert '<p class="worry">way out: return the mean over the batch</p>' in text
    assert max(max(values) for _, values in page.differences("loss")) < 1e-6


def test_faults_are_named_with_their_place() -> None:
    """Each strategy that disagrees has its kind, step, module and parameter; one that failed has its whole error."""
    text = render_verification(page_of(disagreeing_verdicts()))
    assert "<h1>2 of 5 strategies disagree with one process over 12 steps on 2 ranks; 1 failed.</h1>" in text
    for line in (
        "kind: not averaged: the gradient of step 3 is 2.000 times that of one process",
        "first step: 3; first difference in it: loss",
        "first module backward: first, on rank 1, microbatch 1",
        "first parameter: first.weight, and 3 more",
    ):
        assert f"<li>{line}</li>" in text
    assert "<pre>rank 1 died of SIGKILL\nits log is rank-1.log</pre>" in text
    assert '<b aria-hidden="true">✗</b> horovod/nothing: disagrees: unknown kind of fault</p>' in text


def test_each_strategy_is_a_row() -> None:
    """The table has digits, share and the order of the replay, or the reason why a strategy did not run, escaped."""
    text = render_verification(page_of(agreeing_verdicts()))
    assert (
        '<tr><th scope="row" class="text">native/nothing</th><td class="text">agrees</td><td>7 digits</td>'
        '<td>0.20</td><td class="text">share by share</td></tr>'
    ) in text
    assert (
        '<tr><th scope="row" class="text">native/nothing+dp</th>'
        '<td class="text" colspan="4">refused: device: cpu is &lt;not&gt; available</td></tr>'
    ) in text


@pytest.mark.parametrize("width", [920, 350])
def test_bars_end_at_their_share_of_the_limit(width: int) -> None:
    """A bar of 0.4 ends at 0.4 of the way to the limit; those beyond the scale are cut, and say by how much."""
    drawn = draw_verdict_shares(page_of(disagreeing_verdicts()), width)
    bars = [
        (float(x), float(w), kind)
        for x, w, kind in re.findall(
            r'<rect x="([\d.]+)" y="[\d.]+" width="([\d.]+)" height="17.0" class="(.*?)"', drawn
        )
    ]
    limit = float(re.findall(r'<line x1="([\d.]+)" .* class="limit"/>', drawn)[0])
    start = bars[0][0]
    assert bars[2][1] == pytest.approx(0.4 * (limit - start), abs=0.2)
    assert [kind for _, _, kind in bars] == ["share"] * 3 + ["share beyond"] * 2
    assert bars[3][0] + bars[3][1] > limit
    assert drawn.count('class="break"') == 4
    assert re.findall(r'class="value">([^<]+)<', drawn) == ["0.20", "0.20", "0.40", "8.1e+02", "beyond"]
    assert "; the bar of deepspeed/parameters is cut short, it is 8.1e+02" in drawn


def test_lines_join_differences_by_step() -> None:
    """Strategies with the same differences share a line; equal numbers are at the bottom, others above the limit."""
    page = page_of(disagreeing_verdicts())
    assert [[row.strategy for row in rows] for rows, _ in page.step_shares("loss")] == [
        ["native/nothing", "native/optimizer"],
        ["deepspeed/gradients"],
        ["deepspeed/parameters"],
        ["horovod/nothing"],
    ]
    drawn = draw_step_shares(page, "loss", 920)
    limit = float(re.findall(r'<line x1="[\d.]+" y1="([\d.]+)" [^>]*class="limit"/>', drawn)[0])
    lines = [
        [float(point.partition(",")[2]) for point in points.split()]
        for points in re.findall(r'<polyline points="([^"]+)"', drawn)
    ]
    assert lines[0][0] == 214.0
    assert limit < lines[0][1] < 214.0
    assert lines[2][1] < limit
    assert lines[3][8:] == [10.0] * 4


def test_behind_each_figure_is_a_table() -> None:
    """Bars, both figures of steps and losses each have their numbers; steps are in tables of ten."""
    text = render_verification(page_of(disagreeing_verdicts()))
    assert text.count("<figure>") == text.count("<summary>The same as a table</summary>") == 4
    assert text.count("<caption>Difference of each loss by step</caption>") == 2
    assert (
        '<tr><th scope="row" class="text">horovod/nothing</th><td>beyond</td><td>0.00</td><td>beyond</td><td>0.00</td>'
        "<td>–</td></tr>"
    ) in text
    assert '<tr><th scope="row" class="text">allowed</th>' + "<td>1.0e-06</td>" * 10 in text
    assert (
        '<th scope="row" class="text">horovod/nothing</th>' + "<td>same</td>" * 8 + "<td>not a number</td>" * 2 in text
    )


def test_one_process_says_where_the_tolerance_comes_from() -> None:
    """Each run of one process has its largest difference from the reference."""
    text = render_verification(page_of(agreeing_verdicts()))
    assert '<th scope="row" class="text">one process, fp64</th><td>1.0e-08</td><td>same</td>' in text
    assert '<th scope="row" class="text">one process</th><td class="text" colspan="2">the reference</td>' in text


def test_results_survive_the_file(tmp_path: Path) -> None:
    """What is written to verify.json is read again, with numbers that are infinite."""
    now = disagreeing_verdicts()
    again = VerificationPageData.read(write_example_verification(tmp_path, now) / "verify/verify.json").verdicts
    assert [row.share for row in again.rows] == [0.2, 0.2, 0.4, None, 812.5, math.inf, None]
    assert again.rows[5].shares["loss"] == math.inf
    assert math.isnan(again.rows[5].losses[8])
    assert again.rows[4].finding == now.rows[4].finding
    assert (again.summary, again.table()) == (now.summary, now.table())
    cut = cut_dependent_verdicts()
    assert Verdicts.read(json.loads(json.dumps(cut.model_dump(mode="json")))) == cut


def test_a_file_of_an_earlier_version_has_a_page(tmp_path: Path) -> None:
    """Without the keys that were added since, the page has the verdict, bars, lines and losses."""
    data = cut_dependent_verdicts().changed(remarks=[]).model_dump(mode="json")
    for key in ("base", "versions", "machine", "cut_dependence", "fp64_error", "strict", "summary"):
        data.pop(key, None)
    for row in data["strategies"]:
        del row["shares"]
    folder = tmp_path / "run/verify"
    folder.mkdir(parents=True)
    (folder / "verify.json").write_text(json.dumps(data), "utf-8")
    text = write_page(tmp_path / "run").read_text("utf-8")
    assert "<h1>All 3 strategies agree with one process over 12 steps on 2 ranks.</h1>" in text
    assert 'class="where"' not in text
    assert "How it was verified" not in text
    assert text.count("<figure>") == 4
    assert '<th scope="row" class="text">allowed</th>' in text
    assert VerificationPageData.read(folder / "verify.json").verdicts.base_run["loss"][0] == 2.0


def test_a_verification_without_any_verdict(tmp_path: Path) -> None:
    """If nothing could be compared the page says why, and has no figures."""
    now = agreeing_verdicts()
    rows = [now.rows[0].changed(outcome="waits", note="was not run", share=None, losses=[], norms=[])]
    stopped = now.changed(stopped="the data is random at each read", rows=rows, one={}, allowed={})
    text = render_verification(page_of(stopped))
    assert "<h1>No verdict: the data is random at each read.</h1>" in text
    assert "<figure>" not in text
    assert '<td class="text" colspan="4">was not run</td>' in text


def test_its_page_is_linked_and_can_be_repeated(tmp_path: Path) -> None:
    """`unipar report` writes the verification's page beside the run's, with links, the config and the command."""
    run = write_example_verification(plain(tmp_path / "digits"))
    assert write_pages(run) == [f"page: {run}/report.html", f"page: {run}/verify/report.html"]
    assert '<a href="verify/report.html">the verification</a>' in (run / "report.html").read_text("utf-8")
    text = (run / "verify/report.html").read_text("utf-8")
    assert '<a href="../report.html">the run</a>' in text
    assert "train.steps: 12" in text
    assert (
        f"<pre>unipar verify {run}/verify/asked/digits.json --out {run} --world 2 --steps 12 --strategy native/nothing "
        "--strategy native/optimizer --strategy deepspeed/gradients --strategy native/nothing+dp --overwrite</pre>"
    ) in text
    with pytest.raises(ReportError, match="each hold a verification, and two verifications cannot be compared"):
        write_page(run / "verify", run / "verify")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('{"strategies"', "cannot be read: it is truncated or not JSON"),
        ("[]", "is not a verification: it holds no mapping"),
        ("{}", "is not a verification written by unipar: no key 'strategies'"),
        (
            '{"strategies": [{"outcome": "agrees"}]}',
            "is not a verification written by unipar: no key 'name'",
        ),
    ],
)
def test_a_foreign_verification_is_a_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    """A file that unipar did not write, or not to its end, gives an error with its path."""
    (tmp_path / "verify.json").write_text(text, "utf-8")
    with pytest.raises(ReportError) as error:
        write_page(tmp_path)
    assert str(error.value).startswith(f"{tmp_path}/verify.json {sentence}")
