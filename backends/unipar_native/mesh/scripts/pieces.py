"""Parts of a script that cut blocks over tensor and sequences over context: tables and functions, as source code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from unipar.backend.cells import cell_of
from unipar.backend.export import (
    SCRIPT_LINE_WIDTH,
    Outline,
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


def _look_at_outline(outline: Outline) -> ModelLook:
    """Create the task's model with its values, and run the first microbatches through it."""
    assert outline.load is not None
    part, samples = outline.load()
    refuse_part(part, outline.config)
    return look_at_calls(part, samples(_MICROBATCHES))


def _tensor_tables(look: ModelLook, ranks: int) -> tuple[Tables, list[str]]:
    """Return the table of each kind of block with the blocks' names, and sentences on what a script cannot do."""
    part, reasons = look.part, list[str]()
    given = part.tensor or {}
    refuse_unknown_patterns(given, part.module, part.blocks)
    dropping = {draw.line for draw in look.draws if draw.drops}
    known: dict[Any, tuple[BlockPlan, BlockTable | None]] = {}
    blocks: dict[Any, list[str]] = {}
    for name in part.blocks:
        block = part.module.get_submodule(name)
        wanted = kinds_in_block(given, name, block)
        key = (kind_of_block(block), *sorted(wanted.items()))
        blocks.setdefault(key, []).append(name)
        if key not in known:
            plan, table, refused = table_of_block(name, block, look.calls[0][name], ranks, wanted, dropping)
            known[key] = plan, table
            reasons += refused
    refuse_empty_plans(ranks, [plan for plan, _ in known.values()])
    return [(tuple(blocks[key]), table) for key, (_, table) in known.items() if table is not None], reasons


@dataclass(frozen=True)
class Pieces:
    """Conditions of a template's lines, and texts that replace its names."""

    flags: Mapping[str, bool] = field(
        default_factory=lambda: dict.fromkeys(("tensor", "context", "inside", "maths", "hiddennamed"), False)
    )
    values: Mapping[str, str] = field(
        default_factory=lambda: dict.fromkeys(("pieces", "tensor", "context", "arguments"), "")
    )


def pieces_of_script(outline: Outline) -> Pieces:
    """Return what a script with tensor or context parallelism has beside its loop; raise Unsupported with reasons."""
    parallel = outline.config.parallel
    look = _look_at_outline(outline)
    tables, reasons = _tensor_tables(look, parallel.tensor) if parallel.tensor > 1 else ((), [])
    sequence: SequenceTable | None = None
    if parallel.context > 1:
        sequence, refused = table_of_sequences(look, parallel.context)
        reasons += refused
        reasons += [_dropped_twice(blocks[0], table) for blocks, table in tables if table.dropouts]
    if reasons:
        raise Unsupported(str(cell_of(outline.config)), reasons)
    attends = any(table.attention_dropout for _, table in tables)
    attends = attends or (sequence is not None and sequence.attention_dropout)
    tensor, context = bool(tables), sequence is not None
    flags = {
        "tensor": tensor,
        "context": context,
        "inside": context or attends,
        "maths": attends or outline.config.train.schedule.name == "cosine",
        "hiddennamed": sequence is not None and isinstance(sequence.hidden, str),
    }
    inner = {
        **flags,
        "attends": attends,
        "numbers": any(table.numbers for _, table in tables),
        "dropouts": any(table.dropouts for _, table in tables),
        "transposed": any(_has_transposed(look, blocks[0], table) for blocks, table in tables),
        "drops": sequence is not None and sequence.drops,
        "tuples": look.tuples,
    }
    says = ["attention sees the whole sequence"] * context
    says += ["masks of dropout are those of one process"] * (attends or inner["drops"])
    values = {
        "tensor": str(parallel.tensor),
        "context": str(parallel.context),
        "plans": _plans_code(tables, look.part.blocks),
        "inside": ", ".join(says),
    }
    names = ["tensor"] * tensor + ["context"] * context + ["inside"] * flags["inside"]
    texts = [render_template(read_template(__package__ or "", f"{name}.txt"), inner, values) for name in names]
    values["pieces"] = "\n\n".join(texts).rstrip("\n")
    values["arguments"] = "" if sequence is None else _arguments_code(sequence)
    return Pieces(flags, values)


def _dropped_twice(block: str, table: BlockTable) -> str:
    return (
        f"parallel.context: {block}.{next(iter(table.dropouts))} drops elements of what tensor has cut, and a script "
        "does not cut its masks along the sequence as well: set its rate to 0, or leave one of both axes out of the "
        "export"
    )


def _has_transposed(look: ModelLook, block: str, table: BlockTable) -> bool:
    layers = (look.part.module.get_submodule(f"{block}.{layer}") for layer in (*table.columns, *table.rows))
    return any(is_transposed(layer) for layer in layers)


def _arguments_code(sequence: SequenceTable) -> str:
    items = {_quoted(key): repr(dim) for key, dim in sequence.arguments.items()}
    comment = "  # along which dimension the sequence goes in other arguments; None: it does not"
    head = "ARGUMENTS: dict[int | str, int | None] = "
    one = f"{head}{_dictionary(items)}{comment}"
    long = "\n".join([comment.strip(), f"{head}{_dictionary(items, 0, len(head))}"])
    return f"HIDDEN = {_quoted(sequence.hidden)}  # place or name of a block's hidden states among its arguments\n" + (
        one if len(one) <= SCRIPT_LINE_WIDTH else long
    )


def _plans_code(tables: Tables, blocks: Sequence[str]) -> str:
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
