"""Search for the layers of experts of a model, by one run of the task's loss and a trial of each."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from unipar.backend import Fn, Part
from unipar.errors import TaskError
from unipar.utils.text import first_few
from unipar_mesh.expert.expert_layer import (
    ExpertLayer,
    PlaceInCall,
    PlacesOfExpertCall,
    arguments_at,
    experts_of_seat,
    with_arguments,
)
from unipar_mesh.expert.listed_experts import ExpertCalls, ListedExperts
from unipar_mesh.trials_without_trace import kept_attributes, unchanged

_ROUNDING = {torch.float64: 1e-10, torch.float32: 1e-4}
"""Largest difference of a trial, as a share of the largest output, that the order of additions explains."""


@dataclass
class _Call:
    """First call of a module that may be a layer of experts."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    out: Any


@dataclass
class ExpertSearch:
    """Layers of experts that were found, and why other modules that look like some are none."""

    layers: list[ExpertLayer] = field(default_factory=list[ExpertLayer])
    others: dict[str, str] = field(default_factory=dict[str, str])


def find_experts(part: Part, batch: Any, ranks: int) -> list[ExpertLayer]:
    """Return the layers of experts that `ranks` ranks can split; raise TaskError if there are none.

    If the task names layers, each of them must be one.
    """
    assert part.loss is not None
    model, blocks, fn, named = part.module, part.blocks, part.loss, part.experts
    _refuse_unknown(model, named)
    search = ExpertSearch()
    calls = _first_calls(model, fn, batch, _candidates(model, blocks, named))
    with unchanged(model, fn), torch.no_grad():
        model.eval()
        for name, call in calls.items():
            module = model.get_submodule(name)
            for inner in _lists(module, name, named):
                _note(search, f"{name}.{inner}" if name else inner, _try_list(module, name, inner, call, ranks))
            if _stacked(module) is not None and (named is None or name in named):
                _note(search, name, _try_stacked(module, name, call, ranks))
    _refuse_failed(search, ranks, named)
    return search.layers


def find_experts_without_values(part: Part, batch: Any, ranks: int) -> list[ExpertLayer]:
    """Return the layers of experts of a model without values, by the shapes of their calls: nothing is tried.

    They do not run, and return their rows. If no module has stacked parameters, lists of equal modules are the layers.
    """
    assert part.loss is not None
    model, fn, named = part.module, part.loss, part.experts
    _refuse_unknown(model, named)
    search = ExpertSearch()
    candidates = _candidates(model, part.blocks, named)
    names = [n for n in candidates if _stacked(model.get_submodule(n)) is not None]
    if candidates and not names:  # they get rows by value: their calls are not seen
        for name in candidates:
            for inner in _lists(model.get_submodule(name), name, named):
                experts = len(getattr(model.get_submodule(name), inner))
                layer = ExpertLayer(f"{name}.{inner}" if name else inner, "list", experts)
                _note(search, layer.name, _not_divided(experts, ranks) if experts % ranks else layer)
    else:
        with unchanged(model, fn), torch.no_grad(), _noted_calls(model, names, ranks, search):
            fn(model, batch)
    _refuse_failed(search, ranks, named)
    return search.layers


@contextmanager
def experts_by_shape_left_out(model: nn.Module, blocks: Sequence[str]) -> Generator[None]:
    """Context manager: what is called as a layer of experts, by the shapes of its arguments, returns its rows."""
    names = [n for n in _candidates(model, blocks, None) if _stacked(model.get_submodule(n)) is not None]
    with _noted_calls(model, names, 1, ExpertSearch()):
        yield


@contextmanager
def _noted_calls(model: nn.Module, names: Sequence[str], ranks: int, search: ExpertSearch) -> Generator[None]:
    """Context manager: modules that are called as layers of experts are noted, and return their rows."""
    before = {name: vars(model.get_submodule(name)).get("forward") for name in names}
    for name in names:
        module = model.get_submodule(name)
        module.forward = partial(_note_call, search, module, name, ranks, module.forward)
    try:
        yield
    finally:
        for name, forward in before.items():
            module = model.get_submodule(name)
            if forward is None:
                del module.forward
            else:
                module.forward = forward


