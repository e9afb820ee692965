"""`make gpu`: run every row in a process of its own, print one table, write one JSON file."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.results import GpuResults, Result, RowResult
from benchmarks.gpu.rows import ROOT, Row, all_rows, select_rows
from benchmarks.gpu.wheels import WheelsMissing, prepare_site

CORES_PER_ROW = 4
"""Cores for each of the rows that run side by side."""

SECONDS_TO_STOP = 10.0
"""Seconds that a row has to end after SIGTERM, so that its workers leave nothing behind."""


def main(words: Sequence[str] | None = None) -> int:
    """Parse the command line, run the rows, print the table; return the exit code."""
    options = _parse(words)
    sys.stdout.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
    out: Path = options.out.resolve()
    try:
        rows = select_rows(all_rows(), options.only)
    except ValueError as e:
        print(f"unipar: {e}", file=sys.stderr)
        return 2
    if options.list:
        print("\n".join(f"{row.name:40} {row.ranks} ranks, at most {row.limit} s" for row in rows))
        return 0
    try:
        site = prepare_site(out)
    except WheelsMissing as e:
        print(f"unipar: {e}", file=sys.stderr)
        return 1
    sys.path[:0] = [str(site), str(ROOT), str(ROOT / "backends")]
    with tempfile.TemporaryDirectory(prefix="unipar-gpu-") as temporary:
        environment = row_environment(site, temporary)
        probe = [sys.executable, "-m", "benchmarks.gpu.probe"]
        asked = subprocess.run(probe, env=environment, stdout=subprocess.PIPE, text=True, check=False)
        if asked.returncode:
            print(f"unipar: torch cannot be asked for GPUs by {sys.executable}; its error is above", file=sys.stderr)
            return 1
        machine: dict[str, Any] = json.loads(asked.stdout.splitlines()[-1]) | {"device": options.device}
        file = out / "gpu.json"
        results = GpuResults.read(file, machine) if options.go_on else GpuResults(machine)
        runner = Runner(results, file, environment, options, out / "logs")
        code = runner.run(rows)
    print(results.table(rows, max(80, shutil.get_terminal_size((160, 24)).columns)))
    print(f"written to {file}")
    if left := results.missing(rows):
        print(f"{len(left)} rows are left: the same command with --continue runs them")
    return code or results.code(rows)


def _parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make gpu", description=__doc__)
    parser.add_argument(
        "--only", action="append", default=[], metavar="ROWS", help="verify, account/1, tests/test_fp16"
    )
    parser.add_argument("--continue", dest="go_on", action="store_true", help="keep the rows that an earlier call ran")
    parser.add_argument("--list", action="store_true", help="print the rows and run none")
    parser.add_argument("--minutes", type=float, default=9.0, help="stop after so many minutes (9)")
    parser.add_argument("--patience", type=float, default=1.0, help="multiply the time limit of each row, if slow")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1) // CORES_PER_ROW), help="rows at once")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "runs/gpu", help="folder of gpu.json and the logs (runs/gpu)"
    )
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a rehearsal of the rows that the CPU can run"
    )
    return parser.parse_args(words)


def row_environment(site: Path, temporary: str) -> dict[str, str]:
    """Return the environment of the rows: the wheels and this checkout come before what the machine has."""
    path = [str(site), str(ROOT), str(ROOT / "backends"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONUNBUFFERED": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # the machine's plugins bring warnings, which the suite makes errors
        "TORCH_EXTENSIONS_DIR": f"{temporary}/extensions",
        "TMPDIR": temporary,
    }


@dataclass
class _RunningRow:
    row: Row
    process: subprocess.Popen[bytes]
    began: float
    result_file: Path
    log: Path


class Runner:
    """Runner of rows: some side by side, each within its limit, all within the call's time."""

    def __init__(
        self, results: GpuResults, file: Path, environment: dict[str, str], options: argparse.Namespace, logs: Path
    ) -> None:
        self._results, self._file, self._environment, self._logs = results, file, environment, logs
        self._device: str = options.device
        self._jobs, self._patience = max(1, int(options.jobs)), float(options.patience)
        self._until = time.monotonic() + 60 * options.minutes
        self._running: list[_RunningRow] = []

    def run(self, rows: Sequence[Row]) -> int:
        """Run the rows that have no result; return 130 after Ctrl-C, else 0."""
        self._logs.mkdir(parents=True, exist_ok=True)
        waiting = self._results.missing(rows)
        self._results.write(self._file)
        former = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            while waiting or self._running:
                while waiting and (not self._can_run(waiting[0]) or self._has_room_for(waiting[0])):
                    self._start(waiting.pop(0))
                self._collect()
                if time.monotonic() > self._until:
                    self._stop_all("the call's time was over: --continue runs it again")
                    break
                if self._running:
                    time.sleep(0.1)
        except KeyboardInterrupt:
            for number in (signal.SIGINT, signal.SIGTERM):  # make and a shell may each send one
                signal.signal(number, signal.SIG_IGN)
            self._stop_all("interrupted: --continue runs it again")
            return 130
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)
        return 0

    def _can_run(self, row: Row) -> bool:
        return not row.needs_gpu or bool(self._results.machine["gpus"]) or (self._device == "cpu" and not row.only_gpu)

    def _has_room_for(self, row: Row) -> bool:
        if not self._running:
            return True
        alone = row.alone or any(other.row.alone for other in self._running)
        return not alone and len(self._running) < self._jobs

    def _start(self, row: Row) -> None:
        if not self._can_run(row):
            self._add(row, "no GPU", "", 0.0)
            return
        slug = row.name.replace("/", "-")
        log, result_file = self._logs / f"{slug}.log", Path(self._environment["TMPDIR"], f"{slug}.json")
        result_file.unlink(missing_ok=True)
        request = {"kind": row.kind, "arguments": row.arguments, "device": self._device, "ranks": row.ranks}
        command = [sys.executable, "-m", "benchmarks.gpu.row", json.dumps(request), str(result_file)]
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches this process alone, which then stops the rows
            )
        self._running.append(_RunningRow(row, process, time.monotonic(), result_file, log))

    def _collect(self) -> None:
        """Note the rows that have ended, and stop those beyond their limit."""
        for running in list(self._running):
            seconds = time.monotonic() - running.began
            if running.process.poll() is not None:
                self._running.remove(running)
                self._add(running.row, *_result_of(running), seconds)
            elif seconds > (limit := self._patience * running.row.limit):
                self._running.remove(running)
                last = _last_line(running.log)
                _stop(running.process)
                self._add(running.row, "too late", f"over {limit:.0f} s; {last}", seconds)

    def _stop_all(self, why: str) -> None:
        for running in self._running:
            with suppress(ProcessLookupError):
                os.killpg(running.process.pid, signal.SIGINT)  # all at once, so that they end side by side
        for running in self._running:
            _stop(running.process)
            self._add(running.row, "stopped", why, time.monotonic() - running.began)
        self._running.clear()

    def _add(self, row: Row, result: Result, figure: str, seconds: float) -> None:
        done = RowResult(row=row.name, ranks=row.ranks, result=result, figure=figure, seconds=round(seconds, 1))
        self._results.add(done, self._file)
        if result != "no GPU":
            print(f"{row.name}: {result}, {seconds:.0f} s" + (f": {figure}" if figure else ""))


def _result_of(running: _RunningRow) -> tuple[Result, str]:
    try:
        found = json.loads(running.result_file.read_text("utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        code = running.process.returncode
        how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return "failed", f"{how}; {_last_line(running.log)}"
    return found["result"], found["figure"]


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text("utf-8", errors="replace").splitlines() if line.strip()]
    return f"last in its log: {lines[-1][:300]}" if lines else "its log is empty"


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ask a row to stop, and kill what is left of it after a while; its workers end with it."""
    for number, seconds in ((signal.SIGINT, SECONDS_TO_STOP), (signal.SIGTERM, SECONDS_TO_STOP / 2)):
        try:
            os.killpg(process.pid, number)
            process.wait(seconds)
        except ProcessLookupError:
            break
        except subprocess.TimeoutExpired:
            continue
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


if __name__ == "__main__":
    try:
        _code = main()
    except KeyboardInterrupt:
        _code = 130
    raise SystemExit(_code)
