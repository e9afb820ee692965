"""`unipar compare`."""

from __future__ import annotations

from unipar.cli.options import Cells, File, Out, Overwrite, Sets, Sizes, print_result, read_config_file


def compare(
    file: File,
    cells: Cells = None,
    world: Sizes = None,
    sets: Sets = None,
    out: Out = None,
    *,
    overwrite: Overwrite = False,
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
    from unipar.comparison.compare import onwards

    sizes = int(world) if world is not None and world.isdecimal() else world
    found = compared(source, cells=cells or (), world=sizes, overwrite=overwrite)
    print_result(found, "" if found.code or world else onwards(file))
