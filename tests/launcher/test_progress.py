"""Display of a run, drawn from the files that rank 0 writes."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from typing_extensions import override

from tests.support.run_folders import TRACE
from unipar.launcher.progress import FileTail, Progress
from unipar.run_folder.heartbeat import HeartbeatWriter
from unipar.run_folder.layout import heartbeat_path, run_log_path, stdout_path
from unipar.run_folder.run_log import RunLog

ESCAPE = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


class Terminal(io.StringIO):
    @override
    def isatty(self) -> bool:
        return True


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal of 80 columns, whatever the tests run in."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)


def trained(run: Path, steps: int, every: int = 1, begin: int = 1) -> None:
    """Write the files that rank 0 writes in a run."""
    heartbeat = HeartbeatWriter(heartbeat_path(run, 0))
    with RunLog(run_log_path(run, 0)) as run_log:
        run_log.note("start", rank=0, size=2, strategy="native/nothing", pid=1, parameters=8912345)
        if begin > 1:
            read = {"bytes": 4096, "seconds": 0.25, "passed": [], "told": []}
            run_log.note("resumed", step=begin - 1, path="earlier/step-2", strategy="single", size=1, **read)
        for step in range(begin, steps + 1):
            heartbeat.step = step
            heartbeat.set_phase("between")
            if step % every == 0 or step == 1:
                run_log.note("step", step=step, of=steps, loss=4.0 / step, norm=1.0, lr=0.1, samples=8, seconds=0.25)


def test_a_trace_is_shown(tmp_path: Path) -> None:
    """The largest entries and the file; or why there is none."""
    err = io.StringIO()
    with Progress(tmp_path, None, err=err) as progress, RunLog(run_log_path(tmp_path, 0)) as run_log:
        run_log.note(**{key: value for key, value in TRACE.items() if key != "time"})
        progress.tick()
        run_log.note("no trace", said="another profile is being recorded")
    lines = err.getvalue().splitlines()
    assert lines[1:3] == [
        "trace: steps 3 to 4 of rank 0",
        "a traced step took 300 ms, another one 250 ms (median): 1.20 times",
    ]
    assert lines[5].split() == ["aten::mm", "1,200", "300", "ms", "75%"]
    assert lines[7:] == [
        f"{tmp_path}/trace/rank-0.json.gz: open the file at ui.perfetto.dev, which keeps it in the browser",
        "no trace: another profile is being recorded",
    ]


def test_plain_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere than on a terminal: the folder, who trains, logged steps, an end."""
    out, err = io.StringIO(), io.StringIO()
    trained(tmp_path, 2)
    with Progress(tmp_path, None, out=out, err=err):
        pass
    folder, first, *lines, last = err.getvalue().splitlines()
    assert folder == f"run folder: {tmp_path}"
    assert first == "native/nothing, 2 ranks, 8,912,345 parameters"
    assert lines == ["step 1/2  loss 4.0000  32 samples/s", "step 2/2  loss 2.0000  32 samples/s"]
    assert last == f"2 steps in 0.0 s, loss 4.0000 -> 2.0000; {tmp_path}"
    assert out.getvalue() == ""
    assert "\x1b" not in err.getvalue()
    monkeypatch.chdir(tmp_path.parent)
    with Progress(tmp_path, None, out=out, err=err):
        pass
    assert err.getvalue().count(f"run folder: {tmp_path.name}\n") == 1  # short, below the working directory


def test_changes_of_the_config(tmp_path: Path) -> None:
    """A run that goes on shows twelve lines of what differs from before, and counts the rest."""
    err = io.StringIO()
    with RunLog(run_log_path(tmp_path, 0)) as run_log:
        run_log.note("config", said=[f"key{i}: 1 -> 2 (--set)" for i in range(14)])
    with Progress(tmp_path, None, err=err):
        pass
    _, first, *_, twelfth, last = err.getvalue().splitlines()
    assert first == "config: key0: 1 -> 2 (--set)"
    assert twelfth == "config: key11: 1 -> 2 (--set)"
    assert last == "config: 2 more, in launch.json"


