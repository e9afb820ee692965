"""`unipar check`: would this run start? Read, not run: no torch, no process; `deep` imports the task's file."""

from __future__ import annotations

from unipar import devices
from unipar.ready import check_cells, ready, refuse_existing
from unipar.report.table import table
from unipar.source import Source
from unipar.task import TaskRef


def check(source: Source, *, deep: bool = False, overwrite: bool = False) -> str:
    """What the run will be, in a few lines; an error says why it cannot be."""
    config = source.config
    ref = TaskRef.of(None, config.task, {}) if config.task is not None else None
    found = ready(source, ref, devices.found())
    compared = check_cells(source)
    if not overwrite:
        refuse_existing(source.out)
    sizes = found.sizes
    device, why = devices.device(config)
    ranks = "one process" if found.ranks.number == 1 else f"{found.ranks.number} ranks"
    rows = [
        ("cell", f"{found.cell}, {ranks} on {device}{_because(found.ranks.why or why)}"),
        ("batch", f"total {sizes.total} = micro {sizes.micro} x accumulate {sizes.accumulate} x data {sizes.ranks}"),
        ("task", _task(source, deep=deep)),
        ("compare", f"{len(compared)} cells: {', '.join(config.compare.cells)}"),
        ("out", str(source.out)),
    ]
    return f"{source.label}: good\n" + "\n".join(table(("  ", ""), [(f"  {k}", v) for k, v in rows]).splitlines()[1:])


def _task(source: Source, *, deep: bool) -> str:
    task = source.config.task
    if task is None:
        return "none named here; a script gives it to unipar.launch"
    if not deep:
        return f"{task.use}, read but not imported (--deep imports it)"
    from unipar.verbs.depth import loaded

    loaded(source.config)
    return f"{task.use}, imported and made"


def _because(why: str) -> str:
    return f" ({why})" if why else ""
