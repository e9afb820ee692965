"""Proof before the first step: loss and gradients of the split model are those of the whole one."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from unipar.backend import Fn, Micro, Region
from unipar.engines.fingerprint import SKETCH_NUMBERS, TensorSketcher
from unipar.engines.state import local_part
from unipar.engines.wrapper import WrapperEngine
from unipar.errors import TaskError
from unipar.utils.seeding import kept_random_state
from unipar_mesh.look_at_model import WholeModel
from unipar_mesh.proof.router_ties import RouterTies
from unipar_mesh.trials_without_trace import kept_attributes

_TOLERANCES = {torch.bfloat16: (1e-3, 5e-2), torch.float32: (2e-5, 2e-4), torch.float64: (1e-10, 1e-10)}
"""Largest differences that rounding explains: as a share of the loss, and of a gradient's length."""

_FLOOR = 1e-2
"""Share of the longest gradient's length below which a shorter one is measured by that share.

In fp32 a difference of 2e-6 of the longest gradient is rounding: below a last norm whose output is only averaged, a
gradient is nothing else, and that norm makes it longer (6e-7 in an OPT of width 24). A wrong plan is off by a large
part of a gradient's own length.
"""


def prove(
    engine: WrapperEngine, fn: Fn, batch: Any, full: WholeModel, *, dtype: torch.dtype, words: str, ties: RouterTies
) -> None:
    """Raise TaskError unless the split model has the whole one's loss and gradients on this microbatch.

    `words` say how the model is split. All ranks of the data get the same microbatch;
    nothing is drawn, and no autocast is on.
    """
    with ties.followed(engine.model):
        loss, sketches = _split_gradients(engine, fn, batch, list(full.gradients))
    more = ties.allowed(engine.world)
    refuse_difference(full, loss, sketches, dtype, f"{words}{ties.words}", more)


def refuse_difference(
    full: WholeModel,
    loss: float,
    sketches: torch.Tensor,
    dtype: torch.dtype,
    words: str,
    more: tuple[float, float] = (0.0, 0.0),
) -> None:
    """Raise TaskError if the split model's loss or gradients, of which `sketches` are, differ from the full model's.

    `more`: by how much they may differ beyond rounding.
    """
    names, expected_loss, expected = list(full.gradients), full.loss, torch.stack(list(full.gradients.values()))
    small_loss, small = (a + b for a, b in zip(tolerances(expected_loss, dtype), more, strict=True))
    off = off_by_length(sketches, expected)
    worst = int(off.argmax())
    loss_off = abs(loss - expected_loss) / max(1.0, abs(expected_loss))
    if loss_off <= small_loss and float(off[worst]) <= small:
        return
    gradient = f", and the gradient of {names[worst]} is off by {float(off[worst]):.1e} of its length"
    what = f"a loss of {loss:.9g} for {expected_loss:.9g}{gradient if float(off[worst]) > small else ''}"
    raise split_error(what, words)


def tolerances(loss: float, dtype: torch.dtype) -> tuple[float, float]:
    """Return the largest differences of the loss and of a gradient that rounding explains, given the whole's loss."""
    if dtype.itemsize < torch.float32.itemsize:
        return _TOLERANCES[torch.bfloat16]
    in_fp32 = dtype != torch.float64 or torch.tensor(loss).item() == loss  # some models' own losses
    return _TOLERANCES[torch.float32 if in_fp32 else torch.float64]


def trained_and_narrowest_dtypes(module: nn.Module) -> tuple[torch.dtype, torch.dtype]:
    """Return the dtype of what is trained, and that of the narrowest parameters: frozen ones may be narrower."""
    floats = [p for p in module.parameters() if p.is_floating_point()]
    trained = next((p.dtype for p in floats if p.requires_grad), floats[0].dtype)
    return trained, min((p.dtype for p in floats), key=lambda dtype: dtype.itemsize)


def off_by_length(gradient: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return how far each sketch is from the one expected, as a share of its length."""
    lengths = expected.norm(dim=1)
    off = (gradient - expected).norm(dim=1) / lengths.clamp(min=max(_FLOOR * float(lengths.max()), 1e-300))
    return torch.where(off.isfinite(), off, torch.inf)


def split_error(what: str, words: str) -> TaskError:
    """Return the error for a split model that differs from the full one by `what`; `words` say how it is split."""
    return TaskError(
        f"split as planned, the model is another: {what}; {words}. "
        "Leave one of the axes out, or say in the task's tensor(model) or cuts(stages) what must stay together"
    )


def sketch_regions(names: Sequence[str], regions: Iterable[tuple[str, int, Region, torch.Tensor]]) -> torch.Tensor:
    """Return one row for each name: the sketch of its regions, given with the number of elements of the whole."""
    rows = torch.zeros((len(names), SKETCH_NUMBERS), dtype=torch.float64)
    sketcher, places = TensorSketcher(keep=False), {name: i for i, name in enumerate(names)}
    for name, numel, where, elements in regions:
        if name in places:
            rows[places[name]] += sketcher.sketch_region(name, numel, where, elements)
    return rows


def _split_gradients(engine: WrapperEngine, fn: Fn, batch: Any, names: list[str]) -> tuple[float, torch.Tensor]:
    """Return the split model's loss, and the sketches of its gradients, on every rank."""
    with evaluation_without_autocast(engine, fn):
        share = engine.run_microbatches(
            lambda model, batch, number: fn(model, batch),
            [Micro(batch, 1.0 / engine.world.data_size)],
            engine.divisor,
            lambda phase: None,
        )
        engine.finish_reduction()
    engine.before_state_access()
    world = engine.world
    loss = torch.full((), float(share) if world.leads else 0.0, dtype=torch.float64, device=world.device)
    rows = sketch_regions(names, regions_of_gradients(engine))
    engine.optimizer.zero_grad()
    return float(world.sum(loss)), world.sum(rows.to(world.device)).cpu()


@contextmanager
def evaluation_without_autocast(engine: WrapperEngine, fn: Fn) -> Generator[None]:
    """Context manager: a pass of the split model in evaluation draws nothing; all is as before after it.

    It runs without autocast, and without a loss scale.
    """
    modes = [(module, module.training) for module in engine.wrapped.modules()]
    autocast, engine.call.autocast = engine.call.autocast, None
    scaler, engine.scaler = engine.scaler, None
    engine.wrapped.eval()
    try:
        with kept_random_state(), kept_attributes([getattr(fn, "__self__", None)]):
            yield
    finally:
        engine.call.autocast, engine.scaler = autocast, scaler
        for module, mode in modes:
            module.training = mode


def regions_of_gradients(engine: WrapperEngine) -> Iterator[tuple[str, int, Region, torch.Tensor]]:
    """Yield the regions of gradients for which this rank speaks, with the number of elements of the whole."""
    for name, p in engine.local_parameters():
        if p.grad is not None and engine.speaks_for(name, p.grad):
            numel = torch.Size(engine.whole_shape(name, p)).numel()
            for where, mine in engine.local_regions(name, p.grad):
                yield name, numel, where, local_part(mine)
