"""Trial of a plan: a block's forward on meta tensors, in which what is cut is a DTensor and all else is plain."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.experimental import implicit_replication
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map
from typing_extensions import override

from unipar_mesh.tensor.cut_tensors import (
    SentByTensors,
    cut_like,
    cut_sequence,
    cut_tensor,
    lifted,
    mark_sources,
    mesh_of,
    origin_of,
    part_of,
    place_of,
    rest_of_index,
    sizes_behind,
    sources_of,
)
from unipar_mesh.tensor.cuts import Cut, Rewrite, is_linear, is_transposed, linear_part
from unipar_mesh.tensor.rules import (
    DROPOUTS,
    LITERALS,
    PRODUCTS,
    RANDOM,
    SIZES,
    SPLITS,
    VIEWS,
    bound_arguments,
    is_cut_elsewhere,
    name_of_call,
    part_dimension,
    pieces_along,
    place_of_number,
)
from unipar_mesh.tensor.sites import BLOCK, frames_to, line_of, run_block, site_of

_unseen: Any = torch._C.DisableTorchFunction  # pyright: ignore[reportPrivateUsage]

WHOLE: tuple[int, ...] = (0,)
"""Way of a matrix that is not to be cut; every other way is the sizes of its groups."""


class CannotCut(Exception):
    """End of a trial: a call needs what is cut as a whole."""

    def __init__(self, reason: str, sources: Sequence[str] = ()) -> None:
        super().__init__(reason)
        self.reason, self.sources = reason, tuple(sources)
        self.calls = 0
        """Number of calls that were made before."""


class OtherGroups(Exception):
    """End of a trial: a projection's output is taken apart at these places, so it is several in one."""

    def __init__(self, name: str, bounds: Iterable[int]) -> None:
        super().__init__(name)
        self.name, self.bounds = name, tuple(sorted(set(bounds)))