def _note_call(
    search: ExpertSearch, module: nn.Module, name: str, ranks: int, forward: Fn, *args: Any, **kwargs: Any
) -> Any:
    """Return the rows of a call if they are those of a layer of experts, which is noted; else what the module does."""
    experts = _stacked(module)
    assert experts is not None
    places = _places_of_arguments(experts, args, kwargs)
    out = forward(*args, **kwargs) if isinstance(places, str) else arguments_at(places, args, kwargs)[0].clone()
    if name in search.others or any(layer.name == name for layer in search.layers):
        return out
    if isinstance(places, str):
        _note(search, name, places)
    elif experts % ranks:
        _note(search, name, _not_divided(experts, ranks))
    else:
        counts = _counts(module, experts)
        by_name = tuple(k for k in counts if "expert" in k.lower())
        _note(search, name, ExpertLayer(name, "stacked", experts, places, by_name or counts))
    return out


def _candidates(model: nn.Module, blocks: Sequence[str], named: Sequence[str] | None) -> list[str]:
    """Return the names of modules whose first call is to be seen: of those in blocks, or those that the task names."""
    if named is not None:
        parents = [name if _stacked(model.get_submodule(name)) is not None else _parent(name) for name in named]
        return list(dict.fromkeys(parents))
    inside = tuple(f"{name}." for name in blocks)
    return [
        name
        for name, module in model.named_modules()
        if (name in blocks or name.startswith(inside))
        and (_stacked(module) is not None or any(True for _ in _lists_of_experts(module, name)))
    ]


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _stacked(module: nn.Module) -> int | None:
    """Return the number of experts of a module whose own parameters look stacked, one of them three-dimensional."""
    own = list(module.parameters(recurse=False))
    sizes = {p.shape[0] for p in own if p.ndim}
    if len(sizes) != 1 or not any(p.ndim == 3 for p in own) or any(p.ndim == 0 for p in own):
        return None
    (size,) = sizes
    return size if size > 1 else None


def _lists(module: nn.Module, name: str, named: Sequence[str] | None) -> Iterator[str]:
    """Yield the names of the lists of a module that may be experts, or that the task names."""
    yield from _lists_of_experts(module, name) if named is None else _named_lists(module, name, named)


def _lists_of_experts(module: nn.Module, name: str) -> Iterator[str]:
    """Yield the names of lists of modules of one class and shape that a module has."""
    for inner, child in module.named_children():
        if isinstance(child, nn.ModuleList) and len(child) > 1 and _are_equal(child):
            yield inner


def _named_lists(module: nn.Module, name: str, named: Sequence[str]) -> Iterator[str]:
    for inner, child in module.named_children():
        if (f"{name}.{inner}" if name else inner) in named and isinstance(child, nn.ModuleList):
            yield inner


def _are_equal(modules: nn.ModuleList) -> bool:
    first, *others = [(type(m), [(n, p.shape, p.dtype) for n, p in m.named_parameters()]) for m in modules]
    return bool(first[1]) and all(other == first for other in others)


