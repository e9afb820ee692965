"""Strategies that take turns: which, how many steps, and for real."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.forks import Forks
from tests.support.task_text import TASK
from tests.support.tiny import CONFIG
from tests.support.world import eventually
from unipar import errors
from unipar.backend import offered_strategies as strategies
from unipar.comparison.compare import compare
from unipar.comparison.request import TurnSchedule
from unipar.comparison.training_rounds import rotate_order
from unipar.config import Config, Strategy
from unipar.config.config_source import load_config_file
from unipar.config.settled import SettledConfig
from unipar.launcher.strategy_selection import select_strategies
from unipar.results.row import REUSED
from unipar.results.run_traces import read_traces

pytestmark = pytest.mark.forked


def config(**changed: Any) -> Config:
    return Config.model_validate({"batch": {"total": 8}, "device": "cpu", "train": {"steps": 14}} | changed)


# Arithmetic


@pytest.mark.parametrize(
    ("steps", "repeat", "warmup", "rounds"),
    [(14, 3, 2, (4, 4, 4)), (13, 3, 2, (4, 4, 3)), (5, 3, 2, (1, 1, 1)), (4, 3, 1, (1, 1, 1)), (2, 1, 1, (1,))],
)
def test_steps_are_cut_into_warm_up_and_rounds(steps: int, repeat: int, warmup: int, rounds: tuple[int, ...]) -> None:
    """All steps are used, and there is always a step to warm up."""
    made = TurnSchedule.of(config(train={"steps": steps}, compare={"repeat": repeat}))
    assert (made.warmup, made.rounds) == (warmup, rounds)


@pytest.mark.parametrize(
    ("steps", "watched", "rounds"),
    [
        (14, ("plain", "plain", "placed", "saved", "sent"), (3, 2, 2)),
        (9, ("plain", "placed", "saved", "sent"), (1, 1, 1)),
        (7, ("placed", "saved"), (1, 1, 1)),
        (6, ("placed",), (1, 1, 1)),
        (5, (), (1, 1, 1)),
    ],
)
def test_memory_is_watched_before_the_timed_steps(
    steps: int, watched: tuple[str, ...], rounds: tuple[int, ...]
) -> None:
    """Five steps, or of few what matters most."""
    made = TurnSchedule.of(config(train={"steps": steps}), memory=True)
    assert (made.warmup, made.memory_passes, made.rounds) == (2, watched, rounds)


def test_too_few_steps_are_an_error_with_the_arithmetic() -> None:
    """One step more than there are rounds is the least."""
    with pytest.raises(errors.ConfigError) as e:
        TurnSchedule.of(config(train={"steps": 3}))
    assert str(e.value) == (
        "train.steps: 3 is too few to compare: 1 to warm up and 3 timed rounds (compare.repeat) of at least 1 make 4"
    )


def test_epochs_cannot_be_cut_into_turns() -> None:
    """The number of steps in an epoch is not known before the data is read."""
    with pytest.raises(errors.ConfigError) as e:
        TurnSchedule.of(config(train={"epochs": 2}))
    assert str(e.value) == (
        "train.epochs: 2 cannot be cut into turns, which are counted in steps; "
        "give train.steps instead (--set train.steps=50)"
    )


@pytest.mark.parametrize("steps", [[2, 3], [6, 7], [3, 6], [7, 12]])
def test_traced_steps_that_are_no_part_of_a_round(steps: list[int]) -> None:
    """They would warm up, be in two rounds, or leave no step of their round to be timed."""
    with pytest.raises(errors.ConfigError) as e:
        TurnSchedule.of(config(log={"trace": {"steps": steps}}))
    assert str(e.value) == (
        f"log.trace.steps: {steps} must be within one timed round of steps, and fewer than it has: the rounds are 3 to "
        "6, 7 to 10, 11 to 14; choose others, a larger train.steps, or leave log.trace out"
    )
    assert TurnSchedule.of(config(log={"trace": {"steps": [7, 9]}})).rounds == (4, 4, 4)


def test_each_round_begins_with_another_strategy() -> None:
    """The order rotates; nobody left is nobody's turn."""
    assert [rotate_order("abc", i) for i in range(4)] == [list("abc"), list("bca"), list("cab"), list("abc")]
    assert rotate_order([], 1) == []


