"""`unipar verify`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from unipar.cli.commands.options import (
    STRATEGIES_METAVAR,
    ConfigArgument,
    DetailsOption,
    OutOption,
    OverwriteOption,
    SetOption,
    print_result,
    quote_files,
    read_config_file,
    read_location,
    split_at_commas,
)

if TYPE_CHECKING:
    from unipar.results.verdicts import Verdicts


def verify(
    files: ConfigArgument,
    strategies: Annotated[
        list[str] | None,
        typer.Option(
            "--strategy",
            "--strategies",
            "--backend",
            metavar=STRATEGIES_METAVAR,
            callback=split_at_commas,
            help="Verify these strategies instead of those that FILE names. May be repeated.",
        ),
    ] = None,
    world: Annotated[int | None, typer.Option("--world", metavar="N", min=2, help="Ranks in each strategy.")] = None,
    steps: Annotated[
        int | None, typer.Option("--steps", metavar="K", min=1, help="Optimizer steps; the default is 10.")
    ] = None,
    sets: SetOption = None,
    out: OutOption = None,
    *,
    overwrite: OverwriteOption = False,
    details: DetailsOption = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit 1 as well if the training depends on how a batch is cut.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Save after half of the steps, and continue in every strategy from there.")
    ] = False,
    checkpoint: Annotated[
        str | None,
        typer.Option("--from", metavar="PATH", help="Continue in every strategy from this checkpoint of FILE."),
    ] = None,
) -> None:
    """Check that all strategies give the numbers of one process.

    Runs some steps of your task in one process, in fp64 and as configured, with the batch split in several ways;
    then in every strategy. For a strategy that differs: the first step, module and parameter, and the kind of fault.
    Strategies with axes (native/nothing+tensor2) split a batch into fewer parts and are compared with one process that
    does so too; their copies of parameters, buffers and dropout masks are checked as well.
    Exit 0 if all strategies that ran agree, 3 if one that was named cannot run. A loss that is a sum, or that combines
    samples, and BatchNorm without sync depend on the number of ranks: the first line reports it, and with --strict the
    exit code is 1.

    \b
    unipar verify configs/char_gpt.yaml
    unipar verify configs/char_gpt.yaml --backend native/parameters
    unipar verify configs/char_gpt.yaml --resume
    unipar verify configs/char_gpt.yaml --strategies native/parameters --strategies 'deepspeed/*' --world 4
    """
    if resume and checkpoint is not None:
        raise typer.BadParameter("give --resume, to save and go on from there, or --from PATH, for that checkpoint")
    source = read_config_file(files, sets, out=out)
    from unipar.verification.verify import verify as verify_strategies

    result = verify_strategies(
        source,
        strategies=strategies or (),
        world=world,
        steps=steps,
        overwrite=overwrite,
        strict=strict,
        resume=resume if checkpoint is None else read_location(checkpoint),
    )
    print_result(result, _next_steps(result, quote_files(files)), details=details)


def _next_steps(result: Verdicts, name: str) -> list[str]:
    """Return commands to try next, after this verification of the config `name`."""
    wrong = next((row.strategy for row in result.rows if row.outcome in ("disagrees", "failed")), None)
    if wrong is not None:
        return [f"unipar verify {name} --strategy {wrong} --overwrite --details   # all that is known of it"]
    return [] if result.code else [f"unipar compare {name}   # what each strategy costs in time and memory"]