def test_rate_of_steps_of_several_sizes(tmp_path: Path) -> None:
    """The rate is that of all steps since the last line, as the run log says, not of the last one's samples."""
    err = io.StringIO()
    with RunLog(run_log_path(tmp_path, 0)) as run_log:
        run_log.note("step", step=2, of=2, loss=2.0, samples=8, seconds=0.25, samples_per_second=20.0)
    with Progress(tmp_path, None, err=err):
        pass
    assert "step 2/2  loss 2.0000  20 samples/s" in err.getvalue().splitlines()


def test_the_fullest_expert(tmp_path: Path) -> None:
    """A run with experts over ranks shows the largest share of an expert in any layer."""
    err = io.StringIO()
    layers = {"a": {"fullest": 1.25}, "b": {"fullest": 2.0}}
    with RunLog(run_log_path(tmp_path, 0)) as run_log:
        run_log.note("step", step=2, of=2, loss=2.0, samples=8, seconds=0.25, experts=layers)
    with Progress(tmp_path, None, err=err):
        pass
    assert "step 2/2  loss 2.0000  32 samples/s  experts 2.00" in err.getvalue().splitlines()


def test_one_step_is_one(tmp_path: Path) -> None:
    """Not 1 steps."""
    err = io.StringIO()
    trained(tmp_path, 1)
    with Progress(tmp_path, None, err=err):
        pass
    assert err.getvalue().splitlines()[-1].startswith("1 step in 0.0 s, ")


def test_a_run_that_went_on(tmp_path: Path) -> None:
    """Its last line has the steps that it took itself, those before its first logged one among them."""
    err = io.StringIO()
    trained(tmp_path, 8, every=4, begin=3)
    with Progress(tmp_path, None, out=io.StringIO(), err=err):
        pass
    assert err.getvalue().splitlines()[-1] == f"steps 3 to 8 in 0.0 s, loss 1.0000 -> 0.5000; {tmp_path}"


def test_plain_lines_are_few(tmp_path: Path) -> None:
    """A thousand logged steps come to some twenty lines, the last one among them."""
    err = io.StringIO()
    trained(tmp_path, 1000)
    with Progress(tmp_path, None, err=err):
        pass
    lines = err.getvalue().splitlines()
    assert 18 <= len(lines) <= 24
    assert lines[-2].startswith("step 1000/1000 ")


def test_evaluations_are_shown(tmp_path: Path) -> None:
    """With their names."""
    with RunLog(run_log_path(tmp_path, 0)) as run_log:
        run_log.note("eval", step=25, loss=2.5, accuracy=0.75)
    err = io.StringIO()
    with Progress(tmp_path, 50, err=err):
        pass
    assert err.getvalue() == f"run folder: {tmp_path}\nstep 25/50  evaluated: loss 2.5000  accuracy 0.7500\n"


def test_prints_of_rank_0_go_to_stdout(tmp_path: Path) -> None:
    """A line is shown as soon as it is complete; an unfinished one at the end."""
    out, err = io.StringIO(), io.StringIO()
    with stdout_path(tmp_path).open("w", encoding="utf-8") as file, Progress(tmp_path, 5, out=out, err=err) as progress:
        file.write("one\ntw")
        file.flush()
        progress.tick()
        assert out.getvalue() == "one\n"
        file.write("o")
        file.flush()
        progress.tick()
        assert out.getvalue() == "one\n"
    assert out.getvalue() == "one\ntwo\n"
    assert err.getvalue() == f"run folder: {tmp_path}\n"


def test_quiet_leaves_prints_only(tmp_path: Path) -> None:
    """Quiet: unipar writes nothing."""
    out, err = Terminal(), Terminal()
    trained(tmp_path, 3)
    stdout_path(tmp_path).write_text("mine\n", "utf-8")
    with Progress(tmp_path, 3, quiet=True, out=out, err=err):
        pass
    assert (out.getvalue(), err.getvalue()) == ("mine\n", "")


@pytest.mark.usefixtures("narrow")
def test_a_bar_on_a_terminal(tmp_path: Path) -> None:
    """Step, loss, rate and time left on one line of at most 80 columns; prints above it."""
    err = Terminal()
    trained(tmp_path, 40, every=10)
    heartbeat = HeartbeatWriter(heartbeat_path(tmp_path, 0))
    heartbeat.step = 31
    heartbeat.set_phase("forward")
    stdout_path(tmp_path).write_text("mine [not markup]\n", "utf-8")
    with Progress(tmp_path, 400, out=err, err=err) as progress:
        progress.tick()
    drawn = [line.rstrip() for line in re.split(r"[\r\n]", ESCAPE.sub("", err.getvalue()))]
    assert "mine [not markup]" in drawn
    bars = [line for line in drawn if line.startswith("step 40/40 ")]
    assert bars
    assert bars[-1].endswith("loss 0.1000  32 samples/s  0.0 s")
    assert all(len(line) <= 80 for line in drawn if line.startswith("step"))


