"""A real run with data workers, killed somewhere between its first instruction and its last."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from contextlib import suppress
from pathlib import Path

from tests.support.world import PYTHONPATH_VARIABLE, ROOT, is_running
from unipar.distributed.machine_checks import find_open_files

WITHIN = 5.0
"""Seconds in which all must be over."""

_SHM = Path("/dev/shm")
_SIGN = "KILLED_BY_TEST"


class Victim:
    """`unipar run` of an endless training of two ranks with a data worker each."""

    def __init__(self, folder: Path) -> None:
        self.out = folder / "run"
        self._temporary = Path(tempfile.mkdtemp(prefix="ut-", dir="/tmp"))
        self._sign = uuid.uuid4().hex
        self._shared = _idle()
        config = folder / "tiny.json"
        config.write_text(
            json.dumps(
                {
                    "task": {"use": f"{ROOT}/tests/support/tiny.py:Tiny", "args": {"pause": 0.01}},
                    "device": "cpu",
                    "parallel": {"data": 2},
                    "batch": {"total": 8},
                    "data": {"workers": 1},
                    "train": {"steps": 1_000_000},
                }
            ),
            encoding="utf-8",
        )
        environment = {
            **os.environ,
            **PYTHONPATH_VARIABLE,
            "TMPDIR": str(self._temporary),
            "OMP_NUM_THREADS": "1",
            _SIGN: self._sign,
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "unipar", "run", str(config), "--out", str(self.out)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def ranks(self) -> list[int]:
        """Those that there are by now."""
        parents: dict[int, int] = {}
        for pid in self.alive():
            with suppress(FileNotFoundError, ProcessLookupError):
                parents[pid] = int(Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()[1])
        server = {pid for pid, parent in parents.items() if parent == self.process.pid}
        return [pid for pid, parent in parents.items() if parent in server]  # forks of the one that imports libraries

    def alive(self) -> list[int]:
        """Every process of this run, whoever started it."""
        found: list[int] = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                marked = f"{_SIGN}={self._sign}".encode() in (folder / "environ").read_bytes()
            except OSError:
                continue
            if marked and is_running(int(folder.name)):
                found.append(int(folder.name))
        return found

    def trains(self) -> bool:
        run_log = self.out / "rank-0.jsonl"
        return run_log.exists() and '"event": "step"' in run_log.read_text("utf-8")

    def must_be_over(self) -> None:
        """Within the time, with nothing left."""
        until = time.monotonic() + WITHIN
        while (left := self.alive()) and time.monotonic() < until:
            time.sleep(0.02)
        assert not left, f"still there after {WITHIN:g} s: {[_command(pid) for pid in left]}"
        assert os.listdir(self._temporary) == [], "left in the temporary folder"
        assert _idle() <= self._shared, "left in shared memory"
        for run_log in self.out.glob("rank-*.jsonl"):  # what was logged is whole, to the last line
            for line in run_log.read_text("utf-8").splitlines(keepends=True):
                assert not line.endswith("\n") or json.loads(line)

    def bury(self) -> None:
        """Whatever the test came to."""
        for pid in self.alive():
            os.kill(pid, signal.SIGKILL)
        self.process.communicate()
        for name in os.listdir(self._temporary):
            subprocess.run(["rm", "-r", str(self._temporary / name)], check=True)
        self._temporary.rmdir()


def kill_a_rank(folder: Path, seed: int) -> None:
    """kill -9 of one rank at any time of its life: the run ends by itself, and says which it was."""
    draw = random.Random(seed)
    victim = Victim(folder)
    try:
        _until(lambda: len(victim.ranks()) == 2, "two ranks")
        if draw.random() < 0.5:
            _until(victim.trains, "a step")
        time.sleep(draw.uniform(0, 1))
        os.kill(draw.choice(victim.ranks()), signal.SIGKILL)
        victim.must_be_over()
        _, said = victim.process.communicate()
        assert victim.process.returncode == 1
        assert re.search(r" was killed by SIGKILL( .*)?, from outside: by a person, a scheduler", said)
        assert "Traceback" not in said
    finally:
        victim.bury()


def kill_the_parent(folder: Path, seed: int) -> None:
    """kill -9 of the parent at any time: nobody outlives it."""
    draw = random.Random(seed)
    victim = Victim(folder)
    try:
        if draw.random() < 0.5:
            _until(victim.trains, "a step")
        time.sleep(draw.uniform(0, 2))
        victim.process.kill()
        victim.must_be_over()
    finally:
        victim.bury()


def _until(true: object, what: str, seconds: float = 60.0) -> None:
    assert callable(true)
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until, f"no {what} within {seconds:g} s"
        time.sleep(0.02)


def _idle() -> set[str]:
    """Files in shared memory that no process holds."""
    return {str(file) for file in _SHM.iterdir()} - find_open_files(_SHM)


def _command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text("utf-8", errors="replace").replace("\0", " ")
