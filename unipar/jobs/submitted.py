"""submitted.json: what was handed over to a job system, so that `unipar jobs` finds it again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from unipar.config.job_system import JobSystem, SubmittedJob, find_job_system
from unipar.errors import ConfigError, ReportError
from unipar.jobs.client import ClientFailed
from unipar.run_folder.folder import SUBMISSIONS
from unipar.utils.files import write_file_atomically

SUBMITTED_FILE = "submitted.json"

OUTPUT_FILE = "output.log"
"""What a client that runs as long as its job has printed, if nobody waits for it."""

EXIT_CODE_FILE = "exit-code"
"""Exit code of such a client."""

FINAL_STATE_FILE = "state"
"""State that a job never leaves, once its job system has named it."""

_DEPTH = 3
"""Levels of folders below the given one in which submissions are searched, as for runs."""


def write_submitted(job: SubmittedJob) -> None:
    """Write submitted.json to the job's folder."""
    write_file_atomically(Path(job.folder) / SUBMITTED_FILE, json.dumps(asdict(job), indent=2) + "\n")


def list_submitted(folder: Path) -> list[SubmittedJob]:
    """Return every job that was submitted from a folder of runs, the latest last."""
    jobs = [_read_submitted(file) for file in _submitted_files(folder, _DEPTH)]
    return sorted(jobs, key=lambda job: (job.submitted, job.id))


def _submitted_files(folder: Path, depth: int) -> Iterator[Path]:
    yield from folder.glob(f"{SUBMISSIONS}/*/{SUBMITTED_FILE}")
    if depth and folder.is_dir():
        for below in sorted(folder.iterdir()):
            if below.is_dir() and not below.is_symlink() and below.name != SUBMISSIONS:
                yield from _submitted_files(below, depth - 1)


def _read_submitted(file: Path) -> SubmittedJob:
    try:
        return TypeAdapter(SubmittedJob).validate_json(file.read_bytes())
    except (OSError, ValidationError) as e:
        why = e.strerror if isinstance(e, OSError) else "it was not written by unipar submit, or is truncated"
        raise ReportError(f"{file} cannot be read: {why}") from None


def find_submitted(folder: Path, name: str) -> SubmittedJob:
    """Return the job with this id, or, if two job systems gave the same one, with this `slurm:ID`."""
    jobs = list_submitted(folder)
    fits = [job for job in jobs if name in (job.id, f"{job.system}:{job.id}", job.folder)]
    if not fits:
        known = ", ".join(job.id for job in jobs[-5:]) or "none"
        raise ReportError(f"no job {name!r} was submitted from {folder}; its latest: {known} (`unipar jobs`)")
    if len({job.system for job in fits}) > 1:
        ways = " or ".join(f"{job.system}:{job.id}" for job in fits)
        raise ReportError(f"job {name!r}: {len(fits)} job systems gave this id; write {ways}")
    return fits[-1]


def system_of(job: SubmittedJob) -> JobSystem[Any]:
    """Return the job system to which a job was handed, with the options of that time."""
    return find_job_system(job.system).of(job.options)


def ready_system_of(job: SubmittedJob) -> JobSystem[Any]:
    """Return the job system to which a job was handed; raise ClientFailed if the programs that it asks are not here."""
    system = system_of(job)
    if why := _why_unknown(system):
        raise ClientFailed(f"{system.name} job {job.id}: {why}")
    return system


def _why_unknown(system: JobSystem[Any]) -> str:
    """Return why a job system cannot be asked from this machine, or ""; a job that is a process here needs nobody."""
    return system.why_missing() if system.prints_id else ""


def state_of(job: SubmittedJob) -> str:
    """Return how a job stands, or why that cannot be told here; a job that was seen at its end is not looked up."""
    kept = Path(job.folder) / FINAL_STATE_FILE
    with suppress(OSError):
        return kept.read_text("utf-8").strip()
    try:
        system = system_of(job)
        if why := _why_unknown(system):
            return f"unknown: {why}"
        state = system.state(job)
    except (ConfigError, ValidationError):
        return f"unknown: no job system {job.system} is installed here"
    except ClientFailed as e:
        return f"unknown: {e}"
    if state in system.final_states:
        with suppress(OSError):  # someone else's folder
            write_file_atomically(kept, state + "\n")
    return state
