"""`RunEntry`: a run, observed command, comparison, scaling or verification in short, as `unipar runs` lists it."""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal

from unipar import errors
from unipar.errors import ReportError
from unipar.results.observation import OBSERVED_JSON, Observation
from unipar.results.observed_rank import ObservedRank, read_observed_ranks
from unipar.results.result_files import read_mapping
from unipar.results.run_report import SPEED_NAMES
from unipar.run_folder.error_file import RecordedError, read_error, read_run_error
from unipar.run_folder.folder import FOLDERS_THAT_STAY, RUN_FILES, is_locked
from unipar.run_folder.heartbeat import LastPhase, read_heartbeat
from unipar.run_folder.layout import heartbeat_path, run_log_path
from unipar.run_folder.run_attempts import count_attempts
from unipar.utils.columns import Column
from unipar.utils.mappings import nested_mapping
from unipar.utils.procfs import boot_id, process_state
from unipar.utils.text import count_of, first_few, format_clock, format_number, format_rate, format_size

RunState = Literal["running", "ended", "failed", "stopped", "died", "unreadable"]
"""State of a run; died: no process of it is left, and none has recorded an end or an error."""

EntryKind = Literal["run", "comparison", "scaling", "verification", "observation"]

RESULT_OF_COMMAND: dict[str, tuple[str, EntryKind]] = {
    "compare": ("compare.json", "comparison"),
    "worlds": ("worlds.json", "scaling"),
    "scale": ("scale.json", "scaling"),
    "verify": ("verify.json", "verification"),
}
"""File with the results, and kind of the results, by the folder in a run folder that a command writes to."""

SEARCH_DEPTH = 3
"""Levels of folders below the given one in which runs are searched."""

FRESH_SECONDS = 120.0
"""Seconds since a file was last written, within which a run on another machine counts as running."""

_TAIL_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True)
class RunEntry:
    """A run, or the result of another command, in short."""

    name: str
    """Path relative to the folder that is listed."""

    folder: str
    kind: EntryKind
    strategy: str = ""
    """Name of the strategy, or number of strategies; "" if it is not known."""

    ranks: int | None = None
    steps: int | None = None
    """Optimizer steps done; of a comparison, in each strategy."""

    of: int | None = None
    """Optimizer steps in all; None if they are counted in epochs and the data has not been read yet."""

    loss: float | None = None
    """Last loss that was logged."""

    speed: Mapping[str, float] = field(default_factory=dict[str, float])
    """Figures of a run's last logged steps by name, such as `samples_per_second`, `tokens_per_second` and `mfu`."""

    state: RunState
    why: str = ""
    """Sentence on a state that is not plain success."""

    started: float
    """Time of the start, in seconds since 1970."""

    seconds: float | None = None
    """Seconds from the start to the end, or until now; None for results that do not record it."""

    size: int = 0
    """Bytes on disk."""

    changed: float = 0.0
    """Time of the last change of a file; pages do not count."""


def _steps_text(entry: RunEntry) -> str | None:
    total = f"/{entry.of}" if entry.of and entry.kind == "run" else ""
    return None if entry.steps is None else f"{entry.steps}{total}"


def _loss_text(entry: RunEntry) -> str | None:
    has_loss = entry.kind in ("run", "observation") and bool(entry.steps) and entry.state != "unreadable"
    return format_number(entry.loss) if has_loss else None


def _speed_text(entry: RunEntry) -> str | None:
    units = (unit for unit in ("tokens", "samples") if f"{unit}_per_second" in entry.speed)
    return next((f"{format_rate(entry.speed[f'{unit}_per_second'])} {unit}/s" for unit in units), None)


RUN_COLUMNS: Final[Sequence[Column[RunEntry]]] = (
    Column("run", lambda entry: entry.name, right=False),
    Column("strategy", lambda entry: entry.strategy or None, right=False),
    Column("ranks", lambda entry: entry.ranks),
    Column("steps", _steps_text),
    Column("loss", _loss_text),
    Column("speed", _speed_text, dropped=3, optional=True),
    Column("MFU", lambda entry: entry.speed.get("mfu"), "{:.1%}".format, dropped=1, optional=True),
    Column("took", lambda entry: entry.seconds, format_clock),
    Column("size", lambda entry: entry.size, format_size, dropped=2),
    Column("state", lambda entry: entry.state, right=False),
)


