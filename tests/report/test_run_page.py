"""`unipar report` of a run and of a scaling, and its errors on what it cannot read."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.support.comparisons import account, write_example_comparison
from tests.support.run_folders import EVENTS, EXPERTS, MACHINE, TRACE, plain, wrote
from tests.support.scalings import two_strategies
from tests.support.tiny import CONFIG, Tiny
from unipar import launch
from unipar.errors import ReportError
from unipar.report.build import write_page
from unipar.report.data.run_data import RunPageData
from unipar.report.pages.run_page import render_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return plain(tmp_path / "run")


def test_a_run_has_a_page(run: Path) -> None:
    """The page has a headline, a badge, losses and times with tables, memory, config, versions and the command."""
    assert write_page(run) == run / "report.html"
    text = (run / "report.html").read_text("utf-8")
    took = "12 steps; 6.0\N{NO-BREAK SPACE}s from the first event to the last"
    assert f"<h1>The loss is 4.5000 at step 1 and 3.2500 at step 10: {took}.</h1>" in text
    assert "unipar run · run · native/nothing · 2 ranks · 8,926,848 parameters" in text
    assert '<p class="badge good"><b aria-hidden="true">✓</b> finished</p>' in text
    assert "Ran on A Processor, 2 cores, 24\N{NO-BREAK SPACE}GiB of memory, torch 2.13.0." in text.replace(
        "24 GiB", "24\N{NO-BREAK SPACE}GiB"
    )
    assert re.findall('<section id="([a-z]+)">', text) == ["losses", "evals", "times", "memory", "configs", "how"]
    assert '<th scope="row" class="text">10</th><td>200 ms</td><td>400.0</td>' in text
    assert '<th scope="row" class="text">1</th><td>5.0 MiB</td>' in text
    assert "train.steps: 12\ntrain.seed: 3</pre>" in text
    assert f"<pre>unipar run {run}/config.json --out {run} --overwrite</pre>" in text
    assert re.findall(r"<script|<link|<img|https?:|@import|url\(|\son\w+=", text) == []


def test_samples_a_second_are_those_of_the_run_log(run: Path) -> None:
    """Steps since the last row may have had more samples than the last one."""
    wrote(run, 0, [*EVENTS[:3], {**EVENTS[3], "samples_per_second": 456.7}, *EVENTS[4:]])
    assert "<td>200 ms</td><td>456.7</td>" in render_run(RunPageData.read(run / "rank-0.jsonl"))


def test_traces_of_a_run(run: Path) -> None:
    """The largest entries of each traced rank with the cost, or why there is no trace."""
    wrote(run, 0, [*EVENTS[:2], TRACE, *EVENTS[3:]])
    text = render_run(RunPageData.read(run / "rank-0.jsonl")).replace("\N{NO-BREAK SPACE}", " ")
    assert "Largest entries of steps 3 to 4 of rank 0, own time on the CPU" in text
    assert '<th scope="row" class="text">aten::mm</th><td>1,200</td><td>300 ms</td><td>75%</td>' in text
    assert "A traced step took 300 ms, another one 250 ms (median): 1.20 times." in text
    assert f"{run}/trace/rank-0.json.gz: open the file at ui.perfetto.dev, which keeps it in the browser." in text
    wrote(run, 0, [*EVENTS, {"event": "no trace", "time": 106.0, "said": "the <disk> is full"}])
    assert "No trace: the &lt;disk&gt; is full." in render_run(RunPageData.read(run / "rank-0.jsonl"))


def test_experts_of_a_run(run: Path) -> None:
    """Each expert is a square, darker with its share and crossed out without tokens; the curves are by step."""
    more_even = {"a": {**EXPERTS["b"], "tokens": [4, 4, 4, 4]}}
    wrote(run, 0, [EVENTS[0], {**EVENTS[1], "experts": more_even}, {**EVENTS[3], "experts": EXPERTS}, EVENTS[5]])
    text = render_run(RunPageData.read(run / "rank-0.jsonl"))
    assert (
        "Tokens since the logged step before, of all ranks: the fullest got 3.00 times an even share (a), the fullest "
        "rank 2.00 times, 2 experts got no token at step 10."
    ) in text
    (figure,) = re.findall(r'<svg[^>]*aria-label="Tokens of each expert, by layer">.*?</svg>', text, re.S)[:1]
    assert re.findall(r'<rect [^>]*class="(s\d)"><title>(.*?)</title>', figure) == [
        ("s6", "a, expert 0: 6 tokens, 3.00 times an even share"),
        ("s3", "a, expert 1: 2 tokens, 1.00 times an even share"),
        ("s0", "a, expert 2: 0 tokens, 0.00 times an even share"),
        ("s0", "a, expert 3: 0 tokens, 0.00 times an even share"),
        *(("s3", f"b, expert {i}: 2 tokens, 1.00 times an even share") for i in range(4)),
    ]
    assert figure.count('class="cross"') == 4
    assert "<td>3.000</td><td>0.406</td><td>2</td><td>2.000</td><td>2.250</td>" in text
    assert '<th scope="row" class="text">1</th><td>1.000</td><td>1.000</td><td>1.500</td>' in text
    assert "fullest microbatch: 1.5000 to 2.2500" in text


def test_a_metric_that_is_not_finite(run: Path) -> None:
    """A metric that is null in the run log is named on the page and in the table."""
    wrote(run, 0, [*EVENTS[:4], {"event": "eval", "time": 104.0, "step": 10, "perplexity": None}, EVENTS[5]])
    told = RunPageData.read(run / "rank-0.jsonl")
    assert "perplexity" in render_run(told)
    assert "perplexity not finite at step 10" in told.report.table()


@pytest.mark.parametrize(
    ("mode", "sentence"),
    [
        ("min", "has not become smaller in 3 evaluations. The best is 3.5, after step 10; 2 evaluations since then."),
        ("max", "has not become larger in 3 evaluations. The best is 3.75, after step 20; 1 evaluation since then."),
    ],
)
def test_an_early_stop(mode: str, sentence: str, run: Path) -> None:
    """The page has the rule of eval.stop, the best value and the evaluations since; without the section it has none."""
    more = [{"event": "eval", "time": 104.5, "step": step, "loss": loss} for step, loss in ((20, 3.75), (30, 3.625))]
    wrote(run, 0, [*EVENTS[:5], *more, EVENTS[5]])
    assert "eval.stop" not in render_run(RunPageData.read(run / "rank-0.jsonl"))
    config = json.loads((run / "config.json").read_text("utf-8"))
    config["eval"] = {"every": 10, "stop": {"metric": "loss", "mode": mode, "patience": 3}}
    (run / "config.json").write_text(json.dumps(config), encoding="utf-8")
    text = render_run(RunPageData.read(run / "rank-0.jsonl")).replace("\N{NO-BREAK SPACE}", " ")
    assert f"eval.stop: the run ends when loss {sentence}" in text


def test_a_step_has_the_rate_of_each_group(run: Path) -> None:
    """One number if all groups have it, else all of them, in their order."""
    wrote(run, 0, [*EVENTS[:3], {**EVENTS[3], "lr": [0.5, 0.05]}, *EVENTS[4:]])
    text = render_run(RunPageData.read(run / "rank-0.jsonl"))
    assert "<td>0.001</td>" in text
    assert "<td>0.5, 0.05</td>" in text


def test_memory_that_was_watched_is_on_the_page(run: Path) -> None:
    """Memory accounts are shown by phase and category, for the fullest rank."""
    for rank in (0, 1):
        account("native/nothing", rank).write(run)
    text = render_run(RunPageData.read(run / "rank-0.jsonl"))
    assert "Allocated on rank 0, the fullest, by phase and category" in text
    assert '<th scope="row" class="text">update</th><td>178 MiB</td><td>34 MiB</td>' in text
    assert (
        "<p>Allocated: beyond the 1.9 MiB that were allocated before the model was built; only torch&#x27;s own "
        "tensors counted (torch&#x27;s own allocator, by a profiler&#x27;s events).</p>"
    ) in text.replace("\N{NO-BREAK SPACE}", " ")


def test_a_run_s_page_says_how_its_memory_was_seen(run: Path) -> None:
    """The ranks' sentences on recording are on the page, with the rank unless all ranks say the same."""
    system = "resident memory as the system counts it is shown, not each allocation: torchrun started this process"
    for rank in (0, 1):
        phases = [phase.model_dump(exclude={"largest"}) for phase in account("native/nothing", rank).phases]
        step = {**EVENTS[3], "memory": phases}
        wrote(run, rank, [EVENTS[0], {"event": "memory", "time": 100.5, "said": system}, step, EVENTS[5]])
    beyond = "<p>Counted beyond what was allocated before the model was built.</p>"
    assert f"{beyond}\n<ul><li>{system}</li></ul>" in render_run(RunPageData.read(run / "rank-0.jsonl"))
    lost = {"event": "memory", "time": 100.6, "said": "no longer recorded: <it> cannot be said"}
    wrote(run, 1, [EVENTS[0], lost, EVENTS[5]])
    account("native/parameters", 0).write(run)
    assert (
        f"<ul><li>rank 0: {system}</li><li>rank 1: no longer recorded: &lt;it&gt; cannot be said</li>"
        "<li>rank 0: a note of the one who measured</li></ul>"
    ) in render_run(RunPageData.read(run / "rank-0.jsonl"))