# Which strategies


def chosen(*patterns: str, **changed: Any) -> Any:
    return select_strategies(SettledConfig.of(config(**changed), Strategy("native"), 2, "cpu"), patterns)


def test_single_is_always_first_and_runs_once() -> None:
    """Whether it is asked for or not."""
    assert list(chosen("native/nothing", "single")) == ["single", "native/nothing"]


def test_strategies_keep_the_order_in_which_they_are_named() -> None:
    """A strategy that a pattern names again is not there twice."""
    found = chosen("native/parameters", "native/*")
    assert list(found) == ["single", "native/parameters", "native/nothing", "native/optimizer", "native/gradients"]


def test_a_strategy_that_is_not_there_is_a_row() -> None:
    """The others run all the same."""
    row, _ = chosen("native/nothing", "horovod/parameters")["horovod/parameters"]
    assert (row.outcome, row.note) == ("refused", "there is no such strategy; horovod has: horovod/nothing")


def test_a_backend_that_nobody_offers_is_an_error() -> None:
    """A typo is not a result."""
    with pytest.raises(errors.BackendNotFound, match="did you mean 'native'"):
        chosen("nativ/nothing")


def test_one_process_never_offloads() -> None:
    """The reference keeps on its device what strategies offload."""
    found = chosen("deepspeed/gradients", model={"offload": "optimizer"}, device="cuda")
    assert (found["single"][0].note, found["single"][1].config.model.offload) == (
        "without model.offload: optimizer",
        "none",
    )
    assert found["deepspeed/gradients"][1].config.model.offload == "optimizer"


def test_bf16_master_is_held_to_one_process_in_fp32() -> None:
    """One process has no second copy, so its reference is the full precision."""
    found = chosen("native/*", train={"steps": 5, "precision": "bf16-master"})
    assert found["single"][1].config.train.precision == "fp32"
    assert found["single"][0].note == "in fp32: one process keeps no second copy of the weights"
    assert {name: row.outcome for name, (row, _) in found.items()} == {
        "single": "waits",
        "native/nothing": "refused",
        "native/optimizer": "waits",
        "native/gradients": "waits",
        "native/parameters": "waits",
    }


def test_one_process_sees_the_same_microbatches() -> None:
    """Two ranks with 4 samples each are 2 microbatches of 4 on one."""
    sizes = chosen()["single"][1].sizes
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
        "compare": {"repeat": 2, "memory": False},
        "out": str(tmp_path / "out"),
    }


@pytest.mark.parametrize("world", [0, -3])
def test_a_world_of_nobody(world: int) -> None:
    """The config's own size does not take its place."""
    with pytest.raises(errors.ConfigError) as e:
        compare(CONFIG, world=world)
    assert str(e.value) == f"--world: {world}: wanted a whole number above 0, or several: 1,2,4"


def test_what_an_engine_refuses_is_no_failure(tmp_path: Path) -> None:
    """A split that the proof refuses is a row with its sentence, and the other strategies decide the exit code."""
    config = {
        "task": {"use": "tests.support.unsplit:Unsummed", "args": {"where": "leave"}},
        "device": "cpu",
        "parallel": {"data": 2},
        "batch": {"total": 8},
        "train": {"steps": 3},
        "compare": {"repeat": 1, "memory": False},
        "out": str(tmp_path / "out"),
    }
    found = compare(config, strategies=("native/nothing", "native/nothing+tensor2"))
    assert [row.outcome for row in found.rows] == ["ran", "ran", "refused"]
    assert found.rows[2].note.startswith("split as planned, the model is another: a loss of ")
    assert (found.code, found.finished) == (0, True)


