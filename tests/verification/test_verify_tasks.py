"""Correct engines on difficult tasks: they agree, no fault is named, and remarks say what the task does."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import unipar
from examples.gan import Gan
from tests.conformance import tasks
from tests.support import special_tasks
from tests.support.forks import Forks
from tests.support.world import PYTHONPATH_VARIABLE, eventually
from unipar import errors
from unipar.results.verdicts import Verdicts
from unipar.verification.verify import verify

pytestmark = pytest.mark.forked

ROOT = Path(__file__).parents[2]

ONLY = ("native/nothing", "native/parameters")


@pytest.fixture
def prove(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Verdicts]:
    """Function that verifies a task over five steps of 16 samples."""
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH_VARIABLE["PYTHONPATH"])

    def proved(
        task: type[unipar.Task],
        *,
        world: int = 2,
        strategies: tuple[str, ...] = ONLY,
        overrides: dict[str, Any] | None = None,
        **args: Any,
    ) -> Verdicts:
        optimizer = {"name": "adamw", "lr": 1e-2, "weight_decay": 0.1, "decay": "matrices"}
        config = {
            "device": "cpu",
            "batch": {"total": 16, "micro": 4},
            "train": {"steps": 20, "optimizer": optimizer, "clip": 0.3},
            "out": str(tmp_path / "out"),
            "task": {"use": f"{task.__module__}:{task.__name__}", "args": args},
        }
        return verify(config, strategies=strategies, world=world, steps=5, overrides=overrides)

    return proved


def agreed(found: Verdicts) -> None:
    assert [(row.strategy, row.outcome, row.finding) for row in found.rows] == [(c, "agrees", None) for c in ONLY]
    assert found.code == 0


@pytest.mark.parametrize(
    ("task", "args"),
    [
        pytest.param(tasks.Distilled, {}, marks=pytest.mark.sweep),
        pytest.param(tasks.Plain, {"tied": True}, marks=pytest.mark.sweep),
        (tasks.Tokens, {"count": 35}),
    ],
    ids=["frozen teacher", "tied weights", "token weights and a ragged batch"],
)
def test_a_healthy_engine_is_given_no_name(
    prove: Callable[..., Verdicts], task: type[unipar.Task], args: dict[str, Any]
) -> None:
    """Both strategies are bit-for-bit equal to a replay; native/parameters reduces each microbatch."""
    found = prove(task, **args)
    agreed(found)
    assert [row.bits for row in found.rows] == ["shares", "micros"]
    assert found.remarks == []


@pytest.mark.sweep
def test_four_ranks(prove: Callable[..., Verdicts]) -> None:
    """With four ranks a library may add in its own order; then the spread of one process decides."""
    found = prove(tasks.Plain, world=4)
    agreed(found)
    assert found.ranks == 4


def test_batch_norm_and_dropout_are_named(prove: Callable[..., Verdicts]) -> None:
    """Strategies are compared with one process that splits batches as they do."""
    found = prove(tasks.Normed)
    agreed(found)
    (said,) = found.remarks
    assert said.startswith("BatchNorm without sync takes the statistics of a microbatch on one rank (norm): the loss ")
    assert said.endswith("so strategies are compared with one that splits them as they do")
    assert found.summary == (
        "all 2 strategies agree with one process over 5 steps on 2 ranks, and the training depends on how a batch is "
        "cut, so another number of ranks trains another model unless batch.micro stays 4"
    )
    assert found.cut_dependence is not None
    assert (found.cut_dependence.kind, found.cut_dependence.micro) == ("batch statistics", 4)


@pytest.mark.sweep
def test_dropout_is_set_to_0_and_named(prove: Callable[..., Verdicts]) -> None:
    """Dropout is set to 0, and a remark says so."""
    found = prove(tasks.Plain, dropout=0.3)
    agreed(found)
    assert found.remarks == ["dropout is set to 0 for this verification: dropout"]


@pytest.mark.sweep
def test_a_loss_across_samples_is_named(prove: Callable[..., Verdicts]) -> None:
    """A remark says that the loss of a batch is not the mean of its halves' losses."""
    found = prove(special_tasks.Contrast)
    agreed(found)
    assert found.remarks[0].startswith("the loss of a batch is not the mean of its halves' losses: it combines ")
    assert found.cut_dependence is not None
    assert found.cut_dependence.kind == "samples combined"


