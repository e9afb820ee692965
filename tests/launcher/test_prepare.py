"""What a run goes on from, as it is checked before a process starts."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import unipar
from tests.conformance.tasks import Plain
from tests.support.checkpoints import save_two_steps
from tests.support.tiny import CONFIG, Tiny
from unipar.cli.commands.config.check import check_config
from unipar.errors import CheckpointError, ConfigError, TaskError, UniparError
from unipar.launcher.preparation.prepare import prepare
from unipar.launcher.preparation.prepared_run import PreparedRun
from unipar.run_folder.layout import run_log_path
from unipar.run_folder.run_attempts import count_attempts
from unipar.run_folder.run_log import RunLog


def planned(*, overwrite: bool = False, **overrides: Any) -> PreparedRun:
    """The run of Tiny's config with these keys, checked; dots in their names are written as two underlines."""
    given = {key.replace("__", "."): value for key, value in overrides.items()}
    return PreparedRun.of(prepare({**CONFIG, "checkpoint": {}}, Tiny, given), overwrite=overwrite)


def begun(*steps: int, end: dict[str, Any] | None = None, **overrides: Any) -> Path:
    """The folder of a run that has logged these steps, and has ended if `end` says with what."""
    with planned(**overrides).create_folder() as run, RunLog(run_log_path(run.out, 0)) as run_log:
        for step in steps:
            run_log.note("step", step=step, loss=0.5)
        if end is not None:
            run_log.note("end", **end)
    return run.out


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_resume_and_overwrite_contradict() -> None:
    """Nothing is deleted that the run was to go on from."""
    out = begun(1)
    with pytest.raises(ConfigError) as e:
        planned(resume="auto", overwrite=True)
    assert str(e.value) == (
        "resume: auto (--resume) goes on in a run's folder, and --overwrite deletes what is in it: leave out one of "
        "them, or begin anew with --overwrite and --set resume=never"
    )
    assert run_log_path(out, 0).exists()
    assert planned(resume="never", overwrite=True).overwrite


@pytest.mark.parametrize(
    ("trained", "end", "now", "finished"),
    [
        ({"train__steps": 12}, {"steps": 12, "of": 12, "epochs": None}, {"train__steps": 12}, "steps"),
        ({"train__steps": 12}, {"steps": 12, "of": 12, "epochs": None}, {"train__steps": 13}, ""),
        ({"train__steps": 12}, {"steps": 7, "of": 12, "epochs": None}, {"train__steps": 12}, ""),
        ({"train__steps": 12}, None, {"train__steps": 12}, ""),
        ({"train__epochs": 2}, {"steps": 12, "of": 12, "epochs": 2}, {"train__epochs": 2}, "epochs"),
        ({"train__epochs": 2}, {"steps": 12, "of": 12, "epochs": 2}, {"train__epochs": 3}, ""),
        ({"train__epochs": 2}, {"steps": 7, "of": 12, "epochs": 2}, {"train__epochs": 2}, ""),
    ],
)
def test_a_run_that_has_done_its_steps(
    trained: dict[str, Any], end: dict[str, Any] | None, now: dict[str, Any], finished: str
) -> None:
    """An ended run has a sentence, unless the config wants more steps than it has done, or its loop ended early."""
    counts: dict[str, Any] = {"train__steps": None, "train__epochs": None}
    out = begun(1, 7, end=end, **counts | trained)
    plan = planned(resume="auto", **counts | now)
    assert plan.out == out
    assert plan.finished == (
        f"runs/run has done its 12 steps, so nothing is left to do; to train longer, give it more (--set "
        f"train.{finished}=...)" * bool(finished)
    )


def test_a_newer_run_without_a_step_is_named() -> None:
    """The one before it has done its steps: the line says that there is another, which has none."""
    out = begun(1, 12, end={"steps": 12, "of": 12, "epochs": None})
    newer = out.with_name("run-2")
    newer.mkdir()
    for name in ("config.json", "launch.json"):
        (newer / name).write_bytes((out / name).read_bytes())
    plan = planned(resume="auto")
    assert plan.out == out
    assert plan.finished.endswith("; runs/run-2 was begun later and has ended before its first step")


def test_launching_a_finished_run_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """One line, and the report of what was trained; not a file of the folder is written."""
    out = begun(1, 12, end={"steps": 12, "of": 12, "epochs": None})
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    report = unipar.launch({**CONFIG, "resume": "auto"}, task=Tiny)
    assert report.steps == 12
    assert capsys.readouterr().err == (
        "runs/run has done its 12 steps, so nothing is left to do; to train longer, give it more (--set "
        "train.steps=...)\n"
    )
    with pytest.raises(SystemExit) as e, unipar.join({**CONFIG, "resume": "auto"}, task=Tiny):
        pytest.fail("the loop of a script was reached")
    assert e.value.code == 0
    assert capsys.readouterr().err.endswith("; the script ends here, before its loop and what follows it\n")
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_a_new_training_moves_the_old_checkpoints() -> None:
    """resume: never in the same folder: what the attempt before saved is kept apart from what the next one saves."""
    plan = planned(resume="never", launch__restarts=1)
    with plan.create_folder() as plan:
        save_two_steps(plan.out / "checkpoints")
        plan.next_attempt((), UniparError("killed"))
        assert not (plan.out / "checkpoints").exists()
        assert (plan.out / "attempt-1/checkpoints/step-00000002/manifest.json").exists()
        save_two_steps(plan.out / "checkpoints")
    with replace(plan, goes_on=True).create_folder():  # as when torchrun starts it again
        assert sorted(os.listdir(plan.out / "attempt-2")) == ["checkpoints"]
    goes_on = planned(launch__restarts=1, out="other")
    with goes_on.create_folder() as goes_on:
        save_two_steps(goes_on.out / "checkpoints")
        goes_on.next_attempt((), UniparError("killed"))
        assert (goes_on.out / "checkpoints/step-00000002/manifest.json").exists()