def test_memory_that_was_logged_is_on_the_page(run: Path) -> None:
    """Without accounts, the last logged step of the fullest rank is shown from the run logs."""
    for rank in (0, 1):
        phases = [phase.model_dump(exclude={"largest"}) for phase in account("native/nothing", rank).phases]
        wrote(run, rank, [*EVENTS[:3], {**EVENTS[3], "memory": phases}, *EVENTS[4:5]])
    text = render_run(RunPageData.read(run / "rank-0.jsonl"))
    assert "<caption>Step 10 on the fullest rank, by phase and category</caption>" in text
    assert '<th scope="row" class="text">update</th><td>178 MiB</td><td>34 MiB</td>' in text
    assert "No rank recorded its memory" not in text


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (["script", "my loop.py", "--fast"], "<pre>python &#x27;my loop.py&#x27; --fast</pre>"),
        (["module", "my.loop"], "<pre>python -m my.loop</pre>"),
        ([], "A script started this run by launch() with its own task: run that script again."),
    ],
)
def test_the_command_of_a_script(run: Path, script: list[str], said: str) -> None:
    """A script is repeated by its file or module; a task given to launch() has only a note."""
    plain(run, script=script)
    (run / "config.json").write_text('{"task": null}', encoding="utf-8")
    assert said in render_run(RunPageData.read(run / "rank-0.jsonl"))


