"""`unipar check`: would this run start? Read, not run: no torch, no process; `deep` imports the task's file."""

from __future__ import annotations

from unipar import registry
from unipar.config import Cell
from unipar.errors import BackendNotFound, ConfigError, Unsupported
from unipar.plan import Plan, prepare
from unipar.source import Source


def check(source: Source, *, deep: bool = False, overwrite: bool = False) -> str:
    """What the run will be, in a few lines; an error says why it cannot be."""
    config = source.config
    plan = Plan.of(prepare(source, code="if named"), overwrite=overwrite)
    compared = _cells(source)
    settled, sizes = plan.settled, plan.settled.sizes
    ranks = "one process" if plan.size == 1 else f"{plan.size} ranks"
    because = f" ({plan.why})" if plan.why else ""
    rows = [
        ("cell", f"{settled.cell}, {ranks} on {settled.device}{because}"),
        ("batch", f"total {sizes.total} = micro {sizes.micro} x accumulate {sizes.accumulate} x data {sizes.ranks}"),
        ("task", _task(source, deep=deep)),
        ("compare", f"{len(compared)} cell{'s' * (len(compared) > 1)}: {', '.join(config.compare.cells)}"),
        ("out", str(plan.out)),
    ]
    return "\n".join([f"{source.label}: good", *(f"  {what:<7}  {said}" for what, said in rows)])


def _cells(source: Source) -> list[Cell]:
    """What `compare` would run, each known by name."""
    try:
        return registry.expand(source.config.compare.cells)
    except (BackendNotFound, Unsupported, ConfigError) as e:
        place = source.origins.get("compare.cells")
        raise ConfigError(f"{source.label}: compare.cells{f' ({place})' if place else ''}: {e}") from None


def _task(source: Source, *, deep: bool) -> str:
    task = source.config.task
    if task is None:
        return "none named here; a script gives it to unipar.launch"
    if not deep:
        return f"{task.use}, read but not imported (--deep imports it)"
    from unipar.verbs.depth import loaded

    loaded(source.config)
    return f"{task.use}, imported and made"
