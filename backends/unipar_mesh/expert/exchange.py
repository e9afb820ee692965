"""Exchange of rows between the ranks that have all experts together: exact counts, nothing padded, nothing dropped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast, final

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override


@final
class _AllToAll(torch.autograd.Function):
    """Rows to other ranks, `sent` to each, and from them; gradients go the other way."""

    @staticmethod
    @override
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, rows: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _send(rows, sent, received, group)

    @staticmethod
    @override
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _send(gradient, ctx.received, ctx.sent, ctx.group), None, None, None


def _send(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    out = rows.new_empty((sum(received), *rows.shape[1:]))
    dist.all_to_all_single(out, rows.contiguous(), list(received), list(sent), group=group)
    return out


AssumedRouting = Literal["even", "worst"]
"""Way of rows in a model without values: each rank gets as many as it sends, or this one gets those of all ranks."""


@final
@dataclass(frozen=True)
class Exchange:
    """Ways of rows, ordered by expert, to the ranks that have their experts, and back."""

    group: dist.ProcessGroup
    experts: Tensor
    """Expert of each row that this rank gets, counted among its own."""

    sent: Sequence[int]
    """Rows that this rank sends to each."""

    received: Sequence[int]

    loads: Sequence[int]
    """Rows that each of this rank's experts gets."""

    @classmethod
    def of(cls, counts: Tensor, group: dist.ProcessGroup) -> Exchange:
        """Return the exchange of rows of which `counts` are for each expert; the host waits once, for all numbers."""
        ranks = group.size()
        own = len(counts) // ranks
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=group)
        to_ranks, from_ranks = torch.stack([counts, theirs]).view(2, ranks, own).tolist()
        sent, received = [sum(rows) for rows in to_ranks], [sum(rows) for rows in from_ranks]
        numbers = torch.arange(own, device=counts.device).repeat(ranks)
        experts = numbers.repeat_interleave(theirs, output_size=sum(received))
        return cls(group, experts, sent, received, [sum(rows) for rows in zip(*from_ranks, strict=True)])

    @classmethod
    def assumed(
        cls, routing: AssumedRouting, rows: int, own: int, group: dist.ProcessGroup, device: torch.device
    ) -> Exchange:
        """Return the exchange of rows whose experts are not known, on a rank with `own` of them."""
        ranks = group.size()
        counts = torch.empty(own * ranks, dtype=torch.int64, device=device)
        dist.all_to_all_single(torch.empty_like(counts), counts, group=group)
        if routing == "even":
            sent = received = [rows // ranks + (rank < rows % ranks) for rank in range(ranks)]
        else:
            sent, received = [rows, *[0] * (ranks - 1)], [rows] * ranks
        total = sum(received)
        experts = torch.arange(total, dtype=torch.int64, device=device).remainder_(own)
        loads = [total // own + (expert < total % own) for expert in range(own)]
        return cls(group, experts, sent, received, loads)

    def there(self, rows: Tensor) -> Tensor:
        """Return the rows for this rank's experts."""
        return cast("Tensor", _AllToAll.apply(rows, self.sent, self.received, self.group))

    def back(self, rows: Tensor) -> Tensor:
        """Return what the experts have made of this rank's rows, in the order in which these were sent."""
        return cast("Tensor", _AllToAll.apply(rows, self.received, self.sent, self.group))