def test_strategies_take_turns_and_agree(
    given: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """One strategy agrees, one fails with its sentence, one is refused: each is a row, and compare.json holds all."""
    given["task"]["args"] = {"reach": True}
    found = compare(given, strategies=("native/nothing", "native/parameters", "horovod/gradients"))
    one, ddp, fsdp, none = found.rows
    assert [row.outcome for row in found.rows] == ["ran", "ran", "failed", "refused"]
    assert found.code == 1
    assert found.disagreeing_rows == []
    assert len(one.losses) == len(ddp.losses) == 8
    assert one.losses[-1] < one.losses[0]
    assert [[len(turn) for turn in row.seconds] for row in (one, ddp)] == [[3, 3], [3, 3]]
    assert len(one.peak_rss) == 1
    assert len(ddp.peak_rss) == 2
    assert "model.blocks" in fsdp.note
    assert none.note == "there is no such strategy; horovod has: horovod/nothing"
    told = json.loads((tmp_path / "out/compare/compare.json").read_text("utf-8"))
    assert [strategy["strategy"] for strategy in told["strategies"]] == [row.strategy for row in found.rows]
    assert told["strategies"][1]["agreement"]["within"] is True
    assert (told["finished"], told["ranks"]) == (False, 2)
    assert (tmp_path / "out/compare/native-nothing/rank-1.log").exists()
    assert found.note == f"page: {tmp_path}/out/compare/report.html"
    assert re.search(r"native/nothing is fastest: [0-9.]+ m?s a step\.$", found.answer)
    assert found.remarks()[-1] == found.note
    assert "native/nothing agrees with one process" in (tmp_path / "out/compare/report.html").read_text("utf-8")
    again = load_config_file(tmp_path / "out/compare/asked/run.json")
    assert (again.config.train.steps, again.config.compare.repeat) == (8, 2)
    assert strategies.config_in_strategy(again.config, Strategy.parse("native/nothing")).parallel.data == 2
    said = [line[11:] for line in capfd.readouterr().err.splitlines()]
    order = [line.partition(" ")[0] for line in said if "round" in line]
    assert order == ["single", "native/nothing", "native/nothing", "single"]


def test_strategies_are_traced(given: dict[str, Any], tmp_path: Path) -> None:
    """Each in its own folder; the traced step is not timed, and compared with those that are."""
    given["log"] = {"trace": {"steps": [4, 4]}}
    found = compare(given, strategies=("native/nothing",))
    for row, folder in zip(found.rows, ("single", "native-nothing"), strict=True):
        assert [len(turn) for turn in row.seconds] == [2, 3]
        (trace,) = read_traces(tmp_path / "out/compare" / folder)
        assert (trace.rank, trace.first, trace.last) == (0, 4, 4)
        assert min(row.timed_seconds) <= (trace.others or 0.0) <= max(row.timed_seconds)
    given["log"]["trace"]["ranks"] = [2]
    with pytest.raises(errors.ConfigError, match="there is no rank 2, the run has 2 ranks, 0 to 1; leave it out"):
        compare(given, strategies=("native/nothing",), overwrite=True)


def test_a_loop_that_ends_early_is_told_so(given: dict[str, Any]) -> None:
    """The task's own train(run) is what takes turns; what is wrong in `single` is wrong in all, so it ends there."""
    given["task"]["args"] = {"early": True}
    with pytest.raises(errors.TaskError, match=r"train\(run\) ended after 1 of 8 steps"):
        compare(given, strategies=("native/nothing",))


def test_an_interrupt_ends_all_worlds_and_prints_the_table(given: dict[str, Any], tmp_path: Path, forks: Forks) -> None:
    """Ctrl-C while strategies wait for their turn: exit code 130, no process left, and the rows so far."""
    given["train"]["steps"] = 100_000
    (tmp_path / "x.yaml").write_text(json.dumps(given), encoding="utf-8")
    command = ["-m", "unipar", "compare", str(tmp_path / "x.yaml"), "--strategy", "native/nothing"]
    with forks.begin(command, tmp_path, memory=True) as going:
        eventually(lambda: "single is warmed up" in going.stderr, "single does not begin")
        workers = {*_children(forks.plain.pid), *_children(forks.metered.pid)} - {going.pid}
        os.kill(going.pid, signal.SIGINT)
        done = going.wait()
    assert done.returncode == 130
    out = done.stdout
    assert re.search(r"^single ", out, re.MULTILINE)
    assert "interrupted: strategies without figures did not finish" in out
    assert "unipar compare · x · 2 ranks · fp32" in (tmp_path / "out/compare/report.html").read_text("utf-8")
    assert len(workers) == 3
    eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers), "a worker lives on")


