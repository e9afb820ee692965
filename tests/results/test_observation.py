"""Results of an observed command: what is read, and the text that fits a screen."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.support.observations import SAME_DROPOUT, UNEQUAL, observed_rank, write_observation
from unipar.errors import ReportError
from unipar.profiling.work import RankWork
from unipar.results.observation import Observation, ObservedCommand, TrainingFinding
from unipar.results.observation_table import describe_work
from unipar.results.observed_recipe import Recipe

TEXT = """\
unipar observe: DDP > GPT (model), 8,926,848 parameters in float32, trained by
  AdamW in the script's own loop; 2 ranks; 12 steps

no fault was found; compared: initial weights, batches

rank  a step    data  forward  backward  update  between  waits    loss
   0  200 ms  1.0 ms    50 ms    110 ms   30 ms   9.0 ms     5%  3.2500
   1  210 ms  1.0 ms    50 ms    110 ms   30 ms    19 ms     5%  3.2500

MiB, rank 0  allocated  param  grad  optim  comm  activ  temp  rest  ?
built              107     20    20     41    20      -   2.9   1.5  -
forward            142     27    27     54    27      -   3.9   2.0  -
backward           165     32    32     63    32      -   4.5   2.3  -
update             178     34    34     68    34      -   4.9   2.5  -
steady             133     26    26     51    26      -   3.6   1.8  -

rank 0: loss 4.5000 at step 1, 3.2500 at step 10; gradient norm 0.75 before the
  clip at step 10, clipped at 1; rate 0.0003
