"""Tensor parallelism of one block: which matrices are cut and how, found by trying it on meta tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from unipar.errors import TaskError
from unipar_mesh.tensor.block_calls import kind_of_call
from unipar_mesh.tensor.cuts import BlockPlan, Cut, Rewrite, cut_parameters, is_linear, is_transposed
from unipar_mesh.tensor.metas import meta_arguments, meta_block
from unipar_mesh.tensor.rewrites import PartCalls
from unipar_mesh.tensor.sites import BLOCK, frames_to, site_of
from unipar_mesh.tensor.tensor_parallel import arm_block
from unipar_mesh.tensor.tensor_trial import WHOLE, CannotCut, OtherGroups, Trial

KINDS = ("column", "row", "whole")
SHAPES = {"size", "sizes", "pieces"}
"""Kinds of rewrites that change sizes alone: a block that asks for no literal sizes needs none of them."""


def derive_block_plan(
    block: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    mesh: DeviceMesh | int,
    wanted_kinds: Mapping[str, str] | None = None,
) -> BlockPlan:
    """Return how this many ranks, or those of a mesh of one dimension, can cut a block that is called like this.

    No values are needed, no process group and no other rank.
    `wanted_kinds`: kinds by pattern of names in the block, which win.
    """
    ranks = mesh if isinstance(mesh, int) else mesh.size()
    plan = Derivation(meta_block(block), *meta_arguments(args, kwargs), ranks, wanted_kinds or {}).plan()
    return replace(plan, call=kind_of_call(args, kwargs))


def plan_other_call(block: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], plan: BlockPlan) -> BlockPlan:
    """Return the plan of a whole block, with the same cuts, for calls like this; raise CannotCut if there is none."""
    sites = Derivation(meta_block(block), *meta_arguments(args, kwargs), plan.ranks, {}).sites_with(plan.cuts)
    return replace(plan, sites=sites, sequence=None, call=kind_of_call(args, kwargs))


@final
class Derivation:
    """Search for a plan of one block; its last trials tell which calls need more than parts of matrices."""

    def __init__(self, block: nn.Module, args: Any, kwargs: Any, ranks: int, wanted_kinds: Mapping[str, str]) -> None:
        self.block, self.args, self.kwargs, self.ranks = block, args, kwargs, ranks
        own = [n for n, m in block.named_modules() if isinstance(m, nn.MultiheadAttention)]
        self.matrices: dict[str, Any] = {
            n: m
            for n, m in block.named_modules()
            if n and (n in own or (is_linear(m) and n.rpartition(".")[0] not in own))
        }
        self.ways: dict[str, tuple[int, ...]] = {"": WHOLE}  # a block that is one matrix has nothing to pair it with
        self.tried: dict[str, set[tuple[int, ...]]] = {}
        self.reasons: dict[str, str] = {}
        self.calls: dict[str, int] = {}
        self.trials = 0
        self.last: tuple[Trial, ...] = ()
        """Trials of the plan that was found, in training and in evaluation."""

        self.wanted = self._kinds_of_matrices(wanted_kinds)
        """Kind that the task names for each matrix it speaks of."""

        for name, kind in self.wanted.items():
            if kind == "whole":
                self._keep_whole(name, "the task's tensor() says so")

    def _kinds_of_matrices(self, wanted_kinds: Mapping[str, str]) -> dict[str, str]:
        wanted: dict[str, str] = {}
        for pattern, kind in wanted_kinds.items():
            if kind not in KINDS:
                raise TaskError(f"tensor() says {kind!r} for {pattern!r}; return one of {', '.join(KINDS)}")
            wanted |= {n: kind for n in self.matrices if fnmatchcase(n, pattern)}
        return wanted

    def _keep_whole(self, name: str, reason: str) -> None:
        if (kind := self.wanted.get(name)) in ("column", "row"):
            raise TaskError(f"tensor() says {kind} for {name}, which cannot be: {reason}; leave {name} out of it")
        self.ways[name] = WHOLE
        self.reasons.setdefault(name, reason)

    def plan(self) -> BlockPlan:
        """Return the plan, once a trial has come to its end."""
        for name, module in self.matrices.items():
            width = self._width(module)
            if width % self.ranks:
                what = "heads" if isinstance(module, nn.MultiheadAttention) else "outputs"
                self.reasons[name] = f"{self.ranks} does not divide its {width} {what}"
                if isinstance(module, nn.MultiheadAttention):
                    self._keep_whole(name, self.reasons[name])
        derived = self._derive()
        for name in self.matrices:
            kind = self.wanted.get(name)
            cut = derived.cuts.get(name)
            if kind in ("column", "row") and (cut is None or cut.kind != kind):
                fed = (
                    "a row needs an input that is cut" if kind == "row" else "its input is cut or T does not divide it"
                )
                raise TaskError(f"tensor() says {kind} for {name}, which cannot be: {fed}; leave {name} out of it")
            if cut is None and name not in self.reasons:
                self.reasons[name] = "the block did not call it"
        return BlockPlan(derived.cuts, self._uncut(derived.cuts), self.trials, self.ranks, derived.sites)

    def sites_with(self, cuts: Mapping[str, Cut]) -> Mapping[str, tuple[Rewrite, ...]]:
        """Return the calls to rewrite if matrices are cut like this; raise CannotCut where that cannot be."""
        for name, module in self.matrices.items():
            if (cut := cuts.get(name)) is None:
                self.ways[name] = WHOLE
            elif cut.kind == "column" and not isinstance(module, nn.MultiheadAttention):
                self.ways[name] = cut.sizes or (self._width(module) // cut.groups,) * cut.groups
        try:
            derived = self._tried()
        except CannotCut:
            raise
        except OtherGroups as e:
            raise CannotCut(f"the output of {e.name} is taken apart at other places", (e.name,)) from e
        except Exception as e:
            raise CannotCut(_no_values(e)) from e
        if other := [name for name, cut in derived.cuts.items() if cuts.get(name) != cut]:
            raise CannotCut(f"{other[0]} would be cut in another way", other)
        return derived.sites

    def _derive(self) -> BlockPlan:
        while True:
            try:
                return self._tried()
            except OtherGroups as e:
                self._regroup(e)
            except CannotCut as e:
                if not self._gave_one_up(e):
                    return self._nothing(e.reason)
            except TaskError:
                raise
            except Exception as e:
                return self._nothing(_no_values(e))

    def _nothing(self, reason: str) -> BlockPlan:
        """Return a plan in which all is whole."""
        for name in self.matrices:
            self.reasons[name] = reason
            self._keep_whole(name, reason)
        return BlockPlan({}, {}, self.trials, self.ranks)

    def _width(self, module: Any) -> int:
        if isinstance(module, nn.MultiheadAttention):
            return module.num_heads
        return module.weight.shape[1 if is_transposed(module) else 0]

    def _uncut(self, cuts: Mapping[str, Cut]) -> dict[str, str]:
        """Return every matrix that is not cut, by name, with the reason."""
        uncut = {n: self.reasons.get(n, "") for n in self.matrices if n not in cuts}
        parts = cut_parameters(self.block, BlockPlan(cuts, {}, 0, self.ranks))
        for name, p in self.block.named_parameters():
            module = name.rpartition(".")[0]
            if p.ndim >= 2 and name not in parts and not any(module == n or module.startswith(f"{n}.") for n in uncut):
                uncut[name] = "it is not the weight of a linear layer"
        return uncut

    def _gave_one_up(self, e: CannotCut) -> bool:
        """Try a column that led to this in other groups, else leave it whole; return False if none is left."""
        columns = [n for n in e.sources if self.ways.get(n) != WHOLE]
        columns = [n for n in columns if n not in self.wanted] or columns
        if not columns:
            return False
        # the one without which a trial comes furthest; of equal ones the last
        best = columns[-1] if len(columns) == 1 else max(reversed(columns), key=self._progress_without)
        self._next_way(best, e)
        return True

    def _progress_without(self, name: str) -> float:
        """Return how many calls a trial makes before it fails, if one matrix stays whole."""
        ways = {**self.ways, name: WHOLE}
        while True:
            trial = Trial(meta_block(self.block), self.ranks, ways, training=True)
            self.trials += 1
            try:
                trial.run(*self._arguments())
            except CannotCut:
                return trial.calls
            except OtherGroups as e:
                sizes = tuple(b - a for a, b in zip(e.bounds, e.bounds[1:], strict=False))
                if any(n % self.ranks for n in sizes) or ways.get(e.name) == sizes:
                    return trial.calls
                ways[e.name] = sizes
            else:
                return float("inf")

    def _next_way(self, name: str, e: CannotCut) -> None:
        module = self.matrices[name]
        if e.calls >= self.calls.get(name, 0):  # the reason of the way that came furthest
            self.reasons[name], self.calls[name] = e.reason, e.calls
        width = self._width(module)
        tried = self.tried.setdefault(name, set())
        tried.add(self.ways.get(name, (width,)))
        if not isinstance(module, nn.MultiheadAttention):
            inputs = module.weight.numel() // width
            for groups in dict.fromkeys((width // inputs if width % inputs == 0 else 0, 3, 2)):
                way = (width // groups,) * groups if groups > 1 and width % (groups * self.ranks) == 0 else WHOLE
                if way != WHOLE and way not in tried:
                    self.ways[name] = way
                    return
        self._keep_whole(name, self.reasons[name])

    def _regroup(self, e: OtherGroups) -> None:
        sizes = tuple(b - a for a, b in zip(e.bounds, e.bounds[1:], strict=False))
        odd = [n for n in sizes if n % self.ranks]
        known = self.tried.setdefault(e.name, set())
        known.add(self.ways.get(e.name, (sum(sizes),)))
        if odd or sizes in known:
            reason = f"{self.ranks} does not divide the {odd[0]} outputs of one of its parts" if odd else "taken apart"
            self._keep_whole(e.name, reason)
        else:
            self.ways[e.name] = sizes

    def _tried(self) -> BlockPlan:
        """Return a plan that holds in training and evaluation, or raise what is in its way."""
        merged: dict[str, tuple[Rewrite, ...]] = {}
        trials = list[Trial]()
        for training in (True, False):
            trial = Trial(meta_block(self.block), self.ranks, self.ways, training=training)
            self.trials += training
            trial.run(*self._arguments())
            unused = [n for n, c in trial.cuts.items() if c.kind == "column" and n not in trial.used]
            if unused:
                raise CannotCut("no other matrix takes its output", unused[-1:])
            if trials and trial.cuts != trials[0].cuts:
                differing = [n for n in trial.cuts | trials[0].cuts if trial.cuts.get(n) != trials[0].cuts.get(n)]
                raise CannotCut("training and evaluation use it in different ways", differing[-1:])
            for key, rewrites in trial.sites.items():
                merged[key] = tuple(dict.fromkeys((*merged.get(key, ()), *rewrites)))
            trials.append(trial)
        cuts, self.last = trials[0].cuts, tuple(trials)
        failed: CannotCut | None = None
        for without in (SHAPES, {"size"}, set[str]()):
            kept = {k: tuple(r for r in rs if r.kind not in without) for k, rs in merged.items()}
            plan = BlockPlan(cuts, {}, 0, self.ranks, {k: rs for k, rs in kept.items() if rs})
            try:
                for trial in trials:
                    self.rehearse(plan, trial)
            except CannotCut as e:
                failed = e
            else:
                return plan
        assert failed is not None
        raise failed

    def _arguments(self) -> tuple[Any, Any]:
        return meta_arguments(self.args, self.kwargs)

    def rehearse(self, plan: BlockPlan, trial: Trial, change: Callable[[nn.Module], None] | None = None) -> None:
        """Run the block on one rank's parts, and raise CannotCut where a shape is not that of the trial's part.

        `change` is made to the copy of the block that runs. The error tells how many calls were right.
        """
        expected = Expected(trial.shapes, trial.blame, trial.lines)
        rehearse(self.block, plan, self._arguments(), expected, training=trial.block.training, change=change)


def _no_values(e: Exception) -> str:
    """Return why a block cannot be tried."""
    text = (str(e).splitlines() or [""])[0][:160]
    return f"the block does not run on meta tensors: {type(e).__name__}: {text}"


@dataclass(frozen=True)
class Expected:
    """Findings of a trial, with which a run on parts must agree: the first rank's shapes by site, and words."""

    shapes: dict[str, list[tuple[int, ...] | None]]
    blame: dict[str, tuple[str, ...]]
    lines: dict[str, str]