@final
class Trial(TorchFunctionMode):
    """One run of a block's forward on meta tensors, with its linear layers cut as it comes."""

    def __init__(self, block: nn.Module, ranks: int, ways: Mapping[str, tuple[int, ...]], *, training: bool) -> None:
        """`block` is a copy on meta, whose linear layers get another forward here."""
        super().__init__()
        self.block, self.mesh, self.ranks, self.ways = block, mesh_of(ranks), ranks, ways
        self.names = {id(m): n for n, m in block.named_modules()}
        self.cuts: dict[str, Cut] = {}
        self.used: set[str] = set()
        self.sites: dict[str, list[Rewrite]] = {}
        self.shapes: dict[str, list[tuple[int, ...] | None]] = {}
        self.blame: dict[str, tuple[str, ...]] = {}
        self.lines: dict[str, str] = {}
        self.sent = SentByTensors()
        self.calls = 0
        self.length: int | None = None
        """Length of the sequence, if that is what is cut."""

        self.instead: Callable[[Any, Any, Any, str], Any] | None = None  # for a call that cannot be made on a part

        block.train(training)
        own = [n for n, m in block.named_modules() if isinstance(m, nn.MultiheadAttention)]
        for name, module in block.named_modules():
            if name in own:
                _set_forward(module, self._attention(name, module))
            elif is_linear(module) and name.rpartition(".")[0] not in own:
                _set_forward(module, self._linear(name, module))

    def run(self, args: Any, kwargs: Any) -> None:
        """Run it to its end; raise CannotCut or OtherGroups if the plan does not hold."""
        try:
            with implicit_replication(), self.sent, self:
                out = run_block(self.block.forward, args, kwargs)
            _require_whole(out)
        except CannotCut as e:
            e.calls = self.calls
            raise

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        cut = [x for x in tree_leaves((args, kwargs)) if isinstance(x, DTensor)]
        frames = frames_to(BLOCK)
        self.calls += 1
        key = site_of(func, frames, self.names)
        if not cut:
            out = func(*args, **kwargs)
            self._note(key, out, ())
            return out
        sources = tuple(dict.fromkeys(s for x in cut for s in sources_of(x)))
        name = name_of_call(func)
        self.lines[key] = f"{name} at {line_of(frames)}"
        known = list(self.sites.get(key, ()))
        try:
            out = self._call(name, func, args, kwargs, cut, key)
        except OtherGroups:
            raise
        except Exception as e:
            if self.instead is None:
                reason = e.reason if isinstance(e, CannotCut) else self._sentence(name, line_of(frames), e)
                raise CannotCut(reason, getattr(e, "sources", ()) or sources) from e
            self.sites[key] = known
            out = self.instead(func, args, kwargs, key)
        for x in tree_leaves(out):
            if isinstance(x, DTensor):
                mark_sources(x, sources)
        self._note(key, out, sources)
        return out

    def _sentence(self, name: str, line: str, e: Exception) -> str:
        """Return why a call cannot be made on a part."""
        text = str(e).splitlines()[0][:160] if str(e) else type(e).__name__
        if name in LITERALS and (m := re.search(r"\(size (\d+)\) is not evenly divisible", text)):
            return f"{self.ranks} does not divide the {m[1]} heads or parts that {name} at {line} makes of its output"
        asked = "DeviceMesh" in text or "group" in text  # for ranks to send to: the trial's mesh has none
        return f"{name} at {line} needs it whole" + ("" if asked else f": {text}")

    def _note(self, key: str, out: Any, sources: tuple[str, ...]) -> None:
        """Keep the shape that a rank's own part of the result has."""
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
                local = x.to_local() if isinstance(x, DTensor) else x
                self.shapes.setdefault(key, []).append(tuple(local.shape))
                if sources:
                    self.blame[key] = sources

    def note_site(self, key: str, rewrite: Rewrite) -> None:
        """Note that a call is to be rewritten."""
        known = self.sites.setdefault(key, [])
        if rewrite not in known:
            known.append(rewrite)

    # One call with something cut among its arguments

    def _call(self, name: str, func: Any, args: Any, kwargs: Any, cut: list[DTensor], key: str) -> Any:
        x = cut[0]
        dim, groups = place_of(x)
        if name in SIZES:
            along = kwargs.get("dim", args[1] if len(args) > 1 else None)
            if along is None or along % x.ndim == dim:
                self.note_site(key, Rewrite("size", dim - x.ndim))
            return func(*args, **kwargs)
        if func.__name__ == "__get__" and name not in ("T", "mT", "H", "mH", "data", "real", "imag"):
            return func(*args, **kwargs)  # dtype, device, requires_grad
        if name in RANDOM:
            raise CannotCut(f"{name} draws random numbers for a part of an activation")
        if self.length is not None and name in PRODUCTS and x is args[0] and dim < x.ndim - 1:
            others = tree_leaves((args[1:], kwargs))
            if all(y.ndim <= 2 for y in others if isinstance(y, Tensor) and not isinstance(y, DTensor)):
                return self._product(func, args, kwargs, x, key)
        if name in DROPOUTS:
            self.note_site(key, Rewrite("dropout", dim - x.ndim, groups=groups))
            return x
        if name == "scaled_dot_product_attention":
            return self._scaled_dot_product(args, kwargs, key)
        if name in SPLITS:
            taken = self._taken_apart(name, func, args, kwargs, x, key)
            if taken is not None:
                return taken
        if sizes_behind(x) is not None:
            raise CannotCut(f"{name} comes before its output is taken apart")
        if name == "cat":  # a cache begins with an empty tensor
            parts = [t for t in args[0] if t.numel() or t.ndim > 1]
            args = (parts, *args[1:])
        args, kwargs = self._joined(name, args, kwargs, cut, key)
        before = self.sent.times
        if name == "__iter__":
            out: Any = iter(x.unbind(0))
            out = list(out)
        else:
            out = func(*args, **kwargs)
        if self.sent.times > before:
            raise CannotCut(f"{self.lines[key]} needs it whole")
        out = tree_map(partial(self._result, key=key), out)
        if self.length is not None and any(
            is_cut_elsewhere(y, self.length, x if name in VIEWS else None) for y in tree_leaves(out)
        ):
            raise CannotCut(f"{self.lines[key]} needs it whole")
        first = next((y for y in tree_leaves(out) if isinstance(y, DTensor)), None)
        if name in LITERALS and first is not None:
            place = place_of_number(name, args, kwargs, place_of(first)[0], first.ndim)
            if place is not None:
                self.note_site(key, Rewrite("sizes", place))
        return iter(out) if name == "__iter__" else out

    def _result(self, y: Any, key: str) -> Any:
        if not isinstance(y, DTensor):
            return y
        placement = y.placements[0]
        if placement.is_partial():
            raise CannotCut(f"{self.lines[key]} adds up over what is cut")
        if placement.is_replicate():
            return y.to_local()
        return y

    def _joined(self, name: str, args: Any, kwargs: Any, cut: list[DTensor], key: str) -> Any:
        """Return the arguments with whole tensors made DTensors, the part of them where the call pairs elements."""
        arguments: list[tuple[tuple[str | int, ...], int | None]] = []
        groups = place_of(cut[0])[1]

        def lift(path: Any, value: Any, first: str | int) -> Any:
            if not isinstance(value, Tensor) or isinstance(value, DTensor):
                return value
            way: tuple[str | int, ...] = (first, *(getattr(k, "idx", getattr(k, "key", 0)) for k in path))
            dim = part_dimension(name, way, value, cut[0], place_of(cut[0])[0])
            if dim is not None or value.requires_grad:
                arguments.append((way, dim))
            if dim is None:
                return DTensor.from_local(value, self.mesh, [Replicate()], run_check=False)
            if self.length is not None:
                return cut_sequence(value, self.mesh, dim)
            return cut_tensor(part_of(value, dim, groups, self.ranks), self.mesh, dim, groups)

        args = tuple(lifted(value, lift, i) for i, value in enumerate(args))
        kwargs = {k: lifted(value, lift, k) for k, value in kwargs.items()}
        if arguments:
            self.note_site(key, Rewrite("part", arguments=tuple(arguments), groups=groups))
        return args, kwargs

    def _product(self, func: Any, args: Any, kwargs: Any, x: DTensor, key: str) -> Any:
        """Return the product of rows that are cut with a whole matrix."""
        others = [*((i, y) for i, y in enumerate(args) if i), *kwargs.items()]
        if arguments := tuple(((way,), None) for way, y in others if isinstance(y, Tensor) and y.requires_grad):
            self.note_site(key, Rewrite("part", arguments=arguments))
        out = func(x.to_local(), *args[1:], **kwargs)
        return cut_like(out, self.mesh, place_of(x)[0], (*x.shape[:-1], *out.shape[x.ndim - 1 :]))

    def _scaled_dot_product(self, args: Any, kwargs: Any, key: str) -> Any:
        bound = bound_arguments(args, kwargs)
        q, k, v, mask = (bound[n] for n in ("query", "key", "value", "attn_mask"))
        cut = next(t for t in (q, k, v) if isinstance(t, DTensor)) if not isinstance(q, DTensor) else q
        dim, groups = place_of(cut)
        if dim == cut.ndim - 1 and cut.ndim > 2:
            raise CannotCut(f"{self.ranks} does not divide the {cut.shape[-3]} heads of {self.lines[key]}")
        if dim - cut.ndim > -3 or groups > 1:
            raise CannotCut(f"{self.lines[key]} needs it whole")
        if not isinstance(q, DTensor):
            raise CannotCut(f"{self.lines[key]}: the keys are cut and the queries are whole")
        dim -= cut.ndim
        arguments: list[tuple[tuple[str | int, ...], int | None]] = []
        local: dict[str, Any] = {}
        for i, (n, t) in enumerate((("query", q), ("key", k), ("value", v), ("attn_mask", mask))):
            if isinstance(t, DTensor):
                if place_of(t) != (dim + t.ndim, 1):
                    raise CannotCut(f"{self.lines[key]}: its arguments are cut along different dimensions")
                local[n] = t.to_local()
                continue
            if t is None:
                continue
            size = t.shape[dim] if t.ndim >= -dim else 1
            if size not in (1, q.shape[dim]):
                raise CannotCut(f"{self.lines[key]}: the keys have {size} heads, which {self.ranks} does not divide")
            part = dim if size > 1 else None
            way = (n,) if n in kwargs else (i,)
            if part is not None or t.requires_grad:
                arguments.append((way, part))
            local[n] = t if part is None else part_of(t, part + t.ndim, 1, self.ranks)
        if arguments:
            self.note_site(key, Rewrite("part", arguments=tuple(arguments)))
        if float(bound["dropout_p"]) > 0:
            self.note_site(key, Rewrite("dropout attention", dim))
        shape = (*local["query"].shape[:-1], v.shape[-1])
        out = local["query"].new_empty(shape) + 0 * local["query"].sum()  # keeps the gradient's flag
        return cut_tensor(out, self.mesh, dim + out.ndim, 1)

    def _taken_apart(self, name: str, func: Any, args: Any, kwargs: Any, x: DTensor, key: str) -> Any:
        """Return the pieces of a fused projection's output; None if the call does not touch the cut dimension."""
        dim, groups = place_of(x)
        width = x.shape[dim]
        pieces = pieces_along(name, args, kwargs, x.ndim, dim, width)
        if pieces is None:
            return None
        bounds = sorted({0, width, *(n for piece in pieces for n in piece)})
        sizes = sizes_behind(x) or (width // groups,) * groups
        known = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
        if not set(bounds) <= set(known):
            if (origin := origin_of(x, self.cuts, width, self.block)) is None:
                raise CannotCut(f"{self.lines[key]} takes it apart along the cut")
            raise OtherGroups(origin, {*bounds, *(known if sizes_behind(x) or groups > 1 else ())})
        if name not in ("chunk", "unsafe_chunk"):
            self.note_site(key, Rewrite("pieces", dim - x.ndim))
        local, out = x.to_local(), list[Any]()
        for start, stop in pieces:
            inner = [n for n in known if start <= n <= stop]
            if len(inner) > 2:
                raise CannotCut(f"{self.lines[key]} takes several projections at once")
            part = local.narrow(dim, start // self.ranks, (stop - start) // self.ranks)
            out.append(cut_tensor(part, self.mesh, dim, 1))
        if name == "__getitem__":  # what else the index asks for
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            return rest_of_index(out[0], index, dim)
        return out[0] if name == "narrow" else tuple(out)

    # Modules with a matrix

    def _linear(self, name: str, module: Any) -> Callable[..., Any]:
        whole_forward = module.forward
        transposed = is_transposed(module)

        def forward(x: Tensor) -> Tensor:
            weight, bias = module.weight, module.bias
            rows = weight.shape[1 if transposed else 0]
            if isinstance(x, DTensor):
                dim, groups = place_of(x)
                if dim != x.ndim - 1 or sizes_behind(x) is not None:
                    return whole_forward(x)
                if self.ways.get(name) == WHOLE:
                    raise CannotCut(f"{name} is to stay whole, and its input is cut", sources_of(x))
                cut = Cut("row", groups)
                self._agree(name, cut)
                self.used.update(sources_of(x))
                with _unseen():
                    local = linear_part(cut, "weight", weight, transposed=transposed, rank=0, ranks=self.ranks)
                    y = x.to_local() @ (local if transposed else local.T)
                    return y if bias is None else y + bias
            sizes = self.ways.get(name, (rows,))
            if sizes == WHOLE or any(n % self.ranks for n in sizes):
                return whole_forward(x)
            equal = len(set(sizes)) == 1
            cut = Cut("column", len(sizes), () if equal else sizes)
            self._agree(name, cut)
            with _unseen():
                local = linear_part(cut, "weight", weight, transposed=transposed, rank=0, ranks=self.ranks)
                y = x @ (local if transposed else local.T)
                if bias is not None:
                    y = y + linear_part(cut, "bias", bias, transposed=transposed, rank=0, ranks=self.ranks)
                out = cut_tensor(y, self.mesh, y.ndim - 1, len(sizes) if equal else 1)
            own: Any = out
            own._unipar_sources = (name,)
            if not equal:
                own._unipar_sizes = sizes
            return out

        return forward

    def _agree(self, name: str, cut: Cut) -> None:
        """Refuse a matrix that is used in two ways."""
        if self.cuts.setdefault(name, cut) != cut:
            raise CannotCut(f"{name} is used with a whole input and with one that is cut")

    def _attention(self, name: str, module: Any) -> Callable[..., Any]:
        whole_forward = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if any(isinstance(x, DTensor) for x in tree_leaves((args, kwargs))):
                raise CannotCut(f"{name}: torch's MultiheadAttention takes nothing that is cut")
            weights = kwargs.get("need_weights", args[4] if len(args) > 4 else True)
            by_head = weights and not kwargs.get("average_attn_weights", True)
            plain = module.bias_k is None and not module.add_zero_attn and not by_head
            if self.ways.get(name) != WHOLE and plain and module.num_heads % self.ranks == 0:
                self.cuts[name], self.cuts[f"{name}.out_proj"] = Cut("column", 3), Cut("row")
                self.used.add(name)
            with _unseen():
                return whole_forward(*args, **kwargs)

        return forward


def _require_whole(out: Any) -> None:
    for leaf in tree_leaves(out):
        if isinstance(leaf, DTensor):
            raise CannotCut("its output leaves the block", sources_of(leaf))


def _set_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    module.forward = forward