@pytest.mark.usefixtures("narrow")
def test_no_color(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NO_COLOR keeps the bar and takes the colours."""
    monkeypatch.setenv("NO_COLOR", "1")
    err = Terminal()
    trained(tmp_path, 4)
    with Progress(tmp_path, 4, out=err, err=err) as progress:
        progress.tick()
    assert "step 4/4" in err.getvalue()
    assert not re.search(r"\x1b\[[0-9;]*3[0-9](;|m)", err.getvalue())


@pytest.mark.usefixtures("narrow")
def test_a_dumb_terminal_gets_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a terminal cannot move its cursor."""
    monkeypatch.setenv("TERM", "dumb")
    err = Terminal()
    trained(tmp_path, 1)
    with Progress(tmp_path, 1, err=err):
        pass
    assert "\x1b" not in err.getvalue()
    assert "step 1/1  loss" in err.getvalue()


def test_a_failed_run_has_no_summary(tmp_path: Path) -> None:
    """The error is the last line."""
    err = io.StringIO()
    trained(tmp_path, 1)
    with pytest.raises(KeyError), Progress(tmp_path, 1, err=err):
        raise KeyError
    assert "->" not in err.getvalue()


def test_ticking_by_itself(tmp_path: Path) -> None:
    """A thread ticks if the process that draws is the one that trains."""
    err = io.StringIO()
    with Progress(tmp_path, 1, prints=False, err=err) as progress, progress.tick_in_background():
        trained(tmp_path, 1)
    assert "step 1/1  loss 4.0000" in err.getvalue()


def test_tail(tmp_path: Path) -> None:
    """Lines come once, whole, and in pieces of any size; a file that is not there yet has none."""
    path = tmp_path / "x"
    tail = FileTail(path)
    assert list(tail.lines()) == []
    with path.open("wb") as file:
        file.write("a\nü".encode()[:3])
        file.flush()
        assert list(tail.lines()) == ["a"]
        file.write("ü".encode()[1:] + b"\nb\n")
        file.flush()
        assert list(tail.lines()) == ["ü", "b"]
    assert list(tail.lines()) == []
    tail.close()


@pytest.mark.usefixtures("narrow")
def test_a_bar_of_a_save_for_which_training_waits(tmp_path: Path) -> None:
    """The bar is the save's while training waits for it; a save beside training is a share at the line's end."""
    err = Terminal()
    trained(tmp_path, 2)
    heartbeat = HeartbeatWriter(heartbeat_path(tmp_path, 0))
    heartbeat.step = 3
    heartbeat.set_phase("save")
    heartbeat.set_work("saving", 2**29, 2**30)
    with Progress(tmp_path, 4, out=err, err=err) as progress:
        progress.tick()
        heartbeat.set_phase("forward")
        progress.tick()
        heartbeat.set_work("")
        progress.tick()
    drawn = [line.rstrip() for line in re.split(r"[\r\n]", ESCAPE.sub("", err.getvalue()))]
    assert any(line.startswith("saving ") and line.endswith("512 MiB of 1.0 GiB") for line in drawn), drawn
    assert any(line.startswith("step 2/2 ") and line.endswith("saving 50%") for line in drawn), drawn
    assert not drawn[-1].endswith("%")


def test_lines_about_work_that_lasts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a pipe a line comes every 30 seconds while a checkpoint is read, and none before."""
    err, now = io.StringIO(), [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    heartbeat = HeartbeatWriter(heartbeat_path(tmp_path, 0))
    with Progress(tmp_path, 4, err=err) as progress:
        for done in (0, 1, 2, 3):
            heartbeat.set_work("loading the checkpoint", done * 2**30, 2**32)
            progress.tick()
            now[0] += 20
        heartbeat.set_work("")
    assert err.getvalue().splitlines()[1:] == ["loading the checkpoint: 2.0 GiB of 4.0 GiB"]