sent in a step: all_reduce 34 MiB (all ranks)
a step: median of steps without recording; waits: share of them spent waiting,
  mostly for other ranks; rest: buffers, libraries, Python; ?: unattributed"""


def test_the_text_of_an_observed_command(tmp_path: Path) -> None:
    """What trains, the findings, time by rank, memory by phase, what is sent, and what the columns mean."""
    assert Observation.read(write_observation(tmp_path / "x")).table() == TEXT


def test_findings_are_first_and_wrapped(tmp_path: Path) -> None:
    """Below the first sentence, each with its kind, step, sentence and way out; an exit code other than 0 is said."""
    folder = write_observation(tmp_path / "x", findings=(UNEQUAL, SAME_DROPOUT), exit_code=1)
    lines = Observation.read(folder).table(80).splitlines()
    assert lines[1:8] == [
        "  AdamW in the script's own loop; 2 ranks; 12 steps; it failed with exit code 1",
        "",
        "fault, unequal copies, step 8: after step 8 1 of 54 weights differ between the",
        "  ranks: blocks.0.attention.query.weight on rank 1. Way out: wrap the model",
        "  before training, and change no weight on one rank alone.",
        "note, same dropout, step 2: dropout drops the same places on all ranks.",
        "compared without a finding: initial weights, batches",
    ]


@pytest.mark.parametrize("width", [80, 100, 140])
def test_a_long_text_fits_a_screen(tmp_path: Path, width: int) -> None:
    """64 ranks with long names and six findings: what matters most stays, no line is too wide, none too many."""
    name = "model.language_model.decoder.layers.31.self_attention.query_key_value.weight"
    long = UNEQUAL.model_copy(update={"says": f"{name} differs on rank 1"})
    ranks = [
        observed_rank(
            rank,
            size=64,
            models=(f"DDP > {'Long' * 30} (model)",),
            seconds=0.2 + (0.5 if rank == 33 else 0.0),
            notes=tuple(f"{name} was not seen: {i}" for i in range(5)),
        )
        for rank in range(64)
    ]
    text = Observation.read(write_observation(tmp_path / "x", ranks, findings=[long] * 6)).table(width)
    lines = text.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= width
    assert "model.language_model....ery_key_value.weight differs" in text.replace("\n  ", " ")
    assert "3 more findings" in text
    assert "62 further ranks: see the page" in text
    assert "  33  700 ms" in text


def test_what_is_not_known_is_left_out(tmp_path: Path) -> None:
    """A script that ended in its second step: no time, no memory, no loss."""
    rank = observed_rank(
        size=1, steps=2, seconds=None, phases={}, waiting=None, losses=(), norms={}, rates={}, models=(), optimizers=()
    )
    text = Observation.read(write_observation(tmp_path / "x", [rank], memory=None)).table()
    assert text == (
        "unipar observe: no model that is still alive, 8,926,848 parameters in float32,\n"
        "  trained by an optimizer that is not known in the script's own loop; 1 rank; 2\n"
        "  steps\n\nno fault was found; compared: initial weights, batches\n\n"
        "rank  a step\n   0       -"
    )


def test_how_a_command_ended() -> None:
    """With an exit code, or by a signal."""
    ends = {code: ObservedCommand(command=("x",), exit_code=code).describe_end() for code in (0, 3, -15, -200)}
    assert ends == {
        0: "ended with exit code 0",
        3: "failed with exit code 3",
        -15: "was ended by SIGTERM",
        -200: "was ended by signal 200",
    }


def test_findings_are_counted() -> None:
    """Faults and notes apart."""
    counted = {
        findings: ObservedCommand(command=("x",), exit_code=0, findings=findings).count_findings()
        for findings in ((), (UNEQUAL,), (SAME_DROPOUT,), (UNEQUAL, UNEQUAL, SAME_DROPOUT))
    }
    assert list(counted.values()) == ["no fault", "1 fault", "no fault, 1 note", "2 faults, 1 note"]


def test_a_rank_0_that_wrote_nothing(tmp_path: Path) -> None:
    """The lowest rank of which there is something takes its place."""
    seen = Observation.read(write_observation(tmp_path / "x", [observed_rank(1)]))
    assert [rank.rank for rank in seen.ranks] == [1]
    assert "rank 1: loss 4.5000 at step 1" in seen.table()


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    """A damaged file, a missing rank, a run log that is none: the error says what to do."""
    folder = write_observation(tmp_path / "x")
    (folder / "rank-1.memory.json").write_text("{", "utf-8")
    assert "rank-1.memory.json" in Observation.read(folder).problems[0]
    (folder / "rank-0.jsonl").write_text("[]\n", "utf-8")
    with pytest.raises(
        ReportError, match=r"run logs in .*/x cannot be read \(TypeError: .*\): observe the command again"
    ):
        Observation.read(folder)
    for file in folder.glob("*.observed.json"):
        file.unlink()
    with pytest.raises(ReportError, match=r"holds observed.json and no rank-0.observed.json of a rank: run"):
        Observation.read(folder)
    (folder / "observed.json").write_text("{}", "utf-8")
    with pytest.raises(ReportError, match="cannot be read as the result of `unipar observe`"):
        Observation.read(folder)


def test_a_finding_as_a_sentence() -> None:
    """With its step and its way out, as far as it has them."""
    assert str(SAME_DROPOUT) == "step 2: dropout drops the same places on all ranks."
    assert str(TrainingFinding(kind="no group", severity="fault", says="alone", way_out="x")) == "alone. Way out: x."


def test_losses_that_are_not_finite(tmp_path: Path) -> None:
    """They are written and read, and the text names their steps."""
    rank = observed_rank(0, losses=(4.5, 4.25, math.nan, math.inf), norms={1: 2.0, 2: math.inf})
    seen = Observation.read(write_observation(tmp_path / "x", [rank]))
    assert [math.isfinite(loss) for loss in seen.ranks[0].losses] == [True, True, False, False]
    lines = seen.table().splitlines()
    assert lines[-5:-3] == [
        "rank 0: loss 4.5000 at step 1, 4.2500 at step 2; loss not finite at step 3, 4;",
        "  gradient norm inf before the clip at step 2, clipped at 1; rate 0.0003",
    ]


def test_operations_of_a_step() -> None:
    """Those of all ranks together, their speed by the slowest rank, and their share of a known peak."""
    work = RankWork(flops=2e12, flops_by="in step 2")
    counted = [observed_rank(rank, work=work) for rank in (0, 1)]
    says = "forward and backward of a step: 4 TFLOP on 2 ranks, counted in step 2; 19 TFLOP/s"
    assert describe_work(counted) == [says]
    on_gpu = work.model_copy(update={"device": "NVIDIA H100 80GB HBM3"})
    recipe = Recipe(autocast="bfloat16")
    devices = [
        observed_rank(rank, recipe=recipe, work=on_gpu.model_copy(update={"device_id": str(rank)})) for rank in (0, 1)
    ]
    assert describe_work(devices) == [f"{says}; MFU 1.0% in bf16-mixed"]
    assert describe_work([counted[0], observed_rank(1)]) == []
    untimed = [observed_rank(rank, work=work, seconds=None) for rank in (0, 1)]
    assert describe_work(untimed) == ["forward and backward of a step: 4 TFLOP on 2 ranks, counted in step 2"]
