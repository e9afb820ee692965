"""Names of the parameters that an optimizer numbers: by its own names, the task's groups, or the only order that fits.

`torch.optim` saves its state by number: those of the first group come first. Which parameters were in which group is
said nowhere, unless the optimizer was given names (`param_names`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from unipar.checkpoint.importing.found_state import ModelState, StateCollector
from unipar.errors import CheckpointError
from unipar.utils.text import first_few

_MOST_TRIALS = 100_000
"""Number of placements after which the search gives up: so many fit in part that nothing is told by shapes."""

_Shape = tuple[int, ...]


def names_by_number(saved: Mapping[str, Any], into: StateCollector) -> dict[Any, str]:
    """Return the model's name of each numbered parameter; raise CheckpointError if none, or several, fit the shapes."""
    groups: list[Mapping[str, Any]] = list(saved["param_groups"])
    numbers = [list(group["params"]) for group in groups]
    flat = [number for group in numbers for number in group]
    if (own := _own_names(groups, into)) is not None:
        return dict(zip(flat, own, strict=True))
    model, sizes = into.model, [len(group) for group in numbers]
    kept: Mapping[Any, Mapping[str, Any]] = saved["state"]
    shapes = [[_shape_of(kept.get(number, {})) for number in group] for group in numbers]
    of_task = [list(group) for group in model.groups]
    if [len(group) for group in of_task] == sizes and _fit(of_task, shapes, model):
        return dict(zip(flat, [name for group in of_task for name in group], strict=True))
    order = next((o for o in (list(model.parameters), list(model.trained)) if len(o) == len(flat)), None)
    first = None if order is None else _place(order, shapes, model, range(len(groups)))
    if order is None or first is None:
        raise CheckpointError(
            f"{into.source}: the optimizer has {len(flat)} parameters by number, and neither all "
            f"{len(model.parameters)} parameters of the model nor the {len(model.trained)} that are trained fit its "
            "shapes in their order; import with --weights-only"
        )
    if not first or first != _place(order, shapes, model, range(len(groups) - 1, -1, -1)):
        raise CheckpointError(
            f"{into.source}: the optimizer has its parameters by number, in groups of {first_few([*map(str, sizes)])}, "
            "and shapes do not tell which of the model's parameters are in which group: let groups(model) of the task "
            "return the groups that the optimizer had, or import with --weights-only"
        )
    return dict(zip(flat, [name for group in first for name in group], strict=True))


def _own_names(groups: Sequence[Mapping[str, Any]], into: StateCollector) -> list[str] | None:
    """Return the model's names for those that the optimizer was given; None unless each is another of its parameters.

    They are names within a module that is not the whole model where a script gave the optimizer that module's.
    """
    theirs = [str(name) for group in groups for name in group.get("param_names") or ()]
    own_names = [into.name(one) for one in theirs]
    names = [name for name in own_names if name is not None and name in into.model.parameters]
    is_complete = len(names) == len(set(names)) == sum(len(group["params"]) for group in groups)
    return names if is_complete and len(names) == len(theirs) else None


def _shape_of(kept: Mapping[str, Any]) -> _Shape | None:
    """Return the shape of the tensors that the optimizer keeps for one parameter; None if it keeps numbers only."""
    return next((tuple(t.shape) for t in kept.values() if isinstance(t, Tensor) and t.ndim), None)


def _matches(name: str, shape: _Shape | None, model: ModelState) -> bool:
    return shape is None or tuple(model.parameters[name]) == shape


def _fit(groups: Sequence[Sequence[str]], shapes: Sequence[Sequence[_Shape | None]], model: ModelState) -> bool:
    return all(
        _matches(name, shape, model)
        for names, wanted in zip(groups, shapes, strict=True)
        for name, shape in zip(names, wanted, strict=True)
    )


def _place(
    order: Sequence[str], shapes: Sequence[Sequence[_Shape | None]], model: ModelState, preferred: Sequence[int]
) -> list[list[str]] | None:
    """Return groups of names, each in the model's order, that fit the shapes; None if there are none, [] if unknown.

    Of several that fit, each parameter goes to the first group in `preferred` that can have it. Two opposite
    preferences have one result only if there is one way.
    """
    chosen: list[int] = []
    filled = [0] * len(shapes)
    failed = set[tuple[int, ...]]()
    stack = [iter(preferred)]
    while len(chosen) < len(order):
        name, placed = order[len(chosen)], False
        for group in stack[-1]:
            at = filled[group]
            if at == len(shapes[group]) or not _matches(name, shapes[group][at], model):
                continue
            filled[group] += 1
            if tuple(filled) not in failed:
                chosen.append(group)
                stack.append(iter(preferred))
                placed = True
                break
            filled[group] -= 1
        if placed:
            continue
        failed.add(tuple(filled))
        stack.pop()
        if not stack:
            return None
        if len(failed) == _MOST_TRIALS:
            return []
        filled[chosen.pop()] -= 1
    names: list[list[str]] = [[] for _ in shapes]
    for name, group in zip(order, chosen, strict=True):
        names[group].append(name)
    return names
