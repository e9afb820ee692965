"""report.html of a comparison: its sentences, tables and figures."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.comparisons import account, edit_example_comparison, write_example_comparison
from unipar.memory.account import NamedBlock, PhasePeak
from unipar.memory.sources.allocator_history import AllocatorHistory
from unipar.memory.sources.malloc_meter import MallocMeter
from unipar.memory.sources.profiler import ProfilerSource
from unipar.planning.cuda_total import PredictedCudaMemory, predict_on_cuda
from unipar.profiling.work import CompiledWork, RankWork
from unipar.report.build import write_page
from unipar.report.charts.bars import draw_memory_bars
from unipar.report.charts.lines import loss_differences, shade_of, thin_curve
from unipar.report.charts.svg import power_of_two_ticks, round_ticks
from unipar.report.data import result_changes as changes
from unipar.report.data.comparison_data import ComparisonPageData
from unipar.report.data.headline import comparison_headline
from unipar.report.pages.comparison_page import render_comparison
from unipar.results.memory_tables import describe_counting, describe_memory_columns

MIB = 2**20


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_example_comparison(tmp_path / "run")


def test_the_first_sentence(run: Path) -> None:
    """The headline names the smallest and the fastest strategy besides the one process, and the main category."""
    assert comparison_headline(ComparisonPageData.read(run)) == (
        "native/parameters is smallest: 97 MiB on its largest rank, 45 % less than native/nothing, mostly "
        "optimizer states (68 MiB to 34 MiB); native/nothing is fastest: 526 ms a step, but the difference from "
        "horovod/nothing is within noise."
    )


def test_a_number_stays_with_its_unit(run: Path) -> None:
    """A no-break space keeps number and unit in one line."""
    assert "97\N{NO-BREAK SPACE}MiB on its largest rank, 45\N{NO-BREAK SPACE}% less" in render_comparison(
        ComparisonPageData.read(run)
    )


def test_the_first_sentence_without_memory(tmp_path: Path) -> None:
    """The headline names the fastest strategy only."""
    told = ComparisonPageData.read(write_example_comparison(tmp_path / "run", memory=False))
    assert (
        comparison_headline(told)
        == "native/nothing is fastest: 526 ms a step, but the difference from horovod/nothing is within noise."
    )


def test_the_baseline_itself_may_be_smallest(run: Path) -> None:
    """The baseline is then compared with the next strategy; if no strategy ran, the headline says so."""

    def only(data: dict[str, Any]) -> None:
        data["strategies"] = [
            c for c in data["strategies"] if c["strategy"] in ("single", "native/nothing", "horovod/nothing")
        ]
        data["strategies"][2]["seconds"] = [[0.9]]

    assert comparison_headline(ComparisonPageData.read(edit_example_comparison(run, only))) == (
        "native/nothing is smallest: 178 MiB on its largest rank, 3 % less than horovod/nothing, mostly "
        "communication buffers (39 MiB to 34 MiB); native/nothing is fastest: 526 ms a step."
    )
    nothing = edit_example_comparison(
        run, lambda data: [c.update(outcome="failed", memory=[]) for c in data["strategies"]]
    )
    assert comparison_headline(ComparisonPageData.read(nothing)) == "No strategy finished, so there is nothing to rank."


def test_the_first_sentence_where_memory_tells_nothing(run: Path) -> None:
    """Libraries that weigh more than sharding saves; a strategy with buffers that are larger is named."""

    def heavy(data: dict[str, Any]) -> None:
        for strategy in data["strategies"]:
            for one in strategy.get("memory", []):
                for phase in one["phases"]:
                    phase["held"]["library"] = phase["held"].get("library", 0) + 300 * MIB
                    phase["peak"] += 300 * MIB

    said = comparison_headline(ComparisonPageData.read(edit_example_comparison(run, heavy)))
    assert said.startswith(
        "memory does not tell 4 of the 5 strategies apart at this size: their trainings differ by 88 MiB at most, and "
        "runtime and libraries take 30"
    )
    assert "; it would with about " in said
    assert "; deepspeed/gradients+library is largest: 1.0 GiB; native/nothing is fastest: 526 ms a step" in said


def test_the_prediction_for_cuda_adds_what_is_assumed() -> None:
    """The peak, 500 MiB of context, 200 MiB of NCCL in a world of several, blocks of 512 bytes, segments of 2 MiB."""
    one = account("single", 0)
    assert predict_on_cuda(one, 1).nccl == 0
    # 16.853 bytes for each of 8,926,848 parameters; a block of 1,000,001 bytes is rounded up by 447
    assert predict_on_cuda(one, 2) == PredictedCudaMemory(150_444_169, 500 * MIB, 200 * MIB, 550_775)
    assert predict_on_cuda(one, 2).total == 734_003_200 + 72 * 2 * MIB


def test_a_block_may_need_a_segment_more() -> None:
    """A peak of just one segment, with a block of a byte in it, takes a second one."""
    block = NamedBlock(category="buffers", name="step", size=1)
    phase = PhasePeak(name="built", peak=2 * MIB, held={"buffers": 2 * MIB}, largest=(block,))
    assert predict_on_cuda(account("single", 0).model_copy(update={"phases": (phase,)}), 1).rounding == 2 * MIB


def test_nothing_is_fetched_and_nothing_runs(run: Path) -> None:
    """The page is one file, without script, address or import."""
    text = render_comparison(ComparisonPageData.read(run))
    assert re.findall(r"<script|<link|<img|https?:|@import|url\(|\son\w+=", text) == []


def test_a_table_behind_each_figure(run: Path) -> None:
    """Each figure has a table and a label for screen readers."""
    text = render_comparison(ComparisonPageData.read(run))
    figures = re.split("<figure>", text)[1:]
    assert len(figures) == 11
    for figure in figures:
        assert re.match(r".*?</figure>\n<details><summary>The same as a table</summary><div", figure, re.DOTALL)
    assert text.count('<svg viewBox="') == text.count('role="img" aria-label="') == 2 * len(figures)


def test_memory_is_told_in_three_columns(run: Path) -> None:
    """The columns are allocated, resident and predicted on CUDA; the assumptions are listed."""
    text = render_comparison(ComparisonPageData.read(run))
    assert "allocated here</th>" in text
    assert "resident here</th>" in text
    assert "on CUDA (predicted)</th>" in text
    assert (
        '<th scope="row" class="text">native/parameters</th><td class="text">7 digits</td><td>826 ms</td>'
        "<td>1.57</td><td>9.7</td><td>97 MiB</td><td>104 MiB</td><td>798 MiB</td>"
    ) in text
    assert "<h3>On CUDA: assumed, not measured</h3>" in text
    assert "NCCL takes 200\N{NO-BREAK SPACE}MiB in each process of a world of several" in text
    assert (
        "Measured on A Processor, 2 cores, 24\N{NO-BREAK SPACE}GiB of memory, memory counted on the CPU, torch 2.13.0."
        in text
    )


def test_a_library_s_own_sizes_are_marked(run: Path) -> None:
    """A strategy with its library's sizes has a † in the first figure, and a footnote."""
    text = render_comparison(ComparisonPageData.read(run))
    assert "deepspeed/gradients+library †</text>" in text
    assert (
        '<p class="own">† deepspeed/gradients+library runs with DeepSpeed&#x27;s own bucket sizes, its default: '
        "704 MiB, 4.9 times deepspeed/gradients without them (144 MiB) and 4.0 times native/nothing (178 MiB); 612 MiB "
        "of it are communication buffers, for 34 MiB of gradients.</p>"
    ) in text.replace("\N{NO-BREAK SPACE}", " ")