def test_a_sum_is_named_and_strict_fails(tmp_path: Path, forks: Forks) -> None:
    """The first line is no plain yes, the page and verify.json say the same, and --strict exits 1."""
    config: dict[str, Any] = {"device": "cpu", "batch": {"total": 16}, "train": {"steps": 5}, "out": str(tmp_path)}
    config["task"] = {"use": "tests.support.special_tasks:Summed"}
    (tmp_path / "c.yaml").write_text(json.dumps(config), "utf-8")
    words = ["verify", str(tmp_path / "c.yaml"), "--steps", "2", "--strategies", ONLY[0], "--world", "2", "--strict"]
    done = forks.unipar(words, {**PYTHONPATH_VARIABLE, "COLUMNS": "300"})
    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    assert lines[:3] == [
        "native/nothing agrees with one process over 2 steps on 2 ranks, and the training depends on how a batch is "
        "cut, so another number of ranks trains another model",
        "  way out: return the mean over the batch from loss(), as reduction='mean' gives it: the gradient of a sum "
        "grows with the size of a microbatch",
        "  with --strict, this alone makes the exit code 1",
    ]
    assert lines[5].startswith("native/nothing  DDP ")
    said = json.loads((tmp_path / "verify" / "verify.json").read_text("utf-8"))
    assert (said["summary"], said["strict"], said["code"]) == (lines[0], True, 1)
    assert (said["cut_dependence"]["kind"], said["cut_dependence"]["micro"]) == ("sum", None)
    assert "so another number of ranks trains another model" in (tmp_path / "verify" / "report.html").read_text("utf-8")


def test_strategies_that_were_named_are_known(prove: Callable[..., Verdicts]) -> None:
    """A strategy by its name was asked for, one by a pattern was not; the headline has the reason why neither runs."""
    found = prove(tasks.Plain, strategies=("horovod/*", "deepspeed/nothing"), overrides={"train.local_steps": 2})
    assert [(row.strategy, row.outcome, row.named) for row in found.rows] == [
        ("horovod/nothing", "refused", False),
        ("deepspeed/nothing", "refused", True),
    ]
    assert found.summary == (
        "no verdict: no strategy ran; 2 cannot run this model: horovod/nothing, deepspeed/nothing (train.local_steps: "
        "2 is not available here, only in native/nothing)"
    )


def test_a_loss_that_depends_on_the_rank_is_named(prove: Callable[..., Verdicts]) -> None:
    """The modules agree and the loss does not: a fault of its own, also for a model that cannot run in fp64."""
    found = prove(special_tasks.RankScaled, strategies=ONLY[:1])
    finding = found.rows[0].finding
    assert finding is not None
    assert (finding.kind, finding.step, finding.forward) == ("a loss that depends on the rank", 1, "")
    assert re.fullmatch(
        r"the loss function gives another value on rank 1 for the same microbatch and model: \d\.\d+ instead of "
        r"\d\.\d+, 1\.01 times, in microbatch 1 of rank 1 in step 1, although all modules return the same; let "
        r"loss\(\) compute the same on every rank: nothing in it may depend on the rank, on the number of ranks, or on "
        r"what one rank alone has seen",
        finding.says,
    ), finding.says
    assert found.fp64_error == "RuntimeError: expected Float, got Double"


@pytest.mark.sweep
def test_a_loss_that_depends_on_the_number_of_ranks_is_named(prove: Callable[..., Verdicts]) -> None:
    """A loss that every rank divides by the number of ranks is not taken for a gradient that is averaged twice."""
    found = prove(special_tasks.WorldScaled, strategies=ONLY[:1])
    finding = found.rows[0].finding
    assert finding is not None
    assert (finding.kind, finding.step) == ("a loss that depends on the number of ranks", 1)
    assert "gives another value on every rank for the same microbatch and model" in finding.says
    assert ", 0.5 times, in microbatch 1 of rank 0 in step 1" in finding.says


