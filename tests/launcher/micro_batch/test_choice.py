"""`batch.micro: auto` before a trial: what is possible, what is kept, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny import CONFIG, Tiny
from unipar.backend.checks import given_source
from unipar.cli.commands.config.check import check_config
from unipar.cli.commands.config.explain import explain_config
from unipar.conversion.export import export_script
from unipar.errors import ConfigError, OutOfMemory, WorkerFailed, WorldMismatch
from unipar.launcher.micro_batch.choice import ChosenMicro, MicroTrial, usable_memory
from unipar.launcher.micro_batch.trials import ended_for_lack_of_memory
from unipar.launcher.preparation.prepare import prepare
from unipar.launcher.preparation.prepared_run import PreparedRun
from unipar.run_folder.layout import run_log_path
from unipar.run_folder.run_log import RunLog

AUTO: dict[str, Any] = {**CONFIG, "batch": {"total": 8, "micro": "auto", "memory": "1MiB"}, "checkpoint": {}}
NAME = "native/nothing on 2 ranks"


def planned(**overrides: Any) -> PreparedRun:
    """The run of a config with `micro: auto` and these keys; dots in their names are written as two underlines."""
    given = {key.replace("__", "."): value for key, value in overrides.items()}
    return PreparedRun.of(prepare(AUTO, Tiny, given), overwrite=False)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def begun() -> Path:
    """The folder of a run that has found 2, and has logged a step."""
    run = planned()
    assert run.auto is not None
    trial = MicroTrial(NAME, 2, fits=True, peak=2**19)
    found = ChosenMicro(2, 8, (NAME,), "cpu", usable_memory(run.config, 2), {NAME: 4}, (trial,))
    with run.with_micro(found).create_folder() as made, RunLog(run_log_path(made.out, 0)) as run_log:
        run_log.note("step", step=1, loss=0.5)
    return made.out


def test_the_sizes_to_choose_from() -> None:
    """Divisors of a rank's share; a run does not begin with one that stands in."""
    run = planned()
    assert run.auto is not None
    assert list(run.auto.candidates) == [1, 2, 4]
    with pytest.raises(AssertionError, match="must be found before the run begins"), run.create_folder():
        pass
    with pytest.raises(ConfigError) as e:
        planned(batch__total=9)
    assert str(e.value) == (
        "batch.total (9) is not a multiple of accumulate x data (1 x 2 = 2); the nearest totals are 8 and 10"
    )


def test_the_cpu_needs_a_limit() -> None:
    """The sentence has a value to begin with."""
    with pytest.raises(ConfigError, match=r"so say for example batch: \{micro: auto, memory: \d+MiB\}$") as e:
        planned(batch__memory=None)
    assert str(e.value).startswith("batch.micro: auto needs batch.memory on the CPU, the bytes that a rank may use: ")


def test_a_run_that_goes_on_keeps_its_size(begun: Path) -> None:
    """Unless its world, its batch or its limit is another."""
    kept = planned(resume="auto")
    assert (kept.auto, kept.settled.sizes.micro) == (None, 2)
    assert kept.micro_note == "batch.micro: auto: 2, as before"
    other = planned(resume="auto", parallel__data=4)
    assert other.auto is not None
    assert other.micro_note == (
        "batch.micro: auto: was 2, and is found again: it ran as native/nothing on 2 ranks, and is native/nothing on 4 "
        "ranks now"
    )
    assert planned(resume="auto", batch__total=16).micro_note.endswith(": batch.total was 8, and is 16 now")
    assert planned(resume="auto", batch__headroom=0.5).micro_note.endswith(
        ": a rank could use 973 KiB on cpu, and can use 512 KiB on cpu"
    )


def test_check_and_explain(begun: Path) -> None:
    """Before a trial the sizes; afterwards the one that was found, and how."""
    source = given_source(AUTO)
    line = "batch     total 8; micro auto: one of 1, 2, 4, found by trial when the run starts"
    assert line in check_config(given_source({**AUTO, "out": "other"}))
    values = {v.key: (v.value, v.origin) for v in explain_config(source).values}
    assert values["batch.micro"] == (
        2,
        f"given; auto: found for {begun}, the largest that fits in 973 KiB a rank (native/nothing on 2 ranks: 2 fits "
        "in 512 KiB)",
    )
    assert values["batch.accumulate"][0] == 2
    before = {v.key: (v.value, v.origin) for v in explain_config(given_source({**AUTO, "out": "other"})).values}
    assert before["batch.micro"] == ("auto", "given; one of 1, 2, 4, found by trial when the run starts")
    assert before["batch.accumulate"] == ("auto", "derived: total / (micro x data), when micro is found")


def test_a_script_needs_a_number() -> None:
    """`export` names the ways to one."""
    with pytest.raises(ConfigError) as e:
        export_script(given_source({**AUTO, "task": {"use": "x.py:Y"}}), "torchrun")
    assert str(e.value).endswith(
        ": batch.micro: auto is found by trial when a run starts, and a script has one size: say it with --set "
        "batch.micro=N; `unipar explain FILE` shows the one of an earlier run, and `unipar plan FILE --memory SIZE` "
        "what to expect"
    )


def test_other_launchers_cannot_try(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their processes are there already."""
    for key, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29511")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with pytest.raises(WorldMismatch) as e:
        planned()
    assert str(e.value) == (
        "batch.micro: auto is found by trials in processes that unipar starts, and torchrun has started these: start "
        "the run once with python, or `unipar run`, and write the size that it tells into batch.micro; `unipar plan "
        "FILE --memory SIZE` tells what to expect"
    )


@pytest.mark.parametrize(
    ("error", "lack"),
    [
        (OutOfMemory("rank 0 ran out of memory"), True),
        (WorkerFailed("rank 0 was killed by SIGKILL in the forward of step 1, from outside"), True),
        (WorkerFailed("rank 0 was killed by SIGABRT", traceback="terminate called: std::bad_alloc"), True),
        (WorkerFailed("rank 0 failed: RuntimeError: [enforce fail] can't allocate memory: 4096"), True),
        (WorkerFailed("rank 0 failed: KeyError: 'x'"), False),
        (ConfigError("batch.total"), False),
    ],
)
def test_errors_that_mean_a_lack_of_memory(error: Any, lack: bool) -> None:
    """A rank that dies counts; any other error is told as it is."""
    assert ended_for_lack_of_memory(error) == lack