def list_runs(folder: Path) -> list[RunEntry]:
    """Return everything that was run in a folder, the latest start last; raise ReportError if there is no folder."""
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "does not exist"
        raise ReportError(f"{folder} {what}: train first (unipar run FILE), or name a folder with runs")
    entries = [_entry(at, kind, folder) for at, kind in _find_results(folder, SEARCH_DEPTH)]
    return sorted(entries, key=lambda entry: (entry.started, entry.name))


def _find_results(folder: Path, depth: int) -> Iterator[tuple[Path, EntryKind]]:
    """Yield the folders of runs and of other results, with their kinds; what is inside of these is not searched."""
    own = RESULT_OF_COMMAND.get(folder.name)
    if own is not None and (folder / own[0]).is_file():
        yield folder, own[1]
        return
    has_result = False
    for name, (file, kind) in RESULT_OF_COMMAND.items():
        at = folder / name
        if (at / file).is_file() or (at.is_dir() and _locked(at)):
            has_result = True
            yield at, kind
    if _is_observation(folder):
        has_result = True
        yield folder, "observation"
    elif _is_run(folder):
        has_result = True
        yield folder, "run"
    if has_result or not depth:
        return
    try:
        below = sorted(path for path in folder.iterdir() if path.is_dir() and not path.is_symlink())
    except OSError:
        return
    for path in below:
        if not path.name.startswith("."):
            yield from _find_results(path, depth - 1)


def _is_run(folder: Path) -> bool:
    """Return whether a run was started in a folder; a config.json alone may be any program's, unless it is empty."""
    config, launch = (folder / name for name in RUN_FILES)
    try:
        return launch.is_file() or run_log_path(folder, 0).is_file() or (config.is_file() and not config.stat().st_size)
    except OSError:
        return False


def _is_observation(folder: Path) -> bool:
    """Return whether a command was observed in a folder; while it runs there are files of its ranks only."""
    try:
        return (folder / OBSERVED_JSON).is_file() or next(folder.glob("rank-*.observed.json"), None) is not None
    except OSError:
        return False


def _locked(folder: Path) -> bool:
    try:
        return is_locked(folder)
    except OSError:
        return False


def _entry(at: Path, kind: EntryKind, listed: Path) -> RunEntry:
    name = str(at.relative_to(listed)) if at != listed else at.resolve().name
    size, first, last = _measure(at, FOLDERS_THAT_STAY if kind == "run" else ())
    entry = RunEntry(
        name=name, folder=str(at), kind=kind, state="unreadable", started=first, size=size, changed=last or first
    )
    try:
        if kind == "observation":
            return _read_observation(at, entry)
        return _read_run(at, entry) if kind == "run" else _read_other(at, kind, entry)
    except ReportError as e:
        return replace(entry, why=str(e))
    except OSError as e:
        return replace(entry, why=f"{e.filename or at} cannot be read: {e.strerror or e}")
    except (LookupError, TypeError, ValueError, AttributeError) as e:
        return replace(entry, why=f"a file in {at} was not written by unipar ({type(e).__name__}: {e})")


def _measure(folder: Path, without: Sequence[str]) -> tuple[int, float, float]:
    """Return a folder's bytes on disk, and the times at which its oldest and newest file were last written.

    Pages have no part in the times: they may be made long after.
    """
    size, times = 0, list[float]()
    for above, folders, files in os.walk(folder):
        if Path(above) == folder:
            folders[:] = [name for name in folders if name not in without]
        for name in files:
            try:
                stat = os.lstat(os.path.join(above, name))
            except OSError:
                continue
            size += stat.st_blocks * 512
            if not name.endswith(".html"):
                times.append(stat.st_mtime)
    return size, min(times, default=0.0), max(times, default=0.0)


# Runs


def _read_run(run: Path, entry: RunEntry) -> RunEntry:
    launch = _read_if_present(run / "launch.json", "launch of a run")
    config = _read_if_present(run / "config.json", "config of a run")
    settled = nested_mapping(launch, "settled")
    head, tail = _first_and_last_events(run_log_path(run, 0))
    start = next((row for row in head if row["event"] == "start"), {})
    if "ranks" in launch:  # of this attempt; the run log begins with the first one
        start = {"strategy": settled.get("strategy"), "size": launch["ranks"]}
    step = next((row for row in reversed(tail) if row["event"] == "step"), {})
    started = min([(run / "launch.json").stat().st_mtime] if launch else [entry.started], default=entry.started)
    started = min([started, *(row["time"] for row in head[:1])])
    entry = replace(
        entry,
        strategy=str(start.get("strategy") or settled.get("strategy") or ""),
        ranks=start.get("size") or nested_mapping(settled, "sizes").get("ranks"),
        of=step.get("of") or nested_mapping(config, "train").get("steps"),
        loss=step.get("loss"),
        speed={name: float(step[name]) for name in SPEED_NAMES if step.get(name) is not None},
        started=started,
    )
    state, why, until = _state_of_run(run, launch, config, entry, tail)
    counted = [row.get("step") or row.get("steps") for row in tail if row["event"] in ("step", "stopped", "end")]
    if state in ("running", "died") and (beat := LastPhase.of(run, 0)) is not None:
        counted.append(beat.step - (beat.phase in ("start", "data", "forward", "backward", "update")))
    steps = max([0, *(int(number) for number in counted if number)])
    return replace(entry, state=state, why=why, steps=steps, seconds=max(0.0, until - started))


