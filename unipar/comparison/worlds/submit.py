"""Jobs of `unipar submit scale`: the same comparison on several numbers of ranks, all with the same total batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from unipar.backend.checks import CheckedSource
from unipar.comparison.request import batch_with_fixed_total, parse_world_sizes
from unipar.config.sections.machines import Machines
from unipar.errors import ConfigError
from unipar.jobs.submission import Submission, make_submission, settle_machines
from unipar.utils.text import count_of


def submit_worlds(
    source: CheckedSource, on: str | None, worlds: str, file: Path, arguments: Sequence[str]
) -> list[Submission]:
    """Return a job for each of these numbers of ranks (1,2,4), on as many machines as that takes."""
    config = source.config
    machines, axes, sizes = config.machines or Machines(), config.parallel.axes.ranks, parse_world_sizes(worlds)
    if wrong := [size for size in sizes if size % (fewest := config.parallel.axes.fewest_ranks)]:
        raise ConfigError(
            f"--world: {wrong[0]} ranks cannot be divided into {config.parallel.axes} ({fewest} ranks each)"
        )
    per = machines.ranks_per_node if machines.ranks_per_node != "auto" else settle_machines(config)[1]
    assert per is not None  # no GPUs are counted for worlds of given sizes
    batch = batch_with_fixed_total(config.batch, sizes[0] // axes)
    made: list[Submission] = []
    for size in sizes:
        nodes, left = divmod(size, per)
        if nodes and left:
            raise ConfigError(
                f"--world: {count_of(size, 'rank')} do not fill machines of {per} (machines.ranks_per_node); "
                "take multiples"
            )
        asked = machines.changed({"nodes": max(1, nodes), "ranks_per_node": min(size, per)})
        changes = {"parallel.data": size // axes, "batch": batch, "machines": asked}
        at = replace(source, config=config.changed(changes)).with_out(str(source.out / "worlds" / f"world-{size}"))
        more = ["--set", f"parallel.data={size // axes}"]
        if batch is not config.batch:
            more += ["--set", f"batch.total={batch.total}", "--set", "batch.micro=null"]
        strategies = [] if "--strategy" in arguments else ["--strategy", str(source.strategy)]
        made.append(make_submission(at, on, "compare", file, [*arguments, *more, *strategies]))
    return made