SLOW = """

    def train(self, run):
        for local_batch in run.batches():
            run.step(local_batch)
        if os.environ.get("SLOW") and run.size == 2:
            time.sleep(60)
"""


@pytest.mark.parametrize("sign", [pytest.param(signal.SIGINT, marks=pytest.mark.sweep), signal.SIGKILL])
def test_what_was_interrupted_goes_on_where_it_stopped(
    given: dict[str, Any], tmp_path: Path, sign: int, forks: Forks
) -> None:
    """After Ctrl-C or a kill, the strategy that had ended is reused with a note, and the other one runs."""
    (tmp_path / "task.py").write_text("import os, time\n" + TASK.partition("    def train")[0].rstrip() + SLOW, "utf-8")
    (tmp_path / "x.yaml").write_text(json.dumps(given), encoding="utf-8")
    words = ["-m", "unipar", "compare", str(tmp_path / "x.yaml"), "--strategy", "native/nothing"]
    with forks.begin(words, tmp_path, {"SLOW": "1"}, memory=True) as going:
        eventually(lambda: "single has ended" in going.stderr, "single does not end")
        time.sleep(0.5)
        os.kill(going.pid, sign)
        going.wait()
    file = tmp_path / "out/compare/compare.json"
    first = json.loads(file.read_text("utf-8"))
    assert [(row["strategy"], row["outcome"]) for row in first["strategies"]] == [
        ("single", "ran"),
        ("native/nothing", "waits"),
    ]
    again = forks.python([*words, "--details"], tmp_path, {"COLUMNS": "200"}, memory=True)
    assert again.returncode == 0, again.stderr
    assert "single starts" not in again.stderr
    told = json.loads(file.read_text("utf-8"))
    assert (told["finished"], [row["outcome"] for row in told["strategies"]]) == (True, ["ran", "ran"])
    assert told["strategies"][0]["seconds"] == first["strategies"][0]["seconds"]
    assert [(row["note"], row["reused"]) for row in told["strategies"]] == [(REUSED, True), ("", False)]
    assert "native/nothing agrees with one process" in again.stdout
    assert f"single: {REUSED}\n" in again.stdout
    (tmp_path / "out/compare/single/rank-0.jsonl").stat()


TAKEN = """

    def train(self, run):
        for local_batch in run.batches():
            run.step(local_batch)
        file = pathlib.Path(__file__).parent / "out/compare/compare.json"
        file.unlink()
        file.mkdir()
"""


def test_figures_that_cannot_be_written_are_shown_all_the_same(given: dict[str, Any], tmp_path: Path) -> None:
    """The file's place was taken while it trained: the table is there, with a sentence and exit code 1."""
    (tmp_path / "task.py").write_text("import pathlib\n" + TASK.partition("    def train")[0].rstrip() + TAKEN, "utf-8")
    found = compare(given, strategies=("single",))
    (row,) = found.rows
    assert (row.outcome, len(row.losses), len(row.timed_seconds)) == ("ran", 8, 6)
    said = f"the results could not be written: {tmp_path}/out/compare/compare.json (Is a directory)"
    assert (found.unkept, found.code) == (said, 1)
    assert said in found.table(width=200)


