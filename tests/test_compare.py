"""Cells that take turns, and what is said of their losses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from unipar import errors
from unipar.config import Config
from unipar.report.comparison import Comparison, Row, agreement, spread
from unipar.verbs import kept
from unipar.verbs.compare import Turns, compare, entered, rotated

TASK = '''
import torch
from torch import nn
from torch.utils.data import TensorDataset

import unipar


class Sums(unipar.Task):
    """The second layer's weight is read outside of it: what FSDP2 cannot have where it is a block."""

    def __init__(self, reach=False, early=False):
        self.reach, self.early = reach, early

    def model(self):
        return nn.Sequential(*(nn.Linear(8, 8) for _ in range(2)), nn.Linear(8, 1))

    def blocks(self, model):
        return ["0", "1"]

    def data(self):
        x = torch.randn(32, 8, generator=torch.Generator().manual_seed(1))
        return TensorDataset(x, x.sum(1, keepdim=True))

    def loss(self, model, batch):
        loss = nn.functional.mse_loss(model(batch[0]), batch[1])
        return loss + 0.01 * model[1].weight.square().mean() if self.reach else loss

    def train(self, run):
        for share in run.batches():
            run.step(share)
            if self.early:
                break
'''


def config(**changed: Any) -> Config:
    return Config.model_validate({"batch": {"total": 8}, "device": "cpu", "train": {"steps": 14}} | changed)


def ran(cell: str, losses: list[float], ms: float = 10.0) -> Row:
    seconds = [[ms / 1e3, ms / 1e3], [ms / 1e3, 2 * ms / 1e3]]
    return Row(cell=cell, outcome="ran", losses=losses, seconds=seconds, peak_rss=[500 * 2**20, 600 * 2**20])


def compared(*rows: Row, **changed: Any) -> Comparison:
    told: dict[str, Any] = {"name": "x", "out": "o", "precision": "fp32", "samples": 8, "warmup": 2} | changed
    return Comparison(rows=list(rows), **told)


ONE = ran("single", [4.0, 3.5, 3.0], 20.0)
SAME = ran("native/nothing", [4.0, 3.5, 3.0])
NEAR = ran("native/parameters", [4.0, 3.5000007, 3.0], 15.0)
FAR = ran("deepspeed/gradients", [4.0, 3.5, 3.1])


# Arithmetic


@pytest.mark.parametrize(
    ("steps", "repeat", "warmup", "rounds"),
    [(14, 3, 2, (4, 4, 4)), (13, 3, 2, (4, 4, 3)), (5, 3, 2, (1, 1, 1)), (4, 3, 1, (1, 1, 1)), (2, 1, 1, (1,))],
)
def test_steps_are_cut_into_warm_up_and_rounds(steps: int, repeat: int, warmup: int, rounds: tuple[int, ...]) -> None:
    """Nothing is left over, and there is always a step to warm up."""
    made = Turns.of(config(train={"steps": steps}, compare={"repeat": repeat}))
    assert (made.warmup, made.rounds) == (warmup, rounds)


def test_too_few_steps_are_an_error_with_the_arithmetic() -> None:
    """One step more than there are rounds is the least."""
    with pytest.raises(errors.ConfigError) as e:
        Turns.of(config(train={"steps": 3}))
    assert str(e.value) == (
        "train.steps: 3 is too few to compare: 1 to warm up and 3 timed rounds (compare.repeat) of at least 1 make 4"
    )


def test_epochs_cannot_be_cut_into_turns() -> None:
    """How many steps an epoch has is not known before the data is."""
    with pytest.raises(errors.ConfigError) as e:
        Turns.of(config(train={"epochs": 2}))
    assert str(e.value) == (
        "train.epochs: 2 cannot be cut into turns, which are counted in steps; "
        "give train.steps instead (--set train.steps=50)"
    )


def test_each_round_begins_with_another_cell() -> None:
    """The order rotates; nobody left is nobody's turn."""
    assert [rotated("abc", i) for i in range(4)] == [list("abc"), list("bca"), list("cab"), list("abc")]
    assert rotated([], 1) == []


@pytest.mark.parametrize(
    ("losses", "text", "within"),
    [
        ([4.0, 3.0], "same bits", True),
        ([4.0, 3.0000006], "6 digits", True),
        ([4.0, 3.00002], "5 digits", False),
        ([4.0, 3.2], "1 digit", False),
        ([4.0, 9.0], "0 digits", False),
    ],
)
def test_digits_come_from_the_largest_relative_difference(losses: list[float], text: str, within: bool) -> None:
    """Relative 2e-7 is six digits, 1e-5 is five."""
    found = agreement(losses, [4.0, 3.0], 2e-6)
    assert (str(found), found.within) == (text, within)


def test_the_tolerance_is_held_over_the_first_twenty_steps() -> None:
    """Later on training itself makes small differences large; the digits still tell."""
    reference = [1.0] * 40
    found = agreement([1.0] * 20 + [1.1] * 20, reference, 2e-6)
    assert (found.digits, found.within, found.step) == (0, True, 1)
    assert agreement([1.0] * 19 + [1.1] * 21, reference, 2e-6).within is False


def test_a_small_loss_is_held_to_the_tolerance_itself() -> None:
    """Below 1 the tolerance is absolute: the last digits of a loss near zero mean nothing."""
    assert agreement([1.5e-6], [1e-6], 2e-6).within


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        ([0.2, 0.21, 0.22], "210 [205..215]"),
        ([0.0112, 0.0114], "11 [11..11]"),
        ([0.0042, 0.0052], "4.7 [4.5..4.9]"),
        ([0.0004], "0.40 [0.40..0.40]"),
    ],
)
def test_a_step_time_is_shown_with_its_middle_half(seconds: list[float], text: str) -> None:
    """In milliseconds, with two figures or more."""
    assert spread(seconds) == text


# The table


def test_the_table_fits_eighty_columns() -> None:
    """Figures in their columns, a refusal as a sentence in its row, then what it all means."""
    refused = Row(cell="accelerate/parameters", outcome="refused", note="its FSDP2 is not there yet; " * 3)
    gone = Row(
        cell="horovod/nothing",
        outcome="absent",
        note="backend 'horovod' needs horovod, not installed here: unipar install horovod",
    )
    long = replace(NEAR, cell="deepspeed/gradients+library")
    text = str(compared(ONE, SAME, long, refused, gone))
    assert text.splitlines() == [
        "cell                         loss           step ms     x  samples/s      RSS",
        "single                       reference  20 [20..25]  2.00        400  600 MiB",
        "native/nothing               same bits  10 [10..12]  1.00        800  600 MiB",
        "deepspeed/gradients+library  6 digits   15 [15..19]  1.50        533  600 MiB",
        "accelerate/parameters        refused: its FSDP2 is not there yet; its FSDP2 is",
        "                             not there yet; its FSDP2 is not there yet;",
        "horovod/nothing              backend 'horovod' needs horovod, not installed",
        "                             here: unipar install horovod",
        "",
        "all 2 cells agree with one process to 6 digits or more, over 3 steps",
        "loss of one process: 4.0000 at step 1, 3.0000 at step 3",
        "step ms: median [middle half] of 4 steps in 2 turns, of the slowest rank",
        "x: step time in proportion to native/nothing",
        "RSS: peak of the largest rank; no ranking: the allocator keeps what is freed",
    ]


def test_a_table_that_would_be_too_wide_leaves_x_out() -> None:
    """Steps of seconds have longer figures."""
    slow = replace(SAME, cell="deepspeed/gradients+library", seconds=[[1.2, 1.5, 1.6]])
    lines = str(compared(replace(ONE, seconds=[[1.1]]), slow)).splitlines()
    assert lines[0].split() == ["cell", "loss", "step", "ms", "samples/s", "RSS"]
    assert not any(line.startswith("x:") for line in lines)
    assert max(map(len, lines)) <= 80


def test_a_disagreement_is_said_and_is_a_failure() -> None:
    """Which cell, which step, both losses and what was allowed."""
    found = compared(ONE, SAME, FAR)
    assert found.code == 1
    assert "DISAGREES: deepspeed/gradients by 1.0e-01 at step 3: 3.1 for 3; allowed in fp32: 2e-06" in found.remarks()
    assert str(found).splitlines()[3].split()[:3] == ["deepspeed/gradients", "1", "digit!"]


@pytest.mark.parametrize(
    ("rows", "code"),
    [
        ([ONE, SAME], 0),
        ([ONE, SAME, Row(cell="b", outcome="refused"), Row(cell="c", outcome="absent")], 0),
        ([ONE, SAME, Row(cell="b", outcome="failed")], 1),
        ([ONE, Row(cell="b", outcome="refused")], 1),
        ([Row(cell="single", outcome="failed"), SAME], 1),
    ],
)
def test_refusals_are_an_answer_and_failures_are_not(rows: list[Row], code: int) -> None:
    """At least one cell has to have been held to the one process."""
    assert compared(*rows).code == code


def test_an_interrupted_comparison_shows_what_it_has() -> None:
    """Times of the turns that were taken, and the code of a signal."""
    half = replace(SAME, outcome="waits", losses=[], seconds=[[0.01]], peak_rss=[])
    found = compared(replace(ONE, outcome="waits", losses=[], peak_rss=[]), half, interrupted=True)
    assert found.code == 130
    assert str(found).splitlines()[2].split() == ["native/nothing", "-", "10", "[10..10]", "1.00", "800", "-"]
    assert "interrupted: cells without figures did not come to their end" in str(found)


# What is kept

OF = {"config": "a", "cells": ["single", "native/nothing"], "task": "b", "versions": {"torch": "2"}}


def test_a_finished_comparison_is_shown_again(tmp_path: Path) -> None:
    """Every figure survives, and a note says where it is from."""
    found = compared(ONE, SAME)
    kept.write(tmp_path, OF, found)
    again = kept.earlier(tmp_path, OF, overwrite=False)
    assert again == replace(found, note=f"from {tmp_path}/compare.json; --overwrite runs it again")


def test_an_unfinished_comparison_runs_anew(tmp_path: Path) -> None:
    """A failed cell may run today, also with other versions of its library."""
    kept.write(tmp_path, OF, compared(ONE, Row(cell="native/nothing", outcome="failed")))
    (tmp_path / "native-nothing").mkdir()
    assert kept.earlier(tmp_path, OF | {"versions": {"torch": "3"}}, overwrite=False) is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("key", ["config", "cells", "task", "versions"])
def test_another_comparison_is_not_overwritten_unasked(tmp_path: Path, key: str) -> None:
    """The message says in what it differs; --overwrite clears it away."""
    kept.write(tmp_path, OF, compared(ONE, SAME))
    with pytest.raises(errors.OutExists) as e:
        kept.earlier(tmp_path, OF | {key: "other"}, overwrite=False)
    assert str(e.value) == (
        f"{tmp_path} holds another comparison (other {key}): give --overwrite to replace it, or another out"
    )
    assert kept.earlier(tmp_path, OF | {key: "other"}, overwrite=True) is None
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_somebody_else_is_never_cleared(tmp_path: Path) -> None:
    """Not even with --overwrite."""
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(
        errors.OutExists, match=r"is there and holds no compare\.json: move it away, or give another out"
    ):
        kept.earlier(tmp_path, OF, overwrite=True)
    assert (tmp_path / "thesis.tex").exists()


# Which cells


def test_single_is_always_first_and_runs_once() -> None:
    """Whether it is asked for or not."""
    both = config(parallel={"data": 2})
    assert list(entered(both, ("native/nothing", "single"))) == ["single", "native/nothing"]


def test_cells_keep_the_order_in_which_they_are_named() -> None:
    """A cell that a pattern names again is not there twice."""
    found = entered(config(parallel={"data": 2}), ("native/parameters", "native/*"))
    assert list(found) == ["single", "native/parameters", "native/nothing"]


def test_a_cell_that_is_not_there_is_a_row() -> None:
    """The others run all the same."""
    row, _ = entered(config(parallel={"data": 2}), ("native/nothing", "horovod/parameters"))["horovod/parameters"]
    assert (row.outcome, row.note) == ("refused", "there is no such cell; horovod has: horovod/nothing")


def test_a_backend_that_nobody_offers_is_an_error() -> None:
    """A typo is not a result."""
    with pytest.raises(errors.BackendNotFound, match="did you mean 'native'"):
        entered(config(parallel={"data": 2}), ("nativ/nothing",))


def test_bf16_master_is_held_to_one_process_in_fp32() -> None:
    """One process has no second copy, so its reference is the full precision."""
    found = entered(config(parallel={"data": 2}, train={"steps": 5, "precision": "bf16-master"}), ("native/*",))
    assert found["single"][1].train.precision == "fp32"
    assert found["single"][0].note == "in fp32: one process keeps no second copy"
    assert {name: row.outcome for name, (row, _) in found.items()} == {
        "single": "waits",
        "native/nothing": "refused",
        "native/parameters": "waits",
    }


def test_one_process_sees_the_same_microbatches() -> None:
    """Two ranks with 4 samples each are 2 microbatches of 4 on one."""
    _, alone = entered(config(parallel={"data": 2}), ())["single"]
    sizes = alone.batch.settle(1)
    assert (sizes.total, sizes.micro, sizes.accumulate) == (8, 4, 2)


# For real


@pytest.fixture
def given(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "task.py").write_text(TASK, encoding="utf-8")
    return {
        "task": {"use": f"{tmp_path}/task.py:Sums"},
        "device": "cpu",
        "parallel": {"data": 2},
        "batch": {"total": 8},
        "train": {"steps": 8, "optimizer": {"lr": 0.01}},
        "compare": {"repeat": 2},
        "out": str(tmp_path / "out"),
    }


def test_cells_take_turns_and_agree(given: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """One cell agrees, one fails with its sentence, one is refused: each is a row, and compare.json holds all."""
    given["task"]["args"] = {"reach": True}
    found = compare(given, cells=("native/nothing", "native/parameters", "native/gradients"))
    one, ddp, fsdp, none = found.rows
    assert [row.outcome for row in found.rows] == ["ran", "ran", "failed", "refused"]
    assert found.code == 1
    assert found.disagree == []
    assert len(one.losses) == len(ddp.losses) == 8
    assert one.losses[-1] < one.losses[0]
    assert [[len(turn) for turn in row.seconds] for row in (one, ddp)] == [[3, 3], [3, 3]]
    assert len(one.peak_rss) == 1
    assert len(ddp.peak_rss) == 2
    assert "model.blocks" in fsdp.note
    assert none.note == "there is no such cell; native has: native/nothing, native/parameters"
    told = json.loads((tmp_path / "out/compare/compare.json").read_text("utf-8"))
    assert [cell["cell"] for cell in told["cells"]] == [row.cell for row in found.rows]
    assert told["cells"][1]["agreement"]["within"] is True
    assert told["finished"] is False
    assert (tmp_path / "out/compare/native-nothing/rank-1.log").exists()
    said = [line[11:] for line in capfd.readouterr().err.splitlines()]
    order = [line.partition(" ")[0] for line in said if "round" in line]
    assert order == ["single", "native/nothing", "native/nothing", "single"]


def test_a_loop_that_ends_early_is_told_so(given: dict[str, Any]) -> None:
    """The task's own train(run) is what takes turns; what is wrong in `single` is wrong in all, so it ends there."""
    given["task"]["args"] = {"early": True}
    with pytest.raises(errors.TaskError, match=r"train\(run\) ended after 1 of 8 steps"):
        compare(given, cells=("native/nothing",))


def test_an_interrupt_ends_all_worlds_and_prints_the_table(given: dict[str, Any], tmp_path: Path) -> None:
    """Ctrl-C while cells wait for their turn: exit code 130, no process left, and the rows so far."""
    given["train"]["steps"] = 100_000
    (tmp_path / "x.yaml").write_text(json.dumps(given), encoding="utf-8")
    command = [sys.executable, "-m", "unipar", "compare", str(tmp_path / "x.yaml"), "--cell", "native/nothing"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as going:
        assert going.stderr is not None
        assert any("single is warm" in line for line in going.stderr)
        workers = _children(going.pid)
        os.kill(going.pid, signal.SIGINT)
        out, _ = going.communicate(timeout=20)
    assert going.returncode == 130
    assert out.splitlines()[1].startswith("single")
    assert "interrupted: cells without figures did not come to their end" in out
    assert len(workers) == 3
    until = time.monotonic() + 5
    while any(Path(f"/proc/{pid}").exists() for pid in workers) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)


def _children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text("ascii").split()]


def test_compare_is_not_for_a_foreign_launcher(given: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """It would start its worlds once on each rank."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    for name, value in zip(names, ("1", "1", "2", "2", "127.0.0.1", "29500"), strict=True):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with pytest.raises(errors.WorldMismatch) as e:
        compare(given)
    assert str(e.value) == (
        "compare starts a world for each cell, and this is rank 1 of one that torchrun started: "
        "run it without that launcher"
    )


def test_epochs_in_a_file_are_refused_before_anything_starts(given: dict[str, Any], tmp_path: Path) -> None:
    """Nothing is written either."""
    given["train"] = {"epochs": 1}
    with pytest.raises(errors.ConfigError, match=r"train\.epochs: 1 cannot be cut into turns"):
        compare(given)
    assert not (tmp_path / "out").exists()
