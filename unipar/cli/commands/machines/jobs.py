"""`unipar jobs`: what was submitted, and how it stands."""

from __future__ import annotations

import json
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unipar.cli.commands.options import EXIT_CODES_HELP, JsonOption
from unipar.errors import Stopped

if TYPE_CHECKING:
    from collections.abc import Sequence

    from unipar.config.job_system import SubmittedJob

HELP = """List what `unipar submit` has handed over, and how it stands; show what a job printed; end a job.

    Answers come from the job system's own program: squeue or sacct, kubectl, ray, or mpirun's process.

    \b
    unipar jobs                        a table of all jobs below runs/
    unipar jobs logs 4711              what job 4711 has printed
    unipar jobs logs 4711 --follow     and what it prints from now on
    unipar jobs cancel 4711            end it
    unipar jobs collect runs/x         one result from the jobs of `unipar submit scale`
    """

FolderOption = Annotated[
    Path, typer.Option("--in", metavar="FOLDER", help="Folder with run folders. Default: runs.", show_default=False)
]
JobArgument = Annotated[str, typer.Argument(metavar="ID", help="The job's number or name, as `unipar jobs` shows it.")]
RUNS = Path("runs")


def build_jobs_group() -> typer.Typer:
    """Return the group of commands; without one of them it lists the jobs."""
    app = typer.Typer(help=HELP, epilog=EXIT_CODES_HELP, rich_markup_mode=None, invoke_without_command=True)
    app.callback(invoke_without_command=True)(_list_or_command)
    for function in (logs, cancel, collect):
        app.command(function.__name__, epilog=EXIT_CODES_HELP)(function)
    return app


def _list_or_command(context: typer.Context, folder: FolderOption = RUNS, *, as_json: JsonOption = False) -> None:
    if context.invoked_subcommand is None:
        list_jobs(folder, as_json=as_json)


def list_jobs(folder: Path, *, as_json: bool) -> None:
    """Print every job that was submitted from a folder of runs, the latest last, with its state."""
    from dataclasses import asdict

    from unipar.jobs.submitted import list_submitted, state_of

    jobs = list_submitted(folder)
    if not jobs and not as_json:
        typer.echo(f"nothing was submitted from {folder}; see `unipar submit --help`")
        return
    with ThreadPoolExecutor(8) as pool:  # each asks a program that may be far away
        states = list(pool.map(state_of, jobs))
    if as_json:
        rows = [asdict(job) | {"state": state} for job, state in zip(jobs, states, strict=True)]
        typer.echo(json.dumps(rows, indent=2))
    else:
        typer.echo(format_jobs(jobs, states, shutil.get_terminal_size().columns))


def format_jobs(jobs: Sequence[SubmittedJob], states: Sequence[str], width: int) -> str:
    """Return the table of jobs, and below it the states that are too long for it."""
    import time

    from unipar.utils.files import relative_path
    from unipar.utils.table import format_table
    from unipar.utils.text import format_age

    rows = [
        (
            job.system,
            job.id,
            job.command,
            f"{job.nodes} x {'all' if job.per is None else job.per}",
            state if len(state) <= _LONGEST_STATE else state.partition(":")[0],
            format_age(time.time() - job.submitted),
            str(relative_path(Path(job.folder).parents[1])),
        )
        for job, state in zip(jobs, states, strict=True)
    ]
    header = ("on", "job", "what", "machines", "state", "since", "folder")
    table = format_table(header, rows, right=(5,), width=width)
    long = [(job, state) for job, state in zip(jobs, states, strict=True) if len(state) > _LONGEST_STATE]
    return "\n".join([table, *(f"{job.id}: {state}" for job, state in long)])


_LONGEST_STATE = 16
"""Characters of a state in the table; of a longer one, `unknown: REASON`, the reason is below it."""


def logs(
    name: JobArgument,
    folder: FolderOption = RUNS,
    *,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing while the job runs.")] = False,
) -> None:
    """Print the output of a job.

    \b
    unipar jobs logs 4711
    unipar jobs logs char-gpt --follow
    """
    from unipar.jobs.submitted import find_submitted, ready_system_of

    job = find_submitted(folder, name)
    command = ready_system_of(job).logs(job, follow=follow)
    try:
        code = subprocess.run(command, check=False).returncode
    except KeyboardInterrupt:
        code = Stopped.code
    raise typer.Exit(code if code in (0, Stopped.code) else 1)


def cancel(name: JobArgument, folder: FolderOption = RUNS) -> None:
    """End a job.

    \b
    unipar jobs cancel 4711
    """
    from unipar.jobs.client import ask_client
    from unipar.jobs.submitted import find_submitted, ready_system_of

    job = find_submitted(folder, name)
    output = ask_client(ready_system_of(job).cancel(job)).strip()
    typer.echo(output or f"{job.system} job {job.id}: asked to end")


def collect(
    out: Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder that `unipar submit scale` has named.")],
) -> None:
    """Combine the results of the jobs of `unipar submit scale` into one table and one page.

    \b
    unipar jobs collect runs/char_gpt
    """
    from unipar.cli.commands.options import print_result
    from unipar.comparison.worlds.collect import collect_worlds

    print_result(collect_worlds(out))
