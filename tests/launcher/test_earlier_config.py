"""Config of a run that goes on: what it keeps of the earlier command, and what it lists as changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import unipar
from tests.support.run_logs import rows_of
from tests.support.running import Line, running
from tests.support.tiny import CONFIG, Tiny
from unipar.cli.commands.config.explain import explain_config
from unipar.cli.commands.options import read_config_file
from unipar.launcher.preparation.prepare import prepare
from unipar.launcher.preparation.prepared_run import PreparedRun
from unipar.run_folder.layout import read_launch_file
from unipar.run_folder.run_attempts import read_attempts

pytestmark = pytest.mark.forked

FILE = Path("x.yaml")
WRITTEN: dict[str, Any] = {**CONFIG, "task": {"use": "tests.support.tiny:Tiny"}, "checkpoint": {}}
RESUME = "resume=auto"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(**changes: Any) -> None:
    """Write the config's file, with these sections instead of its own."""
    FILE.write_text(json.dumps({**WRITTEN, **changes}), "utf-8")


def command(*sets: str, strategy: str | None = None, out: str | None = None) -> PreparedRun:
    """The run of `unipar run x.yaml` with these --set, --backend and --out."""
    source = read_config_file([FILE], [*sets], strategy, out, runs=True)
    return PreparedRun.of(prepare(source), overwrite=False)


def begun(plan: PreparedRun) -> dict[str, Any]:
    """Launch.json of a run that has begun, and ended."""
    with plan.create_folder() as run:
        return read_launch_file(run.out)


def lines(plan: PreparedRun) -> list[str]:
    """The lines that a run shows before its first step."""
    return begun(plan).get("lines", [])


def test_what_the_earlier_command_set_is_kept() -> None:
    """Without it in the file and in this command: the run still saves, and says so; the third attempt keeps it, too."""
    write(checkpoint=None)
    assert lines(command("checkpoint.every=3", "train.steps=20")) == []
    for _ in range(2):
        plan = command(RESUME)
        assert plan.config.checkpoint is not None
        assert (plan.config.checkpoint.every, plan.config.train.steps) == (3, 20)
        assert lines(plan) == ["kept from the run before: checkpoint.every: 3, train.steps: 20"]
    assert [attempt.config["checkpoint"]["every"] for attempt in read_attempts(Path("runs/x"))] == [3, 3]


def test_what_this_command_sets_is_listed() -> None:
    """This command wins over the earlier one, and each changed key is listed with both values."""
    write()
    begun(command("batch.total=16", "checkpoint.every=3"))
    plan = command("batch.total=32", "train.clip=1", RESUME)
    launched = begun(plan)
    assert launched["lines"] == [
        "kept from the run before: checkpoint.every: 3",
        "batch.total: 16 -> 32 (--set)",
        "train.clip: null -> 1.0 (--set)",
    ]
    assert launched["changes"][0] == {"key": "batch.total", "before": 16, "now": 32, "origin": "--set"}
    assert lines(command(RESUME, "train.clip=1")) == ["kept from the run before: checkpoint.every: 3, batch.total: 32"]


def test_what_was_edited_in_the_file_is_listed() -> None:
    """An edited file wins over the earlier command: batch.total, log.every; a key no longer written has its default."""
    write()
    begun(command("batch.total=16", "train.steps=20"))
    write(batch={"total": 32}, train={**CONFIG["train"], "clip": 1.0}, log={})
    plan = command(RESUME)
    assert plan.config.train.steps == 20
    assert lines(plan) == [
        "kept from the run before: train.steps: 20",
        "batch.total: 16 -> 32 (line 1)",
        "train.clip: null -> 1.0 (line 1)",
        "log.every: 5 -> 10 (by default)",
    ]


@pytest.mark.parametrize(
    ("first", "again", "strategy", "listed"),
    [
        (("native/parameters", ()), (None, ()), "native/parameters", []),
        (("native/parameters", ()), (None, ("parallel.shard=nothing",)), "native/nothing", ["--set"]),
        (("native/parameters", ()), ("native/nothing", ()), "native/nothing", ["--backend"]),
        ((None, ("parallel.shard=parameters",)), (None, ()), "native/parameters", []),
        ((None, ("parallel.shard=parameters",)), ("native/nothing", ()), "native/nothing", ["--backend"]),
    ],
)
def test_the_strategy_of_the_earlier_command(first: Any, again: Any, strategy: str, listed: list[str]) -> None:
    """The earlier strategy is kept, unless this command names another."""
    write()
    begun(command(*first[1], strategy=first[0]))
    plan = command(RESUME, *again[1], strategy=again[0])
    assert str(plan.settled.strategy) == strategy
    changes = begun(plan)["changes"]
    assert [(change["key"], change["origin"]) for change in changes] == [("parallel.shard", by) for by in listed]