@pytest.mark.parametrize(
    ("gone", "said"),
    [
        ((3,), ": 704 MiB, 4.0 times native/nothing (178 MiB); 612 MiB of it are communication buffers, for 34 MiB of"),
        ((1,), ": 704 MiB, 4.9 times deepspeed/gradients without them (144 MiB); 612 MiB of it are communication"),
        ((1, 3), ": 704 MiB."),
        ((4,), "."),
    ],
)
def test_a_library_s_own_sizes_are_put_beside_what_was_measured(run: Path, gone: tuple[int, ...], said: str) -> None:
    """The footnote compares with the strategies that were measured."""
    told = ComparisonPageData.read(
        edit_example_comparison(run, lambda data: [data["strategies"][i].update(memory=[]) for i in gone])
    )
    text = render_comparison(told).replace("\N{NO-BREAK SPACE}", " ")
    assert f"† deepspeed/gradients+library runs with DeepSpeed&#x27;s own bucket sizes, its default{said}" in text


def test_own_sizes_that_cost_nothing_are_told_without_a_reason(run: Path) -> None:
    """If no category grew, the footnote names none."""
    less = [account("native/parameters", rank).model_dump(mode="json") for rank in (0, 1)]
    told = ComparisonPageData.read(edit_example_comparison(run, lambda data: data["strategies"][4].update(memory=less)))
    said = "its default: 97 MiB, 0.7 times deepspeed/gradients without them (144 MiB) and 0.5 times native/nothing "
    assert f"{said}(178 MiB).</p>" in render_comparison(told).replace("\N{NO-BREAK SPACE}", " ")


