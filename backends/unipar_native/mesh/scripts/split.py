"""Export of tensor and context parallelism as a script for PyTorch alone, with FSDP2 over the ranks beside them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from unipar.backend.cells import cell_of
from unipar.backend.export import (
    SCRIPT_LINE_WIDTH,
    Outline,
    constant_tuple,
    fill_template,
    optimizer_code,
    read_template,
    render_template,
)
from unipar.errors import Unsupported
from unipar_native.mesh.probe import kind_of_block
from unipar_native.mesh.scripts.context_table import SequenceTable, table_of_sequences
from unipar_native.mesh.scripts.look import ModelLook, look_at_calls
from unipar_native.mesh.scripts.tensor_table import BlockTable, table_of_block
from unipar_native.mesh.tensor.cuts import BlockPlan, is_transposed
from unipar_native.mesh.words import kinds_in_block, refuse_empty_plans, refuse_part, refuse_unknown_patterns

_MICROBATCHES = 8
"""Number of microbatches whose calls are looked at: an argument may be missing in some."""

Tables = Sequence[tuple[tuple[str, ...], BlockTable]]


def look_at_outline(outline: Outline) -> ModelLook:
    """Create the task's model with its values, and run the first microbatches through it."""
    assert outline.load is not None
    part, samples = outline.load()
    refuse_part(part, outline.config)
    return look_at_calls(part, samples(_MICROBATCHES))


def tensor_tables(look: ModelLook, ranks: int) -> tuple[Tables, list[str]]:
    """Return the table of each kind of block with the blocks' names, and sentences on what a script cannot do."""
    part, reasons = look.part, list[str]()
    given = part.tensor or {}
    refuse_unknown_patterns(given, part.module, part.blocks)
    known: dict[Any, tuple[BlockPlan, BlockTable | None]] = {}
    blocks: dict[Any, list[str]] = {}
    for name in part.blocks:
        block = part.module.get_submodule(name)
        wanted = kinds_in_block(given, name, block)
        key = (kind_of_block(block), *sorted(wanted.items()))
        blocks.setdefault(key, []).append(name)
        if key not in known:
            plan, table, refused = table_of_block(name, block, look.calls[0][name], ranks, wanted)
            known[key] = plan, table
            reasons += refused
    refuse_empty_plans(ranks, [plan for plan, _ in known.values()])
    return [(tuple(blocks[key]), table) for key, (_, table) in known.items() if table is not None], reasons


def split_script(outline: Outline) -> str:
    """Return the text of train.py; raise Unsupported with a reason for each thing that it cannot carry."""
    parallel = outline.config.parallel
    look = look_at_outline(outline)
    tables, reasons = tensor_tables(look, parallel.tensor) if parallel.tensor > 1 else ((), [])
    sequence: SequenceTable | None = None
    if parallel.context > 1:
        sequence, refused = table_of_sequences(look, parallel.context)
        reasons += refused
        for blocks, table in tables:
            if table.dropouts:
                reasons.append(
                    f"parallel.context: {blocks[0]}.{next(iter(table.dropouts))} drops elements of what tensor has "
                    "cut, and a script does not cut its masks along the sequence as well: set its rate to 0, or leave "
                    "one of both axes out of the export"
                )
    if reasons:
        raise Unsupported(str(cell_of(outline.config)), reasons)
    attends = any(table.attention_dropout for _, table in tables) or (sequence is not None and sequence.attention_dropout)
    tensor, context = bool(tables), sequence is not None
    flags = {
        "tensor": tensor,
        "context": context,
        "shards": parallel.shard != "nothing",
        "boundary": parallel.shard == "optimizer",
        "inside": context or attends,
        "maths": attends or outline.config.train.schedule.name == "cosine",
    }
    inner = {**flags, "attends": attends, **tensor_flags(tables, look), **_context_flags(sequence, look)}
    sizes = {"tensor": str(parallel.tensor), "context": str(parallel.context)}
    values = {
        **sizes,
        "plans": plans_code(tables, look.part.blocks),
        "inside": ", ".join(
            ["attention sees the whole sequence"] * context
            + ["masks of dropout are those of one process"] * (attends or inner["drops"])
        ),
    }
    names = ["tensor"] * tensor + ["context"] * context + ["inside"] * flags["inside"]
    pieces = [render_template(read_template(__package__ or "", f"{name}.txt"), inner, values) for name in names]
    seats = ["sequences"] * context + ['mesh["tensor"].get_local_rank()'] * tensor
    return fill_template(
        outline,
        "unipar_native",
        "mesh/scripts/split.txt",
        flags,
        {
            **sizes,
            "axes": str(parallel.axes),
            "about": "\n".join(_about(tensor=tensor, context=context)),
            "blocks": constant_tuple("BLOCKS", [f'"{name}"' for name in look.part.blocks], "submodules, in order"),
            "arguments": "" if sequence is None else _arguments_code(sequence),
            "pieces": "\n\n".join(pieces).rstrip("\n"),
            "mesh": "\n".join(_mesh_code(tensor=tensor, context=context)),
            "inside_words": ", ".join(seats),
            "reshard": str(parallel.shard == "parameters"),
            "optimizer": optimizer_code(outline, split=flags["shards"]),
        },
    )


