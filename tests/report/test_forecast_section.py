"""Sections of the comparison page on planning: their sentences, tables and figures."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.comparisons import edit_example_comparison, write_example_comparison
from unipar.report.charts.forecast_chart import draw_forecast_pairs, draw_peaks_by_ranks, format_difference
from unipar.report.data.comparison_data import ComparisonPageData
from unipar.report.data.forecast_data import forecast_lines
from unipar.report.pages.comparison_page import render_comparison
from unipar.report.pages.memory.forecast_section import forecast_section, forecast_worlds_section
from unipar.results.forecast.forecast_difference import forecast_differences
from unipar.results.forecast.records import Forecast

SPACE = "\N{NO-BREAK SPACE}"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_example_comparison(tmp_path / "run", planned=True)


def read(run: Path, **changed: Any) -> ComparisonPageData:
    """The page's data, with other fields of the forecast."""
    return ComparisonPageData.read(edit_example_comparison(run, lambda data: data["forecast"].update(changed)))


def forecast_of(page: ComparisonPageData) -> Forecast:
    assert page.comparison.forecast is not None
    return page.comparison.forecast


def plain(text: str) -> str:
    return text.replace(SPACE, " ")


def test_predicted_beside_measured(run: Path) -> None:
    """A sentence, a row for each strategy that was compared, and why another one is not planned."""
    text = plain(forecast_section(read(run)))
    assert (
        "<p>Predicted peaks of 6 strategies are within 3.50 % of the measured ones (farthest: native/parameters); "
        "bytes sent are equal.</p>"
    ) in text
    assert (
        '<th scope="row" class="text">native/parameters</th><td>94 MiB</td><td class="text">backward</td>'
        '<td>91 MiB</td><td class="text">backward</td><td>−3.50 %</td><td>17 MiB</td><td>equal</td>'
    ) in text
    assert "<li>accelerate/nothing is not planned: model.offload: cpu is not planned yet.</li>" in text
    assert "<li>Activations do not grow evenly with the microbatch: other sizes are estimates.</li>" in text
    assert "<li>Planned after all strategies had ended, in 1.5 s of CPU time.</li>" in text
    assert "deepspeed/gradients+library holds 697 MiB" in text


def test_a_pair_of_bars_a_strategy(run: Path) -> None:
    """Both add up to their peaks, on one scale; the measured one has no runtime; small differences have no sign."""
    page = read(run)
    found = forecast_differences(forecast_of(page), page.comparison.rows)
    drawn = draw_forecast_pairs(found, 920)
    tips = re.findall("<title>single, (measured|predicted), ([a-z ]+): ([^<]+)</title>", drawn)
    assert tips == [
        ("measured", "parameters", "34 MiB"),
        ("measured", "gradients", "34 MiB"),
        ("measured", "optimizer states", "68 MiB"),
        ("measured", "temporaries", "4.9 MiB"),
        ("predicted", "parameters", "34 MiB"),
        ("predicted", "gradients", "34 MiB"),
        ("predicted", "optimizer states", "67 MiB"),
        ("predicted", "temporaries", "4.8 MiB"),
    ]
    assert drawn.count('class="break"') == 4
    assert [format_difference(off) for off in (0.0, -0.00004, 0.0123, -0.5)] == [
        "0.00 %",
        "0.00 %",
        "+1.23 %",
        "−50.00 %",
    ]


def test_other_bytes_than_predicted(run: Path) -> None:
    """They are listed by axis and collective."""
    page = read(run)
    sent = page.strategies[1].memory[0].sent_along["data"]["all_reduce"]

    def change(data: dict[str, Any]) -> None:
        data["forecast"]["strategies"][1]["sent"]["data"]["all_reduce"] = sent - 4
        data["forecast"]["strategies"][2]["sent"] = {}

    text = forecast_section(ComparisonPageData.read(edit_example_comparison(run, change)))
    said = "native/nothing sends something else than predicted: data all_reduce 35,707,388 bytes for 35,707,392."
    assert said in plain(text)
    assert "native/parameters: what it sends was not planned yet." in text


@pytest.mark.parametrize(
    ("forecast", "sentence"),
    [
        (None, "Nothing was predicted for this comparison: strategies are planned once they have ended, unless"),
        ({"problem": "planning was interrupted"}, "There are no predictions: planning was interrupted."),
    ],
)
def test_without_predictions_it_says_why(run: Path, forecast: Any, sentence: str) -> None:
    """As in a comparison of an earlier version."""
    page = ComparisonPageData.read(edit_example_comparison(run, lambda data: data.update(forecast=forecast)))
    assert sentence in forecast_section(page)
    assert forecast_worlds_section(page) == ""


