"""Parts of a script that cut blocks over tensor and sequences over context: tables and functions, as source code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from unipar.backend.export import (
    SCRIPT_LINE_WIDTH,
    Outline,
    read_template,
    render_template,
    uses_math,
)
from unipar.backend.offered_strategies import strategy_of
from unipar.errors import Unsupported
from unipar_mesh.look_at_model import kind_of_block
from unipar_mesh.options import options_of
from unipar_mesh.refusal_sentences import kinds_in_block, refuse_empty_plans, refuse_part, refuse_unknown_patterns
from unipar_mesh.scripts.context_table import SequenceTable, table_of_sequences
from unipar_mesh.scripts.look_at_calls import ModelLook, look_at_calls
from unipar_mesh.scripts.sequence_table import PartsTable, hidden_of_blocks, table_of_parts
from unipar_mesh.scripts.tensor_table import BlockTable, table_of_block
from unipar_mesh.scripts.vocabulary_check import refused_vocabulary
from unipar_mesh.tensor.cuts import BlockPlan, is_transposed
from unipar_mesh.tensor.vocabulary import Vocabulary, find_vocabulary

_MICROBATCHES = 8
"""Number of microbatches whose calls are looked at: an argument may be missing in some."""

Tables = Sequence[tuple[tuple[str, ...], BlockTable, PartsTable | None]]
"""Names, cuts, and the split of the sequence between them, if there is one, of each kind of block."""


def _look_at_outline(outline: Outline) -> tuple[ModelLook, list[Any]]:
    """Create the task's model with its values, and run the first microbatches through it; return these as well."""
    assert outline.load is not None
    part, samples = outline.load()
    refuse_part(part, outline.config)
    batches = samples(_MICROBATCHES)
    return look_at_calls(part, batches), batches


def _tensor_tables(look: ModelLook, ranks: int, hidden: int | str | None) -> tuple[Tables, list[str]]:
    """Return the tables of each kind of block with the blocks' names, and sentences on what a script cannot do.

    `hidden`: place or name of the hidden states in parts, or None if the sequence is whole.
    """
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
    refuse_empty_plans(ranks, [plan for plan, _ in known.values()], part.blocks)
    tables: list[tuple[tuple[str, ...], BlockTable, PartsTable | None]] = []
    for key, (plan, table) in known.items():
        names, parts = tuple(blocks[key]), None
        if hidden is not None and not reasons:
            block, call = part.module.get_submodule(names[0]), look.calls[0][names[0]]
            found = table_of_parts(names[0], block, call, plan, table, hidden, dropping, tuples=look.tuples)
            reasons += found if isinstance(found, list) else []
            parts = None if isinstance(found, list) else found
        if table is not None:
            tables.append((names, table, parts))
    return tables, reasons


@dataclass(frozen=True)
class Pieces:
    """Conditions of a template's lines, and texts that replace its names."""

    flags: Mapping[str, bool] = field(
        default_factory=lambda: dict.fromkeys(
            ("tensor", "sequence", "vocabulary", "context", "inside", "maths", "hiddennamed", "hiddenlater"), False
        )
    )
    values: Mapping[str, str] = field(
        default_factory=lambda: dict.fromkeys(("pieces", "tensor", "context", "arguments"), "")
    )


def pieces_of_script(outline: Outline) -> Pieces:
    """Return what a script with tensor or context parallelism has beside its loop; raise Unsupported with reasons."""
    parallel = outline.config.parallel
    look, batches = _look_at_outline(outline)
    hidden, reasons = hidden_of_blocks(look) if parallel.sequence else (None, [])
    tables: Tables = ()
    if parallel.tensor > 1 and not reasons:
        tables, reasons = _tensor_tables(look, parallel.tensor, hidden)
    vocabulary: Vocabulary | None = None
    if options_of(outline.config).vocabulary == "split":
        vocabulary = find_vocabulary(look.part.module, look.part.blocks, parallel.tensor)
        reasons += refused_vocabulary(look.part, batches[0], vocabulary)
    sequence: SequenceTable | None = None
    if parallel.context > 1:
        sequence, refused = table_of_sequences(look, parallel.context)
        reasons += refused
        for blocks, table, parts in tables:
            dropped = [*table.dropouts, *(() if parts is None else parts.masks)]
            reasons += [_dropped_twice(blocks[0], name) for name in dropped[:1]]
    if reasons:
        raise Unsupported(str(strategy_of(outline.config)), reasons)
    attends = any(table.attention_dropout for _, table, _ in tables)
    attends = attends or (sequence is not None and sequence.attention_dropout)
    tensor, context = bool(tables), sequence is not None
    split = [parts for _, _, parts in tables if parts is not None]
    place = hidden if sequence is None else sequence.hidden
    flags = {
        "tensor": tensor,
        "sequence": bool(split),
        "vocabulary": vocabulary is not None,
        "context": context,
        "inside": context or attends,
        "maths": attends or uses_math(outline.config),
        "hiddennamed": isinstance(place, str),
        "hiddenlater": place not in (None, 0),
    }
    inner = {
        **flags,
        "attends": attends,
        "numbers": any(table.numbers for _, table, _ in tables),
        "dropouts": any(table.dropouts for _, table, _ in tables),
        "transposed": any(_has_transposed(look, blocks[0], table) for blocks, table, _ in tables),
        "drops": sequence is not None and sequence.drops,
        "wholes": not split or vocabulary is not None,
        "behind": any(parts.behind for parts in split),
        "masks": any(parts.masks for parts in split),
        "tuples": look.tuples,
        "padding": vocabulary is not None and _pads(look.part.module, vocabulary),
    }
    says = ["attention sees the whole sequence"] * context
    says += ["masks of dropout are those of one process"] * (attends or inner["drops"])
    values = {
        "tensor": str(parallel.tensor),
        "context": str(parallel.context),
        "plans": _plans_code(tables, look.part.blocks),
        "inside": ", ".join(says),
    }
    names = [name for name in ("tensor", "sequence", "vocabulary", "context", "inside") if flags[name]]
    texts = [render_template(read_template(__package__ or "", f"{name}.txt"), inner, values) for name in names]
    values["pieces"] = "\n\n".join(texts).rstrip("\n")
    values["arguments"] = "" if sequence is None else _arguments_code(sequence)
    if sequence is None and hidden is not None:
        values["arguments"] = _hidden_code(hidden)
    values["vocabulary"] = "" if vocabulary is None else _vocabulary_code(vocabulary)
    return Pieces(flags, values)