@pytest.mark.sweep
def test_a_model_that_cannot_run_in_fp64(prove: Callable[..., Verdicts]) -> None:
    """In bf16-mixed, fp32 runs stand in for those in fp64, also where the numbers depend on the cut of a batch."""
    found = prove(special_tasks.NormedWithoutDouble, overrides={"train.precision": "bf16-mixed"})
    agreed(found)
    assert found.fp64_error == "RuntimeError: expected Float, got Double"
    assert found.remarks[0].endswith("other orders of addition and weights that were changed in the last place")
    assert {"one process, fp32", "a replay, share by share, fp32"} <= found.one.keys()
    assert not any("fp64" in name for name in found.one)
    assert found.cut_dependence is not None
    assert found.cut_dependence.kind == "batch statistics"


@pytest.mark.sweep
def test_a_size_of_microbatches_that_fails_is_left_out(prove: Callable[..., Verdicts]) -> None:
    """The config's own size works: runs with a size that does not are no part of the spread, and a remark says so."""
    found = prove(special_tasks.NeverOne)
    agreed(found)
    assert found.remarks == [
        "one process cannot run with microbatches of 1 (ValueError: expected more than 1 sample), so such a run is not "
        "part of the spread"
    ]
    assert "one process, microbatches of 2" in found.one


def test_an_error_of_the_task_stays_an_error(prove: Callable[..., Verdicts]) -> None:
    """A loss that fails in fp64 and in the config's precision is not a model that cannot run in fp64."""
    with pytest.raises(errors.WorkerFailed, match="LookupError: no such word"):
        prove(special_tasks.Broken, strategies=ONLY[:1])


@pytest.mark.sweep
def test_an_optimizer_of_the_tasks_own(prove: Callable[..., Verdicts]) -> None:
    """An optimizer of the task that works element by element agrees in every strategy."""
    found = prove(tasks.Owning)
    agreed(found)
    assert found.remarks == []


@pytest.mark.sweep
def test_an_optimizer_that_uses_a_tensors_norm_is_named(prove: Callable[..., Verdicts]) -> None:
    """Such an optimizer disagrees on flat parts of tensors, and agrees on whole tensors."""
    found = prove(special_tasks.ByNorm, strategies=("native/nothing", "native/optimizer", "deepspeed/optimizer"))
    assert [row.outcome for row in found.rows] == ["agrees", "agrees", "disagrees"]
    finding = found.rows[2].finding
    assert finding is not None
    assert (finding.kind, finding.step) == ("an optimizer that uses a tensor's norm", 1)
    assert finding.says == (
        f"step 1 changes {finding.parameter} differently, although losses and norms are the same: the task's optimizer "
        "uses whole tensors, and this strategy keeps them in parts; use shard: nothing, or an optimizer that works "
        "element by element"
    )
    assert found.remarks == [
        "the task's optimizer uses whole tensors (a step on a tensor differs from a step on its halves): strategies "
        "that keep a tensor in parts cannot give the same numbers as one process"
    ]


@pytest.mark.sweep
def test_a_loss_that_draws_is_named(prove: Callable[..., Verdicts]) -> None:
    """Every strategy draws the same numbers as the replay, and a remark says that the loss draws."""
    found = prove(special_tasks.Drawing)
    agreed(found)
    assert found.remarks[0].startswith("the loss draws random numbers; one process that splits batches in ")


@pytest.mark.sweep
def test_a_stream(prove: Callable[..., Verdicts]) -> None:
    """The first samples of a stream are kept: two epochs of two and a half batches."""
    found = prove(tasks.Streamed)
    agreed(found)
    assert [row.bits for row in found.rows] == ["shares", "micros"]
    assert found.remarks == [
        "data() returns a stream: its first samples were read once and kept, and every strategy takes its samples from "
        "these; how ranks and workers read the stream itself is not compared"
    ]