def test_without_accounts_it_says_so(run: Path) -> None:
    """Then what is predicted is shown alone."""

    def change(data: dict[str, Any]) -> None:
        data["unwatched"] = "memory was not recorded: train.steps: 5 leaves no step for it besides the timed ones"
        for strategy in data["strategies"]:
            strategy["memory"] = []

    text = plain(forecast_section(ComparisonPageData.read(edit_example_comparison(run, change))))
    assert "There is nothing to compare with: memory was not recorded: train.steps: 5 leaves no step" in text
    assert '<th scope="row" class="text">native/nothing</th><td>173 MiB</td><td class="text">update</td>' in text


def test_strategies_that_coincide_share_a_line(run: Path) -> None:
    """Within a per cent on every number of ranks; a strategy of one process is a circle."""
    page = read(run)
    told = forecast_of(page)
    twin = told.strategies[1].model_copy(update={"strategy": "accelerate/parameters"})
    told = told.model_copy(update={"strategies": (*told.strategies, twin)})
    lines = forecast_lines(told)
    assert [line.strategies for line in lines if len(line.strategies) > 1] == [
        ("native/nothing", "accelerate/parameters")
    ]
    assert (lines[1].label(40), lines[1].label(20)) == (
        "native/nothing, accelerate/parameters",
        "native/nothing and 1 more",
    )
    drawn = draw_peaks_by_ranks(told, 920)
    assert drawn.count('<polyline points="') == len(lines) - 1 == 5
    assert drawn.count('class="point"') == 1
    assert "<title>native/nothing, accelerate/parameters, 1 rank: 173 MiB</title>" in drawn
    ticks = re.findall(r'<text x="[\d.]+" y="[\d.]+" class="tick" text-anchor="middle">(\d+)<', drawn)
    assert ticks == ["1", "2", "4", "8", "16", "32", "64", "128", "256", "512", "1024"]
    narrow = re.findall(r'class="tick" text-anchor="middle">(\d+)<', draw_peaks_by_ranks(told, 350))
    assert narrow == ["1", "4", "16", "64", "256", "1024"]


def test_what_is_said_of_the_limit(run: Path) -> None:
    """The batch of each world, where the line is from, where which strategy fits, and what would have to change."""
    text = plain(forecast_worlds_section(read(run)))
    for line in (
        "The total batch of 8 samples is kept where it can be divided. It cannot on 16 to 1,024 ranks: there each rank "
        "keeps its share of 4 samples, and the total grows with the ranks.",
        "The dashed line is what batch.memory gives a rank, 160 MiB less 5 %.",
        "Below it on every number of ranks: native/parameters, single.",
        "Below it from 2 ranks on: deepspeed/gradients.",
        "Below it on no number of ranks: native/nothing, deepspeed/gradients+library, horovod/nothing.",
        "native/nothing, 173 MiB: needs 22414296 bytes more, whatever the micro; native/parameters fits.",
    ):
        assert f"<li>{line}</li>" in text
    assert "In the compared world these strategies need more than 152 MiB a rank:" in text
    assert '">limit: 152 MiB</text>' in text


def test_fits_between_two_numbers_of_ranks(run: Path) -> None:
    """Padding may make the largest worlds larger again; where no point is, the reason is told."""

    def change(data: dict[str, Any]) -> None:
        worlds = data["forecast"]["strategies"][2]["worlds"]
        worlds[0] = {"ranks": 1, "refusal": "it needs two ranks"}
        worlds[-1]["peak"] = 2**30
        data["forecast"]["strategies"][3]["worlds"][5]["peak"] = 2**30

    text = forecast_worlds_section(ComparisonPageData.read(edit_example_comparison(run, change)))
    assert "Below it on 2 to 512 ranks only: native/parameters." in text
    assert "Below it on 2, 4, 8, 16, 64, 128, 256, 512 and 1024 ranks only: deepspeed/gradients." in text
    assert "native/parameters has no point on 1 rank: it needs two ranks." in text


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        (
            {"memory": 24 * 2**30, "memory_from": "machine"},
            "The dashed line is all memory of this machine, 24 GiB less 5 %, which the ranks on it share. batch.memory "
            "says what one rank may use, such as 80GiB, and draws the line there.",
        ),
        ({"memory": 80 * 2**30, "memory_from": "GPU"}, "The dashed line is the memory of the GPU, 80 GiB less 5 %."),
        ({"memory": None, "memory_from": ""}, "The memory of the device is not known: batch.memory draws its line."),
    ],
)
def test_limits_from_elsewhere(run: Path, changed: dict[str, Any], sentence: str) -> None:
    """One far above all peaks is drawn above the scale, and every strategy fits."""
    text = plain(forecast_worlds_section(read(run, **changed)))
    assert sentence in text
    assert (
        ("not to scale" in text)
        == ("Every strategy fits below it on every number of ranks." in text)
        == (changed["memory"] is not None)
    )


def test_each_figure_has_a_table(run: Path) -> None:
    """The two figures of the sections, too."""
    text = render_comparison(read(run))
    assert text.count("<figure>") == text.count("The same as a table</summary>") == 13
    assert "Predicted peak by number of ranks</caption>" in text
    assert "Measured and predicted bytes by category at the peak</caption>" in text
