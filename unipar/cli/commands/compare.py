"""`unipar compare`."""

from __future__ import annotations

from unipar.cli.commands.options import (
    ConfigArgument,
    DetailsOption,
    OutOption,
    OverwriteOption,
    SetOption,
    StrategiesOption,
    WorldOption,
    print_result,
    quote_files,
    read_config_file,
)


def compare(
    files: ConfigArgument,
    strategies: StrategiesOption = None,
    world: WorldOption = None,
    sets: SetOption = None,
    out: OutOption = None,
    *,
    overwrite: OverwriteOption = False,
    details: DetailsOption = False,
) -> None:
    """Compare the same training in many strategies.

    The strategies take turns: do their losses agree, and what do they cost in time and memory? The answer fits
    one screen; --details prints all tables, and of a finished comparison at once, without running it again. After
    an interruption the same command continues with the strategies that are not finished. With several numbers
    of ranks, one comparison for each.

    \b
    unipar compare configs/quickstart.yaml
    unipar compare configs/quickstart.yaml --details
    unipar compare configs/quickstart.yaml --world 1,2,4
    unipar compare configs/quickstart.yaml --strategy native/nothing --strategy 'deepspeed/*' --overwrite
    unipar compare configs/char_gpt.yaml --world 4 --strategy native/nothing+tensor2
    """
    source = read_config_file(files, sets, out=out)
    from unipar.comparison.compare import compare as compare_strategies
    from unipar.comparison.compare import suggest_next_commands

    sizes = int(world) if world is not None and world.isdecimal() else world
    result = compare_strategies(source, strategies=strategies or (), world=sizes, overwrite=overwrite)
    print_result(result, suggest_next_commands(result, quote_files(files)), details=details)