def rehearse(
    block: nn.Module,
    plan: BlockPlan,
    call: tuple[Any, Any],
    expected: Expected,
    *,
    training: bool,
    rank: int = 0,
    change: Callable[[nn.Module], None] | None = None,
) -> Any:
    """Run a block on one rank's parts; return its results, or raise CannotCut where a shape is not the expected one."""
    block = meta_block(block).train(training)
    if change is not None:
        change(block)
    for name, cut in cut_parameters(block, plan).items():
        owner, _, key = name.rpartition(".")
        module: Any = block.get_submodule(owner)
        old = module._parameters[key]
        part = torch.empty(cut.local_shape(), dtype=old.dtype, device="meta")
        module._parameters[key] = nn.Parameter(part, requires_grad=old.requires_grad)
    watched = list[_Rehearsal]()

    def watch(armed: nn.Module, mode: PartCalls) -> Any:
        watched.append(_Rehearsal(armed, mode, expected))
        return watched[0]

    arm_block(block, plan, None, rank=rank, watch=watch)
    args, kwargs = call
    try:
        return block(*args, **kwargs)
    except CannotCut as e:
        e.calls = watched[0].calls
        raise
    except Exception as e:
        text = str(e).splitlines()[0][:160] if str(e) else type(e).__name__
        error = CannotCut(f"its part does not fit: {text}", watched[0].last or tuple(plan.cuts)[-1:])
        error.calls = watched[0].calls
        raise error from e


