"""`unipar run`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unipar.cli.commands.options import (
    BackendOption,
    ConfigArgument,
    OutOption,
    OverwriteOption,
    SetOption,
    read_config_file,
    read_location,
)

if TYPE_CHECKING:
    from unipar.config.config_source import ConfigSource


def resume_settings(*, resume: bool, checkpoint: str | None) -> list[str]:
    """Return what `--resume` and `--from PATH` set in the config."""
    if resume and checkpoint is not None:
        raise typer.BadParameter("give --resume, for the newest checkpoint, or --from PATH, for exactly that one")
    if checkpoint is not None:
        named = read_location(checkpoint)
        return [f"resume={json.dumps(str(named.absolute() if isinstance(named, Path) else named))}"]
    return ["resume=auto"] if resume else []


def refuse_nothing_to_resume(source: ConfigSource) -> None:
    """Raise ConfigError if there is no run of this name, or the newest one holds no checkpoint."""
    from unipar.checkpoint.protocol.verifying import find_checkpoints
    from unipar.checkpoint.starting_points import configured_folder, describe_finished_run, refuse_lost_checkpoints
    from unipar.errors import ConfigError
    from unipar.run_folder.folder import newest_run_folder

    config = source.config
    run = newest_run_folder(source.out, alone=config.out is not None)
    if run is None:
        raise ConfigError(f"--resume: there is no run {source.out} to go on with; start it without --resume")
    folder = configured_folder(run, config)
    if not describe_finished_run(run, config) and not find_checkpoints(folder):
        refuse_lost_checkpoints(run, config)
        raise ConfigError(
            f"--resume: {run}, the newest run of this name, has no checkpoint in {folder}; give the config a section "
            "checkpoint, start anew without --resume, or name a checkpoint with --from PATH"
        )


def run(
    files: ConfigArgument,
    strategy: BackendOption = None,
    sets: SetOption = None,
    out: OutOption = None,
    *,
    overwrite: OverwriteOption = False,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Continue from the newest complete checkpoint of the newest run of this name."),
    ] = False,
    checkpoint: Annotated[
        str | None, typer.Option("--from", metavar="PATH", help="Begin a run with the state of this checkpoint.")
    ] = None,
    debug_rank: Annotated[
        int | None,
        typer.Option(
            "--debug-rank",
            metavar="N",
            min=0,
            help="Give rank N the terminal when breakpoint() is called there. The other ranks wait, up to a week, and "
            "launch.deadline is the only time limit. A single rank needs no flag.",
        ),
    ] = None,
) -> None:
    """Train as FILE describes. A key in a later file counts instead of the same key before it.

    \b
    unipar run configs/char_gpt.yaml
    unipar run configs/char_gpt.yaml longer.yaml
    unipar run configs/char_gpt.yaml --backend deepspeed/gradients --set train.steps=100
    torchrun --nproc-per-node 2 -m unipar run configs/char_gpt.yaml
    unipar run configs/char_gpt.yaml --resume --backend deepspeed/parameters
    """
    sets = [*(sets or ()), *resume_settings(resume=resume, checkpoint=checkpoint)]
    source = read_config_file(files, sets, strategy, out, runs=True)
    if resume:
        refuse_nothing_to_resume(source)
    from unipar.backend.resources import find_foreign_place
    from unipar.launcher.launch import launch

    report = launch(source, overwrite=overwrite, debug_rank=debug_rank)
    place = find_foreign_place()
    if place is None or place.rank == 0:  # the other ranks of a foreign world share this terminal
        typer.echo(str(report))
