"""Page of a scaling: figures, memory in three columns, the config, and the command."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.scalings import made, one_strategy, timed, two_strategies, with_work, worlds_with_work
from unipar.report.build import try_write_page, write_html
from unipar.report.pages.scaling_page import render_scaling
from unipar.results.scaling import Scaling


@pytest.fixture
def found() -> Scaling:
    return one_strategy()


def test_the_page_says_first_how_near_the_ideal_is(tmp_path: Path) -> None:
    """The headline names the best strategy first; figures have an ideal line, and memory if it was measured."""
    watched = two_strategies()
    assert watched.summary == (
        "Part of the ideal speed: strong scaling: 89 % for native/parameters on 2 ranks, 80 % for native/nothing on "
        "2 ranks; "
        "weak scaling: 80 % for native/nothing on 2 ranks, 50 % for native/parameters on 2 ranks"
    )
    told = render_scaling(watched, tmp_path)
    for name in ("speed-up", "efficiency", "memory", "worlds", "how"):
        assert f'<section id="{name}">' in told
    assert told.count('class="ideal"') == 2 * 2 * 2  # of two figures, drawn for two widths, in two panels
    assert "native/parameters, 2 ranks: 1.78" in told
    assert "178 MiB" in told
    assert "http" not in told


def test_the_page_without_memory(found: Scaling, tmp_path: Path) -> None:
    """Without memory, the other sections remain, and resident memory is the peak RSS, marked by ~."""
    told = render_scaling(found, tmp_path)
    assert '<section id="memory">' not in told
    assert "<td>–</td><td>~100 MiB</td><td>–</td></tr>" in told
    assert "assumed" not in told


def test_the_page_has_memory_in_three_columns(tmp_path: Path) -> None:
    """Each world has three memory columns; their meaning and the assumptions are on the page."""
    told = render_scaling(two_strategies(), tmp_path)
    heads = ("allocated here", "resident here", "on CUDA (predicted)")
    assert "".join(f'<th scope="col">{head}</th>' for head in heads) in told
    assert "<td>97 MiB</td><td>104 MiB</td><td>798 MiB</td></tr>" in told
    assert "Allocated: measured, on the largest rank, beyond what it held before the model was built." in told
    assert "CUDA&#x27;s context and torch&#x27;s kernels take 500\N{NO-BREAK SPACE}MiB in each process" in told
    assert "<li>torch&#x27;s own allocator, by a profiler&#x27;s events</li>" in told


def test_the_page_has_the_work_of_a_step(found: Scaling, tmp_path: Path) -> None:
    """The section of a comparison's page, with a row for each world."""
    assert '<section id="work">' not in render_scaling(found, tmp_path)
    told = render_scaling(worlds_with_work("NVIDIA H200", precision="bf16-mixed"), tmp_path)
    assert '<section id="work">' in told
    assert (
        '<tr><th scope="row" class="text">native/nothing</th><td class="text">weak</td><td>2</td><td>10240</td>'
        "<td>160</td><td>0.0 %</td><td>20 %</td></tr>"
    ) in told
    assert (
        '<tr><th scope="row" class="text">native/nothing</th><td class="text">strong</td><td>2</td><td>5.0 %</td>'
        "<td>10.0 %</td></tr>"
    ) in told
    assert told.count("forward and backward of a step are 8 GFLOP with 8 samples, 16 GFLOP with 16") == 1


def test_a_rank_that_a_world_lacks_is_a_dash(tmp_path: Path) -> None:
    """Waiting by rank has as many columns as the largest world."""
    two = with_work(timed("native/nothing", 2, 0.050, "strong"), 0.05, 0.1, flops=None)
    four = with_work(timed("native/nothing", 4, 0.050, "strong"), 0.1, 0.2, 0.3, 0.4, flops=None)
    assert "<td>2</td><td>5.0 %</td><td>10.0 %</td><td>–</td><td>–</td></tr>" in render_scaling(
        made(two, four), tmp_path
    )


def test_the_page_has_the_config_and_a_command(tmp_path: Path) -> None:
    """The page has the given config (of comparisons by size, the smallest world's) and the command."""
    told = render_scaling(two_strategies(), tmp_path)
    assert "To repeat it" not in told
    for verb, folder, where in (("scale", "scale", "asked"), ("compare", "worlds", "world-1/asked")):
        asked = tmp_path / folder / where
        asked.mkdir(parents=True)
        (asked / "x.json").write_text('{"batch": {"total": 8}, "train": {"steps": 14}}', encoding="utf-8")
        told = render_scaling(two_strategies().changed(verb=verb), tmp_path / folder)
        assert "<pre class='keys'>batch.total: 8\ntrain.steps: 14</pre>" in told
        assert (
            f"<pre>unipar {verb} {asked}/x.json --out {tmp_path} --world 1,2 --strategy native/nothing "
            "--strategy native/parameters --overwrite</pre>"
        ) in told
    (asked / "x.json").write_text('{"batch', encoding="utf-8")
    told = render_scaling(two_strategies().changed(verb="compare"), tmp_path / "worlds")
    assert f'<p class="worry">{asked}/x.json cannot be read: it is truncated' in told


def test_a_page_that_cannot_be_written_is_a_sentence(found: Scaling, tmp_path: Path) -> None:
    """A failure to write the page becomes a sentence, not an error."""
    assert try_write_page(lambda: write_html(render_scaling(found, tmp_path), tmp_path / "gone/report.html")) == (
        f"no page: {tmp_path}/gone/report.html cannot be written: No such file or directory; "
        "give another path by --out FILE"
    )
