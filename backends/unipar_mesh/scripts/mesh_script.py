"""Export of a mesh as a script for PyTorch alone: tables of the model's parts, and files that carry them out."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, cast

from unipar.backend.export import (
    SCRIPT_LINE_WIDTH,
    Outline,
    constant_tuple,
    fill_template,
    format_call,
    optimizer_code,
    read_template,
)
from unipar.backend.offered_strategies import strategy_of
from unipar.errors import Unsupported
from unipar_mesh.options import options_of
from unipar_mesh.pipeline.balance import cuts_at
from unipar_mesh.scripts.model_tables import ModelTables, tables_of

_TORCH_CLASSES = {"interleaved": "ScheduleInterleaved1F1B", "zerobubble": "ScheduleInterleavedZeroBubble"}
"""Schedules of torch: each rank has two stages."""

_SCHEDULE_WORDS = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "interleaved", "zerobubble": "zero bubble"}


def mesh_script(outline: Outline) -> dict[str, str]:
    """Return train.py and the files that it imports, by name; raise Unsupported with what a script cannot do."""
    parallel = outline.config.parallel
    if reasons := [*_refused_axes(outline)]:
        raise Unsupported(str(strategy_of(outline.config)), reasons)
    split, pipeline = parallel.tensor > 1 or parallel.context > 1, parallel.pipeline > 1
    tables = tables_of(outline) if split else ModelTables()
    tensor, context, vocabulary = bool(tables.plans), tables.arguments is not None, tables.vocabulary is not None
    inside = context or any(plan.attention for plan in tables.plans)
    schedule = _TORCH_CLASSES.get(parallel.schedule) if pipeline else None
    clips, shards = outline.config.train.clipping is not None, parallel.shard != "nothing"
    by_name = parallel.sequence or pipeline or (tensor and clips)
    flags = {
        "tensor": tensor,
        "sequence": parallel.sequence,
        "vocabulary": vocabulary,
        "context": context,
        "parts": split,
        "inside": inside,
        "pipeline": pipeline,
        "turns": schedule is not None,
        "grouped": pipeline and "groups" in outline.gives,
        "shards": shards,
        "boundary": parallel.shard == "optimizer",
        "gradients": parallel.sequence or pipeline or clips or not shards,
    }
    imports = ["Blocks", "CutPlan"] * tensor + ["Ranks"] + ["Sequences"] * context + ["surround"] * inside
    values = {
        "about": "\n".join(_about(outline, tables)),
        "pipeline": str(parallel.pipeline),
        "context": str(parallel.context),
        "tensor": str(parallel.tensor),
        "tables": "\n".join(_tables_code(outline, tables)),
        "parts": ", ".join(imports),
        "class": schedule or "",
        "sequence": ", HIDDEN" * parallel.sequence,
        "mine": "[name for names in wrapped.own for name in names]" if pipeline else "BLOCKS",
        "surroundings": ", ".join(["blocks=blocks"] * tensor + ["sequences=sequences"] * context),
        "each": f"for {'name, ' * by_name}p in model.{'named_' * by_name}parameters()",
        "stages": "OwnPipeline, Stages" if schedule is None else "Stages, TorchPipeline",
        "runner": _runner_code(outline, schedule),
        "reshard": str(parallel.shard == "parameters"),
        "optimizer": optimizer_code(outline, split=shards),
    }
    copies = ["scripts/mesh_parts.py"] * split + ["scripts/mesh_stages.py"] * pipeline
    copies += ["tensor/cut_logits.py", "tensor/subclass.py"] * vocabulary
    return {
        "train.py": fill_template(outline, "unipar_mesh", "scripts/mesh.txt", flags, values),
        **{path.rpartition("/")[2]: _standalone(path) for path in copies},
    }


def _runner_code(outline: Outline, schedule: str | None) -> str:
    """Return the statement that creates what runs the stages in one step."""
    parallel = outline.config.parallel
    words, late = ["wrapped", "seed_torch", "device"], f"late={parallel.shard == 'optimizer'}"
    if schedule is None:
        return format_call("    pipeline = OwnPipeline", [*words, f"gpipe={parallel.schedule == 'gpipe'}", late])
    words += [f"schedule={schedule}", 'copies=mesh["data"].get_group()', late]
    return format_call("    pipeline = TorchPipeline", words)


def _standalone(path: str) -> str:
    """Return a file of this package that needs PyTorch alone, which imports others of its kind from beside it."""
    return re.sub(
        r"^from unipar_mesh\.(?:\w+\.)*(\w+) import", r"from \1 import", read_template("unipar_mesh", path), flags=re.M
    )


def _refused_axes(outline: Outline) -> Iterator[str]:
    """Yield why a script cannot have these axes, whatever the model."""
    parallel = outline.config.parallel
    if (way := options_of(outline.config).attention) in ("ring", "ulysses", "torch"):
        yield (
            f"options.native.attention: {way}: a script gathers keys and values of all ranks, which computes the same; "
            "say gather"
        )
    if parallel.axes.stages > len(outline.blocks) and parallel.pipeline > 1:
        several = parallel.axes.pieces > 1
        each = f" (2 on each of {parallel.pipeline} ranks, by {parallel.schedule})" if several else ""
        yield (
            f"parallel.pipeline: {parallel.axes.stages} stages{each} need a block each, and the model has "
            f"{len(outline.blocks)}; lower pipeline, {'take schedule 1f1b, ' * several}or name smaller blocks in "
            "model.blocks"
        )


def _about(outline: Outline, tables: ModelTables) -> Iterator[str]:
    """Yield the lines of the script's docstring."""
    parallel = outline.config.parallel
    schedule = f" ({_SCHEDULE_WORDS[parallel.schedule]})" if parallel.pipeline > 1 else ""
    yield f'"""{outline.task} over {parallel.axes}{schedule}.'
    yield ""
    yield f"Made from {outline.origin} by `unipar export`; it needs PyTorch alone."
    if tables.plans:
        yield ""
        yield "Ranks of `tensor` have a part of each block's matrices. PLANS was found by trying the blocks, whose"
        yield "parts were compared with the whole ones when this was written."
    if tables.arguments is not None:
        yield ""
        yield "Ranks of `context` have a part of each sequence from the first block to the last. Each computes the loss"
        yield "of the whole sequence, so that the mean over ranks is what one process computes."
    yield '"""'


