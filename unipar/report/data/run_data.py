"""Data of a run's page, read from its folder; what cannot be read is named in a sentence and left out."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from unipar.errors import ReportError
from unipar.memory.account import MemoryAccount, read_accounts
from unipar.report.data.attempt_rows import ShownAttempt, saved_steps, shown_attempts
from unipar.report.data.comparison_data import read_config_keys
from unipar.results.result_files import CONFIG_FILE, read_mapping
from unipar.results.run_report import Report
from unipar.results.run_traces import RunTrace, list_traces
from unipar.run_folder.layout import run_error_path
from unipar.run_folder.run_log import RunLog
from unipar.utils.mappings import nested_mapping
from unipar.utils.text import format_flops

_RUN_LOG_FILE_PATTERN = r"rank-(\d+)\.jsonl"


@dataclass(frozen=True, kw_only=True)
class RunPageData:
    """Data of a run, as its page shows it."""

    folder: Path
    report: Report
    rows: tuple[Mapping[str, Any], ...]
    """Step events of rank 0."""

    compiler: tuple[tuple[str, str], ...]
    """Graph breaks and recompiles of rank 0: what, and why; each reason once."""

    traces: tuple[RunTrace, ...]
    """Traces of the ranks that wrote one."""

    no_trace: str
    """Sentence on why a trace that was asked for was not written; "" if none was, or all were."""

    work: tuple[str, ...]
    """Sentences on how a step's operations were counted, or why not, and on what multiplied in fp8."""

    ended: bool
    failure: str
    """Error of the rank that failed first; "" if none failed."""

    peaks: Mapping[int, int | None]
    """Peak resident bytes by rank; None for a rank that recorded no end."""

    memory: tuple[MemoryAccount, ...]
    """Memory accounts of the ranks that wrote one."""

    watched: tuple[str, ...]
    """Sentences of the ranks on how their memory was recorded."""

    config: Mapping[str, Any]
    command: str
    """Command that starts the run again; "" if unknown."""

    versions: Mapping[str, str]
    machine: Mapping[str, Any]
    attempts: tuple[ShownAttempt, ...]
    """Attempts of a run that went on, this one last; none if there was only one."""

    saved: tuple[int, ...]
    """Steps of which checkpoints were written."""

    problems: tuple[str, ...]
    """Sentences on files that could not be read."""

    @property
    def name(self) -> str:
        """Name of the run's folder."""
        return self.folder.resolve().name

    @classmethod
    def read(cls, run_log: Path) -> Self:
        """Return the run whose folder holds the run log of rank 0; raise ReportError if that run log cannot be read."""
        folder, problems = run_log.parent, list[str]()
        by = dict(_read_run_logs(folder, problems))
        ranks = list(by.values())
        try:
            report = Report.of(folder, ranks)
        except (LookupError, TypeError, ValueError) as e:
            raise ReportError(f"{run_log} is not a run log written by unipar ({type(e).__name__}: {e})") from None
        launch = folder / "launch.json"
        launched = _read_launch_file(launch, problems) if launch.exists() else {}
        config = read_config_keys(folder / CONFIG_FILE, problems) if (folder / CONFIG_FILE).exists() else {}
        failure = _read_first_error(folder)
        return cls(
            folder=folder,
            report=report,
            rows=tuple(row for row in ranks[0] if row["event"] == "step"),
            compiler=tuple(
                dict.fromkeys((str(row["what"]), str(row["why"])) for row in ranks[0] if row["event"] == "compiler")
            ),
            traces=tuple(list_traces(by, folder)),
            no_trace=next((str(row["said"]) for rows in ranks for row in rows if row["event"] == "no trace"), ""),
            work=tuple(
                dict.fromkeys(
                    _describe_counting(row)
                    for row in ranks[0]
                    if row["event"] in ("work", "precision") or "flops_by" in row
                )
            ),
            ended=any(row["event"] == "end" for row in ranks[0]),
            failure=failure,
            peaks={rank: _peak(by.get(rank, ())) for rank in sorted({*range(report.size), *by})},
            watched=tuple(_describe_memory_recording(by)),
            memory=tuple(account for account in read_accounts(folder, problems) if account.phases),
            config=config,
            command=_command_to_repeat(folder, launched, config),
            versions={str(k): str(v) for k, v in nested_mapping(launched, "versions").items()},
            machine=nested_mapping(launched, "machine"),
            attempts=tuple(shown_attempts(folder, report, ranks[0], failure, problems, launched)),
            saved=tuple(saved_steps(ranks[0])),
            problems=tuple(problems),
        )