def _first_calls(model: nn.Module, fn: Fn, batch: Any, names: Sequence[str]) -> dict[str, _Call]:
    """Return the first call of each of these modules, in one run of the loss in evaluation mode."""
    calls: dict[str, _Call] = {}

    def note(name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
            calls.setdefault(name, _Call(args, dict(kwargs), out))

        return hook

    handles = [model.get_submodule(n).register_forward_hook(note(n), with_kwargs=True) for n in names]
    try:
        with unchanged(model, fn), torch.no_grad():
            model.eval()
            fn(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _note(search: ExpertSearch, name: str, answer: ExpertLayer | str) -> None:
    if isinstance(answer, str):
        search.others[name] = answer
    else:
        search.layers.append(answer)


# Stacked parameters


def _try_stacked(module: nn.Module, name: str, call: _Call, ranks: int) -> ExpertLayer | str:
    """Return the layer, if each rank's experts alone compute their rows of what the module does, or why it is none."""
    experts = _stacked(module)
    assert experts is not None
    places = _places(experts, call)
    if isinstance(places, str):
        return places
    if experts % ranks:
        return _not_divided(experts, ranks)
    counts = _counts(module, experts)
    by_name = tuple(k for k in counts if "expert" in k.lower())
    off = torch.inf
    for attributes in dict.fromkeys((counts, by_name, ())):
        layer = ExpertLayer(name, "stacked", experts, places, attributes)
        off = min(off, _difference_by_seats(module, layer, call, ranks))
        if off <= _ROUNDING.get(call.out.dtype, 3e-2):
            return layer
    return (
        f"it returns something else when its experts compute one row each by themselves (off by {off:.1e} of the "
        "largest output): it drops tokens, or mixes rows"
    )


def _counts(module: nn.Module, experts: int) -> tuple[str, ...]:
    return tuple(k for k, v in vars(module).items() if type(v) is int and v == experts)


def _places(experts: int, call: _Call) -> PlacesOfExpertCall | str:
    """Return where rows, numbers of experts and their weights are among the arguments, or why they are not there."""
    places = _places_of_arguments(experts, call.args, call.kwargs)
    if isinstance(places, str):
        return places
    rows, numbers, _ = arguments_at(places, call.args, call.kwargs)
    if not isinstance(call.out, Tensor):
        return f"it is not called with rows and a weight for each of {numbers.shape[1]} experts of a row"
    if call.out.shape != rows.shape:
        return f"it returns {tuple(call.out.shape)} for rows of {tuple(rows.shape)}"
    return places


def _places_of_arguments(experts: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> PlacesOfExpertCall | str:
    given = {**dict(enumerate(args)), **kwargs}
    tensors: dict[PlaceInCall, Tensor] = {place: value for place, value in given.items() if isinstance(value, Tensor)}
    numbers = [place for place, t in tensors.items() if _are_numbers(t, experts)]
    if len(numbers) != 1 or len(tensors) != 3:
        shapes = ", ".join(f"{tuple(t.shape)} of {str(t.dtype).removeprefix('torch.')}" for t in tensors.values())
        return f"it is called with {shapes or 'no tensors'}, not with rows, numbers of experts and their weights"
    chosen = tensors[numbers[0]].shape
    weights = [k for k, t in tensors.items() if k not in numbers and t.shape == chosen and t.is_floating_point()]
    rows = [k for k in tensors if k not in numbers and k not in weights[:1]]
    if len(weights) == 2:  # as wide as experts are chosen: the last of them is the weights
        weights, rows = weights[1:], weights[:1]
    if len(weights) != 1 or tensors[rows[0]].ndim != 2:
        return f"it is not called with rows and a weight for each of {chosen[1]} experts of a row"
    return rows[0], numbers[0], weights[0]


def _are_numbers(t: Tensor, experts: int) -> bool:
    """Return whether a tensor can be the numbers of the experts of each row."""
    whole = t.ndim == 2 and t.numel() > 0 and not t.is_floating_point() and t.dtype != torch.bool
    return whole and (isinstance(t, FakeTensor) or t.is_meta or (int(t.min()) >= 0 and int(t.max()) < experts))


def _difference_by_seats(module: nn.Module, layer: ExpertLayer, call: _Call, ranks: int) -> float:
    """Return how far the sum over the ranks' experts is from the module's output, as a share of its largest element."""
    rows, numbers, weights = arguments_at(layer.places, call.args, call.kwargs)
    slots, own = numbers.shape[1], layer.experts // ranks
    each, expert, weight = rows.repeat_interleave(slots, 0), numbers.reshape(-1), weights.reshape(-1, 1)
    out = torch.zeros_like(each)
    for seat in range(ranks):
        mine = expert // own == seat
        if not mine.any():
            continue
        with experts_of_seat(module, layer, seat, ranks):
            args, kwargs = with_arguments(
                layer.places, (each[mine], (expert[mine] % own)[:, None], weight[mine]), call.args, call.kwargs
            )
            try:
                out[mine] = module(*args, **kwargs).to(out.dtype)
            except (RuntimeError, IndexError, ValueError, AssertionError):
                return torch.inf
    total = out.view(*numbers.shape, -1).sum(1)
    return float((total - call.out).abs().max() / call.out.abs().max().clamp(min=1e-30))


# Lists of equal modules


def _try_list(module: nn.Module, name: str, inner: str, call: _Call, ranks: int) -> ExpertLayer | str:
    """Return the layer, if the module returns the same when its experts run between two passes, or why it is none."""
    listed = getattr(module, inner)
    experts = len(listed)
    if not _are_equal(listed):
        return "its experts differ in class or shapes"
    if experts % ranks:
        return _not_divided(experts, ranks)
    calls = ExpertCalls(listed)
    try:
        with kept_attributes(list(module.modules())):
            out = ListedExperts(module, inner, calls).run(_run_all(listed), call.args, call.kwargs)
    except (TaskError, RuntimeError, IndexError, ValueError, AttributeError, TypeError) as e:
        return f"its modules cannot run between two passes of {name or 'the model'} ({e})"
    before, after = (_first_tensor(o) for o in (call.out, out))
    if before is None or after is None or before.shape != after.shape:
        return "what it returns has no tensor to compare"
    off = float((after - before).abs().max() / before.abs().max().clamp(min=1e-30))
    if not off <= _ROUNDING.get(before.dtype, 3e-2):
        return f"it returns something else when its modules run between two passes (off by {off:.1e})"
    given = {**dict(enumerate(call.args)), **call.kwargs}
    alike = (place for place, value in given.items() if _are_alike(value, call.out))
    return ExpertLayer(f"{name}.{inner}" if name else inner, "list", experts, like=next(alike, None))


def _are_alike(one: Any, other: Any) -> bool:
    """Return whether two values are tensors of one shape and dtype."""
    return all(isinstance(t, Tensor) for t in (one, other)) and (one.shape, one.dtype) == (other.shape, other.dtype)


def _run_all(listed: nn.ModuleList) -> Any:
    def run(rows: Mapping[int, Tensor]) -> dict[int, Tensor]:
        return {number: listed[number](given) for number, given in rows.items()}

    return run


def _first_tensor(out: Any) -> Tensor | None:
    if isinstance(out, Tensor):
        return out
    return next((t for t in out if isinstance(t, Tensor)), None) if isinstance(out, tuple | list) else None


# Refusals


def _not_divided(experts: int, ranks: int) -> str:
    return f"{ranks} ranks do not divide its {experts} experts"


def _refuse_unknown(model: nn.Module, named: Sequence[str] | None) -> None:
    known = {name for name, _ in model.named_modules()}
    for name in named or ():
        if name not in known:
            raise TaskError(
                f"experts() names {name!r}, and the model has no such module: name modules with stacked parameters, or "
                "lists of equal modules"
            )


def _refuse_failed(search: ExpertSearch, ranks: int, named: Sequence[str] | None) -> None:
    """Raise TaskError if nothing can be split, if a layer cannot be while others are, or one that the task names."""
    divided = _not_divided(0, ranks).partition(" its ")[0]
    if wrong := {name: why for name, why in search.others.items() if why.startswith(divided)}:
        name, why = next(iter(wrong.items()))
        experts = int(why.split()[-2])
        sizes = [str(n) for n in range(2, experts + 1) if experts % n == 0]
        raise TaskError(f"parallel.expert: {ranks}: {name}: {why}: take one of {', '.join(sizes)}")
    if search.layers and (named is None or len(search.layers) == len(named)):
        return
    reasons = first_few([f"{name}: {why}" for name, why in search.others.items()], most=3)
    what = "a layer that experts() names is none" if named else "no layer of this model has any"
    raise TaskError(
        f"parallel.expert: {ranks} splits experts, and {what}{f' ({reasons})' if search.others else ''}: leave expert "
        "out, or name modules with stacked parameters, called with rows, numbers of experts and weights, or lists of "
        "equal modules, in the task's experts(model)"
    )
