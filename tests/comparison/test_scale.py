"""Worlds of several sizes: which, what their figures say, and for real."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.cuda_accounts import account as on_cuda
from tests.support.scalings import made, one_strategy, timed, two_strategies
from tests.support.task_text import TASK
from unipar import errors
from unipar.comparison.request import parse_world_sizes
from unipar.comparison.scale import scale, select_worlds
from unipar.config import Config, Strategy
from unipar.results.row import StrategyResult
from unipar.results.scaling import ScaledStrategy, Scaling

pytestmark = pytest.mark.forked


def config(**changed: Any) -> Config:
    return Config.model_validate({"batch": {"total": 8}, "device": "cpu", "train": {"steps": 14}} | changed)


def planned(batch: dict[str, Any], sizes: list[int], *strategies: str) -> list[ScaledStrategy]:
    asked = [Strategy.parse(strategy) for strategy in strategies or ("native/nothing",)]
    return [world for world, _, _ in select_worlds(config(batch=batch), sizes, asked, "cpu")]


# Which worlds


def test_sizes_are_sorted_and_each_is_there_once() -> None:
    """Sizes are text or numbers."""
    assert parse_world_sizes("4, 1,2,2") == parse_world_sizes([2, 4, 1]) == [1, 2, 4]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("2", "--world: 2 does not scale: give two sizes or more, each of at least 1 (--world 1,2)"),
        ("0,2", "--world: 0,2 does not scale: give two sizes or more, each of at least 1 (--world 1,2)"),
        ("1;2", "--world: '1;2' is not a list of sizes; put commas between them (--world 1,2,4)"),
    ],
)
def test_what_is_no_list_of_worlds(text: str, said: str) -> None:
    """One alone, none at all, no numbers."""
    with pytest.raises(errors.ConfigError) as e:
        parse_world_sizes(text)
    assert str(e.value) == said


def test_the_smallest_world_runs_once() -> None:
    """There strong and weak scaling are the same thing."""
    assert [world.name for world in planned({"total": 8}, [1, 2, 4])] == [
        "native/nothing x1",
        "native/nothing x2 strong",
        "native/nothing x2 weak",
        "native/nothing x4 strong",
        "native/nothing x4 weak",
    ]


@pytest.mark.parametrize(
    ("batch", "strong", "weak"),
    [
        ({"total": 8}, (8, 4, 1), (16, 8, 1)),
        ({"total": 8, "micro": 2}, (8, 2, 2), (16, 2, 4)),
        ({"total": 8, "accumulate": 2}, (8, 2, 2), (16, 4, 2)),
        ({"micro": 4, "accumulate": 2}, (8, 2, 2), (16, 4, 2)),
    ],
)
def test_strong_keeps_the_total_and_weak_the_share_of_a_rank(
    batch: dict[str, Any], strong: tuple[int, ...], weak: tuple[int, ...]
) -> None:
    """(total, micro, accumulate) on two ranks, by what the config says on one."""
    _, first, second = planned(batch, [1, 2])
    assert (first.samples, first.micro, first.accumulate) == strong
    assert (second.samples, second.micro, second.accumulate) == weak


def test_the_config_of_a_world_is_what_its_plan_says() -> None:
    """Each settles to its own numbers."""
    for world, row, at in select_worlds(config(), [1, 2, 4], [Strategy("native", "parameters")], "cpu"):
        assert at is not None
        sizes = at.sizes
        assert (sizes.total, sizes.micro, sizes.accumulate) == (world.samples, world.micro, world.accumulate)
        assert (at.ranks, at.config.parallel.shard, row.outcome) == (world.ranks, "parameters", "waits")
        assert row.strategy == world.name


def test_a_world_that_the_batch_does_not_fill() -> None:
    """Said before anything starts, with the arithmetic."""
    with pytest.raises(errors.ConfigError) as e:
        planned({"total": 8}, [1, 3])
    assert str(e.value) == (
        "batch.total (8) is not a multiple of accumulate x data (1 x 3 = 3); the nearest totals are 6 and 9"
    )


def test_a_world_that_copies_do_not_fill() -> None:
    """Pairs of ranks cannot be made of one."""
    split = config(parallel={"data": 2, "shard": "parameters", "shard_over": 2})
    with pytest.raises(errors.ConfigError) as e:
        list(select_worlds(split, [1, 2], [Strategy("native", "parameters")], "cpu"))
    assert str(e.value) == (
        "parallel.shard_over (2) does not divide the number of ranks (1): give a divisor of it, or leave "
        "shard_over out, so that all ranks split one copy"
    )


def test_a_strategy_that_is_one_process_is_one_row() -> None:
    """Such a strategy has no larger worlds; the others run."""
    found = list(select_worlds(config(), [1, 2], [Strategy("single"), Strategy("native")], "cpu"))
    assert [(world.strategy, row.outcome) for world, row, _ in found] == [
        ("single", "refused"),
        *[("native/nothing", "waits")] * 3,
    ]
    assert found[0][1].note == "it is one process, whatever the size of the world"


@pytest.fixture
def found() -> Scaling:
    return one_strategy()


def test_speed_up_and_efficiency(found: Scaling) -> None:
    """8 samples in 80 ms; in 50 ms on two ranks 1.6 times that; 16 in 100 ms also."""
    assert [found.rate(world) for world in found.worlds] == pytest.approx([100, 160, 160])
    assert [found.speed_up(world) for world in found.worlds] == pytest.approx([1, 1.6, 1.6])
    assert [found.efficiency(world) for world in found.worlds] == pytest.approx([1, 0.8, 0.8])


def test_the_ideal_begins_at_the_smallest_world() -> None:
    """Twice the samples/s on 4 ranks instead of 2 is an efficiency of 100 %."""
    two = timed("native/nothing", 2, 0.08, "strong", "weak")
    four = timed("native/nothing", 4, 0.04, "strong")
    two_to_four = made(two, four)
    assert two_to_four.efficiency(four[0]) == pytest.approx(1.0)


def test_the_table(found: Scaling) -> None:
    """Below the answer, all of it; the middle half only where there is room."""
    assert found.table(100).splitlines()[:2] == [
        "Part of the ideal speed: strong scaling: 80 % for native/nothing on 2 ranks; weak scaling: 80 % for",
        "  native/nothing on 2 ranks",
    ]
    assert found.tables(100)[0] == [
        "strategy        ranks  scaling         step ms  samples/s  speed-up  efficiency      RSS",
        "native/nothing      1  both        80 [80..80]        100      1.00       100 %  100 MiB",
        "native/nothing      2  strong      50 [50..50]        160      1.60        80 %  100 MiB",
        "native/nothing      2  weak     100 [100..100]        160      1.60        80 %  100 MiB",
    ]
    assert found.tables(82)[0][1].split() == [
        *("native/nothing", "1", "both", "80", "100", "1.00", "100", "%", "100", "MiB"),
    ]
    assert found.tables(76)[0][1].endswith("1.00       100 %")
    assert "RSS" not in found.table(76)


def test_the_remarks(found: Scaling) -> None:
    """Remarks explain strong, weak, and what ranks on one machine share."""
    assert found.remarks()[:4] == [
        "the losses of strong scaling agree with the smallest world's bit for bit",
        "strong: 8 samples a step in every world; weak: 8 for each rank",
        "speed-up: samples/s in proportion to the smallest world's; efficiency: that in proportion to the ranks",
        "one machine: 2 cores, 1 thread a rank; ranks share its memory and caches, but no cores",
    ]


@pytest.mark.parametrize(
    ("cores", "threads", "device", "said"),
    [
        (2, "2", "cpu", "2 cores, 2 threads a rank; in worlds of more than 1 rank they share cores, which limits"),
        (1, "2", "cpu", "1 core, 2 threads a rank: even one rank has more threads than there are cores, which"),
        (2, "", "cpu", "whether ranks share cores is not known"),
        (9, "2", "cuda", "9 cores, 2 threads a rank, one GPU per rank"),
        (9, "2", "cuda:0", "all ranks share cuda:0: efficiency with one GPU per rank would be different"),
    ],
)
def test_what_ranks_share(found: Scaling, cores: int, threads: str, device: str, said: str) -> None:
    """Cores where there are too few of them, or one GPU."""
    told = made(*zip(found.worlds, found.rows, strict=True), cores=cores, threads=threads, device=device)
    assert said in told.shared()


def test_memory_says_who_counted() -> None:
    """Without a compiler not every block is."""
    watched = two_strategies()
    said = watched.remarks()
    start = next(i for i, remark in enumerate(said) if remark.startswith("allocated here"))
    assert said[start : start + 2] == [
        "allocated here: the peak beyond the base of the largest rank, only torch's own tensors counted; its parts add "
        "up to it",
        "resident here: the same in private pages, as the system counts them; on CUDA: predicted, allocated + context "
        "+ NCCL + rounding",
    ]


def test_memory_has_three_columns_in_a_table_of_its_own() -> None:
    """The memory table fits into 80 columns with the longest name; the first table then has no RSS."""
    main, _, memory = two_strategies().tables(80)
    assert main[0].split()[-1] == "efficiency"
    assert memory[:3] == [
        "memory             ranks  scaling  allocated  resident  on CUDA",
        "native/nothing         1  both       178 MiB   190 MiB  678 MiB",
        "native/nothing         2  strong     178 MiB   190 MiB  878 MiB",
    ]
    wide = made(timed("deepspeed/gradients+library", 2, 0.08, "strong", memory=True))
    assert max(map(len, wide.tables(80)[2])) == 73
    assert "memory  " not in made(timed("native/nothing", 2, 0.08, "strong")).table()


def test_on_cuda_the_second_column_is_what_was_reserved() -> None:
    """And the third is measured."""
    world, row = timed("native/nothing", 1, 0.08, "strong", "weak")
    told = made((world, row.changed(memory=[on_cuda()])))
    assert told.tables(80)[2] == [
        "memory          ranks  scaling  allocated  reserved  on CUDA",
        "native/nothing      1  both       1.0 GiB   1.4 GiB  1.9 GiB",
    ]
    assert "allocated: the peak beyond the base of the largest" in told.table(60)


def test_losses_that_part_are_named() -> None:
    """The same batches give the same losses, in strong scaling; in weak scaling others are right."""
    one = timed("native/nothing", 1, 0.08, "strong", "weak")
    apart = timed("native/nothing", 2, 0.05, "strong", off=1e-3)
    weak = timed("native/nothing", 2, 0.05, "weak", off=1.0)
    assert made(one, apart, weak).remarks()[0] == (
        "DISAGREES: native/nothing x2 strong with native/nothing x1 by 1.0e-03 at step 1; allowed in fp32: 2e-06"
    )
    assert made(one, apart).code == 1
    assert made(one, weak).code == 0
    assert made(one, apart, held=False).code == 0


def test_a_world_that_failed_is_a_row(found: Scaling) -> None:
    """The others keep their figures; where the smallest failed, there is nothing to compare them to."""
    late = [*found.rows[:2], StrategyResult(strategy=found.rows[2].strategy, outcome="failed", note="rank 1 died")]
    one = made(*zip(found.worlds, late, strict=True))
    assert one.tables(100)[0][3] == "native/nothing      2  weak     failed: rank 1 died"
    assert one.code == 1
    early = [StrategyResult(strategy=found.rows[0].strategy, outcome="failed", note="no"), *found.rows[1:]]
    none = made(*zip(found.worlds, early, strict=True))
    assert [none.efficiency(world) for world in none.worlds] == [None, None, None]
    assert none.summary == "No strategy ran in two worlds, so there is nothing to compare"


# For real

FLOPS = 8 * (2 * 3 * (8 * 8 + 8 * 8 + 8) - 2 * 8 * 8)
"""Operations of a step of 8 samples: three products for each matrix, but the first has no gradient of its input."""


@pytest.fixture
def given(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "task.py").write_text(TASK, encoding="utf-8")
    return {
        "task": {"use": f"{tmp_path}/task.py:Sums"},
        "device": "cpu",
        "batch": {"total": 8, "micro": 2},
        "train": {"steps": 8, "optimizer": {"lr": 0.01}},
        "compare": {"repeat": 2, "memory": False},
        "out": str(tmp_path / "out"),
    }


def test_worlds_take_turns(given: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """One rank and two, strong and weak: figures, files, the page, and no second time without being told."""
    found = scale(given, worlds=[2, 1])
    assert [row.outcome for row in found.rows] == ["ran", "ran", "ran"]
    assert found.code == 0
    assert found.strategies == ["native/nothing"]
    assert [len(row.losses) for row in found.rows] == [8, 8, 8]
    assert [len(row.peak_rss) for row in found.rows] == [1, 2, 2]
    assert found.rows[1].losses == pytest.approx(found.rows[0].losses, abs=2e-6)
    assert found.rows[2].losses != pytest.approx(found.rows[0].losses, abs=2e-6)
    assert all(found.efficiency(world) for world in found.worlds)
    out = tmp_path / "out/scale"
    assert sorted(path.name for path in out.iterdir()) == [
        "asked",
        "report.html",
        "scale.csv",
        "scale.json",
        "world-native-nothing-x1",
        "world-native-nothing-x2-strong",
        "world-native-nothing-x2-weak",
    ]
    assert found.note == f"page: {out}/report.html"
    told = json.loads((out / "scale.json").read_text("utf-8"))
    assert [(w["strategy"], w["ranks"], w["samples"]) for w in told["worlds"]] == [
        ("native/nothing", 1, 8),
        ("native/nothing", 2, 8),
        ("native/nothing", 2, 16),
    ]
    assert [w["efficiency"] for w in told["worlds"]] == [found.efficiency(w) for w in found.worlds]
    sheet = (out / "scale.csv").read_text("utf-8").splitlines()
    assert [row.split(",")[:8] for row in sheet[1:]] == [
        ["native/nothing", "1", "both", "8", "2", "4", "ran", ""],
        ["native/nothing", "2", "strong", "8", "2", "2", "ran", str(found.agreements[0][1].digits or "all")],
        ["native/nothing", "2", "weak", "16", "2", "4", "ran", ""],
    ]
    assert [(w["flops"], w["flops_per_second"]) for w in told["worlds"]] == [
        (flops, pytest.approx(flops / w["samples"] * w["samples_per_second"]))
        for flops, w in zip((FLOPS, FLOPS, 2 * FLOPS), told["worlds"], strict=True)
    ]
    assert [w["waiting"] is None for w in told["worlds"]] == [True, False, False]
    written = (out / "report.html").read_text("utf-8")
    (config,) = (out / "asked").iterdir()
    said = f"unipar scale {config} --out {tmp_path}/out --world 1,2 --strategy native/nothing --overwrite"
    assert f"<pre>{said}</pre>" in written
    assert "compare.repeat: 2\n" in written
    lines = [re.split("  +", line.strip())[1] for line in capfd.readouterr().err.splitlines() if "round 2" in line]
    assert [line.partition(" round")[0] for line in lines] == [found.rows[i].strategy for i in (1, 2, 0)]
    with pytest.raises(errors.OutExists) as e:
        scale(given, worlds=[2, 1])
    assert (
        str(e.value) == f"{out} holds an earlier scaling: give --overwrite to replace it, or name another folder (out)"
    )


def test_a_config_that_no_world_can_run(given: dict[str, Any], tmp_path: Path) -> None:
    """The reason is raised, and no file is written."""
    given["train"]["precision"] = "fp16"
    with pytest.raises(errors.Unsupported) as e:
        scale(given, worlds=[1, 2])
    assert str(e.value) == (
        "native/nothing: train.precision: fp16 needs CUDA, where it is fast; on the CPU use bf16-mixed or fp32"
    )
    assert not (tmp_path / "out").exists()


def test_too_few_gpus(given: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names what asked for them."""
    given["device"] = "cuda"
    monkeypatch.setattr("unipar.distributed.accelerators.count_visible_gpus", lambda: 1)
    with pytest.raises(errors.Unsupported) as e:
        scale(given, worlds=[1, 2])
    assert str(e.value) == (
        "native/nothing: --world: 2 ranks on cuda; one GPU visible here; lower it, set device: cpu, "
        "or share one GPU with device: cuda:0"
    )


def test_scale_is_not_for_a_foreign_launcher(given: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank would start all worlds."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    for name, value in zip(names, ("1", "1", "2", "2", "127.0.0.1", "29500"), strict=True):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with pytest.raises(errors.WorldMismatch) as e:
        scale(given, worlds=[1, 2])
    assert str(e.value) == (
        "scale starts a world for each size, and this process is rank 1 of a world that torchrun started: "
        "run it without that launcher"
    )