def test_checkpoints_in_the_place_of_an_earlier_config(here: Path) -> None:
    """checkpoint.to has changed: refused while the newest checkpoint is in the old place, in both directions."""
    out = begun(1, 2, checkpoint__to="one")
    own = json.loads((out / "launch.json").read_bytes())["checkpoints"]
    _, newest = save_two_steps(here / "one" / own)
    with pytest.raises(CheckpointError) as e:
        planned(resume="auto", checkpoint__to="two")
    assert str(e.value) == (
        f"runs/run has its newest checkpoint in {newest.relative_to(here)}, and checkpoint.to was one and is two, "
        f"where there is none: to go on, take the old value back (--set checkpoint.to=one), or move the checkpoints to "
        f"two/{own}; or begin a run with that one (--from {newest.relative_to(here)})"
    )
    with pytest.raises(CheckpointError, match=r"checkpoint\.to was one and is null, where there is none: to go on, "):
        planned(resume="auto", checkpoint__to=None)
    (here / "two").mkdir()
    (here / "one" / own).rename(here / "two" / own)
    assert planned(resume="auto", checkpoint__to="two").goes_on
    assert count_attempts(out) == 0


def test_a_start_is_checked_before_a_folder_is_made(here: Path) -> None:
    """A path that is no checkpoint, one with nothing left to do, and other weights beside it: no run folder is left."""
    _, two = save_two_steps(here / "old/checkpoints")
    weights = two / "shards/rank-00000.safetensors"
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("missing", {}, "missing: no checkpoint (No such file or directory)"),
        ("old", {}, "old: not a unipar checkpoint: there is no manifest.json in it; name one of the checkpoints in it: "
         "checkpoints/step-00000002, checkpoints/step-00000001"),
        (str(two), {"train__steps": 2}, f"checkpoint {two} has done 2 steps, and the run has 2: nothing is left to do; "
         "give it more (--set train.steps=...)"),
        (str(two), {"model__weights": {"file": str(weights)}}, "model.weights is given, and the run would begin "
         f"with the weights of the checkpoint {two}: leave out model.weights, or the checkpoint (--from, resume)"),
        (str(two), {"out": "old", "overwrite": True}, f"the checkpoint {two} is in old, which --overwrite would "
         "delete: name another folder (out: ..., or --out DIR), or go on there with --resume"),
    ]  # fmt: skip
    for path, more, sentence in cases:
        with pytest.raises((CheckpointError, ConfigError)) as e:
            planned(resume=path, **more)
        assert str(e.value) == sentence
    assert not (here / "runs").exists()
    assert planned(resume=str(two)).out == Path("runs/run")


def test_the_run_to_go_on_with_has_trained() -> None:
    """A newer one that has ended before its first step is passed over, unless there are no others."""
    first = begun(1)
    assert begun() == Path("runs/run-2")
    assert planned(resume="auto").out == first
    run_log_path(first, 0).unlink()
    assert planned(resume="auto").out == Path("runs/run-2")


def test_an_instance_of_a_task_is_refused() -> None:
    """Its class is wanted, and the arguments as task.args, which reach a class that is passed without task.use."""
    with pytest.raises(TaskError) as e:
        prepare(CONFIG, Plain(count=8))  # pyright: ignore[reportArgumentType]
    assert str(e.value) == (
        "task= is an instance of Plain, and each rank creates its own: pass the class, task=Plain, and its arguments "
        'as task.args (in the config, or overrides={"task.args": {...}})'
    )
    ref = prepare(CONFIG, Plain, {"task.args": {"count": 8}}).ref
    assert ref is not None
    assert ref.args == {"count": 8}


def test_what_an_override_shortens_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """One line on stderr, unless the launch is quiet; the ranks' config has the shortened value."""
    train = {**CONFIG["train"], "schedule": {"warmup": 4}}
    prepared = prepare({**CONFIG, "train": train}, Tiny, {"train.steps": 3})
    prepared.show_notes(quiet=True)
    assert capsys.readouterr().err == ""
    prepared.show_notes(quiet=False)
    said = "overrides train.steps=3 shortens train.schedule, written for 12 steps: warmup 4 -> 1"
    assert capsys.readouterr().err == f"{said}\n"
    assert '"warmup": 1' in prepared.settled(2).config.json_for_ranks()
    assert f"note      {said}" in check_config(prepared.source)