def test_what_became_of_a_run_is_its_badge(run: Path) -> None:
    """The badge says whether the run stopped, failed (with the first error), or did not finish."""
    wrote(run, 0, EVENTS[:4])
    assert "it did not finish, or is still running" in render_run(RunPageData.read(run / "rank-0.jsonl"))
    for rank, time in ((0, 7.0), (1, 6.0)):
        said = {"time": time, "kind": "ValueError", "message": f"rank {rank} <fails>"}
        (run / f"rank-{rank}.error.json").write_text(json.dumps(said), encoding="utf-8")
    (run / "rank-2.error.json").write_text('{"ti', encoding="utf-8")
    assert "✗</b> failed: ValueError: rank 1 &lt;fails&gt;</p>" in render_run(RunPageData.read(run / "rank-0.jsonl"))
    wrote(run, 0, [*EVENTS[:4], {"event": "stopped", "time": 105.0, "step": 11}])
    assert "?</b> stopped by a signal after step 11</p>" in render_run(RunPageData.read(run / "rank-0.jsonl"))


def test_two_runs_over_one_another(run: Path, tmp_path: Path) -> None:
    """The later run's page has the earlier run's curves, the differing keys, and a warning of another machine."""
    later = plain(tmp_path / "later", loss=2.5, machine={"cpu": "Another"})
    assert write_page(run, later) == later / "report.html"
    text = (later / "report.html").read_text("utf-8")
    assert 'class="curve before"' in text
    assert f"Before, {run}: The loss is 4.5000 at step 1 and 3.2500 at step 10" in text
    assert '<th scope="row" class="text">train.seed</th><td class="text">3</td><td class="text">2</td>' in text
    assert "They were measured on different machines" in text


