"""`breakpoint()` in a task, at a real terminal: in a single rank, in one of two, and Ctrl-C at its prompt."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.support.tiny import CONFIG, Tiny
from tests.support.world import PYTHONPATH_VARIABLE
from unipar.errors import ConfigError
from unipar.launcher.preparation.prepare import prepare
from unipar.launcher.preparation.prepared_run import DEBUG_TIMEOUT_SECONDS, PreparedRun

SECONDS = 120.0
"""Seconds after which a command is killed."""

_IN_FOREGROUND = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.executable, sys.argv[1:])"
)
"""Program that makes standard input its controlling terminal, so that Ctrl-C reaches it, and becomes another one."""


def type_into(
    words: Sequence[str],
    typed: Sequence[tuple[str, str]],
    folder: Path,
    more: Mapping[str, str],
) -> tuple[int, str]:
    """Run Python with these words; type each second text once the first one is shown; return exit code and output."""
    ours, theirs = os.openpty()
    command = [sys.executable, "-c", _IN_FOREGROUND, sys.executable, *words]
    process = subprocess.Popen(
        command,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=folder,
        env={**os.environ, **more},
        start_new_session=True,
    )
    os.close(theirs)
    shown, read, left = "", 0, list(typed)
    until = time.monotonic() + SECONDS
    try:
        while time.monotonic() < until:
            if select.select([ours], [], [], 0.1)[0]:
                try:
                    shown += os.read(ours, 65536).decode("utf-8", "replace")
                except OSError:  # nobody has the terminal any more
                    break
            if left and left[0][0] in shown[read:]:
                read = len(shown)
                os.write(ours, left.pop(0)[1].encode())
        return process.wait(max(1.0, until - time.monotonic())), shown.replace("\r\n", "\n")
    finally:
        process.kill()
        process.wait()
        os.close(ours)


SCRIPT = """
import sys, time, torch, unipar
from tests.support.tiny import CONFIG, Tiny

class Stops(Tiny):
    steps = 0
    def loss(self, model, batch):
        Stops.steps += 1
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        if Stops.steps == 3 and rank == int(sys.argv[2]):
            breakpoint()
        return super().loss(model, batch)

if __name__ == "__main__":
    ranks = int(sys.argv[1])
    changes = {"parallel.data": ranks, "launch": {"heartbeat": 1, "timeout": 2}, "train.steps": 5, "out": "out"}
    debug = {"debug_rank": int(sys.argv[2])} if ranks > 1 else {}
    report = unipar.launch(CONFIG, task=Stops, overrides=changes, **debug)
    print("steps:", report.steps)
"""

PROMPT = "(Pdb) "


def typed(folder: Path, ranks: int, rank: int, *words: tuple[str, str]) -> tuple[int, str]:
    """Exit code and output of the script whose rank `rank` stops in its third step."""
    script = SCRIPT.replace("sys.argv[1]", f'"{ranks}"').replace("sys.argv[2]", f'"{rank}"')
    (folder / "script.py").write_text(script, "utf-8")
    return type_into(["script.py"], words, folder, {**PYTHONPATH_VARIABLE, "TERM": "xterm", "COLUMNS": "100"})


@pytest.mark.parametrize(("ranks", "rank"), [(1, 0), pytest.param(2, 1, marks=pytest.mark.sweep)])
def test_a_breakpoint(tmp_path: Path, ranks: int, rank: int) -> None:
    """A value is printed at the prompt, time there is not counted, the bar is gone, and the run ends well."""
    waits = "import time; time.sleep(4)\n"
    code, shown = typed(tmp_path, ranks, rank, (PROMPT, "p Stops.steps * 111\n"), (PROMPT, waits), (PROMPT, "c\n"))
    assert code == 0, shown
    before, _, after = shown.partition(PROMPT)
    assert "in loss" not in after
    assert "333\n" in after
    assert "script.py" in before
    assert "\x1b[2K" in before  # the bar
    assert "\x1b[2K" not in after
    assert after.endswith("steps: 5\n")


@pytest.mark.sweep
def test_ctrl_c_at_the_prompt(tmp_path: Path) -> None:
    """The first one stops the run after the step, as elsewhere; the second one kills it, whatever a debugger does."""
    again = "Ctrl-C again kills it"
    code, shown = typed(tmp_path, 1, 0, (PROMPT, "\x03"), (again, "\x03"))
    assert code == 1, shown
    assert "SIGINT: the run stops after the step that the debugger is in (c goes on); Ctrl-C again kills it" in shown
    assert "unipar.errors.Stopped: stopped by SIGINT after step " in shown


def planned(rank: int, **changes: int) -> PreparedRun:
    return PreparedRun.of(prepare({**CONFIG, **changes}, Tiny), overwrite=False).for_debugging(rank)


def test_a_rank_that_cannot_be_debugged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There must be such a rank and a terminal; then the other ranks wait for it."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"^--debug-rank \(debug_rank=\) 2: the run has the ranks 0 to 1$"):
        planned(2)
    monkeypatch.setattr("os.isatty", lambda fd: False)  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    with pytest.raises(
        ConfigError,
        match=r"^--debug-rank \(debug_rank=\) 1: standard input is not a terminal; start the command in "
        r"one, without a pipe$",
    ):
        planned(1)
    monkeypatch.setattr("os.isatty", lambda fd: True)  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    plan = planned(1)
    assert (plan.rank_with_terminal, plan.config.launch.timeout) == (1, DEBUG_TIMEOUT_SECONDS)
