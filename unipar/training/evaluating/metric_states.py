"""States of torchmetrics' Metric objects: found without importing the library, put aside, and merged over ranks."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from unipar.data.order import SampleKey
from unipar.errors import TaskError

MERGED_BY_MEAN = "dim_zero_mean"
"""Name of torchmetrics' reduction `dist_reduce_fx="mean"`."""

MERGED_BY_CONCATENATION = "dim_zero_cat"
"""Name of torchmetrics' reduction `dist_reduce_fx="cat"`."""


class RankStates(NamedTuple):
    """States of one Metric on one rank, by module and name; tensors are on the CPU."""

    samples: int
    """Number of samples that are in them."""

    states: Mapping[tuple[str, str], Any]
    ends: Mapping[tuple[str, str], Sequence[tuple[SampleKey, int]]]
    """For each list: the first sample of each batch, and the length of the list behind it."""


def is_metric(value: object) -> bool:
    """Return whether a value is a Metric of torchmetrics, or a collection of them, by what it can do."""
    return isinstance(value, nn.Module) and all(
        callable(getattr(value, name, None)) for name in ("update", "compute", "reset")
    )


def single_metrics(name: str, value: Any) -> dict[str, Any]:
    """Return a Metric by its name; of a MetricCollection each one, with a state of its own."""
    if isinstance(value, nn.ModuleDict):
        return {f"{name}/{key}": metric for key, metric in value.items()}
    return {name: value}


def stateful_modules(metric: nn.Module) -> Iterable[tuple[str, Any]]:
    """Yield each module of a Metric that has states, with its path: a wrapper's are in the metrics inside it."""
    for path, module in metric.named_modules():
        if isinstance(getattr(module, "_defaults", None), dict):
            yield path, module


SavedStates = Sequence[tuple[Any, Mapping[str, Any]]]
"""Modules of metrics, and copies of their states."""


def save_states(metrics: Iterable[Any]) -> SavedStates:
    """Return copies of the states of these metrics."""
    return [(module, _copy_of(module)) for metric in metrics for _, module in stateful_modules(metric)]


def restore_states(saved: SavedStates) -> None:
    """Put states back, once or several times: updates change tensors in place."""
    for module, values in saved:
        for name, value in values.items():
            setattr(module, name, _copied(value))


def _copy_of(module: Any) -> dict[str, Any]:
    names = (*module._defaults, "_update_count", "_computed")
    return {name: _copied(getattr(module, name)) for name in names if hasattr(module, name)}


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    return list(value) if isinstance(value, list) else value


def list_lengths(metric: nn.Module) -> dict[tuple[str, str], int]:
    """Return the length of each state that is a list, to which a batch adds its entries."""
    return {
        (path, name): len(value)
        for path, module in stateful_modules(metric)
        for name in module._defaults
        if isinstance(value := getattr(module, name), list)
    }


def states_of(metric: nn.Module) -> dict[tuple[str, str], Any]:
    """Return all states, on the CPU."""
    return {
        (path, name): _on_cpu(getattr(module, name))
        for path, module in stateful_modules(metric)
        for name in module._defaults
    }


def _on_cpu(value: Any) -> Any:
    return [_on_cpu(one) for one in value] if isinstance(value, list) else _moved(value, torch.device("cpu"))


def _moved(value: Any, device: torch.device) -> Any:
    return value.detach().to(device) if isinstance(value, Tensor) else value


def merge_into(metric: Any, name: str, ranks: Sequence[RankStates], device: torch.device) -> None:
    """Give a Metric the states of all ranks together, as if it had been updated with every batch, in sample order."""
    for path, module in stateful_modules(metric):
        for state, reduction in module._reductions.items():
            held = [(rank, rank.states[path, state]) for rank in ranks if rank.samples]
            if len(held) > 1:
                merged = _merge(f"{name}.{state}", reduction, held, (path, state))
                setattr(module, state, _on(merged, device))
            elif held:
                setattr(module, state, _on(held[0][1], device))
        if hasattr(module, "_update_count"):
            module._update_count = max(1, module._update_count)  # this rank may have no batch of its own
        module._computed = None


def _on(value: Any, device: torch.device) -> Any:
    return [_on(one, device) for one in value] if isinstance(value, list) else _moved(value, device)


def _merge(what: str, reduction: Any, held: Sequence[tuple[RankStates, Any]], key: tuple[str, str]) -> Any:
    values = [value for _, value in held]
    if all(isinstance(value, list) for value in values):
        return _in_sample_order([(rank.ends.get(key, ()), value) for rank, value in held])
    kind = getattr(reduction, "__name__", "")
    counts = [rank.samples for rank, _ in held]
    if kind == MERGED_BY_MEAN and len(set(counts)) > 1:
        raise TaskError(
            f"the state of metric {what} is merged by dist_reduce_fx='mean', in which each rank counts the same, and "
            f"ranks have {', '.join(map(str, counts))} samples; keep a sum and a count, each with dist_reduce_fx='sum'"
        )
    if kind == MERGED_BY_CONCATENATION:
        return reduction([value.reshape(1) if value.ndim == 0 else value for value in values])
    shapes = {tuple(value.shape) for value in values}
    if len(shapes) > 1:
        raise TaskError(
            f"the state of metric {what} has other shapes on other ranks ({', '.join(map(str, sorted(shapes)))}): "
            "keep a list, or give it one shape"
        )
    stacked = torch.stack(values)
    return stacked if reduction is None else reduction(stacked)


def _in_sample_order(ranks: Sequence[tuple[Sequence[tuple[SampleKey, int]], list[Any]]]) -> list[Any]:
    """Return the entries of all ranks' lists, batch by batch in the order of samples.

    A list that an update made shorter, or to which it added before, is taken as one batch.
    """
    batches: list[tuple[SampleKey, list[Any]]] = []
    for ends, value in ranks:
        lengths = [end for _, end in ends]
        if not ends or lengths != sorted(lengths) or lengths[-1] != len(value):
            batches.append((ends[0][0] if ends else (0, 0), value))
            continue
        begins = [0, *lengths[:-1]]
        batches += [(key, value[begin:end]) for begin, (key, end) in zip(begins, ends, strict=True)]
    return [entry for _, entries in sorted(batches, key=lambda batch: batch[0]) for entry in entries]


@contextmanager
def without_own_sync(metric: nn.Module) -> Generator[None]:
    """Context manager: the library does not merge ranks by itself: it would count ranks of one share twice."""
    modules: list[Any] = [module for _, module in stateful_modules(metric)]
    before = [(module, getattr(module, "_to_sync", None)) for module in modules]
    for module in modules:
        module._to_sync = False
    try:
        yield
    finally:
        for module, value in before:
            module._to_sync = value
