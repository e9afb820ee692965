"""Detection of ranks that hang, and search for the one that the others wait for."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import override

from unipar.distributed.flight_recorder import CollectiveRecord, read_collectives
from unipar.errors import Hung
from unipar.launcher.processes.signals import STACK_SIGNAL
from unipar.run_folder.heartbeat import STEP_PHASES, Heartbeat, read_heartbeat
from unipar.run_folder.layout import collectives_path, heartbeat_path, log_path, stack_path
from unipar.utils.procfs import process_state

UNTIMED_PHASES = ("start", "waiting", "end")
"""Phases without a time limit."""


END_OF_FIRST_STEP = (1, STEP_PHASES.index("update"))
"""Step and phase up to which there is no time limit: libraries compile and allocate in the first step."""


WAITING_FILES = ("torch/distributed/", "torch/autograd/graph.py", f"{Path(__file__).parents[2]}/")
"""Parts of file names in which a rank's stack ends while it waits for other ranks; unipar's own wait for a device."""


NOT_STARTED = Heartbeat(-1, "start", 0.0)
"""Heartbeat of a rank that has none yet: it is importing the user's code."""


TIMEOUT_SLACK_SECONDS = 1.0
"""Seconds beyond `launch.timeout` in which a waiting rank may report the timeout itself."""


STACK_DUMP_SECONDS = 1.0
"""Seconds that a rank has to write its stack."""


RECORD_SECONDS = 0.5
"""Seconds beyond these that ranks have to write what they know of their collectives."""


_FRAME_PATTERN = re.compile(r'  File "(?P<file>.+)", line (?P<line>\d+|\?\?\?) in (?P<function>.+)')


@dataclass(frozen=True)
class StackFrame:
    """Innermost frame of a rank's stack."""

    file: str
    line: str
    function: str

    @override
    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


class HangDetector:
    """Detector of ranks that hang, which reads the heartbeats of a run's ranks."""

    def __init__(
        self, run: Path, patience: float | None, waits: Sequence[str] = (), meeting: float | None = None
    ) -> None:
        self._run, self._patience, self._waiting_files = run, patience, (*WAITING_FILES, *waits)
        self._meeting_timeout = meeting
        """Seconds that ranks which are ready to meet wait for those that still import the user's code."""

        self.every = min(1.0, (patience or meeting or 0.0) / 4) or None
        """Seconds between two checks; None: no checks."""

        self._since: dict[int, tuple[Heartbeat, float]] = {}
        self._looked = time.monotonic()

    def find_hang(self, pids: Mapping[int, int]) -> Hung | None:
        """Return the error if one of these running ranks has been silent for too long, or None."""
        if (absent := self._find_unstarted_rank(pids)) is not None:
            return absent
        now = time.monotonic()
        if self._patience is None or self.every is None:
            return None
        pause = now - self._looked
        if pause > 2 * self.every + 1.0:  # this process was suspended, and perhaps the ranks too: count from now
            self._since.clear()
        self._looked = now
        silent = [rank for rank in pids if self._silent_seconds(rank, now) > self._patience]
        if not silent:
            return None
        beats = {rank: beat for rank in pids if (beat := read_heartbeat(heartbeat_path(self._run, rank))) is not None}
        return self._name(pids, beats, _describe_silence(max(now - beats[rank].when for rank in silent)))

    def _find_unstarted_rank(self, pids: Mapping[int, int]) -> Hung | None:
        """Return the error if a rank has waited too long for ranks that have no heartbeat yet, or None."""
        beats = {rank: read_heartbeat(heartbeat_path(self._run, rank)) for rank in pids}
        ready = {rank: beat.when for rank, beat in beats.items() if beat is not None}
        not_ready = {rank: pids[rank] for rank, beat in beats.items() if beat is None}
        if self._meeting_timeout is None or not ready or not not_ready:
            return None
        first = min(ready, key=lambda rank: ready[rank])
        late = time.monotonic() - ready[first] > self._meeting_timeout + TIMEOUT_SLACK_SECONDS
        return self._name(not_ready, dict.fromkeys(not_ready, NOT_STARTED), _describe_timeout(first)) if late else None

    def find_awaited_rank(self, pids: Mapping[int, int], late: int) -> Hung | None:
        """Return the error of the running rank that rank `late` waited for until `launch.timeout`, or None."""
        beats = {rank: read_heartbeat(heartbeat_path(self._run, rank)) or NOT_STARTED for rank in pids}
        hung = self._name(pids, beats, _describe_timeout(late), waiting_too=False) if pids else None
        return hung if hung is not None and hung.rank is not None else None

    def _silent_seconds(self, rank: int, now: float) -> float:
        """Return the seconds for which this rank's heartbeat has not changed in a phase with a time limit."""
        beat = read_heartbeat(heartbeat_path(self._run, rank))
        if beat is None or _progress_order(beat) <= END_OF_FIRST_STEP or beat.phase in UNTIMED_PHASES:
            self._since.pop(rank, None)
            return 0.0
        known = self._since.get(rank)
        if known is None or known[0] != beat:
            self._since[rank] = (beat, now if known is None and now - beat.when > 1.0 else beat.when)
        return now - self._since[rank][1]

    def _name(
        self, pids: Mapping[int, int], beats: Mapping[int, Heartbeat], why: str, *, waiting_too: bool = True
    ) -> Hung:
        """Return the error that names the rank that the others wait for: when one hangs, all become silent."""
        halted = [rank for rank in beats if process_state(pids[rank]) in ("T", "t")]
        if halted:
            return self._hung_error(halted[0], beats, why, "it is stopped (by SIGSTOP or a debugger)", None)
        stacks, records = dump_stacks(self._run, {rank: pids[rank] for rank in beats})
        least = min(beat.step for beat in beats.values())
        suspects = [rank for rank, beat in beats.items() if beat.step == least]
        outside = [rank for rank in suspects if rank not in stacks or not self._is_waiting(stacks[rank])]
        if len(outside) != 1:  # accumulation goes through the phases more than once, so stacks come before phases
            among = outside or (suspects if waiting_too else [])
            first = min((_progress_order(beats[rank]) for rank in among), default=None)
            outside = [rank for rank in among if _progress_order(beats[rank]) == first]
        if len(outside) != 1:
            return self._unknown_rank_error(beats, stacks, records, why)
        rank = outside[0]
        at = stacks.get(rank)
        where = f"it is at {at}" if at else "it does not answer: it hangs in the kernel"
        where += _describe_wait(rank, records)
        return self._hung_error(rank, beats, why, where, stack_path(self._run, rank) if at else None)

    def _is_waiting(self, at: StackFrame) -> bool:
        return any(part in at.file for part in self._waiting_files)

    def _hung_error(self, rank: int, beats: Mapping[int, Heartbeat], why: str, where: str, stack: Path | None) -> Hung:
        beat, log = beats[rank], log_path(self._run, rank)
        text = f"rank {rank} hung {_describe_heartbeat(beat, 'in ')}: {why}; {where}"
        kept = stack.read_text("utf-8") if stack else ""
        return Hung(text + f"\n  its log: {log}", rank=rank, traceback=kept, log=str(log))

    def _unknown_rank_error(
        self,
        beats: Mapping[int, Heartbeat],
        stacks: Mapping[int, StackFrame],
        records: Mapping[int, CollectiveRecord],
        why: str,
    ) -> Hung:
        every = ""
        for rank, beat in beats.items():
            every += f"\n  rank {rank}: {_describe_heartbeat(beat)}, at {stacks.get(rank, 'an unknown place')}"
            if (record := records.get(rank)) and record.pending:
                every += f", waits in {record.pending}"
        return Hung(f"{why}; which rank the others wait for is not known{every}")


