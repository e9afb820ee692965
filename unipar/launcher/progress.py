"""Display of a running run: a bar or lines, drawn from the files that rank 0 writes."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Final, Self, TextIO

from unipar.model.weight_file import describe_loaded_weights
from unipar.results.run_traces import HOW_TO_OPEN, list_traces
from unipar.run_folder.checkpoint_lines import describe_checkpoint_event
from unipar.run_folder.heartbeat import MEASURING, READING_ON, Heartbeat, LongWork, read_heartbeat
from unipar.run_folder.layout import debugger_path, debugging_path, heartbeat_path, run_log_path, stdout_path
from unipar.run_folder.run_attempts import count_attempts
from unipar.utils.files import relative_path
from unipar.utils.terminal import Terminal
from unipar.utils.text import count_of, format_clock, format_number, format_size

LINES_IN_SHORT_RUN = 20
"""Number of plain lines in a short run; a long run has one every `SECONDS_BETWEEN_LINES` seconds."""

SECONDS_BETWEEN_LINES = 30.0

MOST_CHANGES = 12
"""Largest number of lines on how the config of a run that goes on differs from before."""

_SAID_EVENTS: Final = ("training mode", "precision", "recomputed blocks", "data", "tracker", "memory", "read on")
"""Events whose sentence is shown as it stands."""


class FileTail:
    """Reader of a growing file: lines that were added since the last call."""

    def __init__(self, path: Path) -> None:
        self._path, self._file, self._rest = path, None, b""

    def lines(self) -> Iterator[str]:
        """Yield complete lines that were added since the last call; of a file that was replaced, all of them."""
        if self._file is not None and _is_replaced(self._path, self._file):
            self.close()
            self._file, self._rest = None, b""
        if self._file is None:
            if not self._path.exists():
                return
            self._file = self._path.open("rb")
        *complete, self._rest = (self._rest + self._file.read()).split(b"\n")
        for line in complete:
            yield line.decode("utf-8", "replace")

    def rest(self) -> str:
        """Return the last line if it has no end yet, and forget it."""
        unfinished, self._rest = self._rest.decode("utf-8", "replace"), b""
        return unfinished

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def _is_replaced(path: Path, file: BinaryIO) -> bool:
    """Return whether the path names another file than the one that is open."""
    try:
        return path.stat().st_ino != os.fstat(file.fileno()).st_ino
    except FileNotFoundError:
        return False


class Progress:
    """Progress of a run: a bar on a terminal, plain lines elsewhere; a context manager to be ticked `every` seconds."""

    def __init__(
        self,
        run: Path,
        steps: int | None,
        *,
        quiet: bool = False,
        prints: bool = True,
        goes_on: bool = False,
        out: TextIO | None = None,
        err: TextIO | None = None,
    ) -> None:
        self._run, self._steps, self._quiet = run, steps, quiet
        self._out, self._err = Terminal(out or sys.stdout), Terminal(err or sys.stderr)
        self._run_log = FileTail(run_log_path(run, 0))
        self._stdout_tail = FileTail(stdout_path(run)) if prints else None
        """Tail of rank 0's prints; None if rank 0 is this process, which prints by itself."""

        self._awaited = count_attempts(run) + 1 if goes_on else 0
        """Number of the attempt whose lines are to be shown, while the run log's are those of earlier ones; else 0."""

        self._resumed: Mapping[str, Any] | None = None
        """The event of a run that goes on from another's checkpoint."""

        self._rows: list[Mapping[str, Any]] = []
        self._shown = (0, 0.0)
        self._work_shown = time.monotonic()

    @property
    def every(self) -> float:
        """Seconds between two calls of `tick`."""
        return 0.1 if self._err.draws else 0.5

    def __enter__(self) -> Self:
        self._say_progress(f"run folder: {relative_path(self._run)}")
        if not self._quiet and self._err.can_draw:
            self._err.draw_bar("starting", redirect_stdout=self._out.can_draw)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.tick()
        if self._stdout_tail is not None and (unfinished := self._stdout_tail.rest()):
            self._write_rank_output(unfinished)
        self._err.stop()
        if kind is None and not self._quiet and self._rows:
            self._say_progress(self._summary())
        for tail in (self._run_log, self._stdout_tail):
            if tail is not None:
                tail.close()

    def tick(self) -> None:
        """Show new prints and events."""
        if (asked := debugger_path(self._run)).exists():
            self._err.stop()  # a debugger has the terminal
            asked.rename(debugging_path(self._run))
        for line in self._stdout_tail.lines() if self._stdout_tail is not None else ():
            self._write_rank_output(line)
        for line in self._run_log.lines():
            self._show_event(json.loads(line))
        beat = read_heartbeat(heartbeat_path(self._run, 0))
        if self._err.draws:
            self._update_bar(beat)
            self._err.refresh()
        elif beat is not None:
            self._say_work(beat.work)

    @contextmanager
    def tick_in_background(self) -> Generator[None]:
        """Context manager: tick in a thread while the body trains in this process."""
        over = threading.Event()

        def tick() -> None:
            while not over.wait(self.every):
                self.tick()

        thread = threading.Thread(target=tick, name="progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def begin_attempt(self) -> None:
        """Show what a further attempt logs, and not again what earlier ones did."""
        self.tick()
        self._awaited, self._shown = count_attempts(self._run) + 1, (0, 0.0)

    def say(self, text: str) -> None:
        """Show a line, unless the run is quiet."""
        if not self._quiet:
            self._err.line(text)

    def _say_progress(self, text: str) -> None:
        """Show a line that the next one may replace, unless the run is quiet."""
        if not self._quiet:
            self._err.progress_line(text)

    def _show_event(self, row: Mapping[str, Any]) -> None:
        if row["event"] == "continued" and row["attempt"] == self._awaited:
            self._awaited = 0
        if self._awaited:
            return
        if row["event"] == "start":
            self._say_progress(f"{row['strategy']}, {count_of(row['size'], 'rank')}, {row['parameters']:,} parameters")
        elif row["event"] == "weights":
            self.say(f"weights: {describe_loaded_weights(row)}")
        elif row["event"] == "work":
            self.say(f"work: {row['said']}")
        elif row["event"] == "compiler":
            self.say(f"{row['what']}: {row['why']}")
        elif row["event"] in _SAID_EVENTS:
            self.say(f"{'data' if row['event'] == 'read on' else row['event']}: {row['said']}")
        elif row["event"] == "trace":
            for trace in list_traces({0: [row]}, self._run):
                self.say(f"trace: {trace.table(79)}\n{relative_path(trace.file)}: {HOW_TO_OPEN}")
        elif row["event"] == "no trace":
            self.say(f"no trace: {row['said']}")
        elif row["event"] == "config":
            shown, left = row["said"][:MOST_CHANGES], len(row["said"]) - MOST_CHANGES
            for line in [*shown, *([f"{left} more, in launch.json"] if left > 0 else [])]:
                self.say(f"config: {line}")
        elif row["event"] == "early stop":
            self.say(row["said"])
        elif row["event"] in ("resumed", "checkpoint", "checkpoint failed"):
            if row["event"] == "resumed" and not self._rows:
                self._resumed = row
            for line in describe_checkpoint_event(row):
                (self.say if row["event"] == "checkpoint failed" else self._say_progress)(line)
        elif row["event"] == "step":
            self._rows = [*self._rows[:1], row]
            self._steps = row.get("of", self._steps)
            if not self._err.draws and self._line_is_due(row["step"]):
                rate = _format_rate(row) if row["seconds"] else ""
                step = self._step_of_total(row["step"])
                self._say_progress(
                    f"step {step}  loss {row['loss']:.4f}  {rate}{_format_experts(row)}{_format_memory(row)}"
                )
        elif row["event"] == "eval":
            named = "  ".join(f"{k} {format_number(v)}" for k, v in row.items() if k not in ("event", "time", "step"))
            self._say_progress(f"step {self._step_of_total(row['step'])}  evaluated: {named}")

    def _line_is_due(self, step: int) -> bool:
        last, when = self._shown
        now = time.monotonic()
        often = (self._steps or 0) / LINES_IN_SHORT_RUN
        if last and step != self._steps and now - when < SECONDS_BETWEEN_LINES and not (often and step - last >= often):
            return False
        self._shown = (step, now)
        return True

    def _say_work(self, work: LongWork | None) -> None:
        """Show a plain line now and then about work that lasts."""
        now = time.monotonic()
        if work is None:
            self._work_shown = now
        elif now - self._work_shown >= SECONDS_BETWEEN_LINES:
            self._work_shown = now
            self._say_progress(_describe_work(work))

    def _update_bar(self, beat: Heartbeat | None) -> None:
        if beat is None:
            return
        work = beat.work
        awaited = beat.phase in ("start", "save")  # training waits for it
        if work is not None and (awaited or work.name in (READING_ON, MEASURING)):
            self._err.move_bar(description=work.name, completed=work.done, total=work.total, says=_format_work(work))
            return
        if beat.step < 1:
            return
        row = self._rows[-1] if self._rows else None
        done = max(beat.step - 1, row["step"] if row else 0)
        says = "" if row is None else f"loss {row['loss']:.4f}"
        if row is not None and row["seconds"]:
            says += f"  {_format_rate(row)}{_format_experts(row)}{_format_memory(row)}"
            if self._steps:
                says += f"  {format_clock((self._steps - done) * row['seconds'])}"
        if work is not None and work.total:
            says += f"  {work.name} {work.done / work.total:.0%}"
        self._err.move_bar(
            description=f"step {self._step_of_total(done)}", completed=done, total=self._steps, says=says
        )

    def _step_of_total(self, step: int) -> str:
        return f"{step}/{self._steps}" if self._steps else f"{step}"

    def _write_rank_output(self, line: str) -> None:
        """Write a line that rank 0 printed to stdout, or above the bar if stdout is the same terminal."""
        same = self._err.draws and self._out.can_draw
        (self._err if same else self._out).line(line)

    def _summary(self) -> str:
        first, last = self._rows[0], self._rows[-1]
        steps, since = count_of(last["step"], "step"), first["time"]
        if self._resumed is not None:
            steps, since = f"steps {self._resumed['step'] + 1} to {last['step']}", self._resumed["time"]
        took = format_clock(last["time"] - since)
        return f"{steps} in {took}, loss {first['loss']:.4f} -> {last['loss']:.4f}; {relative_path(self._run)}"


def _describe_work(work: LongWork) -> str:
    if work.name == READING_ON:
        return f"data: read on past {work.done:,} of {work.total:,} samples"
    if work.name == MEASURING:
        return f"data: measured the lengths of {work.done:,} of {work.total:,} samples"
    return f"{work.name}: {_format_work(work)}"


def _format_work(work: LongWork) -> str:
    if work.name in (READING_ON, MEASURING):
        return f"{work.done:,}/{work.total:,} samples"
    return f"{format_size(work.done)} of {format_size(work.total)}" if work.total else ""


def _format_experts(row: Mapping[str, Any]) -> str:
    """Return the largest share of an expert in any layer, 1 if even, or "" if experts are not counted."""
    layers = row.get("experts", {}).values()
    return f"  experts {max(layer['fullest'] for layer in layers):.2f}" if layers else ""


def _format_memory(row: Mapping[str, Any]) -> str:
    """Return the peak memory of a step, its phase and its largest category, or "" if memory was not recorded."""
    if not row.get("memory"):
        return ""
    fullest = max(row["memory"], key=lambda phase: phase["peak"])
    most, held = max(fullest["held"].items(), key=lambda item: item[1])
    return f"  {format_size(fullest['peak'])} in {fullest['name']}, {most} {format_size(held)}"


def _format_rate(row: Mapping[str, Any]) -> str:
    """Return samples a second, or tokens where the task has a weight; and the share of the devices' peak, if known."""
    tokens = "tokens_per_second" in row
    samples = row["samples_per_second"] if "samples_per_second" in row else row["samples"] / row["seconds"]
    rate = row["tokens_per_second"] if tokens else samples
    text = f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"
    mfu = f"  MFU {row['mfu']:.1%}" if "mfu" in row else ""
    return f"{text} {'tokens' if tokens else 'samples'}/s{mfu}"
