"""Restarts by a launcher or scheduler: how often it has started this job again, and what names the job."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from unipar.utils.procfs import BEGAN, boot_id, process_stat


@dataclass(frozen=True)
class LaunchedJob:
    """Job in which this process was started, as its launchers name it."""

    names: tuple[str, ...] = ()
    """Names that no other job has; the first attempt's run folder keeps them."""

    restarted_by: str = ""
    """Launcher that has started the job again, and how often, in words; "" if this is its first attempt."""

    restarted_names: tuple[str, ...] = ()
    """Those of `names` that the first attempt had as well."""

    same_clock: bool = False
    """Whether time goes on counting from the first attempt, as under torchrun; a queue gives a new time limit."""


def find_job(environ: Mapping[str, str] = os.environ, restarts: int = 0) -> LaunchedJob:
    """Return the job of this process, from the variables of torchrun and Slurm.

    `restarts`: how often torchrun has restarted the ranks, as far as another machine's agent knows.
    """
    torchrun, slurm = _torchrun_names(environ), _slurm_names(environ)
    again, queued = max(restarts, _count(environ, "TORCHELASTIC_RESTART_COUNT")), _count(environ, "SLURM_RESTART_COUNT")
    if torchrun and again:
        return LaunchedJob(torchrun + slurm, f"torchrun has restarted this run ({again})", torchrun, same_clock=True)
    if slurm and queued:
        return LaunchedJob(torchrun + slurm, f"Slurm has requeued this job ({queued})", slurm)
    return LaunchedJob(torchrun + slurm)


def _torchrun_names(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the id of the rendezvous, if it has one of its own, and the agent's process, which outlives restarts."""
    run = environ.get("TORCHELASTIC_RUN_ID")
    if run is None:
        return ()
    agent = os.getppid()
    began = process_stat(agent)[BEGAN] if agent else ""
    own = (f"torchrun {run}",) if run != "none" else ()
    return (*own, f"torchrun agent {boot_id()} {agent} {began}")


def _slurm_names(environ: Mapping[str, str]) -> tuple[str, ...]:
    job = environ.get("SLURM_JOB_ID")
    return (f"slurm {environ.get('SLURM_CLUSTER_NAME', '')} {job}",) if job else ()


def _count(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    return int(text) if text.isdecimal() else 0