def end_of_grace_while_saving(run: Path, ranks: Iterable[int], grace: float) -> float:
    """Return until when a stop waits for ranks that save: for `grace` seconds after a save's last sign of life."""
    beats = [read_heartbeat(heartbeat_path(run, rank)) for rank in ranks]
    return max((beat.when + grace for beat in beats if beat is not None and beat.phase == "save"), default=0.0)


def _progress_order(beat: Heartbeat) -> tuple[int, int]:
    return beat.step, STEP_PHASES.index(beat.phase)


def _describe_heartbeat(beat: Heartbeat, inside: str = "") -> str:
    return f"{inside}step {beat.step} ({beat.phase})" if beat.step > 0 else "before the first step"


def _describe_timeout(rank: int) -> str:
    return f"rank {rank} waited for the others until launch.timeout (make it larger if this may take so long)"


def _describe_silence(seconds: float) -> str:
    return f"no sign of life for {seconds:.0f} s"


def _describe_wait(rank: int, records: Mapping[int, CollectiveRecord]) -> str:
    """Return in which collective another rank waits for this one; empty if no flight recorder tells."""
    for other, record in sorted(records.items()):
        if other == rank or (waited := record.pending) is None:
            continue
        own = records.get(rank)
        absent = own is not None and waited.number > 0 and own.begun.get(waited.group, 0) < waited.number
        return f"; rank {other} waits in {waited}" + (f", which rank {rank} has not begun" if absent else "")
    return ""


def dump_stacks(run: Path, pids: Mapping[int, int]) -> tuple[dict[int, StackFrame], dict[int, CollectiveRecord]]:
    """Ask each rank for its stack; return the innermost frame and the collectives of each rank that answered."""
    sizes = {rank: _file_size(stack_path(run, rank)) for rank in pids}
    for rank in pids:
        collectives_path(run, rank).unlink(missing_ok=True)
    for pid in pids.values():
        try:
            os.kill(pid, STACK_SIGNAL)
        except ProcessLookupError:
            continue
    until = time.monotonic() + STACK_DUMP_SECONDS
    frames: dict[int, StackFrame] = {}
    last: dict[int, int] = {}
    while len(frames) < len(pids) and time.monotonic() < until:
        time.sleep(0.02)
        for rank in pids.keys() - frames.keys():
            size = _file_size(stack_path(run, rank))
            if size > sizes[rank] and size == last.get(rank):  # the dump is complete when the file stops growing
                frame = parse_innermost_frame(
                    stack_path(run, rank).read_bytes()[sizes[rank] :].decode("utf-8", "replace")
                )
                if frame is not None:
                    frames[rank] = frame
            last[rank] = size
    until = time.monotonic() + RECORD_SECONDS
    while not all(collectives_path(run, rank).exists() for rank in frames) and time.monotonic() < until:
        time.sleep(0.02)
    records = {rank: record for rank in pids if (record := read_collectives(collectives_path(run, rank)))}
    return frames, records


def _file_size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def parse_innermost_frame(dump: str) -> StackFrame | None:
    """Return the innermost frame of the thread that received the signal: the main one, unless it blocks signals."""
    _, _, current = dump.rpartition("Current thread")
    match = _FRAME_PATTERN.search(current)
    return StackFrame(match["file"], match["line"], match["function"]) if match else None