def test_gradients_that_nobody_named_are_not_set_beside_buffers(run: Path) -> None:
    """The footnote leaves out gradients that are not known."""

    def unnamed(data: dict[str, Any]) -> None:
        for held in (phase["held"] for told in data["strategies"][1]["memory"] for phase in told["phases"]):
            held["unattributed"] = held.pop("gradients")

    assert "612\N{NO-BREAK SPACE}MiB of it are communication buffers.</p>" in render_comparison(
        ComparisonPageData.read(edit_example_comparison(run, unnamed))
    )


def test_what_only_the_environment_can_set_is_stated(run: Path, tmp_path: Path) -> None:
    """Variables and values are on the page and below the table, unless memory was not measured."""
    told = ComparisonPageData.read(run)
    said = "set: MKL_DISABLE_FAST_MM=1 always, MALLOC_MMAP_THRESHOLD_=65536 while recording"
    assert (said in told.comparison.table().splitlines(), told.comparison.remarks().count(said)) == (True, 1)
    assert f"<li>{said}</li><li>before the timed steps malloc is set to keep what is freed</li>" in render_comparison(
        told
    )
    without = ComparisonPageData.read(write_example_comparison(tmp_path / "without", memory=False))
    assert "MKL_DISABLE_FAST_MM" not in render_comparison(without) + without.comparison.table()


def test_agreement_is_a_badge(run: Path) -> None:
    """Disagreement is a badge of another colour, with a cross in the figure of differences."""
    text = render_comparison(ComparisonPageData.read(run))
    assert '<p class="badge good"><b aria-hidden="true">✓</b> all 5 strategies agree with one process' in text
    assert 'class="cross"' not in text
    far = edit_example_comparison(run, lambda data: data["strategies"][1]["losses"].__setitem__(4, 9.0))
    text = render_comparison(ComparisonPageData.read(far))
    assert '<p class="badge bad"><b aria-hidden="true">✗</b> DISAGREES: native/nothing by' in text
    assert text.count('class="cross"') == 2 * 2


def test_what_others_wrote_is_only_text(run: Path) -> None:
    """Angle brackets in a note are escaped."""
    text = render_comparison(ComparisonPageData.read(run))
    assert "refused: train.precision: fp64 &lt;cannot&gt; be had" in text
    assert "<cannot>" not in text


def test_a_strategy_that_is_not_alike_is_in_no_figure(run: Path) -> None:
    """The strategy has only a row with its sentence, even if it was measured."""
    why = "step 1 trains on other samples than in single"
    told = ComparisonPageData.read(
        edit_example_comparison(run, lambda data: data["strategies"][2].update(outcome="unlike", note=why))
    )
    assert "native/parameters" not in [
        strategy.strategy for strategy in (*told.measured_strategies, *told.timed_strategies)
    ]
    assert f'<td class="text" colspan="7">trained differently: {why}</td>' in render_comparison(told)
    assert comparison_headline(told).startswith("deepspeed/gradients is smallest")


def test_what_a_step_does_has_a_section(run: Path) -> None:
    """Figures and the reasons of graph breaks, each explained once; a strategy without figures has no row."""
    compiled = CompiledWork(graphs=2, breaks={"print": 2})
    work = [RankWork(flops=8e9, waits=((share, 1.0),), compiled=compiled) for share in (0.05, 0.1)]

    def add(data: dict[str, Any]) -> None:
        for strategy in data["strategies"][1:3]:
            strategy["work"] = [one.model_dump(mode="json") for one in work]
        data["strategies"][2]["outcome"] = "failed"

    text = render_comparison(ComparisonPageData.read(edit_example_comparison(run, add)))
    section = text.partition('<section id="work">')[2].partition("</section>")[0]
    name = ComparisonPageData.read(run).strategies[1].strategy
    assert re.findall(rf'<th scope="row" class="text">{name}</th>.*<td>5.0 %</td><td>2</td><td>0</td></tr>', section)
    assert '<th scope="row" class="text">graph break</th><td>2</td><td class="text">print</td>' in section
    assert text.count("graph break, 2 times: print") == 0
    assert text.count("waits: share of a step in which the rank that waits least waits for communication") == 1


