"""Table of what a step does in worlds of several sizes, its remarks, and the same figures in JSON."""

from __future__ import annotations

from tests.support.compared_rows import SAME, compared
from tests.support.scalings import made, timed, with_work, worlds_with_work
from unipar.profiling.work import CompiledWork, RankWork
from unipar.results.scaling import Scaling
from unipar.results.step_work.figures import StepFigures
from unipar.results.step_work.work_table import format_work_table


def test_the_table_of_worlds() -> None:
    """Operations are those of the world's own batch, as any world with as many samples has counted them."""
    found = worlds_with_work()
    assert found.tables(80)[1] == [
        "work            ranks  scaling  tokens/s  GFLOP/s  waits",
        "native/nothing      1  both         6400      100      -",
        "native/nothing      2  strong      10240      160  5.0 %",
        "native/nothing      2  weak        10240      160   20 %",
    ]
    assert (
        "GFLOP/s: of all ranks together; forward and backward of a step are 8 GFLOP with 8 samples, 16 GFLOP with 16, "
        "without what is computed again"
    ) in found.remarks()


def test_a_world_without_figures_has_no_row() -> None:
    """A world that failed is in the first table only."""
    found = worlds_with_work()
    found.rows[2] = found.rows[2].changed(outcome="failed", note="rank 1 died")
    assert [line.split()[:3] for line in found.tables(80)[1][1:]] == [
        ["native/nothing", "1", "both"],
        ["native/nothing", "2", "strong"],
    ]


def test_the_figures_of_worlds_as_data() -> None:
    """`scale.json` has what the table has, with all digits; MFU is of the devices of that world."""
    found = worlds_with_work("NVIDIA H200", precision="bf16-mixed")
    named = ("tokens_per_second", "flops", "flops_per_second", "mfu", "waiting", "most_waiting")
    assert [[world[name] for name in named] for world in found.model_dump(mode="json")["worlds"]] == [
        [6400.0, 8e9, 1e11, 1e11 / 989.4e12, None, None],
        [10240.0, 8e9, 1.6e11, 1.6e11 / (2 * 989.4e12), 0.05, 0.1],
        [10240.0, 16e9, 1.6e11, 1.6e11 / (2 * 989.4e12), 0.2, 0.3],
    ]
    assert Scaling.read(found.model_dump(mode="json")).step_figures() == found.step_figures()
    assert "MFU: that in proportion to the peak of all devices in bf16-mixed, 989 TFLOP/s of NVIDIA H200 each" in (
        found.remarks()
    )


def test_a_count_that_differs_in_a_batch_of_the_same_size_is_told() -> None:
    """Other samples are other operations; as many samples are the same."""
    one = with_work(timed("native/nothing", 1, 0.080, "strong", "weak"), 0.0, flops=8e9)
    two = with_work(timed("native/nothing", 2, 0.050, "strong"), 0.0, 0.0, flops=9e9)
    weak = with_work(timed("native/nothing", 2, 0.100, "weak"), 0.0, 0.0, flops=16e9)
    said = [remark for remark in made(one, two, weak).remarks() if "counted otherwise" in remark]
    assert said == [
        "the operations of a step were counted otherwise in native/nothing x2 strong 9e+09; shown with 8e+09"
    ]


def test_a_narrow_table_has_fewer_columns() -> None:
    """Operations a second go first, because MFU says the same; then the last columns; one is always left."""
    compiled = CompiledWork(graphs=1)
    figures = StepFigures(tokens_per_second=6400.0, flops_per_second=1e11, mfu=0.4, waiting=0.05, compiled=compiled)
    heads, rows = ("work", "ranks", "scaling"), [(("native/nothing", "2", "strong"), figures)]
    heads_in = {width: format_work_table(heads, rows, width)[0].split()[3:] for width in (90, 80, 60, 10)}
    assert heads_in == {
        90: ["tokens/s", "GFLOP/s", "MFU", "waits", "breaks", "recompiles"],
        80: ["tokens/s", "MFU", "waits", "breaks", "recompiles"],
        60: ["tokens/s", "MFU", "waits"],
        10: ["tokens/s"],
    }
    assert format_work_table(heads, [(("native/nothing", "2", "strong"), StepFigures())], 80) == []


def test_a_device_without_a_peak_in_this_precision() -> None:
    """A T4 computes no bf16: the table is there, without MFU."""
    ranks = [RankWork(flops=8e9, device="Tesla T4", device_id=str(rank)) for rank in (0, 1)]
    text = compared(SAME.changed(work=ranks), precision="bf16-mixed").table()
    assert "native/nothing      800" in text
    assert "MFU" not in text