@pytest.mark.parametrize(("use", "same"), [("/y/task.py:Sums", True), ("/x/task.py:Other", False), ("a.b:Sums", False)])
def test_another_task_is_another_config(run: Path, tmp_path: Path, use: str, *, same: bool) -> None:
    """Tasks are the same if file name and class are the same, in whatever folder."""
    later = plain(tmp_path / "later")
    told = json.loads((later / "config.json").read_text("utf-8")) | {"task": {"use": use}}
    (later / "config.json").write_text(json.dumps(told), encoding="utf-8")
    text = write_page(run, later).read_text("utf-8")
    row = f'<td class="text">&quot;/x/task.py:Sums&quot;</td><td class="text">&quot;{use}&quot;</td>'
    assert ("Both configs are the same." in text, row in text) == (same, not same)


@pytest.mark.usefixtures("forked")
def test_a_real_run(tmp_path: Path) -> None:
    """A real run's folder has versions and machine, and a page can be written from it."""
    launch(CONFIG | {"out": str(tmp_path / "out"), "parallel": {"data": 1}}, task=Tiny, quiet=True)
    ran = RunPageData.read(tmp_path / "out/rank-0.jsonl")
    assert {"python", "unipar", "torch"} <= ran.versions.keys()
    assert ran.machine.keys() == MACHINE.keys()
    assert (ran.problems, ran.ended, ran.command) == ((), True, "")
    assert "12 steps; " in write_page(tmp_path / "out").read_text("utf-8")


def test_a_scaling_has_its_page_again(tmp_path: Path) -> None:
    """The page of a scaling is written again from its file."""
    found = two_strategies()
    (tmp_path / "scale").mkdir()
    file = tmp_path / "scale/scale.json"
    file.write_text(json.dumps(found.model_dump(mode="json")), encoding="utf-8")
    assert write_page(tmp_path) == tmp_path / "scale/report.html"
    text = (tmp_path / "scale/report.html").read_text("utf-8")
    assert "strong scaling: 89\N{NO-BREAK SPACE}% for native/parameters on 2 ranks" in text
    file.replace(tmp_path / "scale/worlds.json")
    assert write_page(tmp_path / "scale") == tmp_path / "scale/report.html"


# What cannot be read


def test_a_run_log_that_breaks_off_is_told(run: Path) -> None:
    """The events before a truncated line are shown, and the rank's peak is missing."""
    for rank in (0, 1):
        file = run / f"rank-{rank}.jsonl"
        whole = file.read_text("utf-8")
        file.write_text(whole[:-20], encoding="utf-8")
        ran = RunPageData.read(run / "rank-0.jsonl")
        said = f"{file} ends in the middle of a line: the lines before it are shown"
        assert ran.problems == (said,)
        text = render_run(ran)
        assert f'<p class="worry">{said}</p>' in text
        assert "The loss is 4.5000 at step 1 and 3.2500 at step 10" in text
        rows = [["0", "–"], ["1", "5.0 MiB"]] if rank == 0 else [["0", "3.0 MiB"], ["1", "–"]]
        assert re.findall('<tr><th scope="row" class="text">([01])</th><td>([^<]*)</td></tr>', text) == [
            tuple(row) for row in rows
        ]
        assert "–: the rank recorded no end." in text
        file.write_text(whole, encoding="utf-8")
    assert "–: the rank recorded no end." not in render_run(RunPageData.read(run / "rank-0.jsonl"))


