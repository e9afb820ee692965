"""Mesh of a config in words, without torch: settings that `unipar explain` prints, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from unipar.backend import resources
from unipar.backend.refusals import Refusals, conditions_of, refusals_met
from unipar.config import Config
from unipar.utils.text import format_size
from unipar_mesh.options import options_of
from unipar_mesh.pipeline.schedule_refusals import refusals_of_torch_schedules

_FEWEST_BYTES: Final = (
    "ulysses for attention whose heads divide and in which it sends fewer bytes than gather, else gather"
)


def describe_attention(config: Config) -> str:
    """Return how attention reaches the positions of other ranks."""
    way = options_of(config).attention
    if way == "auto" and resources.choose_device(config)[0] == "cpu":
        return f"{_FEWEST_BYTES}; torch's own ring attention has kernels for CUDA only"
    return {
        "auto": f"torch's own ring attention, where it can do it; else {_FEWEST_BYTES}, and rank 0's log says why",
        "gather": "gather: keys and values of all ranks",
        "ring": "ring: keys and values pass from rank to rank",
        "ulysses": "ulysses: ranks trade their positions for some of the heads, by an all-to-all, and back by another",
        "torch": "torch's own ring attention; what it cannot do is refused",
    }[way]


def describe_proof(config: Config, parameters: int | None) -> str:
    """Return what the mesh engine compares before the first step, and what rank 0 needs for it."""
    proof = options_of(config).proof
    if proof == "off":
        return "off: it is not proved before the first step that the split model is the whole one"
    each = 8 if config.train.precision == "fp64" else 4

    def needed(copies: int) -> str:
        total = "" if parameters is None else f" = {format_size(parameters * each * copies)}"
        return f"parameters x {each * copies} bytes{total}"

    if proof == "blocks":
        return (
            "blocks: the loss, and outputs and gradients of a block of each kind, against those of the whole model; "
            f"rank 0 holds its weights, {needed(1)} of host memory, and gradients of one block at a time"
        )
    return (
        f"whole: loss and all gradients against those of the whole model; rank 0 holds its weights and gradients, "
        f"{needed(2)} of host memory, and the activations of one microbatch; options.native.proof: blocks needs "
        "gradients of one block at a time"
    )


def mesh_refusals(config: Config) -> Iterator[str]:
    """Yield a sentence for each key that has no meaning, or none yet, beside the mesh's axes."""
    axes = config.parallel.axes
    if options_of(config).proof == "blocks" and axes.sequence:
        yield (
            "options.native.proof: blocks is not available with parallel.sequence: true, where a block between others "
            "has a part of its input; take proof: whole, or leave sequence out"
        )
    if options_of(config).proof == "blocks" and axes.expert > 1:
        yield (
            "options.native.proof: blocks is not available with parallel.expert, where a block's experts have other "
            "ranks' samples too; take proof: whole"
        )
    if config.parallel.shard_over == "machine" and axes.expert > 1:
        yield (
            "parallel.shard_over: machine is not available with parallel.expert: give the number of a machine's ranks "
            "that train on different data"
        )
    if options_of(config).vocabulary == "split" and axes.tensor > 1 and axes.pipeline > 1:
        yield (
            "options.native.vocabulary: split is not available with pipeline: embedding and head lie on different "
            "stages; leave it out"
        )
    if options_of(config).attention == "torch" and axes.context > 1:
        yield from _torch_ring_refusals(config)
    yield from axes_refusals(config)
    if axes.pieces > 1:
        yield from refusals_of_torch_schedules(config)


_AXES_REFUSALS: Refusals = {
    "train.precision: bf16-master": {"axes": ("take bf16-mixed, which keeps fp32 weights", "")},
    "train.local_steps": {"axes": ("these ranks train one model", "")},
    "model.offload": {"axes": ("leave it out", "")},
    "model.sync_batchnorm": {
        "axes": ("its statistics would cover the same samples several times, or blocks that other ranks do not run", "")
    },
    "model.compile": {"split blocks": ("calls inside blocks are changed", "leave it out")},
    "model.compile: model": {"whole blocks": ("a stage leaves the model", "compile blocks")},
}


def axes_refusals(config: Config) -> Iterator[str]:
    """Yield a sentence for each key that no library takes beside blocks that unipar has split."""
    axes = config.parallel.axes
    split = axes.tensor > 1 or axes.context > 1 or axes.expert > 1
    blocks = {"split blocks": str(axes)} if split else {"whole blocks": "pipeline"}
    yield from refusals_met(conditions_of(config) | {"axes": str(axes)} | blocks, _AXES_REFUSALS)


def _torch_ring_refusals(config: Config) -> Iterator[str]:
    """Yield sentences for what torch's ring attention can never do."""
    kind, why = resources.choose_device(config)
    if kind == "cpu":
        because = f" ({why})" if why else ""
        yield (
            f"options.native.attention: torch is not available on device: cpu{because}: torch's ring attention calls "
            "its flash and efficient kernels, which are CUDA's; leave the option out (gather), or say ring"
        )
    if config.train.precision == "fp64":
        yield (
            "options.native.attention: torch is not available with train.precision: fp64, which neither flash nor "
            "efficient kernels take; leave the option out"
        )
