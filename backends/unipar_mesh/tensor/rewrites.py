"""Calls in a block's forward, made on parts: literal sizes divided, whole tensors cut, masks of one process."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from unipar_mesh.sequence.sequence_collectives import Span, join_sequence
from unipar_mesh.tensor.cuts import Cut, Rewrite
from unipar_mesh.tensor.rules import (
    bound_arguments,
    name_of_call,
    numbers_of,
    place_in_index,
    with_numbers,
)
from unipar_mesh.tensor.sites import (
    BLOCK,
    frames_to,
    innermost_frame,
    key_of,
    leaf_of,
    leaf_of_site,
    module_of_site,
    site_of,
)
from unipar_mesh.tensor.sum_collectives import enter


@final
class _Table:
    """Sites of calls of one kind, and what is known of the places where a block's program is."""

    def __init__(self, sites: Mapping[str, tuple[Rewrite, ...]]) -> None:
        self.sites, self.functions = sites, functions_at(sites)
        self.wanted = {leaf_of_site(site) for site in sites}
        self.modules = {module_of_site(site) for site in sites}
        self.leaves: dict[tuple[int, int], bool] = {}
        self.known: dict[tuple[Any, ...], tuple[Rewrite, ...]] = {}


class PartCalls(TorchFunctionMode):
    """Mode in which the calls at a plan's sites are made on this rank's part."""

    def __init__(
        self,
        block: nn.Module,
        sites: Mapping[str, tuple[Rewrite, ...]],
        rank: int,
        ranks: int,
        group: dist.ProcessGroup | None,
    ) -> None:
        super().__init__()
        self._names = {id(m): n for n, m in block.named_modules()}
        self._rank, self._ranks, self._group = rank, ranks, group
        self._tables: dict[int, _Table] = {}
        self._table = self.table_of(sites)
        self.active = False
        self.span: Span | None = None
        """This rank's part of the sequence in this pass, where that is cut."""

    def table_of(self, sites: Mapping[str, tuple[Rewrite, ...]]) -> _Table:
        """Return the table of these sites, which are kept."""
        if id(sites) not in self._tables:
            self._tables[id(sites)] = _Table(sites)
        return self._tables[id(sites)]

    def take(self, sites: Mapping[str, tuple[Rewrite, ...]]) -> bool:
        """Rewrite the calls at these sites from now on; return whether it is for the first time."""
        new = id(sites) not in self._tables
        self._table = self.table_of(sites)
        return new

    @property
    def modules(self) -> set[str]:
        """Names of the modules whose own methods make the calls that are rewritten."""
        return self._table.modules

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, table = kwargs or {}, self._table
        if func.__name__ in table.functions and (frame := innermost_frame()) is not None:
            leaf = (id(frame.f_code), frame.f_lasti)
            is_leaf = table.leaves.get(leaf)
            if is_leaf is None:  # once for each place: most are no site
                is_leaf = table.leaves[leaf] = leaf_of(func, frame) in table.wanted
            if is_leaf:
                frames = frames_to(BLOCK)
                key = key_of(frames)
                rewrites = table.known.get(key)
                if rewrites is None:
                    rewrites = table.known[key] = table.sites.get(site_of(func, frames, self._names), ())
                if rewrites:
                    return self._made(func, args, kwargs, rewrites)
        return func(*args, **kwargs)

    def _made(self, func: Any, args: Any, kwargs: Any, rewrites: tuple[Rewrite, ...]) -> Any:
        name = name_of_call(func)
        attention = None
        for rewrite in rewrites:
            match rewrite.kind:
                case "size":
                    return self._size(name, args, kwargs, rewrite)
                case "sizes":
                    args, kwargs = self._divided(name, args, kwargs, rewrite)
                case "pieces":
                    args, kwargs = self._piece(name, args, kwargs, rewrite.dim)
                case "part":
                    for way, dim in rewrite.arguments:
                        args, kwargs = _with(args, kwargs, way, partial(self._part, dim=dim, rewrite=rewrite))
                case "join":
                    for way, dim in rewrite.arguments:
                        args, kwargs = _with(args, kwargs, way, partial(self._join, dim=dim))
                case "dropout":
                    return self._dropout(func, args, kwargs, rewrite)
                case _:
                    attention = rewrite
        if attention is not None and float(bound_arguments(args, kwargs)["dropout_p"]) > 0:
            return self._attention(bound_arguments(args, kwargs), attention)
        return func(*args, **kwargs)

    def _size(self, name: str, args: Any, kwargs: Any, rewrite: Rewrite) -> Any:
        """Return sizes of the whole."""
        x: Tensor = args[0]
        full_shape = self._whole_shape(x, rewrite)
        if name in ("numel", "nelement"):
            return math.prod(full_shape)
        if name == "__len__":
            return full_shape[0]
        along = kwargs.get("dim", args[1] if len(args) > 1 else None)
        return full_shape if along is None else full_shape[along]

    def _whole_shape(self, x: Tensor, rewrite: Rewrite) -> torch.Size:
        dim = rewrite.dim + x.ndim
        full_length = self._sequence.length if rewrite.sequence else x.shape[dim] * self._ranks
        return torch.Size(full_length if d == dim else n for d, n in enumerate(x.shape))

    @property
    def _sequence(self) -> Span:
        assert self.span is not None
        return self.span

    def _divided(self, name: str, args: Any, kwargs: Any, rewrite: Rewrite) -> Any:
        numbers, _ = numbers_of(name, args, kwargs) or ([], False)
        if numbers[rewrite.dim] != -1:
            numbers[rewrite.dim] = self._sequence.count if rewrite.sequence else numbers[rewrite.dim] // self._ranks
        return with_numbers(name, args, kwargs, numbers)

    def _piece(self, name: str, args: Any, kwargs: Any, dim: int) -> Any:
        n = self._ranks
        if name == "__getitem__":
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            place = place_in_index(index, args[0].ndim, dim + args[0].ndim)
            assert place is not None
            old = index[place]
            start, stop = (None if i is None else int(i / n) for i in (old.start, old.stop))
            return (args[0], (*index[:place], slice(start, stop), *index[place + 1 :])), kwargs
        if name == "narrow":
            arguments = {"dim": dim, **dict(zip(("dim", "start", "length"), args[1:], strict=False)), **kwargs}
            return (args[0], arguments["dim"], arguments["start"] // n, arguments["length"] // n), {}
        for key in ("split_size", "split_size_or_sections", "split_sizes", "indices_or_sections", "indices"):
            if key in kwargs:
                return args, {**kwargs, key: _over(kwargs[key], n, name)}
        return (args[0], _over(args[1], n, name), *args[2:]), kwargs

    def _part(self, x: Tensor, dim: int | None, rewrite: Rewrite) -> Tensor:
        x = enter(x, self._group)
        return x if dim is None else self._own(x, dim, rewrite)

    def _join(self, x: Tensor, dim: int | None) -> Tensor:
        return x if dim is None else join_sequence(x, dim, self._sequence)

    def _own(self, x: Tensor, dim: int, rewrite: Rewrite) -> Tensor:
        if x.shape == (0,):  # torch.cat passes over it, such as the empty cache of keys in transformers
            return x
        if rewrite.sequence:
            return x if x.shape[dim] == 1 else x.narrow(dim, self._sequence.start, self._sequence.count)
        parts = [x.narrow(dim, *s) for s in Cut("column", rewrite.groups).spans(x.shape[dim], self._rank, self._ranks)]
        return torch.cat(parts, dim) if len(parts) > 1 else parts[0]

    def _mask(self, shape: torch.Size, like: Tensor, rewrite: Rewrite, p: float, order: list[int]) -> Tensor:
        """Return this rank's part of the mask that one process draws; kept elements are scaled."""
        ones = torch.empty_permuted(shape, order, dtype=like.dtype, device=like.device).fill_(1.0)
        mine = self._own(F.dropout(ones, p, True), rewrite.dim + len(shape), rewrite)
        return mine.clone() if rewrite.sequence else mine  # autograd keeps it, and must not keep all of the mask

    def _dropout(self, func: Any, args: Any, kwargs: Any, rewrite: Rewrite) -> Tensor:
        names = ("input", "p", "training" if func is F.dropout else "train", "inplace")
        arguments: dict[str, Any] = {
            "p": 0.5,
            names[2]: True,
            "inplace": False,
            **dict(zip(names, args, strict=False)),
            **kwargs,
        }
        x: Tensor = arguments["input"]
        full = self._whole_shape(x, rewrite)
        if not arguments[names[2]] or arguments["p"] == 0.0 or full.numel() == 0:
            return func(*args, **kwargs)
        order = sorted(range(x.ndim), key=lambda d: (-x.stride(d), d))  # as `empty_like` lays out its mask
        if torch.empty_permuted(x.shape, order, device="meta").stride() != x.stride():
            order = list(range(x.ndim))
        mask = self._mask(full, x, rewrite, arguments["p"], order)
        inplace = arguments["inplace"] or func.__name__ == "dropout_"
        return x.mul_(mask) if inplace else x * mask

    def _attention(self, arguments: dict[str, Any], rewrite: Rewrite) -> Tensor:
        """Return attention by products, with the part of the mask that one process's products draw."""
        q, k, v, mask = arguments["query"], arguments["key"], arguments["value"], arguments["attn_mask"]
        castable = q.device.type != "meta" and q.dtype != torch.float64  # as autocast has it
        if castable and torch.is_autocast_enabled(q.device.type):
            q, k, v = (x.to(torch.get_autocast_dtype(q.device.type)) for x in (q, k, v))
        if arguments["enable_gqa"]:
            k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
        scale = q.shape[-1] ** -0.5 if arguments["scale"] is None else arguments["scale"]
        scores = (q * math.sqrt(scale)) @ (k * math.sqrt(scale)).transpose(-2, -1)
        if arguments["is_causal"]:
            mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
        if mask is not None and mask.dtype == torch.bool:
            scores = scores.masked_fill(mask.logical_not(), -math.inf)
        elif mask is not None:
            scores = scores + mask
        weights = scores.softmax(-1)
        if mask is not None and mask.dtype == torch.bool:
            weights = weights.masked_fill(weights.isnan(), 0.0)  # rows in which nothing is allowed
        shape = self._whole_shape(weights, rewrite)
        weights = weights * self._mask(shape, weights, rewrite, arguments["dropout_p"], list(range(len(shape))))
        return weights.to(v.dtype) @ v


def _over(value: Any, ranks: int, name: str) -> Any:
    """Return sizes or places divided by the ranks; a number of sections stays."""
    if isinstance(value, int):
        return value if name == "tensor_split" else value // ranks
    return [n // ranks for n in value]


def _with(args: Any, kwargs: Any, way: tuple[str | int, ...], change: Any) -> tuple[Any, Any]:
    """Return arguments of which the one at `way` is changed."""

    def changed(value: Any, rest: tuple[str | int, ...]) -> Any:
        if not rest:
            return change(value) if isinstance(value, Tensor) else value
        if isinstance(value, dict):
            return {k: changed(v, rest[1:]) if k == rest[0] else v for k, v in value.items()}
        return [changed(v, rest[1:]) if i == rest[0] else v for i, v in enumerate(value)]

    first, *rest = way
    if isinstance(first, str):
        return args, {**kwargs, first: changed(kwargs[first], tuple(rest))}
    return tuple(changed(v, tuple(rest)) if i == first else v for i, v in enumerate(args)), kwargs


def functions_at(sites: Iterable[str]) -> frozenset[str]:
    """Return the names under which a mode sees the functions that are called at these sites."""
    functions = {leaf_of_site(site)[0] for site in sites}
    return frozenset(functions - {"shape"} | ({"__get__"} if "shape" in functions else set()))
