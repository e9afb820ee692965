"""`ExpertLayer`: a layer of experts, how it is called, and which of its experts a rank has."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

from torch import Tensor, nn

from unipar_mesh.tensor.cuts import Cut, ParameterCut

PlaceInCall: TypeAlias = int | str
"""Place of an argument in a call: its number, or its name."""

PlacesOfExpertCall: TypeAlias = tuple[PlaceInCall, PlaceInCall, PlaceInCall]
"""Places of rows, numbers of experts and their weights."""


@dataclass(frozen=True)
class ExpertLayer:
    """A layer of experts."""

    name: str
    """Name of the module that has stacked parameters, or of the list of equal modules."""

    kind: Literal["stacked", "list"]
    experts: int
    places: PlacesOfExpertCall = (0, 1, 2)
    """Places of rows, numbers of experts and weights among the arguments of a module with stacked parameters."""

    counts: tuple[str, ...] = ()
    """Attributes of such a module that are the number of its experts."""

    like: PlaceInCall | None = None
    """Place of the argument of the shape that a module that calls a list returns; None: it has none."""

    def own(self, seat: int, ranks: int) -> range:
        """Return the experts of one of `ranks` ranks."""
        each = self.experts // ranks
        return range(seat * each, (seat + 1) * each)

    def parameters(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """Return the parameters of the experts by their names in the model."""
        return {f"{self.name}.{name}": p for name, p in model.get_submodule(self.name).named_parameters()}

    def sharded_modules(self, seat: int, ranks: int) -> list[str]:
        """Return the names of the modules whose forwards use a rank's experts alone."""
        return [self.name] if self.kind == "stacked" else [f"{self.name}.{number}" for number in self.own(seat, ranks)]

    def absent(self, model: nn.Module, seat: int, ranks: int) -> frozenset[str]:
        """Return the names of the parameters that a rank does not have: those of others among equal modules."""
        if self.kind == "stacked":
            return frozenset()
        mine = tuple(f"{self.name}.{number}." for number in self.own(seat, ranks))
        return frozenset(name for name in self.parameters(model) if not name.startswith(mine))


def cuts_of_experts(model: nn.Module, layers: Sequence[ExpertLayer], ranks: int) -> dict[str, ParameterCut]:
    """Return how the stacked parameters of experts are cut, by their names in the model."""
    return {
        name: ParameterCut(tuple(p.shape), 0, Cut("column"), ranks)
        for layer in layers
        if layer.kind == "stacked"
        for name, p in layer.parameters(model).items()
    }


def arguments_at(places: PlacesOfExpertCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return rows, numbers of experts and weights of a call."""
    return [args[place] if isinstance(place, int) else kwargs[place] for place in places]


def with_arguments(
    places: PlacesOfExpertCall,
    values: tuple[Tensor, ...],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of a call with other rows, numbers of experts and weights."""
    changed, named = list(args), dict(kwargs)
    for place, value in zip(places, values, strict=True):
        if isinstance(place, int):
            changed[place] = value
        else:
            named[place] = value
    return changed, named


@contextmanager
def experts_left_out(model: nn.Module, layers: Sequence[ExpertLayer]) -> Generator[None]:
    """Context manager: modules with stacked parameters return their rows, whose shapes are known without values.

    So do modules that call lists of experts, if an argument has the shape of what they return.
    """
    places: dict[str, PlaceInCall] = {}
    for layer in layers:
        if layer.kind == "stacked":
            places[layer.name] = layer.places[0]
        elif layer.like is not None:
            places[layer.name.rpartition(".")[0]] = layer.like
    try:
        for name, place in places.items():
            model.get_submodule(name).forward = partial(_argument_of_call, place)
        yield
    finally:
        for name in places:
            del model.get_submodule(name).forward


def _argument_of_call(place: PlaceInCall, *args: Any, **kwargs: Any) -> Tensor:
    return (args[place] if isinstance(place, int) else kwargs[place]).clone()


@contextmanager
def experts_of_seat(module: nn.Module, layer: ExpertLayer, seat: int, ranks: int) -> Generator[None]:
    """Context manager: the module has the experts of one rank alone, on trial."""
    mine, parameters = layer.own(seat, ranks), dict(module.named_parameters(recurse=False))
    for name, p in parameters.items():
        setattr(module, name, nn.Parameter(p.detach()[mine.start : mine.stop], requires_grad=False))
    for name in layer.counts:
        setattr(module, name, len(mine))
    try:
        yield
    finally:
        for name, p in parameters.items():
            setattr(module, name, p)
        for name in layer.counts:
            setattr(module, name, layer.experts)
