"""`unipar submit`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unipar.cli.commands.options import (
    BackendOption,
    OutOption,
    OverwriteOption,
    SetOption,
    StrategiesOption,
    read_config_file,
)

if TYPE_CHECKING:
    from unipar.backend.checks import CheckedSource
    from unipar.jobs.submission import Submission

COMMANDS = ("run", "compare", "scale", "verify")


def submit(
    words: Annotated[
        list[str],
        typer.Argument(metavar="[COMMAND] FILE", help="run (default), compare, scale or verify; and the config."),
    ],
    on: Annotated[
        str | None, typer.Option("--on", metavar="NAME", help="Job system: slurm, kubernetes, ray, mpi.")
    ] = None,
    strategy: BackendOption = None,
    strategies: StrategiesOption = None,
    world: Annotated[
        str | None, typer.Option("--world", metavar="N,N,...", help="For scale: numbers of ranks, a job for each.")
    ] = None,
    sets: SetOption = None,
    out: OutOption = None,
    *,
    show: Annotated[bool, typer.Option("--print", help="Show the files and the command, and do nothing.")] = False,
    overwrite: OverwriteOption = False,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the newest complete checkpoint.")] = False,
    detach: Annotated[
        bool, typer.Option("--detach", help="For mpi: do not wait for the end; `unipar jobs` shows it.")
    ] = False,
) -> None:
    """Start FILE on several machines, through a job system.

    Writes the files that the job system reads, and submits them with its own program: sbatch, kubectl, ray or mpirun.
    The section `machines` of FILE says how many machines; options of each job system are in a section of its name.
    Ranks find each other with every backend. `unipar jobs` shows the state of each job.

    \b
    unipar submit train.yaml --print                       the files and the command; nothing is done
    unipar submit train.yaml --on slurm --set machines.nodes=4
    unipar submit compare train.yaml --on slurm
    unipar submit scale train.yaml --on slurm --world 8,16,32
    unipar submit train.yaml --on kubernetes --set machines.kubernetes.image=registry/mine:1
    unipar submit train.yaml --on ray --set machines.ray.address=http://head:8265
    unipar submit train.yaml --on mpi --set 'machines.mpi.hosts=[desk1, desk2]' --set machines.nodes=2

    \b
    machines:                                              in train.yaml
      on: slurm
      nodes: 2
      time: 2h
      slurm: {partition: gpu, secrets: [WANDB_API_KEY]}
    """
    from unipar.utils.text import count_of

    command, file = _command_and_file(words)
    sets = [*(sets or ()), *(["resume=auto"] if resume else [])]
    options: dict[str, object] = {"--backend": strategy, "--strategy": strategies, "--world": world}
    options |= {"--resume": resume or None, "--detach": detach or None}
    _refuse_options(command, options)
    source = read_config_file([file], sets, strategy, out, runs=command == "run")
    arguments = [word for text in sets if not _is_for_submission(text) for word in ("--set", text)]
    arguments += ["--backend", strategy] if strategy is not None else []
    arguments += ["--strategy", ",".join(strategies)] if strategies else []
    arguments += ["--overwrite"] if overwrite else []
    made = _submissions(source, on, command, file, arguments, world)
    if show:
        typer.echo("\n\n".join(_shown(one) for one in made))
        return
    for one in made:
        job, code = one.hand_over(detach=detach or command == "scale")
        if not one.system.prints_id and not detach:
            raise typer.Exit(code)
        ranks = "all GPUs" if job.per is None else count_of(job.per, "rank")
        machines = f"{count_of(job.nodes, 'machine')} x {ranks}"
        typer.echo(f"{job.system} job {job.id}: {machines}, {one.job.out}")
        within = "" if one.job.out.is_relative_to(Path.cwd() / "runs") else f" --in {shlex.quote(str(one.job.out))}"
        typer.echo(f"  unipar jobs logs {job.id}{within}; unipar jobs cancel {job.id}{within}")
    if command == "scale":
        typer.echo(f"when all have ended: unipar jobs collect {shlex.quote(str(made[0].job.out.parents[1]))}")


def _is_for_submission(text: str) -> bool:
    """Return whether a `--set` is of use here alone, and not to the ranks."""
    key = text.partition("=")[0]
    return key.startswith("machines.") and key not in ("machines.folder", "machines.interface")


def _submissions(
    source: CheckedSource, on: str | None, command: str, file: Path, arguments: list[str], world: str | None
) -> list[Submission]:
    if world is None:
        from unipar.jobs.submission import make_submission

        return [make_submission(source, on, command, file, arguments)]
    from unipar.comparison.worlds.submit import submit_worlds

    return submit_worlds(source, on, world, file, arguments)


def _command_and_file(words: list[str]) -> tuple[str, Path]:
    if len(words) == 1 and words[0] not in COMMANDS:
        return "run", Path(words[0])
    if len(words) == 2 and words[0] in COMMANDS:
        return words[0], Path(words[1])
    raise typer.BadParameter(f"write [COMMAND] FILE, with COMMAND one of {', '.join(COMMANDS)}: submit compare x.yaml")


def _refuse_options(command: str, options: dict[str, object]) -> None:
    """Raise BadParameter for an option that the command does not have, and for one that it needs."""
    allowed = {
        "run": ("--backend", "--resume", "--detach"),
        "compare": ("--strategy", "--detach"),
        "verify": ("--strategy", "--detach"),
        "scale": ("--strategy", "--world"),
    }[command]
    for option, value in options.items():
        if value is not None and option not in allowed:
            raise typer.BadParameter(f"{option} is not for {command}, which has {', '.join(allowed)}")
    if command == "scale" and options["--world"] is None:
        raise typer.BadParameter("scale needs --world, numbers of ranks: --world 8,16,32")


def _shown(one: Submission) -> str:
    """Return the files and the command of a submission as text."""
    folder = one.job.folder
    files = [f"# {folder / name}\n{text.rstrip()}" for name, text in one.texts.items()]
    return "\n\n".join([*files, f"$ {shlex.join(one.command)}"])