@pytest.mark.sweep
def test_a_stream_that_is_random_per_read(prove: Callable[..., Verdicts]) -> None:
    """A stream that differs when read again gives no verdict."""
    found = prove(special_tasks.UnseededStreamTask)
    assert found.stopped.startswith("the data is random at each read: the same samples, read twice under the same")


def test_data_that_is_random_per_read_is_named(prove: Callable[..., Verdicts]) -> None:
    """Data that differs at each read gives no verdict."""
    found = prove(special_tasks.UnseededTask)
    assert [(row.outcome, row.note) for row in found.rows] == [("waits", "was not run")] * 2
    assert found.stopped.startswith("the data is random at each read: the same samples, read twice under the same")
    assert found.code == 1
    assert "no verdict: the data is random at each read" in str(found)


def test_several_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GAN: each part's steps are compared in the order in which the task's loop takes them."""
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH_VARIABLE["PYTHONPATH"])
    found = verify(ROOT / "configs" / "gan.yaml", task=Gan, strategies=ONLY, steps=4, overrides={"out": str(tmp_path)})
    agreed(found)
    assert len(found.rows[0].losses) == 6  # the generator takes every second one
    assert found.remarks[0].startswith("the parts (generator, critic) have losses of their own")


# Bad input, and what is left behind


def test_what_lies_in_the_folder_is_kept(tmp_path: Path) -> None:
    """Earlier results are replaced only with overwrite, other files never."""
    config = {"device": "cpu", "batch": {"total": 8}, "train": {"steps": 4}, "out": str(tmp_path)}
    (tmp_path / "verify").mkdir()
    (tmp_path / "verify" / "verify.json").write_text("{}", "utf-8")
    with pytest.raises(errors.OutExists) as e:
        verify(config, task=tasks.Plain, strategies=ONLY)
    assert str(e.value) == (
        f"{tmp_path}/verify holds an earlier verification: give --overwrite to replace it, or name another folder (out)"
    )
    (tmp_path / "verify" / "notes.txt").write_text("mine", "utf-8")
    with pytest.raises(errors.OutExists) as e:
        verify(config, task=tasks.Plain, strategies=ONLY, overwrite=True)
    assert str(e.value) == (
        f"{tmp_path}/verify holds notes.txt, which does not belong to verify: "
        "move it away, or name another folder (out)"
    )


def test_one_rank_proves_nothing(tmp_path: Path) -> None:
    """A world of one rank is refused."""
    config = {"device": "cpu", "batch": {"total": 8}, "parallel": {"data": 1}, "train": {"steps": 4}}
    with pytest.raises(errors.ConfigError) as e:
        verify(config, task=tasks.Plain, overrides={"out": str(tmp_path)})
    assert str(e.value) == (
        "verify compares several ranks with one process, and this is a world of 1; give it at least two (--world 2, or "
        "verify(..., world=2))"
    )


def test_ctrl_c(tmp_path: Path, forks: Forks) -> None:
    """After Ctrl-C the table and the files hold what was known, and no folder of a world is left."""
    config: dict[str, Any] = {"device": "cpu", "batch": {"total": 16, "micro": 4}, "train": {"steps": 400}}
    config |= {"out": str(tmp_path), "task": {"use": "tests.conformance.tasks:Plain"}}
    (tmp_path / "c.yaml").write_text(json.dumps(config), "utf-8")
    words = ["-m", "unipar", "verify", str(tmp_path / "c.yaml"), "--steps", "300", "--strategies", ONLY[0]]
    with forks.begin(words, ROOT, PYTHONPATH_VARIABLE) as going:
        eventually(lambda: "task probe" in going.stderr, "the task is not probed")
        time.sleep(0.5)
        os.kill(going.pid, signal.SIGINT)
        done = going.wait(20)
    assert done.returncode == 130
    assert "interrupted: strategies without a verdict did not finish" in done.stdout
    assert json.loads((tmp_path / "verify" / "verify.json").read_text("utf-8"))["interrupted"] is True
    eventually(lambda: sorted(p.name for p in (tmp_path / "verify").iterdir()) == [
        "asked", "report.html", "verify.json"
    ], "a world's folder is left")  # fmt: skip
