"""Export of a pipeline as a script for PyTorch alone: stages by hooks on blocks, FSDP2 over the ranks of a stage."""

from __future__ import annotations

from collections.abc import Iterator

from unipar.backend.cells import cell_of
from unipar.backend.export import Outline, constant_tuple, fill_template, functions_code, optimizer_code
from unipar.errors import Unsupported
from unipar_native.mesh.scripts.pieces import Pieces, pieces_of_script
from unipar_native.mesh.scripts.split import refused_axes


def pipeline_script(outline: Outline) -> str:
    """Return the text of train.py; raise Unsupported with a reason for each thing that it cannot carry."""
    parallel = outline.config.parallel
    if reasons := [*_reasons(outline)]:
        raise Unsupported(str(cell_of(outline.config)), reasons)
    pieces = pieces_of_script(outline) if parallel.tensor > 1 else Pieces()
    flags = {
        **pieces.flags,
        "maths": pieces.flags["maths"] or outline.config.train.schedule.name == "cosine",
        "shards": parallel.shard != "nothing",
        "boundary": parallel.shard == "optimizer",
        "gpipe": parallel.schedule == "gpipe",
        "mixed": outline.autocast,
    }
    firsts = [len(outline.blocks) * stage // parallel.pipeline for stage in range(parallel.pipeline)]
    values = {
        **pieces.values,
        "way": f"over {parallel.axes}" if parallel.tensor > 1 else f"in a pipeline of {parallel.pipeline} stages",
        "stages": str(parallel.pipeline),
        "schedule": {"gpipe": "GPipe", "1f1b": "1F1B"}.get(parallel.schedule, ""),
        "blocks": constant_tuple("BLOCKS", [f'"{name}"' for name in outline.blocks], "submodules, in their order"),
        "firsts": constant_tuple("FIRSTS", [str(n) for n in firsts], "number of each stage's first block"),
        "reshard": str(parallel.shard == "parameters"),
        "functions": functions_code(outline, loss=False),
        "optimizer": optimizer_code(outline, split=flags["shards"]),
    }
    return fill_template(outline, "unipar_native", "mesh/scripts/pipeline.txt", flags, values)


def _reasons(outline: Outline) -> Iterator[str]:
    """Yield why a script cannot do this training."""
    parallel = outline.config.parallel
    yield from refused_axes(outline)
    if parallel.context > 1:
        yield (
            "parallel.context: a script has a pipeline or sequences over context, not both: leave one of them out of "
            "the export"
        )
    if parallel.schedule not in ("1f1b", "gpipe"):
        yield (
            f"parallel.schedule: {parallel.schedule} runs in a script by torch's own schedules, which want the model "
            "as a list of stages, not your loss as it is; use 1f1b or gpipe"
        )
    if parallel.pipeline > len(outline.blocks):
        yield (
            f"parallel.pipeline: {parallel.pipeline} stages need a block each, and the model has "
            f"{len(outline.blocks)}; lower pipeline, or name smaller blocks in model.blocks"
        )
    if outline.cuda:
        yield (
            "device: a script of a pipeline sends by gloo, which fits the CPU; say device: cpu, or run this cell with "
            "`unipar run`"
        )
    for name, why in (
        ("groups", "groups() would see the blocks of one stage only: use train.optimizer.decay"),
        (
            "cuts",
            "cuts() is for unipar, and a script cuts into stages of as many blocks: leave it out, and change FIRSTS in "
            "train.py",
        ),
    ):
        if name in outline.gives:
            yield f"the task's {why}"
