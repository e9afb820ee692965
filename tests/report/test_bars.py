"""Figures of bars: a bar much longer than the others is cut, and the rows of a bridge join."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.comparisons import edit_example_comparison, write_example_comparison
from unipar.report.charts.bars import choose_bar_scale, draw_bridge, draw_memory_bars, draw_rank_balance
from unipar.report.data.comparison_data import ComparisonPageData
from unipar.report.pages.comparison_page import render_comparison


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_example_comparison(tmp_path / "run")


def test_a_bar_that_dwarfs_the_others_is_cut(run: Path) -> None:
    """The cut bar has a gap, its true value and a sentence; uncut it would dwarf the others."""
    told = ComparisonPageData.read(run)
    drawn = draw_memory_bars(told, None, 920)
    said = "; the bar of deepspeed/gradients+library is cut short, it is 704 MiB"
    assert f'aria-label="Memory at the peak, by category{said}"' in drawn
    assert drawn.count('class="break"') == 2
    ends = [float(x) for x in re.findall(r'<text x="([\d.]+)" y="[\d.]+" class="value"', drawn)]
    reach = 920 - 84 + 7
    assert ends[-1] == reach
    assert ends[-2] == pytest.approx(reach - (reach - 7 - ends_of_names(drawn)) * (1 - 1 / 1.3), abs=1)
    assert "cut short, so that all others stay readable: deepspeed/gradients+library holds 704" in render_comparison(
        told
    )
    shapes = re.findall(r'<rect x="([\d.]+)" y="[\d.]+" width="([\d.]+)"', drawn)
    assert max(float(x) + float(width) for x, width in shapes) <= reach - 7


def ends_of_names(drawn: str) -> float:
    """Return the left end of the bars."""
    return min(float(x) for x in re.findall(r'<rect x="([\d.]+)"', drawn))


def test_bars_of_like_lengths_are_whole(run: Path) -> None:
    """Without the outlier no bar is cut."""
    told = ComparisonPageData.read(edit_example_comparison(run, lambda data: data["strategies"][4].update(memory=[])))
    assert choose_bar_scale(told, None) == (told.measured_strategies[-1].peak, [])
    assert 'class="break"' not in draw_memory_bars(told, None, 920)


def test_a_bridge_ends_where_the_other_strategy_is(run: Path) -> None:
    """The steps add up, from the first strategy's peak to the second's."""
    told = ComparisonPageData.read(run)
    one, two = told.strategy("native/nothing"), told.strategy("native/parameters")
    assert one is not None
    assert two is not None
    text = draw_bridge(one, two, 920)
    assert re.findall(r'class="value[^>]*>([^<]*)<', text) == [
        *("178 MiB", "−12 MiB", "−32 MiB", "−34 MiB", "−23 MiB", "+17 MiB", "+1.4 MiB", "+2.4 MiB", "+218 KiB"),
        "97 MiB",
    ]


def test_the_steps_of_a_bridge_join(run: Path) -> None:
    """Each row begins where the previous one ended, down to the bar of the other strategy."""
    told = ComparisonPageData.read(run)
    one, two = told.strategy("native/nothing"), told.strategy("native/parameters")
    assert one is not None
    assert two is not None
    shapes = re.findall(r'<rect x="([\d.]+)" y="[\d.]+" width="([\d.]+)".*? class="(\S+)"', draw_bridge(one, two, 920))
    at = [(float(x), float(x) + float(width), kind) for x, width, kind in shapes]
    assert [kind for *_, kind in at] == [
        *("whole", "c-parameters", "c-gradients", "c-optimizer", "c-communication", "c-activations", "c-temporaries"),
        *("c-unattributed", "c-runtime", "whole"),
    ]
    less, more = at[1:5], at[5:9]
    assert [end for _, end, _ in less] == pytest.approx([at[0][1], *(start for start, _, _ in less[:-1])], abs=0.2)
    assert [start for start, _, _ in more] == pytest.approx([less[-1][0], *(e for _, e, _ in more[:-1])], abs=0.2)
    assert at[-1][1] == pytest.approx(more[-1][1], abs=1.0)  # a bar is at least a pixel wide


def test_the_balance_of_an_outlier_is_cut(run: Path) -> None:
    """Its row has a gap, its ranks are as far apart as in bytes, and the others have room to differ."""
    told = ComparisonPageData.read(run)
    drawn = draw_rank_balance(told, 920)
    said = "; the bar of deepspeed/gradients+library is cut short, it is 704 MiB"
    assert f'aria-label="Each rank\'s peak{said}"'.replace("'", "&#x27;") in drawn
    assert drawn.count('class="break"') == 2
    dots = {
        (strategy, int(rank)): float(x)
        for x, strategy, rank in re.findall(r'<circle cx="([\d.]+)" [^>]*><title>([^,]+), rank (\d): ', drawn)
    }
    assert dots["deepspeed/gradients+library", 0] == 850
    per_byte = (dots["horovod/nothing", 0] - dots["horovod/nothing", 1]) / 0.02 / 182.4
    gap = dots["deepspeed/gradients+library", 0] - dots["deepspeed/gradients+library", 1]
    assert gap == pytest.approx(704 * 0.02 * per_byte, rel=0.02)
    assert dots["horovod/nothing", 0] > 600
    assert "A row with a gap is cut short, so that all others stay readable: deepspeed/gradients+library holds 704" in (
        render_comparison(told)
    )