@final
class _Rehearsal(TorchFunctionMode):
    """Mode of a run on parts, which compares every result's shape with that of the trial."""

    def __init__(self, block: nn.Module, mode: PartCalls, trial: Expected) -> None:
        super().__init__()
        self._names = {id(m): n for n, m in block.named_modules()}
        self._mode, self._trial = mode, trial
        self._left = {key: list(shapes) for key, shapes in trial.shapes.items()}
        self.last: tuple[str, ...] = ()
        self.calls = 0

    @property
    def span(self) -> Any:
        """Part of the sequence that the mode inside works on."""
        return self._mode.span

    @span.setter
    def span(self, value: Any) -> None:
        self._mode.span = value

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        key = site_of(func, frames_to(BLOCK), self._names)
        blame = self._trial.blame.get(key, ())
        self.last = blame or self.last
        out = self._mode.__torch_function__(func, types, args, kwargs)
        if key in self._left:
            for x in tree_leaves(out):
                if isinstance(x, Tensor):
                    expected = self._left[key].pop(0) if self._left[key] else None
                    if expected != tuple(x.shape):
                        text = f"{self._trial.lines.get(key, func.__name__)} gives {tuple(x.shape)} for {expected}"
                        raise CannotCut(text, blame or self.last)
        self.calls += 1
        return out