def test_a_run_log_that_cannot_be_read_moves_no_other_rank(run: Path) -> None:
    """Peaks are shown beside the right rank even if another rank's run log is unreadable."""
    wrote(run, 2, [EVENTS[0], {"event": "end", "time": 106.0, "steps": 12, "peak_rss": 7 * 2**20}])
    (run / "rank-1.jsonl").write_text("[1]\n", encoding="utf-8")
    text = render_run(RunPageData.read(run / "rank-0.jsonl"))
    assert re.findall('<tr><th scope="row" class="text">([0-9])</th><td>([^<]*)</td></tr>', text) == [
        *(("0", "3.0 MiB"), ("1", "–"), ("2", "7.0 MiB"))
    ]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('{"worlds": [', "cannot be read: it is truncated or not JSON ("),
        ("[]", "is not a scaling: it holds no mapping"),
        ("{}", "is not a scaling written by unipar: no key 'worlds'"),
        ('{"worlds": [{}]}', "is not a scaling written by unipar: no key 'strategy'"),
        ('{"worlds": 3}', "is not a scaling written by unipar: 'int' object is not iterable"),
    ],
)
def test_a_foreign_scaling_is_a_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    """The error says what is wrong, and the file is not changed."""
    file = tmp_path / "scale.json"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ReportError) as e:
        write_page(tmp_path)
    assert str(e.value).startswith(f"{file} {sentence}")
    assert file.read_text("utf-8") == text


def test_figures_of_another_kind_are_a_sentence(tmp_path: Path) -> None:
    """Times that are words, and an empty list of worlds, are errors."""
    data = two_strategies().model_dump(mode="json")
    data["worlds"][0]["seconds"] = [["soon"]]
    file = tmp_path / "scale.json"
    file.write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(ReportError, match="is not a scaling written by unipar: 1 validation error for Scaling"):
        write_page(tmp_path)
    file.write_text(json.dumps(data | {"worlds": []}), encoding="utf-8")
    with pytest.raises(ReportError, match="is not a scaling written by unipar: it has no worlds"):
        write_page(tmp_path)


def test_a_foreign_run_log_is_a_sentence(run: Path) -> None:
    """Rank 0's run log is required; other unreadable files are left out and named."""
    (run / "rank-1.jsonl").write_text("[1]\n", encoding="utf-8")
    (run / "config.json").write_text('{"tr', encoding="utf-8")
    (run / "launch.json").write_text("3", encoding="utf-8")
    ran = RunPageData.read(run / "rank-0.jsonl")
    run_log, launched, config = ran.problems
    reason = "one of its lines is not an event"
    assert run_log == f"{run}/rank-1.jsonl cannot be read as a rank's run log ({reason}): it is left out"
    assert launched == f"{run}/launch.json is not a launch of a run: it holds no mapping"
    assert config.startswith(f"{run}/config.json cannot be read: it is truncated or not JSON (")
    assert render_run(ran).count(f'<p class="worry">{run}') == 3
    (run / "rank-0.jsonl").write_text(
        '{"event": "start", "time": 1.0}\n{"event": "memory", "time": 1.0}\n{"event": "st', encoding="utf-8"
    )
    assert "no loss was recorded" in render_run(RunPageData.read(run / "rank-0.jsonl"))
    (run / "rank-0.jsonl").write_text('{"event": "step", "time": 1.0}\n', encoding="utf-8")
    with pytest.raises(ReportError) as e:
        write_page(run)
    assert str(e.value) == f"{run}/rank-0.jsonl is not a run log written by unipar (KeyError: 'step')"
    (run / "rank-0.jsonl").write_text("what\n", encoding="utf-8")
    with pytest.raises(ReportError) as e:
        write_page(run)
    assert str(e.value) == (
        f"{run}/rank-0.jsonl cannot be read as a rank's run log (Expecting value: line 1 column 1 (char 0))"
    )


def test_unlike_kinds_are_not_laid_over_one_another(run: Path, tmp_path: Path) -> None:
    """A comparison and a run, or two scalings, are refused."""
    comparison = write_example_comparison(tmp_path / "comparison")
    with pytest.raises(ReportError) as e:
        write_page(comparison, run)
    assert str(e.value) == (
        f"{comparison} holds a comparison and {run} a run: only two of the same kind can be compared"
    )
    (tmp_path / "scale.json").write_text(json.dumps(two_strategies().model_dump(mode="json")), encoding="utf-8")
    with pytest.raises(ReportError) as e:
        write_page(tmp_path, tmp_path)
    assert str(e.value) == (
        f"{tmp_path} and {tmp_path} each hold a scaling, and two scalings cannot be compared: give one"
    )