def _read_if_present(file: Path, what: str) -> dict[str, Any]:
    return read_mapping(file, what) if file.exists() and file.stat().st_size else {}


def _state_of_run(
    run: Path,
    launch: Mapping[str, Any],
    config: Mapping[str, Any],
    entry: RunEntry,
    tail: Sequence[Mapping[str, Any]],
) -> tuple[RunState, str, float]:
    """Return the state of a run, a sentence on it, and the time of its end, or now."""
    if _locked(run):  # the process that watches the run holds the lock, and loses it when it is killed
        return "running", _describe_silence(run, launch, config), time.time()
    ended = next((row for row in reversed(tail) if row["event"] in ("end", "stopped")), None)
    recorded = _first_error(run)
    if recorded is not None:
        state: RunState = "stopped" if recorded.kind in ("Stopped", "KeyboardInterrupt") else "failed"
        return state, _sentence(recorded), recorded.time
    if ended is not None and ended["event"] == "stopped":
        return "stopped", f"stopped by {ended.get('why') or 'a signal'} after step {ended['step']}", ended["time"]
    if ended is not None:
        earlier = count_attempts(run)
        return "ended", f"in {earlier + 1} attempts" if earlier else "", ended["time"]
    elsewhere = launch.get("boot") not in (None, boot_id())
    if elsewhere and time.time() - entry.changed < FRESH_SECONDS:
        return "running", "", time.time()
    phase = LastPhase.of(run, 0)
    last_sign = f"; rank 0 was last seen {phase}" if phase is not None else "; it had not begun to train"
    where = " on this machine, and nothing was written lately from another" if elsewhere else ""
    return (
        "died",
        f"no process of it is left{where}{last_sign}",
        max(entry.changed, *(row["time"] for row in tail[-1:]), 0.0),
    )