def _read_run_logs(folder: Path, problems: list[str]) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """Yield each rank and its events; raise if rank 0's run log is unreadable, leave out any other rank's."""
    numbers = sorted(int(m[1]) for file in folder.iterdir() if (m := re.fullmatch(_RUN_LOG_FILE_PATTERN, file.name)))
    for rank in numbers:
        file = folder / f"rank-{rank}.jsonl"
        try:
            rows = _events(file)
        except (OSError, ValueError) as e:
            problem = f"{file} cannot be read as a rank's run log ({getattr(e, 'strerror', None) or e})"
            if rank == 0:
                raise ReportError(problem) from None
            problems.append(f"{problem}: it is left out")
        else:
            if not RunLog.whole(file):
                problems.append(f"{file} ends in the middle of a line: the lines before it are shown")
            yield rank, rows


def _events(file: Path) -> list[dict[str, Any]]:
    rows: list[Any] = list(RunLog.read(file))
    if not all(isinstance(row, dict) and {"event", "time"} <= row.keys() for row in rows):
        raise ValueError("one of its lines is not an event")
    return rows


def _peak(rows: Iterable[Mapping[str, Any]]) -> int | None:
    return next((int(row["peak_rss"]) for row in rows if row["event"] == "end" and row.get("peak_rss")), None)


def _describe_memory_recording(ranks: Mapping[int, Iterable[Mapping[str, Any]]]) -> Iterator[str]:
    """Yield each sentence on how memory was recorded once, with its ranks unless all ranks recorded it."""
    by: dict[str, list[int]] = {}
    for rank, rows in ranks.items():
        for sentence in dict.fromkeys(str(row["said"]) for row in rows if row["event"] == "memory" and "said" in row):
            by.setdefault(sentence, []).append(rank)
    for sentence, recorded_by in by.items():
        yield sentence if len(recorded_by) == len(ranks) else f"rank {', '.join(map(str, recorded_by))}: {sentence}"


def _describe_counting(row: Mapping[str, Any]) -> str:
    if "flops_by" not in row:
        return str(row["said"])
    return f"Forward and backward of a step are {format_flops(float(row['flops']))}, counted {row['flops_by']}."


def _read_launch_file(file: Path, problems: list[str]) -> dict[str, Any]:
    try:
        return read_mapping(file, "launch of a run")
    except ReportError as e:
        problems.append(str(e))
        return {}


def _read_first_error(folder: Path) -> str:
    """Return the error with the earliest time, of a rank or of the run as a whole; "" if there is none."""
    errors: list[tuple[float, str]] = []
    for file in (*folder.glob("rank-*.error.json"), run_error_path(folder)):
        try:
            error = json.loads(file.read_text("utf-8"))
            errors.append((float(error["time"]), f"{error['kind']}: {error['message']}"))
        except (OSError, ValueError, LookupError, TypeError):
            continue
    return min(errors)[1] if errors else ""


def _command_to_repeat(folder: Path, launched: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    script = launched.get("script")
    if isinstance(script, list) and len(script) > 1:
        how, *words = map(str, script)
        return shlex.join(["python", *(["-m"] if how == "module" else []), *words])
    if not config.get("task.use"):
        return ""
    return shlex.join(["unipar", "run", str(folder / CONFIG_FILE), "--out", str(folder), "--overwrite"])