def test_a_comparison_without_memory_has_a_page(tmp_path: Path) -> None:
    """Older comparisons lack memory, versions, machine and config, and still have a page."""

    def old(data: dict[str, Any]) -> None:
        del data["of"]

    run = edit_example_comparison(write_example_comparison(tmp_path / "run", memory=False), old)
    (run / "compare/asked/quickstart.json").unlink()
    text = render_comparison(ComparisonPageData.read(run))
    assert "Memory was not measured in this comparison" in text
    assert "Measured on a machine that was not recorded." in text
    shown = ["memory", "strategies", "planned", "losses", "times", "configs", "how"]
    assert re.findall('<section id="([a-z]+)">', text) == shown
    assert "<td>–</td><td>~640 MiB</td><td>–</td>" in text


@pytest.mark.parametrize(
    ("methods", "said"),
    [
        ((MallocMeter.method, MallocMeter.method), "every block counted"),
        ((ProfilerSource.method, ProfilerSource.method), "only torch's own tensors counted"),
        ((AllocatorHistory.method,), "only blocks of torch's allocator of the device counted"),
        (
            (ProfilerSource.method, MallocMeter.method),
            "not counted in the same way on every rank (every block counted; only torch's own tensors counted)",
        ),
        (("a stranger's, by hand",), "counted by: a stranger's, by hand"),
    ],
)
def test_what_is_counted_depends_on_who_counts(methods: tuple[str, ...], said: str) -> None:
    """The preloaded meter sees every block, torch's profiler tensors alone."""
    accounts = [account("single", rank, method=method) for rank, method in enumerate(methods)]
    assert describe_counting(accounts) == said
    assert describe_memory_columns(accounts)[0].text == (
        f"allocated here: the peak beyond the base of the largest rank, {said}; its parts add up to it"
    )


def test_the_config_and_the_command_to_repeat_it(run: Path) -> None:
    """The page has all keys of the config, the keys that differ in a strategy, and the command."""
    text = render_comparison(ComparisonPageData.read(run))
    assert "train.steps: 12\ntrain.optimizer.fused: false</pre>" in text
    assert '<th scope="row" class="text">horovod/nothing</th><td class="text">backend</td>' in text
    assert (
        f"unipar compare {run}/compare/asked/quickstart.json --out {run} --strategy native/nothing --strategy" in text
    )


def test_the_page_lies_where_it_is_wanted(run: Path, tmp_path: Path) -> None:
    """The page is beside compare.json, whichever path is given, or at --out."""
    assert (
        write_page(run)
        == write_page(run / "compare")
        == write_page(run / "compare/compare.json")
        == run / "compare/report.html"
    )
    assert write_page(run, out=tmp_path / "x.html") == tmp_path / "x.html"
    assert (tmp_path / "x.html").read_text("utf-8") == (run / "compare/report.html").read_text("utf-8")


def test_two_comparisons_over_one_another(run: Path, tmp_path: Path) -> None:
    """The later folder's page shows changes in a sentence, a table, the configs' keys and the figures."""
    later = write_example_comparison(tmp_path / "later", scale=0.9, quicker=0.95, fused=True)
    assert write_page(run, later) == later / "compare/report.html"
    before, now = ComparisonPageData.read(run), ComparisonPageData.read(later)
    assert changes.describe_largest_change(before, now) == (
        f"Since {run}/compare: deepspeed/gradients+library holds 10.0 % less memory (704 MiB to 634 MiB), "
        "single takes 5.0 % less time a step."
    )
    assert changes.change_rows(before, now)[1] == [
        *("native/nothing", "178 MiB", "160 MiB", "-10.0 %", "526 ms", "500 ms", "-5.0 %")
    ]
    assert changes.differing_key_rows(before.config, now.config) == [["train.optimizer.fused", "false", "true"]]
    assert "before, native/nothing, parameters: 34 MiB" in draw_memory_bars(now, before, 900)
    text = render_comparison(now, before)
    assert 'class="curve before"' in text
    assert 'class="point before"' in text


