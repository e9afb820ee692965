"""Near-ties of routers in a proof: where rounding alone chooses another expert, the full model's is taken."""

from __future__ import annotations

import logging
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, final

from torch import nn

from unipar.distributed.world import World
from unipar.engines.router_choices import RouterChoice, moved_tokens, widest_tie
from unipar.utils.text import count_of
from unipar_mesh.expert.expert_layer import ExpertLayer, arguments_at, with_arguments

_LOG = logging.getLogger("unipar")

_MOST = 0.25
"""Largest difference of a gradient that ties may explain, whatever their number."""


@contextmanager
def recorded_choices(model: nn.Module, layers: Sequence[ExpertLayer]) -> Generator[dict[str, list[RouterChoice]]]:
    """Context manager: yield what the routers before layers with stacked parameters choose, call by call."""
    choices: dict[str, list[RouterChoice]] = {}

    def note(layer: ExpertLayer, module: nn.Module, args: Any, kwargs: Any) -> None:
        _, experts, weights = arguments_at(layer.places, args, kwargs)
        choices.setdefault(layer.name, []).append(RouterChoice(experts.detach().cpu(), weights.detach().cpu()))

    with _before_calls(model, layers, note):
        yield choices


@contextmanager
def _before_calls(model: nn.Module, layers: Sequence[ExpertLayer], hook: Any) -> Generator[None]:
    handles = [
        model.get_submodule(layer.name).register_forward_pre_hook(partial(hook, layer), with_kwargs=True)
        for layer in layers
        if layer.kind == "stacked"
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@final
class RouterTies:
    """Tokens of a rank's microbatch for which the split model's routers choose other experts, by near-ties alone."""

    def __init__(self, full: Mapping[str, RouterChoice], layers: Sequence[ExpertLayer]) -> None:
        """`full`: what the full model's routers chose on this rank's microbatch, by layer; `layers`: of this rank."""
        self._full, self._layers = full, [layer for layer in layers if layer.name in full]
        self._moved: dict[str, int] = {}
        self._others: dict[str, tuple[int, int]] = {}
        self.words = ""
        """Other choices of the routers that differ, on any rank, for an error."""

        self._tokens, self._gap = 0, 0.0

    @contextmanager
    def followed(self, model: nn.Module) -> Generator[None]:
        """Context manager: where the choice is a near-tie, the layers get the experts that the full model chose."""
        with _before_calls(model, self._layers, self._follow):
            yield

    def _follow(self, layer: ExpertLayer, module: nn.Module, args: Any, kwargs: Any) -> Any:
        rows, experts, weights = arguments_at(layer.places, args, kwargs)
        full, chosen = self._full[layer.name], experts.detach().cpu()
        if full.experts.shape != chosen.shape:  # a rank of context has some of the tokens
            return None
        self._tokens += len(chosen)
        moved = moved_tokens(full, RouterChoice(chosen, weights.detach().cpu()))
        if others := {token.token for token in moved if token.gap > widest_tie(weights.dtype)}:
            self._others[layer.name] = len(others), len(chosen)
        moved = [token for token in moved if token.gap <= widest_tie(weights.dtype)]
        if not moved:
            return None
        self._moved[layer.name] = self._moved.get(layer.name, 0) + len({token.token for token in moved})
        self._gap = max(self._gap, *(token.gap for token in moved))
        experts = experts.clone()
        for token in moved:
            experts[token.token, token.slot] = token.expert
        return with_arguments(layer.places, (rows, experts, weights), args, kwargs)

    def allowed(self, world: World) -> tuple[float, float]:
        """Return by how much more loss and gradients may differ, since these tokens count for other experts.

        All ranks call this; the first one says which layers have ties.
        """
        all_ranks = world.tell_objects(world.gather_objects((self._others, self._moved, self._tokens, self._gap), 0), 0)
        ranks: list[Any] = [ties for _, *ties in all_ranks]
        for rank, (others, *_) in enumerate(all_ranks):
            for name, (count, total) in [*others.items()][: not self.words]:
                self.words = (
                    f"; on rank {rank} the router before {name} chooses other experts for {count} of {total} tokens "
                    "than on rank 0 with the full model, and rounding does not explain it: what it computes must not "
                    "depend on the rank"
                )
        tokens = sum(count for _, count, _ in ranks)
        by_layer: dict[str, int] = {}
        for moved, _, _ in ranks:
            for name, count in moved.items():
                by_layer[name] = by_layer.get(name, 0) + count
        if not by_layer:
            return 0.0, 0.0
        share = sum(by_layer.values()) / tokens
        if world.rank == 0:
            shown = ", ".join(f"{count_of(count, 'token')} in {name}" for name, count in by_layer.items())
            _LOG.warning(
                "near-ties of routers: the split model chooses another expert for %s, whose weight differs by %.1e at "
                "most, which is rounding and no fault; it was compared with the experts of the full model",
                shown,
                max(gap for _, _, gap in ranks),
            )
        return min(share, _MOST), min(2 * share**0.5, _MOST)