def _tables_code(outline: Outline, tables: ModelTables) -> Iterator[str]:
    """Yield the tables as source code."""
    yield constant_tuple("BLOCKS", [f'"{name}"' for name in outline.blocks], "submodules, in their order")
    parallel = outline.config.parallel
    if parallel.pipeline > 1:
        stages = parallel.axes.stages
        firsts = [len(outline.blocks) * stage // stages for stage in range(stages)]
        if outline.cuts is not None:
            firsts = cuts_at(outline.cuts, outline.blocks, stages)[:-1]
        yield constant_tuple("FIRSTS", [str(n) for n in firsts], "number of each stage's first block")
    if parallel.pipeline > 1 or parallel.sequence or tables.arguments is not None:
        yield f"HIDDEN = {_code(tables.hidden)}  # place or name of a block's hidden states among its arguments"
    if tables.arguments is not None:
        comment = "# along which dimension the sequence goes in other arguments; None: it does not"
        head = "ARGUMENTS: dict[int | str, int | None] = "
        one = f"{head}{_code(tables.arguments)}  {comment}"
        yield one if len(one) <= SCRIPT_LINE_WIDTH else f"{comment}\n{head}{_code(tables.arguments, 0, len(head))}"
    if (words := tables.vocabulary) is not None:
        yield f'EMBEDDING, HEAD = "{words.embedding}", "{words.head}"  # modules with a row for each word'
    if tables.plans:
        yield "PLANS = ["
        for plan in tables.plans:
            yield f"    CutPlan(\n        blocks={_slice(plan.blocks, outline.blocks)},"
            for field in fields(plan)[1:]:
                if value := getattr(plan, field.name):
                    yield f"        {field.name}={_code(value, 8, len(field.name) + 1)},"
            yield "    ),"
        yield "]"


def _slice(names: Sequence[str], blocks: Sequence[str]) -> str:
    first, end = blocks.index(names[0]), blocks.index(names[-1]) + 1
    if tuple(blocks[first:end]) == tuple(names):
        return "BLOCKS" if len(names) == len(blocks) else f"BLOCKS[{first or ''}:{end if end < len(blocks) else ''}]"
    return _code(tuple(names), 8, 7)


def _code(value: Any, indent: int = 0, taken: int = 0) -> str:
    """Return a value as source code, with one item a line if it is too long for the line.

    `taken`: characters of the line before it, without its indent.
    """
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, Mapping):
        items = [f"{_code(k)}: {_code(v)}" for k, v in cast("Mapping[Any, Any]", value).items()]
        begin, end, comma = "{", "}", ""
    elif isinstance(value, tuple):
        items = [_code(item) for item in cast("tuple[Any, ...]", value)]
        begin, end, comma = "(", ")", "," * (len(items) == 1)
    else:
        return repr(value)
    one = f"{begin}{', '.join(items)}{comma}{end}"
    if len(one) + indent + taken + 1 <= SCRIPT_LINE_WIDTH:
        return one
    space = " " * indent
    return "\n".join([begin, *(f"{space}    {item}," for item in items), f"{space}{end}"])