def test_what_a_strategy_held_till_it_failed_is_no_change(run: Path, tmp_path: Path) -> None:
    """A strategy that failed in either comparison is in no change."""
    later = write_example_comparison(tmp_path / "later", scale=0.9)
    before, now = ComparisonPageData.read(run), ComparisonPageData.read(later)
    assert (
        "deepspeed/gradients+library holds 10.0 % less memory (704 MiB to 634 MiB)"
        in changes.describe_largest_change(before, now)
    )
    for told, peaks in ((later, ("704 MiB", "-")), (run, ("-", "-"))):
        edit_example_comparison(told, lambda data: data["strategies"][4].update(outcome="failed", note="no"))
        before, now = ComparisonPageData.read(run), ComparisonPageData.read(later)
        assert "deepspeed/gradients+library" not in changes.describe_largest_change(before, now)
        assert changes.change_rows(before, now)[4][:4] == ["deepspeed/gradients+library", *peaks, "-"]


def test_two_machines_are_a_warning(run: Path, tmp_path: Path) -> None:
    """Different machines and different versions are warnings."""
    later = edit_example_comparison(
        write_example_comparison(tmp_path / "later"),
        lambda data: data["of"].update(machine={"cpu": "Another"}, versions={"python": "3.11.7", "torch": "2.14.0"}),
    )
    assert changes.timing_warnings(ComparisonPageData.read(run), ComparisonPageData.read(later)) == [
        "They were measured on different machines: times cannot be compared.",
        "Different versions: torch 2.13.0 to 2.14.0.",
    ]


def test_differences_have_shades(run: Path) -> None:
    """Shade 0 is for identical losses, then one for each power of ten."""
    assert [shade_of(off) for off in (0.0, 6e-8, 1e-7, 2e-6, 1e-5, 1e-4, 0.5)] == [0, 1, 2, 3, 4, 5, 6]
    assert [name for name, _ in loss_differences(ComparisonPageData.read(run))] == [
        *("native/nothing", "native/parameters", "deepspeed/gradients", "deepspeed/gradients+library"),
        "horovod/nothing",
    ]


def test_each_part_has_a_row_of_differences(run: Path) -> None:
    """Each part of a task is compared with the same part of one process."""

    def split(data: dict[str, Any]) -> None:
        data["strategies"][0]["parts"] = {"maker": [1.0, 2.0], "critic": [3.0]}
        data["strategies"][1]["parts"] = {"maker": [1.0, 2.5], "critic": [3.0]}

    told = ComparisonPageData.read(edit_example_comparison(run, split))
    assert loss_differences(told)[:2] == [("native/nothing, maker", [0.0, 0.25]), ("native/nothing, critic", [0.0])]


def test_a_long_curve_keeps_its_peak() -> None:
    """A long curve is reduced to the highest point of each interval."""
    curve = [(i / 9999, 7 if i == 1234 else 1) for i in range(10_000)]
    drawn = thin_curve(curve)
    assert len(drawn) == 240
    assert max(drawn, key=lambda point: point[1]) == (1234 / 9999, 7)
    assert thin_curve(curve[:5]) == curve[:5]


@pytest.mark.parametrize(
    ("low", "high", "unit", "expected"),
    [
        (0, 97, 1, [0, 20, 40, 60, 80]),
        (0.31, 0.49, 1, [0.35, 0.4, 0.45]),
        (0, 704 * MIB, MIB, [0, 200 * MIB, 400 * MIB, 600 * MIB]),
        (3, 3, 1, [3]),
    ],
)
def test_marks_are_round(low: float, high: float, unit: float, expected: list[float]) -> None:
    """Ticks are multiples of 1, 2 or 5 times a power of ten."""
    assert round_ticks(low, high, 5, unit) == pytest.approx(expected)


def test_marks_of_a_logarithm_double() -> None:
    """Ticks of a logarithmic scale of bytes are powers of two."""
    assert power_of_two_ticks(100 * MIB, 700 * MIB, MIB) == [128 * MIB, 256 * MIB, 512 * MIB]