def _dropped_twice(block: str, dropout: str) -> str:
    return (
        f"parallel.context: {block}.{dropout} drops elements of what tensor has cut, and a script "
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
    return f"{_hidden_code(sequence.hidden)}\n{one if len(one) <= SCRIPT_LINE_WIDTH else long}"


def _hidden_code(hidden: int | str) -> str:
    return f"HIDDEN = {_quoted(hidden)}  # place or name of a block's hidden states among its arguments"


def _pads(model: nn.Module, vocabulary: Vocabulary) -> bool:
    embedding: Any = model.get_submodule(vocabulary.embedding)
    return embedding.padding_idx is not None


def _vocabulary_code(vocabulary: Vocabulary) -> str:
    comment = "  # modules with a row for each word"
    return f'EMBEDDING, HEAD = "{vocabulary.embedding}", "{vocabulary.head}"{comment}'


def _plans_code(tables: Tables, blocks: Sequence[str]) -> str:
    """Return PLANS as source code."""
    split = [parts for _, _, parts in tables if parts is not None]
    several = {
        "numbers": any(table.numbers for _, table, _ in tables),
        "dropouts": any(table.dropouts for _, table, _ in tables),
        "gathers": bool(split),
        "behind": any(parts.behind for parts in split),
        "masks": any(parts.masks for parts in split),
        "partial": bool(split),
    }
    lines = ["PLANS = ["]
    for names, table, given in tables:
        parts = given or PartsTable()
        fields = {
            "blocks": _slice(names, blocks),
            "columns": _dictionary({_quoted(n): repr(sizes) for n, sizes in table.columns.items()}, 8, 8),
            "rows": _dictionary({_quoted(n): repr(sizes) for n, sizes in table.rows.items()}, 8, 5),
            "numbers": _tuple(table.numbers, 8, 8),
            "dropouts": _dictionary({_quoted(n): repr(place) for n, place in table.dropouts.items()}, 8, 9),
            "gathers": _dictionary({_quoted(n): _quoted(place) for n, place in parts.gathers.items()}, 8, 8),
            "behind": _tuple(parts.behind, 8, 7),
            "masks": _tuple(parts.masks, 8, 6),
            "partial": _tuple(parts.partial, 8, 8),
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


def _tuple(names: Sequence[str], indent: int, taken: int) -> str:
    """Return names as source code, with one a line if they are too long for the line."""
    one = f"({', '.join(map(_quoted, names))}{',' * (len(names) == 1)})"
    if len(one) + indent + taken + 1 <= SCRIPT_LINE_WIDTH:
        return one
    space = " " * indent
    return "\n".join(["(", *(f"{space}    {_quoted(name)}," for name in names), f"{space})"])


def _quoted(key: str | int) -> str:
    return f'"{key}"' if isinstance(key, str) else str(key)


def _dictionary(items: Mapping[str, str], indent: int = 0, taken: int = 0) -> str:
    """Return a dictionary as source code, with one item a line if it is too long for the line."""
    one = f"{{{', '.join(f'{key}: {value}' for key, value in items.items())}}}"
    if len(one) + indent + taken + 1 <= SCRIPT_LINE_WIDTH:
        return one
    space = " " * indent
    return "\n".join(["{", *(f"{space}    {key}: {value}," for key, value in items.items()), f"{space}}}"])
