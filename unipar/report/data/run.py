"""One run, read from its folder for its page: what cannot be read is a sentence, and the rest is kept."""

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
from unipar.report.data.comparison import read_config_keys
from unipar.results.files import CONFIG_FILE, nested_mapping, read_mapping
from unipar.results.run import Report
from unipar.run_folder.ledger import Ledger

_LEDGER_FILE_PATTERN = r"rank-(\d+)\.jsonl"


@dataclass(frozen=True, kw_only=True)
class RunPageData:
    """A run as its page shows it."""

    folder: Path
    report: Report
    rows: tuple[Mapping[str, Any], ...]
    """Of rank 0: its logged steps."""

    ended: bool
    failure: str
    """What a rank said at its end, where it failed."""

    peaks: Mapping[int, int | None]
    """By rank, the bytes that it ever held at its peak; None where it came to no end."""

    memory: tuple[MemoryAccount, ...]
    watched: tuple[str, ...]
    """How memory was seen, in the ranks' words."""

    config: Mapping[str, Any]
    command: str
    """What starts it again, where that is known."""

    versions: Mapping[str, str]
    machine: Mapping[str, Any]
    problems: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @classmethod
    def read(cls, ledger: Path) -> Self:
        folder, problems = ledger.parent, list[str]()
        by = dict(_read_ledgers(folder, problems))
        ranks = list(by.values())
        try:
            report = Report.of(folder, ranks)
        except (LookupError, TypeError, ValueError) as e:
            raise ReportError(f"{ledger} is no ledger that unipar wrote ({type(e).__name__}: {e})") from None
        launch = folder / "launch.json"
        told = _read_launch_file(launch, problems) if launch.exists() else {}
        config = read_config_keys(folder / CONFIG_FILE, problems) if (folder / CONFIG_FILE).exists() else {}
        return cls(
            folder=folder,
            report=report,
            rows=tuple(row for row in ranks[0] if row["event"] == "step"),
            ended=any(row["event"] == "end" for row in ranks[0]),
            failure=_read_first_error(folder),
            peaks={rank: _peak(by.get(rank, ())) for rank in sorted({*range(report.size), *by})},
            watched=tuple(_describe_memory_recording(by)),
            memory=tuple(account for account in read_accounts(folder, problems) if account.phases),
            config=config,
            command=_command_to_repeat(folder, told, config),
            versions={str(k): str(v) for k, v in nested_mapping(told, "versions").items()},
            machine=nested_mapping(told, "machine"),
            problems=tuple(problems),
        )


def _read_ledgers(folder: Path, problems: list[str]) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """Each rank's events by its number; the first one's must be there, another that cannot be read is left out."""
    numbers = sorted(int(m[1]) for file in folder.iterdir() if (m := re.fullmatch(_LEDGER_FILE_PATTERN, file.name)))
    for rank in numbers:
        file = folder / f"rank-{rank}.jsonl"
        try:
            rows = _events(file)
        except (OSError, ValueError) as e:
            said = f"{file} cannot be read as a rank's ledger ({getattr(e, 'strerror', None) or e})"
            if rank == 0:
                raise ReportError(said) from None
            problems.append(f"{said}: it is left out")
        else:
            if not Ledger.whole(file):
                problems.append(f"{file} breaks off in the midst of a line: what is before it is shown")
            yield rank, rows


def _events(file: Path) -> list[dict[str, Any]]:
    rows: list[Any] = list(Ledger.read(file))
    if not all(isinstance(row, dict) and {"event", "time"} <= row.keys() for row in rows):
        raise ValueError("a line of it is no event")
    return rows


def _peak(rows: Iterable[Mapping[str, Any]]) -> int | None:
    return next((int(row["peak_rss"]) for row in rows if row["event"] == "end" and row.get("peak_rss")), None)


def _describe_memory_recording(ranks: Mapping[int, Iterable[Mapping[str, Any]]]) -> Iterator[str]:
    """What they said of how memory was seen, once; and who did, where not all say the same."""
    by: dict[str, list[int]] = {}
    for rank, rows in ranks.items():
        for said in dict.fromkeys(str(row["said"]) for row in rows if row["event"] == "memory" and "said" in row):
            by.setdefault(said, []).append(rank)
    for said, whose in by.items():
        yield said if len(whose) == len(ranks) else f"rank {', '.join(map(str, whose))}: {said}"


def _read_launch_file(file: Path, problems: list[str]) -> dict[str, Any]:
    try:
        return read_mapping(file, "launch of a run")
    except ReportError as e:
        problems.append(str(e))
        return {}


def _read_first_error(folder: Path) -> str:
    """The first rank's words, by its own clock."""
    told: list[tuple[float, str]] = []
    for file in folder.glob("rank-*.error.json"):
        try:
            said = json.loads(file.read_text("utf-8"))
            told.append((float(said["time"]), f"{said['kind']}: {said['message']}"))
        except (OSError, ValueError, LookupError, TypeError):
            continue
    return min(told)[1] if told else ""


def _command_to_repeat(folder: Path, told: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    script = told.get("script")
    if isinstance(script, list) and len(script) > 1:
        how, *words = map(str, script)
        return shlex.join(["python", *(["-m"] if how == "module" else []), *words])
    if not config.get("task.use"):
        return ""
    return shlex.join(["unipar", "run", str(folder / CONFIG_FILE), "--out", str(folder), "--overwrite"])
