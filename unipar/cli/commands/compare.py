"""`unipar compare`."""

from __future__ import annotations

from unipar.cli.options import (
    CellsOption,
    ConfigArgument,
    OutOption,
    OverwriteOption,
    SetOption,
    WorldOption,
    print_result,
    read_config_file,
)


def compare(
    file: ConfigArgument,
    cells: CellsOption = None,
    world: WorldOption = None,
    sets: SetOption = None,
    out: OutOption = None,
    *,
    overwrite: OverwriteOption = False,
) -> None:
    """The same training in many cells.

    They take turns: do their losses agree, and what does each cost? What was interrupted goes on
    with the cells that did not come to their end. With several worlds, a comparison each.

    \b
    unipar compare configs/quickstart.yaml
    unipar compare configs/quickstart.yaml --world 1,2,4
    unipar compare configs/quickstart.yaml --cell native/nothing --cell 'deepspeed/*' --overwrite
    """
    source = read_config_file(file, sets, out=out)
    from unipar.comparison.compare import compare as compared
    from unipar.comparison.compare import suggest_next_commands

    sizes = int(world) if world is not None and world.isdecimal() else world
    found = compared(source, cells=cells or (), world=sizes, overwrite=overwrite)
    print_result(found, "" if found.code or world else suggest_next_commands(file))