def test_worlds_of_several_sizes_are_a_comparison_each(given: dict[str, Any], tmp_path: Path) -> None:
    """One rank and two, the same batches in both: samples/s and efficiency of each strategy, a folder and a page."""
    found = compare(given, strategies=("native/parameters", "horovod/gradients"), world=[2, 1])
    assert [(w.strategy, w.ranks, w.samples, row.outcome) for w, row in zip(found.worlds, found.rows, strict=True)] == [
        *(("native/parameters", n, 8, "ran") for n in (1, 2)),
        *(("horovod/gradients", n, 8, "refused") for n in (1, 2)),
    ]
    assert found.code == 0
    assert found.efficiency(found.worlds[0]) == 1.0
    assert found.efficiency(found.worlds[1])
    assert len({str(row.marks and row.marks.values) for row in found.rows[:2]}) == 1
    out = tmp_path / "out/worlds"
    assert sorted(path.name for path in out.glob("w*")) == ["world-1", "world-2", "worlds.csv", "worlds.json"]
    for n in (1, 2):
        one = json.loads((out / f"world-{n}/compare.json").read_text("utf-8"))
        assert [len(row["peak_rss"]) for row in one["strategies"]] == [1, n, 0]
        assert one["of"]["threads"] == found.threads
    assert "unipar compare · out" not in (text := (out / "report.html").read_text("utf-8"))
    assert "strong scaling, by ranks" in text
    assert f"unipar compare {out}/world-1/asked/" in text
    assert (
        f" --out {out.parent} --world 1,2 --strategy native/parameters --strategy horovod/gradients --overwrite<"
        in text
    )
    assert (out / "worlds.csv").read_text("utf-8").splitlines()[2].startswith("native/parameters,2,strong,8,4,1,ran,")
    assert "weak" not in text
    assert "worlds of one size took turns; those of different sizes did not" in found.remarks()
    again = compare(given, strategies=("native/parameters", "horovod/gradients"), world="1,2")
    assert again.rows == found.rows


def test_a_folder_of_somebody_else_is_no_place_for_worlds(given: dict[str, Any], tmp_path: Path) -> None:
    """Nor is a size that no batch can be cut for: both are said before anything starts."""
    (tmp_path / "out/worlds").mkdir(parents=True)
    (tmp_path / "out/worlds/thesis.tex").touch()
    with pytest.raises(errors.OutExists) as e:
        compare(given, world="1,2")
    assert str(e.value) == (
        f"{tmp_path}/out/worlds holds thesis.tex, which does not belong to compare: "
        "move it away, or name another folder (out)"
    )
    with pytest.raises(errors.ConfigError, match=r"batch\.total \(8\) is not a multiple of accumulate x data"):
        compare(given, world=[1, 3])
    with pytest.raises(errors.ConfigError, match=r"--world: 2 does not scale: give two sizes or more"):
        compare(given, world=[2])
    with pytest.raises(errors.Unsupported, match=r"single: it is one process, whatever the size of the world"):
        compare(given, strategies=("single",), world=[1, 2])


def _children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text("ascii").split()]


def test_compare_is_not_for_a_foreign_launcher(given: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank would start all worlds."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    for name, value in zip(names, ("1", "1", "2", "2", "127.0.0.1", "29500"), strict=True):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with pytest.raises(errors.WorldMismatch) as e:
        compare(given)
    assert str(e.value) == (
        "compare starts a world for each strategy, and this process is rank 1 of a world that torchrun started: "
        "run it without that launcher"
    )


def test_epochs_in_a_file_are_refused_before_anything_starts(given: dict[str, Any], tmp_path: Path) -> None:
    """No file is written either."""
    given["train"] = {"epochs": 1}
    with pytest.raises(errors.ConfigError, match=r"train\.epochs: 1 cannot be cut into turns"):
        compare(given)
    assert not (tmp_path / "out").exists()
