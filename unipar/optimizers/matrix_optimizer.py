"""`MatrixOptimizer`: base class of optimizers that update each matrix as a whole, and everything else by AdamW."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer
from typing_extensions import override

from unipar.errors import TaskError
from unipar.optimizers.closure import loss_of_closure
from unipar.optimizers.matrix_parts import (
    FlatMatrix,
    MatrixLayout,
    MatrixPart,
    assign_owners,
    gather_gradients,
    scatter_updates,
)


class MatrixOptimizer(Optimizer, ABC):
    """Optimizer that gets each matrix whole on one rank, whatever splits it, and leaves other parameters to AdamW.

    A subclass defines `direction`, as if there were one process. Its state of a matrix is on that rank alone, where it
    is saved and loaded by name, in any number of ranks.

    Examples:
        >>> class Signs(unipar.MatrixOptimizer):
        ...     def direction(self, gradient, state, group):
        ...         return gradient.sign()
        >>> weight = torch.nn.Parameter(torch.zeros(2, 2))
        >>> optimizer = Signs([{"params": [weight], "matrices": True}], {"lr": 0.5, "weight_decay": 0.0})
        >>> weight.grad = torch.ones(2, 2)
        >>> _ = optimizer.step()
        >>> weight.tolist()
        [[-0.5, -0.5], [-0.5, -0.5]]
    """

    def __init__(
        self, params: Iterable[Tensor] | Iterable[dict[str, Any]], defaults: Mapping[str, Any] | None = None
    ) -> None:
        """Take groups like any optimizer of PyTorch's; `defaults`: settings of groups that do not say otherwise.

        AdamW's settings are among them: `betas`, `eps`, `fused` and so on.
        """
        self._vectors = AdamW([torch.zeros(1)], weight_decay=0.0)
        groups: Any = params
        super().__init__(groups, {**self._vectors.defaults, **(defaults or {})})
        self._places: dict[Tensor, tuple[MatrixLayout, int] | None] = {}
        self._flat: Mapping[Tensor, Sequence[FlatMatrix]] = {}

    @abstractmethod
    def direction(self, gradient: Tensor, state: dict[str, Any], group: Mapping[str, Any]) -> Tensor:
        """Return the direction of a matrix, of its shape: it becomes (1 - lr * weight_decay) * matrix - lr * direction.

        `state` is empty at first and kept for this matrix. `gradient` may be changed in place.
        """

    @final
    def separate(self, matrices: Collection[Tensor]) -> None:
        """Give matrices groups of their own, unless their group says `matrices: False`."""
        ids = {id(p) for p in matrices}
        groups: list[dict[str, Any]] = []
        for group in self.param_groups:
            for wanted in (True, False):
                own = [p for p in group["params"] if (id(p) in ids and group.get("matrices", True)) is wanted]
                if own:
                    groups.append({**group, "params": own, "matrices": wanted})
        self.param_groups = groups

    @final
    def use_flat_tensors(self, flat: Mapping[Tensor, Sequence[FlatMatrix]]) -> None:
        """Update the matrices inside these flat tensors, which a library has put into the groups in their place.

        On each rank the same matrices are in the flat tensors of the same step.
        """
        self._flat = flat
        matrices = [matrix for several in flat.values() for matrix in several]
        layouts = [matrix.layout for matrix in matrices]
        places = zip(layouts, assign_owners(layouts), strict=True)
        self._places = {matrix.parameter: place for matrix, place in zip(matrices, places, strict=True)}

    @override
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        loss = loss_of_closure(closure)
        self._update_vectors()
        self._update_matrices()
        return loss

    @final
    def owns(self, p: Tensor) -> bool | None:
        """Return whether this rank has the state of a matrix that is split; None if `p` is no such matrix."""
        place = self._place(p) if isinstance(p, DTensor) or self._flat else None
        if place is None:
            return None
        return place[0].group is None or dist.get_rank(place[0].group) == place[1]

    def _update_vectors(self) -> None:
        """Update everything that is no matrix, by AdamW."""
        groups = [
            {**group, "params": own}
            for group in self.param_groups
            if (own := [p for p in group["params"] if not is_matrix(p, group)])
        ]
        for p in (p for group in groups for p in group["params"]):
            if (state := self.state.get(p)) and "exp_avg" not in state:
                state.clear()  # loaded from a run in which it was a matrix
        if groups:
            self._vectors.param_groups, self._vectors.state = groups, self.state
            self._vectors.step()

    def _update_matrices(self) -> None:
        parts = [
            part
            for group in self.param_groups
            for p in group["params"]
            if p.grad is not None and is_matrix(p, group)
            for part in self._parts_of(p, group)
        ]
        gradients, updates = gather_gradients(parts), dict[int, Tensor]()
        for number in sorted(gradients):
            part = parts[number]
            state: dict[str, Any] = self.state[part.parameter]
            direction = _checked(self.direction(gradients.pop(number), state, part.settings), part.layout.shape)
            # multiplied before it is sent: a sum with a factor rounds otherwise where a part's vector ends
            updates[number] = direction.to(part.gradient.dtype).mul(part.settings["lr"])
        for number, update in scatter_updates(parts, updates).items():
            part = parts[number]
            part.weight.mul_(1.0 - part.settings["lr"] * part.settings["weight_decay"]).sub_(update)

    def _parts_of(self, p: Tensor, group: Mapping[str, Any]) -> Iterator[MatrixPart]:
        """Yield this rank's part of a matrix, or of each matrix in a flat tensor."""
        assert p.grad is not None
        weight, gradient = _row(p), _row(p.grad)
        if p not in self._flat:
            if (place := self._place(p)) is not None:
                yield MatrixPart(p, *place, group, weight, gradient)
            return
        for matrix in self._flat[p]:
            layout, place = matrix.layout, self._place(matrix.parameter)
            assert place is not None
            here = 0 if layout.group is None else dist.get_rank(layout.group)
            where = matrix.first, layout.ranges[here][1]
            yield MatrixPart(matrix.parameter, *place, group, weight.narrow(0, *where), gradient.narrow(0, *where))

    def _place(self, p: Tensor) -> tuple[MatrixLayout, int] | None:
        """Return where a matrix is, and who updates it: all are shared out at once; None if `p` is no matrix."""
        if p not in self._places and not self._flat:
            known = [(q, is_matrix(q, group)) for group in self.param_groups for q in group["params"]]
            matrices = [q for q, is_full in known if is_full]
            layouts = [MatrixLayout.of(q) for q in matrices]
            self._places = dict.fromkeys(q for q, _ in known)
            self._places |= dict(zip(matrices, zip(layouts, assign_owners(layouts), strict=True), strict=True))
        return self._places.get(p)


def is_matrix(p: Tensor, group: Mapping[str, Any]) -> bool:
    """Return whether a parameter is updated as a matrix: as its group says, else if it has two dimensions."""
    return bool(group.get("matrices", p.ndim == 2))


def _checked(direction: Any, shape: tuple[int, ...]) -> Tensor:
    """Return what `direction` gave; raise TaskError unless it is a tensor of the matrix's shape."""
    if isinstance(direction, Tensor) and tuple(direction.shape) == shape:
        return direction
    shown = f"a tensor of shape {tuple(direction.shape)}" if isinstance(direction, Tensor) else repr(direction)
    raise TaskError(
        f"direction() returned {shown} for a matrix of shape {shape}: return a tensor of its shape, which, times the "
        "rate, is subtracted from it"
    )


def _row(t: Tensor) -> Tensor:
    """Return this rank's elements of a tensor as one row that shares its memory."""
    local = t.to_local() if isinstance(t, DTensor) else t
    if not local.is_contiguous():
        raise TaskError(
            f"a matrix of {tuple(t.shape)} is not contiguous in memory, so that its optimizer cannot send it by "
            "ranges: make it contiguous in model()"
        )
    return local.detach().view(-1)
