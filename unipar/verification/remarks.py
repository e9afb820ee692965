"""Remarks of a verification on the task: what its numbers depend on besides the strategy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unipar.backend.precision import FP8_RECIPES
from unipar.config import Precision
from unipar.results.verdicts import CutKind
from unipar.utils.text import count_of, first_few, patterns_of

CUT_WAYS_OUT: dict[CutKind, str] = {
    "sum": "return the mean over the batch from loss(), as reduction='mean' gives it: the gradient of a sum grows with "
    "the size of a microbatch",
    "batch statistics": "use GroupNorm or LayerNorm, or on GPUs model.sync_batchnorm: true; or keep batch.micro fixed "
    "and report it with the result",
    "samples combined": "if the loss is a mean over tokens or the like, define weight(batch); if it compares samples "
    "with one another, keep batch.micro fixed and report it with the result",
}
"""Way out for each kind of dependence on how a batch is cut."""

DROPOUT_REMARK = "dropout is set to 0 for this verification"
"""Beginning of the remark on a task with dropout."""


def describe_task(facts: Mapping[str, Any]) -> list[str]:
    """Return the facts about the task that matter for the comparison, as sentences."""
    remarks: list[str] = []
    if quiet := facts["quiet"]:
        remarks.append(f"{DROPOUT_REMARK}: {first_few(quiet)}")
    if trained := facts["trained_in_eval"]:
        remarks.append(
            f"trained modules are in eval mode ({first_few(trained)}): dropout inside is off, and BatchNorm uses its "
            "running statistics"
        )
    if facts["stream"]:
        remarks.append(
            "data() returns a stream: its first samples were read once and kept, and every strategy takes its samples "
            "from these; how ranks and workers read the stream itself is not compared"
        )
    if len(facts["parts"]) > 1:
        remarks.append(
            f"the parts ({first_few(facts['parts'])}) have losses of their own; whether these depend on how a "
            "batch is split was not checked; each step of each part counts as one step"
        )
    if facts["optimizer"]:
        remarks.append(
            "the task's optimizer uses whole tensors (a step on a tensor differs from a step on its halves): "
            "strategies that keep a tensor in parts cannot give the same numbers as one process"
        )
    if not facts["readable"]:
        remarks.append("no tensors were found in the batches, so it is not compared which samples are used")
    if facts["draws"]:
        remarks.append("the loss draws random numbers")
    elif facts["apart"]:
        figures = f"{facts['batch_loss']:.6g} for a batch, {facts['halves_loss']:.6g} for its halves"
        if norms := facts["norms"]:
            remarks.append(
                f"BatchNorm without sync takes the statistics of a microbatch on one rank ({first_few(norms)}): the "
                f"loss depends on how a batch is split, {figures}"
            )
        elif "gradient" in facts:
            remarks.append(
                "the gradient of a batch is not the mean of its halves' gradients, although the losses are equal to "
                f"rounding: most of all that of {facts['gradient']}, by {facts['gradient_off']:.1e} of its norm; the "
                "loss has a small term that combines samples, as a balancing of experts does"
            )
        elif facts["sum"]:
            remarks.append(f"the loss of a batch is the sum of its halves' losses, not their mean: {figures}")
        else:
            remarks.append(
                "the loss of a batch is not the mean of its halves' losses: it combines samples (experts with "
                "a capacity do, since dropped tokens depend on the cut), or it is a mean over something that "
                f"weight(batch) does not count; {figures}"
            )
    return remarks


def describe_fp8(precision: Precision, kernels: Mapping[str, str], exact: str, digits: int | None) -> str:
    """Return which linear layers multiply in fp8, by what, and to how many digits the losses are those of `exact`."""
    by = " and ".join(dict.fromkeys(kernels.values()))
    agrees = "to the bit" if digits is None else f"to {count_of(digits, 'digit')}"
    return (
        f"fp8 ({FP8_RECIPES[precision]}, {by}) in {count_of(len(kernels), 'linear layer')}, {patterns_of(kernels)}: "
        f"the losses of one process agree with those of {exact} {agrees}"
    )


def kind_of_cut_dependence(facts: Mapping[str, Any]) -> CutKind | None:
    """Return how the training depends on the way in which a batch is cut; None if it does not.

    A loss that draws random numbers draws others for other microbatches, as it would with another seed; whether it
    depends on the cut otherwise cannot be seen.
    """
    if facts["draws"] or not facts["apart"]:
        return None
    return "batch statistics" if facts["norms"] else "sum" if facts["sum"] else "samples combined"
