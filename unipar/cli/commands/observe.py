"""`unipar observe`."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unipar.cli.commands.options import OverwriteOption

if TYPE_CHECKING:
    from unipar.observing.settings import ObserveSettings


def observe(
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- COMMAND", help="The command that trains, as you type it.", show_default=False),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Folder of the results: observed.")] = None,
    steps: Annotated[
        str | None,
        typer.Option("--steps", metavar="A:B", help="Steps whose memory is recorded, from A to B: 3:5."),
    ] = None,
    loss: Annotated[
        str | None,
        typer.Option("--loss", metavar="FILE:NAME", help="Variable that holds a step's loss: train.py:loss."),
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", metavar="FILE", help="YAML file with these and further settings.")
    ] = None,
    to: Annotated[
        str | None,
        typer.Option("--to", metavar="task", help="Write task.py and task.yaml, a first draft for unipar, as well."),
    ] = None,
    earlier: Annotated[
        Path | None, typer.Option("--from", metavar="DIR", help="Results that are there already, instead of a command.")
    ] = None,
    *,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 if a fault was found.")] = False,
    overwrite: OverwriteOption = False,
) -> None:
    """Observe a training script that nobody changed: memory, time, bytes sent, and faults that give no error.

    The command runs as it is, with its own output and exit code; every Python process of it that trains writes what
    it does into the folder. At the end a table is printed on standard error, and a page is written.

    A fault is found by comparing what the ranks have recorded: unequal weights, gradients that nobody reduced,
    batches that all ranks have. A note is something that many scripts do on purpose.

    With --from alone, ranks are compared whose files lie in a folder, such as those of machines that share none.

    With --to task a draft of a Task and its config is written into the folder: what was seen, `# guess:` where it may
    be wrong, `# to do:` where something was not seen.

    Keys of the file: steps, checks, log_every, samples, tokens, loss, memory.

    \b
    unipar observe -- python train.py
    unipar observe -- torchrun --nproc-per-node 2 train.py --epochs 1
    unipar observe --out before -- accelerate launch train.py
    unipar observe --to task -- torchrun --nproc-per-node 2 train.py
    unipar observe --to task --from before
    unipar observe --from before
    unipar report before after
    """
    if to not in (None, "task"):
        raise typer.BadParameter(f"--to {to}: there is only --to task")
    if earlier is not None:
        _read_again(earlier.absolute(), to=to, command=command, overwrite=overwrite, strict=strict)
        return
    if not command:
        raise typer.BadParameter("give the command that trains after --: unipar observe -- python train.py")
    from unipar.observing.command import end_like, prepare_folder, run_observed
    from unipar.observing.conclusion import conclude

    settings = _read_settings(config, out=out, steps=steps, loss=loss)
    settings = settings.model_copy(update={"folder": prepare_folder(settings.folder, overwrite=overwrite)})
    code = run_observed(command, settings)
    concluded = conclude(command, settings.folder, code, draft=to is not None)
    typer.echo(concluded.text(shutil.get_terminal_size().columns), err=True)
    end_like(1 if strict and concluded.faults and not code else code)


def _read_again(folder: Path, *, to: str | None, command: list[str] | None, overwrite: bool, strict: bool) -> None:
    """Write the draft from results that are there already, or compare their ranks once more."""
    if command:
        raise typer.BadParameter("--from DIR reads results and runs nothing: unipar observe --from DIR")
    if to is not None:
        from unipar.observing.draft_task import write_draft

        typer.echo(write_draft(folder, overwrite=overwrite))
        return
    from unipar.observing.conclusion import conclude_again

    concluded = conclude_again(folder)
    typer.echo(concluded.text(shutil.get_terminal_size().columns), err=True)
    if strict and concluded.faults:
        raise typer.Exit(1)


def _read_settings(file: Path | None, *, out: Path | None, steps: str | None, loss: str | None) -> ObserveSettings:
    """Return the settings of a file with those of the command line; raise ConfigError if one is wrong."""
    from pydantic import ValidationError

    from unipar.errors import ConfigError
    from unipar.observing.settings import ObserveSettings, read_settings_file

    values: dict[str, Any] = {} if file is None else read_settings_file(file)
    if out is not None:
        values["folder"] = out
    if steps is not None:
        first, _, last = steps.partition(":")
        values["steps"] = (first, last or first)
    if loss is not None:
        values["loss"] = loss
    try:
        return ObserveSettings.model_validate(values, strict=False)
    except ValidationError as e:
        from unipar.config.validation_errors import list_section_mistakes

        mistakes = "; ".join(list_section_mistakes(e, ObserveSettings))
        raise ConfigError(f"{mistakes}; give a setting as `unipar observe --help` lists them") from None