def test_an_edited_strategy_is_that_of_the_file() -> None:
    """The file says another one since."""
    write()
    begun(command(strategy="native/parameters"))
    write(parallel={"data": 2, "shard": "optimizer"})
    assert str(command(RESUME).settled.strategy) == "native/optimizer"


def test_a_total_that_the_ranks_make() -> None:
    """Total follows from micro and the number of ranks, and is listed where that has changed."""
    write(batch={"micro": 2, "accumulate": 1})
    begun(command())
    assert lines(command(RESUME, "parallel.data=4")) == [
        "parallel.data: 2 -> 4 (--set)",
        "batch.total: 4 -> 8 (micro, accumulate and the number of ranks)",
    ]


def test_a_run_that_will_save_nothing() -> None:
    """The section was taken out of the file, or this command says null."""
    saves_nothing = (
        "this run will save nothing, as its config has no section checkpoint (--set checkpoint.every=... adds it)"
    )
    section = '{"every": null, "keep": 3, "best": null, "async": true,  ...'
    write()
    begun(command())
    assert lines(command(RESUME, "checkpoint=null")) == [saves_nothing, f"checkpoint: {section} -> null (--set)"]
    write(checkpoint=None)
    assert lines(command(RESUME)) == [saves_nothing]


def test_a_run_that_begins_anew_keeps_nothing() -> None:
    """Without resume it is another run; `never` begins anew in the same folder, and lists nothing."""
    write()
    begun(command("train.steps=20", out="one"))
    assert command(out="two").config.train.steps == 12
    plan = command("resume=never", out="three")
    assert plan.config.train.steps == 12
    assert lines(plan) == []


def test_overrides_of_a_script() -> None:
    """launch(config, overrides=...) goes on by the same rules, for a mapping of the script."""

    def plan(config: dict[str, Any], **overrides: Any) -> PreparedRun:
        given = {key.replace("__", "."): value for key, value in overrides.items()}
        return PreparedRun.of(prepare({**CONFIG, **config}, Tiny, given), overwrite=False)

    begun(plan({}, checkpoint__every=3, train={"steps": 20}))
    assert lines(plan({"log": {"every": 7}}, resume="auto", batch__total=16)) == [
        "kept from the run before: checkpoint.every: 3, train.steps: 20",
        "batch.total: 8 -> 16 (overrides)",
        "log.every: 5 -> 7 (the script)",
    ]


def test_a_checkpoint_of_another_run() -> None:
    """--from keeps nothing; what matters to training and saving is listed beside the checkpoint's config."""
    folder = Path("old")
    folder.mkdir()
    with running(Line(), folder, checkpoint={}, log={"every": 1}) as run:
        run.task.train(run)
    path = (folder / "checkpoints/step-00000003").resolve()
    write(
        task={"use": "tests.support.running:Line"},
        backend="single",
        parallel={"data": 1},
        batch={"total": 8},
        train={"steps": 9, "optimizer": {"name": "sgd", "lr": 0.5}},
        log={},
    )
    assert lines(command(f"resume={path}", "checkpoint.every=4")) == [
        'task: null -> {"use": "tests.support.running:Line", "args": {}} (line 1)',
        "batch.total: 4 -> 8 (line 1)",
        "batch.micro: 2 -> null (by default)",
        "train.steps: 3 -> 9 (line 1)",
        "train.optimizer.lr: 0.001 -> 0.5 (line 1)",
        "checkpoint.every: null -> 4 (--set)",
    ]
    write(checkpoint=None)
    assert lines(command(f"resume={path}"))[0].startswith("this run will save nothing")


def test_a_run_that_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    """The reported case, played: it saves every 3 steps as before, and shows it before its first step."""
    write(checkpoint=None, backend="single", parallel={"data": 1})
    source = read_config_file([FILE], ["checkpoint.every=3", "train.steps=6"], runs=True)
    unipar.launch(source, quiet=True)
    source = read_config_file([FILE], [RESUME, "train.steps=9", "batch.total=16"], runs=True)
    unipar.launch(source)
    (row,) = rows_of(Path("runs/x"), "config")
    assert row["said"] == [
        "kept from the run before: checkpoint.every: 3",
        "batch.total: 8 -> 16 (--set)",
        "train.steps: 6 -> 9 (--set)",
    ]
    shown = capsys.readouterr().err.splitlines()
    first = next(i for i, line in enumerate(shown) if line.startswith("step "))
    assert [line for line in shown[:first] if line.startswith("config: ")] == [
        f"config: {line}" for line in row["said"]
    ]
    assert [row["step"] for row in rows_of(Path("runs/x"), "checkpoint")] == [3, 6, 9]


def test_explain_shows_what_is_kept() -> None:
    """With the origin of the key, before the run goes on."""
    write(checkpoint=None)
    begun(command("checkpoint.every=3"))
    shown = explain_config(read_config_file([FILE], [RESUME], runs=True)).values
    assert [(row.value, row.origin) for row in shown if row.key == "checkpoint.every"] == [
        (3, "kept from the run before")
    ]
