"""Arming: a layer's forward sends each row to the rank that has its expert, and gets it back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unipar.engines.batch_transfer import to_device
from unipar_mesh.expert.exchange import AssumedRouting, Exchange
from unipar_mesh.expert.expert_layer import ExpertLayer, arguments_at, with_arguments
from unipar_mesh.expert.listed_experts import ExpertCalls, ListedExperts
from unipar_mesh.tensor.tensor_parallel import Undo

Count: TypeAlias = Callable[[str, Tensor, int], None]
"""Function that gets a layer's name, the rows that a rank sends to each expert, and how many its own experts get."""


def arm_experts(
    model: nn.Module,
    layer: ExpertLayer,
    group: dist.ProcessGroup,
    *,
    assumed: AssumedRouting | None = None,
    count: Count | None = None,
) -> Undo:
    """Let a layer, of which this rank has its own experts' parameters, compute with those of all ranks of a group.

    Return what takes that back. `assumed`: where rows go in a model without values. `count` is called in each forward
    whose rows have values.
    """
    if layer.kind == "stacked":
        module, inner = model.get_submodule(layer.name), ""
    else:
        parent, _, inner = layer.name.rpartition(".")
        module = model.get_submodule(parent)
    before = {name: vars(module).get(name) for name in ("forward", *layer.counts)}
    if layer.kind == "stacked":
        _arm_stacked(module, layer, group, assumed, count)
    else:
        _arm_list(module, inner, layer, group, assumed, count)

    def undo() -> None:
        for name, value in before.items():
            if value is None:
                delattr(module, name)
            else:
                setattr(module, name, value)

    return undo


def _arm_stacked(
    module: nn.Module,
    layer: ExpertLayer,
    group: dist.ProcessGroup,
    assumed: AssumedRouting | None,
    count: Count | None,
) -> None:
    own = layer.experts // group.size()
    for name in layer.counts:
        setattr(module, name, own)
    inner = module.forward

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        rows, numbers, weights = arguments_at(layer.places, args, kwargs)
        slots = numbers.shape[1]
        expert, order = numbers.reshape(-1).sort(stable=True)
        if assumed is None:
            exchange = _exchange(torch.bincount(expert, minlength=layer.experts), layer, group, count)
        else:
            exchange = Exchange.assumed(assumed, len(order), own, group, order.device)
        sent, weight = _send_weighted(exchange, rows[order // slots], weights.reshape(-1)[order])
        idle = len(sent) == 0  # its parameters need gradients all the same, and libraries a forward
        mine = (_one_row(sent), exchange.experts.new_zeros(1), _one_row(weight)) if idle else None
        given, chosen, scale = mine or (sent, exchange.experts, weight)
        changed, named = with_arguments(layer.places, (given, chosen[:, None], scale[:, None]), args, kwargs)
        out = inner(*changed, **named)
        back = exchange.back(out[:0] if idle else out)
        return back[_inverse(order)].view(-1, slots, back.shape[-1]).sum(1).to(rows.dtype)

    module.forward = forward


def _arm_list(
    module: nn.Module,
    inner: str,
    layer: ExpertLayer,
    group: dist.ProcessGroup,
    assumed: AssumedRouting | None,
    count: Count | None,
) -> None:
    experts: Any = getattr(module, inner)
    own = layer.own(group.rank(), group.size())
    listed = ListedExperts(module, inner, ExpertCalls(experts))

    def run_experts(given: Mapping[int, Tensor]) -> Mapping[int, Tensor]:
        like = next(iter(given.values()))[:0]
        parts = [given.get(number, like) for number in range(layer.experts)]
        numbers = [len(part) for part in parts]
        if assumed is None:
            exchange = _exchange(to_device(torch.tensor(numbers), like.device), layer, group, count)
        else:
            exchange = Exchange.assumed(assumed, sum(numbers), len(own), group, like.device)
        order = exchange.experts.argsort(stable=True)
        rows = exchange.there(torch.cat(parts))[order]
        outputs: list[Tensor] = []
        for number, part in zip(own, rows.split(list(exchange.loads)), strict=True):
            outputs.append(experts[number](part) if len(part) else experts[number](_one_row(part))[:0])
        back = exchange.back(torch.cat(outputs)[_inverse(order)])
        return dict(enumerate(back.split(numbers)))

    def forward(*args: Any, **kwargs: Any) -> Any:
        return listed.run(run_experts, args, kwargs)

    module.forward = forward


def _send_weighted(exchange: Exchange, rows: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows and their weights as the ranks of their experts get them, in one message if they have one dtype."""
    if rows.dtype != weights.dtype or rows.ndim != 2:
        return exchange.there(rows), exchange.there(weights)
    both = exchange.there(torch.cat([rows, weights[:, None]], 1))
    return both[:, :-1].contiguous(), both[:, -1]


def _exchange(counts: Tensor, layer: ExpertLayer, group: dist.ProcessGroup, count: Count | None) -> Exchange:
    exchange = Exchange.of(counts, group)
    if count is not None:
        count(layer.name, counts, sum(exchange.received))
    return exchange


def _one_row(rows: Tensor) -> Tensor:
    """Return one row of zeros that depends on no rows."""
    return torch.cat([rows, rows.new_zeros((1, *rows.shape[1:]))])


def _inverse(order: Tensor) -> Tensor:
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    return inverse