def test_what_holds_nothing_is_a_sentence(tmp_path: Path) -> None:
    """The error says what was looked for, and what to give."""
    with pytest.raises(ReportError) as e:
        write_page(tmp_path / "none")
    assert str(e.value) == f"{tmp_path}/none does not exist; give a run folder"
    with pytest.raises(ReportError) as e:
        write_page(tmp_path)
    assert str(e.value) == (
        f"{tmp_path} holds no results: no comparison (compare.json), no scaling (worlds.json, scale.json), "
        "no verification (verify.json), no observed command (observed.json) and no run (rank-0.jsonl), neither "
        "directly nor in its folders compare, worlds, scale and verify; give a run folder"
    )
    (tmp_path / "x.txt").touch()
    with pytest.raises(ReportError) as e:
        write_page(tmp_path / "x.txt")
    assert str(e.value) == f"{tmp_path}/x.txt is not a result file of unipar; give the run folder"


def test_a_page_of_a_run_that_cannot_be_written(run: Path) -> None:
    """No temporary file stays."""
    (run / "report.html").mkdir()
    with pytest.raises(ReportError) as e:
        write_page(run)
    assert str(e.value) == f"{run}/report.html cannot be written: Is a directory; give another path by --out FILE"
    assert list(run.glob(".report*")) == []


def test_a_run_that_went_on(run: Path) -> None:
    """Each attempt is a line of the table and a mark on the curve, each checkpoint a tick."""
    earlier = {
        "config.json": {},
        "launch.json": {"settled": {"strategy": "deepspeed/parameters"}, "ranks": 4},
        "ended": {"step": 7, "kind": "Stopped", "message": "stopped by SIGINT after step 7; what was logged is in x"},
    }
    (run / "attempts.jsonl").write_text(json.dumps(earlier) + "\n", "utf-8")
    resumed = {"event": "resumed", "time": 102.0, "step": 6}
    went_on = [{"event": "continued", "time": 102.0, "step": 6, "attempt": 2}, resumed]
    wrote(run, 0, [*EVENTS[:2], *went_on, EVENTS[3], {"event": "checkpoint", "time": 103.5, "step": 10}, EVENTS[5]])
    launched = json.loads((run / "launch.json").read_text("utf-8"))
    changed = {"lines": ["batch.total: 8 -> 16 (--set)", "train.clip: null -> 1.0 (line 3)"]}
    (run / "launch.json").write_text(json.dumps(launched | changed), "utf-8")
    text = render_run(RunPageData.read(run / "rank-0.jsonl"))
    assert "The run has 2 attempts: a vertical line is where one went on from a checkpoint" in text
    assert "Ticks on the axis: checkpoints." in text
    rows = re.findall(
        r'<tr><th scope="row" class="text">(\d)</th>(.*?)</tr>', text.partition("Attempts of this run")[2]
    )
    told = [[number, *re.findall(r"<td[^>]*>(.*?)</td>", strategies)] for number, strategies in rows[:2]]
    assert told == [
        ["1", "deepspeed/parameters", "4", "1", "7", "stopped by SIGINT after step 7"],
        ["2", "native/nothing", "2", "7", "12", "–"],
    ]
    changes = "batch.total: 8 -&gt; 16 (--set); train.clip: null -&gt; 1.0 (line 3)."
    assert f"<p>Config of attempt 2: {changes}</p>" in text.replace("\N{NO-BREAK SPACE}", " ")
    svg = text.partition("<svg")[2].partition("</svg>")[0]
    assert re.findall(r">([^<]*ranks)<", svg) == ["deepspeed/parameters, 4 ranks", "native/nothing, 2 ranks"]
    assert svg.count('class="saved"') == 2
    assert svg.count('class="attempt"') == 2


def test_broken_attempts_are_left_out(run: Path) -> None:
    """A line that is no attempt: the page is made without it, and says so."""
    (run / "attempts.jsonl").write_text("[]\n", "utf-8")
    text = render_run(RunPageData.read(run / "rank-0.jsonl"))
    assert f"{run}/attempts.jsonl cannot be read (AttributeError): earlier attempts are left out" in text
    assert "Attempts of this run" not in text
