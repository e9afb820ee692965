"""Tables of a script, which say how a model is in parts over ranks: derived as for a run, and tried out."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from torch import nn

from unipar.backend.export import Outline
from unipar.backend.offered_strategies import strategy_of
from unipar.errors import Unsupported
from unipar_mesh.options import options_of
from unipar_mesh.refusal_sentences import refuse_empty_plans, refuse_part
from unipar_mesh.scripts.context_table import table_of_arguments
from unipar_mesh.scripts.look_at_calls import ModelLook
from unipar_mesh.scripts.mesh_parts import ArgumentPlace, CutPlan
from unipar_mesh.scripts.sequence_table import hidden_of_blocks, plan_of_parts
from unipar_mesh.scripts.tensor_table import plan_for_script
from unipar_mesh.tensor.cuts import BlockPlan
from unipar_mesh.tensor.tensor_model import blocks_by_kind
from unipar_mesh.tensor.vocabulary import Vocabulary, find_vocabulary

_MICROBATCHES = 8
"""Number of microbatches whose calls are looked at: an argument may be missing in some."""


@dataclass(frozen=True)
class ModelTables:
    """Parts of a model as literals of a script."""

    plans: tuple[CutPlan, ...] = ()
    """Cuts of each kind of block over `tensor`."""

    hidden: ArgumentPlace = 0
    """Place or name of the hidden states among a block's arguments."""

    arguments: Mapping[ArgumentPlace, int | None] | None = None
    """Dimension of positions of each other argument that is a tensor; None if `context` does not cut sequences."""

    vocabulary: Vocabulary | None = None


def tables_of(outline: Outline) -> ModelTables:
    """Return the tables of a task's model, which is created and run on the first microbatches; raise Unsupported."""
    assert outline.load is not None
    parallel = outline.config.parallel
    part, samples = outline.load()
    refuse_part(part, outline.config)
    vocabulary: Vocabulary | None = None
    if options_of(outline.config).vocabulary == "split":
        vocabulary = find_vocabulary(part.module, part.blocks, parallel.tensor)
    look = ModelLook(part, () if vocabulary is None else (vocabulary.embedding, vocabulary.head))
    look.run(samples(_MICROBATCHES))
    tables, reasons = ModelTables(), list[str]()
    sequence: ArgumentPlace | None = None
    if parallel.sequence:
        sequence, reasons = hidden_of_blocks(look)
        tables = replace(tables, hidden=sequence)
    if parallel.tensor > 1 and not reasons:
        plans, reasons = _plans_of_blocks(look, parallel.tensor, sequence)
        tables = replace(tables, plans=plans)
    if vocabulary is not None:
        reasons += dict.fromkeys(_vocabulary_refusals(look, vocabulary))
        tables = replace(tables, vocabulary=vocabulary)
    if parallel.context > 1:
        hidden, arguments, refused = table_of_arguments(look, parallel.context)
        reasons += [*refused, *_dropped_twice(tables.plans)]
        tables = replace(tables, hidden=hidden, arguments=arguments)
    if reasons:
        raise Unsupported(str(strategy_of(outline.config)), reasons)
    return tables


def _plans_of_blocks(
    look: ModelLook, ranks: int, sequence: ArgumentPlace | None
) -> tuple[tuple[CutPlan, ...], list[str]]:
    """Return the plan of each kind of block that is cut, and sentences on what a script cannot do.

    `sequence`: place or name of the hidden states, if these are in parts along the sequence as well.
    """
    part, reasons = look.part, list[str]()
    dropping = {draw.line for draw in look.draws if draw.drops}
    derived: list[tuple[tuple[str, ...], BlockPlan, CutPlan | None]] = []
    for names, wanted in blocks_by_kind(part.module, part.blocks, part.tensor or {}):
        block, call = part.module.get_submodule(names[0]), look.calls[0][names[0]]
        plan, cuts, refused = plan_for_script(names[0], block, call, ranks, wanted, dropping)
        derived.append((tuple(names), plan, cuts))
        reasons += refused
    refuse_empty_plans(ranks, [plan for _, plan, _ in derived], part.blocks)
    plans: list[CutPlan] = []
    for names, plan, cuts in derived:
        if sequence is not None and not reasons:
            block, call = part.module.get_submodule(names[0]), look.calls[0][names[0]]
            cuts, refused = plan_of_parts(names[0], block, call, plan, cuts, sequence, dropping)
            reasons += refused
        plans += [] if cuts is None else [replace(cuts, blocks=names)]
    return tuple(plans), reasons


def _dropped_twice(plans: Collection[CutPlan]) -> Iterator[str]:
    """Yield a sentence for each kind of block with dropout whose masks both axes would cut."""
    for plan in plans:
        for name in [*plan.dropouts, *plan.masks][:1]:
            yield (
                f"parallel.context: {plan.blocks[0]}.{name} drops elements of what tensor has cut, and a script "
                "does not cut its masks along the sequence as well: set its rate to 0, or leave one of both axes out "
                "of the export"
            )


def _vocabulary_refusals(look: ModelLook, vocabulary: Vocabulary) -> Iterator[str]:
    """Yield reasons why a script cannot divide a model's embedding and head over their words."""
    table = look.part.module.get_submodule(vocabulary.embedding)
    own = type(table).forward is not nn.Embedding.forward or "forward" in vars(table)
    if own or {name for name, _ in table.named_parameters(recurse=False)} != {"weight"}:
        yield (
            f"options.native.vocabulary: {vocabulary.embedding} is a {type(table).__name__}, which reads words in a "
            "way of its own, and a script cuts a plain nn.Embedding: leave the option out of the export"
        )
        return
    for parameter, function, line in look.uses:
        module = parameter.rpartition(".")[0]
        yield (
            f"options.native.vocabulary: {parameter} is used outside of {module} ({function} at {line}), where a rank "
            f"has some of its words only: call {module} instead, or leave the option out of the export"
        )