def _about(*, tensor: bool, context: bool) -> Iterator[str]:
    if tensor:
        yield "Ranks of `tensor` have a part of each block's matrices. PLANS was found by trying the blocks, whose parts"
        yield "were compared with the whole ones when this was written."
    if context:
        yield "Ranks of `context` have a part of each sequence from the first block to the last. Each of them computes the"
        yield "loss of the whole sequence, so that the mean over ranks is what one process computes."


def _mesh_code(*, tensor: bool, context: bool) -> Iterator[str]:
    names = ["CONTEXT"] * context + ["TENSOR"] * tensor
    data = f"world // {names[0]}" if len(names) == 1 else f"world // ({' * '.join(names)})"
    axes = ", ".join(f'"{name}"' for name in ("data", *(n.lower() for n in names)))
    yield f"    mesh = init_device_mesh(device.type, ({', '.join([data, *names])}), mesh_dim_names=({axes}))"
    if not context:
        yield '    copies = mesh["data"]  # ranks that have the same parts of the model'
    elif not tensor:
        yield "    copies = init_device_mesh(device.type, (world,))  # all ranks have the same parts of the model"
    else:
        yield "    # ranks that have the same parts of the model: those of data and context"
        yield (
            '    copies = init_device_mesh(device.type, (world // TENSOR, TENSOR), mesh_dim_names=("copies", "same"))'
            '["copies"]'
        )


def tensor_flags(tables: Tables, look: ModelLook) -> dict[str, bool]:
    """Return the conditions of the lines that cut blocks."""
    return {
        "transposed": any(
            is_transposed(look.part.module.get_submodule(f"{blocks[0]}.{layer}"))
            for blocks, table in tables
            for layer in (*table.columns, *table.rows)
        ),
        "numbers": any(table.numbers for _, table in tables),
        "dropouts": any(table.dropouts for _, table in tables),
    }


def _context_flags(sequence: SequenceTable | None, look: ModelLook) -> dict[str, bool]:
    return {
        "drops": sequence is not None and sequence.drops,
        "hiddennamed": sequence is not None and isinstance(sequence.hidden, str),
        "tuples": look.tuples,
    }


def _arguments_code(sequence: SequenceTable) -> str:
    items = {_quoted(key): repr(dim) for key, dim in sequence.arguments.items()}
    comment = "  # along which dimension the sequence goes in other arguments; None: it does not"
    head = "ARGUMENTS: dict[int | str, int | None] = "
    one = f"{head}{_dictionary(items)}{comment}"
    long = "\n".join([comment.strip(), f"{head}{_dictionary(items, 0, len(head))}"])
    return f"HIDDEN = {_quoted(sequence.hidden)}  # place or name of a block's hidden states among its arguments\n" + (
        one if len(one) <= SCRIPT_LINE_WIDTH else long
    )


def plans_code(tables: Tables, blocks: Sequence[str]) -> str:
    """Return PLANS as source code."""
    several = {
        "numbers": any(table.numbers for _, table in tables),
        "dropouts": any(table.dropouts for _, table in tables),
    }
    lines = ["PLANS = ["]
    for names, table in tables:
        fields = {
            "blocks": _slice(names, blocks),
            "columns": _dictionary({_quoted(n): repr(sizes) for n, sizes in table.columns.items()}, 8, 8),
            "rows": _dictionary({_quoted(n): repr(sizes) for n, sizes in table.rows.items()}, 8, 5),
            "numbers": f"({', '.join(map(_quoted, table.numbers))}{',' * (len(table.numbers) == 1)})",
            "dropouts": _dictionary({_quoted(n): repr(place) for n, place in table.dropouts.items()}, 8, 9),
        }
        chosen = [f"        {name}={text}," for name, text in fields.items() if several.get(name, True)]
        lines += ["    Plan(", *chosen, "    ),"]
    return "\n".join([*lines, "]"])


def _slice(names: Sequence[str], blocks: Sequence[str]) -> str:
    first, end = blocks.index(names[0]), blocks.index(names[-1]) + 1
    if tuple(blocks[first:end]) == tuple(names):
        return "BLOCKS" if len(names) == len(blocks) else f"BLOCKS[{first or ''}:{end if end < len(blocks) else ''}]"
    one = f"[{', '.join(map(_quoted, names))}]"
    if len(one) + 16 <= SCRIPT_LINE_WIDTH:
        return one
    return "\n".join(["[", *(f"            {_quoted(name)}," for name in names), "        ]"])


def _quoted(key: str | int) -> str:
    return f'"{key}"' if isinstance(key, str) else str(key)


def _dictionary(items: Mapping[str, str], indent: int = 0, taken: int = 0) -> str:
    """Return a dictionary as source code, with one item a line if it is too long for the line."""
    one = f"{{{', '.join(f'{key}: {value}' for key, value in items.items())}}}"
    if len(one) + indent + taken + 1 <= SCRIPT_LINE_WIDTH:
        return one
    space = " " * indent
    return "\n".join(["{", *(f"{space}    {key}: {value}," for key, value in items.items()), f"{space}}}"])