def _describe_silence(run: Path, launch: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """Return how long rank 0 of a running run has been silent, if that is longer than `launch.heartbeat`; else ""."""
    beat, limit = read_heartbeat(heartbeat_path(run, 0)), nested_mapping(config, "launch").get("heartbeat")
    if beat is None or not limit or beat.phase in ("start", "waiting", "end") or launch.get("boot") != boot_id():
        return ""
    silence = time.monotonic() - beat.when
    return f"no sign of life for {format_clock(silence)}, {LastPhase(beat.phase, beat.step)}" if silence > limit else ""


def _first_error(run: Path) -> RecordedError | None:
    """Return the error of the run as a whole, else the first error of a rank."""
    if (run_error := read_run_error(run)) is not None:
        return run_error
    errors: list[RecordedError] = []
    for file in run.glob("rank-*.error.json"):
        rank = re.fullmatch(r"rank-(\d+)\.error\.json", file.name)
        if rank is not None and (error := read_error(run, int(rank[1]))) is not None:
            plain = error.kind == "Stopped"
            errors.append(error if plain else replace(error, message=f"rank {rank[1]} failed: {error.line}", kind=""))
    return min(errors, key=lambda error: (error.kind == "Stopped", error.time), default=None)


def _sentence(error: RecordedError) -> str:
    """Return the first line of an error's message; errors that are not unipar's own with their type."""
    own = not error.kind or hasattr(errors, error.kind)
    return error.message.strip().partition("\n")[0] if own else error.line


def _first_and_last_events(run_log: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the first events of a run log and its last ones, back to a logged step; a long one is not read as a whole.

    An unfinished last line is left out.
    """
    if not run_log.exists():
        return [], []
    with run_log.open("rb") as file:
        head = file.read(_TAIL_BYTES)
        size, length = file.seek(0, 2), _TAIL_BYTES
        while True:
            begin = max(0, size - length)
            file.seek(begin)
            lines = file.read().split(b"\n")[1 if begin else 0 : -1]
            tail = [_event(line, run_log) for line in lines]
            if not begin or any(row["event"] == "step" for row in tail):
                return [_event(line, run_log) for line in head.split(b"\n")[:-1]], tail
            length *= 4


def _event(line: bytes, run_log: Path) -> dict[str, Any]:
    try:
        row: Any = json.loads(line)
        return {**row, "event": str(row["event"]), "time": float(row["time"])}
    except (LookupError, TypeError, ValueError):
        raise ReportError(f"{run_log} cannot be read as a rank's run log: one of its lines is not an event") from None


# Observed commands


def _read_observation(at: Path, entry: RunEntry) -> RunEntry:
    ranks = list(read_observed_ranks(at))
    if not ranks:
        return replace(entry, why=f"{at} holds {OBSERVED_JSON} and nothing of a rank")
    head, tail = _first_and_last_events(run_log_path(at, ranks[0].rank))
    start = next((row for row in head if row["event"] == "start"), {})
    step = next((row for row in reversed(tail) if row["event"] == "step"), {})
    started = min([entry.started, *(row["time"] for row in head[:1])])
    ended = next((row["time"] for row in reversed(tail) if row["event"] == "end"), entry.changed)
    state, why = _state_of_observation(at, ranks, entry)
    return replace(
        entry,
        strategy=str(start.get("strategy") or "observed"),
        ranks=len(ranks),
        steps=max(ranks[0].steps, int(step.get("step") or 0)),
        loss=step.get("loss"),
        speed={name: float(step[name]) for name in SPEED_NAMES if step.get(name) is not None},
        started=started,
        state=state,
        why=why,
        seconds=max(0.0, (time.time() if state == "running" else ended) - started),
    )


def _state_of_observation(at: Path, ranks: Sequence[ObservedRank], entry: RunEntry) -> tuple[RunState, str]:
    """Return the state of an observed command, and a sentence on it."""
    if (at / OBSERVED_JSON).is_file():
        command = Observation.read(at).command
        if command.exit_code:
            return ("failed" if command.exit_code > 0 else "stopped"), f"the command {command.describe_end()}"
        return "ended", command.count_findings() if command.findings else ""
    here = [rank for rank in ranks if rank.host == socket.gethostname()]
    if any(process_state(rank.pid) not in ("", "Z") for rank in here) or (
        not here and time.time() - entry.changed < FRESH_SECONDS
    ):
        return "running", ""
    return "died", f"no process of it is left, and `unipar observe` has not ended; no {OBSERVED_JSON} was written"


# Comparisons, scalings, verifications


def _read_other(at: Path, kind: EntryKind, entry: RunEntry) -> RunEntry:
    file = at / RESULT_OF_COMMAND[at.name][0]
    running = _locked(at)
    data = read_mapping(file, kind) if file.exists() else {}
    rows: list[Mapping[str, Any]] = data.get("worlds" if kind == "scaling" else "strategies", [])
    names = dict.fromkeys(str(row["strategy"]) for row in rows)
    sizes = [int(row["ranks"]) for row in rows if row.get("ranks")] or [int(data.get("ranks") or 0)]
    entry = replace(
        entry,
        strategy=count_of(len(names), "strategy") if rows else "",
        ranks=max(sizes) or max((len(row.get("peak_rss", ())) for row in rows), default=0) or None,
        steps=max((len(row.get("losses", ())) for row in rows), default=0) or None,
    )
    state, why = ("running", "") if running else _state_of_rows(data, rows, kind)
    return replace(entry, state=state, why=why)


def _state_of_rows(data: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], kind: str) -> tuple[RunState, str]:
    """Return the state of a comparison, a scaling or a verification by its rows, and a sentence on it."""
    by: dict[str, list[str]] = {}
    for row in rows:
        by.setdefault(str(row["outcome"]), []).append(str(row["strategy"]))
    again = "" if kind == "verification" else "; the same command goes on"
    if waits := by.get("waits"):
        left = f"{len(waits)} of {len(rows)} did not run{again}"
        return ("stopped" if data.get("interrupted") else "died"), left
    if data.get("interrupted"):
        return "stopped", f"it was interrupted{again}"
    for outcome, verb in (("failed", "failed"), ("disagrees", "disagreed"), ("unlike", "trained something else")):
        if strategies := by.get(outcome):
            return "failed", f"{first_few(strategies)} {verb}"
    stopped = str(data.get("stopped") or "")
    return ("failed", stopped) if stopped else ("ended", "")
