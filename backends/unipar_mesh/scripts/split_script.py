"""Export of tensor and context parallelism as a script for PyTorch alone, with FSDP2 over the ranks beside them."""

from __future__ import annotations

from collections.abc import Iterator

from unipar.backend.export import Outline, constant_tuple, fill_template, format_call, optimizer_code
from unipar.backend.offered_strategies import strategy_of
from unipar.errors import Unsupported
from unipar_mesh.options import options_of
from unipar_mesh.scripts.script_parts import pieces_of_script


def split_script(outline: Outline) -> str:
    """Return the text of train.py; raise Unsupported with a reason for each thing that it cannot carry."""
    parallel = outline.config.parallel
    if reasons := [*refused_axes(outline)]:
        raise Unsupported(str(strategy_of(outline.config)), reasons)
    pieces = pieces_of_script(outline)
    tensor, context = pieces.flags["tensor"], pieces.flags["context"]
    seats = ["sequences"] * context + ['mesh["tensor"].get_local_rank()'] * tensor
    flags = {**pieces.flags, "shards": parallel.shard != "nothing", "boundary": parallel.shard == "optimizer"}
    values = {
        **pieces.values,
        "axes": str(parallel.axes),
        "about": "\n".join(_about(tensor=tensor, context=context)),
        "blocks": constant_tuple("BLOCKS", [f'"{name}"' for name in outline.blocks], "submodules, in their order"),
        "mesh": "\n".join(_mesh_code(tensor=tensor, context=context)),
        "inside_words": ", ".join(seats),
        "reshard": str(parallel.shard == "parameters"),
        "optimizer": optimizer_code(outline, split=flags["shards"]),
    }
    return fill_template(outline, "unipar_mesh", "scripts/split.txt", flags, values)


def refused_axes(outline: Outline) -> Iterator[str]:
    """Yield why a script cannot have these axes, whatever the model."""
    if (way := options_of(outline.config).attention) in ("ring", "torch"):
        yield (
            f"options.native.attention: {way}: a script gathers keys and values of all ranks, which computes the same; "
            "say gather"
        )


def _about(*, tensor: bool, context: bool) -> Iterator[str]:
    if tensor:
        yield "Ranks of `tensor` have a part of each block's matrices. PLANS was found by trying the blocks, whose"
        yield "parts were compared with the whole ones when this was written."
    if context:
        yield "Ranks of `context` have a part of each sequence from the first block to the last. Each computes the loss"
        yield "of the whole sequence, so that the mean over ranks is what one process computes."


def _mesh_code(*, tensor: bool, context: bool) -> Iterator[str]:
    names = ["CONTEXT"] * context + ["TENSOR"] * tensor
    data = f"world // {names[0]}" if len(names) == 1 else f"world // ({' * '.join(names)})"
    axes = ", ".join(f'"{name}"' for name in ("data", *(n.lower() for n in names)))
    words = ["device.type", f"({', '.join([data, *names])})", f"mesh_dim_names=({axes})"]
    yield format_call("    mesh = init_device_mesh", words)
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
