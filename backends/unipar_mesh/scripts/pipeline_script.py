"""Export of a pipeline as a script for PyTorch alone: stages by hooks on blocks, FSDP2 over the ranks of a stage."""

from __future__ import annotations

from collections.abc import Iterator

from unipar.backend.export import (
    SCRIPT_LINE_WIDTH,
    Outline,
    constant_tuple,
    fill_template,
    functions_code,
    optimizer_code,
    read_template,
    render_template,
    shared_flags,
    shared_values,
)
from unipar.backend.offered_strategies import strategy_of
from unipar.errors import Unsupported
from unipar_mesh.pipeline.balance import cuts_at
from unipar_mesh.scripts.script_parts import Pieces, pieces_of_script
from unipar_mesh.scripts.split_script import refused_axes


def pipeline_script(outline: Outline) -> str:
    """Return the text of train.py; raise Unsupported with a reason for each thing that it cannot carry."""
    parallel = outline.config.parallel
    if reasons := [*_reasons(outline)]:
        raise Unsupported(str(strategy_of(outline.config)), reasons)
    pieces = pieces_of_script(outline) if parallel.tensor > 1 or parallel.context > 1 else Pieces()
    context = pieces.flags["context"]
    torch_class = _TORCH_CLASSES.get(parallel.schedule)
    flags = {
        **pieces.flags,
        "maths": pieces.flags["maths"] or outline.config.train.schedule.name == "cosine",
        "shards": parallel.shard != "nothing",
        "boundary": parallel.shard == "optimizer",
        "gpipe": parallel.schedule == "gpipe",
        "mixed": outline.autocast,
        "torch": torch_class is not None,
        "halves": parallel.schedule == "zerobubble",
        "grouped": "groups" in outline.gives,
    }
    stages = parallel.axes.stages
    if outline.cuts is None:
        firsts = [len(outline.blocks) * stage // stages for stage in range(stages)]
    else:
        firsts = cuts_at(outline.cuts, outline.blocks, stages)[:-1]
    values = {
        **pieces.values,
        "about": _about(outline),
        "pipeline": str(parallel.pipeline),
        "stages": str(stages),
        "schedule": _SCHEDULE_WORDS[parallel.schedule],
        "class": torch_class or "",
        **_NAMES[torch_class is not None],
        "copies": "copies" if context else 'mesh["data"]',
        "same": "same" if context else "ranks",
        "inside_words": ", ".join(
            ["sequences"] * context + ['mesh["tensor"].get_local_rank()'] * (parallel.tensor > 1)
        ),
        "blocks": constant_tuple("BLOCKS", [f'"{name}"' for name in outline.blocks], "submodules, in their order"),
        "firsts": constant_tuple("FIRSTS", [str(n) for n in firsts], "number of each stage's first block"),
        "reshard": str(parallel.shard == "parameters"),
        "functions": functions_code(outline, loss=False),
        "optimizer": optimizer_code(outline, split=flags["shards"]),
        **_DEVICE_WORDS[outline.cuda],
    }
    shared, flags = {**shared_values(outline), **values}, {**shared_flags(outline), **flags}
    file = "own_stages.txt" if torch_class is None else "torch_stages.txt"
    values["parts"] = render_template(read_template(__package__ or "", file), flags, shared).rstrip("\n")
    return fill_template(outline, "unipar_mesh", "scripts/pipeline.txt", flags, values)


def _about(outline: Outline) -> str:
    """Return the docstring of the script, in two lines where one would be too long."""
    parallel = outline.config.parallel
    alone = parallel.axes.ranks == parallel.axes.stages
    way = f"in a pipeline of {parallel.pipeline} stages" if alone else f"over {parallel.axes}"
    about = f'"""{outline.task} {way} ({_SCHEDULE_WORDS[parallel.schedule]}).'
    made = f"Made from {outline.origin} by `unipar export`; it needs PyTorch alone."
    one = f'{about} {made}"""'
    return one if len(one) <= SCRIPT_LINE_WIDTH else f'{about}\n\n{made}\n"""'


_TORCH_CLASSES = {"interleaved": "ScheduleInterleaved1F1B", "zerobubble": "ScheduleInterleavedZeroBubble"}
"""Schedules of torch: each rank has two stages."""

_SCHEDULE_WORDS = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "interleaved", "zerobubble": "zero bubble"}

_DEVICE_WORDS = (
    {
        "device": "cpu",
        "current": 'torch.device("cpu")',
        "on": "",
        "get_state": "torch.get_rng_state()",
        "set_state": "torch.set_rng_state(generator)",
    },
    {
        "device": "cuda",
        "current": "device",
        "on": ', device="cuda"',
        "get_state": "torch.cuda.get_rng_state().cuda()",
        "set_state": "torch.cuda.set_rng_state(generator.cpu())",
    },
)
"""Code that depends on the device: for the CPU, and for CUDA. The generator's state travels with hidden states."""

_NAMES = (
    {"axis": "stages", "place": "stage", "size": "STAGES", "mine": "BLOCKS[first:end]"},
    {"axis": "pipeline", "place": "seat", "size": "PIPELINE", "mine": "mine"},
)
"""Names in a script whose ranks have one stage each, and in one whose ranks have several."""


def _reasons(outline: Outline) -> Iterator[str]:
    """Yield why a script cannot do this training."""
    parallel = outline.config.parallel
    yield from refused_axes(outline)
    if parallel.axes.stages > len(outline.blocks):
        several = parallel.axes.pieces > 1
        each = f" (2 on each of {parallel.pipeline} ranks, by {parallel.schedule})" if several else ""
        yield (
            f"parallel.pipeline: {parallel.axes.stages} stages{each} need a block each, and the model has "
            f"{len(outline.blocks)}; lower pipeline, {'take schedule 1f1b, ' * several}or name smaller blocks in "
            "model.blocks"
        )
