"""Names for the parameters that an optimizer of torch numbers, of models whose parameters look alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from unipar.checkpoint.importing.found_state import ModelState, StateCollector
from unipar.checkpoint.importing.parameter_order import names_by_number
from unipar.errors import CheckpointError

Groups = Callable[[Any], list[dict[str, Any]]]


class Alike(nn.Module):
    """Two equal layers, then a smaller one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)


NAMES = ["a.weight", "a.bias", "b.weight", "b.bias", "c.weight", "c.bias"]


def named(groups: Groups, of_task: Sequence[Sequence[str]] = (), without: Sequence[str] = ()) -> list[str]:
    """Return the names that an optimizer's parameters get, once it has taken a step; `without`: none for these."""
    net = Alike()
    optimizer = torch.optim.AdamW(groups(net))
    for name, p in net.named_parameters():
        p.grad = None if name in without else torch.ones_like(p)
    optimizer.step()
    shapes = {name: list(p.shape) for name, p in net.named_parameters()}
    into = StateCollector("there", ModelState(shapes, list(shapes), {}, [], "float32", groups=of_task))
    found = names_by_number(optimizer.state_dict(), into)
    return [found[number] for number in range(len(found))]


def true_names(groups: Groups) -> list[str]:
    """Return the names that the parameters really have, in the order of the groups."""
    net = Alike()
    names = {id(p): name for name, p in net.named_parameters()}
    return [names[id(p)] for group in groups(net) for p in group["params"]]


def in_one(net: Any) -> list[dict[str, Any]]:
    return [{"params": list(net.parameters())}]


def in_two(first: Callable[[Any], list[nn.Parameter]]) -> Groups:
    """Return a function that makes two groups of a net's parameters, the second of all others in their order."""

    def groups(net: Any) -> list[dict[str, Any]]:
        chosen = first(net)
        rest = [p for p in net.parameters() if all(p is not one for one in chosen)]
        return [{"params": chosen}, {"params": rest}]

    return groups


@pytest.mark.parametrize(
    "groups",
    [
        in_one,
        in_two(lambda net: [p for p in net.parameters() if p.ndim > 1]),
        in_two(lambda net: [p for p in net.parameters() if p.ndim < 2]),
        in_two(lambda net: list(net.c.parameters())),
        in_two(lambda net: [net.a.bias, net.b.bias, net.c.weight]),
    ],
)
def test_shapes_tell_which_parameters_are_in_which_group(groups: Groups) -> None:
    """All in one group, matrices first or last, a head of its own shapes: there is one order that fits."""
    assert named(groups) == true_names(groups)


def test_a_parameter_without_a_state_takes_the_place_that_is_left() -> None:
    """A bias that never had a gradient has no shape in the file; the others leave one place for it."""
    groups = in_two(lambda net: [p for p in net.parameters() if p.ndim > 1])
    assert named(groups, without=["b.bias"]) == true_names(groups)


HEAD_FIRST = in_two(lambda net: list(net.b.parameters()))


def test_where_several_orders_fit_it_is_refused() -> None:
    """A group of b, then one of a and c: a and b have the same shapes, and a wrong guess would be seen by nobody."""
    with pytest.raises(CheckpointError) as caught:
        named(HEAD_FIRST)
    assert str(caught.value) == (
        "there: the optimizer has its parameters by number, in groups of 2, 4, and shapes do not tell which of the "
        "model's parameters are in which group: let groups(model) of the task return the groups that the optimizer "
        "had, or import with --weights-only"
    )


def test_the_tasks_own_groups_tell() -> None:
    """Groups of the same sizes and shapes are taken; others are as if there were none."""
    of_task = [["b.weight", "b.bias"], ["a.weight", "a.bias", "c.weight", "c.bias"]]
    assert named(HEAD_FIRST, of_task) == true_names(HEAD_FIRST)
    assert named(in_one, of_task) == NAMES


def test_the_optimizers_own_names_tell() -> None:
    """An optimizer that was made of named_parameters() says them, here with what DDP puts before each."""

    def groups(net: Any) -> list[dict[str, Any]]:
        pairs = [(f"module.{name}", p) for name, p in net.named_parameters()]
        return [{"params": pairs[2:4]}, {"params": [*pairs[:2], *pairs[4:]]}]

    assert named(groups) == true_names(HEAD_FIRST)


def test_names_within_a_module_do_not_count() -> None:
    """Names such as `weight`, of named_parameters() of an inner module, are not the model's: shapes decide."""

    def groups(net: Any) -> list[dict[str, Any]]:
        return [{"params": list(net.c.named_parameters())}, {"params": list(net.named_parameters())[:4]}]

    assert named(groups) == ["c.weight", "c.bias", *NAMES[:4]]
