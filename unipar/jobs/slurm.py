"""Slurm: one batch script, whose `srun` starts a task for each rank."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PositiveInt
from typing_extensions import override

from unipar.config.job_system import JobSystem, NewJob, SubmittedJob
from unipar.config.sections.section import Section
from unipar.jobs.client import ClientFailed, ask_client, unset_variables

_Names = Annotated[tuple[str, ...], Field(strict=False)]


class SlurmOptions(Section):
    """Config section `machines.slurm`."""

    partition: str | None = None
    """Partition of the job (--partition); null: the cluster's default."""

    account: str | None = None
    """Account that is charged (--account)."""

    qos: str | None = None
    """Quality of service (--qos)."""

    exclusive: bool = False
    """Whether the job has its machines to itself (--exclusive)."""

    cpus: PositiveInt | None = None
    """Cores for each rank (--cpus-per-task); null: Slurm's default, which is one."""

    environment: Literal["all", "none"] = "all"
    """Variables of the submitting shell that the job gets. all: every one; none: only those in `secrets`."""

    secrets: _Names = ()
    """Names of variables with secrets, such as WANDB_API_KEY: Slurm passes their values on, no file holds them."""

    check: bool = True
    """Whether `unipar doctor --across` looks at all machines before the ranks start, where there are several."""

    python: str | None = None
    """Interpreter on the machines; null: the one that submits."""

    extra_args: _Names = ()
    """Further options for the script's #SBATCH lines, such as `--mail-type=END`."""


_SCRIPT = """#!/bin/bash
# Written by unipar submit; `unipar jobs` tells how the job stands.
{directives}
{before}
export PYTHONUNBUFFERED=1 OMP_NUM_THREADS="${{OMP_NUM_THREADS:-{threads}}}"
{count}{check}
# A task for each rank; a signal stops all of them at the same step boundary.
srun {srun}{tasks} --unbuffered --label \\
  {run}
code=$?
{requeue}exit "$code"
"""

_COUNT = """
# machines.ranks_per_node: auto: a rank for each GPU of a machine, all of which the job has; one rank where there are
# none.
per="${SLURM_GPUS_ON_NODE:-1}"
"""

_CHECK = """
# One process on each machine first: the same versions and files everywhere, and a way from each to the others.
srun {srun} --nodes={nodes} --ntasks={nodes} --ntasks-per-node=1 \\
  {doctor} || exit $?
"""

_REQUEUE = """# launch.restarts; what was refused (2, 3) would be refused again
case "$code" in
0 | 2 | 3) ;;
*) [ "${{SLURM_RESTART_COUNT:-0}}" -ge {restarts} ] || scontrol requeue "$SLURM_JOB_ID" ;;
esac
"""


class Slurm(JobSystem[SlurmOptions]):
    """Slurm, through sbatch, squeue, scontrol and scancel."""

    name = "slurm"
    options = SlurmOptions
    clients = ("sbatch", "squeue", "scontrol", "scancel")
    remedy = "submit from a login node of the cluster, or look at the files with --print"
    counts_gpus = True
    final_states = frozenset({"completed"})  # others may be requeued

    @override
    def refuse(self, job: NewJob) -> Iterator[str]:
        if why := unset_variables(self.chosen.secrets, "machines.slurm.secrets"):
            yield why
        for word in self.chosen.extra_args:
            if not word.startswith("-") or "\n" in word:
                yield f"machines.slurm.extra_args: {word!r} is no option; write them as --mail-type=END"

    @override
    def texts(self, job: NewJob) -> dict[str, str]:
        chosen, config = self.chosen, job.config
        restarts, cpus = config.launch.restarts, chosen.cpus
        python = [chosen.python or sys.executable, "-m", "unipar"]
        srun = "--export=ALL --kill-on-bad-exit=1" + (f" --cpus-per-task={cpus}" if cpus else "")
        doctor = shlex.join([*python, "doctor", "--across", str(job.file), "--out", str(job.out)])
        return {
            "run.sbatch": _SCRIPT.format(
                directives="\n".join(f"#SBATCH {word}" for word in self._directives(job)),
                before="".join(f"\n{line}" for line in job.machines.setup),
                threads=cpus or 1,
                count=_COUNT if job.per is None else "",
                check=_CHECK.format(srun=srun, nodes=job.nodes, doctor=doctor)
                if chosen.check and job.nodes > 1
                else "",
                srun=srun,
                tasks=f' --ntasks="$(({job.nodes} * per))" --ntasks-per-node="$per"' if job.per is None else "",
                run=shlex.join([*python, *job.words(str(job.file), str(job.out))]),
                requeue=_REQUEUE.format(restarts=restarts) if restarts else "",
            )
        }

    def _directives(self, job: NewJob) -> Iterator[str]:
        chosen, time = self.chosen, job.machines.time
        named: dict[str, object] = {
            "job-name": job.name,
            "nodes": job.nodes,
            "ntasks-per-node": job.per,
            # with gpus-per-task a rank would see one GPU, and look for its own; exclusive machines give all of theirs
            "gpus-per-node": job.gpus or None if job.per is not None else None,
            "cpus-per-task": chosen.cpus,
            "partition": chosen.partition,
            "account": chosen.account,
            "qos": chosen.qos,
            "time": None if time is None else _slurm_time(time),
            "chdir": Path.cwd(),
            "output": f"{str(job.folder).replace('%', '%%')}/slurm-%j.out",
            "open-mode": "append",
            "signal": f"TERM@{math.ceil(job.config.launch.shutdown_timeout)}",  # to the ranks, not to the shell: no B:
        }
        for name, value in named.items():
            if value is not None:
                yield f"--{name}={shlex.quote(str(value))}"
        if chosen.exclusive or job.per is None:
            yield "--exclusive"
        yield "--requeue" if job.config.launch.restarts else "--no-requeue"
        yield from chosen.extra_args

    @override
    def hand_over(self, job: NewJob) -> list[str]:
        chosen = self.chosen
        names = [*(["ALL"] if chosen.environment == "all" else []), *chosen.secrets] or ["NONE"]
        return ["sbatch", "--parsable", f"--export={','.join(names)}", str(job.folder / "run.sbatch")]

    @override
    def id_of(self, job: NewJob, output: str) -> str:
        return output.strip().partition(";")[0]  # ID, or ID;CLUSTER

    @override
    def state(self, job: SubmittedJob) -> str:
        for command in (
            ["squeue", "--noheader", "--states=all", "--format=%T", f"--jobs={job.id}"],
            ["sacct", "--noheader", "--parsable2", "--allocations", "--format=State", f"--jobs={job.id}"],
        ):
            with suppress(ClientFailed):  # squeue forgets a job some minutes after its end; not every site has sacct
                if state := ask_client(command).split("\n")[0].strip():
                    return state.lower()
        return "unknown to Slurm"

    @override
    def logs(self, job: SubmittedJob, *, follow: bool) -> list[str]:
        return ["tail", "--lines=+1", *(["--follow"] if follow else []), f"{job.folder}/slurm-{job.id}.out"]

    @override
    def cancel(self, job: SubmittedJob) -> list[str]:
        return ["scancel", job.id]


def _slurm_time(seconds: float) -> str:
    """Return a time limit as Slurm writes it: 7200 as 0-02:00:00; parts of a second count as one."""
    minutes, second = divmod(math.ceil(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return f"{days}-{hour:02}:{minute:02}:{second:02}"
