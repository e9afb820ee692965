"""Cuts of matrices over the ranks of a tensor group: data of a plan, and which elements a rank holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from unipar.backend import Region
from unipar_mesh.tensor.block_calls import CallKind


@dataclass(frozen=True)
class Cut:
    """Cut of one matrix: `column` cuts its output, `row` its input."""

    kind: Literal["column", "row"]
    groups: int = 1
    """Parts of the cut dimension that are cut each by itself, as in a fused projection of query, key and value."""

    sizes: tuple[int, ...] = ()
    """Sizes of the groups where they differ; else empty."""

    def spans(self, width: int, rank: int, ranks: int) -> list[tuple[int, int]]:
        """Return (start, length) of each group's part along the cut dimension, which is `width` long."""
        sizes = self.sizes or (width // self.groups,) * self.groups
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        return [(start + size // ranks * rank, size // ranks) for start, size in zip(starts, sizes, strict=True)]


@dataclass(frozen=True)
class Rewrite:
    """Change to one call in a block's forward, which is made on a part instead of the whole."""

    kind: str
    """sizes, size, split, slice: numbers along the cut dimension; enter, part: whole tensors among the arguments;
    dropout, attention: masks."""

    dim: int = 0
    """Cut dimension, counted from the right (-1 is the last), or for `sizes` the place of the number to divide."""

    arguments: tuple[tuple[tuple[str | int, ...], int | None], ...] = ()
    """For `enter` and `part`: where a whole tensor is among the arguments, and which dimension is to be cut."""

    groups: int = 1
    sequence: bool = False
    """Whether it is the sequence that is cut, in parts of which the last ones may be shorter."""


@dataclass(frozen=True)
class SequencePlan:
    """Plan of a block whose hidden states are cut along the sequence; dimensions are counted from the right."""

    dim: int
    """Dimension of the hidden states that is cut, counted from the left."""

    gathered: Mapping[str, tuple[int | None, ...]]
    """Modules that take a part and need the whole: the dimension to gather each input along, None for whole ones."""

    scattered: Mapping[str, int]
    """Modules whose partial sums become parts, with the dimension."""

    on_parts: tuple[str, ...]
    """Whole matrices that are used on a part: their gradients are added up over the ranks."""

    outputs: tuple[int, ...]
    """Places of the results that are parts, among all."""

    joined: tuple[str, ...] = ()
    """Calls that need all positions, with their lines: what they are given is gathered."""


@dataclass(frozen=True)
class BlockPlan:
    """Cuts of one block's matrices, and what its forward needs to run on parts."""

    cuts: Mapping[str, Cut]
    """Cuts by name of the module within the block."""

    whole: Mapping[str, str]
    """Matrices that stay whole, by name, each with the reason."""

    trials: int
    ranks: int
    sites: Mapping[str, tuple[Rewrite, ...]] = field(default_factory=dict[str, tuple[Rewrite, ...]])
    """Calls that are rewritten, by their place in the program."""

    sequence: SequencePlan | None = None
    """Split of the sequence between the matrices; None: it is not split."""

    call: CallKind = ()
    """Way in which the block was called on trial: `sites` are those of such calls."""


@dataclass(frozen=True)
class ParameterCut:
    """Part of one parameter that a rank holds."""

    shape: tuple[int, ...]
    """Shape of the whole parameter."""

    dim: int
    """Dimension that is cut."""

    cut: Cut
    ranks: int

    def local_shape(self) -> tuple[int, ...]:
        """Return the shape of one rank's part."""
        return tuple(n // self.ranks if d == self.dim else n for d, n in enumerate(self.shape))

    def local(self, full: Tensor, rank: int) -> Tensor:
        """Return a rank's part of the whole parameter, as a contiguous copy."""
        parts = [full.narrow(self.dim, *span) for span in self.cut.spans(self.shape[self.dim], rank, self.ranks)]
        return torch.cat(parts, self.dim) if len(parts) > 1 else parts[0].clone(memory_format=torch.contiguous_format)

    def regions(self, rank: int, first: int = 0, rows: int | None = None) -> list[tuple[Region, tuple[slice, ...]]]:
        """Return the regions of the whole that `rows` rows of a rank's part hold, from row `first` on.

        Beside each region, the elements of the whole part (not of its rows alone) in the same order.
        """
        rows = self.local_shape()[0] - first if rows is None else rows
        if rows <= 0:
            return []
        row = 1
        for n in self.shape[1:]:
            row *= n
        spans = self.cut.spans(self.shape[self.dim], rank, self.ranks)
        if self.dim != 0:  # each row holds a part of every group; matrices only
            at, regions = 0, list[tuple[Region, tuple[slice, ...]]]()
            for start, length in spans:
                own = (slice(first, first + rows), slice(at, at + length))
                regions.append((Region(first * row + start, length, row, rows), own))
                at += length
            return regions
        at, regions = 0, []
        for start, length in spans:
            low, high = max(first, at), min(first + rows, at + length)
            if low < high:
                region = Region((start + low - at) * row, (high - low) * row)
                regions.append((region, (slice(low, high),)))
            at += length
        return regions


class OwnPart(NamedTuple):
    """The part of one parameter that this rank holds."""

    cut: ParameterCut
    seat: int
    """This rank's place among those that hold parts."""

    def local(self, full: Tensor) -> Tensor:
        """Return this rank's part of the whole parameter."""
        return self.cut.local(full, self.seat)


def is_transposed(module: nn.Module) -> bool:
    """Return True for a linear layer whose weight has the input first, as that of transformers' GPT-2."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def is_linear(module: nn.Module) -> bool:
    """Return True for a module that multiplies by one matrix, named `weight`, and may add a `bias`."""
    names = {name for name, _ in module.named_parameters(recurse=False)}
    known = isinstance(module, nn.Linear) or is_transposed(module)
    return known and names <= {"weight", "bias"} and "weight" in names and not any(True for _ in module.children())


def cut_dimension(cut: Cut, parameter: str, *, transposed: bool) -> int | None:
    """Return the dimension along which `weight` or `bias` is cut; None for what stays whole."""
    if parameter == "bias":
        return 0 if cut.kind == "column" else None
    return int((cut.kind == "row") != transposed)


def linear_part(cut: Cut, parameter: str, full: Tensor, *, transposed: bool, rank: int, ranks: int) -> Tensor:
    """Return a rank's part of a linear layer's whole `weight` or `bias`, as a contiguous copy."""
    dim = cut_dimension(cut, parameter, transposed=transposed)
    return full.clone() if dim is None else ParameterCut(tuple(full.shape), dim, cut, ranks).local(full, rank)


def cut_parameters(block: nn.Module, plan: BlockPlan) -> dict[str, ParameterCut]:
    """Return how each parameter of a whole block is cut, by its name in the block; whole ones are left out."""
    cuts: dict[str, ParameterCut] = {}
    for name, cut in plan.cuts.items():
        module: Any = block.get_submodule(name)
        transposed = is_transposed(module)
        for key, parameter in module.named_parameters(recurse=False):
            own = Cut("column") if key in ("q_proj_weight", "k_proj_weight", "v_proj_weight") else cut
            kind = "bias" if key.endswith("bias") else "weight"
            dim = cut_dimension(own, kind, transposed=transposed)
            if dim is not None:
                cuts[f"{name}.{key}"] = ParameterCut(tuple(parameter.shape), dim, own, plan.ranks)
    return cuts
